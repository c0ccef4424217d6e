//! The world of a sequence: spaces, what is alive of their gathers, and what is known of what they
//! map.
//!
//! Values that borrow a space are kept from operation to operation. The compiler cannot see that
//! the space stays where it is meanwhile; so spaces are behind pointers, and what borrows one is
//! counted: a space is taken out, or edited exclusively, only when nothing borrows it. An operation
//! takes what it uses out of its place, and an interrupt finds only what is left.

// There are few of them, and their types say what belongs together.
#![allow(clippy::large_enum_variant, clippy::result_large_err, clippy::type_complexity)]

mod memory;
mod places;
mod spaces;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicU64;

use tablewright::flush::{Completed, Held, Issued};
use tablewright::guest::SlotCell;
use tablewright::shared::{Beside, DeferredReclaim, Protecting, SharedSpace};
use tablewright::{
    Address, AddressError, AddressSpace, Attrs, Change, EditError, Format, Half, Leaf, Level,
    Liveness, Memory, Pa, Perms, Span,
};
use tablewright_machine::{Cpu, Fault, Machine, Mapper, Request as Access, Rule, Time, Tlbi, Want};

use super::operations::{Kind, Operation};
use crate::Bug;
use crate::dice::Dice;
use crate::platform::{Control, Faulty};

pub use places::{Asked, Exclusive, Gathering, Place, Slot, Tables};

/// The most spaces at a time.
pub const SPACES: usize = 3;
/// The first address of memory that the machine does not have, and that any space may map.
pub const FAR: u64 = 1 << 45;
/// Pages in the first part of a window.
pub const PAGES: u64 = 8;

/// How a space comes to its end.
#[derive(Clone, Copy, Default)]
pub struct Way {
    /// Not at all, if it is live.
    pub refuses: bool,
    /// The engine has it forgotten.
    pub retires: bool,
    /// It is not given away.
    pub in_place: bool,
}

/// A shared edit that has begun.
pub struct Begun<'m> {
    mapper: Mapper<'m>,
    look: u64,
    /// The number of interrupts that had come before.
    interrupts: u64,
}

/// A shared edit that has come to its end, and relies on what it has found.
pub struct Edited<'m> {
    batch: u64,
    mapper: Mapper<'m>,
    range: (u64, u64),
    /// When it began.
    look: u64,
    /// When it was over, if nothing came between.
    end: Option<u64>,
}

type IssuedBeside<'m, F> = Issued<F, Faulty<'m>, Beside<'m, F, Faulty<'m>>>;

/// The state of one CPU.
pub struct Local<'m, F: Format, L> {
    pub loaded: Cell<Option<usize>>,
    pub gathers: RefCell<Vec<Gathering<'m, F>>>,
    pub issued_beside: RefCell<Vec<(u64, usize, IssuedBeside<'m, F>)>>,
    pub completed: RefCell<Vec<(u64, Completed<F, Faulty<'m>>)>>,
    pub deferred: RefCell<Vec<(u64, DeferredReclaim<F, Faulty<'m>>)>>,
    pub held: RefCell<Vec<(u64, Held<Leaf<F>>)>>,
    edited: RefCell<Vec<Edited<'m>>>,
    pub protecting: RefCell<Vec<(usize, Protecting<'m, F, Faulty<'m>>)>>,
    pub requests: RefCell<Vec<Asked>>,
    pub guest: L,
}

impl<F: Format, L: Default> Default for Local<'_, F, L> {
    fn default() -> Self {
        Self {
            loaded: Cell::new(None),
            gathers: RefCell::default(),
            issued_beside: RefCell::default(),
            completed: RefCell::default(),
            deferred: RefCell::default(),
            held: RefCell::default(),
            edited: RefCell::default(),
            protecting: RefCell::default(),
            requests: RefCell::default(),
            guest: L::default(),
        }
    }
}

/// The guests of a world, if its format translates their addresses.
pub trait Guests<'m, F: Format>: Sized + 'm {
    type Local: Default;

    fn make(world: &World<'m, F, Self>, space: Tables<'m, F>) -> Result<Self, Tables<'m, F>>;
    fn space(&self) -> &Tables<'m, F>;
    fn into_space(self) -> Tables<'m, F>;
    fn operate(world: &World<'m, F, Self>, cpu: usize, kind: Kind, dice: &Dice);
    /// Drops something, or forgets it. Returns whether there was something.
    fn lose(world: &World<'m, F, Self>, cpu: usize, dice: &Dice, forget: bool) -> bool;
    /// Ends all that a CPU has left.
    fn retire(world: &World<'m, F, Self>, cpu: usize);
    /// Forgets all of it: the run was cut short.
    fn forget(local: &Self::Local);
}

/// No guests.
pub enum NoGuests {}

impl<'m, F: Format> Guests<'m, F> for NoGuests {
    type Local = ();

    fn make(_: &World<'m, F, Self>, space: Tables<'m, F>) -> Result<Self, Tables<'m, F>> {
        Err(space)
    }
    fn space(&self) -> &Tables<'m, F> {
        match *self {}
    }
    fn into_space(self) -> Tables<'m, F> {
        match self {}
    }
    fn operate(_: &World<'m, F, Self>, _: usize, _: Kind, _: &Dice) {}
    fn lose(_: &World<'m, F, Self>, _: usize, _: &Dice, _: bool) -> bool {
        false
    }
    fn retire(_: &World<'m, F, Self>, _: usize) {}
    fn forget((): &()) {}
}

/// Slots of a guest.
const SLOTS: usize = 4;
/// Words of its bitmap.
pub const WORDS: usize = 16;

/// Memory that a guest borrows.
#[derive(Default)]
pub struct SideMemory {
    pub cells: [SlotCell; SLOTS],
    pub words: [AtomicU64; WORDS],
}

/// All of it.
pub struct World<'m, F: Format, G: Guests<'m, F>> {
    pub machine: &'m Machine,
    pub control: &'m Control,
    dice: Dice,
    pub slots: [Slot<'m, F, G>; SPACES],
    pub locals: [Local<'m, F, G::Local>; 2],
    /// Pages of the machine that are mapped, or about to be, by other than a guest's host; and how
    /// many times.
    pub frames: RefCell<HashMap<u64, u32>>,
    /// Pages of the hosts of guests, dead or alive.
    pub host_frames: RefCell<HashSet<u64>>,
    /// Boxes that have been given away, in which guests keep their slots.
    pub memory: RefCell<Vec<*mut SideMemory>>,
    /// Tables may have been leaked, by contract.
    pub leaked: Cell<bool>,
    /// Some mappings have tables that deny execution. Not everywhere: such spaces are not shared.
    pub denying: bool,
    /// Nothing is global but what a page is replaced by, a fork hands on, or a change makes so: an
    /// invalidation that is missing then is not covered by another.
    few_globals: bool,
    numbers: Cell<u64>,
    /// A CPU that has to be alone.
    solo: Cell<Option<usize>>,
    parked: [Cell<bool>; 2],
    /// Operations of each CPU that are under way and may let a guest write.
    lets_write: [Cell<u32>; 2],
    /// The number of them that have begun.
    pub begun_to_let: Cell<u64>,
    interrupts: [Cell<u64>; 2],
    /// The next interrupt of each CPU, if it is not just any.
    planned: [Cell<Option<Kind>>; 2],
    done: [Cell<bool>; 2],
    /// A CPU whose values are about to come to their end.
    leaving: [Cell<bool>; 2],
    /// Visitors of each CPU until one unwinds or does something else; 0: none does.
    pub visits: [Cell<u32>; 2],
    /// Each CPU edits without having anything forgotten first.
    pub hurried: [Cell<bool>; 2],
    /// Reclaims whose tables might still be walked when their CPU was done.
    later: RefCell<Vec<(u64, DeferredReclaim<F, Faulty<'m>>)>>,
    later_held: RefCell<Vec<(u64, Held<Leaf<F>>)>>,
}

/// A vector's element, taken out.
pub fn take_any<T>(dice: &Dice, from: &RefCell<Vec<T>>) -> Option<T> {
    let mut from = from.borrow_mut();
    let index = dice.index(from.len().max(1));
    (index < from.len()).then(|| from.swap_remove(index))
}

/// The payload of a visitor that unwinds.
pub struct Planned;

/// Whether something unwinds, as it is meant to.
pub fn unwinds(what: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(what)) {
        Ok(()) => false,
        Err(payload) if payload.is::<Planned>() => true,
        Err(payload) => resume_unwind(payload),
    }
}

/// Does something, and `after` it something else, if it ends or unwinds as it is meant to.
pub fn guarded<T>(what: impl FnOnce() -> T, after: impl FnOnce(bool)) -> T {
    match catch_unwind(AssertUnwindSafe(what)) {
        Ok(result) => {
            after(false);
            result
        }
        Err(payload) => {
            if payload.is::<Planned>() {
                after(true);
            }
            resume_unwind(payload)
        }
    }
}

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    pub const PAGE: u64 = 1 << F::PAGE_SHIFT;
    pub const BLOCK: u64 = 1 << (F::PAGE_SHIFT + F::INDEX_BITS);

    pub fn new(machine: &'m Machine, control: &'m Control, seed: u64) -> Self {
        let dice = Dice::new(seed);
        // Windows a table of blocks apart, if there is room for that.
        let apart = F::PAGE_SHIFT + 2 * F::INDEX_BITS;
        let apart = match apart + 2 < F::INPUT_BITS {
            true => 1 << apart,
            false => 16 * Self::BLOCK,
        };
        let slot = |number: usize| {
            let upper = F::Input::SIGNED && dice.once_in(3);
            let start = match (upper, F::HALVES) {
                (false, _) => 0,
                (true, true) => u64::MAX << F::INPUT_BITS,
                (true, false) => u64::MAX << (F::INPUT_BITS - 1),
            };
            Slot {
                base: start + number as u64 * apart,
                half: match upper && F::HALVES {
                    true => Half::Upper,
                    false => Half::Lower,
                },
                recent: Cell::new((0, 0)),
                place: RefCell::new(Place::Empty),
                plat: Cell::new(None),
                attached: Cell::new(false),
                users: Cell::new(0),
                version: Cell::new(0),
                steady: Cell::new(false),
                model: RefCell::default(),
                silent: Cell::new(false),
                mapping: Cell::new(false),
                wide: Cell::new(false),
                protected: Cell::new(false),
            }
        };
        Self {
            machine,
            control,
            slots: [slot(0), slot(1), slot(2)],
            dice,
            locals: Default::default(),
            frames: RefCell::default(),
            host_frames: RefCell::default(),
            memory: RefCell::default(),
            leaked: Cell::new(false),
            denying: seed.is_multiple_of(3),
            few_globals: seed % 4 == 2,
            numbers: Cell::new(0),
            solo: Cell::new(None),
            parked: Default::default(),
            lets_write: Default::default(),
            begun_to_let: Cell::new(0),
            interrupts: Default::default(),
            planned: Default::default(),
            done: Default::default(),
            leaving: Default::default(),
            visits: Default::default(),
            hurried: Default::default(),
            later: RefCell::default(),
            later_held: RefCell::default(),
        }
    }

    pub fn is_arm(&self) -> bool {
        self.machine.architecture().breaks()
    }

    pub fn fail(&self, what: impl Into<String>) {
        self.machine.report(Rule::Program, what.into());
    }

    pub fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        self.machine.check(holds, what);
    }

    /// A number that nothing else has: of a space, of what a gather has gathered. Even.
    pub fn number(&self) -> u64 {
        self.numbers.update(|number| number + 2);
        self.numbers.get()
    }

    /// Returns a number for what a gather of a guest has gathered, whose pages are its host's.
    pub fn silent_number(&self) -> u64 {
        self.number() | 1
    }

    /// For what is gathered in a place.
    pub fn number_for(&self, slot: &Slot<'m, F, G>) -> u64 {
        match slot.silent.get() {
            true => self.silent_number(),
            false => self.number(),
        }
    }

    /// The platform of some space.
    pub fn any_platform(&self) -> Option<Faulty<'m>> {
        self.slots.iter().find_map(|slot| slot.plat.get())
    }

    pub fn local(&self, cpu: usize) -> &Local<'m, F, G::Local> {
        &self.locals[cpu]
    }

    // ---- A sequence ----

    /// All operations of one CPU, and the end of what they have left.
    pub fn live(&self, cpu: Cpu<'_>, operations: &[Operation]) {
        let id = cpu.id();
        for &operation in operations.iter().filter(|it| it.cpu == id) {
            self.yield_to_solo(id);
            self.step(id, operation, false);
            cpu.spend(Time::ns(20 + operation.seed % 200));
        }
        self.leaving[id].set(true);
        self.retire(id);
        self.hand_over();
        self.done[id].set(true);
    }

    /// An interrupt: an operation in the midst of another.
    pub fn interrupt(&self) {
        let id = self.machine.cpu().id();
        let kind = self.planned[id].take().unwrap_or_else(|| super::draw(&self.dice));
        let seed = self.dice.next();
        let operation = Operation { number: 0, cpu: id, kind, seed };
        self.step(id, operation, true);
    }

    /// Each visitor calls this: one that is due unwinds, or does something else.
    pub fn visited(&self) {
        let visits = &self.visits[self.machine.cpu().id()];
        match visits.get() {
            0 => return,
            1 => visits.set(0),
            more => return visits.set(more - 1),
        }
        if std::thread::panicking() {
            return;
        }
        match self.dice.once_in(2) {
            true => self.machine.handle(|| self.interrupt()),
            false => resume_unwind(Box::new(Planned)),
        }
    }

    fn step(&self, cpu: usize, operation: Operation, nested: bool) {
        let dice = Dice::new(operation.seed);
        let alone = matches!(
            operation.kind,
            Kind::Share
                | Kind::Unshare
                | Kind::Destroy
                | Kind::MakeGuest
                | Kind::IntoSpace
                | Kind::UnwindUnmap
                | Kind::UnwindReclaim
                | Kind::UnwindShared
                | Kind::Visit
        );
        if nested && (alone || matches!(operation.kind, Kind::ProtectStep | Kind::ProtectAndSplit))
        {
            return;
        }
        let lets_write = &self.lets_write[cpu];
        if operation.kind.lets_write() {
            self.slots.iter().for_each(|slot| slot.protected.set(false));
            lets_write.update(|count| count + 1);
            self.begun_to_let.update(|count| count + 1);
        }
        if !nested {
            self.control.tables.set(match dice.below(6) {
                0 => dice.below(6) as u32,
                _ => 60,
            });
            if dice.once_in(4) {
                let after = 1 + dice.below(24) as u32;
                self.control.interrupt[cpu].set(after);
            }
        }
        if alone {
            self.enter_solo(cpu);
        }
        match operation.kind {
            Kind::Pause => self.machine.cpu().spend(Time::ns(dice.below(4000))),
            Kind::Access => (0..1 + dice.below(4)).for_each(|_| self.access(cpu, &dice)),
            Kind::Load => self.load_at(cpu, dice.index(SPACES)),
            kind => self.operate(cpu, kind, &dice),
        }
        if alone {
            self.leave_solo();
        }
        if operation.kind.lets_write() {
            lets_write.update(|count| count - 1);
        }
        if !nested {
            self.control.interrupt[cpu].set(0);
            self.planned[cpu].set(None);
            self.control.tables.set(u32::MAX);
        }
    }

    /// Shows others what this CPU has stored.
    pub fn hand_over(&self) {
        drop(self.machine.new_lock().acquire());
    }

    /// Whether what another CPU is given comes to its end there.
    pub fn takes_values(&self, cpu: usize) -> bool {
        !self.leaving[cpu].get()
    }

    fn yield_to_solo(&self, cpu: usize) {
        while self.solo.get().is_some_and(|other| other != cpu) {
            if !self.parked[cpu].get() {
                self.hand_over();
                self.parked[cpu].set(true);
            }
            self.machine.cpu().spend(Time::ns(500));
            self.machine.cpu().order();
        }
        self.parked[cpu].set(false);
    }

    fn enter_solo(&self, cpu: usize) {
        self.solo.set(Some(cpu));
        let other = 1 - cpu;
        while !self.parked[other].get() && !self.done[other].get() {
            self.machine.cpu().spend(Time::ns(500));
            self.machine.cpu().order();
        }
    }

    fn leave_solo(&self) {
        self.hand_over();
        self.solo.set(None);
    }

    // ---- Spaces ----

    /// Has everything forgotten that was changed in a space, and takes out what was detached.
    pub fn complete(&self, cpu: usize, slot: &Slot<'m, F, G>, exclusive: &mut Exclusive<'m, F>) {
        let (batch, gather) = match exclusive.gather.take() {
            Some(it) => it,
            None => (self.number_for(slot), exclusive.space().gather()),
        };
        let completed = gather.issue().complete();
        self.release_all(cpu, batch, |held| completed.release(held));
        completed.finish(|leaf| self.out(batch, &leaf));
        exclusive.touched = false;
        exclusive.murky = false;
    }

    /// A shared edit of a range, which is refused where it has to be. When it is complete, it may
    /// rely on what it has found.
    pub fn watch<T: std::fmt::Debug>(
        &self,
        cpu: usize,
        (slot, batch): (usize, u64),
        span: Span<F::Input>,
        edit: impl FnOnce() -> Result<T, EditError<F::Input>>,
    ) -> Result<T, EditError<F::Input>> {
        let begun = self.begin(slot);
        let result = guarded(edit, |unwound| {
            if unwound {
                // What was changed until then is forgotten with the rest.
                self.note(cpu, batch, span, self.begin(slot));
            }
        });
        let slot = &self.slots[slot];
        let (translates, aligned) = (self.translates(slot, span), span.is_aligned(F::PAGE_SHIFT));
        let right = match &result {
            Ok(_) => translates && aligned,
            Err(EditError::InputOutOfRange) => !translates,
            Err(EditError::Misaligned) => !aligned,
            Err(_) => true,
        };
        self.check(right, || format!("a shared edit of {span} comes to {result:?}"));
        if result.is_ok() {
            self.note(cpu, batch, span, begun);
        }
        result
    }

    /// A shared edit begins.
    pub fn begin(&self, slot: usize) -> Option<Begun<'m>> {
        let mapper = self.slots[slot].plat.get()?.mapper;
        let interrupts = self.interrupts[self.machine.cpu().id()].get();
        Some(Begun { mapper, look: mapper.look(), interrupts })
    }

    /// It has come to its end.
    pub fn note(&self, cpu: usize, batch: u64, span: Span<F::Input>, begun: Option<Begun<'m>>) {
        let range = (span.start().bits(), span.last().bits());
        let alone = |begun: &Begun<'m>| begun.interrupts == self.interrupts[cpu].get();
        let edited = begun.map(|begun| Edited {
            batch,
            mapper: begun.mapper,
            range,
            look: begun.look,
            end: alone(&begun).then(|| begun.mapper.look()),
        });
        self.locals[cpu].edited.borrow_mut().extend(edited);
    }

    /// Ends the obligations of a gather's number, which is complete.
    pub fn reclaimed(&self, cpu: usize, batch: u64) {
        let edited = &self.locals[cpu].edited;
        let done: Vec<_> = edited.borrow_mut().extract_if(.., |it| it.batch == batch).collect();
        for it in done {
            it.mapper.rely(it.range, it.look);
            if let Some(end) = it.end {
                it.mapper.rely_on_own(it.range, end);
            }
        }
    }

    /// Passes the obligations of a gather's number on, which is complete on another CPU.
    pub fn pass_on(&self, cpu: usize, to: usize, batch: u64) {
        let of = |it: &mut Edited<'m>| it.batch == batch;
        let passed = self.locals[cpu].edited.borrow_mut().extract_if(.., of).collect::<Vec<_>>();
        let passed = passed.into_iter().map(|it| Edited { end: None, ..it });
        self.locals[to].edited.borrow_mut().extend(passed);
    }

    /// Releases all that is held of a batch.
    pub fn release_all(
        &self,
        cpu: usize,
        batch: u64,
        release: impl Fn(Held<Leaf<F>>) -> Result<Leaf<F>, Held<Leaf<F>>>,
    ) {
        let held = std::mem::take(&mut *self.locals[cpu].held.borrow_mut());
        let mut others = Vec::new();
        for (of, held) in held {
            if of != batch {
                others.push((of, held));
                continue;
            }
            match release(held) {
                Ok(leaf) => self.out(batch, &leaf),
                Err(_) => self.fail("a leaf is not released by its own flush"),
            }
        }
        self.locals[cpu].held.borrow_mut().append(&mut others);
    }

    // ---- The CPU ----

    /// One access to a window of the space that is loaded.
    fn access(&self, cpu: usize, dice: &Dice) {
        let Some(index) = self.locals[cpu].loaded.get() else {
            return;
        };
        let slot = &self.slots[index];
        let page = match dice.once_in(3) {
            true => {
                let (first, size) = self.addresses(slot.base, dice);
                let (first, size) = (first & !(Self::PAGE - 1), size.max(1));
                let at = match dice.once_in(2) {
                    true => first,
                    false => first.wrapping_add(size - 1),
                };
                at & !(Self::PAGE - 1)
            }
            false => self.page(slot.base, dice).start().bits(),
        };
        let want = dice.pick(&[Want::Read, Want::Read, Want::Write, Want::Write]);
        let user = F::Input::SIGNED && dice.once_in(3);
        self.touch(cpu, slot, page, want, user);
    }

    /// One access to a page of the window of the space that is loaded, which is that in a place.
    pub fn touch(&self, cpu: usize, slot: &Slot<'m, F, G>, page: u64, want: Want, user: bool) {
        let other = |it: &Slot<'m, F, G>| !std::ptr::eq(it, slot);
        let elsewhere = self.slots.iter().any(|it| other(it) && it.wide.get());
        if !slot.attached.get() || !Self::is_in_window(slot, page) || elsewhere {
            return;
        }
        let va = page + 8 * cpu as u64;
        let request = Access { va, want, user };
        self.machine.cpu().order();
        let (version, steady) = (slot.version.get(), slot.steady.get());
        let expected = match steady {
            true => slot.model.borrow().at(va),
            false => None,
        };
        if want == Want::Write && !user && slot.protected.get() {
            self.write_lulled(slot, va);
        }
        let result = self.machine.touch(request);
        if !steady || version != slot.version.get() {
            return;
        }
        // What handlers of faults have mapped, others may remember to be missing: they handle a
        // fault that finds it mapped.
        let spurious = self.machine.architecture().invalid_entries_cached
            && !matches!(*slot.place.borrow(), Place::Exclusive(_));
        let right = match (want, user) {
            (Want::Read, false) => Perms::READ,
            (Want::Read, true) => Perms::USER_READ,
            (_, false) => Perms::WRITE,
            (_, true) => Perms::USER_WRITE,
        };
        let wrong = match (expected, result) {
            (None, Ok(_)) => true,
            (Some((pa, perms)), Ok(reached)) => {
                // Without the bit that says whose the memory is.
                pa != reached & ((1 << F::OUTPUT_BITS) - 1) || !perms.contains(right)
            }
            // What permits nothing is not mapped for a walker.
            (Some((_, perms)), Err(Fault::Translation { .. })) => !perms.is_empty() && !spurious,
            (Some((_, perms)), Err(Fault::Permission { .. })) => {
                want == Want::Read && perms.contains(right)
            }
            _ => false,
        };
        self.check(!wrong, || {
            format!("{want:?} of {va:#x}, which is {expected:x?}, comes to {result:x?}")
        });
    }

    /// Whether nothing is under way on the other CPU that may let a guest write.
    pub fn is_alone_in_writing(&self, cpu: usize) -> bool {
        self.lets_write[1 - cpu].get() == 0
    }

    /// After so many calls an interrupt comes, which does this.
    pub fn plan(&self, cpu: usize, kind: Kind, after: u32) {
        self.planned[cpu].set(Some(kind));
        self.control.interrupt[cpu].set(after);
    }

    /// A guest writes where nothing lets it.
    pub fn write_lulled(&self, slot: &Slot<'m, F, G>, at: u64) {
        let request = Access { va: at, want: Want::Write, user: false };
        let before = slot.protected.get();
        let written = self.machine.touch(request).is_ok();
        self.check(!(written && before && slot.protected.get()), || {
            format!("{at:#x} was protected, and is written")
        });
    }

    // ---- The end ----

    /// All that this CPU has left comes to its end.
    fn retire(&self, cpu: usize) {
        if self.control.is(Bug::LastGatherForgotten) {
            return;
        }
        let local = &self.locals[cpu];
        G::retire(self, cpu);
        let gathers = std::mem::take(&mut *local.gathers.borrow_mut());
        for mut it in gathers {
            let deferred = it.gather.issue().complete();
            self.reclaimed(cpu, it.batch);
            self.release_all(cpu, it.batch, |held| deferred.release(held));
            local.deferred.borrow_mut().push((it.batch, deferred));
            drop(it.gather);
            self.slots[it.slot].users.update(|users| users - 1);
        }
        let issued = std::mem::take(&mut *local.issued_beside.borrow_mut());
        for (batch, slot, issued) in issued {
            let deferred = issued.complete();
            self.reclaimed(cpu, batch);
            local.deferred.borrow_mut().push((batch, deferred));
            self.slots[slot].users.update(|users| users - 1);
        }
        // A start goes on when the other CPU's walks are over, and nothing at the root is claimed;
        // one that cannot is left.
        let starts = std::mem::take(&mut *local.protecting.borrow_mut());
        for (slot, mut start) in starts {
            for _ in 0..20 {
                if start.step() {
                    break;
                }
                self.machine.cpu().spend(Time::ns(200));
            }
            drop(start);
            self.slots[slot].users.update(|users| users - 1);
        }
        let completed = std::mem::take(&mut *local.completed.borrow_mut());
        for (batch, completed) in completed {
            self.release_all(cpu, batch, |held| completed.release(held));
            self.refuse(cpu, batch, |held| completed.release(held));
            completed.finish(|leaf| self.out(batch, &leaf));
        }
        for index in 0..SPACES {
            self.with_exclusive_at(cpu, index, |slot, exclusive| {
                self.complete(cpu, slot, exclusive);
            });
        }
        let mut deferred = std::mem::take(&mut *local.deferred.borrow_mut());
        self.later.borrow_mut().append(&mut deferred);
        let mut held = std::mem::take(&mut *local.held.borrow_mut());
        self.later_held.borrow_mut().append(&mut held);
        local.requests.borrow_mut().clear();
    }

    /// When all CPUs are done: what was put off is reclaimed, every space is taken down, and all
    /// memory is free again.
    pub fn end(&self) {
        let later = self.later.take();
        self.locals[0].held.borrow_mut().append(&mut self.later_held.borrow_mut());
        for (batch, deferred) in later {
            self.release_all(0, batch, |held| deferred.release(held));
            match deferred.try_complete() {
                Ok(completed) => completed.finish(|leaf| self.out(batch, &leaf)),
                Err(_) => self.fail("no walk is under way, and a deferred may still be walked"),
            }
        }
        self.locals[0].held.borrow_mut().clear();
        for index in 0..SPACES {
            let users = self.slots[index].users.get();
            self.check(users == 0, || format!("the run has miscounted: {users} users are left"));
            self.unguest(index);
            self.unshare(0, index);
            if let Place::Exclusive(it) = &mut *self.slots[index].place.borrow_mut() {
                it.home = 0;
            }
            self.destroy(0, index, Way::default());
        }
        // What was leaked is not used any more.
        let mut frames: Vec<u64> = self.frames.take().into_keys().collect();
        frames.extend(self.host_frames.take());
        frames.sort_unstable();
        for frame in frames {
            self.machine.give_page(Pa::new(frame));
        }
        let (alive, used) = (self.control.alive.get(), self.machine.memory().used());
        self.check(alive >= 0 && alive == used as i64, || {
            format!("{used} frames are in use, and {alive} tables")
        });
        self.check(alive == 0 || self.leaked.get(), || format!("{alive} tables were leaked"));
    }
}

impl<'m, F: Format, G: Guests<'m, F>> Drop for World<'m, F, G> {
    /// A run that was cut short leaves its spaces where they are; the host has its memory back.
    fn drop(&mut self) {
        for slot in &self.slots {
            match slot.place.replace(Place::Empty) {
                Place::Exclusive(it) => {
                    let Exclusive { space, gather, .. } = it;
                    std::mem::forget(gather);
                    // SAFETY: it came out of a box, and nothing uses it any more.
                    drop(unsafe { Box::from_raw(space) });
                }
                // SAFETY: as above.
                Place::Shared(shared) => drop(unsafe { Box::from_raw(shared) }),
                // SAFETY: as above.
                Place::Guest(guest) => drop(unsafe { Box::from_raw(guest) }),
                Place::Empty | Place::Taken => {}
            }
        }
        for local in &self.locals {
            std::mem::forget(local.gathers.take());
            std::mem::forget(local.issued_beside.take());
            std::mem::forget(local.protecting.take());
            G::forget(&local.guest);
        }
        for memory in self.memory.take() {
            // SAFETY: it came out of a box, and the guests are gone.
            drop(unsafe { Box::from_raw(memory) });
        }
    }
}

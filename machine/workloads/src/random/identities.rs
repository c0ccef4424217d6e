//! Spaces that are invalidated by identity: CPUs go from space to space and edit what others have
//! loaded, hardware tells all of them, and there are so few identifiers that spaces are given
//! others all the time, while they are edited too.
//!
//! All spaces map the same addresses, each to pages of its own, in which its number stands.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;

use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Format, Half, Hooks, Invalidation, Level,
    Mapping, Pa, Platform, Span, TableLink, Va,
};
use tablewright_machine::{Cpu, Machine, Outcome, RunError, Time, Tlbi};

use super::{Bug, Dice, announce, check_no_frames};
use crate::platform::{Control, Faulty, Stage};

/// Spaces at a time: more than there are identifiers.
const SLOTS: usize = 12;
/// Pages of a space, in two tables.
const PAGES: u64 = 4;

/// Knowledge of a space, of all CPUs, whether it is locked or not.
struct Known<'k, 'm> {
    faulty: Faulty<'m>,
    identity: &'k Identity,
    root: Cell<Option<Pa>>,
    number: u64,
    /// CPUs that have it loaded, or are about to edit it.
    users: Cell<u32>,
    locked: Cell<bool>,
    /// For a bug: what it was loaded under first.
    first: Cell<Option<u16>>,
}

/// The platform of one space.
#[derive(Clone)]
struct Of<'k, 'm>(Rc<Known<'k, 'm>>);

// SAFETY: all but the identity is passed on; that is the slot's, in which one space is at a time
// (9.). A bug breaks promises, which is what it is for.
unsafe impl Platform for Of<'_, '_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.0.faulty.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.faulty.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.faulty.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.0.faulty.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        let id = match self.0.first.get() {
            Some(first) if self.0.faulty.control.is(Bug::IdentityOfBefore) => first,
            _ => what.id,
        };
        // Others may be given identifiers meanwhile.
        self.0.faulty.machine().cpu().order();
        self.0.faulty.invalidate(&Invalidation { id, ..*what });
    }
    fn identity_of(&self, _: Pa) -> Option<&Identity> {
        let machine = self.0.faulty.machine();
        // The engine's fence, of which the machine is not told.
        announce(machine);
        machine.cpu().order();
        Some(self.0.identity)
    }
    fn caps(&self) -> Caps {
        self.0.faulty.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.0.faulty.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.0.faulty.hooks()
    }
}

struct Process<'k, 'm, F: Format> {
    known: Rc<Known<'k, 'm>>,
    tables: RefCell<AddressSpace<F, Of<'k, 'm>>>,
}

impl<F: Format> Process<'_, '_, F> {
    fn add_user(&self, count: i32) {
        let users = &self.known.users;
        users.set(users.get().wrapping_add_signed(count));
    }
}

type Shared<'k, 'm, F> = Rc<Process<'k, 'm, F>>;

/// A place for a space. Its identity is that of one after the other.
struct Slot<'k, 'm, F: Format> {
    process: RefCell<Option<Shared<'k, 'm, F>>>,
    /// A space is in it, or comes, or goes.
    taken: Cell<bool>,
}

struct Program<'p, 'k, 'm, F: Format> {
    machine: &'m Machine,
    control: &'m Control,
    identifiers: &'k Identifiers<'k>,
    allocator: &'p RefCell<Allocator<'k>>,
    identities: &'k [Identity; SLOTS],
    slots: &'p [Slot<'k, 'm, F>],
    /// The number of them in use.
    most: u64,
    last: Cell<u64>,
}

/// The space that a CPU has loaded.
type At<'k, 'm, F> = Option<Shared<'k, 'm, F>>;

pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    control: &Control,
    dice: &Dice,
    cpus: usize,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let mut holders: Vec<Holder> = (0..cpus).map(|_| Holder::new()).collect();
    // As few as will do.
    let bits = (2 * cpus + 2).next_power_of_two().trailing_zeros();
    let mut memory = vec![0; Allocator::words(bits)];
    let allocator = Allocator::new(bits, &mut memory).expect("so many bits");
    let identifiers = Identifiers::new(&allocator, &mut holders).expect("so many identifiers");
    let identities = [const { Identity::new() }; SLOTS];
    let slots: Vec<Slot<'_, '_, F>> =
        (0..SLOTS).map(|_| Slot { process: RefCell::new(None), taken: Cell::new(false) }).collect();
    let program = Program {
        machine,
        control,
        identifiers: &identifiers,
        allocator: &RefCell::new(allocator),
        identities: &identities,
        slots: &slots,
        most: SLOTS as u64 - dice.below(8),
        last: Cell::new(0),
    };
    let seed = dice.below(1 << 48);
    let steps = 20 + dice.below(40);
    let done = Cell::new(0);
    let outcome = machine.run(|cpu| {
        let dice = Dice::of(seed, cpu.id() as u64);
        let mut at = None;
        for _ in 0..steps {
            program.step(cpu, &mut at, &dice);
            cpu.spend(dice.time());
        }
        program.switch(&mut at, None);
        done.set(done.get() + 1);
        while done.get() < cpus {
            cpu.spend(Time::ns(500));
            cpu.order();
        }
    })?;
    between(machine.digest());
    if machine.violations().is_empty() {
        machine.calm();
        (0..SLOTS).for_each(|slot| program.retire(slot));
        check_no_frames(machine);
    }
    Ok(outcome)
}

impl<'k, 'm, F: Format<Input = Va>> Program<'_, 'k, 'm, F> {
    fn step(&self, cpu: Cpu<'_>, at: &mut At<'k, 'm, F>, dice: &Dice) {
        cpu.order();
        let slot = dice.below(self.most) as usize;
        match dice.below(20) {
            0..=7 => self.look(at, dice),
            8..=12 => {
                let to = self.slots[slot].process.borrow().clone();
                self.switch(at, to.filter(|_| !dice.once_in(8)));
            }
            13..=18 => {
                let process = self.slots[slot].process.borrow().clone();
                match process {
                    Some(process) => self.edit(at, &process, dice),
                    None => self.begin(slot),
                }
            }
            _ => {
                self.retire(slot);
                self.begin(slot);
            }
        }
    }

    fn switch(&self, at: &mut At<'k, 'm, F>, to: At<'k, 'm, F>) {
        let machine = self.machine;
        if let Some(to) = &to {
            to.add_user(1);
        }
        let from = at.take();
        match &to {
            None => machine.unload(),
            Some(to) => {
                let switch = self.identify(&to.known);
                let live = switch.is_some_and(|switch| {
                    to.known.first.set(to.known.first.get().or(Some(switch.1)));
                    to.known.faulty.mapper.load_as(switch.1);
                    to.known.root.get() == Some(switch.0)
                });
                machine.check(live, || format!("a CPU is to load {switch:?}"));
            }
        }
        if let Some(from) = from {
            let same = |to: &Shared<'k, 'm, F>| to.known.number == from.known.number;
            if !to.as_ref().is_some_and(same) {
                from.known.faulty.mapper.leave();
            }
            from.add_user(-1);
        }
        *at = to;
    }

    /// Chooses the root and identifier that this CPU is to load.
    fn identify(&self, known: &Known<'_, '_>) -> Option<(Pa, u16)> {
        let machine = self.machine;
        if self.control.is(Bug::LoadedAsBefore)
            && let (Some(id), Some(root)) = (known.first.get(), known.identity.root())
        {
            return Some((root, id));
        }
        // SAFETY: the running CPU, without interrupts (1.), and the one allocator (2.); the machine
        // checks what is flushed (3.) and loaded (4.), or is to find a bug.
        unsafe {
            self.identifiers.switch(
                machine.cpu().id(),
                known.identity,
                |with| with(&mut self.allocator.borrow_mut()),
                || {
                    if !self.control.is(Bug::NothingForgottenAtSwitch) {
                        machine.tlbi(Tlbi { broadcast: false, ..Tlbi::ALL });
                        machine.dsb();
                    }
                },
            )
        }
    }

    /// Accesses of the space that is loaded.
    fn look(&self, at: &At<'k, 'm, F>, dice: &Dice) {
        let machine = self.machine;
        let Some(process) = at else {
            return;
        };
        let number = process.known.number;
        for _ in 0..1 + dice.below(4) {
            let va = page::<F>(dice.below(PAGES));
            if dice.once_in(3) {
                let _fault = machine.write(va, number);
            } else if let Ok(found) = machine.read(va) {
                machine.check(found == 0 || found == number, || {
                    format!("{va:#x} of space {number} reads {found}")
                });
            }
        }
    }

    fn lock(&self, known: &Known<'_, '_>) {
        let cpu = self.machine.cpu();
        cpu.order();
        while known.locked.replace(true) {
            cpu.spend(Time::ns(300));
            cpu.order();
        }
    }

    fn unlock(&self, known: &Known<'_, '_>) {
        announce(self.machine);
        self.machine.cpu().order();
        known.locked.set(false);
    }

    fn edit(&self, at: &At<'k, 'm, F>, process: &Shared<'k, 'm, F>, dice: &Dice) {
        process.add_user(1);
        self.lock(&process.known);
        let first = dice.below(PAGES);
        match dice.below(12) {
            0..=4 => {
                (0..PAGES).for_each(|number| self.map(process, number));
                let own = at.as_ref();
                if own.is_some_and(|own| own.known.number == process.known.number) {
                    let _fault = (self.machine).write(page::<F>(first), process.known.number);
                }
            }
            5..=7 => {
                // Two pages of different tables, or one.
                let two = [span::<F>(first), span::<F>((first + 1) % PAGES)];
                self.unmap(process, &two[..1 + dice.below(2) as usize]);
            }
            8 | 9 => {
                // A table, with whatever is in it.
                let at = page::<F>(first) & !(block::<F>() - 1);
                let table = Span::new(Va::new(at), block::<F>()).expect("a block");
                self.unmap(process, &[table]);
            }
            10 => self.replace(process, first),
            _ => {
                let mut tables = process.tables.borrow_mut();
                let mut gather = tables.gather();
                let _no_memory = gather.protect(span::<F>(first), Change::new().write_protect());
                if self.control.is(Bug::GatherForgotten) {
                    std::mem::forget(gather);
                } else {
                    self.control.during(Stage::Flushing, || gather.finish(|_| ()));
                }
            }
        }
        self.unlock(&process.known);
        process.add_user(-1);
    }

    fn map(&self, process: &Shared<'k, 'm, F>, number: u64) {
        let Some(frame) = self.machine.take_page() else {
            return;
        };
        let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
        let map = || (process.tables.borrow_mut()).map(span::<F>(number), frame, mapping);
        let mapped = self.control.during(Stage::Mapping, map);
        if mapped.is_err() {
            self.machine.give_page(frame);
        }
    }

    /// Another page comes in the place of one.
    fn replace(&self, process: &Shared<'k, 'm, F>, number: u64) {
        let Some(frame) = self.machine.take_page() else {
            return;
        };
        let mut tables = process.tables.borrow_mut();
        let mut gather = tables.gather();
        let at = Va::new(page::<F>(number));
        let held = gather.replace(at, frame, Attrs::USER_DATA);
        let old = held.map(|held| {
            let flush = || gather.flush_with(held, |_| ());
            self.control.during(Stage::Flushing, flush)
        });
        drop(gather);
        drop(tables);
        match old {
            Ok(Ok(old)) => self.machine.give_page(old.frame()),
            Ok(Err(_)) => unreachable!("it was held back by this gather"),
            // Nothing is there.
            Err(_) => self.machine.give_page(frame),
        }
    }

    /// Unmaps these with one gather.
    fn unmap(&self, process: &Shared<'k, 'm, F>, spans: &[Span<Va>]) {
        let machine = self.machine;
        let (mut held, mut frames) = (Vec::new(), Vec::new());
        let mut tables = process.tables.borrow_mut();
        let mut gather = tables.gather();
        for &span in spans {
            let _no_memory = gather.unmap(span, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
        }
        let flush = || gather.issue().complete();
        let completed = self.control.during(Stage::Flushing, flush);
        for leaf in held {
            if let Ok(leaf) = completed.release(leaf) {
                frames.push(leaf.frame());
            }
        }
        completed.finish(|leaf| frames.push(leaf.frame()));
        drop(tables);
        frames.into_iter().for_each(|frame| machine.give_page(frame));
    }

    /// A new space, if there is room for it.
    fn begin(&self, slot: usize) {
        let machine = self.machine;
        let place = &self.slots[slot];
        if place.taken.replace(true) {
            return;
        }
        let number = self.last.get() + 1;
        self.last.set(number);
        let known = Rc::new(Known {
            faulty: Faulty::new(machine, self.control),
            identity: &self.identities[slot],
            root: Cell::new(None),
            number,
            users: Cell::new(0),
            locked: Cell::new(false),
            first: Cell::new(None),
        });
        let Some(mut tables) = AddressSpace::<F, _>::new(Of(Rc::clone(&known))) else {
            place.taken.set(false);
            return;
        };
        tables.make_live();
        known.root.set(Some(tables.root()));
        known.faulty.mapper.track(tables.root(), Half::Lower);
        let process = Rc::new(Process { known, tables: RefCell::new(tables) });
        (0..PAGES).for_each(|number| self.map(&process, number));
        announce(machine);
        machine.cpu().order();
        *place.process.borrow_mut() = Some(process);
    }

    /// A space that no CPU uses goes.
    fn retire(&self, slot: usize) {
        self.machine.cpu().order();
        let place = &self.slots[slot];
        let unused = |process: &mut Shared<'k, 'm, F>| process.known.users.get() == 0;
        let process = place.process.borrow_mut().take_if(unused);
        let Some(Process { known, tables }) = process.and_then(Rc::into_inner) else {
            return;
        };
        let mut tables = tables.into_inner();
        // SAFETY: no CPU has it loaded, or will.
        self.control.during(Stage::Flushing, || unsafe { tables.retire() });
        known.faulty.mapper.detach();
        let mut frames = Vec::new();
        let destroyed = tables.destroy(|leaf| frames.push(leaf.frame()));
        self.machine.check(destroyed.is_ok(), || "a dead space is not".to_owned());
        (frames.into_iter()).for_each(|frame| self.machine.give_page(frame));
        place.taken.set(false);
    }
}

/// The memory that a table of pages translates.
fn block<F: Format>() -> u64 {
    1 << (F::PAGE_SHIFT + F::INDEX_BITS)
}

/// The address of a page: every second in the next table.
fn page<F: Format>(number: u64) -> u64 {
    (1 << 42) + number % 2 * block::<F>() + ((number / 2) << F::PAGE_SHIFT)
}

fn span<F: Format>(number: u64) -> Span<Va> {
    Span::new(Va::new(page::<F>(number)), 1 << F::PAGE_SHIFT).expect("a page")
}

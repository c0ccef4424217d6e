//! The log of what a guest writes, driven as a migration drives it.
//!
//! CPU 0 is the host's: it starts a log, copies all of the guest's memory, harvests, protects and
//! copies what was written, again and again, stops the guest, harvests for the last time, and ends
//! the log; and then once more, with another kind of log. The other CPUs run the guest, and besides
//! do what hosts do meanwhile: write for a device, move a page to another frame, split, put a block
//! together, look which pages are used. At any time they are preempted, in a handler as well.
//!
//! A page is *stale* from a write to it until it is copied. So long, the log has to know of it:
//!
//! * when a harvest begins, what is stale is found by it, or still marked after it; a page of which
//!   a mark is made just then is let off;
//! * when the guest was stopped and what was found then is copied, nothing is stale, and the copy
//!   equals the original in every word.
//!
//! What hardware has logged and the virtual CPU has not marked yet is known as well; it has when it
//! has stopped.

mod harvest;
mod host;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use tablewright::dirty::{Bitmap, Flip, Marker, ModificationLog, Ring, RingEntry};
use tablewright::guest::{
    Access, Backing, Cause, Declined, Fault, Gather, Guest, Harvest, Log, Pass, Request, Slot,
    SlotCell, Zap,
};
use tablewright::shared::{Mapped, Refused, SharedSpace};
use tablewright::{AddressSpace, Change, Entry, Format, Half, Ipa, Leaf, Level, Pa, Platform};
use tablewright_machine::{
    Cpu, Fault as Trap, Machine, Mapper, Outcome, Regime, Rule, RunError, Time, Want,
};

use super::guest::{Kind, classify, span};
use super::later::Later;
use super::{Bug, Dice, destroy};

/// Virtual CPUs, and one for the host.
pub const MOST_CPUS: usize = 5;
const VMID: u16 = 5;
/// Pages of the second slot.
const SMALL: u64 = 4;
/// The distance of the guest's slots.
const SLOT: u64 = 1 << 33;
/// The address of a block that is too large for the machine's memory, and its other frames.
const FAR: u64 = 1 << 41;
/// Entries of a ring.
const ENTRIES: usize = 4;
/// Hardware's log begins so far down: it is full after a few pages.
const INDEX: u16 = 2;
/// The number of times that a CPU waits for others, for some microseconds: where memory is cleaned
/// it may take milliseconds.
const MOST_WAITS: u32 = 4000;
/// The first word of a page that the host writes; those before it are the virtual CPUs'.
const HOST_WORDS: usize = 16;

pub fn run(
    machine: &Machine,
    bug: Option<Bug>,
    dice: &Dice,
    kind: Kind,
    cpus: usize,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    with_stage2!(kind, F => live::<F>(machine, bug, dice, cpus, between))
}

/// The place of marks of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marks {
    Bitmap,
    Flip,
    Ring,
}

/// How a log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// All is protected by a zap.
    Zap,
    /// All is protected in one step.
    Step,
    /// Nothing is protected, all is marked.
    Marked,
    /// Nothing is protected: hardware marks.
    Hardware,
    /// Nothing but large leaves is protected: hardware logs.
    Modification,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    marks: Marks,
    start: Start,
    /// Harvested pages are protected in one step.
    keep: bool,
}

impl Plan {
    fn of(dice: &Dice, hardware: bool, logs: bool) -> Self {
        let marks = dice.pick(&[Marks::Bitmap, Marks::Flip, Marks::Ring]);
        // Only a bitmap is for hardware's marks. And everything is not protected in one step where
        // hardware marks.
        let start = match (hardware, marks) {
            (true, Marks::Bitmap) if logs => dice.pick(&[
                Start::Zap,
                Start::Marked,
                Start::Hardware,
                Start::Modification,
                Start::Modification,
            ]),
            (true, Marks::Bitmap) => dice.pick(&[Start::Zap, Start::Marked, Start::Hardware]),
            (true, Marks::Flip) => dice.pick(&[Start::Zap, Start::Marked]),
            (true, Marks::Ring) => Start::Zap,
            (false, Marks::Ring) => dice.pick(&[Start::Zap, Start::Step]),
            (false, _) => dice.pick(&[Start::Zap, Start::Step, Start::Marked]),
        };
        Self { marks, start, keep: !hardware && dice.once_in(3) }
    }

    fn log(self) -> Log {
        match self.start {
            Start::Hardware => Log::ByHardware,
            Start::Modification => Log::ByModification,
            _ => Log::ByFault,
        }
    }
}

/// The log of one slot.
struct Record<'m> {
    bitmap: Bitmap<'m>,
    flip: Flip<'m>,
}

struct Page {
    slot: usize,
    /// Its number in the slot.
    index: u64,
    frame: Cell<Pa>,
    /// Its place in the block, or where it was at first.
    home: Pa,
    /// A CPU copies it, or gives it another frame.
    busy: Cell<bool>,
    /// The guest has to wait for it.
    moving: Cell<bool>,
    /// Written since it was copied.
    stale: Cell<bool>,
    /// The place that it is copied to, if it is memory of the machine.
    copy: Option<Pa>,
}

struct Vm<'a, 'm, F: Format<Input = Ipa>> {
    machine: &'m Machine,
    mapper: Mapper<'m>,
    guest: Guest<'a, F, Mapper<'m>>,
    bug: Option<Bug>,
    page: u64,
    block: u64,
    slots: Vec<Slot>,
    pages: Vec<Page>,
    records: Vec<Record<'a>>,
    /// One for each CPU.
    rings: Vec<Ring<'a>>,
    /// The log of hardware for each CPU, of pages that it makes dirty, if there is one.
    logs: Vec<Pa>,
    /// The log that is on, or about to be.
    plan: Cell<Option<Plan>>,
    /// The page that a CPU is about to mark.
    pending: Vec<Cell<Option<usize>>>,
    /// The page that a CPU marks too late.
    owed: Vec<Cell<Option<Request>>>,
    /// Handlers and edits so far, and those that are not over.
    begun: Cell<u64>,
    active: Cell<u32>,
    /// The guest is to stop, or to end; and the virtual CPUs that have stopped.
    stop: Cell<bool>,
    over: Cell<bool>,
    stopped: Cell<usize>,
    later: Later<F, Mapper<'m>>,
}

/// A CPU's edits.
type Edits<'g, 'a, 'm, F> = Gather<'g, 'a, F, Mapper<'m>>;

/// The result of a harvest.
#[derive(Default)]
struct Found {
    all: BTreeSet<usize>,
    /// Not copied yet.
    left: BTreeSet<usize>,
}

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// The guest goes on.
    Again,
    /// It is to be taken again after a while.
    Later,
    /// The ring is full.
    Full,
}

/// Whether processors log what they make dirty.
fn hardware_logs(machine: &Machine) -> bool {
    let architecture = machine.architecture();
    matches!(architecture.regime, Regime::Ept { .. }) && architecture.hardware_dirty
}

fn live<F: Format<Input = Ipa>>(
    machine: &Machine,
    bug: Option<Bug>,
    dice: &Dice,
    cpus: usize,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let mapper = machine.new_space();
    let space = loop {
        if let Some(space) = AddressSpace::<F, _>::new(mapper) {
            break space.with_id(VMID);
        }
    };
    mapper.attach(space.root(), Half::Lower, VMID);
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    // A block, single pages, or both.
    let (has_block, has_small) =
        dice.pick(&[(true, false), (true, false), (false, true), (true, true)]);
    let take_page = || {
        loop {
            if let Some(page) = machine.take_page() {
                return page;
            }
        }
    };
    let (mut slots, mut pages) = (Vec::new(), Vec::new());
    let mut add = |size: u64, used: &[u64], home: &dyn Fn(u64) -> (Pa, Option<Pa>)| {
        let id = slots.len() as u16;
        let guest = span(SLOT << id, size);
        let slot = Slot::memory(guest, SLOT << id).with_id(id);
        slots.push(Slot { page: block, ..slot });
        for &index in used {
            let (home, copy) = home(index);
            pages.push(Page {
                slot: usize::from(id),
                index,
                frame: Cell::new(home),
                home,
                busy: Cell::new(false),
                moving: Cell::new(false),
                stale: Cell::new(false),
                copy,
            });
        }
    };
    let mut base = None;
    if has_block {
        let simulated = page == 1 << 12;
        if simulated {
            base = loop {
                if let Some(base) = machine.take_pages((block / page) as usize) {
                    break Some(base);
                }
            };
        }
        let first = base.unwrap_or(Pa::new(FAR)).get();
        // At the ends of words of a bitmap, and of the table.
        add(block, &[0, 1, 2, 63, 64, block / page - 1], &|index| {
            (Pa::new(first + index * page), simulated.then(take_page))
        });
    }
    if has_small {
        let all: Vec<u64> = (0..SMALL).collect();
        add(SMALL * page, &all, &|_| (take_page(), Some(take_page())));
    }
    let mut words: Vec<Vec<AtomicU64>> = slots
        .iter()
        .map(|slot| {
            let words = 3 * (slot.guest.size() / page).div_ceil(64);
            (0..words).map(|_| AtomicU64::new(0)).collect()
        })
        .collect();
    let mut entries: Vec<[RingEntry; ENTRIES]> =
        (0..cpus).map(|_| [const { RingEntry::new() }; ENTRIES]).collect();
    let records = slots.iter().zip(&mut words).map(|(slot, words)| {
        let count = slot.guest.size() / page;
        let third = words.len() / 3;
        let mut thirds = words.chunks_mut(third);
        let mut map = || {
            let words = thirds.next().expect("three of them");
            Bitmap::new(words, count).expect("a bit for each page")
        };
        Record { bitmap: map(), flip: Flip::new(map(), map()).expect("both for the same pages") }
    });
    let rings = entries.iter_mut().map(|entries| Ring::new(entries).expect("a power of two"));
    let mut cells = [const { SlotCell::new() }; 2];
    let space = SharedSpace::new(space).expect("no code runs on it");
    let vm = Vm::<F> {
        machine,
        mapper,
        guest: Guest::new(space, &mut cells),
        bug,
        page,
        block,
        records: records.collect(),
        rings: rings.collect(),
        logs: match hardware_logs(machine) {
            true => (0..cpus).map(|_| take_page()).collect(),
            false => Vec::new(),
        },
        slots,
        pages,
        plan: Cell::new(None),
        pending: (0..cpus).map(|_| Cell::new(None)).collect(),
        owed: (0..cpus).map(|_| Cell::new(None)).collect(),
        begun: Cell::new(0),
        active: Cell::new(0),
        stop: Cell::new(false),
        over: Cell::new(false),
        stopped: Cell::new(0),
        later: Later::new(),
    };
    for &slot in &vm.slots {
        let inserted = vm.guest.insert(slot);
        machine.check(inserted.is_ok(), || format!("{inserted:?}"));
    }
    let seed = dice.below(1 << 48);
    let migrations = 1 + dice.below(3);
    let outcome = machine.run(|cpu| {
        mapper.load();
        let dice = Dice::of(seed, cpu.id() as u64);
        vm.log_anew();
        let mut gather = vm.guest.gather();
        if cpu.id() == 0 {
            for _ in 0..migrations {
                vm.pause(&dice, 40);
                vm.migrate(&dice, &mut gather);
            }
            vm.over.set(true);
        } else {
            vm.run_guest(cpu, &dice, &mut gather);
        }
    })?;
    between(machine.digest());
    if machine.violations().is_empty() {
        machine.calm();
        vm.tear_down(base);
    }
    Ok(outcome)
}

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    fn cpu(&self) -> Cpu<'m> {
        self.machine.cpu()
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// This CPU does something else, for so many times a while.
    fn pause(&self, dice: &Dice, times: u64) {
        self.cpu().spend(dice.time() * (1 + dice.below(times)));
        self.cpu().order();
    }

    fn wait(&self) {
        self.cpu().spend(Time::ns(150));
        self.cpu().order();
    }

    fn number(&self, slot: usize, index: u64) -> Option<usize> {
        let is = |page: &Page| page.slot == slot && page.index == index;
        self.pages.iter().position(is)
    }

    fn at(&self, page: usize) -> u64 {
        let page = &self.pages[page];
        self.slots[page.slot].guest.start().get() + page.index * self.page
    }

    fn count(&self, slot: &Slot) -> u64 {
        slot.guest.size() / self.page
    }

    /// An edit, or a handler, begins and ends.
    fn during<T>(&self, what: impl FnOnce() -> T) -> T {
        self.begun.update(|begun| begun + 1);
        self.active.update(|active| active + 1);
        let result = what();
        self.active.update(|active| active - 1);
        result
    }

    // ---- The guest ----

    fn run_guest<'g>(&'g self, cpu: Cpu<'_>, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host_once_in = dice.pick(&[4, 8, 16]);
        loop {
            self.halt(dice);
            if dice.once_in(8) {
                self.drain(dice);
            }
            if self.over.get() {
                return;
            }
            if dice.once_in(host_once_in) {
                self.during(|| self.manage(dice, gather));
            } else {
                let page = dice.below(self.pages.len() as u64) as usize;
                let value = (dice.below(3) > 0).then(|| dice.below(1 << 60) + 1);
                self.access(cpu, page, value, dice, gather);
            }
            cpu.spend(dice.time() * dice.pick(&[1, 1, 4]));
        }
    }

    /// The log of the running CPU begins anew.
    fn log_anew(&self) {
        if let Some(&page) = self.logs.get(self.cpu().id()) {
            self.machine.log_modifications(Some(page), INDEX);
        }
    }

    /// The log of a CPU.
    fn log_of(&self, cpu: usize) -> Option<(ModificationLog<'_>, u16)> {
        let words = NonNull::from(self.word(*self.logs.get(cpu)?, 0)).cast();
        // SAFETY: a page of ours, of words that are atomic; it goes back at the end.
        let log = ModificationLog::new(unsafe { words.as_ref() });
        // What lies above where it has begun is of no write.
        Some((log, self.machine.modification_index(cpu)))
    }

    /// The running CPU marks what its hardware has logged.
    fn drain(&self, dice: &Dice) {
        let Some((log, index)) = self.log_of(self.cpu().id()) else {
            return;
        };
        if self.is(Bug::LogThrownAway) {
            return self.log_anew();
        }
        let bitmap = |slot: &Slot| Some(&self.records[usize::from(slot.id)].bitmap);
        while self.guest.drain(&log, index, bitmap).is_err() {
            self.wait();
        }
        if dice.once_in(4) {
            self.pause(dice, 8);
        }
        self.log_anew();
    }

    /// Whether hardware has logged a page that is not marked yet.
    fn is_logged(&self, page: usize) -> bool {
        let at = self.at(page);
        (0..self.logs.len()).any(|cpu| {
            let log = self.log_of(cpu);
            log.is_some_and(|(log, index)| log.written(index).any(|logged| logged.get() == at))
        })
    }

    /// Stands still while the guest is to stop.
    fn halt(&self, dice: &Dice) {
        self.cpu().order();
        if self.stop.get() {
            self.drain(dice);
            self.stopped.update(|stopped| stopped + 1);
            while self.stop.get() {
                self.wait();
            }
            self.stopped.update(|stopped| stopped - 1);
        }
    }

    /// One access. It is given up if the guest is to stop: it will be made again, or not.
    fn access(
        &self,
        cpu: Cpu<'_>,
        page: usize,
        value: Option<u64>,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) {
        let va = self.at(page) + 8 * cpu.id() as u64;
        let (mut served_in_vain, mut waited) = (0, 0);
        while served_in_vain < 100 && waited < MOST_WAITS {
            let (want, result) = match value {
                None => (Want::Read, self.machine.read(va).map(|_| ())),
                Some(value) => (Want::Write, self.machine.write(va, value)),
            };
            let Err(trap) = result else {
                // At the time of the access: no other CPU has run since.
                if value.is_some() {
                    self.pages[page].stale.set(true);
                }
                if let Some(request) = self.owed[cpu.id()].take() {
                    self.pause(dice, 8);
                    self.mark(&self.marker(&request.slot()), &request, dice);
                }
                return;
            };
            cpu.spend(self.machine.costs().exception);
            self.machine.dsb_stores();
            self.drain(dice);
            if trap == Trap::LogFull {
                continue;
            }
            let mut served = self.during(|| self.serve(page, va, want, trap, dice, gather));
            while served == Served::Full {
                self.wait();
                if self.stop.get() || self.over.get() {
                    return;
                }
                // Others may harvest, or end the log.
                if self.rings[cpu.id()].has_room() || self.plan.get().is_none() {
                    served = Served::Again;
                }
            }
            if served == Served::Later {
                waited += 1;
                cpu.spend(Time::ns(500) * (1 + dice.below(8)));
            } else {
                served_in_vain += 1;
            }
            cpu.order();
            if self.stop.get() || self.over.get() {
                return;
            }
        }
        self.machine.report(
            Rule::NoProgress,
            format!(
                "an access to {va:#x} faults for ever: served {served_in_vain} times, waited \
                     {waited} times"
            ),
        );
    }

    /// Returns the marker of the running CPU.
    fn marker(&self, slot: &Slot) -> Marker<'_> {
        let id = slot.id;
        let record = &self.records[usize::from(id)];
        match self.plan.get().map(|plan| plan.marks) {
            Some(Marks::Ring) => Marker::Ring(&self.rings[self.cpu().id()], id),
            Some(Marks::Flip) => Marker::Flip(&record.flip),
            _ => Marker::Bitmap(&record.bitmap),
        }
    }

    /// Returns the marker of a write of the host's.
    fn own_marker(&self, slot: usize) -> Marker<'_> {
        let record = &self.records[slot];
        match self.plan.get().map(|plan| plan.marks) {
            Some(Marks::Flip) => Marker::Flip(&record.flip),
            // Beside rings, a bitmap.
            _ => Marker::Bitmap(&record.bitmap),
        }
    }

    /// The handler of a fault.
    fn serve(
        &self,
        page: usize,
        va: u64,
        want: Want,
        trap: Trap,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) -> Served {
        let Some(fault) = classify(va, want, trap, dice) else {
            return Served::Again;
        };
        if fault.cause == Cause::AccessFlag {
            let _touched = self.guest.set_accessed(&fault);
            return Served::Again;
        }
        let pending = &self.pending[self.cpu().id()];
        pending.set((want == Want::Write).then_some(page));
        let served = self.serve_with(&fault, dice, gather);
        pending.set(None);
        self.put_off(gather);
        served
    }

    fn serve_with(&self, fault: &Fault, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) -> Served {
        for _ in 0..3 {
            let request = match self.guest.request(fault) {
                Ok(request) => request,
                Err(Declined::Busy) => return Served::Later,
                Err(declined) => {
                    self.machine.report(Rule::Program, declined.to_string());
                    return Served::Later;
                }
            };
            let marker = self.marker(&request.slot());
            let logged = request.is_logged_write();
            if logged && !self.is(Bug::RoomAskedAfterwards) && marker.room().is_err() {
                return Served::Full;
            }
            if logged && self.is(Bug::MarkedBeforeWritable) {
                self.guest.mark(&marker, &request.slot(), request.at());
                self.pause(dice, 8);
            }
            if dice.below(3) > 0 {
                match self.guest.reopen(&request) {
                    Ok(true) => {
                        self.done(&marker, &request, dice);
                        return Served::Again;
                    }
                    Ok(false) | Err(Refused::Retry) => {}
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(other) => self.machine.report(Rule::Program, other.to_string()),
                }
            }
            if !gather.top_up(request.tables()) {
                return Served::Later;
            }
            let Some(backing) = self.look_up(request.host()) else {
                return Served::Later;
            };
            if dice.once_in(4) {
                self.pause(dice, 8);
            }
            for _ in 0..3 {
                match gather.map(&request, &backing) {
                    Ok(mapped) => {
                        self.done(&marker, &request, dice);
                        if let Mapped::Replaced(old) = mapped {
                            self.report(&old);
                        }
                        return Served::Again;
                    }
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(Refused::Retry | Refused::Denied) => break,
                    Err(Refused::NeedsTables(count)) => {
                        if !gather.top_up(count) {
                            return Served::Later;
                        }
                    }
                    Err(other) => {
                        self.machine.report(Rule::Program, other.to_string());
                        return Served::Later;
                    }
                }
            }
        }
        Served::Later
    }

    /// The page of a request can be accessed.
    fn done(&self, marker: &Marker<'_>, request: &Request, dice: &Dice) {
        if !request.is_logged_write() || self.is(Bug::MarkedBeforeWritable) {
            return;
        }
        if self.is(Bug::MarkedAfterwards) {
            return self.owed[self.cpu().id()].set(Some(*request));
        }
        self.mark(marker, request, dice);
    }

    fn mark(&self, marker: &Marker<'_>, request: &Request, dice: &Dice) {
        if dice.once_in(6) {
            self.pause(dice, 30);
        }
        if self.is(Bug::StoppedInHandler) {
            self.halt(dice);
        }
        if marker.room().is_err() {
            // It was asked for before, and this CPU alone fills its ring.
            let asked = !self.is(Bug::RoomAskedAfterwards) && !self.is(Bug::MarkedAfterwards);
            let what = || "a ring that had room has none".to_owned();
            return self.machine.check(!asked, what);
        }
        self.guest.mark(marker, &request.slot(), request.at());
    }

    // ---- The host's memory ----

    /// The host looks a page up.
    fn look_up(&self, at: u64) -> Option<Backing> {
        let of = |slot: &Slot| (slot.host..slot.host + slot.guest.size()).contains(&at);
        let slot = self.slots.iter().position(of)?;
        let inside = at - self.slots[slot].host;
        let page = &self.pages[self.number(slot, inside / self.page)?];
        if page.moving.get() {
            return None;
        }
        let whole = self.slots[slot].guest.size() == self.block
            && self.pages.iter().all(|page| {
                page.slot != slot || (page.frame.get() == page.home && !page.moving.get())
            });
        let size = if whole { self.block } else { self.page };
        let frame = page.frame.get().get() + inside % self.page;
        Some(Backing::new(Pa::new(frame), size))
    }

    fn lock(&self, page: usize) {
        while self.pages[page].busy.replace(true) {
            self.wait();
        }
    }

    fn unlock(&self, page: usize) {
        self.pages[page].busy.set(false);
    }

    /// A page is copied to where the guest is going to.
    fn copy(&self, number: usize) {
        self.lock(number);
        let page = &self.pages[number];
        match page.copy {
            Some(to) => self.machine.copy_page(page.frame.get(), to),
            None => self.cpu().order(),
        }
        // At the time of the copy: no other CPU has run since.
        page.stale.set(false);
        self.unlock(number);
    }

    /// Returns a word of a page.
    fn word(&self, frame: Pa, index: usize) -> &Entry {
        // SAFETY: a page of the machine's memory that was taken and not given back, and a word of
        // it. It is memory that no walker knows, and the machine is one thread of the host.
        unsafe { self.mapper.table(frame, Level::PAGE).add(index).as_ref() }
    }

    /// Whether what the host writes is what the guest sees, without cleaning.
    fn can_write(&self, page: usize) -> bool {
        let architecture = self.machine.architecture();
        let coherent =
            architecture.is_x86() || architecture.forced_write_back || architecture.guest.is_none();
        coherent && self.pages[page].copy.is_some()
    }

    // ---- What virtual CPUs do for the host ----
}

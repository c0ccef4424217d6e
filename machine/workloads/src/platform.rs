//! The engine's platform on the machine, with what a run does to it.
//!
//! Tables run out after so many, interrupts come in the middle of calls, tables are counted; and
//! where a bug is planted, a promise is not kept.

use std::cell::Cell;
use std::ptr::NonNull;
use std::thread;

use tablewright::shared::{CacheMaintenance, GracePeriod, SharedPlatform};
use tablewright::{
    Barrier, Caps, Entry, Hooks, Invalidation, Level, Pa, Platform, Stale, TableLink, What,
};
use tablewright_machine::{Machine, MachineWalk, Mapper, Stages, Tlbi};

use crate::Bug;

/// Stages of a program, as far as a bug has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Anything else.
    Editing,
    /// Having new mappings seen, and nothing forgotten.
    Mapping,
    /// Having forgotten what was gathered.
    Flushing,
}

type Handler = (unsafe fn(*const ()), *const ());

/// State that all platforms of a run share.
pub struct Control {
    bug: Option<Bug>,
    pub stage: Cell<Stage>,
    /// Tables that may still be allocated.
    pub tables: Cell<u32>,
    /// Tables handed out and not taken back.
    pub alive: Cell<i64>,
    /// Calls until the next interrupt, on each of the first CPUs; 0: none comes.
    pub interrupt: [Cell<u32>; 2],
    handler: Cell<Option<Handler>>,
    calls: Cell<u32>,
    /// Whether an invalidation claims to cover all that was changed in its range. Where interrupts
    /// come between, it does not: what another gather of this CPU has changed there is not this
    /// one's.
    claims: bool,
}

impl Control {
    pub fn new(bug: Option<Bug>) -> Self {
        Self {
            bug,
            stage: Cell::new(Stage::Editing),
            tables: Cell::new(u32::MAX),
            alive: Cell::new(0),
            interrupt: [const { Cell::new(0) }; 2],
            handler: Cell::new(None),
            calls: Cell::new(0),
            claims: true,
        }
    }

    /// That of a run in which interrupts come.
    pub fn interrupted(bug: Option<Bug>) -> Self {
        Self { claims: false, ..Self::new(bug) }
    }

    pub fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Does something at a stage.
    pub fn during<T>(&self, stage: Stage, what: impl FnOnce() -> T) -> T {
        let before = self.stage.replace(stage);
        let result = what();
        self.stage.set(before);
        result
    }

    /// Sets what handles interrupts from now on, or that nothing does.
    ///
    /// # Safety
    /// 1. The function may be called with the pointer until the next call of this.
    pub unsafe fn handle_by(&self, handler: Option<Handler>) {
        self.handler.set(handler);
    }
}

/// A [`Mapper`] that does something else in one place. A handle.
#[derive(Clone, Copy)]
pub struct Faulty<'m> {
    pub mapper: Mapper<'m>,
    pub control: &'m Control,
    /// It has side memory for tables.
    pub linked: bool,
}

impl<'m> Faulty<'m> {
    pub fn new(machine: &'m Machine, control: &'m Control) -> Self {
        Self { mapper: machine.new_space(), control, linked: true }
    }

    pub fn machine(&self) -> &'m Machine {
        self.mapper.machine()
    }

    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    /// Invalidations of stage 2, and of what is combined with it, that are not the right ones in
    /// the right order.
    fn invalidates_otherwise(&self, what: &Invalidation<'_>) -> bool {
        let machine = self.machine();
        let first = |change: fn(Tlbi) -> Tlbi| {
            let all = self.mapper.tlbis(what);
            all.for_each(|tlbi| machine.tlbi(change(tlbi)));
        };
        let combined =
            Tlbi { id: Some(what.id), stages: Stages::First, broadcast: true, ..Tlbi::default() };
        let mut tlbis = self.mapper.tlbis(what);
        let in_two_steps = tlbis.any(|tlbi| self.mapper.then(&tlbi).is_some());
        if self.is(Bug::CombinedAlone) {
            machine.tlbi(combined);
        } else if self.is(Bug::CombinedForgotten) && in_two_steps {
            first(|tlbi| tlbi);
        } else if self.is(Bug::CombinedFirst) && in_two_steps {
            machine.tlbi(combined);
            machine.dsb();
            first(|tlbi| tlbi);
        } else if self.is(Bug::CombinedInOneStep) && in_two_steps {
            first(|tlbi| tlbi);
            machine.tlbi(combined);
        } else if self.is(Bug::BothOnlyLocal) {
            let here = |tlbi| Tlbi { broadcast: false, ..tlbi };
            first(here);
            if in_two_steps {
                machine.dsb();
                machine.tlbi(here(combined));
            }
        } else {
            return false;
        }
        true
    }

    /// Invalidates as the machine's own platform does, with its [claim](Mapper::claim) or without.
    fn issue(&self, what: &Invalidation<'_>) {
        if self.control.claims {
            return self.mapper.invalidate(what);
        }
        let machine = self.machine();
        let mut combined = None;
        for tlbi in self.mapper.tlbis(what) {
            machine.tlbi(tlbi);
            combined = self.mapper.then(&tlbi);
        }
        if let Some(combined) = combined {
            machine.dsb();
            machine.tlbi(combined);
        }
    }

    /// Lets an interrupt come, if one is due.
    fn tick(&self) {
        let control = self.control;
        let Some((handler, data)) = control.handler.get() else {
            return;
        };
        let left = &control.interrupt[self.machine().cpu().id()];
        match left.get() {
            0 => return,
            1 => left.set(0),
            more => return left.set(more - 1),
        }
        if !thread::panicking() {
            // SAFETY: set where the handler was vouched for (1.).
            unsafe { handler(data) };
        }
    }

    /// Whether a frame is of the machine's memory: for what it has no memory for, maintenance is
    /// not worth the time of the host.
    fn is_memory(&self, frame: Pa) -> bool {
        let memory = self.machine().memory();
        self.control.claims || (memory.first()..memory.end()).contains(&frame.get())
    }

    fn page_shift(&self) -> u32 {
        self.machine().memory().page_shift()
    }
}

// SAFETY: everything is passed on to the machine. What a bug changes breaks promises, which is what
// it is for; the pointers stay good, because the memory of the machine outlives it and nothing but
// descriptors is in it.
unsafe impl Platform for Faulty<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.alloc_root(level, 1)
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        self.tick();
        let control = self.control;
        let left = control.tables.get().checked_sub(tables as u32)?;
        let frame = self.mapper.alloc_root(level, tables)?;
        control.tables.set(left);
        control.alive.update(|alive| alive + tables as i64);
        Some(frame)
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        self.control.alive.update(|alive| alive - tables as i64);
        // SAFETY: passed on.
        unsafe { self.mapper.free_root(root, level, tables) }
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        self.control.alive.update(|alive| alive - 1);
        // SAFETY: passed on.
        unsafe { self.mapper.free_table(frame, level) }
    }

    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.mapper.table(frame, level) }
    }

    fn barrier(&self, barrier: Barrier) {
        self.tick();
        let stage = self.control.stage.get();
        let left_out = match barrier {
            Barrier::Publish => {
                self.is(Bug::NoBarrier)
                    || self.is(Bug::NoBarrierBeforeInvalidation) && stage == Stage::Flushing
                    || self.is(Bug::NoBarrierAfterMap) && stage == Stage::Mapping
            }
            Barrier::Complete => {
                self.is(Bug::NoWait)
                    || self.is(Bug::NoWaitInBreak) && stage != Stage::Flushing
                    || self.is(Bug::NoWaitInFlush) && stage == Stage::Flushing
            }
        };
        if !left_out {
            self.mapper.barrier(barrier);
        }
        self.tick();
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.tick();
        let calls = self.control.calls.get();
        self.control.calls.set(calls.wrapping_add(1));
        if self.is(Bug::SkipsInvalidation) && calls % 3 == 2 {
            return;
        }
        let flushing = self.control.stage.get() == Stage::Flushing;
        if self.is(Bug::NoInvalidation) || self.is(Bug::NoInvalidationInBreak) && !flushing {
            return;
        }
        let mut what = *what;
        let page = 1u64 << self.page_shift();
        let mut ranges = match what.what {
            What::Ranges(ranges) => ranges.to_vec(),
            What::Everything => Vec::new(),
        };
        if self.is(Bug::FlushHoldsOne) {
            ranges.truncate(1);
        }
        for Stale { first, last, level, tables } in &mut ranges {
            if self.is(Bug::HintOfAnotherLevel) {
                *level = level.map(|level| level.up());
            }
            if self.is(Bug::HintWhereThereIsNone) && level.is_none() {
                *level = Some(Level::PAGE);
            }
            if self.is(Bug::TablesForgotten) {
                *tables = false;
            }
            if self.is(Bug::RangeTooShort) && *last - *first >= page {
                *last -= page;
            }
            if self.is(Bug::OnlyFirstPage) {
                *last = *first + (page - 1);
            }
        }
        if !ranges.is_empty() {
            what.what = What::Ranges(&ranges);
        }
        if self.is(Bug::AnotherIdentifier) {
            what.id += 1;
        }
        if self.is(Bug::OnlyLocal) {
            self.machine().tlbi(Tlbi { broadcast: false, ..Tlbi::ALL });
            return;
        }
        if self.invalidates_otherwise(&what) {
            self.mapper.claim(&what);
            return;
        }
        self.issue(&what);
    }

    fn caps(&self) -> Caps {
        let mut caps = self.mapper.caps();
        if self.is(Bug::BreakLevelTooHigh) {
            caps.bbm = 2;
        }
        if self.is(Bug::HardwareAccessUnknown) {
            caps.hardware_access = false;
        }
        if self.is(Bug::HardwareDirtyUnknown) {
            caps.hardware_dirty = false;
        }
        caps
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.mapper.link_of(frame).filter(|_| self.linked)
    }

    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: as above.
unsafe impl Hooks for Faulty<'_> {
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.mapper.read(entry) }
    }

    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::load(&self.mapper, entry) }
    }

    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.mapper.follow(entry) }
    }

    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        if self.is(Bug::HiddenStore) && bits == 0 {
            // SAFETY: valid, as the caller vouches.
            unsafe { entry.as_ref() }.store(bits);
            return;
        }
        // SAFETY: passed on.
        unsafe { self.mapper.store(entry, bits) }
    }

    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        self.tick();
        // SAFETY: passed on.
        unsafe {
            if self.is(Bug::LinkedByPlainStore) {
                self.mapper.store(entry, bits);
            } else {
                self.mapper.link(entry, bits);
            }
        }
    }

    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: passed on.
        unsafe {
            if self.is(Bug::ExchangeInTwoSteps) {
                let old = Hooks::load(&self.mapper, entry);
                self.mapper.link(entry, bits);
                return old;
            }
            if self.is(Bug::HiddenStore) && bits == 0 {
                return entry.as_ref().exchange(bits);
            }
            self.mapper.exchange(entry, bits)
        }
    }

    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.tick();
        // SAFETY: passed on.
        let result = unsafe {
            if self.is(Bug::ExchangeInTwoSteps) {
                let old = Hooks::load(&self.mapper, entry);
                if old == current {
                    self.mapper.link(entry, new);
                    Ok(())
                } else {
                    Err(old)
                }
            } else {
                self.mapper.compare_exchange(entry, current, new)
            }
        };
        self.tick();
        result
    }

    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        if self.is(Bug::NotZeroed) && value == 0 && step == 0 && count > 8 {
            let left_out = count - 3;
            // SAFETY: passed on, in two parts.
            unsafe {
                self.mapper.fill(first, left_out, 0, 0);
                self.mapper.fill(first.add(left_out + 1), 2, 0, 0);
            }
            return;
        }
        // SAFETY: passed on.
        unsafe { self.mapper.fill(first, count, value, step) }
    }
}

/// A walk that was announced, or with a bug was not.
pub struct Walk<'m> {
    _walk: Option<MachineWalk<'m>>,
}

// SAFETY: passed on to the machine, if no bug is planted (1., 2.).
unsafe impl<'m> SharedPlatform for Faulty<'m> {
    type Walk<'a>
        = Walk<'m>
    where
        Self: 'a;

    fn enter(&self) -> Walk<'m> {
        self.tick();
        let announced = !self.is(Bug::ForgetsWalks);
        Walk { _walk: announced.then(|| self.mapper.enter()) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.mapper.grace_period()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.mapper.is_over(period)
    }

    fn maintenance(&self) -> CacheMaintenance {
        self.mapper.maintenance()
    }

    fn clean(&self, frame: Pa, size: u64) {
        self.tick();
        if self.is_memory(frame) {
            self.mapper.clean(frame, size);
        }
    }

    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        if self.is_memory(frame) {
            self.mapper.invalidate_instructions(frame, size);
        }
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.mapper.invalidate_here(what);
    }
}

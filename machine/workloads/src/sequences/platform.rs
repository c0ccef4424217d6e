//! The platform of every space: that of the machine, with what a run does to it.
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
use tablewright_machine::{MachineWalk, Mapper};

/// A promise of the embedder that a run does not keep, to see that it is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// One invalidation in three is not made.
    SkipsInvalidation,
    /// Completion is not waited for.
    SkipsCompletion,
    /// Stores are not published.
    SkipsPublication,
    /// The last page of each range is left out.
    ShortRange,
    /// Pages are given back when they are unmapped, and not when that is complete.
    FreesEarly,
    /// Pages that were released are given back twice.
    FreesTwice,
    /// A guest's page is given back when its zap begins.
    FreesBeforeZap,
    /// Walks of software are over as soon as they begin.
    ForgetsWalks,
}

impl Bug {
    /// All of them, as they are named on a command line.
    pub const ALL: [(&'static str, Self); 8] = [
        ("skips-invalidation", Self::SkipsInvalidation),
        ("skips-completion", Self::SkipsCompletion),
        ("skips-publication", Self::SkipsPublication),
        ("short-range", Self::ShortRange),
        ("frees-early", Self::FreesEarly),
        ("frees-twice", Self::FreesTwice),
        ("frees-before-zap", Self::FreesBeforeZap),
        ("forgets-walks", Self::ForgetsWalks),
    ];
}

type Handler = (unsafe fn(*const ()), *const ());

/// What all platforms of a run have in common.
pub struct Control {
    pub bug: Option<Bug>,
    /// So many tables may still be allocated.
    pub tables: Cell<u32>,
    /// Tables handed out and not taken back.
    pub alive: Cell<i64>,
    /// Calls until the next interrupt, on each CPU; 0: none comes.
    pub interrupt: [Cell<u32>; 2],
    /// How often each CPU was told to wait until what it has issued is complete.
    pub completes: [Cell<u32>; 2],
    handler: Cell<Option<Handler>>,
    calls: Cell<u32>,
}

impl Control {
    pub fn new(bug: Option<Bug>) -> Self {
        Self {
            bug,
            tables: Cell::new(u32::MAX),
            alive: Cell::new(0),
            interrupt: [const { Cell::new(0) }; 2],
            completes: [const { Cell::new(0) }; 2],
            handler: Cell::new(None),
            calls: Cell::new(0),
        }
    }

    pub fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// What handles interrupts from now on; nothing does any more if there is none.
    ///
    /// # Safety
    /// 1. The function may be called with the pointer until the next call of this.
    pub unsafe fn handle_by(&self, handler: Option<Handler>) {
        self.handler.set(handler);
    }
}

/// One space's platform. A handle.
#[derive(Clone, Copy)]
pub struct Plat<'m> {
    pub mapper: Mapper<'m>,
    pub control: &'m Control,
    /// It has side memory for tables.
    pub linked: bool,
}

impl Plat<'_> {
    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    /// As the machine's own, but for the [claim](Mapper::claim) that all is invalidated then that
    /// was changed in the range: what another gather of this CPU has changed there, which an
    /// interrupt has come between, is not this one's.
    fn issue(&self, what: &Invalidation<'_>) {
        let machine = self.mapper.machine();
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

    /// An interrupt may come here.
    fn tick(&self) {
        let control = self.control;
        let left = &control.interrupt[self.mapper.machine().cpu().id()];
        match left.get() {
            0 => return,
            1 => left.set(0),
            more => return left.set(more - 1),
        }
        if let Some((handler, data)) = control.handler.get()
            && !thread::panicking()
        {
            // SAFETY: set where the handler was vouched for (1.).
            unsafe { handler(data) };
        }
    }
}

// SAFETY: everything is passed on to the machine, which keeps the promises; a bug that is planted
// breaks one, and the pointers stay good because the memory of the machine outlives it.
unsafe impl Platform for Plat<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.alloc_root(level, 1)
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        self.control.alive.update(|alive| alive - 1);
        // SAFETY: passed on.
        unsafe { self.mapper.free_table(frame, level) }
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

    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.mapper.table(frame, level) }
    }

    fn barrier(&self, barrier: Barrier) {
        self.tick();
        let left_out = match barrier {
            Barrier::Publish => self.is(Bug::SkipsPublication),
            Barrier::Complete => {
                let completes = &self.control.completes[self.mapper.machine().cpu().id()];
                completes.set(completes.get() + 1);
                self.is(Bug::SkipsCompletion)
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
        self.control.calls.set(calls + 1);
        if self.is(Bug::SkipsInvalidation) && calls % 3 == 2 {
            return;
        }
        if let (true, What::Ranges(ranges)) = (self.is(Bug::ShortRange), what.what) {
            let page = 1u64 << self.mapper.machine().memory().page_shift();
            let shorten = |range: &Stale| Stale {
                last: range.last.max(range.first + 2 * page - 1) - page,
                ..*range
            };
            let ranges: Vec<_> = ranges.iter().map(shorten).collect();
            let what = Invalidation {
                what: What::Ranges(&ranges),
                ..*what
            };
            return self.issue(&what);
        }
        self.issue(what);
    }

    fn caps(&self) -> Caps {
        self.mapper.caps()
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.mapper.link_of(frame).filter(|_| self.linked)
    }

    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: passed on to the machine (1.).
unsafe impl Hooks for Plat<'_> {
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::read(&self.mapper, entry) }
    }

    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::load(&self.mapper, entry) }
    }

    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::follow(&self.mapper, entry) }
    }

    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { Hooks::store(&self.mapper, entry, bits) }
    }

    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        self.tick();
        // SAFETY: passed on.
        unsafe { Hooks::link(&self.mapper, entry, bits) }
    }

    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::exchange(&self.mapper, entry, bits) }
    }

    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.tick();
        // SAFETY: passed on.
        let result = unsafe { Hooks::compare_exchange(&self.mapper, entry, current, new) };
        self.tick();
        result
    }

    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        // SAFETY: passed on.
        unsafe { Hooks::fill(&self.mapper, first, count, value, step) }
    }
}

/// A walk that was announced, or with a bug was not.
pub struct Walk<'m> {
    _walk: Option<MachineWalk<'m>>,
}

// SAFETY: passed on to the machine, if no bug is planted (1., 2.).
unsafe impl<'m> SharedPlatform for Plat<'m> {
    type Walk<'a>
        = Walk<'m>
    where
        Self: 'a;

    fn enter(&self) -> Walk<'m> {
        self.tick();
        let announced = !self.is(Bug::ForgetsWalks);
        Walk {
            _walk: announced.then(|| self.mapper.enter()),
        }
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
        // What the machine has no memory for is not worth the time of the host.
        let memory = self.mapper.machine().memory();
        if (memory.first()..memory.end()).contains(&frame.get()) {
            self.mapper.clean(frame, size);
        }
    }

    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        let memory = self.mapper.machine().memory();
        if (memory.first()..memory.end()).contains(&frame.get()) {
            self.mapper.invalidate_instructions(frame, size);
        }
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.mapper.invalidate_here(what);
    }
}

//! The machine's platform, watched: what is cleaned, and for how long an entry is invalid that a
//! guest was using.
//!
//! All ways to handle faults, baselines and engine, work through it, so that they are counted
//! alike.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ptr::NonNull;

use tablewright::shared::{CacheMaintenance, GracePeriod, SharedPlatform};
use tablewright::{Barrier, Caps, Entry, Hooks, Invalidation, Level, Pa, Platform, TableLink};
use tablewright_machine::{Machine, MachineWalk, Mapper, Time};

/// Counts of what was seen.
#[derive(Debug, Default)]
pub struct Seen {
    cleaned: Cell<u64>,
    /// Since when entries are invalid that were valid.
    since: RefCell<HashMap<usize, Time>>,
    longest: Cell<Time>,
    total: Cell<Time>,
}

impl Seen {
    /// Bytes cleaned to the point of coherency.
    pub fn cleaned(&self) -> u64 {
        self.cleaned.get()
    }

    /// The longest time for which an entry that had been valid was invalid, and the sum of all.
    pub fn invalid(&self) -> (Time, Time) {
        (self.longest.get(), self.total.get())
    }
}

/// A [`Mapper`], and what is seen of its use.
#[derive(Clone, Copy)]
pub struct Watch<'m> {
    pub mapper: Mapper<'m>,
    pub seen: &'m Seen,
}

/// The bit that a valid entry has.
const VALID: u64 = 1;

impl<'m> Watch<'m> {
    pub fn new(mapper: Mapper<'m>, seen: &'m Seen) -> Self {
        Self { mapper, seen }
    }

    pub fn machine(&self) -> &'m Machine {
        self.mapper.machine()
    }

    /// An entry becomes another.
    fn note(&self, entry: NonNull<Entry>, old: u64, new: u64) {
        let at = entry.addr().get();
        match (old & VALID != 0, new & VALID != 0) {
            (true, false) => {
                let now = self.machine().cpu().now();
                self.seen.since.borrow_mut().insert(at, now);
            }
            (false, true) if !self.seen.since.borrow().is_empty() => {
                let since = self.seen.since.borrow_mut().remove(&at);
                if let Some(since) = since {
                    let time = self.machine().cpu().now().saturating_sub(since);
                    self.seen.longest.set(self.seen.longest.get().max(time));
                    self.seen.total.set(self.seen.total.get() + time);
                }
            }
            _ => {}
        }
    }

    /// Reads an entry. Costs nothing and orders nothing: for the watch.
    ///
    /// # Safety
    /// 1. The entry is valid for reads.
    unsafe fn peek(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid by (1.); one thread of the host runs all of the machine.
        unsafe { entry.cast::<u64>().read() }
    }
}

// SAFETY: all promises are those of the mapper, to which everything is passed on.
unsafe impl Platform for Watch<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.mapper.alloc_table(level)
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // Entries of a table that is gone are not invalid any more.
        // SAFETY: passed on.
        let first = unsafe { self.mapper.table(frame, level) }.addr().get();
        let gone = first..first + (1 << self.machine().memory().page_shift());
        if !self.seen.since.borrow().is_empty() {
            let mut since = self.seen.since.borrow_mut();
            since.retain(|at, _| !gone.contains(at));
        }
        // SAFETY: passed on.
        unsafe { self.mapper.free_table(frame, level) }
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.mapper.table(frame, level) }
    }

    #[inline(always)]
    fn barrier(&self, barrier: Barrier) {
        self.mapper.barrier(barrier);
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.mapper.invalidate(what);
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        self.mapper.alloc_root(level, tables)
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        // SAFETY: passed on.
        unsafe { self.mapper.free_root(root, level, tables) }
    }

    #[inline(always)]
    fn caps(&self) -> Caps {
        self.mapper.caps()
    }

    #[inline(always)]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.mapper.link_of(frame)
    }

    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: every access is passed on (1.).
unsafe impl Hooks for Watch<'_> {
    #[inline(always)]
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.mapper.read(entry) }
    }

    #[inline(always)]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::load(&self.mapper, entry) }
    }

    #[inline(always)]
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.mapper.follow(entry) }
    }

    // A plain store is into a table that is not linked yet, or makes a hole of what was invalid
    // before.
    #[inline(always)]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { self.mapper.store(entry, bits) };
    }

    #[inline(always)]
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe {
            self.note(entry, self.peek(entry), bits);
            self.mapper.link(entry, bits);
        }
    }

    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: passed on.
        let old = unsafe { self.mapper.exchange(entry, bits) };
        self.note(entry, old, bits);
        old
    }

    #[inline(always)]
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        // SAFETY: passed on.
        unsafe { self.mapper.compare_exchange(entry, current, new) }?;
        self.note(entry, current, new);
        Ok(())
    }

    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        // SAFETY: passed on.
        unsafe { self.mapper.fill(first, count, value, step) }
    }
}

// SAFETY: as for the platform.
unsafe impl<'m> SharedPlatform for Watch<'m> {
    type Walk<'a>
        = MachineWalk<'m>
    where
        Self: 'a;

    fn enter(&self) -> MachineWalk<'m> {
        self.mapper.enter()
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
        self.seen.cleaned.set(self.seen.cleaned.get() + size);
        self.mapper.clean(frame, size);
    }

    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        self.mapper.invalidate_instructions(frame, size);
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.mapper.invalidate_here(what);
    }
}

//! Requests to a platform, counted from outside.

use core::cell::Cell;
use core::ops::Range;
use core::ptr::NonNull;

use tablewright::{
    Barrier, Caps, Entry, Hooks, Invalidation, Level, Pa, Platform, TableLink, What,
};

use super::fixmap::Fixmap;

/// Counts of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tables allocated.
    pub tables: u64,
    /// Tables freed.
    pub freed: u64,
    /// Entries of tables written, without links and what is only cleared.
    pub entries: u64,
    /// Tables linked with [`Hooks::link`].
    pub links: u64,
    /// Entries filled with zeroes.
    pub zeroed: u64,
    /// Slots of the fixmap made to show a frame.
    pub moves: u64,
    /// Invalidations issued. A range counts once.
    pub invalidations: u64,
    /// Waits for their completion.
    pub completions: u64,
    /// Barriers that publish stores.
    pub barriers: u64,
    /// Those of them whose last store before was to an entry of a table, as `entries` counts it.
    pub entry_barriers: u64,
}

/// A platform, and what it was asked to do. Stores to the slots of a fixmap are told from stores to
/// tables by where they go.
pub struct Counted<P> {
    platform: P,
    /// The addresses of the entries of the slots.
    slots: Range<usize>,
    counts: Cell<Counts>,
    /// The last store was to an entry of a table.
    after_entry: Cell<bool>,
}

impl<P: Platform + Hooks> Counted<P> {
    /// Counts from zero.
    pub fn new<M>(platform: P, fixmap: &Fixmap<M>) -> Self {
        let Range { start, end } = fixmap.entries();
        Self {
            platform,
            slots: start.addr()..end.addr(),
            counts: Cell::default(),
            after_entry: Cell::new(false),
        }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.counts.get()
    }

    #[inline(always)]
    fn update(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    #[inline(always)]
    fn wrote(&self, entry: NonNull<Entry>, bits: u64) {
        let slot = self.slots.contains(&entry.addr().get());
        self.after_entry.set(!slot);
        self.update(|counts| match slot {
            true => counts.moves += u64::from(bits != 0),
            false => counts.entries += 1,
        });
    }
}

// SAFETY: everything is passed on to the platform, which made the promises (1. to 6.); there is no
// clone (7.).
unsafe impl<P: Platform + Hooks> Platform for Counted<P> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        let frame = self.platform.alloc_table(level)?;
        self.update(|counts| counts.tables += 1);
        Some(frame)
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        self.update(|counts| counts.freed += 1);
        // SAFETY: passed on.
        unsafe { self.platform.free_table(frame, level) }
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.platform.table(frame, level) }
    }

    fn barrier(&self, barrier: Barrier) {
        self.update(|counts| match barrier {
            Barrier::Publish => {
                counts.barriers += 1;
                counts.entry_barriers += u64::from(self.after_entry.get());
            }
            Barrier::Complete => counts.completions += 1,
        });
        self.platform.barrier(barrier);
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.update(|counts| {
            counts.invalidations += match what.what {
                What::Everything => 1,
                What::Ranges(ranges) => ranges.len() as u64,
            }
        });
        self.platform.invalidate(what);
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        let frame = self.platform.alloc_root(level, tables)?;
        self.update(|counts| counts.tables += tables as u64);
        Some(frame)
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        self.update(|counts| counts.freed += tables as u64);
        // SAFETY: passed on.
        unsafe { self.platform.free_root(root, level, tables) }
    }

    #[inline(always)]
    fn caps(&self) -> Caps {
        self.platform.caps()
    }

    #[inline(always)]
    fn table_done(&self, frame: Pa, table: NonNull<Entry>) {
        self.platform.table_done(frame, table);
    }

    #[inline(always)]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.platform.link_of(frame)
    }

    #[inline(always)]
    fn identity_of(&self, root: Pa) -> Option<&tablewright::shootdown::Identity> {
        self.platform.identity_of(root)
    }

    #[inline(always)]
    fn prefetch(&self, frame: Pa) {
        self.platform.prefetch(frame);
    }

    #[inline(always)]
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: everything is passed on to the platform, which does what the defaults do (1.).
unsafe impl<P: Platform + Hooks> Hooks for Counted<P> {
    #[inline(always)]
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.platform.read(entry) }
    }

    #[inline(always)]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.platform.load(entry) }
    }

    #[inline(always)]
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.platform.follow(entry) }
    }

    #[inline(always)]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        self.wrote(entry, bits);
        // SAFETY: passed on.
        unsafe { self.platform.store(entry, bits) }
    }

    #[inline(always)]
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        self.after_entry.set(false);
        self.update(|counts| counts.links += 1);
        // SAFETY: passed on.
        unsafe { self.platform.link(entry, bits) }
    }

    #[inline(always)]
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        self.wrote(entry, bits);
        // SAFETY: passed on.
        unsafe { self.platform.exchange(entry, bits) }
    }

    #[inline(always)]
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        // SAFETY: passed on.
        unsafe { self.platform.compare_exchange(entry, current, new) }?;
        self.wrote(entry, new);
        Ok(())
    }

    #[inline(always)]
    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        let zeroes = value == 0 && step == 0;
        self.after_entry.set(!zeroes);
        self.update(|counts| match zeroes {
            true => counts.zeroed += count as u64,
            false => counts.entries += count as u64,
        });
        // SAFETY: passed on.
        unsafe { self.platform.fill(first, count, value, step) }
    }
}

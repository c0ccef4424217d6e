//! The fixmap: some pages of address space whose entries can be written before anything else can be
//! reached.

use core::ops::Range;
use core::ptr::NonNull;

use tablewright::{Entry, Level, Va};

/// Slots for last-level tables. The original has one, and 16 with
/// [`LazyUnmap`](super::Technique::LazyUnmap).
pub const LAST_LEVEL: usize = 16;

/// The slots of a fixmap: [`LAST_LEVEL`] for tables of the last level, and one for each level above
/// it.
pub struct Fixmap<M> {
    /// The address of the first slot.
    pub(super) base: Va,
    pub(super) entries: NonNull<Entry>,
    pub(super) memory: M,
}

impl<M> Fixmap<M> {
    /// How many slots there are: enough for formats of five levels.
    pub const SLOTS: usize = LAST_LEVEL + 4;

    /// The slots at the [`SLOTS`](Self::SLOTS) pages from `base` on, used through `memory`.
    ///
    /// # Safety
    /// 1. `entries` points to as many consecutive entries of a table at the level of pages, which
    ///    translate these pages; they are 0, have no other user, and stay valid for the platform's
    ///    accessors through this pointer for as long as the fixmap exists.
    pub const unsafe fn new(base: Va, entries: NonNull<Entry>, memory: M) -> Self {
        Self { base, entries, memory }
    }

    /// Returns the addresses of the slots' entries.
    pub fn entries(&self) -> Range<*const Entry> {
        let first = self.entries.as_ptr().cast_const();
        first..first.wrapping_add(Self::SLOTS)
    }

    /// The entry of a slot.
    pub(super) fn entry(&self, slot: usize) -> NonNull<Entry> {
        debug_assert!(slot < Self::SLOTS);
        // SAFETY: the caller of `new` vouched for so many entries (1.), and slots come from
        // `Early`, which counts up to `LAST_LEVEL` and `slot_of`.
        unsafe { self.entries.add(slot) }
    }

    /// The slot of a table at `level`; the first of several at the last.
    pub(super) fn slot_of(level: Level) -> usize {
        match level.down() {
            None => 0,
            Some(below) => LAST_LEVEL + usize::from(below.height()),
        }
    }
}

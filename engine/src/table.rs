//! Tables as edits have them: entries of one frame, read and written as the platform has it.

use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{Level, Pa};
use crate::entry::{AHEAD, Entry, LINE, fill, prefetch_line};
use crate::format::{Format, Kind};
use crate::platform::{Hooks, Platform};

/// Writes an entry that is not part of a table that is open.
///
/// # Safety
/// 1. `entry` is valid for writes.
#[inline]
pub(crate) unsafe fn store<P: Platform>(platform: &P, entry: NonNull<Entry>, bits: u64) {
    // SAFETY: valid by (1.).
    unsafe {
        match platform.hooks() {
            Some(hooks) => hooks.store(entry, bits),
            None => entry.as_ref().store(bits),
        }
    }
}

/// The table of tables that the last page lay below: a walk to its neighbours begins there, as it
/// does in processors (paging-structure caches: SDM vol. 3A 5.10.3).
///
/// Invariant: the table is part of the tree.
#[derive(Clone, Copy)]
pub(crate) struct UpperCache {
    /// The first page below the table, and the number of pages; nothing is cached if it is 0.
    pub first: u64,
    pub pages: u64,
    /// A table whose entries are tables of pages.
    pub tables: Pa,
}

impl UpperCache {
    pub const EMPTY: Self = Self { first: 0, pages: 0, tables: Pa::new(0) };

    /// The number, among the pages below the table, of the page around `input`.
    #[inline]
    pub fn number_of<F: Format>(&self, input: u64) -> Option<u64> {
        let number = input.wrapping_sub(self.first) >> F::PAGE_SHIFT;
        (number < self.pages).then_some(number)
    }

    pub fn invalidate(&mut self) {
        self.pages = 0;
    }
}

/// A table that is open for access: mapped by the platform from [`Table::open`] until it is
/// dropped.
///
/// Invariant: `base` points to as many valid entries as a table at this level of the space's format
/// has. It holds because a table is opened only at a frame that is the root of a space or was read
/// from a table descriptor of one, and [`Platform::table`] vouches for such frames.
pub(crate) struct Table<'p, P: Platform> {
    platform: &'p P,
    base: NonNull<Entry>,
    frame: Pa,
}

impl<'p, P: Platform> Table<'p, P> {
    /// Opens the table in `frame`.
    ///
    /// # Safety
    /// 1. `frame` holds a table of a space on `platform`, or was allocated from `platform` for one.
    #[inline]
    pub unsafe fn open(platform: &'p P, frame: Pa, level: Level) -> Self {
        // SAFETY: Platform::table (1.) is (1.) here.
        let base = unsafe { platform.table(frame, level) };
        Self { platform, base, frame }
    }

    /// The frame of the table.
    #[inline]
    pub fn frame(&self) -> Pa {
        self.frame
    }

    #[inline]
    fn at(&self, index: usize) -> NonNull<Entry> {
        // SAFETY: indices come from `Format::index` or from ranges of such, which stay inside a
        // table; by the invariant of the type these entries are valid.
        unsafe { self.base.add(index) }
    }

    #[inline]
    pub fn load(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.load(self.at(index)),
                None => self.at(index).as_ref().load(),
            }
        }
    }

    /// Reads an entry in order to go on to the table that it points to, while others may be linking
    /// it.
    #[inline]
    pub fn follow(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.follow(self.at(index)),
                None => self.at(index).as_ref().follow(),
            }
        }
    }

    /// Reads an entry of a table that is not written meanwhile.
    ///
    /// # Safety
    /// 1. No other processor and no walker writes the table at the same time.
    #[inline]
    pub unsafe fn read(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry; (1.) is passed on.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.read(self.at(index)),
                None => self.at(index).as_ref().read(),
            }
        }
    }

    #[inline]
    pub fn store(&self, index: usize, bits: u64) {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.store(self.at(index), bits),
                None => self.at(index).as_ref().store(bits),
            }
        }
    }

    /// Replaces `old`, an entry above the level of pages. A table would be lost: it has to be
    /// [detached](Self::detach).
    #[inline]
    pub fn replace<F: Format>(&self, index: usize, level: Level, old: u64, bits: u64) {
        debug_assert_ne!(F::kind(old, level), Kind::Table);
        self.store(index, bits);
    }

    /// Writes an entry that points to a table, which leaves the tree with it.
    #[inline]
    pub fn detach(&self, index: usize, bits: u64, cache: &mut UpperCache) {
        cache.invalidate();
        self.store(index, bits);
    }

    #[inline]
    pub fn link(&self, index: usize, bits: u64) {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.link(self.at(index), bits),
                None => self.at(index).as_ref().link(bits),
            }
        }
    }

    #[inline]
    pub fn exchange(&self, index: usize, bits: u64) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.exchange(self.at(index), bits),
                None => self.at(index).as_ref().exchange(bits),
            }
        }
    }

    #[inline]
    pub fn compare_exchange(&self, index: usize, current: u64, new: u64) -> Result<(), u64> {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.compare_exchange(self.at(index), current, new),
                None => self.at(index).as_ref().compare_exchange(current, new),
            }
        }
    }

    /// Prefetches what a loop over the table comes to next, called once for each line. Near the end
    /// of the table that is the frame behind it, often the next table; where it is not, the
    /// prefetch is wasted and harmless.
    #[inline]
    pub fn prefetch_ahead(&self, index: usize) {
        prefetch_line(self.base.as_ptr().wrapping_add(index + LINE * AHEAD));
    }

    /// Clears a table of `entries` that was just allocated: as memory, which takes fewer stores
    /// than there are entries.
    ///
    /// # Safety
    /// 1. Nothing else can reach the table, and it has so many entries.
    #[inline]
    pub unsafe fn clear(&self, entries: usize) {
        // SAFETY: these are the entries of the table (1.).
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.fill(self.base, entries, 0, 0),
                None if cfg!(feature = "loom") => fill(self.base, entries, 0, 0),
                // No access is made to it meanwhile that would have to be atomic (1.).
                None => self.base.write_bytes(0, entries),
            }
        }
    }

    /// Whether all entries of `range` are zero.
    #[inline]
    pub fn is_clear(&self, range: Range<usize>) -> bool {
        let mut index = range.start;
        // Two, so that one does not wait for the other.
        let (mut even, mut odd) = (0, 0);
        while range.end - index >= LINE {
            for pair in 0..LINE / 2 {
                even |= self.load(index + 2 * pair);
                odd |= self.load(index + 2 * pair + 1);
            }
            index += LINE;
        }
        while index < range.end {
            even |= self.load(index);
            index += 1;
        }
        even | odd == 0
    }

    /// The first entry of `range` that is not zero; its end if all are. Entries that others write
    /// meanwhile are each read once, at some time.
    ///
    /// A function of its own, so that what is between two holes pays for a comparison and no more.
    #[inline(never)]
    pub fn first_used(&self, range: Range<usize>) -> usize {
        let mut index = range.start;
        // By lines, of which most are clear where the first entry was.
        while range.end - index >= LINE {
            let line = (0..LINE).fold(0, |any, offset| any | self.load(index + offset));
            if line != 0 {
                break;
            }
            index += LINE;
        }
        while index < range.end && self.load(index) == 0 {
            index += 1;
        }
        index
    }

    /// Returns the index at which a loop goes on that has come to a hole at `index`, as far as
    /// `end`.
    #[inline]
    pub fn past_hole(&self, index: usize, end: usize) -> usize {
        self.first_used(index + 1..end)
    }

    /// Writes the entries of `range`: `value`, `value + step`, and so on.
    #[inline]
    pub fn fill(&self, range: Range<usize>, value: u64, step: u64) {
        if !range.is_empty() {
            // SAFETY: the range stays inside the table, so all its entries are valid.
            unsafe {
                let first = self.at(range.start);
                match self.platform.hooks() {
                    Some(hooks) => hooks.fill(first, range.len(), value, step),
                    None => fill(first, range.len(), value, step),
                }
            }
        }
    }
}

impl<P: Platform> Table<'_, P> {
    /// Makes the entries of `range` that are `from` under `mask` what `to` is there, up to the
    /// first that is not. Returns where that is.
    ///
    /// A line of eight entries is checked as one, before any of them is written: they have no other
    /// writer. A function of its own, so that the loop has the registers to itself.
    #[inline(never)]
    pub fn recode(&self, range: Range<usize>, from: u64, mask: u64, to: u64) -> usize {
        let mut index = range.start;
        // What a short range would prefetch is not what is edited next.
        let ahead = range.len() >= LINE * AHEAD;
        // x86 has too few registers for a line; it reads an entry once more in the instruction that
        // writes it.
        let again = cfg!(target_arch = "x86_64") && self.platform.hooks().is_none();
        while range.end - index >= LINE {
            if ahead {
                self.prefetch_ahead(index);
            }
            let mut line = [0; LINE];
            let (mut any, mut all) = (from, from);
            for (offset, entry) in line.iter_mut().enumerate() {
                *entry = self.load(index + offset);
                any |= *entry;
                all &= *entry;
            }
            if (any ^ all) & mask != 0 {
                break;
            }
            for (offset, entry) in line.iter().enumerate() {
                let entry = if again { self.load(index + offset) } else { *entry };
                self.store(index + offset, entry ^ (from ^ to));
            }
            index += LINE;
        }
        self.recode_few(index..range.end, from, mask, to)
    }

    /// Recodes a few entries, one by one.
    #[inline]
    pub fn recode_few(&self, range: Range<usize>, from: u64, mask: u64, to: u64) -> usize {
        let mut index = range.start;
        while index < range.end {
            let entry = self.load(index) ^ from;
            if entry & mask != 0 {
                break;
            }
            self.store(index, entry ^ to);
            index += 1;
        }
        index
    }

    /// Recodes entries that walkers may write meanwhile. One that a walker has changed under our
    /// hands is looked at again.
    #[inline(never)]
    pub fn recode_contended(&self, range: Range<usize>, from: u64, mask: u64, to: u64) -> usize {
        let mut index = range.start;
        while index < range.end {
            let entry = self.load(index);
            if (entry ^ from) & mask != 0 {
                break;
            }
            if self.compare_exchange(index, entry, entry ^ from ^ to).is_ok() {
                index += 1;
            }
        }
        index
    }
}

impl<P: Platform> Drop for Table<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.platform.table_done(self.frame, self.base);
    }
}

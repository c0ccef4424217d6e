//! Filling tables that nobody can reach yet.
//!
//! A new sub-tree is built whole before it is linked: each table is opened once and each entry written once, with
//! plain stores, a run at a time. There is no call-back for a page, no look at what was there, and no barrier; the one
//! store that links the finished sub-tree pays for all of it.

use core::marker::PhantomData;
use core::ops::Range;

use crate::addr::{Level, Pa};
use crate::entry::Table;
use crate::flush::free_tree;
use crate::format::{Attrs, Format, Inexpressible, Perms};
use crate::platform::Platform;
use crate::walk::{MAX_LEVELS, Slice};

/// The leaves of one mapping: for any address, which leaf translates it.
pub(crate) struct Leaves<F: Format> {
    /// The descriptor at each level, without an address.
    bits: [u64; MAX_LEVELS],
    /// Output address less input address.
    delta: u64,
    /// The highest level whose leaves are allowed and aligned.
    top: Level,
    /// At which levels, as a bit set, runs are allowed and aligned.
    runs: u8,
    format: PhantomData<F>,
}

impl<F: Format> Leaves<F> {
    /// The leaves that map `slice` to the memory from `frame` on, none above `largest`.
    pub fn new(
        slice: Slice,
        frame: Pa,
        attrs: &Attrs,
        largest: Level,
        contiguous: bool,
    ) -> Result<Self, Inexpressible> {
        let delta = frame.get().wrapping_sub(slice.first);
        let aligned = |shift: u32| delta & ((1 << shift) - 1) == 0;
        let mut leaves = Self {
            bits: [0; MAX_LEVELS],
            delta,
            top: Level::PAGE,
            runs: 0,
            format: PhantomData,
        };
        let mut level = Level::PAGE;
        while level <= largest && slice.holds::<F>(level) && aligned(F::shift(level)) {
            leaves.bits[level.height() as usize] = F::encode(attrs, level)?;
            leaves.top = level;
            let run = F::contiguous(level);
            if contiguous && run > 0 && aligned(F::shift(level) + run) {
                leaves.runs |= 1 << level.height();
            }
            level = level.up();
        }
        Ok(leaves)
    }

    /// Whether one leaf at `level` can translate all of `slice`.
    #[inline(always)]
    pub fn fits(&self, level: Level, slice: Slice) -> bool {
        level <= self.top && slice.is_whole::<F>(level)
    }

    /// Whether leaves at `level` may form runs.
    #[inline(always)]
    pub fn has_runs(&self, level: Level) -> bool {
        self.runs >> level.height() & 1 != 0
    }

    /// The leaf at `level` that translates `first`, not in a run.
    #[inline(always)]
    pub fn leaf(&self, level: Level, first: u64) -> u64 {
        self.bits[level.height() as usize] | F::put_address(self.frame(first))
    }

    /// The memory that `first` is mapped to.
    #[inline(always)]
    pub fn memory(&self, first: u64) -> Pa {
        self.frame(first)
    }

    #[inline(always)]
    fn frame(&self, first: u64) -> Pa {
        Pa::new(first.wrapping_add(self.delta))
    }

    /// Writes leaves into `range` of a table at `level`; the first of them translates `first`. Whole aligned runs get
    /// the contiguous bit.
    #[inline]
    pub fn fill<P: Platform>(
        &self,
        table: &Table<'_, P>,
        level: Level,
        range: Range<usize>,
        first: u64,
    ) {
        let (start, end) = (range.start, range.end);
        let (mut head, mut middle) = (end, end);
        if self.has_runs(level) {
            let run = 1usize << F::contiguous(level);
            head = start.next_multiple_of(run).min(end);
            middle = (end & !(run - 1)).max(head);
        }
        let at = |index: usize| first.wrapping_add(((index - start) as u64) << F::shift(level));
        self.fill_linear(table, level, start..head, first, 0);
        self.fill_linear(table, level, head..middle, at(head), F::CONTIGUOUS);
        self.fill_linear(table, level, middle..end, at(middle), 0);
    }

    /// Writes leaves with a running value, which is started anew where the address continues in other bits of the
    /// descriptor.
    #[inline(always)]
    fn fill_linear<P: Platform>(
        &self,
        table: &Table<'_, P>,
        level: Level,
        range: Range<usize>,
        first: u64,
        mark: u64,
    ) {
        let (mut start, mut first) = (range.start, first);
        while start < range.end {
            let mut count = range.end - start;
            if F::LINEAR_BITS < 64 {
                let frame = self.frame(first).get();
                let linear = (1u64 << (F::LINEAR_BITS % 64)) - 1;
                let left = ((linear - (frame & linear)) >> F::shift(level)) + 1;
                count = count.min(usize::try_from(left).unwrap_or(usize::MAX));
            }
            let value = self.leaf(level, first) | mark;
            table.fill(start..start + count, value, 1 << F::shift(level));
            start += count;
            first = first.wrapping_add((count as u64) << F::shift(level));
        }
    }
}

/// Where tables come from while a sub-tree is built.
pub(crate) trait Frames {
    /// A frame for a table at `level`.
    fn take(&mut self, level: Level) -> Option<Pa>;
}

/// Frames straight from the platform.
pub(crate) struct Fresh<'a, P>(pub &'a P);

impl<P: Platform> Frames for Fresh<'_, P> {
    #[inline(always)]
    fn take(&mut self, level: Level) -> Option<Pa> {
        self.0.alloc_table(level)
    }
}

/// Builds a table at `level` in which `leaves` translate `slice` and nothing else is mapped. Its tables take `deny`
/// away. `None`, and nothing is left of it, if there were not enough frames.
pub(crate) fn build<F: Format, P: Platform>(
    platform: &P,
    frames: &mut impl Frames,
    leaves: &Leaves<F>,
    level: Level,
    slice: Slice,
    deny: Perms,
) -> Option<Pa> {
    let Some(below) = level.down() else {
        return build_pages::<F, P>(platform, frames, leaves, slice);
    };
    let frame = frames.take(level)?;
    // SAFETY: the frame was allocated for this table.
    let table = unsafe { Table::open(platform, frame, level) };
    let (start, end) = (
        F::index(slice.first, level),
        F::index(slice.last, level) + 1,
    );
    table.fill(0..start, 0, 0);
    let size = 1u64 << F::shift(level);
    let (mut index, mut first) = (start, slice.first);
    while index < end {
        let last = (first | (size - 1)).min(slice.last);
        let part = Slice { first, last };
        let mut count = 1;
        if leaves.fits(level, part) {
            // All whole entries from here on are leaves: one run.
            let whole = ((slice.last - first) >> F::shift(level)) as usize
                + usize::from(slice.last & (size - 1) == size - 1);
            count = whole.clamp(1, end - index);
            leaves.fill(&table, level, index..index + count, first);
        } else {
            // Nearly all tables are the last ones: they are filled in this loop.
            let child = if below == Level::PAGE {
                build_pages::<F, P>(platform, frames, leaves, part)
            } else {
                build::<F, P>(platform, frames, leaves, below, part, deny)
            };
            let Some(child) = child else {
                table.fill(index..1 << F::INDEX_BITS, 0, 0);
                drop(table);
                free_tree::<F, P>(platform, frame, level);
                return None;
            };
            table.store(index, F::table(child, deny));
        }
        index += count;
        first = first.wrapping_add((count as u64) << F::shift(level)) & !(size - 1);
    }
    table.fill(end..1 << F::INDEX_BITS, 0, 0);
    Some(frame)
}

/// The same of a table of pages: the level is a constant.
#[inline(always)]
fn build_pages<F: Format, P: Platform>(
    platform: &P,
    frames: &mut impl Frames,
    leaves: &Leaves<F>,
    slice: Slice,
) -> Option<Pa> {
    let level = Level::PAGE;
    let frame = frames.take(level)?;
    // SAFETY: the frame was allocated for this table.
    let table = unsafe { Table::open(platform, frame, level) };
    let (start, end) = (
        F::index(slice.first, level),
        F::index(slice.last, level) + 1,
    );
    table.fill(0..start, 0, 0);
    leaves.fill(&table, level, start..end, slice.first);
    table.fill(end..1 << F::INDEX_BITS, 0, 0);
    Some(frame)
}

//! Filling tables that cannot be reached yet.
//!
//! A new sub-tree is built whole before it is linked: each table is opened once and each entry
//! written once, with plain stores, a run at a time. There is no call-back for a page, no look at
//! what was there, and no barrier; the one store that links the finished sub-tree pays for all of
//! it.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ops::Range;

use crate::addr::{Level, Pa, Span};
use crate::flush::free_tree;
use crate::format::packed::Packed;
use crate::format::{Attrs, Format, Inexpressible, Perms, encoded};
use crate::platform::Platform;
use crate::table::Table;
use crate::walk::{ByLeafLevel, Slice};

/// A range of input addresses that is mapped to consecutive frames.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub first: u64,
    pub last: u64,
    /// Output address less input address.
    pub delta: u64,
}

impl Piece {
    /// Whether leaves of this many bits may translate it.
    #[inline(always)]
    fn is_aligned(&self, shift: u32) -> bool {
        self.delta & ((1 << shift) - 1) == 0
    }
}

/// The memory of a mapping: runs of frames, one after the other. They are asked for upwards, more
/// than once; the place is kept.
#[derive(Clone)]
pub(crate) struct Source<'f> {
    runs: &'f [Span<Pa>],
    first: u64,
    /// The number of the current run, and the piece that it is.
    place: Cell<(usize, Piece)>,
}

impl<'f> Source<'f> {
    /// The input address `first` is mapped to the start of the first run.
    #[inline(always)]
    pub fn new(first: u64, runs: &'f [Span<Pa>]) -> Self {
        Self { runs, first, place: Cell::new((0, Self::piece(first, runs, 0))) }
    }

    #[inline(always)]
    fn piece(first: u64, runs: &[Span<Pa>], number: usize) -> Piece {
        // Without any run nothing is asked for.
        let run = runs.get(number);
        let (start, size) = run.map_or((0, 1), |run| (run.start().get(), run.size()));
        Piece { first, last: first.wrapping_add(size - 1), delta: start.wrapping_sub(first) }
    }

    /// The piece that `input` is in.
    #[inline(always)]
    fn at(&self, input: u64) -> Piece {
        let (_, piece) = self.place.get();
        match piece.first <= input && input <= piece.last {
            true => piece,
            false => self.find(input),
        }
    }

    #[inline(never)]
    fn find(&self, input: u64) -> Piece {
        let (mut number, mut piece) = self.place.get();
        if input < piece.first {
            (number, piece) = (0, Self::piece(self.first, self.runs, 0));
        }
        while input > piece.last && number + 1 < self.runs.len() {
            number += 1;
            piece = Self::piece(piece.last + 1, self.runs, number);
        }
        self.place.set((number, piece));
        piece
    }
}

/// The leaves of one mapping: for any address, which leaf translates it.
pub(crate) struct Leaves<'f, F: Format> {
    /// The descriptor at each level, without an address.
    bits: ByLeafLevel<u64>,
    source: Source<'f>,
    /// The highest level whose leaves are allowed.
    top: Level,
    /// Whether runs are.
    pub runs: bool,
    format: PhantomData<F>,
}

impl<'f, F: Format> Leaves<'f, F> {
    /// The leaves that map `slice` to the memory of `source`, none above `largest`.
    pub fn new(
        slice: Slice,
        source: Source<'f>,
        attrs: &Attrs,
        largest: Level,
        runs: bool,
    ) -> Result<Self, Inexpressible> {
        let page = encoded::<F>(Packed::of(attrs), Level::PAGE)?;
        let mut leaves = Self::of_pages(source, page, runs);
        leaves.enlarge(slice, attrs, largest)?;
        Ok(leaves)
    }

    /// Pages alone, by the descriptor of one without its address.
    #[inline(always)]
    pub fn of_pages(source: Source<'f>, page: u64, runs: bool) -> Self {
        let mut bits = ByLeafLevel::new(0);
        bits[Level::PAGE] = page;
        Self { bits, source, top: Level::PAGE, runs, format: PhantomData }
    }

    /// Allows larger leaves with these attributes where they fit into `slice`, none above
    /// `largest`.
    #[inline(always)]
    pub fn enlarge(
        &mut self,
        slice: Slice,
        attrs: &Attrs,
        largest: Level,
    ) -> Result<(), Inexpressible> {
        let mut level = Level::PAGE.up();
        while level <= largest && slice.holds::<F>(level) {
            self.bits[level] = encoded::<F>(Packed::of(attrs), level)?;
            self.top = level;
            level = level.up();
        }
        Ok(())
    }

    /// Whether one leaf at `level` can translate all of `slice`.
    #[inline(always)]
    pub fn fits(&self, level: Level, slice: Slice) -> bool {
        level <= self.top && slice.is_whole::<F>(level) && {
            let piece = self.source.at(slice.first);
            slice.last <= piece.last && piece.is_aligned(F::shift(level))
        }
    }

    /// Whether the leaf at `level` for `first` may be in a run: runs are allowed, and the memory of
    /// all its members is consecutive and aligned.
    #[inline(always)]
    pub fn may_be_in_run(&self, level: Level, first: u64) -> bool {
        let run = F::contiguous(level);
        if !self.runs || run == 0 {
            return false;
        }
        let (piece, shift) = (self.source.at(first), F::shift(level) + run);
        let low = (1 << shift) - 1;
        piece.first <= first & !low && first | low <= piece.last && piece.is_aligned(shift)
    }

    /// The leaf at `level` that translates `first`, not in a run.
    #[inline(always)]
    pub fn leaf(&self, level: Level, first: u64) -> u64 {
        F::with_address(self.bits[level], self.memory(first))
    }

    /// The memory that `first` is mapped to.
    #[inline(always)]
    pub fn memory(&self, first: u64) -> Pa {
        Pa::new(first.wrapping_add(self.source.at(first).delta))
    }

    /// How many whole leaves at `level` from `first` on lie in one piece.
    #[inline(always)]
    pub fn whole(&self, level: Level, first: u64) -> usize {
        let size = (self.source.at(first).last - first).saturating_add(1);
        usize::try_from(size >> F::shift(level)).unwrap_or(usize::MAX)
    }

    /// Writes leaves into `range` of a table at `level`; the first of them translates `first`.
    #[inline(always)]
    pub fn fill<P: Platform>(
        &self,
        table: &Table<'_, P>,
        level: Level,
        range: Range<usize>,
        first: u64,
    ) {
        let runs = match self.runs {
            true => F::contiguous(level),
            false => 0,
        };
        fill::<F, P>(table, level, range, first, (self.bits[level], runs), &self.source);
    }
}

/// Writes leaves into `range` of a table at `level`: `bits` with the memory of `source`, of which
/// the first is that of `first`. Whole aligned runs of `1 << runs` get the contiguous bit.
#[inline(never)]
pub(super) fn fill<F: Format, P: Platform>(
    table: &Table<'_, P>,
    level: Level,
    range: Range<usize>,
    mut first: u64,
    (bits, runs): (u64, u32),
    source: &Source<'_>,
) {
    let shift = F::shift(level);
    let mut start = range.start;
    while start < range.end {
        // A stretch of leaves of one piece, all or none of which are in runs.
        let piece = source.at(first);
        let left = (piece.last - first).saturating_add(1) >> shift;
        let mut count = (left as usize).clamp(1, range.end - start);
        let frame = Pa::new(first.wrapping_add(piece.delta));
        let mut leaf = F::with_address(bits, frame);
        if F::CONTIGUOUS != 0 && runs > 0 && piece.is_aligned(shift + runs) {
            let members = 1usize << runs;
            let before = (start.wrapping_neg() & (members - 1)).min(count);
            if before > 0 {
                count = before;
            } else if count >= members {
                count &= !(members - 1);
                leaf |= F::CONTIGUOUS;
            }
        }
        if F::LINEAR_BITS < 64 {
            // The address continues in other bits of the descriptor.
            let linear = (1u64 << (F::LINEAR_BITS % 64)) - 1;
            let left = ((linear - (frame.get() & linear)) >> shift) + 1;
            count = count.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        let mut step = F::put_address(Pa::new(1 << shift));
        if bits & F::address_mask(level) != 0 {
            // A parked leaf's address is inverted on x86.
            step = step.wrapping_neg();
        }
        table.fill(start..start + count, leaf, step);
        start += count;
        first = first.wrapping_add((count as u64) << shift);
    }
}

/// Writes leaves at `level` into all of a table: those of `bits`, the descriptor without its
/// address, from `frame` on.
pub(crate) fn fill_parts<F: Format, P: Platform>(
    table: &Table<'_, P>,
    bits: u64,
    frame: Pa,
    level: Level,
) {
    for index in 0..1u64 << F::INDEX_BITS {
        let frame = Pa::new(frame.get() + (index << F::shift(level)));
        table.store(index as usize, F::with_address(bits, frame));
    }
}

/// A source of tables while a sub-tree is built.
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

/// Builds a table at `level` in which `leaves` translate `slice` and nothing else is mapped. Its
/// tables take `deny` away. `None`, and nothing is left of it, if there were not enough frames.
pub(crate) fn build<F: Format, P: Platform>(
    platform: &P,
    frames: &mut impl Frames,
    leaves: &Leaves<'_, F>,
    level: Level,
    slice: Slice,
    deny: Perms,
) -> Option<Pa> {
    let frame = frames.take(level)?;
    // SAFETY: the frame was allocated for this table.
    let table = unsafe { Table::open(platform, frame, level) };
    let (start, end) = (F::index(slice.first, level), F::index(slice.last, level) + 1);
    table.fill(0..start, 0, 0);
    if level == Level::PAGE {
        // Nearly all tables are the last ones.
        leaves.fill(&table, level, start..end, slice.first);
        table.fill(end..1 << F::INDEX_BITS, 0, 0);
        return Some(frame);
    }
    let size = 1u64 << F::shift(level);
    let (mut index, mut first) = (start, slice.first);
    while index < end {
        let last = (first | (size - 1)).min(slice.last);
        let part = Slice { first, last };
        let mut count = 1;
        if leaves.fits(level, part) {
            // All whole entries of the piece from here on are leaves: one run.
            let whole = ((slice.last - first) >> F::shift(level)) as usize
                + usize::from(slice.last & (size - 1) == size - 1);
            count = whole.min(leaves.whole(level, first)).clamp(1, end - index);
            leaves.fill(&table, level, index..index + count, first);
        } else {
            let child = match level.down() {
                Some(below) => build::<F, P>(platform, frames, leaves, below, part, deny),
                None => None,
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

/// Builds what is missing below an entry at `level` for one page, whose descriptor is `page`. Its
/// tables take `deny` away. `None`, and nothing is left of it, if there were not enough frames.
#[cold]
#[inline(never)]
pub(crate) fn build_path<F: Format, P: Platform>(
    platform: &P,
    level: Level,
    input: u64,
    page: u64,
    deny: Perms,
) -> Option<Pa> {
    let (mut entry, mut at) = (page, Level::PAGE);
    loop {
        let Some(frame) = platform.alloc_table(at) else {
            // Each table that was made is the only one in the next.
            while let Some(below) = at.down() {
                let frame = F::address(entry, at);
                // SAFETY: allocated below, and never linked: freed once (1., 2.).
                unsafe {
                    entry = Table::open(platform, frame, below).load(F::index(input, below));
                    platform.free_table(frame, below);
                }
                at = below;
            }
            return None;
        };
        // SAFETY: the frame was allocated for this table.
        let table = unsafe { Table::open(platform, frame, at) };
        table.fill(0..1 << F::INDEX_BITS, 0, 0);
        table.store(F::index(input, at), entry);
        drop(table);
        at = at.up();
        if at == level {
            return Some(frame);
        }
        entry = F::table(frame, deny);
    }
}

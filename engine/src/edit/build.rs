//! Filling tables that cannot be reached yet.
//!
//! A new sub-tree is built whole before it is linked: each table is opened once and each entry
//! written once, with plain stores, a run at a time. There is no call-back for a page, no look at
//! what was there, and no barrier; the one store that links the finished sub-tree pays for all of
//! it.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ops::Range;

use crate::SMALL;
use crate::addr::{Level, Pa, Span};
use crate::flush::free_tree;
use crate::format::packed::Packed;
use crate::format::{Attrs, Format, Inexpressible, Kind, Perms, encoded};
use crate::platform::Platform;
use crate::run::members;
use crate::table::Table;
use crate::walk::{ByLeafLevel, Slice};

/// A stretch of input addresses that is mapped to consecutive frames.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub first: u64,
    pub last: u64,
    /// Output address less input address.
    pub delta: u64,
}

/// Where the memory of a mapping lies.
pub(crate) trait Source: Clone {
    /// There is one piece.
    const ONE: bool;

    /// The piece that `input` is in.
    fn at(&self, input: u64) -> Piece;
}

/// All of it consecutive.
#[derive(Clone)]
pub(crate) struct Consecutive {
    delta: u64,
}

impl Consecutive {
    /// Of an edit that maps nothing.
    pub const NONE: Self = Self { delta: 0 };

    /// The input address `first` is mapped to `frame`.
    #[inline(always)]
    pub fn new(first: u64, frame: Pa) -> Self {
        Self {
            delta: frame.get().wrapping_sub(first),
        }
    }
}

impl Source for Consecutive {
    const ONE: bool = true;

    #[inline(always)]
    fn at(&self, _: u64) -> Piece {
        Piece {
            first: 0,
            last: u64::MAX,
            delta: self.delta,
        }
    }
}

/// Runs of frames, one after the other. They are asked for upwards, more than once; the place is
/// kept.
#[derive(Clone)]
pub(crate) struct Scattered<'f> {
    frames: &'f [Span<Pa>],
    first: u64,
    /// The number of a run, and the input address that it starts at.
    place: Cell<(usize, u64)>,
}

impl<'f> Scattered<'f> {
    /// The input address `first` is mapped to the start of the first run.
    pub fn new(first: u64, frames: &'f [Span<Pa>]) -> Self {
        Self {
            frames,
            first,
            place: Cell::new((0, first)),
        }
    }
}

impl Source for Scattered<'_> {
    const ONE: bool = false;

    fn at(&self, input: u64) -> Piece {
        let (mut number, mut first) = self.place.get();
        if input < first {
            (number, first) = (0, self.first);
        }
        loop {
            let run = self.frames[number];
            let last = first + (run.size() - 1);
            if input <= last || number + 1 == self.frames.len() {
                self.place.set((number, first));
                let delta = run.start().get().wrapping_sub(first);
                return Piece { first, last, delta };
            }
            (number, first) = (number + 1, last + 1);
        }
    }
}

/// The leaves of one mapping: for any address, which leaf translates it.
pub(crate) struct Leaves<F: Format, S = Consecutive> {
    /// The descriptor at each level, without an address.
    bits: ByLeafLevel<u64>,
    source: S,
    /// The highest level whose leaves are allowed.
    top: Level,
    /// Whether runs are.
    pub runs: bool,
    format: PhantomData<F>,
}

impl<F: Format, S: Source> Leaves<F, S> {
    /// The leaves that map `slice` to the memory of `source`, none above `largest`.
    pub fn new(
        slice: Slice,
        source: S,
        attrs: &Attrs,
        largest: Level,
        runs: bool,
    ) -> Result<Self, Inexpressible> {
        let mut leaves = Self::of_pages(source, 0, runs);
        leaves.encode(slice, Packed::of(attrs), largest)?;
        Ok(leaves)
    }

    /// Leaves with these attributes, as large as fit into `slice`, none above `largest`.
    pub fn encode(
        &mut self,
        slice: Slice,
        attrs: Packed,
        largest: Level,
    ) -> Result<(), Inexpressible> {
        // Pages there are, whatever else there is.
        let mut level = Level::PAGE;
        loop {
            self.bits[level] = encoded::<F>(attrs, level)?;
            self.top = level;
            level = level.up();
            if !F::is_leaf_level(level) || level > largest || !slice.holds::<F>(level) {
                return Ok(());
            }
        }
    }

    /// The same of pages alone, by the descriptor of one without its address.
    #[inline(always)]
    pub fn of_pages(source: S, page: u64, runs: bool) -> Self {
        let mut bits = ByLeafLevel::new(0);
        bits[Level::PAGE] = page;
        Self {
            bits,
            source,
            top: Level::PAGE,
            runs,
            format: PhantomData,
        }
    }

    /// Whether one leaf at `level` can translate all of `slice`.
    #[inline(always)]
    pub fn fits(&self, level: Level, slice: Slice) -> bool {
        level <= self.top && slice.is_whole::<F>(level) && {
            let piece = self.source.at(slice.first);
            slice.last <= piece.last && piece.is_aligned(F::shift(level))
        }
    }

    /// The run of leaves at `level` that the leaf for `first` may be a member of, if runs are
    /// allowed and aligned.
    #[inline(always)]
    pub fn run(&self, level: Level, first: u64) -> Option<Slice> {
        let run = F::contiguous(level);
        if !self.runs || run == 0 {
            return None;
        }
        let piece = self.source.at(first);
        let low = (1u64 << (F::shift(level) + run)) - 1;
        let slice = Slice {
            first: first & !low,
            last: first | low,
        };
        let inside = piece.first <= slice.first && slice.last <= piece.last;
        (inside && piece.is_aligned(F::shift(level) + run)).then_some(slice)
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
    /// Whole aligned runs get the contiguous bit.
    #[inline]
    pub fn fill<P: Platform>(
        &self,
        table: &Table<'_, P>,
        level: Level,
        range: Range<usize>,
        mut first: u64,
    ) {
        if S::ONE {
            return self.fill_piece(table, level, range, first);
        }
        let mut start = range.start;
        while start < range.end {
            let end = start + self.whole(level, first).clamp(1, range.end - start);
            self.fill_piece(table, level, start..end, first);
            first = first.wrapping_add(((end - start) as u64) << F::shift(level));
            start = end;
        }
    }

    /// The same in one piece.
    #[inline(always)]
    fn fill_piece<P: Platform>(
        &self,
        table: &Table<'_, P>,
        level: Level,
        range: Range<usize>,
        first: u64,
    ) {
        let (start, end) = (range.start, range.end);
        let (mut head, mut middle) = (end, end);
        let run = F::contiguous(level);
        if self.runs && run > 0 {
            let Piece { delta, .. } = self.source.at(first);
            if delta & ((1 << (F::shift(level) + run)) - 1) == 0 {
                let run = 1usize << run;
                head = start.next_multiple_of(run).min(end);
                middle = (end & !(run - 1)).max(head);
            }
        }
        let at = |index: usize| first.wrapping_add(((index - start) as u64) << F::shift(level));
        self.fill_linear(table, level, start..head, first, 0);
        self.fill_linear(table, level, head..middle, at(head), F::CONTIGUOUS);
        self.fill_linear(table, level, middle..end, at(middle), 0);
    }

    /// Writes leaves with a running value, which is started anew where the address continues in
    /// other bits of the descriptor.
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
        let mut step = 1u64 << F::shift(level);
        if self.bits[level] & F::address_mask(level) != 0 {
            // A parked leaf's address is inverted on x86.
            step = step.wrapping_neg();
        }
        while start < range.end {
            let mut count = range.end - start;
            if F::LINEAR_BITS < 64 {
                let frame = self.memory(first).get();
                let linear = (1u64 << (F::LINEAR_BITS % 64)) - 1;
                let left = ((linear - (frame & linear)) >> F::shift(level)) + 1;
                count = count.min(usize::try_from(left).unwrap_or(usize::MAX));
            }
            let value = self.leaf(level, first) | mark;
            table.fill(start..start + count, value, step);
            start += count;
            first = first.wrapping_add((count as u64) << F::shift(level));
        }
    }
}

/// What is to be mapped, and where tables for it come from: sub-trees are built entry by entry, in
/// little code.
pub(super) struct Seed<F: Format, S> {
    pub leaves: Leaves<F, S>,
    /// No leaf reaches over an end of it.
    pub slice: Slice,
    /// What its tables take away.
    pub deny: Perms,
}

impl<F: Format, S: Source> Seed<F, S> {
    /// Whether `part` is translated by one leaf at `level`.
    #[inline(never)]
    pub fn fits(&self, level: Level, part: Slice) -> bool {
        let Slice { first, last } = self.slice;
        let over_start = (part.first < first) ^ (part.last < first);
        let over_end = (part.first <= last) ^ (part.last <= last);
        !over_start & !over_end && self.leaves.fits(level, part)
    }

    /// The leaf that translates `first`, at this place of a table.
    #[inline(never)]
    pub fn leaf<P: Platform>(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
    ) -> u64 {
        let leaf = self.leaves.leaf(level, first);
        match F::CONTIGUOUS != 0 && self.in_run(table, index, level, first) {
            true => leaf | F::CONTIGUOUS,
            false => leaf,
        }
    }

    /// Whether the entry is a member of an aligned run of which all members are leaves of this
    /// mapping.
    fn in_run<P: Platform>(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
    ) -> bool {
        let Some(run) = self.leaves.run(level, first) else {
            return false;
        };
        // A member that is not one of these leaves is a table, there before or just built: valid or
        // suspended.
        run.first >= self.slice.first
            && run.last <= self.slice.last
            && members::<F>(index, level).all(|member| {
                let entry = table.load(member);
                entry == 0 || F::kind(entry, level) == Kind::Leaf
            })
    }

    /// Builds a table below an entry at `level` in which `slice` is translated and nothing else,
    /// and returns its descriptor. `None`, and nothing is left of it, if there were not enough
    /// frames.
    #[inline(never)]
    pub fn build<P: Platform>(&self, platform: &P, level: Level, mut slice: Slice) -> Option<u64> {
        let level = level.down()?;
        let frame = platform.alloc_table(level)?;
        // SAFETY: the frame was allocated for this table.
        let table = unsafe { Table::open(platform, frame, level) };
        table.fill(0..1 << F::INDEX_BITS, 0, 0);
        loop {
            let part = slice.part::<F>(level);
            let index = F::index(part.first, level);
            let entry = if self.fits(level, part) {
                self.leaf(&table, index, level, part.first)
            } else if let Some(child) = self.build(platform, level, part) {
                child
            } else {
                drop(table);
                free_tree::<F, P>(platform, frame, level);
                return None;
            };
            table.store(index, entry);
            if part.last == slice.last {
                return Some(F::table(frame, self.deny));
            }
            slice.first = part.last + 1;
        }
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

impl Piece {
    /// Whether leaves of so many bits may translate it.
    #[inline(always)]
    fn is_aligned(&self, shift: u32) -> bool {
        self.delta & ((1 << shift) - 1) == 0
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

/// Builds a table at `level` in which `leaves` translate `slice` and nothing else is mapped. Its
/// tables take `deny` away. `None`, and nothing is left of it, if there were not enough frames.
pub(crate) fn build<F: Format, P: Platform, S: Source>(
    platform: &P,
    frames: &mut impl Frames,
    leaves: &Leaves<F, S>,
    level: Level,
    slice: Slice,
    deny: Perms,
) -> Option<Pa> {
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
            // All whole entries of the piece from here on are leaves: one run.
            let whole = ((slice.last - first) >> F::shift(level)) as usize
                + usize::from(slice.last & (size - 1) == size - 1);
            count = whole.min(leaves.whole(level, first)).clamp(1, end - index);
            leaves.fill(&table, level, index..index + count, first);
        } else {
            let child = match level.down() {
                // Nearly all tables are the last ones: they are filled in this loop.
                Some(Level::PAGE) if !SMALL => build_pages(platform, frames, leaves, part),
                Some(below) => build::<F, P, S>(platform, frames, leaves, below, part, deny),
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

/// The same of a table of pages: the level is a constant.
#[inline(always)]
fn build_pages<F: Format, P: Platform, S: Source>(
    platform: &P,
    frames: &mut impl Frames,
    leaves: &Leaves<F, S>,
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

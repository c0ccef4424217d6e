//! The walker.
//!
//! There is one. It goes down a tree over a range of input addresses, in order, and asks a visitor
//! at each entry what to do: nothing, or to go into the table that the entry points to. At the last
//! level it hands the visitor a whole run of entries of one table, so that the inner loop of an
//! edit is the visitor's own and nothing is asked for each page. Map, unmap, change, query and
//! reclaiming are visitors; the walk is compiled once for all of them.
//!
//! The depth is bounded by the levels of the format, at most five; so is the recursion.

use core::ops::{ControlFlow, Index, IndexMut, Range};

use crate::addr::{Level, Pa};
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::table::Table;

/// The most levels that any format has.
pub(crate) const MAX_LEVELS: usize = 5;

/// The next step of a walk, after one entry.
pub(crate) enum Step {
    /// Go on with the next entry.
    Next,
    /// Go into the table in this frame first.
    Into(Pa),
    /// End the walk here. Why, the visitor remembers.
    Stop,
}

/// The part of the walked range that lies below one entry: the first and the last address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub first: u64,
    pub last: u64,
}

impl Slice {
    /// Returns the slice that one entry at `level` covers, around an address.
    #[inline(always)]
    pub fn around<F: Format>(input: u64, level: Level) -> Self {
        let low = (1 << F::shift(level)) - 1;
        Self { first: input & !low, last: input | low }
    }

    /// Whether one table of pages covers all of it.
    #[inline(always)]
    pub fn is_in_one_table<F: Format>(self) -> bool {
        (self.first ^ self.last) >> (F::PAGE_SHIFT + F::INDEX_BITS) == 0
    }

    /// Whether the slice is all that one entry at `level` covers.
    #[inline(always)]
    pub fn is_whole<F: Format>(self, level: Level) -> bool {
        self.last.wrapping_sub(self.first) == (1 << F::shift(level)) - 1
    }

    /// Whether a leaf at `level` may lie in the slice: there are such leaves, and the slice is not
    /// too small.
    #[inline(always)]
    pub fn holds<F: Format>(self, level: Level) -> bool {
        F::is_leaf_level(level) && self.last - self.first >= (1 << F::shift(level)) - 1
    }
}

/// Something for each level, with as much room as makes any index one of it.
#[derive(Clone, Copy)]
pub(crate) struct ByLevel<T, const ROOM: usize = 8>([T; ROOM]);

/// A value for each level that has leaves, of which no format has more.
pub(crate) type ByLeafLevel<T> = ByLevel<T, 4>;

impl<T: Copy, const ROOM: usize> ByLevel<T, ROOM> {
    #[inline(always)]
    pub const fn new(value: T) -> Self {
        Self([value; ROOM])
    }
}

impl<T, const ROOM: usize> Index<Level> for ByLevel<T, ROOM> {
    type Output = T;

    #[inline(always)]
    fn index(&self, level: Level) -> &T {
        &self.0[level.height() as usize % ROOM]
    }
}

impl<T, const ROOM: usize> IndexMut<Level> for ByLevel<T, ROOM> {
    #[inline(always)]
    fn index_mut(&mut self, level: Level) -> &mut T {
        &mut self.0[level.height() as usize % ROOM]
    }
}

/// Permissions that the tables above each level take away, along the path that a walk is on.
#[derive(Clone, Copy)]
pub(crate) struct Denied(ByLevel<Perms>);

impl Denied {
    /// Nothing yet, but `denied` at the level where the walk starts and below.
    #[inline(always)]
    pub fn new(denied: Perms) -> Self {
        Self(ByLevel::new(denied))
    }

    /// Returns the permissions that are taken away from the entries at `level`.
    #[inline(always)]
    pub fn at(&self, level: Level) -> Perms {
        self.0[level]
    }

    /// The walk goes through the table descriptor `table` at the level above `below`.
    #[inline(always)]
    pub fn enter<F: Format>(&mut self, table: u64, below: Level) {
        self.0[below] = self.at(below.up()) | F::denied(table);
    }
}

/// An operation at the entries of a walk.
pub(crate) trait Visit<F: Format, P: Platform> {
    /// One entry above the level of pages, and the part of the range below it.
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step;

    /// A run of entries at the level of pages; `first` is the address that the first of them
    /// translates. The walk ends if it breaks. A visitor that is not interested in pages leaves it
    /// out.
    #[inline(always)]
    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let _ = (table, range, first);
        ControlFlow::Continue(())
    }

    /// Whether [`entry`](Visit::entry) is to be called for every hole: an entry that is zero, and
    /// invalid in every format. Otherwise the walk passes holes by, by lines, but for one that is
    /// the first or the last on its way. What fills holes says so; what forgets to fills the first
    /// alone, and fails its first test.
    fn fills_holes(&self) -> bool {
        false
    }

    /// The walk has come back from the table in `child` that [`entry`](Visit::entry) sent it into.
    #[inline(always)]
    fn leave(&mut self, level: Level, child: Pa) {
        let _ = (level, child);
    }
}

/// Visits pages one by one as [entries](Visit::entry) of their level: the [`pages`](Visit::pages)
/// of a visitor that does with a page what it does with a block, and is rarely needed.
pub(crate) fn one_by_one<F: Format, P: Platform>(
    visitor: &mut dyn Visit<F, P>,
    table: &Table<'_, P>,
    range: Range<usize>,
    first: u64,
) -> ControlFlow<()> {
    let mut slice = Slice::around::<F>(first, Level::PAGE);
    for index in range {
        if let Step::Stop = visitor.entry(table, index, Level::PAGE, slice) {
            return ControlFlow::Break(());
        }
        slice = Slice::around::<F>(slice.last.wrapping_add(1), Level::PAGE);
    }
    ControlFlow::Continue(())
}

/// The table and index that a straight walk down has reached.
pub(crate) struct Place<'p, P: Platform> {
    pub table: Table<'p, P>,
    pub range: Range<usize>,
}

/// Goes straight down from the root in `frame` to the table of pages that covers all of `slice`.
/// With `SHARED`, tables may be linked meanwhile.
///
/// It is the walk of what is small, and of most edits: a load and a test for each level. `None` if
/// there is no such table, or it does not cover all. With `ONE`, one entry is what it goes to, and
/// no loop over more that needs the registers.
///
/// # Safety
/// 1. `frame` holds the root of a tree of this format on `platform`.
#[inline(always)]
pub(crate) unsafe fn descend<F: Format, P: Platform, const SHARED: bool, const ONE: bool>(
    platform: &P,
    frame: Pa,
    slice: Slice,
) -> Option<Place<'_, P>> {
    if !slice.is_in_one_table::<F>() {
        return None;
    }
    // SAFETY: (1.)
    let mut frame =
        unsafe { descend_to_tables::<F, P, SHARED, ONE>(platform, frame, slice.first)? };
    if F::LEVELS > 1 {
        let above = Level::PAGE.up();
        let index = F::index(slice.first, above);
        // SAFETY: a walk has come to it.
        frame = unsafe { step::<F, P, SHARED, ONE>(platform, frame, above, index)? };
    }
    let level = Level::PAGE;
    // SAFETY: as above.
    let table = unsafe { Table::open(platform, frame, level) };
    let range = F::index(slice.first, level)..F::index(slice.last, level) + 1;
    Some(Place { table, range })
}

/// Descends like [`descend`], from the table in `tables`, whose entries are tables of pages, where
/// the first address is in the page of this number below it.
///
/// # Safety
/// 1. `tables` holds such a table of a tree of this format, on `platform`.
/// 2. It has so many pages.
#[inline(always)]
pub(crate) unsafe fn descend_near<F: Format, P: Platform, const ONE: bool>(
    platform: &P,
    mut tables: Pa,
    number: u64,
    slice: Slice,
) -> Option<Place<'_, P>> {
    if !slice.is_in_one_table::<F>() {
        return None;
    }
    let number = number as usize;
    let (above, start) = (number >> F::INDEX_BITS, number & ((1 << F::INDEX_BITS) - 1));
    if F::LEVELS > 1 {
        // SAFETY: (1.), (2.)
        tables = unsafe { step::<F, P, false, ONE>(platform, tables, Level::PAGE.up(), above)? };
    }
    let level = Level::PAGE;
    // SAFETY: what a table descriptor of the tree points to, or the root where it is a table of
    // pages.
    let table = unsafe { Table::open(platform, tables, level) };
    let range = start..F::index(slice.last, level) + 1;
    Some(Place { table, range })
}

/// Descends like [`descend`], as far as the table whose entries are tables of pages; the root,
/// where there is no other.
///
/// # Safety
/// 1. As of [`descend`].
#[inline(always)]
pub(crate) unsafe fn descend_to_tables<
    F: Format,
    P: Platform,
    const SHARED: bool,
    const ONE: bool,
>(
    platform: &P,
    mut frame: Pa,
    input: u64,
) -> Option<Pa> {
    // Written out, so that the level is a constant in each step, and with it shifts, masks and what
    // may be there.
    macro_rules! steps {
        ($($height:literal),*) => { $(
            let level = Level::new($height);
            if level <= F::root_level() {
                let index = F::index(input, level);
                // SAFETY: the root (1.), or what a table descriptor of the tree points to.
                frame = unsafe { step::<F, P, SHARED, ONE>(platform, frame, level, index)? };
            }
        )* };
    }
    steps!(4, 3, 2);
    Some(frame)
}

/// Goes from an entry of a table to the table that it points to, if it does.
///
/// # Safety
/// 1. `frame` holds a table of this format at `level`, on `platform`, which has this index.
#[inline(always)]
pub(crate) unsafe fn step<F: Format, P: Platform, const SHARED: bool, const ONE: bool>(
    platform: &P,
    frame: Pa,
    level: Level,
    index: usize,
) -> Option<Pa> {
    // SAFETY: (1.)
    let table = unsafe { Table::open(platform, frame, level) };
    let entry = match SHARED {
        true => table.follow(index),
        false => table.load(index),
    };
    match ONE {
        true => F::table_below(entry, level),
        false => (F::kind(entry, level) == Kind::Table).then(|| F::address(entry, level)),
    }
}

/// Walks the table in `frame` at `level` over `slice`.
///
/// # Safety
/// 1. `frame` holds a table at `level` of a tree of this format on `platform`, and so does what its
///    table descriptors point to.
pub(crate) unsafe fn walk<F: Format, P: Platform>(
    platform: &P,
    frame: Pa,
    level: Level,
    slice: Slice,
    visitor: &mut dyn Visit<F, P>,
) -> ControlFlow<()> {
    // SAFETY: (1.), and the visitor read the frame of each table below from a descriptor of the one
    // above.
    let table = unsafe { Table::open(platform, frame, level) };
    let mut index = F::index(slice.first, level);
    let Some(below) = level.down() else {
        let end = F::index(slice.last, level) + 1;
        return visitor.pages(&table, index..end, slice.first);
    };
    let mut part = slice;
    loop {
        part.last = (part.first | ((1 << F::shift(level)) - 1)).min(slice.last);
        match visitor.entry(&table, index, level, part) {
            Step::Next if part.last != slice.last && table.load(index + 1) == 0 => {
                index = pass_holes::<F, P>(&table, index, level, &mut part, slice.last, visitor)
            }
            Step::Next => {}
            Step::Stop => return ControlFlow::Break(()),
            Step::Into(child) => {
                if below == Level::PAGE && part.last != slice.last && index + 1 < F::entries(level)
                {
                    // Most walks are bounded by memory: the next table is on its way while this one
                    // is worked on.
                    let next = table.load(index + 1);
                    if F::kind(next, level) == Kind::Table {
                        platform.prefetch(F::address(next, level));
                    }
                }
                // SAFETY: the visitor read the frame from a table descriptor of this table, so (1.)
                // holds for it.
                unsafe { walk_below::<F, P>(platform, child, below, part, visitor)? };
                visitor.leave(level, child);
            }
        }
        if part.last == slice.last {
            break;
        }
        part.first = part.last + 1;
        index += 1;
    }
    ControlFlow::Continue(())
}

/// Walks the table below an entry.
///
/// # Safety
/// 1. As of [`walk`].
#[inline(always)]
unsafe fn walk_below<F: Format, P: Platform>(
    platform: &P,
    frame: Pa,
    level: Level,
    slice: Slice,
    visitor: &mut dyn Visit<F, P>,
) -> ControlFlow<()> {
    if level != Level::PAGE {
        // SAFETY: (1.)
        return unsafe { walk::<F, P>(platform, frame, level, slice, visitor) };
    }
    // SAFETY: (1.)
    let table = unsafe { Table::open(platform, frame, level) };
    let end = F::index(slice.last, level) + 1;
    visitor.pages(&table, F::index(slice.first, level)..end, slice.first)
}

/// Passes by the holes behind an entry, of which there is one, before the last entry of the range
/// that ends at `last`. Returns the last that was passed by, if any was, and adds what they cover
/// to the part of the range.
// A function of its own, so that the walk has the registers to itself.
#[cold]
#[inline(never)]
fn pass_holes<F: Format, P: Platform>(
    table: &Table<'_, P>,
    index: usize,
    level: Level,
    part: &mut Slice,
    last: u64,
    visitor: &dyn Visit<F, P>,
) -> usize {
    if visitor.fills_holes() {
        return index;
    }
    let next = index + 1;
    // As far as to the last entry of the range, so that there is always one to go on with.
    let used = table.first_used(next..F::index(last, level));
    part.last += ((used - next) as u64) << F::shift(level);
    used - 1
}

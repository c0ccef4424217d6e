//! Detached tables that are forgotten: their leaves are visited, and they are freed.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::addr::{Level, Pa};
use crate::entry::LINE;
use crate::format::{Format, Kind, Perms, address_of, kind_of};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{Denied, Slice, Step, Visit, walk};

use super::detached::{Detached, Fate, Root};
use super::leaf::Leaf;

impl Detached {
    /// Visits the leaves of the sub-trees, and frees their tables, as
    /// [`Completed::reclaim`](super::Completed::reclaim) says.
    ///
    /// # Safety
    /// 1. The invalidation that covers the tables is complete, and every software walk that may
    ///    hold them is over.
    pub(super) unsafe fn reclaim<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        current: &mut Option<(Root, Option<Slice>)>,
        visit: impl FnMut(Leaf<F>) -> ControlFlow<()>,
    ) -> bool {
        let mut reclaim = Reclaim {
            platform,
            visit,
            stop: false,
            denied: Denied::new(Perms::empty()),
            end: None,
            format: PhantomData,
        };
        loop {
            let next = current.take().or_else(|| self.pop(platform));
            let Some((root, slice)) = next else {
                return true;
            };
            if root.fate == Fate::Replaced {
                free_tree::<F, P>(platform, root.frame, root.level);
                continue;
            }
            reclaim.denied = Denied::new(root.denied);
            // A sub-tree that is taken up for the first time is walked whole.
            let slice = slice.unwrap_or_else(|| root.slice::<F>());
            let _: ControlFlow<()> =
                // SAFETY: the frame was detached from a tree of this format; it is freed below,
                // once.
                unsafe { walk::<F, P>(platform, root.frame, root.level, slice, &mut reclaim) };
            if let Some(first) = reclaim.end {
                let last = slice.last;
                *current = Some((root, Some(Slice { first, last })));
                return false;
            }
            // SAFETY: the invalidation that covers the table is complete (2.), and the chain that
            // it was taken from held it once (1.).
            unsafe { platform.free_table(root.frame, root.level) };
            if reclaim.stop {
                return self.is_empty();
            }
        }
    }
}

/// Visits leaves and frees tables on the way back. Stops *before* a leaf, never after one, so that
/// every table whose last leaf has been visited is freed before the walk ends.
struct Reclaim<'a, F: Format, P: Platform, V> {
    platform: &'a P,
    visit: V,
    stop: bool,
    /// The address at which it has stopped, if it has.
    end: Option<u64>,
    denied: Denied,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>) -> ControlFlow<()>> Reclaim<'_, F, P, V> {
    /// Visits the leaf at one entry; a run once, at its first member.
    fn leaf(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
        mut entry: u64,
    ) -> ControlFlow<()> {
        if entry & F::CONTIGUOUS != 0 {
            let members = run::members::<F>(index, level);
            if index != members.start {
                return ControlFlow::Continue(());
            }
            // SAFETY: the table was detached or never linked, and only this thread of execution
            // knows it.
            entry = run::gather::<F>(members, level, &mut |member| unsafe { table.read(member) });
        }
        if self.stop {
            self.end = Some(first);
            return ControlFlow::Break(());
        }
        let leaf = Leaf::new(first, entry, level, self.denied.at(level));
        self.stop = (self.visit)(leaf).is_break();
        ControlFlow::Continue(())
    }

    /// Visits a line of pages one by one, or fewer; holes are passed by as far as there are any.
    /// Returns where to go on.
    // A function of its own, so that the loop over lines of leaves has the registers to itself.
    #[inline(never)]
    fn few(
        &mut self,
        table: &Table<'_, P>,
        start: usize,
        end: usize,
        first: u64,
    ) -> ControlFlow<(), usize> {
        let mut index = start;
        while index < end && index - start < LINE {
            // SAFETY: as above.
            let entry = unsafe { table.read(index) };
            if entry == 0 {
                index = table.past_hole(index, end);
                continue;
            }
            if F::kind(entry, Level::PAGE) == Kind::Leaf {
                let at = first.wrapping_add(((index - start) as u64) << F::PAGE_SHIFT);
                if self.leaf(table, index, Level::PAGE, at, entry).is_break() {
                    return ControlFlow::Break(());
                }
            }
            index += 1;
        }
        ControlFlow::Continue(index)
    }
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>) -> ControlFlow<()>> Visit<F, P>
    for Reclaim<'_, F, P, V>
{
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => {
                if let Some(below) = level.down() {
                    self.denied.enter::<F>(entry, below);
                }
                Step::Into(F::address(entry, level))
            }
            Kind::Leaf => match self.leaf(table, index, level, slice.first, entry) {
                ControlFlow::Continue(()) => Step::Next,
                ControlFlow::Break(()) => Step::Stop,
            },
            Kind::Invalid => Step::Next,
        }
    }

    #[inline]
    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        // SAFETY: the table was detached or never linked, and only this thread of execution knows
        // it.
        let read = |index: usize| unsafe { table.read(index) };
        let denied = self.denied.at(Level::PAGE);
        let mut index = range.start;
        while index < range.end {
            // A line of leaves at a time: read first, then visited, so that what the visitor writes
            // does not stand between the reads, and a visitor that never breaks off is not asked
            // whether it has.
            let mut line = [0; LINE];
            let mut leaves = !self.stop && range.end - index >= LINE;
            if leaves {
                table.prefetch_ahead(index);
                for (offset, entry) in line.iter_mut().enumerate() {
                    *entry = read(index + offset);
                    leaves &= F::is_single_page(*entry);
                }
            }
            if leaves {
                for entry in line {
                    if self.stop {
                        self.end = Some(at(index));
                        return ControlFlow::Break(());
                    }
                    let leaf = Leaf::new(at(index), entry, Level::PAGE, denied);
                    index += 1;
                    if (self.visit)(leaf).is_break() {
                        self.stop = true;
                    }
                }
            } else {
                index = self.few(table, index, range.end, at(index))?;
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&mut self, level: Level, child: Pa) {
        if let Some(below) = level.down() {
            // SAFETY: the sub-tree is out of reach of walkers (2.), and the walk passes each of its
            // tables once; one that goes on after a stop starts behind the tables that were freed
            // before it (1.).
            unsafe { self.platform.free_table(child, below) };
        }
    }
}

/// Visits the leaves in some slices of a tree, and frees all tables but the root, in one pass.
///
/// # Safety
/// 1. `root` holds the root of a tree of this format on `platform`, which nothing else walks or
///    edits any more.
/// 2. Slices end where entries of the root do.
pub(crate) unsafe fn reclaim_all<F: Format, P: Platform>(
    platform: &P,
    root: Pa,
    slices: impl Iterator<Item = Slice>,
    leaves: &mut impl FnMut(Leaf<F>),
) {
    let mut reclaim = Reclaim::<F, P, _> {
        platform,
        visit: |leaf| {
            leaves(leaf);
            ControlFlow::Continue(())
        },
        stop: false,
        end: None,
        denied: Denied::new(Perms::empty()),
        format: PhantomData,
    };
    for slice in slices {
        // SAFETY: the root (1.). Each table is below one entry of it, and the walk passes it once
        // (2.).
        let _: ControlFlow<()> =
            unsafe { walk::<F, P>(platform, root, F::root_level(), slice, &mut reclaim) };
    }
}

/// Frees the table in `frame` and every table below it. The leaves are not looked at.
///
/// The caller vouches that nothing can reach the table: it was never linked, or its invalidation is
/// complete.
#[inline(never)]
pub(crate) fn free_tree<F: Format, P: Platform>(platform: &P, frame: Pa, level: Level) {
    if let Some(below) = level.down() {
        // SAFETY: a whole table of this format, below the root, that nothing else reaches.
        let table = unsafe { Table::open(platform, frame, level) };
        for index in 0..1usize << F::INDEX_BITS {
            let entry = table.load(index);
            if kind_of::<F>(entry, level) == Kind::Table {
                free_tree::<F, P>(platform, address_of::<F>(entry, level), below);
            }
        }
    }
    // SAFETY: as the caller vouches; each table is come to once.
    unsafe { platform.free_table(frame, level) };
}

//! A processor's edits of a shared space: what they leave to invalidate and to free, and tables for
//! what they map.
//!
//! # Counting
//!
//! An edit that finds its work done already, by another processor or by an earlier edit, may rely
//! on it only when that one is *complete*. A hole, or an entry that says what it should, does not
//! tell. So every gather counts itself as unfinished in its space, from before its first change
//! until the invalidation that covers it is complete; and an edit that sees others count when its
//! own walk is over has all of its range forgotten, at every level. A gather that is dropped is
//! completed by its destructor. One that is forgotten counts for ever: every other edit invalidates
//! more than it has to, and none takes for forgotten what is not.
//!
//! # Tables
//!
//! A fault must not allocate in the middle: it may be under a lock of the embedder, and running out
//! would leave it half done. A gather has a few tables, empty already, and is topped up where the
//! processor may wait. A fault that needs one only links it.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU32, Ordering, fence};

use core::ops::{ControlFlow, Range};

use crate::addr::{Level, Pa};
use crate::edit::Frames;
use crate::flush::{Completed, End, Flush, Held, Issued, Leaf, Ranges};
use crate::format::{Format, Kind};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

use super::{GracePeriod, SharedPlatform, SharedSpace};

/// The most tables that a gather holds: enough for two faults that find nothing.
const MOST_TABLES: usize = 8;

/// The highest bit of a tag: no claim has it, but what an unmap leaves.
const TAKEN: u64 = 1 << 43;

/// Whether an invalid entry says that something was taken out of it. A claim may become anything;
/// this becomes a hole, when what was there is forgotten, and nothing else.
#[inline]
pub(super) fn is_taken<F: Format>(invalid: u64) -> bool {
    let taken = F::frozen(TAKEN);
    F::RULE.tags_invalid_entries && invalid & taken == taken
}

/// One processor's edits of a [`SharedSpace`], which it borrows; each processor that edits has its
/// own.
///
/// Made by [`SharedSpace::gather`]. After [`issue`](Gather::issue) or [`finish`](Gather::finish) it
/// is empty but for its tables, and can be used again: a virtual CPU keeps one from fault to fault,
/// and finishes it when it is not [clean](Gather::is_clean).
///
/// A gather that is dropped, in unwinding for instance, is completed: what was changed is
/// invalidated, and leaves that were detached are not visited, so that their frames leak. Its
/// tables go back to the platform.
///
/// ```
/// use tablewright::shared::{Mapped, NewLeaf, SharedSpace};
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Va, format::Arm64K4};
/// use tablewright_hosted::Threads;
/// let platform = Threads::new(8, 12, 1);
/// let space = SharedSpace::new(AddressSpace::<Arm64K4, _>::new(&platform).unwrap()).unwrap();
/// let mut gather = space.gather();
/// assert!(gather.top_up(3));
/// let page =
///     NewLeaf::new(Va::new(0x1000), Pa::new(0x8000_0000), Level::PAGE, Attrs::USER_DATA)?;
/// assert_eq!(gather.map(&page), Ok(Mapped::Installed));
/// assert!(gather.is_clean() && gather.tables() == 0);
/// assert!(gather.finish(|_| ()).is_ok());
/// # Ok::<(), tablewright::EditError<Va>>(())
/// ```
#[must_use = "it is completed when it is dropped, and then gives out no leaf"]
pub struct Gather<'s, F: Format, P: SharedPlatform + Clone> {
    pub(super) space: &'s SharedSpace<F, P>,
    pub(super) flush: Flush,
    pub(super) count: Count<'s>,
    /// The mark in the entries that were [taken](Gather::unmap) in the ranges, if anything was and
    /// a break is demanded.
    mark: u64,
    /// The number of what it has gathered, if something was held back; 0 before.
    serial: u64,
    pub(super) tables: TableCache,
}

/// Whether a gather counts as unfinished.
pub(super) struct Count<'s> {
    unfinished: &'s AtomicU32,
    counts: bool,
}

impl<'s> Count<'s> {
    /// It does not count yet.
    #[inline]
    pub fn new(unfinished: &'s AtomicU32) -> Self {
        Self { unfinished, counts: false }
    }

    /// The first change is about to be made.
    #[inline]
    pub fn begin(&mut self) {
        if !self.counts {
            // The exchange of the entry orders it: an edit that sees that sees this.
            self.unfinished.fetch_add(1, Ordering::Relaxed);
            self.counts = true;
        }
    }

    /// How many of those that count are this gather's.
    #[inline]
    pub fn own(&self) -> u32 {
        u32::from(self.counts)
    }

    /// The invalidation is complete.
    pub fn end(&mut self) {
        if core::mem::take(&mut self.counts) {
            // Release: an edit that does not see it count any more finds what it has done to be
            // forgotten.
            self.unfinished.fetch_sub(1, Ordering::Release);
        }
    }
}

/// One edit that counts as unfinished until this is dropped, because it completes its own
/// invalidation.
pub(super) struct Unfinished<'s>(Count<'s>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Edits of this space by this processor, and what they leave to invalidate and to free.
    #[inline]
    pub fn gather(&self) -> Gather<'_, F, P> {
        Gather {
            space: self,
            flush: Flush::new(),
            count: Count::new(&self.unfinished),
            mark: 0,
            serial: 0,
            tables: TableCache::new(),
        }
    }

    /// An edit begins, before its first change, that will be complete when it returns.
    pub(super) fn begin(&self) -> Unfinished<'_> {
        let mut count = Count::new(&self.unfinished);
        count.begin();
        Unfinished(count)
    }

    /// Whether an edit of another processor may have been seen and not be complete, after looking
    /// at entries. `own` of those that count are the caller's.
    pub(super) fn has_seen_unfinished(&self, own: u32) -> bool {
        // The look at the counter comes after those at the entries; and what an edit has done that
        // does not count any more comes before what the caller does next. So the fence before the
        // load, and acquire in it.
        fence(Ordering::Acquire);
        self.unfinished.load(Ordering::Acquire) > own
    }
}

impl<'s, F: Format, P: SharedPlatform + Clone> Gather<'s, F, P> {
    /// The space.
    pub fn space(&self) -> &'s SharedSpace<F, P> {
        self.space
    }

    /// Whether there is nothing to invalidate, and other edits need not wait for it. It may still
    /// carry tables to free, and stores that are not visible yet.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.flush.ranges.is_empty() && !self.count.counts
    }

    /// How many tables it has for what it maps.
    #[inline]
    pub fn tables(&self) -> usize {
        self.tables.len
    }

    /// Takes tables from the platform until there are `count`, or as many as fit. Whether there are
    /// so many now.
    #[inline]
    pub fn top_up(&mut self, count: u8) -> bool {
        let wanted = usize::from(count).min(MOST_TABLES);
        self.tables.len >= wanted || self.take_tables(wanted)
    }

    fn take_tables(&mut self, wanted: usize) -> bool {
        let platform = self.space.platform();
        while self.tables.len < wanted {
            let Some(frame) = platform.alloc_table(Level::PAGE) else {
                return false;
            };
            // SAFETY: just allocated.
            let table = unsafe { Table::open(platform, frame, Level::PAGE) };
            table.fill(0..1 << F::INDEX_BITS, 0, 0);
            drop(table);
            self.tables.push(frame);
        }
        true
    }

    /// Gives the tables back to the platform.
    pub fn release_tables(&mut self) {
        while let Some(frame) = self.tables.pop() {
            // SAFETY: the frame came from the platform, once (1.), and was never linked (2.).
            unsafe { self.space.platform().free_table(frame, Level::PAGE) };
        }
    }

    /// The number of what is being gathered.
    #[inline]
    pub(super) fn serial(&mut self) -> u64 {
        if self.serial == 0 {
            self.serial = self.space.next_serial();
        }
        self.serial
    }

    /// Returns the mark that is left in the place of what is taken away.
    #[inline]
    pub(super) fn mark(&mut self) -> u64 {
        let serial = self.serial();
        if F::RULE.tags_invalid_entries {
            // Of the space's own numbers, so that a tree does not say what others there are.
            self.mark = F::frozen(serial.wrapping_sub(self.space.base) | TAKEN);
        }
        self.mark
    }

    /// Whether something that was changed around `slice` may not be forgotten: by others, or by
    /// what this gather has not issued. `scoped` of those that count are the caller's besides the
    /// gather.
    #[inline]
    pub(super) fn is_unfinished(&self, slice: Slice, scoped: u32) -> bool {
        self.space.has_seen_unfinished(self.count.own() + scoped)
            || self.flush.ranges.overlap(slice)
    }

    /// Makes the edits visible and tells every processor what to forget. Does not wait.
    pub fn issue(&mut self) -> Issued<F, P, Beside<'s, F, P>> {
        let space = self.space;
        let mark = core::mem::take(&mut self.mark);
        let ranges = match mark {
            0 => Ranges::new(),
            _ => self.flush.ranges.copy(),
        };
        let target = space.target(!self.flush.ranges.is_empty());
        let wait = self.flush.issue::<F, P>(space.platform(), target);
        let count = Count {
            unfinished: self.count.unfinished,
            counts: core::mem::take(&mut self.count.counts),
        };
        let serial = core::mem::take(&mut self.serial);
        let detached = self.flush.detached.take();
        let completed = Completed::new(space.platform().clone(), serial, detached);
        let end = Beside { space, wait, mark, ranges, count };
        Issued::new(completed, end)
    }

    /// Issues and completes, and reclaims if every walk that may hold what was detached is over; if
    /// not, gives it back to be tried later. If the visitor unwinds, what is left of its sub-tree
    /// leaks.
    ///
    /// # Errors
    /// What may still be walked.
    // Without an allocator there is nowhere else to put what is given back.
    #[allow(clippy::result_large_err)]
    pub fn finish(&mut self, leaves: impl FnMut(Leaf<F>)) -> Result<(), DeferredReclaim<F, P>> {
        let Flush { needs_publish, detached, .. } = &self.flush;
        if self.is_clean() && !needs_publish && detached.is_empty() {
            self.serial = 0;
            return Ok(());
        }
        self.issue().complete().try_complete()?.finish(leaves);
        Ok(())
    }
}

impl<F: Format, P: SharedPlatform + Clone> Drop for Gather<'_, F, P> {
    #[inline]
    fn drop(&mut self) {
        // What may still be walked leaks.
        let _finished = self.finish(|_| ());
        self.release_tables();
    }
}

/// The end of shared edits: they count as unfinished until they are complete, what was taken away
/// stays frozen until then where a break is demanded, and what was detached may be in the hands of
/// software even after that.
///
/// Dropped, it waits as [`complete`](Issued::complete) does.
pub struct Beside<'s, F: Format, P: SharedPlatform + Clone> {
    space: &'s SharedSpace<F, P>,
    wait: bool,
    /// The mark of the entries that were taken in these ranges.
    mark: u64,
    ranges: Ranges,
    count: Count<'s>,
}

impl<F: Format, P: SharedPlatform + Clone> Beside<'_, F, P> {
    /// Waits until every processor has forgotten; then what was frozen may be filled again.
    fn end(&mut self) {
        if core::mem::take(&mut self.wait) {
            self.space.platform().barrier(Barrier::Complete);
        }
        let mark = core::mem::take(&mut self.mark);
        if mark != 0 {
            let _walk = self.space.platform().enter();
            for stale in self.ranges.as_slice() {
                let slice = Slice { first: stale.first, last: stale.last };
                let _: ControlFlow<()> = self.space.visit(slice, &mut Thaw { mark });
            }
        }
        self.count.end();
    }
}

impl<F: Format, P: SharedPlatform + Clone> Drop for Beside<'_, F, P> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<F: Format, P: SharedPlatform + Clone> End<F, P> for Beside<'_, F, P> {
    type Completed = DeferredReclaim<F, P>;

    #[inline]
    fn complete(self, completed: Completed<F, P>) -> DeferredReclaim<F, P> {
        drop(self);
        DeferredReclaim::new(completed)
    }
}

/// Makes holes of what one gather has frozen, which its mark tells from the claims of others.
struct Thaw {
    mark: u64,
}

impl Thaw {
    #[inline]
    fn one<P: Platform>(&self, table: &Table<'_, P>, index: usize) {
        if table.load(index) == self.mark {
            // No other edit touches what is frozen.
            table.store(index, 0);
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Thaw {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> Step {
        let entry = table.follow(index);
        if F::kind(entry, level) == Kind::Table {
            return Step::Into(F::address(entry, level));
        }
        self.one(table, index);
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, _: u64) -> ControlFlow<()> {
        for index in range {
            self.one(table, index);
        }
        ControlFlow::Continue(())
    }
}

/// Tables that were detached and that hardware has forgotten; walks of software may still hold
/// them.
#[must_use = "the tables that were detached are freed when the grace period is over"]
pub struct DeferredReclaim<F: Format, P: SharedPlatform> {
    completed: Completed<F, P>,
    period: GracePeriod,
}

/// Of edits that are exclusive, too: software may walk the tables without a lock.
impl<F: Format, P: SharedPlatform> From<Completed<F, P>> for DeferredReclaim<F, P> {
    fn from(completed: Completed<F, P>) -> Self {
        Self::new(completed)
    }
}

impl<F: Format, P: SharedPlatform> DeferredReclaim<F, P> {
    fn new(completed: Completed<F, P>) -> Self {
        // Without tables there is nothing to wait for, nor to announce.
        let period = if completed.is_empty() {
            GracePeriod::new(0)
        } else {
            completed.platform().grace_period()
        };
        Self { completed, period }
    }

    /// Gives out a leaf that was held back until the hardware had forgotten it. A fault that looked
    /// its page up before may still map it again: see [`shared`](crate::shared).
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush.
    pub fn release<T>(&self, held: Held<T>) -> Result<T, Held<T>> {
        self.completed.release(held)
    }

    /// When the walks that may hold its tables are over.
    pub fn grace_period(&self) -> GracePeriod {
        self.period
    }

    /// The tables, to be reclaimed, if all walks that may hold them are over.
    ///
    /// # Errors
    /// Gives it back if some are not. Nothing waits: try again later.
    #[allow(clippy::result_large_err)]
    pub fn try_complete(self) -> Result<Completed<F, P>, Self> {
        if self.completed.is_empty() || self.completed.platform().is_over(self.period) {
            Ok(self.completed)
        } else {
            Err(self)
        }
    }
}

/// Empty tables, ready to be linked.
pub(super) struct TableCache {
    frames: [Pa; MOST_TABLES],
    pub len: usize,
}

impl TableCache {
    const fn new() -> Self {
        Self { frames: [Pa::new(0); MOST_TABLES], len: 0 }
    }

    pub fn pop(&mut self) -> Option<Pa> {
        self.len = self.len.checked_sub(1)?;
        Some(self.frames[self.len])
    }

    /// Puts one in, empty.
    pub fn push(&mut self, frame: Pa) {
        debug_assert!(self.len < MOST_TABLES);
        if let Some(place) = self.frames.get_mut(self.len) {
            *place = frame;
            self.len += 1;
        }
    }
}

impl Frames for TableCache {
    fn take(&mut self, _: Level) -> Option<Pa> {
        self.pop()
    }
}

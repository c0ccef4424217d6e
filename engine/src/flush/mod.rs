//! What an edit leaves to invalidate, and what may be freed once that is complete.
//!
//! You need this if something is to be done between telling processors to forget and waiting until
//! they have, or in steps: a [`Gather`](crate::Gather) that is finished at once, or dropped, goes
//! through all of it unseen.
//!
//! Edits add to a gather ([`Gather`](crate::Gather), or [`shared::Gather`](crate::shared::Gather)):
//! which addresses walkers have to forget, and which tables were detached. What was gathered goes
//! through three states, and none can be skipped:
//!
//! 1. In the gather. [`issue`](crate::Gather::issue) tells the processors, which is nearly free.
//! 2. [`Issued`]: they are forgetting. [`complete`](Issued::complete) waits until all have. That is
//!    what costs; do something else first, if there is something else.
//! 3. [`Completed`]: no processor reaches what was detached. [`reclaim`](Completed::reclaim) visits
//!    the leaves below it, whose accessed and dirty bits are final only now, and frees the tables.
//!    What was detached by a shared edit may still be in the hands of software that walks the
//!    tables: it is a [`DeferredReclaim`](crate::shared::DeferredReclaim) first.
//!
//! **Nothing is freed before completion**, because only a [`Completed`] can free. A gather that is
//! dropped completes what it has gathered; an [`Issued`] that is dropped leaks its tables, and the
//! space remembers to wait. A gather that is forgotten ([`core::mem::forget`]) leaves what it
//! changed owed by the space, and the next gather pays.
//!
//! Memory is bounded, and none of it is touched before there is something to put into it. Ranges
//! merge; when there are more than fit, or when they are more than the hardware does better one by
//! one, all of the space is invalidated, which is always correct. Detached tables are chained
//! through the side memory of their frames ([`Platform::link_of`]); the page of a table itself is
//! not written, because walkers may still be reading it.

mod detached;
mod joined;
mod leaf;
mod ranges;
mod reclaim;

pub use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
pub use detached::MAX_UNLINKED;
pub(crate) use detached::{Detached, Fate};
pub use joined::{Append, Joined, Stretch};
pub(crate) use leaf::next_serial;
pub use leaf::{Flushed, Held, Leaf, Progress};
pub(crate) use ranges::{Ranges, Target};
pub(crate) use reclaim::{free_tree, reclaim_all};

use core::marker::PhantomData;
use core::ops::ControlFlow;

use crate::addr::{Level, Pa};
use crate::format::{Format, Perms};
use crate::platform::{Barrier, Platform};
use crate::walk::Slice;

use detached::Root;

/// What edits have left in a gather.
// What is asked most is in front, so that short instructions reach it.
#[repr(C)]
pub(crate) struct Flush {
    /// There is something that walkers have to see, besides what they have to forget.
    pub news: bool,
    pub ranges: Ranges,
    pub detached: Detached,
}

impl Flush {
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            ranges: Ranges::new(),
            news: false,
            detached: Detached::new(),
        }
    }

    /// Whether a table in `frame` can be carried.
    #[inline]
    pub fn has_room<P: Platform>(&self, platform: &P, frame: Pa) -> bool {
        self.detached.has_place() || platform.link_of(frame).is_some()
    }

    /// Carries a table that was detached, with all below it.
    pub fn carry<P: Platform>(
        &mut self,
        platform: &P,
        frame: Pa,
        level: Level,
        first: u64,
        denied: Perms,
        fate: Fate,
    ) {
        // The edit asked for room before it cut the table off. Leaking is what is left, and is
        // safe.
        let carried = self.try_carry(platform, frame, level, first, denied, fate);
        debug_assert!(carried, "a table was detached without room for it");
    }

    /// Carries a table that is to be detached, if there is room.
    #[inline(always)]
    pub fn try_carry<P: Platform>(
        &mut self,
        platform: &P,
        frame: Pa,
        level: Level,
        first: u64,
        denied: Perms,
        fate: Fate,
    ) -> bool {
        let root = Root {
            frame,
            level,
            fate,
            denied,
            first,
        };
        self.detached.push(platform, root)
    }

    /// Makes the edits visible and issues the invalidations, of which none is left then. Whether
    /// there were any.
    #[inline]
    pub fn issue<F: Format, P: Platform>(&mut self, platform: &P, target: Target) -> bool {
        let issued = self.ranges.issue::<F, P>(platform, target);
        if self.news && !issued {
            platform.barrier(Barrier::Publish);
        }
        self.news = false;
        self.ranges.clear();
        issued
    }

    /// Frees what was detached. Leaves are not visited.
    ///
    /// # Safety
    /// As for [`Detached::reclaim`].
    pub unsafe fn free<F: Format, P: Platform>(&mut self, platform: &P) {
        while let Some((root, _)) = self.detached.pop(platform) {
            free_tree::<F, P>(platform, root.frame, root.level);
        }
    }

    /// Reclaims what was detached, without stopping.
    ///
    /// # Safety
    /// As for [`Detached::reclaim`].
    #[inline]
    pub unsafe fn reclaim<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        mut leaves: impl FnMut(Leaf<F>),
    ) {
        if !self.detached.is_empty() {
            // SAFETY: passed on. The visitor never breaks off, so one call reclaims everything.
            let _all = unsafe {
                self.detached
                    .reclaim::<F, P>(platform, &mut None, move |leaf| {
                        leaves(leaf);
                        ControlFlow::Continue(())
                    })
            };
        }
    }
}

mod sealed {
    pub trait Sealed {}
}
pub(crate) use sealed::Sealed;

/// How the edits of a gather end: alone, or beside others that may be walking what was detached.
pub trait End<F: Format, P: Platform>: Sealed {
    /// What there is when every processor has forgotten.
    type Completed;

    #[doc(hidden)]
    fn complete(self, completed: Completed<F, P>) -> Self::Completed;
}

/// The end of exclusive edits: what was detached can be reclaimed.
///
/// ```
/// use tablewright::flush::{Alone, End};
/// use tablewright::{format::X86_64, hosted::Hosted};
/// fn is_an_end<E: End<X86_64<4>, Hosted>>() {}
/// is_an_end::<Alone>();
/// ```
#[derive(Debug)]
pub struct Alone {
    pub(crate) wait: bool,
}

impl Sealed for Alone {}

impl<F: Format, P: Platform> End<F, P> for Alone {
    type Completed = Completed<F, P>;

    #[inline]
    fn complete(self, completed: Completed<F, P>) -> Completed<F, P> {
        if self.wait {
            completed.platform.barrier(Barrier::Complete);
        }
        completed
    }
}

/// A flush whose invalidations are issued and not yet complete. The space may be edited meanwhile.
///
/// ```
/// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
/// # space.make_live();
///
/// let mut gather = space.gather();
/// gather.protect(span, Change::new().perms(Perms::READ))?;
/// let issued = gather.issue();
/// // ... something else, while the processors forget ...
/// issued.complete().finish(|_| ());
/// assert_eq!(platform.counts().completions, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "what was issued has to be completed; the tables that it carries leak"]
pub struct Issued<F: Format, P: Platform, E: End<F, P> = Alone> {
    pub(crate) completed: Completed<F, P>,
    pub(crate) end: E,
}

impl<F: Format, P: Platform, E: End<F, P>> Issued<F, P, E> {
    /// Waits until every processor has forgotten. Costs nothing if nothing had to be invalidated.
    #[inline]
    pub fn complete(self) -> E::Completed {
        self.end.complete(self.completed)
    }
}

/// A flush that is complete: what was detached is out of reach, and may be reclaimed and freed.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
/// # space.make_live();
///
/// let mut gather = space.gather();
/// // A whole gigabyte: the table below it is detached at once, with its two leaves.
/// let all = Span::new(Va::new(0), 1 << 30)?;
/// assert!(gather.unmap(all, |_| ControlFlow::Continue(()))?.is_done());
/// let mut completed = gather.issue().complete();
/// let mut leaves = 0;
/// while !completed.reclaim(|_| { leaves += 1; ControlFlow::Break(()) }) {}
/// assert_eq!(leaves, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the tables that were detached are freed by reclaiming"]
pub struct Completed<F: Format, P: Platform> {
    platform: P,
    serial: u64,
    detached: Detached,
    /// The sub-tree being reclaimed, and what is left of it.
    current: Option<(Root, Option<Slice>)>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Completed<F, P> {
    /// What becomes of it is not to be had before it is true: it stays inside of an [`Issued`]
    /// until then.
    #[inline]
    pub(crate) fn new(platform: P, serial: u64, detached: Detached) -> Self {
        Self {
            platform,
            serial,
            detached,
            current: None,
            format: PhantomData,
        }
    }

    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// Whether it carries no table.
    pub(crate) fn is_empty(&self) -> bool {
        self.detached.is_empty() && self.current.is_none()
    }

    /// Gives out what was held back until now.
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush.
    #[inline]
    pub fn release<T>(&self, held: Held<T>) -> Result<T, Held<T>> {
        Flushed {
            serial: self.serial,
        }
        .release(held)
    }

    /// Visits the leaves of the sub-trees that were detached, and frees their tables.
    ///
    /// The visitor may break off after any leaf; that leaf counts as visited, and the next call
    /// goes on behind it. Returns whether everything is reclaimed. If the visitor unwinds, what is
    /// left of its sub-tree leaks.
    #[must_use = "what is not reclaimed is not freed"]
    pub fn reclaim(&mut self, visit: impl FnMut(Leaf<F>) -> ControlFlow<()>) -> bool {
        // SAFETY: it is complete, and out of the hands of software: exclusive edits have no
        // software walks beside them, and what shared edits have detached comes out of a
        // `DeferredReclaim` when they are over (1.).
        unsafe {
            self.detached
                .reclaim::<F, P>(&self.platform, &mut self.current, visit)
        }
    }

    /// Reclaims all that is left, without stopping.
    pub fn finish(mut self, mut leaves: impl FnMut(Leaf<F>)) {
        // The visitor never breaks, so one call reclaims everything.
        let _all = self.reclaim(move |leaf| {
            leaves(leaf);
            ControlFlow::Continue(())
        });
    }
}

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
//! dropped completes what it has gathered; an [`Issued`] that is dropped waits, and leaks its
//! tables. A gather that is forgotten ([`core::mem::forget`]) leaves what it
//! changed owed by the space, and the next gather pays.
//!
//! Memory is bounded, and none of it is touched before there is something to put into it. Ranges
//! merge; when there are more than fit, or when they are more than the hardware does better one by
//! one, all of the space is invalidated, which is always correct. Detached tables are chained
//! through the side memory of their frames ([`Platform::link_of`]); the page of a table itself is
//! not written, because walkers may still be reading it.

mod debt;
mod detached;
mod joined;
mod leaf;
mod ranges;
mod reclaim;

pub use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
pub(crate) use debt::Debt;
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
// Hot fields first, within an 8-bit displacement.
#[repr(C)]
pub(crate) struct Flush {
    /// Walkers have to see stores, besides what they have to forget.
    pub needs_publish: bool,
    pub ranges: Ranges,
    pub detached: Detached,
}

impl Flush {
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            ranges: Ranges::new(),
            needs_publish: false,
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
        if self.needs_publish && !issued {
            platform.barrier(Barrier::Publish);
        }
        self.needs_publish = false;
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

/// The end of a flush: of exclusive edits, or of shared edits beside which software may be walking
/// what was detached. Dropping it waits for the flush.
pub trait End<F: Format, P: Platform> {
    /// The flush when it is complete.
    type Completed;

    /// Waits until every processor has forgotten.
    fn complete(self, completed: Completed<F, P>) -> Self::Completed;
}

/// A flush whose invalidations are issued and not yet complete.
///
/// It belongs to the processor that issued: an arm64 `DSB` waits for the `TLBI`s of its own
/// processor alone (DDI 0487 D8.16.5). So it is not [`Send`], and an exclusive space is borrowed
/// until it is complete. Dropping it waits as [`complete`](Self::complete) does. If it is
/// [forgotten](core::mem::forget), the next gather of the space invalidates everything again.
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
/// ```compile_fail,E0277
/// # use tablewright::{AddressSpace, format::Arm64K4, hosted::Threads};
/// # let platform = Threads::new(64, 12, 2);
/// # let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
/// let mut gather = space.gather();
/// let issued = gather.issue();
/// std::thread::scope(|scope| {
///     scope.spawn(move || issued.complete());
/// });
/// ```
#[must_use = "the tables that it carries leak if it is dropped"]
pub struct Issued<F: Format, P: Platform, E: End<F, P>> {
    completed: Completed<F, P>,
    end: E,
    /// Neither `Send` nor `Sync`.
    of_this_processor: PhantomData<*const ()>,
}

impl<F: Format, P: Platform, E: End<F, P>> Issued<F, P, E> {
    #[inline]
    pub(crate) fn new(completed: Completed<F, P>, end: E) -> Self {
        Self {
            completed,
            end,
            of_this_processor: PhantomData,
        }
    }

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

//! Invalidations that an edit leaves, and what may be freed once they are complete.
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
mod issued;
mod leaf;
mod ranges;
mod reclaim;

pub use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
pub(crate) use debt::Debt;
pub use detached::MAX_UNLINKED;
pub(crate) use detached::{Detached, Fate};
pub(crate) use issued::End;
pub use issued::{Completed, Issued};
pub(crate) use leaf::next_serial;
pub use leaf::{Flushed, Held, Leaf, Progress};
pub(crate) use ranges::{Ranges, Target};
pub(crate) use reclaim::{free_tree, reclaim_all};

use core::ops::ControlFlow;

use crate::addr::{Level, Pa};
use crate::format::{Format, Perms};
use crate::platform::{Barrier, Platform};

use detached::Root;

/// Work that edits have left in a gather.
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
        Self { ranges: Ranges::new(), needs_publish: false, detached: Detached::new() }
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
        let root = Root { frame, level, fate, denied, first };
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
                self.detached.reclaim::<F, P>(platform, &mut None, move |leaf| {
                    leaves(leaf);
                    ControlFlow::Continue(())
                })
            };
        }
    }
}

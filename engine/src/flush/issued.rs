//! The states of a flush after the gather: issued, and complete.

use core::marker::PhantomData;
use core::ops::ControlFlow;

use super::detached::{Detached, Root};
use super::leaf::{Flushed, Held, Leaf};
use crate::format::Format;
use crate::platform::Platform;
use crate::walk::Slice;

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
/// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
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
/// # use tablewright::{AddressSpace, format::Arm64K4};
/// # use tablewright_hosted::Threads;
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
        Self { completed, end, of_this_processor: PhantomData }
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
/// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
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
/// while !completed.reclaim(|_| {
///     leaves += 1;
///     ControlFlow::Break(())
/// }) {}
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
    /// Holds what comes of a flush back until the flush is complete: it stays inside of an
    /// [`Issued`] until then.
    #[inline]
    pub(crate) fn new(platform: P, serial: u64, detached: Detached) -> Self {
        Self { platform, serial, detached, current: None, format: PhantomData }
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
        Flushed { serial: self.serial }.release(held)
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
        unsafe { self.detached.reclaim::<F, P>(&self.platform, &mut self.current, visit) }
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

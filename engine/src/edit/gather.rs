//! A gather: edits of one space, and what they leave to invalidate and to free.
//!
//! It borrows the space for as long as TLBs may hold what it has changed. So an edit of one space
//! cannot be invalidated in another, and nothing of it is freed before that. It is finished by name
//! or by its drop. Where even that is prevented, the [debt](crate::flush::Debt) of the space says
//! so, and the next gather invalidates everything.
//!
//! # One place for breaks
//!
//! An entry that has to be broken is stored as invalid, and its range goes to the gather like any
//! other. [`complete_pending`](Gather::complete_pending) then invalidates *all* that the gather has
//! pending, not that range alone: what an earlier edit has left in TLBs for the same addresses may
//! have another level, and an invalidation by level would spare it.

use core::mem::ManuallyDrop;
use core::ops::Deref;

use crate::addr::{Pa, Span};
use crate::edit::Template;
use crate::edit::space::{AddressSpace, EditError};
use crate::flush::{Completed, End, Flush, Flushed, Held, Issued, Leaf, next_serial};
use crate::format::Format;
use crate::platform::{Barrier, Platform};
use crate::walk::Slice;

use super::drive::Footprint;

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Begins edits of this space.
    #[inline]
    pub fn gather(&mut self) -> Gather<'_, F, P> {
        let mut left = Flush::new();
        left.ranges.everything = self.debt.is_flush_pending();
        Gather { space: self, left, serial: 0 }
    }

    /// Maps `span` to the memory from `frame` on: a [gather](Self::gather) with one
    /// [`map`](Gather::map).
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// space.map(Span::new(Va::new(0x5000), 0x1000)?, Pa::new(0x8000), Attrs::USER_DATA)?;
    /// assert_eq!(space.query(Va::new(0x5123)).unwrap().frame(), Pa::new(0x8000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn map(
        &mut self,
        span: Span<F::Input>,
        frame: Pa,
        mapping: impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        // Dropped, it is finished: there is no leaf to give out.
        self.gather().map(span, frame, mapping)
    }
}

/// Edits of an [`AddressSpace`], which it borrows, and what they leave to invalidate and to free.
///
/// Made by [`AddressSpace::gather`]. Any number of edits share one invalidation, and one wait for
/// its completion.
///
/// A gather that is dropped, in unwinding for instance, is finished: what was changed is
/// invalidated, and leaves that were detached are not visited, so that their frames leak. Of one
/// that is [forgotten](core::mem::forget) the tables leak too, and the next gather of the space
/// invalidates everything.
///
/// ```
/// use tablewright::format::X86_64;
/// use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// space.map(Span::new(Va::new(0), 64 << 20)?, Pa::new(0), Attrs::KERNEL_DATA)?;
/// space.make_live();
///
/// // Two edits, one invalidation.
/// let (low, high) =
///     (Span::new(Va::new(0), 32 << 20)?, Span::new(Va::new(32 << 20), 32 << 20)?);
/// let mut gather = space.gather();
/// gather.protect(low, Change::new().perms(Perms::READ))?;
/// gather.protect(high, Change::new().perms(Perms::READ))?;
/// gather.finish(|_| ());
/// assert_eq!(platform.counts().invalidations, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Two with something to tell cannot be made of one space, and the space cannot be taken from under
/// one:
///
/// ```compile_fail,E0499
/// # use tablewright::{AddressSpace, Level, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 2 << 20).unwrap();
/// let mut split = space.gather();
/// split.split(span, Level::PAGE).unwrap();
/// let other = space.gather(); // the first is still borrowing it
/// split.finish(|_| ());
/// ```
///
/// ```compile_fail,E0505
/// # use tablewright::{AddressSpace, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let gather = space.gather();
/// let renamed = space.with_id(7);
/// gather.finish(|_| ());
/// ```
#[must_use = "it is finished when it is dropped, and then gives out no leaf"]
#[repr(C)]
pub struct Gather<'s, F: Format, P: Platform + Clone> {
    pub(crate) space: &'s mut AddressSpace<F, P>,
    /// The number of what it has gathered, if something was held back; 0 before.
    serial: u64,
    pub(crate) left: Flush,
}

impl<'s, F: Format, P: Platform + Clone> Gather<'s, F, P> {
    /// The number of what is being gathered.
    #[inline]
    pub(crate) fn serial(&mut self) -> u64 {
        if self.serial == 0 {
            self.space.serial = next_serial(self.space.serial);
            self.serial = self.space.serial;
        }
        self.serial
    }

    /// Whether there is nothing to invalidate. It may still carry tables to free, and stores that
    /// are not visible yet.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.left.ranges.is_empty()
    }

    /// Notes what a walk has changed.
    pub(super) fn note(&mut self, footprint: Footprint) {
        if self.space.is_live() {
            footprint.add_to(&mut self.left);
        }
    }

    /// Has every processor forget all that is pending, and waits: between the two halves of a
    /// break-before-make.
    ///
    /// The debt stays: the edit that calls it goes on.
    #[inline]
    pub(super) fn complete_pending(&mut self) {
        let target = self.space.target();
        if self.left.issue::<F, P>(&self.space.platform, target) {
            self.space.platform.barrier(Barrier::Complete);
        }
    }

    /// Completes what is pending where something is about to be mapped: from an address that was
    /// unmapped to one that is mapped to other memory is a break-before-make.
    #[inline(always)]
    pub(super) fn complete_overlap(&mut self, first: u64, last: u64) {
        if F::RULE.breaks && self.space.debt.is_flush_pending() {
            self.complete_if_overlap(Slice { first, last });
        }
    }

    #[cold]
    #[inline(never)]
    fn complete_if_overlap(&mut self, slice: Slice) {
        if self.left.ranges.overlap(slice) {
            self.complete_pending();
        }
    }

    /// Makes the edits visible and issues the invalidations. Returns whether there is something to
    /// wait for.
    #[inline(always)]
    fn send(&mut self) -> bool {
        let target = self.space.target();
        self.left.needs_publish |= self.space.debt.take_publish() && self.space.is_live();
        self.left.issue::<F, P>(&self.space.platform, target)
    }

    /// Makes the edits visible, has every processor forget, and waits until they have.
    #[inline(always)]
    fn send_and_wait(&mut self) {
        if self.send() {
            self.space.platform.barrier(Barrier::Complete);
        }
        self.space.debt.complete();
        self.serial = 0;
    }

    /// Finishes what a gather that is dropped has left.
    #[inline(never)]
    fn flush_rest(&mut self) {
        self.send_and_wait();
        // SAFETY: as in `flush` (1.).
        unsafe { self.left.free::<F, P>(&self.space.platform) };
    }

    /// Makes the edits visible and tells every processor what to forget. Does not wait.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # let span = Span::new(Va::new(0), 4 << 20)?;
    /// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
    /// # space.make_live();
    /// let mut gather = space.gather();
    /// gather.protect(span, Change::new().perms(Perms::READ))?;
    /// let issued = gather.issue();
    /// // ... something else, while the processors forget ...
    /// issued.complete().finish(|_| ());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn issue(self) -> Issued<F, P, Exclusive<'s, F, P>> {
        let mut this = ManuallyDrop::new(self);
        let wait = this.send();
        let detached = this.left.detached.take();
        // SAFETY: the gather is not used again, nor dropped: the borrow goes on in one place.
        let space = unsafe { core::ptr::read(&this.space) };
        if !wait {
            space.debt.complete();
        }
        let completed = Completed::new(space.platform.clone(), this.serial, detached);
        Issued::new(completed, Exclusive { space, wait })
    }

    /// Issues, completes and reclaims, visiting each leaf of the sub-trees that were detached. If
    /// the visitor unwinds, what is left of its sub-tree leaks.
    ///
    /// A gather is about 1 KiB large, and to finish it moves it: more than an edit of a page takes.
    /// [`flush`](Self::flush) does the same where the gather is, and so does its drop where there
    /// is no leaf to visit.
    // A function of its own, which moves it once.
    #[inline(never)]
    pub fn finish(mut self, leaves: impl FnMut(Leaf<F>)) {
        self.flush(leaves);
    }

    /// Finishes what has been gathered so far where it is, and keeps the gather: to give out what
    /// edits have held back, for instance, or to go on where an [`unmap`](Gather::unmap) has
    /// stopped.
    ///
    /// ```
    /// # use core::ops::ControlFlow;
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # let span = Span::new(Va::new(0x4000), 0x2000)?;
    /// # space.map(span, Pa::new(0x10_0000), Attrs::USER_DATA)?;
    /// # space.make_live();
    /// let (mut held, mut frames) = (Vec::new(), Vec::new());
    /// let mut gather = space.gather();
    /// let progress = gather.unmap(span, |leaf| {
    ///     held.push(leaf);
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert!(progress.is_done());
    /// let flushed = gather.flush(|leaf| frames.push(leaf.frame())); // those of whole tables
    /// frames
    ///     .extend(held.into_iter().filter_map(|leaf| Some(flushed.release(leaf).ok()?.frame())));
    /// assert_eq!(frames, [Pa::new(0x10_0000), Pa::new(0x10_1000)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn flush(&mut self, leaves: impl FnMut(Leaf<F>)) -> Flushed {
        let serial = self.serial;
        self.send_and_wait();
        // SAFETY: the invalidation is complete, and while the space is borrowed exclusively no
        // software walks it (1.).
        unsafe { self.left.reclaim::<F, P>(&self.space.platform, leaves) };
        Flushed { serial }
    }

    /// Flushes, and gives out what an edit has held back since the last flush: a page that was
    /// [replaced](Gather::replace), for instance.
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush. Nothing is flushed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # space.map(Span::new(Va::new(0x7000), 0x1000)?, Pa::new(0x2000), Attrs::USER_RODATA)?;
    /// # space.make_live();
    /// let mut gather = space.gather();
    /// let shared = gather.replace(Va::new(0x7000), Pa::new(0x9000), Attrs::USER_DATA)?;
    /// let shared = gather.flush_with(shared, |_| ()).expect("of this gather");
    /// assert_eq!(shared.frame(), Pa::new(0x2000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn flush_with<T>(
        &mut self,
        held: Held<T>,
        leaves: impl FnMut(Leaf<F>),
    ) -> Result<T, Held<T>> {
        // No leaf has the number 0.
        if !held.is_of(self.serial) {
            return Err(held);
        }
        self.flush(leaves).release(held)
    }
}

/// The end of exclusive edits: what was detached can be reclaimed.
///
/// The debt of the space stays until it is complete: if this is forgotten, the next gather, perhaps
/// on another processor, which could not wait for it, invalidates everything again.
pub struct Exclusive<'s, F: Format, P: Platform> {
    space: &'s mut AddressSpace<F, P>,
    wait: bool,
}

impl<F: Format, P: Platform> Drop for Exclusive<'_, F, P> {
    #[inline]
    fn drop(&mut self) {
        if self.wait {
            self.space.platform.barrier(Barrier::Complete);
            self.space.debt.complete();
        }
    }
}

impl<F: Format, P: Platform> End<F, P> for Exclusive<'_, F, P> {
    type Completed = Completed<F, P>;

    #[inline]
    fn complete(self, completed: Completed<F, P>) -> Completed<F, P> {
        completed
    }
}

/// The space, to be looked at between edits.
impl<F: Format, P: Platform + Clone> Deref for Gather<'_, F, P> {
    type Target = AddressSpace<F, P>;

    #[inline]
    fn deref(&self) -> &AddressSpace<F, P> {
        self.space
    }
}

impl<F: Format, P: Platform + Clone> Drop for Gather<'_, F, P> {
    #[inline]
    fn drop(&mut self) {
        let left = &self.left;
        if self.space.debt.is_flush_pending() || !left.detached.is_empty() {
            self.flush_rest();
        } else if left.needs_publish || self.space.debt.needs_publish() {
            let stored = self.space.debt.take_publish() && self.space.is_live();
            if stored || self.left.needs_publish {
                self.space.platform.barrier(Barrier::Publish);
            }
        }
    }
}

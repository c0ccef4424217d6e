//! A gather: edits of one space, and what they leave to invalidate and to free.
//!
//! It borrows the space for as long as there is something that walkers have not been told of. So
//! what was changed in a space cannot be invalidated in another, nor be left out when something is
//! freed. It is finished by its name, or when it is dropped; and where even that is prevented, the
//! space knows that it is [owed](AddressSpace) an invalidation.

use core::mem::ManuallyDrop;
use core::ops::{ControlFlow, Deref};

use crate::SMALL;
use crate::addr::{Pa, Span};
use crate::edit::Template;
use crate::edit::space::{AddressSpace, EditError, Liveness};
use crate::flush::{Alone, Completed, Flush, Flushed, Held, Issued, Leaf, next_serial};
use crate::format::Format;
use crate::platform::{Barrier, Platform};

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Edits of this space, and what they leave to invalidate and to free.
    #[inline]
    pub fn gather(&mut self) -> Gather<'_, F, P> {
        Gather::new(self)
    }

    /// Maps `span` to the memory from `frame` on: a [gather](Self::gather) with one
    /// [`map`](Gather::map).
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::Ept, format::X86_64, hosted::Hosted};
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
/// use tablewright::{AddressSpace, Attrs, Pa, Perms, Span, Va, Change};
/// use tablewright::{format::X86_64, hosted::Hosted};
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// space.map(Span::new(Va::new(0), 64 << 20)?, Pa::new(0), Attrs::KERNEL_DATA)?;
/// space.make_live();
///
/// // Two edits, one invalidation.
/// let (low, high) = (Span::new(Va::new(0), 32 << 20)?, Span::new(Va::new(32 << 20), 32 << 20)?);
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
/// # use tablewright::{AddressSpace, Level, Span, Va, format::X86_64, hosted::Hosted};
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
/// # use tablewright::{AddressSpace, format::X86_64, hosted::Hosted};
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
    #[cfg_attr(not(feature = "small"), inline)]
    #[cfg_attr(feature = "small", inline(never))]
    pub(crate) fn new(space: &'s mut AddressSpace<F, P>) -> Self {
        let mut left = Flush::new();
        left.ranges.everything = space.owed;
        Self {
            space,
            left,
            serial: 0,
        }
    }

    /// An edit is about to change what walkers may remember.
    #[inline]
    pub(crate) fn owe(&mut self) {
        self.space.owed |= self.space.liveness() != Liveness::Dead;
    }

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

    /// What a gather that is dropped has left.
    #[inline(never)]
    fn flush_rest(&mut self) {
        self.issue_and_complete();
        // SAFETY: as in `flush` (1.).
        unsafe { self.left.free::<F, P>(&self.space.platform) };
    }

    /// Makes the edits visible and issues the invalidations. Whether there is something to wait
    /// for.
    #[cfg_attr(not(feature = "small"), inline(always))]
    fn send(&mut self) -> bool {
        let target = self.space.target();
        self.left.news |= self.space.take_news();
        let issued = self.left.issue::<F, P>(&self.space.platform, target);
        self.space.owed = false;
        // What was issued before may be what an edit of this gather has found done.
        issued || self.space.pending
    }

    /// Makes the edits visible, has every processor forget, and waits until they have.
    #[cfg_attr(not(feature = "small"), inline(always))]
    pub(super) fn issue_and_complete(&mut self) {
        if self.send() {
            self.space.platform.barrier(Barrier::Complete);
            self.space.pending = false;
        }
        self.serial = 0;
    }

    /// Makes the edits visible and tells every processor what to forget. Does not wait.
    #[inline]
    pub fn issue(self) -> Issued<F, P> {
        // It has nothing left to be finished when it is dropped.
        let mut this = ManuallyDrop::new(self);
        let wait = this.send();
        this.space.pending = wait;
        let detached = this.left.detached.take();
        Issued {
            completed: Completed::new(this.space.platform.clone(), this.serial, detached),
            end: Alone { wait },
        }
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
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
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
    /// frames.extend(held.into_iter().filter_map(|leaf| Some(flushed.release(leaf).ok()?.frame())));
    /// assert_eq!(frames, [Pa::new(0x10_0000), Pa::new(0x10_1000)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn flush(&mut self, mut leaves: impl FnMut(Leaf<F>)) -> Flushed {
        let flushed = Flushed {
            serial: self.serial,
        };
        if SMALL {
            self.flush_all(Some(&mut |leaf| {
                leaves(leaf);
                ControlFlow::Continue(())
            }));
            return flushed;
        }
        self.issue_and_complete();
        // SAFETY: the invalidation is complete, and while the space is borrowed exclusively no
        // software walks it (1.).
        unsafe { self.left.reclaim::<F, P>(&self.space.platform, leaves) };
        flushed
    }

    /// The same, and gives out what an edit has held back since it was flushed last: a page that
    /// was [replaced](Gather::replace), for instance. A gather that stays where it is, as this one
    /// does, is not copied.
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush. Nothing is flushed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
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
        if SMALL {
            return self.flush_all(None);
        }
        let Flush { news, detached, .. } = &self.left;
        if self.space.owed || !detached.is_empty() {
            self.flush_rest();
        } else if *news || self.space.news {
            let seen = self.space.take_news();
            if *news || seen {
                self.space.platform.barrier(Barrier::Publish);
            }
        }
    }
}

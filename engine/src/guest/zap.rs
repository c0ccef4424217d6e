//! Taking back, and changing, what is mapped: in an order that no fault can slip through.

use core::ops::ControlFlow;

use crate::addr::{Ipa, Span};
use crate::edit::Change;
use crate::edit::EditError;
use crate::flush::{Held, Leaf, Progress};
use crate::format::Format;
use crate::shared::{GracePeriod, SharedPlatform};

use super::{Gather, Guest};

/// An edit of what is mapped in a range, for good.
///
/// When it was made, what faults had looked up before was out of date. It waits until their walks
/// are over, and then one pass finds all that they have left. A pass that met a leaf in the middle
/// of being split by a break is followed by another.
///
/// The embedder drives it, and decides what to do while it waits:
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::format::Ept;
/// # use tablewright::guest::{Guest, Pass, SlotCell};
/// # use tablewright_hosted::Threads;
/// # use tablewright::shared::SharedSpace;
/// # use tablewright::{AddressSpace, Attrs, Ipa, Mapping, Pa, Span};
/// # let platform = Threads::new(64, 12, 1);
/// # let mut cells = [const { SlotCell::new() }; 8];
/// # let guest = Guest::new(SharedSpace::new(AddressSpace::<Ept<4>,
/// #     _>::new(&platform).unwrap()).unwrap(), &mut cells);
/// let page = Span::new(Ipa::new(0x7000), 0x1000)?;
/// # guest.space().map_range(page, Pa::new(0x5000), Mapping::new(Attrs::GUEST_MEMORY)).unwrap();
/// let mut held = None;
/// let (mut zap, mut gather) = (guest.zap(page), guest.gather());
/// loop {
///     match zap.unmap(&mut gather, |leaf| {
///         held = Some(leaf);
///         ControlFlow::Continue(())
///     })? {
///         Pass::Waiting => continue, // or do something else
///         Pass::Over => break,
///         Pass::Went => {}
///     }
///     let deferred = gather.issue().complete();
///     // No processor can reach the page now.
///     if let Some(leaf) = held.take().and_then(|leaf| deferred.release(leaf).ok()) {
///         assert_eq!(leaf.frame(), Pa::new(0x5000));
///     }
///     if let Ok(completed) = deferred.try_complete() {
///         completed.finish(|_| ());
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is taken back before it is driven to its end"]
pub struct Zap<'g, 's, F: Format<Input = Ipa>, P: SharedPlatform> {
    guest: &'g Guest<'s, F, P>,
    span: Span<Ipa>,
    state: State,
    /// A part was passed over since the last grace period.
    again: bool,
}

enum State {
    /// Walks that started before this have to be over; then the first pass begins.
    Wait(GracePeriod),
    /// A pass goes on from here.
    From(Ipa),
    Over,
}

/// The result of a step of a [`Zap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Walks of others are not over. They take microseconds, or as long as it takes to clean 2 MiB.
    Waiting,
    /// A part was edited: the gather is to be completed before it is relied on. Then go on.
    Went,
    /// All of it is done, and will stay so.
    Over,
}

impl<'g, 's, F: Format<Input = Ipa>, P: SharedPlatform + Clone> Zap<'g, 's, F, P> {
    pub(super) fn new(guest: &'g Guest<'s, F, P>, span: Span<Ipa>) -> Self {
        Self {
            guest,
            span,
            // After the version has moved on: a walk that starts later sees that it has.
            state: State::Wait(guest.space.grace_period()),
            again: false,
        }
    }

    /// The addresses that are zapped.
    pub fn span(&self) -> Span<Ipa> {
        self.span
    }

    /// Returns the rest of the range, or the pass that is over already.
    fn begin(&mut self) -> Result<Span<Ipa>, Pass> {
        match self.state {
            State::Wait(period) if !self.guest.space.is_over(period) => Err(Pass::Waiting),
            State::Wait(_) => Ok(self.span),
            // A stop lies inside of the range.
            State::From(at) => Span::inclusive(at, self.span.last()).map_err(|_| Pass::Over),
            State::Over => Err(Pass::Over),
        }
    }

    /// A part was done, up to there.
    fn end(&mut self, progress: Progress<Ipa>, passed_over: bool) {
        self.again |= passed_over;
        self.state = match progress {
            Progress::Stopped(at) => State::From(at),
            // The edit that was passed over is in a walk that has started.
            Progress::Done if self.again => State::Wait(self.guest.space.grace_period()),
            Progress::Done => State::Over,
        };
        if matches!(self.state, State::Wait(_)) {
            self.again = false;
        }
    }

    fn check(&self, gather: &Gather<'_, 's, F, P>) -> Result<(), EditError<Ipa>> {
        match core::ptr::eq(self.guest, gather.guest) {
            true => Ok(()),
            false => Err(EditError::ForeignGather),
        }
    }

    /// Takes away what is mapped, as [`unmap`](crate::shared::Gather::unmap) does.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`], [`EditError::ForeignGather`].
    pub fn unmap(
        &mut self,
        gather: &mut Gather<'g, 's, F, P>,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Pass, EditError<Ipa>> {
        self.check(gather)?;
        let span = match self.begin() {
            Ok(span) => span,
            Err(pass) => return Ok(pass),
        };
        let taken = gather.gather.unmap(span, held)?;
        self.end(taken.progress, taken.passed_over);
        Ok(Pass::Went)
    }

    /// Changes what is mapped, as [`protect`](crate::shared::Gather::protect) does.
    ///
    /// # Errors
    /// As there, and [`EditError::ForeignGather`].
    pub fn protect(
        &mut self,
        gather: &mut Gather<'g, 's, F, P>,
        change: Change,
    ) -> Result<Pass, EditError<Ipa>> {
        self.check(gather)?;
        let span = match self.begin() {
            Ok(span) => span,
            Err(pass) => return Ok(pass),
        };
        let change = match change.takes_writing_away() {
            // For good: it cannot be given back without the host.
            true => change.software(0),
            false => change,
        };
        let protected = gather.gather.protect(span, change)?;
        self.end(Progress::Done, protected.passed_over);
        Ok(Pass::Went)
    }
}

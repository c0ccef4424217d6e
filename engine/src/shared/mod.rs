//! Edits by any number of processors at once.
//!
//! Guest memory is mapped by faults, on all processors, in one tree. A lock around the tree would be held for as long as
//! it takes to clean caches; so there is none. An entry is the unit of agreement:
//!
//! * **A hole is filled, and a leaf replaced, by one compare-exchange.** Whoever loses it has changed nothing, gives back
//!   what it prepared, and is told so: the world is not what it looked like ([`Refused::Retry`]).
//! * **An entry that cannot be replaced in one step is claimed first**: exchanged for one that is
//!   [frozen](Format::FROZEN). It is nobody else's until its owner replaces it again, with a plain store. Whoever meets
//!   it is told that somebody is [at it](Refused::Busy) and lets the guest fault again; nobody spins. Caches are cleaned,
//!   and breaks made, under a claim, so that one processor does it and no other waits for it.
//! * **What was taken away stays frozen until it is forgotten**, where the architecture demands a break: a hole would
//!   invite the next fault to fill it while a processor still remembers what was there.
//! * **Tables are linked full and cut off whole.** A new table is filled where nobody sees it, and linked by one
//!   compare-exchange. A table that is cut off goes into the flush with everything below it. Processors that were on
//!   their way into it may still edit it, and harm nobody: its leaves are looked at, and its tables freed, when the hardware
//!   has forgotten it *and* every walk that may hold it is over ([`quiet`]). By then it is at rest.
//!
//! From this follows the rule for memory that is taken back, or protected, for good. A fault that looked the memory up before
//! may install it after an edit has passed, or hold a claim that the edit passed over. It does so in a walk. So the
//! edit is made, every walk that started before comes to its end, and the edit is made again, for what those have left.
//! [`SharedSpace::is_quiet`] tells when.
//!
//! What an edit finds done already may not be *complete*: somebody else has taken it away, or protected it, and is still
//! waiting for processors to forget. A frozen entry says so; a hole, or an entry that says what it should, does not. So edits
//! that are not complete are counted ([`SharedSpace`] has the number), from before their first change to the end of their
//! invalidation, and an edit that finds others under way when its own walk is over invalidates all of its range.
//!
//! What hardware does meanwhile, setting accessed and dirty flags, is no disagreement: a compare-exchange that fails only
//! for a flag is tried again with it.

mod bulk;
mod fault;
pub mod quiet;
mod range;
mod recover;
mod sleep;
mod tables;

pub use fault::{Mapped, NewLeaf, Relaxed};
pub use quiet::{Epochs, Moment, Quiescence, Slot, Walking};
pub use range::{Cut, Protected, SharedFlush, SharedIssued, Taken, TakenIssued};
pub use recover::Recovery;
pub use sleep::{Protecting, Step, Unprotectable};
pub use tables::TableCache;

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use core::fmt;
use core::marker::PhantomData;

use crate::addr::{Address, Level, Pa};
use crate::entry::Table;
use crate::flush::{Flush, Invalidation, Serial};
use crate::format::{Attrs, Format, Kind};
use crate::platform::{Caps, Platform};
use crate::space::{AddressSpace, EditError, Liveness};

/// Cache maintenance that a new mapping needs before anybody can use it.
///
/// ```
/// use tablewright::shared::Upkeep;
/// // A machine whose caches are coherent for whatever a guest does with its own.
/// assert_eq!(Upkeep::NONE, Upkeep { clean: false, instructions: false });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upkeep {
    /// Memory that is mapped as normal memory has to be cleaned to the point of coherency: the guest may use it with its
    /// caches off (arm64 without FEAT_S2FWB).
    pub clean: bool,
    /// Memory that is made executable has to be invalidated in the instruction caches (arm64 without `CTR_EL0.DIC`).
    pub instructions: bool,
}

impl Upkeep {
    /// None is needed.
    pub const NONE: Self = Self {
        clean: false,
        instructions: false,
    };
}

/// What shared edits ask of an embedder, besides a [`Platform`].
///
/// Frames for tables below the root are all alike: what was allocated for one level may be freed for another.
///
/// # Safety
/// 1. While what [`enter`](SharedPlatform::enter) returned lives, no [`Moment`] that was taken after it is past.
/// 2. A walk that is entered after a `Moment` was taken reads descriptors, and whatever else, as they were then, or later.
pub unsafe trait SharedPlatform: Platform {
    /// A walk under way.
    type Walk<'a>
    where
        Self: 'a;

    /// A walk starts on this processor. With quiescent states of the embedder's own there is nothing to do.
    fn enter(&self) -> Self::Walk<'_>;

    /// Tables have been cut off.
    fn cut(&self) -> Moment;

    /// Whether every walk that started before this moment is over.
    fn is_past(&self, moment: Moment) -> bool;

    /// What a new mapping of memory needs. Constant where it can be.
    #[inline(always)]
    fn upkeep(&self) -> Upkeep {
        Upkeep::NONE
    }

    /// Cleans and invalidates `size` bytes from `frame` on to the point of coherency.
    fn clean(&self, frame: Pa, size: u64) {
        let _ = (frame, size);
    }

    /// Invalidates `size` bytes from `frame` on, or everything, in the instruction caches, by their kind.
    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        let _ = (frame, size);
    }

    /// Issues an invalidation on this processor only, and waits. Where a permission fault drops the entry that caused it,
    /// nothing has to be done.
    fn invalidate_here(&self, what: &Invalidation) {
        let _ = what;
    }
}

/// Why a shared edit did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused<A> {
    /// Another processor is replacing this entry. Let the guest go on: it will fault again if it has to.
    Busy(A),
    /// Something changed meanwhile. Look again, or let the guest fault again.
    Retry,
    /// So many tables are needed and the cache holds fewer. Top it up, outside of every lock, and try again.
    NeedsTables(u8),
    /// A larger leaf translates this address; its level. It allows less than was asked for.
    Larger(Level),
    /// The memory is not there for such an access.
    Denied,
    /// The edit makes no sense.
    Edit(EditError<A>),
}

impl<A> From<EditError<A>> for Refused<A> {
    fn from(error: EditError<A>) -> Self {
        Self::Edit(error)
    }
}

impl<A: Address> fmt::Display for Refused<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy(at) => write!(f, "another processor is replacing the entry for {at}"),
            Self::Retry => write!(f, "something changed meanwhile"),
            Self::NeedsTables(count) => write!(f, "{count} tables are needed"),
            Self::Larger(level) => write!(f, "a leaf {} levels up is in the way", level.height()),
            Self::Denied => write!(f, "the memory does not allow this access"),
            Self::Edit(error) => write!(f, "{error}"),
        }
    }
}

impl<A: Address> core::error::Error for Refused<A> {}

/// A tree of tables that any number of processors edit at once.
///
/// It is made of an [`AddressSpace`], and becomes one again when nobody else has it any more.
pub struct SharedSpace<F: Format, P: SharedPlatform> {
    platform: P,
    root: Pa,
    id: u16,
    /// Numbers them, and orders nothing: a model need not explore it.
    flushes: core::sync::atomic::AtomicU32,
    /// Edits that have changed something, perhaps, and are not complete.
    unfinished: AtomicU32,
    /// Of what sleeps; see [`sleep`].
    generation: AtomicU64,
    format: PhantomData<F>,
}

/// An edit that is not complete, until this is dropped.
pub(crate) struct Unfinished<'s>(&'s AtomicU32);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        // Who does not see it any more finds what it has done to be forgotten.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Shares a space.
    pub fn new(space: AddressSpace<F, P>) -> Self {
        let (platform, root, id) = space.into_parts();
        Self {
            platform,
            root,
            id,
            flushes: core::sync::atomic::AtomicU32::new(0),
            unfinished: AtomicU32::new(0),
            generation: AtomicU64::new(0),
            format: PhantomData,
        }
    }

    /// The space, for exclusive edits. Walkers may still be using it.
    pub fn into_exclusive(self) -> AddressSpace<F, P> {
        // SAFETY: the root was taken out of a space (1., 2.), and is live as far as anybody knows (3.).
        unsafe { AddressSpace::adopt(self.platform, self.root, crate::Half::Lower, Liveness::Live) }
            .with_id(self.id)
    }

    /// The frame of the root.
    pub fn root(&self) -> Pa {
        self.root
    }

    /// The platform.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    pub(crate) fn caps(&self) -> Caps {
        self.platform.caps()
    }

    /// A moment, for [`is_quiet`](SharedSpace::is_quiet).
    pub fn moment(&self) -> Moment {
        self.platform.cut()
    }

    /// Whether every walk that started before this moment is over. Does not wait.
    pub fn is_quiet(&self, moment: Moment) -> bool {
        self.platform.is_past(moment)
    }

    /// An edit begins, before its first change.
    pub(crate) fn begin(&self) -> Unfinished<'_> {
        // The exchange of the first entry orders it: who sees that sees this.
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        Unfinished(&self.unfinished)
    }

    /// An edit that was begun, and whose mark was forgotten, is complete.
    pub(crate) fn end(&self) {
        drop(Unfinished(&self.unfinished));
    }

    /// Whether somebody else's edit may have been seen and not be complete, after looking at entries. `own` of those that
    /// are under way are the caller's.
    fn has_seen_unfinished(&self, own: u32) -> bool {
        fence(Ordering::Acquire);
        self.unfinished.load(Ordering::Relaxed) > own
    }

    fn serial(&self) -> Serial {
        Serial {
            root: self.root,
            // Wraps after four thousand million flushes, by when the first is long settled.
            number: self
                .flushes
                .fetch_add(1, core::sync::atomic::Ordering::Relaxed),
        }
    }

    /// A flush for edits by this processor.
    pub fn flush(&self) -> SharedFlush<F, P> {
        SharedFlush::new(Flush::new(self.platform.clone(), self.id, self.serial()))
    }

    /// The entry that decides about `input` at `level`: at that level, or above where no table is.
    ///
    /// # Safety
    /// 1. A walk has been entered.
    #[inline(always)]
    unsafe fn find(&self, input: u64, level: Level) -> Found<'_, P> {
        let (mut frame, mut at) = (self.root, F::root_level());
        loop {
            // SAFETY: the root, or a frame that was read from a descriptor of the tree; in a walk it stays a table (1.).
            let table = unsafe { Table::open(&self.platform, frame, at) };
            let index = F::index(input, at);
            let entry = table.follow(index);
            match at.down() {
                Some(below) if at > level && F::kind(entry, at) == Kind::Table => {
                    frame = F::address(entry, at);
                    at = below;
                }
                _ => {
                    return Found {
                        table,
                        index,
                        entry,
                        level: at,
                    };
                }
            }
        }
    }
}

/// An entry, as it was read.
struct Found<'p, P: Platform> {
    table: Table<'p, P>,
    index: usize,
    entry: u64,
    level: Level,
}

impl<P: Platform> Found<'_, P> {
    /// Replaces the entry, if it is what was expected.
    #[inline(always)]
    fn replace(&self, expected: u64, new: u64) -> Result<(), u64> {
        self.table.compare_exchange(self.index, expected, new)
    }

    /// Lifts a claim: what was written to a table that is linked here is seen by whoever follows.
    #[inline(always)]
    fn lift(&self, new: u64) {
        self.table.link(self.index, new);
    }
}

/// Attributes without what hardware and accounting add.
fn plain(attrs: Attrs) -> Attrs {
    Attrs {
        accessed: false,
        dirty: false,
        software: 0,
        ..attrs
    }
}

// SAFETY: passed on to the platform behind the reference, which made the promises.
unsafe impl<P: SharedPlatform> SharedPlatform for &P {
    type Walk<'a>
        = P::Walk<'a>
    where
        Self: 'a;

    #[inline(always)]
    fn enter(&self) -> Self::Walk<'_> {
        (**self).enter()
    }
    fn cut(&self) -> Moment {
        (**self).cut()
    }
    fn is_past(&self, moment: Moment) -> bool {
        (**self).is_past(moment)
    }
    #[inline(always)]
    fn upkeep(&self) -> Upkeep {
        (**self).upkeep()
    }
    fn clean(&self, frame: Pa, size: u64) {
        (**self).clean(frame, size);
    }
    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        (**self).invalidate_instructions(frame, size);
    }
    fn invalidate_here(&self, what: &Invalidation) {
        (**self).invalidate_here(what);
    }
}

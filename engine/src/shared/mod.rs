//! Edits by any number of processors at once.
//!
//! You need this if several processors edit one tree at a time, as faults of a guest do. Where one
//! lock, or `&mut`, is taken for each edit, an [`AddressSpace`] is simpler and cheaper.
//!
//! Guest memory is mapped by faults, on all processors, in one tree. A lock around the tree would
//! be held for as long as it takes to clean caches; so there is none. An entry is the unit of
//! agreement:
//!
//! * **A hole is filled, and a leaf replaced, by one compare-exchange.** An edit that loses it has
//!   changed nothing, gives back what it prepared, and is told so: the world is not what it looked
//!   like ([`Refused::Retry`]).
//! * **An entry that cannot be replaced in one step is claimed first**: exchanged for one that is
//!   [frozen](Format::FROZEN). It is its owner's alone until that replaces it again, with a plain
//!   store. An edit that meets it is told that it is [busy](Refused::Busy) and lets the guest fault
//!   again; none spins. Caches are cleaned, and breaks made, under a claim, so that one processor
//!   does it and no other waits for it.
//! * **What was taken away stays frozen until it is forgotten**, where the architecture demands a
//!   break: a hole would invite the next fault to fill it while a processor still remembers what
//!   was there.
//! * **Tables are linked full and detached whole.** A new table is filled out of reach, and linked
//!   by one compare-exchange. A table that is detached goes into the flush with everything below
//!   it. Processors that were on their way into it may still edit it, and do no harm: its leaves
//!   are looked at, and its tables freed, when the hardware has forgotten it *and* every walk that
//!   may hold it is over ([`grace`]). By then it is at rest.
//!
//! From this follows the rule for memory that is taken back, or protected, for good. A fault that
//! looked the memory up before may install it after an edit has passed, or hold a claim that the
//! edit passed over. It does so in a walk. So the edit is made, every walk that started before
//! comes to its end, and the edit is made again, for what those have left. [`SharedSpace::is_over`]
//! tells when.
//!
//! What an edit finds done already may not be *complete*: another processor has taken it away, or
//! protected it, and is still waiting for processors to forget. A frozen entry says so; a hole, or
//! an entry that says what it should, does not. So edits that are not complete are
//! [counted](Gather), and an edit that finds others under way when its own walk is over invalidates
//! all of its range.
//!
//! What hardware does meanwhile, setting accessed and dirty flags, is no disagreement: a
//! compare-exchange that fails only for a flag is tried again with it.

mod bulk;
mod fault;
mod gather;
pub mod grace;
mod protect_all;
mod prune;
mod range;

pub use fault::{Mapped, NewLeaf, Relaxed};
pub use gather::{Beside, DeferredReclaim, Gather};
pub use grace::{Epochs, GracePeriod, WalkSlot, Walking};
pub use protect_all::{Protecting, Unprotectable};
pub use range::{Protected, Taken};

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU32, AtomicU64};

use core::fmt;
use core::ops::{ControlFlow, Range};
use core::sync::atomic::{AtomicU8, Ordering, fence};

use crate::addr::{Address, Level, Pa};
use crate::edit::space::{AddressSpace, EditError, Liveness};
use crate::flush::{Ranges, Target, next_serial};
use crate::format::{Attrs, Format, Kind};
use crate::invalidation::Invalidation;
use crate::platform::{Barrier, Caps, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step as WalkStep, Visit};

/// Cache maintenance that a new mapping needs before it can be used.
///
/// ```
/// use tablewright::shared::CacheMaintenance;
/// // A machine whose caches are coherent for whatever a guest does with its own.
/// assert_eq!(CacheMaintenance::NONE, CacheMaintenance { clean: false, instructions: false });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMaintenance {
    /// Memory that is mapped as normal memory has to be cleaned to the point of coherency: the
    /// guest may use it with its caches off (arm64 without FEAT_S2FWB).
    pub clean: bool,
    /// Memory that is made executable has to be invalidated in the instruction caches (arm64
    /// without `CTR_EL0.DIC`).
    pub instructions: bool,
}

impl CacheMaintenance {
    /// No maintenance is needed.
    pub const NONE: Self = Self { clean: false, instructions: false };
}

/// The part of a platform that shared edits need besides [`Platform`]: walks, grace periods, cache
/// maintenance.
///
/// Frames for tables below the root are all alike: what was allocated for one level may be freed
/// for another.
///
/// # Safety
/// 1. While what [`enter`](SharedPlatform::enter) returned lives, no [`GracePeriod`] that was taken
///    after it is past, whatever else the processor does meanwhile: enters and leaves other walks,
///    in any order, in interrupts too. It has to be dropped on the processor that entered.
/// 2. A walk that is entered after a `GracePeriod` was taken reads descriptors, and whatever else,
///    as they were then, or later.
pub unsafe trait SharedPlatform: Platform {
    /// A walk under way.
    type Walk<'a>
    where
        Self: 'a;

    /// A walk starts on this processor. With quiescent states of the embedder's own there is
    /// nothing to do.
    fn enter(&self) -> Self::Walk<'_>;

    /// Tables have been detached.
    fn grace_period(&self) -> GracePeriod;

    /// Whether a grace period is over: so is every walk that started before it.
    fn is_over(&self, period: GracePeriod) -> bool;

    /// Returns the cache maintenance that a new mapping of memory needs. Constant where it can be.
    #[inline]
    fn maintenance(&self) -> CacheMaintenance {
        CacheMaintenance::NONE
    }

    /// Cleans and invalidates `size` bytes from `frame` on to the point of coherency.
    fn clean(&self, frame: Pa, size: u64) {
        let _ = (frame, size);
    }

    /// Invalidates `size` bytes from `frame` on, or everything, in the instruction caches, by their
    /// kind.
    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        let _ = (frame, size);
    }

    /// Issues an invalidation on this processor only, and waits. Where a permission fault drops the
    /// entry that caused it, nothing has to be done.
    fn invalidate_here(&self, what: &Invalidation<'_>) {
        let _ = what;
    }
}

/// The error of a shared edit that has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused<A> {
    /// Another processor is replacing this entry. Let the guest go on: it will fault again if it
    /// has to.
    Busy(A),
    /// Something changed meanwhile. Look again, or let the guest fault again.
    Retry,
    /// The gather has fewer tables than this many, which are needed. Top it up, outside of every
    /// lock, and try again.
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
/// It is made of an [`AddressSpace`], and becomes one again when it is not shared any more.
pub struct SharedSpace<F: Format, P: SharedPlatform> {
    /// The tree. Its cache and its debt are not used while it is shared.
    space: AddressSpace<F, P>,
    /// Whether leaves may be global: [`NO_GLOBALS`], or more.
    globals: AtomicU8,
    /// The number of the last flush that needed one. It orders nothing: a model need not explore
    /// it.
    serial: core::sync::atomic::AtomicU64,
    /// The first of these numbers.
    base: u64,
    /// Edits that have changed something, perhaps, and are not complete.
    unfinished: AtomicU32,
    /// Of what is write-protected; see [`protect_all`].
    generation: AtomicU64,
}

const NO_GLOBALS: u8 = 0;
/// A processor is about to map the first.
const FIRST_GLOBAL: u8 = 1;
const GLOBALS: u8 = 2;

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Shares a space. What its edits owe is completed, what they have written is published, and
    /// contiguous runs are unfolded: shared edits change one entry at a time.
    ///
    /// # Errors
    /// Gives a space back on which the code that edits [runs](Liveness::Own): shared edits break
    /// translations. And one with a table that takes permissions from what is below it
    /// ([`Mapping::tables_deny_execution`](crate::Mapping::tables_deny_execution), or an
    /// [adopted](AddressSpace::adopt) one): a fault goes down without adding up what tables take
    /// away.
    #[expect(clippy::result_large_err, reason = "the space comes back")]
    pub fn new(mut space: AddressSpace<F, P>) -> Result<Self, AddressSpace<F, P>> {
        if space.liveness() == Liveness::Own || space.has_denying_table() {
            return Err(space);
        }
        space.gather().share();
        // It is published.
        space.become_(Liveness::Live);
        // A block of its own: exclusive edits go on in theirs.
        let base = next_serial(0);
        let globals = match space.debt.has_globals() {
            true => GLOBALS,
            false => NO_GLOBALS,
        };
        Ok(Self {
            space,
            globals: AtomicU8::new(globals),
            serial: core::sync::atomic::AtomicU64::new(base),
            base,
            unfinished: AtomicU32::new(0),
            generation: AtomicU64::new(0),
        })
    }

    /// The space, for exclusive edits. Walkers may still be using it. Tables that are
    /// [write-protected](Self::protect_all) are opened, with what is below them writable again as
    /// far as it was.
    ///
    /// Where a gather was forgotten, what it may have taken away is invalidated now, and what it
    /// left claimed becomes holes.
    pub fn into_exclusive(self) -> AddressSpace<F, P> {
        let mend = Mend { unclaim: self.has_seen_unfinished(0), open: self.may_be_protected() };
        let target = self.target(true);
        let mut space = self.space;
        space.debt.add_globals(target.global);
        if mend.unclaim || mend.open {
            let mut ranges = Ranges::new();
            ranges.everything = true;
            ranges.run::<F, P>(space.platform(), target);
            for slice in space.everything() {
                let mut mend = mend;
                let _: ControlFlow<()> = space.visit(slice, &mut mend);
            }
            space.platform().barrier(Barrier::Publish);
        }
        space
    }

    /// The frame of the root.
    pub fn root(&self) -> Pa {
        self.space.root
    }

    /// The platform.
    pub fn platform(&self) -> &P {
        &self.space.platform
    }

    pub(crate) fn caps(&self) -> Caps {
        self.platform().caps()
    }

    /// A grace period begins: it is [over](SharedSpace::is_over) when no walk is left that started
    /// before it.
    pub fn grace_period(&self) -> GracePeriod {
        self.platform().grace_period()
    }

    /// Whether a grace period is over: so is every walk that started before it. Does not wait.
    pub fn is_over(&self, period: GracePeriod) -> bool {
        self.platform().is_over(period)
    }

    /// The number of a flush.
    fn next_serial(&self) -> u64 {
        let mut last = self.serial.load(Ordering::Relaxed);
        loop {
            let next = next_serial(last);
            let now =
                self.serial.compare_exchange(last, next, Ordering::Relaxed, Ordering::Relaxed);
            match now {
                Ok(_) => return next,
                Err(other) => last = other,
            }
        }
    }

    /// Global leaves may be mapped from now on. Before the walk that maps one.
    ///
    /// An edit that detaches a table, and does not see this when it looks behind a fence what kind
    /// of invalidation that takes, has detached it before the walk begins, which then does not come
    /// to the table.
    #[inline]
    fn map_global(&self, global: bool) {
        if global && self.globals.load(Ordering::Acquire) != GLOBALS {
            self.globals.fetch_max(FIRST_GLOBAL, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            // Release: another processor that sees this needs no fence of its own.
            self.globals.store(GLOBALS, Ordering::Release);
        }
    }

    /// The translations that a flush of the space is about: its root, its identifier, and whether
    /// global ones may be cached.
    #[inline]
    fn target(&self, any: bool) -> Target {
        let mut global = self.globals.load(Ordering::Relaxed) != NO_GLOBALS;
        if F::GLOBALS && any && !global {
            // What was detached before the look: see `map_global`.
            fence(Ordering::SeqCst);
            global = self.globals.load(Ordering::Relaxed) != NO_GLOBALS;
        }
        Target { global, ..self.space.target() }
    }

    #[inline]
    fn check(&self, span: crate::Span<F::Input>) -> Result<Slice, EditError<F::Input>> {
        self.space.check(span)
    }

    /// Whether the root translates this address.
    #[inline]
    fn translates(&self, input: F::Input) -> bool {
        self.space.translates(input.bits())
    }

    fn visit(&self, slice: Slice, visitor: &mut dyn Visit<F, P>) -> ControlFlow<()> {
        // The caller has entered a walk, which keeps the tables.
        self.space.visit(slice, visitor)
    }

    /// The entry that decides about `input` at `level`: at that level, or above where no table is.
    ///
    /// # Safety
    /// 1. A walk has been entered.
    #[inline]
    unsafe fn find(&self, input: u64, level: Level) -> Found<'_, P> {
        let (mut frame, mut at) = (self.root(), F::root_level());
        loop {
            // SAFETY: the root, or a frame that was read from a descriptor of the tree; in a walk
            // it stays a table (1.).
            let table = unsafe { Table::open(self.platform(), frame, at) };
            let index = F::index(input, at);
            let entry = table.follow(index);
            match at.down() {
                Some(below) if at > level && F::kind(entry, at) == Kind::Table => {
                    frame = F::address(entry, at);
                    at = below;
                }
                _ => {
                    return Found { table, index, entry, level: at };
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
    #[inline]
    fn replace(&self, expected: u64, new: u64) -> Result<(), u64> {
        self.table.compare_exchange(self.index, expected, new)
    }

    /// Lifts a claim: what was written to a table that is linked here is seen by a walk that
    /// follows it.
    #[inline]
    fn lift(&self, new: u64) {
        self.table.link(self.index, new);
    }
}

/// Makes a tree that was shared fit for exclusive edits, which take what is suspended for their
/// own.
#[derive(Clone, Copy)]
struct Mend {
    /// A claimed entry becomes a hole, because no edit is there any more that will put something in
    /// its place.
    unclaim: bool,
    /// An entry that is write-protected is opened.
    open: bool,
}

impl<F: Format, P: Platform> Visit<F, P> for Mend {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> WalkStep {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => {
                if self.open && F::is_protected(entry) {
                    table.link(index, F::open_table(entry));
                }
                return WalkStep::Into(F::address(entry, level));
            }
            Kind::Invalid if self.unclaim && entry != 0 => table.store(index, 0),
            _ => {}
        }
        WalkStep::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, _: u64) -> ControlFlow<()> {
        for index in range {
            let entry = table.load(index);
            if self.unclaim && entry != 0 && F::kind(entry, Level::PAGE) == Kind::Invalid {
                table.store(index, 0);
            }
        }
        ControlFlow::Continue(())
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Whether some table takes permissions away. Looked up only where one may: an adopted tree is
    /// not known to have none.
    fn has_denying_table(&self) -> bool {
        let mut denying = FindDenying(false);
        if self.may_deny() {
            for slice in self.everything() {
                let _: ControlFlow<()> = self.visit(slice, &mut denying);
            }
        }
        denying.0
    }
}

/// Finds a table that takes permissions away.
struct FindDenying(bool);

impl<F: Format, P: Platform> Visit<F, P> for FindDenying {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> WalkStep {
        let entry = table.load(index);
        if F::kind(entry, level) != Kind::Table {
            return WalkStep::Next;
        }
        self.0 |= !F::denied(entry).is_empty();
        match (self.0, level.down()) {
            (true, _) => WalkStep::Stop,
            // What is below is no table.
            (false, None | Some(Level::PAGE)) => WalkStep::Next,
            (false, Some(_)) => WalkStep::Into(F::address(entry, level)),
        }
    }

    fn pages(&mut self, _: &Table<'_, P>, _: Range<usize>, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Attributes without what hardware and accounting add.
fn plain(attrs: Attrs) -> Attrs {
    Attrs { accessed: false, dirty: false, software: 0, ..attrs }
}

// SAFETY: passed on to the platform behind the reference, which made the promises.
unsafe impl<P: SharedPlatform> SharedPlatform for &P {
    type Walk<'a>
        = P::Walk<'a>
    where
        Self: 'a;

    #[inline]
    fn enter(&self) -> Self::Walk<'_> {
        (**self).enter()
    }
    fn grace_period(&self) -> GracePeriod {
        (**self).grace_period()
    }
    fn is_over(&self, period: GracePeriod) -> bool {
        (**self).is_over(period)
    }
    #[inline]
    fn maintenance(&self) -> CacheMaintenance {
        (**self).maintenance()
    }
    fn clean(&self, frame: Pa, size: u64) {
        (**self).clean(frame, size);
    }
    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        (**self).invalidate_instructions(frame, size);
    }
    fn invalidate_here(&self, what: &Invalidation<'_>) {
        (**self).invalidate_here(what);
    }
}

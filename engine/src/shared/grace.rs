//! When does no walk hold a table any more that was detached?
//!
//! A walk of software holds a table between reading the descriptor that points to it and leaving it
//! again. An edit that detaches the table meanwhile must not free it: not before the hardware has
//! forgotten it, which a flush takes care of, and not before every such walk is over. Two ways to
//! know the second:
//!
//! * **Epochs**: [`Epochs`]. A walk announces itself when it starts and when it ends, which costs a
//!   fence.
//! * **Quiescent states** of the embedder's own. There are times at which a processor holds no
//!   table: between two faults, say, or when it goes idle. Nothing is paid in a walk. The
//!   platform's [`Walk`](super::SharedPlatform::Walk) is `()`, and its grace period is over when
//!   every processor has passed such a time.
//!
//! # Why an announcement is enough
//!
//! A walk writes the epoch that it read into its processor's slot, then a full fence, then reads
//! descriptors. An edit that detaches a table stores the descriptor, then a full fence, then moves
//! the epoch on, and later looks at the slots. Of the two fences one comes first. If it is the
//! walk's, the slot is seen, with an epoch from before the cut, and the table is kept. If it is the
//! edit's, the walk reads the new descriptor and never comes to the table. A slot that holds the
//! new epoch belongs to a walk that read it after the cut, and so reads the new descriptor too.
//!
//! # Walks inside of walks
//!
//! A processor may have several walks at once: two edits under way, completed in either order, or
//! one in an interrupt that came in the midst of another. They share the slot. It counts them, and
//! the announcement of the first stays until the last is over: older than the others need, which
//! keeps tables longer and frees none too early. Each of them makes its own fence, because an
//! interrupt may come between the store of an announcement and the fence behind it: to the walk in
//! the interrupt, an announcement without a fence is none.
//!
//! Only the processor, and interrupts on it, write its slot, so loads and stores will do. They come
//! in this order:
//!
//! ```text
//! a walk starts                                 a walk ends
//!   1. depth ← depth + 1                          1. depth ← depth - 1
//!   2. if epoch is IDLE, epoch ← now             2. if depth is 0, epoch ← IDLE
//!   3. a full fence
//! ```
//!
//! An interrupt ends every walk that it starts, and so leaves the depth as it found it: a depth
//! that was loaded before it may be stored after it. If the depth was not 0, the interrupt does not
//! come to 0 and takes no announcement away. An interrupt that comes ...
//!
//! * before 1 of a start: finds a slot in order, and leaves it so;
//! * between 1 and 2 of the first walk's start: finds the depth 1 and no epoch, and announces
//!   itself. The announcement stays, for the depth does not come to 0. Step 2 finds it, or, if it
//!   had looked already, replaces it by an epoch of its own, perhaps an older one. Either will do:
//!   the interrupt's walks are over, and the first walk has not read anything;
//! * between 2 and 3: shares the announcement, and has a fence of its own;
//! * between 1 and 2 of the last walk's end: finds the depth 0 and the epoch that was announced,
//!   and shares it. Its own last walk writes IDLE, and step 2 writes it again. Nothing is
//!   announced, and no walk is under way.
//!
//! In the other order, neither works. If a start announced before it counted, an interrupt between
//! the two would come back to the depth 0 and withdraw the announcement of a walk that goes on to
//! read. If an end withdrew before it counted, an interrupt between the two would announce itself
//! at the depth 1 and never withdraw: no later grace period would be over.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

use core::marker::PhantomData;
use core::sync::atomic::compiler_fence;

/// One processor's announcement. Each has cache lines to itself.
///
/// ```
/// use tablewright::shared::WalkSlot;
/// static SLOTS: [WalkSlot; 4] = [const { WalkSlot::new() }; 4];
/// # let _ = &SLOTS;
/// ```
#[derive(Debug)]
#[repr(align(128))]
pub struct WalkSlot {
    epoch: AtomicU64,
    /// How many walks of epochs the processor has under way. Read by that processor alone, which it
    /// tells nothing about others: a model need not explore it.
    depth: core::sync::atomic::AtomicU64,
}

/// No walk is under way.
const IDLE: u64 = 0;

impl WalkSlot {
    /// A processor that walks no tables.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Self { epoch: AtomicU64::new(IDLE), depth: core::sync::atomic::AtomicU64::new(0) }
    }

    /// A processor that walks no tables.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        Self { epoch: AtomicU64::new(IDLE), depth: core::sync::atomic::AtomicU64::new(0) }
    }

    /// Forgets what was announced to other epochs, whose numbers mean nothing here.
    fn reset(&self) {
        self.epoch.store(IDLE, Ordering::Relaxed);
        self.depth.store(0, core::sync::atomic::Ordering::Relaxed);
    }

    /// A walk starts. `interrupt` may be interrupted wherever it is called: that is between any two
    /// accesses.
    ///
    /// # Safety
    /// As for [`Epochs::enter`].
    #[inline]
    unsafe fn start(&self, now: &AtomicU64, mut interrupt: impl FnMut()) {
        let depth = self.depth.load(core::sync::atomic::Ordering::Relaxed);
        interrupt();
        self.depth.store(depth + 1, core::sync::atomic::Ordering::Relaxed);
        // An interrupt sees this processor's stores in the order of the program; so the compiler
        // has to keep it.
        compiler_fence(core::sync::atomic::Ordering::SeqCst);
        interrupt();
        if self.epoch.load(Ordering::Relaxed) == IDLE {
            interrupt();
            let epoch = now.load(Ordering::Relaxed);
            interrupt();
            // Release: what sees this announcement, and no longer the one before, comes after the
            // walk before.
            self.epoch.store(epoch, Ordering::Release);
        }
        interrupt();
        // The announcement before any descriptor is read, of a walk inside of another too: see
        // above.
        fence(Ordering::SeqCst);
        interrupt();
    }

    /// A walk ends.
    ///
    /// # Safety
    /// 1. It was started in this slot, by this processor, and has not ended yet.
    #[inline]
    unsafe fn end(&self, mut interrupt: impl FnMut()) {
        interrupt();
        let depth = self.depth.load(core::sync::atomic::Ordering::Relaxed) - 1;
        interrupt();
        self.depth.store(depth, core::sync::atomic::Ordering::Relaxed);
        interrupt();
        if depth == 0 {
            // Release: what the walks did to tables is done. It also keeps the depth before it.
            self.epoch.store(IDLE, Ordering::Release);
        }
        interrupt();
    }
}

impl Default for WalkSlot {
    fn default() -> Self {
        Self::new()
    }
}

/// A grace period: over when no walk is left that started before it, and so none that may know a
/// table detached before it.
///
/// ```
/// use tablewright::shared::{Epochs, WalkSlot};
/// let slots = [const { WalkSlot::new() }; 2];
/// let epochs = Epochs::new(&slots);
/// let period = epochs.advance();
/// assert!(epochs.is_over(period));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[must_use = "what was detached may be freed when it is over"]
pub struct GracePeriod(u64);

impl GracePeriod {
    /// For platforms that count quiescent states of their own: any number that grows.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Epochs: which walks may still hold what was detached.
///
/// ```
/// use tablewright::shared::{Epochs, WalkSlot};
/// let slots = [const { WalkSlot::new() }; 2];
/// let epochs = Epochs::new(&slots);
/// // SAFETY: one thread uses the epochs (1.), without interrupts (2.), to its end (3.), and made
/// // them alone (4.).
/// let walk = unsafe { epochs.enter(1) };
/// let period = epochs.advance();
/// assert!(!epochs.is_over(period)); // the walk may have seen what was there
/// drop(walk);
/// assert!(epochs.is_over(period));
/// ```
#[derive(Debug)]
pub struct Epochs<'s> {
    /// The number that a walk announces.
    now: AtomicU64,
    slots: &'s [WalkSlot],
}

impl<'s> Epochs<'s> {
    /// Epochs for as many processors as there are slots. What was announced in the slots before is
    /// forgotten.
    pub fn new(slots: &'s [WalkSlot]) -> Self {
        slots.iter().for_each(WalkSlot::reset);
        Self { now: AtomicU64::new(IDLE + 1), slots }
    }

    /// Processor number `cpu` starts a walk. It may have others under way, which may end in any
    /// order. `None` for a processor that has no slot, and must not walk.
    ///
    /// # Safety
    /// 1. The caller runs on the only processor that enters with this number: this processor and
    ///    interrupts on it write the slot, and nothing else does.
    /// 2. An interrupt ends what it starts: what is entered in an interrupt is dropped before it
    ///    returns, and nothing that was entered outside of it is dropped in it.
    /// 3. What is returned stays on this processor until it is dropped. It is not `Send`; code that
    ///    can be moved to another processor in the midst of a thread keeps from being moved
    ///    meanwhile.
    /// 4. Nothing else has been made of the slots since these epochs were: no other epochs.
    #[inline]
    pub unsafe fn enter(&self, cpu: usize) -> Option<Walking<'_>> {
        // SAFETY: passed on.
        unsafe { self.enter_with(cpu, || ()) }
    }

    /// Enters a walk, with interrupts in between, for models of them.
    ///
    /// # Safety
    /// As for [`enter`](Epochs::enter), for what `interrupt` does too.
    #[cfg(feature = "loom")]
    #[doc(hidden)]
    pub unsafe fn enter_interrupted(
        &self,
        cpu: usize,
        interrupt: impl FnMut(),
    ) -> Option<Walking<'_>> {
        // SAFETY: passed on.
        unsafe { self.enter_with(cpu, interrupt) }
    }

    /// # Safety
    /// As for [`enter`](Epochs::enter).
    #[inline]
    unsafe fn enter_with(&self, cpu: usize, interrupt: impl FnMut()) -> Option<Walking<'_>> {
        let slot = self.slots.get(cpu)?;
        // SAFETY: passed on.
        unsafe { slot.start(&self.now, interrupt) };
        Some(Walking { slot, not_send: PhantomData })
    }

    /// Tables have been detached: a walk that starts later than this does not find them.
    pub fn advance(&self) -> GracePeriod {
        // The descriptor before the look at the slots: see above.
        fence(Ordering::SeqCst);
        GracePeriod(self.now.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// Whether a grace period is over: so is every walk that started before it. Does not wait.
    pub fn is_over(&self, period: GracePeriod) -> bool {
        fence(Ordering::SeqCst);
        self.slots.iter().all(|slot| {
            // What the walk did to the table is done before it is freed: acquire, for its release.
            let entered = slot.epoch.load(Ordering::Acquire);
            entered == IDLE || entered >= period.0
        })
    }
}

/// A walk by one processor, until this is dropped.
#[derive(Debug)]
#[must_use = "the walk ends when this is dropped"]
pub struct Walking<'e> {
    slot: &'e WalkSlot,
    not_send: PhantomData<*const ()>,
}

impl Walking<'_> {
    /// Ends the walk with interrupts, for models of them.
    #[cfg(feature = "loom")]
    #[doc(hidden)]
    pub fn leave_interrupted(self, interrupt: impl FnMut()) {
        let walk = core::mem::ManuallyDrop::new(self);
        // SAFETY: the drop, which would end it too, does not run (1.).
        unsafe { walk.slot.end(interrupt) };
    }
}

impl Drop for Walking<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `enter` started it in this slot, this is on the same processor (enter 3.), and
        // ends it once (1.).
        unsafe { self.slot.end(|| ()) };
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// A processor that is interrupted, twice, at each pair of points, in the other's midst or
    /// after it.
    struct Interrupted<'e> {
        epochs: &'e Epochs<'e>,
        at: [u32; 2],
        points: Cell<u32>,
        /// Walks under way: they have been entered and are not about to be dropped.
        walks: Cell<u32>,
    }

    impl Interrupted<'_> {
        fn enter(&self) -> Walking<'_> {
            // SAFETY: one thread, of which `point` plays the interrupts (1., 3.), which end what
            // they start (2.); the slots are of these epochs (4.).
            let walk = unsafe { self.epochs.enter_with(0, || self.point()) }.unwrap();
            self.walks.set(self.walks.get() + 1);
            walk
        }

        fn leave(&self, walk: Walking<'_>) {
            self.walks.set(self.walks.get() - 1);
            let walk = core::mem::ManuallyDrop::new(walk);
            // SAFETY: the drop, which would end it too, does not run (1.).
            unsafe { walk.slot.end(|| self.point()) };
        }

        fn point(&self) {
            self.points.set(self.points.get() + 1);
            if self.at.contains(&self.points.get()) {
                let walk = self.enter();
                self.check();
                self.leave(walk);
            }
            self.check();
        }

        /// A cut that is made now waits for the walks under way.
        fn check(&self) {
            let period = self.epochs.advance();
            assert!(self.walks.get() == 0 || !self.epochs.is_over(period), "{:?}", self.at);
        }
    }

    #[test]
    // Thousands of walks, whose orderings are loom's to judge: too long for an interpreter.
    #[cfg_attr(miri, ignore)]
    fn interrupts_at_any_two_points_take_no_announcement_away_and_leave_none() {
        let mut most = 0;
        for first in 0..100 {
            for second in first..100 {
                let slots = [const { WalkSlot::new() }; 1];
                let epochs = Epochs::new(&slots);
                let cpu = Interrupted {
                    epochs: &epochs,
                    at: [first, second],
                    points: Cell::new(0),
                    walks: Cell::new(0),
                };
                // Two walks that end in the order in which they started, and one inside of another.
                let (one, two) = (cpu.enter(), cpu.enter());
                cpu.leave(one);
                let three = cpu.enter();
                cpu.leave(three);
                cpu.leave(two);
                let period = epochs.advance();
                assert!(epochs.is_over(period), "{:?}", cpu.at);
                most = most.max(cpu.points.get());
            }
        }
        assert!(most < 100, "{most} points, of which 100 were interrupted");
    }

    #[test]
    fn epochs_made_of_used_slots_start_anew() {
        let slots = [const { WalkSlot::new() }; 1];
        let old = Epochs::new(&slots);
        for _ in 0..10 {
            let _ = old.advance();
        }
        // SAFETY: one thread (1., 3.) without interrupts (2.); no other epochs have been made yet
        // (4.).
        core::mem::forget(unsafe { old.enter(0) });
        let new = Epochs::new(&slots);
        // SAFETY: one thread (1., 3.) without interrupts (2.); these epochs are the last that were
        // made (4.).
        let walk = unsafe { new.enter(0) };
        let period = new.advance();
        assert!(!new.is_over(period), "the old announcement has a higher number");
        drop(walk);
        assert!(new.is_over(period));
    }
}

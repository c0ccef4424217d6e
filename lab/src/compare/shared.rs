//! The platform of tables that threads share: each thread takes frames from its own part of an
//! arena.

use std::cell::Cell;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use tablewright::shared::{Epochs, GracePeriod, SharedPlatform, Walking};
use tablewright::{Barrier, Entry, Invalidation, Level, Pa, Platform};

use crate::compare::calls::PAGE;
use crate::memory::arena::Arena;

std::thread_local! {
    /// The number of this thread.
    pub static THREAD: Cell<usize> = const { Cell::new(0) };
}

/// The end of walks, as the slots of one platform tell it.
///
/// # Safety
/// 1. A grace period is over only once every walk has ended that began before it.
pub unsafe trait States {
    /// A walk in progress.
    type Walk<'a>
    where
        Self: 'a;
    /// Begins a walk on a thread.
    ///
    /// # Safety
    /// 1. One thread has this number, and a slot.
    unsafe fn enter(&self, thread: usize) -> Self::Walk<'_>;
    /// Starts a grace period.
    fn grace_period(&self) -> GracePeriod;
    /// Whether a grace period is over.
    fn is_over(&self, period: GracePeriod) -> bool;
    /// Passes a quiescent state of thread 0, outside of walks.
    ///
    /// # Safety
    /// 1. This is thread 0, outside of any walk.
    unsafe fn pass(&self) {}
}

// SAFETY: epochs keep it, given the slots that `Shared` has them use (1.).
unsafe impl States for Epochs<'_> {
    type Walk<'a>
        = Option<Walking<'a>>
    where
        Self: 'a;

    #[inline(always)]
    unsafe fn enter(&self, thread: usize) -> Option<Walking<'_>> {
        // SAFETY: one thread has this number (1.), and no interrupts (2.); a walk ends in the edit
        // that starts it (3.); the slots are these epochs' alone (4.).
        unsafe { Epochs::enter(self, thread) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        Epochs::is_over(self, period)
    }
}

/// Quiescent states of thread 0, as a kernel has them between two faults.
pub struct Quiescence {
    now: AtomicU64,
    /// The number that the thread last passed.
    passed: AtomicU64,
}

impl Quiescence {
    /// A thread that has passed nothing yet.
    pub const fn new() -> Self {
        Self { now: AtomicU64::new(1), passed: AtomicU64::new(0) }
    }
}

// SAFETY: only thread 0 walks, and passes states outside of walks alone (1.).
unsafe impl States for Quiescence {
    type Walk<'a> = ();

    #[inline(always)]
    unsafe fn enter(&self, _: usize) {}

    fn grace_period(&self) -> GracePeriod {
        // The detached descriptor before the number that a pass finds.
        fence(SeqCst);
        GracePeriod::new(self.now.fetch_add(1, SeqCst) + 1)
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        // Acquire: what the thread did to tables is done.
        self.passed.load(Acquire) >= period.get()
    }

    #[inline(always)]
    unsafe fn pass(&self) {
        // Acquire: what was detached before this number is not found any more. Release: what was
        // held is let go.
        self.passed.store(self.now.load(Acquire), Release);
    }
}

/// The frames of an arena, in as many parts as there are threads.
pub struct Shared<S, const THREADS: usize> {
    states: S,
    parts: [Part; THREADS],
    freed: AtomicU64,
}

/// The frames of a thread, on cache lines of its own.
#[repr(align(128))]
struct Part {
    first: u64,
    next: AtomicU64,
    end: u64,
}

impl<S: States, const THREADS: usize> Shared<S, THREADS> {
    /// # Safety
    /// 1. No frame of the arena is in use.
    /// 2. Each thread that uses this has set [`THREAD`] to a number of its own below `THREADS`;
    ///    with one thread there is nothing to set.
    /// 3. No other value uses the slots of the states.
    pub unsafe fn new(arena: Arena, states: S) -> Result<Self, String> {
        // SAFETY: no frame is in use (1.).
        unsafe { arena.start_round() }.map_err(|error| error.to_string())?;
        let take = || arena.take().map(|frame| frame.addr().get() as u64);
        let first = take().ok_or("out of tables")?;
        let mut next = first;
        while let Some(frame) = take() {
            next += PAGE;
            if frame != next {
                return Err("the frames are not in one row".to_owned());
            }
        }
        let bound = |part| first + (arena.frames() * part / THREADS) as u64 * PAGE;
        Ok(Self {
            states,
            parts: std::array::from_fn(|part| Part {
                first: bound(part),
                next: AtomicU64::new(bound(part)),
                end: bound(part + 1),
            }),
            freed: AtomicU64::new(0),
        })
    }

    /// The number of this thread.
    #[inline(always)]
    fn thread() -> usize {
        if THREADS == 1 { 0 } else { THREAD.get() }
    }

    /// Passes a quiescent state between two edits by the one thread.
    #[inline(always)]
    pub fn pass(&self) {
        const { assert!(THREADS == 1, "thread 0 is not the only one") };
        // SAFETY: there is one thread, and walks end in the edits that start them (1.).
        unsafe { self.states.pass() };
    }

    /// The address of the next frame of a thread.
    pub fn next(&self, thread: usize) -> u64 {
        self.parts[thread].next.load(Relaxed)
    }

    /// The number of frames in use.
    pub fn held(&self) -> u64 {
        let taken = |part: &Part| (part.next.load(Relaxed) - part.first) / PAGE;
        self.parts.iter().map(taken).sum::<u64>() - self.freed.load(Relaxed)
    }

    /// Starts again with the first frames.
    pub fn start_round(&mut self) {
        for part in &mut self.parts {
            *part.next.get_mut() = part.first;
        }
        *self.freed.get_mut() = 0;
    }
}

// SAFETY: each frame is handed out once in a round, and belongs to the arena (1.), at its physical
// address for as long as the program runs (2.). There are no links (3.). No processor walks (4. to
// 6.). A reference is the platform (7.).
unsafe impl<S: States, const THREADS: usize> Platform for Shared<S, THREADS> {
    #[inline(always)]
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let part = &self.parts[Self::thread()];
        // Only this thread takes from this part.
        let frame = part.next.load(Relaxed);
        if frame == part.end {
            return None;
        }
        part.next.store(frame + PAGE, Relaxed);
        Some(Pa::new(frame))
    }

    unsafe fn free_table(&self, _: Pa, _: Level) {
        self.freed.fetch_add(1, Relaxed);
    }

    /// Tables that are one root lie beside each other, aligned to their size.
    fn alloc_root(&self, _: Level, tables: usize) -> Option<Pa> {
        let part = &self.parts[Self::thread()];
        let (next, bytes) = (part.next.load(Relaxed), tables as u64 * PAGE);
        let root = next.next_multiple_of(bytes);
        if root + bytes > part.end {
            return None;
        }
        self.freed.fetch_add((root - next) / PAGE, Relaxed);
        part.next.store(root + bytes, Relaxed);
        Some(Pa::new(root))
    }

    unsafe fn free_root(&self, _: Pa, _: Level, tables: usize) {
        self.freed.fetch_add(tables as u64, Relaxed);
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table: *mut Entry = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: a frame of the arena, which is not at address 0.
        unsafe { NonNull::new_unchecked(table) }
    }

    #[inline(always)]
    fn barrier(&self, _: Barrier) {}

    #[inline(always)]
    fn invalidate(&self, _: &Invalidation<'_>) {}
}

// SAFETY: the states keep both promises; each thread has a slot.
unsafe impl<S: States, const THREADS: usize> SharedPlatform for Shared<S, THREADS> {
    type Walk<'a>
        = S::Walk<'a>
    where
        S: 'a;

    #[inline(always)]
    fn enter(&self) -> S::Walk<'_> {
        // SAFETY: each thread has a number of its own, as `new` asks for (1.).
        unsafe { self.states.enter(Self::thread()) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.states.grace_period()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.states.is_over(period)
    }
}

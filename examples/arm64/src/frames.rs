//! The frames of the machine: which are free, what the others are, and how many users each has.
//!
//! A frame is free, a table, or memory of processes with one user at least; whatever goes from one
//! to the other and was not what it should have been ends the kernel. So that at the end, with as
//! many free as at the beginning, none has leaked, and none was freed twice.

use core::arch::asm;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use tablewright::arch::arm64::{Cpu, Ids};
use tablewright::format::Arm64K4;
use tablewright::shootdown::Identity;
use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform};
use tablewright_processes::Memory;

use crate::console::{OFFSET, PAGE, RAM};

const FRAMES: usize = ((RAM.end - RAM.start) / PAGE) as usize;
/// The users of a frame that is a table.
const TABLE: u32 = u32::MAX;

/// How processors wait for one another. `core::hint::spin_loop` is an `ISB` on arm64, and those are
/// counted.
pub struct Yield;

impl RelaxStrategy for Yield {
    fn relax() {
        // SAFETY: a hint.
        unsafe { asm!("yield", options(nomem, nostack, preserves_flags)) }
    }
}

/// A lock.
pub type Lock<T> = SpinMutex<T, Yield>;

/// All of them.
pub static POOL: Pool = Pool {
    free: Lock::new(Free { list: [0; FRAMES], count: 0 }),
    users: [const { AtomicU32::new(0) }; FRAMES],
    copied: AtomicU64::new(0),
};

/// Frames, and their users.
pub struct Pool {
    free: Lock<Free>,
    users: [AtomicU32; FRAMES],
    copied: AtomicU64,
}

struct Free {
    list: [u32; FRAMES],
    count: usize,
}

/// A frame as the kernel reaches it.
pub fn pointer<T>(frame: Pa) -> *mut T {
    ptr::with_exposed_provenance_mut((OFFSET + frame.get()) as usize)
}

/// Does work that is not counted: instructions that zero a page, or copy it.
fn uncounted(work: impl FnOnce()) {
    // SAFETY: both do nothing. Compiler barriers: no `nomem`.
    unsafe { asm!("movz xzr, #0x8000", options(nostack, preserves_flags)) }
    work();
    // SAFETY: the same.
    unsafe { asm!("movz xzr, #0x8001", options(nostack, preserves_flags)) }
}

impl Pool {
    /// Fills it, once, with the frames from `first` on, which are not of the image.
    pub fn fill(&self, first: Pa) {
        let mut free = self.free.lock();
        let first = ((first.get() - RAM.start) / PAGE) as usize;
        for frame in (first..FRAMES).rev() {
            let count = free.count;
            free.list[count] = frame as u32;
            free.count += 1;
        }
    }

    /// How many frames are free.
    pub fn free(&self) -> usize {
        self.free.lock().count
    }

    /// How many pages were copied so far.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    fn users_of(&self, frame: Pa) -> &AtomicU32 {
        let number = frame.get().wrapping_sub(RAM.start) / PAGE;
        match self.users.get(number as usize) {
            Some(users) => users,
            None => panic!("{frame} is no memory"),
        }
    }

    /// Takes a frame that has no user, for so many.
    fn get(&self, users: u32) -> Option<Pa> {
        let mut free = self.free.lock();
        free.count = free.count.checked_sub(1)?;
        let frame = Pa::new(RAM.start + u64::from(free.list[free.count]) * PAGE);
        drop(free);
        let before = self.users_of(frame).swap(users, Ordering::Relaxed);
        assert!(before == 0, "{frame} was free, with {before} users");
        Some(frame)
    }

    /// Takes one back that has no user any more.
    fn put(&self, frame: Pa) {
        let mut free = self.free.lock();
        let count = free.count;
        free.list[count] = ((frame.get() - RAM.start) / PAGE) as u32;
        free.count += 1;
    }
}

impl Memory for Pool {
    fn take(&self) -> Option<Pa> {
        let frame = self.get(1)?;
        uncounted(|| {
            // SAFETY: a frame that nothing else uses, by its address in the kernel's map.
            unsafe { pointer::<u8>(frame).write_bytes(0, PAGE as usize) };
        });
        Some(frame)
    }

    fn share(&self, frame: Pa) {
        let before = self.users_of(frame).fetch_add(1, Ordering::Relaxed);
        assert!((1..TABLE - 1).contains(&before), "{frame} had {before} users");
    }

    fn release(&self, frame: Pa) {
        // What its users did comes before what is done with it next.
        let before = self.users_of(frame).fetch_sub(1, Ordering::AcqRel);
        assert!((1..TABLE).contains(&before), "{frame} had {before} users");
        if before == 1 {
            self.put(frame);
        }
    }

    fn users(&self, frame: Pa) -> u32 {
        self.users_of(frame).load(Ordering::Acquire)
    }

    fn copy(&self, from: Pa, to: Pa) {
        self.copied.fetch_add(1, Ordering::Relaxed);
        uncounted(|| {
            // SAFETY: two frames: one that is only read while it has users beside this one, and one
            // that nothing else uses.
            unsafe { pointer::<u8>(to).copy_from_nonoverlapping(pointer(from), PAGE as usize) };
        });
    }
}

/// The features of both processors. A machine whose processors differ would take the
/// [least](Ids::and) of them.
pub fn ids() -> Ids {
    Ids::read()
}

/// The processors, as tables of processes are edited on them.
pub fn cpu() -> Cpu {
    Cpu::of::<Arm64K4>(&ids())
}

/// The platform of one process's tables, or of the kernel's.
#[derive(Clone, Copy)]
pub struct Tables {
    cpu: Cpu,
    caps: Caps,
    /// Under what processors have it loaded; what they have of the kernel is global.
    identity: Option<&'static Identity>,
}

impl Tables {
    /// The kernel's tables.
    pub fn kernel() -> Self {
        Self { cpu: cpu(), caps: ids().caps(), identity: None }
    }

    /// Tables of the process that has this identity.
    pub fn of(identity: &'static Identity) -> Self {
        Self { identity: Some(identity), ..Self::kernel() }
    }
}

// SAFETY: the pool hands a frame out once (1.), all memory is in the kernel's map (2.), and there
// are no links (3.). Barriers and invalidations are the engine's own, for all processors, under the
// identifier that they name (4., 5., 6.). Copies are alike (7.); a panic ends the kernel (8.). A
// process has an identity for as long as it lives, and processors load what `switch` says (9.).
unsafe impl Platform for Tables {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        POOL.get(TABLE)
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        let before = POOL.users_of(frame).swap(0, Ordering::AcqRel);
        assert!(before == TABLE, "{frame} is no table: {before} users");
        POOL.put(frame);
    }

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: the kernel's map is in the upper half.
        unsafe { NonNull::new_unchecked(pointer(frame)) }
    }

    #[inline]
    fn barrier(&self, barrier: Barrier) {
        self.cpu.barrier(barrier);
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        self.cpu.invalidate(flush);
    }

    fn identity_of(&self, _: Pa) -> Option<&Identity> {
        self.identity
    }

    fn caps(&self) -> Caps {
        self.caps
    }
}

//! Frames, and where the kernel reaches them.

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicU64, Ordering};

use spin::mutex::SpinMutex;
use tablewright::Pa;

/// The distance from where the image is loaded to where it is linked to run.
pub const KERNEL: u64 = match cfg!(target_arch = "riscv64") {
    true => 0xffff_ffff_0000_0000,
    false => 0xffff_ffff_8000_0000,
};

pub const CPUS: usize = 2;
pub const PAGE: u64 = 4096;

/// Frames from `next` on that were never used, and those that came back, each with the address of
/// the one before.
pub struct Frames {
    next: u64,
    end: u64,
    back: u64,
    /// How many are in use.
    pub used: u64,
}

pub static FRAMES: SpinMutex<Frames> = SpinMutex::new(Frames::new(0..0));
/// The first address at which memory is reached: through the loader's map at first, and then
/// through the linear one.
pub static WINDOW: AtomicU64 = AtomicU64::new(KERNEL);

/// Returns the kernel's address of physical memory.
pub fn linear<T>(at: Pa) -> *mut T {
    with_exposed_provenance_mut((WINDOW.load(Ordering::Relaxed) + at.get()) as usize)
}

impl Frames {
    /// Those of so much memory.
    pub const fn new(memory: Range<u64>) -> Self {
        Self { next: memory.start, end: memory.end, back: 0, used: 0 }
    }

    pub fn take(&mut self) -> Option<Pa> {
        let frame = match self.back {
            0 => (self.next < self.end).then_some(self.next)?,
            back => back,
        };
        match self.back {
            0 => self.next += PAGE,
            // SAFETY: a frame that came back, and holds the address of the one before.
            back => self.back = unsafe { *linear(Pa::new(back)) },
        }
        self.used += 1;
        Some(Pa::new(frame))
    }

    pub fn put(&mut self, frame: Pa) {
        // SAFETY: nothing uses it any more.
        unsafe { *linear(frame) = core::mem::replace(&mut self.back, frame.get()) };
        self.used -= 1;
    }
}

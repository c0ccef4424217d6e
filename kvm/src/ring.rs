//! A vCPU's ring of dirty pages, which KVM fills and the host empties.

use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use kvm_ioctls::VmFd;

use crate::error::Error;
use crate::log::Bitmap;

/// `_IO(KVMIO, 0xc7)`.
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = 0xaec7;
/// Bytes of an entry.
pub const ENTRY: u32 = size_of::<kvm_dirty_gfn>() as u32;
/// The page was written, and the host has seen it.
const DIRTY: u32 = 1;
const SEEN: u32 = 2;

/// A ring.
#[derive(Debug)]
pub struct Ring {
    first: NonNull<kvm_dirty_gfn>,
    entries: u32,
    /// Of all entries ever read, the next.
    next: u32,
}

// SAFETY: the ring is the process's; its entries are handed over by atomics, and one thread at a
// time has it.
unsafe impl Send for Ring {}

impl Ring {
    /// That of a vCPU.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn new(vcpu: &impl AsRawFd, entries: u32) -> Result<Self, Error> {
        // SAFETY: `mmap`: a new mapping, wherever the kernel likes it, of memory that KVM has for
        // this vCPU.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                (entries * ENTRY) as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                i64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * 4096,
            )
        };
        match NonNull::new(at.cast()) {
            Some(first) if at != libc::MAP_FAILED => Ok(Self { first, entries, next: 0 }),
            _ => Err(Error::last("mmap of a ring")),
        }
    }

    /// Marks the pages of all entries that are there, and says how many there were. They are KVM's
    /// again after `KVM_RESET_DIRTY_RINGS`.
    pub fn collect(&mut self, bitmap: &mut Bitmap) -> u64 {
        let mut count = 0;
        loop {
            // SAFETY: the place is within the ring, which is mapped as long as this is there.
            let entry = unsafe { self.first.add((self.next % self.entries) as usize) }.as_ptr();
            // SAFETY: the flags are aligned to 32 bits, and both sides take them for an atomic.
            let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
            if flags.load(Ordering::Acquire) & DIRTY == 0 {
                return count;
            }
            // SAFETY: KVM wrote the rest of the entry before the flag, and leaves it alone until it
            // is reset.
            let (slot, page) = unsafe { ((*entry).slot, (*entry).offset) };
            bitmap.mark(slot, page);
            flags.store(SEEN, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            count += 1;
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `munmap`: it was mapped with this length.
        unsafe { libc::munmap(self.first.as_ptr().cast(), (self.entries * ENTRY) as usize) };
    }
}

/// Returns all entries of rings that were seen to KVM.
pub fn reset_rings(vm: &VmFd) -> Result<(), Error> {
    // SAFETY: `ioctl`: without an argument.
    match unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS as _) } {
        ..0 => Err(Error::last("KVM_RESET_DIRTY_RINGS")),
        _ => Ok(()),
    }
}

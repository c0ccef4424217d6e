//! The host's memory behind a guest.

use std::fs;
use std::io;
use std::ptr::{self, NonNull};

use crate::error::Error;

/// The kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Pages, never huge ones.
    Anonymous,
    /// Huge pages where the host can give them.
    Thp,
    /// Pages of a pool, of this binary logarithm of bytes.
    Hugetlb {
        /// It.
        shift: u32,
        /// Of a file in memory, and not for the process alone.
        shared: bool,
    },
    /// Pages of a file in memory.
    Shmem,
}

impl Backing {
    /// The size of its pages.
    pub const fn page(self) -> u64 {
        match self {
            Self::Anonymous | Self::Shmem => 4096,
            Self::Thp => 2 << 20,
            Self::Hugetlb { shift, .. } => 1 << shift,
        }
    }
}

/// Bytes that are free, or could be at once.
pub fn available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| {
        let rest = line.strip_prefix("MemAvailable:")?;
        rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kib.map_or(u64::MAX, |kib| kib << 10)
}

/// Touches as much memory as the calling thread's vCPU is to touch, and keeps it. If it goes just
/// before that, and not before all others have theirs, there is as much at hand.
///
/// A computer that is itself a virtual machine may give free memory back to its host, within
/// seconds, and gets it again at the first access: on one such, 2 MiB took 4.5 ms where to zero
/// them takes 85 us. What was freed last it has still.
///
/// # Errors
/// There is no such memory.
pub fn warm(backing: (Backing, &'static str), bytes: u64) -> Result<Option<Memory>, Error> {
    let (kind, name) = backing;
    // A pool is never given back.
    if matches!(kind, Backing::Hugetlb { .. }) {
        return Ok(None);
    }
    // All others take from the same free memory: in the largest pages, which is quickest.
    let memory =
        Memory::new(Backing::Thp, name, bytes).or_else(|_| Memory::new(kind, name, bytes))?;
    for offset in (0..memory.bytes).step_by(4096) {
        // SAFETY: within the memory, of which this function is the only user.
        unsafe { memory.first.byte_add(offset).write_volatile(1) };
    }
    Ok(Some(memory))
}

/// Mapped memory, unmapped when it is dropped.
#[derive(Debug)]
pub struct Memory {
    first: NonNull<u8>,
    bytes: usize,
    /// The whole mapping, to align it.
    whole: (NonNull<u8>, usize),
}

// SAFETY: the memory is the process's, not a thread's; what is read and written in it is by
// atomics, or before others know of it.
unsafe impl Send for Memory {}
// SAFETY: the same.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeros, of which nothing is there before it is touched.
    ///
    /// # Errors
    /// The host has none of that kind.
    pub fn new(backing: Backing, name: &'static str, bytes: u64) -> Result<Self, Error> {
        let refused = |error: io::Error| Error::Backing {
            backing: name,
            why: explain(backing, bytes, &error),
        };
        let align = backing.page().max(2 << 20);
        let too_large = || refused(io::ErrorKind::OutOfMemory.into());
        let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
        let file = match backing {
            Backing::Anonymous | Backing::Thp | Backing::Hugetlb { shared: false, .. } => None,
            // As much as is mapped: an access behind the end of a file is a signal.
            Backing::Shmem => {
                let whole = bytes.checked_add(align as usize).ok_or_else(too_large)?;
                Some(file(0, whole).map_err(refused)?)
            }
            Backing::Hugetlb { shift, .. } => {
                let flags = libc::MFD_HUGETLB | shift << libc::MFD_HUGE_SHIFT;
                Some(file(flags, bytes).map_err(refused)?)
            }
        };
        let (flags, align) = match backing {
            Backing::Hugetlb { shift, shared } => {
                let own = libc::MAP_HUGETLB | (shift << libc::MAP_HUGE_SHIFT) as i32;
                // The kernel aligns it.
                (if shared { 0 } else { own }, 0)
            }
            _ => (0, align as usize),
        };
        let kind = match file {
            Some(_) => libc::MAP_SHARED,
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        };
        use std::os::fd::AsRawFd;
        let descriptor = file.as_ref().map_or(-1, |file| file.as_raw_fd());
        let length = bytes.checked_add(align).ok_or_else(too_large)?;
        // Huge pages of a pool are reserved, so that too few are an error now and not a signal
        // later.
        let kind = match backing {
            Backing::Hugetlb { .. } => kind & !libc::MAP_NORESERVE,
            _ => kind,
        };
        // SAFETY: `mmap`: a new mapping, wherever the kernel likes it.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | flags,
                descriptor,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        let at = NonNull::new(at.cast::<u8>()).ok_or_else(too_large)?;
        let skip = match align {
            0 => 0,
            _ => at.addr().get().next_multiple_of(align) - at.addr().get(),
        };
        let memory = Self {
            // SAFETY: so much more was mapped.
            first: unsafe { at.byte_add(skip) },
            bytes,
            whole: (at, length),
        };
        let advice = match backing {
            Backing::Anonymous => Some(libc::MADV_NOHUGEPAGE),
            Backing::Thp => Some(libc::MADV_HUGEPAGE),
            _ => None,
        };
        if let Some(advice) = advice {
            // SAFETY: `madvise`: the memory was just mapped, and the advice changes nothing that
            // can be read.
            let done = unsafe { libc::madvise(memory.first.as_ptr().cast(), bytes, advice) };
            if done != 0 && backing == Backing::Thp {
                return Err(refused(io::Error::last_os_error()));
            }
        }
        Ok(memory)
    }

    /// Returns its first address.
    pub fn first(&self) -> NonNull<u8> {
        self.first
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `munmap`: it was mapped with this length, and goes with what borrowed it.
        unsafe { libc::munmap(self.whole.0.as_ptr().cast(), self.whole.1) };
    }
}

/// A file in memory.
fn file(flags: u32, bytes: usize) -> io::Result<fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: `memfd_create`: the name ends with a zero.
    let descriptor =
        unsafe { libc::memfd_create(c"tablewright".as_ptr(), flags | libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and no one else's.
    let file = unsafe { fs::File::from_raw_fd(descriptor) };
    file.set_len(bytes as u64)?;
    Ok(file)
}

fn explain(backing: Backing, bytes: u64, error: &io::Error) -> String {
    let Backing::Hugetlb { shift, .. } = backing else {
        return format!("the host gives no such memory: {error}");
    };
    let kib = 1_u64 << shift >> 10;
    let pool = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
    match fs::exists(&pool) {
        Ok(true) => {
            format!("too few huge pages: have {} put into {pool}", bytes.div_ceil(1 << shift))
        }
        _ => format!("this host has no huge pages of {kib} KiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_with_too_few_huge_pages_is_refused_with_what_to_do() {
        for shared in [false, true] {
            let pool = Backing::Hugetlb { shift: 21, shared };
            // More than any computer's pool: what there is of it does not matter.
            let refused = Memory::new(pool, "pool", 1 << 46).expect_err("refused");
            let line = refused.to_string();
            assert!(refused.is_refusal() && !line.contains('\n'), "{line}");
            let says = match fs::exists("/sys/kernel/mm/hugepages/hugepages-2048kB").unwrap() {
                true => "-s pool: too few huge pages: have 33554432 put into",
                false => "-s pool: this host has no huge pages of 2048 KiB",
            };
            assert!(line.starts_with(says), "{line}");
        }
        let none = Backing::Hugetlb { shift: 27, shared: false };
        let refused = Memory::new(none, "odd", 1 << 27).expect_err("refused");
        assert!(refused.to_string().contains("no huge pages of 131072 KiB"));
    }
}

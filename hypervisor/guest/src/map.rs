//! A file in memory, and parts of it mapped.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a page.
pub const PAGE: usize = 4096;

/// A file of so many bytes that is in memory alone.
pub fn file(name: &CStr, size: usize) -> io::Result<File> {
    // SAFETY: a name that ends with a zero.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and without another owner.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(size as u64)?;
    Ok(file)
}

/// A part of a file, mapped; unmapped when it is dropped. Words of it are shared with all other
/// maps of the file.
pub struct Map {
    first: *mut u8,
    size: usize,
}

// SAFETY: what is mapped is read and written by atomics alone.
unsafe impl Send for Map {}
// SAFETY: the same.
unsafe impl Sync for Map {}

impl Map {
    /// Maps a part.
    pub fn new(file: &File, offset: usize, size: usize) -> io::Result<Self> {
        let first = map(ptr::null_mut(), file, offset, size, 0)?;
        Ok(Self { first, size })
    }

    /// Puts another part of a file behind some of the pages, while others use them.
    pub fn replace(&self, at: usize, file: &File, offset: usize, size: usize) -> io::Result<()> {
        assert!(at + size <= self.size, "it ends beyond the map");
        let to = self.first.wrapping_add(at);
        map(to, file, offset, size, libc::MAP_FIXED).map(|_| ())
    }

    /// The word at the start of a page.
    pub fn word(&self, page: usize) -> &AtomicU64 {
        assert!((page + 1) * PAGE <= self.size, "it lies beyond the map");
        // SAFETY: mapped, aligned, and used as an atomic by all.
        unsafe { &*self.first.wrapping_add(page * PAGE).cast::<AtomicU64>() }
    }

    /// Writes to each page.
    pub fn touch(&self) {
        for page in 0..self.size / PAGE {
            self.word(page).fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: no borrow of what is mapped is left.
        unsafe { libc::munmap(self.first.cast(), self.size) };
    }
}

fn map(at: *mut u8, file: &File, offset: usize, size: usize, flags: i32) -> io::Result<*mut u8> {
    let permissions = libc::PROT_READ | libc::PROT_WRITE;
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: without MAP_FIXED nothing is replaced; with it, pages of a `Map`, whose words stay
    // atomics.
    let first = unsafe {
        libc::mmap(
            at.cast(),
            size,
            permissions,
            libc::MAP_SHARED | flags,
            file.as_raw_fd(),
            offset,
        )
    };
    match first == libc::MAP_FAILED {
        true => Err(io::Error::last_os_error()),
        false => Ok(first.cast()),
    }
}

//! Differences between processors: the guest's code, its registers, and what it is told.

#[cfg(target_arch = "aarch64")]
#[path = "arch/aarch64.rs"]
mod this;
#[cfg(target_arch = "x86_64")]
#[path = "arch/x86_64.rs"]
mod this;

pub use this::{CODE, Format, address_bits, data, frequency, has_nested, prepare, set_up};

/// A vCPU's places in its guest, by the guest's addresses.
pub struct Place {
    /// Its tables.
    pub root: u64,
    /// The loop.
    pub code: u64,
    /// The block that it shares with the host.
    pub block: u64,
    /// The address to which it stores to leave.
    pub exit: u64,
}

/// A guest of the guest. Its page and the page after it are mapped, and this vCPU's alone.
#[cfg_attr(target_arch = "aarch64", expect(dead_code, reason = "none is made there"))]
pub struct Inner {
    /// Its control block, a page, as the host has it.
    pub block: std::ptr::NonNull<u8>,
    /// Its address in the guest.
    pub at: u64,
    /// The tables that its addresses go through besides.
    pub root: u64,
}

unsafe extern "C" {
    static tablewright_guest_begin: u8;
    static tablewright_guest_end: u8;
}

/// The guest's code; it may lie at any address.
pub fn code() -> &'static [u8] {
    let (begin, end) = (&raw const tablewright_guest_begin, &raw const tablewright_guest_end);
    let length = end.addr() - begin.addr();
    // SAFETY: the two labels are the ends of one run of constant bytes of this program.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

//! What differs between processors: the guest's code, its registers, and what it is told.

#[cfg(target_arch = "aarch64")]
#[path = "arch/aarch64.rs"]
mod this;
#[cfg(target_arch = "x86_64")]
#[path = "arch/x86_64.rs"]
mod this;

pub use this::{CODE, Format, address_bits, data, frequency, prepare, set_up};

unsafe extern "C" {
    static tablewright_guest_begin: u8;
    static tablewright_guest_end: u8;
}

/// The guest's code; it may lie at any address.
pub fn code() -> &'static [u8] {
    let (begin, end) = (
        &raw const tablewright_guest_begin,
        &raw const tablewright_guest_end,
    );
    let length = end.addr() - begin.addr();
    // SAFETY: the two labels are the ends of one run of constant bytes of this program.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

//! What differs between processors: the guest's code, its registers, and what it is told.

#[cfg(target_arch = "aarch64")]
#[path = "arch/aarch64.rs"]
mod this;
#[cfg(target_arch = "x86_64")]
#[path = "arch/x86_64.rs"]
mod this;

pub use this::{CODE, Format, address_bits, code, data, frequency, prepare, set_up};

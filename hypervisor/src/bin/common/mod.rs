//! Parts that the kernels for tests have in common: where their images run, how translation is
//! switched on, and how they end.

use core::fmt::{self, Write as _};

use smccc::{Hvc, psci};
use tablewright::Pa;

use crate::payload::{Console, UART};

/// The size of a page.
pub const PAGE: u64 = 4096;
/// From where the image was loaded to where it runs.
pub const OFFSET: u64 = 0xffff_8000_0000_0000;

/// TCR_EL1: 48 bits in both halves, walks cacheable and inner shareable, 4 KiB granules (bit 31 for
/// the upper half), 40 bits of output, identifiers of 16 bits.
pub const TCR: u64 = {
    let half = 16 | 1 << 8 | 1 << 10 | 3 << 12;
    half | half << 16 | 1 << 31 | 2 << 32 | 1 << 36
};
/// SCTLR_EL1: what is one where features are missing, MMU, caches.
pub const SCTLR: u64 = 0x30d0_0800 | 1 | 1 << 2 | 1 << 12;
/// A block of an early map: accessed, inner shareable.
pub const BLOCK: u64 = 1 << 10 | 3 << 8 | 1;
/// ... of registers: never executed, Device-nGnRE.
pub const REGISTERS: u64 = BLOCK | 1 << 54 | 1 << 53 | 1 << 2;

/// Returns the address in memory of something of the image.
pub fn physical<T>(at: *const T) -> Pa {
    Pa::new(at.addr() as u64 - OFFSET)
}

/// An instruction by its name, and an operand if it has one. It is a compiler barrier as well: no
/// `nomem`.
macro_rules! instruct {
    ($text:literal $(, $operand:expr)?) => {
        // SAFETY: a barrier, a mark, or an invalidation: forgetting is always allowed.
        unsafe { core::arch::asm!($text $(, in(reg) $operand)?, options(nostack, preserves_flags)) }
    };
}

/// The UART, in the upper half.
pub fn console() -> Console {
    Console(OFFSET + UART)
}

/// Says how a kernel ended, and switches the machine off.
pub fn end(name: &str, how: fmt::Arguments<'_>) -> ! {
    let _ = writeln!(console(), "{name}: {how}");
    let _ = psci::system_off::<Hvc>();
    loop {
        core::hint::spin_loop();
    }
}

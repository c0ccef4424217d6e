//! The machine: its memory, its UART, and its end.

use core::fmt::{self, Write as _};
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use smccc::{Hvc, psci};
use tablewright::Pa;

/// The size of a page.
pub const PAGE: u64 = 4096;
/// From where the image was loaded to where it runs.
pub const OFFSET: u64 = 0xffff_8000_0000_0000;
/// All memory of the machine; `xtask` says the same to QEMU.
pub const RAM: Range<u64> = 0x4000_0000..0x5000_0000;
/// The UART of the machine.
pub const UART: u64 = 0x900_0000;

/// Returns the address in memory of something of the image.
pub fn physical<T>(at: *const T) -> Pa {
    Pa::new(at.addr() as u64 - OFFSET)
}

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let register = ptr::with_exposed_provenance_mut::<u32>((OFFSET + UART) as usize);
        for byte in text.bytes() {
            // SAFETY: the data register of the UART.
            unsafe { register.write_volatile(byte.into()) };
        }
        Ok(())
    }
}

/// Says what was seen.
pub fn say(what: fmt::Arguments<'_>) {
    let _ = writeln!(Console, "example: {what}");
}

/// Says how the kernel ended, once, and switches the machine off.
pub fn end(how: fmt::Arguments<'_>) -> ! {
    static ENDED: AtomicBool = AtomicBool::new(false);
    if !ENDED.swap(true, Ordering::Relaxed) {
        say(how);
        let _ = psci::system_off::<Hvc>();
    }
    loop {
        core::hint::spin_loop();
    }
}

//! The UART, where the machine is, and how the kernel ends.

use core::fmt::{self, Write as _};
use core::ptr;

use smccc::{Hvc, psci};
use tablewright::Pa;

/// The size of a page.
pub const PAGE: u64 = 4096;
/// From where the image was loaded to where it runs.
pub const OFFSET: u64 = 0xffff_8000_0000_0000;
/// Where the machine has its UART.
pub const UART: u64 = 0x900_0000;

/// Where something of the image is in memory.
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

/// Says how the kernel ended, and switches the machine off.
pub fn end(how: fmt::Arguments<'_>) -> ! {
    say(how);
    let _ = psci::system_off::<Hvc>();
    loop {
        core::hint::spin_loop();
    }
}

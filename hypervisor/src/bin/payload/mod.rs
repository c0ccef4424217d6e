//! What bare programs have in common: the head by which a boot loader knows an image, the UART, and
//! firmware calls.

#![allow(dead_code)] // Each uses a part.

use core::arch::asm;
use core::fmt::{self, Write as _};
use core::ptr;

use smccc::{Smc, psci};

/// The head of an image of Linux (Documentation/arch/arm64/booting.rst), which may be loaded to any
/// 2 MiB. It goes on at `start`.
macro_rules! head {
    () => {
        concat!(
            ".section .head, \"ax\"\n",
            ".global head\n",
            "head:\n",
            "b start\n",
            ".long 0\n",
            ".quad 0\n",
            ".quad image_size\n",
            ".quad 0, 0, 0, 0\n",
            ".ascii \"ARM\\x64\"\n",
            ".long 0\n",
        )
    };
}
pub(crate) use head;

/// Where the machine has its UART.
pub const UART: u64 = 0x900_0000;

/// A UART, of which the registers are at this address.
pub struct Console(pub u64);

/// That of the machine.
pub fn console() -> Console {
    Console(UART)
}

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let register = ptr::with_exposed_provenance_mut::<u32>(self.0 as usize);
        for byte in text.bytes() {
            // SAFETY: the data register of the UART, which sends what is written.
            unsafe { register.write_volatile(byte.into()) };
        }
        Ok(())
    }
}

/// A firmware call.
pub fn call(function: u64, [first, second, third]: [u64; 3]) -> i64 {
    let result;
    // SAFETY: what firmware does is asked for, or is an error. It changes no more registers than
    // these (DEN0028, 2.6).
    unsafe {
        asm!("smc #0", inout("x0") function => result, inout("x1") first => _, inout("x2") second => _, inout("x3") third => _);
    }
    result
}

/// Says how a program ended, and switches the machine off.
pub fn end(program: &str, how: fmt::Arguments<'_>) -> ! {
    let _ = writeln!(console(), "{program}: {how}");
    let _ = psci::system_off::<Smc>();
    loop {
        core::hint::spin_loop();
    }
}

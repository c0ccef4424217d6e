//! The firmware's console, and the end of the machine.

use core::fmt::{self, Write as _};

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            #[expect(deprecated, reason = "every firmware has it")]
            sbi_rt::legacy::console_putchar(byte.into());
        }
        Ok(())
    }
}

/// Writes a line, which begins with the name of the program.
pub fn line(program: &str, what: fmt::Arguments<'_>) {
    let _ = writeln!(Console, "{program}: {what}");
}

/// Switches the machine off.
pub fn switch_off() -> ! {
    sbi_rt::system_reset(sbi_rt::Shutdown, sbi_rt::NoReason);
    loop {
        core::hint::spin_loop();
    }
}

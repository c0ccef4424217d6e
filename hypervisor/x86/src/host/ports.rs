//! Ports: those of the guest that the hypervisor answers, the serial port, and the machine's end.

use core::fmt::{self, Write as _};
use core::panic::PanicInfo;

use x86_64::instructions::port::Port;

/// The port at which the guest turns the machine off, as its tables say, with 5 << 2 | 1 << 5.
pub const SLEEP: u16 = 0x600;
/// The port of its status.
pub const SLEEP_STATUS: u16 = 0x601;
/// The port at which it resets the machine, with 1.
pub const RESET: u16 = 0x602;
/// The port at which a program in the guest says that something begins, with 1, or ends, with 2,
/// that is to be counted by itself.
pub const MARK: u16 = 0x610;
/// The port at which it rings when its load is at work, by writing, and reads whether it was
/// copied: a digit.
pub const BELL: u16 = 0x612;
/// The serial port, which it has for itself.
pub const SERIAL: u16 = 0x3f8;
/// The control register of resets.
pub const RESET_CONTROL: u16 = 0xcf9;

/// The serial port, which the host uses behind the guest's back.
pub struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the ports of the UART.
            unsafe {
                let mut patience = 100_000;
                while Port::<u8>::new(SERIAL + 5).read() & 1 << 5 == 0 && patience != 0 {
                    patience -= 1;
                }
                Port::new(SERIAL).write(byte);
            }
        }
        Ok(())
    }
}

/// The end of the machine.
pub enum End {
    /// Off.
    Off,
    /// A reset.
    Reset,
}

/// Ends the machine, by the ports of QEMU's PC.
pub fn end(how: End) -> ! {
    // SAFETY: the ports of power management, and of a reset.
    unsafe {
        match how {
            End::Off => Port::<u16>::new(0x604).write(0x2000),
            End::Reset => Port::<u8>::new(RESET_CONTROL).write(6),
        }
    }
    loop {
        x86_64::instructions::hlt();
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = write!(Serial, "PANIC in the hypervisor: {info}\r\n");
    end(End::Off)
}

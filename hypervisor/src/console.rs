//! The UART, by which the hypervisor says its last words.

use core::fmt::{self, Write as _};
use core::panic::PanicInfo;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering};

use arm_pl011_uart::{Uart, UniqueMmioPointer};
use tablewright::Pa;

/// The address of the UART: by default that of the machine.
static UART: AtomicU64 = AtomicU64::new(0x900_0000);

/// The UART is at this address.
pub fn set_up(uart: Pa) {
    UART.store(uart.get(), Ordering::Relaxed);
}

/// Says something on the guest's console.
pub fn say(what: fmt::Arguments<'_>) {
    let address = UART.load(Ordering::Relaxed);
    let Some(registers) = NonNull::new(ptr::with_exposed_provenance_mut(address as usize)) else {
        return;
    };
    // SAFETY: the registers of the UART. The guest may use them at the same time: then what both
    // say is mixed up.
    let mut uart = Uart::new(unsafe { UniqueMmioPointer::new(registers) });
    let _ = write!(uart, "{what}\r\n");
}

/// Waits for nothing.
pub fn wait() {
    // SAFETY: waits.
    unsafe { core::arch::asm!("wfi", options(nomem, nostack, preserves_flags)) };
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    say(format_args!("PANIC in the hypervisor: {info}"));
    let _ = smccc::psci::system_off::<smccc::Smc>();
    loop {
        wait();
    }
}

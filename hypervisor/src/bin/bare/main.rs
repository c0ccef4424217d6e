//! A kernel without a system, that looks whether a processor under a hypervisor is what it is
//! without: firmware calls, features, exceptions, timers, caches, code that changes. It is run both
//! ways.
//!
//! Each check says a line. At the end it says how many were wrong, and switches the machine off.
#![no_std]
#![no_main]

mod caches;
mod features;
mod head;
mod interrupts;
mod pages;
#[path = "../payload/mod.rs"]
mod payload;
mod psci;
mod vectors;

use core::fmt::Write as _;
use core::panic::PanicInfo;

use payload::console;

extern "C" fn main() -> ! {
    psci::find();
    pages::prepare();
    let mut wrong = features::run() + psci::run();
    psci::begin();
    wrong += vectors::run() + interrupts::run() + caches::run();
    let _ = writeln!(console(), "bare: done, {wrong} wrong");
    psci::off()
}

/// The first function of the other processors.
extern "C" fn other() -> ! {
    psci::other(head::number() as u64)
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(console(), "bare: WRONG: {info}");
    psci::off()
}

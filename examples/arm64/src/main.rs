//! A kernel whose processes fork, at EL1 on two processors: `cargo xtask example arm64` runs it.
//!
//! A process is that of the crate `tablewright-processes`, behind a lock; its programs run at EL0.
//! The parent writes its heap for the first time, and forks; the child writes on the second
//! processor while the parent reads on the first; the parent protects; the child exits. Each
//! program proves by what it reads, and by the faults that it takes, what it may do and whose
//! memory it has. Then the processor is asked what it makes of each page (`AT S1E0R`, `AT S1E0W`),
//! and so is a walker that shares no code with the engine. At the end there are as many free frames
//! as at the start.
//!
//! The software machine goes through the same [`steps`], and `cargo xtask processes` counts what
//! each executes.
#![no_std]
#![no_main]

extern crate alloc;

mod boot;
mod check;
mod console;
mod frames;
mod running;
mod steps;
mod user;

use alloc::string::String;
use core::panic::PanicInfo;

use buddy_system_allocator::LockedHeap;

use console::end;
use frames::{POOL, Tables};

/// For the lists of areas, and what is said of mistakes.
#[global_allocator]
static HEAP_MEMORY: LockedHeap<32> = LockedHeap::empty();

/// Sets up what the kernel needs before there are processes.
fn boot() -> Result<(), &'static str> {
    const SIZE: usize = 64 << 10;
    static mut MEMORY: [u8; SIZE] = [0; SIZE];
    // SAFETY: memory of its own, given away once: this function is called once.
    unsafe {
        HEAP_MEMORY.lock().init((&raw mut MEMORY).expose_provenance(), SIZE);
    }
    POOL.fill(boot::free());
    running::set_up()?;
    let root = boot::map(Tables::kernel())?;
    // SAFETY: the root of the kernel's map.
    unsafe { boot::switch(root) };
    boot::start_second(root)?;
    boot::configure()
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    let done = boot().map_err(String::from).and_then(|()| steps::all());
    match done {
        Ok(()) => end(format_args!("done")),
        Err(why) => end(format_args!("WRONG: {why}")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn exception(syndrome: u64, at: u64, from: u64) -> ! {
    end(format_args!("WRONG: exception {syndrome:#x} at {at:#x}, from {from:#x}"))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("WRONG: {info}"))
}

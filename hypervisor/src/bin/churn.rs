//! A small guest that touches its memory, again and again, on all of its processors: work for a
//! hypervisor that takes pages and tables away, logs and copies, of a size at which each
//! instruction of it can be looked at.
//!
//! It runs at EL1 with its MMU off. What it has written it reads again, each time on another
//! processor; what is lost is said. If its first argument is `copy`, it goes on until it was
//! copied.
#![no_std]
#![no_main]

mod payload;

use core::arch::{asm, global_asm};
use core::fmt::Write as _;
use core::panic::PanicInfo;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use payload::{call, console};

/// The address at which the hypervisor is told that the load is at work, and says whether it was
/// copied.
const BELL: u64 = 0xb00_0000;
/// Memory that is touched, from the 2 MiB behind the image on, and how far apart.
const SIZE: u64 = 12 << 20;
const APART: u64 = 32 << 10;
const WORDS: u64 = SIZE / APART;
/// How often all of it is written, and read.
const ROUNDS: u64 = 24;
/// The most processors.
const CPUS: u64 = 4;
/// The part of the device tree that is searched.
const TREE: u64 = 64 << 10;

const CPU_ON: u64 = 0xc400_0003;
const SYSTEM_OFF: u64 = 0x8400_0008;

global_asm!(
    payload::head!(),
    "start:",
    "mov x1, x0",
    "mov x0, #0",
    // Each has a stack of its own: 16 KiB.
    "secondary:",
    "adrp x2, stack_end",
    "add x2, x2, :lo12:stack_end",
    "sub x2, x2, x0, lsl #14",
    "mov sp, x2",
    "bl main",
    "b .",
);

unsafe extern "C" {
    fn secondary();
    static stack_end: u8;
}

/// How many processors have come to the end of each round.
static PASSED: AtomicU32 = AtomicU32::new(0);
/// Words that were not as they were written.
static LOST: AtomicU32 = AtomicU32::new(0);
/// The last round; it is put off until the guest was copied.
static LAST: AtomicU64 = AtomicU64::new(ROUNDS);

/// Whether the device tree says that the guest is to be copied.
fn is_copied(tree: u64) -> bool {
    const NAME: &[u8] = b"churn copy";
    let at = |at: u64| {
        // SAFETY: the tree, and memory behind it.
        unsafe { ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() }
    };
    (tree..tree + TREE).any(|from| (from..).zip(NAME).all(|(from, &byte)| at(from) == byte))
}

/// The word of this number: in each round at another place of its page.
fn word(number: u64, round: u64) -> *mut u64 {
    let first = ((&raw const stack_end).addr() as u64).next_multiple_of(2 << 20);
    ptr::with_exposed_provenance_mut((first + number * APART + round % 512 * 8) as usize)
}

fn say(text: &str) {
    let _ = console().write_str(text);
}

#[unsafe(no_mangle)]
extern "C" fn main(cpu: u64, tree: u64) -> ! {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let bell = ptr::with_exposed_provenance_mut::<u32>(BELL as usize);
    let mut copies = false;
    if cpu == 0 {
        copies = is_copied(tree);
        if copies {
            LAST.store(u64::MAX, Ordering::Relaxed);
        }
        let mut started = 1;
        for other in 1..CPUS {
            let secondary = secondary as *const () as u64;
            // SAFETY of what is called: it has a stack of its own.
            started += u32::from(call(CPU_ON, [other, secondary, other]) == 0);
        }
        STARTED.store(started, Ordering::Release);
        // SAFETY: the hypervisor's, where it is told that the load is at work.
        unsafe { bell.write_volatile(1) };
    }
    let mut cpus = 0;
    while cpus == 0 {
        cpus = STARTED.load(Ordering::Acquire);
        // SAFETY: a hint.
        unsafe { asm!("yield") };
    }
    let mut round = 1;
    loop {
        for number in 0..WORDS {
            // In turn, and in the next round the other.
            if (number + round) % u64::from(cpus) != cpu {
                continue;
            }
            // SAFETY: a word of the guest's memory, which this processor alone uses in this round.
            unsafe {
                let before = word(number, round - 1).read_volatile();
                if round > 1 && before != number << 32 | (round - 1) {
                    LOST.fetch_add(1, Ordering::Relaxed);
                }
                word(number, round).write_volatile(number << 32 | round);
            }
        }
        PASSED.fetch_add(1, Ordering::AcqRel);
        // SAFETY: as above; it says there whether the guest was copied.
        if copies && unsafe { bell.read_volatile() } != 0 {
            copies = false;
            LAST.store(round + 2, Ordering::Release);
        }
        while PASSED.load(Ordering::Acquire) < cpus * round as u32 {
            // SAFETY: a hint.
            unsafe { asm!("yield") };
        }
        if round >= LAST.load(Ordering::Acquire) {
            break;
        }
        round += 1;
    }
    if cpu == 0 {
        match LOST.load(Ordering::Acquire) {
            0 => say("churn: done\n"),
            _ => say("churn: WRONG: what was written is lost\n"),
        }
        call(SYSTEM_OFF, [0; 3]);
    }
    loop {
        // SAFETY: waits.
        unsafe { asm!("wfi") };
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    say("churn: WRONG: it panicked\n");
    call(SYSTEM_OFF, [0; 3]);
    loop {
        core::hint::spin_loop();
    }
}

//! Caches, and code that changes.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::head::{Report, attempt, check};
use crate::pages::{FRAMES, NOT_CACHED, frame, map};
use crate::psci;

/// How often code is written and executed.
const CHANGES: u32 = 1000;

/// Maintenance of the line at an address, by its name.
macro_rules! line {
    ($name:literal, $at:expr) => {
        // SAFETY: what is cleaned keeps its value; what is only invalidated is of no use.
        unsafe { asm!(concat!($name, ", {}"), "dsb sy", in(reg) $at, options(nostack)) }
    };
}

/// The other processor's count in code that is changed under it, and what it was told.
static CALLS: AtomicU32 = AtomicU32::new(0);
static ODD: AtomicU32 = AtomicU32::new(0);
static END: AtomicU32 = AtomicU32::new(0);

/// `mov w0, #number`.
fn move_number(number: u32) -> u32 {
    0x5280_0000 | (number & 0xffff) << 5
}
const RET: u32 = 0xd65f_03c0;

/// Writes one instruction, so that it is the next that is executed there.
fn patch(at: u64, instruction: u32) {
    // SAFETY: a page of this program, in which no other instruction is changed.
    unsafe {
        asm!(
            "str {instruction:w}, [{at}]", "dc cvau, {at}", "dsb ish", "ic ivau, {at}", "dsb ish",
            "isb",
            instruction = in(reg) instruction, at = in(reg) at, options(nostack)
        );
    }
}

fn call(at: u64) -> u32 {
    let result: u32;
    // SAFETY: two instructions: a number, and back.
    unsafe { asm!("blr {at}", at = in(reg) at, out("w0") result, out("x30") _, options(nostack)) };
    result
}

/// The other processor executes what is changed, until it is told to stop: it finds one number or
/// the other.
pub fn execute() {
    let at = frame(6);
    while END.load(Ordering::Acquire) == 0 {
        // SAFETY: what was fetched ahead is fetched again.
        unsafe { asm!("isb", options(nostack)) };
        let number = call(at);
        ODD.fetch_add(u32::from(number != 1 && number != 2), Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Release);
    }
}

/// The checks.
pub fn run() -> u32 {
    let mut report = Report::new("cache");
    let words = FRAMES.0.as_flattened();
    let types: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, ctr_el0", out(reg) types, options(nostack)) };
    let smallest = 4u64 << (types >> 16 & 0xf);
    check!(report: (16..=2048).contains(&smallest) => "lines of {smallest} bytes");
    let geometry: u64;
    // SAFETY: selects a cache, and reads what it is.
    unsafe {
        asm!("msr csselr_el1, xzr", "isb", "mrs {}, ccsidr_el1", out(reg) geometry,
            options(nostack))
    };
    check!(report: geometry != 0 => "the first cache: {geometry:#x}");

    // Zeroing of a block: all of it, and nothing else.
    let zeroing: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, dczid_el0", out(reg) zeroing, options(nostack)) };
    if zeroing & 1 << 4 == 0 {
        let block = 4 << (zeroing & 0xf);
        words[..512].iter().for_each(|word| word.store(!0, Ordering::Relaxed));
        line!("dc zva", frame(0) + block + 8);
        let zero =
            words[..512].iter().filter(|word| word.load(Ordering::Relaxed) == 0).count() as u64;
        let first = words[(block / 8) as usize].load(Ordering::Relaxed);
        check!(report: zero * 8 == block && first == 0
            => "a block of {block} bytes is zeroed: {zero} words");
    }

    // What is written past the caches, and through them, is the same once it is cleaned.
    let beside = map(5, Some(frame(1)), NOT_CACHED);
    let mut lost = 0;
    for round in 0..512u64 {
        let word = &words[512 + round as usize];
        word.store(round, Ordering::Relaxed);
        line!("dc cvac", word.as_ptr());
        let seen: u64;
        // SAFETY: a page of this program, under another address; what is written there is a number.
        unsafe {
            asm!("ldr {seen}, [{at}]", "str {new}, [{at}]", "dsb sy", seen = out(reg) seen,
                new = in(reg) !round,
                at = in(reg) beside + 8 * round, options(nostack));
        }
        line!("dc civac", word.as_ptr());
        lost += u32::from(seen != round || word.load(Ordering::Relaxed) != !round);
    }
    check!(report: lost == 0 => "words lost between two addresses, one not cached: {lost}");

    // By set and way, and what is the hypervisor's to survive: nothing is lost that was written.
    words[1024..1536].iter().for_each(|word| word.store(0x5a5a, Ordering::Relaxed));
    let trap = attempt(|| {
        for way in 0..4u64 {
            line!("dc isw", way << 30);
            line!("dc cisw", way << 30);
            line!("dc csw", way << 30);
        }
        line!("dc ivac", words[2000].as_ptr());
    });
    let kept =
        words[1024..1536].iter().filter(|word| word.load(Ordering::Relaxed) == 0x5a5a).count();
    check!(report: trap.is_none() => "maintenance by set and way is no exception");
    check!(report: kept == 512 => "words that are kept by it: {kept} of 512");

    code(&mut report);
    report.end()
}

/// Code that changes, on this processor, and under another.
fn code(report: &mut Report) {
    let mut wrong = 0;
    for change in 0..CHANGES {
        let at = frame(7) + u64::from(change % 64) * 64;
        patch(at + 4, RET);
        patch(at, move_number(change));
        wrong += u32::from(call(at) != change & 0xffff);
    }
    check!(report: wrong == 0
        => "{CHANGES} functions written and called: {wrong} were not the new one");

    // The same code at another address: what is executed is what memory holds.
    let other = map(6, Some(frame(7)), 2 << 6);
    let mut wrong = 0;
    for change in 0..CHANGES / 4 {
        patch(frame(7), move_number(change));
        crate::vectors::synchronize(frame(7));
        wrong += u32::from(call(other) != change & 0xffff);
    }
    check!(report: wrong == 0 => "the same through another address: {wrong} were not the new one");

    let at = frame(6);
    patch(at + 4, RET);
    patch(at, move_number(1));
    psci::have(1, psci::EXECUTE);
    for change in 0..CHANGES {
        patch(at, move_number(1 + change % 2));
        let before = CALLS.load(Ordering::Acquire);
        psci::soon(|| CALLS.load(Ordering::Acquire) != before);
    }
    END.store(1, Ordering::Release);
    let (calls, odd) = (CALLS.load(Ordering::Relaxed), ODD.load(Ordering::Relaxed));
    check!(report: calls >= CHANGES && odd == 0
        => "code is changed under another processor: {calls} calls, {odd} were neither the old nor \
            the new");
}

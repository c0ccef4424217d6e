//! A small guest, one of several: it writes its memory and reads it again, on two vCPUs, runs code
//! that it writes itself, has a timer, and says what it has got. Every fourth attacks meanwhile: it
//! reaches for what is not its own.
//!
//! It runs at EL1 with its MMU off. What it writes, its code and what is in its vectors are other
//! for each guest, so that whatever comes from another is seen.
#![no_std]
#![no_main]

mod pattern;
#[path = "../payload/mod.rs"]
mod payload;

use core::arch::{asm, global_asm};
use core::fmt::Write as _;
use core::panic::PanicInfo;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pattern::{LAST, NOTHING, WORDS, hash, word};
use payload::{call, console};

/// The address of a guest's register that says whether its time is over.
const BELL: u64 = 0xb00_0000;
/// From the start of its memory: words, and code that is written.
const DATA: u64 = 2 << 20;
const CODE: u64 = (7 << 20) + 0x3000;
const PAGE: u64 = 4096;
/// It goes on so long at least.
const ROUNDS: u64 = 4;

const CPU_ON: u64 = 0xc400_0003;
const SYSTEM_OFF: u64 = 0x8400_0008;
/// The virtual timer's interrupt.
const TIMER: u64 = 27;
/// An interrupt to the other vCPU.
const CALL: u64 = 3;

global_asm!(
    payload::head!(),
    ".arch_extension fp",
    ".arch_extension simd",
    "start:",
    "mov x20, x1",
    "mov x0, #0",
    "b both",
    // Its argument is the guest's number.
    "secondary:",
    "mov x20, x0",
    "mov x0, #1",
    "both:",
    "adrp x2, stack_end",
    "add x2, x2, :lo12:stack_end",
    "sub x2, x2, x0, lsl #14",
    "mov sp, x2",
    "adrp x2, vectors",
    "add x2, x2, :lo12:vectors",
    "msr vbar_el1, x2",
    "mov x2, #3 << 20", // floating point is not trapped
    "msr cpacr_el1, x2",
    "isb",
    "mov x1, x20",
    "bl main",
    "b .",
    ".balign 2048",
    "vectors:",
    ".rept 5",
    ".balign 128",
    // Synchronous ones: what it was, and on behind it; for a fetch, where it was called from.
    "b 9f",
    ".endr",
    ".balign 128",
    "b interrupt",
    ".rept 10",
    ".balign 128",
    "b 9f",
    ".endr",
    "9:",
    "stp x0, x1, [sp, #-16]!",
    "mrs x0, esr_el1",
    "mrs x1, tpidr_el1",
    "str x0, [x1]",
    "lsr x0, x0, #26",
    "cmp x0, #0x21",
    "mrs x0, elr_el1",
    "add x0, x0, #4",
    "csel x0, x30, x0, eq",
    "msr elr_el1, x0",
    "ldp x0, x1, [sp], #16",
    "eret",
    "interrupt:",
    "sub sp, sp, #256",
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,29,30",
    "str x\\n, [sp, #8 * \\n]",
    ".endr",
    "bl interrupted",
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,29,30",
    "ldr x\\n, [sp, #8 * \\n]",
    ".endr",
    "add sp, sp, #256",
    "eret",
    // Vectors of this value, and whether they are still.
    "fill:",
    "dup v0.2d, x0",
    "dup v7.2d, x0",
    "dup v15.2d, x0",
    "dup v31.2d, x0",
    "ret",
    "is_filled:",
    "dup v1.2d, x0",
    "cmeq v0.2d, v0.2d, v1.2d",
    "cmeq v2.2d, v7.2d, v1.2d",
    "cmeq v3.2d, v15.2d, v1.2d",
    "cmeq v4.2d, v31.2d, v1.2d",
    "and v0.16b, v0.16b, v2.16b",
    "and v3.16b, v3.16b, v4.16b",
    "and v0.16b, v0.16b, v3.16b",
    "mov x0, v0.d[0]",
    "mov x1, v0.d[1]",
    "and x0, x0, x1",
    "ret",
    ".text",
);

unsafe extern "C" {
    fn secondary();
    fn fill(value: u64);
    fn is_filled(value: u64) -> u64;
    static head: u8;
}

/// The syndrome of the last exception of each vCPU.
static SYNDROMES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// Interrupts taken.
static TICKS: AtomicU32 = AtomicU32::new(0);
static CALLS: AtomicU32 = AtomicU32::new(0);
/// How often both have come to the end of a round.
static PASSED: AtomicU64 = AtomicU64::new(0);
/// Whether there is another round.
static GOES_ON: AtomicU64 = AtomicU64::new(1);
static WRONG: AtomicU32 = AtomicU32::new(0);

macro_rules! system {
    (read $name:literal) => {{
        let value: u64;
        // SAFETY: reads a register.
        unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value,
            options(nostack, preserves_flags)) };
        value
    }};
    (write $name:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: a register of this program's.
        unsafe { asm!(concat!("msr ", $name, ", {}"), in(reg) value,
            options(nostack, preserves_flags)) };
    }};
    ($($text:literal),* $(; $operand:expr)?) => {
        // SAFETY: a barrier, or maintenance.
        unsafe { asm!($($text),* $(, in(reg) $operand)?, options(nostack, preserves_flags)) }
    };
}

fn wrong(what: &str, is: u64, should: u64) {
    // The first few are enough.
    if WRONG.fetch_add(1, Ordering::Relaxed) < 5 {
        let _ = writeln!(console(), "small: WRONG: {what}: {is:#x}, not {should:#x}");
    }
}

#[unsafe(no_mangle)]
extern "C" fn interrupted() {
    let id = system!(read "s3_0_c12_c12_0");
    match id & 0xff_ffff {
        TIMER => {
            TICKS.fetch_add(1, Ordering::Relaxed);
            arm_timer();
        }
        CALL => _ = CALLS.fetch_add(1, Ordering::Relaxed),
        other => wrong("an interrupt of number", other, TIMER),
    }
    system!("isb");
    system!(write "s3_0_c12_c12_1", id);
}

/// It is due after 3 ms.
fn arm_timer() {
    system!(write "cntv_tval_el0", system!(read "cntfrq_el0") * 3 / 1000);
    system!(write "cntv_ctl_el0", 1);
}

/// Memory at this offset.
fn at(offset: u64) -> *mut u64 {
    ptr::with_exposed_provenance_mut(((&raw const head).addr() as u64 + offset) as usize)
}

/// The word of this number: in each round at another place of its page.
fn place(number: u64, round: u64) -> *mut u64 {
    at(DATA + number * PAGE + round % 512 * 8)
}

/// Writes a function that returns this, and calls it.
fn execute(cpu: u64, value: u64) -> u64 {
    let code = at(CODE + cpu * PAGE).cast::<u32>();
    let bits = (value & 0xffff) as u32;
    // SAFETY: a page of this vCPU's; what is written is `mov x0, #bits; ret`, which changes nothing
    // else.
    unsafe {
        code.write_volatile(0xd280_0000 | bits << 5);
        code.add(1).write_volatile(0xd65f_03c0);
    }
    system!("dc cvau, {}", "dsb ish"; code);
    system!("ic ivau, {}", "dsb ish", "isb"; code);
    // SAFETY: the function that was just written.
    let function: extern "C" fn() -> u64 = unsafe { core::mem::transmute(code) };
    function()
}

/// Returns the end of an access to somewhere: 0 if it came to nothing.
fn attempt(cpu: usize, at: u64, is_write: bool) -> u64 {
    SYNDROMES[cpu].store(0, Ordering::Relaxed);
    // SAFETY: an exception goes on behind it; and what is written is nothing of this program's.
    unsafe {
        match is_write {
            true => asm!("str {}, [{}]", in(reg) 0xbad_u64, in(reg) at),
            false => asm!("ldr {}, [{}]", out(reg) _, in(reg) at),
        }
    }
    SYNDROMES[cpu].load(Ordering::Relaxed)
}

/// Reaches for memory that is another's, if it is there at all; floods all with invalidations; and
/// calls what it likes.
fn attack(cpu: usize, round: u64) {
    const ABORT: u64 = 0x25;
    let start = (&raw const head).addr() as u64;
    for target in [
        // The hypervisor; where other guests' frames are; behind everything; interrupt controller
        // of others.
        0x4020_0000 + (round % 512) * PAGE,
        start - PAGE,
        start + (8 << 20),
        start + (round % 1024 + 8) * (1 << 20),
        0x20_0000_0000,
        0x80e_0000,
    ] {
        for is_write in [false, true] {
            let found = attempt(cpu, target, is_write);
            if found >> 26 != ABORT {
                wrong("no abort at", target, found);
            }
        }
    }
    system!("dsb ish", "tlbi vmalle1is", "ic ialluis", "dsb ish", "isb");
    system!("tlbi vmalle1", "dsb nsh", "isb");
    system!("dc isw, {}", "dsb sy"; (round % 4) << 30);
    for (function, arguments, right) in [
        (0x8400_0077, [0; 3], -1),
        (CPU_ON, [0, start, 0], -4),
        (CPU_ON, [7, start, 0], -2),
        (CPU_ON, [1, 0x4020_0000, 0], -9),
    ] {
        let result = call(function, arguments);
        if result != right {
            wrong("firmware", result as u64, right as u64);
        }
    }
    // To all of all affinities.
    system!(write "s3_0_c12_c11_5", 1 << 40 | CALL << 24);
    system!(write "s3_0_c12_c11_5", 0xff_0000 | CALL << 24 | 0xffff);
}

#[unsafe(no_mangle)]
extern "C" fn main(cpu: u64, guest: u64) -> ! {
    static CPUS: AtomicU64 = AtomicU64::new(0);
    system!(write "tpidr_el1", SYNDROMES[cpu as usize].as_ptr().addr() as u64);
    // The interrupt controller: its own interrupts, all priorities, group 1; and the timer.
    let enable = start_of_redistributor(cpu) + 0x1_0100;
    // SAFETY: a register.
    unsafe {
        ptr::with_exposed_provenance_mut::<u32>(enable as usize)
            .write_volatile(1 << TIMER | 0xffff);
    }
    system!(write "s3_0_c12_c12_5", 7);
    system!("isb");
    system!(write "s3_0_c4_c6_0", 0xff);
    system!(write "s3_0_c12_c12_7", 1);
    if cpu == 0 {
        arm_timer();
    }
    system!("msr daifclr, #2");
    if cpu == 0 {
        let started = call(CPU_ON, [1, secondary as *const () as u64, guest]);
        CPUS.store(1 + u64::from(started == 0), Ordering::Release);
    }
    let mut cpus = 0;
    while cpus == 0 {
        cpus = CPUS.load(Ordering::Acquire);
        system!("yield");
    }
    let mut round = 1;
    while GOES_ON.load(Ordering::Acquire) >= round {
        let mine = guest << 32 | cpu << 24 | round;
        // SAFETY: registers that nothing else here uses.
        unsafe { fill(mine) };
        for number in 0..WORDS {
            // In turn, and in the next round the other.
            if (number + round) % cpus != cpu {
                continue;
            }
            // SAFETY: a word of its memory, which this vCPU alone uses in this round.
            let before = unsafe { place(number, round - 1).read_volatile() };
            let should = word(guest, number, round - 1);
            if round > 1 && before != should {
                wrong("a word", before, should);
            }
            // SAFETY: as above.
            unsafe { place(number, round).write_volatile(word(guest, number, round)) };
            if number % 64 == 0 {
                let value = guest << 8 | (number + round) & 0xff;
                let got = execute(cpu, value);
                if got != value {
                    wrong("its own code", got, value);
                }
            }
        }
        // SAFETY: as above.
        if unsafe { is_filled(mine) } != u64::MAX {
            wrong("vectors", mine, 0);
        }
        if guest % 4 == 1 {
            attack(cpu as usize, round);
        }
        // To the other; each other round the vCPU that is through waits for an interrupt.
        system!(write "s3_0_c12_c11_5", 1 << 40 | CALL << 24);
        if cpu == 0 && round % 2 == 0 {
            system!("wfi");
        }
        // SAFETY: a register.
        let is_over = unsafe { ptr::with_exposed_provenance::<u32>(BELL as usize).read_volatile() };
        if cpu == 0 && (is_over == 0 || round < ROUNDS) {
            GOES_ON.store(round + 1, Ordering::Release);
        }
        PASSED.fetch_add(1, Ordering::AcqRel);
        while PASSED.load(Ordering::Acquire) < cpus * round {
            system!("yield");
        }
        round += 1;
    }
    if cpu == 0 {
        end(guest, round - 1, cpus);
    }
    loop {
        system!("wfi");
    }
}

/// Returns the address of a vCPU's redistributor.
const fn start_of_redistributor(cpu: u64) -> u64 {
    0x80a_0000 + cpu * 0x2_0000
}

/// Hashes what it has written last, and says it.
fn end(guest: u64, rounds: u64, cpus: u64) -> ! {
    for number in 0..WORDS {
        // SAFETY: a word of its memory.
        unsafe { place(number, LAST).write_volatile(word(guest, number, LAST)) };
    }
    let words = (0..WORDS).map(|number| {
        // SAFETY: as above.
        unsafe { place(number, LAST).read_volatile() }
    });
    let hashed = words.fold(NOTHING, hash);
    let ticks = TICKS.load(Ordering::Relaxed);
    if ticks == 0 {
        wrong("ticks", 0, 1);
    }
    let calls = CALLS.load(Ordering::Relaxed);
    if calls == 0 && cpus > 1 {
        wrong("calls", 0, 1);
    }
    let wrong = WRONG.load(Ordering::Relaxed);
    let _ = writeln!(
        console(),
        "small: hash {hashed:016x}, {rounds} rounds, {ticks} ticks, {calls} calls, {wrong} wrong"
    );
    call(SYSTEM_OFF, [0; 3]);
    loop {
        core::hint::spin_loop();
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    let _ = writeln!(console(), "small: WRONG: it panicked");
    call(SYSTEM_OFF, [0; 3]);
    loop {
        core::hint::spin_loop();
    }
}

//! A guest that means no good: it tries what a guest may not do, and says what came of it.
//!
//! It runs at EL1 with its MMU off, so that an address is what it takes for physical. Each attempt
//! has to end with an exception of its own, or an error code; the hypervisor has to be there
//! afterwards.
#![no_std]
#![no_main]

mod payload;

use core::arch::{asm, global_asm};
use core::fmt::Write as _;

use payload::{Outcome, UART, call, console, program};

/// The address of a device; a guest that means no good needs no device tree.
const REDISTRIBUTOR: u64 = 0x80a_0000;
/// Memory of the hypervisor's: the first of all, its image, and the last below this guest.
const FORBIDDEN: [u64; 3] = [0x4000_0000, 0x4020_0000, 0x43ff_f000];

global_asm!(
    payload::start!("adrp x0, vectors", "add x0, x0, :lo12:vectors", "msr vbar_el1, x0", "isb"),
    ".balign 2048",
    "vectors:",
    ".rept 16",
    ".balign 128",
    // What it was, and on behind it: for a fetch, where it was called from.
    "stp x0, x1, [sp, #-16]!",
    "mrs x0, esr_el1",
    "adrp x1, LAST",
    "str x0, [x1, :lo12:LAST]",
    "lsr x0, x0, #26",
    "cmp x0, #0x21",
    "mrs x0, elr_el1",
    "add x0, x0, #4",
    "csel x0, x30, x0, eq",
    "msr elr_el1, x0",
    "ldp x0, x1, [sp], #16",
    "eret",
    ".endr",
);

/// The syndrome of the last exception.
#[unsafe(no_mangle)]
static mut LAST: u64 = 0;

/// The end of an attempt: 0 if it came to nothing.
macro_rules! attempt {
    ($($asm:tt)*) => {{
        // SAFETY: one processor; the exception handler writes it, and only while the attempt is
        // made.
        unsafe {
            (&raw mut LAST).write_volatile(0);
            asm!($($asm)*);
            (&raw const LAST).read_volatile()
        }
    }};
}

fn read(at: u64) -> u64 {
    attempt!("ldr {}, [{}]", out(reg) _, in(reg) at)
}

fn write(at: u64, value: u32) -> u64 {
    attempt!("str {:w}, [{}]", in(reg) value, in(reg) at)
}

fn fetch(at: u64) -> u64 {
    attempt!("blr {}", in(reg) at, out("x30") _)
}

struct Report {
    wrong: u32,
}

/// Checks the result of an attempt.
macro_rules! expect {
    ($report:ident: $what:expr, $at:expr, $is_right:expr => $got:expr) => {
        $report.expect($what, $at, $is_right, $got)
    };
}

/// Checks that an attempt ended in an external abort of this class: there is nothing.
macro_rules! nothing {
    ($report:ident: $what:expr, $at:expr, $class:expr => $got:expr) => {{
        let (got, class) = ($got, $class);
        let is_right = got >> 26 == class && got & 0x3f == 0x10;
        $report.expect($what, $at, is_right, got)
    }};
}

impl Report {
    fn expect(&mut self, what: &str, at: u64, is_right: bool, got: u64) {
        if !is_right {
            self.wrong += 1;
        }
        let verdict = if is_right { "ok" } else { "WRONG" };
        let _ = writeln!(console(), "hostile: {verdict}: {what} {at:#x}: {got:#x}");
    }
}

fn run() -> Outcome {
    const DATA: u64 = 0x25;
    const FETCH: u64 = 0x21;
    let mut report = Report { wrong: 0 };

    for at in FORBIDDEN {
        nothing!(report: "read", at, DATA => read(at));
        nothing!(report: "write", at, DATA => write(at, 0x1234_5678));
        nothing!(report: "fetch", at, FETCH => fetch(at));
        let exclusive = attempt!("ldxr {}, [{}]", out(reg) _, in(reg) at);
        nothing!(report: "exclusive read of", at, DATA => exclusive);
        let pair = attempt!("stp xzr, xzr, [{}]", in(reg) at);
        nothing!(report: "write of a pair to", at, DATA => pair);
        let zero = attempt!("dc zva, {}", in(reg) at);
        expect!(report: "zeroing of a line at", at, zero >> 26 == DATA => zero);
        let clean = attempt!("dc ivac, {}", in(reg) at);
        expect!(report: "invalidation of a line at", at, clean == 0 || clean >> 26 == DATA
            => clean);
    }
    // Nowhere: below, between, behind the memory, and beyond what stage 2 translates.
    let beyond = [39, 40, 47].map(|bit| 1u64 << bit);
    for at in [0, 0x900_1000, 0x3f00_0000, 0x2_0000_0000].into_iter().chain(beyond) {
        let (read, fetch) = (read(at), fetch(at));
        expect!(report: "read of nothing at", at, read >> 26 == DATA => read);
        expect!(report: "fetch of nothing at", at, fetch >> 26 == FETCH => fetch);
    }
    // Across the first page that is not there, and not aligned.
    let across = read(0x4400_0000 - 4);
    expect!(report: "unaligned read", 0x4400_0000 - 4, across >> 26 == DATA => across);
    // Code among the registers of a device.
    let device = fetch(UART);
    expect!(report: "fetch of a register at", UART, device >> 26 == FETCH => device);

    // Firmware calls.
    const CPU_ON: u64 = 0xc400_0003;
    for (what, [function, first, second, third], right) in [
        ("an unknown call", [0x8400_0077, 0, 0, 0], -1),
        ("a call of another owner", [0xc200_0001, 1, 2, 3], -1),
        ("a call with a long number", [0xffff_ffff_8400_0077, 0, 0, 0], -1),
        ("the features of nothing", [0x8400_000a, 0x7777_7777, 0, 0], -1),
        ("a start of this processor", [CPU_ON, 0, 0x4400_0000, 0], -4),
        ("a start of no processor", [CPU_ON, 0xff_00ff_ffff, 0x4400_0000, 0], -2),
        ("a start in the hypervisor", [CPU_ON, 1, 0x4020_0000, 0], -9),
        ("a start beyond everything", [CPU_ON, 1, u64::MAX, 0], -9),
        ("the state of a group", [0xc400_0004, 0, 2, 0], -2),
        ("protection of memory", [0x8400_0013, 1, 0, 0], -1),
        ("a suspension of the system", [0xc400_000e, 0x4400_0000, 0, 0], -1),
    ] {
        let got = call(function, [first, second, third]);
        expect!(report: what, function, got == right => got as u64);
    }
    let hvc: i64;
    // SAFETY: as for a firmware call.
    unsafe { asm!("hvc #0x77", inout("x0") CPU_ON => hvc) };
    expect!(report: "a call of the hypervisor", CPU_ON, hvc == -1 => hvc as u64);

    // The interrupt controller is to write its tables over the hypervisor.
    for (register, value) in [(0x70, 0x4020_000f), (0x78, 0x4020_0000), (0, 1)] {
        let at = REDISTRIBUTOR + register;
        let wrote = write(at, value);
        let got: u32;
        attempt!("ldr {:w}, [{}]", out(reg) got, in(reg) at);
        let kept = if register == 0 { got & 1 == 0 } else { got & 0xffff_0000 != 0x4020_0000 };
        expect!(report: "redistributor register", at, wrote == 0 && kept => got.into());
        let pair = attempt!("stp xzr, xzr, [{}]", in(reg) at);
        expect!(report: "write of a pair to", at, pair >> 26 == DATA => pair);
    }

    // What is not EL1's.
    let el2 = attempt!("mrs {}, vttbr_el2", out(reg) _);
    expect!(report: "VTTBR_EL2", 0, el2 >> 26 == 0 && el2 != 0 => el2);
    // By set and way, all of the first level.
    for way in 0..4u64 {
        attempt!("dc isw, {}", in(reg) way << 30);
    }

    Ok(Some(report.wrong))
}

program!("hostile", run);

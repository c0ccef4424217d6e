//! Exceptions: which vector, which syndrome, and the state before and after, also of those that a
//! hypervisor makes.

use core::arch::asm;
use core::sync::atomic::Ordering;

use crate::head::{BACK, Report, Trap, attempt, check};
use crate::pages::{FRAMES, NO_EXECUTION, READ_ONLY, USER, frame, map};

/// Nothing is there: neither memory nor a device, and with a hypervisor no memory of the guest's.
const NOTHING: u64 = 0x3f00_0000;

/// Classes (DDI 0487 D24.2).
const UNKNOWN: u64 = 0;
const CALL: u64 = 0x15;
const FETCH_LOWER: u64 = 0x20;
const FETCH: u64 = 0x21;
const DATA_LOWER: u64 = 0x24;
const DATA: u64 = 0x25;
const BREAK: u64 = 0x3c;

/// DAIF are set by an exception, and SP is the level's own.
const MASKED: u64 = 0xf << 6 | 1;
const PAN: u64 = 1 << 22;
const TCO: u64 = 1 << 25;

fn read(at: u64) {
    // SAFETY: what it may do is what is looked at.
    unsafe { asm!("ldr {0}, [{0}]", inout(reg) at => _, options(nostack)) };
}

fn write(at: u64) {
    // SAFETY: a page for experiments, or nothing.
    unsafe { asm!("str xzr, [{}]", in(reg) at, options(nostack)) };
}

fn execute(at: u64) {
    // SAFETY: what is there returns, or is not executed.
    unsafe { asm!("blr {}", in(reg) at, out("x30") _, options(nostack)) };
}

/// With the stack of EL0, as far as the exception.
fn read_with_other_stack(at: u64) {
    // SAFETY: no stack is used between.
    unsafe {
        asm!("msr spsel, #0", "ldr {0}, [{0}]", "msr spsel, #1", inout(reg) at => _,
            options(nostack))
    };
}

/// Runs at EL0 what is at this address, until its first exception; x0 is an address for it.
fn at_el0(entry: u64, argument: u64) {
    // SAFETY: the exception comes back behind it, on the stack of this program; registers that are
    // the callee's are kept.
    unsafe {
        asm!(
            "stp x19, x29, [sp, #-16]!",
            "adr {back}, 2f",
            "str {back}, [{cell}]",
            "msr elr_el1, {entry}",
            "mov {back}, #0x3c0",
            "msr spsr_el1, {back}",
            "isb",
            "eret",
            "2:",
            "ldp x19, x29, [sp], #16",
            "str xzr, [{cell}]",
            entry = in(reg) entry,
            back = out(reg) _,
            cell = in(reg) BACK.as_ptr(),
            inout("x0") argument => _,
        );
    }
}

/// Checks an exception: its vector, its class, and the low bits of its syndrome.
macro_rules! expect {
    ($report:ident: $got:expr, $vector:expr, $class:expr, $status:expr => $what:expr) => {
        expect(&mut $report, $what, $got, $vector, $class, $status)
    };
}

fn expect(
    report: &mut Report,
    what: &str,
    got: Option<Trap>,
    vector: u64,
    class: u64,
    status: Option<u64>,
) {
    let right = got.is_some_and(|trap| {
        trap.vector == vector
            && trap.esr >> 26 == class
            && trap.esr >> 25 & 1 == 1
            && status.is_none_or(|status| trap.esr & 0x3f == status)
    });
    match (right, got) {
        (true, _) => check!(report: true => "{what}"),
        (false, Some(trap)) => check!(report: false => "{what}: {trap:x?}"),
        (false, None) => check!(report: false => "{what}: no exception"),
    }
}

/// The checks.
pub fn run() -> u32 {
    const TRANSLATION: u64 = 0b00_0111;
    const PERMISSION: u64 = 0b00_1111;
    const EXTERNAL: u64 = 0b01_0000;
    let mut report = Report::new("vectors");
    let words = FRAMES.0.as_flattened();
    // Of frame 4: `svc #7`, `ldr x0, [x0]`, an instruction that is none, `ret`.
    words[4 * 512].store(0xf940_0000_d400_00e1, Ordering::Relaxed);
    words[4 * 512 + 1].store(0xd65f_03c0_0000_0000, Ordering::Relaxed);
    synchronize(frame(4));
    let missing = map(0, None, 0);
    let data = map(1, Some(frame(5)), READ_ONLY | NO_EXECUTION);
    let code = map(2, Some(frame(4)), USER | READ_ONLY);
    let nothing = map(3, Some(NOTHING), NO_EXECUTION | USER);
    let nothing_to_run = map(4, Some(NOTHING), USER | READ_ONLY);

    // Of stage 1.
    let got = attempt(|| read(missing));
    expect!(report: got, 4, DATA, Some(TRANSLATION) => "a read where nothing is mapped");
    let far = got.map(|trap| trap.far);
    check!(report: far == Some(missing) => "its address: {far:x?}");
    let got = attempt(|| write(data));
    expect!(report: got, 4, DATA, Some(PERMISSION) => "a write of what is only read");
    check!(report: got.is_some_and(|trap| trap.esr & 1 << 6 != 0) => "it is a write");
    expect!(report: attempt(|| execute(data)), 4, FETCH, Some(PERMISSION)
        => "a fetch of what is not executed");

    // Of nothing: an external abort, which a hypervisor makes as the processor does.
    let got = attempt(|| read(nothing));
    expect!(report: got, 4, DATA, Some(EXTERNAL) => "a read of nothing");
    check!(report: got.is_some_and(|trap| trap.far == nothing && trap.esr & 1 << 6 == 0)
        => "its address, and that it is a read");
    states(&mut report, nothing, missing);
    let got = attempt(|| write(nothing));
    expect!(report: got, 4, DATA, Some(EXTERNAL) => "a write of nothing");
    check!(report: got.is_some_and(|trap| trap.esr & 1 << 6 != 0) => "it is a write");
    expect!(report: attempt(|| execute(nothing_to_run)), 4, FETCH, Some(EXTERNAL)
        => "a fetch of nothing");
    let got = attempt(|| read_with_other_stack(nothing));
    expect!(report: got, 0, DATA, Some(EXTERNAL) => "a read of nothing, with the other stack");

    // Of EL0.
    let got = attempt(|| at_el0(code, 0));
    expect!(report: got, 8, CALL, Some(7) => "a call of EL0");
    expect!(report: attempt(|| at_el0(code + 4, missing)), 8, DATA_LOWER, Some(TRANSLATION)
        => "a read by EL0 where nothing is mapped");
    let got = attempt(|| at_el0(code + 4, nothing));
    expect!(report: got, 8, DATA_LOWER, Some(EXTERNAL) => "a read of nothing by EL0");
    check!(report: got.is_some_and(|trap| trap.spsr & 0x1f == 0 && trap.elr == code + 4)
        => "where from");
    expect!(report: attempt(|| at_el0(nothing_to_run, 0)), 8, FETCH_LOWER, Some(EXTERNAL)
        => "a fetch of nothing by EL0");
    expect!(report: attempt(|| at_el0(code + 8, 0)), 8, UNKNOWN, None => "no instruction, by EL0");

    // Others.
    // SAFETY: an exception, and on behind it.
    let got = attempt(|| unsafe { asm!("udf #0") });
    expect!(report: got, 4, UNKNOWN, None => "no instruction");
    // SAFETY: as before.
    let got = attempt(|| unsafe { asm!("brk #5") });
    expect!(report: got, 4, BREAK, Some(5) => "a break");
    // SAFETY: as before.
    let got = attempt(|| unsafe { asm!("mrs {}, vttbr_el2", out(reg) _) });
    expect!(report: got, 4, UNKNOWN, None => "a register of EL2");
    report.end()
}

/// The state after an exception of the hypervisor's is that after one of the processor's, whatever
/// it was before.
fn states(report: &mut Report, nothing: u64, missing: u64) {
    let features: u64;
    // SAFETY: reads a register that says what the processor is.
    unsafe { asm!("mrs {}, id_aa64mmfr1_el1", out(reg) features, options(nostack)) };
    let has_pan = features >> 20 & 0xf != 0;
    for (name, flags) in
        [("no condition", 0u64), ("all conditions", 0xf << 28), ("two conditions", 0b0110 << 28)]
    {
        let with = |at: u64| {
            attempt(|| {
                // SAFETY: the conditions are the compiler's to lose; PAN is off before.
                unsafe {
                    asm!("msr nzcv, {flags}", "ldr {at}, [{at}]", flags = in(reg) flags,
                        at = inout(reg) at => _, options(nostack))
                }
            })
        };
        let (made, taken) = (with(nothing), with(missing));
        let pair =
            (made.map(|trap| (trap.state, trap.spsr)), taken.map(|trap| (trap.state, trap.spsr)));
        check!(report: made.is_some() && pair.0 == pair.1
            => "{name}: the state is that of an exception of stage 1: {:x?} {:x?}", pair.0, pair.1);
        let expected = MASKED | if has_pan { PAN } else { 0 };
        let (state, before) = pair.0.unwrap_or_default();
        // The processor has set TCO if memory may have tags, which a guest need not be told.
        let is_right =
            state & !TCO == expected && before >> 28 == flags >> 28 && before & 0x1f == 5;
        check!(report: is_right
            => "{name}: it is masked, with PAN where there is such: {state:x}");
    }
}

/// Has the words that were written to a page executed there.
pub fn synchronize(at: u64) {
    for line in (at..at + 4096).step_by(16) {
        // SAFETY: a page of this program.
        unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack)) };
    }
    // SAFETY: forgets instructions, which are fetched again.
    unsafe { asm!("dsb ish", "ic ialluis", "dsb ish", "isb", options(nostack)) };
}

//! Firmware calls: what they answer, and two processors that start a third at the same time.

use core::arch::asm;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::head::{CPUS, Report, attempt, check, secondary};
use crate::{caches, interrupts};

const VERSION: u64 = 0x8400_0000;
const CPU_OFF: u64 = 0x8400_0002;
const CPU_ON: u64 = 0xc400_0003;
const AFFINITY_INFO: u64 = 0xc400_0004;
const SYSTEM_OFF: u64 = 0x8400_0008;
const FEATURES: u64 = 0x8400_000a;

/// Values that are returned (DEN0022, 5.2.2).
const INVALID_PARAMETERS: i64 = -2;
const ALREADY_ON: i64 = -4;
const ON_PENDING: i64 = -5;

/// Rounds of the race.
const ROUNDS: u32 = 100;

/// Firmware is called by `HVC`, as it is where there is no EL2.
static BY_HVC: AtomicBool = AtomicBool::new(false);

/// Finds out how firmware is called: a hypervisor answers its own calls, and no other.
pub fn find() {
    BY_HVC.store(true, Ordering::Relaxed);
    let mut version = -1;
    let trap = attempt(|| version = call(VERSION, [0; 3]));
    BY_HVC.store(trap.is_none() && version > 0, Ordering::Relaxed);
}

/// A firmware call.
pub fn call(function: u64, [first, second, third]: [u64; 3]) -> i64 {
    let result;
    // SAFETY: what firmware does is asked for. It changes no more registers than these (DEN0028,
    // 2.6).
    unsafe {
        match BY_HVC.load(Ordering::Relaxed) {
            true => asm!(
                "hvc #0", inout("x0") function => result, inout("x1") first => _,
                inout("x2") second => _,
                inout("x3") third => _, lateout("x4") _, lateout("x5") _, lateout("x6") _,
                lateout("x7") _,
                lateout("x8") _, lateout("x9") _, lateout("x10") _, lateout("x11") _,
                lateout("x12") _,
                lateout("x13") _, lateout("x14") _, lateout("x15") _, lateout("x16") _,
                lateout("x17") _,
            ),
            false => asm!(
                "smc #0", inout("x0") function => result, inout("x1") first => _,
                inout("x2") second => _,
                inout("x3") third => _, lateout("x4") _, lateout("x5") _, lateout("x6") _,
                lateout("x7") _,
                lateout("x8") _, lateout("x9") _, lateout("x10") _, lateout("x11") _,
                lateout("x12") _,
                lateout("x13") _, lateout("x14") _, lateout("x15") _, lateout("x16") _,
                lateout("x17") _,
            ),
        }
    }
    result
}

/// Switches the machine off.
pub fn off() -> ! {
    call(SYSTEM_OFF, [0; 3]);
    loop {
        spin_loop();
    }
}

/// Starts a processor.
pub fn start(cpu: u64) -> i64 {
    // Affinities of the machine are numbers, up to 16 of them.
    call(CPU_ON, [cpu, secondary as *const () as u64, cpu])
}

fn is_off(cpu: u64) -> bool {
    call(AFFINITY_INFO, [cpu, 0, 0]) == 1
}

/// The round of the race, in which both start the third.
static ROUND: AtomicU32 = AtomicU32::new(0);
/// The round that the second has come to the end of.
static DONE: AtomicU32 = AtomicU32::new(0);
/// Successes of both in this round.
static WON: AtomicU32 = AtomicU32::new(0);
/// Answers that are none of those that a start has.
static ODD: AtomicU32 = AtomicU32::new(0);
/// Starts of the third, by itself.
static STARTED: AtomicU32 = AtomicU32::new(0);
/// The rounds for which the third may be switched off.
static LEAVE: AtomicU32 = AtomicU32::new(0);
/// The processors that are to be off: a bit for each.
static STOP: AtomicU64 = AtomicU64::new(0);

/// Tries until one of both has succeeded.
fn race() {
    loop {
        match start(2) {
            0 => {
                WON.fetch_add(1, Ordering::AcqRel);
                return;
            }
            ALREADY_ON | ON_PENDING => {}
            _ => {
                ODD.fetch_add(1, Ordering::Relaxed);
            }
        }
        if WON.load(Ordering::Acquire) != 0 {
            return;
        }
    }
}

/// The second and the third, until they are switched off.
pub fn other(cpu: u64) -> ! {
    if cpu == 2 {
        let start = STARTED.fetch_add(1, Ordering::AcqRel) + 1;
        // The round that it was started for: it stays until that is over.
        while LEAVE.load(Ordering::Acquire) < start {
            spin_loop();
        }
    } else {
        let mut round = 0;
        while STOP.load(Ordering::Acquire) == 0 {
            match TASK[cpu as usize % CPUS].swap(0, Ordering::AcqRel) {
                SEND => interrupts::send_to_first(),
                EXECUTE => caches::execute(),
                _ => {}
            }
            if ROUND.load(Ordering::Acquire) != round {
                round += 1;
                race();
                DONE.store(round, Ordering::Release);
            }
            spin_loop();
        }
    }
    call(CPU_OFF, [0; 3]);
    loop {
        spin_loop();
    }
}

/// Tasks of the second processor: send an interrupt, execute code that changes.
pub const SEND: u32 = 1;
/// See [`SEND`].
pub const EXECUTE: u32 = 2;
static TASK: [AtomicU32; CPUS] = [const { AtomicU32::new(0) }; CPUS];

/// Has another processor do something.
pub fn have(cpu: usize, task: u32) {
    TASK[cpu % CPUS].store(task, Ordering::Release);
}

/// Starts the second processor, which waits for what it is to do.
pub fn begin() {
    STOP.store(0, Ordering::Release);
    ROUND.store(0, Ordering::Release);
    start(1);
}

/// Whether something becomes true in a while.
pub fn soon(what: impl Fn() -> bool) -> bool {
    (0..200_000_000_u64).any(|_| {
        spin_loop();
        what()
    })
}

/// The checks.
pub fn run() -> u32 {
    let mut report = Report::new("psci");
    let version = call(VERSION, [0; 3]);
    check!(report: version >= 0x1_0000 => "version {version:#x}");
    for function in [VERSION, CPU_OFF, CPU_ON, AFFINITY_INFO, SYSTEM_OFF, FEATURES] {
        let features = call(FEATURES, [function, 0, 0]);
        check!(report: features == 0 => "features of {function:#x}: {features}");
    }
    let none = call(FEATURES, [0x8400_0777, 0, 0]);
    check!(report: none == -1 => "features of nothing: {none}");
    let itself = call(AFFINITY_INFO, [0, 0, 0]);
    check!(report: itself == 0 => "this processor is on: {itself}");
    check!(report: is_off(1) && is_off(2) => "the others are off");
    let nowhere = call(AFFINITY_INFO, [0x0f00, 0, 0]);
    check!(report: nowhere == INVALID_PARAMETERS => "of no processor: {nowhere}");
    let itself = start(0);
    check!(report: itself == ALREADY_ON => "a start of itself: {itself}");
    let nowhere = start(0x0f00);
    check!(report: nowhere == INVALID_PARAMETERS => "a start of no processor: {nowhere}");

    let began = start(1);
    check!(report: began == 0 => "a start: {began}");
    let (mut twice, mut late, mut again) = (0, 0, 0);
    for round in 1..=ROUNDS {
        WON.store(0, Ordering::Release);
        ROUND.store(round, Ordering::Release);
        race();
        if !soon(|| DONE.load(Ordering::Acquire) == round) {
            late += 1;
            break;
        }
        twice += u32::from(WON.load(Ordering::Acquire) != 1);
        if !soon(|| STARTED.load(Ordering::Acquire) >= round) {
            late += 1;
            break;
        }
        // It runs.
        again += u32::from(start(2) != ALREADY_ON);
        LEAVE.store(STARTED.load(Ordering::Acquire), Ordering::Release);
    }
    let (odd, started) = (ODD.load(Ordering::Relaxed), STARTED.load(Ordering::Relaxed));
    check!(report: twice == 0
        => "{ROUNDS} races to start a processor: {twice} were won twice, {started} starts");
    check!(report: late == 0 => "races without an end: {late}");
    check!(report: odd == 0 => "odd answers in the races: {odd}");
    check!(report: again == 0
        => "starts of what runs, with another answer than ALREADY_ON: {again}");
    STOP.store(1, Ordering::Release);
    let gone = soon(|| is_off(1)) && soon(|| is_off(2));
    check!(report: gone => "both are off again");
    report.end()
}

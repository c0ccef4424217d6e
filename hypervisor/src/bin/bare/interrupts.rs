//! Interrupts: the interrupt controller, the timers, and interrupts that processors send each
//! other.

use core::arch::asm;
use core::hint::spin_loop;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::head::{CPUS, Report, check, number};

/// The distributor, and the redistributors: 128 KiB for each processor.
const DISTRIBUTOR: u64 = 0x800_0000;
const REDISTRIBUTORS: u64 = 0x80a_0000;

/// The interrupts of the timers (BSA, 3.8.1), and one that is sent.
const VIRTUAL: u32 = 27;
const PHYSICAL: u32 = 30;
const SENT: u32 = 5;

/// How often each was taken, and when last.
static TAKEN: [[AtomicU32; 32]; CPUS] = [const { [const { AtomicU32::new(0) }; 32] }; CPUS];
static WHEN: AtomicU64 = AtomicU64::new(0);

/// A system register.
macro_rules! read {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reads a register.
        unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack)) };
        value
    }};
}

/// A system register of the interrupt controller or a timer gets this value.
macro_rules! write {
    ($name:literal, $value:expr) => {{
        let value = u64::from($value);
        // SAFETY: a register of interrupts, which this file alone uses.
        unsafe { asm!(concat!("msr ", $name, ", {}"), "isb", in(reg) value, options(nostack)) }
    }};
}

/// A register of the interrupt controller.
fn register(at: u64) -> *mut u32 {
    ptr::with_exposed_provenance_mut(at as usize)
}

/// Takes one: of a timer, it is switched off.
pub fn take() {
    let which = read!("s3_0_c12_c12_0") as u32; // ICC_IAR1_EL1
    match which {
        VIRTUAL => {
            WHEN.store(read!("cntvct_el0"), Ordering::Relaxed);
            write!("cntv_ctl_el0", 0u32);
        }
        PHYSICAL => {
            WHEN.store(read!("cntpct_el0"), Ordering::Relaxed);
            write!("cntp_ctl_el0", 0u32);
        }
        _ => {}
    }
    if let Some(taken) = TAKEN[number()].get(which as usize) {
        taken.fetch_add(1, Ordering::Release);
        write!("s3_0_c12_c12_1", which); // ICC_EOIR1_EL1
    }
}

fn taken(which: u32) -> u32 {
    TAKEN[number()][which as usize].load(Ordering::Acquire)
}

/// Lets interrupts to this processor.
pub fn prepare() {
    let redistributor = REDISTRIBUTORS + 0x2_0000 * number() as u64;
    let private = redistributor + 0x1_0000;
    // SAFETY: registers of the interrupt controller (IHI 0069, 12.11): awake; group 1, enabled, of
    // one priority; the distributor has affinity routing and group 1 enabled.
    unsafe {
        let waker = register(redistributor + 0x14);
        waker.write_volatile(waker.read_volatile() & !2);
        while waker.read_volatile() & 4 != 0 {
            spin_loop();
        }
        register(private + 0x80).write_volatile(!0);
        for word in 0..8 {
            register(private + 0x400 + 4 * word).write_volatile(0x8080_8080);
        }
        register(private + 0x100).write_volatile(1 << VIRTUAL | 1 << PHYSICAL | 1 << SENT);
        register(DISTRIBUTOR).write_volatile(1 << 4 | 1 << 1 | 1);
    }
    write!("s3_0_c12_c12_5", 7u32); // ICC_SRE_EL1
    write!("s3_0_c4_c6_0", 0xf0u32); // ICC_PMR_EL1
    write!("s3_0_c12_c12_7", 1u32); // ICC_IGRPEN1_EL1
}

/// Interrupts are taken while this runs.
pub fn open<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: interrupts are handled, and change no register of the program.
    unsafe { asm!("msr daifclr, #2", options(nostack)) };
    let done = run();
    // SAFETY: as before.
    unsafe { asm!("msr daifset, #2", options(nostack)) };
    done
}

/// Waits for an interrupt, as often as it takes.
fn wait_for(is_there: impl Fn() -> bool) -> bool {
    let end = read!("cntpct_el0") + 5 * read!("cntfrq_el0");
    while !is_there() {
        if read!("cntpct_el0") > end {
            return false;
        }
        spin_loop();
    }
    true
}

/// Another processor sends an interrupt to the first.
pub fn send_to_first() {
    // ICC_SGI1R_EL1: the first of a list of targets.
    // SAFETY: a register of the interrupt controller.
    unsafe {
        asm!("msr s3_0_c12_c11_5, {}", "isb", in(reg) u64::from(SENT) << 24 | 1, options(nostack))
    };
}

/// The checks.
pub fn run() -> u32 {
    let mut report = Report::new("timer");
    prepare();
    let frequency = read!("cntfrq_el0");
    check!(report: frequency != 0 => "the frequency is {frequency}");
    let (first, second, third) = (read!("cntpct_el0"), read!("cntvct_el0"), read!("cntpct_el0"));
    check!(report: first <= second && second <= third
        => "the virtual counter is the physical one: {first} {second} {third}");
    let delay = frequency / 200;
    for (name, which) in [("virtual", VIRTUAL), ("physical", PHYSICAL)] {
        let before = taken(which);
        let due = if which == VIRTUAL {
            let due = read!("cntvct_el0") + delay;
            write!("cntv_cval_el0", due);
            write!("cntv_ctl_el0", 1u32);
            due
        } else {
            let due = read!("cntpct_el0") + delay;
            write!("cntp_cval_el0", due);
            write!("cntp_ctl_el0", 1u32);
            due
        };
        let came = open(|| wait_for(|| taken(which) != before));
        let late = WHEN.load(Ordering::Relaxed).wrapping_sub(due);
        check!(report: came => "the {name} timer's interrupt is taken");
        check!(report: came && late < 5 * frequency
            => "the {name} timer is not early: {late} ticks late");
        // Masked at the timer: the condition holds, and there is no interrupt.
        let before = taken(which);
        let control = if which == VIRTUAL {
            write!("cntv_ctl_el0", 3u32);
            read!("cntv_ctl_el0")
        } else {
            write!("cntp_ctl_el0", 3u32);
            read!("cntp_ctl_el0")
        };
        open(|| (0..1000).for_each(|_| spin_loop()));
        check!(report: control == 7 && taken(which) == before
            => "the {name} timer, masked: control {control:#x}, {} interrupts",
                taken(which) - before);
        if which == VIRTUAL {
            write!("cntv_ctl_el0", 0u32);
        } else {
            write!("cntp_ctl_el0", 0u32);
        }
    }
    // A wait ends with an interrupt that is masked.
    let before = taken(VIRTUAL);
    write!("cntv_cval_el0", read!("cntvct_el0") + delay);
    write!("cntv_ctl_el0", 1u32);
    // SAFETY: the timer ends it.
    unsafe { asm!("wfi", options(nostack)) };
    let pending = read!("cntv_ctl_el0");
    open(|| wait_for(|| taken(VIRTUAL) != before));
    check!(report: taken(VIRTUAL) == before + 1
        => "a wait for an interrupt ends, control {pending:#x}, and it is taken");
    // To itself, and counted once.
    let before = taken(SENT);
    send_to_first();
    open(|| wait_for(|| taken(SENT) != before));
    check!(report: taken(SENT) == before + 1 => "an interrupt that it sends to itself");
    // To it, from another processor.
    let before = taken(SENT);
    let came = open(|| {
        crate::psci::have(1, crate::psci::SEND);
        wait_for(|| taken(SENT) != before)
    });
    check!(report: came => "an interrupt from another processor");
    report.end()
}

//! How a processor comes here, and what an exception does: its registers are kept, and it goes on
//! behind what has caused it.

use core::arch::global_asm;
use core::fmt::{self, Write as _};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::interrupts;
use crate::payload::console;

/// The most processors.
pub const CPUS: usize = 4;

// Each processor has a stack of 32 KiB, and TPIDR_EL1 is its number. MAIR: write-back,
// Device-nGnRE, not cached. TCR: 39 bits, walks cacheable and inner shareable, 40 bits of output.
// SCTLR: MMU and caches, what is one where features are missing.
global_asm!(
    crate::payload::head!(),
    "start:",
    "mov x0, xzr",
    ".global secondary",
    "secondary:", // x0: its number
    "msr tpidr_el1, x0",
    "msr spsel, #1",
    "adrp x1, stacks",
    "add x2, x0, #1",
    "add x1, x1, x2, lsl #15",
    "mov sp, x1",
    "adrp x1, vectors",
    "add x1, x1, :lo12:vectors",
    "msr vbar_el1, x1",
    "ldr x1, ={mair}",
    "msr mair_el1, x1",
    "ldr x1, ={tcr}",
    "msr tcr_el1, x1",
    "adrp x1, {root}",
    "add x1, x1, :lo12:{root}",
    "msr ttbr0_el1, x1",
    "mov x1, #0x3 << 20", // floating point
    "msr cpacr_el1, x1",
    "dsb sy",
    "ic iallu",
    "tlbi vmalle1",
    "dsb nsh",
    "isb",
    "ldr x1, ={sctlr}",
    "msr sctlr_el1, x1",
    "isb",
    "cbnz x0, 1f",
    "bl {main}",
    "1: bl {other}",
    ".balign 2048",
    "vectors:",
    ".set number, 0",
    ".rept 16",
    ".balign 128",
    "sub sp, sp, #272",
    "stp x0, x1, [sp]",
    "mov x0, #number",
    "b exception",
    ".set number, number + 1",
    ".endr",
    "exception:",
    ".irp register, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
    "str x\\register, [sp, #8 * \\register]",
    ".endr",
    "mov x1, sp",
    "bl {exception}",
    ".irp register, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
    "ldr x\\register, [sp, #8 * \\register]",
    ".endr",
    "ldp x0, x1, [sp], #272",
    "eret",
    mair = const 0xff_u64 | 0x04 << 8 | 0x44 << 16,
    tcr = const 25_u64 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2 << 32,
    sctlr = const SCTLR,
    root = sym crate::pages::ROOT,
    main = sym crate::main,
    other = sym crate::other,
    exception = sym exception,
);

/// SCTLR_EL1: MMU and caches, EL0 may maintain caches, and what is one where features are missing;
/// PAN is set by exceptions.
pub const SCTLR: u64 = (0x30d0_0800 | 1 | 1 << 2 | 1 << 12 | 1 << 26 | 1 << 15) & !(1 << 23);

unsafe extern "C" {
    /// The first instruction of further processors.
    pub fn secondary();
}

/// The number of this processor.
pub fn number() -> usize {
    let number: usize;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mrs {}, tpidr_el1", out(reg) number, options(nomem, nostack)) };
    number % CPUS
}

/// The last exception that was not an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// Which of the sixteen vectors.
    pub vector: u64,
    /// The syndrome.
    pub esr: u64,
    /// The address, if there is one.
    pub far: u64,
    /// The place.
    pub elr: u64,
    /// The state before.
    pub spsr: u64,
    /// The state in the handler: DAIF, PAN, TCO, and SP.
    pub state: u64,
}

struct Last {
    count: AtomicU32,
    fields: [AtomicU64; 6],
}

static LAST: [Last; CPUS] =
    [const { Last { count: AtomicU32::new(0), fields: [const { AtomicU64::new(0) }; 6] } }; CPUS];

/// The address to which a program at EL0 that has made its call comes back; 0 if there is none.
pub static BACK: AtomicU64 = AtomicU64::new(0);

/// A system register, or a special-purpose one.
macro_rules! register {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reads a register.
        unsafe { core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack)) };
        value
    }};
}

extern "C" fn exception(vector: u64, registers: &mut [u64; 31]) {
    if vector % 4 == 1 {
        interrupts::take();
        return;
    }
    let (esr, elr) = (register!("esr_el1"), register!("elr_el1"));
    let pan = match register!("id_aa64mmfr1_el1") >> 20 & 0xf {
        0 => 0,
        _ => register!("s3_0_c4_c2_3"),
    };
    let tco = match register!("id_aa64pfr1_el1") >> 8 & 0xf {
        0 => 0,
        _ => register!("s3_3_c4_c2_7"),
    };
    let state = register!("daif") | pan | tco | register!("spsel");
    let last = &LAST[number()];
    let fields = [vector, esr, register!("far_el1"), elr, register!("spsr_el1"), state];
    for (field, value) in last.fields.iter().zip(fields) {
        field.store(value, Ordering::Relaxed);
    }
    last.count.fetch_add(1, Ordering::Release);
    // Behind it; a call is behind already, and a fetch goes back to where it was called from.
    let (back, class) = (BACK.load(Ordering::Relaxed), esr >> 26);
    let next = match class {
        _ if vector / 4 >= 2 && back != 0 => back,
        0x15 => elr,
        0x20 | 0x21 => registers[30],
        _ => elr + 4,
    };
    // SAFETY: the exception goes back to where the program goes on.
    unsafe {
        core::arch::asm!("msr elr_el1, {}", in(reg) next, options(nostack));
        if next == back {
            // EL1 with its own stack, all masked.
            core::arch::asm!("msr spsr_el1, {}", in(reg) 0x3c5_u64, options(nostack));
        }
    }
}

/// Runs something, and returns the exception that it has made, if it has.
pub fn attempt(what: impl FnOnce()) -> Option<Trap> {
    let last = &LAST[number()];
    let before = last.count.load(Ordering::Acquire);
    what();
    if last.count.load(Ordering::Acquire) == before {
        return None;
    }
    let [vector, esr, far, elr, spsr, state] =
        last.fields.each_ref().map(|field| field.load(Ordering::Relaxed));
    Some(Trap { vector, esr, far, elr, spsr, state })
}

/// Counts one check in a report, and says it.
macro_rules! check {
    ($report:ident: $is_right:expr => $($what:tt)+) => {
        $report.check($is_right, format_args!($($what)+))
    };
}
pub(crate) use check;

/// The findings of one group of checks.
pub struct Report {
    group: &'static str,
    wrong: u32,
}

impl Report {
    /// Nothing yet.
    pub fn new(group: &'static str) -> Self {
        Self { group, wrong: 0 }
    }

    /// Counts one check, and says it. See `check!`.
    pub fn check(&mut self, is_right: bool, what: fmt::Arguments<'_>) {
        let verdict = if is_right { "ok" } else { "WRONG" };
        self.wrong += u32::from(!is_right);
        let _ = writeln!(console(), "bare: {}: {verdict}: {what}", self.group);
    }

    /// How many were wrong.
    pub fn end(self) -> u32 {
        self.wrong
    }
}

//! One vCPU of several: what others may ask of it, and what is kept of it while it does not run.
//!
//! The hypervisor uses no registers of EL1, no floating point and no list registers: they hold what
//! the guest has in them until another is loaded.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use aarch64_rt::RegisterState;

use crate::cpu;
use crate::exits::Saved;

/// What a vCPU is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// It is off.
    Off,
    /// It is being started.
    Pending,
    /// It waits for its turn.
    Ready,
    /// It runs, or is being loaded or stored.
    Running,
    /// It waits for an interrupt.
    Waiting,
}

impl State {
    const fn of(number: u8) -> Self {
        match number {
            1 => Self::Pending,
            2 => Self::Ready,
            3 => Self::Running,
            4 => Self::Waiting,
            _ => Self::Off,
        }
    }
}

/// A vCPU.
pub struct Vcpu {
    /// The number of its guest.
    pub guest: usize,
    /// Its number in it.
    pub number: usize,
    state: AtomicU8,
    /// The processor that it is on, while it runs.
    pub home: AtomicUsize,
    /// When its timer is due, while it does not run.
    pub due: AtomicU64,
    /// Interrupts that it sends to itself or others, one bit each.
    pub pending: AtomicU32,
    /// Which of its own interrupts are on.
    pub enabled: AtomicU32,
    context: UnsafeCell<Context>,
}

// SAFETY: the context is reached by the processor that has claimed the vCPU.
unsafe impl Sync for Vcpu {}

/// On no processor.
pub const NOWHERE: usize = usize::MAX;

impl Vcpu {
    /// One that is off.
    pub fn new(guest: usize, number: usize) -> Self {
        Self {
            guest,
            number,
            state: AtomicU8::new(State::Off as u8),
            home: AtomicUsize::new(NOWHERE),
            due: AtomicU64::new(u64::MAX),
            pending: AtomicU32::new(0),
            enabled: AtomicU32::new(0xffff),
            context: UnsafeCell::new(Context::new()),
        }
    }

    /// What it is doing.
    pub fn state(&self) -> State {
        State::of(self.state.load(Ordering::Acquire))
    }

    /// Claims it, if it is in this state. Whether it was.
    pub fn claim(&self, from: State, to: State) -> bool {
        // Acquire: what the one before has stored of it.
        let claimed =
            self.state
                .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    }

    /// Says what it is doing now. The caller has claimed it.
    pub fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// What is kept of it.
    ///
    /// # Safety
    /// 1. The caller has claimed it, and has no other reference.
    #[expect(clippy::mut_from_ref, reason = "the claim is what makes it exclusive")]
    pub unsafe fn context(&self) -> &mut Context {
        // SAFETY: the claim (1.).
        unsafe { &mut *self.context.get() }
    }
}

macro_rules! registers {
    ($const:ident, $read:ident, $write:ident: $($name:literal),* $(,)?) => {
        const $const: usize = [$($name),*].len();

        fn $read(to: &mut [u64; $const]) {
            let mut at = to.iter_mut();
            $(
                let value: u64;
                // SAFETY: reads a register of the guest's.
                unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack, preserves_flags)) };
                if let Some(at) = at.next() {
                    *at = value;
                }
            )*
        }

        fn $write(from: &[u64; $const]) {
            let mut at = from.iter();
            $(
                let value = at.next().copied().unwrap_or(0);
                // SAFETY: a register of the guest's, which the hypervisor does not go by.
                unsafe { asm!(concat!("msr ", $name, ", {}"), in(reg) value, options(nostack, preserves_flags)) };
            )*
        }
    };
}

registers! {
    OF_EL1, read_el1, write_el1:
    "sctlr_el1", "cpacr_el1", "ttbr0_el1", "ttbr1_el1", "tcr_el1", "esr_el1", "afsr0_el1", "afsr1_el1", "far_el1",
    "mair_el1", "amair_el1", "vbar_el1", "contextidr_el1", "tpidr_el0", "tpidr_el1", "tpidrro_el0", "cntkctl_el1",
    "par_el1", "sp_el0", "sp_el1", "elr_el1", "spsr_el1", "csselr_el1", "cntv_cval_el0", "cntv_ctl_el0",
}
/// `CNTV_CVAL_EL0` and `CNTV_CTL_EL0` of them.
const CVAL: usize = OF_EL1 - 2;
const CTL: usize = OF_EL1 - 1;

registers! {
    // APIAKey, APIBKey, APDAKey, APDBKey, APGAKey.
    KEYS, read_keys, write_keys:
    "s3_0_c2_c1_0", "s3_0_c2_c1_1", "s3_0_c2_c1_2", "s3_0_c2_c1_3", "s3_0_c2_c2_0", "s3_0_c2_c2_1",
    "s3_0_c2_c2_2", "s3_0_c2_c2_3", "s3_0_c2_c3_0", "s3_0_c2_c3_1",
}
registers! {
    // ICH_VMCR, ICH_AP0R0, ICH_AP1R0, and four list registers.
    INTERFACE, read_interface, write_interface:
    "s3_4_c12_c11_7", "s3_4_c12_c8_0", "s3_4_c12_c9_0",
    "s3_4_c12_c12_0", "s3_4_c12_c12_1", "s3_4_c12_c12_2", "s3_4_c12_c12_3",
}

global_asm!(
    ".arch_extension fp",
    ".arch_extension simd",
    "store_floats:",
    "stp q0, q1, [x0, #0]",
    "stp q2, q3, [x0, #32]",
    "stp q4, q5, [x0, #64]",
    "stp q6, q7, [x0, #96]",
    "stp q8, q9, [x0, #128]",
    "stp q10, q11, [x0, #160]",
    "stp q12, q13, [x0, #192]",
    "stp q14, q15, [x0, #224]",
    "stp q16, q17, [x0, #256]",
    "stp q18, q19, [x0, #288]",
    "stp q20, q21, [x0, #320]",
    "stp q22, q23, [x0, #352]",
    "stp q24, q25, [x0, #384]",
    "stp q26, q27, [x0, #416]",
    "stp q28, q29, [x0, #448]",
    "stp q30, q31, [x0, #480]",
    "mrs x1, fpcr",
    "mrs x2, fpsr",
    "str x1, [x0, #512]",
    "str x2, [x0, #520]",
    "ret",
    "load_floats:",
    "ldp q0, q1, [x0, #0]",
    "ldp q2, q3, [x0, #32]",
    "ldp q4, q5, [x0, #64]",
    "ldp q6, q7, [x0, #96]",
    "ldp q8, q9, [x0, #128]",
    "ldp q10, q11, [x0, #160]",
    "ldp q12, q13, [x0, #192]",
    "ldp q14, q15, [x0, #224]",
    "ldp q16, q17, [x0, #256]",
    "ldp q18, q19, [x0, #288]",
    "ldp q20, q21, [x0, #320]",
    "ldp q22, q23, [x0, #352]",
    "ldp q24, q25, [x0, #384]",
    "ldp q26, q27, [x0, #416]",
    "ldp q28, q29, [x0, #448]",
    "ldp q30, q31, [x0, #480]",
    "ldr x1, [x0, #512]",
    "ldr x2, [x0, #520]",
    "msr fpcr, x1",
    "msr fpsr, x2",
    "ret",
);

unsafe extern "C" {
    fn store_floats(to: *mut Floats);
    fn load_floats(from: *const Floats);
}

/// Vectors, and how they are computed with.
#[repr(C, align(16))]
struct Floats([u64; 66]);

/// What is kept of a vCPU while it does not run.
pub struct Context {
    /// The general registers.
    pub registers: [u64; 31],
    /// Where it goes on, and in which state.
    pub elr: u64,
    /// See `elr`.
    pub spsr: u64,
    el1: [u64; OF_EL1],
    keys: [u64; KEYS],
    interface: [u64; INTERFACE],
    floats: Floats,
}

/// Whether there is pointer authentication, by any algorithm.
fn has_keys() -> bool {
    use arm_sysregs::el1::accessors::{read_id_aa64isar1_el1, read_id_aa64isar2_el1};
    read_id_aa64isar1_el1().bits() & 0xff00_0ff0 != 0
        || read_id_aa64isar2_el1().bits() & 0xff00 != 0
}

impl Context {
    const fn new() -> Self {
        Self {
            registers: [0; 31],
            elr: 0,
            spsr: 0,
            el1: [0; OF_EL1],
            keys: [0; KEYS],
            interface: [0; INTERFACE],
            floats: Floats([0; 66]),
        }
    }

    /// It starts here: with its MMU off, interrupts masked, and these in its first registers.
    pub fn start(&mut self, entry: u64, arguments: [u64; 2]) {
        *self = Self::new();
        self.registers[..2].copy_from_slice(&arguments);
        self.elr = entry;
        self.spsr = 0xf << 6 | 0b0101;
        self.el1[0] = cpu::SCTLR_EL1;
    }

    /// When its timer is due, if it is.
    pub fn due(&self) -> u64 {
        match self.el1[CTL] & 3 {
            1 => self.el1[CVAL],
            _ => u64::MAX,
        }
    }

    /// Takes the registers from where an exception has put them.
    pub fn take(&mut self, state: &RegisterState, saved: &Saved) {
        self.registers[..19].copy_from_slice(&state.registers);
        self.registers[19..29].copy_from_slice(saved);
        self.registers[29..].copy_from_slice(&[state.fp, state.sp]);
        (self.elr, self.spsr) = (state.elr as u64, state.spsr);
    }

    /// Puts them where the exception returns to.
    pub fn put(&self, state: &mut RegisterState, saved: &mut Saved) {
        state.registers.copy_from_slice(&self.registers[..19]);
        saved.copy_from_slice(&self.registers[19..29]);
        (state.fp, state.sp) = (self.registers[29], self.registers[30]);
        (state.elr, state.spsr) = (self.elr as usize, self.spsr);
    }

    /// Stores what the processor still holds of it.
    pub fn store(&mut self) {
        read_el1(&mut self.el1);
        read_interface(&mut self.interface);
        if has_keys() {
            read_keys(&mut self.keys);
        }
        // SAFETY: the area is large enough.
        unsafe { store_floats(&raw mut self.floats) };
    }

    /// Loads that.
    pub fn load(&self, affinity: u64) {
        write_el1(&self.el1);
        write_interface(&self.interface);
        if has_keys() {
            write_keys(&self.keys);
        }
        // SAFETY: registers that the hypervisor does not use.
        unsafe {
            load_floats(&raw const self.floats);
            asm!("msr vmpidr_el2, {}", in(reg) 1 << 31 | affinity, options(nostack, preserves_flags));
        }
    }
}

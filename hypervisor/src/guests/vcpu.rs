//! One vCPU of several: what others may ask of it, and what is kept of it while it does not run.
//!
//! The hypervisor uses no registers of EL1, no floating point and no list registers: they hold what
//! the guest has in them until another is loaded.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::cpu;
use crate::trapped::Trapped;

/// The state of a vCPU.
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

    /// Returns its state.
    pub fn state(&self) -> State {
        State::of(self.state.load(Ordering::Acquire))
    }

    /// Claims it, if it is in this state. Whether it was.
    pub fn claim(&self, from: State, to: State) -> bool {
        // Acquire: what the one before has stored of it.
        let claimed =
            self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    }

    /// Changes its state. The caller has claimed it.
    pub fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Returns its registers.
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
                unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value,
                    options(nostack, preserves_flags)) };
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
                unsafe { asm!(concat!("msr ", $name, ", {}"), in(reg) value,
                    options(nostack, preserves_flags)) };
            )*
        }
    };
}

registers! {
    OF_EL1, read_el1, write_el1:
    "sctlr_el1", "cpacr_el1", "ttbr0_el1", "ttbr1_el1", "tcr_el1", "esr_el1", "afsr0_el1",
    "afsr1_el1", "far_el1",
    "mair_el1", "amair_el1", "vbar_el1", "contextidr_el1", "tpidr_el0", "tpidr_el1", "tpidrro_el0",
    "cntkctl_el1",
    "par_el1", "sp_el0", "sp_el1", "elr_el1", "spsr_el1", "csselr_el1", "cntv_cval_el0",
    "cntv_ctl_el0",
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
    ".macro floats instruction",
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
    "\\instruction q\\n, [x0, #16 * \\n]",
    ".endr",
    ".endm",
    "store_floats:",
    "floats str",
    "mrs x1, fpcr",
    "mrs x2, fpsr",
    "str x1, [x0, #512]",
    "str x2, [x0, #520]",
    "ret",
    "load_floats:",
    "floats ldr",
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

/// The registers of a vCPU that does not run.
pub struct Context {
    /// The general registers.
    pub registers: [u64; 31],
    /// The address at which it goes on.
    pub elr: u64,
    /// The state in which it goes on.
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

    /// Takes the registers from an exception.
    pub fn take(&mut self, trapped: &Trapped<'_>) {
        for (number, register) in (0..).zip(&mut self.registers) {
            *register = trapped.get(number);
        }
        (self.elr, self.spsr) = (trapped.state.elr as u64, trapped.state.spsr);
    }

    /// Puts the registers where the exception returns to.
    pub fn put(&self, trapped: &mut Trapped<'_>) {
        for (number, &register) in (0..).zip(&self.registers) {
            trapped.set(number, register);
        }
        (trapped.state.elr, trapped.state.spsr) = (self.elr as usize, self.spsr);
    }

    /// Stores the registers that the processor still holds.
    pub fn store(&mut self) {
        read_el1(&mut self.el1);
        read_interface(&mut self.interface);
        if has_keys() {
            read_keys(&mut self.keys);
        }
        // SAFETY: the area is large enough.
        unsafe { store_floats(&raw mut self.floats) };
    }

    /// Loads these registers.
    pub fn load(&self, affinity: u64) {
        write_el1(&self.el1);
        write_interface(&self.interface);
        if has_keys() {
            write_keys(&self.keys);
        }
        // SAFETY: registers that the hypervisor does not use.
        unsafe {
            load_floats(&raw const self.floats);
            asm!("msr vmpidr_el2, {}", in(reg) 1 << 31 | affinity,
                options(nostack, preserves_flags));
        }
    }
}

//! What brings the guest here: aborts of stage 2, and firmware calls. Nothing that a guest does
//! stops the hypervisor; what it may not do ends with an exception of its own, or an error code.

use core::arch::{asm, naked_asm};
use core::ptr;

use aarch64_rt::{ExceptionHandlers, RegisterState, RegisterStateRef};
use arm_sysregs::el1::accessors::{
    read_id_aa64pfr1_el1, read_sctlr_el1, read_vbar_el1, write_elr_el1, write_esr_el1,
    write_far_el1, write_spsr_el1,
};
use arm_sysregs::el1::registers::{ElrEl1, EsrEl1, FarEl1, SpsrEl1};
use arm_sysregs::el2::accessors::{read_esr_el2, read_far_el2, read_hpfar_el2};
use arm_sysregs::el2::registers::EsrEl2;
use tablewright::Ipa;
use tablewright::guest::Abort;
use tablewright_hypervisor_common::snapshot;

use crate::counters::Count;
use crate::guests::schedule::{self, Then};
use crate::guests::{self, devices, gic};
use crate::machine::{Machine, count};
use crate::vm::{Next, POISONED};
use crate::{features, firmware, world};

/// Where the guest writes a word when its load is at work, and reads one when it asks whether it
/// was copied; the machine has nothing there.
pub const BELL: u64 = 0xb00_0000;

struct Handlers;

aarch64_rt::exception_handlers!(Handlers);

/// Exception classes, DDI 0487 D24.2, ESR_EL2.
pub mod class {
    pub const WAIT: u8 = 0x01;
    pub const HVC: u8 = 0x16;
    pub const SMC: u8 = 0x17;
    pub const REGISTER: u8 = 0x18;
    pub const INSTRUCTION_ABORT: u8 = 0x20;
    pub const DATA_ABORT: u8 = 0x24;
    pub const UNKNOWN: u64 = 0;
}

/// An access of one register to one place, as the ISS of a data abort describes it (DDI 0487
/// D24.2).
pub struct Transfer {
    /// The binary logarithm of its bytes.
    pub size: u32,
    pub register: u64,
    pub is_write: bool,
}

impl Transfer {
    /// `None` for what is no data abort, or no access of this kind.
    pub fn new(esr: EsrEl2) -> Option<Self> {
        let iss = esr.iss();
        let is_described = esr.ec() == class::DATA_ABORT && iss >> 24 & 1 != 0;
        is_described.then_some(Self {
            size: iss >> 22 & 3,
            register: u64::from(iss >> 16 & 0x1f),
            is_write: iss >> 6 & 1 != 0,
        })
    }

    /// The same of a word.
    fn of_word(esr: EsrEl2) -> Option<Self> {
        Self::new(esr).filter(|transfer| transfer.size == 2)
    }
}

/// The registers that the startup code's handler does not save: x19 to x28.
pub type Saved = [u64; 10];

impl ExceptionHandlers for Handlers {
    #[unsafe(naked)]
    extern "C" fn sync_lower(state: RegisterStateRef<'_>) {
        naked_asm!(
            "stp x29, x30, [sp, #-96]!",
            "stp x19, x20, [sp, #16]",
            "stp x21, x22, [sp, #32]",
            "stp x23, x24, [sp, #48]",
            "stp x25, x26, [sp, #64]",
            "stp x27, x28, [sp, #80]",
            "add x1, sp, #16",
            "bl {exit}",
            "ldp x19, x20, [sp, #16]",
            "ldp x21, x22, [sp, #32]",
            "ldp x23, x24, [sp, #48]",
            "ldp x25, x26, [sp, #64]",
            "ldp x27, x28, [sp, #80]",
            "ldp x29, x30, [sp], #96",
            "ret",
            exit = sym exit,
        )
    }

    #[unsafe(naked)]
    extern "C" fn irq_lower(state: RegisterStateRef<'_>) {
        naked_asm!(
            "stp x29, x30, [sp, #-96]!",
            "stp x19, x20, [sp, #16]",
            "stp x21, x22, [sp, #32]",
            "stp x23, x24, [sp, #48]",
            "stp x25, x26, [sp, #64]",
            "stp x27, x28, [sp, #80]",
            "add x1, sp, #16",
            "bl {interrupted}",
            "ldp x19, x20, [sp, #16]",
            "ldp x21, x22, [sp, #32]",
            "ldp x23, x24, [sp, #48]",
            "ldp x25, x26, [sp, #64]",
            "ldp x27, x28, [sp, #80]",
            "ldp x29, x30, [sp], #96",
            "ret",
            interrupted = sym interrupted,
        )
    }

    extern "C" fn sync_current(state: RegisterStateRef<'_>) {
        panic!(
            "exception in the hypervisor, ESR {:#x}, FAR {:#x}, ELR {:#x}",
            read_esr_el2().bits(),
            read_far_el2().bits(),
            state.elr
        );
    }
}

extern "C" fn exit(mut state: RegisterStateRef<'_>, saved: &mut Saved) {
    let esr = read_esr_el2();
    // SAFETY: what is changed is where the guest goes on, and what it finds in its registers.
    let state = unsafe { state.get_mut() };
    if guests::are_several() {
        let then = of_several(state, saved, esr);
        return schedule::go_on(state, saved, then);
    }
    match esr.ec() {
        class::INSTRUCTION_ABORT | class::DATA_ABORT => abort(state, saved, esr),
        class::SMC => {
            // The preferred return address is that of the call.
            step(state);
            state.registers[0] = firmware::call(&state.registers);
        }
        // It executes a frame that was taken away.
        class::HVC if u64::from(esr.iss() & 0xffff) == POISONED => count(Count::Spoiled, 1),
        class::HVC => state.registers[0] = firmware::NOT_SUPPORTED,
        class::REGISTER if identify(state, saved, esr) => step(state),
        // A register or an instruction of a feature that is not let through.
        _ => raise(state, class::UNKNOWN << 26 | 1 << 25, None),
    }
}

/// An interrupt of the machine's, while one of several guests runs.
extern "C" fn interrupted(mut state: RegisterStateRef<'_>, saved: &mut Saved) {
    // SAFETY: another vCPU may go on where it was.
    let state = unsafe { state.get_mut() };
    let then = match gic::take(guests::crowd()) {
        true => Then::Yield,
        false => Then::On,
    };
    schedule::go_on(state, saved, then);
}

/// What brings one of several guests here, and what becomes of its vCPU.
fn of_several(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2) -> Then {
    match esr.ec() {
        class::INSTRUCTION_ABORT | class::DATA_ABORT => abort(state, saved, esr),
        class::SMC => {
            step(state);
            let (result, then) = devices::call(&state.registers);
            state.registers[0] = result;
            return then;
        }
        class::WAIT => {
            step(state);
            // ISS: WFI and not WFE, without a time.
            return match esr.iss() & 3 {
                0 => Then::Wait,
                _ => Then::Yield,
            };
        }
        class::HVC if u64::from(esr.iss() & 0xffff) == POISONED => count(Count::Spoiled, 1),
        class::HVC => state.registers[0] = firmware::NOT_SUPPORTED,
        class::REGISTER if identify(state, saved, esr) => step(state),
        class::REGISTER if devices::register(state, saved, esr) => {}
        _ => raise(state, class::UNKNOWN << 26 | 1 << 25, None),
    }
    Then::On
}

/// The instruction that brought the guest here is done: it goes on behind it, as after any other
/// (DDI 0487 D1.3.5): with no step pending (SS), and no branch before it (BTYPE).
pub fn step(state: &mut RegisterState) {
    state.elr = state.elr.wrapping_add(4);
    state.spsr &= !(1 << 21 | 3 << 10);
}

/// Answers a read of an identification register. Whether it was one.
fn identify(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2) -> bool {
    let field = |first: u32, bits: u32| u64::from(esr.iss()) >> first & ((1 << bits) - 1);
    // ISS of a trapped register (D24.2, ESR_EL2): op0, op1, CRn, and that it is read.
    let (crm, op2) = (field(1, 4), field(17, 3));
    if (field(20, 2), field(14, 3), field(10, 4), field(0, 1)) != (3, 0, 0, 1)
        || !(1..=7).contains(&crm)
    {
        return false;
    }
    let value = features::read(crm as u8, op2 as u8);
    set(state, saved, field(5, 5), value);
    true
}

// ---- Aborts ----

fn abort(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2) {
    let far = read_far_el2().bits();
    let abort = Abort::new(esr.bits());
    let in_walk = abort.is_some_and(|abort| abort.in_walk);
    let hpfar = match abort.is_none_or(|abort| abort.is_page_known()) {
        true => read_hpfar_el2().bits(),
        false => match translate(far) {
            Some(at) => at >> 8,
            // Stage 1 is not what it was any more: the guest tries again.
            None => return,
        },
    };
    let next = match abort.map(|abort| abort.fault(hpfar, far)) {
        Some(fault)
            if !in_walk
                && guests::are_several()
                && devices::access(state, saved, esr, fault.at.get()) =>
        {
            Next::Resume
        }
        Some(fault) if fault.at.get() == BELL && !in_walk => bell(state, saved, esr),
        Some(fault) => world().vm().fault(&fault),
        None => Next::Inject,
    };
    let next = match next {
        Next::Emulate(at) => emulate(state, saved, esr, at),
        next => next,
    };
    if next != Next::Resume {
        count(Count::Injected, 1);
        // A synchronous external abort: there is nothing at this address. In a walk, at its level.
        let bits = esr.bits();
        let status = if in_walk {
            0b01_0100 | bits & 3
        } else {
            0b01_0000
        };
        let kind = match esr.ec() {
            class::DATA_ABORT => bits & (1 << 6 | 1 << 8),
            _ => 0,
        };
        raise(
            state,
            bits & (0x3f << 26 | 1 << 25) | kind | status,
            Some(far),
        );
    }
}

/// An access of the guest's to the [bell](BELL): of a word, or there is nothing.
fn bell(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2) -> Next {
    match Transfer::of_word(esr) {
        None => return Next::Inject,
        Some(Transfer { is_write: true, .. }) => snapshot::ring(),
        Some(Transfer { register, .. }) => set(
            state,
            saved,
            register,
            snapshot::is_over::<Machine>().into(),
        ),
    }
    count(Count::Emulated, 1);
    step(state);
    Next::Resume
}

/// A register of the guest's.
pub fn get(state: &RegisterState, saved: &Saved, register: u64) -> u64 {
    match register as usize {
        register @ 0..=18 => state.registers[register],
        register @ 19..=28 => saved[register - 19],
        29 => state.fp,
        30 => state.sp,
        _ => 0,
    }
}

/// Sets a register of the guest's.
pub fn set(state: &mut RegisterState, saved: &mut Saved, register: u64, value: u64) {
    match register as usize {
        register @ 0..=18 => state.registers[register] = value,
        register @ 19..=28 => saved[register - 19] = value,
        29 => state.fp = value as _,
        30 => state.sp = value as _,
        _ => {}
    }
}

/// A write to a control register of a redistributor, by the guest. Those that say where in memory
/// it keeps its tables are ignored, and so is the bit that makes it use them (GICv3 specification,
/// IHI 0069, 12.11).
fn emulate(state: &mut RegisterState, saved: &Saved, esr: EsrEl2, at: Ipa) -> Next {
    const ENABLE_LPIS: u32 = 1;
    let Some(Transfer { register, .. }) = Transfer::of_word(esr) else {
        return Next::Inject;
    };
    let value = get(state, saved, register) as u32;
    count(Count::Emulated, 1);
    let value = match at.get() & 0xffff {
        // GICR_CTLR, GICR_WAKER.
        0x0000 => Some(value & !ENABLE_LPIS),
        0x0014 => Some(value),
        _ => None,
    };
    if let Some(value) = value {
        let register = ptr::with_exposed_provenance_mut::<u32>(at.get() as usize);
        // SAFETY: one of these two registers of one of the redistributors, which are mapped one to
        // one.
        unsafe { register.write_volatile(value) };
    }
    step(state);
    Next::Resume
}

/// What stage 1 of the guest makes of an address, to the page.
fn translate(address: u64) -> Option<u64> {
    let (kept, found): (u64, u64);
    // SAFETY: a look at a translation. The register that answers is the guest's, and gets back what
    // it held.
    unsafe {
        asm!(
            "mrs {kept}, par_el1",
            "at s1e1r, {address}",
            "isb",
            "mrs {found}, par_el1",
            "msr par_el1, {kept}",
            address = in(reg) address,
            kept = out(reg) kept,
            found = out(reg) found,
            options(nostack, preserves_flags),
        );
    }
    let _ = kept;
    (found & 1 == 0).then_some(found & 0x000f_ffff_ffff_f000)
}

/// Takes an exception to EL1, as the processor does (DDI 0487 D1.3.1): `esr` is as for one from a
/// lower level.
fn raise(state: &mut RegisterState, esr: u64, far: Option<u64>) {
    const SAME_LEVEL: u64 = 1 << 26;
    let from = state.spsr;
    // Where from: EL0 in AArch32, EL0, EL1 with SP_EL0, EL1.
    let (offset, same) = match from & 0x1f {
        mode if mode & 0x10 != 0 => (0x600, false),
        0b0000 => (0x400, false),
        0b0100 => (0x000, true),
        _ => (0x200, true),
    };
    let esr = if same && esr >> 26 & 0x3f != class::UNKNOWN {
        esr | SAME_LEVEL
    } else {
        esr
    };
    let sctlr = read_sctlr_el1().bits();
    // The conditions, DIT and PAN stay (AArch32 has DIT elsewhere); PAN is set unless
    // SCTLR_EL1.SPAN says so, SSBS is SCTLR_EL1.DSSBS, and TCO is set where there may be tags in
    // memory (FEAT_MTE2), whether or not they are the guest's.
    let pan = if sctlr >> 23 & 1 == 0 { 1 << 22 } else { 0 };
    let ssbs = if sctlr >> 44 & 1 != 0 { 1 << 12 } else { 0 };
    let tco = if read_id_aa64pfr1_el1().bits() >> 8 & 0xf >= 2 {
        1 << 25
    } else {
        0
    };
    let dit = if from & 0x10 != 0 { from << 3 } else { from };
    let kept = from & (0xf << 28 | 1 << 22) | dit & 1 << 24;
    // SAFETY: the registers into which the processor would put this, had it taken the exception to
    // EL1.
    unsafe {
        write_spsr_el1(SpsrEl1::from_bits_retain(from));
        write_elr_el1(ElrEl1::from_bits_retain(state.elr as u64));
        if let Some(far) = far {
            write_far_el1(FarEl1::from_bits_retain(far));
        }
    }
    write_esr_el1(EsrEl1::from_bits_retain(esr));
    state.spsr = kept | pan | ssbs | tco | 0xf << 6 | 0b0101;
    state.elr = read_vbar_el1().bits().wrapping_add(offset) as usize;
}

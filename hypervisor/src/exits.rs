//! Exits of the guest: aborts of stage 2, firmware calls, traps, and interrupts. Nothing that a
//! guest does stops the hypervisor; what it may not do ends with an exception of its own, or an
//! error code.

use core::arch::{asm, naked_asm};
use core::ptr;

use aarch64_rt::{ExceptionHandlers, RegisterStateRef};
use arm_sysregs::el1::accessors::{
    read_id_aa64pfr1_el1, read_sctlr_el1, read_vbar_el1, write_elr_el1, write_esr_el1,
    write_far_el1, write_spsr_el1,
};
use arm_sysregs::el1::registers::{ElrEl1, EsrEl1, FarEl1, SpsrEl1};
use arm_sysregs::el2::accessors::{read_esr_el2, read_far_el2, read_hpfar_el2};
use tablewright::Ipa;
use tablewright::guest::{Abort, Declined};
use tablewright_hypervisor_common::log;
use tablewright_hypervisor_common::vm::Next;

use crate::count::count;
use crate::counters::Count;
use crate::guests::crowd::{self, BELL};
use crate::guests::schedule::{self, Then};
use crate::guests::{devices, gic};
use crate::machine::Machine;
use crate::stage2::POISONED;
use crate::trapped::{Saved, SystemAccess, Transfer, Trapped, class};
use crate::world::{self, CONTROL_SLOT, PIECE_SLOT};
use crate::{features, firmware};

struct Handlers;

aarch64_rt::exception_handlers!(Handlers);

/// Saves the registers that the startup code leaves, and calls a function with where both are.
macro_rules! save_and_call {
    ($function:ident) => {
        naked_asm!(
            "stp x29, x30, [sp, #-96]!",
            "stp x19, x20, [sp, #16]; stp x21, x22, [sp, #32]; stp x23, x24, [sp, #48]",
            "stp x25, x26, [sp, #64]; stp x27, x28, [sp, #80]",
            "add x1, sp, #16",
            "bl {}",
            "ldp x19, x20, [sp, #16]; ldp x21, x22, [sp, #32]; ldp x23, x24, [sp, #48]",
            "ldp x25, x26, [sp, #64]; ldp x27, x28, [sp, #80]",
            "ldp x29, x30, [sp], #96",
            "ret",
            sym $function,
        )
    };
}

impl ExceptionHandlers for Handlers {
    #[unsafe(naked)]
    extern "C" fn sync_lower(state: RegisterStateRef<'_>) {
        save_and_call!(exit)
    }

    #[unsafe(naked)]
    extern "C" fn irq_lower(state: RegisterStateRef<'_>) {
        save_and_call!(interrupted)
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
    // SAFETY: the place where the guest goes on is changed, and its registers.
    let state = unsafe { state.get_mut() };
    let trapped = &mut Trapped { state, saved, esr };
    let are_several = crowd::are_several();
    let mut then = Then::On;
    match esr.ec() {
        class::INSTRUCTION_ABORT | class::DATA_ABORT => abort(trapped, are_several),
        class::SMC => {
            // The preferred return address is that of the call.
            trapped.step();
            let registers = &trapped.state.registers;
            trapped.state.registers[0] = if are_several {
                let result;
                (result, then) = devices::call(registers);
                result
            } else {
                firmware::call(registers)
            };
        }
        // ISS: WFI and not WFE, without a time.
        class::WAIT if are_several => {
            trapped.step();
            then = match esr.iss() & 3 {
                0 => Then::Wait,
                _ => Then::Yield,
            };
        }
        // It executes a frame that was taken away.
        class::HVC if u64::from(esr.iss() & 0xffff) == POISONED => count(Count::Spoiled, 1),
        class::HVC => trapped.state.registers[0] = firmware::NOT_SUPPORTED,
        class::REGISTER if identify(trapped, are_several) => trapped.step(),
        class::REGISTER if are_several && devices::register(trapped) => {}
        // A register or an instruction of a feature that is not let through.
        _ => raise(trapped, u64::from(class::UNKNOWN) << 26 | 1 << 25, None),
    }
    if are_several {
        schedule::go_on(trapped, then);
    }
}

/// Takes an interrupt of the machine's, while one of several guests runs.
extern "C" fn interrupted(mut state: RegisterStateRef<'_>, saved: &mut Saved) {
    let esr = read_esr_el2();
    // SAFETY: another vCPU may go on at its place.
    let state = unsafe { state.get_mut() };
    let then = match gic::take(crowd::crowd()) {
        true => Then::Yield,
        false => Then::On,
    };
    schedule::go_on(&mut Trapped { state, saved, esr }, then);
}

/// Answers a read of an identification register. Whether it was one.
fn identify(trapped: &mut Trapped<'_>, are_several: bool) -> bool {
    let access = SystemAccess::new(trapped.esr);
    let (3, 0, 0, crm @ 1..=7, op2) = access.name else {
        return false;
    };
    if access.is_read {
        let value = features::read(crm as u8, op2 as u8, are_several);
        trapped.set(access.register, value);
    }
    access.is_read
}

// ---- Aborts ----

fn abort(trapped: &mut Trapped<'_>, are_several: bool) {
    let (esr, far) = (trapped.esr, read_far_el2().bits());
    let abort = Abort::new(esr.bits());
    let in_walk = abort.is_some_and(|abort| abort.in_walk);
    let hpfar = match abort.is_none_or(|abort| abort.is_page_known()) {
        true => read_hpfar_el2().bits(),
        false => match translate(far) {
            Some(at) => at >> 8,
            // Stage 1 has changed: the guest tries again.
            None => return,
        },
    };
    let is_done = abort.map(|abort| abort.fault(hpfar, far)).is_some_and(|fault| {
        let at = fault.at.get();
        match in_walk {
            false if are_several && devices::access(trapped, at) => true,
            false if at == BELL && !are_several => bell(trapped),
            _ => match world::fault(&fault) {
                Next::Declined(Declined::Denied(slot))
                    if (CONTROL_SLOT..PIECE_SLOT).contains(&slot.id) =>
                {
                    emulate(trapped, fault.at)
                }
                next => next == Next::Resume,
            },
        }
    });
    if is_done {
        return;
    }
    count(Count::Injected, 1);
    // A synchronous external abort: there is nothing at this address. In a walk, at its level.
    let bits = esr.bits();
    let status = match in_walk {
        true => 0b01_0100 | bits & 3,
        false => 0b01_0000,
    };
    let kind = match esr.ec() {
        class::DATA_ABORT => bits & (1 << 6 | 1 << 8),
        _ => 0,
    };
    let esr = bits & (0x3f << 26 | 1 << 25) | kind | status;
    raise(trapped, esr, Some(far));
}

/// Carries out an access of a word to the [bell](BELL). `false` for any other access.
fn bell(trapped: &mut Trapped<'_>) -> bool {
    match Transfer::of_word(trapped.esr) {
        None => return false,
        Some(Transfer { is_write: true, .. }) => log::ring(),
        Some(Transfer { register, .. }) => {
            trapped.set(register, log::is_over::<Machine>().into());
        }
    }
    count(Count::Emulated, 1);
    trapped.step();
    true
}

/// Carries out a write of a word to a control register of a redistributor. Those that say where in
/// memory it keeps its tables are ignored, and so is the bit that makes it use them (GICv3
/// specification, IHI 0069, 12.11).
fn emulate(trapped: &mut Trapped<'_>, at: Ipa) -> bool {
    const ENABLE_LPIS: u32 = 1;
    let Some(Transfer { register, .. }) = Transfer::of_word(trapped.esr) else {
        return false;
    };
    let value = trapped.get(register) as u32;
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
    trapped.step();
    true
}

/// Translates an address by stage 1 of the guest, to the page.
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
fn raise(trapped: &mut Trapped<'_>, esr: u64, far: Option<u64>) {
    const SAME_LEVEL: u64 = 1 << 26;
    let state = &mut *trapped.state;
    let from = state.spsr;
    // From EL0 in AArch32, EL0, EL1 with SP_EL0, EL1.
    let (offset, same) = match from & 0x1f {
        mode if mode & 0x10 != 0 => (0x600, false),
        0b0000 => (0x400, false),
        0b0100 => (0x000, true),
        _ => (0x200, true),
    };
    let is_known = esr >> 26 & 0x3f != u64::from(class::UNKNOWN);
    let esr = esr | if same && is_known { SAME_LEVEL } else { 0 };
    let sctlr = read_sctlr_el1().bits();
    // The conditions, DIT and PAN stay (AArch32 has DIT elsewhere); PAN is set unless
    // SCTLR_EL1.SPAN says so, SSBS is SCTLR_EL1.DSSBS, and TCO is set where there may be tags in
    // memory (FEAT_MTE2), whether or not they are the guest's.
    let pan = if sctlr >> 23 & 1 == 0 { 1 << 22 } else { 0 };
    let ssbs = if sctlr >> 44 & 1 != 0 { 1 << 12 } else { 0 };
    let has_tags = read_id_aa64pfr1_el1().bits() >> 8 & 0xf >= 2;
    let tco = if has_tags { 1 << 25 } else { 0 };
    let dit = if from & 0x10 != 0 { from << 3 } else { from };
    let kept = from & (0xf << 28 | 1 << 22) | dit & 1 << 24;
    // SAFETY: the registers that the processor would set, had it taken the exception to EL1.
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

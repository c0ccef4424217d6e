//! What brings the guest here: aborts of stage 2, and firmware calls. Nothing that a guest does stops the hypervisor;
//! what it may not do ends with an exception of its own, or an error code.

use core::arch::{asm, naked_asm};
use core::ptr;

use aarch64_rt::{ExceptionHandlers, RegisterState, RegisterStateRef};
use arm_psci::{ErrorCode, Function};
use arm_sysregs::el1::accessors::{
    read_sctlr_el1, read_vbar_el1, write_elr_el1, write_esr_el1, write_far_el1, write_spsr_el1,
};
use arm_sysregs::el1::registers::{ElrEl1, EsrEl1, FarEl1, SpsrEl1};
use arm_sysregs::el2::accessors::{read_esr_el2, read_far_el2, read_hpfar_el2};
use smccc::psci::AffinityState;
use smccc::{Smc, psci};
use tablewright::Ipa;
use tablewright::guest::Fault;

use crate::counters::Count;
use crate::machine::{Mutex, count};
use crate::vm::{Next, POISONED};
use crate::{cpu, world};

struct Handlers;

aarch64_rt::exception_handlers!(Handlers);

/// Exception classes, DDI 0487 D24.2.39.
mod class {
    pub const HVC: u64 = 0x16;
    pub const SMC: u64 = 0x17;
    pub const INSTRUCTION_ABORT: u64 = 0x20;
    pub const DATA_ABORT: u64 = 0x24;
    pub const UNKNOWN: u64 = 0;
}

/// The registers that the startup code's handler does not save: x19 to x28.
type Saved = [u64; 10];

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

    extern "C" fn sync_current(state: RegisterStateRef<'_>) {
        panic!(
            "exception in the hypervisor, ESR {:#x}, FAR {:#x}, ELR {:#x}",
            read_esr_el2().bits(),
            read_far_el2().bits(),
            state.elr
        );
    }
}

extern "C" fn exit(mut state: RegisterStateRef<'_>, saved: &Saved) {
    let esr = read_esr_el2().bits();
    // SAFETY: what is changed is where the guest goes on, and what it finds in its registers.
    let state = unsafe { state.get_mut() };
    match esr >> 26 & 0x3f {
        class::INSTRUCTION_ABORT | class::DATA_ABORT => abort(state, saved, esr),
        class::SMC => {
            // The preferred return address is that of the call.
            state.elr = state.elr.wrapping_add(4);
            state.registers[0] = call(&state.registers);
        }
        // It executes a frame that was taken away.
        class::HVC if esr & 0xffff == POISONED => count(Count::Spoiled, 1),
        class::HVC => state.registers[0] = error(ErrorCode::NotSupported),
        // A register or an instruction of a feature that is not let through.
        _ => raise(state, class::UNKNOWN << 26 | 1 << 25, None),
    }
}

// ---- Aborts ----

fn abort(state: &mut RegisterState, saved: &Saved, esr: u64) {
    let far = read_far_el2().bits();
    let (status, in_walk) = (esr & 0x3f, esr >> 7 & 1 != 0);
    // For a permission fault outside of a walk HPFAR_EL2 says nothing (D24.2.61): the address is asked for.
    let is_permission = (0b00_1100..=0b00_1111).contains(&status);
    let hpfar = match is_permission && !in_walk {
        true => match translate(far) {
            Some(at) => at >> 8,
            // Stage 1 is not what it was any more: the guest tries again.
            None => return,
        },
        false => read_hpfar_el2().bits(),
    };
    let next = match Fault::arm64(esr, hpfar, far) {
        Some(fault) => world().vm.fault(&fault),
        None => Next::Inject,
    };
    let next = match next {
        Next::Emulate(at) => emulate(state, saved, esr, at),
        next => next,
    };
    if next != Next::Resume {
        count(Count::Injected, 1);
        // A synchronous external abort: there is nothing at this address. In a walk, at its level.
        let status = if in_walk {
            0b01_0100 | esr & 3
        } else {
            0b01_0000
        };
        let kind = esr
            & (1 << 6 | 1 << 8)
            & if esr >> 26 & 0x3f == class::DATA_ABORT {
                !0
            } else {
                0
            };
        raise(
            state,
            esr & (0x3f << 26 | 1 << 25) | kind | status,
            Some(far),
        );
    }
}

/// A write to a control register of a redistributor, by the guest. Those that say where in memory it keeps its tables are
/// ignored, and so is the bit that makes it use them (GICv3 specification, IHI 0069, 12.11).
fn emulate(state: &mut RegisterState, saved: &Saved, esr: u64, at: Ipa) -> Next {
    const ENABLE_LPIS: u32 = 1;
    // ISS of a data abort (D24.2.39): valid, a word, of this register.
    let (valid, size, register) = (
        esr >> 24 & 1 != 0,
        esr >> 22 & 3,
        (esr >> 16 & 0x1f) as usize,
    );
    if !valid || size != 2 {
        return Next::Inject;
    }
    let value = match register {
        0..=18 => state.registers[register],
        19..=28 => saved[register - 19],
        29 => state.fp,
        30 => state.sp,
        _ => 0,
    } as u32;
    count(Count::Emulated, 1);
    let value = match at.get() & 0xffff {
        // GICR_CTLR, GICR_WAKER.
        0x0000 => Some(value & !ENABLE_LPIS),
        0x0014 => Some(value),
        _ => None,
    };
    if let Some(value) = value {
        let register = ptr::with_exposed_provenance_mut::<u32>(at.get() as usize);
        // SAFETY: one of these two registers of one of the redistributors, which are mapped one to one.
        unsafe { register.write_volatile(value) };
    }
    state.elr = state.elr.wrapping_add(4);
    Next::Resume
}

/// What stage 1 of the guest makes of an address, to the page.
fn translate(address: u64) -> Option<u64> {
    let (kept, found): (u64, u64);
    // SAFETY: a look at a translation. The register that answers is the guest's, and gets back what it held.
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

/// Takes an exception to EL1, as the processor does (DDI 0487 D1.3.1): `esr` is as for one from a lower level.
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
    // The conditions, DIT, PAN and TCO stay, PAN is set unless SCTLR_EL1.SPAN says so, SSBS is SCTLR_EL1.DSSBS.
    let pan = if sctlr >> 23 & 1 == 0 { 1 << 22 } else { 0 };
    let ssbs = if sctlr >> 44 & 1 != 0 { 1 << 12 } else { 0 };
    let kept = from & (0xf << 28 | 1 << 25 | 1 << 24 | 1 << 22);
    // SAFETY: the registers into which the processor would put this, had it taken the exception to EL1.
    unsafe {
        write_spsr_el1(SpsrEl1::from_bits_retain(from));
        write_elr_el1(ElrEl1::from_bits_retain(state.elr as u64));
        if let Some(far) = far {
            write_far_el1(FarEl1::from_bits_retain(far));
        }
    }
    write_esr_el1(EsrEl1::from_bits_retain(esr));
    state.spsr = kept | pan | ssbs | 0xf << 6 | 0b0101;
    state.elr = read_vbar_el1().bits().wrapping_add(offset) as usize;
}

// ---- Firmware calls ----

/// What a call that failed returns: 32 bits, in a register of 64.
fn error(code: ErrorCode) -> u64 {
    i64::from(i32::from(code)) as u64
}

/// A call of the guest's to firmware: PSCI 1.0, as far as the specification (DEN0022) demands it, and nothing else.
fn call(registers: &[u64; 19]) -> u64 {
    count(Count::Calls, 1);
    let [function, first, second, third, ..] = *registers;
    let function = match Function::try_from(&[function, first, second, third]) {
        Ok(function) => function,
        Err(why) => return error(why.into()),
    };
    match function {
        Function::Version => 1 << 16,
        // No trusted system that would have to be moved.
        Function::MigrateInfoType => 2,
        Function::Features { .. } => match first as u32 {
            // Those below, by either convention.
            0x8400_0000..=0x8400_0004 | 0xc400_0001 | 0xc400_0003 | 0xc400_0004 => 0,
            0x8400_0006 | 0x8400_0008..=0x8400_000a => 0,
            _ => error(ErrorCode::NotSupported),
        },
        Function::AffinityInfo {
            mpidr,
            lowest_affinity_level: 0,
        } => match psci::affinity_info::<Smc>(mpidr.into(), psci::LowestAffinityLevel::All) {
            Ok(AffinityState::On) => 0,
            Ok(AffinityState::Off) => 1,
            Ok(AffinityState::OnPending) => 2,
            Err(why) => i64::from(why) as u64,
        },
        Function::AffinityInfo { .. } => error(ErrorCode::InvalidParameters),
        Function::CpuOn { target_cpu, entry } => {
            match start(
                target_cpu.into(),
                entry.entry_point_address(),
                entry.context_id(),
            ) {
                Ok(()) => 0,
                Err(why) => error(why),
            }
        }
        // A state that may lose registers may also be one that does not.
        Function::CpuSuspend { .. } => {
            // SAFETY: waits.
            unsafe { asm!("wfi", options(nomem, nostack, preserves_flags)) };
            0
        }
        Function::CpuOff => psci::cpu_off::<Smc>().map_or_else(|why| i64::from(why) as u64, |()| 0),
        Function::SystemOff => {
            psci::system_off::<Smc>().map_or_else(|why| i64::from(why) as u64, |()| 0)
        }
        Function::SystemReset => {
            psci::system_reset::<Smc>().map_or_else(|why| i64::from(why) as u64, |()| 0)
        }
        _ => error(ErrorCode::NotSupported),
    }
}

/// One processor is started at a time: starting it writes to its stack.
static STARTING: Mutex<()> = spin::mutex::SpinMutex::new(());

fn start(affinity: u64, entry: u64, argument: u64) -> Result<(), ErrorCode> {
    let world = world();
    let number = world
        .cpus
        .iter()
        .position(|&cpu| cpu == affinity)
        .ok_or(ErrorCode::InvalidParameters)?;
    if !world.vm.holds(entry) {
        return Err(ErrorCode::InvalidAddress);
    }
    let _one = STARTING.lock();
    // Only firmware knows whether it has left its stack.
    match psci::affinity_info::<Smc>(affinity, psci::LowestAffinityLevel::All) {
        Ok(AffinityState::Off) => {}
        Ok(AffinityState::OnPending) => return Err(ErrorCode::OnPending),
        _ => return Err(ErrorCode::AlreadyOn),
    }
    let run = move || {
        cpu::become_number(number);
        // SAFETY: the map that the first processor has made, and runs on; the guest's tables map what is the guest's.
        unsafe {
            cpu::load_map(world.map);
            cpu::enter(world.vm.guest.space().root(), entry, argument)
        }
    };
    launch(affinity, number, run)
}

/// Starts a processor that is off.
pub fn launch(
    affinity: u64,
    number: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<(), ErrorCode> {
    // SAFETY: the processor is off, so its stack is not in use; it is static, and is in both maps at one place.
    unsafe { aarch64_rt::start_core::<Smc, _, 16>(affinity, cpu::stack(number), run) }
        .map_err(|_| ErrorCode::InternalFailure)
}

//! Firmware calls of the guest's: PSCI 1.0, as far as the specification (DEN0022) demands it, and
//! nothing else.

use core::arch::asm;

use arm_psci::{ErrorCode, Function};
use smccc::psci::AffinityState;
use smccc::{Smc, psci};
use tablewright::Ipa;

use crate::count::count;
use crate::counters::Count;
use crate::cpu;
use crate::power::{State, Taken};
use crate::world::{Vcpu, world};

/// The result of a call that does not exist.
pub const NOT_SUPPORTED: u64 = error(ErrorCode::NotSupported);

/// The result of a call that failed: 32 bits, in a register of 64.
pub const fn error(code: ErrorCode) -> u64 {
    code as i32 as i64 as u64
}

/// Carries out a call of the guest's to firmware.
pub fn call(registers: &[u64; 19]) -> u64 {
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
        Function::Features { .. } => features(first),
        Function::AffinityInfo { mpidr, lowest_affinity_level: 0 } => match vcpu(mpidr.into()) {
            Some(vcpu) => match vcpu.power.state(|| is_off(vcpu.affinity)) {
                State::On | State::Leaving => 0,
                State::Off => 1,
                State::Pending => 2,
            },
            None => error(ErrorCode::InvalidParameters),
        },
        Function::AffinityInfo { .. } => error(ErrorCode::InvalidParameters),
        Function::CpuOn { target_cpu, entry } => {
            match start(target_cpu.into(), entry.entry_point_address(), entry.context_id()) {
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
        Function::CpuOff => leave(),
        Function::SystemOff => {
            psci::system_off::<Smc>().map_or_else(|why| i64::from(why) as u64, |()| 0)
        }
        Function::SystemReset => {
            psci::system_reset::<Smc>().map_or_else(|why| i64::from(why) as u64, |()| 0)
        }
        _ => error(ErrorCode::NotSupported),
    }
}

/// Whether there is this function.
pub fn features(function: u64) -> u64 {
    match function as u32 {
        // Those of `call`, by either convention.
        0x8400_0000..=0x8400_0004 | 0xc400_0001 | 0xc400_0003 | 0xc400_0004 => 0,
        0x8400_0006 | 0x8400_0008..=0x8400_000a => 0,
        _ => error(ErrorCode::NotSupported),
    }
}

/// The virtual CPU of this affinity.
fn vcpu(affinity: u64) -> Option<&'static Vcpu> {
    world().cpus.iter().find(|vcpu| vcpu.affinity == affinity)
}

/// Whether firmware says that a processor is off.
fn is_off(affinity: u64) -> bool {
    psci::affinity_info::<Smc>(affinity, psci::LowestAffinityLevel::All) == Ok(AffinityState::Off)
}

/// Switches this processor off.
fn leave() -> u64 {
    let power = world().cpus.get(cpu::number()).map(|vcpu| &vcpu.power);
    if let Some(power) = power {
        power.set(State::Leaving);
    }
    // It comes back only when it was refused.
    let refused = psci::cpu_off::<Smc>();
    if let Some(power) = power {
        power.set(State::On);
    }
    refused.map_or_else(|why| i64::from(why) as u64, |()| 0)
}

fn start(affinity: u64, entry: u64, argument: u64) -> Result<(), ErrorCode> {
    let world = world();
    let number = world
        .cpus
        .iter()
        .position(|vcpu| vcpu.affinity == affinity)
        .ok_or(ErrorCode::InvalidParameters)?;
    if !world.vm().memory.holds(Ipa::new(entry)) {
        return Err(ErrorCode::InvalidAddress);
    }
    let power = &world.cpus[number].power;
    power.claim(|| is_off(affinity)).map_err(|taken| match taken {
        Taken::Pending => ErrorCode::OnPending,
        Taken::On => ErrorCode::AlreadyOn,
    })?;
    let run = move || {
        cpu::become_number(number);
        // SAFETY: the map that the first processor has made, and runs on; the guest's tables map
        // what is the guest's.
        unsafe {
            cpu::load_map(world.map);
            world.cpus[number].power.set(State::On);
            cpu::enter(world.vm().guest.space().root(), entry, argument)
        }
    };
    launch(affinity, number, run).inspect_err(|_| power.set(State::Off))
}

/// Starts a processor that is off, and that no other starts.
pub fn launch(
    affinity: u64,
    number: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<(), ErrorCode> {
    // SAFETY: the caller alone starts this processor, and it is off, so its stack is not in use; it
    // is static, and is in both maps at one place.
    unsafe { aarch64_rt::start_core::<Smc, _, 16>(affinity, cpu::stack(number), run) }
        .map_err(|_| ErrorCode::InternalFailure)
}

//! The devices of one of several guests: a UART that only sends, the interrupt controller, a bell
//! that says when its time is over; system registers that are trapped; and firmware.

use arm_psci::{ErrorCode, Function};
use tablewright::Ipa;

use super::crowd::{BELL, crowd};
use super::schedule::{self, Then};
use super::vcpu::State;
use super::{gic, life};
use crate::count::count;
use crate::counters::Count;
use crate::firmware::{self, error};
use crate::trapped::{SystemAccess, Transfer, Trapped};
use crate::world::world;

/// The UART of the machine, and of a guest.
const UART: u64 = 0x900_0000;
/// The size of a page of registers.
const REGISTERS: u64 = 64 << 10;

/// Reads the UART (PL011, DDI 0183), which receives nothing, and always has room.
fn uart(offset: u64) -> u64 {
    match offset {
        0x18 => 0x90,
        // Peripheral and cell identification.
        0xfe0 => 0x11,
        0xfe4 => 0x10,
        0xfe8 => 0x14,
        0xff0 => 0x0d,
        0xff4 => 0xf0,
        0xff8 => 0x05,
        0xffc => 0xb1,
        _ => 0,
    }
}

/// Carries out an access of a guest's to a device, behind which the guest goes on. `false` if there
/// is none.
pub fn access(trapped: &mut Trapped<'_>, at: u64) -> bool {
    let Some(vcpu) = schedule::current() else {
        return false;
    };
    let (crowd, guest) = (crowd(), vcpu.guest);
    let Some(transfer) = Transfer::new(trapped.esr) else {
        return false;
    };
    let Transfer { size, register, .. } = transfer;
    let mask = u64::MAX >> (64 - (8 << size));
    let write = transfer.is_write.then(|| trapped.get(register) & mask);
    let offset = |from: u64, size: u64| at.checked_sub(from).filter(|&offset| offset < size);
    let found = if let Some(offset) = offset(UART, 4096) {
        if let (0, Some(byte)) = (offset, write) {
            crowd.guests[guest].line.lock().push(guest, byte as u8);
        }
        Some(uart(offset))
    } else if let Some(offset) = offset(crowd.distributor, REGISTERS) {
        gic::distributor(guest, offset, write)
    } else if at >= crowd.redistributors && at < UART {
        gic::redistributor(guest, at - crowd.redistributors, write)
    } else if at == BELL && size == 2 {
        Some(crowd.is_late().into())
    } else {
        None
    };
    let Some(found) = found else { return false };
    if write.is_none() {
        trapped.set(register, found & mask);
    }
    count(Count::Emulated, 1);
    trapped.step();
    true
}

/// Carries out an access to a trapped system register. `false` if there is no such register.
pub fn register(trapped: &mut Trapped<'_>) -> bool {
    let SystemAccess { name, register, is_read } = SystemAccess::new(trapped.esr);
    match name {
        // ICC_SGI1R_EL1.
        (3, 0, 12, 11, 5) if !is_read => {
            if let Some(vcpu) = schedule::current() {
                gic::send(vcpu, trapped.get(register));
            }
        }
        // Debugging and performance monitors: nothing is there, and nothing comes of it.
        (2, ..) | (3, 0 | 3, 9, 12..=14, _) | (3, 3, 14, 8..=15, _) => {
            if is_read {
                trapped.set(register, 0);
            }
        }
        _ => return false,
    }
    count(Count::Emulated, 1);
    trapped.step();
    true
}

/// Carries out a call of one of several guests to firmware: the result, and what the vCPU wants.
pub fn call(registers: &[u64; 19]) -> (u64, Then) {
    count(Count::Calls, 1);
    let Some(vcpu) = schedule::current() else {
        return (firmware::NOT_SUPPORTED, Then::On);
    };
    let [function, first, second, third, ..] = *registers;
    let function = match Function::try_from(&[function, first, second, third]) {
        Ok(function) => function,
        Err(why) => return (error(why.into()), Then::On),
    };
    let crowd = crowd();
    let find = |affinity: u64| crowd.of(vcpu.guest).get(affinity as usize);
    let result = match function {
        Function::Version => 1 << 16,
        Function::MigrateInfoType => 2,
        Function::Features { .. } => firmware::features(first),
        Function::AffinityInfo { mpidr, lowest_affinity_level: 0 } => {
            match find(mpidr.into()).map(|vcpu| vcpu.state()) {
                Some(State::Off) => 1,
                Some(State::Pending) => 2,
                Some(_) => 0,
                None => error(ErrorCode::InvalidParameters),
            }
        }
        Function::CpuOn { target_cpu, entry } => {
            let at = entry.entry_point_address();
            match find(target_cpu.into()) {
                None => error(ErrorCode::InvalidParameters),
                Some(_) if !world().vms[vcpu.guest].memory.holds(Ipa::new(at)) => {
                    error(ErrorCode::InvalidAddress)
                }
                Some(target) if target.claim(State::Off, State::Pending) => {
                    // SAFETY: it was just claimed (1.).
                    let context = unsafe { target.context() };
                    context.start(at, [entry.context_id(), 0]);
                    target.set(State::Ready);
                    0
                }
                Some(target) if target.state() == State::Pending => error(ErrorCode::OnPending),
                Some(_) => error(ErrorCode::AlreadyOn),
            }
        }
        Function::CpuSuspend { .. } => return (0, Then::Wait),
        Function::CpuOff => return (0, Then::Off),
        Function::SystemOff | Function::SystemReset => {
            life::end(crowd, vcpu.guest);
            return (0, Then::Off);
        }
        _ => error(ErrorCode::NotSupported),
    };
    (result, Then::On)
}

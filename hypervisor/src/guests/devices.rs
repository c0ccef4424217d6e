//! What one of several guests finds where no memory is: a UART that only says things, the interrupt
//! controller, a bell that says when its time is over; system registers that are trapped; and
//! firmware.

use aarch64_rt::RegisterState;
use arm_psci::{ErrorCode, Function};
use arm_sysregs::el2::registers::EsrEl2;

use super::schedule::{self, Then};
use super::vcpu::State;
use super::{crowd, gic};
use crate::counters::Count;
use crate::exits::{BELL, Saved, Transfer, get, set, step};
use crate::firmware::{self, error};
use crate::machine::count;
use crate::world;

/// Where the machine has its UART, and a guest its own.
const UART: u64 = 0x900_0000;
/// What a page of registers takes.
const REGISTERS: u64 = 64 << 10;

/// What a guest says, until the line is full.
pub struct Line {
    bytes: [u8; Self::MOST],
    len: usize,
}

impl Line {
    const MOST: usize = 240;

    /// An empty one.
    pub const fn new() -> Self {
        Self {
            bytes: [0; Self::MOST],
            len: 0,
        }
    }

    fn push(&mut self, guest: usize, byte: u8) {
        if byte == b'\n' || self.len == Self::MOST {
            let text = core::str::from_utf8(&self.bytes[..self.len]);
            let text = text.unwrap_or("(what it says is no text)").trim_end();
            static ONE_AT_A_TIME: crate::machine::Mutex<()> = spin::mutex::SpinMutex::new(());
            let _one = ONE_AT_A_TIME.lock();
            crate::say(format_args!("[g{guest}] {text}"));
            self.len = 0;
        }
        if byte != b'\n' {
            self.bytes[self.len] = byte;
            self.len += 1;
        }
    }
}

/// A read of the UART (PL011, DDI 0183), which has nothing to say, and always room.
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

/// An access of a guest's to what is not memory. Whether there is something: the guest goes on
/// behind it then.
pub fn access(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2, at: u64) -> bool {
    let Some(vcpu) = schedule::current() else {
        return false;
    };
    let (crowd, guest) = (crowd(), vcpu.guest);
    let Some(transfer) = Transfer::new(esr) else {
        return false;
    };
    let Transfer { size, register, .. } = transfer;
    let mask = u64::MAX >> (64 - (8 << size));
    let write = transfer
        .is_write
        .then(|| get(state, saved, register) & mask);
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
        set(state, saved, register, found & mask);
    }
    count(Count::Emulated, 1);
    step(state);
    true
}

/// A trapped system register. Whether there is something.
pub fn register(state: &mut RegisterState, saved: &mut Saved, esr: EsrEl2) -> bool {
    let field = |first: u32, bits: u32| u64::from(esr.iss()) >> first & ((1 << bits) - 1);
    let (op0, op1, crn, crm, op2) = (
        field(20, 2),
        field(14, 3),
        field(10, 4),
        field(1, 4),
        field(17, 3),
    );
    let (is_read, register) = (field(0, 1) != 0, field(5, 5));
    match (op0, op1, crn, crm, op2) {
        // ICC_SGI1R_EL1.
        (3, 0, 12, 11, 5) if !is_read => {
            if let Some(vcpu) = schedule::current() {
                gic::send(vcpu, get(state, saved, register));
            }
        }
        // Debugging and performance monitors: nothing is there, and nothing comes of it.
        (2, ..) | (3, 0 | 3, 9, 12..=14, _) | (3, 3, 14, 8..=15, _) => {
            if is_read {
                set(state, saved, register, 0);
            }
        }
        _ => return false,
    }
    count(Count::Emulated, 1);
    step(state);
    true
}

/// A call of one of several guests to firmware: what it returns, and what becomes of the vCPU.
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
        Function::AffinityInfo {
            mpidr,
            lowest_affinity_level: 0,
        } => match find(mpidr.into()).map(|vcpu| vcpu.state()) {
            Some(State::Off) => 1,
            Some(State::Pending) => 2,
            Some(_) => 0,
            None => error(ErrorCode::InvalidParameters),
        },
        Function::CpuOn { target_cpu, entry } => {
            let at = entry.entry_point_address();
            match find(target_cpu.into()) {
                None => error(ErrorCode::InvalidParameters),
                Some(_) if !world().vms[vcpu.guest].holds(at) => error(ErrorCode::InvalidAddress),
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
            crowd.end(vcpu.guest);
            return (0, Then::Off);
        }
        _ => error(ErrorCode::NotSupported),
    };
    (result, Then::On)
}

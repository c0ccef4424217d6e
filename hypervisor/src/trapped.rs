//! The registers of a guest that an exception has brought here, and the instruction that did it.

use aarch64_rt::RegisterState;
use arm_sysregs::el2::registers::EsrEl2;

/// Exception classes, DDI 0487 D24.2, ESR_EL2.
pub mod class {
    pub const UNKNOWN: u8 = 0x00;
    pub const WAIT: u8 = 0x01;
    pub const HVC: u8 = 0x16;
    pub const SMC: u8 = 0x17;
    pub const REGISTER: u8 = 0x18;
    pub const INSTRUCTION_ABORT: u8 = 0x20;
    pub const DATA_ABORT: u8 = 0x24;
}

/// The registers that the startup code's handler does not save: x19 to x28.
pub type Saved = [u64; 10];

/// The registers of a guest at an exception.
pub struct Trapped<'s> {
    /// Those that the startup code's handler saves.
    pub state: &'s mut RegisterState,
    /// The others.
    pub saved: &'s mut Saved,
    /// The syndrome.
    pub esr: EsrEl2,
}

impl Trapped<'_> {
    /// Reads a general register.
    pub fn get(&self, register: u64) -> u64 {
        match register as usize {
            register @ 0..=18 => self.state.registers[register],
            register @ 19..=28 => self.saved[register - 19],
            29 => self.state.fp,
            30 => self.state.sp,
            _ => 0,
        }
    }

    /// Writes a general register.
    pub fn set(&mut self, register: u64, value: u64) {
        match register as usize {
            register @ 0..=18 => self.state.registers[register] = value,
            register @ 19..=28 => self.saved[register - 19] = value,
            29 => self.state.fp = value as _,
            30 => self.state.sp = value as _,
            _ => {}
        }
    }

    /// Goes on behind the instruction, as after any other (DDI 0487 D1.3.5): with no step pending
    /// (SS), and no branch before it (BTYPE).
    pub fn step(&mut self) {
        self.state.elr = self.state.elr.wrapping_add(4);
        self.state.spsr &= !(1 << 21 | 3 << 10);
    }
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

    /// The access of a word.
    pub fn of_word(esr: EsrEl2) -> Option<Self> {
        Self::new(esr).filter(|transfer| transfer.size == 2)
    }
}

/// An access to a system register, as the ISS of its trap describes it (DDI 0487 D24.2).
pub struct SystemAccess {
    /// op0, op1, CRn, CRm and op2.
    pub name: (u64, u64, u64, u64, u64),
    pub register: u64,
    pub is_read: bool,
}

impl SystemAccess {
    /// The access that a trap of a system register is of.
    pub fn new(esr: EsrEl2) -> Self {
        let field = |first: u32, bits: u32| u64::from(esr.iss()) >> first & ((1 << bits) - 1);
        let (op0, op1, crn) = (field(20, 2), field(14, 3), field(10, 4));
        Self {
            name: (op0, op1, crn, field(1, 4), field(17, 3)),
            register: field(5, 5),
            is_read: field(0, 1) != 0,
        }
    }
}

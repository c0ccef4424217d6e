//! Requests to the hardware, and their answers.

use tablewright_walker::{Regime, Walk};

use crate::architecture::Architecture;
use crate::tlb::{Cached, Tlbi};

// Rights in a TLB entry.
pub(super) const READ: u8 = 1;
pub(super) const WRITE: u8 = 2;
pub(super) const EXECUTE: u8 = 4;
/// The permissions of user mode, shifted.
pub(super) const USER: u8 = 3;
/// The first write has to set the dirty state in memory.
pub(super) const CLEAN: u8 = 64;

/// Bits that each tell something of a descriptor.
#[derive(Clone, Copy)]
pub(super) struct Bits {
    /// It is valid if one of these is set.
    pub(super) valid: u64,
    /// Flags of a leaf that hardware manages; none if it does not.
    pub(super) accessed: u64,
    pub(super) dirty: u64,
    /// A leaf is dirty when that bit is clear.
    pub(super) clean_if_set: bool,
    /// A leaf is global if this bit is set, or if it is clear.
    pub(super) global: u64,
    pub(super) not_global: u64,
}

impl Bits {
    pub(super) fn of(architecture: &Architecture) -> Self {
        let x86 = Self {
            valid: 1,
            accessed: 1 << 5,
            dirty: 1 << 6,
            clean_if_set: false,
            global: 0,
            not_global: 0,
        };
        match architecture.regime {
            // DDI 0487 D8.3.1: AF, AP[2], and nG, which is clear at EL2.
            Regime::Arm64Stage1 { .. }
            | Regime::Arm64Stage1Sized { .. }
            | Regime::Arm64El2 { .. } => Self {
                valid: 1,
                accessed: 1 << 10,
                dirty: 1 << 7,
                clean_if_set: true,
                global: 0,
                not_global: 1 << 11,
            },
            // D8.3.1: AF, and S2AP[1].
            Regime::Arm64Stage2 { .. } => {
                Self { valid: 1, accessed: 1 << 10, dirty: 1 << 7, clean_if_set: false, ..x86 }
            }
            // SDM vol. 3A 5.8, 5.10.2.4.
            Regime::X86_64 { .. } => Self { global: 1 << 8, ..x86 },
            Regime::Npt { .. } => x86,
            // PRIV 10.3.1; 18.5.1: G is nothing in the G-stage.
            Regime::Riscv { guest, .. } => Self {
                accessed: 1 << 6,
                dirty: 1 << 7,
                global: if guest { 0 } else { 1 << 5 },
                ..x86
            },
            // SDM vol. 3C 29.3.2: any right makes it valid. 29.3.5: flags, if bit 6 of the EPTP is
            // set.
            Regime::Ept { mode_based, .. } => Self {
                valid: 7 | u64::from(mode_based) << 10,
                accessed: u64::from(architecture.hardware_access) << 8,
                dirty: u64::from(architecture.hardware_dirty) << 9,
                clean_if_set: false,
                ..x86
            },
        }
    }
}

/// An access that a program makes.
///
/// ```
/// use tablewright_machine::{Request, Want};
/// let store = Request { va: 0x1000, want: Want::Write, user: false };
/// assert_eq!(Request::write(0x1000), store);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The address.
    pub va: u64,
    /// The purpose.
    pub want: Want,
    /// With the rights of an application.
    pub user: bool,
}

impl Request {
    /// A load by the kernel.
    pub const fn read(va: u64) -> Self {
        Self { va, want: Want::Read, user: false }
    }
    /// A store by the kernel.
    pub const fn write(va: u64) -> Self {
        Self { va, want: Want::Write, user: false }
    }
    /// An instruction fetch by the kernel.
    pub const fn execute(va: u64) -> Self {
        Self { va, want: Want::Execute, user: false }
    }
    /// Makes it a request of an application.
    #[must_use]
    pub const fn by_user(self) -> Self {
        Self { user: true, ..self }
    }

    pub(super) fn right(self) -> u8 {
        let right = match self.want {
            Want::Read => READ,
            Want::Write => WRITE,
            Want::Execute => EXECUTE,
        };
        if self.user { right << USER } else { right }
    }
}

/// The purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

/// Why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Not mapped, found at a descriptor with so many levels below it.
    Translation {
        /// Levels below.
        depth: u8,
    },
    /// The access flag is clear, and software sets it.
    AccessFlag {
        /// Levels below.
        depth: u8,
    },
    /// Mapped without this right.
    Permission {
        /// Levels below.
        depth: u8,
    },
    /// No address of a space that is loaded.
    Address,
    /// The [modification log](crate::Machine::log_modifications) of the CPU is full. Nothing was
    /// written, and no flag was set.
    LogFull,
    /// Of a guest that has a stage 1: stage 2 does not let it go on. A fault of the host's; the
    /// others are the guest's.
    Second {
        /// The address that the guest takes for physical.
        ipa: u64,
        /// The access that was wanted there: of a table of the guest perhaps something else than of
        /// what it leads to.
        want: Want,
        /// It is that of a descriptor of the guest.
        on_walk: bool,
        /// Why.
        cause: Cause,
        /// Levels below the descriptor of stage 2.
        depth: u8,
    },
}

/// Why stage 2 faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Not mapped.
    Translation,
    /// The access flag is clear, and software sets it.
    AccessFlag,
    /// Mapped without the right.
    Permission,
}

/// An access that has been translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Translated {
    pub(super) request: Request,
    pub(super) entry: Cached,
    pub(super) generation: u32,
}

impl Translated {
    /// The physical address.
    pub fn pa(&self) -> u64 {
        self.entry.pa(self.request.va)
    }

    /// The access.
    pub(crate) fn request(&self) -> Request {
        self.request
    }

    /// Whether an invalidation is about it.
    pub(crate) fn is_covered(&self, tlbi: &Tlbi) -> bool {
        self.entry.is_covered(tlbi)
    }
}

/// A walk under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walking {
    pub(super) request: Request,
    pub(super) walk: Walk,
    pub(super) stamp: u64,
    pub(super) id: u16,
    pub(super) space: u16,
}

/// The answer to the look for a translation.
#[derive(Clone, Copy, Debug)]
pub enum Look<W = Walking> {
    /// There is one.
    Found(Translated),
    /// There is none.
    Fault(Fault),
    /// A walk has to go on.
    Walking(W),
}

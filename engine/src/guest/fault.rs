//! Faults, as hardware describes them.
//!
//! Each architecture says it in its own way, and not the same things: arm64 tells the level at
//! which the walk ended and whether it was only the access flag; Intel and AMD tell what the entry
//! allowed; RISC-V tells neither. What is not said is looked up.

use crate::addr::{Ipa, Level};
use crate::format::Perms;

/// The access that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read, a walk through its own tables included.
    Read,
    /// Write, flags in its own tables included.
    Write,
    /// Fetch an instruction.
    Execute,
}

impl Access {
    /// The permission that the access needs.
    pub const fn perms(self) -> Perms {
        match self {
            Self::Read => Perms::READ,
            Self::Write => Perms::WRITE,
            Self::Execute => Perms::EXEC,
        }
    }
}

/// The cause of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Nothing is mapped there.
    Translation,
    /// The mapping there does not allow it.
    Permission,
    /// The access flag is clear, and hardware does not set it
    /// ([`Guest::set_accessed`](super::Guest::set_accessed)).
    AccessFlag,
    /// One of these, and hardware does not say which (RISC-V).
    Unknown,
}

/// A stage-2 fault, classified.
///
/// ```
/// use tablewright::guest::{Access, Cause, Fault};
/// use tablewright::{Ipa, Level};
/// // A data abort from a lower exception level, a write, translation fault at level 3.
/// let fault = Fault::arm64(0x24 << 26 | 1 << 6 | 0b000111, 0x4_0123 << 4, 0x567).unwrap();
/// assert_eq!(fault.at, Ipa::new(0x4012_3567));
/// assert_eq!((fault.access, fault.cause), (Access::Write, Cause::Translation));
/// assert_eq!(fault.level, Some(Level::PAGE));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest waits for its memory"]
pub struct Fault {
    /// The guest's physical address, as exactly as it is known.
    pub at: Ipa,
    /// The access that faulted.
    pub access: Access,
    /// The cause of the fault.
    pub cause: Cause,
    /// The level at which the walk ended, if that is known.
    pub level: Option<Level>,
}

impl Fault {
    /// A fault of which nothing else is known: nothing is mapped.
    pub const fn new(at: Ipa, access: Access) -> Self {
        Self { at, access, cause: Cause::Translation, level: None }
    }

    /// An exception taken to EL2, from `ESR_EL2`, `HPFAR_EL2` and `FAR_EL2`. `None` for what is no
    /// abort from a lower exception level, or one that has nothing to do with translation.
    ///
    /// Where [`Abort::is_page_known`] says no, `hpfar` is the page that the caller has found, in
    /// the form of the register.
    pub fn arm64(esr: u64, hpfar: u64, far: u64) -> Option<Self> {
        Some(Abort::new(esr)?.fault(hpfar, far))
    }

    /// An EPT violation, from its exit qualification and the guest-physical address (SDM vol. 3C,
    /// table 29-7).
    ///
    /// A walk through the guest's own tables that may set flags counts as a write, and says that it
    /// reads and writes.
    pub const fn ept(qualification: u64, at: u64) -> Self {
        let access = match qualification & 7 {
            wanted if wanted & 2 != 0 => Access::Write,
            wanted if wanted & 4 != 0 => Access::Execute,
            _ => Access::Read,
        };
        // What the entry allows: to read, to write, to fetch; in bit 6 to fetch for the guest's
        // user.
        let allowed = qualification >> 3 & 0xf;
        Self {
            at: Ipa::new(at),
            access,
            cause: if allowed == 0 { Cause::Translation } else { Cause::Permission },
            level: None,
        }
    }

    /// A nested page fault, from `EXITINFO1` and `EXITINFO2` (APM vol. 2, 15.25.6).
    ///
    /// `None` for reserved bits set in an entry, which is an error of the code that wrote it.
    pub const fn nested(info: u64, at: u64) -> Option<Self> {
        if info & 8 != 0 {
            return None;
        }
        let access = match info {
            _ if info & 2 != 0 => Access::Write,
            _ if info & 0x10 != 0 => Access::Execute,
            _ => Access::Read,
        };
        Some(Self {
            at: Ipa::new(at),
            access,
            cause: if info & 1 == 0 { Cause::Translation } else { Cause::Permission },
            level: None,
        })
    }
}

/// An abort of arm64 from a lower exception level that has to do with translation: what `ESR_EL2`
/// says of it (DDI 0487 D24.2, instruction and data aborts).
///
/// ```
/// use tablewright::guest::{Abort, Access, Cause};
/// // A data abort, a write, permission fault at level 3: where, HPFAR_EL2 need not say.
/// let abort = Abort::new(0x24 << 26 | 1 << 6 | 0b001111).unwrap();
/// assert_eq!((abort.access, abort.cause), (Access::Write, Cause::Permission));
/// assert!(!abort.in_walk && !abort.is_page_known());
/// assert_eq!(Abort::new(0x16 << 26), None); // HVC
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The access of the guest. A walk of its stage 1 reads a descriptor; if it may not do that,
    /// although it can, it wanted to set a flag.
    pub access: Access,
    /// The cause of the fault.
    pub cause: Cause,
    /// The level at which the walk of stage 2 ended.
    pub level: Level,
    /// It was a walk of the guest's stage 1.
    pub in_walk: bool,
}

impl Abort {
    /// Decodes `ESR_EL2`. `None` if it is no abort from a lower exception level, or one that has
    /// nothing to do with translation.
    pub fn new(esr: u64) -> Option<Self> {
        const INSTRUCTION_ABORT: u64 = 0x20;
        const DATA_ABORT: u64 = 0x24;
        let class = esr >> 26 & 0x3f;
        if class != INSTRUCTION_ABORT && class != DATA_ABORT {
            return None;
        }
        // Levels of the architecture count down to 3, where pages are.
        let (cause, level) = match esr & 0x3f {
            0b10_1011 => (Cause::Translation, -1),
            status @ 0b00_0100..=0b00_0111 => (Cause::Translation, status as i8 & 3),
            status @ 0b00_1000..=0b00_1011 => (Cause::AccessFlag, status as i8 & 3),
            status @ 0b00_1100..=0b00_1111 => (Cause::Permission, status as i8 & 3),
            _ => return None,
        };
        let (in_walk, writes, maintains) =
            (esr >> 7 & 1 != 0, esr >> 6 & 1 != 0, esr >> 8 & 1 != 0);
        let access = match () {
            () if in_walk && cause == Cause::Permission => Access::Write,
            () if in_walk => Access::Read,
            () if class == INSTRUCTION_ABORT => Access::Execute,
            // Cache maintenance says that it writes, and asks for no more than a read.
            () if writes && !maintains => Access::Write,
            () => Access::Read,
        };
        Some(Self { access, cause, level: Level::new((3 - level) as u8), in_walk })
    }

    /// Whether `HPFAR_EL2` holds the page: on every processor but after a permission fault that is
    /// not of such a walk. Then the caller translates `FAR_EL2` first (`AT S1E1R`), and takes the
    /// page from `PAR_EL1`, in the form of `HPFAR_EL2`.
    pub fn is_page_known(&self) -> bool {
        self.in_walk || self.cause != Cause::Permission
    }

    /// The fault, from `HPFAR_EL2` and `FAR_EL2` (DDI 0487 D24.2). The offset in the page is that
    /// of the virtual address, which for a fault in a walk of stage 1 says nothing: then it is 0.
    pub const fn fault(self, hpfar: u64, far: u64) -> Fault {
        let page = (hpfar & 0x0000_0fff_ffff_fff0) << 8;
        let offset = if self.in_walk { 0 } else { far & 0xfff };
        Fault {
            at: Ipa::new(page | offset),
            access: self.access,
            cause: self.cause,
            level: Some(self.level),
        }
    }
}

//! Requests to the hardware, and their answers.

use tablewright_walker::Walk;

use crate::tlb::{Cached, Tlbi};

// Rights in a TLB entry.
pub(super) const READ: u8 = 1;
pub(super) const WRITE: u8 = 2;
pub(super) const EXECUTE: u8 = 4;
/// The permissions of user mode, shifted.
pub(super) const USER: u8 = 3;
/// The first write has to set the dirty state in memory.
pub(super) const CLEAN: u8 = 64;

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

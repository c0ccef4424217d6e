//! Remote TLB flushes by hypercall, as Hyper-V defines them: the wire, the guest's side, the
//! host's.
//!
//! You need this if your kernel runs under Hyper-V, as one of the messengers of
//! [`shootdown`](crate::shootdown), or if your hypervisor has guests that are to take it for
//! Hyper-V.
//!
//! A guest that flushes by interrupts waits for every virtual processor to run. The hypervisor
//! knows which run: one call tells it what to flush where, and processors that do not run flush
//! before they run again. Six calls do so; four name virtual addresses of a guest, two, for a
//! hypervisor that is a guest itself, guest-physical addresses.
//!
//! | call | what | where | kind |
//! |---|---|---|---|
//! | [`Call::Space`] | an address space, or all | a mask of 64 processors | simple |
//! | [`Call::List`] | up to [`LIST`] ranges of it | the same | rep |
//! | [`Call::SpaceEx`] | an address space, or all | banks | simple, with a variable header |
//! | [`Call::ListEx`] | ranges, as many as are left beside the set | banks | rep, the same header |
//! | [`Call::GuestSpace`] | what an EPT pointer or nCR3 translates | everywhere | simple |
//! | [`Call::GuestList`] | ranges of it | everywhere | rep |
//!
//! The contract: on return the flush is done on all processors named, or will be before they run.
//! So tables that a flush by interrupt would have protected from walkers without locks, because
//! walkers had interrupts off, are not protected: they are freed after a quiescent state, as
//! everywhere in this crate.
//!
//! # The input, in quadwords
//!
//! ```text
//!            Space, List        SpaceEx, ListEx
//!      +0    address space      address space
//!      +8    flags              flags
//!      +16   processor mask     format of the set
//!      +24   ranges ...         mask of valid banks
//!      +32                      a quadword for each valid bank, then ranges ...
//! ```
//!
//! Sources: the Hypervisor Top-Level Functional Specification (TLFS), "Hypercall Interface",
//! "Virtual Address Translation", `HV_VP_SET`, and the CPUID leaves at 0x40000000. What hosts do
//! where it is silent is said where it matters.

mod guest;
mod host;
mod messenger;

pub use guest::FlushEncoder;
pub use host::{Decoded, FlushQueue, HostCaps, Pages, decode};
pub use messenger::{Hypercall, Hypercalls};

use core::fmt;

/// Quadwords of a page.
pub const PAGE_WORDS: usize = 512;
/// The most ranges of [`Call::List`]: what is left of a page behind the header.
pub const LIST: usize = PAGE_WORDS - 3;
/// The most ranges of [`Call::ListEx`], and a bank of the set takes the place of one of them.
pub const LIST_EX: usize = PAGE_WORDS - 4;
/// The most pages that one range holds.
pub const RANGE_PAGES: u64 = 4096;
/// CPUID 0x40000001, EAX: the interface is this one, "Hv#1".
pub const INTERFACE: u32 = 0x3123_7648;

/// CPUID 0x40000004, EAX: what the hypervisor recommends.
pub mod hints {
    /// Flushes of other processors by hypercall.
    pub const REMOTE_FLUSH: u32 = 1 << 2;
    /// The calls with sets of processors.
    pub const EX_PROCESSOR_MASKS: u32 = 1 << 11;
}

/// CPUID 0x40000003: what the hypervisor offers.
pub mod features {
    /// EAX: the model-specific registers of the hypercall page.
    pub const HYPERCALL_MSRS: u32 = 1 << 5;
    /// EAX: [`VP_INDEX`](super::msr::VP_INDEX).
    pub const VP_INDEX_MSR: u32 = 1 << 6;
    /// EDX: input in XMM registers, for fast calls.
    pub const XMM_INPUT: u32 = 1 << 4;
    /// EDX: ranges in the extended form.
    pub const EXTENDED_RANGES: u32 = 1 << 14;
}

/// Model-specific registers.
pub mod msr {
    /// Which operating system the guest is; not zero before [`HYPERCALL`] is enabled.
    pub const GUEST_OS_ID: u32 = 0x4000_0000;
    /// The hypercall page: its frame in bits 63:12, bit 0 enables it.
    pub const HYPERCALL: u32 = 0x4000_0001;
    /// The number by which the hypervisor knows this processor. It is not the number of the
    /// operating system.
    pub const VP_INDEX: u32 = 0x4000_0002;
}

/// A hypercall that flushes.
///
/// ```
/// use tablewright::hyperv::Call;
/// assert_eq!(Call::ListEx.code(), 0x14);
/// assert_eq!(Call::of_code(0x02), Some(Call::Space));
/// assert_eq!(Call::of_code(0x01), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// HvCallFlushVirtualAddressSpace.
    Space,
    /// HvCallFlushVirtualAddressList.
    List,
    /// HvCallFlushVirtualAddressSpaceEx.
    SpaceEx,
    /// HvCallFlushVirtualAddressListEx.
    ListEx,
    /// HvCallFlushGuestPhysicalAddressSpace.
    GuestSpace,
    /// HvCallFlushGuestPhysicalAddressList.
    GuestList,
}

impl Call {
    /// All calls.
    pub const ALL: [Self; 6] =
        [Self::Space, Self::List, Self::SpaceEx, Self::ListEx, Self::GuestSpace, Self::GuestList];

    /// The call code.
    pub const fn code(self) -> u16 {
        match self {
            Self::Space => 0x02,
            Self::List => 0x03,
            Self::SpaceEx => 0x13,
            Self::ListEx => 0x14,
            Self::GuestSpace => 0xaf,
            Self::GuestList => 0xb0,
        }
    }

    /// The call with this code.
    pub fn of_code(code: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|call| call.code() == code)
    }

    /// Whether it goes through a list, element by element.
    pub const fn is_rep(self) -> bool {
        matches!(self, Self::List | Self::ListEx | Self::GuestList)
    }

    /// Whether it names processors by a set, in a variable header.
    pub const fn has_set(self) -> bool {
        matches!(self, Self::SpaceEx | Self::ListEx)
    }

    /// Quadwords before the variable header and the list.
    pub const fn header(self) -> usize {
        match self {
            Self::Space | Self::List => 3,
            Self::SpaceEx | Self::ListEx => 4,
            Self::GuestSpace | Self::GuestList => 2,
        }
    }
}

bitflags::bitflags! {
    /// The translations that a call flushes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Flags: u64 {
        /// On all processors, whatever the mask or the set says.
        const ALL_PROCESSORS = 1 << 0;
        /// In all address spaces, whichever is named.
        const ALL_SPACES = 1 << 1;
        /// Not what is global. With a list it is not allowed.
        const NON_GLOBAL_ONLY = 1 << 2;
        /// Ranges are in the extended form, in which they can be of large pages.
        const EXTENDED_RANGES = 1 << 3;
    }
}

/// The value that says which call it is, and how large its input.
///
/// ```
/// use tablewright::hyperv::{Call, Input};
/// let input = Input::new(Call::ListEx).with_banks(2).with_reps(5);
/// assert_eq!(input.bits(), 5 << 32 | 2 << 17 | 0x14);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input(u64);

impl Input {
    const FAST: u64 = 1 << 16;
    const NESTED: u64 = 1 << 31;
    const BANKS: u32 = 17; // 26:17, the variable header in quadwords
    const REPS: u32 = 32; // 43:32
    const START: u32 = 48; // 59:48
    const RESERVED: u64 = 0xf << 27 | 0xf << 44 | 0xf << 60;

    /// A call without a list, its input in memory.
    pub const fn new(call: Call) -> Self {
        Self(call.code() as u64)
    }

    /// Decodes the value that a guest has passed.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The value as it is passed.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// With a variable header of so many quadwords, less than 1024.
    #[must_use]
    pub const fn with_banks(self, count: usize) -> Self {
        Self(self.0 & !(0x3ff << Self::BANKS) | (count as u64 & 0x3ff) << Self::BANKS)
    }

    /// With a list of so many elements, less than 4096.
    #[must_use]
    pub const fn with_reps(self, count: usize) -> Self {
        Self(self.0 & !(0xfff << Self::REPS) | (count as u64 & 0xfff) << Self::REPS)
    }

    /// This input, to go on at an element of the list.
    #[must_use]
    pub const fn with_start(self, start: usize) -> Self {
        Self(self.0 & !(0xfff << Self::START) | (start as u64 & 0xfff) << Self::START)
    }

    /// This input, passed in registers.
    #[must_use]
    pub const fn fast(self) -> Self {
        Self(self.0 | Self::FAST)
    }

    /// This input, for the hypervisor below this one.
    #[must_use]
    pub const fn nested(self) -> Self {
        Self(self.0 | Self::NESTED)
    }

    /// The code.
    pub const fn code(self) -> u16 {
        self.0 as u16
    }

    /// Quadwords of the variable header.
    pub const fn banks(self) -> usize {
        (self.0 >> Self::BANKS & 0x3ff) as usize
    }

    /// Elements of the list.
    pub const fn reps(self) -> usize {
        (self.0 >> Self::REPS & 0xfff) as usize
    }

    /// The element to go on with.
    pub const fn start(self) -> usize {
        (self.0 >> Self::START & 0xfff) as usize
    }

    /// Whether the input is in registers.
    pub const fn is_fast(self) -> bool {
        self.0 & Self::FAST != 0
    }

    const fn has_reserved(self) -> bool {
        self.0 & Self::RESERVED != 0
    }
}

/// The result of a call.
///
/// ```
/// use tablewright::hyperv::{Output, Status};
/// let output = Output::new(Status::SUCCESS, 16);
/// assert_eq!(output.bits(), 16 << 32);
/// assert_eq!((Output::from_bits(5).status(), output.done()), (Status::PARAMETER, 16));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output(u64);

impl Output {
    /// A status, and how many elements are done, from the first of the list on.
    pub const fn new(status: Status, done: usize) -> Self {
        Self(status.0 as u64 | (done as u64 & 0xfff) << 32)
    }

    /// Decodes the value that a hypervisor has passed.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The value as it is passed.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The status.
    pub const fn status(self) -> Status {
        Status(self.0 as u16)
    }

    /// Elements of the list that are done.
    pub const fn done(self) -> usize {
        (self.0 >> 32 & 0xfff) as usize
    }
}

/// The status of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

impl Status {
    /// The call is done.
    pub const SUCCESS: Self = Self(0);
    /// There is no such call.
    pub const CODE: Self = Self(2);
    /// The input value is wrong: a reserved bit, the number of elements, the size of the header.
    pub const INPUT: Self = Self(3);
    /// The input is not aligned to 8 bytes, or goes beyond its page.
    pub const ALIGNMENT: Self = Self(4);
    /// A field of the input is wrong.
    pub const PARAMETER: Self = Self(5);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::SUCCESS => "success",
            Self::CODE => "invalid code",
            Self::INPUT => "invalid input value",
            Self::ALIGNMENT => "invalid alignment",
            Self::PARAMETER => "invalid parameter",
            Self(other) => return write!(f, "status {other}"),
        };
        f.write_str(name)
    }
}

impl core::error::Error for Status {}

//! The meaning of a descriptor, and the result of a walk: a leaf, a table, or the reason why there
//! is neither.

use core::fmt;

/// One descriptor that maps memory: an arm64 page or block, a page of x86-64, EPT or nested paging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The first address that this descriptor translates: a virtual one, in stage 2 one that the
    /// guest takes for physical.
    pub va: u64,
    /// The physical address to which [`va`](Self::va) translates.
    pub pa: u64,
    /// The bytes that this descriptor translates.
    pub size: u64,
    /// The level of the table that holds it, by the architecture's own number: arm64 0 to 3 (3
    /// holds pages), x86 3 to 1 (1 holds 4 KiB pages), RISC-V 4 to 0.
    pub level: i8,
    /// The arm64 Contiguous bit, N of RISC-V; false elsewhere.
    pub contiguous: bool,
    /// The bytes that one TLB entry may cover: those of the whole run with the Contiguous bit, else
    /// [`size`](Self::size).
    pub run_size: u64,
    /// The access that is allowed here, with the restrictions of all tables on the way applied.
    pub access: Access,
    /// The translation belongs to every address space: arm64 nG clear, x86-64 G set, RISC-V G set
    /// at any level; never in stage 2.
    pub global: bool,
    /// The index of the memory type: arm64 AttrIndx, into MAIR_EL1; x86-64 and nested paging PAT,
    /// PCD and PWT, into IA32_PAT. 0 to 7. Or the type itself: MemAttr of arm64 stage 2, 0 to 15;
    /// bits 5:3 of EPT; PBMT of RISC-V, 0 to 2.
    pub memory: u8,
    /// The arm64 SH field: 0 non-shareable, 2 outer, 3 inner shareable. `None` where the descriptor
    /// has no such field, with LPA2 and off arm64.
    pub shareability: Option<u8>,
    /// The access flag (arm64 AF) or accessed bit (A).
    pub accessed: bool,
    /// The bits that record writes.
    pub dirty: DirtyState,
    /// The bits left to software, moved together: arm64 bits 58:55 as 3:0; x86-64 and nested paging
    /// bits 11:9 as 2:0 and 58:52 as 9:3; EPT bit 11 as 0 and 56:52 as 5:1; RISC-V bits 9:8.
    pub software: u16,
    /// Bits 62:59 as they stand: the x86-64 protection key, the arm64 page-based hardware
    /// attributes, supervisor shadow stacks and sub-page permissions of EPT. 0 to 15.
    pub key: u8,
    /// The descriptor itself.
    pub raw: u64,
}

impl Leaf {
    /// The physical address to which `va` translates.
    ///
    /// Meaningful for the [`size`](Self::size) bytes from [`va`](Self::va) on.
    ///
    /// ```
    /// # use tablewright_walker::{Regime, translate};
    /// # let mut memory = |_: u64, _: usize| 0x1003;
    /// let leaf = translate(Regime::X86_64 { levels: 4 }, 0x1000, 0x7f12_3456_7abc, &mut memory)?;
    /// assert_eq!(leaf.physical(0x7f12_3456_7abc), 0x1abc);
    /// # Ok::<(), tablewright_walker::Fault>(())
    /// ```
    pub const fn physical(&self, va: u64) -> u64 {
        self.pa.wrapping_add(va.wrapping_sub(self.va))
    }
}

/// The access of the two classes of software to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The kernel, in stage 2 the guest's: arm64 EL1, x86-64 supervisor mode.
    pub privileged: Permissions,
    /// The application, in stage 2 the guest's: arm64 EL0, x86-64 user mode.
    pub user: Permissions,
}

/// Permissions of one class of software. Displayed in the form `rwx`, `r--`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Loads.
    pub read: bool,
    /// Stores.
    pub write: bool,
    /// Instruction fetches. On arm64 this does not imply [`read`](Self::read).
    pub execute: bool,
}

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flag = |set, sign| if set { sign } else { "-" };
        let (r, w, x) = (flag(self.read, "r"), flag(self.write, "w"), flag(self.execute, "x"));
        write!(f, "{r}{w}{x}")
    }
}

/// How a leaf records that its memory was written, as the architecture defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyState {
    /// arm64 (DDI 0487 D8.5). With hardware management, `dbm` marks a page whose writes are to be
    /// recorded: it is clean while `read_only` is set, and the first write clears `read_only`.
    Arm64 {
        /// The Dirty Bit Modifier, bit 51.
        dbm: bool,
        /// AP\[2\], bit 7, of the descriptor alone; in stage 2 the same bit is S2AP\[1\], and means
        /// the opposite.
        read_only: bool,
    },
    /// One bit, which the first write sets: x86-64 and nested paging (SDM vol. 3A 5.8), EPT (SDM
    /// vol. 3C 29.3.5), RISC-V (PRIV 10.3.1), where that write may fault instead.
    Bit {
        /// Bit 6 of x86-64, bit 9 of EPT, bit 7 of RISC-V.
        dirty: bool,
    },
}

/// One translation table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// The level of its entries, by the architecture's own number.
    pub level: i8,
    /// Its physical address.
    pub pa: u64,
}

/// Why an address has no translation, or a table no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The descriptor at this level is not valid.
    NotMapped {
        /// The level at which the walk ended.
        level: i8,
    },
    /// The address lies in neither half of the virtual address space, in stage 2 beyond its size.
    NonCanonical,
    /// The descriptor is valid, and the architecture reserves this form of it.
    Reserved(Malformed),
    /// A run of contiguous entries promises the TLB more than its members hold; this is the member
    /// at which it breaks.
    BrokenRun(Malformed),
}

/// A descriptor that breaks a rule, and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The level of the table.
    pub level: i8,
    /// The physical address of the table.
    pub table: u64,
    /// The number of the descriptor within the table.
    pub index: usize,
    /// The descriptor.
    pub descriptor: u64,
    /// The rule that it breaks.
    pub why: &'static str,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMapped { level } => write!(f, "not mapped at level {level}"),
            Self::NonCanonical => f.write_str("address outside the space"),
            Self::Reserved(malformed) => write!(f, "reserved: {malformed}"),
            Self::BrokenRun(malformed) => write!(f, "broken run: {malformed}"),
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, table, index, descriptor, why } = self;
        write!(
            f,
            "{why} (descriptor {descriptor:#018x}, entry {index} of the level {level} table at \
             {table:#x})"
        )
    }
}

impl core::error::Error for Fault {}

/// Access that table descriptors take away from everything under them.
///
/// On arm64 the bits PXNTable, UXNTable and APTable (DDI 0487 D8.4.1), nothing in its stage 2; on
/// x86-64 and in nested paging a clear R/W, a clear U/S, XD (SDM vol. 3A 5.6.1); the rights that an
/// EPT entry lacks. Meaningful within one regime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Denied(pub(crate) u64);

impl Denied {
    /// Nothing is taken away.
    pub const NONE: Self = Self(0);

    /// Returns the access that is taken away by either.
    #[inline(always)]
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The meaning of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// Not valid: maps nothing, all other bits belong to software.
    Invalid,
    /// Points to the table of the next level.
    Table {
        /// The physical address of that table.
        pa: u64,
        /// Access that this descriptor by itself takes away from everything under it.
        denied: Denied,
    },
    /// Maps memory.
    Leaf(Leaf),
    /// Valid, and against the rule named.
    Reserved(&'static str),
}

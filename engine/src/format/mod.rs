//! Descriptor formats as data.
//!
//! You need this to choose the format of a space, as its first parameter, and the attributes of
//! what is mapped; and if your processor has one that is not here.
//!
//! A [`Format`] says how many levels a tree has, how large a page is, where a descriptor keeps its
//! address and what its other bits mean. It has no state and no algorithm: every walk and every
//! edit is written once, for all formats, and asks the format only to translate between [`Attrs`]
//! and bits, once for each distinct pattern of attributes and never once for each page.
//!
//! # Attributes
//!
//! [`Attrs`] is what descriptors of all formats have in common, plus the bits that only the format
//! at hand knows ([`Attrs::native`]). Encoding is exact: a descriptor that would grant more or less
//! than the attributes say is refused with [`Inexpressible`]. Decoding is its inverse.
//!
//! # Stage 2
//!
//! Four formats translate what a guest takes for physical: [`Stage2`] of arm64, [`Ept`] of Intel,
//! [`Npt`] of AMD, and [`Riscv64`] of an [`Ipa`](crate::Ipa). In them the privileged are the
//! guest's kernel and the user is the guest's user. Hardware lets both read and write the same
//! memory, or neither, so [`Attrs`] have to say so of both ([`Perms::and_user`]); what each may
//! execute differs where the hardware tells them apart. A translation belongs to one guest: none is
//! [global](Attrs::global).
//!
//! # Leaves without permissions
//!
//! A leaf that permits nothing is *parked*: hardware takes the entry for invalid and remembers
//! nothing of it, and to editors it is a leaf like any other ([`Kind::Leaf`]), with its frame,
//! size, memory type, flags, and all other bits. It is what [encode](Format::encode) makes of
//! attributes with no permission, in every format. That it is not valid is all that tells it from
//! others ([`Format::is_parked`]).
//!
//! # Three kinds of invalid entry
//!
//! Hardware ignores an invalid entry, so it can tell editors of the tables something ([`Absence`]):
//!
//! * Zero is a *hole*.
//! * [`Format::suspend`] makes a descriptor invalid without losing its content, so that a table can
//!   be linked in a second, infallible step, and an entry that has to be broken before it is remade
//!   keeps what it was. Undone by [`Format::resume`] before the edit returns.
//! * [`Format::FROZEN`] stands where an edit is replacing an entry: no other touches it, and one
//!   that meets it has to come back later.
//!
//! Each has a mark that no other has, nor a parked leaf. On x86 the address of such an entry, and
//! of a parked leaf, names no memory: a processor with the L1 terminal fault reads the cache
//! through the address of an entry that is not present.
//!
//! # Write-protected tables
//!
//! Below a table that is [write-protected](Format::protect_table) nothing is written: its
//! descriptor takes the permission away, or, where descriptors of tables cannot
//! ([`Format::TABLES_RESTRICT`]), is invalid for the hardware. To editors it is a table like any
//! other, [`Kind::Table`], with the same address.

mod arm64;
mod el2;
mod ept;
mod npt;
pub(crate) mod packed;
mod riscv64;
mod stage2;
mod x86_64;

pub use arm64::{
    Arm64, Arm64K4, Arm64K4Va39, Arm64K4Wide, Arm64K16, Arm64K16Va36, Arm64K16Va47, Arm64K16Wide,
    Arm64K64, Arm64K64Va42, Arm64K64Wide, MAIR,
};
pub use el2::{
    Arm64El2, Arm64El2K4, Arm64El2K4Wide, Arm64El2K16, Arm64El2K16Wide, Arm64El2K64,
    Arm64El2K64Wide,
};
pub use ept::Ept;
pub use npt::Npt;
pub use riscv64::{Riscv64, Sv39, Sv39x4, Sv48, Sv48x4, Sv57, Sv57x4};
pub use stage2::{
    FORCED_WRITE_BACK, Stage2, Stage2K4, Stage2K4Wide, Stage2K16, Stage2K16Wide, Stage2K64,
    Stage2K64Wide,
};
pub use x86_64::{PAT, SHADOW_STACKS, X86_64, encrypted, shared};

use core::fmt;

use crate::addr::{Address, Level, Pa};
use crate::platform::Caps;
use packed::{ACCESSED, DIRTY, Packed};

/// The rules of an architecture that algorithms ask for.
///
/// ```
/// use tablewright::{
///     Format,
///     bbm::Rule,
///     format::{Arm64K4, X86_64},
/// };
/// assert_eq!((Arm64K4::RULE, X86_64::<4>::RULE), (Rule::ARM, Rule::X86));
/// assert!(Rule::ARM.breaks && !Rule::X86.breaks);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A leaf in use may have to be invalid, and forgotten, before another takes its place.
    pub breaks: bool,
    /// An invalidation that names a level spares leaves of others; otherwise it has whatever
    /// translates its addresses forgotten.
    pub spares_other_levels: bool,
    /// Hardware ignores all of an invalid entry, so that it can say whose it is.
    pub tags_invalid_entries: bool,
    /// A leaf can be written only while it is marked as written, by software where hardware does
    /// not do it.
    pub writes_when_dirty: bool,
}

impl Rule {
    /// arm64: breaks (DDI 0487 D8.17.1), levels in invalidations (D8.17, TTL), invalid entries
    /// (D8.3), dirty state (D8.5.2).
    pub const ARM: Self = Self {
        breaks: true,
        spares_other_levels: true,
        tags_invalid_entries: true,
        writes_when_dirty: true,
    };

    /// x86. An address in an entry that is not present may be read through.
    pub const X86: Self = Self {
        breaks: false,
        spares_other_levels: false,
        tags_invalid_entries: false,
        writes_when_dirty: false,
    };
}

bitflags::bitflags! {
    /// The accesses that are permitted: to the privileged and to the user; in stage 2, to those of
    /// the guest.
    ///
    /// ```
    /// use tablewright::Perms;
    /// let code = Perms::READ | Perms::USER_READ | Perms::USER_EXEC;
    /// assert!(!code.contains(Perms::EXEC));
    /// ```
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Perms: u8 {
        /// The privileged may read. No stage-1 format can give another permission without it, but
        /// RISC-V that to execute.
        const READ = 1;
        /// The privileged may write.
        const WRITE = 2;
        /// The privileged may execute.
        const EXEC = 4;
        /// The user may read.
        const USER_READ = 8;
        /// The user may write.
        const USER_WRITE = 16;
        /// The user may execute.
        const USER_EXEC = 32;
    }
}

impl Perms {
    /// Everything that makes memory writable.
    pub const ANY_WRITE: Self = Self::WRITE.union(Self::USER_WRITE);
    /// Everything that makes memory executable.
    pub const ANY_EXEC: Self = Self::EXEC.union(Self::USER_EXEC);
    /// Everything that makes memory accessible to the user.
    pub const ANY_USER: Self = Self::USER_READ.union(Self::USER_WRITE).union(Self::USER_EXEC);

    /// Adds for the user what the privileged may: the permissions of stage 2, where the guest is
    /// one.
    ///
    /// ```
    /// use tablewright::Perms;
    /// assert_eq!(Perms::READ.and_user(), Perms::READ | Perms::USER_READ);
    /// ```
    pub const fn and_user(self) -> Self {
        let privileged = self.bits() & !Self::ANY_USER.bits();
        Self::from_bits_truncate(self.bits() | privileged << 3)
    }
}

/// The memory type: how accesses are cached and ordered.
///
/// ```
/// use tablewright::Memory;
/// assert!(Memory::Device.is_device() && !Memory::NonCacheable.is_device());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Normal memory, write-back cacheable.
    Normal,
    /// Normal memory, write-through cacheable.
    WriteThrough,
    /// Normal memory, not cacheable: writes may be combined.
    NonCacheable,
    /// Device memory whose accesses stay in order and may be acknowledged early: arm64
    /// Device-nGnRE, x86 UC.
    Device,
    /// Device memory without early acknowledgement: arm64 Device-nGnRnE. x86 has no such type.
    DeviceStrict,
    /// Normal write-back memory with allocation tags (arm64 FEAT_MTE2).
    Tagged,
}

impl Memory {
    /// Whether reads may have side effects, so that it must not be read speculatively or cleaned
    /// from a cache.
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device | Self::DeviceStrict)
    }
}

/// The observers among which normal memory is coherent. Formats without such a field know
/// [`Shareability::Inner`] only.
///
/// ```
/// use tablewright::{Attrs, Shareability};
/// assert_eq!(Attrs::KERNEL_DATA.shareability, Shareability::Inner);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shareability {
    /// This processor only.
    Non,
    /// All processors of the system, and what else shares the outer domain.
    Outer,
    /// All processors that run one operating system.
    Inner,
}

/// The attributes of a leaf, as all formats have them.
///
/// The constants preset accessed and dirty, so that memory mapped with them never faults to have a
/// flag set, and hardware never writes its descriptors.
///
/// ```
/// use tablewright::{Attrs, Memory, Perms};
/// let framebuffer = Attrs { memory: Memory::NonCacheable, ..Attrs::KERNEL_DATA };
/// assert!(framebuffer.perms.contains(Perms::WRITE));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attrs {
    /// Permissions, for each privilege. A leaf that permits nothing is [parked](Format::is_parked).
    pub perms: Perms,
    /// The memory type.
    pub memory: Memory,
    /// The observers among which it is coherent.
    pub shareability: Shareability,
    /// The translation holds in every address space. None of stage 2 does.
    pub global: bool,
    /// The page has been accessed. Where hardware does not set it, an access to a page without it
    /// faults (arm64).
    pub accessed: bool,
    /// The page has been written. On arm64 a writable page that is not dirty is write-protected by
    /// the hardware until hardware or a fault handler makes it dirty.
    pub dirty: bool,
    /// Three bits for the embedder's own use, of RISC-V two; the hardware ignores them.
    pub software: u8,
    /// Bits of the format's own, as they stand in the descriptor; only those in [`Format::NATIVE`].
    pub native: u64,
}

impl Attrs {
    const BASE: Self = Self {
        perms: Perms::READ,
        memory: Memory::Normal,
        shareability: Shareability::Inner,
        global: true,
        accessed: true,
        dirty: false,
        software: 0,
        native: 0,
    };

    /// Kernel memory: read and write, never executed.
    pub const KERNEL_DATA: Self =
        Self { perms: Perms::READ.union(Perms::WRITE), dirty: true, ..Self::BASE };
    /// Kernel constants: read only.
    pub const KERNEL_RODATA: Self = Self::BASE;
    /// Kernel code: read and execute.
    pub const KERNEL_TEXT: Self = Self { perms: Perms::READ.union(Perms::EXEC), ..Self::BASE };
    /// Device registers for the kernel.
    pub const KERNEL_DEVICE: Self = Self { memory: Memory::Device, ..Self::KERNEL_DATA };
    /// User memory: read and write, for one address space.
    pub const USER_DATA: Self = Self {
        perms: Perms::READ.union(Perms::WRITE).union(Perms::USER_READ).union(Perms::USER_WRITE),
        global: false,
        ..Self::KERNEL_DATA
    };
    /// User constants: read only, for one address space.
    pub const USER_RODATA: Self =
        Self { perms: Perms::READ.union(Perms::USER_READ), global: false, ..Self::BASE };
    /// User code: read and execute for the user, read for the kernel.
    pub const USER_TEXT: Self = Self {
        perms: Perms::READ.union(Perms::USER_READ).union(Perms::USER_EXEC),
        ..Self::USER_RODATA
    };

    /// Memory of a guest, which does with it what it likes.
    pub const GUEST_MEMORY: Self = Self {
        perms: Perms::READ.union(Perms::WRITE).union(Perms::EXEC).and_user(),
        ..Self::USER_DATA
    };
    /// Device registers given to a guest.
    pub const GUEST_DEVICE: Self = Self { memory: Memory::Device, ..Self::USER_DATA };

    /// These attributes with other permissions.
    pub const fn with_perms(mut self, perms: Perms) -> Self {
        self.perms = perms;
        self
    }

    /// These attributes with another memory type.
    pub const fn with_memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }
}

/// A combination of attributes that a descriptor of the format cannot hold. Nothing is rounded
/// silently.
///
/// ```
/// use tablewright::{Attrs, Format, Level, Perms, format::X86_64};
/// let write_only = Attrs::KERNEL_DATA.with_perms(Perms::WRITE);
/// assert!(X86_64::<4>::encode(&write_only, Level::PAGE).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inexpressible(pub &'static &'static str);

impl fmt::Display for Inexpressible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl core::error::Error for Inexpressible {}

/// Checks what the formats of stage 2 have in common: the guest is one, and so is its space.
fn check_guest(attrs: &Attrs) -> Result<(), Inexpressible> {
    let alike = |one, other| attrs.perms.contains(one) == attrs.perms.contains(other);
    if !alike(Perms::READ, Perms::USER_READ) || !alike(Perms::WRITE, Perms::USER_WRITE) {
        return Err(Inexpressible(
            &"stage 2 lets the guest's kernel and its user read and write the same memory, or \
              neither",
        ));
    }
    if attrs.global {
        return Err(Inexpressible(&"a translation of stage 2 belongs to one guest"));
    }
    Ok(())
}

/// The meaning of an invalid entry, to editors of the tables.
///
/// ```
/// use tablewright::{
///     Format, Pa, Perms,
///     format::{Absence, Arm64K4},
/// };
/// let table = Arm64K4::table(Pa::new(0x1000), Perms::empty());
/// assert_eq!(Arm64K4::absence(0), Absence::Hole);
/// assert_eq!(Arm64K4::absence(Arm64K4::suspend(table)), Absence::Suspended);
/// assert_eq!(Arm64K4::absence(Arm64K4::FROZEN), Absence::Frozen);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// Nothing: it may be filled.
    Hole,
    /// A descriptor that the edit under way will [resume](Format::resume).
    Suspended,
    /// An edit is replacing the entry.
    Frozen,
}

/// The kind of an entry, to a walk.
///
/// ```
/// use tablewright::{Format, Kind, Level, format::Arm64K4};
/// assert_eq!(Arm64K4::kind(0b11, Level::new(1)), Kind::Table);
/// assert_eq!(Arm64K4::kind(0b11, Level::PAGE), Kind::Leaf);
/// // a block where there are only pages
/// assert_eq!(Arm64K4::kind(0b01, Level::PAGE), Kind::Invalid);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not valid: nothing is translated through it.
    Invalid,
    /// Points to a table one level down.
    Table,
    /// Translates addresses: a page or a block. One that permits nothing is ignored by hardware
    /// ([parked](Format::is_parked)).
    Leaf,
}

/// A descriptor format.
///
/// Everything is a constant or a pure function; see the [module](self) for what the functions have
/// in common. The sources of the facts are cited in the file of each format.
///
/// ```
/// use tablewright::{Format, Level, format::Arm64K16};
/// assert_eq!(Arm64K16::LEVELS, 4);
/// assert_eq!(Arm64K16::shift(Level::new(1)), 25); // blocks of 32 MiB
/// assert_eq!(Arm64K16::contiguous(Level::PAGE), 7); // runs of 128 pages
/// ```
///
/// # Safety
/// The engine makes pointers out of what a format says. An implementation promises:
/// 1. [`index`](Format::index) is less than [`entries`](Format::entries) of the level, which is `1
///    << INDEX_BITS` below the root, and at the root no more than `root_tables() << INDEX_BITS`;
///    `PAGE_SHIFT` is 12, 14 or 16, and `LEVELS` at most 5.
/// 2. [`address`](Format::address) of a table descriptor is the frame that [`table`](Format::table)
///    was given, whatever of the other functions was applied to it since; [`kind`](Format::kind) of
///    it is a table, and of nothing else.
/// 3. A suspended, a frozen, and a zero entry are [invalid](Kind::Invalid), and all different; a
///    parked leaf is a leaf, and different from them.
/// 4. A run has no more entries than a table, [`contiguous`](Format::contiguous) is 0 where
///    [`CONTIGUOUS`] is, and the level of pages has leaves.
///
/// [`CONTIGUOUS`]: Format::CONTIGUOUS
pub unsafe trait Format: Copy + fmt::Debug + Send + Sync + 'static {
    /// The addresses that the tables translate: [`Va`](crate::Va) for stage 1, [`Ipa`](crate::Ipa)
    /// for stage 2.
    type Input: Address;

    /// The name, as the lab and error messages say it.
    const NAME: &'static str;
    /// The size of a page and of a table, as a power of two.
    const PAGE_SHIFT: u32;
    /// How many levels of tables a translation goes through.
    const LEVELS: u8;
    /// Significant bits of an input address.
    const INPUT_BITS: u32;
    /// Significant bits of an output address.
    const OUTPUT_BITS: u32;
    /// The two halves of the input space have a root each (arm64 stage 1), rather than sharing one
    /// (x86-64) or being one (stage 2, EL2).
    const HALVES: bool;
    /// Input addresses are [signed](Address::SIGNED): there are such that start with ones. Stage 2
    /// has none, nor has EL2 alone.
    const SIGNED: bool = Self::Input::SIGNED;
    /// A leaf may be global. None of stage 2 is.
    const GLOBALS: bool = Self::Input::SIGNED;
    /// Which changes of a live entry need a break.
    const RULE: Rule;
    /// The bits of a leaf that [`Attrs::native`] may use.
    const NATIVE: u64;
    /// Memory that is read, in attributes that the format can hold: a change is tried on it before
    /// it is made. EL2 alone has no user.
    const PLAIN: Attrs = Attrs::USER_RODATA;
    /// Descriptors of consecutive frames differ by the [size](Format::put_address) of the frame as
    /// it stands in one, inside an aligned range of this many bits; beyond it the address continues
    /// in other bits.
    const LINEAR_BITS: u32;

    /// The largest leaf that every processor has that has the format; what there is beyond is for
    /// [`Caps`] to say.
    const SURE_LEAF: Level = Level::ANY;

    /// Whether a leaf may stand at `level`.
    fn is_leaf_level(level: Level) -> bool;

    /// How many entries at `level` a contiguous run has, as a power of two; 0 where there are no
    /// runs.
    fn contiguous(level: Level) -> u32;

    /// Bits that mark the members of a contiguous run.
    const CONTIGUOUS: u64;

    /// Whether table descriptors can take permissions away from everything below them. They cannot
    /// in arm64 stage 2.
    const TABLES_RESTRICT: bool;

    /// Bits that mark a [suspended](Format::suspend) entry.
    const SUSPENDED: u64;

    /// Bits of a table descriptor that are clear while it is
    /// [write-protected](Format::protect_table), and set otherwise.
    const OPEN: u64;

    /// Bits of a table descriptor that are set while it is write-protected, and clear otherwise.
    const PROTECTED: u64;

    /// A bit that hardware ignores in the descriptor of a write-protected table: it is being
    /// opened.
    const OPENING: u64;

    /// An entry that is being replaced: invalid, and neither a hole nor suspended.
    const FROZEN: u64;

    /// Hardware takes an entry for valid only if it has one of these bits.
    const PRESENT: u64;

    /// Returns the kind of `entry`, at `level`.
    fn kind(entry: u64, level: Level) -> Kind;

    /// The bits of a leaf at `level` that hold the address of the frame.
    fn address_mask(level: Level) -> u64;

    /// `frame` as it stands in a descriptor.
    fn put_address(frame: Pa) -> u64;

    /// The frame that a leaf or a table descriptor at `level` points to.
    fn address(entry: u64, level: Level) -> Pa;

    /// A leaf at `level` with these attributes, without its address, which is
    /// [added](Format::with_address) by exclusive or. With no permission at all it is
    /// [parked](Format::is_parked).
    ///
    /// # Errors
    /// [`Inexpressible`] says what the format cannot hold.
    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible>;

    /// The attributes of a leaf at `level`; the inverse of [`encode`](Format::encode).
    fn decode(entry: u64, level: Level) -> Attrs;

    /// Returns the meaning of a leaf, as a word of its bits that says one thing in one way, for
    /// [`decode_meaning`](Format::decode_meaning). Of a [single page](Format::is_single_page) that
    /// this engine has encoded it is the entry itself; other software may say in two ways what the
    /// engine says in one.
    #[inline(always)]
    fn meaning(leaf: u64) -> u64 {
        leaf
    }

    /// Decodes, like [`decode`](Format::decode), the [meaning](Format::meaning) of a leaf, of which
    /// less has to be asked.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, format::Arm64K4};
    /// let leaf = Arm64K4::encode(&Attrs::USER_DATA, Level::PAGE)?;
    /// assert_eq!(Arm64K4::meaning(leaf), leaf);
    /// assert_eq!(Arm64K4::decode_meaning(leaf, Level::PAGE), Attrs::USER_DATA);
    /// // Writable without DBM, bit 51, as where hardware keeps no dirty state.
    /// assert_eq!(Arm64K4::meaning(leaf & !(1 << 51)), leaf);
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn decode_meaning(meaning: u64, level: Level) -> Attrs {
        Self::decode(meaning, level)
    }

    /// The meaning of a leaf at `level` that permits below tables that take nothing away what one
    /// of this meaning permits below tables that take `denied`, and has all its other attributes.
    /// Where a table takes memory from the user, a rule that forbade something because of the user
    /// no longer applies.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, Perms, format::Arm64K4};
    /// let shared = Attrs::USER_DATA.with_perms(Attrs::USER_DATA.perms | Perms::USER_EXEC);
    /// let leaf = Arm64K4::encode(&shared, Level::PAGE)?;
    /// let below = Arm64K4::restricted(Arm64K4::meaning(leaf), Level::PAGE, Perms::ANY_WRITE);
    /// let expected = shared.with_perms(shared.perms - Perms::ANY_WRITE);
    /// assert_eq!(Arm64K4::decode_meaning(below, Level::PAGE), expected); // dirty, if it was
    ///     
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline]
    fn restricted(meaning: u64, level: Level, denied: Perms) -> u64 {
        let _ = (level, denied);
        meaning
    }

    /// A descriptor of the table in `frame`. What is in `deny` is taken away from everything below
    /// it, as far as the format can: execution for one or both, writing for both.
    fn table(frame: Pa, deny: Perms) -> u64;

    /// The permissions that a table descriptor takes away from everything below it.
    fn denied(table: u64) -> Perms;

    /// Whether a walker may write this leaf by itself: set its accessed flag or its dirty state.
    fn hardware_writes(leaf: u64, level: Level, caps: &Caps) -> bool;

    /// Makes a valid descriptor invalid and keeps its content. The result is not zero.
    fn suspend(entry: u64) -> u64;

    /// Undoes [`suspend`](Format::suspend).
    fn resume(suspended: u64) -> u64;

    /// The leaf that [`encode`](Format::encode) has made, with its address; or the same without it
    /// again.
    ///
    /// In an entry that is not present x86 has the address inverted.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, Pa, Perms, format::X86_64};
    /// let with = |attrs| {
    ///     let bits = X86_64::<4>::encode(&attrs, Level::PAGE)?;
    ///     Ok::<_, tablewright::Inexpressible>(X86_64::<4>::with_address(bits, Pa::new(0x1000)))
    /// };
    /// assert_eq!(with(Attrs::KERNEL_TEXT), Ok(0x1121));
    /// let parked = with(Attrs::KERNEL_TEXT.with_perms(Perms::empty()))?;
    /// assert_eq!(parked & 0x000f_ffff_ffff_f000, !0x1000 & 0x000f_ffff_ffff_f000);
    /// assert_eq!(X86_64::<4>::address(parked, Level::PAGE), Pa::new(0x1000));
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn with_address(leaf: u64, frame: Pa) -> u64 {
        leaf ^ Self::put_address(frame)
    }

    /// Whether a leaf is parked: it permits nothing, and hardware takes it for invalid.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Kind, Level, Perms, format::Arm64K4};
    /// let parked = Arm64K4::encode(&Attrs::USER_DATA.with_perms(Perms::empty()), Level::PAGE)?;
    /// assert!(Arm64K4::is_parked(parked) && Arm64K4::kind(parked, Level::PAGE) == Kind::Leaf);
    /// assert!(Arm64K4::decode(parked, Level::PAGE).dirty); // as it was
    ///     
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn is_parked(leaf: u64) -> bool {
        leaf & Self::PRESENT == 0
    }

    /// Whether an entry of the last level is what most are: a page that hardware takes for valid,
    /// and that is in no run. It is told by bits that are set or clear, so that entries are if what
    /// they have in common is, and none of them is in a run.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, Perms, format::Arm64K4};
    /// let page = Arm64K4::encode(&Attrs::USER_DATA, Level::PAGE)?;
    /// assert!(
    ///     Arm64K4::is_single_page(page) && !Arm64K4::is_single_page(page | Arm64K4::CONTIGUOUS)
    /// );
    /// let parked = Arm64K4::encode(&Attrs::USER_DATA.with_perms(Perms::empty()), Level::PAGE)?;
    /// assert!(!Arm64K4::is_single_page(parked) && !Arm64K4::is_single_page(0));
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn is_single_page(entry: u64) -> bool {
        Self::kind(entry, Level::PAGE) == Kind::Leaf
            && !Self::is_parked(entry)
            && entry & Self::CONTIGUOUS == 0
    }

    /// The frame of a [single page](Format::is_single_page): of a page that is present no address
    /// is inverted.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, Pa, format::X86_64};
    /// let page = X86_64::<4>::encode(&Attrs::USER_DATA, Level::PAGE)?;
    /// let page = X86_64::<4>::with_address(page, Pa::new(0x3000));
    /// assert_eq!(X86_64::<4>::frame_of_page(page), Pa::new(0x3000));
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn frame_of_page(entry: u64) -> Pa {
        Self::address(entry, Level::PAGE)
    }

    /// The table that an entry above the last level points to, if it does: what each step of a walk
    /// asks.
    ///
    /// ```
    /// use tablewright::{Attrs, Format, Level, Pa, Perms, format::Arm64K4};
    /// let level = Level::new(1);
    /// let table = Arm64K4::table(Pa::new(0x1000), Perms::empty());
    /// assert_eq!(Arm64K4::table_below(table, level), Some(Pa::new(0x1000)));
    /// let block = Arm64K4::encode(&Attrs::USER_DATA, level)?;
    /// assert_eq!(
    ///     (Arm64K4::table_below(block, level), Arm64K4::table_below(0, level)),
    ///     (None, None)
    /// );
    /// # Ok::<(), tablewright::Inexpressible>(())
    /// ```
    #[inline(always)]
    fn table_below(entry: u64, level: Level) -> Option<Pa> {
        match Self::kind(entry, level) {
            Kind::Table => Some(Self::address(entry, level)),
            Kind::Leaf | Kind::Invalid => None,
        }
    }

    /// A frozen entry that tells by 44 bits of `tag` whose it is, where hardware ignores all of an
    /// invalid entry. Elsewhere, where none has to be told, there is one kind.
    #[inline(always)]
    fn frozen(tag: u64) -> u64 {
        match Self::RULE.tags_invalid_entries {
            true => Self::FROZEN | (tag & ((1 << 44) - 1)) << 12,
            false => Self::FROZEN,
        }
    }

    /// The descriptor of a table below which nothing is written.
    ///
    /// ```
    /// use tablewright::format::Ept;
    /// use tablewright::{Format, Kind, Level, Pa, Perms};
    /// let table = Ept::<4>::table(Pa::new(0x1000), Perms::empty());
    /// let protected = Ept::<4>::protect_table(table);
    /// assert!(
    ///     Ept::<4>::is_protected(protected)
    ///         && Ept::<4>::kind(protected, Level::new(1)) == Kind::Table
    /// );
    /// assert_eq!(Ept::<4>::open_table(protected), table);
    /// ```
    #[inline(always)]
    fn protect_table(table: u64) -> u64 {
        table & !(Self::OPEN | Self::OPENING) | Self::PROTECTED
    }

    /// Undoes [`protect_table`](Format::protect_table).
    #[inline(always)]
    fn open_table(table: u64) -> u64 {
        table & !(Self::PROTECTED | Self::OPENING) | Self::OPEN
    }

    /// Whether a table is write-protected.
    #[inline(always)]
    fn is_protected(table: u64) -> bool {
        table & (Self::OPEN | Self::PROTECTED) == Self::PROTECTED
    }

    /// Returns the meaning of an invalid entry. One without a mark, in a tree that was adopted, is
    /// not to be touched.
    #[inline(always)]
    fn absence(entry: u64) -> Absence {
        if entry == 0 {
            Absence::Hole
        } else if entry & Self::SUSPENDED != 0 {
            Absence::Suspended
        } else {
            Absence::Frozen
        }
    }

    /// How many bits of an input address select an entry of one table (the first table may have
    /// fewer entries).
    const INDEX_BITS: u32 = Self::PAGE_SHIFT - 3;

    /// The number of tables that are concatenated at the root: 1, or in arm64 stage 2 up to 16.
    #[inline(always)]
    fn root_tables() -> usize {
        (Self::entries(Self::root_level()) >> Self::INDEX_BITS).max(1)
    }

    /// The level of the root.
    #[inline(always)]
    fn root_level() -> Level {
        Level::new(Self::LEVELS - 1)
    }

    /// The largest leaf that processors with these capabilities have.
    ///
    /// ```
    /// use tablewright::{
    ///     Caps, Format, Level,
    ///     format::{Arm64K4, X86_64},
    /// };
    /// let pages_of_1g = Caps { largest_leaf: Level::new(2), ..Caps::CONSERVATIVE };
    /// assert_eq!(X86_64::<4>::largest_leaf(&Caps::CONSERVATIVE), Level::new(1)); // 2 MiB
    /// assert_eq!(X86_64::<4>::largest_leaf(&pages_of_1g), Level::new(2));
    /// assert_eq!(Arm64K4::largest_leaf(&Caps::CONSERVATIVE), Level::ANY);
    /// ```
    #[inline(always)]
    fn largest_leaf(caps: &Caps) -> Level {
        Self::SURE_LEAF.max(caps.largest_leaf)
    }

    /// The size of what one entry at `level` covers, as a power of two.
    #[inline(always)]
    fn shift(level: Level) -> u32 {
        Self::PAGE_SHIFT + Self::INDEX_BITS * level.height() as u32
    }

    /// The number of entries of a table at `level`.
    #[inline(always)]
    fn entries(level: Level) -> usize {
        // Mostly the first table is as large as any other.
        let whole = Self::shift(Self::root_level()) + Self::INDEX_BITS;
        if Self::INPUT_BITS != whole && level == Self::root_level() {
            1 << (Self::INPUT_BITS - Self::shift(level))
        } else {
            1 << Self::INDEX_BITS
        }
    }

    /// Which entry of a table at `level` translates `input`; any, above the root.
    #[inline(always)]
    fn index(input: u64, level: Level) -> usize {
        // What is shifted by more than a word has, above every root, is shifted by less: it costs
        // no more.
        input.wrapping_shr(Self::shift(level)) as usize & (Self::entries(level) - 1)
    }

    /// Whether `input` is an address that the format can translate: the bits above the input size
    /// all equal, and zero where addresses are not [signed](Format::SIGNED). With
    /// [`HALVES`](Format::HALVES), the first bit above the input size selects the root; without,
    /// the last bit below is the sign.
    #[inline]
    fn is_canonical(input: u64) -> bool {
        if !Self::SIGNED {
            return input >> Self::INPUT_BITS == 0;
        }
        let bits = if Self::HALVES { Self::INPUT_BITS } else { Self::INPUT_BITS - 1 };
        let top = (input as i64) >> bits;
        top == 0 || top == -1
    }
}

/// The [kind](Format::kind) of an entry, as a call where code is to be small.
#[inline(always)]
pub(crate) fn kind_of<F: Format>(entry: u64, level: Level) -> Kind {
    F::kind(entry, level)
}

/// Returns the [address](Format::address), as a call.
#[inline(always)]
pub(crate) fn address_of<F: Format>(entry: u64, level: Level) -> Pa {
    F::address(entry, level)
}

/// Returns the permissions that a table [takes away](Format::denied), as a call.
#[inline(always)]
pub(crate) fn denied_of<F: Format>(table: u64) -> Perms {
    F::denied(table)
}

/// Returns the [attributes](Format::decode) of a leaf, packed, as a call: for what is asked once
/// for many leaves.
#[inline(never)]
pub(crate) fn packed_of<F: Format>(leaf: u64, level: Level) -> Packed {
    Packed::of(&F::decode(leaf, level))
}

/// Returns the [attributes](Format::decode) of a leaf, as a call.
#[inline]
pub(crate) fn meaning<F: Format>(leaf: u64, level: Level) -> Attrs {
    packed_of::<F>(leaf, level).attrs()
}

/// The leaf with these attributes, as [`encode`](Format::encode) returns it, as a call.
#[inline(never)]
pub(crate) fn encoded<F: Format>(attrs: Packed, level: Level) -> Result<u64, Inexpressible> {
    F::encode(&attrs.attrs(), level)
}

/// The leaf `entry` with these flags set besides those that it has.
#[inline(never)]
pub(crate) fn with_flags<F: Format>(entry: u64, level: Level, accessed: bool, dirty: bool) -> u64 {
    let mut attrs = packed_of::<F>(entry, level);
    attrs.word |= (u32::from(accessed) * ACCESSED) | (u32::from(dirty) * DIRTY);
    // What was decoded can be encoded.
    encoded::<F>(attrs, level).map_or(entry, |bits| in_place_of::<F>(entry, level, bits))
}

/// Returns the entry that stands in the place of a leaf until what was there is forgotten. No
/// walker takes a parked leaf for valid, then or now.
pub(crate) fn withheld<F: Format>(leaf: u64) -> u64 {
    match F::is_parked(leaf) {
        true => leaf,
        false => F::suspend(leaf),
    }
}

/// The leaf that a format has encoded, in the place of `entry`: with its address, and in its run.
#[inline(never)]
pub(crate) fn in_place_of<F: Format>(entry: u64, level: Level, bits: u64) -> u64 {
    F::with_address(bits, address_of::<F>(entry, level)) | entry & F::CONTIGUOUS
}

/// The leaf `entry` with every flag set that a walker may still set in it. Where what walkers set
/// from now on is not looked at, this is what to write: said too much, never too little.
pub(crate) fn saturate<F: Format>(entry: u64, level: Level) -> u64 {
    let perms = packed_of::<F>(entry, level).perms();
    let writable = perms.intersects(Perms::ANY_WRITE);
    with_flags::<F>(entry, level, true, writable)
}

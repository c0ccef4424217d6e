//! arm64 stage 1, EL1&0: VMSAv8-64 with granules of 4, 16 and 64 KiB, addresses of 25 to 52 bits.
//!
//! Source: Arm Architecture Reference Manual, DDI 0487, chapter D8. Sections are named at the bits.
//!
//! 52 bits are FEAT_LPA2 with `TCR_EL1.DS` set for 4 and 16 KiB: one level more (4 KiB) or a larger
//! first table (16 KiB), address bits 51:50 in descriptor bits 9:8, and shareability from `TCR_EL1`
//! instead. For 64 KiB they are FEAT_LPA and FEAT_LVA: address bits 51:48 in descriptor bits 15:12.
//!
//! EL2&0, which is EL2 with `HCR_EL2.E2H` set (FEAT_VHE), has the same descriptors (D8.3.1), and
//! these formats serve it. EL2 without has others: [`Arm64El2`](super::Arm64El2).
//!
//! # The first table
//!
//! `TCR_EL1.T0SZ` and `T1SZ` are 64 less the bits of an input address, and say at which level a
//! walk starts: the lowest at which one table resolves what is left (D8.2.8 to D8.2.10). 39 bits of
//! 4 KiB pages have three levels, 36 bits of 16 KiB and 42 bits of 64 KiB two full ones. Where
//! fewer bits are left than a table resolves, the first table has fewer entries, and the manual has
//! it aligned to its size, 64 bytes at least (D24.2 TTBR0_EL1): it lies at the start of a page
//! here, so that it always is.
//!
//! # Memory types
//!
//! A descriptor holds an index into `MAIR_EL1`. The format has the value of the register as a
//! parameter, and finds the index of each type in it at compile time; what the register lacks is
//! [inexpressible](Inexpressible). The default is [`MAIR`]. Where two indices have one type, the
//! first is encoded and both are decoded. What [`Memory`] has no word for is decoded as the next
//! type that is stricter, of those in the register, and is that when it is changed. The embedder
//! loads [`Translation::MAIR`](crate::arch::arm64::Translation::MAIR) of its format into
//! `MAIR_EL1`; with the wide formats of 4 and 16 KiB, `TCR_EL1.SH0` and `SH1` are inner shareable.
//!
//! # Memory that a realm shares
//!
//! In a realm of Arm CCA the highest bit of an intermediate physical address says that the memory
//! is shared with the host (RMM, DEN0137, Realm IPA space; RSI_REALM_CONFIG has the size). It is a
//! parameter of the format, [`shared`](super::shared), and leaves have it as a
//! [native](Attrs::native) bit, [`Arm64::MARK`]; tables have it clear. Memory ends below it. With
//! wide descriptors it is bit 48 or above. It is
//! part of the output address, so [`Change::native`](crate::Change::native) breaks what it changes
//! (D8.17.1).
//!
//! # Guarded control stacks
//!
//! A stack of FEAT_GCS is a permission of indirection (FEAT_S1PIE, D8.4.2): four bits of a
//! descriptor are an index into `PIRE0_EL1`, and bits that these formats use for AP, DBM and the
//! rest mean something else. These formats have direct permissions, and no such stacks.
//!
//! # Dirty state
//!
//! FEAT_HAFDBS (D8.5.2): a page is writable when DBM is set; it is dirty when AP\[2\] is clear, and
//! the hardware clears AP\[2\] on the first write if `TCR_EL1.HD` is set; otherwise the write
//! faults and the handler does. Taking the write permission away from a dirty page must not lose
//! that it was written, so bit 55, which the hardware ignores, keeps it. A page that is writable
//! without DBM, as other software maps it, decodes as writable and dirty.

use super::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Rule, Shareability};
use crate::addr::{Level, Pa, Va};
use crate::platform::Caps;

/// The value of `MAIR_EL1` that the memory types of these formats refer to, unless they say another
/// (D24.2 MAIR_EL1).
///
/// 0: normal write-back; 1: Device-nGnRE; 2: normal non-cacheable; 3: Device-nGnRnE; 4: normal
/// tagged; 5: normal write-through.
pub const MAIR: u64 = 0x0000_bbf0_0044_04ff;

/// arm64 stage 1 with pages of `1 << PAGE_SHIFT` bytes, for virtual addresses of `INPUT_BITS` bits
/// in each half, 25 to 48; `WIDE` for physical addresses of 52 bits instead of 48, and up to 52
/// bits of input; `TYPES` is what `MAIR_EL1` holds; `MARKED` is the bit of memory that a realm
/// shares, as [`shared`](super::shared) has it, or zero.
///
/// ```
/// use tablewright::{Attrs, Format, Level, Memory, Pa, format::{Arm64, Arm64K4Va39, Arm64K4Wide}};
/// // LPA2: address bits 51:50 stand in descriptor bits 9:8.
/// assert_eq!(Arm64::<12, 52, true>::put_address(Pa::new(3 << 50)), 3 << 8);
/// assert!(Arm64K4Wide::encode(&Attrs::KERNEL_DATA, Level::new(3)).is_ok()); // blocks of 512 GiB
///
/// // 39 bits: from level 1. 36 bits: the same, and the first table has 64 entries.
/// assert_eq!((Arm64K4Va39::LEVELS, Arm64K4Va39::entries(Level::new(2))), (3, 512));
/// assert_eq!(Arm64::<12, 36>::entries(Level::new(2)), 64);
///
/// // The MAIR of a kernel that has device memory at index 0 and normal memory at 1.
/// type Ported = Arm64<12, 48, false, 0xff00>;
/// assert_eq!(Ported::encode(&Attrs::KERNEL_DATA, Level::PAGE).map(|bits| bits >> 2 & 7), Ok(1));
/// assert!(Ported::encode(&Attrs::KERNEL_DATA.with_memory(Memory::NonCacheable),
///     Level::PAGE).is_err());
/// ```
///
/// What the architecture lacks does not compile: 49 bits need wide descriptors.
/// ```compile_fail,E0080
/// use tablewright::{Format, format::Arm64};
/// const LEVELS: u8 = Arm64::<12, 49>::LEVELS;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm64<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool = false,
    const TYPES: u64 = MAIR,
    const MARKED: u64 = 0,
>;

/// 4 KiB granule, 48 bits.
pub type Arm64K4 = Arm64<12, 48>;
/// 4 KiB granule, 39 bits of virtual addresses: one level less.
pub type Arm64K4Va39 = Arm64<12, 39>;
/// 16 KiB granule, 48 bits.
pub type Arm64K16 = Arm64<14, 48>;
/// 16 KiB granule, 47 bits of virtual addresses: one level less.
pub type Arm64K16Va47 = Arm64<14, 47>;
/// 16 KiB granule, 36 bits of virtual addresses: two levels less.
pub type Arm64K16Va36 = Arm64<14, 36>;
/// 64 KiB granule, 48 bits.
pub type Arm64K64 = Arm64<16, 48>;
/// 64 KiB granule, 42 bits of virtual addresses: one level less.
pub type Arm64K64Va42 = Arm64<16, 42>;
/// 4 KiB granule, 52 bits (FEAT_LPA2).
pub type Arm64K4Wide = Arm64<12, 52, true>;
/// 16 KiB granule, 52 bits (FEAT_LPA2).
pub type Arm64K16Wide = Arm64<14, 52, true>;
/// 64 KiB granule, 52 bits (FEAT_LPA).
pub type Arm64K64Wide = Arm64<16, 52, true>;

// D8.3.1: descriptor bits of stage 1.
const VALID: u64 = 1 << 0;
/// Table at the upper levels, page at the last; a block has it clear.
const NOT_BLOCK: u64 = 1 << 1;
const ATTR_INDEX: u32 = 2; // 4:2
const NON_SECURE: u64 = 1 << 5;
const AP_USER: u64 = 1 << 6; // AP[1]
const AP_READ_ONLY: u64 = 1 << 7; // AP[2]
const SHAREABILITY: u32 = 8; // 9:8, not with LPA2
const ACCESS: u64 = 1 << 10; // AF
const NOT_GLOBAL: u64 = 1 << 11;
const GUARDED: u64 = 1 << 50; // GP, FEAT_BTI
const DIRTY_MODIFIER: u64 = 1 << 51; // DBM
const CONTIGUOUS: u64 = 1 << 52;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
const SOFTWARE_DIRTY: u64 = 1 << 55; // 58:55 are for software
const SOFTWARE: u32 = 56;
const PBHA: u64 = 0xf << 59; // 62:59, FEAT_HPDS2 or ignored
// Table descriptors.
const PXN_TABLE: u64 = 1 << 59;
const UXN_TABLE: u64 = 1 << 60;
const AP_TABLE_NO_USER: u64 = 1 << 61;
const AP_TABLE_READ_ONLY: u64 = 1 << 62;
// Bits 58:51 of a table descriptor are ignored.
const OPENING: u64 = 1 << 58;
// Marks of invalid entries, of which the hardware ignores every bit. No valid entry of ours has the
// first.
const SUSPENDED: u64 = 1 << 63;
const FROZEN: u64 = 1 << 57;
// An invalid entry with bit 1 that is not suspended is a parked leaf, at every level; it keeps all
// the rest as it is, and holes and frozen entries have bit 1 clear. A block gets the bit back to
// zero when it is valid again.
const PARKED: u64 = NOT_BLOCK;

/// D8.7.1, table of the contiguous bit, by the height of the level.
const fn run(page_shift: u32, height: u8) -> u32 {
    match (page_shift, height) {
        (12, 0..=2) => 4, // 64 KiB, 32 MiB, 16 GiB
        (14, 0) => 7,     // 2 MiB
        (14, 1) => 5,     // 1 GiB
        (16, 0..=1) => 5, // 2 MiB, 16 GiB
        _ => 0,
    }
}

const fn field(high: u32, low: u32) -> u64 {
    (u64::MAX >> (63 - high)) & (u64::MAX << (low & 63))
}

/// D8.2.8 to D8.2.10: as many levels as resolve the bits above the offset in a page. 25 bits are
/// what T0SZ allows without FEAT_TTST.
const fn levels(page_shift: u32, input_bits: u32, wide: bool) -> u8 {
    assert!(input_bits >= 25, "virtual addresses of arm64 have 25 bits at least");
    assert!(
        input_bits <= if wide { 52 } else { 48 },
        "virtual addresses of arm64 have 48 bits at most, with wide descriptors 52"
    );
    (input_bits - page_shift).div_ceil(page_shift - 3) as u8
}

/// The byte of `MAIR_EL1` that is meant by a memory type (D24.2 MAIR_EL1), and which bits of it
/// tell the type: those of a hint to allocate do not.
const fn attribute(memory: Memory) -> (u8, u8) {
    match memory {
        Memory::Normal => (0xff, 0xcc),
        Memory::WriteThrough => (0xbb, 0xcc),
        Memory::NonCacheable => (0x44, 0xff),
        Memory::Device => (0x04, 0xff),
        Memory::DeviceStrict => (0x00, 0xff),
        Memory::Tagged => (0xf0, 0xff),
    }
}

/// The first index of a memory type in `mair`: of its byte; where there is none, of one that
/// differs in hints alone.
const fn type_index(mair: u64, memory: Memory) -> Option<u64> {
    let bytes = mair.to_le_bytes();
    let (byte, tells) = attribute(memory);
    let masks = [0xff, tells];
    let mut step = 0;
    while step < 2 * bytes.len() {
        let mask = masks[step / bytes.len()];
        if bytes[step % bytes.len()] & mask == byte & mask {
            return Some((step % bytes.len()) as u64);
        }
        step += 1;
    }
    None
}

/// Returns the type that a byte of `MAIR_EL1` means; of a mixture, what neither of its halves
/// exceeds.
const fn type_of(byte: u8) -> Memory {
    match (byte >> 4, byte & 0xf) {
        (0, 0..=1) => Memory::DeviceStrict, // 1: without XS
        (0, _) => Memory::Device,
        (0xf, 0) => Memory::Tagged,
        (0xa, 0) => Memory::WriteThrough, // without XS
        (4, _) | (_, 4 | 0) => Memory::NonCacheable,
        // Write-back, outer and inner: lasting, 11RW, or transient, 01RW.
        (outer, inner) if outer & inner & 4 != 0 => Memory::Normal,
        _ => Memory::WriteThrough,
    }
}

/// Returns the same type, or the next stricter one that `mair` has: what was decoded can be
/// encoded.
const fn nearest(mair: u64, memory: Memory) -> Memory {
    let stricter = [
        Memory::Normal,
        Memory::WriteThrough,
        Memory::NonCacheable,
        Memory::Device,
        Memory::DeviceStrict,
        Memory::Tagged,
    ];
    let mut at = memory as usize;
    while type_index(mair, stricter[at]).is_none() {
        at += 1;
        assert!(
            at < 5,
            "MAIR has an attribute that is none of `Memory`, and nothing that is stricter"
        );
    }
    stricter[at]
}

// What permissions become: AP[1] at 0, PXN at 1, UXN at 2; or why they cannot be had.
const REFUSED: u8 = 0x80;
const NO_LEAF: u8 = REFUSED | 4;
const NO_TYPE_IN_MAIR: u8 = REFUSED | 5;
const NOT_INNER: u8 = REFUSED | 6;
const TOO_MANY_BITS: u8 = REFUSED | 7;
const NOT_NATIVE: u8 = REFUSED | 8;

static REASONS: [&str; 16] = [
    "arm64 stage 1 cannot map memory that the privileged cannot read",
    "arm64 stage 1 cannot let the user write and not read",
    "arm64 stage 1 lets the privileged and the user write the same pages, or neither",
    "arm64 stage 1 never lets the privileged execute what the user can write",
    "no block can stand at this level",
    "MAIR has no such memory type",
    "with 52-bit descriptors shareability comes from TCR_EL1 and is inner",
    "three software bits are all there are",
    "a native bit does not belong to the embedder",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
];

/// By permissions. D8.4.1: AP[2:1] gives the privileged at least what it gives the user, and always
/// reading; memory that the user can write is never executable by the privileged. What permits
/// nothing is made as what can be read.
static RIGHTS: [u8; 64] = {
    let mut rights = [0; 64];
    let mut bits = 0;
    while bits < 64 {
        let perms = Perms::from_bits_truncate(bits);
        let user = perms.intersects(Perms::USER_READ.union(Perms::USER_WRITE));
        let user_writes = perms.contains(Perms::USER_WRITE);
        rights[bits as usize] = if !perms.contains(Perms::READ) && bits != 0 {
            REFUSED
        } else if user && !perms.contains(Perms::USER_READ) {
            REFUSED | 1
        } else if user && perms.contains(Perms::WRITE) != user_writes {
            REFUSED | 2
        } else if user_writes && perms.contains(Perms::EXEC) {
            REFUSED | 3
        } else {
            let never = !perms.contains(Perms::EXEC);
            let user_never = !perms.contains(Perms::USER_EXEC);
            user as u8 | (never as u8) << 1 | (user_never as u8) << 2
        };
        bits += 1;
    }
    rights
};

impl<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool,
    const TYPES: u64,
    const MARKED: u64,
> Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES, MARKED>
{
    /// The bit of a leaf whose memory a realm shares, one of [`Attrs::native`]; zero for none.
    pub const MARK: u64 = Self::place(MARKED);

    /// The index of each type of memory, or that there is none.
    const INDEX: [u8; 8] = {
        let types = [
            Memory::Normal,
            Memory::WriteThrough,
            Memory::NonCacheable,
            Memory::Device,
            Memory::DeviceStrict,
            Memory::Tagged,
        ];
        let mut table = [NO_TYPE_IN_MAIR; 8];
        let mut at = 0;
        while at < types.len() {
            table[types[at] as usize] = match type_index(TYPES, types[at]) {
                Some(index) => index as u8,
                None => NO_TYPE_IN_MAIR,
            };
            at += 1;
        }
        table
    };

    const LPA2: bool = WIDE && PAGE_SHIFT != 16;
    const LPA: bool = WIDE && PAGE_SHIFT == 16;

    /// The level of the largest blocks. D8.3.1, table of block sizes: 4 KiB: 2 MiB and 1 GiB, 512
    /// GiB with LPA2; 16 KiB: 32 MiB, 64 GiB with LPA2; 64 KiB: 512 MiB, 4 TiB with LPA.
    const LARGEST: u8 = {
        let largest = match PAGE_SHIFT {
            12 => 2 + WIDE as u8,
            _ => 1 + WIDE as u8,
        };
        let root = levels(PAGE_SHIFT, INPUT_BITS, WIDE) - 1;
        if largest < root { largest } else { root }
    };

    /// A run has to fit into the input space (D8.7.1): the levels below this have runs, of which
    /// none is larger.
    const RUN_LEVELS: u8 = {
        let mut levels = 0;
        while levels < 3 && {
            let run = run(PAGE_SHIFT, levels);
            run != 0 && PAGE_SHIFT + (PAGE_SHIFT - 3) * levels as u32 + run <= INPUT_BITS
        } {
            levels += 1;
        }
        levels
    };

    /// Memory types, by their index in `MAIR_EL1`.
    const MEMORY: [Memory; 8] = {
        let bytes = TYPES.to_le_bytes();
        let mut types = [Memory::Normal; 8];
        let mut index = 0;
        while index < 8 {
            types[index] = nearest(TYPES, type_of(bytes[index]));
            index += 1;
        }
        types
    };

    /// Address bits that stand in the descriptor where they stand in the address.
    const fn in_place(low: u32) -> u64 {
        field(if Self::LPA2 { 49 } else { 47 }, low) & !Self::MARK
    }

    /// Address bits that do not.
    const MOVED: u64 = !Self::MARK
        & if Self::LPA2 {
            field(9, 8)
        } else if Self::LPA {
            field(15, 12)
        } else {
            0
        };

    /// The places of an address' bits in a descriptor.
    const fn place(address: u64) -> u64 {
        if Self::LPA2 {
            address & field(49, PAGE_SHIFT) | (address >> 50 & 3) << 8
        } else if Self::LPA {
            address & field(47, PAGE_SHIFT) | (address >> 48 & 0xf) << 12
        } else {
            address & field(47, PAGE_SHIFT)
        }
    }
}

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool,
    const TYPES: u64,
    const MARKED: u64,
> Format for Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES, MARKED>
{
    type Input = Va;

    const NAME: &'static str = match (PAGE_SHIFT, INPUT_BITS, WIDE) {
        (12, 39, false) => "arm64 4K 39-bit",
        (12, 48, false) => "arm64 4K 48-bit",
        (12, 52, true) => "arm64 4K 52-bit",
        (12, _, false) => "arm64 4K",
        (12, _, true) => "arm64 4K wide",
        (14, 36, false) => "arm64 16K 36-bit",
        (14, 47, false) => "arm64 16K 47-bit",
        (14, 48, false) => "arm64 16K 48-bit",
        (14, 52, true) => "arm64 16K 52-bit",
        (14, _, false) => "arm64 16K",
        (14, _, true) => "arm64 16K wide",
        (16, 42, false) => "arm64 64K 42-bit",
        (16, 48, false) => "arm64 64K 48-bit",
        (16, 52, true) => "arm64 64K 52-bit",
        (16, _, false) => "arm64 64K",
        (16, _, true) => "arm64 64K wide",
        _ => panic!("the granule is 4, 16 or 64 KiB"),
    };
    const PAGE_SHIFT: u32 = PAGE_SHIFT;
    const LEVELS: u8 = levels(PAGE_SHIFT, INPUT_BITS, WIDE);
    const INPUT_BITS: u32 = INPUT_BITS;
    const OUTPUT_BITS: u32 = {
        let most = if WIDE { 52 } else { 48 };
        assert!(MARKED & 3 == 0, "tables of arm64 have no mark, and leaves no shadow stacks");
        match MARKED {
            0 => most,
            _ => {
                // That addresses have more than 48 bits says elsewhere that descriptors are wide.
                let least = if WIDE { 48 } else { 32 };
                assert!(MARKED >> most == 0, "the address has no such bit");
                assert!(MARKED >> least != 0, "with wide descriptors the bit is 48 or above");
                MARKED.trailing_zeros()
            }
        }
    };
    const HALVES: bool = true;
    const RULE: Rule = Rule::ARM;
    const NATIVE: u64 = GUARDED | NON_SECURE | PBHA | Self::MARK;
    const LINEAR_BITS: u32 = if Self::LPA2 {
        50
    } else if Self::LPA {
        48
    } else {
        64
    };
    const CONTIGUOUS: u64 = CONTIGUOUS;
    const TABLES_RESTRICT: bool = true;
    const SUSPENDED: u64 = SUSPENDED;
    const OPEN: u64 = 0;
    const PROTECTED: u64 = AP_TABLE_READ_ONLY;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = FROZEN;
    const PRESENT: u64 = VALID;

    #[inline(always)]
    fn is_leaf_level(level: Level) -> bool {
        level.height() <= Self::LARGEST
    }

    #[inline(always)]
    fn contiguous(level: Level) -> u32 {
        if level.height() < Self::RUN_LEVELS { run(PAGE_SHIFT, level.height()) } else { 0 }
    }

    #[inline(always)]
    fn kind(entry: u64, level: Level) -> Kind {
        match (entry & VALID != 0, entry & NOT_BLOCK != 0, level) {
            (true, true, Level::PAGE) => Kind::Leaf,
            (true, true, _) => Kind::Table,
            // A block descriptor at the last level is reserved and translates nothing.
            (true, false, Level::PAGE) => Kind::Invalid,
            (true, false, _) => Kind::Leaf,
            (false, true, _) if entry & SUSPENDED == 0 => Kind::Leaf, // parked
            (false, _, _) => Kind::Invalid,
        }
    }

    #[inline(always)]
    fn address_mask(level: Level) -> u64 {
        Self::in_place(Self::shift(level)) | Self::MOVED
    }

    #[inline(always)]
    fn put_address(frame: Pa) -> u64 {
        Self::place(frame.get())
    }

    #[inline(always)]
    fn address(entry: u64, level: Level) -> Pa {
        let low =
            if Self::kind(entry, level) == Kind::Table { PAGE_SHIFT } else { Self::shift(level) };
        let in_place = entry & Self::in_place(low);
        Pa::new(if Self::LPA2 {
            in_place | (entry & Self::MOVED) << 42
        } else if Self::LPA {
            in_place | (entry & Self::MOVED) << 36
        } else {
            in_place
        })
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        let perms = attrs.perms;
        let rights = RIGHTS[usize::from(perms.bits() & 0x3f)];
        let index = Self::INDEX[attrs.memory as usize & 7];
        let refused = if !Self::is_leaf_level(level) {
            NO_LEAF
        } else if rights & REFUSED != 0 {
            rights
        } else if index & REFUSED != 0 {
            index
        } else if Self::LPA2 && attrs.shareability != Shareability::Inner {
            NOT_INNER
        } else if attrs.software > 7 {
            TOO_MANY_BITS
        } else if attrs.native & !Self::NATIVE != 0 {
            NOT_NATIVE
        } else {
            0
        };
        if refused != 0 {
            return Err(Inexpressible(&REASONS[usize::from(refused & 0xf)]));
        }
        let (rights, index) = (u64::from(rights), u64::from(index));
        let mut leaf = VALID
            | ((rights & 1) * AP_USER)
            | (rights & 6) << 52 // PXN, UXN
            | index << ATTR_INDEX
            | u64::from(attrs.software) << SOFTWARE
            | attrs.native;
        if level == Level::PAGE {
            leaf |= NOT_BLOCK;
        }
        leaf |= match (perms.contains(Perms::WRITE), attrs.dirty) {
            (true, true) => DIRTY_MODIFIER,
            (true, false) => DIRTY_MODIFIER | AP_READ_ONLY,
            (false, true) => AP_READ_ONLY | SOFTWARE_DIRTY,
            (false, false) => AP_READ_ONLY,
        };
        if !Self::LPA2 {
            leaf |= match attrs.shareability {
                Shareability::Non => 0,
                Shareability::Outer => 2,
                Shareability::Inner => 3,
            } << SHAREABILITY;
        }
        if !attrs.global {
            leaf |= NOT_GLOBAL;
        }
        if attrs.accessed {
            leaf |= ACCESS;
        }
        if perms.is_empty() {
            // As what can be read, but not valid.
            leaf = leaf & !VALID | PARKED;
        }
        Ok(leaf)
    }

    #[inline]
    fn decode(entry: u64, level: Level) -> Attrs {
        Self::decode_meaning(Self::meaning(entry), level)
    }

    #[inline(always)]
    fn meaning(leaf: u64) -> u64 {
        match leaf & AP_READ_ONLY {
            0 => leaf | DIRTY_MODIFIER,
            _ => leaf,
        }
    }

    #[inline]
    fn decode_meaning(meaning: u64, _: Level) -> Attrs {
        let has = |bit: u64| meaning & bit != 0;
        // What a parked leaf keeps besides VALID permits nothing else.
        let (write, user) = (has(DIRTY_MODIFIER), has(AP_USER));
        let mut perms = Perms::empty();
        perms.set(Perms::READ, has(VALID));
        perms.set(Perms::WRITE, write);
        perms.set(Perms::USER_READ, user);
        perms.set(Perms::USER_WRITE, user && write);
        // D8.4.1: what the user can write, after all levels, the privileged do not execute.
        perms.set(Perms::EXEC, !(has(PXN) || user && write));
        perms.set(Perms::USER_EXEC, !has(UXN));
        Attrs {
            perms,
            memory: Self::MEMORY[(meaning >> ATTR_INDEX & 7) as usize],
            shareability: match meaning >> SHAREABILITY & 3 {
                _ if Self::LPA2 => Shareability::Inner,
                0 => Shareability::Non,
                2 => Shareability::Outer,
                _ => Shareability::Inner,
            },
            global: !has(NOT_GLOBAL),
            accessed: has(ACCESS),
            dirty: !has(AP_READ_ONLY) || has(SOFTWARE_DIRTY),
            software: (meaning >> SOFTWARE & 7) as u8,
            native: meaning & Self::NATIVE,
        }
    }

    #[inline]
    fn restricted(mut meaning: u64, _: Level, denied: Perms) -> u64 {
        if denied.contains(Perms::WRITE) {
            // A leaf that is written is dirty by that alone.
            if meaning & AP_READ_ONLY == 0 {
                meaning |= SOFTWARE_DIRTY;
            }
            meaning = meaning & !DIRTY_MODIFIER | AP_READ_ONLY;
        }
        if denied.contains(Perms::USER_READ) {
            meaning &= !AP_USER;
        }
        if denied.contains(Perms::EXEC) {
            meaning |= PXN;
        }
        if denied.contains(Perms::USER_EXEC) {
            meaning |= UXN;
        }
        meaning
    }

    #[inline(always)]
    fn table(frame: Pa, deny: Perms) -> u64 {
        let mut bits = VALID | NOT_BLOCK | Self::put_address(frame);
        if deny.contains(Perms::EXEC) {
            bits |= PXN_TABLE;
        }
        if deny.contains(Perms::USER_EXEC) {
            bits |= UXN_TABLE;
        }
        if deny.contains(Perms::ANY_WRITE) {
            bits |= AP_TABLE_READ_ONLY;
        }
        bits
    }

    #[inline]
    fn denied(table: u64) -> Perms {
        let mut denied = Perms::empty();
        denied.set(Perms::EXEC, table & PXN_TABLE != 0);
        denied.set(Perms::USER_EXEC, table & UXN_TABLE != 0);
        denied.set(Perms::USER_READ | Perms::USER_WRITE, table & AP_TABLE_NO_USER != 0);
        denied |= if table & AP_TABLE_READ_ONLY != 0 { Perms::ANY_WRITE } else { Perms::empty() };
        denied
    }

    #[inline(always)]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        // D8.5.1 and D8.5.2: the access flag where it is clear; AP[2] where DBM says that the page
        // is writable.
        let clean = DIRTY_MODIFIER | AP_READ_ONLY | VALID;
        caps.hardware_access && leaf & (VALID | ACCESS) == VALID
            || caps.hardware_dirty && leaf & clean == clean
    }

    #[inline(always)]
    fn is_single_page(entry: u64) -> bool {
        entry & (VALID | NOT_BLOCK | CONTIGUOUS) == VALID | NOT_BLOCK
    }

    #[inline(always)]
    fn table_below(entry: u64, level: Level) -> Option<Pa> {
        if Self::MOVED != 0 {
            return (Self::kind(entry, level) == Kind::Table).then(|| Self::address(entry, level));
        }
        // Both bits are taken off first, and then tested: one instruction less of five, on x86.
        let both = VALID | NOT_BLOCK;
        let frame = (entry & (Self::in_place(PAGE_SHIFT) | both)).wrapping_sub(both);
        (frame & both == 0).then_some(Pa::new(frame))
    }

    #[inline(always)]
    fn suspend(entry: u64) -> u64 {
        entry & !VALID | SUSPENDED
    }

    #[inline(always)]
    fn resume(suspended: u64) -> u64 {
        suspended & !SUSPENDED | VALID
    }
}

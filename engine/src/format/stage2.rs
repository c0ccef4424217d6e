//! arm64 stage 2: what a guest takes for physical becomes physical. Granules of 4, 16 and 64 KiB.
//!
//! Source: Arm Architecture Reference Manual, DDI 0487, chapter D8. Sections are named at the bits.
//! Where addresses stand, which levels have blocks and how long runs are is as in stage 1, and is
//! said [there](super::Arm64).
//!
//! # The first table
//!
//! The input size is the embedder's choice (`VTCR_EL2.T0SZ`). Where one level more would resolve
//! four bits or fewer, the manual lets up to 16 tables of the level below stand beside each other
//! instead, which saves each walk a step (D8.2, concatenated translation tables). These formats
//! always do so, and start at level 2 at the latest, so that blocks can be mapped. `VTCR_EL2.SL0`
//! follows: the start level is 3 less [`root_level`](Format::root_level). 40 bits of 4 KiB pages
//! start at level 1 with two tables, 52 bits at level 0 with 16.
//!
//! # Attributes
//!
//! *Memory types* stand in the descriptor itself, MemAttr\[3:0\], and what the guest says in its
//! stage 1 is combined with them: without FEAT_S2FWB (D8.6.5) the stricter of the two holds, so
//! that a guest which maps memory non-cacheable reads it past the caches; with it (`HCR_EL2.FWB`,
//! D8.6.6) [`Memory::Normal`] is write-back whatever the guest says. The same bits mean different
//! things, so the two are two formats.
//!
//! *Execution* is told apart by exception level (FEAT_XNX, D8.4.3): [`Perms::EXEC`] is the guest's
//! EL1, [`Perms::USER_EXEC`] its EL0. Give both or neither on processors older than Armv8.2, which
//! do not have it.
//!
//! *Dirty state* is that of stage 1 the other way round (D8.5.2): a page is writable when DBM is
//! set; it is dirty when S2AP\[1\] is set, and the hardware sets it on the first write if
//! `VTCR_EL2.HD` is set. Bit 55 keeps it for a page that loses the permission to write.
//!
//! Table descriptors carry no permissions and no flags.

use super::{
    Arm64, Attrs, Format, Inexpressible, Kind, Memory, Perms, Rule, Shareability, check_guest,
};
use crate::addr::{Ipa, Level, Pa};
use crate::platform::Caps;

/// arm64 stage 2 with pages of `1 << PAGE_SHIFT` bytes, for intermediate physical addresses of
/// `INPUT_BITS` bits, 32 to 48; `WIDE` for physical addresses of 52 bits instead of 48, and up to
/// 52 bits of input (FEAT_LPA2 with `VTCR_EL2.DS`, for 64 KiB FEAT_LPA); `FORCED` with
/// `HCR_EL2.FWB` set.
///
/// ```
/// use tablewright::{Attrs, Format, Level, Memory, format::Stage2};
/// type Guest = Stage2<12, 40>;
/// // Levels 1 to 3, and two tables beside each other at level 1.
/// assert_eq!((Guest::LEVELS, Guest::root_tables()), (3, 2));
/// // Read and write, execute at both levels, accessed, inner shareable, write-back, dirty.
/// assert_eq!(Guest::encode(&Attrs::GUEST_MEMORY, Level::PAGE), Ok(0x0008_0000_0000_07ff));
///
/// type Forced = Stage2<12, 40, false, true>;
/// assert_eq!(Forced::encode(&Attrs::GUEST_MEMORY, Level::PAGE), Ok(0x0008_0000_0000_07db));
/// let write_through = Attrs::GUEST_MEMORY.with_memory(Memory::WriteThrough);
/// assert!(Forced::encode(&write_through, Level::PAGE).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage2<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool = false,
    const FORCED: bool = false,
>;

/// The last argument of a format of stage 2: it forces write-back, whatever the guest says
/// (FEAT_S2FWB). By default it does not.
pub const FORCED_WRITE_BACK: bool = true;

/// 4 KiB granule, memory up to 48 bits.
pub type Stage2K4<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<12, INPUT_BITS, false, FORCED>;
/// 16 KiB granule, memory up to 48 bits.
pub type Stage2K16<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<14, INPUT_BITS, false, FORCED>;
/// 64 KiB granule, memory up to 48 bits.
pub type Stage2K64<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<16, INPUT_BITS, false, FORCED>;
/// 4 KiB granule, memory up to 52 bits (FEAT_LPA2).
pub type Stage2K4Wide<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<12, INPUT_BITS, true, FORCED>;
/// 16 KiB granule, memory up to 52 bits (FEAT_LPA2).
pub type Stage2K16Wide<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<14, INPUT_BITS, true, FORCED>;
/// 64 KiB granule, memory up to 52 bits (FEAT_LPA).
pub type Stage2K64Wide<const INPUT_BITS: u32, const FORCED: bool = false> =
    Stage2<16, INPUT_BITS, true, FORCED>;

// D8.3.1: descriptor bits of stage 2, where they are not those of stage 1.
const VALID: u64 = 1 << 0;
const NOT_BLOCK: u64 = 1 << 1;
const MEMORY: u32 = 2; // MemAttr, 5:2
const READ: u64 = 1 << 6; // S2AP[0]
const WRITE: u64 = 1 << 7; // S2AP[1]
const SHAREABILITY: u32 = 8; // 9:8, not with LPA2
const ACCESS: u64 = 1 << 10; // AF
const NO_XS: u64 = 1 << 11; // FnXS, FEAT_XS
/// Of a parked leaf, as in stage 1.
const PARKED: u64 = NOT_BLOCK;
const DIRTY_MODIFIER: u64 = 1 << 51; // DBM
const NEVER: u32 = 53; // XN[1:0], 54:53
const SOFTWARE_DIRTY: u64 = 1 << 55; // 58:55 are for software
const SOFTWARE: u32 = 56;
const PBHA: u64 = 0xf << 59; // 62:59, FEAT_HPDS2 or ignored
// Of a write-protected table, which is invalid: the hardware ignores every bit. It keeps bit 1,
// which frozen entries have not, and parked blocks have; of those bit 53, XN[0], is clear.
const PROTECTED: u64 = 1 << 53;
const OPENING: u64 = 1 << 56;

/// D8.2: as few levels as there can be with up to 16 tables, 4 bits, beside each other at the
/// first; two at least.
const fn levels(page_shift: u32, input_bits: u32, wide: bool) -> u8 {
    assert!(
        input_bits >= 32 && input_bits <= if wide { 52 } else { 48 },
        "intermediate physical addresses have 32 to 48 bits, to 52 with wide descriptors"
    );
    let mut levels = 2;
    while page_shift + (page_shift - 3) * levels as u32 + 4 < input_bits {
        levels += 1;
    }
    levels
}

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const FORCED: bool>
    Format for Stage2<PAGE_SHIFT, INPUT_BITS, WIDE, FORCED>
{
    type Input = Ipa;

    const NAME: &'static str = match (PAGE_SHIFT, WIDE, FORCED) {
        (12, false, false) => "arm64 stage 2 4K 48-bit",
        (12, false, true) => "arm64 stage 2 4K 48-bit forced write-back",
        (12, true, false) => "arm64 stage 2 4K 52-bit",
        (12, true, true) => "arm64 stage 2 4K 52-bit forced write-back",
        (14, false, false) => "arm64 stage 2 16K 48-bit",
        (14, false, true) => "arm64 stage 2 16K 48-bit forced write-back",
        (14, true, false) => "arm64 stage 2 16K 52-bit",
        (14, true, true) => "arm64 stage 2 16K 52-bit forced write-back",
        (16, false, false) => "arm64 stage 2 64K 48-bit",
        (16, false, true) => "arm64 stage 2 64K 48-bit forced write-back",
        (16, true, false) => "arm64 stage 2 64K 52-bit",
        (16, true, true) => "arm64 stage 2 64K 52-bit forced write-back",
        _ => panic!("the granule is 4, 16 or 64 KiB"),
    };
    const PAGE_SHIFT: u32 = PAGE_SHIFT;
    const LEVELS: u8 = levels(PAGE_SHIFT, INPUT_BITS, WIDE);
    const INPUT_BITS: u32 = INPUT_BITS;
    const OUTPUT_BITS: u32 = if WIDE { 52 } else { 48 };
    const HALVES: bool = false;
    const RULE: Rule = Rule::ARM;
    const NATIVE: u64 = NO_XS | PBHA;
    const LINEAR_BITS: u32 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::LINEAR_BITS;
    const CONTIGUOUS: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::CONTIGUOUS;
    const TABLES_RESTRICT: bool = false;
    const SUSPENDED: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::SUSPENDED;
    const OPEN: u64 = VALID;
    const PROTECTED: u64 = PROTECTED;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::FROZEN;
    const PRESENT: u64 = VALID;

    #[inline]
    fn is_leaf_level(level: Level) -> bool {
        level.height() < Self::LEVELS && Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::is_leaf_level(level)
    }

    #[inline]
    fn contiguous(level: Level) -> u32 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::contiguous(level)
    }

    #[inline]
    fn kind(entry: u64, level: Level) -> Kind {
        let marks = VALID | NOT_BLOCK | PROTECTED | Self::SUSPENDED;
        if entry & marks == NOT_BLOCK | PROTECTED && level != Level::PAGE {
            return Kind::Table;
        }
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::kind(entry, level)
    }

    #[inline]
    fn address_mask(level: Level) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::address_mask(level)
    }

    #[inline]
    fn put_address(frame: Pa) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::put_address(frame)
    }

    #[inline]
    fn address(entry: u64, level: Level) -> Pa {
        // A write-protected table keeps its address where it was, and so does a parked block.
        let protected = Self::kind(entry, level) == Kind::Table;
        let entry = if protected { entry | VALID } else { entry };
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::address(entry, level)
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        check_guest(attrs)?;
        if !Self::is_leaf_level(level) {
            return Err(Inexpressible(&"no block can stand at this level"));
        }
        let may = |perms: Perms| attrs.perms.contains(perms);
        let mut bits = VALID;
        if level == Level::PAGE {
            bits |= NOT_BLOCK;
        }
        // D8.4.1: S2AP, reading and writing each by itself.
        if may(Perms::READ) {
            bits |= READ;
        }
        bits |= match (may(Perms::WRITE), attrs.dirty) {
            (true, true) => DIRTY_MODIFIER | WRITE,
            (true, false) => DIRTY_MODIFIER,
            (false, true) => SOFTWARE_DIRTY,
            (false, false) => 0,
        };
        // D8.4.3: XN[1:0].
        bits |= match (may(Perms::EXEC), may(Perms::USER_EXEC)) {
            (true, true) => 0b00,
            (false, true) => 0b01,
            (false, false) => 0b10,
            (true, false) => 0b11,
        } << NEVER;

        // D8.6.5 and D8.6.6: MemAttr.
        bits |= match (FORCED, attrs.memory) {
            (_, Memory::DeviceStrict) => 0b0000,
            (_, Memory::Device) => 0b0001,
            (_, Memory::NonCacheable) => 0b0101,
            (true, Memory::Normal) => 0b0110,
            (false, Memory::WriteThrough) => 0b1010,
            (false, Memory::Normal) => 0b1111,
            (true, Memory::WriteThrough) => {
                return Err(Inexpressible(&"forced write-back has no write-through memory"));
            }
            (_, Memory::Tagged) => {
                return Err(Inexpressible(&"whether memory is tagged is said by stage 1"));
            }
        } << MEMORY;
        if WIDE && PAGE_SHIFT != 16 {
            if attrs.shareability != Shareability::Inner {
                return Err(Inexpressible(
                    &"with 52-bit descriptors shareability comes from VTCR_EL2 and is inner",
                ));
            }
        } else {
            bits |= match attrs.shareability {
                Shareability::Non => 0,
                Shareability::Outer => 2,
                Shareability::Inner => 3,
            } << SHAREABILITY;
        }
        if attrs.accessed {
            bits |= ACCESS;
        }
        if attrs.software > 7 {
            return Err(Inexpressible(&"three software bits are all there are"));
        }
        bits |= u64::from(attrs.software) << SOFTWARE;
        if attrs.native & !Self::NATIVE != 0 {
            return Err(Inexpressible(&"a native bit does not belong to the embedder"));
        }
        bits |= attrs.native;
        Ok(match attrs.perms.is_empty() {
            true => bits & !VALID | PARKED,
            false => bits,
        })
    }

    #[inline]
    fn decode(entry: u64, _: Level) -> Attrs {
        let has = |bit: u64| entry & bit != 0;
        let never = entry >> NEVER & 0b11;
        let mut perms = Perms::empty();
        perms.set(Perms::READ, has(READ));
        perms.set(Perms::WRITE, has(WRITE | DIRTY_MODIFIER));
        perms = perms.and_user();
        perms.set(Perms::EXEC, matches!(never, 0b00 | 0b11));
        perms.set(Perms::USER_EXEC, matches!(never, 0b00 | 0b01));
        let memory = entry >> MEMORY & 0xf;
        Attrs {
            perms,
            memory: match (FORCED, memory >> 2, memory & 0b11) {
                (true, 0 | 2, 0) | (false, 0, 0) => Memory::DeviceStrict,
                (true, 0 | 2, _) | (false, 0, _) => Memory::Device,
                (true, _, 0b01) => Memory::NonCacheable,
                (true, _, _) => Memory::Normal,
                // Outer and inner: what one of them does not keep is not kept.
                (false, 0b01, _) | (false, _, 0b01) => Memory::NonCacheable,
                (false, 0b10, _) | (false, _, 0b10) => Memory::WriteThrough,
                (false, _, _) => Memory::Normal,
            },
            shareability: match entry >> SHAREABILITY & 3 {
                _ if WIDE && PAGE_SHIFT != 16 => Shareability::Inner,
                0 => Shareability::Non,
                2 => Shareability::Outer,
                _ => Shareability::Inner,
            },
            global: false,
            accessed: has(ACCESS),
            dirty: has(WRITE | SOFTWARE_DIRTY),
            software: (entry >> SOFTWARE & 7) as u8,
            native: entry & Self::NATIVE,
        }
    }

    #[inline]
    fn table(frame: Pa, _: Perms) -> u64 {
        VALID | NOT_BLOCK | Self::put_address(frame)
    }

    #[inline]
    fn denied(_: u64) -> Perms {
        Perms::empty()
    }

    #[inline]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        // D8.5.1 and D8.5.2: the access flag where it is clear; S2AP[1] where DBM says that the
        // page is writable.
        let written = DIRTY_MODIFIER | WRITE | VALID;
        caps.hardware_access && leaf & (VALID | ACCESS) == VALID
            || caps.hardware_dirty && leaf & written == written & !WRITE
    }

    #[inline]
    fn suspend(entry: u64) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::suspend(entry)
    }

    #[inline]
    fn resume(suspended: u64) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE>::resume(suspended)
    }
}

//! arm64 stage 1 of EL2 with `HCR_EL2.E2H` clear: a hypervisor that is not a kernel.
//!
//! Source: Arm Architecture Reference Manual, DDI 0487, chapter D8. Sections are named at the bits.
//! Levels, addresses, memory types, runs, and dirty state are those of [EL1&0](super::Arm64), and
//! are said there; with E2H set, the regime is EL2&0 (FEAT_VHE), and so is all the rest.
//!
//! There is one root, `TTBR0_EL2`, and it translates addresses that start with zeros. There is one
//! exception level: what [`Attrs`] say of the user is refused. There are no ASIDs: every
//! translation is [global](Attrs::global), and the constants `KERNEL_…` of [`Attrs`] are what to
//! map with. The embedder loads [`Translation::MAIR`](crate::arch::arm64::Translation::MAIR) into
//! `MAIR_EL2`, and [`tcr_el2`](crate::arch::arm64::tcr_el2) into `TCR_EL2`.

use super::{Arm64, Attrs, Format, Inexpressible, Kind, MAIR, Perms, Rule};
use crate::addr::{Level, Pa, Va};
use crate::platform::Caps;

/// arm64 stage 1 of EL2 alone, with pages of `1 << PAGE_SHIFT` bytes; the parameters are those of
/// [`Arm64`].
///
/// ```
/// use tablewright::{Attrs, Format, Level, Perms, format::Arm64El2};
/// type Hypervisor = Arm64El2<12, 39>;
/// // XN, DBM, accessed, inner shareable, AP[1] which is one, page.
/// assert_eq!(Hypervisor::encode(&Attrs::KERNEL_DATA, Level::PAGE), Ok(0x0048_0000_0000_0743));
/// assert!(Hypervisor::encode(&Attrs::USER_DATA, Level::PAGE).is_err());
/// assert!(!Hypervisor::is_canonical(u64::MAX));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm64El2<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool = false,
    const TYPES: u64 = MAIR,
>;

/// 4 KiB granule, 48 bits.
pub type Arm64El2K4 = Arm64El2<12, 48>;
/// 16 KiB granule, 48 bits.
pub type Arm64El2K16 = Arm64El2<14, 48>;
/// 64 KiB granule, 48 bits.
pub type Arm64El2K64 = Arm64El2<16, 48>;
/// 4 KiB granule, 52 bits (FEAT_LPA2).
pub type Arm64El2K4Wide = Arm64El2<12, 52, true>;
/// 16 KiB granule, 52 bits (FEAT_LPA2).
pub type Arm64El2K16Wide = Arm64El2<14, 52, true>;
/// 64 KiB granule, 52 bits (FEAT_LPA).
pub type Arm64El2K64Wide = Arm64El2<16, 52, true>;

// D8.3.1 and D8.4.1: descriptor bits where they are not those of EL1&0. nG (11), bit 53 which is
// PXN there, and in tables 59 and 61 are RES0.
const ONE: u64 = 1 << 6; // AP[1], RES1
const READ_ONLY: u64 = 1 << 7; // AP[2]
const DIRTY_MODIFIER: u64 = 1 << 51; // DBM
const NEVER: u64 = 1 << 54; // XN
const OF_EL1: u64 = 0b11 << 53; // PXN, UXN
// Table descriptors.
const TABLE_NEVER: u64 = 1 << 60; // XNTable
const TABLE_READ_ONLY: u64 = 1 << 62; // APTable[1]

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const TYPES: u64> Format
    for Arm64El2<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>
{
    type Input = Va;

    const NAME: &'static str = match (PAGE_SHIFT, WIDE) {
        (12, false) => "arm64 EL2 4K",
        (12, true) => "arm64 EL2 4K wide",
        (14, false) => "arm64 EL2 16K",
        (14, true) => "arm64 EL2 16K wide",
        (16, false) => "arm64 EL2 64K",
        (16, true) => "arm64 EL2 64K wide",
        _ => panic!("the granule is 4, 16 or 64 KiB"),
    };
    const PAGE_SHIFT: u32 = PAGE_SHIFT;
    const LEVELS: u8 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::LEVELS;
    const INPUT_BITS: u32 = INPUT_BITS;
    const OUTPUT_BITS: u32 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::OUTPUT_BITS;
    const HALVES: bool = false;
    const SIGNED: bool = false;
    const RULE: Rule = Rule::ARM;
    const NATIVE: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::NATIVE;
    const PLAIN: Attrs = Attrs::KERNEL_RODATA;
    const LINEAR_BITS: u32 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::LINEAR_BITS;
    const CONTIGUOUS: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::CONTIGUOUS;
    const TABLES_RESTRICT: bool = true;
    const SUSPENDED: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::SUSPENDED;
    const OPEN: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::OPEN;
    const PROTECTED: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::PROTECTED;
    const OPENING: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::OPENING;
    const FROZEN: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::FROZEN;
    const PRESENT: u64 = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::PRESENT;

    #[inline]
    fn is_leaf_level(level: Level) -> bool {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::is_leaf_level(level)
    }

    #[inline]
    fn contiguous(level: Level) -> u32 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::contiguous(level)
    }

    #[inline]
    fn kind(entry: u64, level: Level) -> Kind {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::kind(entry, level)
    }

    #[inline]
    fn address_mask(level: Level) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::address_mask(level)
    }

    #[inline]
    fn put_address(frame: Pa) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::put_address(frame)
    }

    #[inline]
    fn address(entry: u64, level: Level) -> Pa {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::address(entry, level)
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        if attrs.perms.intersects(Perms::ANY_USER) {
            return Err(Inexpressible(&"EL2 without VHE has no user"));
        }
        if !attrs.global {
            return Err(Inexpressible(&"EL2 without VHE has one address space"));
        }
        let bits = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::encode(attrs, level)?;
        let never = match attrs.perms.contains(Perms::EXEC) {
            true => 0,
            false => NEVER,
        };
        Ok(bits & !OF_EL1 | ONE | never)
    }

    #[inline]
    fn decode(entry: u64, level: Level) -> Attrs {
        let mut perms = Perms::empty();
        if entry & Self::PRESENT != 0 {
            let write = entry & (READ_ONLY | DIRTY_MODIFIER) != READ_ONLY;
            perms.set(Perms::READ, true);
            perms.set(Perms::WRITE, write);
            perms.set(Perms::EXEC, entry & NEVER == 0);
        }
        Attrs {
            perms,
            global: true,
            ..Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::decode(entry, level)
        }
    }

    #[inline]
    fn restricted(meaning: u64, level: Level, denied: Perms) -> u64 {
        let of_el1 = denied & Perms::WRITE;
        let meaning =
            Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::restricted(meaning, level, of_el1);
        match denied.contains(Perms::EXEC) {
            true => meaning | NEVER,
            false => meaning,
        }
    }

    #[inline]
    fn table(frame: Pa, deny: Perms) -> u64 {
        let mut bits = Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::table(frame, Perms::empty());
        if deny.contains(Perms::ANY_EXEC) {
            bits |= TABLE_NEVER;
        }
        if deny.contains(Perms::ANY_WRITE) {
            bits |= TABLE_READ_ONLY;
        }
        bits
    }

    #[inline]
    fn denied(table: u64) -> Perms {
        let mut denied = Perms::empty();
        if table & TABLE_NEVER != 0 {
            denied |= Perms::ANY_EXEC;
        }
        if table & TABLE_READ_ONLY != 0 {
            denied |= Perms::ANY_WRITE;
        }
        denied
    }

    #[inline]
    fn hardware_writes(leaf: u64, level: Level, caps: &Caps) -> bool {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::hardware_writes(leaf, level, caps)
    }

    #[inline]
    fn is_single_page(entry: u64) -> bool {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::is_single_page(entry)
    }

    #[inline]
    fn suspend(entry: u64) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::suspend(entry)
    }

    #[inline]
    fn resume(suspended: u64) -> u64 {
        Arm64::<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>::resume(suspended)
    }
}

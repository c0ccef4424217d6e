//! RISC-V: Sv39, Sv48 and Sv57, and for guests Sv39x4, Sv48x4 and Sv57x4.
//!
//! Source: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, version 20240411
//! (PRIV). Sections are named at the bits.
//!
//! Nothing in a descriptor says at which level it stands: R, W and X tell a leaf from a table, and
//! each level has leaves, the root's included. A table takes no permission away.
//!
//! # Permissions
//!
//! One bit each for reading, writing and executing, and one that makes the page the user's. The
//! supervisor never executes a page of the user, and reads and writes it while `sstatus.SUM` is set
//! (PRIV 10.1.1.2): the format says what it may with SUM set. A page may be executed and not read.
//! In the G-stage every access is one of a user (PRIV 18.5.1): what it permits it permits to both
//! of the guest.
//!
//! # Memory types
//!
//! [`Memory::Normal`] leaves the type to the machine's physical memory attributes: a device at that
//! address stays a device. With Svpbmt (PRIV 12) a leaf may override it, as
//! [non-cacheable](Memory::NonCacheable) or as a [device](Memory::Device). Without Svpbmt these two
//! are [inexpressible](Inexpressible).
//!
//! # Flags
//!
//! With Svadu, hardware sets A and D. With Svade alone an access faults instead, and software sets
//! them. [`Caps::hardware_access`] and [`Caps::hardware_dirty`] tell the two apart. D stays set
//! when a page loses the permission to write.
//!
//! # Runs
//!
//! There are none. The 16 entries of a Svnapot run (PRIV 11) all hold the address of the run, so
//! that an entry alone does not say what it translates. Those of a tree that was adopted are not
//! touched.

use core::marker::PhantomData;

use super::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Rule, Shareability, check_guest};
use crate::addr::{Address, Ipa, Level, Pa, Va};
use crate::platform::Caps;

/// RISC-V with `LEVELS` levels, 3 to 5; `TYPED` with Svpbmt; translating virtual addresses, or, in
/// the G-stage, those that a guest takes for physical, which have two bits more.
///
/// ```
/// use tablewright::{Attrs, Format, Ipa, Level, Memory, Pa, format::Riscv64};
/// let of = |attrs: &Attrs| Riscv64::<3>::encode(attrs, Level::PAGE).ok();
/// assert_eq!(of(&Attrs::KERNEL_TEXT), Some(0x6b)); // valid, R, X, global, accessed
/// assert_eq!(of(&Attrs::KERNEL_DEVICE).map(|bits| bits >> 61), Some(2)); // IO
/// assert_eq!(Riscv64::<3>::put_address(Pa::new(0x8020_0000)), 0x2008_0000);
///
/// // Without Svpbmt.
/// assert!(Riscv64::<3, false>::encode(&Attrs::KERNEL_DEVICE, Level::PAGE).is_err());
///
/// // Sv39x4: four tables beside each other at the root.
/// type Guest = Riscv64<3, true, Ipa>;
/// assert_eq!((Guest::INPUT_BITS, Guest::root_tables()), (41, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Riscv64<const LEVELS: u8, const TYPED: bool = true, I = Va>(PhantomData<I>);

/// 39 bits of virtual addresses.
pub type Sv39<const TYPED: bool = true> = Riscv64<3, TYPED>;
/// 48 bits of virtual addresses.
pub type Sv48<const TYPED: bool = true> = Riscv64<4, TYPED>;
/// 57 bits of virtual addresses.
pub type Sv57<const TYPED: bool = true> = Riscv64<5, TYPED>;
/// 41 bits of a guest's physical addresses.
pub type Sv39x4<const TYPED: bool = true> = Riscv64<3, TYPED, Ipa>;
/// 50 bits of a guest's physical addresses.
pub type Sv48x4<const TYPED: bool = true> = Riscv64<4, TYPED, Ipa>;
/// 59 bits of a guest's physical addresses.
pub type Sv57x4<const TYPED: bool = true> = Riscv64<5, TYPED, Ipa>;

// PRIV 10.3.1 and 10.4.1.
const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const GLOBAL: u64 = 1 << 5;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const SOFTWARE: u32 = 8; // 9:8
const ADDRESS: u64 = ((1 << 44) - 1) << 10; // 53:10, the number of a page
const TYPE: u32 = 61; // 62:61
/// Of a member of a Svnapot run.
const NAPOT: u64 = 1 << 63;
const RIGHTS: u64 = READ | WRITE | EXECUTE;
// Marks of invalid entries. Hardware ignores all bits of these but V (10.3.1). Bits 60:54 of a
// valid entry are zero, so that no mark survives there.
const FROZEN: u64 = 1 << 56;
const PARKED: u64 = 1 << 57;
const SUSPENDED: u64 = 1 << 58;
/// W without R, which no leaf has (10.3.1), and V clear: a table.
const PROTECTED: u64 = WRITE;
const OPENING: u64 = 1 << 60;

/// Whether V, R, W, X and U are those of a table above the last level: V alone, or what marks one
/// as write-protected. One test of five bits, on the way of each walk.
#[inline(always)]
const fn is_table(entry: u64) -> bool {
    const TABLES: u32 = 1 << VALID | 1 << PROTECTED;
    TABLES >> (entry & 0x1f) & 1 != 0
}

/// A change needs no break (PRIV 10.2.1: a processor uses what was there or what is there). An
/// address is forgotten at every level. D is set where a leaf can be written, or a write faults.
const RULE: Rule = Rule {
    breaks: false,
    spares_other_levels: false,
    tags_invalid_entries: true,
    writes_when_dirty: true,
};

// Why permissions cannot be had.
const REFUSED: u8 = 0x80;

static REASONS: [&str; 8] = [
    "RISC-V cannot map memory that can be written and not read",
    "RISC-V lets the supervisor and the user read and write the same pages of the user",
    "on RISC-V the supervisor never executes a page of the user",
    "the G-stage lets all of the guest execute, or nothing of it",
    "RISC-V memory is always coherent",
    "two software bits are all there are",
    "RISC-V has no native bits",
    "RISC-V has no such memory type, or has it with Svpbmt alone",
];

/// Returns R, W, X and U of permissions, or why they cannot be had.
const fn rights(perms: Perms, guest: bool) -> u8 {
    let user = perms.intersects(Perms::ANY_USER);
    let privileged = perms.difference(Perms::ANY_USER).bits();
    let of_user = perms.intersection(Perms::ANY_USER).bits() >> 3;
    let executes = Perms::EXEC.bits();
    let all = if user { of_user } else { privileged };
    if all & 0b11 == Perms::WRITE.bits() {
        REFUSED
    } else if user && (privileged ^ of_user) & !executes != 0 {
        REFUSED | 1
    } else if guest && privileged != of_user {
        REFUSED | 3
    } else if !guest && user && privileged & executes != 0 {
        REFUSED | 2
    } else {
        all << 1 | (user as u8) << 4
    }
}

/// By permissions: of the G-stage in the second half.
static ENCODED: [u8; 128] = {
    let mut table = [0; 128];
    let mut at = 0;
    while at < table.len() {
        table[at] = rights(Perms::from_bits_truncate(at as u8 & 0x3f), at >= 64);
        at += 1;
    }
    table
};

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const LEVELS: u8, const TYPED: bool, I: Address> Format for Riscv64<LEVELS, TYPED, I> {
    type Input = I;

    const NAME: &'static str = match (LEVELS, I::SIGNED) {
        (3, true) => "RISC-V Sv39",
        (4, true) => "RISC-V Sv48",
        (5, true) => "RISC-V Sv57",
        (3, false) => "RISC-V Sv39x4",
        (4, false) => "RISC-V Sv48x4",
        (5, false) => "RISC-V Sv57x4",
        _ => panic!("RISC-V has 3 to 5 levels"),
    };
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = LEVELS;
    // PRIV 10.4 to 10.6; 18.5.1: two bits more, and a first table of four pages.
    const INPUT_BITS: u32 = 12 + 9 * LEVELS as u32 + if I::SIGNED { 0 } else { 2 };
    const OUTPUT_BITS: u32 = 56;
    const HALVES: bool = false;
    const RULE: Rule = RULE;
    const NATIVE: u64 = 0;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = false;
    const SUSPENDED: u64 = SUSPENDED;
    const OPEN: u64 = VALID;
    const PROTECTED: u64 = PROTECTED;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = FROZEN;
    const PRESENT: u64 = VALID;

    #[inline(always)]
    fn is_leaf_level(level: Level) -> bool {
        level.height() < LEVELS
    }

    #[inline(always)]
    fn contiguous(_: Level) -> u32 {
        0
    }

    #[inline(always)]
    fn kind(entry: u64, level: Level) -> Kind {
        if level != Level::PAGE && is_table(entry) {
            return Kind::Table;
        }
        let is_leaf = match entry & VALID {
            0 => entry & PARKED != 0,
            // 10.3.2: W without R is reserved; N makes a run of it.
            _ => entry & NAPOT == 0 && (entry & READ != 0 || entry & RIGHTS == EXECUTE),
        };
        if is_leaf { Kind::Leaf } else { Kind::Invalid }
    }

    #[inline(always)]
    fn address_mask(level: Level) -> u64 {
        ADDRESS & (u64::MAX << ((Self::shift(level) - 2) & 63))
    }

    #[inline(always)]
    fn put_address(frame: Pa) -> u64 {
        frame.get() >> 2 & ADDRESS
    }

    #[inline(always)]
    fn address(entry: u64, _: Level) -> Pa {
        Pa::new((entry & ADDRESS) << 2)
    }

    #[inline(always)]
    fn table_below(entry: u64, level: Level) -> Option<Pa> {
        is_table(entry).then_some(Self::address(entry, level))
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        let guest = usize::from(!I::SIGNED);
        if guest != 0 {
            check_guest(attrs)?;
        }
        if !Self::is_leaf_level(level) {
            return Err(Inexpressible(&"there is no such level"));
        }
        let rights = ENCODED[usize::from(attrs.perms.bits() & 0x3f) | guest << 6];
        // PRIV 12: 0 is what the machine has there.
        let kind = match attrs.memory {
            Memory::Normal => Some(0),
            Memory::NonCacheable if TYPED => Some(1),
            Memory::Device if TYPED => Some(2),
            _ => None,
        };
        let (refused, kind) = match kind {
            _ if rights & REFUSED != 0 => (rights & 7, 0),
            _ if attrs.shareability != Shareability::Inner => (4, 0),
            _ if attrs.software > 3 => (5, 0),
            _ if attrs.native != 0 => (6, 0),
            None => (7, 0),
            Some(kind) => (u8::MAX, kind),
        };
        if let Some(reason) = REASONS.get(usize::from(refused)) {
            return Err(Inexpressible(reason));
        }
        let leaf = u64::from(rights)
            | (u64::from(attrs.global) * GLOBAL)
            | (u64::from(attrs.accessed) * ACCESSED)
            | (u64::from(attrs.dirty) * DIRTY)
            | u64::from(attrs.software) << SOFTWARE
            | kind << TYPE;
        Ok(match attrs.perms.is_empty() {
            true => leaf | PARKED,
            false => leaf | VALID,
        })
    }

    #[inline]
    fn decode(entry: u64, _: Level) -> Attrs {
        let has = |bit: u64| entry & bit != 0;
        let (user, guest) = (has(USER), !I::SIGNED);
        let all = Perms::from_bits_truncate((entry >> 1 & 7) as u8);
        let perms = match (guest, user) {
            (true, _) => all.and_user(),
            (false, true) => all.and_user().difference(Perms::EXEC),
            (false, false) => all,
        };
        Attrs {
            perms,
            memory: match entry >> TYPE & 3 {
                0 => Memory::Normal,
                1 => Memory::NonCacheable,
                _ => Memory::Device,
            },
            shareability: Shareability::Inner,
            global: has(GLOBAL) && !guest,
            accessed: has(ACCESSED),
            dirty: has(DIRTY),
            software: (entry >> SOFTWARE & 3) as u8,
            native: 0,
        }
    }

    #[inline(always)]
    fn table(frame: Pa, _: Perms) -> u64 {
        VALID | Self::put_address(frame)
    }

    #[inline(always)]
    fn denied(_: u64) -> Perms {
        Perms::empty()
    }

    #[inline(always)]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        // PRIV 10.3.1: A on any use, D on a write, which needs W.
        caps.hardware_access && leaf & (VALID | ACCESSED) == VALID
            || caps.hardware_dirty && leaf & (VALID | WRITE | DIRTY) == VALID | WRITE
    }

    #[inline(always)]
    fn is_single_page(entry: u64) -> bool {
        entry & (VALID | READ | NAPOT) == VALID | READ
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

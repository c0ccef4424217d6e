//! Intel EPT: the extended page tables of VMX, with 4 or 5 levels.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3C, chapter 29
//! (SDM).
//!
//! An entry is present when it permits anything: it has no bit for that. [`Perms::EXEC`] is
//! execution from addresses of the guest's supervisor, [`Perms::USER_EXEC`] from those of its user;
//! they are two rights with mode-based execute control, and one without it, bit 10 being ignored
//! then.
//!
//! Memory types are those of the guest's memory as the processor has it, unless the guest's own PAT
//! makes them stricter; with bit 6 (ignore PAT, one of [`Format::NATIVE`]) the guest is not asked.
//! Accessed and dirty are bits 8 and 9; hardware sets them if bit 6 of the EPTP is set, and then
//! takes the guest's table walks for writes.
//!
//! Execute-only memory, which not every processor has, is not encoded.
//!
//! # Entries that are not present
//!
//! Hardware ignores all of such an entry but bit 63, suppress #VE: a guest that is told of its own
//! EPT violations must not hear of those that the engine causes briefly, so every mark comes with
//! it. A suspended entry keeps what made it present, and its own bit 63, in bits that hardware
//! ignores in a present one. Of a parked leaf, which the embedder has asked for, bit 63 is what the
//! embedder says, as in any leaf.

use super::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Rule, Shareability, check_guest};
use crate::addr::{Ipa, Level, Pa};
use crate::platform::Caps;

/// EPT with `LEVELS` levels, 4 or 5; `MODE_BASED` with mode-based execute control.
///
/// ```
/// use tablewright::{Attrs, Format, Level, Perms, format::Ept};
/// // Read, write, execute; write-back; accessed, dirty.
/// assert_eq!(Ept::<4>::encode(&Attrs::GUEST_MEMORY, Level::PAGE), Ok(0x337));
/// // Without mode-based control there is one permission to execute.
/// let kernel_text = Attrs::GUEST_MEMORY.with_perms(Perms::READ.and_user() | Perms::EXEC);
/// assert!(Ept::<4>::encode(&kernel_text, Level::PAGE).is_err());
/// assert!(Ept::<4, true>::encode(&kernel_text, Level::PAGE).is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ept<const LEVELS: u8, const MODE_BASED: bool = false>;

// SDM 29.3.2, tables of the formats of EPT paging-structure entries.
const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXEC: u64 = 1 << 2;
const MEMORY: u32 = 3; // 5:3
const IGNORE_PAT: u64 = 1 << 6;
/// A leaf above the last level; ignored at the last.
const LARGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const USER_EXEC: u64 = 1 << 10;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000; // 51:12
const SOFTWARE: u32 = 52; // 54:52 of 56:52, which are ignored
const SUPERVISOR_SHADOW_STACK: u64 = 1 << 60;
const SUPPRESS_VE: u64 = 1 << 63;

// Of an entry that is not present. Of a present one, hardware ignores 11, 59:52 and 62:61, or has
// uses for 57, 58 and 61 that are switched on elsewhere and not used here.
const GRANTS: u64 = READ | WRITE | EXEC;
/// Bits 57:55 keep bits 2:0 of a suspended entry.
const GRANTS_ASIDE: u32 = 55;
/// Bit 58 keeps bit 10.
const USER_EXEC_ASIDE: u32 = 48;
/// Bit 62 keeps bit 63.
const SUPPRESS_VE_ASIDE: u32 = 1;
const ASIDE: u64 =
    GRANTS << GRANTS_ASIDE | USER_EXEC << USER_EXEC_ASIDE | SUPPRESS_VE >> SUPPRESS_VE_ASIDE;
const SUSPENDED: u64 = 1 << 59;
/// Of a parked leaf.
const PARKED: u64 = 1 << 11;
// Ignored in the descriptor of a table.
const OPENING: u64 = 1 << 52;
const FROZEN: u64 = 1 << 54 | SUPPRESS_VE | ADDRESS;

// SDM 29.3.7: memory types; 2, 3 and 7 are reserved.
const UNCACHEABLE: u64 = 0;
const WRITE_COMBINING: u64 = 1;
const WRITE_THROUGH: u64 = 4;
const WRITE_BACK: u64 = 6;

impl<const LEVELS: u8, const MODE_BASED: bool> Ept<LEVELS, MODE_BASED> {
    /// An entry is present if it has one of these.
    const ANY: u64 = match MODE_BASED {
        true => GRANTS | USER_EXEC,
        false => GRANTS,
    };

    /// Returns the permissions of an entry, of a leaf or of a table, by itself.
    #[inline]
    fn grants(entry: u64) -> Perms {
        let has = |bit: u64| entry & bit != 0;
        let mut perms = Perms::empty();
        perms.set(Perms::READ | Perms::USER_READ, has(READ));
        perms.set(Perms::ANY_WRITE, has(WRITE));
        perms.set(Perms::EXEC, has(EXEC));
        let user = if MODE_BASED { USER_EXEC } else { EXEC };
        perms.set(Perms::USER_EXEC, has(user));
        perms
    }
}

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const LEVELS: u8, const MODE_BASED: bool> Format for Ept<LEVELS, MODE_BASED> {
    type Input = Ipa;

    const NAME: &'static str = match (LEVELS, MODE_BASED) {
        (4, false) => "EPT 4-level",
        (4, true) => "EPT 4-level mode-based",
        (5, false) => "EPT 5-level",
        (5, true) => "EPT 5-level mode-based",
        _ => panic!("EPT has 4 or 5 levels"),
    };
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = LEVELS;
    const INPUT_BITS: u32 = 12 + 9 * LEVELS as u32;
    const OUTPUT_BITS: u32 = 52;
    const HALVES: bool = false;
    const RULE: Rule = Rule::X86;
    const NATIVE: u64 = IGNORE_PAT | SUPERVISOR_SHADOW_STACK | SUPPRESS_VE;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = true;
    const SUSPENDED: u64 = SUSPENDED;
    const OPEN: u64 = WRITE;
    const PROTECTED: u64 = 0;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = FROZEN;
    const PRESENT: u64 = Self::ANY;
    // SDM appendix A.10: both sizes of large pages are features.
    const SURE_LEAF: Level = Level::PAGE;

    #[inline]
    fn is_leaf_level(level: Level) -> bool {
        level.height() <= 2 // 4 KiB, 2 MiB, 1 GiB
    }

    #[inline]
    fn contiguous(_: Level) -> u32 {
        0
    }

    #[inline]
    fn kind(entry: u64, level: Level) -> Kind {
        if level == Level::PAGE || Self::is_leaf_level(level) && entry & LARGE != 0 {
            match entry & (Self::ANY | PARKED) {
                0 => Kind::Invalid,
                // Of a present entry bit 11 is ignored, and of one that is suspended the rights are
                // elsewhere.
                _ => Kind::Leaf,
            }
        } else {
            match entry & Self::ANY {
                0 => Kind::Invalid,
                _ => Kind::Table,
            }
        }
    }

    #[inline]
    fn address_mask(level: Level) -> u64 {
        ADDRESS & (u64::MAX << (Self::shift(level) & 63))
    }

    #[inline]
    fn put_address(frame: Pa) -> u64 {
        frame.get() & ADDRESS
    }

    #[inline]
    fn address(entry: u64, level: Level) -> Pa {
        let mask = match Self::kind(entry, level) {
            Kind::Table => ADDRESS,
            _ => Self::address_mask(level),
        };
        // The address is inverted where it is not present.
        let absent = match entry & Self::ANY {
            0 => ADDRESS,
            _ => 0,
        };
        Pa::new((entry ^ absent) & mask)
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        check_guest(attrs)?;
        let may = |perms: Perms| attrs.perms.contains(perms);
        if !Self::is_leaf_level(level) {
            return Err(Inexpressible(&"no large page can stand at this level"));
        }
        if attrs.perms.is_empty() {
            // As what can be read, but not present, and with the address inverted.
            let readable = attrs.with_perms(Perms::READ.and_user());
            let leaf = Self::encode(&readable, level)? & !READ | PARKED;
            return Ok(leaf ^ Self::address_mask(level));
        }
        // SDM 29.3.3.1: writing without reading is a misconfiguration, executing without it may be
        // one; an entry that permits nothing is not present.
        if !may(Perms::READ) {
            return Err(Inexpressible(&"EPT cannot map memory that the guest cannot read"));
        }
        if !MODE_BASED && may(Perms::EXEC) != may(Perms::USER_EXEC) {
            return Err(Inexpressible(
                &"EPT without mode-based control lets all of the guest execute, or nothing of it",
            ));
        }
        if attrs.shareability != Shareability::Inner {
            return Err(Inexpressible(&"EPT memory is always coherent"));
        }
        if attrs.software > 7 {
            return Err(Inexpressible(&"three software bits are all there are"));
        }
        if attrs.native & !Self::NATIVE != 0 {
            return Err(Inexpressible(&"a native bit does not belong to the embedder"));
        }
        let memory = match attrs.memory {
            Memory::Normal => WRITE_BACK,
            Memory::WriteThrough => WRITE_THROUGH,
            Memory::NonCacheable => WRITE_COMBINING,
            Memory::Device => UNCACHEABLE,
            Memory::DeviceStrict | Memory::Tagged => {
                return Err(Inexpressible(&"EPT has no such memory type"));
            }
        };
        let when = |condition: bool, bit: u64| if condition { bit } else { 0 };
        Ok(READ
            | when(may(Perms::WRITE), WRITE)
            | when(may(Perms::EXEC), EXEC)
            | when(MODE_BASED && may(Perms::USER_EXEC), USER_EXEC)
            | memory << MEMORY
            | when(level != Level::PAGE, LARGE)
            | when(attrs.accessed, ACCESSED)
            | when(attrs.dirty, DIRTY)
            | u64::from(attrs.software) << SOFTWARE
            | attrs.native)
    }

    #[inline]
    fn decode(entry: u64, _: Level) -> Attrs {
        Attrs {
            perms: Self::grants(entry),
            memory: match entry >> MEMORY & 7 {
                UNCACHEABLE => Memory::Device,
                WRITE_COMBINING => Memory::NonCacheable,
                WRITE_THROUGH => Memory::WriteThrough,
                _ => Memory::Normal,
            },
            shareability: Shareability::Inner,
            global: false,
            accessed: entry & ACCESSED != 0,
            dirty: entry & DIRTY != 0,
            software: (entry >> SOFTWARE & 7) as u8,
            native: entry & Self::NATIVE,
        }
    }

    #[inline]
    fn restricted(meaning: u64, _: Level, denied: Perms) -> u64 {
        // A parked leaf has none of these bits.
        let mut stays = meaning;
        for (bit, perms) in [(READ, Perms::READ), (WRITE, Perms::WRITE), (EXEC, Perms::EXEC)] {
            if denied.contains(perms) {
                stays &= !bit;
            }
        }
        if MODE_BASED && denied.contains(Perms::USER_EXEC) {
            stays &= !USER_EXEC;
        }
        stays
    }

    #[inline]
    fn table(frame: Pa, deny: Perms) -> u64 {
        // Permissions are the intersection over the levels (SDM 29.3.2), so tables grant all that
        // is not denied.
        let mut bits = GRANTS | Self::put_address(frame);
        if MODE_BASED {
            bits |= USER_EXEC;
            if deny.contains(Perms::USER_EXEC) {
                bits &= !USER_EXEC;
            }
            if deny.contains(Perms::EXEC) {
                bits &= !EXEC;
            }
        } else if deny.contains(Perms::ANY_EXEC) {
            bits &= !EXEC;
        }
        if deny.contains(Perms::ANY_WRITE) {
            bits &= !WRITE;
        }
        bits
    }

    #[inline]
    fn denied(table: u64) -> Perms {
        Perms::all() - Self::grants(table)
    }

    #[inline]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        // SDM 29.3.5: the accessed flag on any use, the dirty flag on a write, which needs bit 1.
        caps.hardware_access && leaf & ACCESSED == 0 && leaf & Self::ANY != 0
            || caps.hardware_dirty && leaf & (WRITE | DIRTY) == WRITE
    }

    #[inline]
    fn frame_of_page(entry: u64) -> Pa {
        Pa::new(entry & ADDRESS)
    }

    #[inline]
    fn suspend(entry: u64) -> u64 {
        let aside = (entry & GRANTS) << GRANTS_ASIDE
            | (entry & USER_EXEC) << USER_EXEC_ASIDE
            | (entry & SUPPRESS_VE) >> SUPPRESS_VE_ASIDE;
        let stays = entry & !(GRANTS | USER_EXEC | ASIDE | PARKED);
        // The address is inverted for the sake of processors with the L1 terminal fault, as in
        // x86-64.
        (stays | aside | SUSPENDED | SUPPRESS_VE) ^ ADDRESS
    }

    #[inline]
    fn resume(suspended: u64) -> u64 {
        let back = suspended >> GRANTS_ASIDE & GRANTS
            | suspended >> USER_EXEC_ASIDE & USER_EXEC
            | suspended << SUPPRESS_VE_ASIDE & SUPPRESS_VE;
        (suspended ^ ADDRESS) & !(ASIDE | SUSPENDED | SUPPRESS_VE) | back
    }
}

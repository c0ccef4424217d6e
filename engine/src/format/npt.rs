//! AMD nested paging: the tables of x86-64 once more, for what a guest takes for physical.
//!
//! Source: AMD64 Architecture Programmer's Manual, volume 2, section 15.25 (APM).
//!
//! Hardware reads a nested table as it reads any other of the host, and takes every access of a
//! guest for one of a user (15.25.5): a page without U/S at all levels is out of the guest's reach,
//! its kernel's as its user's. One bit for writing and one for executing serve both. The guest's
//! own table walks are always writes. Memory types go through the host's PAT (15.25.8), which is a
//! parameter as of [`X86_64`](super::X86_64). The global bit and protection keys mean nothing here,
//! and a guest-physical address is not signed.

use super::{Attrs, Format, Inexpressible, Kind, PAT, Perms, Rule, X86_64, check_guest};
use crate::addr::{Ipa, Level, Pa};
use crate::platform::Caps;

/// Nested paging with `LEVELS` levels, 4 or 5, as the host has, and the host's `IA32_PAT`, which is
/// `TYPES`.
///
/// ```
/// use tablewright::{Attrs, Format, Level, format::Npt};
/// // Present, writable, user, accessed, dirty.
/// assert_eq!(Npt::<4>::encode(&Attrs::GUEST_MEMORY, Level::PAGE), Ok(0x67));
/// assert!(Npt::<4>::encode(&Attrs::KERNEL_DATA, Level::PAGE).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Npt<const LEVELS: u8, const TYPES: u64 = PAT>;

/// Returns the permissions of the guest: those that the host's user has.
fn guest(host: Perms) -> Perms {
    let user = host & Perms::ANY_USER;
    user | Perms::from_bits_truncate(user.bits() >> 3)
}

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const LEVELS: u8, const TYPES: u64> Format for Npt<LEVELS, TYPES> {
    type Input = Ipa;

    const NAME: &'static str = match LEVELS {
        4 => "nested paging 4-level",
        5 => "nested paging 5-level",
        _ => panic!("nested paging has 4 or 5 levels"),
    };
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = LEVELS;
    const INPUT_BITS: u32 = X86_64::<LEVELS, TYPES>::INPUT_BITS;
    const OUTPUT_BITS: u32 = 52;
    const HALVES: bool = false;
    const RULE: Rule = Rule::X86;
    const NATIVE: u64 = 0;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = true;
    const SUSPENDED: u64 = X86_64::<LEVELS, TYPES>::SUSPENDED;
    const OPEN: u64 = X86_64::<LEVELS, TYPES>::OPEN;
    const PROTECTED: u64 = X86_64::<LEVELS, TYPES>::PROTECTED;
    const OPENING: u64 = X86_64::<LEVELS, TYPES>::OPENING;
    const FROZEN: u64 = X86_64::<LEVELS, TYPES>::FROZEN;
    const PRESENT: u64 = X86_64::<LEVELS, TYPES>::PRESENT;
    const SURE_LEAF: Level = X86_64::<LEVELS, TYPES>::SURE_LEAF;

    #[inline]
    fn is_leaf_level(level: Level) -> bool {
        X86_64::<LEVELS, TYPES>::is_leaf_level(level)
    }

    #[inline]
    fn contiguous(_: Level) -> u32 {
        0
    }

    #[inline]
    fn kind(entry: u64, level: Level) -> Kind {
        X86_64::<LEVELS, TYPES>::kind(entry, level)
    }

    #[inline]
    fn address_mask(level: Level) -> u64 {
        X86_64::<LEVELS, TYPES>::address_mask(level)
    }

    #[inline]
    fn put_address(frame: Pa) -> u64 {
        X86_64::<LEVELS, TYPES>::put_address(frame)
    }

    #[inline]
    fn address(entry: u64, level: Level) -> Pa {
        X86_64::<LEVELS, TYPES>::address(entry, level)
    }

    #[inline]
    fn table_below(entry: u64, level: Level) -> Option<Pa> {
        X86_64::<LEVELS, TYPES>::table_below(entry, level)
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        check_guest(attrs)?;
        if !attrs.perms.is_empty() && !attrs.perms.contains(Perms::READ) {
            return Err(Inexpressible(
                &"nested paging cannot map memory that the guest cannot read",
            ));
        }
        if attrs.perms.contains(Perms::EXEC) != attrs.perms.contains(Perms::USER_EXEC) {
            return Err(Inexpressible(
                &"nested paging lets all of the guest execute, or nothing of it",
            ));
        }
        if attrs.native != 0 {
            return Err(Inexpressible(&"nested paging has no native bits"));
        }
        // To the host it is memory of a user, which the host's kernel does not execute.
        let host = Attrs { perms: attrs.perms - Perms::EXEC, ..*attrs };
        X86_64::<LEVELS, TYPES>::encode(&host, level)
    }

    #[inline]
    fn decode(entry: u64, level: Level) -> Attrs {
        let host = X86_64::<LEVELS, TYPES>::decode(entry, level);
        Attrs { perms: guest(host.perms), global: false, native: 0, ..host }
    }

    #[inline]
    fn restricted(meaning: u64, level: Level, denied: Perms) -> u64 {
        X86_64::<LEVELS, TYPES>::restricted(meaning, level, denied)
    }

    #[inline]
    fn table(frame: Pa, deny: Perms) -> u64 {
        X86_64::<LEVELS, TYPES>::table(frame, deny)
    }

    #[inline]
    fn denied(table: u64) -> Perms {
        let host = X86_64::<LEVELS, TYPES>::denied(table);
        host | guest(host)
    }

    #[inline]
    fn hardware_writes(leaf: u64, level: Level, caps: &Caps) -> bool {
        X86_64::<LEVELS, TYPES>::hardware_writes(leaf, level, caps)
    }

    #[inline]
    fn frame_of_page(entry: u64) -> Pa {
        X86_64::<LEVELS, TYPES>::frame_of_page(entry)
    }

    #[inline]
    fn suspend(entry: u64) -> u64 {
        X86_64::<LEVELS, TYPES>::suspend(entry)
    }

    #[inline]
    fn resume(suspended: u64) -> u64 {
        X86_64::<LEVELS, TYPES>::resume(suspended)
    }
}

//! x86-64: IA-32e paging with 4 or 5 levels.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, chapter 5
//! (SDM); AMD64 Architecture Programmer's Manual, volume 2, chapter 5.
//!
//! A page holds an index into `IA32_PAT`. The format has the value of the register as a parameter,
//! and finds the index of each type in it at compile time; what the register lacks is
//! [inexpressible](Inexpressible). The default is [`PAT`]. Where two indices have one type, the
//! first is encoded and both are decoded.
//!
//! The embedder loads [`X86_64::PAT`] of its format into `IA32_PAT`, sets `EFER.NXE` and `CR0.WP`,
//! and runs with `CR4.SMEP`: a user page that is executable reads as executable by the user only,
//! because that is what SMEP makes of it.
//!
//! # Encrypted and shared memory
//!
//! An address bit marks encrypted or shared memory. It is a parameter of the format: [`encrypted`]
//! for the C-bit of AMD's SME and SEV, which tables have as well; [`shared`] for the shared bit of
//! a TDX guest, which tables do not have. Memory ends below the bit. A leaf has it as a
//! [native](Attrs::native) bit, [`X86_64::MARK`]. [`Change::native`](crate::Change::native) changes
//! it: a store for each leaf and one invalidation. The embedder makes the firmware's call and
//! writes the caches back.
//!
//! # Shadow stacks
//!
//! With `CR4.CET` a present leaf with R/W clear and D set, below tables that let it be written, is
//! a page of a shadow stack (SDM 5.6). No other leaf has these bits: that a page which cannot be
//! written was written is kept in bit 53, and goes back to D when it can be written again.
//! Hardware sets D only where R/W is set. In a tree that was adopted, bit 53 of a leaf says so too.
//!
//! A format with [`SHADOW_STACKS`] has the native bit [`X86_64::SHADOW_STACK`] for pages that
//! shadow stacks alone may write. R/W is clear in them. Their permission to write stands in bit 55,
//! and that they are dirty in D as long as they have it: so one that is write-protected, or made
//! clean, is no shadow stack before a fault has given it back
//! ([`Change::perms`](crate::Change::perms), [`Change::dirty`](crate::Change::dirty)), and fork,
//! logs and copies on write see a page like any other.
//!
//! ```
//! use tablewright::format::{Format, PAT, SHADOW_STACKS, X86_64};
//! use tablewright::{Attrs, Change, Level};
//! type Cet = X86_64<4, PAT, SHADOW_STACKS>;
//! let stack = Attrs { native: Cet::SHADOW_STACK, ..Attrs::USER_DATA };
//! let bits = |attrs: &Attrs| Cet::encode(attrs, Level::PAGE).unwrap() & 0x42; // D, R/W
//! assert_eq!(bits(&stack), 0x40);
//! assert_eq!(bits(&Change::new().write_protect().apply(stack)), 0);
//! assert_eq!(bits(&Change::new().dirty(false).apply(stack)), 0);
//! ```

use super::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Rule, Shareability};
use crate::addr::{Level, Pa, Va};
use crate::platform::Caps;

/// The value of `IA32_PAT` that the memory types of this format refer to, unless it says another
/// (SDM 13.12.2).
///
/// Entries 0 to 7: write-back, write-combining, UC-, uncacheable, write-back, write-protected, UC-,
/// write-through.
pub const PAT: u64 = 0x0407_0506_0007_0106;

/// The parameter of [`X86_64`] for a C-bit at `bit`, 47 to 51: memory that has it is encrypted, and
/// so are tables (APM vol. 2, 7.10, 15.34; `CPUID Fn8000_001F[EBX]` says which it is).
///
/// ```
/// use tablewright::format::{Format, PAT, X86_64, encrypted};
/// use tablewright::{Attrs, Level, Pa, Perms};
/// type Sev = X86_64<4, PAT, { encrypted(51) }>;
/// let secret = Attrs { native: Sev::MARK, ..Attrs::KERNEL_DATA };
/// let leaf = Sev::encode(&secret, Level::PAGE).unwrap() | Sev::put_address(Pa::new(0x5000));
/// assert_eq!((leaf >> 51 & 1, Sev::address(leaf, Level::PAGE)), (1, Pa::new(0x5000)));
/// assert_eq!(Sev::table(Pa::new(0x6000), Perms::empty()) >> 51 & 1, 1);
/// ```
pub const fn encrypted(bit: u32) -> u64 {
    assert!(bit >= 47, "the C-bit stands above all memory: 47 to 51");
    shared(bit) | IN_TABLES
}

/// The parameter of [`X86_64`] and [`Arm64`](super::Arm64) for a shared bit at `bit`, the highest
/// of a guest's physical addresses, 32 to 51: the host sees memory that has it, and no table has it
/// (Intel TDX Module, GPA.SHARED; Arm RMM, unprotected IPA).
///
/// ```
/// use tablewright::format::{Format, PAT, X86_64, shared};
/// use tablewright::{Pa, Perms};
/// type Tdx = X86_64<4, PAT, { shared(47) }>;
/// assert_eq!(Tdx::table(Pa::new(0x6000), Perms::empty()) >> 47 & 1, 0);
/// assert_eq!((Tdx::MARK, Tdx::OUTPUT_BITS), (1 << 47, 47));
/// ```
pub const fn shared(bit: u32) -> u64 {
    assert!(bit >= 32 && bit <= 51, "the highest bit of a guest's addresses: 32 to 51");
    1 << bit
}

/// The parameter of [`X86_64`] for pages of shadow stacks, by itself or with one of the others:
/// `encrypted(51) | SHADOW_STACKS` (SDM 5.6). The processor has `CR4.CET`.
pub const SHADOW_STACKS: u64 = 2;

/// Of the third parameter: tables have the bit.
const IN_TABLES: u64 = 1;

/// x86-64 with `LEVELS` levels, 4 or 5; `TYPES` is what `IA32_PAT` holds; `MARKED` is an address
/// bit that says whose the memory is, as [`encrypted`] or [`shared`] have it, and
/// [`SHADOW_STACKS`], or zero.
///
/// ```
/// use tablewright::{Attrs, Format, Level, Memory, Pa, format::X86_64};
/// let entry = X86_64::<4>::encode(&Attrs::KERNEL_TEXT,
///     Level::PAGE).unwrap() | X86_64::<4>::put_address(Pa::new(0x1000));
/// assert_eq!(entry, 0x1121); // present, accessed, global
///
/// // What a processor has after a reset: write-through at index 1, and nothing that combines
/// // writes.
/// type Reset = X86_64<4, 0x0007_0406_0007_0406>;
/// let of = |memory| Reset::encode(&Attrs::KERNEL_RODATA.with_memory(memory), Level::PAGE).ok();
/// assert_eq!(of(Memory::WriteThrough).map(|bits| bits >> 3 & 3), Some(1));
/// assert_eq!(of(Memory::NonCacheable), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X86_64<const LEVELS: u8, const TYPES: u64 = PAT, const MARKED: u64 = 0>;

// SDM 5.5.4, tables of the formats of paging-structure entries.
const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const INDEX: u32 = 3; // PWT and PCD, bits 1:0 of the PAT index
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// A leaf above the last level; at the last level bit 2 of the PAT index.
const SIZE_OR_PAT: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const SOFTWARE: u32 = 9; // 11:9 are ignored
const PAT_OF_BLOCK: u64 = 1 << 12;
const PROTECTION_KEY: u64 = 0xf << 59;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000; // 51:12
// Marks of entries that are not present: bits 58:52 are ignored even in a present one, and none of
// ours has these.
const SUSPENDED: u64 = 1 << 58;
/// Bit 57 keeps R/W of a suspended entry.
const WRITE_ASIDE: u32 = 56; // from 1 to 57
/// Of a parked leaf, at the place of R/W, which it has not: it is next to the bit that says
/// present, so that both are looked at as one.
const PARKED: u64 = WRITE;
/// Of a write-protected table.
const OPENING: u64 = 1 << 52;
/// Of a leaf that cannot be written: it was. 58:52 are ignored (SDM 5.5.4); D without R/W makes a
/// shadow stack (SDM 5.6).
const SAVED_DIRTY: u64 = 1 << 53;
/// Of a page that shadow stacks alone may write, and that they may.
const SHADOW_STACK: u64 = 1 << 54;
const SHADOW_WRITE: u64 = 1 << 55;
const FROZEN: u64 = 1 << 56 | ADDRESS;

/// The first index of a memory type in `pat`; none of one that x86-64 lacks (SDM 13.12.2).
const fn type_index(pat: u64, memory: Memory) -> Option<u64> {
    let byte = match memory {
        Memory::Normal => 6,
        Memory::WriteThrough => 4,
        Memory::NonCacheable => 1, // write-combining
        Memory::Device => 0,
        Memory::DeviceStrict | Memory::Tagged => return None,
    };
    // UC-, which an MTRR can make write-combining, where there is no uncacheable.
    let bytes = pat.to_le_bytes();
    let wanted = [byte, if byte == 0 { 7 } else { byte }];
    let mut step = 0;
    while step < 2 * bytes.len() {
        if bytes[step % bytes.len()] == wanted[step / bytes.len()] {
            return Some((step % bytes.len()) as u64);
        }
        step += 1;
    }
    None
}

// What permissions become: R/W and U/S at their places, XD at 3; or why they cannot be had.
const NEVER_EXECUTED: u64 = 1 << 3;
const REFUSED: u8 = 0x80;
const NO_LEAF: u8 = REFUSED | 4;
const NOT_COHERENT: u8 = REFUSED | 5;
const TOO_MANY_BITS: u8 = REFUSED | 6;
const NOT_NATIVE: u8 = REFUSED | 7;
const NO_TYPE: u8 = REFUSED | 8;
const NO_TYPE_IN_PAT: u8 = REFUSED | 9;

static REASONS: [&str; 16] = [
    "x86-64 cannot map memory that the privileged cannot read",
    "x86-64 cannot let the user write or execute and not read",
    "x86-64 lets the privileged and the user write the same pages, or neither",
    "with SMEP the privileged never executes a page of the user",
    "no large page can stand at this level",
    "x86-64 memory is always coherent",
    "three software bits are all there are",
    "a native bit does not belong to the embedder",
    "x86-64 has no such memory type",
    "PAT has no such memory type",
    "",
    "",
    "",
    "",
    "",
    "",
];

/// By permissions. SDM 5.6.1: a present page can be read; one U/S bit and one R/W bit serve both.
/// What permits nothing is made as what can be read.
static RIGHTS: [u8; 64] = {
    let mut rights = [0; 64];
    let mut bits = 0;
    while bits < 64 {
        let perms = Perms::from_bits_truncate(bits);
        let user = perms.intersects(Perms::ANY_USER);
        let writes = perms.contains(Perms::WRITE);
        rights[bits as usize] = if !perms.contains(Perms::READ) && bits != 0 {
            REFUSED
        } else if user && !perms.contains(Perms::USER_READ) {
            REFUSED | 1
        } else if user && writes != perms.contains(Perms::USER_WRITE) {
            REFUSED | 2
        } else if user && perms.contains(Perms::EXEC) {
            REFUSED | 3
        } else {
            let never_executed = !perms.intersects(Perms::ANY_EXEC);
            let bits = [(writes, WRITE), (user, USER), (never_executed, NEVER_EXECUTED)];
            let mut code = 0;
            let mut at = 0;
            while at < bits.len() {
                if bits[at].0 {
                    code |= bits[at].1 as u8;
                }
                at += 1;
            }
            code
        };
        bits += 1;
    }
    rights
};

impl<const LEVELS: u8, const TYPES: u64, const MARKED: u64> X86_64<LEVELS, TYPES, MARKED> {
    /// The address bit that says whose the memory of a leaf is, one of [`Attrs::native`]; zero for
    /// none.
    pub const MARK: u64 = MARKED & ADDRESS;

    /// The bit of [`Attrs::native`] of a page that shadow stacks alone may write, where the format
    /// has [`SHADOW_STACKS`]; zero elsewhere.
    pub const SHADOW_STACK: u64 = match MARKED & SHADOW_STACKS {
        0 => 0,
        _ => SHADOW_STACK,
    };

    /// The permission to write, of pages of both kinds.
    const WRITES: u64 = match Self::SHADOW_STACK {
        0 => WRITE,
        _ => WRITE | SHADOW_WRITE,
    };

    /// The bits of a descriptor that hold the address.
    const ADDRESS: u64 = ADDRESS & Self::MARK.wrapping_sub(1);

    /// The index of each type of memory, or why there is none.
    const INDEX: [u8; 8] = {
        let types = [Memory::Normal, Memory::WriteThrough, Memory::NonCacheable, Memory::Device];
        let mut table = [NO_TYPE; 8];
        let mut at = 0;
        while at < types.len() {
            table[types[at] as usize] = match type_index(TYPES, types[at]) {
                Some(index) => index as u8,
                None => NO_TYPE_IN_PAT,
            };
            at += 1;
        }
        table
    };

    /// The value of `IA32_PAT`.
    ///
    /// ```
    /// use tablewright::format::{PAT, X86_64};
    /// assert_eq!(X86_64::<4>::PAT, PAT);
    /// ```
    pub const PAT: u64 = TYPES;

    /// Memory types, by their index in it.
    const MEMORY: [Memory; 8] = {
        let bytes = TYPES.to_le_bytes();
        let mut types = [Memory::Normal; 8];
        let mut index = 0;
        while index < bytes.len() {
            types[index] = match bytes[index] {
                5 | 6 => Memory::Normal, // 5, write-protected: written past the caches
                4 => Memory::WriteThrough,
                1 => Memory::NonCacheable,
                _ => Memory::Device, // 0, and 7 where no MTRR says otherwise
            };
            assert!(
                type_index(TYPES, types[index]).is_some(),
                "PAT has a type that is none of `Memory`, and not the one next to it"
            );
            index += 1;
        }
        types
    };
}

// SAFETY: the index is the masked one of the trait (1.); the address of a table is its own field
// (2.); the marks are bits that valid entries and each other have not (3.); sizes are those of the
// manual (4.).
unsafe impl<const LEVELS: u8, const TYPES: u64, const MARKED: u64> Format
    for X86_64<LEVELS, TYPES, MARKED>
{
    type Input = Va;

    const NAME: &'static str = match LEVELS {
        4 => "x86-64 4-level",
        5 => "x86-64 5-level",
        _ => panic!("x86-64 has 4 or 5 levels"),
    };
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = LEVELS;
    const INPUT_BITS: u32 = 12 + 9 * LEVELS as u32;
    const OUTPUT_BITS: u32 = match Self::MARK {
        0 => 52,
        mark => mark.trailing_zeros(),
    };
    const HALVES: bool = false;
    const RULE: Rule = Rule::X86;
    const NATIVE: u64 = PROTECTION_KEY | Self::MARK | Self::SHADOW_STACK;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = true;
    const SUSPENDED: u64 = SUSPENDED;
    const OPEN: u64 = WRITE;
    const PROTECTED: u64 = 0;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = FROZEN;
    const PRESENT: u64 = PRESENT;
    // SDM 5.5.4: 2 MiB; pages of 1 GiB are a feature.
    const SURE_LEAF: Level = Level::new(1);

    #[inline(always)]
    fn is_leaf_level(level: Level) -> bool {
        level.height() <= 2 // 4 KiB, 2 MiB, 1 GiB
    }

    #[inline(always)]
    fn contiguous(_: Level) -> u32 {
        0
    }

    #[inline(always)]
    fn kind(entry: u64, level: Level) -> Kind {
        if level == Level::PAGE || Self::is_leaf_level(level) && entry & SIZE_OR_PAT != 0 {
            match entry & (PRESENT | PARKED) {
                0 => Kind::Invalid,
                _ => Kind::Leaf,
            }
        } else {
            match entry & PRESENT {
                0 => Kind::Invalid,
                _ => Kind::Table,
            }
        }
    }

    #[inline(always)]
    fn address_mask(level: Level) -> u64 {
        Self::ADDRESS & (u64::MAX << (Self::shift(level) & 63))
    }

    #[inline(always)]
    fn put_address(frame: Pa) -> u64 {
        frame.get() & Self::ADDRESS
    }

    #[inline(always)]
    fn address(entry: u64, level: Level) -> Pa {
        let mask = match Self::kind(entry, level) {
            Kind::Table => Self::ADDRESS,
            _ => Self::address_mask(level),
        };
        // All ones if it is not present: the address is inverted then.
        let absent = (entry & PRESENT).wrapping_sub(1);
        Pa::new((entry ^ absent) & mask)
    }

    #[inline(always)]
    fn table_below(entry: u64, level: Level) -> Option<Pa> {
        // What tells a table is taken with the address; if it is not exactly that, something is
        // left of it.
        let kind = match Self::is_leaf_level(level) {
            true => PRESENT | SIZE_OR_PAT,
            false => PRESENT,
        };
        let frame = (entry & (Self::ADDRESS | kind)).wrapping_sub(PRESENT);
        (frame & kind == 0).then_some(Pa::new(frame))
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        let rights = RIGHTS[usize::from(attrs.perms.bits() & 0x3f)];
        let index = Self::INDEX[attrs.memory as usize & 7];
        let refused = if !Self::is_leaf_level(level) {
            NO_LEAF
        } else if rights & REFUSED != 0 {
            rights
        } else if attrs.shareability != Shareability::Inner {
            NOT_COHERENT
        } else if attrs.software > 7 {
            TOO_MANY_BITS
        } else if attrs.native & !Self::NATIVE != 0 {
            NOT_NATIVE
        } else {
            index
        };
        if refused & REFUSED != 0 {
            return Err(Inexpressible(&REASONS[usize::from(refused & 0xf)]));
        }
        let (rights, index) = (u64::from(rights), u64::from(index));
        let writes = match (rights & WRITE, attrs.native & Self::SHADOW_STACK) {
            (WRITE, SHADOW_STACK) => SHADOW_WRITE,
            (writes, _) => writes,
        };
        // Where a leaf keeps bit 2 of the index, and what makes it a large one.
        let (pat, size) = match level {
            Level::PAGE => (SIZE_OR_PAT, 0),
            _ => (PAT_OF_BLOCK, SIZE_OR_PAT),
        };
        let leaf = PRESENT
            | rights & USER
            | writes
            | (rights & NEVER_EXECUTED) << 60
            | (index & 3) << INDEX
            | if index & 4 != 0 { pat } else { 0 }
            | size
            | (u64::from(attrs.accessed) * ACCESSED)
            | (u64::from(attrs.dirty) * if writes != 0 { DIRTY } else { SAVED_DIRTY })
            | (u64::from(attrs.global) * GLOBAL)
            | u64::from(attrs.software) << SOFTWARE
            | attrs.native;
        match attrs.perms.is_empty() {
            // As what can be read, but not present, and with the address inverted, as in `suspend`.
            true => Ok((leaf & !PRESENT | PARKED) ^ Self::address_mask(level)),
            false => Ok(leaf),
        }
    }

    #[inline]
    fn decode(entry: u64, level: Level) -> Attrs {
        Self::decode_meaning(Self::meaning(entry), level)
    }

    #[inline(always)]
    fn meaning(leaf: u64) -> u64 {
        // Of a parked leaf R/W is the mark, and the rest permits nothing.
        match leaf & PRESENT {
            0 => leaf & !PARKED,
            _ => leaf,
        }
    }

    #[inline]
    fn decode_meaning(meaning: u64, level: Level) -> Attrs {
        let has = |bit: u64| meaning & bit != 0;
        // SDM 5.6.1: a page is one of the user if every level says so, and is written or executed
        // if every level lets it.
        let (user, write, exec) = (has(USER), has(Self::WRITES), !has(NO_EXECUTE));
        let mut perms = Perms::empty();
        perms.set(Perms::READ, has(PRESENT));
        perms.set(Perms::WRITE, write);
        perms.set(Perms::EXEC, exec && !user);
        perms.set(Perms::USER_READ, user);
        perms.set(Perms::USER_WRITE, user && write);
        perms.set(Perms::USER_EXEC, user && exec);
        let pat = has(if level == Level::PAGE { SIZE_OR_PAT } else { PAT_OF_BLOCK });
        Attrs {
            perms,
            memory: Self::MEMORY[usize::from(pat) << 2 | (meaning >> INDEX & 3) as usize],
            shareability: Shareability::Inner,
            global: has(GLOBAL),
            accessed: has(ACCESSED),
            dirty: has(DIRTY | SAVED_DIRTY),
            software: (meaning >> SOFTWARE & 7) as u8,
            native: meaning & Self::NATIVE,
        }
    }

    #[inline]
    fn restricted(mut meaning: u64, _: Level, denied: Perms) -> u64 {
        if meaning & PRESENT == 0 {
            return meaning;
        }
        if denied.contains(Perms::WRITE) {
            meaning &= !Self::WRITES;
        }
        if denied.contains(Perms::USER_READ) {
            meaning &= !USER;
        }
        if denied.contains(Perms::EXEC) {
            meaning |= NO_EXECUTE;
        }
        meaning
    }

    #[inline(always)]
    fn table(frame: Pa, deny: Perms) -> u64 {
        // Permissions are the intersection over the levels (SDM 5.6.1), so tables grant all that is
        // not denied.
        let mark = if MARKED & IN_TABLES != 0 { Self::MARK } else { 0 };
        let mut bits = PRESENT | WRITE | USER | Self::put_address(frame) | mark;
        if deny.contains(Perms::ANY_EXEC) {
            bits |= NO_EXECUTE;
        }
        if deny.contains(Perms::ANY_WRITE) {
            bits &= !WRITE;
        }
        bits
    }

    #[inline]
    fn denied(table: u64) -> Perms {
        let mut denied = Perms::empty();
        if table & WRITE == 0 {
            denied |= Perms::ANY_WRITE;
        }
        if table & USER == 0 {
            denied |= Perms::ANY_USER;
        }
        if table & NO_EXECUTE != 0 {
            denied |= Perms::ANY_EXEC;
        }
        denied
    }

    #[inline(always)]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        // SDM 5.8: the accessed flag on any use, the dirty flag on a write, which needs R/W.
        caps.hardware_access && leaf & (PRESENT | ACCESSED) == PRESENT
            || caps.hardware_dirty && leaf & (PRESENT | WRITE | DIRTY) == PRESENT | WRITE
    }

    #[inline(always)]
    fn is_single_page(entry: u64) -> bool {
        entry & PRESENT != 0
    }

    #[inline(always)]
    fn frame_of_page(entry: u64) -> Pa {
        Pa::new(entry & Self::ADDRESS)
    }

    #[inline(always)]
    fn suspend(entry: u64) -> u64 {
        // The address is inverted while the entry is not present: a processor with the L1 terminal
        // fault reads the cache through the address of a non-present entry, and the inverted one
        // names no memory.
        let aside = (entry & WRITE) << WRITE_ASIDE;
        let stays = entry & !(PRESENT | WRITE | WRITE << WRITE_ASIDE);
        (stays | aside | SUSPENDED) ^ ADDRESS
    }

    #[inline(always)]
    fn resume(suspended: u64) -> u64 {
        let back = suspended >> WRITE_ASIDE & WRITE;
        (suspended ^ ADDRESS) & !(SUSPENDED | WRITE << WRITE_ASIDE) | back | PRESENT
    }
}

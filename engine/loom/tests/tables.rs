//! Tables small enough to be explored, and what walks them.
//!
//! They are those of a format made for this: two levels of four entries, descriptors like those of
//! x86 with a flag for accessed and one for dirty, under the rules of either architecture.
//!
//! A walker does what hardware does: it reads an entry, and sets a flag by an atomic update that
//! checks the entry. It holds nothing between two walks, so that a completion waits for the walks
//! under way and for nothing else. Software that reads the tables does the same and sets no flag.

use std::marker::PhantomData;
use std::sync::Arc;

use tablewright::bbm::Rule;
use tablewright::{
    Address, Attrs, Caps, Entry, Format, Inexpressible, Kind, Level, Memory, Pa, Perms, Span, Va,
};

pub const PRESENT: u64 = 1;
pub const WRITE: u64 = 2;
pub const ACCESSED: u64 = 4;
pub const DIRTY: u64 = 8;
pub const BLOCK: u64 = 16;
pub const NON_CACHEABLE: u64 = 32;
/// The word in a table before it is written, and when it has been freed.
pub const POISON: u64 = u64::MAX;
pub const ADDRESS: u64 = 0x00ff_ffff_ffff_f000;
pub const SUSPENDED: u64 = 1 << 63;
pub const PROTECTED: u64 = 1 << 62;
pub const OPENING: u64 = 1 << 60;

/// Two levels of four entries. A change of size or type of a live leaf is made in place, or with
/// `ARM` by a break.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiny<const ARM: bool, A = Va>(PhantomData<A>);

// SAFETY: the index is the masked one of the trait, of four entries at both levels (1.); the
// address of a table is its own field (2.); suspended, frozen and protected are marks of a bit
// each, which no entry that is present has (3.); there are no runs, and pages are leaves (4.).
unsafe impl<const ARM: bool, A: Address> Format for Tiny<ARM, A> {
    type Input = A;
    const NAME: &'static str = "tiny";
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = 2;
    const INPUT_BITS: u32 = 16;
    const OUTPUT_BITS: u32 = 48;
    const HALVES: bool = true;
    const RULE: Rule = if ARM { Rule::ARM } else { Rule::X86 };
    const NATIVE: u64 = 0;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = false;
    const SUSPENDED: u64 = SUSPENDED;
    const OPEN: u64 = PRESENT;
    const PROTECTED: u64 = PROTECTED;
    const OPENING: u64 = OPENING;
    const FROZEN: u64 = 1 << 61;
    const PRESENT: u64 = PRESENT;
    const INDEX_BITS: u32 = 2;

    fn is_leaf_level(level: Level) -> bool {
        level.height() <= 1
    }
    fn contiguous(_: Level) -> u32 {
        0
    }
    fn kind(entry: u64, level: Level) -> Kind {
        match (entry & PRESENT != 0, level == Level::PAGE || entry & BLOCK != 0) {
            (false, false) if entry & PROTECTED != 0 => Kind::Table,
            (false, _) => Kind::Invalid,
            (true, true) => Kind::Leaf,
            (true, false) => Kind::Table,
        }
    }
    fn address_mask(level: Level) -> u64 {
        ADDRESS & (u64::MAX << Self::shift(level))
    }
    fn put_address(frame: Pa) -> u64 {
        frame.get()
    }
    fn address(entry: u64, _: Level) -> Pa {
        Pa::new(entry & ADDRESS)
    }
    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        let when = |condition: bool, bit: u64| if condition { bit } else { 0 };
        Ok(PRESENT
            | when(attrs.perms.contains(Perms::WRITE), WRITE)
            | when(attrs.accessed, ACCESSED)
            | when(attrs.dirty, DIRTY)
            | when(attrs.memory == Memory::NonCacheable, NON_CACHEABLE)
            | when(level != Level::PAGE, BLOCK))
    }
    fn decode(entry: u64, _: Level) -> Attrs {
        let mut perms = Perms::READ;
        perms.set(Perms::WRITE, entry & WRITE != 0);
        Attrs {
            perms,
            accessed: entry & ACCESSED != 0,
            dirty: entry & DIRTY != 0,
            memory: match entry & NON_CACHEABLE {
                0 => Memory::Normal,
                _ => Memory::NonCacheable,
            },
            ..Attrs::KERNEL_RODATA
        }
    }
    fn table(frame: Pa, _: Perms) -> u64 {
        frame.get() | PRESENT
    }
    fn denied(_: u64) -> Perms {
        Perms::empty()
    }
    fn hardware_writes(leaf: u64, _: Level, _: &Caps) -> bool {
        leaf & ACCESSED == 0 || leaf & (WRITE | DIRTY) == WRITE
    }
    fn suspend(entry: u64) -> u64 {
        entry & !PRESENT | SUSPENDED
    }
    fn resume(suspended: u64) -> u64 {
        suspended & !SUSPENDED | PRESENT
    }
}

pub const FRAMES: u64 = 5;
pub const PAGE: u64 = 0x1000;
pub const BLOCK_SIZE: u64 = 4 * PAGE;
/// The frame of the first table.
pub const ROOT: Pa = frame(0);
/// The address that the tests map, and the walkers check at each access.
pub const TARGET: u64 = 0x10_0000;

pub const fn frame(number: u64) -> Pa {
    Pa::new((number + 1) << 12)
}

/// A few tables that processors share. (Their reference count is not under test, and so is not
/// loom's.)
pub struct Tables(Vec<Entry>);

impl Tables {
    pub fn new() -> Arc<Self> {
        Arc::new(Self((0..FRAMES * 4).map(|_| Entry::new(POISON)).collect()))
    }

    pub fn entry(&self, frame: Pa, index: usize) -> &Entry {
        &self.0[((frame.get() >> 12) as usize - 1) * 4 + index]
    }

    /// Fills a table with what must never be seen.
    pub fn poison(&self, frame: Pa) {
        for index in 0..4 {
            self.entry(frame, index).store(POISON);
        }
    }

    /// Whether a processor could write a page.
    pub fn can_write(&self, page: u64) -> bool {
        type Either = Tiny<false>;
        let top = self.entry(ROOT, Either::index(page, Level::new(1))).follow();
        if Either::kind(top, Level::new(1)) != Kind::Table || Either::is_protected(top) {
            return false;
        }
        let table = Either::address(top, Level::new(1));
        let entry = self.entry(table, Either::index(page, Level::PAGE)).load();
        Either::kind(entry, Level::PAGE) == Kind::Leaf && entry & WRITE != 0
    }

    /// Walks as hardware does for an access to the second page. Returns the flags that it set, or
    /// saw set; `None` for a fault.
    pub fn walk(&self, access: Access) -> Option<u64> {
        type Either = Tiny<false>;
        let (mut table, mut level) = (ROOT, Level::new(1));
        loop {
            let entry = self.entry(table, Either::index(PAGE, level));
            let bits = entry.follow();
            assert_ne!(bits, POISON, "not written yet, or freed");
            match Either::kind(bits, level) {
                Kind::Invalid => return None,
                Kind::Table if Either::is_protected(bits) => return None,
                Kind::Table => {
                    table = Either::address(bits, level);
                    level = level.down()?;
                }
                Kind::Leaf => {
                    let offset = PAGE & ((1 << Either::shift(level)) - 1);
                    assert_eq!(Either::address(bits, level).get() + offset, TARGET + PAGE);
                    let flags = match access {
                        Access::Look => return Some(0),
                        Access::Write if bits & WRITE == 0 => return None,
                        Access::Write => ACCESSED | DIRTY,
                        Access::Read => ACCESSED,
                    };
                    let set = bits | flags;
                    // Hardware that was too late walks again. Nothing has happened then, and the
                    // next walk is one like any.
                    let done = set == bits || entry.compare_exchange(bits, set).is_ok();
                    return Some(if done { flags } else { 0 });
                }
            }
        }
    }
}

/// The purpose of a walk.
#[derive(Clone, Copy)]
pub enum Access {
    /// A processor reads memory.
    Read,
    /// A processor writes memory.
    Write,
    /// Software looks what is mapped.
    Look,
}

pub fn span<A: Address>(first: u64, size: u64) -> Span<A> {
    Span::new(A::from_bits(first), size).unwrap()
}

/// Memory whose flags a walker sets.
pub const FRESH: Attrs = Attrs { accessed: false, dirty: false, ..Attrs::KERNEL_DATA };

/// Accessed and dirty, as far as a walker has set them.
pub fn set(walks: &[Option<u64>]) -> (bool, bool) {
    let set = walks.iter().flatten().fold(0, |all, flags| all | flags);
    (set & ACCESSED != 0, set & DIRTY != 0)
}

/// Accessed and dirty, as the page has them.
pub fn found(attrs: Attrs) -> (bool, bool) {
    (attrs.accessed, attrs.dirty)
}

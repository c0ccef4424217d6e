//! Pages alone: a format without its blocks and its runs.
//!
//! An edit of a part of a block has to take it apart, and an edit of a part of a run has to unfold
//! it: machine code that a kernel which maps nothing but pages to its users does not need. A format
//! that has no larger leaves has no such code.

use super::{Attrs, Format, Inexpressible, Kind, Perms, Rule};
use crate::addr::{Level, Pa};
use crate::platform::Caps;

/// The format `F` with leaves of one size: pages. No block is mapped, whatever a
/// [`Mapping`](crate::Mapping) allows, and no contiguous run.
///
/// A tree that is [adopted](crate::AddressSpace::adopt) in it has none, either.
///
/// ```
/// use tablewright::format::{PagesOnly, X86_64};
/// use tablewright::{AddressSpace, Attrs, Pa, Span, Va, hosted::Hosted};
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<PagesOnly<X86_64<4>>, _>::new(&platform).ok_or("no frame for the root")?;
/// space.map(Span::new(Va::new(0x20_0000), 2 << 20)?, Pa::new(0x4000_0000), Attrs::USER_DATA)?;
/// assert_eq!(space.query(Va::new(0x20_1000)).ok_or("a hole")?.size(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesOnly<F>(core::marker::PhantomData<F>);

/// A level at which no format has leaves.
const HIGH: Level = Level::new(4);

// SAFETY: indices, addresses of tables, and marks are those of `F` (1., 2., 3.), and so are the
// sizes of pages (4.).
unsafe impl<F: Format> Format for PagesOnly<F> {
    type Input = F::Input;

    const NAME: &'static str = F::NAME;
    const PAGE_SHIFT: u32 = F::PAGE_SHIFT;
    const LEVELS: u8 = F::LEVELS;
    const INPUT_BITS: u32 = F::INPUT_BITS;
    const OUTPUT_BITS: u32 = F::OUTPUT_BITS;
    const HALVES: bool = F::HALVES;
    const SIGNED: bool = F::SIGNED;
    const GLOBALS: bool = F::GLOBALS;
    const RULE: Rule = F::RULE;
    const NATIVE: u64 = F::NATIVE;
    const PLAIN: Attrs = F::PLAIN;
    const LINEAR_BITS: u32 = F::LINEAR_BITS;
    const SURE_LEAF: Level = Level::PAGE;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = F::TABLES_RESTRICT;
    const SUSPENDED: u64 = F::SUSPENDED;
    const OPEN: u64 = F::OPEN;
    const PROTECTED: u64 = F::PROTECTED;
    const OPENING: u64 = F::OPENING;
    const FROZEN: u64 = F::FROZEN;
    const PRESENT: u64 = F::PRESENT;

    #[inline(always)]
    fn is_leaf_level(level: Level) -> bool {
        level == Level::PAGE
    }

    #[inline(always)]
    fn contiguous(_: Level) -> u32 {
        0
    }

    #[inline(always)]
    fn kind(entry: u64, level: Level) -> Kind {
        match level {
            Level::PAGE => F::kind(entry, Level::PAGE),
            _ => match F::kind(entry, HIGH) {
                Kind::Table => Kind::Table,
                _ => Kind::Invalid,
            },
        }
    }

    #[inline(always)]
    fn address_mask(_: Level) -> u64 {
        F::address_mask(Level::PAGE)
    }

    #[inline(always)]
    fn put_address(frame: Pa) -> u64 {
        F::put_address(frame)
    }

    #[inline(always)]
    fn address(entry: u64, level: Level) -> Pa {
        match level {
            Level::PAGE => F::address(entry, Level::PAGE),
            _ => F::address(entry, HIGH),
        }
    }

    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        match level {
            Level::PAGE => F::encode(attrs, Level::PAGE),
            _ => Err(Inexpressible(&"only pages are mapped")),
        }
    }

    #[inline]
    fn decode(entry: u64, _: Level) -> Attrs {
        F::decode(entry, Level::PAGE)
    }

    #[inline(always)]
    fn meaning(leaf: u64) -> u64 {
        F::meaning(leaf)
    }

    #[inline]
    fn decode_meaning(leaf: u64, _: Level) -> Attrs {
        F::decode_meaning(leaf, Level::PAGE)
    }

    #[inline]
    fn restricted(meaning: u64, _: Level, denied: Perms) -> u64 {
        F::restricted(meaning, Level::PAGE, denied)
    }

    #[inline(always)]
    fn table(frame: Pa, deny: Perms) -> u64 {
        F::table(frame, deny)
    }

    #[inline(always)]
    fn denied(table: u64) -> Perms {
        F::denied(table)
    }

    #[inline(always)]
    fn hardware_writes(leaf: u64, _: Level, caps: &Caps) -> bool {
        F::hardware_writes(leaf, Level::PAGE, caps)
    }

    #[inline(always)]
    fn frame_of_page(entry: u64) -> Pa {
        F::frame_of_page(entry)
    }

    #[inline(always)]
    fn suspend(entry: u64) -> u64 {
        F::suspend(entry)
    }

    #[inline(always)]
    fn resume(suspended: u64) -> u64 {
        F::resume(suspended)
    }
}

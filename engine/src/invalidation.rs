//! Invalidations that a platform is asked for.

use core::fmt;

use crate::addr::{Level, Pa};

/// All that one flush of one space invalidates, as the platform is asked to issue it.
///
/// # Stage 2
/// The addresses are those that the guest takes for physical, and no processor remembers them
/// alone: what a guest's access has found is kept under the guest's virtual address, both stages in
/// one. To forget a range is therefore to forget everything that was combined with it.
///
/// * arm64, with the VMID loaded: first all ranges by intermediate physical address (`tlbi
///   ipas2e1is` or its range form; `ipas2le1is` where no `tables` were detached) and `dsb ish`;
///   *then*, once for all of them, what was combined (`tlbi vmalle1is`), which
///   [`Barrier::Complete`](crate::Barrier::Complete) waits for. The other way round a walker makes
///   a combined entry anew between the two, out of what it still remembers of stage 2.
///   [`What::Everything`] is `tlbi vmalls12e1is`, which does both.
/// * Intel: INVEPT, single-context, whatever the ranges, on every processor that may run the guest;
///   one that is in the guest has to be made to leave it. INVEPT drops what was combined too.
/// * AMD: everything of the guest's ASID, when a processor next enters the guest (`TLB_CONTROL`),
///   after it has been made to leave; or INVLPGB by ASID.
///
/// # Example
/// ```
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::USER_DATA)?;
/// # space.make_live();
///
/// use tablewright::Stale;
/// platform.record();
/// let mut gather = space.gather();
/// gather.protect(span, Change::new().perms(Perms::READ | Perms::USER_READ))?;
/// gather.finish(|_| ());
/// let stale = Stale { first: 0, last: 0x3f_ffff, level: Some(Level::new(1)), tables: false };
/// let told = &platform.take_log()[0];
/// assert_eq!((told.global, &told.ranges[..]), (false, &[stale][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation<'a> {
    /// The root of the space's tables.
    pub root: Pa,
    /// The identity of the space (ASID, PCID, VMID), as the embedder gave it to the space; where
    /// its root has an [`Identity`](crate::shootdown::Identity), the identifier that it has now.
    pub id: u16,
    /// Translations that may be global are meant, so that processors remember them whatever space
    /// they have loaded: all processors have to be told, by what includes global translations, and
    /// what is cached of tables under any identity (x86: `INVLPG` where no `tables` were detached,
    /// `INVPCID` type 2, `INVLPGB` with its bit 3; arm64: `VAAE1IS`, `VMALLE1IS`).
    pub global: bool,
    /// The translations to invalidate.
    pub what: What<'a>,
}

impl Invalidation<'_> {
    /// Whether tables were detached, or may have been.
    pub fn has_tables(&self) -> bool {
        match self.what {
            What::Everything => true,
            What::Ranges(ranges) => ranges.iter().any(|range| range.tables),
        }
    }
}

/// The translations that a flush invalidates.
///
/// ```
/// use tablewright::{Stale, What};
/// /// How many instructions of one page each the invalidation would take, for pages of 4 KiB.
/// fn operations(what: &What<'_>) -> Option<u64> {
///     let What::Ranges(ranges) = what else { return None };
///     let count = |stale: &Stale| {
///         let shift = 12 + 9 * stale.level.map_or(0, |level| u32::from(level.height()));
///         ((stale.last - stale.first) >> shift) + 1
///     };
///     Some(ranges.iter().map(count).sum())
/// }
/// let stale = Stale { first: 0, last: 0x2fff, level: None, tables: false };
/// assert_eq!(operations(&What::Ranges(&[stale])), Some(3));
/// assert_eq!(operations(&What::Everything), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What<'a> {
    /// Every translation of the space, and everything cached of its tables.
    Everything,
    /// The translations of these ranges of input addresses, one at least and at most
    /// [`MAX_RANGES`].
    Ranges(&'a [Stale]),
}

/// A range of input addresses whose translations are stale.
///
/// ```
/// use tablewright::Stale;
/// let page = Stale { first: 0x7000, last: 0x7fff, level: None, tables: true };
/// assert_eq!(page.last - page.first + 1, 4096);
/// assert_eq!(
///     format!("{page:?}"),
///     "Stale { first: 0x7000, last: 0x7fff, level: None, tables: true }"
/// );
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stale {
    /// The first address.
    pub first: u64,
    /// The last address.
    pub last: u64,
    /// The level of all leaves in the range, if they are at one level and it is known: a hint that
    /// may be passed to instructions that take one. Where it is not known, the instruction has to
    /// be told so; a wrong hint invalidates nothing.
    pub level: Option<Level>,
    /// Tables were detached: what is cached of table descriptors has to go too, not only leaves.
    pub tables: bool,
}

impl fmt::Debug for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stale")
            .field("first", &format_args!("{:#x}", self.first))
            .field("last", &format_args!("{:#x}", self.last))
            .field("level", &self.level)
            .field("tables", &self.tables)
            .finish()
    }
}

/// The number of separate ranges that a flush can have before it becomes one of everything.
pub const MAX_RANGES: usize = 16;

//! The addresses that a root translates, and what its edits cache of the tree.
//!
//! As processors do (paging-structure caches: SDM vol. 3A 5.10.3; DDI 0487 D8.16), a space caches
//! the table through which it came to the last page. And it caches the answer to the last change:
//! neighbouring leaves nearly always have the same attributes.
//!
//! Invariant: a cached table is part of the tree. A table leaves the tree through
//! [`Table::detach`](crate::table::Table::detach), which invalidates the [`UpperCache`].

use super::Recent;
use crate::addr::{Address, Span};
use crate::edit::error::EditError;
use crate::format::Format;
use crate::table::UpperCache;
use crate::walk::Slice;

/// Which half of the input space a root translates, for formats that have a root for each.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, Half, Pa, Span, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(8, 12);
/// let mut kernel = AddressSpace::<Arm64K4, _>::new_in(&platform, Half::Upper).unwrap();
/// let low = Span::new(Va::new(0), 4096)?;
/// assert_eq!(
///     kernel.map(low, Pa::new(0), Attrs::KERNEL_DATA),
///     Err(EditError::InputOutOfRange)
/// );
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Addresses that start with zeros: `TTBR0`, or all of a format that has one root.
    Lower,
    /// Addresses that start with ones: `TTBR1`.
    Upper,
}

/// The addresses that a root translates: `size` canonical addresses from `-offset`, modulo 2^64.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub(super) offset: u64,
    pub(super) size: u64,
}

impl Reach {
    /// All that a root translates: where there is one for each half, this half.
    pub fn of_root<F: Format>(half: Half) -> Self {
        let size = 1 << bits_of_half::<F>();
        match (F::SIGNED, F::HALVES) {
            (true, true) => Self::of_half::<F>(half),
            (true, false) => Self { offset: size, size: 2 * size },
            (false, _) => Self::of_half::<F>(Half::Lower),
        }
    }

    pub(super) fn of_half<F: Format>(half: Half) -> Self {
        let size = 1 << bits_of_half::<F>();
        let offset = match half {
            Half::Lower => 0,
            Half::Upper => size,
        };
        Self { offset, size }
    }

    /// The half, if it is one.
    pub(super) fn half(self) -> Option<Half> {
        match self.offset {
            0 => Some(Half::Lower),
            offset if offset == self.size => Some(Half::Upper),
            _ => None,
        }
    }

    /// Whether all from `first` to `last` are translated.
    #[inline]
    pub fn holds(self, first: u64, last: u64) -> bool {
        // With the offset, the upper half comes first, and the hole between the halves is last. A
        // range that begins in the lower half and ends in the upper one ends before it begins.
        let first = first.wrapping_add(self.offset);
        let last = last.wrapping_add(self.offset);
        first <= last && last < self.size
    }

    /// Checks a range that an edit was given.
    #[inline]
    pub fn check<F: Format>(self, span: Span<F::Input>) -> Result<Slice, EditError<F::Input>> {
        let slice = Slice { first: span.start().bits(), last: span.last().bits() };
        if !span.is_aligned(F::PAGE_SHIFT) {
            return Err(EditError::Misaligned);
        }
        match self.holds(slice.first, slice.last) {
            true => Ok(slice),
            false => Err(EditError::InputOutOfRange),
        }
    }
}

/// How many bits of an address differ within one half, or within all of it where there is one. One
/// root for both halves has its last bit for the sign.
#[inline]
pub(super) fn bits_of_half<F: Format>() -> u32 {
    F::INPUT_BITS - u32::from(F::SIGNED && !F::HALVES)
}

/// A pattern that no page has, but for its address.
pub(crate) const NOT_PLAIN: u64 = u64::MAX;

/// The part of its tree that a space caches.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    /// The size of the reach while the space is open: this engine has encoded all leaves, and no
    /// table denies a permission, so that a walk need not look. Otherwise 0.
    open: u64,
    pub upper: UpperCache,
    /// The pattern of the last page that was unmapped, if a store takes its like out of a live
    /// table.
    pub plain: u64,
    /// The last change, and what it makes of the last leaf.
    pub recent: Recent,
}

impl Cache {
    /// Nothing is cached. The space is open if `open`.
    pub fn new(reach: Reach, open: bool) -> Self {
        Self {
            open: if open { reach.size } else { 0 },
            upper: UpperCache::EMPTY,
            plain: NOT_PLAIN,
            recent: Recent::NONE,
        }
    }

    /// Forgets everything: leaves are changed by other rules from now on.
    pub fn invalidate(&mut self) {
        self.upper.invalidate();
        self.plain = NOT_PLAIN;
        self.recent.clear();
    }

    /// Whether the space is open at an address, `offset` being that of its reach.
    #[inline]
    pub fn is_open_at(&self, input: u64, offset: u64) -> bool {
        input.wrapping_add(offset) < self.open
    }

    #[inline]
    pub fn is_open(&self) -> bool {
        self.open != 0
    }

    /// Notes that tables may deny permissions from now on, if those of the format can.
    #[inline]
    pub fn close<F: Format>(&mut self) {
        if F::TABLES_RESTRICT {
            self.open = 0;
            self.upper.invalidate();
        }
    }
}

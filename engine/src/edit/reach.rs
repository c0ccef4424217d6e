//! Which addresses a root translates, and of those the ones to which an edit has a shorter way.

use crate::SMALL;
use crate::addr::{Address, Pa, Span};
use crate::edit::error::EditError;
use crate::format::Format;
use crate::platform::Platform;
use crate::walk::{Place, Slice, descend, descend_near};

/// Which half of the input space a root translates, for formats that have a root for each.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, Half, Pa, Span, Va, format::Arm64K4, hosted::Hosted};
/// let platform = Hosted::new(8, 12);
/// let mut kernel = AddressSpace::<Arm64K4, _>::new_in(&platform, Half::Upper).unwrap();
/// let low = Span::new(Va::new(0), 4096)?;
/// assert_eq!(kernel.map(low, Pa::new(0), Attrs::KERNEL_DATA), Err(EditError::InputOutOfRange));
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Addresses that start with zeros: `TTBR0`, or all of a format that has one root.
    Lower,
    /// Addresses that start with ones: `TTBR1`.
    Upper,
}

/// Which addresses a root translates: those of one half of the input space, or of both.
///
/// In both, what lies above the bits of a half is a copy of the sign. So they are `size` addresses
/// from `-offset` on.
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
            (true, false) => Self {
                offset: size,
                size: 2 * size,
            },
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

    /// Whether it holds all from `first` to `last`.
    #[inline(always)]
    pub fn holds(self, first: u64, last: u64) -> bool {
        // With the offset, what is translated starts at 0, the upper half first; the hole between
        // the halves is above it. So a range that begins in the lower half and ends in the upper
        // one would end before it begins.
        let first = first.wrapping_add(self.offset);
        let last = last.wrapping_add(self.offset);
        first <= last && last < self.size
    }

    /// Checks a range that an edit was given.
    #[inline]
    pub fn check<F: Format>(self, span: Span<F::Input>) -> Result<Slice, EditError<F::Input>> {
        let slice = Slice {
            first: span.start().bits(),
            last: span.last().bits(),
        };
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
#[inline(always)]
pub(super) fn bits_of_half<F: Format>() -> u32 {
    F::INPUT_BITS - u32::from(F::SIGNED && !F::HALVES)
}

/// Where pages are edited by the quick way: the space translates the address, no table takes
/// permissions away, so that what adds one need not look, and no other software has encoded a leaf.
///
/// And which pages are near, because they lie below the table of tables that the last one lay
/// below: a walk to them starts there. It is what processors have as well (paging-structure caches:
/// SDM 5.10.3; intermediate caching: DDI 0487 D8.16), and as of them, what takes such a table out
/// of the tree has it forgotten.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    /// The size of the reach; 0 if the space is open nowhere.
    pub(super) size: u64,
    /// The first of the near pages, and how many they are.
    pub(super) first: u64,
    pub(super) pages: u64,
    /// Holds the table, if they are any.
    pub(super) tables: Pa,
}

impl Open {
    /// All that a root translates.
    pub fn new(reach: Reach) -> Self {
        Self {
            size: reach.size,
            first: 0,
            pages: 0,
            tables: Pa::new(0),
        }
    }

    /// The same of a tree of which nothing is known, if tables of its format restrict nothing.
    pub fn unless_restricted<F: Format>(reach: Reach) -> Self {
        Self::new(Reach {
            size: if F::TABLES_RESTRICT { 0 } else { reach.size },
            ..reach
        })
    }

    /// The number among the near pages of the one that an address is in, if it is one of them.
    #[inline(always)]
    pub fn number_of<F: Format>(&self, input: u64) -> Option<u64> {
        let number = input.wrapping_sub(self.first) >> F::PAGE_SHIFT;
        (!SMALL && number < self.pages).then_some(number)
    }

    /// Goes straight down to the table of pages that covers `slice`, which the root translates.
    /// `None` as [`descend`] says.
    ///
    /// # Safety
    /// 1. `root` holds the root of the space that this is of, on `platform`.
    #[inline(always)]
    pub unsafe fn place<'p, F: Format, P: Platform>(
        &self,
        platform: &'p P,
        root: Pa,
        slice: Slice,
    ) -> Option<Place<'p, P>> {
        match self.number_of::<F>(slice.first) {
            // SAFETY: the table is of this tree (1.), as long as it is remembered (1.); it has the
            // page (2.).
            Some(number) => unsafe {
                descend_near::<F, P, false>(platform, self.tables, number, slice)
            },
            // SAFETY: (1.)
            None => unsafe { descend_far::<F, P>(platform, root, slice) },
        }
    }

    /// Tables take permissions away from now on, if those of the format can.
    #[inline(always)]
    pub fn close<F: Format>(&mut self) {
        if F::TABLES_RESTRICT {
            (self.size, self.pages) = (0, 0);
        }
    }

    /// Tables may be taken out of the tree: no page is near.
    #[inline(always)]
    pub fn forget(&mut self) {
        self.pages = 0;
    }
}

/// As [`descend`], and its obligation.
#[inline(never)]
unsafe fn descend_far<F: Format, P: Platform>(
    platform: &P,
    root: Pa,
    slice: Slice,
) -> Option<Place<'_, P>> {
    // SAFETY: the caller's.
    unsafe { descend::<F, P, false, false>(platform, root, slice) }
}

//! Addresses, levels and ranges: what an edit is about, in types that cannot be mixed up.
//!
//! A virtual address, a physical address and an intermediate physical address (what a guest
//! believes to be physical) are three types. A range of addresses is a [`Span`]: never empty, never
//! wrapping, aligned to 4 KiB, the smallest granule of any format, when it is made; an edit checks
//! it again against the granule of the format at hand. A [`Page`] carries its size in its type, so
//! that a 2 MiB page at a 4 KiB address cannot be written down.
//!
//! A span keeps its first address and its size, not its end: the end of a range that reaches the
//! top of the address space does not fit in 64 bits.

use core::fmt;

/// Smallest granule of any format: 4 KiB, as a power of two. Every [`Span`] is aligned to it.
pub const MIN_PAGE_SHIFT: u32 = 12;

/// An address of one of the three kinds.
///
/// Sealed: the engine knows [`Va`], [`Pa`] and [`Ipa`].
///
/// ```
/// use tablewright::{Address, Ipa, Va};
/// fn kind<A: Address>(_: A) -> &'static str {
///     A::KIND
/// }
/// assert_eq!(kind(Va::new(0)), "virtual address");
/// assert_eq!(kind(Ipa::new(0)), "intermediate physical address");
/// ```
pub trait Address:
    Copy + Eq + Ord + fmt::Debug + fmt::Display + sealed::Sealed + Send + Sync + 'static
{
    /// The name of such an address in an error message.
    const KIND: &'static str;
    /// Addresses are signed: those that start with ones count backwards from zero, and are as good
    /// as those that start with zeros. Virtual addresses are; memory starts at 0 and ends.
    const SIGNED: bool;
    /// Makes an address of this kind from its bits.
    fn from_bits(bits: u64) -> Self;
    /// The address as bits.
    fn bits(self) -> u64;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $kind:literal, signed: $signed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Makes an address from its bits. Any value is an address; whether a format can
            /// translate or hold it is checked by the edit that uses it.
            pub const fn new(bits: u64) -> Self {
                Self(bits)
            }

            /// The address as bits.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The address `bytes` further up, or `None` if it would pass the top of the address
            /// space.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(bits) => Some(Self(bits)),
                    None => None,
                }
            }

            /// Whether the low `shift` bits are zero. A `shift` of 64 or more asks for address 0.
            pub const fn is_aligned(self, shift: u32) -> bool {
                shift >= 64 && self.0 == 0 || shift < 64 && self.0 & ((1 << shift) - 1) == 0
            }
        }

        impl sealed::Sealed for $name {}

        impl Address for $name {
            const KIND: &'static str = $kind;
            const SIGNED: bool = $signed;
            #[inline]
            fn from_bits(bits: u64) -> Self {
                Self(bits)
            }
            #[inline]
            fn bits(self) -> u64 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address!(
    /// A virtual address: the input of stage 1.
    ///
    /// ```
    /// use tablewright::Va;
    /// let va = Va::new(0xffff_8000_0000_0000);
    /// assert!(va.is_aligned(21));
    /// assert_eq!(va.checked_add(4096), Some(Va::new(0xffff_8000_0000_1000)));
    /// ```
    Va,
    "virtual address",
    signed: true
);
address!(
    /// A physical address: the output of the last stage, and the name of every frame.
    ///
    /// It is not interchangeable with a virtual one:
    /// ```compile_fail
    /// use tablewright::{Pa, Va};
    /// let va: Va = Pa::new(0x1000);
    /// ```
    Pa,
    "physical address",
    signed: false
);
address!(
    /// An intermediate physical address: what a guest takes for physical, the input of stage 2.
    ///
    /// ```
    /// use tablewright::Ipa;
    /// assert_eq!(Ipa::new(0x4000_0000).to_string(), "0x40000000");
    /// ```
    Ipa,
    "intermediate physical address",
    signed: false
);

/// The error of a [`Span`] or a [`Page`] that could not be made.
///
/// ```
/// use tablewright::{AddressError, Span, Va};
/// assert_eq!(Span::new(Va::new(0x1000), 0), Err(AddressError::Empty));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressError {
    /// The first address or the size is not a multiple of the size of a page, `1 << shift` bytes.
    Misaligned {
        /// The offending address or size.
        value: u64,
        /// The alignment that is asked for, as a power of two.
        shift: u32,
    },
    /// The range holds no page.
    Empty,
    /// The range passes the top of the 64-bit address space.
    Wraps,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Misaligned { value, shift } => {
                write!(f, "{value:#x} is not a multiple of {:#x}", 1u128 << shift)
            }
            Self::Empty => write!(f, "the range is empty"),
            Self::Wraps => write!(f, "the range passes the top of the address space"),
        }
    }
}

impl core::error::Error for AddressError {}

/// A range of addresses: not empty, not wrapping, a multiple of 4 KiB at both ends.
///
/// ```
/// use tablewright::{Pa, Span};
/// let ram = Span::new(Pa::new(0x8000_0000), 0x1000_0000)?;
/// assert_eq!(ram.last(), Pa::new(0x8fff_ffff));
/// assert!(Span::new(Pa::new(0x8000_0800), 0x1000).is_err());
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span<A> {
    start: A,
    size: u64,
}

impl<A: Address> Span<A> {
    /// The range of `size` bytes from `start`.
    ///
    /// # Errors
    /// [`AddressError::Misaligned`] unless both are multiples of 4 KiB, [`AddressError::Empty`] for
    /// a size of 0, [`AddressError::Wraps`] if the range passes the top of the address space.
    #[inline]
    pub fn new(start: A, size: u64) -> Result<Self, AddressError> {
        for value in [start.bits(), size] {
            if value & ((1 << MIN_PAGE_SHIFT) - 1) != 0 {
                return Err(AddressError::Misaligned { value, shift: MIN_PAGE_SHIFT });
            }
        }
        if size == 0 {
            return Err(AddressError::Empty);
        }
        if start.bits().checked_add(size - 1).is_none() {
            return Err(AddressError::Wraps);
        }
        Ok(Self { start, size })
    }

    /// The range from `start` to `last`, the last address included.
    ///
    /// # Errors
    /// As [`Span::new`]; `last + 1` has to be a multiple of 4 KiB.
    #[inline]
    pub fn inclusive(start: A, last: A) -> Result<Self, AddressError> {
        let size = last.bits().checked_sub(start.bits()).ok_or(AddressError::Empty)?;
        Self::new(start, size.checked_add(1).ok_or(AddressError::Wraps)?)
    }

    /// All addresses of so many bits, fewer than 64 and at least 12.
    pub(crate) fn of_bits(bits: u32) -> Self {
        Self { start: A::from_bits(0), size: 1 << bits }
    }

    /// The first address.
    #[inline]
    pub fn start(self) -> A {
        self.start
    }

    /// The size in bytes.
    #[inline]
    pub fn size(self) -> u64 {
        self.size
    }

    /// The last address that belongs to the range.
    #[inline]
    pub fn last(self) -> A {
        A::from_bits(self.start.bits() + (self.size - 1))
    }

    /// Whether `address` lies in the range.
    #[inline]
    pub fn contains(self, address: A) -> bool {
        // What lies below the start wraps around, past the size.
        address.bits().wrapping_sub(self.start.bits()) < self.size
    }

    /// Whether both ends are multiples of `1 << shift` bytes.
    #[inline]
    pub fn is_aligned(self, shift: u32) -> bool {
        shift < 64 && (self.start.bits() | self.size) & ((1 << shift) - 1) == 0
    }

    /// This range and `next` as one, if that begins where this ends.
    ///
    /// ```
    /// use tablewright::{Pa, Span};
    /// let page = |at| Span::new(Pa::new(at), 0x1000).unwrap();
    /// assert_eq!(page(0x3000).join(page(0x4000)), Span::new(Pa::new(0x3000), 0x2000).ok());
    /// assert_eq!(page(0x4000).join(page(0x3000)), None);
    /// ```
    #[inline]
    pub fn join(self, next: Self) -> Option<Self> {
        let follows = self.last().bits().checked_add(1) == Some(next.start.bits());
        // All addresses that there are have no size.
        let size = self.size.checked_add(next.size).filter(|_| follows)?;
        Some(Self { start: self.start, size })
    }

    /// A range that is known not to wrap: of a leaf, which is aligned to its size, or of what a
    /// root translates.
    #[inline]
    pub(crate) const fn of_leaf(start: A, size: u64) -> Self {
        Self { start, size }
    }

    /// Returns the part that the two ranges share, if there is one.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let last = self.last().min(other.last());
        (start <= last).then(|| Self { start, size: last.bits() - start.bits() + 1 })
    }
}

impl<A: Address> fmt::Debug for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.start, self.last())
    }
}

impl<A: Address> fmt::Display for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A page of `1 << SHIFT` bytes at an address that is a multiple of its size.
///
/// A literal that is not aligned does not compile:
/// ```compile_fail
/// use tablewright::{Page, Va};
/// let page = Page::<Va, 21>::literal::<0x20_1000>();
/// ```
/// ```
/// use tablewright::{Page, Span, Va};
/// let page = Page::<Va, 21>::literal::<0x20_0000>();
/// assert_eq!(Span::from(page).size(), 2 << 20);
/// assert!(Page::<Va, 21>::new(Va::new(0x20_1000)).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page<A, const SHIFT: u32>(A);

impl<A: Address, const SHIFT: u32> Page<A, SHIFT> {
    const VALID: () =
        assert!(SHIFT >= MIN_PAGE_SHIFT && SHIFT < 64, "a page has between 4 KiB and 2^63 bytes");

    /// The page that starts at `start`.
    ///
    /// # Errors
    /// [`AddressError::Misaligned`] unless `start` is a multiple of the size of the page.
    #[inline]
    pub fn new(start: A) -> Result<Self, AddressError> {
        let () = Self::VALID;
        if start.bits() & ((1 << SHIFT) - 1) == 0 {
            Ok(Self(start))
        } else {
            Err(AddressError::Misaligned { value: start.bits(), shift: SHIFT })
        }
    }

    /// The page at an address that is known when the program is compiled; a misaligned one does not
    /// compile.
    pub fn literal<const START: u64>() -> Self {
        let () = Self::VALID;
        const { assert!(START & ((1 << SHIFT) - 1) == 0, "the page is not aligned") };
        Self(A::from_bits(START))
    }

    /// The page that `address` lies in.
    #[inline]
    pub fn containing(address: A) -> Self {
        let () = Self::VALID;
        Self(A::from_bits(address.bits() & !((1 << SHIFT) - 1)))
    }

    /// The first address.
    #[inline]
    pub fn start(self) -> A {
        self.0
    }
}

impl<A: Address, const SHIFT: u32> From<Page<A, SHIFT>> for Span<A> {
    fn from(page: Page<A, SHIFT>) -> Self {
        Self { start: page.0, size: 1 << SHIFT }
    }
}

/// A level of a tree of tables, counted from the leaves: 0 is the level whose entries translate
/// pages.
///
/// The architectures number their levels differently (arm64: -1 to 3, 3 last; x86: PT to PML5);
/// counted from the leaves, a level means the same thing in every format, and
/// [`Format::shift`](crate::Format::shift) gives the size of what one entry covers.
///
/// ```
/// use tablewright::{Format, Level, format::X86_64};
/// assert_eq!(X86_64::<4>::shift(Level::PAGE), 12);
/// assert_eq!(X86_64::<4>::shift(Level::new(1)), 21);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// The level whose entries translate single pages.
    pub const PAGE: Self = Self(0);

    /// Above every level of any format: as a limit, none.
    pub const ANY: Self = Self(u8::MAX);

    /// The level `height` steps above the pages.
    pub const fn new(height: u8) -> Self {
        Self(height)
    }

    /// Steps above the level of pages.
    #[inline]
    pub const fn height(self) -> u8 {
        self.0
    }

    /// The next level towards the root; above [`ANY`](Self::ANY) is none, and it stays.
    #[inline]
    pub const fn up(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The next level towards the pages; the level of pages has none.
    #[inline]
    pub const fn down(self) -> Option<Self> {
        match self.0.checked_sub(1) {
            Some(height) => Some(Self(height)),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_may_reach_the_top_of_the_address_space() {
        let top = Span::new(Va::new(0xffff_ffff_ffff_f000), 4096).unwrap();
        assert_eq!(top.last(), Va::new(u64::MAX));
        assert_eq!(Span::new(Va::new(0xffff_ffff_ffff_f000), 8192), Err(AddressError::Wraps));
        assert_eq!(Span::inclusive(Va::new(0), Va::new(u64::MAX)), Err(AddressError::Wraps));
    }

    /// One more overflowed.
    #[test]
    fn nothing_is_above_any_level() {
        assert_eq!(Level::new(254).up(), Level::ANY);
        assert_eq!(Level::ANY.up(), Level::ANY);
        assert_eq!(Level::ANY.down().map(Level::up), Some(Level::ANY));
    }

    #[test]
    fn spans_intersect_where_both_are() {
        let span = |start, size| Span::new(Pa::new(start), size).unwrap();
        let (a, b) = (span(0x1000, 0x3000), span(0x3000, 0x4000));
        assert_eq!(a.intersect(b), Some(span(0x3000, 0x1000)));
        assert_eq!(a.intersect(span(0x4000, 0x1000)), None);
        assert!(a.contains(Pa::new(0x3fff)) && !a.contains(Pa::new(0x4000)));
    }

    #[test]
    fn every_misalignment_is_refused() {
        for bit in 0..12 {
            assert!(Span::new(Pa::new(1 << bit), 4096).is_err());
            assert!(Span::new(Pa::new(0), 4096 + (1 << bit)).is_err());
        }
    }
}

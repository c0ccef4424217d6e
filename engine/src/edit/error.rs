//! Why an edit was refused.

use core::fmt;

use crate::addr::Address;
use crate::format::Inexpressible;

/// The error of an edit that was refused. Nothing has changed then: neither mappings nor tables nor
/// what is allocated.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(8, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let hole = Span::new(Va::new(0x8000_0000_0000), 4096)?;
/// assert_eq!(
///     space.map(hole, Pa::new(0), Attrs::KERNEL_DATA),
///     Err(EditError::InputOutOfRange)
/// );
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EditError<A> {
    /// An address or a size is not a multiple of the granule.
    Misaligned,
    /// Part of the range is not an address that the root translates.
    InputOutOfRange,
    /// Part of the memory lies beyond the address size of the format.
    OutputOutOfRange,
    /// Something is mapped at this address already.
    AlreadyMapped(A),
    /// Nothing is mapped at this address.
    NotMapped(A),
    /// A table above this address takes away a permission that the leaf would have.
    Denied(A),
    /// A table is needed at this address, and the edit was not to allocate any.
    NeedsTable(A),
    /// The platform had no frame for a table.
    OutOfTables,
    /// The format cannot hold the attributes.
    Inexpressible(Inexpressible),
    /// The change needs a break-before-make at this address, and the space is the one the code runs
    /// on.
    NeedsBreak(A),
    /// The format has no leaf at this level.
    NoSuchLeaf,
    /// The range that is moved and the one that it is moved to have addresses in common.
    Overlaps,
    /// The entry of the root for this address leads to the root again.
    Recursive(A),
    /// The gather was made for another guest.
    ForeignGather,
}

impl<A> From<Inexpressible> for EditError<A> {
    fn from(reason: Inexpressible) -> Self {
        Self::Inexpressible(reason)
    }
}

impl<A: Address> fmt::Display for EditError<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Misaligned => write!(f, "an address or a size is not a multiple of the granule"),
            Self::InputOutOfRange => write!(f, "the range is not one that this root translates"),
            Self::OutputOutOfRange => {
                write!(f, "the memory lies beyond the address size of the format")
            }
            Self::AlreadyMapped(at) => write!(f, "{} {at} is mapped already", A::KIND),
            Self::NotMapped(at) => write!(f, "{} {at} is not mapped", A::KIND),
            Self::Denied(at) => write!(f, "a table above {at} denies a permission"),
            Self::NeedsTable(at) => write!(f, "a table is needed at {at}"),
            Self::OutOfTables => write!(f, "no frame is left for a table"),
            Self::Inexpressible(reason) => write!(f, "{reason}"),
            Self::NeedsBreak(at) => {
                write!(f, "the change at {at} would have to break the mapping in use")
            }
            Self::NoSuchLeaf => write!(f, "the format has no leaf at this level"),
            Self::Overlaps => write!(f, "a range cannot be moved into itself"),
            Self::Recursive(at) => write!(f, "the root leads to itself at {at}"),
            Self::ForeignGather => write!(f, "the gather belongs to another guest"),
        }
    }
}

impl<A: Address> core::error::Error for EditError<A> {}

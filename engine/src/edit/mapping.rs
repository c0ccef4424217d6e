//! A mapping's attributes, and which leaves may be used for it.

use crate::addr::{Level, Pa};
use crate::edit::space::EditError;
use crate::format::{Attrs, Format, Perms};

/// The way to map a range: the attributes, and which leaves may be used.
///
/// Without further wishes: the largest leaves that fit, contiguous runs where the format has them.
///
/// ```
/// use tablewright::{Attrs, Level, Mapping};
/// let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
/// let blocks_without_runs = Mapping::new(Attrs::KERNEL_DATA).without_runs();
/// assert_ne!(pages, blocks_without_runs);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub(super) attrs: Attrs,
    pub(super) largest: Level,
    pub(super) runs: bool,
    tables_deny: bool,
    pub(super) allocate: bool,
}

impl Mapping {
    /// The largest leaves that fit, with these attributes.
    pub const fn new(attrs: Attrs) -> Self {
        Self { attrs, largest: Level::ANY, runs: true, tables_deny: false, allocate: true }
    }

    /// The attributes.
    pub const fn attrs(&self) -> Attrs {
        self.attrs
    }

    /// The highest level whose leaves may be used.
    pub(crate) const fn top(&self) -> Level {
        self.largest
    }

    /// Returns the permissions that tables made for it take away.
    #[inline]
    pub(super) fn denied(&self) -> Perms {
        match self.tables_deny {
            true => Perms::ANY_EXEC - self.attrs.perms,
            false => Perms::empty(),
        }
    }

    /// This mapping with other attributes.
    pub const fn with_attrs(mut self, attrs: Attrs) -> Self {
        self.attrs = attrs;
        self
    }

    /// No leaf above `level`; nor, in any case, above the [largest](crate::Caps::largest_leaf) that
    /// the processor has.
    pub const fn largest(mut self, level: Level) -> Self {
        self.largest = level;
        self
    }

    /// Excludes contiguous runs.
    pub const fn without_runs(mut self) -> Self {
        self.runs = false;
        self
    }

    /// Uses single pages, neither blocks nor runs, so that each page can be changed without a
    /// split.
    pub const fn pages_only(self) -> Self {
        self.largest(Level::PAGE).without_runs()
    }

    /// Tables made for this mapping deny execution, as far as the attributes do and the format can.
    /// Nothing executable can be mapped below them later.
    pub const fn tables_deny_execution(mut self) -> Self {
        self.tables_deny = true;
        self
    }

    /// Use the tables that exist, allocate none.
    pub const fn without_allocation(mut self) -> Self {
        self.allocate = false;
        self
    }
}

impl From<Attrs> for Mapping {
    fn from(attrs: Attrs) -> Self {
        Self::new(attrs)
    }
}

/// Checks memory that is to be mapped.
#[inline]
pub(super) fn check_memory<F: Format>(frame: Pa, size: u64) -> Result<(), EditError<F::Input>> {
    if !frame.is_aligned(F::PAGE_SHIFT) {
        return Err(EditError::Misaligned);
    }
    match frame.checked_add(size - 1) {
        Some(last) if last.get() >> F::OUTPUT_BITS == 0 => Ok(()),
        _ => Err(EditError::OutputOutOfRange),
    }
}

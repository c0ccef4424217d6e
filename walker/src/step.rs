//! The walk, one descriptor at a time.
//!
//! [`translate`](crate::translate) reads tables as fast as memory answers. A model of a processor
//! cannot use it: there each read takes time, others write in between, upper levels come out of a
//! walk cache, and a walk that has to set a flag starts its last step again. It holds a [`Walk`]
//! and hands it one descriptor after the other.

use crate::regime::Shape;
use crate::walk::{Format, Position};
use crate::{Denied, Descriptor, Fault, Leaf, Regime};

/// Decodes `descriptor`, which translates `va` and stands in a table of `level`, under tables that
/// deny `denied`.
///
/// `va` is any of the addresses that the descriptor translates.
///
/// ```
/// use tablewright_walker::{Denied, Descriptor, Regime, decode};
///
/// let regime = Regime::X86_64 { levels: 4 };
/// // A table that may not be written, and a 4 KiB page that may.
/// let Descriptor::Table { pa: 0x5000, denied } = decode(regime, 2, 0, Denied::NONE, 0x5005)
/// else {
///     panic!("a table at 0x5000");
/// };
/// let Descriptor::Leaf(leaf) = decode(regime, 1, 0x7f00_0000_1234, denied, 0x9007) else {
///     panic!("a page");
/// };
/// assert_eq!((leaf.va, leaf.pa), (0x7f00_0000_1000, 0x9000));
/// assert_eq!(leaf.access.user.to_string(), "r-x");
/// ```
///
/// # Panics
///
/// When the regime has no such level.
#[inline]
pub fn decode(regime: Regime, level: i8, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
    with_format!(regime, format => {
        let shape = format.shape();
        let depth = shape.depth(level);
        format.decode(depth, shape.entry_start(depth, va), denied, descriptor)
    })
}

/// Returns `descriptor`, of a table of `level`, as hardware that manages the access flag makes it
/// when it uses it; `None` when there is nothing to write.
///
/// * arm64 sets AF of a leaf (FEAT_HAFDBS with TCR_EL1.HA set; DDI 0487 D8.5.1.2). It leaves tables
///   alone, as without FEAT_HAFT.
/// * x86-64 sets A of every entry on the way, of tables and of the page (SDM vol. 3A 5.8); so does
///   nested paging, and EPT if bit 6 of the EPTP is set (SDM vol. 3C 29.3.5).
///
/// A descriptor that is invalid or reserved ends the walk and is not written.
///
/// ```
/// use tablewright_walker::{Regime, with_access_flag};
///
/// let regime = Regime::X86_64 { levels: 4 };
/// assert_eq!(with_access_flag(regime, 1, 0x9007), Some(0x9027));
/// assert_eq!(with_access_flag(regime, 1, 0x9027), None);
/// ```
///
/// # Panics
///
/// When the regime has no such level.
#[inline]
pub fn with_access_flag(regime: Regime, level: i8, descriptor: u64) -> Option<u64> {
    let flagged = with_format!(regime,
        format => match decode(regime, level, 0, Denied::NONE, descriptor) {
        Descriptor::Leaf(_) => format.used(descriptor),
        Descriptor::Table { .. } => format.table_used(descriptor),
        Descriptor::Invalid | Descriptor::Reserved(_) => descriptor,
    });
    (flagged != descriptor).then_some(flagged)
}

/// Returns the leaf `descriptor`, of a table of `level`, as hardware that manages the dirty state
/// makes it when a write goes through it; `None` when there is nothing to write: it is dirty,
/// forbids writing, or is no leaf.
///
/// * arm64 clears AP\[2\] where DBM is set (FEAT_HAFDBS with TCR_EL1.HA and HD set; DDI 0487
///   D8.5.2.1). AP\[2\] of such a leaf forbids nothing: its permissions are those of the descriptor
///   returned, for execution too (D8.5.2.2). Stage 2 sets S2AP\[1\] instead.
/// * x86-64 and nested paging set D where R/W is set (SDM vol. 3A 5.8), EPT where W is, if bit 6 of
///   the EPTP is set.
///
/// Hardware writes it only when the tables above let the write pass as well. The access flag stays
/// as it is; a write through a leaf that lacks both has to set it before or at once, because no
/// page is dirty and not accessed.
///
/// ```
/// use tablewright_walker::{Granule, Regime, with_access_flag, with_dirty};
///
/// let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
/// let clean = 0x0068_0000_4000_0383; // DBM, AP[2], AF clear
/// let dirty = with_dirty(regime, 3, clean).unwrap();
/// assert_eq!(with_access_flag(regime, 3, dirty), Some(0x0068_0000_4000_0703));
/// assert_eq!(with_dirty(regime, 3, 0x0060_0000_4000_0783), None); // DBM clear: read-only
/// ```
///
/// # Panics
///
/// When the regime has no such level.
#[inline]
pub fn with_dirty(regime: Regime, level: i8, descriptor: u64) -> Option<u64> {
    let dirty = with_format!(regime,
        format => match decode(regime, level, 0, Denied::NONE, descriptor) {
        Descriptor::Leaf(_) => format.written(descriptor),
        _ => descriptor,
    });
    (dirty != descriptor).then_some(dirty)
}

/// A walk in progress: it stands in front of one descriptor, waits for its value, and goes on.
///
/// ```
/// use tablewright_walker::{Regime, Walk};
///
/// let memory = |table: u64, index: usize| match (table, index) {
///     (0x1000, 0) => 0x2007,
///     (0x2000, 0) => 0x3007,
///     (0x3000, 1) => 0x4007,
///     (0x4000, 0) => 0x9007,
///     _ => 0,
/// };
/// let mut walk = Walk::new(Regime::X86_64 { levels: 4 }, 0x1000, 0x20_0123)?;
/// let leaf = loop {
///     let descriptor = memory(walk.table(), walk.index());
///     if let Some(leaf) = walk.step(descriptor)? {
///         break leaf;
///     }
/// };
/// assert_eq!(leaf.physical(0x20_0123), 0x9123);
/// assert_eq!((walk.table(), walk.level()), (0x4000, 1));
/// # Ok::<(), tablewright_walker::Fault>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    regime: Regime,
    /// That of the regime: worked out once, and asked for at each step.
    shape: Shape,
    position: Position,
}

impl Walk {
    /// Starts at `root`, the physical address of the first table, for the address `va`.
    ///
    /// # Errors
    ///
    /// [`Fault::NonCanonical`].
    ///
    /// # Panics
    ///
    /// When there is no such regime: neither 4 nor 5 levels, or an input size that is none.
    #[inline]
    pub fn new(regime: Regime, root: u64, va: u64) -> Result<Self, Fault> {
        let position = with_format!(regime, format => Position::root(format, root, va))?;
        Ok(Self { regime, shape: regime.shape(), position })
    }

    /// Goes on from a table that a walk cache remembers: its physical address, the level of its
    /// descriptors, and what the tables above it deny.
    ///
    /// `va` is one of the addresses that led to this table before, hence canonical.
    ///
    /// # Panics
    ///
    /// When the regime has no such level.
    #[inline]
    pub const fn resume(regime: Regime, table: u64, level: i8, denied: Denied, va: u64) -> Self {
        let shape = regime.shape();
        let position = Position { va, table, denied, depth: shape.depth(level) };
        Self { regime, shape, position }
    }

    /// The address to translate.
    #[inline]
    pub const fn va(&self) -> u64 {
        self.position.va
    }

    /// The physical address of the table to read next.
    #[inline]
    pub const fn table(&self) -> u64 {
        self.position.table
    }

    /// The number of the descriptor to read next, within that table.
    #[inline]
    pub const fn index(&self) -> usize {
        self.position.index(self.shape)
    }

    /// The level of the table to read next, by the architecture's own number.
    #[inline]
    pub const fn level(&self) -> i8 {
        self.shape.level(self.position.depth)
    }

    /// Returns the access that the tables passed so far take away.
    #[inline]
    pub const fn denied(&self) -> Denied {
        self.position.denied
    }

    /// The number of low bits of an address that the descriptor to read next leaves open: it
    /// translates `1 << entry_shift` bytes.
    #[inline]
    pub const fn entry_shift(&self) -> u32 {
        self.shape.shift(self.position.depth)
    }

    /// The number of low bits of an address that the table to read next resolves or leaves open: it
    /// translates `1 << table_shift` bytes.
    ///
    /// Two addresses that are equal above these bits share the table, so that `va >> table_shift`
    /// is the tag of the table in a walk cache. For the root, on arm64, these are all bits that
    /// select a translation: its two halves have a root each.
    #[inline]
    pub const fn table_shift(&self) -> u32 {
        self.shape.table_shift(self.position.depth)
    }

    /// Takes the value of the descriptor at ([`table`](Self::table), [`index`](Self::index)): a
    /// leaf ends the walk, a table is what to read next.
    ///
    /// A walk that has ended, with a leaf or a fault, still stands at the descriptor that ended it.
    /// It may be given another value of it, as after a failed attempt to set a flag.
    ///
    /// # Errors
    ///
    /// [`Fault::NotMapped`] or [`Fault::Reserved`].
    #[inline]
    pub fn step(&mut self, descriptor: u64) -> Result<Option<Leaf>, Fault> {
        with_format!(self.regime, format => self.position.step(format, descriptor))
    }
}

//! Which pages a guest has written since the last harvest.
//!
//! You need this if you copy a guest while it runs, to another host or into a file:
//! [`guest`](crate::guest) logs into it.
//!
//! A host that copies a running guest has to know what changes behind its back. It has all pages
//! [logged](crate::guest::Log): none is writable before it is written, the first write faults, and
//! the fault handler [marks](crate::guest::Guest::mark) the page. The host *harvests*: it takes the
//! marks away, protects those pages again, and copies them. Or hardware marks what is written, in
//! the leaf, and harvesting is to collect that.
//!
//! # In which order
//!
//! Nothing that was written may be missed: at any time, what is marked, or has been harvested and
//! not yet copied, is all that the copy lacks. Two rules make it so.
//!
//! * **A page is marked after it was made writable**, and before the guest goes on. Marked earlier,
//!   the mark could be harvested, and the page protected, before it becomes writable: then it is
//!   written without a mark.
//! * **A page is harvested, then protected, then copied**, the last after every processor has
//!   forgotten that it could be written. Protected first, it could be written and marked again
//!   before its mark is taken away. Copied before, it could be written after.
//!
//! A page is reported once too often where a mark comes late, and never once too seldom.
//!
//! # Where the marks are
//!
//! [`Bitmap`]: a bit for each page of a slot, for all processors. Harvesting looks at all of it,
//! which is nothing beside copying what is found. [`Flip`] is two of them in turn: one is
//! harvested, with plain loads and stores, while the other is marked.
//!
//! [`Ring`]: a list for each virtual CPU, in the order of the faults. Harvesting takes as long as
//! there are marks, and a processor that writes more than the host copies is stopped by its ring
//! being full.
//!
//! [`ModificationLog`]: what hardware has written down of a virtual CPU's writes, until they are
//! marked in a bitmap. There the first rule is kept by hardware, which logs a page when it sets the
//! dirty flag, and the second is: *a page is harvested, then made clean, then copied*. Made clean
//! first, it could be written, logged and marked before its mark is taken away; it would be dirty
//! from then on, and never logged again.

mod bitmap;
mod modification;
mod ring;

pub use bitmap::{Bitmap, Flip, marked};
pub use modification::ModificationLog;
pub use ring::{Collected, Ring, RingEntry};

use core::fmt;

/// The error of a log that cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogError {
    /// There are fewer bits than pages; how many there are.
    TooFewBits(u64),
    /// The two bitmaps of a pair are not for the same number of pages.
    Unequal,
    /// A ring has to have a number of entries that is a power of two; how many there are.
    RingSize(usize),
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFewBits(bits) => write!(f, "{bits} bits are fewer than there are pages"),
            Self::Unequal => write!(f, "the two bitmaps are for different numbers of pages"),
            Self::RingSize(entries) => {
                write!(f, "a ring of {entries} entries: it has to be a power of two")
            }
        }
    }
}

impl core::error::Error for LogError {}

/// The ring of this virtual CPU is full: it has to wait until it is harvested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ring of pages written is full")
    }
}

impl core::error::Error for Full {}

/// A place for marks of writes to the pages of one slot.
///
/// A virtual CPU has a ring, or shares the bitmap. The host's own writes, on behalf of a device,
/// have no virtual CPU: beside rings there is a bitmap for them.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::{Bitmap, Marker};
/// let mut words = [const { AtomicU64::new(0) }; 4];
/// let bitmap = Bitmap::new(&mut words, 256)?;
/// let marker = Marker::Bitmap(&bitmap);
/// marker.room()?; // before the page is made writable
/// bitmap.mark(70); // and after, by `Guest::mark`
/// assert!(bitmap.is_marked(70));
/// # let _ = marker;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Marker<'a> {
    /// The bitmap of the slot.
    Bitmap(&'a Bitmap<'a>),
    /// The two bitmaps of the slot.
    Flip(&'a Flip<'a>),
    /// The ring of a virtual CPU, and the number of the slot.
    Ring(&'a Ring<'a>, u16),
}

impl Marker<'_> {
    /// Whether a mark can be taken. Asked before the page is made writable: then it cannot be
    /// refused.
    ///
    /// # Errors
    /// [`Full`]: let the host harvest, and have the guest fault again.
    pub fn room(&self) -> Result<(), Full> {
        match self {
            Self::Ring(ring, _) if !ring.has_room() => Err(Full),
            _ => Ok(()),
        }
    }

    /// Marks a page of the slot, counted from its first. The caller has entered a walk.
    pub(crate) fn mark(&self, page: u64) {
        match self {
            Self::Bitmap(bitmap) => bitmap.mark(page),
            Self::Flip(flip) => flip.current().mark(page),
            Self::Ring(ring, slot) => ring.push(*slot, page),
        }
    }
}

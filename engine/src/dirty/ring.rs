//! A list of pages for each virtual CPU.
//!
//! An entry goes round through three states, as in the protocol that users of KVM know, and has its
//! layout: *empty*, filled by the virtual CPU; *written*, looked at by the host; *harvested*,
//! protected by the host, and then empty again. Which side may touch an entry follows from its
//! state, so that the virtual CPU and the host need no lock. The flags are stored last, with
//! release, and loaded first, with acquire: the side that sees the state sees the entry.
//!
//! One virtual CPU fills a ring, and one thread of the host harvests it. It is full when all its
//! entries are written or harvested. Being full is an event and no loss: it is known before the
//! page is made writable.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::LogError;

/// Nothing was written here, or it has been dealt with.
const EMPTY: u32 = 0;
/// A page was written.
const WRITTEN: u32 = 1;
/// The host has seen it.
const HARVESTED: u32 = 2;

/// An entry of a ring: its state, a slot, a page of the slot.
#[derive(Debug)]
#[repr(C)]
pub struct RingEntry {
    flags: AtomicU32,
    slot: AtomicU32,
    page: AtomicU64,
}

impl RingEntry {
    /// An empty one.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Self {
            flags: AtomicU32::new(EMPTY),
            slot: AtomicU32::new(0),
            page: AtomicU64::new(0),
        }
    }

    /// An empty one.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        Self {
            flags: AtomicU32::new(EMPTY),
            slot: AtomicU32::new(0),
            page: AtomicU64::new(0),
        }
    }
}

impl RingEntry {
    /// What it says. Its state has shown the caller that it may be read.
    #[inline]
    fn give(&self, each: &mut impl FnMut(u16, u64)) {
        let slot = self.slot.load(Ordering::Relaxed);
        each(slot as u16, self.page.load(Ordering::Relaxed));
    }
}

impl Default for RingEntry {
    fn default() -> Self {
        Self::new()
    }
}

/// The pages that one virtual CPU has written, in order.
///
/// ```
/// use tablewright::dirty::{Ring, RingEntry};
/// let entries = [const { RingEntry::new() }; 4];
/// let ring = Ring::new(&entries)?;
/// ring.push(0, 7); // what `Guest::mark` does
/// ring.push(2, 1000);
/// let mut seen = Vec::new();
/// ring.harvest(|slot, page| seen.push((slot, page)));
/// assert_eq!(seen, [(0, 7), (2, 1000)]);
/// let mut to_protect = Vec::new();
/// let collected = ring.collect(|slot, page| to_protect.push((slot, page)));
/// // Now these pages are protected, the flush is finished, and then:
/// collected.release();
/// // And only now they are copied.
/// assert_eq!(to_protect, seen);
/// # Ok::<(), tablewright::dirty::LogError>(())
/// ```
#[derive(Debug)]
pub struct Ring<'m> {
    entries: &'m [RingEntry],
    /// The next to be filled; the virtual CPU's.
    filled: AtomicU64,
    /// The next to be harvested, and to be collected; the host's.
    harvested: AtomicU64,
    collected: AtomicU64,
}

/// Entries that are empty again when their pages are protected.
#[derive(Debug)]
#[must_use = "the ring fills up if they are not released"]
pub struct Collected<'r> {
    /// Of the ring that they are of, and of no other.
    ring: &'r Ring<'r>,
    first: u64,
    count: u64,
}

impl Collected<'_> {
    /// The number of entries that were collected.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether no entry was collected.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The pages are protected, and every CPU has forgotten that they could be written: their
    /// entries are empty. From now on they may be copied.
    pub fn release(self) {
        for number in self.first..self.first + self.count {
            let entry = self.ring.entry(number);
            entry.flags.store(EMPTY, Ordering::Release);
        }
    }
}

impl<'m> Ring<'m> {
    /// A ring of these entries, which have to be empty.
    ///
    /// # Errors
    /// [`LogError::RingSize`].
    pub fn new(entries: &'m [RingEntry]) -> Result<Self, LogError> {
        if !entries.len().is_power_of_two() {
            return Err(LogError::RingSize(entries.len()));
        }
        Ok(Self {
            entries,
            filled: AtomicU64::new(0),
            harvested: AtomicU64::new(0),
            collected: AtomicU64::new(0),
        })
    }

    /// A log that starts with everything marked: not with a ring.
    ///
    /// # Errors
    /// Always [`LogError::RingStartsEmpty`].
    pub fn mark_all(&self) -> Result<(), LogError> {
        Err(LogError::RingStartsEmpty)
    }

    fn entry(&self, number: u64) -> &RingEntry {
        &self.entries[(number & (self.entries.len() as u64 - 1)) as usize]
    }

    /// Whether there is an empty entry. The virtual CPU asks.
    pub fn has_room(&self) -> bool {
        let next = self.entry(self.filled.load(Ordering::Relaxed));
        next.flags.load(Ordering::Acquire) == EMPTY
    }

    /// Puts a page in, for the virtual CPU, which has made sure that there is room. What finds none
    /// is not put in.
    pub fn push(&self, slot: u16, page: u64) {
        let number = self.filled.load(Ordering::Relaxed);
        let entry = self.entry(number);
        if entry.flags.load(Ordering::Acquire) != EMPTY {
            debug_assert!(false, "pushed without asking for room");
            return;
        }
        entry.slot.store(u32::from(slot), Ordering::Relaxed);
        entry.page.store(page, Ordering::Relaxed);
        entry.flags.store(WRITTEN, Ordering::Release);
        self.filled.store(number + 1, Ordering::Relaxed);
    }

    /// Gives out what was written and not harvested, in order. Returns how many. The host's one
    /// thread.
    pub fn harvest(&self, mut each: impl FnMut(u16, u64)) -> u64 {
        let first = self.harvested.load(Ordering::Relaxed);
        let mut number = first;
        loop {
            let entry = self.entry(number);
            if entry.flags.load(Ordering::Acquire) != WRITTEN {
                break;
            }
            entry.give(&mut each);
            entry.flags.store(HARVESTED, Ordering::Release);
            number += 1;
        }
        self.harvested.store(number, Ordering::Relaxed);
        number - first
    }

    /// Gives out what was harvested and not collected, to be protected. The host's one thread.
    pub fn collect(&self, mut each: impl FnMut(u16, u64)) -> Collected<'_> {
        let first = self.collected.load(Ordering::Relaxed);
        let last = self.harvested.load(Ordering::Relaxed);
        for number in first..last {
            self.entry(number).give(&mut each);
        }
        self.collected.store(last, Ordering::Relaxed);
        Collected {
            ring: self,
            first,
            count: last - first,
        }
    }
}

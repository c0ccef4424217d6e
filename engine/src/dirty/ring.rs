//! A list of pages for each virtual CPU.
//!
//! An entry goes round through three states, as in the protocol that users of KVM know, and has its
//! layout: *empty*, filled by the virtual CPU; *written*, harvested by the host; *harvested*,
//! protected by the host, and then empty again. The state says which side may touch an entry, so
//! that the virtual CPU and the host need no lock. The flags are stored last, with release, and
//! loaded first, with acquire: the side that sees the state sees the entry.
//!
//! One virtual CPU fills a ring, and the host harvests it. It is full when all its entries are
//! written or harvested. Being full is an event and no loss: it is known before the page is made
//! writable.
//!
//! The host's positions move after the visitor has returned, and on release. A visitor that
//! unwinds, and a [`Collected`] that is dropped, leave them where they were: the entries are given
//! out again.

use super::LogError;
use crate::offer::Turn;
use crate::sync::{AtomicU32, AtomicU64, Ordering, const_new};

/// Nothing was written here, or it has been dealt with.
const EMPTY: u32 = 0;
/// A page was written.
const WRITTEN: u32 = 1;
/// The host has seen it.
const HARVESTED: u32 = 2;

/// An entry of a ring: its state, a slot, a page of the slot.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingEntry {
    flags: AtomicU32,
    slot: AtomicU32,
    page: AtomicU64,
}

impl RingEntry {
    const_new! {
        /// An empty one.
        {
            Self {
                flags: AtomicU32::new(EMPTY),
                slot: AtomicU32::new(0),
                page: AtomicU64::new(0),
            }
        }
    }

    /// Gives out its slot and page. The caller has acquired its state.
    #[inline]
    fn give(&self, each: &mut impl FnMut(u16, u64)) {
        let slot = self.slot.load(Ordering::Relaxed);
        each(slot as u16, self.page.load(Ordering::Relaxed));
    }
}

/// The pages that one virtual CPU has written, in order.
///
/// ```
/// use tablewright::dirty::{Ring, RingEntry};
/// let mut entries = [const { RingEntry::new() }; 4];
/// let ring = Ring::new(&mut entries)?;
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
///
/// Entries are of one ring:
///
/// ```compile_fail,E0499
/// # use tablewright::dirty::{Ring, RingEntry};
/// # let mut entries = [const { RingEntry::new() }; 4];
/// let first = Ring::new(&mut entries);
/// let second = Ring::new(&mut entries); // the entries of the first
/// # let _ = (first, second);
/// ```
#[derive(Debug)]
pub struct Ring<'m> {
    entries: &'m [RingEntry],
    /// The next to be filled; the virtual CPU's.
    filled: AtomicU64,
    /// The next to be harvested, and to be collected; the host's, in its turn.
    harvested: AtomicU64,
    collected: AtomicU64,
    host: Turn,
}

/// Entries that are empty again when their pages are protected. Dropped, they are collected again.
#[derive(Debug)]
#[must_use = "the ring fills up if they are not released"]
pub struct Collected<'r> {
    /// The ring whose entries these are.
    ring: &'r Ring<'r>,
    first: u64,
    last: u64,
}

impl Collected<'_> {
    /// The number of entries that were collected.
    pub fn len(&self) -> u64 {
        self.last - self.first
    }

    /// Whether no entry was collected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Empties the entries: the pages are protected, and no TLB holds them as writable. From now on
    /// they may be copied. Inside of a visitor of the ring nothing is released, and they are
    /// collected again.
    pub fn release(self) {
        let Some(_turn) = self.ring.host.begin() else {
            return;
        };
        // Another `Collected` may have released some of them, which the virtual CPU fills again.
        let first = self.ring.collected.load(Ordering::Relaxed).max(self.first);
        for number in first..self.last {
            let entry = self.ring.entry(number);
            entry.flags.store(EMPTY, Ordering::Release);
        }
        if first < self.last {
            self.ring.collected.store(self.last, Ordering::Relaxed);
        }
    }
}

impl<'m> Ring<'m> {
    /// A ring of these entries, which are emptied.
    ///
    /// # Errors
    /// [`LogError::RingSize`].
    pub fn new(entries: &'m mut [RingEntry]) -> Result<Self, LogError> {
        if !entries.len().is_power_of_two() {
            return Err(LogError::RingSize(entries.len()));
        }
        entries.fill_with(RingEntry::new);
        Ok(Self {
            entries,
            filled: AtomicU64::new(0),
            harvested: AtomicU64::new(0),
            collected: AtomicU64::new(0),
            host: Turn::default(),
        })
    }

    fn entry(&self, number: u64) -> &RingEntry {
        &self.entries[(number & (self.entries.len() as u64 - 1)) as usize]
    }

    /// Whether there is an empty entry. The virtual CPU asks.
    pub fn has_room(&self) -> bool {
        let next = self.entry(self.filled.load(Ordering::Relaxed));
        next.flags.load(Ordering::Acquire) == EMPTY
    }

    /// Puts a page in, for the virtual CPU, which has made sure that there is room. Without room it
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

    /// Gives out the pages that were written and not harvested, in order. Returns how many. Gives
    /// out none while another harvest of the ring is under way.
    pub fn harvest(&self, mut each: impl FnMut(u16, u64)) -> u64 {
        let Some(_turn) = self.host.begin() else {
            return 0;
        };
        let first = self.harvested.load(Ordering::Relaxed);
        let mut number = first;
        loop {
            let entry = self.entry(number);
            if entry.flags.load(Ordering::Acquire) != WRITTEN {
                return number - first;
            }
            entry.give(&mut each);
            entry.flags.store(HARVESTED, Ordering::Release);
            number += 1;
            self.harvested.store(number, Ordering::Relaxed);
        }
    }

    /// Gives out the pages that were harvested and not released, to be protected. Gives out none
    /// while a harvest of the ring is under way.
    pub fn collect(&self, mut each: impl FnMut(u16, u64)) -> Collected<'_> {
        let (mut first, mut last) = (0, 0);
        if let Some(_turn) = self.host.begin() {
            first = self.collected.load(Ordering::Relaxed);
            last = self.harvested.load(Ordering::Relaxed);
            (first..last).for_each(|number| self.entry(number).give(&mut each));
        }
        Collected { ring: self, first, last }
    }
}

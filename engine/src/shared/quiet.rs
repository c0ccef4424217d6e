//! When is a table that was cut off out of everybody's hands?
//!
//! A walk of software holds a table between reading the descriptor that points to it and leaving it again. Whoever cuts
//! the table off meanwhile must not free it: not before the hardware has forgotten it, which a flush takes care of, and
//! not before every such walk is over. Two ways to know the second:
//!
//! * **Quiescent states**: [`Quiescence`], or the embedder's own. There are moments at which a processor holds no table:
//!   between two faults, say, or when it goes idle. Nothing is paid in a walk, so nothing is paid many times for many walks.
//! * **Epochs**, for everybody else: [`Epochs`]. A walk announces itself when it starts and when it ends, which costs a
//!   fence.
//!
//! # Why an announcement is enough
//!
//! A walk writes the epoch that it read into its processor's slot, then a full fence, then reads descriptors. Who cuts a
//! table off stores the descriptor, then a full fence, then moves the epoch on, and later looks at the slots. Of the two
//! fences one comes first. If it is the walk's, the slot is seen, with an epoch from before the cut, and the
//! table is kept. If it is the cut's, the walk reads the new descriptor and never comes to the table. A slot that holds
//! the new epoch belongs to a walk that read it after the cut, and so reads the new descriptor too.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

use core::marker::PhantomData;

/// One processor's announcement. Each has cache lines to itself.
///
/// ```
/// use tablewright::shared::Slot;
/// static SLOTS: [Slot; 4] = [const { Slot::new() }; 4];
/// # let _ = &SLOTS;
/// ```
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot(AtomicU64);

/// Nobody walks.
const QUIET: u64 = 0;

impl Slot {
    /// A processor that walks no tables.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(QUIET))
    }

    /// A processor that walks no tables.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(QUIET))
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self::new()
    }
}

/// A moment after which a walk has to start for not to know a table that was cut off before it.
///
/// ```
/// use tablewright::shared::{Epochs, Slot};
/// let slots = [const { Slot::new() }; 2];
/// let epochs = Epochs::new(&slots);
/// let cut = epochs.advance();
/// assert!(epochs.is_past(cut));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[must_use = "what was cut off may be freed when this is past"]
pub struct Moment(u64);

impl Moment {
    /// For platforms that count quiescent states of their own: any number that grows.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Epochs: which walks may still hold what was cut off.
///
/// ```
/// use tablewright::shared::{Epochs, Slot};
/// let slots = [const { Slot::new() }; 2];
/// let epochs = Epochs::new(&slots);
/// let walk = epochs.enter(1);
/// let cut = epochs.advance();
/// assert!(!epochs.is_past(cut)); // the walk may have seen what was there
/// drop(walk);
/// assert!(epochs.is_past(cut));
/// ```
#[derive(Debug)]
pub struct Epochs<'s> {
    now: AtomicU64,
    slots: &'s [Slot],
}

impl<'s> Epochs<'s> {
    /// Epochs for as many processors as there are slots.
    pub fn new(slots: &'s [Slot]) -> Self {
        Self {
            now: AtomicU64::new(QUIET + 1),
            slots,
        }
    }

    #[cfg(feature = "hosted")]
    pub(crate) fn slots(&self) -> &'s [Slot] {
        self.slots
    }

    /// Processor number `cpu` starts a walk. It has one at a time; a second on the same processor, as in an interrupt, is
    /// part of the first. `None` for a processor that has no slot.
    pub fn enter(&self, cpu: usize) -> Option<Walking<'_>> {
        let slot = &self.slots.get(cpu)?.0;
        // Only this processor writes its slot.
        let outer = slot.load(Ordering::Relaxed);
        if outer == QUIET {
            slot.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
            // The announcement before any descriptor is read: see above.
            fence(Ordering::SeqCst);
        }
        Some(Walking {
            slot: (outer == QUIET).then_some(slot),
            not_send: PhantomData,
        })
    }

    /// Tables have been cut off: a walk that starts later than this does not find them.
    pub fn advance(&self) -> Moment {
        advance(&self.now)
    }

    /// Whether every walk that started before that moment is over. Does not wait.
    pub fn is_past(&self, moment: Moment) -> bool {
        all_past(self.slots, moment)
    }
}

/// Quiescent states: when each processor last held no table.
///
/// A processor that has passed such a state with the number of a cut, or a later one, has read that number after the
/// cut was made, and comes to no table that was cut off; what it held before, it has let go.
///
/// ```
/// use tablewright::shared::{Quiescence, Slot};
/// let slots = [const { Slot::new() }; 2];
/// let states = Quiescence::new(&slots);
/// states.pass(0); // processor 0 has begun; 1 rests
/// let cut = states.advance();
/// assert!(!states.is_past(cut));
/// states.pass(0);
/// assert!(states.is_past(cut));
/// ```
#[derive(Debug)]
pub struct Quiescence<'s> {
    now: AtomicU64,
    slots: &'s [Slot],
}

impl<'s> Quiescence<'s> {
    /// Quiescent states of as many processors as there are slots. All of them rest.
    pub fn new(slots: &'s [Slot]) -> Self {
        for slot in slots {
            slot.0.store(QUIET, Ordering::Relaxed);
        }
        Self {
            now: AtomicU64::new(QUIET + 1),
            slots,
        }
    }

    /// Processor number `cpu` holds no table now, and may walk from now on. Nothing happens for one that has no slot, and
    /// must not walk.
    pub fn pass(&self, cpu: usize) {
        let Some(Slot(slot)) = self.slots.get(cpu) else {
            return;
        };
        let rested = slot.load(Ordering::Relaxed) == QUIET;
        // Acquire: what was cut off before this number is not found any more. Release: what was held is let go.
        slot.store(self.now.load(Ordering::Acquire), Ordering::Release);
        if rested {
            // The end of the rest before any descriptor is read, as for epochs.
            fence(Ordering::SeqCst);
        }
    }

    /// Processor number `cpu` holds no table, and will not walk before it [passes](Quiescence::pass) again: it is idle, or
    /// runs a guest.
    pub fn rest(&self, cpu: usize) {
        if let Some(Slot(slot)) = self.slots.get(cpu) {
            slot.store(QUIET, Ordering::Release);
        }
    }

    /// Tables have been cut off: a processor that passes later than this does not find them.
    pub fn advance(&self) -> Moment {
        advance(&self.now)
    }

    /// Whether every processor has passed, or rested, since that moment. Does not wait.
    pub fn is_past(&self, moment: Moment) -> bool {
        all_past(self.slots, moment)
    }
}

/// Moves the number on that walks announce.
fn advance(now: &AtomicU64) -> Moment {
    // The descriptor before the look at the slots: see above.
    fence(Ordering::SeqCst);
    Moment(now.fetch_add(1, Ordering::SeqCst) + 1)
}

/// Whether no slot holds a number from before that moment.
fn all_past(slots: &[Slot], moment: Moment) -> bool {
    fence(Ordering::SeqCst);
    slots.iter().all(|slot| {
        // What the walk did to the table is done before it is freed: acquire, for its release.
        let entered = slot.0.load(Ordering::Acquire);
        entered == QUIET || entered >= moment.0
    })
}

/// A walk by one processor, until this is dropped.
#[derive(Debug)]
#[must_use = "the walk ends when this is dropped"]
pub struct Walking<'e> {
    /// `None` for a walk inside of another.
    slot: Option<&'e AtomicU64>,
    not_send: PhantomData<*const ()>,
}

impl Walking<'_> {
    /// A walk that needs no announcement: quiescent states tell when it is over.
    pub const UNANNOUNCED: Self = Self {
        slot: None,
        not_send: PhantomData,
    };
}

impl Drop for Walking<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.store(QUIET, Ordering::Release);
        }
    }
}

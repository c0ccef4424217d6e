//! Logs of a guest's writes, the bell by which a guest says that its load is at work, and the gate
//! at which it is stopped.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use spin::mutex::{SpinMutex, SpinMutexGuard};
use tablewright::Ipa;
use tablewright::dirty::{Bitmap, Marker, Ring, RingEntry};
use tablewright::guest::Slot;

use crate::counters::Event;
use crate::host::{Host, PROCESSORS, relax};
use crate::pieces::{MOST, Pieces};

/// Entries of the ring of one virtual CPU.
const RING: usize = 1024;

/// The place of marks, and how a log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bitmap; each leaf is protected.
    Bitmap,
    /// A ring for each virtual CPU; each leaf is protected.
    Ring,
    /// A bitmap; all tables are write-protected in one step.
    All,
    /// A bitmap, into which is taken what hardware has marked in the leaves.
    Hardware,
}

impl Kind {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bitmap" => Some(Self::Bitmap),
            "ring" => Some(Self::Ring),
            "all" => Some(Self::All),
            "hardware" => Some(Self::Hardware),
            _ => None,
        }
    }
}

static RUNG: AtomicBool = AtomicBool::new(false);

/// The guest rings the bell.
pub fn ring() {
    RUNG.store(true, Ordering::Release);
}

/// Whether the guest has rung.
pub(crate) fn has_rung() -> bool {
    RUNG.load(Ordering::Acquire)
}

/// Whether the guest was copied, and runs on the copy: it reads that at the bell.
pub fn is_over<H: Host>() -> bool {
    H::counted(Event::Resumed) != 0
}

/// The time at which a copy begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// When the guest rings the bell.
    Bell,
    /// After so many milliseconds.
    After(u64),
}

impl Begin {
    /// `bell`, or a number.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bell" => Some(Self::Bell),
            number => number.parse().ok().map(Self::After),
        }
    }
}

/// A gate that every virtual CPU passes with each fault, or each time it is entered; it waits there
/// while the gate is closed.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicBool,
    inside: [AtomicBool; PROCESSORS],
}

impl Gate {
    /// An open one.
    #[expect(clippy::new_without_default, reason = "it is a constant")]
    pub const fn new() -> Self {
        Self {
            closed: AtomicBool::new(false),
            inside: [const { AtomicBool::new(false) }; PROCESSORS],
        }
    }

    /// Passes, once the gate is open.
    pub fn enter<H: Host>(&self, cpu: usize) {
        let Some(inside) = self.inside.get(cpu) else {
            return;
        };
        loop {
            // One of the two, this one and the one that closes it, sees what the other has stored.
            inside.store(true, Ordering::SeqCst);
            if !self.closed.load(Ordering::SeqCst) {
                H::passed();
                return;
            }
            inside.store(false, Ordering::SeqCst);
            while self.closed.load(Ordering::Relaxed) {
                relax::<H>();
            }
        }
    }

    /// Goes back to the guest.
    pub fn leave(&self, cpu: usize) {
        if let Some(inside) = self.inside.get(cpu) {
            inside.store(false, Ordering::SeqCst);
        }
    }

    /// Lets no processor in, and waits until none is inside.
    pub(crate) fn close<H: Host>(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for (cpu, inside) in self.inside.iter().enumerate() {
            if inside.load(Ordering::SeqCst) {
                H::summon(cpu);
            }
            while inside.load(Ordering::SeqCst) {
                relax::<H>();
            }
        }
    }

    /// Lets processors in again.
    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }
}

/// The marks of one slot.
pub(crate) struct Marks {
    /// The number of its first page, of all pages of the guest's memory.
    pub(crate) first: u64,
    pub(crate) pages: u64,
    start: Ipa,
    pub(crate) bitmap: Bitmap<'static>,
}

/// The marks of the guest's memory.
pub struct Log {
    pub(crate) kind: Kind,
    /// One for each slot of memory.
    marks: [Option<Marks>; MOST],
    pub(crate) rings: [Option<Ring<'static>>; PROCESSORS],
    /// Pages that are still to be copied. Only the processor that copies uses it.
    pub(crate) todo: &'static [AtomicU64],
}

impl Log {
    /// A log of memory, each piece of which is a slot; all pieces but the last have a multiple of
    /// 64 pages. `words` are two for each 64 pages.
    pub fn new<H: Host>(
        kind: Kind,
        guest: &Pieces,
        words: &'static mut [AtomicU64],
    ) -> Option<Self> {
        static ENTRIES: SpinMutex<[[RingEntry; RING]; PROCESSORS]> =
            SpinMutex::new([const { [const { RingEntry::new() }; RING] }; PROCESSORS]);
        // There is one log: of several guests, the first has rings.
        let entries = ENTRIES.try_lock().map(SpinMutexGuard::leak);
        let pages = guest.size() / H::PAGE;
        let (mut rest, todo) = words.split_at_mut_checked(pages.div_ceil(64) as usize)?;
        let mut marks = [const { None }; MOST];
        for (place, (before, piece)) in marks.iter_mut().zip(guest.iter()) {
            let pages = piece.size() / H::PAGE;
            let own;
            (own, rest) = rest.split_at_mut_checked(pages.div_ceil(64) as usize)?;
            *place = Some(Marks {
                first: before / H::PAGE,
                pages,
                start: piece.start(),
                bitmap: Bitmap::new(own, pages).ok()?,
            });
        }
        Some(Self {
            kind,
            marks,
            rings: match entries {
                Some(entries) => entries.each_mut().map(|entries| Ring::new(entries).ok()),
                None => [const { None }; PROCESSORS],
            },
            todo,
        })
    }

    /// Returns the marker by which this processor marks written pages.
    pub fn marker(&self, cpu: usize, slot: &Slot) -> Marker<'_> {
        match (self.kind, self.rings.get(cpu)) {
            (Kind::Ring, Some(Some(ring))) => Marker::Ring(ring, slot.id),
            _ => Marker::Bitmap(&self.marks_of(slot).bitmap),
        }
    }

    /// Returns the marks of a slot of memory.
    pub(crate) fn marks_of(&self, slot: &Slot) -> &Marks {
        let mut all = self.marks.iter().flatten();
        let found = all.find(|marks| marks.start == slot.guest.start());
        found.unwrap_or_else(|| panic!("a slot is logged that is no memory"))
    }

    /// Marks a page that the hypervisor has written, or moved.
    pub fn mark(&self, page: u64) {
        let mut all = self.marks.iter().flatten();
        if let Some(marks) = all.find(|marks| page.wrapping_sub(marks.first) < marks.pages) {
            marks.bitmap.mark(page - marks.first);
        }
    }

    /// Has a page copied.
    pub(crate) fn to_do(&self, page: u64) {
        if let Some(word) = self.todo.get((page / 64) as usize) {
            word.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }
}

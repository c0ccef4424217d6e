//! The engine's platform, on one processor: frames for tables, and invalidations.
//!
//! *Publish.* Walkers see stores in program order (SDM vol. 3A 9.2.2): the compiler has to keep
//! them, no more.
//!
//! *Invalidate.* INVLPG forgets the leaf that translates an address, whatever its size, in every
//! space if it is global, and everything that is cached of tables (SDM vol. 3A 5.10.4.1).
//! Everything, global translations included, goes when CR4.PGE changes. Both are complete with the
//! instruction. What is remembered of a guest goes when it is next entered ([`svm::forget`]).

use core::cell::Cell;
use core::ops::Range;
use core::ptr::{self, NonNull};
use core::sync::atomic::{Ordering, compiler_fence};

use tablewright::{Barrier, Entry, Invalidation, Level, Pa, Platform, What};
use x86_64::VirtAddr;
use x86_64::instructions::tlb;
use x86_64::registers::control::{Cr4, Cr4Flags};

use crate::svm;
use tablewright_hypervisor_common::edits::PAGE;

/// A planted bug: a class of invalidations that is left out, so that a test can show that it is
/// missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omit {
    /// Those of leaves.
    Leaves,
    /// Those of everything.
    Everything,
}

impl Omit {
    /// The class of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "leaves" => Some(Self::Leaves),
            "everything" => Some(Self::Everything),
            _ => None,
        }
    }
}

/// The walker of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walker {
    /// This processor, as it is.
    Host(Option<Omit>),
    /// This processor in a guest.
    Guest,
}

/// Frames for the tables of one tree.
pub struct Tables {
    walker: Walker,
    /// The distance from a frame to the address at which the walker takes it to be.
    distance: u64,
    fresh: Cell<u64>,
    end: u64,
    /// A chain of frames that were used and are not, through their first words.
    chain: Cell<u64>,
}

impl Tables {
    /// Frames of `memory`.
    ///
    /// # Safety
    /// 1. The memory has no other user, and is mapped one to one.
    /// 2. To the walker it lies `distance` higher.
    pub unsafe fn new(memory: Range<u64>, distance: u64, walker: Walker) -> Self {
        Self {
            walker,
            distance,
            fresh: Cell::new(memory.start),
            end: memory.end,
            chain: Cell::new(0),
        }
    }

    /// The end of the frames that have ever been used.
    pub fn used(&self) -> u64 {
        self.fresh.get()
    }

    /// The walker forgets everything.
    pub fn forget_everything(&self) {
        match self.walker {
            // SAFETY: no code relies on translations that are kept.
            Walker::Host(_) => unsafe {
                Cr4::update(|cr4| cr4.remove(Cr4Flags::PAGE_GLOBAL));
                Cr4::update(|cr4| cr4.insert(Cr4Flags::PAGE_GLOBAL));
            },
            Walker::Guest => svm::forget(),
        }
    }

    /// Returns the real place of the walker's frame.
    pub fn place(&self, frame: u64) -> *mut u64 {
        ptr::with_exposed_provenance_mut((frame - self.distance) as usize)
    }
}

// SAFETY: a frame is handed out once until it is freed (1.), and lies where `place` says (2.),
// where there is nothing else. There are no links (3.). The compiler keeps stores in order (4.), an
// invalidation is complete when it was issued (5., 6.), and a reference is the same platform (7.).
unsafe impl Platform for Tables {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let chained = self.chain.get();
        let frame = if chained != 0 {
            // SAFETY: a frame of the chain, whose first word says where it goes on.
            self.chain.set(unsafe { self.place(chained).read() });
            chained
        } else {
            let frame = self.fresh.get();
            if frame == self.end {
                return None;
            }
            self.fresh.set(frame + PAGE);
            frame + self.distance
        };
        Some(Pa::new(frame))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        // SAFETY: it is not used any more.
        unsafe { self.place(frame.get()).write(self.chain.get()) };
        self.chain.set(frame.get());
    }

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: no frame is at address 0.
        unsafe { NonNull::new_unchecked(self.place(frame.get()).cast()) }
    }

    fn barrier(&self, _: Barrier) {
        compiler_fence(Ordering::SeqCst);
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        let Walker::Host(omit) = self.walker else {
            return svm::forget();
        };
        let ranges = match flush.what {
            What::Everything if omit == Some(Omit::Everything) => return,
            What::Everything => return self.forget_everything(),
            What::Ranges(ranges) => ranges,
        };
        for range in ranges {
            if !range.tables && omit == Some(Omit::Leaves) {
                continue;
            }
            // One leaf at a time where their size is known.
            let size = PAGE << range.level.map_or(0, |level| 9 * u32::from(level.height()));
            let mut at = range.first & !(size - 1);
            while at <= range.last {
                tlb::flush(VirtAddr::new_truncate(at));
                at += size;
            }
        }
    }
}

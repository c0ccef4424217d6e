//! The steps of a process's life that are counted, and what each asks of the processor.

/// The size of a page.
pub const PAGE: u64 = 4096;
/// The pages of the process's heap.
pub const PAGES: u64 = 4096;
/// The pages that the child writes.
pub const COPIES: u64 = 1000;
/// The first address of the heap: whole tables of pages.
pub const HEAP: u64 = 1 << 28;
/// The address of the program.
pub const TEXT: u64 = 0x40_0000;

/// Requests of a step to the processor that the engine runs on.
///
/// ```
/// use tablewright_processes::Step;
/// let fork = Step::Fork.expected();
/// assert_eq!((fork.invalidations, fork.waits), (1, 1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Barriers after stores: `DSB ISHST` and `ISB`.
    pub stores: u64,
    /// Waits for the completion of what was issued: `DSB ISH` and `ISB`.
    pub waits: u64,
    /// Invalidations: `TLBI`.
    pub invalidations: u64,
    /// Roots that are loaded: an `ISB` after the register is written.
    pub loads: u64,
}

impl Counts {
    /// `DSB`, of either kind.
    pub const fn dsb(self) -> u64 {
        self.stores + self.waits
    }

    /// `ISB`.
    pub const fn isb(self) -> u64 {
        self.stores + self.waits + self.loads
    }

    /// Both.
    const fn and(self, other: Self) -> Self {
        Self {
            stores: self.stores + other.stores,
            waits: self.waits + other.waits,
            invalidations: self.invalidations + other.invalidations,
            loads: self.loads + other.loads,
        }
    }

    /// Multiplies the counts.
    const fn times(self, count: u64) -> Self {
        Self {
            stores: self.stores * count,
            waits: self.waits * count,
            invalidations: self.invalidations * count,
            loads: self.loads * count,
        }
    }
}

const NONE: Counts = Counts { stores: 0, waits: 0, invalidations: 0, loads: 0 };
/// Entries that were holes: walkers remember no hole, so that all there is to do is to let them see
/// the stores.
const PUBLISH: Counts = Counts { stores: 1, ..NONE };
/// Counts of forgetting what walkers may remember: the stores are seen, then the invalidation is
/// issued, then it is complete. Once for all that was gathered.
const FLUSH: Counts = Counts { stores: 1, waits: 1, invalidations: 1, loads: 0 };

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The process writes each page of its heap for the first time.
    Demand,
    /// It forks.
    Fork,
    /// The child, on another processor, writes pages that both have.
    Copy,
    /// The parent writes the same pages, which it has alone by now.
    Reuse,
    /// One page of the heap may only be read from now on.
    ProtectPage,
    /// It may be written again.
    Allow,
    /// The whole heap may only be read.
    ProtectAll,
    /// The child exits.
    Exit,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 8] = [
        Self::Demand,
        Self::Fork,
        Self::Copy,
        Self::Reuse,
        Self::ProtectPage,
        Self::Allow,
        Self::ProtectAll,
        Self::Exit,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Fork => "fork",
            Self::Copy => "copy",
            Self::Reuse => "reuse",
            Self::ProtectPage => "protect-page",
            Self::Allow => "allow",
            Self::ProtectAll => "protect-all",
            Self::Exit => "exit",
        }
    }

    /// Its number, from 1 on.
    pub const fn number(self) -> u16 {
        self as u16 + 1
    }

    /// The faults that it takes, or 0 where it is one call.
    pub const fn faults(self) -> u64 {
        match self {
            Self::Demand => PAGES,
            Self::Copy | Self::Reuse => COPIES,
            _ => 0,
        }
    }

    /// Returns its requests to the processor.
    pub const fn expected(self) -> Counts {
        match self {
            // Each fault maps a hole.
            Self::Demand => PUBLISH.times(PAGES),
            // One flush of the parent for all its ranges; the child's tables are seen before its
            // root is loaded.
            Self::Fork => FLUSH.and(PUBLISH),
            // Another frame: arm64 demands that the old entry is forgotten before the new one is
            // made, which is then seen.
            Self::Copy => FLUSH.and(PUBLISH).times(COPIES),
            // Another permission needs no break.
            Self::Reuse => FLUSH.times(COPIES),
            // One flush, of one page or of 4,096: a range is one instruction, and so is all of a
            // space.
            Self::ProtectPage | Self::ProtectAll => FLUSH,
            // The area says so, and the next write is a fault: the page may be another's, too.
            Self::Allow => NONE,
            // Another root is loaded, and the identifier forgotten. No walker comes to the tables
            // any more: nothing is to be seen in them.
            Self::Exit => Counts { stores: 0, loads: 1, ..FLUSH },
        }
    }
}

//! One run of the experiment.

use clap::ValueEnum;
use tablewright::Level;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::guest::{Handled, Stage2, no_violation};
use crate::runs;

/// How the log is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// Leaf by leaf, as before the published change
    Slow,
    /// The root's entries, as published, by a bitmap of those that may be writable
    Fast,
    /// Fast, by looking at all entries of each table
    FastScan,
    /// By the engine
    Tablewright,
    /// A bug, planted in `fast`: an entry that is made writable is not marked.
    #[cfg(test)]
    Unmarked,
}

impl How {
    /// Which entries may be writable is kept beside the tables.
    pub const fn has_bitmap(self) -> bool {
        !matches!(self, Self::Slow | Self::FastScan | Self::Tablewright)
    }

    /// Whether entries that are made writable are marked, as they have to be.
    pub const fn marks_what_it_opens(self) -> bool {
        #[cfg(test)]
        if matches!(self, Self::Unmarked) {
            return false;
        }
        true
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Fast => "fast",
            Self::FastScan => "fast-scan",
            Self::Tablewright => "tablewright",
            #[cfg(test)]
            Self::Unmarked => "planted",
        }
    }
}

/// Work of the vCPUs after the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Nothing,
    /// They write all pages.
    Write,
    /// They read all pages.
    Read,
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// The format of the tables.
    pub format: Stage2,
    /// How the log is started.
    pub how: How,
    /// The guest's memory.
    pub bytes: u64,
    /// The leaves that it is mapped in.
    pub leaf: Level,
    /// How many vCPUs.
    pub vcpus: u16,
    pub then: Then,
    /// How many times a log is started, and what it has is forgotten, before the start that is
    /// timed.
    pub before: u32,
}

impl Job {
    /// Refuses a run of which the machine has a complaint.
    pub fn sound(&self, ran: &Ran) -> Result<(), Error> {
        no_violation(&self.profile, self.how.name(), ran.violation.as_deref())
    }
}

/// Figures of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// From the call until no vCPU can write without being seen.
    pub start: Time,
    /// Until the last vCPU was through with its part.
    pub then: Time,
    /// Entries written by the start.
    pub entries: u64,
    /// Kicks sent by it.
    pub kicks: u64,
    /// Invalidations made by it.
    pub invalidations: u64,
    /// Faults of the accesses after it.
    pub faults: u64,
    /// Those of them after which nothing had changed.
    pub retries: u64,
    /// Zeroed memory for the bitmap, which is supplied.
    pub bitmap_bytes: u64,
    /// The first rule of the machine that was broken, or a write that was not logged.
    pub violation: Option<String>,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

/// A way to log.
pub trait Logger {
    /// The guest's memory was mapped.
    fn mapped(&self) {}
    /// Starts the log.
    fn start(&self);
    /// A vCPU that is asked to forget does what was requested of it with that, outside of the
    /// guest.
    fn requested(&self) {}
    /// A write has faulted.
    fn write_fault(&self, at: u64) -> Handled;
    /// A read has faulted.
    fn read_fault(&self, at: u64) -> Handled;
}

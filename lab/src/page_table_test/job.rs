//! One run of the experiment, and the ways to handle faults.

use clap::ValueEnum;
use tablewright_machine::{Profile, Time};

use crate::guest::input::{Region, Source};
use crate::runs;

/// Which of the changes are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Cleaned by the vCPU that installs.
    pub cmo_in_handler: bool,
    /// Blocks are installed before what was below is visited.
    pub install_first: bool,
    /// And not cleaned, as published.
    pub unclean: bool,
    /// Tables are topped up only when one is likely to be needed.
    pub memcache: bool,
    /// Faults hold the lock together.
    pub parallel: bool,
}

/// How faults are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The published way, with these changes.
    Published(Changes),
    /// By the engine.
    Tablewright,
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// How faults are handled.
    pub way: Way,
    pub source: Source,
    pub region: Region,
    /// How many vCPUs touch it.
    pub vcpus: u16,
    /// Phases that all vCPUs go through; the others are prepared by one alone, where that makes no
    /// difference.
    pub phases: [bool; 3],
    /// Writes are logged before anything was touched: there is no first phase.
    pub logging_first: bool,
}

/// Figures of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// How long each phase took.
    pub times: [Time; 3],
    /// Faults taken by the guest.
    pub faults: u64,
    /// Faults after which nothing had changed.
    pub retries: u64,
    /// Bytes cleaned to the point of coherency.
    pub cleaned: u64,
    /// Invalidations issued.
    pub invalidations: u64,
    /// Waits until invalidations were complete.
    pub waits: u64,
    /// Tables allocated.
    pub tables: u64,
    /// The longest time that an entry was invalid which the guest had been using.
    pub invalid_longest: Time,
    /// The sum of all such times.
    pub invalid_total: Time,
    /// Huge pages of zeros that the host split.
    pub splits: u64,
    /// The first rule of the machine that was broken, and how.
    pub violation: Option<String>,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

/// How faults are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// The kernel before the published changes
    Before,
    /// Caches are maintained by the vCPU that installs, in the walk
    CmoInHandler,
    /// And a block is installed before what was below is visited, without being cleaned, as
    /// published: unsafe
    InstallFirst,
    /// The block is installed first, and cleaned
    InstallFirstClean,
    /// cmo-in-handler, and tables are topped up only when one is likely to be needed
    Memcache,
    /// All of these changes, with the cleaning that is needed
    All,
    /// The kernel as it became later: faults hold the lock together, and entries are changed by
    /// compare-exchange
    Parallel,
    /// By the engine
    Tablewright,
}

impl How {
    /// All of them.
    pub const EACH: [Self; 8] = [
        Self::Before,
        Self::CmoInHandler,
        Self::InstallFirst,
        Self::InstallFirstClean,
        Self::Memcache,
        Self::All,
        Self::Parallel,
        Self::Tablewright,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::CmoInHandler => "cmo-in-handler",
            Self::InstallFirst => "install-first",
            Self::InstallFirstClean => "install-first-clean",
            Self::Memcache => "memcache",
            Self::All => "all",
            Self::Parallel => "parallel",
            Self::Tablewright => "tablewright",
        }
    }

    /// Whether it leaves out what is needed.
    pub const fn is_unsafe(self) -> bool {
        matches!(self, Self::InstallFirst)
    }

    /// Returns the parts of the way.
    pub const fn way(self) -> Way {
        let (cmo_in_handler, install_first, unclean, memcache) = match self {
            Self::Before => (false, false, false, false),
            Self::CmoInHandler => (true, false, false, false),
            Self::InstallFirst => (true, true, true, false),
            Self::InstallFirstClean => (true, true, false, false),
            Self::Memcache => (true, false, false, true),
            Self::All => (true, true, false, true),
            // What these three are about is as before in it: blocks first, and tables ahead.
            Self::Parallel => (true, true, false, false),
            Self::Tablewright => return Way::Tablewright,
        };
        Way::Published(Changes {
            cmo_in_handler,
            install_first,
            unclean,
            memcache,
            parallel: matches!(self, Self::Parallel),
        })
    }
}

//! The ways to handle faults, by name.

use clap::ValueEnum;

use super::Way;
use super::baseline::Changes;

/// How faults are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// As it was before the published changes
    Before,
    /// Caches are maintained by the vCPU that installs, in the walk
    CmoInHandler,
    /// And a block is installed before what was below is visited, without being cleaned, as
    /// published: unsafe
    InstallFirst,
    /// The same, cleaned
    InstallFirstClean,
    /// cmo-in-handler, and tables are topped up only when one is likely to be needed
    Memcache,
    /// All of these changes, with the cleaning that is needed
    All,
    /// As it became later: faults hold the lock together, and entries are changed by
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

    /// As on the command line.
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

    /// What it is made of.
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

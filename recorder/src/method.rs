//! The ways to find out which pages a process writes, and which of them work here.
//!
//! Whether a method works is tried out, on memory of our own with a known pattern of writes:
//! versions say little, and some kernels accept what one of the methods needs and then report
//! nothing.

use crate::harvest::{Harvest, WatchError};
use crate::process::Process;
use crate::scan::{self, Scan};
use crate::soft_dirty::{self, SoftDirty};

/// The methods, the best one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Asynchronous write protection, and scans of the page map (Linux 6.7 and later)
    Scan,
    /// Soft-dirty bits: the process is stopped for every harvest (kernels with
    /// `CONFIG_MEM_SOFT_DIRTY`)
    SoftDirty,
}

impl Method {
    /// In the order in which they are tried.
    pub const ALL: [Self; 2] = [Self::Scan, Self::SoftDirty];

    /// Returns its name in recordings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scan => "scan",
            Self::SoftDirty => "soft-dirty",
        }
    }

    /// Returns the limits of its sight, for recordings.
    pub fn blind(self) -> Vec<String> {
        let blind: &[&str] = match self {
            Self::Scan => &scan::BLIND,
            Self::SoftDirty => &soft_dirty::BLIND,
        };
        blind.iter().map(|&words| words.to_owned()).collect()
    }

    /// Whether it works here; if so, how many nanoseconds one of its faults costs.
    pub fn probe(self) -> Result<u64, String> {
        match self {
            Self::Scan => scan::probe(),
            Self::SoftDirty => soft_dirty::probe(),
        }
    }
}

/// A method at work.
pub enum Watcher {
    /// By scans.
    Scan(Scan),
    /// By soft-dirty bits.
    SoftDirty(SoftDirty),
}

impl Watcher {
    /// Begins to watch a process. Returns for how many nanoseconds it was stopped for that.
    pub fn attach(method: Method, process: &mut Process) -> Result<(Self, u64), WatchError> {
        match method {
            Method::Scan => {
                Scan::attach(process).map(|(scan, stopped)| (Self::Scan(scan), stopped))
            }
            Method::SoftDirty => Ok((Self::SoftDirty(SoftDirty::new()), 0)),
        }
    }

    /// Harvests the pages that were written since the last harvest. The first tells what is there.
    pub fn harvest(&mut self, process: &mut Process) -> Result<Harvest, WatchError> {
        match self {
            Self::Scan(scan) => scan.harvest(process),
            Self::SoftDirty(soft) => soft.harvest(process),
        }
    }
}

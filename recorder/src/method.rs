//! The ways to find out which pages a process writes, and which of them work here.
//!
//! Whether a method works is tried out, on memory of our own with a known pattern of writes:
//! versions say little, and some kernels accept what one of the methods needs and then report
//! nothing.

use std::io;

use crate::layout::Mapping;
use crate::process::{Process, ProcessError};
use crate::recording::Run;
use crate::scan::{self, Scan};
use crate::soft_dirty::{self, SoftDirty};
use crate::tracee::TraceError;

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

    /// What recordings call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scan => "scan",
            Self::SoftDirty => "soft-dirty",
        }
    }

    /// What recordings say that it cannot see.
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

/// What was found at the end of an interval.
pub struct Harvest {
    /// What was mapped.
    pub map: Vec<Mapping>,
    /// Pages that are or were in use, ascending: those written are among them.
    pub seen: Vec<Run>,
    /// Pages that were written, ascending.
    pub written: Vec<Run>,
    /// At most so many faults were ours.
    pub faults: u64,
    /// Pages that can be written without being seen.
    pub unwatched: u64,
    /// How long the process was stopped for it.
    pub stopped_ns: u64,
}

/// Why a process cannot be watched, or not any longer.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// Its address space is gone: it has ended, or has become another program.
    #[error("it has ended")]
    Gone,
    /// Another method may work on it.
    #[error("{0}")]
    Method(String),
    /// No method will.
    #[error("{0}")]
    Process(ProcessError),
    /// The kernel refuses to look.
    #[error("page map: {0}")]
    Scan(io::Error),
    /// One of its threads did not do what it was made to do.
    #[error("{0}")]
    Trace(TraceError),
}

impl From<ProcessError> for WatchError {
    fn from(error: ProcessError) -> Self {
        match error {
            ProcessError::None | ProcessError::NoMemory => Self::Gone,
            other => Self::Process(other),
        }
    }
}

impl From<TraceError> for WatchError {
    fn from(error: TraceError) -> Self {
        match error {
            TraceError::Ended => Self::Gone,
            other => Self::Trace(other),
        }
    }
}

impl From<io::Error> for WatchError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ESRCH) => Self::Gone,
            _ => Self::Scan(error),
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

    /// What was written since the last harvest. The first tells what is there.
    pub fn harvest(&mut self, process: &mut Process) -> Result<Harvest, WatchError> {
        match self {
            Self::Scan(scan) => scan.harvest(process),
            Self::SoftDirty(soft) => soft.harvest(process),
        }
    }
}

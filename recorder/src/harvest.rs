//! Results of a harvest, by either method.

use std::io;

use crate::layout::Mapping;
use crate::process::ProcessError;
use crate::recording::Run;
use crate::tracee::TraceError;

/// Pages in use and pages written, at the end of an interval.
pub struct Harvest {
    /// The mappings.
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

/// Reasons for which a process cannot be watched, or no longer.
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

//! What can go wrong, in one line each, and what it means to the shell.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::format::FormatError;
use crate::iomem::IomemError;
use crate::plan::PlanError;

/// Why the program gives no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// A file cannot be read.
    #[error("{path}: {error}", path = .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file is far too large to be what it should be.
    #[error("{path}: larger than {limit}, which no memory map is", path = .path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// The most that is read.
        limit: String,
    },
    /// A file is not a memory map.
    #[error("{path}: {error}", path = .path.display())]
    Iomem {
        /// Which.
        path: PathBuf,
        /// Why.
        error: IomemError,
    },
    /// This computer does not tell its own memory map.
    #[error("{0}; use --ram SIZE, or --iomem FILE with the memory map of another computer")]
    OwnMap(Box<Error>),
    /// No processor has such tables.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The memory map cannot be mapped.
    #[error("{source_name}: {error}")]
    Plan {
        /// Where the memory map came from.
        source_name: String,
        /// Why.
        error: PlanError,
    },
    /// The tables would not fit into this computer.
    #[error(
        "the tables need {needed} and this computer has {available} to spare: give a smaller size"
    )]
    Memory {
        /// What the tables need.
        needed: String,
        /// What there is.
        available: String,
    },
    /// The host refuses memory.
    #[error("cannot map memory for tables: {0}")]
    Map(io::Error),
    /// A crate did not do what was asked, or not as asked.
    #[error("{subject}: {operation}: {problem}")]
    Subject {
        /// The crate.
        subject: &'static str,
        /// What it was doing.
        operation: &'static str,
        /// What happened.
        problem: String,
    },
    /// A picture has nowhere to go.
    #[error("--plot {path}: {error}", path = .path.display())]
    Plot {
        /// Where it should go.
        path: PathBuf,
        /// Why it cannot.
        error: io::Error,
    },
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Write(io::Error),
}

impl Error {
    /// 2 if another command line or another file would help, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_)
            | Self::Read { .. }
            | Self::TooLarge { .. }
            | Self::Iomem { .. }
            | Self::OwnMap(_)
            | Self::Format(_)
            | Self::Plan { .. }
            | Self::Memory { .. }
            | Self::Plot { .. } => 2,
            Self::Map(_) | Self::Subject { .. } | Self::Write(_) => 1,
        })
    }
}

//! What can go wrong, in one line each, and what it means to the shell.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use tablewright_machine::ProfileError;
use tablewright_machine::litmus::ParseError;

use crate::format::FormatError;
use crate::iomem::IomemError;
use crate::plan::PlanError;
use crate::published::TableError;
use tablewright_recorder::recording::RecordingError;

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
    #[error("{path}: larger than {limit}, which no {kind} is", path = .path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// The most that is read.
        limit: String,
        /// What it should be.
        kind: &'static str,
    },
    /// A file is not a memory map.
    #[error("{path}: {error}", path = .path.display())]
    Iomem {
        /// Which.
        path: PathBuf,
        /// Why.
        error: IomemError,
    },
    /// A file is not a table of published figures.
    #[error("{path}: {error}", path = .path.display())]
    Table {
        /// Which.
        path: PathBuf,
        /// Why.
        error: TableError,
    },
    /// A published row cannot be run.
    #[error("{0}")]
    Row(#[from] TableError),
    /// There is no such machine.
    #[error("{0}")]
    Profile(#[from] ProfileError),
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
    /// The machine did not do what was asked, or broke a rule.
    #[error("{machine}: {step}: {problem}")]
    Machine {
        /// The profile.
        machine: String,
        /// What it was doing.
        step: &'static str,
        /// What happened.
        problem: String,
    },
    /// There is no guest on KVM, or its figures are not to be believed.
    #[error("{message}")]
    Kvm {
        /// Another command line, another user or another computer would help.
        refused: bool,
        /// Why.
        message: String,
    },
    /// A file is not one of litmus tests.
    #[error("{0}")]
    Litmus(#[from] ParseError),
    /// The machine does not do what the architecture says.
    #[error("{failed} of {total} verdicts do not hold")]
    Verdicts {
        /// How many do not.
        failed: usize,
        /// Of how many.
        total: usize,
    },
    /// A file is not a recording, or not a whole one.
    #[error("{path}: {error}", path = .path.display())]
    Recording {
        /// Which.
        path: PathBuf,
        /// Where it is wrong.
        error: RecordingError,
    },
    /// A process cannot be recorded.
    #[error("{process}: {problem}")]
    Process {
        /// Which.
        process: String,
        /// Why.
        problem: String,
    },
    /// No process can be recorded on this computer.
    #[error("this computer has no way to record what a process writes: {0}")]
    Unrecordable(String),
    /// Signals could not be told apart.
    #[error("cannot handle signals: {0}")]
    Signal(io::Error),
    /// A result has nowhere to go.
    #[error("{option} {path}: {error}", path = .path.display())]
    Output {
        /// The option that asked for it.
        option: &'static str,
        /// Where it should go.
        path: PathBuf,
        /// Why it cannot.
        error: io::Error,
    },
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Write(io::Error),
}

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
impl From<tablewright_kvm::Error> for Error {
    fn from(error: tablewright_kvm::Error) -> Self {
        Self::Kvm {
            refused: error.is_refusal(),
            message: error.to_string(),
        }
    }
}

impl Error {
    /// 2 if another command line or another file would help, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_)
            | Self::Read { .. }
            | Self::TooLarge { .. }
            | Self::Iomem { .. }
            | Self::Table { .. }
            | Self::Row(_)
            | Self::Profile(_)
            | Self::OwnMap(_)
            | Self::Format(_)
            | Self::Plan { .. }
            | Self::Memory { .. }
            | Self::Litmus(_)
            | Self::Recording { .. }
            | Self::Process { .. }
            | Self::Output { .. }
            | Self::Kvm { refused: true, .. } => 2,
            Self::Map(_)
            | Self::Kvm { refused: false, .. }
            | Self::Unrecordable(_)
            | Self::Signal(_)
            | Self::Subject { .. }
            | Self::Machine { .. }
            | Self::Verdicts { .. }
            | Self::Write(_) => 1,
        })
    }
}

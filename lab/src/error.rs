//! Errors, in one line each, and their exit status.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use tablewright_machine::ProfileError;
use tablewright_machine::litmus::ParseError;

use crate::format::FormatError;

/// Why the program gives no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line, or what it names, makes no sense.
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
    /// There is no such machine.
    #[error("{0}")]
    Profile(#[from] ProfileError),
    /// No processor has such tables.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// A file is not one of litmus tests.
    #[error("{0}")]
    Litmus(#[from] ParseError),
    /// The tables would not fit into this computer.
    #[error(
        "the tables need {needed} and this computer has {available} to spare: give a smaller size"
    )]
    Memory { needed: String, available: String },
    /// The host refuses memory.
    #[error("cannot map memory for tables: {0}")]
    Map(io::Error),
    /// A crate did not do what was asked, or not as asked.
    #[error("{subject}: {operation}: {problem}")]
    Subject {
        /// The crate.
        subject: &'static str,
        operation: &'static str,
        problem: String,
    },
    /// The machine did not do what was asked, or broke a rule.
    #[error("{machine}: {step}: {problem}")]
    Machine {
        /// The profile.
        machine: String,
        step: &'static str,
        problem: String,
    },
    /// Something else, for which neither the command line nor a file is to blame.
    #[error("{0}")]
    Failed(String),
    /// A result has nowhere to go.
    #[error("{option} {path}: {error}", path = .path.display())]
    Output {
        /// The option that asked for it.
        option: &'static str,
        path: PathBuf,
        /// Why it cannot.
        error: io::Error,
    },
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Write(io::Error),
}

/// Says what is wrong with JSON. Its place, which stands behind the message, is that of the caller.
pub fn json_problem(error: &serde_json::Error) -> String {
    let said = error.to_string();
    said.rsplit_once(" at line ").map_or(&*said, |(problem, _)| problem).to_owned()
}

impl Error {
    /// Refuses an input: names it, a file for one, and its problem.
    pub fn input(what: impl Display, problem: impl Display) -> Self {
        Self::Usage(format!("{what}: {problem}"))
    }

    /// Refuses options that would have no effect. `why` stands behind the name of the first one
    /// that is given.
    pub fn refuse(options: &[(bool, &str)], why: &str) -> Result<(), Self> {
        match options.iter().find(|(given, _)| *given) {
            Some((_, option)) => Err(Self::Usage(format!("{option}{why}"))),
            None => Ok(()),
        }
    }

    /// Refuses a value of an option that is given twice: it would be run twice, and shown twice.
    pub fn once<T: PartialEq, N: Display>(
        option: &str,
        values: &[T],
        name: impl Fn(&T) -> N,
    ) -> Result<(), Self> {
        let mut numbered = values.iter().enumerate();
        match numbered.find(|(number, value)| values[..*number].contains(value)) {
            Some((_, value)) => Err(Self::Usage(format!("{option} {}: named twice", name(value)))),
            None => Ok(()),
        }
    }

    /// 2 if another command line or another file would help, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_)
            | Self::Read { .. }
            | Self::Profile(_)
            | Self::Format(_)
            | Self::Litmus(_)
            | Self::Memory { .. }
            | Self::Output { .. } => 2,
            Self::Map(_)
            | Self::Subject { .. }
            | Self::Machine { .. }
            | Self::Failed(_)
            | Self::Write(_) => 1,
        })
    }
}

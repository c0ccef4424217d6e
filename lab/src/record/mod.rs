//! `record`: which pages a program writes, interval by interval, for simulations of its migration.

#[cfg(target_os = "linux")]
mod begin;
mod show;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use tablewright_recorder::recording::{LONGEST, Recording};

use crate::error::Error;
use crate::file;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright record -- make -j4                        a command, until it ends
  sudo tablewright record --pid 4711 --duration 10      a process that runs already, for ten seconds
  tablewright record --interval 20 -o sort.twr -- sort big.txt
  tablewright record --show sort.twr                    what is in a recording

Ctrl-C ends a recording, not the process, and what was recorded is kept. Its children are not \
recorded. The exit status is 2 if there is nothing to record.")]
pub struct Arguments {
    /// The command to run
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
    /// A process that runs already
    #[arg(long, value_name = "PID", conflicts_with = "command",
          value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    /// Milliseconds between harvests
    #[arg(long, value_name = "MS", default_value = "100",
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    interval: u64,
    /// Stop after so many seconds [default: when the process ends]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    duration: Option<Duration>,
    /// Stop after so many intervals
    #[arg(long, value_name = "N", conflicts_with = "duration",
          value_parser = clap::value_parser!(u64).range(1..))]
    intervals: Option<u64>,
    /// How to find out what is written
    #[arg(long, value_enum, default_value = "auto")]
    method: Choice,
    /// File for the recording
    #[arg(short, long, value_name = "FILE", default_value = "recording.twr")]
    output: PathBuf,
    /// Print what is in a recording, and record nothing
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["command", "pid", "interval", "duration", "intervals",
                                "method", "output"])]
    show: Option<PathBuf>,
    /// Print JSON; what a command prints goes to standard error
    #[arg(long)]
    json: bool,
}

/// The methods, as one types them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// The first of the others that works here
    Auto,
    /// Write protection without a handler, and scans of the page map: Linux 6.7 and later
    Scan,
    /// Soft-dirty bits, which some kernels have; the process is stopped for every harvest
    SoftDirty,
}

/// Seconds, with a fraction if need be.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(duration)) if !duration.is_zero() => Ok(duration),
        _ => Err("a duration is a number of seconds, more than zero".to_owned()),
    }
}

/// Records, or shows a recording.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if let Some(path) = &arguments.show {
        return show::print(path, &open(path)?, true, arguments.json);
    }
    if arguments.command.is_empty() && arguments.pid.is_none() {
        return Err(Error::Usage(
            "nothing to record: give a command after '--', or --pid PID, or --show FILE".to_owned(),
        ));
    }
    record(arguments)
}

/// Bytes that tell a recording from another file.
const START: u64 = 64;

/// Reads a recording.
pub fn open(path: &Path) -> Result<Recording, Error> {
    // What is no recording is not read to its end.
    let start = file::start_of(path, START)?;
    if !Recording::may_start_with(&start) {
        let why = Recording::parse(start).err();
        return Err(Error::input(path.display(), why.map_or(String::new(), |why| why.to_string())));
    }
    let bytes = file::read_up_to(path, LONGEST, "recording")?;
    Recording::parse(bytes).map_err(|error| Error::input(path.display(), error))
}

#[cfg(target_os = "linux")]
use begin::record;

#[cfg(not(target_os = "linux"))]
fn record(_: &Arguments) -> Result<(), Error> {
    Err(Error::Usage("recording is there for Linux only; --show works everywhere".to_owned()))
}

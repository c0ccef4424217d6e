//! Random sequences of calls of every safe function of the engine, by the million: none may go
//! wrong.
//!
//! ```text
//! cargo run --release --features tablewright-workloads/every-format --example sequences \
//!     -- [COUNT] [--seed S] [--threads T] [--bug NAME]
//! cargo run --release --features tablewright-workloads/every-format --example sequences \
//!     -- --seed S [--only N,N,..] [--trace FILE] [--bug NAME]
//! ```
//!
//! Each seed is a sequence of 5 to 40 operations on two CPUs (see `workloads/src/sequences/`). With
//! a count, `--seed` is where it starts. What is printed is the same for any number of threads. If
//! sequences go wrong, the one with the smallest seed is made short: operations are taken out as
//! long as it goes wrong in the same way. Without a count, the one sequence of the seed prints its
//! operations; `--only` runs those of them that it names, and `--trace` writes every step to a
//! file, in the format of `tablewright_machine::trace`. `--bug` plants one into the embedder's
//! part, to see that it is found.
//!
//! Exit status: 0 if all were clean, 1 if one went wrong, 2 if the arguments are no good.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use clap::{Parser, value_parser};
use indicatif::{ProgressBar, ProgressStyle};
use tablewright_machine::trace::Sink;
use tablewright_workloads::sequences::{Bug, Failure, Sequence, silence};

/// Runs random sequences of calls of every safe function of the engine, and makes the first that
/// goes wrong short.
#[derive(Parser)]
struct Arguments {
    /// How many sequences [default: 20000, or the one that --seed names]
    #[arg(conflicts_with_all = ["only", "trace"])]
    count: Option<u64>,
    /// The first of them, from 1 on; without COUNT no other is run
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Of one sequence only these operations
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', requires = "seed")]
    only: Option<Vec<usize>>,
    /// Write every step of one sequence to this file
    #[arg(long, value_name = "FILE", requires = "seed")]
    trace: Option<PathBuf>,
    /// Threads of the host [default: one for each of its processors]
    #[arg(long, value_name = "T", value_parser = value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// A promise of the embedder that is not kept, to see that it is found
    #[arg(long, value_name = "NAME", value_parser = bug)]
    bug: Option<Bug>,
}

fn bug(name: &str) -> Result<Bug, String> {
    let known = Bug::OF_EMBEDDERS.iter().find(|(known, _)| *known == name);
    known.map(|&(_, bug)| bug).ok_or_else(|| {
        let names = Bug::OF_EMBEDDERS.map(|(name, _)| name).join(", ");
        format!("there is {names}")
    })
}

/// The arguments, or how to end without them: what is wrong is said in one line.
fn arguments() -> Result<Arguments, ExitCode> {
    Arguments::try_parse().map_err(|error| {
        if !error.use_stderr() {
            print!("{error}");
            return ExitCode::SUCCESS;
        }
        let said = error.to_string();
        let lines: Vec<_> = said.lines().map(str::trim).collect();
        let first = lines.split(|line| line.is_empty()).next();
        eprintln!("{}", first.unwrap_or_default().join(" "));
        ExitCode::from(2)
    })
}

/// Seeds that a thread takes at a time.
const CHUNK: u64 = 64;

/// The first sequence that goes wrong, and how many were run before that was known.
fn all(arguments: &Arguments) -> (Option<(u64, Failure)>, u64) {
    let (from, count) = (arguments.seed.unwrap_or(1), arguments.count.unwrap_or(20_000));
    let threads = arguments
        .threads
        .map_or_else(|| thread::available_parallelism().map_or(1, usize::from), usize::from);
    let end = from.saturating_add(count);
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new(count),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} sequences {eta}") {
        bar.set_style(style);
    }
    let next = AtomicU64::new(from);
    let run = AtomicU64::new(0);
    let worst: Mutex<Option<(u64, Failure)>> = Mutex::new(None);
    // Seeds from here on are not looked at any more.
    let limit = AtomicU64::new(end);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let first = next.fetch_add(CHUNK, Ordering::Relaxed);
                    let last = end.min(first.saturating_add(CHUNK));
                    for seed in first..last {
                        if seed >= limit.load(Ordering::Relaxed) {
                            return;
                        }
                        run.fetch_add(1, Ordering::Relaxed);
                        if let Err(failure) = Sequence::new(seed).run(arguments.bug) {
                            limit.fetch_min(seed, Ordering::Relaxed);
                            if let Ok(mut worst) = worst.lock()
                                && worst.as_ref().is_none_or(|(other, _)| seed < *other)
                            {
                                *worst = Some((seed, failure));
                            }
                        }
                    }
                    if first >= end {
                        return;
                    }
                    bar.inc(last - first);
                }
            });
        }
    });
    bar.finish_and_clear();
    (worst.into_inner().unwrap_or_default(), run.into_inner())
}

/// Runs a sequence, with every step written to a file.
fn traced(sequence: &Sequence, bug: Option<Bug>, path: &Path) -> io::Result<Result<(), Failure>> {
    let file = Rc::new(RefCell::new((BufWriter::new(File::create(path)?), Ok(()))));
    let sink: Sink = {
        let file = Rc::clone(&file);
        Box::new(move |line| {
            let (file, result) = &mut *file.borrow_mut();
            if result.is_ok() {
                *result = writeln!(file, "{line}");
            }
        })
    };
    let run = sequence.run_traced(bug, Some(sink));
    let (file, result) = &mut *file.borrow_mut();
    std::mem::replace(result, Ok(()))?;
    file.flush()?;
    Ok(run)
}

fn print(sequence: &Sequence) {
    println!("{}", sequence.describe());
    for operation in &sequence.operations {
        println!("  {operation}");
    }
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    silence();
    if let (Some(seed), None) = (arguments.seed, arguments.count) {
        let mut sequence = Sequence::new(seed);
        if let Some(only) = &arguments.only {
            sequence.only(only);
        }
        print(&sequence);
        let run = match &arguments.trace {
            Some(path) => match traced(&sequence, arguments.bug, path) {
                Ok(run) => run,
                Err(error) => {
                    eprintln!("error: {}: {error}", path.display());
                    return ExitCode::from(2);
                }
            },
            None => sequence.run(arguments.bug),
        };
        return match run {
            Ok(()) => {
                println!("clean (seed {seed})");
                ExitCode::SUCCESS
            }
            Err(failure) => {
                println!("sequences: {} (seed {seed})", failure.what);
                ExitCode::FAILURE
            }
        };
    }
    let start = Instant::now();
    let (worst, run) = all(&arguments);
    let took = start.elapsed().as_secs_f64();
    let Some((seed, failure)) = worst else {
        println!("{run} sequences, all clean, in {took:.1} s");
        return ExitCode::SUCCESS;
    };
    println!("sequences: {} (seed {seed})", failure.what);
    let (shortest, failure) = Sequence::new(seed).shorten(arguments.bug);
    println!("made short, to {} operations:", shortest.operations.len());
    print(&shortest);
    println!("sequences: {} (seed {seed})", failure.what);
    println!("again: {}", shortest.command());
    ExitCode::FAILURE
}

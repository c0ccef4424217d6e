//! Random sequences of calls of every safe function of the engine, by the million: none may go wrong.
//!
//! ```text
//! cargo run --release -p tablewright-machine --example sequences -- [COUNT] [--from N] [--threads T] [--bug NAME]
//! cargo run --release -p tablewright-machine --example sequences -- --seed N [--only N,N,..] [--trace FILE] [--bug NAME]
//! ```
//!
//! Each seed is a sequence of 5 to 40 operations on two CPUs (see `sequences/`). What is printed is the same for any number of
//! threads. If sequences go wrong, the one with the smallest seed is made short: operations are taken out as long as it goes
//! wrong in the same way. A single seed prints its operations; `--only`
//! runs those of them that it names, and `--trace` writes every step to a file, in the format of
//! `tablewright_machine::trace`. `--bug` plants one into the embedder's part, to see that it is
//! found.
//!
//! Exit status: 0 if all were clean, 1 if one went wrong, 2 if the arguments are no good.

#[path = "sequences/mod.rs"]
mod sequences;

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

use indicatif::{ProgressBar, ProgressStyle};
use sequences::{Bug, Failure, Sequence, silence};
use tablewright_machine::trace::Sink;

/// What is asked for.
struct Arguments {
    count: u64,
    from: u64,
    threads: usize,
    seed: Option<u64>,
    only: Option<Vec<usize>>,
    trace: Option<PathBuf>,
    bug: Option<Bug>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut arguments = Self {
            count: 20_000,
            from: 1,
            threads: thread::available_parallelism().map_or(1, usize::from),
            seed: None,
            only: None,
            trace: None,
            bug: None,
        };
        let mut counted = false;
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} takes a value"));
            let number = |text: String| {
                let parsed = text.parse::<u64>();
                parsed.map_err(|_| format!("{text} is not a number"))
            };
            match word.as_str() {
                "--from" => arguments.from = number(value()?)?,
                "--seed" => arguments.seed = Some(number(value()?)?),
                "--only" => {
                    let numbers = value()?;
                    let number = |text: &str| number(text.to_owned()).map(|it| it as usize);
                    let numbers = numbers.split(',').map(number);
                    arguments.only = Some(numbers.collect::<Result<_, _>>()?);
                }
                "--trace" => arguments.trace = Some(value()?.into()),
                "--threads" => {
                    arguments.threads = match number(value()?)? {
                        threads @ 1..=1024 => threads as usize,
                        other => return Err(format!("{other} threads: there are 1 to 1024")),
                    }
                }
                "--bug" => {
                    let name = value()?;
                    let known = Bug::ALL.iter().find(|(known, _)| *known == name);
                    let names = Bug::ALL.map(|(name, _)| name).join(", ");
                    let (_, bug) = known.ok_or(format!("no bug {name}: there is {names}"))?;
                    arguments.bug = Some(*bug);
                }
                _ if counted || word.starts_with('-') => {
                    return Err(format!("{word} is not understood"));
                }
                _ => {
                    arguments.count = number(word)?;
                    counted = true;
                }
            }
        }
        let single = arguments.only.is_some() || arguments.trace.is_some();
        if single && arguments.seed.is_none() {
            return Err("--only and --trace are for one --seed".to_owned());
        }
        if counted && arguments.seed.is_some() {
            return Err("one seed is run, or so many".to_owned());
        }
        Ok(arguments)
    }
}

/// Seeds that a thread takes at a time.
const CHUNK: u64 = 64;

/// The first sequence that goes wrong, and how many were run before that was known.
fn all(arguments: &Arguments) -> (Option<(u64, Failure)>, u64) {
    let end = arguments.from.saturating_add(arguments.count);
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new(arguments.count),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} sequences {eta}") {
        bar.set_style(style);
    }
    let next = AtomicU64::new(arguments.from);
    let run = AtomicU64::new(0);
    let worst: Mutex<Option<(u64, Failure)>> = Mutex::new(None);
    // Seeds from here on are not looked at any more.
    let limit = AtomicU64::new(end);
    thread::scope(|scope| {
        for _ in 0..arguments.threads {
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
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(2);
        }
    };
    silence();
    if let Some(seed) = arguments.seed {
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

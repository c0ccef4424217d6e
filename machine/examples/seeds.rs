//! Random programs on the machine, by the thousand: none may break a rule.
//!
//! ```text
//! cargo run --release --features tablewright-workloads/every-format --example seeds \
//!     -- [SEEDS] [--from N] [--workload NAME] [--threads T] [--twice]
//! cargo run --release --features tablewright-workloads/every-format --example seeds \
//!     -- --seed N --workload NAME [--trace FILE]
//! ```
//!
//! Each seed is run on every workload. What is printed is the same for any number of threads: a
//! line for each rule that was broken, in the order of the seeds, and in the end what was done,
//! with a digest of the memory of all runs. `--twice` runs everything twice and compares. A single
//! seed can be run again, and every step of it written to a file in the format of
//! `tablewright_machine::trace`.
//!
//! Exit status: 0 if no rule was broken, 1 if one was, 2 if the arguments or the file are no good.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use tablewright_machine::Counts;
use tablewright_machine::trace::Sink;
use tablewright_workloads::random::{Run, Workload, run};

/// Runs random programs on the machine and reports each rule that one breaks.
#[derive(Parser)]
struct Arguments {
    /// How many seeds
    #[arg(default_value_t = 1000, conflicts_with = "seed")]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "seed")]
    from: u64,
    /// Only this workload: edits, windows, identifiers, guests, guest, log, shootdown or identities
    #[arg(long, value_name = "NAME", value_parser = workload)]
    workload: Option<Workload>,
    /// Threads of the host [default: one for each of its processors]
    #[arg(long, value_name = "T")]
    threads: Option<usize>,
    /// Run everything twice and compare
    #[arg(long)]
    twice: bool,
    /// Run this seed and no other
    #[arg(long, value_name = "N", requires = "workload")]
    seed: Option<u64>,
    /// Write every step of it to this file
    #[arg(long, value_name = "FILE", requires = "seed")]
    trace: Option<PathBuf>,
}

fn workload(name: &str) -> Result<Workload, String> {
    let found = Workload::ALL.into_iter().find(|workload| workload.name() == name);
    found.ok_or_else(|| {
        let names = Workload::ALL.map(Workload::name);
        format!("there is {}", names.join(", "))
    })
}

/// The sum of a number of runs.
#[derive(Default)]
struct Sum {
    runs: u64,
    counts: Counts,
    digest: u64,
    /// The seed, and what was wrong.
    wrong: Vec<(u64, String)>,
}

impl Sum {
    fn add(&mut self, workload: Workload, seed: u64, run: &Run) {
        self.runs += 1;
        self.counts.invalidations += run.counts.invalidations;
        self.counts.walks += run.counts.walks;
        self.counts.accesses += run.counts.accesses;
        self.counts.faults += run.counts.faults;
        self.counts.entries += run.counts.entries;
        // The same in whatever order runs are added.
        let [between, end] = run.digests;
        self.digest = self.digest.wrapping_add(between ^ end.rotate_left(32));
        for violation in &run.violations {
            self.wrong.push((seed, format!("{workload}: {violation}")));
        }
        if let Err(error) = &run.outcome {
            self.wrong.push((seed, format!("{workload}: {error} (seed {seed})")));
        }
    }

    fn merge(&mut self, other: Self) {
        self.runs += other.runs;
        self.counts.invalidations += other.counts.invalidations;
        self.counts.walks += other.counts.walks;
        self.counts.accesses += other.counts.accesses;
        self.counts.faults += other.counts.faults;
        self.counts.entries += other.counts.entries;
        self.digest = self.digest.wrapping_add(other.digest);
        self.wrong.extend(other.wrong);
    }
}

/// Runs the seeds, each on all of the workloads.
fn sum(seeds: Range<u64>, of: &[Workload], twice: bool) -> Sum {
    let mut sum = Sum::default();
    for seed in seeds {
        for &workload in of {
            let first = run(workload, seed, None, None);
            sum.add(workload, seed, &first);
            if twice && run(workload, seed, None, None) != first {
                let what = format!("{workload}: another outcome the second time (seed {seed})");
                sum.wrong.push((seed, what));
            }
        }
    }
    sum
}

/// Seeds that a thread takes at a time.
const CHUNK: u64 = 32;

fn all(arguments: &Arguments, of: &[Workload]) -> Sum {
    let threads = arguments.threads.map_or_else(thread::available_parallelism, |threads| {
        threads.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
    });
    let threads = threads.map_or(1, usize::from);
    let bar = ProgressBar::new(arguments.seeds);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} seeds {eta}") {
        bar.set_style(style);
    }
    let end = arguments.from.saturating_add(arguments.seeds);
    let next = AtomicU64::new(arguments.from);
    let total = Mutex::new(Sum::default());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let first = next.fetch_add(CHUNK, Ordering::Relaxed);
                    if first >= end {
                        return;
                    }
                    let seeds = first..end.min(first + CHUNK);
                    let part = sum(seeds.clone(), of, arguments.twice);
                    bar.inc(seeds.end - seeds.start);
                    match total.lock() {
                        Ok(mut total) => total.merge(part),
                        // Another thread has panicked, and `scope` will say so.
                        Err(_) => return,
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut total = total.into_inner().unwrap_or_default();
    // Stable: what one run has to say stays in its order.
    total.wrong.sort_by_key(|&(seed, _)| seed);
    total
}

/// Runs one seed, with every step written to a file.
fn traced(workload: Workload, seed: u64, path: &Path) -> io::Result<Run> {
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
    let run = run(workload, seed, None, Some(sink));
    let (file, result) = &mut *file.borrow_mut();
    std::mem::replace(result, Ok(()))?;
    file.flush()?;
    Ok(run)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let of = match arguments.workload {
        Some(workload) => vec![workload],
        None => Workload::ALL.to_vec(),
    };
    let total = match (arguments.seed, &arguments.trace) {
        (Some(seed), Some(path)) => match traced(of[0], seed, path) {
            Ok(run) => {
                let mut sum = Sum::default();
                sum.add(of[0], seed, &run);
                sum
            }
            Err(error) => {
                eprintln!("error: {}: {error}", path.display());
                return ExitCode::from(2);
            }
        },
        (Some(seed), None) => sum(seed..seed.saturating_add(1), &of, arguments.twice),
        (None, _) => all(&arguments, &of),
    };
    for (_, wrong) in &total.wrong {
        println!("{wrong}");
    }
    let Sum { runs, counts, digest, wrong } = total;
    println!(
        "{runs} runs{}: {} accesses, {} faults, {} walks, {} entries written, {} invalidations; {} \
         broken rules; digest {digest:016x}",
        if arguments.twice { ", each twice and the same" } else { "" },
        counts.accesses,
        counts.faults,
        counts.walks,
        counts.entries,
        counts.invalidations,
        wrong.len(),
    );
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! The published program's own cycle on this computer: a file is mapped by parts, touched and
//! unmapped, by threads.
//!
//! What the kernel does in it is the reference for the figures of the machine: on a computer of few
//! CPUs that is little.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memmap2::MmapOptions;
use serde::Serialize;
use serde_json::json;

use super::job::described;
use super::unmap;
use crate::error::Error;
use crate::file;
use crate::output::progress::Progress;
use crate::output::report::{self, Report};

const PAGE: u64 = 4096;
/// Other programs of the computer need threads, too.
const MOST_THREADS: u16 = 4096;
/// A thread that maps and touches needs little.
const STACK: usize = 128 << 10;
/// Interval of the progress bar.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Clone, Debug)]
pub struct Program {
    pub threads: u16,
    pub rounds: u32,
    pub chunks: u32,
    pub pages: u64,
    pub file: Option<PathBuf>,
    pub json: bool,
}

/// Times as `time` prints them, of one map, touch and unmap, and of a page that is unmapped.
#[derive(Serialize)]
struct Took {
    real_s: f64,
    user_s: f64,
    sys_s: f64,
    cycle_ns: f64,
    unmap_alone_ns: f64,
    /// None: no other thread ran.
    unmap_told_ns: Option<f64>,
}

/// Runs it, and prints what it took.
pub fn run(program: &Program) -> Result<(), Error> {
    // The last part begins as many pages later as there were parts before.
    let bytes = (program.pages + u64::from(program.chunks)) * PAGE;
    if program.threads > MOST_THREADS {
        return Err(Error::Usage(format!(
            "-t {}: at most {MOST_THREADS} threads on this computer",
            program.threads
        )));
    }
    let (path, file) = match &program.file {
        Some(path) => {
            (path.clone(), file::open_regular(path).map_err(|error| refused(path, error))?)
        }
        None => make(bytes)?,
    };
    let refused = |error| refused(&path, error);
    let size = file.metadata().map_err(refused)?.len();
    if size < bytes {
        return Err(Error::Usage(format!(
            "--file {}: it has {size} bytes, and {bytes} bytes are mapped",
            path.display()
        )));
    }
    let before = cpu_times();
    let start = Instant::now();
    let ends = run_threads(program, &file, refused)?;
    let real = ends.into_iter().max().map_or(start.elapsed(), |end| end - start);
    let after = cpu_times();
    let page = unmap::measured()?;
    let cycles = u64::from(program.threads) * u64::from(program.rounds) * u64::from(program.chunks);
    let report = Report {
        experiment: "tlb-flush",
        parameters: json!({
            "on": "native",
            "tasks": program.threads,
            "cycles": cycles,
            "pages": program.pages,
        }),
        rows: vec![Took {
            real_s: real.as_secs_f64(),
            user_s: (after.0 - before.0).as_secs_f64(),
            sys_s: (after.1 - before.1).as_secs_f64(),
            cycle_ns: real.as_nanos() as f64 / cycles as f64,
            unmap_alone_ns: page.alone,
            unmap_told_ns: page.remote,
        }],
        warnings: Vec::new(),
    };
    report.print(program.json, |report| {
        let head = described(cycles, program.pages, program.threads) + " on this computer";
        let head = report::title(&head);
        let shown = report.rows.iter().map(|took| {
            let shootdown = match took.unmap_told_ns {
                Some(told) => format!(
                    "{} while another thread runs: a shootdown costs {}",
                    report::time(told),
                    report::time((told - took.unmap_alone_ns).max(0.0))
                ),
                None => "no other thread ran beside it, so that no shootdown was seen".to_owned(),
            };
            format!(
                "real {:.3} s, user {:.3} s, sys {:.3} s; a cycle {}\nmunmap of a page {} alone, \
                 {shootdown}\n",
                took.real_s,
                took.user_s,
                took.sys_s,
                report::time(took.cycle_ns),
                report::time(took.unmap_alone_ns),
            )
        });
        format!("{head}\n\n{}", shown.collect::<String>())
    })
}

fn refused(path: &Path, error: std::io::Error) -> Error {
    Error::Usage(format!("--file {}: {error}", path.display()))
}

/// A file of zeros that takes no room, and has no name any more: it is gone with the process,
/// however that ends.
fn make(bytes: u64) -> Result<(PathBuf, File), Error> {
    let name = format!("tablewright-tlb-flush-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let create = || {
        let file = File::create_new(&path)?;
        std::fs::remove_file(&path)?;
        file.set_len(bytes)?;
        Ok(file)
    };
    let file = create().map_err(|error| refused(&path, error))?;
    Ok((path, file))
}

/// Runs all threads, and gives when each was done. What is measured is theirs: this one sleeps, and
/// moves the bar.
fn run_threads(
    program: &Program,
    file: &File,
    refused: impl Fn(std::io::Error) -> Error,
) -> Result<Vec<Instant>, Error> {
    let shared =
        Shared { done: AtomicU64::new(0), stop: AtomicBool::new(false), main: thread::current() };
    let rounds = u64::from(program.threads) * u64::from(program.rounds);
    let mut progress = Progress::new(rounds);
    let results = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut none = None;
        for number in 1..=program.threads {
            let builder = thread::Builder::new().stack_size(STACK);
            match builder.spawn_scoped(scope, || cycles(program, file, &shared)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    // Those that run already end after the round that they are in.
                    shared.stop.store(true, Ordering::Relaxed);
                    none = Some(Error::Usage(format!(
                        "-t {}: this computer has no room for thread {number}: {error}",
                        program.threads
                    )));
                    break;
                }
            }
        }
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            thread::park_timeout(LOOK);
            progress.at(shared.done.load(Ordering::Relaxed), "rounds of all threads");
        }
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let results: Vec<_> = threads.into_iter().map(join).collect();
        none.map_or(Ok(results), Err)
    })?;
    results.into_iter().map(|result| result.map_err(&refused)).collect()
}

/// State that the threads share with the one that waits for them.
struct Shared {
    /// Rounds.
    done: AtomicU64,
    stop: AtomicBool,
    main: thread::Thread,
}

/// Runs one thread, and returns when it was done.
fn cycles(program: &Program, file: &File, shared: &Shared) -> Result<Instant, std::io::Error> {
    let length = usize::try_from(program.pages * PAGE).map_err(std::io::Error::other)?;
    for _ in 0..program.rounds {
        for part in 0..program.chunks {
            let mut options = MmapOptions::new();
            options.offset(u64::from(part) * PAGE).len(length);
            // SAFETY: `map`: 1. the file is the user's, or ours; what others write to it meanwhile
            // changes a byte that is read and thrown away, through `black_box`, and one that is cut
            // short ends the program.
            let map = unsafe { options.map(file) }?;
            std::hint::black_box(map[0]);
        }
        shared.done.fetch_add(1, Ordering::Relaxed);
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
    }
    let end = Instant::now();
    shared.main.unpark();
    Ok(end)
}

/// Of this process: in user mode, and in the kernel.
fn cpu_times() -> (Duration, Duration) {
    // SAFETY: `rusage` is plain numbers, for which zeros are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `getrusage`: 1. the structure is there to be written to.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let duration = |time: libc::timeval| {
        let micros = u32::try_from(time.tv_usec).unwrap_or(0);
        Duration::new(time.tv_sec.unsigned_abs(), 0) + Duration::from_micros(micros.into())
    };
    (duration(usage.ru_utime), duration(usage.ru_stime))
}

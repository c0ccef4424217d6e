//! The published program's own cycle on this computer: a file is mapped by parts, touched and unmapped, by threads.
//!
//! What the kernel does in it is the reference for the figures of the machine: on a computer of few CPUs that is little.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use memmap2::MmapOptions;
use serde::Serialize;

use crate::error::Error;
use crate::report::{self, Report};

const PAGE: u64 = 4096;

/// What is run.
#[derive(Clone, Debug)]
pub struct Program {
    pub threads: u16,
    pub rounds: u32,
    pub chunks: u32,
    pub pages: u64,
    pub file: Option<PathBuf>,
    pub json: bool,
}

#[derive(Serialize)]
struct Parameters {
    on: &'static str,
    tasks: u16,
    cycles: u64,
    pages: u64,
}

/// As `time` prints them, and what one map, touch and unmap takes.
#[derive(Serialize)]
struct Took {
    real_s: f64,
    user_s: f64,
    sys_s: f64,
    cycle_ns: f64,
}

/// A file that is there for the time of the run.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _none = std::fs::remove_file(&self.0);
    }
}

/// Runs it, and prints what it took.
pub fn run(program: &Program) -> Result<(), Error> {
    // The last part begins as many pages later as there were parts before.
    let bytes = (program.pages + u64::from(program.chunks)) * PAGE;
    let temporary = match &program.file {
        Some(_) => None,
        None => Some(make(bytes)?),
    };
    let path = match (&program.file, &temporary) {
        (Some(path), _) => path,
        (_, Some(temporary)) => &temporary.0,
        (None, None) => return Ok(()),
    };
    let refused = |error| refused(path, error);
    let file = File::open(path).map_err(refused)?;
    let size = file.metadata().map_err(refused)?.len();
    if size < bytes {
        return Err(Error::Usage(format!(
            "--file {}: it has {size} bytes, and {bytes} bytes are mapped",
            path.display()
        )));
    }
    let before = cpu_times();
    let start = Instant::now();
    let results: Vec<Result<(), std::io::Error>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..program.threads)
            .map(|_| scope.spawn(|| cycles(program, &file)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    let real = start.elapsed();
    let after = cpu_times();
    for result in results {
        result.map_err(refused)?;
    }
    let cycles = u64::from(program.threads) * u64::from(program.rounds) * u64::from(program.chunks);
    let report = Report {
        experiment: "tlb-flush",
        parameters: Parameters {
            on: "native",
            tasks: program.threads,
            cycles,
            pages: program.pages,
        },
        rows: vec![Took {
            real_s: real.as_secs_f64(),
            user_s: (after.0 - before.0).as_secs_f64(),
            sys_s: (after.1 - before.1).as_secs_f64(),
            cycle_ns: real.as_nanos() as f64 / cycles as f64,
        }],
        warnings: Vec::new(),
    };
    report.print(program.json, |report| {
        let [took] = &report.rows[..] else {
            return String::new();
        };
        format!(
            "{} of map, touch and unmap of {} by {} on this computer\n\n\
             real {:.3} s, user {:.3} s, sys {:.3} s; a cycle {}\n",
            report::counted(cycles, "cycle", "cycles"),
            report::counted(program.pages, "page", "pages"),
            report::counted(program.threads.into(), "thread", "threads"),
            took.real_s,
            took.user_s,
            took.sys_s,
            report::time(took.cycle_ns),
        )
    })
}

fn refused(path: &Path, error: std::io::Error) -> Error {
    Error::Usage(format!("--file {}: {error}", path.display()))
}

/// A file of zeros that takes no room.
fn make(bytes: u64) -> Result<Temporary, Error> {
    let name = format!("tablewright-tlb-flush-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let create = || File::create_new(&path)?.set_len(bytes);
    create().map_err(|error| refused(&path, error))?;
    Ok(Temporary(path))
}

/// What one thread does.
fn cycles(program: &Program, file: &File) -> Result<(), std::io::Error> {
    let length = usize::try_from(program.pages * PAGE).map_err(std::io::Error::other)?;
    for _ in 0..program.rounds {
        for part in 0..program.chunks {
            let mut options = MmapOptions::new();
            options.offset(u64::from(part) * PAGE).len(length);
            // SAFETY: `map`: 1. the file is the user's, or ours; what others write to it meanwhile changes a byte that is
            // read and thrown away, through `black_box`, and one that is cut short ends the program.
            let map = unsafe { options.map(file) }?;
            std::hint::black_box(map[0]);
        }
    }
    Ok(())
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

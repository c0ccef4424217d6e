//! A hunt for stale translations: threads put other pages behind addresses, under the eyes of
//! threads that read there.
//!
//! The pages of a file hold numbers. What is put behind an address holds a larger number than what
//! was there; *after* the system call that puts it there has returned, the number is published. So
//! a thread that reads what was published, and then reads at the address, finds that number or a
//! larger one. If it finds a smaller one, its processor still uses a translation that the kernel,
//! and with it the hypervisor, has said to be forgotten. A number that was never put anywhere is
//! what a hypervisor leaves in a frame that it has taken away.
//!
//! A page of the file comes round again only after so many others that a smaller number is still
//! there when it is looked at.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::map::{Map, PAGE, file};

/// Pages of a window: more than a kernel flushes one by one (33 on x86).
const WINDOW: usize = 64;
/// The number of turns for each page of its file.
const TURNS: usize = 64;
/// How many pages are replaced at a time, in turn.
const STEPS: [usize; 4] = [1, 8, 2, WINDOW];
/// The number of stale pages that are said one by one.
const SAID: u64 = 5;

/// Addresses that one thread puts pages behind.
struct Window {
    map: Map,
    data: File,
    /// All of the file.
    all: Map,
    /// The least value that may be found at each address.
    published: Vec<AtomicU64>,
    /// No more than this may be found.
    begun: AtomicU64,
}

impl Window {
    fn new() -> Result<Self, Error> {
        let data = file(c"hunt", WINDOW * TURNS * PAGE)?;
        Ok(Self {
            map: Map::new(&data, 0, WINDOW * PAGE)?,
            all: Map::new(&data, 0, WINDOW * TURNS * PAGE)?,
            data,
            published: (0..WINDOW).map(|_| AtomicU64::new(0)).collect(),
            begun: AtomicU64::new(0),
        })
    }

    /// Whether what is found at an address is as new as it has to be.
    fn check(&self, page: usize, tally: &Tally) {
        let expected = self.published[page].load(Ordering::Acquire);
        let found = self.map.word(page).load(Ordering::Acquire);
        let most = self.begun.load(Ordering::Relaxed);
        if !(expected..=most).contains(&found) && tally.stale.fetch_add(1, Ordering::Relaxed) < SAID
        {
            println!("hunt: STALE page {page}: {found:#x} where {expected:#x} was put");
        }
    }

    /// Puts other pages behind some addresses, and checks what it finds there itself.
    fn turn(&self, round: u64, tally: &Tally) -> Result<(), Error> {
        let pages = STEPS[round as usize % STEPS.len()];
        let at = (round as usize * 7) % (WINDOW - pages + 1);
        let from = round as usize % TURNS * WINDOW + at;
        self.begun.store(round, Ordering::Relaxed);
        for page in from..from + pages {
            self.all.word(page).store(round, Ordering::Release);
        }
        self.map
            .replace(at * PAGE, &self.data, from * PAGE, pages * PAGE)?;
        for page in at..at + pages {
            self.published[page].store(round, Ordering::Release);
            self.check(page, tally);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Tally {
    replaced: AtomicU64,
    read: AtomicU64,
    stale: AtomicU64,
    is_over: AtomicBool,
}

/// Hunts for so many seconds: half of the time on all processors, half on all but the first, so
/// that a kernel has flushes to name some of them. Each half is a process of its own, of which no
/// other processor knows. Whether nothing stale was found.
pub fn run(seconds: u64) -> Result<bool, Error> {
    let cpus = thread::available_parallelism()?.get();
    let program = std::env::current_exe()?;
    let half = |seconds: u64| -> Result<bool, Error> {
        let mut half = Command::new(&program);
        let status = half.args(["hunt-once", &seconds.to_string()]).status()?;
        match status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(format!("the hunt has failed: {status}").into()),
        }
    };
    if cpus < 3 {
        return half(seconds);
    }
    let first = half(seconds / 2)?;
    leave_first(cpus)?;
    Ok(half(seconds - seconds / 2)? && first)
}

/// Hunts once.
pub fn run_once(seconds: u64) -> Result<bool, Error> {
    let cpus = thread::available_parallelism()?.get();
    let tally = Tally::default();
    hunt(cpus, Duration::from_secs(seconds), &tally)?;
    let [replaced, read, stale] =
        [&tally.replaced, &tally.read, &tally.stale].map(|number| number.load(Ordering::Relaxed));
    println!("hunt: replaced={replaced} read={read} stale={stale}");
    Ok(stale == 0)
}

/// This thread, and those that it starts, run on the others of so many processors.
fn leave_first(cpus: usize) -> std::io::Result<()> {
    // SAFETY: zeros are an empty set, and the set is as large as is said.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for cpu in 1..cpus.min(libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(cpu, &mut set);
        }
        libc::sched_setaffinity(0, size_of_val(&set), &set)
    };
    match done {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn hunt(cpus: usize, time: Duration, tally: &Tally) -> Result<(), Error> {
    // Half of them write, half of them read, and one more, so that they are moved about.
    let (writers, readers) = ((cpus / 2).max(1), cpus.div_ceil(2) + 1);
    let windows: Vec<Window> = (0..writers)
        .map(|_| Window::new())
        .collect::<Result<_, _>>()?;
    let windows = &windows;
    let failed = thread::scope(|scope| {
        let writing: Vec<_> = windows
            .iter()
            .map(|window| {
                scope.spawn(move || -> Result<(), String> {
                    let mut round = 0;
                    while !tally.is_over.load(Ordering::Relaxed) {
                        round += 1;
                        window.turn(round, tally).map_err(|why| why.to_string())?;
                        tally.replaced.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        for _ in 0..readers {
            scope.spawn(move || {
                while !tally.is_over.load(Ordering::Relaxed) {
                    for window in windows {
                        (0..WINDOW).for_each(|page| window.check(page, tally));
                    }
                    let all = (windows.len() * WINDOW) as u64;
                    tally.read.fetch_add(all, Ordering::Relaxed);
                }
            });
        }
        let from = Instant::now();
        while from.elapsed() < time && !writing.iter().any(|writer| writer.is_finished()) {
            thread::sleep(Duration::from_millis(100));
        }
        tally.is_over.store(true, Ordering::Relaxed);
        let ended = writing.into_iter().map(|writer| writer.join());
        ended
            .filter_map(|ended| ended.map_or(Some("a thread has failed".into()), Result::err))
            .next()
    });
    failed.map_or(Ok(()), |why| Err(why.into()))
}

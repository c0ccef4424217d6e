//! A recording from its first page to its file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::harvest::{Harvest, WatchError};
use crate::layout::Layout;
use crate::method::{Method, Watcher};
use crate::process::{Process, ProcessError};
use crate::recording::{Cost, Header, LONGEST, Summary, Writer};
use crate::sys::page_size;

/// The interval of looks at what changes seldom.
const LOOK: Duration = Duration::from_secs(1);
/// The longest wait without a look at what happened.
const SLICE: Duration = Duration::from_millis(200);
/// An address space that is gone belongs to a process that ends, or that is another program soon.
const CHANGE: Duration = Duration::from_secs(5);

/// How long, and how finely, is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Between harvests.
    pub interval: Duration,
    /// For how long at most.
    pub duration: Option<Duration>,
    /// How many intervals at most.
    pub intervals: Option<u64>,
}

/// A method that has begun to watch a process.
struct Watched {
    method: Method,
    fault_ns: u64,
    watcher: Watcher,
    /// The pages that were there.
    harvest: Harvest,
    /// For how long the process was stopped for all this.
    stopped_ns: u64,
}

/// Watches a process with the first of the methods that works on it. If it becomes another program
/// meanwhile, that one.
fn watch(methods: &[(Method, u64)], process: &mut Process) -> Result<Watched, String> {
    let start = Instant::now();
    loop {
        let mut reasons = Vec::new();
        let mut gone = false;
        for &(method, fault_ns) in methods {
            let begun = Watcher::attach(method, process).and_then(|(mut watcher, stopped_ns)| {
                let harvest = watcher.harvest(process)?;
                Ok(Watched {
                    method,
                    fault_ns,
                    stopped_ns: stopped_ns + harvest.stopped_ns,
                    watcher,
                    harvest,
                })
            });
            match begun {
                Ok(watched) => return Ok(watched),
                Err(WatchError::Method(reason)) => {
                    reasons.push(format!("{}: {reason}", method.name()))
                }
                Err(WatchError::Gone) => gone = true,
                Err(error) => return Err(error.to_string()),
            }
        }
        if !gone {
            return Err(format!("no method works on it: {}", reasons.join("; ")));
        }
        // Between two programs it has no memory for a short time.
        loop {
            if process.ended(1) || start.elapsed() > CHANGE {
                return Err(WatchError::Gone.to_string());
            }
            match Process::open(process.pid()) {
                Ok(next) => {
                    *process = next;
                    break;
                }
                Err(ProcessError::NoMemory | ProcessError::None) => (),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// How a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The recording is as it should be.
    Complete,
    /// By an error. A thread may be about to stop for us, which only our own end prevents.
    Broken,
}

/// A recording that is being made.
pub struct Session {
    process: Process,
    /// And what one of its faults costs.
    method: (Method, u64),
    watcher: Watcher,
    layout: Layout,
    writer: Writer,
    summary: Summary,
    /// When the last interval ended.
    last: Instant,
    /// Ways that were already warned of.
    direct: Vec<&'static str>,
    children: usize,
    programs: usize,
    unwatched: u64,
    looked: Instant,
    /// Watching failed.
    broken: bool,
}

impl Session {
    /// Begins with the first of the methods that works on this process.
    pub fn begin(
        options: &Options,
        methods: &[(Method, u64)],
        mut process: Process,
    ) -> Result<Self, String> {
        let mut cost = Cost { huge_before: process.huge(), ..Cost::default() };
        let clock = Instant::now();
        let watched = watch(methods, &mut process)?;
        let last = Instant::now();
        let there = watched.harvest;
        cost.fault_ns = watched.fault_ns;
        cost.stopped_ns = watched.stopped_ns;
        cost.harvest_ns = (last - clock).as_nanos() as u64;
        let header = Header {
            method: watched.method.name().to_owned(),
            blind: watched.method.blind(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .map(|release| release.trim().to_owned())
                .unwrap_or_default(),
            command: process.command(),
            pid: u64::from(process.pid().unsigned_abs()),
            page_size: page_size(),
            start_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos() as u64),
            interval_ns: options.interval.as_nanos() as u64,
        };
        let mut session = Self {
            writer: Writer::new(&header),
            layout: Layout::default(),
            summary: Summary { cost, ..Summary::default() },
            process,
            method: (watched.method, watched.fault_ns),
            watcher: watched.watcher,
            last,
            direct: Vec::new(),
            children: 0,
            programs: 0,
            unwatched: there.unwatched,
            looked: last,
            broken: false,
        };
        session.cover(&there);
        let present = session.layout.numbers(&there.seen);
        session.writer.present(&present);
        session.look();
        Ok(session)
    }

    /// Records until something ends it, which the summary names, and says when an interval is over.
    /// Between them `stop` is looked at.
    pub fn run(&mut self, options: &Options, stop: &AtomicBool, mut each: impl FnMut()) -> Outcome {
        let interval = options.interval;
        let origin = self.last;
        let end = options.duration.and_then(|duration| origin.checked_add(duration));
        let mut due = origin;
        for number in 1u64.. {
            // At regular times; but a harvest that takes long does not make the next interval
            // short.
            due += interval;
            if due <= self.last + interval / 2 {
                due = self.last + interval;
            }
            let ended = self.wait(end.map_or(due, |end| due.min(end)), stop);
            if let Err(reason) = self.interval(ended) {
                self.summary.ended = reason;
                return match self.broken {
                    true => Outcome::Broken,
                    false => Outcome::Complete,
                };
            }
            each();
            let enough = self.writer.size() > LONGEST / 4 * 3;
            let reason = if stop.load(Ordering::Relaxed) {
                "by a signal to the recorder".to_owned()
            } else if options.intervals.is_some_and(|most| number >= most) {
                "after the intervals asked for".to_owned()
            } else if end.is_some_and(|end| self.last >= end) {
                "after the time asked for".to_owned()
            } else if enough {
                format!("because a recording is at most {} long", mebibytes(LONGEST))
            } else {
                continue;
            };
            self.summary.ended = reason;
            self.look();
            break;
        }
        Outcome::Complete
    }

    /// Waits, at most for the end of the process, of which it tells, or for a signal to the
    /// recorder.
    fn wait(&self, due: Instant, stop: &AtomicBool) -> bool {
        loop {
            // A signal that comes just before the wait does not end it, so it must not be long.
            let wait = due.saturating_duration_since(Instant::now()).min(SLICE);
            if self.process.ended(wait.as_micros().div_ceil(1000) as i32) {
                return true;
            }
            if stop.load(Ordering::Relaxed) || Instant::now() >= due {
                return false;
            }
        }
    }

    /// One interval, which is over. What ends the recording is an error.
    fn interval(&mut self, ended: bool) -> Result<(), String> {
        let clock = Instant::now();
        let harvest =
            if ended { Err(WatchError::Gone) } else { self.watcher.harvest(&mut self.process) };
        let harvest = match harvest {
            Ok(harvest) => harvest,
            Err(WatchError::Gone) => self.other_program()?,
            Err(error) => {
                self.summary.warnings.push(format!("the recording ended early: {error}"));
                self.broken = true;
                return Err("by an error".to_owned());
            }
        };
        let now = Instant::now();
        self.cover(&harvest);
        let written = self.layout.numbers(&harvest.written);
        self.writer.interval((now - self.last).as_nanos() as u64, &written);
        self.last = now;
        let cost = &mut self.summary.cost;
        cost.harvest_ns += (now - clock).as_nanos() as u64;
        cost.stopped_ns += harvest.stopped_ns;
        cost.faults += harvest.faults;
        self.unwatched = self.unwatched.max(harvest.unwatched);
        if self.looked.elapsed() >= LOOK {
            self.look();
        }
        Ok(())
    }

    /// The old address space is gone. If the process has another one, that is watched from now on,
    /// and everything in it is new.
    fn other_program(&mut self) -> Result<Harvest, String> {
        let refused = match watch(&[self.method], &mut self.process) {
            Ok(watched) => {
                self.watcher = watched.watcher;
                self.programs += 1;
                self.summary.cost.stopped_ns += watched.stopped_ns;
                // That was counted just now.
                return Ok(Harvest { stopped_ns: 0, ..watched.harvest });
            }
            Err(refused) => refused,
        };
        let lost = self.last.elapsed();
        if !self.process.ended(0) {
            return Err(format!(
                "the process became another program, which cannot be recorded: {refused}"
            ));
        }
        self.summary.warnings.push(format!(
            "what the process wrote in its last {:.1} ms at most is not in the recording",
            lost.as_secs_f64() * 1e3
        ));
        Err("the process ended".to_owned())
    }

    /// Page numbers for what was seen.
    fn cover(&mut self, harvest: &Harvest) {
        let writer = &mut self.writer;
        self.layout.cover(&harvest.seen, &harvest.map, |part, name| {
            writer.region(part.first, part.pages, name);
        });
    }

    /// Looks for what a recording does not show.
    fn look(&mut self) {
        self.looked = Instant::now();
        self.children = self.children.max(self.process.children());
        for way in self.process.direct_access() {
            if !self.direct.contains(&way) {
                self.direct.push(way);
            }
        }
        // At the end it is too late to ask.
        self.summary.cost.huge_after = self.process.huge();
    }

    /// The recording, as it stands in a file.
    pub fn finish(mut self) -> Vec<u8> {
        let warnings = &mut self.summary.warnings;
        if !self.direct.is_empty() {
            warnings.push(format!(
                "the process has {}: what is written through it without a page fault is not in the \
                 recording",
                self.direct.join(", ")
            ));
        }
        if self.children > 0 {
            warnings.push(format!(
                "{} not followed",
                counted(self.children as u64, "child was", "children were")
            ));
        }
        if self.programs > 0 {
            warnings.push(format!(
                "the process became another program {}: all memory counts as written then",
                counted(self.programs as u64, "time", "times")
            ));
        }
        if self.unwatched > 0 {
            warnings.push(format!(
                "{} could not be watched",
                mebibytes(self.unwatched.saturating_mul(page_size()))
            ));
        }
        let Cost { huge_before: before, huge_after: after, .. } = self.summary.cost;
        if after < before {
            warnings.push(format!(
                "{} of huge pages at the start, {} at the end: a write to a watched one splits it",
                mebibytes(before),
                mebibytes(after)
            ));
        }
        self.writer.finish(&self.summary)
    }
}

fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

//! Soft-dirty bits: one bit for each page in the page map, set by writes, all cleared at once.
//!
//! Reading and clearing are two steps, and a write between them would be lost. So all threads of
//! the process are stopped for both.
//!
//! Many kernels accept the order to clear and have no such bits. That looks like a process that
//! writes nothing, which is why [`probe`] is there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use crate::harvest::{Harvest, WatchError};
use crate::process::Process;
use crate::recording::{Run, join, pages};
use crate::sys::{self, Trial};
use crate::tracee::{TraceError, Tracee};

/// Writes that this cannot see.
pub const BLIND: [&str; 4] = [
    "writes that make no page fault: by devices and by io_uring into registered buffers",
    "writes to shared memory by other processes",
    "children, which are processes of their own",
    "of a page that is present in a new, moved or merged mapping, whether it was read or written: \
     it counts as written",
];

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
const SOFT_DIRTY: u64 = 1 << 55;

/// Finds out on our own memory whether this works here. Returns the nanoseconds that one fault
/// costs.
pub fn probe() -> Result<u64, String> {
    const PAGES: usize = 2000;
    let say = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let page = sys::page_size();
    let trial = Trial::new(PAGES, page as usize).map_err(say("memory"))?;
    let first = trial.address() / page;
    let pagemap = File::open("/proc/self/pagemap").map_err(say("page map"))?;
    let clear = || fs::write("/proc/self/clear_refs", "4").map_err(say("clear_refs"));
    let dirty = || -> Result<Vec<u64>, String> {
        let mut found = Vec::new();
        let all = Run { first, pages: trial.pages() as u64 };
        read(&pagemap, all, |number, word| {
            if word & SOFT_DIRTY != 0 {
                found.push(number - first);
            }
        })
        .map_err(say("page map"))?;
        Ok(found)
    };
    clear()?;
    let written = (0..PAGES).step_by(10);
    written.clone().for_each(|number| trial.write(number));
    let found = dirty()?;
    let expected: Vec<u64> = written.map(|number| number as u64).collect();
    if found != expected {
        return Err(format!(
            "tried on {} written pages of the recorder, it saw {}",
            expected.len(),
            found.len()
        ));
    }
    trial.price(clear)
}

/// Tells of each page of a run and its word. Pages that are unmapped meanwhile are left out.
fn read(pagemap: &File, run: Run, mut visit: impl FnMut(u64, u64)) -> io::Result<()> {
    let mut words = vec![0; (run.pages * 8).min(1 << 16) as usize];
    let mut page = run.first;
    while page < run.end() {
        let wanted = ((run.end() - page) * 8).min(words.len() as u64) as usize;
        let got = match pagemap.read_at(&mut words[..wanted], page * 8) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other? / 8,
        };
        if got == 0 {
            break;
        }
        for word in words.as_chunks().0.iter().take(got) {
            visit(page, u64::from_ne_bytes(*word));
            page += 1;
        }
    }
    Ok(())
}

/// The method, at work on one address space.
pub struct SoftDirty {
    begun: bool,
}

impl SoftDirty {
    /// Nothing is watched before the first harvest.
    pub fn new() -> Self {
        Self { begun: false }
    }

    /// Harvests the pages that were written since the last harvest; at the first, everything that
    /// is there.
    pub fn harvest(&mut self, process: &mut Process) -> Result<Harvest, WatchError> {
        let stopped = stop_all(process)?;
        let harvest = self.harvest_stopped(process);
        let stopped_ns = stopped.first().map_or(0, |first| first.stopped().as_nanos() as u64);
        drop(stopped);
        let mut harvest = harvest?;
        harvest.stopped_ns = stopped_ns;
        Ok(harvest)
    }

    fn harvest_stopped(&mut self, process: &mut Process) -> Result<Harvest, WatchError> {
        let map = process.map()?;
        if map.is_empty() {
            return Err(WatchError::Gone);
        }
        let mut seen = Vec::new();
        let mut written = Vec::new();
        for mapping in &map {
            // What cannot be accessed is not written, and may be terabytes.
            if !mapping.readable && !mapping.writable || mapping.name.starts_with("[v") {
                continue;
            }
            read(&process.pagemap, mapping.run, |page, word| {
                let dirty = !self.begun || word & SOFT_DIRTY != 0;
                if !dirty || word & (PRESENT | SWAPPED) == 0 {
                    return;
                }
                extend(&mut seen, page);
                // The file's page, in a private mapping, was read.
                if word & OF_FILE == 0 || !mapping.private {
                    extend(&mut written, page);
                }
            })?;
        }
        process.clear_soft_dirty()?;
        self.begun = true;
        join(&mut seen);
        join(&mut written);
        Ok(Harvest { faults: pages(&written), map, seen, written, unwatched: 0, stopped_ns: 0 })
    }
}

/// Stops all threads, also those that are started meanwhile.
fn stop_all(process: &Process) -> Result<Vec<Tracee>, WatchError> {
    let mut stopped: Vec<Tracee> = Vec::new();
    loop {
        let mut more = false;
        for tid in process.threads()? {
            if stopped.iter().any(|tracee| tracee.tid() == tid) {
                continue;
            }
            match Tracee::stop(tid, false) {
                Ok(tracee) => stopped.push(tracee),
                // This thread; the others may go on.
                Err(TraceError::Ended) => continue,
                Err(error) => return Err(error.into()),
            }
            more = true;
        }
        if !more {
            break;
        }
    }
    if stopped.is_empty() {
        return Err(WatchError::Gone);
    }
    Ok(stopped)
}

fn extend(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(run) if run.end() == page => run.pages += 1,
        _ => runs.push(Run { first: page, pages: 1 }),
    }
}

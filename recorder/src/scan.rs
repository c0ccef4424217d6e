//! Write protection that the kernel takes away by itself, and a scan that finds where it did.
//!
//! A userfaultfd is opened *in* the process, by a system call that it is made to do, and only we
//! keep it. Then everything else happens from outside: mappings are registered for asynchronous
//! write protection, and a scan of the page map tells which pages are not protected (any more) and
//! protects them, one step for each page, so no write is lost between. When our last copy is
//! closed, the kernel unregisters everything.
//!
//! # Where the scan would say too much or nothing
//!
//! A page of a mapping that is not registered counts as written whenever it is present, and a
//! mapping that came since, or was moved, or was put in the place of another, is not registered, at
//! whatever address. So a scan is restricted to registered mappings, and before it a second scan
//! looks for present pages in all others: those mappings are registered then. What is present in
//! them was not there at the last harvest and counts as written since. A mapping without pages may
//! wait.
//!
//! A page of a private mapping that still is the file's was read, not written.

use std::io;

use std::time::{Duration, Instant};

use crate::harvest::{Harvest, WatchError};
use crate::layout::{Mapping, mapping_of};
use crate::process::Process;
use crate::recording::{Run, join, pages};
use crate::sys::{self, Filter, Found, Trial, Userfault};
use crate::tracee::{TraceError, Tracee, gate};

/// Writes that this cannot see.
pub const BLIND: [&str; 5] = [
    "writes that make no page fault: by devices and by io_uring into registered buffers",
    "writes to shared memory by other processes",
    "children, which are processes of their own",
    "of a page that is present in a new or moved mapping, whether it was read or written: it \
     counts as written",
    "of shared memory, and of memory that was given back, whether the first access of the process \
     is a read: it counts as a write",
];

/// Present pages in mappings that are not registered.
const UNWATCHED: Filter = Filter {
    inverted: sys::WATCHED,
    all: sys::WATCHED,
    any: sys::PRESENT | sys::SWAPPED,
    told: sys::PRESENT,
    protect: false,
};

/// Pages that were written since the last scan, protected again. A page that is not there counts as
/// written too, and is left out.
const HARVEST: Filter = Filter {
    inverted: 0,
    all: sys::WATCHED | sys::WRITTEN,
    any: sys::PRESENT | sys::SWAPPED,
    told: sys::OF_FILE,
    protect: true,
};

/// Finds out on our own memory whether this works here. Returns the nanoseconds that one fault
/// costs.
pub fn probe() -> Result<u64, String> {
    const PAGES: usize = 2000;
    let page = sys::page_size();
    let trial = Trial::new(PAGES, page as usize).map_err(|error| error.to_string())?;
    let uffd = Userfault::own().map_err(|error| format!("userfaultfd: {error}"))?;
    let (start, bytes) = (trial.address(), trial.bytes() as u64);
    uffd.register(start, bytes).map_err(|error| format!("userfaultfd: registering: {error}"))?;
    let pagemap =
        std::fs::File::open("/proc/self/pagemap").map_err(|error| format!("page map: {error}"))?;
    let harvest = || -> Result<Vec<u64>, String> {
        let mut found = Vec::new();
        sys::scan(&pagemap, start, start + bytes, HARVEST, |run| {
            found.extend((run.start..run.end).step_by(page as usize));
        })
        .map_err(|error| format!("scan of the page map: {error}"))?;
        Ok(found)
    };
    harvest()?;
    let expected = (0..PAGES).step_by(10);
    expected.clone().for_each(|number| trial.write(number));
    let expected: Vec<u64> = expected.map(|number| start + number as u64 * page).collect();
    let found = harvest()?;
    if found != expected || !harvest()?.is_empty() {
        return Err(format!(
            "tried on {} written pages of the recorder, it saw {}",
            expected.len(),
            found.len()
        ));
    }
    trial.price(|| harvest().map(drop))
}

/// The method, at work on one address space.
pub struct Scan {
    uffd: Userfault,
    page: u64,
}

impl Scan {
    /// Finds an instruction for system calls in the process. One that is just being started has its
    /// stack before its code: it gets a second.
    fn gate(process: &mut Process) -> Result<u64, WatchError> {
        let until = Instant::now() + Duration::from_secs(1);
        loop {
            let code = process.code()?;
            match gate(&process.memory, code.into_iter()) {
                Ok(gate) => return Ok(gate),
                Err(_) if !process.is_same() => return Err(WatchError::Gone),
                Err(TraceError::NoGate) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Begins to watch. Returns for how many nanoseconds the process was stopped.
    pub fn attach(process: &mut Process) -> Result<(Self, u64), WatchError> {
        let gate = Self::gate(process)?;
        let thread = *process.threads()?.first().ok_or(TraceError::Ended)?;
        // A filter may end the process for a system call that it does not know.
        let status = process.files().status().map_err(crate::process::ProcessError::from)?;
        let filtered = status.seccomp.unwrap_or(0) != 0;
        let mut tracee = match Tracee::stop(thread, filtered) {
            Err(TraceError::Kernel { .. }) if filtered => {
                return Err(WatchError::Method(
                    "the process filters its system calls, which only root may suspend".into(),
                ));
            }
            other => other?,
        };
        // It may have become another program, without this instruction, just before it stopped.
        if !process.is_same() {
            return Err(WatchError::Gone);
        }
        let fd = tracee.calls(&process.memory, gate, |caller| {
            let theirs = caller.call(libc::SYS_userfaultfd, sys::UFFD_FLAGS as u64)?;
            let Ok(fd) = i32::try_from(theirs) else {
                return Ok(Err(theirs));
            };
            if fd < 0 {
                return Ok(Err(theirs));
            }
            let ours = process.file(fd);
            caller.call(libc::SYS_close, fd as u64)?;
            Ok(Ok(ours))
        });
        let stopped = tracee.stopped();
        drop(tracee);
        let failed = |error| WatchError::Method(format!("userfaultfd in the process: {error}"));
        let fd = fd?
            .map_err(|number| failed(io::Error::from_raw_os_error(-number as i32)))?
            .map_err(failed)?;
        let uffd = Userfault::ready(fd).map_err(failed)?;
        let page = sys::page_size();
        Ok((Self { uffd, page }, stopped.as_nanos() as u64))
    }

    /// Harvests the pages that were written since the last harvest; at the first, everything that
    /// is there.
    pub fn harvest(&self, process: &mut Process) -> Result<Harvest, WatchError> {
        let map = process.map()?;
        let Some(last) = map.last() else {
            return Err(WatchError::Gone);
        };
        let end = last.run.end() * self.page;
        let run = |found: Found| Run {
            first: found.start / self.page,
            pages: (found.end - found.start) / self.page,
        };

        let mut present = Vec::new();
        sys::scan(&process.pagemap, 0, end, UNWATCHED, |found| present.push(run(found)))?;
        let mut fresh = Vec::new();
        let mut unwatched = 0;
        each_mapping(&present, &map, |part, mapping| {
            if mapping.name.starts_with("[v") {
                return;
            }
            let whole = mapping.run;
            let watched = self.uffd.register(whole.first * self.page, whole.pages * self.page);
            match watched.map_err(|error| error.raw_os_error()) {
                Ok(()) => fresh.push(part),
                // Gone already, or never to be written.
                Err(Some(libc::ENOENT | libc::EINVAL | libc::ENOMEM)) => (),
                Err(_) if !mapping.writable => (),
                Err(_) => unwatched += part.pages,
            }
        });

        let mut seen = Vec::new();
        let mut written = Vec::new();
        sys::scan(&process.pagemap, 0, end, HARVEST, |found| {
            let all = run(found);
            seen.push(all);
            if found.categories & sys::OF_FILE == 0 {
                written.push(all);
            } else {
                each_mapping(&[all], &map, |part, mapping| {
                    if !mapping.private {
                        written.push(part);
                    }
                });
            }
        })?;
        join(&mut seen);
        join(&mut written);
        Ok(Harvest {
            faults: pages(&written).saturating_sub(pages(&fresh)),
            map,
            seen,
            written,
            unwatched,
            stopped_ns: 0,
        })
    }
}

/// Tells of each mapping's part of the runs; what is in none is left out.
fn each_mapping(runs: &[Run], map: &[Mapping], mut visit: impl FnMut(Run, &Mapping)) {
    for run in runs {
        let mut page = run.first;
        while page < run.end() {
            let Some(mapping) = mapping_of(map, page) else {
                // To the next one.
                let after = map.partition_point(|mapping| mapping.run.first <= page);
                page = map.get(after).map_or(u64::MAX, |mapping| mapping.run.first);
                continue;
            };
            let end = run.end().min(mapping.run.end());
            let part = Run { first: page, pages: end - page };
            visit(part, mapping);
            page = end;
        }
    }
}

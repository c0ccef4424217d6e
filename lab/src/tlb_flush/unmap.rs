//! A shootdown on this computer: a page is unmapped while another thread of the program runs.

use std::hint;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::stats::Samples;

/// How often one page is unmapped, and how long it is tried on a computer on which others run.
const UNMAPS: usize = 4_000;
const PATIENCE: Duration = Duration::from_secs(3);
/// And until there are enough, where others have the CPUs nearly always.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
/// Nanoseconds beyond which another program had the CPU, and it is no flush.
const NO_FLUSH: f64 = 1e6;
/// Fewer samples say nothing.
const FEWEST: usize = 50;

/// Nanoseconds to unmap a page that was touched.
#[derive(Clone, Copy, Debug)]
pub struct Unmap {
    /// With no other thread.
    pub alone: f64,
    /// While another thread of the program really runs on another CPU; nothing where there is none.
    pub remote: Option<f64>,
}

/// Unmaps a page, over and over, for three seconds at most where there is time for enough.
pub fn measured() -> Result<Unmap, Error> {
    let Some(alone) = once(|| true)? else {
        return Ok(Unmap { alone: 0.0, remote: None });
    };
    if thread::available_parallelism().map_or(1, usize::from) < 2 {
        return Ok(Unmap { alone, remote: None });
    }
    let (stop, ticks) = (AtomicBool::new(false), AtomicU64::new(0));
    let remote = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                ticks.fetch_add(1, Ordering::Relaxed);
                hint::spin_loop();
            }
        });
        // Whether the other ran meanwhile.
        let last = AtomicU64::new(0);
        let ran = || {
            let now = ticks.load(Ordering::Relaxed);
            last.swap(now, Ordering::Relaxed) != now
        };
        thread::sleep(Duration::from_millis(5));
        let result = once(ran);
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    Ok(Unmap { alone, remote })
}

/// The median of those before and after which it held.
fn once(holds: impl Fn() -> bool) -> Result<Option<f64>, Error> {
    let mut samples = Samples::default();
    let started = Instant::now();
    while match samples.len() {
        ..FEWEST => started.elapsed() < LAST_PATIENCE,
        FEWEST..UNMAPS => started.elapsed() < PATIENCE,
        _ => false,
    } {
        // SAFETY: `mmap`: a new mapping, wherever the kernel likes it.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(Error::Map(std::io::Error::last_os_error()));
        }
        // SAFETY: the page is mapped, and no one else's.
        unsafe { page.cast::<u8>().write_volatile(1) };
        let _ = holds();
        let begin = Instant::now();
        // SAFETY: `munmap`: it was mapped with this length, and nothing points to it.
        unsafe { libc::munmap(page, 4096) };
        let took = begin.elapsed().as_nanos() as f64;
        if holds() && took < NO_FLUSH {
            samples.push(took);
        }
    }
    Ok((samples.len() >= FEWEST).then(|| samples.median()))
}

//! Time that passes, and time that a thread is really running: on a busy computer they part.

use std::hint;
use std::time::{Duration, Instant};

/// What something took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Took {
    /// On the wall.
    pub wall: Duration,
    /// Of the thread's CPU, user and kernel.
    pub cpu: Duration,
}

impl Took {
    /// Both, one after the other.
    #[must_use]
    pub fn then(self, other: Self) -> Self {
        Self {
            wall: self.wall + other.wall,
            cpu: self.cpu + other.cpu,
        }
    }

    /// Both, at the same time.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self {
            wall: self.wall.max(other.wall),
            cpu: self.cpu + other.cpu,
        }
    }

    /// What it did not run.
    pub fn away(&self) -> Duration {
        self.wall.saturating_sub(self.cpu)
    }

    /// Of so many, each on average.
    #[must_use]
    pub fn each_of(self, times: u32) -> Self {
        Self {
            wall: self.wall / times.max(1),
            cpu: self.cpu / times.max(1),
        }
    }

    /// Without a part of it.
    #[must_use]
    pub fn without(self, part: Self) -> Self {
        Self {
            wall: self.wall.saturating_sub(part.wall),
            cpu: self.cpu.saturating_sub(part.cpu),
        }
    }
}

/// So long CPU time is compared with time, again and again; and so long at most.
const SLICE: Duration = Duration::from_micros(20);
const PATIENCE: Duration = Duration::from_millis(20);

/// Waits, running, until the calling thread has had a CPU for itself for a moment. To be called by a thread that has slept, before it is timed: a CPU that was halted may be one of a
/// computer that is itself a virtual machine, and its host needs a while to let it go on.
pub fn settle() {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        let ((), took) = timed(|| {
            let begin = Instant::now();
            while begin.elapsed() < SLICE {
                hint::spin_loop();
            }
        });
        if took.cpu >= SLICE.mul_f64(0.9) {
            return;
        }
    }
}

/// CPU time of the calling thread since it began.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `clock_gettime`: the structure is there to be written to; the clock exists in every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(time.tv_sec.unsigned_abs(), nanoseconds)
}

/// Does something, and says what it took the calling thread.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Took) {
    let (begin, cpu) = (Instant::now(), thread_time());
    let done = work();
    let took = Took {
        cpu: thread_time().saturating_sub(cpu),
        wall: begin.elapsed(),
    };
    (done, took)
}

//! Time that passes, and time that a thread is really running: on a busy computer they part.

use std::time::{Duration, Instant};

/// What something took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Took {
    /// On the wall.
    pub wall: Duration,
    /// Of the thread's CPU, user and kernel.
    pub cpu: Duration,
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

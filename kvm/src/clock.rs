//! Time that passes, and time that a thread is really running: on a busy computer they part.

use std::hint;
use std::time::{Duration, Instant};

/// The time of something.
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
        Self { wall: self.wall + other.wall, cpu: self.cpu + other.cpu }
    }

    /// Both, at the same time.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self { wall: self.wall.max(other.wall), cpu: self.cpu + other.cpu }
    }

    /// Returns the time that it did not run.
    pub fn away(&self) -> Duration {
        self.wall.saturating_sub(self.cpu)
    }

    /// Of so many, each on average.
    #[must_use]
    pub fn each_of(self, times: u32) -> Self {
        Self { wall: self.wall / times.max(1), cpu: self.cpu / times.max(1) }
    }

    /// Without a part of it.
    #[must_use]
    pub fn without(self, part: Self) -> Self {
        Self { wall: self.wall.saturating_sub(part.wall), cpu: self.cpu.saturating_sub(part.cpu) }
    }
}

/// The time for which CPU time is compared with time, again and again; and the most of it.
const SLICE: Duration = Duration::from_micros(20);
const PATIENCE: Duration = Duration::from_millis(20);

/// Waits, running, until the calling thread has had a CPU for itself for a moment. To be called by
/// a thread that has slept, before it is timed: a CPU that was halted may be one of a computer that
/// is itself a virtual machine, and its host needs a while to let it go on.
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

/// The steps of arithmetic that are a measure of the pace, and the number of measures: an interrupt
/// is in one of them.
const STEPS: u32 = 32_000;
const MEASURES: usize = 3;

/// CPU time of a fixed piece of arithmetic on the CPU of the calling thread: 20 to 50 us, and more
/// where a processor has lowered its frequency or where another thread has the other half of the
/// core, which no time away tells. It touches no memory, so what was in the caches stays.
pub fn pace() -> Duration {
    let measure = || timed(arithmetic).1.cpu;
    (0..MEASURES).map(|_| measure()).min().unwrap_or_default()
}

/// Chains that do not wait for each other, so that their multiplications fill what a core has for
/// them.
fn arithmetic() {
    let mut chains = [1_u64, 2, 3, 4, 5, 6];
    for _ in 0..STEPS {
        for chain in &mut chains {
            *chain = chain.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (*chain >> 7);
        }
    }
    hint::black_box(chains);
}

/// CPU time of the calling thread since it began.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime`: the structure is there to be written to; the clock exists in every
    // Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(time.tv_sec.unsigned_abs(), nanoseconds)
}

/// Does something, and says what it took the calling thread.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Took) {
    let (begin, cpu) = (Instant::now(), thread_time());
    let done = work();
    let took = Took { cpu: thread_time().saturating_sub(cpu), wall: begin.elapsed() };
    (done, took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_that_of_arithmetic_and_not_of_what_else_runs() {
        let (pace, took) = timed(pace);
        assert!(pace > Duration::from_micros(5), "{pace:?}");
        // The fastest of three.
        assert!(pace * 3 <= took.cpu, "{pace:?} {took:?}");
        assert_eq!(took.without(took), Took::default());
    }
}

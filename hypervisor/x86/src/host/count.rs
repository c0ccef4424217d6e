//! The counters.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::counters::{Count, NAMES};

/// The counters, and behind them those between the guest's marks; `xtask` finds them by this name.
#[unsafe(no_mangle)]
pub static COUNTERS: [AtomicU64; 2 * NAMES.len()] = [const { AtomicU64::new(0) }; 2 * NAMES.len()];

/// The counters at the guest's first mark.
static MARKED: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Adds to a counter.
pub fn count(what: Count, by: u64) {
    COUNTERS[what as usize].fetch_add(by, Ordering::Relaxed);
}

/// Raises a counter to a number, if it is lower.
pub fn count_most(what: Count, number: u64) {
    COUNTERS[what as usize].fetch_max(number, Ordering::Relaxed);
}

/// Begins the part that is counted by itself.
pub fn begin() {
    COUNTERS[Count::WaitLongest as usize].store(0, Ordering::Relaxed);
    for (mark, counter) in MARKED.iter().zip(&COUNTERS) {
        mark.store(counter.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Ends that part.
pub fn end() {
    let (counters, kept) = COUNTERS.split_at(NAMES.len());
    for ((mark, counter), kept) in MARKED.iter().zip(counters).zip(kept) {
        let since = counter.load(Ordering::Relaxed).wrapping_sub(mark.load(Ordering::Relaxed));
        kept.store(since, Ordering::Relaxed);
    }
}

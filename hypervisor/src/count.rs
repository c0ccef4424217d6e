//! The hypervisor's counters, and its locks.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::counters::{Count, NAMES};

/// The counters; `xtask` finds them by this name.
#[unsafe(no_mangle)]
pub static COUNTERS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Adds to a counter.
pub fn count(what: Count, by: u64) {
    COUNTERS[what as usize].fetch_add(by, Ordering::Relaxed);
}

/// Raises a counter to a number, if it is lower.
pub fn raise(what: Count, to: u64) {
    COUNTERS[what as usize].fetch_max(to, Ordering::Relaxed);
}

/// Waits out of the way of others: where processors take turns, as they may in an emulator, the
/// next one has its turn.
pub struct Patience;

impl spin::RelaxStrategy for Patience {
    #[inline(always)]
    fn relax() {
        // SAFETY: a hint.
        unsafe { asm!("yield", options(nomem, nostack, preserves_flags)) };
    }
}

/// A lock whose waiters are [patient](Patience).
pub type Mutex<T> = spin::mutex::SpinMutex<T, Patience>;

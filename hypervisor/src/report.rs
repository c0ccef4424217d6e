//! Reports to a program that [watches](crate::reports) from outside, as `cargo xtask check` does.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::reports::REPORTS;
pub use crate::reports::Report;

/// Words of the report; `xtask` looks for it by this name. A processor's own store is what is seen,
/// and never what is in memory later: all of them can use the same words.
#[unsafe(no_mangle)]
static REPORTED: [AtomicU64; REPORTS] = [const { AtomicU64::new(0) }; REPORTS];

/// Says it.
#[inline(always)]
pub fn report(what: Report, value: u64) {
    REPORTED[what as usize].store(value, Ordering::Relaxed);
    // Not put off behind what it is about: instructions by name, and accesses to frames.
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
}

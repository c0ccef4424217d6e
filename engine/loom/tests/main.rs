//! The lock-free protocols over all interleavings: entries that processors share, exclusive edits against walkers, edits
//! by several processors at once, the question when no walk holds a table any more, the slots of a guest, the log
//! of what it writes, and flushes of other processors.
//!
//! Run with `cargo test --release -p tablewright-loom`, which builds the engine with loom's atomics. Each protocol is
//! explored whole, without a bound, with two threads and with three: one edits, or several do, and the others walk. The
//! slots, of which a look-up alone reads a dozen words, with two.

/// The engine by the name that it has elsewhere.
extern crate tablewright_loom as tablewright;

mod entries;
mod exclusive;
mod guest;
mod identity;
mod log;
mod quiet;
mod shared;
mod shootdown;
mod tables;

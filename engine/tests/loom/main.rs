//! The lock-free protocols over all interleavings: entries that processors share, exclusive edits against walkers, edits
//! by several processors at once, and the question when a table is out of everybody's hands.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p tablewright --test loom`. Each protocol is explored whole,
//! without a bound, with two threads and with three: one edits, or several do, and the others walk.
#![cfg(loom)]

mod entries;
mod exclusive;
mod shared;
mod tables;

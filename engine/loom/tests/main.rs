//! The lock-free protocols over all interleavings: entries that processors share, exclusive edits
//! against walkers, edits by several processors at once, the question when no walk holds a table
//! any more, the slots of a guest, the log of what it writes, and flushes of other processors.
//!
//! Run with `cargo test --release -p tablewright-loom`, which builds the engine with loom's
//! atomics. Each protocol is explored whole, without a bound, with two threads and with three: one
//! edits, or several do, and the others walk. The slots, of which a look-up alone reads a dozen
//! words, with two. What takes longest is explored up to [three preemptions](bounded), and whole
//! with `LOOM_WHOLE=1`.

/// The engine by the name that it has elsewhere.
extern crate tablewright_loom as tablewright;

mod entries;
mod exclusive;
mod grace;
mod guest;
mod identity;
mod log;
mod shared;
mod shootdown;
mod tables;

/// Explores a model in which each execution has so many preemptions at most; all executions with
/// `LOOM_WHOLE`.
fn bounded(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    if std::env::var_os("LOOM_WHOLE").is_none() {
        builder.preemption_bound = Some(preemptions);
    }
    builder.check(model);
}

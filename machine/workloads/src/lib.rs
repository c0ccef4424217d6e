//! Random programs: what the machine's tests and examples run by the thousand.
//!
//! A crate of its own, because they are built for every format, and every test and example needs
//! them.

mod bug;
mod dice;
mod hardware;
mod platform;
pub mod random;
pub mod sequences;

pub use bug::Bug;

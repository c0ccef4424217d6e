//! Random programs: what the machine's tests and examples run by the thousand.
//!
//! A crate of its own, because they are built for every format, and every test and example needs
//! them.

#![allow(missing_docs)] // Not published: what is public is for the tests of the machine.

mod bug;
pub mod dice;
mod hardware;
pub mod platform;
pub mod random;
pub mod sequences;

pub use bug::Bug;

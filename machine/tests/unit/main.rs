//! Parts of the machine by themselves.
//!
//! The crate has no tests inside: a test program of its own would be all of it, optimised, once more. What is not public is taken in
//! here file by file, with its tests.
#![allow(dead_code)]

#[path = "../../src/perturb.rs"]
mod perturb;
#[path = "../../src/splitmix.rs"]
mod splitmix;
#[path = "../../src/time.rs"]
mod time;
#[path = "../../src/tree.rs"]
mod tree;

mod profile;
mod replay;

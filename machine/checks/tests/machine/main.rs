//! The machine, by programs that are written by hand, and its parts by themselves.
//!
//! One test program, without optimisation: what is generic over formats is built once. The crate
//! has no tests inside: a test program of its own would be all of it, optimised, once more. What is
//! not public is taken in here file by file, with its tests.

#[allow(dead_code)]
#[path = "../../../src/perturb.rs"]
mod perturb;
#[allow(dead_code)]
#[path = "../../../src/splitmix.rs"]
mod splitmix;
#[allow(dead_code)]
#[path = "../../../src/time.rs"]
mod time;
#[allow(dead_code)]
#[path = "../../../src/tree.rs"]
mod tree;

mod forget;
mod guests;
mod kick;
mod lives;
mod order;
mod processes;
mod profile;
mod runs;
mod shared;

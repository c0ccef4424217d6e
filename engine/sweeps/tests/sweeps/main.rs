//! Millions of cases, in one test program.

#[path = "../../../tests/common/mod.rs"]
mod common;

mod bbm;
mod flush;
mod hardware;

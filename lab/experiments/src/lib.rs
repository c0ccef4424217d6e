//! What kernels and hypervisors do to page tables, each in the ways that were published and in the engine's own, on the
//! [software machine](tablewright_machine): in virtual time, and exactly the same on every run.
//!
//! An experiment is a module with a `Job`, which says all that a run depends on, and a `Ran`, which has what the run showed. What
//! may be asked, what was published for it and how it is printed is the program's, in the crate `tablewright-lab`.

pub mod dirty_log;
mod host;
pub mod input;
pub mod linear_map;
pub mod migrate;
pub mod page_table_test;
pub mod tlb_flush;
pub mod write_protect;

use tablewright_harness::{arena, error, format, random, report, runs, size};
use tablewright_machine::Profile;

use error::Error;

/// That no rule was broken in a step of an experiment.
pub fn no_violation(
    profile: &Profile,
    step: &'static str,
    violation: Option<&str>,
) -> Result<(), Error> {
    match violation {
        None => Ok(()),
        Some(problem) => Err(Error::Machine {
            machine: profile.name.clone(),
            step,
            problem: problem.to_owned(),
        }),
    }
}

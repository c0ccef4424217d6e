//! What kernels and hypervisors do to page tables, each in the ways that were published and in the
//! engine's own, on the [software machine](tablewright_machine): in virtual time, and exactly the
//! same on every run.
//!
//! An experiment is a module with a `Job`, which says all that a run depends on, and a `Ran`, which
//! has what the run showed. What may be asked, what was published for it and how it is printed is
//! the program's, in the crate `tablewright-lab`.

pub mod dirty_log;
mod host;
pub mod input;
pub mod linear_map;
pub mod migrate;
pub mod page_table_test;
pub mod tlb_flush;
pub mod write_protect;

use tablewright::shared::{SharedPlatform, SharedSpace};
use tablewright::{AddressSpace, Format, Half};
use tablewright_harness::{arena, error, format, random, report, runs, size};
use tablewright_machine::{Mapper, Profile};

use error::Error;

/// That no rule was broken in a step of an experiment.
pub fn no_violation(
    profile: &Profile,
    step: &'static str,
    violation: Option<&str>,
) -> Result<(), Error> {
    match violation {
        None => Ok(()),
        Some(problem) => Err(failed(profile, step)(problem.to_owned())),
    }
}

/// The error of a step that has come to nothing.
fn failed(profile: &Profile, step: &'static str) -> impl Fn(String) -> Error {
    move |problem| Error::Machine {
        machine: profile.name.clone(),
        step,
        problem,
    }
}

/// An empty space that CPUs of the machine walk, and edit together.
fn shared_space<F: Format, P: SharedPlatform + Clone>(
    platform: P,
    mapper: Mapper<'_>,
) -> Result<SharedSpace<F, P>, String> {
    let space = AddressSpace::<F, _>::new(platform).ok_or("no memory for a root")?;
    mapper.attach(space.root(), Half::Lower, 0);
    SharedSpace::new(space).map_err(|_| "the space runs".to_owned())
}

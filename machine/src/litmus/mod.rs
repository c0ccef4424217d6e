//! Litmus tests: small programs around page tables, and what the architecture says of their
//! outcomes.
//!
//! A test sets up a few mappings, runs a few instructions on each of a few CPUs, and asks whether
//! an execution can end in a certain way. It is tried twice: [`explore`] goes through **all**
//! executions of CPUs that run out of order; [`simulate`] runs it on the [machine in virtual
//! time](crate::Machine), whose CPUs run in order, with many seeds. Both are drivers of the same
//! model of the hardware. An outcome that the architecture forbids must come of neither; one that
//! it allows, and that is a stale translation or a fault that need not be, is a bug to be found,
//! and the machine has to be able to show it.
//!
//! The tests that come with the crate are re-derived from the published ones of the Cambridge group
//! (ESOP 2022) and of Arm's own catalogue, and from the manuals: [`built_in`]. The format of a test
//! is described in `docs/MACHINE.md`.

mod explore;
mod herd;
mod layout;
mod outcome;
mod parse;
mod program;
mod timed;

pub use explore::{ExploreError, Explored, Reached, explore};
pub use herd::{herd_outcomes, is_herd};
pub use parse::ParseError;
pub use program::{Profile, Test, Verdict};
pub use timed::{Simulated, simulate};

/// Reads the tests in a file, in the notation of this crate or the one of herd; `name` is for
/// messages.
///
/// # Errors
/// The first line that cannot be understood.
pub fn parse(name: &str, text: &str) -> Result<Vec<Test>, ParseError> {
    match is_herd(text) {
        true => Ok(vec![herd::parse(name, text)?]),
        false => parse::parse(name, text),
    }
}

/// No test of the size of those published has so many states.
pub const MOST_STATES: usize = 2_000_000;

/// The files of tests in the crate: name and content.
pub const FILES: [(&str, &str); 18] = [
    ("map.litmus", include_str!("../../litmus/map.litmus")),
    ("unmap.litmus", include_str!("../../litmus/unmap.litmus")),
    ("shootdown.litmus", include_str!("../../litmus/shootdown.litmus")),
    ("break.litmus", include_str!("../../litmus/break.litmus")),
    ("permission.litmus", include_str!("../../litmus/permission.litmus")),
    ("flags.litmus", include_str!("../../litmus/flags.litmus")),
    ("alias.litmus", include_str!("../../litmus/alias.litmus")),
    ("space.litmus", include_str!("../../litmus/space.litmus")),
    ("catalogue.litmus", include_str!("../../litmus/catalogue.litmus")),
    ("exception.litmus", include_str!("../../litmus/exception.litmus")),
    ("stage2.litmus", include_str!("../../litmus/stage2.litmus")),
    ("contiguous.litmus", include_str!("../../litmus/contiguous.litmus")),
    ("contiguous-stage2.litmus", include_str!("../../litmus/contiguous-stage2.litmus")),
    ("contiguous-flags.litmus", include_str!("../../litmus/contiguous-flags.litmus")),
    ("tlbi.litmus", include_str!("../../litmus/tlbi.litmus")),
    ("two-stages.litmus", include_str!("../../litmus/two-stages.litmus")),
    ("x86.litmus", include_str!("../../litmus/x86.litmus")),
    ("x86-model.litmus", include_str!("../../litmus/x86-model.litmus")),
];

/// The tests in the crate.
///
/// ```
/// let tests = tablewright_machine::litmus::built_in()?;
/// assert!(tests.iter().any(|test| test.name == "ROT.inv+dmbst"));
/// # Ok::<(), tablewright_machine::litmus::ParseError>(())
/// ```
///
/// # Errors
/// None, as long as the tests of the crate pass.
pub fn built_in() -> Result<Vec<Test>, ParseError> {
    let mut tests = Vec::new();
    for (name, text) in FILES {
        tests.extend(parse(name, text)?);
    }
    Ok(tests)
}

//! What the well-known test takes besides, and how the log comes about.

use tablewright_experiments::dirty_log::{By, How, Options};
use tablewright_machine::Profile;

use super::Arguments;
use crate::error::Error;
use crate::kvm;
use crate::report;

/// What is asked for, if such a machine can do it.
pub fn of(arguments: &Arguments, profile: &Profile, vcpus: u16) -> Result<Options, Error> {
    let asked = &arguments.kvm;
    let usage = |why: String| Err(Error::Usage(why));
    let x86 = profile.architecture.is_x86();
    let by_hardware = arguments.log == By::Modification;
    if !x86 && (by_hardware || arguments.kvm.nested) {
        let option = if by_hardware {
            "--log modification"
        } else {
            "-n"
        };
        return usage(format!(
            "{option}: {} is arm64, and that is x86's",
            profile.name
        ));
    }
    if asked.all_set && by_hardware {
        return usage(
            "--all-set: not with --log modification: large leaves have to be closed first"
                .to_owned(),
        );
    }
    if asked.all_set && arguments.no_manual_protect {
        return usage("--all-set: not with -g: it is clearing the log that protects".to_owned());
    }
    check_pins(&asked.cpus, profile, vcpus)?;
    Ok(Options {
        by: arguments.log,
        all_set: asked.all_set,
        overlap: asked.overlap,
        nested: arguments.kvm.nested,
    })
}

/// The ways to disable that a machine has.
pub fn ways(arguments: &Arguments, profile: &Profile) -> Result<Vec<How>, Error> {
    match (arguments.how, profile.architecture.is_x86()) {
        (Some(how), false) if how != How::Tablewright => Err(Error::Usage(format!(
            "--how {}: tables are taken apart so on x86; {} is arm64",
            how.name(),
            profile.name
        ))),
        (Some(how), _) => Ok(vec![how]),
        (None, true) => Ok(How::ALL.to_vec()),
        (None, false) => Ok(vec![How::Tablewright]),
    }
}

/// That nothing is asked for that only a guest on KVM has.
pub fn only_on_kvm(asked: &kvm::Options) -> Result<(), Error> {
    let mut rest = asked.clone();
    (rest.all_set, rest.overlap, rest.nested) = (false, false, false);
    rest.cpus.clear();
    rest.unused()
}

/// A vCPU of the machine has a CPU of its own, and all are alike: it does not matter which.
fn check_pins(cpus: &[usize], profile: &Profile, vcpus: u16) -> Result<(), Error> {
    if cpus.is_empty() {
        return Ok(());
    }
    let (given, vcpus) = (cpus.len(), usize::from(vcpus));
    if given != vcpus && given != vcpus + 1 {
        return Err(Error::Usage(format!(
            "-c: {} for {}: one for each, and one more for the thread of the host",
            report::counted(given as u64, "CPU", "CPUs"),
            report::counted(vcpus as u64, "vCPU", "vCPUs")
        )));
    }
    let most = profile.system.cpus.map_or(usize::MAX, |cpus| cpus as usize);
    if let Some(cpu) = cpus.iter().find(|cpu| **cpu >= most) {
        return Err(Error::Usage(format!(
            "-c {cpu}: {} has CPUs 0 to {}",
            profile.name,
            most - 1
        )));
    }
    let twice = |at: &usize| cpus[..*at].contains(&cpus[*at]);
    match (1..given).find(twice) {
        Some(at) => Err(Error::Usage(format!(
            "-c {}: twice, and each CPU of the machine runs one",
            cpus[at]
        ))),
        None => Ok(()),
    }
}

//! The profile of a machine: by name on the command line, and completed for an experiment.
//!
//! A cost that is not known is not nothing. An experiment that depends on it runs with the
//! [`usual`] value, and says so; `tablewright machine check` says it for all experiments at once.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use tablewright_machine::{Cost, MAX_CPUS, Profile, ProfileError, Regime, Time};

use crate::error::Error;
use crate::output::report;

/// A profile on the command line. Takes any text, because a profile may be a file; a shell
/// completes the names of those that come with the program.
#[derive(Clone, Copy, Debug)]
pub struct Named;

impl TypedValueParser for Named {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Profile::built_in().map(PossibleValue::new)))
    }
}

/// An experiment on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experiment {
    MapMem,
    PageTableTest,
    DirtyLog,
    WriteProtect,
    TlbFlush,
    Migrate,
}

/// The name of the command, and the costs that its time depends on. The others are refinements:
/// without `bus` a system takes any number of invalidations, without `zero_shared` and
/// `latency_shared` its memory serves any number of CPUs, without `clean_again` a page is cleaned
/// as any other, and without `call`, `copy`, `word`, `slot` and `visit`, which are measured of a
/// host, calls take what is done in them.
const EXPERIMENTS: [(Experiment, &str, &str); 6] = [
    (Experiment::MapMem, "map-mem", "entry load table publish issue complete walk"),
    (
        Experiment::PageTableTest,
        "page-table-test",
        "entry load exchange table publish issue complete walk access exception transfer lock_take \
         lock_hand_over clean zero fetch latency",
    ),
    (
        Experiment::DirtyLog,
        "dirty-log",
        "entry load exchange table publish issue complete walk access exception transfer lock_take \
         zero fetch latency find_page interrupt exit",
    ),
    (
        Experiment::WriteProtect,
        "write-protect",
        "entry load exchange publish issue complete walk access exception transfer lock_take \
         lock_hand_over interrupt exit reverse_map",
    ),
    (
        Experiment::TlbFlush,
        "tlb-flush",
        "exchange issue complete exception transfer lock_take lock_hand_over interrupt \
         host_interrupt wake exit cycle",
    ),
    (
        Experiment::Migrate,
        "migrate",
        "entry load exchange table publish issue complete walk access exception transfer lock_take \
         interrupt",
    ),
];

fn costs(names: &str) -> impl Iterator<Item = Cost> {
    let names = names.split_whitespace();
    names.filter_map(|name| name.parse().ok())
}

impl Experiment {
    pub fn all() -> impl Iterator<Item = Self> {
        EXPERIMENTS.iter().map(|(experiment, ..)| *experiment)
    }

    const fn described(self) -> &'static (Self, &'static str, &'static str) {
        &EXPERIMENTS[self as usize]
    }

    pub const fn name(self) -> &'static str {
        self.described().1
    }

    /// The costs that its time depends on.
    pub fn depends_on(self) -> impl Iterator<Item = Cost> {
        costs(self.described().2)
    }

    /// The costs that it depends on and a profile leaves out.
    pub fn missing(self, profile: &Profile) -> Vec<Cost> {
        // Where hardware tells no other CPU, interrupts do.
        let kicks = self == Self::PageTableTest && profile.architecture.is_x86();
        let kicks = costs(if kicks { "interrupt exit" } else { "" });
        let all = self.depends_on().chain(kicks);
        all.filter(|cost| !profile.states(*cost)).collect()
    }

    /// Why it cannot run on such a machine, whatever things cost there.
    pub fn unsuitable(self, profile: &Profile) -> Option<&'static str> {
        let architecture = &profile.architecture;
        let (regime, marks) = (architecture.regime, architecture.hardware_dirty);
        let (small, x86) = (regime.page_shift() == 12, architecture.is_x86());
        let stage_1 = matches!(regime, Regime::Arm64Stage1 { wide: false, .. });
        let arm64 = stage_1 || matches!(regime, Regime::Arm64Stage2 { wide: false, .. });
        match self {
            _ if matches!(regime, Regime::Riscv { .. }) => {
                Some("its tables are of RISC-V, and no experiment is")
            }
            Self::PageTableTest if x86 && marks => {
                Some("its hardware marks what is written, and page-table-test is by faults")
            }
            Self::PageTableTest if !(x86 || stage_1 && small) => Some(
                "page-table-test runs on x86-64, and on arm64 with pages of 4 KiB and 48 bits of \
                 address",
            ),
            Self::DirtyLog if !(small && (x86 || arm64)) => Some(
                "dirty-log runs with pages of 4 KiB, on x86 and on arm64 with 48 bits of address",
            ),
            Self::DirtyLog if marks => {
                Some("its hardware marks what is written, and dirty-log is by faults")
            }
            Self::WriteProtect if !small => Some("write-protect runs with pages of 4 KiB"),
            Self::WriteProtect if marks => Some(
                "its hardware marks what is written: protecting everything cannot be combined with \
                 that",
            ),
            Self::Migrate if !(x86 || arm64 && small) => Some(
                "migrate runs on x86-64, and on arm64 with pages of 4 KiB and 48 bits of address",
            ),
            _ => None,
        }
    }

    /// Refuses a machine that cannot run it with so many vCPUs, which `option` asks for. The thread
    /// of the host has a CPU of its own: one of the profile's where the experiment is about it, one
    /// more elsewhere.
    pub fn fits(self, profile: &Profile, option: &str, vcpus: u16) -> Result<(), Error> {
        if let Some(why) = self.unsuitable(profile) {
            return Err(Error::input(&profile.name, why));
        }
        let cpus = profile.system.cpus.unwrap_or(u32::MAX);
        let host = u32::from(matches!(self, Self::DirtyLog | Self::Migrate));
        let most = cpus.saturating_sub(host).min(MAX_CPUS as u32 - 1);
        match u32::from(vcpus) <= most {
            true => Ok(()),
            false => Err(Error::Usage(format!(
                "{option} {vcpus}: {} has {} for them{}",
                profile.name,
                report::counted(most.into(), "CPU", "CPUs"),
                ["", ", besides the one of the host's thread"][host as usize]
            ))),
        }
    }

    /// Takes the usual value of each cost that it depends on and a profile leaves out, and gives
    /// what to say of it.
    pub fn complete(self, profile: &mut Profile) -> Option<String> {
        let missing = self.missing(profile);
        let take = |cost: Cost| {
            profile.state(cost, usual(cost));
            format!("{} {} ns", cost.name(), usual(cost).as_ps() / 1_000)
        };
        let taken: Vec<String> = missing.into_iter().map(take).collect();
        (!taken.is_empty()).then(|| {
            format!(
                "{} leaves out what {} depends on; taken as usual: {}",
                profile.name,
                self.name(),
                taken.join(", ")
            )
        })
    }

    /// A profile for it, by name or as a file, and what to warn of when the experiment has run: one
    /// that is refused says why, and that alone.
    pub fn load(self, name: &str) -> Result<(Profile, Option<String>), ProfileError> {
        let mut profile = Profile::load(name)?;
        let left_out = self.complete(&mut profile);
        Ok((profile, left_out))
    }
}

/// The built-in profile of a published system.
pub fn of_system(system: &str) -> Result<Option<Profile>, Error> {
    for name in Profile::built_in() {
        let profile = Profile::load(name)?;
        if profile.system.published_as.iter().any(|it| it == system) {
            return Ok(Some(profile));
        }
    }
    Ok(None)
}

/// Costs where nothing is known, in nanoseconds: round figures of the right order. Zero bounds
/// nothing, or is no more than what a call does.
const USUAL: [(&str, u64); 33] = [
    ("entry", 3),
    ("load", 1),
    ("access", 1),
    ("exchange", 6),
    ("table", 500),
    ("publish", 16),
    ("issue", 20),
    ("lock_take", 20),
    ("complete", 1_000),
    ("find_page", 1_000),
    ("walk", 5),
    ("exception", 600),
    ("exit", 600),
    ("transfer", 60),
    ("lock_hand_over", 200),
    ("clean", 500),
    ("clean_again", 300),
    ("zero", 400),
    ("fetch", 5),
    ("latency", 90),
    ("interrupt", 1_500),
    ("host_interrupt", 1_000),
    ("wake", 5_000),
    ("reverse_map", 70),
    ("cycle", 20_000),
    ("bus", 0),
    ("call", 0),
    ("copy", 0),
    ("word", 0),
    ("slot", 0),
    ("zero_shared", 0),
    ("latency_shared", 0),
    ("visit", 0),
];

/// Value of a cost if nothing is known.
pub fn usual(cost: Cost) -> Time {
    let known = USUAL.iter().find(|(name, _)| *name == cost.name());
    Time::ns(known.map_or(0, |(_, ns)| *ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;

    #[test]
    fn every_cost_has_a_usual_value_and_every_experiment_names_such_as_there_are() {
        for (at, (experiment, _, names)) in EXPERIMENTS.iter().enumerate() {
            assert_eq!(*experiment as usize, at);
            for name in names.split_whitespace() {
                let cost: Cost = name.parse().unwrap();
                assert!(usual(cost) > Time::ZERO, "{name}");
            }
        }
        for cost in Cost::all() {
            let known = USUAL.iter().any(|(name, _)| *name == cost.name());
            assert!(known, "{}", cost.name());
        }
    }

    #[test]
    fn what_a_profile_leaves_out_is_taken_as_usual_and_named() {
        let mut profile = Profile::load("neutral").unwrap();
        let said = Experiment::TlbFlush.complete(&mut profile).unwrap();
        assert!(said.contains("neutral leaves out") && said.contains("cycle 20000 ns"), "{said}");
        assert_eq!(profile.costs.cycle, Time::us(20));
        assert_eq!(Experiment::TlbFlush.complete(&mut profile), None);
        let said = Experiment::WriteProtect.complete(&mut profile).unwrap();
        assert!(said.contains("reverse_map"), "{said}");
    }

    /// Wide descriptors are another format, which `machine check` is to say as the experiment does.
    #[test]
    fn a_machine_with_52_bits_of_address_is_not_for_all() {
        let mut profile = Profile::load("neutral").unwrap();
        assert_eq!(Experiment::PageTableTest.unsuitable(&profile), None);
        let granule = tablewright_machine::Granule::K4;
        profile.architecture.regime = Regime::Arm64Stage1 { granule, wide: true };
        for experiment in [Experiment::PageTableTest, Experiment::Migrate] {
            let why = experiment.unsuitable(&profile);
            assert!(why.is_some_and(|why| why.contains("48 bits")));
        }
    }

    /// The published tables say which experiment a profile's system was measured with.
    #[test]
    fn built_in_profiles_give_what_their_own_experiment_depends_on() {
        for name in Profile::built_in().filter(|name| *name != "neutral") {
            let profile = Profile::load(name).unwrap();
            let is_own = |experiment: &Experiment| {
                let rows = published::built_in(experiment.name());
                rows.iter().any(|row| row.is_of(&profile))
            };
            let own = match name {
                // Published in words, with no figure of the table.
                "x86-64-vcpus" => Experiment::DirtyLog,
                _ => Experiment::all().find(is_own).expect(name),
            };
            let missing: Vec<_> = own.missing(&profile).into_iter().map(Cost::name).collect();
            assert!(missing.is_empty(), "{name}: {missing:?}");
        }
    }
}

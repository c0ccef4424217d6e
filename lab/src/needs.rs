//! Which costs each experiment depends on, and what is taken for those that a profile leaves out.
//!
//! A cost that is not known is not nothing. An experiment that depends on it runs with the
//! [`usual`] value, and says so; `tablewright machine check` says it for all experiments at once.

use tablewright_machine::{Cost, MAX_CPUS, Profile, Regime, Time};

use crate::error::Error;
use crate::report;

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

impl Experiment {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::MapMem,
        Self::PageTableTest,
        Self::DirtyLog,
        Self::WriteProtect,
        Self::TlbFlush,
        Self::Migrate,
    ];

    /// What the command is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MapMem => "map-mem",
            Self::PageTableTest => "page-table-test",
            Self::DirtyLog => "dirty-log",
            Self::WriteProtect => "write-protect",
            Self::TlbFlush => "tlb-flush",
            Self::Migrate => "migrate",
        }
    }

    /// The costs that its time depends on. `bus`, which bounds how many invalidations a system
    /// takes, `clean_again`, and `call`, `copy` and `visit`, which are measured of a host, are
    /// refinements: without them a system takes any number, a page is cleaned as any other, and
    /// calls take what is done in them.
    const fn costs(self) -> &'static str {
        match self {
            Self::MapMem => "entry load table publish issue complete walk",
            Self::PageTableTest => {
                "entry load exchange table publish issue complete walk access exception transfer lock_take \
                 lock_hand_over clean zero fetch latency"
            }
            Self::DirtyLog => {
                "entry load exchange table publish issue complete walk access exception transfer lock_take zero \
                 fetch latency find_page interrupt exit"
            }
            Self::WriteProtect => {
                "entry load exchange publish issue complete walk access exception transfer lock_take \
                 lock_hand_over interrupt exit reverse_map"
            }
            Self::TlbFlush => {
                "exchange issue complete exception transfer lock_take lock_hand_over interrupt host_interrupt \
                 wake exit cycle"
            }
            Self::Migrate => {
                "entry load exchange table publish issue complete walk access exception transfer lock_take interrupt"
            }
        }
    }

    /// The same, as costs.
    pub fn depends_on(self) -> impl Iterator<Item = Cost> {
        self.costs()
            .split_whitespace()
            .filter_map(|name| name.parse().ok())
    }

    /// The costs that it depends on and a profile leaves out.
    pub fn missing(self, profile: &Profile) -> Vec<Cost> {
        // Where hardware tells no other CPU, interrupts do.
        let kicks = self == Self::PageTableTest && profile.architecture.is_x86();
        let kicks = ["interrupt", "exit"]
            .into_iter()
            .filter(|_| kicks)
            .filter_map(|name| name.parse().ok());
        self.depends_on()
            .chain(kicks)
            .filter(|cost| !profile.states(*cost))
            .collect()
    }

    /// Why it cannot run on such a machine, whatever things cost there.
    pub fn unsuitable(self, profile: &Profile) -> Option<&'static str> {
        let architecture = &profile.architecture;
        let small = architecture.regime.page_shift() == 12;
        let marks = architecture.hardware_dirty;
        let arm64 = matches!(
            architecture.regime,
            Regime::Arm64Stage1 { wide: false, .. } | Regime::Arm64Stage2 { wide: false, .. }
        );
        let stage_1 = matches!(architecture.regime, Regime::Arm64Stage1 { .. });
        match self {
            Self::PageTableTest if architecture.is_x86() && marks => {
                Some("its hardware marks what is written, and page-table-test is by faults")
            }
            Self::PageTableTest if !(architecture.is_x86() || arm64 && stage_1 && small) => Some(
                "page-table-test runs on x86-64, and on arm64 with pages of 4 KiB and 48 bits of address",
            ),
            Self::DirtyLog if !(small && (architecture.is_x86() || arm64)) => Some(
                "dirty-log runs with pages of 4 KiB, on x86 and on arm64 with 48 bits of address",
            ),
            Self::DirtyLog if marks => {
                Some("its hardware marks what is written, and dirty-log is by faults")
            }
            Self::WriteProtect if !small => Some("write-protect runs with pages of 4 KiB"),
            Self::WriteProtect if marks => Some(
                "its hardware marks what is written: protecting everything cannot be combined with that",
            ),
            Self::Migrate if !(architecture.is_x86() || arm64 && small) => Some(
                "migrate runs on x86-64, and on arm64 with pages of 4 KiB and 48 bits of address",
            ),
            _ => None,
        }
    }
}

impl Experiment {
    /// That a machine can run it with so many vCPUs. The thread of the host has a CPU of its own:
    /// one of the profile's where the experiment is about it, one more elsewhere.
    pub fn fits(self, profile: &Profile, vcpus: u16) -> Result<(), Error> {
        if let Some(why) = self.unsuitable(profile) {
            return Err(Error::input(&profile.name, why));
        }
        let cpus = profile.system.cpus.unwrap_or(u32::MAX);
        let host = u32::from(self == Self::DirtyLog);
        let most = (cpus - host).min(MAX_CPUS as u32 - 1);
        match u32::from(vcpus) <= most {
            true => Ok(()),
            false => Err(Error::Usage(format!(
                "-v {vcpus}: {} has {} for them{}",
                profile.name,
                report::counted(most.into(), "CPU", "CPUs"),
                ["", ", besides the one of the host's thread"][host as usize]
            ))),
        }
    }
}

/// What a cost is where nothing is known, in nanoseconds: round figures of the right order.
pub fn usual(cost: Cost) -> Time {
    Time::ns(match cost.name() {
        "entry" => 3,
        "load" | "access" => 1,
        "exchange" => 6,
        "table" => 500,
        "publish" => 16,
        "issue" | "lock_take" => 20,
        "complete" | "find_page" => 1_000,
        "walk" => 5,
        "exception" | "exit" => 600,
        "transfer" => 60,
        "lock_hand_over" => 200,
        "clean" => 500,
        "clean_again" => 300,
        "zero" => 400,
        "fetch" => 5,
        "latency" => 90,
        "interrupt" => 1_500,
        "host_interrupt" => 1_000,
        "wake" => 5_000,
        "reverse_map" => 70,
        "cycle" => 20_000,
        // What bounds nothing.
        _ => 0,
    })
}

/// Takes the usual value of each cost that an experiment depends on and a profile leaves out, and
/// gives what to say of it.
pub fn complete(profile: &mut Profile, experiment: Experiment) -> Option<String> {
    let missing = experiment.missing(profile);
    let taken: Vec<String> = missing
        .into_iter()
        .map(|cost| {
            profile.state(cost, usual(cost));
            format!("{} {} ns", cost.name(), usual(cost).as_ps() / 1_000)
        })
        .collect();
    (!taken.is_empty()).then(|| {
        format!(
            "{} leaves out what {} depends on; taken as usual: {}",
            profile.name,
            experiment.name(),
            taken.join(", ")
        )
    })
}

/// A profile for an experiment, by name or as a file, and what to [warn] of when the experiment has
/// run.
pub fn load(
    name: &str,
    experiment: Experiment,
) -> Result<(Profile, Option<String>), tablewright_machine::ProfileError> {
    let mut profile = Profile::load(name)?;
    let left_out = complete(&mut profile, experiment);
    Ok((profile, left_out))
}

/// Says what a profile leaves out. An experiment that is refused says why, and that alone.
pub fn warn(left_out: Option<&String>) {
    if let Some(left_out) = left_out {
        report::complain("warning", left_out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cost_that_an_experiment_names_exists_and_has_a_usual_value() {
        for experiment in Experiment::ALL {
            for name in experiment.costs().split_whitespace() {
                let cost: Cost = name.parse().unwrap();
                assert!(usual(cost) > Time::ZERO, "{name}");
            }
        }
    }

    #[test]
    fn what_a_profile_leaves_out_is_taken_as_usual_and_named() {
        let mut profile = Profile::load("neutral").unwrap();
        let said = complete(&mut profile, Experiment::TlbFlush).unwrap();
        assert!(
            said.contains("neutral leaves out") && said.contains("cycle 20000 ns"),
            "{said}"
        );
        assert_eq!(profile.costs.cycle, Time::us(20));
        assert_eq!(complete(&mut profile, Experiment::TlbFlush), None);
        assert!(
            complete(&mut profile, Experiment::WriteProtect)
                .unwrap()
                .contains("reverse_map")
        );
    }

    /// Wide descriptors are another format, which `machine check` is to say as the experiment does.
    #[test]
    fn a_machine_with_52_bits_of_address_is_not_for_all() {
        let mut profile = Profile::load("neutral").unwrap();
        assert_eq!(Experiment::PageTableTest.unsuitable(&profile), None);
        let granule = tablewright_machine::Granule::K4;
        profile.architecture.regime = Regime::Arm64Stage1 {
            granule,
            wide: true,
        };
        for experiment in [Experiment::PageTableTest, Experiment::Migrate] {
            assert!(
                experiment
                    .unsuitable(&profile)
                    .is_some_and(|why| why.contains("48 bits"))
            );
        }
    }

    /// What the program measures of its own profiles comes from what they give.
    #[test]
    fn built_in_profiles_give_what_their_own_experiment_depends_on() {
        for name in Profile::built_in().filter(|name| *name != "neutral") {
            let profile = Profile::load(name).unwrap();
            let own = match name {
                "kunpeng-920" => Experiment::PageTableTest,
                "x86-12-vcpus" => Experiment::WriteProtect,
                "x86-416-vcpus" | "x86-64-vcpus" => Experiment::DirtyLog,
                "hyperv-16-vcpus" => Experiment::TlbFlush,
                _ => Experiment::MapMem,
            };
            let missing: Vec<_> = own.missing(&profile).into_iter().map(Cost::name).collect();
            assert!(missing.is_empty(), "{name}: {missing:?}");
        }
    }
}

//! The experiments on the KVM of this computer: what they can be asked, and what is common to their
//! answers.

#[cfg_attr(
    all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")),
    path = "here.rs"
)]
#[cfg_attr(
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))),
    path = "nowhere.rs"
)]
mod guests;
pub mod summary;

use std::time::Instant;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::error::Error;
use crate::guest::input::Backing;
use crate::output::progress::Progress;
use crate::output::report;
use crate::size::human;

pub use guests::{able, computer, free, host, round};
pub use summary::{HostKind, PhaseRow};

/// Phases of a guest that are run in each round.
#[derive(Clone, Copy, Debug)]
pub enum Phases {
    /// Those of the well-known test of logging, and one more pass at the end.
    Log,
    /// The start of a log, and a pass after it that writes or reads; the start alone without.
    Start(Option<bool>),
    /// Those of the well-known test of faults on one table.
    Faults,
}

/// Abilities of the KVM here.
#[derive(Clone, Copy, Debug)]
pub struct Able {
    /// Reading a log may leave it as it is.
    pub manual: bool,
    /// A log may begin with all pages in it.
    pub all_set: bool,
}

/// Platform of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    /// The software machine, in virtual time
    Machine,
    /// Guests on the KVM of this computer, in real time
    Kvm,
}

/// Options of a run on KVM alone.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "With --on kvm")]
pub struct Options {
    /// How often all of it is done, each time with a new VM; figures are medians; also of
    /// write-protect --tables [default: 5, and 21]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Written pages are in a ring of so many entries for each vCPU, and not in a bitmap
    #[arg(long, value_name = "ENTRIES", num_args = 0..=1, default_missing_value = "65536")]
    pub ring: Option<u32>,
    /// The log begins with all pages in it, so that enabling it protects nothing; of dirty-log on
    /// the machine as well
    #[arg(long, conflicts_with = "ring")]
    pub all_set: bool,
    /// The vCPUs go on while logging is enabled, read, cleared and disabled: their longest waits
    /// are of these calls
    #[arg(long)]
    pub stalls: bool,
    /// Before it runs, say what this profile predicts (dirty-log, of 4 KiB or huge pages, by
    /// bitmap)
    #[arg(long, value_name = "PROFILE")]
    pub predict: Option<String>,
    /// Each vCPU accesses all of the memory; of dirty-log on the machine as well
    #[arg(short = 'o', long)]
    pub overlap: bool,
    /// The guest is as that of Linux's selftests, with their defaults: at ring 0, with tables of 4
    /// KiB pages, 1G for each vCPU, and a log that begins with all pages in it
    #[arg(long, conflicts_with_all = ["nested", "predict"])]
    pub as_selftests: bool,
    /// The vCPUs run as guests of the guest, with nested paging of AMD's: KVM keeps tables for two
    /// stages at once; of dirty-log on the machine as well
    #[arg(short = 'n', long)]
    pub nested: bool,
    /// The CPUs for the vCPUs, one after the other, and one for the thread that asks KVM; of
    /// dirty-log on the machine, where each has one of its own in any case, as well
    #[arg(short = 'c', long, value_name = "CPUS", value_delimiter = ',')]
    pub cpus: Vec<usize>,
}

impl Options {
    /// Refuses what is asked for where there is no KVM.
    pub fn unused(&self) -> Result<(), Error> {
        let options = [
            (self.rounds.is_some(), "--rounds"),
            (self.ring.is_some(), "--ring"),
            (self.all_set, "--all-set"),
            (self.stalls, "--stalls"),
            (self.predict.is_some(), "--predict"),
            (self.overlap, "-o"),
            (self.as_selftests, "--as-selftests"),
            (self.nested, "-n"),
            (!self.cpus.is_empty(), "-c"),
        ];
        Error::refuse(&options, ": only with --on kvm")
    }

    /// How much memory a vCPU has if nothing is said.
    pub const fn usual_bytes(&self) -> u64 {
        match self.as_selftests {
            true => SELFTESTS_BYTES,
            false => USUAL_BYTES,
        }
    }

    /// How often.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(5)
    }
}

/// A guest on KVM, in the words of the experiments.
#[derive(Clone, Debug)]
pub struct Asked {
    pub backing: Backing,
    /// In all.
    pub bytes: u64,
    pub vcpus: u32,
    pub first: Option<u64>,
    /// The guest's mode says how many bits of address it has; none: as many as there are.
    pub bits: Option<u32>,
    pub slots: u32,
    pub manual: bool,
    pub iterations: u32,
    pub write_percent: u8,
    pub random: bool,
    pub seed: u64,
    /// The vCPUs go on while the log is disabled.
    pub running: bool,
    /// After this there are no more rounds than are needed.
    pub until: Option<Instant>,
    pub options: Options,
}

impl Asked {
    /// A guest that writes all it has, as the well-known test has it.
    pub fn new(backing: Backing, bytes: u64, vcpus: u32, options: Options) -> Self {
        Self {
            backing,
            bytes,
            vcpus,
            first: None,
            bits: None,
            slots: 1,
            manual: true,
            iterations: 2,
            write_percent: 100,
            random: false,
            seed: 1,
            running: false,
            until: None,
            options,
        }
    }
}

/// Bytes of a guest, if none are given.
const USUAL_BYTES: u64 = 256 << 20;
/// And of one of the selftests.
const SELFTESTS_BYTES: u64 = 1 << 30;

/// Fewer rounds have no median, however long they take.
const FEWEST: usize = 2;

/// Rounds of a guest, in one.
pub fn rounds(
    asked: &Asked,
    progress: &mut Progress,
    phases: Phases,
) -> Result<Vec<PhaseRow>, Error> {
    let mut all = Vec::new();
    for number in 1..=asked.options.rounds() {
        let is_late = asked.until.is_some_and(|until| Instant::now() >= until);
        if is_late && all.len() >= FEWEST {
            break;
        }
        progress.step(&format!("round {number}"));
        all.push(round(asked, phases)?);
    }
    Ok(summary::rows(&all))
}

/// The phases of `dirty-log`, without printing them.
pub fn measure(asked: &Asked) -> Result<Vec<PhaseRow>, Error> {
    let mut progress = Progress::new(asked.options.rounds().into());
    rounds(asked, &mut progress, Phases::Log)
}

/// Of a phase.
pub fn seconds(rows: &[PhaseRow], name: &str) -> f64 {
    let row = rows.iter().find(|row| row.phase == name);
    row.map_or(0.0, |row| row.wall / 1e9)
}

/// The guest, for programs.
pub fn parameters(asked: &Asked, host: &HostKind) -> Value {
    json!({
        "on": "kvm",
        "host": host,
        "source": asked.backing.name,
        "bytes": asked.bytes,
        "bytes_per_vcpu": asked.bytes / u64::from(asked.vcpus.max(1)),
        "vcpus": asked.vcpus,
        "iterations": asked.iterations,
        "slots": asked.slots,
        "write_percent": asked.write_percent,
        "random_access": asked.random,
        "overlap": asked.options.overlap,
        "as_selftests": asked.options.as_selftests,
        "nested": asked.options.nested,
        "manual_protect": asked.manual,
        "all_set": asked.options.all_set,
        "ring": asked.options.ring,
        "run_while_disabling": asked.running,
        "run_in_all_calls": asked.options.stalls,
        "rounds": asked.options.rounds(),
    })
}

/// The guest, for people.
pub fn head(asked: &Asked, host: &HostKind) -> String {
    let options = &asked.options;
    let log = match (options.ring, asked.manual, options.all_set) {
        (Some(entries), ..) => format!("rings of {}", report::count(entries.into())),
        (None, true, true) => "manual protection, all set".to_owned(),
        (None, true, false) => "manual protection".to_owned(),
        (None, false, _) => "reading clears".to_owned(),
    };
    let line = format!(
        "{}{}, {} of {} in all, {log}, {}",
        report::counted(u64::from(asked.vcpus), "vCPU", "vCPUs"),
        match (options.nested, options.as_selftests) {
            (true, _) => " of a guest's guest",
            (_, true) => " as of the selftests",
            _ => "",
        },
        human(asked.bytes),
        asked.backing.name,
        report::counted(u64::from(options.rounds()), "round", "rounds"),
    );
    let wrapped = |line: &str| report::wrapped(line, 78, "  ");
    format!("{}\n{}\n\n", wrapped(&host.line), wrapped(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ran_fits_a_terminal() {
        let backing = "anonymous_hugetlb_16gb".parse().expect("a backing");
        let options =
            Options { nested: true, all_set: true, rounds: Some(1000), ..Options::default() };
        let asked = Asked::new(backing, 1000 << 30, 1024, options);
        let head = head(&asked, &computer().expect("Linux"));
        assert!(head.contains("1,024 vCPUs of a guest's guest, 1000 GiB"), "{head}");
        let longest = head.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{head}");
    }
}

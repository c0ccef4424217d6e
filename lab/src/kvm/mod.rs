//! The experiments on the KVM of this computer: what they can be asked, and what is common to their
//! answers.

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod here;
pub mod measured;
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod nowhere;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
pub mod sequence;
pub mod summary;

use std::time::Instant;

use clap::{Args, ValueEnum};
use tablewright_experiments::input::Backing;

use crate::error::Error;

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
pub use here::{
    computer, dirty_log, free, has_manual, host, measure, measured, page_table_test, write_protect,
};
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
pub use nowhere::{
    computer, dirty_log, free, has_manual, host, measure, measured, page_table_test, write_protect,
};

pub use summary::{HostKind, PhaseRow};

/// Where an experiment runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    /// The software machine, in virtual time
    Machine,
    /// Guests on the KVM of this computer, in real time
    Kvm,
}

/// What can be asked of a run on KVM alone.
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
    /// That nothing of it is asked for where there is no KVM.
    ///
    /// # Errors
    /// Something is.
    pub fn unused(&self) -> Result<(), Error> {
        let options = [
            (self.rounds.is_some(), "--rounds"),
            (self.ring.is_some(), "--ring"),
            (self.all_set, "--all-set"),
            (self.stalls, "--stalls"),
            (self.predict.is_some(), "--predict"),
            (self.overlap, "-o"),
            (self.nested, "-n"),
            (!self.cpus.is_empty(), "-c"),
        ];
        match options.iter().find(|(given, _)| *given) {
            Some((_, option)) => Err(Error::Usage(format!("{option}: only with --on kvm"))),
            None => Ok(()),
        }
    }

    /// How often.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(5)
    }
}

/// That nothing is asked for that is the machine's alone, where an experiment runs on something
/// else.
///
/// # Errors
/// Something is.
pub fn only_machine(on: &str, options: &[(bool, &str)]) -> Result<(), Error> {
    match options.iter().find(|(given, _)| *given) {
        Some((_, option)) => Err(Error::Usage(format!("{option}: not with --on {on}"))),
        None => Ok(()),
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

/// What a guest has where nothing is said.
pub const USUAL_BYTES: u64 = 256 << 20;

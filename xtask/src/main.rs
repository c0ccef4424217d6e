//! Boots a Linux that knows nothing of it under the hypervisor, in QEMU.
//!
//! | command | |
//! |---|---|
//! | `cargo xtask fetch` | fetches what is missing, and says how to do it by hand |
//! | `cargo xtask boot` | fetches what is missing, builds, boots, shows console and counters |
//! | `cargo xtask check` | watches what the hypervisor executes |
//! | `cargo xtask formats` | asks emulated processors about tables of each format |
//! | `cargo xtask inspect` | holds what is read of guests' tables against what QEMU says |
//! | `cargo xtask kvm` | compares experiments on KVM inside emulated computers |
//! | `cargo xtask linear` | counts the barriers of a linear map, in QEMU and on the machine |
//! | `cargo xtask log-start` | counts the instructions that the start of a log takes |
//! | `cargo xtask example` | boots an example kernel, of `examples/`, and shows what it says |
//! | `cargo xtask migrate` | has QEMU migrate a guest on this computer's KVM, as predicted |
//! | `cargo xtask matrix` | boots the kernels of two releases of Debian on two versions of QEMU |
//! | `cargo xtask mutants` | runs the engine's tests on mutants of it |
//! | `cargo xtask processes` | counts the barriers of a kernel whose processes fork |
//! | `cargo xtask smmu` | has a device go by a guest's tables, through a system MMU |
//! | `cargo xtask tlb-flush` | counts what remote flushes cost a guest of x86-64 |
//! | `cargo xtask test-guest` | runs all boots, each of which has to come out right |

mod boot;
mod cases;
mod check;
mod child;
mod console;
mod counted;
#[path = "../../hypervisor/src/counters.rs"]
mod counters;
mod debian;
mod emulator;
mod example;
mod fetch;
mod flushes;
mod formats;
mod guest_case;
mod guests;
mod hyperv;
mod hyperv_tests;
mod initramfs;
mod inspect;
mod kvm;
mod kvm_figures;
mod linear;
mod load;
mod log_start;
mod matrix;
mod measure;
mod migrate;
mod mutants;
mod out;
mod planted;
#[cfg(test)]
#[path = "../../hypervisor/src/power.rs"]
mod power;
#[cfg(test)]
mod power_tests;
mod processes;
mod qemu;
mod selftests;
mod several;
mod signals;
mod sizes;
mod smmu;
mod test_guest;
mod tools;
mod watch;
mod x86;
#[path = "../../hypervisor/x86/src/host/counters.rs"]
mod x86_counters;

use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

use boot::BootArgs;

/// An error, in one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, or a program, and what happened to it.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    /// A part is missing, or is not what it should be.
    #[error("{0}")]
    Other(String),
    /// A command that has run, and failed.
    #[error("{0}")]
    Failed(String),
    /// A command that cannot be run with what is installed.
    #[error("{0}")]
    Missing(String),
    /// The user has ended it.
    #[error("interrupted")]
    Interrupted,
}

/// The result of anything here.
pub type Result<T> = std::result::Result<T, Error>;

/// Names the file or the program that an error is about.
pub trait About<T> {
    /// The error with its subject.
    ///
    /// # Errors
    /// The same, named.
    fn about(self, what: impl std::fmt::Display) -> Result<T>;
}

impl<T> About<T> for std::io::Result<T> {
    fn about(self, what: impl std::fmt::Display) -> Result<T> {
        self.map_err(|error| Error::Io(what.to_string(), error))
    }
}

/// Boots a Linux under the hypervisor
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch what a boot needs and is missing, and do nothing else
    Fetch,
    /// Boot one guest, and show its console and the hypervisor's counters
    Boot(BootArgs),
    /// Hold what the hypervisor does to its guest's tables against the rules, with bugs planted and
    /// without
    Check(check::CheckArgs),
    /// Run the engine's tests on mutants of it, all in one build, and say which no test sees
    Mutants(mutants::MutantsArgs),
    /// Run the experiments on KVM inside emulated computers, and compare their counts with each
    /// other and with this one's
    Kvm(kvm::KvmArgs),
    /// Has QEMU migrate a guest on this computer's KVM, beside what `tablewright migrate` predicts
    Migrate(migrate::MigrateArgs),
    /// Make the linear map step by step, and count its barriers and invalidations, in QEMU and on
    /// the software machine
    Linear,
    /// Count the instructions that the start of a log takes, for guests of 256 MiB to 4 GiB
    LogStart {
        /// On stage 2, or on nested paging
        #[arg(long, value_enum, default_value_t)]
        arch: Arch,
    },
    /// Boot the kernels of Debian 12 and 13 on the QEMU that is installed and on Debian 13's
    Matrix,
    /// Ask emulated processors about tables of every format of arm64 and RISC-V
    Formats {
        /// One of the processors alone: rv64, max, cortex-a57
        #[arg(long, value_name = "PROCESSOR")]
        only: Option<String>,
    },
    /// Have a device go by a guest's tables, through a system MMU, and show that it is told what to
    /// forget
    Smmu,
    /// Boot an example kernel, and show what it says
    Example {
        /// Which
        #[arg(value_name = "NAME")]
        kernel: example::Kernel,
        /// Find what `tablewright watch` finds of any kernel, by QEMU 11.1 of Debian 13's backports
        #[arg(long)]
        watch: bool,
    },
    /// Run a kernel whose processes fork, and count its barriers and invalidations step by step, in
    /// QEMU
    Processes {
        /// One line of JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Have a guest of x86-64 flush other processors' TLBs, by interrupts and by hypercalls, and
    /// count
    TlbFlush {
        /// One line of JSON for each instead of a table
        #[arg(long)]
        json: bool,
        /// How often each thread goes through the file
        #[arg(long, default_value_t = 20, value_name = "N",
            value_parser = clap::value_parser!(u32).range(1..=100_000))]
        rounds: u32,
    },
    /// Watch Debian's kernels for what is wrong with their TLB maintenance, and find planted bugs
    Watch(watch::WatchArgs),
    /// Hold what `tablewright inspect` reads of guests against what QEMU says of them
    Inspect(inspect::InspectArgs),
    /// Boot a matrix of guests under load, and check what comes out
    TestGuest(test_guest::TestArgs),
}

/// How large the leaves of stage 2 are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Leaves {
    /// Pages of 4 KiB
    #[value(name = "4k")]
    Pages,
    /// Blocks of 2 MiB
    #[value(name = "2m")]
    Blocks,
    /// In turn 2 MiB by a block and 2 MiB by pages
    Mixed,
    /// Blocks of 1 GiB
    #[value(name = "1g")]
    Huge,
}

/// How writes are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// In a bitmap; each leaf is protected
    Bitmap,
    /// In a ring for each CPU; each leaf is protected
    Ring,
    /// In a bitmap; all memory is protected in one step
    All,
    /// In a bitmap; hardware marks in the leaf what was written
    Hardware,
}

/// The name of a value, as it is said on a command line.
pub fn name_of<T: ValueEnum>(value: &T) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
}

/// The architecture of the guest's processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// Armv8, on stage 2
    #[default]
    Arm64,
    /// AMD64, on nested paging, in a hypervisor that the guest takes for Hyper-V
    #[value(name = "x86-64")]
    X86_64,
}

/// The most that one boot of a test may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Without a subcommand there is nothing to do.
fn needed() -> String {
    let cli = Cli::command();
    let names: Vec<_> = cli.get_subcommands().map(clap::Command::get_name).collect();
    format!("error: a subcommand is needed: {}", names.join(", "))
}

/// Whether the files that were named can be what they should be, before anything is built for them.
fn look_at_files(args: &BootArgs) -> Result<()> {
    for file in [&args.kernel, &args.initrd].into_iter().flatten() {
        if !std::fs::metadata(file).about(file.display())?.is_file() {
            return Err(Error::Other(format!("{}: no file", file.display())));
        }
    }
    match (&args.kernel, args.arch) {
        (Some(kernel), Arch::Arm64) => qemu::kernel_size(kernel).map(drop),
        (Some(kernel), Arch::X86_64) => hyperv::sectors(kernel).map(drop),
        (None, _) => Ok(()),
    }
}

/// Boots a guest, or several.
fn boot(args: &BootArgs) -> Result<()> {
    look_at_files(args)?;
    match args.arch {
        Arch::X86_64 => hyperv::boot(args),
        Arch::Arm64 => {
            args.check_arm64()?;
            match args.guests.is_some() || args.small.is_some() {
                true => several::boot(args),
                false => boot::run(args),
            }
        }
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            // One line: the rest is usage.
            let text = match error.kind() {
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => needed(),
                _ => error.to_string(),
            };
            let what = text.split("\n\n").next().unwrap_or_default();
            let words: Vec<&str> = what.split_whitespace().collect();
            eprintln!("{}", words.join(" "));
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let done = match cli.command {
        Command::Fetch => fetch::guest(None).map(|_| ()),
        Command::Boot(args) => boot(&args),
        Command::Formats { only } => formats::run(only.as_deref(), |line| say!("{line}")),
        Command::Smmu => smmu::run(|line| say!("{line}")),
        Command::Matrix => matrix::run(|line| say!("{line}")),
        Command::Linear => linear::run(|line| say!("{line}")),
        Command::Check(args) => check::run(&args),
        Command::Kvm(args) if args.selftests => selftests::run(),
        Command::Kvm(args) => kvm::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Mutants(args) => mutants::run(&args),
        Command::LogStart { arch } => log_start::table(arch),
        Command::Example { kernel, watch } => example::run(kernel, watch, |line| say!("{line}")),
        Command::Processes { json } => processes::run(json, |line| say!("{line}")),
        Command::TlbFlush { json, rounds } => measure::run(json, rounds),
        Command::Watch(args) => watch::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::TestGuest(args) => test_guest::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            // As of clap: 2 is for what was asked; and of shells: 130 is Ctrl-C.
            ExitCode::from(match error {
                Error::Failed(_) => 1,
                Error::Interrupted => 130,
                _ => 2,
            })
        }
    }
}

//! Boots a Linux that knows nothing of it under the hypervisor, in QEMU.
//!
//! | command | |
//! |---|---|
//! | `cargo xtask fetch` | fetches what is missing, and says how to do it by hand |
//! | `cargo xtask boot` | for a person: fetches what is missing, builds, boots, shows the guest's console and the hypervisor's counters |
//! | `cargo xtask linear` | makes the linear map step by step, and counts its barriers and invalidations, in QEMU and on the software machine |
//! | `cargo xtask log-start` | counts the instructions that the start of a log takes |
//! | `cargo xtask processes` | runs a kernel whose processes fork, and counts its barriers and invalidations; `--json` |
//! | `cargo xtask tlb-flush` | has a guest of x86-64 flush other processors' TLBs, by interrupts and by hypercalls, and counts |
//! | `cargo xtask test-guest` | for a machine: a matrix of boots, each of which has to come out right |

mod counted;
#[path = "../../hypervisor/src/counters.rs"]
mod counters;
mod fetch;
mod flushes;
mod hyperv;
mod hyperv_tests;
mod initramfs;
mod linear;
mod load;
mod log_start;
mod measure;
mod processes;
mod qemu;
mod test_guest;
mod x86;
#[path = "../../hypervisor/x86/src/host/counters.rs"]
mod x86_counters;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use qemu::{Boot, End};

/// What goes wrong, in one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, or a program, and what happened to it.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    /// What is missing, or is not what it should be.
    #[error("{0}")]
    Other(String),
    /// What has run, and failed.
    #[error("{0}")]
    Failed(String),
}

/// What comes out of anything here.
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
    /// Make the linear map step by step, and count its barriers and invalidations, in QEMU and on the software machine
    Linear,
    /// Count the instructions that the start of a log takes, for guests of 256 MiB to 4 GiB
    LogStart,
    /// Run a kernel whose processes fork, and count its barriers and invalidations step by step, in QEMU
    Processes {
        /// One line of JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Have a guest of x86-64 flush other processors' TLBs, by interrupts and by hypercalls, and count
    TlbFlush {
        /// One line of JSON for each instead of a table
        #[arg(long)]
        json: bool,
        /// How often each thread goes through the file
        #[arg(long, default_value_t = 20, value_name = "N")]
        rounds: u32,
    },
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
}

/// The name of a value, as it is said on a command line.
pub fn name_of<T: ValueEnum>(value: &T) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().into())
}

/// What the guest's processors are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// Armv8, on stage 2
    #[default]
    Arm64,
    /// AMD64, on nested paging, in a hypervisor that the guest takes for Hyper-V
    #[value(name = "x86-64")]
    X86_64,
}

#[derive(Args)]
struct BootArgs {
    /// The guest's processors
    #[arg(long, value_enum, default_value_t = Arch::Arm64)]
    arch: Arch,
    #[command(flatten)]
    hyperv: hyperv::HypervArgs,
    /// A kernel: for arm64 an uncompressed one (Image), for x86-64 a bzImage [default: Debian's]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Virtual CPUs: up to 8; of x86-64 up to 16
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: u8,
    /// The guest's memory
    #[arg(long, default_value = "512M", value_parser = mebibytes, value_name = "SIZE")]
    memory: u64,
    /// The leaves that it is mapped with [default: 4k; of x86-64 2m]
    #[arg(long, value_enum)]
    mapping: Option<Leaves>,
    /// Take so many frames away from the guest, and give them back when it misses them
    #[arg(long, default_value_t = 0, value_name = "N")]
    evict: u64,
    /// Log what the guest writes: the log is started, harvested and ended again and again
    #[arg(long, value_enum, value_name = "KIND")]
    log: Option<Log>,
    /// Copy the running guest, compare each page, and let it go on on the copy
    #[arg(long)]
    snapshot: bool,
    /// The processor that QEMU emulates [default: max]
    #[arg(long)]
    cpu: Option<String>,
    /// A shell instead of a load; `poweroff -f` ends it
    #[arg(long)]
    shell: bool,
    /// How often the load does its work
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: u32,
    /// Further arguments for QEMU
    #[arg(last = true)]
    qemu: Vec<String>,
}

/// `512M`, `1G`: in MiB.
fn mebibytes(text: &str) -> std::result::Result<u64, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(char::is_alphabetic).len());
    let unit = match unit {
        "M" | "MiB" => 1,
        "G" | "GiB" => 1024,
        _ => return Err("say 512M or 1G".into()),
    };
    let size = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit));
    size.filter(|size| (192..=65536).contains(size))
        .ok_or_else(|| "the guest takes 192M to 64G".into())
}

/// Whether a guest has ended as it should.
///
/// # Errors
/// How else it has.
fn ended(end: End) -> Result<()> {
    match end {
        End::PoweredOff | End::Seen => Ok(()),
        End::Reset => Err(Error::Failed("the guest reset the machine".into())),
        End::Gone => Err(Error::Failed("QEMU ended by itself".into())),
        End::Late => Err(Error::Failed("the guest took too long".into())),
    }
}

fn boot(args: &BootArgs) -> Result<()> {
    if args.arch == Arch::X86_64 {
        return hyperv::boot(args);
    }
    if let Some(option) = args.hyperv.given() {
        return Err(Error::Other(format!("{option} is of --arch x86-64")));
    }
    if args.cpus > 8 {
        return Err(Error::Other("a guest of arm64 has 1 to 8 CPUs".into()));
    }
    let files = fetch::everything(args.kernel.as_deref())?;
    let boot = Boot {
        files: &files,
        cpu: args.cpu.as_deref().unwrap_or(qemu::CPU_MAX),
        cpus: args.cpus,
        memory: args.memory,
        leaves: args.mapping.unwrap_or(Leaves::Pages),
        evict: args.evict,
        evict_after: 0,
        tables: false,
        check: 0,
        log: args.log.or(args.snapshot.then_some(Log::All)),
        measure: false,
        snapshot: args.snapshot,
        omit: None,
        guest: if args.shell {
            "shell".into()
        } else {
            format!("load={}", args.rounds)
        },
        limit: None,
        more: &args.qemu,
    };
    let ran = if args.shell {
        qemu::converse(&boot)?
    } else {
        qemu::watch(&boot)?
    };
    ended(ran.end)?;
    println!(
        "\nthe hypervisor counted, in {:.1} s:",
        ran.took.as_secs_f64()
    );
    let counted = counters::NAMES.iter().zip(&ran.counters);
    for (name, number) in counted.filter(|(_, number)| **number != 0) {
        println!("{number:>12} {name}");
    }
    if args.snapshot {
        ran.check_snapshot().map_err(Error::Failed)?;
        println!("the copy was equal in every page, and the guest went on on it");
    }
    if !args.shell {
        load::check(&ran.console, args.cpus, args.rounds).map_err(Error::Failed)?;
        println!("the load's hashes are right");
    }
    Ok(())
}

/// The most that one boot of a test may take.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            // One line: the rest is usage.
            let text = error.to_string();
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
        Command::Linear => linear::run(|line| println!("{line}")),
        Command::LogStart => log_start::table(),
        Command::Processes { json } => processes::run(json, |line| println!("{line}")),
        Command::TlbFlush { json, rounds } => measure::run(json, rounds),
        Command::TestGuest(args) => test_guest::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            // As of clap: 2 is for what was asked.
            ExitCode::from(if matches!(error, Error::Failed(_)) {
                1
            } else {
                2
            })
        }
    }
}

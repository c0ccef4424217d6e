//! `cargo xtask boot`: one guest, for a person; and the options of all boots.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tablewright_hypervisor_common::counters::Event;

use crate::counters::{Count, NAMES};
use crate::debian::Release;
use crate::emulator::Emulator;
use crate::fetch::{Choice, Granule, Variant};
use crate::qemu::{self, Begin, Boot, End, Ran};
use crate::{Arch, Error, Leaves, Log, Result, fetch, load, name_of, out, say};

#[derive(Args)]
pub struct BootArgs {
    /// The guest's processors
    #[arg(long, value_enum, default_value_t = Arch::Arm64)]
    pub arch: Arch,
    #[command(flatten)]
    pub hyperv: HypervArgs,
    /// A kernel: for arm64 an uncompressed one (Image), for x86-64 a bzImage [default: Debian's]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// The release of Debian whose kernel it is [default: 12]
    #[arg(long, value_enum, value_name = "RELEASE", conflicts_with = "kernel")]
    pub debian: Option<Release>,
    /// Another QEMU than the one that is installed: a program, or `debian-13`, which is fetched
    #[arg(long, value_name = "PROGRAM")]
    pub qemu: Option<PathBuf>,
    /// The granule of stage 2 [default: 4k]
    #[arg(long, value_enum, value_name = "SIZE")]
    pub granule: Option<Granule>,
    /// The guest's memory is write-back whatever the guest says
    #[arg(long)]
    pub forced_write_back: bool,
    /// An initial file system of your own, instead of that of the load
    #[arg(long, value_name = "FILE", conflicts_with = "shell")]
    pub initrd: Option<PathBuf>,
    /// The number of guests at once, each with two vCPUs and so much memory, that have the
    /// processors in turn
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=8))]
    pub guests: Option<u8>,
    /// The number of small guests beside them; every fourth attacks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub small: Option<u8>,
    /// Bits of a VMID: with few they roll over [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=8))]
    pub vmid_bits: Option<u8>,
    /// Virtual CPUs: up to 8; of x86-64 up to 16
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,
    /// The guest's memory
    #[arg(long, default_value = "512M", value_parser = mebibytes, value_name = "SIZE")]
    pub memory: u64,
    /// In so many pieces of the same size, with holes between them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=4))]
    pub pieces: Option<u8>,
    /// The leaves that it is mapped with [default: 4k; of x86-64 2m]
    #[arg(long, value_enum)]
    pub mapping: Option<Leaves>,
    /// Take so many frames away from the guest, and give them back when it misses them
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub evict: u64,
    /// Take no more than so many away in a second [default: any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub evict_rate: Option<u64>,
    /// Log what the guest writes: the log is started, harvested and ended again and again
    #[arg(long, value_enum, value_name = "KIND")]
    pub log: Option<Log>,
    /// Copy the running guest, compare each page, and let it go on on the copy
    #[arg(long, conflicts_with = "shell")]
    pub snapshot: bool,
    /// The processor that QEMU emulates [default: max]
    #[arg(long)]
    pub cpu: Option<String>,
    /// A shell instead of a load; `poweroff -f` ends it
    #[arg(long)]
    pub shell: bool,
    /// How often the load does its work
    #[arg(long, default_value_t = 3, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The guest's console, and everything that the hypervisor counted
    #[arg(long, short)]
    pub verbose: bool,
    /// Further arguments for QEMU
    #[arg(last = true)]
    pub more: Vec<String>,
}

/// The recommendation to the guest for flushes of other processors' TLBs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Flush {
    /// Hypercalls
    Hypercall,
    /// Hypercalls that name processors by a set
    Extended,
    /// Interrupts between its processors
    Interrupt,
}

/// A bug that is planted in the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// Flushes are not carried out
    Ignore,
    /// vCPUs that run are not told
    OnEntry,
    /// Translations of nested tables are not forgotten
    Nested,
    /// The second half of each range is dropped
    Half,
}

/// A program that the guest runs instead of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// Files are written, sorted and compared by many processes
    Load,
    /// Threads map a part of a file, touch and unmap it
    Measure,
    /// Pages are replaced under threads that read them
    Hunt,
}

impl Program {
    /// Returns the guest's command line: its program, and how many rounds or seconds that runs.
    pub fn words(self, rounds: u32, seconds: u32) -> String {
        match self {
            Self::Load => format!("load={rounds}"),
            Self::Measure => format!("tlb=measure,-r,{rounds}"),
            Self::Hunt => format!("tlb=hunt,{seconds}"),
        }
    }
}

/// Options of a boot of x86-64 alone.
#[derive(Args, Default)]
pub struct HypervArgs {
    /// How the guest flushes TLBs of other vCPUs, x86-64 [default: hypercall]
    #[arg(long, value_enum)]
    pub flush: Option<Flush>,
    /// Processors that the vCPUs share, x86-64 [default: one for each]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub processors: Option<u8>,
    /// The guest's program, x86-64 [default: load]
    #[arg(long, value_enum)]
    pub run: Option<Program>,
    /// How long it hunts, x86-64; or how long several guests go on [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: Option<u32>,
    /// From the VP index of one vCPU to that of the next, x86-64 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub vp_step: Option<u16>,
    /// Plant a bug in the hypervisor, x86-64
    #[arg(long, value_enum)]
    pub plant: Option<Plant>,
}

impl HypervArgs {
    /// One that was given, if any was.
    pub fn given(&self) -> Option<&'static str> {
        [
            ("--flush", self.flush.is_some()),
            ("--processors", self.processors.is_some()),
            ("--run", self.run.is_some()),
            ("--vp-step", self.vp_step.is_some()),
            ("--plant", self.plant.is_some()),
        ]
        .into_iter()
        .find_map(|(name, is_given)| is_given.then_some(name))
    }
}

impl BootArgs {
    /// Whether options are of no other architecture than arm64.
    ///
    /// # Errors
    /// One is, or there are more CPUs than a guest of it has.
    pub fn check_arm64(&self) -> Result<()> {
        if let Some(option) = self.hyperv.given() {
            return Err(Error::Other(format!("{option} is of --arch x86-64")));
        }
        match self.cpus {
            ..=8 => Ok(()),
            _ => Err(Error::Other("a guest of arm64 has 1 to 8 CPUs".into())),
        }
    }

    /// Returns the kernel to boot, and its machine.
    pub fn choice(&self) -> Choice<'_> {
        Choice {
            kernel: self.kernel.as_deref(),
            release: self.debian.unwrap_or_default(),
            emulator: self.qemu.as_deref(),
            variant: Variant {
                granule: self.granule.unwrap_or_default(),
                forced: self.forced_write_back,
                marks: self.log == Some(Log::Hardware),
            },
        }
    }
}

/// `512M`, `1G`: in MiB.
fn mebibytes(text: &str) -> std::result::Result<u64, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(char::is_alphabetic).len());
    let unit = match unit {
        "M" | "MiB" => 1,
        "G" | "GiB" => 1024,
        _ => return Err("say 512M or 1G".into()),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    size.filter(|size| (192..=65536).contains(size))
        .ok_or_else(|| "the guest takes 192M to 64G".into())
}

/// Whether a guest has ended as it should.
///
/// # Errors
/// How else it has.
pub fn ended(end: End) -> Result<()> {
    match end {
        End::PoweredOff | End::Seen | End::Unread => Ok(()),
        End::Reset => Err(Error::Failed("the guest reset the machine".into())),
        End::Gone => Err(Error::Failed("QEMU ended by itself".into())),
        End::Late => Err(Error::Failed("the guest took too long".into())),
        End::Interrupted => Err(Error::Interrupted),
    }
}

/// Whether there is such a processor, before anything is built; where QEMU does not say which there
/// are, it is left to it.
fn look_at_cpu(cpu: &str, emulator: &Emulator) -> Result<()> {
    let name = cpu.split(',').next().unwrap_or_default();
    let listed = emulator.command().args(["-machine", "virt", "-cpu", "help"]).output();
    let listed = listed.map_or_else(|_| Vec::new(), |output| output.stdout);
    let listed = String::from_utf8_lossy(&listed);
    let mut names = listed.split_whitespace();
    match listed.is_empty() || names.any(|it| it == name) {
        true => Ok(()),
        false => Err(Error::Other(format!(
            "--cpu {name}: QEMU emulates no such processor; `-cpu help` lists them"
        ))),
    }
}

/// Boots a guest of arm64, and says what it has shown.
///
/// # Errors
/// It cannot be booted, or what it has done went wrong.
pub fn run(args: &BootArgs) -> Result<()> {
    if args.vmid_bits.is_some() || args.hyperv.seconds.is_some() {
        let why = "--vmid-bits is of several guests, and --seconds, too: --guests or --small";
        return Err(Error::Other(why.into()));
    }
    if args.mapping == Some(Leaves::Huge)
        && (args.granule.is_some_and(|it| it != Granule::K4) || args.memory < 1024)
    {
        let why = "--mapping 1g is of --granule 4k, and of guests of 1G or more";
        return Err(Error::Other(why.into()));
    }
    let largest = match args.mapping {
        Some(Leaves::Huge) => 1024,
        Some(Leaves::Blocks | Leaves::Mixed) => args.choice().variant.block(),
        Some(Leaves::Pages) | None => 2,
    };
    if let Some(pieces) = args.pieces.map(u64::from)
        && (!args.memory.is_multiple_of(largest * pieces) || args.memory / pieces < 96)
    {
        return Err(Error::Other(format!(
            "--pieces {pieces}: each has 96M or more, and a multiple of {largest}M"
        )));
    }
    if args.evict_rate.is_some() && args.evict == 0 {
        return Err(Error::Other("--evict-rate is of --evict".into()));
    }
    if let Some(cpu) = &args.cpu {
        look_at_cpu(cpu, &Emulator::named(args.qemu.as_deref())?)?;
    }
    let mut files = fetch::everything(args.choice())?;
    if let Some(initrd) = &args.initrd {
        files.initrd.clone_from(initrd);
    }
    let mut words = Vec::new();
    if args.snapshot {
        words.push("copy".to_string());
    }
    match (args.shell, &args.initrd) {
        (true, _) => words.push("shell".into()),
        (false, None) => words.push(format!("load={}", args.rounds)),
        (false, Some(_)) => words.clear(),
    }
    let begin = match args.initrd {
        Some(_) => Begin::After(qemu::SNAPSHOT_AFTER),
        None => Begin::Bell,
    };
    let boot = Boot {
        cpu: args.cpu.as_deref().unwrap_or(qemu::CPU_MAX),
        cpus: args.cpus,
        memory: args.memory,
        pieces: args.pieces.unwrap_or(1),
        leaves: args.mapping.unwrap_or(Leaves::Pages),
        evict: args.evict,
        evict_rate: args.evict_rate.unwrap_or(0),
        log: args.log.or(args.snapshot.then_some(Log::All)),
        snapshot: args.snapshot.then_some(begin),
        guest: words.join(" "),
        limit: None,
        more: &args.more,
        ..Boot::of(&files)
    };
    let ran = if args.shell {
        qemu::converse(&boot)?
    } else {
        out::take_interrupts()?;
        eprintln!(
            "booting {} with {} CPUs and {} MiB",
            boot.files.kernel.display(),
            boot.cpus,
            boot.memory
        );
        // A guest whose initial file system is not known is shown.
        qemu::watch(&boot, args.verbose || args.initrd.is_some())?
    };
    let is_known = !args.shell && args.initrd.is_none();
    if ran.end == End::Unread {
        return Ok(());
    }
    if args.verbose || !is_known || ran.end == End::Interrupted {
        counters(&ran);
    }
    let checked = check(args, &boot, &ran, is_known);
    if let (Err(Error::Failed(_)), false, true) = (&checked, args.verbose, is_known) {
        for line in ran.console.iter().rev().take(20).rev() {
            say!("        | {line}");
        }
    }
    checked
}

/// Prints the hypervisor's counts.
pub fn counters(ran: &Ran) {
    say!("\nthe hypervisor counted, in {:.1} s:", ran.took.as_secs_f64());
    let counted = NAMES.iter().zip(&ran.counters);
    for (name, number) in counted.filter(|(_, number)| **number != 0) {
        say!("{number:>12} {name}");
    }
}

/// Whether it came out right; and what that shows, line by line.
fn check(args: &BootArgs, boot: &Boot<'_>, ran: &Ran, is_known: bool) -> Result<()> {
    ended(ran.end)?;
    if is_known {
        load::check(&ran.console, args.cpus, args.rounds, args.snapshot).map_err(Error::Failed)?;
    }
    if args.snapshot {
        ran.check_snapshot().map_err(Error::Failed)?;
    }
    if ran.count(Count::Spoiled) != 0 {
        return Err(Error::Failed("the guest was seen on frames that had been taken away".into()));
    }
    if is_known && !ran.is_intact {
        return Err(Error::Failed("the hypervisor's code or constants have changed".into()));
    }
    for (name, text) in summary(boot, ran, is_known) {
        say!("{name:<11} {text}");
    }
    Ok(())
}

/// Returns the figures of a guest that came to its end.
fn summary(boot: &Boot<'_>, ran: &Ran, is_known: bool) -> Vec<(&'static str, String)> {
    let mut lines = vec![(
        "guest",
        format!(
            "{}, {} CPUs, {} MiB in leaves of {}{}; {:.1} s",
            load::kernel(&ran.console).unwrap_or("a kernel"),
            boot.cpus,
            boot.memory,
            name_of(&boot.leaves),
            match (boot.files.variant.granule, boot.pieces) {
                (Granule::K4, 1) => String::new(),
                (Granule::K4, pieces) => format!(", {pieces} pieces"),
                (other, 1) => format!(", granule {}", name_of(&other)),
                (other, pieces) => format!(", granule {}, {pieces} pieces", name_of(&other)),
            },
            ran.took.as_secs_f64()
        ),
    )];
    if is_known {
        let hashes = load::hashes(&ran.console);
        lines.push((
            "load",
            format!("{hashes} of {hashes} hashes right: nothing it wrote was lost or mixed up"),
        ));
    }
    lines.extend(of_memory(ran, boot.evict, boot.snapshot.is_some(), boot.log.is_some()));
    if is_known {
        lines.push(("hypervisor", "its code and constants are as they were".into()));
    }
    lines
}

/// Returns the deeds on the memory of a guest of any architecture.
pub fn of_memory(
    ran: &Ran,
    evict: u64,
    is_copied: bool,
    is_logged: bool,
) -> Vec<(&'static str, String)> {
    let count = |what| ran.event(what);
    let mut lines = vec![(
        "memory",
        format!(
            "{} faults; {} leaves mapped when they were touched",
            count(Event::Faults),
            count(Event::Installed)
        ),
    )];
    if count(Event::Busy) != 0 {
        lines.push((
            "sent back",
            format!(
                "{} faults: another CPU was at the leaf, or the page on the move",
                count(Event::Busy)
            ),
        ));
    }
    if evict != 0 {
        let taken = count(Event::Evicted);
        let less = match taken < evict {
            true => format!(" of {evict}, until the guest ended"),
            false => String::new(),
        };
        lines.push((
            "taken away",
            format!("{taken} frames{less}; {} given back", count(Event::Returned)),
        ));
    }
    match (is_copied, is_logged) {
        (true, _) => lines.push((
            "copy",
            format!(
                "{} pages in {} rounds; all {} equal; it went on on the copy",
                count(Event::Copied),
                count(Event::Rounds),
                count(Event::Compared)
            ),
        )),
        (false, true) => lines.push((
            "log",
            format!(
                "{} logs started and ended, {} pages marked as written",
                count(Event::Logs),
                count(Event::Marks)
            ),
        )),
        (false, false) => {}
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use clap::Parser;

    use super::{BootArgs, summary};
    use crate::counters::{Count, NAMES};
    use crate::emulator::Emulator;
    use crate::fetch::{Files, Variant};
    use crate::qemu::{Boot, End, Ran};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: BootArgs,
    }

    #[test]
    fn a_load_of_no_rounds_is_refused() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.args.rounds);
        assert!(parse("boot --rounds 0").is_err());
        assert!(parse("boot --evict 5 --evict-rate 0").is_err());
        assert!(matches!(parse("boot --rounds 1"), Ok(1)));
    }

    #[test]
    fn the_summary_says_when_less_was_taken_away() {
        let files = Files {
            hypervisor: PathBuf::new(),
            kernel: PathBuf::new(),
            initrd: PathBuf::new(),
            emulator: Emulator::Installed,
            variant: Variant::default(),
        };
        let boot = Boot { cpus: 2, memory: 512, evict: 500, ..Boot::of(&files) };
        let text = |taken: u64, console: &[&str]| {
            let mut counters = vec![0; NAMES.len()];
            counters[Count::Evicted as usize] = taken;
            let ran = Ran {
                end: End::PoweredOff,
                console: console.iter().map(|line| line.to_string()).collect(),
                counters,
                is_intact: true,
                took: Duration::from_secs(8),
                had: Duration::ZERO,
            };
            let lines = summary(&boot, &ran, true);
            assert!(lines.iter().all(|(_, text)| text.len() + 12 <= 80));
            lines.iter().map(|(name, text)| format!("{name} {text}\n")).collect::<String>()
        };
        let said = ["guest: 2 CPUs, Linux 6.1.0-50-arm64", "load: hash 5bc8"];
        let less = text(80, &said);
        assert!(less.contains("80 frames of 500"), "{less}");
        assert!(less.contains("Linux 6.1.0-50-arm64, 2 CPUs"), "{less}");
        assert!(less.contains("1 of 1 hashes"), "{less}");
        assert!(!text(500, &said).contains("of 500"));
    }
}

//! A boot of x86-64: a hypervisor on nested paging, whose guest takes it for Hyper-V.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::boot::{self, BootArgs, Flush, Plant, Program, ended};
use crate::fetch::{self, Files};
use crate::qemu::{self, Console, End, Qemu, Ran};
use crate::tools::{QEMU_X86, loader};
use crate::x86_counters::{Count, NAMES};
use crate::{About as _, Error, Leaves, Log, Result, load, name_of, out, say};

/// With SVM and nested paging; the hypervisor has tables of 4 levels.
const CPU: &str = "max,la57=off";
/// The guest's memory begins here; the hypervisor and its tables come first.
const MEMORY: u64 = 64 << 20;
/// The firmware's part at the end of what is below 4 GiB, in MiB.
const FIRMWARE: u64 = 32;
/// The part of the machine's memory below 4 GiB, in MiB; all else is above.
const LOW: u64 = 3072;
/// The guest's address of the kernel, its header before it.
const KERNEL: u64 = 16 << 20;

/// A boot.
pub struct Boot<'a> {
    /// The files.
    pub files: &'a Files,
    /// vCPUs.
    pub cpus: u8,
    /// Processors.
    pub processors: u8,
    /// The guest's memory, in MiB.
    pub memory: u64,
    /// How it is mapped.
    pub leaves: Leaves,
    /// The recommendation to the guest.
    pub flush: Flush,
    /// From one VP index to the next.
    pub step: u16,
    /// How many frames are taken away.
    pub evict: u64,
    /// How writes are logged.
    pub log: Option<Log>,
    /// Whether the guest is copied while it runs, when it rings.
    pub snapshot: bool,
    /// No guest is run: the start of the log is measured.
    pub measures: bool,
    /// A planted bug.
    pub plant: Option<Plant>,
    /// The command line of the guest's first program.
    pub guest: String,
    /// How long it may take.
    pub limit: Option<Duration>,
    /// Further arguments for QEMU.
    pub more: &'a [String],
}

impl<'a> Boot<'a> {
    /// A boot of these files that asks for nothing else.
    pub fn of(files: &'a Files) -> Self {
        Self {
            files,
            cpus: 1,
            processors: 1,
            memory: 256,
            leaves: Leaves::Blocks,
            flush: Flush::Hypercall,
            step: 1,
            evict: 0,
            log: None,
            snapshot: false,
            measures: false,
            plant: None,
            guest: String::new(),
            limit: None,
            more: &[],
        }
    }
}

/// How many sectors the header of a kernel takes (Documentation/x86/boot.rst).
///
/// # Errors
/// It cannot be read, or is none.
pub fn sectors(kernel: &Path) -> Result<u64> {
    let data = std::fs::read(kernel).about(kernel.display())?;
    match (data.get(0x1f1), data.get(0x202..0x206)) {
        (Some(sectors), Some(b"HdrS")) => Ok(match sectors {
            0 => 4,
            sectors => u64::from(*sectors),
        }),
        _ => Err(Error::Other(format!("{}: no kernel of x86 (bzImage)", kernel.display()))),
    }
}

/// Returns the address of the copy of a guest with so much memory, and how much memory the machine
/// has then, in MiB: behind the guest's memory, or from 4 GiB on.
fn copy_of(memory: u64) -> (u64, u64) {
    let first = MEMORY + (memory << 20);
    let all = (MEMORY >> 20) + 2 * memory + FIRMWARE;
    match all <= LOW {
        true => (first, all),
        false => (4 << 30, LOW + memory),
    }
}

fn spawn(boot: &Boot<'_>, console: Console) -> Result<Qemu> {
    const PAGE: u64 = 4096;
    let files = boot.files;
    let sectors = sectors(&files.kernel)?;
    let memory = boot.memory << 20;
    let initrd_size = std::fs::metadata(&files.initrd).about(files.initrd.display())?.len();
    let initrd = memory
        .checked_sub(initrd_size)
        .ok_or_else(|| Error::Other("the guest's memory is too small".into()))?
        & !(PAGE - 1);
    let mut options = format!(
        "memory={MEMORY},{memory} mapping={} processors={} vcpus={} step={} evict={} flush={} \
         kernel={sectors} initrd={initrd},{initrd_size}",
        name_of(&boot.leaves),
        boot.processors,
        boot.cpus,
        boot.step,
        boot.evict,
        name_of(&boot.flush),
    );
    if let Some(plant) = &boot.plant {
        options += &format!(" plant={}", name_of(plant));
    }
    if let Some(log) = &boot.log {
        options += &format!(" log={}", name_of(log));
    }
    // The guest's frames are only named where the start of a log is measured.
    let own = match boot.measures {
        true => boot.memory.min(256),
        false => boot.memory,
    };
    let mut room = (MEMORY >> 20) + own + FIRMWARE;
    if boot.snapshot {
        let (copy, with_copy) = copy_of(boot.memory);
        options += &format!(" snapshot=bell copy={copy}");
        room = with_copy;
    }
    if boot.measures {
        options += " measure=start";
    }
    // One processor more, that is not the guest's, does what is done beside the guest.
    let processors = boot.processors + u8::from(boot.log.is_some());
    let mut command = Command::new(QEMU_X86);
    command
        .args([
            "-machine",
            &format!("pc,max-ram-below-4g={LOW}M"),
            "-cpu",
            CPU,
            "-nodefaults",
            "-display",
            "none",
        ])
        .args(["-smp", &processors.to_string()])
        .args(["-m", &format!("{room}M")])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .args(["-no-reboot", "-no-shutdown"])
        .arg("-kernel")
        .arg(&files.hypervisor)
        .args(["-device", &loader(&files.kernel, MEMORY + KERNEL - (sectors + 1) * 512)])
        .args([
            "-append",
            &format!(
                "{options} -- console=ttyS0 quiet earlyprintk=ttyS0,115200 panic=-1 {}",
                boot.guest
            ),
        ])
        .args(boot.more);
    if !boot.measures {
        command.args(["-device", &loader(&files.initrd, MEMORY + initrd)]);
    }
    qemu::start(command, console, &files.hypervisor, 2 * NAMES.len())
}

/// Boots. Each line of the console, and the counters now and then, are handed on.
///
/// # Errors
/// QEMU cannot be started, or asked.
pub fn run(boot: &Boot<'_>, line: impl FnMut(&str), look: impl FnMut(&[u64])) -> Result<Ran> {
    let qemu = spawn(boot, Console::Pipe)?;
    qemu::attend(qemu, &boot.files.hypervisor, boot.limit, |_| false, line, look)
}

/// One of the numbers of all of the run.
pub fn counted(ran: &Ran, what: Count) -> u64 {
    ran.counters.get(what as usize).copied().unwrap_or(0)
}

/// Lines of `NAME=VALUE` words that the guest's program has said, by what they begin with.
pub fn said<'r>(ran: &'r Ran, name: &str) -> impl Iterator<Item = &'r str> {
    let lines = ran.console.iter();
    lines.filter_map(move |line| line.strip_prefix(name)).filter(|line| line.contains('='))
}

/// One of the values of such a line.
pub fn value(line: &str, name: &str) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    words.find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// `cargo xtask boot --arch x86-64`.
///
/// # Errors
/// It cannot be booted, or what the guest has done went wrong.
pub fn boot(args: &BootArgs) -> Result<()> {
    let others = [
        ("--guests", args.guests.is_some()),
        ("--small", args.small.is_some()),
        ("--vmid-bits", args.vmid_bits.is_some()),
        ("--cpu", args.cpu.is_some()),
        ("--evict-rate", args.evict_rate.is_some()),
        ("--initrd", args.initrd.is_some()),
        ("--debian", args.debian.is_some()),
        ("--pieces", args.pieces.is_some()),
        ("--granule", args.granule.is_some()),
        ("--forced-write-back", args.forced_write_back),
        ("--mapping 1g", args.mapping == Some(Leaves::Huge)),
        ("--log hardware", args.log == Some(Log::Hardware)),
        ("--qemu", args.qemu.is_some()),
    ];
    if let Some((name, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
        return Err(Error::Other(format!("{name} is of --arch arm64")));
    }
    if args.memory > 2048 {
        return Err(Error::Other("a guest of x86-64 takes 192M to 2G".into()));
    }
    if args.cpus > 8 && args.hyperv.processors.is_none() {
        return Err(Error::Other("more than 8 vCPUs share --processors".into()));
    }
    let hyperv = &args.hyperv;
    let program = hyperv.run.unwrap_or(Program::Load);
    if args.snapshot && program != Program::Load {
        let why = "--snapshot: the guest runs the load";
        return Err(Error::Other(why.into()));
    }
    if hyperv.seconds.is_some() && program != Program::Hunt {
        return Err(Error::Other("--seconds is of --run hunt".into()));
    }
    let files = fetch::everything_x86(args.kernel.as_deref())?;
    let boot = Boot {
        cpus: args.cpus,
        processors: hyperv.processors.unwrap_or(args.cpus),
        memory: args.memory,
        leaves: args.mapping.unwrap_or(Leaves::Blocks),
        flush: hyperv.flush.unwrap_or(Flush::Hypercall),
        step: hyperv.vp_step.unwrap_or(1),
        evict: args.evict,
        log: args.log.or(args.snapshot.then_some(Log::All)),
        snapshot: args.snapshot,
        plant: hyperv.plant,
        guest: match (args.shell, args.snapshot) {
            (true, true) => "copy shell".into(),
            (true, false) => "shell".into(),
            (false, true) => format!("copy load={}", args.rounds),
            (false, false) => program.words(args.rounds, hyperv.seconds.unwrap_or(10)),
        },
        more: &args.more,
        ..Boot::of(&files)
    };
    let ran = if args.shell {
        qemu::wait(spawn(&boot, Console::Terminal)?)?
    } else {
        out::take_interrupts()?;
        let shown = [
            (Count::Exits as usize, "exits"),
            (Count::Calls as usize, "hypercalls"),
            (Count::Ipis as usize, "interrupts"),
            (Count::Told as usize, "told"),
            (Count::Entered as usize, "forgot on entry"),
        ];
        qemu::show(&shown, |line, look| {
            let console = |text: &str| {
                if args.verbose {
                    line(text);
                }
            };
            run(&boot, console, look)
        })?
    };
    if ran.end == End::Unread {
        return Ok(());
    }
    if args.verbose || args.shell || ran.end == End::Interrupted {
        counters(&ran);
    }
    if args.shell {
        return ended(ran.end);
    }
    let right = ended(ran.end)
        .and_then(|()| judge(&boot, program, args.rounds, &ran).map_err(Error::Failed));
    match right {
        Ok(()) => {
            for (name, text) in summary(&boot, program, &ran) {
                say!("{name:<11} {text}");
            }
        }
        Err(Error::Failed(_)) if !args.verbose => {
            for line in ran.console.iter().rev().take(LAST).rev() {
                say!("        | {line}");
            }
        }
        Err(_) => {}
    }
    right
}

/// The number of the console's lines that are shown of a boot that went wrong: those of a triple
/// fault with what led to it.
pub const LAST: usize = 30;

/// Prints the hypervisor's counts.
fn counters(ran: &Ran) {
    say!("\nthe hypervisor counted, in {:.1} s:", ran.took.as_secs_f64());
    let counted = NAMES.iter().zip(&ran.counters);
    for (name, number) in counted.filter(|(_, number)| **number != 0) {
        say!("{number:>12} {name}");
    }
}

/// Returns the figures of a guest that came to its end.
fn summary(boot: &Boot<'_>, program: Program, ran: &Ran) -> Vec<(&'static str, String)> {
    let count = |what| counted(ran, what);
    let mut lines = vec![(
        "guest",
        format!(
            "{}, {} vCPUs on {} processors, {} MiB in leaves of {}; {:.1} s",
            load::kernel(&ran.console).unwrap_or("a kernel"),
            boot.cpus,
            boot.processors,
            boot.memory,
            name_of(&boot.leaves),
            ran.took.as_secs_f64()
        ),
    )];
    lines.push(match program {
        Program::Load => {
            let hashes = load::hashes(&ran.console);
            let text =
                format!("{hashes} of {hashes} hashes right: nothing it wrote was lost or mixed up");
            ("load", text)
        }
        Program::Measure => {
            let line = said(ran, "measure: ").next().unwrap_or_default();
            ("measured", line.into())
        }
        Program::Hunt => {
            let replaced = said(ran, "hunt: ").filter_map(|line| value(line, "replaced"));
            let replaced: u64 = replaced.sum();
            let text = format!("{replaced} times pages were replaced; nothing stale was read");
            ("hunt", text)
        }
    });
    let calls = [Count::Space, Count::List, Count::SpaceEx, Count::ListEx];
    lines.push((
        "flushes",
        format!(
            "{} hypercalls; {} processors told, {} vCPUs forgot on entry",
            calls.map(count).iter().sum::<u64>(),
            count(Count::Told),
            count(Count::Entered)
        ),
    ));
    lines.extend(boot::of_memory(ran, boot.evict, boot.snapshot, boot.log.is_some()));
    lines.push(("hypervisor", "its code and constants are as they were".into()));
    lines
}

/// Whether a guest has done what it was told, and seen nothing that was stale.
///
/// # Errors
/// What is wrong.
pub fn judge(
    boot: &Boot<'_>,
    program: Program,
    rounds: u32,
    ran: &Ran,
) -> std::result::Result<(), String> {
    if ran.end != End::PoweredOff {
        return Err(format!("it ended so: {:?}", ran.end));
    }
    if !ran.is_intact && !ran.console.is_empty() {
        return Err("the hypervisor's code or constants have changed".into());
    }
    if counted(ran, Count::Spoiled) != 0 {
        return Err("the guest has written to frames that had been taken away".into());
    }
    let missed = counted(ran, Count::Missed);
    if missed != 0 {
        return Err(format!("{missed} pages that the guest has named were not forgotten"));
    }
    if boot.snapshot {
        ran.check_snapshot()?;
    } else if boot.log.is_some() && counted(ran, Count::Marks) == 0 {
        return Err("nothing was logged".into());
    }
    match program {
        Program::Load => load::check(&ran.console, boot.cpus, rounds, boot.snapshot),
        Program::Measure => match said(ran, "measure: ").next() {
            Some(_) => Ok(()),
            None => Err("the measurement did not come to its end".into()),
        },
        Program::Hunt => {
            let hunts: Vec<&str> = said(ran, "hunt: ").collect();
            if hunts.len() != if boot.cpus < 3 { 1 } else { 2 } {
                return Err("the hunt did not come to its end".into());
            }
            if !hunts.iter().all(|line| value(line, "replaced") > Some(0)) {
                return Err("the hunt has replaced nothing".into());
            }
            match hunts.iter().filter_map(|line| value(line, "stale")).sum() {
                0 => Ok(()),
                stale => Err(format!("the guest has read {stale} times what was stale")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRMWARE, LOW, MEMORY, copy_of};

    #[test]
    fn a_copy_is_behind_the_guest_and_not_where_the_machine_has_no_memory() {
        for guest in [192, 256, 1024, 1487, 1488, 1489, 2048] {
            let (copy, all) = copy_of(guest);
            let end = copy + (guest << 20);
            assert!(copy >= MEMORY + (guest << 20), "{guest} MiB");
            // What there is, low and high; firmware has the end of the low part.
            let low = (all.min(LOW) - FIRMWARE) << 20;
            let high = 4 << 30..(4 << 30) + (all.saturating_sub(LOW) << 20);
            assert!(end <= low || high.start <= copy && end <= high.end, "{guest} MiB");
        }
    }
}

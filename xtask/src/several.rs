//! Several guests at once: what is asked for, what comes out, and what that shows.
//!
//! Each guest says its lines on one console, behind its number: `[g1] load: done`.

use crate::boot::{self, BootArgs};
use crate::counters::{Count, NAMES};
use crate::fetch::{self, Files};
use crate::guests::Several;
use crate::load;
use crate::out;
use crate::qemu::{self, Boot, CPU_MAX, End, Ran};
use crate::{Error, LIMIT, Leaves, Log, Result, say};

#[path = "../../hypervisor/src/bin/small/pattern.rs"]
mod pattern;

/// The vCPUs of each guest, where there are as many processors.
pub const VCPUS: u8 = 2;

/// The hash that a small guest of this number says.
fn hash_of(guest: u64) -> u64 {
    let words = (0..pattern::WORDS).map(|number| pattern::word(guest, number, pattern::LAST));
    words.fold(pattern::NOTHING, pattern::hash)
}

/// The lines of one guest.
fn lines_of(console: &[String], guest: u64) -> Vec<String> {
    let prefix = format!("[g{guest}] ");
    let lines = console.iter().filter_map(|line| line.strip_prefix(&prefix));
    lines.map(String::from).collect()
}

/// The outcome, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Hashes of loads.
    pub hashes: usize,
    /// Rounds of small guests.
    pub rounds: u64,
}

/// Whether all came out right.
///
/// # Errors
/// What is wrong.
pub fn check(
    several: &Several,
    vcpus: u8,
    rounds: u32,
    ran: &Ran,
) -> std::result::Result<Shown, String> {
    let console = &ran.console;
    if let Some(line) = console
        .iter()
        .find(|line| line.contains("WRONG") || line.contains("PANIC in the hypervisor"))
    {
        return Err(line.clone());
    }
    if ran.end != End::PoweredOff {
        return Err(format!("it ended so: {:?}", ran.end));
    }
    let mut shown = Shown::default();
    for guest in 0..several.count() {
        let lines = lines_of(console, guest);
        let told = |why: String| format!("guest {guest}: {why}");
        if guest < several.kernels.into() {
            load::check_of(&lines, vcpus, rounds, true, guest as u32).map_err(told)?;
            shown.hashes += load::hashes(&lines);
            continue;
        }
        let right = format!("small: hash {:016x}, ", hash_of(guest));
        let said = lines.iter().find_map(|line| line.strip_prefix(&right));
        let said = said.ok_or_else(|| told(format!("no {right}in: {}", lines.join("; "))))?;
        if !said.ends_with(" 0 wrong") {
            return Err(told(said.into()));
        }
        let rounds = said.split(' ').next().and_then(|number| number.parse::<u64>().ok());
        shown.rounds += rounds.ok_or_else(|| told(said.into()))?;
    }
    for (count, what) in [
        (Count::Spoiled, "a guest was seen on frames that had been taken away"),
        (Count::Strays, "a frame is behind a page that is not its own"),
        (Count::Foreign, "a fault came under another VMID"),
    ] {
        if ran.count(count) != 0 {
            return Err(what.into());
        }
    }
    if ran.count(Count::Ended) != several.count() {
        return Err("not all guests have switched themselves off".into());
    }
    if ran.count(Count::Own) == 0 {
        return Err("no page was looked at in the end".into());
    }
    match ran.is_intact {
        true => Ok(shown),
        false => Err("the hypervisor's code or constants have changed".into()),
    }
}

/// Whether there are more guests than VMIDs.
fn roll_over(several: &Several) -> bool {
    several.count() >= 1 << several.bits
}

/// Returns the figures of guests that came to their end.
fn summary(
    several: &Several,
    boot: &Boot<'_>,
    ran: &Ran,
    shown: Shown,
) -> Vec<(&'static str, String)> {
    let count = |what| ran.count(what);
    let kernel = (lines_of(&ran.console, 0).iter())
        .find_map(|line| load::kernel(std::slice::from_ref(line)).map(String::from));
    let kernels = match several.kernels {
        0 => String::new(),
        number => format!("{number} of {}, ", kernel.as_deref().unwrap_or("a kernel")),
    };
    let mut lines = vec![
        (
            "guests",
            format!(
                "{kernels}{} small; on {} processors; {:.1} s",
                several.small,
                boot.cpus,
                ran.took.as_secs_f64()
            ),
        ),
        (
            "right",
            format!(
                "{} hashes of loads, {} rounds of small guests: all right",
                shown.hashes, shown.rounds
            ),
        ),
        (
            "turns",
            format!(
                "{} turns of {} vCPUs; {} interrupts given to them",
                count(Count::Turns),
                several.count() * u64::from(VCPUS.min(boot.cpus)),
                count(Count::Interrupts)
            ),
        ),
        (
            "VMIDs",
            match roll_over(several) {
                true => format!(
                    "{} bits: rolled over {} times; processors forgot all {} times",
                    several.bits,
                    count(Count::RollOvers),
                    count(Count::Forgotten)
                ),
                false => format!("{} bits: enough for each guest to keep one", several.bits),
            },
        ),
        ("apart", format!("each of {} pages on a frame of its own guest's", count(Count::Own))),
        (
            "memory",
            format!(
                "{} faults; {} flushes of guests that were not loaded",
                count(Count::Faults),
                count(Count::Lent)
            ),
        ),
    ];
    if boot.evict != 0 {
        lines.push((
            "taken away",
            format!(
                "{} frames of {}; {} given back",
                count(Count::Evicted),
                boot.evict,
                count(Count::Returned)
            ),
        ));
    }
    if boot.log.is_some() {
        lines.push((
            "log",
            format!(
                "{} logs started and ended, {} pages marked as written",
                count(Count::Logs),
                count(Count::Marks)
            ),
        ));
    }
    lines.push(("hypervisor", "its code and constants are as they were".into()));
    lines
}

/// Returns the boot of several guests.
pub fn boot_of<'a>(several: &'a Several, files: &'a Files, cpus: u8, rounds: u32) -> Boot<'a> {
    Boot {
        cpus,
        memory: several.all_memory(),
        several: Some(several),
        guest: format!("copy load={rounds}"),
        ..Boot::of(files)
    }
}

/// The files of several guests: the first is a small one where no kernel is booted.
///
/// # Errors
/// Something is missing.
pub fn files(several: &Several, files: Files) -> Files {
    match several.kernels {
        0 => Files { kernel: several.image.clone(), ..files },
        _ => files,
    }
}

/// The names of the tests.
pub const NAME: &str = "guests";
/// See `NAME`.
pub const LINUX: &str = "guests-linux";

/// Frames that are taken away in a second, at most.
const EVICT_RATE: u64 = 500;

/// Runs a number of guests, with VMIDs that roll over, from which frames are taken away, and whose
/// writes are logged.
///
/// # Errors
/// Something is missing, or went wrong, or did not happen.
pub fn test(all: &Files, kernels: u8, small: u8) -> Result<()> {
    let several = Several {
        kernels,
        memory: 192,
        small,
        image: fetch::hypervisor("small")?,
        bits: 3,
        seconds: 6,
    };
    let files = files(&several, all.clone());
    let boot = Boot {
        leaves: Leaves::Mixed,
        evict: 8000,
        evict_rate: EVICT_RATE,
        log: Some(Log::All),
        limit: Some(2 * LIMIT),
        ..boot_of(&several, &files, 2, 1)
    };
    let ran = qemu::run(&boot, |_| (), |_| ())?;
    check(&several, VCPUS, 1, &ran).map_err(Error::Failed)?;
    for what in [Count::Lent, Count::Evicted, Count::Marks] {
        if ran.count(what) == 0 {
            let name = NAMES[what as usize];
            return Err(Error::Failed(format!("there were no {name}")));
        }
    }
    let most = EVICT_RATE * (ran.took.as_secs() + 2);
    if ran.count(Count::Evicted) > most {
        return Err(Error::Failed(format!(
            "{} frames were taken away, and {most} should be the most",
            ran.count(Count::Evicted)
        )));
    }
    match rolls_over(ran.count(Count::RollOvers), ran.count(Count::Turns)) {
        true => Ok(()),
        false => Err(Error::Failed("VMIDs hardly rolled over".into())),
    }
}

/// Whether VMIDs are used up as they should be: with a turn or two for each of eight guests or
/// more. How many turns there are in a second is not the guests' to say, but what else the computer
/// does.
fn rolls_over(times: u64, turns: u64) -> bool {
    times >= 10 && times * 30 >= turns
}

/// Boots several guests, for a person.
///
/// # Errors
/// They cannot be booted, or what they have done went wrong.
pub fn boot(args: &BootArgs) -> Result<()> {
    let refused = [
        (args.shell || args.initrd.is_some(), "--shell and --initrd are of one guest"),
        (args.snapshot, "--snapshot is of one guest"),
        (
            matches!(args.log, Some(Log::Ring | Log::Hardware)),
            "--log ring and hardware are of one guest: several have bitmap and all",
        ),
        (args.evict_rate.is_some() && args.evict == 0, "--evict-rate is of --evict"),
        (
            args.granule.is_some() || args.mapping == Some(Leaves::Huge) || args.pieces.is_some(),
            "--granule, --mapping 1g and --pieces are of one guest",
        ),
        (args.cpus > 8, "there are 1 to 8 processors"),
    ];
    if let Some((_, why)) = refused.iter().find(|(is, _)| *is) {
        return Err(Error::Other((*why).into()));
    }
    let bits = args.vmid_bits.unwrap_or(8);
    if 2 * u16::from(args.cpus) + 2 > 1 << bits {
        return Err(Error::Other(format!(
            "VMIDs of {bits} bits are too few for {} processors",
            args.cpus
        )));
    }
    let several = Several {
        kernels: args.guests.unwrap_or(0),
        memory: args.memory,
        small: args.small.unwrap_or(0),
        image: fetch::hypervisor("small")?,
        bits,
        seconds: args.hyperv.seconds.unwrap_or(10),
    };
    if several.count() == 0 {
        return Err(Error::Other("--guests 0 needs --small".into()));
    }
    let files = files(&several, fetch::everything(args.choice())?);
    let boot = Boot {
        cpu: args.cpu.as_deref().unwrap_or(CPU_MAX),
        leaves: args.mapping.unwrap_or(Leaves::Pages),
        evict: args.evict,
        evict_rate: args.evict_rate.unwrap_or(0),
        log: args.log,
        limit: None,
        more: &args.more,
        ..boot_of(&several, &files, args.cpus, args.rounds)
    };
    out::take_interrupts()?;
    eprintln!("booting {} guests on {} processors", several.count(), boot.cpus);
    let ran = qemu::watch(&boot, args.verbose)?;
    if ran.end == End::Unread {
        return Ok(());
    }
    if args.verbose || ran.end == End::Interrupted {
        boot::counters(&ran);
    }
    let checked = boot::ended(ran.end).and_then(|()| {
        check(&several, VCPUS.min(args.cpus), args.rounds, &ran).map_err(Error::Failed)
    });
    match checked {
        Ok(shown) => {
            for (name, text) in summary(&several, &boot, &ran, shown) {
                say!("{name:<11} {text}");
            }
            Ok(())
        }
        Err(why) => {
            if let (Error::Failed(_), false) = (&why, args.verbose) {
                for line in ran.console.iter().rev().take(20).rev() {
                    say!("        | {line}");
                }
            }
            Err(why)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::{VCPUS, boot_of, check, hash_of, rolls_over, summary};
    use crate::counters::{Count, NAMES};
    use crate::emulator::Emulator;
    use crate::fetch::{Files, Variant};
    use crate::guests::Several;
    use crate::qemu::{End, Ran};

    fn several() -> Several {
        Several { kernels: 0, memory: 192, small: 2, image: PathBuf::new(), bits: 3, seconds: 1 }
    }

    fn ran(hashes: [u64; 2]) -> Ran {
        let mut counters = vec![0; NAMES.len()];
        counters[Count::Ended as usize] = 2;
        counters[Count::Own as usize] = 4096;
        let line = |(guest, hash): (usize, u64)| {
            format!("[g{guest}] small: hash {hash:016x}, 12 rounds, 3 ticks, 9 calls, 0 wrong")
        };
        Ran {
            end: End::PoweredOff,
            console: hashes.into_iter().enumerate().map(line).collect(),
            counters,
            is_intact: true,
            took: Duration::from_secs(600),
            had: Duration::ZERO,
        }
    }

    #[test]
    fn each_guest_has_a_hash_of_its_own() {
        let right = [hash_of(0), hash_of(1)];
        let rounds = check(&several(), VCPUS, 1, &ran(right)).map(|shown| shown.rounds);
        assert_eq!(rounds, Ok(24));
        assert!(check(&several(), VCPUS, 1, &ran([right[1], right[1]])).is_err());
        for (what, number) in [
            (Count::Strays, 1),
            (Count::Spoiled, 1),
            (Count::Foreign, 1),
            (Count::Ended, 1),
            (Count::Own, 0),
        ] {
            let mut wrong = ran(right);
            wrong.counters[what as usize] = number;
            assert!(check(&several(), VCPUS, 1, &wrong).is_err(), "{what:?}");
        }
        let mut wrong = ran(right);
        wrong.console.push("[g1] small: WRONG: a word".into());
        assert!(check(&several(), VCPUS, 1, &wrong).is_err());
    }

    #[test]
    fn identifiers_roll_over_by_turns_and_not_by_time() {
        assert!(rolls_over(37_549, 434_154), "ten minutes alone");
        assert!(rolls_over(152, 1723), "ten seconds beside builds");
        assert!(!rolls_over(0, 0) && !rolls_over(9, 90));
        assert!(!rolls_over(100, 434_154));
    }

    #[test]
    fn the_summary_says_whether_identifiers_rolled_over() {
        let files = Files {
            hypervisor: PathBuf::new(),
            kernel: PathBuf::new(),
            initrd: PathBuf::new(),
            emulator: Emulator::Installed,
            variant: Variant::default(),
        };
        let few = several();
        let many = Several { kernels: 4, small: 8, ..several() };
        let text = |several: &Several| {
            let mut ran = ran([0, 0]);
            ran.counters[Count::RollOvers as usize] = 123_456;
            ran.counters[Count::Forgotten as usize] = 246_912;
            let boot = boot_of(several, &files, 2, 1);
            let shown = check(several, VCPUS, 1, &ran).unwrap_or_default();
            let lines = summary(several, &boot, &ran, shown);
            assert!(lines.iter().all(|(_, text)| text.len() + 12 <= 80), "{lines:?}");
            lines.into_iter().map(|(_, text)| text).collect::<String>()
        };
        assert!(text(&few).contains("enough for each guest"));
        assert!(text(&many).contains("rolled over 123456 times"));
    }
}

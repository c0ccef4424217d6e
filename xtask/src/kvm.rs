//! The experiments on KVM inside emulated computers, and on this one: each log has what its guest
//! wrote, and all computers come to the same counts.
//!
//! The lab's program is built static, and put with a shell and, for x86-64, the modules of KVM into
//! the first file system of a kernel of Debian's. QEMU emulates a processor that can run guests:
//! one of AMD with nested paging, and one of arm64 that begins at EL2. So there are three levels:
//! this computer, the emulated one, and its guest, of some thirty instructions. Times mean nothing
//! there; counts do.

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::console::{Patience, listen};
use crate::fetch;
use crate::tools::{self, QEMU, QEMU_X86};
use crate::{About as _, Error, Result, initramfs, kvm_figures, name_of, say};

#[derive(Args)]
pub struct KvmArgs {
    /// A few runs instead of all, and no tests
    #[arg(long)]
    short: bool,
    /// Instead: whether CPU times on this computer's KVM repeat, of all experiments (some minutes)
    #[arg(long, conflicts_with_all = ["short", "blind", "computers"])]
    repeat: bool,
    /// Instead: how well a profile that is fitted on two runs on this computer's KVM predicts
    /// others (some minutes)
    #[arg(long, conflicts_with_all = ["short", "computers"])]
    blind: bool,
    /// Instead: the phases of a log beside those of Linux's own test, which is built from Debian's
    /// source, in an emulated computer whose time is that of its instructions (some minutes)
    #[arg(long, conflicts_with_all = ["short", "repeat", "blind", "computers"])]
    pub selftests: bool,
    /// The computers to emulate [default: all]
    #[arg(value_enum, value_name = "COMPUTER")]
    computers: Vec<Computer>,
}

/// An emulated computer that can run guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Computer {
    /// x86-64 of AMD, with nested paging
    Amd,
    /// And with Linux 6.12
    #[value(skip)]
    Amd13,
    /// arm64 that begins at EL2
    Arm64,
}

/// The most for which one of them may say nothing, where nothing else is done: a run takes it a few
/// seconds, a boot ten.
const SILENCE: Duration = Duration::from_secs(60);

/// A lack of a computer: the sign by which a run that needs it is recognised, and the words for it.
type Lack = (&'static str, &'static str);
const RINGS: Lack = ("--ring", "no ring of dirty pages");
const POOL: Lack = ("hugetlb", "huge pages");
const NESTED: Lack = (" -n ", "guests of guests");

/// One run of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    words: String,
    /// Part of the short matrix.
    short: bool,
}

/// Each experiment, on small and on huge pages, of one vCPU and of two; of a dirty log each way of
/// taking it.
fn matrix() -> Vec<Run> {
    let mut runs = Vec::new();
    for (backing, vcpus) in [("", 1), ("", 2), (" -s anonymous_thp", 1), (" -s anonymous_thp", 2)] {
        let both = backing.is_empty() != (vcpus == 2);
        let mut run = |words: &str, short| {
            let words = format!("{words} -b 16M -v {vcpus}{backing}");
            runs.push(Run { words, short });
        };
        run("dirty-log", both);
        run("dirty-log -g", !backing.is_empty() && vcpus == 2);
        run("dirty-log --ring 1024", vcpus == 2);
        run("write-protect", false);
        run("page-table-test", both);
    }
    // Not all pages, and in no order: the host has to draw what the guest draws.
    for (words, short) in [
        ("dirty-log -w 60 -a -b 16M -v 2", true),
        ("dirty-log -w 60 -a -g -x 2 -i 4 -b 16M -v 2", false),
        ("dirty-log -w 60 -a --ring 1024 -b 16M -v 2", false),
        ("dirty-log -w 60 -a -b 16M -v 2 -s anonymous_thp", false),
    ] {
        let words = words.into();
        runs.push(Run { words, short });
    }
    // Guests of guests: KVM then has tables of its own for what are two stages to the guest.
    for (words, short) in [
        ("dirty-log -n -b 16M -v 2", true),
        ("dirty-log -n -g -b 16M -v 2 -s anonymous_thp", false),
        ("dirty-log -n --ring 1024 -b 16M -v 1", false),
        ("write-protect -n -b 16M -v 1", false),
        ("page-table-test -n -b 16M -v 2", false),
    ] {
        let words = words.into();
        runs.push(Run { words, short });
    }
    for pool in ["anonymous_hugetlb", "shared_hugetlb"] {
        runs.push(Run { words: format!("dirty-log -b 16M -v 2 -s {pool}"), short: false });
    }
    runs
}

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// Of each phase its name, and the numbers that the guest and the log have to agree on.
    Counts {
        /// KVM keeps tables of its own for each of the guest's.
        is_software: bool,
        phases: Vec<Phase>,
    },
    /// It was refused, for this reason.
    Refused(String),
    /// It went wrong.
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Phase {
    name: String,
    pages: u64,
    harvested: Option<u64>,
    written: Option<u64>,
}

/// Returns the outcome of the program, by its status and its output.
fn outcome(status: Option<i32>, said: &str) -> Outcome {
    let line = said.lines().next_back().unwrap_or_default();
    match status {
        Some(0) => {}
        Some(2) => return Outcome::Refused(line.to_owned()),
        Some(status) => return Outcome::Failed(format!("it ended with status {status}: {line}")),
        None => return Outcome::Failed(format!("it did not end by itself: {line}")),
    }
    let report: Value = match serde_json::from_str(said) {
        Ok(report) => report,
        Err(error) => return Outcome::Failed(format!("its JSON cannot be read: {error}")),
    };
    let rows = report["rows"].as_array().into_iter().flatten();
    let phases = rows.flat_map(|row| row["phases"].as_array().into_iter().flatten());
    let phases = phases.map(|phase| Phase {
        name: phase["phase"].as_str().unwrap_or_default().to_owned(),
        pages: phase["pages"].as_u64().unwrap_or(0),
        harvested: phase["harvested"].as_u64(),
        written: phase["written"].as_u64(),
    });
    Outcome::Counts {
        is_software: report["parameters"]["host"]["paging"] == "software",
        phases: phases.collect(),
    }
}

/// Whether a run came out as it should by itself, and what it came to. It may be refused for what
/// the computer lacks, and for nothing else.
fn judge(run: &Run, outcome: &Outcome, lacks: &[Lack]) -> std::result::Result<String, String> {
    let (is_software, phases) = match outcome {
        Outcome::Counts { is_software, phases } => (*is_software, phases),
        Outcome::Failed(why) => return Err(why.clone()),
        Outcome::Refused(why) => {
            let mut known = lacks.iter();
            let lack = known.find(|(by, says)| run.words.contains(by) && why.contains(says));
            return match lack {
                Some((_, says)) => Ok(format!("refused: {says}")),
                None => Err(why.clone()),
            };
        }
    };
    // Software paging maps what is read for writing as well, where it splits a huge page, and logs
    // it.
    let reads = !run.words.contains("dirty") || run.words.contains("-w ");
    let may_have_more = is_software && run.words.contains("thp") && reads;
    let (mut all, mut more) = (0, 0);
    for phase in phases {
        let (Some(harvested), Some(written)) = (phase.harvested, phase.written) else {
            continue;
        };
        if harvested < written || harvested > written && !may_have_more {
            let name = &phase.name;
            return Err(format!("{name}: {harvested} pages in the log, {written} written"));
        }
        all += written;
        more += harvested - written;
    }
    match (all, more) {
        (0, _) => Err("it harvested nothing".into()),
        (all, 0) => Ok(format!("{all} pages written, and logged")),
        (all, more) => Ok(format!("{all} pages written and logged, {more} read")),
    }
}

/// Returns the difference of two computers in a run, if there is one.
fn difference(this: &Outcome, other: &Outcome) -> Option<String> {
    let (Outcome::Counts { phases: this, .. }, Outcome::Counts { phases: other, .. }) =
        (this, other)
    else {
        return None;
    };
    let known = |phase: &Phase| (phase.name.clone(), phase.pages, phase.written);
    let mut pairs = this.iter().zip(other);
    match pairs.find(|(this, other)| known(this) != known(other)) {
        Some((this, other)) => Some(format!("{this:?} here and {other:?} there")),
        None => (this.len() != other.len()).then(|| "other phases".into()),
    }
}

/// Returns the emulated computer's first program: each command, and its output.
fn script(modules: &[&str], commands: impl Iterator<Item = String>) -> String {
    let mut script = String::from(
        "#!/bin/busybox sh\n/bin/busybox mkdir -p /dev /proc /sys /tmp\n/bin/busybox --install -s \
         /bin\nexport PATH=/bin\nmount -t devtmpfs dev /dev\nmount -t proc proc /proc\nmount -t \
         sysfs sys /sys\nmount -t tmpfs tmp /tmp\necho 16 > /proc/sys/vm/nr_hugepages\n",
    );
    for module in modules {
        // In a string: there is no error.
        let _ = writeln!(script, "insmod /bin/{module}");
    }
    for (number, command) in commands.enumerate() {
        let _ = writeln!(
            script,
            "{command} > /tmp/said 2>&1\necho \"{BEGIN}{number} $?\"\ncat /tmp/said\necho \"{END}\""
        );
    }
    script + "poweroff -f\n"
}

const BEGIN: &str = "xtask: run ";
const END: &str = "xtask: end";

/// The runs in what a console says, by their numbers: status, and text.
fn parse(console: &[String]) -> Vec<(usize, Option<i32>, String)> {
    let mut runs = Vec::new();
    let mut lines = console.iter();
    while let Some(line) = lines.next() {
        let Some((number, status)) = line.strip_prefix(BEGIN).and_then(|it| it.split_once(' '))
        else {
            continue;
        };
        if let Ok(number) = number.parse() {
            let said: Vec<_> =
                lines.by_ref().take_while(|line| *line != END).map(String::as_str).collect();
            runs.push((number, status.parse().ok(), said.join("\n")));
        }
    }
    runs
}

impl Computer {
    fn architecture(self) -> &'static str {
        match self {
            Self::Amd | Self::Amd13 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// KVM of Debian's kernel, 6.1, has rings on x86-64 alone, and so guests of guests.
    fn lacks(self) -> &'static [Lack] {
        match self {
            Self::Amd | Self::Amd13 => &[],
            Self::Arm64 => &[RINGS, NESTED],
        }
    }

    /// Why it cannot be emulated here.
    pub fn missing(self) -> Option<Error> {
        match self {
            Self::Amd | Self::Amd13 => tools::qemu_x86(),
            Self::Arm64 => tools::qemu_arm64(),
        }
        .err()
    }

    /// Boots it with these programs, and has what each command said.
    pub fn boot(
        self,
        programs: &[(&str, &Path)],
        commands: &[String],
        pace: Pace,
    ) -> Result<Vec<(Option<i32>, String)>> {
        let (kernel, busybox, modules, console) = match self {
            Self::Amd | Self::Amd13 => {
                let (kernel, busybox, modules) = match self {
                    Self::Amd13 => fetch::host_amd64_13()?,
                    _ => fetch::host_amd64()?,
                };
                // The kernel tries its timer by the time that passes, which an emulator that waits
                // for a CPU does not keep.
                (kernel, busybox, modules, "ttyS0 no_timer_check")
            }
            Self::Arm64 => {
                let (kernel, busybox) = fetch::guest(None)?;
                (kernel, busybox, Vec::new(), "ttyAMA0")
            }
        };
        let scratch = tools::scratch()?;
        let initrd = scratch.join(format!("initrd-kvm-{}", name_of(&self)));
        let name = |file| Path::file_name(file).and_then(|name| name.to_str());
        let names: Vec<&str> = modules.iter().filter_map(|file| name(file)).collect();
        let mut others = programs.to_vec();
        others.extend(names.iter().copied().zip(modules.iter().map(PathBuf::as_path)));
        let script = script(&names, commands.iter().cloned());
        initramfs::make(&initrd, &busybox, &script, &others)?;
        let mut qemu = match self {
            Self::Amd | Self::Amd13 => Command::new(QEMU_X86),
            Self::Arm64 => Command::new(QEMU),
        };
        match self {
            Self::Amd | Self::Amd13 => qemu.args(["-machine", "pc", "-cpu", "max,la57=off"]),
            Self::Arm64 => {
                qemu.args(["-machine", "virt,virtualization=on,gic-version=3"]);
                qemu.args(["-cpu", "cortex-a76"])
            }
        };
        match pace {
            Pace::OfTheHost => qemu.args(["-smp", "2"]),
            Pace::OfInstructions => qemu.args(["-smp", "1", "-icount", "shift=1,sleep=off"]),
        };
        qemu.args(["-accel", "tcg", "-m", "1G", "-nodefaults"])
            .args(["-display", "none", "-serial", "stdio", "-no-reboot"])
            .arg("-kernel")
            .arg(&kernel)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", &format!("console={console} quiet panic=-1")]);
        let mut console = converse(&mut qemu, SILENCE)?;
        if parse(&console).len() < commands.len() {
            // Seen once in ten boots, when what others kept it waiting counted as silence. It is
            // said, and not done again.
            let at = commands.get(parse(&console).len());
            say!(
                "{}: it stood still in {}, and is booted again",
                name_of(&self),
                at.map_or("its boot", String::as_str)
            );
            console = converse(&mut qemu, SILENCE)?;
        }
        let ran = parse(&console);
        let shown = || {
            let last = console.iter().rev().take(20).rev();
            let last: Vec<_> = last.map(|line| format!("\n        | {line}")).collect();
            last.concat()
        };
        let mut said = Vec::new();
        for (number, command) in commands.iter().enumerate() {
            let Some((_, status, text)) = ran.iter().find(|(which, ..)| *which == number) else {
                return Err(Error::Failed(format!(
                    "{}: it did not come to {command}; its console says last:{}",
                    name_of(&self),
                    shown()
                )));
            };
            said.push((*status, text.clone()));
        }
        Ok(said)
    }

    /// The runs of the program on it.
    fn run(self, program: &Path, runs: &[Run]) -> Result<Vec<Outcome>> {
        let command = |run: &Run| format!("tablewright {} --on kvm --rounds 1 --json", run.words);
        let commands: Vec<_> = runs.iter().map(command).collect();
        let said = self.boot(&[("tablewright", program)], &commands, Pace::OfTheHost)?;
        let outcomes = said.iter().map(|(status, said)| outcome(*status, said));
        Ok(outcomes.collect())
    }

    /// The tests of guests on it, each with the last that it said. They measure what a guest waits,
    /// so that the emulated computer's time is that of its instructions: what keeps the emulator
    /// from a CPU is no stall there.
    fn tests(self) -> Result<Vec<(String, std::result::Result<String, String>)>> {
        let tests = fetch::static_tests(self.architecture())?;
        let programs: Vec<_> =
            tests.iter().map(|(name, file)| (name.as_str(), file.as_path())).collect();
        let command =
            |(name, _): &(String, PathBuf)| format!("{name} --test-threads 1 --nocapture");
        let commands: Vec<_> = tests.iter().map(command).collect();
        let said = self.boot(&programs, &commands, Pace::OfInstructions)?;
        let names = tests.iter().map(|(name, _)| name.clone());
        Ok(names.zip(said.into_iter().map(|(status, said)| tested(status, &said))).collect())
    }
}

/// The clock of an emulated computer.
#[derive(Clone, Copy)]
pub enum Pace {
    /// That of the computer at hand; two processors run at once.
    OfTheHost,
    /// The instructions that it executes.
    OfInstructions,
}

/// Returns the result of a test program: how many passed, or all that it said. Tests that were
/// skipped for want of a KVM are none.
fn tested(status: Option<i32>, said: &str) -> std::result::Result<String, String> {
    let result = said.lines().find_map(|line| line.strip_prefix("test result: ok. "));
    match (status, result) {
        (Some(0), Some(result)) if !said.contains("skipped:") => {
            Ok(result.split(';').next().unwrap_or(result).to_owned())
        }
        _ => Err(said.trim().replace('\n', "\n        | ")),
    }
}

/// The lines that a machine says on its console until it is off, or has said nothing for so long.
fn converse(qemu: &mut Command, silence: Duration) -> Result<Vec<String>> {
    let said = listen(qemu, Patience::ForEachLine(silence), |_| ())?;
    let mut lines = said.lines;
    if !said.ended {
        lines.push(format!("(silence for {} s)", silence.as_secs()));
    }
    Ok(lines)
}

/// Repeats the runs on this computer's own KVM; nothing if it has none that may be used.
fn here(program: &Path, runs: &[Run]) -> Result<Vec<Outcome>> {
    runs.iter()
        .map(|run| {
            let output = Command::new(program)
                .args(run.words.split(' '))
                .args(["--on", "kvm", "--rounds", "1", "--json"])
                .output()
                .about(program.display())?;
            let said = match output.status.success() {
                true => &output.stdout,
                false => &output.stderr,
            };
            Ok(outcome(output.status.code(), &String::from_utf8_lossy(said)))
        })
        .collect()
}

/// `cargo xtask kvm`.
///
/// # Errors
/// Something cannot be had or built; a log does not have what its guest wrote; computers do not
/// agree.
pub fn run(args: &KvmArgs) -> Result<()> {
    if args.repeat {
        return kvm_figures::repeat();
    }
    if args.blind {
        return kvm_figures::blind();
    }
    let mut runs = matrix();
    runs.retain(|run| run.short || !args.short);
    let chosen =
        |computer: &Computer| args.computers.is_empty() || args.computers.contains(computer);
    let computers = Computer::value_variants().iter().copied().filter(chosen);
    let (present, missing): (Vec<_>, Vec<_>) = computers
        .map(|computer| (computer, computer.missing()))
        .partition(|(_, missing)| missing.is_none());
    for (computer, why) in missing {
        let why = why.map_or_else(String::new, |why| why.to_string());
        say!("skipped: {}, because {why}", name_of(&computer));
    }
    if present.is_empty() {
        return Ok(());
    }
    let mut all = Vec::new();
    let has_kvm = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if has_kvm && matches!(std::env::consts::ARCH, "x86_64" | "aarch64") {
        let program = fetch::static_lab(std::env::consts::ARCH)?;
        let (outcomes, seconds) = timed(|| here(&program, &runs))?;
        // It may be of a time before rings, and its pool is usually empty.
        let lacks: &[Lack] = &[RINGS, POOL, NESTED];
        all.push(("this computer".to_owned(), outcomes, lacks, seconds));
    } else {
        say!("skipped: this computer, because it has no /dev/kvm for this user");
    }
    let mut tested = Vec::new();
    for (computer, _) in present {
        let program = fetch::static_lab(computer.architecture())?;
        let (outcomes, seconds) = timed(|| computer.run(&program, &runs))?;
        all.push((name_of(&computer), outcomes, computer.lacks(), seconds));
        if !args.short {
            tested.push((name_of(&computer), computer.tests()?));
        }
    }
    let mut failed = 0;
    let mut tell = |what: &str, verdict: std::result::Result<String, String>| {
        let (word, said) = match verdict {
            Ok(said) => ("ok    ", said),
            Err(why) => {
                failed += 1;
                ("FAILED", why)
            }
        };
        say!("{word}  {what:<54} {said}");
    };
    for (name, outcomes, lacks, seconds) in &all {
        say!("{name}, {seconds:.1} s:");
        for (number, (run, outcome)) in runs.iter().zip(outcomes).enumerate() {
            let verdict = judge(run, outcome, lacks).and_then(|said| {
                let mut others = all.iter().take_while(|(other, ..)| other != name);
                let differs = others.find_map(|(other, theirs, ..)| {
                    let differs = difference(outcome, theirs.get(number)?)?;
                    Some(format!("not as on {other}: {differs}"))
                });
                differs.map_or(Ok(said), Err)
            });
            tell(&run.words, verdict);
        }
    }
    for (name, tests) in &tested {
        say!("{name}, tests of guests, its time that of its instructions:");
        for (test, verdict) in tests {
            tell(test, verdict.clone());
        }
    }
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed(format!("{failed} runs or tests on KVM failed"))),
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let started = Instant::now();
    work().map(|done| (done, started.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(harvested: u64, written: u64) -> Outcome {
        of("NPT", harvested, written)
    }

    fn of(paging: &str, harvested: u64, written: u64) -> Outcome {
        let report = format!(
            r#"{{"parameters": {{"host": {{"paging": "{paging}"}}}}, "rows": [{{"phases": [
                {{"phase": "get 1", "pages": 9, "harvested": {harvested}, "written": {written}}}
            ]}}]}}"#
        );
        outcome(Some(0), &report)
    }

    fn run(words: &str) -> Run {
        Run { words: words.into(), short: true }
    }

    #[test]
    fn the_matrix_has_each_way_on_each_kind_of_memory_and_short_ones_of_each_experiment() {
        let runs = matrix();
        assert_eq!(runs.len(), 31);
        for experiment in ["dirty-log -b", "dirty-log -g", "--ring", "page-table-test"] {
            let mut short = runs.iter().filter(|run| run.short);
            assert!(short.any(|run| run.words.contains(experiment)), "{experiment}");
        }
    }

    #[test]
    fn a_log_that_is_not_what_was_written_is_an_error_and_so_is_another_computers_count() {
        let dirty = run("dirty-log");
        assert!(judge(&dirty, &log(9, 9), &[]).is_ok());
        assert!(judge(&dirty, &log(8, 9), &[]).is_err());
        assert!(judge(&dirty, &log(0, 0), &[]).is_err());
        assert!(judge(&dirty, &log(9, 8), &[]).is_err());
        let split = run("page-table-test -s anonymous_thp");
        assert!(judge(&split, &of("software", 9, 8), &[]).is_ok());
        assert!(judge(&split, &log(9, 8), &[]).is_err());
        assert_eq!(difference(&log(9, 9), &log(9, 9)), None);
        assert!(difference(&log(9, 9), &log(8, 8)).is_some());
    }

    #[test]
    fn a_run_may_be_refused_for_what_a_computer_lacks_alone() {
        let refused = outcome(Some(2), "error: this kernel's KVM has no ring of dirty pages");
        let ring = run("dirty-log --ring 1024");
        assert!(judge(&ring, &refused, &[POOL, RINGS]).is_ok());
        assert!(judge(&ring, &refused, &[]).is_err());
        assert!(judge(&run("dirty-log"), &refused, &[POOL, RINGS]).is_err());
        for (status, said) in [(Some(1), "error: get 1: the log"), (None, ""), (Some(0), "{")] {
            let failed = outcome(status, said);
            assert!(judge(&ring, &failed, &[POOL, RINGS]).is_err(), "{failed:?}");
        }
    }

    #[test]
    fn a_test_that_was_skipped_or_failed_is_none() {
        let passed =
            "\nrunning 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored";
        assert_eq!(tested(Some(0), passed).as_deref(), Ok("1 passed"));
        assert!(tested(Some(101), passed).is_err());
        assert!(tested(Some(0), "").is_err());
        let skipped = format!("skipped: no /dev/kvm\n{passed}");
        assert!(tested(Some(0), &skipped).is_err());
    }

    #[test]
    fn a_machine_that_stands_still_is_given_up() {
        let mut machine = Command::new("sh");
        machine.args(["-c", "echo one; exec sleep 60"]);
        let started = std::time::Instant::now();
        let lines = converse(&mut machine, Duration::from_millis(500)).unwrap();
        assert_eq!(lines.first().map(String::as_str), Some("one"));
        assert_eq!(lines.len(), 2);
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn runs_are_found_on_a_console_that_others_write_to() {
        let console = "[ 0.1] boot\nxtask: run 0 0\n{\n}\nxtask: end\n[ 1.0] noise\nxtask: run 1 \
                       2\nerror: no\nxtask: end";
        let console: Vec<String> = console.lines().map(str::to_owned).collect();
        let expected = [(0, Some(0), "{\n}".to_owned()), (1, Some(2), "error: no".to_owned())];
        assert_eq!(parse(&console), expected);
    }
}

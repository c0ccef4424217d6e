//! Checks the TLB maintenance of real runs: what the hypervisor does to its guest's tables, taken
//! out of the emulator instruction by instruction (`xtask/plugin/src/record.rs`), and held against
//! the rules of the software machine (`machine/src/hardware/replay.rs`).
//!
//! The emulator has no VMIDs, no walk caches, and forgets all that is combined when anything of it
//! is invalidated. The machine's rules take it that everything is remembered that may be. So it
//! does not matter what the guest happens to touch: wrong is an order of instructions, and the runs
//! have only to execute it. That is why a small guest will do ([`GUEST`]), and why each bug that is
//! planted is found every time.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use tablewright_machine::replay::{Finding, Made, Replay, Replayed};
use tablewright_machine::{Architecture, Granule, Memory, Regime, Rule};
use tablewright_watch as watch;

use crate::counters::Count;
use crate::emulator::Emulator;
use crate::fetch::{self, Files};
use crate::qemu::{self, Begin, Boot, CPU_MAX, End, Ran, file};
use crate::reports::Report;
use crate::several::{self, Several};
use crate::{About as _, Arch, Error, LIMIT, Leaves, Log, Result, load, out, planted, say};

/// The guest of most runs: it touches its memory again and again.
const GUEST: &str = "churn";

#[derive(Args)]
pub struct CheckArgs {
    /// Debian's kernel with its load instead of the small guest, with pages and tables taken away
    #[arg(long)]
    linux: bool,
    /// Find what `tablewright watch` finds of any kernel, by QEMU 11.1 of Debian 13's backports
    #[arg(long)]
    watch: bool,
    /// Only say what runs there are
    #[arg(long)]
    list: bool,
    /// Only the run of this name, or those whose names contain it
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// A run, and what has to be found in it.
struct Run {
    name: &'static str,
    cpu: &'static str,
    cpus: u8,
    leaves: Leaves,
    evict: u64,
    tables: bool,
    log: Option<Log>,
    snapshot: bool,
    /// The number of small guests at once, with VMIDs of 3 bits, instead of one.
    guests: u8,
    /// The planted bug, and the rules that may be the first to be broken.
    plant: Option<(&'static str, &'static [Rule])>,
    /// The rule by which `tablewright watch` finds it, if it does.
    watched: Option<watch::Rule>,
}

impl Run {
    const fn new(name: &'static str, cpu: &'static str, leaves: Leaves) -> Self {
        Self {
            name,
            cpu,
            cpus: 2,
            leaves,
            evict: 0,
            tables: false,
            log: None,
            snapshot: false,
            guests: 0,
            plant: None,
            watched: None,
        }
    }

    const fn cpus(mut self, cpus: u8) -> Self {
        self.cpus = cpus;
        self
    }

    /// Whether what is planted is the engine's.
    fn is_of_engine(&self) -> bool {
        (self.plant).is_some_and(|(what, _)| what == planted::FREED_AT_ONCE.name)
    }

    const fn guests(mut self, count: u8) -> Self {
        self.guests = count;
        self
    }

    const fn evict(mut self, count: u64) -> Self {
        self.evict = count;
        self
    }

    const fn tables(mut self) -> Self {
        self.tables = true;
        self
    }

    const fn log(mut self, log: Log) -> Self {
        self.log = Some(log);
        self
    }

    const fn snapshot(mut self, log: Log) -> Self {
        self.snapshot = true;
        self.log(log)
    }

    const fn plant(mut self, what: &'static str, rules: &'static [Rule]) -> Self {
        self.plant = Some((what, rules));
        self
    }

    const fn watched(mut self, rule: watch::Rule) -> Self {
        self.watched = Some(rule);
        self
    }
}

const PLAIN: &str = "cortex-a57";

const RUNS: &[Run] = &[
    Run::new("pages", CPU_MAX, Leaves::Pages).evict(500),
    Run::new("tables", CPU_MAX, Leaves::Pages).cpus(4).evict(100).tables(),
    Run::new("tables-one-by-one", PLAIN, Leaves::Pages).evict(40).tables(),
    Run::new("blocks", PLAIN, Leaves::Blocks).evict(200),
    Run::new("log", CPU_MAX, Leaves::Mixed).evict(200).log(Log::All),
    Run::new("snapshot-bitmap", CPU_MAX, Leaves::Blocks).snapshot(Log::Bitmap),
    Run::new("snapshot-ring", PLAIN, Leaves::Pages).snapshot(Log::Ring),
    Run::new("guests", CPU_MAX, Leaves::Pages).guests(9).evict(900),
    Run::new("guests-tables-log", PLAIN, Leaves::Mixed).guests(9).evict(180).tables().log(Log::All),
    Run::new("not-forgotten", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("not-forgotten", &[Rule::IdentifierReused])
        .watched(watch::Rule::IdentifierReused),
    Run::new("old-identifier", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("old-identifier", &[Rule::IdentifierReused])
        .watched(watch::Rule::IdentifierReused),
    Run::new("wrong-vmid", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(900)
        .plant("wrong-vmid", &[Rule::Invalidation])
        .watched(watch::Rule::BreakBeforeMake),
    Run::new("root-of-flush", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("root-of-flush", &[Rule::IdentifierReused])
        .watched(watch::Rule::IdentifierReused),
    Run::new("no-isb", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("no-isb", &[Rule::Invalidation]),
    Run::new("combined-first", CPU_MAX, Leaves::Pages)
        .evict(20)
        .plant("combined-first", &[Rule::Invalidation])
        .watched(watch::Rule::BreakBeforeMake),
    Run::new("walks", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant("walks", &[Rule::FreedEarly]),
    Run::new("freed-at-once", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant(planted::FREED_AT_ONCE.name, &[Rule::FreedEarly])
        .watched(watch::Rule::TableReused),
    Run::new("vmids", CPU_MAX, Leaves::Pages)
        .evict(20)
        .plant("vmids", &[Rule::IdentifierReused])
        .watched(watch::Rule::BreakBeforeMake),
    Run::new("leaves-of-tables", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant("leaves-of-tables", &[Rule::FreedEarly])
        .watched(watch::Rule::TableReused),
    Run::new("local", CPU_MAX, Leaves::Pages)
        .evict(20)
        .plant("local", &[Rule::Invalidation])
        .watched(watch::Rule::BreakBeforeMake),
    Run::new("copy-first", CPU_MAX, Leaves::Pages)
        .snapshot(Log::Bitmap)
        .plant("copy-first", &[Rule::Invalidation]),
    Run::new("first-page", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant("first-page", &[Rule::FreedEarly])
        .watched(watch::Rule::BreakBeforeMake),
];

/// A Linux, with its load.
const LINUX: &[Run] = &[
    Run::new("linux-pages", CPU_MAX, Leaves::Mixed).evict(2000),
    Run::new("linux-tables", CPU_MAX, Leaves::Pages).evict(200).tables(),
    Run::new("linux-log", CPU_MAX, Leaves::Mixed).evict(500).log(Log::All),
    Run::new("linux-snapshot", PLAIN, Leaves::Blocks).snapshot(Log::Bitmap),
];

/// Memory of the small guest, and of a Linux, in MiB.
const MEMORY: u64 = 16;
const MEMORY_OF_LINUX: u64 = 256;
/// Rounds of the load of a Linux.
const ROUNDS: u32 = 1;

/// The first address of the machine's memory.
const START: u64 = 1 << 30;

/// One thing that happened, as the plugin writes it down.
struct Record {
    kind: u8,
    cpu: usize,
    number: u32,
    address: u64,
    value: u64,
}

impl Record {
    const SIZE: usize = 24;

    fn of(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |from: usize| {
            let bytes = bytes[from..from + 8].iter().rev();
            bytes.fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        Self {
            kind: bytes[0],
            cpu: usize::from(bytes[1]),
            number: (word(0) >> 32) as u32,
            address: word(8),
            value: word(16),
        }
    }
}

/// The result of checking a recording.
struct Checked {
    findings: Vec<Finding>,
    replayed: Replayed,
    records: u64,
}

/// Replays what was recorded, with so many processors.
fn replay(mut records: impl Read, cpus: usize) -> Result<Checked> {
    let architecture = Architecture {
        guest: Some(Regime::Arm64Stage1 { granule: Granule::K4, wide: false }),
        ..Architecture::arm64(Regime::Arm64Stage2 {
            granule: Granule::K4,
            input_bits: 40,
            wide: false,
            forced_write_back: false,
        })
    };
    let mut bytes = [0; Record::SIZE];
    let (mut replay, mut first, mut count, mut is_whole) = (None, 0, 0, false);
    while records.read_exact(&mut bytes).is_ok() {
        let record = Record::of(&bytes);
        count += 1;
        let is = |report: Report| record.number == report as u32;
        match (record.kind, &mut replay) {
            (3, None) if is(Report::First) => first = record.value,
            (3, None) if is(Report::Last) => {
                let frames = (record.value + 1 - first) >> 12;
                let memory = Memory::new(frames as usize, 12, first);
                replay = Some(Replay::new(architecture.clone(), cpus, memory));
            }
            (_, Some(replay)) => is_whole |= apply(replay, &record),
            _ => {}
        }
    }
    match replay {
        // What went wrong may be the reason why it has no end.
        Some(replay) if is_whole || !replay.findings().is_empty() => Ok(Checked {
            findings: replay.findings().to_vec(),
            replayed: replay.replayed(),
            records: count,
        }),
        _ => Err(Error::Failed(format!("what was recorded has no end, after {count} records"))),
    }
}

/// Does one thing again. Whether it was the last.
fn apply(replay: &mut Replay, record: &Record) -> bool {
    const VTTBR: u32 = 0xd51c_2100;
    const ERET: u32 = 0xd69f_03e0;
    let (cpu, number) = (record.cpu, record.number);
    let operand = (record.address != 0).then_some(record.value);
    let is = |report: Report| number == report as u32;
    match record.kind {
        0 => replay.store(cpu, record.address, record.value, Made::by(number)),
        1 if number & !0x1f == VTTBR => match operand {
            Some(vttbr) => replay.load_root(cpu, vttbr),
            None => replay.unknown(cpu, number),
        },
        1 if number == ERET => replay.returned(cpu),
        1 => replay.executed(cpu, number, operand),
        2 => replay.touched(cpu, record.address),
        3 if is(Report::Taken) => replay.taken(cpu, record.value),
        3 if is(Report::Empty) => replay.empty(cpu, record.value),
        3 if is(Report::Given) => replay.given(cpu, record.value),
        3 if is(Report::End) => return record.value == 0,
        4 => replay.looked(cpu, record.address as usize, record.value),
        5 => replay.announced(record.address as usize, record.value),
        6 => replay.left(record.address, record.value),
        _ => {}
    }
    false
}

/// The guests of a run that has several.
fn several_of(run: &Run, image: &Path) -> Option<Several> {
    (run.guests != 0).then(|| Several {
        kernels: 0,
        memory: 0,
        small: run.guests,
        image: image.into(),
        bits: 3,
        seconds: 0,
    })
}

/// Boots with a plugin, which `option` names to QEMU.
fn boot(
    run: &Run,
    files: &Files,
    is_linux: bool,
    option: impl FnOnce(&Boot<'_>) -> String,
) -> Result<(Ran, usize)> {
    let image_of_small = match run.guests {
        0 => PathBuf::new(),
        _ => fetch::hypervisor("small")?,
    };
    let several = several_of(run, &image_of_small);
    let files = match &several {
        Some(several) => &several::files(several, files.clone()),
        None => files,
    };
    let memory = match &several {
        Some(several) => several.all_memory(),
        None if is_linux => MEMORY_OF_LINUX,
        None => MEMORY,
    };
    let mut boot = Boot {
        cpu: run.cpu,
        cpus: run.cpus,
        memory,
        leaves: run.leaves,
        evict: run.evict,
        tables: run.tables,
        log: run.log,
        snapshot: run.snapshot.then_some(Begin::Bell),
        several: several.as_ref(),
        plant: run.plant.map(|(what, _)| what).filter(|_| !run.is_of_engine()),
        guest: match (is_linux, run.snapshot) {
            (true, true) => format!("copy load={ROUNDS}"),
            (true, false) => format!("load={ROUNDS}"),
            (false, true) => "churn copy".into(),
            (false, false) => String::new(),
        },
        limit: Some(if is_linux { 4 * LIMIT } else { LIMIT }),
        ..Boot::of(files)
    };
    // The clock goes by instructions: a log that is harvested so many times in a second is
    // harvested often enough for the small guest, and not too often for the other.
    let shift = if is_linux { 4 } else { 8 };
    let more = [
        "-accel".into(),
        "tcg,thread=single".into(),
        "-icount".into(),
        format!("shift={shift}"),
        "-plugin".into(),
        option(&boot),
    ];
    boot.more = &more;
    let cpus = usize::from(boot.cpus + u8::from(boot.log.is_some()));
    qemu::run(&boot, |_| (), |_| ()).map(|ran| (ran, cpus))
}

/// Boots, records, and replays.
fn check(run: &Run, files: &Files, plugin: &Path, is_linux: bool) -> Result<(Ran, Checked)> {
    let recorded = fetch::scratch()?.join(format!("recorded-{}", std::process::id()));
    let image = qemu::Watched::of(&files.hypervisor)?;
    let (ran, cpus) = boot(run, files, is_linux, |boot| {
        format!(
            "{},record={},text={}-{},slots={}-{},reported={},end={}",
            file(plugin),
            file(&recorded),
            image.text.start,
            image.text.end,
            image.walks.start,
            image.walks.end,
            image.reported,
            START + (boot.all_memory() << 20),
        )
    })?;
    let records = File::open(&recorded).about(recorded.display())?;
    let checked = replay(BufReader::with_capacity(1 << 20, records), cpus)?;
    // It may be large.
    let _ = std::fs::remove_file(&recorded);
    Ok((ran, checked))
}

/// Boots as any kernel is watched: what was found, and whether that is as it should be.
fn watched(
    run: &Run,
    files: &Files,
    plugin: &Path,
    is_linux: bool,
) -> Result<std::result::Result<String, String>> {
    let loaded = watch::session::Loaded::new(plugin).about("what is found")?;
    let option = loaded.option.to_string_lossy().into_owned();
    let (ran, _) = boot(run, files, is_linux, |_| option)?;
    let findings = loaded.findings().about("what was found")?;
    let said = |it: &watch::Finding| format!("{}: {}; {}", it.rule, it.missing, it.then);
    let is_it = |it: &&watch::Finding| Some(it.rule) == run.watched;
    Ok(match (findings.iter().find(is_it), findings.first()) {
        (Some(found), _) => Ok(said(found)),
        (None, Some(other)) => Err(said(other)),
        (None, None) if run.watched.is_some() => Err("what was planted was not found".into()),
        (None, None) => judge_run(run, &ran, is_linux).map(|()| "nothing was found".into()),
    })
}

/// Whether it came out as it should; of what is planted, what was found.
fn judge(
    run: &Run,
    ran: &Ran,
    checked: &Checked,
    is_linux: bool,
) -> std::result::Result<(), String> {
    let first = checked.findings.first();
    if let Some((_, rules)) = run.plant {
        return match first {
            None => Err("what was planted was not found".into()),
            Some(first) if !rules.contains(&first.rule) => {
                Err(format!("another rule: {}", said(first)))
            }
            Some(first) => {
                say!("        as it should: {}", said(first));
                Ok(())
            }
        };
    }
    if let Some(first) = first {
        return Err(said(first));
    }
    judge_run(run, ran, is_linux)?;
    if run.guests != 0 {
        return judge_several(ran, checked, run);
    }
    // A run without changes to invalidate shows nothing.
    let Replayed { invalidations, owed, pages, looks, .. } = checked.replayed;
    match invalidations == 0 || owed == 0 || pages == 0 || run.tables && looks == 0 {
        true => Err("there was nothing to check".into()),
        false => Ok(()),
    }
}

/// Whether a run came to the end that it should, whatever was found.
fn judge_run(run: &Run, ran: &Ran, is_linux: bool) -> std::result::Result<(), String> {
    if ran.end != End::PoweredOff {
        return Err(format!("it ended so: {:?}", ran.end));
    }
    if let Some(several) = several_of(run, Path::new("")) {
        return several::check(&several, several::VCPUS, ROUNDS, ran).map(|_| ());
    }
    match is_linux {
        true => load::check(&ran.console, run.cpus, ROUNDS, run.snapshot)?,
        false if ran.console.iter().any(|line| line == "churn: done") => {}
        false => return Err(format!("the guest says: {}", ran.console.join("; "))),
    }
    if run.snapshot {
        ran.check_snapshot()?;
    }
    if ran.count(Count::Evicted) != run.evict {
        return Err(format!(
            "{} frames were taken away, of {}",
            ran.count(Count::Evicted),
            run.evict
        ));
    }
    if run.log.is_some() && ran.count(Count::Marks) == 0 {
        return Err("nothing was logged".into());
    }
    Ok(())
}

/// Whether there was something to check of several guests: VMIDs that rolled over, and edits of
/// those that were not loaded.
fn judge_several(ran: &Ran, checked: &Checked, run: &Run) -> std::result::Result<(), String> {
    let Replayed { invalidations, owed, pages, roots, .. } = checked.replayed;
    let done = [
        invalidations,
        owed,
        pages,
        roots,
        ran.count(Count::RollOvers),
        ran.count(Count::Lent),
        ran.count(Count::Evicted),
        ran.count(Count::Marks) + u64::from(run.log.is_none()),
    ];
    match done.contains(&0) {
        true => Err(format!("there was nothing to check: {done:?}")),
        false => Ok(()),
    }
}

fn said(finding: &Finding) -> String {
    let Finding { rule, what, cpu, step } = finding;
    format!("{rule}: {what} (CPU {cpu}, step {step})")
}

/// Checks runs, and that what is planted is found.
///
/// # Errors
/// How many failed, or what is missing.
pub fn run(args: &CheckArgs) -> Result<()> {
    let runs = if args.linux { LINUX } else { RUNS };
    let is_meant = |run: &&Run| match &args.name {
        Some(name) => run.name.contains(name.as_str()),
        None => true,
    };
    if args.list {
        for run in runs.iter().filter(is_meant) {
            say!("{:8}{}", if run.plant.is_some() { "planted" } else { "" }, run.name);
        }
        return Ok(());
    }
    if !runs.iter().any(|run| is_meant(&run)) {
        return Err(Error::Other("no run has such a name; --list says which there are".into()));
    }
    let plugin = match args.watch {
        true => fetch::watching_plugin(),
        false => fetch::plugin(&Emulator::Installed),
    };
    let plugin = match plugin {
        Err(Error::Missing(why)) => {
            say!("skipped: {why}");
            return Ok(());
        }
        plugin => plugin?,
    };
    let mut files = fetch::everything(fetch::Choice::default())?;
    if args.watch {
        files.emulator = Emulator::newest(Arch::Arm64)?;
    }
    if !args.linux {
        files.kernel = fetch::hypervisor(GUEST)?;
    }
    let (mut passed, mut failed) = (0, 0);
    for run in runs.iter().filter(is_meant) {
        let mut files = files.clone();
        if run.is_of_engine() {
            files.hypervisor = planted::hypervisor(&planted::FREED_AT_ONCE)?;
        }
        let started = Instant::now();
        if args.watch {
            // A bug that breaks no rule of the architecture is not found so.
            if run.plant.is_some() && run.watched.is_none() {
                continue;
            }
            let result = out::clocked(run.name, || watched(run, &files, &plugin, args.linux))?;
            let seconds = started.elapsed().as_secs_f64();
            match result {
                Ok(found) => {
                    passed += 1;
                    say!("ok      {} ({seconds:.1} s): {found}", run.name);
                }
                Err(why) => {
                    failed += 1;
                    say!("FAILED  {} ({seconds:.1} s): {why}", run.name);
                }
            }
            continue;
        }
        let (ran, checked) = out::clocked(run.name, || check(run, &files, &plugin, args.linux))?;
        let seconds = started.elapsed().as_secs_f64();
        match judge(run, &ran, &checked, args.linux) {
            Ok(()) => {
                passed += 1;
                let Replayed {
                    stores, barriers, invalidations, frames, pages, returns, owed, ..
                } = checked.replayed;
                say!(
                    "ok      {} ({seconds:.1} s; {stores} stores, {barriers} barriers, \
                     {invalidations} invalidations, {owed} changes, {frames} tables taken or given \
                     back, {pages} pages used, {returns} returns)",
                    run.name
                );
            }
            Err(why) => {
                failed += 1;
                say!("FAILED  {} ({seconds:.1} s, {} records): {why}", run.name, checked.records);
                for finding in checked.findings.iter().skip(1).take(5) {
                    say!("        | {}", said(finding));
                }
            }
        }
    }
    say!("checked runs: {passed} right, {failed} wrong");
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed(format!("{failed} runs are not as they should be"))),
    }
}

#[cfg(test)]
mod tests {
    use super::{Record, Report, replay};

    fn record(kind: u8, cpu: u8, number: u32, address: u64, value: u64) -> [u8; Record::SIZE] {
        let mut bytes = [0; Record::SIZE];
        bytes[..2].copy_from_slice(&[kind, cpu]);
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..16].copy_from_slice(&address.to_le_bytes());
        bytes[16..].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    #[test]
    fn a_recording_is_replayed_to_its_end() {
        let said = |report: Report, value| record(3, 0, report as u32, 0, value);
        let mut all = vec![
            said(Report::First, 0x4800_0000),
            said(Report::Last, 0x4800_ffff),
            said(Report::Taken, 0x4800_1000),
            said(Report::Given, 0x4800_1000),
        ];
        let replayed = |all: &[[u8; Record::SIZE]]| replay(&*all.concat(), 1);
        assert!(replayed(&all).is_err(), "it has no end");
        all.push(said(Report::End, 0));
        assert!(
            replayed(&all).is_ok_and(|all| all.findings.is_empty() && all.replayed.frames == 2)
        );
        all.insert(4, said(Report::Given, 0x4800_1000));
        assert!(replayed(&all).is_ok_and(|all| all.findings.len() == 1));
        // The load of a root that was not said.
        all[4] = record(1, 0, 0xd51c_2108, 0, 0);
        assert!(replayed(&all).is_ok_and(|all| all.findings.len() == 1));
    }
}

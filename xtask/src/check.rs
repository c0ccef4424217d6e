//! Checks the TLB maintenance of real runs: what the hypervisor does to its guest's tables,
//! [watched](tablewright_watch) in the emulator as any kernel's.
//!
//! The watch assumes that everything is remembered that may be, where the emulator forgets all
//! that is combined when anything of it is invalidated. So it does not matter what the guest
//! happens to touch: wrong is an order of instructions, and the runs have only to execute it. That
//! is why a small guest will do ([`GUEST`]), and why each bug that is planted is found every time.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use tablewright_watch::{Finding, Rule, session};

use crate::counters::Count;
use crate::emulator::Emulator;
use crate::fetch::{self, Files};
use crate::guests::Several;
use crate::qemu::{self, Begin, Boot, CPU_MAX, End, Ran};
use crate::several;
use crate::{About as _, Arch, Error, LIMIT, Leaves, Log, Result, load, out, planted, say};

/// The guest of most runs: it touches its memory again and again.
const GUEST: &str = "churn";

#[derive(Args)]
pub struct CheckArgs {
    /// Debian's kernel with its load instead of the small guest, with pages and tables taken away
    #[arg(long)]
    linux: bool,
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
    /// The planted bug, and the rule that it breaks.
    plant: Option<(&'static str, Rule)>,
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

    const fn plant(mut self, what: &'static str, rule: Rule) -> Self {
        self.plant = Some((what, rule));
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
        .plant("not-forgotten", Rule::IdentifierReused),
    Run::new("old-identifier", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("old-identifier", Rule::IdentifierReused),
    // Five guests do not use up the VMIDs. A roll-over invalidates the entries that this bug
    // leaves.
    Run::new("wrong-vmid", CPU_MAX, Leaves::Pages)
        .guests(5)
        .evict(90)
        .plant("wrong-vmid", Rule::BreakBeforeMake),
    Run::new("root-of-flush", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("root-of-flush", Rule::IdentifierReused),
    Run::new("no-isb", CPU_MAX, Leaves::Pages)
        .guests(9)
        .evict(90)
        .plant("no-isb", Rule::Unsynchronized),
    Run::new("combined-first", CPU_MAX, Leaves::Pages)
        .evict(20)
        .plant("combined-first", Rule::BreakBeforeMake),
    Run::new("freed-at-once", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant(planted::FREED_AT_ONCE.name, Rule::TableReused),
    Run::new("vmids", CPU_MAX, Leaves::Pages).evict(20).plant("vmids", Rule::BreakBeforeMake),
    Run::new("leaves-of-tables", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant("leaves-of-tables", Rule::TableReused),
    Run::new("local", CPU_MAX, Leaves::Pages).evict(20).plant("local", Rule::BreakBeforeMake),
    Run::new("first-page", CPU_MAX, Leaves::Pages)
        .evict(10)
        .tables()
        .plant("first-page", Rule::BreakBeforeMake),
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

/// Boots with the plugin that watches, of these options.
fn boot(run: &Run, files: &Files, plugin: String, is_linux: bool) -> Result<Ran> {
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
    // The clock goes by instructions: a log that is harvested so many times in a second is
    // harvested often enough for the small guest, and not too often for the other.
    let shift = if is_linux { 4 } else { 8 };
    let more = [
        "-accel".into(),
        "tcg,thread=single".into(),
        "-icount".into(),
        format!("shift={shift}"),
        "-plugin".into(),
        plugin,
    ];
    let boot = Boot {
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
        more: &more,
        ..Boot::of(files)
    };
    qemu::run(&boot, |_| (), |_| ())
}

/// Boots, and returns what was found, and whether that is as it should be.
fn check(
    run: &Run,
    files: &Files,
    plugin: &Path,
    is_linux: bool,
) -> Result<std::result::Result<String, String>> {
    let loaded = session::Loaded::new(plugin).about("what is found")?;
    let ran = boot(run, files, loaded.option.to_string_lossy().into_owned(), is_linux)?;
    let findings = loaded.findings().about("what was found")?;
    let said = |it: &Finding| format!("{}: {}; {}", it.rule, it.missing, it.then);
    let is_planted = |it: &&Finding| run.plant.is_some_and(|(_, rule)| it.rule == rule);
    Ok(match (findings.iter().find(is_planted), findings.first()) {
        (Some(found), _) => Ok(said(found)),
        (None, Some(other)) => Err(said(other)),
        (None, None) if run.plant.is_some() => Err("what was planted was not found".into()),
        (None, None) => judge(run, &ran, is_linux).map(|()| "nothing was found".into()),
    })
}

/// Whether a run came to the end that it should, and had something in it to check.
fn judge(run: &Run, ran: &Ran, is_linux: bool) -> std::result::Result<(), String> {
    if ran.end != End::PoweredOff {
        return Err(format!("it ended so: {:?}", ran.end));
    }
    if run.log.is_some() && ran.count(Count::Marks) == 0 {
        return Err("nothing was logged".into());
    }
    if let Some(several) = several_of(run, Path::new("")) {
        // VMIDs that rolled over, and edits of guests that were not loaded.
        let done = [Count::RollOvers, Count::Lent, Count::Evicted].map(|count| ran.count(count));
        if done.contains(&0) {
            return Err(format!("there was nothing to check: {done:?}"));
        }
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
    match ran.count(Count::Evicted) {
        evicted if evicted == run.evict => Ok(()),
        evicted => Err(format!("{evicted} frames were taken away, of {}", run.evict)),
    }
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
    let plugin = match fetch::watching_plugin() {
        Err(Error::Missing(why)) => {
            say!("skipped: {why}");
            return Ok(());
        }
        plugin => plugin?,
    };
    let mut files = fetch::everything(fetch::Choice::default())?;
    files.emulator = Emulator::newest(Arch::Arm64)?;
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
        let checked = out::clocked(run.name, || check(run, &files, &plugin, args.linux))?;
        let seconds = started.elapsed().as_secs_f64();
        match checked {
            Ok(found) => {
                passed += 1;
                say!("ok      {} ({seconds:.1} s): {found}", run.name);
            }
            Err(why) => {
                failed += 1;
                say!("FAILED  {} ({seconds:.1} s): {why}", run.name);
            }
        }
    }
    say!("checked runs: {passed} right, {failed} wrong");
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed(format!("{failed} runs are not as they should be"))),
    }
}

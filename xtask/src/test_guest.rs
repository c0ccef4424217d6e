//! Guests under load, in a matrix: the hashes have to be right; and where an invalidation is left out, it has to be missed.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use crate::counters::{Count, NAMES};
use crate::fetch::{Choice, Files, Granule, Variant};
use crate::qemu::{self, Begin, Boot, CPU_MAX, End, Ran};
use crate::{
    Arch, Error, LIMIT, Leaves, Log, Result, bare, fetch, flushes, hyperv_tests, linear, load,
    log_start, matrix, name_of, out, say, several, smmu, x86,
};

#[derive(Args)]
pub struct TestArgs {
    /// Everything: more CPUs, more evictions, and each kind of mapping with each
    #[arg(long)]
    all: bool,
    /// Only say what tests there are, and which are in the short set
    #[arg(long)]
    list: bool,
    /// Boot each guest so many times in a row
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Another QEMU than the one that is installed, for guests of arm64: a program, or `debian-13`, which is fetched
    #[arg(long, value_name = "PROGRAM")]
    qemu: Option<PathBuf>,
    /// Only the test of this name, or those whose names contain it
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// A plain processor, without anything that was added since 2011.
const CPU_PLAIN: &str = "cortex-a57";

struct Test {
    cpu: &'static str,
    cpus: u8,
    leaves: Leaves,
    evict: u64,
    /// Tables are detached with the frames that are taken away.
    tables: bool,
    check: u64,
    log: Option<Log>,
    snapshot: bool,
    /// The guest that means no good, instead of a load.
    hostile: bool,
    /// These invalidations are left out: it has to go wrong, and this has to be counted.
    omit: Option<(&'static str, Count)>,
    /// Part of the short matrix.
    short: bool,
    /// What the hypervisor is built for, without marks.
    variant: Variant,
    /// In MiB.
    memory: u64,
    /// In how many pieces.
    pieces: u8,
}

impl Test {
    const fn new(cpu: &'static str, cpus: u8, leaves: Leaves) -> Self {
        Self {
            cpu,
            cpus,
            leaves,
            evict: 0,
            tables: false,
            check: 0,
            log: None,
            snapshot: false,
            hostile: false,
            omit: None,
            short: false,
            variant: Variant {
                granule: Granule::K4,
                forced: false,
                marks: false,
            },
            memory: 256,
            pieces: 1,
        }
    }

    const fn on(mut self, granule: Granule) -> Self {
        self.variant.granule = granule;
        self
    }

    const fn forced(mut self) -> Self {
        self.variant.forced = true;
        self
    }

    const fn memory(mut self, memory: u64) -> Self {
        self.memory = memory;
        self
    }

    const fn pieces(mut self, pieces: u8) -> Self {
        self.pieces = pieces;
        self
    }

    /// What the hypervisor is built for.
    fn variant(&self) -> Variant {
        Variant {
            marks: self.log == Some(Log::Hardware),
            ..self.variant
        }
    }

    const fn evict(mut self, count: u64) -> Self {
        self.evict = count;
        self
    }

    const fn tables(mut self) -> Self {
        self.tables = true;
        self
    }

    const fn check(mut self, count: u64) -> Self {
        self.check = count;
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

    const fn hostile(mut self) -> Self {
        self.hostile = true;
        self
    }

    const fn omit(mut self, class: &'static str, seen: Count) -> Self {
        self.omit = Some((class, seen));
        self
    }

    const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    fn name(&self) -> String {
        let cpu = self.cpu.split(',').next().unwrap_or_default();
        let mut name = format!("{cpu}-{}cpu-{}", self.cpus, name_of(&self.leaves));
        if self.variant.granule != Granule::K4 {
            name += &format!("-granule{}", name_of(&self.variant.granule));
        }
        if self.pieces != 1 {
            name += &format!("-pieces{}", self.pieces);
        }
        if self.variant.forced {
            name += "-forced";
        }
        if self.evict != 0 {
            name += &format!("-evict{}", self.evict);
        }
        if self.tables {
            name += "-tables";
        }
        if let Some(log) = &self.log {
            name += &format!(
                "-{}-{}",
                if self.snapshot { "snapshot" } else { "log" },
                name_of(log)
            );
        }
        if self.check != 0 {
            name += &format!("-check{}", self.check);
        }
        if self.hostile {
            name += "-hostile";
        }
        if let Some((class, _)) = self.omit {
            name += &format!("-without-{class}");
        }
        name
    }
}

const TESTS: &[Test] = &[
    Test::new(CPU_MAX, 1, Leaves::Pages).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages),
    Test::new(CPU_MAX, 4, Leaves::Mixed),
    Test::new(CPU_PLAIN, 1, Leaves::Mixed),
    Test::new(CPU_PLAIN, 2, Leaves::Blocks).short(),
    Test::new(CPU_PLAIN, 4, Leaves::Pages),
    Test::new(CPU_PLAIN, 2, Leaves::Pages).evict(10_000).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).evict(50_000),
    Test::new(CPU_MAX, 2, Leaves::Blocks).evict(10_000),
    Test::new(CPU_MAX, 4, Leaves::Mixed).evict(10_000).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).evict(500).tables(),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .check(100_000)
        .hostile()
        .short(),
    Test::new(CPU_PLAIN, 2, Leaves::Blocks)
        .check(100_000)
        .hostile()
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).log(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks).log(Log::All).short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed).log(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Pages).snapshot(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks)
        .snapshot(Log::All)
        .short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed)
        .snapshot(Log::Ring)
        .short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed)
        .evict(5_000)
        .snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Bitmap)
        .omit("everything", Count::Different),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Bitmap)
        .omit("permissions", Count::Different)
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Ring)
        .omit("permissions", Count::Different),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::All)
        .omit("permissions", Count::Different),
    Test::new(CPU_PLAIN, 1, Leaves::Pages)
        .evict(10_000)
        .omit("leaves", Count::Spoiled)
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .evict(10_000)
        .omit("leaves", Count::Spoiled)
        .short(),
    Test::new(CPU_PLAIN, 1, Leaves::Pages)
        .evict(10_000)
        .tables()
        .omit("tables", Count::Spoiled)
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .evict(10_000)
        .tables()
        .omit("tables", Count::Spoiled)
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Mixed)
        .on(Granule::K16)
        .evict(5_000)
        .log(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks)
        .on(Granule::K16)
        .snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .on(Granule::K64)
        .forced()
        .evict(1_000)
        .log(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Mixed)
        .on(Granule::K64)
        .forced()
        .memory(1024)
        .snapshot(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Huge)
        .memory(1024)
        .evict(1_000),
    Test::new(CPU_MAX, 2, Leaves::Huge)
        .memory(1024)
        .snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Mixed)
        .pieces(2)
        .evict(5_000)
        .log(Log::Bitmap),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed)
        .memory(512)
        .pieces(4)
        .evict(5_000)
        .snapshot(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Blocks)
        .pieces(2)
        .snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .forced()
        .log(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Mixed)
        .forced()
        .evict(5_000)
        .snapshot(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Mixed)
        .on(Granule::K16)
        .forced()
        .snapshot(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Hardware)
        .omit("permissions", Count::Different),
];

/// Tests that are programs of their own, and whether they are in the short set.
const NAMED: [(&str, bool); 9] = [
    (bare::NAME, true),
    (linear::NAME, true),
    (flushes::NAME, true),
    (flushes::OWN, true),
    (log_start::NAME, true),
    (several::NAME, true),
    (several::LINUX, false),
    (matrix::NAME, false),
    (smmu::NAME, false),
];

/// Rounds of the load.
const ROUNDS: u32 = 2;

/// When frames begin to be taken away where that is meant to go wrong, in faults: the guest's kernel sets up its memory. It may
/// stop before it meets what was not forgotten; then another delay is tried.
const DELAYS: &[u64] = &[6000, 7000, 8000];

/// Whether each attempt of the hostile guest was answered as it should be.
///
/// # Errors
/// What is wrong.
pub fn tried_in_vain(ran: &Ran) -> std::result::Result<(), String> {
    if let Some(line) = ran
        .console
        .iter()
        .find(|line| line.contains("WRONG") || line.contains("PANIC"))
    {
        return Err(line.clone());
    }
    match ran
        .console
        .iter()
        .any(|line| line == "hostile: done, 0 wrong")
    {
        true => Ok(()),
        false => Err("it did not come to its end".into()),
    }
}

/// Whether it came out as it should.
fn judge(test: &Test, ran: &Ran) -> std::result::Result<(), String> {
    if let Some((class, seen)) = test.omit {
        let name = NAMES[seen as usize];
        return match ran.count(seen) {
            0 => Err(format!(
                "nothing was missed without invalidating {class}: 0 {name}; it ended so: {:?}",
                ran.end
            )),
            number => {
                say!("        as it should, it went wrong: {number} {name}");
                Ok(())
            }
        };
    }
    let mut right = match ran.end {
        End::PoweredOff if test.hostile => tried_in_vain(ran),
        End::PoweredOff => load::check(&ran.console, test.cpus, ROUNDS, test.snapshot),
        end => Err(format!("it ended so: {end:?}")),
    };
    if ran.count(Count::Translated) < test.check / 10 {
        right = Err("nothing of what the processor was asked is mapped".into());
    }
    if ran.count(Count::Disagreed) != 0 {
        right = Err(format!(
            "{} answers of the processor are wrong",
            ran.count(Count::Disagreed)
        ));
    }
    if ran.end == End::PoweredOff && !ran.is_intact {
        right = Err("the hypervisor's code or constants have changed".into());
    }
    if ran.count(Count::Spoiled) != 0 {
        right = Err("the guest was seen on frames that had been taken away".into());
    }
    if ran.count(Count::Foreign) != 0 {
        right = Err("a processor of the guest had another VMID than the guest".into());
    }
    if test.snapshot {
        // What was compared says more than how the guest fared on the copy.
        right = ran.check_snapshot().and(right);
    } else if test.log.is_some() && ran.count(Count::Marks) == 0 {
        right = Err("nothing was logged".into());
    }
    right?;
    if ran.count(Count::Evicted) != test.evict {
        return Err(format!(
            "{} frames were taken away, of {}",
            ran.count(Count::Evicted),
            test.evict
        ));
    }
    Ok(())
}

/// Runs the tests.
///
/// # Errors
/// How many failed, or what is missing.
pub fn run(args: &TestArgs) -> Result<()> {
    let chosen_by = |exact: bool| {
        move |test: &str, short: bool| match &args.name {
            Some(name) if exact => test == *name,
            Some(name) => test.contains(name.as_str()),
            None => args.all || short,
        }
    };
    let all: Vec<(String, bool)> = TESTS
        .iter()
        .map(|test| (test.name(), test.short))
        .chain(NAMED.map(|(name, short)| (name.into(), short)))
        .chain(x86::names())
        .chain(hyperv_tests::names())
        .collect();
    let exact = all.iter().any(|(test, _)| args.name.as_ref() == Some(test));
    let chosen = chosen_by(exact);
    if args.list {
        for (name, short) in &all {
            let is_shown = args.name.is_none() || chosen(name, *short);
            if is_shown {
                say!("{:8}{name}", if *short { "short" } else { "" });
            }
        }
        return Ok(());
    }
    if !all.iter().any(|(name, short)| chosen(name, *short)) {
        return Err(Error::Other(
            "no test has such a name; --list says which there are".into(),
        ));
    }
    if args.name.is_none() {
        fetch::all_programs()?;
    }
    let files = fetch::everything(Choice {
        emulator: args.qemu.as_deref(),
        ..Choice::default()
    })?;
    let hostile = Files {
        kernel: fetch::hypervisor("hostile")?,
        ..files.clone()
    };
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let named: [&dyn Fn() -> Result<()>; NAMED.len()] = [
        &|| bare::run(&files, |_| ()),
        &|| linear::run(|_| ()),
        &flushes::run,
        &|| flushes::run_own(&files),
        &|| log_start::run(Arch::Arm64, &files, &[256, 512, 1024], |_, _, _| ()),
        &|| several::test(&files, 0, 10),
        &|| several::test(&files, 2, 6),
        &|| matrix::run(|_| ()),
        &|| smmu::run(|_| ()),
    ];
    let named = NAMED.into_iter().zip(named);
    for ((name, _), run) in named.filter(|((name, short), _)| chosen(name, *short)) {
        let started = Instant::now();
        let done = out::clocked(name, run);
        let seconds = started.elapsed().as_secs_f64();
        match done {
            Err(Error::Missing(why)) => {
                skipped += 1;
                say!("skipped {name}: {why}");
            }
            Ok(()) => {
                passed += 1;
                say!("ok      {name} ({seconds:.1} s)");
            }
            Err(why) => {
                failed += 1;
                say!("FAILED  {name}: {why}");
            }
        }
    }
    let tests = TESTS.iter().filter(|test| chosen(&test.name(), test.short));
    for test in tests.flat_map(|test| std::iter::repeat_n(test, args.repeat.into())) {
        let variant = Files {
            hypervisor: fetch::variant(test.variant())?,
            variant: test.variant(),
            ..match test.hostile {
                true => hostile.clone(),
                false => files.clone(),
            }
        };
        let boot = |evict_after| Boot {
            files: &variant,
            memory: test.memory,
            pieces: test.pieces,
            cpu: test.cpu,
            cpus: test.cpus,
            leaves: test.leaves,
            evict: test.evict,
            evict_after,
            tables: test.tables,
            check: test.check,
            log: test.log,
            snapshot: test.snapshot.then_some(Begin::Bell),
            omit: test.omit,
            guest: match test.omit {
                // What goes round in loops has its processors forget little by itself.
                Some(_) if test.snapshot => "copy spin".into(),
                _ if test.snapshot => format!("copy load={ROUNDS}"),
                _ => format!("load={ROUNDS}"),
            },
            limit: Some(match test.omit {
                Some(_) if !test.snapshot => LIMIT / 4,
                _ => LIMIT,
            }),
            ..Boot::of(&files)
        };
        let mut delays = match test.omit {
            Some(_) if test.evict != 0 => DELAYS,
            // A copy may be made while the guest writes nothing that is missed.
            Some(_) => &[0; 3],
            _ => &[0],
        }
        .iter();
        let (ran, verdict) = loop {
            let evict_after = delays.next().copied().unwrap_or(0);
            let ran = out::clocked(&test.name(), || {
                qemu::run(&boot(evict_after), |_| (), |_| ())
            })?;
            let verdict = judge(test, &ran);
            if verdict.is_ok() || delays.len() == 0 {
                break (ran, verdict);
            }
        };
        let seconds = ran.took.as_secs_f64();
        match verdict {
            Ok(()) => {
                passed += 1;
                say!(
                    "ok      {} ({seconds:.1} s, {} faults)",
                    test.name(),
                    ran.count(Count::Faults)
                );
            }
            Err(why) => {
                failed += 1;
                say!("FAILED  {} ({seconds:.1} s): {why}", test.name());
                for line in ran.console.iter().rev().take(20).rev() {
                    say!("        | {line}");
                }
                for (name, number) in NAMES.iter().zip(&ran.counters) {
                    say!("        # {number} {name}");
                }
            }
        }
    }
    for (right, wrong) in [x86::run(chosen)?, hyperv_tests::run(chosen, args.repeat)?] {
        (passed, failed) = (passed + right, failed + wrong);
    }
    if (passed, failed, skipped) == (0, 0, 0) {
        return Err(Error::Other("no test of such a name was run".into()));
    }
    say!("guest tests: {passed} passed, {failed} failed");
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed(format!("{failed} guest tests failed"))),
    }
}

//! Guests under load, in a matrix: the hashes have to be right, and where the invalidation is left out, wrong.

use clap::Args;

use crate::counters::{Count, NAMES};
use crate::fetch::Files;
use crate::qemu::{self, Boot, CPU_MAX, End, Ran};
use crate::{Error, LIMIT, Leaves, Log, Result, fetch, linear, load, name_of, x86};

#[derive(Args)]
pub struct TestArgs {
    /// Everything: more CPUs, more evictions, and each kind of mapping with each
    #[arg(long)]
    all: bool,
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
    check: u64,
    log: Option<Log>,
    snapshot: bool,
    /// The guest that means no good, instead of a load.
    hostile: bool,
    /// These invalidations are left out: it has to go wrong.
    omit: Option<&'static str>,
    /// Part of the short matrix.
    short: bool,
}

impl Test {
    const fn new(cpu: &'static str, cpus: u8, leaves: Leaves) -> Self {
        Self {
            cpu,
            cpus,
            leaves,
            evict: 0,
            check: 0,
            log: None,
            snapshot: false,
            hostile: false,
            omit: None,
            short: false,
        }
    }

    const fn evict(mut self, count: u64) -> Self {
        self.evict = count;
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

    const fn omit(mut self, class: &'static str) -> Self {
        self.omit = Some(class);
        self
    }

    const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    fn name(&self) -> String {
        let cpu = self.cpu.split(',').next().unwrap_or_default();
        let mut name = format!("{cpu}-{}cpu-{}", self.cpus, name_of(&self.leaves));
        if self.evict != 0 {
            name += &format!("-evict{}", self.evict);
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
        if let Some(class) = self.omit {
            name += &format!("-without-{class}");
        }
        name
    }
}

const TESTS: &[Test] = &[
    Test::new(CPU_MAX, 1, Leaves::Pages).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages),
    Test::new(CPU_MAX, 4, Leaves::Mixed).short(),
    Test::new(CPU_PLAIN, 1, Leaves::Mixed),
    Test::new(CPU_PLAIN, 2, Leaves::Blocks).short(),
    Test::new(CPU_PLAIN, 4, Leaves::Pages),
    Test::new(CPU_PLAIN, 2, Leaves::Pages).evict(10_000).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).evict(50_000),
    Test::new(CPU_MAX, 2, Leaves::Blocks).evict(10_000),
    Test::new(CPU_MAX, 4, Leaves::Mixed).evict(10_000).short(),
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
        .omit("everything"),
    Test::new(CPU_PLAIN, 1, Leaves::Pages)
        .evict(10_000)
        .omit("leaves"),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .evict(10_000)
        .omit("leaves")
        .short(),
];

const ROUNDS: u32 = 2;

/// Whether each attempt of the hostile guest was answered as it should be.
fn tried_in_vain(ran: &Ran) -> std::result::Result<(), String> {
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
    let mut right = match ran.end {
        End::PoweredOff if test.hostile => tried_in_vain(ran),
        End::PoweredOff => load::check(&ran.console, test.cpus, ROUNDS),
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
    if test.snapshot {
        // What was compared says more than how the guest fared on the copy.
        right = ran.check_snapshot().and(right);
    } else if test.log.is_some() && ran.count(Count::Marks) == 0 {
        right = Err("nothing was logged".into());
    }
    if let Some(class) = test.omit {
        return match right {
            Ok(()) => Err(format!("nothing went wrong without invalidating {class}")),
            Err(why) => {
                println!("        as it should, went wrong: {why}");
                Ok(())
            }
        };
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
    let files = fetch::everything(None)?;
    let hostile = Files {
        kernel: fetch::hypervisor("hostile")?,
        ..files.clone()
    };
    let others = x86::names().chain([linear::NAME.to_string()]);
    let mut names = TESTS.iter().map(Test::name).chain(others);
    let exact = names.any(|test| args.name.as_ref() == Some(&test));
    let chosen = |test: &str, short: bool| match &args.name {
        Some(name) if exact => test == *name,
        Some(name) => test.contains(name.as_str()),
        None => args.all || short,
    };
    let (mut passed, mut failed) = (0, 0);
    if chosen(linear::NAME, true) {
        match linear::run(|_| ()) {
            Ok(()) => {
                passed += 1;
                println!("ok      {}", linear::NAME);
            }
            Err(why) => {
                failed += 1;
                println!("FAILED  {}: {why}", linear::NAME);
            }
        }
    }
    for test in TESTS.iter().filter(|test| chosen(&test.name(), test.short)) {
        let boot = Boot {
            files: if test.hostile { &hostile } else { &files },
            cpu: test.cpu,
            cpus: test.cpus,
            memory: 256,
            leaves: test.leaves,
            evict: test.evict,
            check: test.check,
            log: test.log,
            snapshot: test.snapshot,
            omit: test.omit,
            guest: format!("load={ROUNDS}"),
            limit: Some(if test.omit.is_some() && !test.snapshot {
                LIMIT / 2
            } else {
                LIMIT
            }),
            more: &[],
        };
        let ran = qemu::run(&boot, |_| (), |_| ())?;
        let seconds = ran.took.as_secs_f64();
        match judge(test, &ran) {
            Ok(()) => {
                passed += 1;
                println!(
                    "ok      {} ({seconds:.1} s, {} faults)",
                    test.name(),
                    ran.count(Count::Faults)
                );
            }
            Err(why) => {
                failed += 1;
                println!("FAILED  {} ({seconds:.1} s): {why}", test.name());
                for line in ran.console.iter().rev().take(20).rev() {
                    println!("        | {line}");
                }
                for (name, number) in NAMES.iter().zip(&ran.counters) {
                    println!("        # {number} {name}");
                }
            }
        }
    }
    let (right, wrong) = x86::run(chosen)?;
    (passed, failed) = (passed + right, failed + wrong);
    println!("guest tests: {passed} passed, {failed} failed");
    match (passed, failed) {
        (0, 0) => Err(Error::Other("no test of such a name was run".into())),
        (_, 0) => Ok(()),
        (_, failed) => Err(Error::Other(format!("{failed} guest tests failed"))),
    }
}

//! Guests under load, in a matrix: the hashes have to be right; and where an invalidation is left
//! out, it has to be missed.

use std::path::PathBuf;

use clap::Args;

use crate::cases::{self, How, Outcome};
use crate::counters::{Count, NAMES};
use crate::fetch::{Choice, Files, Granule, Variant};
use crate::guest_case::{Case, Context, outcome, tried_in_vain};
use crate::qemu::{self, Begin, Boot, CPU_MAX, End, Ran};
use crate::tools;
use crate::{
    Arch, Error, LIMIT, Leaves, Log, Result, fetch, flushes, formats, hyperv_tests, linear, load,
    log_start, matrix, name_of, out, say, several, signals, sizes, smmu, x86,
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
    #[arg(long, default_value_t = 1, value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Run so many at once [default: as many as there are processors, up to 4]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: Option<u8>,
    /// Another QEMU than the one that is installed, for guests of arm64: a program, or `debian-13`,
    /// which is fetched
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
    /// The hypervisor's variant, without marks.
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
            variant: Variant { granule: Granule::K4, forced: false, marks: false },
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

    /// Returns the hypervisor's variant.
    fn variant(&self) -> Variant {
        Variant { marks: self.log == Some(Log::Hardware), ..self.variant }
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
            name +=
                &format!("-{}-{}", if self.snapshot { "snapshot" } else { "log" }, name_of(log));
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
    Test::new(CPU_MAX, 2, Leaves::Pages).check(100_000).hostile().short(),
    Test::new(CPU_PLAIN, 2, Leaves::Blocks).check(100_000).hostile().short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).log(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks).log(Log::All).short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed).log(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Pages).snapshot(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks).snapshot(Log::All).short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed).snapshot(Log::Ring).short(),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed).evict(5_000).snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages).snapshot(Log::Bitmap).omit("everything", Count::Different),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Bitmap)
        .omit("permissions", Count::Different)
        .short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).snapshot(Log::Ring).omit("permissions", Count::Different),
    Test::new(CPU_MAX, 2, Leaves::Pages).snapshot(Log::All).omit("permissions", Count::Different),
    Test::new(CPU_PLAIN, 1, Leaves::Pages).evict(10_000).omit("leaves", Count::Spoiled).short(),
    Test::new(CPU_MAX, 2, Leaves::Pages).evict(10_000).omit("leaves", Count::Spoiled).short(),
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
    Test::new(CPU_MAX, 2, Leaves::Mixed).on(Granule::K16).evict(5_000).log(Log::Bitmap),
    Test::new(CPU_MAX, 2, Leaves::Blocks).on(Granule::K16).snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages).on(Granule::K64).forced().evict(1_000).log(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Mixed).on(Granule::K64).forced().memory(1024).snapshot(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Huge).memory(1024).evict(1_000),
    Test::new(CPU_MAX, 2, Leaves::Huge).memory(1024).snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Mixed).pieces(2).evict(5_000).log(Log::Bitmap),
    Test::new(CPU_PLAIN, 2, Leaves::Mixed).memory(512).pieces(4).evict(5_000).snapshot(Log::Ring),
    Test::new(CPU_MAX, 2, Leaves::Blocks).pieces(2).snapshot(Log::All),
    Test::new(CPU_MAX, 2, Leaves::Pages).forced().log(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Mixed).forced().evict(5_000).snapshot(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Mixed).on(Granule::K16).forced().snapshot(Log::Hardware),
    Test::new(CPU_MAX, 2, Leaves::Pages)
        .snapshot(Log::Hardware)
        .omit("permissions", Count::Different),
];

/// Rounds of the load.
const ROUNDS: u32 = 2;

/// When frames begin to be taken away where that is meant to go wrong, in faults: the guest's
/// kernel sets up its memory. It may stop before it meets what was not forgotten; then another
/// delay is tried.
const DELAYS: &[u64] = &[6000, 7000, 8000];

/// Whether it came out as it should; of one that has to go wrong, how it did.
fn judge(test: &Test, ran: &Ran) -> std::result::Result<Option<String>, String> {
    if let Some((class, seen)) = test.omit {
        let name = NAMES[seen as usize];
        return match ran.count(seen) {
            0 => Err(format!(
                "nothing was missed without invalidating {class}: 0 {name}; it ended so: {:?}",
                ran.end
            )),
            number => Ok(Some(format!("{number} {name}"))),
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
        right = Err(format!("{} answers of the processor are wrong", ran.count(Count::Disagreed)));
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
    Ok(None)
}

/// Tests that are programs of their own.
fn named() -> Vec<Case> {
    fn case(
        name: &str,
        short: bool,
        run: impl Fn(&Context) -> Result<()> + Sync + 'static,
    ) -> Case {
        Case {
            name: name.into(),
            short,
            arch: Arch::Arm64,
            run: Box::new(move |context| run(context).and_then(Outcome::right)),
        }
    }
    vec![
        case(several::NAME, true, |it| several::test(it.arm64()?, 0, 10)),
        case(linear::NAME, true, |_| linear::run(|_| ())),
        case(signals::NAME, true, |it| signals::run(it.arm64()?)),
        case(flushes::NAME, true, |_| flushes::run()),
        case(flushes::OWN, true, |it| flushes::run_own(it.arm64()?)),
        case(formats::NAME, true, |_| formats::run(None, |_| ())),
        case(log_start::NAME, true, |it| {
            let sizes = [256, 512, 1024];
            log_start::run(Arch::Arm64, it.arm64()?, &sizes, |_, _, _| ())
        }),
        case(several::LINUX, false, |it| several::test(it.arm64()?, 2, 6)),
        case(matrix::NAME, false, |_| matrix::run(|_| ())),
        case(smmu::NAME, false, |_| smmu::run(|_| ())),
    ]
}

/// All of them.
fn all() -> Vec<Case> {
    let guests = TESTS.iter().map(|test| Case {
        name: test.name(),
        short: test.short,
        arch: Arch::Arm64,
        run: Box::new(|context| test.run(context.arm64()?)),
    });
    let guests = named().into_iter().chain(guests);
    guests.chain(sizes::cases()).chain(x86::cases()).chain(hyperv_tests::cases()).collect()
}

impl Test {
    /// Boots the guest, and judges what it did.
    fn run(&self, files: &Files) -> Result<Outcome> {
        let files = Files {
            hypervisor: fetch::variant(self.variant())?,
            variant: self.variant(),
            kernel: match self.hostile {
                true => fetch::hypervisor("hostile")?,
                false => files.kernel.clone(),
            },
            ..files.clone()
        };
        let boot = |evict_after| Boot {
            memory: self.memory,
            pieces: self.pieces,
            cpu: self.cpu,
            cpus: self.cpus,
            leaves: self.leaves,
            evict: self.evict,
            evict_after,
            tables: self.tables,
            check: self.check,
            log: self.log,
            snapshot: self.snapshot.then_some(Begin::Bell),
            omit: self.omit,
            guest: match self.omit {
                // What goes round in loops has its processors forget little by itself.
                Some(_) if self.snapshot => "copy spin".into(),
                _ if self.snapshot => format!("copy load={ROUNDS}"),
                _ => format!("load={ROUNDS}"),
            },
            limit: Some(match self.omit {
                Some(_) if !self.snapshot => LIMIT / 4,
                _ => LIMIT,
            }),
            ..Boot::of(&files)
        };
        let mut delays = match self.omit {
            Some(_) if self.evict != 0 => DELAYS,
            // A copy may be made while the guest writes nothing that is missed.
            Some(_) => &[0; 3],
            _ => &[0],
        }
        .iter();
        loop {
            let evict_after = delays.next().copied().unwrap_or(0);
            let ran = qemu::run(&boot(evict_after), |_| (), |_| ())?;
            let verdict = judge(self, &ran);
            if verdict.is_ok() || delays.len() == 0 || out::is_interrupted() {
                return Ok(outcome(&ran, verdict, &NAMES, Count::Faults as usize));
            }
        }
    }
}

/// Runs the tests.
///
/// # Errors
/// How many failed, or what is missing.
pub fn run(args: &TestArgs) -> Result<()> {
    let mut cases = all();
    let exact = cases.iter().any(|it| args.name.as_ref() == Some(&it.name));
    cases.retain(|it| match &args.name {
        Some(name) if exact => it.name == *name,
        Some(name) => it.name.contains(name.as_str()),
        None => args.all || args.list || it.short,
    });
    if cases.is_empty() {
        return Err(Error::Other("no test has such a name; --list says which there are".into()));
    }
    if args.list {
        for case in &cases {
            say!("{:8}{}", if case.short { "short" } else { "" }, case.name);
        }
        return Ok(());
    }
    out::take_interrupts()?;
    if args.name.is_none() {
        fetch::all_programs()?;
    }
    let is = |arch| cases.iter().any(|it| it.arch == arch);
    let arm64 = match is(Arch::Arm64) {
        true => {
            Some(fetch::everything(Choice { emulator: args.qemu.as_deref(), ..Choice::default() })?)
        }
        false => None,
    };
    let x86 = match is(Arch::X86_64).then(tools::qemu_x86) {
        Some(Ok(())) => Some(fetch::everything_x86(None)?),
        // Where nothing is left, nothing was shown.
        Some(Err(why)) if cases.iter().all(|it| it.arch == Arch::X86_64) => return Err(why),
        Some(Err(why)) => {
            say!("skipped: x86-64, because {why}");
            cases.retain(|it| it.arch != Arch::X86_64);
            None
        }
        None => None,
    };
    let how = How { repeat: args.repeat, jobs: usize::from(args.jobs.unwrap_or_else(processors)) };
    let (tallies, interrupted) = cases::run(&cases, &Context { arm64, x86 }, how);
    cases::finish(&cases, how, &tallies, interrupted)
}

/// How many tests are run at once if it is not said: one for each processor, which most boots have
/// a use for until they are at their load.
fn processors() -> u8 {
    let found = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u8::try_from(found).unwrap_or(u8::MAX).min(MOST_JOBS)
}

/// The most: a guest may take 2 GiB of the computer's memory.
const MOST_JOBS: u8 = 4;

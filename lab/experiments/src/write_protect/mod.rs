//! A start of a dirty log on the software machine, and the first accesses after it.
//!
//! The vCPUs have run the guest, and know how its memory is mapped; during the start they compute
//! in the guest. It is over when none of them can write without being seen. Then each accesses its
//! own part of the memory, page by page, all at once.

mod baseline;
mod engine;
pub mod writable;

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use clap::ValueEnum;
use tablewright::dirty::Bitmap;
use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4};
use tablewright::guest::{Guest, HOST_WRITES, Slot, SlotCell};
use tablewright::{Attrs, Format, Ipa, Level, Mapping, Pa, Span};
use tablewright_machine::{
    Architecture, Cpu, Granule, Machine, Memory, Profile, Regime, Request, Rule, Setup, Time,
};

use crate::error::Error;
use crate::runs::{self, Simulated};
use crate::{failed, shared_space};
use baseline::{Baseline, SIDES_IN_PAGE};
use engine::Engine;

/// All formats have pages of 4 KiB.
pub const PAGE_SHIFT: u32 = 12;
/// Where the guest's memory lies: above that of the tables.
const PHYSICAL: u64 = 1 << 45;
/// So many pages of its own each vCPU has written before the log is started.
const KNOWN: u64 = 64;

/// More leaves than this are replaced by fewer and larger ones: the machine has a table for
/// every 512.
pub const MOST_LEAVES: u64 = 1 << 22;

/// The smallest leaves of which there are not too many.
pub fn leaf_for(bytes: u64) -> Option<Level> {
    (0..3).map(Level::new).find(|&leaf| {
        bytes / leaf_bytes(leaf) <= MOST_LEAVES && bytes.is_multiple_of(leaf_bytes(leaf))
    })
}

/// The memory that a leaf translates.
pub fn leaf_bytes(leaf: Level) -> u64 {
    4096 << (9 * u32::from(leaf.height()))
}

/// The format of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage2 {
    /// EPT, 4 levels
    Ept,
    /// Nested paging, 4 levels
    Npt,
    /// Arm64 stage 2, 4 levels
    Arm64,
}

impl Stage2 {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ept => "ept",
            Self::Npt => "npt",
            Self::Arm64 => "arm64",
        }
    }

    /// Whether they are of x86.
    pub const fn is_x86(self) -> bool {
        !matches!(self, Self::Arm64)
    }
}

/// How the log is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// Leaf by leaf, as before the published change
    Slow,
    /// The root's entries, as published, by a bitmap of those that may be writable
    Fast,
    /// The same, by looking at all entries of each table
    FastScan,
    /// By the engine
    Tablewright,
    /// As `fast`, but an entry that is made writable is not marked: a bug that is to be found.
    #[cfg(test)]
    Unmarked,
}

impl How {
    /// Which entries may be writable is kept beside the tables.
    pub const fn has_bitmap(self) -> bool {
        !matches!(self, Self::Slow | Self::FastScan | Self::Tablewright)
    }

    /// As it has to be.
    pub const fn marks_what_it_opens(self) -> bool {
        #[cfg(test)]
        if matches!(self, Self::Unmarked) {
            return false;
        }
        true
    }

    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Fast => "fast",
            Self::FastScan => "fast-scan",
            Self::Tablewright => "tablewright",
            #[cfg(test)]
            Self::Unmarked => "planted",
        }
    }
}

/// What the vCPUs do after the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Nothing,
    /// They write all pages.
    Write,
    /// They read all pages.
    Read,
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// The format of the tables.
    pub format: Stage2,
    /// How the log is started.
    pub how: How,
    /// The guest's memory.
    pub bytes: u64,
    /// The leaves that it is mapped in.
    pub leaf: Level,
    /// How many vCPUs.
    pub vcpus: u16,
    /// What they do after the start.
    pub then: Then,
    /// How many times a log is started, and what it has is forgotten, before the start that is
    /// timed.
    pub before: u32,
}

/// What a run showed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// From the call until no vCPU can write without being seen.
    pub start: Time,
    /// Until the last vCPU was through with its part.
    pub then: Time,
    /// Entries written by the start.
    pub entries: u64,
    /// Kicks sent by it.
    pub kicks: u64,
    /// Invalidations made by it.
    pub invalidations: u64,
    /// Faults of the accesses after it.
    pub faults: u64,
    /// Those of them after which nothing had changed.
    pub retries: u64,
    /// Zeroed memory for the bitmap, which is supplied.
    pub bitmap_bytes: u64,
    /// The first rule of the machine that was broken, or a write that was not logged.
    pub violation: Option<String>,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

impl Simulated for Job {
    type Ran = Ran;
    type Kept = ();

    fn run(&self, (): &mut ()) -> Result<Ran, Error> {
        run(self)
    }

    fn name(&self) -> String {
        format!("{} {}", self.how.name(), crate::size::human(self.bytes))
    }
}

/// What a way to log has to do.
pub trait Logger {
    /// The guest's memory was mapped.
    fn mapped(&self) {}
    /// Starts the log.
    fn start(&self);
    /// A vCPU that is asked to forget does what was requested of it with that, outside of the
    /// guest.
    fn requested(&self) {}
    /// A write has faulted.
    fn write_fault(&self, at: u64) -> Handled;
    /// A read has faulted.
    fn read_fault(&self, at: u64) -> Handled;
}

/// What came of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// The access goes through.
    Done,
    /// The guest faults again.
    Again,
    /// Nothing is known of the page, and all of them were mapped.
    Lost,
}

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    simulated(job).map_err(failed(&job.profile, "write-protect"))
}

fn simulated(job: &Job) -> Result<Ran, String> {
    match job.format {
        Stage2::Ept => run_as::<Ept<4>>(job),
        Stage2::Npt => run_as::<Npt<4>>(job),
        Stage2::Arm64 => run_as::<Stage2K4<48, FORCED_WRITE_BACK>>(job),
    }
}

/// What a machine of this profile has for such tables.
pub fn architecture(profile: &Profile, format: Stage2) -> Architecture {
    let from = profile.architecture.clone();
    Architecture {
        regime: match format {
            Stage2::Ept => Regime::Ept {
                levels: 4,
                mode_based: false,
            },
            Stage2::Npt => Regime::Npt { levels: 4 },
            Stage2::Arm64 => Regime::Arm64Stage2 {
                granule: Granule::K4,
                input_bits: 48,
                wide: false,
                forced_write_back: true,
            },
        },
        // All memory was given to the guest before, and cleaned; and nothing is executed.
        forced_write_back: true,
        idc: true,
        dic: true,
        ..from
    }
}

fn run_as<F: Format<Input = Ipa>>(job: &Job) -> Result<Ran, String> {
    let vcpus = usize::from(job.vcpus);
    let mut tables = 64 + F::root_tables() as u64;
    let mut level = job.leaf;
    while level < F::root_level() {
        level = level.up();
        tables += job.bytes.div_ceil(1 << F::shift(level));
    }
    if job.how.has_bitmap() {
        tables += tables.div_ceil(SIDES_IN_PAGE as u64 - 1) + 1;
    }
    let mut setup = Setup::new(
        architecture(&job.profile, job.format),
        Memory::new(tables as usize, PAGE_SHIFT, 1 << 30),
    );
    // One more, to start the log.
    setup.scheduler.cpus = vcpus + 1;
    setup.costs = job.profile.costs.clone();
    setup.kicks = job.format.is_x86();
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let space = shared_space::<F, _>(mapper, mapper)?;
    let root = space.root();
    let mut cells = [const { SlotCell::new() }; 2];
    let guest = Guest::new(space, &mut cells);
    let ram = Span::new(Ipa::new(0), job.bytes).map_err(|error| error.to_string())?;
    let slot = Slot::memory(ram, 0);
    guest.insert(slot).map_err(|error| error.to_string())?;
    let attrs = Attrs {
        software: HOST_WRITES,
        ..Attrs::GUEST_MEMORY
    };
    let mapping = Mapping::new(attrs).largest(job.leaf).without_runs();
    let populate = || {
        let mapped = guest.space().map_range(ram, Pa::new(PHYSICAL), mapping);
        machine.check(mapped.is_ok(), || format!("{mapped:?}"));
    };

    let pages = job.bytes >> PAGE_SHIFT;
    // As much as there may be of it is not needed where nothing is written.
    let words = match job.then {
        Then::Write => pages.div_ceil(64) as usize,
        _ => 0,
    };
    let mut words: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
    let bitmap = Bitmap::new(&mut words, pages).ok();
    let bitmap = bitmap.as_ref();
    match job.how {
        How::Tablewright => {
            let logger = Engine {
                mapper,
                guest: &guest,
                slot,
                bitmap,
            };
            Test::new(job, mapper, bitmap, &populate, &logger).run()
        }
        how => {
            let logger = Baseline::<F>::new(mapper, root, bitmap, how);
            Test::new(job, mapper, bitmap, &populate, &logger).run()
        }
    }
}

struct Test<'t, L> {
    job: &'t Job,
    machine: &'t Machine,
    mapper: tablewright_machine::Mapper<'t>,
    /// The log.
    bitmap: Option<&'t Bitmap<'t>>,
    /// Maps the guest's memory.
    populate: &'t dyn Fn(),
    logger: &'t L,
    mapped: Cell<bool>,
    /// vCPUs that are through with what is to be done now.
    ready: Cell<usize>,
    /// How many logs were started.
    started: Cell<u32>,
    retries: Cell<u64>,
    ran: Cell<Ran>,
}

impl<'t, L: Logger> Test<'t, L> {
    fn new(
        job: &'t Job,
        mapper: tablewright_machine::Mapper<'t>,
        bitmap: Option<&'t Bitmap<'t>>,
        populate: &'t dyn Fn(),
        logger: &'t L,
    ) -> Self {
        Self {
            job,
            machine: mapper.machine(),
            mapper,
            bitmap,
            populate,
            logger,
            mapped: Cell::new(false),
            ready: Cell::new(0),
            started: Cell::new(0),
            retries: Cell::new(0),
            ran: Cell::default(),
        }
    }

    fn run(&self) -> Result<Ran, String> {
        let vcpus = usize::from(self.job.vcpus);
        self.machine
            .run(|cpu| match cpu.id() == vcpus {
                true => self.start(cpu),
                false => self.vcpu(cpu),
            })
            .map_err(|error| error.to_string())?;
        let violation = self.machine.finish().into_iter().next();
        Ok(Ran {
            retries: self.retries.get(),
            bitmap_bytes: (self.job.bytes >> PAGE_SHIFT).div_ceil(64) * 8,
            violation: violation.map(|violation| violation.to_string()),
            ..self.ran.take()
        })
    }

    fn wake_all(&self, cpu: Cpu<'_>) {
        for vcpu in 0..usize::from(self.job.vcpus) {
            cpu.wake(vcpu, cpu.now());
        }
    }

    /// Waits until all vCPUs are ready.
    fn gather(&self, cpu: Cpu<'_>) {
        cpu.order();
        while self.ready.get() < usize::from(self.job.vcpus) {
            cpu.park();
        }
        self.ready.set(0);
    }

    fn start(&self, cpu: Cpu<'_>) {
        (self.populate)();
        self.logger.mapped();
        cpu.order();
        self.mapped.set(true);
        self.wake_all(cpu);
        self.gather(cpu);
        for _ in 0..self.job.before {
            self.once(cpu);
            // All of it is harvested; but it is the next start that protects it again.
            if let Some(bitmap) = self.bitmap {
                bitmap.harvest(0..bitmap.pages(), |_, _| ());
            }
        }
        self.once(cpu);
    }

    /// One log.
    fn once(&self, cpu: Cpu<'_>) {
        let (before, begin) = (self.machine.counts(), cpu.now());
        self.logger.start();
        cpu.order();
        let (after, end) = (self.machine.counts(), cpu.now());
        self.started.update(|started| started + 1);
        self.wake_all(cpu);
        self.gather(cpu);
        self.ran.set(Ran {
            start: end.saturating_sub(begin),
            then: cpu.now().saturating_sub(end),
            entries: after.entries - before.entries,
            kicks: after.kicks - before.kicks,
            invalidations: after.invalidations - before.invalidations,
            faults: self.machine.counts().faults - after.faults,
            ..Ran::default()
        });
    }

    /// A vCPU tells the CPU that waits for all.
    fn tell(&self, cpu: Cpu<'_>) {
        cpu.order();
        self.ready.set(self.ready.get() + 1);
        cpu.wake(usize::from(self.job.vcpus), cpu.now());
    }

    fn vcpu(&self, cpu: Cpu<'_>) {
        cpu.order();
        while !self.mapped.get() {
            cpu.park();
        }
        self.mapper.load();
        let pages = self.job.bytes >> PAGE_SHIFT;
        let vcpus = u64::from(self.job.vcpus);
        let part = |number: u64| pages * number / vcpus;
        let own = part(cpu.id() as u64)..part(cpu.id() as u64 + 1);
        for page in own.clone().take(KNOWN as usize) {
            // All of it is mapped.
            let _known = self
                .machine
                .guest_access(Request::write(page << PAGE_SHIFT));
        }
        self.tell(cpu);
        for log in 1..=self.job.before + 1 {
            while self.started.get() < log {
                self.machine
                    .guest_computes_with(&|| self.logger.requested());
            }
            let own = own.clone();
            match self.job.then {
                Then::Nothing => {}
                Then::Write => own.for_each(|page| self.access(cpu, page, true)),
                Then::Read => own.for_each(|page| self.access(cpu, page, false)),
            }
            if log > self.job.before {
                self.machine.leave_guest();
            }
            self.tell(cpu);
        }
    }

    /// One access of the guest, as often as it takes.
    fn access(&self, cpu: Cpu<'_>, page: u64, write: bool) {
        let at = page << PAGE_SHIFT;
        let request = match write {
            true => Request::write(at),
            false => Request::read(at),
        };
        let requested = || self.logger.requested();
        while self.machine.guest_access_with(request, &requested).is_err() {
            cpu.spend(self.machine.costs().exception);
            let handled = match write {
                true => self.logger.write_fault(at),
                false => self.logger.read_fault(at),
            };
            match handled {
                Handled::Done => {}
                Handled::Again => self.retries.set(self.retries.get() + 1),
                Handled::Lost => {
                    let what = format!("page {page:#x} was mapped, and is lost");
                    return self.machine.report(Rule::Program, what);
                }
            }
        }
        let logged = |bitmap: &Bitmap<'_>| !write || bitmap.is_marked(page);
        self.machine.check(self.bitmap.is_none_or(logged), || {
            format!("page {page:#x} was written after the start, and is not in the log")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logs started one after the other, in which every page is written, on tables of four levels.
    fn logs(how: How, vcpus: u16) -> Ran {
        let profile = Profile::load("x86-12-vcpus").expect("a built-in profile");
        let job = Job {
            profile,
            format: Stage2::Ept,
            how,
            bytes: 8 << 20,
            leaf: Level::PAGE,
            vcpus,
            then: Then::Write,
            before: 2,
        };
        run(&job).expect("it runs")
    }

    #[test]
    fn a_log_after_others_misses_nothing() {
        for how in [How::Slow, How::Fast, How::FastScan] {
            let ran = logs(how, 4);
            assert_eq!(ran.violation, None, "{how:?}");
            assert_eq!(ran.faults - ran.retries, 2048, "{how:?}");
        }
    }

    #[test]
    fn an_entry_that_is_opened_and_not_marked_is_missed_by_the_next_log() {
        let missed = logs(How::Unmarked, 4).violation.expect("a page is missed");
        assert!(missed.contains("and is not in the log"), "{missed}");
    }
}

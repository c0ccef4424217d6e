//! A start of a dirty log on the software machine, and the first accesses after it.
//!
//! The vCPUs have run the guest, and know how its memory is mapped; during the start they compute
//! in the guest. It is over when none of them can write without being seen. Then each accesses its
//! own part of the memory, page by page, all at once.

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use tablewright::dirty::Bitmap;
use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4};
use tablewright::guest::{Guest, HOST_WRITES, Slot, SlotCell};
use tablewright::{Attrs, Format, Ipa, Mapping, Pa, Span};
use tablewright_machine::{Cpu, Machine, Memory, Request, Rule, Setup};

use super::baseline::{Baseline, SIDES_IN_PAGE};
use super::engine::Engine;
use super::job::{How, Job, Logger, Ran, Then};
use crate::error::Error;
use crate::guest::{Handled, PAGE_SHIFT, Stage2, architecture, failed, shared_space};
use crate::runs::Simulated;

/// Start of the guest's memory, above the tables.
const PHYSICAL: u64 = 1 << 45;
/// Pages of its own that each vCPU has written before the log is started.
const KNOWN: u64 = 64;

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
    let attrs = Attrs { software: HOST_WRITES, ..Attrs::GUEST_MEMORY };
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
            let logger = Engine { mapper, guest: &guest, slot, bitmap };
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
            let _known = self.machine.guest_access(Request::write(page << PAGE_SHIFT));
        }
        self.tell(cpu);
        for log in 1..=self.job.before + 1 {
            while self.started.get() < log {
                self.machine.guest_computes_with(&|| self.logger.requested());
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
    use tablewright::Level;
    use tablewright_machine::Profile;

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

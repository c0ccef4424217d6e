//! The test on the software machine: vCPUs that touch memory, phase by phase, and what handles
//! their faults.

use std::cell::{Cell, RefCell};

use tablewright::format::{Ept, FORCED_WRITE_BACK, Stage2K4};
use tablewright::guest::{Guest, SlotCell};
use tablewright::{Format, Ipa};
use tablewright_machine::{
    Architecture, Cpu, Granule, Machine, Memory, Regime, Request, Resource, Setup, Time,
};

use super::backing::{Backing, Handler};
use super::baseline::Baseline;
use super::engine::{Engine, slot};
use super::job::{Job, Ran, Way};
use super::watch::{Seen, Watch};
use crate::error::Error;
use crate::guest::input::{PAGE, Region, Source};
use crate::guest::{failed, shared_space};
use crate::runs::Simulated;

impl Simulated for Job {
    type Ran = Ran;
    type Kept = ();

    fn run(&self, (): &mut ()) -> Result<Ran, Error> {
        run(self)
    }

    fn name(&self) -> String {
        format!("{}: {:?}", self.profile.name, self.source)
    }
}

/// The tables of a guest: with fewer bits a level less.
const SMALL: u32 = 39;

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    simulated(job).map_err(failed(&job.profile, "page-table-test"))
}

fn simulated(job: &Job) -> Result<Ran, String> {
    let forced_write_back = job.profile.architecture.forced_write_back;
    let arm64 = |input_bits| Regime::Arm64Stage2 {
        granule: Granule::K4,
        input_bits,
        wide: false,
        forced_write_back,
    };
    if job.profile.architecture.is_x86() {
        let regime = Regime::Ept { levels: 4, mode_based: false };
        return run_as::<Ept<4>>(job, regime);
    }
    let wide = (job.region.first + (job.region.bytes - 1)) >> SMALL != 0;
    match (wide, forced_write_back) {
        (false, false) => run_as::<Stage2K4<39>>(job, arm64(39)),
        (false, true) => run_as::<Stage2K4<39, FORCED_WRITE_BACK>>(job, arm64(39)),
        (true, false) => run_as::<Stage2K4<48>>(job, arm64(48)),
        (true, true) => run_as::<Stage2K4<48, FORCED_WRITE_BACK>>(job, arm64(48)),
    }
}

fn run_as<F: Format<Input = Ipa>>(job: &Job, regime: Regime) -> Result<Ran, String> {
    let vcpus = usize::from(job.vcpus);
    let tables = job.region.bytes / PAGE / 512;
    let frames = 2 * (tables + tables / 512) + 64 * (u64::from(job.vcpus) + 1) + 64;
    let memory = Memory::new(frames as usize, 12, 1 << 30);
    let architecture = Architecture {
        // Caches of x86 are seen by all that a guest does.
        forced_write_back: job.profile.architecture.forced_write_back
            || job.profile.architecture.is_x86(),
        regime,
        // The test touches a page once in a phase, so that a TLB that knows many pages finds none
        // more often; but the TLBs of all vCPUs fit into the caches of this computer.
        tlb_sets: job.profile.architecture.tlb_sets.min(16),
        // Nothing is executed.
        idc: true,
        dic: true,
        // What was not cleaned is seen by a guest whose caches are off.
        guest_caches_off: job.logging_first,
        ..job.profile.architecture.clone()
    };
    let mut setup = Setup::new(architecture, memory);
    // One more, to start the phases.
    setup.scheduler.cpus = vcpus + 1;
    setup.costs = job.profile.costs.clone();
    if job.profile.architecture.is_x86() {
        // Hardware of x86 tells no other CPU: a broadcast stands for an interrupt to each, one
        // after the other, and for the last to be out of its guest and in it again.
        let costs = &mut setup.costs;
        let others = u64::from(job.vcpus).saturating_sub(1);
        costs.complete += costs.interrupt * others + costs.exit * (2 * others.min(1));
    }
    let machine = Machine::new(setup);
    let seen = Seen::default();
    let mapper = machine.new_space();
    let platform = Watch::new(mapper, &seen);
    let shared = shared_space::<F, _>(platform, mapper)?;
    let root = shared.root();
    match job.way {
        Way::Published(changes) => {
            let handler = Baseline::<F>::new(changes, platform, root, job.region, vcpus);
            Test::new(job, &machine, platform, &handler).run()
        }
        Way::Tablewright => {
            let slot = slot(job.region, job.source.bytes()).ok_or("no slot")?;
            let mut cells = [SlotCell::new()];
            let guest = Guest::new(shared, &mut cells);
            guest.insert(slot).map_err(|it| it.to_string())?;
            let handler = Engine::new(&guest, slot, vcpus);
            Test::new(job, &machine, platform, &handler).run()
        }
    }
}

struct Test<'t, 'm, H> {
    job: &'t Job,
    machine: &'m Machine,
    platform: Watch<'m>,
    handler: &'t H,
    backing: Backing<'m>,
    /// Source of cache lines.
    memory: Resource,
    gate: Gate,
    times: RefCell<[Time; 3]>,
}

impl<'t, 'm, H: Handler<'m>> Test<'t, 'm, H> {
    fn new(job: &'t Job, machine: &'m Machine, platform: Watch<'m>, handler: &'t H) -> Self {
        Self {
            job,
            machine,
            platform,
            handler,
            backing: Backing::new(machine, job.source, job.region.bytes),
            memory: Resource::new(),
            gate: Gate::new(usize::from(job.vcpus) + 1),
            times: RefCell::default(),
        }
    }

    fn run(&self) -> Result<Ran, String> {
        let vcpus = usize::from(self.job.vcpus);
        self.machine
            .run(|cpu| {
                for phase in Phase::ALL {
                    if cpu.id() == vcpus {
                        self.start(cpu, phase);
                    } else {
                        self.take_part(cpu, phase);
                    }
                }
            })
            .map_err(|error| error.to_string())?;
        let violation = self.machine.finish().into_iter().next();
        let counts = self.machine.counts();
        let (invalid_longest, invalid_total) = self.platform.seen.invalid();
        Ok(Ran {
            times: *self.times.borrow(),
            faults: counts.faults,
            retries: self.handler.retries(),
            cleaned: self.platform.seen.cleaned(),
            invalidations: counts.invalidations,
            waits: counts.completions,
            tables: counts.tables,
            invalid_longest,
            invalid_total,
            splits: self.backing.splits.get(),
            violation: violation.map(|it| it.to_string()),
        })
    }

    /// The thread that starts a phase, and waits for all to be through with it.
    fn start(&self, cpu: Cpu<'_>, phase: Phase) {
        match phase {
            Phase::Create => {}
            Phase::Update => self.handler.start_logging(),
            Phase::Rebuild => self.handler.stop_logging(),
        }
        self.gate.pass(cpu);
        let start = cpu.now();
        self.gate.pass(cpu);
        if phase == Phase::Rebuild {
            self.handler.grow(&self.backing);
        }
        self.times.borrow_mut()[phase as usize] = cpu.now().saturating_sub(start);
    }

    fn take_part(&self, cpu: Cpu<'_>, phase: Phase) {
        self.platform.mapper.load();
        self.gate.pass(cpu);
        let alone =
            !self.job.phases[phase as usize] && matches!(self.job.source, Source::Fixed { .. });
        let idle = alone && cpu.id() != 0 || phase == Phase::Create && self.job.logging_first;
        if !idle {
            self.touch_all(cpu, phase);
        }
        self.gate.pass(cpu);
    }

    /// Touches all of the memory, in every vCPU.
    fn touch_all(&self, cpu: Cpu<'_>, phase: Phase) {
        let Region { first, bytes } = self.job.region;
        let pages = |first: u64, bytes: u64| (first..first + bytes).step_by(PAGE as usize);
        let large = self.job.source.bytes();
        match phase {
            Phase::Create => {
                let write = cpu.id().is_multiple_of(2);
                for at in (first..first + bytes).step_by(large as usize) {
                    self.touch(cpu, at, write);
                }
            }
            Phase::Update if self.job.source == Source::Anonymous => {
                pages(first, bytes).for_each(|at| self.touch(cpu, at, true));
            }
            Phase::Update => {
                for at in (first..first + bytes).step_by(large as usize) {
                    self.touch(cpu, at, true);
                    let half = (at + large / 2) & !(PAGE - 1);
                    if large > PAGE {
                        pages(half, large / 2).for_each(|at| self.touch(cpu, at, false));
                    }
                }
            }
            Phase::Rebuild => pages(first, bytes).for_each(|at| self.touch(cpu, at, false)),
        }
    }

    /// One access of the guest, as often as it takes.
    fn touch(&self, cpu: Cpu<'_>, ipa: u64, write: bool) {
        let request = if write { Request::write(ipa) } else { Request::read(ipa) };
        while let Err(fault) = self.machine.access(request) {
            cpu.spend(self.machine.costs().exception);
            self.handler.fault(ipa, write, fault, &self.backing);
        }
        // The way to memory is each vCPU's own, and the memory is shared.
        cpu.spend(self.machine.costs().latency);
        self.memory.acquire(cpu, self.machine.costs().fetch);
    }
}

/// The phases, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Create,
    Update,
    Rebuild,
}

impl Phase {
    const ALL: [Self; 3] = [Self::Create, Self::Update, Self::Rebuild];
}

/// Barrier for all CPUs.
struct Gate {
    of: usize,
    waiting: Cell<usize>,
    passed: Cell<u32>,
}

impl Gate {
    fn new(of: usize) -> Self {
        Self { of, waiting: Cell::new(0), passed: Cell::new(0) }
    }

    fn pass(&self, cpu: Cpu<'_>) {
        cpu.order();
        let passed = self.passed.get();
        self.waiting.set(self.waiting.get() + 1);
        if self.waiting.get() == self.of {
            self.waiting.set(0);
            self.passed.set(passed + 1);
            for other in (0..self.of).filter(|other| *other != cpu.id()) {
                cpu.wake(other, cpu.now());
            }
        } else {
            while self.passed.get() == passed {
                cpu.park();
            }
        }
    }
}

//! The well-known test of dirty logging on the software machine, phase by phase.
//!
//! The guest's memory is populated, logged, written, and the log read and cleared, as often as
//! asked. Faults are handled by the host that the run is about; pages are split ahead, protected
//! and looked for in the log by the engine in every run, which takes as long as a kernel does for
//! each entry. Then the log is disabled, by one of the ways, while the vCPUs go on with their
//! accesses if that is asked for.
//!
//! # Scale
//!
//! The published case has 109 million pages. A run has fewer, in one or both of two manners: a page
//! of the host is *smaller*, so that each table that is taken apart stands for a tree of them, or
//! there are *fewer* of these. What takes as long as there are entries is multiplied by both, what
//! is done once for a page of the host, such as a flush, by the second alone.
//!
//! # By hardware
//!
//! Where hardware logs what is written, each vCPU has a page of 512 entries. It marks what is there
//! in the bitmap each time that it leaves the guest, which it does when the page is full, for a
//! load of each entry and an exchange of its word.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU64;

use tablewright::dirty::{Bitmap, ModificationLog};
use tablewright::format::{Ept, Stage2K4};
use tablewright::guest::{Guest, Harvest, Log, Slot, SlotCell};
use tablewright::{Format, Ipa, Level, Pa, Platform, Span};
use tablewright_machine::{
    Architecture, Cpu, Fault, Machine, MachineLock, Memory, Request, Rule, Setup, Time,
};

use super::baseline::{Baseline, Order};
use super::engine::Engine;
use super::job::{By, How, Job, Options, Ran, Scale, Split, Way};
use super::world::World;
use crate::error::Error;
use crate::guest::input::PAGE;
use crate::guest::{Handled, Stage2, architecture, failed, is_arm64, leaf_bytes, shared_space};
use crate::random::Random;
use crate::runs::Simulated;

impl Simulated for Job {
    type Ran = Ran;
    type Kept = ();

    fn run(&self, (): &mut ()) -> Result<Ran, Error> {
        run(self)
    }

    fn name(&self) -> String {
        self.how.name().to_owned()
    }
}

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    simulated(job).map_err(failed(&job.profile, job.how.name()))
}

fn simulated(job: &Job) -> Result<Ran, String> {
    match job.profile.architecture.is_x86() {
        true => run_as::<Ept<4>>(job, Stage2::Ept),
        false => run_as::<Stage2K4<48, true>>(job, Stage2::Arm64),
    }
}

fn run_as<F: Format<Input = Ipa>>(job: &Job, format: Stage2) -> Result<Ran, String> {
    let leaf = job.source.level();
    // Every page in a table of its own level, those above, and what vCPUs keep.
    let pages = job.region.bytes / PAGE;
    let tables = pages / 512 + pages / (512 * 512) + 8 * (u64::from(job.vcpus) + 1) + 64;
    let by_hardware = job.options.by == By::Modification;
    let of_profile = architecture(&job.profile, format);
    let architecture = Architecture {
        hardware_access: of_profile.hardware_access || by_hardware,
        hardware_dirty: of_profile.hardware_dirty || by_hardware,
        // The TLBs of all vCPUs fit into the caches of this computer; what misses is said by the
        // model.
        tlb_sets: of_profile.tlb_sets.min(16),
        ..of_profile
    };
    let tables = tables + if by_hardware { u64::from(job.vcpus) } else { 0 };
    let mut setup = Setup::new(architecture, Memory::new(tables as usize, 12, 1 << 30));
    // One more: the thread that does what the host is asked for.
    setup.scheduler.cpus = usize::from(job.vcpus) + 1;
    setup.costs = job.profile.costs.clone();
    setup.kicks = format.is_x86();
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let space = shared_space::<F, _>(mapper, mapper)?;
    let page = job.source.bytes().min(leaf_bytes(leaf));
    let cleans = is_arm64::<F>() && !job.profile.architecture.forced_write_back;
    let clean = if cleans { job.profile.costs.clean } else { Time::ZERO };
    let world =
        World::new(mapper, space.root(), job.region, (leaf, page), clean, job.scale.smaller);
    let mut cells: Vec<SlotCell> = (0..job.slots).map(|_| SlotCell::new()).collect();
    let guest = Guest::new(space, &mut cells);

    let each = job.region.bytes / u64::from(job.slots);
    let words = (each / PAGE).div_ceil(64) as usize;
    let mut memory: Vec<AtomicU64> =
        (0..words * usize::from(job.slots)).map(|_| AtomicU64::new(0)).collect();
    let mut slots = Vec::new();
    let mut bitmaps = Vec::new();
    for (number, words) in memory.chunks_mut(words).enumerate() {
        let first = Ipa::new(job.region.first + number as u64 * each);
        let span = Span::new(first, each).map_err(|error| error.to_string())?;
        let slot = Slot::memory(span, 0).with_id(number as u16);
        guest.insert(slot).map_err(|error| error.to_string())?;
        slots.push(slot);
        let bitmap = Bitmap::new(words, each / PAGE);
        bitmaps.push(bitmap.map_err(|error| error.to_string())?);
    }
    let engine = Engine {
        world: &world,
        guest: &guest,
        bitmaps: &bitmaps,
        page,
        gathers: (0..job.vcpus).map(|_| guest.gather().into()).collect(),
        deferred: RefCell::default(),
    };
    let baseline = |order| Baseline::new(&engine, order);
    let baseline = match job.how {
        How::LeafByLeaf => Some(baseline(Order::LeafByLeaf)),
        How::Before => Some(baseline(Order::Before)),
        How::FlushFirst => Some(baseline(Order::FlushFirst)),
        How::UnfreezeFirst => Some(baseline(Order::UnfreezeFirst)),
        How::After => Some(baseline(Order::After)),
        How::InPlace => Some(baseline(Order::InPlace)),
        How::Tablewright => None,
    };
    let mut logs = Vec::new();
    for _ in 0..if by_hardware { job.vcpus } else { 0 } {
        let page = machine.take_page();
        logs.push(page.ok_or("no memory for a log")?);
    }
    let test = Test {
        job,
        machine: &machine,
        world: &world,
        engine: &engine,
        way: match &baseline {
            Some(baseline) => baseline,
            None => &engine,
        },
        slots: &slots,
        bitmaps: &bitmaps,
        logs,
        shadow: machine.new_lock(),
        phase: Cell::new((0, Phase::Rest)),
        ready: Cell::new(0),
        begun: Cell::new(false),
        retries: Cell::new(0),
        log_full: Cell::new(0),
        stalls: RefCell::default(),
        ran: RefCell::default(),
    };
    test.run()
}

/// Phases of the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// They are in the guest for a short time.
    Rest,
    /// They write every page once.
    Populate,
    /// They access as many pages as they have.
    Dirty,
    /// Passes over and over, until the next phase.
    Disable,
    /// They are through.
    Over,
}

struct Test<'t, 'm, 'g, 's, F: Format<Input = Ipa>> {
    job: &'t Job,
    machine: &'m Machine,
    world: &'t World<'m>,
    engine: &'t Engine<'t, 'm, 'g, 's, F>,
    way: &'t dyn Way,
    slots: &'t [Slot],
    bitmaps: &'t [Bitmap<'t>],
    /// Log of each vCPU's writes, where hardware keeps one.
    logs: Vec<Pa>,
    /// Lock of faults of a guest's guest, whose tables are made of two.
    shadow: MachineLock<'m>,
    /// How many there have been, and the one that it is.
    phase: Cell<(u32, Phase)>,
    /// vCPUs that are through with it.
    ready: Cell<usize>,
    /// Large leaves are split ahead, and hardware logs what is written.
    begun: Cell<bool>,
    retries: Cell<u64>,
    log_full: Cell<u64>,
    stalls: RefCell<Vec<(Time, u64)>>,
    ran: RefCell<Ran>,
}

impl<'m, F: Format<Input = Ipa>> Test<'_, 'm, '_, '_, F> {
    fn run(&self) -> Result<Ran, String> {
        let vcpus = usize::from(self.job.vcpus);
        let problem = RefCell::new(None);
        self.machine
            .run(|cpu| match cpu.id() == vcpus {
                true => {
                    if let Err(why) = self.host(cpu) {
                        *problem.borrow_mut() = Some(why);
                        self.enter(cpu, Phase::Over);
                    }
                }
                false => self.vcpu(cpu),
            })
            .map_err(|error| error.to_string())?;
        if let Some(problem) = problem.take() {
            return Err(problem);
        }
        let violation = self.machine.finish().into_iter().next();
        Ok(Ran {
            stalls: self.stalls.take(),
            violation: violation.map(|violation| violation.to_string()),
            ..self.ran.take()
        })
    }

    // ---- The thread of the host ----

    /// From now on the vCPUs do this.
    fn enter(&self, cpu: Cpu<'_>, phase: Phase) {
        cpu.order();
        self.ready.set(0);
        self.phase.set((self.phase.get().0 + 1, phase));
        for vcpu in 0..usize::from(self.job.vcpus) {
            cpu.wake(vcpu, cpu.now());
        }
    }

    /// Waits until all vCPUs are through.
    fn gather(&self, cpu: Cpu<'_>) {
        cpu.order();
        while self.ready.get() < usize::from(self.job.vcpus) {
            cpu.park();
        }
    }

    /// How long something takes, multiplied.
    fn timed<T>(&self, cpu: Cpu<'_>, scale: u64, work: impl FnOnce() -> T) -> (T, Time) {
        cpu.order();
        let begin = cpu.now();
        let done = work();
        cpu.order();
        (done, cpu.now().saturating_sub(begin) * scale)
    }

    /// How long a call of the host takes: what it does, multiplied, and to call it, which is as
    /// long for any memory.
    fn called<T>(&self, cpu: Cpu<'_>, work: impl FnOnce() -> T) -> (T, Time) {
        let Scale { smaller, fewer } = self.job.scale;
        let (done, took) = self.timed(cpu, smaller * fewer, work);
        (done, took + self.call(cpu))
    }

    /// To call it, for each slot.
    fn call(&self, cpu: Cpu<'_>) -> Time {
        let call = self.machine.costs().call * u64::from(self.job.slots);
        cpu.spend(call);
        call
    }

    fn all_vcpus(&self, cpu: Cpu<'_>, phase: Phase) {
        self.enter(cpu, phase);
        self.gather(cpu);
    }

    fn host(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let Scale { smaller, fewer } = self.job.scale;
        let all = smaller * fewer;
        let ((), populate) = self.timed(cpu, all, || self.all_vcpus(cpu, Phase::Populate));
        // Large leaves that stay large are as many as there are, however large.
        let stays = self.job.options.split == Split::Fault && self.world.leaf != Level::PAGE;
        let (enabled, enable) = self.timed(cpu, if stays { fewer } else { all }, || self.enable());
        enabled?;
        let enable = enable + self.call(cpu);
        let slots = self.machine.costs().slot * u64::from(self.job.slots);
        cpu.spend(slots);
        let enable = enable + slots;
        let mut ran = Ran { populate, enable, ..Ran::default() };
        for _ in 0..self.job.iterations {
            let ((), dirty) = self.timed(cpu, all, || self.all_vcpus(cpu, Phase::Dirty));
            ran.dirty.push(dirty);
            let (got, get) = self.called(cpu, || match self.job.manual {
                true => self.read(cpu),
                false => self.harvest(),
            });
            got?;
            ran.get.push(get);
            if self.job.manual {
                let (cleared, clear) = self.called(cpu, || self.harvest());
                cleared?;
                ran.clear.push(clear);
            }
        }

        if self.job.running {
            self.enter(cpu, Phase::Disable);
        }
        let before = self.machine.counts();
        let flushes = self.world.flushes.get();
        let worked = self.world.worked();
        let (disabled, took) = self.timed(cpu, 1, || self.disable());
        disabled?;
        let after = self.machine.counts();
        self.all_vcpus(cpu, Phase::Rest);
        let ((), reclaimed) = self.timed(cpu, 1, || self.way.reclaim());
        let took = took + reclaimed;
        let worked = self.world.worked().saturating_sub(worked);
        self.check_large();
        let scaled = |took: Time, worked: Time| took.saturating_sub(worked) + worked * smaller;
        ran.disable = scaled(took, worked) * fewer + self.call(cpu) + slots;
        let zaps = self.world.zaps.take().into_iter();
        ran.zaps = zaps.map(|(took, worked)| scaled(took, worked)).collect();
        // The last is for what is left, however much there is.
        let last = u64::from(self.job.how == How::InPlace);
        let flushes = self.world.flushes.get() - flushes;
        ran.flushes = flushes.saturating_sub(last) * fewer + last;
        ran.kicks = (after.kicks - before.kicks) * fewer;
        ran.faults = (after.faults - before.faults) * all;
        ran.retries = self.retries.get() * all;
        ran.log_full = self.log_full.get() * all;
        *self.ran.borrow_mut() = ran;
        self.all_vcpus(cpu, Phase::Over);
        Ok(())
    }

    fn replace(&self, log: Log) -> Result<(), String> {
        self.world.logging.set(log.is_on());
        for slot in self.slots {
            // What is mapped is protected, or collapsed: nothing is taken back.
            drop(self.engine.guest.replace(slot.with_log(log)).map_err(|it| it.to_string())?);
        }
        // A fault that looked a slot up before may still map by that.
        let period = self.engine.guest.space().grace_period();
        while !self.engine.guest.space().is_over(period) {
            self.engine.look_away();
        }
        Ok(())
    }

    /// Large leaves are split ahead, and everything loses the permission to write.
    fn enable(&self) -> Result<(), String> {
        let Options { by, all_set, split, .. } = self.job.options;
        self.replace(by.log())?;
        if all_set {
            self.bitmaps.iter().for_each(Bitmap::mark_all);
            return Ok(());
        }
        if split == Split::Ahead {
            self.split()?;
        }
        let each = match split {
            Split::Ahead => PAGE,
            Split::Fault => leaf_bytes(self.world.leaf),
        };
        self.spend_as_kernel(self.machine.costs().visit, self.job.region.bytes / each);
        for slot in self.slots {
            let mut gather = self.engine.guest.gather();
            let slot = slot.with_log(by.log());
            let closed = match by {
                By::Faults => gather.protect(&slot, 0..slot.guest.size() / PAGE),
                By::Modification => gather.begin_modification_log(&slot),
            };
            closed.map_err(|it| it.to_string())?;
            self.engine.finish(&mut gather);
        }
        self.begun.set(true);
        Ok(())
    }

    /// Charges a kernel for its loop over leaves. The engine's loop is charged as it runs.
    fn spend_as_kernel(&self, each: Time, leaves: u64) {
        if self.job.how != How::Tablewright {
            self.machine.cpu().spend(each * leaves);
        }
    }

    /// Large leaves become pages.
    fn split(&self) -> Result<(), String> {
        for slot in self.slots {
            let mut gather = self.engine.guest.gather();
            let mut from = Some(slot.guest.start());
            while let Some(at) = from {
                let rest = Span::inclusive(at, slot.guest.last()).map_err(|it| it.to_string())?;
                if !gather.top_up(8) {
                    return Err("no memory for tables".to_owned());
                }
                from = gather.split_range(rest).map_err(|it| it.to_string())?;
                self.engine.finish(&mut gather);
            }
            gather.release_tables();
        }
        for at in self.world.parts() {
            self.world.set_large(at, false);
        }
        Ok(())
    }

    /// Copies the marks and leaves them.
    fn read(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let found: u64 = self.bitmaps.iter().map(Bitmap::count).sum();
        let costs = self.machine.costs();
        let words: u64 = (self.bitmaps.iter()).map(|bitmap| bitmap.pages().div_ceil(64)).sum();
        cpu.spend(match costs.copy {
            Time::ZERO => costs.load * words,
            line => line * words.div_ceil(8),
        });
        self.check_found(found);
        Ok(())
    }

    /// Takes the marks away, and protects their pages again. The first time, where all pages were
    /// in the log, large leaves are split ahead.
    fn harvest(&self) -> Result<(), String> {
        let Options { by, split, .. } = self.job.options;
        let starts = !self.begun.replace(true);
        if starts && split == Split::Ahead {
            self.split()?;
        }
        let words: u64 = (self.bitmaps.iter()).map(|bitmap| bitmap.pages().div_ceil(64)).sum();
        self.machine.cpu().spend(self.machine.costs().word * words);
        let mut found = 0;
        for (slot, bitmap) in self.slots.iter().zip(self.bitmaps) {
            let mut gather = self.engine.guest.gather();
            let slot = slot.with_log(by.log());
            if starts && by == By::Modification {
                gather.begin_modification_log(&slot).map_err(|it| it.to_string())?;
                self.engine.finish(&mut gather);
            }
            let harvested =
                gather.harvest(&slot, bitmap, 0..bitmap.pages(), Harvest::empty(), |_, bits| {
                    found += u64::from(bits.count_ones())
                });
            harvested.map_err(|it| it.to_string())?;
            self.engine.finish(&mut gather);
        }
        let leaves = match (starts, split) {
            (true, Split::Fault) => found / (leaf_bytes(self.world.leaf) / PAGE),
            _ => found,
        };
        let costs = self.machine.costs();
        // The split has paid for the store of each entry.
        let store = if starts && split == Split::Ahead { Time::ZERO } else { costs.entry };
        self.spend_as_kernel(store + costs.visit, leaves);
        self.check_found(found);
        Ok(())
    }

    /// Checks that every page is in the log, if every page was written.
    fn check_found(&self, found: u64) {
        let all = !self.job.random && self.job.write_percent == 100;
        let pages = self.job.region.bytes / PAGE;
        self.machine.check(!all || found == pages, || {
            format!("{pages} pages were written, and {found} are in the log")
        });
    }

    fn disable(&self) -> Result<(), String> {
        self.replace(Log::Off)?;
        if self.collapses() {
            self.way.disable();
        }
        Ok(())
    }

    /// Whether memory is in large leaves again when the log is disabled.
    fn collapses(&self) -> bool {
        let is_ours = self.job.how == How::Tablewright;
        self.world.leaf != Level::PAGE && (is_ours || !is_arm64::<F>())
    }

    fn check_large(&self) {
        for at in self.world.parts().filter(|_| self.collapses()) {
            let found = self.engine.guest.space().query(Ipa::new(at));
            let small = found.is_some_and(|leaf| leaf.size() < leaf_bytes(self.world.leaf));
            self.machine.check(!small, || format!("{at:#x} is in small leaves still"));
        }
    }

    // ---- The vCPUs ----

    fn vcpu(&self, cpu: Cpu<'_>) {
        self.world.mapper.load();
        let mut random = Random(self.job.seed ^ (cpu.id() as u64) << 32);
        let mut known = 0;
        loop {
            cpu.order();
            while self.phase.get().0 == known {
                cpu.park();
            }
            let (number, phase) = self.phase.get();
            known = number;
            match phase {
                Phase::Dirty => self.log_anew(cpu),
                _ => self.machine.log_modifications(None, 0),
            }
            self.world.at_work(|| match phase {
                Phase::Populate => self.own(cpu).for_each(|at| self.access(cpu, at, true)),
                Phase::Dirty => self.pass(cpu, &mut random, || true),
                Phase::Disable => {
                    let goes_on = || self.phase.get().0 == number;
                    while goes_on() {
                        let done = !self.collapses();
                        if done || self.own(cpu).all(|at| self.world.is_large(at)) {
                            self.machine.guest_computes();
                        } else {
                            self.pass(cpu, &mut random, goes_on);
                        }
                        cpu.order();
                    }
                }
                // What it was asked to forget it forgets when it enters.
                Phase::Rest | Phase::Over => self.machine.enter_guest(),
            });
            self.machine.leave_guest();
            self.drain(cpu);
            // No CPU waits for the end of what goes on until the next phase.
            if self.phase.get().0 == number {
                self.ready.set(self.ready.get() + 1);
            }
            cpu.wake(usize::from(self.job.vcpus), cpu.now());
            if phase == Phase::Over {
                return;
            }
        }
    }

    /// Hardware's log of this vCPU is empty, and on.
    fn log_anew(&self, cpu: Cpu<'_>) {
        if let (Some(&page), true) = (self.logs.get(cpu.id()), self.begun.get()) {
            self.machine.log_modifications(Some(page), ModificationLog::FIRST);
        }
    }

    /// Marks the pages that hardware has logged of this vCPU.
    fn drain(&self, cpu: Cpu<'_>) {
        let Some(&page) = self.logs.get(cpu.id()) else {
            return;
        };
        // SAFETY: a page that is taken for this, of words that are atomic, and lives as long as the
        // machine.
        let words = unsafe { self.world.mapper.table(page, Level::PAGE).cast().as_ref() };
        let index = self.machine.modification_index(cpu.id());
        let bitmap = |slot: &Slot| self.bitmaps.get(usize::from(slot.id));
        let log = ModificationLog::new(words);
        match self.engine.guest.drain(&log, index, bitmap) {
            Ok(marked) => {
                let costs = self.machine.costs();
                cpu.spend((costs.load + costs.exchange) * marked);
            }
            Err(error) => self.machine.report(Rule::Program, error.to_string()),
        }
        if self.phase.get().1 == Phase::Dirty {
            self.log_anew(cpu);
        }
    }

    /// The fault of a guest's guest: the tables of the hypervisor that is a guest are walked, and
    /// what is made of both is changed under one lock.
    fn nested<T>(&self, cpu: Cpu<'_>, handle: impl FnOnce() -> T) -> T {
        if !self.job.options.nested {
            return handle();
        }
        cpu.spend(self.machine.costs().load * (u64::from(F::root_level().height()) + 1));
        let _held = self.shadow.acquire();
        handle()
    }

    /// Bytes that each vCPU accesses.
    fn each(&self) -> u64 {
        match self.job.options.overlap {
            true => self.job.region.bytes,
            false => self.job.region.bytes / u64::from(self.job.vcpus),
        }
    }

    /// The pages of a vCPU.
    fn own(&self, cpu: Cpu<'_>) -> impl Iterator<Item = u64> + use<F> {
        let (first, each) = (self.job.region.first, self.each());
        let first = match self.job.options.overlap {
            true => first,
            false => first + cpu.id() as u64 * each,
        };
        (first..first + each).step_by(PAGE as usize)
    }

    /// Accesses as many pages as there are. While logging is disabled, pages that are large again
    /// are left out: they would take time, and show nothing.
    fn pass(&self, cpu: Cpu<'_>, random: &mut Random, goes_on: impl Fn() -> bool) {
        let each = self.each() / PAGE;
        let mut own = self.own(cpu);
        let first = self.own(cpu).next().unwrap_or(0);
        for _ in 0..each {
            let next = own.next().unwrap_or(first);
            let at = match self.job.random {
                true => first + random.below(each) * PAGE,
                false => next,
            };
            let write = random.below(100) < u64::from(self.job.write_percent);
            if !goes_on() {
                return;
            }
            if !self.world.is_large(at) || self.phase.get().1 != Phase::Disable {
                self.access(cpu, at, write);
            }
        }
    }

    /// One access of the guest, as often as it takes.
    fn access(&self, cpu: Cpu<'_>, at: u64, write: bool) {
        let request = match write {
            true => Request::write(at),
            false => Request::read(at),
        };
        cpu.order();
        let disabling = self.phase.get().1 == Phase::Disable;
        let (begin, worked) = (cpu.now(), self.world.worked());
        let (mut faulted, mut waited) = (false, None);
        let requested = || self.drain(cpu);
        while let Err(fault) = self.machine.guest_access_with(request, &requested) {
            if fault == Fault::LogFull {
                cpu.spend(self.machine.costs().exit * 2);
                self.log_full.update(|exits| exits + 1);
                self.drain(cpu);
                continue;
            }
            faulted = true;
            // Out of the guest and back into it; what a host does besides it does for a fault that
            // it can serve.
            let back = (self.machine.costs().exit * 2).min(self.machine.costs().exception);
            cpu.spend(back);
            let handled = self.nested(cpu, || self.way.fault(at, write));
            match handled {
                Handled::Done => cpu.spend(self.machine.costs().exception.saturating_sub(back)),
                Handled::Again => waited = Some(self.world.worked()),
                Handled::Lost => {
                    let what = format!("no memory for the tables of {at:#x}");
                    return self.machine.report(Rule::Program, what);
                }
            }
            if handled == Handled::Again && disabling {
                self.retries.set(self.retries.get() + 1);
            }
        }
        if disabling {
            let took = cpu.now().saturating_sub(begin);
            if took > self.machine.costs().exit {
                let page = faulted && waited.is_none() && !self.world.is_large(at);
                let waited = waited.map_or(Time::ZERO, |until| until.saturating_sub(worked));
                self.stall(took, waited, page);
            }
        }
        if !self.world.is_large(at) {
            self.world.fetch();
        }
        self.world.fetch_own();
    }

    /// A vCPU that waited for an entry waited for work on tables, of which there is more than was
    /// done. What happens to a page happens to all that it stands for.
    fn stall(&self, took: Time, waited: Time, page: bool) {
        let Scale { smaller, fewer } = self.job.scale;
        let took = took.saturating_sub(waited) + waited * smaller;
        let count = if page { smaller * fewer } else { fewer };
        self.stalls.borrow_mut().push((took, count));
    }
}

//! The migration on the software machine: vCPUs that write, a host that logs what they write and
//! sends it.
//!
//! # What is simulated
//!
//! Pages have no contents but a **version**: a write counts it up, sending a page takes it along.
//! At the end the versions at the destination have to be those of the source, page by page.
//!
//! A write goes through the tables of the guest, the TLB of its CPU and, if it faults, through the
//! engine. Once a page is found writable, further writes to it cost the guest what it does with the
//! page, and are not translated one by one: up to `QUANTUM` of them are done in one step, at its
//! beginning. The host announces before it takes the permission to write from a page that it will,
//! and says when every CPU has forgotten it; from the announcement on each write is translated
//! again, and between the two it may succeed by what a TLB remembers. So nothing is written that
//! the hardware would not let be written, and every write that it would is there to be lost.
//!
//! # The order
//!
//! As the engine demands: marks are taken, the pages are protected, the flush is complete, and then
//! they are sent.

mod guest;
mod host;
mod image;
mod log;
#[cfg(test)]
mod tests;
pub mod writes;

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU64;

use clap::ValueEnum;
use serde::Serialize;
use tablewright::dirty::{Bitmap, Ring, RingEntry};
use tablewright::format::{Ept, FORCED_WRITE_BACK, Stage2K4};
use tablewright::guest::{Gather, Guest, Slot, SlotCell};
use tablewright::shared::DeferredReclaim;
use tablewright::{Format, Ipa, Span};
use tablewright_machine::{
    Architecture, Granule, Machine, MachineLock, Mapper, Memory, Profile, Regime, Setup, Time,
};

use crate::error::Error;
use crate::runs::{self, Simulated};
use crate::{failed, shared_space};
use image::Image;
use writes::Writes;

/// A page of the guest.
pub const PAGE: u64 = 4096;
/// A large page of the host.
pub const BLOCK: u64 = 2 << 20;
/// What a page takes on the link: itself, and 8 bytes that say which it is.
pub const ON_LINK: u64 = PAGE + 8;
/// What a page of zeros takes.
pub const ZEROS_ON_LINK: u64 = 9;
/// Where the guest's memory is in the host's.
const PHYSICAL: u64 = 1 << 41;
/// So much of the guest's time is done in one step.
const QUANTUM: Time = Time::us(20);
/// So many pages are sent in one step.
const BATCH: u64 = 64;
/// So many pages are protected by one flush: the work of a step is bounded, and so is what the
/// machine has to watch.
const FLUSH: u64 = 1024;
/// So long QEMU sends before it asks whether the rest is small enough.
pub const SLICE: Time = Time::ms(50);
/// What a CPU does before it asks again whether another is through.
const PAUSE: Time = Time::ns(100);
/// The part of time after which a throttled vCPU sleeps, as in QEMU.
const TIMESLICE: Time = Time::ms(10);
/// QEMU's rates are of periods of at least so long.
pub const PERIOD: Time = Time::s(1);

/// How writes are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Logging {
    /// A bitmap; all pages are protected at the start, one by one, and again by chunks before they
    /// are sent
    Manual,
    /// A bitmap with everything marked at the start; pages are protected by chunks before they are
    /// sent
    AllSet,
    /// A bitmap; everything is protected in one step, at the start and in each round
    ProtectAll,
    /// A ring for each vCPU; all pages are protected at the start, one by one
    Ring,
    /// As manual, and large leaves are split at the start
    EagerSplit,
}

impl Logging {
    /// Those that are compared where none is asked for.
    pub const USUAL: [Self; 4] = [Self::Manual, Self::AllSet, Self::ProtectAll, Self::Ring];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::AllSet => "all-set",
            Self::ProtectAll => "protect-all",
            Self::Ring => "ring",
            Self::EagerSplit => "eager-split",
        }
    }

    /// Marks are taken, and pages protected, when a chunk is about to be sent.
    pub const fn harvests_by_chunk(self) -> bool {
        matches!(self, Self::Manual | Self::AllSet | Self::EagerSplit)
    }
}

/// The order in which the host does its part. All but the first lose writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Marks taken, protected, flushed, sent.
    Right,
    /// Sent before the flush is complete.
    #[cfg(test)]
    SentEarly,
    /// Protected before marks are taken.
    #[cfg(test)]
    ProtectedFirst,
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// How writes are logged.
    pub logging: Logging,
    /// Pages of the guest.
    pub pages: u64,
    /// So many of them held something from the beginning; the others are zeros until they are
    /// written.
    pub used: u64,
    /// So many pages, from the beginning, are mapped before the log is started; the others by the
    /// first fault on each.
    pub mapped: u64,
    /// One lock is held by each fault that maps, and while pages are protected, as in kernels of
    /// 2017; a fault that only allows writing again takes none.
    pub one_lock: bool,
    /// What a start takes besides protecting, and a look at the log for each word of its bitmap.
    pub host: HostTimes,
    /// How many vCPUs.
    pub vcpus: u16,
    /// Memory is mapped in large leaves.
    pub large: bool,
    /// Bytes in a second.
    pub bandwidth: u64,
    /// The longest that the guest may be stopped.
    pub downtime_limit: Time,
    /// When the guest is stopped whatever is left.
    pub timeout: Time,
    /// So long is sent before it is asked whether the rest is small enough.
    pub slice: Time,
    /// Rates are of periods of at least so long.
    pub period: Time,
    /// Pages that are protected together.
    pub chunk: u64,
    /// Entries of a ring.
    pub ring: usize,
    /// What the guest writes.
    pub writes: Writes,
    /// How long it is busy with a page that it writes.
    pub work: Time,
    /// What the host needs to find that a page that was never written is all zeros.
    pub zeros: Time,
    /// Slow it down if it writes more than is sent.
    pub auto_converge: bool,
    /// The order of the host's work.
    pub order: Order,
}

/// What the program takes that has the guest migrated, and the kernel for memory of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTimes {
    /// Of a start.
    pub start: Time,
    /// Of a look at the log, for each 64 pages; the cost of a load, if nothing is said.
    pub word: Option<Time>,
}

/// One round: from one look at the log to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// When it began, after the start.
    pub at: Time,
    /// Pages newly found to be dirty when it began.
    pub dirty: u64,
    /// Pages that were to be sent then.
    pub remaining: u64,
    /// How much the guest was slowed down in it, in percent.
    pub throttle: u64,
}

/// What a run showed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// Of all.
    pub total: Time,
    /// While the guest was stopped.
    pub downtime: Time,
    /// As it was expected before the guest was stopped.
    pub expected_downtime: Time,
    /// Until writes were logged.
    pub setup: Time,
    /// Bytes on the link.
    pub transferred: u64,
    /// Pages sent, besides those of zeros.
    pub normal: u64,
    /// Pages of zeros sent.
    pub duplicate: u64,
    /// Pages not sent.
    pub remaining: u64,
    /// Pages that became dirty in a second, over the last period.
    pub dirty_rate: f64,
    /// Looks at the log.
    pub syncs: u64,
    /// How much the guest was slowed down at last, in percent.
    pub throttle: u64,
    /// It was stopped because the rest was small enough, and not because time was up.
    pub converged: bool,
    /// The rounds while the guest ran.
    pub rounds: Vec<Round>,
    /// Writes of pages by the guest.
    pub writes: u64,
    /// The time for which it ran.
    pub running: Time,
    /// Faults of the guest.
    pub faults: u64,
    /// The longest time from a write that faulted until it was done.
    pub stall_longest: Time,
    /// The sum of all such times.
    pub stall_total: Time,
    /// Times that a ring was full.
    pub full: u64,
    /// Invalidations issued.
    pub invalidations: u64,
    /// Waits for their completion.
    pub waits: u64,
    /// Interrupts that had a vCPU leave the guest.
    pub kicks: u64,
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
        format!("migrate, {}", self.logging.name())
    }
}

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    simulated(job).map_err(failed(&job.profile, job.logging.name()))
}

fn simulated(job: &Job) -> Result<Ran, String> {
    if job.profile.architecture.is_x86() {
        return run_as::<Ept<4>>(job);
    }
    match job.profile.architecture.forced_write_back {
        false => run_as::<Stage2K4<40>>(job),
        true => run_as::<Stage2K4<40, FORCED_WRITE_BACK>>(job),
    }
}

fn run_as<F: Format<Input = Ipa>>(job: &Job) -> Result<Ran, String> {
    let vcpus = usize::from(job.vcpus);
    let tables = job.pages / 512;
    let frames = 2 * (tables + tables / 512) + 64 * (u64::from(job.vcpus) + 1) + 64;
    let base = &job.profile.architecture;
    let regime = if base.is_x86() {
        Regime::Ept {
            levels: 4,
            mode_based: false,
        }
    } else {
        Regime::Arm64Stage2 {
            granule: Granule::K4,
            input_bits: F::INPUT_BITS as u8,
            wide: false,
            forced_write_back: base.forced_write_back,
        }
    };
    let architecture = Architecture {
        regime,
        guest: None,
        // Writes are logged by faults.
        hardware_dirty: false,
        // Nothing is executed.
        idc: true,
        dic: true,
        ..base.clone()
    };
    let mut setup = Setup::new(architecture, Memory::new(frames as usize, 12, 1 << 30));
    // One more: the host's own.
    setup.scheduler.cpus = vcpus + 1;
    setup.costs = job.profile.costs.clone();
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let space = shared_space::<F, _>(mapper, mapper)?;
    let mut cells = [const { SlotCell::new() }; 1];
    let guest = Guest::new(space, &mut cells);
    let span = Span::new(Ipa::new(0), job.pages * PAGE).map_err(|it| it.to_string())?;
    let slot = Slot::memory(span, 0);
    guest.insert(slot).map_err(|it| it.to_string())?;

    let mut words: Vec<AtomicU64> = (0..job.pages.div_ceil(64))
        .map(|_| AtomicU64::new(0))
        .collect();
    let bitmap = Bitmap::new(&mut words, job.pages).map_err(|it| it.to_string())?;
    let mut ring_entries: Vec<Vec<RingEntry>> = match job.logging {
        Logging::Ring => (0..vcpus)
            .map(|_| (0..job.ring).map(|_| RingEntry::new()).collect())
            .collect(),
        _ => Vec::new(),
    };
    let rings = ring_entries
        .iter_mut()
        .map(|entries| Ring::new(entries))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|it| it.to_string())?;
    let migration = Migration {
        job,
        machine: &machine,
        mapper,
        guest: &guest,
        slot,
        bitmap,
        rings,
        reaping: machine.new_lock(),
        lock: machine.new_lock(),
        reaped: RefCell::new(vec![0; job.pages.div_ceil(64) as usize]),
        image: Image::new(job.pages, job.chunk),
        vcpus: (0..vcpus).map(|_| Vcpu::default()).collect(),
        gathers: (0..=vcpus).map(|_| guest.gather().into()).collect(),
        later: RefCell::default(),
        started: Cell::new(None),
        stop: Cell::new(false),
        stopped: Cell::new(0),
        throttle: Cell::new(0),
        full: Cell::new(0),
        kicks: Cell::new(0),
        ran: RefCell::default(),
        problem: RefCell::default(),
    };
    machine
        .run(|cpu| {
            if cpu.id() == vcpus {
                migration.host(cpu);
            } else {
                migration.vcpu(cpu);
            }
        })
        .map_err(|error| error.to_string())?;
    if let Some(problem) = migration.problem.take() {
        return Err(problem);
    }
    if let Some(violation) = machine.finish().into_iter().next() {
        return Err(violation.to_string());
    }
    Ok(migration.ran.take())
}

/// What the host keeps of a vCPU.
#[derive(Default)]
struct Vcpu {
    /// What interrupts have cost it, and it has not yet paid.
    owed: Cell<Time>,
    /// How long it was kept from what it wanted to do.
    lost: Cell<Time>,
    longest: Cell<Time>,
    total: Cell<Time>,
    faults: Cell<u64>,
}

struct Migration<'t, 'm, F: Format<Input = Ipa>> {
    job: &'t Job,
    machine: &'m Machine,
    mapper: Mapper<'m>,
    guest: &'t Guest<'t, F, Mapper<'m>>,
    /// The slot without a log.
    slot: Slot,
    bitmap: Bitmap<'t>,
    rings: Vec<Ring<'t>>,
    /// Rings are harvested by one at a time.
    reaping: MachineLock<'m>,
    /// The one of [`Job::one_lock`].
    lock: MachineLock<'m>,
    /// What was found in rings, and is protected.
    reaped: RefCell<Vec<u64>>,
    image: Image,
    vcpus: Box<[Vcpu]>,
    /// Of each vCPU, and of the host.
    gathers: Box<[RefCell<Gather<'t, 't, F, Mapper<'m>>>]>,
    /// What is complete and may still be walked.
    later: RefCell<Vec<DeferredReclaim<F, Mapper<'m>>>>,
    started: Cell<Option<Time>>,
    stop: Cell<bool>,
    stopped: Cell<usize>,
    /// Percent.
    throttle: Cell<u64>,
    full: Cell<u64>,
    kicks: Cell<u64>,
    ran: RefCell<Ran>,
    problem: RefCell<Option<String>>,
}

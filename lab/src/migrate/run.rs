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

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU64;

use tablewright::dirty::{Bitmap, Ring, RingEntry};
use tablewright::format::{Ept, FORCED_WRITE_BACK, Stage2K4};
use tablewright::guest::{Guest, Slot, SlotCell};
use tablewright::{Format, Ipa, Span};
use tablewright_machine::{Architecture, Granule, Machine, Memory, Regime, Setup};

use super::image::Image;
use super::job::{Job, Logging, PAGE, Ran};
use super::state::{Migration, Vcpu};
use crate::error::Error;
use crate::guest::{failed, shared_space};
use crate::runs::Simulated;

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
        Regime::Ept { levels: 4, mode_based: false }
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

    let mut words: Vec<AtomicU64> =
        (0..job.pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
    let bitmap = Bitmap::new(&mut words, job.pages).map_err(|it| it.to_string())?;
    let mut ring_entries: Vec<Vec<RingEntry>> = match job.logging {
        Logging::Ring => {
            (0..vcpus).map(|_| (0..job.ring).map(|_| RingEntry::new()).collect()).collect()
        }
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

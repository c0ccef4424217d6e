//! Shared edits on the machine: the walks of software, and what their owners have to say to caches.

use std::cell::Cell;

use tablewright::shared::{CacheMaintenance, GracePeriod, SharedPlatform};
use tablewright::{Invalidation, Pa};

use super::Mapper;
use crate::tlb::Tlbi;

/// Which CPUs are in a walk, and since which time.
pub(crate) struct Walks {
    now: Cell<u64>,
    since: Box<[Cell<Option<u64>>]>,
}

impl Walks {
    pub fn new(cpus: usize) -> Self {
        Self { now: Cell::new(1), since: (0..cpus).map(|_| Cell::new(None)).collect() }
    }
}

/// A walk of the running CPU, until this is dropped.
#[must_use = "the walk ends when this is dropped"]
pub struct MachineWalk<'m> {
    mapper: Mapper<'m>,
    /// Inside of another walk of the same CPU.
    inner: bool,
}

impl Drop for MachineWalk<'_> {
    fn drop(&mut self) {
        let machine = self.mapper.machine();
        let cpu = machine.cpu();
        cpu.order();
        if !self.inner {
            // A CPU that finds the walk to be over sees what it has stored: the announcement is a
            // release.
            machine.hardware.hand_over(cpu.id());
            machine.software_walks.since[cpu.id()].set(None);
        }
    }
}

// SAFETY: a walk is known from its first step to its last, in the order of virtual time (1.);
// memory is coherent (2.).
unsafe impl<'m> SharedPlatform for Mapper<'m> {
    type Walk<'a>
        = MachineWalk<'m>
    where
        Self: 'a;

    fn enter(&self) -> MachineWalk<'m> {
        let machine = self.machine();
        let cpu = machine.cpu();
        cpu.order();
        let since = &machine.software_walks.since[cpu.id()];
        let inner = since.get().is_some();
        if !inner {
            since.set(Some(machine.software_walks.now.get()));
        }
        MachineWalk { mapper: *self, inner }
    }

    fn grace_period(&self) -> GracePeriod {
        let machine = self.machine();
        machine.cpu().order();
        machine.software_walks.now.update(|now| now + 1);
        GracePeriod::new(machine.software_walks.now.get())
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        let machine = self.machine();
        machine.cpu().order();
        let mut walks = machine.software_walks.since.iter();
        walks.all(|since| since.get().is_none_or(|since| since >= period.get()))
    }

    fn maintenance(&self) -> CacheMaintenance {
        let architecture = self.machine().architecture();
        CacheMaintenance { clean: !architecture.forced_write_back, instructions: !architecture.dic }
    }

    fn clean(&self, frame: Pa, size: u64) {
        let page = 1 << self.machine().memory().page_shift();
        for offset in (0..size).step_by(page) {
            self.machine().clean(Pa::new(frame.get() + offset));
        }
    }

    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        let machine = self.machine();
        if machine.architecture().icache_aliasing {
            machine.invalidate_instructions(None);
            return;
        }
        let page = 1 << machine.memory().page_shift();
        for offset in (0..size).step_by(page) {
            machine.invalidate_instructions(Some(Pa::new(frame.get() + offset)));
        }
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        let machine = self.machine();
        if machine.architecture().permission_fault_drops_entry {
            return;
        }
        let here = |tlbi| Tlbi { broadcast: false, ..tlbi };
        let mut combined = None;
        for tlbi in self.tlbis(what).map(here) {
            machine.tlbi(tlbi);
            combined = self.then(&tlbi);
        }
        machine.dsb();
        if let Some(combined) = combined {
            machine.tlbi(combined);
            machine.dsb();
        }
    }
}

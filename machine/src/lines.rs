//! The cache lines of tables: which CPU wrote each last, and until when it is on its way.
//!
//! A line that another CPU wrote last has to be fetched from there, one CPU at a time. A line that
//! has been read since is in more than one cache: reading it is cheap for all, as if each had
//! fetched it already, and writing it takes it away from them. The directory is of a fixed size; a
//! line that finds its place taken by another is in memory, where no CPU has to wait for it.

use std::cell::Cell;

use crate::sched::Cpu;
use crate::time::Time;

/// Places in the directory, a power of two.
const PLACES: usize = 1 << 14;

/// In the caches of several.
const SHARED: u16 = u16::MAX;

struct Place {
    line: Cell<u64>,
    owner: Cell<u16>,
    /// Until when it is on its way to a CPU.
    busy: Cell<Time>,
}

pub(crate) struct Lines {
    places: Box<[Place]>,
    transfer: Time,
}

impl Lines {
    /// A directory for CPUs between which a line takes this long. Without a cost, or with one CPU,
    /// there is none.
    pub fn new(transfer: Time, cpus: usize) -> Self {
        let count = if transfer == Time::ZERO || cpus == 1 { 0 } else { PLACES };
        let place = |_| Place {
            line: Cell::new(u64::MAX),
            owner: Cell::new(SHARED),
            busy: Cell::new(Time::ZERO),
        };
        Self { places: (0..count).map(place).collect(), transfer }
    }

    /// The running CPU is about to read or write at `pa`. It is first; it may not be when this
    /// returns.
    #[inline(always)]
    pub fn access(&self, cpu: Cpu<'_>, pa: u64, write: bool) {
        if !self.places.is_empty() {
            self.fetch(cpu, pa, write);
        }
    }

    fn fetch(&self, cpu: Cpu<'_>, pa: u64, write: bool) {
        let line = pa >> 6;
        // Neighbouring lines in neighbouring places, tables apart from each other.
        let place = &self.places[(line ^ line >> 14 ^ line >> 28) as usize % PLACES];
        let me = cpu.id() as u16;
        if place.line.replace(line) != line {
            place.owner.set(if write { me } else { SHARED });
            return;
        }
        let owner = place.owner.get();
        let here = owner == me || owner == SHARED && !write;
        place.owner.set(if write || owner == me { me } else { SHARED });
        if !here {
            let until = place.busy.get().max(cpu.now()) + self.transfer;
            place.busy.set(until);
            cpu.wait_until(until);
            cpu.order();
        }
    }
}

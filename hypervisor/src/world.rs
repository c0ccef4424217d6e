//! The guests and their CPUs.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

use tablewright::Pa;
use tablewright::guest::Fault;
use tablewright_hypervisor_common as common;
use tablewright_hypervisor_common::vm::Next;

use crate::count::count;
use crate::counters::Count;
use crate::machine::Machine;
use crate::power::Power;
use crate::{cpu, identifiers};

/// A guest.
pub type Vm = common::vm::Vm<Machine>;

/// The number of the slot of memory; devices have others.
pub const MEMORY_SLOT: u16 = 0;
/// The number before that of the slot of the second piece of memory; those of the others follow.
pub const PIECE_SLOT: u16 = 200;
/// The number of the slot of the first redistributor's control registers, which the guest only
/// reads; those of the others follow.
pub const CONTROL_SLOT: u16 = 100;

/// One of the guest's CPUs.
pub struct Vcpu {
    /// Its affinity, by which it is told from others.
    pub affinity: u64,
    /// Whether it is on.
    pub power: Power,
}

/// Everything, once it is there.
pub struct World {
    /// The guest, or several.
    pub vms: Vec<Vm>,
    /// The guest's CPUs, each a processor; its place is its number.
    pub cpus: Vec<Vcpu>,
    /// The root of the map that the hypervisor runs on.
    pub map: Pa,
}

/// The number of the guest that each processor has.
static GUEST: [AtomicUsize; cpu::MOST] = [const { AtomicUsize::new(0) }; cpu::MOST];

static WORLD: spin::once::Once<World> = spin::once::Once::new();

/// This processor has that guest from here on.
pub fn become_guest(guest: usize) {
    GUEST[cpu::number()].store(guest, Ordering::Relaxed);
}

/// Sets everything up.
pub fn begin(vms: Vec<Vm>, cpus: Vec<Vcpu>, map: Pa) -> &'static World {
    WORLD.call_once(|| World { vms, cpus, map })
}

/// Everything. It is there when the first guest runs.
pub fn world() -> &'static World {
    match WORLD.get() {
        Some(world) => world,
        None => panic!("there is no guest yet"),
    }
}

impl World {
    /// The guest of this processor.
    pub fn vm(&self) -> &Vm {
        &self.vms[GUEST[cpu::number()].load(Ordering::Relaxed)]
    }
}

/// Handles a fault of this processor's guest.
pub fn fault(fault: &Fault) -> Next {
    let (vm, cpu) = (world().vm(), cpu::number());
    vm.gate.enter::<Machine>(cpu);
    if !identifiers::has_vmid(vm.guest.space().root()) {
        count(Count::Foreign, 1);
    }
    let next = vm.fault(fault, cpu);
    // A fault is when this processor has time for others.
    for _ in 0..2 {
        vm.evict(cpu);
    }
    vm.gate.leave(cpu);
    next
}

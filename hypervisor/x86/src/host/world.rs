//! The guest, its vCPUs, and the processors.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use tablewright::shootdown::{Allocator, Shootdown};
use tablewright_hypervisor_common as common;

use crate::clock::Clock;
use crate::machine::{Machine, Mutex, PAGE};
use crate::options::Options;
use crate::processor;
use crate::vcpu::Vcpu;
use crate::vmcb::NoRegister;

/// A guest.
pub type Vm = common::vm::Vm<Machine>;

/// The state of a processor, as far as others have to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It runs the host, and looks for events before it does anything else.
    Host,
    /// It runs a guest, or is about to.
    Guest,
    /// It sleeps, or is about to.
    Sleeping,
}

/// A processor, as others see it.
pub struct Processor {
    mode: AtomicU8,
    /// The vCPU that it runs, as long as it is in a guest.
    running: AtomicU32,
    /// How often it has entered a guest, and left one: odd from before it loads a vCPU's space
    /// until it has left the guest.
    pub passages: AtomicU64,
    /// Its stale TLB entries.
    pub stale: Stale,
}

impl Processor {
    /// One that has just started.
    pub const fn new() -> Self {
        Self {
            mode: AtomicU8::new(Mode::Host as u8),
            running: AtomicU32::new(0),
            passages: AtomicU64::new(0),
            stale: Stale::new(),
        }
    }

    /// Changes the state of this processor.
    pub fn set(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Release);
    }

    /// Says that this processor is about to enter this guest.
    pub fn run(&self, vcpu: &Vcpu) {
        self.running.store(vcpu.number, Ordering::Relaxed);
        self.set(Mode::Guest);
    }

    /// Whether it is in this guest.
    pub fn runs(&self, vcpu: &Vcpu) -> bool {
        self.mode.load(Ordering::Acquire) == Mode::Guest as u8
            && self.running.load(Ordering::Relaxed) == vcpu.number
    }
}

/// Stale TLB entries, which a processor invalidates when it enters a guest: none, those under an
/// identifier, or all.
pub struct Stale(AtomicU64);

impl Stale {
    const EVERYTHING: u64 = u64::MAX;

    /// All: earlier entries are not known.
    pub const fn new() -> Self {
        Self(AtomicU64::new(Self::EVERYTHING))
    }

    /// Adds entries. Only the processor itself does.
    pub fn add(&self, id: Option<u16>) {
        let id = id.map_or(Self::EVERYTHING, u64::from);
        let both = match self.0.load(Ordering::Relaxed) {
            before if before == 0 || before == id => id,
            _ => Self::EVERYTHING,
        };
        self.0.store(both, Ordering::Relaxed);
    }

    /// Takes the entries for the control block with which the guest of this identifier is entered
    /// (APM vol. 2 15.16.1).
    pub fn take(&self, id: u16, by_identifier: bool) -> u32 {
        const ALL: u32 = 1;
        const THIS: u32 = 3;
        let stale = self.0.load(Ordering::Relaxed);
        if stale != Self::EVERYTHING && stale != u64::from(id) || stale == 0 {
            return 0;
        }
        self.0.store(0, Ordering::Relaxed);
        match stale != Self::EVERYTHING && by_identifier {
            true => THIS,
            false => ALL,
        }
    }
}

/// The registers that a guest has for all of its vCPUs.
#[derive(Default)]
pub struct Partition {
    guest: AtomicU64,
    page: AtomicU64,
    reference: AtomicU64,
}

/// Bit 0 of a register that says where a page is.
const ENABLED: u64 = 1;
/// `vmmcall; ret`.
const CALL: [u8; 4] = [0x0f, 0x01, 0xd9, 0xc3];

impl Partition {
    /// The operating system.
    pub fn guest(&self) -> u64 {
        self.guest.load(Ordering::Relaxed)
    }

    /// Sets the operating system. Without one there are no hypercalls.
    pub fn set_guest(&self, value: u64) {
        self.guest.store(value, Ordering::Relaxed);
        if value == 0 {
            self.page.store(0, Ordering::Relaxed);
        }
    }

    /// The address of the hypercall page, and whether it is enabled.
    pub fn page(&self) -> u64 {
        self.page.load(Ordering::Relaxed)
    }

    /// Puts the hypercall page there.
    ///
    /// # Errors
    /// There is no memory there.
    pub fn set_page(&self, vm: &Vm, value: u64) -> Result<(), NoRegister> {
        // Without an operating system it stays off (TLFS, "Establishing the Hypercall Interface").
        let value = match self.guest() {
            0 => value & !ENABLED,
            _ => value,
        };
        if value & ENABLED != 0 {
            vm.write(value & !(PAGE - 1), &CALL).ok_or(NoRegister)?;
        }
        self.page.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// The address of the page of the reference time, and whether it is enabled.
    pub fn reference(&self) -> u64 {
        self.reference.load(Ordering::Relaxed)
    }

    /// Puts the page of the reference time there.
    ///
    /// # Errors
    /// There is no memory there.
    pub fn set_reference(&self, vm: &Vm, value: u64) -> Result<(), NoRegister> {
        if value & ENABLED != 0 {
            let at = value & !(PAGE - 1);
            for (index, word) in (0..).zip(Clock::get().reference_page()) {
                let bytes = word.to_le_bytes();
                vm.write(at + 8 * index, &bytes).ok_or(NoRegister)?;
            }
        }
        self.reference.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Whether there are hypercalls.
    pub fn is_enabled(&self) -> bool {
        self.page() & ENABLED != 0
    }
}

/// Everything, once it is there.
pub struct World {
    /// The guest's memory.
    pub vm: Vm,
    /// Its vCPUs, by their numbers.
    pub vcpus: &'static [Vcpu],
    /// The processors that may have TLB entries of them.
    pub shootdown: Shootdown<'static>,
    /// The allocator of identifiers.
    pub allocator: Mutex<Allocator<'static>>,
    /// The processors, by their numbers.
    pub processors: [Processor; processor::MOST],
    /// A time slice, in cycles.
    pub slice: u64,
    /// Whether the entries under one identifier can be invalidated.
    pub by_identifier: bool,
    /// The options.
    pub options: Options,
    /// The registers that the guest has for all of its vCPUs.
    pub partition: Partition,
    /// The bitmaps of ports and registers.
    pub bitmaps: (u64, u64),
    /// The root of the nested tables.
    pub nested: u64,
}

static WORLD: spin::once::Once<World> = spin::once::Once::new();

/// Sets everything up.
pub fn begin(world: World) -> &'static World {
    WORLD.call_once(|| world)
}

/// Everything, once it is there.
pub fn world() -> Option<&'static World> {
    WORLD.get()
}

impl World {
    /// An event was posted for a vCPU: its processor looks for it.
    pub fn wake(&self, vcpu: &Vcpu) {
        fence(Ordering::SeqCst);
        let Some(home) = self.processors.get(vcpu.home) else {
            return;
        };
        if vcpu.home != processor::number() && home.mode.load(Ordering::Acquire) != Mode::Host as u8
        {
            processor::kick(vcpu.home);
        }
    }
}

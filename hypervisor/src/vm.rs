//! The guest's memory: mapped when it is touched.
//!
//! The guest sees all of its memory from the beginning, at the addresses at which the machine has
//! it. Which frame is behind a page, and not always the one of the same address,
//! [`memory`](common::memory) says.

use core::sync::atomic::{AtomicU64, Ordering};

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntpct_el0};
use tablewright::format;
use tablewright::guest::{Backing, Cause, Declined, Fault};
use tablewright::{Ipa, Pa};
use tablewright_hypervisor_common::memory::reclaim;
use tablewright_hypervisor_common::snapshot::{Gate, Log};
use tablewright_hypervisor_common::{self as common, fault};

use crate::counters::Count;
use crate::cpu;
use crate::machine::{Machine, Mutex, count, counted};

/// Whether the guest's memory is write-back whatever the guest says (`HCR_EL2.FWB`).
pub const FORCED: bool = cfg!(feature = "forced-write-back");

/// The granule of the guest's tables.
const PAGE_SHIFT: u32 = match (cfg!(feature = "granule-16k"), cfg!(feature = "granule-64k")) {
    (false, false) => 12,
    (true, false) => 14,
    (false, true) => 16,
    (true, true) => panic!("there is one granule"),
};

/// 1 TiB of guest addresses.
pub type Stage2 = format::Stage2<PAGE_SHIFT, 40, false, FORCED>;

/// The guest, as the engine knows it.
pub type Guest = common::Guest<Machine>;

/// The edits of one processor.
pub type Gather = common::Gather<Machine>;

/// Which frame is behind each page of it.
pub type Memory = common::memory::Memory<Machine>;

/// A page of the guest's tables.
pub const PAGE: u64 = 1 << PAGE_SHIFT;

/// The number of the slot of memory; devices have others.
pub const MEMORY_SLOT: u16 = 0;
/// The number before that of the slot of the second piece of memory, and those of the others
/// follow.
pub const PIECE_SLOT: u16 = 200;
/// The number of the slot of the first redistributor's control registers, and those of the others
/// follow. The guest only reads them.
pub const CONTROL_SLOT: u16 = 100;

/// What becomes of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The guest goes on.
    Resume,
    /// It wrote a register that it may only read.
    Emulate(Ipa),
    /// Nothing is there: it gets an abort of its own.
    Inject,
}

/// How many frames are taken away in a second, at most. Each one that is missed is a fault, and
/// with each fault another could be taken: without a pace the guest does little else.
pub struct Pace {
    /// So many, or any number if it is zero.
    per_second: u64,
    /// When it began, in ticks of the counter.
    begun: AtomicU64,
}

impl Pace {
    /// A pace that begins when it is first asked for.
    pub const fn new(per_second: u64) -> Self {
        Self {
            per_second,
            begun: AtomicU64::new(0),
        }
    }

    /// Whether one more may be taken now.
    fn allows_one(&self) -> bool {
        if self.per_second == 0 {
            return true;
        }
        let now = read_cntpct_el0().bits();
        let begun = match self
            .begun
            .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed)
        {
            Ok(_) => now,
            Err(begun) => begun,
        };
        let due = now.saturating_sub(begun).saturating_mul(self.per_second)
            / read_cntfrq_el0().bits().max(1);
        counted(Count::Evicted) < due
    }
}

/// The guest, and what is behind it.
pub struct Vm {
    /// What the engine knows of it.
    pub guest: Guest,
    /// Its memory.
    pub memory: Memory,
    /// What it has written, if that is asked for.
    pub log: Option<Log>,
    /// Where it can be stopped.
    pub gate: Gate,
    pace: Pace,
    /// One for each processor, which keeps tables from fault to fault.
    gathers: [Mutex<Option<Gather>>; cpu::MOST],
}

impl Vm {
    /// A guest with this memory; its slots are in `guest`.
    pub fn new(guest: Guest, memory: Memory, log: Option<Log>, pace: Pace) -> Self {
        Self {
            guest,
            memory,
            log,
            gate: Gate::new(),
            pace,
            gathers: [const { spin::mutex::SpinMutex::new(None) }; cpu::MOST],
        }
    }

    /// The machine that it runs on.
    pub fn machine(&self) -> &'static Machine {
        self.guest.space().platform()
    }

    /// Handles a fault of this processor's.
    pub fn fault(&'static self, fault: &Fault) -> Next {
        let cpu = cpu::number();
        let Some(gather) = self.gathers.get(cpu) else {
            return Next::Inject;
        };
        // No other takes it: it is this processor's own.
        let mut gather = gather.lock();
        let gather = gather.get_or_insert_with(|| self.guest.gather());
        self.gate.enter::<Machine>(cpu);
        count(Count::Faults, 1);
        if !cpu::has_vmid(self.guest.space().root()) {
            count(Count::Foreign, 1);
        }
        let next = self.map(fault, gather);
        reclaim(gather);
        // A fault is when this processor has time for others.
        for _ in 0..2 {
            self.evict(gather);
        }
        self.gate.leave(cpu);
        next
    }

    /// Takes a frame away, if it is time.
    fn evict(&'static self, gather: &mut Gather) {
        if !self.pace.allows_one() {
            return;
        }
        self.memory.evict_one(&self.guest, gather, |index| {
            // A copy that was made just now may be of the poison.
            if let Some(log) = &self.log {
                log.mark(index);
            }
        });
    }

    /// The same without a fault: the guest need not be loaded.
    pub fn take_one_away(&'static self) {
        if let Some(gather) = self.gathers.get(cpu::number()) {
            self.evict(gather.lock().get_or_insert_with(|| self.guest.gather()));
        }
    }

    fn map(&'static self, fault: &Fault, gather: &mut Gather) -> Next {
        if fault.cause == Cause::AccessFlag {
            // If it was busy, the guest comes again.
            let _busy = self.guest.set_accessed(fault);
            return Next::Resume;
        }
        let (guest, memory, log) = (&self.guest, &self.memory, self.log.as_ref());
        let next = fault::map(
            guest,
            memory,
            log,
            gather,
            fault,
            cpu::number(),
            |request| match request.slot().id {
                MEMORY_SLOT | PIECE_SLOT.. => memory.look_up(request.at()),
                _ => Some(Backing::new(Pa::new(request.host()), PAGE)),
            },
        );
        match next {
            fault::Next::Resume => Next::Resume,
            fault::Next::Declined(Declined::Denied(slot))
                if (CONTROL_SLOT..PIECE_SLOT).contains(&slot.id) =>
            {
                Next::Emulate(fault.at)
            }
            _ => Next::Inject,
        }
    }

    /// Whether the guest's memory holds this range.
    pub fn holds(&self, at: u64) -> bool {
        self.memory.holds(Ipa::new(at))
    }
}

/// The operand of the call that is [`POISON`].
pub const POISONED: u64 = 0xdead;
/// What a free frame holds: as an instruction a call of the hypervisor, as an address nowhere.
pub const POISON: u64 = {
    let hvc = 0xd400_0002 | POISONED << 5;
    hvc << 32 | hvc
};

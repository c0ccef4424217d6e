//! The engine's platform, on this machine: frames for tables, barriers, invalidations.
//!
//! One [`Machine`] serves several trees, told apart by the identity that their invalidations carry:
//! the map that the hypervisor itself runs on ([`OWN`](crate::stage2::OWN)), and stage 2 of the
//! guest ([`VMID`]). Of
//! [several guests](crate::guests) each root has an [identifier](crate::identifiers) that changes.
//!
//! # Why these instructions
//!
//! Sections are those of the Arm Architecture Reference Manual, DDI 0487.
//!
//! *Publish.* A walker is another observer of memory. A store to a descriptor is visible to it once
//! a DSB that orders stores has completed (D8.2.6), on all processors of the inner shareable
//! domain: `dsb ishst`. The ISB makes this processor discard what it has fetched ahead with the old
//! descriptors, if it is its own map.
//!
//! *Invalidate.* The instructions are the engine's ([`Encoder`]), which argues their order.
//!
//! *Complete.* TLB maintenance is complete when a DSB after it is, on the processor that issued it
//! (D8.17.5); `ISH` because the instructions are broadcast to the inner shareable domain.
//!
//! The VMID that the instructions go by is that of `VTTBR_EL2`. Every processor that edits stage 2
//! has loaded it ([`cpu::confine`](crate::cpu::confine)), the one that runs no guest too. Where
//! there are several guests, it is loaded [for the flush](crate::identifiers::under).

use core::arch::asm;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntpct_el0, read_ctr_el0};
use tablewright::arch::arm64::{Domain, Ids, execute};
use tablewright::shared::{
    CacheMaintenance, Epochs, GracePeriod, SharedPlatform, WalkSlot, Walking,
};
use tablewright::shootdown::Identity;
use tablewright::shootdown::arm64::{Encoder, Instruction, Op, Regime, Tlbi};
use tablewright::{
    Barrier, Caps, Entry, Format, Invalidation, Level, Pa, Platform, Span, TableLink, What,
};
use tablewright_hypervisor_common::frames::Frames;
use tablewright_hypervisor_common::host::Host;

use crate::count::{COUNTERS, Patience, count};
use crate::counters::Count;
use crate::plant::{Plant, is_any_planted, is_planted};
use crate::stage2::{CAPS, FORCED, MARKS, OWN, PAGE, POISON, Stage2, VMID};
use crate::{cpu, identifiers, rest};

/// A planted bug: a class of invalidations that is left out, so that a test can show that it is
/// missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omit {
    /// Those of leaves that were taken away, or protected.
    Leaves,
    /// Those of the permission to write that a log has taken away. [The
    /// log](tablewright_hypervisor_common::snapshot) says which they are, because what an
    /// invalidation is for cannot be seen from it.
    Permissions,
    /// Those of tables that were detached, with the leaves below them.
    Tables,
    /// Those of everything.
    Everything,
}

impl Omit {
    /// The class of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "leaves" => Some(Self::Leaves),
            "permissions" => Some(Self::Permissions),
            "tables" => Some(Self::Tables),
            "everything" => Some(Self::Everything),
            _ => None,
        }
    }
}

/// The machine, as the engine sees it.
pub struct Machine {
    frames: Frames<Patience>,
    epochs: Epochs<'static>,
    omit: Option<Omit>,
    /// The processor whose invalidations are left out for now.
    silent: AtomicUsize,
}

static WALKS: [WalkSlot; cpu::MOST] = [const { WalkSlot::new() }; cpu::MOST];

impl Machine {
    /// A machine whose tables lie in `memory`, with or without a planted bug.
    ///
    /// # Safety
    /// 1. The memory has no other user, and lies where the hypervisor maps it one to one.
    pub unsafe fn new(memory: Span<Pa>, omit: Option<Omit>) -> Option<Self> {
        // SAFETY: passed on (1.).
        let frames = unsafe { Frames::new(memory, PAGE) }?;
        Some(Self {
            frames,
            epochs: Epochs::new(&WALKS),
            omit,
            silent: AtomicUsize::new(usize::MAX),
        })
    }

    /// Whether this invalidation of the guest's memory is left out.
    fn omits(&self, flush: &Invalidation<'_>) -> bool {
        let class = match flush.what {
            _ if regime(flush) != Regime::Stage2 => return false,
            _ if self.silent.load(Ordering::Relaxed) == cpu::number() => Omit::Permissions,
            What::Everything => Omit::Everything,
            What::Ranges(ranges) if ranges.iter().any(|range| range.tables) => Omit::Tables,
            What::Ranges(_) => Omit::Leaves,
        };
        self.omit == Some(class)
    }
}

/// Counts the frames that were taken for a table.
fn taken(first: Pa, size: u64) -> Pa {
    count(Count::Tables, size / PAGE);
    first
}

/// Invalidates everything that was combined with stage 1.
pub const COMBINED: Tlbi = Tlbi { op: Op::Vmalle1, operand: 0 };

/// The regime of the tables that a flush is about.
fn regime(flush: &Invalidation<'_>) -> Regime {
    match flush.id {
        _ if identifiers::of(flush.root).is_some() => Regime::Stage2,
        OWN => Regime::El2,
        VMID => Regime::Stage2,
        _ => Regime::El1,
    }
}

/// Writes the instructions of a flush, for this machine.
fn encoder(flush: &Invalidation<'_>) -> Encoder {
    Encoder {
        regime: regime(flush),
        page_shift: match regime(flush) {
            Regime::Stage2 => <Stage2 as Format>::PAGE_SHIFT,
            _ => 12,
        },
        ranges: Ids::read().has_ranges(),
        wide: false,
    }
}

/// Executes a flush, with the bug in it that is planted, if it is one of these.
#[cold]
fn tell_wrong(encoder: &Encoder, flush: &Invalidation<'_>) {
    let is_combined_first = regime(flush) == Regime::Stage2 && is_planted(Plant::CombinedFirst);
    let domain = match is_planted(Plant::Local) {
        true => Domain::Local,
        false => Domain::Inner,
    };
    if is_combined_first {
        execute(Instruction::Tlbi(COMBINED), domain);
        execute(Instruction::Dsb, domain);
    }
    let execute_all = |flush: &Invalidation<'_>| {
        encoder.encode(flush, |one| {
            let is_second = matches!(one, Instruction::Tlbi(COMBINED) | Instruction::Dsb);
            if !(is_second && is_combined_first) {
                execute(one, domain);
            }
        });
    };
    let What::Ranges(ranges) = flush.what else {
        return execute_all(flush);
    };
    for &range in ranges {
        let mut range = range;
        if is_planted(Plant::FirstPage) {
            range.last = range.first | (PAGE - 1);
        }
        range.tables &= !is_planted(Plant::LeavesOfTables);
        execute_all(&Invalidation { what: What::Ranges(&[range]), ..*flush });
    }
}

/// Barriers and maintenance by their names.
macro_rules! instruct {
    ($($text:literal),* $(; $operand:expr)?) => {
        // SAFETY: what is forgotten is found again, and what is cleaned keeps its value. It is a
        // compiler barrier as well: no `nomem`.
        unsafe { asm!($($text),* $(, in(reg) $operand)?, options(nostack, preserves_flags)) }
    };
}

// SAFETY: a frame is handed out once until it is freed (1.), lies where its address says, because
// the hypervisor's map is one to one (2.), and has a link of its own (3.). Barriers are argued
// above (4., 6.), invalidations by the engine (5.), and a reference is the machine (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        Some(taken(self.frames.take()?, PAGE))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        count(Count::Tables, 1u64.wrapping_neg());
        // SAFETY: a frame of this machine's that is not in use any more (1.).
        unsafe { self.frames.give(frame) };
    }

    fn alloc_root(&self, _: Level, tables: usize) -> Option<Pa> {
        let size = PAGE * tables as u64;
        let root = match tables {
            1 => self.frames.take(),
            _ => self.frames.take_row(size, size),
        };
        Some(taken(root?, size))
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        for table in 0..tables as u64 {
            // SAFETY: each is a frame of its own; the rest is passed on.
            unsafe { self.free_table(Pa::new(root.get() + table * PAGE), level) };
        }
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: no frame is at address 0: RAM begins above.
        unsafe { NonNull::new_unchecked(table) }
    }

    fn barrier(&self, what: Barrier) {
        match what {
            Barrier::Publish => {
                count(Count::Publications, 1);
                instruct!("dsb ishst", "isb");
            }
            Barrier::Complete => {
                count(Count::Completions, 1);
                instruct!("dsb ish", "isb");
            }
        }
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        match flush.what {
            _ if self.omits(flush) => return,
            What::Everything => count(Count::Flushes, 1),
            What::Ranges(ranges) => count(Count::Ranges, ranges.len() as u64),
        }
        let encoder = encoder(flush);
        identifiers::under(flush, || match is_any_planted() {
            true => tell_wrong(&encoder, flush),
            false => encoder.encode(flush, |one| execute(one, Domain::Inner)),
        });
    }

    fn caps(&self) -> Caps {
        CAPS
    }

    fn identity_of(&self, root: Pa) -> Option<&Identity> {
        identifiers::of(root)
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.frames.link_of(frame)
    }
}

// SAFETY: the epochs keep both promises.
unsafe impl SharedPlatform for Machine {
    /// `None` only for a processor beyond [`cpu::MOST`], of which none is started.
    type Walk<'a> = Option<Walking<'a>>;

    #[inline(always)]
    fn enter(&self) -> Self::Walk<'_> {
        // SAFETY: processors have different numbers, and no exception that EL2 takes in a walk
        // comes back (1., 2.); no program is moved to another processor (3.), and the slots are
        // these epochs' alone (4.).
        unsafe { self.epochs.enter(cpu::number()) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.epochs.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.epochs.is_over(period)
    }

    fn maintenance(&self) -> CacheMaintenance {
        // The guest starts with its caches off, and reads memory past them, if it is not forced to
        // write-back. CTR_EL0.DIC: instruction caches look after themselves.
        CacheMaintenance { clean: !FORCED, instructions: read_ctr_el0().bits() >> 29 & 1 == 0 }
    }

    fn clean(&self, frame: Pa, size: u64) {
        // CTR_EL0.DminLine: the logarithm of the words in the smallest line.
        let line = 4 << (read_ctr_el0().bits() >> 16 & 0xf);
        for at in (frame.get()..frame.get() + size).step_by(line) {
            instruct!("dc civac, {}"; at);
        }
        instruct!("dsb sy");
    }

    fn invalidate_instructions(&self, _: Pa, _: u64) {
        // All of it: the guest's virtual addresses, which some caches go by, are not known.
        instruct!("ic ialluis", "dsb ish", "isb");
    }

    fn invalidate_here(&self, flush: &Invalidation<'_>) {
        let encoder = encoder(flush);
        identifiers::under(flush, || {
            encoder.encode(flush, |one| execute(one, Domain::Local));
        });
        instruct!("dsb nsh", "isb");
    }
}

// SAFETY: all memory is mapped one to one by the map that the hypervisor runs on (1.), and a frame
// is handed out once (2.).
unsafe impl Host for Machine {
    type Format = Stage2;
    type Relax = Patience;
    const POISON: u64 = POISON;
    const MARKS: bool = MARKS;

    fn counters() -> &'static [AtomicU64] {
        &COUNTERS
    }

    fn take_frame(&self) -> Option<Pa> {
        self.frames.take()
    }

    fn now() -> u64 {
        read_cntpct_el0().bits()
    }

    fn ticks_per_ms() -> u64 {
        read_cntfrq_el0().bits() / 1000
    }

    fn rest(ticks: u64) {
        if !rest::rest(ticks) {
            <Patience as spin::RelaxStrategy>::relax();
        }
    }

    /// One processor at a time does.
    fn forget_permissions(&self, flush: impl FnOnce()) {
        if self.omit == Some(Omit::Permissions) {
            self.silent.store(cpu::number(), Ordering::Relaxed);
        }
        flush();
        self.silent.store(usize::MAX, Ordering::Relaxed);
    }

    fn passed() {
        cpu::keep_time();
    }

    fn stood(ticks: u64) {
        cpu::stood(ticks);
    }
}

//! The guest's memory: mapped when it is touched, taken away and given back behind its back.
//!
//! The guest sees all of its memory from the beginning, at the addresses at which the machine has it. Which frame is behind
//! a page is this file's to say ([`Memory`]), and not always the one of the same address: a frame that is taken away is
//! copied to another one, and **poisoned**, so that a processor that still reaches it through a translation that should
//! have been forgotten reads nonsense, and what it writes is lost. Executed, the frame calls the hypervisor; if it was
//! written, that is seen when it is used again, behind some other page.
//!
//! # Taking a page away
//!
//! 1. The look-up says that the page is on the move. Faults on it go back to the guest and come again.
//! 2. A [sweep](tablewright::guest::Sweep): what was looked up before is out of date, walks of others come to an end, the
//!    leaf is unmapped, every processor forgets it.
//! 3. No processor reaches the frame now. It is copied and poisoned.
//! 4. The look-up says where the page is.
//!
//! A page of a block takes the block down, and from then on the block is mapped by pages: their frames are not in a row
//! any more.

use core::ops::ControlFlow;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use spin::RelaxStrategy as _;
use tablewright::format::Stage2K4;
use tablewright::guest::{self, Backing, Cause, Declined, Fault, Pass, Sweep};
use tablewright::shared::{Mapped, Refused, SharedPlatform as _};
use tablewright::{Format as _, Ipa, Pa, Platform as _, Span};

use crate::counters::Count;
use crate::cpu;
use crate::machine::{Machine, Mutex, Patience, count, counted};
use crate::snapshot::{Gate, Log};

/// 1 TiB of guest addresses, pages of 4 KiB.
pub type Stage2 = Stage2K4<40, false>;

/// The guest, as the engine knows it.
pub type Guest = guest::Guest<'static, Stage2, &'static Machine>;

/// The edits of one processor.
pub type Gather = guest::Gather<'static, 'static, Stage2, &'static Machine>;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;

/// The number of the slot of memory; devices have others.
pub const MEMORY_SLOT: u16 = 0;
/// The number of the slot of the first redistributor's control registers, and those of the others follow. The guest only reads
/// them.
pub const CONTROL_SLOT: u16 = 100;

/// How large leaves are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Pages of 4 KiB.
    Pages,
    /// Blocks of 2 MiB, as long as their frames are in a row.
    Blocks,
    /// In turn: 2 MiB by one block, 2 MiB by pages.
    Mixed,
}

impl Leaves {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "4k" => Some(Self::Pages),
            "2m" => Some(Self::Blocks),
            "mixed" => Some(Self::Mixed),
            _ => None,
        }
    }

    /// The largest.
    pub fn largest(self) -> u64 {
        match self {
            Self::Pages => PAGE,
            Self::Blocks | Self::Mixed => BLOCK,
        }
    }
}

/// Of an entry of [`Memory::pages`]: the frame is being replaced.
const MOVING: u32 = 1 << 31;
/// It was replaced, and the guest has not touched it since.
const AWAY: u32 = 1 << 30;

/// What is taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// The frames of so many pages.
    pub count: u64,
    /// None before so many faults.
    pub after: u64,
    /// With each page all that is mapped around it: the table is cut off, and what was below it faults again.
    pub tables: bool,
}

/// Which frame is behind each page of the guest.
pub struct Memory {
    guest: Span<Ipa>,
    leaves: Leaves,
    /// The number of the frame of each page, and the two flags.
    pages: &'static [AtomicU32],
    /// Whether a page of this block has ever had another frame than that of its address.
    scattered: &'static [AtomicBool],
    /// Frames for pages that are taken away; first in, first out, so that a frame stays poisoned for a while.
    spare: Mutex<Spare>,
    evictions: Evictions,
    /// So many are still to be taken away.
    to_evict: AtomicU64,
    /// Where to look for the next one.
    hand: AtomicU64,
}

/// A queue.
struct Spare {
    frames: [u32; Self::MOST],
    first: usize,
    len: usize,
}

impl Spare {
    const MOST: usize = 64;

    fn push(&mut self, frame: u32) {
        // No more are put in than were taken out.
        if self.len < Self::MOST {
            self.frames[(self.first + self.len) % Self::MOST] = frame;
            self.len += 1;
        }
    }

    fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        let frame = self.frames[self.first];
        self.first = (self.first + 1) % Self::MOST;
        Some(frame)
    }
}

impl Memory {
    /// Memory of the guest, each page on the frame of its address.
    pub fn new(
        guest: Span<Ipa>,
        leaves: Leaves,
        evictions: Evictions,
        pages: &'static [AtomicU32],
        scattered: &'static [AtomicBool],
        machine: &Machine,
    ) -> Self {
        let first = guest.start().get() / PAGE;
        for (index, page) in pages.iter().enumerate() {
            page.store((first + index as u64) as u32, Ordering::Relaxed);
        }
        let mut spare = Spare {
            frames: [0; Spare::MOST],
            first: 0,
            len: 0,
        };
        while evictions.count != 0 && spare.len < Spare::MOST {
            let Some(frame) = machine.take_frame() else {
                break;
            };
            // SAFETY: just taken: it has no other owner.
            unsafe { poison(frame.get()) };
            spare.push((frame.get() / PAGE) as u32);
        }
        Self {
            guest,
            leaves,
            pages,
            scattered,
            spare: spin::mutex::SpinMutex::new(spare),
            evictions,
            to_evict: AtomicU64::new(evictions.count),
            hand: AtomicU64::new(0),
        }
    }

    fn index(&self, at: Ipa) -> Option<usize> {
        Some((at.get().checked_sub(self.guest.start().get())? / PAGE) as usize)
    }

    /// The page behind an address; `None` while it is on the move.
    pub fn look_up(&self, at: Ipa) -> Option<Backing> {
        let index = self.index(at)?;
        let page = self.pages.get(index)?.load(Ordering::Acquire);
        if page & MOVING != 0 {
            return None;
        }
        let block = at.get() / BLOCK;
        let large = match self.leaves {
            Leaves::Pages => false,
            Leaves::Blocks => true,
            Leaves::Mixed => block.is_multiple_of(2),
        };
        let scattered = self
            .scattered
            .get(index / (BLOCK / PAGE) as usize)?
            .load(Ordering::Acquire);
        let size = if large && !scattered { BLOCK } else { PAGE };
        Some(Backing::new(Pa::new(u64::from(page & !AWAY) * PAGE), size))
    }

    /// Puts other frames behind all pages: those of `area`, in a row.
    pub fn move_to(&self, area: Span<Pa>) {
        let first = area.start().get() / PAGE;
        for (number, page) in (first..).zip(self.pages) {
            page.store(number as u32, Ordering::Relaxed);
        }
        for block in self.scattered {
            block.store(false, Ordering::Release);
        }
    }

    /// The guest has this page again.
    fn returned(&self, at: Ipa) {
        let Some(page) = self.index(at).and_then(|index| self.pages.get(index)) else {
            return;
        };
        let now = page.load(Ordering::Relaxed);
        if now & (AWAY | MOVING) == AWAY
            && page
                .compare_exchange(now, now & !AWAY, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            count(Count::Returned, 1);
        }
    }
}

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
    /// One for each processor, which keeps tables from fault to fault.
    gathers: [Mutex<Option<Gather>>; cpu::MOST],
}

impl Vm {
    /// A guest with this memory; its slots are in `guest`.
    pub fn new(guest: Guest, memory: Memory, log: Option<Log>) -> Self {
        Self {
            guest,
            memory,
            log,
            gate: Gate::new(),
            gathers: [const { spin::mutex::SpinMutex::new(None) }; cpu::MOST],
        }
    }

    /// The machine that it runs on.
    pub fn machine(&self) -> &'static Machine {
        self.guest.space().platform()
    }

    /// How many entries of the root say something.
    pub fn roots(&self) -> u64 {
        let (space, level) = (self.guest.space(), Stage2::root_level());
        // SAFETY: the root of a space that lives as long as the guest (1.).
        let root = unsafe { self.machine().table(space.root(), level) };
        // SAFETY: an entry of it.
        let is_used = |index| unsafe { root.add(index).as_ref().load() != 0 };
        (0..Stage2::entries(level))
            .filter(|&index| is_used(index))
            .count() as u64
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
        self.gate.enter(cpu);
        count(Count::Faults, 1);
        let next = self.map(fault, gather);
        settle(gather);
        // A fault is when this processor has time for others.
        for _ in 0..2 {
            self.evict_one(gather);
        }
        self.gate.leave(cpu);
        next
    }

    fn map(&self, fault: &Fault, gather: &mut Gather) -> Next {
        if fault.cause == Cause::AccessFlag {
            // If it was busy, the guest comes again.
            let _busy = self.guest.touch(fault);
            return Next::Resume;
        }
        loop {
            let request = match self.guest.request(fault) {
                Ok(request) => request,
                Err(Declined::Busy) => {
                    self.busy();
                    break Next::Resume;
                }
                Err(Declined::Denied(slot)) if slot.id >= CONTROL_SLOT => {
                    break Next::Emulate(fault.at);
                }
                Err(_) => break Next::Inject,
            };
            // What it writes is marked after it was made writable, and before it goes on; room is made sure of before.
            let marker = match &self.log {
                Some(log) if request.is_logged_write() => {
                    Some(log.marker(cpu::number(), &request.slot()))
                }
                _ => None,
            };
            if marker.is_some_and(|marker| marker.room().is_err()) {
                count(Count::Full, 1);
                Patience::relax();
                break Next::Resume;
            }
            let mark = || {
                if let Some(marker) = &marker {
                    self.guest.mark(marker, &request.slot(), request.at());
                }
            };
            if self.log.is_some() && self.guest.reopen(&request) == Ok(true) {
                count(Count::Reopened, 1);
                mark();
                break Next::Resume;
            }
            gather.top_up(request.tables());
            let page = match request.slot().id {
                MEMORY_SLOT => self.memory.look_up(request.at()),
                _ => Some(Backing::new(Pa::new(request.host()), PAGE)),
            };
            let Some(page) = page else {
                self.busy();
                break Next::Resume;
            };
            match gather.map(&request, &page) {
                Ok(mapped) => {
                    let kind = match mapped {
                        Mapped::Installed => Count::Installed,
                        _ => Count::Grown,
                    };
                    count(kind, 1);
                    mark();
                    self.memory.returned(request.at());
                    break Next::Resume;
                }
                Err(Refused::Busy(_)) => {
                    self.busy();
                    break Next::Resume;
                }
                Err(Refused::Retry) => {
                    // It may be full.
                    settle(gather);
                }
                Err(Refused::NeedsTables(missing)) => {
                    assert!(gather.top_up(missing), "no memory for tables");
                }
                Err(_) => break Next::Inject,
            }
        }
    }

    /// Another processor is at it: the guest tries again, when that one has had a turn.
    fn busy(&self) {
        count(Count::Busy, 1);
        Patience::relax();
    }

    // ---- Eviction ----

    /// Takes the frame of one page away, if some are still to be taken.
    fn evict_one(&'static self, gather: &mut Gather) {
        let memory = &self.memory;
        let one_less = |left: u64| left.checked_sub(1);
        if counted(Count::Faults) < memory.evictions.after
            || memory
                .to_evict
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                .is_err()
        {
            return;
        }
        // Steps of a prime number come by every page; most are not mapped.
        for _ in 0..32 {
            let index =
                memory.hand.fetch_add(7919, Ordering::Relaxed) as usize % memory.pages.len();
            let at = Ipa::new(memory.guest.start().get() + index as u64 * PAGE);
            if self.guest.space().query(at).is_some() && self.evict(at, index, gather) {
                count(Count::Evicted, 1);
                return;
            }
        }
        memory.to_evict.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the frame of this page away. Whether it was there to be taken.
    fn evict(&'static self, at: Ipa, index: usize, gather: &mut Gather) -> bool {
        let memory = &self.memory;
        let page = &memory.pages[index];
        let size = if memory.evictions.tables { BLOCK } else { PAGE };
        let Ok(span) = Span::new(Ipa::new(at.get() & !(size - 1)), size) else {
            return false;
        };
        let Some(spare) = memory.spare.lock().pop() else {
            return false;
        };
        let now = page.load(Ordering::Relaxed);
        let is_claimed = now & (MOVING | AWAY) == 0
            && page
                .compare_exchange(now, now | MOVING, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !is_claimed {
            memory.spare.lock().push(spare);
            return false;
        }
        memory.scattered[index / (BLOCK / PAGE) as usize].store(true, Ordering::Release);
        take_away(self.guest.sweep(span), gather);
        let (from, to) = (u64::from(now) * PAGE, u64::from(spare) * PAGE);
        // The guest may have written past the caches.
        self.machine().clean(Pa::new(from), PAGE);
        // SAFETY: two frames, mapped here one to one; no processor reaches the first any more, and none the second yet.
        unsafe {
            count(Count::Spoiled, u64::from(!is_poisoned(to)));
            ptr::copy_nonoverlapping(
                ptr::with_exposed_provenance::<u64>(from as usize),
                ptr::with_exposed_provenance_mut(to as usize),
                (PAGE / 8) as usize,
            );
            poison(from);
        }
        page.store(spare | AWAY, Ordering::Release);
        if let Some(log) = &self.log {
            // A copy that was made just now may be of the poison.
            log.mark(index as u64);
        }
        memory.spare.lock().push(now);
        true
    }

    /// Whether the guest's memory holds this range.
    pub fn holds(&self, at: u64) -> bool {
        self.memory.guest.contains(Ipa::new(at))
    }
}

/// The operand of the call that is [`POISON`].
pub const POISONED: u64 = 0xdead;
/// What a free frame holds: as an instruction a call of the hypervisor, as an address nowhere.
const POISON: u64 = {
    let hvc = 0xd400_0002 | POISONED << 5;
    hvc << 32 | hvc
};

/// Makes a frame useless to what still reaches it.
///
/// # Safety
/// 1. It is a frame, mapped at its address, and what it holds is not needed.
pub unsafe fn poison(frame: u64) {
    let words = ptr::with_exposed_provenance_mut::<u64>(frame as usize);
    for word in 0..(PAGE / 8) as usize {
        // SAFETY: inside of the frame (1.).
        unsafe { words.add(word).write(POISON) };
    }
}

/// Whether a frame was not written since it was [poisoned](poison).
///
/// # Safety
/// 1. It is a frame, mapped at its address, and should not be written.
unsafe fn is_poisoned(frame: u64) -> bool {
    let words = ptr::with_exposed_provenance::<u64>(frame as usize);
    // SAFETY: inside of the frame (1.). Volatile, because it may be written all the same.
    (0..(PAGE / 8) as usize).all(|word| unsafe { words.add(word).read_volatile() } == POISON)
}

/// Takes away what is mapped, for good.
pub fn take_away(
    mut sweep: Sweep<'static, 'static, Stage2, &'static Machine>,
    gather: &mut Gather,
) {
    loop {
        match sweep.unmap(gather, |_| ControlFlow::Continue(())) {
            Ok(Pass::Waiting) => Patience::relax(),
            Ok(Pass::Went) => settle(gather),
            Ok(Pass::Over) => return,
            Err(error) => panic!("the guest's memory cannot be unmapped: {error}"),
        }
    }
}

/// Completes what was gathered and frees what was cut off. Until no walk holds that it waits: walks take microseconds, and
/// none waits for anything.
pub fn settle(gather: &mut Gather) {
    let mut done = gather.finish(|_| ());
    while let Err(cut) = done {
        Patience::relax();
        done = cut.quiet().map(|completed| completed.finish(|_| ()));
    }
}

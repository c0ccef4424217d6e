//! What the engine asks of an embedder, on this machine: frames for nested tables, and
//! invalidations of what is made of them.
//!
//! *Publish.* Walkers see stores in program order (APM vol. 2 7.2): the compiler has to keep them,
//! no more.
//!
//! *Invalidate.* What a processor remembers of a guest stands under the identifier (ASID) of a
//! vCPU, combined of the guest's tables and the nested ones (15.25.7), and no instruction finds it
//! by the guest's physical address. So all of every vCPU goes: at once where one runs, else before
//! it does ([`flush::nested`]).

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use spin::mutex::SpinMutex;
use tablewright::shared::{Epochs, GracePeriod, SharedPlatform, WalkSlot, Walking};
use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform, Span, TableLink};
use tablewright_hypervisor_common::{Event, Host};

use crate::counters::{Count, NAMES};
use crate::{clock, flush, processor};

/// A lock. What holds it waits for nothing.
pub type Mutex<T> = SpinMutex<T, spin::Spin>;

/// What the engine has to know. Processors mark leaves as written here always (APM vol. 2 15.25.8),
/// but only such as may be written and are not marked, of which there are none: with this the
/// engine marks every leaf that it makes writable. So a log goes by faults, and all memory can be
/// protected in one step.
const CAPS: Caps = Caps {
    hardware_dirty: false,
    ..Caps::CONSERVATIVE
};

/// The size of a page.
pub const PAGE: u64 = 4096;

/// What is counted, and behind it what was counted between the guest's marks; `xtask` looks for it
/// by this name.
#[unsafe(no_mangle)]
static COUNTERS: [AtomicU64; 2 * NAMES.len()] = [const { AtomicU64::new(0) }; 2 * NAMES.len()];

/// What was counted at the guest's first mark.
static MARKED: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Counts.
pub fn count(what: Count, by: u64) {
    COUNTERS[what as usize].fetch_add(by, Ordering::Relaxed);
}

/// Keeps the largest.
pub fn count_most(what: Count, number: u64) {
    COUNTERS[what as usize].fetch_max(number, Ordering::Relaxed);
}

/// The guest begins something that is counted by itself.
pub fn begin() {
    COUNTERS[Count::WaitLongest as usize].store(0, Ordering::Relaxed);
    for (mark, counter) in MARKED.iter().zip(&COUNTERS) {
        mark.store(counter.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// It has ended.
pub fn end() {
    let (counters, kept) = COUNTERS.split_at(NAMES.len());
    for ((mark, counter), kept) in MARKED.iter().zip(counters).zip(kept) {
        let since = counter
            .load(Ordering::Relaxed)
            .wrapping_sub(mark.load(Ordering::Relaxed));
        kept.store(since, Ordering::Relaxed);
    }
}

/// The machine, as the engine sees it.
pub struct Machine {
    frames: Span<Pa>,
    links: &'static [TableLink],
    free: Mutex<Free>,
    epochs: Epochs<'static>,
}

/// Frames that are not in use: those that never were, and a chain of those that were, through their
/// first words.
struct Free {
    fresh: u64,
    chain: u64,
}

static WALKS: [WalkSlot; processor::MOST] = [const { WalkSlot::new() }; processor::MOST];

impl Machine {
    /// A machine whose tables lie in `memory`.
    ///
    /// # Safety
    /// 1. The memory has no other user, and is mapped one to one.
    pub unsafe fn new(memory: Span<Pa>) -> Option<Self> {
        // A link for each frame, at the start.
        let count = memory.size() / (PAGE + size_of::<TableLink>() as u64);
        let links = (count * size_of::<TableLink>() as u64).next_multiple_of(PAGE);
        let first = memory.start().checked_add(links)?;
        let base = ptr::with_exposed_provenance_mut::<TableLink>(memory.start().get() as usize);
        for index in 0..count as usize {
            // SAFETY: inside of the memory, which is ours (1.).
            unsafe { base.add(index).write(TableLink::new()) };
        }
        Some(Self {
            frames: Span::inclusive(first, memory.last()).ok()?,
            // SAFETY: just written, and without another user (1.).
            links: unsafe { core::slice::from_raw_parts(base, count as usize) },
            free: SpinMutex::new(Free {
                fresh: first.get(),
                chain: 0,
            }),
            epochs: Epochs::new(&WALKS),
        })
    }

    /// Frames for anything, in a row, zeroed.
    pub fn take_frames(&self, pages: u64) -> Option<Pa> {
        let mut free = self.free.lock();
        let frame = free.fresh;
        let end = frame.checked_add(pages.checked_mul(PAGE)?)?;
        if end - 1 > self.frames.last().get() {
            return None;
        }
        free.fresh = end;
        let words = ptr::with_exposed_provenance_mut::<u64>(frame as usize);
        // SAFETY: frames that never were in use.
        unsafe { words.write_bytes(0, ((end - frame) / 8) as usize) };
        Some(Pa::new(frame))
    }
}

// SAFETY: a frame is handed out once until it is freed (1.), lies where its address says (2.), and
// has a link of its own (3.). The compiler keeps stores in order (4.), an invalidation is complete
// when it was issued (5., 6.), and a reference is the machine (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let mut free = self.free.lock();
        let frame = if free.chain != 0 {
            let frame = free.chain;
            // SAFETY: a frame of the chain, whose first word says where the chain goes on.
            free.chain = unsafe { ptr::with_exposed_provenance::<u64>(frame as usize).read() };
            frame
        } else {
            let frame = free.fresh;
            if frame + (PAGE - 1) > self.frames.last().get() {
                return None;
            }
            free.fresh = frame + PAGE;
            frame
        };
        count(Count::Tables, 1);
        Some(Pa::new(frame))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        count(Count::Tables, 1u64.wrapping_neg());
        let mut free = self.free.lock();
        // SAFETY: a frame of this machine's that is not in use.
        unsafe { ptr::with_exposed_provenance_mut::<u64>(frame.get() as usize).write(free.chain) };
        free.chain = frame.get();
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: no frame is at address 0.
        unsafe { NonNull::new_unchecked(ptr::with_exposed_provenance_mut(frame.get() as usize)) }
    }

    fn barrier(&self, _: Barrier) {
        compiler_fence(Ordering::SeqCst);
    }

    fn invalidate(&self, _: &Invalidation<'_>) {
        count(Count::NestedFlushes, 1);
        if let Some(world) = crate::world() {
            flush::nested(world);
        }
    }

    fn caps(&self) -> Caps {
        CAPS
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let offset = frame.get().checked_sub(self.frames.start().get())?;
        self.links.get((offset / PAGE) as usize)
    }
}

// SAFETY: the epochs keep both promises.
unsafe impl SharedPlatform for Machine {
    /// `None` only for a processor beyond [`processor::MOST`], of which none is started.
    type Walk<'a> = Option<Walking<'a>>;

    #[inline(always)]
    fn enter(&self) -> Self::Walk<'_> {
        // SAFETY: processors have different numbers, and handlers of interrupts do not walk (1.,
        // 2.); no program is moved to another processor (3.), and the slots are these epochs' alone
        // (4.).
        unsafe { self.epochs.enter(processor::number()) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.epochs.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.epochs.is_over(period)
    }
}

// SAFETY: the host's first 8 GiB are mapped one to one (1.), and a frame is handed out once (2.).
unsafe impl Host for Machine {
    type Format = crate::vm::Nested;
    type Relax = spin::Spin;
    const POISON: u64 = crate::vm::POISON;

    fn count(what: Event, by: u64) {
        COUNTERS[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    fn counted(what: Event) -> u64 {
        COUNTERS[what as usize].load(Ordering::Relaxed)
    }

    fn take_frame(&self) -> Option<Pa> {
        self.take_frames(1)
    }

    fn now() -> u64 {
        processor::now()
    }

    fn ticks_per_ms() -> u64 {
        crate::world().map_or(1, |world| world.clock.counter_hz / 1000)
    }

    /// The timer wakes it: the processor that does this runs no vCPU.
    fn rest(ticks: u64) {
        if let Some(world) = crate::world() {
            processor::set_timer(world.clock.ticks(ticks));
            processor::sleep();
        }
    }

    /// A processor that has passed is in its guest, or about to enter it.
    fn summon(cpu: usize) {
        processor::kick(cpu);
    }

    fn stood(ticks: u64) {
        clock::stood(ticks);
    }
}

//! The engine's platform, on this machine: frames for nested tables, and invalidations of
//! translations that are made of them.
//!
//! *Publish.* Walkers see stores in program order (APM vol. 2 7.2): the compiler has to keep them,
//! no more.
//!
//! *Invalidate.* What a processor remembers of a guest stands under the identifier (ASID) of a
//! vCPU, combined of the guest's tables and the nested ones (15.25.7), and no instruction finds it
//! by the guest's physical address. So all of every vCPU goes: at once where one runs, else before
//! it does ([`flush::nested`](crate::flush::nested)).

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use spin::mutex::SpinMutex;
use spin::once::Once;
use tablewright::format::Npt;
use tablewright::shared::{Epochs, GracePeriod, SharedPlatform, WalkSlot, Walking};
use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform, Span, TableLink};
use tablewright_hypervisor_common::frames::Frames;
use tablewright_hypervisor_common::host::Host;

use crate::clock::{self, Clock};
use crate::count::{COUNTERS, count};
use crate::counters::Count;
use crate::processor;

/// A lock, whose holder waits for nothing.
pub type Mutex<T> = SpinMutex<T, spin::Spin>;

/// Nested tables of 4 levels, as the host's own are.
pub type Nested = Npt<4>;

/// The capabilities that the engine goes by. Processors always mark leaves as written here (APM
/// vol. 2 15.25.8), but only leaves that are writable and not marked, of which there are none: the
/// engine marks every leaf that it makes writable. So a log goes by faults, and all memory can be
/// protected in one step.
const CAPS: Caps = Caps { hardware_dirty: false, ..Caps::CONSERVATIVE };

/// The size of a page.
pub const PAGE: u64 = 4096;

/// The machine, as the engine sees it.
pub struct Machine {
    frames: Frames<spin::Spin>,
    epochs: Epochs<'static>,
    /// The flush of nested translations, once there are guests.
    flush: Once<fn()>,
}

static WALKS: [WalkSlot; processor::MOST] = [const { WalkSlot::new() }; processor::MOST];

impl Machine {
    /// A machine whose tables lie in `memory`.
    ///
    /// # Safety
    /// 1. The memory has no other user, and is mapped one to one.
    pub unsafe fn new(memory: Span<Pa>) -> Option<Self> {
        Some(Self {
            // SAFETY: passed on (1.).
            frames: unsafe { Frames::new(memory, PAGE) }?,
            epochs: Epochs::new(&WALKS),
            flush: Once::new(),
        })
    }

    /// From here on there are guests, whose nested translations this function flushes.
    pub fn flush_by(&self, flush: fn()) {
        self.flush.call_once(|| flush);
    }

    /// Takes frames for anything, in a row, zeroed.
    pub fn take_frames(&self, pages: u64) -> Option<Pa> {
        let size = pages.checked_mul(PAGE)?;
        let first = self.frames.take_row(size, PAGE)?;
        let words = ptr::with_exposed_provenance_mut::<u64>(first.get() as usize);
        // SAFETY: frames that never were in use.
        unsafe { words.write_bytes(0, (size / 8) as usize) };
        Some(first)
    }

    /// Takes room for `count` of these, zeroed, in frames of their own.
    ///
    /// # Safety
    /// 1. All zeroes is a `T`.
    pub unsafe fn take<T>(&self, count: u64) -> Option<&'static mut [T]> {
        let frames = self.take_frames((count * size_of::<T>() as u64).div_ceil(PAGE))?;
        let first = ptr::with_exposed_provenance_mut::<T>(frames.get() as usize);
        // SAFETY: frames of their own, zeroed (1.).
        Some(unsafe { core::slice::from_raw_parts_mut(first, count as usize) })
    }
}

// SAFETY: a frame is handed out once until it is freed (1.), lies where its address says (2.), and
// has a link of its own (3.). The compiler keeps stores in order (4.), an invalidation is complete
// when it was issued (5., 6.), and a reference is the machine (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let frame = self.frames.take()?;
        count(Count::Tables, 1);
        Some(frame)
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        count(Count::Tables, 1u64.wrapping_neg());
        // SAFETY: a frame of this machine's that is not in use any more (1.).
        unsafe { self.frames.give(frame) };
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
        if let Some(flush) = self.flush.get() {
            flush();
        }
    }

    fn caps(&self) -> Caps {
        CAPS
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.frames.link_of(frame)
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
    type Format = Nested;
    type Relax = spin::Spin;
    /// Words that are no instructions, and no address.
    const POISON: u64 = 0x0b0f_0b0f_0b0f_0b0f;

    fn counters() -> &'static [AtomicU64] {
        &COUNTERS
    }

    fn take_frame(&self) -> Option<Pa> {
        self.take_frames(1)
    }

    fn now() -> u64 {
        processor::now()
    }

    fn ticks_per_ms() -> u64 {
        Clock::get().counter_hz / 1000
    }

    /// The timer wakes it: the processor that does this runs no vCPU.
    fn rest(ticks: u64) {
        processor::set_timer(Clock::get().ticks(ticks));
        processor::sleep();
    }

    /// A processor that has passed is in its guest, or about to enter it.
    fn summon(cpu: usize) {
        processor::kick(cpu);
    }

    fn stood(ticks: u64) {
        clock::stood(ticks);
    }
}

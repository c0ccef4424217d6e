//! A hypervisor, as the shared parts see it.

use core::sync::atomic::{AtomicU64, Ordering};

use spin::RelaxStrategy;
use spin::mutex::SpinMutex;
use tablewright::shared::SharedPlatform;
use tablewright::{Format, Ipa, Pa, guest};

use crate::counters::Event;

/// Processors are numbered below this: eight for a guest, and one of the hypervisor's own.
pub const PROCESSORS: usize = 9;

/// Why the guest cannot be started.
pub type Reason = &'static str;

/// The machine that a hypervisor runs on.
///
/// # Safety
/// 1. All memory of the guest's and of the frames that it hands out is mapped one to one, writable.
/// 2. A frame that is handed out has no other owner.
pub unsafe trait Host: SharedPlatform + Sync + 'static {
    /// The format of the guest's tables.
    type Format: Format<Input = Ipa>;
    /// How it waits for other processors.
    type Relax: RelaxStrategy;
    /// The size of a page: of a leaf of the lowest level.
    const PAGE: u64 = 1 << <Self::Format as Format>::PAGE_SHIFT;
    /// The size that a table of pages maps.
    const BLOCK: u64 = Self::PAGE << <Self::Format as Format>::INDEX_BITS;
    /// The size that a table of blocks maps.
    const HUGE: u64 = Self::BLOCK << <Self::Format as Format>::INDEX_BITS;
    /// Whether hardware marks written leaves, and logs go by these marks.
    const MARKS: bool = false;
    /// The content of a frame that was taken away: executed it is noticed, and as an address it is
    /// nowhere.
    const POISON: u64;

    /// The counters, by the numbers of [`Event`] and of the hypervisor's own list.
    fn counters() -> &'static [AtomicU64];
    /// Takes a frame for anything.
    fn take_frame(&self) -> Option<Pa>;
    /// The time, in ticks.
    fn now() -> u64;
    /// Ticks in a millisecond.
    fn ticks_per_ms() -> u64;

    /// Adds to a counter.
    fn count(what: Event, by: u64) {
        Self::counters()[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    /// Reads a counter.
    fn counted(what: Event) -> u64 {
        Self::counters()[what as usize].load(Ordering::Relaxed)
    }

    /// Waits for `ticks`, or less: a processor that can sleep leaves the time to the guest.
    fn rest(ticks: u64) {
        let _ = ticks;
        relax::<Self>();
    }

    /// Runs a flush that only takes write permissions away. A planted bug leaves it out.
    fn forget_permissions(&self, flush: impl FnOnce()) {
        flush();
    }

    /// A processor passes the gate, and goes on with its guest.
    fn passed() {}

    /// Has this processor come to the gate, if nothing else does.
    fn summon(cpu: usize) {
        let _ = cpu;
    }

    /// The guest stood still for `ticks`.
    fn stood(ticks: u64) {
        let _ = ticks;
    }
}

/// A lock, whose holder waits for nothing.
pub type Mutex<T, H> = SpinMutex<T, <H as Host>::Relax>;

/// The engine's guest.
pub type Guest<H> = guest::Guest<'static, <H as Host>::Format, &'static H>;

/// The edits of one processor.
pub type Gather<H> = guest::Gather<'static, 'static, <H as Host>::Format, &'static H>;

/// Waits a little.
pub(crate) fn relax<H: Host + ?Sized>() {
    <H::Relax as RelaxStrategy>::relax();
}

//! What hypervisors on the engine share, whatever the architecture: which frames the guest's memory
//! is on and how they are taken away ([`memory`]), its faults ([`fault`]), logs and live snapshots
//! ([`snapshot`]), and what is counted ([`counters`](mod@counters)).
//!
//! The hypervisor itself, which knows processors, barriers and interrupts, is a [`Host`].
#![no_std]

pub mod counters;
pub mod fault;
pub mod memory;
pub mod pieces;
pub mod snapshot;

use spin::RelaxStrategy;
use spin::mutex::SpinMutex;
use tablewright::shared::SharedPlatform;
use tablewright::{Format, Ipa, Pa, guest};

pub use counters::Event;

/// Processors are numbered below this.
pub const PROCESSORS: usize = 9;

/// The machine that a hypervisor runs on, as the engine sees it, and a little more.
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
    /// What a table of pages maps.
    const BLOCK: u64 = Self::PAGE << <Self::Format as Format>::INDEX_BITS;
    /// What a table of blocks maps.
    const HUGE: u64 = Self::BLOCK << <Self::Format as Format>::INDEX_BITS;
    /// Whether hardware marks in the leaves what is written, and logs go by that.
    const MARKS: bool = false;
    /// What a frame holds that was taken away: executed it is seen, and as an address it is
    /// nowhere.
    const POISON: u64;

    /// Counts.
    fn count(what: Event, by: u64);
    /// How much was counted.
    fn counted(what: Event) -> u64;
    /// A frame for anything.
    fn take_frame(&self) -> Option<Pa>;
    /// Time, in ticks.
    fn now() -> u64;
    /// Ticks in a millisecond.
    fn ticks_per_ms() -> u64;

    /// Waits for so many ticks, or less: one that can sleep leaves the time to the guest.
    fn rest(ticks: u64) {
        let _ = ticks;
        relax::<Self>();
    }

    /// Runs what has processors forget that memory could be written, and nothing else: where a
    /// planted bug leaves that out.
    fn forget_permissions(&self, flush: impl FnOnce()) {
        flush();
    }

    /// Whether pages are copied before it is forgotten that they could be written: a planted bug.
    fn copies_first() -> bool {
        false
    }

    /// A processor passes the gate, and goes on with its guest.
    fn passed() {}
    /// Has this processor come to the gate, if nothing else does.
    fn summon(cpu: usize) {
        let _ = cpu;
    }
    /// The guest stood still for so many ticks.
    fn stood(ticks: u64) {
        let _ = ticks;
    }
}

/// A lock. What holds it waits for nothing.
pub type Mutex<T, H> = SpinMutex<T, <H as Host>::Relax>;

/// The guest, as the engine knows it.
pub type Guest<H> = guest::Guest<'static, <H as Host>::Format, &'static H>;

/// The edits of one processor.
pub type Gather<H> = guest::Gather<'static, 'static, <H as Host>::Format, &'static H>;

/// Waits a little.
fn relax<H: Host + ?Sized>() {
    <H::Relax as RelaxStrategy>::relax();
}

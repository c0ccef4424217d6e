//! Virtual CPUs that do not run: KVM's protocol. The guest sets a bit, and the host flushes before
//! the CPU runs: all of it, global translations and those of all identifiers included, whatever the
//! flush names.
//!
//! The byte `preempted` in the steal-time record of each virtual CPU is shared with the host. It
//! has two bits. The host sets the first when it takes the CPU off, between two instructions, and
//! reads and clears both at once before the CPU runs again. The guest sets the second, if the first
//! is set, by one compare-exchange. All three are atomic updates of one byte, which come one after
//! the other: either the host sees the request, or the guest sees that the CPU runs, and tells it
//! in another way.
//!
//! (Linux, `Documentation/virt/kvm/x86/msr.rst`, `MSR_KVM_STEAL_TIME`; `KVM_FEATURE_PV_TLB_FLUSH`.)

use super::Messenger;
use crate::cpus::Cpus;
use crate::invalidation::Invalidation;
use crate::sync::{AtomicU8, Ordering};

/// The byte `preempted` of a virtual CPU.
///
/// ```
/// use tablewright::shootdown::PreemptedFlag;
/// let flag = PreemptedFlag::default();
/// assert!(!flag.defer()); // it runs
/// flag.preempt();
/// assert!(flag.defer());
/// assert!(flag.enter()); // the host flushes before it runs
/// ```
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct PreemptedFlag(AtomicU8);

impl PreemptedFlag {
    /// The CPU does not run.
    const PREEMPTED: u8 = 1;
    /// It is to be flushed before it does.
    const FLUSH: u8 = 2;

    /// The guest's side: has the CPU flushed before it runs. False if it runs.
    pub fn defer(&self) -> bool {
        // Acquire: what the CPU has done before it was taken off. Release: the entries that were
        // changed.
        let flush = |flags: u8| (flags & Self::PREEMPTED != 0).then_some(flags | Self::FLUSH);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, flush).is_ok()
    }

    /// The host's side: the CPU is taken off, between two instructions. It may have been taken off
    /// before, and not have run: a flush that is pending stays so.
    pub fn preempt(&self) {
        self.0.fetch_or(Self::PREEMPTED, Ordering::Release);
    }

    /// The host's side: the CPU is about to run. Returns whether everything of the guest has to be
    /// flushed before.
    #[must_use = "the CPU has to be flushed before it runs"]
    pub fn enter(&self) -> bool {
        self.0.swap(0, Ordering::AcqRel) & Self::FLUSH != 0
    }
}

/// Flushes by a mark for virtual CPUs that do not run, which flush before they run again. Those
/// that run are left to the next messenger.
#[derive(Clone, Copy, Debug)]
pub struct Deferred<F> {
    flag: F,
}

impl<'f, F: Fn(usize) -> Option<&'f PreemptedFlag>> Deferred<F> {
    /// Makes the messenger; `flag` gives the byte of a CPU, if it has one.
    ///
    /// # Safety
    /// 1. The host of CPU `cpu` calls [`preempt`](PreemptedFlag::preempt) and
    ///    [`enter`](PreemptedFlag::enter), or does what they do, on `flag(cpu)`, and flushes what
    ///    `enter` asks for before the CPU runs.
    pub const unsafe fn new(flag: F) -> Self {
        Self { flag }
    }
}

// SAFETY: a CPU that is taken out has `FLUSH` set, and its host flushes it before it runs (1.).
unsafe impl<'f, F: Fn(usize) -> Option<&'f PreemptedFlag>> Messenger for Deferred<F> {
    fn tell(&self, _: &Invalidation<'_>, cpus: &mut Cpus) {
        let deferred = |cpu: usize| (self.flag)(cpu).is_some_and(PreemptedFlag::defer);
        cpus.retain(|cpu| !deferred(cpu));
    }
}

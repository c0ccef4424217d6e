//! One run of the experiment.

use clap::ValueEnum;
use serde::Serialize;
use tablewright_machine::{Profile, Time};

use super::writes::Writes;
use crate::runs;

/// A page of the guest.
pub const PAGE: u64 = 4096;
/// A large page of the host.
pub const BLOCK: u64 = 2 << 20;
/// Bytes of a page on the link: itself, and 8 that number it.
pub const ON_LINK: u64 = PAGE + 8;
/// Bytes of a page of zeros on the link.
pub const ZEROS_ON_LINK: u64 = 9;
/// Host address of the guest's memory.
pub const PHYSICAL: u64 = 1 << 41;
/// Guest time of one step.
pub const QUANTUM: Time = Time::us(20);
/// Pages that one step sends.
pub const BATCH: u64 = 64;
/// Pages that are protected by one flush, which bounds a step, and what the machine watches.
pub const FLUSH: u64 = 1024;
/// Time that QEMU sends before it asks whether the rest is small enough.
pub const SLICE: Time = Time::ms(50);
/// Pause between two looks at another CPU.
pub const PAUSE: Time = Time::ns(100);
/// The part of time after which a throttled vCPU sleeps, as in QEMU.
pub const TIMESLICE: Time = Time::ms(10);
/// QEMU's rates are of periods of at least so long.
pub const PERIOD: Time = Time::s(1);

/// How writes are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Logging {
    /// A bitmap; all pages are protected at the start, one by one, and again by chunks before they
    /// are sent
    Manual,
    /// A bitmap with everything marked at the start; pages are protected by chunks before they are
    /// sent
    AllSet,
    /// A bitmap; everything is protected in one step, at the start and in each round
    ProtectAll,
    /// A ring for each vCPU; all pages are protected at the start, one by one
    Ring,
    /// Manual, and large leaves are split at the start
    EagerSplit,
}

impl Logging {
    /// Those that are compared where none is asked for.
    pub const USUAL: [Self; 4] = [Self::Manual, Self::AllSet, Self::ProtectAll, Self::Ring];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::AllSet => "all-set",
            Self::ProtectAll => "protect-all",
            Self::Ring => "ring",
            Self::EagerSplit => "eager-split",
        }
    }

    /// Marks are taken, and pages protected, when a chunk is about to be sent.
    pub const fn harvests_by_chunk(self) -> bool {
        matches!(self, Self::Manual | Self::AllSet | Self::EagerSplit)
    }
}

/// The order in which the host does its part. All but the first lose writes.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Marks taken, protected, flushed, sent.
    Right,
    /// Sent before the flush is complete.
    SentEarly,
    /// Protected before marks are taken.
    ProtectedFirst,
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// How writes are logged.
    pub logging: Logging,
    /// Pages of the guest.
    pub pages: u64,
    /// Pages that hold something from the beginning; the others are zeros until they are written.
    pub used: u64,
    /// Pages, from the beginning, that are mapped before the log is started; the others by the
    /// first fault on each.
    pub mapped: u64,
    /// One lock is held by each fault that maps, and while pages are protected, as in kernels of
    /// 2017; a fault that only allows writing again takes none.
    pub one_lock: bool,
    /// Cost of a start besides protecting, and of a look at the log for each word of its bitmap.
    pub host: HostTimes,
    /// How many vCPUs.
    pub vcpus: u16,
    /// Memory is mapped in large leaves.
    pub large: bool,
    /// Bytes that the link carries in a second.
    pub bandwidth: u64,
    /// And the most that the host sends while the guest runs, as QEMU's `max-bandwidth`: it does
    /// not hold for what is sent while the guest is stopped.
    pub max_bandwidth: u64,
    /// The longest that the guest may be stopped.
    pub downtime_limit: Time,
    /// When the guest is stopped whatever is left.
    pub timeout: Time,
    /// Time of sending between two looks at whether the rest is small enough.
    pub slice: Time,
    /// Rates are of periods of at least so long.
    pub period: Time,
    /// Pages that are protected together.
    pub chunk: u64,
    /// Entries of a ring.
    pub ring: usize,
    pub writes: Writes,
    /// How long it is busy with a page that it writes.
    pub work: Time,
    /// Cost of finding that a page that was never written is all zeros.
    pub zeros: Time,
    /// Slow it down if it writes more than is sent.
    pub auto_converge: bool,
    /// The order of the host's work.
    #[cfg(test)]
    pub order: Order,
}

/// Costs of the program that migrates, and of the kernel for memory of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTimes {
    /// Of a start.
    pub start: Time,
    /// Of a look at the log, for each 64 pages; the cost of a load, if nothing is said.
    pub word: Option<Time>,
}

/// One round: from one look at the log to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// When it began, after the start.
    pub at: Time,
    /// Pages newly found to be dirty when it began.
    pub dirty: u64,
    /// Pages that were to be sent then.
    pub remaining: u64,
    /// How much the guest was slowed down in it, in percent.
    pub throttle: u64,
}

/// Figures of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// Of all.
    pub total: Time,
    /// While the guest was stopped.
    pub downtime: Time,
    /// Estimate before the guest was stopped.
    pub expected_downtime: Time,
    /// Until writes were logged.
    pub setup: Time,
    /// Bytes on the link.
    pub transferred: u64,
    /// Pages sent, besides those of zeros.
    pub normal: u64,
    /// Pages of zeros sent.
    pub duplicate: u64,
    /// Pages not sent.
    pub remaining: u64,
    /// Pages that became dirty in a second, over the last period.
    pub dirty_rate: f64,
    /// Looks at the log.
    pub syncs: u64,
    /// How much the guest was slowed down at last, in percent.
    pub throttle: u64,
    /// It was stopped because the rest was small enough, and not because time was up.
    pub converged: bool,
    /// The rounds while the guest ran.
    pub rounds: Vec<Round>,
    /// Writes of pages by the guest.
    pub writes: u64,
    /// The time for which it ran.
    pub running: Time,
    /// Faults of the guest.
    pub faults: u64,
    /// The longest time from a write that faulted until it was done.
    pub stall_longest: Time,
    /// The sum of all such times.
    pub stall_total: Time,
    /// Times that a ring was full.
    pub full: u64,
    /// Invalidations issued.
    pub invalidations: u64,
    /// Waits for their completion.
    pub waits: u64,
    /// Interrupts that had a vCPU leave the guest.
    pub kicks: u64,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

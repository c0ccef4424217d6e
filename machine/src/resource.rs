//! Things that serve one CPU at a time: one that comes while they are busy waits its turn, in
//! virtual time.
//!
//! A bus, a port, the right to write a cache line: all of them are a time at which they are free
//! again. A CPU that comes in order reserves the next stretch of time and moves that time on; since
//! all come in order, one time is the whole queue, and no CPU has to be parked.
//!
//! What is behind a resource may be touched as soon as the reservation is made, although it is
//! served later: every access to it is made through the resource, so accesses follow each other in
//! the order of their service.

use std::cell::Cell;

use crate::sched::Cpu;
use crate::time::Time;

/// How much a resource, a line or a lock was used, and waited for.
///
/// ```
/// use tablewright_machine::{Config, Resource, Scheduler, Time, Usage};
/// let bus = Resource::new();
/// Scheduler::new(Config::new(3)).run(|cpu| {
///     bus.acquire(cpu, Time::ns(7));
/// })?;
/// let (waited, longest) = (Time::ns(7 + 14), Time::ns(14));
/// assert_eq!(bus.usage(), Usage { uses: 3, waits: 2, waited, longest });
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// How often it was used.
    pub uses: u64,
    /// How often a user had to wait.
    pub waits: u64,
    /// How long they waited in total.
    pub waited: Time,
    /// The longest wait.
    pub longest: Time,
}

/// [`Usage`], counted.
#[derive(Debug, Default)]
pub(crate) struct Counter(Cell<Usage>);

impl Counter {
    #[inline(always)]
    pub fn count(&self, waited: Time) {
        let mut usage = self.0.get();
        usage.uses += 1;
        if waited > Time::ZERO {
            usage.waits += 1;
            usage.waited += waited;
            usage.longest = usage.longest.max(waited);
        }
        self.0.set(usage);
    }

    pub fn get(&self) -> Usage {
        self.0.get()
    }
}

/// Something that serves one CPU after the other, in the order in which they come.
///
/// ```
/// use tablewright_machine::{Config, Resource, Scheduler, Time};
///
/// // Three CPUs clean a page each, through one port that takes half a microsecond for it.
/// let port = Resource::new();
/// let outcome = Scheduler::new(Config::new(3)).run(|cpu| {
///     let waited = port.acquire(cpu, Time::ns(500));
///     assert_eq!(waited, Time::ns(500) * cpu.id() as u64);
/// })?;
/// assert_eq!(outcome.end, Time::ns(1_500));
/// assert_eq!(port.usage().waits, 2);
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Debug, Default)]
pub struct Resource {
    free: Cell<Time>,
    counter: Counter,
}

impl Resource {
    /// A resource that is free.
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses it for so long, after those that came before. Returns how long the CPU waited for them.
    /// An ordered access.
    #[inline(always)]
    pub fn acquire(&self, cpu: Cpu<'_>, service: Time) -> Time {
        cpu.order();
        let waited = self.free.get().saturating_sub(cpu.now());
        self.serve(cpu, waited, service);
        cpu.wait_until(self.free.get());
        waited
    }

    /// Reserves the resource like [`acquire`](Resource::acquire), but the CPU goes on and does not
    /// wait. Returns when the service will be complete, for [`Cpu::wait_until`].
    ///
    /// ```
    /// use tablewright_machine::{Config, Resource, Scheduler, Time};
    /// // Four invalidations are issued one after the other, and waited for together.
    /// let bus = Resource::new();
    /// let outcome = Scheduler::new(Config::new(1)).run(|cpu| {
    ///     let mut complete = Time::ZERO;
    ///     for _ in 0..4 {
    ///         complete = bus.reserve(cpu, Time::ns(100));
    ///         cpu.spend(Time::ns(2));
    ///     }
    ///     assert_eq!(cpu.now(), Time::ns(8));
    ///     cpu.wait_until(complete);
    /// })?;
    /// assert_eq!(outcome.end, Time::ns(400));
    /// # Ok::<(), tablewright_machine::RunError>(())
    /// ```
    #[inline(always)]
    pub fn reserve(&self, cpu: Cpu<'_>, service: Time) -> Time {
        cpu.order();
        let waits = self.free.get().saturating_sub(cpu.now());
        self.serve(cpu, waits, service);
        self.free.get()
    }

    #[inline(always)]
    fn serve(&self, cpu: Cpu<'_>, waits: Time, service: Time) {
        self.counter.count(waits);
        self.free.set(cpu.now() + waits + service);
    }

    /// How much it was used. What is reserved counts as waited for.
    pub fn usage(&self) -> Usage {
        self.counter.get()
    }
}

/// Costs of writing a cache line.
///
/// ```
/// use tablewright_machine::{Line, LineCosts, Time};
/// let line = Line::new(LineCosts { owned: Time::ps(1_300), transfer: Time::ns(60) });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCosts {
    /// When the CPU wrote it last.
    pub owned: Time,
    /// When another CPU did, and it has to be fetched from there.
    pub transfer: Time,
}

/// A cache line that CPUs take from each other: cheap for the one that had it last.
///
/// Every access takes it whole, as a write does. A line that many only read is in all their caches
/// at once and is not one of these.
///
/// ```
/// use tablewright_machine::{Config, Line, LineCosts, Scheduler, Time};
/// let costs = LineCosts { owned: Time::ns(1), transfer: Time::ns(60) };
/// let line = Line::new(costs);
/// Scheduler::new(Config::new(2)).run(|cpu| {
///     line.access(cpu); // both fetch it, the second from the first
///     cpu.spend(Time::us(1));
///     line.access(cpu); // CPU 1 had it last: only CPU 0 fetches it again, and CPU 1 after it
/// })?;
/// assert_eq!(line.transfers(), 4);
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Debug)]
pub struct Line {
    owner: Cell<u16>,
    transfers: Cell<u64>,
    costs: LineCosts,
    resource: Resource,
}

/// Owner of a line that no CPU has, or of a lock.
pub(crate) const NO_CPU: u16 = u16::MAX;

impl Line {
    /// A line in no cache.
    pub fn new(costs: LineCosts) -> Self {
        Self { owner: Cell::new(NO_CPU), transfers: Cell::new(0), costs, resource: Resource::new() }
    }

    /// Writes to the line. Returns how long the CPU waited for others that were at it. An ordered
    /// access; what the line holds is touched directly after it.
    #[inline(always)]
    pub fn access(&self, cpu: Cpu<'_>) -> Time {
        cpu.order();
        let id = cpu.id() as u16;
        let cost = if self.owner.replace(id) == id {
            self.costs.owned
        } else {
            self.transfers.update(|transfers| transfers + 1);
            self.costs.transfer
        };
        let waited = self.resource.free.get().saturating_sub(cpu.now());
        self.resource.serve(cpu, waited, cost);
        cpu.wait_until(self.resource.free.get());
        waited
    }

    /// How often it moved to another CPU.
    pub fn transfers(&self) -> u64 {
        self.transfers.get()
    }

    /// How much it was used.
    pub fn usage(&self) -> Usage {
        self.resource.usage()
    }
}

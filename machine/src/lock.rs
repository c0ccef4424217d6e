//! A lock that is handed over in the order in which CPUs asked for it.
//!
//! The holder does not set the lock free while a CPU waits: it makes the first of the queue the
//! owner, which goes on after the cost of the hand-over. That cost, the line of the lock travelling
//! to the next CPU, is what a contended lock is made of. CPUs wait parked, in a queue that runs
//! through the scheduler's record of each of them: a CPU is in one queue at most, so no queue needs
//! memory.

use std::cell::Cell;

use crate::resource::{Counter, NO_CPU, Usage};
use crate::sched::Cpu;
use crate::time::Time;

/// The costs of a [`Lock`].
///
/// ```
/// use tablewright_machine::{Lock, LockCosts, Time};
/// let lock = Lock::new(LockCosts { take: Time::ns(20), hand_over: Time::ns(120) });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockCosts {
    /// To take it when it is free.
    pub take: Time,
    /// From the release until the next in the queue goes on.
    pub hand_over: Time,
}

/// A fair lock in virtual time.
///
/// A lock belongs to one run: one that was held when its run was stopped stays held.
///
/// ```
/// use tablewright_machine::{Config, Lock, LockCosts, Scheduler, Time};
/// let lock = Lock::new(LockCosts { take: Time::ns(10), hand_over: Time::ns(100) });
/// let outcome = Scheduler::new(Config::new(3)).run(|cpu| {
///     let held = lock.acquire(cpu);
///     cpu.spend(Time::us(1));
///     drop(held);
/// })?;
/// assert_eq!(outcome.clocks, [Time::ns(1_010), Time::ns(2_110), Time::ns(3_210)]);
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Debug)]
pub struct Lock {
    owner: Cell<u16>,
    /// The queue, empty if `head` is [`NO_CPU`].
    head: Cell<u16>,
    tail: Cell<u16>,
    /// When the owner has it, once it was handed over.
    granted: Cell<Time>,
    costs: LockCosts,
    counter: Counter,
}

impl Lock {
    /// A lock that is free.
    pub fn new(costs: LockCosts) -> Self {
        Self {
            owner: Cell::new(NO_CPU),
            head: Cell::new(NO_CPU),
            tail: Cell::new(NO_CPU),
            granted: Cell::new(Time::ZERO),
            costs,
            counter: Counter::default(),
        }
    }

    /// Takes the lock, after those that asked before. An ordered access.
    ///
    /// # Panics
    /// If this CPU has it already.
    pub fn acquire<'l>(&'l self, cpu: Cpu<'l>) -> Held<'l> {
        cpu.order();
        let id = cpu.id() as u16;
        let asked = cpu.now();
        assert!(self.owner.get() != id, "CPU {id} asks for a lock that it holds");
        if self.owner.get() == NO_CPU {
            self.owner.set(id);
            self.counter.count(Time::ZERO);
            cpu.wait_until(asked + self.costs.take);
        } else {
            if self.head.get() == NO_CPU {
                self.head.set(id);
            } else {
                cpu.link(usize::from(self.tail.get())).set(id);
            }
            self.tail.set(id);
            // An interrupt may wake a CPU that waits here. It keeps its place.
            while self.owner.get() != id {
                cpu.park();
            }
            let granted = self.granted.get().max(cpu.now());
            self.counter.count(granted - asked);
            cpu.wait_until(granted);
        }
        Held { lock: self, cpu }
    }

    fn release(&self, cpu: Cpu<'_>) {
        cpu.order();
        let next = self.head.get();
        self.owner.set(next);
        if next == NO_CPU {
            return;
        }
        let last = next == self.tail.get();
        self.head.set(if last { NO_CPU } else { cpu.link(usize::from(next)).get() });
        let granted = cpu.now() + self.costs.hand_over;
        self.granted.set(granted);
        cpu.wake(usize::from(next), granted);
    }

    /// How often it was taken and waited for. The cost of a hand-over is part of the wait.
    pub fn usage(&self) -> Usage {
        self.counter.get()
    }
}

/// A lock that is held, until this is dropped: an ordered access.
///
/// ```
/// use tablewright_machine::{Config, Lock, LockCosts, Scheduler};
/// let lock = Lock::new(LockCosts::default());
/// Scheduler::new(Config::new(2)).run(|cpu| {
///     let held = lock.acquire(cpu);
///     // what the lock protects
///     drop(held);
/// })?;
/// assert_eq!(lock.usage().uses, 2);
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct Held<'l> {
    lock: &'l Lock,
    cpu: Cpu<'l>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.lock.release(self.cpu);
    }
}

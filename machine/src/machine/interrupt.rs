//! Interrupts from one CPU to another. A program that does not ask whether one has come has them
//! masked.
//!
//! Sending one costs [`Costs::interrupt`](crate::Costs::interrupt), and it is there when that has
//! passed. Taking one costs an exception ([`Costs::exception`](crate::Costs::exception)). Of
//! several that have come before one is taken, one is taken.

use std::cell::Cell;

use super::Machine;
use crate::time::Time;

/// For each CPU, when the first came that it has not taken.
pub(crate) struct Interrupts(Box<[Cell<Option<Time>>]>);

impl Interrupts {
    pub fn new(cpus: usize) -> Self {
        Self((0..cpus).map(|_| Cell::new(None)).collect())
    }
}

impl Machine {
    /// The running CPU interrupts another, which it [wakes](crate::Cpu::wake) if that is parked.
    ///
    /// ```
    /// use tablewright_machine::{Architecture, Machine, Memory, Setup, Time};
    /// let mut setup = Setup::new(Architecture::x86_64(4), Memory::new(4, 12, 0));
    /// setup.scheduler.cpus = 2;
    /// setup.costs.interrupt = Time::ns(500);
    /// let machine = Machine::new(setup);
    /// let outcome = machine.run(|cpu| {
    ///     if cpu.id() == 0 {
    ///         machine.interrupt(1);
    ///     } else {
    ///         cpu.park();
    ///         assert!(machine.take_interrupt() && !machine.take_interrupt());
    ///     }
    /// })?;
    /// assert_eq!(outcome.end, Time::ns(500));
    /// # Ok::<(), tablewright_machine::RunError>(())
    /// ```
    pub fn interrupt(&self, other: usize) {
        let cpu = self.cpu();
        cpu.spend(self.costs().interrupt);
        cpu.order();
        let pending = &self.interrupts.0[other];
        pending.set(pending.get().or(Some(cpu.now())));
        cpu.wake(other, cpu.now());
    }

    /// Takes an interrupt, if one has come.
    pub fn take_interrupt(&self) -> bool {
        let cpu = self.cpu();
        cpu.order();
        let pending = &self.interrupts.0[cpu.id()];
        let come = pending.get().is_some_and(|at| at <= cpu.now());
        if come {
            pending.set(None);
            cpu.spend(self.costs().exception);
        }
        come
    }
}

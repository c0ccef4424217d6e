//! Kicks: how a vCPU is had to forget, where no hardware tells it to.
//!
//! On x86 a processor invalidates for itself alone. What a hypervisor has changed in its tables is
//! forgotten when every vCPU has left the guest and has invalidated before it enters again. Whether
//! it is in the guest, and whether it has been asked to forget, are two words, each written by one
//! side and read by the other:
//!
//! | the CPU that asks | the vCPU |
//! |---|---|
//! | writes the request | says that it is in the guest |
//! | full barrier | full barrier |
//! | in the guest? interrupts it, waits until it is outside | a request? leaves, forgets, enters |
//!
//! With both barriers at least one sees the other, so no vCPU is in the guest with an old
//! translation when the wait is over, and one that is outside is not waited for. It may be stopped
//! for any time: it forgets before it enters.
//!
//! Interrupts are sent one after the other, [`Costs::interrupt`](crate::Costs::interrupt) each. One
//! is taken between two instructions of the guest, and costs the vCPU an exit and an entry
//! ([`Costs::exit`](crate::Costs::exit)) and the invalidation. A vCPU that is outside costs the one
//! who asks two atomic operations, one for the request and one that finds it outside
//! ([`Costs::exchange`](crate::Costs::exchange)); the price of an interrupt has them in it.
//!
//! An obligation of the [rules](crate::Rule) is discharged when every CPU that has loaded the root
//! has forgotten, outside of the guest or not. That is later than the wait ends: a program that
//! gives frames back after a kick has a vCPU that stays outside reported.

use std::cell::{Cell, RefCell};

use super::Machine;
use crate::hardware::{Fault, Request};
use crate::sched::is_cut_short;
use crate::time::Time;
use crate::tlb::Tlbi;

/// One for each CPU.
#[derive(Default)]
struct Vcpu {
    inside: Cell<bool>,
    /// How many times it was asked to forget, and how many of these it has done.
    asked: Cell<u64>,
    done: Cell<u64>,
    /// An interrupt that it has not taken, and when it was delivered.
    interrupt: Cell<Option<Time>>,
    /// Whether it has, as a CPU of the host, an invalidation to be made by all that it has not
    /// waited for.
    noted: Cell<bool>,
}

impl Vcpu {
    /// Whether a CPU that has made the `number`th request has to wait for it.
    fn is_behind(&self, number: u64) -> bool {
        self.inside.get() && self.done.get() < number
    }
}

pub(crate) struct Kicks {
    pub on: bool,
    vcpus: Box<[Vcpu]>,
    /// CPUs that wait for others to be outside.
    waiting: RefCell<Vec<usize>>,
    pub sent: Cell<u64>,
    pub flushes: Cell<u64>,
}

impl Kicks {
    pub fn new(on: bool, cpus: usize) -> Self {
        Self {
            on,
            vcpus: (0..cpus).map(|_| Vcpu::default()).collect(),
            waiting: RefCell::default(),
            sent: Cell::new(0),
            flushes: Cell::new(0),
        }
    }

    /// This CPU has changed something that all have to forget.
    pub fn note(&self, cpu: usize) {
        self.vcpus[cpu].noted.set(true);
    }
}

impl Machine {
    /// The running CPU, as a vCPU, enters its guest. What it was asked to forget while it was
    /// outside, it forgets first.
    ///
    /// ```
    /// use tablewright::{AddressSpace, Half, format::Ept};
    /// use tablewright_machine::{Architecture, Machine, Memory, Request, Setup};
    /// let mut setup = Setup::new(Architecture::ept(), Memory::new(8, 12, 1 << 30));
    /// setup.kicks = true;
    /// let machine = Machine::new(setup);
    /// let mapper = machine.new_space();
    /// let space = AddressSpace::<Ept<4>, _>::new(mapper).unwrap();
    /// mapper.attach(space.root(), Half::Lower, 0);
    /// machine.run(|_| {
    ///     mapper.load();
    ///     machine.enter_guest();
    ///     assert!(machine.guest_access(Request::read(0x1000)).is_err()); // and is outside again
    /// })?;
    /// # Ok::<(), tablewright_machine::RunError>(())
    /// ```
    pub fn enter_guest(&self) {
        self.enter_guest_with(&|| ());
    }

    /// Enters the guest, with its own requests. Before it forgets, it does what its hypervisor has
    /// requested with that: loads another root, say.
    fn enter_guest_with(&self, requested: &dyn Fn()) {
        let cpu = self.cpu();
        let me = &self.kicks.vcpus[cpu.id()];
        loop {
            cpu.order();
            me.inside.set(true);
            self.full_barrier();
            let asked = me.asked.get();
            if asked == me.done.get() {
                return;
            }
            self.leave_guest();
            requested();
            self.tlbi(Tlbi { broadcast: false, ..Tlbi::ALL });
            self.dsb();
            self.kicks.flushes.update(|flushes| flushes + 1);
            me.done.set(asked);
        }
    }

    /// Makes what this CPU has stored visible before it reads on.
    fn full_barrier(&self) {
        let cpu = self.cpu();
        cpu.spend(self.costs().publish);
        cpu.order();
        self.hardware.drain(cpu.id());
    }

    /// The running CPU leaves its guest.
    pub fn leave_guest(&self) {
        let cpu = self.cpu();
        cpu.order();
        let me = &self.kicks.vcpus[cpu.id()];
        me.inside.set(false);
        // Outside, the interrupt finds nothing to do.
        me.interrupt.set(None);
        let waiting = self.kicks.waiting.take();
        for other in waiting {
            cpu.wake(other, cpu.now());
        }
    }

    /// Between two instructions of the guest: takes an interrupt that has come, and enters if it is
    /// outside.
    fn go_on_in_guest(&self, requested: &dyn Fn()) {
        let cpu = self.cpu();
        cpu.order();
        let me = &self.kicks.vcpus[cpu.id()];
        let come = |at: Time| at <= cpu.now();
        if me.inside.get() && me.interrupt.get().is_some_and(come) {
            cpu.spend(self.costs().exit);
            self.leave_guest();
            cpu.spend(self.costs().exit);
        }
        if !me.inside.get() {
            self.enter_guest_with(requested);
        }
    }

    /// An access of the guest: after the interrupts that have come, and in the guest, which is
    /// entered for it. A fault leaves it.
    ///
    /// # Errors
    /// As [`access`](Machine::access).
    #[track_caller]
    pub fn guest_access(&self, request: Request) -> Result<u64, Fault> {
        self.guest_access_with(request, &|| ())
    }

    /// Accesses memory as a vCPU whose hypervisor, with what it asks it to forget, requests
    /// something more of it: that is done outside of the guest, before it forgets.
    ///
    /// # Errors
    /// As [`access`](Machine::access).
    #[track_caller]
    pub fn guest_access_with(&self, request: Request, requested: &dyn Fn()) -> Result<u64, Fault> {
        self.go_on_in_guest(requested);
        let result = self.access(request);
        if result.is_err() {
            self.leave_guest();
        }
        result
    }

    /// The guest computes, in registers, until this CPU is [woken](crate::Cpu::wake) or kicked.
    pub fn guest_computes(&self) {
        self.guest_computes_with(&|| ());
    }

    /// Computes in the guest, with what is [requested](Machine::guest_access_with) of it.
    pub fn guest_computes_with(&self, requested: &dyn Fn()) {
        self.go_on_in_guest(requested);
        let cpu = self.cpu();
        cpu.order();
        if self.kicks.vcpus[cpu.id()].interrupt.get().is_none() {
            cpu.park();
        }
        self.go_on_in_guest(requested);
    }

    /// If this CPU has something to be forgotten by all: asks all vCPUs, kicks those that are in
    /// the guest, and waits until they have left it.
    pub(crate) fn kick_if_noted(&self) {
        let cpu = self.cpu();
        let kicks = &self.kicks;
        if !kicks.vcpus[cpu.id()].noted.take() || is_cut_short() {
            return;
        }
        cpu.order();
        let asked: Vec<u64> = kicks
            .vcpus
            .iter()
            .map(|vcpu| {
                vcpu.asked.update(|asked| asked + 1);
                vcpu.asked.get()
            })
            .collect();
        self.full_barrier();
        let vcpus = || kicks.vcpus.iter().zip(&asked).enumerate();
        for (id, (vcpu, &number)) in vcpus() {
            cpu.order();
            if id == cpu.id() {
                continue;
            }
            if !vcpu.is_behind(number) {
                cpu.spend(self.costs().exchange * 2);
                continue;
            }
            cpu.spend(self.costs().interrupt);
            cpu.order();
            kicks.sent.update(|sent| sent + 1);
            if vcpu.inside.get() {
                vcpu.interrupt.set(Some(cpu.now()));
                cpu.wake(id, cpu.now());
            }
        }
        loop {
            cpu.order();
            let behind = |(id, (vcpu, number)): (usize, (&Vcpu, &u64))| {
                id != cpu.id() && vcpu.is_behind(*number)
            };
            if !vcpus().any(behind) {
                return;
            }
            kicks.waiting.borrow_mut().push(cpu.id());
            cpu.park();
        }
    }
}

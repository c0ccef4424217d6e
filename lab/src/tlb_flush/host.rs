//! vCPUs on physical CPUs, of which there may be fewer: which run, which wait for their turn, which have nothing to do.
//!
//! A physical CPU takes the vCPU that has waited longest, for a time slice, and for longer if none waits. A vCPU without work
//! is *halted* and takes no time. What runs on a vCPU is a thread of the guest, or its idle loop, each a CPU of the scheduler of
//! the [software machine](tablewright_machine::Scheduler), so that everything is in one order and in virtual time.
//!
//! An **interrupt** is handled when its target runs: at once if it does, after its wake-up if it is halted and a physical CPU is
//! free, and otherwise when its turn has come. That may be many time slices later, and a vCPU that waits for the answer does
//! so on a physical CPU.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use tablewright_machine::{Costs, Cpu, Time};

/// Where a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has nothing to do.
    Halted,
    /// It would run if a physical CPU were free: as seen by the others, it was preempted.
    Waiting,
    /// On a physical CPU.
    Running,
}

/// What has to be done before a vCPU goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interrupt {
    /// This thread waits for the answer.
    Asked(usize),
    /// The hypervisor has invalidated, and the guest does not know.
    Stolen,
}

struct Vcpu {
    state: Cell<State>,
    /// The thread, or idle loop, that runs on it.
    runner: Cell<usize>,
    /// Threads of the guest that could run on it as well.
    ready: RefCell<VecDeque<usize>>,
    /// Its slice.
    from: Cell<Time>,
    until: Cell<Time>,
    pending: RefCell<Vec<Interrupt>>,
    /// It forgets before it enters its guest.
    forgets: Cell<bool>,
    /// It may remember what the space says.
    holds: Cell<bool>,
    /// The last flush that it has had its part in.
    forgot: Cell<u64>,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Time on physical CPUs.
    pub cpu_time: Time,
    /// Interrupts that had a vCPU forget.
    pub interrupts: u64,
    /// Halted vCPUs that such an interrupt had start.
    pub wake_ups: u64,
    /// vCPUs that were told to forget on their next entry.
    pub later: u64,
    pub hypercalls: u64,
    pub list_bytes: u64,
    /// Invalidations that hardware broadcasts.
    pub broadcasts: u64,
    /// Waits for answers, in all, and the longest.
    pub waiting: Time,
    pub longest: Time,
}

/// The physical CPUs, and the vCPUs on them.
pub struct Host<'c> {
    pub costs: &'c Costs,
    slice: Time,
    free: Cell<usize>,
    queue: RefCell<VecDeque<usize>>,
    vcpus: Box<[Vcpu]>,
    /// The answers that each thread still waits for.
    asked: Box<[Cell<usize>]>,
    /// Flushes of the space, of which there is one at a time.
    flushes: Cell<u64>,
    pub tally: Cell<Tally>,
}

impl<'c> Host<'c> {
    /// With so many threads in the guest, whose numbers are the first; the idle loops follow.
    pub fn new(
        costs: &'c Costs,
        slice: Time,
        physical: usize,
        vcpus: usize,
        threads: usize,
    ) -> Self {
        let vcpu = |number| Vcpu {
            state: Cell::new(State::Halted),
            runner: Cell::new(threads + number),
            ready: RefCell::default(),
            from: Cell::default(),
            until: Cell::default(),
            pending: RefCell::default(),
            forgets: Cell::new(false),
            holds: Cell::new(false),
            forgot: Cell::new(0),
        };
        Self {
            costs,
            slice,
            free: Cell::new(physical),
            queue: RefCell::default(),
            vcpus: (0..vcpus).map(vcpu).collect(),
            asked: (0..threads).map(|_| Cell::new(0)).collect(),
            flushes: Cell::new(0),
            tally: Cell::default(),
        }
    }

    /// The vCPU of a thread, which stays on it, or of an idle loop.
    fn vcpu_of(&self, runner: usize) -> usize {
        match runner.checked_sub(self.asked.len()) {
            Some(idle) => idle,
            None => runner % self.vcpus.len(),
        }
    }

    fn idle_of(&self, vcpu: usize) -> usize {
        self.asked.len() + vcpu
    }

    pub fn count(&self, change: impl FnOnce(&mut Tally)) {
        let mut tally = self.tally.get();
        change(&mut tally);
        self.tally.set(tally);
    }

    fn count_wait(&self, waited: Time) {
        self.count(|tally| {
            tally.waiting += waited;
            tally.longest = tally.longest.max(waited);
        });
    }

    // ---- Physical CPUs ----

    /// A vCPU that has something to do: gets a physical CPU, now or later.
    fn start(&self, cpu: Cpu<'_>, vcpu: usize, at: Time) {
        let this = &self.vcpus[vcpu];
        match self.free.get() {
            0 => {
                this.state.set(State::Waiting);
                self.queue.borrow_mut().push_back(vcpu);
            }
            free => {
                self.free.set(free - 1);
                self.enter(cpu, vcpu, at);
            }
        }
    }

    fn enter(&self, cpu: Cpu<'_>, vcpu: usize, at: Time) {
        let this = &self.vcpus[vcpu];
        this.state.set(State::Running);
        this.from.set(at);
        this.until.set(at + self.slice);
        if this.runner.get() != cpu.id() {
            cpu.wake(this.runner.get(), at);
        }
    }

    /// Leaves its physical CPU to the next.
    fn stop(&self, cpu: Cpu<'_>, vcpu: usize, next_state: State) {
        self.vcpus[vcpu].state.set(next_state);
        let next = self.queue.borrow_mut().pop_front();
        if next_state == State::Waiting {
            self.queue.borrow_mut().push_back(vcpu);
        }
        match next {
            Some(next) => self.enter(cpu, next, cpu.now() + self.costs.exit * 2),
            None => self.free.set(self.free.get() + 1),
        }
    }

    /// Goes on when the vCPU is on a physical CPU, and has done what it was asked to. How long that takes.
    fn be_on(&self, cpu: Cpu<'_>, vcpu: usize) -> Time {
        let this = &self.vcpus[vcpu];
        cpu.order();
        while this.state.get() != State::Running || this.runner.get() != cpu.id() {
            if this.state.get() == State::Halted && this.runner.get() == cpu.id() {
                self.start(cpu, vcpu, cpu.now());
                continue;
            }
            cpu.park();
            cpu.order();
        }
        // An interrupt may have come before the vCPU did.
        cpu.wait_until(this.from.get());
        cpu.order();
        let mut takes = Time::ZERO;
        if this.forgets.take() {
            this.forgot.set(self.flushes.get());
            takes += self.costs.complete;
        }
        for interrupt in this.pending.take() {
            match interrupt {
                Interrupt::Asked(thread) => {
                    takes += self.costs.exception + self.costs.complete;
                    this.forgot.set(self.flushes.get());
                    // The idle loop leaves the space, and is not asked again.
                    if cpu.id() == self.idle_of(vcpu) {
                        this.holds.set(false);
                    }
                    let left = self.asked[thread].get() - 1;
                    self.asked[thread].set(left);
                    if left == 0 {
                        cpu.wake(thread, cpu.now() + takes);
                    }
                }
                Interrupt::Stolen => takes += self.costs.exit * 2,
            }
        }
        takes
    }

    /// On a physical CPU until the time has come or an interrupt comes; gives it away at the end of the slice. How long it ran.
    fn run(&self, cpu: Cpu<'_>, vcpu: usize, most: Time) -> Time {
        let this = &self.vcpus[vcpu];
        // An interrupt that comes now finds none to wake.
        cpu.order();
        if !this.pending.borrow().is_empty() {
            return Time::ZERO;
        }
        let began = cpu.now();
        let end = this.until.get().max(began);
        cpu.park_until((began + most).min(end));
        cpu.order();
        let ran = cpu.now() - began;
        self.count(|tally| tally.cpu_time += ran);
        if cpu.now() >= end {
            let alone = self.queue.borrow().is_empty();
            match alone {
                true => this.until.set(cpu.now() + self.slice),
                false => self.stop(cpu, vcpu, State::Waiting),
            }
        }
        ran
    }

    // ---- What threads do ----

    /// A thread comes into being.
    pub fn begin(&self, cpu: Cpu<'_>) {
        cpu.order();
        let vcpu = self.vcpu_of(cpu.id());
        let this = &self.vcpus[vcpu];
        match this.runner.get() == self.idle_of(vcpu) {
            true => this.runner.set(cpu.id()),
            false => this.ready.borrow_mut().push_back(cpu.id()),
        }
    }

    /// So much work.
    pub fn work(&self, cpu: Cpu<'_>, work: Time) {
        let vcpu = self.vcpu_of(cpu.id());
        let mut left = work;
        loop {
            left += self.be_on(cpu, vcpu);
            if left == Time::ZERO {
                return;
            }
            left = left.saturating_sub(self.run(cpu, vcpu, left));
        }
    }

    /// Nothing more to do until [`wake`](Self::wake), and the vCPU is for others.
    pub fn sleep(&self, cpu: Cpu<'_>, asleep: &Cell<bool>) {
        let vcpu = self.vcpu_of(cpu.id());
        self.give_up(cpu, vcpu);
        while asleep.get() {
            cpu.park();
            cpu.order();
        }
    }

    /// The next thread on this vCPU, or none.
    fn give_up(&self, cpu: Cpu<'_>, vcpu: usize) {
        cpu.order();
        let this = &self.vcpus[vcpu];
        let next = this.ready.borrow_mut().pop_front();
        this.runner.set(next.unwrap_or(self.idle_of(vcpu)));
        match next {
            Some(next) => {
                cpu.wake(next, cpu.now());
            }
            // A thread that has asked something meanwhile wants an answer.
            None if this.pending.borrow().is_empty() => self.stop(cpu, vcpu, State::Halted),
            None => {
                cpu.wake(this.runner.get(), cpu.now());
            }
        }
    }

    /// A thread has something to do again. What that costs the caller is for it to spend.
    pub fn wake(&self, cpu: Cpu<'_>, thread: usize) -> Time {
        cpu.order();
        let vcpu = self.vcpu_of(thread);
        let this = &self.vcpus[vcpu];
        if this.runner.get() != self.idle_of(vcpu) {
            this.ready.borrow_mut().push_back(thread);
            return Time::ZERO;
        }
        if this.state.get() == State::Halted {
            this.runner.set(thread);
            self.start(
                cpu,
                vcpu,
                cpu.now() + self.costs.interrupt + self.costs.wake,
            );
            return self.costs.interrupt;
        }
        // It is answering a request.
        this.ready.borrow_mut().push_back(thread);
        Time::ZERO
    }

    /// The idle loop of a vCPU: answers, and lets threads go on. Until no thread is left.
    pub fn idle(&self, cpu: Cpu<'_>, is_over: impl Fn() -> bool) {
        let vcpu = self.vcpu_of(cpu.id());
        let this = &self.vcpus[vcpu];
        cpu.order();
        while !is_over() {
            let mine = this.runner.get() == cpu.id();
            if mine && this.state.get() == State::Running {
                let takes = self.be_on(cpu, vcpu);
                if takes > Time::ZERO {
                    self.work(cpu, takes);
                }
                self.give_up(cpu, vcpu);
            } else {
                cpu.park();
                cpu.order();
            }
        }
    }

    /// The thread is over: every idle loop looks whether it was the last.
    pub fn leave(&self, cpu: Cpu<'_>, was_last: bool) {
        self.give_up(cpu, self.vcpu_of(cpu.id()));
        if was_last {
            for vcpu in 0..self.vcpus.len() {
                cpu.wake(self.idle_of(vcpu), cpu.now());
            }
        }
    }

    // ---- Telling others ----

    /// This vCPU runs a thread of the space.
    pub fn hold(&self, cpu: Cpu<'_>) {
        let this = &self.vcpus[self.vcpu_of(cpu.id())];
        if !this.holds.replace(true) {
            this.forgot.set(self.flushes.get());
        }
    }

    /// A flush begins: the other vCPUs that may remember what the space says.
    pub fn holders(&self, cpu: Cpu<'_>) -> Vec<usize> {
        cpu.order();
        self.flushes.set(self.flushes.get() + 1);
        let own = self.vcpu_of(cpu.id());
        let all = self.vcpus.iter().enumerate();
        all.filter(|&(vcpu, it)| vcpu != own && it.holds.get() && !it.forgets.get())
            .map(|(vcpu, _)| vcpu)
            .collect()
    }

    /// A flush is over. A vCPU that could still use what it remembers, if one was left out.
    pub fn left_out(&self, cpu: Cpu<'_>) -> Option<usize> {
        cpu.order();
        let own = self.vcpu_of(cpu.id());
        let remembers =
            |it: &Vcpu| it.holds.get() && !it.forgets.get() && it.forgot.get() < self.flushes.get();
        (0..self.vcpus.len()).find(|&vcpu| vcpu != own && remembers(&self.vcpus[vcpu]))
    }

    /// Where a vCPU is now.
    pub fn state_of(&self, cpu: Cpu<'_>, vcpu: usize) -> State {
        cpu.order();
        self.vcpus[vcpu].state.get()
    }

    /// An interrupt that is answered.
    pub fn ask(&self, cpu: Cpu<'_>, vcpu: usize) {
        self.work(cpu, self.costs.interrupt);
        cpu.order();
        self.count(|tally| tally.interrupts += 1);
        let asked = &self.asked[cpu.id()];
        asked.set(asked.get() + 1);
        self.interrupt(cpu, vcpu, Interrupt::Asked(cpu.id()));
    }

    fn interrupt(&self, cpu: Cpu<'_>, vcpu: usize, what: Interrupt) {
        let this = &self.vcpus[vcpu];
        this.pending.borrow_mut().push(what);
        match this.state.get() {
            State::Running if this.runner.get() != cpu.id() => {
                cpu.wake(this.runner.get(), cpu.now());
            }
            State::Running | State::Waiting => {}
            State::Halted => {
                self.count(|tally| tally.wake_ups += 1);
                self.start(cpu, vcpu, cpu.now() + self.costs.wake);
            }
        }
    }

    /// Waits, on its physical CPU, until all that was asked is answered.
    pub fn wait(&self, cpu: Cpu<'_>) {
        let vcpu = self.vcpu_of(cpu.id());
        let began = cpu.now();
        loop {
            let takes = self.be_on(cpu, vcpu);
            cpu.order();
            if self.asked[cpu.id()].get() == 0 {
                self.work(cpu, takes);
                break;
            }
            self.run(cpu, vcpu, self.slice);
        }
        self.count_wait(cpu.now() - began);
    }

    /// Has a vCPU forget when it is entered next.
    pub fn tell_later(&self, vcpu: usize) {
        self.vcpus[vcpu].forgets.set(true);
        self.count(|tally| tally.later += 1);
    }

    /// A hypercall by which the hypervisor has these forget: those that run by an interrupt of its own, one for all, and it waits
    /// for them; those that do not, when they are entered next.
    pub fn flush_by_hypercall(&self, cpu: Cpu<'_>, holders: &[usize], list_bytes: u64) {
        self.count(|tally| {
            tally.hypercalls += 1;
            tally.list_bytes += list_bytes;
        });
        let began = cpu.now();
        self.work(cpu, self.costs.exit * 2);
        cpu.order();
        let mut told = false;
        for &vcpu in holders {
            // As they are now.
            match self.vcpus[vcpu].state.get() {
                State::Running => {
                    told = true;
                    self.vcpus[vcpu].forgot.set(self.flushes.get());
                    self.interrupt(cpu, vcpu, Interrupt::Stolen);
                }
                _ => self.tell_later(vcpu),
            }
        }
        if told {
            self.work(cpu, self.costs.host_interrupt);
        }
        self.count_wait(cpu.now() - began);
    }
}

//! vCPUs on physical CPUs, of which there may be fewer: which run, which wait for their turn, which have nothing to do.
//!
//! A physical CPU takes the vCPU that has waited longest, for a time slice, and for longer if none waits. A vCPU without work
//! is *halted* and takes no time. What runs on a vCPU is a thread of the guest, or its idle loop, each a CPU of the scheduler of
//! the [software machine](tablewright_machine::Scheduler), so that everything is in one order and in virtual time.
//!
//! What a vCPU does for a flush is the engine's [`shootdown`](tablewright::shootdown): it loads the space of the program when it
//! runs a thread of it, is lazy in its idle loop, and does what it is asked when it is interrupted. Whether it has forgotten is kept
//! count of beside that, and looked at when a flush is over.
//!
//! An **interrupt** is handled when its target runs: at once if it does, after its wake-up if it is halted and a physical CPU is
//! free, and otherwise when its turn has come. That may be many time slices later, and a vCPU that waits for the answer does
//! so on a physical CPU.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use tablewright::Pa;
use tablewright::hyperv::{Decoded, Status};
use tablewright::shootdown::{
    Actions, Allocator, Cpu as ShootdownCpu, Cpus, Forget, Here, PreemptedFlag, Shootdown, Space,
    inbox_words,
};
use tablewright_machine::{Costs, Cpu, Time};

/// More pages than this are flushed as the whole space, where each page is an invalidation of its own: x86 by Linux.
pub const X86_PAGES: u64 = 33;

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
    /// Another asks for something.
    Asked,
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
    /// It forgets before it enters its guest: the hypervisor has said so, or the guest in the flag.
    forgets: Cell<bool>,
    flag: PreemptedFlag,
    /// It has the space loaded, and may remember what it says.
    holds: Cell<bool>,
    /// In its idle loop.
    lazy: Cell<bool>,
    /// The last flush that it has forgotten for.
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
    /// Ranges in their lists.
    pub ranges: u64,
    /// Invalidations that hardware broadcasts.
    pub broadcasts: u64,
    /// Waits for answers, in all, and the longest.
    pub waiting: Time,
    pub longest: Time,
}

/// Memory for the guest's part of flushes.
pub struct Memory {
    cpus: Box<[ShootdownCpu]>,
    inboxes: Box<[AtomicU64]>,
    set: Box<[AtomicU64]>,
}

impl Memory {
    pub fn new(vcpus: usize) -> Self {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            cpus: (0..vcpus).map(|_| ShootdownCpu::new()).collect(),
            inboxes: words(inbox_words(vcpus)),
            set: words(Space::words(vcpus)),
        }
    }
}

/// The root of the program's tables.
const ROOT: Pa = Pa::new(0x1234_5000);

/// The physical CPUs, and the vCPUs on them.
pub struct Host<'c> {
    pub costs: &'c Costs,
    pub space: Space<'c>,
    /// Idle loops leave the space, and are not told of flushes; otherwise they are lazy.
    leaves: bool,
    shootdown: Shootdown<'c>,
    slice: Time,
    free: Cell<usize>,
    queue: RefCell<VecDeque<usize>>,
    vcpus: Box<[Vcpu]>,
    /// The thread whose flush waits for others, and the answers there were.
    waiting: Cell<Option<usize>>,
    answers: Cell<u64>,
    threads: usize,
    /// Flushes of the space, of which there is one at a time.
    flushes: Cell<u64>,
    pub problem: RefCell<Option<String>>,
    pub tally: Cell<Tally>,
}

impl<'c> Host<'c> {
    /// With so many threads in the guest, whose numbers are the first; the idle loops follow. `None` for more vCPUs than
    /// flushes know.
    pub fn new(
        costs: &'c Costs,
        memory: &'c Memory,
        slice: Time,
        physical: usize,
        threads: usize,
        leaves: bool,
    ) -> Option<Self> {
        let vcpu = |number| Vcpu {
            state: Cell::new(State::Halted),
            runner: Cell::new(threads + number),
            ready: RefCell::default(),
            from: Cell::default(),
            until: Cell::default(),
            pending: RefCell::default(),
            forgets: Cell::new(false),
            flag: PreemptedFlag::default(),
            holds: Cell::new(false),
            lazy: Cell::new(false),
            forgot: Cell::new(0),
        };
        let interrupt = costs.interrupt + costs.exception + costs.issue + costs.complete;
        let vcpus: Box<[Vcpu]> = (0..memory.cpus.len()).map(vcpu).collect();
        vcpus.iter().for_each(|vcpu| vcpu.flag.preempt());
        Some(Self {
            costs,
            leaves,
            space: Space::new(1, ROOT, &memory.set),
            shootdown: Shootdown::new(&memory.cpus, &memory.inboxes, None, interrupt.as_ps())?,
            slice,
            free: Cell::new(physical),
            queue: RefCell::default(),
            vcpus,
            waiting: Cell::default(),
            answers: Cell::new(0),
            threads,
            flushes: Cell::new(0),
            problem: RefCell::default(),
            tally: Cell::default(),
        })
    }

    /// The vCPU of a thread, which stays on it, or of an idle loop.
    fn vcpu_of(&self, runner: usize) -> usize {
        match runner.checked_sub(self.threads) {
            Some(idle) => idle,
            None => runner % self.vcpus.len(),
        }
    }

    fn idle_of(&self, vcpu: usize) -> usize {
        self.threads + vcpu
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
        if this.flag.enter() {
            this.forgets.set(true);
        }
        this.from.set(at);
        this.until.set(at + self.slice);
        if this.runner.get() != cpu.id() {
            cpu.wake(this.runner.get(), at);
        }
    }

    /// Leaves its physical CPU to the next.
    fn stop(&self, cpu: Cpu<'_>, vcpu: usize, next_state: State) {
        self.vcpus[vcpu].state.set(next_state);
        self.vcpus[vcpu].flag.preempt();
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
            takes += match interrupt {
                Interrupt::Asked => self.answer(cpu, vcpu),
                Interrupt::Stolen => self.costs.exit * 2,
            };
        }
        takes
    }

    /// Does what others ask, in the handler of the interrupt. How long that takes.
    fn answer(&self, cpu: Cpu<'_>, vcpu: usize) -> Time {
        let doing = self.doing(cpu, vcpu);
        doing.here(|here| {
            here.receive(&doing);
            // The idle loop leaves the space, and is not asked again.
            if cpu.id() == self.idle_of(vcpu) && self.vcpus[vcpu].holds.get() {
                self.leave_space(&doing, here);
            }
        });
        self.answers.set(self.answers.get() + 1);
        let takes = self.costs.exception + doing.takes.get();
        if let Some(thread) = self.waiting.get() {
            cpu.wake(thread, cpu.now() + takes);
        }
        takes
    }

    /// The idle loop has no space loaded from here on.
    fn leave_space(&self, doing: &Doing<'_, '_>, here: Here<'_, '_>) {
        let this = &self.vcpus[doing.vcpu];
        here.switch(Some(&self.space), None, doing, |_| ());
        this.holds.set(false);
        this.lazy.set(false);
    }

    /// On a physical CPU until the time has come or an interrupt comes; gives it away at the end of the slice. How long it ran.
    fn run(&self, cpu: Cpu<'_>, vcpu: usize, most: Time, goes_on: impl Fn() -> bool) -> Time {
        let this = &self.vcpus[vcpu];
        // An interrupt that comes now, or an answer, finds none to wake.
        cpu.order();
        if !this.pending.borrow().is_empty() || goes_on() {
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
            left = left.saturating_sub(self.run(cpu, vcpu, left, || false));
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
        if next.is_none() && this.holds.get() {
            let doing = self.doing(cpu, vcpu);
            doing.here(|here| match self.leaves {
                true => self.leave_space(&doing, here),
                false => {
                    this.lazy.set(true);
                    here.be_lazy();
                }
            });
        }
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

    // ---- Flushes ----

    /// What this vCPU does for flushes now.
    pub fn doing<'h>(&'h self, cpu: Cpu<'h>, vcpu: usize) -> Doing<'h, 'c> {
        Doing {
            host: self,
            cpu,
            vcpu,
            takes: Cell::default(),
            seen: Cell::new(self.answers.get()),
            waits: Cell::new(None),
        }
    }

    /// This vCPU runs a thread of the space.
    pub fn hold(&self, cpu: Cpu<'_>) {
        let vcpu = self.vcpu_of(cpu.id());
        let this = &self.vcpus[vcpu];
        let doing = self.doing(cpu, vcpu);
        doing.here(|here| match this.holds.replace(true) {
            true if this.lazy.replace(false) => here.resume(&self.space, &doing),
            true => {}
            false => {
                this.lazy.set(false);
                here.switch(None, Some(&self.space), &doing, |_| {
                    // Without an identifier a load forgets.
                    this.forgot.set(self.flushes.get());
                });
                // This load, and the one by which the idle loop left.
                let loads = (self.costs.issue + self.costs.complete) * 2;
                doing.takes.set(doing.takes.get() + loads);
            }
        });
        self.work(cpu, doing.takes.get());
    }

    /// Has every vCPU forget, or before it uses the space, by what `tell` does.
    pub fn flush<'h>(&'h self, cpu: Cpu<'h>, tell: impl FnOnce(&Doing<'h, 'c>, Here<'_, '_>)) {
        cpu.order();
        self.flushes.set(self.flushes.get() + 1);
        let doing = self.doing(cpu, self.vcpu_of(cpu.id()));
        doing.here(|here| tell(&doing, here));
        self.waiting.set(None);
        self.work(cpu, doing.takes.get());
        if let Some(since) = doing.waits.get() {
            self.count_wait(cpu.now() - since);
        }
        if let Some(vcpu) = self.left_out(cpu) {
            self.fail(format!("vCPU {vcpu} was not told"));
        }
    }

    pub fn fail(&self, problem: String) {
        self.problem.borrow_mut().get_or_insert(problem);
    }

    /// A flush is over, which was of tables too. A vCPU whose walker could still use what it remembers, if one was left out.
    fn left_out(&self, cpu: Cpu<'_>) -> Option<usize> {
        cpu.order();
        let remembers =
            |it: &Vcpu| it.holds.get() && !it.forgets.get() && it.forgot.get() < self.flushes.get();
        (0..self.vcpus.len()).find(|&vcpu| remembers(&self.vcpus[vcpu]))
    }

    /// All of them have forgotten: hardware has told them.
    pub fn all_forget(&self) {
        for vcpu in &self.vcpus {
            vcpu.forgot.set(self.flushes.get());
        }
    }

    /// The guest's flag of a vCPU.
    pub fn flag(&self, vcpu: usize) -> Option<&PreemptedFlag> {
        Some(&self.vcpus.get(vcpu)?.flag)
    }

    /// An interrupt that is answered.
    fn ask(&self, cpu: Cpu<'_>, vcpu: usize) {
        self.work(cpu, self.costs.interrupt);
        cpu.order();
        self.count(|tally| tally.interrupts += 1);
        self.interrupt(cpu, vcpu, Interrupt::Asked);
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

    /// A vCPU that does not run forgets when it is entered next.
    pub fn tell_later(&self, vcpu: usize) {
        self.vcpus[vcpu].forgets.set(true);
        self.count(|tally| tally.later += 1);
    }

    /// The hypervisor works on the vCPU's physical CPU, and does not give it away meanwhile.
    fn work_in_hypervisor(&self, cpu: Cpu<'_>, work: Time) {
        cpu.spend(work);
        self.count(|tally| tally.cpu_time += work);
        cpu.order();
    }

    /// The hypervisor's side of a hypercall. vCPUs that run forget by an interrupt of its own, one for all, for which it waits;
    /// those that do not, when they are entered next.
    ///
    /// # Errors
    /// The status that the guest gets.
    pub fn hypercall(&self, cpu: Cpu<'_>, call: &Decoded, first: u32) -> Result<(), Status> {
        self.count(|tally| tally.hypercalls += 1);
        let began = cpu.now();
        self.work_in_hypervisor(cpu, self.costs.exit * 2);
        let targets = call.targets.ok_or(Status::PARAMETER)?;
        if call.space != Some(ROOT.get()) {
            return Err(Status::PARAMETER);
        }
        let mut told = false;
        for vcpu in targets.iter().map(|vp| (vp - first) as usize) {
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
            self.work_in_hypervisor(cpu, self.costs.host_interrupt);
        }
        self.count_wait(cpu.now() - began);
        Ok(())
    }
}

/// What a vCPU does for a flush, and how long that takes it.
pub struct Doing<'h, 'c> {
    pub host: &'h Host<'c>,
    pub cpu: Cpu<'h>,
    vcpu: usize,
    takes: Cell<Time>,
    /// The answers that it has looked at.
    seen: Cell<u64>,
    /// Since when it waits for others.
    waits: Cell<Option<Time>>,
}

impl Doing<'_, '_> {
    fn here(&self, what: impl FnOnce(Here<'_, '_>)) {
        match self.host.shootdown.on(self.vcpu) {
            Some(here) => what(here),
            None => self.host.fail(format!("there is no vCPU {}", self.vcpu)),
        }
    }
}

// SAFETY: 1. there is no TLB: a vCPU remembers what came before the flush that it has `forgot`. 2. what is pending is done by
// `be_on` before a vCPU goes on. 3. never called: there are no identifiers.
unsafe impl Actions for Doing<'_, '_> {
    fn forget(&self, what: Forget) {
        let (costs, this) = (self.host.costs, &self.host.vcpus[self.vcpu]);
        let flushes = self.host.flushes.get();
        // Of a range, or of the whole space, what costs less.
        let pages = match what {
            Forget::Range { range, .. } => ((range.last - range.first) >> 12) + 1,
            _ => 1,
        };
        let pages = if pages > X86_PAGES { 1 } else { pages };
        // What a range names is of the last flush alone.
        if !matches!(what, Forget::Range { .. }) || this.forgot.get() + 1 == flushes {
            this.forgot.set(flushes);
        }
        self.takes
            .set(self.takes.get() + costs.issue * pages + costs.complete);
    }

    fn interrupt(&self, cpus: &Cpus) {
        cpus.iter().for_each(|vcpu| self.host.ask(self.cpu, vcpu));
        self.waits.set(Some(self.cpu.now()));
        self.host.waiting.set(Some(self.cpu.id()));
    }

    fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {}

    /// Until one has answered, on the physical CPU.
    fn relax(&self) {
        let host = self.host;
        let takes = host.be_on(self.cpu, self.vcpu);
        if takes > Time::ZERO {
            host.work(self.cpu, takes);
        }
        let answered = || host.answers.get() != self.seen.get();
        host.run(self.cpu, self.vcpu, host.slice, answered);
        self.seen.set(host.answers.get());
    }
}

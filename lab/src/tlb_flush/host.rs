//! vCPUs on physical CPUs, of which there may be fewer: which run, which wait for their turn, which
//! have nothing to do.
//!
//! A physical CPU takes the vCPU that has waited longest, for a time slice, and for longer if none
//! waits. A vCPU without work is *halted* and takes no time.
//!
//! Each vCPU is a CPU of the [software machine](tablewright_machine::Machine), with a TLB and a
//! walker of its own, and what runs on it is a thread of the guest or its idle loop, so that
//! everything is in one order and in virtual time. What it does for a flush is the engine's
//! [`shootdown`](tablewright::shootdown): it loads the space of the program when it runs a thread
//! of it, is lazy in its idle loop, and does what it is asked when it is interrupted. That no TLB
//! is left out is the machine's to find: what was unmapped is given back after the flush, and may
//! be remembered by no vCPU that goes on.
//!
//! A vCPU that was told to forget on its next entry forgets then. Until then it does not run, and
//! uses nothing that it remembers.
//!
//! An **interrupt** is handled when its target runs: at once if it does, after its wake-up if it is
//! halted and a physical CPU is free, and otherwise when its turn has come. That may be many time
//! slices later, and a vCPU that waits for the answer does so on a physical CPU.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use tablewright::hyperv::{Decoded, Status};
use tablewright::shootdown::{
    Actions, Allocator, CpuCell, Cpus, Holder, Identifiers, LocalFlush, PerCpu, PreemptedFlag,
    Shootdown, Space, inbox_words,
};
use tablewright_machine::{Costs, Cpu, CpuState, Machine, Mapper, Time, Tlbi};

/// More pages than this are flushed as the whole space, where each page is an invalidation of its
/// own: x86 by Linux.
pub const X86_PAGES: u64 = 33;
/// Of a PCID, and of an ASID on every arm64 processor but small ones.
const IDENTIFIER_BITS: u32 = 12;

/// State of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has nothing to do.
    Halted,
    /// It would run if a physical CPU were free: as seen by the others, it was preempted.
    Waiting,
    /// On a physical CPU.
    Running,
}

/// Work before a vCPU goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interrupt {
    /// Another asks for something.
    Asked,
    /// The hypervisor has invalidated, and the guest does not know.
    Stolen,
}

struct Vcpu {
    state: Cell<State>,
    /// It runs a thread of the guest, and not its idle loop.
    busy: Cell<bool>,
    /// Threads of the guest that could run on it as well.
    ready: RefCell<VecDeque<usize>>,
    /// Its slice.
    from: Cell<Time>,
    until: Cell<Time>,
    pending: RefCell<Vec<Interrupt>>,
    /// It forgets before it enters its guest: the hypervisor has said so, or the guest in the flag.
    forgets: Cell<bool>,
    flag: PreemptedFlag,
    /// It has the space loaded.
    loaded: Cell<bool>,
    /// In its idle loop.
    lazy: Cell<bool>,
}

/// Counts of a run.
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
    /// Hypercalls made.
    pub hypercalls: u64,
    /// Bytes of their lists.
    pub list_bytes: u64,
    /// Ranges in their lists.
    pub ranges: u64,
    /// Invalidations that hardware broadcasts.
    pub broadcasts: u64,
    /// From the first interrupt or call of a flush to its last answer, in all.
    pub flushing: Time,
    /// Waits for answers, in all.
    pub waiting: Time,
    /// The longest of them.
    pub longest: Time,
}

/// Memory for the guest's part of flushes.
pub struct Memory {
    cpus: Box<[CpuCell]>,
    inboxes: Box<[AtomicU64]>,
    set: Box<[AtomicU64]>,
    holders: Box<[Holder]>,
    taken: Box<[u64]>,
}

impl Memory {
    pub fn new(vcpus: usize) -> Self {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            cpus: (0..vcpus).map(|_| CpuCell::new()).collect(),
            inboxes: words(inbox_words(vcpus)),
            set: words(Space::words(vcpus)),
            holders: (0..vcpus).map(|_| Holder::new()).collect(),
            taken: vec![0; Allocator::words(IDENTIFIER_BITS)].into(),
        }
    }
}

/// How the guest uses its vCPUs.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// Until a vCPU has to give its physical CPU to one that waits.
    pub slice: Time,
    /// How many physical CPUs.
    pub physical: usize,
    /// Idle loops leave the space, and are not told of flushes; otherwise they are lazy.
    pub leaves: bool,
    /// A lazy idle loop stays in the space when it is told, and is told of the next flush too;
    /// otherwise it leaves then.
    pub stays: bool,
    /// Spaces have identifiers, under which they are remembered while another is loaded.
    pub identified: bool,
}

/// The physical CPUs, and the vCPUs on them.
pub struct Host<'c> {
    pub machine: &'c Machine,
    pub mapper: Mapper<'c>,
    /// The space of the program, once it has a root.
    space: OnceCell<Space<'c>>,
    guest: Guest,
    shootdown: Shootdown<'c>,
    allocator: RefCell<Allocator<'c>>,
    /// The words of its set, until it has them.
    set: Cell<Option<&'c mut [AtomicU64]>>,
    free: Cell<usize>,
    queue: RefCell<VecDeque<usize>>,
    vcpus: Box<[Vcpu]>,
    /// The vCPU whose flush waits for others, and the answers there were.
    waiting: Cell<Option<usize>>,
    answers: Cell<u64>,
    pub problem: RefCell<Option<String>>,
    tally: Cell<Tally>,
}

impl<'c> Host<'c> {
    /// A vCPU for each CPU of the machine. `None` for more than flushes and identifiers know.
    pub fn new(machine: &'c Machine, memory: &'c mut Memory, guest: Guest) -> Option<Self> {
        let Memory { cpus, inboxes, set, holders, taken } = memory;
        let vcpu = |_| Vcpu {
            state: Cell::new(State::Halted),
            busy: Cell::new(false),
            ready: RefCell::default(),
            from: Cell::default(),
            until: Cell::default(),
            pending: RefCell::default(),
            forgets: Cell::new(false),
            flag: PreemptedFlag::default(),
            loaded: Cell::new(false),
            lazy: Cell::new(false),
        };
        let costs = machine.costs();
        let interrupt = costs.interrupt + costs.exception + costs.issue + costs.complete;
        let vcpus: Box<[Vcpu]> = (0..cpus.len()).map(vcpu).collect();
        vcpus.iter().for_each(|vcpu| vcpu.flag.preempt());
        let allocator = Allocator::new(IDENTIFIER_BITS, taken)?;
        let identifiers = match guest.identified {
            true => Some(Identifiers::new(&allocator, holders)?),
            false => None,
        };
        Some(Self {
            machine,
            mapper: machine.new_space(),
            space: OnceCell::new(),
            guest,
            shootdown: Shootdown::new(cpus, inboxes, identifiers, interrupt.as_ps())?,
            allocator: RefCell::new(allocator),
            set: Cell::new(Some(set)),
            free: Cell::new(guest.physical),
            queue: RefCell::default(),
            vcpus,
            waiting: Cell::default(),
            answers: Cell::new(0),
            problem: RefCell::default(),
            tally: Cell::default(),
        })
    }

    /// The space of the program, whose tables are those under this root.
    pub fn set_root(&self, root: tablewright::Pa) {
        self.mapper.track(root, tablewright::Half::Lower);
        if let Some(set) = self.set.take() {
            let _set_before = self.space.set(Space::new(root, set));
        }
    }

    pub fn space(&self) -> Option<&Space<'c>> {
        self.space.get()
    }

    pub fn costs(&self) -> &'c Costs {
        self.machine.costs()
    }

    pub fn tally(&self) -> Tally {
        self.tally.get()
    }

    /// Threads stay on the vCPU that they begin on.
    fn vcpu_of(&self, thread: usize) -> usize {
        thread % self.vcpus.len()
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
        this.until.set(at + self.guest.slice);
        if vcpu != cpu.id() {
            cpu.wake(vcpu, at);
        }
    }

    /// The running vCPU leaves its physical CPU to the next.
    fn stop(&self, cpu: Cpu<'_>, next_state: State) {
        let this = &self.vcpus[cpu.id()];
        self.count(|tally| tally.cpu_time += cpu.now() - this.from.get());
        this.state.set(next_state);
        this.flag.preempt();
        let next = self.queue.borrow_mut().pop_front();
        if next_state == State::Waiting {
            self.queue.borrow_mut().push_back(cpu.id());
        }
        match next {
            Some(next) => self.enter(cpu, next, cpu.now() + self.costs().exit * 2),
            None => self.free.set(self.free.get() + 1),
        }
    }

    /// Goes on when the vCPU is on a physical CPU, and has done what it was asked to.
    pub fn be_on(&self, cpu: Cpu<'_>) {
        let this = &self.vcpus[cpu.id()];
        cpu.order();
        while this.state.get() != State::Running {
            if this.state.get() == State::Halted {
                self.start(cpu, cpu.id(), cpu.now());
                continue;
            }
            cpu.park();
            cpu.order();
        }
        // An interrupt may have come before the vCPU did.
        cpu.wait_until(this.from.get());
        cpu.order();
        if this.forgets.take() {
            cpu.spend(self.costs().complete);
            self.machine.forget_for(cpu.id(), Tlbi::ALL);
            self.machine.set_state(self.state_of(this));
        }
        loop {
            let pending = this.pending.take();
            if pending.is_empty() {
                return;
            }
            for interrupt in pending {
                match interrupt {
                    Interrupt::Asked => self.answer(cpu),
                    Interrupt::Stolen => cpu.spend(self.costs().exit * 2),
                }
            }
            cpu.order();
        }
    }

    /// State of a vCPU's TLB, for the machine.
    fn state_of(&self, vcpu: &Vcpu) -> CpuState {
        match vcpu.lazy.get() {
            true => CpuState::Lazy,
            false => CpuState::Active,
        }
    }

    /// Does what others ask, in the handler of the interrupt.
    fn answer(&self, cpu: Cpu<'_>) {
        let this = &self.vcpus[cpu.id()];
        cpu.spend(self.costs().exception);
        let doing = self.doing(cpu);
        doing.here(|here| here.receive(&doing));
        // The idle loop leaves the space, and is not asked again.
        if !this.busy.get() && this.loaded.get() && !self.guest.stays {
            self.leave_space(cpu);
        }
        cpu.order();
        self.answers.set(self.answers.get() + 1);
        if let Some(vcpu) = self.waiting.get() {
            cpu.wake(vcpu, cpu.now());
        }
    }

    /// The idle loop has no space loaded from here on.
    fn leave_space(&self, cpu: Cpu<'_>) {
        let this = &self.vcpus[cpu.id()];
        let doing = self.doing(cpu);
        doing.here(|here| {
            let left = here.switch(self.space(), None, &doing, |_| {
                self.machine.unload();
                self.forget_by_loading(cpu);
                self.mapper.leave();
                self.machine.set_state(CpuState::Active);
            });
            left.expect("no space");
        });
        this.loaded.set(false);
        this.lazy.set(false);
    }

    /// A root is loaded: without identifiers that forgets.
    fn forget_by_loading(&self, cpu: Cpu<'_>) {
        match self.guest.identified {
            true => cpu.spend(self.costs().issue + self.costs().complete),
            false => self.forget_here(Tlbi::invpcid(None, None)),
        }
    }

    /// The running vCPU executes an invalidation that is for itself, and waits for it.
    fn forget_here(&self, tlbi: Tlbi) {
        self.machine.tlbi(Tlbi { broadcast: false, ..tlbi });
        self.machine.dsb();
    }

    /// On a physical CPU until the time has come or an interrupt comes; gives it away at the end of
    /// the slice. How long it ran.
    pub fn run(&self, cpu: Cpu<'_>, most: Time, goes_on: impl Fn() -> bool) -> Time {
        let this = &self.vcpus[cpu.id()];
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
        if cpu.now() >= end {
            let alone = self.queue.borrow().is_empty();
            match alone {
                true => this.until.set(cpu.now() + self.guest.slice),
                false => self.stop(cpu, State::Waiting),
            }
        }
        ran
    }

    // ---- What threads do ----

    /// A thread that there is from the beginning.
    pub fn begin(&self, thread: usize) {
        let vcpu = self.vcpu_of(thread);
        self.vcpus[vcpu].ready.borrow_mut().push_back(thread);
    }

    /// Spends so much work of the running vCPU.
    pub fn work(&self, cpu: Cpu<'_>, work: Time) {
        let mut left = work;
        loop {
            self.be_on(cpu);
            if left == Time::ZERO {
                return;
            }
            left = left.saturating_sub(self.run(cpu, left, || false));
        }
    }

    /// The next thread that the running vCPU has to run. Until there is one it is in its idle loop,
    /// and answers; until all is over.
    pub fn next_thread(&self, cpu: Cpu<'_>, is_over: impl Fn() -> bool) -> Option<usize> {
        let this = &self.vcpus[cpu.id()];
        cpu.order();
        loop {
            let next = this.ready.borrow_mut().pop_front();
            this.busy.set(next.is_some());
            if next.is_some() {
                self.be_on(cpu);
                return next;
            }
            if is_over() && this.state.get() == State::Halted {
                return None;
            }
            if this.state.get() == State::Running {
                self.be_idle(cpu);
                self.be_on(cpu);
                // A thread may have come meanwhile.
                if this.ready.borrow().is_empty() {
                    self.stop(cpu, State::Halted);
                }
                continue;
            }
            cpu.park();
            cpu.order();
            if this.state.get() != State::Halted {
                self.be_on(cpu);
            }
        }
    }

    /// There is no thread to run.
    fn be_idle(&self, cpu: Cpu<'_>) {
        let this = &self.vcpus[cpu.id()];
        if !this.loaded.get() || this.lazy.get() {
            return;
        }
        if self.guest.leaves {
            return self.leave_space(cpu);
        }
        self.machine.set_state(CpuState::Lazy);
        // The same time.
        this.lazy.set(true);
        self.doing(cpu).here(|here| here.be_lazy());
    }

    /// A thread has something to do again. What that costs the caller is for it to spend.
    pub fn wake(&self, cpu: Cpu<'_>, thread: usize) -> Time {
        cpu.order();
        let vcpu = self.vcpu_of(thread);
        let this = &self.vcpus[vcpu];
        this.ready.borrow_mut().push_back(thread);
        if this.state.get() != State::Halted {
            return Time::ZERO;
        }
        let costs = self.costs();
        self.start(cpu, vcpu, cpu.now() + costs.interrupt + costs.wake);
        costs.interrupt
    }

    /// Every idle loop looks whether all is over.
    pub fn wake_idle(&self, cpu: Cpu<'_>) {
        for vcpu in (0..self.vcpus.len()).filter(|&vcpu| vcpu != cpu.id()) {
            cpu.wake(vcpu, cpu.now());
        }
    }

    // ---- Flushes ----

    /// Returns the flush actions of the running vCPU.
    fn doing<'h>(&'h self, cpu: Cpu<'h>) -> Doing<'h, 'c> {
        Doing { host: self, cpu, seen: Cell::new(self.answers.get()), waits: Cell::new(None) }
    }

    /// The running vCPU goes on with a thread of the space.
    pub fn hold(&self, cpu: Cpu<'_>) {
        let Some(space) = self.space() else { return };
        let this = &self.vcpus[cpu.id()];
        let doing = self.doing(cpu);
        doing.here(|here| match this.loaded.replace(true) {
            true if this.lazy.replace(false) => {
                here.resume(space, &doing);
                self.machine.set_state(CpuState::Active);
            }
            true => {}
            false => {
                let loaded = here.switch(None, Some(space), &doing, |id| {
                    self.forget_by_loading(cpu);
                    self.mapper.load_as(id);
                    self.machine.set_state(CpuState::Active);
                });
                loaded.expect("a word for each vCPU");
            }
        });
        self.work(cpu, Time::ZERO);
    }

    /// Has every vCPU forget, or before it uses the space, by what `tell` does.
    pub fn flush(&self, tell: impl FnOnce(&Doing<'_, 'c>, PerCpu<'_, '_>)) {
        let cpu = self.machine.cpu();
        cpu.order();
        let start = cpu.now();
        let doing = self.doing(cpu);
        doing.here(|here| tell(&doing, here));
        self.waiting.set(None);
        self.work(cpu, Time::ZERO);
        self.count(|tally| tally.flushing += cpu.now() - start);
        if let Some(since) = doing.waits.get() {
            self.count_wait(cpu.now() - since);
        }
    }

    pub fn fail(&self, problem: String) {
        self.problem.borrow_mut().get_or_insert(problem);
    }

    /// The guest's flag of a vCPU.
    pub fn flag(&self, vcpu: usize) -> Option<&PreemptedFlag> {
        Some(&self.vcpus.get(vcpu)?.flag)
    }

    /// An interrupt that is answered.
    fn ask(&self, cpu: Cpu<'_>, vcpu: usize) {
        self.work(cpu, self.costs().interrupt);
        cpu.order();
        self.count(|tally| tally.interrupts += 1);
        self.interrupt(cpu, vcpu, Interrupt::Asked);
    }

    fn interrupt(&self, cpu: Cpu<'_>, vcpu: usize, what: Interrupt) {
        let this = &self.vcpus[vcpu];
        this.pending.borrow_mut().push(what);
        match this.state.get() {
            State::Running if vcpu != cpu.id() => {
                cpu.wake(vcpu, cpu.now());
            }
            State::Running | State::Waiting => {}
            State::Halted => {
                self.count(|tally| tally.wake_ups += 1);
                self.start(cpu, vcpu, cpu.now() + self.costs().wake);
            }
        }
    }

    /// A vCPU that does not run forgets when it is entered next, and uses nothing before.
    pub fn tell_later(&self, vcpu: usize) {
        self.machine.set_state_of(vcpu, CpuState::Stopped);
        self.vcpus[vcpu].forgets.set(true);
        self.count(|tally| tally.later += 1);
    }

    /// The hypervisor's side of a hypercall. vCPUs that run forget by an interrupt of its own, one
    /// for all, for which it waits; those that do not, when they are entered next. It does not know
    /// under which identifiers the guest has the space.
    ///
    /// # Errors
    /// The status that the guest gets.
    pub fn hypercall(&self, cpu: Cpu<'_>, call: &Decoded, first: u32) -> Result<(), Status> {
        self.count(|tally| tally.hypercalls += 1);
        let began = cpu.now();
        // The vCPU keeps its physical CPU meanwhile.
        cpu.spend(self.costs().exit * 2);
        cpu.order();
        let targets = call.targets.ok_or(Status::PARAMETER)?;
        let root = self.space().map(|space| space.root().get());
        if call.space.is_none() || call.space != root {
            return Err(Status::PARAMETER);
        }
        let mut told = false;
        for vcpu in targets.iter().map(|vp| vp - first as usize) {
            // As they are now.
            if self.vcpus[vcpu].state.get() != State::Running {
                self.tell_later(vcpu);
                continue;
            }
            told = true;
            if call.is_everything() {
                self.machine.forget_for(vcpu, Tlbi::invpcid(None, None));
            }
            for pages in call.ranges() {
                let last = pages.first + (pages.count * pages.size - 1);
                let range = Some((pages.first, last));
                self.machine.forget_for(vcpu, Tlbi::invpcid(None, range));
            }
            self.interrupt(cpu, vcpu, Interrupt::Stolen);
        }
        if told {
            cpu.spend(self.costs().host_interrupt);
            cpu.order();
        }
        self.count_wait(cpu.now() - began);
        Ok(())
    }
}

/// Flush actions of a vCPU.
pub struct Doing<'h, 'c> {
    pub host: &'h Host<'c>,
    pub cpu: Cpu<'h>,
    /// The answers that it has looked at.
    seen: Cell<u64>,
    /// Since when it waits for others.
    waits: Cell<Option<Time>>,
}

impl Doing<'_, '_> {
    fn here(&self, what: impl FnOnce(PerCpu<'_, '_>)) {
        // SAFETY: the running vCPU (1.), whose handlers come where `be_on` says (2.); the machine
        // checks what it loads (3., 4.).
        match unsafe { self.host.shootdown.on(self.cpu.id()) } {
            Some(here) => what(here),
            None => self.host.fail(format!("there is no vCPU {}", self.cpu.id())),
        }
    }
}

// SAFETY: 1. the machine forgets. 2. what is pending is done by `be_on` before a vCPU goes on. 3.
// there is one allocator, and no other vCPU runs in the function.
unsafe impl Actions for Doing<'_, '_> {
    fn flush_local(&self, what: LocalFlush) {
        let space = |id| self.host.guest.identified.then_some(id);
        self.host.forget_here(match what {
            LocalFlush::Everything => Tlbi::ALL,
            LocalFlush::All => Tlbi::invpcid(None, None),
            LocalFlush::Space(id) => Tlbi::invpcid(space(id), None),
            // Of a range, or of the whole space, what costs less.
            LocalFlush::Range { id, range, .. }
                if (range.last - range.first) >> 12 >= X86_PAGES =>
            {
                Tlbi::invpcid(space(id), None)
            }
            LocalFlush::Range { id, range, .. } => Tlbi::invlpg(id, (range.first, range.last)),
        });
    }

    fn interrupt(&self, cpus: &Cpus) {
        cpus.iter().for_each(|vcpu| self.host.ask(self.cpu, vcpu));
        self.waits.set(Some(self.cpu.now()));
        self.host.waiting.set(Some(self.cpu.id()));
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.host.allocator.borrow_mut());
    }

    /// Until one has answered, on the physical CPU.
    fn relax(&self) {
        let host = self.host;
        host.be_on(self.cpu);
        let answered = || host.answers.get() != self.seen.get();
        host.run(self.cpu, host.guest.slice, answered);
        self.seen.set(host.answers.get());
    }
}

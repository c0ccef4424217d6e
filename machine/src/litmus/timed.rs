//! A test on the machine in virtual time: CPUs that execute in order, and hardware that is free by
//! seed.

use std::cell::{Cell, RefCell};

use super::explore::Reached;
use super::layout::{self, Layout};
use super::outcome::End;
use super::program::*;
use crate::costs::Costs;
use crate::hardware::{Cause, Fault, How, Request, Translated};
use crate::machine::{Machine, Setup};
use crate::memory::Memory;
use crate::perturb::Perturbation;
use crate::sched::{Cpu, RunError};
use crate::splitmix::below;
use crate::time::Time;

/// The sum of a test's runs.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// How many runs there were.
    pub runs: u64,
    /// For each outcome that the test asks about: the first seed that came to it, and whether all
    /// did.
    pub outcomes: Vec<(Option<u64>, bool)>,
}

impl Simulated {
    /// Outcome number `ask` as the explorer reports it, with the seed for the way.
    pub fn reached(&self, ask: usize) -> Option<Reached> {
        let (seed, always) = self.outcomes.get(ask)?;
        Some(Reached { witness: seed.map(|seed| vec![format!("seed {seed}")]), always: *always })
    }
}

/// Runs a test on the machine in virtual time, once with each seed from 1 to `seeds`.
///
/// ```
/// use tablewright_machine::litmus::{Profile, parse, simulate};
/// let tests = parse(
///     "example.litmus",
///     "
/// test CoWinvT+po
/// data a = 1
/// map x leaf(a)
/// thread
///     STR invalid, [pte(x)]
///     LDR r0, [x]
/// ask 0:r0 = 1
/// ",
/// )?;
/// let simulated = simulate(&tests[0], Profile::Base, 100)?;
/// assert!(simulated.outcomes[0].0.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`RunError`], which would be a fault of the machine.
pub fn simulate(test: &Test, profile: Profile, seeds: u64) -> Result<Simulated, RunError> {
    let mut simulated = Simulated { runs: 0, outcomes: vec![(None, true); test.asks.len()] };
    let mut memory = layout::memory(test);
    for seed in 1..=seeds {
        let (holds, used) = run(test, profile, seed, memory)?;
        memory = used;
        simulated.runs += 1;
        for (holds, (first, always)) in holds.into_iter().zip(&mut simulated.outcomes) {
            if holds {
                first.get_or_insert(seed);
            }
            *always &= holds;
        }
    }
    Ok(simulated)
}

/// Prices of one order of magnitude, so that CPUs that start together meet.
fn costs() -> Costs {
    Costs {
        load: Time::ns(10),
        entry: Time::ns(10),
        exchange: Time::ns(20),
        publish: Time::ns(20),
        issue: Time::ns(10),
        complete: Time::ns(300),
        walk: Time::ns(10),
        access: Time::ns(10),
        exception: Time::ns(50),
        ..Costs::default()
    }
}

/// One run: which outcomes it came to.
fn run(
    test: &Test,
    profile: Profile,
    seed: u64,
    memory: Memory,
) -> Result<(Vec<bool>, Memory), RunError> {
    let mut setup = Setup::new(layout::architecture(test, profile), memory);
    setup.costs = costs();
    setup.scheduler.cpus = test.threads();
    // So many that others get in between any two steps.
    setup.scheduler.perturbation =
        Perturbation { seed, pause_once_in: 16, pause: Time::us(1), ..Perturbation::default() };
    let machine = Machine::new(setup);
    machine.hardware.stop_judging();
    let Some(layout) = Layout::build(test, &machine.hardware) else {
        return Err(RunError::NoStack("too little memory for the tables".to_owned()));
    };
    let nothing = |thread: &Thread| vec![End::Nothing; thread.code.len()];
    let run = Run {
        test,
        machine: &machine,
        layout: &layout,
        results: RefCell::new(test.code.iter().map(nothing).collect()),
        asked: Cell::new(None),
        answered: Cell::new(0),
        finished: Cell::new(0),
        fenced: Cell::new(0),
        stores_fenced: Cell::new(0),
        released: Cell::new(0),
        user: Cell::new(0),
    };
    for address in &test.addresses {
        machine.hardware.note(address.va);
    }
    let stream = Cell::new(seed);
    let delays: Vec<u64> =
        test.code.iter().map(|_| below(&stream, 2) * below(&stream, 1_000)).collect();
    machine.run(|cpu| {
        machine.hardware.load_root(cpu.id(), layout.spaces[test.code[cpu.id()].space]);
        let root = layout.first_root().map(|root| (root, 0));
        machine.hardware.load_guest(cpu.id(), root);
        cpu.spend(Time::ns(delays[cpu.id()]));
        run.thread(cpu);
    })?;
    for cpu in 0..test.threads() {
        machine.hardware.drain(cpu);
    }
    let holds = {
        let results = run.results.borrow();
        let result = |thread: usize, at: usize| results[thread][at];
        let word = |pa: u64| machine.hardware.memory.read(pa);
        let holds = |ask: &Ask| ask.outcome.holds(test, &layout, &result, &word, &|_, _| 0);
        test.asks.iter().map(holds).collect()
    };
    Ok((holds, machine.into_memory()))
}

struct Run<'r> {
    test: &'r Test,
    machine: &'r Machine,
    layout: &'r Layout,
    results: RefCell<Vec<Vec<End>>>,
    /// A shootdown under way, the CPU that asks, and those that have answered.
    asked: Cell<Option<(usize, Scope)>>,
    answered: Cell<u64>,
    /// CPUs that have come to their end.
    finished: Cell<u64>,
    /// CPUs that have executed a DMB, and no access after it.
    fenced: Cell<u64>,
    /// CPUs that have executed a DMB for stores, and no store through a translation after it.
    stores_fenced: Cell<u64>,
    /// CPUs with a store-release that may be in the buffer.
    released: Cell<u64>,
    /// CPUs whose accesses have the rights of an application.
    user: Cell<u64>,
}

impl Run<'_> {
    fn thread(&self, cpu: Cpu<'_>) {
        let thread = cpu.id();
        let hardware = &self.machine.hardware;
        for (at, instruction) in self.test.code[thread].code.iter().enumerate() {
            self.wait(cpu);
            self.answer(cpu);
            let user = u64::from(instruction.user) << thread;
            self.user.update(|users| users & !(1 << thread) | user);
            let result = match self.execute(cpu, &instruction.op) {
                Ok(Some(value)) => End::Value(value),
                Ok(None) => End::Nothing,
                Err(fault) => {
                    cpu.spend(self.machine.costs().exception);
                    cpu.order();
                    if self.test.x86 {
                        // The handler returns by IRET.
                        hardware.drain(thread);
                    }
                    hardware.synchronise(thread);
                    End::Fault(fault)
                }
            };
            self.results.borrow_mut()[thread][at] = result;
        }
        // What is in the buffer comes out of it some time, in some order.
        while hardware.has_buffered(thread) {
            self.wait(cpu);
            self.answer(cpu);
            let drainable = hardware.drainable(thread);
            if let Some(&at) = drainable.get(hardware.dice.below(8) as usize) {
                hardware.drain_one(thread, at);
            }
        }
        self.answer(cpu);
        self.finished.update(|finished| finished | 1 << thread);
    }

    /// Some time goes by, and the hardware does what it may.
    fn wait(&self, cpu: Cpu<'_>) {
        let hardware = &self.machine.hardware;
        for _ in 0..hardware.dice.below(8) {
            cpu.spend(Time::ns(10));
            cpu.order();
            let entries = &self.layout.entries;
            let near = entries.get(hardware.dice.below(entries.len() as u64) as usize);
            hardware.disturb(cpu.id(), near.copied());
        }
    }

    /// Lets an instruction pass that comes after a DMB, or is a release, or an acquire after a
    /// release, when what is before it is done: loads are done, stores have to be. So does its
    /// fault: they are, before it is translated.
    fn pass_fence(&self, thread: usize, op: &Op) {
        let (acquire, release) = op.acquires_releases();
        let translated = matches!(op.place(), Some(Place::Virtual(_)));
        let is_of = |cpus: &Cell<u64>| cpus.get() >> thread & 1 != 0;
        let in_order = is_of(&self.fenced)
            || (translated && op.writes() && (release || is_of(&self.stores_fenced)))
            || (acquire && is_of(&self.released));
        if in_order {
            self.machine.hardware.drain(thread);
            for cpus in [&self.fenced, &self.stores_fenced, &self.released] {
                cpus.update(|cpus| cpus & !(1 << thread));
            }
        }
        if release {
            self.released.update(|released| released | 1 << thread);
        }
    }

    fn translate(&self, request: Request) -> Result<Translated, Fault> {
        let machine = self.machine;
        let found = machine.translate(request);
        let cpu = machine.cpu().id();
        let hardware = &machine.hardware;
        let is_hidden = |page: usize| {
            let pa = self.layout.page(page);
            hardware.visible_to(cpu, pa) != hardware.memory.read(pa)
        };
        match found {
            // It may be about any data with the same offset in a page, and comes after stores to
            // such.
            Err(
                Fault::Translation { .. }
                | Fault::Address
                | Fault::Second { cause: Cause::Translation, .. },
            ) if (0..self.test.data.len()).any(is_hidden) => {
                hardware.drain(cpu);
                machine.translate(request)
            }
            found => found,
        }
    }

    fn register(&self, thread: usize, register: usize) -> u64 {
        let code = &self.test.code[thread].code;
        let writer = code.iter().position(|i| i.op.register() == Some(register));
        match writer.map(|at| self.results.borrow()[thread][at]) {
            Some(End::Value(value)) => value,
            _ => 0,
        }
    }

    fn evaluate(&self, thread: usize, value: &Value) -> u64 {
        match value {
            Value::Register(register) => self.register(thread, *register),
            value => self.layout.evaluate(self.test, value),
        }
    }

    fn request(&self, thread: usize, address: usize, write: bool) -> Request {
        let va = self.test.addresses[address].va;
        let request = if write { Request::write(va) } else { Request::read(va) };
        if self.user.get() >> thread & 1 != 0 { request.by_user() } else { request }
    }

    fn execute(&self, cpu: Cpu<'_>, op: &Op) -> Result<Option<u64>, Fault> {
        let thread = cpu.id();
        let (machine, hardware) = (self.machine, &self.machine.hardware);
        if op.place().is_some() {
            cpu.order();
            self.pass_fence(thread, op);
            if !op.address().is_empty() {
                // It could not be translated before the address was known.
                hardware.synchronise(thread);
            }
        }
        match op {
            Op::Load { at, .. } => return self.load(cpu, at).map(Some),
            Op::Store { value, at, release, .. } => {
                let value = self.evaluate(thread, value);
                self.store(cpu, at, value, *release)?;
            }
            Op::Atomic { change, register, value, at, .. } => {
                let old = self.change(cpu, at, change, value)?;
                return Ok(register.map(|_| old));
            }
            Op::Fence(Kind::Loads) | Op::Branch(_) | Op::Barrier { kind: Kind::Loads, .. } => {}
            Op::Fence(kind) => {
                cpu.order();
                match kind {
                    Kind::All => self.fenced.update(|fenced| fenced | 1 << thread),
                    _ => {
                        hardware.order_stores(thread);
                        self.stores_fenced.update(|fenced| fenced | 1 << thread);
                    }
                }
            }
            Op::Barrier { kind: Kind::All, shared: true } if hardware.has_pending(thread) => {
                machine.wait_for_completion()
            }
            Op::Barrier { kind: Kind::Stores, .. } | Op::Barrier { shared: true, .. } => {
                cpu.spend(machine.costs().publish);
                cpu.order();
                hardware.publish(thread);
            }
            Op::Barrier { .. } => {
                cpu.spend(machine.costs().complete);
                cpu.order();
                hardware.complete_here(thread);
            }
            Op::Exception { .. } => {
                cpu.spend(machine.costs().exception);
                cpu.order();
                hardware.synchronise(thread);
            }
            Op::Synchronise => {
                cpu.order();
                if self.test.x86 {
                    hardware.drain(thread);
                }
                hardware.synchronise(thread);
            }
            Op::Invalidate { scope, broadcast } => {
                machine.tlbi(self.layout.tlbi(self.test, *scope, *broadcast));
            }
            Op::InvalidateNow(scope) => self.invalidate_here(cpu, *scope),
            Op::Shootdown(scope) => self.shoot(cpu, *scope),
            Op::Switch(space) => {
                cpu.order();
                if self.test.x86 {
                    hardware.drain(thread);
                    hardware.load_root(thread, self.layout.spaces[*space]);
                    self.invalidate_here(cpu, Scope::Space(*space));
                } else {
                    hardware.switch_root(thread, self.layout.spaces[*space]);
                }
            }
        }
        Ok(None)
    }

    fn load(&self, cpu: Cpu<'_>, at: &Place) -> Result<u64, Fault> {
        let hardware = &self.machine.hardware;
        match at {
            Place::Virtual(address) => {
                let translated = self.translate(self.request(cpu.id(), *address, false))?;
                // A load finds what its CPU has stored to the same place.
                if hardware.visible_to(cpu.id(), translated.pa())
                    != hardware.memory.read(translated.pa())
                {
                    hardware.drain(cpu.id());
                }
                Ok(self.machine.do_access(translated, None))
            }
            Place::Physical(location) => {
                cpu.spend(self.machine.costs().load);
                cpu.order();
                let pa = self.layout.locate(self.test, location);
                hardware.disturb(cpu.id(), Some(pa));
                Ok(hardware.visible_to(cpu.id(), pa))
            }
        }
    }

    fn store(&self, cpu: Cpu<'_>, at: &Place, value: u64, release: bool) -> Result<(), Fault> {
        let hardware = &self.machine.hardware;
        match at {
            Place::Virtual(address) => {
                let translated = self.translate(self.request(cpu.id(), *address, true))?;
                // It goes past the buffer.
                hardware.drain(cpu.id());
                self.machine.do_access(translated, Some(value));
            }
            Place::Physical(location) => {
                cpu.spend(self.machine.costs().entry);
                cpu.order();
                let pa = self.layout.locate(self.test, location);
                let how = if release { How::Release } else { How::Plain };
                hardware.store_slowly(cpu.id(), pa, value, how);
            }
        }
        Ok(())
    }

    fn change(
        &self,
        cpu: Cpu<'_>,
        at: &Place,
        change: &Change,
        value: &Value,
    ) -> Result<u64, Fault> {
        let hardware = &self.machine.hardware;
        let thread = cpu.id();
        let translated = match at {
            Place::Virtual(address) => Some(self.translate(self.request(thread, *address, true))?),
            Place::Physical(_) => {
                cpu.spend(self.machine.costs().exchange);
                cpu.order();
                None
            }
        };
        let pa = match (at, &translated) {
            (Place::Physical(location), _) => self.layout.locate(self.test, location),
            (_, Some(translated)) => translated.pa(),
            _ => return Ok(0),
        };
        hardware.drain(thread);
        let old = hardware.memory.read(pa);
        let operand = self.evaluate(thread, value);
        let new = match change {
            Change::CompareSwap(expected) if self.evaluate(thread, expected) != old => old,
            Change::Swap | Change::CompareSwap(_) => operand,
            Change::Set => old | operand,
            Change::Clear => old & !operand,
            Change::Add => old.wrapping_add(operand),
        };
        hardware.memory.write(pa, new);
        Ok(old)
    }

    fn invalidate_here(&self, cpu: Cpu<'_>, scope: Scope) {
        let hardware = &self.machine.hardware;
        cpu.spend(self.machine.costs().issue);
        cpu.order();
        hardware.drain(cpu.id());
        hardware.invalidate(cpu.id(), self.layout.tlbi(self.test, scope, false));
        hardware.complete_here(cpu.id());
        hardware.synchronise(cpu.id());
    }

    /// Interrupts the others and waits for them.
    fn shoot(&self, cpu: Cpu<'_>, scope: Scope) {
        // One at a time.
        while self.asked.get().is_some() {
            self.answer(cpu);
            cpu.spend(Time::ns(10));
            cpu.order();
        }
        cpu.order();
        if self.test.x86 {
            // The interrupt is sent when stores before it are visible.
            self.machine.hardware.drain(cpu.id());
        }
        self.answered.set(1 << cpu.id());
        self.asked.set(Some((cpu.id(), scope)));
        let all = (1u64 << self.test.threads()) - 1;
        while self.answered.get() | self.finished.get() != all {
            cpu.spend(Time::ns(10));
            cpu.order();
        }
        self.asked.set(None);
    }

    /// Takes an interrupt, if there is one.
    fn answer(&self, cpu: Cpu<'_>) {
        cpu.order();
        if let Some((by, scope)) = self.asked.get()
            && by != cpu.id()
            && self.answered.get() >> cpu.id() & 1 == 0
        {
            self.invalidate_here(cpu, scope);
            self.answered.update(|answered| answered | 1 << cpu.id());
        }
    }
}

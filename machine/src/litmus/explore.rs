//! All executions of a test.
//!
//! # What an execution is
//!
//! A CPU executes out of order. Each instruction of a test takes one or a few steps; an access to a virtual address takes
//! two: it is **translated** (a look into the TLB, or a walk, one descriptor that may change at a time) and it is
//! **performed** (a load reads, a store enters the buffer). Between any two steps, anything may happen that the
//! hardware is free to do. The explorer tries every order of all steps, depth first, and goes on from each state once.
//! The rules, with the sections of DDI 0487 and SDM that they are from, are in `docs/litmus.md`; in short:
//!
//! * A translation may be made at any time after the last context synchronisation event. No barrier holds it back; with
//!   FEAT_ETS2 a DSB does.
//! * An access is performed after its translation, after what barriers and dependencies say, and so that one physical
//!   location is read and written in the order of the program.
//! * A store is performed when it is certain to be executed: all before it is translated and all branches are decided.
//!   The same holds for a translation that sets the dirty state.
//! * A fault is taken when everything before it is done; what comes after it starts anew. With FEAT_ETS2, and on x86,
//!   the walk that faults is made then, and not before.
//! * A DSB that completes a broadcast invalidation finds no access of another CPU that is under way through what was
//!   invalidated: it was performed, and its store is visible, or it is translated anew.
//!
//! # What need not be tried
//!
//! The set of outcomes is the same without the following, which would only multiply the states.
//!
//! * *Evictions.* A CPU may ignore what its TLB or its walk cache holds; that is as if it were gone. It may do so for one
//!   access and not for the next, as CPUs with several levels of TLBs do.
//! * *Translations that are thrown away.* One that a context synchronisation event or a fault discards has left nothing
//!   but what a speculative fill leaves, and those are tried. So a translation waits for such an event, and a fault is
//!   found only where nothing after it has begun.
//! * *Fills that are not used*: of an address that the CPU does not access any more, unless they set an access flag.
//! * *Waiting for nothing*: a step that only its own CPU sees, and after which that CPU may do all that it might before,
//!   is taken at once.

use std::collections::HashSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::layout::{self, Layout};
use super::program::*;
use crate::hardware::{Cause, Fault, Hardware, Image, Look, Request, Translated, Walking};
use crate::tlb::{Stages, Tlbi};

/// Why a test was not explored.
///
/// ```
/// use tablewright_machine::litmus::ExploreError;
/// assert_eq!(ExploreError::TooManyStates(7).to_string(), "more than 7 states");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExploreError {
    /// It has more states than were allowed.
    TooManyStates(usize),
    /// No execution comes to its end: the test waits for what never happens.
    NoEnd,
    /// The test needs more memory than the explorer gives.
    NoMemory,
}

impl fmt::Display for ExploreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyStates(limit) => write!(f, "more than {limit} states"),
            Self::NoEnd => f.write_str("no execution comes to its end"),
            Self::NoMemory => f.write_str("too little memory for its tables"),
        }
    }
}

impl std::error::Error for ExploreError {}

/// What the executions of a test came to.
#[derive(Clone, Debug)]
pub struct Explored {
    /// How many states there are.
    pub states: usize,
    /// How many of them are ends.
    pub ends: usize,
    /// For each outcome that the test asks about, in order.
    pub outcomes: Vec<Reached>,
}

/// Whether executions came to an outcome.
#[derive(Clone, Debug)]
pub struct Reached {
    /// At least one did: the first that was found, step by step.
    pub witness: Option<Vec<String>>,
    /// All did.
    pub always: bool,
}

impl Reached {
    /// Whether this is as a verdict says.
    pub fn agrees(&self, verdict: Verdict) -> bool {
        match verdict {
            Verdict::Allowed => self.witness.is_some(),
            Verdict::Forbidden => self.witness.is_none(),
            Verdict::Required => self.always,
        }
    }
}

/// Tries all executions of a test, of at most `limit` states.
///
/// ```
/// use tablewright_machine::litmus::{Profile, Verdict, explore, parse};
/// let tests = parse("example.litmus", "
/// test CoWTf.inv+po
/// data a = 1
/// map x invalid
/// thread
///     STR leaf(a), [pte(x)]
///     LDR r0, [x]
/// ask 0:r0 = fault
/// ")?;
/// let base = explore(&tests[0], Profile::Base, 1_000)?;
/// assert!(base.outcomes[0].agrees(Verdict::Allowed));
/// let ets2 = explore(&tests[0], Profile::Ets2, 1_000)?;
/// assert!(ets2.outcomes[0].agrees(Verdict::Forbidden));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`ExploreError`].
pub fn explore(test: &Test, profile: Profile, limit: usize) -> Result<Explored, ExploreError> {
    let architecture = layout::architecture(test, profile);
    let memory = layout::memory(test);
    let hardware = Hardware::new(architecture, test.threads(), memory, 0, None);
    hardware.explore();
    let layout = Layout::build(test, &hardware).ok_or(ExploreError::NoMemory)?;
    for (cpu, thread) in test.code.iter().enumerate() {
        hardware.load_root(cpu, layout.spaces[thread.space]);
    }
    let explorer = Explorer {
        test,
        profile,
        hardware,
        layout,
    };
    explorer.run(limit)
}

/// What has become of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Nothing yet.
    Idle,
    /// Its walk stands before a descriptor that may change.
    Walking(Walking),
    /// Translated. `true`: it has set the dirty state, so that the store must come.
    Translated(Translated, bool),
    /// It will fault. `true`: an invalidation elsewhere does not matter to it any more.
    Faulty(Fault, bool),
    /// In the store buffer.
    Buffered(Option<Translated>),
    /// A shootdown that these CPUs have answered.
    Shooting(u8),
    Done(Got),
}

/// What an instruction has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Got {
    Nothing,
    /// A value, and how it was read.
    Value(u64, Source),
    Fault(Fault),
}

/// Where a value comes from: as long as something before it is still to be performed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Source {
    pa: u64,
    /// Which store wrote it.
    writer: u8,
    by: Option<Translated>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    phases: Vec<Vec<Phase>>,
    cores: Vec<Image>,
    /// Which stores are in each buffer.
    stores: Vec<Vec<u8>>,
    words: Vec<u64>,
    /// The store that wrote each word last.
    writers: Vec<u8>,
}

/// The walker wrote a word after the store with the rest of the number.
const BY_WALKER: u8 = 1 << 7;

fn store_number(thread: usize, at: usize) -> u8 {
    (thread * 16 + at + 1) as u8
}

/// One step.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A store leaves a buffer.
    Drain(usize, usize),
    /// An invalidation takes effect before it has to.
    Effect(usize, usize),
    /// A speculative walk for an address, from the root or a table that is known.
    Fill(usize, usize, Option<u8>),
    /// An instruction does what it does, in this way.
    Do(usize, usize, Way),
    /// A CPU takes the interrupt of a shootdown.
    Interrupt(usize, usize, usize),
}

/// Not from a table that is known, but from what is remembered of stage 2 alone.
const SECOND: u8 = u8::MAX;

/// How an instruction goes on.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// It looks for a translation where the hardware does first.
    Look,
    /// It walks, whatever the TLB holds.
    Walk(Option<u8>),
    /// Its walk goes on.
    WalkOn,
    /// It is performed, or executed.
    Perform,
    /// Its fault is certain.
    CommitFault,
    /// Its fault is taken.
    TakeFault,
}

struct Explorer<'t> {
    test: &'t Test,
    profile: Profile,
    hardware: Hardware,
    layout: Layout,
}

/// A state on the way, and the steps from there that are to be tried.
struct Visit {
    state: State,
    steps: Vec<Step>,
    next: usize,
}

impl Explorer<'_> {
    fn run(&self, limit: usize) -> Result<Explored, ExploreError> {
        let mut seen = HashSet::new();
        let mut outcomes: Vec<Reached> = self
            .test
            .asks
            .iter()
            .map(|_| Reached {
                witness: None,
                always: true,
            })
            .collect();
        let mut ends = 0;
        let mut path = Vec::new();
        let first = self.first();
        seen.insert(fingerprint(&first));
        path.push(self.visit(first));
        self.judge(&path, &mut outcomes, &mut ends);
        while let Some(visit) = path.last_mut() {
            let Some(&step) = visit.steps.get(visit.next) else {
                path.pop();
                continue;
            };
            visit.next += 1;
            let Some(next) = self.take(&visit.state, step) else {
                continue;
            };
            if seen.insert(fingerprint(&next)) {
                if seen.len() > limit {
                    return Err(ExploreError::TooManyStates(limit));
                }
                path.push(self.visit(next));
                self.judge(&path, &mut outcomes, &mut ends);
            }
        }
        if ends == 0 {
            return Err(ExploreError::NoEnd);
        }
        Ok(Explored {
            states: seen.len(),
            ends,
            outcomes,
        })
    }

    fn first(&self) -> State {
        let words = &self.layout.words;
        let cpus = self.test.threads();
        let mut state = State {
            phases: self
                .test
                .code
                .iter()
                .map(|t| vec![Phase::Idle; t.code.len()])
                .collect(),
            cores: (0..cpus).map(|cpu| self.hardware.save(cpu)).collect(),
            stores: vec![Vec::new(); cpus],
            words: words
                .iter()
                .map(|&pa| self.hardware.memory.read(pa))
                .collect(),
            writers: vec![0; words.len()],
        };
        self.settle(&mut state);
        state
    }

    fn visit(&self, state: State) -> Visit {
        let steps = self.steps(&state);
        Visit {
            state,
            steps,
            next: 0,
        }
    }

    fn is_end(&self, state: &State) -> bool {
        let done = |phase: &Phase| matches!(phase, Phase::Done(_));
        state.phases.iter().enumerate().all(|(thread, phases)| {
            let code = &self.test.code[thread].code;
            phases
                .iter()
                .zip(code)
                .all(|(phase, i)| done(phase) || is_derived(&i.op))
        })
    }

    /// If the last state is an end, what it says of the outcomes.
    fn judge(&self, path: &[Visit], outcomes: &mut [Reached], ends: &mut usize) {
        let Some(end) = path.last().filter(|visit| self.is_end(&visit.state)) else {
            return;
        };
        *ends += 1;
        for (ask, reached) in self.test.asks.iter().zip(outcomes) {
            if !self.holds(&end.state, &ask.outcome) {
                reached.always = false;
            } else if reached.witness.is_none() {
                let taken = path
                    .iter()
                    .filter_map(|visit| visit.steps.get(visit.next.checked_sub(1)?));
                reached.witness = Some(taken.map(|&step| self.name(step)).collect());
            }
        }
    }

    // ---- What may happen next ----

    fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        for thread in 0..self.test.threads() {
            if self.instructions(state, thread, &mut steps) {
                // The last is one that no other CPU sees.
                return steps.split_off(steps.len() - 1);
            }
        }
        for (cpu, core) in state.cores.iter().enumerate() {
            self.hardware.load_image(cpu, core);
            for at in self.hardware.drainable(cpu) {
                steps.push(Step::Drain(cpu, at));
            }
            for (number, (_, done)) in core.pending().iter().enumerate() {
                if !done {
                    steps.push(Step::Effect(cpu, number));
                }
            }
        }
        for thread in 0..self.test.threads() {
            self.fills(state, thread, &mut steps);
        }
        steps
    }

    fn fills(&self, state: &State, cpu: usize, steps: &mut Vec<Step>) {
        // The flags that walks set are seen by every CPU, whatever is remembered.
        let sets_flags = cpu == 0 && self.hardware.architecture.hardware_access;
        for address in 0..self.test.addresses.len() {
            let va = self.test.addresses[address].va;
            let flags = sets_flags && self.has_old(state);
            if !flags && !self.wants(state, cpu, va, va) {
                continue;
            }
            steps.push(Step::Fill(cpu, address, None));
            if self.test.guest {
                steps.push(Step::Fill(cpu, address, Some(SECOND)));
            }
            if self.layout.deep {
                let known = state.cores[cpu].known(&self.hardware, va);
                steps.extend(
                    known
                        .into_iter()
                        .map(|depth| Step::Fill(cpu, address, Some(depth))),
                );
            }
        }
    }

    /// Some leaf in the test has a clear access flag.
    fn has_old(&self, state: &State) -> bool {
        let x86 = self.test.x86;
        state
            .words
            .iter()
            .any(|&word| Flag::Valid.is_in(x86, word) && !Flag::Accessed.is_in(x86, word))
    }

    /// Whether a CPU may still ask for a translation of one of these addresses.
    fn wants(&self, state: &State, cpu: usize, first: u64, last: u64) -> bool {
        let code = &self.test.code[cpu].code;
        code.iter().zip(&state.phases[cpu]).any(|(i, phase)| {
            let open = !matches!(phase, Phase::Done(_) | Phase::Buffered(_));
            open && matches!(i.op.place(), Some(&Place::Virtual(a)) if {
                let va = self.test.addresses[a].va;
                first <= va && va <= last
            })
        })
    }

    /// The steps that the instructions of a thread may take. `true`: the last is to be taken before all others.
    fn instructions(&self, state: &State, thread: usize, steps: &mut Vec<Step>) -> bool {
        let x86 = self.test.x86;
        let code = &self.test.code[thread].code;
        let phases = &state.phases[thread];
        let mut before = Before::default();
        for (at, (instruction, phase)) in code.iter().zip(phases).enumerate() {
            let op = &instruction.op;
            let perform = Step::Do(thread, at, Way::Perform);
            let waiting = *phase == Phase::Idle;
            match op {
                Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                    match self.access(state, thread, at, &before, steps) {
                        Next::Now => return true,
                        Next::Stop => return false,
                        Next::On => {}
                    }
                }
                Op::Fence(Kind::Stores) if waiting && before.stores_buffered => {
                    steps.push(perform);
                    return true;
                }
                Op::Barrier { kind, .. } if waiting => {
                    let ready = before.system_done
                        && match kind {
                            Kind::All => before.all_done,
                            Kind::Loads => before.loads_done,
                            Kind::Stores => before.stores_buffered,
                        };
                    if ready {
                        steps.push(perform);
                        let core = &state.cores[thread];
                        let quiet = core.buffered().next().is_none() && core.pending().is_empty();
                        if quiet || *kind == Kind::Loads {
                            return true;
                        }
                    }
                }
                Op::Synchronise if waiting && before.is_certain() && before.system_done => {
                    steps.push(perform);
                    return true;
                }
                Op::Invalidate { .. } if waiting && before.system_done => {
                    steps.push(perform);
                }
                Op::Switch(_) if waiting => {
                    let ready = if x86 {
                        before.all_done
                    } else {
                        before.is_certain() && before.system_done
                    };
                    if ready {
                        steps.push(perform);
                    }
                }
                Op::InvalidateNow(_) if waiting && before.all_done => steps.push(perform),
                Op::Shootdown(_) if waiting => {
                    let ready = if x86 {
                        before.all_done && before.all_drained
                    } else {
                        before.is_certain() && before.system_done
                    };
                    if ready {
                        steps.push(perform);
                    }
                }
                Op::Shootdown(_) => {
                    if let Phase::Shooting(answered) = phase {
                        let others = (0..self.test.threads()).filter(|&cpu| cpu != thread);
                        for cpu in others.filter(|cpu| answered >> cpu & 1 == 0) {
                            if self.may_be_interrupted(state, cpu) {
                                steps.push(Step::Interrupt(thread, at, cpu));
                            }
                        }
                    }
                }
                _ => {}
            }
            before.pass(self, state, thread, at);
        }
        false
    }

    /// The steps that an access may take.
    fn access(
        &self,
        state: &State,
        thread: usize,
        at: usize,
        before: &Before,
        steps: &mut Vec<Step>,
    ) -> Next {
        let x86 = self.test.x86;
        let op = &self.test.code[thread].code[at].op;
        let phase = &state.phases[thread][at];
        let step = |way| Step::Do(thread, at, way);
        let address_known = before.address_known(self, state, thread, op);
        let mut place = None;
        match (phase, op.place()) {
            (Phase::Idle, Some(&Place::Virtual(address))) => {
                let published = self.profile != Profile::Ets2 || before.published;
                if before.synchronised && published && address_known {
                    let request = self.request(thread, op, address);
                    steps.push(step(Way::Look));
                    self.hardware.load_image(thread, &state.cores[thread]);
                    let held = self.hardware.holds(thread, request);
                    let known = if self.layout.deep {
                        state.cores[thread].known(&self.hardware, request.va)
                    } else {
                        Vec::new()
                    };
                    if held || !known.is_empty() {
                        steps.push(step(Way::Walk(None)));
                        if self.test.guest {
                            steps.push(step(Way::Walk(Some(SECOND))));
                        }
                    }
                    steps.extend(known.into_iter().map(|depth| step(Way::Walk(Some(depth)))));
                }
            }
            (Phase::Idle, Some(Place::Physical(location))) if address_known => {
                place = Some(self.layout.locate(self.test, location));
            }
            (Phase::Walking(_), _) => steps.push(step(Way::WalkOn)),
            (Phase::Translated(translated, _), _) => place = Some(translated.pa()),
            (Phase::Faulty(_, certain), _) => {
                if before.all_done {
                    steps.push(step(Way::TakeFault));
                    return Next::Now;
                }
                if !certain
                    && self.is_in_order(state, thread, at, before)
                    && self.may_be_certain(state, thread, at)
                {
                    steps.push(step(Way::CommitFault));
                    return Next::Now;
                }
                return Next::Stop;
            }
            _ => {}
        }
        if let Some(pa) = place
            && self.is_in_order(state, thread, at, before)
            && (!op.writes() || self.is_stored_in_order(state, thread, at, pa))
            && (!x86 || before.all_done)
        {
            steps.push(step(Way::Perform));
        }
        Next::On
    }

    /// Whether barriers and dependencies let an access be performed.
    fn is_in_order(&self, state: &State, thread: usize, at: usize, before: &Before) -> bool {
        let op = &self.test.code[thread].code[at].op;
        if before.barred {
            return false;
        }
        let (acquire, release) = match op {
            Op::Load { acquire, .. } => (*acquire, false),
            Op::Store { release, .. } => (false, *release),
            Op::Atomic {
                acquire, release, ..
            } => (*acquire, *release),
            _ => (false, false),
        };
        let certain = !op.writes()
            || (before.is_certain() && !before.stores_barred && self.has_data(state, thread, op));
        certain
            && (!acquire || before.releases_drained)
            && (!release || (before.all_done && before.all_drained))
    }

    /// Whether the fault of an access may be bound to be taken, as far as the accesses before it are concerned. One that
    /// has no translation may be about any place with the same offset in a page, and comes after all of those; others
    /// come after the translations of the same address (the model of Arm: `same-loc` of faults, `TLBI-ob`).
    fn may_be_certain(&self, state: &State, thread: usize, at: usize) -> bool {
        let code = &self.test.code[thread].code;
        let place = code[at].op.place();
        let untranslated = matches!(
            state.phases[thread][at],
            Phase::Faulty(Fault::Translation { .. } | Fault::Address, _)
        );
        code[..at]
            .iter()
            .zip(&state.phases[thread])
            .all(|(before, phase)| match before.op.place() {
                Some(Place::Virtual(_)) if untranslated => matches!(phase, Phase::Done(_)),
                before if before == place => !matches!(phase, Phase::Idle | Phase::Walking(_)),
                _ => true,
            })
    }

    fn has_data(&self, state: &State, thread: usize, op: &Op) -> bool {
        let known = |value: &Value| match value {
            Value::Register(register) => self.is_known(state, thread, *register),
            _ => true,
        };
        match op {
            Op::Store { value, data, .. } => {
                known(value) && data.is_none_or(|register| self.is_known(state, thread, register))
            }
            Op::Atomic { change, value, .. } => {
                let expected = match change {
                    Change::CompareSwap(expected) => known(expected),
                    _ => true,
                };
                expected && known(value)
            }
            _ => true,
        }
    }

    /// Before a store is performed, what comes before it at the same place has to be: loads, or they would read it;
    /// stores, or they would overwrite it. An atomic access goes past the buffer.
    fn is_stored_in_order(&self, state: &State, thread: usize, at: usize, pa: u64) -> bool {
        let code = &self.test.code[thread].code;
        let atomic = matches!(code[at].op, Op::Atomic { .. });
        let earlier = state.phases[thread][..at].iter().enumerate();
        earlier
            .filter(|(_, phase)| !matches!(phase, Phase::Done(_)))
            .all(|(i, phase)| {
                let there = self.place_of(thread, i, phase);
                there != Some(pa) || (!atomic && matches!(phase, Phase::Buffered(_)))
            })
    }

    /// Where an access goes, if that is known.
    fn place_of(&self, thread: usize, at: usize, phase: &Phase) -> Option<u64> {
        match (self.test.code[thread].code[at].op.place()?, phase) {
            (Place::Physical(location), _) => Some(self.layout.locate(self.test, location)),
            (_, Phase::Translated(translated, _) | Phase::Buffered(Some(translated))) => {
                Some(translated.pa())
            }
            (_, Phase::Done(Got::Value(_, source))) => Some(source.pa),
            _ => None,
        }
    }

    /// Whether a register has its value.
    fn is_known(&self, state: &State, thread: usize, register: usize) -> bool {
        self.register(state, thread, register).is_some()
    }

    fn register(&self, state: &State, thread: usize, register: usize) -> Option<u64> {
        let code = &self.test.code[thread].code;
        let writer = code
            .iter()
            .position(|i| i.op.register() == Some(register))?;
        match state.phases[thread][writer] {
            Phase::Done(Got::Value(value, _)) => Some(value),
            Phase::Done(_) => Some(0),
            _ => None,
        }
    }

    /// An interrupt is taken between two instructions: all before are done, nothing after has been but loads.
    fn may_be_interrupted(&self, state: &State, cpu: usize) -> bool {
        let phases = &state.phases[cpu];
        let Some(first) = self.first_open(state, cpu) else {
            return true;
        };
        (first..phases.len()).all(|at| !self.is_committed(cpu, at, &phases[at]))
    }

    fn first_open(&self, state: &State, cpu: usize) -> Option<usize> {
        let code = &self.test.code[cpu].code;
        let closed = |phase: &Phase| matches!(phase, Phase::Done(_) | Phase::Buffered(_));
        let open = |(i, phase): (&Instruction, &Phase)| !closed(phase) && !is_derived(&i.op);
        code.iter().zip(&state.phases[cpu]).position(open)
    }

    /// Whether an instruction has done what cannot be taken back.
    fn is_committed(&self, thread: usize, at: usize, phase: &Phase) -> bool {
        match phase {
            Phase::Idle | Phase::Walking(_) | Phase::Translated(_, false) => false,
            Phase::Faulty(_, certain) => *certain,
            Phase::Translated(_, true) | Phase::Buffered(_) | Phase::Shooting(_) => true,
            Phase::Done(_) => !matches!(self.test.code[thread].code[at].op, Op::Load { .. }),
        }
    }

    fn request(&self, thread: usize, op: &Op, address: usize) -> Request {
        let va = self.test.addresses[address].va;
        let request = if op.writes() {
            Request::write(va)
        } else {
            Request::read(va)
        };
        if self.test.code[thread].user {
            request.by_user()
        } else {
            request
        }
    }

    // ---- A step ----

    /// The state after a step; `None` if it cannot be taken after all.
    fn take(&self, state: &State, step: Step) -> Option<State> {
        let hardware = &self.hardware;
        for (&pa, &word) in self.layout.words.iter().zip(&state.words) {
            hardware.memory.write(pa, word);
        }
        for (cpu, core) in state.cores.iter().enumerate() {
            hardware.load_image(cpu, core);
        }
        let mut next = state.clone();
        for phase in next.phases.iter_mut().flatten() {
            if let Phase::Walking(walking) = phase {
                *walking = hardware.revive(*walking);
            }
        }
        // What a core looks like from here on, unless the hardware says.
        let mut kept = None;
        match step {
            Step::Drain(cpu, at) => {
                hardware.drain_one(cpu, at);
                let number = next.stores[cpu].remove(at);
                self.drained(&mut next, cpu, number);
            }
            Step::Effect(cpu, number) => hardware.take_effect_of(cpu, number),
            Step::Fill(cpu, address, depth) => {
                let mut request = Request::read(self.test.addresses[address].va);
                request.user = self.test.code[cpu].user;
                let look = self.start(cpu, request, depth)?;
                if let Look::Found(found) = hardware.stride(cpu, look, |at| self.changes(at)) {
                    hardware.join(cpu, found);
                }
            }
            Step::Interrupt(thread, at, cpu) => self.interrupt(&mut next, thread, at, cpu),
            Step::Do(thread, at, way) => kept = self.act(state, &mut next, thread, at, way)?,
        }
        self.read_back(state, &mut next, kept);
        Some(next)
    }

    /// Takes the state of the hardware into `next`.
    fn read_back(&self, state: &State, next: &mut State, kept: Option<(usize, Image)>) {
        let hardware = &self.hardware;
        for cpu in 0..next.cores.len() {
            next.cores[cpu] = hardware.save(cpu);
            // All that was in the buffer is in memory.
            if next.cores[cpu].buffered().next().is_none() {
                for number in std::mem::take(&mut next.stores[cpu]) {
                    self.drained(next, cpu, number);
                }
            }
            for phase in &mut next.phases[cpu] {
                if let Phase::Walking(walking) = phase {
                    *phase = if hardware.is_lost(cpu, walking) {
                        Phase::Idle
                    } else {
                        Phase::Walking(Hardware::settled(*walking))
                    };
                }
            }
        }
        if let Some((cpu, before)) = kept {
            next.cores[cpu].keep(&before);
        }
        let words = next.words.iter_mut().zip(&mut next.writers);
        for ((&pa, (word, writer)), &old) in self.layout.words.iter().zip(words).zip(&state.writers)
        {
            let now = hardware.memory.read(pa);
            if now != *word && *writer == old {
                *writer |= BY_WALKER;
            }
            *word = now;
        }
        self.settle(next);
    }

    /// Leaves out of a state what does not matter any more.
    fn settle(&self, state: &mut State) {
        for cpu in 0..state.cores.len() {
            let mut core = std::mem::take(&mut state.cores[cpu]);
            let root = core.root();
            core.forget(
                &self.hardware,
                |first, last| self.wants(state, cpu, first, last),
                |known| {
                    self.layout.deep
                        && (self.layout.shared_ids
                            || !self.is_derivable(
                                root,
                                known.first,
                                known.depth,
                                known.table,
                                known.id,
                            ))
                },
            );
            state.cores[cpu] = core;
            // Which write a load has read matters to accesses before it that are still to be performed.
            for (phase, instruction) in state.phases[cpu].iter_mut().zip(&self.test.code[cpu].code)
            {
                match phase {
                    Phase::Done(Got::Value(_, source)) => *source = Source::default(),
                    Phase::Done(_) | Phase::Buffered(_) => {}
                    _ if instruction.op.place().is_none() => {}
                    _ => break,
                }
            }
        }
    }

    /// Whether the way to a table is through descriptors that are not written, so that remembering it adds nothing.
    fn is_derivable(
        &self,
        root: Option<(u64, u16)>,
        first: u64,
        depth: u8,
        table: u64,
        id: u16,
    ) -> bool {
        let Some((root, root_id)) = root else {
            return false;
        };
        if root_id != id {
            return false;
        }
        let mut at = root;
        for level in (depth + 1..=3).rev() {
            let entry = at + (first >> (12 + 9 * u32::from(level)) & 0x1ff) * 8;
            let descriptor = self.hardware.memory.read(entry);
            if self.layout.written.binary_search(&entry).is_ok() || descriptor & 1 == 0 {
                return false;
            }
            at = descriptor & 0x0000_ffff_ffff_f000;
        }
        at == table
    }

    /// Whether a walk has to stop before a descriptor, because it matters when it is read.
    fn changes(&self, at: u64) -> bool {
        self.layout.deep && self.layout.changing.binary_search(&at).is_ok()
    }

    fn word(&self, pa: u64) -> Option<usize> {
        self.layout.words.binary_search(&pa).ok()
    }

    /// A store has come to memory.
    fn drained(&self, next: &mut State, cpu: usize, number: u8) {
        let at = usize::from(number - 1) % 16;
        if let Some(pa) = self.place_of(cpu, at, &next.phases[cpu][at])
            && let Some(word) = self.word(pa)
        {
            next.writers[word] = number;
        }
        next.phases[cpu][at] = Phase::Done(Got::Nothing);
    }

    /// What comes after this instruction has not begun.
    fn flush(&self, next: &mut State, cpu: usize, from: usize) {
        for phase in &mut next.phases[cpu][from..] {
            *phase = Phase::Idle;
        }
    }

    fn interrupt(&self, next: &mut State, thread: usize, at: usize, cpu: usize) {
        if let Some(first) = self.first_open(next, cpu) {
            self.flush(next, cpu, first);
        }
        if let Op::Shootdown(scope) = self.test.code[thread].code[at].op {
            let tlbi = self.layout.tlbi(self.test, scope, false);
            self.hardware.drain(cpu);
            self.hardware.invalidate(cpu, tlbi);
            self.hardware.complete_here(cpu);
            self.hardware.synchronise(cpu);
        }
        let Phase::Shooting(answered) = &mut next.phases[thread][at] else {
            return;
        };
        *answered |= 1 << cpu;
        let all = (1u8 << self.test.threads()) - 1;
        if *answered | 1 << thread == all {
            next.phases[thread][at] = Phase::Done(Got::Nothing);
        }
    }

    /// An instruction goes on. Gives what a TLB held before, if that stays whatever the walk has found.
    fn act(
        &self,
        state: &State,
        next: &mut State,
        thread: usize,
        at: usize,
        way: Way,
    ) -> Option<Option<(usize, Image)>> {
        let hardware = &self.hardware;
        let op = &self.test.code[thread].code[at].op;
        match way {
            Way::Look | Way::Walk(_) | Way::WalkOn => {
                return self.translate(state, next, thread, at, way);
            }
            Way::CommitFault => {
                if let Phase::Faulty(_, certain) = &mut next.phases[thread][at] {
                    *certain = true;
                }
            }
            Way::TakeFault => {
                if let Phase::Faulty(fault, _) = next.phases[thread][at] {
                    // Entry and return are context synchronisation events.
                    hardware.synchronise(thread);
                    self.flush(next, thread, at + 1);
                    next.phases[thread][at] = Phase::Done(Got::Fault(fault));
                }
            }
            Way::Perform => match op {
                Op::Load { .. } => self.read(next, thread, at)?,
                Op::Store { value, .. } => self.write(next, thread, at, value)?,
                Op::Atomic {
                    change,
                    register,
                    value,
                    ..
                } => self.change(next, thread, at, change, register.is_some(), value)?,
                _ => {
                    next.phases[thread][at] = Phase::Done(Got::Nothing);
                    self.execute(next, thread, at, op)?;
                }
            },
        }
        Some(None)
    }

    /// An instruction that is not an access.
    fn execute(&self, next: &mut State, thread: usize, at: usize, op: &Op) -> Option<()> {
        let hardware = &self.hardware;
        match *op {
            Op::Fence(_) => hardware.order_stores(thread),
            Op::Barrier {
                kind: Kind::Loads, ..
            } => {}
            Op::Barrier {
                kind: Kind::Stores, ..
            } => hardware.publish(thread),
            Op::Barrier { shared, .. } => {
                hardware.publish(thread);
                if shared {
                    let pending: Vec<Tlbi> = next.cores[thread]
                        .pending()
                        .iter()
                        .map(|&(tlbi, _)| tlbi)
                        .collect();
                    self.wait_for_others(next, thread, &pending)?;
                    hardware.complete(thread);
                } else {
                    hardware.complete_here(thread);
                }
            }
            Op::Synchronise => hardware.synchronise(thread),
            Op::Invalidate { scope, broadcast } => {
                hardware.invalidate(thread, self.layout.tlbi(self.test, scope, broadcast));
            }
            Op::InvalidateNow(scope) => {
                hardware.invalidate(thread, self.layout.tlbi(self.test, scope, false));
                hardware.complete_here(thread);
                hardware.synchronise(thread);
            }
            Op::Switch(space) => {
                if self.test.x86 {
                    let flush = self.layout.tlbi(self.test, Scope::Space(space), false);
                    hardware.load_root(thread, self.layout.spaces[space]);
                    hardware.invalidate(thread, flush);
                    hardware.complete_here(thread);
                } else {
                    hardware.load_root(thread, self.layout.spaces[space]);
                }
            }
            Op::Shootdown(_) if self.test.threads() > 1 => {
                next.phases[thread][at] = Phase::Shooting(0)
            }
            _ => {}
        }
        Some(())
    }

    /// Accesses of others through what was invalidated are done, or are translated anew. `None`: they have to be done
    /// first.
    ///
    /// A load that was performed before an earlier one of the same address has been translated goes with that one: of
    /// one address no CPU reads something new and then something old (the catalogue's `coRR-pte9`).
    fn wait_for_others(&self, next: &mut State, thread: usize, pending: &[Tlbi]) -> Option<()> {
        for cpu in (0..next.cores.len()).filter(|&cpu| cpu != thread) {
            let id = next.cores[cpu].id();
            let code = &self.test.code[cpu].code;
            let committed_from = |phases: &[Phase], from: usize| {
                (from..phases.len()).any(|at| self.is_committed(cpu, at, &phases[at]))
            };
            // Places whose accesses are not translated.
            let mut open = Vec::new();
            for at in 0..code.len() {
                let phases = &mut next.phases[cpu];
                let covers = |translated: &Translated| {
                    pending
                        .iter()
                        .any(|tlbi| tlbi.broadcast && translated.is_covered(tlbi))
                };
                let place = code[at].op.place();
                match &phases[at] {
                    Phase::Buffered(Some(translated)) if covers(translated) => return None,
                    Phase::Translated(translated, _) if covers(translated) => {
                        if committed_from(phases, at) {
                            return None;
                        }
                        phases[at] = Phase::Idle;
                    }
                    // It comes after what it may be about, and that is not visible yet.
                    Phase::Done(Got::Fault(Fault::Translation { .. }))
                        if pending.iter().any(|tlbi| self.is_about(cpu, at, id, tlbi))
                            && phases[..at]
                                .iter()
                                .any(|phase| matches!(phase, Phase::Buffered(Some(_)))) =>
                    {
                        return None;
                    }
                    Phase::Faulty(_, false)
                        if pending.iter().any(|tlbi| self.is_about(cpu, at, id, tlbi)) =>
                    {
                        phases[at] = Phase::Idle;
                    }
                    Phase::Done(Got::Value(
                        _,
                        Source {
                            by: Some(translated),
                            ..
                        },
                    )) if covers(translated) && open.contains(&place) => {
                        // What depends on it goes too.
                        if committed_from(phases, at) {
                            return None;
                        }
                        self.flush(next, cpu, at);
                    }
                    _ => {}
                }
                if matches!(next.phases[cpu][at], Phase::Idle | Phase::Walking(_))
                    && place.is_some()
                {
                    open.push(place);
                }
            }
        }
        Some(())
    }

    /// Whether an invalidation names the address of an access.
    fn is_about(&self, cpu: usize, at: usize, id: Option<u16>, tlbi: &Tlbi) -> bool {
        let Some(&Place::Virtual(address)) = self.test.code[cpu].code[at].op.place() else {
            return false;
        };
        let va = self.test.addresses[address].va;
        tlbi.broadcast
            && tlbi.stages != Stages::Second
            && tlbi.id.is_none_or(|named| Some(named) == id)
            && tlbi
                .range
                .is_none_or(|(first, last)| first <= va && va <= last)
    }

    fn translate(
        &self,
        state: &State,
        next: &mut State,
        thread: usize,
        at: usize,
        way: Way,
    ) -> Option<Option<(usize, Image)>> {
        let hardware = &self.hardware;
        let op = &self.test.code[thread].code[at].op;
        let look = match way {
            Way::WalkOn => match next.phases[thread][at] {
                Phase::Walking(walking) => Look::Walking(walking),
                _ => return None,
            },
            _ => {
                let Some(&Place::Virtual(address)) = op.place() else {
                    return None;
                };
                let request = self.request(thread, op, address);
                match way {
                    Way::Walk(depth) => self.start(thread, request, depth)?,
                    _ if self.test.guest => hardware
                        .look_combined(thread, request)
                        .or_else(|| hardware.look_second(thread, request))
                        .or_else(|| hardware.start_at(thread, request, None))?,
                    _ => hardware.look(thread, request),
                }
            }
        };
        let held = hardware.save(thread);
        let before = Before::of(self, state, thread, at);
        next.phases[thread][at] = match hardware.stride(thread, look, |at| self.changes(at)) {
            Look::Walking(walking) => Phase::Walking(walking),
            Look::Fault(fault) => {
                // What comes after has not begun, or it would be thrown away.
                if state.phases[thread][at + 1..]
                    .iter()
                    .any(|phase| *phase != Phase::Idle)
                {
                    return None;
                }
                let early =
                    hardware.fault_is_early(thread) || !before.all_done || !before.all_drained;
                let stale = matches!(fault, Fault::Permission { .. }) && !self.test.x86;
                if self.profile != Profile::Base && early && !stale {
                    return None;
                }
                Phase::Faulty(fault, false)
            }
            Look::Found(translated) => {
                let translated = hardware.join(thread, translated);
                let dirtied = op.writes() && self.is_dirtied(state);
                if dirtied && !(before.is_certain() && self.is_unread(state, thread, at)) {
                    return None;
                }
                Phase::Translated(translated.settled(), dirtied)
            }
        };
        Some(Some((thread, held)))
    }

    /// Starts a walk at the root or a table that is known; of a guest, also where it is known what stage 2 says.
    fn start(&self, cpu: usize, request: Request, from: Option<u8>) -> Option<Look> {
        match from {
            Some(SECOND) => self.hardware.look_second(cpu, request),
            depth => self.hardware.start_at(cpu, request, depth),
        }
    }

    /// Whether nothing before an instruction still has to read a word that a walk has just written.
    fn is_unread(&self, state: &State, thread: usize, at: usize) -> bool {
        let open = |i: &usize| !matches!(state.phases[thread][*i], Phase::Done(_));
        (0..at)
            .filter(open)
            .all(|i| match self.test.code[thread].code[i].op.place() {
                Some(Place::Physical(location)) => {
                    let pa = self.layout.locate(self.test, location);
                    self.word(pa)
                        .is_none_or(|word| self.hardware.memory.read(pa) == state.words[word])
                }
                _ => true,
            })
    }

    /// Whether a walk has set the dirty state of a leaf since `state`.
    fn is_dirtied(&self, state: &State) -> bool {
        let x86 = self.test.x86;
        let words = self.layout.words.iter().zip(&state.words);
        words.into_iter().any(|(&pa, &was)| {
            let is = self.hardware.memory.read(pa);
            is != was && Flag::Dirty.is_in(x86, is) && !Flag::Dirty.is_in(x86, was)
        })
    }

    // ---- Memory ----

    /// A load reads: what the thread has stored there and no other sees yet, or what is in memory.
    fn read(&self, next: &mut State, thread: usize, at: usize) -> Option<()> {
        let pa = self.place_of(thread, at, &next.phases[thread][at])?;
        let code = &self.test.code[thread].code;
        // The last store before it that goes there and is not performed.
        let mut forwarded = None;
        for i in (0..at).rev().filter(|&i| code[i].op.writes()) {
            let phase = &next.phases[thread][i];
            if self.place_of(thread, i, phase) != Some(pa) {
                continue;
            }
            match phase {
                // In memory, or in the buffer, where the hardware finds it.
                Phase::Done(_) | Phase::Buffered(_) => break,
                _ => {
                    let (Op::Store { value, .. }, true) =
                        (&code[i].op, self.has_data(next, thread, &code[i].op))
                    else {
                        return None;
                    };
                    forwarded = Some((self.evaluate(next, thread, value), store_number(thread, i)));
                    break;
                }
            }
        }
        let (value, writer) = forwarded.unwrap_or_else(|| self.current(next, thread, pa));
        self.check_loads(next, thread, at, pa, value, writer)?;
        let by = match next.phases[thread][at] {
            Phase::Translated(translated, _) => Some(translated),
            _ => None,
        };
        next.phases[thread][at] = Phase::Done(Got::Value(value, Source { pa, writer, by }));
        Some(())
    }

    /// What a load of this thread finds, and the store that wrote it.
    fn current(&self, next: &State, thread: usize, pa: u64) -> (u64, u8) {
        let value = self.hardware.visible_to(thread, pa);
        let mine = next.cores[thread].buffered().zip(&next.stores[thread]);
        let newest = mine
            .filter(|(to, _)| *to == pa)
            .map(|(_, &number)| number)
            .last();
        let writer = self.word(pa).map_or(0, |word| next.writers[word]);
        (value, newest.unwrap_or(writer))
    }

    /// Loads after this access that were performed before it have read nothing older than it does, or writes.
    fn check_loads(
        &self,
        next: &State,
        thread: usize,
        at: usize,
        pa: u64,
        value: u64,
        writer: u8,
    ) -> Option<()> {
        let later = next.phases[thread].iter().enumerate().skip(at + 1);
        for (_, phase) in later {
            if let Phase::Done(Got::Value(read, source)) = phase
                && source.pa == pa
            {
                let own = source.writer & !BY_WALKER;
                let newer = own != 0
                    && usize::from(own - 1) / 16 == thread
                    && usize::from(own - 1) % 16 > at;
                if !newer && (*read, source.writer) != (value, writer) {
                    return None;
                }
            }
        }
        Some(())
    }

    fn write(&self, next: &mut State, thread: usize, at: usize, value: &Value) -> Option<()> {
        let phase = next.phases[thread][at].clone();
        let pa = self.place_of(thread, at, &phase)?;
        let value = self.evaluate(next, thread, value);
        let number = store_number(thread, at);
        self.check_loads(next, thread, at, pa, value, number)?;
        self.hardware.buffer_store(thread, pa, value);
        next.stores[thread].push(number);
        next.phases[thread][at] = match phase {
            Phase::Translated(translated, _) => Phase::Buffered(Some(translated)),
            _ => Phase::Buffered(None),
        };
        Some(())
    }

    fn change(
        &self,
        next: &mut State,
        thread: usize,
        at: usize,
        change: &Change,
        loads: bool,
        value: &Value,
    ) -> Option<()> {
        let pa = self.place_of(thread, at, &next.phases[thread][at])?;
        let hardware = &self.hardware;
        if self.test.x86 {
            hardware.drain(thread);
        }
        let old = hardware.memory.read(pa);
        let operand = self.evaluate(next, thread, value);
        let new = match change {
            Change::Swap => operand,
            Change::CompareSwap(expected) if self.evaluate(next, thread, expected) != old => old,
            Change::CompareSwap(_) => operand,
            Change::Set => old | operand,
            Change::Clear => old & !operand,
            Change::Add => old.wrapping_add(operand),
        };
        let (read, writer) = self.current(next, thread, pa);
        let number = store_number(thread, at);
        self.check_loads(next, thread, at, pa, read, number)?;
        hardware.memory.write(pa, new);
        if let Some(word) = self.word(pa)
            && new != old
        {
            next.writers[word] = number;
            next.words[word] = new;
        }
        next.phases[thread][at] = Phase::Done(if loads {
            Got::Value(
                old,
                Source {
                    pa,
                    writer,
                    by: None,
                },
            )
        } else {
            Got::Nothing
        });
        Some(())
    }

    fn evaluate(&self, state: &State, thread: usize, value: &Value) -> u64 {
        match value {
            Value::Register(register) => self.register(state, thread, *register).unwrap_or(0),
            value => self.layout.evaluate(self.test, value),
        }
    }

    // ---- Outcomes ----

    fn holds(&self, state: &State, outcome: &Outcome) -> bool {
        let result = |thread: usize, at: usize| match state.phases[thread][at] {
            Phase::Done(Got::Value(value, _)) => End::Value(value),
            Phase::Done(Got::Fault(fault)) => End::Fault(fault),
            _ => End::Nothing,
        };
        let word = |pa: u64| self.word(pa).map_or(0, |word| state.words[word]);
        outcome.holds(self.test, &self.layout, &result, &word)
    }

    /// A step in words.
    fn name(&self, step: Step) -> String {
        match step {
            Step::Drain(cpu, _) => format!("{cpu}: a store becomes visible"),
            Step::Effect(cpu, _) => format!("{cpu}: an invalidation takes effect early"),
            Step::Fill(cpu, address, _) => {
                format!(
                    "{cpu}: a speculative walk for {}",
                    self.test.addresses[address].name
                )
            }
            Step::Interrupt(_, _, cpu) => format!("{cpu}: answers the shootdown"),
            Step::Do(thread, at, way) => {
                let text = &self.test.code[thread].code[at].text;
                let what = match way {
                    Way::Look => "looks for its translation",
                    Way::Walk(_) => "walks, whatever the TLB holds",
                    Way::WalkOn => "walks on",
                    Way::Perform => "is performed",
                    Way::CommitFault => "is bound to fault",
                    Way::TakeFault => "takes its fault",
                };
                format!("{thread}: {text}: {what}")
            }
        }
    }
}

/// Whether the other instructions of a thread may go on.
enum Next {
    On,
    /// Not those after this one.
    Stop,
    /// What was found is done first.
    Now,
}

/// Instructions that are done as soon as what they wait for is.
fn is_derived(op: &Op) -> bool {
    matches!(op, Op::Fence(Kind::All | Kind::Loads) | Op::Branch(_))
}

/// What is true of all instructions before one.
struct Before {
    /// They are done, stores at least in the buffer.
    all_done: bool,
    /// Stores have left it.
    all_drained: bool,
    loads_done: bool,
    stores_buffered: bool,
    releases_drained: bool,
    /// Accesses are translated, and none of them faults.
    translated: bool,
    decided: bool,
    /// Context synchronisation events.
    synchronised: bool,
    /// DSBs.
    published: bool,
    /// Barriers, invalidations, and writes to registers of the system.
    system_done: bool,
    /// A barrier holds accesses back.
    barred: bool,
    stores_barred: bool,
}

impl Default for Before {
    fn default() -> Self {
        Self {
            all_done: true,
            all_drained: true,
            loads_done: true,
            stores_buffered: true,
            releases_drained: true,
            translated: true,
            decided: true,
            synchronised: true,
            published: true,
            system_done: true,
            barred: false,
            stores_barred: false,
        }
    }
}

impl Before {
    fn of(explorer: &Explorer<'_>, state: &State, thread: usize, at: usize) -> Self {
        let mut before = Self::default();
        for i in 0..at {
            before.pass(explorer, state, thread, i);
        }
        before
    }

    /// It will be executed whatever comes.
    fn is_certain(&self) -> bool {
        self.translated && self.decided
    }

    fn address_known(
        &self,
        explorer: &Explorer<'_>,
        state: &State,
        thread: usize,
        op: &Op,
    ) -> bool {
        op.address()
            .is_none_or(|register| explorer.is_known(state, thread, register))
    }

    /// One more instruction comes before.
    fn pass(&mut self, explorer: &Explorer<'_>, state: &State, thread: usize, at: usize) {
        let op = &explorer.test.code[thread].code[at].op;
        let phase = &state.phases[thread][at];
        let done = matches!(phase, Phase::Done(_));
        let x86 = explorer.test.x86;
        match op {
            Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                let buffered = done || matches!(phase, Phase::Buffered(_));
                let physical = matches!(op.place(), Some(Place::Physical(_)));
                self.translated &= buffered
                    || matches!(phase, Phase::Translated(..))
                    || (physical && self.address_known(explorer, state, thread, op));
                self.all_done &= buffered;
                self.all_drained &= done;
                // An atomic access that returns nothing is no load to barriers for loads (DDI 0487 B2.3.7).
                if op.register().is_some() {
                    self.loads_done &= done;
                }
                if op.writes() {
                    self.stores_buffered &= buffered;
                }
                match op {
                    Op::Load { acquire: true, .. } | Op::Atomic { acquire: true, .. } => {
                        self.barred |= !done
                    }
                    _ => {}
                }
                match op {
                    Op::Store { release: true, .. } | Op::Atomic { release: true, .. } => {
                        self.releases_drained &= done;
                    }
                    _ => {}
                }
            }
            Op::Fence(Kind::All) => self.barred |= !(self.all_done && self.all_drained),
            Op::Fence(Kind::Loads) => self.barred |= !self.loads_done,
            Op::Fence(Kind::Stores) => {
                self.stores_barred |= !done;
                self.all_done &= done;
            }
            Op::Branch(register) => {
                self.decided &= explorer.is_known(state, thread, *register);
            }
            Op::Barrier { .. } => {
                self.published &= done;
                self.barred |= !done;
                self.system_done &= done;
                self.all_done &= done;
            }
            Op::Synchronise | Op::InvalidateNow(_) => {
                self.synchronised &= done;
                self.barred |= !done;
                self.system_done &= done;
                self.all_done &= done;
            }
            Op::Invalidate { .. } | Op::Shootdown(_) => {
                self.system_done &= done;
                self.all_done &= done;
                self.barred |= x86 && !done;
            }
            Op::Switch(_) => {
                self.system_done &= done;
                self.all_done &= done;
                if x86 {
                    self.synchronised &= done;
                    self.barred |= !done;
                }
            }
        }
    }
}

/// What an instruction, or a word, is in the end.
#[derive(Clone, Copy)]
pub(super) enum End {
    Nothing,
    Value(u64),
    Fault(Fault),
}

impl Outcome {
    /// Whether it holds, given the result of each instruction and the words in memory.
    pub(super) fn holds(
        &self,
        test: &Test,
        layout: &Layout,
        result: &dyn Fn(usize, usize) -> End,
        word: &dyn Fn(u64) -> u64,
    ) -> bool {
        let all = |outcome: &Self| outcome.holds(test, layout, result, word);
        let end = |term: &Term| match term {
            Term::Result(thread, at) => result(*thread, *at),
            Term::Memory(location) => End::Value(word(layout.locate(test, location))),
        };
        match self {
            Self::And(a, b) => all(a) && all(b),
            Self::Or(a, b) => all(a) || all(b),
            Self::Not(a) => !all(a),
            Self::Implies(a, b) => !all(a) || all(b),
            Self::Equal(term, value) => {
                matches!(end(term), End::Value(is) if is == layout.evaluate(test, value))
            }
            Self::Completed(term) => !matches!(end(term), End::Fault(_)),
            Self::Flag(flag, term) => {
                matches!(end(term), End::Value(is) if flag.is_in(test.x86, is))
            }
            Self::LeadsTo(term, page) => {
                let address = 0x0000_ffff_ffff_f000;
                matches!(end(term), End::Value(is) if is & address == layout.page(*page))
            }
            Self::Fault(term, kind, at) => {
                let End::Fault(fault) = end(term) else {
                    return false;
                };
                let (of, depth) = match fault {
                    Fault::Translation { depth } => (FaultKind::Translation, Some(depth)),
                    Fault::AccessFlag { depth } => (FaultKind::AccessFlag, Some(depth)),
                    Fault::Permission { depth } => (FaultKind::Permission, Some(depth)),
                    Fault::Address => (FaultKind::Translation, None),
                    Fault::Second { cause, depth, .. } => {
                        let of = match cause {
                            Cause::Translation => FaultKind::Translation,
                            Cause::AccessFlag => FaultKind::AccessFlag,
                            Cause::Permission => FaultKind::Permission,
                        };
                        (of, Some(depth))
                    }
                };
                (*kind == FaultKind::Any || *kind == of) && (at.is_none() || *at == depth)
            }
        }
    }
}

/// 128 bits, which two states share by chance too seldom to be seen.
fn fingerprint(state: &State) -> u128 {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        state.hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

//! All executions of a test.
//!
//! # What an execution is
//!
//! A CPU executes out of order. Each instruction of a test takes one or a few steps; an access to a
//! virtual address takes two: it is **translated** (a look into the TLB, or a walk, one descriptor
//! that may change at a time) and it is **performed** (a load reads, a store enters the buffer).
//! Between any two steps, anything may happen that the hardware is free to do. The explorer tries
//! every order of all steps, depth first, and goes on from each state once. The rules, with the
//! sections of DDI 0487 and SDM that they are from, are in `docs/MACHINE.md`; in short:
//!
//! * A translation may be made at any time after the last context synchronisation event. No barrier
//!   holds it back; with FEAT_ETS2 a DSB does.
//! * An access is performed after its translation, after what barriers and dependencies say, and so
//!   that one physical location is read and written in the order of the program.
//! * A walk that sets a flag may write it later than it reads the entry, up to the next DSB for all
//!   accesses. No other CPU writes the entry between that read and that write.
//! * A store is performed when it is certain to be executed: all before it is translated and all
//!   branches are decided. The same holds for a translation that sets the dirty state.
//! * A fault is taken when everything before it is done; what comes after it starts anew, barriers
//!   that did not have to wait for it among it. With FEAT_ETS2, and on x86, the walk that faults is
//!   made then, and not before.
//! * A DSB that completes a broadcast invalidation finds no access of another CPU that is under way
//!   through what was invalidated: it was performed, and its store is visible, or it is translated
//!   anew. Nor a fault that was taken while a store that orders it was not visible.
//!
//! # What need not be tried
//!
//! The set of outcomes is the same without the following, which would only multiply the states.
//!
//! * *Evictions.* A CPU may ignore what its TLB or its walk cache holds; that is as if it were
//!   gone. It may do so for one access and not for the next, as CPUs with several levels of TLBs
//!   do.
//! * *Translations that are thrown away.* One that a context synchronisation event or a fault
//!   discards has left nothing but what a speculative fill leaves, and those are tried. So a
//!   translation waits for such an event, and a fault is found only where nothing after it has
//!   begun.
//! * *Fills that are not used*: of an address that the CPU does not access any more, unless they
//!   set an access flag.
//! * *What an access's own walk remembers of a run of contiguous entries.* It uses the member that
//!   it has read; the run, or a member, is remembered by fills, which come at the same points. What
//!   stage 1 of a guest says is found the same way.
//! * *Walks of an access through another member of its run*, unless they set the dirty state there:
//!   a fill finds the same.
//! * *Waiting for nothing*: a step that only its own CPU sees, and after which that CPU may do all
//!   that it might before, is taken at once.

mod memory;
mod order;
mod ready;
mod state;
mod step;

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use super::herd::{canonical, show};
use super::layout::{self, Layout};
use super::outcome::End;
use super::program::*;
use crate::hardware::Hardware;
use order::is_derived;
use state::*;

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

/// The sum of a test's executions.
#[derive(Clone, Debug)]
pub struct Explored {
    /// How many states there are.
    pub states: usize,
    /// How many of them are ends.
    pub ends: usize,
    /// For each outcome that the test asks about, in order.
    pub outcomes: Vec<Reached>,
    /// Of a test in herd's notation: what herd would print of each end that is reached.
    pub finals: BTreeSet<String>,
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
/// let tests = parse(
///     "example.litmus",
///     "
/// test CoWTf.inv+po
/// data a = 1
/// map x invalid
/// thread
///     STR leaf(a), [pte(x)]
///     LDR r0, [x]
/// ask 0:r0 = fault
/// ",
/// )?;
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
        hardware.load_guest(cpu, layout.first_root().map(|root| (root, 0)));
    }
    let explorer = Explorer { test, profile, hardware, layout };
    explorer.run(limit)
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
        let mut outcomes: Vec<Reached> =
            self.test.asks.iter().map(|_| Reached { witness: None, always: true }).collect();
        let mut ends = 0;
        let mut finals = BTreeSet::new();
        let mut path = Vec::new();
        let first = self.first();
        seen.insert(fingerprint(&first));
        path.push(self.visit(first));
        self.judge(&path, &mut outcomes, &mut ends, &mut finals);
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
                self.judge(&path, &mut outcomes, &mut ends, &mut finals);
            }
        }
        if ends == 0 {
            return Err(ExploreError::NoEnd);
        }
        Ok(Explored { states: seen.len(), ends, outcomes, finals })
    }

    fn first(&self) -> State {
        let words = &self.layout.words;
        let cpus = self.test.threads();
        let mut state = State {
            phases: self.test.code.iter().map(|t| vec![Phase::Idle; t.code.len()]).collect(),
            cores: (0..cpus).map(|cpu| self.hardware.save(cpu)).collect(),
            stores: vec![Vec::new(); cpus],
            words: words.iter().map(|&pa| self.hardware.memory.read(pa)).collect(),
            writers: vec![0; words.len()],
            late: Vec::new(),
            early: Vec::new(),
        };
        self.normalise(&mut state);
        state
    }

    fn visit(&self, state: State) -> Visit {
        let steps = self.steps(&state);
        Visit { state, steps, next: 0 }
    }

    fn is_end(&self, state: &State) -> bool {
        self.is_complete(state)
            && state.late.is_empty()
            && self.test.assumptions.iter().all(|(thread, value)| {
                self.computed(state, *thread, value, false).is_none_or(|value| value != 0)
            })
    }

    fn is_complete(&self, state: &State) -> bool {
        let done = |phase: &Phase| matches!(phase, Phase::Done(_));
        state.phases.iter().enumerate().all(|(thread, phases)| {
            let code = &self.test.code[thread].code;
            phases.iter().zip(code).all(|(phase, i)| done(phase) || is_derived(&i.op))
        })
    }

    /// If the last state is an end, what it says of the outcomes.
    fn judge(
        &self,
        path: &[Visit],
        outcomes: &mut [Reached],
        ends: &mut usize,
        finals: &mut BTreeSet<String>,
    ) {
        let Some(end) = path.last().filter(|visit| self.is_end(&visit.state)) else {
            return;
        };
        *ends += 1;
        if !self.test.seen.is_empty() {
            finals.insert(self.seen(&end.state));
        }
        for (ask, reached) in self.test.asks.iter().zip(outcomes) {
            if !self.holds(&end.state, &ask.outcome) {
                reached.always = false;
            } else if reached.witness.is_none() {
                let taken =
                    path.iter().filter_map(|visit| visit.steps.get(visit.next.checked_sub(1)?));
                reached.witness = Some(taken.map(|&step| self.name(step)).collect());
            }
        }
    }

    fn holds(&self, state: &State, outcome: &Outcome) -> bool {
        let result = |thread: usize, at: usize| match state.phases[thread][at] {
            Phase::Done(Got::Value(value, _)) => End::Value(value),
            Phase::Done(Got::Fault(fault)) => End::Fault(fault),
            _ => End::Nothing,
        };
        let word = |pa: u64| match self.word(pa) {
            Some(word) => state.words[word],
            // What no step writes.
            None => self.hardware.memory.read(pa),
        };
        let computed = |thread: usize, value: &Value| self.evaluate(state, thread, value);
        outcome.holds(self.test, &self.layout, &result, &word, &computed)
    }

    /// An end in words, as far as it is reported.
    fn seen(&self, state: &State) -> String {
        let word = |location: &Location| {
            let pa = self.layout.locate(self.test, location);
            self.word(pa).map_or_else(|| self.hardware.memory.read(pa), |word| state.words[word])
        };
        let fault = |thread: usize, at: usize| match state.phases[thread][at] {
            Phase::Done(Got::Fault(fault)) => Some(fault),
            _ => None,
        };
        let value = |term: &Term| match term {
            Term::Memory(location) => word(location),
            Term::Computed(thread, value) => self.evaluate(state, *thread, value),
            Term::Result(..) => 0,
        };
        let parts =
            self.test.seen.iter().map(|seen| show(seen, self.test, &self.layout, &value, &fault));
        canonical(&parts.collect::<Vec<_>>().join(" "))
    }

    /// A step in words.
    fn name(&self, step: Step) -> String {
        match step {
            Step::Drain(cpu, _) => format!("{cpu}: a store becomes visible"),
            Step::Effect(cpu, _) => format!("{cpu}: an invalidation takes effect early"),
            Step::Fill(cpu, address, _) => {
                let named = self.test.addresses.get(address);
                let name = named.map_or("another page of a run", |named| &named.name);
                format!("{cpu}: a speculative walk for {name}")
            }
            Step::Interrupt(_, _, cpu) => format!("{cpu}: answers the shootdown"),
            Step::Flag(_) => "a flag, or what an atomic access stores, is written".to_owned(),
            Step::DoLate(thread, at, way) => {
                format!("{}, and writes later", self.name(Step::Do(thread, at, way)))
            }
            Step::Do(thread, at, way) => {
                let text = &self.test.code[thread].code[at].text;
                let what = match way {
                    Way::Look => "looks for its translation",
                    Way::Run => "looks for its run",
                    Way::Through(..) => "walks, and reads another entry of its run",
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

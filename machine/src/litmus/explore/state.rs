//! States of an execution, and the steps that lead from one to the next.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::super::program::PLACES;
use crate::hardware::{Fault, Image, KnownFirst, Translated, Walking};

/// The phase of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// Nothing yet.
    Idle,
    /// Its walk stands before a descriptor that may change.
    Walking(Walking, Option<KnownFirst>),
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

/// The value that an instruction has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Got {
    Nothing,
    /// A value, and how it was read.
    Value(u64, Source),
    Fault(Fault),
}

/// The source of a value: as long as something before it is still to be performed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub pa: u64,
    /// Which store wrote it.
    pub writer: u8,
    pub by: Option<Translated>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub phases: Vec<Vec<Phase>>,
    pub cores: Vec<Image>,
    /// Which stores are in each buffer.
    pub stores: Vec<Vec<u8>>,
    pub words: Vec<u64>,
    /// The store that wrote each word last.
    pub writers: Vec<u8>,
    /// Writes that are still to come.
    pub late: Vec<Late>,
    /// Invalidations that have taken effect before they had to.
    pub early: Vec<Early>,
}

/// An invalidation that has taken effect and is not complete: accesses that were translated before
/// are waited for, later ones are not.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Early {
    pub cpu: usize,
    /// Its place among those of its CPU.
    pub number: usize,
    /// By CPU, a bit for each access that was translated by then.
    pub translated: Vec<u32>,
}

/// The write of an access that reads and writes at one instant for all who write the word, and
/// later for those who read it: a flag that a walk has found clear, or an atomic access.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Late {
    pub cpu: usize,
    /// The access.
    pub at: usize,
    pub pa: u64,
    pub set: u64,
    pub clear: u64,
    /// It is the store of an atomic access.
    pub stored: bool,
}

/// Whether what an atomic access has stored is not visible yet.
pub(super) fn is_late(state: &State, cpu: usize, at: usize) -> bool {
    state.late.iter().any(|late| late.stored && late.cpu == cpu && late.at == at)
}

/// The walker wrote a word after the store with the rest of the number.
pub(super) const BY_WALKER: u8 = 1 << 7;

pub(super) fn store_number(thread: usize, at: usize) -> u8 {
    (thread * PLACES + at + 1) as u8
}

/// One step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A store leaves a buffer.
    Drain(usize, usize),
    /// An invalidation takes effect before it has to.
    Effect(usize, usize),
    /// A speculative walk for an address, from the root or a table that is known.
    Fill(usize, usize, Route),
    /// An instruction does what it does, in this way.
    Do(usize, usize, Way),
    /// An instruction does that, and the flag that its walk sets is written later.
    DoLate(usize, usize, Way),
    /// A write that is late becomes visible.
    Flag(usize),
    /// A CPU takes the interrupt of a shootdown.
    Interrupt(usize, usize, usize),
}

impl Step {
    /// The CPU whose walker may work.
    pub fn walker(&self) -> Option<usize> {
        match *self {
            Self::Fill(cpu, ..) | Self::Do(cpu, ..) | Self::DoLate(cpu, ..) => Some(cpu),
            _ => None,
        }
    }
}

/// How a walk is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub start: Start,
    /// Of a guest with a stage 1: which of those that are remembered says where in stage 2.
    pub first: Option<u8>,
    /// Of a contiguous run, the member is remembered alone.
    pub alone: bool,
}

/// The start of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    Root,
    /// A table that is known, with so many levels below it.
    Table(u8),
    /// A remembered translation of stage 2 alone.
    Second,
    /// A remembered contiguous run of stage 2.
    SecondRun,
    /// The entry of a guest's stage 1, and no further.
    First,
    /// All as it was before another root was loaded.
    AsBefore,
}

impl From<Start> for Route {
    fn from(start: Start) -> Self {
        Self { start, first: None, alone: false }
    }
}

/// How an instruction goes on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    /// It looks for a translation where the hardware does first.
    Look,
    /// It walks, whatever the TLB holds.
    Walk(Route),
    /// The contiguous run that the TLB has, if it has its member as well.
    Run,
    /// It walks as for another address of its contiguous run, which has this number.
    Through(usize, Route),
    /// Its walk goes on.
    WalkOn,
    /// It is performed, or executed.
    Perform,
    /// Its fault is certain.
    CommitFault,
    /// Its fault is taken.
    TakeFault,
}

/// 128 bits, which two states share by chance too seldom to be seen.
pub(super) fn fingerprint(state: &State) -> u128 {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        state.hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

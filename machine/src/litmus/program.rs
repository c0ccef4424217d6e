//! The parts of a litmus test, with all names resolved.

use std::fmt;

use crate::architecture::{Architecture, Granule, Ordering, Regime};

/// The rules that a test is run under.
///
/// ```
/// use tablewright_machine::litmus::Profile;
/// assert_eq!(Profile::Ets2.to_string(), "ets2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Armv8-A without FEAT_ETS2.
    Base,
    /// Armv8-A with FEAT_ETS2.
    Ets2,
    /// x86-64.
    X86,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Base => "base",
            Self::Ets2 => "ets2",
            Self::X86 => "x86",
        })
    }
}

/// The architecture's verdict on the outcome that a test asks about.
///
/// ```
/// use tablewright_machine::litmus::Verdict;
/// assert_eq!(Verdict::Required.to_string(), "required");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Some execution ends so.
    Allowed,
    /// No execution ends so.
    Forbidden,
    /// Every execution ends so.
    Required,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allowed => "allowed",
            Self::Forbidden => "forbidden",
            Self::Required => "required",
        })
    }
}

/// A litmus test, as [`parse`](super::parse()) gives it.
///
/// ```
/// use tablewright_machine::litmus::parse;
/// let text = "
/// test example
/// arch arm64
/// data a = 1
/// map x invalid
/// thread
///     STR leaf(a), [pte(x)]
///     LDR r0, [x]
/// ask 0:r0 = fault
///     base allowed
///     ets2 forbidden
/// ";
/// let tests = parse("example.litmus", text)?;
/// assert_eq!((tests[0].name.as_str(), tests[0].threads()), ("example", 1));
/// # Ok::<(), tablewright_machine::litmus::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Test {
    /// Its name.
    pub name: String,
    /// The source of the shape and the verdicts.
    pub source: String,
    /// One line on what happens in it.
    pub about: String,
    /// The file, and the line that it starts at.
    pub file: String,
    /// See `file`.
    pub line: usize,
    pub(crate) x86: bool,
    /// Its tables are those of stage 2, under a guest whose stage 1 is the identity, or what
    /// `stage1` says.
    pub(crate) guest: bool,
    pub(crate) herd: bool,
    /// The rules that it is for, if not for all of its architecture.
    pub(crate) profile: Option<Profile>,
    pub(crate) hardware_access: bool,
    pub(crate) hardware_dirty: bool,
    pub(crate) bbm: u8,
    pub(crate) spaces: Vec<Space>,
    pub(crate) data: Vec<Data>,
    pub(crate) addresses: Vec<Address>,
    pub(crate) tables: Vec<Table>,
    pub(crate) maps: Vec<Map>,
    /// The stage 1 of the guests, if they have one: what it says of addresses at first.
    pub(crate) stage1: Vec<(usize, Value)>,
    pub(crate) inits: Vec<(Location, Value)>,
    pub(crate) code: Vec<Thread>,
    pub(crate) asks: Vec<Ask>,
    /// By thread: an execution in which one is 0 is none.
    pub(crate) assumptions: Vec<(usize, Value)>,
    /// The parts of each end that are reported.
    pub(crate) seen: Vec<Seen>,
}

impl Test {
    /// Whether guests have a stage 1 that is not the identity.
    pub(crate) fn is_nested(&self) -> bool {
        !self.stage1.is_empty()
    }

    /// Whether it was read in herd's notation.
    pub fn is_herd(&self) -> bool {
        self.herd
    }

    /// How many CPUs it runs on.
    pub fn threads(&self) -> usize {
        self.code.len()
    }

    /// The outcomes that it asks about, in words.
    pub fn outcomes(&self) -> impl Iterator<Item = &str> {
        self.asks.iter().map(|ask| ask.text.as_str())
    }

    /// The profiles that it can be run under.
    pub fn profiles(&self) -> &'static [Profile] {
        match self.profile {
            _ if self.x86 => &[Profile::X86],
            Some(Profile::Ets2) => &[Profile::Ets2],
            _ => &[Profile::Base, Profile::Ets2],
        }
    }

    /// The verdict on outcome number `ask`, if the test gives one for this profile.
    pub fn expected(&self, ask: usize, profile: Profile) -> Option<Verdict> {
        let ask = self.asks.get(ask)?;
        let given = ask.verdicts.iter().find(|(p, _)| *p == profile);
        given.map(|&(_, verdict)| verdict)
    }

    /// Why the machine in virtual time does not show outcome number `ask`, which is allowed, if the
    /// test says so.
    pub fn only_explored(&self, ask: usize) -> Option<&str> {
        self.asks.get(ask)?.only_explored.as_deref()
    }

    /// Why no execution of the model shows outcome number `ask`, which is allowed, if the test says
    /// so.
    pub fn never_shown(&self, ask: usize) -> Option<&str> {
        self.asks.get(ask)?.never_shown.as_deref()
    }

    pub(crate) fn architecture(&self, profile: Profile) -> Architecture {
        let ordering = match profile {
            Profile::Base => Ordering::Base,
            Profile::Ets2 => Ordering::Ets2,
            Profile::X86 => Ordering::X86,
        };
        let stage1 = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
        let stage2 = Regime::Arm64Stage2 {
            granule: Granule::K4,
            input_bits: 48,
            wide: false,
            forced_write_back: false,
        };
        let base = if self.x86 {
            Architecture::x86_64(4)
        } else {
            Architecture {
                hardware_access: self.hardware_access,
                hardware_dirty: self.hardware_dirty,
                bbm: self.bbm,
                guest: self.guest.then_some(stage1),
                ..Architecture::arm64(if self.guest { stage2 } else { stage1 })
            }
        };
        Architecture { ordering, ..base }
    }
}

/// A set of tables with an identifier.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub name: String,
    pub id: u16,
}

/// A page whose first word has a name and a value.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    pub name: String,
    pub value: u64,
    /// The number of pages behind another, if the test says so.
    pub behind: Option<(usize, u64)>,
}

/// A virtual address.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub name: String,
    pub va: u64,
}

/// A table that is not linked at first.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub name: String,
    /// Levels below its entries.
    pub depth: u8,
}

/// The translation that a space has of an address at first.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    pub space: usize,
    pub address: usize,
    pub value: Value,
}

/// A word in physical memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// The first word of a page.
    Data(usize),
    /// The entry that translates an address, with so many levels below it.
    Entry { space: usize, address: usize, depth: u8 },
    /// The entry of a guest's stage 1.
    First(usize),
    /// The entry of a loose table that would.
    Slot { table: usize, address: usize },
}

/// A value that can be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Number(u64),
    /// A leaf that leads to a page: the bits besides the address, and whether it is a block.
    Leaf {
        page: usize,
        bits: u64,
        block: bool,
    },
    /// A leaf of stage 1 that leads to an address of stage 2.
    Intermediate {
        address: usize,
        bits: u64,
    },
    /// The translation of the page so many behind the first of a contiguous run.
    Member {
        page: usize,
        behind: u64,
        bits: u64,
    },
    /// A link to a loose table.
    Table(usize),
    /// A link to the table in which the entry stands.
    TableOf(Location),
    Register(usize),
    /// Of two values.
    Of(Arithmetic, Box<[Self; 2]>),
    /// The second where the first is not 0, and the third where it is.
    Choose(Box<[Self; 3]>),
    /// 1 if the instruction at this place has taken a fault.
    Faulted(usize),
}

/// A value that is computed of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Xor,
    Add,
    Subtract,
    And,
    Or,
    AndNot,
    Left,
    Right,
    /// 1 where they are equal.
    Equal,
    /// 1 where both are not 0: of no interest beyond the first that is.
    Both,
    /// 1 where one is not 0.
    Either,
}

/// The code of one CPU.
#[derive(Clone, Debug)]
pub(crate) struct Thread {
    pub space: usize,
    pub user: bool,
    /// Its walker leaves the access flag, or the dirty state, to software.
    pub leaves: (bool, bool),
    pub code: Vec<Instruction>,
}

/// One instruction: what it does, where it stands, and what it is called.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub op: Op,
    /// It accesses memory with the rights of an application.
    pub user: bool,
    pub label: Option<String>,
    pub text: String,
    /// It is executed where this is not 0.
    pub when: Option<Value>,
}

/// The place of an access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Virtual(usize),
    Physical(Location),
}

/// Which accesses a barrier is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    All,
    Loads,
    Stores,
}

/// The change that an atomic access makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Swap,
    CompareSwap(Value),
    Set,
    Clear,
    Add,
}

/// The scope of an invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Addresses of a space or of all.
    Address {
        at: Named,
        space: Option<usize>,
    },
    /// A space.
    Space(usize),
    All,
    /// Of a guest: addresses of stage 2, in what is remembered of stage 2 alone.
    Second {
        at: Named,
        space: usize,
    },
    /// Combined translations of its stage 1, at addresses or all.
    Combined {
        at: Option<Named>,
        space: usize,
    },
}

/// Addresses that an invalidation names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub address: usize,
    /// How many, from there on.
    pub pages: u64,
    pub leaves_only: bool,
    /// The hint of a level, as levels below it.
    pub depth: Option<u8>,
}

impl Named {
    /// One address, and everything about it.
    pub fn one(address: usize) -> Self {
        Self { address, pages: 1, leaves_only: false, depth: None }
    }
}

/// The operation of an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Load {
        register: usize,
        at: Place,
        acquire: bool,
        address: Vec<Value>,
    },
    Store {
        value: Value,
        at: Place,
        release: bool,
        address: Vec<Value>,
        data: Option<usize>,
    },
    Atomic {
        change: Change,
        register: Option<usize>,
        value: Value,
        at: Place,
        acquire: bool,
        release: bool,
        address: Vec<Value>,
    },
    /// DMB, MFENCE.
    Fence(Kind),
    /// DSB; to the other CPUs too, or only for this one.
    Barrier {
        kind: Kind,
        shared: bool,
    },
    /// ISB, IRET, CPUID.
    Synchronise,
    /// SVC: what follows is at EL1. ERET: it is where the thread is.
    Exception {
        enters: bool,
    },
    Invalidate {
        scope: Scope,
        broadcast: bool,
    },
    /// INVLPG: local, complete, and serialising.
    InvalidateNow(Scope),
    /// Every other CPU is interrupted, invalidates for itself and returns.
    Shootdown(Scope),
    /// MSR TTBR0, or MOV CR3.
    Switch(usize),
    /// A branch that depends on a register.
    Branch(usize),
}

impl Op {
    /// The register that it writes.
    pub fn register(&self) -> Option<usize> {
        match self {
            Self::Load { register, .. } => Some(*register),
            Self::Atomic { register, .. } => *register,
            _ => None,
        }
    }

    /// Reads to another register, if it reads to one.
    pub fn renumbered(mut self, to: usize) -> Self {
        match &mut self {
            Self::Load { register, .. } => *register = to,
            Self::Atomic { register: Some(register), .. } => *register = to,
            _ => {}
        }
        self
    }

    /// Returns the place at which it accesses memory.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::Load { at, .. } | Self::Store { at, .. } | Self::Atomic { at, .. } => Some(at),
            _ => None,
        }
    }

    /// The values that the address depends on.
    pub fn address(&self) -> &[Value] {
        match self {
            Self::Load { address, .. }
            | Self::Store { address, .. }
            | Self::Atomic { address, .. } => address,
            _ => &[],
        }
    }

    pub fn writes(&self) -> bool {
        matches!(self, Self::Store { .. } | Self::Atomic { .. })
    }

    /// Whether it is a load-acquire, and a store-release.
    pub fn acquires_releases(&self) -> (bool, bool) {
        match self {
            Self::Load { acquire, .. } => (*acquire, false),
            Self::Store { release, .. } => (false, *release),
            Self::Atomic { acquire, release, .. } => (*acquire, *release),
            _ => (false, false),
        }
    }
}

/// An outcome, and what is said of it.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub text: String,
    pub outcome: Outcome,
    pub verdicts: Vec<(Profile, Verdict)>,
    pub only_explored: Option<String>,
    pub never_shown: Option<String>,
}

/// A statement about the end of an execution.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    And(Box<Self>, Box<Self>),
    Or(Box<Self>, Box<Self>),
    Not(Box<Self>),
    Implies(Box<Self>, Box<Self>),
    Equal(Term, Value),
    Fault(Term, FaultKind, Option<u8>, Option<Stage>),
    Completed(Term),
    Flag(Flag, Term),
    /// One of these instructions of a thread has taken a fault, of this kind.
    FaultOf(usize, Vec<usize>, FaultKind),
    /// One entry at least of the contiguous run around the entry of an address has the flag.
    RunFlag(Flag, Location),
    LeadsTo(Term, usize),
}

/// Something that has a value in the end.
#[derive(Clone, Debug)]
pub(crate) enum Term {
    /// The result of an instruction: of this thread, at this place in it.
    Result(usize, usize),
    Memory(Location),
    /// A value, of what a thread has read.
    Computed(usize, Value),
}

/// A part of what is reported of an end.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub name: String,
    pub thread: usize,
    pub what: Observed,
}

/// A kind of thing to report.
#[derive(Clone, Debug)]
pub(crate) enum Observed {
    /// A value, and the labels that it may be.
    Value(Term, Vec<String>),
    /// Whether one of these instructions has taken a fault.
    Fault(Vec<usize>, FaultKind),
}

/// Of which stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    First,
    Second,
}

/// Which faults are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    Any,
    Translation,
    AccessFlag,
    Permission,
}

/// A property of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    Valid,
    Accessed,
    Dirty,
}

// The bits of descriptors that tests are about. DDI 0487 D8.3, SDM vol. 3A 5.5.4.
pub(crate) const ARM_READ_ONLY: u64 = 1 << 7;
pub(crate) const ARM_USER: u64 = 1 << 6;
pub(crate) const ARM_ACCESSED: u64 = 1 << 10;
pub(crate) const ARM_NOT_GLOBAL: u64 = 1 << 11;
pub(crate) const ARM_DBM: u64 = 1 << 51;
/// Inner shareable, never executable.
pub(crate) const ARM_LEAF: u64 = 3 << 8 | 3 << 53;
pub(crate) const X86_WRITE: u64 = 1 << 1;
pub(crate) const X86_USER: u64 = 1 << 2;
pub(crate) const X86_ACCESSED: u64 = 1 << 5;
pub(crate) const X86_DIRTY: u64 = 1 << 6;
pub(crate) const X86_SIZE: u64 = 1 << 7;
pub(crate) const X86_GLOBAL: u64 = 1 << 8;
pub(crate) const X86_NO_EXECUTE: u64 = 1 << 63;
/// Of stage 2: write-back, readable, inner shareable.
pub(crate) const STAGE2_LEAF: u64 = 0xf << 2 | 1 << 6 | 3 << 8;
pub(crate) const STAGE2_WRITE: u64 = 1 << 7;
/// One of a run of [`RUN`] entries that a TLB may hold as one, with 4 KiB pages (DDI 0487 D8.7.1).
pub(crate) const CONTIGUOUS: u64 = 1 << 52;
pub(crate) const RUN: u64 = 16;
/// Bits of an address within a run.
pub(crate) const IN_RUN: u64 = (RUN << 12) - 1;
pub(crate) const RUN_BITS: u8 = IN_RUN.trailing_ones() as u8;
pub(crate) const VALID: u64 = 1;

/// A thread has fewer instructions than this: the number of a store is made of its thread and its
/// place (`store_number`).
pub(crate) const PLACES: usize = 31;
/// Labels have the numbers from here, as if the code of a test were there.
pub(crate) const LABELS: u64 = 1 << 24;

impl Arithmetic {
    fn apply(self, a: u64, b: u64) -> u64 {
        match self {
            Self::Xor => a ^ b,
            Self::Add => a.wrapping_add(b),
            Self::Subtract => a.wrapping_sub(b),
            Self::And => a & b,
            Self::Or => a | b,
            Self::AndNot => a & !b,
            Self::Left => a.checked_shl(b as u32).unwrap_or(0),
            Self::Right => a.checked_shr(b as u32).unwrap_or(0),
            Self::Equal => u64::from(a == b),
            Self::Both => u64::from(a != 0 && b != 0),
            Self::Either => u64::from(a != 0 || b != 0),
        }
    }
}

impl Value {
    /// Computes it; `part` gives what is not computed. `None` as long as one that matters is not
    /// known.
    pub fn compute(&self, part: &dyn Fn(&Self) -> Option<u64>) -> Option<u64> {
        match self {
            Self::Of(operation, parts) => {
                let [a, b] = &**parts;
                let (a, b) = (a.compute(part), b.compute(part));
                match (operation, a, b) {
                    (Arithmetic::Both, Some(0), _) | (Arithmetic::Both, _, Some(0)) => Some(0),
                    (Arithmetic::Either, Some(one), None)
                    | (Arithmetic::Either, None, Some(one)) => (one != 0).then_some(1),
                    (_, Some(a), Some(b)) => Some(operation.apply(a, b)),
                    _ => None,
                }
            }
            Self::Choose(parts) => {
                let [condition, a, b] = &**parts;
                match condition.compute(part)? {
                    0 => b.compute(part),
                    _ => a.compute(part),
                }
            }
            value => part(value),
        }
    }

    /// The number that it is whatever is read.
    pub fn constant(&self) -> Option<u64> {
        self.compute(&|part| match part {
            Self::Number(number) => Some(*number),
            _ => None,
        })
    }

    /// Whether it is 0 where what is read is below `bound`, which is a power of two.
    pub fn is_zero(&self, bound: u64) -> bool {
        match self {
            Self::Of(operation, parts) => {
                let [a, b] = &**parts;
                match operation {
                    Arithmetic::Xor | Arithmetic::Subtract | Arithmetic::AndNot if a == b => true,
                    Arithmetic::And => {
                        let high = |mask: &Self| {
                            mask.constant().is_some_and(|mask| mask & (bound - 1) == 0)
                        };
                        a.is_zero(bound) || b.is_zero(bound) || high(a) || high(b)
                    }
                    Arithmetic::Left | Arithmetic::Right => a.is_zero(bound),
                    Arithmetic::Add | Arithmetic::Or | Arithmetic::Xor => {
                        a.is_zero(bound) && b.is_zero(bound)
                    }
                    _ => false,
                }
            }
            Self::Choose(parts) => parts[1].is_zero(bound) && parts[2].is_zero(bound),
            value => value.constant() == Some(0),
        }
    }

    /// How many values it is computed of.
    pub fn parts(&self) -> usize {
        match self {
            Self::Of(_, parts) => parts.iter().map(Self::parts).sum(),
            Self::Choose(parts) => parts.iter().map(Self::parts).sum(),
            _ => 1,
        }
    }

    /// Adds the registers that it is made of.
    pub fn registers(&self, to: &mut Vec<usize>) {
        match self {
            Self::Register(register) if !to.contains(register) => to.push(*register),
            Self::Of(_, parts) => parts.iter().for_each(|part| part.registers(to)),
            Self::Choose(parts) => parts.iter().for_each(|part| part.registers(to)),
            _ => {}
        }
    }

    /// Adds the registers that choose among others.
    pub fn choosers(&self, to: &mut Vec<usize>) {
        match self {
            Self::Of(_, parts) => parts.iter().for_each(|part| part.choosers(to)),
            Self::Choose(parts) => {
                parts[0].registers(to);
                parts[1..].iter().for_each(|part| part.choosers(to));
            }
            _ => {}
        }
    }

    /// Whether it can be known, or guessed by which of others it is, when these registers are.
    pub fn is_available(&self, known: &dyn Fn(usize) -> bool) -> bool {
        match self {
            Self::Register(register) => known(*register),
            Self::Of(_, parts) => parts.iter().all(|part| part.is_available(known)),
            Self::Choose(parts) => parts[1..].iter().any(|part| part.is_available(known)),
            _ => true,
        }
    }

    pub fn is_contiguous(&self) -> bool {
        matches!(self, Self::Leaf { bits, .. } if bits & CONTIGUOUS != 0)
    }
}

impl Flag {
    /// Whether a leaf of the tables of `test` has it.
    pub fn is_in(self, test: &Test, descriptor: u64) -> bool {
        let valid = descriptor & VALID != 0;
        match (self, test.x86) {
            (Self::Valid, _) => valid,
            (Self::Accessed, true) => descriptor & X86_ACCESSED != 0,
            (Self::Accessed, false) => descriptor & ARM_ACCESSED != 0,
            (Self::Dirty, true) => descriptor & X86_DIRTY != 0,
            (Self::Dirty, false) if test.guest && !test.is_nested() => {
                descriptor & STAGE2_WRITE != 0
            }
            (Self::Dirty, false) => descriptor & ARM_READ_ONLY == 0,
        }
    }
}

//! The rules of the architecture, and what breaks them.
//!
//! # Obligations
//!
//! A processor may remember what a descriptor said for as long as it is not told to forget. So a
//! CPU that changes a descriptor that may be remembered takes on an **obligation**: to have what it
//! said invalidated. An obligation is *discharged* when an invalidation that the architecture says
//! covers it, made after the change was visible to walkers, is complete on every CPU that may
//! remember. Until then
//!
//! * the frame that the old descriptor led to must not be freed;
//! * where a break is demanded, the new descriptor must not be made;
//! * the identifier of a space that was taken away must not be given to another.
//!
//! To say that an invalidation is complete that does not discharge what it claims to is wrong there
//! and then, and no luck is needed to see it: not the processor that happens to use the old
//! translation, but the fact that one may, is the fault. What processors in fact remember is
//! simulated as well; the two have to agree, and each use of a stale translation is checked against
//! the list.
//!
//! Above a stage 2, a guest has a stage 1. What processors remember of both, combined, has the
//! guest's virtual address, and an invalidation by the address that the guest takes for physical
//! does not touch it (DDI 0487 D8.17). There an obligation is discharged in two steps: first what
//! was found of stage 2 alone is invalidated, by address, and that is complete; then what was
//! combined. The other way round a processor may combine anew what it still remembers of stage 2.
//! One operation that drops both does it in one step (TLBI VMALLS12E1; INVEPT; a flush by ASID of
//! AMD).
//!
//! The decision whether a change demands a break is written here from the manual (DDI 0487 D8.17.1,
//! R_WHZWS; SDM vol. 3A 5.10.4) and shares nothing with the engine's.

use std::fmt;

use tablewright_walker::{Descriptor, Leaf};

use crate::architecture::Architecture;
use crate::time::Time;
use crate::tlb::{Stages, Tlbi};

// One list, so that no rule is missing in another.
macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident = $name:literal,)*) => {
        /// A rule that a program can break. Numbered in the book's chapter on the model.
        ///
        /// ```
        /// use tablewright_machine::Rule;
        /// assert_eq!(Rule::BreakBeforeMake.to_string(), "break-before-make");
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Rule {
            $($(#[$doc])* $rule,)*
        }

        impl Rule {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$rule),*];
        }

        impl fmt::Display for Rule {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$rule => $name,)*
                })
            }
        }
    };
}

rules! {
    /// An entry that processors may remember was changed without the break that the architecture
    /// demands, or made before the break was complete.
    BreakBeforeMake = "break-before-make",
    /// An invalidation was said to be complete that does not cover what was changed, or was made
    /// before the change was visible to walkers.
    Invalidation = "invalidation",
    /// A change was never invalidated.
    NeverInvalidated = "never invalidated",
    /// A translation was used although nothing is left to invalidate: the simulation and the list
    /// disagree.
    StaleUse = "stale use",
    /// A table or a page was given back while a walker could reach it.
    FreedEarly = "freed early",
    /// A walker came to a frame that holds no table.
    WalkAstray = "walk astray",
    /// A table was linked before its entries were written, or without them being visible first.
    LinkedEarly = "linked early",
    /// The members of a contiguous run are not alike.
    BrokenRun = "broken run",
    /// One address was translated by entries of two sizes, or to two places, at once.
    Conflict = "conflict",
    /// An identifier was given to a space while entries of another may be remembered under it.
    IdentifierReused = "identifier reused",
    /// An accessed or dirty flag that hardware had set was overwritten by software that had not
    /// seen it.
    FlagLost = "flag lost",
    /// Memory was mapped that must not be; or it is named by an entry of x86 that is not present
    /// (the L1 terminal fault).
    ForbiddenMemory = "forbidden memory",
    /// A window does not show the frame that it was moved to.
    WindowStale = "window stale",
    /// Data was read from memory that a cache had newer, or code that the instruction cache had
    /// older.
    CacheMaintenance = "cache maintenance",
    /// A reserved form of a descriptor was used.
    Reserved = "reserved descriptor",
    /// An address that was to be mapped still faults, or the run gets nowhere.
    NoProgress = "no progress",
    /// An assertion of the program that ran.
    Program = "program",
}

/// A rule was broken: what, where, by which CPU, when, and how to see it again.
///
/// It prints as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// The event, and its place: addresses, entries, levels.
    pub what: String,
    /// The CPU that did it.
    pub cpu: usize,
    /// When.
    pub time: Time,
    /// The seed that replays it.
    pub seed: u64,
    /// The version of this program.
    pub version: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, what, cpu, time, seed, version } = self;
        write!(f, "{rule}: {what} (CPU {cpu} at {time}, seed {seed}, version {version})")
    }
}

impl std::error::Error for Violation {}

/// A set of CPUs. Most are of one, which takes no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cpus {
    first: Option<u16>,
    others: Vec<u16>,
}

impl Cpus {
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn contains(&self, cpu: usize) -> bool {
        let cpu = cpu as u16;
        self.first == Some(cpu) || self.others.contains(&cpu)
    }

    fn insert(&mut self, cpu: usize) {
        if self.is_empty() {
            self.first = Some(cpu as u16);
        } else if !self.contains(cpu) {
            self.others.push(cpu as u16);
        }
    }
}

/// An invalidation that is owed, and how far it has come.
#[derive(Clone, Debug)]
pub(crate) struct Obligation {
    /// Names it, and the tables that were detached with it.
    pub number: u64,
    pub space: u16,
    pub id: u16,
    pub global: bool,
    /// The addresses that the old descriptors translated.
    pub span: (u64, u64),
    /// Levels below the old descriptor.
    pub depth: u8,
    /// It was a table.
    pub table: bool,
    /// The table was detached. If not, it is the same with other rights, and what is below it was
    /// not touched.
    pub detached: bool,
    /// The depths of the leaves that are to be forgotten, as a bit set: its own; of a table, of
    /// those below it that are not global. Global ones are an obligation of their own, because more
    /// CPUs use them.
    pub leaves: u8,
    /// The smallest leaf or table of these is for so many bytes, as a power of two.
    pub unit: u8,
    /// Leaves below a table that was detached, here and there in the span.
    pub scattered: bool,
    /// It was a member of a contiguous run.
    pub contiguous: bool,
    /// The output address of the first, if it was a leaf; the table otherwise.
    pub pa: u64,
    /// The old descriptor, the first if several are one obligation.
    pub raw: u64,
    /// The CPU that changed it.
    pub writer: u16,
    /// The CPU that detached a table above it before the change was visible, and at what depth.
    pub cutter: Option<(u16, u8)>,
    /// The change is visible to walkers.
    pub published: bool,
    /// The new descriptor allows all that the old copy allows: at worst a spurious fault.
    pub harmless: bool,
    /// Invalidations that cover it were issued by these CPUs, to all.
    pub issued: Cpus,
    /// CPUs that have invalidated it for themselves; true when complete.
    pub local: Vec<(u16, bool)>,
    /// It was claimed to be invalidated by this CPU, and why that is not so.
    pub claimed: Option<(u16, &'static str)>,
    /// It may also be remembered in what was combined with the stage 1 of a guest.
    pub combined: bool,
    /// Then: what became of the part that is of stage 2 alone, if anything.
    pub second: Option<Box<Second>>,
    /// How often the program had looked when it arose.
    pub looks: u64,
}

/// How far the first step has come, where there are two: what was found of stage 2 alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Second {
    /// Invalidations on all CPUs were issued by these.
    issued: Cpus,
    /// One of them is complete.
    done: bool,
    /// CPUs that have invalidated it for themselves; true when complete.
    here: Vec<(u16, bool)>,
    /// The combined translation was invalidated before this step was done.
    overtaken: bool,
}

impl Second {
    /// On this CPU.
    fn is_done(&self, cpu: usize) -> bool {
        self.done || self.here.contains(&(cpu as u16, true))
    }

    fn issue(&mut self, cpu: usize, broadcast: bool) {
        if broadcast {
            self.issued.insert(cpu);
        } else if !self.here.iter().any(|&(told, _)| usize::from(told) == cpu) {
            self.here.push((cpu as u16, false));
        }
    }

    fn complete(&mut self, cpu: usize) {
        let this = cpu as u16;
        self.done |= self.issued.contains(cpu);
        for told in &mut self.here {
            told.1 |= told.0 == this;
        }
    }
}

impl Obligation {
    /// This CPU has said that it is invalidated.
    pub fn is_claimed_by(&self, cpu: usize) -> bool {
        self.claimed.is_some_and(|(by, _)| usize::from(by) == cpu)
    }

    /// The first of two steps is done on all CPUs.
    pub fn is_second_done(&self) -> bool {
        self.second.as_ref().is_some_and(|second| second.done)
    }

    fn is_second_issued(&self, cpu: usize) -> bool {
        let second = self.second.as_ref();
        second.is_some_and(|second| second.issued.contains(cpu))
    }

    /// Whether an invalidation is about all that it is made of, where it names the addresses.
    fn is_covered(&self, tlbi: &Tlbi) -> bool {
        let mut depths = (0..u8::BITS as u8).filter(|depth| self.leaves >> depth & 1 != 0);
        // An address takes the leaf around it, of which a part may be done with already.
        let within = (1u64 << self.unit) - 1;
        let span = (self.span.0 & !within, self.span.1 | within);
        tlbi.covers(self.id, self.global, span, self.depth, self.table)
            && depths.all(|depth| tlbi.suits(depth, false))
    }

    /// Whether it names all addresses of a table.
    fn is_spanned(&self, tlbi: &Tlbi) -> bool {
        self.leaves == 0 && tlbi.all_tables
            || tlbi.parts(self.span, self.unit).next() == Some(self.span)
    }

    /// An invalidation that covers it was issued: the first of two steps, or all there is.
    fn hear(&mut self, cpu: usize, tlbi: &Tlbi) {
        if self.combined && tlbi.stages == Stages::Second {
            let second = self.second.get_or_insert_default();
            second.issue(cpu, tlbi.broadcast);
        } else {
            self.tell(cpu, tlbi.broadcast);
        }
    }

    /// An invalidation that covers it was issued.
    fn tell(&mut self, cpu: usize, broadcast: bool) {
        if broadcast {
            self.issued.insert(cpu);
        } else if !self.local.iter().any(|&(told, _)| usize::from(told) == cpu) {
            self.local.push((cpu as u16, false));
        }
    }

    /// An invalidation of what was combined: the second step, if the first is done wherever this
    /// one reaches.
    fn issue_combined(&mut self, cpu: usize, tlbi: &Tlbi) {
        // The virtual addresses under which a guest has combined a page are not all known: less
        // than all is no step.
        if !self.published || !tlbi.is_all_combined(self.id) || self.issued.contains(cpu) {
            return;
        }
        let done = if tlbi.broadcast {
            self.is_second_done()
        } else {
            self.second.as_ref().is_some_and(|second| second.is_done(cpu))
        };
        if done {
            self.tell(cpu, tlbi.broadcast);
        } else {
            self.second.get_or_insert_default().overtaken = true;
        }
    }

    fn overlaps(&self, span: (u64, u64)) -> bool {
        self.span.0 <= span.1 && span.0 <= self.span.1
    }

    /// The part of it that translates `span`, which lies inside.
    fn part(&self, span: (u64, u64)) -> Self {
        let pa =
            if self.table || self.scattered { self.pa } else { self.pa + (span.0 - self.span.0) };
        Self { span, pa, ..self.clone() }
    }

    /// Bytes of memory that the old leaves led to.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let one = !self.table && !self.scattered;
        one.then(|| (self.pa, self.pa + (self.span.1 - self.span.0)))
    }
}

#[derive(Default)]
pub(crate) struct Obligations {
    /// Those that are not discharged.
    owed: Vec<Obligation>,
    /// The first `visible` entries of `owed` are visible to all CPUs.
    visible: usize,
    /// The number of the last.
    last: u64,
    /// How often the program has looked.
    looks: u64,
}

/// The number of the last obligations that may go on with a new one.
const NEAR: usize = 64;

impl Obligations {
    pub fn is_empty(&self) -> bool {
        self.owed.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Obligation> {
        self.owed.iter()
    }

    pub fn clear(&mut self) {
        self.owed.clear();
        self.visible = 0;
    }

    /// No CPU uses the space any more. What is global is used with any other.
    pub fn drop_of(&mut self, space: u16) {
        self.owed.retain(|o| o.space != space || o.global);
        self.visible = 0;
    }

    /// The space is loaded under another identifier, and no CPU has it loaded under the one before:
    /// what was changed visibly is remembered under none that is used.
    pub fn rename(&mut self, space: u16, id: u16, is_visible: impl Fn(&Obligation) -> bool) {
        self.owed.retain_mut(|o| {
            if o.space != space {
                return true;
            }
            o.id = id;
            o.global || !(o.published && is_visible(o))
        });
        self.visible = 0;
    }

    /// A number for the next.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Owes what is owed under one number under another as well.
    pub fn repeat(&mut self, number: u64, as_number: u64) {
        let of = |o: &&Obligation| o.number == number;
        let again = |o: &Obligation| Obligation { number: as_number, ..o.clone() };
        let mut more: Vec<_> = self.owed.iter().filter(of).map(again).collect();
        self.owed.append(&mut more);
    }

    /// The program looks: what arises from here on is later.
    pub fn look(&mut self) -> u64 {
        self.looks += 1;
        self.looks
    }

    /// Returns the obligations that arose in a range of a space before a look and are owed, though
    /// this CPU has seen the change; if it says so only those that it has caused itself. Of a table
    /// that reaches out of the range the part that is in it may have been forgotten.
    pub fn owed_before(
        &self,
        cpu: usize,
        space: u16,
        range: (u64, u64),
        look: u64,
        own: bool,
    ) -> Option<&Obligation> {
        self.owed.iter().find(|o| {
            let seen = !own && o.published || usize::from(o.writer) == cpu;
            let inside = range.0 <= o.span.0 && o.span.1 <= range.1;
            let meant = inside || !o.table && o.overlaps(range);
            seen && meant && o.space == space && o.looks < look && !o.harmless
        })
    }

    pub fn add(&mut self, mut new: Obligation) {
        new.looks = self.looks;
        // CPUs that change entries in turn have one each.
        let alike = |o: &Obligation| {
            (o.space, o.id, o.global, o.depth, o.table, o.contiguous)
                == (new.space, new.id, new.global, new.depth, new.table, new.contiguous)
                && (o.writer, o.published, o.harmless) == (new.writer, new.published, new.harmless)
                && (o.combined, o.scattered) == (new.combined, new.scattered)
                && o.looks == new.looks
                && o.second.is_none()
                && o.cutter.is_none()
                && o.issued.is_empty()
                && o.local.is_empty()
                && o.claimed.is_none()
        };
        let goes_on = |o: &Obligation| {
            o.span.1.wrapping_add(1) == new.span.0
                && o.pa.wrapping_add(o.span.1 - o.span.0).wrapping_add(1) == new.pa
                && (o.raw ^ new.raw) & TYPE == 0
                && alike(o)
        };
        if !new.table
            && !new.scattered
            && let Some(before) = self.owed.iter_mut().rev().take(NEAR).find(|o| goes_on(o))
        {
            before.span.1 = new.span.1;
            return;
        }
        self.owed.push(new);
    }

    /// Makes the changes of `cpu` visible.
    pub fn publish(&mut self, cpu: usize) {
        for obligation in &mut self.owed[self.visible..] {
            let cut = obligation.cutter.is_some_and(|(by, _)| usize::from(by) == cpu);
            obligation.published |= usize::from(obligation.writer) == cpu || cut;
        }
        let rest = self.owed[self.visible..].iter();
        self.visible += rest.take_while(|o| o.published).count();
    }

    /// `cpu` detaches a table with everything below it: what was changed there and is not visible
    /// yet is out of reach when the cut is.
    pub fn cut_off(&mut self, cpu: usize, space: u16, span: (u64, u64), depth: u8) {
        for o in &mut self.owed[self.visible..] {
            if !o.published && o.space == space && o.depth < depth && o.overlaps(span) {
                o.cutter = Some((cpu as u16, depth));
            }
        }
    }

    /// Whether an entry at this depth can tell this CPU of anything.
    pub fn is_news(&self, cpu: usize, depth: u8) -> bool {
        let others = |by: u16| usize::from(by) != cpu;
        self.owed[self.visible..].iter().any(|o| {
            let changed = o.depth == depth && others(o.writer);
            let cut = o.cutter.is_some_and(|(by, at)| at == depth && others(by));
            !o.published && (changed || cut)
        })
    }

    /// An entry was seen by this CPU: what another has changed there is visible to all, and what it
    /// has detached there is out of reach.
    pub fn observe(&mut self, cpu: usize, space: u16, span: (u64, u64), depth: u8) {
        for o in &mut self.owed[self.visible..] {
            let changed = usize::from(o.writer) != cpu && o.depth == depth;
            let cut = o.cutter.is_some_and(|(by, at)| usize::from(by) != cpu && at == depth);
            o.published |= (changed || cut) && o.space == space && o.overlaps(span);
        }
    }

    /// An invalidation was issued.
    pub fn issue(&mut self, cpu: usize, tlbi: &Tlbi) {
        let mut more = Vec::new();
        for obligation in &mut self.owed {
            if obligation.combined && tlbi.stages == Stages::First {
                obligation.issue_combined(cpu, tlbi);
                continue;
            }
            let first_step = obligation.combined && tlbi.stages == Stages::Second;
            let covered = obligation.published && obligation.is_covered(tlbi);
            if !covered || obligation.issued.contains(cpu) {
                continue;
            }
            if first_step && obligation.is_second_issued(cpu) {
                continue;
            }
            if obligation.table {
                // What is remembered of a table goes with any address below it, but not the leaves
                // below.
                if obligation.is_spanned(tlbi) {
                    obligation.hear(cpu, tlbi);
                }
                continue;
            }
            // What it covers only in part is an obligation for the rest.
            let last = obligation.span.1;
            let mut next = Some(obligation.span.0);
            let mut parts = tlbi.parts(obligation.span, obligation.unit).peekable();
            if parts.peek() == Some(&obligation.span) {
                drop(parts);
                obligation.hear(cpu, tlbi);
                continue;
            }
            let first = more.len();
            for (from, to) in parts {
                if let Some(next) = next.filter(|&next| next < from) {
                    more.push(obligation.part((next, from - 1)));
                }
                let mut part = obligation.part((from, to));
                part.hear(cpu, tlbi);
                more.push(part);
                next = to.checked_add(1);
            }
            if more.len() > first {
                if let Some(next) = next.filter(|&next| next <= last) {
                    more.push(obligation.part((next, last)));
                }
                *obligation = more.swap_remove(first);
            }
        }
        self.owed.append(&mut more);
    }

    /// A CPU says that what `tlbi` names of this space is invalidated once it is complete.
    pub fn claim(&mut self, cpu: usize, space: u16, range: (u64, u64), tlbi: &Tlbi) {
        for o in &mut self.owed {
            // What others have changed they invalidate themselves, each with what covers it.
            let named = o.space == space
                && usize::from(o.writer) == cpu
                && range.0 <= o.span.0
                && o.span.1 <= range.1;
            if !named || o.harmless || o.issued.contains(cpu) {
                continue;
            }
            let why = if !o.published {
                "it was issued before the change was visible to walkers: a barrier is missing"
            } else if o.combined && (o.is_second_done() || o.is_second_issued(cpu)) {
                if o.second.as_ref().is_some_and(|second| second.overtaken) {
                    "what was combined with the guest's stage 1 was invalidated before the \
                     invalidation by intermediate physical address was complete, and may have been \
                     combined anew"
                } else {
                    "what was combined with the guest's stage 1 is not invalidated"
                }
            } else if !tlbi.names(o.id, o.global) && o.global {
                "it spares global translations"
            } else if !tlbi.names(o.id, o.global) {
                "it names another identifier"
            } else if o.table && !tlbi.suits(o.depth, true) {
                "it is for leaves only, and a table was changed"
            } else if !o.is_covered(tlbi) && tlbi.depth.is_some() {
                "its level hint is wrong"
            } else if tlbi.stride.is_some_and(|stride| stride > o.unit) {
                "its stride passes over smaller leaves"
            } else if !tlbi.broadcast {
                continue;
            } else if !o.local.is_empty() || o.second.as_ref().is_some_and(|s| !s.here.is_empty()) {
                "not every CPU has been told"
            } else {
                "it does not reach all of it"
            };
            o.claimed = Some((cpu as u16, why));
        }
    }

    /// Completes the invalidations that `cpu` has issued. Gives the members of runs that were
    /// discharged, and what was claimed wrongly.
    pub fn complete(
        &mut self,
        cpu: usize,
        all_told: impl Fn(&Obligation) -> bool,
    ) -> (Vec<Obligation>, Vec<Obligation>) {
        let this = cpu as u16;
        let (mut discharged, mut wrong) = (Vec::new(), Vec::new());
        self.owed.retain_mut(|obligation| {
            for told in &mut obligation.local {
                told.1 |= told.0 == this;
            }
            if let Some(second) = &mut obligation.second {
                second.complete(cpu);
            }
            if obligation.issued.contains(cpu) || all_told(obligation) {
                if obligation.contiguous {
                    discharged.push(obligation.clone());
                }
                return false;
            }
            if obligation.claimed.is_some_and(|(by, _)| by == this) {
                wrong.push(obligation.clone());
                return false;
            }
            true
        });
        self.visible = 0;
        (discharged, wrong)
    }

    /// The obligation that stands in the way of making a new descriptor for `span`.
    pub fn about(&self, space: u16, span: (u64, u64)) -> impl Iterator<Item = &Obligation> {
        self.owed.iter().filter(move |o| o.space == space && o.overlaps(span))
    }

    /// The obligation that stands in the way of giving back memory.
    pub fn leading_to(&self, memory: (u64, u64)) -> Option<&Obligation> {
        self.owed.iter().find(|o| {
            o.memory().is_some_and(|(first, last)| first <= memory.1 && memory.0 <= last)
                && !o.harmless
        })
    }

    /// Excuses the changes under this number from being invalidated.
    pub fn excuse(&mut self, number: u64) {
        let under = self.owed.iter_mut().filter(|o| o.number == number);
        under.for_each(|o| o.harmless = true);
    }

    /// The obligation under which a table was detached, if it is not discharged.
    pub fn under(&self, number: u64) -> Option<&Obligation> {
        self.owed.iter().find(|o| o.number == number)
    }
}

/// Whether a processor may remember what a descriptor says (the catalogue of litmus tests; DDI 0487
/// D8.5, D8.16).
///
/// A leaf whose access flag is clear faults and is not remembered, unless the hardware sets the
/// flag, or another member of its run has it set.
pub(crate) fn may_be_remembered(
    architecture: &Architecture,
    descriptor: &Descriptor,
    run: bool,
) -> bool {
    match descriptor {
        Descriptor::Invalid | Descriptor::Reserved(_) => false,
        Descriptor::Table { .. } => true,
        Descriptor::Leaf(leaf) => {
            let flag = leaf.accessed || run || architecture.hardware_access;
            flag || architecture.family().remembers_unused
        }
    }
}

/// Whether `new` may take the place of `old` only after a break: why, or `None`. Both may be
/// remembered.
///
/// `same` tells whether the table on one side of a change of size translates just as the leaf on
/// the other.
pub(crate) fn needs_break(
    architecture: &Architecture,
    old: &Descriptor,
    new: &Descriptor,
    depth: u8,
    equal_contents: impl Fn(u64, u64) -> bool,
    same: impl Fn() -> bool,
) -> Option<&'static str> {
    let family = architecture.family();
    if !family.breaks {
        return match (old, new) {
            (Descriptor::Leaf(_), Descriptor::Table { .. })
            | (Descriptor::Table { .. }, Descriptor::Leaf(_))
                if family.sizes_agree && !same() =>
            {
                Some("a change of size that also changes the translation")
            }
            _ => None,
        };
    }
    match (old, new) {
        (Descriptor::Leaf(old), Descriptor::Leaf(new)) => {
            leaf_break(architecture, old, new, equal_contents)
        }
        (Descriptor::Table { pa: old, .. }, Descriptor::Table { pa: new, .. }) => {
            (old != new).then_some("one table in the place of another")
        }
        (Descriptor::Table { .. }, Descriptor::Leaf(_))
        | (Descriptor::Leaf(_), Descriptor::Table { .. }) => {
            if depth == 0 {
                Some("a reserved descriptor")
            } else if architecture.bbm < 2 {
                Some("a change of size below FEAT_BBM level 2")
            } else if !same() {
                Some("a change of size that also changes the translation")
            } else {
                None
            }
        }
        _ => None,
    }
}

fn leaf_break(
    architecture: &Architecture,
    old: &Leaf,
    new: &Leaf,
    equal_contents: impl Fn(u64, u64) -> bool,
) -> Option<&'static str> {
    let writes = |leaf: &Leaf| {
        let deferred =
            matches!(leaf.dirty, tablewright_walker::DirtyState::Arm64 { dbm: true, .. });
        leaf.access.privileged.write || leaf.access.user.write || deferred
    };
    if old.memory != new.memory {
        Some("another memory type")
    } else if old.shareability != new.shareability {
        Some("another shareability")
    } else if old.pa != new.pa && (writes(old) || writes(new) || !equal_contents(old.pa, new.pa)) {
        Some("another output address")
    } else if !old.global && new.global {
        Some("a global entry in the place of one that is not")
    } else if old.key != new.key {
        Some("other attributes of the implementation")
    } else if (old.contiguous || new.contiguous)
        && architecture.bbm < 1
        && old.raw & !HARDWARE_FLAGS != new.raw & !HARDWARE_FLAGS
    {
        Some("a member of a contiguous run")
    } else {
        None
    }
}

/// arm64: the access flag, AP\[2\], and what hardware ignores. They may differ within a run.
pub(crate) const HARDWARE_FLAGS: u64 = 1 << 10 | 1 << 7 | 0xf << 55 | 1 << 63;

/// Bits of a leaf that say how its memory is cached and shared, in every format that has breaks:
/// AttrIndx or MemAttr, and SH (DDI 0487 D8.3.1).
const TYPE: u64 = 7 << 2 | 3 << 8;

/// Whether an old copy of a leaf allows nothing that the new one forbids: at worst it faults where
/// it need not.
pub(crate) fn is_harmless(old: &Leaf, new: &Leaf) -> bool {
    let within = |a: tablewright_walker::Permissions, b: tablewright_walker::Permissions| {
        (!a.read || b.read) && (!a.write || b.write) && (!a.execute || b.execute)
    };
    old.pa == new.pa
        && old.size == new.size
        && old.memory == new.memory
        && old.shareability == new.shareability
        && old.global == new.global
        && old.contiguous == new.contiguous
        && within(old.access.privileged, new.access.privileged)
        && within(old.access.user, new.access.user)
        // A copy that is dirty lets writes go by without a mark, if it permits any.
        && (!is_dirty(old) || is_dirty(new) || !is_writable(old))
}

fn is_writable(leaf: &Leaf) -> bool {
    leaf.access.privileged.write || leaf.access.user.write
}

fn is_dirty(leaf: &Leaf) -> bool {
    match leaf.dirty {
        tablewright_walker::DirtyState::Arm64 { read_only, .. } => !read_only,
        tablewright_walker::DirtyState::Bit { dirty } => dirty,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of a space that this CPU has changed.
    fn owed(space: u16, writer: u16) -> Obligation {
        Obligation {
            number: 0,
            space,
            id: 1,
            global: false,
            span: (0x1000 * u64::from(writer), 0x1000 * u64::from(writer) + 0xfff),
            depth: 0,
            table: false,
            detached: false,
            leaves: 1,
            unit: 12,
            scattered: true,
            contiguous: false,
            pa: 0,
            raw: 3,
            writer,
            cutter: None,
            published: false,
            harmless: false,
            issued: Cpus::default(),
            local: Vec::new(),
            claimed: None,
            combined: false,
            second: None,
            looks: 0,
        }
    }

    #[test]
    fn what_others_have_not_made_visible_is_news() {
        let mut all = Obligations::default();
        all.add(owed(0, 0));
        all.add(owed(0, 1));
        assert!(all.is_news(0, 0) && all.is_news(1, 0) && !all.is_news(0, 1));
        all.publish(1);
        assert!(!all.is_news(0, 0) && all.is_news(1, 0));
        all.publish(0);
        assert!(!all.is_news(0, 0) && !all.is_news(1, 0));
        all.add(owed(0, 2));
        assert!(all.is_news(0, 0) && !all.is_news(2, 0));
        // A change that a CPU has read is visible.
        all.observe(0, 0, (0x2000, 0x2fff), 0);
        assert!(!all.is_news(0, 0));
    }

    /// Whatever goes, what comes afterwards is news.
    #[test]
    fn news_is_found_after_others_have_gone() {
        let goes: [fn(&mut Obligations); 4] = [
            Obligations::clear,
            |all| all.drop_of(0),
            |all| all.rename(0, 2, |_| true),
            |all| drop(all.complete(0, |_| true)),
        ];
        for go in goes {
            let mut all = Obligations::default();
            all.add(owed(0, 0));
            all.add(owed(0, 1));
            all.publish(0);
            all.publish(1);
            go(&mut all);
            assert!(all.is_empty());
            all.add(owed(1, 1));
            assert!(all.is_news(0, 0));
            all.publish(1);
            assert!(!all.is_news(0, 0));
        }
    }
}

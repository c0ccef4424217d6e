//! Telling CPUs to forget, and waiting until they have.

use crate::architecture::Ordering;
use crate::rules::{Obligation, Rule};
use crate::time::Time;
use crate::tlb::Tlbi;
use crate::trace::Event;
use tablewright_walker::{Denied, Leaf};

use super::{CLEAN, Early, Hardware};

/// The number of events that may come between two invalidations of guests that are not ordered.
const MOST_BETWEEN: u32 = 12;

impl Hardware {
    /// An invalidation is issued. It takes effect between now and its completion.
    pub(crate) fn invalidate(&self, cpu: usize, tlbi: Tlbi) {
        self.trace(cpu, || Event::Invalidate { tlbi });
        if self.architecture.ordering == Ordering::X86 {
            // INVLPG, and an interrupt, are serialising (SDM vol. 3A 9.3).
            self.drain(cpu);
        }
        let early = self.dice.is_on() && self.dice.once_in(2);
        if early {
            self.invalidations.take_effect(&tlbi, cpu);
        }
        self.cores[cpu].pending.borrow_mut().push((tlbi, early));
        if !self.obligations.borrow().is_empty() {
            self.obligations.borrow_mut().issue(cpu, &tlbi);
        }
        if self.wary.get() {
            self.disturb(cpu, None);
        }
    }

    /// The program relies on an invalidation to be about all of `range` in a space.
    pub(crate) fn claim(&self, cpu: usize, space: u16, range: (u64, u64), tlbi: &Tlbi) {
        if !self.obligations.borrow().is_empty() {
            let mut obligations = self.obligations.borrow_mut();
            obligations.claim(cpu, space, range, tlbi);
        }
    }

    /// The program looks at a space.
    pub(crate) fn look_at(&self) -> u64 {
        self.obligations.borrow_mut().look()
    }

    /// The program relies on what was changed in a range of a space before a look to be forgotten.
    pub(crate) fn rely(&self, cpu: usize, space: u16, range: (u64, u64), look: u64, own: bool) {
        let owed = {
            let obligations = self.obligations.borrow();
            let owed = obligations.owed_before(cpu, space, range, look, own);
            owed.cloned()
        };
        if let Some(owed) = owed {
            self.violate(
                Rule::Invalidation,
                cpu,
                format!(
                    "the {} of {:#x}..={:#x} at level {} is relied on to be forgotten, and is not",
                    if owed.table { "table" } else { "translation" },
                    owed.span.0,
                    owed.span.1,
                    self.level(owed.depth),
                ),
            );
        }
    }

    /// Whether accesses by other CPUs are under way that a completion has to wait for, and until
    /// when.
    pub(crate) fn under_way(&self, cpu: usize) -> Option<Time> {
        let pending = self.cores[cpu].pending.borrow();
        let others = self.cores.iter().enumerate().filter(|&(c, _)| c != cpu);
        others
            .filter_map(|(_, core)| core.under_way.get())
            .filter(|(access, _)| {
                let covers = |tlbi: &Tlbi| tlbi.broadcast && access.is_covered(tlbi);
                pending.iter().any(|(tlbi, _)| covers(tlbi))
            })
            .map(|(_, until)| until)
            .max()
    }

    /// Whether an access of this CPU is under way, and until when.
    pub(crate) fn busy_until(&self, cpu: usize) -> Option<Time> {
        self.cores[cpu].under_way.get().map(|(_, until)| until)
    }

    /// Has the issued invalidations take effect now, if they have not yet.
    pub(crate) fn take_effect(&self, cpu: usize) {
        self.drain(cpu);
        if self.is_nested() && self.dice.is_on() && self.cores[cpu].pending.borrow().len() > 1 {
            // In any order, with anything in between: what is combined need not go after what it is
            // made of.
            let open = || {
                let pending = self.cores[cpu].pending.borrow();
                let open = (0..pending.len()).filter(|&at| !pending[at].1);
                open.collect::<Vec<_>>()
            };
            let mut left = open();
            while !left.is_empty() {
                (0..MOST_BETWEEN).for_each(|_| self.disturb(cpu, None));
                let at = left[self.dice.below(left.len() as u64) as usize];
                self.take_effect_of(cpu, at);
                left = open();
            }
        }
        for (tlbi, done) in self.cores[cpu].pending.borrow_mut().iter_mut() {
            if !*done {
                self.invalidations.take_effect(tlbi, cpu);
                *done = true;
            }
        }
    }

    /// DSB after invalidations: every CPU has forgotten what they cover.
    pub(crate) fn complete(&self, cpu: usize) {
        self.complete_of(cpu, true);
    }

    /// Completes for the whole machine or for this CPU alone: then others need not see what it has
    /// stored.
    pub(super) fn complete_of(&self, cpu: usize, publishes: bool) {
        self.trace(cpu, || Event::Complete);
        self.take_effect(cpu);
        self.hold_walks(cpu);
        let core = &self.cores[cpu];
        self.epochs[cpu].update(|epoch| epoch.wrapping_add(1));
        for (tlbi, _) in core.pending.borrow_mut().drain(..) {
            if !tlbi.broadcast {
                continue;
            }
            // Accesses of others through the old translation are over, or will be made anew. Our
            // own may have been translated early: that is what the context synchronisation is for.
            for (other, its) in self.cores.iter().enumerate() {
                if other != cpu && !its.early.borrow().is_empty() {
                    let spared = |e: &Early| e.result.is_ok_and(|t| !t.is_covered(&tlbi));
                    its.early.borrow_mut().retain(spared);
                }
            }
        }
        if self.obligations.borrow().is_empty() {
            return;
        }
        if publishes {
            self.obligations.borrow_mut().publish(cpu);
        }
        let (discharged, wrong) = {
            let (spaces, loaded) = (self.spaces.borrow(), self.loaded.borrow());
            let all_told = |o: &Obligation| {
                let space = &spaces[usize::from(o.space)];
                let told = &o.local;
                // A CPU has what is global from any space that it has had.
                let has = |&c: &u16| space.has(c) || o.global && loaded[usize::from(c)];
                let holders = || (0..self.cores.len() as u16).filter(has);
                if space.tracked {
                    // The CPUs that have it loaded, and use it, change all the time: it is those
                    // that do when all is said to be told.
                    let uses = |&c: &u16| {
                        let c = usize::from(c);
                        let leaf = || self.uses_leaf(c, o.space, o.global);
                        if o.table { self.uses(c, o.space, true) } else { leaf() }
                    };
                    let mut using = holders().filter(uses);
                    return o.is_claimed_by(cpu) && using.all(|c| told.contains(&(c, true)));
                }
                // No CPU is told twice. With many CPUs, each of which completes for itself, most
                // are not told yet.
                !told.is_empty()
                    && told.len() >= holders().count()
                    && holders().all(|c| told.contains(&(c, true)))
            };
            self.obligations.borrow_mut().complete(cpu, all_told)
        };
        for obligation in wrong {
            let why = obligation.claimed.map_or("", |(_, why)| why);
            self.violate(
                Rule::Invalidation,
                cpu,
                format!(
                    "the {} of {:#x}..={:#x} at level {} is said to be invalidated, and is not: \
                     {why}",
                    if obligation.table { "table" } else { "translation" },
                    obligation.span.0,
                    obligation.span.1,
                    self.level(obligation.depth),
                ),
            );
        }
        for obligation in discharged {
            let Obligation { space, span, depth, .. } = obligation;
            let mut at = self.run_around(span.0, depth).0;
            while at <= span.1 {
                let run = self.run_around(at, depth);
                self.check_run(cpu, space, run, depth);
                match run.1.checked_add(1) {
                    Some(next) => at = next,
                    None => break,
                }
            }
        }
        self.look_around();
    }

    /// The addresses of the contiguous run around `va`, or of what would be one.
    pub(super) fn run_around(&self, va: u64, depth: u8) -> (u64, u64) {
        let regime = self.architecture.regime;
        let members = regime.run_entries(self.level(depth)) as u64;
        let low = (members << self.shift(depth)) - 1;
        (va & !low, va | low)
    }

    /// Members of a run were changed, and that is visible or complete: what is left of the run has
    /// to be whole.
    pub(super) fn check_run(&self, cpu: usize, space: u16, (first, last): (u64, u64), depth: u8) {
        let size = 1u64 << self.shift(depth);
        // What is below a table that has taken the place of a member is of no run here.
        let member = |at| self.leaf_at(space, at).filter(|leaf| leaf.size == size);
        let found: Vec<_> = (first..=last).step_by(size as usize).map(member).collect();
        let contiguous = |leaf: &&Leaf| leaf.contiguous;
        let hinted = found.iter().flatten().filter(contiguous).count();
        // Hardware may make one member dirty.
        let access = |leaf: &Leaf| self.rights(leaf, depth, Denied::default()) & !CLEAN;
        let alike = |a: &Leaf, b: &Leaf| {
            access(a) == access(b)
                && a.memory == b.memory
                && a.pa.wrapping_sub(a.va) == b.pa.wrapping_sub(b.va)
        };
        let whole = hinted == found.len()
            && found.windows(2).all(|pair| match (pair[0], pair[1]) {
                (Some(a), Some(b)) => alike(&a, &b),
                _ => false,
            });
        if hinted > 0 && !whole {
            self.violate(
                Rule::BrokenRun,
                cpu,
                format!(
                    "of the {} members of the run at {first:#x}, {hinted} have the contiguous bit \
                     or they differ",
                    found.len()
                ),
            );
        }
    }

    /// The leaf that translates an address, as memory says now, without walking like a CPU does.
    pub(crate) fn leaf_at(&self, space: u16, va: u64) -> Option<Leaf> {
        let (root, _) = self.spaces.borrow()[usize::from(space)].root?;
        let mut read = |table: u64, index: usize| self.memory.read(table + index as u64 * 8);
        tablewright_walker::translate(self.architecture.regime, root, va, &mut read).ok()
    }
}

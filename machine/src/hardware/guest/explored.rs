//! Both stages, for the explorer of litmus tests, which takes them apart.
//!
//! The stage 1 of a guest is the identity, and off, or the upper levels of its tables stay as they
//! are, and so does what stage 2 says of all its tables. A walk over stage 1 is then the look at
//! one descriptor.

use tablewright_walker::{Denied, Walk};

use super::{Combined, Goal, GuestLook, GuestWalk, Second, second_fault};
use crate::hardware::{Fault, Hardware, Look, Request, Translated};
use crate::tlb::{Cached, Tlbi};

/// The answer of stage 1 alone for a page of the guest's virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct First {
    pub va: u64,
    /// The address that the guest takes for physical.
    pub ipa: u64,
    raw: u64,
    rights: u8,
    global: bool,
    vmid: u16,
    stamp: u64,
}

impl First {
    pub fn vmid(&self) -> u16 {
        self.vmid
    }
}

impl Hardware {
    /// The combined entry for an access, if there is one: of several, the smallest.
    pub(crate) fn look_combined(&self, cpu: usize, request: Request) -> Option<Look> {
        self.look_combined_of(cpu, request, |_| true)
    }

    /// Looks for those that are `wanted`.
    pub(in crate::hardware) fn look_combined_of(
        &self,
        cpu: usize,
        request: Request,
        wanted: impl Fn(&Cached) -> bool,
    ) -> Option<Look> {
        let root = self.cores[cpu].roots[0].get()?;
        let asid = self.tag(cpu).asid;
        // Without what was invalidated.
        self.find_combined(cpu, request.va, root.id)?;
        let found = {
            let held = self.cores[cpu].guest.tlb.borrow();
            let of = |held: &&Combined| {
                held.translates(request.va, root.id, asid) && wanted(&held.entry)
            };
            held.iter().filter(of).min_by_key(|held| held.entry.bits).copied()?
        };
        match self.use_combined(cpu, request, root, &found) {
            GuestLook::Found(translated) => Some(Look::Found(translated)),
            GuestLook::Fault(fault) => Some(Look::Fault(fault)),
            GuestLook::Walking(_) => None,
        }
    }

    /// Returns the remembered answer of stage 2 alone, if there is one: the smallest, or that of
    /// `bits` of an address.
    pub(crate) fn look_second(
        &self,
        cpu: usize,
        request: Request,
        bits: Option<u8>,
    ) -> Option<Look> {
        let root = self.cores[cpu].roots[0].get()?;
        let (tlb, invalidations) = (&self.cores[cpu].tlb, &self.invalidations);
        let entry = match bits {
            None => tlb.find(cpu, request.va, root.id, invalidations)?,
            Some(bits) => tlb.find_sized(cpu, request.va, root.id, bits, invalidations)?,
        };
        Some(self.use_entry(cpu, request, entry))
    }

    /// Combines the answer of stage 2 with that of stage 1: what that has said, or the identity.
    pub(crate) fn join(&self, cpu: usize, found: Translated, first: Option<First>) -> Translated {
        if !self.is_nested() || found.entry.guest.is_some() {
            return found;
        }
        let there = found.request.va;
        let va = first.map_or(there, |first| first.va | there & 0xfff);
        let page = 12;
        let said = match first {
            // Of a run too, a page may be remembered alone.
            None if self.alone.get() && found.entry.contiguous => {
                super::First { bits: page, ..self.identity() }
            }
            None => self.identity(),
            Some(first) => super::First {
                bits: page,
                depth: 0,
                rights: first.rights,
                global: first.global,
                raw: first.raw,
            },
        };
        let walk = GuestWalk {
            request: Request { va, ..found.request },
            walk: None,
            tag: self.tag(cpu),
            ipa: there,
            goal: Goal::Descriptor,
            second: Second::Done(found),
            stamp: self.invalidations.now(),
        };
        let entry = self.combine(cpu, &walk, said, &found.entry);
        self.translated(walk.request, entry)
    }

    /// The last descriptor of stage 1, at `at`, is read.
    ///
    /// # Errors
    /// The fault of stage 1. What an access may not do is not looked at: it may be remembered all
    /// the same.
    pub(crate) fn read_first(&self, cpu: usize, va: u64, at: u64) -> Result<First, Fault> {
        let (Some(regime), Some(root)) = (self.architecture.guest, self.cores[cpu].roots[0].get())
        else {
            return Err(Fault::Address);
        };
        let level = regime.last_level();
        let mut step = Walk::resume(regime, at & !0xfff, level, Denied::default(), va);
        let Ok(Some(leaf)) = step.step(self.memory.read(at)) else {
            return Err(Fault::Translation { depth: 0 });
        };
        if !leaf.accessed {
            return Err(Fault::AccessFlag { depth: 0 });
        }
        Ok(First {
            va: va & !0xfff,
            ipa: leaf.physical(va) & !0xfff,
            raw: leaf.raw,
            rights: self.rights_of(|| (regime, leaf.level), &leaf, step.denied()),
            global: leaf.global,
            vmid: root.id,
            stamp: self.invalidations.now(),
        })
    }

    /// Remembers the answer of stage 1, beside what it said before.
    pub(crate) fn remember_first(&self, cpu: usize, first: First) {
        let mut firsts = self.cores[cpu].guest.firsts.borrow_mut();
        let alike = |held: &First| First { stamp: 0, ..*held } == First { stamp: 0, ..first };
        firsts.retain(|held| !alike(held));
        firsts.push(first);
    }

    /// The access to stage 2 that an access becomes by what stage 1 has said.
    ///
    /// # Errors
    /// The permission fault of stage 1.
    pub(crate) fn second_of(&self, request: Request, first: &First) -> Result<Request, Fault> {
        if first.rights & request.right() == 0 {
            return Err(Fault::Permission { depth: 0 });
        }
        let va = first.ipa | request.va & 0xfff;
        Ok(Request { va, ..request })
    }

    /// A fault that an access has met behind what stage 1 has said: of stage 2, unless it is that
    /// of stage 1 already.
    pub(crate) fn fault_behind(&self, request: Request, first: &First, fault: Fault) -> Fault {
        match self.second_of(request, first) {
            Ok(second) => second_fault(second.va, second.want, false, fault),
            Err(fault) => fault,
        }
    }

    /// Returns the answers of stage 1 alone that a CPU remembers.
    pub(crate) fn save_firsts(&self, cpu: usize) -> Vec<First> {
        let spared = |held: &&First| {
            let covers = |tlbi: &Tlbi| self.is_first_covered(cpu, held, tlbi);
            held.stamp == self.invalidations.now()
                || self.invalidations.spared_since(cpu, held.stamp, covers)
        };
        let firsts = self.cores[cpu].guest.firsts.borrow();
        let held = firsts.iter().filter(spared);
        held.map(|&held| First { stamp: 0, ..held }).collect()
    }

    pub(crate) fn load_firsts(&self, cpu: usize, held: &[First]) {
        let stamp = self.invalidations.now();
        let mut firsts = self.cores[cpu].guest.firsts.borrow_mut();
        firsts.clear();
        firsts.extend(held.iter().map(|&held| First { stamp, ..held }));
    }

    fn is_first_covered(&self, cpu: usize, held: &First, tlbi: &Tlbi) -> bool {
        let span = (held.va, held.va | 0xfff);
        tlbi.covers_combined(held.vmid, self.tag(cpu), held.global, span, false)
    }

    /// Whether what a walk will combine has been invalidated since `stamp`.
    pub(in crate::hardware) fn is_combining_lost(
        &self,
        cpu: usize,
        id: u16,
        va: u64,
        stamp: u64,
    ) -> bool {
        let covers = |tlbi: &Tlbi| tlbi.covers_combined(id, self.tag(cpu), true, (va, va), false);
        self.is_nested() && !self.invalidations.spared_since(cpu, stamp, covers)
    }

    /// Returns the combined translations of a CPU.
    pub(in crate::hardware) fn save_combined(&self, cpu: usize) -> Vec<Combined> {
        let tlb = self.cores[cpu].guest.tlb.borrow();
        let held = tlb.iter().filter(|held| self.is_spared(cpu, &held.entry));
        held.map(|held| held.normalised()).collect()
    }

    pub(in crate::hardware) fn load_combined(&self, cpu: usize, combined: &[Combined]) {
        let stamp = self.invalidations.now();
        let mut tlb = self.cores[cpu].guest.tlb.borrow_mut();
        tlb.clear();
        tlb.extend(combined.iter().map(|held| held.at(stamp)));
    }
}

//! Guests that have a stage 1: from a virtual address of the guest over what it takes for a
//! physical one to memory.
//!
//! The guest's tables stand in its memory. Each of their descriptors has an address that stage 2
//! translates, like that of what they lead to in the end, and each of these translations may fault
//! by itself: the host has to hear of it with the address that the guest takes for physical, and
//! whether it is that of a descriptor ([`Fault::Second`]).
//!
//! * On x86, an access to a descriptor of the guest counts as a write if hardware sets flags in the
//!   tables of stage 2: with EPT if its accessed and dirty flags are on (SDM vol. 3C 29.3.5), in
//!   nested paging always (APM vol. 2 15.25.5).
//! * To set a flag in a descriptor of the guest is a write for stage 2 everywhere.
//!
//! What is remembered is of two kinds, which are invalidated apart ([`Stages`](crate::Stages)):
//! what stage 2 says alone is in the TLB and the walk cache that a machine without guests has too;
//! what both say *combined* is here. A combined entry leads from a virtual address of the guest to
//! memory, and is of the smaller of the two sizes; a table of the guest is remembered with the
//! memory that it was found in. Both are made of what is remembered of stage 2, so that what is
//! forgotten here and not there comes back.
//!
//! With its stage 1 off, a guest uses what it takes for physical addresses, and what is remembered
//! is combined all the same.
//!
//! What a guest does with its own tables is its own affair: the rules are for the host. One half of
//! addresses is modelled, and the descriptors of tables have no flags.

mod explored;

pub(crate) use explored::First as KnownFirst;

use std::cell::{Cell, RefCell};

use crate::architecture::{Family, Flags};
use crate::memory::State;
use crate::rules::Rule;
use crate::tlb::{Cached, Guest as Tag, Tlbi};
use crate::trace::Event;
use tablewright_walker::{Denied, Leaf, Regime, Walk, with_access_flag, with_dirty};

use super::{CLEAN, Cause, Early, Fault, Hardware, Look, Request, Root, Translated, Want};

/// The stage 1 of the guest that a CPU runs.
#[derive(Default)]
pub(super) struct Guest {
    /// The root, as the guest knows it, and the identifier (ASID, PCID). `None`: it is off.
    root: Cell<Option<(u64, u16)>>,
    tlb: RefCell<Vec<Combined>>,
    tables: RefCell<Vec<Known>>,
    /// Answers of stage 1 alone, for the explorer of litmus tests.
    firsts: RefCell<Vec<KnownFirst>>,
    /// The entry that makes room next, in both.
    next: Cell<usize>,
    /// A speculative walk that has been left half-way.
    speculative: Cell<Option<GuestWalk>>,
}

/// The translation of both stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Combined {
    /// From the virtual address; otherwise that of stage 2.
    entry: Cached,
    /// The address of the first that the guest takes for physical.
    ipa: u64,
    /// The rights of each stage.
    rights: [u8; 2],
    /// The descriptor of stage 1.
    raw: u64,
}

/// A table of the guest, with the memory that it was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Known {
    /// The virtual addresses that it translates.
    first: u64,
    bits: u8,
    level: i8,
    denied: Denied,
    tag: Tag,
    /// The guest's address of it, and what stage 2 said of that.
    table: u64,
    page: Cached,
    stamp: u64,
}

impl Known {
    fn span(&self) -> (u64, u64) {
        (self.first, self.first + ((1u64 << self.bits) - 1))
    }
}

/// The purpose for which an address of the guest is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// To read the descriptor that is there.
    Descriptor,
    /// To write it, with flags that it lacks; it was this when it was read.
    Flags(u64),
    /// To do what is to be done; what stage 1 has said.
    Data(First),
}

/// The answer of stage 1 for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct First {
    /// A power of two of bytes that are translated as one.
    bits: u8,
    depth: u8,
    rights: u8,
    global: bool,
    raw: u64,
}

/// A walk of a guest's access, over both stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestWalk {
    request: Request,
    /// Through the tables of the guest; `None` if its stage 1 is off.
    walk: Option<Walk>,
    tag: Tag,
    /// The address under translation.
    ipa: u64,
    goal: Goal,
    /// Stage 2 of it: a walk, or done.
    second: Second,
    stamp: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Second {
    Walking(super::Walking),
    Done(Translated),
}

/// The answer to the look for a translation of a guest.
type GuestLook = Look<GuestWalk>;

impl Hardware {
    /// Guests have a stage 1.
    #[inline(always)]
    pub(crate) fn is_nested(&self) -> bool {
        self.architecture.guest.is_some()
    }

    /// The guest on a CPU loads a root for its stage 1, or turns it off.
    pub(crate) fn load_guest(&self, cpu: usize, root: Option<(u64, u16)>) {
        self.cores[cpu].guest.root.set(root);
        self.trace(cpu, || Event::Root { root, half: "lower", guest: true });
        self.synchronise(cpu);
    }

    fn tag(&self, cpu: usize) -> Tag {
        let asid = self.cores[cpu].guest.root.get().map(|(_, asid)| asid);
        Tag { asid, depth: 0 }
    }

    /// Looks for a translation where it may be remembered.
    pub(crate) fn guest_look(&self, cpu: usize, request: Request) -> GuestLook {
        if self.dice.is_on() {
            self.guests.note(request.va);
        }
        if self.wary.get()
            && let Some(early) = self.take_early(cpu, request)
        {
            return match early {
                Look::Found(translated) => GuestLook::Found(translated),
                Look::Fault(fault) => GuestLook::Fault(fault),
                Look::Walking(_) => unreachable!("what is early is done"),
            };
        }
        let skip = self.dice.is_on() && self.dice.once_in(8);
        self.guest_look_now(cpu, request, skip)
    }

    fn guest_look_now(&self, cpu: usize, request: Request, skip: bool) -> GuestLook {
        let Some(root) = self.cores[cpu].roots[0].get() else {
            return GuestLook::Fault(Fault::Address);
        };
        match self.find_combined(cpu, request.va, root.id).filter(|_| !skip) {
            Some(found) => self.use_combined(cpu, request, root, &found),
            None => self.guest_start(cpu, request, root),
        }
    }

    /// The combined entry that translates an address, held against what was invalidated.
    fn find_combined(&self, cpu: usize, va: u64, vmid: u16) -> Option<Combined> {
        let guest = &self.cores[cpu].guest;
        let asid = self.tag(cpu).asid;
        let mut held = guest.tlb.borrow_mut();
        held.retain_mut(|held| {
            let spared = self.is_spared(cpu, &held.entry);
            held.entry.stamp = self.invalidations.now();
            spared
        });
        let found = held.iter().find(|held| held.translates(va, vmid, asid));
        found.copied()
    }

    fn is_spared(&self, cpu: usize, entry: &Cached) -> bool {
        entry.stamp == self.invalidations.now()
            || self.invalidations.spared_since(cpu, entry.stamp, |tlbi| entry.is_covered(tlbi))
    }

    fn drop_combined(&self, cpu: usize, dropped: &Combined) {
        let mut tlb = self.cores[cpu].guest.tlb.borrow_mut();
        tlb.retain(|held| held != dropped);
    }

    fn use_combined(
        &self,
        cpu: usize,
        request: Request,
        root: Root,
        found: &Combined,
    ) -> GuestLook {
        let entry = &found.entry;
        if entry.rights & request.right() == 0 {
            if self.architecture.permission_fault_drops_entry {
                self.drop_combined(cpu, found);
            }
            let [first, _] = found.rights;
            let depth = entry.guest.map_or(0, |tag| tag.depth);
            let fault = if first & request.right() == 0 {
                Fault::Permission { depth }
            } else {
                let ipa = found.ipa + (request.va - entry.first);
                let inner = Fault::Permission { depth: entry.depth };
                second_fault(ipa, request.want, false, inner)
            };
            return GuestLook::Fault(fault);
        }
        if request.want == Want::Write && entry.rights & CLEAN != 0 {
            // The dirty state has to be set in memory, in the tables of one stage or both: a walk
            // does it.
            self.drop_combined(cpu, found);
            return self.guest_start(cpu, request, root);
        }
        let now = self.memory.read(entry.at);
        if now != entry.raw {
            self.check_stale(cpu, request, &of_second(found), now);
        }
        GuestLook::Found(self.translated(request, *entry))
    }

    /// Starts a walk, where a table is known or at the root.
    fn guest_start(&self, cpu: usize, request: Request, root: Root) -> GuestLook {
        let stamp = self.invalidations.now();
        let tag = self.tag(cpu);
        let mut walk = GuestWalk {
            request,
            walk: None,
            tag,
            ipa: request.va,
            goal: Goal::Descriptor,
            second: Second::Done(self.translated(request, NOWHERE)),
            stamp,
        };
        let (Some((table, _)), Some(regime)) =
            (self.cores[cpu].guest.root.get(), self.architecture.guest)
        else {
            return self.reach(cpu, walk, request.va, Goal::Data(self.identity()));
        };
        let skip = self.dice.is_on() && self.dice.once_in(8);
        if let Some(known) = self.find_known(cpu, request.va, root.id).filter(|_| !skip) {
            let Known { table, level, denied, page, .. } = known;
            let step = Walk::resume(regime, table, level, denied, request.va);
            let ipa = table + step.index() as u64 * 8;
            walk.walk = Some(step);
            walk.ipa = ipa;
            let there = self.table_request(ipa);
            // Where it was found: stage 2 is not asked again.
            self.check_use(cpu, there, &page);
            walk.second = Second::Done(self.translated(there, page));
            return GuestLook::Walking(walk);
        }
        match Walk::new(regime, table, request.va) {
            Ok(step) => {
                walk.walk = Some(step);
                let ipa = table + step.index() as u64 * 8;
                self.reach(cpu, walk, ipa, Goal::Descriptor)
            }
            Err(_) => GuestLook::Fault(Fault::Address),
        }
    }

    /// Returns the answer of a stage 1 that is off.
    fn identity(&self) -> First {
        First {
            bits: self.architecture.regime.input_bits() as u8,
            depth: 0,
            rights: 0o77,
            global: true,
            raw: 0,
        }
    }

    /// The table nearest to the leaf that is known for an address.
    fn find_known(&self, cpu: usize, va: u64, vmid: u16) -> Option<Known> {
        let guest = &self.cores[cpu].guest;
        let asid = self.tag(cpu).asid;
        let mut tables = guest.tables.borrow_mut();
        tables.retain_mut(|known| {
            let spared = self.is_known(cpu, known);
            known.stamp = self.invalidations.now();
            spared
        });
        let covers = |known: &&Known| {
            let (first, last) = known.span();
            known.page.id == vmid && known.tag.asid == asid && first <= va && va <= last
        };
        tables.iter().filter(covers).min_by_key(|known| known.bits).copied()
    }

    fn is_known(&self, cpu: usize, known: &Known) -> bool {
        let covers =
            |tlbi: &Tlbi| tlbi.covers_combined(known.page.id, known.tag, false, known.span(), true);
        known.stamp == self.invalidations.now()
            || self.invalidations.spared_since(cpu, known.stamp, covers)
    }

    /// How stage 2 sees that the walker comes to a descriptor of the guest.
    fn table_request(&self, ipa: u64) -> Request {
        let writes = match self.architecture.regime {
            Regime::Ept { .. } => self.architecture.hardware_access,
            Regime::Npt { .. } => true,
            _ => false,
        };
        if writes { Request::write(ipa) } else { Request::read(ipa) }
    }

    /// Goes on to an address that the guest takes for physical.
    fn reach(&self, cpu: usize, walk: GuestWalk, ipa: u64, goal: Goal) -> GuestLook {
        let walk = GuestWalk { ipa, goal, ..walk };
        let request = self.second_request(&walk);
        let skip = self.dice.is_on() && self.dice.once_in(8);
        match self.second(cpu, request, skip) {
            Look::Found(translated) => self.reached(cpu, walk, translated),
            Look::Fault(fault) => self.second_faults(cpu, &walk, fault),
            Look::Walking(walking) => {
                GuestLook::Walking(GuestWalk { second: Second::Walking(walking), ..walk })
            }
        }
    }

    fn second_request(&self, walk: &GuestWalk) -> Request {
        match walk.goal {
            Goal::Descriptor => self.table_request(walk.ipa),
            Goal::Flags(_) => Request::write(walk.ipa),
            Goal::Data(_) => Request { va: walk.ipa, ..walk.request },
        }
    }

    /// Looks for what stage 2 says of an address.
    fn second(&self, cpu: usize, request: Request, skip: bool) -> Look {
        let Some(root) = self.cores[cpu].roots[0].get() else {
            return Look::Fault(Fault::Address);
        };
        let tlb = &self.cores[cpu].tlb;
        match tlb.find(cpu, request.va, root.id, &self.invalidations).filter(|_| !skip) {
            Some(entry) => self.use_entry(cpu, request, entry),
            None => self.start(cpu, request, root),
        }
    }

    fn second_faults(&self, cpu: usize, walk: &GuestWalk, fault: Fault) -> GuestLook {
        let request = self.second_request(walk);
        if self.architecture.permission_fault_drops_entry
            && matches!(fault, Fault::Permission { .. })
            && let Some(root) = self.cores[cpu].roots[0].get()
        {
            // What an EPT violation was found with goes (SDM vol. 3C 29.4.3.1): of stage 2, and
            // what is combined.
            let core = &self.cores[cpu];
            if let Some(entry) = core.tlb.find(cpu, walk.ipa, root.id, &self.invalidations) {
                core.tlb.drop_entry(&entry);
            }
            self.drop_path(cpu, walk.ipa);
            if let Some(found) = self.find_combined(cpu, walk.request.va, root.id) {
                self.drop_combined(cpu, &found);
            }
        }
        let on_walk = !matches!(walk.goal, Goal::Data(_));
        GuestLook::Fault(second_fault(walk.ipa, request.want, on_walk, fault))
    }

    /// Stage 2 has translated the address. What is read there takes a step of its own; the rest is
    /// done at once.
    fn reached(&self, cpu: usize, walk: GuestWalk, translated: Translated) -> GuestLook {
        if let (Goal::Descriptor, Some(step)) = (walk.goal, walk.walk) {
            self.know(cpu, &walk, &step, translated.entry);
        }
        match walk.goal {
            Goal::Descriptor | Goal::Flags(_) => {
                GuestLook::Walking(GuestWalk { second: Second::Done(translated), ..walk })
            }
            Goal::Data(first) => {
                let entry = self.combine(cpu, &walk, first, &translated.entry);
                GuestLook::Found(self.translated(walk.request, entry))
            }
        }
    }

    /// A table of the guest, other than the root, was found.
    fn know(&self, cpu: usize, walk: &GuestWalk, step: &Walk, page: Cached) {
        let Some(regime) = self.architecture.guest else {
            return;
        };
        if step.level() == regime.start_level() {
            return;
        }
        let bits = step.table_shift();
        let known = Known {
            first: walk.request.va >> bits << bits,
            bits: bits as u8,
            level: step.level(),
            denied: step.denied(),
            tag: Tag { depth: (step.level() - regime.last_level()).unsigned_abs() + 1, ..walk.tag },
            table: step.table(),
            page,
            stamp: walk.stamp,
        };
        let guest = &self.cores[cpu].guest;
        let mut tables = guest.tables.borrow_mut();
        tables.retain(|other| {
            (other.first, other.bits, other.tag, other.page.id)
                != (known.first, known.bits, known.tag, known.page.id)
        });
        let room = self.architecture.walk_cache.max(1);
        replace(&mut tables, known, room, &guest.next);
    }

    /// One descriptor, of either stage, is read.
    pub(crate) fn guest_step(&self, cpu: usize, walk: GuestWalk) -> GuestLook {
        let Some(root) = self.cores[cpu].roots[0].get() else {
            return GuestLook::Fault(Fault::Address);
        };
        if walk.stamp != self.invalidations.now() && self.guest_is_overtaken(cpu, &walk, root) {
            return self.guest_start(cpu, walk.request, root);
        }
        let there = match walk.second {
            Second::Done(there) => there,
            Second::Walking(walking) => {
                return match self.step(cpu, walking) {
                    Look::Walking(walking) => {
                        GuestLook::Walking(GuestWalk { second: Second::Walking(walking), ..walk })
                    }
                    Look::Fault(fault) => self.second_faults(cpu, &walk, fault),
                    Look::Found(translated) => self.reached(cpu, walk, translated),
                };
            }
        };
        let (pa, va) = (there.pa(), walk.request.va);
        let descriptor = self.memory.read(pa);
        self.trace(cpu, || Event::Walk { va, pa, value: descriptor });
        let gone = self.memory.frame_at(pa).is_none_or(|frame| {
            let meta = self.memory.meta(frame);
            meta.state.get() != State::Data || meta.generation.get() != there.generation
        });
        if gone {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!(
                    "the walk of a guest for {va:#x} reads the descriptor that it has at {:#x} \
                     from {pa:#x}, which was given back",
                    walk.ipa
                ),
            );
            return GuestLook::Fault(Fault::Translation { depth: 0 });
        }
        let Some(mut step) = walk.walk else {
            return GuestLook::Fault(Fault::Address);
        };
        let depth = self.guest_depth(step.level());
        match step.step(descriptor) {
            Ok(None) => {
                let ipa = step.table() + step.index() as u64 * 8;
                let walk = GuestWalk { walk: Some(step), ..walk };
                self.reach(cpu, walk, ipa, Goal::Descriptor)
            }
            Ok(Some(leaf)) => self.guest_arrives(cpu, walk, &step, pa, leaf),
            Err(_) => GuestLook::Fault(Fault::Translation { depth }),
        }
    }

    fn guest_depth(&self, level: i8) -> u8 {
        let last = self.architecture.guest.map_or(level, Regime::last_level);
        (level - last).unsigned_abs()
    }

    /// An invalidation covers what the walk has of the guest's tables, or will have.
    fn guest_is_overtaken(&self, cpu: usize, walk: &GuestWalk, root: Root) -> bool {
        let va = walk.request.va;
        let depth = walk.walk.map_or(0, |step| self.guest_depth(step.level()));
        let covered = |tlbi: &Tlbi| {
            let tag = |depth| Tag { depth, ..walk.tag };
            let covers =
                |depth, table| tlbi.covers_combined(root.id, tag(depth), false, (va, va), table);
            covers(depth + 1, true) || (0..=depth).any(|leaf| covers(leaf, false))
        };
        !self.invalidations.spared_since(cpu, walk.stamp, covered)
    }

    /// The walk has come to a leaf of the guest, at `pa`.
    fn guest_arrives(
        &self,
        cpu: usize,
        walk: GuestWalk,
        step: &Walk,
        pa: u64,
        leaf: Leaf,
    ) -> GuestLook {
        let Some(regime) = self.architecture.guest else {
            return GuestLook::Fault(Fault::Address);
        };
        let request = walk.request;
        let depth = self.guest_depth(leaf.level);
        let faults = Family::of(regime).flags == Flags::WalkersOrFaults;
        if !leaf.accessed && faults && !self.architecture.hardware_access {
            return GuestLook::Fault(Fault::AccessFlag { depth });
        }
        let mut rights = self.rights_of(|| (regime, leaf.level), &leaf, step.denied());
        let allowed = rights & request.right() != 0;
        let mut wanted = with_access_flag(regime, leaf.level, leaf.raw).unwrap_or(leaf.raw);
        if allowed && request.want == Want::Write && rights & CLEAN != 0 {
            wanted = with_dirty(regime, leaf.level, wanted).unwrap_or(wanted);
            rights &= !CLEAN;
        }
        if wanted != leaf.raw {
            // A write, which stage 2 has to allow. What is there may be something else by then.
            if walk.goal != Goal::Flags(leaf.raw) {
                return self.reach(cpu, walk, walk.ipa, Goal::Flags(leaf.raw));
            }
            self.memory.write(pa, wanted);
        }
        if !allowed {
            return GuestLook::Fault(Fault::Permission { depth });
        }
        let size = if leaf.contiguous && self.dice.is_on() && self.dice.once_in(2) {
            leaf.size
        } else {
            leaf.run_size
        };
        let first = First {
            bits: size.trailing_zeros() as u8,
            depth,
            rights,
            global: leaf.global,
            raw: wanted,
        };
        self.reach(cpu, walk, leaf.physical(request.va), Goal::Data(first))
    }

    /// Combines both stages' answers for an address into one entry of the TLB, of the smaller size.
    fn combine(&self, cpu: usize, walk: &GuestWalk, first: First, second: &Cached) -> Cached {
        let bits = first.bits.min(second.bits);
        let va = walk.request.va >> bits << bits;
        let ipa = walk.ipa >> bits << bits;
        let rights =
            (first.rights & second.rights & !CLEAN) | ((first.rights | second.rights) & CLEAN);
        let entry = Cached {
            first: va,
            bits,
            global: first.global,
            rights,
            guest: Some(Tag { depth: first.depth, ..walk.tag }),
            pa: second.pa(ipa),
            stamp: walk.stamp,
            ..*second
        };
        let new = Combined { entry, ipa, rights: [first.rights, second.rights], raw: first.raw };
        if let Some(other) = self.find_combined(cpu, walk.request.va, second.id)
            && (other.raw, other.entry.guest) == (new.raw, new.entry.guest)
        {
            self.check_conflict(cpu, walk.request.va, &other.entry, &entry);
        }
        if !(self.dice.is_on() && self.dice.once_in(4)) {
            let guest = &self.cores[cpu].guest;
            let mut tlb = guest.tlb.borrow_mut();
            tlb.retain(|held| {
                (held.entry.first, held.entry.bits, held.entry.id, held.entry.guest)
                    != (entry.first, entry.bits, entry.id, entry.guest)
            });
            let room = self.architecture.tlb_sets * self.architecture.tlb_ways;
            replace(&mut tlb, new, room.clamp(1, MOST_COMBINED), &guest.next);
        }
        entry
    }

    /// Returns the entries that a CPU has combined, or knows of a guest's tables, that lead to
    /// memory, and that memory does not say any more.
    pub(super) fn combined_with(&self, cpu: usize, first: u64, end: u64) -> Option<Cached> {
        let guest = &self.cores[cpu].guest;
        let leads = |e: &Cached| e.pa < end && first < e.pa + (1 << e.bits);
        let tlb = guest.tlb.borrow();
        let held = tlb.iter().find(|held| {
            leads(&held.entry)
                && self.is_spared(cpu, &held.entry)
                && !self.still_says(&of_second(held))
        });
        let tables = guest.tables.borrow();
        let known = tables.iter().find(|known| {
            // The part of the page that the table is in.
            let at = known.page.pa(known.table);
            first <= at && at < end && self.is_known(cpu, known) && !self.still_says(&known.page)
        });
        held.map(|held| held.entry).or(known.map(|known| known.page))
    }

    /// Something that the hardware is free to do at any time happens to a guest. `near` is an
    /// address of stage 2 that is being worked on.
    pub(super) fn disturb_guest(&self, cpu: usize, other: usize, near: u64) {
        let guest = &self.cores[other].guest;
        let user = self.dice.once_in(2);
        let read = |va| Request { va, want: Want::Read, user };
        let va = self.guests.recall();
        match self.dice.below(8) {
            // Whatever makes the guest's walker come there.
            0 => {
                let mut look = self.second(other, read(near), false);
                while let Look::Walking(walking) = look {
                    look = self.step(other, walking);
                }
            }
            1 | 2 => {
                if let Some(va) = va {
                    let _ = self.guest_at_once(other, read(va));
                }
            }
            3 | 4 => {
                let mut look = match (guest.speculative.take(), va) {
                    (Some(walk), _) => GuestLook::Walking(walk),
                    (None, Some(va)) => self.guest_look_now(other, read(va), false),
                    (None, None) => return,
                };
                for _ in 0..=self.dice.below(8) {
                    if let GuestLook::Walking(walk) = look {
                        look = self.guest_step(other, walk);
                    }
                }
                if let GuestLook::Walking(walk) = look {
                    guest.speculative.set(Some(walk));
                }
            }
            5 => {
                let place = self.dice.below(1 << 16) as usize;
                self.cores[other].tlb.evict(place);
                self.cores[other].cache.evict(place);
                evict(&mut guest.tlb.borrow_mut(), place);
                evict(&mut guest.tables.borrow_mut(), place);
            }
            6 => self.drain_any(if self.dice.once_in(2) { cpu } else { other }),
            _ => {
                if let Some(va) = va {
                    self.guest_early(other, read(va));
                }
            }
        }
    }

    /// A translation is made before its access.
    pub(crate) fn guest_early(&self, cpu: usize, request: Request) {
        let result = self.guest_at_once(cpu, request);
        if result == Err(Fault::Address) {
            return;
        }
        let mut early = self.cores[cpu].early.borrow_mut();
        if early.len() < 8 {
            early.push(Early { request, result });
        }
    }

    /// A whole walk in one step.
    pub(crate) fn guest_at_once(&self, cpu: usize, request: Request) -> Result<Translated, Fault> {
        let mut look = self.guest_look_now(cpu, request, false);
        loop {
            match look {
                GuestLook::Found(translated) => return Ok(translated),
                GuestLook::Fault(fault) => return Err(fault),
                GuestLook::Walking(walk) => look = self.guest_step(cpu, walk),
            }
        }
    }
}

impl Combined {
    fn at(self, stamp: u64) -> Self {
        let entry = Cached { stamp, ..self.entry };
        Self { entry, ..self }
    }

    pub(super) fn span(&self) -> (u64, u64) {
        self.entry.span()
    }

    /// Like any other that translates alike.
    fn normalised(&self) -> Self {
        let entry = self.entry.normalised();
        Self { entry, ..*self }
    }

    /// Whether it is for an address, under a VMID and an identifier of the guest.
    fn translates(&self, va: u64, vmid: u16, asid: Option<u16>) -> bool {
        let (entry, span) = (&self.entry, self.span());
        let named = entry.guest.is_some_and(|tag| {
            tag.asid == asid || entry.global && tag.asid.is_some() && asid.is_some()
        });
        entry.id == vmid && named && span.0 <= va && va <= span.1
    }

    /// Returns the key of an entry, of which there is one.
    pub(super) fn key(&self) -> (u64, u8, u16) {
        (self.entry.first, self.entry.bits, self.entry.id)
    }

    pub(super) fn order(&self) -> (u64, u8, u16, u64, u64, u8) {
        let e = &self.entry;
        (e.first, e.bits, e.id, e.raw, e.pa, e.rights)
    }
}

/// The number of combined entries that a CPU has at most.
const MOST_COMBINED: usize = 64;

/// No entry: what a walk has before it has anything.
const NOWHERE: Cached = Cached {
    first: 0,
    bits: 0,
    depth: 0,
    id: 0,
    space: 0,
    global: false,
    contiguous: false,
    rights: 0,
    guest: None,
    pa: 0,
    raw: 0,
    at: 0,
    stamp: 0,
};

/// The part of stage 2 in a combined entry.
fn of_second(combined: &Combined) -> Cached {
    Cached { first: combined.ipa, guest: None, ..combined.entry }
}

fn second_fault(ipa: u64, want: Want, on_walk: bool, fault: Fault) -> Fault {
    let (cause, depth) = match fault {
        Fault::Translation { depth } => (Cause::Translation, depth),
        Fault::AccessFlag { depth } => (Cause::AccessFlag, depth),
        Fault::Permission { depth } => (Cause::Permission, depth),
        Fault::Address => (Cause::Translation, 0),
        Fault::Second { .. } | Fault::LogFull => return fault,
    };
    Fault::Second { ipa, want, on_walk, cause, depth }
}

fn replace<T>(held: &mut Vec<T>, new: T, room: usize, next: &Cell<usize>) {
    if held.len() < room {
        held.push(new);
    } else {
        let at = next.get() % room;
        next.set(at + 1);
        held[at] = new;
    }
}

fn evict<T>(held: &mut Vec<T>, place: usize) {
    if !held.is_empty() {
        held.swap_remove(place % held.len());
    }
}

//! The state of the hardware as a value, for the explorer of [litmus tests](crate::litmus), which
//! goes back and forth between states.
//!
//! An image is *normal*: two states that behave alike from here on have equal images. What an
//! invalidation has covered is left out, and everything that is left counts as remembered now: the
//! number of the last invalidation does not matter. Stores are numbered by the order of their
//! groups alone.

use std::hash::{Hash, Hasher};

use super::guest::Combined;
use super::{Buffered, Hardware, KnownFirst, Look, Request, Root, Translated, Walking};
use crate::memory::{ROOT, State};
use crate::tlb::{Cached, Remembered, Tlbi};

/// The state of one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Image {
    roots: [Option<Root>; 2],
    before: Option<Root>,
    tlb: Vec<Cached>,
    cache: Vec<Remembered>,
    combined: Vec<Combined>,
    firsts: Vec<KnownFirst>,
    buffer: Vec<Buffered>,
    group: u32,
    pending: Vec<(Tlbi, bool)>,
}

impl Walking {
    /// The address under translation.
    pub(crate) fn va(&self) -> u64 {
        self.request.va
    }
}

impl Hash for Walking {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The stamp of a walk that was not overtaken does not matter.
        let walk = &self.walk;
        (self.request, self.id, self.space).hash(state);
        (walk.table(), walk.level(), walk.denied()).hash(state);
    }
}

impl Image {
    /// Stores in the buffer, the oldest first: where they go.
    pub fn buffered(&self) -> impl Iterator<Item = u64> {
        self.buffer.iter().map(|stored| stored.pa)
    }

    /// Invalidations that are not complete, and whether each has taken effect.
    pub fn pending(&self) -> &[(Tlbi, bool)] {
        &self.pending
    }

    /// The identifier that translations are remembered under.
    pub fn id(&self) -> Option<u16> {
        self.roots[0].map(|root| root.id)
    }

    /// The root, and the identifier.
    pub fn root(&self) -> Option<(u64, u16)> {
        self.roots[0].map(|root| (root.table, root.id))
    }

    /// Whether walks may still use another root than the one that was loaded last.
    pub fn is_switching(&self) -> bool {
        self.before.is_some()
    }

    /// Returns the remembered answers of stage 1 alone for an address.
    pub fn firsts(&self, va: u64) -> impl Iterator<Item = &KnownFirst> {
        self.firsts
            .iter()
            .filter(move |held| held.va == va & !0xfff && Some(held.vmid()) == self.id())
    }

    /// Levels below the tables that the walk cache knows for an address.
    pub fn known(&self, hardware: &Hardware, va: u64) -> Vec<u8> {
        let covers = |known: &&Remembered| {
            let bits = hardware.shift(known.depth) + hardware.index_bits;
            Some(known.id) == self.id() && known.first == va >> bits << bits
        };
        self.cache.iter().filter(covers).map(|known| known.depth).collect()
    }

    /// Takes in what the TLB and the walk cache held `before`, where this image has the same tag or
    /// none: a walk need not have displaced anything.
    pub fn keep(&mut self, before: &Self) {
        for old in &before.tlb {
            self.tlb.retain(|new| {
                !(new.first == old.first && new.bits == old.bits && new.id == old.id)
            });
            self.tlb.push(*old);
        }
        for old in &before.cache {
            let same = |new: &Remembered| {
                new.first == old.first && new.depth == old.depth && new.id == old.id
            };
            self.cache.retain(|new| !same(new));
            self.cache.push(*old);
        }
        for old in &before.combined {
            self.combined.retain(|new| new.key() != old.key());
            self.combined.push(*old);
        }
        self.sort();
    }

    /// The TLB holds what it held `before`: a walk need not have been remembered.
    pub fn hold(&mut self, before: &Self) {
        self.tlb.clone_from(&before.tlb);
        self.combined.clone_from(&before.combined);
    }

    /// Forgets what no access will ask for: translations and tables of addresses that are not
    /// `wanted`, by the virtual address or, where a guest has a stage 1, the one that stage 2
    /// translates.
    pub fn forget(
        &mut self,
        hardware: &Hardware,
        wanted: impl Fn(u64, u64) -> bool,
        wanted_of_second: impl Fn(u64, u64) -> bool,
        tables: impl Fn(&Remembered) -> bool,
    ) {
        self.tlb.retain(|entry| {
            let (first, last) = entry.span();
            wanted_of_second(first, last)
        });
        self.cache.retain(|known| {
            let bits = hardware.shift(known.depth) + hardware.index_bits;
            wanted_of_second(known.first, known.first + ((1u64 << bits) - 1)) && tables(known)
        });
        self.combined.retain(|held| {
            let (first, last) = held.span();
            wanted(first, last)
        });
        self.firsts.retain(|held| wanted(held.va, held.va));
    }

    fn sort(&mut self) {
        self.tlb.sort_unstable_by_key(|e| (e.first, e.bits, e.id, e.raw, e.pa, e.rights));
        self.cache.sort_unstable_by_key(|k| (k.first, k.depth, k.id, k.table));
        self.combined.sort_unstable_by_key(Combined::order);
        self.firsts.sort_unstable();
    }
}

impl Hardware {
    /// From here on rules are not checked and stores wait in buffers.
    pub(crate) fn explore(&self) {
        self.stop_judging();
        self.buffering.set(true);
        self.look_around();
    }

    /// A table is where walkers may come, linked or not.
    pub(crate) fn expose(&self, table: u64, depth: u8, first: u64, space: u16) {
        if let Some(frame) = self.memory.frame_at(table) {
            let meta = self.memory.meta(frame);
            meta.state.set(State::Live);
            meta.depth.set(depth);
            meta.first.set(first);
            meta.space.set(space);
            meta.parent.set(ROOT);
        }
    }

    /// The state of one CPU.
    pub(crate) fn save(&self, cpu: usize) -> Image {
        let core = &self.cores[cpu];
        let mut buffer = core.buffer.borrow().clone();
        let mut groups: Vec<u32> = buffer.iter().map(|stored| stored.group).collect();
        groups.dedup();
        let number =
            |group: u32| groups.iter().position(|&g| g == group).unwrap_or(groups.len()) as u32;
        for stored in &mut buffer {
            stored.group = number(stored.group);
        }
        let mut image = Image {
            roots: [core.roots[0].get(), core.roots[1].get()],
            before: core.before.get(),
            tlb: core.tlb.iter(cpu, &self.invalidations).map(Cached::normalised).collect(),
            cache: core
                .cache
                .iter()
                .filter(|known| self.is_remembered(cpu, known))
                .map(|known| Remembered { stamp: 0, ..known })
                .collect(),
            combined: self.save_combined(cpu),
            firsts: self.save_firsts(cpu),
            group: number(core.group.get()),
            buffer,
            pending: core.pending.borrow().clone(),
        };
        image.sort();
        image
    }

    /// The state of one CPU becomes that of an image.
    pub(crate) fn load_image(&self, cpu: usize, image: &Image) {
        let core = &self.cores[cpu];
        let stamp = self.invalidations.now();
        for (root, saved) in core.roots.iter().zip(image.roots) {
            root.set(saved);
        }
        core.before.set(image.before);
        core.tlb.clear();
        for entry in &image.tlb {
            core.tlb.insert(Cached { stamp, ..*entry });
        }
        core.cache.clear();
        for known in &image.cache {
            let bits = self.shift(known.depth) + self.index_bits;
            core.cache.insert(Remembered { stamp, ..*known }, bits);
        }
        self.load_combined(cpu, &image.combined);
        self.load_firsts(cpu, &image.firsts);
        core.buffer.borrow_mut().clone_from(&image.buffer);
        core.group.set(image.group);
        core.pending.borrow_mut().clone_from(&image.pending);
    }

    /// From here on rules are not checked.
    pub(crate) fn stop_judging(&self) {
        self.judging.set(false);
    }

    /// Whether a CPU has invalidations to wait for.
    pub(crate) fn has_pending(&self, cpu: usize) -> bool {
        !self.cores[cpu].pending.borrow().is_empty()
    }

    /// Loads a root, and does not synchronise.
    pub(crate) fn switch_root(&self, cpu: usize, space: u16) {
        let early = self.cores[cpu].early.take();
        self.write_root(cpu, space);
        self.cores[cpu].early.replace(early);
    }

    /// Loads a root by a write of the register alone: until the context is synchronised, walks may
    /// use the one before, with its identifier. The two are fields of one register, so that no walk
    /// has one of each (DDI 0487 D1.6.4, D8.16.3).
    pub(crate) fn write_root(&self, cpu: usize, space: u16) {
        let core = &self.cores[cpu];
        let before = core.before.get().or(core.roots[0].get());
        self.load_root(cpu, space);
        core.before.set(before.filter(|&before| Some(before) != core.roots[0].get()));
    }

    /// Looks for a translation as it was before the register was written.
    pub(crate) fn look_before(&self, cpu: usize, request: Request) -> Option<Look> {
        let core = &self.cores[cpu];
        let (before, root) = (core.before.get()?, core.roots[0].get());
        core.roots[0].set(Some(before));
        let look = self.look(cpu, request);
        core.roots[0].set(root);
        Some(look)
    }

    /// A store of a CPU enters its buffer.
    pub(crate) fn buffer_store(&self, cpu: usize, pa: u64, value: u64) {
        let core = &self.cores[cpu];
        let group = core.group.get();
        core.buffer.borrow_mut().push(Buffered { pa, value, before: 0, group });
    }

    /// A walk that was under way when it was saved goes on from here, unless it was overtaken
    /// meanwhile.
    pub(crate) fn revive(&self, walking: Walking) -> Walking {
        let stamp = self.invalidations.now();
        Walking { stamp, ..walking }
    }

    /// Whether an invalidation has covered the address of a walk
    /// since it was revived; `va` is the virtual address, of a guest too.
    pub(crate) fn is_lost(&self, cpu: usize, walking: &Walking, va: u64) -> bool {
        let Walking { stamp, id, .. } = *walking;
        stamp != self.invalidations.now()
            && (self.is_overtaken(cpu, walking) || self.is_combining_lost(cpu, id, va, stamp))
    }

    /// A walk is like any other with the same tables before it.
    pub(crate) fn normalised(walking: Walking) -> Walking {
        Walking { stamp: 0, ..walking }
    }

    /// Starts a walk at the root, or where the walk cache knows the table with so many levels below
    /// it, whatever the TLB holds.
    pub(crate) fn start_at(&self, cpu: usize, request: Request, depth: Option<u8>) -> Option<Look> {
        let root = self.cores[cpu].roots[self.half(request.va)].get()?;
        let stamp = self.invalidations.now();
        let regime = self.architecture.regime;
        let walk = match depth {
            None => tablewright_walker::Walk::new(regime, root.table, request.va).ok()?,
            Some(depth) => {
                let bits = self.shift(depth) + self.index_bits;
                let cache = &self.cores[cpu].cache;
                let known =
                    cache.find(cpu, request.va, root.id, depth, bits, &self.invalidations)?;
                tablewright_walker::Walk::resume(
                    regime,
                    known.table,
                    self.level(depth),
                    known.denied,
                    request.va,
                )
            }
        };
        Some(Look::Walking(Walking { request, walk, stamp, id: root.id, space: root.space }))
    }

    /// Whether the TLB has a translation for an access.
    pub(crate) fn holds(&self, cpu: usize, request: Request) -> bool {
        let root = self.cores[cpu].roots[self.half(request.va)].get();
        if self.is_nested() && self.look_combined(cpu, request).is_some() {
            return true;
        }
        root.is_some_and(|root| {
            let found = self.cores[cpu].tlb.find(cpu, request.va, root.id, &self.invalidations);
            found.is_some()
        })
    }

    /// Returns the remembered contiguous run around an address.
    pub(crate) fn look_run(&self, cpu: usize, request: Request, bits: u8) -> Option<Look> {
        if self.is_nested() {
            return self.look_combined_of(cpu, request, |entry| entry.bits == bits);
        }
        let root = self.cores[cpu].roots[self.half(request.va)].get()?;
        let tlb = &self.cores[cpu].tlb;
        let entry = tlb.find_sized(cpu, request.va, root.id, bits, &self.invalidations)?;
        Some(self.use_entry(cpu, request, entry))
    }

    /// Translates an access to `va` by what a walk has found of another member of its run. `None`
    /// if it has found no run, or one elsewhere.
    pub(crate) fn through_run(&self, found: Translated, va: u64) -> Option<Translated> {
        let Translated { request, entry, .. } = found;
        let (first, last) = entry.span();
        let covers = entry.contiguous && first <= va && va <= last;
        covers.then(|| self.translated(Request { va, ..request }, entry))
    }

    /// Whether members of contiguous runs are remembered one by one from here on.
    pub(crate) fn remember_alone(&self, alone: bool) {
        self.alone.set(alone);
    }

    /// Walks until the next descriptor is one that may change and one that may change has been
    /// read.
    pub(crate) fn stride(&self, cpu: usize, look: Look, changes: impl Fn(u64) -> bool) -> Look {
        let mut look = look;
        let mut read = false;
        while let Look::Walking(walking) = look {
            let at = walking.walk.table() + walking.walk.index() as u64 * 8;
            if changes(at) && std::mem::replace(&mut read, true) {
                break;
            }
            look = self.step(cpu, walking);
        }
        look
    }

    /// Completes what is pending and local to this CPU; what is broadcast only has taken effect
    /// here.
    pub(crate) fn complete_here(&self, cpu: usize) {
        let broadcast: Vec<_> = {
            let pending = self.cores[cpu].pending.borrow();
            pending.iter().filter(|(tlbi, _)| tlbi.broadcast).copied().collect()
        };
        let local = |&(tlbi, _): &(Tlbi, bool)| Tlbi { broadcast: false, ..tlbi };
        for tlbi in broadcast.iter().map(local) {
            self.invalidations.take_effect(&tlbi, cpu);
        }
        self.cores[cpu].pending.borrow_mut().retain(|(tlbi, _)| !tlbi.broadcast);
        self.complete(cpu);
        *self.cores[cpu].pending.borrow_mut() = broadcast;
    }

    /// An invalidation that was issued and not completed takes effect.
    pub(crate) fn take_effect_of(&self, cpu: usize, number: usize) {
        let mut pending = self.cores[cpu].pending.borrow_mut();
        if let Some((tlbi, done)) = pending.get_mut(number) {
            self.invalidations.take_effect(tlbi, cpu);
            *done = true;
        }
    }
}

impl Cached {
    /// Like any other that translates alike: of a run it does not matter which member it was made
    /// of.
    pub(super) fn normalised(self) -> Self {
        let (raw, at) = match self.contiguous {
            // With 4 KiB pages, which all tests have.
            true => (0, self.at & !127),
            false => (self.raw, self.at),
        };
        Self { raw, at, stamp: 0, ..self }
    }
}

impl Translated {
    /// Like any other with the same entry.
    pub(crate) fn normalised(mut self) -> Self {
        self.entry = self.entry.normalised();
        self.generation = 0;
        self
    }
}

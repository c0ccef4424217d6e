//! From an address to memory: TLB, walk cache, walks, and the flags that hardware sets.

use crate::architecture::{Family, Flags, Ordering};
use crate::memory::{POISON, State};
use crate::rules::{HARDWARE_FLAGS, Rule, is_harmless};
use crate::time::Time;
use crate::tlb::{Cached, Remembered};
use crate::trace::Event;
use tablewright_walker::{
    Denied, Descriptor, Fault as WalkFault, Leaf, Regime, Walk, decode, with_access_flag,
    with_dirty,
};

use super::{
    CLEAN, EXECUTE, Early, Fault, Hardware, Look, READ, Request, Root, Translated, USER, WRITE,
    Walking, Want,
};

impl Hardware {
    /// Looks for a translation where it may be remembered.
    #[inline(always)]
    pub fn look(&self, cpu: usize, request: Request) -> Look {
        if self.wary.get()
            && let Some(early) = self.take_early(cpu, request)
        {
            return early;
        }
        let mut root = self.cores[cpu].roots[self.half(request.va)].get();
        if self.wary.get()
            && let Some(before) = self.cores[cpu].before.get()
            && self.dice.is_on()
            && self.dice.once_in(2)
        {
            root = Some(before);
        }
        let Some(root) = root else {
            return Look::Fault(Fault::Address);
        };
        let skip = self.dice.is_on() && self.dice.once_in(8);
        let found = self.cores[cpu].tlb.find(cpu, request.va, root.id, &self.invalidations);
        match found.filter(|_| !skip) {
            Some(entry) => self.use_entry(cpu, request, entry),
            None => self.start(cpu, request, root),
        }
    }

    pub(super) fn take_early(&self, cpu: usize, request: Request) -> Option<Look> {
        let mut early = self.cores[cpu].early.borrow_mut();
        let at = early.iter().position(|e| e.request == request)?;
        let Early { result, .. } = early.remove(at);
        match result {
            Ok(translated) => Some(Look::Found(translated)),
            // A fault that is taken is that of a walk in program order.
            Err(_) if self.architecture.ordering != Ordering::Base => None,
            Err(fault) => Some(Look::Fault(fault)),
        }
    }

    /// A TLB entry was found: whether it allows the access.
    #[inline(always)]
    pub(super) fn use_entry(&self, cpu: usize, request: Request, entry: Cached) -> Look {
        let fault = Fault::Permission { depth: entry.depth };
        if entry.rights & request.right() == 0 {
            if self.is_hole(&entry) {
                return Look::Fault(Fault::Translation { depth: entry.depth });
            }
            if self.architecture.permission_fault_drops_entry {
                self.cores[cpu].tlb.drop_entry(&entry);
                self.drop_path(cpu, request.va);
            }
            return Look::Fault(fault);
        }
        if request.want == Want::Write && entry.rights & CLEAN != 0 {
            // The dirty state has to be set in memory, where the descriptor may have changed: a
            // walk does it.
            self.cores[cpu].tlb.drop_entry(&entry);
            return match self.cores[cpu].roots[self.half(request.va)].get() {
                Some(root) => self.start(cpu, request, root),
                None => Look::Fault(Fault::Address),
            };
        }
        self.check_use(cpu, request, &entry);
        Look::Found(self.translated(request, entry))
    }

    /// Drops the translation that a fault was found with, the tables on the way included (SDM vol.
    /// 3A 5.10.4.1, vol. 3C 29.4.3.1).
    pub(super) fn drop_path(&self, cpu: usize, va: u64) {
        for depth in 0..self.top {
            let bits = self.shift(depth) + self.index_bits;
            self.cores[cpu].cache.drop_entry(va, depth, bits);
        }
    }

    pub(super) fn translated(&self, request: Request, entry: Cached) -> Translated {
        let generation = self
            .memory
            .frame_at(entry.pa(request.va))
            .map_or(0, |frame| self.memory.meta(frame).generation.get());
        Translated { request, entry, generation }
    }

    /// Checks that a TLB says what memory says, or that the change is one that is still to be
    /// invalidated.
    #[inline(always)]
    pub(super) fn check_use(&self, cpu: usize, request: Request, entry: &Cached) {
        let now = self.memory.read(entry.at);
        if now != entry.raw {
            self.check_stale(cpu, request, entry, now);
        }
    }

    #[inline(never)]
    pub(super) fn check_stale(&self, cpu: usize, request: Request, entry: &Cached, now: u64) {
        // Walkers may use what they like where the program uses nothing.
        if !self.judging.get() || !self.uses_leaf(cpu, entry.space, entry.global) {
            return;
        }
        let was = self.decode(entry.depth, entry.first, Denied::default(), entry.raw);
        let is = self.decode(entry.depth, entry.first, Denied::default(), now);
        let harmless = match (&was, &is) {
            (Descriptor::Leaf(was), Descriptor::Leaf(is)) => {
                is_harmless(was, is) || self.is_in_the_run(entry, is)
            }
            _ => false,
        };
        // What is remembered of one member of a run may have been made of another, which is being
        // broken.
        let span = match &was {
            Descriptor::Leaf(leaf) if leaf.contiguous => self.run_around(entry.first, entry.depth),
            _ => entry.span(),
        };
        let owed = self.obligations.borrow().about(entry.space, span).next().is_some();
        // The table that the entry stood in may be long gone, with the obligation for it.
        if !harmless && !owed && !self.is_pending(request.va) {
            self.violate(
                Rule::StaleUse,
                cpu,
                format!(
                    "the TLB translates {:#x} by {:#x}, memory says {now:#x}, and nothing is left \
                     to invalidate",
                    request.va, entry.raw
                ),
            );
        }
    }

    /// Returns whether the difference is in the flags of a contiguous run, which hardware may have
    /// set in another member (DDI 0487 D8.5.5).
    pub(super) fn is_in_the_run(&self, entry: &Cached, is: &Leaf) -> bool {
        if !is.contiguous || (entry.raw ^ is.raw) & !HARDWARE_FLAGS != 0 {
            return false;
        }
        let regime = self.architecture.regime;
        let members = regime.run_entries(self.level(entry.depth)) as u64;
        let run = entry.at & !(members * 8 - 1);
        let read = |member| self.memory.read(run + member * 8);
        let seen = self.flags(entry.raw);
        let all = (0..members).fold(0, |all, member| all | self.flags(read(member)));
        seen & !all == 0
    }

    /// An invalidation that covers the address is issued and not complete.
    pub(super) fn is_pending(&self, va: u64) -> bool {
        self.cores.iter().any(|core| {
            core.pending
                .borrow()
                .iter()
                .any(|(tlbi, _)| tlbi.range.is_none_or(|(a, b)| a <= va && va <= b))
        })
    }

    /// Starts a walk, where the walk cache knows the way.
    #[inline(always)]
    pub(super) fn start(&self, cpu: usize, request: Request, root: Root) -> Look {
        let regime = self.architecture.regime;
        let stamp = self.invalidations.now();
        let skip = self.dice.is_on() && self.dice.once_in(8);
        let mut depth = 0;
        while depth < self.top && !skip {
            let bits = self.shift(depth) + self.index_bits;
            let known = self.cores[cpu].cache.find(
                cpu,
                request.va,
                root.id,
                depth,
                bits,
                &self.invalidations,
            );
            if let Some(known) = known {
                let level = self.level(depth);
                return Look::Walking(Walking {
                    request,
                    walk: Walk::resume(regime, known.table, level, known.denied, request.va),
                    stamp,
                    id: root.id,
                    space: root.space,
                });
            }
            depth += 1;
        }
        match Walk::new(regime, root.table, request.va) {
            Ok(walk) => {
                Look::Walking(Walking { request, walk, stamp, id: root.id, space: root.space })
            }
            Err(_) => Look::Fault(Fault::Address),
        }
    }

    /// The walker reads one descriptor.
    #[inline(always)]
    pub fn step(&self, cpu: usize, walking: Walking) -> Look {
        let va = walking.request.va;
        if walking.stamp != self.invalidations.now() && self.is_overtaken(cpu, &walking) {
            return match self.cores[cpu].roots[self.half(va)].get() {
                Some(root) => self.start(cpu, walking.request, root),
                None => Look::Fault(Fault::Address),
            };
        }
        let Walking { mut walk, .. } = walking;
        let (table, index) = (walk.table(), walk.index());
        let depth = self.depth(walk.level());
        let at = table + index as u64 * 8;
        let descriptor = self.read_entry(cpu, at, walking.request);
        self.trace(cpu, || Event::Walk { va, pa: at, value: descriptor });
        let good = self.memory.frame_at(table).is_some_and(|frame| {
            matches!(self.memory.meta(frame).state.get(), State::Live | State::Detached)
        });
        if !good || descriptor == POISON {
            self.astray(cpu, va, table, depth, descriptor);
            return Look::Fault(Fault::Translation { depth });
        }
        match walk.step(descriptor) {
            Ok(None) => {
                let below = depth - 1;
                let bits = self.shift(below) + self.index_bits;
                self.cores[cpu].cache.insert(
                    Remembered {
                        first: va >> bits << bits,
                        depth: below,
                        id: walking.id,
                        space: walking.space,
                        table: walk.table(),
                        denied: walk.denied(),
                        stamp: walking.stamp,
                    },
                    bits,
                );
                Look::Walking(Walking { walk, ..walking })
            }
            Ok(Some(leaf)) => self.arrive(cpu, walking, at, depth, leaf),
            Err(WalkFault::Reserved(why)) => {
                self.violate(Rule::Reserved, cpu, format!("a walk for {va:#x}: {why}"));
                Look::Fault(Fault::Translation { depth })
            }
            Err(_) => {
                self.remember_hole(cpu, &walking, at, depth, descriptor);
                Look::Fault(Fault::Translation { depth })
            }
        }
    }

    /// Whether it is remembered that there was nothing.
    pub(super) fn is_hole(&self, entry: &Cached) -> bool {
        self.architecture.invalid_entries_cached && !self.is_valid(entry.raw)
    }

    /// That there was nothing may be remembered, where hardware does (PRIV 10.3.2; not with
    /// Svvptc).
    fn remember_hole(&self, cpu: usize, walking: &Walking, at: u64, depth: u8, raw: u64) {
        if !self.architecture.invalid_entries_cached || !self.dice.is_on() || self.dice.once_in(2) {
            return;
        }
        let bits = self.shift(depth);
        self.cores[cpu].tlb.insert(Cached {
            first: walking.request.va >> bits << bits,
            bits: bits as u8,
            depth,
            id: walking.id,
            space: walking.space,
            global: false,
            contiguous: false,
            rights: 0,
            guest: None,
            pa: 0,
            raw,
            at,
            stamp: walking.stamp,
        });
    }

    pub(super) fn is_overtaken(&self, cpu: usize, walking: &Walking) -> bool {
        let va = walking.request.va;
        let depth = self.depth(walking.walk.level());
        let spare = |depth, table| {
            self.invalidations.spare(cpu, walking.stamp, walking.id, false, (va, va), depth, table)
        };
        // It holds tables, and will hold a leaf of a level that it does not know yet.
        !(spare(depth + 1, true) && (0..=depth).all(|leaf| spare(leaf, false)))
    }

    #[cold]
    pub(super) fn astray(&self, cpu: usize, va: u64, table: u64, depth: u8, descriptor: u64) {
        if !self.judging.get() {
            return;
        }
        let state = match self.memory.frame_at(table) {
            None => "which is no memory".to_owned(),
            Some(frame) => match self.memory.meta(frame).state.get() {
                State::Free => "which was given back".to_owned(),
                State::Private => "which was given back and taken again".to_owned(),
                State::Data => "which holds data".to_owned(),
                _ => format!("in which the entry was not written ({descriptor:#x})"),
            },
        };
        self.violate(
            Rule::WalkAstray,
            cpu,
            format!(
                "the walk for {va:#x} comes to the level {} table at {table:#x}, {state}",
                self.level(depth)
            ),
        );
    }

    /// Returns what a walker finds in an entry. On x86 it finds what its own CPU has stored and
    /// others do not see yet, but where it has to set a flag, which it does in memory. A program
    /// that is judged runs without: rules compare what is used with what memory says.
    #[inline(always)]
    fn read_entry(&self, cpu: usize, at: u64, request: Request) -> u64 {
        let seen = self.memory.read(at);
        if !self.buffering.get() || self.judging.get() || !self.architecture.is_ordered() {
            return seen;
        }
        let own = self.visible_to(cpu, at);
        let dirty = if request.want == Want::Write { self.bits.dirty } else { 0 };
        let flags = self.bits.accessed | dirty;
        if own & flags == flags { own } else { seen }
    }

    /// The walk has come to a leaf.
    #[inline(always)]
    pub(super) fn arrive(
        &self,
        cpu: usize,
        walking: Walking,
        at: u64,
        depth: u8,
        leaf: Leaf,
    ) -> Look {
        let request = walking.request;
        let (mut leaf, mut at) = (leaf, at);
        let mut raw = leaf.raw;
        if !leaf.accessed && self.bits.accessed != 0 {
            if !self.architecture.hardware_access || self.leaves.get().0 {
                return Look::Fault(Fault::AccessFlag { depth });
            }
            raw = self.set_flag(at, &leaf, depth, |descriptor| {
                let regime = self.architecture.regime;
                with_access_flag(regime, self.level(depth), descriptor)
            });
            leaf.raw = raw;
        }
        let mut rights = self.rights(&leaf, depth, walking.walk.denied());
        if rights & request.right() == 0 {
            if self.architecture.permission_fault_drops_entry {
                self.drop_path(cpu, request.va);
            } else {
                // Permission faults are remembered.
                self.remember(cpu, &walking, at, depth, &leaf, raw, rights);
            }
            return Look::Fault(Fault::Permission { depth });
        }
        if request.want == Want::Write && rights & CLEAN != 0 {
            if !self.log_modification(cpu, request.va) {
                return Look::Fault(Fault::LogFull);
            }
            raw = self.set_flag(at, &leaf, depth, |descriptor| {
                let regime = self.architecture.regime;
                with_dirty(regime, self.level(depth), descriptor)
            });
            rights &= !CLEAN;
        }
        if leaf.contiguous && (self.alone.get() || self.dice.is_on() && self.dice.once_in(2)) {
            // Members may be remembered one by one.
            leaf.run_size = leaf.size;
        }
        // The entry that was used.
        at &= !7;
        let entry = self.remember(cpu, &walking, at, depth, &leaf, raw, rights);
        Look::Found(self.translated(request, entry))
    }

    /// Returns the leaf's rights, with the dirty state that hardware manages.
    #[inline(always)]
    pub(super) fn rights(&self, leaf: &Leaf, depth: u8, denied: Denied) -> u8 {
        let place = || (self.architecture.regime, self.level(depth));
        self.rights_of(place, leaf, denied)
    }

    /// Returns the rights of a leaf of any regime and level.
    #[inline(always)]
    pub(super) fn rights_of(
        &self,
        place: impl Fn() -> (Regime, i8),
        leaf: &Leaf,
        denied: Denied,
    ) -> u8 {
        let mut leaf = *leaf;
        let mut clean = false;
        match leaf.dirty {
            tablewright_walker::DirtyState::Arm64 { dbm: true, read_only: true }
                if self.architecture.hardware_dirty && !self.leaves.get().1 =>
            {
                // Writable, and its first write is to be recorded.
                let (regime, level) = place();
                let writable = with_dirty(regime, level, leaf.raw).unwrap_or(leaf.raw);
                if let Descriptor::Leaf(as_written) =
                    decode(regime, level, leaf.va, denied, writable)
                {
                    leaf.access = as_written.access;
                    clean = leaf.access.privileged.write || leaf.access.user.write;
                }
            }
            tablewright_walker::DirtyState::Bit { dirty: false } => {
                let flags = Family::of(place().0).flags;
                let by_walkers = self.architecture.hardware_dirty && !self.leaves.get().1;
                clean = leaf.access.privileged.write || leaf.access.user.write;
                match flags {
                    Flags::Walkers => {}
                    Flags::WalkersOrNone => clean &= self.architecture.hardware_dirty,
                    Flags::WalkersOrFaults => {
                        clean &= by_walkers;
                        leaf.access.privileged.write &= clean;
                        leaf.access.user.write &= clean;
                    }
                }
            }
            _ => {}
        }
        let of = |p: tablewright_walker::Permissions| {
            (u8::from(p.read) * READ)
                | (u8::from(p.write) * WRITE)
                | (u8::from(p.execute) * EXECUTE)
        };
        of(leaf.access.privileged) | of(leaf.access.user) << USER | (u8::from(clean) * CLEAN)
    }

    /// Hardware sets a flag in a leaf, atomically with the look at it. Gives the descriptor as it
    /// is then.
    #[inline(never)]
    pub(super) fn set_flag(
        &self,
        at: u64,
        leaf: &Leaf,
        depth: u8,
        flag: impl Fn(u64) -> Option<u64>,
    ) -> u64 {
        // In a run, hardware may record it in any member (DDI 0487 D8.5.5).
        let mut target = at;
        if leaf.contiguous && self.dice.is_on() && self.dice.once_in(2) {
            let regime = self.architecture.regime;
            let members = regime.run_entries(self.level(depth)) as u64;
            let run = at & !(members * 8 - 1);
            target = run + self.dice.below(members) * 8;
        }
        for place in [target, at] {
            let before = self.memory.read(place);
            let Some(after) = self.is_valid(before).then(|| flag(before)).flatten() else {
                continue;
            };
            if after != before {
                self.memory.write(place, after);
                if !self.judging.get() {
                    break;
                }
                // A store that has not come this far says for itself what its CPU knows.
                let known = self.stored(place).map_or(0, |value| self.flags(value));
                let gained = self.flags(after) & !self.flags(before) & !known;
                if gained != 0 {
                    *self.unseen.borrow_mut().entry(place).or_default() |= gained;
                    self.wary.set(true);
                }
            }
            break;
        }
        // What is remembered has the flag, whichever member was written.
        flag(leaf.raw).unwrap_or(leaf.raw)
    }

    /// The translation goes into the TLB.
    #[allow(clippy::too_many_arguments)] // All that a TLB entry is made of.
    #[inline(always)]
    pub(super) fn remember(
        &self,
        cpu: usize,
        walking: &Walking,
        at: u64,
        depth: u8,
        leaf: &Leaf,
        raw: u64,
        rights: u8,
    ) -> Cached {
        let first = leaf.va & !(leaf.run_size - 1);
        let entry = Cached {
            first,
            bits: leaf.run_size.trailing_zeros() as u8,
            depth,
            id: walking.id,
            space: walking.space,
            global: leaf.global,
            contiguous: leaf.contiguous,
            rights,
            guest: None,
            pa: leaf.pa.wrapping_sub(leaf.va - first),
            raw,
            at,
            stamp: walking.stamp,
        };
        let core = &self.cores[cpu];
        if let Some(other) = core.tlb.find(cpu, walking.request.va, walking.id, &self.invalidations)
        {
            self.check_conflict(cpu, walking.request.va, &other, &entry);
        }
        // A TLB has several levels, and what one of them has of an address need not be what another
        // has.
        if !(self.dice.is_on() && self.dice.once_in(4)) {
            core.tlb.insert(entry);
        }
        entry
    }

    /// Two entries for one address.
    #[inline(never)]
    pub(super) fn check_conflict(&self, cpu: usize, va: u64, other: &Cached, entry: &Cached) {
        if !self.judging.get() {
            return;
        }
        let run = other.contiguous && entry.contiguous && other.depth == entry.depth;
        let sizes = other.bits == entry.bits
            || run
            // The contiguous bit may change in place.
            || self.architecture.bbm >= 1 && other.depth == entry.depth
            || self.architecture.bbm >= 2
            || !self.architecture.breaks();
        let places = other.pa(va) == entry.pa(va) || !self.architecture.breaks();
        if !sizes || !places {
            self.violate(
                Rule::Conflict,
                cpu,
                format!(
                    "{va:#x} is translated by {:#x} (of {} bytes) and by {:#x} (of {} bytes) at \
                     once",
                    other.raw,
                    1u64 << other.bits,
                    entry.raw,
                    1u64 << entry.bits
                ),
            );
        }
    }

    /// The access is under way until then.
    pub(crate) fn set_out(&self, cpu: usize, access: Translated, until: Time) {
        self.cores[cpu].under_way.set(Some((access, until)));
    }

    /// The access is done: gives what is read, if there is memory.
    pub(crate) fn perform(&self, cpu: usize, access: Translated, stored: Option<u64>) -> u64 {
        self.cores[cpu].under_way.set(None);
        let pa = access.pa();
        let Some(frame) = self.memory.frame_at(pa) else {
            // It has no contents, but what was said of its caches holds.
            if self.caches.has_aliases() || self.caches.is_known(pa) {
                self.caches.access(self, cpu, &access.entry, access.request, pa);
            }
            return 0;
        };
        let meta = self.memory.meta(frame);
        let gone = meta.state.get() == State::Free || meta.generation.get() != access.generation;
        if gone {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!(
                    "an access to {:#x} reaches {pa:#x}, which was given back meanwhile",
                    access.request.va
                ),
            );
            return 0;
        }
        self.caches.access(self, cpu, &access.entry, access.request, pa);
        if let Some(value) = stored {
            self.memory.write(pa & !7, value);
        }
        self.memory.read(pa & !7)
    }
}

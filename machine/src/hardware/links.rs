//! Reachability: tables that are linked and detached, and memory that must not be mapped.
//!
//! A table may be linked by several entries: at two addresses of a space, or below several roots,
//! as the kernel's half is. Each frame has the entry that linked it first; the others are kept
//! apart, so that a table with one parent costs one word. Where a table translates is found from
//! below: every way up to a root is a *place*, a space and a first address. Only a change of what
//! may be remembered asks for them, and only if any table is linked twice.
//!
//! A table of which one link is detached stays reachable, and may be remembered at the place that
//! it has lost. So it keeps the number of each cut until the invalidation of that is complete; a
//! cut below it is none the less remembered there.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use crate::architecture::Bits;
use crate::memory::{Meta, POISON, ROOT, State};
use crate::rules::{Obligation, Rule};
use crate::sched::cold;
use tablewright_walker::{Denied, Descriptor};

use super::{Hardware, How};

/// A space, and an address in it.
pub(super) type Place = (u16, u64);

/// The record of tables that were linked more than once, by where they are.
#[derive(Default)]
pub(super) struct Aliases {
    /// There are any.
    any: Cell<bool>,
    /// Entries that link a table, besides the first.
    entries: RefCell<HashMap<u64, Vec<u64>>>,
    /// Numbers of the obligations under which one of its links was detached, besides the last.
    cuts: RefCell<HashMap<u64, Vec<u64>>>,
    /// Tables that were detached once more below a cut, and the number of the obligation of that.
    parted: RefCell<HashMap<u64, u64>>,
}

/// Entries found below a table that is detached.
pub(super) struct Below {
    /// Depths of leaves, as bit sets: of those that are not global, and of those that are.
    pub leaves: u8,
    global: u8,
    /// The smallest leaf or table is for so many bytes, as a power of two.
    pub unit: u8,
    /// Also below tables that are reachable elsewhere.
    kept: bool,
}

impl Below {
    /// An entry for so many bytes is changed: what was below it is not found there any more.
    pub fn of_an_entry(bits: u32) -> Self {
        Self { leaves: 0, global: 0, unit: bits as u8, kept: true }
    }

    /// No CPU loads a root any more: what it shares with others stays.
    pub fn of_a_root(bits: u32) -> Self {
        Self { kept: false, ..Self::of_an_entry(bits) }
    }

    fn add_leaf(&mut self, global: bool, depth: u8, bits: u32) {
        let depths = if global { &mut self.global } else { &mut self.leaves };
        *depths |= 1 << depth;
        self.unit = self.unit.min(bits as u8);
    }

    /// Returns the obligation for global leaves, besides that for the table.
    pub fn owed(&self, table: &Obligation) -> Option<Obligation> {
        (self.global != 0).then(|| Obligation {
            global: true,
            table: false,
            leaves: self.global,
            scattered: true,
            ..table.clone()
        })
    }
}

impl Hardware {
    /// Whether nothing orders the last stores of this CPU to a table before what it does now.
    pub(super) fn is_unordered(&self, cpu: usize, table: u64) -> bool {
        let frame = self.memory.frame_at(table);
        frame.is_some_and(|frame| {
            let meta = self.memory.meta(frame);
            !self.architecture.is_ordered()
                && usize::from(meta.writer.get()) == cpu
                && meta.epoch.get() == self.epochs[cpu].get()
        })
    }

    /// A table becomes reachable by an entry, or a register, and so is all below it.
    pub(super) fn make_live(
        &self,
        cpu: usize,
        table: u64,
        parent: u64,
        (space, first): Place,
        depth: u8,
        how: How,
    ) {
        let Some(frame) = self.memory.frame_at(table) else {
            self.violate(
                Rule::WalkAstray,
                cpu,
                format!("a table descriptor leads to {table:#x}, which is no memory"),
            );
            return;
        };
        let meta = self.memory.meta(frame);
        match meta.state.get() {
            State::Private => {}
            State::Detached => {
                let cut = meta.cut.get();
                if self.obligations.borrow().under(cut).is_some() {
                    self.note_cut(table, cut);
                }
            }
            State::Live => return self.link_again(table, meta, parent, (space, depth)),
            state @ (State::Free | State::Data) => {
                self.violate(
                    Rule::WalkAstray,
                    cpu,
                    format!("a table descriptor leads to {table:#x}, which is {state:?}"),
                );
                return;
            }
        }
        if meta.state.get() == State::Private && how == How::Plain && self.is_unordered(cpu, table)
        {
            self.violate(
                Rule::LinkedEarly,
                cpu,
                format!(
                    "the table at {table:#x} (for {first:#x}) is linked by a plain store, and no \
                     barrier orders the stores to its entries before that"
                ),
            );
        }
        meta.state.set(State::Live);
        meta.depth.set(depth);
        meta.space.set(space);
        meta.first.set(first);
        meta.parent.set(parent);
        let entries = if depth == self.top {
            let all = self.architecture.regime.table_entries(self.level(depth));
            all.min(self.memory.entries())
        } else {
            self.memory.entries()
        };
        // SAFETY: the entries of a frame; there is one thread, and they are not written while this
        // slice lives.
        let all = unsafe { std::slice::from_raw_parts(self.memory.entry(frame, 0), entries) };
        // Most tables are empty when they are linked: there is nothing to look at.
        if all.iter().fold(0, |any, &entry| any | entry) == 0 {
            return;
        }
        let unwritten = all.iter().fold(0, |n, &entry| n + usize::from(entry == POISON));
        if unwritten > 0 {
            self.violate(
                Rule::LinkedEarly,
                cpu,
                format!(
                    "the table at {table:#x} (for {first:#x}) is linked before {unwritten} of its \
                     {entries} entries are written"
                ),
            );
        }
        if depth == 0 {
            self.check_pages(cpu, all);
            return;
        }
        let shift = self.shift(depth);
        for index in 0..entries {
            // SAFETY: an entry of the frame. Read one by one: deeper levels may report, nothing
            // writes.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if entry == POISON || !self.is_valid(entry) {
                continue;
            }
            let first = self.canonical(first.wrapping_add((index as u64) << shift));
            match self.decode(depth, first, Denied::default(), entry) {
                Descriptor::Table { pa, .. } => {
                    let entry = table + index as u64 * 8;
                    self.make_live(cpu, pa, entry, (space, first), depth - 1, how);
                }
                Descriptor::Leaf(leaf) => {
                    self.check_allowed(cpu, leaf.pa, leaf.pa + (leaf.size - 1))
                }
                Descriptor::Reserved(why) => {
                    self.violate(Rule::Reserved, cpu, format!("{entry:#x} at {first:#x}: {why}"));
                }
                Descriptor::Invalid => {}
            }
        }
    }

    pub(super) fn canonical(&self, va: u64) -> u64 {
        self.architecture.regime.canonical(va)
    }

    /// A table that is reachable is linked once more.
    fn link_again(&self, table: u64, meta: &Meta, parent: u64, (space, depth): (u16, u8)) {
        // One that is a table of two levels at once, as where a root links itself, is judged at the
        // first.
        if meta.depth.get() != depth {
            return;
        }
        if meta.parent.get() == parent {
            // A root that two spaces have.
            if meta.space.get() != space {
                self.aliases.any.set(true);
            }
            return;
        }
        self.aliases.any.set(true);
        let mut entries = self.aliases.entries.borrow_mut();
        let others = entries.entry(table).or_default();
        if !others.contains(&parent) {
            others.push(parent);
        }
    }

    /// An entry links a table no more. Gives whether another does.
    fn unlink(&self, table: u64, meta: &Meta, parent: u64) -> bool {
        if !self.aliases.any.get() {
            return false;
        }
        let mut entries = self.aliases.entries.borrow_mut();
        let others = entries.get_mut(&table);
        if meta.parent.get() != parent {
            // Two CPUs have detached it there, one of them late.
            if let Some(others) = others {
                others.retain(|&other| other != parent);
            }
            return true;
        }
        match others.and_then(Vec::pop) {
            Some(other) => {
                meta.parent.set(other);
                true
            }
            None => false,
        }
    }

    /// A table has lost a link under an obligation, and not its last.
    fn note_cut(&self, table: u64, number: u64) {
        let obligations = self.obligations.borrow();
        let mut cuts = self.aliases.cuts.borrow_mut();
        let cuts = cuts.entry(table).or_default();
        cuts.retain(|&cut| obligations.under(cut).is_some());
        // That of the cut which is under way is still to come.
        cuts.push(number);
    }

    /// The obligations under which a table has lost links, besides the last.
    pub(super) fn cuts_before(&self, table: u64) -> impl Iterator<Item = u64> {
        let cuts = self.aliases.cuts.borrow();
        let cuts = cuts.get(&table).cloned();
        cuts.unwrap_or_default().into_iter()
    }

    /// A table is given back.
    pub(super) fn forget_links(&self, table: u64) {
        self.aliases.entries.borrow_mut().remove(&table);
        self.aliases.cuts.borrow_mut().remove(&table);
        self.aliases.parted.borrow_mut().remove(&table);
    }

    /// A table below a cut is detached once more, with all below it.
    pub(super) fn part(&self, table: u64, depth: u8, numbers: (u64, u64), below: &mut Below) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let (number, cut) = numbers;
        let meta = self.memory.meta(frame);
        if meta.state.get() == State::Detached && meta.cut.get() == cut {
            self.aliases.parted.borrow_mut().insert(table, number);
            self.each_below(frame, depth, below, |_, pa, below| {
                self.part(pa, depth - 1, numbers, below);
            });
        }
    }

    /// Whether CPUs were told of a table alone, where it was detached once more below a cut.
    pub(super) fn is_parted(&self, table: u64) -> bool {
        let parted = self.aliases.parted.borrow();
        let obligations = self.obligations.borrow();
        (parted.get(&table)).is_some_and(|&number| obligations.under(number).is_none())
    }

    /// Entries that link a table; [`ROOT`] for a register.
    fn parents(&self, table: u64, meta: &Meta) -> Vec<u64> {
        let entries = self.aliases.entries.borrow();
        let others = entries.get(&table).into_iter().flatten();
        std::iter::once(meta.parent.get()).chain(others.copied()).collect()
    }

    /// Returns the obligations of a table whose links, or those of tables above it, are lost, by
    /// their numbers.
    pub(super) fn cuts_above(&self, table: u64) -> Vec<u64> {
        if self.aliases.cuts.borrow().is_empty() {
            return Vec::new();
        }
        let mut cuts: Vec<u64> = self.cuts_before(table).collect();
        if let Some(frame) = self.memory.frame_at(table) {
            let parents = self.parents(table, self.memory.meta(frame));
            for parent in parents.into_iter().filter(|&parent| parent != ROOT) {
                if let Some(above) = self.memory.frame_at(parent) {
                    cuts.extend(self.cuts_above(self.memory.address(above)));
                }
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// Whether a space has a table for its root.
    pub(super) fn is_root(&self, table: u64) -> bool {
        let spaces = self.spaces.borrow();
        let mut roots = spaces.iter().filter_map(|space| space.root);
        roots.any(|(root, _)| self.first_tables(root, 0).any(|(first, _)| first == table))
    }

    /// Calls `with` with the address that the entry at `pa` of a table translates, in each place
    /// that the table has.
    #[inline]
    pub(super) fn each_place(&self, frame: usize, pa: u64, mut with: impl FnMut(u16, u64)) {
        let meta = self.memory.meta(frame);
        if !self.aliases.any.get() || meta.state.get() != State::Live {
            return with(meta.space.get(), self.place(frame, pa));
        }
        let index = (pa - self.memory.address(frame)) >> 3;
        let offset = index << self.shift(meta.depth.get());
        for (space, first) in self.places(frame) {
            with(space, self.canonical(first.wrapping_add(offset)));
        }
    }

    /// The places of a table that is reachable.
    #[inline(never)]
    fn places(&self, frame: usize) -> Vec<Place> {
        let mut places = Vec::new();
        self.add_places(frame, 0, &mut places);
        places
    }

    /// Adds the addresses so far into a table, in each place that the table has.
    fn add_places(&self, frame: usize, offset: u64, places: &mut Vec<Place>) {
        let (meta, table) = (self.memory.meta(frame), self.memory.address(frame));
        let depth = meta.depth.get();
        let mut add = |parent: u64| {
            if parent == ROOT {
                for (number, space) in self.spaces.borrow().iter().enumerate() {
                    let Some((root, upper)) = space.root else {
                        continue;
                    };
                    let mut tables = self.first_tables(root, self.first_address(upper));
                    if let Some((_, first)) = tables.find(|&(first, _)| first == table) {
                        let at = self.canonical(first.wrapping_add(offset));
                        places.push((number as u16, at));
                    }
                }
                return;
            }
            let above = self.memory.frame_at(parent).filter(|&above| {
                let meta = self.memory.meta(above);
                meta.state.get() == State::Live && meta.depth.get() == depth + 1
            });
            if let Some(above) = above {
                let index = (parent - self.memory.address(above)) >> 3;
                let within = index << self.shift(depth + 1);
                self.add_places(above, offset.wrapping_add(within), places);
            }
        };
        add(meta.parent.get());
        let entries = self.aliases.entries.borrow();
        entries.get(&table).into_iter().flatten().for_each(|&parent| add(parent));
    }

    /// An entry, or a register, leads to a table no more, which may be remembered. If no other
    /// does, it is not reachable, nor is all below it.
    pub(super) fn make_detached(
        &self,
        table: u64,
        parent: u64,
        (space, first): Place,
        depth: u8,
        number: u64,
        below: &mut Below,
    ) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let meta = self.memory.meta(frame);
        match meta.state.get() {
            State::Live if self.unlink(table, meta, parent) => {
                self.note_cut(table, number);
                if below.kept {
                    self.look_below(frame, depth, below);
                }
                return;
            }
            State::Live => {}
            // One that was out of reach is linked in a table that was detached.
            State::Private => meta.depth.set(depth),
            State::Free | State::Detached | State::Data => return,
        }
        meta.state.set(State::Detached);
        meta.cut.set(number);
        meta.space.set(space);
        meta.first.set(first);
        self.each_below(frame, depth, below, |index, pa, below| {
            let first = first.wrapping_add((index as u64) << self.shift(depth));
            let entry = table + index as u64 * 8;
            let place = (space, self.canonical(first));
            self.make_detached(pa, entry, place, depth - 1, number, below);
        });
    }

    /// Looks at the entries below a table that stays reachable.
    pub(super) fn look_below(&self, frame: usize, depth: u8, below: &mut Below) {
        self.each_below(frame, depth, below, |_, pa, below| {
            if let Some(frame) = self.memory.frame_at(pa) {
                self.look_below(frame, depth - 1, below);
            }
        });
    }

    /// Adds the leaves of a table to what is below, and calls `with` for each table that it links.
    fn each_below(
        &self,
        frame: usize,
        depth: u8,
        below: &mut Below,
        with: impl Fn(usize, u64, &mut Below),
    ) {
        below.unit = below.unit.min(self.shift(depth + 1) as u8);
        for index in 0..self.memory.entries() {
            // SAFETY: an entry of the frame.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if !self.is_valid(entry) || entry == POISON {
                continue;
            }
            if depth > 0
                && let Descriptor::Table { pa, .. } =
                    self.decode(depth, 0, Denied::default(), entry)
            {
                with(index, pa, below);
            } else {
                below.add_leaf(self.is_global(entry), depth, self.shift(depth));
            }
        }
    }

    fn is_global(&self, leaf: u64) -> bool {
        let Bits { global, not_global, .. } = self.bits;
        leaf & global != 0 || not_global != 0 && leaf & not_global == 0
    }

    /// A table is linked, with all below it, in one that was detached; or was linked just before,
    /// and is seen there now.
    pub(super) fn make_known(&self, table: u64, parent: u64, first: u64, depth: u8, above: &Meta) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let meta = self.memory.meta(frame);
        match meta.state.get() {
            State::Live if self.unlink(table, meta, parent) => {
                return self.note_cut(table, above.cut.get());
            }
            State::Private | State::Live => {}
            State::Detached => {
                self.aliases.parted.borrow_mut().remove(&table);
                return;
            }
            _ => return,
        }
        meta.state.set(State::Detached);
        meta.cut.set(above.cut.get());
        meta.space.set(above.space.get());
        meta.depth.set(depth);
        meta.first.set(first);
        if depth == 0 {
            return;
        }
        for index in 0..self.memory.entries() {
            // SAFETY: an entry of the frame.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            let first = first.wrapping_add((index as u64) << self.shift(depth));
            if self.is_valid(entry)
                && entry != POISON
                && let Descriptor::Table { pa, .. } =
                    self.decode(depth, first, Denied::default(), entry)
            {
                self.make_known(pa, table + index as u64 * 8, first, depth - 1, above);
            }
        }
    }

    /// From now on, mapping any of this is a violation.
    pub(crate) fn forbid(&self, first: u64, last: u64) {
        let mut forbidden = self.forbidden.borrow_mut();
        forbidden.push((first, last));
        forbidden.sort_unstable();
        self.allowed.set((1, 0));
    }

    /// It may be mapped again.
    pub(crate) fn allow(&self, first: u64, last: u64) {
        let mut forbidden = self.forbidden.borrow_mut();
        let mut rest = Vec::with_capacity(forbidden.len());
        for &(from, to) in forbidden.iter() {
            if to < first || last < from {
                rest.push((from, to));
                continue;
            }
            if from < first {
                rest.push((from, first - 1));
            }
            if last < to {
                rest.push((last + 1, to));
            }
        }
        *forbidden = rest;
        self.allowed.set((1, 0));
    }

    /// Memory from `pa` to `end` is mapped: whether it may be.
    #[inline(always)]
    pub(super) fn check_allowed(&self, cpu: usize, pa: u64, end: u64) {
        let (first, last) = self.allowed.get();
        if pa < first || end > last {
            cold();
            self.check_forbidden(cpu, pa, end);
        }
    }

    #[inline(never)]
    pub(super) fn check_forbidden(&self, cpu: usize, pa: u64, end: u64) {
        let hit = {
            let forbidden = self.forbidden.borrow();
            let next = forbidden.partition_point(|&(_, last)| last < pa);
            let low = next.checked_sub(1).map_or(0, |at| forbidden[at].1 + 1);
            let high = forbidden.get(next).map_or(u64::MAX, |&(first, _)| first.wrapping_sub(1));
            let hit = forbidden.get(next).filter(|&&(first, _)| first <= end);
            if hit.is_none() {
                self.allowed.set((low, high));
            }
            hit.copied()
        };
        if let Some((first, last)) = hit {
            self.violate(
                Rule::ForbiddenMemory,
                cpu,
                format!("{pa:#x}..={end:#x} is mapped, and {first:#x}..={last:#x} must not be"),
            );
        }
    }

    /// The leaves of a table of pages that becomes reachable.
    pub(super) fn check_pages(&self, cpu: usize, entries: &[u64]) {
        let (mask, value) = self.architecture.family().no_page;
        let reserved = entries.iter().fold(false, |any, entry| any | (entry & mask == value));
        if reserved {
            self.violate(Rule::Reserved, cpu, "no page, in a table of pages".to_owned());
        }
        if self.forbidden.borrow().is_empty() {
            return;
        }
        for &entry in entries {
            if !self.is_valid(entry) || entry == POISON {
                continue;
            }
            match self.address_mask {
                Some(mask) => {
                    let pa = entry & mask;
                    self.check_allowed(cpu, pa, pa + self.last_byte);
                }
                None => {
                    if let Descriptor::Leaf(leaf) = self.decode(0, 0, Denied::default(), entry) {
                        self.check_allowed(cpu, leaf.pa, leaf.pa + (leaf.size - 1));
                    }
                }
            }
        }
    }
}

//! What is reachable: tables that are linked and cut off, and memory that must not be mapped.

use crate::memory::{Meta, POISON, State};
use crate::rules::Rule;
use crate::sched::cold;
use tablewright_walker::{Denied, Descriptor, Regime};

use super::{Hardware, How};

impl Hardware {
    /// A table becomes reachable, and all below it.
    pub(super) fn make_live(
        &self,
        cpu: usize,
        table: u64,
        first: u64,
        depth: u8,
        space: u16,
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
            State::Private | State::Detached => {}
            // Reachable twice: from two roots, or two entries.
            State::Live => return,
            state @ (State::Free | State::Data) => {
                self.violate(
                    Rule::WalkAstray,
                    cpu,
                    format!("a table descriptor leads to {table:#x}, which is {state:?}"),
                );
                return;
            }
        }
        if meta.state.get() == State::Private {
            let unordered = how == How::Plain
                && !self.architecture.is_x86()
                && usize::from(meta.writer.get()) == cpu
                && meta.epoch.get() == self.epochs[cpu].get();
            if unordered {
                self.violate(
                    Rule::LinkedEarly,
                    cpu,
                    format!(
                        "the table at {table:#x} (for {first:#x}) is linked by a plain store, and no barrier orders the \
                         stores to its entries before that"
                    ),
                );
            }
        }
        meta.state.set(State::Live);
        meta.depth.set(depth);
        meta.space.set(space);
        meta.first.set(first);
        let entries = if depth == self.top {
            let all = self.architecture.regime.table_entries(self.level(depth));
            all.min(self.memory.entries())
        } else {
            self.memory.entries()
        };
        // SAFETY: the entries of a frame; there is one thread, and nobody writes them while this slice lives.
        let all = unsafe { std::slice::from_raw_parts(self.memory.entry(frame, 0), entries) };
        // Most tables are empty when they are linked: there is nothing to look at.
        if all.iter().fold(0, |any, &entry| any | entry) == 0 {
            return;
        }
        let unwritten = all
            .iter()
            .fold(0, |n, &entry| n + usize::from(entry == POISON));
        if unwritten > 0 {
            self.violate(
                Rule::LinkedEarly,
                cpu,
                format!(
                    "the table at {table:#x} (for {first:#x}) is linked before {unwritten} of its {entries} entries \
                     are written"
                ),
            );
        }
        if depth == 0 {
            self.check_pages(cpu, all);
            return;
        }
        let shift = self.shift(depth);
        for index in 0..entries {
            // SAFETY: an entry of the frame. Read one by one: deeper levels may report, nothing writes.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if entry == POISON || !self.is_valid(entry) {
                continue;
            }
            let first = self.canonical(first.wrapping_add((index as u64) << shift));
            match self.decode(depth, first, Denied::default(), entry) {
                Descriptor::Table { pa, .. } => {
                    self.make_live(cpu, pa, first, depth - 1, space, how);
                }
                Descriptor::Leaf(leaf) => {
                    self.check_allowed(cpu, leaf.pa, leaf.pa + (leaf.size - 1))
                }
                Descriptor::Reserved(why) => {
                    self.violate(
                        Rule::Reserved,
                        cpu,
                        format!("{entry:#x} at {first:#x}: {why}"),
                    );
                }
                Descriptor::Invalid => {}
            }
        }
    }

    /// x86-64: the upper half of the root translates addresses with ones above.
    pub(super) fn canonical(&self, va: u64) -> u64 {
        let bits = self.architecture.regime.input_bits();
        let signed = matches!(self.architecture.regime, Regime::X86_64 { .. });
        if signed && va >> (bits - 1) & 1 != 0 {
            va | u64::MAX << bits
        } else {
            va
        }
    }

    /// A table, and all below it, is not reachable any more but may be remembered.
    pub(super) fn make_detached(&self, table: u64, depth: u8, number: u64) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let meta = self.memory.meta(frame);
        // One that nobody had yet is linked in a table that was cut off.
        match meta.state.get() {
            State::Live => {}
            State::Private => meta.depth.set(depth),
            State::Free | State::Detached | State::Data => return,
        }
        meta.state.set(State::Detached);
        meta.cut.set(number);
        if depth == 0 {
            return;
        }
        for index in 0..self.memory.entries() {
            // SAFETY: an entry of the frame.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if self.is_valid(entry)
                && entry != POISON
                && let Descriptor::Table { pa, .. } =
                    self.decode(depth, 0, Denied::default(), entry)
            {
                self.make_detached(pa, depth - 1, number);
            }
        }
    }

    /// A table is linked, with all below it, in one that was cut off; or was linked a moment before, and is seen there now.
    pub(super) fn make_known(&self, table: u64, first: u64, depth: u8, above: &Meta) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let meta = self.memory.meta(frame);
        if !matches!(meta.state.get(), State::Private | State::Live) {
            return;
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
                self.make_known(pa, first, depth - 1, above);
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
            let high = forbidden
                .get(next)
                .map_or(u64::MAX, |&(first, _)| first.wrapping_sub(1));
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
        let x86 = self.architecture.is_x86();
        let reserved = !x86
            && entries
                .iter()
                .fold(false, |any, entry| any | (entry & 3 == 1));
        if reserved {
            self.violate(
                Rule::Reserved,
                cpu,
                "a block descriptor in a table of pages".to_owned(),
            );
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

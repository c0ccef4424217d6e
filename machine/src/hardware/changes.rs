//! Changes of reachable entries: what each breaks, and what it owes.

use crate::architecture::Ordering;
use crate::rules::{Cpus, Obligation, Rule, is_harmless, may_be_remembered, needs_break};
use tablewright_walker::{Denied, Descriptor, Leaf, Regime};

use super::links::Below;
use super::{Hardware, How};

/// A change of an entry.
struct Change {
    number: u64,
    depth: u8,
    before: u64,
    new: u64,
    was: Descriptor,
    is: Descriptor,
    /// Entries that were below it, if it has detached a table.
    below: Below,
}

fn leaf_of(descriptor: &Descriptor) -> Option<Leaf> {
    match descriptor {
        Descriptor::Leaf(leaf) => Some(*leaf),
        _ => None,
    }
}

/// Whether a leaf is a page of a shadow stack, where the processor has them, and does not say by
/// bits 54 and 55 that it is to be one, and may be written.
const fn is_stray_shadow_stack(regime: Regime, leaf: u64) -> bool {
    const WRITE: u64 = 1 << 1;
    const DIRTY: u64 = 1 << 6;
    const MEANT: u64 = 1 << 54 | 1 << 55;
    matches!(regime, Regime::X86_64 { .. })
        && leaf & (WRITE | DIRTY) == DIRTY
        && leaf & MEANT != MEANT
}

fn table_of(descriptor: &Descriptor) -> Option<u64> {
    match descriptor {
        Descriptor::Table { pa, .. } => Some(*pa),
        _ => None,
    }
}

impl Hardware {
    /// A reachable entry changes from what this CPU saw to `new`.
    pub(super) fn changed(
        &self,
        cpu: usize,
        pa: u64,
        frame: usize,
        before: u64,
        new: u64,
        how: How,
    ) {
        if !self.is_valid(before) && !self.is_valid(new) || before == new {
            return;
        }
        let depth = self.memory.meta(frame).depth.get();
        // Most tables have one place.
        let (mut one, mut more) = (None, Vec::new());
        self.each_place(frame, pa, |space, first| match one {
            None => one = Some((space, first)),
            Some(_) => more.push((space, first)),
        });
        let Some((space, first)) = one else { return };
        let was = self.decode(depth, first, Denied::default(), before);
        let is = self.decode(depth, first, Denied::default(), new);
        if let Descriptor::Reserved(why) = is {
            self.violate(Rule::Reserved, cpu, format!("{new:#x} is stored for {first:#x}: {why}"));
        }
        let last = (1u64 << self.shift(depth)) - 1;
        let places = || std::iter::once((space, first)).chain(more.iter().copied());
        for (space, first) in places() {
            self.check_break(cpu, space, (first, first + last), depth, &was, &is);
        }
        if let Some(leaf) = leaf_of(&is) {
            if is_stray_shadow_stack(self.architecture.regime, leaf.raw) {
                let why = "R/W clear and D set make a page of a shadow stack (SDM 5.6)";
                self.violate(Rule::Reserved, cpu, format!("{new:#x} for {first:#x}: {why}"));
            }
            self.check_allowed(cpu, leaf.pa, leaf.pa + (leaf.size - 1));
        }
        // Links change before obligations, so that a table which moves is never nowhere.
        let (from, to) = (table_of(&was), table_of(&is));
        let number = self.obligations.borrow_mut().number();
        let mut below = Below::of_an_entry(self.shift(depth));
        if from != to {
            if let Some(table) = from {
                let place = (space, first);
                self.make_detached(table, pa, place, depth - 1, number, &mut below);
                let above = self.cuts_above(self.memory.address(frame));
                let mut obligations = self.obligations.borrow_mut();
                above.iter().for_each(|&cut| obligations.repeat(cut, number));
                for (space, first) in places() {
                    obligations.cut_off(cpu, space, (first, first + last), depth);
                }
            }
            if let Some(table) = to {
                self.make_live(cpu, table, pa, (space, first), depth - 1, how);
            }
        } else if let Some(table) = from.and_then(|table| self.memory.frame_at(table)) {
            // What it takes away from all below it has changed.
            self.look_below(table, depth - 1, &mut below);
        }
        let change = Change { number, depth, before, new, was, is, below };
        for (space, first) in places() {
            self.owe(cpu, space, first, &change);
        }
    }

    /// An entry of a table that was detached links a table no more. What walkers remember of the
    /// ways above does not lead to that one: it is out of their reach when the addresses of this
    /// entry are forgotten, though the larger cut is not complete. That need not be done, since the
    /// larger cut covers it.
    pub(super) fn changed_below_a_cut(
        &self,
        cpu: usize,
        pa: u64,
        frame: usize,
        before: u64,
        new: u64,
    ) {
        let meta = self.memory.meta(frame);
        let (depth, cut) = (meta.depth.get(), meta.cut.get());
        if depth == 0 || !self.is_valid(before) || self.obligations.borrow().under(cut).is_none() {
            return;
        }
        let first = self.place(frame, pa);
        let was = self.decode(depth, first, Denied::default(), before);
        let is = self.decode(depth, first, Denied::default(), new);
        let Some(table) = table_of(&was).filter(|_| table_of(&was) != table_of(&is)) else {
            return;
        };
        let number = self.obligations.borrow_mut().number();
        let mut below = Below::of_an_entry(self.shift(depth));
        self.part(table, depth - 1, (number, cut), &mut below);
        let change = Change { number, depth, before, new, was, is, below };
        self.owe(cpu, meta.space.get(), first, &change);
        self.obligations.borrow_mut().excuse(number);
    }

    /// Records the obligation of a change of an entry in one of the places that its table has.
    fn owe(&self, cpu: usize, space: u16, first: u64, change: &Change) {
        let Change { number, depth, before, new, was, is, below } = change;
        let (number, depth) = (*number, *depth);
        let span = (first, first + ((1u64 << self.shift(depth)) - 1));
        let run = leaf_of(was).is_some_and(|leaf| leaf.contiguous);
        if self.dice.is_on() && (run || leaf_of(is).is_some_and(|leaf| leaf.contiguous)) {
            self.cores[cpu].touch_run(space, self.run_around(span.0, depth), depth);
        }
        // A leaf that was aged, and not invalidated since, is remembered though its flag is clear.
        let still = |o: &Obligation| o.depth == depth && !o.table;
        let aged =
            || leaf_of(was).is_some() && self.obligations.borrow().about(space, span).any(still);
        if !may_be_remembered(&self.architecture, was, run) && !aged() {
            return;
        }
        let harmless = match is {
            // A break takes everything away, whatever the tables above say.
            Descriptor::Invalid => false,
            _ => {
                allows_no_more(was, is, Denied::default()) || {
                    let above = self.denied_above(space, first, depth);
                    let below = |entry| self.decode(depth, first, above, entry);
                    above != Denied::default()
                        && allows_no_more(&below(*before), &below(*new), above)
                }
            }
        };
        // Bits that mean nothing to the hardware.
        if harmless && self.says_the_same(was, is) {
            return;
        }
        // A CPU that uses the old copy may do no more than the new one allows, which the comparison
        // of the two says without a list, and what becomes of the new one concerns both.
        let rights_grow = |was: &Leaf, is: &Leaf| !was.contiguous && is_harmless(was, is);
        if let (Descriptor::Leaf(was), Descriptor::Leaf(is_leaf)) = (was, is)
            && rights_grow(was, is_leaf)
            && may_be_remembered(&self.architecture, is, false)
        {
            return;
        }
        let id = self.spaces.borrow()[usize::from(space)].id;
        let table = table_of(was);
        let (global, contiguous, old) = match leaf_of(was) {
            Some(leaf) => (leaf.global, leaf.contiguous, leaf.pa),
            None => (false, false, table.unwrap_or(0)),
        };
        let owed = Obligation {
            number,
            space,
            id,
            global,
            span,
            depth,
            table: table.is_some(),
            detached: table.is_some() && table != table_of(is),
            leaves: if table.is_some() { below.leaves } else { 1 << depth },
            unit: below.unit,
            scattered: false,
            contiguous,
            pa: old,
            raw: *before,
            writer: cpu as u16,
            cutter: None,
            // On x86 a store is visible when it leaves the buffer, and no barrier waits for that.
            published: self.architecture.ordering == Ordering::X86 && !self.buffering.get(),
            harmless,
            issued: Cpus::default(),
            local: Vec::new(),
            claimed: None,
            combined: self.architecture.guest.is_some(),
            second: None,
            looks: 0,
        };
        let mut obligations = self.obligations.borrow_mut();
        if let Some(global) = below.owed(&owed) {
            obligations.add(global);
        }
        obligations.add(owed);
    }

    /// Returns the permissions that the tables above an entry take away, and no CPU remembers
    /// otherwise.
    fn denied_above(&self, space: u16, va: u64, depth: u8) -> Denied {
        let mut above = Denied::default();
        let Some((mut table, _)) = self.spaces.borrow()[usize::from(space)].root else {
            return above;
        };
        for at in (depth + 1..=self.top).rev() {
            let entries = self.architecture.regime.table_entries(self.level(at)) as u64;
            let index = va >> self.shift(at) & (entries - 1);
            let entry = self.memory.read(table + index * 8);
            let Descriptor::Table { pa, denied } = self.decode(at, va, Denied::default(), entry)
            else {
                return Denied::default();
            };
            let obligations = self.obligations.borrow();
            // Old copies that are harmless take away what the new one does.
            let remembered = |o: &Obligation| o.depth == at && o.table && !o.harmless;
            if !obligations.about(space, (va, va)).any(remembered) {
                above = above.union(denied);
            }
            table = pa;
        }
        above
    }

    pub(super) fn says_the_same(&self, was: &Descriptor, is: &Descriptor) -> bool {
        match (was, is) {
            (Descriptor::Leaf(was), Descriptor::Leaf(is)) => {
                was.access == is.access && was.accessed == is.accessed && was.dirty == is.dirty
            }
            (Descriptor::Table { pa, denied }, Descriptor::Table { pa: other, denied: more }) => {
                pa == other && denied == more
            }
            _ => false,
        }
    }

    pub(super) fn check_break(
        &self,
        cpu: usize,
        space: u16,
        span: (u64, u64),
        depth: u8,
        was: &Descriptor,
        is: &Descriptor,
    ) {
        let architecture = &self.architecture;
        let run = |d: &Descriptor| matches!(d, Descriptor::Leaf(leaf) if leaf.contiguous);
        if !may_be_remembered(architecture, is, run(is)) {
            return;
        }
        let alike = |a: u64, b: u64| {
            let alike = self.alike.borrow();
            alike.contains(&(a, b)) || alike.contains(&(b, a))
        };
        if may_be_remembered(architecture, was, run(was)) {
            let same = || self.translate_alike(cpu, depth, span.0, was, is);
            if let Some(why) = needs_break(architecture, was, is, depth, alike, same) {
                self.violate(
                    Rule::BreakBeforeMake,
                    cpu,
                    format!(
                        "the entry for {:#x} at level {} was changed without a break: {why}",
                        span.0,
                        self.level(depth)
                    ),
                );
            }
            return;
        }
        // Made after a break: which has to be complete.
        let obligations = self.obligations.borrow();
        let mut wrong = None;
        for obligation in obligations.about(space, span) {
            // What a table that was detached led to may be anything.
            let raw = obligation.raw;
            let old = self.decode(obligation.depth, obligation.span.0, Denied::default(), raw);
            // A leaf as it would be if it began where this entry does.
            let old = match old {
                Descriptor::Leaf(leaf) => Descriptor::Leaf(Leaf {
                    // Not that of the descriptor, which is the first of those that were one
                    // obligation.
                    pa: obligation.pa.wrapping_add(span.0.wrapping_sub(obligation.span.0)),
                    ..leaf
                }),
                other => other,
            };
            let same = || self.translate_alike(cpu, depth, span.0, &old, is);
            let contradicts = || needs_break(architecture, &old, is, depth, alike, same);
            let of_a_table = obligation.table || obligation.scattered;
            let why = if of_a_table && !obligation.detached && obligation.depth > depth {
                None
            } else if obligation.table && obligation.depth > depth {
                Some("what was detached above it may still be remembered")
            } else if obligation.depth == depth {
                contradicts()
            } else {
                match is {
                    Descriptor::Leaf(_) if obligation.table => Some("another size"),
                    _ if !architecture.breaks() => None,
                    _ if architecture.bbm < 2 => Some("another size"),
                    Descriptor::Leaf(_) => contradicts(),
                    _ => None,
                }
            };
            if let Some(why) = why.filter(|_| !obligation.harmless) {
                wrong = Some(why);
                break;
            }
        }
        drop(obligations);
        if let Some(why) = wrong.filter(|_| architecture.breaks()) {
            self.violate(
                Rule::BreakBeforeMake,
                cpu,
                format!(
                    "the entry for {:#x} at level {} is made before the break of what was there is \
                     complete: {why}",
                    span.0,
                    self.level(depth)
                ),
            );
        }
    }

    /// Whether a table and a leaf translate alike. Of a hole in a table nothing is remembered: a
    /// leaf in its place may translate it.
    pub(super) fn translate_alike(
        &self,
        cpu: usize,
        depth: u8,
        first: u64,
        a: &Descriptor,
        b: &Descriptor,
    ) -> bool {
        let grows = matches!(a, Descriptor::Table { .. });
        let (table, leaf) = match (a, b) {
            (Descriptor::Table { pa, .. }, Descriptor::Leaf(leaf))
            | (Descriptor::Leaf(leaf), Descriptor::Table { pa, .. }) => (*pa, leaf),
            _ => return true,
        };
        let Some(below) = depth.checked_sub(1) else {
            return false;
        };
        let size = 1u64 << self.shift(below);
        (0..self.memory.entries() as u64).all(|index| {
            // On x86 what this CPU has stored before is visible before what it stores now.
            let entry = match self.architecture.is_ordered() {
                true => self.visible_to(cpu, table + index * 8),
                false => self.memory.read(table + index * 8),
            };
            let va = first + index * size;
            let part = Leaf { pa: leaf.pa + index * size, ..*leaf };
            match self.decode(below, va, Denied::default(), entry) {
                Descriptor::Leaf(small) => {
                    small.pa == part.pa
                        && small.memory == part.memory
                        && small.shareability == part.shareability
                }
                other @ Descriptor::Table { .. } => {
                    let part = Descriptor::Leaf(part);
                    match grows {
                        true => self.translate_alike(cpu, below, va, &other, &part),
                        false => self.translate_alike(cpu, below, va, &part, &other),
                    }
                }
                Descriptor::Invalid => grows,
                _ => false,
            }
        })
    }
}

/// Whether an old copy of an entry, made below tables that take `above` away, allows nothing that
/// the new one forbids.
fn allows_no_more(was: &Descriptor, is: &Descriptor, above: Denied) -> bool {
    match (was, is) {
        (Descriptor::Leaf(was), Descriptor::Leaf(is)) => is_harmless(was, is),
        (Descriptor::Table { pa: was, denied }, Descriptor::Table { pa: is, denied: more }) => {
            let denied = denied.union(above);
            was == is && denied.union(*more) == denied
        }
        _ => false,
    }
}

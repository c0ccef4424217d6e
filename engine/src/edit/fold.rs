//! Contiguous runs are unfolded before a part of them is edited, and folded again where all members
//! allow it.

use core::ops::{ControlFlow, Range};

use super::drive::Footprint;
use crate::addr::{Level, Pa};
use crate::bbm::{State, Transition, resizing};
use crate::edit::space::Conditions;
use crate::flush::Flush;
use crate::format::{Format, Kind, saturate, withheld};
use crate::platform::Platform;
use crate::run::{extent, gather, members};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

/// How a leaf at `level` may become, or cease to be, a member of a run: it does not matter which.
pub(super) fn how<F: Format>(level: Level, conditions: &Conditions) -> Transition {
    let how = match conditions.live {
        true => resizing(F::RULE, 1, &conditions.caps),
        false => Transition::Store,
    };
    debug_assert_eq!(
        how,
        {
            let mut member = State::ANY_LEAF;
            if let State::Leaf { contiguous, .. } = &mut member {
                *contiguous = true;
            }
            conditions.transition::<F>(&State::ANY_LEAF, &member, level)
        },
        "there is one rule"
    );
    how
}

/// Unfolds the runs in a range; all of them are whole.
pub(super) struct Unfold<'a> {
    pub conditions: Conditions,
    pub changed: &'a mut Footprint,
    /// Entries that were left suspended.
    pub broken: Footprint,
}

impl Unfold<'_> {
    fn unfold<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        input: u64,
    ) {
        let members = members::<F>(index, level);
        let step = 1u64 << F::shift(level);
        let how = how::<F>(level, &self.conditions);
        let mut contended = false;
        let run = gather::<F>(members.clone(), level, &mut |member| {
            if how == Transition::Break {
                // No walker writes a member once it is taken out: its flags are final then.
                return table.exchange(member, 0);
            }
            let entry = table.load(member);
            contended |= self.conditions.is_contended::<F>(entry, level);
            entry
        });
        let mut single = run & !F::CONTIGUOUS;
        if contended {
            // A walker that holds the run may still set a flag in any member, for any page of it.
            single = saturate::<F>(single, level);
        }
        let frame = F::address(single, level);
        let pattern = F::with_address(single, frame);
        for (number, member) in members.enumerate() {
            let place = Pa::new(frame.get() + number as u64 * step);
            let leaf = F::with_address(pattern, place);
            match how {
                Transition::Break => table.store(member, withheld::<F>(leaf)),
                _ => table.store(member, leaf),
            }
        }
        let extent = extent::<F>(input, level);
        match how {
            Transition::Store => {}
            Transition::Invalidate => self.changed.add(extent, Some(level)),
            Transition::Break => self.broken.add(extent, Some(level)),
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Unfold<'_> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf if entry & F::CONTIGUOUS != 0 => {
                self.unfold::<F, P>(table, index, level, slice.first);
            }
            _ => {}
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        if F::contiguous(Level::PAGE) == 0 {
            return ControlFlow::Continue(());
        }
        for index in range.clone() {
            let entry = table.load(index);
            if F::kind(entry, Level::PAGE) == Kind::Leaf && entry & F::CONTIGUOUS != 0 {
                let input = first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
                self.unfold::<F, P>(table, index, Level::PAGE, input);
            }
        }
        ControlFlow::Continue(())
    }
}

/// Folds aligned leaves into runs.
pub(super) struct Fold<'a> {
    pub conditions: Conditions,
    /// No run of leaves above it.
    pub largest: Level,
    /// No run that reaches out of it.
    pub slice: Slice,
    pub left: &'a mut Flush,
    /// Something was left suspended.
    pub broken: bool,
    pub done: u64,
}

impl Fold<'_> {
    /// Folds the run that starts at entry `start`, if all its members are leaves that translate
    /// like one. Runs of leaves that a walker may be writing are left alone: their bits would have
    /// to be gathered one by one.
    fn fold<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        start: usize,
        level: Level,
        first: u64,
    ) {
        let extent = extent::<F>(first, level);
        if extent.first < self.slice.first || extent.last > self.slice.last {
            return;
        }
        let (entry, step) = (table.load(start), 1u64 << F::shift(level));
        let frame = F::address(entry, level);
        if F::kind(entry, level) != Kind::Leaf
            || entry & F::CONTIGUOUS != 0
            || !frame.is_aligned(F::shift(level) + F::contiguous(level))
            || self.conditions.is_contended::<F>(entry, level)
        {
            return;
        }
        let members = members::<F>(start, level);
        let pattern = F::with_address(entry, frame);
        let member =
            |number: usize| F::with_address(pattern, Pa::new(frame.get() + number as u64 * step));
        let alike = |(number, index)| table.load(index) == member(number);
        if !members.clone().enumerate().all(alike) {
            return;
        }
        let how = how::<F>(level, &self.conditions);
        if how == Transition::Break && !self.conditions.may_break {
            return;
        }
        for (number, index) in members.enumerate() {
            let folded = member(number) | F::CONTIGUOUS;
            match how {
                Transition::Break => table.store(index, withheld::<F>(folded)),
                _ => table.store(index, folded),
            }
        }
        if how != Transition::Store {
            self.left.ranges.add(extent, Some(level), false);
        }
        self.broken |= how == Transition::Break;
        self.done += 1;
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Fold<'_> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        if F::kind(entry, level) == Kind::Table {
            return Step::Into(F::address(entry, level));
        }
        let run = F::contiguous(level);
        if level <= self.largest && run > 0 && index & ((1 << run) - 1) == 0 {
            self.fold::<F, P>(table, index, level, slice.first);
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let run = 1usize << F::contiguous(Level::PAGE);
        if run > 1 {
            let from = range.start;
            let mut start = from.next_multiple_of(run);
            while start + run <= range.end {
                let at = first.wrapping_add(((start - from) as u64) << F::PAGE_SHIFT);
                self.fold::<F, P>(table, start, Level::PAGE, at);
                start += run;
            }
        }
        ControlFlow::Continue(())
    }
}

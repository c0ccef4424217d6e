//! Split: large leaves become tables of smaller ones that translate the same.
//!
//! All tables that a split takes are reserved before anything is changed. A new table is filled out
//! of reach and takes the place of the leaf with one store. Accessed and dirty flags of the leaf
//! stand for all of it: they go into every part.
//!
//! [`cleave`](Gather::cleave) is what other edits begin with: it splits the block, and
//! [unfolds](super::fold) the run, that reaches over an end of their range.

use core::ops::ControlFlow;

use super::Change;
use super::build::fill_parts;
use super::drive::{Check, Footprint};
use super::fold::{Unfold, how};
use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{State, Transition, resizing};
use crate::edit::Gather;
use crate::edit::space::{Conditions, EditError, Reached};
use crate::format::{Attrs, Format, Kind, Perms, encoded, meaning, packed_of, with_flags};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{ByLevel, MAX_LEVELS, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Splits what is mapped in `span` until no leaf is above `largest`, and unfolds runs. The
    /// translation of no address changes.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`NeedsBreak`](EditError::NeedsBreak), [`NoSuchLeaf`](EditError::NoSuchLeaf),
    /// [`OutOfTables`](EditError::OutOfTables). Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Level, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
    /// let mut gather = space.gather();
    /// gather.split(span, Level::PAGE)?;
    /// gather.finish(|_| ());
    /// assert_eq!(space.query(Va::new(0x1000)).unwrap().size(), 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn split(
        &mut self,
        span: Span<F::Input>,
        largest: Level,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check(span)?;
        if !F::is_leaf_level(largest) {
            return Err(EditError::NoSuchLeaf);
        }
        let conditions = self.space.conditions();
        if self.space.may_refuse(&Change::new()) {
            Check::<F, _>::run(self.space, slice, None, |entry, level| {
                entry & F::CONTIGUOUS != 0 && how::<F>(level, &conditions) == Transition::Break
            })?;
        }
        // The tables for the ends and for the inside are taken together: either all of it happens,
        // or nothing.
        let parts = Parts { slice, largest: Some(largest) };
        let changed = self.split_parts(parts, &[slice])?;
        self.note(changed);
        Ok(())
    }

    /// Makes the space fit for shared edits: no contiguous runs, everything complete, and
    /// everything published.
    pub(crate) fn share(mut self) {
        if self.space.debt.has_runs() {
            if self.space.is_live() {
                self.space.debt.begin_change();
            }
            for slice in self.space.everything() {
                let mut changed = Footprint::EMPTY;
                self.unfold(slice, &mut changed);
                self.note(changed);
            }
            self.space.debt.set_runs(false);
        }
        self.left.needs_publish |= !self.space.is_live();
        self.finish(|_| ());
    }

    /// Splits the blocks and unfolds the runs that reach over an end of `slice`.
    #[inline]
    pub(super) fn cleave(&mut self, slice: Slice) -> Result<(), EditError<F::Input>> {
        match F::CONTIGUOUS != 0 || F::is_leaf_level(Level::PAGE.up()) {
            true => self.cleave_ends(slice),
            false => Ok(()),
        }
    }

    #[inline(never)]
    fn cleave_ends(&mut self, slice: Slice) -> Result<(), EditError<F::Input>> {
        let ends = [slice.first, slice.last];
        if ends.iter().all(|&at| self.leaf_over(at, slice).is_none()) {
            return Ok(());
        }
        let parts = Parts { slice, largest: None };
        let changed = self.split_parts(parts, &ends.map(|at| Slice { first: at, last: at }))?;
        // The old and the new leaves translate alike, but what follows will not: walkers have to
        // forget the block before its parts can differ.
        if changed.slice().is_some() && self.space.is_live() {
            self.note(changed);
            self.complete_pending();
        }
        Ok(())
    }

    /// The extent of the leaf at `input`, or of the run that it is a member of, and its level, if
    /// that reaches out of `slice`.
    fn leaf_over(&self, input: u64, slice: Slice) -> Option<(Slice, Level)> {
        let Reached { level, entry, kind, .. } = self.space.find(input);
        if kind != Kind::Leaf {
            return None;
        }
        let extent = match entry & F::CONTIGUOUS {
            0 => Slice::around::<F>(input, level),
            _ => run::extent::<F>(input, level),
        };
        (extent.first < slice.first || extent.last > slice.last).then_some((extent, level))
    }

    /// Splits the leaves that `parts` names in `slices`, and unfolds the runs that they are part
    /// of. Allocates everything before it changes anything. Returns what was changed in place.
    fn split_parts(
        &mut self,
        parts: Parts,
        slices: &[Slice],
    ) -> Result<Footprint, EditError<F::Input>> {
        let Parts { slice, .. } = parts;
        let conditions = self.space.conditions();
        let ends = [slice.first, slice.last];

        // Prepare: may the runs at the ends be unfolded, the blocks replaced, and are there enough
        // tables?
        for at in ends {
            if let Some((extent, level)) = self.leaf_over(at, slice) {
                let in_run = extent.last - extent.first >= 1 << F::shift(level);
                let breaks = how::<F>(level, &conditions) == Transition::Break;
                if in_run && breaks && !conditions.may_break {
                    return Err(EditError::NeedsBreak(F::Input::from_bits(extent.first)));
                }
            }
        }
        let platform = self.space.platform.clone();
        let mut reserve = Reserve::new(&platform);
        let mut count = Count::<F, P> {
            parts,
            conditions,
            reserve: &mut reserve,
            counted: None,
            refused: None,
        };
        for &slice in slices {
            let _: ControlFlow<()> = self.space.visit(slice, &mut count);
        }
        if let Some(error) = count.refused {
            reserve.release();
            return Err(error);
        }

        // Edit. A table that the same gather has detached may be cached still: another is not
        // linked in its place before it is forgotten.
        self.complete_overlap(slice.first, slice.last);
        if conditions.live {
            self.space.debt.begin_change();
        }
        let mut changed = Footprint::EMPTY;
        for at in ends {
            if let Some((extent, _)) = self.leaf_over(at, slice) {
                self.unfold(extent, &mut changed);
            }
        }
        if parts.largest.is_some() {
            self.unfold(slice, &mut changed);
        }
        let mut split =
            Split { parts, reserve: &mut reserve, conditions, changed, broken: Footprint::EMPTY };
        for &slice in slices {
            let _: ControlFlow<()> = self.space.visit(slice, &mut split);
        }
        let (changed, broken) = (split.changed, split.broken);
        reserve.release();
        self.finish_break(slice, broken);
        Ok(changed)
    }

    /// Unfolds the runs in `slice`, all of which are whole.
    fn unfold(&mut self, slice: Slice, changed: &mut Footprint) {
        if F::CONTIGUOUS == 0 || !self.space.debt.has_runs() {
            return;
        }
        let mut unfold =
            Unfold { conditions: self.space.conditions(), changed, broken: Footprint::EMPTY };
        let _: ControlFlow<()> = self.space.visit(slice, &mut unfold);
        let broken = unfold.broken;
        self.finish_break(slice, broken);
    }
}

/// Which leaves to split.
#[derive(Clone, Copy)]
struct Parts {
    /// Those that reach over an end of this range.
    slice: Slice,
    /// Those in the range above this level.
    largest: Option<Level>,
}

impl Parts {
    /// Whether the leaf at `level` that translates `extent` is to be split.
    fn names(&self, level: Level, extent: Slice) -> bool {
        let slice = self.slice;
        let meets = extent.first <= slice.last && slice.first <= extent.last;
        let over_end = extent.first < slice.first || slice.last < extent.last;
        let too_large = self.largest.is_some_and(|largest| level > largest);
        level > Level::PAGE && meets && (over_end || too_large)
    }

    /// Reserves a table for each that splitting the leaf takes. Returns whether there were as many.
    fn reserve<F: Format, P: Platform>(
        &self,
        reserve: &mut Reserve<'_, P>,
        level: Level,
        extent: Slice,
    ) -> bool {
        let (true, Some(below)) = (self.names(level, extent), level.down()) else {
            return true;
        };
        if !reserve.add(below) {
            return false;
        }
        let size = 1u64 << F::shift(below);
        let mut first = extent.first;
        loop {
            let part = Slice { first, last: first + (size - 1) };
            if !self.reserve::<F, P>(reserve, below, part) {
                return false;
            }
            if part.last == extent.last {
                return true;
            }
            first = part.last + 1;
        }
    }
}

/// Frames taken from the platform before anything is changed, for each level a chain through the
/// first entry of each frame: nothing else can reach these frames yet.
struct Reserve<'a, P: Platform> {
    platform: &'a P,
    /// The first frame of each chain, with bit 0 set; 0 is the end.
    heads: ByLevel<u64>,
}

impl<'a, P: Platform> Reserve<'a, P> {
    fn new(platform: &'a P) -> Self {
        Self { platform, heads: ByLevel::new(0) }
    }

    /// Takes one more frame for `level` from the platform. Returns whether there was one.
    fn add(&mut self, level: Level) -> bool {
        let Some(frame) = self.platform.alloc_table(level) else {
            return false;
        };
        // SAFETY: the frame was just allocated for a table at this level.
        let table = unsafe { Table::open(self.platform, frame, level) };
        let head = &mut self.heads[level];
        table.store(0, *head);
        *head = frame.get() | 1;
        true
    }

    /// Takes one out.
    fn take(&mut self, level: Level) -> Option<Pa> {
        let head = &mut self.heads[level];
        let frame = (*head & 1 != 0).then_some(Pa::new(*head & !1))?;
        // SAFETY: a frame of the reserve was allocated for a table at this level.
        let table = unsafe { Table::open(self.platform, frame, level) };
        *head = table.load(0);
        Some(frame)
    }

    /// Gives what is left back to the platform.
    fn release(mut self) {
        for height in 0..MAX_LEVELS as u8 {
            let level = Level::new(height);
            while let Some(frame) = self.take(level) {
                // SAFETY: the frame came from the platform, once (1.), and was never linked (2.).
                unsafe { self.platform.free_table(frame, level) };
            }
        }
    }
}

/// The pass that reserves tables, and looks whether the split may be done.
struct Count<'a, 'p, F: Format, P: Platform> {
    parts: Parts,
    conditions: Conditions,
    reserve: &'a mut Reserve<'p, P>,
    /// The extent that was reserved for last: both ends of a range may lie in one leaf.
    counted: Option<u64>,
    refused: Option<EditError<F::Input>>,
}

impl<F: Format, P: Platform> Visit<F, P> for Count<'_, '_, F, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        match F::kind(entry, level) {
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf if self.counted != Some(extent.first) && self.parts.names(level, extent) => {
                self.counted = Some(extent.first);
                let breaks = split_how::<F>(level, &self.conditions) == Transition::Break;
                if breaks && !self.conditions.may_break {
                    let at = F::Input::from_bits(slice.first);
                    self.refused = Some(EditError::NeedsBreak(at));
                    return Step::Stop;
                }
                if !self.parts.reserve::<F, P>(self.reserve, level, extent) {
                    self.refused = Some(EditError::OutOfTables);
                    return Step::Stop;
                }
            }
            _ => {}
        }
        Step::Next
    }
}

/// How a leaf at `level` may become a table that translates the same: it does not matter which.
fn split_how<F: Format>(level: Level, conditions: &Conditions) -> Transition {
    let how = match conditions.live {
        true => resizing(F::RULE, 2, &conditions.caps),
        false => Transition::Store,
    };
    debug_assert_eq!(
        how,
        {
            let new = State::Table { frame: Pa::new(0), denied: Perms::empty() };
            conditions.transition::<F>(&State::ANY_LEAF, &new, level)
        },
        "there is one rule"
    );
    how
}

/// The pass that puts tables in the place of leaves.
struct Split<'a, 'p, P: Platform> {
    parts: Parts,
    reserve: &'a mut Reserve<'p, P>,
    conditions: Conditions,
    changed: Footprint,
    /// Entries that were left suspended.
    broken: Footprint,
}

impl<P: Platform> Split<'_, '_, P> {
    /// Replaces a leaf at `level` by a table of leaves one level smaller, which is returned.
    fn split<F: Format>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        extent: Slice,
    ) -> Option<Pa> {
        let below = level.down()?;
        let known = table.load(index);
        let bits = encoded::<F>(packed_of::<F>(known, level), below).ok()?;
        let child = self.reserve.take(below)?;
        // SAFETY: the frame was reserved for a table at this level.
        let parts = unsafe { Table::open(self.reserve.platform, child, below) };
        fill_parts::<F, P>(&parts, bits, F::address(known, level), below);
        let link = F::table(child, Perms::empty());
        let last = if split_how::<F>(level, &self.conditions) == Transition::Break {
            self.broken.add(extent, Some(level));
            table.exchange(index, F::suspend(link))
        } else {
            self.changed.add(extent, None);
            if !self.conditions.is_contended::<F>(known, level) {
                table.link(index, link);
                return Some(child);
            }
            table.exchange(index, link)
        };
        if last != known {
            // A walker set a flag of the block meanwhile: it stands for all parts. What
            // walkers have set in the parts since then stays set.
            let Attrs { accessed, dirty, .. } = meaning::<F>(last, level);
            for index in 0..1usize << F::INDEX_BITS {
                let mut entry = parts.load(index);
                while let Err(now) = parts.compare_exchange(
                    index,
                    entry,
                    with_flags::<F>(entry, below, accessed, dirty),
                ) {
                    entry = now;
                }
            }
        }
        Some(child)
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Split<'_, '_, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        let child = match F::kind(entry, level) {
            Kind::Table => Some(F::address(entry, level)),
            Kind::Invalid if entry != 0 => {
                // The other end of the range lies in what was split for the first.
                let link = F::resume(entry);
                (F::kind(link, level) == Kind::Table).then(|| F::address(link, level))
            }
            Kind::Leaf if self.parts.names(level, extent) => {
                self.split::<F>(table, index, level, extent)
            }
            _ => None,
        };
        // What was a leaf may have to be split further.
        child.map_or(Step::Next, Step::Into)
    }
}

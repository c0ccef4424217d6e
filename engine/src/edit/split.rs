//! Split: large leaves become tables of smaller ones that translate the same.
//!
//! All tables that a split takes are reserved before anything is changed. A new table is filled out of reach and takes
//! the place of the leaf with one store. What a walker has recorded in the leaf, accessed and dirty, stands for all of it
//! and goes into every part.
//!
//! [`cleave`](AddressSpace::cleave) is what other edits begin with: at both ends of their range it
//! [unfolds](super::fold) the run, and splits the block, that reaches over the end.

use core::convert::Infallible;
use core::marker::PhantomData;
use core::ops::ControlFlow;

use super::Change;
use super::build::{Consecutive, Frames, Leaves};
use super::fold::{Unfold, how};
use super::live::{Cut, Look};
use super::protect::{Plans, Recode};
use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{State, Transition};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError};
use crate::flush::{Leaf, Ranges};
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::table::Table;
use crate::walk::{ByLevel, MAX_LEVELS, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Splits what is mapped in `span` until no leaf is above `largest`, and unfolds runs. The translation of no
    /// address changes.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`NeedsBreak`](EditError::NeedsBreak),
    /// [`OutOfTables`](EditError::OutOfTables). Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Level, Pa, Span, Va, format::X86_64, hosted::Hosted};
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
        let space = &mut *self.space;
        let slice = space.check(span)?;
        if !F::is_leaf_level(largest) {
            return Err(EditError::NoSuchLeaf);
        }
        let conditions = space.conditions();
        if space.may_refuse(&Change::new()) {
            let refuse = |entry, level| {
                entry & F::CONTIGUOUS != 0
                    && how::<F>(entry, level, &conditions) == Transition::Break
            };
            let mut look = Look::<F, _> {
                refuse,
                perms: None,
                format: PhantomData,
            };
            if let ControlFlow::Break(error) = space.visit_rarely(slice, &mut look) {
                return Err(error);
            }
        }
        // The tables for the ends and for the inside are taken together: either all of it happens, or nothing.
        let wish = Wish {
            slice,
            largest: Some(largest),
        };
        let owed = core::mem::replace(&mut space.owed, conditions.live);
        let cut = space.split_where(wish).inspect_err(|_| space.owed = owed)?;
        cut.add_to(conditions, &mut self.left);
        Ok(())
    }
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Makes the space fit for shared edits: no contiguous runs, everything complete, and everything published.
    pub(crate) fn share(mut self) {
        let conditions = self.space.conditions();
        if core::mem::take(&mut self.space.runs) {
            self.owe();
            for slice in self.space.everything() {
                self.space.unfold(slice).add_to(conditions, &mut self.left);
            }
        }
        self.left.news |= !conditions.live;
        self.finish(|_| ());
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Splits the blocks and unfolds the runs that reach over an end of `slice`.
    pub(super) fn cleave(&mut self, slice: Slice) -> Result<(), EditError<F::Input>> {
        // One look-up at each end tells whether there is anything to do; usually there is not.
        if self.run_over(slice.first, slice).is_none()
            && (slice.is_whole::<F>(Level::PAGE) || self.run_over(slice.last, slice).is_none())
        {
            return Ok(());
        }
        let wish = Wish {
            slice,
            largest: None,
        };
        let cut = self.split_where(wish)?;
        // The old and the new leaves translate alike, but what follows will not: walkers have to forget the block
        // before its parts can differ.
        let conditions = self.conditions();
        let mut ranges = Ranges::new();
        if let (true, Some(slice)) = (conditions.live, cut.slice()) {
            ranges.add(slice, None, true);
        }
        self.invalidate_now(&ranges);
        Ok(())
    }

    /// The extent of the leaf at `input`, with the run that it is a member of, if it reaches out of `slice`.
    fn run_over(&self, input: u64, slice: Slice) -> Option<(Slice, Leaf<F>)> {
        let leaf = self.leaf_at(input)?;
        let first = leaf.input().bits();
        let last = first + (leaf.size() - 1);
        (first < slice.first || last > slice.last).then_some((Slice { first, last }, leaf))
    }

    /// Splits the leaves that `wish` names, and unfolds the runs that they are part of. Allocates everything before it
    /// changes anything.
    fn split_where(&mut self, wish: Wish) -> Result<Cut, EditError<F::Input>> {
        let Wish { slice, .. } = wish;
        let conditions = self.conditions();
        let ends = [
            self.run_over(slice.first, slice),
            self.run_over(slice.last, slice),
        ];
        let refused = |at: u64| EditError::NeedsBreak(F::Input::from_bits(at));

        // Prepare: may the runs at the ends be unfolded, the blocks replaced, and are there enough tables?
        for (extent, leaf) in ends.iter().flatten() {
            let (entry, level) = (leaf.descriptor(), leaf.level());
            if leaf.is_contiguous()
                && !conditions.may_break
                && how::<F>(entry, level, &conditions) == Transition::Break
            {
                return Err(refused(extent.first));
            }
        }
        let mut reserve = Reserve {
            platform: &self.platform,
            heads: ByLevel::new(0),
        };
        let mut count = Count::<F, P> {
            wish,
            conditions,
            reserve: &mut reserve,
            format: PhantomData,
        };
        let counted = self.visit_rarely(slice, &mut count);
        if let ControlFlow::Break(error) = counted {
            reserve.release();
            return Err(error);
        }

        // Edit.
        let mut cut = Cut::default();
        for (extent, leaf) in ends.iter().flatten() {
            if leaf.is_contiguous() {
                cut.merge(self.unfold(*extent));
            }
        }
        if wish.largest.is_some() {
            cut.merge(self.unfold(slice));
        }
        let mut split = Split {
            platform: &self.platform,
            conditions,
            wish,
            reserve: &mut reserve,
            cut: Cut::default(),
            broken: Ranges::new(),
        };
        let _: ControlFlow<_> = self.visit_rarely(slice, &mut split);
        let (broken, split_cut) = (split.broken, split.cut);
        reserve.release();
        cut.merge(split_cut);
        self.resume(slice, &broken);
        Ok(cut)
    }

    /// Unfolds the runs in `slice`, all of which are whole.
    fn unfold(&self, slice: Slice) -> Cut {
        let mut unfold = Unfold::new(self.conditions());
        let _: ControlFlow<_> = self.visit_rarely(slice, &mut unfold);
        self.resume(slice, &unfold.broken);
        unfold.cut
    }
}

/// Which leaves to split.
#[derive(Clone, Copy)]
struct Wish {
    /// Those that reach over an end of this range.
    slice: Slice,
    /// Those in the range above this level.
    largest: Option<Level>,
}

impl Wish {
    /// Whether the leaf at `level` that translates `extent` is to be split.
    fn names(&self, level: Level, extent: Slice) -> bool {
        let slice = self.slice;
        let meets = extent.first <= slice.last && slice.first <= extent.last;
        let over_end = extent.first < slice.first || slice.last < extent.last;
        let too_large = self.largest.is_some_and(|largest| level > largest);
        level > Level::PAGE && meets && (over_end || too_large)
    }

    /// Calls `table` for each table that splitting the leaf takes, with its level.
    fn tables<F: Format, E>(
        &self,
        level: Level,
        extent: Slice,
        table: &mut impl FnMut(Level) -> Result<(), E>,
    ) -> Result<(), E> {
        let (true, Some(below)) = (self.names(level, extent), level.down()) else {
            return Ok(());
        };
        table(below)?;
        let size = 1u64 << F::shift(below);
        let mut first = extent.first;
        loop {
            let part = Slice {
                first,
                last: first + (size - 1),
            };
            self.tables::<F, E>(below, part, table)?;
            if part.last == extent.last {
                return Ok(());
            }
            first = part.last + 1;
        }
    }
}

/// Frames taken from the platform before anything is changed, for each level a chain through the first entry of each
/// frame: nothing else can reach these frames yet.
struct Reserve<'a, P: Platform> {
    platform: &'a P,
    /// The first frame of each chain, with bit 0 set; 0 is the end.
    heads: ByLevel<u64>,
}

impl<P: Platform> Reserve<'_, P> {
    /// Takes one more frame for `level` from the platform. Whether there was one.
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

impl<P: Platform> Frames for Reserve<'_, P> {
    fn take(&mut self, level: Level) -> Option<Pa> {
        let head = &mut self.heads[level];
        let frame = (*head & 1 != 0).then_some(Pa::new(*head & !1))?;
        // SAFETY: a frame of the reserve was allocated for a table at this level.
        let table = unsafe { Table::open(self.platform, frame, level) };
        *head = table.load(0);
        Some(frame)
    }
}

/// Reserves the tables for a split, and looks whether it may be done.
struct Count<'a, 'p, F: Format, P: Platform> {
    wish: Wish,
    conditions: Conditions,
    reserve: &'a mut Reserve<'p, P>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Visit<F, P> for Count<'_, '_, F, P> {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        match F::kind(entry, level) {
            Kind::Table => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            Kind::Leaf if self.wish.names(level, extent) => {
                let how = split_how::<F>(entry, level, &self.conditions);
                if how == Transition::Break && !self.conditions.may_break {
                    return ControlFlow::Break(EditError::NeedsBreak(F::Input::from_bits(
                        slice.first,
                    )));
                }
                let reserve = &mut self.reserve;
                let enough = self.wish.tables::<F, ()>(level, extent, &mut |level| {
                    if reserve.add(level) { Ok(()) } else { Err(()) }
                });
                if enough.is_err() {
                    return ControlFlow::Break(EditError::OutOfTables);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }
}

/// How a leaf may become a table that translates the same.
fn split_how<F: Format>(entry: u64, level: Level, conditions: &Conditions) -> Transition {
    let old = State::remembered::<F>(entry, level);
    // Runs are unfolded before they are split.
    let old = match old {
        State::Leaf { frame, attrs, .. } => State::Leaf {
            frame,
            attrs,
            contiguous: false,
        },
        other => other,
    };
    // Any frame will do: that of the table has no say.
    let new = State::Table {
        frame: Pa::new(0),
        denied: Perms::empty(),
    };
    conditions.transition::<F>(&old, &new, level)
}

/// Replaces leaves by tables that translate the same.
struct Split<'a, 'p, P: Platform> {
    platform: &'p P,
    conditions: Conditions,
    wish: Wish,
    reserve: &'a mut Reserve<'p, P>,
    cut: Cut,
    broken: Ranges,
}

impl<P: Platform> Split<'_, '_, P> {
    /// Fills a table below the leaf `entry` at `level`, as deep as the wish goes.
    fn below<F: Format>(
        &mut self,
        entry: u64,
        level: Level,
        extent: Slice,
        frame: Pa,
    ) -> Option<Pa> {
        let below = level.down()?;
        let attrs = F::decode(entry, level);
        let source = Consecutive::new(extent.first, frame);
        let leaves = Leaves::<F>::new(extent, source, &attrs, below, false).ok()?;
        let child = self.reserve.take(below)?;
        // SAFETY: the frame was reserved for a table at this level.
        let table = unsafe { Table::open(self.platform, child, below) };
        leaves.fill(&table, below, 0..1 << F::INDEX_BITS, extent.first);
        let size = 1u64 << F::shift(below);
        for index in 0..1usize << F::INDEX_BITS {
            let first = extent.first + index as u64 * size;
            let part = Slice {
                first,
                last: first + (size - 1),
            };
            if self.wish.names(below, part) {
                let leaf = table.load(index);
                let frame = F::address(leaf, below);
                let grandchild = self.below::<F>(leaf, below, part, frame)?;
                table.store(index, F::table(grandchild, Perms::empty()));
            }
        }
        Some(child)
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Split<'_, '_, P> {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, _) => {
                return ControlFlow::Continue(Step::Into(F::address(entry, level)));
            }
            (Kind::Leaf, Some(below)) if self.wish.names(level, extent) => {
                let how = split_how::<F>(entry, level, &self.conditions);
                let contended = self.conditions.is_contended::<F>(entry, level);
                let frame = F::address(entry, level);
                // A break yields the final entry before the table is built; without one it is built first, and what a
                // walker did meanwhile is looked at afterwards.
                let known = if how == Transition::Break {
                    table.exchange(index, 0)
                } else {
                    entry
                };
                let Some(child) = self.below::<F>(known, level, extent, frame) else {
                    debug_assert!(false, "a table was not reserved");
                    table.store(index, known);
                    return ControlFlow::Continue(Step::Next);
                };
                let link = F::table(child, Perms::empty());
                match how {
                    Transition::Break => {
                        table.store(index, F::suspend(link));
                        self.broken.add(extent, Some(level), false);
                    }
                    _ if !contended => table.link(index, link),
                    _ => {
                        let last = F::decode(table.exchange(index, link), level);
                        let was = F::decode(known, level);
                        if (last.accessed, last.dirty) != (was.accessed, was.dirty) {
                            // A walker set a bit for the block at the last: it stands for all of it. What
                            // walkers have set in the pages since then stays set.
                            let change = Change::marks(last.accessed, last.dirty);
                            let mut plans = Plans::<F>::new(self.conditions, change);
                            let mut late = Recode::new(&mut plans);
                            // SAFETY: the tables were just built, of this format.
                            let _: ControlFlow<Infallible> = unsafe {
                                crate::walk::walk::<F, P, _>(
                                    self.platform,
                                    child,
                                    below,
                                    extent,
                                    &mut late,
                                )
                            };
                        }
                    }
                }
                if how != Transition::Break {
                    self.cut.add(extent, None);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }
}

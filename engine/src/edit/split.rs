//! Split: large leaves become tables of smaller ones that translate the same.
//!
//! All tables that a split takes are reserved before anything is changed. A new table is filled out
//! of reach and takes the place of the leaf with one store. What a walker has recorded in the leaf,
//! accessed and dirty, stands for all of it and goes into every part.
//!
//! [`cleave`](AddressSpace::cleave) is what other edits begin with: at both ends of their range it
//! [unfolds](super::fold) the run, and splits the block, that reaches over the end.

use core::ops::ControlFlow;

use super::Change;
use super::build::{Consecutive, Leaves, Seed, fill_parts};
use super::fold::{Unfold, how};
use super::live::{Footprint, Look};
use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{State, Transition, resizing};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Reached};
use crate::flush::{Ranges, free_tree};
use crate::format::{
    Attrs, Format, Kind, Perms, address_of, kind_of, meaning, packed_of, with_flags,
};
use crate::platform::{Barrier, Platform};
use crate::run;
use crate::table::Table;
use crate::walk::{ByLevel, MAX_LEVELS, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Splits what is mapped in `span` until no leaf is above `largest`, and unfolds runs. The
    /// translation of no address changes.
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
                entry & F::CONTIGUOUS != 0 && how::<F>(level, &conditions) == Transition::Break
            };
            Look::<F, _>::new(refuse, None).at(space, slice)?;
        }
        // The tables for the ends and for the inside are taken together: either all of it happens,
        // or nothing.
        let wish = Wish {
            slice,
            largest: Some(largest),
        };
        let owed = core::mem::replace(&mut space.owed, conditions.live);
        let changed = space.split_where(wish).inspect_err(|_| space.owed = owed)?;
        changed.add_to(conditions, &mut self.left);
        Ok(())
    }
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Makes the space fit for shared edits: no contiguous runs, everything complete, and
    /// everything published.
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
    #[inline(always)]
    pub(super) fn cleave(&self, slice: Slice) -> Result<(), EditError<F::Input>> {
        match F::CONTIGUOUS != 0 || F::is_leaf_level(Level::PAGE.up()) {
            true => self.cleave_ends(slice),
            false => Ok(()),
        }
    }

    #[inline(never)]
    fn cleave_ends(&self, slice: Slice) -> Result<(), EditError<F::Input>> {
        // Prepare: whole sub-trees, for the place of one leaf each.
        let mut grafts = [Graft::NONE; 2];
        let ends = [slice.first, slice.last];
        for (end, at) in ends.into_iter().enumerate() {
            if let Err(error) = self.graft(at, slice, &mut grafts[end]) {
                let Graft { link, level, .. } = grafts[0];
                if let (true, Some(below)) = (link != 0, level.down()) {
                    let frame = address_of::<F>(link, level);
                    free_tree::<F, P>(&self.platform, frame, below);
                }
                return Err(error);
            }
        }
        // Edit.
        let mut footprint = Footprint::new();
        for (end, at) in ends.into_iter().enumerate() {
            if grafts[end].known != 0 {
                self.put_in(at, slice, &grafts[end], &mut footprint);
            }
        }
        // The old and the new leaves translate alike, but what follows will not: walkers have to
        // forget the block before its parts can differ.
        if let (Some(slice), true) = (footprint.slice(), self.conditions().live) {
            let mut ranges = Ranges::new();
            ranges.add(slice, None, true);
            self.invalidate_now(&mut ranges);
        }
        Ok(())
    }

    /// Prepares what takes the place of the leaf at `at`, if that reaches out of `slice` and may be
    /// replaced.
    #[inline(never)]
    fn graft(&self, at: u64, slice: Slice, graft: &mut Graft) -> Result<(), EditError<F::Input>> {
        let place = self.find(at);
        let (entry, level) = (place.entry, place.level);
        if place.kind != Kind::Leaf {
            return Ok(());
        }
        let conditions = self.conditions();
        let refuse = |breaks, at| match F::RULE.breaks() && breaks && !conditions.may_break {
            true => Err(EditError::NeedsBreak(F::Input::from_bits(at))),
            false => Ok(()),
        };
        if entry & F::CONTIGUOUS != 0 {
            let run = run::extent::<F>(at, level);
            if run.first < slice.first || slice.last < run.last {
                let breaks = how::<F>(level, &conditions) == Transition::Break;
                refuse(breaks, run.first)?;
                graft.known = entry;
            }
        }
        let part = Slice::around::<F>(at, level);
        let inside = slice.first <= part.first && part.last <= slice.last;
        // What reaches over both ends is split once.
        let again = at != slice.first && part.first <= slice.first;
        if !inside && !again {
            let breaks = split_how::<F>(level, &conditions) == Transition::Break;
            refuse(breaks, part.first.max(slice.first))?;
            let memory = Consecutive::new(part.first, address_of::<F>(entry, level));
            let mut seed = Seed::<F, _> {
                leaves: Leaves::of_pages(memory, 0, false),
                slice,
                deny: Perms::empty(),
            };
            let (attrs, below) = (packed_of::<F>(entry, level), level.down().unwrap_or(level));
            seed.leaves.encode(part, attrs, below)?;
            let link = seed.build(&self.platform, level, part);
            *graft = Graft {
                known: entry,
                link: link.ok_or(EditError::OutOfTables)?,
                level,
            };
        }
        Ok(())
    }

    /// Puts a sub-tree in the place of the leaf at `at`, which is taken out of its run first, if it
    /// is in one.
    #[inline(never)]
    fn put_in(&self, at: u64, slice: Slice, graft: &Graft, footprint: &mut Footprint) {
        let conditions = self.conditions();
        let place = self.find(at);
        let (table, index) = (&place.table, place.index);
        if place.kind == Kind::Leaf && place.entry & F::CONTIGUOUS != 0 {
            let run = run::extent::<F>(at, place.level);
            if run.first < slice.first || slice.last < run.last {
                let mut unfold = Unfold::new(conditions);
                unfold.unfold::<F, P>(table, index, place.level, at);
                if F::RULE.breaks()
                    && let Some(broken) = unfold.broken.slice()
                {
                    let mut ranges = Ranges::new();
                    ranges.add(broken, Some(place.level), false);
                    self.invalidate_now(&mut ranges);
                    for member in run::members::<F>(index, place.level) {
                        let left = table.load(member);
                        if kind_of::<F>(left, place.level) == Kind::Invalid {
                            table.link(member, F::resume(left));
                        }
                    }
                    self.platform.barrier(Barrier::Publish);
                }
                footprint.merge(unfold.changed);
            }
        }
        let Graft { known, link, level } = *graft;
        if link == 0 {
            return;
        }
        let entry = table.load(index);
        let part = Slice::around::<F>(at, level);
        let last = if F::RULE.breaks() && split_how::<F>(level, &conditions) == Transition::Break {
            let last = table.exchange(index, F::suspend(link));
            let mut broken = Ranges::new();
            broken.add(part, Some(level), false);
            self.invalidate_now(&mut broken);
            table.link(index, link);
            self.platform.barrier(Barrier::Publish);
            last
        } else {
            footprint.add(part, None);
            if conditions.is_contended::<F>(entry, level) {
                table.exchange(index, link)
            } else {
                table.link(index, link);
                entry
            }
        };
        let changed = (last ^ known) & !F::CONTIGUOUS;
        if let (true, Some(below)) = (changed != 0, level.down()) {
            let frame = address_of::<F>(link, level);
            self.change_bits(frame, below, changed & last, changed & known);
        }
    }

    /// Walkers have set flags for a leaf at the last: they stand for all parts of it, in which they
    /// have the same bits. What walkers have set in the parts since then stays set. The parts are
    /// in the table in `frame`, and below it.
    #[cold]
    #[inline(never)]
    fn change_bits(&self, frame: Pa, level: Level, set: u64, clear: u64) {
        // SAFETY: it was linked just now, or a descriptor in such a table points to it.
        let table = unsafe { Table::open(&self.platform, frame, level) };
        for index in 0..1usize << F::INDEX_BITS {
            let mut entry = table.load(index);
            match (kind_of::<F>(entry, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    self.change_bits(address_of::<F>(entry, level), below, set, clear);
                }
                _ => {
                    while let Err(now) =
                        table.compare_exchange(index, entry, (entry | set) & !clear)
                    {
                        entry = now;
                    }
                }
            }
        }
    }

    /// The extent of the leaf at `input`, or of the run that it is a member of, and its level, if
    /// that reaches out of `slice`.
    #[inline(never)]
    fn run_over(&self, input: u64, slice: Slice) -> Option<(Slice, Level)> {
        let Reached {
            table,
            index,
            level,
            ..
        } = self.find(input);
        let entry = table.load(index);
        if F::kind(entry, level) != Kind::Leaf {
            return None;
        }
        let extent = match entry & F::CONTIGUOUS {
            0 => Slice::around::<F>(input, level),
            _ => run::extent::<F>(input, level),
        };
        (extent.first < slice.first || extent.last > slice.last).then_some((extent, level))
    }

    /// Splits the leaves that `wish` names, and unfolds the runs that they are part of. Allocates
    /// everything before it changes anything.
    fn split_where(&mut self, wish: Wish) -> Result<Footprint, EditError<F::Input>> {
        let Wish { slice, .. } = wish;
        let conditions = self.conditions();
        let ends = [slice.first, slice.last];

        // Prepare: may the runs at the ends be unfolded, the blocks replaced, and are there enough
        // tables?
        for at in ends {
            if let Some((extent, level)) = self.run_over(at, slice) {
                let in_run = extent.last - extent.first >= 1 << F::shift(level);
                let breaks = how::<F>(level, &conditions) == Transition::Break;
                if in_run && breaks && !conditions.may_break {
                    return Err(EditError::NeedsBreak(F::Input::from_bits(extent.first)));
                }
            }
        }
        let mut reserve = Reserve::new(&self.platform);
        let mut count = Count::<F, P> {
            wish,
            conditions,
            reserve: &mut reserve,
            refused: None,
        };
        let _: ControlFlow<()> = self.visit(slice, &mut count);
        if let Some(error) = count.refused {
            reserve.release();
            return Err(error);
        }

        // Edit.
        let mut split = Split {
            wish,
            reserve: &mut reserve,
            swap: Swap::new(&self.platform, conditions),
        };
        for at in ends {
            if let Some((extent, _)) = self.run_over(at, slice) {
                split.swap.changed.merge(self.unfold(extent));
            }
        }
        split.swap.changed.merge(self.unfold(slice));
        let _: ControlFlow<()> = self.visit(slice, &mut split);
        let Swap {
            changed, broken, ..
        } = split.swap;
        reserve.release();
        self.resume(slice, &broken);
        Ok(changed)
    }

    /// Unfolds the runs in `slice`, all of which are whole.
    fn unfold(&self, slice: Slice) -> Footprint {
        let mut unfold = Unfold::new(self.conditions());
        let _: ControlFlow<()> = self.visit(slice, &mut unfold);
        self.resume(slice, &unfold.broken);
        unfold.changed
    }
}

/// A sub-tree that is ready to take the place of a leaf.
#[derive(Clone, Copy)]
struct Graft {
    /// What the leaf was when it was looked at; 0 if there is nothing to do.
    known: u64,
    /// The descriptor of the sub-tree; 0 if the leaf stays, and is no longer a member of its run.
    link: u64,
    level: Level,
}

impl Graft {
    const NONE: Self = Self {
        known: 0,
        link: 0,
        level: Level::PAGE,
    };
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

/// Frames taken from the platform before anything is changed, for each level a chain through the
/// first entry of each frame: nothing else can reach these frames yet.
struct Reserve<'a, P: Platform> {
    platform: &'a P,
    /// The first frame of each chain, with bit 0 set; 0 is the end.
    heads: ByLevel<u64>,
}

impl<'a, P: Platform> Reserve<'a, P> {
    fn new(platform: &'a P) -> Self {
        Self {
            platform,
            heads: ByLevel::new(0),
        }
    }

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

impl<P: Platform> Reserve<'_, P> {
    /// Takes one out.
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
    refused: Option<EditError<F::Input>>,
}

impl<F: Format, P: Platform> Visit<F, P> for Count<'_, '_, F, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        match F::kind(entry, level) {
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf if self.wish.names(level, extent) => {
                let how = split_how::<F>(level, &self.conditions);
                if how == Transition::Break && !self.conditions.may_break {
                    let at = F::Input::from_bits(slice.first);
                    self.refused = Some(EditError::NeedsBreak(at));
                    return Step::Stop;
                }
                let reserve = &mut self.reserve;
                let enough = self.wish.tables::<F, ()>(level, extent, &mut |level| {
                    if reserve.add(level) { Ok(()) } else { Err(()) }
                });
                if enough.is_err() {
                    self.refused = Some(EditError::OutOfTables);
                    return Step::Stop;
                }
            }
            _ => {}
        }
        Step::Next
    }
}

/// How a leaf at `level` may become a table that translates the same. Which leaf it is has no say,
/// nor which table.
fn split_how<F: Format>(level: Level, conditions: &Conditions) -> Transition {
    let how = match conditions.live {
        true => resizing(F::RULE, 2, &conditions.caps),
        false => Transition::Store,
    };
    debug_assert_eq!(
        how,
        {
            let new = State::Table {
                frame: Pa::new(0),
                denied: Perms::empty(),
            };
            conditions.transition::<F>(&State::ANY_LEAF, &new, level)
        },
        "there is one rule"
    );
    how
}

/// Puts tables in the place of leaves.
struct Swap<'p, P: Platform> {
    platform: &'p P,
    conditions: Conditions,
    changed: Footprint,
    /// What was left suspended, to be [resumed](super::live::Resume).
    broken: Footprint,
}

impl<'p, P: Platform> Swap<'p, P> {
    fn new(platform: &'p P, conditions: Conditions) -> Self {
        Self {
            platform,
            conditions,
            changed: Footprint::new(),
            broken: Footprint::new(),
        }
    }

    /// Replaces a leaf at `level` by a table of leaves one level smaller, which is returned.
    /// Nothing is done if the reserve has none.
    fn split<F: Format>(
        &mut self,
        reserve: &mut Reserve<'_, P>,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        extent: Slice,
    ) -> Option<Pa> {
        let below = level.down()?;
        let known = table.load(index);
        let attrs = meaning::<F>(known, level);
        let bits = F::encode(&attrs, below).ok()?;
        let child = reserve.take(below)?;
        // SAFETY: the frame was reserved for a table at this level.
        let parts = unsafe { Table::open(self.platform, child, below) };
        fill_parts::<F, P>(&parts, bits, F::address(known, level), below);
        drop(parts);
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
            // A walker set a flag for the block at the last: it stands for all of it. What walkers
            // have set in the pages since then stays set.
            let Attrs {
                accessed, dirty, ..
            } = meaning::<F>(last, level);
            // SAFETY: the table was just filled.
            let parts = unsafe { Table::open(self.platform, child, below) };
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

/// Replaces the leaves that a wish names by tables that translate the same.
struct Split<'a, 'p, P: Platform> {
    wish: Wish,
    reserve: &'a mut Reserve<'p, P>,
    swap: Swap<'p, P>,
}

impl<F: Format, P: Platform> Visit<F, P> for Split<'_, '_, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let extent = Slice::around::<F>(slice.first, level);
        let child = match F::kind(entry, level) {
            Kind::Table => Some(F::address(entry, level)),
            Kind::Leaf if self.wish.names(level, extent) => {
                self.swap
                    .split::<F>(self.reserve, table, index, level, extent)
            }
            _ => None,
        };
        // What was a leaf may have to be split further.
        child.map_or(Step::Next, Step::Into)
    }
}

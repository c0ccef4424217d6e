//! Relocate: what is mapped in a range moves to another, as `mremap` has it.
//!
//! Three walks. The first finds whether leaves fit the distance: one whose size does not divide it
//! is split first. The second makes the tables of the destination, and may fail. The third cannot:
//! it takes each entry out of the source, final by an exchange, and puts it into the destination. A
//! table that the distance is a multiple of moves whole, with all that is below it.
//!
//! Until the gather is complete a walker may go by the old address to what was moved, and by what
//! it holds of upper levels even into a table that was moved: the old addresses, and their upper
//! levels, are pending, and nothing that the gather unmaps or frees comes out before.

use core::ops::{ControlFlow, Range};

use super::drive::Footprint;
use super::fork::{FirstLeaf, Path, table_of};
use super::unmap::pages_of;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Located};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::run;
use crate::table::{Table, UpperCache};
use crate::walk::{Slice, Step, Visit, descend_to_tables, step, walk};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Moves whatever is mapped in `span` to the addresses from `to` on: leaves with their
    /// attributes, accessed and dirty flags; whole tables where both ends are aligned to what one
    /// covers. What is not mapped in `span` is not mapped there either.
    ///
    /// A block or a run that reaches over an end of the range, or whose size does not divide the
    /// distance, is split first. The old addresses translate to nothing when the gather is
    /// complete, and nothing that was gathered comes out before.
    ///
    /// # Errors
    /// [`Overlaps`](EditError::Overlaps) if the two ranges do;
    /// [`AlreadyMapped`](EditError::AlreadyMapped) of the destination;
    /// [`Denied`](EditError::Denied) where a table above either denies a permission;
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`OutOfTables`](EditError::OutOfTables); [`NeedsBreak`](EditError::NeedsBreak) where
    /// something has to be split. Nothing is mapped otherwise than before then; the destination may
    /// have empty tables.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, EditError, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let heap = Span::new(Va::new(0x40_0000), 0x3000)?;
    /// space.map(heap, Pa::new(0x8000), Attrs::USER_DATA)?;
    /// space.make_live();
    ///
    /// let mut gather = space.gather();
    /// let overlapping = gather.relocate(heap, Va::new(0x40_1000));
    /// assert_eq!(overlapping, Err(EditError::Overlaps));
    /// gather.relocate(heap, Va::new(0x7000_0000))?;
    /// gather.finish(|_| ()); // one invalidation, of the old addresses
    /// assert!(space.query(Va::new(0x40_1000)).is_none());
    /// assert_eq!(space.query(Va::new(0x7000_1000)).unwrap().frame(), Pa::new(0x9000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn relocate(
        &mut self,
        span: Span<F::Input>,
        to: F::Input,
    ) -> Result<(), EditError<F::Input>> {
        let from = self.space.check(span)?;
        let there = Span::new(to, span.size()).map_err(|_| match to.bits() & 0xfff {
            0 => EditError::InputOutOfRange,
            _ => EditError::Misaligned,
        })?;
        let into = self.space.check(there)?;
        if from.first <= into.last && into.first <= from.last {
            return Err(EditError::Overlaps);
        }
        if self.relocate_entry(from, into) {
            return Ok(());
        }
        self.relocate_tree(span, from, into)
    }

    /// Fast path. Moves what one entry has between two tables that exist: a page, or a table of
    /// pages. Returns `false` if it is neither: nothing has moved then, but a break that was
    /// pending at the destination is complete.
    #[inline]
    fn relocate_entry(&mut self, from: Slice, into: Slice) -> bool {
        let tables = Level::PAGE.up();
        let is_page = from.is_whole::<F>(Level::PAGE);
        let level = if is_page { Level::PAGE } else { tables };
        let is_table = || {
            let low = (1 << F::shift(tables)) - 1;
            from.is_whole::<F>(tables) && (from.first | into.first) & low == 0
        };
        let pinned = self.space.pinned && level == F::root_level();
        if !(is_page || is_table()) || pinned || self.space.may_deny() {
            return false;
        }
        self.complete_overlap(into.first, into.last);
        let conditions = self.space.conditions();
        let space = &mut *self.space;
        let (Some(old), Some(new)) =
            (space.entry_of(from.first, level), space.entry_of(into.first, level))
        else {
            return false;
        };
        let (index, place) = (old.index, new.index);
        // SAFETY: a walk has just come to them.
        let open = |at: Located| unsafe { Table::open(&space.platform, at.frame, level) };
        let (old, new) = (open(old), open(new));
        let entry = old.load(index);
        let moves = match is_page {
            true => F::is_single_page(entry),
            false => F::kind(entry, level) == Kind::Table,
        };
        if !moves || new.load(place) != 0 {
            return false;
        }
        if is_page {
            new.store(place, take::<F, P>(&old, index, level, entry, &conditions));
        } else {
            old.detach(index, 0, &mut space.cache.upper);
            // Release: a walk by the new address has to see what is in the table.
            new.link(place, entry);
        }
        drop((old, new));
        if conditions.live {
            self.space.debt.begin_change();
            match is_page {
                true => self.left.ranges.add_page(from, level),
                false => self.left.ranges.add(from, None, true),
            }
        }
        self.mapped(into);
        true
    }

    /// Moves leaves of any size.
    #[inline(never)]
    fn relocate_tree(
        &mut self,
        span: Span<F::Input>,
        from: Slice,
        into: Slice,
    ) -> Result<(), EditError<F::Input>> {
        let mut mapped = FirstLeaf(None);
        let _: ControlFlow<()> = self.space.visit(into, &mut mapped);
        if let Some(at) = mapped.0 {
            return Err(EditError::AlreadyMapped(F::Input::from_bits(at)));
        }
        let distance = into.first.wrapping_sub(from.first);
        let pinned = self.space.pinned;
        let mut fits = Fits { distance, pinned, fits: true };
        let _: ControlFlow<()> = self.space.visit(from, &mut fits);
        match fits.fits {
            true => self.cleave(from)?,
            false => {
                // Splits to the largest leaf whose size divides the distance.
                let grain = F::PAGE_SHIFT.max(distance.trailing_zeros());
                let mut largest = Level::PAGE;
                while F::is_leaf_level(largest.up()) && F::shift(largest.up()) <= grain {
                    largest = largest.up();
                }
                self.split(span, largest)?;
            }
        }
        // Completes the break of the destination before a table is linked there.
        self.complete_overlap(into.first, into.last);
        self.begin_change();
        let live = self.space.is_live();
        let may_deny = self.space.may_deny();
        let AddressSpace { platform, root, cache, .. } = &mut *self.space;
        let mut room = Room {
            path: Path {
                platform,
                root: *root,
                upper: &mut cache.upper,
                left: &mut self.left,
                live,
            },
            distance,
            pinned,
            may_deny,
            made: Ok(()),
        };
        // SAFETY: as in `AddressSpace::visit`. Tables of the destination are linked meanwhile: the
        // walk is elsewhere.
        let _: ControlFlow<()> =
            unsafe { walk::<F, P>(platform, *root, F::root_level(), from, &mut room) };
        room.made?;
        self.complete_overlap(into.first, into.last);

        let conditions = self.space.conditions();
        let AddressSpace { platform, root, cache, .. } = &mut *self.space;
        let mut moving = Move {
            platform,
            root: *root,
            upper: &mut cache.upper,
            conditions,
            distance,
            pinned,
            changed: Footprint::EMPTY,
        };
        // SAFETY: as above.
        let _: ControlFlow<()> =
            unsafe { walk::<F, P>(platform, *root, F::root_level(), from, &mut moving) };
        let changed = moving.changed;
        self.note(changed);
        self.mapped(into);
        Ok(())
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// The entry of a page, or of a table of pages, if there is a table for it.
    #[inline(always)]
    fn entry_of(&self, input: u64, level: Level) -> Option<Located> {
        if level > F::root_level() {
            return None;
        }
        let platform = &self.platform;
        // SAFETY: as in `visit`.
        let mut frame =
            unsafe { descend_to_tables::<F, P, false, true>(platform, self.root, input)? };
        if level == Level::PAGE && F::LEVELS > 1 {
            let above = Level::PAGE.up();
            // SAFETY: a walk has come to it.
            frame = unsafe {
                step::<F, P, false, true>(platform, frame, above, F::index(input, above))?
            };
        }
        Some(Located { frame, index: F::index(input, level) })
    }
}

/// Takes an entry out of a table, with the flags that walkers have set in it.
#[inline]
fn take<F: Format, P: Platform>(
    table: &Table<'_, P>,
    index: usize,
    level: Level,
    entry: u64,
    conditions: &Conditions,
) -> u64 {
    match conditions.is_contended::<F>(entry, level) {
        true => table.exchange(index, 0),
        false => {
            table.store(index, 0);
            entry
        }
    }
}

/// Whether the table at an entry moves as a whole: all of it lies in the range, and it stands at an
/// entry of its own there.
#[inline]
fn moves_whole<F: Format>(distance: u64, pinned: bool, level: Level, slice: Slice) -> bool {
    slice.is_whole::<F>(level)
        && distance & ((1 << F::shift(level)) - 1) == 0
        && !(pinned && level == F::root_level())
}

/// Whether the distance is a multiple of each leaf and run that does not move within a table.
struct Fits {
    distance: u64,
    pinned: bool,
    fits: bool,
}

impl Fits {
    fn look<F: Format>(&mut self, entry: u64, level: Level) -> ControlFlow<()> {
        let shift = match entry & F::CONTIGUOUS {
            0 => F::shift(level),
            _ => F::shift(level) + F::contiguous(level),
        };
        self.fits = self.distance & ((1 << shift) - 1) == 0;
        match self.fits {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Fits {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table if moves_whole::<F>(self.distance, self.pinned, level, slice) => Step::Next,
            Kind::Table => Step::Into(F::address(entry, level)),
            Kind::Leaf if self.look::<F>(entry, level).is_break() => Step::Stop,
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, _: u64) -> ControlFlow<()> {
        // A page fits. A member of a run may not.
        let mut index = range.start;
        while F::CONTIGUOUS != 0 && index < range.end {
            let entry = table.load(index);
            if entry & F::CONTIGUOUS != 0 && F::kind(entry, Level::PAGE) == Kind::Leaf {
                self.look::<F>(entry, Level::PAGE)?;
                index = run::members::<F>(index, Level::PAGE).end;
            } else {
                index += 1;
            }
        }
        ControlFlow::Continue(())
    }
}

/// Makes the tables of the destination.
struct Room<'a, F: Format, P: Platform> {
    path: Path<'a, P>,
    distance: u64,
    pinned: bool,
    may_deny: bool,
    made: Result<(), EditError<F::Input>>,
}

impl<F: Format, P: Platform> Room<'_, F, P> {
    fn make(&mut self, from: u64, level: Level) -> ControlFlow<()> {
        let input = from.wrapping_add(self.distance);
        self.made = self.path.make::<F>(input, level);
        match self.made {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Room<'_, F, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let made = match F::kind(entry, level) {
            Kind::Table if moves_whole::<F>(self.distance, self.pinned, level, slice) => {
                self.make(slice.first, level)
            }
            Kind::Table if self.may_deny && !F::denied(entry).is_empty() => {
                self.made = Err(EditError::Denied(F::Input::from_bits(slice.first)));
                ControlFlow::Break(())
            }
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf => self.make(slice.first, level),
            Kind::Invalid => ControlFlow::Continue(()),
        };
        match made {
            ControlFlow::Continue(()) => Step::Next,
            ControlFlow::Break(()) => Step::Stop,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        let mut made: Option<u64> = None;
        while index < range.end {
            if F::kind(table.load(index), Level::PAGE) != Kind::Leaf {
                index = table.past_hole(index, range.end);
                continue;
            }
            // Pages of one table may go to two.
            let input = at(index).wrapping_add(self.distance);
            let part = Slice::around::<F>(input, Level::PAGE.up()).first;
            if made != Some(part) {
                self.make(at(index), Level::PAGE)?;
                made = Some(part);
            }
            index += 1;
        }
        ControlFlow::Continue(())
    }
}

/// Moves entries into tables that are there.
struct Move<'a, P: Platform> {
    platform: &'a P,
    root: Pa,
    upper: &'a mut UpperCache,
    conditions: Conditions,
    distance: u64,
    pinned: bool,
    changed: Footprint,
}

impl<'a, P: Platform> Move<'a, P> {
    /// The table of the destination at `level`, for what was at `from`.
    fn table<F: Format>(&self, from: u64, level: Level) -> Option<(Table<'a, P>, usize)> {
        let input = from.wrapping_add(self.distance);
        let table = table_of::<F, P>(self.platform, self.root, input, level)?;
        Some((table, F::index(input, level)))
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Move<'_, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table if moves_whole::<F>(self.distance, self.pinned, level, slice) => {
                if let Some((to, place)) = self.table::<F>(slice.first, level) {
                    table.detach(index, 0, self.upper);
                    // Release: a walk by the new address has to see what is in the table.
                    to.link(place, entry);
                    self.changed.add(slice, None);
                }
            }
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf => {
                if let Some((to, place)) = self.table::<F>(slice.first, level) {
                    let entry = take::<F, P>(table, index, level, entry, &self.conditions);
                    let vacant = to.load(place);
                    to.replace::<F>(place, level, vacant, entry);
                    self.changed.add(slice, Some(level));
                }
            }
            Kind::Invalid => {}
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        while index < range.end {
            let Some((to, place)) = self.table::<F>(at(index), Level::PAGE) else {
                // Nothing here is mapped up to the next table there.
                let input = at(index).wrapping_add(self.distance);
                let rest = F::entries(Level::PAGE) - F::index(input, Level::PAGE);
                index += rest;
                continue;
            };
            let end = range.end.min(index + (F::entries(Level::PAGE) - place));
            let (start, offset) = (index, place.wrapping_sub(index));
            let mut moved: Option<Range<usize>> = None;
            while index < end {
                let entry = table.load(index);
                if F::kind(entry, Level::PAGE) != Kind::Leaf {
                    index = table.past_hole(index, end);
                    continue;
                }
                let entry = take::<F, P>(table, index, Level::PAGE, entry, &self.conditions);
                to.store(index.wrapping_add(offset), entry);
                index += 1;
                moved = Some(moved.map_or(index - 1, |moved| moved.start)..index);
            }
            if let Some(moved) = moved {
                let slice = pages_of::<F>(at(start), start, moved);
                self.changed.add(slice, Some(Level::PAGE));
            }
        }
        ControlFlow::Continue(())
    }
}

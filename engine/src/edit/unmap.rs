//! Unmap: addresses translate to nothing any more.
//!
//! Whole sub-trees are detached by one store at their top and travel with the gather; what is below
//! them is looked at when they are reclaimed, after the invalidation, when no walker can change it
//! any more and no processor waits. Only the leaves at the two ends of the range, in tables that
//! stay, are cut one by one. They are handed to the caller at once, but sealed until the
//! invalidation is complete.

use core::array;
use core::ops::{ControlFlow, Range};

use super::live::Footprint;
use super::take::{take, take_any, take_run};
use crate::SMALL;
use crate::addr::{Address, Level, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Liveness, Located, NOT_PLAIN};
use crate::entry::LINE;
use crate::flush::{Fate, Flush, Held, Leaf, Progress};
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{Denied, Place, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Unmaps `span`; what is not mapped in it already stays so.
    ///
    /// A block or a run that reaches over an end of the range is split first. `held` receives the
    /// leaves that were cut off one by one; it may break off after any, when it is full, and the
    /// edit stops there. All other leaves come out when what was gathered is
    /// [reclaimed](crate::flush::Completed::reclaim). The edit also stops when the platform keeps
    /// no side memory for tables and the gather can carry no more of them. An edit that stopped has
    /// done everything below the address that it returns: finish the gather and go on from there.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`OutOfTables`](EditError::OutOfTables) and [`NeedsBreak`](EditError::NeedsBreak) where
    /// something has to be split. Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
    /// # use core::ops::ControlFlow;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let all = Span::new(Va::new(0), 1 << 30)?;
    /// space.map(all, Pa::new(0), Attrs::KERNEL_DATA)?;
    /// let half = Span::new(Va::new(0), 512 << 20)?;
    /// let mut gather = space.gather();
    /// let progress = gather.unmap(half, |_| ControlFlow::Continue(()))?;
    /// assert!(progress.is_done());
    /// gather.finish(|_| ());
    /// assert!(space.query(Va::new(0)).is_none());
    /// assert_eq!(space.query(Va::new(512 << 20)).unwrap().size(), 2 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unmap(
        &mut self,
        span: Span<F::Input>,
        mut held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        if SMALL {
            return self.unmap_span(span, held);
        }
        if Slice::of(span).is_whole::<F>(Level::PAGE)
            && let Some(leaf) = self.unmap_one(span.start().bits())
        {
            // Where it breaks off is the end.
            let _: ControlFlow<()> = held(leaf);
            return Ok(Progress::Done);
        }
        let slice = self.space.check(span)?;
        self.unmap_leaves(slice, held)
    }

    /// Unmaps one page: as [`unmap`](Gather::unmap) of a range of that size. What is mapped there,
    /// if anything is, comes out when the flush is complete.
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, EditError, Pa, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # space.map_page(Va::new(0x7000), Pa::new(0x2000), Attrs::USER_DATA)?;
    /// # space.make_live();
    /// let mut gather = space.gather();
    /// let gone = gather.unmap_page(Va::new(0x7000))?.expect("mapped");
    /// assert!(gather.unmap_page(Va::new(0x7000))?.is_none());
    /// let gone = gather.flush_with(gone, |_| ()).expect("of this gather");
    /// assert_eq!(gone.frame(), Pa::new(0x2000));
    /// # Ok::<(), EditError<Va>>(())
    /// ```
    #[inline]
    pub fn unmap_page(
        &mut self,
        page: F::Input,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let at = self.space.locate_open(page.bits());
        self.unmap_at(page.bits(), at)
    }

    /// The same where it is as it mostly is; nothing has changed if not.
    #[inline(never)]
    fn unmap_one(&mut self, page: u64) -> Option<Held<Leaf<F>>> {
        let at = self.space.locate_open(page)?;
        self.take_like_last(page, at)
    }

    /// The same of a page whose entry is in a table of pages, if `at` says so, of a space that is
    /// open there.
    #[inline(always)]
    pub(super) fn unmap_at(
        &mut self,
        page: u64,
        at: Option<Located>,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        match at.and_then(|at| self.take_like_last(page, at)) {
            Some(leaf) => Ok(Some(leaf)),
            None => self.unmap_any_page(page, at),
        }
    }

    /// Takes a page away that is like the one before, as most are.
    #[inline(always)]
    fn take_like_last(&mut self, page: u64, at: Located) -> Option<Held<Leaf<F>>> {
        let space = &mut *self.space;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        if entry & !F::address_mask(Level::PAGE) != space.plain {
            return None;
        }
        space.owed = true;
        table.store(at.index, 0);
        drop(table);
        let slice = Slice::around::<F>(page, Level::PAGE);
        self.left.ranges.add_page(slice, Level::PAGE);
        let leaf = Leaf::new(page, entry, Level::PAGE, Perms::empty());
        Some(Held::new(leaf, self.serial()))
    }

    /// Unmaps a page of which nothing is known but perhaps where its entry is, or which is no page.
    #[cold]
    #[inline(never)]
    fn unmap_any_page(
        &mut self,
        page: u64,
        at: Option<Located>,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let slice = self.space.check_page(F::Input::from_bits(page))?;
        if !SMALL
            && let Some(at) = at.or_else(|| self.space.locate_again(slice))
            && let Some(taken) = self.take_page(slice, at)
        {
            return Ok(taken);
        }
        self.unmap_part_of_leaf(slice)
    }

    /// The same of a part of a larger leaf, which is split.
    fn unmap_part_of_leaf(
        &mut self,
        slice: Slice,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let mut taken = None;
        let _done = self.unmap_leaves(slice, |leaf| {
            taken = Some(leaf);
            ControlFlow::Continue(())
        })?;
        Ok(taken)
    }

    /// Takes away what is mapped in one page, if that is not in a run.
    #[inline(always)]
    fn take_page(&mut self, slice: Slice, at: Located) -> Option<Option<Held<Leaf<F>>>> {
        let Located { frame, index } = at;
        let space = &mut *self.space;
        // SAFETY: a walk has just come to it.
        let table = unsafe { Table::open(&space.platform, frame, Level::PAGE) };
        let entry = table.load(index);
        if F::kind(entry, Level::PAGE) != Kind::Leaf {
            return Some(None);
        }
        if entry & F::CONTIGUOUS != 0 {
            return None;
        }
        let conditions = space.conditions();
        if conditions.live && !conditions.is_contended::<F>(entry, Level::PAGE) {
            space.plain = entry & !F::address_mask(Level::PAGE);
        }
        let entry = take::<F, P>(&table, conditions, index, Level::PAGE, entry);
        drop(table);
        let leaf = Leaf::new(slice.first, entry, Level::PAGE, space.denied(slice.first));
        if conditions.live {
            space.owed = true;
            self.left.ranges.add_page(slice, Level::PAGE);
        }
        Some(Some(Held::new(leaf, self.serial())))
    }

    /// Unmaps leaves of any size.
    fn unmap_leaves(
        &mut self,
        slice: Slice,
        mut held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        if SMALL {
            return self.unmap_span(slice.span(), held);
        }
        let serial = self.serial();
        self.space.approach(slice.first);
        // By its parts: the platform alone is borrowed while the space notes what it owes.
        let (root, open) = (self.space.root, self.space.open);
        if let Some(place) =
            // SAFETY: `Open::place`: the root of the space, which `open` is of (1.).
            unsafe { open.place::<F, P>(&self.space.platform, root, slice) }
            && place.is_whole::<F>(self.space.runs)
            // A table that is left with nothing is detached instead.
            && !slice.is_whole::<F>(Level::PAGE.up())
        {
            let live = self.space.liveness() != Liveness::Dead;
            let plain = match self.space.may_deny() {
                true => NOT_PLAIN,
                false => self.space.plain,
            };
            self.space.owed |= live;
            // If the visitor unwinds, what was detached until then is not named: everything is,
            // until it has come to its end.
            let everything = &mut self.left.ranges.everything;
            let before = core::mem::replace(everything, live);
            let Place { table, mut range } = place;
            let Range { start, .. } = range;
            let broken_off;
            (range.start, broken_off) =
                take_alike::<F, P>(&table, range.clone(), slice.first, plain, serial, &mut held);
            let mut taken = start..range.start;
            let mut progress = Progress::Done;
            if !range.is_empty() {
                let first = slice
                    .first
                    .wrapping_add((taken.len() as u64) << F::PAGE_SHIFT);
                let rest;
                (rest, progress, self.space.plain) =
                    (self.space).unmap_rest(table, range, first, broken_off, serial, &mut held);
                taken = hull(taken, rest);
            }
            self.left.ranges.everything = before;
            if live && !taken.is_empty() {
                let at = |index: usize| {
                    let pages = index.wrapping_sub(start) as u64;
                    slice.first.wrapping_add(pages << F::PAGE_SHIFT)
                };
                let (first, last) = (at(taken.start), at(taken.end).wrapping_sub(1));
                self.left
                    .ranges
                    .add_page(Slice { first, last }, Level::PAGE);
            }
            return Ok(progress);
        }
        self.unmap_tree(slice, serial, held)
    }

    /// The same where there are several tables, or something has to be split.
    #[inline(never)]
    fn unmap_tree(
        &mut self,
        slice: Slice,
        serial: u64,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        self.space.cleave(slice)?;
        self.space.open.forget();
        let conditions = self.space.conditions();
        self.space.owed |= conditions.live;
        // As above.
        let before = core::mem::replace(&mut self.left.ranges.everything, conditions.live);
        let space = &*self.space;
        let mut unmap = Unmap {
            platform: &space.platform,
            pinned: space.pinned,
            changed: Footprint::new(),
            denied: Denied::new(Perms::empty()),
            flush: &mut self.left,
            pages: Pages::new(conditions, serial, held),
        };
        let _: ControlFlow<()> = space.visit(slice, &mut unmap);
        let (changed, progress) = (unmap.changed, unmap.pages.progress::<F>());
        self.left.ranges.everything = before;
        changed.add_to(conditions, &mut self.left);
        Ok(progress)
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Goes on with the pages of one table where they are not like the one that was taken last:
    /// which were taken, how far it has come, and what the last was like.
    #[cold]
    #[inline(never)]
    fn unmap_rest(
        &self,
        table: Table<'_, P>,
        range: Range<usize>,
        first: u64,
        stop: bool,
        serial: u64,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> (Range<usize>, Progress<F::Input>, u64) {
        let conditions = self.conditions();
        let mut pages = Pages::new(conditions, serial, held);
        pages.denied = self.denied(first);
        pages.plain = self.plain;
        pages.stop = stop;
        let taken = pages.take::<F, P>(&table, range, first);
        // Of a dead space no page is plain: when it is live, hardware may write it.
        let plain = if conditions.live {
            pages.plain
        } else {
            NOT_PLAIN
        };
        (taken, pages.progress::<F>(), plain)
    }
}

struct Unmap<'a, P: Platform, V> {
    platform: &'a P,
    /// The root's entries stay.
    pinned: bool,
    changed: Footprint,
    denied: Denied,
    flush: &'a mut Flush,
    pages: Pages<V>,
}

impl<F: Format, P: Platform, V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>> Visit<F, P>
    for Unmap<'_, P, V>
{
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let Pages {
            conditions, serial, ..
        } = self.pages;
        match (F::kind(entry, level), level.down()) {
            (Kind::Invalid, _) | (Kind::Table, None) => {}
            _ if self.pages.stop => {
                self.pages.end = Some(slice.first);
                return Step::Stop;
            }
            (Kind::Leaf, _) => {
                let entry = take_any::<F, P>(table, conditions, index, level, entry);
                let first = slice.first;
                let leaf = Leaf::new(first, entry, level, self.denied.at(level));
                let last = first + (leaf.size() - 1);
                self.changed.add(Slice { first, last }, Some(level));
                self.pages.stop = (self.pages.held)(Held::new(leaf, serial)).is_break();
            }
            (Kind::Table, Some(below)) => {
                let child = F::address(entry, level);
                self.denied.enter::<F>(entry, below);
                if !slice.is_whole::<F>(level) || self.pinned && level == F::root_level() {
                    return Step::Into(child);
                }
                if !self.flush.has_room(self.platform, child) {
                    self.pages.end = Some(slice.first);
                    return Step::Stop;
                }
                table.store(index, 0);
                let denied = self.denied.at(below);
                let fate = Fate::Unmapped;
                self.flush
                    .carry(self.platform, child, below, slice.first, denied, fate);
                self.changed.add(slice, None);
            }
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        self.pages.denied = self.denied.at(Level::PAGE);
        let Range { start, .. } = range;
        let taken = self.pages.take::<F, P>(table, range, first);
        if !taken.is_empty() {
            let at = |index: usize| first.wrapping_add(((index - start) as u64) << F::PAGE_SHIFT);
            let (first, last) = (at(taken.start), at(taken.end).wrapping_sub(1));
            self.changed.add(Slice { first, last }, Some(Level::PAGE));
        }
        match self.pages.end {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }
}

/// Takes pages out of a table that are like `plain`, as most are, from the start of `range` on: up
/// to the first that is not, or behind the one at which the visitor breaks off. Where that is, and
/// whether it broke off.
#[inline(always)]
fn take_alike<F: Format, P: Platform>(
    table: &Table<'_, P>,
    range: Range<usize>,
    first: u64,
    plain: u64,
    serial: u64,
    held: &mut impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
) -> (usize, bool) {
    let mask = !F::address_mask(Level::PAGE);
    let (mut index, mut input) = (range.start, first);
    let mut take = |index: usize, input: u64, entry: u64| {
        table.store(index, 0);
        let leaf = Leaf::new(input, entry, Level::PAGE, Perms::empty());
        held(Held::new(leaf, serial)).is_break()
    };
    // A line of entries is looked at as one, before any of them is written: they have no other
    // writer. All are like the pattern if what they have in common is, and what any of them has.
    while range.end - index >= LINE {
        let line: [u64; LINE] = array::from_fn(|offset| table.load(index + offset));
        let all = line.iter().fold(u64::MAX, |all, entry| all & entry);
        let any = line.iter().fold(0, |any, entry| any | entry);
        if all & mask != plain || any & mask != plain {
            break;
        }
        for (offset, entry) in line.into_iter().enumerate() {
            let page = input.wrapping_add((offset as u64) << F::PAGE_SHIFT);
            if take(index + offset, page, entry) {
                return (index + offset + 1, true);
            }
        }
        index += LINE;
        input = input.wrapping_add((LINE as u64) << F::PAGE_SHIFT);
    }
    while index < range.end {
        let entry = table.load(index);
        if entry & mask != plain {
            break;
        }
        let stop = take(index, input, entry);
        index += 1;
        input = input.wrapping_add(1 << F::PAGE_SHIFT);
        if stop {
            return (index, true);
        }
    }
    (index, false)
}

/// Both ranges, and what lies between them.
#[inline(always)]
fn hull(one: Range<usize>, other: Range<usize>) -> Range<usize> {
    match (one.is_empty(), other.is_empty()) {
        (true, _) => other,
        (_, true) => one,
        _ => one.start.min(other.start)..one.end.max(other.end),
    }
}

/// Takes pages out of one table, whatever they are like: the inner loop of small edits.
struct Pages<V> {
    conditions: Conditions,
    denied: Perms,
    serial: u64,
    held: V,
    /// The pattern of the page that was taken last, if a store takes it.
    plain: u64,
    /// The visitor has broken off: stop before the next entry that is mapped.
    stop: bool,
    /// Where it has stopped, if it has.
    end: Option<u64>,
}

impl<V> Pages<V> {
    #[inline(always)]
    fn new(conditions: Conditions, serial: u64, held: V) -> Self {
        Self {
            conditions,
            denied: Perms::empty(),
            serial,
            held,
            plain: NOT_PLAIN,
            stop: false,
            end: None,
        }
    }

    /// How far it has come.
    #[inline(always)]
    fn progress<F: Format>(&self) -> Progress<F::Input> {
        match self.end {
            None => Progress::Done,
            Some(at) => Progress::Stopped(F::Input::from_bits(at)),
        }
    }

    /// Which entries were taken, from the first to the last; those between that were not are holes.
    #[inline(always)]
    fn take<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> Range<usize>
    where
        V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    {
        let mask = !F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        // What is cut is named when all of it is: if the visitor unwinds, everything is.
        let (mut from, mut to) = (range.end, range.start);
        let mut index = range.start;
        while index < range.end {
            let mut entry = table.load(index);
            if entry & mask == self.plain && !self.stop && self.denied.is_empty() {
                let rest = index..range.end;
                let (plain, serial) = (self.plain, self.serial);
                from = from.min(index);
                (index, self.stop) =
                    take_alike::<F, P>(table, rest, at(index), plain, serial, &mut self.held);
                to = index;
                continue;
            }
            if F::kind(entry, Level::PAGE) != Kind::Leaf {
                index = table.past_hole(index, range.end);
                continue;
            }
            if self.stop {
                self.end = Some(at(index));
                break;
            }
            from = from.min(index);
            let page = at(index);
            if entry & F::CONTIGUOUS != 0 {
                entry = take_run::<F, P>(table, self.conditions, index, Level::PAGE);
                index = run::members::<F>(index, Level::PAGE).end;
            } else {
                if !self.conditions.is_contended::<F>(entry, Level::PAGE) {
                    self.plain = entry & mask;
                }
                entry = take::<F, P>(table, self.conditions, index, Level::PAGE, entry);
                index += 1;
            }
            to = index;
            let leaf = Leaf::new(page, entry, Level::PAGE, self.denied);
            self.stop = (self.held)(Held::new(leaf, self.serial)).is_break();
        }
        from.min(to)..to
    }
}

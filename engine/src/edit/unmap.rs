//! Unmap: addresses translate to nothing any more.
//!
//! Whole sub-trees are detached by one store at their top and travel with the gather; what is below them is looked at
//! when they are reclaimed, after the invalidation, when no walker can change it any more and no processor waits. Only the
//! leaves at the two ends of the range, in tables that stay, are cut one by one. They are handed to the caller at
//! once, but sealed until the invalidation is complete.

use core::ops::{ControlFlow, Range};

use super::live::Footprint;
use super::take::{take, take_any, take_run};
use crate::SMALL;
use crate::addr::{Address, Level, Span};
use crate::edit::Gather;
use crate::edit::space::{Conditions, EditError, Located};
use crate::flush::{Fate, Flush, Held, Leaf, Progress};
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{Denied, Slice, Step, Visit, descend};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Unmaps `span`; what is not mapped in it already stays so.
    ///
    /// A block or a run that reaches over an end of the range is split first. `held` receives the leaves that were cut
    /// off one by one; it may break off after any, when it is full, and the edit stops there. All other leaves come
    /// out when what was gathered is [reclaimed](crate::flush::Completed::reclaim). The edit also stops when the platform keeps
    /// no side memory for tables and the gather can carry no more of them. An edit that stopped has done everything
    /// below the address that it returns: finish the gather and go on from there.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`OutOfTables`](EditError::OutOfTables) and
    /// [`NeedsBreak`](EditError::NeedsBreak) where something has to be split. Nothing has changed then.
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
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        if SMALL {
            return self.unmap_span(span, held);
        }
        let slice = self.space.check(span)?;
        self.unmap_leaves(slice, held)
    }

    /// Unmaps one page: as [`unmap`](Gather::unmap) of a range of that size. What is mapped there, if anything is, comes out
    /// when the flush is complete.
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
        let slice = self.space.check_page(page)?;
        let at = self.space.locate(slice);
        self.unmap_at(slice, at)
    }

    /// The same of a page that has been checked, and whose entry is in a table of pages if `at` says so.
    #[inline(always)]
    pub(super) fn unmap_at(
        &mut self,
        slice: Slice,
        at: Option<Located>,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let Some(at) = at else {
            return self.unmap_part_of_leaf(slice);
        };
        match self.take_alike(slice, at) {
            Some(leaf) => Ok(Some(leaf)),
            None => self.unmap_other_page(slice, at),
        }
    }

    /// Takes a page away that is like the one before, as most are.
    #[inline(always)]
    fn take_alike(&mut self, slice: Slice, at: Located) -> Option<Held<Leaf<F>>> {
        let space = &*self.space;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        if entry & !F::address_mask(Level::PAGE) != space.plain || space.may_deny() {
            return None;
        }
        table.store(at.index, 0);
        drop(table);
        self.space.owed = true;
        self.left.ranges.add_page(slice, Level::PAGE);
        let leaf = Leaf::new(slice.first, entry, Level::PAGE, Perms::empty());
        Some(Held::new(leaf, self.serial()))
    }

    /// The same where a page is not like the one before.
    #[cold]
    #[inline(never)]
    fn unmap_other_page(
        &mut self,
        slice: Slice,
        at: Located,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        match self.take_page(slice, at) {
            Some(taken) => Ok(taken),
            None => self.unmap_part_of_leaf(slice),
        }
    }

    /// The same of a part of a larger leaf, which is split.
    #[cold]
    #[inline(never)]
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
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        if SMALL {
            return self.unmap_span(slice.span(), held);
        }
        let serial = self.serial();
        if let Some(place) =
            // SAFETY: the root of the space.
            unsafe { descend::<F, P, false, false>(&self.space.platform, self.space.root, slice) }
            && place.is_whole::<F>(self.space.runs)
            // A table that is left with nothing is detached instead.
            && !slice.is_whole::<F>(Level::PAGE.up())
        {
            let conditions = self.space.conditions();
            self.space.owed |= conditions.live;
            // If the visitor unwinds, what was detached until then is not named: everything is, until it has come to its end.
            let everything = &mut self.left.ranges.everything;
            let before = core::mem::replace(everything, conditions.live);
            let mut pages = Pages::new(conditions, serial, held);
            pages.denied = self.space.denied(slice.first);
            let taken = pages.take::<F, P>(&place.table, place.range.clone(), slice.first);
            self.left.ranges.everything = before;
            if let (Some(taken), true) = (taken, conditions.live) {
                self.left.ranges.add_page(taken, Level::PAGE);
            }
            return Ok(pages.progress::<F>());
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
        if let Some(taken) = self.pages.take::<F, P>(table, range, first) {
            self.changed.add(taken, Some(Level::PAGE));
        }
        match self.pages.end {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }
}

/// Takes pages out of one table: the inner loop of small edits.
struct Pages<V> {
    conditions: Conditions,
    denied: Perms,
    serial: u64,
    held: V,
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

    /// What was taken, from the first to the last address.
    #[inline(always)]
    fn take<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> Option<Slice>
    where
        V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    {
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        // What is cut is named when all of it is: if the visitor unwinds, everything is.
        let (mut from, mut to) = (range.end, range.start);
        let (conditions, denied, serial) = (self.conditions, self.denied, self.serial);
        // Mostly a leaf has the pattern of the one before, and a store takes it. No entry has this one.
        let mask = !F::address_mask(Level::PAGE);
        let mut plain = !mask;
        for index in range.clone() {
            let mut entry = table.load(index);
            let mut behind = index + 1;
            if entry & mask == plain {
                table.store(index, 0);
            } else {
                if F::kind(entry, Level::PAGE) != Kind::Leaf {
                    continue;
                }
                if self.stop {
                    self.end = Some(at(index));
                    break;
                }
                from = from.min(index);
                if entry & F::CONTIGUOUS != 0 {
                    entry = take_run::<F, P>(table, conditions, index, Level::PAGE);
                    behind = run::members::<F>(index, Level::PAGE).end;
                } else {
                    if !conditions.is_contended::<F>(entry, Level::PAGE) {
                        plain = entry & mask;
                    }
                    entry = take::<F, P>(table, conditions, index, Level::PAGE, entry);
                }
            }
            to = behind;
            let leaf = Leaf::new(at(index), entry, Level::PAGE, denied);
            if (self.held)(Held::new(leaf, serial)).is_break() {
                self.stop = true;
                plain = !mask;
            }
        }
        (from < to).then(|| Slice {
            first: at(from),
            last: at(to).wrapping_sub(1),
        })
    }
}

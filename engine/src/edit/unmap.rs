//! Unmap: addresses translate to nothing any more.
//!
//! Whole subtrees are detached by one store at their top and travel with the gather; what is below
//! them is visited when they are reclaimed, after the invalidation, when no walker can change it
//! any more and no processor waits. Only the leaves at the two ends of the range, in tables that
//! stay, are cut one by one. They are handed to the caller at once, but sealed until the
//! invalidation is complete.

use core::array;
use core::ops::{ControlFlow, Range};

use super::drive::Footprint;
use crate::addr::{Address, Level, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Located};
use crate::entry::LINE;
use crate::flush::{Fate, Flush, Held, Leaf, Progress};
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::run;
use crate::table::{Table, UpperCache};
use crate::walk::{Denied, Slice, Step, Visit, walk};

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
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
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
    /// # use tablewright::{AddressSpace, Attrs, EditError, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
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
        if let Some(at) = self.space.locate_open(page.bits())
            && let Some(leaf) = self.take_like_last(page.bits(), at)
        {
            return Ok(Some(leaf));
        }
        self.unmap_any_page(page)
    }

    /// Fast path. Takes a page away that is like the last one.
    #[inline]
    fn take_like_last(&mut self, page: u64, at: Located) -> Option<Held<Leaf<F>>> {
        let space = &mut *self.space;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        if entry & !F::address_mask(Level::PAGE) != space.cache.plain {
            return None;
        }
        space.debt.begin_change();
        table.store(at.index, 0);
        drop(table);
        let slice = Slice::around::<F>(page, Level::PAGE);
        self.left.ranges.add_page(slice, Level::PAGE);
        let leaf = Leaf::new(page, entry, Level::PAGE, Perms::empty());
        Some(Held::new(leaf, self.serial()))
    }

    /// Unmaps a page of another kind, or what is no page.
    #[inline(never)]
    fn unmap_any_page(
        &mut self,
        page: F::Input,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let slice = self.space.check_page(page)?;
        if let Some(at) = self.space.locate_open(slice.first)
            && let Some(leaf) = self.take_page(slice, at)
        {
            return Ok(Some(leaf));
        }
        let mut taken = None;
        let _done = self.unmap_leaves(slice, |leaf| {
            taken = Some(leaf);
            ControlFlow::Continue(())
        })?;
        Ok(taken)
    }

    /// Takes a page away, which walkers may be writing. Returns `None`, without side effects, if it
    /// is a member of a run, or none.
    #[inline]
    fn take_page(&mut self, slice: Slice, at: Located) -> Option<Held<Leaf<F>>> {
        let (conditions, level) = (self.space.conditions(), Level::PAGE);
        let AddressSpace { platform, cache, debt, .. } = &mut *self.space;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&*platform, at.frame, level) };
        let mut entry = table.load(at.index);
        if F::kind(entry, level) != Kind::Leaf || entry & F::CONTIGUOUS != 0 {
            return None;
        }
        if conditions.live {
            debt.begin_change();
            self.left.ranges.add_page(slice, level);
        }
        if conditions.is_contended::<F>(entry, level) {
            entry = table.exchange(at.index, 0);
        } else {
            table.store(at.index, 0);
            if conditions.live {
                cache.plain = entry & !F::address_mask(level);
            }
        }
        drop(table);
        let leaf = Leaf::new(slice.first, entry, level, Perms::empty());
        Some(Held::new(leaf, self.serial()))
    }

    /// Unmaps leaves of any size.
    #[inline]
    fn unmap_leaves(
        &mut self,
        slice: Slice,
        mut held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        // Fast path: some pages of one table. A table that is left with nothing is detached
        // instead.
        let is_table = slice.is_whole::<F>(Level::PAGE.up());
        let in_table = if is_table { None } else { self.space.pages_of(slice) };
        let Some((frame, range)) = in_table.filter(|(frame, range)| {
            is_cut::<F, P>(&self.space.open(*frame), range, self.space.debt.has_runs())
        }) else {
            return self.unmap_tree(slice, held);
        };
        let live = self.space.is_live();
        self.begin_change();
        // If the visitor unwinds, what it was handed until then is not named: everything is, until
        // the walk has come to its end.
        let named = self.left.ranges.begin_unnamed(live);
        let (serial, plain) = (self.serial(), self.space.cache.plain);
        let (start, rest) = (range.start, range.clone());
        let table = self.space.open(frame);
        let (mut index, stop) =
            take_alike::<F, P>(&table, rest, slice.first, plain, serial, &mut held);
        drop(table);
        let mut taken = start..index;
        let mut progress = Progress::Done;
        if index != range.end {
            let mut pages = Pages::new(self.space.conditions(), serial, plain, held);
            pages.stop = stop;
            let first = slice.first.wrapping_add(((index - start) as u64) << F::PAGE_SHIFT);
            let table = self.space.open(frame);
            let others = pages.take::<F, P>(&table, index..range.end, first, Perms::empty());
            drop(table);
            if !others.is_empty() {
                index = others.end;
                taken = if taken.is_empty() { others } else { start..index };
            }
            progress = pages.progress::<F>();
            if live {
                self.space.cache.plain = pages.plain;
            }
        }
        self.left.ranges.end_unnamed(named);
        if live && !taken.is_empty() {
            let taken = pages_of::<F>(slice.first, start, taken);
            self.left.ranges.add_page(taken, Level::PAGE);
        }
        Ok(progress)
    }

    /// Unmaps where there are several tables, or something has to be split.
    #[cold]
    #[inline(never)]
    fn unmap_tree(
        &mut self,
        slice: Slice,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        self.cleave(slice)?;
        self.begin_change();
        let (conditions, serial) = (self.space.conditions(), self.serial());
        // As above.
        let named = self.left.ranges.begin_unnamed(conditions.live);
        let AddressSpace { platform, root, cache, pinned, .. } = &mut *self.space;
        let mut unmap = Unmap {
            platform: &*platform,
            cache: &mut cache.upper,
            pinned: *pinned,
            denied: Denied::new(Perms::empty()),
            left: &mut self.left,
            pages: Pages::new(conditions, serial, cache.plain, held),
            changed: Footprint::EMPTY,
        };
        // SAFETY: as in `AddressSpace::visit`.
        let _: ControlFlow<()> =
            unsafe { walk::<F, P>(platform, *root, F::root_level(), slice, &mut unmap) };
        let (changed, progress) = (unmap.changed, unmap.pages.progress::<F>());
        self.left.ranges.end_unnamed(named);
        self.note(changed);
        Ok(progress)
    }
}

/// Whether the pages at both ends of a range are in no run, so that no leaf reaches over an end.
#[inline]
pub(super) fn is_cut<F: Format, P: Platform>(
    table: &Table<'_, P>,
    range: &Range<usize>,
    has_runs: bool,
) -> bool {
    let in_run = |index| table.load(index) & F::CONTIGUOUS != 0;
    F::CONTIGUOUS == 0 || !has_runs || !in_run(range.start) && !in_run(range.end - 1)
}

/// The addresses of a range of pages of one table, where `first` is that of page `start`.
#[inline]
pub(super) fn pages_of<F: Format>(first: u64, start: usize, range: Range<usize>) -> Slice {
    let at = |index: usize| first.wrapping_add(((index - start) as u64) << F::PAGE_SHIFT);
    Slice { first: at(range.start), last: at(range.end).wrapping_sub(1) }
}

struct Unmap<'a, P: Platform, V> {
    platform: &'a P,
    cache: &'a mut UpperCache,
    /// The root's entries stay.
    pinned: bool,
    denied: Denied,
    left: &'a mut Flush,
    pages: Pages<V>,
    changed: Footprint,
}

impl<F: Format, P: Platform, V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>> Visit<F, P>
    for Unmap<'_, P, V>
{
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Invalid, _) | (Kind::Table, None) => {}
            _ if self.pages.stop => {
                self.pages.end = Some(slice.first);
                return Step::Stop;
            }
            (Kind::Leaf, _) => {
                let denied = self.denied.at(level);
                let pages = &mut self.pages;
                let first = slice.first;
                let taken = pages.take_leaf::<F, P>(table, index, level, first, entry, denied);
                self.changed.add(taken, Some(level));
            }
            (Kind::Table, Some(below)) => {
                let child = F::address(entry, level);
                self.denied.enter::<F>(entry, below);
                if !slice.is_whole::<F>(level) || self.pinned && level == F::root_level() {
                    return Step::Into(child);
                }
                if !self.left.has_room(self.platform, child) {
                    self.pages.end = Some(slice.first);
                    return Step::Stop;
                }
                table.detach(index, 0, self.cache);
                let denied = self.denied.at(below);
                let fate = Fate::Unmapped;
                self.left.carry(self.platform, child, below, slice.first, denied, fate);
                self.changed.add(slice, None);
            }
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let denied = self.denied.at(Level::PAGE);
        let start = range.start;
        let taken = self.pages.take::<F, P>(table, range, first, denied);
        if !taken.is_empty() {
            let slice = pages_of::<F>(first, start, taken);
            self.changed.add(slice, Some(Level::PAGE));
        }
        match self.pages.end {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }
}

/// Takes pages out of a table that are like `plain`, as most are, from the start of `range` on: up
/// to the first that is not, or behind the one at which the visitor breaks off. Returns where that
/// is, and whether it broke off.
#[inline(never)]
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

/// Takes leaves out of tables that stay: the inner loop of small edits.
struct Pages<V> {
    conditions: Conditions,
    serial: u64,
    held: V,
    /// The pattern of the page that was taken last, if a store takes it.
    plain: u64,
    /// The visitor has broken off: stop before the next entry that is mapped.
    stop: bool,
    /// The address at which it has stopped, if it has.
    end: Option<u64>,
}

impl<V> Pages<V> {
    fn new(conditions: Conditions, serial: u64, plain: u64, held: V) -> Self {
        Self { conditions, serial, held, plain, stop: false, end: None }
    }

    fn progress<F: Format>(&self) -> Progress<F::Input> {
        match self.end {
            None => Progress::Done,
            Some(at) => Progress::Stopped(F::Input::from_bits(at)),
        }
    }

    /// Takes one leaf, or the run that it is a member of: the ends of the range were cleaved, so
    /// that the run is whole.
    #[inline(never)]
    fn take_leaf<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        input: u64,
        entry: u64,
        denied: Perms,
    ) -> Slice
    where
        V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    {
        let conditions = self.conditions;
        let take = &mut |index: usize| {
            let entry = table.load(index);
            if conditions.is_contended::<F>(entry, level) {
                return table.exchange(index, 0);
            }
            table.store(index, 0);
            entry
        };
        let taken = match entry & F::CONTIGUOUS {
            0 => take(index),
            _ => run::gather::<F>(run::members::<F>(index, level), level, take),
        };
        let leaf = Leaf::new(input, taken, level, denied);
        let last = input + (leaf.size() - 1);
        self.stop = (self.held)(Held::new(leaf, self.serial)).is_break();
        Slice { first: input, last }
    }

    /// Takes pages out of one table. Stops before the first that is mapped after the visitor has
    /// broken off. Returns the first to the last that were taken; those between that were not are
    /// holes.
    #[inline(never)]
    fn take<F: Format, P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
        denied: Perms,
    ) -> Range<usize>
    where
        V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    {
        let mask = !F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let (mut from, mut to) = (range.end, range.start);
        let mut index = range.start;
        while index < range.end {
            let entry = table.load(index);
            if entry & mask == self.plain && !self.stop && denied.is_empty() {
                from = from.min(index);
                let (rest, plain, serial) = (index..range.end, self.plain, self.serial);
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
            let input = at(index);
            index = match entry & F::CONTIGUOUS {
                0 => {
                    if !self.conditions.is_contended::<F>(entry, Level::PAGE) {
                        self.plain = entry & mask;
                    }
                    index + 1
                }
                _ => run::members::<F>(index, Level::PAGE).end,
            };
            self.take_leaf::<F, P>(table, index - 1, Level::PAGE, input, entry, denied);
            to = index;
        }
        from.min(to)..to
    }
}

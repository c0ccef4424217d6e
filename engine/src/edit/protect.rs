//! Protect: leaves get other attributes.
//!
//! # One question for each pattern, not for each page
//!
//! Neighbouring leaves nearly always have the same attributes. What to do with a leaf depends on
//! nothing else, so the answer (which bits flip, and how they may be changed) is worked out once
//! and kept until an entry with another pattern turns up. The loop over a table is a load, a
//! comparison and a store for each page. The comparison is also the check that the entry is a leaf
//! at all.
//!
//! An edit that covers a part of a block or of a contiguous run would leave its members different.
//! It is [cleaved](super::split) first; inside the range runs are whole, their members change
//! alike, and stay a run.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::Change;
use super::build::Consecutive;
use super::live::{Footprint, Look};
use super::plan::{How, Plan, Recent};
use super::small::Task;
use crate::SMALL;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Located};
use crate::entry::LINE;
use crate::format::{Format, Kind, saturate, withheld};
use crate::platform::Platform;
use crate::table::Table;
use crate::walk::{Place, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Changes the attributes of what is mapped in `span`; what is not mapped stays so.
    ///
    /// A block or a run that reaches over an end of the range is split first. Accessed and dirty
    /// bits that the hardware sets meanwhile are kept.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`Inexpressible`](EditError::Inexpressible); [`Denied`](EditError::Denied) for a permission
    /// that a table takes away; [`NeedsBreak`](EditError::NeedsBreak);
    /// [`OutOfTables`](EditError::OutOfTables) where something has to be split. Nothing has changed
    /// then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// space.map(Span::new(Va::new(0), 2 << 20)?, Pa::new(0), Attrs::KERNEL_DATA)?;
    /// let mut gather = space.gather();
    /// gather.protect(Span::new(Va::new(0), 4096)?, Change::new().perms(Perms::READ))?;
    /// gather.finish(|_| ());
    /// assert_eq!(space.query(Va::new(0)).unwrap().attrs().perms, Perms::READ);
    /// assert_eq!(space.query(Va::new(4096)).unwrap().attrs(), Attrs::KERNEL_DATA);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn protect(
        &mut self,
        span: Span<F::Input>,
        change: Change,
    ) -> Result<(), EditError<F::Input>> {
        if SMALL {
            return self.edit(span, Consecutive::NONE, Task::Change(change));
        }
        if Slice::of(span).is_whole::<F>(Level::PAGE)
            && self.change_one(span.start().bits(), &change)
        {
            return Ok(());
        }
        let slice = self.space.check(span)?;
        match self.change_pages(slice, &change) {
            true => Ok(()),
            false => self.change_tree(slice, change),
        }
    }

    /// Changes the attributes of one page: as [`protect`](Gather::protect) of a range of that size.
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, EditError, Pa, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # space.map_page(Va::new(0x7000), Pa::new(0x2000), Attrs::USER_DATA)?;
    /// let mut gather = space.gather();
    /// gather.protect_page(Va::new(0x7000), Change::new().write_protect())?;
    /// gather.finish(|_| ());
    /// assert_eq!(space.query(Va::new(0x7000)).unwrap().attrs().perms, Attrs::USER_RODATA.perms);
    /// # Ok::<(), EditError<Va>>(())
    /// ```
    #[inline(always)]
    pub fn protect_page(
        &mut self,
        page: F::Input,
        change: Change,
    ) -> Result<(), EditError<F::Input>> {
        let at = self.space.locate_open(page.bits());
        self.change_at(page.bits(), change, at)
    }

    /// The same where it is as it mostly is. Whether it was: nothing has changed if not.
    #[inline(never)]
    fn change_one(&mut self, page: u64, change: &Change) -> bool {
        let at = self.space.locate_open(page);
        at.is_some_and(|at| self.change_alike(page, change, at))
    }

    /// The same of a page whose entry is in a table of pages, if `at` says so, of a space that is
    /// open there.
    #[inline(always)]
    pub(super) fn change_at(
        &mut self,
        page: u64,
        change: Change,
        at: Option<Located>,
    ) -> Result<(), EditError<F::Input>> {
        match at {
            Some(at) if self.change_alike(page, &change, at) => Ok(()),
            // Where it is, is looked for again: to hand it on costs every page three instructions.
            _ => self.change_any_page(page, change),
        }
    }

    /// Changes a page that is like the one that was changed last, as most are. Whether it is.
    #[inline(always)]
    fn change_alike(&mut self, page: u64, change: &Change, at: Located) -> bool {
        let space = &mut *self.space;
        let Recent { change: last, plan } = &space.recent;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        let pattern = entry & !F::address_mask(Level::PAGE);
        if !last.is_alike(change) {
            return false;
        }
        let now = entry ^ plan.flip;
        if pattern == plan.stored {
            space.owed = true;
            table.store(at.index, now);
        } else if pattern == plan.exchanged {
            space.owed = true;
            if table.compare_exchange(at.index, entry, now).is_err() {
                // A walker has set a flag.
                return false;
            }
        } else {
            return false;
        }
        drop(table);
        let slice = Slice::around::<F>(page, Level::PAGE);
        self.left.ranges.add_page(slice, Level::PAGE);
        true
    }

    /// Changes a page of which nothing is known, or which is no page.
    #[cold]
    #[inline(never)]
    fn change_any_page(&mut self, page: u64, change: Change) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check_page(F::Input::from_bits(page))?;
        match self.space.locate_again(slice) {
            Some(at) if !SMALL && self.change_page(slice, &change, at) => Ok(()),
            _ => self.change_tree(slice, change),
        }
    }

    /// The same of any leaves.
    #[cold]
    #[inline(never)]
    fn change_tree(&mut self, slice: Slice, change: Change) -> Result<(), EditError<F::Input>> {
        if SMALL {
            return self.edit(slice.span(), Consecutive::NONE, Task::Change(change));
        }
        let mut recent = Recent::new(change);
        self.prepare_change(slice, &mut recent)?;
        self.space.cleave(slice)?;
        self.space.globals |= change.turns_global();
        let mut left = Left::new();
        let mut recode = Recode::<F>::new(self.space.conditions(), &mut recent, &mut left);
        let _: ControlFlow<()> = self.space.visit(slice, &mut recode);
        self.changed(slice, &left);
        Ok(())
    }

    /// Makes the change where it is one of pages of one table and nothing is in its way. Whether it
    /// was.
    #[inline(never)]
    fn change_pages(&mut self, slice: Slice, change: &Change) -> bool {
        if !self.space.take_up(change) {
            return false;
        }
        self.space.approach(slice.first);
        let Some(place) = self.place_of_change(slice, change) else {
            return false;
        };
        let (table, mut range) = (&place.table, place.range.clone());
        // Mostly they are like the page that was changed last.
        let plan = self.space.recent.plan;
        let mask = !F::address_mask(Level::PAGE);
        let mut like = range.start;
        if plan.level() != Level::PAGE {
            // It is of larger leaves.
        } else if plan.how == How::Store {
            like = match range.len() <= LINE {
                true => table.recode_few(range.clone(), plan.key(), mask, plan.result()),
                false => table.recode(range.clone(), plan.key(), mask, plan.result()),
            };
        } else if plan.how == How::Exchange {
            like = table.recode_contended(range.clone(), plan.key(), mask, plan.result());
        }
        let pages = (like - range.start) as u64;
        range.start = like;
        let frame = table.frame();
        drop(place);
        let rest = slice.first.wrapping_add(pages << F::PAGE_SHIFT);
        if pages != 0 {
            let Slice { first, .. } = slice;
            let last = rest.wrapping_sub(1);
            self.note_change(&plan, Slice { first, last });
        }
        if !range.is_empty() {
            let Slice { last, .. } = slice;
            self.change_several(Slice { first: rest, last }, frame, range);
        }
        true
    }

    /// What was changed in place by one plan is left to be invalidated, or to be seen.
    #[inline(always)]
    fn note_change(&mut self, plan: &Plan, slice: Slice) {
        if plan.invalidate {
            self.space.owed = true;
            self.left.ranges.add_page(slice, Level::PAGE);
        } else {
            self.space.news |= plan.news;
        }
    }

    /// The same of one page.
    #[inline(always)]
    fn change_page(&mut self, slice: Slice, change: &Change, at: Located) -> bool {
        let Located { frame, index } = at;
        if !self.space.take_up(change) {
            return false;
        }
        let space = &*self.space;
        // SAFETY: a walk has just come to it.
        let table = unsafe { Table::open(&space.platform, frame, Level::PAGE) };
        let entry = table.load(index);
        if entry & F::CONTIGUOUS != 0 || space.denies_change(slice, change) {
            return false;
        }
        let plan = space.recent.plan;
        let now = entry ^ plan.flip;
        let is_done = plan.key == Plan::key_of::<F>(entry, Level::PAGE)
            && if plan.how == How::Store {
                table.store(index, now);
                true
            } else {
                plan.how == How::Exchange && table.compare_exchange(index, entry, now).is_ok()
            };
        drop(table);
        match is_done {
            true => self.note_change(&plan, slice),
            false => self.change_several(slice, frame, index..index + 1),
        }
        true
    }

    /// Where the leaves are that are to be changed, if they are pages of one table and nothing is
    /// in the way of the change.
    #[inline(always)]
    fn place_of_change(&self, slice: Slice, change: &Change) -> Option<Place<'_, P>> {
        let space = &*self.space;
        let place = space.place_near(slice)?;
        let is_free = place.is_whole::<F>(space.runs) && !space.denies_change(slice, change);
        is_free.then_some(place)
    }

    /// The change that was taken up, of these pages of the table in `frame`.
    #[inline(never)]
    fn change_several(&mut self, slice: Slice, frame: Pa, range: Range<usize>) {
        let conditions = self.space.conditions();
        let mut left = Left::new();
        let AddressSpace {
            platform, recent, ..
        } = &mut *self.space;
        // SAFETY: a walk has just come to it.
        let table = unsafe { Table::open(&*platform, frame, Level::PAGE) };
        let mut recode = Recode::<F>::new(conditions, recent, &mut left);
        let _: ControlFlow<()> = recode.pages(&table, range, slice.first);
        drop(table);
        self.changed(slice, &left);
    }

    /// Checks that a change of a range may be made, but for the tables that it takes.
    #[inline(always)]
    pub(super) fn prepare_change(
        &self,
        slice: Slice,
        recent: &mut Recent,
    ) -> Result<(), EditError<F::Input>> {
        let change = recent.change;
        let space = &*self.space;
        space.check_change(slice, &change)?;
        // A look before the edit, only where something might be found.
        let grants = space.tables_deny() && change.new_perms().is_some();
        let refusable = F::RULE.breaks() && space.may_refuse(&change);
        if grants || refusable {
            let perms = change.new_perms().filter(|_| grants);
            let mut left = Left::new();
            let mut recode = Recode::<F>::new(space.conditions(), recent, &mut left);
            let refuse =
                |entry, level| F::RULE.breaks() && refusable && recode.would_break(entry, level);
            Look::<F, _>::new(refuse, perms).at(space, slice)?;
        }
        Ok(())
    }

    /// What was changed in `slice` is made valid where it was broken, and left to be invalidated.
    #[inline(never)]
    pub(super) fn changed(&mut self, slice: Slice, left: &Left) {
        let conditions = self.space.conditions();
        self.space.owed |= conditions.live;
        self.space.resume(slice, &left.broken);
        left.changed.add_to(conditions, &mut self.left);
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Whether the tables above `slice`, which lies below one of pages, take away what a change
    /// gives.
    #[inline(always)]
    fn denies_change(&self, slice: Slice, change: &Change) -> bool {
        let denies = |perms| self.denies(slice.first, perms);
        change.new_perms().is_some_and(denies)
    }

    /// Checks that a change can be encoded, and may be made here.
    #[inline(always)]
    pub(super) fn check_change(
        &self,
        slice: Slice,
        change: &Change,
    ) -> Result<(), EditError<F::Input>> {
        // The parts of a change are independent of each other and of what was there, so that what
        // can be encoded on top of one leaf can be on top of any. A leaf that is larger than the
        // range is split before it is changed.
        let mut level = Level::PAGE;
        while slice.holds::<F>(level) {
            F::encode(&change.apply(F::PLAIN), level)?;
            level = level.up();
        }
        self.check_global(!change.turns_local())?;
        Ok(())
    }

    /// Makes it the recent change, if there is nothing to look for before it is made of a page, but
    /// whether a table denies it. What was taken up before still is.
    #[inline(always)]
    fn take_up(&mut self, change: &Change) -> bool {
        self.recent.change == *change || self.begin(change)
    }

    #[inline(never)]
    fn begin(&mut self, change: &Change) -> bool {
        // Whether it is made here or in the tree.
        self.globals |= change.turns_global();
        if F::encode(&change.apply(F::PLAIN), Level::PAGE).is_err()
            || self.may_refuse(change)
            || self.check_global(!change.turns_local()).is_err()
        {
            return false;
        }
        self.recent = Recent::new(*change);
        true
    }
}

/// What a change leaves to be done.
pub(super) struct Left {
    changed: Footprint,
    /// What was left suspended, to be [resumed](super::live::Resume).
    broken: Footprint,
}

impl Left {
    pub fn new() -> Self {
        Self {
            changed: Footprint::new(),
            broken: Footprint::new(),
        }
    }
}

/// Rewrites leaves: what a change makes of them, pattern by pattern.
pub(super) struct Recode<'a, F: Format> {
    conditions: Conditions,
    recent: &'a mut Recent,
    left: &'a mut Left,
    format: PhantomData<F>,
}

impl<'a, F: Format> Recode<'a, F> {
    pub fn new(conditions: Conditions, recent: &'a mut Recent, left: &'a mut Left) -> Self {
        Self {
            conditions,
            recent,
            left,
            format: PhantomData,
        }
    }

    /// What to do with `entry`.
    #[inline(always)]
    pub fn plan(&mut self, entry: u64, level: Level) -> Plan {
        self.recent.look_up::<F>(&self.conditions, entry, level);
        self.recent.plan
    }

    /// Whether a leaf would have to be broken, also if a walker sets flags between the look and the
    /// edit, which must not come as a surprise.
    fn would_break(&mut self, entry: u64, level: Level) -> bool {
        let contended = self.conditions.is_contended::<F>(entry, level);
        self.plan(entry, level).how == How::Break
            || contended && self.plan(saturate::<F>(entry, level), level).how == How::Break
    }

    /// Notes what the leaves in `slice`, which were rewritten by the plan that was looked up last,
    /// leave to be done.
    #[inline(never)]
    pub fn leave(&mut self, how: How, slice: Slice) {
        let plan = &self.recent.plan;
        if how == How::Break {
            self.left.broken.add(slice, Some(plan.level()));
        } else if plan.invalidate {
            self.left.changed.add(slice, Some(plan.level()));
        } else if plan.news {
            self.left.changed.add_news();
        }
    }

    /// Rewrites one entry, which translates `slice`, by its plan or, if a walker has changed it
    /// meanwhile, by the plan for what it is now. Returns what it is then, or will be when what was
    /// broken is made valid.
    #[inline(never)]
    pub fn rewrite<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> u64 {
        let mut entry = table.load(index);
        loop {
            let Plan { flip, how, .. } = self.plan(entry, level);
            let mut next = entry ^ flip;
            match how {
                How::Keep => {}
                How::Store => table.store(index, next),
                How::Exchange => {
                    if let Err(now) = table.compare_exchange(index, entry, next) {
                        entry = now;
                        continue;
                    }
                }
                How::Break => {
                    // Once the entry is invalid no walker writes it any more, and what the exchange
                    // returns is final.
                    let last = table.exchange(index, F::suspend(entry));
                    next = last ^ self.plan(last, level).flip;
                    table.store(index, withheld::<F>(next));
                }
            }
            self.leave(how, slice);
            return next;
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Recode<'_, F> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => return Step::Into(F::address(entry, level)),
            Kind::Leaf => {
                self.rewrite(table, index, level, slice);
            }
            Kind::Invalid => {}
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let mask = F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        while index < range.end {
            // A stretch of entries of one pattern: the inner loop of every change of attributes.
            let from = index;
            let mut entry = table.load(index);
            if !SMALL && entry == 0 {
                index = table.past_hole(index, range.end);
                continue;
            }
            let plan = self.plan(entry, Level::PAGE);
            let (rest, now) = (index..range.end, plan.result());
            match plan.how {
                How::Keep => {
                    while entry & !mask == plan.key() {
                        index += 1;
                        if index == range.end {
                            break;
                        }
                        entry = table.load(index);
                    }
                }
                How::Store => index = table.recode(rest, plan.key(), !mask, now),
                How::Exchange => index = table.recode_contended(rest, plan.key(), !mask, now),
                How::Break => {
                    let slice = Slice::around::<F>(at(index), Level::PAGE);
                    self.rewrite(table, index, Level::PAGE, slice);
                    index += 1;
                    continue;
                }
            }
            if index != from {
                let (first, last) = (at(from), at(index).wrapping_sub(1));
                self.leave(plan.how, Slice { first, last });
            }
        }
        ControlFlow::Continue(())
    }
}

//! Protect: leaves get other attributes.
//!
//! # One question for each pattern, not for each page
//!
//! Neighbouring leaves nearly always have the same attributes. What to do with a leaf depends on
//! nothing else, so the [plan](super::plan) (which bits flip, and how they may be changed) is
//! worked out once and kept until an entry with another pattern turns up. The loop over a table is
//! a load, a comparison and a store for each page. The comparison is also the check that the entry
//! is a leaf at all.
//!
//! An edit that covers a part of a block or of a contiguous run would leave its members different.
//! It is [cleaved](super::split) first; inside the range runs are whole, their members change
//! alike, and stay a run.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::Change;
use super::drive::{Check, Footprint};
use super::plan::{How, Plan, Recent};
use super::unmap::{is_cut, pages_of};
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError, Located};
use crate::format::{Format, Kind, saturate, withheld};
use crate::platform::Platform;
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

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
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
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
        let slice = self.space.check(span)?;
        self.change_leaves(slice, &change)
    }

    /// Changes the attributes of one page: as [`protect`](Gather::protect) of a range of that size.
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, EditError, Pa, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
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
        match self.space.locate_open(page.bits()) {
            Some(at) if self.change_alike(page.bits(), &change, at) => Ok(()),
            _ => self.change_any_page(page, &change),
        }
    }

    /// Changes a page that is like the one that was changed last, as most are. Returns `false`,
    /// without side effects, if it is not.
    #[inline(always)]
    fn change_alike(&mut self, page: u64, change: &Change, at: Located) -> bool {
        let space = &mut *self.space;
        let Recent { change: last, plan } = &space.cache.recent;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        let pattern = entry & !F::address_mask(Level::PAGE);
        if !last.is_alike(change) {
            return false;
        }
        let now = entry ^ plan.flip;
        if pattern == plan.stored {
            space.debt.begin_change();
            table.store(at.index, now);
        } else if pattern == plan.exchanged {
            space.debt.begin_change();
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
    fn change_any_page(
        &mut self,
        page: F::Input,
        change: &Change,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check_page(page)?;
        self.change_leaves(slice, change)
    }

    /// Changes the leaves in `slice`, which has been checked.
    #[inline(always)]
    fn change_leaves(&mut self, slice: Slice, change: &Change) -> Result<(), EditError<F::Input>> {
        self.complete_parked_runs(slice, change);
        if self.space.take_up(change)
            && let Some((frame, range)) = self.space.pages_of(slice)
            && is_cut::<F, P>(&self.space.open(frame), &range, self.space.debt.has_runs())
        {
            self.change_pages(slice, frame, range);
            return Ok(());
        }
        self.change_tree(slice, change)
    }

    /// Completes what is pending in `slice` before a change that gives permissions: a run that was
    /// parked may be cached whole, and its members come back one after the other.
    #[inline(always)]
    pub(super) fn complete_parked_runs(&mut self, slice: Slice, change: &Change) {
        if F::CONTIGUOUS != 0 && self.space.debt.has_runs() && !change.gives().is_empty() {
            self.complete_overlap(slice.first, slice.last);
        }
    }

    /// Fast path. Changes pages of one table, which are mostly like the last one, by the change
    /// that was taken up.
    #[inline(always)]
    fn change_pages(&mut self, slice: Slice, frame: Pa, mut range: Range<usize>) {
        let plan = self.space.cache.recent.plan;
        if plan.level() == Level::PAGE {
            if plan.invalidate {
                self.space.debt.begin_change();
            }
            let (start, mask) = (range.start, F::address_mask(Level::PAGE));
            range.start = plan.rewrite_alike(&self.space.open(frame), range.clone(), mask);
            let done = pages_of::<F>(slice.first, start, start..range.start);
            if plan.needs_publish {
                self.space.debt.stored();
            } else if plan.invalidate && range.start != start {
                self.left.ranges.add_page(done, Level::PAGE);
            }
            if range.is_empty() {
                return;
            }
            let first = done.last.wrapping_add(1);
            return self.change_others(Slice { first, ..slice }, frame, range);
        }
        self.change_others(slice, frame, range);
    }

    /// Changes pages of one table, whatever they are like.
    #[cold]
    #[inline(never)]
    fn change_others(&mut self, slice: Slice, frame: Pa, range: Range<usize>) {
        self.begin_change();
        let (conditions, mut left) = (self.space.conditions(), Left::EMPTY);
        let AddressSpace { platform, cache, .. } = &mut *self.space;
        // SAFETY: a walk has just come to it.
        let table = unsafe { Table::open(&*platform, frame, Level::PAGE) };
        let mut recode = Recode::<F>::new(conditions, &mut cache.recent, &mut left);
        let _: ControlFlow<()> = recode.pages(&table, range, slice.first);
        drop(table);
        self.changed(slice, left);
    }

    /// Changes leaves where there are several tables, or something is in the way.
    #[cold]
    #[inline(never)]
    fn change_tree(&mut self, slice: Slice, change: &Change) -> Result<(), EditError<F::Input>> {
        self.prepare_change(slice, change)?;
        self.cleave(slice)?;
        self.begin_change();
        let (mut recent, mut left) = (Recent::new(*change), Left::EMPTY);
        let mut recode = Recode::<F>::new(self.space.conditions(), &mut recent, &mut left);
        let _: ControlFlow<()> = self.space.visit(slice, &mut recode);
        self.changed(slice, left);
        Ok(())
    }

    /// Checks that a change of a range may be made, but for the tables that it takes.
    pub(super) fn prepare_change(
        &self,
        slice: Slice,
        change: &Change,
    ) -> Result<(), EditError<F::Input>> {
        let space = &*self.space;
        change.check_encoding::<F>(slice)?;
        space.check_global(!change.turns_local())?;
        let refusable = F::RULE.breaks && space.may_refuse(change);
        let perms = change.new_perms().filter(|_| space.may_deny());
        if refusable || perms.is_some() {
            let (mut recent, mut left) = (Recent::new(*change), Left::EMPTY);
            let mut recode = Recode::<F>::new(space.conditions(), &mut recent, &mut left);
            let refuse = |entry, level| refusable && recode.would_break(entry, level);
            return Check::<F, _>::run(space, slice, perms, refuse);
        }
        Ok(())
    }

    /// TLBs may hold what is about to be changed.
    #[inline(always)]
    pub(super) fn begin_change(&mut self) {
        if self.space.is_live() {
            self.space.debt.begin_change();
        }
    }

    /// Makes valid what was broken in `slice`, and leaves the rest to be invalidated.
    #[inline(always)]
    pub(super) fn changed(&mut self, slice: Slice, left: Left) {
        self.note(left.changed);
        self.finish_break(slice, left.broken);
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Makes it the recent change, if nothing but a table that denies can be in its way. What was
    /// taken up before still is.
    #[inline(always)]
    fn take_up(&mut self, change: &Change) -> bool {
        self.cache.recent.change == *change || self.begin(change)
    }

    #[inline(never)]
    fn begin(&mut self, change: &Change) -> bool {
        // Whether it is made here or in the tree.
        self.debt.add_globals(change.turns_global());
        if F::encode(&change.apply(F::PLAIN), Level::PAGE).is_err()
            || self.may_refuse(change)
            || self.check_global(!change.turns_local()).is_err()
        {
            return false;
        }
        self.cache.recent = Recent::new(*change);
        true
    }
}

/// Work that a change leaves to be done.
pub(super) struct Left {
    pub changed: Footprint,
    /// Entries that were left suspended, to be [made valid](super::drive::Resume).
    pub broken: Footprint,
}

impl Left {
    pub const EMPTY: Self = Self { changed: Footprint::EMPTY, broken: Footprint::EMPTY };
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
        Self { conditions, recent, left, format: PhantomData }
    }

    /// Returns the plan for `entry`.
    #[inline]
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
        } else if plan.needs_publish {
            self.left.changed.add_store();
        }
    }

    /// Breaks pages from the start of `range` on, up to the first that the plan which was looked up
    /// last is not for: each is left suspended, in its new form. Returns where that is. `mask` is
    /// that of their addresses, which suspending leaves alone where there are breaks.
    fn break_alike<P: Platform>(
        &self,
        table: &Table<'_, P>,
        range: Range<usize>,
        mask: u64,
    ) -> usize {
        let (key, now) = (self.recent.plan.key(), withheld::<F>(self.recent.plan.result()));
        // Once an entry is invalid no walker writes it any more: what the exchange found is final.
        match self.conditions.is_contended::<F>(key, Level::PAGE) {
            true => table.recode_contended(range, key, !mask, now),
            false => table.recode(range, key, !mask, now),
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
            let next = entry ^ flip;
            match how {
                How::Keep => {}
                How::Store => table.store(index, next),
                How::Exchange | How::Break => {
                    let stored = if how == How::Break { withheld::<F>(next) } else { next };
                    // Once the entry is invalid no walker writes it any more: what was found is
                    // final.
                    if let Err(now) = table.compare_exchange(index, entry, stored) {
                        entry = now;
                        continue;
                    }
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
            let entry = table.load(index);
            if entry == 0 {
                index = table.past_hole(index, range.end);
                continue;
            }
            let plan = self.plan(entry, Level::PAGE);
            index = match plan.how {
                How::Break => self.break_alike(table, index..range.end, mask),
                _ => plan.rewrite_alike(table, index..range.end, mask),
            };
            if index != from {
                let (first, last) = (at(from), at(index).wrapping_sub(1));
                self.leave(plan.how, Slice { first, last });
            }
        }
        ControlFlow::Continue(())
    }
}

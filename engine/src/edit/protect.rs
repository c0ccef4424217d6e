//! Protect: leaves get other attributes.
//!
//! # One question for each pattern, not for each page
//!
//! Neighbouring leaves nearly always have the same attributes. What to do with a leaf depends on nothing else, so the
//! answer (which bits flip, and how they may be changed) is worked out once and kept until an entry with another
//! pattern turns up. The loop over a table is a load, a comparison and a store for each page. The comparison is also
//! the check that the entry is a leaf at all.
//!
//! An edit that covers a part of a block or of a contiguous run would leave its members different. It is
//! [cleaved](super::split) first; inside the range runs are whole, their members change alike, and stay a run.

use core::convert::Infallible;
use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::live::{Cut, Look};
use super::saturate;
use crate::addr::{Level, Span};
use crate::bbm::{State, Transition};
use crate::entry::Table;
use crate::flush::Ranges;
use crate::format::{Attrs, Format, Kind, Memory, Perms, Shareability};
use crate::gather::Gather;
use crate::platform::Platform;
use crate::space::{Conditions, EditError};
use crate::walk::{Slice, Step, Visit};

/// What to change about leaves; what is not named stays as it is.
///
/// ```
/// use tablewright::{Attrs, Change, Perms};
/// let seal = Change::new().perms(Perms::READ | Perms::EXEC);
/// assert_eq!(seal.apply(Attrs::KERNEL_DATA).dirty, Attrs::KERNEL_DATA.dirty);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    perms: Option<Perms>,
    write_protect: bool,
    memory: Option<Memory>,
    shareability: Option<Shareability>,
    global: Option<bool>,
    accessed: Option<bool>,
    dirty: Option<bool>,
    software: Option<u8>,
    native: Option<u64>,
}

impl Change {
    /// No change.
    pub const fn new() -> Self {
        Self {
            perms: None,
            write_protect: false,
            memory: None,
            shareability: None,
            global: None,
            accessed: None,
            dirty: None,
            software: None,
            native: None,
        }
    }

    /// Sets the permissions.
    pub const fn perms(mut self, perms: Perms) -> Self {
        self.perms = Some(perms);
        self
    }

    /// Takes the permission to write away and leaves the others.
    pub const fn write_protect(mut self) -> Self {
        self.write_protect = true;
        self
    }

    /// Sets the memory type.
    pub const fn memory(mut self, memory: Memory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Sets the shareability.
    pub const fn shareability(mut self, shareability: Shareability) -> Self {
        self.shareability = Some(shareability);
        self
    }

    /// Makes leaves global, or not.
    pub const fn global(mut self, global: bool) -> Self {
        self.global = Some(global);
        self
    }

    /// Sets or clears the accessed flag.
    pub const fn accessed(mut self, accessed: bool) -> Self {
        self.accessed = Some(accessed);
        self
    }

    /// Sets or clears the dirty state.
    pub const fn dirty(mut self, dirty: bool) -> Self {
        self.dirty = Some(dirty);
        self
    }

    /// Sets the software bits.
    pub const fn software(mut self, bits: u8) -> Self {
        self.software = Some(bits);
        self
    }

    /// Sets the bits that are the format's own.
    pub const fn native(mut self, bits: u64) -> Self {
        self.native = Some(bits);
        self
    }

    /// Whether it may change how memory is cached or shared, or where it is.
    pub(super) fn changes_type(&self) -> bool {
        self.memory.is_some() || self.shareability.is_some() || self.native.is_some()
    }

    /// Whether it may make a leaf global that was not.
    pub(crate) fn turns_global(&self) -> bool {
        self.global == Some(true)
    }

    /// Sets the flags that are true, and leaves the others.
    pub(super) fn marks(accessed: bool, dirty: bool) -> Self {
        Self {
            accessed: accessed.then_some(true),
            dirty: dirty.then_some(true),
            ..Self::new()
        }
    }

    /// Whether what can be written cannot be any more.
    pub(crate) fn takes_writing_away(&self) -> bool {
        let gives = |perms: Perms| perms.intersects(Perms::ANY_WRITE);
        self.write_protect || self.perms.is_some_and(|perms| !gives(perms))
    }

    /// The attributes after the change.
    pub fn apply(&self, attrs: Attrs) -> Attrs {
        let mut perms = self.perms.unwrap_or(attrs.perms);
        if self.write_protect {
            perms -= Perms::ANY_WRITE;
        }
        Attrs {
            perms,
            memory: self.memory.unwrap_or(attrs.memory),
            shareability: self.shareability.unwrap_or(attrs.shareability),
            global: self.global.unwrap_or(attrs.global),
            accessed: self.accessed.unwrap_or(attrs.accessed),
            dirty: self.dirty.unwrap_or(attrs.dirty),
            software: self.software.unwrap_or(attrs.software),
            native: self.native.unwrap_or(attrs.native),
        }
    }
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Changes the attributes of what is mapped in `span`; what is not mapped stays so.
    ///
    /// A block or a run that reaches over an end of the range is split first. Accessed and dirty bits that the
    /// hardware sets meanwhile are kept.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`Inexpressible`](EditError::Inexpressible);
    /// [`Denied`](EditError::Denied) for a permission that a table takes away; [`NeedsBreak`](EditError::NeedsBreak);
    /// [`OutOfTables`](EditError::OutOfTables) where something has to be split. Nothing has changed then.
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
    pub fn protect(
        &mut self,
        span: Span<F::Input>,
        change: Change,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check(span)?;
        if self.change_pages(slice, &change) {
            return Ok(());
        }
        let mut plans = self.prepare_change(slice, change)?;
        self.space.cleave(slice)?;
        self.change(slice, &mut plans);
        Ok(())
    }

    /// Makes the change where it is one of pages of one table and nothing is in its way. Whether it was.
    #[inline]
    fn change_pages(&mut self, slice: Slice, change: &Change) -> bool {
        let mut plans = Plans::<F> {
            conditions: self.space.conditions(),
            recent: self.space.recent,
            format: PhantomData,
        };
        let mut recode = Recode::new(&mut plans);
        let done = if let Ok(place) = self.space.place(slice)
            && place.is_whole::<F>(self.space.runs)
            && !(self.space.tables_deny
                && (change.perms).is_some_and(|perms| place.denied::<F>().intersects(perms)))
            && !self.space.may_refuse(change)
            && self
                .space
                .check_global(change.global != Some(false))
                .is_ok()
            && recode.plans.take_up(change)
        {
            let range = place.range.clone();
            let _: ControlFlow<Infallible> = recode.pages(&place.table, range, slice.first);
            true
        } else {
            false
        };
        if done {
            self.changed(slice, &recode);
            self.space.recent = plans.recent;
        }
        done
    }

    /// Checks that a change of a range may be made, but for the tables that it takes.
    #[inline(always)]
    pub(super) fn prepare_change(
        &self,
        slice: Slice,
        change: Change,
    ) -> Result<Plans<F>, EditError<F::Input>> {
        // The parts of a change are independent of each other and of what was there, so that what can be encoded on
        // top of one leaf can be on top of any. A leaf that is larger than the range is split before it is changed.
        let mut level = Level::PAGE;
        while slice.holds::<F>(level) {
            F::encode(&change.apply(Attrs::USER_RODATA), level)?;
            level = level.up();
        }
        let space = &*self.space;
        space.check_global(change.global != Some(false))?;
        let conditions = space.conditions();
        let mut plans = Plans::<F>::new(conditions, change);
        // A look before the edit, only where something might be found.
        let grants = space.tables_deny && change.perms.is_some();
        let refusable = space.may_refuse(&change);
        if grants || refusable {
            let mut breaks = |entry, level| plans.plan(entry, level).how == How::Break;
            // A walker may set flags between the look and the edit, which must not come as a surprise.
            let refuse = |entry, level| {
                refusable
                    && (breaks(entry, level)
                        || conditions.is_contended::<F>(entry, level)
                            && breaks(saturate::<F>(entry, level), level))
            };
            let mut look = Look::<F, _> {
                refuse,
                perms: change.perms.filter(|_| grants),
                format: PhantomData,
            };
            if let ControlFlow::Break(error) = space.visit(slice, &mut look) {
                return Err(error);
            }
        }
        Ok(plans)
    }

    /// Makes a change that was prepared, of leaves that are whole in `slice`.
    #[inline]
    pub(super) fn change(&mut self, slice: Slice, plans: &mut Plans<F>) {
        let mut recode = Recode::new(plans);
        let _: ControlFlow<Infallible> = self.space.visit(slice, &mut recode);
        self.changed(slice, &recode);
    }

    /// What was changed in `slice` is made valid where it was broken, and left to be invalidated.
    #[inline(always)]
    pub(super) fn changed(&mut self, slice: Slice, recode: &Recode<'_, F>) {
        let plans = &*recode.plans;
        self.space.globals |= plans.recent.change.turns_global();
        self.space.owed |= plans.conditions.live;
        self.space.resume(slice, &recode.broken);
        recode.cut.add_to(plans.conditions, &mut self.left);
    }
}

/// How to change an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// It is not a leaf, or nothing changes.
    Keep,
    /// In place, with a store.
    Store,
    /// In place, with an exchange: a walker may be writing it.
    Exchange,
    /// Not in place.
    Break,
}

/// What to do with all leaves of one pattern.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// The level, and the entry without its address: what the plan is for.
    level: Level,
    key: u64,
    /// The bits that flip.
    pub flip: u64,
    how: How,
    /// Walkers have to forget the old leaf.
    invalidate: bool,
    /// Walkers remember nothing of the old leaf, and have to see the new one.
    news: bool,
}

impl Plan {
    /// The entry without its address that it is for.
    #[inline(always)]
    pub fn key(&self) -> u64 {
        self.key
    }

    #[inline(always)]
    pub fn how(&self) -> How {
        self.how
    }

    /// Whether a store does it, or nothing has to be done.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        matches!(self.how, How::Keep | How::Store)
    }
}

/// A change, and what it makes of leaves of the pattern that was met last.
#[derive(Clone, Copy)]
pub(crate) struct Recent {
    change: Change,
    pub plan: Plan,
}

impl Recent {
    pub const NONE: Self = Self::new(Change::new());

    #[inline(always)]
    const fn new(change: Change) -> Self {
        Self {
            change,
            // The plan for holes.
            plan: Plan {
                level: Level::PAGE,
                key: 0,
                flip: 0,
                how: How::Keep,
                invalidate: false,
                news: false,
            },
        }
    }
}

/// What a change makes of leaves, pattern by pattern.
pub(super) struct Plans<F: Format> {
    pub conditions: Conditions,
    pub recent: Recent,
    format: PhantomData<F>,
}

impl<F: Format> Plans<F> {
    pub fn new(conditions: Conditions, change: Change) -> Self {
        Self {
            conditions,
            recent: Recent::new(change),
            format: PhantomData,
        }
    }

    /// Makes it those of a change of pages, if that can be encoded; what was changed in the same way before can.
    #[inline(always)]
    fn take_up(&mut self, change: &Change) -> bool {
        if self.recent.change != *change {
            if F::encode(&change.apply(Attrs::USER_RODATA), Level::PAGE).is_err() {
                return false;
            }
            self.recent = Recent::new(*change);
        }
        true
    }

    /// What to do with `entry`, from memory if it is like the one before.
    #[inline(always)]
    pub fn plan(&mut self, entry: u64, level: Level) -> Plan {
        let key = entry & !F::address_mask(level);
        if self.recent.plan.key != key || self.recent.plan.level != level {
            self.recent.plan = self.work_out(entry, level);
        }
        self.recent.plan
    }

    #[cold]
    #[inline(never)]
    fn work_out(&self, entry: u64, level: Level) -> Plan {
        let mask = F::address_mask(level);
        let mut plan = Plan {
            level,
            key: entry & !mask,
            flip: 0,
            how: How::Keep,
            invalidate: false,
            news: false,
        };
        if F::kind(entry, level) != Kind::Leaf {
            return plan;
        }
        let attrs = self.recent.change.apply(F::decode(entry, level));
        let Ok(bits) = F::encode(&attrs, level) else {
            // `protect` has made sure that the change can be encoded.
            debug_assert!(false, "a change that cannot be encoded");
            return plan;
        };
        let new = bits | entry & (mask | F::CONTIGUOUS);
        plan.flip = entry ^ new;
        if plan.flip == 0 {
            return plan;
        }
        plan.how = if self.conditions.is_contended::<F>(entry, level) {
            How::Exchange
        } else {
            How::Store
        };
        let (old, new) = (State::of::<F>(entry, level), State::of::<F>(new, level));
        match self.conditions.transition::<F>(&old, &new, level) {
            // The software bits are no part of a state.
            Transition::Store => plan.news = old != new,
            Transition::Invalidate => plan.invalidate = true,
            Transition::Break => plan.how = How::Break,
        }
        plan
    }
}

/// Rewrites leaves: other attributes.
pub(super) struct Recode<'a, F: Format> {
    pub plans: &'a mut Plans<F>,
    cut: Cut,
    /// What was left suspended, to be [resumed](super::live::Resume).
    broken: Ranges,
}

impl<'a, F: Format> Recode<'a, F> {
    pub fn new(plans: &'a mut Plans<F>) -> Self {
        Self {
            plans,
            cut: Cut::default(),
            broken: Ranges::new(),
        }
    }

    /// Notes what the leaves in `slice`, rewritten by `plan`, leave to be done.
    #[inline(always)]
    pub fn leave(&mut self, plan: Plan, how: How, slice: Slice) {
        if how == How::Break {
            self.broken.add(slice, Some(plan.level), false);
        } else if plan.invalidate {
            self.cut.add(slice, Some(plan.level));
        } else if plan.news {
            self.cut.add_news();
        }
    }

    /// Rewrites one entry, by its plan or, if a walker has changed it meanwhile, by the plan for what it is now. Returns what
    /// it is then, or will be when what was broken is made valid.
    #[inline(always)]
    pub fn rewrite<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        mut entry: u64,
    ) -> (How, u64) {
        loop {
            let plan = self.plans.plan(entry, level);
            match plan.how {
                How::Keep => {}
                How::Store => table.store(index, entry ^ plan.flip),
                How::Exchange => {
                    if let Err(now) = table.compare_exchange(index, entry, entry ^ plan.flip) {
                        entry = now;
                        continue;
                    }
                }
                How::Break => {
                    // Once the entry is invalid no walker writes it any more, and what the exchange returns is final.
                    let last = table.exchange(index, F::suspend(entry));
                    let plan = self.plans.plan(last, level);
                    table.store(index, F::suspend(last ^ plan.flip));
                    return (How::Break, last ^ plan.flip);
                }
            }
            return (plan.how, entry ^ plan.flip);
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Recode<'_, F> {
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            Kind::Leaf => {
                let (how, _) = self.rewrite(table, index, level, entry);
                self.leave(self.plans.recent.plan, how, slice);
            }
            Kind::Invalid => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Infallible> {
        if range.len() == 1 {
            let entry = table.load(range.start);
            let (how, _) = self.rewrite(table, range.start, Level::PAGE, entry);
            let last = first | ((1 << F::PAGE_SHIFT) - 1);
            self.leave(self.plans.recent.plan, how, Slice { first, last });
            return ControlFlow::Continue(());
        }
        let mask = F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        while index < range.end {
            // A stretch of entries of one pattern: the inner loop of every change of attributes.
            let from = index;
            let mut entry = table.load(index);
            let plan = self.plans.plan(entry, Level::PAGE);
            let mut how = plan.how;
            match how {
                How::Keep => {
                    while entry & !mask == plan.key {
                        index += 1;
                        if index == range.end {
                            break;
                        }
                        entry = table.load(index);
                    }
                }
                How::Store => index = table.flip(index..range.end, plan.key, !mask, plan.flip),
                How::Exchange => {
                    index = table.flip_contended(index..range.end, plan.key, !mask, plan.flip);
                }
                How::Break => {
                    (how, _) = self.rewrite(table, index, Level::PAGE, entry);
                    index += 1;
                }
            }
            if index == from {
                continue;
            }
            let slice = Slice {
                first: at(from),
                last: at(index).wrapping_sub(1),
            };
            self.leave(plan, how, slice);
        }
        ControlFlow::Continue(())
    }
}

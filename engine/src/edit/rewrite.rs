//! Protect and split: leaves are replaced by others that translate the same memory.
//!
//! Everything that changes a valid leaf goes through the two visitors of this file, and so does the question whether
//! it may be changed in place. Where it may not, the edit has two passes with one invalidation between them, however
//! many leaves there are: the first takes each leaf away and leaves its successor in the entry, suspended; then every
//! walker is made to forget; the second makes the successors valid. Between them the addresses are not mapped.
//!
//! # One question for each pattern, not for each page
//!
//! Neighbouring leaves nearly always have the same attributes. What to do with a leaf depends on nothing else, so the
//! answer (which bits flip, and how they may be changed) is worked out once and kept until an entry with another
//! pattern turns up. The loop over a table is a load, a comparison and a store for each page. The comparison is also
//! the check that the entry is a leaf at all.
//!
//! # Runs
//!
//! An edit that covers a part of a contiguous run would leave its members different. [`cleave`](AddressSpace::cleave)
//! comes first: at both ends of the range it [unfolds](super::run) the run, and splits the block, that reaches over the
//! end. Inside the range runs are whole; their members change alike, and stay a run.

use core::convert::Infallible;
use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::build::{Frames, Leaves};
use super::run::{self, Unfold};
use super::saturate;
use super::unmap::Cut;
use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{Contents, Rule, State, Transition, transition};
use crate::entry::Table;
use crate::flush::{Flush, Leaf, Ranges};
use crate::format::{Attrs, Format, Kind, Memory, Perms, Shareability};
use crate::platform::{Barrier, Platform};
use crate::space::{AddressSpace, Conditions, EditError};
use crate::walk::{MAX_LEVELS, Slice, Step, Visit};

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

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Changes the attributes of what is mapped in `span`; what is not mapped stays so.
    ///
    /// A block or a run that reaches over an end of the range is split first. Accessed and dirty bits that the
    /// hardware sets meanwhile are kept.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`ForeignFlush`](EditError::ForeignFlush), [`Inexpressible`](EditError::Inexpressible);
    /// [`Denied`](EditError::Denied) for a permission that a table takes away; [`NeedsBreak`](EditError::NeedsBreak);
    /// [`OutOfTables`](EditError::OutOfTables) where something has to be split. Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # let mut flush = space.flush();
    /// space.map(Span::new(Va::new(0), 2 << 20)?, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
    /// space.protect(Span::new(Va::new(0), 4096)?, Change::new().perms(Perms::READ), &mut flush)?;
    /// assert_eq!(space.query(Va::new(0)).unwrap().attrs().perms, Perms::READ);
    /// assert_eq!(space.query(Va::new(4096)).unwrap().attrs(), Attrs::KERNEL_DATA);
    /// # flush.finish(|_| ());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn protect(
        &mut self,
        span: Span<F::Input>,
        change: Change,
        flush: &mut Flush<F, P>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.check(span)?;
        self.check_flush(flush)?;
        // The parts of a change are independent of each other and of what was there, so that what can be encoded on
        // top of one leaf can be on top of any.
        let mut level = Level::PAGE;
        while F::is_leaf_level(level) {
            F::encode(&change.apply(Attrs::KERNEL_RODATA), level)?;
            level = level.up();
        }
        let conditions = self.conditions();
        let mut recode = Recode::<F>::new(conditions, change);
        // A look before the edit, only where something might be found.
        let grants = self.tables_deny && change.perms.is_some();
        let refusable = self.may_refuse(&change);
        if grants || refusable {
            let mut breaks = |entry, level| recode.plan(entry, level).how == How::Break;
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
            if let ControlFlow::Break(error) = self.visit(slice, &mut look) {
                return Err(error);
            }
        }
        self.cleave(slice)?;
        self.recode(slice, &mut recode);
        recode.cut.add_to(conditions, flush);
        Ok(())
    }

    /// Splits what is mapped in `span` until no leaf is above `largest`, and unfolds runs. The translation of no
    /// address changes.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`ForeignFlush`](EditError::ForeignFlush), [`NeedsBreak`](EditError::NeedsBreak),
    /// [`OutOfTables`](EditError::OutOfTables). Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Level, Pa, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # let mut flush = space.flush();
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
    /// space.split(span, Level::PAGE, &mut flush)?;
    /// assert_eq!(space.query(Va::new(0x1000)).unwrap().size(), 4096);
    /// # flush.finish(|_| ());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn split(
        &mut self,
        span: Span<F::Input>,
        largest: Level,
        flush: &mut Flush<F, P>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.check(span)?;
        self.check_flush(flush)?;
        if !F::is_leaf_level(largest) {
            return Err(EditError::NoSuchLeaf);
        }
        let conditions = self.conditions();
        if self.may_refuse(&Change::new()) {
            let refuse = |entry, level| {
                entry & F::CONTIGUOUS != 0
                    && run::how::<F>(entry, level, &conditions) == Transition::Break
            };
            let mut look = Look::<F, _> {
                refuse,
                perms: None,
                format: PhantomData,
            };
            if let ControlFlow::Break(error) = self.visit(slice, &mut look) {
                return Err(error);
            }
        }
        // The tables for the ends and for the inside are taken together: either all of it happens, or nothing.
        let wish = Wish {
            ends: Some(slice),
            largest: Some((slice, largest)),
        };
        let cut = self.split_where(slice, wish)?;
        cut.add_to(conditions, flush);
        Ok(())
    }

    /// Whether rewriting leaves by `change` may have to be refused because it needs a break.
    fn may_refuse(&self, change: &Change) -> bool {
        let conditions = self.conditions();
        let changes_type = change.memory.is_some() || change.shareability.is_some();
        F::RULE == Rule::Arm
            && conditions.live
            && !conditions.may_break
            && (changes_type || change.global == Some(true) || self.runs && conditions.caps.bbm < 1)
    }

    /// Splits the blocks and unfolds the runs that reach over an end of `slice`.
    pub(super) fn cleave(&mut self, slice: Slice) -> Result<(), EditError<F::Input>> {
        // Two look-ups tell whether there is anything to do; usually there is not.
        if self.run_over(slice.first, slice).is_none() && self.run_over(slice.last, slice).is_none()
        {
            return Ok(());
        }
        let wish = Wish {
            ends: Some(slice),
            largest: None,
        };
        let cut = self.split_where(slice, wish)?;
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
        let leaf = self.query(F::Input::from_bits(input))?;
        let first = leaf.input().bits();
        let last = first + (leaf.size() - 1);
        (first < slice.first || last > slice.last).then_some((Slice { first, last }, leaf))
    }

    /// Splits the leaves that `wish` names, at the ends of `slice` and inside it, and unfolds the runs that they are
    /// part of. Allocates everything before it changes anything.
    fn split_where(&mut self, slice: Slice, wish: Wish) -> Result<Cut, EditError<F::Input>> {
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
                && run::how::<F>(entry, level, &conditions) == Transition::Break
            {
                return Err(refused(extent.first));
            }
        }
        let mut reserve = Reserve {
            platform: &self.platform,
            heads: [0; MAX_LEVELS],
        };
        let mut count = Count::<F, P> {
            wish,
            conditions,
            reserve: &mut reserve,
            format: PhantomData,
        };
        let counted = self.visit(slice, &mut count);
        if let ControlFlow::Break(error) = counted {
            reserve.release();
            return Err(match error {
                Refusal::OutOfTables => EditError::OutOfTables,
                Refusal::NeedsBreak(at) => refused(at),
            });
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
        let _: ControlFlow<Infallible> = self.visit(slice, &mut split);
        let (broken, split_cut) = (split.broken, split.cut);
        reserve.release();
        cut.merge(split_cut);
        self.resume(slice, &broken);
        Ok(cut)
    }

    /// Rewrites the leaves in `slice`, all of which are whole.
    pub(super) fn recode(&self, slice: Slice, recode: &mut Recode<F>) {
        let _: ControlFlow<Infallible> = self.visit(slice, recode);
        self.resume(slice, &recode.broken);
    }

    /// Unfolds the runs in `slice`, all of which are whole.
    fn unfold(&self, slice: Slice) -> Cut {
        let mut unfold = Unfold::new(self.conditions());
        let _: ControlFlow<Infallible> = self.visit(slice, &mut unfold);
        self.resume(slice, &unfold.broken);
        unfold.cut
    }

    /// The second half of a break-before-make: makes every walker forget what was broken in `slice`, and makes what
    /// was left suspended in the entries valid.
    pub(super) fn resume(&self, slice: Slice, broken: &Ranges) {
        if broken.is_empty() {
            return;
        }
        self.invalidate_now(broken);
        let _: ControlFlow<Infallible> = self.visit(slice, &mut Resume);
        self.platform.barrier(Barrier::Publish);
    }
}

/// How to change an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
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
pub(super) struct Plan {
    /// The level, and the entry without its address: what the plan is for.
    level: Level,
    key: u64,
    /// The bits that flip.
    flip: u64,
    how: How,
    /// Walkers have to forget the old leaf.
    invalidate: bool,
}

/// Rewrites leaves: other attributes.
pub(super) struct Recode<F: Format> {
    conditions: Conditions,
    change: Change,
    plan: Plan,
    pub cut: Cut,
    pub broken: Ranges,
    format: PhantomData<F>,
}

impl<F: Format> Recode<F> {
    pub fn new(conditions: Conditions, change: Change) -> Self {
        Self {
            conditions,
            change,
            // The plan for holes.
            plan: Plan {
                level: Level::PAGE,
                key: 0,
                flip: 0,
                how: How::Keep,
                invalidate: false,
            },
            cut: Cut::default(),
            broken: Ranges::new(),
            format: PhantomData,
        }
    }

    /// What to do with `entry`, from memory if it is like the one before.
    #[inline(always)]
    fn plan(&mut self, entry: u64, level: Level) -> Plan {
        let key = entry & !F::address_mask(level);
        if self.plan.key != key || self.plan.level != level {
            self.plan = self.work_out(entry, level);
        }
        self.plan
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
        };
        if F::kind(entry, level) != Kind::Leaf {
            return plan;
        }
        let attrs = self.change.apply(F::decode(entry, level));
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
        if self.conditions.live {
            let (old, new) = (State::of::<F>(entry, level), State::of::<F>(new, level));
            let caps = &self.conditions.caps;
            match transition(F::RULE, &old, &new, level, caps, Contents::Same) {
                Transition::Store => {}
                Transition::Invalidate => plan.invalidate = true,
                Transition::Break => plan.how = How::Break,
            }
        }
        plan
    }

    /// Rewrites one entry, by its plan or, if a walker has changed it meanwhile, by the plan for what it is now.
    #[inline(always)]
    fn rewrite<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        mut entry: u64,
    ) -> How {
        loop {
            let plan = self.plan(entry, level);
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
                    let plan = self.plan(last, level);
                    table.store(index, F::suspend(last ^ plan.flip));
                    return How::Break;
                }
            }
            return plan.how;
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Recode<F> {
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
                if self.rewrite(table, index, level, entry) == How::Break {
                    self.broken.add(slice, Some(level), false);
                } else if self.plan.invalidate {
                    self.cut.add(slice, Some(level));
                }
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
        let mask = F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        while index < range.end {
            // A stretch of entries of one pattern: the inner loop of every change of attributes.
            let from = index;
            let mut entry = table.load(index);
            let plan = self.plan(entry, Level::PAGE);
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
                    while entry & !mask == plan.key {
                        // A walker that was faster left another entry, perhaps of another pattern.
                        if let Err(now) = table.compare_exchange(index, entry, entry ^ plan.flip) {
                            entry = now;
                            continue;
                        }
                        index += 1;
                        if index == range.end {
                            break;
                        }
                        entry = table.load(index);
                    }
                }
                How::Break => {
                    how = self.rewrite(table, index, Level::PAGE, entry);
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
            if how == How::Break {
                self.broken.add(slice, Some(Level::PAGE), false);
            } else if plan.invalidate {
                self.cut.add(slice, Some(Level::PAGE));
            }
        }
        ControlFlow::Continue(())
    }
}

/// Looks whether an edit would have to be refused, and changes nothing.
struct Look<F, R> {
    /// Whether a leaf would have to be broken.
    refuse: R,
    /// The permissions that the edit gives, if tables may take some away.
    perms: Option<Perms>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform, R: FnMut(u64, Level) -> bool> Visit<F, P> for Look<F, R> {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.load(index);
        let at = F::Input::from_bits(slice.first);
        match (F::kind(entry, level), self.perms) {
            (Kind::Table, Some(perms)) if F::denied(entry).intersects(perms) => {
                ControlFlow::Break(EditError::Denied(at))
            }
            (Kind::Table, _) => ControlFlow::Continue(Step::Into(F::address(entry, level))),
            (Kind::Leaf, _) if (self.refuse)(entry, level) => {
                ControlFlow::Break(EditError::NeedsBreak(at))
            }
            _ => ControlFlow::Continue(Step::Next),
        }
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Self::Stop> {
        let mut input = first;
        for index in range {
            if (self.refuse)(table.load(index), Level::PAGE) {
                return ControlFlow::Break(EditError::NeedsBreak(F::Input::from_bits(input)));
            }
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

/// Makes suspended entries valid.
pub(super) struct Resume;

impl<F: Format, P: Platform> Visit<F, P> for Resume {
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        _: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            // The tables that a split left here were filled before; the link publishes them.
            Kind::Invalid if entry != 0 => table.link(index, F::resume(entry)),
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        _: u64,
    ) -> ControlFlow<Infallible> {
        for index in range {
            let entry = table.load(index);
            if F::kind(entry, Level::PAGE) == Kind::Invalid && entry != 0 {
                table.store(index, F::resume(entry));
            }
        }
        ControlFlow::Continue(())
    }
}

/// Which leaves to split.
#[derive(Clone, Copy)]
struct Wish {
    /// Those that reach over an end of this range.
    ends: Option<Slice>,
    /// Those that lie in this range, above this level.
    largest: Option<(Slice, Level)>,
}

impl Wish {
    /// Whether the leaf at `level` that translates `extent` is to be split.
    fn names(&self, level: Level, extent: Slice) -> bool {
        let meets = |slice: Slice| extent.first <= slice.last && slice.first <= extent.last;
        let over_end = self.ends.is_some_and(|slice| {
            meets(slice) && (extent.first < slice.first || slice.last < extent.last)
        });
        let too_large = self
            .largest
            .is_some_and(|(slice, largest)| meets(slice) && level > largest);
        level > Level::PAGE && (over_end || too_large)
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

/// The extent of the leaf at `level` that translates `first`.
fn extent<F: Format>(first: u64, level: Level) -> Slice {
    let low = (1 << F::shift(level)) - 1;
    Slice {
        first: first & !low,
        last: first | low,
    }
}

/// Frames taken from the platform before anything is changed, for each level a chain through the first entry of each
/// frame: nobody else can see these frames yet.
struct Reserve<'a, P: Platform> {
    platform: &'a P,
    /// The first frame of each chain, with bit 0 set; 0 is the end.
    heads: [u64; MAX_LEVELS],
}

impl<P: Platform> Reserve<'_, P> {
    /// Takes one more frame for `level` from the platform. Whether there was one.
    fn add(&mut self, level: Level) -> bool {
        let Some(frame) = self.platform.alloc_table(level) else {
            return false;
        };
        // SAFETY: the frame was just allocated for a table at this level.
        let table = unsafe { Table::open(self.platform, frame, level) };
        let head = &mut self.heads[level.height() as usize];
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
        let head = &mut self.heads[level.height() as usize];
        let frame = (*head & 1 != 0).then_some(Pa::new(*head & !1))?;
        // SAFETY: a frame of the reserve was allocated for a table at this level.
        let table = unsafe { Table::open(self.platform, frame, level) };
        *head = table.load(0);
        Some(frame)
    }
}

enum Refusal {
    OutOfTables,
    NeedsBreak(u64),
}

/// Reserves the tables for a split, and looks whether it may be done.
struct Count<'a, 'p, F: Format, P: Platform> {
    wish: Wish,
    conditions: Conditions,
    reserve: &'a mut Reserve<'p, P>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Visit<F, P> for Count<'_, '_, F, P> {
    type Stop = Refusal;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Refusal, Step> {
        let entry = table.load(index);
        let extent = extent::<F>(slice.first, level);
        match F::kind(entry, level) {
            Kind::Table => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            Kind::Leaf if self.wish.names(level, extent) => {
                let how = split_how::<F>(entry, level, &self.conditions);
                if how == Transition::Break && !self.conditions.may_break {
                    return ControlFlow::Break(Refusal::NeedsBreak(slice.first));
                }
                let reserve = &mut self.reserve;
                let enough = self.wish.tables::<F, ()>(level, extent, &mut |level| {
                    if reserve.add(level) { Ok(()) } else { Err(()) }
                });
                if enough.is_err() {
                    return ControlFlow::Break(Refusal::OutOfTables);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(&mut self, _: &Table<'_, P>, _: Range<usize>, _: u64) -> ControlFlow<Refusal> {
        ControlFlow::Continue(())
    }
}

/// How a leaf may become a table that translates the same.
fn split_how<F: Format>(entry: u64, level: Level, conditions: &Conditions) -> Transition {
    if !conditions.live {
        return Transition::Store;
    }
    let old = State::of::<F>(entry, level);
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
    transition(F::RULE, &old, &new, level, &conditions.caps, Contents::Same)
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
        let leaves = Leaves::<F>::new(extent.first, frame, &attrs, below, false).ok()?;
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
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.load(index);
        let extent = extent::<F>(slice.first, level);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, _) => {
                return ControlFlow::Continue(Step::Into(F::address(entry, level)));
            }
            (Kind::Leaf, Some(below)) if self.wish.names(level, extent) => {
                let how = split_how::<F>(entry, level, &self.conditions);
                let contended = self.conditions.is_contended::<F>(entry, level);
                let frame = F::address(entry, level);
                // Whoever breaks knows the final entry before he builds; whoever does not builds first, and looks
                // afterwards what a walker did meanwhile.
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
                            // A walker set a bit for the block in the last moment: it stands for all of it. What
                            // walkers have set in the pages since then stays set.
                            let mut change = Change::new();
                            change.accessed = last.accessed.then_some(true);
                            change.dirty = last.dirty.then_some(true);
                            let mut late = Recode::<F>::new(self.conditions, change);
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

    fn pages(&mut self, _: &Table<'_, P>, _: Range<usize>, _: u64) -> ControlFlow<Infallible> {
        ControlFlow::Continue(())
    }
}

//! Ranges: what takes away, restricts, splits.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{Contents, State, Transition, transition};
use crate::edit::space::{Conditions, EditError};
use crate::edit::{Change, Frames, How, Recent, fill_parts};
use crate::flush::{Fate, Flush, Held, Leaf, Progress, Ranges};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

use super::gather::{Count, TableCache};
use super::{Gather, Refused, SharedPlatform, SharedSpace};

impl<'s, F: Format, P: SharedPlatform + Clone> Gather<'s, F, P> {
    /// Takes away whatever is mapped in `span`. A leaf that reaches over an end goes whole: what is
    /// outside will be mapped again when it is used. Claims of others are passed over.
    ///
    /// Leaves are handed to `held`, sealed until what was [`Taken`] is complete; sub-trees that lie
    /// in the range whole are detached and visited when they are reclaimed. It stops where `held`
    /// breaks off, or no more can be carried.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use core::ops::ControlFlow;
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>,
    /// #     _>::new(&platform).unwrap()).unwrap();
    /// let span = Span::new(Va::new(0), 4 << 20)?;
    /// space.map_range(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only()).unwrap();
    /// let mut gather = space.gather();
    /// let taken = gather.unmap(span, |_| ControlFlow::Continue(())).unwrap();
    /// assert!(taken.progress.is_done());
    /// let Ok(completed) = gather.issue().complete().try_complete() else {
    ///     panic!("a walk is not over") };
    /// let mut pages = 0;
    /// completed.finish(|_| pages += 1);
    /// assert_eq!(pages, 1024);
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn unmap(
        &mut self,
        span: Span<F::Input>,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Taken<F::Input>, EditError<F::Input>> {
        let space = self.space;
        let slice = space.check(span)?;
        let (serial, mark) = (self.serial(), self.mark());
        let _walk = space.platform().enter();
        // If the visitor unwinds, not all that was taken is named: everything is, until it has come
        // to its end.
        let named = self.flush.ranges.begin_unnamed(true);
        let mut unmap = Unmap {
            platform: space.platform(),
            flush: &mut self.flush,
            count: &mut self.count,
            serial,
            held,
            stop: false,
            mark,
            kept: false,
            end: None,
        };
        let _: ControlFlow<()> = space.visit(slice, &mut unmap);
        let (passed_over, end) = (unmap.kept, unmap.end);
        self.flush.ranges.end_unnamed(named);
        // Others may be in the middle of a break of what is to go: it is passed over where they
        // have claimed it, and may still be remembered.
        if space.has_seen_unfinished(self.count.own()) {
            self.flush.ranges.add(slice, None, true);
        }
        Ok(Taken {
            progress: match end {
                None => Progress::Done,
                Some(at) => Progress::Stopped(F::Input::from_bits(at)),
            },
            passed_over,
        })
    }

    /// Changes the attributes of everything mapped in `span`, as far as that needs no break:
    /// permissions, accessed, dirty. Leaves that reach over an end are changed whole. Claims of
    /// others are passed over.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`], [`EditError::Inexpressible`];
    /// [`EditError::NeedsBreak`] for a change that is more than that.
    pub fn protect(
        &mut self,
        span: Span<F::Input>,
        change: Change,
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(span, change, |_| ())
    }

    /// Clears the accessed flag of each leaf in `span` that has it, and hands the leaf, as it was,
    /// to `young`. Leaves that reach over an end count as well.
    ///
    /// A processor that still remembers a leaf does not set the flag again before the gather is
    /// finished. The usual clock algorithms can live with that, and finish it with later edits.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>,
    /// #     _>::new(&platform).unwrap()).unwrap();
    /// let span = Span::new(Va::new(0), 1 << 20)?;
    /// space.map_range(span, Pa::new(0), Mapping::new(Attrs::USER_DATA)).unwrap();
    /// let (mut young, mut gather) = (0, space.gather());
    /// gather.age(span, |_| young += 1).unwrap();
    /// gather.age(span, |_| young += 1).unwrap();
    /// assert_eq!(young, 256); // they were not used in between
    /// assert!(gather.finish(|_| ()).is_ok());
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn age(
        &mut self,
        span: Span<F::Input>,
        young: impl FnMut(Leaf<F>),
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(span, Change::new().accessed(false), young)
    }

    /// Makes each leaf in `span` clean that is dirty, and hands it, as it was, to `dirty`. Leaves
    /// that reach over an end count as well. What is written from when the gather is complete is
    /// found the next time; what was written before has been found, or will be.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>,
    /// #     _>::new(&platform).unwrap()).unwrap();
    /// let span = Span::new(Va::new(0), 1 << 20)?;
    /// let written = Attrs { dirty: true, ..Attrs::USER_DATA };
    /// space.map_range(span, Pa::new(0), Mapping::new(written)).unwrap();
    /// let (mut dirty, mut gather) = (0, space.gather());
    /// gather.clear_dirty(span, |_| dirty += 1).unwrap();
    /// gather.clear_dirty(span, |_| dirty += 1).unwrap();
    /// assert_eq!(dirty, 256);
    /// assert!(gather.finish(|_| ()).is_ok());
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn clear_dirty(
        &mut self,
        span: Span<F::Input>,
        dirty: impl FnMut(Leaf<F>),
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(span, Change::new().dirty(false), dirty)
    }

    fn change_each(
        &mut self,
        span: Span<F::Input>,
        change: Change,
        changed: impl FnMut(Leaf<F>),
    ) -> Result<Protected, EditError<F::Input>> {
        let space = self.space;
        let slice = space.check(span)?;
        change.check_encoding::<F>(slice)?;
        space.map_global(change.turns_global());
        let _walk = space.platform().enter();
        // As in `unmap`, if the visitor unwinds.
        let named = self.flush.ranges.begin_unnamed(true);
        let mut protect = Protect {
            recent: Recent::new(change),
            conditions: Conditions { caps: space.caps(), live: true, may_break: false },
            flush: &mut self.flush,
            count: &mut self.count,
            changed,
            sum: Protected::default(),
            refused: None,
            format: PhantomData,
        };
        let _: ControlFlow<()> = space.visit(slice, &mut protect);
        let (sum, refused) = (protect.sum, protect.refused);
        self.flush.ranges.end_unnamed(named);
        // What was changed may be remembered by another level.
        if space.has_seen_unfinished(self.count.own()) {
            self.flush.ranges.add(slice, None, true);
        }
        refused.map_or(Ok(sum), Err)
    }

    /// Splits the leaf that translates `input` into leaves one level smaller, in a table that is
    /// filled before any walk comes to it. Nothing is done where it is no larger than `level`. On
    /// arm64 the old leaf is forgotten when this returns; on x86 with the gather.
    ///
    /// # Errors
    /// [`Refused::NeedsTables`], [`Refused::Busy`], [`Refused::Retry`];
    /// [`EditError::InputOutOfRange`].
    pub fn split(&mut self, input: F::Input, level: Level) -> Result<bool, Refused<F::Input>> {
        if !self.space.translates(input) {
            return Err(EditError::InputOutOfRange.into());
        }
        let _walk = self.space.platform().enter();
        // SAFETY: a walk is entered (1.).
        unsafe { self.split_walking(input, level) }
    }

    /// # Safety
    /// 1. A walk has been entered.
    pub(crate) unsafe fn split_walking(
        &mut self,
        input: F::Input,
        level: Level,
    ) -> Result<bool, Refused<F::Input>> {
        let space = self.space;
        // SAFETY: a walk is entered.
        let found = unsafe { space.find(input.bits(), level) };
        let at = found.level;
        let (Some(below), true) = (at.down(), at > level) else {
            return Ok(false);
        };
        let mut entry = found.entry;
        match F::kind(entry, at) {
            Kind::Leaf => {}
            Kind::Invalid if entry != 0 => return Err(Refused::Busy(input)),
            _ => return Ok(false),
        }
        let Some(frame) = self.tables.take(below) else {
            return Err(Refused::NeedsTables(1));
        };
        let slice = Slice::around::<F>(input.bits(), at);
        let link = F::table(frame, Perms::empty());
        let _unfinished = space.begin();
        // Whatever flags hardware sets meanwhile.
        let how = transition(
            F::RULE,
            &State::remembered::<F>(entry, at),
            &State::of::<F>(link, at),
            at,
            &space.caps(),
            Contents::Same,
        );
        let done = loop {
            // SAFETY: a table from the cache, which no walk can reach.
            let table = unsafe { Table::open(space.platform(), frame, below) };
            if let Err(error) = SharedSpace::<F, P>::fill(&table, entry, at, below) {
                drop(table);
                space.empty(frame, below, &mut self.tables);
                return Err(Refused::Edit(error));
            }
            drop(table);
            let mut ranges = Ranges::new();
            // It may be a leaf that has just taken the place of a table, which is not forgotten
            // yet: one table must not take the place of another, nor be taken for a leaf.
            let unfinished = self.is_unfinished(slice, 1);
            let level = (!unfinished).then_some(at);
            ranges.add(slice, level, unfinished);
            let breaks = how == Transition::Break || unfinished && F::RULE.breaks;
            let swapped = if breaks {
                space.claim_and(&found, entry, F::frozen(KEPT), link, |space| {
                    ranges.run::<F, P>(space.platform(), space.target(true));
                })
            } else {
                if !F::RULE.spares_other_levels {
                    self.count.begin();
                }
                let now = F::RULE.spares_other_levels;
                found.replace(entry, link).inspect(|()| match now {
                    // An invalidation of a part, at whatever level, has the old leaf forgotten
                    // there.
                    false => self.flush.ranges.add(slice, level, unfinished),
                    // It names the level of the part, and the old leaf has another.
                    true => {
                        ranges.run::<F, P>(space.platform(), space.target(true));
                    }
                })
            };
            match swapped {
                Ok(()) => break Ok(true),
                Err(now) if SharedSpace::<F, P>::differs_in_flags(entry, now, at) => entry = now,
                Err(_) => break Err(Refused::Retry),
            }
        };
        if done.is_ok() {
            space.platform().barrier(Barrier::Publish);
        } else {
            space.empty(frame, below, &mut self.tables);
        }
        done
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// The first address of the first leaf in `span` that is larger than a page.
    pub(crate) fn first_large(
        &self,
        span: Span<F::Input>,
    ) -> Result<Option<F::Input>, EditError<F::Input>> {
        let slice = self.check(span)?;
        let _walk = self.platform().enter();
        let mut first = FirstLarge(None);
        let _: ControlFlow<()> = self.visit(slice, &mut first);
        Ok(first.0.map(F::Input::from_bits))
    }

    /// Writes the parts of a leaf at `at` into a table at `below`.
    fn fill(
        table: &Table<'_, P>,
        leaf: u64,
        at: Level,
        below: Level,
    ) -> Result<(), EditError<F::Input>> {
        let attrs = F::decode(leaf, at);
        let bits = F::encode(&attrs, below)?;
        fill_parts::<F, P>(table, bits, F::address(leaf, at), below);
        Ok(())
    }

    /// Puts a table back that was filled and not linked.
    fn empty(&self, frame: Pa, level: Level, tables: &mut TableCache) {
        // SAFETY: a table from the cache, which is not linked.
        let table = unsafe { Table::open(self.platform(), frame, level) };
        table.fill(0..1 << F::INDEX_BITS, 0, 0);
        drop(table);
        tables.push(frame);
    }

    /// The leaf that translates `input` now, if any.
    pub fn query(&self, input: F::Input) -> Option<Leaf<F>> {
        if !self.translates(input) {
            return None;
        }
        let _walk = self.platform().enter();
        // SAFETY: a walk is entered.
        let found = unsafe { self.find(input.bits(), Level::PAGE) };
        let first = Slice::around::<F>(input.bits(), found.level).first;
        (F::kind(found.entry, found.level) == Kind::Leaf)
            .then(|| Leaf::new(first, found.entry, found.level, Perms::empty()))
    }
}

/// The claim of an edit that will put back what was there, in another form; see
/// [`Taken::passed_over`].
const KEPT: u64 = 1;

/// Whether an entry is such a claim.
#[inline]
fn is_kept<F: Format>(entry: u64) -> bool {
    F::RULE.tags_invalid_entries && entry == F::frozen(KEPT)
}

/// The result of a [`protect`](Gather::protect).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protected {
    /// Something was changed.
    pub changed: bool,
    /// Something was not changed, as [`Taken::passed_over`].
    pub passed_over: bool,
}

/// The result of an [`unmap`](Gather::unmap).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an edit that stopped has to be continued"]
pub struct Taken<A> {
    /// Whether all of it was taken, and from where to go on if not.
    pub progress: Progress<A>,
    /// Something was not taken: a leaf that another processor is splitting by a break. It will be
    /// there again, in smaller leaves, when the walks under way are over.
    pub passed_over: bool,
}

/// Finds the first leaf that is larger than a page.
struct FirstLarge(Option<u64>);

impl<F: Format, P: Platform> Visit<F, P> for FirstLarge {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.follow(index);
        match F::kind(entry, level) {
            Kind::Table => Step::Into(F::address(entry, level)),
            Kind::Leaf => {
                self.0 = Some(slice.first);
                Step::Stop
            }
            Kind::Invalid => Step::Next,
        }
    }
}

struct Unmap<'a, 's, P, V> {
    platform: &'a P,
    flush: &'a mut Flush,
    count: &'a mut Count<'s>,
    serial: u64,
    held: V,
    stop: bool,
    /// The mark that is left in the place of what was taken.
    mark: u64,
    kept: bool,
    /// The address at which it has stopped, if it has.
    end: Option<u64>,
}

impl<P: Platform, V> Unmap<'_, '_, P, V> {
    /// A leaf was taken out of an entry.
    #[inline]
    fn taken<F: Format>(&mut self, entry: u64, level: Level, at: u64)
    where
        V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    {
        let slice = Slice::around::<F>(at, level);
        self.flush.ranges.add(slice, Some(level), false);
        let leaf = Leaf::new(slice.first, entry, level, Perms::empty());
        self.stop = (self.held)(Held::new(leaf, self.serial)).is_break();
    }
}

impl<F: Format, P: Platform, V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>> Visit<F, P>
    for Unmap<'_, '_, P, V>
{
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let mut entry = table.follow(index);
        loop {
            let kind = F::kind(entry, level);
            let child = F::address(entry, level);
            match (kind, level.down()) {
                (Kind::Invalid, _) | (Kind::Table, None) => {
                    self.kept |= is_kept::<F>(entry);
                    return Step::Next;
                }
                (Kind::Table, _) if !slice.is_whole::<F>(level) => {
                    return Step::Into(child);
                }
                _ if self.stop || !self.flush.has_room(self.platform, child) => {
                    self.end = Some(slice.first);
                    return Step::Stop;
                }
                _ => {}
            }
            self.count.begin();
            match (table.compare_exchange(index, entry, self.mark), level.down()) {
                (Ok(()), Some(below)) if kind == Kind::Table => {
                    let (denied, fate) = (Perms::empty(), Fate::Unmapped);
                    self.flush.carry(self.platform, child, below, slice.first, denied, fate);
                    self.flush.ranges.add(slice, None, true);
                    return Step::Next;
                }
                (Ok(()), _) => {
                    self.taken(entry, level, slice.first);
                    return Step::Next;
                }
                // A flag was set, a leaf has become a table, or another processor has claimed it.
                (Err(now), _) => entry = now,
            }
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let mut at = first;
        for index in range {
            let mut entry = table.load(index);
            while F::kind(entry, Level::PAGE) == Kind::Leaf {
                if self.stop {
                    self.end = Some(at);
                    return ControlFlow::Break(());
                }
                self.count.begin();
                match table.compare_exchange(index, entry, self.mark) {
                    Ok(()) => {
                        self.taken(entry, Level::PAGE, at);
                        break;
                    }
                    Err(now) => entry = now,
                }
            }
            at = at.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

struct Protect<'a, 's, F: Format, V> {
    recent: Recent,
    conditions: Conditions,
    flush: &'a mut Flush,
    count: &'a mut Count<'s>,
    /// Is told of each leaf that was changed.
    changed: V,
    sum: Protected,
    refused: Option<EditError<F::Input>>,
    format: PhantomData<F>,
}

impl<F: Format, V: FnMut(Leaf<F>)> Protect<'_, '_, F, V> {
    fn one<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        at: u64,
        mut entry: u64,
    ) -> ControlFlow<()> {
        loop {
            if F::kind(entry, level) != Kind::Leaf {
                self.sum.passed_over |= is_kept::<F>(entry);
                return ControlFlow::Continue(());
            }
            self.recent.look_up::<F>(&self.conditions, entry, level);
            let plan = &self.recent.plan;
            match plan.how() {
                How::Keep => return ControlFlow::Continue(()),
                How::Break => {
                    self.refused = Some(EditError::NeedsBreak(F::Input::from_bits(at)));
                    return ControlFlow::Break(());
                }
                How::Store | How::Exchange => {}
            }
            if plan.invalidate {
                self.count.begin();
            }
            match table.compare_exchange(index, entry, entry ^ plan.flip) {
                Ok(()) => {
                    self.sum.changed = true;
                    let extent = Slice::around::<F>(at, level);
                    if plan.invalidate {
                        self.flush.ranges.add(extent, Some(level), false);
                    }
                    self.flush.needs_publish |= plan.needs_publish;
                    (self.changed)(Leaf::new(extent.first, entry, level, Perms::empty()));
                    return ControlFlow::Continue(());
                }
                // Hardware has set a flag, or another processor has made an edit: it is changed as
                // it is now.
                Err(now) => entry = now,
            }
        }
    }
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>)> Visit<F, P> for Protect<'_, '_, F, V> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.follow(index);
        if F::kind(entry, level) == Kind::Table {
            return Step::Into(F::address(entry, level));
        }
        if self.one(table, index, level, slice.first, entry).is_break() {
            return Step::Stop;
        }
        // A leaf that became a table meanwhile has had its permissions from before the change.
        let now = table.follow(index);
        match F::kind(now, level) {
            Kind::Table => Step::Into(F::address(now, level)),
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let mut at = first;
        for index in range {
            let entry = table.load(index);
            if entry != 0 {
                self.one(table, index, Level::PAGE, at, entry)?;
            }
            at = at.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

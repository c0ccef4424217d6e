//! Ranges: what takes away, restricts, splits.

use core::convert::Infallible;
use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{Contents, Rule, State, Transition, transition};
use crate::edit::{Change, Frames};
use crate::entry::Table;
use crate::flush::{Completed, Fate, Flush, Held, Issued, Leaf, Progress, Ranges};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Caps, Platform};
use crate::space::EditError;
use crate::walk::{Slice, Step, Visit, walk};

use super::{Moment, Refused, SharedPlatform, SharedSpace, TableCache, Unfinished};

/// What shared edits of one processor leave to invalidate and to free: a [`Flush`], with one more thing to wait for
/// before what was cut off may be freed.
#[must_use = "a flush that is dropped invalidates nothing, and leaks the tables it carries"]
pub struct SharedFlush<F: Format, P: SharedPlatform> {
    flush: Flush<F, P>,
}

impl<F: Format, P: SharedPlatform> SharedFlush<F, P> {
    pub(super) fn new(flush: Flush<F, P>) -> Self {
        Self { flush }
    }

    pub(super) fn has_room(&self, frame: Pa) -> bool {
        self.flush.has_room(frame)
    }

    pub(super) fn carry(&mut self, frame: Pa, level: Level, first: u64, denied: Perms, fate: Fate) {
        self.flush.carry(frame, level, first, denied, fate);
    }

    /// All that the space translates has to be forgotten.
    pub(super) fn forget_everything(&mut self) {
        self.flush.add_everything();
    }

    /// What a table has translated has to be forgotten, and the table.
    pub(super) fn forget(&mut self, slice: Slice) {
        self.flush.add(slice, None, true);
    }

    /// Whether there is nothing to invalidate. It may still carry tables to free.
    pub fn is_clean(&self) -> bool {
        self.flush.is_clean()
    }

    /// Makes the edits visible and tells every processor what to forget. Does not wait.
    pub fn issue(self) -> SharedIssued<F, P> {
        SharedIssued {
            issued: self.flush.issue(),
        }
    }

    /// Issues and completes, and settles if every walk that may hold what was cut off is over; if not, gives it back to be
    /// tried later.
    ///
    /// # Errors
    /// What is not quiet yet.
    // Without an allocator there is nowhere else to put what is given back.
    #[allow(clippy::result_large_err)]
    pub fn finish(self, leaves: impl FnMut(Leaf<F>)) -> Result<(), Cut<F, P>> {
        let completed = self.issue().complete().quiet()?;
        completed.finish(leaves);
        Ok(())
    }
}

/// A shared flush that has been issued.
#[must_use = "what was issued has to be completed; a dropped flush leaks the tables it carries"]
pub struct SharedIssued<F: Format, P: SharedPlatform> {
    issued: Issued<F, P>,
}

impl<F: Format, P: SharedPlatform> SharedIssued<F, P> {
    /// Waits until every processor has forgotten.
    pub fn complete(self) -> Cut<F, P> {
        Cut::new(self.issued.complete())
    }
}

/// What was cut off, and the hardware has forgotten; walks of software may still hold its tables.
#[must_use = "the tables that were cut off are freed when they are quiet"]
pub struct Cut<F: Format, P: SharedPlatform> {
    completed: Completed<F, P>,
    moment: Moment,
}

/// Of edits that are exclusive, too: software may walk the tables without a lock.
impl<F: Format, P: SharedPlatform> From<Completed<F, P>> for Cut<F, P> {
    fn from(completed: Completed<F, P>) -> Self {
        Self::new(completed)
    }
}

impl<F: Format, P: SharedPlatform> Cut<F, P> {
    fn new(completed: Completed<F, P>) -> Self {
        // Without tables there is nothing to wait for, nor to announce.
        let moment = if completed.is_empty() {
            Moment::new(0)
        } else {
            completed.platform().cut()
        };
        Self { completed, moment }
    }

    /// Gives out a leaf that was held back until the hardware had forgotten it. A fault that looked its page up before
    /// may still map it again: see [`shared`](crate::shared).
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush.
    pub fn release<T>(&self, held: Held<T>) -> Result<T, Held<T>> {
        self.completed.release(held)
    }

    /// When the walks that may hold its tables are over.
    pub fn moment(&self) -> Moment {
        self.moment
    }

    /// The tables, to be settled, if all walks that may hold them are over.
    ///
    /// # Errors
    /// Gives it back if some are not. Nothing waits: try again later.
    #[allow(clippy::result_large_err)]
    pub fn quiet(self) -> Result<Completed<F, P>, Self> {
        if self.completed.is_empty() || self.completed.platform().is_past(self.moment) {
            Ok(self.completed)
        } else {
            Err(self)
        }
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    pub(super) fn check(&self, span: Span<F::Input>) -> Result<Slice, EditError<F::Input>> {
        if !span.is_aligned(F::PAGE_SHIFT) {
            return Err(EditError::Misaligned);
        }
        let (first, last) = (span.start().bits(), span.last().bits());
        if !F::is_canonical(first) || !F::is_canonical(last) {
            return Err(EditError::InputOutOfRange);
        }
        Ok(Slice { first, last })
    }

    pub(super) fn visit<V: Visit<F, P>>(
        &self,
        slice: Slice,
        visitor: &mut V,
    ) -> ControlFlow<V::Stop> {
        // SAFETY: the root of a tree of this format; the caller has entered a walk, which keeps its tables.
        unsafe { walk::<F, P, V>(&self.platform, self.root, F::root_level(), slice, visitor) }
    }

    /// Takes away whatever is mapped in `span`. A leaf that reaches over an end goes whole: what is outside will be mapped
    /// again when it is used. Claims of others are passed over.
    ///
    /// Leaves are handed to `held`, sealed until what was [`Taken`] is complete; sub-trees that lie in the range whole are
    /// cut off and visited when they are settled. It stops where `held` breaks off, or no more can be carried.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use core::ops::ControlFlow;
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64, hosted::Threads};
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap());
    /// let span = Span::new(Va::new(0), 4 << 20)?;
    /// space.map_range(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only()).unwrap();
    /// let taken = space.unmap(span, |_| ControlFlow::Continue(())).unwrap();
    /// assert!(taken.progress().is_done());
    /// let Ok(completed) = taken.issue().complete().quiet() else { panic!("nobody else walks") };
    /// let mut pages = 0;
    /// completed.finish(|_| pages += 1);
    /// assert_eq!(pages, 1024);
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn unmap(
        &self,
        span: Span<F::Input>,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Taken<'_, F, P>, EditError<F::Input>> {
        let slice = self.check(span)?;
        let walk = self.platform.enter();
        let unfinished = self.begin();
        let flush = self.flush().flush;
        let mark = match F::RULE {
            Rule::Arm => F::frozen(flush.serial().number | 1 << 31),
            Rule::X86 => 0,
        };
        let mut unmap = Unmap {
            flush,
            held,
            stop: false,
            mark,
            kept: false,
        };
        let last = match self.visit(slice, &mut unmap) {
            ControlFlow::Continue(()) => None,
            ControlFlow::Break(at) => Some(at),
        };
        if self.has_seen_unfinished(1) {
            unmap.flush.add(slice, None, true);
        }
        Ok(Taken {
            space: self,
            flush: unmap.flush,
            slice,
            mark,
            stopped: last,
            kept: unmap.kept,
            unfinished,
            _walk: walk,
        })
    }

    /// Changes the attributes of everything mapped in `span`, as far as that needs no break: permissions, accessed, dirty.
    /// Leaves that reach over an end are changed whole. Claims of others are passed over.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`], [`EditError::Inexpressible`];
    /// [`EditError::NeedsBreak`] for a change that is more than that.
    pub fn protect(
        &self,
        span: Span<F::Input>,
        change: Change,
        flush: &mut SharedFlush<F, P>,
    ) -> Result<Protected, EditError<F::Input>> {
        self.protect_beside(0, span, change, flush)
    }

    /// The same for somebody who has begun edits of his own.
    pub(crate) fn protect_beside(
        &self,
        own: u32,
        span: Span<F::Input>,
        change: Change,
        flush: &mut SharedFlush<F, P>,
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(own, span, change, |_| (), flush)
    }

    /// Clears the accessed flag of each leaf in `span` that has it, and hands the leaf, as it was, to `young`. Leaves that
    /// reach over an end count as well.
    ///
    /// A processor that still remembers a leaf does not set the flag again. Who can live with that, as the usual
    /// clock algorithms can, leaves the flush to the next edit.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64, hosted::Threads};
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap());
    /// let span = Span::new(Va::new(0), 1 << 20)?;
    /// space.map_range(span, Pa::new(0), Mapping::new(Attrs::USER_DATA)).unwrap();
    /// let (mut young, mut flush) = (0, space.flush());
    /// space.age(span, |_| young += 1, &mut flush).unwrap();
    /// space.age(span, |_| young += 1, &mut flush).unwrap();
    /// assert_eq!(young, 256); // the second time nobody has used them
    /// assert!(flush.finish(|_| ()).is_ok());
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn age(
        &self,
        span: Span<F::Input>,
        young: impl FnMut(Leaf<F>),
        flush: &mut SharedFlush<F, P>,
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(0, span, Change::new().accessed(false), young, flush)
    }

    /// Makes each leaf in `span` clean that is dirty, and hands it, as it was, to `dirty`. Leaves that reach over an end count
    /// as well. What is written from when the flush is complete is found the next time; what was written before has been
    /// found, or will be.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64, hosted::Threads};
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// # let space = SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap());
    /// let span = Span::new(Va::new(0), 1 << 20)?;
    /// let written = Attrs { dirty: true, ..Attrs::USER_DATA };
    /// space.map_range(span, Pa::new(0), Mapping::new(written)).unwrap();
    /// let (mut dirty, mut flush) = (0, space.flush());
    /// space.wash(span, |_| dirty += 1, &mut flush).unwrap();
    /// space.wash(span, |_| dirty += 1, &mut flush).unwrap();
    /// assert_eq!(dirty, 256);
    /// assert!(flush.finish(|_| ()).is_ok());
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn wash(
        &self,
        span: Span<F::Input>,
        dirty: impl FnMut(Leaf<F>),
        flush: &mut SharedFlush<F, P>,
    ) -> Result<Protected, EditError<F::Input>> {
        self.change_each(0, span, Change::new().dirty(false), dirty, flush)
    }

    fn change_each(
        &self,
        own: u32,
        span: Span<F::Input>,
        change: Change,
        changed: impl FnMut(Leaf<F>),
        flush: &mut SharedFlush<F, P>,
    ) -> Result<Protected, EditError<F::Input>> {
        let slice = self.check(span)?;
        let _walk = self.platform.enter();
        let mut protect = Protect {
            change,
            caps: self.caps(),
            flush: &mut flush.flush,
            changed,
            sum: Protected::default(),
        };
        let changed = match self.visit(slice, &mut protect) {
            ControlFlow::Continue(()) => Ok(protect.sum),
            ControlFlow::Break(error) => Err(error),
        };
        // What was changed may be remembered by another level.
        if self.has_seen_unfinished(own) {
            flush.flush.add(slice, None, true);
        }
        changed
    }

    /// Splits the leaf that translates `input` into leaves one level smaller, in a table that is filled before anybody sees
    /// it. Nothing is done where it is no larger than `level`. On arm64 the old leaf is forgotten when this returns; on x86
    /// the flush has it forgotten.
    ///
    /// # Errors
    /// [`Refused::NeedsTables`], [`Refused::Busy`], [`Refused::Retry`].
    pub fn split(
        &self,
        input: F::Input,
        level: Level,
        tables: &mut TableCache,
        flush: &mut SharedFlush<F, P>,
    ) -> Result<bool, Refused<F::Input>> {
        let _walk = self.platform.enter();
        // SAFETY: a walk is entered.
        let found = unsafe { self.find(input.bits(), level) };
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
        let Some(frame) = tables.take(below) else {
            return Err(Refused::NeedsTables(1));
        };
        let slice = extent::<F>(input.bits(), at);
        let link = F::table(frame, Perms::empty());
        let _unfinished = self.begin();
        // Whatever flags hardware sets meanwhile.
        let how = transition(
            F::RULE,
            &State::of::<F>(entry, at),
            &State::of::<F>(link, at),
            at,
            &self.caps(),
            Contents::Same,
        );
        let done = loop {
            // SAFETY: a table from the cache, which nobody can reach.
            let table = unsafe { Table::open(&self.platform, frame, below) };
            if let Err(error) = Self::fill(&table, entry, at, below) {
                drop(table);
                self.empty(frame, below, tables);
                return Err(Refused::Edit(error));
            }
            drop(table);
            let mut ranges = Ranges::new();
            // It may be a leaf that has just taken the place of a table, which is not forgotten yet: one table must not take
            // the place of another, nor be taken for a leaf.
            let others = self.has_seen_unfinished(1);
            let level = (!others).then_some(at);
            ranges.add(slice, level, others);
            let breaks = how == Transition::Break || others && F::RULE == Rule::Arm;
            let swapped = if breaks {
                self.claim_and(&found, entry, F::frozen(KEPT), link, |space| {
                    ranges.run::<F, P>(&space.platform, space.id);
                })
            } else {
                found.replace(entry, link).inspect(|()| match F::RULE {
                    // Whoever invalidates a part, at whatever level, has the old leaf forgotten there.
                    Rule::X86 => flush.flush.add(slice, Some(at), false),
                    // He names the level of the part, and the old leaf has another.
                    Rule::Arm => {
                        ranges.run::<F, P>(&self.platform, self.id);
                    }
                })
            };
            match swapped {
                Ok(()) => break Ok(true),
                Err(now) if Self::differs_in_flags(entry, now, at) => entry = now,
                Err(_) => break Err(Refused::Retry),
            }
        };
        if done.is_ok() {
            self.platform.barrier(Barrier::Publish);
        } else {
            self.empty(frame, below, tables);
        }
        done
    }

    /// The first address of the first leaf in `span` that is larger than a page.
    pub(crate) fn first_large(
        &self,
        span: Span<F::Input>,
    ) -> Result<Option<F::Input>, EditError<F::Input>> {
        let slice = self.check(span)?;
        let _walk = self.platform.enter();
        Ok(match self.visit(slice, &mut FirstLarge) {
            ControlFlow::Continue(()) => None,
            ControlFlow::Break(at) => Some(F::Input::from_bits(at)),
        })
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
        let start = F::address(leaf, at).get();
        for index in 0..1usize << F::INDEX_BITS {
            let frame = Pa::new(start + ((index as u64) << F::shift(below)));
            table.store(index, bits | F::put_address(frame));
        }
        Ok(())
    }

    /// Gives a table back to the cache that was filled and not linked.
    fn empty(&self, frame: Pa, level: Level, tables: &mut TableCache) {
        // SAFETY: a table from the cache, which nobody can reach.
        let table = unsafe { Table::open(&self.platform, frame, level) };
        table.fill(0..1 << F::INDEX_BITS, 0, 0);
        drop(table);
        tables.push(frame);
    }

    /// The leaf that translates `input` at this moment, if any.
    pub fn query(&self, input: F::Input) -> Option<Leaf<F>> {
        if !F::is_canonical(input.bits()) {
            return None;
        }
        let _walk = self.platform.enter();
        // SAFETY: a walk is entered.
        let found = unsafe { self.find(input.bits(), Level::PAGE) };
        let first = extent::<F>(input.bits(), found.level).first;
        (F::kind(found.entry, found.level) == Kind::Leaf)
            .then(|| Leaf::new(first, found.entry, found.level, Perms::empty()))
    }
}

/// All that one entry at `level` translates, around `at`.
pub(super) fn extent<F: Format>(at: u64, level: Level) -> Slice {
    let low = (1 << F::shift(level)) - 1;
    Slice {
        first: at & !low,
        last: at | low,
    }
}

/// The claim of somebody who will put back what was there, in another form; see [`Taken::passed_over`].
const KEPT: u32 = 1;

/// Whether an entry is such a claim.
#[inline(always)]
fn is_kept<F: Format>(entry: u64) -> bool {
    F::RULE == Rule::Arm && entry == F::frozen(KEPT)
}

/// What a [`protect`](SharedSpace::protect) has come across.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protected {
    /// Something was changed.
    pub changed: bool,
    /// Something was not changed, as [`Taken::passed_over`].
    pub passed_over: bool,
}

/// What was taken away: walkers may still remember it, and until they do not, it stays frozen where a break is demanded.
#[must_use = "what was taken stays frozen, and leaks, until it is complete"]
pub struct Taken<'s, F: Format, P: SharedPlatform + Clone> {
    space: &'s SharedSpace<F, P>,
    flush: Flush<F, P>,
    slice: Slice,
    mark: u64,
    stopped: Option<u64>,
    kept: bool,
    unfinished: Unfinished<'s>,
    /// Who waits for the walks before him waits for this.
    _walk: P::Walk<'s>,
}

impl<'s, F: Format, P: SharedPlatform + Clone> Taken<'s, F, P> {
    /// Whether something was not taken: a leaf that another processor is splitting by a break. It will be there again, in
    /// smaller leaves, when the walks of this moment are over.
    pub fn passed_over(&self) -> bool {
        self.kept
    }

    /// Whether all of it was taken, and from where to go on if not.
    pub fn progress(&self) -> Progress<F::Input> {
        match self.stopped {
            None => Progress::Done,
            Some(at) => Progress::Stopped(F::Input::from_bits(at)),
        }
    }

    /// Tells every processor what to forget. Does not wait.
    pub fn issue(self) -> TakenIssued<'s, F, P> {
        TakenIssued {
            space: self.space,
            slice: self.slice,
            mark: self.mark,
            stopped: self.stopped,
            issued: self.flush.issue(),
            unfinished: self.unfinished,
            _walk: self._walk,
        }
    }
}

/// What was taken away, and is being forgotten.
#[must_use = "what was taken stays frozen, and leaks, until it is complete"]
pub struct TakenIssued<'s, F: Format, P: SharedPlatform + Clone> {
    space: &'s SharedSpace<F, P>,
    slice: Slice,
    mark: u64,
    stopped: Option<u64>,
    issued: Issued<F, P>,
    unfinished: Unfinished<'s>,
    _walk: P::Walk<'s>,
}

impl<F: Format, P: SharedPlatform + Clone> TakenIssued<'_, F, P> {
    /// Waits until every processor has forgotten; then what was frozen may be filled again.
    pub fn complete(self) -> Cut<F, P> {
        let completed = self.issued.complete();
        drop(self.unfinished);
        let Slice { first, last } = self.slice;
        let end = self.stopped.map_or(Some(last), |at| at.checked_sub(1));
        if let (true, Some(last)) = (self.mark != 0, end.filter(|&end| end >= first)) {
            let mut thaw = Thaw { mark: self.mark };
            let _: ControlFlow<Infallible> = self.space.visit(Slice { first, last }, &mut thaw);
        }
        Cut::new(completed)
    }
}

/// Makes holes of what one edit has frozen, which its mark tells from the claims of others.
struct Thaw {
    mark: u64,
}

impl Thaw {
    #[inline(always)]
    fn one<P: Platform>(&self, table: &Table<'_, P>, index: usize) {
        if table.load(index) == self.mark {
            // Nobody else touches what is frozen.
            table.store(index, 0);
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Thaw {
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        _: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.follow(index);
        if F::kind(entry, level) == Kind::Table {
            return ControlFlow::Continue(Step::Into(F::address(entry, level)));
        }
        self.one(table, index);
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        _: u64,
    ) -> ControlFlow<Infallible> {
        for index in range {
            self.one(table, index);
        }
        ControlFlow::Continue(())
    }
}

/// Finds the first leaf that is larger than a page.
struct FirstLarge;

impl<F: Format, P: Platform> Visit<F, P> for FirstLarge {
    type Stop = u64;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.follow(index);
        match F::kind(entry, level) {
            Kind::Table => ControlFlow::Continue(Step::Into(F::address(entry, level))),
            Kind::Leaf => ControlFlow::Break(slice.first),
            Kind::Invalid => ControlFlow::Continue(Step::Next),
        }
    }

    fn pages(&mut self, _: &Table<'_, P>, _: Range<usize>, _: u64) -> ControlFlow<Self::Stop> {
        ControlFlow::Continue(())
    }
}

struct Unmap<F: Format, P: Platform, V> {
    flush: Flush<F, P>,
    held: V,
    stop: bool,
    /// What is left in the place of what was taken.
    mark: u64,
    kept: bool,
}

impl<F: Format, P: Platform, V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>> Unmap<F, P, V> {
    /// A leaf was taken out of an entry.
    #[inline(always)]
    fn taken(&mut self, entry: u64, level: Level, at: u64) {
        let slice = extent::<F>(at, level);
        self.flush.add(slice, Some(level), false);
        let leaf = Leaf::new(slice.first, entry, level, Perms::empty());
        self.stop = (self.held)(Held::new(leaf, self.flush.serial())).is_break();
    }
}

impl<F: Format, P: Platform, V: FnMut(Held<Leaf<F>>) -> ControlFlow<()>> Visit<F, P>
    for Unmap<F, P, V>
{
    type Stop = u64;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<u64, Step> {
        let mut entry = table.follow(index);
        loop {
            let kind = F::kind(entry, level);
            let child = F::address(entry, level);
            match (kind, level.down()) {
                (Kind::Invalid, _) | (Kind::Table, None) => {
                    self.kept |= is_kept::<F>(entry);
                    pass_over(&mut self.flush, entry, slice);
                    return ControlFlow::Continue(Step::Next);
                }
                (Kind::Table, _) if !slice.is_whole::<F>(level) => {
                    return ControlFlow::Continue(Step::Into(child));
                }
                _ if self.stop || !self.flush.has_room(child) => {
                    return ControlFlow::Break(slice.first);
                }
                _ => {}
            }
            match (
                table.compare_exchange(index, entry, self.mark),
                level.down(),
            ) {
                (Ok(()), Some(below)) if kind == Kind::Table => {
                    let fate = Fate::Unmapped;
                    self.flush
                        .carry(child, below, slice.first, Perms::empty(), fate);
                    self.flush.add(slice, None, true);
                    return ControlFlow::Continue(Step::Next);
                }
                (Ok(()), _) => {
                    self.taken(entry, level, slice.first);
                    return ControlFlow::Continue(Step::Next);
                }
                // A flag was set, a leaf has become a table, or somebody has claimed it.
                (Err(now), _) => entry = now,
            }
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<u64> {
        let mut at = first;
        for index in range {
            let mut entry = table.load(index);
            while F::kind(entry, Level::PAGE) == Kind::Leaf {
                if self.stop {
                    return ControlFlow::Break(at);
                }
                match table.compare_exchange(index, entry, self.mark) {
                    Ok(()) => {
                        self.taken(entry, Level::PAGE, at);
                        break;
                    }
                    Err(now) => entry = now,
                }
            }
            if F::kind(entry, Level::PAGE) == Kind::Invalid {
                let slice = extent::<F>(at, Level::PAGE);
                pass_over(&mut self.flush, entry, slice);
            }
            at = at.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

/// An entry that somebody has claimed is passed over, but what it said before may still be remembered: whoever claimed it
/// may be in the middle of breaking the very thing that is to go. So it is invalidated here as well.
#[inline(always)]
fn pass_over<F: Format, P: Platform>(flush: &mut Flush<F, P>, entry: u64, slice: Slice) {
    if entry != 0 {
        flush.add(slice, None, true);
    }
}

struct Protect<'a, F: Format, P: Platform, V> {
    change: Change,
    caps: Caps,
    flush: &'a mut Flush<F, P>,
    /// Is told of each leaf that was changed.
    changed: V,
    sum: Protected,
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>)> Protect<'_, F, P, V> {
    fn one(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        at: u64,
        mut entry: u64,
    ) -> ControlFlow<EditError<F::Input>> {
        loop {
            if F::kind(entry, level) != Kind::Leaf {
                if F::kind(entry, level) == Kind::Invalid {
                    self.sum.passed_over |= is_kept::<F>(entry);
                    pass_over(self.flush, entry, extent::<F>(at, level));
                }
                return ControlFlow::Continue(());
            }
            let old = F::decode(entry, level);
            let attrs = self.change.apply(old);
            if attrs == old {
                return ControlFlow::Continue(());
            }
            let new = match F::encode(&attrs, level) {
                Ok(bits) => bits | F::put_address(F::address(entry, level)),
                Err(why) => return ControlFlow::Break(why.into()),
            };
            let (was, is) = (State::of::<F>(entry, level), State::of::<F>(new, level));
            let how = transition(F::RULE, &was, &is, level, &self.caps, Contents::Same);
            if how == Transition::Break {
                return ControlFlow::Break(EditError::NeedsBreak(F::Input::from_bits(at)));
            }
            match table.compare_exchange(index, entry, new) {
                Ok(()) => {
                    self.sum.changed = true;
                    let first = extent::<F>(at, level).first;
                    (self.changed)(Leaf::new(first, entry, level, Perms::empty()));
                    if how == Transition::Invalidate {
                        self.flush.add(extent::<F>(at, level), Some(level), false);
                    } else if was != is {
                        self.flush.add_news();
                    }
                    return ControlFlow::Continue(());
                }
                // Hardware has set a flag, or somebody has made an edit: it is changed as it is now.
                Err(now) => entry = now,
            }
        }
    }
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>)> Visit<F, P> for Protect<'_, F, P, V> {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.follow(index);
        if F::kind(entry, level) == Kind::Table {
            return ControlFlow::Continue(Step::Into(F::address(entry, level)));
        }
        self.one(table, index, level, slice.first, entry)?;
        // A leaf that became a table meanwhile has had its permissions from before the change.
        let now = table.follow(index);
        ControlFlow::Continue(if F::kind(now, level) == Kind::Table {
            Step::Into(F::address(now, level))
        } else {
            Step::Next
        })
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Self::Stop> {
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

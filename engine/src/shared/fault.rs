//! One leaf at a time: what a fault asks for.

use crate::addr::{Address, Level, Pa};
use crate::bbm::{Contents, State, Transition, transition};
use crate::edit::EditError;
use crate::flush::{Fate, Leaf, Ranges};
use crate::format::packed::{Packed, TYPE};
use crate::format::{Attrs, Format, Kind, Perms, packed_of};
use crate::invalidation::{Stale, What};
use crate::platform::Barrier;
use crate::table::Table;
use crate::walk::{MAX_LEVELS, Slice, descend};

use super::{Found, Gather, Refused, SharedPlatform, SharedSpace, plain};

/// A leaf to be mapped, checked and encoded.
///
/// ```
/// use tablewright::{Attrs, EditError, Level, Pa, Va, format::X86_64, shared::NewLeaf};
/// let leaf = NewLeaf::<X86_64<4>>::new(
///     Va::new(0x20_1234),
///     Pa::new(0x4000_0000),
///     Level::new(1),
///     Attrs::USER_DATA,
/// )?;
/// assert_eq!(leaf.input(), Va::new(0x20_0000)); // the 2 MiB around the address
/// let askew =
///     NewLeaf::<X86_64<4>>::new(Va::new(0), Pa::new(0x1000), Level::new(1), Attrs::USER_DATA);
/// assert_eq!(askew.err(), Some(EditError::Misaligned));
/// # Ok::<(), tablewright::EditError<Va>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct NewLeaf<F: Format> {
    input: u64,
    frame: Pa,
    level: Level,
    attrs: Attrs,
    bits: u64,
    format: core::marker::PhantomData<F>,
}

impl<F: Format> NewLeaf<F> {
    /// The leaf at `level` around `input`, for the memory from `frame` on.
    ///
    /// # Errors
    /// [`EditError::NoSuchLeaf`], [`EditError::Misaligned`], [`EditError::InputOutOfRange`],
    /// [`EditError::OutputOutOfRange`], [`EditError::Inexpressible`].
    pub fn new(
        input: F::Input,
        frame: Pa,
        level: Level,
        attrs: Attrs,
    ) -> Result<Self, EditError<F::Input>> {
        if !F::is_leaf_level(level) {
            return Err(EditError::NoSuchLeaf);
        }
        if !frame.is_aligned(F::shift(level)) {
            return Err(EditError::Misaligned);
        }
        let size = 1u64 << F::shift(level);
        check_reach::<F>(input, frame.get() + (size - 1))?;
        Ok(Self {
            input: input.bits() & !(size - 1),
            frame,
            level,
            attrs,
            bits: F::with_address(F::encode(&attrs, level)?, frame),
            format: core::marker::PhantomData,
        })
    }

    /// The first address that it translates.
    pub fn input(&self) -> F::Input {
        F::Input::from_bits(self.input)
    }

    fn size(&self) -> u64 {
        1 << F::shift(self.level)
    }

    /// The memory behind an address inside of it.
    fn memory(&self, at: u64) -> u64 {
        self.frame.get() + (at - self.input)
    }

    /// Whether a leaf at `at` maps the same memory in the same way, so that it need not be cleaned
    /// once more. Native bits may say that the memory is another's.
    fn is_cleaned_by(&self, entry: u64, level: Level, at: u64) -> bool {
        let there = packed_of::<F>(entry, level);
        F::address(entry, level).get() == self.memory(at)
            && there.differences(Packed::of(&self.attrs)) & TYPE == 0
    }

    fn slice(&self) -> Slice {
        Slice { first: self.input, last: self.input + (self.size() - 1) }
    }
}

/// Checks that the format reaches what a leaf maps: an address, and the last of the memory.
#[inline]
fn check_reach<F: Format>(input: F::Input, last: u64) -> Result<(), EditError<F::Input>> {
    if !F::is_canonical(input.bits()) {
        return Err(EditError::InputOutOfRange);
    }
    match last >> F::OUTPUT_BITS {
        0 => Ok(()),
        _ => Err(EditError::OutputOutOfRange),
    }
}

/// The outcome of a [`map`](Gather::map).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped<F: Format> {
    /// The leaf is there now.
    Installed,
    /// It was there already, allowing as much, or another processor was first. If it was a
    /// permission fault that led here, this processor remembers the leaf as it was:
    /// [`relax`](SharedSpace::relax) has it forgotten here.
    Already,
    /// It was there with fewer permissions.
    Relaxed,
    /// It has taken the place of a leaf for other memory, which cannot be reached any more.
    Replaced(Leaf<F>),
    /// It has taken the place of a table, which travels with the gather. If that had leaves for
    /// other memory, all its leaves are visited when it is reclaimed.
    Collapsed,
}

/// The outcome of a [`relax`](SharedSpace::relax).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relaxed {
    /// The permissions are there now.
    Done,
    /// They were there already. This processor, which has faulted, forgets what it remembers of the
    /// leaf.
    Already,
    /// Nothing is mapped there.
    Absent,
}

impl<F: Format, P: SharedPlatform + Clone> Gather<'_, F, P> {
    /// Maps a leaf.
    ///
    /// # Errors
    /// [`Refused::Busy`], [`Refused::Retry`]: let the guest go on, or look again.
    /// [`Refused::NeedsTables`]: top up the gather and try again. [`Refused::Larger`]:
    /// [`split`](Gather::split) it first. Nothing has changed, except that tables of the gather may
    /// have been linked, empty. [`EditError::InputOutOfRange`]; [`EditError::NoSuchLeaf`] where the
    /// processor [has none](crate::Caps::largest_leaf) so large.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Level, Pa, Va, format::X86_64};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::{Mapped, NewLeaf, Refused, SharedSpace};
    /// # let platform = Threads::new(64, 12, 1);
    /// let space =
    ///     SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap()).unwrap();
    /// let page =
    ///     NewLeaf::new(Va::new(0x1000), Pa::new(0x8000_0000), Level::PAGE, Attrs::USER_DATA)?;
    /// let mut gather = space.gather();
    /// let needs = match gather.map(&page) {
    ///     Err(Refused::NeedsTables(count)) => count,
    ///     other => panic!("{other:?}"),
    /// };
    /// assert!(gather.top_up(needs));
    /// assert_eq!(gather.map(&page), Ok(Mapped::Installed));
    /// assert_eq!(gather.map(&page), Ok(Mapped::Already));
    /// # Ok::<(), tablewright::EditError<Va>>(())
    /// ```
    #[inline]
    pub fn map(&mut self, leaf: &NewLeaf<F>) -> Result<Mapped<F>, Refused<F::Input>> {
        let space = self.space;
        if !space.translates(leaf.input()) {
            return Err(EditError::InputOutOfRange.into());
        }
        if leaf.level > Level::PAGE && leaf.level > F::largest_leaf(&space.caps()) {
            return Err(EditError::NoSuchLeaf.into());
        }
        space.map_global(leaf.attrs.global);
        let _walk = space.platform().enter();
        // SAFETY: a walk is entered (1.).
        unsafe { self.map_walking(leaf) }
    }

    /// # Safety
    /// 1. A walk has been entered.
    #[inline]
    pub(crate) unsafe fn map_walking(
        &mut self,
        leaf: &NewLeaf<F>,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let space = self.space;
        // Each turn goes down at least one level, or another processor has changed the tree
        // meanwhile.
        for _ in 0..2 * MAX_LEVELS {
            // SAFETY: a walk is entered.
            let found = unsafe { space.find(leaf.input, leaf.level) };
            let kind = F::kind(found.entry, found.level);
            if found.level == leaf.level {
                return match kind {
                    Kind::Invalid if found.entry == 0 => space.install(leaf, &found),
                    Kind::Invalid => Err(Refused::Busy(leaf.input())),
                    Kind::Leaf => self.change(leaf, &found),
                    Kind::Table => self.collapse(leaf, &found, false),
                };
            }
            match kind {
                Kind::Invalid if found.entry == 0 => self.link_tables(leaf, &found)?,
                Kind::Invalid => return Err(Refused::Busy(leaf.input())),
                Kind::Leaf => return space.within(leaf, &found),
                Kind::Table => {}
            }
        }
        Err(Refused::Retry)
    }

    /// Links a chain of empty tables from `found` down to the level of the leaf.
    #[inline(never)]
    fn link_tables(
        &mut self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
    ) -> Result<(), Refused<F::Input>> {
        let (space, tables) = (self.space, &mut self.tables);
        let missing = found.level.height() - leaf.level.height();
        if tables.len < usize::from(missing) {
            return Err(Refused::NeedsTables(missing));
        }
        // From the last up: each but the last holds one entry.
        let mut chain = [Pa::new(0); MAX_LEVELS];
        let mut below: Option<Pa> = None;
        let mut level = leaf.level;
        for place in chain.iter_mut().take(usize::from(missing)) {
            let Some(frame) = tables.pop() else {
                return Err(Refused::Retry);
            };
            if let Some(below) = below {
                space.set(frame, level, leaf.input, F::table(below, Perms::empty()));
            }
            *place = frame;
            below = Some(frame);
            level = level.up();
        }
        let Some(top) = below else { return Ok(()) };
        if found.replace(0, F::table(top, Perms::empty())).is_err() {
            // Another processor was first. The tables go back as they came.
            let mut level = leaf.level;
            for (number, &frame) in chain.iter().take(usize::from(missing)).enumerate() {
                if number > 0 {
                    space.set(frame, level, leaf.input, 0);
                }
                tables.push(frame);
                level = level.up();
            }
        }
        Ok(())
    }

    /// A leaf is there.
    #[inline(never)]
    fn change(
        &mut self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let (space, level) = (self.space, leaf.level);
        let mut entry = found.entry;
        if space.grants(entry, leaf) {
            return Ok(Mapped::Already);
        }
        // Flags that hardware sets meanwhile are taken over; anything else is an edit of another
        // processor.
        loop {
            let old = F::decode(entry, level);
            let same = F::address(entry, level) == leaf.frame
                && Attrs { perms: leaf.attrs.perms, ..plain(old) } == plain(leaf.attrs);
            if !same {
                return self.replace(leaf, found, entry);
            }
            // The same memory with more permissions: what was allowed stays allowed.
            let perms = old.perms | leaf.attrs.perms;
            let relaxed = Attrs {
                perms,
                accessed: old.accessed || leaf.attrs.accessed,
                dirty: old.dirty || leaf.attrs.dirty,
                software: leaf.attrs.software,
                ..old
            };
            let bits = F::encode(&relaxed, level).map_err(EditError::from)?;
            let new = F::with_address(bits, leaf.frame);
            let (_, instructions) = space.maintenance(&relaxed, old.perms);
            space.maintain(leaf.frame, leaf.size(), false, instructions);
            match found.replace(entry, new) {
                Ok(()) => {
                    space.relaxed(leaf.slice(), level);
                    return Ok(Mapped::Relaxed);
                }
                Err(now) if SharedSpace::<F, P>::differs_in_flags(entry, now, level) => entry = now,
                Err(_) => return Err(Refused::Retry),
            }
        }
    }

    /// Other memory, or other attributes, in the place of a leaf.
    fn replace(
        &mut self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
        mut entry: u64,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let (space, level) = (self.space, leaf.level);
        let caps = space.caps();
        // One that is parked may be given back at once, by an edit that does not wait for what was
        // there to be forgotten.
        let new = State::remembered::<F>(leaf.bits, level);
        let (clean, instructions) = space.maintenance(&leaf.attrs, Perms::empty());
        let _unfinished = space.begin();
        // It may have just taken the place of a table, whose leaves have another level.
        let others = self.is_unfinished(leaf.slice(), 1);
        let mut ranges = Ranges::new();
        ranges.add(leaf.slice(), (!others).then_some(level), others);
        loop {
            let old = State::remembered::<F>(entry, level);
            let how = transition(F::RULE, &old, &new, level, &caps, Contents::Different);
            let done = if how == Transition::Break || clean || instructions {
                space.claim_and(found, entry, F::FROZEN, leaf.bits, |space| {
                    ranges.run::<F, P>(space.platform(), space.target(true));
                    space.maintain(leaf.frame, leaf.size(), clean, instructions);
                })
            } else {
                found.replace(entry, leaf.bits).inspect(|()| {
                    if how == Transition::Invalidate {
                        ranges.run::<F, P>(space.platform(), space.target(true));
                    }
                })
            };
            match done {
                Ok(()) => {
                    space.platform().barrier(Barrier::Publish);
                    let gone = Leaf::new(leaf.input, entry, level, Perms::empty());
                    return Ok(Mapped::Replaced(gone));
                }
                Err(now) if SharedSpace::<F, P>::differs_in_flags(entry, now, level) => entry = now,
                Err(_) => return Err(Refused::Retry),
            }
        }
    }

    /// A leaf in the place of a table: in place where the architecture allows it and the table
    /// translates alike; otherwise broken, cleaned where the table had nothing, made. What was
    /// below is reclaimed with the gather.
    ///
    /// The entry is invalid for one exchange, one invalidation and one store. What takes as long as
    /// the table is large is done before and after. The flags of what was below may be set until it
    /// has been forgotten, so that they are not summed up but taken for set: the leaf was accessed,
    /// and what could be written was.
    ///
    /// What is put in place is forgotten with the gather where the caller `collapses`, which begins
    /// with counting: on arm64 an invalidation names the level of what it takes away, and what is
    /// remembered of the table's leaves has another; every edit that may have seen one of the new
    /// leaves has all levels forgotten there. A fault does not leave others with that, and
    /// invalidates before it returns. On x86, where an invalidation of an address is about all
    /// levels, it need not.
    #[inline(never)]
    pub(super) fn collapse(
        &mut self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
        collapses: bool,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let space = self.space;
        let Some(below) = leaf.level.down() else {
            return Err(Refused::Retry);
        };
        let child = F::address(found.entry, leaf.level);
        if !self.flush.has_room(space.platform(), child) {
            return Err(Refused::Retry);
        }
        let maintenance = space.maintenance(&leaf.attrs, Perms::empty());
        let look = |missing: &dyn Fn(Pa, u64, bool, bool)| {
            let mut survey = Survey::default();
            space.survey(leaf, child, below, leaf.input, maintenance, &mut survey, missing);
            survey
        };
        let before = look(&|_, _, _, _| ());
        let attrs = Attrs { accessed: true, dirty: leaf.attrs.dirty || before.dirty, ..leaf.attrs };
        let bits = F::encode(&attrs, leaf.level)
            .map_or(leaf.bits, |bits| F::with_address(bits, leaf.frame));
        let caps = space.caps();
        let how = transition(
            F::RULE,
            &State::of::<F>(found.entry, leaf.level),
            &State::remembered::<F>(bits, leaf.level),
            leaf.level,
            &caps,
            Contents::Same,
        );
        let in_place =
            !before.lacking && how != Transition::Break && !before.strangers && !before.holes;
        let _unfinished = space.begin();
        let forget_now = |space: &SharedSpace<F, P>| {
            let mut ranges = Ranges::new();
            ranges.add(leaf.slice(), None, true);
            ranges.run::<F, P>(space.platform(), space.target(true));
        };
        let done = if in_place {
            let now = F::RULE.spares_other_levels && !collapses;
            if !now {
                self.count.begin();
            }
            found.replace(found.entry, bits).inspect(|()| match now {
                true => forget_now(space),
                false => self.flush.ranges.add(leaf.slice(), None, true),
            })
        } else {
            space.claim_and(found, found.entry, F::FROZEN, bits, |space| {
                forget_now(space);
                if before.lacking {
                    // No walk comes to the table any more. Processors that were on their way may
                    // still install a page in it: one that is cleaned here as well, for nothing.
                    look(&|frame, size, clean, instructions| {
                        space.maintain(frame, size, clean, instructions);
                    });
                }
            })
        };
        done.map_err(|_| Refused::Retry)?;
        // Leaves for other memory are gone for good, and have flags that are waited for. Another
        // processor may have installed one until now, and in place hardware may make it dirty until
        // the invalidation is complete.
        let strangers = look(&|_, _, _, _| ()).strangers || in_place && caps.hardware_dirty;
        let fate = match strangers {
            true => Fate::Unmapped,
            false => Fate::Replaced,
        };
        let denied = Perms::empty();
        self.flush.carry(space.platform(), child, below, leaf.input, denied, fate);
        space.platform().barrier(Barrier::Publish);
        Ok(Mapped::Collapsed)
    }

    /// Puts a leaf in the place of a table, if one is there.
    ///
    /// # Safety
    /// 1. A walk has been entered.
    pub(crate) unsafe fn collapse_walking(
        &mut self,
        leaf: &NewLeaf<F>,
    ) -> Result<bool, Refused<F::Input>> {
        // SAFETY: a walk is entered.
        let found = unsafe { self.space.find(leaf.input, leaf.level) };
        if found.level != leaf.level || F::kind(found.entry, found.level) != Kind::Table {
            return Ok(false);
        }
        self.collapse(leaf, &found, true).map(|_| true)
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// The largest leaf, up to `leaf`, that takes no more than `most` bytes to be cleaned, or that
    /// of a page, for a fault at `at`; `leaf_at` makes it at another level. The caller has entered
    /// a walk.
    pub(crate) fn affordable(
        &self,
        at: u64,
        mut leaf: NewLeaf<F>,
        most: u64,
        leaf_at: impl Fn(Level) -> Result<NewLeaf<F>, Refused<F::Input>>,
    ) -> Result<NewLeaf<F>, Refused<F::Input>> {
        loop {
            let cleans = leaf.size() > most && self.maintenance(&leaf.attrs, Perms::empty()).0;
            if !cleans || self.lacks_little(&leaf, at, most) {
                return Ok(leaf);
            }
            let mut level = leaf.level;
            loop {
                level = level.down().unwrap_or(Level::PAGE);
                if F::is_leaf_level(level) {
                    break;
                }
            }
            leaf = leaf_at(level)?;
        }
    }

    /// Whether all but `most` bytes of the leaf's memory are mapped where it belongs.
    fn lacks_little(&self, leaf: &NewLeaf<F>, at: u64, most: u64) -> bool {
        // SAFETY: a walk is entered, by the caller.
        let found = unsafe { self.find(leaf.input, leaf.level) };
        match (F::kind(found.entry, found.level), leaf.level.down()) {
            (Kind::Leaf, _) => true,
            (Kind::Table, Some(below)) => {
                let mut left = most;
                let child = F::address(found.entry, found.level);
                self.has(leaf, at, child, below, leaf.input, &mut left)
            }
            _ => false,
        }
    }

    /// Whether a table holds the memory of `leaf`, but for what is taken off `left`. The look
    /// begins at `at`, where the fault is, and goes round: memory is touched upwards more often
    /// than not, so what lacks is found in a few entries and not behind all that is there.
    fn has(
        &self,
        leaf: &NewLeaf<F>,
        at: u64,
        frame: Pa,
        level: Level,
        first: u64,
        left: &mut u64,
    ) -> bool {
        // SAFETY: a table of the tree, in a walk.
        let table = unsafe { Table::open(self.platform(), frame, level) };
        let size = 1u64 << F::shift(level);
        let entries = 1usize << F::INDEX_BITS;
        let start = F::index(at, level);
        (start..start + entries).all(|index| {
            let index = index % entries;
            let first = first + index as u64 * size;
            let entry = table.follow(index);
            match (F::kind(entry, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    self.has(leaf, at, F::address(entry, level), below, first, left)
                }
                (Kind::Leaf, _) if leaf.is_cleaned_by(entry, level, first) => true,
                _ => left.checked_sub(size).map(|now| *left = now).is_some(),
            }
        })
    }

    /// Writes the entry for `input` in a table at `level` that is not linked.
    fn set(&self, frame: Pa, level: Level, input: u64, bits: u64) {
        // SAFETY: a table from the cache.
        let table = unsafe { Table::open(self.platform(), frame, level) };
        table.store(F::index(input, level), bits);
    }

    /// Whether a leaf needs something done to caches before it may be seen: data, instructions.
    pub(super) fn maintenance(&self, attrs: &Attrs, before: Perms) -> (bool, bool) {
        let maintenance = self.platform().maintenance();
        // Devices have no business in a cache, and cleaning what is mapped as one may upset it.
        let normal = !attrs.memory.is_device();
        let executable = |perms: Perms| perms.intersects(Perms::ANY_EXEC);
        (
            maintenance.clean && normal,
            maintenance.instructions && normal && executable(attrs.perms) && !executable(before),
        )
    }

    pub(super) fn maintain(&self, frame: Pa, size: u64, clean: bool, instructions: bool) {
        if clean {
            self.platform().clean(frame, size);
        }
        if instructions {
            self.platform().invalidate_instructions(frame, size);
        }
    }

    /// Fills a hole.
    #[inline]
    fn install(
        &self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let (clean, instructions) = self.maintenance(&leaf.attrs, Perms::empty());
        let installed = if clean || instructions {
            self.claim_and(found, found.entry, F::FROZEN, leaf.bits, |space| {
                space.maintain(leaf.frame, leaf.size(), clean, instructions);
            })
        } else {
            found.replace(found.entry, leaf.bits)
        };
        match installed {
            Ok(()) => {
                self.platform().barrier(Barrier::Publish);
                Ok(Mapped::Installed)
            }
            // Most often another processor has mapped the same page.
            Err(now) if self.grants(now, leaf) => Ok(Mapped::Already),
            Err(_) => Err(Refused::Retry),
        }
    }

    /// The descriptor of a leaf with its address taken out again, if nothing has to be done to
    /// caches before it may be seen.
    pub(crate) fn template(&self, leaf: &NewLeaf<F>) -> Option<u64> {
        let ready = self.maintenance(&leaf.attrs, Perms::empty()) == (false, false);
        ready.then_some(F::with_address(leaf.bits, leaf.frame))
    }

    /// Maps the page around `frame` by a descriptor that has no address yet, if there is a hole for
    /// it, in a table. Whether it has; nothing has happened otherwise.
    ///
    /// # Safety
    /// 1. A walk has been entered.
    #[inline]
    pub(crate) unsafe fn fill_hole(
        &self,
        input: F::Input,
        frame: Pa,
        bits: u64,
    ) -> Result<bool, EditError<F::Input>> {
        let low = (1 << F::PAGE_SHIFT) - 1;
        check_reach::<F>(input, frame.get() | low)?;
        let slice = Slice::around::<F>(input.bits(), Level::PAGE);
        // SAFETY: the root of the space, in a walk.
        let Some(place) =
            (unsafe { descend::<F, P, true, false>(self.platform(), self.root(), slice) })
        else {
            return Ok(false);
        };
        let bits = F::with_address(bits, Pa::new(frame.get() & !low));
        let filled = place.table.compare_exchange(place.range.start, 0, bits);
        if filled.is_ok() {
            self.platform().barrier(Barrier::Publish);
        }
        Ok(filled.is_ok())
    }

    /// Whether the entry is this leaf already, allowing at least as much.
    fn grants(&self, entry: u64, leaf: &NewLeaf<F>) -> bool {
        if F::kind(entry, leaf.level) != Kind::Leaf || F::address(entry, leaf.level) != leaf.frame {
            return false;
        }
        let attrs = F::decode(entry, leaf.level);
        let same = Attrs { perms: leaf.attrs.perms, ..plain(attrs) } == plain(leaf.attrs);
        same && attrs.perms.contains(leaf.attrs.perms)
            && (attrs.accessed || self.caps().hardware_access || !leaf.attrs.accessed)
    }

    /// Claims an entry by putting `claim` there, does something, and puts `new` there.
    ///
    /// # Errors
    /// What was found there instead of what was expected.
    pub(super) fn claim_and(
        &self,
        found: &Found<'_, P>,
        expected: u64,
        claim: u64,
        new: u64,
        work: impl FnOnce(&Self),
    ) -> Result<(), u64> {
        found.replace(expected, claim)?;
        work(self);
        found.lift(new);
        Ok(())
    }

    /// More is allowed than before: another processor may fault once for nothing, this one shall
    /// not.
    fn relaxed(&self, slice: Slice, level: Level) {
        self.platform().barrier(Barrier::Publish);
        // What this processor remembers may be of the table that a larger leaf has just taken the
        // place of.
        let others = level != Level::PAGE && self.has_seen_unfinished(0);
        let stale = Stale {
            first: slice.first,
            last: slice.last,
            level: (!others).then_some(level),
            tables: others,
        };
        let ranges = [stale];
        let what = What::Ranges(&ranges);
        let forgetting = self.target(true).forgetting(self.platform(), what);
        self.platform().invalidate_here(&forgetting);
    }

    /// Whether two leaves differ in nothing but what hardware sets.
    pub(super) fn differs_in_flags(a: u64, b: u64, level: Level) -> bool {
        let flags = |entry: u64| {
            let attrs = F::decode(entry, level);
            Attrs { accessed: false, dirty: false, ..attrs }
        };
        F::kind(b, level) == Kind::Leaf
            && F::address(a, level) == F::address(b, level)
            && flags(a) == flags(b)
    }

    /// A larger leaf is there.
    #[inline(never)]
    fn within(
        &self,
        leaf: &NewLeaf<F>,
        found: &Found<'_, P>,
    ) -> Result<Mapped<F>, Refused<F::Input>> {
        let inside = leaf.input & ((1 << F::shift(found.level)) - 1);
        let attrs = F::decode(found.entry, found.level);
        let frame = F::address(found.entry, found.level).get() + inside;
        let same = Attrs { perms: leaf.attrs.perms, ..plain(attrs) } == plain(leaf.attrs);
        if frame == leaf.frame.get() && same && attrs.perms.contains(leaf.attrs.perms) {
            Ok(Mapped::Already)
        } else {
            Err(Refused::Larger(found.level))
        }
    }

    /// Looks at what a table holds beside the memory of `leaf`, and at what it lacks of it:
    /// `missing` is called with what needs maintenance, to be cleaned, and invalidated for
    /// instructions.
    #[allow(clippy::too_many_arguments)]
    fn survey(
        &self,
        leaf: &NewLeaf<F>,
        frame: Pa,
        level: Level,
        first: u64,
        maintenance: (bool, bool),
        survey: &mut Survey,
        missing: &dyn Fn(Pa, u64, bool, bool),
    ) {
        // SAFETY: a table of the tree, which is not freed before this walk is over.
        let table = unsafe { Table::open(self.platform(), frame, level) };
        let size = 1u64 << F::shift(level);
        for index in 0..1usize << F::INDEX_BITS {
            let first = first + index as u64 * size;
            let entry = table.follow(index);
            let (mut clean, mut instructions) = maintenance;
            match (F::kind(entry, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    let child = F::address(entry, level);
                    // Walkers fault at a write-protected table, unless all that it takes away are
                    // permissions.
                    survey.holes |= !F::TABLES_RESTRICT && F::is_protected(entry);
                    self.survey(leaf, child, below, first, maintenance, survey, missing);
                    continue;
                }
                (Kind::Leaf, _) if leaf.is_cleaned_by(entry, level, first) => {
                    let attrs = F::decode(entry, level);
                    clean = false;
                    instructions &= !attrs.perms.intersects(Perms::ANY_EXEC);
                    survey.dirty |= attrs.dirty || attrs.perms.intersects(Perms::ANY_WRITE);
                    // Walkers fault at what is parked.
                    survey.holes |= F::is_parked(entry) && !F::is_parked(leaf.bits);
                }
                (Kind::Leaf, _) => survey.strangers = true,
                // What is being replaced may be anything.
                (Kind::Invalid, _) if entry != 0 => survey.strangers = true,
                _ => survey.holes = true,
            }
            if clean || instructions {
                survey.lacking = true;
                missing(Pa::new(leaf.memory(first)), size, clean, instructions);
            }
        }
    }

    /// Allows more for the page at `input`, whatever the size of its leaf: for a permission fault
    /// that the embedder has found to be no more than that, or an access-flag fault (`perms` empty,
    /// `accessed`).
    ///
    /// # Errors
    /// [`Refused::Busy`], [`Refused::Retry`], [`Refused::Edit`] if the format cannot hold the
    /// permissions.
    pub fn relax(
        &self,
        input: F::Input,
        perms: Perms,
        dirty: bool,
    ) -> Result<Relaxed, Refused<F::Input>> {
        if !self.translates(input) {
            return Err(EditError::InputOutOfRange.into());
        }
        let _walk = self.platform().enter();
        // SAFETY: a walk is entered (1.).
        unsafe { self.relax_if(input, perms, dirty, |_, _| true) }
    }

    /// Relaxes a leaf that is as it should be, and returns its attributes and its level.
    ///
    /// # Errors
    /// [`Refused::Denied`] if it is not, and as above.
    ///
    /// # Safety
    /// 1. A walk has been entered.
    pub(crate) unsafe fn relax_if(
        &self,
        input: F::Input,
        perms: Perms,
        dirty: bool,
        is_right: impl Fn(&Attrs, Level) -> bool,
    ) -> Result<Relaxed, Refused<F::Input>> {
        // SAFETY: a walk is entered.
        let found = unsafe { self.find(input.bits(), Level::PAGE) };
        let level = found.level;
        let mut entry = found.entry;
        loop {
            match F::kind(entry, level) {
                Kind::Leaf => {}
                Kind::Invalid if entry == 0 => return Ok(Relaxed::Absent),
                Kind::Invalid => return Err(Refused::Busy(input)),
                Kind::Table => return Err(Refused::Retry),
            }
            let old = F::decode(entry, level);
            if !is_right(&old, level) {
                return Err(Refused::Denied);
            }
            let relaxed = Attrs {
                perms: old.perms | perms,
                accessed: true,
                dirty: old.dirty || dirty,
                ..old
            };
            let frame = F::address(entry, level);
            let slice = Slice::around::<F>(input.bits(), level);
            if relaxed == old {
                // This processor has faulted all the same: it remembers the leaf as it was, and
                // would for ever.
                self.relaxed(slice, level);
                return Ok(Relaxed::Already);
            }
            let bits = F::encode(&relaxed, level).map_err(EditError::from)?;
            let new = F::with_address(bits, frame);
            let (_, instructions) = self.maintenance(&relaxed, old.perms);
            self.maintain(frame, 1 << F::shift(level), false, instructions);
            match found.replace(entry, new) {
                Ok(()) => {
                    self.relaxed(slice, level);
                    return Ok(Relaxed::Done);
                }
                Err(now) if Self::differs_in_flags(entry, now, level) => entry = now,
                Err(_) => return Err(Refused::Retry),
            }
        }
    }
}

/// The contents of a table, compared with the leaf that takes its place.
#[derive(Default)]
struct Survey {
    /// Leaves for other memory, or of another kind.
    strangers: bool,
    /// A page of it was written, or can be.
    dirty: bool,
    /// Memory that it does not map.
    holes: bool,
    /// Memory that needs maintenance.
    lacking: bool,
}

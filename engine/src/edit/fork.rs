//! Fork: a range of one space becomes a range of another, table by table.
//!
//! Two walks. The first looks and makes the tables that the other space lacks; it may fail, and
//! then nothing is mapped otherwise than before. The second cannot: it changes each leaf here, as
//! [`protect`](Gather::protect) does, writes what it has become into the table of the other space,
//! and tells the embedder of it.

use core::array;
use core::ops::{ControlFlow, Range};

use super::plan::Recent;
use super::protect::{Left, Recode};
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Change;
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError};
use crate::flush::{Fate, Flush, Leaf};
use crate::format::{Format, Kind, Perms, in_place_of};
use crate::platform::Platform;
use crate::run;
use crate::table::{Table, UpperCache};
use crate::walk::{Denied, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Maps in `child` whatever is mapped in `span` here, at the same addresses, changed by
    /// `change`; and changes it here, too. Private memory of a process is write-protected in both,
    /// to be copied when either writes; of shared memory nothing changes. `each` is told of every
    /// leaf that both have when this returns; a run counts as one.
    ///
    /// A block or a run that reaches over an end of the range is split first. What is to be
    /// forgotten of this space is left to this gather, for any number of ranges.
    ///
    /// New tables of the child deny nothing. Its leaves have the permissions that are effective
    /// here. A tree that a loader has made is edited as fast as any when it is
    /// [adopted](AddressSpace::adopt) and forked into an empty space.
    ///
    /// # Errors
    /// As [`protect`](Gather::protect), for this space;
    /// [`AlreadyMapped`](EditError::AlreadyMapped), [`InputOutOfRange`](EditError::InputOutOfRange)
    /// and [`OutOfTables`](EditError::OutOfTables) of the child. Nothing is mapped otherwise than
    /// before then; the child may have empty tables. If `each` unwinds, the child has the leaves
    /// that it was told of.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut parent = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let heap = Span::new(Va::new(0x40_0000), 0x3000)?;
    /// parent.map(heap, Pa::new(0x8000), Attrs::USER_DATA)?;
    /// parent.make_live();
    ///
    /// let mut child = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let (mut gather, mut into, mut frames) = (parent.gather(), child.gather(), 0);
    /// gather.fork(heap, Change::new().write_protect(), &mut into, |_leaf| frames += 1)?;
    /// gather.finish(|_| ()); // one invalidation for all ranges
    /// into.finish(|_| ());
    /// assert_eq!(frames, 3); // each has one more user
    /// for space in [&parent, &child] {
    ///     let leaf = space.query(Va::new(0x40_1234)).unwrap();
    ///     assert_eq!((leaf.frame(), leaf.attrs().perms.contains(Perms::WRITE)),
    ///         (Pa::new(0x9000), false));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fork(
        &mut self,
        span: Span<F::Input>,
        change: Change,
        child: &mut Gather<'_, F, P>,
        each: impl FnMut(Leaf<F>),
    ) -> Result<(), EditError<F::Input>> {
        let slice = child.space.check(span)?;
        child.space.check_global(false)?;
        self.space.check(span)?;
        self.prepare_change(slice, &change)?;
        let mut mapped = FirstLeaf(None);
        let _: ControlFlow<()> = child.space.visit(slice, &mut mapped);
        if let Some(at) = mapped.0 {
            return Err(EditError::AlreadyMapped(F::Input::from_bits(at)));
        }
        self.complete_parked_runs(slice, &change);
        self.cleave(slice)?;
        // A table of the child that the same gather has detached is broken before another is linked
        // in its place.
        child.complete_overlap(slice.first, slice.last);
        child.begin_change();
        let live = child.space.is_live();
        let AddressSpace { platform, root, cache, .. } = &mut *child.space;
        let path =
            Path { platform, root: *root, upper: &mut cache.upper, left: &mut child.left, live };
        let mut tables = Tables { path, made: Ok(()) };
        let _: ControlFlow<()> = self.space.visit(slice, &mut tables);
        tables.made?;
        // And an empty one that was in the place of a leaf before that is stored.
        child.complete_overlap(slice.first, slice.last);
        child.space.note_runs(self.space.debt.has_runs());
        self.space.debt.add_globals(change.turns_global());
        let globals = self.space.debt.has_globals();
        child.space.debt.add_globals(globals);
        child.mapped(slice);

        // If the visitor unwinds, what was changed until then is not named: everything is, until it
        // has come to its end.
        self.begin_change();
        let (conditions, mut recent) = (self.space.conditions(), Recent::new(change));
        let named = self.left.ranges.begin_unnamed(conditions.live);
        let mut changing = Changing { gather: self, slice, left: Left::EMPTY };
        let mut copy = Copy {
            child: child.space,
            recode: Recode::new(conditions, &mut recent, &mut changing.left),
            denied: Denied::new(Perms::empty()),
            each,
        };
        let _: ControlFlow<()> = changing.gather.space.visit(slice, &mut copy);
        changing.gather.left.ranges.end_unnamed(named);
        Ok(())
    }
}

/// A change under way, which ends when this is dropped, in unwinding too: an entry that a break has
/// left suspended is no leaf, and other edits would take it for theirs.
struct Changing<'g, 's, F: Format, P: Platform + Clone> {
    gather: &'g mut Gather<'s, F, P>,
    slice: Slice,
    left: Left,
}

impl<F: Format, P: Platform + Clone> Drop for Changing<'_, '_, F, P> {
    fn drop(&mut self) {
        let left = core::mem::replace(&mut self.left, Left::EMPTY);
        self.gather.changed(self.slice, left);
    }
}

/// The way from a root down to a table that may be missing.
pub(super) struct Path<'a, P: Platform> {
    pub platform: &'a P,
    pub root: Pa,
    pub upper: &'a mut UpperCache,
    /// Takes an empty table that is in the place of a leaf.
    pub left: &'a mut Flush,
    pub live: bool,
}

impl<P: Platform> Path<'_, P> {
    /// Makes the table at `level` for `input`, with those above it, if there is none: they deny
    /// nothing. An empty table in the place of the leaf is detached.
    pub fn make<F: Format>(&mut self, input: u64, level: Level) -> Result<(), EditError<F::Input>> {
        let platform = self.platform;
        let (mut frame, mut at) = (self.root, F::root_level());
        loop {
            // SAFETY: the root of the space, or a table of it.
            let table = unsafe { Table::open(platform, frame, at) };
            let index = F::index(input, at);
            let entry = table.load(index);
            let Some(below) = at.down() else {
                return Ok(());
            };
            if at == level {
                if F::kind(entry, at) == Kind::Table {
                    let child = F::address(entry, at);
                    if !self.left.has_room(platform, child) {
                        return Err(EditError::OutOfTables);
                    }
                    table.detach(index, 0, self.upper);
                    let part = Slice::around::<F>(input, at);
                    let (denied, fate) = (Perms::empty(), Fate::Replaced);
                    self.left.carry(platform, child, below, part.first, denied, fate);
                    if self.live {
                        self.left.ranges.add(part, None, true);
                    }
                }
                return Ok(());
            }
            frame = match F::kind(entry, at) {
                Kind::Table if F::denied(entry).is_empty() => F::address(entry, at),
                Kind::Table | Kind::Leaf => {
                    return Err(EditError::Denied(F::Input::from_bits(input)));
                }
                Kind::Invalid => {
                    let Some(fresh) = platform.alloc_table(below) else {
                        return Err(EditError::OutOfTables);
                    };
                    // SAFETY: just allocated, and not linked yet: a table like any below the root
                    // (1. of both).
                    unsafe { Table::open(platform, fresh, below).clear(1 << F::INDEX_BITS) };
                    table.link(index, F::table(fresh, Perms::empty()));
                    fresh
                }
            };
            at = below;
        }
    }
}

/// The pass that checks that the child has room for what is here, and makes the tables that it
/// lacks.
struct Tables<'a, F: Format, P: Platform> {
    path: Path<'a, P>,
    made: Result<(), EditError<F::Input>>,
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Makes it, and keeps the reason if it cannot.
    fn try_make(&mut self, input: u64, level: Level) -> ControlFlow<()> {
        self.made = self.path.make::<F>(input, level);
        match self.made {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Tables<'_, F, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => Step::Into(F::address(entry, level)),
            Kind::Leaf if self.try_make(slice.first, level).is_break() => Step::Stop,
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        // A table is made for the first leaf that there is.
        let mut index = range.start;
        while index < range.end {
            if F::kind(table.load(index), Level::PAGE) == Kind::Leaf {
                return self.try_make(first, Level::PAGE);
            }
            index = table.past_hole(index, range.end);
        }
        ControlFlow::Continue(())
    }
}

/// The table at `level` for `input` below a root.
pub(super) fn table_of<F: Format, P: Platform>(
    platform: &P,
    root: Pa,
    input: u64,
    level: Level,
) -> Option<Table<'_, P>> {
    let (mut frame, mut at) = (root, F::root_level());
    loop {
        // SAFETY: the root of a space, or a table of it.
        let table = unsafe { Table::open(platform, frame, at) };
        if at == level {
            return Some(table);
        }
        let entry = table.load(F::index(input, at));
        if F::kind(entry, at) != Kind::Table {
            return None;
        }
        (frame, at) = (F::address(entry, at), at.down()?);
    }
}

/// Leaves that are copied at once: as many as there are registers for.
const AT_ONCE: usize = 8;

/// Changes leaves, and copies them into the tables of another space, which are there.
struct Copy<'a, F: Format, P: Platform, V> {
    child: &'a AddressSpace<F, P>,
    recode: Recode<'a, F>,
    denied: Denied,
    each: V,
}

impl<F: Format, P: Platform + Clone, V: FnMut(Leaf<F>)> Copy<'_, F, P, V> {
    /// Returns the child's copy of the leaf `now`: with the permissions that the tables above leave
    /// it, because those of the child deny nothing.
    fn inherited(&self, now: u64, level: Level) -> u64 {
        let denied = self.denied.at(level);
        if denied.is_empty() {
            return now;
        }
        let attrs = F::decode_meaning(F::restricted(F::meaning(now), level, denied), level);
        // A format encodes all that it decodes.
        F::encode(&attrs, level).map_or(0, |bits| in_place_of::<F>(now, level, bits))
    }

    /// Copies pages from one table into another, the first of which translates `first`, as long as
    /// they are `key` but for the address: as `now`, which with `CHANGES` is written here as well.
    /// Returns where they end.
    // A function of its own, so that the loop has the registers to itself.
    #[inline(never)]
    fn copy_alike<const CHANGES: bool>(
        &mut self,
        (from, to): (&Table<'_, P>, &Table<'_, P>),
        range: Range<usize>,
        first: u64,
        (key, now): (u64, u64),
    ) -> usize {
        // It is not, and with that known how an address stands is not looked at for each page.
        if F::is_parked(now) {
            return range.start;
        }
        let mask = !F::address_mask(Level::PAGE);
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        // A few at a time, checked as one before any of them is written.
        let whole = range.start + range.len() / AT_ONCE * AT_ONCE;
        while index != whole {
            // What is left is the address, if it is of the pattern.
            let rests: [u64; AT_ONCE] = array::from_fn(|n| from.load(index + n).wrapping_sub(key));
            if rests.iter().fold(0, |all, rest| all | rest) & mask != 0 {
                break;
            }
            for (n, rest) in rests.into_iter().enumerate() {
                if CHANGES {
                    from.store(index + n, rest | now);
                }
                to.store(index + n, rest | now);
                (self.each)(Leaf::new(at(index + n), rest | now, Level::PAGE, Perms::empty()));
            }
            index += AT_ONCE;
        }
        while index != range.end {
            let rest = from.load(index).wrapping_sub(key);
            if rest & mask != 0 {
                break;
            }
            if CHANGES {
                from.store(index, rest | now);
            }
            to.store(index, rest | now);
            (self.each)(Leaf::new(at(index), rest | now, Level::PAGE, Perms::empty()));
            index += 1;
        }
        index
    }

    /// Tells of a leaf that was copied; of a run when all of it was.
    #[inline]
    fn tell(&mut self, to: &Table<'_, P>, index: usize, level: Level, input: u64, mut entry: u64) {
        let mut first = input & !((1 << F::shift(level)) - 1);
        if entry & F::CONTIGUOUS != 0 {
            let members = run::members::<F>(index, level);
            if index + 1 != members.end {
                return;
            }
            first = run::extent::<F>(input, level).first;
            entry = run::gather::<F>(members, level, &mut |member| to.load(member));
        }
        (self.each)(Leaf::new(first, entry, level, Perms::empty()));
    }
}

impl<F: Format, P: Platform + Clone, V: FnMut(Leaf<F>)> Visit<F, P> for Copy<'_, F, P, V> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, Some(below)) => {
                self.denied.enter::<F>(entry, below);
                return Step::Into(F::address(entry, level));
            }
            (Kind::Leaf, _) => {
                let now = self.recode.rewrite(table, index, level, slice);
                let now = self.inherited(now, level);
                let child = self.child;
                let to = table_of::<F, P>(&child.platform, child.root, slice.first, level);
                if let Some(to) = to {
                    let vacant = to.load(index);
                    to.replace::<F>(index, level, vacant, now);
                    self.tell(&to, index, level, slice.first, now);
                }
            }
            _ => {}
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let AddressSpace { platform, root, .. } = self.child;
        let Some(to) = table_of::<F, P>(platform, *root, first, Level::PAGE) else {
            return ControlFlow::Continue(());
        };
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        let mut index = range.start;
        while index < range.end {
            let entry = table.load(index);
            if F::kind(entry, Level::PAGE) != Kind::Leaf {
                index = table.past_hole(index, range.end);
                continue;
            }
            let plan = self.recode.plan(entry, Level::PAGE);
            let from = index;
            let (key, now) = (plan.key(), plan.result());
            let parked = F::is_parked(key) || F::is_parked(now);
            let inherits = self.inherited(now, Level::PAGE) == now;
            if plan.is_plain() && entry & F::CONTIGUOUS == 0 && !parked && inherits {
                // A stretch of leaves of one pattern that no walker writes: the inner loop.
                let (tables, rest) = ((table, &to), index..range.end);
                // A walker may set a flag in what is kept, so that it is not written.
                index = match now == key {
                    true => self.copy_alike::<false>(tables, rest, at(from), (key, now)),
                    false => self.copy_alike::<true>(tables, rest, at(from), (key, now)),
                };
                let slice = Slice { first: at(from), last: at(index).wrapping_sub(1) };
                self.recode.leave(plan.how(), slice);
            } else {
                let slice = Slice { first: at(index), last: at(index + 1).wrapping_sub(1) };
                let now = self.recode.rewrite(table, index, Level::PAGE, slice);
                let now = self.inherited(now, Level::PAGE);
                to.store(index, now);
                self.tell(&to, index, Level::PAGE, slice.first, now);
                index += 1;
            }
        }
        ControlFlow::Continue(())
    }
}

/// Finds the first leaf.
pub(super) struct FirstLeaf(pub Option<u64>);

impl<F: Format, P: Platform> Visit<F, P> for FirstLeaf {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => Step::Into(F::address(entry, level)),
            Kind::Leaf => {
                self.0 = Some(slice.first);
                Step::Stop
            }
            Kind::Invalid => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let used = table.first_used(range.clone());
        if used == range.end {
            return ControlFlow::Continue(());
        }
        let pages = (used - range.start) as u64;
        self.0 = Some(first.wrapping_add(pages << F::PAGE_SHIFT));
        ControlFlow::Break(())
    }
}

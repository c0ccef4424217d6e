//! Query and walk: what is mapped, and how.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Span};
use crate::edit::space::{AddressSpace, EditError};
use crate::entry::LINE;
use crate::flush::Leaf;
use crate::format::{Format, Kind, Perms, kind_of};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{Denied, Place, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// The leaf that translates `input`, if any.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::Arm64K64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(8, 16);
    /// # let mut space = AddressSpace::<Arm64K64, _>::new(&platform).unwrap();
    /// space.map(Span::new(Va::new(0), 2 << 20)?, Pa::new(0), Attrs::KERNEL_TEXT)?;
    /// let leaf = space.query(Va::new(0x1_2345)).unwrap();
    /// // The 32 pages form a contiguous run, which is one leaf.
    /// assert_eq!((leaf.input(), leaf.size()), (Va::new(0), 2 << 20));
    /// assert_eq!(leaf.attrs(), Attrs::KERNEL_TEXT);
    /// assert!(leaf.is_contiguous());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn query(&self, input: F::Input) -> Option<Leaf<F>> {
        let input = input.bits();
        let near = self.cache.upper.number_of::<F>(input).is_some();
        let open = near || self.cache.is_open_at(input, self.reach.offset);
        let Some(at) = (if open { self.locate(input) } else { None }) else {
            // Here and below the leaf is copied by field: the caller's place for it is not handed
            // down then, and a usual page stays in registers, which saves 7 instructions.
            let leaf = self.leaf_anywhere(input)?;
            return Some(leaf.by_words());
        };
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&self.platform, at.frame, Level::PAGE) };
        let entry = table.load(at.index);
        if F::is_single_page(entry) {
            let first = input & !((1 << F::PAGE_SHIFT) - 1);
            return Some(Leaf::of_page(first, entry));
        }
        if entry == 0 {
            return None;
        }
        drop(table);
        let leaf = self.leaf_anywhere(input)?;
        Some(leaf.by_words())
    }

    /// The leaf that translates `input`, which the root perhaps does not.
    #[cold]
    #[inline(never)]
    fn leaf_anywhere(&self, input: u64) -> Option<Leaf<F>> {
        if !self.translates(input) {
            return None;
        }
        self.leaf_above(input)
    }

    /// The leaf that translates `input`, which is perhaps not in a table of pages.
    #[cold]
    #[inline(never)]
    pub(super) fn leaf_above(&self, input: u64) -> Option<Leaf<F>> {
        let at = self.find(input);
        self.leaf_in(&at.table, at.index, at.level, input, at.denied)
    }

    /// The leaf that is in an entry, from which tables take `denied` away.
    #[inline(always)]
    fn leaf_in(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        input: u64,
        denied: Perms,
    ) -> Option<Leaf<F>> {
        let entry = table.load(index);
        if kind_of::<F>(entry, level) != Kind::Leaf {
            return None;
        }
        let (first, entry) = whole::<F, P>(table, index, level, input, entry);
        Some(Leaf::new(first, entry, level, denied))
    }

    /// Visits the leaves that translate any part of `span`, upwards, until the visitor breaks off.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned) and [`InputOutOfRange`](EditError::InputOutOfRange).
    pub fn walk(
        &self,
        span: Span<F::Input>,
        mut visit: impl FnMut(Leaf<F>) -> ControlFlow<()>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.check(span)?;
        let (has_runs, open) = (self.debt.has_runs(), !self.may_deny());
        // Fast path: pages of one table.
        if open && let Some(Place { table, range }) = self.place(slice) {
            let end = range.end;
            let seen = see_pages::<F, P>(&table, range, slice.first, has_runs, &mut visit);
            if let ControlFlow::Continue((index, first)) = seen
                && index != end
            {
                self.walk_table(table, index..end, first, visit);
            }
            return Ok(());
        }
        self.walk_tree(slice, visit);
        Ok(())
    }

    /// Visits pages of one table, whatever they are like.
    #[inline(never)]
    fn walk_table(
        &self,
        table: Table<'_, P>,
        range: Range<usize>,
        first: u64,
        visit: impl FnMut(Leaf<F>) -> ControlFlow<()>,
    ) {
        let mut find = Find::new(visit, self.debt.has_runs(), true);
        let _: ControlFlow<()> = find.pages(&table, range, first);
    }

    /// Visits leaves of any size.
    #[inline(never)]
    fn walk_tree(&self, slice: Slice, visit: impl FnMut(Leaf<F>) -> ControlFlow<()>) {
        let mut find = Find::new(visit, self.debt.has_runs(), !self.may_deny());
        let _: ControlFlow<()> = self.visit(slice, &mut find);
    }

    /// Visits every leaf of the space.
    pub fn walk_all(&self, mut visit: impl FnMut(Leaf<F>)) {
        for slice in self.everything() {
            let visit = |leaf| {
                visit(leaf);
                ControlFlow::Continue(())
            };
            let mut find = Find::new(visit, self.debt.has_runs(), !self.may_deny());
            let _: ControlFlow<()> = self.visit(slice, &mut find);
        }
    }

    /// Counts the tables of the space, the root included.
    pub fn count_tables(&self) -> u64 {
        let mut count = CountTables(1);
        for slice in self.everything() {
            let _: ControlFlow<()> = self.visit(slice, &mut count);
        }
        count.0
    }
}

/// Visits pages that are like most, up to the first that is not: where that is, and its address.
/// The engine has encoded all of them, and no table takes anything away; with `runs` some may be
/// members of runs.
#[inline(always)]
fn see_pages<F: Format, P: Platform>(
    table: &Table<'_, P>,
    range: Range<usize>,
    first: u64,
    runs: bool,
    visit: &mut impl FnMut(Leaf<F>) -> ControlFlow<()>,
) -> ControlFlow<(), (usize, u64)> {
    let (mut index, mut input) = (range.start, first);
    let mut see = |input, entry| visit(Leaf::of_page(input, entry));
    // A line of entries is looked at as one: a page is valid by bits that are set, so that all are
    // if what they have in common is. Each is then loaded once more, which takes less than to keep
    // as many in registers; hardware may have set flags of it.
    while range.end - index >= LINE {
        let line = || (0..LINE).map(|offset| table.load(index + offset));
        let common = line().fold(u64::MAX, |all, entry| all & entry);
        let any = match runs {
            true => line().fold(0, |all, entry| all | entry),
            false => 0,
        };
        if !F::is_single_page(common) || any & F::CONTIGUOUS != 0 {
            break;
        }
        for offset in 0..LINE {
            see(input, table.load(index + offset))?;
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        index += LINE;
    }
    while index < range.end {
        let entry = table.load(index);
        if !F::is_single_page(entry) {
            break;
        }
        see(input, entry)?;
        index += 1;
        input = input.wrapping_add(1 << F::PAGE_SHIFT);
    }
    ControlFlow::Continue((index, input))
}

/// Visits leaves, with what the tables above them take away; a run once.
struct Find<F, V> {
    visit: V,
    denied: Denied,
    /// Whether the engine has encoded all leaves, and no table takes anything away.
    open: bool,
    /// Whether there may be runs.
    runs: bool,
    /// The last address of the run that was visited last.
    run_last: Option<u64>,
    format: PhantomData<F>,
}

impl<F: Format, V: FnMut(Leaf<F>) -> ControlFlow<()>> Find<F, V> {
    #[inline(always)]
    fn new(visit: V, runs: bool, open: bool) -> Self {
        Self {
            visit,
            open,
            denied: Denied::new(Perms::empty()),
            runs: F::CONTIGUOUS != 0 && runs,
            run_last: None,
            format: PhantomData,
        }
    }

    /// Visits the leaf at one entry, the first of whose addresses that are asked for is `input`.
    #[inline(always)]
    fn leaf<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        input: u64,
        entry: u64,
    ) -> ControlFlow<()> {
        if entry & F::CONTIGUOUS != 0 {
            if self.run_last.is_some_and(|last| input <= last) {
                return ControlFlow::Continue(());
            }
            self.run_last = Some(run::extent::<F>(input, level).last);
        }
        let (first, entry) = whole::<F, P>(table, index, level, input, entry);
        (self.visit)(Leaf::new(first, entry, level, self.denied.at(level)))
    }

    /// Asks for an entry of pages, which is perhaps no leaf.
    #[inline(always)]
    fn page<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        input: u64,
        entry: u64,
    ) -> ControlFlow<()> {
        match F::is_single_page(entry) {
            true => (self.visit)(Leaf::new(input, entry, Level::PAGE, self.denied.at(Level::PAGE))),
            false => self.other_page(table, index, input, entry),
        }
    }

    /// Asks for an entry of pages that is not like most.
    #[cold]
    #[inline(never)]
    fn other_page<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        input: u64,
        entry: u64,
    ) -> ControlFlow<()> {
        match F::kind(entry, Level::PAGE) {
            Kind::Leaf => self.leaf(table, index, Level::PAGE, input, entry),
            Kind::Invalid | Kind::Table => ControlFlow::Continue(()),
        }
    }
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>) -> ControlFlow<()>> Visit<F, P> for Find<F, V> {
    #[inline]
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, Some(below)) => {
                self.denied.enter::<F>(entry, below);
                Step::Into(F::address(entry, level))
            }
            (Kind::Leaf, _) => match self.leaf(table, index, level, slice.first, entry) {
                ControlFlow::Continue(()) => Step::Next,
                ControlFlow::Break(()) => Step::Stop,
            },
            _ => Step::Next,
        }
    }

    #[inline]
    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let Range { start, end } = range;
        let (mut index, mut input) = (start, first);
        while index < end {
            let entry = table.load(index);
            if self.open && F::is_single_page(entry) {
                let rest = index..end;
                (index, input) = see_pages::<F, P>(table, rest, input, self.runs, &mut self.visit)?;
                continue;
            }
            if entry == 0 {
                let hole = index;
                index = table.past_hole(hole, end);
                input = input.wrapping_add(((index - hole) as u64) << F::PAGE_SHIFT);
                continue;
            }
            self.page(table, index, input, entry)?;
            index += 1;
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

/// The first address and the descriptor of the leaf at one entry, which translates `input`; of a
/// run, those of all of it.
#[inline(always)]
fn whole<F: Format, P: Platform>(
    table: &Table<'_, P>,
    index: usize,
    level: Level,
    input: u64,
    entry: u64,
) -> (u64, u64) {
    if entry & F::CONTIGUOUS == 0 {
        return (input & !((1 << F::shift(level)) - 1), entry);
    }
    whole_run::<F, P>(table, index, level, input)
}

/// Asks for a member of a run.
#[inline(always)]
fn whole_run<F: Format, P: Platform>(
    table: &Table<'_, P>,
    index: usize,
    level: Level,
    input: u64,
) -> (u64, u64) {
    let members = run::members::<F>(index, level);
    let first = run::extent::<F>(input, level).first;
    let load = &mut |member| table.load(member);
    (first, run::gather::<F>(members, level, load))
}

struct CountTables(u64);

impl<F: Format, P: Platform> Visit<F, P> for CountTables {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => {
                self.0 += 1;
                Step::Into(F::address(entry, level))
            }
            _ => Step::Next,
        }
    }
}

//! Query and walk: what is mapped, and how.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::SMALL;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::space::{AddressSpace, EditError};
use crate::flush::Leaf;
use crate::format::{Format, Kind, Perms};
use crate::platform::Platform;
use crate::run;
use crate::table::Table;
use crate::walk::{Denied, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// The leaf that translates `input`, if any.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::Arm64K64, hosted::Hosted};
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
        match self.translates(input.bits()) {
            true => self.leaf_at(input.bits()),
            false => None,
        }
    }

    /// The leaf that translates an address which the root translates.
    #[inline(always)]
    pub(super) fn leaf_at(&self, input: u64) -> Option<Leaf<F>> {
        if !SMALL && let Some(place) = self.place(Slice::around::<F>(input, Level::PAGE)) {
            let entry = place.table.load(place.range.start);
            return self.leaf_in(&place.table, place.range.start, Level::PAGE, input, entry);
        }
        self.leaf_above(input)
    }

    /// The same where it is perhaps not in a table of pages.
    #[inline(never)]
    pub(super) fn leaf_above(&self, input: u64) -> Option<Leaf<F>> {
        let at = self.find(input);
        self.leaf_in(
            &at.table,
            at.index,
            at.level,
            input,
            at.table.load(at.index),
        )
    }

    /// The leaf that is in an entry.
    #[inline(always)]
    fn leaf_in(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        input: u64,
        entry: u64,
    ) -> Option<Leaf<F>> {
        if F::kind(entry, level) != Kind::Leaf {
            return None;
        }
        let (first, entry) = if entry & F::CONTIGUOUS == 0 {
            (input & !((1 << F::shift(level)) - 1), entry)
        } else {
            self.run_at(table.frame(), index, level, input)
        };
        Some(Leaf::new(first, entry, level, self.denied(input)))
    }

    /// The first address and the descriptor of a run, of the table in `frame`, which is opened again: so that of what is in no run
    /// it stays in registers.
    #[inline(never)]
    fn run_at(&self, frame: Pa, index: usize, level: Level, input: u64) -> (u64, u64) {
        // SAFETY: a walk has just come to it.
        let table = unsafe { Table::open(&self.platform, frame, level) };
        whole_run::<F, P>(&table, index, level, input)
    }

    /// Visits the leaves that translate any part of `span`, upwards, until the visitor breaks off.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned) and [`InputOutOfRange`](EditError::InputOutOfRange).
    pub fn walk(
        &self,
        span: Span<F::Input>,
        visit: impl FnMut(Leaf<F>) -> ControlFlow<()>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.check(span)?;
        let mut find = Find::new(visit);
        let _: ControlFlow<()> = match self.place(slice) {
            Some(place) => {
                find.denied = Denied::new(self.denied(slice.first));
                find.pages(&place.table, place.range.clone(), slice.first)
            }
            None => self.visit(slice, &mut find),
        };
        Ok(())
    }

    /// Visits every leaf of the space.
    pub fn walk_all(&self, mut visit: impl FnMut(Leaf<F>)) {
        for slice in self.everything() {
            let mut find = Find::new(|leaf| {
                visit(leaf);
                ControlFlow::Continue(())
            });
            let _: ControlFlow<()> = self.visit(slice, &mut find);
        }
    }

    /// How many tables the space has, the root included.
    pub fn count_tables(&self) -> u64 {
        let mut count = CountTables(1);
        for slice in self.everything() {
            let _: ControlFlow<()> = self.visit(slice, &mut count);
        }
        count.0
    }
}

/// Visits leaves, with what the tables above them take away; a run once.
struct Find<F, V> {
    visit: V,
    denied: Denied,
    /// The last address of the run that was visited last.
    run_last: Option<u64>,
    format: PhantomData<F>,
}

impl<F: Format, V: FnMut(Leaf<F>) -> ControlFlow<()>> Find<F, V> {
    #[inline(always)]
    fn new(visit: V) -> Self {
        Self {
            visit,
            denied: Denied::new(Perms::empty()),
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

    /// The same of a page that is parked.
    #[cold]
    #[inline(never)]
    fn parked<P: Platform>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        input: u64,
        entry: u64,
    ) -> ControlFlow<()> {
        self.leaf(table, index, Level::PAGE, input, entry)
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
        let mut input = first;
        for index in range {
            let entry = table.load(index);
            // What is parked is apart from others, of which it is known then how their address stands.
            if !F::is_parked(entry) {
                if F::kind(entry, Level::PAGE) == Kind::Leaf {
                    self.leaf(table, index, Level::PAGE, input, entry)?;
                }
            } else if F::kind(entry, Level::PAGE) == Kind::Leaf {
                self.parked(table, index, input, entry)?;
            }
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

/// The first address and the descriptor of the leaf at one entry, which translates `input`; of a run, those of all of it.
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

/// The same of a member of a run.
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

//! Fork: a range of one space becomes a range of another, table by table.
//!
//! Three walks. The first copies entries into tables of the other space, as they will be when they have been changed; it may
//! run out of tables, and then takes back what it has put there. The second changes the entries of this space, as
//! [`protect`](Gather::protect) does, and cannot fail. The third tells the embedder of each leaf that both have.

use core::convert::Infallible;
use core::ops::{ControlFlow, Range};

use super::protect::Plans;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Change;
use crate::entry::Table;
use crate::flush::Leaf;
use crate::format::{Format, Kind, Perms};
use crate::gather::Gather;
use crate::platform::Platform;
use crate::space::{AddressSpace, EditError, Liveness};
use crate::walk::{MAX_LEVELS, Slice, Step, Visit};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Maps in `child` whatever is mapped in `span` here, at the same addresses, changed by `change`; and changes it here, too.
    /// Private memory of a process is write-protected in both, to be copied when either writes; of shared memory nothing
    /// changes. `each` is told of every leaf that both have when this returns; a run counts as one.
    ///
    /// A block or a run that reaches over an end of the range is split first. What is to be forgotten of this space is left
    /// to this gather, for any number of ranges.
    ///
    /// # Errors
    /// As [`protect`](Gather::protect), for this space; [`AlreadyMapped`](EditError::AlreadyMapped),
    /// [`InputOutOfRange`](EditError::InputOutOfRange) and [`OutOfTables`](EditError::OutOfTables) of the child. Nothing is
    /// mapped otherwise than before then; the child may have empty tables.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
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
    ///     assert_eq!((leaf.frame(), leaf.attrs().perms.contains(Perms::WRITE)), (Pa::new(0x9000), false));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fork(
        &mut self,
        span: Span<F::Input>,
        change: Change,
        child: &mut Gather<'_, F, P>,
        mut each: impl FnMut(Leaf<F>),
    ) -> Result<(), EditError<F::Input>> {
        let slice = child.space.check(span)?;
        child.space.check_global(false)?;
        let mut plans = self.prepare_change(self.space.check(span)?, change)?;
        if let ControlFlow::Break(at) = child.space.visit(slice, &mut FirstLeaf) {
            return Err(EditError::AlreadyMapped(F::Input::from_bits(at)));
        }
        let parent = &mut *self.space;
        parent.cleave(slice)?;
        let mut copy = Copy {
            child: child.space,
            plans: &mut plans,
            denied: [Perms::empty(); MAX_LEVELS],
        };
        let copied = parent.visit(slice, &mut copy);
        child.space.tables_deny |= parent.tables_deny;
        child.space.runs |= parent.runs;
        child.space.globals |= parent.globals || change.turns_global();
        let live = child.space.liveness() != Liveness::Dead;
        if let ControlFlow::Break(error) = copied {
            let _: ControlFlow<Infallible> = child.space.visit(slice, &mut Clear);
            child.owe();
            if live {
                child.left.ranges.add(slice, None, false);
            }
            return Err(error);
        }
        child.left.news |= live;
        self.change(slice, &mut plans);
        // It was checked above.
        let _walked = child.space.walk(span, |leaf| {
            each(leaf);
            ControlFlow::Continue(())
        });
        Ok(())
    }
}

/// Finds the first leaf.
struct FirstLeaf;

impl<F: Format, P: Platform> Visit<F, P> for FirstLeaf {
    type Stop = u64;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<u64, Step> {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => ControlFlow::Continue(Step::Into(F::address(entry, level))),
            Kind::Leaf => ControlFlow::Break(slice.first),
            Kind::Invalid => ControlFlow::Continue(Step::Next),
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<u64> {
        let start = range.start;
        for index in range {
            if table.load(index) != 0 {
                let at = first.wrapping_add(((index - start) as u64) << F::PAGE_SHIFT);
                return ControlFlow::Break(at);
            }
        }
        ControlFlow::Continue(())
    }
}

/// Takes out what a copy has put into a range that was free.
struct Clear;

impl<F: Format, P: Platform> Visit<F, P> for Clear {
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
            Kind::Leaf => table.store(index, 0),
            Kind::Invalid => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        _: u64,
    ) -> ControlFlow<Infallible> {
        table.fill(range, 0, 0);
        ControlFlow::Continue(())
    }
}

/// Copies leaves into tables of another space.
struct Copy<'a, F: Format, P: Platform> {
    child: &'a AddressSpace<F, P>,
    plans: &'a mut Plans<F>,
    /// What the table at each level takes away here.
    denied: [Perms; MAX_LEVELS],
}

impl<F: Format, P: Platform> Copy<'_, F, P> {
    /// The child's table at `level` for `input`, with those above it. Other tables than here may take permissions away there.
    fn table(&self, input: u64, level: Level) -> ControlFlow<EditError<F::Input>, Pa> {
        let platform = &self.child.platform;
        let (mut frame, mut at) = (self.child.root, F::root_level());
        while let (Some(below), true) = (at.down(), at > level) {
            // SAFETY: the root of the child, or a table of it.
            let table = unsafe { Table::open(platform, frame, at) };
            let index = F::index(input, at);
            let entry = table.load(index);
            let deny = self.denied[below.height() as usize];
            frame = match F::kind(entry, at) {
                Kind::Table if F::denied(entry) == deny => F::address(entry, at),
                Kind::Table | Kind::Leaf => {
                    return ControlFlow::Break(EditError::Denied(F::Input::from_bits(input)));
                }
                Kind::Invalid => {
                    let Some(fresh) = platform.alloc_table(below) else {
                        return ControlFlow::Break(EditError::OutOfTables);
                    };
                    // SAFETY: just allocated.
                    let new = unsafe { Table::open(platform, fresh, below) };
                    new.fill(0..1 << F::INDEX_BITS, 0, 0);
                    drop(new);
                    table.link(index, F::table(fresh, deny));
                    fresh
                }
            };
            at = below;
        }
        ControlFlow::Continue(frame)
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Copy<'_, F, P> {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, Some(below)) => {
                self.denied[below.height() as usize] = F::denied(entry);
                return ControlFlow::Continue(Step::Into(F::address(entry, level)));
            }
            (Kind::Leaf, _) => {
                let frame = self.table(slice.first, level)?;
                // SAFETY: a table of the child.
                let to = unsafe { Table::open(&self.child.platform, frame, level) };
                to.store(index, entry ^ self.plans.plan(entry, level).flip);
            }
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Self::Stop> {
        // A table is made for the first leaf that there is.
        let mut leaves =
            range.filter(|&index| F::kind(table.load(index), Level::PAGE) == Kind::Leaf);
        let Some(start) = leaves.next() else {
            return ControlFlow::Continue(());
        };
        let frame = self.table(first, Level::PAGE)?;
        // SAFETY: a table of the child.
        let to = unsafe { Table::open(&self.child.platform, frame, Level::PAGE) };
        for index in core::iter::once(start).chain(leaves) {
            let entry = table.load(index);
            to.store(index, entry ^ self.plans.plan(entry, Level::PAGE).flip);
        }
        ControlFlow::Continue(())
    }
}

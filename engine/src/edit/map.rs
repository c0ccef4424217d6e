//! Map: addresses that translate to nothing translate to memory.
//!
//! Two passes over the part of the tree that exists, which for a large range is next to nothing. The first checks
//! that the range is free and builds the missing sub-trees out of reach; it leaves the address of each in the entry
//! that will point to it, suspended, where a walker sees an invalid entry. If anything fails, the suspended entries
//! are taken out again, and nobody has seen anything. The second pass cannot fail: it writes leaves into tables that
//! exist and makes the suspended entries valid.

use core::convert::Infallible;
use core::ops::{ControlFlow, Range};

use super::build::{Fresh, Leaves, build};
use crate::addr::{Address, Level, Pa, Span};
use crate::entry::Table;
use crate::flush::{Flush, free_tree};
use crate::format::{Attrs, Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::space::{AddressSpace, EditError};
use crate::walk::{Slice, Step, Visit};

/// How to map: the attributes, and which leaves may be used.
///
/// Without further wishes: the largest leaves that fit, contiguous runs where the format has them.
///
/// ```
/// use tablewright::{Attrs, Level, Mapping};
/// let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
/// let blocks_without_runs = Mapping::new(Attrs::KERNEL_DATA).without_runs();
/// assert_ne!(pages, blocks_without_runs);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    attrs: Attrs,
    largest: Level,
    runs: bool,
    tables_deny: bool,
    allocate: bool,
}

impl Mapping {
    /// The largest leaves that fit, with these attributes.
    pub const fn new(attrs: Attrs) -> Self {
        Self {
            attrs,
            largest: Level::new(u8::MAX),
            runs: true,
            tables_deny: false,
            allocate: true,
        }
    }

    /// The attributes.
    pub const fn attrs(&self) -> Attrs {
        self.attrs
    }

    /// The highest level whose leaves may be used.
    pub(crate) const fn top(&self) -> Level {
        self.largest
    }

    /// The same leaves with other attributes.
    pub const fn with_attrs(mut self, attrs: Attrs) -> Self {
        self.attrs = attrs;
        self
    }

    /// No leaf above `level`.
    pub const fn largest(mut self, level: Level) -> Self {
        self.largest = level;
        self
    }

    /// No contiguous runs.
    pub const fn without_runs(mut self) -> Self {
        self.runs = false;
        self
    }

    /// Single pages: no blocks, no runs. What each page maps can be changed without touching its neighbours.
    pub const fn pages_only(self) -> Self {
        self.largest(Level::PAGE).without_runs()
    }

    /// Tables made for this mapping deny execution, as far as the attributes do and the format can. Nothing
    /// executable can be mapped below them later.
    pub const fn tables_deny_execution(mut self) -> Self {
        self.tables_deny = true;
        self
    }

    /// Use the tables that exist, allocate none.
    pub const fn without_allocation(mut self) -> Self {
        self.allocate = false;
        self
    }
}

impl From<Attrs> for Mapping {
    fn from(attrs: Attrs) -> Self {
        Self::new(attrs)
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Maps `span` to the memory from `frame` on.
    ///
    /// On arm64 and x86 a mapping of what was not mapped leaves nothing to invalidate; `flush` is for hardware that
    /// remembers that there was nothing.
    ///
    /// # Errors
    /// Any of [`EditError`] but [`NeedsBreak`](EditError::NeedsBreak) and [`NoSuchLeaf`](EditError::NoSuchLeaf);
    /// nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, EditError, Mapping, Pa, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let mut flush = space.flush();
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// space.map(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only(), &mut flush)?;
    /// assert_eq!(space.query(Va::new(0)).unwrap().size(), 4096);
    /// assert_eq!(
    ///     space.map(span, Pa::new(0), Attrs::USER_DATA, &mut flush),
    ///     Err(EditError::AlreadyMapped(Va::new(0)))
    /// );
    /// # flush.finish(|_| ());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn map(
        &mut self,
        span: Span<F::Input>,
        frame: Pa,
        mapping: impl Into<Mapping>,
        flush: &mut Flush<F, P>,
    ) -> Result<(), EditError<F::Input>> {
        let mapping = mapping.into();
        let slice = self.check(span)?;
        self.check_flush(flush)?;
        if !frame.is_aligned(F::PAGE_SHIFT) {
            return Err(EditError::Misaligned);
        }
        let last_frame = frame.checked_add(span.size() - 1);
        if last_frame.is_none_or(|last| last.get() >> F::OUTPUT_BITS != 0) {
            return Err(EditError::OutputOutOfRange);
        }
        let leaves = Leaves::<F>::new(slice, frame, &mapping.attrs, mapping.largest, mapping.runs)?;
        let deny = if mapping.tables_deny {
            Perms::ANY_EXEC - mapping.attrs.perms
        } else {
            Perms::empty()
        };
        self.tables_deny |= !deny.is_empty();
        self.runs |= mapping.runs;

        let mut prepare = Prepare {
            platform: &self.platform,
            perms: self.tables_deny.then_some(mapping.attrs.perms),
            deny,
            allocate: mapping.allocate,
            commit: Commit { leaves, slice },
            done: false,
        };
        if let ControlFlow::Break(error) = self.visit(slice, &mut prepare) {
            let _: ControlFlow<Infallible> = self.visit(slice, &mut Undo(&self.platform));
            return Err(error);
        }
        if !prepare.done {
            let _: ControlFlow<Infallible> = self.visit(slice, &mut prepare.commit);
        }

        let conditions = self.conditions();
        if conditions.live {
            self.platform.barrier(Barrier::Publish);
            if conditions.caps.invalid_entries_cached {
                flush.add(slice, None, true);
            }
        }
        Ok(())
    }
}

/// Checks that the range is free, and builds what is missing out of reach.
struct Prepare<'a, F: Format, P> {
    platform: &'a P,
    /// The permissions to be given, if tables may take some away.
    perms: Option<Perms>,
    deny: Perms,
    allocate: bool,
    commit: Commit<F>,
    /// All of the range was one entry, or entries of one table of pages, so that nothing else could fail; it is committed.
    done: bool,
}

impl<F: Format, P: Platform> Visit<F, P> for Prepare<'_, F, P> {
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
            (Kind::Leaf, _) => return ControlFlow::Break(EditError::AlreadyMapped(at)),
            (Kind::Table, Some(perms)) if F::denied(entry).intersects(perms) => {
                return ControlFlow::Break(EditError::Denied(at));
            }
            (Kind::Table, _) => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            (Kind::Invalid, _) if self.commit.leaves.fits(level, slice) => {}
            (Kind::Invalid, _) if !self.allocate => {
                return ControlFlow::Break(EditError::NeedsTable(at));
            }
            (Kind::Invalid, _) => {
                let child = level.down().and_then(|below| {
                    let mut frames = Fresh(self.platform);
                    build(
                        self.platform,
                        &mut frames,
                        &self.commit.leaves,
                        below,
                        slice,
                        self.deny,
                    )
                });
                let Some(child) = child else {
                    return ControlFlow::Break(EditError::OutOfTables);
                };
                table.store(index, F::suspend(F::table(child, self.deny)));
            }
        }
        self.done = self.commit.is_all(slice);
        if self.done {
            let ControlFlow::Continue(_) = self.commit.entry(table, index, level, slice);
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Self::Stop> {
        let mut input = first;
        for index in range.clone() {
            if F::kind(table.load(index), Level::PAGE) != Kind::Invalid {
                return ControlFlow::Break(EditError::AlreadyMapped(F::Input::from_bits(input)));
            }
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        let last = input.wrapping_sub(1);
        self.done = self.commit.is_all(Slice { first, last });
        if self.done {
            let ControlFlow::Continue(()) = self.commit.pages(table, range, first);
        }
        ControlFlow::Continue(())
    }
}

/// Takes out what [`Prepare`] put in.
struct Undo<'a, P>(&'a P);

impl<F: Format, P: Platform> Visit<F, P> for Undo<'_, P> {
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        _: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, _) => {
                return ControlFlow::Continue(Step::Into(F::address(entry, level)));
            }
            (Kind::Invalid, Some(below)) if entry != 0 => {
                table.store(index, 0);
                free_tree::<F, P>(self.0, F::address(F::resume(entry), level), below);
            }
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }
}

/// Writes the leaves that belong into tables that exist, and links the tables that were built.
struct Commit<F: Format> {
    leaves: Leaves<F>,
    slice: Slice,
}

impl<F: Format> Commit<F> {
    /// Whether `part` is all of the range.
    #[inline(always)]
    fn is_all(&self, part: Slice) -> bool {
        part.first == self.slice.first && part.last == self.slice.last
    }

    /// Whether the entry is a member of an aligned run of which all members are leaves of this mapping.
    fn in_run<P: Platform>(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
    ) -> bool {
        if !self.leaves.has_runs(level) {
            return false;
        }
        let run = 1usize << F::contiguous(level);
        let size = (run as u64) << F::shift(level);
        let start = first & !(size - 1);
        let start_index = index & !(run - 1);
        // A member that is not one of our leaves is a table, there before or just built: valid or suspended.
        start >= self.slice.first
            && start + (size - 1) <= self.slice.last
            && (start_index..start_index + run).all(|member| {
                let entry = table.load(member);
                entry == 0 || F::kind(entry, level) == Kind::Leaf
            })
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Commit<F> {
    type Stop = Infallible;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<Infallible, Step> {
        let entry = table.load(index);
        if F::kind(entry, level) == Kind::Table {
            return ControlFlow::Continue(Step::Into(F::address(entry, level)));
        }
        if entry != 0 {
            table.link(index, F::resume(entry));
        } else {
            let mark = if self.in_run(table, index, level, slice.first) {
                F::CONTIGUOUS
            } else {
                0
            };
            table.store(index, self.leaves.leaf(level, slice.first) | mark);
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Infallible> {
        self.leaves.fill(table, Level::PAGE, range, first);
        ControlFlow::Continue(())
    }
}

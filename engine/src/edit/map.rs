//! Map: addresses that translate to nothing translate to memory.
//!
//! Two passes over the part of the tree that exists, which for a large range is next to nothing.
//! The first checks that the range is free and builds the missing sub-trees out of reach; it leaves
//! the address of each in the entry that will point to it, suspended, where a walker sees an
//! invalid entry. If anything fails, the suspended entries are taken out again, and no walker has
//! seen anything. The second pass cannot fail: it writes leaves into tables that exist and makes
//! the suspended entries valid.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::build::{Fresh, Leaves, Source, build, build_path, fill};
use super::mapping::{Mapping, check_memory};
use crate::addr::{Address, AddressError, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError, Located, Reached};
use crate::flush::free_tree;
use crate::format::{Attrs, Format, Inexpressible, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

/// A source of leaves: [`Attrs`], a [`Mapping`], or one that is [`Encoded`].
pub trait Template<F: Format>: sealed::Sealed {
    /// The attributes, and which leaves may be used.
    fn mapping(&self) -> Mapping;

    /// The descriptor of a page, without its address.
    ///
    /// # Errors
    /// [`Inexpressible`] says what the format cannot hold.
    #[inline]
    fn page(&self) -> Result<u64, Inexpressible> {
        F::encode(&self.mapping().attrs, Level::PAGE)
    }
}

impl<F: Format> Template<F> for Attrs {
    #[inline]
    fn mapping(&self) -> Mapping {
        Mapping::new(*self)
    }
}

impl<F: Format> Template<F> for Mapping {
    #[inline]
    fn mapping(&self) -> Mapping {
        *self
    }
}

/// A mapping whose attributes a format has encoded: what a kernel keeps that maps pages of a few
/// kinds, one at a time.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Encoded, Mapping, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::Hosted;
/// let anonymous = Encoded::<X86_64<4>>::new(Mapping::new(Attrs::USER_DATA).pages_only())?;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// for page in 0..16 {
///     space.map(Span::new(Va::new(page << 12), 4096)?, Pa::new(page << 16), anonymous)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<F> {
    mapping: Mapping,
    page: u64,
    format: PhantomData<F>,
}

impl<F: Format> Encoded<F> {
    /// Encodes the attributes.
    ///
    /// # Errors
    /// [`Inexpressible`] says what the format cannot hold.
    pub fn new(mapping: impl Into<Mapping>) -> Result<Self, Inexpressible> {
        let mapping = mapping.into();
        let page = F::encode(&mapping.attrs, Level::PAGE)?;
        let format = PhantomData;
        Ok(Self { mapping, page, format })
    }
}

impl<F: Format> Template<F> for Encoded<F> {
    #[inline]
    fn mapping(&self) -> Mapping {
        self.mapping
    }

    #[inline]
    fn page(&self) -> Result<u64, Inexpressible> {
        Ok(self.page)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Attrs {}
    impl Sealed for super::Mapping {}
    impl<F> Sealed for super::Encoded<F> {}
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Maps `span` to the memory from `frame` on.
    ///
    /// On arm64 and x86 a mapping of what was not mapped leaves nothing to invalidate, but to be
    /// made visible to the walkers, once for all that the gather maps.
    ///
    /// # Errors
    /// Any of [`EditError`] but [`NeedsBreak`](EditError::NeedsBreak) and
    /// [`NoSuchLeaf`](EditError::NoSuchLeaf); nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, EditError, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let mut gather = space.gather();
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// gather.map(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only())?;
    /// assert_eq!(gather.query(Va::new(0)).unwrap().size(), 4096);
    /// let again = gather.map(span, Pa::new(0), Attrs::USER_DATA);
    /// assert_eq!(again, Err(EditError::AlreadyMapped(Va::new(0))));
    /// gather.finish(|_| ());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn map(
        &mut self,
        span: Span<F::Input>,
        frame: Pa,
        mapping: impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check(span)?;
        check_memory::<F>(frame, span.size())?;
        let page = mapping.page()?;
        let memory = [Span::of_leaf(frame, span.size())];
        self.map_leaves(slice, &memory, page, &mapping.mapping())
    }

    /// Maps runs of frames, one after the other, to the addresses from `first` on: what a kernel
    /// has when memory was not to be had in one piece. Returns how many bytes were mapped.
    ///
    /// # Errors
    /// As [`map`](Gather::map); nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let frames = [0x9000, 0x3000, 0x7000].map(|frame| Span::new(Pa::new(frame), 4096).unwrap());
    /// let mut gather = space.gather();
    /// assert_eq!(gather.map_frames(Va::new(0x40_0000), &frames, Attrs::USER_DATA)?, 3 * 4096);
    /// gather.finish(|_| ());
    /// assert_eq!(space.query(Va::new(0x40_1000)).unwrap().frame(), Pa::new(0x3000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn map_frames(
        &mut self,
        first: F::Input,
        frames: &[Span<Pa>],
        mapping: impl Template<F>,
    ) -> Result<u64, EditError<F::Input>> {
        let mut size = 0u64;
        for run in frames {
            if !run.is_aligned(F::PAGE_SHIFT) {
                return Err(EditError::Misaligned);
            }
            check_memory::<F>(run.start(), run.size())?;
            size = size.checked_add(run.size()).ok_or(EditError::InputOutOfRange)?;
        }
        if size == 0 {
            return Ok(0);
        }
        let span = Span::new(first, size).map_err(|error| match error {
            AddressError::Misaligned { .. } => EditError::Misaligned,
            AddressError::Empty | AddressError::Wraps => EditError::InputOutOfRange,
        })?;
        let slice = self.space.check(span)?;
        let page = mapping.page()?;
        self.map_leaves(slice, frames, page, &mapping.mapping())?;
        Ok(size)
    }

    /// Maps one page: what a demand fault does. As [`map`](Gather::map) of a range of that size, in
    /// less code: a kernel that maps nothing but pages links nothing else.
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, EditError, Encoded, Pa, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let anonymous = Encoded::new(Attrs::USER_DATA)?;
    /// let mut gather = space.gather();
    /// gather.map_page(Va::new(0x7000), Pa::new(0x2000), anonymous)?;
    /// let again = gather.map_page(Va::new(0x7000), Pa::new(0x3000), anonymous);
    /// assert_eq!(again, Err(EditError::AlreadyMapped(Va::new(0x7000))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn map_page(
        &mut self,
        page: F::Input,
        frame: Pa,
        mapping: impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        self.complete_overlap(page.bits(), page.bits());
        self.space.map_leaf(page, frame, &mapping)?;
        self.mapped(Slice::around::<F>(page.bits(), Level::PAGE));
        Ok(())
    }

    /// Notes what walkers have to see.
    #[inline(always)]
    pub(super) fn mapped(&mut self, slice: Slice) {
        self.space.debt.stored();
        if self.space.platform.caps().invalid_entries_cached {
            self.invalidate_holes(slice);
        }
    }

    /// Notes that walkers may have cached that nothing was mapped.
    #[cold]
    #[inline(never)]
    fn invalidate_holes(&mut self, slice: Slice) {
        if self.space.is_live() {
            self.space.debt.begin_change();
            self.left.ranges.add(slice, None, true);
        }
    }

    /// Maps `slice` to `memory`, both of which have been checked. `page` is the descriptor of a
    /// page.
    #[inline]
    fn map_leaves(
        &mut self,
        slice: Slice,
        memory: &[Span<Pa>],
        page: u64,
        mapping: &Mapping,
    ) -> Result<(), EditError<F::Input>> {
        self.space.check_global(mapping.attrs.global)?;
        self.complete_overlap(slice.first, slice.last);
        let source = Source::new(slice.first, memory);
        // Fast path: holes of one table of pages.
        let in_table = match mapping.denied().is_empty() {
            true => self.space.pages_of(slice),
            false => None,
        };
        let filled = in_table.is_some_and(|(frame, range)| {
            let table = self.space.open(frame);
            let is_clear = table.is_clear(range.clone());
            let runs = match mapping.runs {
                true => F::contiguous(Level::PAGE),
                false => 0,
            };
            match memory {
                _ if !is_clear => {}
                // One run of frames whose descriptors follow each other.
                [run] if F::LINEAR_BITS >= 64 && runs == 0 && !F::is_parked(page) => {
                    let leaf = F::with_address(page, run.start());
                    table.fill(range, leaf, F::put_address(Pa::new(1 << F::PAGE_SHIFT)));
                }
                _ => {
                    let bits = (page, runs);
                    fill::<F, P>(&table, Level::PAGE, range, slice.first, bits, &source);
                }
            }
            is_clear
        });
        if !filled {
            self.map_tree(slice, source, page, mapping)?;
        }
        self.space.note_runs(mapping.runs);
        self.space.debt.add_globals(mapping.attrs.global);
        self.mapped(slice);
        Ok(())
    }

    /// Maps where tables are missing, or there are several.
    #[cold]
    #[inline(never)]
    fn map_tree(
        &mut self,
        slice: Slice,
        source: Source<'_>,
        page: u64,
        mapping: &Mapping,
    ) -> Result<(), EditError<F::Input>> {
        let (attrs, deny) = (&mapping.attrs, mapping.denied());
        let mut leaves = Leaves::<F>::of_pages(source, page, mapping.runs);
        if slice.holds::<F>(Level::PAGE.up()) {
            let largest = F::largest_leaf(&self.space.platform.caps()).min(mapping.largest);
            leaves.enlarge(slice, attrs, largest)?;
        }
        if !deny.is_empty() {
            self.space.cache.close::<F>();
        }
        let may_deny = self.space.may_deny();
        let space = &*self.space;
        let mut prepare = Prepare {
            platform: &space.platform,
            perms: may_deny.then_some(attrs.perms),
            deny,
            allocate: mapping.allocate,
            commit: Commit { leaves, slice },
            end: None,
        };
        let _: ControlFlow<()> = space.visit(slice, &mut prepare);
        match prepare.end {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                let _: ControlFlow<()> = space.visit(slice, &mut Undo(&space.platform));
                return Err(error);
            }
            None => {
                let _: ControlFlow<()> = space.visit(slice, &mut prepare.commit);
            }
        }
        Ok(())
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Maps one page, which is used at once: as [`Gather::map_page`], and made visible to the
    /// walkers.
    ///
    /// # Errors
    /// As there; nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Encoded, Pa, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let anonymous = Encoded::new(Attrs::USER_DATA)?; // once, for all faults
    /// space.map_page(Va::new(0x5000), Pa::new(0x8000), anonymous)?;
    /// assert_eq!(space.query(Va::new(0x5123)).unwrap().frame(), Pa::new(0x8000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn map_page(
        &mut self,
        page: F::Input,
        frame: Pa,
        mapping: impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        if F::RULE.breaks && self.debt.is_flush_pending() {
            // A gather was forgotten that may have unmapped the page: see
            // `Gather::complete_overlap`.
            self.flush_everything();
        }
        self.map_leaf(page, frame, &mapping)?;
        let live = self.is_live();
        if live && self.platform.caps().invalid_entries_cached {
            let slice = Slice::around::<F>(page.bits(), Level::PAGE);
            self.gather().invalidate_holes(slice);
        } else if live {
            self.platform.barrier(Barrier::Publish);
        }
        Ok(())
    }

    /// Maps one page.
    #[inline(always)]
    fn map_leaf(
        &mut self,
        page: F::Input,
        frame: Pa,
        template: &impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        let at = self.locate_open(page.bits());
        let leaf = self.leaf_of(frame, template)?;
        match at {
            Some(at) if self.fill_hole(at, leaf) => {}
            _ => self.map_any_page(page, leaf, &template.mapping())?,
        }
        self.debt.add_globals(template.mapping().attrs.global);
        Ok(())
    }

    /// The descriptor of a page, if the memory may be mapped here.
    #[inline]
    fn leaf_of(&self, frame: Pa, template: &impl Template<F>) -> Result<u64, EditError<F::Input>> {
        check_memory::<F>(frame, 1 << F::PAGE_SHIFT)?;
        let leaf = F::with_address(template.page()?, frame);
        self.check_global(template.mapping().attrs.global)?;
        Ok(leaf)
    }

    /// Writes a leaf where nothing is. Returns `false`, without side effects, if something is.
    #[inline(always)]
    fn fill_hole(&self, at: Located, leaf: u64) -> bool {
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&self.platform, at.frame, Level::PAGE) };
        let is_free = table.load(at.index) == 0;
        if is_free {
            table.store(at.index, leaf);
        }
        is_free
    }

    /// Maps a page where tables are missing, or something is in the way, or it is no page.
    #[cold]
    #[inline(never)]
    fn map_any_page(
        &mut self,
        page: F::Input,
        leaf: u64,
        mapping: &Mapping,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.check_page(page)?;
        // Usually another processor has handled the fault. Look up again instead of keeping `at`
        // live across the call; where the cached table has the page, nothing is denied.
        if self.cache.upper.number_of::<F>(slice.first).is_some()
            && let Some(at) = self.locate(slice.first)
        {
            // SAFETY: a walk has come to it.
            let table = unsafe { Table::open(&self.platform, at.frame, Level::PAGE) };
            if F::is_single_page(table.load(at.index)) {
                return Err(EditError::AlreadyMapped(page));
            }
        }
        let Reached { table, index, level, kind, denied, .. } = self.find(slice.first);
        if denied.intersects(mapping.attrs.perms) {
            return Err(EditError::Denied(page));
        }
        if kind != Kind::Invalid {
            return Err(EditError::AlreadyMapped(page));
        }
        if level == Level::PAGE {
            table.store(index, leaf);
            return Ok(());
        }
        if !mapping.allocate {
            return Err(EditError::NeedsTable(F::Input::from_bits(slice.first)));
        }
        let deny = mapping.denied();
        let child = build_path::<F, P>(&self.platform, level, slice.first, leaf, deny);
        let link = F::table(child.ok_or(EditError::OutOfTables)?, deny);
        table.link(index, link);
        drop(table);
        if !deny.is_empty() {
            self.cache.close::<F>();
        }
        Ok(())
    }
}

/// Checks that entries of pages, the first of which translates `first`, are holes.
#[cold]
#[inline(never)]
fn holes<F: Format, P: Platform>(
    table: &Table<'_, P>,
    range: Range<usize>,
    first: u64,
) -> Result<(), EditError<F::Input>> {
    let mut input = first;
    for index in range {
        if F::kind(table.load(index), Level::PAGE) != Kind::Invalid {
            return Err(EditError::AlreadyMapped(F::Input::from_bits(input)));
        }
        input = input.wrapping_add(1 << F::PAGE_SHIFT);
    }
    Ok(())
}

/// Checks that the range is free, and builds what is missing out of reach.
struct Prepare<'a, F: Format, P> {
    platform: &'a P,
    /// The permissions to be given, if tables may take some away.
    perms: Option<Perms>,
    deny: Perms,
    allocate: bool,
    commit: Commit<'a, F>,
    /// Why the range cannot be mapped; or all of it was one entry, or entries of one table of
    /// pages, so that nothing else could fail, and is committed.
    end: Option<Result<(), EditError<F::Input>>>,
}

impl<F: Format, P: Platform> Visit<F, P> for Prepare<'_, F, P> {
    fn fills_holes(&self) -> bool {
        true
    }

    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let at = F::Input::from_bits(slice.first);
        let refused = match (F::kind(entry, level), self.perms) {
            (Kind::Leaf, _) => EditError::AlreadyMapped(at),
            (Kind::Table, Some(perms)) if F::denied(entry).intersects(perms) => {
                EditError::Denied(at)
            }
            (Kind::Table, _) => return Step::Into(F::address(entry, level)),
            (Kind::Invalid, _) => match self.fill(table, index, level, slice) {
                Ok(()) => return Step::Next,
                Err(error) => error,
            },
        };
        self.end = Some(Err(refused));
        Step::Stop
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        if let Err(error) = holes::<F, P>(table, range.clone(), first) {
            self.end = Some(Err(error));
            return ControlFlow::Break(());
        }
        let last = first.wrapping_add((range.len() as u64) << F::PAGE_SHIFT).wrapping_sub(1);
        if self.commit.is_all(Slice { first, last }) {
            self.end = Some(Ok(()));
            return self.commit.pages(table, range, first);
        }
        ControlFlow::Continue(())
    }
}

impl<F: Format, P: Platform> Prepare<'_, F, P> {
    /// Has what belongs into a hole ready.
    fn fill(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> Result<(), EditError<F::Input>> {
        let leaves = &self.commit.leaves;
        if !leaves.fits(level, slice) {
            if !self.allocate {
                return Err(EditError::NeedsTable(F::Input::from_bits(slice.first)));
            }
            let below = level.down().ok_or(EditError::OutOfTables)?;
            let (platform, deny) = (self.platform, self.deny);
            let child = build(platform, &mut Fresh(platform), leaves, below, slice, deny)
                .ok_or(EditError::OutOfTables)?;
            table.replace::<F>(index, level, 0, F::suspend(F::table(child, deny)));
        }
        if self.commit.is_all(slice) {
            self.end = Some(Ok(()));
            let _done = self.commit.entry(table, index, level, slice);
        }
        Ok(())
    }
}

/// Takes out what [`Prepare`] put in.
struct Undo<'a, P>(&'a P);

impl<F: Format, P: Platform> Visit<F, P> for Undo<'_, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> Step {
        let entry = table.load(index);
        match (F::kind(entry, level), level.down()) {
            (Kind::Table, _) => {
                return Step::Into(F::address(entry, level));
            }
            (Kind::Invalid, Some(below)) if entry != 0 => {
                table.store(index, 0);
                free_tree::<F, P>(self.0, F::address(F::resume(entry), level), below);
            }
            _ => {}
        }
        Step::Next
    }
}

/// Writes the leaves that belong into tables that exist, and links the tables that were built.
struct Commit<'a, F: Format> {
    leaves: Leaves<'a, F>,
    slice: Slice,
}

impl<F: Format> Commit<'_, F> {
    /// Whether `part` is all of the range.
    #[inline]
    fn is_all(&self, part: Slice) -> bool {
        part.first == self.slice.first && part.last == self.slice.last
    }

    /// Whether the entry is a member of an aligned run of which all members are leaves of this
    /// mapping.
    fn in_run<P: Platform>(
        &self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
    ) -> bool {
        let count = 1usize << F::contiguous(level);
        let start_index = index & !(count - 1);
        // A member that is not one of our leaves is a table, there before or just built: valid or
        // suspended.
        self.leaves.may_be_in_run(level, first)
            && (start_index..start_index + count).all(|member| {
                let entry = table.load(member);
                entry == 0 || F::kind(entry, level) == Kind::Leaf
            })
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Commit<'_, F> {
    fn fills_holes(&self) -> bool {
        true
    }

    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        if F::kind(entry, level) == Kind::Table {
            return Step::Into(F::address(entry, level));
        }
        if entry != 0 {
            table.link(index, F::resume(entry));
        } else {
            let mark =
                if self.in_run(table, index, level, slice.first) { F::CONTIGUOUS } else { 0 };
            let leaf = self.leaves.leaf(level, slice.first) | mark;
            table.replace::<F>(index, level, entry, leaf);
        }
        Step::Next
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        self.leaves.fill(table, Level::PAGE, range, first);
        ControlFlow::Continue(())
    }
}

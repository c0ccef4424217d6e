//! Many leaves at once: what a hypervisor maps before the guest asks for it.

use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Pa, Span};
use crate::edit::EditError;
use crate::edit::{Fresh, Leaves, Mapping, Source, build};
use crate::flush::free_tree;
use crate::format::{Format, Kind, Perms};
use crate::platform::Barrier;
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

use super::{Refused, SharedPlatform, SharedSpace};

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Maps what is not mapped in `span` to the memory from `frame` on. Other processors may be
    /// mapping, and taking away, in the same range. A new sub-tree is filled out of reach and
    /// linked by one compare-exchange; where memory has to be cleaned, it is cleaned once, by the
    /// processor that installs it, a table at a time. What is mapped already stays. Tables come
    /// from the platform, and deny nothing, whatever the mapping says. Returns how many bytes were
    /// mapped.
    ///
    /// # Errors
    /// [`Refused::Busy`] at the first address that another edit is at, with everything below it
    /// mapped. [`Refused::NeedsTables`] if the platform has none left. [`Refused::Edit`]: nothing
    /// has changed.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::SharedSpace;
    /// # let platform = Threads::new(64, 12, 1);
    /// let space =
    ///     SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap()).unwrap();
    /// let span = Span::new(Va::new(0), 64 << 20)?;
    /// let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
    /// assert_eq!(space.map_range(span, Pa::new(0), mapping), Ok(64 << 20));
    /// assert_eq!(space.map_range(span, Pa::new(0), mapping), Ok(0));
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn map_range(
        &self,
        span: Span<F::Input>,
        frame: Pa,
        mapping: Mapping,
    ) -> Result<u64, Refused<F::Input>> {
        let slice = self.check(span)?;
        if !frame.is_aligned(F::PAGE_SHIFT) {
            return Err(EditError::Misaligned.into());
        }
        let last = frame.get().checked_add(slice.last - slice.first);
        if last.is_none_or(|last| last >> F::OUTPUT_BITS != 0) {
            return Err(EditError::OutputOutOfRange.into());
        }
        let attrs = mapping.attrs();
        let memory = [Span::of_leaf(frame, span.size())];
        let source = Source::new(slice.first, &memory);
        let largest = F::largest_leaf(&self.caps()).min(mapping.top());
        let leaves =
            Leaves::<F>::new(slice, source, &attrs, largest, false).map_err(EditError::from)?;
        let (clean, instructions) = self.maintenance(&attrs, Perms::empty());
        self.map_global(attrs.global);
        let mut bulk = Bulk { space: self, leaves, clean, instructions, mapped: 0, refused: None };
        let _walk = self.platform().enter();
        let _: ControlFlow<()> = self.visit(slice, &mut bulk);
        self.platform().barrier(Barrier::Publish);
        bulk.refused.map_or(Ok(bulk.mapped), Err)
    }
}

struct Bulk<'a, F: Format, P: SharedPlatform> {
    space: &'a SharedSpace<F, P>,
    leaves: Leaves<'a, F>,
    clean: bool,
    instructions: bool,
    mapped: u64,
    refused: Option<Refused<F::Input>>,
}

impl<F: Format, P: SharedPlatform + Clone> Bulk<'_, F, P> {
    fn needs_cache_maintenance(&self) -> bool {
        self.clean || self.instructions
    }

    /// Whether all that is below an entry is built before any of it is linked. At most one table's
    /// worth of memory is cleaned under one claim. Where another processor may well be building the
    /// rest, or much would be built in vain if one were, an empty table is linked and filled from
    /// there.
    fn may_link_at_once(&self, level: Level, slice: Slice) -> bool {
        !self.needs_cache_maintenance() && level.height() <= 2 && slice.is_whole::<F>(level)
    }

    /// Puts something in the place of a hole: `make` says what. Where caches need something for the
    /// memory of `slice`, under a claim. Gives what was there instead, after undoing what `make`
    /// did by `unmake`.
    fn fill_hole(
        &self,
        table: &Table<'_, P>,
        index: usize,
        slice: Slice,
        make: impl FnOnce() -> Option<u64>,
        unmake: impl FnOnce(u64),
    ) -> Result<Option<u64>, ()> {
        if !self.needs_cache_maintenance() {
            let new = make().ok_or(())?;
            let filled = table.compare_exchange(index, 0, new);
            return Ok(filled.err().inspect(|_| unmake(new)));
        }
        if let Err(now) = table.compare_exchange(index, 0, F::FROZEN) {
            return Ok(Some(now));
        }
        let new = make();
        if new.is_some() {
            let memory = self.leaves.memory(slice.first);
            let size = slice.last - slice.first + 1;
            self.space.maintain(memory, size, self.clean, self.instructions);
        }
        table.link(index, new.unwrap_or(0));
        new.map(|_| None).ok_or(())
    }
}

impl<F: Format, P: SharedPlatform + Clone> Visit<F, P> for Bulk<'_, F, P> {
    fn fills_holes(&self) -> bool {
        true
    }

    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let Some(below) = level.down() else {
            return Step::Next;
        };
        let platform = self.space.platform();
        let busy = Refused::Busy(F::Input::from_bits(slice.first));
        let mut entry = table.follow(index);
        // A hole that is taken away and comes back is another edit at work.
        for _ in 0..4 {
            match F::kind(entry, level) {
                Kind::Table => return Step::Into(F::address(entry, level)),
                Kind::Leaf => return Step::Next,
                Kind::Invalid if entry != 0 => break,
                Kind::Invalid => {}
            }
            let leaf = self.leaves.fits(level, slice);
            let whole = below == Level::PAGE || self.may_link_at_once(level, slice);
            let done = if leaf && whole {
                let bits = self.leaves.leaf(level, slice.first);
                self.fill_hole(table, index, slice, || Some(bits), |_| ())
            } else if whole {
                let make = || {
                    let mut fresh = Fresh(platform);
                    build::<F, P>(platform, &mut fresh, &self.leaves, below, slice, Perms::empty())
                        .map(|frame| F::table(frame, Perms::empty()))
                };
                let unmake = |link| free_tree::<F, P>(platform, F::address(link, level), below);
                self.fill_hole(table, index, slice, make, unmake)
            } else {
                self.link_empty(table, index, below)
            };
            match done {
                Ok(None) if whole => {
                    self.mapped += slice.last - slice.first + 1;
                    return Step::Next;
                }
                Ok(None) => entry = table.follow(index),
                Ok(Some(now)) => entry = now,
                Err(()) => {
                    self.refused = Some(Refused::NeedsTables(1));
                    return Step::Stop;
                }
            }
        }
        self.refused = Some(busy);
        Step::Stop
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        let size = 1u64 << F::PAGE_SHIFT;
        let mut at = first;
        for index in range {
            let slice = Slice { first: at, last: at + (size - 1) };
            let mut entry = table.load(index);
            if entry == 0 {
                let bits = self.leaves.leaf(Level::PAGE, at);
                match self.fill_hole(table, index, slice, || Some(bits), |_| ()) {
                    Ok(Some(now)) => entry = now,
                    _ => self.mapped += size,
                }
            }
            if entry != 0 && F::kind(entry, Level::PAGE) == Kind::Invalid {
                self.refused = Some(Refused::Busy(F::Input::from_bits(at)));
                return ControlFlow::Break(());
            }
            at = at.wrapping_add(size);
        }
        ControlFlow::Continue(())
    }
}

impl<F: Format, P: SharedPlatform + Clone> Bulk<'_, F, P> {
    /// Links an empty table in a hole.
    fn link_empty(
        &self,
        table: &Table<'_, P>,
        index: usize,
        below: Level,
    ) -> Result<Option<u64>, ()> {
        let platform = self.space.platform();
        let frame = platform.alloc_table(below).ok_or(())?;
        // SAFETY: just allocated.
        let new = unsafe { Table::open(platform, frame, below) };
        new.fill(0..1 << F::INDEX_BITS, 0, 0);
        drop(new);
        match table.compare_exchange(index, 0, F::table(frame, Perms::empty())) {
            Ok(()) => Ok(None),
            Err(now) => {
                free_tree::<F, P>(platform, frame, below);
                Ok(Some(now))
            }
        }
    }
}

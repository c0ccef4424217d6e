//! Empty tables are freed while other processors map.
//!
//! A table that was empty at a look may have a leaf at the next. So it is *sealed* first: each of
//! its holes is exchanged for a claim. A walk that is on its way to one is told that it is busy,
//! and puts nothing there. Where something is found, the claims become holes again. A table that is
//! sealed is cut off by one exchange of the entry that points to it. Nothing that is mapped is ever
//! out of reach.

use core::ops::ControlFlow;

use crate::addr::{Address, Level, Span};
use crate::edit::EditError;
use crate::flush::{Fate, Progress};
use crate::format::{Format, Kind, Perms};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit, walk};

use super::{Gather, SharedPlatform};

impl<F: Format, P: SharedPlatform + Clone> Gather<'_, F, P> {
    /// Takes the tables out that map nothing and lie in `span` whole, so that they are freed with
    /// the gather: after a balloon, or a report of free pages, has taken the pages away. What is
    /// mapped stays mapped meanwhile. Stops where no more tables can be carried.
    ///
    /// Entries that this gather has unmapped count as empty. A table may stay if another gather has
    /// unmapped entries of it and is not complete.
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
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// space.map_range(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only()).unwrap();
    /// let mut gather = space.gather();
    /// for page in 0..512 {
    ///     let page = Span::new(Va::new(page << 12), 0x1000)?;
    ///     let taken = gather.unmap(page, |_| ControlFlow::Continue(())).unwrap();
    ///     assert!(taken.progress.is_done());
    /// }
    /// let all = Span::new(Va::new(0), 1 << 47)?;
    /// assert!(gather.prune(all).unwrap().is_done());
    /// assert!(gather.finish(|_| ()).is_ok());
    /// assert_eq!(platform.tables(), 1); // the root
    /// # Ok::<(), tablewright::AddressError>(())
    /// ```
    pub fn prune(
        &mut self,
        span: Span<F::Input>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        let space = self.space;
        let slice = space.check(span)?;
        let mark = self.mark();
        let _walk = space.platform().enter();
        let mut prune = Prune { gather: self, mark, end: None };
        let _: ControlFlow<()> = space.visit(slice, &mut prune);
        let end = prune.end;
        Ok(end.map_or(Progress::Done, |at| Progress::Stopped(F::Input::from_bits(at))))
    }
}

struct Prune<'a, 's, F: Format, P: SharedPlatform + Clone> {
    gather: &'a mut Gather<'s, F, P>,
    /// The mark that the gather leaves in the place of what it takes.
    mark: u64,
    /// The address at which it has stopped, if it has.
    end: Option<u64>,
}

impl<F: Format, P: SharedPlatform + Clone> Prune<'_, '_, F, P> {
    /// Whether nothing is in a table but what this gather has left there.
    fn is_empty(&self, table: &Table<'_, P>) -> bool {
        let is_hole = |entry: u64| entry == 0 || entry == self.mark;
        (0..1 << F::INDEX_BITS).all(|index| is_hole(table.load(index)))
    }

    /// Seals a table, if nothing is in it.
    fn seal(&self, table: &Table<'_, P>) -> bool {
        let entries = 1 << F::INDEX_BITS;
        let mut sealed = 0;
        while sealed < entries {
            match table.compare_exchange(sealed, 0, F::FROZEN) {
                Err(now) if now != self.mark => break,
                _ => sealed += 1,
            }
        }
        if sealed < entries {
            self.unseal(table, sealed);
        }
        sealed == entries
    }

    /// Makes holes of the first `sealed` entries of a table, which this gather has sealed.
    ///
    /// Goes upwards, as sealing does: another gather that seals what is a hole again stops at the
    /// next claim, and never passes this loop.
    fn unseal(&self, table: &Table<'_, P>, sealed: usize) {
        for index in 0..sealed {
            if table.load(index) == F::FROZEN {
                table.store(index, 0);
            }
        }
    }
}

impl<F: Format, P: SharedPlatform + Clone> Visit<F, P> for Prune<'_, '_, F, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let mut entry = table.follow(index);
        let (Kind::Table, Some(below)) = (F::kind(entry, level), level.down()) else {
            return Step::Next;
        };
        let (platform, frame) = (self.gather.space.platform(), F::address(entry, level));
        if below != Level::PAGE {
            // SAFETY: what a descriptor of the tree points to; a walk is entered.
            let walked = unsafe { walk::<F, P>(platform, frame, below, slice, self) };
            if walked.is_break() {
                return Step::Stop;
            }
        }
        // SAFETY: as above.
        let child = unsafe { Table::open(platform, frame, below) };
        if !slice.is_whole::<F>(level) || !self.is_empty(&child) {
            return Step::Next;
        }
        if !self.gather.flush.has_room(platform, frame) {
            self.end = Some(slice.first);
            return Step::Stop;
        }
        if !self.seal(&child) {
            return Step::Next;
        }
        self.gather.count.begin();
        while let Err(now) = table.compare_exchange(index, entry, self.mark) {
            // A walker has set a flag of the entry, or the table was write-protected or opened. If
            // not, another has cut the table off, and frees it as it is.
            if F::kind(now, level) != Kind::Table || F::address(now, level) != frame {
                return Step::Next;
            }
            entry = now;
        }
        let flush = &mut self.gather.flush;
        flush.carry(platform, frame, below, slice.first, Perms::empty(), Fate::Unmapped);
        // At every level: TLBs may hold leaves that others have taken out of the table, and a block
        // may be put in its place.
        flush.ranges.add(slice, None, true);
        Step::Next
    }
}

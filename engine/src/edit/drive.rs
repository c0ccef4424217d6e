//! The driver of edits: where an operation is done, and what it leaves.
//!
//! An operation is a [`Visit`]: it is handed ranges of entries of one table, through one indirect
//! call, and loops over them itself. The [walk](crate::walk) brings it to the tables of a range: it
//! is compiled once for all operations. Pages of one table are a range of entries like any other,
//! which the fast path of an operation comes to from the cached table. An edit has two passes: one
//! that looks, and allocates, and may fail; then one that cannot.
//!
//! An edit of a live space owes three things to the walkers:
//!
//! * *What they have to forget or to see.* A [`Footprint`] collects it during a walk; it goes to
//!   the gather.
//! * *Breaks.* A leaf that has to be broken is left suspended in its entry, in its new form, where
//!   a walker sees an invalid one. Then every processor is made to forget, once for all of them,
//!   and
//!   [`finish_break`](Gather::finish_break) makes the entries valid. Between the two passes the
//!   addresses are not mapped.
//! * *Refusals*, in a space that must not be broken: a [`Check`] before anything has changed.

use core::ops::{ControlFlow, Range};

use super::Change;
use crate::addr::{Address, Level};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError};
use crate::flush::Flush;
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit, one_by_one};

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Whether rewriting leaves by `change` may have to be refused because it needs a break.
    pub(super) fn may_refuse(&self, change: &Change) -> bool {
        let Conditions { live, may_break, caps } = self.conditions();
        let in_runs = self.debt.has_runs() && caps.bbm < 1;
        F::RULE.breaks
            && live
            && !may_break
            && (change.changes_type() || change.turns_global() || in_runs)
    }
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// The second half of a break-before-make, if the first half has broken anything in `slice`.
    #[inline]
    pub(super) fn finish_break(&mut self, slice: Slice, broken: Footprint) {
        if F::RULE.breaks && broken.slice().is_some() {
            self.note(broken);
            self.resume(slice);
        }
    }

    /// Completes what is pending, and makes what is suspended in `slice` valid.
    #[inline(never)]
    pub(super) fn resume(&mut self, slice: Slice) {
        self.complete_pending();
        let _: ControlFlow<()> = self.space.visit(slice, &mut Resume);
        self.space.platform.barrier(Barrier::Publish);
    }
}

/// The footprint of a walk's changes: the hull of the addresses, the level of the leaves if there
/// is one, and whether tables were among them.
#[derive(Clone, Copy)]
pub(super) struct Footprint {
    /// Empty if the first is above the last.
    slice: Slice,
    level: Option<Level>,
    tables: bool,
    /// Walkers have to see something that no TLB holds.
    needs_publish: bool,
}

impl Footprint {
    pub const EMPTY: Self = Self {
        slice: Slice { first: u64::MAX, last: 0 },
        level: None,
        tables: false,
        needs_publish: false,
    };

    /// Adds leaves at `level`, or tables if there is none.
    #[inline]
    pub fn add(&mut self, Slice { first, last }: Slice, level: Option<Level>) {
        if self.slice().is_none() || self.level == level {
            self.level = level;
        } else {
            self.level = None;
        }
        self.slice.first = self.slice.first.min(first);
        self.slice.last = self.slice.last.max(last);
        self.tables |= level.is_none();
    }

    /// Adds a store that walkers have to see.
    #[inline]
    pub fn add_store(&mut self) {
        self.needs_publish = true;
    }

    /// The addresses.
    #[inline]
    pub fn slice(&self) -> Option<Slice> {
        (self.slice.first <= self.slice.last).then_some(self.slice)
    }

    #[inline]
    pub fn add_to(self, flush: &mut Flush) {
        if let Some(slice) = self.slice() {
            flush.ranges.add(slice, self.level, self.tables);
        }
        flush.needs_publish |= self.needs_publish;
    }
}

/// The pass that looks whether an edit has to be refused, and changes nothing.
pub(super) struct Check<F: Format, R> {
    /// Whether a leaf has to be refused, because it would have to be broken.
    refuse: R,
    /// The permissions that the edit gives, if tables may deny some.
    perms: Option<Perms>,
    found: Option<EditError<F::Input>>,
}

impl<F: Format, R: FnMut(u64, Level) -> bool> Check<F, R> {
    /// Looks at what is in `slice`.
    ///
    /// # Errors
    /// [`EditError::Denied`] and [`EditError::NeedsBreak`], at the first entry that is refused.
    pub fn run<P: Platform + Clone>(
        space: &AddressSpace<F, P>,
        slice: Slice,
        perms: Option<Perms>,
        refuse: R,
    ) -> Result<(), EditError<F::Input>> {
        let mut check = Self { refuse, perms, found: None };
        let _: ControlFlow<()> = space.visit(slice, &mut check);
        check.found.map_or(Ok(()), Err)
    }
}

impl<F: Format, P: Platform, R: FnMut(u64, Level) -> bool> Visit<F, P> for Check<F, R> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        let at = F::Input::from_bits(slice.first);
        match (F::kind(entry, level), self.perms) {
            (Kind::Table, Some(perms)) if F::denied(entry).intersects(perms) => {
                self.found = Some(EditError::Denied(at));
                Step::Stop
            }
            (Kind::Table, _) => Step::Into(F::address(entry, level)),
            (Kind::Leaf, _) if (self.refuse)(entry, level) => {
                self.found = Some(EditError::NeedsBreak(at));
                Step::Stop
            }
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        one_by_one(self, table, range, first)
    }
}

/// Makes suspended entries valid.
pub(super) struct Resume;

impl<F: Format, P: Platform> Visit<F, P> for Resume {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, _: Slice) -> Step {
        let mut entry = table.load(index);
        if entry != 0 && F::kind(entry, level) == Kind::Invalid {
            entry = F::resume(entry);
            // Release: the tables that a split has left here were filled before.
            table.link(index, entry);
        }
        match F::kind(entry, level) {
            // In what was split further, something was left suspended as well.
            Kind::Table => Step::Into(F::address(entry, level)),
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, _: u64) -> ControlFlow<()> {
        let mut index = range.start;
        while index < range.end {
            // Most have neighbours that were broken with them.
            let (has, becomes) = (F::SUSPENDED, F::resume(F::SUSPENDED));
            index = table.recode(index..range.end, has, has, becomes) + 1;
        }
        ControlFlow::Continue(())
    }
}

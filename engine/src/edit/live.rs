//! What an edit owes to the walkers that use the space meanwhile.
//!
//! Three things, and an edit of a dead space owes none of them:
//!
//! * *What they have to forget*, or to see. A [`Footprint`] collects it during a walk, and leaves
//!   it to the gather.
//! * *What has to be broken.* Such an edit has two passes with one invalidation between them,
//!   however many entries there are: the first takes each entry away and leaves its successor in
//!   its place, suspended; then every walker is made to forget; the second,
//!   [`resume`](AddressSpace::resume), makes the successors valid. Between them the addresses are
//!   not mapped.
//! * *What has to be refused*, in a space whose ground must not be pulled away: a [`Look`] before
//!   anything has changed.

use core::ops::{ControlFlow, Range};

use super::Change;
use crate::addr::{Address, Level};
use crate::edit::space::{AddressSpace, Conditions, EditError};
use crate::flush::{Flush, Ranges};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit, one_by_one};

/// What was changed in a walk: from the first to the last address, at which level, with or without
/// tables.
#[derive(Clone, Copy)]
pub(super) struct Footprint {
    /// Nothing, if the first is above the last.
    slice: Slice,
    level: Option<Level>,
    tables: bool,
    /// Something was changed that no TLB holds, and that walkers have to see.
    news: bool,
}

impl Footprint {
    #[inline(always)]
    pub fn new() -> Self {
        Self {
            slice: Slice {
                first: u64::MAX,
                last: 0,
            },
            level: None,
            tables: false,
            news: false,
        }
    }

    /// Adds leaves at `level`, or tables where there is none.
    #[cfg_attr(not(feature = "small"), inline)]
    #[cfg_attr(feature = "small", inline(never))]
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

    /// Adds leaves that no walker remembers.
    #[inline(always)]
    pub fn add_news(&mut self) {
        self.news = true;
    }

    /// Adds what another walk changed.
    pub fn merge(&mut self, other: Self) {
        self.news |= other.news;
        if let Some(slice) = other.slice() {
            self.add(slice, other.level);
            self.tables |= other.tables;
        }
    }

    /// The addresses.
    #[inline]
    pub fn slice(&self) -> Option<Slice> {
        (self.slice.first <= self.slice.last).then_some(self.slice)
    }

    /// Leaves it to the gather, if there is any walker.
    #[inline]
    pub fn add_to(self, conditions: Conditions, flush: &mut Flush) {
        if !conditions.live {
            return;
        }
        if let Some(slice) = self.slice() {
            flush.ranges.add(slice, self.level, self.tables);
        }
        flush.news |= self.news;
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// Whether rewriting leaves by `change` may have to be refused because it needs a break.
    pub(super) fn may_refuse(&self, change: &Change) -> bool {
        let Conditions {
            live,
            may_break,
            caps,
        } = self.conditions();
        let in_runs = self.runs && caps.bbm < 1;
        F::RULE.breaks()
            && live
            && !may_break
            && (change.changes_type() || change.turns_global() || in_runs)
    }

    /// The second half of a break-before-make: makes every walker forget what was broken in
    /// `slice`, and makes what was left suspended in the entries valid.
    #[inline(always)]
    pub(super) fn resume(&self, slice: Slice, broken: &Footprint) {
        if let Some(extent) = broken.slice() {
            let mut ranges = Ranges::new();
            ranges.add(extent, broken.level, broken.tables);
            self.resume_broken(slice, &mut ranges);
        }
    }

    /// The same of more than one range, of which there is one.
    #[inline(never)]
    pub(super) fn resume_broken(&self, slice: Slice, broken: &mut Ranges) {
        self.invalidate_now(broken);
        let _: ControlFlow<()> = self.visit(slice, &mut Resume);
        self.platform.barrier(Barrier::Publish);
    }
}

/// Looks whether an edit would have to be refused, and changes nothing.
pub(super) struct Look<F: Format, R> {
    /// Whether a leaf would have to be broken.
    refuse: R,
    /// The permissions that the edit gives, if tables may take some away.
    perms: Option<Perms>,
    /// What has to be refused.
    found: Option<EditError<F::Input>>,
}

impl<F: Format, R: FnMut(u64, Level) -> bool> Look<F, R> {
    pub fn new(refuse: R, perms: Option<Perms>) -> Self {
        Self {
            refuse,
            perms,
            found: None,
        }
    }

    /// Looks at what is in `slice`.
    pub fn at<P: Platform + Clone>(
        mut self,
        space: &AddressSpace<F, P>,
        slice: Slice,
    ) -> Result<(), EditError<F::Input>> {
        let _: ControlFlow<()> = space.visit(slice, &mut self);
        self.found.map_or(Ok(()), Err)
    }
}

impl<F: Format, P: Platform, R: FnMut(u64, Level) -> bool> Visit<F, P> for Look<F, R> {
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
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => Step::Into(F::address(entry, level)),
            // The tables that a split left here were filled before; the link publishes them.
            Kind::Invalid if entry != 0 => {
                let back = F::resume(entry);
                table.link(index, back);
                match F::kind(back, level) {
                    // In what was split further something was left as well.
                    Kind::Table => Step::Into(F::address(back, level)),
                    _ => Step::Next,
                }
            }
            _ => Step::Next,
        }
    }

    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<()> {
        one_by_one::<F, P>(self, table, range, first)
    }
}

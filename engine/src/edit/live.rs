//! What an edit owes to the walkers that use the space meanwhile.
//!
//! Three things, and an edit of a dead space owes none of them:
//!
//! * *What they have to forget*, or to see. A [`Cut`] collects it during a walk, and leaves it to the gather.
//! * *What has to be broken.* Such an edit has two passes with one invalidation between them, however many entries there
//!   are: the first takes each entry away and leaves its successor in its place, suspended; then every walker is made to
//!   forget; the second, [`resume`](AddressSpace::resume), makes the successors valid. Between them the addresses are
//!   not mapped.
//! * *What has to be refused*, in a space whose ground must not be pulled away: a [`Look`] before anything has changed.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use super::Change;
use crate::addr::{Address, Level};
use crate::edit::space::{AddressSpace, Conditions, EditError};
use crate::flush::{Flush, Ranges};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::walk::{Slice, Step, Visit};

/// What was changed in a walk: from the first to the last address, at which level, with or without tables.
#[derive(Clone, Copy, Default)]
pub(super) struct Cut {
    bounds: Option<(u64, u64)>,
    level: Option<Level>,
    tables: bool,
    /// Something was changed that no TLB holds, and that walkers have to see.
    news: bool,
}

impl Cut {
    /// Adds leaves at `level`, or tables where there is none.
    #[inline(always)]
    pub fn add(&mut self, slice: Slice, level: Option<Level>) {
        self.merge(Self {
            bounds: Some((slice.first, slice.last)),
            level,
            tables: level.is_none(),
            news: false,
        });
    }

    /// Adds leaves that no walker remembers.
    #[inline(always)]
    pub fn add_news(&mut self) {
        self.news = true;
    }

    /// Adds what another walk changed.
    #[inline(always)]
    pub fn merge(&mut self, other: Self) {
        self.news |= other.news;
        if let Some((first, last)) = other.bounds {
            let (low, high) = self.bounds.unwrap_or((first, last));
            self.level = match self.bounds {
                Some(_) if self.level != other.level => None,
                _ => other.level,
            };
            self.bounds = Some((low.min(first), high.max(last)));
            self.tables |= other.tables;
        }
    }

    /// The addresses.
    pub fn slice(self) -> Option<Slice> {
        self.bounds.map(|(first, last)| Slice { first, last })
    }

    /// Leaves it to the gather, if there is any walker.
    #[inline]
    pub fn add_to(self, conditions: Conditions, flush: &mut Flush) {
        if !conditions.live {
            return;
        }
        if let Some((first, last)) = self.bounds {
            flush
                .ranges
                .add(Slice { first, last }, self.level, self.tables);
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

    /// The second half of a break-before-make: makes every walker forget what was broken in `slice`, and makes what
    /// was left suspended in the entries valid.
    #[inline(always)]
    pub(super) fn resume(&self, slice: Slice, broken: &Ranges) {
        if !broken.is_empty() {
            self.resume_broken(slice, broken);
        }
    }

    #[inline(never)]
    fn resume_broken(&self, slice: Slice, broken: &Ranges) {
        self.invalidate_now(broken);
        let _: ControlFlow<_> = self.visit_rarely(slice, &mut Resume);
        self.platform.barrier(Barrier::Publish);
    }
}

/// Looks whether an edit would have to be refused, and changes nothing.
pub(super) struct Look<F, R> {
    /// Whether a leaf would have to be broken.
    pub refuse: R,
    /// The permissions that the edit gives, if tables may take some away.
    pub perms: Option<Perms>,
    pub format: PhantomData<F>,
}

impl<F: Format, P: Platform, R: FnMut(u64, Level) -> bool> Visit<F, P> for Look<F, R> {
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
            (Kind::Table, Some(perms)) if F::denied(entry).intersects(perms) => {
                ControlFlow::Break(EditError::Denied(at))
            }
            (Kind::Table, _) => ControlFlow::Continue(Step::Into(F::address(entry, level))),
            (Kind::Leaf, _) if (self.refuse)(entry, level) => {
                ControlFlow::Break(EditError::NeedsBreak(at))
            }
            _ => ControlFlow::Continue(Step::Next),
        }
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        first: u64,
    ) -> ControlFlow<Self::Stop> {
        let mut input = first;
        for index in range {
            if (self.refuse)(table.load(index), Level::PAGE) {
                return ControlFlow::Break(EditError::NeedsBreak(F::Input::from_bits(input)));
            }
            input = input.wrapping_add(1 << F::PAGE_SHIFT);
        }
        ControlFlow::Continue(())
    }
}

/// Makes suspended entries valid.
pub(super) struct Resume;

impl<F: Format, P: Platform> Visit<F, P> for Resume {
    type Stop = EditError<F::Input>;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        _: Slice,
    ) -> ControlFlow<Self::Stop, Step> {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => return ControlFlow::Continue(Step::Into(F::address(entry, level))),
            // The tables that a split left here were filled before; the link publishes them.
            Kind::Invalid if entry != 0 => table.link(index, F::resume(entry)),
            _ => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    fn pages(
        &mut self,
        table: &Table<'_, P>,
        range: Range<usize>,
        _: u64,
    ) -> ControlFlow<Self::Stop> {
        for index in range {
            let entry = table.load(index);
            if F::kind(entry, Level::PAGE) == Kind::Invalid && entry != 0 {
                table.store(index, F::resume(entry));
            }
        }
        ControlFlow::Continue(())
    }
}

//! The ranges of one flush: they merge, and become everything where they are too many.

use core::mem::MaybeUninit;

use crate::addr::{Level, Pa};
use crate::format::Format;
use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
use crate::platform::{Barrier, Platform};
use crate::shootdown::Identity;
use crate::walk::Slice;

/// The space that a flush is about.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub root: Pa,
    /// Under which it is loaded, if its root has no identity.
    pub id: u16,
    /// The space may hold global translations.
    pub global: bool,
}

impl Target {
    /// What is to be forgotten, of changes that are published: under the identifier that the space has by now.
    #[inline(always)]
    pub fn forgetting<'w, P: Platform>(self, platform: &P, what: What<'w>) -> Invalidation<'w> {
        let Self { root, id, global } = self;
        let id = platform
            .identity_of(root)
            .map_or(id, Identity::id_after_changes);
        Invalidation {
            root,
            id,
            global,
            what,
        }
    }
}

/// Ranges to invalidate: merged, bounded.
pub(crate) struct Ranges {
    items: [MaybeUninit<Stale>; MAX_RANGES],
    /// So many items are initialised.
    len: usize,
    /// All of the space is to be forgotten, whatever the ranges say.
    pub everything: bool,
    overflowed: bool,
}

impl Ranges {
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            items: [const { MaybeUninit::uninit() }; MAX_RANGES],
            len: 0,
            everything: false,
            overflowed: false,
        }
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0 && !self.everything
    }

    #[inline(always)]
    pub fn clear(&mut self) {
        self.len = 0;
        self.everything = false;
        self.overflowed = false;
    }

    /// The ranges; together they hold every address that was added, everything or not.
    #[inline]
    pub fn as_slice(&self) -> &[Stale] {
        // SAFETY: the first `len` items were written by `add`.
        unsafe { core::slice::from_raw_parts(self.items.as_ptr().cast(), self.len) }
    }

    /// The same ranges. Copies no more than there are.
    pub fn copy(&self) -> Self {
        let mut copy = Self::new();
        copy.len = self.len;
        for (to, from) in copy.items.iter_mut().zip(self.as_slice()) {
            to.write(*from);
        }
        copy
    }

    #[inline]
    fn as_mut_slice(&mut self) -> &mut [Stale] {
        // SAFETY: the first `len` items were written by `add`.
        unsafe { core::slice::from_raw_parts_mut(self.items.as_mut_ptr().cast(), self.len) }
    }

    /// Whether any address of `slice` was added.
    pub fn overlap(&self, slice: Slice) -> bool {
        let overlaps = |item: &Stale| slice.first <= item.last && item.first <= slice.last;
        self.as_slice().iter().any(overlaps)
    }

    /// Adds a range. `level` is that of all its leaves, if known.
    #[inline(always)]
    pub fn add(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        let Slice { first, last } = slice;
        match self.as_mut_slice().last_mut() {
            // Most edits go upwards, and begin where the last one ended.
            Some(item)
                if first.wrapping_sub(item.last) == 1
                    && first != 0
                    && (item.level, item.tables) == (level, tables) =>
            {
                item.last = last;
            }
            Some(_) => self.insert(slice, level, tables),
            None => self.push(Stale {
                first,
                last,
                level,
                tables,
            }),
        }
    }

    /// Adds one more, if there is room.
    #[inline(always)]
    fn push(&mut self, item: Stale) {
        match self.items.get_mut(self.len) {
            Some(place) => {
                place.write(item);
                self.len += 1;
            }
            None => self.overflowed = true,
        }
    }

    #[inline(never)]
    fn insert(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        let Slice { first, last } = slice;
        if self.overflowed {
            return self.stretch(slice);
        }
        // Edits go upwards through the space, so a range that can be merged is nearly always the last one.
        for item in self.as_mut_slice().iter_mut().rev() {
            let touches =
                first <= item.last.saturating_add(1) && item.first <= last.saturating_add(1);
            let overlaps = first <= item.last && item.first <= last;
            // Ranges that merely touch stay apart if one hint is not right for both; those that overlap lose it.
            if overlaps || touches && item.level == level && item.tables == tables {
                item.first = item.first.min(first);
                item.last = item.last.max(last);
                if item.level != level {
                    item.level = None;
                }
                item.tables |= tables;
                return;
            }
        }
        self.push(Stale {
            first,
            last,
            level,
            tables,
        });
        if self.overflowed {
            self.stretch(slice);
        }
    }

    /// There is no room for one more: the last is stretched over it and what lies between, so that the ranges still hold all
    /// that was changed.
    fn stretch(&mut self, slice: Slice) {
        if let Some(item) = self.as_mut_slice().last_mut() {
            item.first = item.first.min(slice.first);
            item.last = item.last.max(slice.last);
            item.level = None;
            item.tables = true;
        }
    }

    /// Issues the invalidations; the stores they are about become visible first. Returns whether there were any.
    pub fn issue<F: Format, P: Platform>(&self, platform: &P, target: Target) -> bool {
        if self.is_empty() {
            return false;
        }
        platform.barrier(Barrier::Publish);
        let operations = self.as_slice().iter().fold(0u64, |sum, item| {
            let shift = item.level.map_or(F::PAGE_SHIFT, F::shift);
            // They are fewer than there are pages in as many input spaces as there can be ranges: no overflow.
            sum.wrapping_add(((item.last - item.first) >> shift) + 1)
        });
        let what = if self.everything
            || self.overflowed
            || operations > platform.caps().invalidate_all_above
        {
            What::Everything
        } else {
            What::Ranges(self.as_slice())
        };
        platform.invalidate(&target.forgetting(platform, what));
        true
    }

    /// Issues the invalidations and waits until they are complete.
    pub fn run<F: Format, P: Platform>(&self, platform: &P, target: Target) {
        if self.issue::<F, P>(platform, target) {
            platform.barrier(Barrier::Complete);
        }
    }
}

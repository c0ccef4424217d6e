//! The ranges of one flush: they merge, and become everything where they are too many.

use core::mem::MaybeUninit;

use crate::addr::{Level, Pa};
use crate::format::Format;
use crate::identity::Identity;
use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
use crate::platform::{Barrier, Platform};
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
    /// Returns the invalidation of changes that are published, under the identifier that the space
    /// has by now.
    #[inline]
    pub fn forgetting<'w, P: Platform>(self, platform: &P, what: What<'w>) -> Invalidation<'w> {
        let Self { root, id, global } = self;
        let id = platform.identity_of(root).map_or(id, Identity::id_after_changes);
        Invalidation { root, id, global, what }
    }
}

/// Ranges to invalidate: merged, bounded.
// The room is behind the rest, which short instructions reach then.
#[repr(C)]
pub(crate) struct Ranges {
    /// The number of items that are initialised.
    len: usize,
    /// The address after the last of them, if another may begin there: it is written to the item
    /// when that is [looked at](Self::close).
    end: u64,
    /// The hint of the last of them about its leaves.
    hint: u16,
    /// All of the space is stale, whatever the ranges say.
    pub everything: bool,
    overflowed: bool,
    items: [MaybeUninit<Stale>; MAX_RANGES],
}

/// Leaves of no level, or of several.
const NO_LEVEL: u16 = 0xff;

/// The level of the leaves of a range, and whether tables are meant, as one number.
#[inline]
fn hint(level: Option<Level>, tables: bool) -> u16 {
    let level = level.map_or(NO_LEVEL, |level| u16::from(level.height()));
    level << 1 | u16::from(tables)
}

/// No range begins here.
const NO_END: u64 = 1;

/// The address after the last one of a range, if a range can begin there.
#[inline]
const fn end(last: u64) -> u64 {
    match last.wrapping_add(1) {
        0 => NO_END,
        end => end,
    }
}

impl Ranges {
    #[inline]
    pub const fn new() -> Self {
        Self {
            items: [const { MaybeUninit::uninit() }; MAX_RANGES],
            len: 0,
            end: NO_END,
            hint: 0,
            everything: false,
            overflowed: false,
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0 && !self.everything
    }

    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
        self.end = NO_END;
        self.everything = false;
        self.overflowed = false;
    }

    /// Has the last item end where it does.
    #[inline]
    fn close(&mut self) {
        let end = self.end;
        if let (Some(item), true) = (self.as_mut_slice().last_mut(), end != NO_END) {
            item.last = end - 1;
        }
    }

    /// The ranges; together they hold every address that was [added](Self::add), everything or not.
    #[inline]
    pub fn as_slice(&mut self) -> &[Stale] {
        self.close();
        // SAFETY: the first `len` items were written by `add`.
        unsafe { core::slice::from_raw_parts(self.items.as_ptr().cast(), self.len) }
    }

    /// Copies the ranges. Copies no more than there are.
    pub fn copy(&mut self) -> Self {
        let mut copy = Self::new();
        (copy.len, copy.end, copy.hint) = (self.len, self.end, self.hint);
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

    /// Begins an edit whose ranges are added at its end. If it unwinds, everything is stale.
    /// Returns what [`end_unnamed`](Self::end_unnamed) takes.
    #[inline]
    pub fn begin_unnamed(&mut self, live: bool) -> bool {
        let before = self.everything;
        self.everything |= live;
        before
    }

    #[inline]
    pub fn end_unnamed(&mut self, everything: bool) {
        self.everything = everything;
    }

    /// Whether any address of `slice` may have been added.
    pub fn overlap(&self, slice: Slice) -> bool {
        // What is beyond the last range is not written down.
        if self.everything || self.overflowed {
            return true;
        }
        // SAFETY: the first `len` items were written by `add`.
        let items: &[Stale] =
            unsafe { core::slice::from_raw_parts(self.items.as_ptr().cast(), self.len) };
        let Some((open, closed)) = items.split_last() else {
            return false;
        };
        let overlaps = |item: &Stale, last: u64| slice.first <= last && item.first <= slice.last;
        // The last of them ends where it does.
        let last = if self.end == NO_END { open.last } else { self.end - 1 };
        overlaps(open, last) || closed.iter().any(|item| overlaps(item, item.last))
    }

    /// Adds a range. `level` is that of all its leaves, if known.
    #[inline(never)]
    pub fn add(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        if !self.append(slice, level, tables) {
            match self.overflowed {
                true => self.stretch(slice),
                false => self.insert(slice, level, tables),
            }
        }
    }

    /// Adds leaves that an exclusive edit has changed, few enough that a call would be a part of
    /// what it takes. Where there is no room for one more, it is not written down: all of the space
    /// is to be forgotten then, and no other edit asks what.
    #[inline]
    pub fn add_page(&mut self, slice: Slice, level: Level) {
        if !self.overflowed && !self.append(slice, Some(level), false) {
            // First whether there is room: where pages are many and far apart, this is all that
            // most of them ask.
            self.insert(slice, Some(level), false);
        }
    }

    /// Adds a range that is the first, or begins where the last one ended. Whether it is.
    #[inline]
    fn append(&mut self, slice: Slice, level: Option<Level>, tables: bool) -> bool {
        // Most edits go upwards, and begin where the last one ended.
        if self.end == slice.first && self.hint == hint(level, tables) && slice.last != u64::MAX {
            self.end = slice.last + 1;
            true
        } else if self.len == 0 {
            // Of most flushes it is the only one.
            let Slice { first, last } = slice;
            let [item, ..] = &mut self.items;
            item.write(Stale { first, last, level, tables });
            self.len = 1;
            (self.end, self.hint) = (end(last), hint(level, tables));
            true
        } else {
            false
        }
    }

    /// Adds one more, if there is room.
    #[inline]
    fn push(&mut self, item: Stale) {
        match self.items.get_mut(self.len) {
            Some(place) => {
                place.write(item);
                self.len += 1;
            }
            // Of so many nobody asks the level: they are issued as everything.
            None => self.overflowed = true,
        }
    }

    /// Adds a range that does not begin where the last one ended.
    #[cold]
    #[inline(never)]
    fn insert(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        self.close();
        self.end = NO_END;
        let Slice { first, last } = slice;
        let mergeable = |item: &&mut Stale| {
            let touches =
                first <= item.last.saturating_add(1) && item.first <= last.saturating_add(1);
            // Ranges that merely touch stay apart if one hint is not right for both; those that
            // overlap lose it.
            touches && item.level == level && item.tables == tables
                || first <= item.last && item.first <= last
        };
        // Edits go upwards through the space, so a range that can be merged is nearly always the
        // last one.
        match self.as_mut_slice().iter_mut().rev().find(mergeable) {
            Some(item) => {
                item.first = item.first.min(first);
                item.last = item.last.max(last);
                if item.level != level {
                    item.level = None;
                }
                item.tables |= tables;
            }
            None => self.push(Stale { first, last, level, tables }),
        }
        if self.overflowed {
            self.stretch(slice);
        }
        if let (Some(item), false) = (self.as_slice().last().copied(), self.overflowed) {
            (self.end, self.hint) = (end(item.last), hint(item.level, item.tables));
        }
    }

    /// There is no room for one more: the last is stretched over it and what lies between, so that
    /// the ranges still hold all that was changed.
    #[inline]
    fn stretch(&mut self, slice: Slice) {
        // All are there.
        let [.., item] = &mut self.items;
        // SAFETY: none overflows before all items were written by `push`.
        let item = unsafe { item.assume_init_mut() };
        if slice.first < item.first {
            item.first = slice.first;
        }
        if slice.last > item.last {
            item.last = slice.last;
        }
    }

    /// Issues the invalidations; the stores they are about become visible first. Returns whether
    /// there were any.
    pub fn issue<F: Format, P: Platform>(&mut self, platform: &P, target: Target) -> bool {
        if self.is_empty() {
            return false;
        }
        let (everything, overflowed) = (self.everything, self.overflowed);
        let ranges = self.as_slice();
        platform.barrier(Barrier::Publish);
        let operations = ranges.iter().fold(0u64, |sum, item| {
            let shift = item.level.map_or(F::PAGE_SHIFT, F::shift);
            // They are fewer than there are pages in as many input spaces as there can be ranges:
            // no overflow.
            sum.wrapping_add(((item.last - item.first) >> shift) + 1)
        });
        let what = if everything || overflowed || operations > platform.caps().invalidate_all_above
        {
            What::Everything
        } else {
            What::Ranges(ranges)
        };
        platform.invalidate(&target.forgetting(platform, what));
        true
    }

    /// Issues the invalidations and waits until they are complete.
    pub fn run<F: Format, P: Platform>(&mut self, platform: &P, target: Target) {
        if self.issue::<F, P>(platform, target) {
            platform.barrier(Barrier::Complete);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{MAX_RANGES, Ranges, Stale};
    use crate::addr::Level;
    use crate::walk::Slice;

    fn pages(first: u64, count: u64) -> Slice {
        Slice { first: first << 12, last: ((first + count) << 12) - 1 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 1000 }))]

        /// They hold the pages that were added, and no other, each with its hint or with none.
        #[test]
        fn ranges_are_what_was_added(
            added in prop::collection::vec((0u64..64, 1u64..4, 0u8..2, any::<bool>()), 0..9),
        ) {
            let mut ranges = Ranges::new();
            for &(first, count, height, is_page) in &added {
                match is_page {
                    true => ranges.add_page(pages(first, count), Level::new(height)),
                    false => ranges.add(pages(first, count), Some(Level::new(height)), true),
                }
            }
            prop_assert_eq!(ranges.is_empty(), added.is_empty());
            let all: Vec<_> = ranges.copy().as_slice().to_vec();
            for page in 0..70 {
                let at = pages(page, 1);
                let about: Vec<_> = added
                    .iter()
                    .filter(|&&(first, count, ..)| first <= page && page < first + count)
                    .collect();
                prop_assert_eq!(ranges.overlap(at), !about.is_empty());
                let is_of = |stale: &&Stale| stale.first <= at.first && at.last <= stale.last;
                let of: Vec<_> = all.iter().filter(is_of).collect();
                prop_assert_eq!(of.is_empty(), about.is_empty());
                for &&(_, _, height, is_page) in &about {
                    let is_said = |stale: &&Stale| {
                        let is_of = stale.level.is_none_or(|level| level == Level::new(height));
                        is_of && (stale.tables || is_page)
                    };
                    prop_assert!(of.iter().copied().any(|stale| is_said(&stale)));
                }
            }
        }
    }

    #[test]
    fn ranges_are_cleared() {
        let mut ranges = Ranges::new();
        for page in 0..=MAX_RANGES as u64 {
            ranges.add(pages(2 * page, 1), None, true);
        }
        assert!(ranges.overlap(pages(99, 1)));
        ranges.everything = true;
        ranges.clear();
        assert!(ranges.is_empty() && !ranges.overlap(pages(2, 1)));
        ranges.add(pages(3, 1), None, true);
        assert!(ranges.overlap(pages(3, 1)) && !ranges.overlap(pages(2, 1)));
        // The last goes on.
        ranges.add(pages(4, 1), None, true);
        assert!(ranges.overlap(pages(4, 1)) && !ranges.overlap(pages(5, 1)));
    }
}

//! The plan of a change: what it makes of leaves of one pattern, worked out once and cached.

use super::Change;
use core::ops::Range;

use crate::addr::Level;
use crate::bbm::{State, Transition, recoding};
use crate::edit::cache::NOT_PLAIN;
use crate::edit::space::Conditions;
use crate::entry::LINE;
use crate::format::packed::ACCESSED;
use crate::format::{Attrs, Format, Kind, encoded, in_place_of, packed_of};
use crate::platform::Platform;
use crate::table::Table;

/// How to change an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// It is not a leaf, or nothing changes.
    Keep,
    /// In place, with a store.
    Store,
    /// In place, with an exchange: a walker may be writing it.
    Exchange,
    /// Not in place.
    Break,
}

/// The change of all leaves of one pattern.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// The entry without its address, and in the place of that the level: what the plan is for.
    pub(super) key: u64,
    /// The bits that flip.
    pub flip: u64,
    pub(super) how: How,
    /// Walkers have to forget the old leaf.
    pub invalidate: bool,
    /// Walkers remember nothing of the old leaf, and have to see the new one.
    pub needs_publish: bool,
    /// The key, if it is for single pages that are in use, changed with a store, and forgotten; or
    /// what no page is like.
    pub(super) stored: u64,
    /// The change of leaves that are changed with an exchange.
    pub(super) exchanged: u64,
}

/// The level's place in the key of a plan: bits of the address in leaves of all levels of all
/// formats, of which the largest is of 4 TiB.
const LEVEL: u32 = 44;

impl Plan {
    /// For which leaves there is one plan.
    #[inline]
    pub(super) fn key_of<F: Format>(entry: u64, level: Level) -> u64 {
        let mask = F::address_mask(level);
        debug_assert!(mask >> LEVEL & 7 == 7, "bits of the address");
        entry & !mask | u64::from(level.height()) << LEVEL
    }

    /// The entry without its address that it is for, if that is a page.
    #[inline]
    pub fn key(&self) -> u64 {
        debug_assert!(self.level() == Level::PAGE, "the key of a block has its level");
        self.key
    }

    /// Returns the leaf that the plan makes.
    #[inline]
    pub fn result(&self) -> u64 {
        self.key() ^ self.flip
    }

    #[inline]
    pub(super) fn level(&self) -> Level {
        Level::new((self.key >> LEVEL) as u8 & 7)
    }

    #[inline]
    pub fn how(&self) -> How {
        self.how
    }

    /// Rewrites pages from the start of `range` on, up to the first that the plan is not for, or
    /// that a break needs. Returns where that is. `mask` is that of their addresses.
    #[inline]
    pub(super) fn rewrite_alike<P: Platform>(
        &self,
        table: &Table<'_, P>,
        range: Range<usize>,
        mask: u64,
    ) -> usize {
        let (key, now) = (self.key(), self.result());
        match self.how {
            How::Keep => {
                let mut index = range.start;
                while index < range.end && table.load(index) & !mask == key {
                    index += 1;
                }
                index
            }
            How::Store if range.len() <= LINE => table.recode_few(range, key, !mask, now),
            How::Store => table.recode(range, key, !mask, now),
            How::Exchange => table.recode_contended(range, key, !mask, now),
            How::Break => range.start,
        }
    }

    /// Whether a store does it, or nothing has to be done.
    #[inline]
    pub fn is_plain(&self) -> bool {
        matches!(self.how, How::Keep | How::Store)
    }
}

/// A change, and what it makes of leaves of the pattern that was met last.
#[derive(Clone, Copy)]
pub(crate) struct Recent {
    pub(super) change: Change,
    pub plan: Plan,
}

impl Recent {
    pub const NONE: Self = Self::new(Change::new());

    #[inline]
    pub const fn new(change: Change) -> Self {
        Self {
            change,
            // The plan for holes.
            plan: Plan {
                key: 0,
                flip: 0,
                how: How::Keep,
                invalidate: false,
                needs_publish: false,
                stored: NOT_PLAIN,
                exchanged: NOT_PLAIN,
            },
        }
    }

    /// Forgets the change, field by field, so that LLVM emits no memcpy.
    pub fn clear(&mut self) {
        self.change = Change::new();
        let plan = &mut self.plan;
        (plan.key, plan.flip, plan.how) = (0, 0, How::Keep);
        (plan.invalidate, plan.needs_publish) = (false, false);
        (plan.stored, plan.exchanged) = (NOT_PLAIN, NOT_PLAIN);
    }

    /// Finds out what to do with `entry`, from memory if it is like the one before.
    #[inline]
    pub fn look_up<F: Format>(&mut self, conditions: &Conditions, entry: u64, level: Level) {
        if self.is_new::<F>(entry, level) {
            self.work_out::<F>(conditions, entry, level);
        }
    }

    /// Whether there is no plan for it yet; an empty one is there then.
    #[inline]
    fn is_new<F: Format>(&mut self, entry: u64, level: Level) -> bool {
        let key = Plan::key_of::<F>(entry, level);
        let is_new = self.plan.key != key;
        if is_new {
            self.plan = Plan { key, ..Self::NONE.plan };
        }
        is_new
    }

    /// Makes the plan for the leaves that are like `entry`, if it is one.
    #[cold]
    #[inline(never)]
    fn work_out<F: Format>(&mut self, conditions: &Conditions, entry: u64, level: Level) {
        if F::kind(entry, level) == Kind::Leaf {
            self.work_out_leaf::<F>(conditions, entry, level);
        }
    }

    #[inline]
    fn work_out_leaf<F: Format>(&mut self, conditions: &Conditions, entry: u64, level: Level) {
        let Recoded { flip, what } = recode::<F>(&self.change, conditions, entry, level);
        let plan = &mut self.plan;
        plan.flip = flip;
        plan.how = match what {
            _ if flip == 0 => return,
            _ if what & BREAK != 0 => How::Break,
            _ if what & EXCHANGE != 0 => How::Exchange,
            _ => How::Store,
        };
        plan.invalidate = what & INVALIDATE != 0;
        plan.needs_publish = what & PUBLISH != 0;
        let is_single = level == Level::PAGE && entry & F::CONTIGUOUS == 0;
        if is_single && plan.invalidate && self.change.is_told_by_a_word() {
            match plan.how {
                How::Store => plan.stored = plan.key(),
                How::Exchange => plan.exchanged = plan.key(),
                How::Keep | How::Break => {}
            }
        }
    }
}

/// A leaf, and what a change makes of it.
struct Recoded {
    /// The bits that flip; none if nothing changes.
    flip: u64,
    /// How they may, of the bits below, and what is to be done then.
    what: u8,
}

/// A walker may be writing the leaf.
const EXCHANGE: u8 = 1;
/// Not in place.
const BREAK: u8 = 2;
/// Walkers have to forget the old leaf.
const INVALIDATE: u8 = 4;
/// Walkers remember nothing of the old leaf, and have to see the new one.
const PUBLISH: u8 = 8;

/// Works out what a change makes of a leaf.
#[inline]
fn recode<F: Format>(
    change: &Change,
    conditions: &Conditions,
    entry: u64,
    level: Level,
) -> Recoded {
    let was = packed_of::<F>(entry, level);
    let becomes = change.apply_to_on(was, F::RULE, &conditions.caps);
    let Ok(bits) = encoded::<F>(becomes, level) else {
        // The edit has made sure that the change can be encoded.
        debug_assert!(false, "a change that cannot be encoded");
        return Recoded { flip: 0, what: 0 };
    };
    let new = in_place_of::<F>(entry, level, bits);
    let flip = entry ^ new;
    if flip == 0 || !conditions.live {
        return Recoded { flip, what: 0 };
    }
    let exchange = match conditions.is_contended::<F>(entry, level) {
        true => EXCHANGE,
        false => 0,
    };
    // What is parked can be given back by a store: no walker remembers that it is not valid, or it
    // is invalidated as what is mapped in a hole. But it may remember what the leaf was before.
    // With other permissions that does no harm; what must not be mixed with it, another type, is
    // broken as it would be if the leaf were valid.
    let (was_parked, parks) = (F::is_parked(entry), F::is_parked(new));
    // A run is parked and comes back whole, and no two of its members are valid and different.
    let in_run = entry & F::CONTIGUOUS != 0 && !was_parked && !parks;
    let how = recoding(F::RULE, was, becomes, in_run, &conditions.caps);
    debug_assert_eq!(
        how,
        {
            let [old, new] = [was, becomes].map(|packed| State::Leaf {
                frame: F::address(entry, level),
                attrs: Attrs { software: 0, ..packed.attrs() },
                contiguous: in_run,
            });
            conditions.transition::<F>(&old, &new, level)
        },
        "there is one rule"
    );
    let then = match how {
        Transition::Break => BREAK,
        _ if was_parked && parks => 0,
        _ if was_parked && conditions.caps.invalid_entries_cached => INVALIDATE,
        _ if was_parked => PUBLISH,
        Transition::Invalidate => INVALIDATE,
        // That it has been accessed may be.
        Transition::Store if was.differences(becomes) & ACCESSED != 0 => PUBLISH,
        Transition::Store => 0,
    };
    let what = exchange | then;
    Recoded { flip, what }
}

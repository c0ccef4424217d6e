//! Collapse: small leaves that together translate like a large one become one, and empty tables go.
//!
//! Level by level, from the pages up, so that what was made at one level can be part of what is
//! made at the next. At each level there is one invalidation, however many tables are replaced.
//! Where a break is needed, the entry that points to the table is suspended before it, and the leaf
//! is made after it from what the small leaves say *then*: a walker that was on its way may have
//! set accessed and dirty bits in them until the invalidation was complete.

use core::ops::ControlFlow;

use super::fold::Fold;
use crate::addr::{Level, Pa, Span};
use crate::bbm::{State, Transition};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, Conditions, EditError};
use crate::flush::{Fate, Flush};
use crate::format::saturate;
use crate::format::{Attrs, Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::{Table, UpperCache};
use crate::walk::{Slice, Step, Visit, walk};

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Replaces tables in `span` that translate like one leaf by that leaf, none above `largest` or
    /// what the processor [has](crate::Caps::largest_leaf), frees tables that translate nothing,
    /// and, if `runs`, folds aligned leaves into contiguous runs. The translation of no address
    /// changes. Returns how many tables it replaced or freed and how many runs it folded, together.
    ///
    /// It does what it can: where a break would be needed in a space that must not be broken, where
    /// the table or the run reaches over an end of the range, and where the gather can carry no
    /// more tables, things stay as they are. Accessed and dirty are kept: a large leaf is accessed
    /// or dirty if any of the small ones is.
    ///
    /// # Errors
    /// [`Misaligned`](EditError::Misaligned), [`InputOutOfRange`](EditError::InputOutOfRange),
    /// [`NoSuchLeaf`](EditError::NoSuchLeaf).
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Level, Mapping, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let span = Span::new(Va::new(0), 2 << 20)?;
    /// space.map(span, Pa::new(0), Mapping::new(Attrs::KERNEL_DATA).pages_only())?;
    /// let mut gather = space.gather();
    /// assert_eq!(gather.collapse(span, Level::new(1), true)?, 1);
    /// gather.finish(|_| ());
    /// assert_eq!(space.query(Va::new(0)).unwrap().size(), 2 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn collapse(
        &mut self,
        span: Span<F::Input>,
        largest: Level,
        runs: bool,
    ) -> Result<u64, EditError<F::Input>> {
        let slice = self.space.check(span)?;
        if !F::is_leaf_level(largest) {
            return Err(EditError::NoSuchLeaf);
        }
        let conditions = self.space.conditions();
        if conditions.live {
            self.space.debt.begin_change();
        }
        let largest = F::largest_leaf(&conditions.caps).min(largest);
        let mut done = 0;
        let mut level = Level::PAGE.up();
        // Above the largest leaf only empty tables are of interest, up to those that the root
        // points to.
        let top = match self.space.pinned {
            true => F::root_level().down().unwrap_or(Level::PAGE),
            false => F::root_level(),
        };
        while level <= top {
            let leaves = level <= largest;
            let (replaced, broken) = self.collapse_level(slice, level, leaves, false);
            done += replaced;
            if broken {
                self.complete_pending();
                done += self.collapse_level(slice, level, leaves, true).0;
                self.space.platform.barrier(Barrier::Publish);
            }
            level = level.up();
        }
        if runs {
            let mut fold =
                Fold { conditions, largest, slice, left: &mut self.left, broken: false, done: 0 };
            let _: ControlFlow<()> = self.space.visit(slice, &mut fold);
            let (broken, folded) = (fold.broken, fold.done);
            if broken {
                self.resume(slice);
            }
            self.space.note_runs(folded > 0);
            done += folded;
        }
        Ok(done)
    }

    /// Collapses what is below the entries at one level, or remakes what was broken there. Returns
    /// how many tables are gone, and whether something was broken.
    fn collapse_level(
        &mut self,
        slice: Slice,
        level: Level,
        leaves: bool,
        remake: bool,
    ) -> (u64, bool) {
        let conditions = self.space.conditions();
        let AddressSpace { platform, root, cache, .. } = &mut *self.space;
        let mut collapse = Collapse {
            platform,
            conditions,
            level,
            leaves,
            left: &mut self.left,
            cache: &mut cache.upper,
            broken: false,
            remake,
            done: 0,
        };
        // SAFETY: as in `AddressSpace::visit`.
        let _: ControlFlow<()> =
            unsafe { walk::<F, P>(platform, *root, F::root_level(), slice, &mut collapse) };
        (collapse.done, collapse.broken)
    }
}

/// The sum of a table's entries.
enum Sum {
    /// Nothing is mapped in it.
    Empty,
    /// One leaf one level up, from this frame on, with these attributes.
    Leaf(Pa, Attrs),
    /// Neither.
    Mixed,
}

/// Adds up the entries of the table in `frame` at `level`, which its descriptor takes `denied` away
/// from. The second result tells whether a walker may still be writing some of them.
fn sum<F: Format, P: Platform>(
    platform: &P,
    frame: Pa,
    level: Level,
    denied: Perms,
    conditions: &Conditions,
) -> (Sum, bool) {
    // SAFETY: the caller read the frame from a table descriptor of the space.
    let table = unsafe { Table::open(platform, frame, level) };
    let mask = F::address_mask(level);
    let first = table.load(0);
    let entries = 1usize << F::INDEX_BITS;
    if first == 0 {
        let empty = (1..entries).all(|index| table.load(index) == 0);
        return (if empty { Sum::Empty } else { Sum::Mixed }, false);
    }
    let start = F::address(first, level);
    let aligned = start.is_aligned(F::shift(level) + F::INDEX_BITS);
    if F::kind(first, level) != Kind::Leaf || !aligned {
        return (Sum::Mixed, false);
    }
    // Accessed and dirty may differ from leaf to leaf; everything else has to be the same.
    let plain = |entry: u64| Attrs {
        accessed: false,
        dirty: false,
        ..F::decode_meaning(F::restricted(F::meaning(entry), level, denied), level)
    };
    let expected = plain(first);
    let mut attrs = expected;
    let mut contended = false;
    let mut pattern = !first & !mask;
    // Of parked leaves, which are all parked or none, the address may be inverted.
    let template = F::with_address(first, start) & mask;
    for index in 0..entries {
        let entry = table.load(index);
        let place = start.get() + ((index as u64) << F::shift(level));
        // The pattern is looked at only where it changes.
        let now = entry & !mask;
        if now != pattern {
            if F::kind(entry, level) != Kind::Leaf || plain(entry) != expected {
                return (Sum::Mixed, false);
            }
            pattern = now;
            let decoded = F::decode(entry, level);
            attrs.accessed |= decoded.accessed;
            attrs.dirty |= decoded.dirty;
            contended |= conditions.is_contended::<F>(entry, level);
        }
        if entry & mask != F::with_address(template, Pa::new(place)) {
            return (Sum::Mixed, false);
        }
    }
    (Sum::Leaf(start, attrs), contended)
}

/// Replaces the tables below the entries at one level.
struct Collapse<'a, P: Platform> {
    platform: &'a P,
    conditions: Conditions,
    level: Level,
    /// Leaves may be made at this level; otherwise only empty tables go.
    leaves: bool,
    left: &'a mut Flush,
    cache: &'a mut UpperCache,
    /// Something was left suspended.
    broken: bool,
    /// The second pass: make leaves of what the first has suspended.
    remake: bool,
    done: u64,
}

impl<P: Platform> Collapse<'_, P> {
    fn try_entry<F: Format>(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        slice: Slice,
        entry: u64,
    ) {
        let (level, Some(below)) = (self.level, self.level.down()) else {
            return;
        };
        let child = F::address(entry, level);
        if !self.left.has_room(self.platform, child) {
            return;
        }
        let sum = sum::<F, P>(self.platform, child, below, F::denied(entry), &self.conditions);
        let new = match sum {
            (Sum::Mixed, _) => return,
            (Sum::Empty, _) => 0,
            (Sum::Leaf(frame, attrs), contended) => {
                if !self.leaves || !F::is_leaf_level(level) {
                    return;
                }
                let Ok(bits) = F::encode(&attrs, level) else {
                    return;
                };
                let leaf = F::with_address(bits, frame);
                let [old, new] = [entry, leaf].map(|it| State::remembered::<F>(it, level));
                if self.conditions.transition::<F>(&old, &new, level) == Transition::Break {
                    if self.conditions.may_break {
                        table.detach(index, F::suspend(entry), self.cache);
                        self.left.ranges.add(slice, None, true);
                        self.broken = true;
                    }
                    return;
                }
                match contended {
                    // A walker may still set a flag in a small leaf, which is not looked at again.
                    true => saturate::<F>(leaf, level),
                    false => leaf,
                }
            }
        };
        table.detach(index, new, self.cache);
        self.let_go(child, below, slice);
    }

    /// The table has been replaced.
    fn let_go(&mut self, child: Pa, below: Level, slice: Slice) {
        let denied = Perms::empty();
        let fate = Fate::Replaced;
        self.left.carry(self.platform, child, below, slice.first, denied, fate);
        if self.conditions.live {
            self.left.ranges.add(slice, None, true);
        }
        self.done += 1;
    }

    /// The table is out of reach of all walkers; what its leaves say is final.
    fn remake_entry<F: Format>(&mut self, table: &Table<'_, P>, index: usize, entry: u64) {
        let (level, Some(below)) = (self.level, self.level.down()) else {
            return;
        };
        let old = F::resume(entry);
        let child = F::address(old, level);
        let (sum, _) = sum::<F, P>(self.platform, child, below, F::denied(old), &self.conditions);
        if let Sum::Leaf(frame, attrs) = sum
            && let Ok(bits) = F::encode(&attrs, level)
        {
            table.store(index, F::with_address(bits, frame));
            // SAFETY: the table was part of the space (1.), and the invalidation that covers it is
            // complete (2.).
            unsafe { self.platform.free_table(child, below) };
            self.done += 1;
            return;
        }
        debug_assert!(false, "a table that could be replaced no longer can");
        table.link(index, old);
    }
}

impl<F: Format, P: Platform> Visit<F, P> for Collapse<'_, P> {
    fn entry(&mut self, table: &Table<'_, P>, index: usize, level: Level, slice: Slice) -> Step {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table if level > self.level => {
                return Step::Into(F::address(entry, level));
            }
            Kind::Table if !self.remake && slice.is_whole::<F>(level) => {
                self.try_entry::<F>(table, index, slice, entry);
            }
            Kind::Invalid if self.remake && entry != 0 => {
                self.remake_entry::<F>(table, index, entry)
            }
            _ => {}
        }
        Step::Next
    }
}

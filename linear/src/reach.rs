//! How a baseline reaches a table: through a slot before the linear map exists, through the linear
//! map after.

use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::NonNull;

use tablewright::linear::{SlotMemory, Window};
use tablewright::{
    Barrier, Entry, Format, Hooks, Invalidation, Level, Pa, Platform, Stale, Va, What,
};

use super::Goal;
use super::fixmap::{Fixmap, LAST_LEVEL};

/// A table that can be reached.
pub struct Open {
    pub frame: Pa,
    pub level: Level,
    pub table: NonNull<Entry>,
}

impl Open {
    /// An entry of it.
    pub fn at(&self, index: usize) -> NonNull<Entry> {
        // SAFETY: indices come from `Format::index`, which stays inside of a table, and `Reach`
        // vouches for a whole one.
        unsafe { self.table.add(index) }
    }
}

/// A way to reach tables.
///
/// # Safety
/// 1. What [`open`](Reach::open) returns points to the entries of the table in the frame, valid for
///    the platform's accessors until it is closed.
pub unsafe trait Reach {
    /// Whether closing a table of the last level makes all stores before it visible to table
    /// walkers.
    fn publishes(&self) -> bool;

    /// Makes a table reachable, in the slot for tables at `level` if there are slots. Tables of one
    /// level are open one at a time.
    ///
    /// # Safety
    /// 1. The frame was allocated for a table, or is one of a tree of tables.
    unsafe fn open(&mut self, frame: Pa, level: Level) -> Open;

    /// The table is not used through this any more.
    fn close(&mut self, open: Open);

    /// Nothing is open below the root, and what was left reachable is closed.
    fn clean(&mut self);
}

/// Through the fixmap: each level has a slot, so that those above stay open while a table below is
/// filled.
///
/// *Lazy* applies to last-level tables alone: their 16 slots are used in turn, each for one use of
/// one table. A slot that is done with keeps showing its table. When there is no other left, all
/// are cleared under one barrier, one invalidation is issued for each, and one wait serves them
/// all.
pub struct Early<'a, F, P, M> {
    platform: &'a P,
    fixmap: &'a Fixmap<M>,
    /// The root of the tree that the slots are in, and whether they are global.
    tree: (Pa, bool),
    /// A slot's entry without an address.
    page: u64,
    lazy: bool,
    /// Last-level slots that show something, from the first on; none if they are closed at once.
    stale: usize,
    format: PhantomData<F>,
}

impl<'a, F: Format<Input = Va>, P: Platform + Hooks, M: SlotMemory> Early<'a, F, P, M> {
    pub fn new(
        platform: &'a P,
        fixmap: &'a Fixmap<M>,
        goal: &Goal<'_>,
        page: u64,
        lazy: bool,
    ) -> Self {
        const { assert!(F::LEVELS as usize + LAST_LEVEL <= Fixmap::<M>::SLOTS + 1) };
        Self {
            platform,
            fixmap,
            tree: (goal.root, goal.attrs.global),
            page,
            lazy,
            stale: 0,
            format: PhantomData,
        }
    }

    fn is_lazy(&self, level: Level) -> bool {
        self.lazy && level == Level::PAGE
    }

    fn clear(&self, slots: Range<usize>) {
        if slots.is_empty() {
            return;
        }
        for slot in slots.clone() {
            // SAFETY: an entry of the fixmap, valid for the accessors.
            unsafe { self.platform.store(self.fixmap.entry(slot), 0) };
        }
        self.platform.barrier(Barrier::Publish);
        for slot in slots {
            let first = self.fixmap.base.get() + ((slot as u64) << F::PAGE_SHIFT);
            let stale = Stale {
                first,
                last: first + (1 << F::PAGE_SHIFT) - 1,
                level: Some(Level::PAGE),
                tables: false,
            };
            let (root, global) = self.tree;
            self.platform.invalidate(&Invalidation {
                root,
                id: 0,
                global,
                what: What::Ranges(&[stale]),
            });
        }
        self.platform.barrier(Barrier::Complete);
    }
}

// SAFETY: a slot shows its frame from the barrier in `open` until `clear`, which a slot goes
// through before it is given to another frame; meanwhile `SlotMemory` vouches for the pointer (1.).
unsafe impl<F: Format<Input = Va>, P: Platform + Hooks, M: SlotMemory> Reach
    for Early<'_, F, P, M>
{
    fn publishes(&self) -> bool {
        !self.lazy
    }

    unsafe fn open(&mut self, frame: Pa, level: Level) -> Open {
        let mut slot = Fixmap::<M>::slot_of(level);
        if self.is_lazy(level) {
            if self.stale == LAST_LEVEL {
                self.clean();
            }
            slot += self.stale;
            self.stale += 1;
        }
        let entry = self.page | F::put_address(frame);
        // SAFETY: an entry of the fixmap, valid for the accessors.
        unsafe { self.platform.store(self.fixmap.entry(slot), entry) };
        self.platform.barrier(Barrier::Publish);
        Open { frame, level, table: self.fixmap.memory.pointer(slot, frame) }
    }

    fn close(&mut self, open: Open) {
        if !self.is_lazy(open.level) {
            let slot = Fixmap::<M>::slot_of(open.level);
            self.clear(slot..slot + 1);
        }
    }

    fn clean(&mut self) {
        self.clear(0..self.stale);
        self.stale = 0;
    }
}

/// Through a window that is there to stay, as the finished linear map is: nothing is moved and
/// nothing invalidated.
pub struct Late<'a, W>(pub &'a W);

// SAFETY: `Window` promises the same (1.).
unsafe impl<W: Window> Reach for Late<'_, W> {
    fn publishes(&self) -> bool {
        false
    }

    unsafe fn open(&mut self, frame: Pa, level: Level) -> Open {
        Open {
            frame,
            level,
            // SAFETY: (1.) is passed on.
            table: unsafe { self.0.open(frame, level) },
        }
    }

    fn close(&mut self, open: Open) {
        self.0.close(open.frame, open.table);
    }

    fn clean(&mut self) {}
}

//! The two published ways to start a dirty log.
//!
//! *Slow*, as before the change: under a lock, one leaf after the other loses the permission to
//! write, each found through a map back from its page; then all vCPUs forget. The first write to a
//! page gives it back, without the lock.
//!
//! *Fast*, as in the change: a generation number is counted up, without the lock, and all vCPUs are
//! requested to load their root anew. One that does compares the number with that of the root,
//! without the lock as well. If they differ, it takes the lock, has the root's entries lose the
//! permission, whatever they point to, and gives the root the new number; then it forgets, and
//! enters the guest. A write that faults takes the lock and goes down from the root: before an
//! entry is made writable again, all those of the table below it are made read-only. Which of them
//! are to be looked at, 512 bits beside each table say; or all are, to compare.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::ptr::NonNull;

use tablewright::dirty::Bitmap;
use tablewright::{
    Barrier, Entry, Format, Hooks, Invalidation, Ipa, Kind, Level, Pa, Platform, Stale, What,
};
use tablewright_machine::{MachineLock, Mapper};

use super::job::{How, Logger};
use super::writable::{Host, Side, protect_by_bitmap, protect_by_scan, protect_leaf};
use crate::guest::{Handled, PAGE_SHIFT};

/// Side memory of the tables in a range of frames.
struct Sides<'m> {
    mapper: Mapper<'m>,
    /// Pages with it, for so many tables each.
    pages: RefCell<Vec<Pa>>,
}

/// Tables whose side fits a page.
pub const SIDES_IN_PAGE: usize = 512 / Side::SIZE;

impl<'m> Sides<'m> {
    /// Allocates one for each frame, in pages of their own. `None`: there is no memory for them.
    fn fill(&self) -> Option<()> {
        let frames = self.mapper.machine().memory().frames();
        for _ in 0..frames.div_ceil(SIDES_IN_PAGE) {
            self.pages.borrow_mut().push(self.mapper.machine().take_page()?);
        }
        Some(())
    }

    fn of(&self, table: Pa) -> Side {
        let memory = self.mapper.machine().memory();
        let frame = ((table.get() - memory.first()) >> PAGE_SHIFT) as usize;
        let page = self.pages.borrow()[frame / SIDES_IN_PAGE];
        // SAFETY: a page of ours, and of it a part for this frame alone.
        unsafe {
            let first = self.mapper.table(page, Level::PAGE);
            Side::new(first.add(frame % SIDES_IN_PAGE * Side::SIZE))
        }
    }
}

/// The log of one guest whose memory starts at 0.
pub struct Baseline<'m, 'b, F> {
    mapper: Mapper<'m>,
    root: Pa,
    lock: MachineLock<'m>,
    bitmap: Option<&'b Bitmap<'b>>,
    how: How,
    /// How many times everything was to be protected, and how many times the root's entries were.
    generation: Cell<u64>,
    of_root: Cell<u64>,
    sides: Option<Sides<'m>>,
    format: PhantomData<F>,
}

impl<'m, 'b, F: Format<Input = Ipa>> Baseline<'m, 'b, F> {
    pub fn new(mapper: Mapper<'m>, root: Pa, bitmap: Option<&'b Bitmap<'b>>, how: How) -> Self {
        Self {
            mapper,
            root,
            lock: mapper.machine().new_lock(),
            bitmap,
            how,
            generation: Cell::new(0),
            of_root: Cell::new(0),
            sides: how.has_bitmap().then(|| Sides { mapper, pages: RefCell::default() }),
            format: PhantomData,
        }
    }

    fn entry(&self, table: Pa, level: Level, index: usize) -> NonNull<Entry> {
        // SAFETY: a table of the tree, none of which is freed while it is in use, and an index of
        // the format.
        unsafe { self.mapper.table(table, level).add(index) }
    }

    fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: an entry of a table of ours.
        unsafe { Hooks::load(&self.mapper, entry) }
    }

    fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: an entry of a table of ours.
        unsafe { self.mapper.link(entry, bits) };
    }

    /// All vCPUs forget.
    fn flush(&self, what: What<'_>) {
        self.mapper.barrier(Barrier::Publish);
        self.mapper.invalidate(&Invalidation { root: self.root, id: 0, global: false, what });
        self.mapper.barrier(Barrier::Complete);
    }

    /// They forget a leaf, or a vCPU that remembers it as read-only would fault for ever.
    fn forget_leaf(&self, at: u64, level: Level) {
        let low = (1u64 << F::shift(level)) - 1;
        self.flush(What::Ranges(&[Stale {
            first: at & !low,
            last: at | low,
            level: Some(level),
            tables: false,
        }]));
    }

    fn open_leaf(bits: u64, level: Level) -> u64 {
        let mut attrs = F::decode(bits, level);
        attrs.perms |= tablewright::Perms::ANY_WRITE & tablewright::Attrs::GUEST_MEMORY.perms;
        attrs.dirty = true;
        F::encode(&attrs, level)
            .map_or(bits, |attrs| attrs | F::put_address(F::address(bits, level)))
    }

    fn protect_each_leaf(&self, table: Pa, level: Level) {
        let machine = self.mapper.machine();
        for index in 0..F::entries(level) {
            let entry = self.entry(table, level, index);
            let bits = self.load(entry);
            match (F::kind(bits, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    self.protect_each_leaf(F::address(bits, level), below);
                }
                (Kind::Leaf, _) => {
                    machine.cpu().spend(machine.costs().reverse_map);
                    self.store(entry, protect_leaf::<F>(bits, level));
                }
                _ => {}
            }
        }
    }

    /// All entries of a table lose the permission to write.
    fn protect_table(&self, table: Pa, level: Level) {
        let first = self.entry(table, level, 0);
        match &self.sides {
            // SAFETY: a table of the tree, and what is kept of it.
            Some(sides) => unsafe {
                protect_by_bitmap::<F>(&self.mapper, first, level, sides.of(table));
            },
            // SAFETY: a table of the tree.
            None => unsafe { protect_by_scan::<F>(&self.mapper, first, level) },
        }
    }

    /// Says of each entry of a table, and of those below it, whether it may be writable: of all
    /// that is mapped. The change does it when it maps something; that is no part of a start, and
    /// free.
    fn note(&self, sides: &Sides<'_>, table: Pa, level: Level) {
        let load = |index: usize| {
            // SAFETY: an entry of a table of ours; nothing else runs.
            unsafe { self.entry(table, level, index).as_ref() }.load()
        };
        let mapped = |index: &usize| F::kind(load(*index), level) != Kind::Invalid;
        let entries = || (0..F::entries(level)).filter(mapped);
        sides.of(table).set(&Host, entries());
        let Some(below) = level.down() else { return };
        for index in entries() {
            if F::kind(load(index), level) == Kind::Table {
                self.note(sides, F::address(load(index), level), below);
            }
        }
    }

    /// An entry of a table, for another table, is made writable; under the lock.
    fn open_table(&self, in_table: Pa, level: Level, at: u64, entry: NonNull<Entry>, bits: u64) {
        if let (Some(sides), true) = (&self.sides, self.how.marks_what_it_opens()) {
            sides.of(in_table).mark(&self.mapper, F::index(at, level));
        }
        self.store(entry, F::open_table(bits));
    }

    /// Down to the leaf of `at`, or to the first table on the way that is protected.
    fn find(&self, at: u64) -> Found {
        let (mut table, mut level) = (self.root, F::root_level());
        loop {
            let entry = self.entry(table, level, F::index(at, level));
            let bits = self.load(entry);
            match level.down() {
                Some(below) if F::kind(bits, level) == Kind::Table && !F::is_protected(bits) => {
                    table = F::address(bits, level);
                    level = below;
                }
                _ => {
                    return Found { table, entry, bits, level };
                }
            }
        }
    }
}

/// An entry, and the table that it is in.
struct Found {
    table: Pa,
    entry: NonNull<Entry>,
    bits: u64,
    level: Level,
}

impl<F: Format<Input = Ipa>> Logger for Baseline<'_, '_, F> {
    fn mapped(&self) {
        let Some(sides) = &self.sides else { return };
        match sides.fill() {
            Some(()) => self.note(sides, self.root, F::root_level()),
            None => self.mapper.machine().check(false, || "no memory beside the tables".to_owned()),
        }
    }

    fn start(&self) {
        self.mapper.machine().cpu().order();
        if self.how == How::Slow {
            let held = self.lock.acquire();
            self.protect_each_leaf(self.root, F::root_level());
            drop(held);
        } else {
            self.generation.update(|generation| generation + 1);
        }
        self.flush(What::Everything);
    }

    fn requested(&self) {
        let cpu = self.mapper.machine().cpu();
        cpu.spend(self.mapper.machine().costs().load);
        cpu.order();
        let is_current = || self.of_root.get() == self.generation.get();
        if is_current() {
            return;
        }
        let _held = self.lock.acquire();
        cpu.order();
        // Another vCPU may have done it, and then opened an entry, which would be shut behind its
        // back.
        if !is_current() {
            self.protect_table(self.root, F::root_level());
            self.mapper.barrier(Barrier::Publish);
            self.of_root.set(self.generation.get());
        }
    }

    fn write_fault(&self, at: u64) -> Handled {
        let mut found = self.find(at);
        if F::kind(found.bits, found.level) == Kind::Table {
            let _held = self.lock.acquire();
            loop {
                found = self.find(at);
                let Found { bits, level, .. } = found;
                match (F::kind(bits, level), level.down()) {
                    (Kind::Table, Some(below)) => {
                        self.protect_table(F::address(bits, level), below);
                        self.mapper.barrier(Barrier::Publish);
                        self.open_table(found.table, level, at, found.entry, bits);
                    }
                    _ => break,
                }
            }
        }
        let Found { entry, bits, level, .. } = found;
        if F::kind(bits, level) != Kind::Leaf {
            return Handled::Lost;
        }
        // SAFETY: an entry of a table of ours.
        let opened =
            unsafe { self.mapper.compare_exchange(entry, bits, Self::open_leaf(bits, level)) };
        if opened.is_err() {
            return Handled::Again;
        }
        if !self.mapper.machine().architecture().permission_fault_drops_entry {
            self.forget_leaf(at, level);
        }
        if let Some(bitmap) = self.bitmap {
            bitmap.mark(at >> PAGE_SHIFT);
        }
        Handled::Done
    }

    fn read_fault(&self, _: u64) -> Handled {
        // Reading was never taken away: only formats whose tables have permissions have the fast
        // way.
        Handled::Lost
    }
}

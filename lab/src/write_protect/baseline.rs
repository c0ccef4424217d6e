//! The two published ways to start a dirty log.
//!
//! *Slow*, as before the change: under a lock, one leaf after the other loses the permission to write, each found through a map back
//! from its page; then all vCPUs forget. The first write to a page gives it back, without the lock.
//!
//! *Fast*, as in the change: the entries of the root lose the permission, whatever they point to, and all vCPUs forget. A write
//! that faults takes the lock and goes down from the root: before an entry is made writable again, all those of the table below
//! it are made read-only. In the change the first vCPU that loads the root anew does it to the root's entries; here the CPU
//! that starts the log does, before the vCPUs are kicked.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;

use tablewright::dirty::Bitmap;
use tablewright::{
    Barrier, Change, Entry, Format, Hooks, Invalidation, Ipa, Kind, Level, Pa, Platform, Stale,
    What,
};
use tablewright_machine::{MachineLock, Mapper};

use super::simulate::{Handled, Logger, PAGE_SHIFT};

/// The log of one guest whose memory starts at 0.
pub struct Baseline<'m, 'b, F> {
    mapper: Mapper<'m>,
    root: Pa,
    lock: MachineLock<'m>,
    bitmap: Option<&'b Bitmap<'b>>,
    fast: bool,
    logging: Cell<bool>,
    format: PhantomData<F>,
}

impl<'m, 'b, F: Format<Input = Ipa>> Baseline<'m, 'b, F> {
    pub fn new(mapper: Mapper<'m>, root: Pa, bitmap: Option<&'b Bitmap<'b>>, fast: bool) -> Self {
        Self {
            mapper,
            root,
            lock: mapper.machine().new_lock(),
            bitmap,
            fast,
            logging: Cell::new(false),
            format: PhantomData,
        }
    }

    fn entry(&self, table: Pa, level: Level, index: usize) -> NonNull<Entry> {
        // SAFETY: a table of the tree, none of which is freed while it is in use, and an index of the format.
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
        self.mapper.invalidate(&Invalidation {
            root: self.root,
            id: 0,
            global: false,
            what,
        });
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

    fn protect_leaf(bits: u64, level: Level) -> u64 {
        let attrs = Change::new().write_protect().apply(F::decode(bits, level));
        // What can be written can be read, in every format.
        F::encode(&attrs, level).map_or(bits, |attrs| {
            attrs | F::put_address(F::address(bits, level))
        })
    }

    fn open_leaf(bits: u64, level: Level) -> u64 {
        let mut attrs = F::decode(bits, level);
        attrs.perms |= tablewright::Perms::ANY_WRITE & tablewright::Attrs::GUEST_MEMORY.perms;
        attrs.dirty = true;
        F::encode(&attrs, level).map_or(bits, |attrs| {
            attrs | F::put_address(F::address(bits, level))
        })
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
                    self.store(entry, Self::protect_leaf(bits, level));
                }
                _ => {}
            }
        }
    }

    /// All entries of a table lose the permission to write.
    fn protect_table(&self, table: Pa, level: Level) {
        for index in 0..F::entries(level) {
            let entry = self.entry(table, level, index);
            let bits = self.load(entry);
            match F::kind(bits, level) {
                Kind::Table if !F::is_asleep(bits) => self.store(entry, F::sleep(bits)),
                Kind::Leaf => self.store(entry, Self::protect_leaf(bits, level)),
                _ => {}
            }
        }
    }

    /// Down to the leaf of `at`, or to the first table on the way that is protected.
    fn find(&self, at: u64) -> (NonNull<Entry>, u64, Level) {
        let (mut table, mut level) = (self.root, F::root_level());
        loop {
            let entry = self.entry(table, level, F::index(at, level));
            let bits = self.load(entry);
            match level.down() {
                Some(below) if F::kind(bits, level) == Kind::Table && !F::is_asleep(bits) => {
                    table = F::address(bits, level);
                    level = below;
                }
                _ => return (entry, bits, level),
            }
        }
    }
}

impl<F: Format<Input = Ipa>> Logger for Baseline<'_, '_, F> {
    fn start(&self) {
        self.mapper.machine().cpu().order();
        self.logging.set(true);
        let held = self.lock.acquire();
        if self.fast {
            self.protect_table(self.root, F::root_level());
        } else {
            self.protect_each_leaf(self.root, F::root_level());
        }
        drop(held);
        self.flush(What::Everything);
    }

    fn write_fault(&self, at: u64) -> Handled {
        let (mut entry, mut bits, mut level) = self.find(at);
        if F::kind(bits, level) == Kind::Table {
            let _held = self.lock.acquire();
            loop {
                (entry, bits, level) = self.find(at);
                match (F::kind(bits, level), level.down()) {
                    (Kind::Table, Some(below)) => {
                        self.protect_table(F::address(bits, level), below);
                        self.mapper.barrier(Barrier::Publish);
                        self.store(entry, F::wake(bits));
                    }
                    _ => break,
                }
            }
        }
        if F::kind(bits, level) != Kind::Leaf {
            return Handled::Lost;
        }
        // SAFETY: an entry of a table of ours.
        let opened = unsafe {
            self.mapper
                .compare_exchange(entry, bits, Self::open_leaf(bits, level))
        };
        if opened.is_err() {
            return Handled::Again;
        }
        if !self
            .mapper
            .machine()
            .architecture()
            .permission_fault_drops_entry
        {
            self.forget_leaf(at, level);
        }
        if let Some(bitmap) = self.bitmap {
            bitmap.mark(at >> PAGE_SHIFT);
        }
        Handled::Done
    }

    fn read_fault(&self, _: u64) -> Handled {
        // Reading was never taken away: only formats whose tables have permissions have the fast way.
        Handled::Lost
    }
}

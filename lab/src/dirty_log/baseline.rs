//! Hosts as they are published: the faults of a guest, and how the log is disabled.
//!
//! # Faults
//!
//! A fault gets the page from the host and holds the lock of the guest's tables *together* with
//! others, whose one line goes from CPU to CPU twice for each fault; entries are changed by
//! compare-exchange. Before Linux 6.2 arm64 took the lock *alone* wherever it was not about the
//! permissions of a page, and cleaned memory under it. On x86 these change without the lock. A
//! large leaf that has to become pages becomes an empty table, and each of its pages faults once
//! more.
//!
//! # Disabling
//!
//! Under the lock for reading, one table after the other is detached, and the next fault maps its
//! memory in a large leaf. On arm64 nothing is done.
//!
//! What stands for a table that is being taken away is *frozen*: a fault that finds it leaves the
//! lock, and the guest faults again. Everything below is *processed*: each entry is frozen by an
//! exchange, for good, and what it was is accounted for. All vCPUs *flush*: they forget. Then the
//! entry is *unfrozen*: it is a hole, and the next fault may fill it. The change is about the
//! order:
//!
//! | | |
//! |---|---|
//! | leaf by leaf | for each leaf: freeze, flush, unfreeze; the table stays |
//! | before | freeze, process, flush, unfreeze |
//! | flush first | freeze, flush, process, unfreeze |
//! | unfreeze first | freeze, unfreeze, process, flush |
//! | after | freeze, flush, unfreeze, process |
//! | in place | put the large leaf in the table's place, process; flush when the thread gives way |
//!
//! *In place* is of a later change (Linux 6.13): nothing is frozen, no fault has to map anything
//! again, and one flush is for all tables between two points at which the thread is asked to give
//! its processor to another, because it may not keep what has not been flushed beyond that.
//!
//! Unfreezing before the flush is right only because the same memory comes back. A page that is
//! merely protected is made writable by a fault without the lock. Tables are freed later, and not
//! measured.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;

use tablewright::guest::HOST_WRITES;
use tablewright::{
    Attrs, Barrier, Entry, Format, Hooks, Invalidation, Ipa, Kind, Level, Pa, Perms, Platform,
    Stale, What,
};

use tablewright::shared::SharedPlatform;
use tablewright_machine::{Line, LineCosts, MachineLock, Time};

use super::engine::Engine;
use super::job::Way;
use super::world::World;
use crate::guest::input::Region;
use crate::guest::{Handled, is_arm64, leaf_bytes};

/// In which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    LeafByLeaf,
    Before,
    FlushFirst,
    UnfreezeFirst,
    After,
    InPlace,
}

/// How long the thread works before it is asked to give way: by the 76 flushes that were published
/// for 4.79 s.
const GIVES_WAY: Time = Time::ms(63);

/// The outcome of a fault, under the lock.
enum Found {
    /// The page is mapped.
    Mapped,
    /// There is something else, or soon will be.
    Other,
    /// There is no memory for a table.
    NoTable,
}

pub struct Baseline<'w, 'm, 'g, 's, F: Format<Input = Ipa>> {
    world: &'w World<'m>,
    engine: &'w Engine<'w, 'm, 'g, 's, F>,
    order: Order,
    lock: MachineLock<'m>,
    /// The line of the lock, and of the counts beside it.
    line: Line,
    /// In place: when the thread has to give way.
    until: Cell<Time>,
    format: PhantomData<F>,
}

impl<'w, 'm, 'g, 's, F: Format<Input = Ipa>> Baseline<'w, 'm, 'g, 's, F> {
    pub fn new(engine: &'w Engine<'w, 'm, 'g, 's, F>, order: Order) -> Self {
        let machine = engine.world.mapper.machine();
        let costs = machine.costs();
        Self {
            world: engine.world,
            engine,
            order,
            lock: machine.new_lock(),
            line: Line::new(LineCosts { owned: Time::ZERO, transfer: costs.transfer }),
            until: Cell::new(Time::ZERO),
            format: PhantomData,
        }
    }

    /// An atomic operation on the lock, or on a count beside it.
    fn count(&self) {
        let before = self.line.transfers();
        self.line.access(self.world.cpu());
        if self.line.transfers() != before {
            self.world.fetch();
        }
    }

    /// With the lock held together with other faults, or alone.
    fn held<T>(&self, alone: bool, what: impl FnOnce() -> T) -> T {
        if alone {
            let _held = self.lock.acquire();
            return what();
        }
        self.count();
        let done = what();
        self.count();
        done
    }

    fn zap(&self, at: u64) {
        let (entry, bits, level) = self.world.find::<F>(at, self.world.leaf);
        let (Kind::Table, Some(below)) = (F::kind(bits, level), level.down()) else {
            return;
        };
        match self.order {
            Order::InPlace => return self.in_place(at, (entry, bits, level), below),
            Order::LeafByLeaf => return self.leaf_by_leaf(at, F::address(bits, level), below),
            _ => {}
        }
        let mapper = &self.world.mapper;
        let begin = (self.world.cpu().now(), self.world.worked());
        // SAFETY: an entry of a table of ours.
        let frozen = unsafe { mapper.compare_exchange(entry, bits, F::FROZEN) };
        if frozen.is_err() {
            return;
        }
        let process = || {
            self.world.work(|| self.process(F::address(bits, level), below));
        };
        let flush = || self.flush(at, at + (leaf_bytes(level) - 1));
        // SAFETY: an entry of a table of ours.
        let unfreeze = || unsafe { mapper.link(entry, 0) };
        match self.order {
            Order::Before => {
                process();
                flush();
                unfreeze();
            }
            Order::FlushFirst => {
                flush();
                process();
                unfreeze();
            }
            Order::UnfreezeFirst => {
                unfreeze();
                process();
                flush();
            }
            Order::After | Order::InPlace | Order::LeafByLeaf => {
                flush();
                unfreeze();
                process();
            }
        }
        let took = self.world.cpu().now().saturating_sub(begin.0);
        let worked = self.world.worked().saturating_sub(begin.1);
        self.world.zaps.borrow_mut().push((took, worked));
    }

    /// The large leaf in the place of a table, and the table taken apart.
    fn in_place(&self, at: u64, entry: (NonNull<Entry>, u64, Level), below: Level) {
        let (entry, bits, level) = entry;
        // SAFETY: an entry of a table of ours.
        let put =
            unsafe { self.world.mapper.compare_exchange(entry, bits, self.leaf(at, level, true)) };
        if put.is_err() {
            return;
        }
        self.world.set_large(at, true);
        self.world.work(|| self.process(F::address(bits, level), below));
        let now = self.world.cpu().now();
        if now >= self.until.get() {
            let all = self.world.region;
            self.flush(all.first, at + (leaf_bytes(level) - 1));
            let slice = Time::ps(GIVES_WAY.as_ps() / self.world.smaller);
            self.until.set(self.world.cpu().now() + slice);
        }
    }

    /// Takes every leaf below `at` away, and flushes for it. What is left of the tables goes with
    /// the next fault.
    fn leaf_by_leaf(&self, at: u64, table: Pa, level: Level) {
        let mapper = &self.world.mapper;
        self.world.work(|| self.world.fetch_table_to_write());
        for index in 0..F::entries(level) {
            let entry = self.world.entry(table, level, index);
            let first = at + index as u64 * leaf_bytes(level);
            // SAFETY: an entry of a table of ours.
            let bits = unsafe { Hooks::load(mapper, entry) };
            match (F::kind(bits, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    self.leaf_by_leaf(first, F::address(bits, level), below);
                }
                (Kind::Leaf, _) => self.world.work(|| {
                    // SAFETY: an entry of a table of ours.
                    unsafe { mapper.exchange(entry, F::FROZEN) };
                    self.flush(first, first + (leaf_bytes(level) - 1));
                    // SAFETY: an entry of a table of ours.
                    unsafe { mapper.link(entry, 0) };
                    self.note_leaf();
                }),
                _ => {}
            }
        }
    }

    /// All vCPUs forget.
    fn flush(&self, first: u64, last: u64) {
        let mapper = &self.world.mapper;
        let stale = Stale { first, last, level: None, tables: true };
        mapper.barrier(Barrier::Publish);
        mapper.invalidate(&Invalidation {
            root: self.world.root,
            id: 0,
            global: false,
            what: What::Ranges(&[stale]),
        });
        mapper.barrier(Barrier::Complete);
        self.world.flushes.update(|flushes| flushes + 1);
    }

    /// The vCPU forgets what has led to a fault: processors with EPT do by themselves (Intel SDM
    /// vol. 3, 30.4.3.1).
    fn forget_here(&self, at: u64) {
        let first = at & !(leaf_bytes(self.world.leaf) - 1);
        let stale = Stale {
            first,
            last: first + (leaf_bytes(self.world.leaf) - 1),
            level: None,
            tables: true,
        };
        self.world.mapper.invalidate_here(&Invalidation {
            root: self.world.root,
            id: 0,
            global: false,
            what: What::Ranges(&[stale]),
        });
    }

    /// Charges for a leaf that was taken away, besides the exchange.
    fn note_leaf(&self) {
        let costs = self.world.mapper.machine().costs();
        self.world.cpu().spend(costs.entry + costs.visit);
        // The records of the page and of the huge page that it is part of.
        self.world.fetch();
        self.world.fetch();
        self.count();
    }

    /// Takes every entry of a table away that was detached.
    fn process(&self, table: Pa, level: Level) {
        self.world.fetch_table_to_write();
        for index in 0..F::entries(level) {
            let entry = self.world.entry(table, level, index);
            // Hardware may still set its flags, and a vCPU may be on its way to make it writable.
            // SAFETY: an entry of a table of ours.
            let old = unsafe { self.world.mapper.exchange(entry, F::FROZEN) };
            match (F::kind(old, level), level.down()) {
                (Kind::Table, Some(below)) => self.process(F::address(old, level), below),
                (Kind::Leaf, _) => self.note_leaf(),
                _ => {}
            }
        }
    }

    fn leaf(&self, at: u64, level: Level, writable: bool) -> u64 {
        let perms = if writable { Perms::READ | Perms::WRITE } else { Perms::READ };
        let attrs = Attrs {
            perms: perms.and_user(),
            accessed: true,
            dirty: writable,
            software: HOST_WRITES,
            ..Attrs::GUEST_MEMORY
        };
        let first = at & !(leaf_bytes(level) - 1);
        // Attributes that every format has.
        F::encode(&attrs, level).unwrap_or(0) | F::put_address(self.world.host(first))
    }
}

impl<F: Format<Input = Ipa>> Baseline<'_, '_, '_, '_, F> {
    /// A leaf that is there, with the permission to write if that is what is missing.
    fn relax(&self, at: u64, write: bool, found: (NonNull<Entry>, u64, Level)) -> Handled {
        let (entry, bits, level) = found;
        let mut attrs = F::decode(bits, level);
        if write {
            attrs.perms |= Perms::ANY_WRITE & Attrs::GUEST_MEMORY.perms;
            attrs.dirty = true;
        }
        let new = F::encode(&attrs, level)
            .map_or(bits, |attrs| attrs | F::put_address(F::address(bits, level)));
        if new == bits {
            // The vCPU has not forgotten what was there.
            if self.order == Order::InPlace {
                self.forget_here(at);
            }
            return Handled::Again;
        }
        // SAFETY: an entry of a table of ours.
        match unsafe { self.world.mapper.compare_exchange(entry, bits, new) } {
            Ok(()) => Handled::Done,
            Err(_) => Handled::Again,
        }
    }

    /// A table without entries.
    fn new_table(&self, level: Level) -> Option<u64> {
        let mapper = &self.world.mapper;
        let frame = mapper.alloc_table(level)?;
        // SAFETY: a whole table of the platform's, just allocated.
        unsafe { mapper.fill(mapper.table(frame, level), F::entries(level), 0, 0) };
        Some(F::table(frame, Perms::empty()))
    }

    /// Maps the page at `at`, under the lock.
    fn map(&self, at: u64, target: Level, writable: bool) -> Found {
        let mapper = &self.world.mapper;
        loop {
            let (entry, bits, level) = self.world.find::<F>(at, target);
            if bits == F::FROZEN {
                return Found::Other;
            }
            // SAFETY: an entry of a table of ours.
            let exchange = |new| unsafe { mapper.compare_exchange(entry, bits, new) }.is_ok();
            match (F::kind(bits, level), level.down()) {
                (Kind::Leaf | Kind::Invalid, Some(below)) if level > target => {
                    let Some(table) = self.new_table(below) else {
                        return Found::NoTable;
                    };
                    let breaks = F::kind(bits, level) == Kind::Leaf;
                    if !exchange(if breaks { F::FROZEN } else { table }) {
                        // SAFETY: a table of the platform's, which nothing links.
                        unsafe { mapper.free_table(F::address(table, level), below) };
                        return Found::Other;
                    }
                    if breaks {
                        let first = at & !(leaf_bytes(level) - 1);
                        self.flush(first, first + (leaf_bytes(level) - 1));
                        // SAFETY: an entry of a table of ours.
                        unsafe { mapper.link(entry, table) };
                    }
                }
                (Kind::Invalid, _) if level == target => {
                    if !exchange(self.leaf(at, level, writable)) {
                        return Found::Other;
                    }
                    mapper.barrier(Barrier::Publish);
                    return Found::Mapped;
                }
                // What leaf by leaf has left.
                (Kind::Table, Some(below))
                    if level == target && self.order == Order::LeafByLeaf =>
                {
                    if !exchange(self.leaf(at, level, writable)) {
                        return Found::Other;
                    }
                    self.process(F::address(bits, level), below);
                    let first = at & !(leaf_bytes(level) - 1);
                    self.flush(first, first + (leaf_bytes(level) - 1));
                    return Found::Mapped;
                }
                _ => return Found::Other,
            }
        }
    }
}

impl<F: Format<Input = Ipa>> Way for Baseline<'_, '_, '_, '_, F> {
    fn disable(&self) {
        if is_arm64::<F>() {
            return;
        }
        self.count();
        let slice = Time::ps(GIVES_WAY.as_ps() / self.world.smaller);
        self.until.set(self.world.cpu().now() + slice);
        for at in self.world.parts() {
            self.zap(at);
        }
        if self.order == Order::InPlace {
            let Region { first, bytes } = self.world.region;
            self.flush(first, first + (bytes - 1));
        }
        self.count();
    }

    fn fault(&self, at: u64, write: bool) -> Handled {
        let logging = self.world.logging.get();
        let found = self.world.find::<F>(at, Level::PAGE);
        let is_leaf = F::kind(found.1, found.2) == Kind::Leaf;
        let handled = if is_leaf && (found.2 == Level::PAGE || !logging) {
            match is_arm64::<F>() {
                // Whether or not anything has changed, and on all CPUs.
                true => self.held(false, || {
                    let handled = self.relax(at, write, found);
                    let first = at & !(leaf_bytes(found.2) - 1);
                    self.flush(first, first + (leaf_bytes(found.2) - 1));
                    handled
                }),
                false => self.relax(at, write, found),
            }
        } else {
            let clean = self.world.give(at);
            let alone = is_arm64::<F>() && self.order == Order::Before;
            let cpu = self.world.cpu();
            if !alone {
                cpu.spend(clean);
            }
            let target = if logging { Level::PAGE } else { self.world.leaf };
            let mapped = self.held(alone, || {
                if alone {
                    cpu.spend(clean);
                }
                self.map(at, target, write || !logging)
            });
            match mapped {
                Found::Mapped => {
                    self.world.set_large(at, target > Level::PAGE);
                    Handled::Done
                }
                Found::Other => Handled::Again,
                Found::NoTable => Handled::Lost,
            }
        };
        if handled == Handled::Done && write && logging {
            self.engine.mark_write(Ipa::new(at));
        }
        handled
    }
}

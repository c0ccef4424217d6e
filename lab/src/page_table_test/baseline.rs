//! The fault handler as it was published: one lock around every edit of the tables, and the changes
//! that were proposed to it, each of which is on or off.
//!
//! *Before* them, every vCPU that faults takes the lock, cleans the memory that its fault is about,
//! and only then walks; most often it finds that another has mapped it already. Tables for the walk
//! are topped up before each fault that is not about permissions. Where a block takes the place of
//! a table, the entry is invalid while everything below is visited.
//!
//! * **cmo-in-handler**: the walk cleans, and only where it is about to install something.
//! * **install-first**: the block is installed before what was below is visited. As published, it
//!   is not cleaned any more, on the ground that its pages were; but it is not known that all of
//!   them were mapped.
//! * **parallel**: what came later (Linux 6.2): faults take the lock together and change entries by
//!   compare-exchange. An entry in the place of which something else is to stand is frozen
//!   meanwhile; a vCPU that loses, or finds it frozen, goes back to its guest and faults again. A
//!   vCPU that finds its page mapped does so before it cleans anything, and one that finds it
//!   writable before it invalidates. Tables that were detached are freed when no walk can hold them
//!   any more, which is not measured.
//! * **memcache**: tables are topped up only if the fault was found above the level that will be
//!   mapped. The guess can be wrong; then the fault is tried again.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::ptr::NonNull;

use tablewright::shared::SharedPlatform;
use tablewright::{
    Attrs, Barrier, Entry, Format, Hooks, Invalidation, Ipa, Kind, Level, Pa, Perms, Platform,
    Stale, What,
};
use tablewright_machine::{Fault, Line, LineCosts, Machine, MachineLock, Time};

use super::backing::{Backing, Handler, Owner, Page};
use super::job::Changes;
use super::watch::Watch;
use crate::guest::input::{PAGE, Region};

/// How long a CPU that waits for others looks away.
const LOOK_AWAY: Time = Time::ns(100);

/// A vCPU's cache of tables holds so many, and is filled when it has fewer than a walk may need.
const CACHE: usize = 40;

/// The handler.
pub struct Baseline<'m, F> {
    changes: Changes,
    platform: Watch<'m>,
    root: Pa,
    region: Region,
    lock: MachineLock<'m>,
    /// The line of the lock where faults hold it together, and how many do.
    line: Line,
    together: Cell<usize>,
    alone: Cell<bool>,
    caches: Box<[RefCell<Vec<Pa>>]>,
    /// Trees that were detached while others may walk them.
    cut: RefCell<Vec<(Pa, Level)>>,
    logging: Cell<bool>,
    /// Ranges that the host is taking back, and how often it has done so.
    taking: Cell<u32>,
    taken: Cell<u64>,
    retries: Cell<u64>,
    format: PhantomData<F>,
}

/// Why a walk did nothing.
enum Stop {
    /// It is mapped already.
    Again,
    /// The cache has no table left.
    NoTable,
}

impl<'m, F: Format<Input = Ipa>> Baseline<'m, F> {
    pub fn new(
        changes: Changes,
        platform: Watch<'m>,
        root: Pa,
        region: Region,
        vcpus: usize,
    ) -> Self {
        Self {
            changes,
            platform,
            root,
            region,
            lock: platform.machine().new_lock(),
            line: Line::new(LineCosts {
                owned: platform.machine().costs().lock_take,
                transfer: platform.machine().costs().transfer,
            }),
            together: Cell::new(0),
            alone: Cell::new(false),
            caches: (0..=vcpus).map(|_| RefCell::default()).collect(),
            cut: RefCell::default(),
            logging: Cell::new(false),
            taking: Cell::new(0),
            taken: Cell::new(0),
            retries: Cell::new(0),
            format: PhantomData,
        }
    }

    fn machine(&self) -> &'m Machine {
        self.platform.machine()
    }

    /// An entry of a table of the tree, or of one that is about to be linked.
    fn entry(&self, table: Pa, level: Level, input: u64) -> NonNull<Entry> {
        self.entry_at(table, level, F::index(input, level))
    }

    fn entry_at(&self, table: Pa, level: Level, index: usize) -> NonNull<Entry> {
        // SAFETY: frames come from the platform, or from descriptors of the tree, and tables are
        // freed under the lock that walks are made under; an index of the format is within the
        // table.
        unsafe { self.platform.table(table, level).add(index) }
    }

    fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: an entry of a table of ours.
        unsafe { Hooks::load(&self.platform, entry) }
    }

    fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: an entry of a table of ours.
        unsafe { self.platform.link(entry, bits) };
    }

    fn invalidate(&self, what: What<'_>) {
        self.platform.barrier(Barrier::Publish);
        self.platform.invalidate(&Invalidation { root: self.root, id: 0, global: false, what });
        self.platform.barrier(Barrier::Complete);
    }

    fn invalidate_leaf(&self, input: u64, level: Level) {
        let size = 1u64 << F::shift(level);
        let first = input & !(size - 1);
        self.invalidate(What::Ranges(&[Stale {
            first,
            last: first + (size - 1),
            level: Some(level),
            tables: true,
        }]));
    }

    /// Fills the cache of the running vCPU if it may run short.
    fn top_up(&self) {
        let cache = &self.caches[self.machine().cpu().id()];
        if cache.borrow().len() >= usize::from(F::LEVELS) - 1 {
            return;
        }
        while cache.borrow().len() < CACHE {
            let Some(frame) = self.platform.alloc_table(Level::PAGE) else {
                return;
            };
            // SAFETY: a whole table of the platform's, just allocated.
            unsafe {
                let first = self.platform.table(frame, Level::PAGE);
                self.platform.fill(first, 1 << F::INDEX_BITS, 0, 0);
            }
            cache.borrow_mut().push(frame);
        }
    }

    fn take_table(&self) -> Result<Pa, Stop> {
        let mut cache = self.caches[self.machine().cpu().id()].borrow_mut();
        cache.pop().ok_or(Stop::NoTable)
    }

    /// Down to the entry that decides about `input` at `level`, or above where there is no table.
    fn find(&self, input: u64, level: Level) -> (NonNull<Entry>, u64, Level) {
        let (mut table, mut at) = (self.root, F::root_level());
        loop {
            let entry = self.entry(table, at, input);
            let bits = self.load(entry);
            match at.down() {
                Some(below) if at > level && F::kind(bits, at) == Kind::Table => {
                    table = F::address(bits, at);
                    at = below;
                }
                _ => return (entry, bits, at),
            }
        }
    }

    fn clean(&self, frame: u64, size: u64) {
        if self.platform.maintenance().clean {
            self.platform.clean(Pa::new(frame), size);
        }
    }

    /// Maps a leaf, under the lock.
    fn map(&self, input: u64, frame: u64, level: Level, attrs: Attrs) -> Result<(), Stop> {
        // The attributes are two that every format has.
        let leaf = F::encode(&attrs, level).unwrap_or(0) | F::put_address(Pa::new(frame));
        let size = 1u64 << F::shift(level);
        loop {
            let (entry, bits, at) = self.find(input, level);
            match F::kind(bits, at) {
                Kind::Table => {
                    self.collapse(entry, bits, frame, level, leaf);
                    break;
                }
                Kind::Leaf if at > level => {
                    // The fault that follows maps the rest, page by page.
                    let table = self.take_table()?;
                    self.store(entry, 0);
                    self.invalidate_leaf(input, at);
                    self.store(entry, F::table(table, Perms::empty()));
                }
                Kind::Invalid if at > level => {
                    let table = self.take_table()?;
                    self.store(entry, F::table(table, Perms::empty()));
                }
                kind => {
                    if kind == Kind::Leaf {
                        // The same memory: with more permissions it is a fault of its own.
                        if F::address(bits, at).get() == frame {
                            return Err(Stop::Again);
                        }
                        self.store(entry, 0);
                        self.invalidate_leaf(input, at);
                    }
                    if self.changes.cmo_in_handler {
                        self.clean(frame, size);
                    }
                    self.store(entry, leaf);
                    break;
                }
            }
        }
        self.platform.barrier(Barrier::Publish);
        Ok(())
    }

    /// A block in the place of a table.
    fn collapse(&self, entry: NonNull<Entry>, bits: u64, frame: u64, level: Level, leaf: u64) {
        let size = 1u64 << F::shift(level);
        self.store(entry, 0);
        self.invalidate(What::Everything);
        let below = F::address(bits, level);
        let install = || {
            if self.changes.cmo_in_handler && !self.changes.unclean {
                self.clean(frame, size);
            }
            self.store(entry, leaf);
        };
        if self.changes.install_first {
            install();
        }
        if let Some(down) = level.down() {
            self.visit_and_free(below, down);
        }
        if !self.changes.install_first {
            install();
        }
    }

    /// Visits every entry below, as code that counts references has to, and frees the tables.
    fn visit_and_free(&self, table: Pa, level: Level) {
        for index in 0..1usize << F::INDEX_BITS {
            let bits = self.load(self.entry_at(table, level, index));
            if let (Kind::Table, Some(below)) = (F::kind(bits, level), level.down()) {
                self.visit_and_free(F::address(bits, level), below);
            }
        }
        // SAFETY: detached, and forgotten by the hardware; walks of software are under the lock.
        unsafe { self.platform.free_table(table, level) };
    }

    /// Takes the permission to write from everything in a range, or everything from it.
    fn each_leaf(
        &self,
        table: Pa,
        level: Level,
        first: u64,
        span: (u64, u64),
        change: &dyn Fn(NonNull<Entry>, u64, u64, Level),
    ) {
        let size = 1u64 << F::shift(level);
        let begin = (span.0.saturating_sub(first) >> F::shift(level)) as usize;
        for index in begin..F::entries(level) {
            let at = first + index as u64 * size;
            if at > span.1 {
                break;
            }
            let entry = self.entry_at(table, level, index);
            let bits = self.load(entry);
            match (F::kind(bits, level), level.down()) {
                (Kind::Table, Some(below)) => {
                    self.each_leaf(F::address(bits, level), below, at, span, change);
                }
                (Kind::Leaf, _) => change(entry, bits, at, level),
                _ => {}
            }
        }
    }

    /// Allows writing, under the lock.
    fn relax(&self, input: u64, attrs: Attrs) -> Result<(), Stop> {
        let (entry, bits, at) = self.find(input, Level::PAGE);
        if F::kind(bits, at) != Kind::Leaf {
            return Err(Stop::Again);
        }
        let new = F::encode(&attrs, at).unwrap_or(0) | F::put_address(F::address(bits, at));
        if new != bits {
            self.store(entry, new);
        }
        // Whether or not anything has changed, and on all CPUs.
        self.invalidate_leaf(input, at);
        Ok(())
    }

    fn handle(
        &self,
        input: u64,
        write: bool,
        fault: Fault,
        backing: &Backing<'m>,
    ) -> Result<(), Stop> {
        let (permission, depth) = match fault {
            Fault::Permission { depth } => (true, depth),
            Fault::Translation { depth } => (false, depth),
            // Leaves are made accessed, and addresses are of the guest's memory.
            _ => return Err(Stop::Again),
        };
        let found = Level::new(depth);
        let logging = self.logging.get();
        let likely = !permission || logging && write;
        // What the memory is made of is known now, except for transparent huge pages.
        if if self.changes.memcache { found > self.known_level(backing) } else { likely } {
            self.top_up();
        }
        self.machine().cpu().order();
        let taken = self.taken.get();
        let page = backing.get(input - self.region.first, write, self);
        let writable = page.writable && (write || !logging);

        if self.changes.parallel {
            return self.together(|| {
                if self.taking.get() > 0 || self.taken.get() != taken {
                    return Err(Stop::Again);
                }
                self.map_together(input, &page, writable, permission.then_some(found))
            });
        }
        let held = self.lock.acquire();
        if self.taking.get() > 0 || self.taken.get() != taken {
            drop(held);
            return Err(Stop::Again);
        }
        let level = if logging { Level::PAGE } else { page.level };
        let size = 1u64 << F::shift(level);
        let frame = page.frame.get() & !(size - 1);
        if !permission && !self.changes.cmo_in_handler {
            self.clean(frame, size);
        }
        let attrs = attrs(writable);
        let done = if permission && level == found {
            self.relax(input, attrs)
        } else {
            self.map(input & !(size - 1), frame, level, attrs)
        };
        drop(held);
        done
    }

    /// With the lock held together with other faults.
    fn together<T>(&self, what: impl FnOnce() -> T) -> T {
        let cpu = self.machine().cpu();
        self.line.access(cpu);
        while self.alone.get() {
            cpu.spend(LOOK_AWAY);
            self.line.access(cpu);
        }
        self.together.set(self.together.get() + 1);
        let done = what();
        self.line.access(cpu);
        self.together.set(self.together.get() - 1);
        done
    }

    /// With the lock held alone, also where faults hold it together.
    fn alone<T>(&self, what: impl FnOnce() -> T) -> T {
        let held = self.lock.acquire();
        if self.changes.parallel {
            let cpu = self.machine().cpu();
            self.line.access(cpu);
            self.alone.set(true);
            while self.together.get() > 0 {
                cpu.spend(LOOK_AWAY);
                cpu.order();
            }
        }
        let done = what();
        if self.changes.parallel {
            self.line.access(self.machine().cpu());
            self.alone.set(false);
        }
        drop(held);
        done
    }

    /// The entry as it was, or the fault is one for nothing.
    fn exchange(&self, entry: NonNull<Entry>, bits: u64, new: u64) -> Result<(), Stop> {
        // SAFETY: an entry of a table of ours.
        let done = unsafe { self.platform.compare_exchange(entry, bits, new) };
        done.map_err(|_| Stop::Again)
    }

    /// Maps a leaf, or allows writing to it, beside other faults.
    fn map_together(
        &self,
        input: u64,
        page: &Page,
        writable: bool,
        permission: Option<Level>,
    ) -> Result<(), Stop> {
        let level = match self.logging.get() {
            true => Level::PAGE,
            false => page.level,
        };
        let size = 1u64 << F::shift(level);
        let frame = page.frame.get() & !(size - 1);
        let leaf = |level| F::encode(&attrs(writable), level).unwrap_or(0);
        if permission == Some(level) {
            let (entry, bits, at) = self.find(input, Level::PAGE);
            let new = leaf(at) | F::put_address(F::address(bits, at));
            if F::kind(bits, at) != Kind::Leaf || new == bits {
                return Err(Stop::Again);
            }
            self.exchange(entry, bits, new)?;
            self.invalidate_leaf(input, at);
            return Ok(());
        }
        let new = leaf(level) | F::put_address(Pa::new(frame));
        loop {
            let (entry, bits, at) = self.find(input, level);
            if bits == F::FROZEN {
                return Err(Stop::Again);
            }
            let mut cut = None;
            match F::kind(bits, at) {
                Kind::Leaf if at == level && F::address(bits, at).get() == frame => {
                    return Err(Stop::Again);
                }
                Kind::Invalid if at > level => {
                    let table = self.take_table()?;
                    let linked = self.exchange(entry, bits, F::table(table, Perms::empty()));
                    if linked.is_err() {
                        self.keep_table(table);
                    }
                    linked?;
                    continue;
                }
                Kind::Leaf if at > level => {
                    let table = self.take_table()?;
                    let broken = self.exchange(entry, bits, F::FROZEN);
                    if broken.is_err() {
                        self.keep_table(table);
                    }
                    broken?;
                    self.invalidate_leaf(input, at);
                    self.store(entry, F::table(table, Perms::empty()));
                    continue;
                }
                kind => {
                    self.exchange(entry, bits, F::FROZEN)?;
                    match kind {
                        Kind::Leaf => self.invalidate_leaf(input, at),
                        Kind::Table => {
                            self.invalidate(What::Everything);
                            cut = level.down().map(|below| (F::address(bits, level), below));
                        }
                        Kind::Invalid => {}
                    }
                }
            }
            self.clean(frame, size);
            self.store(entry, new);
            self.platform.barrier(Barrier::Publish);
            self.cut.borrow_mut().extend(cut);
            return Ok(());
        }
    }

    fn keep_table(&self, table: Pa) {
        let cache = &self.caches[self.machine().cpu().id()];
        cache.borrow_mut().push(table);
    }

    fn known_level(&self, backing: &Backing<'m>) -> Level {
        if self.logging.get() { Level::PAGE } else { backing.known_level() }
    }
}

impl<F: Format<Input = Ipa>> Owner for Baseline<'_, F> {
    fn take(&self, first: u64, bytes: u64) {
        self.alone(|| {
            self.taking.set(self.taking.get() + 1);
            let first = self.region.first + first;
            self.each_leaf(
                self.root,
                F::root_level(),
                0,
                (first, first + (bytes - 1)),
                &|entry, bits, at, level| {
                    self.store(entry, 0);
                    self.invalidate_leaf(at, level);
                    // The guest may have written past the caches.
                    self.clean(F::address(bits, level).get(), 1 << F::shift(level));
                },
            );
        });
    }

    /// Maps the page read-only where its table is, and cleans it, as arm64 did until Linux 6.10: no
    /// table is needed.
    fn change(&self, first: u64, frame: Pa) {
        self.alone(|| {
            let input = self.region.first + first;
            self.clean(frame.get(), PAGE);
            let (entry, bits, at) = self.find(input, Level::PAGE);
            if at == Level::PAGE && F::kind(bits, at) == Kind::Invalid {
                let leaf = F::encode(&attrs(false), at).unwrap_or(0);
                self.store(entry, leaf | F::put_address(frame));
                self.platform.barrier(Barrier::Publish);
            }
        });
    }

    fn give(&self, _: u64, _: u64) {
        self.alone(|| {
            self.taken.set(self.taken.get() + 1);
            self.taking.set(self.taking.get() - 1);
        });
    }
}

impl<'m, F: Format<Input = Ipa>> Handler<'m> for Baseline<'m, F> {
    fn fault(&self, ipa: u64, write: bool, fault: Fault, backing: &Backing<'m>) {
        match self.handle(ipa & !(PAGE - 1), write, fault, backing) {
            Ok(()) => {}
            Err(Stop::Again) => self.retries.set(self.retries.get() + 1),
            Err(Stop::NoTable) => {
                self.top_up();
                self.retries.set(self.retries.get() + 1);
            }
        }
    }

    fn start_logging(&self) {
        self.alone(|| {
            self.logging.set(true);
            let Region { first, bytes } = self.region;
            self.each_leaf(
                self.root,
                F::root_level(),
                0,
                (first, first + (bytes - 1)),
                &|entry, bits, _, level| {
                    // What is there stays there; its attributes are those that are given here.
                    self.store(
                        entry,
                        F::encode(&attrs(false), level).unwrap_or(0)
                            | F::put_address(F::address(bits, level)),
                    );
                },
            );
        });
        self.invalidate(What::Everything);
    }

    fn stop_logging(&self) {
        self.alone(|| self.logging.set(false));
    }

    fn grow(&self, _: &Backing<'m>) {
        // All vCPUs are through.
        for (table, level) in self.cut.take() {
            self.visit_and_free(table, level);
        }
    }

    fn retries(&self) -> u64 {
        self.retries.get()
    }
}

/// The attributes of a guest's memory. It is not executed in this test, and mapped so.
fn attrs(writable: bool) -> Attrs {
    let perms = if writable { Perms::READ | Perms::WRITE } else { Perms::READ };
    Attrs { perms: perms.and_user(), dirty: writable, ..Attrs::GUEST_MEMORY }
}

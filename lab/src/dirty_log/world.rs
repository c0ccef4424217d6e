//! Common parts of the ways to disable a log: the guest's memory, and the memory of its host.
//!
//! # Contention
//!
//! With 416 vCPUs at work, taking an entry out of a table was published to take 65 times as long
//! as it takes alone. Their contention is modelled as a queue with a way to it: **a line that is
//! not in the cache of its CPU comes through one queue, which serves one line at a time**
//! ([`Costs::fetch`](tablewright_machine::Costs::fetch)), **and takes longer besides for each other
//! CPU that works on memory at the time**
//! ([`Costs::latency_shared`](tablewright_machine::Costs::latency_shared)). A CPU that is alone
//! pays neither. Tables that a log splits ahead are allocated by the one thread that starts it, on
//! its node of memory, so that all vCPUs fetch from there.
//!
//! * A vCPU whose memory is in small leaves has one line of a table to fetch for each page that it
//!   writes, and then, with the address known, the line that it writes, which is in memory of its
//!   own: a latency more. With large leaves the table is in its cache. So contention goes away as
//!   memory is collapsed; and while few vCPUs are left none waits in the queue, because each is
//!   longer on its way than the queue takes for all of them.
//! * Taking a small leaf away marks the page accessed and dirty in the records that the host has of
//!   it, two lines: its own, and that of the huge page that it is part of.
//! * The lines of a table come one behind the other once the first is there, as hardware has them
//!   come that is read in order.
//! * The line of the lock that faults take for reading, with the counts of leaves, goes from CPU to
//!   CPU, one at a time ([`Costs::transfer`](tablewright_machine::Costs::transfer)).
//!
//! A page of the host is zeroed when it is used for the first time: by the CPU that uses it, at its
//! own pace ([`Costs::zero`](tablewright_machine::Costs::zero)), and through memory that all share
//! ([`Costs::zero_shared`](tablewright_machine::Costs::zero_shared)).

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use tablewright::{Entry, Format, Hooks, Ipa, Kind, Level, Pa, Platform};
use tablewright_machine::{Cpu, Mapper, Resource, Time};

use crate::guest::input::Region;
use crate::guest::leaf_bytes;

/// Start of the guest's memory, above the tables.
const PHYSICAL: u64 = 1 << 45;

/// Lines of a table.
const LINES: u64 = 4096 / 64;

/// The guest's memory on its host.
pub struct World<'m> {
    pub mapper: Mapper<'m>,
    pub root: Pa,
    pub region: Region,
    /// The largest leaf that its pages allow.
    pub leaf: Level,
    /// Source of cache lines.
    memory: Resource,
    /// Writes are logged, and leaves are pages.
    pub logging: Cell<bool>,
    /// Memory that is being zeroed.
    zeroing: Resource,
    /// CPUs that work on memory.
    working: Cell<u64>,
    /// The size of the host's pages, and those that were given.
    page: u64,
    given: Box<[Cell<bool>]>,
    /// To clean a page before a guest gets it.
    clean: Time,
    /// Those parts that are in leaves of that level.
    large: Box<[Cell<bool>]>,
    /// For so long the host's thread has worked on tables, and since when it does again.
    worked: Cell<Time>,
    since: Cell<Option<Time>>,
    /// A page of the host stands for one that is so many times larger.
    pub smaller: u64,
    /// How often all vCPUs were told to forget.
    pub flushes: Cell<u64>,
    /// How long it took to take each table apart, and how much of that was such work.
    pub zaps: RefCell<Vec<(Time, Time)>>,
}

impl<'m> World<'m> {
    pub fn new(
        mapper: Mapper<'m>,
        root: Pa,
        region: Region,
        (leaf, page): (Level, u64),
        clean: Time,
        smaller: u64,
    ) -> Self {
        let parts = region.bytes / leaf_bytes(leaf);
        Self {
            mapper,
            root,
            region,
            leaf,
            memory: Resource::new(),
            logging: Cell::new(false),
            zeroing: Resource::new(),
            working: Cell::new(0),
            page,
            clean,
            given: (0..region.bytes.div_ceil(page)).map(|_| Cell::new(false)).collect(),
            large: (0..parts).map(|_| Cell::new(false)).collect(),
            worked: Cell::new(Time::ZERO),
            since: Cell::new(None),
            smaller,
            flushes: Cell::new(0),
            zaps: RefCell::default(),
        }
    }

    pub fn cpu(&self) -> Cpu<'m> {
        self.mapper.machine().cpu()
    }

    /// The first address of each part.
    pub fn parts(&self) -> impl Iterator<Item = u64> + use<> {
        let Region { first, bytes } = self.region;
        (first..first + bytes).step_by(leaf_bytes(self.leaf) as usize)
    }

    /// Returns the host's address for an address of the guest.
    pub fn host(&self, at: u64) -> Pa {
        Pa::new(PHYSICAL + (at - self.region.first))
    }

    fn part(&self, at: u64) -> &Cell<bool> {
        &self.large[((at - self.region.first) / leaf_bytes(self.leaf)) as usize]
    }

    pub fn is_large(&self, at: u64) -> bool {
        self.part(at).get()
    }

    pub fn set_large(&self, at: u64, large: bool) {
        self.part(at).set(large);
    }

    /// One line.
    pub fn fetch(&self) {
        self.memory.acquire(self.cpu(), self.mapper.machine().costs().fetch);
        self.wait_for_others();
    }

    /// One line of the guest's memory, from which nothing else comes meanwhile.
    pub fn fetch_own(&self) {
        self.cpu().spend(self.mapper.machine().costs().latency);
        self.wait_for_others();
    }

    fn wait_for_others(&self) {
        let others = self.working.get().saturating_sub(1);
        self.cpu().spend(self.mapper.machine().costs().latency_shared * others);
    }

    /// Works on memory, as others may do at the same time.
    pub fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cpu().order();
        self.working.update(|working| working + 1);
        let done = work();
        self.cpu().order();
        self.working.update(|working| working - 1);
        done
    }

    /// Has the host give the page for an address: found and zeroed, when it is used first. Returns
    /// how long it takes to clean what was given, where the guest may read past the caches.
    pub fn give(&self, at: u64) -> Time {
        let cpu = self.cpu();
        cpu.order();
        if self.given[((at - self.region.first) / self.page) as usize].replace(true) {
            return Time::ZERO;
        }
        let costs = self.mapper.machine().costs();
        let pages = self.page / leaf_bytes(Level::PAGE);
        cpu.spend(costs.find_page);
        let until = self.zeroing.reserve(cpu, costs.zero_shared * pages);
        cpu.spend(costs.zero * pages);
        cpu.wait_until(until);
        self.clean * pages
    }

    /// All lines of a table whose entries are read.
    pub fn fetch_table(&self) {
        self.fetch();
        self.cpu().spend(self.mapper.machine().costs().fetch * (LINES - 1));
    }

    /// All lines of a table whose entries are exchanged. A line is transferred twice from the vCPUs
    /// that walk it: for the read, and for the write.
    pub fn fetch_table_to_write(&self) {
        self.fetch_table();
        self.cpu().spend(self.mapper.machine().costs().transfer * (2 * LINES));
    }

    /// Work on tables by the host's thread, which takes as long as there are entries.
    pub fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cpu().order();
        self.since.set(Some(self.cpu().now()));
        let done = work();
        self.cpu().order();
        self.worked.set(self.worked());
        self.since.set(None);
        done
    }

    /// For how long that was done so far.
    pub fn worked(&self) -> Time {
        let now = self.cpu().now();
        let under_way = self.since.get().map(|since| now.saturating_sub(since));
        self.worked.get() + under_way.unwrap_or(Time::ZERO)
    }

    /// Down to the entry that decides about `at`: a leaf, or what is not there.
    pub fn find<F: Format<Input = Ipa>>(
        &self,
        at: u64,
        down_to: Level,
    ) -> (NonNull<Entry>, u64, Level) {
        let (mut table, mut level) = (self.root, F::root_level());
        loop {
            let entry = self.entry(table, level, F::index(at, level));
            let bits = self.load(entry);
            match level.down() {
                Some(below) if level > down_to && F::kind(bits, level) == Kind::Table => {
                    table = F::address(bits, level);
                    level = below;
                }
                _ => return (entry, bits, level),
            }
        }
    }

    pub fn entry(&self, table: Pa, level: Level, index: usize) -> NonNull<Entry> {
        // SAFETY: a table of the tree, or one that was detached from it; none is freed while it is
        // in use. An index of the format.
        unsafe { self.mapper.table(table, level).add(index) }
    }

    fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: an entry of a table of ours.
        unsafe { Hooks::load(&self.mapper, entry) }
    }
}

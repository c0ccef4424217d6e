//! All CPUs map and unmap the same few pages at once, in tables that come and go.
//!
//! A CPU that changes an entry has *frozen* it before: a mark that is not valid, which its owner
//! alone replaces. To map: claim an empty entry, fill the page, store the leaf. To unmap: freeze
//! the leaf, have it forgotten, only then leave the entry to others, and give the page back. A
//! table is taken away in the same way; CPUs still in it leave first.

use std::cell::{Cell, RefCell};

use tablewright::{
    Attrs, Barrier, Format, Half, Invalidation, Kind, Level, Memory, Pa, Perms, Platform, Stale,
    Va, What,
};
use tablewright_machine::{Cpu, Machine, Outcome, RunError, Time};

use tablewright_workloads::dice::Dice;
use tablewright_workloads::platform::{Control, Faulty};
use tablewright_workloads::random::oracle::{Oracle, Page, Spot};
use tablewright_workloads::random::raw::{self, Place};
use tablewright_workloads::random::{Bug, ByHand, Kind as Machinery, MOST_CPUS, announce};

/// Tables of pages, and pages in each.
const TABLES: u64 = 2;
const PAGES: u64 = 3;
/// Not valid, and no hole.
const FROZEN: u64 = 0x5a0;
const IDENTIFIER: u16 = 9;

struct Shared<'a, 'm> {
    machine: &'m Machine,
    control: &'m Control,
    oracle: &'a Oracle<'m>,
    platform: Faulty<'m>,
    root: Pa,
    page: u64,
    block: u64,
    base: u64,
    /// Since when each CPU is where it may see tables that are being taken away.
    inside: Vec<Cell<Option<Time>>>,
    /// How often each table was taken away.
    taken: [Cell<u32>; TABLES as usize],
    /// Tables that cannot be found any more, since when.
    old: RefCell<Vec<(Pa, Time)>>,
}

/// All CPUs map and unmap in the same tables.
pub struct Concurrent;

impl ByHand for Concurrent {
    fn run<F: Format<Input = Va>>(
        machine: &Machine,
        control: &Control,
        dice: &Dice,
        kind: Machinery,
        _: usize,
        between: &mut dyn FnMut(u64),
    ) -> Result<Outcome, RunError> {
        let platform = Faulty::new(machine, control);
        let (half, base) = kind.half(dice);
        let page = 1u64 << F::PAGE_SHIFT;
        let block = page << F::INDEX_BITS;
        let spots = (0..TABLES)
            .flat_map(|table| (0..PAGES).map(move |number| base + table * block + number * page));
        let oracle = Oracle::new(machine, spots);
        // The tables above those that come and go are there from the start.
        let root = loop {
            if let Some(root) = platform.alloc_table(F::root_level()) {
                break root;
            }
        };
        raw::zero::<F>(&platform, root, F::root_level());
        let mut above = raw::entry::<F>(&platform, root, F::root_level(), base);
        while above.level > Level::PAGE.up() {
            let Some(below) = above.level.down() else {
                break;
            };
            let Some(frame) = platform.alloc_table(below) else {
                continue;
            };
            raw::zero::<F>(&platform, frame, below);
            above.store(&platform, F::table(frame, Perms::empty()));
            above = raw::entry::<F>(&platform, frame, below, base);
        }
        platform.barrier(Barrier::Publish);
        platform.mapper.attach(root, half, IDENTIFIER);
        let shared = Shared {
            machine,
            control,
            oracle: &oracle,
            platform,
            root,
            page,
            block,
            base,
            inside: (0..MOST_CPUS).map(|_| Cell::new(None)).collect(),
            taken: [const { Cell::new(0) }; TABLES as usize],
            old: RefCell::default(),
        };
        let seed = dice.below(1 << 48);
        let steps = 8 + dice.below(16);
        let outcome = machine.run(|cpu| {
            platform.mapper.load();
            let dice = Dice::of(seed, cpu.id() as u64);
            for _ in 0..steps {
                shared.step::<F>(cpu, &dice);
                cpu.spend(dice.time());
            }
        })?;
        between(machine.digest());
        if machine.violations().is_empty() {
            machine.calm();
            shared.tear_down::<F>(half);
        }
        Ok(outcome)
    }
}

impl Shared<'_, '_> {
    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    fn step<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, dice: &Dice) {
        let (table, number) = (dice.below(TABLES), dice.below(PAGES));
        match dice.below(12) {
            0..=3 => self.enter(cpu, || self.map::<F>(table, number, dice)),
            4..=6 => self.enter(cpu, || self.unmap::<F>(table, number)),
            7 => {
                self.enter(cpu, || self.take_away::<F>(cpu, table));
                self.free_old(cpu);
            }
            _ => self.oracle.try_one(cpu, dice),
        }
    }

    /// From here to its end, a CPU may be in a table that another takes away.
    fn enter(&self, cpu: Cpu<'_>, what: impl FnOnce()) {
        cpu.order();
        let mine = &self.inside[cpu.id()];
        mine.set(Some(cpu.now()));
        what();
        cpu.order();
        mine.set(None);
    }

    /// Frees the tables that no CPU is in any more.
    fn free_old(&self, cpu: Cpu<'_>) {
        loop {
            cpu.order();
            let oldest = self.inside.iter().filter_map(Cell::get).min();
            let early = self.is(Bug::TableFreedUnderOthers);
            let gone = |&(_, since): &(Pa, Time)| early || oldest.is_none_or(|at| since < at);
            let Some(at) = self.old.borrow().iter().position(gone) else {
                return;
            };
            let (frame, _) = self.old.borrow_mut().swap_remove(at);
            // SAFETY: it is forgotten, and no CPU is in it, unless that is the bug.
            unsafe { self.platform.free_table(frame, Level::PAGE) };
        }
    }

    fn va(&self, table: u64, number: u64) -> u64 {
        self.base + table * self.block + number * self.page
    }

    fn spot(&self, table: u64, number: u64) -> &Spot {
        &self.oracle.spots[(table * PAGES + number) as usize]
    }

    fn spots(&self, table: u64) -> impl Iterator<Item = &Spot> {
        (0..PAGES).map(move |number| self.spot(table, number))
    }

    /// The entry that leads to a table.
    fn link_of<F: Format<Input = Va>>(&self, table: u64) -> Option<Place> {
        let va = self.va(table, 0);
        raw::find::<F>(&self.platform, self.root, va, Level::PAGE.up())
    }

    /// The table, made if it is missing and no CPU is at it, and how often it had been taken away
    /// then.
    fn table<F: Format<Input = Va>>(&self, table: u64, make: bool) -> Option<(Pa, u32)> {
        let platform = &self.platform;
        let link = self.link_of::<F>(table)?;
        let bits = link.load(platform);
        let taken = || self.taken[table as usize].get();
        if F::kind(bits, link.level) == Kind::Table {
            return Some((F::address(bits, link.level), taken()));
        }
        if !make || bits != 0 || link.compare_exchange(platform, 0, FROZEN).is_err() {
            return None;
        }
        let Some(frame) = platform.alloc_table(Level::PAGE) else {
            link.store(platform, 0);
            return None;
        };
        raw::zero::<F>(platform, frame, Level::PAGE);
        link.link(platform, F::table(frame, Perms::empty()));
        let taken = taken();
        platform.barrier(Barrier::Publish);
        Some((frame, taken))
    }

    fn map<F: Format<Input = Va>>(&self, table: u64, number: u64, dice: &Dice) {
        let (machine, platform) = (self.machine, &self.platform);
        let Some((frame, taken)) = self.table::<F>(table, true) else {
            return;
        };
        machine.cpu().spend(dice.time());
        let va = self.va(table, number);
        let place = raw::entry::<F>(platform, frame, Level::PAGE, va);
        let claimed = if self.is(Bug::NotClaimed) {
            place.load(platform) == 0
        } else {
            place.compare_exchange(platform, 0, FROZEN).is_ok()
        };
        if !claimed {
            return;
        }
        let gone = || self.taken[table as usize].get() != taken;
        let give_up = || place.store(platform, 0);
        let Some(page) = machine.take_page() else {
            return give_up();
        };
        self.oracle.fresh(page);
        let attrs = match dice.below(5) {
            0 => Attrs::USER_DATA.with_memory(Memory::NonCacheable),
            1 => Attrs::USER_TEXT,
            _ => Attrs {
                accessed: dice.once_in(2),
                dirty: dice.once_in(2),
                ..dice.pick(&[Attrs::USER_DATA, Attrs::KERNEL_DATA])
            },
        };
        machine.write_page(page);
        if attrs.memory == Memory::NonCacheable && !self.is(Bug::NotCleaned) {
            machine.clean(page);
        }
        if attrs.perms.intersects(Perms::ANY_EXEC) {
            if !self.is(Bug::CodeNotCleaned) {
                machine.clean(page);
            }
            if !self.is(Bug::CodeNotRefetched) {
                let all = machine.architecture().icache_aliasing;
                machine.invalidate_instructions((!all).then_some(page));
            }
        }
        let Ok(bits) = F::encode(&attrs, Level::PAGE) else {
            return give_up();
        };
        let spot = self.spot(table, number);
        if !gone() {
            spot.begin(Some(Page::new(page.get(), attrs)));
        }
        place.link(platform, bits | F::put_address(page));
        platform.barrier(Barrier::Publish);
        announce(machine);
        let is_mine = spot.page().is_some_and(|it| it.pa == page.get());
        if !gone() && is_mine {
            spot.end();
        }
    }

    /// Freezes a leaf. Gives what it said in the end.
    fn freeze<F: Format<Input = Va>>(&self, place: Place) -> Option<u64> {
        let platform = &self.platform;
        let mark = if self.is(Bug::EntryLeftToOthersEarly) { 0 } else { FROZEN };
        let mut bits = place.load(platform);
        while F::kind(bits, Level::PAGE) == Kind::Leaf {
            if self.is(Bug::FrozenByStore) {
                place.store(platform, mark);
                return Some(bits);
            }
            match place.compare_exchange(platform, bits, mark) {
                Ok(()) => return Some(bits),
                Err(now) => bits = now,
            }
        }
        None
    }

    fn forget(&self, first: u64, size: u64, level: Option<Level>) {
        let range = Stale { first, last: first + (size - 1), level, tables: level.is_none() };
        self.platform.barrier(Barrier::Publish);
        self.platform.invalidate(&Invalidation {
            root: self.root,
            id: IDENTIFIER,
            global: true,
            what: What::Ranges(&[range]),
        });
        self.platform.barrier(Barrier::Complete);
    }

    fn unmap<F: Format<Input = Va>>(&self, table: u64, number: u64) {
        let platform = &self.platform;
        let Some((frame, taken)) = self.table::<F>(table, false) else {
            return;
        };
        let va = self.va(table, number);
        let place = raw::entry::<F>(platform, frame, Level::PAGE, va);
        let Some(bits) = self.freeze::<F>(place) else {
            return;
        };
        let gone = || self.taken[table as usize].get() != taken;
        let spot = self.spot(table, number);
        if !gone() {
            spot.begin(None);
        }
        let page = F::address(bits, Level::PAGE);
        if self.is(Bug::PageFreedBeforeInvalidation) {
            self.machine.give_page(page);
        }
        self.forget(va, self.page, Some(Level::PAGE));
        // Also for a page in a table that is being taken away: the next in this entry has not been
        // used yet.
        let attrs = F::decode(bits, Level::PAGE);
        self.oracle.account_for(va, va + (self.page - 1), attrs);
        if !gone() {
            spot.end();
        }
        // Only now may others have the entry.
        if !self.is(Bug::EntryLeftToOthersEarly) {
            place.store(platform, 0);
        }
        if !self.is(Bug::PageFreedBeforeInvalidation) {
            self.machine.give_page(page);
        }
    }

    /// Takes a table away, with all that is in it.
    fn take_away<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, table: u64) {
        let platform = &self.platform;
        let Some(link) = self.link_of::<F>(table) else {
            return;
        };
        let bits = link.load(platform);
        if F::kind(bits, link.level) != Kind::Table
            || link.compare_exchange(platform, bits, FROZEN).is_err()
        {
            return;
        }
        self.taken[table as usize].update(|taken| taken + 1);
        let before: Vec<_> = self.spots(table).map(|spot| spot.begin(None)).collect();
        self.forget(self.va(table, 0), self.block, None);
        let frame = F::address(bits, link.level);
        for (number, _) in (0..PAGES).zip(before) {
            let va = self.va(table, number);
            let place = raw::entry::<F>(platform, frame, Level::PAGE, va);
            // A CPU that has an entry frozen finishes first.
            let mut bits = place.exchange(platform, FROZEN);
            let mut tries = 0;
            while bits == FROZEN && tries < 10_000 {
                cpu.spend(Time::ns(100));
                bits = place.load(platform);
                if bits != FROZEN {
                    bits = place.exchange(platform, FROZEN);
                }
                tries += 1;
            }
            let last = va + (self.page - 1);
            if F::kind(bits, Level::PAGE) == Kind::Leaf {
                let attrs = F::decode(bits, Level::PAGE);
                self.oracle.account_for(va, last, attrs);
                self.machine.give_page(F::address(bits, Level::PAGE));
            } else {
                // The CPU that unmapped it has reclaimed it.
                let unused = Attrs { accessed: false, dirty: false, ..Attrs::USER_DATA };
                self.oracle.account_for(va, last, unused);
            }
        }
        self.spots(table).for_each(Spot::end);
        link.store(platform, 0);
        cpu.order();
        self.old.borrow_mut().push((frame, cpu.now()));
    }

    fn tear_down<F: Format<Input = Va>>(self, half: Half) {
        let cpu = self.machine.cpu();
        for table in 0..TABLES {
            self.take_away::<F>(cpu, table);
        }
        self.free_old(cpu);
        raw::destroy::<F>(self.platform, self.root, half);
    }
}

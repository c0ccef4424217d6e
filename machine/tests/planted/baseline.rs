//! Page-table code as it is commonly written, for one CPU that edits: each edit is complete when it
//! returns.
//!
//! What other crates do wrong is done wrong here, one thing at a time.

use std::cell::{Cell, RefCell};

use tablewright::{
    Attrs, Barrier, Change, Format, Half, Hooks, Invalidation, Kind, Level, Pa, Perms, Platform,
    Stale, Va, What,
};
use tablewright_machine::{Cpu, Machine, Outcome, Rule, RunError, Tlbi};

use tablewright_workloads::dice::Dice;
use tablewright_workloads::platform::{Control, Faulty};
use tablewright_workloads::random::oracle::{Oracle, Page, Spot, sets};
use tablewright_workloads::random::raw::{self, Place};
use tablewright_workloads::random::{Bug, ByHand, Kind as Machinery, announce, until_done};

/// Single pages, in two tables: so many in each.
const PAGES: u64 = 5;
/// More pages at once than are invalidated one by one.
const MANY: u64 = 34;
const ONE_BY_ONE: u64 = 32;
const FAR: u64 = 1 << 40;

struct Layout {
    page: u64,
    block: u64,
    /// Pages of a contiguous run; 1 where there are none.
    run: u64,
    base: u64,
}

impl Layout {
    /// Address of page `number`: the first ones are in one table, the others in the next.
    fn page(&self, number: u64) -> u64 {
        self.base + number / PAGES * self.block + number % PAGES * self.page
    }
    /// Addresses of the run, of the block, and of the many pages.
    fn run_at(&self) -> u64 {
        self.base + 3 * self.block
    }
    fn block_at(&self) -> u64 {
        self.base + 4 * self.block
    }
    fn many_at(&self) -> u64 {
        self.base + 6 * self.block
    }
}

struct Editor<'a, 'm> {
    machine: &'m Machine,
    control: &'m Control,
    dice: &'a Dice,
    oracle: &'a Oracle<'m>,
    platform: Faulty<'m>,
    root: Pa,
    id: u16,
    at: Layout,
    /// The tables of pages that were freed last.
    stale: Cell<Option<Pa>>,
}

/// One CPU edits with page-table code as it is commonly written, others use the space.
pub struct Baseline;

impl ByHand for Baseline {
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
        let at = Layout {
            page,
            block: page << F::INDEX_BITS,
            run: 1 << F::contiguous(Level::PAGE),
            base,
        };
        let last = |size: u64| (size - 1) * page;
        let spots: Vec<u64> = (0..2 * PAGES)
            .map(|number| at.page(number))
            .chain([0, page, last(at.run)].map(|offset| at.run_at() + offset))
            .chain([0, page, at.block - page].map(|offset| at.block_at() + offset))
            .chain([0, last(MANY)].map(|offset| at.many_at() + offset))
            .collect();
        let mut spots = spots;
        spots.dedup();
        let oracle = Oracle::new(machine, spots);
        let root = loop {
            if let Some(root) = platform.alloc_table(F::root_level()) {
                break root;
            }
        };
        raw::zero::<F>(&platform, root, F::root_level());
        platform.barrier(Barrier::Publish);
        let id = 5;
        platform.mapper.attach(root, half, id);
        let editor = RefCell::new(Editor {
            machine,
            control,
            dice,
            oracle: &oracle,
            platform,
            root,
            id,
            at,
            stale: Cell::new(None),
        });
        let edits = 8 + dice.below(20);
        let seed = dice.below(1 << 48);
        let done = Cell::new(false);
        let outcome = machine.run(|cpu| {
            platform.mapper.load();
            if cpu.id() == 0 {
                let editor = editor.borrow_mut();
                for _ in 0..edits {
                    editor.edit::<F>(cpu);
                }
                done.set(true);
                return;
            }
            until_done(cpu, &done, seed, |dice| oracle.try_one(cpu, dice));
        })?;
        between(machine.digest());
        if machine.violations().is_empty() {
            machine.calm();
            editor.into_inner().tear_down::<F>(half);
        }
        Ok(outcome)
    }
}

impl Editor<'_, '_> {
    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    fn edit<F: Format<Input = Va>>(&self, cpu: Cpu<'_>) {
        match self.dice.below(14) {
            0..=3 => self.map_page::<F>(),
            4..=6 => self.unmap_page::<F>(self.dice.below(2 * PAGES)),
            7..=9 => self.protect_page::<F>(),
            10 => self.run_of_pages::<F>(),
            11..=12 => self.block::<F>(),
            _ => self.many_pages::<F>(),
        }
        cpu.spend(self.dice.time());
        if self.dice.once_in(4) {
            self.oracle.try_one(cpu, self.dice);
        }
    }

    // ---- What it is made of ----

    /// The entry for `va` at `level`, with the tables on the way made.
    fn make<F: Format<Input = Va>>(&self, va: u64, level: Level) -> Option<Place> {
        let mut place = raw::entry::<F>(&self.platform, self.root, F::root_level(), va);
        while place.level > level {
            let bits = place.load(&self.platform);
            let below = place.level.down()?;
            let frame = match F::kind(bits, place.level) {
                Kind::Table => F::address(bits, place.level),
                Kind::Leaf => return None,
                Kind::Invalid => self.make_table::<F>(place, below)?,
            };
            place = raw::entry::<F>(&self.platform, frame, below, va);
        }
        Some(place)
    }

    fn make_table<F: Format>(&self, place: Place, below: Level) -> Option<Pa> {
        let platform = &self.platform;
        if self.is(Bug::FreedTableLinkedAgain)
            && below == Level::PAGE
            && let Some(frame) = self.stale.take()
        {
            place.link(platform, F::table(frame, Perms::empty()));
            return Some(frame);
        }
        let frame = platform.alloc_table(below)?;
        let bits = F::table(frame, Perms::empty());
        if self.is(Bug::LinkedBeforeZeroed) {
            place.link(platform, bits);
            raw::zero::<F>(platform, frame, below);
        } else {
            raw::zero::<F>(platform, frame, below);
            place.link(platform, bits);
        }
        platform.barrier(Barrier::Publish);
        Some(frame)
    }

    /// Has a range forgotten, and waits.
    fn forget(&self, first: u64, last: u64, level: Option<Level>, tables: bool) {
        if self.is(Bug::FlushIsEmpty) {
            return;
        }
        if !self.is(Bug::NoBarrierBeforeTlbi) {
            self.platform.barrier(Barrier::Publish);
        }
        if self.is(Bug::TlbiIsLocal) {
            self.machine.tlbi(Tlbi { range: Some((first, last)), ..Tlbi::default() });
        } else {
            let range = Stale { first, last, level, tables };
            self.platform.invalidate(&Invalidation {
                root: self.root,
                id: self.id,
                global: true,
                what: What::Ranges(&[range]),
            });
        }
        self.platform.barrier(Barrier::Complete);
    }

    /// Takes an entry out; its flags are those that it had in the end.
    fn clear(&self, place: Place) -> u64 {
        place.exchange(&self.platform, 0)
    }

    fn attrs<F: Format>(bits: u64) -> Attrs {
        F::decode(bits, Level::PAGE)
    }

    // ---- Pages ----

    fn map_page<F: Format<Input = Va>>(&self) {
        let number = self.dice.below(2 * PAGES);
        let va = self.at.page(number);
        let Some(spot) = self.oracle.inside(va, va).next() else {
            return;
        };
        if spot.page().is_some() {
            return;
        }
        let Some(page) = self.machine.take_page() else {
            return;
        };
        self.oracle.fresh(page);
        let attrs = Attrs {
            dirty: self.dice.once_in(2),
            accessed: self.dice.once_in(2),
            ..self.dice.pick(&[Attrs::USER_DATA, Attrs::KERNEL_DATA, Attrs::USER_RODATA])
        };
        let before = spot.begin(Some(Page::new(page.get(), attrs)));
        let (Some(place), Ok(bits)) =
            (self.make::<F>(va, Level::PAGE), F::encode(&attrs, Level::PAGE))
        else {
            spot.restore(before);
            self.machine.give_page(page);
            return;
        };
        let mut bits = bits | F::put_address(page);
        if self.is(Bug::PageWrittenAsBlock) && F::HALVES {
            bits &= !2;
        }
        place.store(&self.platform, bits);
        self.platform.barrier(Barrier::Publish);
        announce(self.machine);
        spot.end();
    }

    fn unmap_page<F: Format<Input = Va>>(&self, number: u64) {
        let va = self.at.page(number);
        let last = va + (self.at.page - 1);
        let Some(spot) = self.oracle.inside(va, va).next() else {
            return;
        };
        let Some(page) = spot.page() else {
            return;
        };
        let Some(place) = raw::find::<F>(&self.platform, self.root, va, Level::PAGE) else {
            let what = format!("{va:#x} was mapped, and its table is gone");
            return self.machine.report(Rule::NoProgress, what);
        };
        spot.begin(None);
        let early = self.is(Bug::InvalidatedBeforeStore);
        if early {
            self.forget(va, last, Some(Level::PAGE), false);
        }
        let bits = self.clear(place);
        if !early {
            self.forget(va, last, Some(Level::PAGE), false);
        }
        self.oracle.account_for(va, last, Self::attrs::<F>(bits));
        spot.end();
        self.machine.give_page(Pa::new(page.pa));
        self.free_empty::<F>(va);
    }

    /// Frees the table that translates `va` if nothing is in it.
    fn free_empty<F: Format<Input = Va>>(&self, va: u64) {
        let level = Level::PAGE.up();
        let Some(parent) = raw::find::<F>(&self.platform, self.root, va, level) else {
            return;
        };
        let bits = parent.load(&self.platform);
        if F::kind(bits, level) != Kind::Table {
            return;
        }
        let frame = F::address(bits, level);
        let looked_at = if self.is(Bug::EmptyByFirstEntry) { 1 } else { F::entries(Level::PAGE) };
        let first = va & !(self.at.block - 1);
        let used = (0..looked_at as u64).any(|index| {
            let va = first + index * self.at.page;
            let place = raw::entry::<F>(&self.platform, frame, Level::PAGE, va);
            place.load(&self.platform) != 0
        });
        if used {
            return;
        }
        self.clear(parent);
        if !self.is(Bug::TableFreedUnforgotten) {
            self.forget(first, first + (self.at.block - 1), None, true);
        }
        // SAFETY: it is out of reach, unless that is the bug.
        unsafe { self.platform.free_table(frame, Level::PAGE) };
        self.stale.set(Some(frame));
    }

    fn protect_page<F: Format<Input = Va>>(&self) {
        let va = self.at.page(self.dice.below(2 * PAGES));
        let last = va + (self.at.page - 1);
        let Some(spot) = self.oracle.inside(va, va).next() else {
            return;
        };
        let (Some(page), Some(place)) =
            (spot.page(), raw::find::<F>(&self.platform, self.root, va, Level::PAGE))
        else {
            return;
        };
        let change = match self.dice.below(4) {
            0 => Change::new().write_protect(),
            1 => Change::new().accessed(false).dirty(false),
            _ => Change::new().perms(Attrs::USER_DATA.perms),
        };
        let (accessed, dirty) = sets(&change);
        spot.begin(Some(page.changed(&change)));
        let mut old = place.load(&self.platform);
        loop {
            let attrs = change.apply(Self::attrs::<F>(old));
            let Ok(new) = F::encode(&attrs, Level::PAGE) else {
                break;
            };
            let new = new | F::put_address(F::address(old, Level::PAGE));
            if self.is(Bug::ProtectedByStore) {
                place.store(&self.platform, new);
                break;
            }
            match place.compare_exchange(&self.platform, old, new) {
                Ok(()) => break,
                Err(now) => old = now,
            }
        }
        self.forget(va, last, Some(Level::PAGE), false);
        spot.clears(accessed == Some(false), dirty == Some(false));
        spot.end();
    }

    // ---- A contiguous run, which comes and goes as a whole ----

    fn run_of_pages<F: Format<Input = Va>>(&self) {
        let (va, count) = (self.at.run_at(), self.at.run);
        let last = va + (count * self.at.page - 1);
        let mapped = self.oracle.inside(va, va).any(|spot| spot.page().is_some());
        let place = |number: u64| self.make::<F>(va + number * self.at.page, Level::PAGE);
        let Some(first) = place(0) else {
            return;
        };
        if mapped {
            let whole = !self.is(Bug::PartOfRunUnmapped);
            let gone = if whole { count } else { count.min(3) };
            let end = va + (gone * self.at.page - 1);
            self.oracle.inside(va, end).for_each(|spot| {
                spot.begin(None);
            });
            let bits = (0..gone).fold(self.clear(first), |bits, number| {
                bits | place(number).map_or(0, |place| self.clear(place))
            });
            self.forget(va, end, Some(Level::PAGE), false);
            // The flags were there from the start.
            self.oracle.account_for(va, end, Self::attrs::<F>(bits & !F::CONTIGUOUS));
            self.oracle.inside(va, end).for_each(Spot::end);
            if whole {
                self.free_empty::<F>(va);
            }
            return;
        }
        let attrs = Attrs::KERNEL_DATA;
        let Ok(mut bits) = F::encode(&attrs, Level::PAGE) else {
            return;
        };
        if count > 1 {
            bits |= F::CONTIGUOUS;
        }
        let page = |va: u64| Page::new(FAR + (va - self.at.run_at()), attrs);
        let half = self.is(Bug::HalfARun) && count > 1;
        let there = if half { count / 2 } else { count };
        let end = va + (there * self.at.page - 1);
        self.oracle.inside(va, end).for_each(|spot| {
            spot.begin(Some(page(spot.va)));
        });
        for number in 0..there {
            if let Some(place) = place(number) {
                let frame = Pa::new(FAR + number * self.at.page);
                place.store(&self.platform, bits | F::put_address(frame));
            }
        }
        self.platform.barrier(Barrier::Publish);
        announce(self.machine);
        self.oracle.inside(va, last).for_each(Spot::end);
    }

    // ---- A block, which is split and unmapped ----

    fn block<F: Format<Input = Va>>(&self) {
        let (va, level) = (self.at.block_at(), Level::new(1));
        let last = va + (self.at.block - 1);
        let Some(place) = self.make::<F>(va, level) else {
            return;
        };
        let attrs = Attrs::KERNEL_DATA;
        let page = |at: u64| Page::new(FAR + (at - va), attrs);
        let bits = place.load(&self.platform);
        let leaf = F::encode(&attrs, level).map(|bits| bits | F::put_address(Pa::new(FAR)));
        let Ok(leaf) = leaf else { return };
        match F::kind(bits, level) {
            Kind::Invalid => {
                self.oracle.inside(va, last).for_each(|spot| {
                    spot.begin(Some(page(spot.va)));
                });
                place.store(&self.platform, leaf);
                self.platform.barrier(Barrier::Publish);
                announce(self.machine);
                self.oracle.inside(va, last).for_each(Spot::end);
            }
            Kind::Leaf => self.split::<F>(place, va, last),
            Kind::Table if self.is(Bug::MappedOverTable) => {
                // Without a look whether something is there.
                let other = Pa::new(2 * FAR);
                if let Ok(bits) = F::encode(&attrs, level) {
                    place.store(&self.platform, bits | F::put_address(other));
                    self.platform.barrier(Barrier::Publish);
                }
            }
            Kind::Table => {
                self.oracle.inside(va, last).for_each(|spot| {
                    spot.begin(None);
                });
                let frame = F::address(self.clear(place), level);
                if self.is(Bug::TableFreedAfterLeaves) {
                    // Each page is forgotten, what is remembered of the table is not.
                    self.forget(va, last, Some(Level::PAGE), false);
                } else {
                    self.forget(va, last, None, true);
                }
                self.oracle.account_for(va, last, attrs);
                self.oracle.inside(va, last).for_each(Spot::end);
                // SAFETY: it is out of reach, unless that is the bug.
                unsafe { self.platform.free_table(frame, Level::PAGE) };
            }
        }
    }

    fn split<F: Format<Input = Va>>(&self, place: Place, va: u64, last: u64) {
        let Some(frame) = self.platform.alloc_table(Level::PAGE) else {
            return;
        };
        let Ok(bits) = F::encode(&Attrs::KERNEL_DATA, Level::PAGE) else {
            return;
        };
        // SAFETY: the frame was allocated for a table, and all of it is written. The address of
        // consecutive pages differs by their size inside a block.
        unsafe {
            let table = self.platform.table(frame, Level::PAGE);
            let first = bits | F::put_address(Pa::new(FAR));
            self.platform.fill(table, F::entries(Level::PAGE), first, self.at.page);
        }
        let before: Vec<_> =
            self.oracle.inside(va, last).map(|spot| (spot, spot.begin(spot.page()))).collect();
        let x86 = self.machine.architecture().is_x86();
        let in_place = x86 || self.is(Bug::SplitInOneStore);
        if !in_place {
            self.clear(place);
            self.forget(va, last, Some(place.level), false);
        }
        place.link(&self.platform, F::table(frame, Perms::empty()));
        if in_place {
            self.forget(va, last, None, true);
        } else {
            self.platform.barrier(Barrier::Publish);
        }
        before.into_iter().for_each(|(spot, before)| spot.restore(before));
    }

    // ---- Many pages ----

    fn many_pages<F: Format<Input = Va>>(&self) {
        let va = self.at.many_at();
        let last = va + (MANY * self.at.page - 1);
        let mapped = self.oracle.inside(va, va).any(|spot| spot.page().is_some());
        let place = |number: u64| self.make::<F>(va + number * self.at.page, Level::PAGE);
        if place(0).is_none() {
            return;
        }
        if !mapped {
            let mut pages = Vec::new();
            while pages.len() < MANY as usize
                && let Some(page) = self.machine.take_page()
            {
                self.oracle.fresh(page);
                pages.push(page);
            }
            let Ok(bits) = F::encode(&Attrs::KERNEL_DATA, Level::PAGE) else {
                return;
            };
            if pages.len() < MANY as usize {
                pages.into_iter().for_each(|page| self.machine.give_page(page));
                return;
            }
            for (number, &page) in (0..).zip(&pages) {
                let at = va + number * self.at.page;
                self.oracle.inside(at, at).for_each(|spot| {
                    spot.begin(Some(Page::new(page.get(), Attrs::KERNEL_DATA)));
                });
                if let Some(place) = place(number) {
                    place.store(&self.platform, bits | F::put_address(page));
                }
            }
            self.platform.barrier(Barrier::Publish);
            announce(self.machine);
            self.oracle.inside(va, last).for_each(Spot::end);
            return;
        }
        self.oracle.inside(va, last).for_each(|spot| {
            spot.begin(None);
        });
        let pages: Vec<Pa> = (0..MANY)
            .filter_map(place)
            .map(|place| F::address(self.clear(place), Level::PAGE))
            .collect();
        if pages.len() as u64 > ONE_BY_ONE && !self.is(Bug::FlushIsEmpty) {
            self.platform.barrier(Barrier::Publish);
            let broadcast = !self.is(Bug::AllOnlyLocal);
            self.machine.tlbi(Tlbi { broadcast, ..Tlbi::ALL });
            self.platform.barrier(Barrier::Complete);
        }
        self.oracle.account_for(va, last, Attrs::KERNEL_DATA);
        self.oracle.inside(va, last).for_each(Spot::end);
        pages.into_iter().for_each(|page| self.machine.give_page(page));
        self.free_empty::<F>(va);
    }

    fn tear_down<F: Format<Input = Va>>(self, half: Half) {
        for number in 0..2 * PAGES {
            self.unmap_page::<F>(number);
        }
        let is_mapped = |va: u64| self.oracle.inside(va, va).any(|spot| spot.page().is_some());
        if is_mapped(self.at.run_at()) {
            self.run_of_pages::<F>();
        }
        // It is split, and unmapped.
        for _ in 0..2 {
            if is_mapped(self.at.block_at()) {
                self.block::<F>();
            }
        }
        if is_mapped(self.at.many_at()) {
            self.many_pages::<F>();
        }
        raw::destroy::<F>(self.platform, self.root, half);
    }
}

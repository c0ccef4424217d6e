//! Edits invalidate all that they changed, with a level that is right: random edits against the
//! record.
//!
//! The platform looks at the whole tree whenever an invalidation is issued. Each entry that was
//! valid and is another by then is a debt: its leaf, at its level, or its table has to be
//! forgotten. An invalidation pays what it covers; once the gather is issued, nothing may be owed.

use crate::common;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::ptr::NonNull;

use common::Judged;
use proptest::prelude::*;
use tablewright::bbm::State;
use tablewright::flush::MAX_RANGES;
use tablewright::format::{Arm64K4, Arm64K16, X86_64};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Gather, Invalidation, Kind,
    Level, Liveness, Mapping, Memory, Pa, Perms, Platform, Span, Stale, TableLink, Va, What,
};
use tablewright_hosted::{Hosted, Told};

/// Valid entries by their level and the first address that they translate.
type Tree = BTreeMap<(u8, u64), u64>;

/// Something that a processor may remember and has to forget.
#[derive(Clone, Copy, Debug)]
struct Debt {
    first: u64,
    last: u64,
    /// The level of a leaf; `None` for a table.
    leaf: Option<Level>,
}

struct Ledger<F: Judged> {
    memory: Hosted,
    root: Cell<Option<Pa>>,
    tree: RefCell<Tree>,
    debts: RefCell<Vec<Debt>>,
    issued: RefCell<Vec<Told>>,
    format: std::marker::PhantomData<F>,
}

impl<F: Judged> Ledger<F> {
    fn new(caps: Caps) -> Self {
        Self {
            memory: Hosted::new(600, F::PAGE_SHIFT).with_caps(caps),
            root: Cell::new(None),
            tree: RefCell::default(),
            debts: RefCell::default(),
            issued: RefCell::default(),
            format: std::marker::PhantomData,
        }
    }

    fn read(&self, frame: Pa, level: Level, first: u64, tree: &mut Tree) {
        for index in 0..F::entries(level) {
            let entry = self.memory.read(frame, index).unwrap();
            let at = first + ((index as u64) << F::shift(level));
            match (F::kind(entry, level), level.down()) {
                (Kind::Invalid, _) => continue,
                (Kind::Table, Some(below)) => {
                    self.read(F::address(entry, level), below, at, tree);
                }
                _ => {}
            }
            tree.insert((level.height(), at), entry);
        }
    }

    /// Looks at the tree, and writes down what has changed since the last look.
    fn look(&self) {
        let Some(root) = self.root.get() else { return };
        let mut now = Tree::new();
        self.read(root, F::root_level(), 0, &mut now);
        let before = self.tree.replace(now);
        let now = self.tree.borrow();
        for ((height, first), entry) in before {
            let level = Level::new(height);
            let is = now.get(&(height, first)).copied().unwrap_or(0);
            let (old, new) = (State::of::<F>(entry, level), State::of::<F>(is, level));
            let leaf = match old {
                // What is left to software need not be forgotten; nor a leaf that was never
                // accessed.
                _ if old == new => continue,
                State::Leaf { attrs, contiguous, .. } if !attrs.accessed && !contiguous => continue,
                State::Leaf { .. } => Some(level),
                _ => None,
            };
            let last = first + ((1 << F::shift(level)) - 1);
            self.debts.borrow_mut().push(Debt { first, last, leaf });
        }
    }

    fn pay(&self, stale: &Stale) {
        let debts = self.debts.take();
        let &Stale { first, last, level, tables } = stale;
        assert!(first <= last);
        let page = 1u64 << F::PAGE_SHIFT;
        assert!(first.is_multiple_of(page) && last.wrapping_add(1).is_multiple_of(page));
        let mut left = Vec::new();
        for debt in debts {
            // A level that is told and is not that of the leaf invalidates nothing.
            let kind = match debt.leaf {
                Some(leaf) => level.is_none_or(|level| level == leaf),
                None => tables,
            };
            if !kind || debt.last < first || last < debt.first {
                left.push(debt);
                continue;
            }
            // What lies before and behind the range stays owed.
            if debt.first < first {
                left.push(Debt { last: first - 1, ..debt });
            }
            if last < debt.last {
                left.push(Debt { first: last + 1, ..debt });
            }
        }
        self.debts.replace(left);
    }
}

// SAFETY: passed on to `Hosted`.
unsafe impl<F: Judged> Platform for Ledger<F> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.memory.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.memory.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.memory.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
        self.look();
        match what.what {
            What::Everything => drop(self.debts.take()),
            What::Ranges(ranges) => ranges.iter().for_each(|stale| self.pay(stale)),
        }
        assert_eq!(Some(what.root), self.root.get());
        assert!(what.global, "what is mapped here is global");
        self.issued.borrow_mut().push(what.into());
    }
    fn caps(&self) -> Caps {
        self.memory.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.memory.link_of(frame)
    }
}

/// An edit: what, where in units of what, how far.
type Op = (u8, u8, u16, u8, u8);

fn op() -> impl Strategy<Value = Op> {
    (0..14u8, 0..4u8, any::<u16>(), 1..20u8, any::<u8>())
}

const CHANGES: [Change; 7] = [
    Change::new().perms(Perms::READ),
    Change::new().perms(Perms::READ.union(Perms::WRITE)),
    Change::new().write_protect(),
    Change::new().memory(Memory::NonCacheable),
    Change::new().memory(Memory::Normal),
    Change::new().accessed(false),
    Change::new().software(3).global(false),
];

fn pays_what_it_owes<F: Judged>(ops: &[Op], caps: Caps, liveness: Liveness) {
    let ledger = Ledger::<F>::new(caps);
    let mut space = AddressSpace::<F, _>::new(&ledger).unwrap();
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    let extent = 40 * block;
    // Blocks in runs and not, pages in runs and not, to begin with.
    let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(Level::new(1));
    for (first, size, mapping) in [
        (0, 32 * block, mapping),
        (32 * block, 2 * block, mapping.without_runs()),
        (34 * block, block, mapping.pages_only()),
        (35 * block, block, mapping.largest(Level::PAGE)),
    ] {
        let at = Span::new(Va::new(first), size).unwrap();
        space.map(at, Pa::new(first), mapping).unwrap();
    }
    common::used(&mut space, liveness);
    ledger.root.set(Some(space.root()));
    ledger.look();
    ledger.debts.take();
    ledger.issued.take();

    let mut gather = space.gather();
    for &(what, unit, number, length, detail) in ops {
        let unit = match unit {
            0 => page,
            1 => page << F::contiguous(Level::PAGE),
            2 => block,
            _ => 3 * page,
        };
        // Somewhere, or in the part that is made of pages.
        let (from, to) = match detail % 2 {
            0 => (0, extent),
            _ => (32 * block, 36 * block),
        };
        let first = from + u64::from(number) % ((to - from) / unit) * unit;
        let size = (u64::from(length) * unit).min(extent - first) & !(page - 1);
        let at = Span::new(Va::new(first), size).unwrap();
        let result = match what {
            0..=1 => {
                // What was unmapped has to be forgotten before something else is mapped there.
                finish(&ledger, gather);
                gather = space.gather();
                let mapping = match detail / 2 % 3 {
                    0 => mapping.pages_only(),
                    1 => mapping.without_runs(),
                    _ => mapping,
                };
                let pages = size / page > 4 * block / page;
                let mapping = if pages { mapping.largest(Level::new(1)) } else { mapping };
                gather.map(at, Pa::new(first), mapping)
            }
            2..=4 => gather.unmap(at, |_| ControlFlow::Continue(())).map(|_| ()),
            5..=9 => {
                let change = CHANGES[usize::from(detail / 2) % CHANGES.len()];
                gather.protect(at, change)
            }
            10..=11 => {
                let large = size > 4 * block;
                let largest = Level::new(u8::from(large));
                gather.split(at, largest)
            }
            _ => gather.collapse(at, Level::new(1), detail / 2 % 2 == 0).map(|_| ()),
        };
        match result {
            Ok(()) | Err(EditError::AlreadyMapped(_)) => {}
            Err(EditError::NeedsBreak(_) | EditError::OutOfTables) => {}
            Err(error) => panic!("{error:?}"),
        }
        ledger.issued.take();
    }
    finish(&ledger, gather);
}

/// Issues the gather; nothing may be owed after that, and no more be asked for than was promised.
fn finish<F: Judged>(ledger: &Ledger<F>, gather: Gather<'_, F, &Ledger<F>>) {
    ledger.look();
    ledger.issued.take();
    let clean = gather.is_clean();
    let completed = gather.issue().complete();
    let issued = ledger.issued.take();
    assert_eq!(issued.len(), usize::from(!clean), "one for all ranges");
    let owed = ledger.debts.take();
    assert!(owed.is_empty(), "{}: owed {:?}, issued {issued:?}", F::NAME, owed[0]);
    for told in issued.iter().filter(|told| !told.everything) {
        assert!((1..=MAX_RANGES).contains(&told.ranges.len()));
        let operations = told.ranges.iter().map(|stale| {
            let shift = stale.level.map_or(F::PAGE_SHIFT, F::shift);
            ((stale.last - stale.first) >> shift) + 1
        });
        assert!(operations.sum::<u64>() <= ledger.memory.caps().invalidate_all_above);
    }
    completed.finish(|_| ());
    assert_eq!(ledger.memory.counts().bad_frees, 0);
}

fn run<F: Judged>() {
    let cases = if cfg!(miri) { 2 } else { 250 };
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    let strategy = (
        proptest::collection::vec(op(), 1..24),
        0..4u8,
        prop_oneof![Just(4u64), Just(512), Just(1 << 40)],
        any::<bool>(),
        any::<bool>(),
    );
    proptest!(config, |((ops, bbm, invalidate_all_above, hardware, own) in strategy)| {
        let caps = Caps {
            bbm,
            invalidate_all_above,
            hardware_access: hardware,
            hardware_dirty: hardware,
            ..tablewright_hosted::CAPS
        };
        let liveness = if own { Liveness::Own } else { Liveness::Live };
        pays_what_it_owes::<F>(&ops, caps, liveness);
    });
}

#[test]
fn every_change_is_invalidated_with_a_level_that_is_right_arm64_4k() {
    run::<Arm64K4>();
}

#[test]
fn every_change_is_invalidated_with_a_level_that_is_right_arm64_16k() {
    run::<Arm64K16>();
}

#[test]
fn every_change_is_invalidated_with_a_level_that_is_right_x86_64() {
    run::<X86_64<4>>();
}

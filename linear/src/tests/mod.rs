//! Each technique, alone and with every other, on a computer that notices what is wrong with a
//! window.

mod boot;
mod spy;

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::vec::Vec;

use proptest::prelude::*;
use tablewright::format::{Arm64K4, Arm64K4Wide, Arm64K16, Arm64K64, X86_64};
use tablewright::linear::{LinearError, LinearMap, MemoryMap};
use tablewright::{
    AddressSpace, Attrs, Barrier, EditError, Half, Hooks, Invalidation, Level, Mapping, NoHooks,
    Pa, Platform, Span, Stale, Va, What,
};
use tablewright_hosted::Hosted;

use super::engine::coarse;
use super::{Counted, Counts, Goal, Technique, Techniques, add, build};
use boot::{Boot, Judged, Loaded, found};
use spy::Spy;

/// All sets of techniques.
fn all() -> impl Iterator<Item = Techniques> {
    (0..1 << Technique::ALL.len()).map(|set: usize| {
        let taken = |&technique: &Technique| set >> technique as usize & 1 != 0;
        Technique::ALL.into_iter().filter(taken).collect()
    })
}

fn span(start: u64, size: u64) -> Span<Pa> {
    Span::new(Pa::new(start), size).unwrap()
}

/// Returns a number of pages of the format, from a page on.
fn pages<F: Judged>(first: u64, count: u64) -> Span<Pa> {
    span(first << F::PAGE_SHIFT, count << F::PAGE_SHIFT)
}

fn goal<F: Judged>(root: Pa, memory: MemoryMap<'_>) -> Goal<'_> {
    Goal { root, base: Va::new(F::BASE), memory, attrs: Attrs::KERNEL_DATA }
}

const fn ram(ram: &[Span<Pa>]) -> MemoryMap<'_> {
    MemoryMap { ram, reserved: &[], special: &[] }
}

/// Has the engine build on memory that can be reached: its leaves, and how many tables.
fn by_the_engine<F: Judged>(memory: &MemoryMap<'_>, frames: usize) -> (Vec<(u64, u64)>, u64) {
    let hosted = Hosted::new(frames, F::PAGE_SHIFT);
    let half = if F::HALVES { Half::Upper } else { Half::Lower };
    let mut space = AddressSpace::<F, _>::new_in(&hosted, half).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    LinearMap::new(Va::new(F::BASE), mapping).build(&mut space, memory).unwrap();
    found::<F>(&hosted, space.root())
}

/// Builds `memory` with these techniques and says what that took.
fn run<F: Judged>(boot: &Boot<F>, techniques: Techniques, goal: &Goal<'_>) -> Counts {
    let fixmap = boot.fixmap();
    let counted = Counted::new(boot, &fixmap);
    // SAFETY: the root and its tables are frames of this computer, without another editor.
    unsafe { build::<F, _, _>(techniques, &counted, &fixmap, goal) }.unwrap();
    boot.assert_clean();
    counted.counts()
}

/// Memory with all that is special: ranges that touch, that end inside of a run, of a table and far
/// away; text and constants; reserved memory inside, across and at an edge.
fn some_memory<F: Judged>(check: impl FnOnce(&MemoryMap<'_>)) {
    let table = 1 << F::INDEX_BITS;
    let ram = [
        pages::<F>(3, table),
        pages::<F>(3 + table, 7),
        pages::<F>(2 * table + 16, 2 * table),
        pages::<F>(table * table, 5),
    ];
    let reserved = [pages::<F>(0, 4), pages::<F>(100, 9), pages::<F>(table + 1, table + 30)];
    let special =
        [(pages::<F>(40, 50), Attrs::KERNEL_TEXT), (pages::<F>(90, 20), Attrs::KERNEL_RODATA)];
    check(&MemoryMap { ram: &ram, reserved: &reserved, special: &special });
}

/// The addresses that are to be mapped, page by page.
fn expected<F: Judged>(memory: &MemoryMap<'_>) -> Vec<u64> {
    let size = 1 << F::PAGE_SHIFT;
    let ram = memory.ram.iter();
    ram.flat_map(|ram| (ram.start().get()..=ram.last().get()).step_by(size))
        .filter(|&at| !memory.reserved.iter().any(|span| span.contains(Pa::new(at))))
        .map(|at| F::BASE + at)
        .collect()
}

fn the_tables_are_those_of_the_engine<F: Judged>() {
    some_memory::<F>(|memory| {
        let engines = by_the_engine::<F>(memory, 64);
        let addresses: Vec<u64> = engines.0.iter().map(|&(at, _)| at).collect();
        assert_eq!(addresses, expected::<F>(memory));
        for techniques in all() {
            let boot = Boot::<F>::new(64);
            let root = boot.root();
            let counts = run(&boot, techniques, &goal::<F>(root, *memory));
            let names = techniques.names();
            assert!(boot.found(root) == engines, "{names:?}");
            assert_eq!(boot.memory.counts().tables, engines.1, "{names:?}");
            assert_eq!(counts.entries, engines.0.len() as u64, "{names:?}");
        }
    });
}

/// Returns the counts of a map of `n` whole last-level tables below one table, by arithmetic.
fn arithmetic<F: Judged>(techniques: Techniques, n: u64) -> Counts {
    let has = |technique| techniques.has(technique);
    let (zeroing, keep) = (u64::from(!has(Technique::NoAllocRemap)), has(Technique::NoAllocRemap));
    let runs = |level: u8, entries: u64| match F::contiguous(Level::new(level)) {
        0 => 1,
        _ if has(Technique::NoContRemap) => 1,
        run => entries.div_ceil(1 << run),
    };
    let per_table = 1 << F::INDEX_BITS;
    // Between the root and the last level there is one table at each.
    let above = u64::from(F::LEVELS) - 2;
    let tables = n + above;
    let at_once = 1 + runs(1, n) + (above - 1);
    let last_level = n * runs(0, per_table) + zeroing * tables;
    let cleared = if has(Technique::LazyUnmap) { last_level.div_ceil(16) } else { last_level };
    let entry_barriers = match (has(Technique::BatchBarriers), has(Technique::LazyUnmap)) {
        (false, _) => n * per_table,
        (true, true) => n,
        (true, false) => 0,
    };
    let zero_barriers = if keep || has(Technique::LazyUnmap) { tables } else { 0 };
    let moves = at_once + last_level;
    Counts {
        tables,
        freed: 0,
        entries: n * per_table,
        links: tables,
        zeroed: tables * per_table,
        moves,
        invalidations: moves,
        completions: at_once + cleared,
        barriers: moves + (at_once + cleared) + tables + entry_barriers + zero_barriers,
        entry_barriers,
    }
}

fn what_it_takes_is_what_the_techniques_say<F: Judged>() {
    let table = 1 << F::INDEX_BITS;
    for techniques in all() {
        for n in [1, 2, 16, 35] {
            let boot = Boot::<F>::new(64);
            let list = [pages::<F>(0, n * table)];
            let counts = run(&boot, techniques, &goal::<F>(boot.root(), ram(&list)));
            let names = techniques.names();
            assert_eq!(counts, arithmetic::<F>(techniques, n), "{names:?}, {n} tables");
        }
    }
}

/// The published table: for each last-level table how often it is shown, the invalidations, the
/// waits for 16 tables, and the barriers after entries.
#[test]
fn a_last_level_table_takes_what_was_published() {
    let published = [
        ("base", [33, 33, 33 * 16, 512]),
        ("no-cont-remap", [2, 2, 2 * 16, 512]),
        ("no-alloc-remap", [1, 1, 16, 512]),
        ("lazy-unmap", [1, 1, 1, 512]),
        ("batch-barriers", [1, 1, 1, 1]),
    ];
    let took = |techniques, tables: u64| {
        let boot = Boot::<Arm64K4>::new(64);
        let list = [span(0, tables << 21)];
        let counts = run(&boot, techniques, &goal::<Arm64K4>(boot.root(), ram(&list)));
        [counts.moves, counts.invalidations, counts.completions * 16, counts.entry_barriers]
    };
    let mut techniques = Techniques::default();
    for (number, (name, expected)) in published.into_iter().enumerate() {
        if let Some(before) = number.checked_sub(1) {
            assert_eq!(Technique::ALL[before].name(), name);
            techniques = techniques.with(Technique::ALL[before]);
        }
        // Without no-cont-remap, what is above the tables is the same for all that are in one run
        // of 16; with lazy-unmap the slots are cleared every 16 tables. In between, both are good.
        let (few, many) = if number == 0 { (1, 16) } else { (16, 32) };
        let (few, many, more) = (took(techniques, few), took(techniques, many), many - few);
        let each: Vec<u64> = many.iter().zip(few).map(|(many, few)| many - few).collect();
        assert_eq!(each, expected.map(|each| each * more), "{name}");
    }
}

/// Larger pages have longer tables and other runs: of 128 and of 32, in tables of 2048 and 8192
/// entries.
#[test]
fn larger_pages_have_longer_tables_and_other_runs() {
    let base = Techniques::default();
    let shown = |per_table: fn(Techniques, u64) -> Counts| {
        (per_table(base, 17).moves - per_table(base, 1).moves) / 16
    };
    assert_eq!(shown(arithmetic::<Arm64K16>), 2048 / 128 + 1);
    assert_eq!(shown(arithmetic::<Arm64K64>), 8192 / 32 + 1);
    // No runs: a table is filled in one piece.
    assert_eq!(shown(arithmetic::<X86_64<4>>), 2);
}

/// The levels above are filled in one piece, although the format has runs there: a run of them
/// translates 16 GiB.
#[test]
fn runs_are_those_of_the_last_two_levels() {
    let techniques: Techniques =
        [Technique::NoAllocRemap, Technique::LazyUnmap, Technique::BatchBarriers]
            .into_iter()
            .collect();
    let boot = Boot::<Arm64K4>::new(17 * 513 + 2);
    let list = [span(0, 17 << 30)];
    let counts = run(&boot, techniques, &goal::<Arm64K4>(boot.root(), ram(&list)));
    let runs = 512 / 16;
    assert_eq!(counts.moves, 1 + 1 + 17 * runs + 17 * 512 * runs);
}

#[test]
fn addresses_go_on_where_they_move_to_other_bits() {
    let list = [pages::<Arm64K4Wide>((1 << 38) - 20, 40)];
    let boot = Boot::<Arm64K4Wide>::new(16);
    let root = boot.root();
    run(&boot, Techniques::default(), &goal::<Arm64K4Wide>(root, ram(&list)));
    assert!(boot.found(root) == by_the_engine::<Arm64K4Wide>(&ram(&list), 16));
}

fn memory_that_is_added_late_moves_and_invalidates_nothing<F: Judged>() {
    let table = 1 << F::INDEX_BITS;
    let table_memory = pages::<F>(Hosted::BASE.get() >> F::PAGE_SHIFT, 64);
    let added = pages::<F>(3 * table / 2, 2 * table);
    let before = [pages::<F>(0, 3 * table / 2), table_memory];
    let after = [before[0], added, table_memory];
    let reserved = [pages::<F>(2 * table + 10, 1)];
    let (before, after) = (ram(&before), ram(&after));
    let after = MemoryMap { reserved: &reserved, ..after };
    let engines = by_the_engine::<F>(&after, 64);
    for techniques in all() {
        let boot = Boot::<F>::new(64);
        let root = boot.root();
        run(&boot, techniques, &goal::<F>(root, before));
        let window = Loaded::new(&boot, Some(root), F::BASE);
        let fixmap = boot.fixmap();
        let counted = Counted::new(&boot, &fixmap);
        let goal = goal::<F>(root, after);
        let nothing = pages::<F>(200 * table, 1);
        // SAFETY: all tables are mapped by the linear map, without another editor.
        let refused = unsafe { add::<F, _, _>(techniques, &counted, &window, &goal, nothing) };
        assert_eq!(refused, Err(LinearError::NotRam(nothing)));
        // SAFETY: as above.
        unsafe { add::<F, _, _>(techniques, &counted, &window, &goal, added) }.unwrap();
        boot.assert_clean();
        assert!(boot.found(root) == engines, "{:?}", techniques.names());
        let counts = counted.counts();
        assert_eq!((counts.moves, counts.invalidations, counts.completions), (0, 0, 0));
        assert_eq!(counts.entries, 2 * table - 1);
        assert!(window.used.get() > 0);
        // The hole makes two regions, which share the middle one of three tables.
        let barriers = if techniques.has(Technique::BatchBarriers) { 4 } else { counts.entries };
        assert_eq!(counts.entry_barriers, barriers, "{:?}", techniques.names());
    }
}

fn the_engine_maps_the_same_and_waits_as_often_for_any_size<F: Judged>() {
    let frames = 2000;
    let table_memory = pages::<F>(Hosted::BASE.get() >> F::PAGE_SHIFT, frames);
    let reserved = [pages::<F>(1, 2), pages::<F>((Hosted::BASE.get() >> F::PAGE_SHIFT) + 1500, 3)];
    let table = 1 << F::INDEX_BITS;
    let mut counts = Vec::new();
    for tables in [2, 40] {
        let ram = [pages::<F>(0, tables * table), table_memory];
        let memory = MemoryMap { ram: &ram, reserved: &reserved, special: &[] };
        let boot = Boot::<F>::new(frames as usize);
        boot.links_need_barrier.set(false);
        let root = boot.root();
        let fixmap = boot.fixmap();
        let counted = Counted::new(&boot, &fixmap);
        let map = Loaded::new(&boot, None, 0);
        let mut switched = Vec::new();
        // SAFETY: the root and its tables are frames of this computer, without another editor, and
        // `switch` unloads.
        unsafe {
            coarse::<F, _, _, _>(&counted, &fixmap, &goal::<F>(root, memory), &map, |to| {
                match to {
                    Some(root) => map.root.set(Some(root)),
                    None => {
                        no_more_than(&boot, map.root.get().unwrap(), &memory);
                        map.unload();
                    }
                }
                switched.push(to.is_some());
            })
        }
        .unwrap();
        boot.assert_clean();
        assert_eq!(switched, [true, false]);
        let engines = by_the_engine::<F>(&memory, frames as usize);
        assert!(boot.found(root) == engines);
        // The tables of the coarse map were freed.
        assert_eq!(boot.memory.counts().tables, engines.1);
        assert_eq!(boot.memory.counts().bad_frees, 0);
        let took = counted.counts();
        assert_eq!(took.tables - took.freed, engines.1 - 1);
        assert!(map.used.get() >= engines.1 - 2, "reached through the coarse map");
        counts.push(took);
    }
    // The slots at the end, and the coarse map.
    assert_eq!((counts[0].invalidations, counts[0].completions), (2, 2));
    assert_eq!((counts[1].invalidations, counts[1].completions), (2, 2));
    assert_eq!(counts[0].moves, counts[1].moves);
    assert_eq!(counts[0].barriers, counts[1].barriers);
}

/// Whether a coarse map maps memory of the map, and nothing that is reserved.
fn no_more_than<F: Judged>(boot: &Boot<F>, root: Pa, memory: &MemoryMap<'_>) {
    let mut read = |table, index| boot.memory.read(Pa::new(table), index).unwrap();
    let half = tablewright_walker::Half::Lower;
    let mut leaves = 0;
    tablewright_walker::leaves(F::REGIME, root.get(), half, &mut read, |leaf| {
        let mapped = span(leaf.pa, leaf.size);
        assert_eq!(leaf.va, leaf.pa);
        assert!(memory.reserved.iter().all(|span| span.intersect(mapped).is_none()));
        assert!(memory.ram.iter().any(|ram| ram.intersect(mapped) == Some(mapped)));
        leaves += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(leaves > 0);
}

macro_rules! for_each_format {
    ($($test:ident)*) => {
        for_each_format!(@ [$($test)*] arm64_4k Arm64K4);
        for_each_format!(@ [$($test)*] arm64_4k_wide Arm64K4Wide);
        for_each_format!(@ [$($test)*] arm64_16k Arm64K16);
        for_each_format!(@ [$($test)*] arm64_64k Arm64K64);
        for_each_format!(@ [$($test)*] x86_64 X86_64<4>);
    };
    (@ [$($test:ident)*] $module:ident $format:ty) => {
        mod $module {
            use super::*;
            $(#[test]
            fn $test() {
                super::$test::<$format>();
            })*
        }
    };
}

for_each_format! {
    the_tables_are_those_of_the_engine
    what_it_takes_is_what_the_techniques_say
    memory_that_is_added_late_moves_and_invalidates_nothing
    the_engine_maps_the_same_and_waits_as_often_for_any_size
}

#[test]
fn without_memory_for_a_table_the_windows_are_closed() {
    let list = [span(0, 5 << 21)];
    for techniques in all() {
        for limit in 0..7 {
            let boot = Boot::<Arm64K4>::new(64);
            let root = boot.root();
            boot.memory.limit_allocations(Some(limit));
            let fixmap = boot.fixmap();
            let goal = goal::<Arm64K4>(root, ram(&list));
            // SAFETY: as in `run`.
            let failed = unsafe { build::<Arm64K4, _, _>(techniques, &boot, &fixmap, &goal) };
            assert_eq!(failed, Err(LinearError::Edit(EditError::OutOfTables)));
            boot.assert_clean();
            // What was mapped stays, and no table is lost.
            assert_eq!(boot.memory.counts().tables, boot.found(root).1);
            assert_eq!(boot.found(root).0.len() as u64, limit.saturating_sub(2) * 512);
        }
    }
}

#[test]
fn the_engine_without_memory_leaves_nothing() {
    let list = [span(0, 5 << 21), span(Hosted::BASE.get(), 64 << 12)];
    for limit in 0..10 {
        let boot = Boot::<Arm64K4>::new(64);
        boot.links_need_barrier.set(false);
        let root = boot.root();
        boot.memory.limit_allocations(Some(limit));
        let map = Loaded::new(&boot, None, 0);
        let goal = goal::<Arm64K4>(root, ram(&list));
        // SAFETY: as above.
        let failed = unsafe {
            coarse::<Arm64K4, _, _, _>(&boot, &boot.fixmap(), &goal, &map, |to| {
                map.unload();
                map.root.set(to);
            })
        };
        assert_eq!(failed, Err(LinearError::Edit(EditError::OutOfTables)));
        boot.assert_clean();
        assert_eq!(boot.memory.counts().tables, 1);
    }
}

#[test]
fn what_cannot_be_mapped_is_refused_before_anything_is_written() {
    fn refused<F: Judged>(base: u64, memory: MemoryMap<'_>) -> LinearError<Va> {
        let boot = Boot::<F>::new(8);
        let root = boot.root();
        let goal = Goal { base: Va::new(base), ..goal::<F>(root, memory) };
        let fixmap = boot.fixmap();
        let counted = Counted::new(&boot, &fixmap);
        // SAFETY: as in `run`.
        let result = unsafe { build::<F, _, _>(Techniques::default(), &counted, &fixmap, &goal) };
        assert_eq!(counted.counts(), Counts::default());
        result.unwrap_err()
    }
    let base = Arm64K4::BASE;
    let odd = [span(0x1000, 0x1_0000)];
    assert_eq!(refused::<Arm64K64>(Arm64K64::BASE, ram(&odd)), EditError::Misaligned.into());
    assert_eq!(refused::<Arm64K4>(base + 0x800, ram(&odd)), LinearError::TooHigh(odd[0].last()));
    let far = [span(1 << 48, 0x1000)];
    assert_eq!(refused::<Arm64K4>(base, ram(&far)), LinearError::TooHigh(far[0].last()));
    assert_eq!(
        refused::<Arm64K4Wide>(0, ram(&[span(1 << 52, 0x1000)])),
        EditError::InputOutOfRange.into()
    );
    // Into the other half, where another root translates.
    assert_eq!(
        refused::<Arm64K4>(0, ram(&[span(0xffff_8000_0000_0000, 0x1000)])),
        EditError::InputOutOfRange.into()
    );
    assert_eq!(
        refused::<X86_64<4>>(0xff00_0000_0000_0000, ram(&[span(0x00ff_8000_0000_0000, 0x1000)])),
        EditError::OutputOutOfRange.into()
    );
    let disorder = [span(0x2000, 0x1000), span(0, 0x1000)];
    assert_eq!(refused::<Arm64K4>(base, ram(&disorder)), LinearError::Order(disorder[1]));
    let strange = [(odd[0], Attrs { software: 8, ..Attrs::KERNEL_DATA })];
    let special = MemoryMap { special: &strange, ..ram(&odd) };
    assert!(matches!(
        refused::<Arm64K4>(base, special),
        LinearError::Edit(EditError::Inexpressible(_))
    ));
}

#[test]
fn what_is_mapped_already_is_not_mapped_again() {
    let list = [span(0x5000, 0x3000)];
    let boot = Boot::<Arm64K4>::new(8);
    let root = boot.root();
    let goal = goal::<Arm64K4>(root, ram(&list));
    run(&boot, Techniques::default(), &goal);
    let before = boot.found(root);
    let wider = [span(0x3000, 0x8000)];
    let goal = Goal { memory: ram(&wider), ..goal };
    let fixmap = boot.fixmap();
    // SAFETY: as in `run`.
    let refused = unsafe { build::<Arm64K4, _, _>(Techniques::default(), &boot, &fixmap, &goal) };
    let at = Va::new(Arm64K4::BASE + 0x5000);
    assert_eq!(refused, Err(EditError::AlreadyMapped(at).into()));
    boot.assert_clean();
    assert!(boot.found(root).0.ends_with(&before.0));
}

/// Some range.
const PAGE: Stale = Stale { first: 0, last: 0xfff, level: None, tables: false };

#[test]
fn everything_is_passed_on_and_counted() {
    let spy = Spy { hosted: Hosted::new(4, 12), accesses: NoHooks, called: RefCell::default() };
    let boot = Boot::<Arm64K4>::new(4);
    let fixmap = boot.fixmap();
    let counted = Counted::new(&spy, &fixmap);
    let frame = counted.alloc_table(Level::PAGE).unwrap();
    // SAFETY: the frame was just allocated.
    let table = unsafe { counted.table(frame, Level::PAGE) };
    let accesses = counted.hooks().unwrap();
    // SAFETY: entries of the table.
    unsafe {
        accesses.fill(table, 512, 7, 1);
        assert_eq!((accesses.load(table), accesses.read(table.add(511))), (7, 518));
        counted.barrier(Barrier::Publish);
        accesses.fill(table, 512, 0, 0);
        counted.barrier(Barrier::Publish);
        accesses.store(table, 1);
        accesses.link(table, 2);
        counted.barrier(Barrier::Publish);
        assert_eq!(accesses.exchange(table, 3), 2);
        assert_eq!(accesses.compare_exchange(table, 4, 5), Err(3));
        assert_eq!(accesses.compare_exchange(table, 3, 5), Ok(()));
        assert_eq!(accesses.follow(table), 5);
    }
    let slot = fixmap.entry(1);
    // SAFETY: it is there, and zero again at the end.
    unsafe {
        accesses.store(slot, 9);
        accesses.store(slot, 0);
    }
    let root = Pa::new(0);
    for what in [What::Everything, What::Ranges(&[PAGE; 2])] {
        counted.invalidate(&Invalidation { root, id: 0, global: false, what });
    }
    counted.barrier(Barrier::Complete);
    counted.prefetch(frame);
    counted.table_done(frame, table);
    assert_eq!(counted.caps(), spy.hosted.caps());
    assert!(std::ptr::eq(counted.link_of(frame).unwrap(), spy.hosted.link_of(frame).unwrap()));
    let root = counted.alloc_root(Level::PAGE, 2).unwrap();
    // SAFETY: the frames are not in use.
    unsafe {
        counted.free_root(root, Level::PAGE, 2);
        counted.free_table(frame, Level::PAGE);
    }
    let called = spy.called.borrow();
    let missed: Vec<_> = [spy::FUNCTIONS, spy::ACCESSES]
        .concat()
        .into_iter()
        .filter(|name| !called.contains(name))
        .collect();
    assert!(missed.is_empty(), "not passed on: {missed:?}");
    assert_eq!(
        counted.counts(),
        Counts {
            tables: 3,
            freed: 3,
            entries: 512 + 3,
            links: 1,
            zeroed: 512,
            moves: 1,
            invalidations: 3,
            completions: 1,
            barriers: 3,
            entry_barriers: 1,
        }
    );
}

/// Ranges in units of pages, in order and apart.
fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..900u64, 1..700u64), 0..5).prop_map(|steps| {
        let mut at = 0;
        let place = |(gap, size)| {
            let start = at + gap;
            at = start + size;
            (start, size)
        };
        steps.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn any_memory_is_mapped_as_the_engine_maps_it(
        ram in ranges(), reserved in ranges(), text in ranges(), set in 0..16usize,
    ) {
        let spans = |list: &[(u64, u64)]| -> Vec<Span<Pa>> {
            list.iter().map(|&(at, size)| pages::<Arm64K4>(at, size)).collect()
        };
        let (ram, reserved) = (spans(&ram), spans(&reserved));
        let special: Vec<_> = spans(&text).into_iter().map(|span| (span,
            Attrs::KERNEL_TEXT)).collect();
        let memory = MemoryMap { ram: &ram, reserved: &reserved, special: &special };
        let boot = Boot::<Arm64K4>::new(32);
        let root = boot.root();
        let counts = run(&boot, all().nth(set).unwrap(), &goal::<Arm64K4>(root, memory));
        let engines = by_the_engine::<Arm64K4>(&memory, 32);
        prop_assert_eq!(counts.tables, boot.found(root).1 - 1);
        prop_assert!(boot.found(root) == engines);
    }
}

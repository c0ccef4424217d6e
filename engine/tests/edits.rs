//! Edits one by one: what random edits seldom meet, and what an edit says besides what it does.
//!
//! Each test is about one decision of the engine and fails if that decision is made differently. The addresses are
//! chosen for it; the judge is the separate walker wherever the tables themselves are in question.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use common::{Judged, is_arm, judge, snapshot, words};
use tablewright::flush::{Held, MAX_RANGES, MAX_UNLINKED};
use tablewright::format::{Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64Wide, X86_64};
use tablewright::hosted::{Event, Hosted, Threads, Told};
use tablewright::shared::{self, Refused, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Gather, Half, Invalidation,
    KernelHalf, Leaf, Level, Liveness, Mapping, Memory, Pa, Perms, Platform, Progress,
    Shareability, Span, Stale, TableLink, Va,
};
use tablewright_walker as walker;

type X86 = X86_64<4>;
type Space<'h, F> = AddressSpace<F, &'h Hosted>;

const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
const BLOCK: Level = Level::new(1);

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Hardware that writes nothing by itself, so that a test sees what the engine does and no more.
fn quiet(bbm: u8) -> Caps {
    Caps {
        bbm,
        hardware_access: false,
        hardware_dirty: false,
        // Out of the way, where a test is not about it.
        invalidate_all_above: 1 << 20,
        ..tablewright::hosted::CAPS
    }
}

fn keep_going<T>(_: T) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn map<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    frame: u64,
    mapping: impl Into<Mapping>,
) -> Result<(), EditError<Va>> {
    space.map(at, Pa::new(frame), mapping.into())
}

fn protect<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    change: Change,
) -> Result<(), EditError<Va>> {
    space.gather().protect(at, change)
}

/// Collapses, and returns how many tables are gone and how many runs there are more, together, as counted from outside.
fn collapse<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    largest: Level,
    runs: bool,
) -> u64 {
    let before = (space.count_tables(), runs_in(space));
    space.gather().collapse(at, largest, runs).unwrap();
    before.0 - space.count_tables() + runs_in(space).saturating_sub(before.1)
}

/// A run is one leaf.
fn runs_in<F: Judged, P: Platform + Clone>(space: &AddressSpace<F, P>) -> u64 {
    let all = leaves(space);
    all.iter().filter(|leaf| leaf.is_contiguous()).count() as u64
}

fn unmap<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
) -> Result<(), EditError<Va>> {
    space
        .gather()
        .unmap(at, keep_going)
        .map(|progress| assert!(progress.is_done()))
}

fn leaves<F: Judged, P: Platform + Clone>(space: &AddressSpace<F, P>) -> Vec<Leaf<F>> {
    let mut all = Vec::new();
    space.walk_all(|leaf| all.push(leaf));
    all
}

/// Writes a descriptor as other software would.
fn poke(platform: &Hosted, frame: Pa, index: usize, bits: u64) {
    // SAFETY: the tests pass frames that they allocated, and indices inside a table.
    unsafe {
        platform
            .table(frame, Level::PAGE)
            .add(index)
            .as_ref()
            .store(bits)
    }
}

/// What the walker finds for one address, in the words of the engine.
fn translate<F: Judged>(platform: &Hosted, root: Pa, va: u64) -> Option<(u64, Attrs)> {
    let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
    match walker::translate(F::REGIME, root.get(), va, &mut read) {
        Ok(leaf) => Some((leaf.physical(va), words::<F>(&leaf))),
        Err(walker::Fault::NotMapped { .. }) => None,
        Err(fault) => panic!("{fault:?}"),
    }
}

/// Asserts that an edit is refused and leaves every bit as it was, nothing allocated, nothing to invalidate.
fn refused<'h, F: Judged, T: std::fmt::Debug>(
    space: &mut Space<'h, F>,
    expected: EditError<Va>,
    edit: impl FnOnce(&mut Gather<'_, F, &'h Hosted>) -> Result<T, EditError<Va>>,
) {
    let platform: &'h Hosted = space.platform();
    let (before, counts) = (snapshot::<F>(platform, space.root()), platform.counts());
    let mut gather = space.gather();
    assert_eq!(edit(&mut gather).unwrap_err(), expected);
    assert!(gather.is_clean());
    gather.finish(|_| panic!("a refused edit cuts nothing off"));
    assert_eq!(before, snapshot::<F>(platform, space.root()));
    let now = platform.counts();
    assert_eq!(
        (now.tables, now.invalidations, now.completions),
        (counts.tables, counts.invalidations, counts.completions)
    );
}

// ---- map ----

#[test]
fn a_run_of_blocks_with_a_table_in_it_is_no_run() {
    for member in [0, 7, 15] {
        let platform = Hosted::new(16, 12);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        let page = span(member * M2 + 5 * K4, K4);
        map(&mut space, page, 0, Attrs::KERNEL_DATA).unwrap();
        unmap(&mut space, page).unwrap();
        let run = span(0, 16 * M2);
        map(&mut space, run, 0x4000_0000, Attrs::KERNEL_DATA).unwrap();
        let blocks: Vec<_> = leaves(&space)
            .into_iter()
            .filter(|leaf| leaf.level() == BLOCK)
            .collect();
        assert_eq!(blocks.len(), 15);
        assert!(blocks.iter().all(|leaf| !leaf.is_contiguous()));
        judge::<Arm64K4>(&platform, space.root());
    }
    let platform = Hosted::new(16, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 16 * M2), 0, Attrs::KERNEL_DATA).unwrap();
    assert!(leaves(&space).iter().all(|leaf| leaf.is_contiguous()));
}

#[test]
fn a_run_that_other_leaves_are_part_of_is_no_run() {
    // Two mappings that continue each other with equal attributes do not make a run between them.
    let platform = Hosted::new(16, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 5 * M2), 0, Attrs::KERNEL_DATA).unwrap();
    map(
        &mut space,
        span(5 * M2, 27 * M2),
        5 * M2,
        Attrs::KERNEL_DATA,
    )
    .unwrap();
    let runs: Vec<bool> = leaves(&space).iter().map(Leaf::is_contiguous).collect();
    assert_eq!(runs, [vec![false; 16], vec![true]].concat());
    judge::<Arm64K4>(&platform, space.root());
}

#[test]
fn a_mapping_keeps_to_the_leaves_that_it_was_allowed() {
    fn sizes(mapping: Mapping, frame: u64) -> BTreeSet<(u64, bool)> {
        let platform = Hosted::new(1200, 12);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, G1 + 16 * M2), frame, mapping).unwrap();
        judge::<Arm64K4>(&platform, space.root());
        leaves(&space)
            .iter()
            .map(|leaf| (leaf.size(), leaf.is_contiguous()))
            .collect()
    }
    let mapping = Mapping::new(Attrs::KERNEL_DATA);
    // A run of blocks, a run of pages.
    let (blocks, pages) = ((16 * M2, true), (16 * K4, true));
    assert_eq!(sizes(mapping, 0), [(G1, false), blocks].into());
    assert_eq!(
        sizes(mapping.without_runs(), 0),
        [(G1, false), (M2, false)].into()
    );
    assert_eq!(sizes(mapping.largest(BLOCK), 0), [blocks].into());
    assert_eq!(sizes(mapping.largest(Level::PAGE), 0), [pages].into());
    assert_eq!(sizes(mapping.pages_only(), 0), [(K4, false)].into());
    assert_eq!(sizes(mapping, M2), [(M2, false)].into());
    assert_eq!(sizes(mapping, 16 * K4), [pages].into());
    assert_eq!(sizes(mapping, K4), [(K4, false)].into());
}

#[test]
fn a_mapping_without_allocation_uses_the_tables_there_are_and_no_more() {
    let platform = Hosted::new(16, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).without_allocation();
    let missing = EditError::NeedsTable(Va::new(G1 + M2));
    refused(&mut space, missing, |gather| {
        gather.map(span(G1 + M2, K4), Pa::new(0), mapping)
    });
    map(&mut space, span(G1 + M2, K4), 0, Attrs::KERNEL_DATA).unwrap();
    let allocations = platform.counts().allocations;
    // In the same table; in the table above it, as a block; but not below a hole of that.
    map(&mut space, span(G1 + M2 + K4, M2 - K4), 0, mapping).unwrap();
    map(&mut space, span(G1 + 2 * M2, M2), 0, mapping).unwrap();
    assert_eq!(platform.counts().allocations, allocations);
    let missing = EditError::NeedsTable(Va::new(G1 + 4 * M2));
    refused(&mut space, missing, |gather| {
        gather.map(span(G1 + 3 * M2, M2 + K4), Pa::new(0), mapping)
    });
}

#[test]
fn what_the_root_does_not_translate_is_refused_and_what_it_does_is_not() {
    fn check<F: Judged>(half: Half, first: u64, size: u64, expected: Result<(), EditError<Va>>) {
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let mut space = Space::<F>::new_in(&platform, half).unwrap();
        let at = span(first, size);
        let change = Change::new().software(1);
        let what = format!("{}: {half:?} {first:#x} + {size:#x}", F::NAME);
        assert_eq!(
            map(&mut space, at, 0, Attrs::KERNEL_DATA),
            expected,
            "map {what}"
        );
        assert_eq!(protect(&mut space, at, change), expected, "protect {what}");
        assert_eq!(
            space.query(at.start()).is_some(),
            expected.is_ok(),
            "query {what}"
        );
        assert_eq!(
            space.query(at.last()).is_some(),
            expected.is_ok(),
            "query {what}"
        );
        let mut walked = 0;
        let walk = space.walk(at, |leaf| {
            walked += leaf.size();
            assert!(at.contains(leaf.input()) && leaf.attrs().software == 1);
            keep_going(())
        });
        assert_eq!(walk, expected, "walk {what}");
        assert_eq!(walked, if expected.is_ok() { size } else { 0 });
        let all: u64 = leaves(&space).iter().map(Leaf::size).sum();
        assert_eq!(all, walked, "{what}");
        let split = space.gather().split(at, Level::PAGE);
        assert_eq!(split, expected, "split {what}");
        let collapsed = space.gather().collapse(at, BLOCK, true);
        assert_eq!(collapsed.map(|_| ()), expected, "collapse {what}");
        assert_eq!(unmap(&mut space, at), expected, "unmap {what}");
        assert_eq!(leaves(&space).len(), 0);
    }
    const OUT: Result<(), EditError<Va>> = Err(EditError::InputOutOfRange);
    let top = 1u64 << 47;
    let upper = !(top - 1);
    let last = u64::MAX - (K4 - 1);
    for half in [Half::Lower, Half::Upper] {
        // One root for all; the half does not matter.
        check::<X86>(half, top - M2, M2, Ok(()));
        check::<X86>(half, upper, M2, Ok(()));
        check::<X86>(half, last, K4, Ok(()));
        check::<X86>(half, last - M2 + K4, M2, Ok(()));
    }
    check::<X86>(Half::Lower, top - K4, 2 * K4, OUT);
    check::<X86>(Half::Lower, top, K4, OUT);
    check::<X86>(Half::Lower, upper - K4, 2 * K4, OUT);
    check::<X86>(Half::Lower, upper - K4, K4, OUT);
    // From one half into the other, both ends good.
    check::<X86>(Half::Lower, top - K4, upper - top + 2 * K4, OUT);
    check::<X86_64<5>>(Half::Lower, top, K4, Ok(()));
    check::<X86_64<5>>(Half::Lower, (1 << 56) - K4, K4, Ok(()));
    check::<X86_64<5>>(Half::Lower, (1 << 56) - K4, 2 * K4, OUT);
    check::<X86_64<5>>(Half::Lower, !((1 << 56) - 1), K4, Ok(()));
    check::<X86_64<5>>(Half::Lower, last, K4, Ok(()));

    let top = 1u64 << 48;
    let upper = !(top - 1);
    check::<Arm64K4>(Half::Lower, top - M2, M2, Ok(()));
    check::<Arm64K4>(Half::Lower, top - K4, 2 * K4, OUT);
    check::<Arm64K4>(Half::Lower, top, K4, OUT);
    check::<Arm64K4>(Half::Lower, upper, K4, OUT);
    check::<Arm64K4>(Half::Lower, last, K4, OUT);
    check::<Arm64K4>(Half::Upper, upper, M2, Ok(()));
    check::<Arm64K4>(Half::Upper, last - 5 * K4, 6 * K4, Ok(()));
    check::<Arm64K4>(Half::Upper, upper - K4, 2 * K4, OUT);
    check::<Arm64K4>(Half::Upper, 0, K4, OUT);
    check::<Arm64K16>(Half::Upper, u64::MAX << 25, 1 << 25, Ok(()));
    check::<Arm64K4Wide>(Half::Lower, top, K4, Ok(()));
    check::<Arm64K4Wide>(Half::Lower, (1 << 52) - K4, K4, Ok(()));
    check::<Arm64K4Wide>(Half::Lower, 1 << 52, K4, OUT);
    check::<Arm64K4Wide>(Half::Upper, !((1 << 52) - 1), K4, Ok(()));
    check::<Arm64K64Wide>(Half::Upper, u64::MAX << 16, 1 << 16, Ok(()));
}

#[test]
fn an_address_of_less_than_a_granule_is_refused() {
    let platform = Hosted::new(16, 14);
    let mut space = Space::<Arm64K16>::new(&platform).unwrap();
    let granule = 1 << 14;
    for (at, frame) in [
        (span(K4, granule), 0),
        (span(0, granule + K4), 0),
        (span(0, granule), K4),
    ] {
        refused(&mut space, EditError::Misaligned, |gather| {
            gather.map(at, Pa::new(frame), Attrs::KERNEL_DATA)
        });
    }
}

#[test]
fn memory_ends_where_the_format_ends() {
    fn check<F: Judged>(bits: u32) {
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let mut space = Space::<F>::new(&platform).unwrap();
        let page = 1 << F::PAGE_SHIFT;
        let end = 1u64 << bits;
        for frame in [end, end - page, 1 << 63, u64::MAX - (2 * page - 1)] {
            refused(&mut space, EditError::OutputOutOfRange, |gather| {
                gather.map(span(0, 2 * page), Pa::new(frame), Attrs::KERNEL_DATA)
            });
        }
        map(
            &mut space,
            span(0, 2 * page),
            end - 2 * page,
            Attrs::KERNEL_DATA,
        )
        .unwrap();
        let found = translate::<F>(&platform, space.root(), page);
        assert_eq!(found, Some((end - page, Attrs::KERNEL_DATA)), "{}", F::NAME);
    }
    check::<Arm64K4>(48);
    check::<Arm64K4Wide>(52);
    check::<Arm64K16Wide>(52);
    check::<Arm64K64Wide>(52);
    check::<X86>(52);
}

#[test]
fn memory_goes_on_where_the_address_moves_to_other_bits() {
    // LPA2 keeps address bits 51:50 in descriptor bits 9:8, LPA bits 51:48 in 15:12.
    fn check<F: Judged>(bit: u32) {
        let page = 1 << F::PAGE_SHIFT;
        let block = 1u64 << F::shift(BLOCK);
        for (before, size) in [
            (3 * page, 8 * page),
            (block, 3 * block),
            (block + page, 3 * block),
        ] {
            let platform = Hosted::new(64, F::PAGE_SHIFT);
            let mut space = Space::<F>::new(&platform).unwrap();
            let frame = (1u64 << bit) - before;
            map(&mut space, span(0, size), frame, Attrs::KERNEL_DATA).unwrap();
            let found = judge::<F>(&platform, space.root()).0;
            assert_eq!(found.len(), 1, "{}: in one piece", F::NAME);
            assert_eq!((found[0].1.pa, found[0].1.size), (frame, size));
            // And apart again, and back.
            let mut all = |edit: fn(&mut Space<'_, F>, Span<Va>)| {
                edit(&mut space, span(0, size));
                let found = judge::<F>(&platform, space.root()).0;
                assert_eq!(
                    (found[0].1.pa, found[0].1.size),
                    (frame, size),
                    "{}",
                    F::NAME
                );
            };
            all(|space, at| space.gather().split(at, Level::PAGE).unwrap());
            all(|space, at| {
                collapse(space, at, BLOCK, true);
            });
            all(|space, at| {
                protect(space, at, Change::new().perms(Perms::READ)).unwrap();
            });
        }
    }
    for bit in [50, 51] {
        check::<Arm64K4Wide>(bit);
        check::<Arm64K16Wide>(bit);
    }
    for bit in 48..52 {
        check::<Arm64K64Wide>(bit);
    }
}

// ---- protect ----

#[test]
fn a_plan_for_a_block_is_none_for_a_page_that_looks_alike() {
    // x86-64: bit 7 is PS in the block and PAT in the page, so that a device block and a write-through page have the
    // same low bits and mean different things by them.
    for block_first in [true, false] {
        let platform = Hosted::new(16, 12);
        let mut space = Space::<X86>::new(&platform).unwrap();
        let (block, pages) = if block_first { (0, M2) } else { (M2, 0) };
        map(&mut space, span(block, M2), 0, Attrs::KERNEL_DEVICE).unwrap();
        let through = Attrs::KERNEL_DATA.with_memory(Memory::WriteThrough);
        let mapping = Mapping::new(through).pages_only();
        map(&mut space, span(pages, M2), 16 * M2, mapping).unwrap();
        let low = |va: u64| space.query(Va::new(va)).unwrap().descriptor() & 0xfff;
        assert_eq!(low(block), low(pages), "the descriptors look alike");

        let change = Change::new().memory(Memory::NonCacheable);
        protect(&mut space, span(0, 2 * M2), change).unwrap();
        for (va, frame) in [(block, 0), (pages, 16 * M2), (pages + K4, 16 * M2 + K4)] {
            let expected = Attrs::KERNEL_DATA.with_memory(Memory::NonCacheable);
            let found = translate::<X86>(&platform, space.root(), va);
            assert_eq!(found, Some((frame, expected)), "block first: {block_first}");
        }
    }
}

#[test]
fn a_change_of_attributes_that_the_format_cannot_hold_is_refused() {
    let platform = Hosted::new(16, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, M2), 0, Attrs::KERNEL_DATA).unwrap();
    for change in [
        Change::new().perms(Perms::WRITE),
        Change::new().memory(Memory::Tagged),
        Change::new().software(8),
        Change::new().native(1 << 58),
    ] {
        let before = snapshot::<X86>(&platform, space.root());
        assert!(matches!(
            protect(&mut space, span(0, M2), change),
            Err(EditError::Inexpressible(_))
        ));
        assert_eq!(before, snapshot::<X86>(&platform, space.root()));
    }
}

#[test]
fn what_is_not_named_by_a_change_stays() {
    fn check<F: Judged>() {
        let platform = Hosted::new(16, F::PAGE_SHIFT);
        let mut space = Space::<F>::new(&platform).unwrap();
        let attrs = Attrs {
            software: 5,
            accessed: false,
            native: F::NATIVE & F::NATIVE.wrapping_neg(),
            ..Attrs::USER_TEXT
        };
        let page = 1 << F::PAGE_SHIFT;
        map(&mut space, span(0, page), 0, attrs).unwrap();
        let mut now = attrs;
        for (change, expected) in [
            (
                Change::new().accessed(true),
                Attrs {
                    accessed: true,
                    ..now
                },
            ),
            (
                Change::new().software(2),
                Attrs {
                    accessed: true,
                    software: 2,
                    ..now
                },
            ),
            (
                Change::new().native(0),
                Attrs {
                    accessed: true,
                    software: 2,
                    native: 0,
                    ..now
                },
            ),
        ] {
            protect(&mut space, span(0, page), change).unwrap();
            now = space.query(Va::new(0)).unwrap().attrs();
            assert_eq!(now, expected, "{}", F::NAME);
        }
    }
    check::<Arm64K4>();
    check::<Arm64K16Wide>();
    check::<X86>();
}

// ---- collapse ----

/// A space with one table of pages, and the number of tables it has.
fn pages_of_a_block<F: Judged>(platform: &Hosted, frame: u64, attrs: Attrs) -> Space<'_, F> {
    let mut space = Space::<F>::new(platform).unwrap();
    let block = 1 << F::shift(BLOCK);
    map(
        &mut space,
        span(0, block),
        frame,
        Mapping::new(attrs).pages_only(),
    )
    .unwrap();
    space
}

fn a_table_is_replaced_only_by_a_leaf_that_translates_the_same<F: Judged>() {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(BLOCK));
    let entries = block / page;
    let whole = span(0, block);
    let attempt = |frame: u64, spoil: &dyn Fn(&mut Space<'_, F>), expected: u64| {
        for liveness in [Liveness::Dead, Liveness::Live] {
            let platform = Hosted::new(16, F::PAGE_SHIFT).with_caps(quiet(0));
            let mut space = pages_of_a_block::<F>(&platform, frame, Attrs::KERNEL_DATA);
            spoil(&mut space);
            common::used(&mut space, liveness);
            let before = judge::<F>(&platform, space.root());
            assert_eq!(
                collapse(&mut space, whole, BLOCK, false),
                expected,
                "{}",
                F::NAME
            );
            assert_eq!(before, judge::<F>(&platform, space.root()));
            let counts = platform.counts();
            assert_eq!(counts.tables, space.count_tables());
            assert_eq!(counts.bad_frees, 0);
        }
    };
    attempt(block, &|_| (), 1);
    attempt(block + page, &|_| (), 0);
    attempt(block / 2, &|_| (), 0);
    for spoiled in [0, 1, entries / 2, entries - 1] {
        let at = span(spoiled * page, page);
        // A hole; the frame of another page; other attributes; attributes that are changed back.
        attempt(block, &|space| unmap(space, at).unwrap(), 0);
        attempt(
            block,
            &|space| {
                unmap(space, at).unwrap();
                let frame = block + ((spoiled + 1) % entries) * page;
                map(space, at, frame, Attrs::KERNEL_DATA).unwrap();
            },
            0,
        );
        for change in [
            Change::new().software(1),
            Change::new().perms(Perms::READ),
            Change::new().memory(Memory::NonCacheable),
            Change::new().global(false),
        ] {
            attempt(block, &|space| protect(space, at, change).unwrap(), 0);
        }
        attempt(
            block,
            &|space| {
                protect(space, at, Change::new().software(1)).unwrap();
                protect(space, at, Change::new().software(0)).unwrap();
            },
            1,
        );
    }
}

fn a_large_leaf_is_accessed_and_dirty_if_one_small_one_was<F: Judged>() {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(BLOCK));
    let untouched = Attrs {
        accessed: false,
        dirty: false,
        ..Attrs::USER_DATA
    };
    for liveness in [Liveness::Dead, Liveness::Live] {
        for at in [0, 1, block / page / 2, block / page - 1] {
            for (accessed, dirty) in [(false, false), (true, false), (false, true), (true, true)] {
                let platform = Hosted::new(16, F::PAGE_SHIFT).with_caps(quiet(0));
                let mut space = pages_of_a_block::<F>(&platform, block, untouched);
                let change = Change::new().accessed(accessed).dirty(dirty);
                protect(&mut space, span(at * page, page), change).unwrap();
                common::used(&mut space, liveness);
                assert_eq!(collapse(&mut space, span(0, block), BLOCK, false), 1);
                let attrs = space.query(Va::new(0)).unwrap().attrs();
                assert_eq!(
                    (attrs.accessed, attrs.dirty),
                    (accessed, dirty),
                    "{}",
                    F::NAME
                );
            }
        }
    }
}

for_each_format!(
    a_table_is_replaced_only_by_a_leaf_that_translates_the_same,
    a_large_leaf_is_accessed_and_dirty_if_one_small_one_was,
    empty_tables_go_up_to_the_root,
    tables_that_deny_execution_are_obeyed,
    unmapping_in_steps_cuts_each_leaf_once,
    settling_in_steps_visits_each_leaf_once_and_frees_each_table_once,
);

/// A run of pages from 0 in which hardware has set flags in one member.
fn run_touched_in(
    platform: &Hosted,
    member: usize,
    accessed: bool,
    dirty: bool,
) -> Space<'_, Arm64K4> {
    let untouched = Attrs {
        accessed: false,
        dirty: false,
        ..Attrs::USER_DATA
    };
    let mut space = Space::<Arm64K4>::new(platform).unwrap();
    map(&mut space, span(0, 16 * K4), G1, untouched).unwrap();
    let mut table = space.root();
    for _ in 0..3 {
        table = Pa::new(platform.read(table, 0).unwrap() & 0xffff_ffff_f000);
    }
    // AF is bit 10; AP[2], which a write clears, is bit 7.
    let mut bits = platform.read(table, member).unwrap();
    bits |= u64::from(accessed) << 10;
    bits &= !(u64::from(dirty) << 7);
    poke(platform, table, member, bits);
    space
}

/// A run is one leaf, at whichever of its addresses, and accessed and dirty if one member is.
#[test]
fn a_run_is_seen_as_one_leaf_with_the_flags_of_all_members() {
    for (accessed, dirty) in [(false, false), (true, false), (true, true)] {
        for member in [0, 7, 15] {
            for cut in [span(0, 16 * K4), span(0, M2)] {
                let platform = Hosted::new(16, 12).with_caps(quiet(0));
                let mut space = run_touched_in(&platform, member, accessed, dirty);

                let expected = Attrs {
                    accessed,
                    dirty,
                    ..Attrs::USER_DATA
                };
                let check = |leaf: &Leaf<Arm64K4>| {
                    assert_eq!((leaf.input(), leaf.frame()), (Va::new(0), Pa::new(G1)));
                    assert_eq!((leaf.size(), leaf.attrs()), (16 * K4, expected));
                    assert!(leaf.is_contiguous());
                };
                for page in 0..16 {
                    check(&space.query(Va::new(page * K4)).unwrap());
                    let mut seen = 0;
                    let walked = space.walk(span(page * K4, M2), |leaf| {
                        seen += 1;
                        check(&leaf);
                        keep_going(())
                    });
                    assert_eq!((walked, seen), (Ok(()), 1));
                }
                // Cut off by itself, and with its table.
                let (mut held, mut gone) = (Vec::new(), 0);
                let mut gather = space.gather();
                let progress = gather.unmap(cut, |leaf| {
                    held.push(leaf);
                    keep_going(())
                });
                assert!(progress.unwrap().is_done());
                let completed = gather.issue().complete();
                for leaf in held {
                    gone += 1;
                    check(&completed.release(leaf).unwrap());
                }
                completed.finish(|leaf| {
                    gone += 1;
                    check(&leaf);
                });
                assert_eq!(gone, 1);
            }
            // Unfolded, each member has what the run had.
            for bbm in [0, 1] {
                let platform = Hosted::new(16, 12).with_caps(quiet(bbm));
                let mut space = run_touched_in(&platform, member, accessed, dirty);
                space.make_live();
                unmap(&mut space, span(3 * K4, K4)).unwrap();
                let all = leaves(&space);
                assert_eq!(all.len(), 15);
                for leaf in all {
                    assert_eq!((leaf.size(), leaf.is_contiguous()), (K4, false));
                    let attrs = leaf.attrs();
                    assert_eq!((attrs.accessed, attrs.dirty), (accessed, dirty));
                }
            }
        }
    }
}

#[test]
fn a_run_of_blocks_that_is_split_hands_its_flags_to_every_page() {
    let untouched = Attrs {
        accessed: false,
        dirty: false,
        ..Attrs::USER_DATA
    };
    for liveness in [Liveness::Dead, Liveness::Live] {
        for (bbm, largest) in [
            (0, BLOCK),
            (0, Level::PAGE),
            (1, Level::PAGE),
            (2, Level::PAGE),
        ] {
            let platform = Hosted::new(32, 12).with_caps(quiet(bbm));
            let mut space = Space::<Arm64K4>::new(&platform).unwrap();
            map(&mut space, span(0, 16 * M2), G1, untouched).unwrap();
            let mut table = space.root();
            for _ in 0..2 {
                table = Pa::new(platform.read(table, 0).unwrap() & 0xffff_ffff_f000);
            }
            // AF is bit 10; AP[2], which a write clears, is bit 7.
            let bits = platform.read(table, 5).unwrap();
            poke(&platform, table, 5, bits & !(1 << 7) | 1 << 10);
            common::used(&mut space, liveness);
            space.gather().split(span(0, 16 * M2), largest).unwrap();
            judge::<Arm64K4>(&platform, space.root());
            for leaf in leaves(&space) {
                let attrs = leaf.attrs();
                assert!(
                    attrs.accessed && attrs.dirty,
                    "{liveness:?}, level {bbm}, {largest:?}: {leaf:?}"
                );
            }
        }
    }
}

#[test]
fn runs_collapse_like_other_pages() {
    for caps in [quiet(0), quiet(2)] {
        let platform = Hosted::new(16, 12).with_caps(caps);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(Level::PAGE);
        map(&mut space, span(0, M2), M2, mapping).unwrap();
        assert!(leaves(&space).iter().all(Leaf::is_contiguous));
        space.make_live();
        assert_eq!(collapse(&mut space, span(0, M2), BLOCK, true), 1);
        let leaf = space.query(Va::new(0)).unwrap();
        assert!(leaf.size() == M2 && !leaf.is_contiguous());
        judge::<Arm64K4>(&platform, space.root());
    }
}

#[test]
fn only_leaves_that_translate_as_one_are_folded_and_none_beyond_the_range() {
    fn check(level: Level, members: u64) {
        let size = 1u64 << <Arm64K4 as tablewright::Format>::shift(level);
        let run = members * size;
        let mapping = Mapping::new(Attrs::KERNEL_DATA)
            .largest(level)
            .without_runs();
        type Edit = fn(&mut Space<'_, Arm64K4>, u64);
        let attempt = |at: Span<Va>, frame: u64, spoil: Edit, expected: u64| {
            for liveness in [Liveness::Dead, Liveness::Live] {
                let platform = Hosted::new(64, 12).with_caps(quiet(0));
                let mut space = Space::<Arm64K4>::new(&platform).unwrap();
                map(&mut space, span(0, 2 * run), frame, mapping).unwrap();
                spoil(&mut space, size);
                common::used(&mut space, liveness);
                assert_eq!(
                    collapse(&mut space, at, level, true),
                    expected,
                    "{at} at {level:?}"
                );
                assert_eq!(runs_in(&space), expected);
                judge::<Arm64K4>(&platform, space.root());
                // Once more: there is nothing left to fold.
                assert_eq!(collapse(&mut space, at, level, true), 0);
            }
        };
        let frame = 4 * run;
        attempt(span(0, 2 * run), frame, |_, _| (), 2);
        attempt(span(0, run), frame, |_, _| (), 1);
        attempt(span(0, run - K4), frame, |_, _| (), 0);
        attempt(span(K4, run - K4), frame, |_, _| (), 0);
        attempt(span(K4, 2 * run - K4), frame, |_, _| (), 1);
        attempt(span(0, 2 * run - size), frame, |_, _| (), 1);
        attempt(span(0, 2 * run), frame + size, |_, _| (), 0);
        for (member, edit) in [
            (0, Change::new().software(1)),
            (15, Change::new().perms(Perms::READ)),
            (3, Change::new().accessed(false)),
        ] {
            let platform = Hosted::new(64, 12).with_caps(quiet(0));
            let mut space = Space::<Arm64K4>::new(&platform).unwrap();
            map(&mut space, span(0, 2 * run), frame, mapping).unwrap();
            protect(&mut space, span(member * size, size), edit).unwrap();
            assert_eq!(collapse(&mut space, span(0, 2 * run), level, true), 1);
            assert!(space.query(Va::new(run)).unwrap().is_contiguous());
            assert!(!space.query(Va::new(0)).unwrap().is_contiguous());
        }
        attempt(
            span(0, 2 * run),
            frame,
            |space, size| unmap(space, span(17 * size, size)).unwrap(),
            1,
        );
    }
    check(Level::PAGE, 16);
    check(BLOCK, 16);
}

#[test]
fn no_run_is_folded_above_the_largest_leaf_asked_for() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
    map(&mut space, span(0, 16 * M2), 0, mapping).unwrap();
    assert_eq!(collapse(&mut space, span(0, 16 * M2), Level::PAGE, true), 0);
    assert_eq!(collapse(&mut space, span(0, 16 * M2), BLOCK, false), 0);
    assert_eq!(collapse(&mut space, span(0, 16 * M2), BLOCK, true), 1);
}

/// [`Gather::collapse`] returns how many tables it replaced or freed and how many runs it folded, together.
#[test]
fn a_collapse_returns_what_it_did_with_breaks_and_without() {
    for liveness in [Liveness::Dead, Liveness::Live] {
        for bbm in 0..3 {
            let platform = Hosted::new(64, 12).with_caps(quiet(bbm));
            let mut space = Space::<Arm64K4>::new(&platform).unwrap();
            let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
            // Two tables that become blocks, one that becomes runs, one that is empty.
            map(&mut space, span(0, 3 * M2 - K4), 0, mapping).unwrap();
            map(&mut space, span(3 * M2, K4), 0, mapping).unwrap();
            unmap(&mut space, span(3 * M2, K4)).unwrap();
            common::used(&mut space, liveness);
            let done = space.gather().collapse(span(0, 4 * M2), BLOCK, true);
            assert_eq!((space.count_tables(), runs_in(&space)), (4, 31));
            assert_eq!(done, Ok(3 + 31), "{liveness:?}, level {bbm}");
        }
    }
}

fn empty_tables_go_up_to_the_root<F: Judged>() {
    for liveness in [Liveness::Dead, Liveness::Live] {
        let platform = Hosted::new(16, F::PAGE_SHIFT);
        let mut space = Space::<F>::new(&platform).unwrap();
        let page = span(0, 1 << F::PAGE_SHIFT);
        map(&mut space, page, 0, Attrs::KERNEL_DATA).unwrap();
        unmap(&mut space, page).unwrap();
        assert_eq!(space.count_tables(), u64::from(F::LEVELS));
        common::used(&mut space, liveness);
        // A range that does not hold a whole table frees none; each larger one frees one more level.
        for height in 1..F::LEVELS {
            let size = 1u64 << F::shift(Level::new(height));
            assert_eq!(collapse(&mut space, page, Level::PAGE, false), 0);
            assert_eq!(collapse(&mut space, span(0, size), Level::PAGE, false), 1);
            assert_eq!(space.count_tables(), u64::from(F::LEVELS - height));
            assert_eq!(platform.counts().tables, space.count_tables());
        }
    }
    // And all at once.
    let platform = Hosted::new(16, F::PAGE_SHIFT);
    let mut space = Space::<F>::new(&platform).unwrap();
    let page = span(0, 1 << F::PAGE_SHIFT);
    map(&mut space, page, 0, Attrs::KERNEL_DATA).unwrap();
    unmap(&mut space, page).unwrap();
    let all = span(0, 1 << F::shift(F::root_level()));
    assert_eq!(
        collapse(&mut space, all, Level::PAGE, false),
        u64::from(F::LEVELS - 1)
    );
    assert_eq!(
        (platform.counts().tables, platform.counts().bad_frees),
        (1, 0)
    );
}

#[test]
fn pages_become_blocks_become_larger_blocks_in_one_call() {
    fn check<F: Judged>(bbm: u8, completions: u64) {
        let platform = Hosted::new(600, 12).with_caps(quiet(bbm));
        let mut space = Space::<F>::new(&platform).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(&mut space, span(G1, G1), 4 * G1, mapping).unwrap();
        space.make_live();
        let before = (judge::<F>(&platform, space.root()), platform.counts());
        let mut gather = space.gather();
        gather.collapse(span(G1, G1), Level::new(2), true).unwrap();
        // With breaks, one completion for each level, however many tables went.
        let waited = platform.counts().completions - before.1.completions;
        assert_eq!(waited, completions, "{}", F::NAME);
        gather.finish(|_| panic!("the leaves live on"));
        assert_eq!(before.0, judge::<F>(&platform, space.root()));
        assert_eq!(space.query(Va::new(G1 + 5)).unwrap().size(), G1);
        assert_eq!(platform.counts().tables, before.1.tables - 513);
        assert_eq!(platform.counts().bad_frees, 0);
    }
    check::<Arm64K4>(0, 2);
    check::<Arm64K4>(2, 0);
    check::<X86>(0, 0);
}

#[test]
fn a_leaf_does_not_have_what_the_table_it_replaces_denied() {
    // Other software made the tree: executable pages under a table that denies execution.
    fn check<F: Judged>(table: u64, leaf: u64, expected: Perms) {
        let platform = Hosted::new(16, 12);
        let root = platform.alloc_table(F::root_level()).unwrap();
        let tables: Vec<Pa> = (0..3)
            .map(|_| platform.alloc_table(Level::PAGE).unwrap())
            .collect();
        for (above, below) in [(root, tables[0]), (tables[0], tables[1])] {
            poke(&platform, above, 0, F::table(below, Perms::empty()));
        }
        poke(&platform, tables[1], 0, table | tables[2].get());
        for index in 0..512 {
            poke(
                &platform,
                tables[2],
                index,
                leaf | 0x4000_0000 | (index as u64) << 12,
            );
        }
        // SAFETY: the tables above are a tree of this format, made on this platform, without another editor.
        let mut space =
            unsafe { AddressSpace::<F, _>::adopt(&platform, root, Half::Lower, Liveness::Dead) };
        let before = judge::<F>(&platform, root);
        assert_eq!(before.0[0].1.attrs.perms, expected);
        assert_eq!(
            space.query(Va::new(0)).unwrap().attrs().perms,
            expected,
            "{}",
            F::NAME
        );
        assert_eq!(collapse(&mut space, span(0, M2), BLOCK, false), 1);
        assert_eq!(before, judge::<F>(&platform, root), "{}", F::NAME);
        assert_eq!(space.query(Va::new(0)).unwrap().attrs().perms, expected);
    }
    // arm64: PXNTable is bit 59, UXNTable bit 60. x86-64: XD is bit 63.
    let arm = 0x703; // page, AF, inner shareable
    check::<Arm64K4>(3 | 3 << 59, arm | 1 << 7, Perms::READ);
    check::<Arm64K4>(3 | 1 << 59, arm | 1 << 7, Perms::READ | Perms::USER_EXEC);
    check::<X86>(7 | 1 << 63, 0x61, Perms::READ);
    check::<X86>(7 | 1 << 63, 0x65, Perms::READ | Perms::USER_READ);
}

// ---- tables that deny ----

fn tables_that_deny_execution_are_obeyed<F: Judged>() {
    let platform = Hosted::new(16, F::PAGE_SHIFT);
    let mut space = Space::<F>::new(&platform).unwrap();
    let page = 1u64 << F::PAGE_SHIFT;
    let first = span(0, page);
    let mapping = Mapping::new(Attrs::KERNEL_DATA).tables_deny_execution();
    map(&mut space, first, 0, mapping).unwrap();
    assert_eq!(space.query(Va::new(0)).unwrap().attrs(), Attrs::KERNEL_DATA);

    // Nothing executable below them, whether mapped or changed; everything else as ever.
    let second = span(page, page);
    for attrs in [Attrs::KERNEL_TEXT, Attrs::USER_TEXT] {
        refused(&mut space, EditError::Denied(Va::new(page)), |gather| {
            gather.map(second, Pa::new(0), attrs)
        });
    }
    map(&mut space, second, 0, Attrs::USER_DATA).unwrap();
    let text = Change::new().perms(Perms::READ | Perms::EXEC);
    for at in [first, span(0, 2 * page), span(0, 4 * page)] {
        refused(&mut space, EditError::Denied(Va::new(0)), |gather| {
            gather.protect(at, text)
        });
    }
    protect(&mut space, first, Change::new().perms(Perms::READ)).unwrap();
    protect(&mut space, first, Change::new().write_protect()).unwrap();

    // Beside them, in another part of the root, execution is allowed, and a range over both is refused as a whole.
    let beside = 1u64 << F::shift(F::root_level());
    let far = span(beside, page);
    map(&mut space, far, 0, Attrs::KERNEL_TEXT).unwrap();
    assert_eq!(
        space.query(Va::new(beside)).unwrap().attrs(),
        Attrs::KERNEL_TEXT
    );
    protect(&mut space, far, Change::new().perms(Perms::READ)).unwrap();
    protect(&mut space, far, text).unwrap();
    refused(&mut space, EditError::Denied(Va::new(0)), |gather| {
        gather.protect(span(0, beside + page), text)
    });

    // The walker agrees about everything.
    let mut found = Vec::new();
    space.walk_all(|leaf| found.push((leaf.input().get(), leaf.attrs())));
    for (va, attrs) in found {
        let (_, seen) = translate::<F>(&platform, space.root(), va).unwrap();
        assert_eq!(attrs, seen, "{} at {va:#x}", F::NAME);
    }
    // The descriptors deny it indeed: arm64 PXNTable and UXNTable, x86-64 XD.
    let table = platform.read(space.root(), 0).unwrap();
    let denies = match F::HALVES {
        true => 3 << 59,
        false => 1 << 63,
    };
    assert_eq!(table & denies, denies, "{}", F::NAME);
    assert_eq!(platform.read(space.root(), 1).unwrap() & denies, 0);
}

#[test]
fn tables_deny_only_what_the_mapping_does_not_have() {
    let platform = Hosted::new(16, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::USER_TEXT).tables_deny_execution();
    map(&mut space, span(0, K4), 0, mapping).unwrap();
    assert_eq!(
        translate::<Arm64K4>(&platform, space.root(), 0),
        Some((0, Attrs::USER_TEXT))
    );
    map(&mut space, span(K4, K4), 0, Attrs::USER_TEXT).unwrap();
    refused(&mut space, EditError::Denied(Va::new(2 * K4)), |gather| {
        gather.map(span(2 * K4, K4), Pa::new(0), Attrs::KERNEL_TEXT)
    });
    // x86-64 has one bit for both, and denies nothing here.
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, K4), 0, mapping).unwrap();
    assert_eq!(
        translate::<X86>(&platform, space.root(), 0),
        Some((0, Attrs::USER_TEXT))
    );
    map(&mut space, span(K4, K4), 0, Attrs::KERNEL_TEXT).unwrap();
}

/// A tree of one page under a table descriptor of other software.
fn adopted<'h, F: Judged>(platform: &'h Hosted, table: u64, leaf: u64) -> Space<'h, F> {
    let root = platform.alloc_table(F::root_level()).unwrap();
    let mut above = root;
    for height in (0..F::LEVELS - 1).rev() {
        let below = platform.alloc_table(Level::new(height)).unwrap();
        let bits = if height == 0 {
            table
        } else {
            F::table(Pa::new(0), Perms::empty())
        };
        poke(platform, above, 0, bits | below.get());
        above = below;
    }
    poke(platform, above, 0, leaf);
    // SAFETY: the tables above are a tree of this format, made on this platform, without another editor.
    unsafe { AddressSpace::adopt(platform, root, Half::Lower, Liveness::Dead) }
}

/// What the user cannot write or reach because of a table, the kernel may execute: the rules that forbid it look at
/// the outcome (DDI 0487 D8.4.1; SDM vol. 3A 5.6.1: a page is one of the user if U/S is set at every level).
#[test]
fn effective_permissions_are_those_of_the_outcome() {
    fn check<F: Judged>(table: u64, leaf: u64) {
        let platform = Hosted::new(16, 12);
        let space = adopted::<F>(&platform, table, leaf);
        let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
        let access = walker::translate(F::REGIME, space.root().get(), 0, &mut read)
            .unwrap()
            .access;
        let mut seen = Perms::empty();
        for (is, perm) in [
            (access.privileged.read, Perms::READ),
            (access.privileged.write, Perms::WRITE),
            // With SMEP, which the walker assumes off, the kernel executes no page of the user.
            (
                access.privileged.execute && (F::HALVES || !access.user.read),
                Perms::EXEC,
            ),
            (access.user.read, Perms::USER_READ),
            (access.user.write, Perms::USER_WRITE),
            (access.user.execute, Perms::USER_EXEC),
        ] {
            seen.set(perm, is);
        }
        let attrs = space.query(Va::new(0)).unwrap().attrs();
        let what = format!("{}: table {table:#x}, leaf {leaf:#x}", F::NAME);
        assert_eq!(attrs.perms, seen, "{what}");
    }
    // arm64: APTable is 62:61, the leaf page, AF, inner shareable; 6 is AP[1], 7 AP[2], 53 PXN, 54 UXN.
    for leaf in [0x703, 0x743, 0x7c3, 0x743 | 1 << 53, 0x743 | 3 << 53] {
        for table in [0, 1 << 61, 1 << 62, 3 << 61, 1 << 59, 1 << 60] {
            check::<Arm64K4>(3 | table, leaf | 0x4000_0000);
        }
    }
    for leaf in [0x61, 0x63, 0x65, 0x67, 0x67 | 1 << 63] {
        for table in [1, 3, 5, 7, 7 | 1 << 63] {
            check::<X86>(table, leaf | 0x4000_0000);
        }
    }
}

/// [`Leaf::attrs`] promises that what a table above takes away is taken away; so for a leaf that an unmap hands out.
#[test]
fn a_leaf_that_was_cut_off_has_the_permissions_it_had() {
    fn check<F: Judged>(table: u64, leaf: u64, at: Span<Va>) {
        let platform = Hosted::new(16, 12);
        let mut space = adopted::<F>(&platform, table, leaf);
        let before = space.query(Va::new(0)).unwrap().attrs();
        let (mut held, mut after) = (Vec::new(), Vec::new());
        let mut gather = space.gather();
        let progress = gather.unmap(at, |leaf| {
            held.push(leaf);
            keep_going(())
        });
        assert!(progress.unwrap().is_done());
        let completed = gather.issue().complete();
        for leaf in held {
            after.push(completed.release(leaf).unwrap().attrs());
        }
        completed.finish(|leaf| after.push(leaf.attrs()));
        assert_eq!(after, [before], "{} over {at}", F::NAME);
    }
    // One page, cut off by itself; its table; the tables above.
    for at in [span(0, K4), span(0, M2), span(0, 512 * G1)] {
        check::<Arm64K4>(3 | 3 << 59, 0x783 | 0x4000_0000, at);
        check::<X86>(7 | 1 << 63, 0x4000_0061, at);
    }
}

// ---- unmap and settle ----

/// Pages, a table full of pages, blocks, and a larger tree, with holes between; the same in terms of each format.
fn landscape<F: Judged>(space: &mut Space<'_, F>) -> (Span<Va>, Vec<u64>) {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(BLOCK));
    let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    let blocks = Mapping::new(Attrs::KERNEL_DATA).without_runs();
    // The last page of a table and the first of the next; blocks; pages at both ends of a table; one full table.
    map(space, span(block - page, 4 * page), block - page, pages).unwrap();
    map(space, span(3 * block, 2 * block), 0, blocks).unwrap();
    map(space, span(5 * block, page), 0, pages).unwrap();
    map(space, span(6 * block - page, page), 0, pages).unwrap();
    map(space, span(7 * block + 5 * page, 3 * page), 0, pages).unwrap();
    map(space, span(9 * block - 2 * page, 2 * page), 0, pages).unwrap();
    // Further up: below another entry of the level above, so that a sub-tree of several levels can be cut off.
    let above = 1u64 << F::shift(Level::new(2));
    let mut size = 10 * block;
    if F::LEVELS > 3 || F::entries(Level::new(2)) > 2 {
        map(space, span(above, block + page), 0, blocks).unwrap();
        map(space, span(above + 3 * block - page, page), 0, pages).unwrap();
        map(space, span(2 * above - page, page), 0, pages).unwrap();
        size = 2 * above;
    }
    let mut expected: Vec<u64> = leaves(space)
        .iter()
        .map(|leaf| leaf.input().get())
        .collect();
    expected.sort_unstable();
    (span(0, size), expected)
}

fn unmapping_in_steps_cuts_each_leaf_once<F: Judged>() {
    let page = 1u64 << F::PAGE_SHIFT;
    for links in [true, false] {
        for step in [1, 2, 3, 1000] {
            // From the middle of the first pages, so that there are leaves to cut one by one at both ends.
            for shrink in [0, page] {
                let mut platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(quiet(0));
                if !links {
                    platform = platform.without_links();
                }
                let mut space = Space::<F>::new(&platform).unwrap();
                let (all, expected) = landscape(&mut space);
                space.make_live();
                let last = all.last().get() - shrink;
                // Not from 0, so that the upper tables stay and the blocks are cut off one by one.
                let (mut first, mut gone) = (page, Vec::new());
                loop {
                    let mut held: Vec<Held<Leaf<F>>> = Vec::new();
                    let mut gather = space.gather();
                    let part = Span::inclusive(Va::new(first), Va::new(last)).unwrap();
                    let progress = gather.unmap(part, |leaf| {
                        held.push(leaf);
                        if held.len() >= step {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    });
                    assert!(held.len() <= step, "one more than the visitor wanted");
                    let completed = gather.issue().complete();
                    gone.extend(
                        held.into_iter()
                            .map(|leaf| completed.release(leaf).unwrap().input().get()),
                    );
                    completed.finish(|leaf| gone.push(leaf.input().get()));
                    match progress.unwrap() {
                        Progress::Done => break,
                        Progress::Stopped(at) => {
                            let at = at.get();
                            assert!(at > first, "no progress");
                            // Everything below is done, nothing from there on.
                            assert!(gone.iter().all(|&va| va < at));
                            let left = leaves(&space);
                            assert!(left.iter().all(|leaf| leaf.input().get() >= at));
                            assert_eq!(gone.len() + left.len(), expected.len());
                            first = at;
                        }
                    }
                }
                gone.sort_unstable();
                let expected: Vec<u64> = expected.into_iter().filter(|&va| va <= last).collect();
                assert_eq!(gone, expected, "{}: {step}", F::NAME);
                assert_eq!(platform.counts().tables, space.count_tables());
                assert_eq!(platform.counts().bad_frees, 0);
            }
        }
    }
}

fn settling_in_steps_visits_each_leaf_once_and_frees_each_table_once<F: Judged>() {
    let page = 1u64 << F::PAGE_SHIFT;
    for links in [true, false] {
        for step in [1, 2, 3, 4, 5, 1000] {
            let mut platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(quiet(0));
            if !links {
                platform = platform.without_links();
            }
            let mut space = Space::<F>::new(&platform).unwrap();
            let (all, expected) = landscape(&mut space);
            // Without the first page, so that not all of it is one sub-tree.
            let block = 1u64 << F::shift(BLOCK);
            let part = Span::inclusive(Va::new(block), all.last()).unwrap();
            let mut gone = Vec::new();
            let mut gather = space.gather();
            let progress = gather.unmap(part, |leaf| {
                // SAFETY: the space is dead.
                gone.push(unsafe { leaf.assume_complete() }.input().get());
                keep_going(())
            });
            assert!(progress.unwrap().is_done());
            let stay = gather.count_tables();
            let mut completed = gather.issue().complete();
            let mut calls = 0;
            loop {
                let (seen, tables) = (gone.len(), platform.counts().tables);
                let mut count = 0;
                let done = completed.settle(|leaf| {
                    gone.push(leaf.input().get());
                    count += 1;
                    assert!(count <= step, "one more than the visitor wanted");
                    if count == step {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                });
                calls += 1;
                let now = platform.counts().tables;
                if done {
                    assert_eq!(now, stay, "{}: done, and tables are left", F::NAME);
                    break;
                }
                assert!(gone.len() > seen || now < tables, "no progress");
                assert!(now > stay, "{}: not done, and nothing is left", F::NAME);
                assert!(calls < 1000);
            }
            // Done stays done.
            assert!(completed.settle(|_| panic!("a leaf was visited again")));
            completed.finish(|_| panic!("a leaf was visited again"));
            gone.sort_unstable();
            let expected: Vec<u64> = expected
                .into_iter()
                .filter(|&va| va >= part.start().get())
                .collect();
            assert_eq!(gone, expected, "{}: {step}", F::NAME);
            assert_eq!(platform.counts().bad_frees, 0);
            let _ = page;
        }
    }
}

#[test]
fn an_unmap_stops_when_the_gather_can_carry_no_more_tables() {
    let platform = Hosted::new(64, 12).without_links();
    let mut space = Space::<X86>::new(&platform).unwrap();
    for block in 0..12 {
        map(&mut space, span(block * M2 + K4, K4), 0, Attrs::KERNEL_DATA).unwrap();
    }
    let full = MAX_UNLINKED as u64 * M2;
    let mut gather = space.gather();
    let progress = gather.unmap(span(0, 12 * M2), |_| panic!("no leaf by itself"));
    assert_eq!(progress, Ok(Progress::Stopped(Va::new(full))));
    assert_eq!(leaves(&gather).len(), 4);
    let mut gone = Vec::new();
    gather.finish(|leaf| gone.push(leaf.input().get()));
    gone.sort_unstable();
    let expected: Vec<u64> = (0..8).map(|block| block * M2 + K4).collect();
    assert_eq!(gone, expected);
    unmap(&mut space, span(full, 12 * M2 - full)).unwrap();
    assert_eq!(
        (platform.counts().tables, platform.counts().bad_frees),
        (3, 0)
    );
}

// ---- gathers ----

/// Two tables of pages and the first page of a third, live.
fn two_tables<P: Platform + Clone>(platform: P) -> AddressSpace<X86, P> {
    let mut space = AddressSpace::new(platform).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    map(&mut space, all(), 0, mapping).unwrap();
    space.make_live();
    space
}

/// All that is mapped there.
fn all() -> Span<Va> {
    span(0, 2 * M2 + K4)
}

const READ: Change = Change::new().perms(Perms::READ);

/// Unmaps, and returns the last leaf that was cut off by itself.
fn cut<P: Platform + Clone>(
    gather: &mut Gather<'_, X86, P>,
    at: Span<Va>,
) -> Option<Held<Leaf<X86>>> {
    let mut held = None;
    let progress = gather.unmap(at, |leaf| {
        held = Some(leaf);
        keep_going(())
    });
    assert!(progress.unwrap().is_done());
    held
}

type Edit = fn(&mut Gather<'_, X86, &Hosted>);

/// Edits of [`two_tables`] that leave something to invalidate, and do it with the gather.
const EDITS: [Edit; 5] = [
    |gather| gather.protect(span(0, K4), READ).unwrap(),
    |gather| assert!(cut(gather, span(0, K4)).is_some()),
    |gather| assert!(cut(gather, all()).is_some()),
    |gather| assert_eq!(gather.collapse(span(0, M2), BLOCK, false), Ok(1)),
    |gather| {
        // In place, and then apart again.
        assert_eq!(gather.collapse(span(0, M2), BLOCK, false), Ok(1));
        gather.flush(|_| ());
        gather.platform().take_log();
        gather.split(span(0, M2), Level::PAGE).unwrap();
    },
];

#[test]
fn a_gather_that_is_dropped_is_complete_before_it_frees_and_gives_out_no_leaf() {
    let platform = Threads::new(64, 12, 1).with_caps(quiet(0)).recording();
    let mut space = two_tables(&platform);
    let tables = platform.tables();
    platform.take_events();
    let mut gather = space.gather();
    let held = cut(&mut gather, all()).unwrap();
    assert_eq!(platform.take_events(), []);
    drop(gather);
    let events = platform.take_events();
    let [
        Event::Publish,
        Event::Invalidate(told),
        Event::Complete,
        Event::Free(_),
        Event::Free(_),
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(told.spans(), [(0, all().last().get())]);
    assert_eq!((platform.tables(), platform.bad_frees()), (tables - 2, 0));
    // The leaf leaks.
    let completed = space.gather().issue().complete();
    assert!(completed.release(held).is_err());
    completed.finish(|_| panic!("a leaf was given out"));
}

#[test]
fn every_edit_is_invalidated_when_its_gather_is_dropped_and_no_edit_is_nothing() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        let platform = Hosted::new(64, 12).with_caps(quiet(0));
        let mut space = two_tables(&platform);
        platform.record();
        let mut gather = space.gather();
        edit(&mut gather);
        assert!(!gather.is_clean());
        drop(gather);
        let log = platform.take_log();
        assert!(log.len() == 1 && log[0].covers(0), "edit {number}: {log:?}");
        assert!(space.gather().is_clean());
        let counts = platform.counts();
        assert_eq!((counts.tables, counts.bad_frees), (space.count_tables(), 0));
        drop(space.gather());
        assert_eq!(platform.counts(), counts, "edit {number}");
    }
}

#[test]
fn what_a_forgotten_gather_owes_is_everything() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        for dropped in [true, false] {
            let platform = Hosted::new(64, 12).with_caps(quiet(0));
            let mut space = two_tables(&platform);
            let root = space.root();
            platform.record();
            let mut gather = space.gather();
            edit(&mut gather);
            core::mem::forget(gather);
            let before = platform.counts();
            assert_eq!(platform.take_log(), [], "edit {number}");

            let next = space.gather();
            assert!(!next.is_clean());
            match dropped {
                true => drop(next),
                false => next.finish(|_| panic!("a leaf was given out")),
            }
            let log = platform.take_log();
            assert_eq!(log.len(), 1, "edit {number}");
            assert!(log[0].everything && log[0].root == root);
            let counts = platform.counts();
            assert_eq!(counts.completions, before.completions + 1);
            // What the forgotten gather carried leaks.
            assert_eq!((counts.tables, counts.bad_frees), (before.tables, 0));
            // It is paid once.
            assert!(space.gather().is_clean());
        }
    }
    // Where no walker is, nothing is owed.
    let platform = Hosted::new(64, 12);
    let mut space = two_tables(&platform);
    common::used(&mut space, Liveness::Dead);
    let mut gather = space.gather();
    gather.protect(all(), READ).unwrap();
    core::mem::forget(gather);
    assert!(space.gather().is_clean());
}

#[test]
fn a_page_that_is_changed_like_the_one_before_is_owed_too() {
    let platform = Hosted::new(64, 12).with_caps(quiet(0));
    let mut space = two_tables(&platform);
    let page = |number: u64| Span::new(Va::new(number << 12), 4096).unwrap();
    // How is worked out once, for the first of them.
    let mut gather = space.gather();
    gather.protect(page(0), READ).unwrap();
    gather.finish(|_| ());
    let mut gather = space.gather();
    gather.protect(page(1), READ).unwrap();
    core::mem::forget(gather);
    platform.record();
    assert!(!space.gather().is_clean());
    let log = platform.take_log();
    assert!(log.len() == 1 && log[0].everything, "{log:?}");
}

/// What was looked at when a change was made first is looked at again when the answer may be another.
#[test]
fn a_change_that_was_right_before_is_refused_where_it_no_longer_is() {
    let page = |number: u64| Span::new(Va::new(number << 12), 4096).unwrap();
    // A run would have to be broken under the code's own feet.
    let platform = Hosted::new(64, 12).with_caps(quiet(0));
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    map(
        &mut space,
        page(0),
        0,
        Mapping::new(Attrs::KERNEL_DATA).without_runs(),
    )
    .unwrap();
    space.make_own();
    space.gather().protect(page(0), READ).unwrap();
    let run = span(16 << 12, 16 << 12);
    map(&mut space, run, 16 << 12, Mapping::new(Attrs::KERNEL_DATA)).unwrap();
    assert!(space.query(run.start()).unwrap().is_contiguous());
    let both = span(0, 40 << 12);
    let refused = space.gather().protect(both, READ);
    assert!(
        matches!(refused, Err(EditError::NeedsBreak(_))),
        "{refused:?}"
    );

    // What no walker remembers is forgotten once walkers may.
    let platform = Hosted::new(64, 12).with_caps(quiet(0));
    let mut space = AddressSpace::<X86, _>::new(&platform).unwrap();
    let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    map(&mut space, span(0, 2 << 12), 0, pages).unwrap();
    let mut gather = space.gather();
    gather.protect(page(0), READ).unwrap();
    assert!(gather.is_clean());
    drop(gather);
    space.make_live();
    let mut gather = space.gather();
    gather.protect(page(1), READ).unwrap();
    assert!(!gather.is_clean());
    drop(gather);

    // What all spaces share stays global.
    let local = READ.global(false);
    let platform = Hosted::new(512, 12);
    let mut space = AddressSpace::<X86, _>::new(&platform).unwrap();
    let hole = Span::new(Va::new(0xffff_c900_0000_0000), 4096).unwrap();
    map(
        &mut space,
        hole,
        0,
        Mapping::new(Attrs::KERNEL_DATA).pages_only(),
    )
    .unwrap();
    let mut gather = space.gather();
    gather
        .unmap(hole, |_| ControlFlow::Continue(()))
        .unwrap()
        .is_done();
    gather.protect(hole, local).unwrap();
    gather.finish(|_| ());
    let mut kernel = KernelHalf::new(space).unwrap();
    let refused = kernel.gather().protect(hole, local);
    assert!(
        matches!(refused, Err(EditError::Inexpressible(_))),
        "{refused:?}"
    );
}

#[test]
fn what_a_forgotten_gather_owes_is_paid_before_a_space_is_shared() {
    let platform = Threads::new(64, 12, 1).recording();
    let mut space = two_tables(&platform);
    let mut gather = space.gather();
    gather.protect(all(), READ).unwrap();
    core::mem::forget(gather);
    platform.take_events();
    assert!(SharedSpace::new(space).is_ok());
    let events = platform.take_events();
    let paid = matches!(
        &events[..],
        [Event::Publish, Event::Invalidate(told), Event::Complete] if told.everything
    );
    assert!(paid, "{events:?}");
}

/// An edit that finds its work done may rely on it when its gather is finished: then what was issued before is complete.
#[test]
fn what_was_issued_and_not_waited_for_is_waited_for_by_the_next_gather() {
    type Finish = fn(Gather<'_, X86, &Hosted>);
    let finish: [Finish; 3] = [
        |gather| gather.finish(|_| ()),
        |gather| drop(gather),
        |gather| gather.issue().complete().finish(|_| ()),
    ];
    for finish in finish {
        for completed in [true, false] {
            let platform = Hosted::new(64, 12).with_caps(quiet(0));
            let mut space = two_tables(&platform);
            let mut gather = space.gather();
            gather.protect(span(0, K4), READ).unwrap();
            let issued = gather.issue();
            let counts = platform.counts();
            assert_eq!((counts.invalidations, counts.completions), (1, 0));

            let mut next = space.gather();
            next.protect(span(0, K4), READ).unwrap();
            assert!(next.is_clean(), "it is protected already");
            finish(next);
            let counts = platform.counts();
            assert_eq!((counts.invalidations, counts.completions), (1, 1));
            match completed {
                true => issued.complete().finish(|_| ()),
                false => drop(issued),
            }
        }
    }
    // Once it has waited, a gather without anything to invalidate does not wait again; nor does one without any edit.
    let platform = Hosted::new(64, 12).with_caps(quiet(0));
    let mut space = two_tables(&platform);
    let mut gather = space.gather();
    gather.protect(span(0, K4), READ).unwrap();
    drop(gather.issue());
    let mut gather = space.gather();
    for _ in 0..3 {
        gather.flush(|_| ());
    }
    gather.finish(|_| ());
    drop(space.gather());
    let counts = platform.counts();
    assert_eq!((counts.invalidations, counts.completions), (1, 1));
}

#[test]
fn a_refused_edit_leaves_those_before_it_to_be_invalidated() {
    fn edits(space: &mut Space<'_, X86>, refused: Edits) -> Result<(), EditError<Va>> {
        let mut gather = space.gather();
        gather.protect(span(M2, K4), READ)?;
        refused(&mut gather)?;
        gather.finish(|_| panic!("it is refused"));
        Ok(())
    }
    type Edits = fn(&mut Gather<'_, X86, &Hosted>) -> Result<(), EditError<Va>>;
    let refusals: [(Edits, EditError<Va>); 5] = [
        (
            |gather| gather.map(span(0, K4), Pa::new(0), Attrs::KERNEL_DATA),
            EditError::AlreadyMapped(Va::new(0)),
        ),
        (
            |gather| gather.map(span(G1, K4), Pa::new(0), Attrs::KERNEL_DATA),
            EditError::OutOfTables,
        ),
        (
            |gather| {
                gather
                    .unmap(span(1 << 47, K4), |_| keep_going(()))
                    .map(|_| ())
            },
            EditError::InputOutOfRange,
        ),
        (
            |gather| gather.split(span(0, K4), Level::new(4)),
            EditError::NoSuchLeaf,
        ),
        (
            |gather| {
                gather
                    .collapse(span(0, K4), Level::new(4), false)
                    .map(|_| ())
            },
            EditError::NoSuchLeaf,
        ),
    ];
    for (refused, error) in refusals {
        let platform = Hosted::new(64, 12).with_caps(quiet(0));
        let mut space = two_tables(&platform);
        let tables = platform.counts().tables;
        platform.limit_allocations(Some(0));
        platform.record();
        assert_eq!(edits(&mut space, refused), Err(error));
        let log = platform.take_log();
        assert_eq!(log.len(), 1, "{error}");
        assert_eq!(log[0].spans(), [(M2, M2 + K4 - 1)]);
        let counts = platform.counts();
        assert_eq!((counts.completions, counts.tables), (1, tables));
        assert!(space.gather().is_clean());
        let attrs = space.query(Va::new(M2)).unwrap().attrs();
        assert_eq!(attrs.perms, Perms::READ);
    }
}

#[test]
fn a_visitor_that_unwinds_leaves_nothing_that_an_unmap_has_cut_off_to_be_remembered() {
    // The pages of the first table but one, by themselves; the second table; the page behind it, by itself.
    let at = Span::inclusive(Va::new(K4), all().last()).unwrap();
    const CUT: usize = 512;
    for liveness in [Liveness::Dead, Liveness::Live] {
        for at_call in [1, 5, CUT - 1, CUT] {
            for inside in [true, false] {
                let platform = Hosted::new(64, 12).with_caps(quiet(0));
                let mut space = two_tables(&platform);
                common::used(&mut space, liveness);
                platform.record();
                let total = leaves(&space).len();
                let with_table = if at_call == CUT { 512 } else { 0 };
                let unmap = |gather: &mut Gather<'_, X86, &Hosted>| {
                    let mut calls = 0;
                    gather.unmap(at, |_| {
                        calls += 1;
                        assert!(calls < at_call, "unwinds");
                        keep_going(())
                    })
                };
                if inside {
                    // The gather is dropped in unwinding.
                    let unwound = catch_unwind(AssertUnwindSafe(|| unmap(&mut space.gather())));
                    assert!(unwound.is_err());
                } else {
                    // It is not, and goes on.
                    let mut gather = space.gather();
                    let unwound = catch_unwind(AssertUnwindSafe(|| unmap(&mut gather)));
                    assert!(unwound.is_err());
                    assert_eq!(platform.take_log(), []);
                    assert_eq!(gather.is_clean(), liveness == Liveness::Dead);
                    gather.protect(span(0, K4), READ).unwrap();
                    let mut settled = 0;
                    gather.finish(|_| settled += 1);
                    assert_eq!(settled, with_table);
                }
                let log = platform.take_log();
                let told: Vec<bool> = log.iter().map(|told| told.everything).collect();
                let completions = platform.counts().completions;
                match liveness {
                    Liveness::Dead => assert_eq!((told, completions), (vec![], 0)),
                    _ => assert_eq!((told, completions), (vec![true], 1)),
                }
                // What was not reached is there, what was cut off is freed, and the next gather owes nothing.
                assert_eq!(leaves(&space).len(), total - at_call - with_table);
                let counts = platform.counts();
                assert_eq!((counts.tables, counts.bad_frees), (space.count_tables(), 0));
                assert!(space.gather().is_clean());
                unmap_all(&mut space);
            }
        }
    }
}

/// Everything can still be unmapped, and all tables come back.
fn unmap_all(space: &mut Space<'_, X86>) {
    unmap(space, span(0, 512 * G1)).unwrap();
    assert_eq!((leaves(space).len(), space.count_tables()), (0, 1));
    let counts = space.platform().counts();
    assert_eq!((counts.tables, counts.bad_frees), (1, 0));
}

#[test]
fn a_visitor_that_unwinds_in_settling_leaks_the_rest_of_its_sub_tree_and_no_other() {
    const PAGES: usize = 512;
    /// `by_hand`: step by step, and after the unwinding the rest.
    fn check(at: Span<Va>, links: bool, at_call: usize, by_hand: bool, unseen: usize, leaked: u64) {
        let mut platform = Hosted::new(64, 12).with_caps(quiet(0));
        if !links {
            platform = platform.without_links();
        }
        let mut space = Space::<X86>::new(&platform).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(&mut space, span(0, 3 * M2), 0, mapping).unwrap();
        space.make_live();
        let mut gather = space.gather();
        assert!(cut(&mut gather, at).is_none());
        let mut seen = BTreeSet::new();
        let mut visit = |leaf: Leaf<X86>| {
            assert!(seen.insert(leaf.input()), "a leaf was visited twice");
            assert!(seen.len() != at_call, "unwinds");
        };
        if by_hand {
            let mut completed = gather.issue().complete();
            let mut settle = || {
                completed.settle(|leaf| {
                    visit(leaf);
                    keep_going(())
                })
            };
            assert!(catch_unwind(AssertUnwindSafe(&mut settle)).is_err());
            assert!(settle());
            assert_eq!(seen.len(), 3 * PAGES - unseen);
        } else {
            let unwound = catch_unwind(AssertUnwindSafe(|| gather.finish(visit)));
            assert!(unwound.is_err());
        }
        let counts = platform.counts();
        assert_eq!((counts.invalidations, counts.completions), (1, 1));
        assert_eq!(
            (counts.tables, counts.bad_frees),
            (space.count_tables() + leaked, 0),
            "{at}, links: {links}, call {at_call}"
        );
    }
    for (links, by_hand) in [(false, false), (false, true), (true, false), (true, true)] {
        // In the first table that is settled, the second, the last.
        for at_call in [1, PAGES, PAGES + 1, 3 * PAGES] {
            let (table, left) = ((at_call - 1) / PAGES, (3 * PAGES - at_call) % PAGES);
            // Three sub-trees of a table each; one of all three, and the table above them.
            check(span(0, 3 * M2), links, at_call, by_hand, left, 1);
            let (unseen, leaked) = (3 * PAGES - at_call, 4 - table as u64);
            check(span(0, G1), links, at_call, by_hand, unseen, leaked);
        }
    }
}

#[test]
fn what_is_dropped_half_way_leaks_and_is_never_freed() {
    for stage in 0..3 {
        let platform = Hosted::new(64, 12);
        let mut space = two_tables(&platform);
        let tables = platform.counts().tables;
        let mut gather = space.gather();
        assert!(cut(&mut gather, span(0, 2 * M2)).is_none());
        match stage {
            0 => drop(gather.issue()),
            1 => drop(gather.issue().complete()),
            _ => {
                // Some leaves of the first table were visited, none of the second.
                let mut completed = gather.issue().complete();
                let mut left = 5;
                let done = completed.settle(|_| {
                    left -= 1;
                    if left == 0 {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                });
                assert!(!done);
                drop(completed);
            }
        }
        assert_eq!(platform.counts().tables, tables, "stage {stage}");
        assert_eq!(space.count_tables(), tables - 2);
        assert_eq!(platform.counts().bad_frees, 0);
    }
}

#[test]
fn a_leaf_is_released_by_the_completion_of_what_it_was_gathered_with_only() {
    let platform = Hosted::new(64, 12);
    let (mut space, mut other) = (two_tables(&platform), two_tables(&platform));
    let mut gather = space.gather();
    let low = cut(&mut gather, span(0, K4)).unwrap();
    let first = gather.issue();
    // Another gather of the same space; one of another space; one that has gathered nothing.
    let mut gather = space.gather();
    let high = cut(&mut gather, span(K4, K4)).unwrap();
    let second = gather.issue().complete();
    let low = second.release(low).expect_err("it is not complete");
    let mut elsewhere = other.gather();
    let foreign = cut(&mut elsewhere, span(0, K4)).unwrap();
    let third = elsewhere.issue().complete();
    let low = third.release(low).expect_err("a gather of another space");
    let empty = space.gather().issue().complete();
    let low = empty.release(low).expect_err("it has gathered nothing");
    assert_eq!(second.release(high).unwrap().input(), Va::new(K4));
    assert_eq!(third.release(foreign).unwrap().input(), Va::new(0));
    let first = first.complete();
    assert_eq!(first.release(low).unwrap().input(), Va::new(0));
    for completed in [first, second, third, empty] {
        completed.finish(|_| ());
    }
}

#[test]
fn a_space_that_walkers_use_keeps_its_identity() {
    let platform = Hosted::new(64, 12);
    for used in [Liveness::Live, Liveness::Own] {
        let mut space = Space::<X86>::new(&platform).unwrap().with_id(2).with_id(3);
        common::used(&mut space, used);
        space = space.with_id(5);
        assert_eq!(space.id(), 3);
        common::used(&mut space, Liveness::Dead);
        assert_eq!(space.with_id(5).id(), 5);

        let root = adopted::<X86>(&platform, 7, 0x65).root();
        // SAFETY: the tree of another space, which is gone; nothing walks it.
        let space = unsafe { AddressSpace::<X86, _>::adopt(&platform, root, Half::Lower, used) };
        let mut space = space.with_id(5);
        assert_eq!(space.id(), 0);
        platform.record();
        unmap(&mut space, span(0, K4)).unwrap();
        assert_eq!(platform.take_log()[0].id, 0);
    }
}

// ---- gathers of shared spaces ----

/// The same pages in a space that is shared.
fn shared_space<F: Judged>(platform: &Threads) -> SharedSpace<F, &Threads> {
    let space = SharedSpace::new(AddressSpace::new(platform).unwrap());
    let space = space.unwrap_or_else(|_| unreachable!("it is dead"));
    fill(&space, all().size());
    platform.take_events();
    space
}

/// Fills what holes there are, so many bytes; nothing is claimed.
fn fill<F: Judged>(space: &SharedSpace<F, &Threads>, bytes: u64) {
    let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
    let filled = space.map_range(all(), Pa::new(0), mapping);
    assert_eq!(filled, Ok(bytes), "{}", F::NAME);
}

/// What was invalidated, by the first of the events; each invalidation complete before anything is freed.
fn invalidated(events: &[Event]) -> &Told {
    let [
        Event::Publish,
        Event::Invalidate(told),
        Event::Complete,
        rest @ ..,
    ] = events
    else {
        panic!("{events:?}");
    };
    let plain = |event: &Event| matches!(event, Event::Free(_) | Event::Publish);
    assert!(rest.iter().all(plain), "{events:?}");
    told
}

fn a_shared_gather_that_is_dropped_is_complete<F: Judged>() {
    for issued in [false, true] {
        let platform = Threads::new(64, 12, 1).with_caps(quiet(0)).recording();
        let space = shared_space::<F>(&platform);
        let tables = platform.tables();
        let mut gather = space.gather();
        assert!(gather.top_up(2));
        let taken = gather.unmap(all(), keep_going).unwrap();
        assert!(taken.progress.is_done() && !taken.passed_over);
        assert_eq!(platform.take_events(), []);
        // What was issued is completed as well, and its tables leak.
        let leaked = match issued {
            true => {
                drop(gather.issue());
                2
            }
            false => 0,
        };
        drop(gather);
        let events = platform.take_events();
        let told = invalidated(&events);
        assert!([0, 2 * M2 - 1, 2 * M2].map(|at| told.covers(at)) == [true; 3]);
        assert_eq!(
            (platform.tables(), platform.bad_frees()),
            (tables - 2 + leaked, 0)
        );
        fill(&space, all().size());
        assert!(finds_it_done(&space).is_clean());
    }
}

/// Another gather with an edit that changes nothing.
fn finds_it_done<'s, 't, F: Judged>(
    space: &'s SharedSpace<F, &'t Threads>,
) -> shared::Gather<'s, F, &'t Threads> {
    let mut gather = space.gather();
    let accessed = Change::new().accessed(true);
    assert!(!gather.protect(all(), accessed).unwrap().changed);
    gather
}

fn a_shared_gather_of_more_pieces_than_there_are_ranges_invalidates_everything<F: Judged>() {
    let platform = Threads::new(64, 12, 1).with_caps(quiet(0)).recording();
    let space = shared_space::<F>(&platform);
    for (pieces, everything) in [(MAX_RANGES, false), (MAX_RANGES + 1, true), (100, true)] {
        let mut gather = space.gather();
        let mut held = Vec::new();
        for piece in 0..pieces as u64 {
            // In an order in which no two that follow each other are neighbours.
            let at = span(piece * 7 % 128 * 4 * K4, K4);
            let taken = gather.unmap(at, |leaf| {
                held.push(leaf);
                keep_going(())
            });
            assert!(taken.unwrap().progress.is_done());
        }
        let cut = gather.issue().complete();
        let events = platform.take_events();
        assert_eq!(invalidated(&events).everything, everything, "{pieces}");
        for leaf in held {
            assert!(cut.release(leaf).is_ok());
        }
        // Nothing is left claimed.
        fill(&space, pieces as u64 * K4);
        platform.take_events();
    }
}

fn a_visitor_that_unwinds_in_a_shared_unmap_leaves_nothing_to_be_remembered<F: Judged>() {
    for at_call in [1, 5, 512] {
        let platform = Threads::new(64, 12, 1).with_caps(quiet(0)).recording();
        let space = shared_space::<F>(&platform);
        let tables = platform.tables();
        let at = Span::inclusive(Va::new(K4), all().last()).unwrap();
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let mut calls = 0;
            space.gather().unmap(at, |_| {
                calls += 1;
                assert!(calls < at_call, "unwinds");
                keep_going(())
            })
        }));
        assert!(unwound.is_err());
        let events = platform.take_events();
        assert!(invalidated(&events).everything);
        let with_table = if at_call == 512 { 1 } else { 0 };
        assert_eq!(
            (platform.tables(), platform.bad_frees()),
            (tables - with_table, 0)
        );
        // What was taken is a hole, what was not is there; and no edit counts any more.
        fill(&space, at_call as u64 * K4 + with_table * M2);
        assert!(finds_it_done(&space).is_clean());
    }
}

fn what_a_forgotten_shared_gather_has_done_is_never_taken_for_complete<F: Judged>() {
    let platform = Threads::new(64, 12, 1).with_caps(quiet(0)).recording();
    let space = shared_space::<F>(&platform);
    let mut gather = space.gather();
    let taken = gather.unmap(span(0, K4), keep_going);
    assert!(taken.unwrap().progress.is_done());
    core::mem::forget(gather);
    assert_eq!(platform.take_events(), []);
    for _ in 0..2 {
        drop(finds_it_done(&space));
        let events = platform.take_events();
        let whole = range(0, all().size(), None, true);
        assert_eq!(invalidated(&events).ranges, [whole]);
    }
    // Where a break is demanded, what was taken is claimed for ever; until the space is exclusive.
    let refill = space.map_range(span(0, K4), Pa::new(0), Mapping::new(Attrs::USER_DATA));
    let busy = Err(Refused::Busy(Va::new(0)));
    assert_eq!(refill, if is_arm::<F>() { busy } else { Ok(K4) });
    platform.take_events();
    let mut space = space.into_exclusive();
    assert!(invalidated(&platform.take_events()).everything);
    if is_arm::<F>() {
        map(&mut space, span(0, K4), 0, Attrs::USER_DATA).unwrap();
    }
    assert_eq!(leaves(&space).len() as u64, all().size() / K4);
}

macro_rules! for_both_rules {
    ($($test:ident),* $(,)?) => {
        mod shared_arm64_4k {
            $(#[test]
            fn $test() {
                super::$test::<super::Arm64K4>();
            })*
        }
        mod shared_x86_64 {
            $(#[test]
            fn $test() {
                super::$test::<super::X86>();
            })*
        }
    };
}

for_both_rules!(
    a_shared_gather_that_is_dropped_is_complete,
    a_shared_gather_of_more_pieces_than_there_are_ranges_invalidates_everything,
    a_visitor_that_unwinds_in_a_shared_unmap_leaves_nothing_to_be_remembered,
    what_a_forgotten_shared_gather_has_done_is_never_taken_for_complete,
);

// ---- the space that the code runs on ----

/// An edit as data.
#[derive(Clone, Copy, Debug)]
enum Do {
    Unmap,
    Split,
    Protect(Change),
}

#[test]
fn the_own_space_refuses_what_needs_a_break_and_does_the_rest() {
    // The space: a run of blocks from 0, a block at 64 MiB, a run of pages at 128 MiB, a user page at 256 MiB.
    const LONE: u64 = 64 << 20;
    const RUN: u64 = 128 << 20;
    const USER: u64 = 256 << 20;
    const READ: Do = Do::Protect(Change::new().perms(Perms::READ));
    const TYPE: Do = Do::Protect(Change::new().memory(Memory::NonCacheable));
    const SHARE: Do = Do::Protect(Change::new().shareability(Shareability::Outer));
    const SAME: Do = Do::Protect(Change::new().shareability(Shareability::Inner));
    const GLOBAL: Do = Do::Protect(Change::new().global(true));
    const PRIVATE: Do = Do::Protect(Change::new().global(false));
    const NEVER: u8 = 4;
    // The lowest level of break-before-make at which arm64 does it in place, and where it is refused below that.
    let edits = [
        (Do::Unmap, span(LONE, M2), 0, 0),
        (Do::Unmap, span(LONE, K4), 2, LONE),
        (Do::Unmap, span(LONE + M2 - K4, 2 * K4), 2, LONE + M2 - K4),
        (READ, span(LONE, M2), 0, 0),
        (READ, span(LONE, K4), 2, LONE),
        (READ, span(LONE + K4, M2 - K4), 2, LONE + K4),
        (Do::Split, span(LONE, M2), 2, LONE),
        (Do::Split, span(LONE - M2, K4), 0, 0),
        (TYPE, span(LONE, M2), NEVER, LONE),
        (TYPE, span(LONE - M2, 2 * M2), NEVER, LONE),
        (SHARE, span(LONE, M2), NEVER, LONE),
        (SAME, span(LONE, M2), 0, 0),
        (Do::Unmap, span(RUN, 16 * K4), 0, 0),
        (Do::Unmap, span(RUN + K4, K4), 1, RUN),
        (READ, span(RUN + K4, K4), 1, RUN + K4),
        (READ, span(RUN, 16 * K4), 1, RUN),
        (TYPE, span(RUN, 16 * K4), NEVER, RUN),
        (Do::Split, span(RUN, 16 * K4), 1, RUN),
        (Do::Unmap, span(M2, M2), 1, 0),
        (Do::Unmap, span(M2 + K4, K4), 2, 0),
        (READ, span(M2, M2), 1, M2),
        (GLOBAL, span(USER, K4), NEVER, USER),
        (PRIVATE, span(LONE, M2), 0, 0),
    ];
    fn check<F: Judged>(bbm: u8, edits: &[(Do, Span<Va>, u8, u64)]) {
        for &(edit, at, needed, refused_at) in edits {
            // x86 has no shareability, and no rule of this kind.
            if !F::HALVES && matches!((edit, SHARE), (Do::Protect(a), Do::Protect(b)) if a == b) {
                continue;
            }
            let allowed = !F::HALVES || bbm >= needed;
            let platform = Hosted::new(64, 12).with_caps(quiet(bbm));
            let mut space = Space::<F>::new(&platform).unwrap();
            map(&mut space, span(0, 16 * M2), 0, Attrs::KERNEL_DATA).unwrap();
            let lone = Mapping::new(Attrs::KERNEL_DATA).without_runs();
            map(&mut space, span(LONE, M2), LONE, lone).unwrap();
            map(&mut space, span(RUN, 16 * K4), RUN, Attrs::KERNEL_DATA).unwrap();
            map(&mut space, span(USER, K4), 0, Attrs::USER_DATA).unwrap();
            space.make_own();
            let (before, counts) = (snapshot::<F>(&platform, space.root()), platform.counts());
            let mut gather = space.gather();
            let result = match edit {
                Do::Unmap => gather
                    .unmap(at, keep_going)
                    .map(|progress| assert!(progress.is_done())),
                Do::Split => gather.split(at, Level::PAGE),
                Do::Protect(change) => gather.protect(at, change),
            };
            let what = format!("{}, level {bbm}: {edit:?} {at}", F::NAME);
            if allowed {
                assert_eq!(result, Ok(()), "{what}");
                judge::<F>(&platform, gather.root());
            } else {
                // The address is one of the leaf, or of the run that it is part of.
                let Err(EditError::NeedsBreak(named)) = result else {
                    panic!("{what}: {result:?}");
                };
                assert!(
                    refused_at <= named.get() && named <= at.last(),
                    "{what}: {named}"
                );
                assert_eq!(before, snapshot::<F>(&platform, gather.root()), "{what}");
                assert!(gather.is_clean());
                gather.finish(|_| panic!("a refused edit cuts nothing off"));
                let now = platform.counts();
                assert_eq!(
                    (now.tables, now.invalidations, now.completions),
                    (counts.tables, counts.invalidations, counts.completions),
                    "{what}"
                );
            }
        }
    }
    for bbm in 0..4 {
        check::<Arm64K4>(bbm, &edits);
        check::<X86>(bbm, &edits);
    }
}

#[test]
fn a_collapse_of_the_own_space_leaves_what_would_need_a_break() {
    for (bbm, expected) in [(0, 0), (1, 32), (2, 1), (3, 1)] {
        let platform = Hosted::new(64, 12).with_caps(quiet(bbm));
        let mut space = pages_of_a_block::<Arm64K4>(&platform, 0, Attrs::KERNEL_DATA);
        space.make_own();
        let before = judge::<Arm64K4>(&platform, space.root());
        // At level 1 runs can be folded in place, 32 of them; from level 2 on the table can be replaced.
        assert_eq!(
            collapse(&mut space, span(0, M2), BLOCK, true),
            expected,
            "level {bbm}"
        );
        assert_eq!(before, judge::<Arm64K4>(&platform, space.root()));
    }
}

// ---- live spaces ----

/// A platform that looks at an address whenever an invalidation is waited for.
struct Watch {
    memory: Hosted,
    root: RefCell<Option<Pa>>,
    addresses: Vec<u64>,
    /// For each completion: at which of the addresses a walker finds something, and the frame.
    seen: RefCell<Vec<Vec<Option<u64>>>>,
    /// The same, whenever an invalidation is issued.
    issued: RefCell<Vec<Vec<Option<u64>>>>,
    last: Cell<Option<Barrier>>,
    regime: walker::Regime,
}

impl Watch {
    fn new<F: Judged>(caps: Caps, addresses: &[u64]) -> Self {
        let memory = Hosted::new(700, F::PAGE_SHIFT).with_caps(caps);
        memory.record();
        Self {
            memory,
            root: RefCell::default(),
            addresses: addresses.to_vec(),
            seen: RefCell::default(),
            issued: RefCell::default(),
            last: Cell::default(),
            regime: F::REGIME,
        }
    }

    fn look(&self) -> Option<Vec<Option<u64>>> {
        let root = (*self.root.borrow())?.get();
        let look = |va: u64| {
            let mut read = |table, index| self.memory.read(Pa::new(table), index).unwrap();
            match walker::translate(self.regime, root, va, &mut read) {
                Ok(leaf) => Some(leaf.physical(va)),
                Err(walker::Fault::NotMapped { .. }) => None,
                Err(fault) => panic!("{fault:?}"),
            }
        };
        Some(self.addresses.iter().map(|&va| look(va)).collect())
    }

    fn watch(&self, root: Pa) {
        *self.root.borrow_mut() = Some(root);
    }
}

// SAFETY: passed on to `Hosted`.
unsafe impl Platform for Watch {
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
        self.last.set(Some(barrier));
        if barrier == Barrier::Complete {
            self.seen.borrow_mut().extend(self.look());
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
        self.issued.borrow_mut().extend(self.look());
    }
    fn caps(&self) -> Caps {
        self.memory.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.memory.link_of(frame)
    }
}

#[test]
fn what_is_broken_is_invalid_until_the_invalidation_is_complete() {
    fn check<F: Judged>(
        prepare: fn(&mut AddressSpace<F, &Watch>),
        edit: fn(&mut Gather<'_, F, &Watch>),
        addresses: &[u64],
        frames: [&[Option<u64>]; 2],
    ) {
        let watch = Watch::new::<F>(quiet(0), addresses);
        let mut space = AddressSpace::<F, &Watch>::new(&watch).unwrap();
        prepare(&mut space);
        space.make_live();
        watch.watch(space.root());
        assert_eq!(watch.look().unwrap(), frames[0], "before");
        let mut gather = space.gather();
        edit(&mut gather);
        let seen = watch.seen.take();
        // One completion for the whole edit, however much is broken: everything at once is invalid at that moment.
        assert_eq!(seen.len(), 1, "completions");
        assert_eq!(seen[0], vec![None; addresses.len()], "at the completion");
        for issued in watch.issued.take() {
            assert_eq!(issued, vec![None; addresses.len()], "when it was issued");
        }
        assert_eq!(watch.look().unwrap(), frames[1], "after");
        // What was made after the completion is published before the edit returns.
        assert_eq!(watch.last.get(), Some(Barrier::Publish));
        gather.finish(|_| ());
        assert_eq!(watch.memory.counts().bad_frees, 0);
    }
    let both: &[Option<u64>] = &[Some(G1), Some(G1 + M2 - K4)];
    // A block of which a page is protected: all of it goes, and comes back as pages.
    check::<Arm64K4>(
        |space| {
            map(
                space,
                span(0, M2),
                G1,
                Mapping::new(Attrs::KERNEL_DATA).without_runs(),
            )
            .unwrap()
        },
        |gather| {
            let change = Change::new().perms(Perms::READ);
            gather.protect(span(0, K4), change).unwrap();
        },
        &[0, M2 - K4],
        [both, both],
    );
    // The same with an unmap.
    check::<Arm64K4>(
        |space| {
            map(
                space,
                span(0, M2),
                G1,
                Mapping::new(Attrs::KERNEL_DATA).without_runs(),
            )
            .unwrap()
        },
        |gather| {
            let progress = gather.unmap(span(0, K4), keep_going).unwrap();
            assert!(progress.is_done());
        },
        &[0, M2 - K4],
        [both, &[None, Some(G1 + M2 - K4)]],
    );
    // Blocks at both ends of a range, many between: one completion.
    check::<Arm64K4>(
        |space| {
            map(
                space,
                span(0, 8 * M2),
                G1,
                Mapping::new(Attrs::KERNEL_DATA).without_runs(),
            )
            .unwrap()
        },
        |gather| {
            let at = span(K4, 8 * M2 - 2 * K4);
            gather.split(at, Level::PAGE).unwrap();
        },
        &[0, 3 * M2, 8 * M2 - K4],
        [&[Some(G1), Some(G1 + 3 * M2), Some(G1 + 8 * M2 - K4)]; 2],
    );
    // The memory type of pages and blocks.
    check::<Arm64K4>(
        |space| {
            map(
                space,
                span(0, M2 + 3 * K4),
                G1,
                Mapping::new(Attrs::KERNEL_DATA),
            )
            .unwrap()
        },
        |gather| {
            let change = Change::new().memory(Memory::NonCacheable);
            gather.protect(span(0, M2 + 3 * K4), change).unwrap();
        },
        &[0, M2, M2 + 2 * K4],
        [&[Some(G1), Some(G1 + M2), Some(G1 + M2 + 2 * K4)]; 2],
    );
    // Pages that become a block, and pages that become a run.
    check::<Arm64K4>(
        |space| {
            let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
            map(space, span(0, 3 * M2), G1, mapping).unwrap();
        },
        |gather| {
            gather.collapse(span(0, 3 * M2), BLOCK, true).unwrap();
        },
        &[0, M2, 3 * M2 - K4],
        [&[Some(G1), Some(G1 + M2), Some(G1 + 3 * M2 - K4)]; 2],
    );
    check::<Arm64K4>(
        |space| {
            let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
            map(space, span(0, 32 * K4), G1, mapping).unwrap();
        },
        |gather| {
            gather.collapse(span(0, 32 * K4), BLOCK, true).unwrap();
        },
        &[0, 15 * K4, 31 * K4],
        [&[Some(G1), Some(G1 + 15 * K4), Some(G1 + 31 * K4)]; 2],
    );
}

/// What a platform is asked to invalidate by one call: ranges, or `None` for everything.
type Asked = Option<Vec<Stale>>;

/// One call for one range.
fn one(stale: Stale) -> Vec<Asked> {
    vec![Some(vec![stale])]
}

const NOTHING: Vec<Asked> = Vec::new();
const EVERYTHING: [Asked; 1] = [None];

/// What edits of a live space invalidate before they return, and what they leave to be invalidated with the gather.
fn invalidations<F: Judged>(
    caps: Caps,
    prepare: impl FnOnce(&mut Space<'_, F>),
    edit: impl FnOnce(&mut Gather<'_, F, &Hosted>),
) -> (Vec<Asked>, Vec<Asked>) {
    let platform = Hosted::new(700, F::PAGE_SHIFT).with_caps(caps);
    platform.record();
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap().with_id(7);
    prepare(&mut space);
    space.make_live();
    let root = space.root();
    let take = || -> Vec<Asked> {
        let asked = |told: Told| {
            // Everything that these tests map is global.
            assert_eq!((told.root, told.id, told.global), (root, 7, true));
            (!told.everything).then_some(told.ranges)
        };
        platform.take_log().into_iter().map(asked).collect()
    };
    take();
    let mut gather = space.gather();
    edit(&mut gather);
    let at_once = take();
    gather.finish(|_| ());
    (at_once, take())
}

fn range(first: u64, size: u64, level: Option<Level>, tables: bool) -> Stale {
    Stale {
        first,
        last: first + (size - 1),
        level,
        tables,
    }
}

fn no_edit<F: Judged>(_: &mut Space<'_, F>) {}

#[test]
fn a_range_of_pages_takes_one_invalidation_with_its_level() {
    let pages = |space: &mut Space<'_, X86>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(0, M2 / 2), 0, mapping).unwrap();
    };
    let (at_once, later) = invalidations::<X86>(quiet(0), pages, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(4 * K4, 100 * K4), change).unwrap();
    });
    assert_eq!(at_once, NOTHING);
    assert_eq!(
        later,
        one(range(4 * K4, 100 * K4, Some(Level::PAGE), false))
    );
    let (at_once, later) = invalidations::<X86>(quiet(0), pages, |gather| {
        let progress = gather.unmap(span(4 * K4, 100 * K4), keep_going);
        assert!(progress.unwrap().is_done());
    });
    assert_eq!(at_once, NOTHING);
    assert_eq!(
        later,
        one(range(4 * K4, 100 * K4, Some(Level::PAGE), false))
    );
    // What is not mapped, and what does not change, is not invalidated.
    let nothing = invalidations::<X86>(quiet(0), pages, |gather| {
        let progress = gather.unmap(span(4 * M2, 100 * K4), keep_going);
        assert!(progress.unwrap().is_done());
        let change = Change::new().perms(Attrs::KERNEL_DATA.perms);
        gather.protect(span(0, 100 * K4), change).unwrap();
    });
    assert_eq!(nothing, (NOTHING, NOTHING));
}

#[test]
fn a_mapping_takes_no_invalidation_where_holes_are_not_remembered() {
    fn edit(gather: &mut Gather<'_, X86, &Hosted>) {
        gather
            .map(span(M2 - K4, M2), Pa::new(0), Attrs::KERNEL_DATA)
            .unwrap();
    }
    assert_eq!(invalidations(quiet(0), no_edit, edit), (NOTHING, NOTHING));
    let remembering = Caps {
        invalid_entries_cached: true,
        ..quiet(0)
    };
    let (at_once, later) = invalidations(remembering, no_edit, edit);
    assert_eq!(at_once, NOTHING);
    assert_eq!(later, one(range(M2 - K4, M2, None, true)));
}

#[test]
fn mappings_in_a_live_space_are_published_once_with_the_gather() {
    // Leaves in a table that is there, a table that is new; one call for each, or both in one gather.
    let spans = [span(K4, K4), span(G1, K4)];
    for parts in [&spans[..1], &spans[1..], &spans] {
        let platform = Hosted::new(16, 12).with_caps(quiet(0));
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, K4), 0, Attrs::KERNEL_DATA).unwrap();
        space.make_live();
        let before = platform.counts().publications;
        let published = || platform.counts().publications - before;
        let mut gather = space.gather();
        for at in parts {
            gather.map(*at, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
        }
        assert_eq!(published(), 0);
        assert!(gather.is_clean());
        gather.flush(|_| ());
        assert_eq!(published(), 1);
        gather.finish(|_| ());
        assert_eq!(published(), 1);
        // The space's own map does it before it returns.
        let one = span(2 * G1, K4);
        map(&mut space, one, 0, Attrs::KERNEL_DATA).unwrap();
        assert_eq!(published(), 2);
        let counts = platform.counts();
        assert_eq!((counts.invalidations, counts.completions), (0, 0));
    }
}

#[test]
fn the_level_is_not_told_where_leaves_of_several_levels_or_tables_are_concerned() {
    let mixed = |space: &mut Space<'_, X86>| {
        map(space, span(0, M2 + 4 * K4), 0, Attrs::KERNEL_DATA).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(4 * M2, M2), 0, mapping).unwrap();
    };
    let read = Change::new().perms(Perms::READ);
    let protect = |at: Span<Va>| {
        let (at_once, later) = invalidations::<X86>(quiet(0), mixed, |gather| {
            gather.protect(at, read).unwrap();
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    assert_eq!(protect(span(0, M2)), one(range(0, M2, Some(BLOCK), false)));
    assert_eq!(
        protect(span(M2, 4 * K4)),
        one(range(M2, 4 * K4, Some(Level::PAGE), false))
    );
    assert_eq!(
        protect(span(0, M2 + 4 * K4)),
        one(range(0, M2 + 4 * K4, None, false))
    );
    // A table that is cut off; a table and leaves.
    let unmap = |at: Span<Va>| {
        let (at_once, later) = invalidations::<X86>(quiet(0), mixed, |gather| {
            let progress = gather.unmap(at, keep_going);
            assert!(progress.unwrap().is_done());
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    assert_eq!(unmap(span(4 * M2, M2)), one(range(4 * M2, M2, None, true)));
    assert_eq!(unmap(span(0, M2)), one(range(0, M2, Some(BLOCK), false)));
    assert_eq!(unmap(span(0, 5 * M2)), one(range(0, 5 * M2, None, true)));
}

#[test]
fn runs_of_two_levels_that_are_unfolded_by_one_edit_are_each_told_right() {
    // A run of pages at one end of the range, a run of blocks at the other, or the other way round; both in place.
    for pages_first in [true, false] {
        let (pages, blocks) = match pages_first {
            true => (16 * M2 - 16 * K4, 16 * M2),
            false => (32 * M2, 16 * M2),
        };
        let prepare = |space: &mut Space<'_, Arm64K4>| {
            map(space, span(pages, 16 * K4), pages, Attrs::KERNEL_DATA).unwrap();
            map(space, span(blocks, 16 * M2), blocks, Attrs::KERNEL_DATA).unwrap();
            assert_eq!(runs_in(space), 2);
        };
        let at = match pages_first {
            true => span(pages + 8 * K4, 8 * K4 + M2),
            false => span(blocks + 15 * M2, M2 + 8 * K4),
        };
        let (mut told, later) = invalidations::<Arm64K4>(quiet(1), prepare, |gather| {
            gather.split(at, BLOCK).unwrap();
            assert_eq!(runs_in(gather), 0);
        });
        told.extend(later);
        let covered = |from: u64, to: u64, right: Level| {
            let covers = |stale: &Stale| {
                stale.first <= from
                    && to <= stale.last
                    && stale.level.is_none_or(|level| level == right)
            };
            told.iter().any(|asked| match asked {
                None => true,
                Some(ranges) => ranges.iter().any(covers),
            })
        };
        assert!(covered(pages, pages + 16 * K4 - 1, Level::PAGE), "{told:?}");
        assert!(covered(blocks, blocks + 16 * M2 - 1, BLOCK), "{told:?}");
    }
}

#[test]
fn a_broken_block_is_invalidated_at_once_as_the_block_it_was() {
    let block = |space: &mut Space<'_, Arm64K4>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
        map(space, span(0, 4 * M2), 0, mapping).unwrap();
    };
    let (at_once, later) = invalidations::<Arm64K4>(quiet(0), block, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(M2, K4), change).unwrap();
    });
    assert_eq!(at_once, one(range(M2, M2, Some(BLOCK), false)));
    assert_eq!(later, one(range(M2, K4, Some(Level::PAGE), false)));
    // In place, the block has to be forgotten before its parts differ.
    let (at_once, later) = invalidations::<Arm64K4>(quiet(2), block, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(M2, K4), change).unwrap();
    });
    assert_eq!(at_once, one(range(M2, M2, None, true)));
    assert_eq!(later, one(range(M2, K4, Some(Level::PAGE), false)));
}

#[test]
fn ranges_merge_and_too_many_of_them_are_everything() {
    let pages = |space: &mut Space<'_, X86>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(0, M2), 0, mapping).unwrap();
    };
    let read = Change::new().perms(Perms::READ);
    // Neighbours, in either order, and overlapping.
    let (_, later) = invalidations::<X86>(quiet(0), pages, |gather| {
        for page in [5, 6, 4, 7] {
            gather.protect(span(page * K4, K4), read).unwrap();
        }
        gather
            .protect(span(6 * K4, 4 * K4), Change::new().software(1))
            .unwrap();
    });
    assert_eq!(later, one(range(4 * K4, 4 * K4, Some(Level::PAGE), false)));
    let apart = |count: u64, caps: Caps| {
        let (at_once, later) = invalidations::<X86>(caps, pages, |gather| {
            for page in 0..count {
                gather.protect(span(2 * page * K4, K4), read).unwrap();
            }
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    // All ranges go to the platform at once.
    let each = |count: u64| -> [Asked; 1] {
        let page = |page: u64| range(2 * page * K4, K4, Some(Level::PAGE), false);
        [Some((0..count).map(page).collect())]
    };
    let many = MAX_RANGES as u64;
    assert_eq!(apart(many, quiet(0)), each(many));
    assert_eq!(apart(many + 1, quiet(0)), EVERYTHING);
    assert_eq!(apart(3 * many, quiet(0)), EVERYTHING);
    // Neighbours of different levels stay apart, so that both are told.
    let mixed = |space: &mut Space<'_, X86>| {
        map(space, span(0, M2 + 4 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    };
    for block_first in [true, false] {
        let (_, later) = invalidations::<X86>(quiet(0), mixed, |gather| {
            let (block, pages) = (span(0, M2), span(M2, 4 * K4));
            let (first, second) = match block_first {
                true => (block, pages),
                false => (pages, block),
            };
            gather.protect(first, read).unwrap();
            gather.protect(second, read).unwrap();
        });
        let [Some(ranges)] = &later[..] else {
            panic!("{later:?}");
        };
        assert_eq!(ranges.len(), 2);
        assert!(ranges.contains(&range(0, M2, Some(BLOCK), false)));
        assert!(ranges.contains(&range(M2, 4 * K4, Some(Level::PAGE), false)));
    }
    // More than the hardware does better one by one: each page counts, wherever it is.
    let few = Caps {
        invalidate_all_above: 5,
        ..quiet(0)
    };
    assert_eq!(apart(5, few), each(5));
    assert_eq!(apart(6, few), EVERYTHING);
    let one_edit = |pages_changed: u64| {
        let changed = span(0, pages_changed * K4);
        let (_, later) = invalidations::<X86>(few, pages, |gather| {
            gather.protect(changed, read).unwrap();
        });
        later
    };
    assert_eq!(one_edit(5), one(range(0, 5 * K4, Some(Level::PAGE), false)));
    assert_eq!(one_edit(6), EVERYTHING);
    // A block is one operation, as large as it is.
    let block = |space: &mut Space<'_, X86>| {
        map(space, span(0, 5 * M2), 0, Attrs::KERNEL_DATA).unwrap();
    };
    let (_, later) = invalidations::<X86>(few, block, |gather| {
        gather.protect(span(0, 5 * M2), read).unwrap();
    });
    assert_eq!(later, one(range(0, 5 * M2, Some(BLOCK), false)));
}

#[test]
fn a_break_of_more_pieces_than_there_are_ranges_invalidates_everything_and_makes_each_again() {
    let pieces = MAX_RANGES as u64 + 4;
    let at = span(0, 2 * pieces * M2);
    for largest in [BLOCK, Level::PAGE] {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
        let prepare = |space: &mut Space<'_, Arm64K4>| {
            for piece in 0..pieces {
                let first = 2 * piece * M2;
                map(space, span(first, M2), first, mapping.largest(largest)).unwrap();
            }
        };
        let change = Change::new().memory(Memory::NonCacheable);
        let (at_once, later) = invalidations::<Arm64K4>(quiet(0), prepare, |gather| {
            let before = leaves(gather).len();
            gather.protect(at, change).unwrap();
            let now = leaves(gather);
            assert_eq!(now.len(), before);
            let changed = |leaf: &Leaf<_>| leaf.attrs().memory == Memory::NonCacheable;
            assert!(now.iter().all(changed));
        });
        assert_eq!((at_once, later), (EVERYTHING.to_vec(), NOTHING));
    }
}

#[test]
fn an_invalidation_says_whether_global_translations_may_be_meant() {
    fn check<F: Judged>(attrs: Attrs, change: Change, expected: bool) {
        let platform = Hosted::new(16, 12).with_caps(quiet(0));
        let mut space = Space::<F>::new(&platform).unwrap();
        map(&mut space, span(0, K4), 0, attrs).unwrap();
        space.make_live();
        platform.record();
        for last in [change, Change::new().perms(Perms::READ)] {
            let _ = protect(&mut space, span(0, K4), last);
        }
        let log = platform.take_log();
        assert!(!log.is_empty());
        // Once a leaf was global, the space stays so.
        let last = log.last().unwrap();
        assert_eq!(last.global, expected, "{}: {attrs:?} {change:?}", F::NAME);
    }
    for (attrs, change, expected) in [
        (Attrs::USER_DATA, Change::new().software(1), false),
        (Attrs::USER_DATA, Change::new().global(true), true),
        (Attrs::KERNEL_DATA, Change::new().software(1), true),
        (Attrs::KERNEL_DATA, Change::new().global(false), true),
    ] {
        check::<X86>(attrs, change, expected);
        check::<Arm64K4>(attrs, change, expected);
    }
    // Of a tree that others have made nothing is known.
    let platform = Hosted::new(16, 12);
    let mut space = adopted::<X86>(&platform, 7, 0x65);
    space.make_live();
    platform.record();
    unmap(&mut space, span(0, K4)).unwrap();
    assert!(platform.take_log()[0].global);
}

#[test]
fn what_no_tlb_holds_is_published_with_the_gather() {
    let old = Attrs {
        accessed: false,
        ..Attrs::USER_DATA
    };
    let accessed = Change::new().accessed(true);
    // Publications with the edits, and with the gather; nothing is invalidated.
    let publications = |caps: Caps, changes: &[Change]| {
        let platform = Hosted::new(16, 12).with_caps(caps);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, M2), 0, Mapping::new(old).pages_only()).unwrap();
        space.make_live();
        let before = platform.counts();
        let mut gather = space.gather();
        for (page, change) in (0..).zip(changes) {
            gather.protect(span(page * K4, K4), *change).unwrap();
        }
        assert!(gather.is_clean());
        let edited = platform.counts();
        gather.finish(|_| ());
        let counts = platform.counts();
        assert_eq!(counts.invalidations, before.invalidations);
        assert_eq!(counts.completions, before.completions);
        (
            edited.publications - before.publications,
            counts.publications - edited.publications,
        )
    };
    assert_eq!(publications(quiet(0), &[accessed]), (0, 1));
    assert_eq!(publications(quiet(0), &[accessed, accessed]), (0, 1));
    // To walkers the software bits mean nothing.
    let software = Change::new().software(1);
    assert_eq!(publications(quiet(0), &[software]), (0, 0));
    assert_eq!(publications(quiet(0), &[]), (0, 0));
}

#[test]
fn a_dead_space_takes_no_barrier_and_no_invalidation() {
    let platform = Hosted::new(700, 12).with_caps(tablewright::hosted::CAPS);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 64 * M2), 0, Attrs::USER_DATA).unwrap();
    protect(
        &mut space,
        span(K4, K4),
        Change::new().memory(Memory::NonCacheable),
    )
    .unwrap();
    protect(
        &mut space,
        span(K4, K4),
        Change::new().memory(Memory::Normal),
    )
    .unwrap();
    collapse(&mut space, span(0, 64 * M2), BLOCK, true);
    unmap(&mut space, span(0, 32 * M2 + K4)).unwrap();
    let counts = platform.counts();
    assert_eq!(
        (
            counts.publications,
            counts.invalidations,
            counts.completions
        ),
        (0, 0, 0)
    );
    // What was written is published once, when it becomes live.
    space.make_live();
    assert_eq!(platform.counts().publications, 1);
}

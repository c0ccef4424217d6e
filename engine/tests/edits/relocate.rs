//! Moves from one range to another, held against a plain model of pages.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use crate::BLOCK;
use crate::common::{Decoded, Dice, judge, snapshot};
use tablewright::{
    Address, AddressSpace, Attrs, Caps, Change, EditError, Format, Level, Mapping, Pa, Perms, Span,
    Stale,
};
use tablewright_hosted::Hosted;

type Space<'h, F> = AddressSpace<F, &'h Hosted>;

fn data<F: Format>() -> Attrs {
    match F::GLOBALS {
        true => Attrs::USER_DATA,
        false => Attrs::GUEST_MEMORY,
    }
}

/// Pages from page `first` on.
fn pages<F: Format>(first: u64, count: u64) -> Span<F::Input> {
    let page = 1u64 << F::PAGE_SHIFT;
    Span::new(F::Input::from_bits(first * page), count * page).unwrap()
}

fn at<F: Format>(page: u64) -> F::Input {
    F::Input::from_bits(page << F::PAGE_SHIFT)
}

/// Pages that a table of pages has.
const fn table<F: Format>() -> u64 {
    1 << F::INDEX_BITS
}

/// Whether there is room for eight tables of pages.
fn has_room<F: Format>() -> bool {
    F::INPUT_BITS > F::shift(Level::new(1)) + 4
}

/// Memory of each page, with its attributes.
type Model = BTreeMap<u64, (u64, Attrs)>;

fn found<F: Decoded>(platform: &Hosted, space: &Space<'_, F>) -> Model {
    let mut model = Model::new();
    let page = 1u64 << F::PAGE_SHIFT;
    for (first, mapped) in judge::<F>(platform, space.root()).0 {
        for number in 0..mapped.size / page {
            let there = (mapped.pa + number * page, mapped.attrs);
            model.insert(first / page + number, there);
        }
    }
    // Parked leaves are seen by no walker.
    space.walk_all(|leaf| {
        for number in 0..leaf.size() / page {
            if leaf.attrs().perms.is_empty() {
                let there = (leaf.frame().get() + number * page, leaf.attrs());
                model.insert(leaf.input().bits() / page + number, there);
            }
        }
    });
    model
}

fn caps(bbm: u8) -> Caps {
    Caps { bbm, invalidate_all_above: 1 << 30, ..tablewright_hosted::CAPS }
}

/// A range and where it goes: pages, blocks, whole tables, and parts of tables whose distance is
/// that of tables.
fn draw<F: Format>(dice: &Dice) -> (u64, u64, u64) {
    let table = table::<F>();
    let grain = [1, 16, table, table][dice.roll(4) as usize];
    let from = dice.roll(6 * table) / grain * grain;
    let count = match dice.roll(3) {
        0 => 1 + dice.roll(4),
        _ => (1 + dice.roll(2 * table)).next_multiple_of(grain),
    };
    let to = match dice.roll(2) {
        0 => dice.roll(6 * table) / grain * grain,
        _ => from % table + dice.roll(6) * table,
    };
    (from, count, to)
}

/// Layouts, ranges and distances at random; refused where the model says so.
fn what_is_moved_is_there_and_nowhere_else<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let (table, page) = (table::<F>(), 1u64 << F::PAGE_SHIFT);
    let (mut moved, mut refused) = (0u64, 0u64);
    // Tables of 64 KiB are sixteen times as large.
    let seeds = if F::PAGE_SHIFT == 16 { 6 } else { 20 };
    for seed in 0..seeds {
        let dice = Dice::new(seed);
        // Some processors hold that nothing is mapped.
        let caches_holes = seed % 3 == 0;
        let caps = Caps { invalid_entries_cached: caches_holes, ..caps(2 * (seed as u8 & 1)) };
        let platform = Hosted::new(160, F::PAGE_SHIFT).with_caps(caps);
        let mut space = Space::<F>::new(&platform).unwrap();
        for _ in 0..1 + dice.roll(6) {
            // Aligned to a table, or not.
            let grain = [1, 16, table][dice.roll(3) as usize];
            let first = dice.roll(6 * table) / grain * grain;
            let count = (1 + dice.roll(2 * table)).next_multiple_of(grain);
            let frame = 8 * table + (first + dice.roll(2) * grain);
            let mapping = Mapping::new(Attrs { software: dice.roll(4) as u8, ..data::<F>() });
            let mapping = match dice.roll(3) {
                0 => mapping.pages_only(),
                1 => mapping.without_runs(),
                _ => mapping.largest(Level::new(1)),
            };
            let _ = space.map(pages::<F>(first, count), Pa::new(frame * page), mapping);
        }
        if dice.roll(3) == 0 {
            let part = pages::<F>(dice.roll(4 * table), 1 + dice.roll(table));
            let _ = space.gather().protect(part, Change::new().perms(Perms::empty()));
        }
        space.make_live();
        for _ in 0..6 {
            let (from, count, to) = draw::<F>(&dice);
            let before = found(&platform, &space);
            let (tables, counts) = (space.count_tables(), platform.counts());
            platform.record();
            let mut gather = space.gather();
            let result = gather.relocate(pages::<F>(from, count), at::<F>(to));
            gather.finish(|_| panic!("seed {seed}: nothing was unmapped"));
            let told = platform.take_log();
            let after = found(&platform, &space);
            let what = format!("{} seed {seed}: {count} pages from {from} to {to}", F::NAME);
            let occupied = before.range(to..to + count).next().map(|(page, _)| *page);
            let expected = match (from.max(to) < from.min(to) + count, occupied) {
                (true, _) => Err(EditError::Overlaps),
                (false, Some(page)) => Err(EditError::AlreadyMapped(at::<F>(page))),
                (false, None) => Ok(()),
            };
            assert_eq!(result, expected, "{what}");
            let mut model = before.clone();
            if result.is_ok() {
                moved += 1;
                for page in from..from + count {
                    if let Some(there) = model.remove(&page) {
                        model.insert(page - from + to, there);
                    }
                }
                // Each old address is invalidated.
                for page in before.range(from..from + count).map(|(page, _)| page) {
                    let (_, attrs) = before[page];
                    let input = at::<F>(*page).bits();
                    let covered = told.iter().any(|told| told.covers(input));
                    assert!(covered || attrs.perms.is_empty(), "{what}: page {page}");
                    let there = at::<F>(page - from + to).bits();
                    let covered = told.iter().any(|told| told.covers(there));
                    assert!(covered || !caches_holes, "{what}: the new address of page {page}");
                }
            } else {
                refused += 1;
                assert_eq!(space.count_tables(), tables, "{what}");
                assert_eq!(platform.counts().invalidations, counts.invalidations, "{what}");
            }
            assert_eq!(after, model, "{what}");
        }
        let _ = space.gather().unmap(pages::<F>(0, 8 * table), |_| ControlFlow::Continue(()));
        // SAFETY: no walker has it.
        unsafe { space.make_dead() };
        let _destroyed = space.destroy(|_| ());
        assert_eq!(platform.counts().tables, 0, "{} seed {seed}", F::NAME);
    }
    // 12 of each in 20 seeds.
    assert!(
        5 * moved > 3 * seeds && 5 * refused > 3 * seeds,
        "{}: {moved} moved, {refused} refused",
        F::NAME
    );
}

/// A range as long as a table that spans two tables moves page by page.
#[test]
fn pages_of_two_tables_are_no_table() {
    type F = tablewright::format::X86_64<4>;
    let platform = Hosted::new(64, 12);
    let mut space = Space::<F>::new(&platform).unwrap();
    let count = table::<F>();
    let mapping = Mapping::new(data::<F>()).pages_only();
    space.map(pages::<F>(0, 2 * count), Pa::new(0), mapping).unwrap();
    for (from, to) in [(1, 8 * count + 1), (8 * count + 1, 16 * count), (16 * count, 1)] {
        let mut gather = space.gather();
        gather.relocate(pages::<F>(from, count), at::<F>(to)).unwrap();
        gather.finish(|_| ());
        let frame = |page| space.query(at::<F>(page)).map(|leaf| leaf.frame().get() >> 12);
        assert_eq!((frame(0), frame(count + 1)), (Some(0), Some(count + 1)));
        assert_eq!((frame(to), frame(to + count - 1)), (Some(1), Some(count)));
        assert_eq!((frame(from), frame(from + count - 1)), (None, None));
    }
}

/// A block that moves by less than its size is split.
#[test]
fn a_block_moves_by_pages_as_pages() {
    type F = tablewright::format::X86_64<4>;
    let count = table::<F>();
    for distance in [1, 3, count / 2, count + 1, 2 * count + 1, 2 * count] {
        let platform = Hosted::new(64, 12);
        let mut space = Space::<F>::new(&platform).unwrap();
        let mapping = Mapping::new(data::<F>()).largest(BLOCK);
        space.map(pages::<F>(0, count), Pa::new(0), mapping).unwrap();
        let to = 8 * count + distance;
        let mut gather = space.gather();
        gather.relocate(pages::<F>(0, count), at::<F>(to)).unwrap();
        gather.finish(|_| ());
        let mut expected = crate::common::Model::default();
        expected.map(to << 12, count << 12, 0, data::<F>());
        let found = judge::<F>(&platform, space.root());
        assert_eq!(found, expected.stretches(), "{distance}");
        let is_block = space.query(at::<F>(to)).unwrap().level() == BLOCK;
        assert_eq!(is_block, distance % count == 0);
    }
}

/// A block is split no further than it has to be.
#[test]
fn a_block_moves_in_the_largest_parts_that_fit() {
    type F = tablewright::format::X86_64<4>;
    let count = table::<F>();
    let (block, giant) = (BLOCK, Level::new(2));
    for (distance, level) in [(1, Level::PAGE), (count, block), (count * count, giant)] {
        let platform = Hosted::new(1100, 12);
        let mut space = Space::<F>::new(&platform).unwrap();
        let all = pages::<F>(0, count * count);
        space.map(all, Pa::new(0), Mapping::new(data::<F>()).largest(giant)).unwrap();
        let to = 2 * count * count + distance;
        let mut gather = space.gather();
        gather.relocate(all, at::<F>(to)).unwrap();
        gather.finish(|_| ());
        assert_eq!(space.query(at::<F>(to)).unwrap().level(), level);
    }
}

/// A run moves as one to where another can be, and as pages to anywhere else.
#[test]
fn a_run_moves_as_a_run_or_as_pages() {
    type F = tablewright::format::Arm64K4;
    let count = table::<F>();
    for distance in [1, 8, 16, 48, 2 * count, 2 * count + 8] {
        // Pages behind it, so that it is no table that moves.
        let platform = Hosted::new(64, 12);
        let mut space = Space::<F>::new(&platform).unwrap();
        space.map(pages::<F>(0, 19), Pa::new(0), data::<F>()).unwrap();
        space.make_live();
        let to = count + distance;
        let mut gather = space.gather();
        gather.relocate(pages::<F>(0, 18), at::<F>(to)).unwrap();
        gather.finish(|_| ());
        let model = found(&platform, &space);
        let there = |page: u64| model.get(&page).map(|it| it.0 >> 12);
        assert_eq!((there(to), there(to + 17)), (Some(0), Some(17)));
        assert_eq!((there(0), there(17), there(18)), (None, None, Some(18)));
        let run = space.query(at::<F>(to)).unwrap().is_contiguous();
        assert_eq!(run, distance % 16 == 0, "{distance}");
    }
}

/// Pages that the gather has unmapped at the destination are forgotten first.
#[test]
fn a_move_waits_for_what_was_unmapped_there() {
    type F = tablewright::format::Arm64K4;
    let count = table::<F>();
    let platform = Hosted::new(64, 12).with_caps(caps(0));
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).pages_only();
    space.map(pages::<F>(0, 2 * count), Pa::new(0), mapping).unwrap();
    space.make_live();
    let mut gather = space.gather();
    let gone = gather.unmap(pages::<F>(count + 8, 8), |_| ControlFlow::Continue(()));
    assert!(gone.unwrap().is_done());
    assert_eq!(platform.counts().completions, 0);
    gather.relocate(pages::<F>(8, 8), at::<F>(count + 8)).unwrap();
    assert_eq!(platform.counts().completions, 1);
}

/// Two of them, which takes a walk.
#[test]
fn whole_tables_move_as_they_are() {
    type F = tablewright::format::X86_64<4>;
    let count = table::<F>();
    let platform = Hosted::new(64, 12);
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).pages_only();
    space.map(pages::<F>(0, 2 * count), Pa::new(0), mapping).unwrap();
    platform.limit_allocations(Some(0));
    let mut gather = space.gather();
    gather.relocate(pages::<F>(0, 2 * count), at::<F>(8 * count)).unwrap();
    gather.finish(|_| ());
    assert_eq!(found(&platform, &space).len() as u64, 2 * count);
    assert_eq!(space.query(at::<F>(10 * count - 1)).unwrap().frame().get() >> 12, 2 * count - 1);
}

#[test]
fn a_move_that_is_forgotten_is_owed() {
    type F = tablewright::format::X86_64<4>;
    let platform = Hosted::new(64, 12);
    let mut space = Space::<F>::new(&platform).unwrap();
    space.map(pages::<F>(0, 3), Pa::new(0), data::<F>()).unwrap();
    space.make_live();
    let mut gather = space.gather();
    gather.relocate(pages::<F>(0, 3), at::<F>(1 << 20)).unwrap();
    std::mem::forget(gather);
    platform.record();
    space.gather().finish(|_| ());
    assert!(platform.take_log().iter().any(|told| told.everything));
}

#[test]
fn a_move_that_the_root_does_not_translate_is_refused() {
    type F = tablewright::format::X86_64<4>;
    let platform = Hosted::new(64, 12);
    let mut space = Space::<F>::new(&platform).unwrap();
    space.map(pages::<F>(0, 2), Pa::new(0), data::<F>()).unwrap();
    let mut gather = space.gather();
    let last = u64::MAX - 0xfff;
    for (to, expected) in [
        (last, EditError::InputOutOfRange),
        (last + 0x800, EditError::Misaligned),
        (0x4800, EditError::Misaligned),
    ] {
        let to = Address::from_bits(to);
        assert_eq!(gather.relocate(pages::<F>(0, 2), to), Err(expected));
    }
}

/// The root of a format with one level is a table of pages.
#[test]
fn a_page_moves_within_the_only_table() {
    type F = tablewright::format::Arm64<16, 28>;
    const { assert!(F::LEVELS == 1) };
    let platform = Hosted::new(8, 16);
    let mut space = Space::<F>::new(&platform).unwrap();
    space.map(pages::<F>(3, 1), Pa::new(7 << 16), data::<F>()).unwrap();
    let mut gather = space.gather();
    gather.relocate(pages::<F>(3, 1), at::<F>(9)).unwrap();
    gather.finish(|_| ());
    assert!(space.query(at::<F>(3)).is_none());
    assert_eq!(space.query(at::<F>(9)).unwrap().frame(), Pa::new(7 << 16));
}

/// Tables that deny a permission stay where they are, and entries of a root that many share.
#[test]
fn what_a_table_denies_is_not_moved_past_it() {
    use tablewright::{KernelHalf, Va, format::X86_64};
    type F = X86_64<4>;
    let platform = Hosted::new(600, 12);
    let block = 2 << 20;
    let at = |number: u64, size| Span::new(Va::new(number * block), size).unwrap();
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
    space.map(at(0, 0x4000), Pa::new(0x4000), mapping.tables_deny_execution()).unwrap();
    // Below another entry of the root.
    let other = 1 << 18;
    space.map(at(other, 0x1000), Pa::new(0x1000), mapping).unwrap();
    space.make_live();
    for (from, size, to) in
        [(0, 0x1000, other + 1), (0, 0x2000, other + 1), (other, 0x1000, 1), (other, block, 1)]
    {
        let refused = space.gather().relocate(at(from, size), at(to, 0x1000).start());
        assert!(matches!(refused, Err(EditError::Denied(_))), "{from} to {to}: {refused:?}");
    }
    // Beside tables that deny something are others that do not.
    let mut gather = space.gather();
    gather.map(at(other + 4, 2 * block), Pa::new(0), mapping).unwrap();
    gather.relocate(at(other + 4, 2 * block), at(other + 8, block).start()).unwrap();
    gather.relocate(at(other + 8, 0x3000), at(other + 4, block).start()).unwrap();
    gather.finish(|_| ());
    // One page, between tables that exist.
    let beside = Va::new(other * block + 0x5000);
    let refused = space.gather().relocate(at(0, 0x1000), beside);
    assert!(matches!(refused, Err(EditError::Denied(_))), "{refused:?}");

    let half = AddressSpace::<F, _>::new(&platform).unwrap();
    let mut half = KernelHalf::new(half).map_err(|(refused, _)| refused).unwrap();
    let (first, size) = (0xffff_8000_0000_0000, 1 << 39);
    let at = |number: u64, size| Span::new(Va::new(first + (number << 39)), size).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(Level::new(1));
    let mut gather = half.gather();
    gather.map(at(1, block), Pa::new(block), mapping).unwrap();
    gather.relocate(at(1, size), at(2, size).start()).unwrap();
    gather.finish(|_| ());
    // Each entry of the root has the table that it had.
    for index in 256..512 {
        assert_ne!(platform.read(half.root(), index), Some(0));
    }
    assert_eq!(half.query(at(2, size).start()).unwrap().frame(), Pa::new(block));
    assert!(half.query(at(1, size).start()).is_none());
}

/// A single page between two tables that exist, where processors hold that nothing is mapped.
fn the_new_address_of_a_page_is_invalidated_where_holes_are_held<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let caps = Caps { invalid_entries_cached: true, ..caps(0) };
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps);
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).pages_only();
    space.map(pages::<F>(0, 3), Pa::new(8 << F::PAGE_SHIFT), mapping).unwrap();
    space.make_live();
    platform.record();
    let mut gather = space.gather();
    gather.relocate(pages::<F>(1, 1), at::<F>(5)).unwrap();
    gather.finish(|_| panic!("nothing was unmapped"));
    let told = platform.take_log();
    for page in [1, 5] {
        assert!(told.iter().any(|told| told.covers(at::<F>(page).bits())), "{}", F::NAME);
    }
}

/// No leaf below is looked at: the table is linked elsewhere, and one range is invalidated.
fn a_whole_table_is_moved_by_two_stores<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let table = table::<F>();
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(0));
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).pages_only();
    let frame = Pa::new(8 << F::shift(Level::new(1)));
    space.map(pages::<F>(table, table), frame, mapping).unwrap();
    space.make_live();
    let tables = space.count_tables();
    platform.record();
    let mut gather = space.gather();
    gather.relocate(pages::<F>(table, table), at::<F>(4 * table)).unwrap();
    gather.finish(|_| panic!("nothing was unmapped"));
    let told = platform.take_log();
    let [one] = &told[..] else { panic!("{}: {told:?}", F::NAME) };
    let first = at::<F>(table).bits();
    let last = at::<F>(2 * table).bits() - 1;
    let stale = Stale { first, last, level: None, tables: true };
    assert_eq!(one.spans(), [(stale.first, stale.last)]);
    assert_eq!(space.count_tables(), tables);
    assert_eq!(space.query(at::<F>(4 * table)).unwrap().frame(), frame);
}

/// Nothing is mapped otherwise, whichever allocation fails.
fn without_memory_for_tables_nothing_has_moved<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let table = table::<F>();
    let mut needed = 0;
    for allowed in 0..8 {
        let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(2));
        let mut space = Space::<F>::new(&platform).unwrap();
        let mapping = Mapping::new(data::<F>()).largest(Level::new(1)).without_runs();
        let frame = Pa::new(8 << F::shift(Level::new(1)));
        space.map(pages::<F>(table, 2 * table), frame, mapping).unwrap();
        space.make_live();
        let before = found(&platform, &space);
        platform.limit_allocations(Some(allowed));
        // Neither end nor the distance is aligned to a block.
        let from = pages::<F>(table + 3, table + 5);
        let result = space.gather().relocate(from, at::<F>(5 * table + 1));
        match result {
            Ok(()) => break,
            Err(error) => {
                needed += 1;
                assert_eq!(error, EditError::OutOfTables);
                assert_eq!(found(&platform, &space), before, "{} {allowed}", F::NAME);
            }
        }
    }
    assert!((2..8).contains(&needed), "{}: {needed}", F::NAME);
}

/// Nothing that is mapped where the table was is seen through it: on arm64 that is broken first.
fn the_old_addresses_are_free_at_once<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let table = table::<F>();
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(0));
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).pages_only();
    let block = F::shift(Level::new(1));
    space.map(pages::<F>(0, table), Pa::new(8 << block), mapping).unwrap();
    space.make_live();
    let mut gather = space.gather();
    gather.relocate(pages::<F>(0, table), at::<F>(2 * table)).unwrap();
    let completions = platform.counts().completions;
    gather.map(pages::<F>(0, 1), Pa::new(9 << block), mapping).unwrap();
    let waited = platform.counts().completions - completions;
    assert_eq!(waited == 1, F::RULE == tablewright::bbm::Rule::ARM, "{}", F::NAME);
    // And it can be moved back to another place.
    gather.relocate(pages::<F>(2 * table, 1), at::<F>(1)).unwrap();
    gather.finish(|_| panic!("nothing was unmapped"));
    let frame = |page| space.query(at::<F>(page)).map(|leaf| leaf.frame());
    assert_eq!(frame(0), Some(Pa::new(9 << block)));
    assert_eq!(frame(1), Some(Pa::new(8 << block)));
    assert_eq!(frame(2 * table), None);
    let _ = snapshot::<F>(&platform, space.root());
}

/// The destination is broken first if it was unmapped, and an empty table in the place of a block.
fn the_new_addresses_are_broken_first<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    let (table, block) = (table::<F>(), F::shift(Level::new(1)));
    let is_arm = u64::from(F::RULE == tablewright::bbm::Rule::ARM);
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(0));
    let mut space = Space::<F>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<F>()).largest(Level::new(1)).without_runs();
    for (first, count) in [(0, 4), (table, 2), (2 * table, table), (4 * table, 1)] {
        let frame = Pa::new((8 << block) + (first << F::PAGE_SHIFT));
        space.map(pages::<F>(first, count), frame, mapping).unwrap();
    }
    space.make_live();
    let mut gather = space.gather();
    let unmap = |gather: &mut tablewright::Gather<'_, F, &Hosted>, first, count| {
        let done = gather.unmap(pages::<F>(first, count), |_| ControlFlow::Continue(()));
        assert!(done.unwrap().is_done());
    };
    let waited = || platform.counts().completions;
    // One page to where one was; then several.
    unmap(&mut gather, 0, 1);
    let before = waited();
    gather.relocate(pages::<F>(table, 1), at::<F>(0)).unwrap();
    assert_eq!(waited() - before, is_arm, "{}", F::NAME);
    unmap(&mut gather, 2, 2);
    let before = waited();
    gather.relocate(pages::<F>(table, 2), at::<F>(2)).unwrap();
    assert_eq!(waited() - before, is_arm, "{}", F::NAME);
    // A block to where an empty table stands.
    unmap(&mut gather, 4 * table, 1);
    let before = waited();
    gather.relocate(pages::<F>(2 * table, table), at::<F>(4 * table)).unwrap();
    let waits = waited() - before;
    assert!(waits >= is_arm && (is_arm == 1 || waits == 0), "{}: {waits}", F::NAME);
    gather.finish(|_| ());
    let found = space.query(at::<F>(4 * table)).map(|leaf| leaf.size());
    assert_eq!(found, Some(1 << block), "{}", F::NAME);
    // To where one has stood since before.
    space.map(pages::<F>(2 * table, 1), Pa::new(0), mapping).unwrap();
    let mut gather = space.gather();
    unmap(&mut gather, 2 * table, 1);
    gather.finish(|_| ());
    let before = waited();
    gather = space.gather();
    gather.relocate(pages::<F>(4 * table, table), at::<F>(2 * table)).unwrap();
    assert_eq!(waited() - before, is_arm, "{}", F::NAME);
}

for_each_format!(
    what_is_moved_is_there_and_nowhere_else,
    a_whole_table_is_moved_by_two_stores,
    without_memory_for_tables_nothing_has_moved,
    the_old_addresses_are_free_at_once,
    the_new_addresses_are_broken_first,
    the_new_address_of_a_page_is_invalidated_where_holes_are_held,
);
for_each_guest_format!(
    what_is_moved_is_there_and_nowhere_else,
    a_whole_table_is_moved_by_two_stores,
    without_memory_for_tables_nothing_has_moved,
    the_old_addresses_are_free_at_once,
    the_new_addresses_are_broken_first,
    the_new_address_of_a_page_is_invalidated_where_holes_are_held,
);

//! Mappings to runs of frames, one after the other.

use super::*;
use crate::common::{Decoded, Dice, Mapped, Model, is_guest};
use tablewright::{Address, Format};

fn frames(runs: &[(u64, u64)]) -> Vec<Span<Pa>> {
    runs.iter().map(|&(start, size)| Span::new(Pa::new(start), size).unwrap()).collect()
}

fn data<F: Format>() -> Attrs {
    match is_guest::<F>() {
        true => Attrs::GUEST_MEMORY,
        false => Attrs::KERNEL_DATA,
    }
}

/// Runs that continue the last one, or do not; whole leaves and less; nothing in a leaf that is not
/// of its own run.
fn every_page_has_its_frame<F: Decoded>() {
    let page = 1 << F::PAGE_SHIFT;
    let table = 1u64 << F::shift(BLOCK);
    let contiguous = page << F::contiguous(Level::PAGE);
    let memory = if F::OUTPUT_BITS > 40 { 1 << 40 } else { 1 << 36 };
    let input_end = 1u128 << (F::INPUT_BITS - u32::from(F::HALVES));
    for seed in 0..if cfg!(miri) { 1 } else { 12 } {
        let dice = Dice::new(seed);
        let mut next = memory;
        let (mut runs, mut size) = (Vec::new(), 0);
        for _ in 0..2 + dice.roll(6) {
            let unit = [page, contiguous, table / 2, table][dice.roll(4) as usize];
            let length = unit * (1 + dice.roll(3));
            let align = [page, contiguous, table][dice.roll(3) as usize];
            next = (next + dice.roll(2) * page).next_multiple_of(align);
            runs.push((next, length));
            (next, size) = (next + length, size + length);
        }
        let first = [0, page, table - contiguous][dice.roll(3) as usize];
        if u128::from(first + size) > input_end {
            continue;
        }
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        let mapping = match dice.roll(3) {
            0 => Mapping::new(data::<F>()),
            1 => Mapping::new(data::<F>()).without_runs(),
            _ => Mapping::new(data::<F>()).pages_only(),
        };
        let spans = frames(&runs);
        let mut model = Model::default();
        // Tables that are there are filled, others built.
        let beside = |at: u64| Span::new(F::Input::from_bits(at), page).unwrap();
        if dice.roll(2) == 0 && first > 0 && u128::from(first + size) < input_end {
            for at in [first - page, first + size] {
                space.map(beside(at), Pa::new(0), data::<F>()).unwrap();
                model.map(at, page, 0, data::<F>());
            }
        }
        let mut gather = space.gather();
        assert_eq!(gather.map_frames(F::Input::from_bits(first), &spans, mapping), Ok(size));
        gather.finish(|_| ());

        let mut at = first;
        for &(start, length) in &runs {
            model.map(at, length, start, data::<F>());
            at += length;
        }
        assert_eq!(judge::<F>(&platform, space.root()), model.stretches(), "{}, {seed}", F::NAME);
        // A leaf, or a run of leaves, is of one run of frames: hardware takes it for that.
        space.walk_all(|leaf| {
            let part = |&(at, of): &(u64, Mapped)| {
                at <= leaf.input().bits() && leaf.input().bits() < at + of.size
            };
            let stretches = model.stretches();
            let (at, of) = stretches.0.iter().find(|it| part(it)).unwrap();
            assert!(leaf.input().bits() + leaf.size() <= at + of.size, "{}: {leaf:?}", F::NAME);
        });
    }
}

for_each_format!(every_page_has_its_frame);
for_each_guest_format!(every_page_has_its_frame);

/// No block reaches beyond its run of frames, in a new table or in an existing one.
#[test]
fn blocks_end_with_their_run_of_frames() {
    for there in [false, true] {
        let platform = Hosted::new(64, 12);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        if there {
            map(&mut space, span(100 * M2, M2), 0, Attrs::KERNEL_DATA).unwrap();
        }
        // Of the second run no block can be made.
        let runs = frames(&[(4 * M2, 2 * M2), (7 * M2 + K4, 2 * M2)]);
        let mut gather = space.gather();
        gather.map_frames(Va::new(0), &runs, Attrs::KERNEL_DATA).unwrap();
        gather.finish(|_| ());
        for (at, frame) in [(M2, 5 * M2), (2 * M2, 7 * M2 + K4), (4 * M2 - K4, 9 * M2)] {
            let leaf = space.query(Va::new(at)).unwrap();
            let found = leaf.frame().get() + (at - leaf.input().get());
            assert_eq!(found, frame, "{at:#x}, {there}: {leaf:?}");
        }
    }
}

#[test]
fn a_run_of_leaves_is_within_one_run_of_frames() {
    // Aligned to each other, but not one behind the other; a run of leaves in whole, and in halves.
    let cases = [
        (&[(16, 16), (64, 16)][..], 32),
        (&[(16, 8), (40, 24)], 16),
        (&[(16, 8), (40, 8)], 0),
        (&[(17, 16)], 0),
        (&[(17, 32)], 0),
    ];
    for (unit, there) in [(K4, false), (K4, true), (M2, false), (M2, true)] {
        for (runs, members) in cases {
            let platform = Hosted::new(64, 12);
            let mut space = Space::<Arm64K4>::new(&platform).unwrap();
            if there {
                // The tables are, already.
                map(&mut space, span(unit * 100, unit), 0, Attrs::KERNEL_DATA).unwrap();
            }
            let runs: Vec<_> = runs.iter().map(|&(at, count)| (at * unit, count * unit)).collect();
            let mut gather = space.gather();
            gather.map_frames(Va::new(0), &frames(&runs), Attrs::KERNEL_DATA).unwrap();
            gather.finish(|_| ());
            let mut found = 0;
            space.walk_all(|leaf| found += u64::from(leaf.is_contiguous()) * (leaf.size() / unit));
            assert_eq!(found, members, "{runs:x?}");
        }
    }
}

#[test]
fn runs_of_frames_that_cannot_be_mapped_are_refused() {
    fn refused_as<F: Judged>(first: u64, runs: &[(u64, u64)], expected: EditError<Va>) {
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let mut space = Space::<F>::new(&platform).unwrap();
        let last = span((1 << F::shift(BLOCK)) * 3, 1 << F::PAGE_SHIFT);
        map(&mut space, last, 0, Attrs::KERNEL_DATA).unwrap();
        space.make_live();
        let runs = frames(runs);
        refused(&mut space, expected, |gather| {
            gather.map_frames(Va::new(first), &runs, Attrs::KERNEL_DATA)
        });
    }
    let end = 1 << 48;
    refused_as::<Arm64K16>(0, &[(0, 4 * K4), (K4, 4 * K4)], EditError::Misaligned);
    refused_as::<Arm64K16>(0, &[(0, 4 * K4), (4 * K4, K4)], EditError::Misaligned);
    refused_as::<Arm64K16>(K4, &[(0, 4 * K4)], EditError::Misaligned);
    refused_as::<Arm64K4>(K4, &[(0, K4), (end, K4)], EditError::OutputOutOfRange);
    refused_as::<Arm64K4>(K4, &[(0, K4), (end - K4, 2 * K4)], EditError::OutputOutOfRange);
    refused_as::<X86>((1 << 47) - K4, &[(0, K4), (K4, K4)], EditError::InputOutOfRange);
    refused_as::<X86>(u64::MAX - (K4 - 1), &[(0, K4), (K4, K4)], EditError::InputOutOfRange);
    let taken = EditError::AlreadyMapped(Va::new(3 * M2));
    refused_as::<X86>(2 * M2, &[(0, M2), (16 * M2, M2)], taken);

    let platform = Hosted::new(16, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let mut gather = space.gather();
    assert_eq!(gather.map_frames(Va::new(0), &[], Attrs::KERNEL_DATA), Ok(0));
    // Memory of which the sizes together are too much to count.
    let all = frames(&[(0, 1 << 47)]).repeat(1 << 17);
    let too_much = gather.map_frames(Va::new(0), &all, Attrs::KERNEL_DATA);
    assert_eq!(too_much, Err(EditError::InputOutOfRange));
}

/// An undo gives back what was made of the first runs, when there are no tables for the last.
#[test]
fn without_memory_for_tables_no_run_is_mapped() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(G1, K4), 0, Attrs::KERNEL_DATA).unwrap();
    let runs = frames(&[(64 * M2, K4), (M2, M2), (8 * M2, M2), (3 * M2 + K4, M2)]);
    for few in 0.. {
        platform.limit_allocations(Some(few));
        let before = (snapshot::<X86>(&platform, space.root()), platform.counts().tables);
        let mut gather = space.gather();
        let result = gather.map_frames(Va::new(G1 - 2 * M2), &runs, Attrs::KERNEL_DATA);
        gather.finish(|_| ());
        match result {
            Ok(_) => unreachable!("a page is mapped there"),
            Err(EditError::AlreadyMapped(at)) => assert_eq!(at, Va::new(G1)),
            Err(error) => assert_eq!(error, EditError::OutOfTables),
        }
        before.0.assert_untouched(&snapshot::<X86>(&platform, space.root()));
        assert_eq!(platform.counts().tables, before.1);
        if few > 4 {
            break;
        }
    }
    unmap(&mut space, span(G1, K4)).unwrap();
    let mut refusals = 0;
    for few in 0.. {
        platform.limit_allocations(Some(few));
        let tables = platform.counts().tables;
        let mut gather = space.gather();
        let result = gather.map_frames(Va::new(G1 - 2 * M2), &runs, Attrs::KERNEL_DATA);
        gather.finish(|_| ());
        if result.is_ok() {
            break;
        }
        refusals += 1;
        assert_eq!(result, Err(EditError::OutOfTables));
        assert_eq!(leaves(&space), []);
        assert_eq!(platform.counts().tables, tables);
    }
    assert!(refusals > 2);
    let at = |at: u64| space.query(Va::new(at)).unwrap().frame().get();
    let first = G1 - 2 * M2;
    assert_eq!((at(first), at(first + K4), at(first + K4 + M2)), (64 * M2, M2, 8 * M2));
    assert_eq!(at(first + K4 + 2 * M2), 3 * M2 + K4);
}

/// Blocks that are linked one by one, in a table that is there, and may be in no run.
#[test]
fn blocks_are_in_no_run_that_is_not_allowed() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(M2 * 40, K4), 0, Attrs::KERNEL_DATA).unwrap();
    // From a table of pages into the run of blocks behind it.
    let blocks = Mapping::new(Attrs::KERNEL_DATA).without_runs();
    map(&mut space, span(M2 * 16 - K4, M2 * 16 + K4), M2 * 16 - K4, blocks).unwrap();
    assert_eq!(leaves(&space).len(), 18);
    assert!(leaves(&space).iter().all(|leaf| !leaf.is_contiguous()));
}

/// The first half of a run is not mapped, in a table that is there.
#[test]
fn a_run_is_not_begun_before_its_mapping_is() {
    for unit in [K4, M2] {
        let platform = Hosted::new(64, 12);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(unit * 100, unit), 0, Attrs::KERNEL_DATA).unwrap();
        let part = span(unit * 8, unit * 16);
        map(&mut space, part, unit * 8, Attrs::KERNEL_DATA).unwrap();
        assert!(leaves(&space).iter().all(|leaf| !leaf.is_contiguous()), "{unit:x}");
        assert_eq!(judge::<Arm64K4>(&platform, space.root()).0.len(), 2);
    }
}

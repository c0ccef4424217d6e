//! Tables that become leaves, and leaves that become runs.

use super::*;

fn a_table_is_replaced_only_by_a_leaf_that_translates_the_same<F: Judged>() {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(BLOCK));
    let entries = block / page;
    let whole = span(0, block);
    let attempt = |frame: u64, spoil: &dyn Fn(&mut Space<'_, F>), expected: u64| {
        for liveness in [Liveness::Dead, Liveness::Live] {
            let platform = Hosted::new(16, F::PAGE_SHIFT).with_caps(without_flags(0));
            let mut space = pages_of_a_block::<F>(&platform, frame, Attrs::KERNEL_DATA);
            spoil(&mut space);
            common::used(&mut space, liveness);
            let before = judge::<F>(&platform, space.root());
            assert_eq!(collapse(&mut space, whole, BLOCK, false), expected, "{}", F::NAME);
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
    let untouched = Attrs { accessed: false, dirty: false, ..Attrs::USER_DATA };
    for liveness in [Liveness::Dead, Liveness::Live] {
        for at in [0, 1, block / page / 2, block / page - 1] {
            for (accessed, dirty) in [(false, false), (true, false), (false, true), (true, true)] {
                let platform = Hosted::new(16, F::PAGE_SHIFT).with_caps(without_flags(0));
                let mut space = pages_of_a_block::<F>(&platform, block, untouched);
                let change = Change::new().accessed(accessed).dirty(dirty);
                protect(&mut space, span(at * page, page), change).unwrap();
                common::used(&mut space, liveness);
                assert_eq!(collapse(&mut space, span(0, block), BLOCK, false), 1);
                let attrs = space.query(Va::new(0)).unwrap().attrs();
                assert_eq!((attrs.accessed, attrs.dirty), (accessed, dirty), "{}", F::NAME);
            }
        }
    }
}

for_each_format!(
    a_table_is_replaced_only_by_a_leaf_that_translates_the_same,
    a_large_leaf_is_accessed_and_dirty_if_one_small_one_was,
    empty_tables_go_up_to_the_root
);

/// A run of pages from 0 in which hardware has set flags in one member.
fn run_touched_in(
    platform: &Hosted,
    member: usize,
    accessed: bool,
    dirty: bool,
) -> Space<'_, Arm64K4> {
    let untouched = Attrs { accessed: false, dirty: false, ..Attrs::USER_DATA };
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
                let platform = Hosted::new(16, 12).with_caps(without_flags(0));
                let mut space = run_touched_in(&platform, member, accessed, dirty);

                let expected = Attrs { accessed, dirty, ..Attrs::USER_DATA };
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
                // Detached by itself, and with its table.
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
                let platform = Hosted::new(16, 12).with_caps(without_flags(bbm));
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
    let untouched = Attrs { accessed: false, dirty: false, ..Attrs::USER_DATA };
    for liveness in [Liveness::Dead, Liveness::Live] {
        for (bbm, largest) in [(0, BLOCK), (0, Level::PAGE), (1, Level::PAGE), (2, Level::PAGE)] {
            let platform = Hosted::new(32, 12).with_caps(without_flags(bbm));
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
    for caps in [without_flags(0), without_flags(2)] {
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
        let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(level).without_runs();
        type Edit = fn(&mut Space<'_, Arm64K4>, u64);
        let attempt = |at: Span<Va>, frame: u64, spoil: Edit, expected: u64| {
            for liveness in [Liveness::Dead, Liveness::Live] {
                let platform = Hosted::new(64, 12).with_caps(without_flags(0));
                let mut space = Space::<Arm64K4>::new(&platform).unwrap();
                map(&mut space, span(0, 2 * run), frame, mapping).unwrap();
                spoil(&mut space, size);
                common::used(&mut space, liveness);
                assert_eq!(collapse(&mut space, at, level, true), expected, "{at} at {level:?}");
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
            let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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

/// [`Gather::collapse`] returns how many tables it replaced or freed and how many runs it folded,
/// together.
#[test]
fn a_collapse_returns_what_it_did_with_breaks_and_without() {
    for liveness in [Liveness::Dead, Liveness::Live] {
        for bbm in 0..3 {
            let platform = Hosted::new(64, 12).with_caps(without_flags(bbm));
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
        // A range that does not hold a whole table frees none; each larger one frees one more
        // level.
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
    assert_eq!(collapse(&mut space, all, Level::PAGE, false), u64::from(F::LEVELS - 1));
    assert_eq!((platform.counts().tables, platform.counts().bad_frees), (1, 0));
}

#[test]
fn pages_become_blocks_become_larger_blocks_in_one_call() {
    fn check<F: Judged>(bbm: u8, completions: u64) {
        let platform = Hosted::new(600, 12).with_caps(without_flags(bbm));
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
        let root = empty_table::<F>(&platform, F::root_level());
        let tables: Vec<Pa> = (0..3).map(|_| empty_table::<F>(&platform, Level::PAGE)).collect();
        for (above, below) in [(root, tables[0]), (tables[0], tables[1])] {
            poke(&platform, above, 0, F::table(below, Perms::empty()));
        }
        poke(&platform, tables[1], 0, table | tables[2].get());
        for index in 0..512 {
            poke(&platform, tables[2], index, leaf | 0x4000_0000 | (index as u64) << 12);
        }
        // SAFETY: the tables above are a tree of this format, made on this platform, without
        // another editor.
        let mut space =
            unsafe { AddressSpace::<F, _>::adopt(&platform, root, Half::Lower, Liveness::Dead) }
                .unwrap();
        let before = judge::<F>(&platform, root);
        assert_eq!(before.0[0].1.attrs.perms, expected);
        assert_eq!(space.query(Va::new(0)).unwrap().attrs().perms, expected, "{}", F::NAME);
        assert!(leaves(&space).iter().all(|leaf| leaf.attrs().perms == expected));
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

/// Leaves that walkers may be writing become one that is taken for written, in place, and so does a
/// run in pieces.
#[test]
fn what_may_be_written_meanwhile_is_taken_for_written() {
    fn check<F: Judged>(bbm: u8, split: bool) {
        let caps = Caps { hardware_access: true, hardware_dirty: true, ..without_flags(bbm) };
        let platform = Hosted::new(64, 12).with_caps(caps);
        let mut space = Space::<F>::new(&platform).unwrap();
        let clean = Mapping::new(Attrs { dirty: false, ..Attrs::KERNEL_DATA });
        let (size, mapping) = match split {
            true => (16 * K4, clean),
            false => (M2, clean.pages_only()),
        };
        map(&mut space, span(0, size), 0, mapping).unwrap();
        space.make_live();
        let mut gather = space.gather();
        match split {
            true => gather.split(span(0, size), Level::PAGE).unwrap(),
            false => assert_eq!(gather.collapse(span(0, size), BLOCK, false), Ok(1)),
        }
        gather.finish(|_| ());
        let all = leaves(&space);
        assert_eq!(all.len(), if split { 16 } else { 1 });
        assert!(all.iter().all(|leaf| leaf.attrs().dirty && !leaf.is_contiguous()), "{all:?}");
    }
    check::<X86>(0, false);
    check::<Arm64K4>(2, false);
    check::<Arm64K4>(2, true);
}

/// A format without runs has none to fold.
#[test]
fn a_collapse_counts_what_it_has_done() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, 16 * M2), 0, Attrs::KERNEL_DATA).unwrap();
    assert_eq!(space.gather().collapse(span(0, 16 * M2), BLOCK, true), Ok(0));
}

//! Mapping and protecting, and tables that deny.

use super::*;

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
        let blocks: Vec<_> =
            leaves(&space).into_iter().filter(|leaf| leaf.level() == BLOCK).collect();
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
    map(&mut space, span(5 * M2, 27 * M2), 5 * M2, Attrs::KERNEL_DATA).unwrap();
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
        leaves(&space).iter().map(|leaf| (leaf.size(), leaf.is_contiguous())).collect()
    }
    let mapping = Mapping::new(Attrs::KERNEL_DATA);
    // A run of blocks, a run of pages.
    let (blocks, pages) = ((16 * M2, true), (16 * K4, true));
    assert_eq!(sizes(mapping, 0), [(G1, false), blocks].into());
    assert_eq!(sizes(mapping.without_runs(), 0), [(G1, false), (M2, false)].into());
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
    refused(&mut space, missing, |gather| gather.map(span(G1 + M2, K4), Pa::new(0), mapping));
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
        assert_eq!(map(&mut space, at, 0, Attrs::KERNEL_DATA), expected, "map {what}");
        assert_eq!(protect(&mut space, at, change), expected, "protect {what}");
        assert_eq!(space.query(at.start()).is_some(), expected.is_ok(), "query {what}");
        assert_eq!(space.query(at.last()).is_some(), expected.is_ok(), "query {what}");
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
    for (at, frame) in [(span(K4, granule), 0), (span(0, granule + K4), 0), (span(0, granule), K4)]
    {
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
        map(&mut space, span(0, 2 * page), end - 2 * page, Attrs::KERNEL_DATA).unwrap();
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
        for (before, size) in [(3 * page, 8 * page), (block, 3 * block), (block + page, 3 * block)]
        {
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
                assert_eq!((found[0].1.pa, found[0].1.size), (frame, size), "{}", F::NAME);
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

#[test]
fn a_plan_for_a_block_is_none_for_a_page_that_looks_alike() {
    // x86-64: bit 7 is PS in the block and PAT in the page, so that a device block and a
    // write-through page have the same low bits and mean different things by them.
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

        // Page by page, after the block, in use.
        space.make_live();
        let mut gather = space.gather();
        let back = Change::new().memory(Memory::WriteThrough);
        gather.protect(span(pages, M2), back).unwrap();
        gather.protect(span(block, M2), Change::new().memory(Memory::Device)).unwrap();
        gather.protect(span(block, M2), change).unwrap();
        gather.protect_page(Va::new(pages), change).unwrap();
        gather.finish(|_| ());
        let found = translate::<X86>(&platform, space.root(), pages);
        let expected = Attrs::KERNEL_DATA.with_memory(Memory::NonCacheable);
        assert_eq!(found, Some((16 * M2, expected)), "block first: {block_first}");
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
        before.assert_untouched(&snapshot::<X86>(&platform, space.root()));
    }
}

#[test]
fn what_is_not_named_by_a_change_stays() {
    fn check<F: Judged>() {
        let platform = Hosted::new(16, F::PAGE_SHIFT);
        let mut space = Space::<F>::new(&platform).unwrap();
        let first = F::NATIVE & F::NATIVE.wrapping_neg();
        let last = 1 << F::NATIVE.ilog2();
        let attrs = Attrs { software: 5, accessed: false, native: first, ..Attrs::USER_TEXT };
        let marked = Attrs { accessed: true, software: 2, ..attrs };
        let page = 1 << F::PAGE_SHIFT;
        map(&mut space, span(0, page), 0, attrs).unwrap();
        let mut now = attrs;
        for (change, expected) in [
            (Change::new().accessed(true), Attrs { accessed: true, ..now }),
            (Change::new().software(2), Attrs { accessed: true, software: 2, ..now }),
            (Change::new().with_native(last), Attrs { native: first | last, ..marked }),
            (Change::new().without_native(first), Attrs { native: last, ..marked }),
            (Change::new().with_native(last).native(first), Attrs { native: first, ..marked }),
            (Change::new().native(last).without_native(first), Attrs { native: 0, ..marked }),
            (Change::new().without_native(0).with_native(first), Attrs { native: first, ..marked }),
            (Change::new().native(0), Attrs { native: 0, ..marked }),
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

fn tables_that_deny_execution_are_obeyed<F: Judged>() {
    if !F::TABLES_RESTRICT {
        return;
    }
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
        refused(&mut space, EditError::Denied(Va::new(0)), |gather| gather.protect(at, text));
    }
    protect(&mut space, first, Change::new().perms(Perms::READ)).unwrap();
    protect(&mut space, first, Change::new().write_protect()).unwrap();

    // Beside them, in another part of the root, execution is allowed, and a range over both is
    // refused as a whole.
    let beside = 1u64 << F::shift(F::root_level());
    let far = span(beside, page);
    map(&mut space, far, 0, Attrs::KERNEL_TEXT).unwrap();
    assert_eq!(space.query(Va::new(beside)).unwrap().attrs(), Attrs::KERNEL_TEXT);
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
    assert_eq!(translate::<Arm64K4>(&platform, space.root(), 0), Some((0, Attrs::USER_TEXT)));
    map(&mut space, span(K4, K4), 0, Attrs::USER_TEXT).unwrap();
    refused(&mut space, EditError::Denied(Va::new(2 * K4)), |gather| {
        gather.map(span(2 * K4, K4), Pa::new(0), Attrs::KERNEL_TEXT)
    });
    // x86-64 has one bit for both, and denies nothing here.
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, K4), 0, mapping).unwrap();
    assert_eq!(translate::<X86>(&platform, space.root(), 0), Some((0, Attrs::USER_TEXT)));
    map(&mut space, span(K4, K4), 0, Attrs::KERNEL_TEXT).unwrap();
}

/// The kernel may execute what the user cannot write or reach because of a table: the rules that
/// forbid it look at the outcome (DDI 0487 D8.4.1; SDM vol. 3A 5.6.1: a page is one of the user if
/// U/S is set at every level).
#[test]
fn effective_permissions_are_those_of_the_outcome() {
    fn check<F: Judged>(table: u64, leaf: u64) {
        let platform = Hosted::new(16, 12);
        let space = adopted::<F>(&platform, table, leaf);
        let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
        let access = walker::translate(F::REGIME, space.root().get(), 0, &mut read).unwrap().access;
        let mut seen = Perms::empty();
        for (is, perm) in [
            (access.privileged.read, Perms::READ),
            (access.privileged.write, Perms::WRITE),
            // With SMEP, which the walker assumes off, the kernel executes no page of the user.
            (access.privileged.execute && (F::HALVES || !access.user.read), Perms::EXEC),
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
    // arm64: APTable is 62:61, the leaf page, AF, inner shareable; 6 is AP[1], 7 AP[2], 53 PXN, 54
    // UXN.
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

/// Other software may make a page writable in another way than the engine does: on arm64 without
/// DBM, where hardware keeps no dirty state. Every way to look at it says so, and so does what is
/// copied of it (DDI 0487 D8.5.2).
#[test]
fn a_page_that_other_software_made_writable_is_so_to_every_question() {
    const PAGE: u64 = 0x4000_0703 | 3 << 53;
    let platform = Hosted::new(32, 12);
    let mut space = adopted::<Arm64K4>(&platform, 3, PAGE);
    let writable = |leaf: Leaf<Arm64K4>| {
        assert_eq!(leaf.attrs().perms, Perms::READ | Perms::WRITE);
        assert!(leaf.attrs().dirty);
    };
    let leaf = space.query(Va::new(0)).unwrap();
    assert_eq!(leaf.descriptor(), PAGE);
    writable(leaf);
    let mut seen = 0;
    let mut look = |leaf| {
        writable(leaf);
        seen += 1;
        ControlFlow::Continue(())
    };
    space.walk(span(0, K4), &mut look).unwrap();
    space.walk(span(0, M2), &mut look).unwrap();
    space.walk(span(0, 512 * G1), &mut look).unwrap();
    space.walk_all(|leaf| {
        let _ = look(leaf);
    });
    assert_eq!(seen, 4);

    let mut child = Space::<Arm64K4>::new(&platform).unwrap();
    let mut gather = space.gather();
    let mut into = child.gather();
    gather.fork(span(0, K4), Change::new(), &mut into, writable).unwrap();
    into.finish(|_| ());
    gather.finish(|_| ());
    writable(child.query(Va::new(0)).unwrap());

    let mut gather = space.gather();
    writable(gather.query(Va::new(0)).unwrap());
    let held = gather.unmap_page(Va::new(0)).unwrap().unwrap();
    writable(gather.flush_with(held, |_| ()).unwrap());
}

/// [`Leaf::attrs`] promises that what a table above takes away is taken away; so for a leaf that an
/// unmap hands out.
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
    // One page, detached by itself; its table; the tables above.
    for at in [span(0, K4), span(0, M2), span(0, 512 * G1)] {
        check::<Arm64K4>(3 | 3 << 59, 0x783 | 0x4000_0000, at);
        check::<X86>(7 | 1 << 63, 0x4000_0061, at);
    }
}

for_each_format!(tables_that_deny_execution_are_obeyed);

/// The entry of the root by which it leads to itself is said as the half has it.
#[test]
fn a_root_that_leads_to_itself_is_refused() {
    for (half, index, at) in [
        (Half::Lower, 3, 3 << 39),
        (Half::Upper, 510, 0xffff_ff00_0000_0000),
        (Half::Upper, 256, 0xffff_8000_0000_0000),
    ] {
        let platform = Hosted::new(4, 12);
        let root = empty_table::<X86>(&platform, Level::new(3));
        poke(&platform, root, index, root.get() | 3);
        // SAFETY: a table of this format, made on this platform, without another editor.
        let adopted = unsafe { Space::<X86>::adopt(&platform, root, half, Liveness::Dead) };
        assert_eq!(adopted.map(drop), Err(EditError::Recursive(Va::new(at))));
    }
}

#[test]
fn a_split_makes_leaves_as_large_as_it_is_told() {
    let giant = Level::new(2);
    for (largest, leaves, tables) in [(giant, 2, 0), (BLOCK, 1024, 2), (Level::PAGE, 1 << 19, 1026)]
    {
        let platform = Hosted::new(1100, 12);
        let mut space = Space::<X86>::new(&platform).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(giant);
        map(&mut space, span(0, 2 * G1), 0, mapping).unwrap();
        let before = platform.counts().tables;
        let mut gather = space.gather();
        gather.split(span(0, 2 * G1), largest).unwrap();
        gather.finish(|_| ());
        assert_eq!(platform.counts().tables - before, tables);
        let mut found = 0;
        space.walk_all(|leaf| {
            assert_eq!((leaf.level(), leaf.frame().get()), (largest, leaf.input().get()));
            found += 1;
        });
        assert_eq!(found, leaves);
    }
}

/// Wherever in a range it is.
#[test]
fn one_page_that_is_there_is_not_mapped_over() {
    let platform = Hosted::new(8, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    for page in 3..40 {
        map(&mut space, span(page * K4, K4), page << 20, Attrs::KERNEL_DATA).unwrap();
        let taken = EditError::AlreadyMapped(Va::new(page * K4));
        refused(&mut space, taken, |gather| {
            gather.map(span(3 * K4, 37 * K4), Pa::new(0), Attrs::KERNEL_DATA)
        });
        unmap(&mut space, span(page * K4, K4)).unwrap();
    }
}

/// A line of entries that is looked at as one may hold pages, and then members of a run: in a walk
/// of one table, and of several.
#[test]
fn a_run_behind_pages_is_seen_as_one() {
    let platform = Hosted::new(16, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let data = Attrs::KERNEL_DATA;
    space.map(span(0, 16 * K4), Pa::new(0), Mapping::new(data).pages_only()).unwrap();
    map(&mut space, span(16 * K4, 16 * K4), 16 * K4, data).unwrap();
    for (first, end) in (8..16).flat_map(|first| [(first, 32), (first, 600)]) {
        let mut found = Vec::new();
        let see = |leaf: Leaf<Arm64K4>| {
            found.push((leaf.input().get(), leaf.size()));
            ControlFlow::Continue(())
        };
        space.walk(span(first * K4, (end - first) * K4), see).unwrap();
        let pages = (first..16).map(|page| (page * K4, K4));
        let expected: Vec<_> = pages.chain([(16 * K4, 16 * K4)]).collect();
        assert_eq!(found, expected, "{first}..{end}");
    }
}

//! Detached tables, until they are reclaimed; and gathers that are dropped, forgotten, mixed up or
//! unwound.

use super::*;

/// Pages, a table full of pages, blocks, and a larger tree, with holes between; the same in terms
/// of each format.
fn landscape<F: Judged>(space: &mut Space<'_, F>) -> (Span<Va>, Vec<u64>) {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(BLOCK));
    let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    let blocks = Mapping::new(Attrs::KERNEL_DATA).without_runs();
    // The last page of a table and the first of the next; blocks; pages at both ends of a table;
    // one full table.
    map(space, span(block - page, 4 * page), block - page, pages).unwrap();
    map(space, span(3 * block, 2 * block), 0, blocks).unwrap();
    map(space, span(5 * block, page), 0, pages).unwrap();
    map(space, span(6 * block - page, page), 0, pages).unwrap();
    map(space, span(7 * block + 5 * page, 3 * page), 0, pages).unwrap();
    map(space, span(9 * block - 2 * page, 2 * page), 0, pages).unwrap();
    // Further up: below another entry of the level above, so that a sub-tree of several levels can
    // be detached.
    let above = 1u64 << F::shift(Level::new(2));
    let mut size = 10 * block;
    if F::LEVELS > 3 || F::entries(Level::new(2)) > 2 {
        map(space, span(above, block + page), 0, blocks).unwrap();
        map(space, span(above + 3 * block - page, page), 0, pages).unwrap();
        map(space, span(2 * above - page, page), 0, pages).unwrap();
        size = 2 * above;
    }
    let mut expected: Vec<u64> = leaves(space).iter().map(|leaf| leaf.input().get()).collect();
    expected.sort_unstable();
    (span(0, size), expected)
}

fn unmapping_in_steps_cuts_each_leaf_once<F: Judged>() {
    let page = 1u64 << F::PAGE_SHIFT;
    for links in [true, false] {
        for step in [1, 2, 3, 1000] {
            // From the middle of the first pages, so that there are leaves to cut one by one at
            // both ends.
            for shrink in [0, page] {
                let mut platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(without_flags(0));
                if !links {
                    platform = platform.without_links();
                }
                let mut space = Space::<F>::new(&platform).unwrap();
                let (all, expected) = landscape(&mut space);
                space.make_live();
                let last = all.last().get() - shrink;
                // Not from 0, so that the upper tables stay and the blocks are detached one by one.
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
                        held.into_iter().map(|leaf| completed.release(leaf).unwrap().input().get()),
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

fn reclaiming_in_steps_visits_each_leaf_once_and_frees_each_table_once<F: Judged>() {
    let page = 1u64 << F::PAGE_SHIFT;
    for links in [true, false] {
        for step in [1, 2, 3, 4, 5, 1000] {
            let mut platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(without_flags(0));
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
                let done = completed.reclaim(|leaf| {
                    gone.push(leaf.input().get());
                    count += 1;
                    assert!(count <= step, "one more than the visitor wanted");
                    if count == step { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
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
            assert!(completed.reclaim(|_| panic!("a leaf was visited again")));
            completed.finish(|_| panic!("a leaf was visited again"));
            gone.sort_unstable();
            let expected: Vec<u64> =
                expected.into_iter().filter(|&va| va >= part.start().get()).collect();
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
    // What the book says of one flush.
    const { assert!(MAX_UNLINKED == 32) };
    let (most, blocks) = (MAX_UNLINKED as u64, MAX_UNLINKED as u64 + 4);
    for block in 0..blocks {
        map(&mut space, span(block * M2 + K4, K4), 0, Attrs::KERNEL_DATA).unwrap();
    }
    let full = most * M2;
    let mut gather = space.gather();
    let progress = gather.unmap(span(0, blocks * M2), |_| panic!("no leaf by itself"));
    assert_eq!(progress, Ok(Progress::Stopped(Va::new(full))));
    assert_eq!(leaves(&gather).len(), 4);
    let mut gone = Vec::new();
    gather.finish(|leaf| gone.push(leaf.input().get()));
    gone.sort_unstable();
    let expected: Vec<u64> = (0..most).map(|block| block * M2 + K4).collect();
    assert_eq!(gone, expected);
    unmap(&mut space, span(full, blocks * M2 - full)).unwrap();
    assert_eq!((platform.counts().tables, platform.counts().bad_frees), (3, 0));
}

const READ: Change = Change::new().perms(Perms::READ);

/// Unmaps, and returns the last leaf that was detached by itself.
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
const EDITS: [Edit; 6] = [
    |gather| gather.protect(span(0, K4), READ).unwrap(),
    |gather| {
        let _leaks = gather.replace(Va::new(0), Pa::new(0x90_0000), Attrs::USER_DATA).unwrap();
    },
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
    let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
    let mut space = two_tables(&platform);
    let tables = platform.tables();
    platform.take_events();
    let mut gather = space.gather();
    let held = cut(&mut gather, all()).unwrap();
    assert_eq!(platform.take_events(), []);
    drop(gather);
    let events = platform.take_events();
    let [Event::Publish, Event::Invalidate(told), Event::Complete, Event::Free(_), Event::Free(_)] =
        &events[..]
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
        let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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

/// A map over what the same gather has unmapped waits for that; one beside it does not.
#[test]
fn a_map_waits_for_an_unmap_of_its_addresses_and_of_no_other() {
    let pages = |first: u64, count: u64| span(first * K4, count * K4);
    for (unmapped, mapped, waits) in [
        (&[(8, 2)][..], (8, 2), true),
        (&[(8, 2)], (7, 2), true),
        (&[(8, 2)], (9, 2), true),
        (&[(8, 2)], (6, 2), false),
        (&[(8, 2)], (10, 2), false),
        // The last of several, and one before it.
        (&[(8, 2), (20, 2)], (21, 1), true),
        (&[(8, 2), (20, 2)], (22, 1), false),
        (&[(8, 2), (20, 2)], (9, 1), true),
        (&[(8, 2), (20, 2)], (12, 4), false),
        (&[(8, 2), (20, 2)], (7, 1), false),
        (&[(20, 2), (8, 2)], (9, 1), true),
        (&[(20, 2), (8, 2)], (10, 8), false),
    ] {
        let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
        let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
        let small = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        for &(first, count) in unmapped {
            map(&mut space, pages(first, count), 0, small).unwrap();
        }
        space.make_live();
        let mut gather = space.gather();
        for &(first, count) in unmapped {
            assert!(gather.unmap(pages(first, count), |_| keep_going(())).unwrap().is_done());
        }
        platform.take_events();
        gather.map(pages(mapped.0, mapped.1), Pa::new(0x80_0000), small).unwrap();
        let completes = platform.take_events().contains(&Event::Complete);
        assert_eq!(completes, waits, "{mapped:?} over {unmapped:?}");
    }
}

/// Of more ranges than are written down nobody knows where they end.
#[test]
fn a_map_waits_for_any_of_very_many_unmaps() {
    let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let small = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    let page = |number: u64| span(2 * number * K4, K4);
    for number in 0..=MAX_RANGES as u64 {
        map(&mut space, page(number), 0, small).unwrap();
    }
    space.make_live();
    let mut gather = space.gather();
    for number in 0..=MAX_RANGES as u64 {
        assert!(gather.unmap(page(number), |_| keep_going(())).unwrap().is_done());
    }
    platform.take_events();
    gather.map(page(MAX_RANGES as u64), Pa::new(0x80_0000), small).unwrap();
    assert!(platform.take_events().contains(&Event::Complete));
}

#[test]
fn what_a_forgotten_gather_owes_is_everything() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        for dropped in [true, false] {
            let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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
    let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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

/// An entry that was looked at when a change was made first is looked at again when the answer may
/// be another.
#[test]
fn a_change_that_was_right_before_is_refused_where_it_no_longer_is() {
    let page = |number: u64| Span::new(Va::new(number << 12), 4096).unwrap();
    // A run would have to be broken under the code's own feet.
    let platform = Hosted::new(64, 12).with_caps(without_flags(0));
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    map(&mut space, page(0), 0, Mapping::new(Attrs::KERNEL_DATA).without_runs()).unwrap();
    space.make_own();
    space.gather().protect(page(0), READ).unwrap();
    let run = span(16 << 12, 16 << 12);
    map(&mut space, run, 16 << 12, Mapping::new(Attrs::KERNEL_DATA)).unwrap();
    assert!(space.query(run.start()).unwrap().is_contiguous());
    let both = span(0, 40 << 12);
    let refused = space.gather().protect(both, READ);
    assert!(matches!(refused, Err(EditError::NeedsBreak(_))), "{refused:?}");

    // What no walker remembers is forgotten once walkers may.
    let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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

    // What all spaces share stays global, whether it is in use already or not.
    for liveness in [Liveness::Dead, Liveness::Live] {
        let local = READ.global(false);
        let platform = Hosted::new(512, 12);
        let mut space = AddressSpace::<X86, _>::new(&platform).unwrap();
        common::used(&mut space, liveness);
        let hole = Span::new(Va::new(0xffff_c900_0000_0000), 4096).unwrap();
        map(&mut space, hole, 0, Mapping::new(Attrs::KERNEL_DATA).pages_only()).unwrap();
        let mut gather = space.gather();
        assert!(gather.unmap(hole, keep_going).unwrap().is_done());
        gather.protect(hole, local).unwrap();
        gather.finish(|_| ());
        let mut kernel = KernelHalf::new(space).unwrap();
        let refused = kernel.gather().protect(hole, local);
        assert!(matches!(refused, Err(EditError::Inexpressible(_))), "{refused:?}");
        let mut gather = kernel.gather();
        gather.map(hole, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
        for change in [READ, READ.global(true)] {
            assert_eq!(gather.protect(hole, change), Ok(()));
        }
    }
}

/// A user's root has the kernel's tables as well: as a second kernel's half it would be edited
/// beside the first.
#[test]
fn a_users_space_is_no_kernels_half() {
    let platform = Threads::new(600, 12, 1);
    let space = AddressSpace::<X86, _>::new(&platform).unwrap();
    let kernel = KernelHalf::new(space).unwrap();
    let user = kernel.user().unwrap();
    let (refused, user) = KernelHalf::new(user).unwrap_err();
    assert_eq!(refused, EditError::InputOutOfRange);
    // Shared and taken back, it is one of a user still.
    let shared = SharedSpace::new(user).ok().unwrap();
    let (refused, _user) = KernelHalf::new(shared.into_exclusive()).unwrap_err();
    assert_eq!(refused, EditError::InputOutOfRange);
}

/// A space that becomes no kernel's half is given back as it was.
#[test]
fn a_space_that_is_refused_as_a_kernels_half_is_as_it_was() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let (low, high) = (Va::new(0x1000), Va::new(0xffff_8000_0000_0000));
    space.map_page(high, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    let tables = platform.counts().tables;
    let before = snapshot::<X86>(&platform, space.root());
    let (refused, mut space) = KernelHalf::new(space).unwrap_err();
    assert_eq!(refused, EditError::OutOfTables);
    before.assert_untouched(&snapshot::<X86>(&platform, space.root()));
    assert_eq!(platform.counts().tables, tables);
    assert_eq!(space.liveness(), Liveness::Dead);

    space.map_page(low, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    let (refused, mut space) = KernelHalf::new(space).unwrap_err();
    assert_eq!(refused, EditError::AlreadyMapped(low));
    let mut gather = space.gather();
    assert!(gather.unmap_page(low).unwrap().is_some());
    gather.finish(|_| ());
    // What is of one space alone, beside what is of all.
    for (at, attrs) in [(1, Attrs::USER_DATA), (2, Attrs::KERNEL_DATA)] {
        space.map_page(Va::new(high.get() + at * K4), Pa::new(0), attrs).unwrap();
        let refused;
        (refused, space) = KernelHalf::new(space).unwrap_err();
        assert!(matches!(refused, EditError::Inexpressible(_)), "{refused:?}");
    }
    assert!(space.destroy(|_| ()).is_ok());
    assert_eq!(platform.counts().tables, 0);
}

/// User spaces are loaded, and this root perhaps never.
#[test]
fn what_is_unmapped_in_a_kernels_half_that_was_not_said_to_be_live_is_invalidated() {
    let platform = Hosted::new(600, 12);
    let mut kernel = KernelHalf::new(Space::<X86>::new(&platform).unwrap()).unwrap();
    let at = Va::new(0xffff_8000_0000_5000);
    let mut gather = kernel.gather();
    gather.map_page(at, Pa::new(0x8000), Attrs::KERNEL_DATA).unwrap();
    gather.finish(|_| ());
    let mut user = kernel.user().unwrap();
    user.make_live();
    platform.record();
    let mut gather = kernel.gather();
    let held = gather.unmap_page(at).unwrap().unwrap();
    assert!(gather.flush_with(held, |_| ()).is_ok());
    let told = platform.take_log();
    assert!(told.len() == 1 && told[0].global, "{told:?}");
}

#[test]
fn an_unmap_of_all_that_an_entry_of_a_shared_root_covers_leaves_its_table_to_the_other_roots() {
    let platform = Hosted::new(600, 12);
    let mut kernel = KernelHalf::new(Space::<X86>::new(&platform).unwrap()).unwrap();
    let user = kernel.user().unwrap();
    let tables = platform.counts().tables;
    let all = Span::new(Va::new(0xffff_8000_0000_0000), 512 * G1).unwrap();
    let page = Span::new(Va::new(0xffff_8000_0000_5000), K4).unwrap();
    // All that the root of the user's space translates, which itself has the lower half.
    let seen = || {
        // SAFETY: a tree of the format, that is looked at between edits and used by no walker (1.,
        // 2., 3.).
        let whole =
            unsafe { Space::<X86>::adopt(&platform, user.root(), Half::Lower, Liveness::Dead) }
                .unwrap();
        whole.query(page.start()).map(|leaf| leaf.frame())
    };
    for frame in [0x8000, 0x9000] {
        let mut gather = kernel.gather();
        gather.map(page, Pa::new(frame), Attrs::KERNEL_DATA).unwrap();
        assert_eq!(seen(), Some(Pa::new(frame)));
        assert!(gather.unmap(all, keep_going).unwrap().is_done());
        gather.finish(|_| ());
        assert_eq!(seen(), None);
        let counts = platform.counts();
        assert_eq!((counts.tables, counts.bad_frees), (tables, 0));
    }
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
        (|gather| gather.map(span(G1, K4), Pa::new(0), Attrs::KERNEL_DATA), EditError::OutOfTables),
        (
            |gather| gather.unmap(span(1 << 47, K4), |_| keep_going(())).map(|_| ()),
            EditError::InputOutOfRange,
        ),
        (|gather| gather.split(span(0, K4), Level::new(4)), EditError::NoSuchLeaf),
        (
            |gather| gather.collapse(span(0, K4), Level::new(4), false).map(|_| ()),
            EditError::NoSuchLeaf,
        ),
    ];
    for (refused, error) in refusals {
        let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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
    // The pages of the first table but one, by themselves; the second table; the page behind it, by
    // itself.
    let at = Span::inclusive(Va::new(K4), all().last()).unwrap();
    const PAGES_CUT: usize = 511;
    const CUT: usize = PAGES_CUT + 1;
    for liveness in [Liveness::Dead, Liveness::Live] {
        for at_call in [1, 5, CUT - 1, CUT] {
            for inside in [true, false] {
                let platform = Hosted::new(64, 12).with_caps(without_flags(0));
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
                    let mut reclaimed = 0;
                    gather.finish(|_| reclaimed += 1);
                    assert_eq!(reclaimed, with_table);
                }
                let log = platform.take_log();
                // One flush for all that was cut off.
                let flushes = u64::from(liveness != Liveness::Dead);
                assert_eq!((log.len() as u64, platform.counts().completions), (flushes, flushes));
                let pages = (1..=at_call.min(PAGES_CUT) as u64).map(|page| page * K4);
                let rest = [M2, 2 * M2].into_iter().filter(|_| at_call == CUT);
                for cut in pages.chain(rest) {
                    assert!(log.iter().all(|told| told.covers(cut)), "{cut:#x}: {log:?}");
                }
                // What was not reached is there, what was detached is freed, and the next gather
                // owes nothing.
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
fn a_visitor_that_unwinds_in_reclaiming_leaks_the_rest_of_its_sub_tree_and_no_other() {
    const PAGES: usize = 512;
    /// `by_hand`: step by step, and after the unwinding the rest.
    fn check(at: Span<Va>, links: bool, at_call: usize, by_hand: bool, unseen: usize, leaked: u64) {
        let mut platform = Hosted::new(64, 12).with_caps(without_flags(0));
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
            let mut reclaim = || {
                completed.reclaim(|leaf| {
                    visit(leaf);
                    keep_going(())
                })
            };
            assert!(catch_unwind(AssertUnwindSafe(&mut reclaim)).is_err());
            assert!(reclaim());
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
        // In the first table that is reclaimed, the second, the last.
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
                let done = completed.reclaim(|_| {
                    left -= 1;
                    if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
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
    let first = gather.issue().complete();
    // Another gather of the same space; one of another space; one that has gathered nothing.
    let mut gather = space.gather();
    let high = cut(&mut gather, span(K4, K4)).unwrap();
    let second = gather.issue().complete();
    let low = second.release(low).expect_err("a later gather");
    let mut elsewhere = other.gather();
    let foreign = cut(&mut elsewhere, span(0, K4)).unwrap();
    let third = elsewhere.issue().complete();
    let low = third.release(low).expect_err("a gather of another space");
    let empty = space.gather().issue().complete();
    let low = empty.release(low).expect_err("it has gathered nothing");
    assert_eq!(second.release(high).unwrap().input(), Va::new(K4));
    assert_eq!(third.release(foreign).unwrap().input(), Va::new(0));
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
        let space =
            unsafe { AddressSpace::<X86, _>::adopt(&platform, root, Half::Lower, used) }.unwrap();
        let mut space = space.with_id(5);
        assert_eq!(space.id(), 0);
        platform.record();
        unmap(&mut space, span(0, K4)).unwrap();
        assert_eq!(platform.take_log()[0].id, 0);
    }
}

for_each_format!(
    unmapping_in_steps_cuts_each_leaf_once,
    reclaiming_in_steps_visits_each_leaf_once_and_frees_each_table_once
);

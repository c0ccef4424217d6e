//! Another processor edits between a look and an exchange, or while an entry is claimed.

use super::*;

/// The other maps in the same hole, in the midst of a range.
#[test]
fn a_range_goes_on_where_another_processor_was_first() {
    // What the other maps: in the same table, in another, and the table that is filled.
    for maintenance in [NOTHING, CLEAN] {
        for after in 0..8 {
            for other in [5 * PAGE, BLOCK, BLOCK + 7 * PAGE, 3 * BLOCK - PAGE] {
                let platform = Meddled::new(maintenance, Caps::default());
                let space = platform.share::<X86>();
                let is_first = std::rc::Rc::new(Cell::new(false));
                let was = is_first.clone();
                platform.meddle(When::Exchange, after, move || {
                    let page = leaf(other, Level::PAGE, Attrs::USER_DATA);
                    // A claim of the first: it lets the other go on.
                    let mapped = map_alone(space, &page);
                    assert!(matches!(
                        mapped,
                        Ok(Mapped::Installed | Mapped::Already) | Err(Refused::Busy(_))
                    ));
                    was.set(mapped == Ok(Mapped::Installed));
                });
                let size = 3 * BLOCK - 4 * PAGE;
                let mapped = map_range(space, 4 * PAGE, size).unwrap();
                let by_other = if is_first.get() { PAGE } else { 0 };
                assert_eq!(mapped + by_other, size, "{after} {other:#x}");
                // The last may be too late.
                platform.meddler.take();
                let at = |number| 4 * PAGE + number * PAGE;
                let pages = (0..size / PAGE).step_by(13).chain([1, 507, 508, 1020, 1531]);
                assert!({ pages }.all(|page| frame(space, at(page)) == Some(at(page))));
                // The root, two below it, and three of pages: what was built in vain is free.
                assert_eq!(platform.frames.tables(), 6);
            }
        }
    }
}

/// In a table that is there already, page by page.
#[test]
fn a_range_counts_what_it_has_mapped_itself() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, 0, PAGE), Ok(PAGE));
    platform.meddle(When::Exchange, 3, move || {
        assert_eq!(map_range(space, 4 * PAGE, PAGE), Ok(PAGE));
    });
    assert_eq!(map_range(space, 0, 8 * PAGE), Ok(6 * PAGE));
    platform.take();
    assert!((0..8).all(|page| frame(space, page * PAGE) == Some(page * PAGE)));
}

/// An entry is claimed while its memory is cleaned.
#[test]
fn a_range_stops_at_a_claim_of_another_processor() {
    for (first, claimed) in [(0, 0), (BLOCK, BLOCK), (0, 3 * PAGE)] {
        let platform = Meddled::new(CLEAN, Caps::default());
        let space = platform.share::<X86>();
        let size = if claimed == BLOCK { BLOCK } else { 4 * PAGE };
        if claimed > first {
            // The table is there, and pages are claimed one by one.
            assert!(map_range(space, first + 9 * PAGE, PAGE).is_ok());
        }
        let after = ((claimed - first) / PAGE) as u32;
        platform.meddle(When::Clean, after, move || {
            let at = claimed & !(BLOCK - 1);
            let before = platform.did.take();
            assert_eq!(map_range(space, at, 2 * BLOCK), Err(Refused::Busy(Va::new(claimed))));
            let page = leaf(claimed, Level::PAGE, Attrs::USER_DATA);
            assert_eq!(map_alone(space, &page), Err(Refused::Busy(Va::new(claimed))));
            let relaxed = space.relax(Va::new(claimed), Perms::WRITE, true);
            assert_eq!(relaxed, Err(Refused::Busy(Va::new(claimed))));
            platform.did.replace(before);
        });
        assert_eq!(map_range(space, first, size), Ok(size));
        assert_eq!(frame(space, claimed), Some(claimed));
        platform.take();
    }
}

#[test]
fn a_range_says_that_it_needs_tables() {
    for maintenance in [NOTHING, CLEAN] {
        for most in 0..5 {
            let platform = Meddled::new(maintenance, Caps::default());
            let space = platform.share::<X86>();
            platform.most.set(Some(most));
            let mapped = map_range(space, 0, BLOCK + PAGE);
            match most {
                0..4 => assert_eq!(mapped, Err(Refused::NeedsTables(1)), "{most}"),
                _ => assert_eq!(mapped, Ok(BLOCK + PAGE)),
            }
            platform.most.set(None);
            let before = frame(space, 0).map_or(0, |_| BLOCK);
            assert_eq!(
                map_range(space, 0, BLOCK + PAGE).unwrap() + before,
                match mapped {
                    Ok(_) => BLOCK,
                    Err(_) => BLOCK + PAGE,
                }
            );
            assert_eq!(platform.frames.tables(), 5);
        }
    }
}

/// Between the look and the exchange of a fault.
#[test]
fn a_fault_looks_again_where_another_processor_was_first() {
    type Act = fn(&'static Space<X86>);
    let at = |attrs| leaf::<X86>(0, Level::PAGE, attrs);
    let (read, write) = (at(Attrs::USER_RODATA), at(Attrs::USER_DATA));
    let elsewhere =
        NewLeaf::new(Va::new(0), Pa::new(MEMORY + BLOCK), Level::PAGE, Attrs::USER_DATA).unwrap();
    let maps: Act = |space| {
        let page = leaf(0, Level::PAGE, Attrs::USER_DATA);
        assert_eq!(map_alone(space, &page), Ok(Mapped::Installed));
    };
    let maps_less: Act = |space| {
        let page = leaf(0, Level::PAGE, Attrs::USER_RODATA);
        assert_eq!(map_alone(space, &page), Ok(Mapped::Installed));
    };
    let unmaps: Act = |space| unmap(space, span(0, PAGE));
    let uses: Act = |space| {
        let mut gather = space.gather();
        gather.protect(span(0, PAGE), Change::new().accessed(false)).unwrap();
    };
    let protects: Act = |space| {
        let mut gather = space.gather();
        gather.protect(span(0, PAGE), Change::new().perms(Perms::READ)).unwrap();
    };
    let fresh = None;
    type Case<'a> = (Option<&'a NewLeaf<X86>>, &'a NewLeaf<X86>, Act, Result<&'a str, Refused<Va>>);
    let cases: [Case<'_>; 9] = [
        (fresh, &write, maps, Ok("already")),
        (fresh, &read, maps, Ok("already")),
        (fresh, &write, maps_less, Err(Refused::Retry)),
        (fresh, &elsewhere, maps, Err(Refused::Retry)),
        (Some(&read), &write, unmaps, Err(Refused::Retry)),
        (Some(&read), &write, uses, Ok("relaxed")),
        (Some(&read), &elsewhere, uses, Ok("replaced")),
        (Some(&read), &elsewhere, unmaps, Err(Refused::Retry)),
        (Some(&write), &elsewhere, protects, Err(Refused::Retry)),
    ];
    for maintenance in [NOTHING, CLEAN] {
        for (number, &(before, new, act, expected)) in cases.iter().enumerate() {
            let platform = Meddled::new(maintenance, Caps::default());
            let space = platform.share::<X86>();
            // The tables are there.
            assert!(map_alone(space, &leaf(PAGE, Level::PAGE, Attrs::USER_DATA)).is_ok());
            if let Some(before) = before {
                assert_eq!(map_alone(space, before), Ok(Mapped::Installed));
            }
            platform.meddle(When::Exchange, 0, move || act(space));
            let mapped = space.gather().map(new);
            let named = mapped.map(|mapped| match mapped {
                Mapped::Already => "already",
                Mapped::Relaxed => "relaxed",
                Mapped::Replaced(_) => "replaced",
                _ => "another",
            });
            assert_eq!(named, expected, "case {number}");
            platform.take();
            // Another turn is all that it takes.
            let again = space.gather().map(new);
            assert!(again.is_ok(), "case {number}: {again:?}");
            let there = space.query(Va::new(0)).unwrap();
            assert!(there.attrs().perms.contains(Perms::READ));
            let to = if std::ptr::eq(new, &elsewhere) { BLOCK } else { 0 };
            assert_eq!(there.frame(), Pa::new(MEMORY + to), "case {number}");
        }
    }
}

/// The other links a table in the place where this one is about to.
#[test]
fn tables_that_are_not_linked_go_back_empty() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    let mut gather = space.gather();
    assert!(gather.top_up(3));
    platform.meddle(When::Exchange, 0, move || {
        assert!(map_alone(space, &leaf(PAGE, Level::PAGE, Attrs::USER_DATA)).is_ok());
    });
    let page = leaf(0, Level::PAGE, Attrs::USER_DATA);
    assert_eq!(gather.map(&page), Ok(Mapped::Installed));
    // The other's three, and these in the cache, which are put to use elsewhere.
    assert_eq!(platform.frames.tables(), 1 + 3 + 3);
    let far = leaf(1 << 39, Level::PAGE, Attrs::USER_DATA);
    assert_eq!(gather.map(&far), Ok(Mapped::Installed));
    assert_eq!(platform.frames.tables(), 1 + 3 + 3);
    let there = [0, PAGE, 1 << 39];
    for at in (0..512).map(|page| page * PAGE).chain([1 << 39, (1 << 39) + PAGE]) {
        assert_eq!(frame(space, at), there.contains(&at).then_some(at));
    }
    assert_eq!(
        gather.map(&leaf(1 << 38, Level::PAGE, Attrs::USER_DATA)),
        Err(Refused::NeedsTables(2))
    );
    platform.take();
}

/// A block is split while the other uses it, or takes it away.
#[test]
fn a_split_looks_again_where_another_processor_was_first() {
    type Act = fn(&'static Space<X86>);
    let uses: Act = |space| {
        let mut gather = space.gather();
        gather.protect(span(0, BLOCK), Change::new().accessed(false)).unwrap();
    };
    let unmaps: Act = |space| unmap(space, span(0, BLOCK));
    for (act, expected) in [(uses, Ok(true)), (unmaps, Err(Refused::Retry))] {
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        let block = leaf(0, Level::new(1), Attrs::USER_DATA);
        assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
        let mut gather = space.gather();
        assert!(gather.top_up(1));
        let tables = platform.frames.tables();
        platform.meddle(When::Exchange, 0, move || act(space));
        assert_eq!(gather.split(Va::new(5 * PAGE), Level::PAGE), expected);
        platform.take();
        assert!(gather.finish(|_| ()).is_ok());
        assert_eq!(platform.frames.tables(), tables);
        match expected {
            Ok(_) => {
                let parts = (0..512).map(|page| space.query(Va::new(page * PAGE)).unwrap());
                assert!(parts.zip(0..).all(|(part, page)| {
                    part.frame().get() == MEMORY + page * PAGE && part.level() == Level::PAGE
                }));
                assert!(!space.query(Va::new(0)).unwrap().attrs().accessed);
            }
            Err(_) => {
                // The table is in the cache, and empty.
                let page = leaf(7 * PAGE, Level::PAGE, Attrs::USER_DATA);
                assert_eq!(gather.map(&page), Ok(Mapped::Installed));
                assert!((0..512).all(|page| frame(space, page * PAGE).is_some() == (page == 7)));
            }
        }
    }
}

/// The spans that a gather has invalidated, or all addresses.
fn forgotten(did: &[Did]) -> impl Fn(u64) -> bool + '_ {
    move |at| did.iter().any(|did| matches!(did, Did::Invalidate(told) if told.covers(at)))
}

/// A claim of another edit is passed over, and invalidated: it may be remembered as it was.
/// It is said of a leaf that will be there again.
#[test]
fn a_claim_is_passed_over_and_invalidated() {
    type Edits = fn(&mut Gather<'_, Arm64K4, &'static Meddled>) -> bool;
    let unmaps: Edits = |gather| {
        let taken = gather.unmap(span(0, 2 * BLOCK), |_| ControlFlow::Continue(())).unwrap();
        assert!(taken.progress.is_done());
        taken.passed_over
    };
    let protects: Edits = |gather| {
        let change = Change::new().perms(Attrs::USER_RODATA.perms);
        let protected = gather.protect(span(0, 2 * BLOCK), change).unwrap();
        assert!(protected.changed);
        protected.passed_over
    };
    for (edit, splits) in [(unmaps, true), (unmaps, false), (protects, true), (protects, false)] {
        let caps = Caps { bbm: 0, invalidate_all_above: u64::MAX, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<Arm64K4>();
        let block = leaf(0, Level::new(1), Attrs::USER_DATA);
        assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
        assert_eq!(map_range(space, BLOCK, 4 * PAGE), Ok(4 * PAGE));
        let mut gather = space.gather();
        assert!(gather.top_up(1));
        platform.take();
        platform.meddle(When::Invalidation, 0, move || {
            let mut other = space.gather();
            assert_eq!(edit(&mut other), splits);
            platform.did.take();
            // A table that is cut off waits for the walk that is under way.
            let _later = other.finish(|_| ());
            let did = platform.did.take();
            let claimed = if splits { 0 } else { BLOCK + PAGE };
            for at in [claimed, BLOCK, BLOCK + 3 * PAGE] {
                assert!(forgotten(&did)(at), "{at:#x} in {did:?}");
            }
        });
        if splits {
            assert_eq!(gather.split(Va::new(0), Level::PAGE), Ok(true));
            // It is there again, in pages.
            assert_eq!(frame(space, 5 * PAGE), Some(5 * PAGE));
        } else {
            let at = Va::new(BLOCK + PAGE);
            let other = NewLeaf::new(at, Pa::new(MEMORY), Level::PAGE, Attrs::USER_DATA).unwrap();
            assert!(matches!(gather.map(&other), Ok(Mapped::Replaced(_))));
            // Its table may have been cut off meanwhile.
            let is_there = frame(space, BLOCK).is_some();
            assert_eq!(frame(space, BLOCK + PAGE), is_there.then_some(0));
        }
        platform.take();
    }
}

/// A leaf that is taken away or changed becomes a table between the look and the exchange.
#[test]
fn an_edit_of_a_range_goes_into_a_table_that_another_processor_has_made() {
    for unmaps in [true, false] {
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        let block = leaf(0, Level::new(1), Attrs::USER_DATA);
        assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
        platform.meddle(When::Exchange, 0, move || {
            let mut gather = space.gather();
            assert!(gather.top_up(1));
            assert_eq!(gather.split(Va::new(0), Level::PAGE), Ok(true));
        });
        let (mut gather, mut held) = (space.gather(), 0);
        if unmaps {
            let part = span(0, 2 * BLOCK);
            let taken = gather.unmap(part, |_| {
                held += 1;
                ControlFlow::Continue(())
            });
            let taken = taken.unwrap();
            assert!(taken.progress.is_done() && !taken.passed_over);
            let mut bytes = 0;
            assert!(gather.finish(|leaf| bytes += leaf.size()).is_ok());
            assert_eq!((held, bytes), (0, BLOCK));
            assert_eq!(frame(space, 5 * PAGE), None);
        } else {
            let change = Change::new().perms(Attrs::USER_RODATA.perms);
            let protected = gather.protect(span(0, 2 * BLOCK), change).unwrap();
            assert!(protected.changed && !protected.passed_over);
            let is_right = |page| {
                let leaf = space.query(Va::new(page * PAGE)).unwrap();
                leaf.level() == Level::PAGE && leaf.attrs().perms == Attrs::USER_RODATA.perms
            };
            assert!((0..512).all(is_right));
        }
        platform.take();
    }
}

/// An unmap that is stopped names the first address that is left.
#[test]
fn an_unmap_goes_on_where_it_stopped() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    // A block, pages, and a block.
    for block in [0, 2] {
        let block = leaf(block * BLOCK, Level::new(1), Attrs::USER_DATA);
        assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
    }
    assert_eq!(map_range(space, BLOCK + 5 * PAGE, 3 * PAGE), Ok(3 * PAGE));
    let mut gather = space.gather();
    let end = 3 * BLOCK - PAGE;
    let mut from = 0;
    let mut stops = Vec::new();
    loop {
        let rest = span(from, end + PAGE - from);
        match gather.unmap(rest, |_| ControlFlow::Break(())).unwrap().progress {
            tablewright::Progress::Done => break,
            tablewright::Progress::Stopped(at) => from = at.get(),
        }
        stops.push(from);
        // Not the whole table, which would be cut off.
        from = from.max(BLOCK + PAGE);
    }
    let page = |page| BLOCK + page * PAGE;
    assert_eq!(stops, [BLOCK, page(6), page(7), 2 * BLOCK]);
}

/// Another maps a page in a table that is pruned, at each moment of it.
#[test]
fn a_table_into_which_another_processor_maps_stays() {
    for after in 0..514 {
        for at in [0, 511 * PAGE] {
            let platform = Meddled::new(NOTHING, Caps::default());
            let space = platform.share::<X86>();
            assert_eq!(map_range(space, 0, 2 * PAGE), Ok(2 * PAGE));
            let mut gather = space.gather();
            let part = span(0, 2 * PAGE);
            let taken = gather.unmap(part, |_| ControlFlow::Continue(())).unwrap();
            assert!(taken.progress.is_done());
            let mapped = std::rc::Rc::new(Cell::new(None));
            let result = mapped.clone();
            platform.meddle(When::Exchange, after, move || {
                let page = leaf(at, Level::PAGE, Attrs::USER_DATA);
                result.set(Some(map_alone(space, &page).is_ok()));
            });
            assert!(gather.prune(span(0, BLOCK)).unwrap().is_done());
            assert!(gather.finish(|_| ()).is_ok());
            platform.meddler.take();
            // Its claims are holes again, if it was not cut off.
            let is_there = mapped.get() == Some(true);
            assert_eq!(frame(space, at), is_there.then_some(at), "{after}");
            assert_eq!(platform.frames.tables(), if is_there { 4 } else { 3 }, "{after}");
            let missing = if is_there { BLOCK - PAGE } else { BLOCK };
            assert_eq!(map_range(space, 0, BLOCK), Ok(missing), "{after} {at:#x}");
        }
    }
}

/// A table that is pruned is cut off by another, or a walker sets a flag of its entry.
#[test]
fn a_table_that_is_cut_off_by_another_processor_is_not_pruned() {
    const ACCESSED: u64 = 1 << 5;
    for (cuts, remaps) in [(true, true), (true, false), (false, false)] {
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        assert_eq!(map_range(space, 0, PAGE), Ok(PAGE));
        unmap(space, span(0, PAGE));
        platform.take();
        // When all of the table is sealed.
        platform.meddle(When::Exchange, 512, move || {
            if cuts {
                let mut gather = space.gather();
                let part = span(0, BLOCK);
                let taken = gather.unmap(part, |_| ControlFlow::Continue(())).unwrap();
                assert!(taken.progress.is_done());
                assert!(gather.finish(|_| ()).is_err());
                if remaps {
                    assert_eq!(map_range(space, 7 * PAGE, PAGE), Ok(PAGE));
                }
                return;
            }
            let mut frame = space.root();
            for level in [3, 2, 1] {
                // SAFETY: a table of the tree.
                let table = unsafe { platform.table(frame, Level::new(level)) };
                // SAFETY: its first entry.
                let entry = unsafe { table.as_ref() };
                frame = X86::address(entry.load(), Level::new(level));
                entry.store(entry.load() | ACCESSED);
            }
        });
        let mut gather = space.gather();
        assert!(gather.prune(span(0, BLOCK)).unwrap().is_done());
        // It does not free what another has cut off.
        assert!(!gather.is_clean());
        assert!(gather.finish(|_| ()).is_ok());
        platform.take();
        // The other gather was dropped while this walk held its table, which leaks.
        let tables = 3 + u64::from(cuts) + u64::from(remaps);
        assert_eq!(platform.frames.tables(), tables);
        assert_eq!(frame(space, 7 * PAGE), remaps.then_some(7 * PAGE));
        let missing = BLOCK - if remaps { PAGE } else { 0 };
        assert_eq!(map_range(space, 0, BLOCK), Ok(missing));
    }
}

/// Two blocks that two others split are passed over.
#[test]
fn two_claims_are_passed_over_as_one_is() {
    for unmaps in [true, false] {
        let caps = Caps { bbm: 0, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<Arm64K4>();
        for number in 0..2 {
            let block = leaf(number * BLOCK, Level::new(1), Attrs::USER_DATA);
            assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
        }
        let split = |at| {
            let mut gather = space.gather();
            assert!(gather.top_up(1));
            assert_eq!(gather.split(Va::new(at), Level::PAGE), Ok(true));
        };
        platform.meddle(When::Invalidation, 0, move || {
            platform.meddle(When::Invalidation, 0, move || {
                let mut gather = space.gather();
                let part = span(0, 2 * BLOCK);
                let passed_over = if unmaps {
                    gather.unmap(part, |_| ControlFlow::Continue(())).unwrap().passed_over
                } else {
                    let change = Change::new().perms(Attrs::USER_RODATA.perms);
                    gather.protect(part, change).unwrap().passed_over
                };
                assert!(passed_over);
            });
            split(BLOCK);
        });
        split(0);
        platform.take();
    }
}

//! Gathers of shared spaces.

use super::*;

/// A shared space with the pages of the exclusive one.
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

/// Returns the invalidations, by the first of the events; each is complete before anything is
/// freed.
fn invalidated(events: &[Event]) -> &Told {
    let [Event::Publish, Event::Invalidate(told), Event::Complete, rest @ ..] = events else {
        panic!("{events:?}");
    };
    let plain = |event: &Event| matches!(event, Event::Free(_) | Event::Publish);
    assert!(rest.iter().all(plain), "{events:?}");
    told
}

fn a_shared_gather_that_is_dropped_is_complete<F: Judged>() {
    for issued in [false, true] {
        let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
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
        assert_eq!((platform.tables(), platform.bad_frees()), (tables - 2 + leaked, 0));
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
    let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
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
        let deferred = gather.issue().complete();
        let events = platform.take_events();
        assert_eq!(invalidated(&events).everything, everything, "{pieces}");
        for leaf in held {
            assert!(deferred.release(leaf).is_ok());
        }
        // Nothing is left claimed.
        fill(&space, pieces as u64 * K4);
        platform.take_events();
    }
}

fn a_visitor_that_unwinds_in_a_shared_unmap_leaves_nothing_to_be_remembered<F: Judged>() {
    for at_call in [1, 5, 512] {
        let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
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
        assert_eq!((platform.tables(), platform.bad_frees()), (tables - with_table, 0));
        // What was taken is a hole, what was not is there; and no edit counts any more.
        fill(&space, at_call as u64 * K4 + with_table * M2);
        assert!(finds_it_done(&space).is_clean());
    }
}

fn what_a_forgotten_shared_gather_has_done_is_never_taken_for_complete<F: Judged>() {
    let platform = Threads::new(64, 12, 1).with_caps(without_flags(0)).recording();
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

/// Runs that are unfolded in place, because their space is shared, are forgotten.
#[test]
fn what_is_unfolded_to_be_shared_is_invalidated() {
    let platform = Threads::new(64, 12, 1).with_caps(without_flags(2)).recording();
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    map(&mut space, span(0, 16 * K4), 0, Attrs::USER_DATA).unwrap();
    space.make_live();
    platform.take_events();
    let space = SharedSpace::new(space).unwrap_or_else(|_| unreachable!("it is no kernel's"));
    let events = platform.take_events();
    assert!(invalidated(&events).covers(0) && invalidated(&events).covers(16 * K4 - 1));
    assert!(!space.query(Va::new(0)).unwrap().is_contiguous());
}

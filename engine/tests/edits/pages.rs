//! A page is a range of one page, whichever call edits it: two spaces are bit for bit alike after
//! any number of edits, as are what they give out and leave to invalidate.

use super::*;
use common::Decoded;
use tablewright::{Address, Format};

/// A number of the sequence that decides everything.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 11
}

/// All that a leaf says.
fn said<F: Format>(leaf: Option<Leaf<F>>) -> Option<(F::Input, Pa, u64, Attrs, u64)> {
    let leaf = leaf?;
    let (input, frame, size) = (leaf.input(), leaf.frame(), leaf.size());
    Some((input, frame, size, leaf.attrs(), leaf.descriptor()))
}

fn attrs<F: Format>(number: u64) -> Attrs {
    let attrs = match F::GLOBALS {
        true => Attrs::KERNEL_DATA,
        false => Attrs::GUEST_MEMORY,
    };
    // With no permissions it is parked.
    let perms = match number % 5 {
        0 => Perms::empty(),
        1 => attrs.perms - Perms::ANY_WRITE,
        _ => attrs.perms,
    };
    Attrs { perms, accessed: !number.is_multiple_of(3), dirty: !number.is_multiple_of(7), ..attrs }
}

/// Blocks, runs and pages in three tables, of which the last has not been made.
fn tables<F: Decoded>(platform: &Hosted, flags: bool) -> AddressSpace<F, &Hosted> {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    let mut space = AddressSpace::<F, _>::new(platform).unwrap();
    let mut map = |first: u64, pages: u64, mapping: Mapping| {
        let span = Span::new(F::Input::from_bits(first), pages * page).unwrap();
        space.map(span, Pa::new(first), mapping).unwrap();
    };
    let data = Mapping::new(attrs::<F>(2));
    map(0, 160, data.largest(Level::PAGE));
    map(block, block / page, data.largest(Level::new(1)));
    map(3 * block, 8, data.pages_only().tables_deny_execution());
    // Where hardware sets flags, what has none is exchanged.
    if flags {
        space.make_live();
    }
    space
}

fn a_page_is_a_range_of_one_page<F: Decoded>() {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    if F::INPUT_BITS < F::shift(Level::new(1)) + 3 {
        return;
    }
    for flags in [false, true] {
        let caps = Caps {
            bbm: 2,
            hardware_access: flags,
            hardware_dirty: flags,
            ..tablewright_hosted::CAPS
        };
        let [one, other] = [0, 1].map(|_| Hosted::new(64, F::PAGE_SHIFT).with_caps(caps));
        let (mut by_pages, mut by_ranges) = (tables::<F>(&one, flags), tables::<F>(&other, flags));
        let mut state = 0x9e37_79b9_7f4a_7c15;
        let mut changed = 0;
        for _round in 0..24 {
            let (mut pages, mut ranges) = (by_pages.gather(), by_ranges.gather());
            for _ in 0..24 {
                let number = next(&mut state);
                // Near the ends of tables, and now and then no page at all.
                let table = number % 4 * block;
                let near = [0, 1, 2, 17, 40, 150, block / page - 1][number as usize / 8 % 7];
                let at = F::Input::from_bits(table + near * page);
                let range = Span::new(at, page).unwrap();
                let frame = Pa::new((1 << 30) + (number >> 3 & 0xff) * page);
                let mapping = Mapping::new(attrs::<F>(number >> 5)).pages_only();
                let change = match number >> 4 & 3 {
                    0 => Change::new().write_protect(),
                    1 => Change::new().accessed(false),
                    _ => Change::new().perms(attrs::<F>(number >> 9).perms),
                };
                let known = said(pages.query(at));
                assert_eq!(said(ranges.query(at)), known, "{}: {at}", F::NAME);
                match number >> 7 & 3 {
                    0 => {
                        let mapped = pages.map_page(at, frame, mapping);
                        assert_eq!(ranges.map(range, frame, mapping), mapped, "{at}");
                        changed += u64::from(mapped.is_ok());
                    }
                    1 => {
                        let protected = pages.protect_page(at, change);
                        assert_eq!(ranges.protect(range, change), protected, "{at}");
                        changed += u64::from(protected.is_ok());
                    }
                    2 => {
                        let mut one = None;
                        let done = ranges.unmap(range, |leaf| {
                            one = Some(leaf);
                            ControlFlow::Continue(())
                        });
                        let done = done.map(|progress| {
                            assert!(progress.is_done());
                            one
                        });
                        let [taken, also] = [pages.unmap_page(at), done]
                            // SAFETY: it is looked at, and nothing is freed.
                            .map(|it| it.map(|held| held.map(|it| unsafe { it.assume_complete() })))
                            .map(|it| it.map(said));
                        assert_eq!(also, taken, "{at}");
                        changed += u64::from(matches!(taken, Ok(Some(_))));
                    }
                    _ => {}
                }
                let known = said(pages.query(at));
                assert_eq!(said(ranges.query(at)), known, "{at}");
            }
            let finish = |gather: Gather<'_, F, &Hosted>| gather.finish(|_| ());
            finish(pages);
            finish(ranges);
            let roots = (by_pages.root(), by_ranges.root());
            let found = snapshot::<F>(&other, roots.1);
            assert!(found == snapshot::<F>(&one, roots.0), "{}", F::NAME);
            assert_eq!(one.counts(), other.counts(), "{}", F::NAME);
        }
        assert!(changed > 150, "{}: {changed}", F::NAME);
    }
}

/// Twenty pages of one table, of which one is another: none, one of other attributes, one that
/// hardware may write, or a parked one. They are unmapped with a visitor that breaks off after
/// every so many, which goes on where it stopped. Each comes out once, as it was, and is
/// invalidated; before, another page has been unmapped that was like most, or none.
fn pages_of_one_table_come_out_wherever_the_visitor_breaks_off<F: Judged>() {
    const PAGES: u64 = 20;
    let others = [
        None,
        Some(Attrs::USER_RODATA),
        Some(Attrs { dirty: false, accessed: false, ..Attrs::USER_DATA }),
        Some(Attrs::USER_DATA.with_perms(Perms::empty())),
    ];
    for (other, odd) in others.iter().flat_map(|other| [0, 7, 8, 13, 19].map(|odd| (other, odd))) {
        for (stop, known) in (1..=PAGES + 1).flat_map(|stop| [(stop, false), (stop, true)]) {
            let platform = Hosted::new(16, F::PAGE_SHIFT);
            let mut space = Space::<F>::new(&platform).unwrap();
            let at = |number: u64| Va::new(number << F::PAGE_SHIFT);
            let mut expected = Vec::new();
            for number in 0..PAGES + 2 {
                let attrs = match number == 1 + odd {
                    true => *other,
                    false => Some(Attrs::USER_DATA),
                };
                let frame = Pa::new((100 + number) << F::PAGE_SHIFT);
                if let Some(attrs) = attrs {
                    space.map_page(at(number), frame, attrs).unwrap();
                    expected.push((at(number), frame, attrs));
                }
            }
            space.make_live();
            if known {
                let _leaks = space.gather().unmap_page(at(PAGES + 1)).unwrap();
            }
            let kept = [expected.pop(), Some(expected.remove(0))];
            platform.record();

            let (mut first, mut seen, mut stops) = (at(1), Vec::new(), 0);
            let last = Va::new(at(PAGES + 1).get() - 1);
            loop {
                let (mut held, mut gather) = (Vec::new(), space.gather());
                let progress = gather
                    .unmap(Span::inclusive(first, last).unwrap(), |leaf| {
                        held.push(leaf);
                        match held.len() as u64 == stop {
                            true => ControlFlow::Break(()),
                            false => ControlFlow::Continue(()),
                        }
                    })
                    .unwrap();
                let completed = gather.issue().complete();
                for leaf in held {
                    let leaf = completed.release(leaf).unwrap();
                    seen.push((leaf.input(), leaf.frame(), leaf.attrs()));
                }
                completed.finish(|_| panic!("no table was detached"));
                match progress {
                    Progress::Done => break,
                    Progress::Stopped(at) => (first, stops) = (at, stops + 1),
                }
            }
            let what = format!("{}: {other:?} at {odd}, stop after {stop}, {known}", F::NAME);
            assert_eq!(seen, expected, "{what}");
            assert_eq!(stops, (expected.len() as u64 - 1) / stop, "{what}");
            let log = platform.take_log();
            for (page, ..) in expected {
                assert!(log.iter().any(|told| told.covers(page.get())), "{what}");
                assert!(space.query(page).is_none(), "{what}");
            }
            let left: Vec<_> = leaves(&space).iter().map(|leaf| leaf.input()).collect();
            let kept = kept.iter().flatten().map(|(page, ..)| *page).rev();
            let kept: Vec<_> = kept.filter(|page| !known || *page == at(0)).collect();
            assert_eq!(left, kept, "{what}");
        }
    }
}

for_each_format!(
    a_page_is_a_range_of_one_page,
    pages_of_one_table_come_out_wherever_the_visitor_breaks_off
);
for_each_guest_format!(a_page_is_a_range_of_one_page);

/// Bits of the format's own are part of a change, though one word does not say them.
#[test]
fn a_change_of_other_native_bits_is_another_change() {
    let platform = Hosted::new(16, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, 4 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    space.make_live();
    let mut gather = space.gather();
    // Keys of memory protection.
    for (page, native) in [(0, 1 << 59), (1, 1 << 60), (2, 1 << 60), (3, 1 << 59)] {
        let change = Change::new().perms(Perms::READ).native(native);
        gather.protect_page(Va::new(page * K4), change).unwrap();
        let attrs = gather.query(Va::new(page * K4)).unwrap().attrs();
        assert_eq!((attrs.native, attrs.perms), (native, Perms::READ), "{page}");
    }
    gather.finish(|_| ());
}

/// One member of a run is not changed as a page that looks like it is.
#[test]
fn a_page_of_a_run_is_no_page_like_the_last() {
    for liveness in [Liveness::Dead, Liveness::Live] {
        let platform = Hosted::new(64, 12).with_caps(without_flags(2));
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, 48 * K4), 0, Attrs::KERNEL_DATA).unwrap();
        common::used(&mut space, liveness);
        let read = Change::new().perms(Perms::READ);
        let mut gather = space.gather();
        gather.protect(span(0, 16 * K4), read).unwrap();
        gather.protect_page(Va::new(19 * K4), read).unwrap();
        gather.finish(|_| ());
        // The judge fails where the members of a run differ.
        let found = judge::<Arm64K4>(&platform, space.root());
        let read = |page: u64| translate::<Arm64K4>(&platform, space.root(), page * K4).unwrap().1;
        assert_eq!(found.0.len(), 4, "{found:?}");
        for (page, perms) in [(15, Perms::READ), (18, Attrs::KERNEL_DATA.perms), (19, Perms::READ)]
        {
            assert_eq!(read(page).perms, perms);
        }
    }
}

/// From the middle of a run on, behind which other pages are.
#[test]
fn a_run_is_visited_once_wherever_a_visit_begins() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 16 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    map(&mut space, span(16 * K4, 32 * K4), 64 * K4, pages).unwrap();
    for start in 0..20 {
        let mut found = Vec::new();
        let _ = space.walk(span(start * K4, (48 - start) * K4), |leaf| {
            found.push((leaf.input().get() / K4, leaf.size() / K4));
            keep_going(leaf)
        });
        let run = (start < 16).then_some((0, 16));
        let rest = (start.max(16)..48).map(|page| (page, 1));
        assert_eq!(found, run.into_iter().chain(rest).collect::<Vec<_>>(), "{start}");
    }
}

#[test]
fn a_leaf_is_said_with_its_first_address() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(K4, K4), 0, Attrs::KERNEL_DATA).unwrap();
    map(&mut space, span(M2, M2), M2, Attrs::KERNEL_DATA).unwrap();
    for (at, first) in [(K4 + 0x123, K4), (2 * K4 - 1, K4), (M2 + 0x1_2345, M2), (K4, K4)] {
        assert_eq!(space.query(Va::new(at)).unwrap().input(), Va::new(first));
    }
}

/// A change that changes nothing, after changes that are not known any more.
#[test]
fn holes_take_no_invalidation() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, 8 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    space.make_live();
    protect(&mut space, span(0, 2 * K4), Change::new().perms(Perms::READ)).unwrap();
    space.make_live();
    let (before, tables) = (platform.counts(), snapshot::<X86>(&platform, space.root()));
    protect(&mut space, span(16 * K4, 8 * K4), Change::new()).unwrap();
    protect(&mut space, span(2 * K4, 8 * K4), Change::new()).unwrap();
    assert_eq!(platform.counts().invalidations, before.invalidations);
    tables.assert_untouched(&snapshot::<X86>(&platform, space.root()));
}

/// Ranges that begin or end in the midst of a run, in one table of pages.
#[test]
fn a_part_of_a_run_is_changed_alone() {
    let read = Change::new().perms(Perms::READ);
    for (bbm, take) in [(0, false), (2, false), (0, true), (2, true)] {
        for (first, end) in [
            (10, 20),
            (10, 32),
            (20, 49),
            (18, 20),
            (20, 40),
            (8, 49),
            (24, 32),
            (16, 24),
            (40, 49),
            (9, 12),
        ] {
            let platform = Hosted::new(16, 12).with_caps(without_flags(bbm));
            let mut space = Space::<Arm64K4>::new(&platform).unwrap();
            // Pages, two runs, and pages.
            map(&mut space, span(8 * K4, 42 * K4), 8 * K4, Attrs::KERNEL_DATA).unwrap();
            space.make_live();
            let range = span(first * K4, (end - first) * K4);
            // Pages like those are known from elsewhere.
            protect(&mut space, span(49 * K4, K4), read).unwrap();
            match take {
                true => unmap(&mut space, range).unwrap(),
                false => protect(&mut space, range, read).unwrap(),
            }
            judge::<Arm64K4>(&platform, space.root());
            for page in 8..49 {
                let now = translate::<Arm64K4>(&platform, space.root(), page * K4);
                let expected = match ((first..end).contains(&page), take) {
                    (true, true) => None,
                    (true, false) => Some(Perms::READ),
                    (false, _) => Some(Attrs::KERNEL_DATA.perms),
                };
                assert_eq!(now.map(|(_, attrs)| attrs.perms), expected, "{first}..{end}: {page}");
            }
        }
    }
}

#[test]
fn a_page_is_mapped_by_what_is_kept_for_many() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let encoded = tablewright::Encoded::new(Attrs::USER_DATA).unwrap();
    for page in [1, 2, 1 << 20] {
        space.map_page(Va::new(page * K4), Pa::new(8 * K4), encoded).unwrap();
        let found = translate::<X86>(&platform, space.root(), page * K4);
        assert_eq!(found, Some((8 * K4, Attrs::USER_DATA)));
    }
}

/// The tables for what is split are those of the leaves that reach out of the range.
#[test]
fn a_block_that_ends_with_the_range_is_not_split() {
    for (first, end) in [(0, M2 + K4), (K4, 2 * M2)] {
        let platform = Hosted::new(64, 12);
        let mut space = Space::<X86>::new(&platform).unwrap();
        map(&mut space, span(0, 2 * M2), 0, Attrs::KERNEL_DATA).unwrap();
        let range = span(first, end - first);
        protect(&mut space, range, Change::new().perms(Perms::READ)).unwrap();
        assert_eq!(leaves(&space).len(), 513);
        for at in [0, K4, M2, M2 + K4, 2 * M2 - K4] {
            let perms =
                if (first..end).contains(&at) { Perms::READ } else { Attrs::KERNEL_DATA.perms };
            let now = translate::<X86>(&platform, space.root(), at);
            assert_eq!(
                now.map(|(_, attrs)| attrs.perms),
                Some(perms),
                "{first:x}..{end:x}: {at:x}"
            );
        }
    }
}

/// Of a run, without any level of FEAT_BBM, only what is cached with it takes a break.
#[test]
fn a_run_that_must_not_be_broken_takes_what_is_not_cached_with_it() {
    let platform = Hosted::new(16, 12).with_caps(without_flags(0));
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let run = span(0, 16 * K4);
    map(&mut space, run, 0, Attrs::KERNEL_DATA).unwrap();
    space.make_own();
    let other = Change::new().write_protect();
    let refused = Err(EditError::NeedsBreak(run.start()));
    for (change, expected) in [
        (Change::new().software(5), Ok(())),
        (Change::new().accessed(false), Ok(())),
        (other, refused),
    ] {
        assert_eq!(protect(&mut space, run, change), expected, "{change:?}");
    }
}

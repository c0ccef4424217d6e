//! A walk to a page starts at the table of tables that the last one went through. Whatever takes
//! that out of the tree, or makes another question of a page, is seen by the next edit of one.

use super::*;

/// Fills one page, and one that is not near it; the first is edited last.
fn two_regions<F: Judged>(platform: &Hosted) -> (Space<'_, F>, Va, u64) {
    let page = 1u64 << F::PAGE_SHIFT;
    let region = page << (2 * F::INDEX_BITS);
    let mut space = Space::<F>::new(platform).unwrap();
    for at in [region + 5 * page, 5 * page] {
        space.map_page(Va::new(at), Pa::new(9 * page), Attrs::USER_DATA).unwrap();
    }
    space.make_live();
    let near = Va::new(5 * page);
    let mut gather = space.gather();
    gather.protect_page(near, Change::new().write_protect()).unwrap();
    gather.finish(|_| ());
    (space, near, region)
}

/// Each edit of the page, where nothing is mapped any more and its tables are not there.
fn the_page_is_a_hole<F: Judged>(space: &mut Space<'_, F>, near: Va, what: &str) {
    let frame = Pa::new(7 << F::PAGE_SHIFT);
    let mut gather = space.gather();
    assert!(gather.unmap_page(near).unwrap().is_none(), "{what}");
    let change = Change::new().write_protect();
    assert_eq!(gather.protect_page(near, change), Ok(()), "{what}");
    gather.finish(|_| ());
    let without = Mapping::new(Attrs::USER_DATA).without_allocation();
    let refused = space.map_page(near, frame, without);
    assert_eq!(refused, Err(EditError::NeedsTable(near)), "{what}");
    space.map_page(near, frame, Attrs::USER_DATA).unwrap();
    assert_eq!(space.query(near).unwrap().frame(), frame, "{what}");
    let mapped = leaves(space).into_iter().next();
    let mapped = mapped.map(|leaf| (leaf.input(), leaf.frame()));
    assert_eq!(mapped, Some((near, frame)), "{what}");
    judge::<F>(space.platform(), space.root());
}

/// An address that is that of no page, near one that is.
#[test]
fn what_is_no_page_is_refused_near_one_too() {
    let platform = Hosted::new(64, 12);
    let (mut space, near, _) = two_regions::<X86>(&platform);
    let before = snapshot::<X86>(&platform, space.root());
    // Of the page, and of the hole behind it.
    for odd in [near.get() + 0x123, near.get() + K4 + 0x123].map(Va::new) {
        for frame in [0, K4] {
            let refused = space.map_page(odd, Pa::new(frame), Attrs::USER_DATA);
            assert_eq!(refused, Err(EditError::Misaligned));
        }
        let mut gather = space.gather();
        assert_eq!(gather.unmap_page(odd).map(drop), Err(EditError::Misaligned));
        assert_eq!(gather.protect_page(odd, Change::new()), Err(EditError::Misaligned));
        let replaced = gather.replace(odd, Pa::new(0), Attrs::USER_DATA);
        assert_eq!(replaced.map(drop), Err(EditError::Misaligned));
        gather.finish(|_| ());
    }
    before.assert_untouched(&snapshot::<X86>(&platform, space.root()));
}

fn a_page_is_found_after_its_tables_are_gone<F: Judged>() {
    for way in ["unmapped whole", "unmapped with more", "collapsed"] {
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let (mut space, near, region) = two_regions::<F>(&platform);
        let mut gather = space.gather();
        match way {
            "unmapped whole" => {
                let done = gather.unmap(span(0, region), keep_going).unwrap();
                assert!(done.is_done());
            }
            "unmapped with more" => {
                let done = gather.unmap(span(0, 2 * region), keep_going).unwrap();
                assert!(done.is_done());
            }
            _ => {
                let _leaks = gather.unmap_page(near).unwrap();
                let largest = Level::PAGE;
                assert_ne!(gather.collapse(span(0, region), largest, false), Ok(0));
            }
        }
        gather.finish(|_| ());
        // Frames of its tables are tables elsewhere, of regions that had none: what is near stays.
        for number in 2..6 {
            let at = span(number * region, 1 << F::PAGE_SHIFT);
            map(&mut space, at, number * region, Attrs::USER_DATA).unwrap();
        }
        the_page_is_a_hole(&mut space, near, way);
    }
}

for_each_format!(a_page_is_found_after_its_tables_are_gone);

#[test]
fn a_table_that_denies_is_seen_by_the_next_page() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let rodata = Mapping::new(Attrs::USER_RODATA);
    map(&mut space, span(0, 0x4000), 0, rodata).unwrap();
    space.make_live();
    let execute = Change::new().perms(Attrs::USER_TEXT.perms);
    let mut gather = space.gather();
    gather.protect_page(Va::new(0x1000), execute).unwrap();
    gather.protect_page(Va::new(0x2000), execute).unwrap();
    let denying = rodata.pages_only().tables_deny_execution();
    gather.map(span(M2, 0x4000), Pa::new(M2), denying).unwrap();
    let at = Va::new(M2 + 0x1000);
    let refused = gather.protect_page(at, execute);
    assert_eq!(refused, Err(EditError::Denied(at)));
    gather.finish(|_| ());
}

#[test]
fn one_page_under_tables_that_deny_is_seen_by_the_next() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let rodata = Mapping::new(Attrs::USER_RODATA).tables_deny_execution();
    space.map_page(Va::new(0), Pa::new(0), Attrs::USER_DATA).unwrap();
    space.map_page(Va::new(M2), Pa::new(0), rodata).unwrap();
    let at = Va::new(M2 + K4);
    let denied = space.map_page(at, Pa::new(0), Attrs::USER_TEXT);
    assert_eq!(denied, Err(EditError::Denied(at)));
}

#[test]
fn a_space_that_becomes_a_kernels_half_has_no_near_page_in_the_other() {
    let platform = Hosted::new(512, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    let low = Va::new(0x1000);
    space.map_page(low, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    let mut gather = space.gather();
    assert!(gather.unmap_page(low).unwrap().is_some());
    gather.finish(|_| ());
    let mut kernel = KernelHalf::new(space).unwrap();
    let mut gather = kernel.gather();
    let data = Attrs::KERNEL_DATA;
    for refused in [
        gather.map_page(Va::new(0x2000), Pa::new(0), data),
        gather.protect_page(low, Change::new().write_protect()),
        gather.unmap_page(low).map(|_| ()),
    ] {
        assert_eq!(refused, Err(EditError::InputOutOfRange));
    }
}

/// An address that is no page is never near.
#[test]
fn an_address_in_a_page_is_refused_near_and_far() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    for first in [0, G1, 5 * G1] {
        for _near in 0..2 {
            let mut gather = space.gather();
            for low in [1, 8, 0x800, 0xfff] {
                let at = Va::new(first + low);
                let change = Change::new().write_protect();
                assert_eq!(gather.protect_page(at, change), Err(EditError::Misaligned));
                assert_eq!(
                    gather.map_page(at, Pa::new(0), Attrs::USER_DATA),
                    Err(EditError::Misaligned)
                );
                let unmapped = gather.unmap_page(at).map(|_| ());
                assert_eq!(unmapped, Err(EditError::Misaligned));
            }
            let _ = gather.map_page(Va::new(first), Pa::new(0), Attrs::USER_DATA);
            gather.finish(|_| ());
        }
    }
}

/// Shared edits free tables that the last exclusive edit went through.
#[test]
fn what_was_near_is_forgotten_when_a_space_is_shared() {
    let platform = Threads::new(64, 12, 1);
    let mut space = AddressSpace::<X86, _>::new(&platform).unwrap();
    let near = Va::new(5 * K4);
    // The second goes by the tables of the first.
    for page in [Va::new(6 * K4), near] {
        space.map_page(page, Pa::new(9 * K4), Attrs::USER_DATA).unwrap();
    }
    let shared = SharedSpace::new(space).unwrap_or_else(|_| unreachable!("it is dead"));
    let mut gather = shared.gather();
    assert!(gather.unmap(span(0, G1), keep_going).unwrap().progress.is_done());
    assert!(gather.finish(|_| ()).is_ok());
    drop(gather);
    assert_eq!(platform.tables(), 2);
    let mut space = shared.into_exclusive();
    let without = Mapping::new(Attrs::USER_DATA).without_allocation();
    let refused = space.map_page(near, Pa::new(0), without);
    assert_eq!(refused, Err(EditError::NeedsTable(near)));
}

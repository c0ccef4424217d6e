//! Each edit alone: what the platform is told, in which order.

use super::*;

#[test]
fn what_is_mapped_is_published_last() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, 5 * PAGE, 2 * BLOCK), Ok(2 * BLOCK));
    assert_eq!(platform.take(), [Did::Publish]);
    assert_eq!(map_range(space, 0, 3 * BLOCK), Ok(BLOCK));
    for at in [0, 4 * PAGE, 5 * PAGE, BLOCK, 2 * BLOCK + 5 * PAGE, 3 * BLOCK - PAGE] {
        assert_eq!(frame(space, at), Some(at));
    }
    assert_eq!(frame(space, 3 * BLOCK), None);
    platform.take();
    // One page in a table that is there, and blocks.
    let mut gather = space.gather();
    let page = leaf(3 * BLOCK, Level::PAGE, Attrs::USER_DATA);
    assert_eq!(map(&mut gather, &page), Ok(Mapped::Installed));
    assert_eq!(platform.take(), [Did::Publish]);
    assert_eq!(
        gather.map(&leaf(4 * BLOCK, Level::new(1), Attrs::USER_DATA)),
        Ok(Mapped::Installed)
    );
    assert_eq!(platform.take(), [Did::Publish]);
    // More of a page: this processor forgets what it knew of it.
    let read = leaf(3 * BLOCK + PAGE, Level::PAGE, Attrs::USER_RODATA);
    assert_eq!(map(&mut gather, &read), Ok(Mapped::Installed));
    platform.take();
    let at = 3 * BLOCK + PAGE;
    let relaxed = space.relax(Va::new(at), Attrs::USER_DATA.perms, true);
    assert_eq!(relaxed, Ok(Relaxed::Done));
    let did = platform.take();
    let [Did::Publish, Did::Here(told)] = &did[..] else { panic!("{did:?}") };
    assert_eq!(told.spans(), [(at, at + PAGE - 1)]);
    let again = space.relax(Va::new(at), Attrs::USER_DATA.perms, true);
    assert_eq!(again, Ok(Relaxed::Already));
    assert_eq!(platform.take(), did);
    // Other memory for a page is a break, or is invalidated.
    let other =
        NewLeaf::new(Va::new(PAGE), Pa::new(MEMORY + 7 * PAGE), Level::PAGE, Attrs::USER_DATA);
    assert!(matches!(gather.map(&other.unwrap()), Ok(Mapped::Replaced(_))));
    let did = platform.take();
    let [Did::Publish, Did::Invalidate(told), Did::Complete, Did::Publish] = &did[..] else {
        panic!("{did:?}");
    };
    assert_eq!(told.spans(), [(PAGE, 2 * PAGE - 1)]);
}

#[test]
fn caches_are_maintained_once_for_each_part_and_before_it_is_seen() {
    for maintenance in [CLEAN, BOTH] {
        let platform = Meddled::new(maintenance, Caps::default());
        let space = platform.share::<Arm64K4>();
        let of = |attrs| Mapping::new(attrs).pages_only();
        let code = of(Attrs::KERNEL_TEXT);
        let pages = |first| (span(first, 2 * PAGE), Pa::new(MEMORY + first));
        let (at, memory) = pages(0);
        assert_eq!(space.map_range(at, memory, code), Ok(2 * PAGE));
        // In a table of its own, under one claim.
        let instructions = maintenance.instructions.then_some(Did::Instructions(0, 2 * PAGE));
        let all = [Some(Did::Clean(0, 2 * PAGE)), instructions, Some(Did::Publish)];
        assert_eq!(platform.take(), all.into_iter().flatten().collect::<Vec<_>>());
        // Data is cleaned, and no code; devices are left alone.
        let (at, memory) = pages(4 * PAGE);
        assert_eq!(space.map_range(at, memory, of(Attrs::USER_DATA)), Ok(2 * PAGE));
        let data = [4, 5].map(|page| Did::Clean(page * PAGE, PAGE));
        assert_eq!(platform.take(), [&data[..], &[Did::Publish]].concat());
        let (at, memory) = pages(8 * PAGE);
        assert_eq!(space.map_range(at, memory, of(Attrs::KERNEL_DEVICE)), Ok(2 * PAGE));
        assert_eq!(platform.take(), [Did::Publish]);
        // A page that becomes code is invalidated where instructions are.
        let (at, memory) = pages(12 * PAGE);
        assert_eq!(space.map_range(at, memory, of(Attrs::KERNEL_RODATA)), Ok(2 * PAGE));
        platform.take();
        let more = space.relax(Va::new(12 * PAGE), Perms::EXEC, true);
        assert_eq!(more, Ok(Relaxed::Done));
        let did = platform.take();
        let made_code = Did::Instructions(12 * PAGE, PAGE);
        assert_eq!(did.contains(&made_code), maintenance.instructions, "{did:?}");
        // A whole table is filled under one claim, and cleaned once.
        assert_eq!(map_range(space, BLOCK, BLOCK), Ok(BLOCK));
        assert_eq!(platform.take(), [Did::Clean(BLOCK, BLOCK), Did::Publish]);
    }
}

/// A block in the place of a table of its pages.
#[test]
fn a_collapse_forgets_before_the_table_is_gone() {
    for (attrs, alike) in [(Attrs::USER_DATA, true), (Attrs::USER_RODATA, false)] {
        let caps = Caps { invalidate_all_above: u64::MAX, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<Arm64K4>();
        assert_eq!(map_range(space, 0, BLOCK), Ok(BLOCK));
        platform.take();
        let mut gather = space.gather();
        let block = leaf(0, Level::new(1), attrs);
        assert_eq!(map(&mut gather, &block), Ok(Mapped::Collapsed));
        let did = platform.take();
        let [Did::Publish, Did::Invalidate(told), Did::Complete, Did::Publish] = &did[..] else {
            panic!("{did:?}");
        };
        assert_eq!(told.spans(), [(0, BLOCK - 1)]);
        assert!(told.ranges[0].tables && told.ranges[0].level.is_none());
        let mut gone = 0;
        assert!(gather.finish(|leaf| gone += leaf.size()).is_ok());
        // Leaves that are alike are no other's memory.
        assert_eq!(gone, if alike { 0 } else { gone });
        assert_eq!(frame(space, 5 * PAGE), Some(0));
    }
}

/// Global leaves may be remembered under any identifier, from the first on.
#[test]
fn a_flush_is_global_once_something_is() {
    type Maps = fn(&'static Space<X86>);
    let by_page: Maps = |space| {
        assert!(map_alone(space, &leaf(0, Level::PAGE, Attrs::KERNEL_DATA)).is_ok());
    };
    let by_range: Maps = |space| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA);
        assert!(space.map_range(span(0, PAGE), Pa::new(0), mapping).is_ok());
    };
    let by_change: Maps = |space| {
        assert!(map_range(space, 0, PAGE).is_ok());
        let mut gather = space.gather();
        gather.protect(span(0, PAGE), Change::new().global(true)).unwrap();
    };
    let by_none: Maps = |space| assert!(map_range(space, 0, PAGE).is_ok());
    for (makes, global) in [(by_page, true), (by_range, true), (by_change, true), (by_none, false)]
    {
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        assert!(map_range(space, BLOCK, PAGE).is_ok());
        makes(space);
        platform.take();
        unmap(space, span(BLOCK, PAGE));
        let did = platform.take();
        let told = did.iter().find_map(|did| match did {
            Did::Invalidate(told) => Some(told.global),
            _ => None,
        });
        assert_eq!(told, Some(global), "{did:?}");
    }
}

#[test]
fn what_was_global_while_shared_is_so_alone() {
    let platform = Meddled::new(NOTHING, Caps::default());
    for attrs in [Attrs::USER_DATA, Attrs::KERNEL_DATA] {
        let space = SharedSpace::<X86, _>::new(AddressSpace::new(platform).unwrap()).ok().unwrap();
        assert!(space.map_range(span(0, 2 * PAGE), Pa::new(0), Mapping::new(attrs)).is_ok());
        let mut space = space.into_exclusive();
        platform.take();
        let mut gather = space.gather();
        assert!(gather.unmap(span(0, PAGE), |_| ControlFlow::Continue(())).unwrap().is_done());
        drop(gather);
        let did = platform.take();
        let is_it = |did: &Did| matches!(did, Did::Invalidate(told) if told.global == attrs.global);
        assert!(did.iter().any(is_it), "{did:?}");
    }
}

/// A forgotten gather leaves claims: they are holes when the space is exclusive, and everything is
/// invalidated before.
#[test]
fn what_a_forgotten_gather_has_claimed_is_a_hole() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = SharedSpace::<Arm64K4, _>::new(AddressSpace::new(platform).unwrap()).ok().unwrap();
    let whole = span(0, 2 * BLOCK);
    assert_eq!(space.map_range(whole, Pa::new(0), Mapping::new(Attrs::USER_DATA)), Ok(2 * BLOCK));
    let mut gather = space.gather();
    for part in [span(0, BLOCK), span(BLOCK, PAGE)] {
        assert!(gather.top_up(1));
        assert_eq!(gather.split(part.start(), Level::PAGE), Ok(true));
        assert!(gather.unmap(part, |_| ControlFlow::Continue(())).unwrap().progress.is_done());
    }
    std::mem::forget(gather);
    platform.take();
    let mut space = space.into_exclusive();
    let did = platform.take();
    let [Did::Publish, Did::Invalidate(told), Did::Complete, Did::Publish] = &did[..] else {
        panic!("{did:?}");
    };
    assert!(told.everything);
    let mut entry = None;
    let mut frame = space.root();
    for level in (0..4).rev().map(Level::new) {
        // SAFETY: a table of the tree.
        let table = unsafe { platform.table(frame, level) };
        // SAFETY: the entry for the page at `BLOCK`.
        let bits = unsafe { table.add(Arm64K4::index(BLOCK, level)).as_ref() }.load();
        frame = Arm64K4::address(bits, level);
        entry = Some(bits);
    }
    assert_eq!(entry, Some(0));
    space.map(span(0, BLOCK), Pa::new(0), Attrs::USER_DATA).unwrap();
    space.map(span(BLOCK, PAGE), Pa::new(BLOCK), SMALL).unwrap();
}

#[test]
fn addresses_that_there_are_not_are_refused() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    let beyond = Va::new(1 << 47);
    let new = |at, memory| NewLeaf::<X86>::new(at, Pa::new(memory), Level::PAGE, Attrs::USER_DATA);
    assert_eq!(new(beyond, 0).err(), Some(EditError::InputOutOfRange));
    assert_eq!(new(Va::new(0), 1 << 52).err(), Some(EditError::OutputOutOfRange));
    assert!(new(Va::new(0), (1 << 52) - PAGE).is_ok());
    assert_eq!(space.relax(beyond, Perms::READ, false), Err(EditError::InputOutOfRange.into()));
    assert_eq!(space.query(beyond), None);
    assert_eq!(platform.take(), []);
    // The last memory that there is.
    let last = Pa::new((1 << 52) - BLOCK);
    assert_eq!(space.map_range(span(BLOCK, BLOCK), last, SMALL), Ok(BLOCK));
    let more = space.map_range(span(BLOCK, 2 * BLOCK), last, SMALL);
    assert_eq!(more, Err(EditError::OutputOutOfRange.into()));
}

/// A split forgets the block, before or after it is a table, and nothing else.
#[test]
fn a_split_forgets_the_block_alone() {
    for (bbm, breaks) in [(0, true), (2, false)] {
        let caps = Caps { bbm, invalidate_all_above: u64::MAX, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<Arm64K4>();
        for number in 0..2 {
            let block = leaf(number * BLOCK, Level::new(1), Attrs::USER_DATA);
            assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
        }
        let mut gather = space.gather();
        assert!(gather.top_up(1));
        // It is no larger than that, or not there.
        assert_eq!(gather.split(Va::new(0), Level::new(1)), Ok(false));
        assert_eq!(gather.split(Va::new(2 * BLOCK), Level::PAGE), Ok(false));
        platform.take();
        platform.meddle(When::Invalidation, 0, move || {
            assert_eq!(frame(space, PAGE), (!breaks).then_some(PAGE));
            let mut other = space.gather();
            assert!(other.top_up(1));
            let again = other.split(Va::new(PAGE), Level::PAGE);
            assert_eq!(again, if breaks { Err(Refused::Busy(Va::new(PAGE))) } else { Ok(false) });
        });
        assert_eq!(gather.split(Va::new(PAGE), Level::PAGE), Ok(true));
        let did = platform.take();
        let [Did::Publish, Did::Invalidate(told), Did::Complete, Did::Publish] = &did[..] else {
            panic!("{did:?}");
        };
        assert_eq!(told.spans(), [(0, BLOCK - 1)]);
        assert!(told.ranges[0].level == Some(Level::new(1)) && !told.ranges[0].tables);
        assert!(gather.is_clean());
    }
    // On x86 it is forgotten with the gather; until then, others name no level.
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    let block = leaf(0, Level::new(1), Attrs::USER_DATA);
    assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
    assert_eq!(map_range(space, BLOCK, PAGE), Ok(PAGE));
    let mut gather = space.gather();
    assert!(gather.top_up(1));
    platform.take();
    assert_eq!(gather.split(Va::new(PAGE), Level::PAGE), Ok(true));
    assert_eq!(platform.take(), [Did::Publish]);
    assert!(!gather.is_clean());
    assert!(of_all_levels(platform, space));
    assert!(gather.finish(|_| ()).is_ok());
    platform.take();
    assert!(!of_all_levels(platform, space));
}

/// Takes the permission to write from the page at [`BLOCK`], and says whether it is to be forgotten
/// at every level, as where another edit is not complete.
pub(super) fn of_all_levels<F: Format<Input = Va>>(
    platform: &'static Meddled,
    space: &Space<F>,
) -> bool {
    let mut other = space.gather();
    let part = span(BLOCK, PAGE);
    assert!(other.protect(part, Change::new().perms(Attrs::USER_RODATA.perms)).unwrap().changed);
    assert!(other.finish(|_| ()).is_ok());
    let did = platform.take();
    assert!(other.protect(part, Change::new().perms(Attrs::USER_DATA.perms)).unwrap().changed);
    assert!(other.finish(|_| ()).is_ok());
    platform.take();
    let told = did.iter().find_map(|did| match did {
        Did::Invalidate(told) => Some(told.ranges.clone()),
        _ => None,
    });
    told.unwrap().iter().any(|stale| stale.tables && stale.level.is_none())
}

/// Pages that touch are one range, whatever their order; those of many ranges are everything, once.
#[test]
fn pages_that_touch_are_forgotten_together() {
    let caps = Caps { invalidate_all_above: u64::MAX, ..Caps::default() };
    let platform = Meddled::new(NOTHING, caps);
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, 0, BLOCK), Ok(BLOCK));
    platform.take();
    let mut gather = space.gather();
    let mut unmap = |pages: &[u64]| {
        for page in pages {
            let taken = gather.unmap(span(page * PAGE, PAGE), |_| ControlFlow::Continue(()));
            assert!(taken.unwrap().progress.is_done());
        }
        assert!(gather.finish(|_| ()).is_ok());
        let did = platform.take();
        let [Did::Publish, Did::Invalidate(told), Did::Complete] = &did[..] else {
            panic!("{did:?}");
        };
        told.clone()
    };
    let page = |first: u64, count: u64| (first * PAGE, (first + count) * PAGE - 1);
    assert_eq!(unmap(&[9, 8, 7]).spans(), [page(7, 3)]);
    assert_eq!(unmap(&[1, 3, 4, 2]).spans(), [page(1, 1), page(2, 3)]);
    assert_eq!(unmap(&[12, 16, 13]).spans(), [page(12, 2), page(16, 1)]);
    let many: Vec<_> = (0..40).map(|number| 20 + 2 * number).collect();
    assert!(unmap(&many).everything);
    assert_eq!(unmap(&[200]).spans(), [page(200, 1)]);
}

/// Edits of an exclusive space have other numbers than those of when it was shared.
#[test]
fn what_was_held_while_shared_is_not_released_alone() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let mut space = AddressSpace::<X86, _>::new(platform).unwrap();
    space.map(span(0, 4 * PAGE), Pa::new(MEMORY), SMALL).unwrap();
    let mut gather = space.gather();
    assert!(gather.unmap(span(0, PAGE), |_| ControlFlow::Continue(())).unwrap().is_done());
    drop(gather);
    let space = SharedSpace::new(space).ok().unwrap();
    let mut held = None;
    let mut gather = space.gather();
    let keep = |leaf| {
        held = Some(leaf);
        ControlFlow::Continue(())
    };
    assert!(gather.unmap(span(PAGE, PAGE), keep).unwrap().progress.is_done());
    std::mem::forget(gather);
    let mut space = space.into_exclusive();
    let mut gather = space.gather();
    let rest = gather.unmap(span(2 * PAGE, PAGE), |_| ControlFlow::Continue(()));
    assert!(rest.unwrap().is_done());
    let completed = gather.issue().complete();
    assert!(completed.release(held.unwrap()).is_err());
}

/// At most a table's worth of memory is built, or cleaned, before it is seen.
#[test]
fn a_range_is_linked_in_parts() {
    const GIB: u64 = 1 << 30;
    let blocks = Mapping::new(Attrs::USER_DATA).largest(Level::new(1));
    let map = |maintenance, first, size, exchanges: Option<u32>| {
        let platform = Meddled::new(maintenance, Caps::default());
        let space = platform.share::<X86>();
        if let Some(exchanges) = exchanges {
            platform.meddle(When::Exchange, exchanges - 1, || ());
        }
        let mapped = space.map_range(span(first, size), Pa::new(MEMORY + first), blocks);
        assert_eq!(mapped, Ok(size));
        platform.take()
    };
    let blocks: Vec<_> = (0..512).map(|number| Did::Clean(number * BLOCK, BLOCK)).collect();
    assert_eq!(map(CLEAN, 0, GIB, None), [&blocks[..], &[Did::Publish]].concat());
    // The last argument is the least number of exchanges. For 10 GiB, one links an empty table and
    // ten link tables of blocks. For less than 1 GiB, two link tables and 511 install blocks.
    assert_eq!(map(NOTHING, 0, 10 * GIB, Some(1 + 10)), [Did::Publish]);
    assert_eq!(map(NOTHING, BLOCK, GIB - BLOCK, Some(2 + 511)), [Did::Publish]);
}

/// Tables are linked empty, whatever their memory held.
#[test]
fn a_table_is_linked_empty() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, 0, BLOCK), Ok(BLOCK));
    unmap(space, span(0, 1 << 39));
    assert_eq!(platform.frames.tables(), 1);
    let first = 1 << 39;
    assert_eq!(map_range(space, first, PAGE), Ok(PAGE));
    for shift in [12, 21, 30] {
        assert!((1..512).all(|entry| frame(space, first + (entry << shift)).is_none()));
    }
}

/// Reclaims what lies in the one table, and not in what follows it in memory.
#[test]
fn a_table_is_reclaimed_to_its_end() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let mut space = AddressSpace::<X86, _>::new(platform).unwrap();
    let page = |page: u64| (span(page * PAGE, PAGE), Pa::new(MEMORY + page * PAGE));
    let pages: Vec<_> = (0..3).chain(509..512).chain(512..1024).collect();
    for (at, memory) in pages.iter().map(|&number| page(number)) {
        space.map(at, memory, SMALL).unwrap();
    }
    let mut gone = Vec::new();
    let mut gather = space.gather();
    let part = span(0, 2 * BLOCK);
    assert!(gather.unmap(part, |_| ControlFlow::Continue(())).unwrap().is_done());
    gather.finish(|leaf| gone.push((leaf.frame().get() - MEMORY) / PAGE));
    gone.sort_unstable();
    assert_eq!(gone, pages);
    // All of a space.
    for (at, memory) in pages.iter().map(|&number| page(number)) {
        space.map(at, memory, SMALL).unwrap();
    }
    gone.clear();
    assert!(space.destroy(|leaf| gone.push((leaf.frame().get() - MEMORY) / PAGE)).is_ok());
    gone.sort_unstable();
    assert_eq!(gone, pages);
}

/// A page that no TLB holds is changed without that anything is forgotten.
#[test]
fn pages_that_become_accessible_are_published() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<Arm64K4>();
    let old = Mapping::new(Attrs { accessed: false, ..Attrs::USER_RODATA }).pages_only();
    let part = span(0, 2 * PAGE);
    assert_eq!(space.map_range(part, Pa::new(MEMORY), old), Ok(2 * PAGE));
    platform.take();
    let mut gather = space.gather();
    assert!(gather.protect(part, Change::new().accessed(true)).unwrap().changed);
    assert_eq!(platform.take(), []);
    assert!(gather.finish(|_| ()).is_ok());
    assert_eq!(platform.take(), [Did::Publish]);
}

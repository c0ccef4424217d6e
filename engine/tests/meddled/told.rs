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
        let _ = gather.split(part.start(), Level::PAGE);
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
}

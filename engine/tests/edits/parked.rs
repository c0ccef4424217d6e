//! Leaves without permissions: to hardware nothing is mapped, and they come back bit for bit.

use std::ops::ControlFlow;

use crate::common::{Decoded, is_arm, is_written_when_marked, judge, judge_with_parked, snapshot};
use tablewright::format::Arm64K4;
use tablewright::{
    Address, AddressSpace, Attrs, Caps, Change, EditError, Format, Level, Liveness, Mapping,
    Memory, Pa, Perms, Span,
};
use tablewright_hosted::Hosted;

const NONE: Change = Change::new().perms(Perms::empty());

/// Memory that is written, with everything that a leaf can keep.
fn data<F: Format>() -> Attrs {
    let attrs = match F::GLOBALS {
        true => Attrs::KERNEL_DATA,
        false => Attrs::GUEST_MEMORY,
    };
    Attrs {
        memory: Memory::NonCacheable,
        software: 1,
        // Each of the bits that are the format's own, but for those that change where the memory
        // is.
        native: F::NATIVE & !(1 << 5),
        ..attrs
    }
}

/// Returns the attributes as the walker says them, which does not tell bits that are the format's
/// own.
fn seen<F: Format>() -> Attrs {
    Attrs { native: 0, ..data::<F>() }
}

/// Whether there is room for a block and what is behind it.
fn has_room<F: Format>() -> bool {
    F::INPUT_BITS > F::shift(Level::new(1)) + 1
}

fn caps(bbm: u8, flags: bool) -> Caps {
    Caps { bbm, hardware_access: flags, hardware_dirty: flags, ..tablewright_hosted::CAPS }
}

/// The three kinds of leaves that one range can be mapped with.
fn mappings(attrs: Attrs) -> [Mapping; 3] {
    let mapping = Mapping::new(attrs).largest(Level::new(1));
    [mapping, mapping.without_runs(), mapping.pages_only()]
}

fn span<F: Format>(first: u64, pages: u64) -> Span<F::Input> {
    let page = 1u64 << F::PAGE_SHIFT;
    Span::new(F::Input::from_bits(first * page), pages * page).unwrap()
}

/// A block, and some pages behind it.
fn whole<F: Format>() -> Span<F::Input> {
    span::<F>(0, (1 << F::INDEX_BITS) + 40)
}

fn what_is_parked_comes_back<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    for (number, attrs) in [data::<F>(), Attrs { dirty: false, accessed: false, ..data::<F>() }]
        .into_iter()
        .enumerate()
    {
        for (bbm, flags) in [(0, false), (2, true)] {
            for mapping in mappings(attrs) {
                let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(bbm, flags));
                let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
                let all = whole::<F>();
                let frame = Pa::new(4 << F::shift(Level::new(1)));
                space.map(all, frame, mapping).unwrap();
                space.make_live();
                let before = snapshot::<F>(&platform, space.root());
                let seen = judge::<F>(&platform, space.root());
                let counts = platform.counts();

                let mut gather = space.gather();
                gather.protect(all, NONE).unwrap();
                gather.finish(|_| panic!("nothing was detached"));
                assert_eq!(platform.counts().invalidations, counts.invalidations + 1);
                assert!(judge::<F>(&platform, space.root()).0.is_empty());
                let mut bytes = 0;
                space.walk_all(|leaf| {
                    bytes += leaf.size();
                    assert_eq!(leaf.attrs(), attrs.with_perms(Perms::empty()));
                    let distance = leaf.input().bits();
                    assert_eq!(leaf.frame(), Pa::new(frame.get() + distance));
                });
                assert_eq!(bytes, all.size());
                // It is mapped: nothing else is mapped there.
                let again = space.map(all, Pa::new(0), mapping);
                assert_eq!(again, Err(EditError::AlreadyMapped(all.start())));

                // What changes while it is parked is seen by no walker.
                let counts = platform.counts();
                let mut gather = space.gather();
                let marked = Change::new().software(2).accessed(attrs.accessed);
                gather.protect(all, marked).unwrap();
                gather.protect(all, Change::new().software(1)).unwrap();
                gather.finish(|_| ());
                assert_eq!(platform.counts().invalidations, counts.invalidations);

                let mut gather = space.gather();
                gather.protect(all, Change::new().perms(attrs.perms)).unwrap();
                gather.finish(|_| ());
                let after = platform.counts();
                assert_eq!(after.invalidations, counts.invalidations, "{}", F::NAME);
                assert!(after.publications > counts.publications, "{}", F::NAME);
                // Without hardware that sets dirty state, a page that is made writable is dirty.
                if number == 0 || flags || !is_written_when_marked::<F>() {
                    before.assert_untouched(&snapshot::<F>(&platform, space.root()));
                    assert_eq!(judge::<F>(&platform, space.root()), seen);
                } else {
                    space.walk_all(|leaf| assert!(leaf.attrs().dirty));
                }
            }
        }
    }
}

/// A part of a block or a run is split off first; what is split, and put together again, is as it
/// was.
fn a_part_of_a_leaf_is_parked_alone<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    for liveness in [Liveness::Dead, Liveness::Live] {
        for mapping in mappings(data::<F>()) {
            let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(0, false));
            let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
            let all = whole::<F>();
            space.map(all, Pa::new(0), mapping).unwrap();
            crate::common::used(&mut space, liveness);
            let part = span::<F>(3, 300.min(1 << F::INDEX_BITS));
            let mut gather = space.gather();
            gather.protect(part, NONE).unwrap();
            gather.finish(|_| ());
            let found = judge_with_parked(&platform, &space);
            assert_eq!(found.0.len(), 3, "{}: {found:?}", F::NAME);
            let parked = found.0[1].1;
            assert_eq!(
                (found.0[1].0, parked.size, parked.attrs.perms),
                (part.start().bits(), part.size(), Perms::empty())
            );

            // A block that is parked splits into pages that are, and becomes one again.
            let mut gather = space.gather();
            gather.protect(all, NONE).unwrap();
            gather.collapse(all, Level::new(1), true).unwrap();
            gather.finish(|_| ());
            let block = space.query(F::Input::from_bits(0)).unwrap();
            assert_eq!((block.level(), block.attrs().perms), (Level::new(1), Perms::empty()));
            let mut gather = space.gather();
            gather.split(all, Level::PAGE).unwrap();
            gather.finish(|_| ());
            let page = space.query(F::Input::from_bits(7 << F::PAGE_SHIFT)).unwrap();
            assert_eq!((page.level(), page.frame()), (Level::PAGE, Pa::new(7 << F::PAGE_SHIFT)));
            assert!(judge::<F>(&platform, space.root()).0.is_empty());
            let mut gather = space.gather();
            gather.collapse(all, Level::new(1), true).unwrap();
            gather.protect(all, Change::new().perms(data::<F>().perms)).unwrap();
            gather.finish(|_| ());
            let found = judge::<F>(&platform, space.root());
            assert_eq!(found.0.len(), 1, "{}: {found:?}", F::NAME);
            assert_eq!(found.0[0].1.attrs, seen::<F>(), "{}", F::NAME);

            // What is parked comes out as it was.
            let mut gather = space.gather();
            gather.protect(part, NONE).unwrap();
            let (mut bytes, mut held) = (0, Vec::new());
            let progress = gather.unmap(all, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            assert!(progress.unwrap().is_done());
            let completed = gather.issue().complete();
            let mut out = |leaf: tablewright::Leaf<F>| {
                assert_eq!(leaf.frame().get(), leaf.input().bits());
                bytes += leaf.size();
            };
            for leaf in held {
                out(completed.release(leaf).expect("of this gather"));
            }
            completed.finish(out);
            assert_eq!(bytes, all.size(), "{}", F::NAME);
        }
    }
}

/// With no permission at all from the start.
fn what_is_mapped_parked_is_given_later<F: Decoded>() {
    if !has_room::<F>() {
        return;
    }
    for mapping in mappings(data::<F>().with_perms(Perms::empty())) {
        let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(2, true));
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        space.make_live();
        let all = whole::<F>();
        let frame = Pa::new((1 << F::OUTPUT_BITS) - (2 << F::shift(Level::new(1))));
        space.map(all, frame, mapping).unwrap();
        assert!(judge::<F>(&platform, space.root()).0.is_empty());
        let mut gather = space.gather();
        gather.protect(all, Change::new().perms(data::<F>().perms)).unwrap();
        gather.finish(|_| ());
        assert_eq!(platform.counts().invalidations, 0);
        let found = judge::<F>(&platform, space.root());
        assert_eq!(found.0.len(), 1, "{}: {found:?}", F::NAME);
        let there = found.0[0].1;
        assert_eq!((there.pa, there.size, there.attrs), (frame.get(), all.size(), seen::<F>()));
    }
}

/// A remembered leaf, from before it was parked, is not mixed with another type, or another frame.
fn what_was_remembered_is_broken<F: Decoded>() {
    if !is_arm::<F>() {
        return;
    }
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps(0, false));
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let page = span::<F>(0, 1);
    space.map(page, Pa::new(0), Mapping::new(data::<F>()).pages_only()).unwrap();
    space.make_live();
    let mut gather = space.gather();
    let count = || platform.counts().invalidations;
    gather.protect(page, NONE).unwrap();
    assert_eq!(count(), 0);
    let device = Change::new().memory(Memory::Device);
    gather.protect(page, device).unwrap();
    assert_eq!(count(), 1, "{}", F::NAME);
    gather.protect(page, Change::new().perms(data::<F>().perms)).unwrap();
    gather.protect(page, NONE.memory(Memory::Normal)).unwrap();
    assert_eq!(count(), 2, "{}", F::NAME);
    let held = gather.replace(page.start(), Pa::new(1 << 30), data::<F>());
    assert_eq!(count(), 3, "{}", F::NAME);
    assert!(held.is_ok());
    drop(gather);
    let there = judge::<F>(&platform, space.root()).0[0].1;
    assert_eq!((there.pa, there.attrs), (1 << 30, seen::<F>()));
}

/// A run that was parked may be remembered whole, and comes back member by member: it is forgotten
/// first. What is no run is not waited for.
#[test]
fn a_run_that_was_parked_is_forgotten_before_it_comes_back() {
    use tablewright::format::Arm64K4;
    for (runs, completions) in [(true, 1), (false, 0)] {
        let platform = Hosted::new(64, 12).with_caps(caps(0, false));
        let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
        let mapping = Mapping::new(data::<Arm64K4>());
        let mapping = if runs { mapping } else { mapping.without_runs() };
        let all = span::<Arm64K4>(0, 32);
        space.map(all, Pa::new(0), mapping).unwrap();
        space.make_live();
        let mut gather = space.gather();
        gather.protect(all, NONE).unwrap();
        // Nothing is given.
        gather.protect(all, Change::new().software(2)).unwrap();
        assert_eq!(platform.counts().completions, 0);
        gather.protect(all, Change::new().perms(data::<Arm64K4>().perms)).unwrap();
        assert_eq!(platform.counts().completions, completions);
    }
}

/// By the short way, too, of pages that are like those that came back last.
#[test]
fn what_comes_back_is_published() {
    use tablewright::format::Arm64K4;
    let platform = Hosted::new(64, 12).with_caps(caps(0, false));
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let mapping = Mapping::new(data::<Arm64K4>().with_perms(Perms::empty())).pages_only();
    space.map(span::<Arm64K4>(0, 64), Pa::new(0), mapping).unwrap();
    space.make_live();
    for first in [0, 16, 32] {
        let counts = platform.counts();
        let mut gather = space.gather();
        let back = Change::new().perms(data::<Arm64K4>().perms);
        gather.protect(span::<Arm64K4>(first, 16), back).unwrap();
        gather.finish(|_| ());
        let now = platform.counts();
        assert_eq!(now.publications, counts.publications + 1, "{first}");
        assert_eq!(now.invalidations, counts.invalidations);
    }
}

for_each_format!(
    what_is_parked_comes_back,
    a_part_of_a_leaf_is_parked_alone,
    what_is_mapped_parked_is_given_later,
    what_was_remembered_is_broken,
);
for_each_guest_format!(
    what_is_parked_comes_back,
    a_part_of_a_leaf_is_parked_alone,
    what_is_mapped_parked_is_given_later,
    what_was_remembered_is_broken,
);
for_each_other_shape!(
    what_is_parked_comes_back,
    a_part_of_a_leaf_is_parked_alone,
    what_is_mapped_parked_is_given_later,
    what_was_remembered_is_broken,
);

/// Walkers remember nothing of a leaf without permissions, and see nothing new in it.
#[test]
fn a_leaf_that_stays_parked_is_changed_by_a_store_alone() {
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let pages = span::<Arm64K4>(0, 4);
    space.map(pages, Pa::new(0), Attrs::USER_DATA).unwrap();
    space.make_live();
    let mut gather = space.gather();
    gather.protect(pages, NONE).unwrap();
    gather.finish(|_| ());
    let before = platform.counts();
    let mut gather = space.gather();
    gather.protect(pages, NONE.software(2)).unwrap();
    gather.finish(|_| ());
    let now = platform.counts();
    assert_eq!((now.publications, now.completions), (before.publications, before.completions));
}

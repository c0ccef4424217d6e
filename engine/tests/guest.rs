//! Properties of stage 2 alone: first tables beside each other, addresses that end with the memory
//! of the guest, and what an edit of a guest's space leaves to invalidate.

mod common;

use std::ops::ControlFlow;
use std::ptr::NonNull;

use common::{Decoded, judge, snapshot};
use tablewright::format::{Ept, Npt, Stage2};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Format, Invalidation, Ipa, Level,
    Mapping, Pa, Perms, Platform, Span, Stale,
};
use tablewright_hosted::{Hosted, Told};

fn span(first: u64, size: u64) -> Span<Ipa> {
    Span::new(Ipa::new(first), size).unwrap()
}

/// Levels, tables beside each other at the root, entries of all of them.
fn shape<F: Format>() -> (u8, usize, usize) {
    assert!(!F::is_leaf_level(F::root_level().up()));
    (F::LEVELS, F::root_tables(), F::entries(F::root_level()))
}

#[test]
fn the_first_table_follows_from_the_input_size() {
    // 16 tables at a level before one more level.
    assert_eq!(shape::<Stage2<12, 32>>(), (2, 4, 2048));
    assert_eq!(shape::<Stage2<12, 34>>(), (2, 16, 8192));
    assert_eq!(shape::<Stage2<12, 35>>(), (3, 1, 32));
    assert_eq!(shape::<Stage2<12, 39>>(), (3, 1, 512));
    assert_eq!(shape::<Stage2<12, 40>>(), (3, 2, 1024));
    assert_eq!(shape::<Stage2<12, 43>>(), (3, 16, 8192));
    assert_eq!(shape::<Stage2<12, 44>>(), (4, 1, 32));
    assert_eq!(shape::<Stage2<12, 48>>(), (4, 1, 512));
    assert_eq!(shape::<Stage2<12, 40, true>>(), (3, 2, 1024));
    assert_eq!(shape::<Stage2<12, 52, true>>(), (4, 16, 8192));
    assert_eq!(shape::<Stage2<14, 32>>(), (2, 1, 128));
    assert_eq!(shape::<Stage2<14, 40>>(), (2, 16, 32768));
    assert_eq!(shape::<Stage2<14, 41>>(), (3, 1, 32));
    assert_eq!(shape::<Stage2<14, 48>>(), (3, 2, 4096));
    assert_eq!(shape::<Stage2<14, 51, true>>(), (3, 16, 32768));
    assert_eq!(shape::<Stage2<14, 52, true>>(), (4, 1, 32));
    assert_eq!(shape::<Stage2<16, 32>>(), (2, 1, 8));
    assert_eq!(shape::<Stage2<16, 42>>(), (2, 1, 8192));
    assert_eq!(shape::<Stage2<16, 46>>(), (2, 16, 131_072));
    assert_eq!(shape::<Stage2<16, 47>>(), (3, 1, 32));
    assert_eq!(shape::<Stage2<16, 52, true>>(), (3, 1, 1024));
    assert_eq!(shape::<Ept<4>>(), (4, 1, 512));
    assert_eq!(shape::<Ept<5>>(), (5, 1, 512));
    assert_eq!(shape::<Npt<4>>(), (4, 1, 512));
    // No run is larger than the input space.
    assert_eq!(<Stage2<16, 33>>::contiguous(Level::new(1)), 0);
    assert_eq!(<Stage2<16, 34>>::contiguous(Level::new(1)), 5);
    assert_eq!(<Stage2<16, 33>>::contiguous(Level::PAGE), 5);
}

/// Maps, changes and unmaps around `border`, an address between two tables of the root, judged by
/// the walker.
fn edit_across<F: Decoded<Input = Ipa>>(border: u64) {
    let platform = Hosted::new(64, F::PAGE_SHIFT);
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let tables = F::root_tables() as u64;
    assert_eq!(platform.counts().tables, tables);
    assert!(space.root().is_aligned(F::PAGE_SHIFT + tables.ilog2()));

    let mut gather = space.gather();
    let page = 1u64 << F::PAGE_SHIFT;
    let across = span(border - 3 * page, 6 * page);
    let mapping = Mapping::new(Attrs::GUEST_MEMORY).pages_only();
    gather.map(across, Pa::new(8 * page), mapping).unwrap();
    let found = judge::<F>(&platform, gather.root());
    assert_eq!(found.0.len(), 1);
    assert_eq!(found.0[0].0, border - 3 * page);
    assert_eq!((found.0[0].1.size, found.0[0].1.pa), (6 * page, 8 * page));
    let leaf = gather.query(Ipa::new(border + page)).unwrap();
    assert_eq!(leaf.frame(), Pa::new(12 * page));

    let change = Change::new().perms(Perms::READ.and_user());
    gather.protect(span(border - page, 2 * page), change).unwrap();
    assert_eq!(judge::<F>(&platform, gather.root()).0.len(), 3);

    // The last page that there is.
    let end = 1u64 << F::INPUT_BITS;
    let top = span(end - page, page);
    gather.map(top, Pa::new(0), Attrs::GUEST_DEVICE).unwrap();
    let last = judge::<F>(&platform, gather.root()).0.pop().unwrap();
    assert_eq!((last.0, last.1.attrs), (end - page, Attrs::GUEST_DEVICE));

    // None behind it, and none below zero.
    for outside in [end, end - page, 1 << 63, u64::MAX - (2 * page - 1)] {
        let map = gather.map(span(outside, 2 * page), Pa::new(0), Attrs::GUEST_MEMORY);
        assert_eq!(map, Err(EditError::InputOutOfRange), "{outside:#x}");
        assert!(gather.query(Ipa::new(outside | end)).is_none());
    }

    let mut seen = 0;
    gather.walk_all(|_| seen += 1);
    assert_eq!(seen, 7);
    let all = span(0, end);
    let progress = gather.unmap(all, |_| ControlFlow::Continue(()));
    assert!(progress.unwrap().is_done());
    gather.finish(|_| ());
    assert_eq!(platform.counts().tables, tables, "only the root is left");
    assert!(space.destroy(|_| ()).is_ok());
    let counts = platform.counts();
    assert_eq!((counts.tables, counts.bad_frees), (0, 0));
}

#[test]
fn tables_beside_each_other_are_one() {
    edit_across::<Stage2<12, 40>>(1 << 39);
    edit_across::<Stage2<12, 52, true>>(15 << 48);
    edit_across::<Stage2<14, 40>>(9 << 36);
    // Those with one table, between two of its entries.
    edit_across::<Stage2<12, 48, false, true>>(1 << 47);
    edit_across::<Ept<4>>(1 << 47);
    edit_across::<Ept<5, true>>(1 << 56);
    edit_across::<Npt<4>>(1 << 47);
}

#[test]
fn a_root_is_aligned_whatever_was_taken_before() {
    type F = Stage2<12, 43>;
    let platform = Hosted::new(64, 12);
    let level = Level::PAGE;
    let taken: Vec<Pa> = (0..3).map(|_| platform.alloc_table(level).unwrap()).collect();
    let root = platform.alloc_root(F::root_level(), 16).unwrap();
    assert!(root.is_aligned(12 + 4));
    assert!(!taken.contains(&root));
    // What was passed over is not lost: 64 frames in all.
    let mut rest = Vec::new();
    while let Some(frame) = platform.alloc_table(level) {
        assert!(frame < root || frame.get() >= root.get() + (16 << 12), "{frame} twice");
        rest.push(frame);
    }
    assert_eq!(rest.len(), 64 - 16 - 3);
    assert_eq!(platform.alloc_root(F::root_level(), 2), None);
    assert_eq!(platform.counts().tables, 64);
    // SAFETY: the frames are not used (2.), and each is freed once (1.).
    unsafe {
        platform.free_root(root, F::root_level(), 16);
        for frame in taken.into_iter().chain(rest) {
            platform.free_table(frame, level);
        }
    }
    assert_eq!(platform.counts().tables, 0);
    assert_eq!(platform.counts().bad_frees, 0);
    // And again, out of what was given back; no frame of it is handed out twice.
    let again = platform.alloc_root(F::root_level(), 16).unwrap();
    let mut singles = 0;
    while let Some(frame) = platform.alloc_table(level) {
        assert!(frame < again || frame.get() >= again.get() + (16 << 12));
        singles += 1;
    }
    assert_eq!(singles, 48);
}

#[test]
fn a_root_that_cannot_be_had_is_no_space() {
    let platform = Hosted::new(64, 12);
    for allowed in 0..2 {
        platform.limit_allocations(Some(allowed));
        assert!(AddressSpace::<Stage2<12, 40>, _>::new(&platform).is_none());
        assert_eq!(platform.counts().tables, 0);
    }
    platform.limit_allocations(Some(2));
    assert!(AddressSpace::<Stage2<12, 40>, _>::new(&platform).is_some());
    assert!(AddressSpace::<Stage2<12, 40>, _>::new(&platform).is_none());
}

/// A platform that has only what is required.
struct Plain(Hosted);

// SAFETY: passed on.
unsafe impl Platform for Plain {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.0.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.0.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.invalidate(what);
    }
}

#[test]
fn a_platform_without_roots_has_formats_with_one_table() {
    let platform = Plain(Hosted::new(64, 12));
    assert!(AddressSpace::<Stage2<12, 40>, _>::new(&platform).is_none());
    for _ in 0..2 {
        let space = AddressSpace::<Stage2<12, 39>, _>::new(&platform).unwrap();
        assert!(space.destroy(|_| ()).is_ok());
        let space = AddressSpace::<Ept<4>, _>::new(&platform).unwrap();
        assert!(space.destroy(|_| ()).is_ok());
    }
    assert_eq!(platform.0.counts().tables, 0);
    assert_eq!(platform.0.counts().bad_frees, 0);
}

/// A live space with a block, and what splitting it has invalidated before it is done, and after.
fn split<F: Decoded<Input = Ipa>>(caps: Caps) -> (Vec<Stale>, Vec<Stale>) {
    let platform = Hosted::new(64, F::PAGE_SHIFT).with_caps(caps);
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap().with_id(7);
    let block = span(0, 1 << F::shift(Level::new(1)));
    space.map(block, Pa::new(0), Attrs::GUEST_MEMORY).unwrap();
    space.make_live();
    let root = space.root();
    let ranges = |log: Vec<Told>| {
        let of_this_guest = |told: &Told| {
            (told.id, told.root, told.global, told.everything) == (7, root, false, false)
        };
        assert!(log.iter().all(of_this_guest));
        log.into_iter().flat_map(|told| told.ranges).collect()
    };
    platform.record();
    let mut gather = space.gather();
    gather.split(block, Level::PAGE).unwrap();
    let before = ranges(platform.take_log());
    gather.finish(|_| ());
    (before, ranges(platform.take_log()))
}

#[test]
fn a_block_is_broken_on_arm_and_split_in_place_on_x86() {
    let block =
        |shift: u32, level, tables| Stale { first: 0, last: (1 << shift) - 1, level, tables };
    let arm = block(21, Some(Level::new(1)), false);
    // As many as a table has pages: the range is named.
    let caps = Caps { invalidate_all_above: 512, ..tablewright_hosted::CAPS };
    assert_eq!(split::<Stage2<12, 40>>(caps), (vec![arm], vec![]));
    let bbm2 = Caps { bbm: 2, ..caps };
    let x86 = block(21, None, true);
    assert_eq!(split::<Stage2<12, 40>>(bbm2), (vec![], vec![x86]));
    assert_eq!(split::<Ept<4>>(caps), (vec![], vec![x86]));
    assert_eq!(split::<Npt<4>>(caps), (vec![], vec![x86]));
}

/// Takes the permission to write away, and gives it back: that the page was written is not
/// forgotten.
fn dirty_stays<F: Decoded<Input = Ipa>>() {
    let platform = Hosted::new(64, F::PAGE_SHIFT);
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let page = span(0, 1 << F::PAGE_SHIFT);
    space.map(page, Pa::new(0), Attrs::GUEST_MEMORY).unwrap();
    let root = space.root();
    let mut gather = space.gather();
    let attrs = |space: &AddressSpace<F, &Hosted>| {
        let found = judge::<F>(&platform, root).0[0].1.attrs;
        assert_eq!(space.query(Ipa::new(0)).unwrap().attrs(), found);
        found
    };
    let before = snapshot::<F>(&platform, root);
    let protect = Change::new().write_protect();
    gather.protect(page, protect).unwrap();
    let protected = attrs(&gather);
    assert!(protected.dirty && !protected.perms.intersects(Perms::ANY_WRITE));
    let allow = Change::new().perms(Perms::all());
    gather.protect(page, allow).unwrap();
    assert_eq!(attrs(&gather), Attrs::GUEST_MEMORY);
    before.assert_untouched(&snapshot::<F>(&platform, root));
    // Clean again: the next write is seen.
    let clean = Change::new().dirty(false);
    gather.protect(page, clean).unwrap();
    let clean = attrs(&gather);
    assert!(!clean.dirty && clean.perms.contains(Perms::ANY_WRITE));
    gather.finish(|_| ());
}

#[test]
fn a_page_that_loses_the_permission_to_write_stays_dirty() {
    dirty_stays::<Stage2<12, 40>>();
    dirty_stays::<Stage2<16, 33, false, true>>();
    dirty_stays::<Ept<4>>();
    dirty_stays::<Npt<5>>();
}

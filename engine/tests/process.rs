//! The address space of a process: fork, and copy on write. Against a plain model, judged by the
//! separate walker.

mod common;

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Decoded, Dice, Judged, Model, Stretches, is_arm, judge, judge_with_parked, snapshot};
use proptest::prelude::*;
use tablewright::format::{Arm64K4, Arm64K16, Arm64K64Wide, X86_64};
use tablewright::{
    AddressSpace, Attrs, Caps, Change, EditError, Half, Leaf, Level, Liveness, Mapping, Memory, Pa,
    Perms, Platform, Span, Va,
};
use tablewright_hosted::Hosted;

const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;

fn caps(bbm: u8, flags: bool) -> Caps {
    Caps { bbm, hardware_access: flags, hardware_dirty: flags, ..Caps::CONSERVATIVE }
}

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// A mapped piece: addresses and sizes in pages, memory at the same offset in a block or not,
/// attributes, kind of leaves.
#[derive(Clone, Debug)]
struct Piece {
    first: u64,
    pages: u64,
    shift: u64,
    attrs: u8,
    leaves: u8,
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let piece = (0..4000u64, 1..1500u64, 0..3u64, 0..4u8, 0..3u8);
    let piece = piece.prop_map(|(first, pages, shift, attrs, leaves)| Piece {
        first,
        pages,
        shift: shift * shift * 16,
        attrs,
        leaves,
    });
    prop::collection::vec(piece, 1..8)
}

/// A space with the pieces that do not overlap others, and its model.
fn filled<'h, F: Judged>(
    platform: &'h Hosted,
    pieces: &[Piece],
) -> (AddressSpace<F, &'h Hosted>, Model) {
    let mut space = AddressSpace::<F, _>::new(platform).unwrap();
    let mut model = Model::default();
    let page = 1u64 << F::PAGE_SHIFT;
    for piece in pieces {
        let at = span(piece.first * page, piece.pages * page);
        let attrs = [
            Attrs::USER_DATA,
            Attrs::USER_TEXT,
            Attrs::USER_RODATA,
            Attrs::USER_DATA.with_perms(Perms::empty()),
        ][piece.attrs as usize];
        let mapping = match piece.leaves {
            0 => Mapping::new(attrs),
            1 => Mapping::new(attrs).without_runs(),
            _ => Mapping::new(attrs).pages_only(),
        };
        let frame = (piece.first + piece.shift) * page + (1 << 40);
        match space.map(at, Pa::new(frame), mapping) {
            Ok(()) => model.map(at.start().get(), at.size(), frame, attrs),
            Err(error) => assert!(matches!(error, EditError::AlreadyMapped(_)), "{error}"),
        }
    }
    (space, model)
}

fn fork<F: Judged>(pieces: &[Piece], at: (u64, u64), bbm: u8, flags: bool, how: u8) {
    let platform = Hosted::new(400, F::PAGE_SHIFT).with_caps(caps(bbm, flags));
    let (mut parent, mut before) = filled::<F>(&platform, pieces);
    parent.make_live();
    let page = 1u64 << F::PAGE_SHIFT;
    let at = span(at.0 * page, at.1 * page);
    let (first, last) = (at.start().get(), at.last().get());
    let change = match how {
        0 => Change::new().write_protect(),
        1 => Change::new(),
        2 => Change::new().perms(Perms::empty()),
        _ => Change::new().perms(Attrs::USER_RODATA.perms),
    };

    // With too few tables nothing is mapped otherwise than before.
    let mut child = AddressSpace::<F, _>::new(&platform).unwrap();
    let tables = before.stretches();
    for few in 0.. {
        platform.limit_allocations(Some(few));
        let mut told = Stretches::default();
        let (mut gather, mut into) = (parent.gather(), child.gather());
        let forked = gather.fork(at, change, &mut into, |leaf: Leaf<F>| {
            told.add(
                leaf.input().get(),
                common::Mapped { size: leaf.size(), pa: leaf.frame().get(), attrs: leaf.attrs() },
            );
        });
        drop((gather, into));
        platform.limit_allocations(None);
        let Err(error) = forked else {
            // What was told of is what the child has.
            assert_eq!(told, judge_with_parked(&platform, &child));
            break;
        };
        assert_eq!(error, EditError::OutOfTables);
        assert_eq!(told, Stretches::default());
        assert_eq!(judge_with_parked(&platform, &parent), tables);
        assert_eq!(judge_with_parked(&platform, &child), Stretches::default());
    }
    before.change(first, last, |attrs| change.apply_on(attrs, F::RULE, &caps(bbm, flags)));
    assert_eq!(judge_with_parked(&platform, &parent), before.stretches());
    let gone = before.unmap(first, last);
    assert_eq!(judge_with_parked(&platform, &child), gone.sorted());

    // What is there already is not overwritten, and nothing changes.
    if !before.stretches().0.is_empty() || judge_with_parked(&platform, &child).0.is_empty() {
        return;
    }
    let whole = snapshot::<F>(&platform, parent.root());
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let again = gather.fork(at, change, &mut into, |_| ());
    assert!(matches!(again, Err(EditError::AlreadyMapped(_))));
    drop((gather, into));
    whole.assert_untouched(&snapshot::<F>(&platform, parent.root()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]

    #[test]
    fn a_fork_is_the_parent_as_it_is_changed(
        pieces in pieces(), first in 0..4000u64, pages in 1..3000u64, bbm in 0..3u8,
        flags: bool, how in 0..4u8,
    ) {
        fork::<X86_64<4>>(&pieces, (first, pages), bbm, flags, how);
        fork::<Arm64K4>(&pieces, (first, pages), bbm, flags, how);
        fork::<Arm64K16>(&pieces, (first, pages), bbm, flags, how);
    }

    #[test]
    fn a_page_that_is_replaced_is_alone_in_that(
        pieces in pieces(), pages in prop::collection::vec(0..6000u64, 1..20), bbm in 0..3u8,
        flags: bool,
    ) {
        replace::<X86_64<4>>(&pieces, &pages, bbm, flags);
        replace::<Arm64K4>(&pieces, &pages, bbm, flags);
        replace::<Arm64K64Wide>(&pieces, &pages, bbm, flags);
    }
}

fn replace<F: Judged>(pieces: &[Piece], pages: &[u64], bbm: u8, flags: bool) {
    let platform = Hosted::new(400, F::PAGE_SHIFT).with_caps(caps(bbm, flags));
    let (mut space, mut model) = filled::<F>(&platform, pieces);
    space.make_live();
    let size = 1u64 << F::PAGE_SHIFT;
    for &page in pages {
        let (at, to) = (Va::new(page * size), Pa::new((1 << 41) + page * size));
        let found = model.lookup(at.get());
        platform.record();
        let mut gather = space.gather();
        let replaced = gather.replace(at, to, Attrs::USER_DATA);
        let completed = gather.issue().complete();
        match (found, replaced) {
            (None, Err(error)) => assert_eq!(error, EditError::NotMapped(at)),
            (Some((was, attrs)), Ok(held)) => {
                let leaf = completed.release(held).unwrap();
                assert_eq!((leaf.input(), leaf.frame(), leaf.size()), (at, Pa::new(was), size));
                assert_eq!(leaf.attrs(), attrs);
                let _ = model.unmap(at.get(), at.get() + (size - 1));
                model.map(at.get(), size, to.get(), Attrs::USER_DATA);
                // Each replacement is forgotten, whether it was broken or not.
                let told = platform.take_log();
                assert!(told.iter().any(|told| told.covers(at.get())), "{told:?}");
            }
            (found, replaced) => panic!("{found:?} {replaced:?}"),
        }
        completed.finish(|_| ());
        assert_eq!(judge_with_parked(&platform, &space), model.stretches());
    }
}

#[test]
fn a_replaced_page_is_broken_where_the_architecture_demands_it() {
    fn counts<F: Decoded<Input = Va>>() -> (u64, u64) {
        let platform = Hosted::new(16, 12).with_caps(caps(2, false));
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        let ro = Mapping::new(Attrs::USER_RODATA).pages_only();
        space.map(span(0, 4 * K4), Pa::new(0), ro).unwrap();
        space.make_live();
        let before = platform.counts();
        let mut gather = space.gather();
        let held = gather.replace(Va::new(K4), Pa::new(M2), Attrs::USER_DATA);
        let in_place = platform.counts().invalidations - before.invalidations;
        let completed = gather.issue().complete();
        let leaf = completed.release(held.unwrap()).unwrap();
        assert_eq!(leaf.frame(), Pa::new(K4));
        let all = platform.counts().invalidations - before.invalidations;
        (in_place, all)
    }
    assert_eq!(counts::<X86_64<4>>(), (0, 1));
    assert_eq!(counts::<Arm64K4>(), (1, 1));
}

#[test]
fn a_replacement_that_is_refused_changes_nothing() {
    fn refuse<F: Judged>() {
        let platform = Hosted::new(16, 12).with_caps(caps(2, true));
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        space.map(span(0, M2), Pa::new(0), Attrs::KERNEL_DATA).unwrap();
        space.make_own();
        let whole = snapshot::<F>(&platform, space.root());
        let mut gather = space.gather();
        let data = Attrs::KERNEL_DATA;
        let mut refused = |at, to| gather.replace(Va::new(at), Pa::new(to), data).err();
        assert_eq!(refused(0x800, M2), Some(EditError::Misaligned));
        assert_eq!(refused(0, 0x800), Some(EditError::Misaligned));
        assert_eq!(refused(0, 1 << 56), Some(EditError::OutputOutOfRange));
        assert_eq!(refused(1 << 56, 0), Some(EditError::InputOutOfRange));
        assert_eq!(refused(M2, 0), Some(EditError::NotMapped(Va::new(M2))));
        if is_arm::<F>() {
            let broken = EditError::NeedsBreak(Va::new(K4));
            assert_eq!(refused(K4, M2), Some(broken));
        }
        drop(gather);
        whole.assert_untouched(&snapshot::<F>(&platform, space.root()));
    }
    refuse::<X86_64<4>>();
    refuse::<Arm64K4>();
}

#[test]
fn a_fork_whose_visitor_unwinds_has_everything_forgotten() {
    let platform = Hosted::new(64, 12).with_caps(caps(2, false));
    let mut parent = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
    parent.map(span(0, M2), Pa::new(0), mapping).unwrap();
    parent.make_live();
    let mut child = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    platform.record();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let (mut gather, mut into) = (parent.gather(), child.gather());
        let protect = Change::new().write_protect();
        let mut told = 0;
        let _ = gather.fork(span(0, M2), protect, &mut into, |_| {
            told += 1;
            assert!(told < 100, "enough");
        });
    }));
    assert!(unwound.is_err());
    let told = platform.take_log();
    assert_eq!(told.len(), 1);
    assert!(told[0].everything, "{told:?}");
    // The child has the leaves that it was told of.
    assert_eq!(child.query(Va::new(99 * K4)).map(|leaf| leaf.level()), Some(Level::PAGE));
    assert!(child.query(Va::new(100 * K4)).is_none());
    assert!(!parent.query(Va::new(0)).unwrap().attrs().perms.contains(Perms::WRITE));
}

/// An entry that a break has taken out is put back, or other edits take it for theirs: a block for
/// a table that they have built.
#[test]
fn a_fork_whose_visitor_unwinds_leaves_nothing_suspended() {
    let mapping = Mapping::new(Attrs::USER_DATA);
    let protect = Change::new().write_protect();
    for (mapping, change) in [
        (mapping, protect),
        (mapping.pages_only(), protect),
        (mapping, Change::new().memory(Memory::NonCacheable)),
        (mapping.pages_only(), Change::new().memory(Memory::NonCacheable)),
    ] {
        for size in [16 * K4, M2, 16 * M2] {
            let platform = Hosted::new(64, 12).with_caps(caps(0, false));
            let mut parent = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
            parent.map(span(0, size), Pa::new(M2), mapping).unwrap();
            parent.make_live();
            let mut child = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let (mut gather, mut into) = (parent.gather(), child.gather());
                let _ = gather.fork(span(0, size), change, &mut into, |_| panic!("enough"));
            }));
            assert!(unwound.is_err());
            let mut mapped = 0;
            parent.walk_all(|leaf| {
                assert_eq!(leaf.frame().get() - M2, leaf.input().get());
                mapped += leaf.size();
            });
            assert_eq!(mapped, size);
        }
    }
}

/// A run without permissions may still be cached as one leaf, and comes back in parts.
#[test]
fn a_fork_that_gives_permissions_completes_what_took_them() {
    let platform = Hosted::new(64, 12).with_caps(caps(0, false));
    let mut parent = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let run = span(0, 16 * K4);
    parent.map(run, Pa::new(0), Attrs::USER_DATA).unwrap();
    parent.make_live();
    let mut child = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    gather.protect(run, Change::new().perms(Perms::empty())).unwrap();
    assert_eq!(platform.counts().completions, 0);
    let back = Change::new().perms(Attrs::USER_DATA.perms);
    let mut completed = u64::MAX;
    let told = |_| completed = completed.min(platform.counts().completions);
    gather.fork(run, back, &mut into, told).unwrap();
    assert!(completed > 0 && completed < u64::MAX);
}

/// A table that the child's gather has detached is forgotten before another is in its place, and
/// what a child in use gets is published.
#[test]
fn a_fork_into_a_child_in_use_is_edited_as_any_space() {
    let [of_parent, of_child] = [(); 2].map(|()| Hosted::new(64, 12).with_caps(caps(0, false)));
    let mut parent = AddressSpace::<Arm64K4, _>::new(&of_parent).unwrap();
    let pages = Mapping::new(Attrs::USER_DATA).pages_only();
    parent.map(span(0, M2), Pa::new(0), pages).unwrap();
    let mut child = AddressSpace::<Arm64K4, _>::new(&of_child).unwrap();
    child.map(span(0, M2), Pa::new(M2), pages).unwrap();
    child.make_live();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    assert!(into.unmap(span(0, M2), |_| ControlFlow::Continue(())).unwrap().is_done());
    of_child.limit_allocations(Some(0));
    let completions = of_child.counts().completions;
    let mut fork = |into: &mut _| gather.fork(span(0, M2), Change::new(), into, |_| ());
    assert_eq!(fork(&mut into), Err(EditError::OutOfTables));
    assert_eq!(of_child.counts().completions, completions + 1);
    of_child.limit_allocations(None);
    assert_eq!(fork(&mut into), Ok(()));
    let publications = of_child.counts().publications;
    into.finish(|_| ());
    assert_eq!(of_child.counts().publications, publications + 1);

    // Pages that the child's gather has unmapped, in a table that stays.
    drop(gather);
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let few = span(4 * K4, 4 * K4);
    assert!(into.unmap(few, |_| ControlFlow::Continue(())).unwrap().is_done());
    let (before, mut completed) = (of_child.counts().completions, 0);
    let told = |_| completed = of_child.counts().completions;
    gather.fork(few, Change::new(), &mut into, told).unwrap();
    assert_eq!(completed, before + 1);
}

#[test]
fn a_fork_tells_of_a_run_once() {
    let platform = Hosted::new(64, 12).with_caps(caps(2, false));
    let mut parent = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    parent.map(span(0, 36 * K4), Pa::new(0), Attrs::USER_RODATA).unwrap();
    let mut child = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let mut told = Vec::new();
    let each = |leaf: Leaf<Arm64K4>| told.push((leaf.input().get() / K4, leaf.size() / K4));
    gather.fork(span(0, 36 * K4), Change::new(), &mut into, each).unwrap();
    assert_eq!(told, [(0, 16), (16, 16), (32, 1), (33, 1), (34, 1), (35, 1)]);
}

/// Of the parent what was changed is invalidated, and not all that it has.
#[test]
fn a_fork_invalidates_what_it_has_changed() {
    let platform =
        Hosted::new(64, 12).with_caps(Caps { invalidate_all_above: 1 << 20, ..caps(0, false) });
    let mut parent = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    parent.map(span(0, 8 * K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    parent.make_live();
    let mut child = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    platform.record();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let heap = span(2 * K4, 4 * K4);
    gather.fork(heap, Change::new().write_protect(), &mut into, |_| ()).unwrap();
    gather.finish(|_| ());
    let told = platform.take_log();
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].everything, told[0].spans()), (false, vec![(2 * K4, 6 * K4 - 1)]));
}

/// Before its visitor is called for the first time.
#[test]
fn what_a_fork_makes_global_is_invalidated_as_global_if_its_visitor_unwinds() {
    let platform = Hosted::new(64, 12);
    let mut parent = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    parent.map(span(0, 4 * K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    parent.make_live();
    let mut child = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    platform.record();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let (mut gather, mut into) = (parent.gather(), child.gather());
        let global = Change::new().global(true);
        let _ = gather.fork(span(0, 4 * K4), global, &mut into, |_| panic!("enough"));
    }));
    assert!(unwound.is_err());
    let told = platform.take_log();
    assert!(told.iter().all(|told| told.global), "{told:?}");
}

/// Nothing is refused for want of a break where hardware has no rule about breaks.
#[test]
fn a_page_of_the_own_space_is_replaced_where_no_break_is_needed() {
    // A page, and one of a block.
    for size in [K4, M2] {
        let platform = Hosted::new(64, 12);
        let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
        space.map(span(0, size), Pa::new(0), Attrs::USER_RODATA).unwrap();
        space.make_own();
        let mut gather = space.gather();
        let held = gather.replace(Va::new(0), Pa::new(8 * K4), Attrs::USER_DATA).unwrap();
        let completed = gather.issue().complete();
        assert_eq!(completed.release(held).unwrap().frame(), Pa::new(0));
        completed.finish(|_| ());
        assert_eq!(space.query(Va::new(0)).unwrap().frame(), Pa::new(8 * K4));
    }
}

/// The tables of a fork that failed stay, and deny nothing: the child does not know of them.
#[test]
fn a_child_knows_the_tables_of_a_fork_that_failed() {
    let [of_parent, of_child] = [(); 2].map(|()| Hosted::new(64, 12));
    let mut parent = AddressSpace::<X86_64<4>, _>::new(&of_parent).unwrap();
    let mut child = AddressSpace::<X86_64<4>, _>::new(&of_child).unwrap();
    let denying = Mapping::new(Attrs::USER_DATA).tables_deny_execution();
    for at in [0, M2] {
        parent.map(span(at, K4), Pa::new(0), denying).unwrap();
    }
    of_child.limit_allocations(Some(3));
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let failed = gather.fork(span(0, 2 * M2), Change::new(), &mut into, |_| ());
    assert_eq!(failed, Err(EditError::OutOfTables));
    drop(into);
    let at = Va::new(K4);
    child.map_page(at, Pa::new(0), Attrs::USER_TEXT).unwrap();
    let leaf = tablewright_walker::translate(
        X86_64::<4>::REGIME,
        child.root().get(),
        K4,
        &mut |table, index| of_child.read(Pa::new(table), index).unwrap_or(0),
    );
    assert!(leaf.unwrap().access.user.execute);
}

/// A tree that other software has made, with tables that deny: a fork has what is effective in it,
/// in tables that deny nothing.
#[test]
fn a_fork_of_an_adopted_tree_has_what_is_effective_there() {
    fn check<F: Judged>() {
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let dice = Dice::new(11);
        // `words` derives the permission to write from DBM, and does not see APTable.
        let write = if is_arm::<F>() { Perms::EXEC } else { Perms::ANY_WRITE };
        let denied = [Perms::empty(), write, Perms::ANY_EXEC, Perms::USER_EXEC];
        for _ in 0..60 {
            let mut made = AddressSpace::<F, _>::new(&platform).unwrap();
            let page = 1u64 << F::PAGE_SHIFT;
            let block = page << F::INDEX_BITS;
            for (number, attrs) in
                [Attrs::KERNEL_TEXT, Attrs::USER_DATA, Attrs::USER_TEXT, Attrs::KERNEL_DATA]
                    .into_iter()
                    .enumerate()
            {
                let at = span(number as u64 * page, page);
                made.map(at, Pa::new(dice.roll(64) * page), attrs).unwrap();
                let at = span((2 + number as u64) * block, block);
                made.map(at, Pa::new(dice.roll(64) * block), attrs).unwrap();
            }
            // A contiguous run on arm64: its members are copied one by one.
            let run = page << F::contiguous(Level::PAGE).max(3);
            made.map(span(run, run), Pa::new(8 * run), Attrs::USER_TEXT).unwrap();
            // The tables on the way to the first page deny something from now on, by hand.
            let (mut frame, mut level) = (made.root(), F::root_level());
            while let Some(below) = level.down() {
                let index = F::index(0, level);
                let entry = platform.read(frame, index).unwrap();
                let next = F::table_below(entry, level).unwrap();
                let mut denying = F::table(next, denied[dice.roll(4) as usize]);
                if dice.roll(3) == 0 {
                    // Of the user: U/S of x86-64, APTable[0] of arm64.
                    denying = match F::RULE.breaks {
                        true => denying | 1 << 61,
                        false => denying & !4,
                    };
                }
                // SAFETY: an entry of a table of the platform's, in a space that is dead.
                unsafe { platform.table(frame, level).add(index).as_ref() }.store(denying);
                (frame, level) = (next, below);
            }
            let root = made.root();
            // SAFETY: the tree above, which nothing else edits, and that is not loaded.
            let mut parent = unsafe {
                AddressSpace::<F, _>::adopt(&platform, root, Half::Lower, Liveness::Dead)
            }
            .unwrap();
            let before = judge::<F>(&platform, root);
            let mut child = AddressSpace::<F, _>::new(&platform).unwrap();
            let (mut gather, mut into) = (parent.gather(), child.gather());
            let mut told = Vec::new();
            gather
                .fork(span(0, 16 * block), Change::new(), &mut into, |leaf| told.push(leaf.attrs()))
                .unwrap();
            gather.finish(|_| ());
            into.finish(|_| ());
            assert_eq!(judge::<F>(&platform, root), before, "{}", F::NAME);
            let after = judge::<F>(&platform, child.root());
            assert_eq!(after.0, before.0, "{}", F::NAME);
            let mut attrs: Vec<_> = after.0.iter().map(|(_, mapped)| mapped.attrs).collect();
            attrs.dedup();
            told.dedup();
            assert_eq!(told, attrs, "{}", F::NAME);
            // And the child lets the user in where a table kept him out.
            let all = Attrs::USER_DATA.perms;
            let mut gather = child.gather();
            gather.protect(span(page, page), Change::new().perms(all)).unwrap();
            gather.finish(|_| ());
            let page = judge::<F>(&platform, child.root()).0[1].1.attrs.perms;
            assert!(page.contains(all), "{}: {page:?}", F::NAME);
            for space in [&mut parent, &mut child] {
                // SAFETY: it is not used any more.
                assert!(unsafe { space.tear_down(|_| ()) });
            }
        }
    }
    check::<X86_64<4>>();
    check::<Arm64K4>();
    check::<Arm64K16>();
}

/// A page that is made writable can be written, where hardware does not mark it first.
#[test]
fn what_is_made_writable_is_writable_in_hardware() {
    for hardware in [false, true] {
        let platform = Hosted::new(64, 12).with_caps(Caps {
            hardware_dirty: hardware,
            hardware_access: hardware,
            ..Caps::CONSERVATIVE
        });
        let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
        let page = span(0x7000, K4);
        space.map(page, Pa::new(0x9000), Attrs::USER_RODATA).unwrap();
        let writable = Change::new().perms(Attrs::USER_DATA.perms);
        let mut gather = space.gather();
        gather.protect(page, writable).unwrap();
        assert_eq!(gather.query(page.start()).unwrap().attrs().dirty, !hardware);
        // A change that says so leaves it to the first write.
        gather.protect(page, writable.dirty(false)).unwrap();
        assert!(!gather.query(page.start()).unwrap().attrs().dirty);
        gather.finish(|_| ());
    }
}

/// A page that a forgotten gather has mapped is published by the next one, though that has nothing
/// of its own to tell.
#[test]
fn what_a_forgotten_gather_has_mapped_is_published_by_the_next() {
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    space.make_live();
    let mut gather = space.gather();
    gather.map(span(0, K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    core::mem::forget(gather);
    let before = platform.counts().publications;
    space.gather().finish(|_| ());
    assert_eq!(platform.counts().publications, before + 1);
    space.gather().finish(|_| ());
    assert_eq!(platform.counts().publications, before + 1);
}

/// A page that is mapped by itself: what is there says so, and too few tables leave nothing behind.
/// By a call for one page, where no gather is.
#[test]
fn a_page_is_mapped_when_what_a_forgotten_gather_has_unmapped_is_forgotten() {
    let platform = Hosted::new(64, 12).with_caps(caps(0, false));
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    space.map(span(0, K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    space.make_live();
    let mut gather = space.gather();
    assert!(gather.unmap_page(Va::new(0)).unwrap().is_some());
    std::mem::forget(gather);
    let before = platform.counts();
    assert!(space.map_page(Va::new(0), Pa::new(1 << 52), Attrs::USER_DATA).is_err());
    let after = platform.counts();
    assert_eq!(after.completions, before.completions + 1);
    space.map_page(Va::new(0), Pa::new(K4), Attrs::USER_DATA).unwrap();
    let counts = platform.counts();
    assert_eq!(counts.completions, after.completions);
    assert_eq!(counts.publications, after.publications + 1, "it is used at once");
}

/// The page alone, where processors hold that nothing is there.
#[test]
fn a_page_that_is_mapped_is_invalidated_where_holes_are_held() {
    let platform = Hosted::new(64, 12)
        .with_caps(Caps { invalid_entries_cached: true, ..tablewright_hosted::CAPS });
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    space.map(span(0, K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    space.make_live();
    platform.record();
    space.map_page(Va::new(2 * K4), Pa::new(K4), Attrs::USER_DATA).unwrap();
    let told = platform.take_log();
    assert_eq!(told.len(), 1);
    assert!(told[0].covers(2 * K4) && !told[0].everything);
    assert_eq!(platform.counts().completions, 1);
}

/// A page that is put into the frame it has is one whose attributes change.
#[test]
fn a_page_that_keeps_its_frame_is_changed_in_place() {
    let platform = Hosted::new(64, 12).with_caps(caps(0, false));
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    space.map(span(0, K4), Pa::new(M2), Attrs::USER_RODATA).unwrap();
    space.make_live();
    // Nothing changes, the permissions do, the type does.
    for (attrs, broken) in [
        (Attrs::USER_RODATA, 0),
        (Attrs::USER_DATA, 0),
        (Attrs::USER_DATA.with_memory(Memory::NonCacheable), 1),
    ] {
        let before = platform.counts();
        let mut gather = space.gather();
        let held = gather.replace(Va::new(0), Pa::new(M2), attrs).unwrap();
        let now = platform.counts();
        assert_eq!(now.completions - before.completions, broken, "{attrs:?}");
        assert_eq!(gather.flush_with(held, |_| ()).unwrap().frame(), Pa::new(M2));
        drop(gather);
        assert_eq!(platform.counts().publications, now.publications + 1, "{attrs:?}");
        assert_eq!(space.query(Va::new(0)).unwrap().attrs(), attrs);
    }
}

/// The flush of a gather that was forgotten is published, and waited for.
#[test]
fn a_space_that_is_retired_is_forgotten_first() {
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
    space.make_live();
    let mut gather = space.gather();
    gather.map(span(0, K4), Pa::new(0), Attrs::USER_DATA).unwrap();
    std::mem::forget(gather);
    let before = platform.counts();
    // SAFETY: no processor walks the tables.
    unsafe { space.retire() };
    let now = platform.counts();
    assert_eq!(now.publications, before.publications + 1);
    assert_eq!(now.invalidations, before.invalidations + 1);
    assert_eq!(now.completions, before.completions + 1);
}

#[test]
fn a_page_is_mapped_or_nothing_is() {
    fn check<F: Judged>() {
        let page = 1u64 << F::PAGE_SHIFT;
        let rodata = Attrs::USER_RODATA;
        for tables in 0..=F::LEVELS {
            let platform = Hosted::new(64, F::PAGE_SHIFT);
            let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
            platform.limit_allocations(Some(u64::from(tables)));
            let at = Va::new(5 * page);
            let mapped = space.map_page(at, Pa::new(3 * page), rodata);
            if tables + 1 < F::LEVELS {
                assert_eq!(mapped, Err(EditError::OutOfTables));
                assert_eq!((platform.counts().tables, platform.counts().bad_frees), (1, 0));
                continue;
            }
            assert_eq!(mapped, Ok(()));
            assert_eq!(space.query(at).map(|leaf| leaf.frame()), Some(Pa::new(3 * page)));
            let again = space.map_page(at, Pa::new(0), rodata);
            assert_eq!(again, Err(EditError::AlreadyMapped(at)));
            let askew = space.map_page(Va::new(5 * page + 8), Pa::new(0), rodata);
            assert_eq!(askew, Err(EditError::Misaligned));
            let beyond = Va::new(1 << F::INPUT_BITS);
            let beyond = space.map_page(beyond, Pa::new(0), rodata);
            assert_eq!(beyond, Err(EditError::InputOutOfRange));
        }
        // Tables that deny execution are made by it, and respected.
        let platform = Hosted::new(64, F::PAGE_SHIFT);
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        let data = Mapping::new(rodata).tables_deny_execution();
        let (first, next) = (Va::new(0), Va::new(page));
        space.map_page(first, Pa::new(0), data).unwrap();
        let code = space.map_page(next, Pa::new(page), Attrs::USER_TEXT);
        assert_eq!(code, Err(EditError::Denied(next)));
        let far = Va::new(1 << (F::INPUT_BITS - 2));
        let none = space.map_page(far, Pa::new(0), Mapping::new(rodata).without_allocation());
        assert_eq!(none, Err(EditError::NeedsTable(far)));
    }
    check::<Arm64K4>();
    check::<Arm64K16>();
    check::<Arm64K64Wide>();
    check::<X86_64<4>>();
    check::<X86_64<5>>();
}

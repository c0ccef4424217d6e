//! Shared edits: what each does alone, and what is left when several threads have made them at
//! once.

mod common;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;

use common::Judged;
use tablewright::format::{self, Arm64, Arm64K4, Arm64K16, X86_64};
use tablewright::shared::{
    CacheMaintenance, DeferredReclaim, Gather, Mapped, NewLeaf, Refused, Relaxed, SharedSpace,
};
use tablewright::{
    AddressSpace, Attrs, Caps, Change, EditError, Format, Level, Mapping, Memory, Pa, Perms,
    Progress, Shareability, Span, Va,
};
use tablewright_hosted::{Event, Threads};
use tablewright_walker as walker;

type Space<'t, F> = SharedSpace<F, &'t Threads>;
type Edits<'s, 't, F> = Gather<'s, F, &'t Threads>;

/// The distance of a guest's memory from its own addresses: a whole block.
const OFFSET: u64 = 1 << 30;

fn share<F: Format<Input = Va>>(platform: &Threads) -> Space<'_, F> {
    SharedSpace::new(AddressSpace::<F, _>::new(platform).unwrap()).ok().unwrap()
}

fn leaf<F: Format<Input = Va>>(at: u64, level: Level, attrs: Attrs) -> NewLeaf<F> {
    let first = at & !((1 << F::shift(level)) - 1);
    NewLeaf::new(Va::new(at), Pa::new(first + OFFSET), level, attrs).unwrap()
}

/// Maps, topping the gather up when asked.
fn map<F: Format<Input = Va>>(
    gather: &mut Edits<'_, '_, F>,
    new: &NewLeaf<F>,
) -> Result<Mapped<F>, Refused<Va>> {
    match gather.map(new) {
        Err(Refused::NeedsTables(count)) => {
            assert!(gather.top_up(count));
            gather.map(new)
        }
        other => other,
    }
}

fn reclaim<F: Format<Input = Va>>(gather: &mut Edits<'_, '_, F>, leaves: &mut dyn FnMut(u64)) {
    wait(gather.issue().complete(), leaves);
}

fn wait<F: Format<Input = Va>>(
    mut deferred: DeferredReclaim<F, &Threads>,
    leaves: &mut dyn FnMut(u64),
) {
    loop {
        match deferred.try_complete() {
            Ok(completed) => return completed.finish(|leaf| leaves(leaf.size())),
            Err(again) => deferred = again,
        }
        thread::yield_now();
    }
}

fn unmap_all<F: Format<Input = Va>>(space: &Space<'_, F>, span: Span<Va>) -> u64 {
    let mut bytes = 0;
    let mut held = Vec::new();
    let mut gather = space.gather();
    let taken = gather.unmap(span, |leaf| {
        held.push(leaf);
        ControlFlow::Continue(())
    });
    assert!(taken.unwrap().progress.is_done());
    let deferred = gather.issue().complete();
    for leaf in held {
        bytes += deferred.release(leaf).ok().unwrap().size();
    }
    let Ok(completed) = deferred.try_complete() else { panic!("no other walk is under way") };
    completed.finish(|leaf| bytes += leaf.size());
    bytes
}

#[test]
fn a_fault_is_answered_by_what_is_there() {
    let platform = Threads::new(64, 12, 1);
    let space = share::<X86_64<4>>(&platform);
    let mut gather = space.gather();
    let read = leaf(0x1000, Level::PAGE, Attrs::USER_RODATA);
    let write = leaf(0x1000, Level::PAGE, Attrs::USER_DATA);
    assert_eq!(gather.map(&read), Err(Refused::NeedsTables(3)));
    assert_eq!(map(&mut gather, &read), Ok(Mapped::Installed));
    assert_eq!(map(&mut gather, &read), Ok(Mapped::Already));
    assert_eq!(map(&mut gather, &write), Ok(Mapped::Relaxed));
    // Less than what is there is there.
    assert_eq!(map(&mut gather, &read), Ok(Mapped::Already));
    let other =
        NewLeaf::new(Va::new(0x1000), Pa::new(0x7000), Level::PAGE, Attrs::USER_DATA).unwrap();
    let Ok(Mapped::Replaced(gone)) = map(&mut gather, &other) else {
        panic!("another frame takes its place");
    };
    assert_eq!(gone.frame(), Pa::new(0x1000 + OFFSET));
    assert_eq!(space.query(Va::new(0x1000)).unwrap().frame(), Pa::new(0x7000));
    assert_eq!(space.relax(Va::new(0x2000), Perms::WRITE, true), Ok(Relaxed::Absent));
    reclaim(&mut gather, &mut |_| ());
    gather.release_tables();
    let all = Span::new(Va::new(0), 1 << 39).unwrap();
    assert_eq!(unmap_all(&space, all), 0x1000);
    assert_eq!(platform.tables(), 1);
}

/// A block in the place of pages that say that their memory is another's is other memory: on arm64
/// it is cleaned whole, and takes a break. (It was stored over the table.)
#[test]
fn a_block_that_is_shared_is_no_collapse_of_private_pages() {
    type Realm = Arm64<12, 48, false, { format::MAIR }, { format::shared(47) }>;
    let clean = CacheMaintenance { clean: true, instructions: false };
    let outer = Attrs { shareability: Shareability::Outer, ..Attrs::KERNEL_DATA };
    let given = Attrs { native: Realm::MARK, ..Attrs::KERNEL_DATA };
    for (attrs, cleaned) in [(Attrs::KERNEL_DATA, 0), (given, 2 << 20), (outer, 2 << 20)] {
        let platform = Threads::new(64, 12, 1).with_cache_maintenance(clean);
        let space = share::<Realm>(&platform);
        let mut gather = space.gather();
        for page in 0..512 {
            let page = leaf(page << 12, Level::PAGE, Attrs::KERNEL_DATA);
            assert_eq!(map(&mut gather, &page), Ok(Mapped::Installed));
        }
        let before = platform.cleaned();
        assert_eq!(map(&mut gather, &leaf(0, Level::new(1), attrs)), Ok(Mapped::Collapsed));
        assert_eq!(platform.cleaned() - before, cleaned);
        let mut gone = 0;
        reclaim(&mut gather, &mut |size| gone += size);
        assert_eq!(gone, cleaned);
        assert_eq!(space.query(Va::new(0x5000)).unwrap().attrs(), attrs);
    }
}

/// Maps one page in each of `tables` tables, and unmaps all but the first.
fn leave_empty_tables<F: Format<Input = Va> + PartialEq>(
    space: &Space<'_, F>,
    gather: &mut Edits<'_, '_, F>,
    tables: u64,
) {
    for number in 0..tables {
        let page = leaf(number << (F::PAGE_SHIFT + F::INDEX_BITS), Level::PAGE, Attrs::KERNEL_DATA);
        assert_eq!(map(gather, &page), Ok(Mapped::Installed));
        if number > 0 {
            let page = Span::new(page.input(), 1 << F::PAGE_SHIFT).unwrap();
            assert_eq!(unmap_all(space, page), 1 << F::PAGE_SHIFT);
        }
    }
}

fn empty_tables_are_freed_on<F: Format<Input = Va> + PartialEq>() {
    let platform = Threads::new(64, F::PAGE_SHIFT, 1);
    let space = share::<F>(&platform);
    let mut gather = space.gather();
    let table = 1 << (F::PAGE_SHIFT + F::INDEX_BITS);
    leave_empty_tables(&space, &mut gather, 4);
    gather.release_tables();
    let before = platform.tables();
    let prune = |gather: &mut Edits<'_, '_, F>, first, size| {
        let pruned = gather.prune(Span::new(Va::new(first), size).unwrap());
        assert_eq!(pruned, Ok(Progress::Done));
        reclaim(gather, &mut |_| panic!("a leaf was below a table that is freed"));
    };
    // Tables that reach over an end of the range, or map something, stay.
    prune(&mut gather, 0, table + (table >> 1));
    prune(&mut gather, table >> 1, table);
    assert_eq!(platform.tables(), before);
    platform.record();
    prune(&mut gather, table, 2 * table);
    assert_eq!(platform.tables(), before - 2);
    let events = platform.take_events();
    let flushes = events.iter().filter(|event| matches!(event, Event::Invalidate(_)));
    assert_eq!(flushes.count(), 1);
    // With what is taken in the same gather, up to the root.
    let all = Span::new(Va::new(0), 4 * table).unwrap();
    let taken = gather
        .unmap(Span::new(Va::new(0), 1 << F::PAGE_SHIFT).unwrap(), |_| ControlFlow::Continue(()));
    assert!(taken.unwrap().progress.is_done());
    prune(&mut gather, 0, all.size());
    assert!(platform.tables() < before - 2);
    prune(&mut gather, 0, 1 << (F::INPUT_BITS - 1));
    assert_eq!(platform.tables(), 1);
    // And they can come back.
    assert_eq!(
        map(&mut gather, &leaf(table, Level::PAGE, Attrs::KERNEL_DATA)),
        Ok(Mapped::Installed)
    );
}

#[test]
fn empty_tables_are_freed() {
    empty_tables_are_freed_on::<X86_64<4>>();
    empty_tables_are_freed_on::<Arm64K4>();
    empty_tables_are_freed_on::<Arm64K16>();
}

/// A table stays from which another gather has taken something, and is not complete, where a break
/// is demanded.
#[test]
fn a_table_from_which_another_takes_stays() {
    let platform = Threads::new(64, 12, 1);
    let space = share::<Arm64K4>(&platform);
    let (mut gather, mut other) = (space.gather(), space.gather());
    assert_eq!(map(&mut gather, &leaf(0, Level::PAGE, Attrs::KERNEL_DATA)), Ok(Mapped::Installed));
    let block = Span::new(Va::new(0), 2 << 20).unwrap();
    let page = Span::new(Va::new(0), 1 << 12).unwrap();
    assert!(other.unmap(page, |_| ControlFlow::Continue(())).unwrap().progress.is_done());
    let before = platform.tables();
    for expected in [before, before - 1] {
        assert_eq!(gather.prune(block), Ok(Progress::Done));
        reclaim(&mut gather, &mut |_| panic!("the other has it"));
        gather.release_tables();
        assert_eq!(platform.tables(), expected);
        reclaim(&mut other, &mut |_| ());
    }
}

/// A gather that has cut a table off counts until it is complete: another that finds a hole there
/// has it forgotten.
#[test]
fn a_prune_that_is_not_complete_counts() {
    let platform = Threads::new(64, 12, 1);
    let space = share::<X86_64<4>>(&platform);
    let (mut gather, mut other) = (space.gather(), space.gather());
    leave_empty_tables(&space, &mut gather, 2);
    let second = Span::new(Va::new(2 << 20), 2 << 20).unwrap();
    assert_eq!(gather.prune(second), Ok(Progress::Done));
    for is_complete in [false, true] {
        let taken = other.unmap(second, |_| ControlFlow::Continue(()));
        assert!(taken.unwrap().progress.is_done());
        assert_eq!(other.is_clean(), is_complete);
        reclaim(&mut other, &mut |_| ());
        reclaim(&mut gather, &mut |_| ());
    }
}

/// Frames without side memory: 32 tables are carried, and no more.
#[test]
fn a_prune_goes_on_where_it_stopped() {
    let platform = Threads::new(256, 12, 1).without_links();
    let space = share::<X86_64<4>>(&platform);
    let mut gather = space.gather();
    leave_empty_tables(&space, &mut gather, 41);
    gather.release_tables();
    let (before, table) = (platform.tables(), 2 << 20);
    let all = Span::new(Va::new(0), 41 * table).unwrap();
    let stopped = gather.prune(all);
    assert_eq!(stopped, Ok(Progress::Stopped(Va::new(33 * table))));
    reclaim(&mut gather, &mut |_| panic!("a leaf is mapped"));
    assert_eq!(platform.tables(), before - 32);
    let rest = Span::inclusive(Va::new(33 * table), all.last()).unwrap();
    assert_eq!(gather.prune(rest), Ok(Progress::Done));
    reclaim(&mut gather, &mut |_| panic!("a leaf is mapped"));
    assert_eq!(platform.tables(), before - 40);
    let hole = Span::new(Va::new(1 << 47), 4096).unwrap();
    assert_eq!(gather.prune(hole), Err(EditError::InputOutOfRange));
}

#[test]
fn pages_become_a_block_and_a_block_pages() {
    for maintenance in [false, true] {
        let platform = Threads::new(64, 12, 1)
            .with_cache_maintenance(CacheMaintenance { clean: maintenance, instructions: false });
        let space = share::<Arm64K4>(&platform);
        let mut gather = space.gather();
        for page in 0..300 {
            let page = leaf(page << 12, Level::PAGE, Attrs::KERNEL_DATA);
            assert_eq!(map(&mut gather, &page), Ok(Mapped::Installed));
        }
        let before = platform.cleaned();
        assert_eq!(before, u64::from(maintenance) * (300 << 12));
        let block = leaf(0, Level::new(1), Attrs::KERNEL_DATA);
        assert_eq!(map(&mut gather, &block), Ok(Mapped::Collapsed));
        // What was mapped has been cleaned already; the rest is now.
        assert_eq!(platform.cleaned() - before, u64::from(maintenance) * (212 << 12));
        assert_eq!(space.query(Va::new(0x1f_f000)).unwrap().size(), 2 << 20);
        // A page inside it is there.
        let page = leaf(0x5000, Level::PAGE, Attrs::KERNEL_DATA);
        assert_eq!(map(&mut gather, &page), Ok(Mapped::Already));
        reclaim(&mut gather, &mut |_| panic!("no leaf has gone"));

        assert!(gather.top_up(2));
        assert_eq!(gather.split(Va::new(0x1234), Level::PAGE), Ok(true));
        assert_eq!(gather.split(Va::new(0x1234), Level::PAGE), Ok(false));
        let page = space.query(Va::new(0x1f_f000)).unwrap();
        assert_eq!((page.size(), page.frame()), (0x1000, Pa::new(0x1f_f000 + OFFSET)));
        reclaim(&mut gather, &mut |_| panic!("no leaf has gone"));
        drop(gather);
        let all = Span::new(Va::new(0), 1 << 39).unwrap();
        assert_eq!(unmap_all(&space, all), 2 << 20);
        assert_eq!(platform.tables(), 1);
    }
}

/// Without permissions a page is not there for a walker, and is for the engine: a fault gives it
/// back, or puts another in its place, and what it was before is forgotten first where that
/// matters.
#[test]
fn what_is_parked_is_given_back_by_a_fault() {
    fn parked<F: Judged + PartialEq>() {
        let name = F::NAME;
        let platform = Threads::new(64, F::PAGE_SHIFT, 1)
            .with_caps(Caps { bbm: 0, ..tablewright_hosted::CAPS });
        let space = share::<F>(&platform);
        let (page, at) = (1u64 << F::PAGE_SHIFT, Va::new(1 << F::PAGE_SHIFT));
        let whole = Span::new(at, page).unwrap();
        let written = Attrs { software: 5, ..Attrs::USER_DATA };
        let none = Change::new().perms(Perms::empty());
        let mut gather = space.gather();
        let new = leaf(at.get(), Level::PAGE, written);
        assert_eq!(map(&mut gather, &new), Ok(Mapped::Installed));
        let mapped = space.query(at).unwrap();
        let leaves = || {
            let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
            let (root, mut count) = (space.root().get(), 0);
            walker::leaves(F::REGIME, root, walker::Half::Lower, &mut read, |_| {
                count += 1;
                ControlFlow::Continue(())
            })
            .unwrap();
            count
        };
        let park = |gather: &mut tablewright::shared::Gather<'_, F, _>| {
            assert!(gather.protect(whole, none).unwrap().changed);
            assert!(!gather.is_clean(), "{name}");
            reclaim(gather, &mut |_| ());
            let there = space.query(at).unwrap();
            assert_eq!((there.frame(), leaves()), (mapped.frame(), 0), "{name}");
            assert_eq!(there.attrs(), written.with_perms(Perms::empty()));
        };
        // By a change, which leaves nothing to forget.
        park(&mut gather);
        let back = Change::new().perms(written.perms);
        assert!(gather.protect(whole, back).unwrap().changed);
        assert!(gather.is_clean(), "{name}");
        reclaim(&mut gather, &mut |_| ());
        assert_eq!((space.query(at), leaves()), (Some(mapped), 1), "{name}");
        // By a fault.
        park(&mut gather);
        assert_eq!(map(&mut gather, &new), Ok(Mapped::Relaxed), "{name}");
        assert_eq!((space.query(at), leaves()), (Some(mapped), 1), "{name}");
        park(&mut gather);
        let relaxed = space.relax(at, written.perms, false);
        assert_eq!(relaxed, Ok(Relaxed::Done), "{name}");
        assert_eq!((space.query(at), leaves()), (Some(mapped), 1), "{name}");
        // What was written is found, and once.
        park(&mut gather);
        let mut dirty = 0;
        gather.clear_dirty(whole, |_| dirty += 1).unwrap();
        gather.clear_dirty(whole, |_| dirty += 1).unwrap();
        assert_eq!(dirty, 1, "{name}");
        // What may be remembered is not mixed with another type, or another frame.
        let device = Change::new().memory(Memory::Device);
        let changed = gather.protect(whole, device);
        assert_eq!(changed.is_err(), F::HALVES, "{name}: {changed:?}");
        let normal = Change::new().memory(written.memory);
        gather.protect(whole, normal).unwrap();
        platform.record();
        let other = NewLeaf::new(at, Pa::new(7 * page), Level::PAGE, written).unwrap();
        let Ok(Mapped::Replaced(gone)) = map(&mut gather, &other) else {
            panic!("{name}: another frame takes its place");
        };
        assert_eq!(gone.frame(), mapped.frame(), "{name}");
        let events = platform.take_events();
        assert!(events.contains(&Event::Complete), "{name}: {events:?}");
        // A block in the place of a table with what is parked: the table did not translate all of
        // it.
        assert!(gather.protect(whole, none).unwrap().changed);
        let block = leaf(0, Level::new(1), written);
        assert_eq!(map(&mut gather, &block), Ok(Mapped::Collapsed), "{name}");
        assert_eq!(space.query(at).unwrap().attrs().perms, written.perms);
        reclaim(&mut gather, &mut |_| ());
        drop(gather);
        unmap_all(&space, Span::new(Va::new(0), 1 << F::shift(Level::new(2))).unwrap());
    }
    parked::<X86_64<4>>();
    parked::<Arm64K4>();
    parked::<Arm64K16>();
}

/// Seed 70752 of the guests: a leaf whose access flag was cleared without a flush, and which a TLB
/// therefore still held, was split without a break.
#[test]
fn what_was_aged_is_still_remembered() {
    let platform = Threads::new(64, 12, 1).with_caps(Caps {
        hardware_access: false,
        hardware_dirty: false,
        ..tablewright_hosted::CAPS
    });
    let space = share::<Arm64K4>(&platform);
    let mut gather = space.gather();
    let block = leaf(0, Level::new(1), Attrs::KERNEL_DATA);
    assert_eq!(map(&mut gather, &block), Ok(Mapped::Installed));
    let (all, mut young) = (Span::new(Va::new(0), 2 << 20).unwrap(), 0);
    // It is finished with later edits.
    let mut aged = space.gather();
    aged.age(all, |_| young += 1).unwrap();
    assert_eq!(young, 1);
    // What is done with the leaf next has it forgotten.
    platform.record();
    assert!(gather.top_up(1));
    assert_eq!(gather.split(Va::new(0), Level::PAGE), Ok(true));
    let events = platform.take_events();
    assert!(events.contains(&Event::Complete), "{events:?}");
    drop(aged);
    // The flag alone says nothing either: it is clear, and whether it was before is not known.
    assert!(gather.is_clean() && !space.query(Va::new(0)).unwrap().attrs().accessed);
    gather.protect(all, Change::new().write_protect()).unwrap();
    assert!(!gather.is_clean());
}

#[test]
fn caches_are_cleaned_for_memory_and_not_for_devices() {
    let platform = Threads::new(64, 12, 1)
        .with_cache_maintenance(CacheMaintenance { clean: true, instructions: true });
    let space = share::<Arm64K4>(&platform);
    let mut gather = space.gather();
    let device = Attrs { memory: Memory::Device, ..Attrs::KERNEL_DATA };
    map(&mut gather, &leaf(0, Level::PAGE, device)).unwrap();
    assert_eq!(platform.cleaned(), 0);
    let page = leaf(0x1000, Level::PAGE, Attrs::KERNEL_DATA);
    map(&mut gather, &page).unwrap();
    assert_eq!(platform.cleaned(), 0x1000);
    let span = Span::new(Va::new(2 << 20), 6 << 20).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    assert_eq!(space.map_range(span, Pa::new((2 << 20) + OFFSET), mapping), Ok(6 << 20));
    assert_eq!(platform.cleaned(), 0x1000 + (6 << 20));
    reclaim(&mut gather, &mut |_| ());
}

/// Threads map, take away, protect, split and collapse in two blocks at once. In the end every page
/// leads to its own memory, and there are as many tables as the walker finds.
fn a_crowd<F: Judged>(seed: u64, caps: Caps, clean: bool) {
    const THREADS: u16 = 4;
    let platform = Threads::new(600, F::PAGE_SHIFT, THREADS.into())
        .with_caps(caps)
        .with_cache_maintenance(CacheMaintenance { clean, instructions: false });
    let space = share::<F>(&platform);
    let block = 1u64 << F::shift(Level::new(1));
    let page = 1u64 << F::PAGE_SHIFT;
    thread::scope(|scope| {
        for cpu in 0..THREADS {
            let space = &space;
            scope.spawn(move || {
                let dice = common::Dice::new(seed * 64 + u64::from(cpu));
                let mut gather = space.gather();
                for _ in 0..400 {
                    let at = dice.roll(2 * block) & !(page - 1);
                    match dice.roll(16) {
                        0..=8 => {
                            let attrs =
                                [Attrs::KERNEL_DATA, Attrs::KERNEL_RODATA][dice.roll(2) as usize];
                            let _ = map(&mut gather, &leaf(at, Level::PAGE, attrs));
                        }
                        9 | 10 => {
                            let new = leaf(at, Level::new(1), Attrs::KERNEL_DATA);
                            let _ = map(&mut gather, &new);
                        }
                        11 => {
                            gather.top_up(1);
                            let _ = gather.split(Va::new(at), Level::PAGE);
                        }
                        12 | 13 => {
                            let size = page << dice.roll(F::INDEX_BITS as u64 + 1);
                            let span = Span::new(Va::new(at & !(size - 1)), size).unwrap();
                            let perms = [Perms::READ, Perms::READ | Perms::WRITE, Perms::empty()];
                            let change = Change::new().perms(perms[dice.roll(3) as usize]);
                            gather.protect(span, change).unwrap();
                        }
                        _ => {
                            let size = page << dice.roll(F::INDEX_BITS as u64 + 1);
                            let span = Span::new(Va::new(at & !(size - 1)), size).unwrap();
                            let taken = gather.unmap(span, |_| ControlFlow::Continue(()));
                            assert!(taken.unwrap().progress.is_done());
                        }
                    }
                    reclaim(&mut gather, &mut |_| ());
                }
            });
        }
    });

    let root = space.root().get();
    let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
    walker::leaves(F::REGIME, root, walker::Half::Lower, &mut read, |leaf| {
        assert_eq!(leaf.pa, leaf.va + OFFSET, "{}: seed {seed}", F::NAME);
        ControlFlow::Continue(())
    })
    .unwrap_or_else(|fault| panic!("{}: {fault}: seed {seed}", F::NAME));
    let mut tables = 0;
    walker::tables(F::REGIME, root, &mut read, |_| {
        tables += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(platform.tables(), tables, "{}: seed {seed}: a table is lost", F::NAME);
    // No claim is left behind: everything can be taken away, and mapped again.
    let all = Span::new(Va::new(0), 2 * block).unwrap();
    unmap_all(&space, all);
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    assert_eq!(space.map_range(all, Pa::new(OFFSET), mapping), Ok(2 * block));
}

#[test]
fn a_crowd_leaves_a_tree() {
    let gentle = Caps { bbm: 2, ..tablewright_hosted::CAPS };
    for seed in 0..12 {
        for clean in [false, true] {
            a_crowd::<Arm64K4>(seed, tablewright_hosted::CAPS, clean);
            a_crowd::<Arm64K4>(seed, gentle, clean);
            a_crowd::<Arm64K16>(seed, tablewright_hosted::CAPS, clean);
            a_crowd::<X86_64<4>>(seed, tablewright_hosted::CAPS, clean);
        }
    }
}

#[test]
fn one_of_many_installs_and_only_that_one_cleans() {
    let platform = Threads::new(200, 12, 4)
        .with_cache_maintenance(CacheMaintenance { clean: true, instructions: false });
    let space = share::<Arm64K4>(&platform);
    let installed = AtomicI64::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            let (space, installed) = (&space, &installed);
            scope.spawn(move || {
                let mut gather = space.gather();
                for page in 0..5_000u64 {
                    let new = leaf(page << 12, Level::PAGE, Attrs::KERNEL_DATA);
                    loop {
                        match map(&mut gather, &new) {
                            Ok(Mapped::Installed) => {
                                installed.fetch_add(1, Ordering::Relaxed);
                                break;
                            }
                            Ok(Mapped::Already) => break,
                            Err(Refused::Busy(_) | Refused::Retry) => thread::yield_now(),
                            other => panic!("{other:?}"),
                        }
                    }
                }
                reclaim(&mut gather, &mut |_| ());
            });
        }
    });
    assert_eq!(installed.into_inner(), 5_000);
    assert_eq!(platform.cleaned(), 5_000 << 12);
}

//! Ways in which safe code could once harm a space by mistake or on purpose: each test says how.
//! Most of it cannot be written down any more; then the test does what comes closest.

mod dropped;
mod logs;
mod owners;

use std::cell::RefCell;
use std::mem::forget;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Barrier as Meeting;
use std::sync::atomic::AtomicU64;
use std::thread;

use tablewright::dirty::{Bitmap, Marker};
use tablewright::format::{Arm64K4, Arm64K64, Ept, Npt, Stage2K4, X86_64};
use tablewright::guest::{Access, Backing, Fault, Guest, Harvest, Log, Pass, Slot, SlotCell};
use tablewright::shared::{
    self, Epochs, GracePeriod, Mapped, NewLeaf, Protected, Refused, SharedPlatform, SharedSpace,
};
use tablewright::shootdown::amd;
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Format, Half, Invalidation, Ipa,
    Level, Liveness, Mapping, Memory, Pa, Perms, Platform, Span, TableLink, Va,
};
use tablewright_hosted::{Event, Threads, Told, Walk};
use tablewright_walker::{Granule, Regime, translate};

type S2 = Stage2K4<40>;
type Space<'t, F> = SharedSpace<F, &'t Threads>;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const RAM: Pa = Pa::new(0x4000_0000);

/// Hardware does not mark what is written.
const BY_FAULTS: Caps = Caps { hardware_dirty: false, ..tablewright_hosted::CAPS };

fn platform(caps: Caps) -> Threads {
    Threads::new(64, 12, 1).with_caps(caps).recording()
}

fn share<F: Format>(platform: &Threads, id: u16) -> Space<'_, F> {
    let space = AddressSpace::new(platform).unwrap().with_id(id);
    let shared = SharedSpace::new(space).ok().unwrap();
    platform.take_events();
    shared
}

/// Maps memory from address 0 on.
fn mapped<F: Format<Input = Ipa>>(
    platform: &Threads,
    id: u16,
    size: u64,
    mapping: Mapping,
) -> Space<'_, F> {
    let space = share::<F>(platform, id);
    assert_eq!(space.map_range(ipa(0, size), RAM, mapping), Ok(size));
    platform.take_events();
    space
}

fn va(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

fn ipa(first: u64, size: u64) -> Span<Ipa> {
    Span::new(Ipa::new(first), size).unwrap()
}

fn blocks() -> Mapping {
    Mapping::new(Attrs::GUEST_MEMORY)
}

fn pages() -> Mapping {
    blocks().pages_only()
}

fn read_only() -> Change {
    Change::new().write_protect()
}

/// Takes a range away, and leaves the rest to the gather.
fn unmap<F: Format, P: SharedPlatform + Clone>(
    gather: &mut shared::Gather<'_, F, P>,
    span: Span<F::Input>,
) {
    let taken = gather.unmap(span, |_| ControlFlow::Continue(()));
    assert!(taken.unwrap().progress.is_done());
}

/// A gather ends in one of two ways without being finished.
fn abandon<T>(gather: T, forgotten: bool) {
    match forgotten {
        true => forget(gather),
        false => drop(gather),
    }
}

// ---- What belongs to another space ----

/// A flush of space 1 was accepted by an edit of space 2, and VMID 1 was invalidated for what was
/// protected in space 2.
#[test]
fn an_edit_invalidates_its_own_space() {
    let platform = platform(Caps { bbm: 2, ..tablewright_hosted::CAPS });
    let spaces = [1, 2].map(|id| mapped::<S2>(&platform, id, BLOCK, pages()));
    let mut gathers = spaces.each_ref().map(SharedSpace::gather);
    for gather in &mut gathers {
        gather.protect(ipa(0, BLOCK), read_only()).unwrap();
    }
    for index in [1, 0] {
        assert!(gathers[index].finish(|_| ()).is_ok());
        let (log, root) = (platform.take_log(), spaces[index].root());
        assert_eq!(log.len(), 1);
        assert_eq!((log[0].root, usize::from(log[0].id)), (root, index + 1));
        assert!(log[0].covers(0) && log[0].covers(BLOCK - 1));
    }
}

/// A guest's zap does nothing with the gather of another guest.
#[test]
fn a_zap_takes_the_gather_of_its_guest() {
    let platform = platform(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 2];
    let guests: Vec<_> = cells
        .chunks_mut(1)
        .zip(1..)
        .map(|(cells, id)| Guest::new(mapped::<S2>(&platform, id, PAGE, pages()), cells))
        .collect();
    let (mut zap, mut foreign) = (guests[0].zap_all(), guests[1].gather());
    let zapped = zap.unmap(&mut foreign, |_| ControlFlow::Continue(()));
    assert_eq!(zapped, Err(EditError::ForeignGather));
    let protected = zap.protect(&mut foreign, read_only());
    assert_eq!(protected, Err(EditError::ForeignGather));
    assert!(foreign.is_clean());
    for guest in &guests {
        let leaf = guest.space().query(Ipa::new(0)).unwrap();
        assert_eq!(leaf.attrs().perms, Attrs::GUEST_MEMORY.perms);
    }
    // It has not been used up.
    let mut own = guests[0].gather();
    let zapped = zap.unmap(&mut own, |_| ControlFlow::Continue(()));
    assert_eq!(zapped, Ok(Pass::Went));
}

/// A table of space 2, whose place a block had taken, was freed by a flush of space 1.
#[test]
fn a_table_is_freed_after_its_own_space_was_invalidated() {
    let platform = platform(tablewright_hosted::CAPS);
    let one = mapped::<Npt<4>>(&platform, 1, BLOCK, pages());
    let two = mapped::<Npt<4>>(&platform, 2, BLOCK, pages());
    let block = NewLeaf::new(Ipa::new(0), RAM, Level::new(1), Attrs::GUEST_MEMORY).unwrap();
    let (mut first, mut second) = (one.gather(), two.gather());
    assert_eq!(second.map(&block), Ok(Mapped::Collapsed));
    first.protect(ipa(0, BLOCK), read_only()).unwrap();
    assert!(first.finish(|_| ()).is_ok());
    let is_free = |event: &Event| matches!(event, Event::Free(_));
    assert!(!platform.take_events().iter().any(is_free));
    assert!(second.finish(|_| ()).is_ok());
    let told = |event: &Event| match event {
        Event::Invalidate(told) => {
            told.id == 2 && told.covers(0) && told.ranges.iter().all(|range| range.tables)
        }
        _ => false,
    };
    let events = platform.take_events();
    let position = |is_it: &dyn Fn(&Event) -> bool| events.iter().position(is_it).unwrap();
    let complete = position(&|event| *event == Event::Complete);
    assert!(position(&told) < complete && complete < position(&is_free));
}

/// A leaf that a flush of an exclusive space held back came out of another, when serials began anew
/// with sharing.
#[test]
fn a_leaf_is_released_by_its_own_flush_alone() {
    for forgotten in [false, true] {
        let platform = platform(tablewright_hosted::CAPS);
        let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
        space.map(va(0, PAGE), RAM, Attrs::USER_DATA).unwrap();
        space.make_live();
        let (mut held, mut gather) = (Vec::new(), space.gather());
        let progress = gather.unmap(va(0, PAGE), |leaf| {
            held.push(leaf);
            ControlFlow::Continue(())
        });
        assert!(progress.unwrap().is_done());
        abandon(gather, forgotten);
        // What was owed is paid, and the leaf still belongs to a flush that is gone.
        platform.take_events();
        let space = SharedSpace::new(space).ok().unwrap();
        assert_eq!(platform.take_log().len(), usize::from(forgotten));
        for _ in 0..3 {
            let mut gather = space.gather();
            unmap(&mut gather, va(PAGE, PAGE));
            let deferred = gather.issue().complete();
            held = vec![deferred.release(held.pop().unwrap()).unwrap_err()];
        }
    }
}

// ---- Tables that a gather has ----

/// Tables of one platform were linked into a tree on another, or given back to another.
#[test]
fn tables_go_back_to_their_platform() {
    let (a, b) = (platform(tablewright_hosted::CAPS), Threads::new(8, 12, 1));
    let spaces = [&a, &b].map(|platform| share::<X86_64<4>>(platform, 1));
    for _ in 0..6 {
        a.alloc_table(Level::PAGE).unwrap();
    }
    let before = [a.tables(), b.tables()];
    let mut gathers = spaces.each_ref().map(SharedSpace::gather);
    assert!(gathers.iter_mut().all(|gather| gather.top_up(3)));
    assert_eq!([a.tables(), b.tables()], before.map(|count| count + 3));
    let [first, second] = &mut gathers;
    std::mem::swap(first, second);
    drop(gathers);
    assert_eq!([a.tables(), b.tables()], before);
    assert_eq!([a.bad_frees(), b.bad_frees()], [0, 0]);
    // Each frame that B has left, once.
    let rest = std::iter::from_fn(|| b.alloc_table(Level::PAGE));
    let mut rest: Vec<_> = rest.collect();
    rest.sort();
    rest.dedup();
    assert_eq!(rest.len() as u64, 8 - before[1]);
}

/// Tables that were emptied for a granule of 4 KiB were linked into a tree of 64 KiB: walkers found
/// there what had been there before.
#[test]
fn a_table_that_is_linked_is_empty() {
    let platform = Threads::new(32, 16, 1);
    let alloc = |_| platform.alloc_table(Level::PAGE).unwrap();
    let used: Vec<Pa> = (0..8).map(alloc).collect();
    for &frame in &used {
        for index in 0..8192 {
            // SAFETY: a frame of this platform, an entry inside of it, and no other thread uses it.
            unsafe { platform.table(frame, Level::PAGE).add(index).as_ref() }.store(0xdead_0003);
        }
    }
    for frame in used {
        // SAFETY: it came from there (1.), and was not linked (2.).
        unsafe { platform.free_table(frame, Level::PAGE) };
    }
    let space = share::<Arm64K64>(&platform, 0);
    let mut gather = space.gather();
    assert!(gather.top_up(3));
    let leaf = NewLeaf::new(Va::new(0), RAM, Level::PAGE, Attrs::USER_DATA).unwrap();
    assert_eq!(gather.map(&leaf), Ok(Mapped::Installed));
    assert_eq!(gather.tables(), 1);
    for page in [1, 511, 512, 600, 8191] {
        assert!(space.query(Va::new(page << 16)).is_none(), "page {page}");
    }
}

// ---- Walks ----

/// A walk ended with the first of two that one processor had under way.
#[test]
fn a_walk_is_not_over_before_it_is_dropped() {
    let slots = [const { shared::WalkSlot::new() }; 1];
    let epochs = Epochs::new(&slots);
    // SAFETY: one thread uses the epochs (1.), without interrupts (2.), to the end of its walks
    // (3.), and made them alone (4.).
    let enter = || unsafe { epochs.enter(0) }.unwrap();
    let (first, second) = (enter(), enter());
    let period = epochs.advance();
    drop(first);
    assert!(!epochs.is_over(period));
    drop(second);
    assert!(epochs.is_over(period));
}

/// Two unmaps under way, each of which held a walk, were completed in the order in which they were
/// made: the second went through tables in a walk that the first had ended.
#[test]
fn two_unmaps_may_be_completed_in_any_order() {
    for first in 0..2 {
        let platform = platform(tablewright_hosted::CAPS);
        let space = mapped::<S2>(&platform, 1, 2 * BLOCK, pages());
        let mut issued: Vec<_> = [0, BLOCK]
            .into_iter()
            .map(|at| {
                let mut gather = space.gather();
                unmap(&mut gather, ipa(at, PAGE));
                gather.issue()
            })
            .collect();
        let _one = issued.swap_remove(first).complete();
        // What is under way holds no walk ...
        assert!(space.is_over(space.grace_period()));
        let _two = issued.swap_remove(0).complete();
        // ... and leaves holes.
        let again = space.map_range(ipa(0, 2 * BLOCK), RAM, pages());
        assert_eq!(again, Ok(2 * PAGE));
    }
}

/// An edit under way held a walk.
#[test]
fn what_is_under_way_holds_no_walk() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<S2>(&platform, 1, PAGE, pages());
    let walk = platform.enter();
    let period = space.grace_period();
    assert!(!space.is_over(period));
    drop(walk);
    assert!(space.is_over(period));
    // The completion enters another walk.
    let mut gather = space.gather();
    unmap(&mut gather, ipa(0, PAGE));
    let issued = gather.issue();
    let period = space.grace_period();
    assert!(space.is_over(period));
    let _cut = issued.complete();
    assert_eq!(space.map_range(ipa(0, PAGE), RAM, pages()), Ok(PAGE));
}

/// Threads that did not say which processor they play shared the slot of number 0.
#[test]
fn threads_that_play_no_processor_have_walks_of_their_own() {
    let platform = Threads::new(8, 12, 2);
    let step = Meeting::new(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            step.wait(); // the first has entered
            let walk = platform.enter();
            step.wait();
            step.wait();
            drop(walk);
        });
        let walk = platform.enter();
        step.wait();
        step.wait(); // the second has entered
        drop(walk);
        let period = platform.grace_period();
        let past = platform.is_over(period);
        step.wait();
        other.join().unwrap();
        assert!(!past, "the walk of the other thread began before");
        assert!(platform.is_over(period));
    });
}

// ---- Visitors that unwind ----

/// A leaf was made clean, its visitor panicked, and no processor was told to set the flag again.
#[test]
fn what_was_cleaned_is_invalidated_when_a_visitor_unwinds() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<Npt<4>>(&platform, 1, PAGE, pages());
    let mut gather = space.gather();
    let cleared = catch_unwind(AssertUnwindSafe(|| {
        gather.clear_dirty(ipa(0, PAGE), |_| panic!("the visitor"))
    }));
    assert!(cleared.is_err());
    assert!(!space.query(Ipa::new(0)).unwrap().attrs().dirty);
    assert!(!gather.is_clean());
    drop(gather);
    assert!(platform.take_log().iter().any(|told| told.covers(0)));
}

/// A taken entry is frozen for others until it is forgotten, also when a visitor unwinds.
#[test]
fn what_was_taken_is_invalidated_when_a_visitor_unwinds() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<S2>(&platform, 1, 2 * PAGE, pages());
    let unmapped = catch_unwind(|| {
        let mut gather = space.gather();
        gather.unmap(ipa(0, 2 * PAGE), |_| panic!("the visitor"))
    });
    assert!(unmapped.is_err());
    assert!(platform.take_log().iter().any(|told| told.covers(0)));
    assert!(space.query(Ipa::new(0)).is_none() && space.query(Ipa::new(PAGE)).is_some());
    let again = space.map_range(ipa(0, 2 * PAGE), RAM, pages());
    assert_eq!(again, Ok(PAGE));
}

// ---- What shared edits did not check ----

/// An unmap in the upper half took away what was mapped in the lower.
#[test]
fn an_address_of_the_other_half_is_refused() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = share::<Arm64K4>(&platform, 1);
    let attrs = Mapping::new(Attrs::USER_DATA).pages_only();
    assert_eq!(space.map_range(va(0, BLOCK), RAM, attrs), Ok(BLOCK));
    platform.take_events();
    assert_refused(&space, va(0xffff_0000_0000_0000, BLOCK));
    assert_eq!(space.query(Va::new(0)).unwrap().frame(), RAM);
    assert_eq!(platform.take_log(), []);
}

/// An address beyond those that the format translates was the alias of another: the block at 0 was
/// split.
#[test]
fn an_address_out_of_range_is_refused() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<S2>(&platform, 1, BLOCK, blocks());
    assert_refused(&space, ipa(1 << 50, BLOCK));
    assert_eq!(space.query(Ipa::new(0)).unwrap().size(), BLOCK);
    assert_eq!(platform.take_log(), []);
}

/// Every edit of an address that a space does not translate.
fn assert_refused<F: Format>(space: &Space<'_, F>, span: Span<F::Input>) {
    let at = span.start();
    let mut gather = space.gather();
    assert!(gather.top_up(4));
    let out_of_range = EditError::InputOutOfRange;
    let refused = Some(Refused::Edit(out_of_range));
    let all = |_| ControlFlow::Continue(());
    assert_eq!(gather.unmap(span, all), Err(out_of_range));
    assert_eq!(gather.protect(span, read_only()), Err(out_of_range));
    assert_eq!(gather.age(span, |_| ()), Err(out_of_range));
    assert_eq!(gather.clear_dirty(span, |_| ()), Err(out_of_range));
    assert_eq!(gather.split(at, Level::PAGE).err(), refused);
    assert_eq!(space.relax(at, Perms::ANY_WRITE, true).err(), refused);
    assert_eq!(space.open(at, true).err(), refused);
    assert_eq!(space.map_range(span, RAM, blocks()).err(), refused);
    assert!(space.query(at).is_none());
    match NewLeaf::new(at, RAM, Level::PAGE, Attrs::USER_DATA) {
        Ok(leaf) => assert_eq!(gather.map(&leaf).err(), refused),
        Err(error) => assert_eq!(error, out_of_range),
    }
    assert!(gather.is_clean());
}

/// A range over the hole of x86-64 was protected by shared edits, and refused by exclusive ones.
#[test]
fn a_range_over_the_hole_is_refused() {
    let platform = platform(tablewright_hosted::CAPS);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    let (low, high) = (Va::new(0x7fff_ffff_f000), Va::new(0xffff_8000_0000_0fff));
    let over = Span::inclusive(low, high).unwrap();
    let exclusive = space.gather().protect(over, read_only());
    assert_eq!(exclusive, Err(EditError::InputOutOfRange));
    let space = SharedSpace::new(space).ok().unwrap();
    let shared = space.gather().protect(over, read_only());
    assert_eq!(shared, Err(EditError::InputOutOfRange));
}

/// A shared edit took one member of a run of an exclusive space: its neighbours still promised a
/// run around it.
#[test]
fn a_run_is_unfolded_when_its_space_is_shared() {
    let platform = platform(tablewright_hosted::CAPS);
    let mut space = AddressSpace::<S2, _>::new(&platform).unwrap();
    space.map(ipa(0, 16 * PAGE), RAM, Attrs::GUEST_MEMORY).unwrap();
    space.make_live();
    assert!(space.query(Ipa::new(0)).unwrap().is_contiguous());
    platform.take_events();
    let space = SharedSpace::new(space).ok().unwrap();
    // Broken, and forgotten as what it was.
    let log = platform.take_log();
    let of_run = |told: &Told| (0..16).all(|page| told.covers(page * PAGE));
    assert!(log.iter().any(of_run), "{log:x?}");
    let mut gather = space.gather();
    unmap(&mut gather, ipa(0, PAGE));
    assert!(gather.finish(|_| ()).is_ok());
    assert!(space.query(Ipa::new(0)).is_none());
    for page in 1..16 {
        let leaf = space.query(Ipa::new(page * PAGE)).unwrap();
        assert!(!leaf.is_contiguous());
        assert_eq!(leaf.frame().get(), RAM.get() + page * PAGE);
    }
}

/// Shared edits do not look at what tables take away: text was installed below a table that denies
/// execution, and a query said that it could be executed.
#[test]
fn a_space_whose_tables_deny_is_not_shared() {
    let platform = platform(tablewright_hosted::CAPS);
    let denying = Mapping::new(Attrs::USER_DATA).pages_only().tables_deny_execution();
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    space.map(va(0, PAGE), RAM, denying).unwrap();
    let space = SharedSpace::new(space).err().unwrap();
    // The same of a tree of which nothing is known, with the denying table last.
    let root = space.root();
    let adopt = || {
        // SAFETY: a tree of the engine's (1.), whose other owner is not used any more (2.), and
        // that no CPU walks (3.).
        unsafe { AddressSpace::<X86_64<4>, _>::adopt(&platform, root, Half::Lower, Liveness::Dead) }
            .unwrap()
    };
    let mut space = SharedSpace::new(adopt()).err().unwrap();
    // Where none denies any more, it is shared.
    let mut gather = space.gather();
    let taken = gather.unmap(va(0, 512 << 30), |_| ControlFlow::Continue(()));
    assert!(taken.unwrap().is_done());
    gather.finish(|_| ());
    let plain = Mapping::new(Attrs::USER_DATA).pages_only();
    space.map(va(0, PAGE), RAM, plain).unwrap();
    let space = SharedSpace::new(adopt()).ok().unwrap();
    let mut gather = space.gather();
    let text = NewLeaf::new(Va::new(PAGE), RAM, Level::PAGE, Attrs::USER_TEXT).unwrap();
    assert_eq!(gather.map(&text), Ok(Mapped::Installed));
}

/// The root of a space that was shared at once was zeroed and never published, and then loaded.
#[test]
fn a_root_is_published_before_it_is_loaded() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = AddressSpace::<S2, _>::new(&platform).unwrap();
    assert_eq!(platform.take_events(), []);
    let space = SharedSpace::new(space).ok().unwrap();
    assert_eq!(platform.take_events(), [Event::Publish]);
    assert_eq!(space.root(), Threads::BASE);
}

/// A virtual CPU writes page 5, which is mapped and marked.
fn write_page_5<'t, P: SharedPlatform + Clone>(
    gather: &mut tablewright::guest::Gather<'_, '_, Ept<4>, P>,
    ram: &Slot,
    bitmap: &Bitmap<'t>,
) {
    let guest = gather.guest();
    let write = Fault::new(Ipa::new(5 * PAGE), Access::Write);
    let request = guest.request(&write).unwrap();
    assert!(gather.top_up(4));
    let page = Backing::new(Pa::new(5 * PAGE), PAGE);
    assert_eq!(gather.map(&request, &page), Ok(Mapped::Installed));
    guest.mark(&Marker::Bitmap(bitmap), ram, write.at);
    assert!(gather.finish(|_| ()).is_ok());
}

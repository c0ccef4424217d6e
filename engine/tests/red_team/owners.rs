//! Side memory and takers: a visitor that unwinds or is entered again, a value that is dropped, and
//! an older copy of a slot lose no mark and no flush, and stop nothing. Two owners of one memory do
//! not compile: see the doc tests of `Ring`, `Flip`, `Space`, `Shootdown`, `Identifiers` and
//! `SlotCell`.

use std::cell::Cell;

use tablewright::dirty::{Flip, Ring, RingEntry};
use tablewright::guest::SlotError;
use tablewright::hyperv::{FlushQueue, Pages};
use tablewright::linear::{SlotMemory, Slots, Window, Windowed};
use tablewright::shootdown::PreemptedFlag;
use tablewright_hosted::Hosted;

use super::*;

fn unwinds(what: impl FnOnce()) {
    assert!(catch_unwind(AssertUnwindSafe(what)).is_err());
}

fn entries<const N: usize>() -> [RingEntry; N] {
    [const { RingEntry::new() }; N]
}

// ---- Rings ----

#[test]
fn a_visitor_that_unwinds_does_not_stop_a_ring() {
    let mut entries = entries::<8>();
    let ring = Ring::new(&mut entries).unwrap();
    ring.push(0, 1);
    ring.push(0, 2);
    let mut seen = Vec::new();
    unwinds(|| {
        ring.harvest(|_, page| {
            assert!(page < 2, "the visitor unwinds");
            seen.push(page);
        });
    });
    ring.push(0, 3);
    ring.harvest(|_, page| seen.push(page));
    assert_eq!(seen, [1, 2, 3]);
    // Of a collection nothing is released, and it is made again.
    unwinds(|| drop(ring.collect(|_, page| assert!(page < 3, "the visitor unwinds"))));
    let mut closed = Vec::new();
    ring.collect(|_, page| closed.push(page)).release();
    assert_eq!(closed, [1, 2, 3]);
    assert!(ring.collect(|_, _| ()).is_empty());
}

#[test]
fn a_harvest_inside_of_a_harvest_takes_nothing() {
    let mut entries = entries::<8>();
    let ring = Ring::new(&mut entries).unwrap();
    (1..=3).for_each(|page| ring.push(0, page));
    let mut seen = Vec::new();
    let harvested = ring.harvest(|_, page| {
        seen.push(page);
        assert_eq!(ring.harvest(|_, _| panic!("given out twice")), 0);
        let collected = ring.collect(|_, _| panic!("not harvested yet"));
        collected.release();
    });
    ring.push(0, 4);
    ring.harvest(|_, page| seen.push(page));
    assert_eq!((harvested, seen), (3, vec![1, 2, 3, 4]));
    let collected = ring.collect(|_, _| assert_eq!(ring.harvest(|_, _| ()), 0));
    assert_eq!(collected.len(), 4);
}

#[test]
fn what_was_collected_and_not_released_is_collected_again() {
    let mut entries = entries::<2>();
    let ring = Ring::new(&mut entries).unwrap();
    (1..=2).for_each(|page| ring.push(0, page));
    ring.harvest(|_, _| ());
    drop(ring.collect(|_, _| ()));
    let (first, second) = (ring.collect(|_, _| ()), ring.collect(|_, _| ()));
    assert!(!ring.has_room());
    first.release();
    assert!(ring.has_room());
    // The virtual CPU fills the entries again: they are not the second's any more.
    (3..=4).for_each(|page| ring.push(0, page));
    second.release();
    let mut seen = Vec::new();
    ring.harvest(|_, page| seen.push(page));
    assert_eq!(seen, [3, 4]);
}

// ---- Bitmaps ----

#[test]
fn a_visitor_that_unwinds_leaves_the_marks_of_a_bitmap() {
    let mut words = [const { AtomicU64::new(0) }; 2];
    let bitmap = Bitmap::new(&mut words, 100).unwrap();
    for pages in [0..100, 3..71] {
        [5, 70].iter().for_each(|&page| bitmap.mark(page));
        unwinds(|| bitmap.harvest(pages.clone(), |first, _| assert!(first < 64)));
        assert!(!bitmap.is_marked(5) && bitmap.is_marked(70));
        // One that enters again, and marks what it was given.
        bitmap.harvest(pages, |_, _| {
            bitmap.harvest(0..100, |_, _| panic!("given out twice"));
            bitmap.mark(70);
        });
        assert!(bitmap.is_marked(70));
    }
}

#[test]
fn a_visitor_that_unwinds_leaves_the_marks_of_a_drain() {
    let platform = Threads::new(8, 12, 1);
    let (mut first, mut second) = ([const { AtomicU64::new(0) }; 9], [0; 9].map(AtomicU64::new));
    let map = |words| Bitmap::new(words, 9 * 64).unwrap();
    let flip = Flip::new(map(&mut first), map(&mut second)).unwrap();
    for page in [5, 100, 530] {
        flip.current().mark(page);
    }
    let (mut given, before) = (Vec::new(), flip.current());
    unwinds(|| {
        flip.drain(&&platform, |first, bits| {
            assert!(first < 64 || bits == 0);
            given.extend((bits != 0).then_some(first));
        });
    });
    assert!(before.is_marked(100) && before.is_marked(530) && !before.is_marked(5));
    // It goes on where it was, and a drain inside of it takes nothing.
    flip.current().mark(3);
    let is_drained = flip.drain(&&platform, |first, bits| {
        assert!(!flip.drain(&&platform, |_, _| panic!("given out twice")));
        given.extend((bits != 0).then_some(first));
    });
    assert_eq!((is_drained, given), (true, vec![0, 64, 512]));
    let mut next = 0;
    assert!(flip.drain(&&platform, |_, bits| next |= bits));
    assert_eq!(next, 1 << 3);
}

// ---- Queues, and virtual CPUs that do not run ----

#[test]
fn a_visitor_of_a_queue_that_unwinds_leaves_the_flush() {
    let queue = FlushQueue::<4>::new();
    (7..9).for_each(|page| queue.push(Pages::small(page << 12, 1)));
    unwinds(|| {
        let _ = queue.take(|_| panic!("the visitor unwinds"));
    });
    let mut seen = Vec::new();
    let all = queue.take(|pages| seen.push(pages.first));
    seen.sort();
    assert!(!all && seen == [7 << 12, 8 << 12]);
}

#[test]
fn a_cpu_that_is_taken_off_twice_is_flushed() {
    let flag = PreemptedFlag::default();
    flag.preempt();
    assert!(flag.defer(), "it does not run, and will flush");
    flag.preempt(); // its thread was scheduled in, and out again
    assert!(flag.enter());
    assert!(!flag.enter() && !flag.defer());
}

// ---- Guests ----

fn guest<'s>(platform: &'s Threads, cells: &'s mut [SlotCell]) -> Guest<'s, Ept<4>, &'s Threads> {
    let space = AddressSpace::<Ept<4>, _>::new(platform).unwrap();
    Guest::new(SharedSpace::new(space).ok().unwrap(), cells)
}

#[test]
fn a_harvest_by_a_slot_of_before_is_refused() {
    let platform = platform(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 2];
    let guest = guest(&platform, &mut cells);
    let now = Slot::memory(ipa(0, BLOCK), 0).with_log(Log::ByFault);
    guest.insert(now).unwrap();
    let mut words = [const { AtomicU64::new(0) }; 8];
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    let mut gather = guest.gather();
    write_page_5(&mut gather, &now, &bitmap);
    let moved = Slot::memory(ipa(BLOCK, BLOCK), 0).with_log(Log::ByFault);
    let smaller = Slot::memory(ipa(0, PAGE), 0).with_log(Log::ByFault);
    let others =
        [now.with_log(Log::ByHardware), now.with_log(Log::Off), now.with_id(1), moved, smaller];
    for other in others {
        let each = |_, _| panic!("given out, and not closed");
        let harvested = gather.harvest(&other, &bitmap, 0..1, Harvest::empty(), each);
        assert_eq!(harvested, Err(SlotError::Unknown), "{other:?}");
        assert_eq!(gather.protect(&other, 0..1), Err(SlotError::Unknown));
    }
    let other = now.with_log(Log::ByModification);
    assert_eq!(gather.begin_modification_log(&other), Err(SlotError::Unknown));
    assert!(gather.is_clean() && bitmap.is_marked(5));
    // A hint that is no power of two is not another slot.
    let same = Slot { page: 3 << 20, ..now };
    let each = |_, bits| assert_eq!(bits, 1 << 5);
    let harvested = gather.harvest(&same, &bitmap, 0..512, Harvest::empty(), each);
    assert_eq!(harvested, Ok(()));
    assert!(gather.finish(|_| ()).is_ok());
    let leaf = guest.space().query(Ipa::new(5 * PAGE)).unwrap();
    assert!(!leaf.attrs().perms.contains(Perms::WRITE));
}

/// Cells have the slots of the last guest that had them, when a guest is made of them.
#[test]
fn a_guest_has_no_slots_of_another() {
    let platform = platform(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 2];
    {
        let before = guest(&platform, &mut cells);
        before.insert(Slot::memory(ipa(0, BLOCK), 0)).unwrap();
        assert!(before.slot(Ipa::new(0)).is_ok());
    }
    let after = guest(&platform, &mut cells);
    assert_eq!(after.slot(Ipa::new(0)), Err(SlotError::Unknown));
    let other = Slot::memory(ipa(PAGE, BLOCK), 0);
    assert_eq!(after.insert(other), Ok(()));
}

#[test]
fn a_log_by_hardware_without_hardware_is_refused() {
    let platform = platform(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 1];
    let guest = guest(&platform, &mut cells);
    let slot = Slot::memory(ipa(0, BLOCK), 0);
    guest.insert(slot.with_log(Log::ByFault)).unwrap();
    for log in [Log::ByHardware, Log::ByModification] {
        let replaced = guest.replace(slot.with_log(log)).map(drop);
        assert_eq!(replaced, Err(SlotError::NoHardware));
        let beside = slot.with_id(1).with_log(log);
        assert_eq!(guest.insert(beside), Err(SlotError::NoHardware));
    }
    assert_eq!(guest.slot(Ipa::new(0)).unwrap().log, Log::ByFault);
}

// ---- Starts ----

#[test]
fn a_guest_writes_after_a_start_that_unwinds() {
    for (already, claimed) in [(false, false), (true, false), (false, true), (true, true)] {
        let platform = platform(BY_FAULTS);
        let space = mapped::<S2>(&platform, 1, 2 * BLOCK, pages());
        let write = |at| space.open(Ipa::new(at), true);
        if already {
            space.protect_all().unwrap().drive(|| ());
        }
        // The start waits for a walk, or for a claim at the root, beside what it has protected.
        let root = || {
            // SAFETY: the root, which has two entries.
            unsafe { platform.table(space.root(), S2::root_level()).add(1).as_ref() }
        };
        root().exchange(if claimed { S2::FROZEN } else { 0 });
        let walk = (!claimed).then(|| platform.enter());
        let start = space.protect_all().unwrap();
        unwinds(|| start.drive(|| panic!("the wait unwinds")));
        drop(walk);
        root().exchange(0);
        assert_eq!(write(0), Ok(()), "{already} {claimed}");
        let entry = platform.read(space.root(), 0).unwrap();
        assert!(!S2::is_protected(entry), "{already} {claimed}");
        let leaf = space.query(Ipa::new(0)).unwrap();
        assert!(already || claimed || leaf.attrs().perms.contains(Perms::WRITE));
        // Another start closes everything.
        let before = space.generation();
        space.protect_all().unwrap().drive(|| ());
        assert_eq!(space.generation(), before + 1);
        assert_eq!(write(0), Ok(()));
        let leaf = space.query(Ipa::new(0)).unwrap();
        assert!(!leaf.attrs().perms.contains(Perms::WRITE));
    }
}

// ---- Windows ----

struct Fixmap<'h>(&'h Hosted, Cell<u32>);

// SAFETY: the pointer is that of the frame (1.).
unsafe impl SlotMemory for Fixmap<'_> {
    fn pointer(&self, _: usize, frame: Pa) -> NonNull<Entry> {
        self.1.set(self.1.get() + 1);
        // SAFETY: the window shows frames of the platform that are in use.
        unsafe { self.0.table(frame, Level::PAGE) }
    }
}

#[test]
fn a_window_at_the_top_of_the_address_space_is_cleaned() {
    const N: usize = 8;
    let platform = Hosted::new(128, 12);
    let entries = [0; N].map(Entry::new);
    let first = Va::new(0u64.wrapping_sub(N as u64 * PAGE));
    let (fixmap, attrs) = (Fixmap(&platform, Cell::default()), Attrs::KERNEL_DATA);
    let table = NonNull::from(&entries[0]);
    // SAFETY: the entries outlive the slots, and have no other user.
    let window = unsafe {
        Slots::<Arm64K4, _, _, N>::new(&platform, fixmap, first, table, &attrs, (Pa::new(0), 0))
    }
    .unwrap();
    assert_eq!(window.span().unwrap().last().get(), u64::MAX);
    // SAFETY: the slots show all frames.
    let windowed = unsafe { Windowed::new(&platform, &window) };
    let mut space = AddressSpace::<Arm64K4, _>::new(windowed).unwrap();
    let pages = Mapping::new(attrs).pages_only();
    space.map(va(0, 64 << 20), Pa::new(0), pages).unwrap();
    window.end_batch();
    assert!(entries.iter().all(|entry| entry.load() == 0));
    platform.record();
    space.map(va(64 << 20, 64 << 20), Pa::new(0), pages).unwrap();
    window.end_batch();
    let log = platform.take_log();
    assert!(log.iter().any(|told| told.covers(u64::MAX)), "{log:?}");
}

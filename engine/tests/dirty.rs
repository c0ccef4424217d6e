//! The log of what a guest writes: marks, harvests, and the protection of everything in one step.

mod common;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;

use common::Decoded;
use proptest::prelude::*;
use tablewright::dirty::{Bitmap, Flip, Full, LogError, Marker, ModificationLog, Ring, RingEntry};
use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4, Stage2K16};
use tablewright::guest::{
    Access, Backing, Fault, Guest, Harvest, Log, Pass, Slot, SlotCell, SlotError,
};
use tablewright::shared::{
    Mapped, NewLeaf, Protected, Refused, Relaxed, SharedPlatform, SharedSpace, Unprotectable,
};
use tablewright::{
    AddressSpace, Attrs, Caps, Change, Format, Ipa, Level, Mapping, Pa, Perms, Platform, Span,
};
use tablewright_hosted::{Event, Threads};
use tablewright_walker as walker;

// ---- Marks ----

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn pages_of(first: u64, bits: u64) -> impl Iterator<Item = u64> {
    (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| first + bit)
}

#[derive(Clone, Debug)]
enum Deed {
    Mark(u64),
    MarkRange(u64, u64),
    Harvest(u64, u64),
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let page = 0..1500u64;
    let deed = prop_oneof![
        4 => page.clone().prop_map(Deed::Mark),
        1 => (page.clone(), page.clone()).prop_map(|(a, b)| Deed::MarkRange(a, b)),
        2 => (page.clone(), page).prop_map(|(a, b)| Deed::Harvest(a, b)),
    ];
    prop::collection::vec(deed, 0..60)
}

proptest! {
    /// Of more words than a cache line has, which are passed over together.
    #[test]
    fn a_bitmap_is_a_set(pages in 1..1400u64, deeds in deeds()) {
        let mut words = words(22);
        let bitmap = Bitmap::new(&mut words, pages).unwrap();
        let mut set = BTreeSet::new();
        for deed in deeds {
            match deed {
                Deed::Mark(page) => {
                    bitmap.mark(page);
                    set.extend((page < pages).then_some(page));
                }
                Deed::MarkRange(from, to) => {
                    bitmap.mark_range(from..to);
                    set.extend(from..to.min(pages));
                }
                Deed::Harvest(from, to) => {
                    let mut found = Vec::new();
                    bitmap.harvest(from..to, |first, bits| found.extend(pages_of(first, bits)));
                    let expected: Vec<u64> = match from < to {
                        true => set.range(from..to).copied().collect(),
                        false => Vec::new(),
                    };
                    prop_assert_eq!(&found, &expected);
                    found.iter().for_each(|page| assert!(set.remove(page)));
                }
            }
            prop_assert_eq!(bitmap.count(), set.len() as u64);
            prop_assert!((0..1500).all(|page| bitmap.is_marked(page) == set.contains(&page)));
        }
    }
}

/// Whole words, so that the first page that it has not is in none of them.
#[test]
fn a_page_beyond_a_bitmap_is_not_marked() {
    let mut words = words(2);
    let bitmap = Bitmap::new(&mut words, 128).unwrap();
    bitmap.mark_all();
    bitmap.mark(128);
    assert!(bitmap.is_marked(127) && !bitmap.is_marked(128));
    assert_eq!((bitmap.count(), bitmap.pages()), (128, 128));
}

/// Two turns, and then the first one's bitmap: it was marked again, and drained with plain stores.
#[test]
fn a_bitmap_is_drained_before_it_is_marked_again() {
    let platform = &Threads::new(8, 12, 1);
    let (mut first, mut second) = (words(9), words(9));
    let map = |words| Bitmap::new(words, 9 * 64).unwrap();
    let flip = Flip::new(map(&mut first), map(&mut second)).unwrap();
    let drained = || {
        let mut pages = Vec::new();
        assert!(flip.drain(&platform, |first, bits| pages.extend(pages_of(first, bits))));
        pages
    };
    flip.current().mark(3);
    // While a walk is under way that may mark the first, it is not given out, nor turned.
    let walk = platform.enter();
    assert!((0..3).all(|_| !flip.drain(&platform, |_, _| panic!("it may be marked"))));
    flip.current().mark(70);
    drop(walk);
    flip.current().mark(550);
    assert_eq!(drained(), [3]);
    assert_eq!(drained(), [70, 550]);
    assert_eq!(drained(), []);
}

#[test]
fn what_is_no_log_is_refused() {
    let (mut three, mut two) = (words(3), words(2));
    assert_eq!(Bitmap::new(&mut two, 129).err(), Some(LogError::TooFewBits(128)));
    let unequal =
        Flip::new(Bitmap::new(&mut three, 128).unwrap(), Bitmap::new(&mut two, 127).unwrap());
    assert_eq!(unequal.err(), Some(LogError::Unequal));
    let mut entries = [const { RingEntry::new() }; 6];
    assert_eq!(Ring::new(&mut entries).err(), Some(LogError::RingSize(6)));
    assert_eq!(Ring::new(&mut []).err(), Some(LogError::RingSize(0)));
}

#[test]
fn a_ring_that_is_full_says_so_and_loses_nothing() {
    let mut entries = [const { RingEntry::new() }; 4];
    let ring = Ring::new(&mut entries).unwrap();
    let marker = Marker::Ring(&ring, 3);
    let (mut next, mut seen) = (0, Vec::new());
    for round in 0..5 {
        while marker.room().is_ok() {
            ring.push(3, next);
            next += 1;
        }
        assert_eq!(marker.room(), Err(Full));
        // What was harvested is not empty before it is protected.
        let harvested = ring.harvest(|slot, page| seen.push((slot, page)));
        assert_eq!(harvested, 4, "round {round}");
        assert_eq!(marker.room(), Err(Full));
        let mut collected = Vec::new();
        let batch = ring.collect(|slot, page| collected.push((slot, page)));
        assert_eq!(batch.len(), 4);
        assert_eq!(marker.room(), Err(Full));
        assert_eq!(collected, seen[seen.len() - 4..]);
        batch.release();
    }
    assert_eq!(seen, (0..20).map(|page| (3, page)).collect::<Vec<_>>());
}

/// An embedder makes a second ring of the memory of the first, with entries still in it.
#[test]
fn a_new_ring_is_empty() {
    let mut entries = [const { RingEntry::new() }; 4];
    for _ in 0..2 {
        let ring = Ring::new(&mut entries).unwrap();
        assert_eq!(ring.harvest(|slot, page| panic!("{slot}, {page}")), 0);
        (0..3).for_each(|page| ring.push(3, page));
        assert_eq!(ring.harvest(|_, _| ()), 3);
        assert!(!ring.collect(|_, _| ()).is_empty());
    }
}

// ---- A guest ----

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The address of the guest's memory.
const OFFSET: u64 = 1 << 36;

struct Vm<'s, F: Format<Input = Ipa>> {
    guest: Guest<'s, F, &'s Threads>,
    platform: &'s Threads,
}

fn by_faults() -> Caps {
    Caps { hardware_dirty: false, ..tablewright_hosted::CAPS }
}

impl<'s, F: Decoded<Input = Ipa>> Vm<'s, F> {
    fn new(platform: &'s Threads, cells: &'s mut [SlotCell]) -> Self {
        let space = SharedSpace::new(AddressSpace::new(platform).unwrap());
        Self { guest: Guest::new(space.ok().unwrap(), cells), platform }
    }

    /// Returns the accesses that hardware allows at an address.
    fn access(&self, at: u64) -> Option<walker::Permissions> {
        let root = self.guest.space().root().get();
        let mut read = |table: u64, index: usize| {
            // First tables lie beside each other.
            let page = F::PAGE_SHIFT;
            let (frame, index) =
                (table + ((index as u64 * 8) >> page << page), index & ((1 << (page - 3)) - 1));
            self.platform.read(Pa::new(frame), index).unwrap()
        };
        let leaf = walker::translate(F::REGIME, root, at, &mut read).ok()?;
        Some(leaf.access.user)
    }

    fn can_write(&self, at: u64) -> bool {
        self.access(at).is_some_and(|access| access.write)
    }

    fn fault(&self, at: u64, access: Access, size: u64) -> Result<Mapped<F>, Refused<Ipa>> {
        let request = self.guest.request(&Fault::new(Ipa::new(at), access)).unwrap();
        let page = Backing::new(Pa::new(at + OFFSET), size);
        let mut gather = self.guest.gather();
        let mut mapped = Err(Refused::Retry);
        for _ in 0..4 {
            mapped = gather.map(&request, &page);
            let Err(Refused::NeedsTables(count)) = mapped else {
                break;
            };
            assert!(gather.top_up(count));
        }
        assert!(gather.finish(|_| ()).is_ok());
        mapped
    }

    fn reopen(&self, at: u64, access: Access) -> Result<bool, Refused<Ipa>> {
        let request = self.guest.request(&Fault::new(Ipa::new(at), access)).unwrap();
        self.guest.reopen(&request)
    }

    /// How many flushes it took.
    fn protect_all(&self) -> Result<usize, Unprotectable> {
        let start = self.guest.space().protect_all()?;
        self.platform.record();
        start.drive(|| {});
        let log = self.platform.take_log();
        assert!(log.iter().all(|told| told.everything));
        Ok(log.len())
    }
}

fn span(first: u64, size: u64) -> Span<Ipa> {
    Span::new(Ipa::new(first), size).unwrap()
}

/// A guest with this much memory, mapped, as large as can be or in pages.
fn full<'s, F: Decoded<Input = Ipa>>(
    platform: &'s Threads,
    cells: &'s mut [SlotCell],
    size: u64,
    pages: bool,
) -> (Vm<'s, F>, Slot) {
    let vm = Vm::new(platform, cells);
    let ram = Slot::memory(span(0, size), 0);
    vm.guest.insert(ram).unwrap();
    let attrs = Attrs { software: tablewright::guest::HOST_WRITES, ..Attrs::GUEST_MEMORY };
    let mapping = Mapping::new(attrs);
    let mapping = if pages { mapping.pages_only() } else { mapping };
    let space = vm.guest.space();
    space.map_range(ram.guest, Pa::new(OFFSET), mapping).unwrap();
    drop(vm.guest.replace(ram.with_log(Log::ByFault)).unwrap());
    (vm, ram.with_log(Log::ByFault))
}

fn everything_is_protected_in_one_step<F: Decoded<Input = Ipa>>() {
    let platform = Threads::new(3000, F::PAGE_SHIFT, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 2];
    let page = 1 << F::PAGE_SHIFT;
    let (vm, ram) = full::<F>(&platform, &mut cells, GIB, true);
    let addresses = || (0..GIB).step_by(31 * page as usize);
    assert!(addresses().all(|at| vm.can_write(at)));
    assert_eq!(vm.protect_all(), Ok(1));
    assert_eq!(vm.guest.space().generation(), 1);
    for at in addresses() {
        let access = vm.access(at);
        assert!(access.is_none_or(|access| !access.write), "{at:#x}");
        // Where tables take permissions away, it can still be read.
        assert_eq!(access.is_some(), F::TABLES_RESTRICT, "{at:#x}");
        // To an editor everything is where it was.
        let leaf = vm.guest.space().query(Ipa::new(at)).unwrap();
        assert_eq!(leaf.frame().get(), leaf.input().get() + OFFSET);
    }
    // A read opens the tables on its way, where they have to be opened, and gives no page back.
    assert_eq!(vm.reopen(5 * page, Access::Read), Ok(true));
    assert!(vm.access(5 * page).is_some_and(|access| access.read && !access.write));
    // A write gives one page back, and no other.
    assert_eq!(vm.reopen(5 * page, Access::Write), Ok(true));
    let far = (512 << F::PAGE_SHIFT) + 7 * page;
    assert!(matches!(vm.fault(far, Access::Write, page), Ok(Mapped::Relaxed)));
    for at in addresses().chain([5 * page, far, 4 * page, 6 * page, far - page]) {
        assert_eq!(vm.can_write(at), [5 * page, far].contains(&at), "{at:#x}");
    }
    // And again.
    assert_eq!(vm.protect_all(), Ok(1));
    assert!(addresses().chain([5 * page, far]).all(|at| !vm.can_write(at)));
    assert_eq!(vm.reopen(6 * page, Access::Write), Ok(true));
    assert!(vm.can_write(6 * page) && !vm.can_write(5 * page));
    // Write-protected tables are taken apart like others.
    let mut zap = vm.guest.remove(ram.id).unwrap();
    let (mut taken, mut held) = (0, Vec::new());
    let mut gather = vm.guest.gather();
    loop {
        let pass = zap.unmap(&mut gather, |leaf| {
            held.push(leaf);
            ControlFlow::Continue(())
        });
        match pass.unwrap() {
            Pass::Waiting => {}
            Pass::Over => break,
            Pass::Went => {
                let deferred = gather.issue().complete();
                for leaf in held.drain(..) {
                    taken += deferred.release(leaf).ok().unwrap().size();
                }
                deferred.try_complete().ok().unwrap().finish(|leaf| taken += leaf.size());
            }
        }
    }
    assert_eq!(taken, GIB);
    let root_tables = F::root_tables() as u64;
    let left = platform.tables();
    assert!(left <= root_tables + 3, "{left} tables are left");
}

#[test]
fn everything_is_protected_in_one_step_whatever_the_format() {
    everything_is_protected_in_one_step::<Stage2K4<40>>();
    everything_is_protected_in_one_step::<Stage2K4<48, FORCED_WRITE_BACK>>();
    everything_is_protected_in_one_step::<Stage2K16<40>>();
    everything_is_protected_in_one_step::<Ept<4>>();
    everything_is_protected_in_one_step::<Npt<4>>();
}

/// A page that is mapped like the last one is still below tables that may have been protected
/// since.
fn a_page_below_a_protected_table_is_mapped_to_be_written<F: Decoded<Input = Ipa>>() {
    let platform = Threads::new(100, F::PAGE_SHIFT, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let vm = Vm::<F>::new(&platform, &mut cells);
    let page = 1 << F::PAGE_SHIFT;
    let ram = Slot::memory(span(0, 16 * page), 0).with_log(Log::ByFault);
    vm.guest.insert(ram).unwrap();
    let mut gather = vm.guest.gather();
    let mut write = |at: u64| {
        let request = vm.guest.request(&Fault::new(Ipa::new(at), Access::Write));
        let request = request.unwrap();
        assert!(gather.top_up(request.tables()));
        gather.map(&request, &Backing::new(Pa::new(OFFSET + at), page))
    };
    for at in [0, page] {
        assert!(matches!(write(at), Ok(Mapped::Installed)));
    }
    assert_eq!(vm.protect_all(), Ok(1));
    assert!(matches!(write(2 * page), Ok(Mapped::Installed)));
    let writable = [0, page, 2 * page].map(|at| vm.can_write(at));
    assert_eq!(writable, [false, false, true]);
}

#[test]
fn a_page_below_a_protected_table_is_mapped_to_be_written_whatever_the_format() {
    a_page_below_a_protected_table_is_mapped_to_be_written::<Stage2K4<40>>();
    a_page_below_a_protected_table_is_mapped_to_be_written::<Ept<4>>();
}

/// The levels of what was to be forgotten since the last call, on this processor or on all; in
/// ranges.
fn levels(platform: &Threads) -> Vec<Option<Level>> {
    let mut levels = Vec::new();
    for event in platform.take_events() {
        if let Event::Invalidate(told) | Event::InvalidateHere(told) = event {
            assert!(!told.everything);
            for range in told.ranges {
                assert_eq!(range.tables, range.level.is_none());
                levels.push(range.level);
            }
        }
    }
    levels
}

/// An invalidation by the level of a block leaves what is remembered of the table whose place it
/// has taken: until that is forgotten, no other edit names a level there.
#[test]
fn what_edits_a_block_that_has_come_back_has_every_level_forgotten() {
    let caps = Caps { bbm: 2, invalidate_all_above: 4096, ..by_faults() };
    let platform = Threads::new(64, 12, 1).with_caps(caps);
    let mut cells = [const { SlotCell::new() }; 1];
    let vm = Vm::<Stage2K4<40>>::new(&platform, &mut cells);
    let (guest, space) = (&vm.guest, vm.guest.space());
    let ram = span(0, 8 * MIB);
    guest.insert(Slot::memory(ram, OFFSET)).unwrap();
    let mapping = Mapping::new(Attrs::GUEST_MEMORY);
    space.map_range(ram, Pa::new(OFFSET), mapping.pages_only()).unwrap();
    let block = |at: u64| span(at, 2 * MIB);
    let protect = |at: u64| {
        let mut gather = space.gather();
        let change = Change::new().write_protect();
        assert!(gather.protect(block(at), change).unwrap().changed);
        assert!(gather.finish(|_| ()).is_ok());
        levels(&platform)
    };
    let relax = |at: u64| {
        let relaxed = space.relax(Ipa::new(at), Perms::ANY_WRITE, false);
        assert_eq!(relaxed, Ok(Relaxed::Done));
        levels(&platform)
    };
    let clear = |at: u64| {
        let mut gather = space.gather();
        gather.clear_dirty(block(at), |_| ()).unwrap();
        assert!(gather.finish(|_| ()).is_ok());
        levels(&platform)
    };
    // In place, and nothing is forgotten yet.
    platform.record();
    let mut collapse = guest.gather();
    for at in [0, 2 * MIB, 4 * MIB] {
        let read = Fault::new(Ipa::new(at), Access::Read);
        let request = guest.request(&read).unwrap();
        let page = Backing::new(Pa::new(OFFSET + at), 2 * MIB);
        assert_eq!(collapse.collapse(&request, &page), Ok(true));
    }
    assert!(levels(&platform).is_empty() && !collapse.is_clean());
    assert_eq!(space.query(Ipa::new(0)).unwrap().size(), 2 * MIB);
    let named = |levels: Vec<Option<Level>>| {
        assert!(!levels.is_empty());
        levels.into_iter().flatten().count()
    };
    assert_eq!(named(protect(0)), 0);
    assert_eq!(named(relax(0)), 0);
    assert_eq!(named(clear(2 * MIB)), 0);
    let other =
        NewLeaf::new(Ipa::new(2 * MIB), Pa::new(4 * OFFSET), Level::new(1), Attrs::GUEST_MEMORY);
    let mut gather = space.gather();
    let replaced = gather.map(&other.unwrap());
    assert!(matches!(replaced, Ok(Mapped::Replaced(_))), "{replaced:?}");
    assert_eq!(named(levels(&platform)), 0);
    assert!(gather.top_up(1));
    assert_eq!(gather.split(Ipa::new(4 * MIB), Level::PAGE), Ok(true));
    assert_eq!(named(levels(&platform)), 0);
    assert!(gather.finish(|_| ()).is_ok());
    // All of it by one invalidation; and from then on by level.
    assert!(collapse.finish(|_| ()).is_ok());
    assert_eq!(levels(&platform), [None]);
    assert_eq!(named(protect(0)), 1);
    assert_eq!(named(relax(0)), 1);
    assert_eq!(named(clear(0)), 1);
}

#[test]
fn a_large_leaf_is_not_made_writable_while_its_slot_is_logged() {
    let platform = Threads::new(3000, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = full::<Ept<4>>(&platform, &mut cells, GIB, false);
    assert_eq!(vm.protect_all(), Ok(1));
    assert_eq!(vm.reopen(0x5000, Access::Write), Ok(false));
    assert_eq!(vm.fault(0x5000, Access::Write, GIB), Ok(Mapped::Relaxed));
    assert!(vm.can_write(0x5000) && !vm.can_write(0x4000) && !vm.can_write(2 * MIB));
    // The log ends, and the block comes back in place.
    drop(vm.guest.replace(ram.with_log(Log::Off)).unwrap());
    let read = Fault::new(Ipa::new(0x5000), Access::Read);
    let mut gather = vm.guest.gather();
    let request = vm.guest.request(&read).unwrap();
    let page = Backing::new(Pa::new(OFFSET + 0x5000), GIB);
    assert_eq!(gather.collapse(&request, &page), Ok(true));
    assert!(!gather.is_clean());
    assert!(gather.finish(|_| panic!("no leaf has gone")).is_ok());
    assert_eq!(vm.guest.space().query(Ipa::new(0)).unwrap().size(), GIB);
    assert!(vm.can_write(0x5000) && vm.can_write(GIB - 1));
    assert_eq!(gather.collapse(&request, &page), Ok(false));
    assert!(gather.is_clean() && gather.finish(|_| ()).is_ok());
    // Without a log it is simply writable again.
    assert_eq!(vm.protect_all(), Ok(1));
    assert_eq!(vm.reopen(0x5000, Access::Write), Ok(true));
    assert!(vm.can_write(GIB - 1));
}

#[test]
fn what_cannot_be_protected_is_refused() {
    let platform = Threads::new(700, 12, 1).with_caps(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, _) = full::<Ept<4>>(&platform, &mut cells, MIB, true);
    assert_eq!(vm.protect_all(), Err(Unprotectable::HardwareDirty));

    let platform = Threads::new(700, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = full::<Ept<4>>(&platform, &mut cells, 4 * MIB, true);
    assert_eq!(vm.guest.protect_no_more(), Err(Unprotectable::Logged));
    let walk = platform.enter();
    let mut first = vm.guest.space().protect_all().unwrap();
    assert_eq!(vm.protect_all(), Err(Unprotectable::Busy));
    assert!(!first.step());
    drop(walk);
    assert!(first.step());
    assert!(!vm.can_write(0));
    assert_eq!(vm.reopen(0, Access::Write), Ok(true));

    // What is opened when nothing is logged any more is not protected.
    assert_eq!(vm.protect_all(), Ok(1));
    drop(vm.guest.replace(ram.with_log(Log::Off)).unwrap());
    assert_eq!(vm.guest.protect_no_more(), Ok(()));
    assert_eq!(vm.reopen(2 * MIB, Access::Write), Ok(true));
    assert!(vm.can_write(2 * MIB + 0x3000) && !vm.can_write(0x3000));
}

#[test]
fn nothing_is_made_writable_before_a_start_is_over() {
    type F = Stage2K4<40>;
    let platform = Threads::new(3000, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, _) = full::<F>(&platform, &mut cells, 2 * GIB, true);
    // An entry of the root is claimed, as by a split: the start puts the rest to sleep, and waits.
    let root = vm.guest.space().root();
    let claim = |new| {
        // SAFETY: the root, which has two entries.
        let entry = unsafe { platform.table(root, F::root_level()).add(1).as_ref() };
        entry.exchange(new)
    };
    let block = claim(F::FROZEN);
    let mut start = vm.guest.space().protect_all().unwrap();
    assert!(!start.step());
    assert!(!vm.can_write(0));
    assert_eq!(vm.reopen(0, Access::Write), Err(Refused::Busy(Ipa::new(0))));
    assert!(!vm.can_write(0));
    assert_eq!(claim(block), F::FROZEN);
    assert!(start.step());
    assert!(!vm.can_write(0) && !vm.can_write(GIB));
    assert_eq!(vm.reopen(0, Access::Write), Ok(true));
    assert!(vm.can_write(0) && !vm.can_write(4096));
}

#[test]
fn a_harvest_protects_what_it_gives_out() {
    let platform = Threads::new(700, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = full::<Ept<4>>(&platform, &mut cells, 2 * MIB, true);
    let mut words = words(8);
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    let marker = Marker::Bitmap(&bitmap);
    assert_eq!(vm.protect_all(), Ok(1));
    for page in [0, 1, 2, 63, 64, 100, 511] {
        assert_eq!(vm.reopen(page << 12, Access::Write), Ok(true));
        vm.guest.mark(&marker, &ram, Ipa::new((page << 12) + 5));
    }
    let harvest = |pages, how| {
        let (mut found, mut gather) = (Vec::new(), vm.guest.gather());
        let each = |first, bits| found.extend(pages_of(first, bits));
        let done = gather.harvest(&ram, &bitmap, pages, how, each);
        assert!(gather.finish(|_| ()).is_ok());
        done.map(|()| found)
    };
    assert_eq!(harvest(1..70, Harvest::empty()), Ok(vec![1, 2, 63, 64]));
    let writable: Vec<u64> = (0..512).filter(|page| vm.can_write(page << 12)).collect();
    assert_eq!(writable, [0, 100, 511]);
    assert_eq!(harvest(0..512, Harvest::KEEP), Ok(vec![0, 100, 511]));
    assert!(vm.can_write(0) && bitmap.count() == 0);
    // A range with its ends exchanged has no page: its first address overflowed.
    #[expect(clippy::reversed_empty_ranges, reason = "that is it")]
    let reversed = (u64::MAX >> 12)..0;
    assert_eq!(harvest(reversed.clone(), Harvest::empty()), Ok(vec![]));
    let protected = vm.guest.gather().protect(&ram, reversed);
    assert_eq!(protected, Ok(Protected::default()));
    let unknown = Harvest::from_bits_retain(6);
    assert_eq!(harvest(0..1, unknown), Err(SlotError::Flags(6)));
    assert_eq!(harvest(0..513, Harvest::empty()), Err(SlotError::Pages(512)));
    let mut gather = vm.guest.gather();
    let unlogged = ram.with_log(Log::Off);
    assert_eq!(gather.protect(&unlogged, 0..1), Err(SlotError::Unknown));
    drop(vm.guest.replace(unlogged).unwrap());
    assert_eq!(gather.protect(&unlogged, 0..1), Err(SlotError::NotLogged(0)));
    assert!(gather.is_clean() && gather.finish(|_| ()).is_ok());
}

#[test]
fn a_range_of_pages_with_its_ends_exchanged_has_none() {
    let platform = Threads::new(100, 12, 1);
    let mut cells = [const { SlotCell::new() }; 1];
    let vm = Vm::<Ept<4>>::new(&platform, &mut cells);
    let ram = Slot::memory(span(4 * MIB, MIB), 0).with_log(Log::ByFault);
    vm.guest.insert(ram).unwrap();
    let mut gather = vm.guest.gather();
    for first in [2, 300, 1 << 51, u64::MAX >> 12, u64::MAX] {
        assert_eq!(gather.protect(&ram, first..1), Ok(Protected::default()), "{first:#x}");
    }
    assert!(gather.is_clean() && gather.finish(|_| ()).is_ok());
}

#[test]
fn what_hardware_marks_is_harvested() {
    let platform = Threads::new(700, 12, 1).with_caps(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 1];
    let vm = Vm::<Ept<4>>::new(&platform, &mut cells);
    let ram = Slot::memory(span(0, 2 * MIB), 0).with_log(Log::ByHardware);
    vm.guest.insert(ram).unwrap();
    for page in 0..20 {
        let access = if page % 3 == 0 { Access::Write } else { Access::Read };
        assert_eq!(vm.fault(page << 12, access, 2 * MIB), Ok(Mapped::Installed));
        // Pages, and none that faults again.
        assert!(vm.can_write(page << 12));
    }
    let mut words = words(8);
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    for expected in [vec![0, 3, 6, 9, 12, 15, 18], vec![]] {
        let (mut found, mut gather) = (Vec::new(), vm.guest.gather());
        let each = |first, bits| found.extend(pages_of(first, bits));
        let how = Harvest::empty();
        gather.harvest(&ram, &bitmap, 0..512, how, each).unwrap();
        assert_eq!(gather.is_clean(), expected.is_empty());
        assert!(gather.finish(|_| ()).is_ok());
        assert_eq!(found, expected);
    }
    assert!(vm.can_write(0));
}

/// Nothing can be written that hardware would not log: large leaves are closed, pages are clean,
/// and clean again when they are harvested.
#[test]
fn what_hardware_logs_is_harvested() {
    let platform = Threads::new(700, 12, 1).with_caps(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 2];
    let vm = Vm::<Ept<4>>::new(&platform, &mut cells);
    let ram = Slot::memory(span(0, 6 * MIB), 0);
    vm.guest.insert(ram).unwrap();
    // Blocks, and pages that were written.
    vm.fault(0, Access::Write, 2 * MIB).unwrap();
    vm.fault(4 * MIB, Access::Write, 2 * MIB).unwrap();
    for page in 512..520 {
        vm.fault(page << 12, Access::Write, 4096).unwrap();
    }
    let logged = ram.with_log(Log::ByModification);
    drop(vm.guest.replace(logged).unwrap());
    let leaf = |page: u64| vm.guest.space().query(Ipa::new(page << 12)).unwrap();
    assert!(leaf(512).attrs().dirty && vm.can_write(0));
    let mut gather = vm.guest.gather();
    let other = ram.with_log(Log::ByHardware);
    let refused = gather.begin_modification_log(&other).map(drop);
    assert_eq!(refused, Err(SlotError::NotLogged(0)));
    let begun = gather.begin_modification_log(&logged).unwrap();
    assert!(begun.changed && !begun.passed_over && gather.finish(|_| ()).is_ok());
    assert!(!vm.can_write(0) && !vm.can_write(511 << 12));
    assert!(!vm.can_write(1024 << 12) && !vm.can_write(1535 << 12));
    assert!((512..520).all(|page| vm.can_write(page << 12) && !leaf(page).attrs().dirty));

    // One virtual CPU's log: two pages, one of them twice, the other's address, and what has no
    // slot.
    let mut words = words(16);
    let bitmap = Bitmap::new(&mut words, 1024).unwrap();
    let page = [const { AtomicU64::new(0) }; 512];
    for (entry, at) in [(511, 515u64 << 12), (510, 513 << 12), (509, 9 * MIB), (508, 515 << 12)] {
        page[entry].store(at, std::sync::atomic::Ordering::Relaxed);
    }
    let log = ModificationLog::new(&page);
    let marked = vm.guest.drain(&log, 507, |slot| (slot.id == 0).then_some(&bitmap));
    assert_eq!(marked, Ok(3));
    // A fault that writes is of a page that is dirty from the beginning, and marked by the handler.
    let request = vm.guest.request(&Fault::new(Ipa::new(0), Access::Write));
    assert!(request.unwrap().is_logged_write());
    vm.fault(0, Access::Write, 2 * MIB).unwrap();
    assert!(leaf(0).attrs().dirty && vm.can_write(0) && !vm.can_write(1 << 12));
    bitmap.mark(0);
    let mut found = Vec::new();
    let each = |first, bits| found.extend(pages_of(first, bits));
    gather.harvest(&logged, &bitmap, 0..1024, Harvest::empty(), each).unwrap();
    assert!(!gather.is_clean() && gather.finish(|_| ()).is_ok());
    assert_eq!(found, [0, 513, 515]);
    assert!([0, 513, 515].iter().all(|&page| vm.can_write(page << 12)));
    assert!([0, 513, 515].iter().all(|&page| !leaf(page).attrs().dirty));
}

#[test]
fn hardware_that_marks_nothing_logs_nothing() {
    let platform = Threads::new(700, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let vm = Vm::<Ept<4>>::new(&platform, &mut cells);
    let ram = Slot::memory(span(0, 2 * MIB), 0).with_log(Log::ByModification);
    assert_eq!(vm.guest.insert(ram), Err(SlotError::NoHardware));
    vm.guest.insert(ram.with_log(Log::Off)).unwrap();
    let by_hardware = vm.guest.replace(ram.with_log(Log::ByHardware));
    assert_eq!(by_hardware.map(drop), Err(SlotError::NoHardware));
}

#[test]
fn leaves_are_split_ahead_as_far_as_there_are_tables() {
    let platform = Threads::new(700, 12, 1).with_caps(by_faults());
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = full::<Stage2K4<40>>(&platform, &mut cells, 16 * MIB, false);
    let mut gather = vm.guest.gather();
    assert!(gather.top_up(3));
    let stopped = gather.split_range(ram.guest).unwrap();
    assert_eq!(stopped, Some(Ipa::new(6 * MIB)));
    assert!(gather.top_up(5));
    let rest = Span::inclusive(stopped.unwrap(), ram.guest.last()).unwrap();
    assert_eq!(gather.split_range(rest), Ok(None));
    assert!(gather.finish(|_| ()).is_ok());
    let level = |at| vm.guest.space().query(Ipa::new(at)).unwrap().level();
    assert!((0..16 * MIB).step_by(1 << 12).all(|at| level(at) == Level::PAGE));
    assert!(
        vm.guest.space().query(Ipa::new(5 * MIB)).unwrap().attrs().perms.contains(Perms::WRITE)
    );
}

/// A guest whose 4 MiB are logged by hardware, as pages.
fn logged_by_hardware<'p>(
    platform: &'p Threads,
    cells: &'p mut [SlotCell],
) -> (Vm<'p, Ept<4>>, Slot) {
    let vm = Vm::<Ept<4>>::new(platform, cells);
    let ram = Slot::memory(span(0, 4 * MIB), 0).with_log(Log::ByModification);
    vm.guest.insert(ram).unwrap();
    for page in 0..1024 {
        vm.fault(page << 12, Access::Write, 4096).unwrap();
    }
    let mut gather = vm.guest.gather();
    let begun = gather.begin_modification_log(&ram).unwrap();
    assert!(begun.changed && !begun.passed_over && gather.finish(|_| ()).is_ok());
    drop(gather);
    (vm, ram)
}

/// The address that a processor writes down for a page.
fn log_page(log: &[AtomicU64; 512], entry: usize, page: u64) {
    log[entry].store(page << 12, std::sync::atomic::Ordering::Relaxed);
}

/// A log that two host threads drain, or one drains twice because the index was not set anew, has
/// its pages marked once more and none besides: a page is found once by the harvest, and again
/// after a second drain.
#[test]
fn a_log_that_is_drained_twice_marks_its_pages_and_no_others() {
    let platform = Threads::new(700, 12, 1).with_caps(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = logged_by_hardware(&platform, &mut cells);
    let mut words = words(16);
    let bitmap = Bitmap::new(&mut words, 1024).unwrap();
    let page = [const { AtomicU64::new(0) }; 512];
    log_page(&page, 511, 7);
    log_page(&page, 510, 1023);
    // Left of an earlier round, and not of this one.
    log_page(&page, 509, 500);
    let log = ModificationLog::new(&page);
    let drain = || vm.guest.drain(&log, 509, |_| Some(&bitmap));
    let harvest = || {
        let (mut found, mut gather) = (Vec::new(), vm.guest.gather());
        let each = |first, bits| found.extend(pages_of(first, bits));
        gather.harvest(&ram, &bitmap, 0..1024, Harvest::empty(), each).unwrap();
        assert!(gather.finish(|_| ()).is_ok());
        found
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(drain);
        assert_eq!((drain(), other.join().unwrap()), (Ok(2), Ok(2)));
    });
    assert_eq!(harvest(), [7, 1023]);
    assert_eq!(harvest(), []);
    assert_eq!(drain(), Ok(2));
    assert_eq!(harvest(), [7, 1023]);
    // An index beyond the log is that of a full one; an empty log marks nothing.
    assert_eq!(vm.guest.drain(&log, 512, |_| Some(&bitmap)), Ok(512));
    let first = ModificationLog::FIRST;
    assert_eq!(vm.guest.drain(&log, first, |_| Some(&bitmap)), Ok(0));
}

/// Drains of one thread beside harvests of another: each page is found by a harvest after its
/// drain, whichever was in the way.
#[test]
fn a_drain_beside_a_harvest_loses_no_page() {
    let platform = Threads::new(700, 12, 2).with_caps(tablewright_hosted::CAPS);
    let mut cells = [const { SlotCell::new() }; 1];
    let (vm, ram) = logged_by_hardware(&platform, &mut cells);
    let mut words = words(16);
    let bitmap = Bitmap::new(&mut words, 1024).unwrap();
    let drained = AtomicU64::new(0);
    const ROUNDS: u64 = 200;
    let mut found = vec![0u64; 1024];
    let mut harvest = || {
        let mut gather = vm.guest.gather();
        let each = |first, bits| pages_of(first, bits).for_each(|page| found[page as usize] += 1);
        gather.harvest(&ram, &bitmap, 0..1024, Harvest::empty(), each).unwrap();
        assert!(gather.finish(|_| ()).is_ok());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let page = [const { AtomicU64::new(0) }; 512];
            let log = ModificationLog::new(&page);
            for round in 0..ROUNDS {
                // 512 pages, another half and order in each round.
                for entry in 0..512 {
                    log_page(&page, entry, (entry as u64 * 3 + round * 511) % 1024);
                }
                assert_eq!(vm.guest.drain(&log, u16::MAX, |_| Some(&bitmap)), Ok(512));
                drained.store(round + 1, std::sync::atomic::Ordering::Release);
            }
        });
        while drained.load(std::sync::atomic::Ordering::Acquire) < ROUNDS {
            harvest();
        }
        harvest();
    });
    // Every page was in some round, and none twice as often as it was drained.
    assert!(found.iter().all(|&times| (1..=ROUNDS).contains(&times)));
    let clean = |page: u64| !vm.guest.space().query(Ipa::new(page << 12)).unwrap().attrs().dirty;
    assert!((0..1024).all(clean));
}

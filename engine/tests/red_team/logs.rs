//! Logs of what a guest writes.

use super::*;

/// `Threads`, and something that another processor does in the middle of the next invalidation.
struct Meanwhile {
    threads: Threads,
    next: RefCell<Option<Box<dyn FnOnce()>>>,
}

// SAFETY: passed on, by which all promises are kept.
unsafe impl Platform for Meanwhile {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.threads.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.threads.free_table(frame, level) }
    }
    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        self.threads.alloc_root(level, tables)
    }
    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        // SAFETY: passed on.
        unsafe { self.threads.free_root(root, level, tables) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.threads.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.threads.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.threads.invalidate(what);
        let next = self.next.borrow_mut().take();
        if let Some(next) = next {
            next();
        }
    }
    fn caps(&self) -> Caps {
        self.threads.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.threads.link_of(frame)
    }
}

// SAFETY: passed on.
unsafe impl SharedPlatform for Meanwhile {
    type Walk<'a> = Walk<'a>;
    fn enter(&self) -> Walk<'_> {
        self.threads.enter()
    }
    fn grace_period(&self) -> GracePeriod {
        self.threads.grace_period()
    }
    fn is_over(&self, period: GracePeriod) -> bool {
        self.threads.is_over(period)
    }
}

/// The work that is done meanwhile, which lives as long as the platform.
fn meanwhile() -> &'static Meanwhile {
    Box::leak(Box::new(Meanwhile { threads: platform(BY_FAULTS), next: RefCell::default() }))
}

/// The host split a block, by a break, below a table that slept, and a write beside it woke the
/// table meanwhile: the parts came back writable below a table that was open, and were not marked.
#[test]
fn a_table_with_a_claim_in_it_is_not_opened() {
    let platform = meanwhile();
    let space = SharedSpace::new(AddressSpace::<S2, _>::new(platform).unwrap());
    let space: &'static SharedSpace<S2, _> = Box::leak(Box::new(space.ok().unwrap()));
    let both = ipa(0, 2 * BLOCK);
    assert_eq!(space.map_range(both, RAM, blocks()), Ok(2 * BLOCK));
    // The log starts.
    space.protect_all().unwrap().drive(std::hint::spin_loop);
    let open = || assert_eq!(space.open(Ipa::new(BLOCK), true), Err(busy(BLOCK)));
    *platform.next.borrow_mut() = Some(Box::new(open));
    let mut gather = space.gather();
    assert!(gather.top_up(2));
    assert_eq!(gather.split(Ipa::new(0), Level::PAGE), Ok(true));
    assert!(platform.next.borrow().is_none(), "the split makes a break");
    assert!(gather.finish(|_| ()).is_ok());
    assert!(!can_write(&platform.threads, space.root(), 0));
    // When the claim is gone it is, and what has come in its place sleeps.
    assert_eq!(space.open(Ipa::new(BLOCK), true), Ok(()));
    assert!(!can_write(&platform.threads, space.root(), 0));
}

/// Whether hardware lets a guest write at an address of the first table.
fn can_write(platform: &Threads, root: Pa, at: u64) -> bool {
    let regime = Regime::Arm64Stage2 {
        granule: Granule::K4,
        input_bits: 40,
        wide: false,
        forced_write_back: false,
    };
    let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
    translate(regime, root.get(), at, &mut read).is_ok_and(|leaf| leaf.access.user.write)
}

fn busy(at: u64) -> Refused<Ipa> {
    Refused::Busy(Ipa::new(at))
}

/// A virtual CPU looked its fault up before a log began, and reopened the page after it: the
/// request knew of no log, and the page was not marked.
#[test]
fn nothing_is_reopened_by_an_outdated_request() {
    let platform = platform(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 1];
    let guest = Guest::new(share::<Ept<4>>(&platform, 1), &mut cells);
    let ram = Slot::memory(ipa(0, BLOCK), 0);
    let logged = ram.with_log(Log::ByFault);
    guest.insert(logged).unwrap();
    let mut words = [const { AtomicU64::new(0) }; 8];
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    // A first log: the page is written, harvested, and so protected, with the host's leave to write
    // it.
    let mut gather = guest.gather();
    write_page_5(&mut gather, &logged, &bitmap);
    gather.harvest(&logged, &bitmap, 0..512, Harvest::empty(), |_, _| ()).unwrap();
    assert!(gather.finish(|_| ()).is_ok());
    // It ends. A virtual CPU faults on a write, looks it up, and is taken off its processor.
    drop(guest.replace(ram).unwrap());
    let write = Fault::new(Ipa::new(5 * PAGE), Access::Write);
    let late = guest.request(&write).unwrap();
    assert!(!late.is_logged_write());
    // A second log begins: from here on nothing is written that is not marked.
    drop(guest.replace(logged).unwrap());
    let start = guest.space().protect_all().unwrap();
    start.drive(std::hint::spin_loop);
    // The virtual CPU goes on.
    assert_eq!(guest.reopen(&late), Err(Refused::Retry));
    let leaf = guest.space().query(write.at).unwrap();
    assert!(!leaf.attrs().perms.contains(Perms::WRITE) && !bitmap.is_marked(5));
    // Looked up again, the write is one that is logged.
    let request = guest.request(&write).unwrap();
    assert!(request.is_logged_write());
    assert_eq!(guest.reopen(&request), Ok(true));
}

/// A start that has protected leaves of the root, waits for a claim beside them, and is dropped: no
/// invalidation, and it does not count any more.
#[test]
fn a_start_that_is_dropped_leaves_nothing_uninvalidated() {
    let platform = meanwhile();
    let space = SharedSpace::new(AddressSpace::<S2, _>::new(platform).unwrap());
    let space: &'static SharedSpace<S2, _> = Box::leak(Box::new(space.ok().unwrap()));
    let both = ipa(0, 2 << 30);
    assert_eq!(space.map_range(both, Pa::new(1 << 30), blocks()), Ok(2 << 30));
    let mut start = space.protect_all().unwrap();
    // Its walk has begun after the start.
    let split_beside = move || {
        assert!(!start.step());
        platform.threads.take_events();
        drop(start);
    };
    *platform.next.borrow_mut() = Some(Box::new(split_beside));
    let mut gather = space.gather();
    assert!(gather.top_up(1));
    assert_eq!(gather.split(Ipa::new(1 << 30), Level::new(1)), Ok(true));
    assert!(platform.next.borrow().is_none(), "the split makes a break");
    assert!(gather.finish(|_| ()).is_ok());
    // A processor protects the block for good, and relies on it.
    let mut gather = space.gather();
    gather.protect(ipa(0, 1 << 30), Change::new().write_protect()).unwrap();
    assert!(gather.finish(|_| ()).is_ok());
    assert!(!space.query(Ipa::new(0)).unwrap().attrs().perms.contains(Perms::WRITE));
    let log = platform.threads.take_log();
    assert!(log.iter().any(|told| told.covers(0)), "read-only, and writable in TLBs: {log:?}");
}

/// The visitor of a harvest panics: the marks are gone, and the page can be written.
#[test]
fn what_was_harvested_is_protected_when_a_visitor_unwinds() {
    let platform = Threads::new(64, 12, 1).with_caps(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 1];
    let space = AddressSpace::<Ept<4>, _>::new(&platform).unwrap();
    let guest = Guest::new(SharedSpace::new(space).ok().unwrap(), &mut cells);
    let ram = Slot::memory(ipa(0, 2 << 20), 0).with_log(Log::ByFault);
    guest.insert(ram).unwrap();
    let mut words = [const { AtomicU64::new(0) }; 8];
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    let mut gather = guest.gather();
    assert!(gather.top_up(4));
    let request = guest.request(&Fault::new(Ipa::new(0x5000), Access::Write)).unwrap();
    gather.map(&request, &Backing::new(Pa::new(0x5000), 4096)).unwrap();
    guest.mark(&Marker::Bitmap(&bitmap), &ram, Ipa::new(0x5000));
    let caught = catch_unwind(AssertUnwindSafe(|| {
        gather.harvest(&ram, &bitmap, 0..512, Harvest::empty(), |_, _| panic!("the visitor"))
    }));
    assert!(caught.is_err());
    drop(gather);
    let writable =
        guest.space().query(Ipa::new(0x5000)).unwrap().attrs().perms.contains(Perms::WRITE);
    assert!(!writable || bitmap.is_marked(5), "it can be written, and is not marked");
}

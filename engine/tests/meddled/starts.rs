//! Logs that start by write-protecting everything, with others at work.

use super::*;

/// Everything is protected in one step, whatever another does meanwhile.
#[test]
fn a_start_protects_what_is_there_when_it_ends() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(CLEAN, caps);
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, 0, 4 * PAGE), Ok(4 * PAGE));
    platform.take();
    let walk = platform.enter();
    let mut start = space.protect_all().unwrap();
    assert!(space.protect_all().is_err());
    assert!(!start.step());
    drop(walk);
    assert_eq!(platform.take(), []);
    // Between the look and the exchange a walker sets the accessed flag of the entry.
    const ACCESSED: u64 = 1 << 5;
    platform.meddle(When::Exchange, 0, move || {
        // SAFETY: the root.
        let table = unsafe { platform.table(space.root(), X86::root_level()) };
        // SAFETY: its first entry.
        let entry = unsafe { table.as_ref() };
        entry.store(entry.load() | ACCESSED);
    });
    assert!(start.step());
    let did = platform.take();
    let [Did::Publish, Did::Invalidate(told), Did::Complete] = &did[..] else { panic!("{did:?}") };
    assert!(told.everything);
    assert!(start.step());
    assert_eq!((platform.take(), space.generation()), (vec![], 1));
    drop(start);
    assert_eq!(platform.take(), []);
    // A write opens the way to its page, and a walker sets flags meanwhile.
    let writable = |page: u64| {
        let leaf = space.query(Va::new(page * PAGE)).unwrap();
        leaf.attrs().perms.intersects(Perms::ANY_WRITE)
    };
    platform.meddle(When::Exchange, 1, move || {
        // SAFETY: as above.
        let table = unsafe { platform.table(space.root(), X86::root_level()) };
        // SAFETY: as above.
        let entry = unsafe { table.as_ref() };
        entry.store(entry.load() ^ ACCESSED);
    });
    assert_eq!(space.open(Va::new(0), true), Ok(()));
    assert_eq!(platform.take(), [Did::Publish, Did::Publish, Did::Publish]);
    assert!((0..4).all(|page| !writable(page)));
    assert_eq!(space.relax(Va::new(0), Attrs::USER_DATA.perms, true), Ok(Relaxed::Done));
    assert!(writable(0) && !writable(1));
    assert_eq!(space.open(Va::new(0), true), Ok(()));
}

/// Memory that is being cleaned may become writable: its table is not opened before.
#[test]
fn no_table_is_opened_over_a_claim() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(CLEAN, caps);
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, BLOCK, PAGE), Ok(PAGE));
    assert!(space.protect_all().unwrap().step());
    platform.take();
    platform.meddle(When::Clean, 0, move || {
        let way = space.open(Va::new(BLOCK), true);
        assert_eq!(way, Err(Refused::Busy(Va::new(BLOCK))));
        assert_eq!(space.open(Va::new(BLOCK), false), Ok(()));
    });
    assert_eq!(map_range(space, 0, PAGE), Ok(PAGE));
    platform.take();
    assert_eq!(space.open(Va::new(BLOCK), true), Ok(()));
    let leaf = space.query(Va::new(BLOCK)).unwrap();
    assert!(!leaf.attrs().perms.intersects(Perms::ANY_WRITE));
}

/// A start that is dropped before it has protected anything has told nobody.
#[test]
fn a_start_that_is_dropped_is_complete() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(NOTHING, caps);
    let space = platform.share::<X86>();
    let walk = platform.enter();
    let mut start = space.protect_all().unwrap();
    assert!(!start.step());
    drop(start);
    drop(walk);
    assert_eq!((platform.take(), space.generation()), (vec![], 0));
    assert!(space.protect_all().unwrap().step());
    assert_eq!(space.generation(), 1);
}

/// An edit is not complete before a start is, and is once it has ended.
#[test]
fn a_start_is_unfinished_until_it_ends() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(NOTHING, caps);
    let space = platform.share::<X86>();
    assert_eq!(map_range(space, BLOCK, PAGE), Ok(PAGE));
    platform.take();
    let mut start = space.protect_all().unwrap();
    assert!(told::of_all_levels(platform, space));
    assert!(start.step());
    platform.take();
    assert!(!told::of_all_levels(platform, space));
    drop(start);
}

/// A root whose entry is claimed is protected in part: what has lost a permission is forgotten when
/// the start is given up.
#[test]
fn a_start_that_is_dropped_in_part_is_flushed() {
    type Guest = tablewright::format::Stage2<12, 39>;
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(CLEAN, caps);
    let space = SharedSpace::<Guest, _>::new(AddressSpace::new(platform).unwrap()).ok().unwrap();
    let space: &'static SharedSpace<Guest, &'static Meddled> = Box::leak(Box::new(space));
    let block = |number: u64| {
        let at = tablewright::Ipa::new(number << 30);
        NewLeaf::<Guest>::new(at, Pa::new(MEMORY), Level::new(2), Attrs::GUEST_MEMORY).unwrap()
    };
    assert_eq!(space.gather().map(&block(0)), Ok(Mapped::Installed));
    platform.take();
    let mut start = space.protect_all().unwrap();
    platform.meddle(When::Clean, 0, move || {
        let before = platform.did.take();
        assert!(!start.step());
        assert_eq!(platform.did.take(), []);
        drop(start);
        let did = platform.did.replace(before);
        let [Did::Publish, Did::Invalidate(told), Did::Complete] = &did[..] else {
            panic!("{did:?}");
        };
        assert!(told.everything);
    });
    assert_eq!(space.gather().map(&block(1)), Ok(Mapped::Installed));
    platform.take();
    let writes = |number: u64| {
        let leaf = space.query(tablewright::Ipa::new(number << 30)).unwrap();
        leaf.attrs().perms.intersects(Perms::ANY_WRITE)
    };
    assert!(!writes(0) && writes(1));
}

/// Leaves of the same memory are told apart by what they allow.
#[test]
fn pages_of_one_frame_are_all_protected() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(NOTHING, caps);
    let space = platform.share::<X86>();
    for (page, attrs) in [Attrs::USER_RODATA, Attrs::USER_DATA, Attrs::USER_TEXT, Attrs::USER_DATA]
        .into_iter()
        .enumerate()
    {
        let at = Va::new(page as u64 * PAGE);
        let leaf = NewLeaf::new(at, Pa::new(MEMORY), Level::PAGE, attrs).unwrap();
        assert_eq!(map_alone(space, &leaf), Ok(Mapped::Installed));
    }
    assert!(space.protect_all().unwrap().step());
    assert_eq!(space.open(Va::new(0), true), Ok(()));
    for page in 0..4 {
        let leaf = space.query(Va::new(page * PAGE)).unwrap();
        assert!(!leaf.attrs().perms.intersects(Perms::ANY_WRITE), "{page}");
    }
}

/// A table is taken away, or another put there, while it is opened.
#[test]
fn a_table_that_is_gone_is_not_opened() {
    for remaps in [false, true] {
        let caps = Caps { hardware_dirty: false, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<X86>();
        assert_eq!(map_range(space, 0, 2 * PAGE), Ok(2 * PAGE));
        assert!(space.protect_all().unwrap().step());
        // The way to the table of pages: two tables above it; of the last, its two pages, and the
        // entry itself.
        assert_eq!(space.open(Va::new(BLOCK), true), Ok(()));
        platform.take();
        platform.meddle(When::Exchange, 3, move || {
            let mut gather = space.gather();
            let taken = gather.unmap(span(0, BLOCK), |_| ControlFlow::Continue(())).unwrap();
            assert!(taken.progress.is_done());
            // The walk of the other keeps it.
            assert!(gather.finish(|_| ()).is_err());
            if remaps {
                assert_eq!(map_range(space, PAGE, PAGE), Ok(PAGE));
            }
        });
        assert_eq!(space.open(Va::new(0), true), Err(Refused::Retry));
        platform.take();
        assert_eq!(frame(space, 0), None);
        assert_eq!(frame(space, PAGE), remaps.then_some(PAGE));
        assert_eq!(space.open(Va::new(0), true), Ok(()));
    }
}

/// A table that is write-protected is open when the space is exclusive.
#[test]
fn a_protected_space_is_open_alone() {
    let caps = Caps { hardware_dirty: false, ..Caps::default() };
    let platform = Meddled::new(NOTHING, caps);
    let space = SharedSpace::<X86, _>::new(AddressSpace::new(platform).unwrap()).ok().unwrap();
    assert_eq!(space.map_range(span(0, PAGE), Pa::new(0), SMALL), Ok(PAGE));
    assert!(space.protect_all().unwrap().step());
    let entry = |root| {
        // SAFETY: the root of the space.
        let table = unsafe { platform.table(root, X86::root_level()) };
        // SAFETY: its first entry.
        unsafe { table.as_ref() }.load()
    };
    assert!(X86::is_protected(entry(space.root())));
    let mut space = space.into_exclusive();
    assert!(!X86::is_protected(entry(space.root())));
    let gather = space.gather();
    let leaf = gather.query(Va::new(0)).unwrap();
    assert!(leaf.attrs().perms.contains(Attrs::USER_DATA.perms));
}

/// A walk that begins when a grace period has begun is not waited for.
#[test]
fn a_grace_period_waits_for_walks_from_before_it() {
    let slots = [const { tablewright::shared::WalkSlot::new() }; 2];
    let epochs = tablewright::shared::Epochs::new(&slots);
    // SAFETY: one thread uses the epochs (1.), without interrupts (2.), to its end (3.), and made
    // them alone (4.).
    let enter = |cpu| unsafe { epochs.enter(cpu) }.unwrap();
    let before = enter(0);
    let period = epochs.advance();
    let after = enter(1);
    assert!(!epochs.is_over(period));
    drop(before);
    assert!(epochs.is_over(period));
    let next = epochs.advance();
    assert!(!epochs.is_over(next));
    drop(after);
    assert!(epochs.is_over(next));
}

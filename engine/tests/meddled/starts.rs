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

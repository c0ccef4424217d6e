//! Faults: what each cleans, publishes and forgets, and in the place of what it puts its leaf.

use super::*;
use tablewright::Ipa;
use tablewright::format::{Ept, Stage2};
use tablewright::guest::{self, Access, Backing, Fault, Guest, Slot, SlotCell};

type Arm = Stage2<12, 48>;
const GIB: u64 = 1 << 30;
/// Memory of the guest for which the host has pages of 1 GiB.
const RAM: u64 = 4 * GIB;

fn guest<F: Format<Input = Ipa>>(
    platform: &'static Meddled,
) -> &'static Guest<'static, F, &'static Meddled> {
    let space = SharedSpace::new(AddressSpace::new(platform).unwrap()).ok().unwrap();
    let cells = Box::leak(Box::new([const { SlotCell::new() }; 1]));
    let guest = Guest::new(space, cells);
    let ram = Span::new(Ipa::new(0), RAM).unwrap();
    guest.insert(Slot::memory(ram, 0)).unwrap();
    platform.take();
    Box::leak(Box::new(guest))
}

/// A write of the guest to a page of the host of `size` bytes, at the same distance in memory.
fn fault<F: Format<Input = Ipa>>(
    gather: &mut guest::Gather<'_, '_, F, &'static Meddled>,
    at: u64,
    frame: u64,
    size: u64,
) -> Result<Mapped<F>, Refused<Ipa>> {
    let request = gather.guest().request(&Fault::new(Ipa::new(at), Access::Write)).unwrap();
    assert!(gather.top_up(request.tables()));
    gather.map(&request, &Backing::new(Pa::new(frame), size))
}

#[test]
fn a_fault_like_the_last_is_published_and_maps_its_page_alone() {
    for maintenance in [NOTHING, CLEAN, BOTH] {
        let platform = Meddled::new(maintenance, Caps::default());
        let guest = guest::<Ept<4>>(platform);
        let mut gather = guest.gather();
        for page in 0..4 {
            // Any byte of the host's page.
            let at = page * PAGE;
            let mapped = fault(&mut gather, at + 0x18, MEMORY + at + 0x234, PAGE);
            assert_eq!(mapped, Ok(Mapped::Installed));
            let cleaned = maintenance.clean.then_some(Did::Clean(at, PAGE));
            let instructions = maintenance.instructions.then_some(Did::Instructions(at, PAGE));
            let all = [cleaned, instructions, Some(Did::Publish)];
            assert_eq!(platform.take(), all.into_iter().flatten().collect::<Vec<_>>());
            let there = guest.space().query(Ipa::new(at)).unwrap();
            assert_eq!(there.frame(), Pa::new(MEMORY + at));
            // Memory that the format does not reach.
            let beyond = fault(&mut gather, at + PAGE, 1 << 52, PAGE);
            assert_eq!(beyond, Err(EditError::OutputOutOfRange.into()));
            assert_eq!(platform.take(), []);
        }
    }
}

/// A fault cleans 2 MiB at most: a larger block is mapped where no more of it is left to clean.
#[test]
fn a_block_is_mapped_where_little_of_it_is_left_to_clean() {
    // Blocks of the 1 GiB that are mapped; pages of its first 2 MiB that are mapped; whether one of
    // these pages maps other memory; whether the fault then installs 1 GiB.
    for (blocks, pages, stray, is_large) in [
        (0, 0, false, false),
        (509, 512, false, false),
        (510, 512, false, true),
        (510, 511, false, false),
        (510, 512, true, false),
        (511, 0, false, true),
        (511, 3, false, true),
        (511, 3, true, true),
    ] {
        let platform = Meddled::new(CLEAN, Caps::default());
        let guest = guest::<Arm>(platform);
        let mut gather = guest.gather();
        for page in 0..pages {
            let at = page * PAGE;
            let elsewhere = if stray && page == 1 { 2 * GIB } else { 0 };
            let frame = MEMORY + elsewhere + at;
            assert_eq!(fault(&mut gather, at, frame, PAGE), Ok(Mapped::Installed));
        }
        for block in 1..=blocks {
            let at = block * BLOCK;
            assert_eq!(fault(&mut gather, at, MEMORY + at, BLOCK), Ok(Mapped::Installed));
        }
        platform.take();
        // Of all that lacks; what is there of 2 MiB is not cleaned again.
        let at = if blocks < 511 { GIB - BLOCK } else { 0 };
        let mapped = fault(&mut gather, at, MEMORY + at, GIB);
        let expected = match (is_large, at) {
            (true, _) | (false, 0) if blocks > 0 => Mapped::Collapsed,
            _ => Mapped::Installed,
        };
        assert_eq!(mapped, Ok(expected), "{blocks} {pages} {stray}");
        let there = guest.space().query(Ipa::new(at)).unwrap();
        assert_eq!(there.size(), if is_large { GIB } else { BLOCK }, "{blocks} {pages} {stray}");
        let cleaned = |did: &Did| match did {
            Did::Clean(_, size) => *size,
            _ => 0,
        };
        assert!(platform.take().iter().map(cleaned).sum::<u64>() <= BLOCK);
    }
}

/// Another processor maps 1 GiB, less of it allowed, while a fault looks for 2 MiB of it: these are
/// not split off.
#[test]
fn a_block_that_another_has_mapped_meanwhile_stays_whole() {
    let platform = Meddled::new(CLEAN, Caps::default());
    let guest = guest::<Arm>(platform);
    let mut gather = guest.gather();
    let large = |attrs| NewLeaf::new(Ipa::new(0), Pa::new(MEMORY), Level::PAGE.up().up(), attrs);
    let perms = Attrs::GUEST_MEMORY.perms - Perms::ANY_WRITE;
    let readable = large(Attrs { perms, ..Attrs::GUEST_MEMORY }).unwrap();
    platform.meddle(When::Exchange, 0, move || {
        let mut other = guest.space().gather();
        assert!(other.top_up(1));
        assert_eq!(other.map(&readable), Ok(Mapped::Installed));
        other.release_tables();
    });
    assert!(fault(&mut gather, PAGE, MEMORY + PAGE, GIB).is_ok());
    platform.take();
    let there = guest.space().query(Ipa::new(PAGE)).unwrap();
    assert_eq!((there.size(), there.attrs().perms.contains(Perms::WRITE)), (GIB, true));
}

/// A fault never takes away flags or permissions of a page.
#[test]
fn a_page_that_allows_more_keeps_what_it_had() {
    let with = |accessed, dirty, perms| Attrs { accessed, dirty, perms, ..Attrs::USER_RODATA };
    let (read, write) = (Attrs::USER_RODATA.perms, Attrs::USER_DATA.perms);
    let caps = Caps { hardware_access: false, hardware_dirty: false, ..Caps::default() };
    for (accessed, dirty, newly) in [(true, true, false), (false, false, true)] {
        let platform = Meddled::new(NOTHING, caps);
        let space = platform.share::<X86>();
        let before = leaf(0, Level::PAGE, with(accessed, dirty, read));
        assert_eq!(map_alone(space, &before), Ok(Mapped::Installed));
        let more = leaf(0, Level::PAGE, with(newly, newly, write));
        assert_eq!(map_alone(space, &more), Ok(Mapped::Relaxed));
        let attrs = space.query(Va::new(0)).unwrap().attrs();
        assert!(attrs.accessed && attrs.dirty && attrs.perms == write);
    }
    // The accessed flag alone is set by hardware, where it does; if not, by the fault.
    for (hardware_access, accessed, expected) in [
        (true, true, Mapped::Already),
        (false, true, Mapped::Relaxed),
        (false, false, Mapped::Already),
    ] {
        let platform = Meddled::new(NOTHING, Caps { hardware_access, ..caps });
        let space = platform.share::<X86>();
        let before = leaf(0, Level::PAGE, with(false, false, read));
        assert_eq!(map_alone(space, &before), Ok(Mapped::Installed));
        let again = leaf(0, Level::PAGE, with(accessed, false, read));
        assert_eq!(map_alone(space, &again), Ok(expected));
    }
    // A page that becomes code.
    let platform = Meddled::new(BOTH, caps);
    let space = platform.share::<Arm64K4>();
    let data = Attrs::KERNEL_RODATA;
    assert_eq!(map_alone(space, &leaf(PAGE, Level::PAGE, data)), Ok(Mapped::Installed));
    platform.take();
    let code = Attrs { perms: data.perms | Perms::EXEC, ..data };
    assert_eq!(map_alone(space, &leaf(PAGE, Level::PAGE, code)), Ok(Mapped::Relaxed));
    assert_eq!(platform.take()[..2], [Did::Instructions(PAGE, PAGE), Did::Publish]);
}

#[test]
fn a_page_within_a_block_is_there_if_it_is_the_same() {
    let platform = Meddled::new(NOTHING, Caps::default());
    let space = platform.share::<X86>();
    let block = leaf(0, Level::new(1), Attrs::USER_RODATA);
    assert_eq!(map_alone(space, &block), Ok(Mapped::Installed));
    let page = |memory, attrs| {
        let page = NewLeaf::new(Va::new(PAGE), Pa::new(memory), Level::PAGE, attrs).unwrap();
        map_alone(space, &page)
    };
    let larger = Err(Refused::Larger(Level::new(1)));
    let uncached = Attrs { memory: Attrs::KERNEL_DEVICE.memory, ..Attrs::USER_RODATA };
    assert_eq!(page(MEMORY + PAGE, Attrs::USER_RODATA), Ok(Mapped::Already));
    assert_eq!(page(MEMORY, Attrs::USER_RODATA), larger);
    assert_eq!(page(MEMORY + PAGE, Attrs::USER_DATA), larger);
    assert_eq!(page(MEMORY + PAGE, uncached), larger);
}

/// In the place of another page: it is cleaned, and a walker sees it when the other is forgotten.
#[test]
fn a_page_that_takes_the_place_of_another_is_broken_and_cleaned() {
    fn replaces<F: Format<Input = Va>>(maintenance: CacheMaintenance, breaks: bool) {
        let platform = Meddled::new(maintenance, Caps::default());
        let space = platform.share::<F>();
        assert!(map_alone(space, &leaf(0, Level::PAGE, Attrs::USER_DATA)).is_ok());
        let other =
            NewLeaf::new(Va::new(0), Pa::new(MEMORY + BLOCK), Level::PAGE, Attrs::USER_DATA);
        platform.take();
        platform.meddle(When::Invalidation, 0, move || {
            let there = frame(space, 0);
            // It is claimed as well to be cleaned.
            let is_claimed = breaks || maintenance.clean;
            assert_eq!(there, (!is_claimed).then_some(BLOCK));
        });
        assert!(matches!(map_alone(space, &other.unwrap()), Ok(Mapped::Replaced(_))));
        let did = platform.take();
        assert_eq!(did.contains(&Did::Clean(BLOCK, PAGE)), maintenance.clean, "{did:?}");
        // No level but its own.
        let told = did.iter().find_map(|did| match did {
            Did::Invalidate(told) => Some(told.ranges.clone()),
            _ => None,
        });
        let [stale] = told.unwrap()[..] else { panic!("{did:?}") };
        assert_eq!((stale.level, stale.tables), (Some(Level::PAGE), false));
    }
    for maintenance in [NOTHING, CLEAN] {
        replaces::<X86>(maintenance, false);
        replaces::<Arm64K4>(maintenance, true);
    }
}

/// A page changes while it is made accessible.
#[test]
fn a_page_is_made_accessible_as_it_is() {
    type Act = fn(&'static Space<X86>);
    let uses: Act = |space| {
        let mut gather = space.gather();
        gather.protect(span(0, PAGE), Change::new().accessed(false)).unwrap();
    };
    let unmaps: Act = |space| unmap(space, span(0, PAGE));
    let replaces: Act = |space| {
        let other =
            NewLeaf::new(Va::new(0), Pa::new(MEMORY + BLOCK), Level::PAGE, Attrs::USER_RODATA);
        assert!(matches!(map_alone(space, &other.unwrap()), Ok(Mapped::Replaced(_))));
    };
    for (act, expected) in
        [(uses, Ok(Relaxed::Done)), (unmaps, Err(Refused::Retry)), (replaces, Err(Refused::Retry))]
    {
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        let read = leaf(0, Level::PAGE, Attrs::USER_RODATA);
        assert_eq!(map_alone(space, &read), Ok(Mapped::Installed));
        platform.meddle(When::Exchange, 0, move || act(space));
        assert_eq!(space.relax(Va::new(0), Attrs::USER_DATA.perms, true), expected);
        // A fault meets the same edits.
        let platform = Meddled::new(NOTHING, Caps::default());
        let space = platform.share::<X86>();
        assert_eq!(map_alone(space, &read), Ok(Mapped::Installed));
        platform.meddle(When::Exchange, 0, move || act(space));
        let mapped = map_alone(space, &leaf(0, Level::PAGE, Attrs::USER_DATA));
        assert_eq!(mapped.map(|_| Relaxed::Done), expected);
    }
}

/// Pages that give way to a block, and whether it is put there in one step.
struct Table {
    maintenance: CacheMaintenance,
    pages: Vec<(u64, Attrs)>,
    block: Attrs,
}

impl Table {
    /// Returns what the platform is told, and the block.
    fn collapse(&self) -> (Vec<Did>, Attrs) {
        let platform = Meddled::new(self.maintenance, Caps::default());
        let space = platform.share::<X86>();
        for (page, attrs) in &self.pages {
            let page = leaf(page * PAGE, Level::PAGE, *attrs);
            assert_eq!(map_alone(space, &page), Ok(Mapped::Installed));
        }
        platform.take();
        let mut gather = space.gather();
        let block = leaf(0, Level::new(1), self.block);
        assert_eq!(map(&mut gather, &block), Ok(Mapped::Collapsed));
        let did = platform.take();
        (did, space.query(Va::new(0)).unwrap().attrs())
    }
}

#[test]
fn a_block_in_the_place_of_its_pages_is_put_there_in_one_step() {
    let all = |attrs| (0..512).map(|page| (page, attrs)).collect::<Vec<_>>();
    let change = |page: usize, attrs| {
        let mut pages = all(Attrs::USER_RODATA);
        pages[page].1 = attrs;
        pages
    };
    let of = |pages| Table { maintenance: NOTHING, pages, block: Attrs::USER_RODATA };
    let in_place = |table: Table| table.collapse().0 == [Did::Publish];
    let none = Attrs { perms: Perms::empty(), ..Attrs::USER_RODATA };
    assert!(in_place(of(all(Attrs::USER_RODATA))));
    for page in [0, 300, 511] {
        assert!(!in_place(of(change(page, none))), "a walker faults at page {page}");
        let mut hole = all(Attrs::USER_RODATA);
        hole.remove(page);
        assert!(!in_place(of(hole)), "a walker faults at page {page}");
    }
    assert!(in_place(Table { block: none, ..of(all(none)) }));
    // The block is dirty if one of the pages was dirty or writable.
    for (page, is_dirty) in [
        (Attrs::USER_RODATA, false),
        (Attrs { dirty: true, ..Attrs::USER_RODATA }, true),
        (Attrs { dirty: false, ..Attrs::USER_DATA }, true),
    ] {
        for number in [0, 511] {
            let block = Attrs { dirty: false, ..Attrs::USER_RODATA };
            let mut pages = all(Attrs { dirty: false, ..Attrs::USER_RODATA });
            pages[number].1 = Attrs { dirty: page.dirty && is_dirty, ..page };
            let (_, attrs) = Table { block, ..of(pages) }.collapse();
            assert_eq!(attrs.dirty, is_dirty, "{page:?}");
        }
    }
    // The one page that was not executable is invalidated for instructions.
    let (data, code) = (Attrs::KERNEL_RODATA, Attrs::KERNEL_TEXT);
    let pages = (0..512).map(|page| (page, if page == 7 { data } else { code })).collect();
    let (did, _) = Table { maintenance: BOTH, pages, block: code }.collapse();
    let made: Vec<_> =
        did.iter().filter(|did| matches!(did, Did::Instructions(..) | Did::Clean(..))).collect();
    assert_eq!(made, [&Did::Instructions(7 * PAGE, PAGE)]);
}

/// Tables below the one that gives way to 1 GiB, some of them write-protected.
#[test]
fn a_walker_that_faults_at_a_table_has_a_block_broken() {
    // A hole in the first of two tables of pages; the second is write-protected.
    for (hole, protects, in_place) in
        [(false, false, true), (true, false, false), (false, true, false), (true, true, false)]
    {
        let caps = Caps { bbm: 2, hardware_dirty: false, ..Caps::default() };
        let platform = Meddled::new(NOTHING, caps);
        let space = SharedSpace::<Arm, _>::new(AddressSpace::new(platform).unwrap());
        let space: &'static _ = Box::leak(Box::new(space.ok().unwrap()));
        let block = |at: u64, size| {
            let memory = Pa::new(MEMORY + at);
            let mapping = Mapping::new(Attrs::GUEST_MEMORY);
            let mapping = if size == BLOCK { mapping } else { mapping.pages_only() };
            space.map_range(Span::new(Ipa::new(at), size).unwrap(), memory, mapping).unwrap();
        };
        let first = if hole { PAGE } else { 0 };
        block(first, BLOCK - PAGE);
        block(BLOCK - PAGE, PAGE);
        (1..511).for_each(|number| block(number * BLOCK, BLOCK));
        block(GIB - BLOCK, PAGE);
        block(GIB - BLOCK + PAGE, BLOCK - PAGE);
        if protects {
            assert!(space.protect_all().unwrap().step());
            // Of these two tables that of a page is still protected.
            assert_eq!(space.open(Ipa::new(BLOCK - PAGE), true), Ok(()));
        }
        platform.take();
        let attrs = Attrs::GUEST_MEMORY;
        let attrs = match protects {
            true => Attrs { perms: attrs.perms - Perms::ANY_WRITE, ..attrs },
            false => attrs,
        };
        let leaf = NewLeaf::new(Ipa::new(0), Pa::new(MEMORY), Level::new(2), attrs).unwrap();
        platform.meddle(When::Invalidation, 0, move || {
            let there = space.query(Ipa::new(0)).map(|leaf| leaf.size());
            assert_eq!(there, in_place.then_some(GIB), "{hole} {protects}");
        });
        let mut gather = space.gather();
        assert_eq!(gather.map(&leaf), Ok(Mapped::Collapsed));
        platform.take();
    }
}

/// A page that another processor installs while its table gives way to a block is reclaimed.
#[test]
fn a_page_that_is_being_installed_is_reclaimed_with_its_table() {
    let platform = Meddled::new(CLEAN, Caps::default());
    let space = platform.share::<X86>();
    assert!(map_alone(space, &leaf(0, Level::PAGE, Attrs::USER_DATA)).is_ok());
    let gather: &'static RefCell<_> = Box::leak(Box::new(RefCell::new(space.gather())));
    platform.meddle(When::Clean, 0, move || {
        let block = leaf(0, Level::new(1), Attrs::USER_DATA);
        assert_eq!(map(&mut gather.borrow_mut(), &block), Ok(Mapped::Collapsed));
    });
    let page = leaf(5 * PAGE, Level::PAGE, Attrs::USER_DATA);
    assert_eq!(map_alone(space, &page), Ok(Mapped::Installed));
    let mut gone = Vec::new();
    assert!(gather.borrow_mut().finish(|leaf| gone.push(leaf.frame().get() - MEMORY)).is_ok());
    assert_eq!(gone, [0, 5 * PAGE]);
    assert_eq!(frame(space, 6 * PAGE), Some(0));
}

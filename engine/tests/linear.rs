//! The linear map through each kind of window, on memory that notices a window used wrongly.
//!
//! `Boot` plays the machine: it keeps what a processor may remember of each slot, and refuses an
//! access to a table that no window shows.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::ptr::NonNull;

use common::{Judged, Mapped, Model, judge};
use proptest::prelude::*;
use tablewright::format::{Arm64K4, Arm64K16, Arm64K64Wide, X86_64};
use tablewright::linear::{
    Coarse, Direct, FirmwareRange, LinearError, LinearMap, MemoryMap, OneToOne, SlotMemory, Slots,
    Window, Windowed, usable_ram,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Change, EditError, Entry, Format, Invalidation, Level, Mapping,
    Pa, Perms, Platform, Span, Stale, Va,
};
use tablewright_hosted::{Hosted, Told};

const SLOTS: usize = 16;
const SLOT_BASE: u64 = 0x7f_0000_0000;

/// Memory, the entries of the slots, and what a processor remembers of them.
struct Boot<F: Judged> {
    memory: Hosted,
    slots: Box<[Entry; SLOTS]>,
    remembered: RefCell<HashMap<usize, u64>>,
    issued: RefCell<HashSet<usize>>,
    opened: Cell<u64>,
    format: std::marker::PhantomData<F>,
}

impl<F: Judged> Boot<F> {
    fn new(frames: usize) -> Self {
        Self {
            memory: Hosted::new(frames, F::PAGE_SHIFT),
            slots: Box::new([const { 0u64 }; SLOTS].map(Entry::new)),
            remembered: RefCell::default(),
            issued: RefCell::default(),
            opened: Cell::new(0),
            format: std::marker::PhantomData,
        }
    }

    fn frame_pointer(&self, frame: Pa) -> NonNull<Entry> {
        // SAFETY: the tests open frames of this platform only.
        unsafe { self.memory.table(frame, Level::PAGE) }
    }
}

// SAFETY: passed on to `Hosted`.
unsafe impl<F: Judged> Platform for Boot<F> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.memory.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }
    unsafe fn table(&self, _: Pa, _: Level) -> NonNull<Entry> {
        panic!("a table was reached without a window");
    }
    fn barrier(&self, barrier: Barrier) {
        self.memory.barrier(barrier);
        if barrier == Barrier::Complete {
            for slot in self.issued.borrow_mut().drain() {
                self.remembered.borrow_mut().remove(&slot);
            }
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
        let told = Told::from(what);
        let covered = |slot: &usize| told.covers(SLOT_BASE + ((*slot as u64) << F::PAGE_SHIFT));
        // Only what is not mapped now is forgotten for good.
        let gone = |slot: &usize| self.slots[*slot].load() & 1 == 0;
        self.issued.borrow_mut().extend((0..SLOTS).filter(|slot| covered(slot) && gone(slot)));
    }
}

struct SlotsOf<'b, F: Judged>(&'b Boot<F>);

// SAFETY: the pointer is that of the frame; the assertions hold the window to its promise.
unsafe impl<F: Judged> SlotMemory for SlotsOf<'_, F> {
    fn pointer(&self, slot: usize, frame: Pa) -> NonNull<Entry> {
        let boot = self.0;
        let entry = boot.slots[slot].load();
        assert_eq!(F::address(entry, Level::PAGE), frame, "the slot maps another frame");
        let before = boot.remembered.borrow_mut().insert(slot, frame.get());
        assert!(
            before.is_none_or(|before| before == frame.get()),
            "slot {slot} is remembered for another frame"
        );
        boot.opened.set(boot.opened.get() + 1);
        boot.frame_pointer(frame)
    }
}

fn slots<F: Judged>(boot: &Boot<F>) -> Slots<'_, F, Boot<F>, SlotsOf<'_, F>, SLOTS> {
    let entries = NonNull::from(&boot.slots[0]);
    // SAFETY: the entries belong to the slots and outlive them.
    unsafe {
        Slots::new(
            boot,
            SlotsOf(boot),
            Va::new(SLOT_BASE),
            entries,
            &Attrs::KERNEL_DATA,
            (Pa::new(0), 0),
        )
    }
    .unwrap()
}

/// The coarse map's identity: a frame may be used only if the tables under the coarse root map it
/// to itself.
struct IdentityOf<'b, F: Judged> {
    boot: &'b Boot<F>,
    root: Cell<Option<Pa>>,
}

// SAFETY: the pointer is that of the frame; the assertions hold the map to its promise.
unsafe impl<F: Judged> OneToOne for IdentityOf<'_, F> {
    fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        if let Some(root) = self.root.get() {
            let mut read =
                |table: u64, index: usize| self.boot.memory.read(Pa::new(table), index).unwrap();
            let leaf = tablewright_walker::translate(F::REGIME, root.get(), frame.get(), &mut read);
            let leaf = leaf.expect("the coarse map covers what it says");
            assert_eq!(leaf.physical(frame.get()), frame.get());
        }
        self.boot.frame_pointer(frame)
    }
}

fn span(start: u64, size: u64) -> Span<Pa> {
    Span::new(Pa::new(start), size).unwrap()
}

/// Returns the map that the memory map asks for, page by page and without sharing code with the
/// engine.
fn expected<F: Format>(memory: &MemoryMap<'_>, offset: u64, rest: Attrs) -> Model {
    let mut model = Model::default();
    for ram in memory.ram {
        let mut at = ram.start().get();
        while at <= ram.last().get() {
            let holds = |span: &Span<Pa>| span.contains(Pa::new(at));
            if !memory.reserved.iter().any(holds) {
                let special = memory.special.iter().find(|(span, _)| holds(span));
                let attrs = special.map_or(rest, |&(_, attrs)| attrs);
                model.map(offset + at, 1 << F::PAGE_SHIFT, at, attrs);
            }
            at += 1 << F::PAGE_SHIFT;
        }
    }
    model
}

#[test]
fn slots_are_cleared_together_and_never_reused_before_completion() {
    let boot = Boot::<Arm64K4>::new(700);
    let window = slots(&boot);
    // SAFETY: the slots show all frames of the boot memory (1.).
    let platform = unsafe { Windowed::new(&boot, &window) };
    let mut space = AddressSpace::<Arm64K4, _>::new(platform).unwrap();
    let size = 512u64 << 21;
    let all = Span::new(Va::new(0), size).unwrap();
    let before = boot.memory.counts();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    space.map(all, Pa::new(0), mapping).unwrap();
    window.end_batch();
    let counts = boot.memory.counts();
    // 512 last-level tables and the two above them were each shown once; a completion serves at
    // least a dozen.
    assert_eq!(counts.tables - before.tables, 514);
    let completions = counts.completions - before.completions;
    assert!(completions <= 514 / 12 + 1, "{completions} completions");
    assert_eq!(
        counts.invalidations - before.invalidations,
        completions,
        "one invalidation for each completion"
    );
    // After the batch nothing is mapped and nothing is remembered.
    assert!(boot.slots.iter().all(|entry| entry.load() == 0));
    assert!(boot.remembered.borrow().is_empty());
}

#[test]
fn the_coarse_map_invalidates_nothing_until_the_end_and_covers_only_what_it_may() {
    let boot = Boot::<Arm64K4>::new(3000);
    // The tables themselves lie in memory with a hole that must not be mapped.
    let base = Hosted::BASE.get();
    let ram = [span(base, 3000 << 12)];
    let reserved = [span(base + (1100 << 12), 3 << 12)];
    let memory = MemoryMap { ram: &ram, reserved: &reserved, special: &[] };
    let identity = IdentityOf { boot: &boot, root: Cell::new(None) };
    let window = slots(&boot);
    let attrs = Attrs::KERNEL_DATA;
    // SAFETY: the slots show all frames of the boot memory (1.); nothing loads the root (2.).
    let coarse = unsafe {
        Coarse::<Arm64K4, _, _, _>::new(&boot, &identity, &window, memory, attrs, 7).unwrap()
    };
    identity.root.set(Some(coarse.root()));
    // SAFETY: the coarse map, or the slots under it, show all frames of the boot memory (1.).
    let platform = unsafe { Windowed::new(&boot, &coarse) };
    let mut space = AddressSpace::<Arm64K4, _>::new(platform).unwrap();
    let all = Span::new(Va::new(0), 2500 << 21).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    space.map(all, Pa::new(0), mapping).unwrap();
    let counts = boot.memory.counts();
    assert_eq!(counts.invalidations, 0, "nothing to invalidate while the map is used");
    // A handful of openings through slots, for the first tables; the rest through the map.
    assert!(boot.opened.get() <= 60, "{} openings", boot.opened.get());

    let mut covered = 0;
    for (first, mapped) in judge::<Arm64K4>(&boot.memory, coarse.root()).0 {
        assert_eq!(first, mapped.pa);
        covered += mapped.size;
        let mapped = Span::new(Pa::new(first), mapped.size).unwrap();
        assert_eq!(mapped.intersect(reserved[0]), None, "reserved memory is mapped");
        assert_eq!(mapped.intersect(ram[0]), Some(mapped), "something else than RAM is mapped");
    }
    assert!(covered >= 2500 << 12);
    let root = space.root();
    let before = boot.memory.counts();
    window.end_batch();
    let slots_cleared = boot.memory.counts().invalidations - before.invalidations;
    // SAFETY: no processor has the root loaded; the frames are those of the boot memory.
    unsafe { coarse.finish(&boot.memory) };
    let counts = boot.memory.counts();
    assert_eq!(counts.invalidations, before.invalidations + slots_cleared + 1);
    assert_eq!(counts.bad_frees, 0);
    let tables = 1 + 1 + 5 + 2500;
    assert_eq!(counts.tables, tables, "only the tables of the map are left");
    assert_eq!(judge::<Arm64K4>(&boot.memory, root).0.len(), 1);
}

#[test]
fn a_second_root_and_tables_without_a_map_use_the_same_window() {
    let boot = Boot::<Arm64K16>::new(40);
    let window = slots(&boot);
    // SAFETY: the slots show all frames of the boot memory (1.).
    let platform = unsafe { Windowed::new(&boot, &window) };
    let mut main = AddressSpace::<Arm64K16, _>::new(platform).unwrap();
    let mut trampoline = AddressSpace::<Arm64K16, _>::new(platform).unwrap();
    // Allocated without being mapped: the window is not asked.
    let opened = boot.opened.get();
    let spare = platform.alloc_table(Level::PAGE).unwrap();
    assert_eq!(boot.opened.get(), opened);

    let page = Span::new(Va::new(0x4000), 0x4000).unwrap();
    for space in [&mut main, &mut trampoline] {
        space.map(page, Pa::new(0), Attrs::KERNEL_TEXT).unwrap();
    }
    // Mapped without allocation, beside what is there; where a table is missing it is said so.
    let allocations = boot.memory.counts().allocations;
    let mapping = Mapping::new(Attrs::KERNEL_DATA).without_allocation();
    let next = Span::new(Va::new(0x8000), 0x4000).unwrap();
    main.map(next, Pa::new(0x4000), mapping).unwrap();
    let far = Span::new(Va::new(0x40_0000_0000), 0x4000).unwrap();
    assert_eq!(main.map(far, Pa::new(0), mapping), Err(EditError::NeedsTable(far.start())));
    assert_eq!(boot.memory.counts().allocations, allocations);
    // SAFETY: the frame was never used.
    unsafe { platform.free_table(spare, Level::PAGE) };
    assert!(main.destroy(|_| ()).is_ok() && trampoline.destroy(|_| ()).is_ok());
    assert_eq!(boot.memory.counts().tables, 0);
}

#[test]
fn memory_comes_and_goes_and_is_sealed_with_one_invalidation() {
    let memory = Hosted::new(200, 12);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&memory).unwrap();
    let offset = 0xffff_8880_0000_0000;
    let linear = LinearMap::new(Va::new(offset), Mapping::new(Attrs::KERNEL_DATA));
    let boot = [span(0x10_0000, 0x3ff0_0000)];
    let map = MemoryMap {
        ram: &boot,
        reserved: &[],
        special: &[(span(0x100_0000, 0x40_0000), Attrs::KERNEL_TEXT)],
    };
    linear.build(&mut space, &map).unwrap();
    space.make_live();

    let both = [boot[0], span(0x1_0000_0000, 0x4000_0000)];
    let grown = MemoryMap { ram: &both, ..map };
    linear.add(&mut space, &grown, both[1]).unwrap();
    assert_eq!(
        linear.add(&mut space, &grown, span(0x9_0000_0000, 0x1000)),
        Err(LinearError::NotRam(span(0x9_0000_0000, 0x1000)))
    );
    let expected_all = expected::<X86_64<4>>(&grown, offset, Attrs::KERNEL_DATA);
    assert_eq!(judge::<X86_64<4>>(&memory, space.root()), expected_all.stretches());

    // Sealing: whole leaves, so nothing is split, and one range is invalidated.
    memory.record();
    let seal = Change::new().perms(Perms::READ);
    let mut gather = space.gather();
    linear.protect(&mut gather, span(0x200_0000, 0x40_0000), seal).unwrap();
    gather.flush(|_| ());
    let log = memory.take_log();
    assert_eq!(log.len(), 1);
    let first = offset + 0x200_0000;
    let stale = Stale { first, last: first + 0x3f_ffff, level: Some(Level::new(1)), tables: false };
    assert_eq!((log[0].everything, &log[0].ranges[..]), (false, &[stale][..]));

    let mut removed = 0;
    let progress = linear.remove(&mut gather, both[1], |_| ControlFlow::Continue(())).unwrap();
    assert!(progress.is_done());
    gather.finish(|leaf| removed += leaf.size());
    // One 1 GiB leaf: it was detached by itself, not with a table.
    assert_eq!(removed, 0);
    assert!(space.query(Va::new(offset + 0x1_0000_0000)).is_none());
}

#[test]
fn a_map_that_fails_takes_back_what_it_mapped() {
    let memory = Hosted::new(9, 12);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&memory).unwrap();
    let linear = LinearMap::new(Va::new(0), Mapping::new(Attrs::KERNEL_DATA).pages_only());
    let ram: Vec<_> = (0..6).map(|i| span(i << 32, 0x1000)).collect();
    let map = MemoryMap { ram: &ram, reserved: &[], special: &[] };
    let result = linear.build(&mut space, &map);
    assert_eq!(result, Err(LinearError::Edit(EditError::OutOfTables)));
    assert!(judge::<X86_64<4>>(&memory, space.root()).0.is_empty());
    assert!(space.destroy(|_| ()).is_ok());
    assert_eq!(memory.counts().tables, 0);
}

#[test]
fn the_wide_formats_map_memory_beyond_48_bits() {
    let memory = Hosted::new(16, 16);
    let mut space = AddressSpace::<Arm64K64Wide, _>::new(&memory).unwrap();
    let linear = LinearMap::new(Va::new(0), Mapping::new(Attrs::KERNEL_DATA));
    let ram = [span((1 << 48) - (4 << 30), 8 << 30)];
    let map = MemoryMap { ram: &ram, reserved: &[], special: &[] };
    linear.build(&mut space, &map).unwrap();
    let found = judge::<Arm64K64Wide>(&memory, space.root());
    assert_eq!(found.0.len(), 1);
    assert_eq!((found.0[0].1.pa, found.0[0].1.size), ((1 << 48) - (4 << 30), 8 << 30));
}

#[test]
fn a_direct_window_is_pointer_arithmetic() {
    let frame = [const { 0u64 }; 1024];
    let frame = Box::new(frame.map(Entry::new));
    let base = NonNull::from(&frame[0]);
    // SAFETY: both frames lie in the box.
    let window = unsafe { Direct::new(base.cast(), Pa::new(0x1000)) };
    // SAFETY: as above.
    let second = unsafe { window.open(Pa::new(0x2000), Level::PAGE) };
    assert_eq!(second, NonNull::from(&frame[512]));
}

/// Lists of ranges in units of pages, sorted and apart.
fn ranges(max: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    proptest::collection::vec((0..60u64, 1..90u64), 0..6).prop_map(move |steps| {
        let mut at = 0;
        let mut ranges = Vec::new();
        for (gap, size) in steps {
            at += gap;
            if at + size > max {
                break;
            }
            ranges.push((at, size));
            at += size;
        }
        ranges
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn every_page_of_a_memory_map_is_mapped_as_it_says(
        ram in ranges(600), reserved in ranges(600), text in ranges(600), pages in any::<bool>(),
    ) {
        let spans = |list: &[(u64, u64)]| -> Vec<Span<Pa>> {
            list.iter().map(|&(at, size)| span((1 << 20) + (at << 12), size << 12)).collect()
        };
        let (ram, reserved) = (spans(&ram), spans(&reserved));
        let special: Vec<_> = spans(&text).into_iter().map(|span| (span,
            Attrs::KERNEL_TEXT)).collect();
        let map = MemoryMap { ram: &ram, reserved: &reserved, special: &special };
        let memory = Hosted::new(64, 12);
        let mut space = AddressSpace::<Arm64K4, _>::new(&memory).unwrap();
        let mut mapping = Mapping::new(Attrs::KERNEL_DATA);
        if pages {
            mapping = mapping.pages_only();
        }
        let linear = LinearMap::new(Va::new(0x10_0000_0000), mapping);
        linear.build(&mut space, &map).unwrap();
        let model = expected::<Arm64K4>(&map, 0x10_0000_0000, Attrs::KERNEL_DATA);
        prop_assert_eq!(judge::<Arm64K4>(&memory, space.root()), model.stretches());
    }
}

#[test]
fn a_memory_map_out_of_order_is_refused() {
    let ram = [span(0x2000, 0x1000), span(0x1000, 0x1000)];
    let map = MemoryMap { ram: &ram, reserved: &[], special: &[] };
    let refused = map.regions::<Va>(Attrs::KERNEL_DATA);
    assert_eq!(refused.err(), Some(LinearError::Order(ram[1])));
    let _: Option<Mapped> = None;
}

proptest! {
    /// Held against a map of bytes; some lie at the end of memory.
    #[test]
    fn a_firmwares_map_is_that_of_its_bytes(
        ranges in prop::collection::vec((0u64..300, 0u64..60, any::<bool>(), any::<bool>()), 0..12),
        page in prop_oneof![Just(4096u64), Just(16384)],
        room in 0usize..14,
    ) {
        // A byte here stands for 1 KiB.
        const UNIT: u64 = 1024;
        const ALL: u64 = 400;
        let ranges: Vec<FirmwareRange> = ranges
            .into_iter()
            .map(|(start, size, usable, high)| {
                let base = if high { 0u64.wrapping_sub(ALL * UNIT) } else { 0 };
                let start = base + start * UNIT;
                FirmwareRange { start, last: (start + size * UNIT).wrapping_sub(1), usable }
            })
            .filter(|range| range.start <= range.last)
            .collect();
        let usable = |at: u64| {
            let of = |usable| {
                ranges.iter().any(|it| it.usable == usable && it.start <= at && at <= it.last)
            };
            of(true) && !of(false)
        };
        let mut expected: Vec<(u64, u64)> = Vec::new();
        for base in [0, 0u64.wrapping_sub(ALL * UNIT)] {
            let first = base.next_multiple_of(page);
            for number in 0..ALL * UNIT / page {
                let start = first + number * page;
                if (0..page / UNIT).all(|unit| usable(start + unit * UNIT)) {
                    let last = start + (page - 1);
                    match expected.last_mut() {
                        Some(before) if before.1.wrapping_add(1) == start && start != 0 => {
                            before.1 = last;
                        }
                        _ => expected.push((start, last)),
                    }
                }
            }
        }
        // The last address of all ends no span.
        let mut into = vec![Span::new(Pa::new(0), 4096).unwrap(); room];
        let found = usable_ram(ranges.iter().copied(), page, &mut into);
        if expected.len() > room {
            prop_assert_eq!(found.map(<[_]>::len), Err(expected.len()));
        } else {
            let found: Vec<_> = found.unwrap().iter()
                .map(|span| (span.start().get(), span.last().get())).collect();
            prop_assert_eq!(found, expected);
        }
    }
}

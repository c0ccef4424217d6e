//! A computer that boots: tables can be reached through windows alone, and what is wrong with a
//! window shows.
//!
//! It is as unkind as the architecture allows. A table walker sees the store to a slot's entry only
//! when it has been published, remembers what it saw at once, and forgets it only when an
//! invalidation that was issued after the entry was seen to be clear is complete. An access through
//! a slot goes where the walker remembers; where that is not the frame that the slot was opened
//! for, it is an error. New frames hold rubbish that reads as valid descriptors.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::vec;
use std::vec::Vec;

use tablewright::linear::{OneToOne, SlotMemory, Window};
use tablewright::{
    Barrier, Entry, Format, Hooks, Invalidation, Level, Pa, Platform, Va, What, fill,
};
use tablewright_hosted::Hosted;
use tablewright_walker::{Granule, Half, Regime};

use crate::Fixmap;

/// A format, and what the walker calls it.
pub trait Judged: Format<Input = Va> {
    const REGIME: Regime;
    /// The first address of the linear map.
    const BASE: u64 = 0xffff_0000_0000_0000;
}

impl Judged for tablewright::format::Arm64K4 {
    const REGIME: Regime = arm64(Granule::K4, false);
}
impl Judged for tablewright::format::Arm64K16 {
    const REGIME: Regime = arm64(Granule::K16, false);
}
impl Judged for tablewright::format::Arm64K64 {
    const REGIME: Regime = arm64(Granule::K64, false);
}
impl Judged for tablewright::format::Arm64K4Wide {
    const REGIME: Regime = arm64(Granule::K4, true);
    const BASE: u64 = 0xfff0_0000_0000_0000;
}
impl Judged for tablewright::format::X86_64<4> {
    const REGIME: Regime = Regime::X86_64 { levels: 4 };
    const BASE: u64 = 0xffff_8000_0000_0000;
}

const fn arm64(granule: Granule, wide: bool) -> Regime {
    Regime::Arm64Stage1 { granule, wide }
}

const SLOTS: usize = Fixmap::<()>::SLOTS;
/// The first address of the slots.
const SLOT_BASE: u64 = 0xffff_fdff_fe00_0000;
/// A descriptor of every format, valid and leading nowhere.
const RUBBISH: u64 = 0x0000_dead_dead_d003;

/// The state of one slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    /// Its entry as walkers see it.
    visible: u64,
    /// The frame to which a walker remembers that it leads.
    remembered: Option<Pa>,
    /// Invalidated, and not yet complete.
    issued: bool,
    /// The frame that it was opened for.
    opened: Option<Pa>,
}

pub struct Boot<F> {
    pub memory: Hosted,
    /// The entries of the slots, as the processor has stored them.
    entries: Box<[Entry]>,
    /// The addresses of the slots. What is there is never used.
    space: Box<[u64]>,
    slots: RefCell<[Slot; SLOTS]>,
    /// Frames written since stores were last published.
    unpublished: RefCell<HashSet<Pa>>,
    /// A table may be linked only when what was stored to it is published. The engine's links are
    /// releases, and need not.
    pub links_need_barrier: Cell<bool>,
    /// Frames may be reached without a slot, by code that shows that they are mapped.
    mapped: Cell<bool>,
    format: PhantomData<F>,
}

impl<F: Judged> Boot<F> {
    pub fn new(frames: usize) -> Self {
        Self {
            memory: Hosted::new(frames, F::PAGE_SHIFT),
            entries: (0..SLOTS).map(|_| Entry::new(0)).collect(),
            space: vec![0; SLOTS << F::INDEX_BITS].into_boxed_slice(),
            slots: RefCell::new([Slot::default(); SLOTS]),
            unpublished: RefCell::default(),
            links_need_barrier: Cell::new(true),
            mapped: Cell::new(false),
            format: PhantomData,
        }
    }

    /// The fixmap. There is one at a time.
    pub fn fixmap(&self) -> Fixmap<&Self> {
        let entries = NonNull::from(&self.entries[0]);
        // SAFETY: there are so many entries, zero before and after each use, and they live as long
        // as `self`.
        unsafe { Fixmap::new(Va::new(SLOT_BASE), entries, self) }
    }

    /// An empty root.
    pub fn root(&self) -> Pa {
        let level = F::root_level();
        let root = self.memory.alloc_table(level).unwrap();
        // SAFETY: the frame was just allocated.
        let table = unsafe { self.memory.table(root, level) };
        // SAFETY: all entries of it.
        unsafe { fill(table, F::entries(level), 0, 0) };
        root
    }

    /// Nothing is left shown, remembered, or not published.
    pub fn assert_clean(&self) {
        assert!(self.entries.iter().all(|entry| entry.load() == 0));
        let slots = self.slots.borrow();
        assert!(slots.iter().all(|slot| slot.remembered.is_none()));
        assert!(self.unpublished.borrow().is_empty(), "not published");
    }

    fn first(&self) -> NonNull<Entry> {
        // SAFETY: a frame of the memory.
        unsafe { self.memory.table(Hosted::BASE, Level::PAGE) }
    }

    fn is_slot(&self, entry: NonNull<Entry>) -> Option<usize> {
        let offset = entry.addr().get().wrapping_sub(self.entries.as_ptr().addr());
        (offset < SLOTS * size_of::<Entry>()).then_some(offset / size_of::<Entry>())
    }

    /// Translates an access to a table: the frame, and the entry on the host.
    fn translate(&self, entry: NonNull<Entry>) -> (Pa, NonNull<Entry>) {
        let page = 1usize << F::PAGE_SHIFT;
        let offset = entry.addr().get().wrapping_sub(self.space.as_ptr().addr());
        if offset >= SLOTS * page {
            assert!(self.mapped.get(), "a table was reached without a window");
            let offset = entry.addr().get() - self.first().addr().get();
            let frame = Hosted::BASE.checked_add((offset & !(page - 1)) as u64);
            return (frame.unwrap(), entry);
        }
        let frame = self.shown(offset / page);
        // SAFETY: the slot led to a frame of the memory, or `read` would have failed.
        let table = unsafe { self.memory.table(frame, Level::PAGE) };
        // SAFETY: an entry of the frame.
        (frame, unsafe { table.byte_add(offset % page) })
    }

    /// The frame that an access through a slot goes to. It has to be the one that it was opened
    /// for.
    fn shown(&self, number: usize) -> Pa {
        let slot = &mut self.slots.borrow_mut()[number];
        let frame = slot.remembered.unwrap_or_else(|| {
            assert!(slot.visible & 1 != 0, "slot {number} is not mapped, or not yet published");
            F::address(slot.visible, Level::PAGE)
        });
        slot.remembered = Some(frame);
        assert_eq!(slot.opened, Some(frame), "slot {number} shows another frame");
        assert!(self.memory.read(frame, 0).is_some(), "slot {number} leads nowhere");
        frame
    }

    fn write(&self, entry: NonNull<Entry>) -> NonNull<Entry> {
        if self.is_slot(entry).is_some() {
            return entry;
        }
        let (frame, entry) = self.translate(entry);
        self.unpublished.borrow_mut().insert(frame);
        entry
    }

    /// Returns the contents of the tables: of each leaf its address and its descriptor, and how
    /// many tables there are.
    pub fn found(&self, root: Pa) -> (Vec<(u64, u64)>, u64) {
        found::<F>(&self.memory, root)
    }
}

/// Returns the leaves that the walker finds under a root.
pub fn found<F: Judged>(memory: &Hosted, root: Pa) -> (Vec<(u64, u64)>, u64) {
    let mut read = |table, index| memory.read(Pa::new(table), index).expect("no such table");
    let (mut found, mut count) = (Vec::new(), 0);
    for half in [Half::Lower, Half::Upper] {
        // On arm64 the root is that of the linear map's half.
        if half == Half::Lower && F::HALVES {
            continue;
        }
        tablewright_walker::leaves(F::REGIME, root.get(), half, &mut read, |leaf| {
            found.push((leaf.va, leaf.raw));
            ControlFlow::Continue(())
        })
        .unwrap();
    }
    let mut seen = HashSet::new();
    tablewright_walker::tables(F::REGIME, root.get(), &mut read, |table| {
        assert!(seen.insert(table.pa), "a table is reachable twice");
        count += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    (found, count)
}

// SAFETY: frames are those of `Hosted` (1. to 3.); everything is visible and complete at once
// or, in what walkers remember, when it is said to be (4. to 6.); there is no clone (7.).
unsafe impl<F: Judged> Platform for Boot<F> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        let frame = self.memory.alloc_table(level)?;
        // SAFETY: the frame was just allocated.
        let table = unsafe { self.memory.table(frame, level) };
        // SAFETY: all entries of the frame.
        unsafe { fill(table, 1 << F::INDEX_BITS, RUBBISH, 0) };
        Some(frame)
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        self.unpublished.borrow_mut().remove(&frame);
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }

    unsafe fn table(&self, _: Pa, _: Level) -> NonNull<Entry> {
        panic!("a table was reached without a window");
    }

    fn barrier(&self, barrier: Barrier) {
        for (slot, entry) in self.slots.borrow_mut().iter_mut().zip(&self.entries) {
            match barrier {
                Barrier::Publish => {
                    slot.visible = entry.load();
                    if slot.visible & 1 != 0 && slot.remembered.is_none() {
                        slot.remembered = Some(F::address(slot.visible, Level::PAGE));
                    }
                }
                Barrier::Complete if slot.issued => {
                    slot.issued = false;
                    slot.remembered = None;
                }
                Barrier::Complete => {}
            }
        }
        if barrier == Barrier::Publish {
            self.unpublished.borrow_mut().clear();
        }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        for (number, slot) in self.slots.borrow_mut().iter_mut().enumerate() {
            let at = SLOT_BASE + ((number as u64) << F::PAGE_SHIFT);
            let named = match what.what {
                What::Everything => what.id == 0,
                What::Ranges(ranges) => {
                    ranges.iter().any(|range| (range.first..=range.last).contains(&at))
                }
            };
            // What a walker still sees, it may remember again.
            slot.issued |= named && slot.visible & 1 == 0;
        }
    }

    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: the accesses are made, where the slots lead (1.).
unsafe impl<F: Judged> Hooks for Boot<F> {
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: `load` asks for less.
        unsafe { self.load(entry) }
    }

    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        let entry = match self.is_slot(entry) {
            Some(_) => entry,
            None => self.translate(entry).1,
        };
        // SAFETY: valid.
        unsafe { entry.as_ref() }.load()
    }

    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.load(entry) }
    }

    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        let entry = self.write(entry);
        // SAFETY: valid.
        unsafe { entry.as_ref() }.store(bits);
    }

    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        let frame = F::address(bits, Level::new(1));
        if self.links_need_barrier.get() {
            let unpublished = self.unpublished.borrow();
            assert!(!unpublished.contains(&frame), "linked before it is visible");
        }
        let entry = self.write(entry);
        // SAFETY: valid.
        unsafe { entry.as_ref() }.link(bits);
    }

    unsafe fn exchange(&self, _: NonNull<Entry>, _: u64) -> u64 {
        panic!("nothing has to be exchanged")
    }

    unsafe fn compare_exchange(&self, _: NonNull<Entry>, _: u64, _: u64) -> Result<(), u64> {
        panic!("nothing has to be exchanged")
    }

    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        let first = self.write(first);
        // SAFETY: valid, and inside of one frame.
        unsafe { fill(first, count, value, step) }
    }
}

// SAFETY: accesses through the pointer are translated by what the slot shows (1.).
unsafe impl<F: Judged> SlotMemory for Boot<F> {
    fn pointer(&self, slot: usize, frame: Pa) -> NonNull<Entry> {
        self.slots.borrow_mut()[slot].opened = Some(frame);
        self.shown(slot);
        NonNull::from(&self.space[slot << F::INDEX_BITS]).cast()
    }
}

/// A map that is loaded: a frame can be reached if it translates `base` and the frame's address to
/// the frame.
pub struct Loaded<'b, F> {
    pub boot: &'b Boot<F>,
    pub root: Cell<Option<Pa>>,
    pub base: u64,
    pub used: Cell<u64>,
}

impl<'b, F: Judged> Loaded<'b, F> {
    pub fn new(boot: &'b Boot<F>, root: Option<Pa>, base: u64) -> Self {
        Self { boot, root: Cell::new(root), base, used: Cell::new(0) }
    }

    /// It is not loaded any more.
    pub fn unload(&self) {
        self.root.set(None);
        self.boot.mapped.set(false);
    }

    fn reach(&self, frame: Pa) -> NonNull<Entry> {
        let root = self.root.get().expect("no such map is loaded").get();
        let memory = &self.boot.memory;
        let mut read = |table, index| memory.read(Pa::new(table), index).unwrap();
        let at = self.base + frame.get();
        let leaf = tablewright_walker::translate(F::REGIME, root, at, &mut read);
        assert_eq!(leaf.expect("it is not mapped").physical(at), frame.get());
        self.used.update(|used| used + 1);
        self.boot.mapped.set(true);
        // SAFETY: the memory is that of the frames.
        unsafe { memory.table(frame, Level::PAGE) }
    }
}

// SAFETY: the pointer is that of the frame, which is mapped (1.).
unsafe impl<F: Judged> OneToOne for Loaded<'_, F> {
    fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        self.reach(frame)
    }
}

// SAFETY: as above (1.).
unsafe impl<F: Judged> Window for Loaded<'_, F> {
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        self.reach(frame)
    }

    fn close(&self, _: Pa, _: NonNull<Entry>) {}
}

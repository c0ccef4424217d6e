//! Ways to make the linear map that were discussed beside the techniques, in the published walk
//! with all of them.
//!
//! * [`one_to_one`]: for the time being all RAM is mapped to its own address, in the largest
//!   leaves, in a root of its own in the other half. Tables are reached through that, so nothing is
//!   moved, and nothing invalidated before the end. It maps RAM and nothing else, also where that
//!   ends inside of a block; it was discussed with blocks over all of DRAM, of which some memory
//!   must not be mapped.
//! * [`huge_slots`]: the slots of the fixmap are blocks. One shows 512 tables that lie beside each
//!   other, and is moved when a table lies in another block.
//! * [`blocks`]: the map itself is of blocks and contiguous runs (`rodata=off`), so that it has few
//!   tables, and the permissions of a page cannot be changed alone.

use core::cell::Cell;
use core::ptr::NonNull;

use tablewright::linear::{
    LinearError, LinearMap, MemoryMap, OneToOne, SlotMemory, Window, Windowed,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, EditError, Entry, Format, Half, Hooks, Invalidation, Level,
    Liveness, Mapping, Pa, Platform, Stale, Va, What,
};

use super::Goal;
use super::baseline::{Leaves, map, through_fixmap};
use super::engine::{COARSE_ID, slots};
use super::fixmap::Fixmap;
use super::reach::{Late, Open, Reach};
use super::technique::{Technique, Techniques};

fn all() -> Techniques {
    Technique::ALL.into_iter().collect()
}

/// All RAM at its own address.
struct AllRam<I>(I);

// SAFETY: tables are RAM, and all of that is mapped so while this is used; its own trait promises
// the rest (1.).
unsafe impl<I: OneToOne> Window for AllRam<I> {
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        self.0.pointer(frame)
    }

    fn close(&self, _: Pa, _: NonNull<Entry>) {}
}

/// Maps all memory of `goal` as published, through a map of all RAM to its own address. `switch`
/// and `identity` are as for [`engine::coarse`](super::engine::coarse).
///
/// # Errors
/// As [`build`](super::build).
///
/// # Safety
/// As for [`engine::coarse`](super::engine::coarse); and all frames of tables are RAM of the goal.
pub unsafe fn one_to_one<F, P, M, I>(
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
    identity: I,
    mut switch: impl FnMut(Option<Pa>),
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    M: SlotMemory,
    I: OneToOne,
{
    let regions = goal.regions::<F>(Some)?;
    let slots = slots::<F, _, _>(platform, fixmap, goal)?;
    // SAFETY: the fixmap shows all frames that the platform allocates (2.).
    let through = || unsafe { Windowed::new(platform, &slots as &dyn Window) };
    let mut space =
        AddressSpace::<F, _>::new_in(through(), Half::Lower).ok_or(EditError::OutOfTables)?;
    // In an address space of its own, so not global.
    let attrs = Attrs { global: false, ..goal.attrs };
    let memory = MemoryMap { special: &[], ..goal.memory };
    let mapped = LinearMap::new(Va::new(0), Mapping::new(attrs)).build(&mut space, &memory);
    let root = space.root();
    slots.end_batch();
    if mapped.is_ok() {
        platform.barrier(Barrier::Publish);
        switch(Some(root));
    }
    let built = mapped.and_then(|()| {
        let all_ram = AllRam(identity);
        let mut reach = Late(&all_ram);
        // SAFETY: passed on (1. to 3.); all tables are RAM, which is mapped so.
        unsafe { map::<F, P>(all(), Leaves::Pages, platform, &mut reach, goal.root, &regions) }
    });
    switch(None);
    platform.barrier(Barrier::Publish);
    platform.invalidate(&Invalidation {
        root,
        id: COARSE_ID,
        global: false,
        what: What::Everything,
    });
    platform.barrier(Barrier::Complete);
    // SAFETY: the root was made above, and no processor has it loaded any more, by (4.), or
    // remembers it.
    let space =
        unsafe { AddressSpace::<F, _>::adopt(through(), root, Half::Lower, Liveness::Dead) };
    // A tree of ours has no recursive entry, and a dead space can always be destroyed.
    if let Ok(space) = space {
        let _destroyed = space.destroy(|_| ());
    }
    slots.end_batch();
    built
}

/// Slots that show a block each, one for each level of tables.
pub struct HugeSlots<M> {
    base: Va,
    entries: NonNull<Entry>,
    memory: M,
    shown: [Cell<Option<Pa>>; HugeSlots::<()>::SLOTS],
}

impl HugeSlots<()> {
    /// How many there are: enough for formats of five levels.
    pub const SLOTS: usize = 5;
}

impl<M> HugeSlots<M> {
    /// Slots at the blocks from `base` on, used through `memory`, which counts them in pages.
    ///
    /// # Safety
    /// 1. `entries` points to [`SLOTS`](HugeSlots::SLOTS) consecutive entries of a table at the
    ///    level above pages, which translate these blocks; they are 0, have no other user, and stay
    ///    valid for the platform's accessors.
    pub const unsafe fn new(base: Va, entries: NonNull<Entry>, memory: M) -> Self {
        Self { base, entries, memory, shown: [const { Cell::new(None) }; HugeSlots::<()>::SLOTS] }
    }
}

/// Through them.
struct Huge<'a, F, P, M> {
    platform: &'a P,
    slots: &'a HugeSlots<M>,
    root: (Pa, bool),
    block: u64,
    format: core::marker::PhantomData<F>,
}

const BLOCK: Level = Level::new(1);

impl<F: Format<Input = Va>, P: Platform + Hooks, M> Huge<'_, F, P, M> {
    /// Hides what a slot shows, and waits until it is forgotten.
    fn clear(&self, slot: usize) {
        if self.slots.shown[slot].take().is_none() {
            return;
        }
        // SAFETY: an entry of the slots, valid for the accessors.
        unsafe { self.platform.store(self.slots.entries.add(slot), 0) };
        self.platform.barrier(Barrier::Publish);
        let first = self.slots.base.get() + ((slot as u64) << F::shift(BLOCK));
        let stale = Stale {
            first,
            last: first + (1 << F::shift(BLOCK)) - 1,
            level: Some(BLOCK),
            tables: false,
        };
        let (root, global) = self.root;
        self.platform.invalidate(&Invalidation {
            root,
            id: 0,
            global,
            what: What::Ranges(&[stale]),
        });
        self.platform.barrier(Barrier::Complete);
    }
}

// SAFETY: a slot shows the block of its frame from the barrier in `open` on, until it is cleared
// before it shows another; meanwhile `SlotMemory` vouches for the pointer (1.). Tables of one level
// are open one at a time, and each level has a slot.
unsafe impl<F: Format<Input = Va>, P: Platform + Hooks, M: SlotMemory> Reach for Huge<'_, F, P, M> {
    fn publishes(&self) -> bool {
        false
    }

    unsafe fn open(&mut self, frame: Pa, level: Level) -> Open {
        let slot = usize::from(level.height());
        let size = 1u64 << F::shift(BLOCK);
        let start = Pa::new(frame.get() & !(size - 1));
        if self.slots.shown[slot].get() != Some(start) {
            self.clear(slot);
            let entry = self.block | F::put_address(start);
            // SAFETY: an entry of the slots, valid for the accessors.
            unsafe { self.platform.store(self.slots.entries.add(slot), entry) };
            self.platform.barrier(Barrier::Publish);
            self.slots.shown[slot].set(Some(start));
        }
        let pages = slot << (F::shift(BLOCK) - F::PAGE_SHIFT);
        let page = ((frame.get() - start.get()) >> F::PAGE_SHIFT) as usize;
        Open { frame, level, table: self.slots.memory.pointer(pages + page, frame) }
    }

    fn close(&mut self, _: Open) {}

    fn clean(&mut self) {}
}

/// Maps all memory of `goal` as published, with tables that are reached through slots of a block
/// each.
///
/// # Errors
/// As [`build`](super::build); [`LinearError::NotRam`] if a block around tables, of those in
/// `tables`, is not all RAM, so that it must not be mapped.
///
/// # Safety
/// As for [`build`](super::build), with these slots; and all frames of tables lie in `tables`.
pub unsafe fn huge_slots<F, P, M>(
    platform: &P,
    slots: &HugeSlots<M>,
    goal: &Goal<'_>,
    tables: tablewright::Span<Pa>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    M: SlotMemory,
{
    let regions = goal.regions::<F>(Some)?;
    let low = (1u64 << F::shift(BLOCK)) - 1;
    let blocks = (tables.start().get() & !low, tables.last().get() | low);
    let is_ram =
        |ram: &tablewright::Span<Pa>| ram.start().get() <= blocks.0 && blocks.1 <= ram.last().get();
    if !goal.memory.ram.iter().any(is_ram) {
        return Err(LinearError::NotRam(tables));
    }
    let mut reach = Huge::<F, P, M> {
        platform,
        slots,
        root: (goal.root, goal.attrs.global),
        block: F::encode(&goal.attrs, BLOCK).map_err(EditError::from)?,
        format: core::marker::PhantomData,
    };
    // SAFETY: passed on (1. to 3.).
    let built =
        unsafe { map::<F, P>(all(), Leaves::Pages, platform, &mut reach, goal.root, &regions) };
    (0..HugeSlots::SLOTS).for_each(|slot| reach.clear(slot));
    built
}

/// Maps all memory of `goal` as a kernel does that need not change the permissions of each page
/// (`rodata=off`), with these `techniques`: in blocks, and in contiguous runs of blocks and pages,
/// as large as fit.
///
/// # Errors
/// As [`build`](super::build).
///
/// # Safety
/// As for [`build`](super::build).
pub unsafe fn blocks<F, P, M>(
    techniques: Techniques,
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    M: SlotMemory,
{
    // SAFETY: passed on (1. to 3.).
    unsafe { through_fixmap::<F, P, M>(techniques, Leaves::Largest, platform, fixmap, goal) }
}

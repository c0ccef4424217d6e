//! Leaves that the processor has: where it has no large ones, none is made, by whatever edit; and
//! flags that it sets in them are kept.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::NonNull;

use tablewright::guest::{Access, Backing, Fault, Guest, Slot, SlotCell};
use tablewright::shared::{Mapped, NewLeaf, Refused, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Format, Hooks, Invalidation, Ipa,
    Level, Mapping, Pa, Perms, Platform, Span, Va,
    format::{Arm64K4, Ept, Npt, X86_64},
};
use tablewright_hosted::{Hosted, Threads};

const G1: u64 = 1 << 30;

fn caps(largest_leaf: Level) -> Caps {
    Caps { largest_leaf, ..tablewright_hosted::CAPS }
}

/// The size of a leaf at the lower of the two levels.
fn size<F: Format>(largest: Level, wish: Level) -> u64 {
    1 << F::shift(largest.min(wish))
}

/// Each capability, and the largest leaf that it allows.
fn each(sure: u8) -> [(Level, Level); 4] {
    let sure = Level::new(sure);
    let levels = [Level::PAGE, Level::new(1), Level::new(2), Level::ANY];
    levels.map(|level| (level, level.max(sure).min(Level::new(2))))
}

fn a_space_has_no_larger_leaf<F: Format<Input = Va>>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Hosted::new(2000, 12).with_caps(caps(largest_leaf));
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        let span = Span::new(Va::new(0), G1).unwrap();
        for wish in [Level::PAGE, Level::new(1), Level::new(2)] {
            let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(wish).without_runs();
            space.map(span, Pa::new(0), mapping).unwrap();
            let found = space.query(Va::new(0x1234)).unwrap();
            assert_eq!(found.size(), size::<F>(largest, wish), "{}", F::NAME);
            // Collapsed as far as it goes, whatever is asked for.
            let mut gather = space.gather();
            gather.collapse(span, Level::new(2), false).unwrap();
            gather.finish(|_| ());
            let found = space.query(Va::new(0x1234)).unwrap();
            assert_eq!(found.size(), size::<F>(largest, Level::new(2)), "{}", F::NAME);
            let mut gather = space.gather();
            let all = gather.unmap(span, |_| core::ops::ControlFlow::Continue(()));
            assert!(all.unwrap().is_done());
            gather.finish(|_| ());
        }
    }
}

#[test]
fn a_space_of_x86_has_no_leaf_that_the_processor_has_not() {
    a_space_has_no_larger_leaf::<X86_64<4>>(1);
}

#[test]
fn a_space_of_arm64_has_every_leaf_of_its_format() {
    a_space_has_no_larger_leaf::<Arm64K4>(2);
}

fn a_shared_space_has_no_larger_leaf<F: Format<Input = Ipa> + PartialEq>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Threads::new(2000, 12, 1).with_caps(caps(largest_leaf));
        let space = AddressSpace::<F, _>::new(&platform).unwrap();
        let space = SharedSpace::new(space).unwrap();
        let span = Span::new(Ipa::new(0), G1).unwrap();
        let mapping = Mapping::new(Attrs::GUEST_MEMORY);
        assert_eq!(space.map_range(span, Pa::new(0), mapping), Ok(G1));
        let found = space.query(Ipa::new(0x1234)).unwrap();
        assert_eq!(found.size(), size::<F>(largest, Level::ANY), "{}", F::NAME);
        // One leaf.
        let mut gather = space.gather();
        assert!(gather.top_up(3));
        for height in 0..3 {
            let level = Level::new(height);
            let at = (1 + u64::from(height)) * G1;
            let leaf = NewLeaf::new(Ipa::new(at), Pa::new(at), level, Attrs::GUEST_MEMORY);
            let expected = match level <= largest {
                true => Ok(Mapped::Installed),
                false => Err(Refused::Edit(EditError::NoSuchLeaf)),
            };
            assert_eq!(gather.map(&leaf.unwrap()), expected, "{} {level:?}", F::NAME);
        }
        assert!(gather.finish(|_| ()).is_ok());
    }
}

#[test]
fn a_shared_space_has_no_leaf_that_the_processor_has_not() {
    a_shared_space_has_no_larger_leaf::<Npt<4>>(1);
    a_shared_space_has_no_larger_leaf::<Ept<4>>(0);
}

fn a_fault_of_a_guest_makes_no_larger_leaf<F: Format<Input = Ipa> + PartialEq>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Threads::new(64, 12, 1).with_caps(caps(largest_leaf));
        let mut cells = [const { SlotCell::new() }; 1];
        let space = AddressSpace::<F, _>::new(&platform).unwrap();
        let guest = Guest::new(SharedSpace::new(space).unwrap(), &mut cells);
        let memory = Span::new(Ipa::new(0), 4 * G1).unwrap();
        guest.insert(Slot::memory(memory, 0)).unwrap();
        let fault = Fault::new(Ipa::new(G1 + 0x1234), Access::Write);
        let request = guest.request(&fault).unwrap();
        let mut gather = guest.gather();
        assert!(gather.top_up(3));
        // The host has the memory in one piece of 1 GiB.
        let page = Backing::new(Pa::new(fault.at.get() + 4 * G1), G1);
        assert_eq!(gather.map(&request, &page), Ok(Mapped::Installed));
        assert!(gather.finish(|_| ()).is_ok());
        let found = guest.space().query(fault.at).unwrap();
        assert_eq!(found.size(), size::<F>(largest, Level::ANY), "{}", F::NAME);

        // It can be split in advance.
        let mut gather = guest.gather();
        assert!(gather.top_up(3));
        let split = gather.split(fault.at, Level::PAGE);
        assert_eq!(split, Ok(found.level() != Level::PAGE));
        let _ = gather.finish(|_| ());
        let below = guest.space().query(fault.at).unwrap();
        assert!(below.level() < found.level() || !split.unwrap());
    }
}

#[test]
fn a_fault_of_a_guest_makes_no_leaf_that_the_processor_has_not() {
    a_fault_of_a_guest_makes_no_larger_leaf::<Npt<4>>(1);
    a_fault_of_a_guest_makes_no_larger_leaf::<Ept<4>>(0);
}

/// Ordinary memory, in which a walker writes flags just before software does.
struct Walked<F> {
    memory: Hosted,
    /// It will, once.
    is_due: Cell<bool>,
    format: PhantomData<F>,
}

impl<F: Format> Walked<F> {
    /// A write by way of the entry, if one is due and the entry lets it: what is clean is dirty
    /// (DDI 0487 D8.5.5; SDM vol. 3A 5.8).
    fn walk(&self, entry: NonNull<Entry>) {
        // SAFETY: an entry that the engine is about to write.
        let entry = unsafe { entry.as_ref() };
        let is = entry.load();
        // All ones: a frame that was handed out, and has not been written yet.
        let writable = is != u64::MAX
            && match F::HALVES {
                true => is >> 51 & 1 == 1, // DBM
                false => is & 3 == 3,
            };
        if writable && self.is_due.take() {
            entry.store(match F::HALVES {
                true => is & !(1 << 7),
                false => is | 1 << 5 | 1 << 6,
            });
        }
    }
}

// SAFETY: passed on.
unsafe impl<F: Format> Platform for Walked<F> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.memory.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.memory.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.memory.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
    }
    fn caps(&self) -> Caps {
        self.memory.caps()
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: each access is made as the default makes it (1.), after what a walker may do before it.
unsafe impl<F: Format> Hooks for Walked<F> {
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        self.walk(entry);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.store(bits);
    }
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        self.walk(entry);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.exchange(bits)
    }
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.walk(entry);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.compare_exchange(current, new)
    }
}

/// Each page is like the last, so that the engine does to it what it did to that; and is written
/// between the look and the edit.
fn a_page_like_the_last_is_written_meanwhile<F: Format<Input = Va>>() {
    let platform =
        Walked::<F> { memory: Hosted::new(16, 12), is_due: Cell::new(false), format: PhantomData };
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let clean = Attrs { dirty: false, ..Attrs::USER_DATA };
    let page = |number: u64| Va::new(number << 12);
    for number in 0..6 {
        space.map_page(page(number), Pa::new(number << 12), clean).unwrap();
    }
    space.make_live();
    let mut gather = space.gather();
    for number in 0..3 {
        platform.is_due.set(number != 0);
        gather.protect_page(page(number), Change::new().write_protect()).unwrap();
        assert!(!platform.is_due.get(), "it was written by no store");
        let attrs = gather.query(page(number)).unwrap().attrs();
        assert_eq!(attrs.dirty, number != 0, "{}", F::NAME);
        assert!(!attrs.perms.intersects(Perms::ANY_WRITE));
    }
    for number in 3..6 {
        platform.is_due.set(number != 3);
        let held = gather.unmap_page(page(number)).unwrap().expect("mapped");
        assert!(!platform.is_due.get(), "it was taken out by no store");
        let leaf = gather.flush_with(held, |_| ()).expect("of this gather");
        assert_eq!(leaf.attrs().dirty, number != 3, "{}", F::NAME);
    }
}

#[test]
fn what_hardware_writes_between_look_and_edit_is_kept() {
    a_page_like_the_last_is_written_meanwhile::<X86_64<4>>();
    a_page_like_the_last_is_written_meanwhile::<Arm64K4>();
}

/// Pages of a line that can only be read, but one, which is written between the look and the edit:
/// it is not taken for one of them.
fn one_page_of_a_line_is_written_meanwhile<F: Format<Input = Va>>() {
    for odd in 0..8 {
        let platform = Walked::<F> {
            memory: Hosted::new(16, 12),
            is_due: Cell::new(false),
            format: PhantomData,
        };
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        for number in 0..16_u64 {
            let attrs = Attrs {
                dirty: false,
                ..match number == 8 + odd {
                    true => Attrs::USER_DATA,
                    false => Attrs::USER_RODATA,
                }
            };
            let at = Va::new(number << 12);
            space.map_page(at, Pa::new(number << 12), attrs).unwrap();
        }
        space.make_live();
        let mut gather = space.gather();
        for first in [0, 8] {
            platform.is_due.set(first == 8);
            let span = Span::new(Va::new(first << 12), 8 << 12).unwrap();
            let mut held = Vec::new();
            let all = gather.unmap(span, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            assert!(all.unwrap().is_done());
            assert!(!platform.is_due.get(), "it was taken out by no store");
            let completed = gather.issue().complete();
            for (number, leaf) in (first..).zip(held) {
                let leaf = completed.release(leaf).expect("of this gather");
                assert_eq!(leaf.input(), Va::new(number << 12));
                assert_eq!(leaf.attrs().dirty, number == 8 + odd, "{}", F::NAME);
            }
            completed.finish(|_| ());
            gather = space.gather();
        }
    }
}

/// Pages that can all be written, of which one is, when others like it have been taken out.
fn one_page_of_many_is_written_meanwhile<F: Format<Input = Va>>() {
    let platform =
        Walked::<F> { memory: Hosted::new(16, 12), is_due: Cell::new(false), format: PhantomData };
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let attrs = Attrs { dirty: false, ..Attrs::USER_DATA };
    let pages = |first: u64| Span::new(Va::new(first << 12), 8 << 12).unwrap();
    for first in [0, 8] {
        space.map(pages(first), Pa::new(first << 12), Mapping::new(attrs).pages_only()).unwrap();
    }
    space.make_live();
    for first in [0, 8] {
        platform.is_due.set(first == 8);
        let (mut gather, mut held) = (space.gather(), Vec::new());
        let all = gather.unmap(pages(first), |leaf| {
            held.push(leaf);
            ControlFlow::Continue(())
        });
        assert!(all.unwrap().is_done() && !platform.is_due.get());
        let completed = gather.issue().complete();
        for (number, leaf) in (first..).zip(held) {
            let leaf = completed.release(leaf).expect("of this gather");
            assert_eq!(leaf.attrs().dirty, number == 8, "{}", F::NAME);
        }
        completed.finish(|_| ());
    }
}

#[test]
fn what_hardware_writes_in_a_line_of_pages_is_kept() {
    one_page_of_many_is_written_meanwhile::<X86_64<4>>();
    one_page_of_many_is_written_meanwhile::<Arm64K4>();
    one_page_of_a_line_is_written_meanwhile::<X86_64<4>>();
    one_page_of_a_line_is_written_meanwhile::<Arm64K4>();
}

/// Pages and a block that are moved are written between the look and the edit.
fn what_is_moved_is_written_meanwhile<F: Format<Input = Va>>() {
    let platform =
        Walked::<F> { memory: Hosted::new(32, 12), is_due: Cell::new(false), format: PhantomData };
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let clean = Attrs { dirty: false, ..Attrs::USER_DATA };
    let block = 1 << F::shift(Level::new(1));
    let at = |number: u64, size| Span::new(Va::new(number * block), size).unwrap();
    space.map(at(0, 0x3000), Pa::new(block), clean).unwrap();
    space.map(at(2, block), Pa::new(2 * block), clean).unwrap();
    space.map(at(9, 0x1000), Pa::new(0), clean).unwrap();
    space.make_live();
    let mut gather = space.gather();
    // One page, between tables that exist and to one that does not; several; a block.
    let far = at(9, 0x1000).start().get();
    for (from, size, to) in [
        (0, 0x1000, far + 0x1000),
        (0x1000, 0x1000, 5 * block),
        (0x2000, 0x1000, far + 0x7000),
        (2 * block, block, 12 * block),
    ] {
        platform.is_due.set(true);
        gather.relocate(Span::new(Va::new(from), size).unwrap(), Va::new(to)).unwrap();
        assert!(!platform.is_due.get(), "it was taken out by no store");
        let attrs = gather.query(Va::new(to)).unwrap().attrs();
        assert!(attrs.dirty, "{}: {from:#x}", F::NAME);
    }
    gather.finish(|_| ());
}

#[test]
fn what_hardware_writes_in_what_is_moved_is_kept() {
    what_is_moved_is_written_meanwhile::<X86_64<4>>();
    what_is_moved_is_written_meanwhile::<Arm64K4>();
}

/// Pages that are forked are written between the look and the edit.
fn what_is_forked_is_written_meanwhile<F: Format<Input = Va>>() {
    let platform =
        Walked::<F> { memory: Hosted::new(32, 12), is_due: Cell::new(false), format: PhantomData };
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let mut child = AddressSpace::<F, _>::new(&platform).unwrap();
    let clean = Mapping::new(Attrs { dirty: false, ..Attrs::USER_DATA }).pages_only();
    let pages = Span::new(Va::new(0), 0x4000).unwrap();
    space.map(pages, Pa::new(0), clean).unwrap();
    space.make_live();
    platform.is_due.set(true);
    let (mut gather, mut into) = (space.gather(), child.gather());
    gather.fork(pages, Change::new().write_protect(), &mut into, |_| ()).unwrap();
    assert!(!platform.is_due.get(), "it was changed by no store");
    into.finish(|_| ());
    gather.finish(|_| ());
    let mut written = 0;
    space.walk_all(|leaf| written += u64::from(leaf.attrs().dirty));
    assert_eq!(written, 1, "{}", F::NAME);
}

#[test]
fn what_hardware_writes_in_what_is_forked_is_kept() {
    what_is_forked_is_written_meanwhile::<X86_64<4>>();
    what_is_forked_is_written_meanwhile::<Arm64K4>();
}

/// A block that is split is written between the look and the edit: all of its parts are.
fn what_is_split_is_written_meanwhile<F: Format<Input = Va>>(bbm: u8) {
    let memory = Hosted::new(32, 12).with_caps(Caps { bbm, ..tablewright_hosted::CAPS });
    let platform = Walked::<F> { memory, is_due: Cell::new(false), format: PhantomData };
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let clean = Attrs { dirty: false, ..Attrs::USER_DATA };
    let block = Span::new(Va::new(0), 1 << F::shift(Level::new(1))).unwrap();
    space.map(block, Pa::new(0), Mapping::new(clean).without_runs()).unwrap();
    space.make_live();
    let mut gather = space.gather();
    platform.is_due.set(true);
    gather.split(block, Level::PAGE).unwrap();
    assert!(!platform.is_due.get(), "it was replaced by no store");
    gather.finish(|_| ());
    let mut pages = 0;
    space.walk_all(|leaf| {
        assert!(leaf.attrs().dirty && leaf.level() == Level::PAGE, "{}: {leaf:?}", F::NAME);
        pages += 1;
    });
    assert_eq!(pages, 512);
}

#[test]
fn what_hardware_writes_in_what_is_split_is_kept() {
    what_is_split_is_written_meanwhile::<X86_64<4>>(0);
    what_is_split_is_written_meanwhile::<Arm64K4>(0);
    what_is_split_is_written_meanwhile::<Arm64K4>(2);
}

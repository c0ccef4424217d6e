//! Each edit once, on few frames: short enough for Miri, which checks provenance and undefined
//! behaviour.

use std::ops::ControlFlow;
use std::ptr::NonNull;

use tablewright::format::{Arm64K4, X86_64};
use tablewright::linear::{Direct, SlotMemory, Slots, Window, Windowed};
use tablewright::{
    AddressSpace, Attrs, Change, Entry, Format, Level, Mapping, Pa, Perms, Platform, Span, Va,
};
use tablewright_hosted::Hosted;

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Builds, changes and takes down a few leaves, on any platform.
fn each_edit<F: Format<Input = Va>, P: Platform + Clone>(platform: P) {
    let mut space = AddressSpace::<F, P>::new(platform).unwrap();
    let pages = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    space.map(span(0, 0x8000), Pa::new(0x8000), pages).unwrap();
    let block = span(0x20_0000, 0x20_0000);
    space.map(block, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    space.make_live();
    let mut gather = space.gather();
    for perms in [Perms::READ, Perms::READ | Perms::WRITE] {
        let page = span(0x20_0000, 0x1000);
        gather.protect(page, Change::new().perms(perms)).unwrap();
    }
    gather.flush(|_| ());
    let collapsed = gather.collapse(block, Level::new(1), true).unwrap();
    assert!(collapsed >= 1);
    gather.finish(|_| ());
    assert_eq!(space.query(Va::new(0x20_0000)).unwrap().size(), 0x20_0000);
    let mut gather = space.gather();
    let mut held = Vec::new();
    for at in [span(0, 0x1000), span(0, 0x4000_0000)] {
        let progress = gather.unmap(at, |leaf| {
            held.push(leaf);
            ControlFlow::Continue(())
        });
        assert!(progress.unwrap().is_done());
    }
    assert_eq!(held.len(), 1);
    let completed = gather.issue().complete();
    for leaf in held {
        assert!(completed.release(leaf).is_ok());
    }
    let mut leaves = 0;
    completed.finish(|_| leaves += 1);
    assert_eq!(leaves, 8);
    // SAFETY: no processor walks the tables.
    unsafe { space.make_dead() };
    assert!(space.destroy(|_| ()).is_ok());
}

#[test]
fn on_memory_of_its_own() {
    let platform = Hosted::new(12, 12);
    each_edit::<X86_64<4>, _>(&platform);
    each_edit::<Arm64K4, _>(&platform);
    assert_eq!(platform.counts().tables, 0);
}

#[test]
fn through_a_direct_window() {
    let platform = Hosted::new(12, 12);
    // SAFETY: the first frame of the platform.
    let base = unsafe { platform.table(Hosted::BASE, Level::PAGE) };
    // SAFETY: all frames lie behind it.
    let window = unsafe { Direct::new(base.cast(), Hosted::BASE) };
    // SAFETY: the window shows all frames of the platform (1.).
    each_edit::<Arm64K4, _>(unsafe { Windowed::new(&platform, &window) });
    assert_eq!(platform.counts().tables, 0);
}

#[test]
fn through_slots() {
    struct Memory<'h>(&'h Hosted);
    // SAFETY: the pointer is that of the frame.
    unsafe impl SlotMemory for Memory<'_> {
        fn pointer(&self, _: usize, frame: Pa) -> NonNull<Entry> {
            // SAFETY: the window shows frames of the platform.
            unsafe { self.0.table(frame, Level::PAGE) }
        }
    }
    let platform = Hosted::new(12, 12);
    let entries = [const { 0 }; 8].map(Entry::new);
    let first = NonNull::from(&entries).cast();
    // SAFETY: the entries are zero, ours, and outlive the window.
    let window = unsafe {
        Slots::<X86_64<4>, _, _, 8>::new(
            &platform,
            Memory(&platform),
            Va::new(0x7f_0000_0000),
            first,
            &Attrs::KERNEL_DATA,
            (Pa::new(0), 0),
        )
    }
    .unwrap();
    // SAFETY: the slots show all frames of the platform, so many at a time as a walk needs (1.).
    each_edit::<X86_64<4>, _>(unsafe { Windowed::new(&platform, &window) });
    window.end_batch();
    assert!(entries.iter().all(|entry| entry.load() == 0));
    assert_eq!(platform.counts().tables, 0);
}

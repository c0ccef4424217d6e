//! The guest's own tables, one to one, built by the engine in the guest's memory.

use std::cell::Cell;
use std::ptr::NonNull;

use tablewright::{
    AddressSpace, Attrs, Barrier, Entry, Invalidation, Level, Mapping, Pa, Platform, Span, Va,
};

use crate::arch;

/// Memory for tables: part of the guest's, handed out from its beginning on.
struct Frames<'m> {
    /// The host's address of the guest's address zero.
    base: NonNull<u8>,
    next: Cell<u64>,
    end: u64,
    memory: std::marker::PhantomData<&'m mut [u8]>,
}

// SAFETY: 1. each frame is handed out once, is aligned to a page, and is the guest's memory, which
// is mapped for as long as the borrow. 2. A frame's address is the guest's, and its place that far
// from where the guest's memory begins. 3. There are no links. 4. to 6. No processor walks these
// tables yet: that a vCPU is entered later orders all that was stored. 7. There are no clones.
unsafe impl Platform for Frames<'_> {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let frame = self.next.get();
        let next = frame + 4096;
        (next <= self.end).then(|| {
            self.next.set(next);
            Pa::new(frame)
        })
    }

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: the caller promises a frame that was handed out, which lies within the memory.
        unsafe { self.base.byte_add(frame.get() as usize) }.cast()
    }

    fn barrier(&self, _: Barrier) {}

    fn invalidate(&self, _: &Invalidation<'_>) {}
}

/// A range of the guest, mapped one to one.
pub struct Area {
    /// Its first address.
    pub first: u64,
    /// Its size, in whole pages.
    pub bytes: u64,
    /// Its attributes.
    pub attrs: Attrs,
}

/// Maps areas with tables that take frames from `first` up to `end`, addresses of the guest: in the
/// largest leaves, or in pages. Gives back the root. `None` if there are too few frames, or an area
/// cannot be mapped.
///
/// # Safety
/// 1. `memory` is where the guest's address zero is, and what lies from there up to `end` is
///    mapped, and no one else's until this is over.
pub unsafe fn build(
    memory: NonNull<u8>,
    (first, end): (u64, u64),
    areas: &[Area],
    in_pages: bool,
) -> Option<u64> {
    let frames =
        Frames { base: memory, next: Cell::new(first), end, memory: std::marker::PhantomData };
    let mut space = AddressSpace::<arch::Format, _>::new(&frames)?;
    for area in areas {
        let span = Span::new(Va::new(area.first), area.bytes).ok()?;
        let mapping = Mapping::new(area.attrs);
        let mapping = if in_pages { mapping.pages_only() } else { mapping };
        space.map(span, Pa::new(area.first), mapping).ok()?;
    }
    // A space that goes leaves its tables: they are the guest's now.
    Some(space.root().get())
}

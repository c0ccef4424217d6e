//! Physical memory: frames that hold tables or data, and what has become of each.
//!
//! Invariants:
//!
//! * A frame is in one [`State`]. It is handed out [`Private`](State::Private): only the CPU that
//!   asked for it knows it. It becomes [`Live`](State::Live) when an entry that walkers can reach
//!   points to it, and [`Detached`](State::Detached) when no entry does any more but a walker may
//!   still remember the way. It is [`Free`](State::Free) again only from the first and the last.
//! * A frame that is handed out holds [`POISON`] in every entry. It is a valid descriptor that
//!   leads out of memory, so that a walker that follows an entry which was not written is noticed,
//!   whatever the format.
//! * A frame that was freed is the next to be handed out. What still uses it then uses something
//!   else.
//!
//! The bytes are those of the host, so that a table of the machine is a table of the engine.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::slice;

/// The word of a frame before it is written: valid in every format, and leading nowhere.
pub(crate) const POISON: u64 = 0x0000_dead_dead_d003;

/// The state of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not handed out.
    Free,
    /// Its owner's, and out of the reach of walkers.
    Private,
    /// Reachable from the root of a space.
    Live,
    /// Detached, but walkers may know the way.
    Detached,
    /// Not a table.
    Data,
}

/// The record of each frame.
pub(crate) struct Meta {
    pub state: Cell<State>,
    /// Levels below this table.
    pub depth: Cell<u8>,
    /// The space it is reachable in.
    pub space: Cell<u16>,
    /// The CPU that wrote it last while it was private, and at which of its publications.
    pub writer: Cell<u16>,
    pub epoch: Cell<u32>,
    /// How often it was handed out.
    pub generation: Cell<u32>,
    /// The first address that it translates.
    pub first: Cell<u64>,
    /// The number of the obligation under which it was detached.
    pub cut: Cell<u64>,
    /// The entry that links it, or [`ROOT`]. Others are kept by what looks at links.
    pub parent: Cell<u64>,
}

/// Of a table that a register leads to, in the place of an entry.
pub(crate) const ROOT: u64 = u64::MAX;

/// The physical memory of a machine.
///
/// It can be taken out of one machine and put into the next, which saves the host the work of
/// providing it again.
///
/// ```
/// use tablewright_machine::Memory;
/// // Room for 16 tables of 4 KiB, from physical address 1 GiB on.
/// let memory = Memory::new(16, 12, 1 << 30);
/// assert_eq!(memory.frames(), 16);
/// ```
pub struct Memory {
    base: NonNull<u8>,
    layout: Layout,
    shift: u32,
    first: u64,
    meta: Box<[Meta]>,
    /// Frames from here on were never handed out.
    next: Cell<usize>,
    free: RefCell<Vec<u32>>,
    used: Cell<usize>,
    most: Cell<usize>,
}

impl Memory {
    /// Memory of so many frames of `1 << page_shift` bytes, from a physical address on. The host
    /// provides it when it is touched.
    ///
    /// # Panics
    /// If the page is not of 4, 16 or 64 KiB, the address is not a multiple of it, or the host has
    /// no such memory.
    pub fn new(frames: usize, page_shift: u32, first: u64) -> Self {
        assert!([12, 14, 16].contains(&page_shift), "pages of 4, 16 or 64 KiB");
        assert!(first.is_multiple_of(1 << page_shift), "memory starts with a page");
        let frames = frames.max(1);
        // 2 MiB: the host can use its own large pages.
        let layout = Layout::from_size_align(frames << page_shift, 2 << 20)
            .expect("no host has so much memory");
        // SAFETY: the layout is not of size zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        let meta = |_| Meta {
            state: Cell::new(State::Free),
            depth: Cell::new(0),
            space: Cell::new(0),
            writer: Cell::new(0),
            epoch: Cell::new(0),
            generation: Cell::new(0),
            first: Cell::new(0),
            cut: Cell::new(0),
            parent: Cell::new(ROOT),
        };
        Self {
            base,
            layout,
            shift: page_shift,
            first,
            meta: (0..frames).map(meta).collect(),
            next: Cell::new(0),
            free: RefCell::default(),
            used: Cell::new(0),
            most: Cell::new(0),
        }
    }

    /// How many frames there are.
    pub fn frames(&self) -> usize {
        self.meta.len()
    }

    /// Bits of an offset in a frame.
    pub fn page_shift(&self) -> u32 {
        self.shift
    }

    /// The physical address of the first frame.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The physical address behind the last.
    pub fn end(&self) -> u64 {
        self.first + ((self.meta.len() as u64) << self.shift)
    }

    /// How many frames are handed out.
    pub fn used(&self) -> usize {
        self.used.get()
    }

    /// The most that were at a time.
    pub fn most_used(&self) -> usize {
        self.most.get()
    }

    /// Makes every frame free again, whatever its state.
    pub fn clear(&mut self) {
        for meta in &self.meta[..self.next.get()] {
            meta.state.set(State::Free);
        }
        self.next.set(0);
        self.free.get_mut().clear();
        self.used.set(0);
        self.most.set(0);
    }

    /// Has the host provide all of it now.
    pub fn touch(&mut self) {
        // SAFETY: the allocation, to which there is no reference: `self` is borrowed exclusively.
        unsafe { self.base.as_ptr().write_bytes(0, self.layout.size()) };
    }

    /// Takes a frame.
    pub(crate) fn take(&self, state: State, depth: u8) -> Option<usize> {
        let frame = match self.free.borrow_mut().pop() {
            Some(frame) => frame as usize,
            None => {
                let frame = self.next.get();
                if frame == self.meta.len() {
                    return None;
                }
                self.next.set(frame + 1);
                frame
            }
        };
        let meta = &self.meta[frame];
        meta.state.set(state);
        meta.depth.set(depth);
        meta.generation.update(|generation| generation.wrapping_add(1));
        let fill = if state == State::Data { 0 } else { POISON };
        // SAFETY: the entries of a frame, which was free; there is one thread, and the reference
        // ends here.
        unsafe { slice::from_raw_parts_mut(self.entry(frame, 0), self.entries()) }.fill(fill);
        self.used.update(|used| used + 1);
        self.most.set(self.most.get().max(self.used.get()));
        Some(frame)
    }

    /// Takes so many frames beside each other, aligned to the size of all; a power of two.
    pub(crate) fn take_run(&self, count: usize, state: State, depth: u8) -> Option<usize> {
        let align = (count as u64) << self.shift;
        // The first that is aligned, as an index: memory need not begin with it.
        let skew = (self.first.next_multiple_of(align) - self.first) >> self.shift;
        let first = (skew as usize..self.meta.len()).step_by(count).find(|&first| {
            let run = self.meta.get(first..first + count);
            run.is_some_and(|run| run.iter().all(|meta| meta.state.get() == State::Free))
        })?;
        let run = first..first + count;
        let mut free = self.free.borrow_mut();
        free.retain(|&frame| !run.contains(&(frame as usize)));
        // What was never handed out and lies before it is free like any other.
        free.extend((self.next.get()..first).rev().map(|frame| frame as u32));
        self.next.set(self.next.get().max(run.end));
        // The next to be handed out are these, in order.
        free.extend(run.rev().map(|frame| frame as u32));
        drop(free);
        (0..count).for_each(|_| {
            self.take(state, depth);
        });
        Some(first)
    }

    /// Gives a frame back. It must not be free.
    pub(crate) fn give(&self, frame: usize) {
        self.meta[frame].state.set(State::Free);
        self.free.borrow_mut().push(frame as u32);
        self.used.update(|used| used - 1);
    }

    pub(crate) fn meta(&self, frame: usize) -> &Meta {
        &self.meta[frame]
    }

    /// Entries of a full table.
    pub(crate) fn entries(&self) -> usize {
        1 << (self.shift - 3)
    }

    /// The frame that holds a physical address.
    #[inline(always)]
    pub(crate) fn frame_at(&self, pa: u64) -> Option<usize> {
        let frame = (pa.wrapping_sub(self.first) >> self.shift) as usize;
        (frame < self.meta.len()).then_some(frame)
    }

    pub(crate) fn address(&self, frame: usize) -> u64 {
        self.first + ((frame as u64) << self.shift)
    }

    /// The physical address of an entry, and what is kept for its frame, given where the host has
    /// the entry. `None` for an entry that is not in this memory.
    #[inline(always)]
    pub(crate) fn find(&self, entry: *const u64) -> Option<(u64, &Meta)> {
        let offset = entry.addr().wrapping_sub(self.base.as_ptr().addr());
        // What lies outside has a frame that there is not.
        let meta = self.meta.get(offset >> self.shift)?;
        Some((self.first.wrapping_add(offset as u64), meta))
    }

    /// Returns the host's address of an entry of a frame.
    ///
    /// # Safety
    /// 1. `frame` is a frame and `index` an entry of it.
    #[inline(always)]
    pub(crate) unsafe fn entry(&self, frame: usize, index: usize) -> *mut u64 {
        // SAFETY: inside of the allocation by (1.).
        unsafe { self.base.as_ptr().add((frame << self.shift) + index * 8) }.cast()
    }

    /// Returns the host's address of the 8 bytes at a physical address, if it is memory.
    #[inline(always)]
    pub(crate) fn at(&self, pa: u64) -> Option<*mut u64> {
        let offset = pa.wrapping_sub(self.first) as usize & !7;
        // SAFETY: inside of the allocation.
        (offset < self.layout.size()).then(|| unsafe { self.base.as_ptr().add(offset) }.cast())
    }

    /// The 8 bytes at a physical address; poison where there is no memory.
    #[inline(always)]
    pub(crate) fn read(&self, pa: u64) -> u64 {
        // SAFETY: `at` gives a valid and aligned pointer; there is one thread and no reference.
        self.at(pa).map_or(POISON, |at| unsafe { at.read() })
    }

    /// Copies a frame, if both are memory.
    pub(crate) fn copy(&self, from: u64, to: u64) {
        if self.frame_at(from).is_some() && self.frame_at(to).is_some() {
            let words = (0..self.entries() as u64).map(|index| index * 8);
            words.for_each(|offset| self.write(to + offset, self.read(from + offset)));
        }
    }

    /// Writes the 8 bytes at a physical address, if it is memory.
    #[inline(always)]
    pub(crate) fn write(&self, pa: u64, value: u64) {
        if let Some(at) = self.at(pa) {
            // SAFETY: as in `read`.
            unsafe { at.write(value) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and not used any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

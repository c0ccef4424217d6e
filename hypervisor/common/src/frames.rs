//! Frames of a hypervisor's memory, for tables and for anything else, with a link for each.

use core::ptr;

use spin::RelaxStrategy;
use spin::mutex::SpinMutex;
use tablewright::{Pa, Span, TableLink};

/// Frames of one size.
pub struct Frames<R> {
    frames: Span<Pa>,
    size: u64,
    links: &'static [TableLink],
    free: SpinMutex<Free, R>,
}

/// Free frames: those that were never used, and a chain of those that were, through their first
/// words.
struct Free {
    fresh: u64,
    chain: u64,
}

impl<R: RelaxStrategy> Frames<R> {
    /// Divides memory into frames of `size` bytes, behind a link for each.
    ///
    /// # Safety
    /// 1. The memory has no other user, and is mapped one to one.
    pub unsafe fn new(memory: Span<Pa>, size: u64) -> Option<Self> {
        let count = memory.size() / (size + size_of::<TableLink>() as u64);
        // A root of two tables is aligned to both.
        let links = (count * size_of::<TableLink>() as u64).next_multiple_of(2 * size);
        let first = memory.start().checked_add(links)?;
        let base = ptr::with_exposed_provenance_mut::<TableLink>(memory.start().get() as usize);
        for index in 0..count as usize {
            // SAFETY: inside of the memory, which has no other user (1.).
            unsafe { base.add(index).write(TableLink::new()) };
        }
        Some(Self {
            frames: Span::inclusive(first, memory.last()).ok()?,
            size,
            // SAFETY: just written, and without another user (1.).
            links: unsafe { core::slice::from_raw_parts(base, count as usize) },
            free: SpinMutex::new(Free { fresh: first.get(), chain: 0 }),
        })
    }

    /// All of them.
    pub fn all(&self) -> Span<Pa> {
        self.frames
    }

    /// Takes one frame.
    pub fn take(&self) -> Option<Pa> {
        let mut free = self.free.lock();
        if free.chain == 0 {
            drop(free);
            return self.take_row(self.size, self.size);
        }
        let frame = free.chain;
        // SAFETY: a frame of the chain, whose first word is the next one's address.
        free.chain = unsafe { ptr::with_exposed_provenance::<u64>(frame as usize).read() };
        Some(Pa::new(frame))
    }

    /// Takes `size` bytes of frames that were never used, from a multiple of `align` on.
    pub fn take_row(&self, size: u64, align: u64) -> Option<Pa> {
        let mut free = self.free.lock();
        let first = free.fresh.next_multiple_of(align);
        let end = first.checked_add(size)?;
        if end - 1 > self.frames.last().get() {
            return None;
        }
        free.fresh = end;
        Some(Pa::new(first))
    }

    /// Takes a frame back.
    ///
    /// # Safety
    /// 1. The frame was taken, and is not in use any more.
    pub unsafe fn give(&self, frame: Pa) {
        let mut free = self.free.lock();
        // SAFETY: a frame of this memory, which nothing uses (1.).
        unsafe { ptr::with_exposed_provenance_mut::<u64>(frame.get() as usize).write(free.chain) };
        free.chain = frame.get();
    }

    /// The link of a frame.
    pub fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let offset = frame.get().checked_sub(self.frames.start().get())?;
        self.links.get((offset / self.size) as usize)
    }
}

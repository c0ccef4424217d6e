//! The engine's platform on the lab's arena: table frames come from the arena, and nothing else
//! happens.
//!
//! No walker ever uses these tables, so there is nothing to publish and nothing to invalidate. Only
//! the time that the engine itself needs is left.

use std::ptr::{self, NonNull};
use std::rc::Rc;

use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform, TableLink};

use crate::memory::arena::Arena;

/// A platform over one arena. Clones share it.
#[derive(Clone)]
pub struct Lean {
    arena: Arena,
    /// One for each frame of the arena, or none at all.
    links: Rc<[TableLink]>,
    caps: Caps,
}

impl Lean {
    /// Processor whose walkers write no entries.
    pub const READING: Caps =
        Caps { hardware_access: false, hardware_dirty: false, ..Self::WRITING };

    /// Processor whose walkers set accessed and dirty bits.
    pub const WRITING: Caps = Caps { largest_leaf: Level::ANY, ..Caps::CONSERVATIVE };

    /// A platform without side memory: for spaces from which nothing is unmapped.
    pub fn new(arena: Arena, caps: Caps) -> Self {
        Self { arena, links: Rc::new([]), caps }
    }

    /// Keeps these links, one for each frame of the arena.
    pub fn with_links(mut self, links: Rc<[TableLink]>) -> Self {
        self.links = links;
        self
    }
}

// SAFETY: 1. the arena hands out each frame once until it is given back, aligned to its size, which
// is that of the arena's format. 2. A frame's address is where it is in this process, and stays
// mapped for as long as the program runs. 3. A frame's link is found by its number, so it is always
// the same and no other frame's. 4. to 6. No processor walks these tables, so every store is
// visible and every invalidation complete at once. 7. Clones have the same arena and the same
// links.
unsafe impl Platform for Lean {
    #[inline]
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let frame = self.arena.take()?;
        Some(Pa::new(frame.addr().get() as u64))
    }

    #[inline]
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.arena.give_back(frame.get() as usize);
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: the caller promises a frame of this arena, and none is at address zero. Its
        // provenance was exposed when it was taken.
        unsafe { NonNull::new_unchecked(table) }
    }

    #[inline(always)]
    fn barrier(&self, _: Barrier) {}

    #[inline(always)]
    fn invalidate(&self, _: &Invalidation<'_>) {}

    #[inline(always)]
    fn caps(&self) -> Caps {
        self.caps
    }

    #[inline(always)]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.links.get(self.arena.number(frame.get() as usize)?)
    }
}

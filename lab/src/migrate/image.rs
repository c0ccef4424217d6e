//! Contents of the guest's memory: a version for each page, and which pages are known to be
//! writable.

use std::cell::Cell;

/// The guest's memory, and the copy at the destination.
pub struct Image {
    pub source: Box<[Cell<u32>]>,
    /// For each page that was found writable, the chunk's epoch at that time.
    pub opened: Box<[Cell<u32>]>,
    /// Even: the permission to write is not being taken in the chunk.
    pub epochs: Box<[Cell<u32>]>,
    pub chunk: u64,
    pub writes: Cell<u64>,
}

/// The page is being protected by itself.
pub const CLOSING: u32 = u32::MAX;

impl Image {
    pub fn new(pages: u64, chunk: u64) -> Self {
        let zeros = |count: u64| (0..count).map(|_| Cell::new(0)).collect();
        Self {
            source: zeros(pages),
            opened: zeros(pages),
            epochs: (0..pages.div_ceil(chunk)).map(|_| Cell::new(2)).collect(),
            chunk,
            writes: Cell::new(0),
        }
    }

    pub fn epoch(&self, page: u64) -> &Cell<u32> {
        &self.epochs[(page / self.chunk) as usize]
    }

    /// Whether it was found writable, and the permission is not being taken away since.
    #[inline]
    pub fn is_open(&self, page: u64) -> bool {
        let epoch = self.epoch(page).get();
        epoch & 1 == 0 && self.opened[page as usize].get() == epoch
    }

    #[inline]
    pub fn write(&self, page: u64) {
        let version = &self.source[page as usize];
        version.set(version.get() + 1);
        self.writes.set(self.writes.get() + 1);
    }

    /// A write was let through.
    pub fn found_writable(&self, page: u64) {
        let (epoch, opened) = (self.epoch(page).get(), &self.opened[page as usize]);
        if epoch & 1 == 0 && opened.get() != CLOSING {
            opened.set(epoch);
        }
    }

    /// The permission will be taken from pages of this chunk, or every CPU has forgotten it.
    pub fn turn(&self, chunk: u64) {
        let epoch = &self.epochs[chunk as usize];
        epoch.set(epoch.get() + 1);
    }

    pub fn turn_all(&self) {
        (0..self.epochs.len() as u64).for_each(|chunk| self.turn(chunk));
    }
}

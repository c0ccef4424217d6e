//! Tables for a fault, taken before it begins.
//!
//! A fault must not allocate in the middle: it may be under a lock of the embedder, and running out would leave it
//! half done. Each processor has a cache of its own and tops it up where it may wait. The tables in it are empty
//! already, so that a fault that needs one only links it.

use crate::addr::{Level, Pa};
use crate::edit::Frames;
use crate::entry::Table;
use crate::format::Format;
use crate::platform::Platform;

/// The most tables that a cache holds: enough for two faults that find nothing.
const MOST: usize = 8;

/// Empty tables, ready to be linked. What is left in it when it is dropped leaks; [`release`](TableCache::release) gives
/// it back.
///
/// ```
/// use tablewright::{format::Arm64K4, hosted::Hosted, shared::TableCache};
/// let platform = Hosted::new(8, 12);
/// let mut tables = TableCache::new();
/// assert!(tables.top_up::<Arm64K4, _>(&platform, 3));
/// assert_eq!(tables.len(), 3);
/// tables.release(&platform);
/// assert_eq!(platform.counts().tables, 0);
/// ```
#[derive(Debug)]
#[must_use = "the tables in a cache leak when it is dropped"]
pub struct TableCache {
    frames: [Pa; MOST],
    len: usize,
}

impl TableCache {
    /// An empty one.
    pub const fn new() -> Self {
        Self {
            frames: [Pa::new(0); MOST],
            len: 0,
        }
    }

    /// How many tables it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes tables from the platform until there are `count`, or as many as fit. Whether there are so many now.
    pub fn top_up<F: Format, P: Platform>(&mut self, platform: &P, count: u8) -> bool {
        let wanted = usize::from(count).min(MOST);
        while self.len < wanted {
            let Some(frame) = platform.alloc_table(Level::PAGE) else {
                return false;
            };
            // SAFETY: just allocated.
            let table = unsafe { Table::open(platform, frame, Level::PAGE) };
            table.fill(0..1 << F::INDEX_BITS, 0, 0);
            drop(table);
            self.frames[self.len] = frame;
            self.len += 1;
        }
        true
    }

    pub(super) fn pop(&mut self) -> Option<Pa> {
        self.len = self.len.checked_sub(1)?;
        Some(self.frames[self.len])
    }

    /// Puts one back that was taken out and not linked; it is empty again.
    pub(super) fn push(&mut self, frame: Pa) {
        debug_assert!(self.len < MOST);
        if let Some(place) = self.frames.get_mut(self.len) {
            *place = frame;
            self.len += 1;
        }
    }

    /// Gives all of them back.
    pub fn release<P: Platform>(mut self, platform: &P) {
        while let Some(frame) = self.pop() {
            // SAFETY: the frame came from the platform, once (1.), and was never linked (2.).
            unsafe { platform.free_table(frame, Level::PAGE) };
        }
    }
}

impl Default for TableCache {
    fn default() -> Self {
        Self::new()
    }
}

impl Frames for TableCache {
    fn take(&mut self, _: Level) -> Option<Pa> {
        self.pop()
    }
}

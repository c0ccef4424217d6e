//! The least that this computer takes: the same bytes of table memory, and nothing but the
//! accesses.
//!
//! All accesses are relaxed atomics of eight bytes, which compile to plain moves, and which the
//! compiler may neither merge nor leave out.

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::memory::arena::Arena;

/// Tables that hold running values instead of a mapping.
pub struct Tables {
    arena: Arena,
    frames: Vec<NonNull<u8>>,
    /// Entries in use, from the first of the first table on.
    entries: u64,
}

impl Tables {
    /// No tables yet, and room to remember `tables` of them.
    pub fn new(arena: Arena, tables: u64, entries: u64) -> Self {
        Self { arena, frames: Vec::with_capacity(usize::try_from(tables).unwrap_or(0)), entries }
    }

    /// Zeroes `tables` tables and fills the entries with a running value. `None` if the arena is
    /// too small.
    pub fn zero_and_fill(&mut self, tables: u64) -> Option<()> {
        const STRIDE: u64 = 1 << 12;
        let mut left = self.entries;
        let mut value = 3;
        for _ in 0..tables {
            // The compiler must not know that the same bytes are written again.
            let frame = black_box(self.arena.take_zeroed()?);
            self.frames.push(frame);
            // SAFETY: the frame was just taken from this arena, and is known to us alone.
            let entries = unsafe { self.arena.entries(frame) };
            let count = left.min(entries.len() as u64);
            for entry in &entries[..count as usize] {
                entry.store(value, Relaxed);
                value += STRIDE;
            }
            left -= count;
        }
        Some(())
    }

    /// Loads every entry and stores it with one bit changed: the least a change of permissions can
    /// do.
    pub fn load_and_store(&mut self) {
        self.each(|entry| entry.store(entry.load(Relaxed) ^ (1 << 7), Relaxed));
    }

    /// Loads every entry and stores zero: the least an unmap that visits every leaf can do.
    pub fn visit_and_clear(&mut self) {
        self.each(|entry| {
            black_box(entry.load(Relaxed));
            entry.store(0, Relaxed);
        });
    }

    /// Exchanges every entry with zero: the least an unmap can do while hardware may still set
    /// bits.
    pub fn exchange(&mut self) {
        self.each(|entry| {
            black_box(entry.swap(0, Relaxed));
        });
    }

    /// Gives all tables back.
    pub fn give_back(&mut self) {
        for frame in self.frames.drain(..) {
            self.arena.give_back(frame.addr().get());
        }
    }

    fn each(&mut self, visit: impl Fn(&AtomicU64)) {
        let mut left = self.entries;
        for &frame in &self.frames {
            // SAFETY: the frame is held by us, and no slice of it outlives the call that made it.
            let entries = unsafe { self.arena.entries(frame) };
            let count = left.min(entries.len() as u64);
            entries[..count as usize].iter().for_each(&visit);
            left -= count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::Memory;

    #[test]
    fn every_entry_is_reached_and_no_more() {
        let arena = Arena::new(3, 12, Memory::Warm).unwrap();
        let mut tables = Tables::new(arena, 3, 600);
        let entry = |tables: &Tables, number: u64| {
            let table = tables.frames[(number / 512) as usize];
            arena.entry(table.addr().get() as u64, number % 512)
        };
        tables.zero_and_fill(3).unwrap();
        assert_eq!(entry(&tables, 0), Some(3));
        assert_eq!(entry(&tables, 599), Some(3 + 599 * 4096));
        assert_eq!(entry(&tables, 600), Some(0));
        tables.load_and_store();
        assert_eq!(entry(&tables, 599), Some((3 + 599 * 4096) ^ (1 << 7)));
        assert_eq!(entry(&tables, 600), Some(0));
        tables.visit_and_clear();
        assert_eq!(entry(&tables, 599), Some(0));
        tables.give_back();
        assert_eq!(arena.held(), 0);
        assert!(tables.zero_and_fill(4).is_none());
    }
}

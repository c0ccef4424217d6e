//! The bare loop: a bare walk to the last table, and the accesses. It looks at nothing on its way,
//! and knows that all tables are there.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::subject::Work;
use super::calls::{Calls, MOST, TABLES, answer, physical};
use super::subject::{Operation, Subject};
use crate::arena::Arena;

/// Where the bits of entries are.
#[derive(Clone, Copy)]
struct Bits {
    table: u64,
    /// Of a page that can be written.
    page: u64,
    /// Cleared and set by write protection.
    protect: (u64, u64),
    /// Set, or clear, in what can be written.
    writable: (u64, bool),
}

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

const X86_64: Bits = Bits {
    table: 0b11,
    page: 1 << 63 | 0b11,
    protect: (1 << 1, 0),
    writable: (1 << 1, true),
};

/// A page: inner shareable, memory of the second type, accessed, not executable.
const ARM64: Bits = Bits {
    table: 0b11,
    page: 0b11 << 53 | 1 << 10 | 0b11 << 8 | 1 << 2 | 0b11,
    protect: (0, 1 << 7),
    writable: (1 << 7, false),
};

/// Tables of one format, and no code around them.
pub struct Bare {
    bits: Bits,
    /// Hardware may set flags: an entry that is changed takes an atomic operation.
    hardware_flags: bool,
    tables: Option<Tables>,
}

#[derive(Clone)]
struct Tables {
    arena: Arena,
    /// The root first, then its table, and so on; then the tables of pages.
    frames: Vec<u64>,
}

impl Bare {
    /// Arm, stage 1, 4 KiB granule.
    pub const fn arm64(hardware_flags: bool) -> Self {
        Self {
            bits: ARM64,
            hardware_flags,
            tables: None,
        }
    }

    /// x86, four levels.
    pub const fn x86_64(hardware_flags: bool) -> Self {
        Self {
            bits: X86_64,
            hardware_flags,
            tables: None,
        }
    }
}

/// The entries of the table at an address.
#[inline(always)]
fn entries(table: u64) -> &'static [AtomicU64; 512] {
    let table = ptr::with_exposed_provenance::<[AtomicU64; 512]>(table as usize);
    // SAFETY: only tables that were taken from the arena, whose provenance is exposed and which
    // stay mapped, are asked for; this module reaches them as atomics alone.
    unsafe { &*table }
}

/// The entry of the table of `level`, counted from the pages, that translates an address.
#[inline(always)]
fn entry(table: u64, at: u64, level: u32) -> &'static AtomicU64 {
    &entries(table)[(at >> (12 + 9 * level)) as usize & 511]
}

/// The entries of the range at an address.
#[inline(always)]
fn walk(root: u64, at: u64, pages: u64) -> &'static [AtomicU64] {
    let mut table = root;
    for level in [3, 2, 1] {
        table = entry(table, at, level).load(Relaxed) & ADDRESS;
    }
    let first = (at >> 12) as usize & 511;
    // Calls lie in one table.
    &entries(table)[first..(first + pages as usize).min(512)]
}

/// Calls `each` with every entry and its address.
#[inline(always)]
fn for_each(root: u64, calls: &Calls, mut each: impl FnMut(&AtomicU64, u64)) {
    for &start in &calls.starts {
        let mut at = start;
        for entry in walk(root, start, calls.pages) {
            each(entry, at);
            at += Work::PAGE;
        }
    }
}

impl Subject for Bare {
    fn begin(&mut self, arena: Arena) -> Result<(), String> {
        let take = || {
            let frame = arena.take_zeroed().ok_or("out of tables")?;
            Ok::<u64, String>(frame.addr().get() as u64)
        };
        let mut frames = vec![take()?, take()?, take()?];
        for level in [3, 2] {
            let (above, below) = (frames[3 - level], frames[4 - level]);
            entry(above, Work::VIRTUAL, level as u32).store(below | self.bits.table, Relaxed);
        }
        for table in 0..TABLES {
            let at = Work::VIRTUAL + table * MOST * Work::PAGE;
            let pages = take()?;
            entry(frames[2], at, 1).store(pages | self.bits.table, Relaxed);
            frames.push(pages);
        }
        self.tables = Some(Tables { arena, frames });
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let root = self.root().ok_or("not begun")?;
        let Bits {
            page,
            protect: (clear, set),
            writable: (bit, is),
            ..
        } = self.bits;
        let mut sum = 0_u64;
        match (operation, self.hardware_flags) {
            (Operation::Map, _) => for_each(root, calls, |entry, at| {
                entry.store(physical(at) | page, Relaxed);
            }),
            (Operation::Query, _) => for_each(root, calls, |entry, _| {
                let entry = entry.load(Relaxed);
                sum = sum.wrapping_add(answer(entry & ADDRESS, (entry & bit != 0) == is));
            }),
            (Operation::Protect, false) => for_each(root, calls, |entry, _| {
                entry.store(entry.load(Relaxed) & !clear | set, Relaxed);
            }),
            // What is set or cleared is one bit, so one atomic operation is enough.
            (Operation::Protect, true) if set == 0 => for_each(root, calls, |entry, _| {
                entry.fetch_and(!clear, Relaxed);
            }),
            (Operation::Protect, true) => for_each(root, calls, |entry, _| {
                entry.fetch_or(set, Relaxed);
            }),
            (Operation::Unmap, false) => for_each(root, calls, |entry, _| {
                sum = sum.wrapping_add(entry.load(Relaxed));
                entry.store(0, Relaxed);
            }),
            (Operation::Unmap, true) => for_each(root, calls, |entry, _| {
                sum = sum.wrapping_add(entry.swap(0, Relaxed));
            }),
            (Operation::Fault, _) => {
                let mut lost = false;
                for_each(root, calls, |entry, at| {
                    let leaf = physical(at) | page;
                    lost |= entry.compare_exchange(0, leaf, Relaxed, Relaxed).is_err();
                });
                if lost {
                    return Err("an entry was in use".to_owned());
                }
            }
            // As many as the calls have pages, one beside the other, without what stays mapped.
            (Operation::Exchange, _) => {
                let in_table = calls.pages.max(MOST - 1) as usize;
                let mut left = calls.count() * calls.pages as usize;
                for table in self.tables.iter().flat_map(|tables| &tables.frames[3..]) {
                    for entry in &entries(*table)[..in_table.min(left)] {
                        sum = sum.wrapping_add(entry.swap(0, Relaxed));
                    }
                    left -= in_table.min(left);
                }
            }
        }
        Ok(sum)
    }

    fn root(&self) -> Option<u64> {
        Some(self.tables.as_ref()?.frames[0])
    }

    fn finish(&mut self) {
        if let Some(tables) = self.tables.take() {
            for frame in tables.frames {
                tables.arena.give_back(frame as usize);
            }
        }
    }
}

//! The bare loops: the accesses to entries, and nothing else. They show the limit of the computer.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::memory::bare::Tables;

use crate::compare::calls::{self, Calls, MOST, PAGE, TABLES, VIRTUAL, answer, physical};
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;

/// Plain accesses to as many bytes of tables as one range takes. It maps nothing.
#[derive(Default)]
pub struct BareRange(Option<Tables>);

impl Subject for BareRange {
    fn begin(&mut self, arena: Arena, _: Users, calls: &Calls) -> Result<(), String> {
        let count = calls::tables(calls.bytes());
        self.0 = Some(Tables::new(arena, count, calls.entries()));
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let tables = self.0.as_mut().ok_or("not begun")?;
        match operation {
            Operation::Map => {
                tables.zero_and_fill(calls::tables(calls.bytes())).ok_or("out of tables")?
            }
            Operation::Protect => tables.load_and_store(),
            Operation::Unmap => tables.visit_and_clear(),
            Operation::Exchange => tables.exchange(),
            _ => return Err(none()),
        }
        Ok(0)
    }

    fn root(&self) -> Option<u64> {
        None
    }

    fn finish(&mut self) {
        if let Some(mut tables) = self.0.take() {
            tables.give_back();
        }
    }
}

/// The bits of entries of one format.
#[derive(Clone, Copy)]
struct Bits {
    /// Of a table.
    table: u64,
    /// Of a page that can be written.
    page: u64,
    /// Cleared and set by write protection.
    protect: (u64, u64),
    /// Set, or clear, in what can be written.
    writable: (u64, bool),
}

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

const X86_64: Bits =
    Bits { table: 0b11, page: 1 << 63 | 0b11, protect: (1 << 1, 0), writable: (1 << 1, true) };

/// A page: inner shareable, memory of the second type, accessed, not executable.
const ARM64: Bits = Bits {
    table: 0b11,
    page: 0b11 << 53 | 1 << 10 | 0b11 << 8 | 1 << 2 | 0b11,
    protect: (0, 1 << 7),
    writable: (1 << 7, false),
};

/// A page: read and written, accessed, dirty.
const RISCV64: Bits =
    Bits { table: 0b1, page: 0b1100_0111, protect: (1 << 2, 0), writable: (1 << 2, true) };

/// A walk to the last table that checks nothing on its way, and the accesses. All tables exist.
/// Addresses stand `DOWN` bits lower in an entry.
pub struct Bare<const DOWN: u32> {
    bits: Bits,
    /// An entry that is changed takes an atomic operation.
    hardware_flags: bool,
    /// The root first, then its table, and so on; then the tables of pages.
    frames: Vec<u64>,
    arena: Option<Arena>,
}

impl Bare<0> {
    /// Arm, stage 1, 4 KiB granule.
    pub const fn arm64() -> Self {
        Self::new(ARM64)
    }

    /// x86, four levels.
    pub const fn x86_64() -> Self {
        Self::new(X86_64)
    }
}

impl Bare<2> {
    /// RISC-V, four levels.
    pub const fn riscv64() -> Self {
        Self::new(RISCV64)
    }
}

impl<const DOWN: u32> Bare<DOWN> {
    const fn new(bits: Bits) -> Self {
        Self { bits, hardware_flags: false, frames: Vec::new(), arena: None }
    }

    /// The address in an entry.
    #[inline(always)]
    const fn address(entry: u64) -> u64 {
        entry << DOWN & ADDRESS
    }

    /// The entries of the range at an address.
    #[inline(always)]
    fn walk(root: u64, at: u64, pages: u64) -> &'static [AtomicU64] {
        let mut table = root;
        for level in [3, 2, 1] {
            table = Self::address(entry(table, at, level).load(Relaxed));
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
            for entry in Self::walk(root, start, calls.pages) {
                each(entry, at);
                at += PAGE;
            }
        }
    }
}

/// The entries of the table at an address.
#[inline(always)]
fn entries(table: u64) -> &'static [AtomicU64; 512] {
    let table = ptr::with_exposed_provenance::<[AtomicU64; 512]>(table as usize);
    // SAFETY: callers pass only tables that were taken from the arena, whose provenance is exposed
    // and which stay mapped; this module reaches them as atomics alone.
    unsafe { &*table }
}

/// The entry of the table of `level`, counted from the pages, that translates an address.
#[inline(always)]
fn entry(table: u64, at: u64, level: u32) -> &'static AtomicU64 {
    &entries(table)[(at >> (12 + 9 * level)) as usize & 511]
}

impl<const DOWN: u32> Subject for Bare<DOWN> {
    fn begin(&mut self, arena: Arena, users: Users, _: &Calls) -> Result<(), String> {
        self.hardware_flags = users == Users::WritingWalkers;
        let take = || {
            let frame = arena.take_zeroed().ok_or("out of tables")?;
            Ok::<u64, String>(frame.addr().get() as u64)
        };
        let mut frames = vec![take()?, take()?, take()?];
        for level in [3, 2] {
            let (above, below) = (frames[3 - level], frames[4 - level]);
            entry(above, VIRTUAL, level as u32).store(below >> DOWN | self.bits.table, Relaxed);
        }
        for table in 0..TABLES {
            let pages = take()?;
            entry(frames[2], VIRTUAL + table * MOST * PAGE, 1)
                .store(pages >> DOWN | self.bits.table, Relaxed);
            frames.push(pages);
        }
        self.frames = frames;
        self.arena = Some(arena);
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let root = self.root().ok_or("not begun")?;
        let Bits { page, protect: (clear, set), writable: (bit, is), .. } = self.bits;
        let mut sum = 0_u64;
        match (operation, self.hardware_flags) {
            (Operation::Map, _) => Self::for_each(root, calls, |entry, at| {
                entry.store(physical(at) >> DOWN | page, Relaxed);
            }),
            (Operation::Query, _) => Self::for_each(root, calls, |entry, _| {
                let entry = entry.load(Relaxed);
                sum = sum.wrapping_add(answer(Self::address(entry), (entry & bit != 0) == is));
            }),
            (Operation::Protect, false) => Self::for_each(root, calls, |entry, _| {
                entry.store(entry.load(Relaxed) & !clear | set, Relaxed);
            }),
            // One bit is set or cleared, so one atomic operation is enough.
            (Operation::Protect, true) if set == 0 => Self::for_each(root, calls, |entry, _| {
                entry.fetch_and(!clear, Relaxed);
            }),
            (Operation::Protect, true) => Self::for_each(root, calls, |entry, _| {
                entry.fetch_or(set, Relaxed);
            }),
            (Operation::Unmap, false) => Self::for_each(root, calls, |entry, _| {
                sum = sum.wrapping_add(entry.load(Relaxed));
                entry.store(0, Relaxed);
            }),
            (Operation::Unmap, true) => Self::for_each(root, calls, |entry, _| {
                sum = sum.wrapping_add(entry.swap(0, Relaxed));
            }),
            (Operation::Fault, _) => {
                let mut lost = false;
                Self::for_each(root, calls, |entry, at| {
                    let leaf = physical(at) >> DOWN | page;
                    lost |= entry.compare_exchange(0, leaf, Relaxed, Relaxed).is_err();
                });
                if lost {
                    return Err("an entry was in use".to_owned());
                }
            }
            // As many as the calls have pages, side by side, but none of the kept pages.
            (Operation::Exchange, _) => {
                let in_table = calls.pages.max(MOST - 1) as usize;
                let mut left = calls.entries() as usize;
                for table in &self.frames[3..] {
                    for entry in &entries(*table)[..in_table.min(left)] {
                        sum = sum.wrapping_add(entry.swap(0, Relaxed));
                    }
                    left -= in_table.min(left);
                }
            }
            _ => return Err(none()),
        }
        Ok(sum)
    }

    fn root(&self) -> Option<u64> {
        self.frames.first().copied()
    }

    fn finish(&mut self) {
        for frame in self.frames.drain(..) {
            if let Some(arena) = self.arena {
                arena.give_back(frame as usize);
            }
        }
    }
}

//! The map of stage 1: devices and memory one to one, and pages for experiments.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

/// A table.
#[repr(C, align(4096))]
pub struct Table([AtomicU64; 512]);

const fn table(first: [u64; 2]) -> Table {
    let mut entries = [const { AtomicU64::new(0) }; 512];
    entries[0] = AtomicU64::new(first[0]);
    entries[1] = AtomicU64::new(first[1]);
    Table(entries)
}

/// Accessed, inner shareable, valid.
const LEAF: u64 = 1 << 10 | 3 << 8 | 1;
const DEVICE: u64 = 1 << 2;
/// Not cached.
pub const NOT_CACHED: u64 = 2 << 2;
/// Of a page: not written.
pub const READ_ONLY: u64 = 2 << 6;
/// Not executed.
pub const NO_EXECUTION: u64 = 3 << 53;
/// EL0 may use it.
pub const USER: u64 = 1 << 6;

/// The first table: two blocks of 1 GiB, and what is made when it is needed.
pub static ROOT: Table = table([LEAF | DEVICE | 1 << 54, 0x4000_0000 | LEAF]);
static MIDDLE: Table = table([0, 0]);
static PAGES: Table = table([0, 0]);

/// The first of the pages for experiments.
pub const EXPERIMENTS: u64 = 0x8000_0000;

fn address(table: &'static Table) -> u64 {
    (&raw const *table).expose_provenance() as u64
}

/// Links the tables for experiments.
pub fn prepare() {
    MIDDLE.0[0].store(address(&PAGES) | 3, Ordering::Relaxed);
    ROOT.0[2].store(address(&MIDDLE) | 3, Ordering::Relaxed);
    // SAFETY: a barrier.
    unsafe { asm!("dsb ishst", "isb", options(nostack)) };
}

/// Has the page of this number translate to this frame, or to nothing; and returns where it is.
pub fn map(page: usize, frame: Option<u64>, attributes: u64) -> u64 {
    let entry = &PAGES.0[page % 512];
    let at = EXPERIMENTS + 4096 * page as u64;
    entry.store(0, Ordering::Relaxed);
    // SAFETY: what is forgotten is a page for experiments.
    unsafe { asm!("dsb ishst", "tlbi vaae1is, {}", "dsb ish", in(reg) at >> 12, options(nostack)) };
    if let Some(frame) = frame {
        entry.store(frame | LEAF | 2 | attributes, Ordering::Relaxed);
    }
    // SAFETY: a barrier.
    unsafe { asm!("dsb ishst", "isb", options(nostack)) };
    at
}

/// Frames for experiments.
#[repr(C, align(4096))]
pub struct Frames(pub [[AtomicU64; 512]; 8]);

/// Some frames.
pub static FRAMES: Frames = Frames([const { [const { AtomicU64::new(0) }; 512] }; 8]);

/// The address of one of them.
pub fn frame(number: usize) -> u64 {
    (&raw const FRAMES.0[number % 8]).expose_provenance() as u64
}

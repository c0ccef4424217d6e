//! Measurements without a guest: the linear map.

use std::ptr;
#[cfg(not(target_arch = "aarch64"))]
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::error::Error;
use crate::format::{Architecture, Format, Granule};
use crate::map_mem::{input, native};
use crate::size::{Size, human};
use crate::stats::Samples;

/// Memory that is mapped: its tables take 16 MiB. With assertions, figures say nothing.
pub const MAPPED: u64 = if cfg!(debug_assertions) { 256 << 20 } else { 8 << 30 };

/// The engine's linear map in pages: nanoseconds for each page.
pub fn linear_map() -> Result<f64, Error> {
    let format = Format::new(Architecture::HOST, Granule::K4, 48)?;
    let (source, map) = input::read(None, Size::of(MAPPED), format)?;
    let built = native::build(&format!("{} of {source}", human(MAPPED)), &map, format)?;
    Ok(built.nanoseconds / built.entries.max(1) as f64)
}

/// Entries that are published one by one.
const PUBLISHED: usize = 1 << 16;

/// Nanoseconds to write an entry and have it published before the next one is written.
pub fn published_entry() -> f64 {
    let mut table = vec![0_u64; 512];
    let mut samples = Samples::default();
    for _ in 0..11 {
        let begin = Instant::now();
        for at in 0..PUBLISHED {
            let entry = &mut table[at % 512];
            // SAFETY: the entry is borrowed, and any number is a value of it.
            unsafe { ptr::from_mut(entry).write_volatile(at as u64) };
            barrier();
        }
        samples.push(begin.elapsed().as_nanos() as f64 / PUBLISHED as f64);
    }
    samples.median()
}

/// Makes stores visible to a table walker.
fn barrier() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier changes nothing.
    unsafe {
        std::arch::asm!("dsb ishst", "isb", options(nostack, preserves_flags));
    }
    // A walker of x86-64 sees stores in order: this is a store that waits for those before it, as
    // one of arm64 does.
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

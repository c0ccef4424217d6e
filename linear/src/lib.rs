//! The linear map as kernels have made it, with each technique that was published to make it
//! faster, beside the engine's own way.
//!
//! A kernel maps all its memory when it boots. Before that map exists no table can be reached, so
//! each is shown in a *slot* of the fixmap, a page of address space whose entry is reachable from
//! the start. To show a table costs a store and a barrier; to hide it, a store, a barrier, an
//! invalidation and the wait until it is complete. The techniques change how often that is done,
//! and how often what was written is published:
//!
//! | | a last-level table is shown | waits | barriers after its entries |
//! |---|---|---|---|
//! | none | once to zero it, once for each contiguous run | as often | one for each |
//! | [`NoContRemap`](Technique::NoContRemap) | once to zero it, once to fill it | as often | |
//! | [`NoAllocRemap`](Technique::NoAllocRemap) | once less: its first use shows it | as often | |
//! | [`LazyUnmap`](Technique::LazyUnmap) | | once for 16 slots | |
//! | [`BatchBarriers`](Technique::BatchBarriers) | | | one for all |
//!
//! The originals are the arm64 port of Linux 6.9 and the series that was published on top of it.
//! They map with pages only where the permissions of each page can change (`rodata=full`), and
//! their tables are live while they are filled. The techniques are independent here, because the
//! series was published in more than one order.
//!
//! [`build`] maps all memory through the fixmap, and [`add`] maps memory that is added later,
//! through the linear map itself. What was discussed beside the techniques is in [`alternatives`],
//! and what the engine does instead in [`engine`]. [`Counted`] tells what each of them asked of the
//! platform.
//!
//! The same code runs on the software machine, in the crate `tablewright-lab`, and on a processor,
//! in `hypervisor/`.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod alternatives;
mod baseline;
mod count;
pub mod engine;
mod fixmap;
mod reach;
mod technique;
#[cfg(test)]
mod tests;

pub use baseline::{add, build};
pub use count::{Counted, Counts};
pub use fixmap::{Fixmap, LAST_LEVEL};
pub use technique::{Technique, Techniques};

use alloc::vec::Vec;

use tablewright::linear::{LinearError, LinearMap, MemoryMap};
use tablewright::{Attrs, EditError, Format, Level, Mapping, Pa, Span, Va};

/// The memory to be mapped, its addresses, and its tables.
#[derive(Clone, Copy, Debug)]
pub struct Goal<'m> {
    /// The frame of the root. It may be in use already.
    pub root: Pa,
    /// The address of physical address 0 in the map.
    pub base: Va,
    /// The memory.
    pub memory: MemoryMap<'m>,
    /// The attributes of all memory that is not special, and of the windows through which tables
    /// are written.
    pub attrs: Attrs,
}

/// A stretch of memory with one set of attributes, checked: the format can translate and hold it.
#[derive(Clone, Copy, Debug)]
struct Region {
    /// The first virtual address.
    first: u64,
    /// The last one.
    last: u64,
    /// Physical less virtual address, modulo 2^64.
    delta: u64,
    /// A page's descriptor without its address.
    page: u64,
    attrs: Attrs,
}

impl Goal<'_> {
    /// Returns the linear map in the engine's words.
    fn linear(&self) -> LinearMap<Va> {
        LinearMap::new(self.base, Mapping::new(self.attrs).pages_only())
    }

    /// The stretches to be mapped, of each the `part` that is wanted, all of them checked before
    /// anything is written.
    fn regions<F: Format<Input = Va>>(
        &self,
        part: impl Fn(Span<Pa>) -> Option<Span<Pa>>,
    ) -> Result<Vec<Region>, LinearError<Va>> {
        let linear = self.linear();
        self.memory
            .regions(self.attrs)?
            .filter_map(|(span, attrs)| Some((part(span)?, attrs)))
            .map(|(memory, attrs)| {
                let span = linear.span(memory)?;
                let (first, last) = (span.start().get(), span.last().get());
                if !memory.is_aligned(F::PAGE_SHIFT) || !span.is_aligned(F::PAGE_SHIFT) {
                    return Err(EditError::Misaligned.into());
                }
                // One root translates one half.
                let half = |at: u64| at >> 63;
                if ![first, last].into_iter().all(F::is_canonical)
                    || [first, last].map(half) != [half(self.base.get()); 2]
                {
                    return Err(EditError::InputOutOfRange.into());
                }
                if memory.last().get() >> F::OUTPUT_BITS != 0 {
                    return Err(EditError::OutputOutOfRange.into());
                }
                Ok(Region {
                    first,
                    last,
                    delta: memory.start().get().wrapping_sub(first),
                    page: F::encode(&attrs, Level::PAGE).map_err(EditError::from)?,
                    attrs,
                })
            })
            .collect()
    }
}

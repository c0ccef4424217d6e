//! Contiguous runs: aligned leaves that a walker may hold as one.
//!
//! The contiguous bit of a descriptor promises that all members of its aligned run are valid leaves
//! of consecutive frames with equal attributes. Three things follow.
//!
//! **A run is one leaf to every reader.** Hardware that sets accessed and dirty may do so in any
//! one member, for all of them (DDI 0487 D8.5.5). What a single member says is therefore not the
//! truth about its page; the run is visited as one leaf of the size of the run, whose flags are
//! those of all members together.
//!
//! **A run is changed as a whole, or is no run any more.** An edit of a part unfolds it first: the
//! bit goes from every member, and the flags of all become the flags of each.
//!
//! **The bit is a change of size.** Below level 1 of FEAT_BBM the members are broken, all of them,
//! before one is remade with or without it.

use core::ops::Range;

use crate::addr::Level;
use crate::format::{Attrs, Format, Kind, meaning, with_flags};
use crate::walk::Slice;

/// The members of the run that the entry `index` of a table at `level` is one of, or would be.
#[inline]
pub(crate) fn members<F: Format>(index: usize, level: Level) -> Range<usize> {
    let run = 1usize << F::contiguous(level);
    let start = index & !(run - 1);
    start..start + run
}

/// The addresses that the run around `input` translates.
#[inline]
pub(crate) fn extent<F: Format>(input: u64, level: Level) -> Slice {
    let low = (1u64 << (F::shift(level) + F::contiguous(level))) - 1;
    Slice { first: input & !low, last: input | low }
}

/// One descriptor for a run: that of its first member, with the flags of all. `take` reads a
/// member, or takes it out.
#[inline(never)]
pub(crate) fn gather<F: Format>(
    members: Range<usize>,
    level: Level,
    take: &mut dyn FnMut(usize) -> u64,
) -> u64 {
    let mask = !F::address_mask(level);
    let mut merged = take(members.start);
    let mut pattern = merged & mask;
    for member in members.skip(1) {
        let entry = take(member);
        // Equal patterns have equal flags.
        if entry & mask != pattern && F::kind(entry, level) == Kind::Leaf {
            pattern = entry & mask;
            let Attrs { accessed, dirty, .. } = meaning::<F>(entry, level);
            merged = with_flags::<F>(merged, level, accessed, dirty);
        }
    }
    merged
}

//! The edits: what can be done to a range of an address space.
//!
//! Each has the same shape. *Prepare* looks, allocates, and fills tables that cannot be reached; it may fail, and
//! then nothing has changed. *Edit* stores what others can see and cannot fail. What is left, to invalidate and to
//! free, stays in the [`Gather`](crate::Gather) that they are methods of.

mod build;
mod change;
mod collapse;
mod fork;
mod live;
mod map;
mod protect;
mod query;
mod replace;
pub(crate) mod run;
mod split;
mod unmap;

pub(crate) use build::{Consecutive, Frames, Fresh, Leaves, build};
pub use change::Change;
pub use map::{Encoded, Mapping, Template};
pub(crate) use protect::Recent;

use crate::addr::Level;
use crate::format::{Attrs, Format, Perms};

/// The leaf `entry` with these flags set besides those that it has.
fn with_flags<F: Format>(entry: u64, level: Level, accessed: bool, dirty: bool) -> u64 {
    let attrs = F::decode(entry, level);
    let flagged = Attrs {
        accessed: attrs.accessed || accessed,
        dirty: attrs.dirty || dirty,
        ..attrs
    };
    // What was decoded can be encoded.
    F::encode(&flagged, level).map_or(entry, |bits| in_place_of::<F>(entry, level, bits))
}

/// What stands in the place of a leaf until what was there is forgotten. No walker takes a parked leaf for valid, then or now.
pub(crate) fn withheld<F: Format>(leaf: u64) -> u64 {
    match F::is_parked(leaf) {
        true => leaf,
        false => F::suspend(leaf),
    }
}

/// The leaf that a format has encoded, in the place of `entry`: with its address, and in its run.
pub(crate) fn in_place_of<F: Format>(entry: u64, level: Level, bits: u64) -> u64 {
    F::with_address(bits, F::address(entry, level)) | entry & F::CONTIGUOUS
}

/// The leaf `entry` with every flag set that a walker may still set in it. Where what walkers set from now on is not
/// looked at, this is what to write: said too much, never too little.
fn saturate<F: Format>(entry: u64, level: Level) -> u64 {
    let writable = F::decode(entry, level).perms.intersects(Perms::ANY_WRITE);
    with_flags::<F>(entry, level, true, writable)
}

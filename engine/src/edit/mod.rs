//! The edits: what can be done to a range of an address space.
//!
//! Each has the same shape. *Prepare* looks, allocates, and fills tables that cannot be reached; it
//! may fail, and then nothing has changed. *Edit* stores what others can see and cannot fail. What
//! is left, to invalidate and to free, stays in the [`Gather`](crate::Gather) that they are methods
//! of.

mod build;
pub(crate) mod cache;
mod change;
mod collapse;
mod drive;
pub(crate) mod error;
mod fold;
mod fork;
mod gather;
mod map;
mod mapping;
mod plan;
mod protect;
mod query;
mod relocate;
mod replace;
pub(crate) mod space;
mod split;
mod unmap;

pub(crate) use build::{Frames, Fresh, Leaves, Source, build, fill_parts};
pub use change::Change;
pub use gather::Gather;
pub use map::{Encoded, Template};
pub use mapping::Mapping;
pub(crate) use plan::{How, Recent};
pub use space::{AddressSpace, EditError, Half, Liveness};

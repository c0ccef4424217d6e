//! The edits: what can be done to a range of an address space.
//!
//! Each has the same shape. *Prepare* looks, allocates, and fills tables that nobody can reach; it may fail, and then
//! nothing has changed. *Edit* stores what others can see and cannot fail. What is left, to invalidate and to free, goes
//! to the caller's [`Flush`](crate::Flush).

pub(crate) mod build;
mod collapse;
mod map;
mod query;
mod rewrite;
mod unmap;

pub use map::Mapping;
pub use rewrite::Change;

//! Parts that the hypervisors of all architectures share: frames for tables ([`frames`]), the
//! guest's memory ([`memory`], [`pieces`], [`vm`]), logs of its writes ([`log`]), live snapshots
//! ([`snapshot`]), counters ([`counters`](mod@counters)), options ([`options`]), and random edits
//! for checks ([`edits`]).
//!
//! The hypervisor itself, which knows processors, barriers and interrupts, is a [`host::Host`].
#![no_std]

pub mod counters;
pub mod edits;
pub mod frames;
pub mod host;
pub mod log;
pub mod memory;
pub mod options;
pub mod pieces;
pub mod snapshot;
pub mod vm;

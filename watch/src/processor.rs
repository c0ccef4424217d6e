//! Processors: what each has loaded, and what it has done that is not complete.

use crate::At;
use crate::arm64::{Part, Registers};
use crate::debt::Tag;
use crate::invalidation::{Cpus, Invalidation};

/// A processor.
#[derive(Default)]
pub(crate) struct Cpu {
    pub(crate) registers: Registers,
    /// The space and the tag that are loaded, of each part.
    pub(crate) loaded: [Option<(usize, Tag)>; Part::ALL.len()],
    /// Debts of what it has changed since its last DSB.
    pub(crate) unpublished: Vec<u64>,
    /// Invalidations that it has issued since its last whole DSB.
    pub(crate) issued: Vec<Issued>,
    /// The last write of another VMID, until the context is synchronized.
    pub(crate) unsynchronized: Option<At>,
    /// A root was loaded whose identifier another may have had.
    pub(crate) is_unchecked: bool,
}

/// An invalidation that is not complete.
pub(crate) struct Issued {
    pub(crate) by: Invalidation,
    pub(crate) of: Of,
}

pub(crate) enum Of {
    Debt { debt: u64, paid: Vec<(Tag, Cpus)> },
    Context { space: usize, tag: Tag, cpus: Cpus },
}

//! Published techniques that make the linear map faster, as a set.

use alloc::vec::Vec;

/// One technique. Each works without the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Technique {
    /// A table is shown once to be filled, not once for each contiguous run.
    NoContRemap,
    /// A new table stays shown when it has been zeroed.
    NoAllocRemap,
    /// Last-level tables are shown in 16 slots in turn, which are cleared together.
    LazyUnmap,
    /// The entries of a last-level table are published together.
    BatchBarriers,
}

impl Technique {
    /// All, in the order in which they were first published.
    pub const ALL: [Self; 4] =
        [Self::NoContRemap, Self::NoAllocRemap, Self::LazyUnmap, Self::BatchBarriers];

    /// Its name in the published tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoContRemap => "no-cont-remap",
            Self::NoAllocRemap => "no-alloc-remap",
            Self::LazyUnmap => "lazy-unmap",
            Self::BatchBarriers => "batch-barriers",
        }
    }
}

/// Which techniques are used; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Techniques(u8);

impl Techniques {
    /// These and one more.
    pub const fn with(self, technique: Technique) -> Self {
        Self(self.0 | 1 << technique as u8)
    }

    /// Whether it is used.
    pub const fn has(self, technique: Technique) -> bool {
        self.0 & 1 << technique as u8 != 0
    }

    /// The names of those that are used, in the order of publication.
    pub fn names(self) -> Vec<&'static str> {
        Technique::ALL
            .into_iter()
            .filter(|&technique| self.has(technique))
            .map(Technique::name)
            .collect()
    }
}

impl FromIterator<Technique> for Techniques {
    fn from_iter<I: IntoIterator<Item = Technique>>(techniques: I) -> Self {
        techniques.into_iter().fold(Self::default(), Self::with)
    }
}

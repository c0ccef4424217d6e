//! Invalidations, whatever the architecture: that which they name.

use serde::{Deserialize, Serialize};
use tablewright_walker::Granule;

/// Addresses, first and last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The first address.
    #[serde(with = "crate::hex")]
    pub first: u64,
    /// The last one.
    #[serde(with = "crate::hex")]
    pub last: u64,
}

impl Span {
    /// Whether an address of one is an address of the other.
    pub fn meets(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// What an invalidation says of the leaf that it is about: if that is wrong, nothing has to be
/// invalidated (DDI 0487 C5.5, TTL and TG).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The granule of its tables.
    pub granule: Granule,
    /// Its level; `None`: any.
    pub level: Option<i8>,
}

/// An invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// Of one address space; `None`: of all.
    pub asid: Option<u16>,
    /// Of these addresses; `None`: of all.
    pub span: Option<Span>,
    /// Of leaves, and not of the tables on the way to them.
    pub leaves_only: bool,
    /// Of the tables on the way to every other address, too (SDM vol. 3A 5.10.4.1, INVLPG).
    pub every_table: bool,
    /// Where the leaf is, if that is said. Of one that is elsewhere nothing is invalidated.
    pub hint: Option<Hint>,
    /// Of what is global, too.
    pub globals: bool,
    /// By every processor, and not by this one alone.
    pub broadcast: bool,
}

impl Invalidation {
    /// Of everything, on the processor's own.
    pub const LOCAL: Self = Self {
        asid: None,
        span: None,
        leaves_only: false,
        every_table: false,
        hint: None,
        globals: true,
        broadcast: false,
    };

    /// Says what it is: `of ASID 7, 0x1000..=0x1fff, of leaves, at level 3`.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(self.asid.map(|asid| format!("of ASID {asid}")));
        parts.extend(self.span.map(|span| format!("of {:#x}..={:#x}", span.first, span.last)));
        parts.extend(self.leaves_only.then(|| "of leaves alone".into()));
        if let Some(Hint { granule, level }) = self.hint {
            let level = level.map_or("any".into(), |level| level.to_string());
            parts.push(format!(
                "at level {level} of {} KiB granules",
                1 << granule.page_shift() >> 10
            ));
        }
        parts.push(if self.broadcast {
            "everywhere".into()
        } else {
            "on its own CPU alone".into()
        });
        parts.join(", ")
    }
}

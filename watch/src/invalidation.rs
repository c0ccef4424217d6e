//! Invalidations, whatever the architecture: that which they name.

use serde::{Deserialize, Serialize};
use tablewright_walker::Granule;

/// Processors, one bit each.
pub(crate) type Cpus = u64;

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

/// The place of the leaf, as an invalidation says it. If that is wrong, nothing has to be
/// invalidated (DDI 0487 C5.5, TTL and TG).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The granule of its tables.
    pub granule: Granule,
    /// Its level; `None`: any.
    pub level: Option<i8>,
}

/// The translations that an invalidation is of (DDI 0487 D8.17.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stages {
    /// Of stage 1 of EL1&0, with what is combined of it and a stage 2; of x86-64.
    First,
    /// Of stage 2 alone, and not with what is combined of it and a stage 1.
    Second,
    /// Of both stages of EL1&0, and of what is combined of them.
    Both,
    /// Of EL2.
    El2,
}

/// An invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// Of these translations.
    pub stages: Stages,
    /// Of one virtual machine; `None`: of all. The host's translations have number 0.
    pub vmid: Option<u16>,
    /// Of one address space; `None`: of all.
    pub asid: Option<u16>,
    /// Of these addresses; `None`: of all.
    pub span: Option<Span>,
    /// Of leaves, and not of the tables on the way to them.
    pub leaves_only: bool,
    /// Of the tables on the way to every other address, too (SDM vol. 3A 5.10.4.1, INVLPG).
    pub every_table: bool,
    /// The place of the leaf, if that is said.
    pub hint: Option<Hint>,
    /// Of what is global, too.
    pub globals: bool,
    /// By every processor, and not by this one alone.
    pub broadcast: bool,
}

impl Invalidation {
    /// Of everything, on the processor's own.
    pub const LOCAL: Self = Self {
        stages: Stages::First,
        vmid: Some(0),
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
        parts.extend(match self.stages {
            Stages::First => None,
            Stages::Second => Some("of stage 2".into()),
            Stages::Both => Some("of both stages".into()),
            Stages::El2 => Some("of EL2".into()),
        });
        parts.extend(self.vmid.filter(|vmid| *vmid != 0).map(|vmid| format!("of VMID {vmid}")));
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

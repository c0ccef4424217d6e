//! Which crates write which format.

use tablewright::format::Arm64K4;

use super::super::candidates::{BARE, CANDIDATES};
use super::super::subject::OURS;
use super::aarch64_paging::Aarch64Paging;
use super::bare::Bare;
use super::page_table_generic::{Arm64Entry, Generic};
#[cfg(target_arch = "x86_64")]
use super::page_table_multiarch::{Arm64, X64};
use super::subject::{Operation, Subject};
use super::tablewright::Tablewright;
use crate::format::Architecture;
use crate::page_table_generic::Entry as X86Entry;

/// A subject, before it does anything.
pub struct Candidate {
    /// The crate's name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Whether it minds flags that hardware sets in entries under its hands.
    pub hardware_flags: bool,
    /// Makes its subject.
    pub subject: fn() -> Box<dyn Subject>,
}

impl Candidate {
    /// Whether it is the engine that this program belongs to.
    pub fn is_ours(&self) -> bool {
        self.name == OURS
    }

    /// Whether it does this in the same way as it does without flags of hardware.
    pub fn repeats(&self, operation: Operation) -> bool {
        self.is_limit()
            && self.hardware_flags
            && matches!(operation, Operation::Map | Operation::Query)
    }

    /// Whether it is the bare loop.
    pub fn is_limit(&self) -> bool {
        self.name == BARE.name
    }
}

/// Everything that is measured of a format: the bare loop first, without and with flags of
/// hardware, then the crates that write it, if they are `chosen`.
pub fn candidates(architecture: Architecture, chosen: impl Fn(&str) -> bool) -> Vec<Candidate> {
    let version = |name| {
        let known = CANDIDATES.iter().find(|candidate| candidate.name == name);
        known.map_or("", |candidate| candidate.version)
    };
    type Make = fn() -> Box<dyn Subject>;
    let all: Vec<(&'static str, bool, Make)> = match architecture {
        Architecture::Arm64 => vec![
            (BARE.name, false, || Box::new(Bare::arm64(false))),
            (BARE.name, true, || Box::new(Bare::arm64(true))),
            (OURS, false, || Box::new(Tablewright::<Arm64K4>::new(false))),
            (OURS, true, || Box::new(Tablewright::<Arm64K4>::new(true))),
            ("aarch64-paging", false, || {
                Box::new(Aarch64Paging::default())
            }),
            ("page-table-generic", false, || {
                Box::new(Generic::<Arm64Entry>::default())
            }),
            #[cfg(target_arch = "x86_64")]
            ("page_table_multiarch", false, || Box::new(Arm64::default())),
        ],
        Architecture::X86_64 => vec![
            (BARE.name, false, || Box::new(Bare::x86_64(false))),
            (BARE.name, true, || Box::new(Bare::x86_64(true))),
            (OURS, false, || {
                Box::new(Tablewright::<tablewright::format::X86_64<4>>::new(false))
            }),
            (OURS, true, || {
                Box::new(Tablewright::<tablewright::format::X86_64<4>>::new(true))
            }),
            ("page-table-generic", false, || {
                Box::new(Generic::<X86Entry>::default())
            }),
            #[cfg(target_arch = "x86_64")]
            ("page_table_multiarch", false, || Box::new(X64::default())),
            #[cfg(target_arch = "x86_64")]
            (
                "x86_64",
                false,
                || Box::new(super::x86_64::X8664::default()),
            ),
        ],
    };
    all.into_iter()
        .filter(|(name, ..)| *name == BARE.name || chosen(name))
        .map(|(name, hardware_flags, subject)| Candidate {
            name,
            version: version(name),
            hardware_flags,
            subject,
        })
        .collect()
}

//! Which crates there are.

use super::bare::Bare;
use super::subject::{OURS, Subject};
use super::tablewright::Tablewright;

/// A crate, before it does anything.
pub struct Candidate {
    /// The crate's name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Makes its subject.
    pub subject: fn() -> Box<dyn Subject>,
}

/// The bare loop, which is always measured.
pub const BARE: Candidate = Candidate {
    name: "bare",
    version: "",
    subject: || Box::new(Bare::default()),
};

/// All crates that can be compared on this computer.
pub const CANDIDATES: &[Candidate] = &[
    Candidate {
        name: OURS,
        version: env!("CARGO_PKG_VERSION"),
        subject: || Box::new(Tablewright::default()),
    },
    Candidate {
        name: "aarch64-paging",
        version: "0.12.3",
        subject: || Box::new(super::aarch64_paging::Aarch64Paging::default()),
    },
    Candidate {
        name: "page-table-generic",
        version: "0.9.1",
        subject: || Box::new(super::page_table_generic::PageTableGeneric::default()),
    },
    #[cfg(target_arch = "x86_64")]
    Candidate {
        name: "page_table_multiarch",
        version: "0.6.2",
        subject: || Box::new(super::page_table_multiarch::PageTableMultiarch::default()),
    },
    #[cfg(target_arch = "x86_64")]
    Candidate {
        name: "x86_64",
        version: "0.15.5",
        subject: || Box::new(super::x86_64::X8664::default()),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_in_the_manifest() {
        let manifest = include_str!("../Cargo.toml");
        for candidate in CANDIDATES.iter().filter(|candidate| candidate.name != OURS) {
            let exact = format!("\"={}\"", candidate.version);
            assert!(
                manifest
                    .lines()
                    .any(|line| line.starts_with(candidate.name) && line.contains(&exact)),
                "{}",
                candidate.name
            );
        }
    }
}

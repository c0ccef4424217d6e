//! The list of measured crates, with the formats that each of them writes.

use tablewright::format::{Arm64K4, Sv48, X86_64};

use crate::compare::aarch64_paging::Aarch64Paging;
use crate::compare::bare::{Bare, BareRange};
use crate::compare::page_table_generic::{self as generic, Generic};
#[cfg(target_arch = "x86_64")]
use crate::compare::page_table_multiarch::{Arm64, Riscv64, X64};
use crate::compare::subject::{BARE, Course, OURS, Operation, Subject, Users};
use crate::compare::tablewright::Tablewright;
#[cfg(target_arch = "x86_64")]
use crate::compare::x86_64::X8664;
use crate::format::Architecture;

/// Every crate and its version, in the order of the option's values.
pub const CRATES: &[(&str, &str)] = &[
    (OURS, env!("CARGO_PKG_VERSION")),
    ("aarch64-paging", "0.12.3"),
    ("page-table-generic", "0.9.1"),
    #[cfg(target_arch = "x86_64")]
    ("page_table_multiarch", "0.6.2"),
    #[cfg(target_arch = "x86_64")]
    ("x86_64", "0.15.5"),
];

/// A crate in one format.
#[derive(Clone, Copy)]
pub struct Candidate {
    /// The crate's name.
    pub name: &'static str,
    /// The format of its tables.
    pub format: Architecture,
    /// Whether it keeps flags that hardware sets in entries during edits.
    pub hardware_flags: bool,
    /// Whether scattered calls are measured.
    scattered: bool,
    /// The cycles over one range; none if it is measured in another format.
    pub courses: &'static [Course],
    /// Makes its subject.
    pub subject: fn() -> Box<dyn Subject>,
}

impl Candidate {
    /// A candidate that is measured with scattered calls alone.
    pub(crate) const fn new(
        name: &'static str,
        format: Architecture,
        subject: fn() -> Box<dyn Subject>,
    ) -> Self {
        Self { name, format, hardware_flags: false, scattered: true, courses: &[], subject }
    }

    const fn with_hardware_flags(self) -> Self {
        Self { hardware_flags: true, ..self }
    }

    pub(crate) const fn with_courses(self, courses: &'static [Course]) -> Self {
        Self { courses, ..self }
    }

    const fn range_only(self) -> Self {
        Self { scattered: false, ..self }
    }

    /// The version of the crate; empty of the bare loop.
    pub fn version(&self) -> &'static str {
        let known = CRATES.iter().find(|(name, _)| *name == self.name);
        known.map_or("", |(_, version)| version)
    }

    /// Whether it is the engine that this program belongs to.
    pub fn is_ours(&self) -> bool {
        self.name == OURS
    }

    /// Whether it is the bare loop.
    pub fn is_bare(&self) -> bool {
        self.name == BARE
    }

    /// Whether hardware flags change nothing for this operation.
    pub fn repeats(&self, operation: Operation) -> bool {
        self.is_bare()
            && self.hardware_flags
            && matches!(operation, Operation::Map | Operation::Query)
    }

    /// Users of tables that scattered calls edit.
    pub fn users(&self) -> Users {
        match self.hardware_flags {
            true => Users::WritingWalkers,
            false => Users::Walkers,
        }
    }
}

/// Candidates of one range, the bare loop first.
pub fn of_range(chosen: impl Fn(&str) -> bool) -> Vec<Candidate> {
    select(|candidate| !candidate.courses.is_empty(), chosen)
}

/// Candidates of scattered calls in a format, the bare loop first.
pub fn of_format(format: Architecture, chosen: impl Fn(&str) -> bool) -> Vec<Candidate> {
    let of = |candidate: &Candidate| candidate.scattered && candidate.format == format;
    select(of, chosen)
}

fn select(of: impl Fn(&Candidate) -> bool, chosen: impl Fn(&str) -> bool) -> Vec<Candidate> {
    let measured =
        |candidate: &&Candidate| of(candidate) && (candidate.is_bare() || chosen(candidate.name));
    CANDIDATES.iter().filter(measured).copied().collect()
}

const ARM64: Architecture = Architecture::Arm64;
const X86: Architecture = Architecture::X86_64;
const RISCV64: Architecture = Architecture::Riscv64;

const OURS_X86: Candidate =
    Candidate::new(OURS, X86, || Box::new(Tablewright::<X86_64<4>>::default()));
const OURS_ARM64: Candidate =
    Candidate::new(OURS, ARM64, || Box::new(Tablewright::<Arm64K4>::default()));
const OURS_RISCV64: Candidate =
    Candidate::new(OURS, RISCV64, || Box::new(Tablewright::<Sv48>::default()));
const BARE_X86: Candidate = Candidate::new(BARE, X86, || Box::new(Bare::x86_64()));
const BARE_ARM64: Candidate = Candidate::new(BARE, ARM64, || Box::new(Bare::arm64()));
const BARE_RISCV64: Candidate = Candidate::new(BARE, RISCV64, || Box::new(Bare::riscv64()));

const UNMAP: Course = Course::unused(Operation::Unmap, "unmap, finish");

const CANDIDATES: &[Candidate] = &[
    Candidate::new(BARE, X86, || Box::new(BareRange::default())).range_only().with_courses(&[
        Course::unused(Operation::Unmap, "load, store 0"),
        Course::unused(Operation::Exchange, "xchg 0"),
    ]),
    BARE_X86,
    BARE_X86.with_hardware_flags(),
    BARE_ARM64,
    BARE_ARM64.with_hardware_flags(),
    BARE_RISCV64,
    BARE_RISCV64.with_hardware_flags(),
    OURS_X86.with_courses(&[
        UNMAP,
        Course::unused(Operation::Detach, "unmap, issue"),
        Course { users: Users::Walkers, ..UNMAP },
        Course { users: Users::WritingWalkers, ..UNMAP },
    ]),
    OURS_X86.with_hardware_flags(),
    OURS_ARM64,
    OURS_ARM64.with_hardware_flags(),
    OURS_RISCV64,
    OURS_RISCV64.with_hardware_flags(),
    Candidate::new("aarch64-paging", ARM64, || Box::new(Aarch64Paging::default())).with_courses(&[
        Course::unused(Operation::Unmap, "modify_range, compact_subtables"),
        Course::unused(Operation::Unmap, "modify_range, map_range"),
        Course::unused(Operation::Detach, "map_range"),
    ]),
    Candidate::new("page-table-generic", X86, || Box::new(Generic::<generic::X86>::default()))
        .with_courses(&[Course::unused(Operation::Unmap, "unmap_with_config")]),
    Candidate::new("page-table-generic", ARM64, || Box::new(Generic::<generic::Arm64>::default())),
    Candidate::new("page-table-generic", RISCV64, || {
        Box::new(Generic::<generic::Riscv64>::default())
    }),
    #[cfg(target_arch = "x86_64")]
    Candidate::new("page_table_multiarch", X86, || Box::new(X64::default()))
        .with_courses(&[Course::unused(Operation::Unmap, "unmap_region, drop")]),
    #[cfg(target_arch = "x86_64")]
    Candidate::new("page_table_multiarch", ARM64, || Box::new(Arm64::default())),
    #[cfg(target_arch = "x86_64")]
    Candidate::new("page_table_multiarch", RISCV64, || Box::new(Riscv64::default())),
    #[cfg(target_arch = "x86_64")]
    Candidate::new("x86_64", X86, || Box::new(X8664::default()))
        .with_courses(&[Course::unused(Operation::Unmap, "unmap, clean_up")]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_in_the_manifest() {
        let manifest = include_str!("../../Cargo.toml");
        for (name, version) in CRATES.iter().filter(|(name, _)| *name != OURS) {
            let exact = format!("\"={version}\"");
            let mut lines = manifest.lines();
            assert!(lines.any(|line| line.starts_with(name) && line.contains(&exact)), "{name}");
        }
    }
}

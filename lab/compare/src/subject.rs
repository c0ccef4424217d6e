//! What the comparison asks of a crate, and which crates there are.

use serde::Serialize;

use crate::arena::Arena;
use crate::format::Format;
use crate::format::tables_of_pages;
use crate::judge::Expected;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Map the range in an empty space.
    Map,
    /// The same by two threads at once, in one space.
    MapTogether,
    /// Make the range read-only.
    Protect,
    /// The same while walkers use the tables, which they only read.
    ProtectLive,
    /// The same while walkers use the tables and may set bits in every entry.
    ProtectHardware,
    /// Visit and clear every leaf, and give every table back that covers nothing else.
    Unmap,
    /// Make the range unreachable without visiting its leaves.
    Detach,
    /// Like unmap, every leaf with an atomic exchange, because hardware may still write to it.
    Exchange,
}

impl Operation {
    /// Its name in tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::MapTogether => "map (2 threads)",
            Self::Protect => "protect",
            Self::ProtectLive => "protect (live)",
            Self::ProtectHardware => "protect (hw writes)",
            Self::Unmap => "unmap",
            Self::Detach => "detach",
            Self::Exchange => "exchange",
        }
    }

    /// The operation of the bare loop that touches the same bytes in the same way, if there is one.
    pub const fn bare(self) -> Option<Self> {
        match self {
            Self::ProtectLive => Some(Self::Protect),
            Self::ProtectHardware => Some(Self::Exchange),
            Self::Detach => None,
            _ => Some(self),
        }
    }
}

/// What else uses the tables while they are edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Users {
    /// Nothing: they are being made, or being taken down.
    None,
    /// Walkers that only read entries.
    Walkers,
    /// Walkers that may set accessed and dirty bits in every entry.
    WritingWalkers,
}

impl Users {
    /// What making the range read-only is called.
    pub const fn protect(self) -> Operation {
        match self {
            Self::None => Operation::Protect,
            Self::Walkers => Operation::ProtectLive,
            Self::WritingWalkers => Operation::ProtectHardware,
        }
    }
}

/// The course of a cycle: for which users the range is made read-only, and how it is taken down.
#[derive(Clone, Copy, Debug)]
pub struct Course {
    /// What else uses the tables.
    pub users: Users,
    /// What it amounts to: unmap, detach or exchange.
    pub operation: Operation,
    /// The calls that do it.
    pub method: &'static str,
}

/// The work: a range of pages, the same for all.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// How much is mapped: as much as whole tables of pages cover.
    pub bytes: u64,
}

impl Work {
    /// The first virtual address: not zero, so that no address is right by accident, and where a
    /// table of every level begins, so that a comparison needs no more tables than it must.
    pub const VIRTUAL: u64 = 1 << 39;
    /// The first physical address mapped.
    pub const PHYSICAL: u64 = 1 << 32;
    /// The page size.
    pub const PAGE: u64 = Format::COMMON.page_bytes();
    /// The most that can be mapped: to the end of the lower half of the address space.
    pub const MOST: u64 = (1 << 47) - Self::VIRTUAL;

    /// What the tables should hold once the range is mapped.
    pub const fn expected(self, writable: bool) -> Expected {
        Expected {
            start: Self::VIRTUAL,
            frame: Self::PHYSICAL,
            bytes: self.bytes,
            writable,
            executable: false,
            memory: None,
        }
    }

    /// How many leaves there are.
    pub const fn entries(self) -> u64 {
        self.bytes / Self::PAGE
    }

    /// How many tables it takes, with the root.
    pub fn tables(self) -> u64 {
        tables_of_pages(
            Format::COMMON,
            &[(Self::VIRTUAL, Self::VIRTUAL + self.bytes)],
        )
    }
}

/// How the entries of a subject are to be read by the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Arm, stage 1, 4 KiB granule.
    Arm64,
    /// x86, four levels.
    X86_64,
    /// No mapping, only values.
    None,
}

/// What a subject says about one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Where it is mapped to.
    pub physical: u64,
    /// Whether it may be written.
    pub writable: bool,
}

/// A crate under comparison.
///
/// A cycle is `begin`, `map`, `protect`, `end`, `finish`, all on one of the courses. All tables
/// come from the arena that `begin` was given, and no reference into a table outlives the call that
/// made it. An error is one line.
pub trait Subject {
    /// How its entries read.
    fn encoding(&self) -> Encoding;

    /// The courses, each measured in its own cycle. What several courses share is measured on the
    /// first of them.
    fn courses(&self) -> &'static [Course];

    /// Makes an empty space. Not timed.
    fn begin(&mut self, arena: Arena, work: Work, users: Users) -> Result<(), String>;

    /// Maps the range with pages, writable, not executable.
    fn map(&mut self) -> Result<(), String>;

    /// Makes the range read-only.
    fn protect(&mut self) -> Result<(), String>;

    /// Takes the mapping down.
    fn end(&mut self, course: Course) -> Result<(), String>;

    /// What the subject itself says about a page. `None` if it is not mapped.
    fn query(&self, virtual_address: u64) -> Option<Leaf>;

    /// The address of the root table, if there is one.
    fn root(&self) -> Option<u64>;

    /// Gives back whatever is left. Not timed.
    fn finish(&mut self);
}

/// The name of the engine that this program belongs to.
pub const OURS: &str = "tablewright";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_gigabytes_take_8210_tables() {
        let work = Work { bytes: 16 << 30 };
        assert_eq!((work.entries(), work.tables()), (4_194_304, 8210));
    }
}

//! The interface of a measured crate, and the operations that are timed.

use serde::Serialize;

use crate::compare::calls::Calls;
use crate::memory::arena::Arena;

/// The name of the engine that this program belongs to.
pub const OURS: &str = "tablewright";
/// The name of the bare loop.
pub const BARE: &str = "bare";

/// A timed operation, in the order of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Map ranges that nothing maps, writable.
    Map,
    /// Map one range by two threads at once, in one space.
    MapTogether,
    /// Make ranges read-only.
    Protect,
    /// Make a range read-only while walkers read its tables.
    ProtectLive,
    /// Make a range read-only while walkers may set bits in every entry.
    ProtectHardware,
    /// Visit and clear every leaf. Of one range: also free the tables that cover nothing else.
    Unmap,
    /// Make a range unreachable without visiting its leaves.
    Detach,
    /// Find the frame of each page, and whether it is writable.
    Query,
    /// A fault on one page that nothing maps, in an address space that processors share.
    Fault,
    /// An atomic exchange for each entry, and nothing else.
    Exchange,
}

impl Operation {
    /// The operations of scattered calls that every crate has, in the order of a round.
    pub const SCATTERED: [Self; 4] = [Self::Map, Self::Query, Self::Protect, Self::Unmap];

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
            Self::Query => "query",
            Self::Fault => "fault (shared)",
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

    /// The operation that a subject runs for it.
    pub const fn edit(self) -> Self {
        match self {
            Self::ProtectLive | Self::ProtectHardware => Self::Protect,
            _ => self,
        }
    }
}

/// Processors that use the tables during edits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Users {
    /// None: the tables are out of use.
    None,
    /// Walkers that only read entries.
    Walkers,
    /// Walkers that may set accessed and dirty bits in every entry.
    WritingWalkers,
}

/// A cycle over one range: the users during protection, and the way down.
#[derive(Clone, Copy, Debug)]
pub struct Course {
    /// The users of the tables, once they are mapped.
    pub users: Users,
    /// Unmap, detach or exchange.
    pub operation: Operation,
    /// The calls that make it up.
    pub method: &'static str,
}

impl Course {
    /// Takes down tables that are out of use.
    pub const fn unused(operation: Operation, method: &'static str) -> Self {
        Self { users: Users::None, operation, method }
    }

    /// The timed steps in order, each with its method.
    pub const fn steps(self) -> [(Operation, &'static str); 3] {
        let protect = match self.users {
            Users::None => Operation::Protect,
            Users::Walkers => Operation::ProtectLive,
            Users::WritingWalkers => Operation::ProtectHardware,
        };
        [(Operation::Map, ""), (protect, ""), (self.operation, self.method)]
    }
}

/// A crate, or the bare loop, in one format. A cycle maps, protects and unmaps the same ranges.
///
/// All tables come from the arena of `begin`, and no reference into a table outlives the call that
/// made it. An error is one line.
pub trait Subject {
    /// Makes an empty space for these calls. Not timed.
    fn begin(&mut self, arena: Arena, users: Users, calls: &Calls) -> Result<(), String>;

    /// Puts the tables to use by processors. Not timed.
    fn go_live(&mut self) {}

    /// Runs the operation on each range by a call of its own, and once whatever all of them share.
    /// Returns the sum of the [answers](crate::compare::calls::answer) of queries.
    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String>;

    /// Frees the tables that cover nothing but an unmapped range, as the method of the course says.
    /// Timed as a part of unmap.
    fn reclaim(&mut self, _method: &'static str, _calls: &Calls) -> Result<(), String> {
        Ok(())
    }

    /// The address of the root table, if there is one.
    fn root(&self) -> Option<u64>;

    /// Frees all tables. Not timed.
    fn finish(&mut self);
}

/// The error of an operation that a subject does not have.
pub fn none() -> String {
    "has none".to_owned()
}

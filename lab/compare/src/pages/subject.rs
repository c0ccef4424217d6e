//! What is asked of a crate.

use serde::Serialize;

use super::calls::Calls;
use crate::arena::Arena;

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Map the range, which nothing maps, writable.
    Map,
    /// Make it read-only.
    Protect,
    /// Take it away.
    Unmap,
    /// Where each page of it is mapped to, and whether it can be written.
    Query,
    /// A fault on one page that nothing maps, in an address space that processors share.
    Fault,
    /// As many atomic exchanges as the call has pages, and nothing else.
    Exchange,
}

impl Operation {
    /// Those that every crate has, in the order in which they are measured.
    pub const ALL: [Self; 4] = [Self::Map, Self::Query, Self::Protect, Self::Unmap];

    /// Its name in tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Protect => "protect",
            Self::Unmap => "unmap",
            Self::Query => "query",
            Self::Fault => "fault (shared)",
            Self::Exchange => "exchange",
        }
    }
}

/// A crate, or the bare loop, in one format. A cycle maps, queries, protects and unmaps the same
/// ranges, in one order.
///
/// All tables come from the arena that `begin` was given, and no reference into a table outlives
/// the call that made it. An error is one line.
pub trait Subject {
    /// Makes an empty space. Not timed.
    fn begin(&mut self, arena: Arena) -> Result<(), String>;

    /// From here on the tables count as used by processors. Not timed.
    fn go_live(&mut self) {}

    /// Does the operation in each of the ranges by a call of its own, and whatever is to be done
    /// once for all of them. Of queries: the sum of the [answers](super::calls::answer).
    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String>;

    /// The address of the root table.
    fn root(&self) -> Option<u64>;

    /// Gives back all tables. Not timed.
    fn finish(&mut self);
}

//! Who builds the linear map: the one place where the engine is plugged in.

use crate::arena::Arena;
use crate::error::Error;
use crate::format::Format;
use crate::plan::Plan;

/// What was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Built {
    /// The address of the root table.
    pub root: u64,
    /// Leaves of any size; those of a contiguous run are counted one by one, because each is written.
    pub entries: u64,
    /// Tables of any level, with the root.
    pub tables: u64,
}

/// Builds linear maps.
pub trait Builder {
    /// The crate's name.
    fn name(&self) -> &'static str;

    /// Its version.
    fn version(&self) -> &'static str;

    /// Maps every span of `plan` in an empty space, with tables from `arena`. This is what is timed. An error is one
    /// line.
    fn build(&mut self, plan: &Plan, arena: Arena) -> Result<Built, String>;

    /// Forgets what was built. Not timed; tables need not be given back, because the arena starts again.
    fn discard(&mut self);
}

/// The builder that writes real tables of this format into memory of the host.
pub fn native(_format: Format) -> Result<Box<dyn Builder>, Error> {
    Err(Error::NotAvailable("map-mem --on native"))
}

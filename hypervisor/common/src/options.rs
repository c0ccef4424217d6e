//! Words of a command line that all hypervisors have.

use crate::host::Reason;
use crate::log::{Begin, Kind};
use crate::memory::{Evictions, Leaves};

/// The options.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The size of leaves.
    pub leaves: Leaves,
    /// The frames that are taken away from the guest.
    pub evict: Evictions,
    /// How writes are logged, if they are.
    pub log: Option<Kind>,
    /// When the guest is copied, to go on on the copy.
    pub snapshot: Option<Begin>,
}

impl Options {
    /// No log, no copy, and all frames stay.
    pub fn new(leaves: Leaves) -> Self {
        Self { leaves, evict: Evictions::default(), log: None, snapshot: None }
    }

    /// Reads one option. `false` if it is none of these.
    ///
    /// # Errors
    /// What values the option has.
    pub fn read(&mut self, name: &str, value: &str) -> Result<bool, Reason> {
        let number = || value.parse().map_err(|_| "a number is asked for");
        match name {
            "mapping" => {
                self.leaves = Leaves::named(value).ok_or("mapping is 4k, 2m, mixed or 1g")?;
            }
            "evict" => self.evict.count = number()?,
            "evict_after" => self.evict.after = number()?,
            "evict_rate" => self.evict.per_second = number()?,
            "evict_by" if value == "table" => self.evict.tables = true,
            "log" => {
                self.log = Some(Kind::named(value).ok_or("log is bitmap, ring, all or hardware")?);
            }
            "snapshot" => {
                let begin = Begin::named(value);
                self.snapshot = Some(begin.ok_or("snapshot is bell, or milliseconds")?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

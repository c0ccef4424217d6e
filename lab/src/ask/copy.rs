//! A migration by pre-copy, counted out: memory is sent, then what was written meanwhile, until the
//! rest can be sent while the guest is stopped.
//!
//! `migrate` runs one page by page, which hundreds of gibibytes are too many for. This takes what
//! the log costs from the runs of `dirty-log`; a test holds the two against each other.

use crate::migrate::job::{ON_LINK, PAGE};

/// A guest that writes at random, and its link.
#[derive(Clone, Debug)]
pub struct Copy {
    pub pages: u64,
    /// Pages that it writes, over and over.
    pub set: u64,
    /// Writes in a second, by all vCPUs.
    pub rate: u64,
    pub vcpus: u64,
    /// Bytes in a second.
    pub bandwidth: u64,
    /// Longest stop, in nanoseconds.
    pub limit: f64,
}

/// Costs of the log, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Logged {
    pub start: f64,
    /// To protect all memory for the first time, where the start does not.
    pub first_harvest: f64,
    /// To read the log.
    pub read: f64,
    /// To clear it of all pages.
    pub clear: f64,
    /// The first write to a page, of a vCPU.
    pub first_write: f64,
}

/// In nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copied {
    pub total: f64,
    pub downtime: f64,
}

/// A migration of more rounds comes to nothing.
const MOST_ROUNDS: usize = 1000;

impl Copy {
    /// Time to send `pages`, in nanoseconds.
    fn sent(&self, pages: f64) -> f64 {
        pages * ON_LINK as f64 / self.bandwidth as f64 * 1e9
    }

    /// Pages that are written for the first time in `ns`; each such write faults.
    fn written(&self, ns: f64, logged: &Logged) -> f64 {
        // A vCPU whose writes fault makes no more of them than it has time for.
        let fastest = self.vcpus as f64 / logged.first_write.max(1.0) * 1e9;
        let writes = (self.rate as f64).min(fastest) * ns / 1e9;
        let set = self.set as f64;
        set * (1.0 - (-writes / set).exp())
    }

    /// Counts the rounds; nothing for a migration that does not end.
    pub fn run(&self, logged: &Logged) -> Option<Copied> {
        let mut rest = self.pages as f64;
        let mut total = logged.start + logged.first_harvest;
        for _ in 0..MOST_ROUNDS {
            let stopped = self.sent(rest) + logged.read;
            if stopped <= self.limit {
                return Some(Copied { total: total + stopped, downtime: stopped });
            }
            let clear = logged.clear * rest / self.pages as f64;
            let round = self.sent(rest) + logged.read + clear;
            total += round;
            rest = self.written(round, logged);
        }
        None
    }
}

const _: () = assert!(PAGE == crate::guest::input::PAGE);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrate::tests::counted as page_by_page;

    const FREE: Logged =
        Logged { start: 0.0, first_harvest: 0.0, read: 0.0, clear: 0.0, first_write: 0.0 };

    fn copy() -> Copy {
        Copy {
            pages: 1 << 16,
            set: 1 << 13,
            rate: 20_000,
            vcpus: 4,
            bandwidth: 256 << 20,
            limit: 20e6,
        }
    }

    #[test]
    fn a_guest_that_writes_more_than_is_sent_is_never_through() {
        let copy = Copy { rate: 1 << 30, ..copy() };
        assert_eq!(copy.run(&FREE), None);
        // With faults that slow it down it is.
        let slow = Logged { first_write: 1e9, ..FREE };
        assert!(copy.run(&slow).is_some());
        let little = Copy { set: 100, ..copy };
        assert!(little.run(&FREE).is_some());
    }

    #[test]
    fn each_cost_counts() {
        let whole = copy().run(&FREE).unwrap();
        let least = copy().sent(copy().pages as f64);
        assert!(whole.total > least && whole.total < 2.0 * least);
        for dearer in [
            Logged { start: 1e9, ..FREE },
            Logged { first_harvest: 1e9, ..FREE },
            Logged { read: 1e6, ..FREE },
            Logged { clear: 1e9, ..FREE },
        ] {
            let more = copy().run(&dearer).unwrap();
            assert!(more.total > whole.total + 0.9e6, "{dearer:?}");
        }
        assert!(whole.downtime <= copy().limit);
    }

    /// Within a tenth of the migration page by page.
    #[test]
    fn it_is_that_of_migrate() {
        for (rate, set) in [(5_000, 1 << 13), (20_000, 1 << 13), (20_000, 1 << 15)] {
            let copy = Copy { rate, set, ..copy() };
            let (total, downtime) = page_by_page(
                (copy.pages, set),
                rate,
                copy.vcpus,
                copy.bandwidth,
                copy.limit as u64,
            );
            let counted = copy.run(&FREE).unwrap();
            let near = |a: f64, b: f64, most: f64| (a / b - 1.0).abs() < most;
            assert!(near(counted.total, total, 0.1), "{copy:?}: {counted:?}, {total}");
            assert!(downtime < copy.limit * 1.3 && counted.downtime < copy.limit * 1.3);
        }
    }
}

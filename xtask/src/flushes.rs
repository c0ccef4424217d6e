//! What a flush of 16 ranges of stage 2 takes, counted by an emulator.
//!
//! `hypervisor/src/bin/flushes.rs` unmaps 16 pages that do not adjoin, in one gather, and finishes it between two marks. The
//! second half of the invalidation, of what was combined with the guest's stage 1, is of everything, so that one is enough
//! for all ranges; so are the wait before it, and that for the end.

use crate::counted::{self, Counts, counts};
use crate::{Error, Result, fetch};

/// The name of the test.
pub const NAME: &str = "flush-of-16";

/// What is executed for 16 ranges, in the names of the plugin.
const EXPECTED: [(&str, u64); 5] = [
    ("dsb ishst", 1),
    ("tlbi ipas2le1is", 16),
    ("dsb ish", 2),
    ("tlbi vmalle1is", 1),
    ("isb", 1),
];

/// Runs the program, and compares what is counted.
///
/// # Errors
/// Something is missing, or does not come to its end; or more or less is executed than a flush needs.
pub fn run() -> Result<()> {
    fetch::qemu_arm64()?;
    let (program, plugin) = (fetch::hypervisor("flushes")?, fetch::plugin()?);
    let machine = ["-machine", "virtualization=on", "-m", "128M"];
    let ran = counted::boot(&program, &plugin.display().to_string(), &machine)?;
    ran.check("flushes")?;
    let all = ran.log.lines();
    let all: Option<Vec<_>> = all
        .filter_map(|line| line.strip_prefix("counted 1"))
        .map(counts)
        .collect();
    let expected: Counts = EXPECTED
        .into_iter()
        .map(|(name, count)| (name.to_string(), count))
        .collect();
    match all.as_deref() {
        Some([counts]) if *counts == expected => Ok(()),
        other => Err(Error::Failed(format!(
            "a flush of 16 ranges is {other:?}, and not {expected:?}"
        ))),
    }
}

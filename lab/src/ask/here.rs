//! This computer, as far as it can be asked without rights.

use std::fs;
use std::thread;

use super::Arch;
use super::ways::Version;
use crate::first;

/// The size of a guest as large as it.
pub struct Here {
    pub arch: Arch,
    pub cpus: u16,
    /// Whole gibibytes, at least one.
    pub memory: u64,
    pub kernel: Option<Version>,
}

impl Here {
    pub fn read() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            arch: if cfg!(target_arch = "aarch64") { Arch::Arm64 } else { Arch::X86 },
            cpus: u16::try_from(cpus).unwrap_or(u16::MAX),
            memory: (first::memory() >> 30).max(1) << 30,
            kernel: release.parse().ok(),
        }
    }
}

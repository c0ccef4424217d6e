//! Measurements of guests on the KVM of this computer.

use std::time::{Duration, Instant};

use crate::dirty_log::measured::{self, Measured};
use crate::error::Error;
use crate::guest::input::Backing;
use crate::kvm::{self, Asked, HostKind, Options, PhaseRow};

/// Small enough for a minute, large enough to be steady.
const BYTES: u64 = SMALL * 2;
/// Of huge pages: what grows with the log is to be told from what a call takes in any case.
const HUGE_BYTES: u64 = BYTES * 4;
/// With assertions, figures say nothing: a few seconds then.
pub const SMALL: u64 = if cfg!(debug_assertions) { 8 << 20 } else { 64 << 20 };
pub const SMALL_SIZE: &str = if cfg!(debug_assertions) { "8 MiB" } else { "64 MiB" };
pub const ROUNDS: u32 = if cfg!(debug_assertions) { 2 } else { 5 };
/// After so long there are no more rounds of one guest, on a computer on which others run: all of
/// it takes less than a minute and a half.
const PATIENCE: Duration = Duration::from_secs(5);

/// Phases of all guests.
pub struct Guests {
    pub host: HostKind,
    /// In pages, and in huge pages, on which the profile is fitted.
    pub pages: Vec<PhaseRow>,
    pub huge: Vec<PhaseRow>,
    pub runs: Vec<Measured>,
    /// Enabling with all pages in the log.
    pub all_set: Option<Vec<PhaseRow>>,
    /// With vCPUs that go on in all calls.
    pub stalls: Vec<PhaseRow>,
    /// Nanoseconds of CPU time for a fault, with one vCPU and with two that fault on the same
    /// table.
    pub fault: [f64; 2],
    pub vcpus: u32,
}

impl Guests {
    /// How often the guests ran that had the fewest rounds.
    pub fn rounds(&self) -> usize {
        let all = [&self.pages, &self.huge, &self.stalls];
        let rows = all.into_iter().chain(&self.all_set).flatten();
        rows.map(|row| row.cpu_samples.len()).min().unwrap_or(0)
    }
}

/// A phase by its name.
pub fn phase<'a>(rows: &'a [PhaseRow], name: &str) -> Option<&'a PhaseRow> {
    rows.iter().find(|row| row.phase == name)
}

/// CPU time for a page.
pub fn a_page(rows: &[PhaseRow], name: &str) -> f64 {
    phase(rows, name).map_or(0.0, |row| row.cpu_a_page)
}

/// Runs them; `step` is told what comes.
///
/// # Errors
/// There is no KVM, or a guest does not do as it is told.
pub fn measure(mut step: impl FnMut(&str)) -> Result<Guests, Error> {
    let host = kvm::host()?;
    let huge: Backing = "anonymous_thp".parse().map_err(Error::Usage)?;
    let options = Options { rounds: Some(ROUNDS), ..Options::default() };
    // An older kernel clears a log when it is read.
    let manual = kvm::able()?.manual;
    let asked = |backing, bytes, vcpus| Asked {
        manual,
        until: Some(Instant::now() + PATIENCE),
        ..Asked::new(backing, bytes, vcpus, options.clone())
    };
    let plain = asked(Backing::ANONYMOUS, BYTES, 1);
    step("a guest of small pages");
    let pages = kvm::measure(&plain)?;
    step("a guest of huge pages");
    let large = asked(huge, HUGE_BYTES, 1);
    let huge_pages = kvm::measure(&large)?;
    let runs = vec![measured::of(&plain, &host, &pages), measured::of(&large, &host, &huge_pages)];
    step("a log with all pages set");
    let mut set = asked(Backing::ANONYMOUS, SMALL, 1);
    set.options.all_set = true;
    // An older kernel has no such log.
    let all_set = kvm::measure(&set).ok();
    step("a guest that goes on");
    let vcpus = host.cpus.clamp(1, 2);
    let mut going_on = asked(huge, SMALL, vcpus);
    going_on.options.stalls = true;
    let stalls = kvm::measure(&going_on)?;
    step("faults of one and of two vCPUs");
    let fault = |vcpus| -> Result<f64, Error> {
        let rows = kvm::measure(&asked(Backing::ANONYMOUS, SMALL, vcpus))?;
        Ok(a_page(&rows, "dirty 2"))
    };
    Ok(Guests {
        host,
        pages,
        huge: huge_pages,
        runs,
        all_set,
        stalls,
        fault: [fault(1)?, fault(vcpus)?],
        vcpus,
    })
}

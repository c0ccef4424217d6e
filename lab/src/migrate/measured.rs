//! The computer at hand as the machine of a migration: what `dirty-log --on kvm` or `doctor` has
//! measured of it.

use std::path::PathBuf;

use serde::Serialize;
use tablewright_machine::Profile;

use crate::dirty_log::measured::Measured;
use crate::error::Error;
use crate::fit::from_run;

/// How fast a vCPU writes there.
#[derive(Clone, Debug, Serialize)]
pub struct Rates {
    pub host: String,
    /// Nanoseconds of a vCPU for a page that it may write: the least of all runs. None where each
    /// was another fault.
    pub write_ns: Option<f64>,
    /// And for one that is logged.
    pub logged_write_ns: f64,
    /// Pages a second that a vCPU can write while each is logged.
    pub dirty_pages_per_second: f64,
}

/// A write that may be made takes less than this; where the host takes tables away when a log ends,
/// the pass after it is faults.
const FAULT_NS: f64 = 500.0;

/// The profile fitted to runs on KVM in these files, as `fit --from` does it, and the rates there.
pub fn here(files: &[PathBuf]) -> Result<(Profile, Rates), Error> {
    let runs = from_run::read_all(files)?;
    let rates = rates(&runs)?;
    Ok((from_run::fit(&runs, None, &[])?.profile, rates))
}

fn rates(runs: &[Measured]) -> Result<Rates, Error> {
    let least = |phase: &dyn Fn(&str) -> bool| {
        let all = runs.iter().flat_map(|run| run.ns_a_page(phase));
        all.min_by(f64::total_cmp)
    };
    // Passes that only write: a page that is read pays for no log.
    let writes: Vec<_> = runs
        .iter()
        .filter(|run| run.parameters.write_percent == 100)
        .flat_map(|run| run.ns_a_page(|phase| phase.starts_with("dirty ")))
        .collect();
    let (host, logged) = match (runs.first(), writes.is_empty()) {
        (Some(run), false) => (run.parameters.host.line.clone(), writes),
        _ => {
            let why = "--from: no run says what a logged write takes; it was made by an older \
                     version, or reads";
            return Err(Error::Usage(why.to_owned()));
        }
    };
    let logged_write_ns = logged.iter().sum::<f64>() / logged.len() as f64;
    Ok(Rates {
        host,
        write_ns: least(&|phase| phase == "pass after").filter(|ns| *ns < FAULT_NS),
        logged_write_ns,
        dirty_pages_per_second: 1e9 / logged_write_ns,
    })
}

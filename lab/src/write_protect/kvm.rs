//! `write-protect --on kvm`: the start of a log, protecting or with all pages in it.

use super::START_ALONE;
use crate::error::Error;
use crate::kvm::summary::{self, PhaseRow};
use crate::kvm::{self, Asked, Phases};
use crate::output::columns::{self, Cell, columns};
use crate::output::progress::Progress;
use crate::output::report::Report;

struct Row {
    how: &'static str,
    bytes: u64,
    leaf_bytes: u64,
    phases: Vec<PhaseRow>,
}

impl Row {
    fn of(&self, phase: &str) -> Option<&PhaseRow> {
        self.phases.iter().find(|row| row.phase == phase)
    }

    /// How long a phase took, where it was.
    fn time(&self, phase: &str) -> Cell {
        Cell::or_nothing(self.of(phase), |row| Cell::ns(row.wall))
    }

    fn faults(&self, phase: &str) -> Cell {
        let faults = self.of(phase).map(|row| row.count("pf_taken"));
        Cell::or_nothing(faults, |faults| Cell::Count(faults.unsigned_abs()))
    }
}

columns! { row: Row;
    ["how"] [1 ""] Cell::text(row.how);
    ["bytes"] [1 "memory"] Cell::Bytes(row.bytes);
    ["leaf_bytes"] [] Cell::Bytes(row.leaf_bytes);
    ["start_ns"] [1 "start"] Cell::ns(row.of("enable").map_or(0.0, |row| row.wall));
    ["start_cpu_ns"] [1 "CPU time"] Cell::ns(row.of("enable").map_or(0.0, |row| row.cpu));
    ["write_ns"] [1 "write" START_ALONE] row.time("write");
    ["read_ns"] [1 "read" START_ALONE] row.time("read");
    ["faults_of_writes"] [1 "faults,\nwriting" START_ALONE] row.faults("write");
    ["faults_of_reads"] [1 "reading" START_ALONE] row.faults("read");
    ["phases"] [] Cell::json(&row.phases);
}

/// Starts a log, by protecting and, where KVM can, by having all pages in it; prints what that
/// takes, and what it leaves. With `sizes` the start alone, for guests of these.
pub fn run(
    asked: &Asked,
    sizes: Option<&[u64]>,
    note: Option<String>,
    json: bool,
) -> Result<(), Error> {
    let host = kvm::host()?;
    let can = kvm::able()?;
    let ways = [("protect", false), ("all set", true)];
    let ways = &ways[..if can.all_set { 2 } else { 1 }];
    let own = [asked.bytes];
    // One bar for all of it; with the size that is asked for, reads are rounds of their own.
    let runs = sizes.map_or(2, <[u64]>::len) * ways.len();
    let mut progress = Progress::new(u64::from(asked.options.rounds()) * runs as u64);
    let mut rows = Vec::new();
    for &bytes in sizes.unwrap_or(&own) {
        for &(how, all_set) in ways {
            let manual = can.manual;
            let mut asked = Asked { bytes, manual, ..asked.clone() };
            asked.options.all_set = all_set;
            let mut then = |then| kvm::rounds(&asked, &mut progress, Phases::Start(then));
            let mut phases = then(sizes.is_none().then_some(true))?;
            if sizes.is_none() {
                let reads = then(Some(false))?.into_iter();
                phases.extend(reads.filter(|row| row.phase == "read"));
            }
            let leaf_bytes = asked.backing.source.bytes();
            rows.push(Row { how, bytes, leaf_bytes, phases });
        }
    }
    drop(progress);
    let mut warnings: Vec<_> = note.into_iter().collect();
    for warning in rows.iter().flat_map(|row| summary::warnings(&row.phases, &host)) {
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
    let report = Report {
        experiment: "write-protect",
        parameters: kvm::parameters(asked, &host),
        rows,
        warnings,
    };
    report.print(json, |report| kvm::head(asked, &host) + &columns::table(1, 1, &report.rows))
}

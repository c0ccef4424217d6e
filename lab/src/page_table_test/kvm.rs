//! `page-table-test --on kvm`: all vCPUs of a guest fault on one table.

use crate::error::Error;
use crate::kvm::summary::{self, PhaseRow};
use crate::kvm::{self, Asked, Phases};
use crate::output::columns::{Cell, columns};
use crate::output::progress::Progress;
use crate::output::report::Report;

/// The machine's figures, and all phases.
struct Row(Vec<PhaseRow>);

impl Row {
    fn time(&self, phases: &[&str]) -> Cell {
        let times = phases.iter().map(|phase| kvm::seconds(&self.0, phase));
        Cell::s(times.fold(0.0, |sum, time| sum + time))
    }
}

columns! { row: Row;
    ["how"] [] Cell::text("kvm");
    ["create_s"] [] row.time(&["create"]);
    ["update_s"] [] row.time(&["update", "update, read"]);
    ["rebuild_s"] [] row.time(&["rebuild"]);
    ["faults"] [] Cell::json(row.0.iter().map(|row| row.count("pf_taken")).sum::<i64>());
    ["phases"] [] Cell::json(&row.0);
}

pub fn run(asked: &Asked, json: bool) -> Result<(), Error> {
    let host = kvm::host()?;
    let mut progress = Progress::new(asked.options.rounds().into());
    let phases = kvm::rounds(asked, &mut progress, Phases::Faults)?;
    drop(progress);
    let report = Report {
        experiment: "page-table-test",
        parameters: kvm::parameters(asked, &host),
        warnings: summary::warnings(&phases, &host),
        rows: vec![Row(phases)],
    };
    report.print(json, |report| {
        let shown = report.rows.iter().map(|row| summary::shown(&row.0));
        kvm::head(asked, &host) + &shown.collect::<String>()
    })
}

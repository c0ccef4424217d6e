//! `dirty-log --on kvm`: the same phases with real vCPUs, and one more pass after disabling.

use serde_json::Value;
use tablewright_machine::Profile;

use super::measured::{self, Compared, Measured};
use super::run::run as simulate;
use crate::error::Error;
use crate::kvm::summary::{self, PhaseRow};
use crate::kvm::{self, Asked, HostKind};
use crate::output::columns::{Cell, columns};
use crate::output::report::{self, Report};
use crate::stats;

/// The machine's figures, and all phases.
struct Row {
    cleared: &'static str,
    phases: Vec<PhaseRow>,
    predicted: Vec<Compared>,
}

impl Row {
    fn disabled(&self) -> Option<&PhaseRow> {
        self.phases.iter().find(|row| row.phase == "disable")
    }

    /// A stall while logging is disabled, in a unit of so many nanoseconds.
    fn stall(&self, of: fn(&PhaseRow) -> Option<f64>, unit: f64) -> Cell {
        Cell::json(self.disabled().and_then(of).map(|time| time / unit))
    }

    fn count(&self, name: &str) -> Cell {
        Cell::json(self.disabled().map_or(0, |row| row.count(name)))
    }

    /// Of each iteration, seconds.
    fn each(&self, name: &str) -> Cell {
        let of = self.phases.iter().filter(|row| {
            let number = row.phase.strip_prefix(name).map(str::trim);
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        });
        Cell::json(of.map(|row| row.wall / 1e9).collect::<Vec<_>>())
    }
}

columns! { row: Row;
    ["how"] [] Cell::text("kvm");
    ["populate_s"] [] Cell::s(kvm::seconds(&row.phases, "populate"));
    ["enable_s"] [] Cell::s(kvm::seconds(&row.phases, "enable"));
    ["dirty_s"] [] row.each("dirty");
    ["get_s"] [] row.each("get");
    ["clear_s"] [] row.each(row.cleared);
    ["disable_s"] [] Cell::s(kvm::seconds(&row.phases, "disable"));
    ["stall_longest_us"] [] row.stall(|row| row.stall_longest, 1e3);
    ["stall_p999_us"] [] row.stall(|row| row.stall_p999, 1e3);
    ["stall_total_s"] [] row.stall(|row| row.stall_total, 1e9);
    ["faults"] [] row.count("pf_taken");
    ["flushes"] [] row.count("remote_tlb_flush");
    ["phases"] [] Cell::json(&row.phases);
    ["predicted"] [] match row.predicted.is_empty() {
        true => Cell::Absent,
        false => Cell::json(&row.predicted),
    };
}

/// Logs what a guest writes, and prints what that takes.
pub fn run(asked: &Asked, json: bool) -> Result<(), Error> {
    let host = kvm::host()?;
    let prediction = predict(asked, &host, json)?;
    let phases = kvm::measure(asked)?;
    let mut warnings = summary::warnings(&phases, &host);
    warnings.extend(stats::build_warning());
    let cleared = if asked.options.ring.is_some() { "reset" } else { "clear" };
    let measured: Measured = measured::of(asked, &host, &phases);
    let compared = |prediction: Vec<_>| measured::compare(&measured, &prediction, false);
    let report: Report<Value, Row> = Report {
        experiment: "dirty-log",
        parameters: kvm::parameters(asked, &host),
        rows: vec![Row {
            cleared,
            predicted: prediction.map(compared).unwrap_or_default(),
            phases,
        }],
        warnings,
    };
    report.print(json, |report| {
        let mut text = kvm::head(asked, &host);
        for row in &report.rows {
            text += &summary::shown(&row.phases);
            if !row.predicted.is_empty() {
                text += &format!("\n{}", measured::compared(&row.predicted));
            }
        }
        text
    })
}

/// Predicts a run by a profile, and prints that before the run is made.
fn predict(
    asked: &Asked,
    host: &HostKind,
    json: bool,
) -> Result<Option<Vec<(String, f64)>>, Error> {
    let Some(name) = &asked.options.predict else {
        return Ok(None);
    };
    let profile = Profile::load(name)?;
    let job = measured::of(asked, host, &[]).parameters.job(&profile)?;
    let predicted = measured::phases(&simulate(&job)?);
    if !json {
        let cells = predicted.iter().map(|(phase, time)| [phase.clone(), report::time(*time)]);
        let table = report::table(["predicted", "CPU time"], 1, cells.collect());
        report::print(&format!("{table}\n"))?;
    }
    Ok(Some(predicted))
}

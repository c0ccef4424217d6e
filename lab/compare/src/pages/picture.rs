//! The comparison as lines: a panel for each operation and format, nanoseconds for each page
//! against the pages in a call.

use super::subject::Operation;
use super::{BARE, Parameters, Row};
use crate::plot::{Chart, Line, Panel, Role};
use crate::report::{self, Report};

/// What is measured where hardware sets no flags.
pub fn of(report: &Report<Parameters, Row>) -> Chart {
    let parameters = &report.parameters;
    let rounds = report::counted(u64::from(parameters.rounds), "round", "rounds");
    let mut panels = Vec::new();
    for operation in [
        Operation::Map,
        Operation::Protect,
        Operation::Unmap,
        Operation::Query,
    ] {
        for &format in &parameters.formats {
            let rows = report.rows.iter().filter(|row| {
                row.operation == operation && row.format == format && !row.hardware_flags
            });
            panels.push(Panel {
                name: format!("{}, {}", operation.name(), format.name()),
                lines: lines(rows),
            });
        }
    }
    Chart {
        title: "Nanoseconds for each page, by the pages in a call".to_owned(),
        subtitle: format!(
            "Tables exist; median of {rounds}; both scales are logarithmic; lower is better"
        ),
        across: "pages in a call".to_owned(),
        panels,
        notes: vec![
            "bare: a bare walk to the last table, and the accesses".to_owned(),
            "Hardware sets no flags. Software only: no barrier and no invalidation is timed."
                .to_owned(),
        ],
    }
}

fn lines<'r>(rows: impl Iterator<Item = &'r Row>) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let point = (row.pages as f64, row.ns_per_call / row.pages as f64);
        match lines.iter_mut().find(|line| line.name == row.name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name: row.name.to_owned(),
                role: match row.name {
                    _ if row.is_ours() => Role::Ours,
                    name if name == BARE.name => Role::Bare,
                    _ => Role::Other,
                },
                points: vec![point],
            }),
        }
    }
    lines
}

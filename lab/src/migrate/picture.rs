//! The rounds as bars: a group for each kind of logging.

use super::{Parameters, Row, head};
use crate::plot::{Bar, Group, Picture};
use crate::report::{self, Report};

/// So many rounds of each are drawn.
const MOST: usize = 8;

/// Pages that are to be sent when each round begins.
pub fn of(report: &Report<Parameters, Row>) -> Picture {
    let groups = report.rows.iter().map(|row| {
        let bars = row.rounds.iter().enumerate().take(MOST);
        Group {
            name: row.logging.name().to_owned(),
            bare: None,
            bars: bars
                .map(|(number, round)| Bar {
                    name: format!("{}: {}", number + 1, report::time(round.at_ms * 1e6)),
                    value: round.remaining_pages as f64 / 1e3,
                    ours: true,
                })
                .collect(),
        }
    });
    let cut = report.rows.iter().any(|row| row.rounds.len() > MOST);
    let mut notes: Vec<String> = head(&report.parameters)
        .lines()
        .map(str::to_owned)
        .collect();
    if cut {
        notes.push(format!("The first {MOST} rounds of each."));
    }
    Picture {
        title: "Thousands of pages to be sent, round by round".to_owned(),
        subtitle: "Each round: its number, and when it began".to_owned(),
        unit: "1000 pages".to_owned(),
        groups: groups.collect(),
        notes,
    }
}

//! How long disabling takes, and the longest stall, as bars: a group for each way.

use super::{Parameters, Row};
use crate::plot::{Bar, Group, Picture};
use crate::report::Report;

pub fn of(report: &Report<Parameters, Row>) -> Picture {
    let bar = |name: &str, value, ours| Bar {
        name: name.to_owned(),
        value,
        ours,
    };
    let groups = report.rows.iter().map(|row| {
        let published = row.published.map(|it| bar("published", it, false));
        let fitted = if row.fitted { " (fitted)" } else { "" };
        Group {
            name: row.how.to_owned(),
            bare: None,
            bars: published
                .into_iter()
                .chain([
                    bar(&format!("disabling{fitted}"), row.disable, true),
                    bar("longest stall", row.stall_longest_us / 1e6, true),
                ])
                .collect(),
        }
    });
    Picture {
        title: "Disabling a dirty log".to_owned(),
        subtitle: super::head(&report.parameters),
        unit: "s".to_owned(),
        groups: groups.collect(),
        notes: Vec::new(),
    }
}

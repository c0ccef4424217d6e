//! The answer as a page: a table, a picture of each problem, and the notes.

use std::fmt::Write;

use super::rows::{Parameters, Row};
use crate::output::page::{self, Bar, Group, Of, Table, escaped};
use crate::output::report::{self, Report};
use crate::size::human;

const COLUMNS: [&str; 5] = ["problem", "here", "extrapolated", "with the change", "tablewright"];

/// The page as a text.
pub fn of(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let host = parameters.host.as_ref().map(|host| host.line.as_str());
    let host = match (host, &parameters.no_guests) {
        (host, Some(why)) => format!("{} No guest could be run: {why}", host.unwrap_or_default()),
        (host, None) => host.unwrap_or_default().to_owned(),
    };
    let mut body = format!(
        "<p>{}</p>\n<p>Extrapolated to a guest of {} with {} vCPUs.</p>\n",
        escaped(&host),
        human(parameters.guest_bytes),
        parameters.vcpus,
    );
    let optional = |time: Option<f64>| time.map_or("-".to_owned(), report::time);
    let mut table = Table::new(&COLUMNS);
    for row in &report.rows {
        let here = row.here.map(|time| format!("{} / {}", report::time(time), row.for_each));
        let cells = [
            row.problem.to_owned(),
            here.unwrap_or("-".to_owned()),
            optional(row.there),
            optional(row.with_change),
            optional(row.tablewright),
        ];
        table.row(&cells, "");
    }
    body.push_str(&table.finish());
    for row in &report.rows {
        // Writing to a string cannot fail.
        let _ = writeln!(body, "<h2>{}</h2>\n<p>{}</p>", escaped(row.problem), escaped(&row.note));
        let bars = bars(row);
        if bars.len() > 1 {
            let group = Group { name: String::new(), bars };
            body.push_str(&page::bars("shorter is better", &[group], report::time));
        }
    }
    page::around("This computer", &body)
}

fn bars(row: &Row) -> Vec<Bar> {
    let bar = |name: &str, value: Option<f64>, of| {
        let name = name.to_owned();
        value.map(|value| Bar { name, value, of })
    };
    [
        bar("extrapolated", row.there, Of::Others),
        bar("with the change", row.with_change, Of::Machine),
        bar("tablewright", row.tablewright, Of::Tablewright),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_fits_screens() {
        let row = |problem, here| Row {
            problem,
            here,
            for_each: "page",
            there: here,
            with_change: here,
            tablewright: Some(12_345.0),
            note: "published elsewhere; ".repeat(40),
        };
        let report = Report {
            experiment: "doctor",
            parameters: Parameters {
                guest_bytes: 2 << 40,
                vcpus: 416,
                host: None,
                no_guests: Some("/dev/kvm: no such file".to_owned()),
            },
            rows: vec![row("a longer name of a problem", Some(1e9)), row("b", None)],
            warnings: Vec::new(),
        };
        let text = of(&report);
        assert_eq!(text.matches("<figure").count(), 1);
        page::tests::fits_screens(&text);
    }
}

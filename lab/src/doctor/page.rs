//! The answer as a page: its source, a table, a picture of each problem, and the notes.

use std::fmt::Write;

use super::rows::{Origin, Parameters, Row};
use crate::output::page::{self, Bar, Group, Of, Table, escaped, prose};
use crate::output::report::{self, Report};
use crate::size::human;

/// Name of the page, and of the same as JSON.
pub const PAGE: &str = "doctor.html";
pub const JSON: &str = "doctor.json";

const COLUMNS: [&str; 5] = ["problem", "here", "extrapolated", "with the change", "tablewright"];

/// The page as a text.
pub fn of(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let host = parameters.host.as_ref().map(|host| host.line.as_str());
    let host = match (host, &parameters.no_guests) {
        (host, Some(why)) => format!("{} No guest could be run: {why}", host.unwrap_or_default()),
        (host, None) => host.unwrap_or_default().to_owned(),
    };
    let Origin { computer, processor, cpus, at, version, command } = &parameters.measured;
    let mut body = format!(
        "<p class=\"about\">{}, {} of {}; {at}; Tablewright {version}, <code>{}</code>, \
         <a href=\"{JSON}\">{JSON}</a></p>\n<p>{}</p>\n",
        escaped(computer),
        report::counted(*cpus as u64, "CPU", "CPUs"),
        escaped(processor),
        escaped(command),
        prose(&host),
    );
    if !report.warnings.is_empty() {
        let item = |warning: &String| format!("<li>{}</li>\n", prose(warning));
        let items: String = report.warnings.iter().map(item).collect();
        body += &format!("<ul class=\"warnings\">\n{items}</ul>\n");
    }
    body += &format!(
        "<p>Measured here, extrapolated to a guest of {} with {} vCPUs. A dash has its reason \
         below.</p>\n",
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
        let _ = writeln!(body, "<h2>{}</h2>\n<p>{}</p>", escaped(row.problem), prose(&row.note));
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
                measured: Origin::here(),
                guest_bytes: 2 << 40,
                vcpus: 416,
                host: None,
                no_guests: Some("/dev/kvm: no such file".to_owned()),
            },
            rows: vec![row("a longer name of a problem", Some(1e9)), row("b", None)],
            warnings: vec!["it is <busy>: see `--rounds`".to_owned()],
        };
        let text = of(&report);
        assert_eq!(text.matches("<figure").count(), 1);
        // The terminal's warnings, and the source of the figures.
        assert!(text.contains("<li>it is &lt;busy&gt;: see <code>--rounds</code></li>"), "{text}");
        let Origin { at, version, .. } = &report.parameters.measured;
        assert!(text.contains(at.as_str()) && text.contains(version), "{text}");
        assert!(text.contains("doctor.json") && !text.contains('`'), "{text}");
        page::tests::fits_screens(&text);
    }
}

//! The same as a page: a table, a picture of each problem, and the notes.

use std::fmt::Write;

use super::rows::{Parameters, Row};
use crate::error::Error;
use crate::plot::{Bar, Group, Picture};
use crate::report::{self, Report};
use crate::reproduce::page::{STYLE, escaped};
use crate::size::human;

/// The page as a text.
pub fn of(report: &Report<Parameters, Row>) -> Result<String, Error> {
    let parameters = &report.parameters;
    let host = parameters.host.as_ref().map(|host| host.line.as_str());
    let host = host.or(parameters.no_guests.as_deref()).unwrap_or_default();
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width\"/>\n<title>Tablewright: this computer</title>\n\
         <style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>This computer</h1>\n<p>{}</p>\n\
         <p>Extrapolated to a guest of {} with {} vCPUs.</p>\n",
        escaped(host),
        human(parameters.guest_bytes),
        parameters.vcpus,
    );
    page.push_str(
        "<table>\n<tr><th>problem</th><th>here</th><th>extrapolated</th><th>with the change</th><th>tablewright</th></tr>\n",
    );
    let optional = |time: Option<f64>| time.map_or("-".to_owned(), report::time);
    for row in &report.rows {
        let cells = [
            escaped(row.problem),
            row.here.map_or("-".to_owned(), |time| {
                format!("{} / {}", report::time(time), escaped(row.for_each))
            }),
            optional(row.there),
            optional(row.with_change),
            optional(row.tablewright),
        ];
        // Writing to a string cannot fail.
        let _ = writeln!(page, "<tr><td>{}</td></tr>", cells.join("</td><td>"));
    }
    page.push_str("</table>\n");
    for row in &report.rows {
        let _ = writeln!(
            page,
            "<h2>{}</h2>\n<p>{}</p>",
            escaped(row.problem),
            escaped(&row.note)
        );
        if let Some(picture) = picture(row) {
            let svg = picture.svg()?;
            // Inside a page, an SVG has no header of its own.
            page.push_str(&svg[svg.find("<svg").unwrap_or(0)..]);
        }
    }
    page += "</body>\n</html>\n";
    Ok(page)
}

fn picture(row: &Row) -> Option<Picture> {
    let bar = |name: &str, value: Option<f64>, ours| {
        value.map(|value| Bar {
            name: name.to_owned(),
            value: value / 1e6,
            ours,
        })
    };
    let bars: Vec<Bar> = [
        bar("extrapolated", row.there, false),
        bar("with the change", row.with_change, false),
        bar("tablewright", row.tablewright, true),
    ]
    .into_iter()
    .flatten()
    .collect();
    (bars.len() > 1).then(|| Picture {
        title: row.problem.to_owned(),
        subtitle: "shorter is better".to_owned(),
        unit: "ms".to_owned(),
        groups: vec![Group {
            name: String::new(),
            limit: None,
            bars,
        }],
        notes: Vec::new(),
    })
}

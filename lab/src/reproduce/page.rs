//! The report: one page with a section for each experiment.

use std::fmt::Write;

use crate::output::page::{self, Bar, Group, Of, Table, escaped};
use crate::output::report::percent;
use crate::published::Reproduced as Row;

/// Of a table; the second is left out where all rows have the same figure, which the picture above
/// them names.
const COLUMNS: [&str; 9] = [
    "configuration",
    "figure",
    "published before",
    "published after",
    "machine before",
    "machine after",
    "tablewright",
    "error",
    "fitted",
];

/// The page as a text.
pub fn of(rows: &[Row]) -> String {
    let mut body = format!(
        "<p>Each published figure, and beside it what tablewright {version} measures for the same \
         row. <em>fitted</em> says whether the costs of the machine were fitted on that row; every \
         other row is a test of the model.</p>\n",
        version = env!("CARGO_PKG_VERSION"),
    );
    for rows in rows.chunk_by(|a, b| a.experiment == b.experiment) {
        section(&mut body, rows);
    }
    page::around("Published and measured", &body)
}

fn section(page: &mut String, rows: &[Row]) {
    let name = escaped(rows[0].experiment);
    // Writing to a string cannot fail.
    let _ = writeln!(page, "<section id=\"{name}\">\n<h2>{name}</h2>");
    for column in rows.chunk_by(|a, b| a.figure.system == b.figure.system) {
        let _ = writeln!(page, "<h3>{}</h3>", escaped(&column[0].figure.system));
        // What is not counted alike has no axis in common.
        for rows in column.chunk_by(|a, b| a.figure.unit == b.figure.unit) {
            let (caption, groups) = groups(rows);
            if !groups.is_empty() {
                page.push_str(&page::bars(&caption, &groups, |value| {
                    rows[0].figure.shown(Some(value))
                }));
            }
        }
        let same = said_of_all(column);
        if !same.is_empty() {
            let _ = writeln!(page, "<p class=\"about\">{}</p>", escaped(same));
        }
        let has_picture = column.iter().any(|row| row.after.is_some());
        let is_one_figure =
            has_picture && column.iter().all(|row| row.figure.metric == column[0].figure.metric);
        let columns: Vec<&str> =
            COLUMNS.into_iter().filter(|&name| name != "figure" || !is_one_figure).collect();
        let mut table = Table::new(&columns);
        for row in column {
            let mut cells = vec![row.figure.configuration.clone()];
            if !is_one_figure {
                cells.push(row.figure.metric.clone());
            }
            cells.extend(row.figures());
            cells.extend([
                row.error_percent.map_or("-".to_owned(), percent),
                match (row.error_percent, row.fitted) {
                    (None, _) => "-",
                    (Some(_), true) => "yes",
                    (Some(_), false) => "no",
                }
                .to_owned(),
            ]);
            let note = row.note.strip_prefix(same).unwrap_or(&row.note);
            table.row(&cells, note.trim_start_matches("; "));
        }
        page.push_str(&table.finish());
    }
    page.push_str("</section>\n");
}

/// How all notes of a column begin, up to the first semicolon: where it was run.
fn said_of_all(column: &[Row]) -> &str {
    let start = |row: &'_ Row| row.note.split("; ").next().map(str::to_owned);
    let first = column[0].note.split("; ").next().unwrap_or_default();
    match column.iter().all(|row| start(row).as_deref() == Some(first)) {
        true => first,
        false => "",
    }
}

/// Published and measured bars for each row that was measured, and what is to be said of all.
fn groups(rows: &[Row]) -> (String, Vec<Group>) {
    let bar = |name: &str, value, of| Bar { name: name.to_owned(), value, of };
    let first = &rows[0];
    let one_metric = rows.iter().all(|row| row.figure.metric == first.figure.metric);
    let mut groups: Vec<Group> = rows
        .iter()
        .filter_map(|row| {
            let fitted = if row.fitted { " (fitted)" } else { "" };
            let configuration = row.figure.configuration.trim_start_matches("cumulative up to ");
            let mut bars = vec![
                bar("published", row.figure.after?, Of::Others),
                bar(&format!("machine{fitted}"), row.after?, Of::Machine),
            ];
            if !one_metric {
                let ours = row.tablewright;
                bars.extend(ours.map(|ours| bar("tablewright", ours, Of::Tablewright)));
            }
            Some(Group {
                name: if one_metric {
                    configuration.to_owned()
                } else {
                    format!("{}: {configuration}", row.figure.metric)
                },
                bars,
            })
        })
        .collect();
    // Where all rows are steps to one figure, the engine has one.
    if let Some(ours) = rows.iter().find_map(|row| row.tablewright).filter(|_| one_metric) {
        groups.push(Group {
            name: "all of it".to_owned(),
            bars: vec![bar("tablewright", ours, Of::Tablewright)],
        });
    }
    // In brackets is what the table says as well.
    let unit = first.figure.unit.split(" (").next().unwrap_or_default();
    let better = match unit {
        "s" | "ms" | "us" | "ns" => Some("shorter is better"),
        _ => None,
    };
    let metric = Some(first.figure.metric.as_str()).filter(|_| one_metric);
    let caption: Vec<&str> = metric.into_iter().chain(better.or(Some(unit))).collect();
    (caption.join("; "), groups)
}

#[cfg(test)]
mod tests {
    use super::super::{quick, reproduce};
    use super::*;

    #[test]
    fn the_page_is_well_formed_and_fetches_nothing() {
        let mut rows = reproduce(&[], quick()).unwrap();
        rows[0].note = "<b> & \"quoted\"".to_owned();
        rows[0].figure.system = "a <b> & c".to_owned();
        let page = of(&rows);
        let document = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document =
            roxmltree::Document::parse_with_options(&page, document).expect("well-formed");
        let named = |name: &'static str| {
            let nodes = document.descendants();
            nodes.filter(move |node| node.tag_name().name() == name)
        };
        let sections: Vec<_> = named("section").map(|node| node.attribute("id").unwrap()).collect();
        let names: Vec<_> = crate::published::EXPERIMENTS.iter().map(|(name, _)| *name).collect();
        assert_eq!(sections, names);
        // One for each system of the linear map, the first of which is now two, one for stage 2,
        // one for flushes, one for the end of a log, five for its phases, and one for each of the
        // three units of its start.
        assert_eq!(named("figure").count(), 21);
        let lines = named("tr").filter(|row| row.attribute("class") != Some("about"));
        let lines = lines.count() - named("table").count();
        assert_eq!(lines, rows.len());
        assert_eq!(named("script").count() + named("link").count() + named("img").count(), 0);
        assert!(page.contains("&lt;b&gt; &amp; &quot;quoted&quot;"));
        page::tests::fits_screens(&page);
        for node in document.descendants() {
            for name in ["src", "href"] {
                assert!(node.attribute(name).is_none(), "{node:?}");
            }
        }
    }

    #[test]
    fn what_was_not_measured_has_no_picture() {
        let mut rows = reproduce(&["tlb-flush".to_owned()], quick()).unwrap();
        for row in &mut rows {
            row.after = None;
        }
        assert!(!of(&rows).contains("<figure"));
    }
}

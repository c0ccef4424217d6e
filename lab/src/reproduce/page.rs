//! The report: one page with a section for each experiment, its pictures inside it, and nothing to fetch.
//!
//! The page is well-formed XML as well as HTML, so that a program can read it.

use std::fmt::Write;

use super::{Parameters, Row, figure};
use crate::error::Error;
use crate::map_mem::machine::percent;
use crate::plot::{Bar, Group, Picture};
use crate::report::Report;

/// A page that is to be read, also where it is dark, and printed.
pub const STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2), td.note { text-align: left; }
td.note { font-size: 12px; max-width: 24rem; }
svg { max-width: 100%; height: auto; margin: 1rem 0; }";

/// The page as a text.
pub(super) fn of(report: &Report<Parameters, Row>) -> Result<String, Error> {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width\"/>\n<title>Tablewright: published and measured</title>\n\
         <style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>Published and measured</h1>\n\
         <p>Each published figure, and beside it what tablewright {version} measures for the same row. <em>fitted</em> \
         says whether the costs of the machine were fitted on that row; every other row is a test of the model.</p>\n",
        version = env!("CARGO_PKG_VERSION"),
    );
    for rows in report.rows.chunk_by(|a, b| a.experiment == b.experiment) {
        section(&mut page, rows)?;
    }
    page += "</body>\n</html>\n";
    Ok(page)
}

fn section(page: &mut String, rows: &[Row]) -> Result<(), Error> {
    let name = escaped(rows[0].experiment);
    // Writing to a string cannot fail.
    let _ = writeln!(page, "<section id=\"{name}\">\n<h2>{name}</h2>");
    for column in rows.chunk_by(|a, b| a.system == b.system) {
        let _ = writeln!(page, "<h3>{}</h3>", escaped(&column[0].system));
        // What is not counted alike has no axis in common.
        let pictures = column.chunk_by(|a, b| a.unit == b.unit).filter_map(picture);
        for picture in pictures {
            let svg = picture.svg()?;
            // Inside a page, an SVG has no header of its own.
            let start = svg.find("<svg").unwrap_or(0);
            page.push_str(&svg[start..]);
        }
        page.push_str(
            "<table>\n<tr><th>configuration</th><th>figure</th><th>published before</th><th>published after</th><th>before</th>\
             <th>after</th><th>tablewright</th><th>error</th><th>fitted</th><th>note</th></tr>\n",
        );
        for row in column {
            let cells = [
                escaped(&row.configuration),
                escaped(&row.metric),
                figure(row.published_before, &row.unit),
                figure(row.published_after, &row.unit),
                figure(row.before, &row.unit),
                figure(row.after, &row.unit),
                figure(row.tablewright, &row.unit),
                row.error_percent.map_or("-".to_owned(), percent),
                match (row.error_percent, row.fitted) {
                    (None, _) => "-",
                    (Some(_), true) => "yes",
                    (Some(_), false) => "no",
                }
                .to_owned(),
            ];
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td class=\"note\">{}</td></tr>",
                cells.join("</td><td>"),
                escaped(&row.note)
            );
        }
        page.push_str("</table>\n");
    }
    page.push_str("</section>\n");
    Ok(())
}

/// Published and measured bars for each row that was measured.
fn picture(rows: &[Row]) -> Option<Picture> {
    let bar = |name: &str, value, ours| Bar {
        name: name.to_owned(),
        value,
        ours,
    };
    let first = rows.first()?;
    let one_metric = rows.iter().all(|row| row.metric == first.metric);
    let mut groups: Vec<Group> = rows
        .iter()
        .filter_map(|row| {
            let fitted = if row.fitted { " (fitted)" } else { "" };
            let configuration = row.configuration.trim_start_matches("cumulative up to ");
            let mut bars = vec![
                bar("published", row.published_after?, false),
                bar(&format!("machine{fitted}"), row.after?, true),
            ];
            if !one_metric {
                bars.extend(row.tablewright.map(|ours| bar("tablewright", ours, true)));
            }
            Some(Group {
                name: if one_metric {
                    configuration.to_owned()
                } else {
                    format!("{}: {configuration}", row.metric)
                },
                limit: None,
                bars,
            })
        })
        .collect();
    // Where all rows are steps to one figure, the engine has one.
    if let Some(ours) = rows
        .iter()
        .find_map(|row| row.tablewright)
        .filter(|_| one_metric)
    {
        groups.push(Group {
            name: "tablewright".to_owned(),
            limit: None,
            bars: vec![bar("machine", ours, true)],
        });
    }
    // In brackets is what the table says as well.
    let unit = first.unit.split(" (").next().unwrap_or_default();
    let better = match unit {
        "s" | "ms" | "us" | "ns" => Some("shorter is better"),
        _ => None,
    };
    let metric = Some(first.metric.as_str()).filter(|_| one_metric);
    let subtitle: Vec<&str> = metric.into_iter().chain(better).collect();
    (!groups.is_empty()).then(|| Picture {
        title: first.system.clone(),
        subtitle: subtitle.join("; "),
        unit: unit.to_owned(),
        groups,
        notes: Vec::new(),
    })
}

/// Text as it stands in a page.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::{quick, reproduce};
    use super::*;

    #[test]
    fn the_page_is_well_formed_and_fetches_nothing() {
        let mut report = reproduce(&[], quick()).unwrap();
        report.rows[0].note = "<b> & \"quoted\"".to_owned();
        report.rows[0].system = "a <b> & c".to_owned();
        let page = of(&report).unwrap();
        let document = roxmltree::ParsingOptions {
            allow_dtd: true,
            ..Default::default()
        };
        let document =
            roxmltree::Document::parse_with_options(&page, document).expect("well-formed");
        let named = |name: &'static str| {
            let nodes = document.descendants();
            nodes.filter(move |node| node.tag_name().name() == name)
        };
        let sections: Vec<_> = named("section")
            .map(|node| node.attribute("id").unwrap())
            .collect();
        let names: Vec<_> = crate::published::EXPERIMENTS
            .iter()
            .map(|(name, _)| *name)
            .collect();
        assert_eq!(sections, names);
        // One for each system of the linear map, the first of which is now two, one for stage 2, one for flushes, one for
        // the end of a log, and one for each of the three units of its start.
        assert_eq!(named("svg").count(), 16);
        let rows = named("tr").count() - named("table").count();
        assert_eq!(rows, report.rows.len());
        assert_eq!(
            named("script").count() + named("link").count() + named("img").count(),
            0
        );
        assert!(page.contains("&lt;b&gt; &amp; &quot;quoted&quot;"));
        for node in document.descendants() {
            for name in ["src", "href"] {
                assert!(node.attribute(name).is_none(), "{node:?}");
            }
        }
    }

    #[test]
    fn what_was_not_measured_has_no_picture() {
        let mut report = reproduce(&["tlb-flush".to_owned()], quick()).unwrap();
        for row in &mut report.rows {
            row.after = None;
        }
        assert!(!of(&report).unwrap().contains("<svg"));
    }
}

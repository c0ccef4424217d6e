//! The comparison as a picture: bars of one range, or lines of scattered calls by their pages.

use crate::compare::rows::{Report, Row, kind_of_memory};
use crate::compare::subject::Operation;
use crate::error::Error;
use crate::memory::arena::Memory;
use crate::output::plot::{Bar, Chart, Group, Line, Panel, Picture, Role};
use crate::size::human;

/// The SVG file.
pub fn svg(report: &Report) -> Result<String, Error> {
    match report.parameters.pages.is_empty() {
        true => bars(report).svg(),
        false => lines(report).svg(),
    }
}

/// A group for each operation that every crate has, of the first kind of memory that was measured.
fn bars(report: &Report) -> Picture {
    let parameters = &report.parameters;
    let memory = parameters.memory.first().copied().unwrap_or(Memory::Warm);
    let group_of = |operation| {
        let of = |row: &&Row| row.memory == Some(memory) && row.operation == operation;
        let rows: Vec<&Row> = report.rows.iter().filter(of).collect();
        group(operation, &rows)
    };
    Picture {
        title: format!(
            "Nanoseconds for each page: {} of 4 KiB pages",
            human(parameters.size_bytes.unwrap_or(0))
        ),
        subtitle: format!(
            "Table memory {}; median of {}; shorter is better",
            kind_of_memory(memory),
            parameters.rounds()
        ),
        unit: "ns for each page".to_owned(),
        groups: [Operation::Map, Operation::Protect, Operation::Unmap]
            .into_iter()
            .filter_map(group_of)
            .collect(),
        notes: vec![
            "bare: plain loads and stores to the same bytes; of map, each table zeroed and then \
             filled"
                .to_owned(),
            "Software only: no processor uses these tables, so no barrier and no invalidation is \
             timed."
                .to_owned(),
        ],
    }
}

/// A bar for each crate, by the faster of its ways. `None` without a bare loop.
fn group(operation: Operation, rows: &[&Row]) -> Option<Group> {
    let bare = rows.iter().find(|row| row.is_bare())?.ns();
    let mut bars: Vec<Bar> = Vec::new();
    for row in rows.iter().filter(|row| !row.is_bare()) {
        let name = format!("{} {}", row.name, row.version);
        match bars.iter_mut().find(|bar| bar.name == name) {
            Some(bar) => bar.value = bar.value.min(row.ns()),
            None => bars.push(Bar { name, value: row.ns(), ours: row.is_ours() }),
        }
    }
    bars.sort_by(|a, b| a.value.total_cmp(&b.value));
    Some(Group { name: operation.name().to_owned(), bare: Some(bare), bars })
}

/// A panel for each operation and format, without hardware flags.
fn lines(report: &Report) -> Chart {
    let parameters = &report.parameters;
    let mut panels = Vec::new();
    for operation in [Operation::Map, Operation::Protect, Operation::Unmap, Operation::Query] {
        for &format in &parameters.formats {
            let rows = report.rows.iter().filter(|row| {
                row.operation == operation
                    && row.format == Some(format)
                    && row.hardware_flags == Some(false)
            });
            panels.push(Panel {
                name: format!("{}, {}", operation.name(), format.name()),
                lines: lines_of(rows),
            });
        }
    }
    Chart {
        title: "Nanoseconds for each page, by the pages in a call".to_owned(),
        subtitle: format!(
            "Tables exist; median of {}; both scales are logarithmic; lower is better",
            parameters.rounds()
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

fn lines_of<'r>(rows: impl Iterator<Item = &'r Row>) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let pages = row.pages.unwrap_or(1) as f64;
        let point = (pages, row.ns() / pages);
        match lines.iter_mut().find(|line| line.name == row.name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name: row.name.to_owned(),
                role: match row {
                    _ if row.is_ours() => Role::Ours,
                    _ if row.is_bare() => Role::Bare,
                    _ => Role::Other,
                },
                points: vec![point],
            }),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::rows::row;
    use crate::compare::subject::{BARE, OURS};

    #[test]
    fn the_faster_way_counts_and_the_fastest_comes_first() {
        let row =
            |name, method, ns| Row { version: "1", ..row(name, Operation::Unmap, method, ns) };
        let rows = [
            row(BARE, "", 0.1),
            row("slow", "", 9.0),
            row("two", "a", 4.0),
            row("two", "b", 2.0),
            row(OURS, "", 1.0),
        ];
        let rows: Vec<&Row> = rows.iter().collect();
        let group = group(Operation::Unmap, &rows).unwrap();
        assert_eq!(group.bare, Some(0.1));
        let bars = group.bars.iter();
        let bars = bars.map(|bar| (bar.name.as_str(), bar.value, bar.ours));
        assert!(bars.eq([
            ("tablewright 1", 1.0, true),
            ("two 1", 2.0, false),
            ("slow 1", 9.0, false)
        ]));
        assert!(super::group(Operation::Unmap, &rows[1..]).is_none());
    }
}

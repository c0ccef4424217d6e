//! The comparison as bars: a group for each operation that every crate has.

use super::candidates::BARE;
use super::subject::{OURS, Operation};
use super::{Parameters, Row};
use crate::arena::Memory;
use crate::plot::{Bar, Group, Picture};
use crate::report::{self, Report};
use crate::size::human;

const OPERATIONS: [Operation; 3] = [Operation::Map, Operation::Protect, Operation::Unmap];

/// Bars of the first kind of memory that was measured. Of a crate with two ways to do the same, the
/// faster.
pub fn of(report: &Report<Parameters, Row>) -> Picture {
    let parameters = &report.parameters;
    let memory = parameters.memory.first().copied().unwrap_or(Memory::Warm);
    let kind = match memory {
        Memory::Warm => "warm",
        Memory::Cold => "cold",
    };
    Picture {
        title: format!(
            "Nanoseconds for each page: {} of 4 KiB pages",
            human(parameters.size_bytes)
        ),
        subtitle: format!(
            "Table memory {kind}; median of {}; shorter is better",
            report::counted(u64::from(parameters.rounds), "round", "rounds")
        ),
        unit: "ns for each page".to_owned(),
        groups: OPERATIONS
            .into_iter()
            .filter_map(|operation| {
                let rows: Vec<&Row> = report
                    .rows
                    .iter()
                    .filter(|row| row.memory == memory && row.operation == operation)
                    .collect();
                group(operation, &rows)
            })
            .collect(),
        notes: vec![
            "bare: plain loads and stores to the same bytes; of map, each table zeroed and then filled".to_owned(),
            "Software only: no processor uses these tables, so no barrier and no invalidation is timed.".to_owned(),
        ],
    }
}

/// `None` without a bare loop.
fn group(operation: Operation, rows: &[&Row]) -> Option<Group> {
    let bare = rows.iter().find(|row| row.name == BARE.name)?.ns_per_entry;
    let mut bars: Vec<Bar> = Vec::new();
    for row in rows.iter().filter(|row| row.name != BARE.name) {
        let name = format!("{} {}", row.name, row.version);
        match bars.iter_mut().find(|bar| bar.name == name) {
            Some(bar) => bar.value = bar.value.min(row.ns_per_entry),
            None => bars.push(Bar {
                name,
                value: row.ns_per_entry,
                ours: row.name == OURS,
            }),
        }
    }
    bars.sort_by(|a, b| a.value.total_cmp(&b.value));
    Some(Group {
        name: operation.name().to_owned(),
        bare: Some(bare),
        bars,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, method: &'static str, ns: f64) -> Row {
        Row {
            name,
            version: "1",
            operation: Operation::Unmap,
            method,
            memory: Memory::Warm,
            threads: 1,
            ns_per_entry: ns,
            ratio_to_bare: None,
            ratio_to_best_other: None,
            ratio_to_dead: None,
            spread: 0.0,
            samples: [ns].into_iter().collect(),
        }
    }

    #[test]
    fn the_faster_way_counts_and_the_fastest_comes_first() {
        let rows = [
            row(BARE.name, "", 0.1),
            row("slow", "", 9.0),
            row("two", "a", 4.0),
            row("two", "b", 2.0),
            row(OURS, "", 1.0),
        ];
        let rows: Vec<&Row> = rows.iter().collect();
        let group = group(Operation::Unmap, &rows).unwrap();
        let bars: Vec<_> = group
            .bars
            .iter()
            .map(|bar| (bar.name.as_str(), bar.value, bar.ours))
            .collect();
        assert_eq!(group.bare, Some(0.1));
        assert_eq!(
            bars,
            [
                ("tablewright 1", 1.0, true),
                ("two 1", 2.0, false),
                ("slow 1", 9.0, false)
            ]
        );
        assert!(super::group(Operation::Unmap, &rows[1..]).is_none());
    }
}

//! The comparison as tables, with the aims of Tablewright beside the figures.

use crate::compare::rows::{Parameters, Report, Row};
use crate::compare::subject::Operation;
use crate::format::Architecture;
use crate::memory::arena::Memory;
use crate::output::report;
use crate::size::human;

/// The whole text.
pub fn of(report: &Report) -> String {
    match report.parameters.pages.is_empty() {
        true => range(report),
        false => scattered(report),
    }
}

fn range(report: &Report) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "{} mapped with {} entries of 4 KiB in {} tables\nnanoseconds per entry, median of {}\n",
        human(parameters.size_bytes.unwrap_or(0)),
        report::count(parameters.entries.unwrap_or(0)),
        report::count(parameters.tables),
        parameters.rounds(),
    );
    for &memory in parameters.memory {
        text += match memory {
            Memory::Warm => "\nTable memory warm: touched before, in huge pages\n",
            Memory::Cold => "\nTable memory cold: mapped anew each round\n",
        };
        let of = |row: &&Row| row.memory == Some(memory);
        let mut rows: Vec<&Row> = report.rows.iter().filter(of).collect();
        // By operation; within one the fastest first. The bare loop comes first or nearly so: of
        // `map` it zeroes each table before it fills it, as most crates do, and one that does not
        // can be faster.
        rows.sort_by(|a, b| {
            (a.operation as u8).cmp(&(b.operation as u8)).then(a.ns().total_cmp(&b.ns()))
        });
        let groups = rows.chunk_by(|a, b| a.operation == b.operation);
        let lines = groups.flat_map(|group| {
            let name = [group[0].operation.name(), "", "", "", ""].map(str::to_owned);
            std::iter::once(name).chain(group.iter().map(|row| cells(row)))
        });
        let header = ["", "by", "ns/entry", "x bare", "vs best"];
        text += &report::table(header, 2, lines.collect());
    }
    text + "- no bare loop of it, or no other crate that has it\n" + &aims(&report.rows)
}

/// A row below the name of its operation. A method that would make the table wider than a terminal
/// takes two lines.
fn cells(row: &Row) -> [String; 5] {
    const WIDE: usize = 20;
    let optional = |figure: Option<f64>| figure.map_or("-".to_owned(), report::figure);
    [
        format!("  {}", row.by()),
        match row.method.len() > WIDE {
            true => row.method.replace(", ", ",\n"),
            false => row.method.to_owned(),
        },
        report::figure(row.ns()),
        optional(row.ratio_to_bare),
        optional(row.ratio_to_best_other),
    ]
}

#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn judge(self, figure: f64) -> (&'static str, String) {
        let (is_met, words) = match self {
            Self::AtMost(bound) => (figure <= bound, format!("at most {bound:.2}")),
            Self::AtLeast(bound) => (figure >= bound, format!("at least {bound:.2}")),
        };
        (if is_met { "met" } else { "missed" }, words)
    }
}

/// An operation, the ratio that is bounded, in words and of a row, and its bound.
type Aim = (Operation, &'static str, fn(&Row) -> Option<f64>, Bound);

/// Ratios in one run on warm memory; docs/compare.md says where they come from.
#[rustfmt::skip]
const AIMS: [Aim; 9] = {
    use Bound::{AtLeast, AtMost};
    use Operation::{Detach, Map, MapTogether, Protect, ProtectHardware, ProtectLive, Unmap};
    const BARE: fn(&Row) -> Option<f64> = |row| row.ratio_to_bare;
    const OTHER: fn(&Row) -> Option<f64> = |row| row.ratio_to_best_other;
    const DEAD: fn(&Row) -> Option<f64> = |row| row.ratio_to_dead;
    [
        (Map, "map: time, to the bare loop", BARE, AtMost(1.5)),
        // 0.9 of the speed of two threads that fill two arrays.
        (MapTogether, "map by two threads: time, to two arrays", BARE, AtMost(1.11)),
        (Map, "map: speed, to the best other crate", OTHER, AtLeast(3.0)),
        (Protect, "protect: speed, to the best other crate", OTHER, AtLeast(3.0)),
        (ProtectLive, "protect (live): time, to tables out of use", DEAD, AtMost(1.1)),
        (ProtectHardware, "protect (hw writes): time, to bare exchanges", BARE, AtMost(1.1)),
        (Unmap, "unmap: time, to the bare loop", BARE, AtMost(1.5)),
        (Unmap, "unmap: speed, to the best other crate", OTHER, AtLeast(1.5)),
        (Detach, "detach: speed, to the best other crate", OTHER, AtLeast(1.0)),
    ]
};

/// The aims that can be judged by `rows`, as a table; nothing if there are none.
fn aims(rows: &[Row]) -> String {
    let judge = |(operation, words, ratio, bound): &Aim| {
        let judged = |row: &&Row| {
            row.is_ours() && row.memory == Some(Memory::Warm) && row.operation == *operation
        };
        let figure = ratio(rows.iter().find(judged)?)?;
        let (verdict, should) = bound.judge(figure);
        let [words, verdict] = [*words, verdict].map(str::to_owned);
        Some([words, verdict, report::figure(figure), should])
    };
    let judged: Vec<[String; 4]> = AIMS.iter().filter_map(judge).collect();
    if judged.is_empty() {
        return String::new();
    }
    let header = ["aim of tablewright, warm memory", "", "ratio", "should be"];
    format!("\n{}", report::table(header, 2, judged))
}

/// The speed of the engine to aim for, as a multiple of the best other crate's.
fn aim(pages: u64) -> Option<f64> {
    match pages {
        ..=16 => Some(1.0),
        64.. => Some(2.0),
        _ => None,
    }
}

/// The time of the engine to aim for, as a multiple of the bare loop's.
const TO_BARE: f64 = 1.3;

const IN_ORDER: [Operation; 6] = [
    Operation::Map,
    Operation::Protect,
    Operation::Unmap,
    Operation::Query,
    Operation::Fault,
    Operation::Exchange,
];

fn scattered(report: &Report) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "ranges of 4 KiB pages, scattered over {} tables that exist\n\
         median of {}; A/D: hardware may set flags meanwhile\n",
        report::count(parameters.tables),
        parameters.rounds(),
    );
    text += "- a fault is of one page\n";
    for &format in &parameters.formats {
        let of = |operation| {
            let rows = report.rows.iter();
            rows.filter(move |row| row.format == Some(format) && row.operation == operation)
        };
        let name = format.name();
        text += &format!("\n{name}: nanoseconds for each call, by the pages in it\n");
        let mut lines = Vec::new();
        for operation in IN_ORDER {
            let mut names: Vec<String> = Vec::new();
            for name in of(operation).map(subject) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            if !names.is_empty() {
                let empty = |_| String::new();
                lines.push(line(operation.name().to_owned(), parameters, empty));
            }
            for this in names {
                lines.push(line(format!("  {this}"), parameters, |pages| {
                    of(operation)
                        .find(|row| row.pages == Some(pages) && subject(row) == this)
                        .map_or_else(|| "-".to_owned(), |row| report::figure(row.ns()))
                }));
            }
        }
        text += &report::table_of(header("", parameters), 1, lines);
        text += &ratios(parameters, format, &of);
    }
    text
}

/// The ratios of the engine to the bare loop and to the best other crate; nothing without the
/// engine.
fn ratios<'r, I: Iterator<Item = &'r Row>>(
    parameters: &Parameters,
    format: Architecture,
    of: &impl Fn(Operation) -> I,
) -> String {
    let mut lines = Vec::new();
    let (mut missed, mut barred) = (0_u64, 0_u64);
    for (words, flags) in [("", false), (", A/D", true)] {
        for operation in &IN_ORDER[..5] {
            let ours = |pages: u64| {
                of(*operation).find(|row| {
                    row.is_ours() && row.pages == Some(pages) && row.hardware_flags == Some(flags)
                })
            };
            if parameters.pages.iter().all(|pages| ours(*pages).is_none()) {
                continue;
            }
            let name = format!("{}{words}", operation.name());
            lines.push(line(format!("{name}: x bare"), parameters, |pages| {
                let mark = |ratio| if ratio > TO_BARE { MISSED } else { MET };
                cell(ours(pages).and_then(|row| row.ratio_to_bare), mark)
            }));
            if *operation == Operation::Fault {
                continue;
            }
            let other = if flags { "best + exchanges" } else { "best" };
            lines.push(line(format!("{name}: vs {other}"), parameters, |pages| {
                let judged = aim(pages)
                    .zip(ours(pages))
                    .map(|(aim, row)| judge(row.against_best(), row.ratio_to_least, aim));
                missed += u64::from(judged == Some(MISSED));
                barred += u64::from(judged == Some(BARRED));
                let ratio = ours(pages).and_then(Row::against_best);
                cell(ratio, |_| judged.unwrap_or(MET))
            }));
        }
    }
    if lines.is_empty() {
        return String::new();
    }
    let table =
        report::table_of(header(&format!("tablewright, {}", format.name()), parameters), 1, lines);
    let aims = |count| report::counted(count, "aim", "aims");
    let verdict = match missed {
        0 => "no aim beside the best other crate is missed".to_owned(),
        _ => format!("{} beside the best other crate: missed", aims(missed)),
    };
    let limit = match barred {
        0 => String::new(),
        _ => format!(
            "{BARRED} out of reach: the bare loop of the same run does not reach it ({})\n",
            aims(barred)
        ),
    };
    format!(
        "\n{table}{verdict}\n{MISSED} misses: at most {TO_BARE:.2} x bare; vs best at least 1.00 \
         up to 16 pages, 2.00 from 64 on\n{limit}",
    )
}

/// The mark of a ratio that meets its aim.
const MET: char = ' ';
/// The mark of a ratio that misses it.
const MISSED: char = '*';
/// The mark of a ratio that the bare loop would not reach.
const BARRED: char = '^';

/// Judges the speed of the engine as a multiple of the best other crate's, and its time as a
/// multiple of the least that the work takes.
fn judge(against_best: Option<f64>, to_least: Option<f64>, aim: f64) -> char {
    match (against_best, to_least) {
        (Some(ratio), Some(times)) if ratio < aim && ratio * times < aim => BARRED,
        (Some(ratio), _) if ratio < aim => MISSED,
        _ => MET,
    }
}

fn cell(ratio: Option<f64>, mark: impl Fn(f64) -> char) -> String {
    let marked = |ratio| format!("{}{}", report::figure(ratio), mark(ratio));
    ratio.map_or("-".to_owned(), marked)
}

/// The crate, its version, and the way that it is measured in.
fn subject(row: &Row) -> String {
    let flags = match row.hardware_flags {
        Some(true) => ", A/D",
        _ => "",
    };
    let by = if row.method.is_empty() { "" } else { ", " };
    format!("{}{flags}{by}{}", row.by(), row.method)
}

fn header(words: &str, parameters: &Parameters) -> Vec<String> {
    line(words.to_owned(), parameters, |pages| pages.to_string())
}

fn line(words: String, parameters: &Parameters, cell: impl FnMut(u64) -> String) -> Vec<String> {
    let cells = parameters.pages.iter().copied().map(cell);
    std::iter::once(words).chain(cells).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::rows::row;
    use crate::compare::subject::OURS;

    fn ours(operation: Operation, bare: f64, other: Option<f64>) -> Row {
        Row {
            ratio_to_bare: Some(bare),
            ratio_to_best_other: other,
            ..row(OURS, operation, "", 1.0)
        }
    }

    #[test]
    fn aims_are_met_or_missed_and_left_out_without_figures() {
        let text = aims(&[ours(Operation::Map, 1.4, Some(2.9)), ours(Operation::Unmap, 1.6, None)]);
        let words = text.lines().flat_map(str::split_whitespace);
        let verdicts = words.filter(|word| ["met", "missed"].contains(word));
        assert!(verdicts.eq(["met", "missed", "missed"]), "{text}");
    }

    #[test]
    fn cold_memory_and_other_crates_are_not_judged() {
        let mut cold = ours(Operation::Map, 1.0, None);
        cold.memory = Some(Memory::Cold);
        let mut other = ours(Operation::Map, 1.0, None);
        other.name = "bare";
        assert_eq!(aims(&[cold, other]), "");
    }

    #[test]
    fn an_aim_that_the_bare_loop_does_not_reach_is_no_miss_of_the_engine() {
        // Ours takes 10 ns and the bare loop 8; the best other crate 12, 18 and 25.
        let ours = |best: f64| judge(Some(best / 10.0), Some(10.0 / 8.0), 2.0);
        assert_eq!([12.0, 18.0, 25.0].map(ours), [BARRED, MISSED, MET]);
        assert_eq!(judge(Some(0.9), None, 1.0), MISSED);
        assert_eq!(judge(None, Some(1.0), 1.0), MET);
    }
}

//! A recording, for people and for programs.

use std::path::Path;

use serde::Serialize;

use tablewright_recorder::recording::{
    Header, Interval, Recording, Region, Run, Summary, join, pages,
};

use crate::error::Error;
use crate::output::report::{self, Report, count, counted, figure, time};
use crate::size::human;

/// Facts of the recording as a whole.
#[derive(Serialize)]
struct Parameters<'a> {
    file: String,
    #[serde(flatten)]
    header: &'a Header,
    pages: u64,
    present_pages: u64,
    distinct_pages: u64,
    summary: &'a Summary,
    regions: &'a [Region],
}

#[derive(Serialize)]
struct Row {
    start_ns: u64,
    length_ns: u64,
    pages: u64,
    runs: usize,
}

impl From<Interval> for Row {
    fn from(interval: Interval) -> Self {
        Self {
            start_ns: interval.start_ns,
            length_ns: interval.length_ns,
            pages: pages(&interval.runs),
            runs: interval.runs.len(),
        }
    }
}

/// Prints a recording that is in this file: what it says as a whole, and each of its intervals if
/// wanted. Programs get both.
pub fn print(path: &Path, recording: &Recording, intervals: bool, json: bool) -> Result<(), Error> {
    let report = Report {
        experiment: "record",
        parameters: Parameters {
            file: path.display().to_string(),
            header: recording.header(),
            pages: recording.pages(),
            present_pages: pages(recording.present()),
            distinct_pages: distinct(recording),
            summary: recording.summary(),
            regions: recording.regions(),
        },
        rows: recording.intervals().map(Row::from).collect(),
        warnings: recording.summary().warnings.clone(),
    };
    report.print(json, |report| {
        let mut text = summary(report);
        if intervals {
            text.push('\n');
            text.push_str(&table(report));
        }
        text
    })
}

/// How many pages were written at least once.
fn distinct(recording: &Recording) -> u64 {
    let mut all: Vec<Run> = Vec::new();
    let mut waiting = 0;
    for interval in recording.intervals() {
        waiting += interval.runs.len();
        all.extend(interval.runs);
        // Seldom enough not to sort much, and often enough not to keep every run of the recording.
        if waiting > 1 << 20 {
            join(&mut all);
            waiting = 0;
        }
    }
    join(&mut all);
    pages(&all)
}

fn summary(report: &Report<Parameters, Row>) -> String {
    let Parameters { file, header, pages, present_pages, distinct_pages, summary, regions } =
        &report.parameters;
    let bytes = |pages: u64| human(pages.saturating_mul(header.page_size));
    let total: u64 = report.rows.iter().map(|row| row.length_ns).sum();
    let mut written: Vec<u64> = report.rows.iter().map(|row| row.pages).collect();
    written.sort_unstable();
    let median = written.get(written.len() / 2).copied().unwrap_or(0);
    let most = written.last().copied().unwrap_or(0);
    let cost = &summary.cost;
    // Behind the names of the lines.
    let wide = report::at_most(112) - INDENT.len();
    let lines = [
        (
            "recording",
            format!(
                "{file}: {} of {}, {} in all",
                counted(summary.intervals, "interval", "intervals"),
                time(header.interval_ns as f64),
                time(total as f64),
            ),
        ),
        ("process", format!("{}: {}", header.pid, beginning(&header.command))),
        ("ended", summary.ended.clone()),
        ("method", format!("{}, on Linux {}", header.method, header.kernel)),
        (
            "cannot see",
            header
                .blind
                .iter()
                .map(|words| report::wrapped(words, wide, INDENT))
                .collect::<Vec<_>>()
                .join(&format!("\n{INDENT}")),
        ),
        (
            "memory",
            format!(
                "{} ({}) in {}; {} in use at the start",
                counted(*pages, "page", "pages"),
                bytes(*pages),
                counted(regions.len() as u64, "part", "parts"),
                count(*present_pages),
            ),
        ),
        (
            "written",
            format!(
                "{}, {} different ({}); median {} an interval, most {}",
                counted(summary.written, "page", "pages"),
                count(*distinct_pages),
                bytes(*distinct_pages),
                count(median),
                count(most),
            ),
        ),
        (
            "cost to it",
            format!(
                "stopped for {}; at most {} of {} more ({}); {} of looking at its memory",
                time(cost.stopped_ns as f64),
                counted(cost.faults, "fault", "faults"),
                time(cost.fault_ns as f64),
                time(cost.faults as f64 * cost.fault_ns as f64),
                time(cost.harvest_ns as f64),
            ),
        ),
    ];
    let mut text = String::new();
    for (name, words) in lines {
        // What is in lines already stays so.
        let words = match words.contains('\n') {
            true => words,
            false => report::wrapped(&words, wide, INDENT),
        };
        text.push_str(&format!("{name:<12}{}\n", plain(&words)));
    }
    text
}

/// Escapes a file's words, so that a terminal takes none for an order.
fn plain(words: &str) -> String {
    words.chars().filter(|&character| character == '\n' || !character.is_control()).collect()
}

/// Enough of a command to know it again.
fn beginning(command: &str) -> String {
    const ENOUGH: usize = 300;
    match command.char_indices().nth(ENOUGH) {
        Some((end, _)) => format!("{} ...", &command[..end]),
        None => command.to_owned(),
    }
}

/// Width of the lines' names.
const INDENT: &str = "            ";

fn table(report: &Report<Parameters, Row>) -> String {
    let page = report.parameters.header.page_size as f64;
    let rows = report.rows.iter().map(|row| {
        let rate = row.pages as f64 * page / (1 << 20) as f64 / (row.length_ns.max(1) as f64 / 1e9);
        [
            format!("{:.3}", row.start_ns as f64 / 1e9),
            time(row.length_ns as f64),
            count(row.pages),
            count(row.runs as u64),
            figure(rate),
        ]
    });
    report::table(["at (s)", "length", "pages written", "runs", "MiB/s"], 0, rows.collect())
}

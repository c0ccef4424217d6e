//! `reproduce`: every published figure, and beside it what the lab measures for the same row.
//!
//! An experiment fills in the rows that it can run. The others are listed all the same: what is
//! missing is part of the result.

mod count;
mod dirty_log;
mod map_mem;
mod migrate;
pub mod page;
mod page_table_test;
pub mod tlb_flush;
mod write_protect;

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde::Serialize;
use tablewright_experiments::dirty_log as disabling;
use tablewright_experiments::linear_map;
use tablewright_experiments::migrate as migrations;
use tablewright_experiments::page_table_test as faulting;
use tablewright_experiments::tlb_flush as flushes;
use tablewright_experiments::write_protect as starts;

use count::Summary;

use crate::error::Error;
use crate::file::Target;
use crate::published;
use crate::report::{self, Report};
use crate::runs::{self, Threads};

/// What `reproduce` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright reproduce
  tablewright reproduce --only map-mem --json
  tablewright reproduce --report results        writes results/index.html")]
pub struct Arguments {
    /// Only these experiments
    #[arg(
        long,
        value_name = "EXPERIMENT",
        num_args = 1..,
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(published::EXPERIMENTS.iter().map(|(name, _)| *name)),
    )]
    only: Vec<String>,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a page with tables and pictures into this directory, as index.html
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

#[derive(Serialize)]
struct Parameters {
    experiments: Vec<&'static str>,
}

/// A published row, and what was measured for it.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    system: String,
    configuration: String,
    metric: String,
    unit: String,
    published_before: Option<f64>,
    published_after: Option<f64>,
    /// The same before the improvement, here.
    before: Option<f64>,
    /// And after it.
    after: Option<f64>,
    /// The engine's own way to do the same.
    tablewright: Option<f64>,
    /// How much more `after` is than what was published.
    error_percent: Option<f64>,
    /// Whether what it was measured on was fitted to this row.
    fitted: bool,
    /// And to the figure before the change alone, so that the one after it is a test.
    #[serde(skip)]
    fitted_before: bool,
    note: String,
}

impl Row {
    fn of(experiment: &'static str, published: published::Row) -> Self {
        Self {
            experiment,
            system: published.system,
            configuration: published.configuration,
            metric: published.metric,
            unit: published.unit,
            published_before: published.before,
            published_after: published.after,
            before: None,
            after: None,
            tablewright: None,
            error_percent: None,
            fitted: false,
            fitted_before: false,
            note: "not implemented yet".to_owned(),
        }
    }
}

/// Runs what can be run, and prints all of it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    // Before anything is run: a page that has nowhere to go is known at once.
    let target = arguments.report.as_deref();
    let target = target
        .map(|directory| Target::report(directory, "index.html"))
        .transpose()?;
    let report = reproduce(
        &arguments.only,
        Runs {
            map_mem: &runs::software::<linear_map::Job>(arguments.threads),
            page_table_test: &runs::software::<faulting::Job>(arguments.threads),
            dirty_log: &runs::software::<disabling::Job>(arguments.threads),
            write_protect: &runs::software::<starts::Job>(arguments.threads),
            migrate: &runs::software::<migrations::Job>(arguments.threads),
            tlb_flush: &runs::software::<flushes::Job>(arguments.threads),
        },
    )?;
    match arguments.json {
        true => report::print_json(&Counted {
            summary: Summary::of(&report.rows),
            report: &report,
        })?,
        false => report.print(false, text)?,
    }
    match target {
        Some(target) => target.fill(&page::of(&report)),
        None => Ok(()),
    }
}

/// The report, and how many of its rows come out.
#[derive(Serialize)]
struct Counted<'r> {
    #[serde(flatten)]
    report: &'r Report<Parameters, Row>,
    summary: Summary,
}

/// What makes the runs of each experiment.
#[derive(Clone, Copy)]
struct Runs<'r> {
    map_mem: linear_map::Run<'r>,
    page_table_test: faulting::Run<'r>,
    dirty_log: disabling::Run<'r>,
    write_protect: starts::Run<'r>,
    migrate: migrations::Run<'r>,
    tlb_flush: flushes::Run<'r>,
}

/// A published problem: before and after what was published for it, here, and by the engine.
pub struct Problem {
    /// What takes so long.
    pub what: &'static str,
    /// As they are shown, in this order: published before and after, here before and after,
    /// Tablewright.
    pub figures: [String; 5],
}

/// A few of the published problems, which take the machine a second or two each.
pub fn problems() -> Result<Vec<Problem>, Error> {
    let threads = Threads::default();
    let rows = |experiment, system: &str, configuration: &str, metric: &str| {
        let mut rows = published::built_in(experiment).unwrap_or_default();
        rows.retain(|row| {
            row.system.starts_with(system)
                && row.configuration.contains(configuration)
                && row.metric.contains(metric)
        });
        rows
    };
    let boot = rows("map-mem", "Ampere Altra VM, 64G", "batch-barriers", "");
    let faults = rows("page-table-test", "", "-s anonymous -b 1G -v 80", "CREATE");
    let starts = rows("write-protect", "", "Case 1", "(a)");
    let found = [
        (
            "a kernel maps 64 GiB at boot",
            map_mem::rows(boot, &runs::software::<linear_map::Job>(threads))?,
        ),
        (
            "80 vCPUs fault on 1 GiB",
            page_table_test::rows(faults, &runs::software::<faulting::Job>(threads))?,
        ),
        (
            "a dirty log of 3 GiB starts",
            write_protect::rows(
                starts,
                &runs::software::<starts::Job>(threads),
                &runs::software::<migrations::Job>(threads),
            )?,
        ),
    ];
    let problem = |(what, rows): (&'static str, Vec<Row>)| {
        let row = rows.into_iter().next()?;
        let figures = [
            row.published_before,
            row.published_after,
            row.before,
            row.after,
            row.tablewright,
        ];
        Some(Problem {
            what,
            figures: figures.map(|value| figure(value, &row.unit)),
        })
    };
    Ok(found.into_iter().filter_map(problem).collect())
}

fn reproduce(only: &[String], runs: Runs<'_>) -> Result<Report<Parameters, Row>, Error> {
    let experiments: Vec<&'static str> = published::EXPERIMENTS
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| only.is_empty() || only.iter().any(|only| only == name))
        .collect();
    let mut rows = Vec::new();
    for &experiment in &experiments {
        let published = published::built_in(experiment).unwrap_or_default();
        rows.extend(match experiment {
            "map-mem" => map_mem::rows(published, runs.map_mem)?,
            "page-table-test" => page_table_test::rows(published, runs.page_table_test)?,
            "dirty-log" => dirty_log::rows(published, runs.dirty_log)?,
            "write-protect" => write_protect::rows(published, runs.write_protect, runs.migrate)?,
            "tlb-flush" => tlb_flush::rows(published, runs.tlb_flush)?,
            _ => published
                .into_iter()
                .map(|row| Row::of(experiment, row))
                .collect(),
        });
    }
    Ok(Report {
        experiment: "reproduce",
        parameters: Parameters { experiments },
        rows,
        warnings: Vec::new(),
    })
}

/// A figure with its unit; times in the unit that fits.
fn figure(value: Option<f64>, unit: &str) -> String {
    let Some(value) = value else {
        return "-".to_owned();
    };
    let nanoseconds = match unit {
        "s" => 1e9,
        "ms" => 1e6,
        "us" => 1e3,
        "ns" => 1.0,
        "count" => return report::count(value as u64),
        _ => return report::figure(value),
    };
    report::time(value * nanoseconds)
}

/// The words with which all configurations of a group begin, if it has more than one.
fn common_words(rows: &[Row]) -> &str {
    let first = rows[0].configuration.as_str();
    let begins = |words: &str| {
        rows.iter().all(|row| {
            row.configuration
                .strip_prefix(words)
                .is_some_and(|rest| !rest.is_empty())
        })
    };
    let mut ends = first.match_indices(' ').map(|(at, _)| &first[..=at]);
    match rows {
        [_] => "",
        _ => ends.rfind(|words| begins(words)).unwrap_or(""),
    }
}

fn text(report: &Report<Parameters, Row>) -> String {
    let mut text = String::new();
    for rows in report.rows.chunk_by(|a, b| a.experiment == b.experiment) {
        text += &format!("{}\n", rows[0].experiment);
        for system in rows.chunk_by(|a, b| a.system == b.system) {
            // Steps to one figure in one table; figures of several kinds in one for each
            // configuration.
            if system.iter().all(|row| row.metric == system[0].metric) {
                text += &steps_text(system);
            } else {
                for group in system.chunk_by(|a, b| a.configuration == b.configuration) {
                    text += &metrics_text(group);
                }
            }
        }
        text.push('\n');
        // The same note is said once.
        let mut said: Vec<&str> = Vec::new();
        for row in rows {
            if !row.note.is_empty() && !said.contains(&row.note.as_str()) {
                text += &format!("- {}\n", report::wrapped(&row.note, 78, "  "));
                said.push(&row.note);
            }
        }
        text.push('\n');
    }
    text += "* the machine was fitted on this row; every other is a test\n";
    text + &Summary::of(&report.rows).text()
}

/// The rows of one system that are steps to one figure. What they have in common stands above them.
fn steps_text(rows: &[Row]) -> String {
    let common = common_words(rows);
    let mut head = rows[0].system.clone();
    for what in [&rows[0].metric, common.trim_end()] {
        if !what.is_empty() {
            head += &format!("; {what}");
        }
    }
    group_text(&head, rows, |row| &row.configuration[common.len()..])
}

/// The rows of one configuration.
fn metrics_text(rows: &[Row]) -> String {
    let head = format!("{}; {}", rows[0].system, rows[0].configuration);
    // What they all begin with says nothing, and takes room.
    group_text(&head, rows, |row| {
        row.metric.strip_prefix("KVM_").unwrap_or(&row.metric)
    })
}

fn group_text(head: &str, rows: &[Row], name: impl Fn(&Row) -> &str) -> String {
    let cells = |row: &Row| {
        let error = row
            .error_percent
            .map_or("-".to_owned(), |error| report::marked(error, row.fitted));
        [
            report::wrapped(name(row), 17, "  "),
            figure(row.published_before, &row.unit),
            figure(row.published_after, &row.unit),
            figure(row.before, &row.unit),
            figure(row.after, &row.unit),
            figure(row.tablewright, &row.unit),
            error,
        ]
    };
    let table = report::table(
        [
            "",
            "published\nbefore",
            "published\nafter",
            "before",
            "after",
            "table-\nwright",
            "error  ",
        ],
        1,
        rows.iter().map(cells).collect(),
    );
    format!("\n{}\n\n{table}", report::wrapped(head, 80, "  "))
}

/// Machines for the tests of what is around them.
#[cfg(test)]
fn quick() -> Runs<'static> {
    use crate::fakes;
    Runs {
        map_mem: &fakes::linear_map,
        page_table_test: &fakes::page_table_test,
        dirty_log: &fakes::dirty_log,
        write_protect: &fakes::write_protect,
        migrate: &|jobs| Ok(vec![migrations::Ran::default(); jobs.len()]),
        tlb_flush: &|jobs| Ok(vec![flushes::Ran::default(); jobs.len()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Report<Parameters, Row> {
        reproduce(&[], quick()).unwrap()
    }

    #[test]
    fn every_published_row_is_listed() {
        let report = all();
        let published: usize = published::EXPERIMENTS
            .iter()
            .map(|(name, _)| published::built_in(name).unwrap().len())
            .sum();
        assert_eq!(report.rows.len(), published);
        for row in &report.rows {
            let ran = match row.experiment {
                "map-mem" | "page-table-test" | "dirty-log" | "write-protect" => true,
                "tlb-flush" => row.metric != "user",
                _ => false,
            };
            assert_eq!(row.after.is_some(), ran);
            assert_ne!(row.note, "not implemented yet");
        }
        let only = reproduce(&["tlb-flush".to_owned()], quick()).unwrap();
        assert!(only.rows.len() == 3 && only.rows.iter().all(|row| row.experiment == "tlb-flush"));
    }

    #[test]
    fn the_keys_are_those_that_others_read() {
        let json = serde_json::to_value(&all().rows[0]).unwrap();
        let mut keys: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        let mut expected = [
            "experiment",
            "system",
            "configuration",
            "metric",
            "unit",
            "published_before",
            "published_after",
            "before",
            "after",
            "tablewright",
            "error_percent",
            "fitted",
            "note",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
    }

    #[test]
    fn the_text_has_every_system_and_every_note_once() {
        let report = all();
        let text = text(&report);
        for (name, _) in published::EXPERIMENTS {
            assert!(text.contains(name), "{name}");
        }
        assert!(text.contains("Ampere Altra Metal, 512G"));
        // Bins of a histogram in which there is nothing, here and as published, have no relative
        // error.
        assert!(!text.contains("NaN"), "{text}");
        assert!(text.contains("1.23 s") || text.contains("8.99 s"), "{text}");
    }

    #[test]
    fn tables_fit_a_terminal_and_no_configuration_is_lost() {
        let report = all();
        for line in text(&report).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let rows = &report.rows[..5];
        assert_eq!(common_words(rows), "cumulative up to ");
        assert_eq!(common_words(&rows[..1]), "");
        let mut other = rows.to_vec();
        other[4].configuration = "cumulative".to_owned();
        assert_eq!(common_words(&other), "");
        let mut equal = rows[..2].to_vec();
        equal[1].configuration = equal[0].configuration.clone();
        assert_eq!(common_words(&equal), "cumulative up to ");
    }

    #[test]
    fn figures_have_their_unit() {
        assert_eq!(figure(Some(2191.0), "ms"), "2.19 s");
        assert_eq!(figure(Some(497266.0), "pages"), "497266");
        assert_eq!(figure(Some(8.0), "count"), "8");
        assert_eq!(figure(None, "ms"), "-");
    }
}

//! `reproduce`: every published figure, and beside it what the lab measures for the same row.
//!
//! An experiment fills in the rows that it can run. The others are listed all the same: what is
//! missing is part of the result.

mod count;
mod page;

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde::Serialize;
use serde_json::{Value, json};

use crate::dirty_log::job as dirty_log;
use crate::error::Error;
use crate::file::Target;
use crate::map_mem::job as map_mem;
use crate::migrate::job as migrate;
use crate::output::report::{self, Report};
use crate::page_table_test::job as page_table_test;
use crate::published::{self, Reproduced as Row};
use crate::runs::{Threads, software};
use crate::tlb_flush::job as tlb_flush;
use crate::write_protect::job as write_protect;
use count::Summary;

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
        value_parser = PossibleValuesParser::new(
            published::EXPERIMENTS.iter().map(|(name, _)| *name)
        ),
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

/// Runs what can be run, and prints all of it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    // Before anything is run: a page that has nowhere to go is known at once.
    let target = arguments.report.as_deref();
    let target = target.map(|directory| Target::report(directory, "index.html")).transpose()?;
    let threads = arguments.threads;
    let rows = reproduce(
        &arguments.only,
        Runs {
            map_mem: &software::<map_mem::Job>(threads),
            page_table_test: &software::<page_table_test::Job>(threads),
            dirty_log: &software::<dirty_log::Job>(threads),
            write_protect: &software::<write_protect::Job>(threads),
            migrate: &software::<migrate::Job>(threads),
            tlb_flush: &software::<tlb_flush::Job>(threads),
        },
    )?;
    let report = Report {
        experiment: "reproduce",
        parameters: json!({"experiments": experiments(&arguments.only).collect::<Vec<_>>()}),
        rows,
        warnings: Vec::new(),
    };
    match arguments.json {
        true => {
            report::print_json(&Counted { summary: Summary::of(&report.rows), report: &report })?
        }
        false => report.print(false, |report| text(&report.rows))?,
    }
    match target {
        Some(target) => target.fill(&page::of(&report.rows)),
        None => Ok(()),
    }
}

/// The report, and how many of its rows come out.
#[derive(Serialize)]
struct Counted<'r> {
    #[serde(flatten)]
    report: &'r Report<Value, Row>,
    summary: Summary,
}

#[derive(Clone, Copy)]
struct Runs<'r> {
    map_mem: map_mem::Run<'r>,
    page_table_test: page_table_test::Run<'r>,
    dirty_log: dirty_log::Run<'r>,
    write_protect: write_protect::Run<'r>,
    migrate: migrate::Run<'r>,
    tlb_flush: tlb_flush::Run<'r>,
}

/// A published problem: before and after what was published for it, here, and by the engine.
pub struct Problem {
    pub what: &'static str,
    /// From [`Row::figures`].
    pub figures: [String; 5],
}

/// A few of the published problems, which take the machine a second or two each.
pub fn problems() -> Result<Vec<Problem>, Error> {
    let threads = Threads::default();
    let rows = |experiment, system: &str, configuration: &str, metric: &str| {
        let mut rows = published::built_in(experiment);
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
            crate::map_mem::published::rows(boot, &software::<map_mem::Job>(threads))?,
        ),
        (
            "80 vCPUs fault on 1 GiB",
            crate::page_table_test::published::rows(
                faults,
                &software::<page_table_test::Job>(threads),
            )?,
        ),
        (
            "a dirty log of 3 GiB starts",
            crate::write_protect::published::rows(
                starts,
                &software::<write_protect::Job>(threads),
                &software::<migrate::Job>(threads),
            )?,
        ),
    ];
    let problem = |(what, rows): (&'static str, Vec<Row>)| {
        let figures = rows.first()?.figures();
        Some(Problem { what, figures })
    };
    Ok(found.into_iter().filter_map(problem).collect())
}

/// Those that are asked for, in the order of the tables.
fn experiments(only: &[String]) -> impl Iterator<Item = &'static str> {
    let all = published::EXPERIMENTS.iter().map(|(name, _)| *name);
    all.filter(|name| only.is_empty() || only.iter().any(|only| only == name))
}

fn reproduce(only: &[String], runs: Runs<'_>) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for experiment in experiments(only) {
        let table = published::built_in(experiment);
        rows.extend(match experiment {
            "map-mem" => crate::map_mem::published::rows(table, runs.map_mem)?,
            "page-table-test" => {
                crate::page_table_test::published::rows(table, runs.page_table_test)?
            }
            "dirty-log" => crate::dirty_log::published::rows(table, runs.dirty_log)?,
            "write-protect" => {
                crate::write_protect::published::rows(table, runs.write_protect, runs.migrate)?
            }
            "tlb-flush" => crate::tlb_flush::published::rows(table, runs.tlb_flush)?,
            _ => unreachable!("{experiment} has a table and no way to run it"),
        });
    }
    Ok(rows)
}

/// The words with which all configurations of a group begin, if it has more than one.
fn common_words(rows: &[Row]) -> &str {
    let first = rows[0].figure.configuration.as_str();
    let begins = |words: &str| {
        rows.iter().all(|row| {
            row.figure.configuration.strip_prefix(words).is_some_and(|rest| !rest.is_empty())
        })
    };
    let mut ends = first.match_indices(' ').map(|(at, _)| &first[..=at]);
    match rows {
        [_] => "",
        _ => ends.rfind(|words| begins(words)).unwrap_or(""),
    }
}

fn text(rows: &[Row]) -> String {
    let mut text = String::new();
    for rows in rows.chunk_by(|a, b| a.experiment == b.experiment) {
        text += &format!("{}\n", rows[0].experiment);
        for system in rows.chunk_by(|a, b| a.figure.system == b.figure.system) {
            // Steps to one figure in one table; figures of several kinds in one for each
            // configuration.
            if system.iter().all(|row| row.figure.metric == system[0].figure.metric) {
                text += &steps_text(system);
            } else {
                for group in
                    system.chunk_by(|a, b| a.figure.configuration == b.figure.configuration)
                {
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
    text + &Summary::of(rows).text()
}

/// The rows of one system that are steps to one figure. What they have in common stands above them.
fn steps_text(rows: &[Row]) -> String {
    let common = common_words(rows);
    let first = &rows[0].figure;
    let mut head = first.system.clone();
    for what in [&first.metric, common.trim_end()] {
        if !what.is_empty() {
            head += &format!("; {what}");
        }
    }
    group_text(&head, rows, |row| &row.figure.configuration[common.len()..])
}

/// The rows of one configuration.
fn metrics_text(rows: &[Row]) -> String {
    let head = format!("{}; {}", rows[0].figure.system, rows[0].figure.configuration);
    // What they all begin with says nothing, and takes room.
    group_text(&head, rows, |row| {
        let metric = &row.figure.metric;
        metric.strip_prefix("KVM_").unwrap_or(metric)
    })
}

/// Characters of a row's name in a line.
const NAME: usize = 17;

/// Words with a space behind an underscore wherever they are longer than a line.
fn broken(words: &str, wide: usize) -> String {
    let mut text = String::new();
    for word in words.split_whitespace() {
        let mut line = 0;
        for part in word.split_inclusive('_') {
            let length = part.chars().count();
            if line > 0 && line + length + 2 > wide {
                text.push(' ');
                line = 0;
            }
            text.push_str(part);
            line += length;
        }
        text.push(' ');
    }
    text
}

fn group_text(head: &str, rows: &[Row], name: impl Fn(&Row) -> &str) -> String {
    let cells = |row: &Row| {
        let error =
            row.error_percent.map_or("-".to_owned(), |error| report::marked(error, row.fitted));
        let [a, b, c, d, e] = row.figures();
        [report::wrapped(&broken(name(row), NAME), NAME, "  "), a, b, c, d, e, error]
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
        migrate: &|jobs| Ok(vec![migrate::Ran::default(); jobs.len()]),
        tlb_flush: &|jobs| Ok(vec![tlb_flush::Ran::default(); jobs.len()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Row> {
        reproduce(&[], quick()).unwrap()
    }

    #[test]
    fn every_published_row_is_listed() {
        let rows = all();
        let published: usize =
            published::EXPERIMENTS.iter().map(|(name, _)| published::built_in(name).len()).sum();
        assert_eq!(rows.len(), published);
        for row in &rows {
            let ran = match row.experiment {
                "map-mem" | "page-table-test" | "dirty-log" | "write-protect" => true,
                "tlb-flush" => row.figure.metric != "user",
                _ => false,
            };
            assert_eq!(row.after.is_some(), ran);
            assert_ne!(row.note, published::NO_PROFILE);
        }
        let only = reproduce(&["tlb-flush".to_owned()], quick()).unwrap();
        assert!(only.len() == 3 && only.iter().all(|row| row.experiment == "tlb-flush"));
    }

    #[test]
    fn the_keys_are_those_that_others_read() {
        let json = serde_json::to_value(&all()[0]).unwrap();
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
            "fitted_before",
            "note",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
    }

    #[test]
    fn the_text_has_every_system_and_every_note_once() {
        let rows = all();
        let text = text(&rows);
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
        let rows = all();
        for line in text(&rows).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let rows = &rows[..5];
        assert_eq!(common_words(rows), "cumulative up to ");
        assert_eq!(common_words(&rows[..1]), "");
        let mut other = rows.to_vec();
        other[4].figure.configuration = "cumulative".to_owned();
        assert_eq!(common_words(&other), "");
        let mut equal = rows[..2].to_vec();
        equal[1].figure.configuration = equal[0].figure.configuration.clone();
        assert_eq!(common_words(&equal), "cumulative up to ");
    }

    #[test]
    fn figures_have_their_unit() {
        for (value, unit, shown) in [
            (Some(2191.0), "ms", "2.19 s"),
            (Some(497266.0), "pages", "497266"),
            (Some(8.0), "count", "8"),
            (None, "ms", "-"),
        ] {
            let unit = unit.to_owned();
            let row = published::Row { unit, ..published::built_in("map-mem").remove(0) };
            assert_eq!(row.shown(value), shown);
        }
    }
}

//! `compare`: the same work by Tablewright and every published crate, beside what the computer can
//! do at best.

use tablewright_harness::{
    arena, error, file, format, judge, platform, plot, progress, random, report, size, stats,
};

mod aarch64_paging;
mod bare;
mod candidates;
mod check;
mod current;
mod page_table_generic;
#[cfg(target_arch = "x86_64")]
mod page_table_multiarch;
pub mod pages;
mod picture;
mod runner;
mod subject;
mod tablewright;
mod threads;
mod verdict;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::arena::{Arena, Memory};
use crate::error::Error;
use crate::file::Target;
use crate::format::Format;
use crate::progress::Progress;
use crate::report::Report;
use crate::size::{Size, human};
use crate::stats::Samples;
use candidates::{BARE, CANDIDATES, Candidate};
use runner::Measurement;
use subject::{OURS, Operation, Work};

/// Tables more than are needed, so that two threads may each have half of them, the tables above
/// among them.
const SPARE: u64 = 16;

/// What `compare` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Operations:
  map       map the range in an empty space; or two threads half of it each, in
            one space (2 threads), beside two threads that fill an array each
  protect   make it read-only, in tables not in use; that processors use
            (live); or whose entries processors may write meanwhile, so that
            each needs an atomic operation (hw writes)
  unmap     visit every leaf and give every table back
  detach    make the range unreachable; visiting and giving back is left for
            later
  exchange  the bare loop of what needs an atomic operation for each entry

With --pages, of ranges of few pages in tables that exist:
  query     where each page is mapped to, and whether it can be written
  fault     a fault of a guest on one page, in tables that virtual CPUs share
  A/D       while hardware may set accessed and dirty flags; \"vs best\" is then
            beside the best other crate and an exchange for each page, since the
            others overwrite the flags

Columns:
  by        the calls that do it, where a crate has more than one way
  x bare   how many times as long as plain loads and stores to the same bytes,
            or exchanges where the hardware writes
  vs best   how many times as fast as the best of the other crates (above 1 is
            faster)

Examples:
  tablewright compare
  tablewright compare --only aarch64-paging page-table-generic --memory warm
  tablewright compare --size 1G --rounds 31 --json > compare.json
  tablewright compare --plot compare.svg
  tablewright compare --pages
  tablewright compare --pages 1,16 --rounds 31 --json > pages.json")]
pub struct Arguments {
    /// How much memory to map, with 4 KiB pages
    #[arg(
        long,
        default_value = "16G",
        value_name = "SIZE",
        allow_hyphen_values = true
    )]
    size: Size,
    /// How the memory of the tables is prepared
    #[arg(long, value_enum, default_value = "both")]
    memory: Memories,
    /// Instead: calls for so many pages each (1 to 512), scattered over 1 GiB in tables that exist
    /// [without a number: 1,4,16,64,512]
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        value_delimiter = ',',
        default_missing_value = "1,4,16,64,512",
        value_parser = clap::value_parser!(u16).range(1..=pages::MOST as i64),
        allow_negative_numbers = true,
        conflicts_with_all = ["size", "memory"],
    )]
    pages: Option<Vec<u16>>,
    /// Only these crates; the bare loop is always measured
    #[arg(
        long,
        value_name = "CRATE",
        num_args = 1..,
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(CANDIDATES.iter().map(|candidate| candidate.name)),
    )]
    only: Vec<String>,
    /// How often to measure; figures are medians
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Print JSON, with every sample
    #[arg(long)]
    json: bool,
    /// Draw map, protect and unmap as bars into this SVG file, of warm memory, unless it was not
    /// asked for; with --pages, nanoseconds for each page against the pages in a call
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Memories {
    /// Touched before and backed by huge pages, as a kernel's own memory is
    Warm,
    /// Mapped anew each round in small pages, so that the first touch faults
    Cold,
    /// First warm, then cold
    Both,
}

impl Memories {
    fn list(self) -> &'static [Memory] {
        match self {
            Self::Warm => &[Memory::Warm],
            Self::Cold => &[Memory::Cold],
            Self::Both => &[Memory::Warm, Memory::Cold],
        }
    }
}

#[derive(Serialize)]
struct Parameters {
    size_bytes: u64,
    page_bytes: u64,
    entries: u64,
    tables: u64,
    memory: &'static [Memory],
    crates: Vec<&'static str>,
    rounds: u32,
}

#[derive(Serialize)]
struct Row {
    #[serde(rename = "crate")]
    name: &'static str,
    version: &'static str,
    operation: Operation,
    method: &'static str,
    memory: Memory,
    threads: u32,
    ns_per_entry: f64,
    ratio_to_bare: Option<f64>,
    ratio_to_best_other: Option<f64>,
    /// Of an edit of live tables: to the same edit of tables that are not in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_dead: Option<f64>,
    spread: f64,
    #[serde(rename = "samples_ns")]
    samples: Samples,
}

/// Runs the comparison and prints it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let work = work(arguments.size)?;
    let plot = arguments
        .plot
        .as_deref()
        .map(|path| Target::new("--plot", path))
        .transpose()?;
    if let Some(pages) = &arguments.pages {
        return pages::run(pages::Request {
            pages,
            only: &arguments.only,
            rounds: arguments.rounds,
            json: arguments.json,
            plot,
        });
    }
    let candidates: Vec<&Candidate> = std::iter::once(&BARE)
        .chain(CANDIDATES.iter().filter(|candidate| {
            arguments.only.is_empty() || arguments.only.iter().any(|name| name == candidate.name)
        }))
        .collect();
    let memories = arguments.memory.list();

    let mut report = Report {
        experiment: "compare",
        parameters: Parameters {
            size_bytes: work.bytes,
            page_bytes: Work::PAGE,
            entries: work.entries(),
            tables: work.tables(),
            memory: memories,
            crates: candidates.iter().map(|candidate| candidate.name).collect(),
            rounds: arguments.rounds,
        },
        rows: Vec::new(),
        warnings: stats::build_warning().into_iter().collect(),
    };
    // Two threads share memory that has been touched.
    let together = memories.contains(&Memory::Warm) && candidates.iter().any(|c| c.name == OURS);
    let each = candidates.len() * memories.len() + usize::from(together);
    let steps = (u64::from(arguments.rounds) + 1) * each as u64;
    let mut progress = Progress::new(steps);
    for &memory in memories {
        let arena = Arena::new(work.tables() + SPARE, Format::COMMON.page_shift(), memory)?;
        let measurements = runner::run(&candidates, work, arguments.rounds, arena, &mut progress)?;
        report
            .warnings
            .extend(warnings(&measurements, memory, arena));
        report.rows.extend(rows(&candidates, measurements, memory));
        if memory == Memory::Warm && together {
            let figures = threads::run(work, arguments.rounds, arena, &mut progress)?;
            report.rows.extend(rows_of_two(figures));
        }
    }
    drop(progress);
    report.print(arguments.json, text)?;
    match plot {
        Some(target) => target.fill(&picture::of(&report).svg()?),
        None => Ok(()),
    }
}

/// An operation, by the engine and by the fastest of the other crates.
pub struct Against {
    /// Which.
    pub operation: &'static str,
    /// Nanoseconds.
    pub ours: f64,
    /// Nanoseconds of the other, and its name.
    pub other: (f64, String),
}

impl Against {
    /// Out of what was measured: name, version, nanoseconds. `None` if the engine or the others are
    /// not among them.
    pub fn of<'n>(
        operation: &'static str,
        measured: impl Iterator<Item = (&'n str, &'n str, f64)>,
    ) -> Option<Self> {
        let (ours, others): (Vec<_>, Vec<_>) = measured.partition(|(name, ..)| *name == OURS);
        let fastest =
            |of: Vec<(&'n str, &'n str, f64)>| of.into_iter().min_by(|a, b| a.2.total_cmp(&b.2));
        let ((_, _, ours), (name, version, other)) = (fastest(ours)?, fastest(others)?);
        Some(Self {
            operation,
            ours,
            other: (other, format!("{name} {version}")),
        })
    }
}

/// Map, protect and unmap of so many bytes of pages, which are a multiple of what a table covers.
pub fn large(bytes: u64, rounds: u32) -> Result<Vec<Against>, Error> {
    let work = Work { bytes };
    let candidates: Vec<&Candidate> = std::iter::once(&BARE).chain(CANDIDATES).collect();
    let arena = Arena::new(
        work.tables() + SPARE,
        Format::COMMON.page_shift(),
        Memory::Warm,
    )?;
    let mut progress = Progress::new(u64::from(rounds + 1) * candidates.len() as u64);
    let measured = runner::run(&candidates, work, rounds, arena, &mut progress)?;
    let against = |operation: Operation| {
        let of = measured
            .iter()
            .filter(|one| one.candidate != 0 && one.operation == operation);
        Against::of(
            operation.name(),
            of.map(|one| {
                let by = candidates[one.candidate];
                (by.name, by.version, one.samples.median())
            }),
        )
    };
    let operations = [Operation::Map, Operation::Protect, Operation::Unmap];
    Ok(operations.into_iter().filter_map(against).collect())
}

fn work(size: Size) -> Result<Work, Error> {
    let table = Work::PAGE * Format::COMMON.entries_per_table();
    let bytes = size.bytes();
    if !bytes.is_multiple_of(table) {
        return Err(Error::Usage(format!(
            "--size {size} is not a multiple of {}, which one table of pages covers",
            human(table)
        )));
    }
    if bytes > Work::MOST {
        return Err(Error::Usage(format!(
            "--size {size} is more than the {} that the address space holds",
            human(Work::MOST)
        )));
    }
    Ok(Work { bytes })
}

/// The bare loop does nothing but touch memory: what scatters there is the computer, not a crate.
fn warnings(measurements: &[Measurement], memory: Memory, arena: Arena) -> Vec<String> {
    let name = match memory {
        Memory::Warm => "warm",
        Memory::Cold => "cold",
    };
    let worst = measurements
        .iter()
        .filter(|measurement| measurement.candidate == 0)
        .max_by(|a, b| a.samples.spread().total_cmp(&b.samples.spread()));
    let noise = worst.and_then(|worst| {
        let what = format!("the bare loop of {} ({name})", worst.operation.name());
        stats::noise_warning(&what, &worst.samples)
    });
    noise
        .into_iter()
        .chain(stats::huge_page_warning(arena, memory))
        .collect()
}

fn rows(candidates: &[&Candidate], measurements: Vec<Measurement>, memory: Memory) -> Vec<Row> {
    let medians: Vec<(usize, Operation, f64)> = measurements
        .iter()
        .map(|measurement| {
            (
                measurement.candidate,
                measurement.operation,
                measurement.samples.median(),
            )
        })
        .collect();
    let best = |operation, among: &dyn Fn(usize) -> bool| {
        medians
            .iter()
            .filter(|(candidate, other, _)| *other == operation && among(*candidate))
            .map(|(_, _, median)| *median)
            .min_by(f64::total_cmp)
    };
    // The bare loop is the first of the candidates.
    measurements
        .into_iter()
        .map(|measurement| {
            let this = measurement.candidate;
            let median = measurement.samples.median();
            let bare = measurement
                .operation
                .bare()
                .and_then(|operation| best(operation, &|candidate| candidate == 0));
            let dead = (measurement.operation == Operation::ProtectLive)
                .then(|| best(Operation::Protect, &|candidate| candidate == this))
                .flatten();
            let best_other = best(measurement.operation, &|candidate| {
                candidate != 0 && candidate != this
            });
            Row {
                name: candidates[this].name,
                version: candidates[this].version,
                operation: measurement.operation,
                method: measurement.method,
                memory,
                threads: 1,
                ns_per_entry: median,
                ratio_to_bare: bare.and_then(|bare| ratio(median, bare)),
                ratio_to_best_other: best_other
                    .filter(|_| this != 0)
                    .and_then(|best| ratio(best, median)),
                ratio_to_dead: dead.and_then(|dead| ratio(median, dead)),
                spread: measurement.samples.spread(),
                samples: measurement.samples,
            }
        })
        .collect()
}

/// What two threads have done, beside each other.
fn rows_of_two(figures: threads::Figures) -> [Row; 2] {
    let bare = figures.arrays.median();
    let row = |candidate: &Candidate, method, samples: Samples, ratio_to_bare| Row {
        name: candidate.name,
        version: candidate.version,
        operation: Operation::MapTogether,
        method,
        memory: Memory::Warm,
        threads: 2,
        ns_per_entry: samples.median(),
        ratio_to_bare,
        ratio_to_best_other: None,
        ratio_to_dead: None,
        spread: samples.spread(),
        samples,
    };
    let ours = CANDIDATES
        .iter()
        .find(|candidate| candidate.name == OURS)
        .unwrap_or(&BARE);
    let ratio_to_bare = ratio(figures.tree.median(), bare);
    [
        row(&BARE, "two arrays", figures.arrays, ratio(bare, bare)),
        row(ours, "map_range", figures.tree, ratio_to_bare),
    ]
}

/// A ratio, unless the clock was too coarse to see one of the two.
fn ratio(this: f64, that: f64) -> Option<f64> {
    (this > 0.0 && that > 0.0).then(|| this / that)
}

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "{} mapped with {} entries of 4 KiB in {} tables\nnanoseconds per entry, median of {}\n",
        human(parameters.size_bytes),
        report::count(parameters.entries),
        report::count(parameters.tables),
        report::counted(u64::from(parameters.rounds), "round", "rounds"),
    );
    for &memory in parameters.memory {
        text += match memory {
            Memory::Warm => "\nTable memory warm: touched before, in huge pages\n",
            Memory::Cold => "\nTable memory cold: mapped anew each round\n",
        };
        let mut rows: Vec<&Row> = report
            .rows
            .iter()
            .filter(|row| row.memory == memory)
            .collect();
        // By operation; within one the fastest first. The bare loop comes first or nearly so: of
        // `map` it zeroes each table before it fills it, as most crates do, and one that does not
        // can be faster.
        rows.sort_by(|a, b| {
            (a.operation as u8)
                .cmp(&(b.operation as u8))
                .then(a.ns_per_entry.total_cmp(&b.ns_per_entry))
        });
        text += &report::table(
            ["", "by", "ns/entry", "x bare", "vs best"],
            2,
            rows.chunk_by(|a, b| a.operation == b.operation)
                .flat_map(|group| {
                    let name = [group[0].operation.name(), "", "", "", ""].map(str::to_owned);
                    std::iter::once(name).chain(group.iter().map(|row| cells(row)))
                })
                .collect(),
        );
    }
    text + &verdict::text(&report.rows)
}

/// A row of the table, indented below the name of its operation. What would make it wider than a
/// terminal is set in two lines.
fn cells(row: &Row) -> [String; 5] {
    const WIDE: usize = 20;
    let optional = |figure: Option<f64>| figure.map_or("-".to_owned(), report::figure);
    [
        format!("  {} {}", row.name, row.version)
            .trim_end()
            .to_owned(),
        if row.method.len() > WIDE {
            row.method.replace(", ", ",\n")
        } else {
            row.method.to_owned()
        },
        report::figure(row.ns_per_entry),
        optional(row.ratio_to_bare),
        optional(row.ratio_to_best_other),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(candidate: usize, operation: Operation, ns: f64) -> Measurement {
        Measurement {
            candidate,
            operation,
            method: "",
            samples: [ns].into_iter().collect(),
        }
    }

    #[test]
    fn ratios_are_to_the_limit_and_to_the_best_of_the_others() {
        let candidates = [&BARE, &CANDIDATES[0], &CANDIDATES[1]];
        let rows = rows(
            &candidates,
            vec![
                measurement(0, Operation::Map, 0.5),
                measurement(1, Operation::Map, 2.0),
                measurement(1, Operation::Detach, 0.1),
                measurement(2, Operation::Map, 1.0),
            ],
            Memory::Warm,
        );
        let ratios: Vec<_> = rows
            .iter()
            .map(|row| (row.ratio_to_bare, row.ratio_to_best_other))
            .collect();
        assert_eq!(
            ratios,
            [
                (Some(1.0), None),
                (Some(4.0), Some(0.5)),
                (None, None),
                (Some(2.0), Some(2.0)),
            ]
        );
    }

    #[test]
    fn a_live_edit_is_held_against_the_dead_one_and_the_right_limit() {
        let candidates = [&BARE, &CANDIDATES[0]];
        let rows = rows(
            &candidates,
            vec![
                measurement(0, Operation::Protect, 1.0),
                measurement(0, Operation::Exchange, 8.0),
                measurement(1, Operation::Protect, 2.0),
                measurement(1, Operation::ProtectLive, 3.0),
                measurement(1, Operation::ProtectHardware, 16.0),
            ],
            Memory::Warm,
        );
        let ratios: Vec<_> = rows
            .iter()
            .skip(2)
            .map(|row| (row.ratio_to_bare, row.ratio_to_dead))
            .collect();
        assert_eq!(
            ratios,
            [(Some(2.0), None), (Some(3.0), Some(1.5)), (Some(2.0), None)]
        );
    }

    #[test]
    fn every_candidate_does_the_work_right() {
        let work = Work { bytes: 4 << 20 };
        let candidates: Vec<&Candidate> = std::iter::once(&BARE).chain(CANDIDATES).collect();
        for memory in [Memory::Warm, Memory::Cold] {
            let arena = Arena::new(work.tables(), 12, memory).unwrap();
            let measurements =
                runner::run(&candidates, work, 1, arena, &mut Progress::new(1)).unwrap();
            assert!(measurements.len() >= candidates.len() * 3);
        }
    }

    #[test]
    fn two_threads_share_what_others_have_used() {
        // Of sizes that leave each thread whole tables, and not.
        for bytes in [2 << 20, 6 << 20, 64 << 20, 1 << 30] {
            let work = Work { bytes };
            let arena = Arena::new(work.tables() + SPARE, 12, Memory::Warm).unwrap();
            let mut progress = Progress::new(1);
            runner::run(&[&BARE], work, 1, arena, &mut progress).unwrap();
            let figures = threads::run(work, 2, arena, &mut progress).unwrap();
            let samples = 2 * threads::PAIRS as usize;
            let counts = (figures.arrays.len(), figures.tree.len());
            assert_eq!(counts, (samples, samples));
        }
    }

    #[test]
    fn running_out_of_tables_is_an_error_of_the_subject() {
        let work = Work { bytes: 4 << 20 };
        let arena = Arena::new(3, 12, Memory::Warm).unwrap();
        let error = runner::run(&[&BARE], work, 1, arena, &mut Progress::new(1))
            .map(drop)
            .unwrap_err();
        assert_eq!(error.to_string(), "bare: map: out of tables");
    }
}

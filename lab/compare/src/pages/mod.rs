//! `compare --pages`: few pages in a call, scattered over tables that exist, as kernels edit all
//! day.

mod aarch64_paging;
mod bare;
mod calls;
mod candidates;
mod fault;
mod page_table_generic;
#[cfg(target_arch = "x86_64")]
mod page_table_multiarch;
mod picture;
mod runner;
mod subject;
mod tablewright;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use serde::Serialize;

use super::Against;
use super::candidates::BARE;
use super::subject::{OURS, Work};
use crate::arena::Memory;
use crate::error::Error;
use crate::file::Target;
use crate::format::Architecture;
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::stats::{self, Samples};
use candidates::{Candidate, candidates};
use runner::{Arenas, Measurement};
use subject::Operation;

pub use calls::MOST;

/// What is asked for.
pub struct Request<'a> {
    /// Pages in a call.
    pub pages: &'a [u16],
    /// Only these crates; all if empty.
    pub only: &'a [String],
    /// How often to measure.
    pub rounds: u32,
    /// Print JSON.
    pub json: bool,
    /// Where a picture goes.
    pub plot: Option<Target>,
}

#[derive(Serialize)]
struct Parameters {
    pages: Vec<u64>,
    page_bytes: u64,
    range_bytes: u64,
    tables: u64,
    formats: Vec<Architecture>,
    crates: Vec<&'static str>,
    rounds: u32,
}

#[derive(Serialize)]
struct Row {
    #[serde(rename = "crate")]
    name: &'static str,
    version: &'static str,
    format: Architecture,
    operation: Operation,
    method: &'static str,
    /// Whether hardware may set flags in entries meanwhile, and what is measured minds them.
    hardware_flags: bool,
    pages: u64,
    ns_per_call: f64,
    ratio_to_bare: Option<f64>,
    /// The same beside the least that the work takes.
    #[serde(skip)]
    ratio_to_least: Option<f64>,
    ratio_to_best_other: Option<f64>,
    /// Where hardware sets flags: to the best other crate and an exchange for each page, since that
    /// overwrites the flags.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_best_other_and_exchanges: Option<f64>,
    spread: f64,
    #[serde(rename = "samples_ns")]
    samples: Samples,
}

impl Row {
    fn is_ours(&self) -> bool {
        self.name == OURS
    }

    /// What the crate is judged by.
    fn against_best(&self) -> Option<f64> {
        self.ratio_to_best_other_and_exchanges
            .or(self.ratio_to_best_other)
    }
}

/// Runs the comparison and prints it.
pub fn run(request: Request<'_>) -> Result<(), Error> {
    let mut pages: Vec<u64> = request.pages.iter().copied().map(u64::from).collect();
    pages.sort_unstable();
    pages.dedup();
    let chosen =
        |name: &str| request.only.is_empty() || request.only.iter().any(|only| only == name);
    let formats: Vec<(Architecture, Vec<Candidate>)> = [Architecture::X86_64, Architecture::Arm64]
        .into_iter()
        .map(|architecture| (architecture, candidates(architecture, chosen)))
        // A format that no chosen crate writes has nothing to compare.
        .filter(|(_, candidates)| candidates.iter().any(|candidate| !candidate.is_limit()))
        .collect();
    let most = formats.iter().map(|(_, candidates)| candidates.len()).max();
    let arenas = Arenas::new(most.unwrap_or(0))?;
    let mut crates: Vec<&'static str> = Vec::new();
    for candidate in formats.iter().flat_map(|(_, candidates)| candidates) {
        if !crates.contains(&candidate.name) {
            crates.push(candidate.name);
        }
    }
    let mut report = Report {
        experiment: "compare",
        parameters: Parameters {
            pages,
            page_bytes: Work::PAGE,
            range_bytes: calls::TABLES * MOST * Work::PAGE,
            tables: calls::TABLES,
            formats: formats
                .iter()
                .map(|(architecture, _)| *architecture)
                .collect(),
            crates,
            rounds: request.rounds,
        },
        rows: Vec::new(),
        warnings: stats::build_warning().into_iter().collect(),
    };
    if let Some(arena) = arenas.first() {
        let warning = stats::huge_page_warning(arena, Memory::Warm);
        report.warnings.extend(warning);
    }
    let rounds = u64::from(request.rounds) + 1;
    let steps = rounds * formats.len() as u64 * report.parameters.pages.len() as u64;
    let mut progress = Progress::new(steps);
    for (architecture, candidates) in &formats {
        for &pages in &report.parameters.pages {
            let measured = runner::run(
                *architecture,
                candidates,
                pages,
                request.rounds,
                &arenas,
                &mut progress,
            )?;
            report
                .rows
                .extend(rows(*architecture, candidates, pages, measured));
        }
    }
    drop(progress);
    report.warnings.extend(noise(&report.rows));
    report.print(request.json, text)?;
    match request.plot {
        Some(target) => target.fill(&picture::of(&report).svg()?),
        None => Ok(()),
    }
}

/// Map, protect and unmap of one page, of this computer's format.
pub fn single(rounds: u32) -> Result<Vec<Against>, Error> {
    let architecture = Architecture::HOST;
    let candidates = candidates(architecture, |_| true);
    let arenas = Arenas::new(candidates.len())?;
    let mut progress = Progress::new(u64::from(rounds + 1));
    let measured = runner::run(architecture, &candidates, 1, rounds, &arenas, &mut progress)?;
    let against = |operation: Operation| {
        let of = measured.iter().filter(|one| {
            let by = &candidates[one.candidate];
            !by.is_limit() && !by.hardware_flags && one.operation == operation
        });
        Against::of(
            operation.name(),
            of.map(|one| {
                let by = &candidates[one.candidate];
                (by.name, by.version, one.samples.median())
            }),
        )
    };
    let operations = [Operation::Map, Operation::Protect, Operation::Unmap];
    Ok(operations.into_iter().filter_map(against).collect())
}

/// The bare loop does nothing but touch memory: what scatters there is the computer, not a crate.
fn noise(rows: &[Row]) -> Option<String> {
    let worst = rows
        .iter()
        .filter(|row| row.name == BARE.name)
        .max_by(|a, b| a.spread.total_cmp(&b.spread))?;
    let what = format!(
        "the bare loop of {} ({}, {} at a time)",
        worst.operation.name(),
        worst.format.name(),
        worst.pages
    );
    stats::noise_warning(&what, &worst.samples)
}

fn rows(
    architecture: Architecture,
    candidates: &[Candidate],
    pages: u64,
    measured: Vec<Measurement>,
) -> Vec<Row> {
    let medians: Vec<(usize, Operation, f64)> = measured
        .iter()
        .map(|this| (this.candidate, this.operation, this.samples.median()))
        .collect();
    let best = |operation, among: &dyn Fn(&Candidate) -> bool| {
        medians
            .iter()
            .filter(|(candidate, other, _)| *other == operation && among(&candidates[*candidate]))
            .map(|(_, _, median)| *median)
            .min_by(f64::total_cmp)
    };
    let exchange = best(Operation::Exchange, &Candidate::is_limit);
    measured
        .into_iter()
        .map(|measurement| {
            let this = &candidates[measurement.candidate];
            let median = measurement.samples.median();
            let operation = measurement.operation;
            // What the bare loop does in the same way whether hardware sets flags or not is
            // measured once.
            let bare = best(operation, &|other| {
                other.is_limit() && other.hardware_flags == this.hardware_flags
            })
            .or_else(|| best(operation, &Candidate::is_limit));
            // What is not to map over something looks first: a load and a store, as the bare loop
            // of protect has them.
            let least = match operation {
                Operation::Map => best(Operation::Protect, &|other| {
                    other.is_limit() && !other.hardware_flags
                }),
                _ => bare,
            };
            let other = best(operation, &|other| {
                !other.is_limit() && other.name != this.name
            })
            .filter(|_| !this.is_limit());
            let with_exchanges = other
                .zip(exchange)
                .filter(|_| this.hardware_flags)
                .map(|(other, exchange)| other + exchange);
            Row {
                name: this.name,
                version: this.version,
                format: architecture,
                operation,
                method: measurement.method,
                hardware_flags: this.hardware_flags,
                pages,
                ns_per_call: median,
                ratio_to_bare: bare.and_then(|bare| super::ratio(median, bare)),
                ratio_to_least: least.and_then(|least| super::ratio(median, least)),
                ratio_to_best_other: other.and_then(|other| super::ratio(other, median)),
                ratio_to_best_other_and_exchanges: with_exchanges
                    .and_then(|other| super::ratio(other, median)),
                spread: measurement.samples.spread(),
                samples: measurement.samples,
            }
        })
        .collect()
}

/// How many times as fast as the best other crate the engine should be.
fn aim(pages: u64) -> Option<f64> {
    match pages {
        ..=16 => Some(1.0),
        64.. => Some(2.0),
        _ => None,
    }
}

/// How many times as long as the bare loop it should take at most.
const TO_BARE: f64 = 1.3;

const IN_ORDER: [Operation; 6] = [
    Operation::Map,
    Operation::Protect,
    Operation::Unmap,
    Operation::Query,
    Operation::Fault,
    Operation::Exchange,
];

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "ranges of 4 KiB pages, scattered over {} tables that exist\nmedian of {}; A/D: hardware may set flags meanwhile\n",
        report::count(parameters.tables),
        report::counted(u64::from(parameters.rounds), "round", "rounds"),
    );
    for &format in &parameters.formats {
        let of = |operation| {
            report
                .rows
                .iter()
                .filter(move |row| row.format == format && row.operation == operation)
        };
        text += &format!(
            "\n{}: nanoseconds for each call, by the pages in it\n",
            format.name()
        );
        let mut lines = Vec::new();
        for operation in IN_ORDER {
            let mut names: Vec<String> = Vec::new();
            for name in of(operation).map(name) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            if names.is_empty() {
                continue;
            }
            lines.push(line(operation.name().to_owned(), parameters, |_| {
                String::new()
            }));
            for this in names {
                lines.push(line(format!("  {this}"), parameters, |pages| {
                    of(operation)
                        .find(|row| row.pages == pages && name(row) == this)
                        .map_or_else(|| "-".to_owned(), |row| report::figure(row.ns_per_call))
                }));
            }
        }
        text += &report::table_of(header("", parameters), 1, lines);
        text += &ratios(parameters, format, &of);
    }
    text
}

/// The figures of the engine beside those of the bare loop and of the best other crate; nothing
/// without the engine.
fn ratios<'r, I: Iterator<Item = &'r Row>>(
    parameters: &Parameters,
    format: Architecture,
    of: &impl Fn(Operation) -> I,
) -> String {
    let mut lines = Vec::new();
    let (mut missed, mut barred) = (0_u64, 0_u64);
    for (words, exchanges) in [("", false), (", A/D", true)] {
        for operation in &IN_ORDER[..5] {
            let ours = |pages: u64| {
                of(*operation).find(|row| {
                    row.is_ours() && row.pages == pages && row.hardware_flags == exchanges
                })
            };
            if parameters.pages.iter().all(|pages| ours(*pages).is_none()) {
                continue;
            }
            let name = format!("{}{words}", operation.name());
            lines.push(line(format!("{name}: x bare"), parameters, |pages| {
                cell(ours(pages).and_then(|row| row.ratio_to_bare), |ratio| {
                    if ratio > TO_BARE { MISSED } else { MET }
                })
            }));
            if *operation != Operation::Fault {
                let other = if exchanges {
                    "best + exchanges"
                } else {
                    "best"
                };
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
    }
    if lines.is_empty() {
        return String::new();
    }
    let header = header(&format!("tablewright, {}", format.name()), parameters);
    let verdict = match missed {
        0 => "no aim beside the best other crate is missed".to_owned(),
        _ => format!(
            "{} beside the best other crate: missed",
            report::counted(missed, "aim", "aims")
        ),
    };
    let limit = match barred {
        0 => String::new(),
        _ => format!(
            "{BARRED} out of reach: the bare loop of the same run does not reach it ({})\n",
            report::counted(barred, "aim", "aims")
        ),
    };
    format!(
        "\n{}{verdict}\n{MISSED} misses: at most {TO_BARE:.2} x bare; vs best at least 1.00 up to 16 pages, 2.00 from 64 on\n{limit}",
        report::table_of(header, 1, lines)
    )
}

/// What stands behind a ratio that is as it should be.
const MET: char = ' ';
/// The same of one that is not.
const MISSED: char = '*';
/// And of one that the bare loop would not reach.
const BARRED: char = '^';

/// How a figure of the engine does that is so many times as fast as the best other crate, and takes
/// so many times as long as the least that the work takes.
fn judge(against_best: Option<f64>, to_least: Option<f64>, aim: f64) -> char {
    match (against_best, to_least) {
        (Some(ratio), Some(times)) if ratio < aim && ratio * times < aim => BARRED,
        (Some(ratio), _) if ratio < aim => MISSED,
        _ => MET,
    }
}

fn cell(ratio: Option<f64>, mark: impl Fn(f64) -> char) -> String {
    ratio.map_or("-".to_owned(), |ratio| {
        format!("{}{}", report::figure(ratio), mark(ratio))
    })
}

/// The crate, its version, and what is special about it.
fn name(row: &Row) -> String {
    let flags = if row.hardware_flags { ", A/D" } else { "" };
    let by = if row.method.is_empty() { "" } else { ", " };
    let crate_and_version = format!("{} {}", row.name, row.version);
    format!("{}{flags}{by}{}", crate_and_version.trim_end(), row.method)
}

fn header(words: &str, parameters: &Parameters) -> Vec<String> {
    let counts = parameters.pages.iter().map(u64::to_string);
    std::iter::once(words.to_owned()).chain(counts).collect()
}

fn line(words: String, parameters: &Parameters, cell: impl FnMut(u64) -> String) -> Vec<String> {
    let cells = parameters.pages.iter().copied().map(cell);
    std::iter::once(words).chain(cells).collect()
}

#[cfg(test)]
mod tests {
    use super::{BARRED, MET, MISSED, judge};

    #[test]
    fn an_aim_that_the_bare_loop_does_not_reach_is_no_miss_of_the_engine() {
        // Ours takes 10 ns and the bare loop 8; the best other crate 12, 18 and 25.
        let ours = |best: f64| judge(Some(best / 10.0), Some(10.0 / 8.0), 2.0);
        assert_eq!([12.0, 18.0, 25.0].map(ours), [BARRED, MISSED, MET]);
        assert_eq!(judge(Some(0.9), None, 1.0), MISSED);
        assert_eq!(judge(None, Some(1.0), 1.0), MET);
    }
}

//! `compare`: the same work by Tablewright and every published crate, beside what the computer can
//! do at best.

mod aarch64_paging;
mod bare;
mod calls;
mod candidates;
mod current;
mod fault;
mod page_table_generic;
#[cfg(target_arch = "x86_64")]
mod page_table_multiarch;
mod picture;
mod rows;
mod runner;
mod shared;
mod subject;
mod tablewright;
mod text;
mod threads;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use crate::compare::calls::{Calls, MOST, PAGE, TABLES};
use crate::compare::candidates::{CRATES, Candidate, of_format, of_range};
use crate::compare::rows::{Kind, Parameters, Row};
use crate::compare::runner::{Arenas, Measurement};
use crate::compare::subject::Operation;
use crate::error::Error;
use crate::file::Target;
use crate::format::{Architecture, Format};
use crate::memory::arena::Memory;
use crate::output::progress::Progress;
use crate::output::report::Report;
use crate::size::{Size, human};
use crate::stats;

/// The arguments of `compare`.
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
    #[arg(long, default_value = "16G", value_name = "SIZE", allow_hyphen_values = true)]
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
        value_parser = clap::value_parser!(u16).range(1..=calls::MOST as i64),
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
        value_parser = PossibleValuesParser::new(CRATES.iter().map(|(name, _)| *name)),
    )]
    only: Vec<String>,
    /// How often to measure; figures are medians
    #[arg(
        long,
        default_value_t = 11,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=10_000),
    )]
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

/// Runs the comparison and prints it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let bytes = bytes(arguments.size)?;
    let plot = arguments.plot.as_deref().map(|path| Target::new("--plot", path)).transpose()?;
    let report = match &arguments.pages {
        Some(pages) => scattered(pages, arguments)?,
        None => range(bytes, arguments)?,
    };
    report.print(arguments.json, text::of)?;
    match plot {
        Some(target) => target.fill(&picture::svg(&report)?),
        None => Ok(()),
    }
}

impl Arguments {
    /// Whether a crate is to be measured.
    fn chosen(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    fn report(&self, parameters: Parameters) -> rows::Report {
        Report {
            experiment: "compare",
            parameters: Parameters { page_bytes: PAGE, rounds: self.rounds, ..parameters },
            rows: Vec::new(),
            warnings: stats::build_warning().into_iter().collect(),
        }
    }
}

/// Compares one range.
fn range(bytes: u64, arguments: &Arguments) -> Result<rows::Report, Error> {
    let candidates = of_range(|name| arguments.chosen(name));
    let memories = arguments.memory.list();
    let rounds = arguments.rounds;
    let calls = Calls::range(bytes);
    let mut report = arguments.report(Parameters {
        size_bytes: Some(bytes),
        entries: Some(calls.entries()),
        tables: calls::tables(bytes),
        memory: memories,
        crates: candidates.iter().map(|candidate| candidate.name).collect(),
        ..Parameters::default()
    });
    // Two threads share memory that has been touched.
    let ours = candidates.iter().find(|candidate| candidate.is_ours());
    let together = ours.filter(|_| memories.contains(&Memory::Warm));
    let each = candidates.len() * memories.len() + usize::from(together.is_some());
    let mut progress = Progress::new((u64::from(rounds) + 1) * each as u64);
    for &memory in memories {
        let arena = runner::arena(bytes, memory)?;
        let measured = runner::range(&candidates, bytes, rounds, arena, &mut progress)?;
        let rows = rows::rows(&candidates, measured, Kind::Range(memory));
        report.warnings.extend(rows::noise(&rows));
        let warning = stats::huge_page_warning(arena, memory);
        report.warnings.extend(warning);
        report.rows.extend(rows);
        if let Some(ours) = together.filter(|_| memory == Memory::Warm) {
            let figures = threads::run(calls.entries(), rounds, arena, &mut progress)?;
            report.rows.extend(of_two(&candidates[0], ours, figures));
        }
    }
    Ok(report)
}

/// The rows of two threads: two arrays, and one tree.
fn of_two(bare: &Candidate, ours: &Candidate, figures: threads::Figures) -> [Row; 2] {
    let arrays = figures.arrays.median();
    let row = |candidate, method, samples| {
        let kind = Kind::Range(Memory::Warm);
        let row = Row::new(candidate, Operation::MapTogether, method, kind, samples);
        Row { threads: Some(2), ratio_to_bare: rows::ratio(row.ns(), arrays), ..row }
    };
    [row(bare, "two arrays", figures.arrays), row(ours, "map_range", figures.tree)]
}

/// The formats of scattered calls.
const FORMATS: [Architecture; 3] =
    [Architecture::X86_64, Architecture::Arm64, Architecture::Riscv64];

/// Compares scattered calls in each format.
fn scattered(pages: &[u16], arguments: &Arguments) -> Result<rows::Report, Error> {
    let mut pages: Vec<u64> = pages.iter().copied().map(u64::from).collect();
    pages.sort_unstable();
    pages.dedup();
    let formats: Vec<(Architecture, Vec<Candidate>)> = FORMATS
        .into_iter()
        .map(|format| (format, of_format(format, |name| arguments.chosen(name))))
        // A format that no chosen crate writes has nothing to compare.
        .filter(|(_, candidates)| candidates.iter().any(|candidate| !candidate.is_bare()))
        .collect();
    let most = formats.iter().map(|(_, candidates)| candidates.len()).max();
    let arenas = Arenas::new(most.unwrap_or(0))?;
    let mut crates: Vec<&'static str> = Vec::new();
    for candidate in formats.iter().flat_map(|(_, candidates)| candidates) {
        if !crates.contains(&candidate.name) {
            crates.push(candidate.name);
        }
    }
    let mut report = arguments.report(Parameters {
        range_bytes: Some(TABLES * MOST * PAGE),
        tables: TABLES,
        formats: formats.iter().map(|(format, _)| *format).collect(),
        crates,
        ..Parameters::default()
    });
    if let Some(arena) = arenas.first() {
        let warning = stats::huge_page_warning(arena, Memory::Warm);
        report.warnings.extend(warning);
    }
    let rounds = arguments.rounds;
    let runs = formats.len() * pages.len();
    let mut progress = Progress::new((u64::from(rounds) + 1) * runs as u64);
    for (format, candidates) in &formats {
        for &pages in &pages {
            let measured = runner::scattered(candidates, pages, rounds, &arenas, &mut progress)?;
            let kind = Kind::Scattered(*format, pages);
            report.rows.extend(rows::rows(candidates, measured, kind));
        }
    }
    report.parameters.pages = pages;
    report.warnings.extend(rows::noise(&report.rows));
    Ok(report)
}

fn bytes(size: Size) -> Result<u64, Error> {
    let table = PAGE * Format::COMMON.entries_per_table();
    let bytes = size.bytes();
    if !bytes.is_multiple_of(table) {
        return Err(Error::Usage(format!(
            "--size {size} is not a multiple of {}, which one table of pages covers",
            human(table)
        )));
    }
    if bytes > calls::MOST_BYTES {
        return Err(Error::Usage(format!(
            "--size {size} is more than the {} that the address space holds",
            human(calls::MOST_BYTES)
        )));
    }
    Ok(bytes)
}

/// Nanoseconds of an operation, by the engine and by the fastest of the other crates.
pub struct Against {
    /// The name of the operation.
    pub operation: &'static str,
    /// Nanoseconds of the engine.
    pub ours: f64,
    /// Nanoseconds of the other, and its name.
    pub other: (f64, String),
}

/// Map, protect and unmap, as far as the engine and another crate were measured.
fn against(candidates: &[Candidate], measured: &[Measurement]) -> Vec<Against> {
    let fastest = |operation: Operation, ours: bool| {
        measured
            .iter()
            .filter(|one| one.operation == operation)
            .map(|one| (&candidates[one.candidate], one.samples.median()))
            .filter(|(by, _)| !by.is_bare() && !by.hardware_flags && by.is_ours() == ours)
            .min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let of = |operation: Operation| {
        let (_, ours) = fastest(operation, true)?;
        let (by, other) = fastest(operation, false)?;
        Some(Against {
            operation: operation.name(),
            ours,
            other: (other, format!("{} {}", by.name, by.version())),
        })
    };
    let operations = [Operation::Map, Operation::Protect, Operation::Unmap];
    operations.into_iter().filter_map(of).collect()
}

/// Compares map, protect and unmap of one range, a multiple of the bytes that a table covers.
pub fn large(bytes: u64, rounds: u32) -> Result<Vec<Against>, Error> {
    let candidates = of_range(|_| true);
    let arena = runner::arena(bytes, Memory::Warm)?;
    let mut progress = Progress::new(u64::from(rounds + 1) * candidates.len() as u64);
    let measured = runner::range(&candidates, bytes, rounds, arena, &mut progress)?;
    Ok(against(&candidates, &measured))
}

/// Compares map, protect and unmap of one page, in this computer's format.
pub fn single(rounds: u32) -> Result<Vec<Against>, Error> {
    let candidates = of_format(Architecture::HOST, |_| true);
    let arenas = Arenas::new(candidates.len())?;
    let mut progress = Progress::new(u64::from(rounds + 1));
    let measured = runner::scattered(&candidates, 1, rounds, &arenas, &mut progress)?;
    Ok(against(&candidates, &measured))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_share_what_others_have_used() {
        // Sizes with an even and an odd number of tables, and too small to share.
        for bytes in [2 << 20, 6 << 20, 64 << 20, 1 << 30] {
            let arena = runner::arena(bytes, Memory::Warm).unwrap();
            let mut progress = Progress::new(1);
            runner::range(&of_range(|_| false), bytes, 1, arena, &mut progress).unwrap();
            let figures = threads::run(bytes / PAGE, 2, arena, &mut progress).unwrap();
            let samples = 2 * threads::PAIRS as usize;
            let counts = (figures.arrays.len(), figures.tree.len());
            assert_eq!(counts, (samples, samples));
        }
    }
}

//! `map-mem`: builds the linear map of a memory map, as a kernel does when it boots: on this
//! computer, or step by step on the software machine.

mod builder;
mod check;
pub mod input;
pub mod machine;
mod measure;
mod simulate;
pub mod steps;

use std::path::PathBuf;

use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tablewright_experiments::linear_map::iomem::MemoryMap;
use tablewright_experiments::linear_map::plan::{Contents, Leaves, Plan, PlanError};

use crate::error::Error;
use crate::format::{Architecture, Format, Granule};
use crate::machine::named::Named;
use crate::report::{self, Report};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use crate::stats::{self, Samples};
use measure::Outcome;
use steps::{Choice, Order};

/// What `map-mem` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sudo tablewright map-mem                     this computer's own memory map
  tablewright map-mem --ram 512G --pages-only  as a kernel with rodata=full maps 512 GiB
  tablewright map-mem --iomem server.txt --format arm64 --granule 64K --json
  tablewright map-mem --machine ampere-altra-vm-64g
  tablewright map-mem --machine mine.toml --steps lazy-unmap,no-cont-remap")]
pub struct Arguments {
    /// A memory map in the format of /proc/iomem; if neither this nor --ram is given, this
    /// computer's own, or as much RAM as the machine has
    #[arg(long, value_name = "FILE", conflicts_with = "ram")]
    iomem: Option<PathBuf>,
    /// One range of RAM of this size, from address 0
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    ram: Option<Size>,
    /// The architecture whose page tables are built [default: this computer's]
    #[arg(long, value_enum)]
    format: Option<Architecture>,
    /// The smallest page; x86-64 has 4K only [default: 4K]
    #[arg(long, value_enum)]
    granule: Option<Granule>,
    /// Bits in a virtual address: 48, or 52 on arm64, or 57 (five levels) on x86-64 [default: 48]
    #[arg(long, value_name = "BITS")]
    address_bits: Option<u32>,
    /// Map with pages only, without huge leaves and contiguous hints, as a kernel with rodata=full
    /// does; the machine always does
    #[arg(long)]
    pages_only: bool,
    /// What to run on; the machine, if --machine says which
    #[arg(
        long,
        value_enum,
        default_value = "native",
        default_value_if("machine", ArgPredicate::IsPresent, "machine")
    )]
    on: On,
    /// How often to measure; figures are medians [default: 11]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: Option<u32>,
    /// The profile of a machine, by name or as a file; with --on machine
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// With --on machine: one step of those published, with all before it, or another way [default:
    /// all]
    #[arg(long, value_enum, conflicts_with = "steps")]
    step: Option<Choice>,
    /// With --on machine: steps in an order of your own, separated by commas, each with those
    /// before it
    #[arg(long, value_name = "STEPS")]
    steps: Option<Order>,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON, with every sample
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum On {
    /// The memory and the processor of this computer
    Native,
    /// The software machine, in virtual time
    Machine,
}

#[derive(Serialize)]
struct Parameters {
    source: String,
    format: Architecture,
    granule: Granule,
    address_bits: u32,
    virtual_base: String,
    pages_only: bool,
    on: On,
    rounds: u32,
    ram_bytes: u64,
    text_bytes: u64,
    rodata_bytes: u64,
    trimmed_bytes: u64,
    ranges: usize,
}

#[derive(Serialize)]
struct Row {
    #[serde(rename = "crate")]
    name: &'static str,
    version: &'static str,
    operation: &'static str,
    threads: u32,
    entries: u64,
    tables: u64,
    table_bytes: u64,
    ns_per_entry: f64,
    bare_ns_per_entry: f64,
    ratio_to_bare: f64,
    gb_per_second: f64,
    bare_gb_per_second: f64,
    #[serde(rename = "samples_ns")]
    samples: Samples,
    #[serde(rename = "bare_samples_ns")]
    bare_samples: Samples,
}

/// Builds the linear map and prints what it took.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    match arguments.on {
        On::Native => run_native(arguments),
        On::Machine => simulate::run(
            arguments,
            &runs::software::<tablewright_experiments::linear_map::Job>(arguments.threads),
        ),
    }
}

/// A map that was built, and every page of it checked.
pub struct Built {
    pub bytes: u64,
    pub entries: u64,
    pub tables: u64,
    pub nanoseconds: f64,
}

/// Builds the linear map of this memory in pages.
pub fn build(source: &str, map: &MemoryMap, format: Format) -> Result<Built, Error> {
    let (plan, outcome) = measure(source, map, format, Leaves::Pages, 3)?;
    Ok(Built {
        bytes: plan.bytes(),
        entries: outcome.built.entries,
        tables: outcome.built.tables,
        nanoseconds: outcome.build.median(),
    })
}

/// Builds the linear map of this memory so many times, has every page checked, and times it.
fn measure(
    source: &str,
    map: &MemoryMap,
    format: Format,
    leaves: Leaves,
    rounds: u32,
) -> Result<(Plan, Outcome), Error> {
    let plan = Plan::new(map, format, leaves).map_err(|error| {
        // A machine has the addresses that its profile says.
        let hint = match error {
            PlanError::Beyond { .. } => ": see --address-bits",
            _ => "",
        };
        Error::input(source, format!("{error}{hint}"))
    })?;
    let mut builder = builder::native(&plan).map_err(|problem| Error::Subject {
        subject: builder::OURS,
        operation: "map",
        problem,
    })?;
    let outcome = measure::run(&plan, builder.as_mut(), rounds)?;
    drop(builder);
    Ok((plan, outcome))
}

/// Options that say nothing here are a mistake, not a detail.
fn refuse(options: &[(bool, &str)], on: &str) -> Result<(), Error> {
    match options.iter().find(|(given, _)| *given) {
        Some((_, option)) => Err(Error::Usage(format!("{option} goes with --on {on}"))),
        None => Ok(()),
    }
}

fn run_native(arguments: &Arguments) -> Result<(), Error> {
    refuse(
        &[
            (arguments.machine.is_some(), "--machine"),
            (arguments.step.is_some(), "--step"),
            (arguments.steps.is_some(), "--steps"),
            (arguments.threads.threads.is_some(), "--threads"),
        ],
        "machine",
    )?;
    let rounds = arguments.rounds.unwrap_or(11);
    let format = Format::new(
        arguments.format.unwrap_or(Architecture::HOST),
        arguments.granule.unwrap_or(Granule::K4),
        arguments.address_bits.unwrap_or(48),
    )?;
    let (source, map) = input::read(arguments.iomem.as_deref(), arguments.ram, format)?;
    let leaves = if arguments.pages_only {
        Leaves::Pages
    } else {
        Leaves::Largest
    };
    let (plan, outcome) = measure(&source, &map, format, leaves, rounds)?;

    let warnings = stats::build_warning()
        .into_iter()
        .chain(
            short_warning(&outcome, leaves)
                .or_else(|| stats::noise_warning("the bare loop", &outcome.bare)),
        )
        .chain(outcome.huge_page_warning.clone())
        .collect();
    let report = Report {
        experiment: "map-mem",
        parameters: parameters(arguments, source, &plan, rounds),
        rows: vec![row(format, outcome)],
        warnings,
    };
    report.print(arguments.json, text)
}

/// Where there is next to nothing to write, figures for each entry show only what does not depend
/// on entries.
fn short_warning(outcome: &Outcome, leaves: Leaves) -> Option<String> {
    const SHORT: f64 = 1e5;
    let instead = match leaves {
        Leaves::Pages => "a larger --ram",
        Leaves::Largest => "--pages-only",
    };
    (outcome.bare.median() < SHORT).then(|| {
        format!(
            "so few entries are written in no time: look at the time of the whole, or use {instead} for figures that hold \
             for each entry"
        )
    })
}

fn parameters(arguments: &Arguments, source: String, plan: &Plan, rounds: u32) -> Parameters {
    let bytes_of = |contents| {
        plan.spans
            .iter()
            .filter(|span| span.contents == contents)
            .map(|span| span.bytes())
            .sum()
    };
    Parameters {
        source,
        format: plan.format.architecture(),
        granule: plan.format.granule(),
        address_bits: plan.format.address_bits(),
        virtual_base: format!("{:#x}", plan.format.linear_base()),
        pages_only: arguments.pages_only,
        on: arguments.on,
        rounds,
        ram_bytes: plan.bytes(),
        text_bytes: bytes_of(Contents::Text),
        rodata_bytes: bytes_of(Contents::Rodata),
        trimmed_bytes: plan.trimmed,
        ranges: plan.spans.len(),
    }
}

fn row(format: Format, outcome: Outcome) -> Row {
    let built = outcome.built;
    let table_bytes = built.tables * format.page_bytes();
    let per_entry = |samples: &Samples| samples.median() / built.entries as f64;
    // Bytes in a nanosecond are gigabytes in a second.
    let rate = |samples: &Samples| table_bytes as f64 / samples.median().max(1.0);
    let each = |samples: &Samples| samples.scaled(1.0 / built.entries as f64);
    Row {
        name: outcome.name,
        version: outcome.version,
        operation: "map",
        threads: 1,
        entries: built.entries,
        tables: built.tables,
        table_bytes,
        ns_per_entry: per_entry(&outcome.build),
        bare_ns_per_entry: per_entry(&outcome.bare),
        ratio_to_bare: outcome.build.median() / outcome.bare.median().max(1.0),
        gb_per_second: rate(&outcome.build),
        bare_gb_per_second: rate(&outcome.bare),
        samples: each(&outcome.build),
        bare_samples: each(&outcome.bare),
    }
}

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "{} of RAM in {} ({})\n",
        human(parameters.ram_bytes),
        report::counted(parameters.ranges as u64, "range", "ranges"),
        parameters.source,
    );
    for (bytes, what) in [
        (parameters.text_bytes, "of it kernel text"),
        (parameters.rodata_bytes, "of it kernel constants"),
        (parameters.trimmed_bytes, "more left out: it fills no page"),
    ] {
        if bytes > 0 {
            text += &format!("  {} {what}\n", human(bytes));
        }
    }
    text += &format!(
        "mapped at {} for {}: {} pages, {} address bits,\n{}\n",
        parameters.virtual_base,
        parameters.format.name(),
        parameters.granule.name(),
        parameters.address_bits,
        if parameters.pages_only {
            "pages only"
        } else {
            "the largest leaves that fit"
        },
    );
    for row in &report.rows {
        text += &format!(
            "{} in {} ({}), all checked; median of {}\n\n",
            report::counted(row.entries, "entry", "entries"),
            report::counted(row.tables, "table", "tables"),
            human(row.table_bytes),
            report::counted(u64::from(parameters.rounds), "round", "rounds"),
        );
        let line = |name: String, ns: f64, rate: f64, ratio: f64| {
            [
                name,
                report::time(ns * row.entries as f64),
                report::figure(ns),
                report::figure(rate),
                report::figure(ratio),
            ]
        };
        text += &report::table(
            ["", "time", "ns/entry", "GB/s of tables", "x bare"],
            1,
            vec![
                line(
                    "bare: zero and fill".to_owned(),
                    row.bare_ns_per_entry,
                    row.bare_gb_per_second,
                    1.0,
                ),
                line(
                    format!("{} {}", row.name, row.version),
                    row.ns_per_entry,
                    row.gb_per_second,
                    row.ratio_to_bare,
                ),
            ],
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Found;

    #[test]
    fn a_row_is_per_entry_and_the_text_names_the_bare_loop() {
        let outcome = Outcome {
            name: "tablewright",
            version: "0",
            built: Found {
                entries: 512,
                tables: 4,
            },
            build: [1024.0].into_iter().collect(),
            bare: [512.0].into_iter().collect(),
            huge_page_warning: None,
        };
        let row = row(Format::COMMON, outcome);
        assert_eq!(
            (row.ns_per_entry, row.bare_ns_per_entry, row.ratio_to_bare),
            (2.0, 1.0, 2.0)
        );
        assert_eq!((row.table_bytes, row.gb_per_second), (16384, 16.0));
        assert_eq!(row.samples, [2.0].into_iter().collect());
        let text = text(&Report {
            experiment: "map-mem",
            parameters: Parameters {
                source: "--ram".into(),
                format: Architecture::X86_64,
                granule: Granule::K4,
                address_bits: 48,
                virtual_base: String::new(),
                pages_only: true,
                on: On::Native,
                rounds: 1,
                ram_bytes: 2 << 20,
                text_bytes: 0,
                rodata_bytes: 0,
                trimmed_bytes: 0,
                ranges: 1,
            },
            rows: vec![row],
            warnings: Vec::new(),
        });
        assert!(text.contains("512 entries in 4 tables"), "{text}");
        assert!(text.contains("bare: zero and fill"), "{text}");
    }
}

//! `page-table-test`: vCPUs fault on one stage-2 table, as in the well-known test of that name.

pub mod published;

use std::thread;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tablewright_experiments::input::{Backing, Guest, Mode, PAGE, Region};
use tablewright_experiments::page_table_test::ways::How;
use tablewright_experiments::page_table_test::{self as simulate, Job, Ran, native};
use tablewright_machine::Profile;

use crate::error::Error;
use crate::kvm;
use crate::machine::named::Named;
use crate::needs::{self, Experiment};
use crate::report::{self, Report, error_percent};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use crate::stats;
use published::Figures;

/// What `page-table-test` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright page-table-test --machine kunpeng-920 -m 4 -s anonymous_hugetlb_1gb -b 1G -v 40
  tablewright page-table-test --machine kunpeng-920 -s anonymous_thp -b 20G -v 40 --scale 1280
  tablewright page-table-test --machine kunpeng-920 -b 16M -v 80 --how tablewright --json")]
pub struct Arguments {
    /// The guest's mode, by name or by its number in the test of 2021: how many addresses it has
    #[arg(short, long, value_name = "MODE", default_value = "P40V48_4K")]
    mode: Mode,
    /// What backs the guest's memory, by the test's name for it [default: anonymous;
    /// anonymous_hugetlb_1gb, of 1G and with 4 vCPUs, without -s, -b and -v]
    #[arg(short, long, value_name = "BACKING")]
    source: Option<Backing>,
    /// How much memory [default: 1G]
    #[arg(short, long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// How many vCPUs touch it, each all of it [default: 1]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// Where it starts in the guest's physical addresses, in bytes [default: as far up as they go]
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = offset)]
    offset: Option<u64>,
    /// What to run on; native are threads of this computer, and the engine's own way alone
    #[arg(long, value_enum, default_value = "machine")]
    on: Place,
    /// The profile of a machine, by name or as a file [default: kunpeng-920]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// How faults are handled [default: each way in turn]
    #[arg(long, value_enum)]
    how: Option<How>,
    /// Run with one Nth of the memory, and multiply times by N: every page takes as long as any
    /// other
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..))]
    scale: u64,
    /// Log writes before anything was touched, so that no block was ever mapped: the first phase is
    /// left out
    #[arg(long)]
    logging_first: bool,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    kvm: kvm::Options,
}

impl Arguments {
    fn guest(&self) -> Guest {
        let shown = Guest {
            source: Backing::HUGETLB_1GB,
            bytes: 1 << 30,
            vcpus: 4,
        };
        Guest::new(self.source, self.bytes, self.vcpus, shown)
    }
}

/// Where this experiment runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Place {
    /// The software machine, in virtual time
    Machine,
    /// Threads of this computer, in real time
    Native,
    /// Guests on the KVM of this computer, in real time
    Kvm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    /// The software machine, in virtual time
    Machine,
    /// Threads of this computer, in real time
    Native,
}

/// Bytes, in decimal or hexadecimal, or as a size.
pub fn offset(text: &str) -> Result<u64, String> {
    let bytes = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    match bytes {
        Some(bytes) => Ok(bytes),
        None => text
            .parse::<Size>()
            .map(Size::bytes)
            .map_err(|error| error.to_string()),
    }
}

#[derive(Serialize)]
struct Parameters {
    mode: &'static str,
    backing: &'static str,
    bytes: u64,
    first: String,
    vcpus: u16,
    machine: String,
    scale: u64,
    logging_first: bool,
}

#[derive(Serialize)]
struct Row {
    how: &'static str,
    /// Seconds of virtual time; none where the phase is left out.
    #[serde(rename = "create_s")]
    create: Option<f64>,
    #[serde(rename = "update_s")]
    update: f64,
    #[serde(rename = "rebuild_s")]
    rebuild: f64,
    /// What was published for them, and how much more the machine takes.
    #[serde(rename = "published_s")]
    published: [Option<f64>; 3],
    error_percent: [Option<f64>; 3],
    fitted: [bool; 3],
    faults: u64,
    retries: u64,
    cleaned_bytes: u64,
    invalidations_issued: u64,
    waits_for_completion: u64,
    tables_allocated: u64,
    invalid_longest_us: f64,
    invalid_total_us: f64,
    host_splits: u64,
    /// The rule of the machine that was broken, and how.
    #[serde(skip_serializing_if = "Option::is_none")]
    violation: Option<String>,
}

/// The machine, if none is named.
const MACHINE: &str = "kunpeng-920";
/// The tables of more, and what the machine knows of their pages, would not fit into many
/// computers.
const MOST_PAGES: u64 = 1 << 24;

/// Runs the test, and prints what it took.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    match arguments.on {
        Place::Machine => arguments.kvm.unused()?,
        Place::Native => {
            arguments.kvm.unused()?;
            return run_native(arguments);
        }
        Place::Kvm => return run_kvm(arguments),
    }
    let (profile, left_out) = needs::load(
        arguments.machine.as_deref().unwrap_or(MACHINE),
        Experiment::PageTableTest,
    )?;
    let mut report = test(
        arguments,
        &profile,
        &runs::software::<simulate::Job>(arguments.threads),
    )?;
    report.warnings.extend(left_out);
    report.print(arguments.json, text)
}

fn run_kvm(arguments: &Arguments) -> Result<(), Error> {
    kvm::only_machine(
        "kvm",
        &[
            (arguments.how.is_some(), "--how"),
            (arguments.scale != 1, "--scale"),
            (arguments.machine.is_some(), "--machine"),
            (arguments.logging_first, "--logging-first"),
            (arguments.kvm.overlap, "-o"),
            (arguments.kvm.predict.is_some(), "--predict"),
            (arguments.threads.threads.is_some(), "--threads"),
        ],
    )?;
    let bytes = arguments.bytes.map_or(kvm::USUAL_BYTES, Size::bytes);
    let asked = kvm::Asked {
        bits: arguments.mode.fixed_bits(),
        first: arguments.offset,
        ..kvm::Asked::new(
            arguments.source.unwrap_or(Backing::ANONYMOUS),
            bytes,
            arguments.vcpus.unwrap_or(1).into(),
            arguments.kvm.clone(),
        )
    };
    kvm::page_table_test(&asked, arguments.json)
}

#[derive(Serialize)]
struct NativeRow {
    how: &'static str,
    /// Seconds.
    #[serde(rename = "create_s")]
    create: f64,
    #[serde(rename = "update_s")]
    update: f64,
    #[serde(rename = "rebuild_s")]
    rebuild: f64,
    faults: u64,
    tables: u64,
}

fn run_native(arguments: &Arguments) -> Result<(), Error> {
    kvm::only_machine(
        "native",
        &[
            (arguments.machine.is_some(), "--machine"),
            (arguments.threads.threads.is_some(), "--threads"),
        ],
    )?;
    let how = arguments.how.unwrap_or(How::Tablewright);
    if how != How::Tablewright || arguments.logging_first {
        let option = if arguments.logging_first {
            "--logging-first"
        } else {
            "--how"
        };
        return Err(Error::Usage(format!(
            "{option}: only tablewright runs natively, with all phases"
        )));
    }
    let mode = arguments.mode;
    let Guest {
        source: backing,
        bytes,
        vcpus,
    } = arguments.guest();
    let whole = Region::new(mode, backing, bytes, arguments.offset)?;
    let region = addressable(mode, "the native run")
        .and_then(|()| whole.scaled(backing, arguments.scale))?;
    let most = thread::available_parallelism().map_or(1, usize::from) * 8;
    if usize::from(vcpus) > most {
        return Err(Error::Usage(format!(
            "-v {vcpus}: at most {most} threads on this computer"
        )));
    }
    let took = native::run(backing.source, region, vcpus).map_err(|problem| Error::Subject {
        subject: how.name(),
        operation: "page-table-test",
        problem,
    })?;
    let seconds = took
        .times
        .map(|time| time.as_secs_f64() * arguments.scale as f64);
    let report = Report {
        experiment: "page-table-test",
        parameters: parameters(arguments, whole, "native"),
        rows: vec![NativeRow {
            how: how.name(),
            create: seconds[0],
            update: seconds[1],
            rebuild: seconds[2],
            faults: took.faults,
            tables: took.tables,
        }],
        warnings: stats::build_warning().into_iter().collect(),
    };
    report.print(arguments.json, |report| {
        let time = |seconds: f64| report::time(seconds * 1e9);
        let rows = report.rows.iter().map(|row| {
            [
                row.how.to_owned(),
                time(row.create),
                time(row.update),
                time(row.rebuild),
                report::count(row.faults),
                report::count(row.tables),
            ]
        });
        let table = report::table(
            ["", "create", "update", "rebuild", "faults", "tables"],
            1,
            rows.collect(),
        );
        format!("{}\n{table}", head(&report.parameters))
    })
}

/// The guest's addresses have to be such that tables can translate them.
fn addressable(mode: Mode, what: &str) -> Result<(), Error> {
    if mode.bits > 48 {
        return Err(Error::Usage(format!(
            "-m {}: {what} has 48 bits of address",
            mode.name
        )));
    }
    Ok(())
}

fn test(
    arguments: &Arguments,
    profile: &Profile,
    run: simulate::Run<'_>,
) -> Result<Report<Parameters, Row>, Error> {
    let mode = arguments.mode;
    let Guest {
        source: backing,
        bytes,
        vcpus,
    } = arguments.guest();
    Experiment::PageTableTest.fits(profile, vcpus)?;
    let whole = Region::new(mode, backing, bytes, arguments.offset)?;
    addressable(mode, &profile.name)?;
    let region = whole.scaled(backing, arguments.scale)?;
    let pages = region.bytes / PAGE;
    if pages > MOST_PAGES {
        return Err(Error::Usage(format!(
            "-b {}: {} pages are too many to simulate, at most {}: give --scale",
            human(bytes),
            report::count(pages),
            report::count(MOST_PAGES)
        )));
    }
    let hows = arguments.how.map_or(How::EACH.to_vec(), |how| vec![how]);
    let jobs: Vec<Job> = hows
        .iter()
        .map(|how| Job {
            profile: profile.clone(),
            way: how.way(),
            source: backing.source,
            region,
            vcpus,
            phases: [true; 3],
            logging_first: arguments.logging_first,
        })
        .collect();
    let figures = Figures::of(profile, mode, backing, bytes, vcpus);
    let mut warnings = Vec::new();
    let mut rows = Vec::new();
    for (how, ran) in hows.into_iter().zip(run(&jobs)?) {
        match &ran.violation {
            Some(what) if !how.is_unsafe() => {
                return Err(Error::Machine {
                    machine: profile.name.clone(),
                    step: how.name(),
                    problem: what.clone(),
                });
            }
            Some(what) => warnings.push(format!("{} breaks a rule of the machine: {what}", how.name())),
            None if how.is_unsafe() && !profile.architecture.is_x86() => warnings.push(format!(
                "{} leaves out a cleaning that is needed when not every page was mapped before: see --logging-first",
                how.name()
            )),
            None => {}
        }
        rows.push(row(how, ran, arguments, &figures));
    }
    Ok(Report {
        experiment: "page-table-test",
        parameters: parameters(arguments, whole, &profile.name),
        rows,
        warnings,
    })
}

fn parameters(arguments: &Arguments, whole: Region, machine: &str) -> Parameters {
    let guest = arguments.guest();
    Parameters {
        mode: arguments.mode.name,
        backing: guest.source.name,
        bytes: whole.bytes,
        first: format!("{:#x}", whole.first),
        vcpus: guest.vcpus,
        machine: machine.to_owned(),
        scale: arguments.scale,
        logging_first: arguments.logging_first,
    }
}

fn row(how: How, ran: Ran, arguments: &Arguments, figures: &Figures) -> Row {
    let times = ran
        .times
        .map(|time| time.as_secs_f64() * arguments.scale as f64);
    let mut row = Row {
        how: how.name(),
        create: (!arguments.logging_first).then_some(times[0]),
        update: times[1],
        rebuild: times[2],
        published: [None; 3],
        error_percent: [None; 3],
        fitted: [false; 3],
        faults: ran.faults,
        retries: ran.retries,
        cleaned_bytes: ran.cleaned,
        invalidations_issued: ran.invalidations,
        waits_for_completion: ran.waits,
        tables_allocated: ran.tables,
        invalid_longest_us: ran.invalid_longest.as_secs_f64() * 1e6,
        invalid_total_us: ran.invalid_total.as_secs_f64() * 1e6,
        host_splits: ran.splits,
        violation: ran.violation,
    };
    for (phase, took) in times.into_iter().enumerate() {
        let Some((published, fitted)) =
            figures.get(how, phase).filter(|_| !arguments.logging_first)
        else {
            continue;
        };
        row.published[phase] = Some(published);
        row.error_percent[phase] = Some(error_percent(took, published));
        row.fitted[phase] = fitted;
    }
    row
}

/// What was run.
fn head(parameters: &Parameters) -> String {
    let mut text = format!(
        "{} of {} at {}, {} on {}\n",
        human(parameters.bytes),
        parameters.backing,
        parameters.first,
        report::counted(parameters.vcpus.into(), "vCPU", "vCPUs"),
        parameters.machine,
    );
    if parameters.scale > 1 {
        text += &format!(
            "run with 1/{} of it; times are multiplied, counts are of what was run\n",
            parameters.scale
        );
    }
    text
}

fn text(report: &Report<Parameters, Row>) -> String {
    let mut text = head(&report.parameters);
    let time = |seconds: f64| report::time(seconds * 1e9);
    let times = report.rows.iter().map(|row| {
        let mut cells = vec![row.how.to_owned()];
        for (phase, took) in [row.create, Some(row.update), Some(row.rebuild)]
            .into_iter()
            .enumerate()
        {
            cells.push(took.map_or("-".to_owned(), time));
            cells.push(match (row.published[phase], row.error_percent[phase]) {
                (Some(_), Some(error)) => report::marked(error, row.fitted[phase]),
                _ => "-  ".to_owned(),
            });
        }
        cells
    });
    let array = |cells: Vec<String>| -> [String; 7] { cells.try_into().unwrap_or_default() };
    text += "\n";
    text += &report::table(
        [
            "", "create", "error  ", "update", "error  ", "rebuild", "error  ",
        ],
        1,
        times.map(array).collect(),
    );
    let counts = report.rows.iter().map(|row| {
        [
            row.how.to_owned(),
            report::count(row.faults),
            report::count(row.retries),
            human(row.cleaned_bytes),
            report::count(row.invalidations_issued),
            report::count(row.tables_allocated),
            report::time(row.invalid_longest_us * 1e3),
            report::time(row.invalid_total_us * 1e3),
        ]
    });
    text += "\n";
    text += &report::table(
        [
            "",
            "faults",
            "retries",
            "cleaned",
            "invali-\ndations",
            "tables",
            "invalid\nlongest",
            "invalid\nin total",
        ],
        1,
        counts.collect(),
    );
    if report.rows.iter().any(|row| row.fitted.contains(&true)) {
        text += report::FITTED;
    }
    text
}

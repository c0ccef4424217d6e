//! `page-table-test`: vCPUs fault on one stage-2 table, as in the well-known test of that name.

mod backing;
mod baseline;
mod engine;
pub mod job;
mod kvm;
mod native;
pub mod published;
pub mod run;
mod watch;

use std::thread;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tablewright_machine::Profile;

use crate::error::Error;
use crate::guest::input::{Backing, Guest, Mode, PAGE, Region, offset};
use crate::kvm::{Asked, Options as KvmOptions};
use crate::output::columns::{self, Cell, NOT_PUBLISHED, columns};
use crate::output::report::{self, Report, error_percent};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use crate::stats;
use job::{How, Job, Ran, Run};
use published::Figures;

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
    /// Backing of the guest's memory, by the test's name for it [default: anonymous;
    /// anonymous_hugetlb_1gb, of 1G and with 4 vCPUs, without -s, -b and -v]
    #[arg(short, long, value_name = "BACKING")]
    source: Option<Backing>,
    /// How much memory [default: 1G]
    #[arg(short, long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// How many vCPUs touch it, each all of it [default: 1]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// Start of the memory in the guest's physical addresses, in bytes [default: as far up as they
    /// go]
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = offset)]
    offset: Option<u64>,
    /// The machine, or native: threads of this computer, and the engine's own way alone
    #[arg(long, value_enum, default_value = "machine")]
    on: Place,
    /// The profile of a machine, by name or as a file [default: kunpeng-920]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// How faults are handled [default: each way in turn]
    #[arg(long, value_enum)]
    how: Option<How>,
    /// Run with one Nth of the memory, and multiply times by N: every page takes as long as any
    /// other [default: a quarter of a million faults are run in a phase]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    scale: Option<u64>,
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
    kvm: KvmOptions,
}

/// Platform of this experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Place {
    /// The software machine, in virtual time
    Machine,
    /// Threads of this computer, in real time
    Native,
    /// Guests on the KVM of this computer, in real time
    Kvm,
}

const MACHINE: &str = "kunpeng-920";
/// Faults in a phase of a run without `--scale`: less than a second for each way.
const USUAL_FAULTS: u64 = 1 << 18;
/// The tables of more, and what the machine knows of their pages, would not fit into many
/// computers.
const MOST_PAGES: u64 = 1 << 24;

struct Row {
    how: How,
    ran: Ran,
    /// Seconds of the whole memory; none where the phase is left out.
    times: [Option<f64>; 3],
    published: [Option<f64>; 3],
    fitted: [bool; 3],
}

impl Row {
    fn error(&self, phase: usize) -> Option<f64> {
        let published = self.times[phase].zip(self.published[phase]);
        published.map(|(took, published)| error_percent(took, published))
    }

    fn time(&self, phase: usize) -> Cell {
        Cell::or_nothing(self.times[phase], Cell::s)
    }

    fn marked(&self, phase: usize) -> Cell {
        Cell::Marked(self.error(phase), self.fitted[phase])
    }
}

/// Why a phase has no figure.
const LEFT_OUT: &str = "--logging-first leaves it out";

columns! { row: Row;
    ["how"] [0 ""] Cell::text(row.how.name());
    ["create_s"] [1 "create" LEFT_OUT] row.time(0);
    [] [1 "error  " NOT_PUBLISHED] row.marked(0);
    ["update_s"] [1 "update" LEFT_OUT] row.time(1);
    [] [1 "error  " NOT_PUBLISHED] row.marked(1);
    ["rebuild_s"] [1 "rebuild" LEFT_OUT] row.time(2);
    [] [1 "error  " NOT_PUBLISHED] row.marked(2);
    ["published_s"] [] Cell::json(row.published);
    ["error_percent"] [] Cell::json([row.error(0), row.error(1), row.error(2)]);
    ["fitted"] [] Cell::json(row.fitted);
    ["faults"] [2 "faults"] Cell::Count(row.ran.faults);
    ["retries"] [2 "retries"] Cell::Count(row.ran.retries);
    ["cleaned_bytes"] [2 "cleaned"] Cell::Bytes(row.ran.cleaned);
    ["invalidations_issued"] [2 "invali-\ndations"] Cell::Count(row.ran.invalidations);
    ["waits_for_completion"] [] Cell::Count(row.ran.waits);
    ["tables_allocated"] [2 "tables"] Cell::Count(row.ran.tables);
    ["invalid_longest_us"] [2 "invalid\nlongest"]
        Cell::us(row.ran.invalid_longest.as_secs_f64() * 1e6);
    ["invalid_total_us"] [2 "invalid\nin total"]
        Cell::us(row.ran.invalid_total.as_secs_f64() * 1e6);
    ["host_splits"] [] Cell::Count(row.ran.splits);
    ["violation"] [] row.ran.violation.as_ref().map_or(Cell::Absent, Cell::text);
}

struct NativeRow {
    seconds: [f64; 3],
    took: native::Took,
}

columns! { row: NativeRow;
    ["how"] [1 ""] Cell::text(How::Tablewright.name());
    ["create_s"] [1 "create"] Cell::s(row.seconds[0]);
    ["update_s"] [1 "update"] Cell::s(row.seconds[1]);
    ["rebuild_s"] [1 "rebuild"] Cell::s(row.seconds[2]);
    ["faults"] [1 "faults"] Cell::Count(row.took.faults);
    ["tables"] [1 "tables"] Cell::Count(row.took.tables);
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on != Place::Kvm {
        arguments.kvm.unused()?;
    }
    match arguments.on {
        Place::Machine => {}
        Place::Native => return arguments.run_native(),
        Place::Kvm => return arguments.run_kvm(),
    }
    let name = arguments.machine.as_deref().unwrap_or(MACHINE);
    let (profile, left_out) = Experiment::PageTableTest.load(name)?;
    let software = runs::software::<Job>(arguments.threads);
    let mut warnings = Vec::new();
    let (whole, rows) = arguments.rows(&profile, &software, &mut warnings)?;
    warnings.extend(left_out);
    let scale = arguments.scale(whole);
    let report: Report<Value, Row> = Report {
        experiment: "page-table-test",
        parameters: arguments.parameters(whole, scale, &profile.name),
        rows,
        warnings,
    };
    report.print(arguments.json, |Report { rows, .. }| {
        let head = arguments.head(whole, scale, &profile.name);
        let tables = [1, 2].map(|number| columns::table(number, 1, rows)).join("\n");
        let fitted = rows.iter().any(|row| row.fitted.contains(&true));
        format!("{head}\n{tables}{}", report::fitted(fitted))
    })
}

/// Refuses addresses that tables cannot translate.
fn addressable(mode: Mode, what: &str) -> Result<(), Error> {
    match mode.bits {
        ..=48 => Ok(()),
        _ => Err(Error::Usage(format!("-m {}: {what} has 48 bits of address", mode.name))),
    }
}

impl Arguments {
    fn guest(&self) -> Guest {
        let shown = Guest { source: Backing::HUGETLB_1GB, bytes: 1 << 30, vcpus: 4 };
        Guest::new(self.source, self.bytes, self.vcpus, shown)
    }

    /// The part of the memory that is run: the largest of which a run on the machine takes
    /// seconds, if its pages can be divided so.
    fn scale(&self, whole: Region) -> u64 {
        let guest = self.guest();
        let usual = || {
            let faults = whole.bytes / PAGE * u64::from(guest.vcpus);
            let powers = (0..u64::BITS).map(|shift| 1 << shift);
            let divides = |scale: &u64| whole.scaled(guest.source, *scale).is_ok();
            let fit: Vec<u64> = powers.take_while(divides).collect();
            let small = fit.iter().find(|it| faults / **it <= USUAL_FAULTS);
            small.or(fit.last()).copied().unwrap_or(1)
        };
        match self.on {
            Place::Machine => self.scale.unwrap_or_else(usual),
            _ => self.scale.unwrap_or(1),
        }
    }

    fn parameters(&self, whole: Region, scale: u64, machine: &str) -> Value {
        let guest = self.guest();
        json!({
            "mode": self.mode.name,
            "backing": guest.source.name,
            "bytes": whole.bytes,
            "first": format!("{:#x}", whole.first),
            "vcpus": guest.vcpus,
            "machine": machine,
            "scale": scale,
            "logging_first": self.logging_first,
        })
    }

    fn head(&self, whole: Region, scale: u64, machine: &str) -> String {
        let guest = self.guest();
        let mut text = format!(
            "{} of {} at {:#x}, {} on {machine}\n",
            human(whole.bytes),
            guest.source.name,
            whole.first,
            report::counted(guest.vcpus.into(), "vCPU", "vCPUs"),
        );
        if scale > 1 {
            text += &format!(
                "run with 1/{scale} of it; times are multiplied, counts are of what was run\n"
            );
        }
        report::title(&text)
    }

    fn run_kvm(&self) -> Result<(), Error> {
        Error::refuse(
            &[
                (self.how.is_some(), "--how"),
                (self.scale.is_some(), "--scale"),
                (self.machine.is_some(), "--machine"),
                (self.logging_first, "--logging-first"),
                (self.kvm.overlap, "-o"),
                (self.kvm.predict.is_some(), "--predict"),
                (self.threads.threads.is_some(), "--threads"),
            ],
            ": not with --on kvm",
        )?;
        let bytes = self.bytes.map_or(self.kvm.usual_bytes(), Size::bytes);
        let backing = self.source.unwrap_or(Backing::ANONYMOUS);
        let vcpus = self.vcpus.unwrap_or(1).into();
        let asked = Asked {
            bits: self.mode.fixed_bits(),
            first: self.offset,
            ..Asked::new(backing, bytes, vcpus, self.kvm.clone())
        };
        kvm::run(&asked, self.json)
    }

    fn run_native(&self) -> Result<(), Error> {
        Error::refuse(
            &[(self.machine.is_some(), "--machine"), (self.threads.threads.is_some(), "--threads")],
            ": not with --on native",
        )?;
        let how = self.how.unwrap_or(How::Tablewright);
        if how != How::Tablewright || self.logging_first {
            let option = if self.logging_first { "--logging-first" } else { "--how" };
            return Err(Error::Usage(format!(
                "{option}: only tablewright runs natively, with all phases"
            )));
        }
        let Guest { source: backing, bytes, vcpus } = self.guest();
        let whole = Region::new(self.mode, backing, bytes, self.offset)?;
        addressable(self.mode, "the native run")?;
        let scale = self.scale(whole);
        let region = whole.scaled(backing, scale)?;
        let most = thread::available_parallelism().map_or(1, usize::from) * 8;
        if usize::from(vcpus) > most {
            return Err(Error::Usage(format!(
                "-v {vcpus}: at most {most} threads on this computer"
            )));
        }
        let took = native::run(backing.source, region, vcpus).map_err(|problem| {
            Error::Subject { subject: how.name(), operation: "page-table-test", problem }
        })?;
        let seconds = took.times.map(|time| time.as_secs_f64() * scale as f64);
        let report: Report<Value, NativeRow> = Report {
            experiment: "page-table-test",
            parameters: self.parameters(whole, scale, "native"),
            rows: vec![NativeRow { seconds, took }],
            warnings: stats::build_warning().into_iter().collect(),
        };
        report.print(self.json, |report| {
            format!("{}\n{}", self.head(whole, scale, "native"), columns::table(1, 1, &report.rows))
        })
    }

    /// The whole memory, of which a part may have been run, and what each way showed.
    fn rows(
        &self,
        profile: &Profile,
        run: Run<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(Region, Vec<Row>), Error> {
        let Guest { source: backing, bytes, vcpus } = self.guest();
        Experiment::PageTableTest.fits(profile, "-v", vcpus)?;
        let whole = Region::new(self.mode, backing, bytes, self.offset)?;
        addressable(self.mode, &profile.name)?;
        let scale = self.scale(whole);
        let region = whole.scaled(backing, scale)?;
        let pages = region.bytes / PAGE;
        if pages > MOST_PAGES {
            return Err(Error::Usage(format!(
                "-b {}: {} pages are too many to simulate, at most {}: give --scale",
                human(bytes),
                report::count(pages),
                report::count(MOST_PAGES)
            )));
        }
        let hows = self.how.map_or(How::EACH.to_vec(), |how| vec![how]);
        let job = |how: &How| Job {
            profile: profile.clone(),
            way: how.way(),
            source: backing.source,
            region,
            vcpus,
            phases: [true; 3],
            logging_first: self.logging_first,
        };
        let jobs: Vec<Job> = hows.iter().map(job).collect();
        let figures = Figures::of(profile, self.mode, backing, bytes, vcpus);
        let mut rows = Vec::new();
        for (how, ran) in hows.into_iter().zip(run(&jobs)?) {
            let (name, machine) = (how.name(), profile.name.clone());
            match &ran.violation {
                Some(what) if !how.is_unsafe() => {
                    return Err(Error::Machine { machine, step: name, problem: what.clone() });
                }
                Some(what) => {
                    warnings.push(format!("{name} breaks a rule of the machine: {what}"));
                }
                None if how.is_unsafe() && !profile.architecture.is_x86() => warnings.push(format!(
                    "{name} leaves out a cleaning that is needed when not every page was mapped \
                     before: see --logging-first"
                )),
                None => {}
            }
            rows.push(self.row(how, ran, scale, &figures));
        }
        Ok((whole, rows))
    }

    fn row(&self, how: How, ran: Ran, scale: u64, figures: &Figures) -> Row {
        let time = |phase: usize| {
            let is_run = phase > 0 || !self.logging_first;
            is_run.then(|| ran.times[phase].as_secs_f64() * scale as f64)
        };
        let figure = |phase| figures.get(how, phase).filter(|_| !self.logging_first);
        Row {
            how,
            times: [0, 1, 2].map(time),
            published: [0, 1, 2].map(|phase| figure(phase).map(|(figure, _)| figure)),
            fitted: [0, 1, 2].map(|phase| figure(phase).is_some_and(|(_, fitted)| fitted)),
            ran,
        }
    }
}

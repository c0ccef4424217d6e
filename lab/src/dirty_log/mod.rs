//! `dirty-log`: logging what a guest writes, phase by phase as in the well-known test, and above
//! all how the log is disabled.

pub mod figures;
mod options;
mod picture;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use tablewright_experiments::dirty_log::{
    self as simulate, By, Case, How, Job, MOST_BYTES, Options, Ran,
};
use tablewright_experiments::input::{Backing, Guest, Mode};
use tablewright_experiments::no_violation;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::file::Target;
use crate::kvm::{self, On};
use crate::machine::named::Named;
use crate::needs::{self, Experiment};
use crate::page_table_test;
use crate::published;
use crate::report::{self, Report, error_percent};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use figures::{Bucket, Metric};

/// What `dirty-log` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright dirty-log -s anonymous_hugetlb_1gb -v 416 -b 1G -e
  tablewright dirty-log -s anonymous_hugetlb_2mb -v 64 -b 4G -e --how tablewright --json
  tablewright dirty-log -v 4 -b 64M -i 3 -w 50 -a
  tablewright dirty-log -v 4 -b 64M --log modification --how tablewright
  tablewright dirty-log -v 4 -b 64M --machine kunpeng-920
  tablewright dirty-log --on kvm -s anonymous_thp -b 1G -v 2 -e    on the KVM of this computer")]
pub struct Arguments {
    /// The guest's mode, by name or by its number in the test of 2021: how many addresses it has
    #[arg(short, long, value_name = "MODE", default_value = "PXXV48_4K")]
    mode: Mode,
    /// What backs the guest's memory, by the test's name for it [default: anonymous;
    /// anonymous_hugetlb_2mb, of 64M for each of 8 vCPUs, without -s, -b and -v]
    #[arg(short, long, value_name = "BACKING")]
    source: Option<Backing>,
    /// How much memory each vCPU has [default: 1G]
    #[arg(short, long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// How many vCPUs; each accesses its own part of the memory [default: 1]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// How often the memory is written, and the log read and cleared
    #[arg(short, long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(1..=1000))]
    iterations: u32,
    /// The vCPUs go on while logging is disabled
    #[arg(short = 'e', long)]
    run_while_disabling: bool,
    /// Reading the log also clears it
    #[arg(short = 'g', long)]
    no_manual_protect: bool,
    /// How many slots the memory is in
    #[arg(short = 'x', long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1024))]
    slots: u16,
    /// Of so many accesses of a hundred the guest writes; it reads in the others
    #[arg(short, long, value_name = "PERCENT", default_value = "100", value_parser = clap::value_parser!(u8).range(0..=100))]
    write_percent: u8,
    /// Access pages in random order
    #[arg(short = 'a', long)]
    random_access: bool,
    /// The seed of what is random
    #[arg(short, long, value_name = "SEED", default_value = "1")]
    random_seed: u64,
    /// Where the memory starts in the guest's physical addresses, in bytes [default: as far up as
    /// they go]
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = page_table_test::offset)]
    offset: Option<u64>,
    /// The profile of a machine, by name or as a file [default: x86-416-vcpus]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// How logging is disabled [default: each way in turn; of arm64 tablewright alone]
    #[arg(long, value_enum)]
    how: Option<How>,
    /// What finds the pages that are written
    #[arg(long, value_enum, default_value = "faults")]
    log: By,
    /// Run with one Nth of the pages, and multiply what takes as long as there are pages [default:
    /// a quarter of a million pages are run, or a block for each vCPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    scale: Option<u64>,
    /// What to run on
    #[arg(long, value_enum, default_value = "machine")]
    on: On,
    #[command(flatten)]
    threads: Threads,
    /// Draw how long disabling takes, and the longest stall, into this SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    kvm: kvm::Options,
}

impl Arguments {
    fn guest(&self) -> Guest {
        let shown = Guest {
            source: Backing::HUGETLB_2MB,
            bytes: 64 << 20,
            vcpus: 8,
        };
        Guest::new(self.source, self.bytes, self.vcpus, shown)
    }
}

/// The machine, if none is named.
const MACHINE: &str = "x86-416-vcpus";

#[derive(Serialize)]
struct Parameters {
    source: &'static str,
    bytes_per_vcpu: u64,
    vcpus: u16,
    iterations: u32,
    slots: u16,
    write_percent: u8,
    random_access: bool,
    manual_protect: bool,
    run_while_disabling: bool,
    log: &'static str,
    all_set: bool,
    overlap: bool,
    nested: bool,
    machine: String,
    /// One page of a run stands for so many.
    scale: u64,
}

#[derive(Serialize)]
struct Row {
    how: &'static str,
    /// Seconds of virtual time.
    #[serde(rename = "populate_s")]
    populate: f64,
    #[serde(rename = "enable_s")]
    enable: f64,
    #[serde(rename = "dirty_s")]
    dirty: Vec<f64>,
    #[serde(rename = "get_s")]
    get: Vec<f64>,
    #[serde(rename = "clear_s")]
    clear: Vec<f64>,
    #[serde(rename = "disable_s")]
    disable: f64,
    /// What was published for disabling, and how much more the machine takes.
    #[serde(rename = "published_s")]
    published: Option<f64>,
    error_percent: Option<f64>,
    /// The machine was fitted on this figure.
    fitted: bool,
    /// How long it took to take each table apart.
    zaps: Vec<Bucket>,
    /// How long accesses took that did not just go through, from their issue to their completion.
    stall_longest_us: f64,
    stall_p999_us: f64,
    stall_total_s: f64,
    /// Of disabling.
    flushes: u64,
    kicks: u64,
    faults: u64,
    retries: u64,
    /// Times that a vCPU left its guest because hardware's log was full.
    log_full_exits: u64,
}

/// Runs it, and prints what it took.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Kvm {
        return kvm::dirty_log(&on_kvm(arguments)?, arguments.json);
    }
    options::only_on_kvm(&arguments.kvm)?;
    let (profile, left_out) = needs::load(
        arguments.machine.as_deref().unwrap_or(MACHINE),
        Experiment::DirtyLog,
    )?;
    let plot = arguments.plot.as_deref();
    let plot = plot.map(|path| Target::new("--plot", path)).transpose()?;
    let mut report = test(
        arguments,
        &profile,
        &runs::software::<simulate::Job>(arguments.threads),
    )?;
    report.warnings.extend(left_out);
    report.print(arguments.json, text)?;
    match plot {
        Some(plot) => plot.fill(&picture::of(&report).svg()?),
        None => Ok(()),
    }
}

/// The guest on KVM. What is not said is small there: it takes real time.
fn on_kvm(arguments: &Arguments) -> Result<kvm::Asked, Error> {
    kvm::only_machine(
        "kvm",
        &[
            (arguments.how.is_some(), "--how"),
            (arguments.scale.is_some(), "--scale"),
            (arguments.machine.is_some(), "--machine"),
            (arguments.plot.is_some(), "--plot"),
            (arguments.threads.threads.is_some(), "--threads"),
            (arguments.log != By::Faults, "--log"),
        ],
    )?;
    if arguments.no_manual_protect && arguments.kvm.all_set {
        let why = "--all-set: only with manual protection, which -g does without";
        return Err(Error::Usage(why.to_owned()));
    }
    let vcpus = arguments.vcpus.unwrap_or(1);
    let each = arguments.bytes.map_or(kvm::USUAL_BYTES, Size::bytes);
    let bytes = each
        .checked_mul(vcpus.into())
        .filter(|all| *all <= MOST_BYTES);
    let bytes = bytes.ok_or_else(|| {
        Error::Usage(format!(
            "-b {}: at most {} for all vCPUs",
            human(each),
            human(MOST_BYTES)
        ))
    })?;
    Ok(kvm::Asked {
        bits: arguments.mode.fixed_bits(),
        first: arguments.offset,
        slots: arguments.slots.into(),
        manual: !arguments.no_manual_protect,
        iterations: arguments.iterations,
        write_percent: arguments.write_percent,
        random: arguments.random_access,
        seed: arguments.random_seed,
        running: arguments.run_while_disabling,
        ..kvm::Asked::new(
            arguments.source.unwrap_or(Backing::ANONYMOUS),
            bytes,
            vcpus.into(),
            arguments.kvm.clone(),
        )
    })
}

fn jobs(arguments: &Arguments, profile: &Profile) -> Result<Vec<Job>, Error> {
    let case = case(arguments);
    let hows = options::ways(arguments, profile)?;
    let options = options::of(arguments, profile, case.vcpus)?;
    let mut jobs = Vec::new();
    for how in hows {
        let job = case.job(profile, how)?;
        let page = job.source.bytes();
        if !(job.region.bytes / page).is_multiple_of(u64::from(arguments.slots)) {
            return Err(Error::Usage(format!(
                "-x {}: {} of pages of {} cannot be divided so",
                arguments.slots,
                human(job.region.bytes),
                human(page)
            )));
        }
        jobs.push(Job {
            iterations: arguments.iterations,
            slots: arguments.slots,
            write_percent: arguments.write_percent,
            random: arguments.random_access,
            seed: arguments.random_seed,
            manual: !arguments.no_manual_protect,
            running: arguments.run_while_disabling,
            options,
            ..job
        });
    }
    Ok(jobs)
}

fn case(arguments: &Arguments) -> Case {
    let guest = arguments.guest();
    Case {
        backing: guest.source,
        bytes: guest.bytes,
        vcpus: guest.vcpus,
        mode: arguments.mode,
        offset: arguments.offset,
        scale: arguments.scale,
    }
}

fn test(
    arguments: &Arguments,
    profile: &Profile,
    run: simulate::Run<'_>,
) -> Result<Report<Parameters, Row>, Error> {
    let guest = arguments.guest();
    Experiment::DirtyLog.fits(profile, guest.vcpus)?;
    let jobs = jobs(arguments, profile)?;
    let is_usual = jobs.iter().all(|job| job.options == Options::default());
    let is_published = case(arguments).is_published() && arguments.run_while_disabling && is_usual;
    let mut rows = Vec::new();
    for (job, ran) in jobs.iter().zip(run(&jobs)?) {
        sound(job, &ran)?;
        rows.push(row(job, &ran, is_published));
    }
    Ok(Report {
        experiment: "dirty-log",
        parameters: Parameters {
            source: guest.source.name,
            bytes_per_vcpu: guest.bytes,
            vcpus: guest.vcpus,
            iterations: arguments.iterations,
            slots: arguments.slots,
            write_percent: arguments.write_percent,
            random_access: arguments.random_access,
            manual_protect: !arguments.no_manual_protect,
            run_while_disabling: arguments.run_while_disabling,
            log: arguments.log.name(),
            all_set: arguments.kvm.all_set,
            overlap: arguments.kvm.overlap,
            nested: arguments.kvm.nested,
            machine: profile.name.clone(),
            scale: jobs
                .first()
                .map_or(1, |job| job.scale.smaller * job.scale.fewer),
        },
        rows,
        warnings: Vec::new(),
    })
}

/// That the machine has no complaint.
pub fn sound(job: &Job, ran: &Ran) -> Result<(), Error> {
    no_violation(&job.profile, job.how.name(), ran.violation.as_deref())
}

fn row(job: &Job, ran: &Ran, is_published: bool) -> Row {
    let figures = published::built_in("dirty-log").unwrap_or_default();
    let figure = figures.iter().find(|row| {
        is_published
            && figures::metric(row) == Some(Metric::Disabling)
            && job.profile.system.published_as.contains(&row.system)
    });
    let published = figure.and_then(|row| match job.how {
        How::Before => row.before,
        How::After => row.after,
        _ => None,
    });
    let fitted = figure.is_some_and(|row| {
        let profile = &job.profile;
        job.how == How::Before
            && profile.is_fitted_on_metric(&row.system, &row.configuration, &row.metric)
    });
    let seconds = |times: &[Time]| times.iter().map(|time| time.as_secs_f64()).collect();
    let (longest, p999, total) = figures::stalls(&ran.stalls);
    let disable = ran.disable.as_secs_f64();
    Row {
        how: job.how.name(),
        populate: ran.populate.as_secs_f64(),
        enable: ran.enable.as_secs_f64(),
        dirty: seconds(&ran.dirty),
        get: seconds(&ran.get),
        clear: seconds(&ran.clear),
        disable,
        published,
        error_percent: published.map(|it| error_percent(disable, it)),
        fitted,
        zaps: figures::histogram(&ran.zaps, job.scale.fewer),
        stall_longest_us: longest.as_secs_f64() * 1e6,
        stall_p999_us: p999.as_secs_f64() * 1e6,
        stall_total_s: total,
        flushes: ran.flushes,
        kicks: ran.kicks,
        faults: ran.faults,
        retries: ran.retries,
        log_full_exits: ran.log_full,
    }
}

fn head(parameters: &Parameters) -> String {
    format!(
        "{}, {} of {} for each of {}",
        parameters.machine,
        human(parameters.bytes_per_vcpu),
        parameters.source,
        report::counted(u64::from(parameters.vcpus), "vCPU", "vCPUs"),
    )
}

/// The phases before the last, in the words of the well-known test.
fn phases(row: &Row, manual: bool) -> String {
    let seconds = |name: &str, time: f64| format!("{name}: {}\n", report::time(time * 1e9));
    let mut text = seconds("Populate memory time", row.populate);
    text += &seconds("Enabling dirty logging time", row.enable);
    for (number, dirty) in row.dirty.iter().enumerate() {
        let of = |what: &str| format!("Iteration {} {what} time", number + 1);
        text += "\n";
        text += &seconds(&of("dirty memory"), *dirty);
        text += &seconds(&of("get dirty log"), row.get[number]);
        if let Some(clear) = row.clear.get(number) {
            text += &seconds(&of("clear dirty log"), *clear);
        }
    }
    text += "\n";
    let over = |what: &str, times: &[f64]| {
        let total: f64 = times.iter().sum();
        format!(
            "{what} dirty log over {} took {}. (Avg {}/iteration)\n",
            report::counted(times.len() as u64, "iteration", "iterations"),
            report::time(total * 1e9),
            report::time(total / times.len().max(1) as f64 * 1e9)
        )
    };
    text += &over("Get", &row.get);
    if manual {
        text += &over("Clear", &row.clear);
    }
    if row.log_full_exits > 0 {
        let exits = report::counted(row.log_full_exits, "time", "times");
        text += &format!("Hardware's log was full {exits}\n");
    }
    text
}

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = head(parameters) + "\n";
    if parameters.scale > 1 {
        text += &format!(
            "with 1/{} of the pages; what takes as long as there are pages is multiplied\n",
            parameters.scale
        );
    }
    if let Some(row) = report.rows.first() {
        text += "\n";
        text += &phases(row, parameters.manual_protect);
    }
    let rows = report.rows.iter().map(|row| {
        let error = row
            .error_percent
            .map_or("-".to_owned(), |error| report::marked(error, row.fitted));
        [
            row.how.to_owned(),
            report::time_if_any(row.disable * 1e9),
            error,
            report::time_if_any(row.stall_longest_us * 1e3),
            report::time_if_any(row.stall_p999_us * 1e3),
            report::time_if_any(row.stall_total_s * 1e9),
            report::count(row.flushes),
            report::count(row.faults),
            report::count(row.retries),
        ]
    });
    text += &format!("\n{}:\n\n", figures::DISABLING);
    text += &report::table(
        [
            "",
            "time",
            "error  ",
            "stall\nlongest",
            "99.9 %",
            "in total",
            "flushes",
            "faults",
            "retries",
        ],
        1,
        rows.collect(),
    );
    text += &zaps(report);
    if report.rows.iter().any(|row| row.fitted) {
        text += report::FITTED;
    }
    text
}

/// How long the tables took that were taken apart.
fn zaps(report: &Report<Parameters, Row>) -> String {
    let ways: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| !row.zaps.is_empty())
        .collect();
    let longest = ways.iter().map(|row| row.zaps.len()).max().unwrap_or(0);
    let count = |how: How, at: usize| {
        let way = ways.iter().find(|row| row.how == how.name());
        way.map_or("-".to_owned(), |row| {
            let count = row.zaps.get(at).map_or(0, |bucket| bucket.count);
            report::count(count)
        })
    };
    let rows = (0..longest).filter_map(|at| {
        let bucket = ways.iter().find_map(|row| row.zaps.get(at))?;
        let some = |row: &&Row| row.zaps.get(at).is_some_and(|bucket| bucket.count > 0);
        ways.iter().any(some).then(|| {
            [
                format!("{} to {} ms", bucket.from_ms, bucket.to_ms),
                count(How::Before, at),
                count(How::FlushFirst, at),
                count(How::UnfreezeFirst, at),
                count(How::After, at),
            ]
        })
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let header = ["tables", "before", "flush-first", "unfreeze-first", "after"];
    format!("\n{}", report::table(header, 1, rows))
}

#[cfg(test)]
mod tests {
    use tablewright_machine::Costs;

    use super::*;

    /// A call takes what it takes however many pages there are, and a cost that a profile leaves
    /// out counts nothing.
    #[test]
    fn calls_copies_and_visits_are_where_a_host_has_them() {
        let neutral = Profile::load("x86-12-vcpus").unwrap();
        let ran = |profile: &Profile, scale| {
            let case = Case {
                backing: Backing::ANONYMOUS,
                bytes: 4 << 20,
                vcpus: 1,
                mode: "P48V48_4K".parse::<Mode>().unwrap(),
                offset: None,
                scale: Some(scale),
            };
            let job = case.job(profile, How::Before).unwrap();
            simulate::run(&Job {
                iterations: 1,
                slots: 1,
                manual: true,
                running: false,
                ..job
            })
            .unwrap()
        };
        let with = |change: &dyn Fn(&mut Costs), scale| {
            let mut profile = neutral.clone();
            change(&mut profile.costs);
            (ran(&neutral, scale), ran(&profile, scale))
        };
        for scale in [1, 2] {
            let call = Time::us(3);
            let (before, after) = with(&|costs| costs.call = call, scale);
            assert_eq!(after.enable, before.enable + call, "{scale}");
            assert_eq!(after.get[0], before.get[0] + call, "{scale}");
            assert_eq!(after.clear[0], before.clear[0] + call, "{scale}");
            assert_eq!(after.disable, before.disable + call, "{scale}");
            let passes = |ran: &Ran| (ran.populate, ran.dirty.clone());
            assert_eq!(passes(&after), passes(&before), "{scale}");
        }
        // 1,024 pages: 16 words, two lines.
        let (before, after) = with(&|costs| costs.copy = Time::ns(50), 1);
        assert_eq!((before.get[0], after.get[0]), (Time::ns(16), Time::ns(100)));
        let (before, after) = with(&|costs| costs.visit = Time::ns(7), 1);
        assert_eq!(after.enable, before.enable + Time::ns(7 * 1024));
        assert_eq!(after.clear, before.clear);
    }
}

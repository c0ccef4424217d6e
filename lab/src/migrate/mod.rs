//! `migrate`: a live migration by pre-copy, under each kind of dirty logging.

mod measured;
mod picture;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tablewright::dirty::LogError;
use tablewright_experiments::migrate::writes::{Model, Writes};
use tablewright_experiments::migrate::{
    self as simulate, BLOCK, HostTimes, Job, Logging, PAGE, PERIOD, Ran, SLICE,
};
use tablewright_machine::{MAX_CPUS, Profile, Time};

use crate::error::Error;
use crate::file::Target;
use crate::machine::named::Named;
use crate::needs::{self, Experiment};
use crate::report::{self, Report};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use measured::Rates;
use tablewright_recorder::recording::Interval;

/// What `migrate` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright migrate                                           a guest that writes as fast as it can
  tablewright migrate --writes fixed --rate 20000               20,000 pages each second
  tablewright migrate --recording sqlite.twr --bandwidth 128M   a guest that does what a program did
  tablewright migrate --page-size 2M --logging eager-split --json
  tablewright migrate --from doctor.json                        a host and a guest as fast as this computer

The exit status is 1 if the memory at the destination is not that of the source.")]
pub struct Arguments {
    /// The guest's memory [default: 256M, or what the recording has]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// How much of it holds something at the start; the rest is zeros [default: all]
    #[arg(long, value_name = "SIZE")]
    used: Option<Size>,
    /// How many vCPUs it has
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: u16,
    /// The pages of the host behind it
    #[arg(long, value_enum, default_value = "4K")]
    page_size: PageSize,
    /// Bytes that the link carries in a second
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    bandwidth: Size,
    /// Milliseconds for which the guest may be stopped
    #[arg(long, value_name = "MS", default_value = "300", value_parser = clap::value_parser!(u64).range(..=3_600_000))]
    downtime_limit: u64,
    /// After so many seconds the guest is stopped, whatever is left to be sent
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// How writes are logged, several separated by commas [default: all but eager-split]
    #[arg(long, value_enum, value_delimiter = ',')]
    logging: Vec<Logging>,
    /// How much memory is protected together before it is sent: manual, all-set, eager-split
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    chunk: Size,
    /// How many entries the ring of each vCPU has, a power of two
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(..=1 << 16))]
    ring_size: u32,
    /// How the guest writes
    #[arg(long, value_enum, default_value = "greedy")]
    writes: Model,
    /// How much of its memory it writes, from the beginning [default: an eighth]
    #[arg(long, value_name = "SIZE")]
    set: Option<Size>,
    /// Pages that it writes in a second, all vCPUs together [default: as fast as it can; fixed
    /// needs one]
    #[arg(long, value_name = "PAGES", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rate: Option<u64>,
    /// Nanoseconds that the guest takes to write a page [default: 200, or what --from has measured]
    #[arg(long, value_name = "NS", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    work: Option<u64>,
    /// The guest writes what was recorded of a program, over and over
    #[arg(long, value_name = "FILE", conflicts_with_all = ["writes", "set", "rate", "seed"])]
    recording: Option<PathBuf>,
    /// Slow the guest down while it writes more than half of what is sent
    #[arg(long)]
    auto_converge: bool,
    /// Of the random writes
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// The profile of a machine, by name or as a file
    #[arg(
        long,
        visible_alias = "machine",
        value_name = "PROFILE",
        value_parser = Named,
        hide_possible_values = true,
        default_value = "neutral"
    )]
    profile: String,
    /// The computer at hand as the machine: its profile and its rates, from what `dirty-log --on
    /// kvm --json` or `doctor --json` has printed into these files
    #[arg(long, value_name = "RUN.json", num_args = 1.., conflicts_with = "profile")]
    from: Vec<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// Draw the rounds into an SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The pages of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PageSize {
    /// 4 KiB
    #[value(name = "4K", alias = "4k")]
    Small,
    /// 2 MiB, where the guest's memory is mapped in leaves as large until it is logged
    #[value(name = "2M", alias = "2m")]
    Large,
}

impl PageSize {
    const fn bytes(self) -> u64 {
        match self {
            Self::Small => PAGE,
            Self::Large => BLOCK,
        }
    }
}

/// Nanoseconds: 4 KiB at 20 GB/s.
const USUAL_WORK: u64 = 200;

/// No more is simulated.
const MOST_MEMORY: u64 = 64 << 30;

/// Seconds that the memory takes at most on the link.
const SLOWEST: u64 = 3600;

#[derive(Serialize)]
struct Parameters {
    machine: String,
    memory_bytes: u64,
    used_bytes: u64,
    vcpus: u16,
    #[serde(rename = "page_bytes")]
    page_size: u64,
    #[serde(rename = "bandwidth_bytes_per_second")]
    bandwidth: u64,
    downtime_limit_ms: u64,
    timeout_s: u64,
    chunk_bytes: u64,
    #[serde(rename = "ring_entries")]
    ring_size: u32,
    writes: String,
    set_bytes: Option<u64>,
    #[serde(rename = "rate_pages_per_second")]
    rate: Option<u64>,
    work_ns: u64,
    /// What the profile and the work are from.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Rates>,
    auto_converge: bool,
    seed: u64,
}

/// A migration, with the figures of QEMU's `query-migrate` where it has them, and the unit of each
/// behind its name.
#[derive(Serialize)]
struct Row {
    logging: Logging,
    converged: bool,
    /// Milliseconds, all four.
    #[serde(rename = "total_time_ms")]
    total_time: f64,
    #[serde(rename = "downtime_ms")]
    downtime: f64,
    #[serde(rename = "expected_downtime_ms")]
    expected_downtime: f64,
    #[serde(rename = "setup_time_ms")]
    setup_time: f64,
    /// Percent.
    cpu_throttle_percentage: u64,
    ram: Ram,
    guest: GuestRow,
    host: Host,
    rounds: Vec<RoundRow>,
}

#[derive(Serialize)]
struct Ram {
    /// Bytes, all three.
    #[serde(rename = "transferred_bytes")]
    transferred: u64,
    #[serde(rename = "remaining_bytes")]
    remaining: u64,
    #[serde(rename = "total_bytes")]
    total: u64,
    /// Pages.
    #[serde(rename = "duplicate_pages")]
    duplicate: u64,
    #[serde(rename = "normal_pages")]
    normal: u64,
    normal_bytes: u64,
    /// Pages in a second.
    #[serde(rename = "dirty_pages_per_second")]
    dirty_pages_rate: u64,
    pages_per_second: u64,
    dirty_sync_count: u64,
    /// Megabits in a second.
    #[serde(rename = "megabits_per_second")]
    mbps: f64,
    #[serde(rename = "page_bytes")]
    page_size: u64,
}

#[derive(Serialize)]
struct GuestRow {
    /// Pages written, and in each second that the guest was not stopped.
    writes: u64,
    writes_per_second: u64,
    faults: u64,
    stall_longest_us: f64,
    stall_total_ms: f64,
    rings_full: u64,
}

#[derive(Serialize)]
struct Host {
    invalidations: u64,
    waits_for_completion: u64,
    kicks: u64,
}

#[derive(Serialize)]
struct RoundRow {
    at_ms: f64,
    dirty_pages: u64,
    remaining_pages: u64,
    cpu_throttle_percentage: u64,
}

/// Migrates, and prints how it went.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    Error::once("--logging", &arguments.logging, |logging| logging.name())?;
    let (mut profile, rates) = match arguments.from.as_slice() {
        [] => (Profile::load(&arguments.profile)?, None),
        files => {
            let here = measured::here(files)?;
            (here.profile, Some(here.rates))
        }
    };
    let left_out = needs::complete(&mut profile, Experiment::Migrate);
    check(&profile, arguments.vcpus)?;
    let recording = arguments.recording.as_deref().map(recorded).transpose()?;
    let (parameters, job) = plan(arguments, profile, rates, recording)?;
    let plot = arguments
        .plot
        .as_deref()
        .map(|path| Target::new("--plot", path))
        .transpose()?;
    let mut kinds = arguments.logging.clone();
    if kinds.is_empty() {
        kinds = Logging::USUAL.to_vec();
    }
    let jobs: Vec<Job> = kinds
        .iter()
        .map(|&logging| Job {
            logging,
            ..job.clone()
        })
        .collect();
    let ran = runs::software::<simulate::Job>(arguments.threads)(&jobs)?;
    let mut warnings = Vec::from_iter(left_out);
    for (kind, ran) in kinds.iter().zip(&ran) {
        if !ran.converged {
            warnings.push(format!(
                "{}: the guest was stopped after {} s, with more left than fits into the downtime",
                kind.name(),
                arguments.timeout
            ));
        }
    }
    let report = Report {
        experiment: "migrate",
        rows: kinds
            .into_iter()
            .zip(ran)
            .map(|(kind, ran)| row(kind, ran, job.pages))
            .collect(),
        parameters,
        warnings,
    };
    if let Some(plot) = plot {
        plot.fill(&picture::of(&report).svg()?)?;
    }
    report.print(arguments.json, text)
}

/// Whether a machine can run it.
fn check(profile: &Profile, vcpus: u16) -> Result<(), Error> {
    if let Some(why) = Experiment::Migrate.unsuitable(profile) {
        return Err(Error::Usage(format!("{}: {why}", profile.name)));
    }
    // One CPU is the host's own.
    let cpus = profile.system.cpus.unwrap_or(u32::MAX);
    let most = cpus.min(MAX_CPUS as u32).saturating_sub(1);
    if u32::from(vcpus) > most {
        return Err(Error::Usage(format!(
            "--vcpus {vcpus}: {} has {} for them, besides the one of the host's thread",
            profile.name,
            report::counted(most.into(), "CPU", "CPUs")
        )));
    }
    Ok(())
}

/// A recording that can be a guest: its pages and its intervals.
fn recorded(path: &Path) -> Result<(u64, Arc<[Interval]>), Error> {
    let recording = crate::record::open(path)?;
    let unfit = |why: &str| Err(Error::Usage(format!("{}: {why}", path.display())));
    if recording.header().page_size != PAGE {
        return unfit("migrate has pages of 4 KiB, and this recording has others");
    }
    let intervals: Arc<[Interval]> = recording.intervals().collect();
    let long = intervals.iter().any(|it| it.length_ns > 0);
    if recording.summary().written == 0 || !long {
        return unfit("nothing was written in this recording");
    }
    Ok((recording.pages(), intervals))
}

/// What is to be simulated.
fn plan(
    arguments: &Arguments,
    profile: Profile,
    measured: Option<Rates>,
    recording: Option<(u64, Arc<[Interval]>)>,
) -> Result<(Parameters, Job), Error> {
    let usage = |text: String| Err(Error::Usage(text));
    let page = arguments.page_size.bytes();
    let needed = recording.as_ref().map(|(pages, _)| pages * PAGE);
    let memory = match (arguments.memory, needed) {
        (Some(memory), _) => memory.bytes(),
        (None, Some(needed)) => needed.next_multiple_of(BLOCK),
        (None, None) => 256 << 20,
    };
    if memory > MOST_MEMORY {
        return usage(format!(
            "--memory {}: at most {} are simulated",
            human(memory),
            human(MOST_MEMORY)
        ));
    }
    let bandwidth = arguments.bandwidth.bytes();
    if memory / bandwidth > SLOWEST {
        return usage(format!(
            "--bandwidth {}: the memory alone would take more than {SLOWEST} s",
            human(bandwidth)
        ));
    }
    if let Some(needed) = needed.filter(|needed| *needed > memory) {
        return usage(format!(
            "--memory {}: the recording is of {}",
            human(memory),
            human(needed)
        ));
    }
    for (option, size) in [("--memory", memory), ("--chunk", arguments.chunk.bytes())] {
        if !size.is_multiple_of(page) {
            return usage(format!(
                "{option} {}: not a multiple of {}",
                human(size),
                human(page)
            ));
        }
    }
    for (option, size) in [("--set", arguments.set), ("--used", arguments.used)] {
        let Some(size) = size else { continue };
        if size.bytes() > memory {
            return usage(format!(
                "{option} {size}: the guest has {} of memory",
                human(memory)
            ));
        }
        if !size.bytes().is_multiple_of(PAGE) {
            return usage(format!("{option} {size}: not a multiple of 4 KiB"));
        }
    }
    if arguments.writes == Model::Greedy && arguments.rate.is_some() {
        return usage("--rate: --writes greedy is as fast as it can".to_owned());
    }
    if arguments.writes == Model::Fixed && arguments.rate.is_none() {
        return usage("--writes fixed: needs a --rate".to_owned());
    }
    let ring = arguments.ring_size as usize;
    if !ring.is_power_of_two() {
        return usage(format!("--ring-size {ring}: {}", LogError::RingSize(ring)));
    }
    let set = arguments.set.map_or(usual_set(memory), Size::bytes);
    let used = arguments.used.map_or(memory, Size::bytes);
    let write_ns = measured.as_ref().and_then(|rates| rates.write_ns);
    let usual = write_ns.map_or(USUAL_WORK, |ns| (ns.round() as u64).max(1));
    let work = arguments.work.unwrap_or(usual);
    let parameters = Parameters {
        machine: profile.name.clone(),
        memory_bytes: memory,
        used_bytes: used,
        vcpus: arguments.vcpus,
        page_size: page,
        bandwidth,
        downtime_limit_ms: arguments.downtime_limit,
        timeout_s: arguments.timeout,
        chunk_bytes: arguments.chunk.bytes(),
        ring_size: arguments.ring_size,
        writes: match &arguments.recording {
            Some(path) => path.display().to_string(),
            None => format!("{:?}", arguments.writes).to_lowercase(),
        },
        set_bytes: recording.is_none().then_some(set),
        rate: arguments.rate,
        work_ns: work,
        measured,
        auto_converge: arguments.auto_converge,
        seed: arguments.seed,
    };
    let writes = match recording {
        Some((_, intervals)) => Writes::Recorded(intervals),
        None => Writes::Model {
            model: arguments.writes,
            set: set / PAGE,
            rate: arguments.rate,
            seed: arguments.seed,
        },
    };
    let job = Job {
        profile,
        logging: Logging::Manual,
        pages: memory / PAGE,
        used: used / PAGE,
        mapped: memory / PAGE,
        one_lock: false,
        host: HostTimes::default(),
        vcpus: arguments.vcpus,
        large: arguments.page_size == PageSize::Large,
        bandwidth,
        downtime_limit: Time::ms(arguments.downtime_limit),
        timeout: Time::s(arguments.timeout),
        slice: SLICE,
        period: PERIOD,
        chunk: arguments.chunk.bytes() / PAGE,
        ring,
        writes,
        work: Time::ns(work),
        zeros: Time::ZERO,
        auto_converge: arguments.auto_converge,
        order: simulate::Order::Right,
    };
    Ok((parameters, job))
}

/// An eighth of the memory, and at least a page.
fn usual_set(memory: u64) -> u64 {
    (memory / 8).next_multiple_of(PAGE)
}

fn row(logging: Logging, ran: Ran, pages: u64) -> Row {
    let ms = |time: Time| time.as_secs_f64() * 1e3;
    let per_second = |count: u64, time: Time| match time {
        Time::ZERO => 0.0,
        time => count as f64 / time.as_secs_f64(),
    };
    let rounds = ran.rounds.iter().map(|round| RoundRow {
        at_ms: ms(round.at),
        dirty_pages: round.dirty,
        remaining_pages: round.remaining,
        cpu_throttle_percentage: round.throttle,
    });
    Row {
        logging,
        converged: ran.converged,
        total_time: ms(ran.total),
        downtime: ms(ran.downtime),
        expected_downtime: ms(ran.expected_downtime),
        setup_time: ms(ran.setup),
        cpu_throttle_percentage: ran.throttle,
        ram: Ram {
            transferred: ran.transferred,
            remaining: ran.remaining * PAGE,
            total: pages * PAGE,
            duplicate: ran.duplicate,
            normal: ran.normal,
            normal_bytes: ran.normal * PAGE,
            dirty_pages_rate: ran.dirty_rate.round() as u64,
            pages_per_second: per_second(ran.normal + ran.duplicate, ran.total).round() as u64,
            dirty_sync_count: ran.syncs,
            mbps: per_second(ran.transferred * 8, ran.total) / 1e6,
            page_size: PAGE,
        },
        guest: GuestRow {
            writes: ran.writes,
            writes_per_second: per_second(ran.writes, ran.running).round() as u64,
            faults: ran.faults,
            stall_longest_us: ran.stall_longest.as_secs_f64() * 1e6,
            stall_total_ms: ms(ran.stall_total),
            rings_full: ran.full,
        },
        host: Host {
            invalidations: ran.invalidations,
            waits_for_completion: ran.waits,
            kicks: ran.kicks,
        },
        rounds: rounds.collect(),
    }
}

/// What was run.
fn head(parameters: &Parameters) -> String {
    let pages = |rate| format!(", {} pages/s", report::count(rate));
    let set = parameters
        .set_bytes
        .map(|bytes| format!(" of {}", human(bytes)))
        .unwrap_or_default();
    let measured = parameters.measured.as_ref().map(|rates| {
        let host = report::wrapped(&format!("here: {}", rates.host), 78, "  ");
        let write = rates
            .write_ns
            .map_or("not told".to_owned(), report::time);
        format!(
            "{host}\nmeasured there: a write of a page {write}, of one that is logged {}, {} pages/s\n",
            report::time(rates.logged_write_ns),
            report::count(rates.dirty_pages_per_second as u64),
        )
    });
    let measured = measured.unwrap_or_default();
    format!(
        "{measured}{} of memory in pages of {}, {} on {}\nlink of {}/s, downtime limit {} ms\nthe guest writes: {}{set}{}\n",
        human(parameters.memory_bytes),
        human(parameters.page_size),
        report::counted(parameters.vcpus.into(), "vCPU", "vCPUs"),
        parameters.machine,
        human(parameters.bandwidth),
        parameters.downtime_limit_ms,
        parameters.writes,
        parameters.rate.map(pages).unwrap_or_default(),
    )
}

fn text(report: &Report<Parameters, Row>) -> String {
    let ms = |ms: f64| report::time(ms * 1e6);
    let times = report.rows.iter().map(|row| {
        [
            row.logging.name().to_owned(),
            ms(row.total_time),
            ms(row.downtime),
            ms(row.expected_downtime),
            ms(row.setup_time),
            report::count(row.ram.dirty_sync_count),
            report::count(row.ram.dirty_pages_rate),
            human(row.ram.transferred),
            report::count(row.ram.mbps.round() as u64),
        ]
    });
    let mut text = head(&report.parameters) + "\n";
    text += &report::table(
        [
            "",
            "total-\ntime",
            "down-\ntime",
            "expected-\ndowntime",
            "setup-\ntime",
            "dirty-sync\n-count",
            "dirty-\npages-rate",
            "trans-\nferred",
            "mbps",
        ],
        1,
        times.collect(),
    );
    let guest = report.rows.iter().map(|row| {
        [
            row.logging.name().to_owned(),
            report::count(row.guest.writes_per_second),
            report::count(row.guest.faults),
            report::time(row.guest.stall_longest_us * 1e3),
            ms(row.guest.stall_total_ms),
            format!("{} %", row.cpu_throttle_percentage),
            report::count(row.host.invalidations),
            report::count(row.host.kicks),
        ]
    });
    text += "\n";
    text += &report::table(
        [
            "",
            "pages written\neach second",
            "faults",
            "stall\nlongest",
            "stall\nin total",
            "throttle",
            "invali-\ndations",
            "kicks",
        ],
        1,
        guest.collect(),
    );
    text += "\nThe memory at the destination is that of the source, page by page.\n";
    text
}

//! `migrate`: a live migration by pre-copy, under each kind of dirty logging.

mod guest;
mod host;
mod image;
pub mod job;
mod log;
mod measured;
pub mod run;
mod state;
#[cfg(test)]
pub mod tests;
pub mod writes;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tablewright::dirty::LogError;
use tablewright_machine::{Profile, Time};
use tablewright_recorder::recording::Interval;

use crate::error::Error;
use crate::file::Target;
use crate::output::columns::{self, Cell, columns};
use crate::output::plot::{Bar, Group, Picture};
use crate::output::report::{self, Report};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use job::{BLOCK, HostTimes, Job, Logging, PAGE, PERIOD, Ran, Round, SLICE};
use measured::Rates;
use writes::{Model, Writes};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright migrate                                           a guest that writes as fast as it \
  can
  tablewright migrate --writes fixed --rate 20000               20,000 pages each second
  tablewright migrate --recording sqlite.twr --bandwidth 128M   a guest that does what a program did
  tablewright migrate --page-size 2M --logging eager-split --json
  tablewright migrate --from doctor.json                        a host and a guest as fast as this \
  computer

The exit status is 1 if the memory at the destination is not that of the source.")]
pub struct Arguments {
    /// The guest's memory [default: 256M, or what the recording has]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// How much of it holds something at the start; the rest is zeros [default: all]
    #[arg(long, value_name = "SIZE")]
    used: Option<Size>,
    /// How many vCPUs it has
    #[arg(long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: u16,
    /// The pages of the host behind it
    #[arg(long, value_enum, default_value = "4K")]
    page_size: PageSize,
    /// Bytes that the link carries in a second
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    bandwidth: Size,
    /// Bytes that the host sends in a second while the guest runs: QEMU's own limit, which does
    /// not hold for the last round [default: what the link carries]
    #[arg(long, value_name = "SIZE")]
    max_bandwidth: Option<Size>,
    /// Milliseconds for which the guest may be stopped
    #[arg(long, value_name = "MS", default_value = "300",
          value_parser = clap::value_parser!(u64).range(..=3_600_000))]
    downtime_limit: u64,
    /// After so many seconds the guest is stopped, whatever is left to be sent
    #[arg(long, value_name = "SECONDS", default_value = "30",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// How writes are logged, several separated by commas [default: all but eager-split]
    #[arg(long, value_enum, value_delimiter = ',')]
    logging: Vec<Logging>,
    /// How much memory is protected together before it is sent: manual, all-set, eager-split
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    chunk: Size,
    /// How many entries the ring of each vCPU has, a power of two
    #[arg(long, value_name = "N", default_value = "4096",
          value_parser = clap::value_parser!(u32).range(..=1 << 16))]
    ring_size: u32,
    /// How the guest writes
    #[arg(long, value_enum, default_value = "greedy")]
    writes: Model,
    /// How much of its memory it writes, from the beginning [default: an eighth]
    #[arg(long, value_name = "SIZE")]
    set: Option<Size>,
    /// Pages that it writes in a second, all vCPUs together [default: as fast as it can; fixed
    /// needs one]
    #[arg(long, value_name = "PAGES",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rate: Option<u64>,
    /// Nanoseconds that the guest takes to write a page [default: 200, or what --from has measured]
    #[arg(long, value_name = "NS",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
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

/// A migration, with the figures of QEMU's `query-migrate` where it has them, and the unit of each
/// behind its name.
struct Row {
    logging: Logging,
    ran: Ran,
    pages: u64,
}

fn ms(time: Time) -> f64 {
    time.as_secs_f64() * 1e3
}

fn per_second(count: u64, time: Time) -> f64 {
    match time {
        Time::ZERO => 0.0,
        time => count as f64 / time.as_secs_f64(),
    }
}

columns! { row: Row;
    ["logging"] [0 ""] Cell::text(row.logging.name());
    ["converged"] [] Cell::json(row.ran.converged);
    ["total_time_ms"] [1 "total-\ntime"] Cell::ms(ms(row.ran.total));
    ["downtime_ms"] [1 "down-\ntime"] Cell::ms(ms(row.ran.downtime));
    ["expected_downtime_ms"] [1 "expected-\ndowntime"] Cell::ms(ms(row.ran.expected_downtime));
    ["setup_time_ms"] [1 "setup-\ntime"] Cell::ms(ms(row.ran.setup));
    ["cpu_throttle_percentage"] [] Cell::Count(row.ran.throttle);
    [] [1 "dirty-sync\n-count"] Cell::Count(row.ran.syncs);
    [] [1 "dirty-\npages-rate"] Cell::Count(row.ran.dirty_rate.round() as u64);
    [] [1 "trans-\nferred"] Cell::Bytes(row.ran.transferred);
    [] [1 "mbps"] Cell::Count(row.mbps().round() as u64);
    ["ram"] [] Cell::json(row.ram());
    [] [2 "pages written\neach second"] Cell::Count(row.writes_per_second());
    [] [2 "faults"] Cell::Count(row.ran.faults);
    [] [2 "stall\nlongest"] Cell::us(row.ran.stall_longest.as_secs_f64() * 1e6);
    [] [2 "stall\nin total"] Cell::ms(ms(row.ran.stall_total));
    [] [2 "throttle"] Cell::text(format!("{} %", row.ran.throttle));
    [] [2 "invali-\ndations"] Cell::Count(row.ran.invalidations);
    [] [2 "kicks"] Cell::Count(row.ran.kicks);
    ["guest"] [] Cell::json(row.guest());
    ["host"] [] Cell::json(json!({
        "invalidations": row.ran.invalidations,
        "waits_for_completion": row.ran.waits,
        "kicks": row.ran.kicks,
    }));
    ["rounds"] [] Cell::json(row.ran.rounds.iter().map(round).collect::<Vec<_>>());
}

fn round(round: &Round) -> Value {
    json!({
        "at_ms": ms(round.at),
        "dirty_pages": round.dirty,
        "remaining_pages": round.remaining,
        "cpu_throttle_percentage": round.throttle,
    })
}

impl Row {
    fn mbps(&self) -> f64 {
        per_second(self.ran.transferred * 8, self.ran.total) / 1e6
    }

    fn writes_per_second(&self) -> u64 {
        per_second(self.ran.writes, self.ran.running).round() as u64
    }

    fn ram(&self) -> Value {
        let ran = &self.ran;
        let sent = per_second(ran.normal + ran.duplicate, ran.total);
        json!({
            "transferred_bytes": ran.transferred,
            "remaining_bytes": ran.remaining * PAGE,
            "total_bytes": self.pages * PAGE,
            "duplicate_pages": ran.duplicate,
            "normal_pages": ran.normal,
            "normal_bytes": ran.normal * PAGE,
            "dirty_pages_per_second": ran.dirty_rate.round() as u64,
            "pages_per_second": sent.round() as u64,
            "dirty_sync_count": ran.syncs,
            "megabits_per_second": self.mbps(),
            "page_bytes": PAGE,
        })
    }

    fn guest(&self) -> Value {
        json!({
            "writes": self.ran.writes,
            "writes_per_second": self.writes_per_second(),
            "faults": self.ran.faults,
            "stall_longest_us": self.ran.stall_longest.as_secs_f64() * 1e6,
            "stall_total_ms": ms(self.ran.stall_total),
            "rings_full": self.ran.full,
        })
    }
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    Error::once("--logging", &arguments.logging, |logging| logging.name())?;
    let (mut profile, rates) = match arguments.from.as_slice() {
        [] => (Profile::load(&arguments.profile)?, None),
        files => measured::here(files).map(|(profile, rates)| (profile, Some(rates)))?,
    };
    let left_out = Experiment::Migrate.complete(&mut profile);
    Experiment::Migrate.fits(&profile, "--vcpus", arguments.vcpus)?;
    let recording = arguments.recording.as_deref().map(recorded).transpose()?;
    let job = arguments.job(profile, rates.as_ref(), recording)?;
    let plot = Target::of_plot(arguments.plot.as_deref())?;
    let kinds = match arguments.logging.is_empty() {
        true => &Logging::USUAL[..],
        false => &arguments.logging,
    };
    let jobs: Vec<Job> = kinds.iter().map(|&logging| Job { logging, ..job.clone() }).collect();
    let ran = runs::software::<Job>(arguments.threads)(&jobs)?;
    let row = |(&logging, ran)| Row { logging, ran, pages: job.pages };
    let rows: Vec<Row> = kinds.iter().zip(ran).map(row).collect();
    let mut warnings = Vec::from_iter(left_out);
    for row in rows.iter().filter(|row| !row.ran.converged) {
        warnings.push(format!(
            "{}: the guest was stopped after {} s, with more left than fits into the downtime",
            row.logging.name(),
            arguments.timeout
        ));
    }
    let head = arguments.head(&job, rates.as_ref());
    if let Some(plot) = plot {
        plot.fill(&picture(&head, &rows).svg()?)?;
    }
    let report = Report {
        experiment: "migrate",
        parameters: arguments.parameters(&job, rates.as_ref()),
        rows,
        warnings,
    };
    report.print(arguments.json, |Report { rows, .. }| {
        let head = report::title(&head);
        let tables = [1, 2].map(|number| columns::table(number, 1, rows)).join("\n");
        format!(
            "{head}\n{tables}\nThe memory at the destination is that of the source, page by page.\n"
        )
    })
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

impl Arguments {
    /// Returns the run to simulate, but for the kind of logging.
    fn job(
        &self,
        profile: Profile,
        rates: Option<&Rates>,
        recording: Option<(u64, Arc<[Interval]>)>,
    ) -> Result<Job, Error> {
        let usage = |text: String| Err(Error::Usage(text));
        let page = self.page_size.bytes();
        let needed = recording.as_ref().map(|(pages, _)| pages * PAGE);
        let memory = match (self.memory, needed) {
            (Some(memory), _) => memory.bytes(),
            (None, Some(needed)) => needed.next_multiple_of(BLOCK),
            (None, None) => 256 << 20,
        };
        let shown = human(memory);
        if memory > MOST_MEMORY {
            let most = human(MOST_MEMORY);
            return usage(format!("--memory {shown}: at most {most} are simulated"));
        }
        let bandwidth = self.bandwidth.bytes();
        let max_bandwidth = self.max_bandwidth.map_or(u64::MAX, Size::bytes);
        for (option, limit) in [("--bandwidth", bandwidth), ("--max-bandwidth", max_bandwidth)] {
            if memory / limit > SLOWEST {
                let shown = human(limit);
                return usage(format!(
                    "{option} {shown}: the memory alone would take more than {SLOWEST} s"
                ));
            }
        }
        if let Some(needed) = needed.filter(|needed| *needed > memory) {
            let needed = human(needed);
            return usage(format!("--memory {shown}: the recording is of {needed}"));
        }
        for (option, size) in [("--memory", memory), ("--chunk", self.chunk.bytes())] {
            if !size.is_multiple_of(page) {
                let (size, page) = (human(size), human(page));
                return usage(format!("{option} {size}: not a multiple of {page}"));
            }
        }
        for (option, size) in [("--set", self.set), ("--used", self.used)] {
            let Some(size) = size else { continue };
            if size.bytes() > memory {
                return usage(format!("{option} {size}: the guest has {shown} of memory"));
            }
            if !size.bytes().is_multiple_of(PAGE) {
                return usage(format!("{option} {size}: not a multiple of 4 KiB"));
            }
        }
        if self.writes == Model::Greedy && self.rate.is_some() {
            return usage("--rate: --writes greedy is as fast as it can".to_owned());
        }
        if self.writes == Model::Fixed && self.rate.is_none() {
            return usage("--writes fixed: needs a --rate".to_owned());
        }
        let ring = self.ring_size as usize;
        if !ring.is_power_of_two() {
            return usage(format!("--ring-size {ring}: {}", LogError::RingSize(ring)));
        }
        let write_ns = rates.and_then(|rates| rates.write_ns);
        let usual = write_ns.map_or(USUAL_WORK, |ns| (ns.round() as u64).max(1));
        let writes = match recording {
            Some((_, intervals)) => Writes::Recorded(intervals),
            None => Writes::Model {
                model: self.writes,
                // An eighth of the memory, and at least a page.
                set: self.set.map_or((memory / 8).next_multiple_of(PAGE), Size::bytes) / PAGE,
                rate: self.rate,
                seed: self.seed,
            },
        };
        Ok(Job {
            profile,
            logging: Logging::Manual,
            pages: memory / PAGE,
            used: self.used.map_or(memory, Size::bytes) / PAGE,
            mapped: memory / PAGE,
            one_lock: false,
            host: HostTimes::default(),
            vcpus: self.vcpus,
            large: self.page_size == PageSize::Large,
            bandwidth,
            max_bandwidth,
            downtime_limit: Time::ms(self.downtime_limit),
            timeout: Time::s(self.timeout),
            slice: SLICE,
            period: PERIOD,
            chunk: self.chunk.bytes() / PAGE,
            ring,
            writes,
            work: Time::ns(self.work.unwrap_or(usual)),
            zeros: Time::ZERO,
            auto_converge: self.auto_converge,
            #[cfg(test)]
            order: job::Order::Right,
        })
    }

    /// How the guest writes, in words.
    fn writes(&self) -> String {
        match &self.recording {
            Some(path) => path.display().to_string(),
            None => format!("{:?}", self.writes).to_lowercase(),
        }
    }

    fn parameters(&self, job: &Job, measured: Option<&Rates>) -> Value {
        let mut parameters = json!({
            "machine": job.profile.name,
            "memory_bytes": job.pages * PAGE,
            "used_bytes": job.used * PAGE,
            "vcpus": job.vcpus,
            "page_bytes": self.page_size.bytes(),
            "bandwidth_bytes_per_second": job.bandwidth,
            "max_bandwidth_bytes_per_second": self.max_bandwidth.map(Size::bytes),
            "downtime_limit_ms": self.downtime_limit,
            "timeout_s": self.timeout,
            "chunk_bytes": self.chunk.bytes(),
            "ring_entries": self.ring_size,
            "writes": self.writes(),
            "set_bytes": job.writes.set().map(|pages| pages * PAGE),
            "rate_pages_per_second": self.rate,
            "work_ns": job.work.as_ps() / 1_000,
        });
        if let Some(rates) = measured {
            parameters["measured"] = json!(rates);
        }
        parameters["auto_converge"] = self.auto_converge.into();
        parameters["seed"] = self.seed.into();
        parameters
    }

    fn head(&self, job: &Job, measured: Option<&Rates>) -> String {
        let rate = self.rate.map(|rate| format!(", {} pages/s", report::count(rate)));
        let set = job.writes.set().map(|pages| format!(" of {}", human(pages * PAGE)));
        let measured = measured.map(|rates| {
            let host = report::wrapped(&format!("here: {}", rates.host), 78, "  ");
            let write = rates.write_ns.map_or("not told".to_owned(), report::time);
            format!(
                "{host}\nmeasured there: a write of a page {write}, of one that is logged {}, {} \
                 pages/s\n",
                report::time(rates.logged_write_ns),
                report::count(rates.dirty_pages_per_second as u64),
            )
        });
        let limit = self
            .max_bandwidth
            .map(|limit| format!(" ({}/s while the guest runs)", human(limit.bytes())));
        format!(
            "{}{} of memory in pages of {}, {} on {}\nlink of {}/s{}, downtime limit {} ms\n\
             the guest writes: {}{}{}\n",
            measured.unwrap_or_default(),
            human(job.pages * PAGE),
            human(self.page_size.bytes()),
            report::counted(job.vcpus.into(), "vCPU", "vCPUs"),
            job.profile.name,
            human(job.bandwidth),
            limit.unwrap_or_default(),
            self.downtime_limit,
            self.writes(),
            set.unwrap_or_default(),
            rate.unwrap_or_default(),
        )
    }
}

/// Rounds of each kind that are drawn.
const MOST_ROUNDS: usize = 8;

/// Pages that are to be sent when each round begins, as bars: a group for each kind of logging.
fn picture(head: &str, rows: &[Row]) -> Picture {
    let group = |row: &Row| {
        let bar = |(number, round): (usize, &Round)| {
            let name = format!("{}: {}", number + 1, report::time(ms(round.at) * 1e6));
            Bar::new(&name, round.remaining as f64 / 1e3, true)
        };
        let rounds = row.ran.rounds.iter().enumerate().take(MOST_ROUNDS);
        Group { name: row.logging.name().to_owned(), bare: None, bars: rounds.map(bar).collect() }
    };
    let cut = rows.iter().any(|row| row.ran.rounds.len() > MOST_ROUNDS);
    let cut = cut.then(|| format!("The first {MOST_ROUNDS} rounds of each."));
    Picture {
        title: "Thousands of pages to be sent, round by round".to_owned(),
        subtitle: "simulated; each round: its number, and when it began".to_owned(),
        unit: "1000 pages".to_owned(),
        groups: rows.iter().map(group).collect(),
        notes: head.lines().map(str::to_owned).chain(cut).collect(),
    }
}

//! `ask`: how long will this guest stall? One table: a column for each host, from the kernel
//! without any of the published changes to the engine, and a row for each thing that takes time.
//!
//! Every figure is one of another experiment, for this guest: `dirty-log` for the log, `tlb-flush`
//! for a shootdown; a migration is counted out from them. How far each may be off is not felt:
//! it is the span of the published figures, that nothing was fitted on, over the simulated ones.

pub mod copy;
mod here;
mod range;
mod ways;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tablewright_machine::{Profile, Time};

use crate::dirty_log::figures;
use crate::dirty_log::job::{By, Case, Job as LogJob, Ran as LogRan, Run as LogRun, exact};
use crate::error::Error;
use crate::guest::input::{Backing, PAGE};
use crate::output::columns::{Cell, columns};
use crate::output::report::{self, Report};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use crate::tlb_flush::job::{Job as FlushJob, Run as FlushRun};
use copy::{Copy, Logged};
use here::Here;
use range::{Quantity, Range};
use ways::{Version, Way};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright ask --vcpus 96 --memory 512G
  tablewright ask --vcpus 96 --memory 512G --arch arm64
  tablewright ask --vcpus 32 --memory 128G --backing anonymous_hugetlb_1gb --rate 200000
  tablewright ask --vcpus 64 --memory 1T --machine mine.toml --kernel 6.6
  tablewright ask --here                            a guest as large as this computer")]
pub struct Arguments {
    /// How many vCPUs the guest has [default: 96; with --here as many as there are CPUs]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// How much memory it has [default: 512G; with --here as much as there is]
    #[arg(short = 'b', long, visible_alias = "bytes", value_name = "SIZE")]
    memory: Option<Size>,
    /// Backing of its memory, by the well-known test's name for it
    #[arg(
        short = 's',
        long,
        visible_alias = "source",
        value_name = "BACKING",
        default_value = "anonymous_hugetlb_2mb"
    )]
    backing: Backing,
    /// Pages that it writes in a second while it is migrated, all vCPUs together
    #[arg(short, long, value_name = "PAGES", default_value = "100000",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rate: u64,
    /// How much of its memory it writes then [default: an eighth]
    #[arg(long, value_name = "SIZE")]
    set: Option<Size>,
    /// Bytes that the link of the migration carries in a second
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    bandwidth: Size,
    /// Milliseconds for which the migration may stop the guest
    #[arg(long, value_name = "MS", default_value = "300",
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    downtime_limit: u64,
    /// The host's architecture [default: x86-64; that of --machine, or of this computer with
    /// --here]
    #[arg(long, value_enum, conflicts_with = "machine")]
    arch: Option<Arch>,
    /// The profile of the host, by name or as a file [default: the published one for the
    /// architecture]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// The host's kernel, as 6.6: its column is marked
    #[arg(long, value_name = "VERSION")]
    kernel: Option<Version>,
    /// Architecture, kernel, CPUs and memory of this computer, where no option says otherwise; the
    /// costs are those of the profile
    #[arg(long)]
    here: bool,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Arch {
    #[value(name = "x86-64", alias = "x86")]
    X86,
    Arm64,
}

impl Arch {
    /// The profile that most published figures of many vCPUs are of.
    const fn profile(self) -> &'static str {
        match self {
            Self::X86 => "x86-96-vcpus",
            Self::Arm64 => "arm64-48-vcpus",
        }
    }
}

const VCPUS: u16 = 96;
const MEMORY: u64 = 512 << 30;

/// The guest, as it is run: each vCPU has as much memory, in whole pages of the host.
struct Asked {
    profile: Profile,
    case: Case,
    copy: Copy,
    kernel: Option<Version>,
}

/// Times of one host, in nanoseconds.
struct Row {
    way: &'static Way,
    start: f64,
    first_harvest: f64,
    first_write: f64,
    harvest: f64,
    stop: f64,
    /// Longest of the stalls while the log is stopped; none where no access had to wait.
    stall: Option<f64>,
    shootdown: f64,
    /// None: it would never end.
    migration: Option<f64>,
    downtime: Option<f64>,
}

columns! { row: Row;
    ["host"] [] Cell::text(row.way.name);
    ["kernel"] [] Cell::json(row.way.kernel.map(|it| it.to_string()));
    ["start_ns"] [] Cell::ns(row.start);
    ["first_harvest_ns"] [] Cell::ns(row.first_harvest);
    ["first_write_ns"] [] Cell::ns(row.first_write);
    ["harvest_ns"] [] Cell::ns(row.harvest);
    ["stop_ns"] [] Cell::ns(row.stop);
    ["longest_stall_ns"] [] Cell::or_nothing(row.stall, Cell::ns);
    ["shootdown_ns"] [] Cell::ns(row.shootdown);
    ["migration_ns"] [] Cell::or_nothing(row.migration, Cell::ns);
    ["downtime_ns"] [] Cell::or_nothing(row.downtime, Cell::ns);
}

impl Row {
    fn of(&self, quantity: Quantity) -> String {
        let or = |time: Option<f64>, none: &str| time.map_or(none.to_owned(), report::time);
        match quantity {
            Quantity::Start => report::time(self.start),
            Quantity::FirstHarvest => report::time(self.first_harvest),
            Quantity::FirstWrite => report::time(self.first_write),
            Quantity::Harvest => report::time(self.harvest),
            Quantity::Stop => report::time(self.stop),
            Quantity::Stall => or(self.stall, "none"),
            Quantity::Shootdown => report::time(self.shootdown),
            Quantity::Migration => or(self.migration, "never"),
            Quantity::Downtime => or(self.downtime, "-"),
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let here = arguments.here.then(Here::read);
    let asked = arguments.asked(here.as_ref())?;
    let rows = answer(
        &asked,
        &runs::software::<LogJob>(arguments.threads),
        &runs::software::<FlushJob>(arguments.threads),
    )?;
    let ranges = range::all();
    let (case, copy) = (&asked.case, &asked.copy);
    let scale = case.quick_scale();
    let report = Report {
        experiment: "ask",
        parameters: json!({
            "vcpus": case.vcpus,
            "memory_bytes": case.bytes * u64::from(case.vcpus),
            "backing": case.backing.name,
            "rate_pages_per_second": copy.rate,
            "set_bytes": copy.set * PAGE,
            "bandwidth_bytes_per_second": copy.bandwidth,
            "downtime_limit_ms": arguments.downtime_limit,
            "machine": asked.profile.name,
            "kernel": asked.kernel.map(|it| it.to_string()),
            "scale": scale,
            "published_over_simulated": ranges.iter().map(Range::json).collect::<Value>(),
        }),
        rows,
        warnings: arguments.warnings(&asked, here.as_ref())?,
    };
    report.print(arguments.json, |report| text(&asked, scale, &ranges, &report.rows))
}

impl Arguments {
    fn asked(&self, here: Option<&Here>) -> Result<Asked, Error> {
        let arch = self.arch.or(here.map(|here| here.arch)).unwrap_or(Arch::X86);
        let name = self.machine.as_deref().unwrap_or(arch.profile());
        let mut profile = Experiment::DirtyLog.load(name)?.0;
        // `machine check` names the costs that a profile leaves out.
        Experiment::TlbFlush.complete(&mut profile);
        let vcpus = self.vcpus.or(here.map(|here| here.cpus)).unwrap_or(VCPUS);
        Experiment::DirtyLog.fits(&profile, "--vcpus", vcpus).map_err(|error| {
            Error::Usage(format!("{error}; a profile of your own may have more: --machine FILE"))
        })?;
        let memory = self.memory.map(Size::bytes).or(here.map(|here| here.memory));
        let memory = memory.unwrap_or(MEMORY);
        let page = self.backing.source.bytes();
        let each = memory.div_ceil(u64::from(vcpus)).next_multiple_of(page);
        let all = crate::dirty_log::job::all_bytes(each, vcpus)
            .map_err(|_| Error::Usage(format!("--memory {}: at most 32 TiB", human(memory))))?;
        let set = self.set.map_or((memory / 8).next_multiple_of(PAGE), Size::bytes);
        if set > memory {
            let (set, memory) = (human(set), human(memory));
            return Err(Error::Usage(format!("--set {set}: the guest has {memory}")));
        }
        Ok(Asked {
            profile,
            case: Case {
                backing: self.backing,
                bytes: each,
                vcpus,
                mode: "PXXV48_4K".parse().map_err(Error::Usage)?,
                offset: None,
                scale: None,
            },
            copy: Copy {
                pages: all / PAGE,
                set: set.div_ceil(PAGE),
                rate: self.rate,
                vcpus: vcpus.into(),
                bandwidth: self.bandwidth.bytes(),
                limit: self.downtime_limit as f64 * 1e6,
            },
            kernel: self.kernel.or(here.and_then(|here| here.kernel)),
        })
    }

    fn warnings(&self, asked: &Asked, here: Option<&Here>) -> Result<Vec<String>, Error> {
        let Asked { case, profile, .. } = asked;
        let given = self.memory.map(Size::bytes).or(here.map(|here| here.memory));
        let all = case.bytes * u64::from(case.vcpus);
        let rounded = given.is_some_and(|given| given != all).then(|| {
            format!(
                "--memory {}: taken as {} for each vCPU, whole pages of {}",
                human(given.unwrap_or(all)),
                exact(case.bytes),
                human(case.backing.source.bytes()),
            )
        });
        let costs = here.map(|_| {
            format!(
                "the costs are those of {}, not of this computer: `tablewright doctor` measures it",
                profile.name
            )
        });
        Ok(rounded.into_iter().chain(costs).collect())
    }
}

/// Makes the runs, and reads the figures off.
fn answer(asked: &Asked, log: LogRun<'_>, flush: FlushRun<'_>) -> Result<Vec<Row>, Error> {
    let Asked { profile, case, copy, .. } = asked;
    let ways = ways::of(profile.architecture.is_x86());
    let scaled = Case { scale: Some(case.quick_scale()), ..case.clone() };
    let job = |way: &Way| -> Result<LogJob, Error> {
        Ok(LogJob { options: way.options(By::Faults), ..scaled.job(profile, way.how)? })
    };
    let jobs = ways.iter().map(job).collect::<Result<Vec<_>, _>>()?;
    let shootdown = |way: &Way| FlushJob::busy(profile, way.flush, case.vcpus, case.vcpus);
    let flushes: Vec<FlushJob> = ways.iter().map(shootdown).collect();
    let logged = log(&jobs)?;
    let flushed = flush(&flushes)?;
    let row =
        |(way, ((job, ran), (flushes, flushed))): (_, ((&LogJob, LogRan), (&FlushJob, _)))| {
            job.sound(&ran)?;
            Ok(Row::new(way, job, &ran, ns(flushes.each(&flushed)), copy))
        };
    ways.iter().zip(jobs.iter().zip(logged).zip(flushes.iter().zip(flushed))).map(row).collect()
}

fn ns(time: Time) -> f64 {
    time.as_secs_f64() * 1e9
}

impl Row {
    fn new(way: &'static Way, job: &LogJob, ran: &LogRan, shootdown: f64, copy: &Copy) -> Self {
        let at = |times: &[Time], at: usize| times.get(at).copied().map_or(0.0, ns);
        let harvest = |round: usize| at(&ran.get, round) + at(&ran.clear, round);
        // A log that starts with all pages in it protects none before it is read.
        let first = usize::from(job.options.all_set);
        let each = (copy.pages / copy.vcpus).max(1) as f64;
        let first_write = at(&ran.dirty, first) / each;
        let (longest, ..) = figures::stalls(&ran.stalls);
        let logged = Logged {
            start: ns(ran.enable),
            first_harvest: if first == 0 { 0.0 } else { harvest(0) },
            read: at(&ran.get, 1),
            clear: at(&ran.clear, 1),
            first_write,
        };
        let copied = copy.run(&logged);
        Self {
            way,
            start: ns(ran.enable),
            first_harvest: harvest(0),
            first_write,
            harvest: harvest(1),
            stop: ns(ran.disable),
            stall: (longest > Time::ZERO).then(|| ns(longest)),
            shootdown,
            migration: copied.as_ref().map(|copied| copied.total),
            downtime: copied.map(|copied| copied.downtime),
        }
    }
}

fn text(asked: &Asked, scale: u64, ranges: &[Range], rows: &[Row]) -> String {
    let Asked { profile, case, copy, kernel } = asked;
    let head = format!(
        "{}, {} of {} on {}, simulated{}",
        report::counted(case.vcpus.into(), "vCPU", "vCPUs"),
        human(case.bytes * u64::from(case.vcpus)),
        case.backing.name,
        profile.name,
        if scale > 1 { format!(" 1:{scale}") } else { String::new() },
    );
    let mut text = report::wrapped(&head, 80, "  ") + "\n\n";
    // Of the host at hand the last that it has.
    let has = |row: &&Row| row.way.kernel.is_some_and(|from| kernel.is_some_and(|it| from <= it));
    let now = rows.iter().filter(has).map(|row| row.way.name).next_back();
    let head = |row: &Row| {
        let kernel = row.way.kernel.map_or(String::new(), |kernel| kernel.to_string());
        let now = if now == Some(row.way.name) { "*" } else { "" };
        format!("{}\n{now}{kernel}", row.way.short)
    };
    let header = std::iter::once(String::new())
        .chain(rows.iter().map(head))
        .chain(["true /\nhere".to_owned()]);
    let line = |quantity: Quantity| {
        let range = ranges.iter().find(|range| range.quantity == quantity);
        std::iter::once(quantity.name().to_owned())
            .chain(rows.iter().map(|row| row.of(quantity)))
            .chain([range.map_or("-".to_owned(), Range::text)])
            .collect()
    };
    text += &report::table_of(header.collect(), 1, Quantity::ALL.map(line).into());
    text.push('\n');
    for row in rows {
        text += &report::wrapped(&format!("{}: {}", row.way.name, row.way.what), 80, "  ");
        text.push('\n');
    }
    let now = kernel.filter(|_| now.is_some());
    let now = now.map_or(String::new(), |kernel| format!("*: the host's kernel, {kernel}. "));
    let rest = format!(
        "{now}1:N: one page of N is simulated. Migration: {} pages/s written of {}, {}/s on the \
         link, at most {} stopped.",
        report::count(copy.rate),
        human(copy.set * PAGE),
        human(copy.bandwidth),
        report::time(copy.limit),
    );
    let figures = ranges.iter().map(|range| format!("{} {}", range.quantity.name(), range.figures));
    let known = format!(
        "true / here: the least and the greatest of published / simulated, by figures on which \
         nothing was fitted: {}",
        figures.collect::<Vec<_>>().join("; "),
    );
    text += &(report::wrapped(&rest, 80, "") + "\n");
    text += &(report::wrapped(&known, 80, "  ") + "\n- no such figure is published\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn asked(line: &str) -> Result<Asked, Error> {
        let line = std::iter::once("ask").chain(line.split_whitespace());
        Cli::parse_from(line).arguments.asked(None)
    }

    fn rows(line: &str) -> Vec<Row> {
        let threads = Threads::default();
        answer(
            &asked(line).unwrap(),
            &runs::software::<LogJob>(threads),
            &runs::software::<FlushJob>(threads),
        )
        .unwrap()
    }

    #[test]
    fn the_engine_is_not_behind_a_kernel_where_it_matters() {
        for line in ["-v 4 -b 64M", "-v 4 -b 64M --arch arm64"] {
            let rows = rows(line);
            let (ours, kernels) = rows.split_last().unwrap();
            for kernel in kernels {
                assert!(ours.start <= kernel.start * 1.01, "{line}: {}", kernel.way.name);
                assert!(ours.harvest <= kernel.harvest * 1.01, "{line}: {}", kernel.way.name);
                assert!(ours.shootdown <= kernel.shootdown * 1.01, "{line}: {}", kernel.way.name);
            }
            let least = kernels.iter().filter_map(|it| it.migration).fold(f64::MAX, f64::min);
            assert!(ours.migration.unwrap() <= least * 1.01, "{line}");
        }
    }

    /// Each published change does what it was published for.
    #[test]
    fn each_change_shows() {
        let rows = rows("-v 4 -b 64M -s anonymous_hugetlb_2mb --arch arm64");
        let [one_lock, all_set, beside, ahead, _] = &rows[..] else {
            panic!("{} ways", rows.len());
        };
        assert!(all_set.start < one_lock.start);
        assert!(beside.first_write < all_set.first_write);
        // The host splits, in place of the first writes.
        assert!(ahead.first_harvest > 10.0 * beside.first_harvest);
    }

    #[test]
    fn it_fits_a_screen() {
        for line in ["-v 2 -b 8M --kernel 6.6", "-v 2 -b 8M --arch arm64"] {
            let asked = asked(line).unwrap();
            let rows = rows(line);
            let text = text(&asked, 1, &range::all(), &rows);
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest.unwrap() <= 80, "{text}");
            assert!(text.lines().count() <= 30, "{text}");
        }
    }

    #[test]
    fn memory_is_as_large_as_is_asked_for_in_whole_pages() {
        let large = asked("-v 96 -b 512G").unwrap().case;
        assert_eq!(large.bytes % (2 << 20), 0);
        assert!(large.bytes * 96 >= 512 << 30 && large.bytes * 96 < 513 << 30);
        let message = |line: &str| asked(line).map(|_| ()).unwrap_err().to_string();
        assert!(message("-v 4096").contains("--machine FILE"), "{}", message("-v 4096"));
        assert!(message("-b 64T").contains("at most 32 TiB"));
        assert!(message("-b 1G --set 2G").contains("--set 2 GiB"));
    }
}

//! `tlb-flush`: remote TLB flushes by each messenger, in a guest whose vCPUs may not all run.

mod from;
pub mod native;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use tablewright_experiments::tlb_flush::{self as simulate, How, Job, Ran};
use tablewright_machine::{Kind, MAX_CPUS, Profile, Time};

use crate::error::Error;
use crate::kvm;
use crate::machine::named::Named;
use crate::needs::{self, Experiment};
use crate::page_table_test::On;
use crate::published;
use crate::report::error_percent;
use crate::report::{self, Report};
use crate::runs::{self, Threads};
use crate::write_protect::nanoseconds;

/// What `tlb-flush` can be asked.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright tlb-flush
  tablewright tlb-flush -v 128 --cpus 12 -t 128 --work 2000    more vCPUs than physical CPUs, all of them busy
  tablewright tlb-flush --how interrupt --how list -p 64 --json
  tablewright tlb-flush --on native --file big                 the published program on this computer
  tablewright tlb-flush --from measured.json                   what a guest has counted, and what the machine predicts")]
pub struct Arguments {
    /// Threads of the program
    #[arg(short, long = "tasks", value_name = "N", default_value = "32", value_parser = clap::value_parser!(u16).range(1..))]
    tasks: u16,
    /// Rounds of each thread; published: 10000
    #[arg(short, long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Parts of the file that are mapped one after the other in a round
    #[arg(short, long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    chunks: u32,
    /// Pages of a part
    #[arg(short, long, value_name = "N", default_value = "16384", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pages: u64,
    /// How many vCPUs [default: 16]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// How many physical CPUs they run on [default: one for each]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    cpus: Option<u16>,
    /// What a thread computes between two cycles, in microseconds, on average
    #[arg(long, value_name = "US", default_value = "0", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    work: u64,
    /// How long a thread that waits for the lock of the address space tries to take it before it
    /// sleeps, in microseconds on a CPU
    #[arg(long, value_name = "US", default_value = "0", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    spin: u64,
    /// An idle loop that is told of a flush keeps the space, and is told of the next; otherwise it
    /// leaves, as Linux's does
    #[arg(long)]
    stays: bool,
    /// After so long a vCPU gives its physical CPU to one that waits, in microseconds [default:
    /// 4000]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    slice: Option<u64>,
    /// Ranges in one hypercall, at most [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=509))]
    ranges: Option<u16>,
    /// How others are told; may be given several times [default: each way in turn]
    #[arg(long, value_enum)]
    how: Vec<How>,
    /// On the software machine, or by real threads on this computer
    #[arg(long, value_enum, default_value = "machine")]
    on: On,
    /// The file that is mapped on this computer, of at least as many pages; made and removed if
    /// none is given
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    file: Option<PathBuf>,
    /// The profile of a machine, by name or as a file [default: hyperv-16-vcpus]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    #[command(flatten)]
    threads: Threads,
    /// What a guest has measured (`cargo xtask tlb-flush --json`), beside what the machine predicts
    /// for as many threads, cycles, pages and CPUs
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tasks", "rounds", "chunks", "pages", "vcpus", "cpus", "work", "spin", "stays", "slice", "ranges", "how", "on", "file"])]
    from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Parameters {
    machine: String,
    tasks: u16,
    cycles: u64,
    pages: u64,
    vcpus: u16,
    cpus: u16,
    work_us: u64,
    spin_us: u64,
    stays: bool,
    slice_us: u64,
}

/// Times are in nanoseconds.
#[derive(Serialize)]
struct Row {
    how: &'static str,
    #[serde(rename = "time_ns")]
    time: f64,
    /// Of one map, touch and unmap.
    #[serde(rename = "cycle_ns")]
    cycle: f64,
    #[serde(rename = "cpu_time_ns")]
    cpu_time: f64,
    interrupts: u64,
    hypercalls: u64,
    broadcasts: u64,
    list_bytes: u64,
    wake_ups: u64,
    /// vCPUs that were left to forget when they are entered next.
    told_later: u64,
    #[serde(rename = "waiting_ns")]
    waiting: f64,
    #[serde(rename = "longest_wait_ns")]
    longest_wait: f64,
    /// What was published for a cycle, and how much more it takes here.
    #[serde(rename = "published_cycle_ns")]
    published_cycle: Option<f64>,
    error_percent: Option<f64>,
    fitted: bool,
}

/// The machine, if none is named.
const MACHINE: &str = "hyperv-16-vcpus";
/// What is run, if nothing is said: the vCPUs of the published guest, and Linux's time slice and
/// list.
const VCPUS: u16 = 16;
const SLICE_US: u64 = 4000;
const RANGES: u16 = 16;
/// Each thread has a stack, and runs the cycle of the published program.
const MOST_TASKS: u16 = 4096;

/// Runs it, and prints what it took.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Native {
        kvm::only_machine(
            "native",
            &[
                (!arguments.how.is_empty(), "--how"),
                (arguments.machine.is_some(), "--machine"),
                (arguments.vcpus.is_some(), "--vcpus"),
                (arguments.cpus.is_some(), "--cpus"),
                (arguments.slice.is_some(), "--slice"),
                (arguments.ranges.is_some(), "--ranges"),
                (arguments.threads.threads.is_some(), "--threads"),
                (arguments.work != 0, "--work"),
                (arguments.spin != 0, "--spin"),
                (arguments.stays, "--stays"),
            ],
        )?;
        return native::run(&native::Program {
            threads: arguments.tasks,
            rounds: arguments.rounds,
            chunks: arguments.chunks,
            pages: arguments.pages,
            file: arguments.file.clone(),
            json: arguments.json,
        });
    }
    if arguments.file.is_some() {
        return Err(Error::Usage("--file: only with --on native".to_owned()));
    }
    let (profile, left_out) = needs::load(
        arguments.machine.as_deref().unwrap_or(MACHINE),
        Experiment::TlbFlush,
    )?;
    let software = runs::software::<simulate::Job>(arguments.threads);
    if let Some(path) = &arguments.from {
        let mut report = from::compare(path, &profile, &software)?;
        report.warnings.extend(left_out);
        return report.print(arguments.json, from::text);
    }
    let mut report = test(arguments, &profile, &software)?;
    report.warnings.extend(left_out);
    report.print(arguments.json, text)
}

fn test(
    arguments: &Arguments,
    profile: &Profile,
    run: simulate::Run<'_>,
) -> Result<Report<Parameters, Row>, Error> {
    // A virtual machine's profile says how many CPUs it has, and not on how many they run.
    let most = match profile.system.kind {
        Kind::Vm => None,
        Kind::Metal | Kind::Imagined => profile.system.cpus,
    };
    let most = most.map_or(u16::MAX, |cpus| u16::try_from(cpus).unwrap_or(u16::MAX));
    let vcpus = arguments.vcpus.unwrap_or(VCPUS);
    let slice = arguments.slice.unwrap_or(SLICE_US);
    let cpus = arguments.cpus.unwrap_or(vcpus.min(most));
    if cpus > most {
        return Err(Error::Usage(format!(
            "--cpus {cpus}: {} has {most}",
            profile.name
        )));
    }
    if usize::from(vcpus) > MAX_CPUS {
        return Err(Error::Usage(format!("-v {}: at most {MAX_CPUS}", vcpus)));
    }
    if arguments.tasks > MOST_TASKS {
        return Err(Error::Usage(format!(
            "-t {}: at most {MOST_TASKS} threads on the machine",
            arguments.tasks
        )));
    }
    Error::once("--how", &arguments.how, |how| how.name())?;
    if !simulate::fits(arguments.tasks, arguments.pages) {
        return Err(Error::Usage(format!(
            "-t {} -p {}: together more than an address space of 128 TiB has",
            arguments.tasks, arguments.pages
        )));
    }
    if cpus > vcpus {
        return Err(Error::Usage(format!(
            "--cpus {cpus}: {} vCPUs run on no more than as many",
            vcpus
        )));
    }
    let hows = match arguments.how.is_empty() {
        true => How::ALL.to_vec(),
        false => arguments.how.clone(),
    };
    let job = |&how: &How| Job {
        profile: profile.clone(),
        how,
        threads: arguments.tasks,
        rounds: arguments.rounds,
        chunks: arguments.chunks,
        pages: arguments.pages,
        vcpus,
        physical: cpus,
        slice: Time::us(slice),
        work: Time::us(arguments.work),
        spin: Time::us(arguments.spin),
        stays: arguments.stays,
        ranges: arguments.ranges.unwrap_or(RANGES).into(),
    };
    let jobs: Vec<Job> = hows.iter().map(job).collect();
    let rows = jobs.iter().zip(run(&jobs)?);
    Ok(Report {
        experiment: "tlb-flush",
        parameters: Parameters {
            machine: profile.name.clone(),
            tasks: arguments.tasks,
            cycles: jobs[0].cycles(),
            pages: arguments.pages,
            vcpus,
            cpus,
            work_us: arguments.work,
            spin_us: arguments.spin,
            stays: arguments.stays,
            slice_us: slice,
        },
        rows: rows.map(|(job, ran)| row(job, &ran)).collect(),
        warnings: Vec::new(),
    })
}

/// Cycles of the published run.
pub const PUBLISHED_CYCLES: u64 = 32 * 10_000 * 10;

/// Whether a run is of the published program, but for how often it does the same.
fn is_published(job: &Job) -> bool {
    (job.threads, job.pages, job.vcpus, job.physical) == (32, 16_384, 16, 16)
        && job.work == Time::ZERO
        && job.spin == Time::ZERO
        && !job.stays
}

fn row(job: &Job, ran: &Ran) -> Row {
    let cycle = nanoseconds(ran.time) / job.cycles() as f64;
    let rows = published::built_in("tlb-flush").unwrap_or_default();
    let mut figures = rows.iter().filter(|row| {
        is_published(job)
            && row.metric == "real"
            && job.profile.system.published_as.contains(&row.system)
    });
    let figure = figures.next();
    let published_cycle = figure
        .and_then(|figure| match job.how {
            How::Interrupt => figure.before,
            How::List | How::Space => figure.after,
            _ => None,
        })
        .map(|seconds| seconds * 1e9 / PUBLISHED_CYCLES as f64);
    let tally = &ran.tally;
    Row {
        how: job.how.name(),
        time: nanoseconds(ran.time),
        cycle,
        cpu_time: nanoseconds(tally.cpu_time),
        interrupts: tally.interrupts,
        hypercalls: tally.hypercalls,
        broadcasts: tally.broadcasts,
        list_bytes: tally.list_bytes,
        wake_ups: tally.wake_ups,
        told_later: tally.later,
        waiting: nanoseconds(tally.waiting),
        longest_wait: nanoseconds(tally.longest),
        published_cycle,
        error_percent: published_cycle.map(|published| error_percent(cycle, published)),
        fitted: published_cycle.is_some(),
    }
}

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "{} of map, touch and unmap of {} by {} on {}, {}, {}\n\n",
        report::counted(parameters.cycles, "cycle", "cycles"),
        report::counted(parameters.pages, "page", "pages"),
        report::counted(parameters.tasks.into(), "thread", "threads"),
        parameters.machine,
        report::counted(parameters.vcpus.into(), "vCPU", "vCPUs"),
        report::counted(parameters.cpus.into(), "physical CPU", "physical CPUs"),
    );
    let times = report.rows.iter().map(|row| {
        let error = row
            .error_percent
            .map_or("-  ".to_owned(), |error| report::marked(error, row.fitted));
        [
            row.how.to_owned(),
            report::time(row.time),
            report::time(row.cycle),
            row.published_cycle.map_or("-".to_owned(), report::time),
            error,
            report::time(row.cpu_time),
            report::time(row.waiting),
            report::time(row.longest_wait),
        ]
    });
    text += &report::table(
        [
            "",
            "time",
            "cycle",
            "published",
            "error  ",
            "CPU time",
            "waiting",
            "longest",
        ],
        1,
        times.collect(),
    );
    let counts = report.rows.iter().map(|row| {
        [
            row.how.to_owned(),
            report::count(row.interrupts),
            report::count(row.wake_ups),
            report::count(row.hypercalls),
            report::count(row.list_bytes),
            report::count(row.told_later),
            report::count(row.broadcasts),
        ]
    });
    text += "\n";
    text += &report::table(
        [
            "",
            "inter-\nrupts",
            "wake-ups",
            "hyper-\ncalls",
            "bytes of\nlists",
            "told\nlater",
            "broad-\ncasts",
        ],
        1,
        counts.collect(),
    );
    if report.rows.iter().any(|row| row.fitted) {
        text += report::FITTED;
    }
    text
}

//! `tlb-flush`: remote TLB flushes by each messenger, in a guest whose vCPUs may not all run.

mod from;
mod host;
pub mod job;
mod messenger;
mod native;
pub mod published;
pub mod run;
mod tables;
#[cfg(target_os = "linux")]
pub mod unmap;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tablewright_machine::{Kind, MAX_CPUS, Profile, Time};

use crate::error::Error;
use crate::guest::nanoseconds;
use crate::output::columns::{self, Cell, NOT_PUBLISHED, columns};
use crate::output::report::{self, Report, error_percent};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use job::{How, Job, PUBLISHED_CYCLES, Ran};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright tlb-flush
  tablewright tlb-flush -v 128 --cpus 12 -t 128 --work 2000    more vCPUs than physical CPUs, all \
  of them busy
  tablewright tlb-flush --how interrupt --how list -p 64 --json
  tablewright tlb-flush --on native --file big                 the published program on this \
  computer
  tablewright tlb-flush --from measured.json                   what a guest has counted, and what \
  the machine predicts")]
pub struct Arguments {
    /// Threads of the program
    #[arg(short, long = "tasks", value_name = "N", default_value = "32",
          value_parser = clap::value_parser!(u16).range(1..))]
    tasks: u16,
    /// Rounds of each thread; published: 10000
    #[arg(short, long, value_name = "N", default_value = "20",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Parts of the file that are mapped one after the other in a round
    #[arg(short, long, value_name = "N", default_value = "10",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    chunks: u32,
    /// Pages of a part
    #[arg(short, long, value_name = "N", default_value = "16384",
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pages: u64,
    /// How many vCPUs [default: 16]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// How many physical CPUs they run on [default: one for each]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    cpus: Option<u16>,
    /// Time that a thread computes between two cycles, in microseconds, on average
    #[arg(long, value_name = "US", default_value = "0",
          value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    work: u64,
    /// How long a thread that waits for the lock of the address space tries to take it before it
    /// sleeps, in microseconds on a CPU
    #[arg(long, value_name = "US", default_value = "0",
          value_parser = clap::value_parser!(u64).range(..=1_000_000))]
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
    /// File with the figures of a guest (`cargo xtask tlb-flush --json`), beside which the machine
    /// predicts for as many threads, cycles, pages and CPUs
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["tasks", "rounds", "chunks", "pages", "vcpus", "cpus", "work",
                                "spin", "stays", "slice", "ranges", "how", "on", "file"])]
    from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum On {
    /// The software machine, in virtual time
    Machine,
    /// Threads of this computer, in real time
    Native,
}

const MACHINE: &str = "hyperv-16-vcpus";
/// The vCPUs of the published guest.
const VCPUS: u16 = 16;
/// Each thread has a stack, and runs the cycle of the published program.
const MOST_TASKS: u16 = 4096;

struct Row {
    job: Job,
    ran: Ran,
    /// One flush, while each vCPU has a thread that runs.
    busy: Time,
    /// Of a cycle.
    published: Option<f64>,
}

columns! { row: Row;
    ["how"] [0 ""] Cell::text(row.job.how.name());
    ["time_ns"] [1 "time"] Cell::ns(nanoseconds(row.ran.time));
    ["cycle_ns"] [1 "cycle"] Cell::ns(row.cycle());
    [] [1 "published" NOT_PUBLISHED] Cell::or_nothing(row.published, Cell::ns);
    [] [1 "error  " NOT_PUBLISHED] Cell::Marked(row.error(), true);
    ["cpu_time_ns"] [1 "CPU time"] Cell::ns(nanoseconds(row.ran.tally.cpu_time));
    ["interrupts"] [2 "inter-\nrupts"] Cell::Count(row.ran.tally.interrupts);
    ["busy_flush_ns"] [2 "one flush,\nall busy"] Cell::ns(nanoseconds(row.busy));
    [] [2 "wake-ups"] Cell::Count(row.ran.tally.wake_ups);
    ["hypercalls"] [2 "hyper-\ncalls"] Cell::Count(row.ran.tally.hypercalls);
    ["broadcasts"] [] Cell::Count(row.ran.tally.broadcasts);
    ["list_bytes"] [2 "bytes of\nlists"] Cell::Count(row.ran.tally.list_bytes);
    ["wake_ups"] [] Cell::Count(row.ran.tally.wake_ups);
    ["told_later"] [2 "told\nlater"] Cell::Count(row.ran.tally.later);
    [] [2 "broad-\ncasts"] Cell::Count(row.ran.tally.broadcasts);
    ["waiting_ns"] [1 "waiting"] Cell::ns(nanoseconds(row.ran.tally.waiting));
    ["longest_wait_ns"] [1 "longest"] Cell::ns(nanoseconds(row.ran.tally.longest));
    ["published_cycle_ns"] [] Cell::json(row.published);
    ["error_percent"] [] Cell::json(row.error());
    ["fitted"] [] Cell::json(row.published.is_some());
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Native {
        return arguments.run_native();
    }
    if arguments.file.is_some() {
        return Err(Error::Usage("--file: only with --on native".to_owned()));
    }
    let name = arguments.machine.as_deref().unwrap_or(MACHINE);
    let (profile, left_out) = Experiment::TlbFlush.load(name)?;
    let software = runs::software::<Job>(arguments.threads);
    let warnings = left_out.into_iter().collect();
    if let Some(path) = &arguments.from {
        return from::run(path, &profile, &software, warnings, arguments.json);
    }
    let jobs = arguments.jobs(&profile)?;
    let ran = software(&jobs)?;
    let each: Vec<Job> = jobs.iter().map(Job::all_busy).collect();
    let ran_busy = software(&each)?;
    let busy = each.iter().zip(&ran_busy).map(|(job, ran)| job.each(ran));
    let report = Report {
        experiment: "tlb-flush",
        parameters: jobs[0].parameters(jobs[0].cycles()),
        rows: jobs.into_iter().zip(ran).zip(busy).map(Row::new).collect(),
        warnings,
    };
    report.print(arguments.json, |Report { rows, .. }| {
        let job = &rows[0].job;
        let head = format!(
            "{} on {}, {}, {}",
            job.described(),
            profile.name,
            report::counted(job.vcpus.into(), "vCPU", "vCPUs"),
            report::counted(job.physical.into(), "physical CPU", "physical CPUs"),
        );
        let head = report::title(&head);
        let tables = [1, 2].map(|number| columns::table(number, 1, rows)).join("\n");
        let fitted = rows.iter().any(|row| row.published.is_some());
        format!("{head}\n\n{tables}{}", report::fitted(fitted))
    })
}

impl Arguments {
    fn run_native(&self) -> Result<(), Error> {
        Error::refuse(
            &[
                (!self.how.is_empty(), "--how"),
                (self.machine.is_some(), "--machine"),
                (self.vcpus.is_some(), "--vcpus"),
                (self.cpus.is_some(), "--cpus"),
                (self.slice.is_some(), "--slice"),
                (self.ranges.is_some(), "--ranges"),
                (self.threads.threads.is_some(), "--threads"),
                (self.work != 0, "--work"),
                (self.spin != 0, "--spin"),
                (self.stays, "--stays"),
            ],
            ": not with --on native",
        )?;
        native::run(&native::Program {
            threads: self.tasks,
            rounds: self.rounds,
            chunks: self.chunks,
            pages: self.pages,
            file: self.file.clone(),
            json: self.json,
        })
    }

    fn jobs(&self, profile: &Profile) -> Result<Vec<Job>, Error> {
        // A virtual machine's profile says how many CPUs it has, and not on how many they run.
        let most = match profile.system.kind {
            Kind::Vm => None,
            Kind::Metal | Kind::Imagined => profile.system.cpus,
        };
        let most = most.map_or(u16::MAX, |cpus| u16::try_from(cpus).unwrap_or(u16::MAX));
        let (tasks, pages) = (self.tasks, self.pages);
        let vcpus = self.vcpus.unwrap_or(VCPUS);
        let cpus = self.cpus.unwrap_or(vcpus.min(most));
        let usage = |why: String| Err(Error::Usage(why));
        if cpus > most {
            return usage(format!("--cpus {cpus}: {} has {most}", profile.name));
        }
        if usize::from(vcpus) > MAX_CPUS {
            return usage(format!("-v {vcpus}: at most {MAX_CPUS}"));
        }
        if tasks > MOST_TASKS {
            return usage(format!("-t {tasks}: at most {MOST_TASKS} threads on the machine"));
        }
        Error::once("--how", &self.how, |how| how.name())?;
        if !job::fits(tasks, pages) {
            return usage(format!(
                "-t {tasks} -p {pages}: together more than an address space of 128 TiB has"
            ));
        }
        if cpus > vcpus {
            return usage(format!("--cpus {cpus}: {vcpus} vCPUs run on no more than as many"));
        }
        let job = |&how: &How| Job {
            profile: profile.clone(),
            how,
            threads: tasks,
            rounds: self.rounds,
            chunks: self.chunks,
            pages,
            vcpus,
            physical: cpus,
            slice: self.slice.map_or(job::SLICE, Time::us),
            work: Time::us(self.work),
            spin: Time::us(self.spin),
            stays: self.stays,
            ranges: self.ranges.unwrap_or(job::RANGES).into(),
        };
        let hows = if self.how.is_empty() { &How::ALL[..] } else { &self.how };
        Ok(hows.iter().map(job).collect())
    }
}

/// Whether a run is of the published program, but for how often it does the same.
fn is_published(job: &Job) -> bool {
    (job.threads, job.pages, job.vcpus, job.physical) == (32, 16_384, 16, 16)
        && job.work == Time::ZERO
        && job.spin == Time::ZERO
        && !job.stays
}

impl Row {
    fn new(((job, ran), busy): ((Job, Ran), Time)) -> Self {
        let mut figures = crate::published::of("tlb-flush", &job.profile).into_iter();
        let figure = figures.find(|row| is_published(&job) && row.metric == "real");
        let seconds = figure.and_then(|figure| match job.how {
            How::Interrupt => figure.before,
            How::List | How::Space => figure.after,
            _ => None,
        });
        let published = seconds.map(|seconds| seconds * 1e9 / PUBLISHED_CYCLES as f64);
        Self { job, ran, busy, published }
    }

    fn cycle(&self) -> f64 {
        nanoseconds(self.ran.time) / self.job.cycles() as f64
    }

    fn error(&self) -> Option<f64> {
        self.published.map(|published| error_percent(self.cycle(), published))
    }
}

//! `write-protect`: starting a dirty log, the published ways and the engine's.

mod baseline;
mod engine;
pub mod job;
mod kvm;
mod migration;
pub mod published;
pub mod run;
mod tables;
mod writable;

use clap::Args;
use serde_json::{Value, json};
use tablewright::Level;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::guest::input::Backing;
use crate::guest::{MOST_LEAVES, Stage2, leaf_bytes, leaf_for, nanoseconds};
use crate::kvm::{Asked, On, Options as KvmOptions, free};
use crate::output::columns::{self, Cell, NOT_PUBLISHED, columns};
use crate::output::report::{self, Report, error_percent};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use job::{How, Job, Ran, Run, Then};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright write-protect
  tablewright write-protect -b 256M -v 4 --format arm64 --json
  tablewright write-protect -b 30G                    published guests are as large
  tablewright write-protect --sizes 1G 64G 16T      the start alone, for each size
  tablewright write-protect --tables                  one table, by a bitmap and by looking at all
  tablewright write-protect --on kvm                  on the KVM of this computer
  tablewright write-protect --on kvm -s anonymous_thp -b 1G -v 2")]
pub struct Arguments {
    /// How much memory the guest has, in pages of 4 KiB [default: 3G; on kvm 256M for each vCPU,
    /// and at most half of what is free]
    #[arg(short, long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// How many vCPUs; each writes its own part of the memory [default: 12; on kvm as many as there
    /// are CPUs, at most 12]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    vcpus: Option<u16>,
    /// Backing of the guest's memory, on kvm alone [default: anonymous]
    #[arg(short, long, value_name = "BACKING")]
    source: Option<Backing>,
    /// The format of the tables [default: ept]
    #[arg(long, value_enum)]
    format: Option<Stage2>,
    /// The profile of a machine, by name or as a file [default: x86-12-vcpus, or kunpeng-920 for
    /// arm64]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// How the log is started [default: each way in turn]
    #[arg(long, value_enum)]
    how: Option<How>,
    /// The start alone, for guests of these sizes, in leaves as large as it takes for this computer
    /// [default: 1G to 16T]
    #[arg(long, value_name = "SIZE", num_args = 0.., value_delimiter = ',',
          conflicts_with = "bytes")]
    sizes: Option<Vec<Size>>,
    /// Have a part of the memory written and read, and as much again for each further part: the Nth
    /// part, and two of them, say how long a part takes [default: 1, or so many that a part is at
    /// most 768 MiB, above 3 GiB]
    #[arg(long, value_name = "N", conflicts_with = "sizes",
          value_parser = clap::value_parser!(u64).range(1..))]
    scale: Option<u64>,
    /// One table alone: protecting it by a bitmap of the entries that may be writable, and by
    /// looking at all, where so many are [default: 1, 16 and 512]
    #[arg(long, value_name = "N", num_args = 0.., value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=512),
          conflicts_with_all = ["bytes", "sizes", "vcpus", "how", "scale"])]
    tables: Option<Vec<u16>>,
    /// The machine, or this computer
    #[arg(long, value_enum, default_value = "machine")]
    on: On,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    kvm: KvmOptions,
}

/// The published case.
const BYTES: u64 = 3 << 30;
const VCPUS: u16 = 12;

/// CPUs and memory of a computer.
struct Room {
    cpus: u16,
    free: u64,
}

impl Room {
    fn here() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self { cpus: u16::try_from(cpus).unwrap_or(u16::MAX), free: free() }
    }
}

/// Fits the published case to a computer: a vCPU for each CPU, with the memory that it has there,
/// in all at most half of what is free. Given values are kept.
fn fitting(bytes: Option<u64>, vcpus: Option<u16>, backing: Backing, room: &Room) -> (u64, u16) {
    let most = room.cpus.clamp(1, VCPUS);
    let divides = |vcpus: u16| bytes.is_none_or(|it| it.is_multiple_of(4096 * u64::from(vcpus)));
    let vcpus = vcpus.unwrap_or_else(|| (1..=most).rev().find(|&it| divides(it)).unwrap_or(1));
    let bytes = bytes.unwrap_or_else(|| {
        let whole = backing.source.bytes().max(2 << 20) * u64::from(vcpus);
        let each = BYTES / u64::from(VCPUS);
        let all = (each * u64::from(vcpus)).min(room.free / 2);
        (all / whole).max(1) * whole
    });
    (bytes, vcpus)
}

/// The sizes of `--sizes`.
const SIZES: [u64; 8] =
    [1 << 30, 4 << 30, 16 << 30, 64 << 30, 256 << 30, 1 << 40, 4 << 40, 16 << 40];
/// Most of `-b`, in pages of 4 KiB: the published guests have up to 30 GiB, and it is for the user
/// to wait for them.
const MOST_PAGES: u64 = 1 << 23;
/// Up to so many, as in the published case, all are written and read.
const WHOLE_PAGES: u64 = BYTES / 4096;
/// Beyond, so many of them.
const PART_PAGES: u64 = WHOLE_PAGES / 4;
/// No memory is larger: the host's lies beside it.
const MOST_BYTES: u64 = 1 << 45;

struct Row {
    job: Job,
    ran: Ran,
    /// The time of all writes, and their faults; of all reads.
    write: Option<(f64, u64)>,
    read: Option<(f64, u64)>,
    retries: u64,
    /// Of the start, and of the writes.
    published: [Option<f64>; 2],
    fitted: bool,
}

/// Why a phase after the start has no figure.
const START_ALONE: &str = "--sizes has the start alone";

columns! { row: Row;
    ["how"] [0 ""] Cell::text(row.job.how.name());
    ["bytes"] [0 "memory"] Cell::Bytes(row.job.bytes);
    ["leaf_bytes"] [1 "leaves"] Cell::Bytes(leaf_bytes(row.job.leaf));
    ["start_ns"] [1 "start"] Cell::ns(nanoseconds(row.ran.start));
    [] [1 "error  " NOT_PUBLISHED] Cell::Marked(row.errors()[0], row.fitted);
    ["write_ns"] [1 "write" START_ALONE] Cell::or_nothing(row.write, |(time, _)| Cell::ns(time));
    [] [1 "error  " NOT_PUBLISHED] Cell::Marked(row.errors()[1], row.fitted);
    ["read_ns"] [1 "read" START_ALONE] Cell::or_nothing(row.read, |(time, _)| Cell::ns(time));
    ["published_ns"] [] Cell::json(row.published);
    ["error_percent"] [] Cell::json(row.errors());
    ["fitted"] [] Cell::json(row.fitted);
    ["entries_written_by_start"] [2 "entries\nwritten"] Cell::Count(row.ran.entries);
    ["kicks"] [2 "kicks"] Cell::Count(row.ran.kicks);
    ["invalidations"] [2 "invali-\ndations"] Cell::Count(row.ran.invalidations);
    ["faults_of_writes"] [2 "faults of\nwrites" START_ALONE]
        Cell::or_nothing(row.write, |(_, faults)| Cell::Count(faults));
    ["faults_of_reads"] [2 "faults of\nreads" START_ALONE]
        Cell::or_nothing(row.read, |(_, faults)| Cell::Count(faults));
    ["retries"] [2 "retries"] Cell::Count(row.retries);
    ["bitmap_bytes"] [2 "bitmap"] Cell::Bytes(row.ran.bitmap_bytes);
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Kvm {
        return arguments.run_kvm();
    }
    let tables = arguments.tables.as_deref();
    let rounds = arguments.kvm.rounds.filter(|_| tables.is_none());
    KvmOptions { rounds, ..arguments.kvm.clone() }.unused()?;
    if arguments.source.is_some() {
        return Err(Error::Usage("-s: only with --on kvm".to_owned()));
    }
    let format = arguments.format();
    let usual = if format.is_x86() { "x86-12-vcpus" } else { "kunpeng-920" };
    let name = arguments.machine.as_deref().unwrap_or(usual);
    let (profile, left_out) = Experiment::WriteProtect.load(name)?;
    if let Some(writable) = tables {
        if arguments.threads.threads.is_some() {
            return Err(Error::Usage("--threads: not with --tables".to_owned()));
        }
        check(&profile, format, 1)?;
        if let Some(left_out) = &left_out {
            report::complain("warning", left_out);
        }
        let rounds = arguments.kvm.rounds.unwrap_or(tables::ROUNDS);
        return tables::run(&profile, format, (writable, rounds), arguments.json);
    }
    let vcpus = arguments.vcpus.unwrap_or(VCPUS);
    check(&profile, format, vcpus)?;
    let software = runs::software::<Job>(arguments.threads);
    let (rows, scale) = arguments.rows(&profile, vcpus, &software)?;
    let (format, machine) = (format.name(), &profile.name);
    let report: Report<Value, Row> = Report {
        experiment: "write-protect",
        parameters: json!({
            "vcpus": vcpus,
            "format": format,
            "machine": machine,
            "scale": scale,
        }),
        rows,
        warnings: left_out.into_iter().collect(),
    };
    report.print(arguments.json, |Report { rows, .. }| {
        let vcpus = report::counted(vcpus.into(), "vCPU", "vCPUs");
        let tables = [1, 2].map(|number| columns::table(number, 1, rows)).join("\n");
        let parts = match scale {
            1 => String::new(),
            _ => format!(
                "\nwritten and read: 1/{scale} of the memory, and 2/{scale}; each further part \
                 takes as long as the second\n"
            ),
        };
        let fitted = report::fitted(rows.iter().any(|row| row.fitted));
        let head = report::title(&format!("{vcpus} on {machine}, tables of {format}"));
        format!("{head}\n\n{tables}{}{fitted}", report::title(&parts))
    })
}

/// Refuses a machine that cannot run it.
fn check(profile: &Profile, format: Stage2, vcpus: u16) -> Result<(), Error> {
    if profile.architecture.is_x86() != format.is_x86() {
        let why = format!("--format {}: it is of another architecture", format.name());
        return Err(Error::input(&profile.name, why));
    }
    Experiment::WriteProtect.fits(profile, "-v", vcpus)
}

impl Arguments {
    fn format(&self) -> Stage2 {
        self.format.unwrap_or(Stage2::Ept)
    }

    /// The sizes that are asked for, if any are; `usual` where none is named.
    fn sizes(&self, usual: &[u64]) -> Option<Vec<u64>> {
        self.sizes.as_deref().map(|sizes| match sizes.is_empty() {
            true => usual.to_vec(),
            false => sizes.iter().map(|size| size.bytes()).collect(),
        })
    }

    fn run_kvm(&self) -> Result<(), Error> {
        Error::refuse(
            &[
                (self.how.is_some(), "--how"),
                (self.machine.is_some(), "--machine"),
                (self.format.is_some(), "--format"),
                (self.tables.is_some(), "--tables"),
                (self.scale.is_some(), "--scale"),
                (self.kvm.all_set, "--all-set"),
                (self.kvm.ring.is_some(), "--ring"),
                (self.kvm.predict.is_some(), "--predict"),
                (self.threads.threads.is_some(), "--threads"),
            ],
            ": not with --on kvm",
        )?;
        let backing = self.source.unwrap_or(Backing::ANONYMOUS);
        let bytes = self.bytes.map(Size::bytes);
        let (bytes, vcpus) = fitting(bytes, self.vcpus, backing, &Room::here());
        let asked = Asked::new(backing, bytes, vcpus.into(), self.kvm.clone());
        let sizes = self.sizes(&[256 << 20, 512 << 20, 1 << 30, 2 << 30]);
        let is_published = (bytes, vcpus) == (BYTES, VCPUS);
        let is_own = self.bytes.is_none() || self.vcpus.is_none();
        let note = (is_own && !is_published && sizes.is_none()).then(|| {
            let published = human(BYTES);
            format!(
                "the published guest has {published} and {VCPUS} vCPUs, this one what fits this \
                 computer: -b and -v choose"
            )
        });
        kvm::run(&asked, sizes.as_deref(), note, self.json)
    }

    /// The ways that a format has.
    fn ways(&self) -> Result<Vec<How>, Error> {
        match (self.how, self.format().is_x86()) {
            (Some(How::Fast | How::FastScan), false) => Err(Error::Usage(
                "--how fast: tables of arm64 carry no permissions, so that way is x86's alone"
                    .to_owned(),
            )),
            (Some(how), _) => Ok(vec![how]),
            (None, true) => Ok(vec![How::Slow, How::Fast, How::FastScan, How::Tablewright]),
            (None, false) => Ok(vec![How::Slow, How::Tablewright]),
        }
    }

    /// Returns the runs in the order of the rows, how many are for one, and into how many parts
    /// memory is divided: the start with the writes, and with the reads; or the start, and the
    /// writes and the reads of one part and of two; or the start alone.
    fn jobs(&self, profile: &Profile, vcpus: u16) -> Result<(Vec<Job>, usize, u64), Error> {
        let of = |how, bytes, leaf, then| Job {
            profile: profile.clone(),
            format: self.format(),
            how,
            bytes,
            leaf,
            vcpus,
            then,
            before: 0,
        };
        let hows = self.ways()?;
        let usage = |text| Err(Error::Usage(text));
        if let Some(sizes) = self.sizes(&SIZES) {
            let mut jobs = Vec::new();
            for bytes in sizes {
                let Some(leaf) = leaf_for(bytes).filter(|_| bytes <= MOST_BYTES) else {
                    return usage(format!(
                        "--sizes {}: at most {}, and a multiple of 4 KiB, above {} of 2 MiB, above \
                         {} of 1 GiB",
                        human(bytes),
                        human(MOST_BYTES),
                        human(MOST_LEAVES << 12),
                        human(MOST_LEAVES << 21),
                    ));
                };
                jobs.extend(hows.iter().map(|&how| of(how, bytes, leaf, Then::Nothing)));
            }
            return Ok((jobs, 1, 1));
        }
        let bytes = self.bytes.map_or(BYTES, Size::bytes);
        let (pages, shown) = (bytes / 4096, human(bytes));
        if !bytes.is_multiple_of(4096) {
            return usage(format!("-b {bytes}: not a multiple of 4 KiB"));
        }
        if pages > MOST_PAGES {
            let most = human(MOST_PAGES * 4096);
            return usage(format!(
                "-b {shown}: at most {most} in pages of 4 KiB; --sizes takes more"
            ));
        }
        if pages < u64::from(vcpus) {
            return usage(format!("-b {shown}: fewer pages than there are vCPUs"));
        }
        let scale = scale(self.scale, pages, vcpus)?;
        let part = bytes / scale;
        let runs = match scale {
            1 => vec![(bytes, Then::Write), (bytes, Then::Read)],
            _ => vec![
                (bytes, Then::Nothing),
                (part, Then::Write),
                (2 * part, Then::Write),
                (part, Then::Read),
                (2 * part, Then::Read),
            ],
        };
        let of_row = |&how: &How| {
            let job = move |&(bytes, then): &(u64, Then)| of(how, bytes, Level::PAGE, then);
            runs.iter().map(job).collect::<Vec<_>>()
        };
        Ok((hows.iter().flat_map(of_row).collect(), runs.len(), scale))
    }

    fn rows(&self, profile: &Profile, vcpus: u16, run: Run<'_>) -> Result<(Vec<Row>, u64), Error> {
        let (jobs, runs, scale) = self.jobs(profile, vcpus)?;
        let ran = run(&jobs)?;
        for (job, ran) in jobs.iter().zip(&ran) {
            job.sound(ran)?;
        }
        let took = |ran: &Ran| Some((nanoseconds(ran.then), ran.faults));
        let mut rows = Vec::new();
        for (jobs, ran) in jobs.chunks(runs).zip(ran.chunks(runs)) {
            let job = jobs[0].clone();
            rows.push(match ran {
                // The start of the second run is that of the first.
                [write, read] => {
                    let retries = write.retries + read.retries;
                    Row::new(job, write.clone(), [took(write), took(read)], retries)
                }
                [start, write_one, write_two, read_one, read_two] => {
                    let write = whole(write_one, write_two, scale);
                    let read = whole(read_one, read_two, scale);
                    let retries = write.retries + read.retries;
                    Row::new(job, start.clone(), [took(&write), took(&read)], retries)
                }
                ran => Row::new(job, ran[0].clone(), [None; 2], ran[0].retries),
            });
        }
        Ok((rows, scale))
    }
}

/// Into how many parts memory is divided, of which one is written, and two.
fn scale(asked: Option<u64>, pages: u64, vcpus: u16) -> Result<u64, Error> {
    let vcpus = u64::from(vcpus);
    let fits =
        |scale: u64, whole: u64| pages.is_multiple_of(scale * whole) && pages / scale >= vcpus;
    match asked {
        Some(scale) if fits(scale, 1) => Ok(scale),
        Some(scale) => Err(Error::Usage(format!(
            "--scale {scale}: {} pages for {vcpus} vCPUs cannot be divided so",
            report::count(pages)
        ))),
        None if pages <= WHOLE_PAGES => Ok(1),
        // Each vCPU has whole tables, if that is possible.
        None => {
            let least = pages.div_ceil(PART_PAGES);
            let fit = |whole| (least..=4 * least).find(|&scale| fits(scale, whole));
            Ok(fit(512 * vcpus).or_else(|| fit(1)).unwrap_or(1))
        }
    }
}

/// The accesses to all memory, by one part of it and by two: the first part has what is at the
/// beginning, and each further part takes as long as the second.
fn whole(one: &Ran, two: &Ran, scale: u64) -> Ran {
    let more = |one: u64, two: u64| one + two.saturating_sub(one) * (scale - 1);
    let retries = more(one.retries, two.retries);
    Ran {
        then: Time::ps(more(one.then.as_ps(), two.then.as_ps())),
        // One for each page, and those for nothing.
        faults: more(one.faults - one.retries, two.faults - two.retries) + retries,
        retries,
        ..Ran::default()
    }
}

impl Row {
    fn new(job: Job, ran: Ran, [write, read]: [Option<(f64, u64)>; 2], retries: u64) -> Self {
        let mut row = Self { job, ran, write, read, retries, published: [None; 2], fitted: false };
        let (job, profile) = (&row.job, &row.job.profile);
        let is_case = (job.bytes, job.vcpus) == (BYTES, VCPUS) && write.is_some();
        let figures = crate::published::of("write-protect", profile).into_iter();
        for figure in figures.filter(|_| is_case) {
            let Some(metric) = published::metric(&figure) else {
                continue;
            };
            row.published[metric] = match job.how {
                How::Slow => figure.before,
                How::Fast => figure.after,
                _ => None,
            };
            row.fitted |= job.how == How::Slow && figure.is_fitted(profile);
        }
        row
    }

    /// How much more the machine takes for the start, and for the writes.
    fn errors(&self) -> [Option<f64>; 2] {
        let took = [nanoseconds(self.ran.start), self.write.map_or(0.0, |(time, _)| time)];
        [0, 1].map(|at| self.published[at].map(|it| error_percent(took[at], it)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_asked_for_fits_the_computer() {
        let usual = |cpus, free: u64| {
            fitting(None, None, Backing::ANONYMOUS, &Room { cpus, free: free << 20 })
        };
        assert_eq!(usual(64, 1 << 20), (BYTES, VCPUS));
        assert_eq!(usual(2, 1 << 20), (512 << 20, 2));
        assert_eq!(usual(2, 600), (300 << 20, 2));
        assert_eq!(usual(7, 0), (14 << 20, 7));
        let room = Room { cpus: 3, free: 1 << 40 };
        // Each has as many pages.
        assert_eq!(fitting(Some(1 << 30), None, Backing::ANONYMOUS, &room), (1 << 30, 2));
        assert_eq!(fitting(None, Some(5), Backing::HUGETLB_1GB, &room), (5 << 30, 5));
        assert_eq!(fitting(Some(1), Some(40), Backing::ANONYMOUS, &room), (1, 40));
    }
}

//! `write-protect`: starting a dirty log, the published ways and the engine's.

mod tables;

use clap::Args;
use serde::Serialize;
use tablewright::Level;
use tablewright_experiments::input::Backing;
use tablewright_experiments::no_violation;
use tablewright_experiments::write_protect::{
    self as simulate, How, Job, MOST_LEAVES, Ran, Stage2, Then, leaf_bytes, leaf_for,
};
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::kvm::{self, On};
use crate::machine::named::Named;
use crate::needs::{self, Experiment};
use crate::published;
use crate::report::{self, Report, error_percent};
use crate::runs::{self, Threads};
use crate::size::{Size, human};

/// What `write-protect` can be asked.
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
    /// What backs the guest's memory, on kvm alone [default: anonymous]
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
    #[arg(long, value_name = "SIZE", num_args = 0.., value_delimiter = ',', conflicts_with = "bytes")]
    sizes: Option<Vec<Size>>,
    /// Have a part of the memory written and read, and as much again for each further part: the Nth
    /// part, and two of them, say how long a part takes [default: 1, or so many that a part is at
    /// most 768 MiB, above 3 GiB]
    #[arg(long, value_name = "N", conflicts_with = "sizes", value_parser = clap::value_parser!(u64).range(1..))]
    scale: Option<u64>,
    /// One table alone: protecting it by a bitmap of the entries that may be writable, and by
    /// looking at all, where so many are [default: 1, 16 and 512]
    #[arg(long, value_name = "N", num_args = 0.., value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=512),
          conflicts_with_all = ["bytes", "sizes", "vcpus", "how", "scale"])]
    tables: Option<Vec<u16>>,
    /// What to run on
    #[arg(long, value_enum, default_value = "machine")]
    on: On,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    kvm: kvm::Options,
}

impl Arguments {
    fn format(&self) -> Stage2 {
        self.format.unwrap_or(Stage2::Ept)
    }
}

/// The published case.
const BYTES: u64 = 3 << 30;
const VCPUS: u16 = 12;

/// What a computer has for guests.
struct Room {
    cpus: u16,
    free: u64,
}

impl Room {
    fn here() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            cpus: u16::try_from(cpus).unwrap_or(u16::MAX),
            free: kvm::free(),
        }
    }
}

/// As much of the published case as fits: a vCPU for each CPU, with the memory that it has there,
/// in all at most half of what is free. What is asked for is not changed.
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
const SIZES: [u64; 8] = [
    1 << 30,
    4 << 30,
    16 << 30,
    64 << 30,
    256 << 30,
    1 << 40,
    4 << 40,
    16 << 40,
];
/// What `-b` takes, in pages of 4 KiB: the published guests have up to 30 GiB, and it is for the
/// user to wait for them.
const MOST_PAGES: u64 = 1 << 23;
/// Up to so many, as in the published case, all are written and read.
const WHOLE_PAGES: u64 = BYTES / 4096;
/// Beyond, so many of them.
const PART_PAGES: u64 = WHOLE_PAGES / 4;
/// No memory is larger: the host's lies beside it.
const MOST_BYTES: u64 = 1 << 45;

#[derive(Serialize)]
struct Parameters {
    vcpus: u16,
    format: &'static str,
    machine: String,
    /// One such part of the memory was written and read, and two.
    scale: u64,
}

#[derive(Serialize)]
struct Row {
    how: &'static str,
    bytes: u64,
    leaf_bytes: u64,
    /// Nanoseconds of virtual time.
    #[serde(rename = "start_ns")]
    start: f64,
    #[serde(rename = "write_ns")]
    write: Option<f64>,
    #[serde(rename = "read_ns")]
    read: Option<f64>,
    /// What was published for the start and for the writes, and how much more the machine takes.
    #[serde(rename = "published_ns")]
    published: [Option<f64>; 2],
    error_percent: [Option<f64>; 2],
    /// The machine was fitted on these figures.
    fitted: bool,
    entries_written_by_start: u64,
    kicks: u64,
    invalidations: u64,
    faults_of_writes: Option<u64>,
    faults_of_reads: Option<u64>,
    retries: u64,
    /// Supplied zeroed.
    bitmap_bytes: u64,
}

/// Runs it, and prints what it took.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Kvm {
        kvm::only_machine(
            "kvm",
            &[
                (arguments.how.is_some(), "--how"),
                (arguments.machine.is_some(), "--machine"),
                (arguments.format.is_some(), "--format"),
                (arguments.tables.is_some(), "--tables"),
                (arguments.scale.is_some(), "--scale"),
                (arguments.kvm.all_set, "--all-set"),
                (arguments.kvm.ring.is_some(), "--ring"),
                (arguments.kvm.predict.is_some(), "--predict"),
                (arguments.threads.threads.is_some(), "--threads"),
            ],
        )?;
        let backing = arguments.source.unwrap_or(Backing::ANONYMOUS);
        let bytes = arguments.bytes.map(Size::bytes);
        let (bytes, vcpus) = fitting(bytes, arguments.vcpus, backing, &Room::here());
        let asked = kvm::Asked::new(backing, bytes, vcpus.into(), arguments.kvm.clone());
        let sizes = arguments
            .sizes
            .as_deref()
            .map(|sizes| match sizes.is_empty() {
                true => vec![256 << 20, 512 << 20, 1 << 30, 2 << 30],
                false => sizes.iter().map(|size| size.bytes()).collect(),
            });
        let is_published = (asked.bytes, asked.vcpus) == (BYTES, VCPUS.into());
        let is_own = arguments.bytes.is_none() || arguments.vcpus.is_none();
        let note = (is_own && !is_published && sizes.is_none()).then(|| {
            format!(
                "the published guest has {} and {VCPUS} vCPUs, this one what fits this computer: -b and -v choose",
                human(BYTES)
            )
        });
        return kvm::write_protect(&asked, sizes.as_deref(), note, arguments.json);
    }
    kvm::Options {
        rounds: arguments.kvm.rounds.filter(|_| arguments.tables.is_none()),
        ..arguments.kvm.clone()
    }
    .unused()?;
    if arguments.source.is_some() {
        return Err(Error::Usage("-s: only with --on kvm".to_owned()));
    }
    let format = arguments.format();
    let usual = match format.is_x86() {
        true => "x86-12-vcpus",
        false => "kunpeng-920",
    };
    let (profile, left_out) = needs::load(
        arguments.machine.as_deref().unwrap_or(usual),
        Experiment::WriteProtect,
    )?;
    if let Some(writable) = &arguments.tables {
        if arguments.threads.threads.is_some() {
            return Err(Error::Usage("--threads: not with --tables".to_owned()));
        }
        check(&profile, format, 1)?;
        needs::warn(left_out.as_ref());
        let rounds = arguments.kvm.rounds.unwrap_or(tables::ROUNDS);
        return tables::run(&profile, format, (writable, rounds), arguments.json);
    }
    let mut report = test(
        arguments,
        &profile,
        &runs::software::<simulate::Job>(arguments.threads),
    )?;
    report.warnings.extend(left_out);
    report.print(arguments.json, text)
}

/// Whether a machine can run it.
fn check(profile: &Profile, format: Stage2, vcpus: u16) -> Result<(), Error> {
    if profile.architecture.is_x86() != format.is_x86() {
        let why = format!("--format {}: it is of another architecture", format.name());
        return Err(Error::input(&profile.name, why));
    }
    Experiment::WriteProtect.fits(profile, vcpus)
}

/// The ways that a format has.
fn ways(arguments: &Arguments) -> Result<Vec<How>, Error> {
    match (arguments.how, arguments.format().is_x86()) {
        (Some(How::Fast | How::FastScan), false) => Err(Error::Usage(
            "--how fast: tables of arm64 carry no permissions, so that way is x86's alone"
                .to_owned(),
        )),
        (Some(how), _) => Ok(vec![how]),
        (None, true) => Ok(vec![How::Slow, How::Fast, How::FastScan, How::Tablewright]),
        (None, false) => Ok(vec![How::Slow, How::Tablewright]),
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

/// What is to be run, in the order of the rows, and how many runs are for one: the start with the
/// writes, and with the reads; or the start, and the writes and the reads of one part and of two;
/// or the start alone.
fn jobs(arguments: &Arguments, profile: &Profile) -> Result<(Vec<Job>, usize, u64), Error> {
    let vcpus = arguments.vcpus.unwrap_or(VCPUS);
    let of = |how, bytes, leaf, then| Job {
        profile: profile.clone(),
        format: arguments.format(),
        how,
        bytes,
        leaf,
        vcpus,
        then,
        before: 0,
    };
    let hows = ways(arguments)?;
    let usage = |text| Err(Error::Usage(text));
    let Some(sizes) = &arguments.sizes else {
        let bytes = arguments.bytes.map_or(BYTES, Size::bytes);
        if !bytes.is_multiple_of(4096) {
            return usage(format!("-b {bytes}: not a multiple of 4 KiB"));
        }
        if bytes / 4096 > MOST_PAGES {
            return usage(format!(
                "-b {}: at most {} in pages of 4 KiB; --sizes takes more",
                human(bytes),
                human(MOST_PAGES * 4096)
            ));
        }
        if bytes / 4096 < u64::from(vcpus) {
            return usage(format!(
                "-b {}: fewer pages than there are vCPUs",
                human(bytes)
            ));
        }
        let scale = scale(arguments.scale, bytes / 4096, vcpus)?;
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
        return Ok((hows.iter().flat_map(of_row).collect(), runs.len(), scale));
    };
    let sizes: Vec<u64> = match sizes.is_empty() {
        true => SIZES.to_vec(),
        false => sizes.iter().map(|size| size.bytes()).collect(),
    };
    let mut jobs = Vec::new();
    for bytes in sizes {
        let leaf = leaf_for(bytes).filter(|_| bytes <= MOST_BYTES);
        let Some(leaf) = leaf else {
            return usage(format!(
                "--sizes {}: at most {}, and a multiple of 4 KiB, above {} of 2 MiB, above {} of 1 GiB",
                human(bytes),
                human(MOST_BYTES),
                human(MOST_LEAVES << 12),
                human(MOST_LEAVES << 21),
            ));
        };
        jobs.extend(hows.iter().map(|&how| of(how, bytes, leaf, Then::Nothing)));
    }
    Ok((jobs, 1, 1))
}

/// What the whole takes, by one part of it and by two: the first part has what is at the beginning,
/// and each further part takes as long as the second.
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

fn test(
    arguments: &Arguments,
    profile: &Profile,
    run: simulate::Run<'_>,
) -> Result<Report<Parameters, Row>, Error> {
    let vcpus = arguments.vcpus.unwrap_or(VCPUS);
    check(profile, arguments.format(), vcpus)?;
    let (jobs, runs, scale) = jobs(arguments, profile)?;
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        sound(job, ran)?;
    }
    let mut rows: Vec<Row> = Vec::new();
    for (jobs, ran) in jobs.chunks(runs).zip(ran.chunks(runs)) {
        match ran {
            [write, read] => {
                // The start of the second run is that of the first.
                rows.push(with_reads(row(&jobs[0], write), read));
            }
            [start, write_one, write_two, read_one, read_two] => {
                let written = whole(write_one, write_two, scale);
                let written = Ran {
                    then: written.then,
                    faults: written.faults,
                    retries: written.retries,
                    ..start.clone()
                };
                let all = Job {
                    then: Then::Write,
                    ..jobs[0].clone()
                };
                let row = row(&all, &written);
                rows.push(with_reads(row, &whole(read_one, read_two, scale)));
            }
            _ => rows.extend(jobs.iter().zip(ran).map(|(job, ran)| row(job, ran))),
        }
    }
    Ok(Report {
        experiment: "write-protect",
        parameters: Parameters {
            vcpus,
            format: arguments.format().name(),
            machine: profile.name.clone(),
            scale,
        },
        rows,
        warnings: Vec::new(),
    })
}

/// That the machine has no complaint.
pub fn sound(job: &Job, ran: &Ran) -> Result<(), Error> {
    no_violation(&job.profile, job.how.name(), ran.violation.as_deref())
}

/// A time as the published table has it.
pub fn nanoseconds(time: tablewright_machine::Time) -> f64 {
    time.as_ps() as f64 / 1e3
}

fn with_reads(row: Row, ran: &Ran) -> Row {
    Row {
        read: Some(nanoseconds(ran.then)),
        faults_of_reads: Some(ran.faults),
        retries: row.retries + ran.retries,
        ..row
    }
}

fn row(job: &Job, ran: &Ran) -> Row {
    let took = [nanoseconds(ran.start), nanoseconds(ran.then)];
    let mut row = Row {
        how: job.how.name(),
        bytes: job.bytes,
        leaf_bytes: leaf_bytes(job.leaf),
        start: took[0],
        write: (job.then == Then::Write).then_some(took[1]),
        read: None,
        published: [None; 2],
        error_percent: [None; 2],
        fitted: false,
        entries_written_by_start: ran.entries,
        kicks: ran.kicks,
        invalidations: ran.invalidations,
        faults_of_writes: (job.then == Then::Write).then_some(ran.faults),
        faults_of_reads: None,
        retries: ran.retries,
        bitmap_bytes: ran.bitmap_bytes,
    };
    let is_case = (job.bytes, job.vcpus, job.then) == (BYTES, VCPUS, Then::Write);
    let rows = published::built_in("write-protect").unwrap_or_default();
    let case = rows
        .iter()
        .filter(|row| is_case && job.profile.system.published_as.contains(&row.system));
    for figure in case {
        let Some(metric) = metric(figure) else {
            continue;
        };
        let published = match job.how {
            How::Slow => figure.before,
            How::Fast => figure.after,
            _ => None,
        };
        row.published[metric] = published;
        row.error_percent[metric] = published.map(|it| error_percent(took[metric], it));
        row.fitted |= job.how == How::Slow
            && job.profile.is_fitted_on_metric(
                &figure.system,
                &figure.configuration,
                &figure.metric,
            );
    }
    row
}

/// Which of the two figures of this experiment a published row is, if it is one.
pub fn metric(row: &published::Row) -> Option<usize> {
    let case = row.configuration.starts_with("Case 1:") && row.unit == "ns";
    match row.metric.get(..3) {
        Some("(a)") if case => Some(0),
        Some("(b)") if case => Some(1),
        _ => None,
    }
}

fn text(report: &Report<Parameters, Row>) -> String {
    let Parameters {
        vcpus,
        format,
        machine,
        scale,
    } = &report.parameters;
    let mut text = format!(
        "{} on {machine}, tables of {format}\n\n",
        report::counted((*vcpus).into(), "vCPU", "vCPUs")
    );
    let optional = |time: Option<f64>| time.map_or("-".to_owned(), report::time);
    let error = |row: &Row, metric: usize| match row.error_percent[metric] {
        Some(error) => report::marked(error, row.fitted),
        None => "-  ".to_owned(),
    };
    let times = report.rows.iter().map(|row| {
        [
            row.how.to_owned(),
            human(row.bytes),
            human(row.leaf_bytes),
            report::time(row.start),
            error(row, 0),
            optional(row.write),
            error(row, 1),
            optional(row.read),
        ]
    });
    text += &report::table(
        [
            "", "memory", "leaves", "start", "error  ", "write", "error  ", "read",
        ],
        1,
        times.collect(),
    );
    let optional = |count: Option<u64>| count.map_or("-".to_owned(), report::count);
    let counts = report.rows.iter().map(|row| {
        [
            row.how.to_owned(),
            human(row.bytes),
            report::count(row.entries_written_by_start),
            report::count(row.kicks),
            report::count(row.invalidations),
            optional(row.faults_of_writes),
            optional(row.faults_of_reads),
            report::count(row.retries),
            human(row.bitmap_bytes),
        ]
    });
    text += "\n";
    text += &report::table(
        [
            "",
            "memory",
            "entries\nwritten",
            "kicks",
            "invali-\ndations",
            "faults of\nwrites",
            "faults of\nreads",
            "retries",
            "bitmap",
        ],
        1,
        counts.collect(),
    );
    if *scale > 1 {
        text += &format!(
            "\nwritten and read: 1/{scale} of the memory, and 2/{scale}; each further part takes as long as the second\n"
        );
    }
    if report.rows.iter().any(|row| row.fitted) {
        text += report::FITTED;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_asked_for_fits_the_computer() {
        let usual = |cpus, free: u64| {
            fitting(
                None,
                None,
                Backing::ANONYMOUS,
                &Room {
                    cpus,
                    free: free << 20,
                },
            )
        };
        assert_eq!(usual(64, 1 << 20), (BYTES, VCPUS));
        assert_eq!(usual(2, 1 << 20), (512 << 20, 2));
        assert_eq!(usual(2, 600), (300 << 20, 2));
        assert_eq!(usual(7, 0), (14 << 20, 7));
        let room = Room {
            cpus: 3,
            free: 1 << 40,
        };
        // Each has as many pages.
        assert_eq!(
            fitting(Some(1 << 30), None, Backing::ANONYMOUS, &room),
            (1 << 30, 2)
        );
        assert_eq!(
            fitting(None, Some(5), Backing::HUGETLB_1GB, &room),
            (5 << 30, 5)
        );
        assert_eq!(
            fitting(Some(1), Some(40), Backing::ANONYMOUS, &room),
            (1, 40)
        );
    }
}

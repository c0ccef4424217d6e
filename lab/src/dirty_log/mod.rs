//! `dirty-log`: logging what a guest writes, phase by phase as in the well-known test, and above
//! all how the log is disabled.

mod baseline;
mod engine;
pub mod figures;
pub mod job;
mod kvm;
pub mod measured;
pub mod published;
pub mod run;
mod world;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::file::Target;
use crate::guest::input::{Backing, Guest, Mode, offset};
use crate::kvm::{Asked, On, Options as KvmOptions};
use crate::output::columns::{self, Cell, NOT_PUBLISHED, columns};
use crate::output::plot::{Bar, Group, Picture};
use crate::output::report::{self, Report, error_percent};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::{Size, human};
use figures::Metric;
use job::{By, Case, How, Job, Options, Ran, Run, Split};

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
    /// Backing of the guest's memory, by the test's name for it [default: anonymous;
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
    #[arg(short, long, value_name = "N", default_value = "2",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    iterations: u32,
    /// The vCPUs go on while logging is disabled
    #[arg(short = 'e', long)]
    run_while_disabling: bool,
    /// Reading the log also clears it
    #[arg(short = 'g', long)]
    no_manual_protect: bool,
    /// How many slots the memory is in
    #[arg(short = 'x', long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    slots: u16,
    /// Of so many accesses of a hundred the guest writes; it reads in the others
    #[arg(short, long, value_name = "PERCENT", default_value = "100",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    write_percent: u8,
    /// Access pages in random order
    #[arg(short = 'a', long)]
    random_access: bool,
    /// The seed of what is random
    #[arg(short, long, value_name = "SEED", default_value = "1")]
    random_seed: u64,
    /// Start of the memory in the guest's physical addresses, in bytes [default: as far up as they
    /// go]
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = offset)]
    offset: Option<u64>,
    /// The profile of a machine, by name or as a file [default: x86-416-vcpus]
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// Whose host it is, by how logging is disabled [default: each in turn]
    #[arg(long, value_enum)]
    how: Option<How>,
    /// When large leaves are split
    #[arg(long, value_enum, default_value = "ahead")]
    split: Split,
    /// The way in which written pages are found
    #[arg(long, value_enum, default_value = "faults")]
    log: By,
    /// Run with one Nth of the pages, and multiply what takes as long as there are pages [default:
    /// a quarter of a million pages are run, or a block for each vCPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    scale: Option<u64>,
    /// The machine, or this computer
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
    kvm: KvmOptions,
}

const MACHINE: &str = "x86-416-vcpus";
const TITLE: &str = "Disabling dirty logging time";

struct Row {
    job: Job,
    ran: Ran,
    longest: Time,
    p999: Time,
    stalled_s: f64,
    published: Option<f64>,
    fitted: bool,
}

fn seconds(times: &[Time]) -> Vec<f64> {
    times.iter().map(|time| time.as_secs_f64()).collect()
}

fn micros(time: Time) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Why disabling takes no time.
const NO_LARGE: &str = "no leaf becomes large again: memory is in pages of 4 KiB (-s \
                        anonymous_hugetlb_2mb is not), or it is a kernel of arm64, which leaves \
                        pages";
/// Why nothing is kept waiting.
const NO_STALL: &str =
    "no access waits: none was kept, or the vCPUs stand still (-e has them go on)";

columns! { row: Row;
    ["how"] [1 ""] Cell::text(row.job.how.name());
    ["populate_s"] [] Cell::s(row.ran.populate.as_secs_f64());
    ["enable_s"] [] Cell::s(row.ran.enable.as_secs_f64());
    ["dirty_s"] [] Cell::json(seconds(&row.ran.dirty));
    ["get_s"] [] Cell::json(seconds(&row.ran.get));
    ["clear_s"] [] Cell::json(seconds(&row.ran.clear));
    ["disable_s"] [1 "time" NO_LARGE] Cell::TimeIfAny(row.ran.disable.as_secs_f64(), 1e9);
    ["published_s"] [] Cell::json(row.published);
    ["error_percent"] [1 "error  " NOT_PUBLISHED]
        Cell::or_nothing(row.error(), |it| Cell::Marked(Some(it), row.fitted));
    ["fitted"] [] Cell::json(row.fitted);
    ["zaps"] [] Cell::json(figures::histogram(&row.ran.zaps, row.job.scale.fewer));
    ["stall_longest_us"] [1 "stall\nlongest" NO_STALL] Cell::TimeIfAny(micros(row.longest), 1e3);
    ["stall_p999_us"] [1 "99.9 %" NO_STALL] Cell::TimeIfAny(micros(row.p999), 1e3);
    ["stall_total_s"] [1 "in total" NO_STALL] Cell::TimeIfAny(row.stalled_s, 1e9);
    ["flushes"] [1 "flushes"] Cell::Count(row.ran.flushes);
    ["kicks"] [] Cell::Count(row.ran.kicks);
    ["faults"] [1 "faults"] Cell::Count(row.ran.faults);
    ["retries"] [1 "retries"] Cell::Count(row.ran.retries);
    ["log_full_exits"] [] Cell::Count(row.ran.log_full);
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.on == On::Kvm {
        return kvm::run(&arguments.on_kvm()?, arguments.json);
    }
    // These are of the machine as well.
    let rest = KvmOptions {
        all_set: false,
        overlap: false,
        nested: false,
        cpus: Vec::new(),
        ..arguments.kvm.clone()
    };
    rest.unused()?;
    let name = arguments.machine.as_deref().unwrap_or(MACHINE);
    let (profile, left_out) = Experiment::DirtyLog.load(name)?;
    let plot = Target::of_plot(arguments.plot.as_deref())?;
    let software = runs::software::<Job>(arguments.threads);
    let rows = arguments.rows(&profile, &software)?;
    let scale = rows.first().map_or(1, |row| row.job.scale.all());
    let guest = arguments.guest();
    let head = format!(
        "{}, {} of {} for each of {}",
        profile.name,
        human(guest.bytes),
        guest.source.name,
        report::counted(u64::from(guest.vcpus), "vCPU", "vCPUs"),
    );
    let report = Report {
        experiment: "dirty-log",
        parameters: json!({
            "source": guest.source.name,
            "bytes_per_vcpu": guest.bytes,
            "vcpus": guest.vcpus,
            "iterations": arguments.iterations,
            "slots": arguments.slots,
            "write_percent": arguments.write_percent,
            "random_access": arguments.random_access,
            "manual_protect": !arguments.no_manual_protect,
            "run_while_disabling": arguments.run_while_disabling,
            "log": arguments.log.name(),
            "split": arguments.split.name(),
            "all_set": arguments.kvm.all_set,
            "overlap": arguments.kvm.overlap,
            "nested": arguments.kvm.nested,
            "machine": profile.name,
            "scale": scale,
        }),
        rows,
        warnings: left_out.into_iter().chain(arguments.case().rounded()?).collect(),
    };
    report.print(arguments.json, |report| text(&head, scale, &report.rows))?;
    match plot {
        Some(plot) => plot.fill(&picture(&head, scale, &report.rows).svg()?),
        None => Ok(()),
    }
}

impl Arguments {
    fn guest(&self) -> Guest {
        let shown = Guest { source: Backing::HUGETLB_2MB, bytes: 64 << 20, vcpus: 8 };
        Guest::new(self.source, self.bytes, self.vcpus, shown)
    }

    /// The guest on KVM. Where nothing is said it is small: it takes real time.
    fn on_kvm(&self) -> Result<Asked, Error> {
        Error::refuse(
            &[
                (self.how.is_some(), "--how"),
                (self.scale.is_some(), "--scale"),
                (self.machine.is_some(), "--machine"),
                (self.plot.is_some(), "--plot"),
                (self.threads.threads.is_some(), "--threads"),
                (self.log != By::Faults, "--log"),
                (self.split != Split::Ahead, "--split"),
            ],
            ": not with --on kvm",
        )?;
        if self.no_manual_protect && self.kvm.all_set {
            let why = "--all-set: only with manual protection, which -g does without";
            return Err(Error::Usage(why.to_owned()));
        }
        let vcpus = self.vcpus.unwrap_or(1);
        let bytes = job::all_bytes(self.bytes.map_or(self.kvm.usual_bytes(), Size::bytes), vcpus)?;
        let backing = self.source.unwrap_or(Backing::ANONYMOUS);
        let mut options = self.kvm.clone();
        options.all_set |=
            options.as_selftests && options.ring.is_none() && !self.no_manual_protect;
        Ok(Asked {
            bits: self.mode.fixed_bits(),
            first: self.offset,
            slots: self.slots.into(),
            manual: !self.no_manual_protect,
            iterations: self.iterations,
            write_percent: self.write_percent,
            random: self.random_access,
            seed: self.random_seed,
            running: self.run_while_disabling,
            ..Asked::new(backing, bytes, vcpus.into(), options)
        })
    }

    fn case(&self) -> Case {
        let guest = self.guest();
        Case {
            backing: guest.source,
            bytes: guest.bytes,
            vcpus: guest.vcpus,
            mode: self.mode,
            offset: self.offset,
            scale: self.scale,
        }
    }

    /// The ways to disable that a machine has.
    fn ways(&self, profile: &Profile) -> Result<Vec<How>, Error> {
        let all = match profile.architecture.is_x86() {
            true => &How::ALL[..],
            false => &How::ARM64,
        };
        match self.how {
            Some(how) if !all.contains(&how) => {
                let names: Vec<_> = all.iter().map(|how| how.name()).collect();
                Err(Error::Usage(format!(
                    "--how {}: tables are taken apart so on x86; {} is arm64: use one of {}",
                    how.name(),
                    profile.name,
                    names.join(", ")
                )))
            }
            Some(how) => Ok(vec![how]),
            None => Ok(all.to_vec()),
        }
    }

    /// Returns the test's other options, if such a machine has them.
    fn options(&self, profile: &Profile, vcpus: u16) -> Result<Options, Error> {
        let asked = &self.kvm;
        let usage = |why: &str| Err(Error::Usage(why.to_owned()));
        let by_hardware = self.log == By::Modification;
        if !profile.architecture.is_x86() && (by_hardware || asked.nested) {
            let option = if by_hardware { "--log modification" } else { "-n" };
            let name = &profile.name;
            return usage(&format!("{option}: {name} is arm64, and that is x86's"));
        }
        if asked.all_set && self.no_manual_protect {
            return usage("--all-set: not with -g: it is clearing the log that protects");
        }
        check_pins(&asked.cpus, profile, vcpus)?;
        Ok(Options {
            by: self.log,
            split: self.split,
            all_set: asked.all_set,
            overlap: asked.overlap,
            nested: asked.nested,
        })
    }

    fn rows(&self, profile: &Profile, run: Run<'_>) -> Result<Vec<Row>, Error> {
        let case = self.case();
        Experiment::DirtyLog.fits(profile, "-v", case.vcpus)?;
        let hows = self.ways(profile)?;
        let options = self.options(profile, case.vcpus)?;
        let mut jobs = Vec::new();
        for how in hows {
            let job = case.job(profile, how)?;
            let page = job.source.bytes();
            if !(job.region.bytes / page).is_multiple_of(u64::from(self.slots)) {
                return Err(Error::Usage(format!(
                    "-x {}: {} of pages of {} cannot be divided so",
                    self.slots,
                    human(job.region.bytes),
                    human(page)
                )));
            }
            jobs.push(Job {
                iterations: self.iterations,
                slots: self.slots,
                write_percent: self.write_percent,
                random: self.random_access,
                seed: self.random_seed,
                manual: !self.no_manual_protect,
                running: self.run_while_disabling,
                options,
                ..job
            });
        }
        let is_usual = options == Options::default();
        let is_published = case.is_published() && self.run_while_disabling && is_usual;
        let ran = run(&jobs)?;
        jobs.into_iter().zip(ran).map(|(job, ran)| Row::new(job, ran, is_published)).collect()
    }
}

/// A vCPU of the machine has a CPU of its own, and all are alike: it does not matter which.
fn check_pins(cpus: &[usize], profile: &Profile, vcpus: u16) -> Result<(), Error> {
    let usage = |why: String| Err(Error::Usage(why));
    let (given, vcpus) = (cpus.len(), usize::from(vcpus));
    if ![0, vcpus, vcpus + 1].contains(&given) {
        return usage(format!(
            "-c: {} for {}: one for each, and one more for the thread of the host",
            report::counted(given as u64, "CPU", "CPUs"),
            report::counted(vcpus as u64, "vCPU", "vCPUs")
        ));
    }
    let most = profile.system.cpus.map_or(usize::MAX, |cpus| cpus as usize);
    if let Some(cpu) = cpus.iter().find(|cpu| **cpu >= most) {
        let (name, last) = (&profile.name, most - 1);
        return usage(format!("-c {cpu}: {name} has CPUs 0 to {last}"));
    }
    match (1..given).find(|at| cpus[..*at].contains(&cpus[*at])) {
        Some(at) => usage(format!("-c {}: twice, and each CPU of the machine runs one", cpus[at])),
        None => Ok(()),
    }
}

impl Row {
    fn new(job: Job, ran: Ran, is_published: bool) -> Result<Self, Error> {
        job.sound(&ran)?;
        let mut figures = crate::published::of("dirty-log", &job.profile).into_iter();
        let figure =
            figures.find(|row| is_published && figures::metric(row) == Some(Metric::Disabling));
        let published = figure.as_ref().and_then(|row| match job.how {
            How::Before => row.before,
            How::After => row.after,
            _ => None,
        });
        let fitted = figure.is_some_and(|row| row.is_fitted(&job.profile));
        let (longest, p999, stalled_s) = figures::stalls(&ran.stalls);
        let fitted = fitted && job.how == How::Before;
        Ok(Self { job, ran, longest, p999, stalled_s, published, fitted })
    }

    fn error(&self) -> Option<f64> {
        let disable = self.ran.disable.as_secs_f64();
        self.published.map(|published| error_percent(disable, published))
    }

    /// The phases before the last, in the words of the well-known test, and how long each took.
    fn phases(&self) -> Vec<(String, Time)> {
        let Ran { populate, enable, dirty, get, clear, .. } = &self.ran;
        let mut phases = vec![("populate memory".to_owned(), *populate)];
        phases.push(("enable dirty logging".to_owned(), *enable));
        for (number, dirty) in dirty.iter().enumerate() {
            let of = |what: &str| format!("{what} {}", number + 1);
            phases.push((of("dirty memory"), *dirty));
            phases.push((of("get dirty log"), get[number]));
            phases.extend(clear.get(number).map(|clear| (of("clear dirty log"), *clear)));
        }
        phases
    }
}

/// The phases before the last, with a column for each host.
fn phases(rows: &[Row]) -> String {
    // On x86 all kernels here have the same faults.
    let is_x86 = rows.first().is_some_and(|row| row.job.profile.architecture.is_x86());
    let is_ours = |row: &&Row| row.job.how == How::Tablewright;
    let kernels = rows.iter().filter(|row| !is_ours(row));
    let kernels = kernels.take(if is_x86 { 1 } else { usize::MAX });
    let hosts: Vec<&Row> = kernels.chain(rows.iter().filter(is_ours)).collect();
    let name = |row: &Row| match row.job.how {
        How::Tablewright => row.job.how.name(),
        _ if is_x86 => "kernel",
        how => how.name(),
    };
    let all: Vec<_> = hosts.iter().map(|row| row.phases()).collect();
    let names = all.first().into_iter().flatten().map(|(name, _)| name.clone());
    let line = |(at, name): (usize, String)| {
        let times = all.iter().map(|phases| report::time(phases[at].1.as_secs_f64() * 1e9));
        std::iter::once(name).chain(times).collect::<Vec<_>>()
    };
    let hosts_named = hosts.iter().map(|row| name(row).to_owned());
    let head = std::iter::once(String::new()).chain(hosts_named);
    let full = hosts.iter().map(|row| row.ran.log_full).max().unwrap_or(0);
    let mut text = report::table_of(head.collect(), 1, names.enumerate().map(line).collect());
    if full > 0 {
        text += &format!("\nHardware's log was full {}\n", report::counted(full, "time", "times"));
    }
    text
}

fn text(head: &str, scale: u64, rows: &[Row]) -> String {
    let mut text = report::title(head) + "\n";
    if scale > 1 {
        text += &report::title(&format!(
            "with 1/{scale} of the pages; what takes as long as there are pages is multiplied\n"
        ));
    }
    text += &format!("\n{}", phases(rows));
    text += &format!("\n{TITLE}:\n\n{}{}", columns::table(1, 1, rows), zaps(rows));
    text + report::fitted(rows.iter().any(|row| row.fitted))
}

/// How long the tables took that were taken apart, with a column for each way that does so.
fn zaps(rows: &[Row]) -> String {
    let of = |row: &Row| figures::histogram(&row.ran.zaps, row.job.scale.fewer);
    let taken_apart = |row: &&Row| !matches!(row.job.how, How::LeafByLeaf | How::InPlace);
    let ways = rows.iter().filter(taken_apart).map(|row| (row.job.how.name(), of(row)));
    let ways: Vec<_> = ways.filter(|(_, buckets)| !buckets.is_empty()).collect();
    let longest = ways.iter().map(|(_, buckets)| buckets.len()).max().unwrap_or(0);
    let row = |at: usize| {
        let bucket = ways.iter().find_map(|(_, buckets)| buckets.get(at))?;
        let count = |buckets: &[figures::Bucket]| buckets.get(at).map_or(0, |it| it.count);
        let counts: Vec<u64> = ways.iter().map(|(_, buckets)| count(buckets)).collect();
        let name = format!("{} to {} ms", bucket.from_ms, bucket.to_ms);
        let cells = std::iter::once(name).chain(counts.iter().map(|&it| report::count(it)));
        counts.iter().any(|&count| count > 0).then(|| cells.collect())
    };
    let rows: Vec<Vec<String>> = (0..longest).filter_map(row).collect();
    let names = ways.iter().map(|(name, _)| (*name).to_owned());
    let head = std::iter::once("tables".to_owned()).chain(names).collect();
    match rows.is_empty() {
        true => String::new(),
        false => format!("\n{}", report::table_of(head, 1, rows)),
    }
}

/// How long disabling takes, and the longest stall, as bars: a group for each way.
fn picture(head: &str, scale: u64, rows: &[Row]) -> Picture {
    let group = |row: &Row| {
        let fitted = if row.fitted { " (fitted)" } else { "" };
        let stall = micros(row.longest) / 1e6;
        let published = row.published.map(|it| Bar::new("published", it, false));
        let is_ours = row.job.how == How::Tablewright;
        let ours = [
            Bar::new(&format!("disabling{fitted}"), row.ran.disable.as_secs_f64(), is_ours),
            Bar::new("longest stall", stall, is_ours),
        ];
        Group {
            name: row.job.how.name().to_owned(),
            bare: None,
            bars: published.into_iter().chain(ours).collect(),
        }
    };
    Picture {
        title: "Disabling a dirty log".to_owned(),
        subtitle: format!("simulated on {head}"),
        unit: "s".to_owned(),
        groups: rows.iter().map(group).collect(),
        notes: (scale > 1)
            .then(|| format!("with 1/{scale} of the pages, and figures multiplied"))
            .into_iter()
            .collect(),
    }
}

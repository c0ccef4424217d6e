//! A profile of the computer at hand, from what was measured on its KVM.
//!
//! What the machine does in the same phases is a linear function of its costs, as in [`fit`](super): each cost is made a little
//! higher, and it is seen in which phases that shows. So it is said of each cost what determines it, and a cost that no phase
//! determines, or only together with another, stays as it was in the profile that was begun with.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tablewright_experiments::dirty_log::{self, How, Job, Ran};
use tablewright_experiments::input::{Backing, Mode, PAGE};
use tablewright_machine::{Cost, Profile, Provenance, RowSelector, Source, Time};

use super::solve::{self, Undetermined};
use crate::dirty_log::Case;
use crate::error::Error;
use crate::file::{self, Target};
use crate::report;
use crate::report::{error_percent, percent};
use crate::size::human;

/// What is asked for.
pub struct Asked<'a> {
    pub files: &'a [PathBuf],
    /// The profile that is begun with.
    pub machine: Option<&'a str>,
    pub free: &'a [Cost],
    pub output: Option<&'a Path>,
    pub json: bool,
}

/// A run on KVM, as its JSON has it; what is not needed here is not read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub parameters: Parameters,
    pub rows: Vec<MeasuredRow>,
}

/// Its parameters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Parameters {
    pub host: HostLine,
    pub source: String,
    pub bytes: u64,
    pub vcpus: u32,
    pub iterations: u32,
    pub slots: u32,
    pub write_percent: u8,
    pub random_access: bool,
    pub manual_protect: bool,
    pub all_set: bool,
    pub overlap: bool,
    /// Older runs were none.
    #[serde(default)]
    pub nested: bool,
    pub run_in_all_calls: bool,
    pub ring: Option<u32>,
}

/// The host, in a line and by its paging.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostLine {
    pub line: String,
    pub paging: String,
}

/// What was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredRow {
    pub phases: Vec<MeasuredPhase>,
}

/// One phase; nanoseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredPhase {
    pub phase: String,
    #[serde(rename = "cpu_ns")]
    pub cpu: f64,
    pub threads: u32,
    /// Zero where it was not written down.
    #[serde(default)]
    pub pages: u64,
}

impl Measured {
    /// CPU time for a page of the phases of such names, nanoseconds.
    pub fn ns_a_page(&self, is_meant: impl Fn(&str) -> bool) -> impl Iterator<Item = f64> {
        let phases = self.rows.iter().flat_map(|row| &row.phases);
        phases
            .filter(move |phase| phase.pages > 0 && is_meant(&phase.phase))
            .map(|phase| phase.cpu / phase.pages as f64)
    }
}

/// A document that has several.
#[derive(Deserialize)]
struct Several {
    runs: Vec<Measured>,
}

/// So many pages are simulated of a run; what they take is multiplied.
const PAGES: u64 = 1 << 14;

impl Parameters {
    /// In a few words.
    pub fn name(&self) -> String {
        let mut name = format!("{} {}, {} vCPU", human(self.bytes), self.source, self.vcpus);
        if !self.manual_protect {
            name += ", -g";
        }
        if self.write_percent < 100 {
            name += &format!(", -w {}", self.write_percent);
        }
        if self.random_access {
            name += ", -a";
        }
        name
    }

    /// The run of it on a machine.
    ///
    /// # Errors
    /// The machine has no such run.
    pub fn job(&self, profile: &Profile) -> Result<Job, Error> {
        let usage = |text: &str| Error::Usage(format!("{}: {text}", self.name()));
        let others = [
            self.all_set,
            self.overlap,
            self.nested,
            self.run_in_all_calls,
        ];
        if self.ring.is_some() || others.contains(&true) {
            return Err(usage(
                "the machine's dirty-log has no --ring, --all-set, -o, -n and --stalls",
            ));
        }
        let backing: Backing = self.source.parse().map_err(|why: String| usage(&why))?;
        let mode: Mode = "P48V48_4K".parse().map_err(|why: String| usage(&why))?;
        let vcpus = u16::try_from(self.vcpus).map_err(|_| usage("too many vCPUs"))?;
        if vcpus == 0 || !(1..=1000).contains(&self.iterations) {
            return Err(usage("no vCPUs, or no iterations"));
        }
        let each = self.bytes / u64::from(vcpus);
        // As many as can be divided so.
        let mut scale = 1;
        let block = backing.source.bytes();
        while self.bytes / PAGE / scale > PAGES && (each / (scale * 2)).is_multiple_of(block) {
            scale *= 2;
        }
        let case = Case {
            backing,
            bytes: each,
            vcpus,
            mode,
            offset: None,
            scale: Some(scale),
        };
        let job = case.job(profile, How::Before)?;
        Ok(Job {
            iterations: self.iterations,
            slots: 1,
            write_percent: self.write_percent,
            random: self.random_access,
            manual: self.manual_protect,
            running: false,
            ..job
        })
    }
}

/// The phases of a run on the machine, by the names that they have on KVM; nanoseconds.
pub fn phases(ran: &Ran) -> Vec<(String, f64)> {
    let ns = |time: Time| time.as_ps() as f64 / 1e3;
    let mut phases = vec![
        ("populate".to_owned(), ns(ran.populate)),
        ("enable".to_owned(), ns(ran.enable)),
    ];
    for (number, dirty) in ran.dirty.iter().enumerate() {
        phases.push((format!("dirty {}", number + 1), ns(*dirty)));
        for (name, times) in [("get", &ran.get), ("clear", &ran.clear)] {
            if let Some(time) = times.get(number) {
                phases.push((format!("{name} {}", number + 1), ns(*time)));
            }
        }
    }
    phases.push(("disable".to_owned(), ns(ran.disable)));
    phases
}

/// Why a phase is another on this host than on the machine.
pub fn differs(parameters: &Parameters, phase: &str) -> Option<&'static str> {
    let software = parameters.host.paging != "software";
    let large = parameters.source != "anonymous" && parameters.source != "shmem";
    match phase {
        _ if software => None,
        "enable" if large => Some("software paging splits at the first write, the machine here"),
        "disable" if !large => Some("software paging takes all tables away, the machine none"),
        _ => None,
    }
}

/// What was predicted, and what came.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    pub run: String,
    pub phase: String,
    /// Nanoseconds of CPU time of one thread.
    #[serde(rename = "predicted_ns")]
    pub predicted: f64,
    #[serde(rename = "measured_ns")]
    pub measured: f64,
    pub error_percent: f64,
    pub fitted: bool,
    /// Why the two are not to be compared.
    pub differs: Option<&'static str>,
}

/// A measured run beside a prediction of it.
pub fn compare(run: &Measured, predicted: &[(String, f64)], fitted: bool) -> Vec<Compared> {
    let all = run.rows.iter().flat_map(|row| &row.phases);
    let pair = |measured: &MeasuredPhase| {
        let (_, predicted) = predicted.iter().find(|(name, _)| *name == measured.phase)?;
        let one = measured.cpu / f64::from(measured.threads.max(1));
        Some(Compared {
            run: run.parameters.name(),
            phase: measured.phase.clone(),
            predicted: *predicted,
            measured: one,
            error_percent: error_percent(*predicted, one.max(1.0)),
            fitted,
            differs: differs(&run.parameters, &measured.phase),
        })
    };
    all.filter_map(pair).collect()
}

/// Runs of `dirty-log --on kvm`, or those that `doctor` made, in a file.
///
/// # Errors
/// It cannot be read, or has none.
pub fn read(path: &Path) -> Result<Vec<Measured>, Error> {
    let bytes = file::read(path, "run on KVM")?;
    let usage = |why: String| {
        Error::Usage(format!(
            "{}: no run of dirty-log --on kvm or doctor: {why}",
            path.display()
        ))
    };
    let runs = match serde_json::from_slice::<Several>(&bytes) {
        Ok(several) => several.runs,
        Err(_) => {
            vec![serde_json::from_slice::<Measured>(&bytes).map_err(|why| usage(why.to_string()))?]
        }
    };
    match runs
        .iter()
        .all(|run| run.rows.iter().any(|row| !row.phases.is_empty()))
        && !runs.is_empty()
    {
        true => Ok(runs),
        false => Err(usage("it has no phases".to_owned())),
    }
}

/// A cost, and what determines it.
#[derive(Clone, Debug, Serialize)]
pub struct Determined {
    pub cost: &'static str,
    pub before_ns: f64,
    /// None: it stays as it was.
    pub fitted_ns: Option<f64>,
    /// Run and phase, and how often the cost counts in it.
    pub by: Vec<(String, f64)>,
    /// Why it stays.
    pub why: Option<String>,
}

/// A profile that was fitted, and how.
pub struct Found {
    pub profile: Profile,
    pub costs: Vec<Determined>,
    pub rows: Vec<Compared>,
}

/// Where nothing is said.
const BASE: &str = "x86-12-vcpus";
const FREE: [&str; 6] = [
    "find_page",
    "zero",
    "exception",
    "exchange",
    "entry",
    "load",
];
/// How much higher a cost is made: more than the machine rounds.
const MORE: Time = Time::ns(100);

/// The profile for which the relative errors of these runs are smallest.
///
/// # Errors
/// The machine cannot make one of the runs.
pub fn fit(runs: &[Measured], base: Option<&str>, free: &[Cost]) -> Result<Found, Error> {
    let mut profile = Profile::load(base.unwrap_or(BASE))?;
    profile.name = "here".to_owned();
    profile.system.cpus = None;
    profile.system.published_as.clear();
    if let Some(run) = runs.first() {
        profile.description = format!("The computer at hand: {}", run.parameters.host.line);
    }
    let mut free: Vec<Cost> = match free.is_empty() {
        true => FREE.iter().filter_map(|name| name.parse().ok()).collect(),
        false => free.to_vec(),
    };
    free.truncate(solve::MOST);
    let (rows, right, names) = counted(&profile, runs, &free)?;
    let column = |at: usize| {
        let by = names.iter().zip(&rows).filter(|(_, row)| row.0[at] > 1e-9);
        by.map(|(name, row)| (name.clone(), row.0[at] * row.1))
            .collect::<Vec<_>>()
    };
    let mut costs: Vec<Determined> = free
        .iter()
        .enumerate()
        .map(|(at, cost)| Determined {
            cost: cost.name(),
            before_ns: cost.get(&profile.costs).as_ps() as f64 / 1e3,
            fitted_ns: None,
            by: column(at),
            why: None,
        })
        .collect();
    // What is left of the right side if a cost stays as it is.
    let mut rest = right;
    let mut some: Vec<usize> = (0..free.len()).collect();
    let found = loop {
        let chosen: Vec<Vec<f64>> = rows
            .iter()
            .map(|(row, _)| some.iter().map(|&at| row[at]).collect())
            .collect();
        match solve::non_negative(&chosen, &rest) {
            Ok(found) => break found,
            Err(Undetermined(which)) => {
                let at = some.remove(which);
                let cost = &mut costs[at];
                let others: Vec<&str> = some[..which].iter().map(|&at| free[at].name()).collect();
                cost.why = Some(match cost.by.is_empty() {
                    true => "no phase depends on it".to_owned(),
                    false => format!("not told from {}", others.join(", ")),
                });
                let stays = free[at].get(&profile.costs).as_ps() as f64 / 1e3;
                for (right, (row, _)) in rest.iter_mut().zip(&rows) {
                    *right -= row[at] * stays;
                }
            }
        }
    };
    for (&at, found) in some.iter().zip(found) {
        free[at].set(&mut profile.costs, Time::ps((found * 1e3).round() as u64));
        costs[at].fitted_ns = Some(found);
    }
    say_where_from(
        &mut profile,
        &some.iter().map(|&at| free[at]).collect::<Vec<_>>(),
    );
    let mut compared = Vec::new();
    for run in runs {
        let ran = dirty_log::run(&run.parameters.job(&profile)?)?;
        compared.extend(compare(run, &phases(&ran), true));
    }
    Ok(Found {
        profile,
        costs,
        rows: compared,
    })
}

/// A row of coefficients, each by what was measured, and what was measured.
type Coefficients = (Vec<f64>, f64);

/// Rows, what the phases take besides, and their names.
type Counted = (Vec<Coefficients>, Vec<f64>, Vec<String>);

/// How often each cost counts in each phase, what the phases take besides, and what they are called.
fn counted(profile: &Profile, runs: &[Measured], free: &[Cost]) -> Result<Counted, Error> {
    let (mut rows, mut right, mut names) = (Vec::new(), Vec::new(), Vec::new());
    for run in runs {
        let of = |profile: &Profile| -> Result<Vec<(String, f64)>, Error> {
            Ok(phases(&dirty_log::run(&run.parameters.job(profile)?)?))
        };
        let now = of(profile)?;
        let mut more = Vec::new();
        for cost in free {
            let mut higher = profile.clone();
            cost.set(&mut higher.costs, cost.get(&profile.costs) + MORE);
            more.push(of(&higher)?);
        }
        for measured in compare(run, &now, true) {
            // Reading a log takes less than the machine's words make it: it is in no unit with the rest.
            if measured.differs.is_some() || measured.measured < 1.0 {
                continue;
            }
            let mut rest = measured.predicted;
            let mut row = Vec::new();
            for (cost, more) in free.iter().zip(&more) {
                let higher = more.iter().find(|(name, _)| *name == measured.phase);
                let higher = higher.map_or(measured.predicted, |(_, time)| *time);
                let times = (higher - measured.predicted) / (MORE.as_ps() as f64 / 1e3);
                rest -= times * cost.get(&profile.costs).as_ps() as f64 / 1e3;
                row.push(times / measured.measured);
            }
            rows.push((row, measured.measured));
            right.push(1.0 - rest / measured.measured);
            names.push(format!("{}: {}", measured.run, measured.phase));
        }
    }
    Ok((rows, right, names))
}

fn say_where_from(profile: &mut Profile, free: &[Cost]) {
    let keys: Vec<String> = free.iter().map(|cost| cost.key().to_owned()).collect();
    for entry in &mut profile.provenance {
        entry.of.retain(|key| !keys.contains(key));
    }
    profile.provenance.retain(|entry| !entry.of.is_empty());
    for entry in &mut profile.provenance {
        entry.source = Source::Assumed;
        entry.note = format!("Of another system. {}", entry.note);
    }
    profile.provenance.insert(
        0,
        Provenance {
            of: keys,
            source: Source::Fitted,
            note:
                "By `tablewright fit --from` to CPU times of dirty-log on the KVM of this computer."
                    .to_owned(),
        },
    );
    profile.fitted_on = vec![RowSelector {
        system: "this computer".to_owned(),
        ..RowSelector::default()
    }];
    profile.unexplained.clear();
}

#[derive(Serialize)]
struct Answer<'a> {
    experiment: &'static str,
    costs: &'a [Determined],
    rows: &'a [Compared],
}

/// Fits, and prints what determines what.
pub fn run(asked: &Asked<'_>) -> Result<(), Error> {
    let target = asked
        .output
        .map(|path| Target::new("--output", path))
        .transpose()?;
    let mut runs = Vec::new();
    for path in asked.files {
        runs.extend(read(path)?);
    }
    let found = fit(&runs, asked.machine, asked.free)?;
    if asked.json {
        report::print_json(&Answer {
            experiment: "fit",
            costs: &found.costs,
            rows: &found.rows,
        })?;
    } else {
        report::print(&text(&found))?;
    }
    match target {
        Some(target) => target.fill(&found.profile.to_toml()),
        None => Ok(()),
    }
}

/// Which phases a cost counts in most, in a few words.
fn by(cost: &Determined) -> String {
    if let Some(why) = &cost.why {
        return why.clone();
    }
    let mut by: Vec<_> = cost.by.iter().collect();
    by.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in by {
        let phase = name.rsplit(": ").next().unwrap_or(name);
        let phase = phase.split(' ').next().unwrap_or(phase);
        if !names.contains(&phase) && names.len() < 4 {
            names.push(phase);
        }
    }
    names.join(", ")
}

fn text(found: &Found) -> String {
    let mut text = format!(
        "{}\n\n",
        report::wrapped(&found.profile.description, 78, "  ")
    );
    let costs = found.costs.iter().map(|cost| {
        let ns = |ns: f64| format!("{ns:.2} ns");
        [
            cost.cost.to_owned(),
            by(cost),
            ns(cost.before_ns),
            cost.fitted_ns.map_or("-".to_owned(), ns),
        ]
    });
    text += &report::table(
        ["cost", "determined by", "before", "fitted"],
        2,
        costs.collect(),
    );
    text += "\n";
    text += &compared(&found.rows);
    text
}

/// Predictions beside what came.
pub fn compared(rows: &[Compared]) -> String {
    let cells = |row: &Compared| {
        [
            row.phase.clone(),
            report::time(row.predicted),
            report::time(row.measured),
            match (row.differs, row.fitted) {
                (Some(_), _) => "(other)".to_owned(),
                (None, true) => percent(row.error_percent) + " *",
                (None, false) => percent(row.error_percent) + "  ",
            },
        ]
    };
    let mut text = String::new();
    for run in rows.chunk_by(|a, b| a.run == b.run) {
        let header = [run[0].run.as_str(), "machine", "measured", "error  "];
        text += &report::table(header, 1, run.iter().map(cells).collect());
        text.push('\n');
    }
    if rows.iter().any(|row| row.fitted) {
        text += "* the machine was fitted on this figure\n";
    }
    let mut reasons: Vec<&str> = rows.iter().filter_map(|row| row.differs).collect();
    reasons.dedup();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        text += &format!("(other): {reason}\n");
    }
    text
}

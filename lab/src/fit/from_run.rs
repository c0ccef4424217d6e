//! A profile of the computer at hand, from what was measured on its KVM.
//!
//! What the machine does in the same phases is a linear function of its costs, as in
//! [`fit`](super): each cost is made a little higher, and it is seen in which phases that shows. So
//! it is said of each cost what determines it, and a cost that no phase determines, or only
//! together with another, stays as it was in the profile that was begun with.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tablewright_machine::{Cost, Profile, Provenance, RowSelector, Source, Time};

use super::solve::{self, Undetermined};
use crate::dirty_log::measured::{Compared, Measured, compare, compared, phases, read};
use crate::dirty_log::run as dirty_log;
use crate::error::Error;
use crate::file::Target;
use crate::output::report::{self, Report};

pub struct Asked<'a> {
    pub files: &'a [PathBuf],
    /// The profile that is begun with.
    pub machine: Option<&'a str>,
    pub free: &'a [Cost],
    pub output: Option<&'a Path>,
    pub json: bool,
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

/// Profile that is begun with, if none is named.
const BASE: &str = "x86-12-vcpus";
const FREE: [&str; 9] = [
    "find_page",
    "zero",
    "exception",
    "exchange",
    "entry",
    "call",
    "copy",
    "visit",
    // The last, since calls that protect exchange as often as they load.
    "load",
];
/// In 64 bytes.
const WORDS_OF_A_LINE: u64 = 8;
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
    // As it is without: zero has another meaning than very little.
    if profile.costs.copy == Time::ZERO {
        profile.costs.copy = profile.costs.load * WORDS_OF_A_LINE;
    }
    let (rows, right, names) = counted(&profile, runs, &free)?;
    let column = |at: usize| {
        let by = names.iter().zip(&rows).filter(|(_, row)| row.0[at] > 1e-9);
        by.map(|(name, row)| (name.clone(), row.0[at] * row.1)).collect::<Vec<_>>()
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
    if !tells_copies(runs) {
        some.retain(|&at| {
            let stays = free[at].name() == "copy";
            if stays {
                costs[at].why = Some("not told from call: all runs are of one size".to_owned());
            }
            !stays
        });
    }
    for (at, cost) in free.iter().enumerate().filter(|(at, _)| !some.contains(at)) {
        stay(&mut rest, &rows, at, cost.get(&profile.costs));
    }
    let found = loop {
        let chosen: Vec<Vec<f64>> =
            rows.iter().map(|(row, _)| some.iter().map(|&at| row[at]).collect()).collect();
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
                stay(&mut rest, &rows, at, free[at].get(&profile.costs));
            }
        }
    };
    for (&at, found) in some.iter().zip(found) {
        let least = u64::from(free[at].name() == "copy");
        let time = Time::ps(((found * 1e3).round() as u64).max(least));
        free[at].set(&mut profile.costs, time);
        costs[at].fitted_ns = Some(found);
    }
    say_where_from(&mut profile, &some.iter().map(|&at| free[at]).collect::<Vec<_>>());
    let mut compared = Vec::new();
    for run in runs {
        let ran = dirty_log::run(&run.parameters.job(&profile)?)?;
        compared.extend(compare(run, &phases(&ran), true));
    }
    Ok(Found { profile, costs, rows: compared })
}

/// Takes a cost that stays off the right side.
fn stay(right: &mut [f64], rows: &[Coefficients], at: usize, cost: Time) {
    let stays = cost.as_ps() as f64 / 1e3;
    for (right, (row, _)) in right.iter_mut().zip(rows) {
        *right -= row[at] * stays;
    }
}

/// Whether runs tell what grows with the marks that are copied from what a call takes in any case:
/// the one has to be several times the other.
fn tells_copies(runs: &[Measured]) -> bool {
    let sizes = || runs.iter().map(|run| run.parameters.bytes);
    match (sizes().min(), sizes().max()) {
        (Some(least), Some(most)) => most / 4 >= least,
        _ => false,
    }
}

/// A row of coefficients, each by what was measured, and what was measured.
type Coefficients = (Vec<f64>, f64);

/// Rows, what the phases take besides, and their names.
type Counted = (Vec<Coefficients>, Vec<f64>, Vec<String>);

/// How often each cost counts in each phase, what the phases take besides, and what they are
/// called.
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
            // Reading a log takes less than the machine's words make it: it is in no unit with the
            // rest.
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
    profile.fitted_on =
        vec![RowSelector { system: "this computer".to_owned(), ..RowSelector::default() }];
    profile.unexplained.clear();
}

#[derive(Serialize)]
struct Parameters<'a> {
    from: Vec<String>,
    /// The profile that was begun with.
    machine: &'a str,
    free: Vec<&'static str>,
}

#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    report: Report<Parameters<'a>, &'a Compared>,
    costs: &'a [Determined],
}

/// All runs of these files.
///
/// # Errors
/// One cannot be read, or has a run that the machine cannot make.
pub fn read_all(files: &[PathBuf]) -> Result<Vec<Measured>, Error> {
    let profile = Profile::load(BASE)?;
    let mut all = Vec::new();
    for path in files {
        let runs = read(path)?;
        for run in &runs {
            let job = run.parameters.job(&profile);
            job.map_err(|why| Error::input(path.display(), why))?;
        }
        all.extend(runs);
    }
    Ok(all)
}

/// Fits, and prints what determines what.
pub fn run(asked: &Asked<'_>) -> Result<(), Error> {
    let target = asked.output.map(|path| Target::new("--output", path)).transpose()?;
    let runs = read_all(asked.files)?;
    let found = fit(&runs, asked.machine, asked.free)?;
    if asked.json {
        let files = asked.files.iter();
        report::print_json(&Answer {
            report: Report {
                experiment: "fit",
                parameters: Parameters {
                    from: files.map(|path| path.display().to_string()).collect(),
                    machine: asked.machine.unwrap_or(BASE),
                    free: found.costs.iter().map(|cost| cost.cost).collect(),
                },
                rows: found.rows.iter().collect(),
                warnings: Vec::new(),
            },
            costs: &found.costs,
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
    let mut text = format!("{}\n\n", report::wrapped(&found.profile.description, 78, "  "));
    let costs = found.costs.iter().map(|cost| {
        let ns = |ns: f64| format!("{ns:.2} ns");
        [
            cost.cost.to_owned(),
            report::wrapped(&by(cost), report::at_most(100) / 2, "  "),
            ns(cost.before_ns),
            cost.fitted_ns.map_or("-".to_owned(), ns),
        ]
    });
    text += &report::table(["cost", "determined by", "before", "fitted"], 2, costs.collect());
    text += "\n";
    text += &compared(&found.rows);
    text
}

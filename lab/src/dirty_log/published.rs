//! The published cases on the machines of their systems' profiles: disabling a log with 416 vCPUs,
//! and the phases of the test on four other systems.

use tablewright_machine::{Profile, Time};

use super::figures::{self, Metric};
use super::job::{By, Case, How, Job, Options, Ran, Run, Split};
use crate::error::Error;
use crate::profile;
use crate::published::{FITTED_BEFORE, NO_PROFILE, Reproduced, Row};

const HOWS: [How; 3] = [How::Before, How::After, How::Tablewright];
const NAME: &str = "dirty-log";

/// The rows of the published table.
pub fn rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
    let (disabling, phases): (Vec<_>, Vec<_>) =
        published.into_iter().partition(|row| figures::metric(row).is_some());
    let mut rows = disabling_rows(disabling, run)?;
    rows.extend(phase_rows(phases, run)?);
    Ok(rows)
}

/// A phase of the test, and its iteration from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Populate,
    Enable,
    Dirty(usize),
    Get(usize),
    Clear(usize),
    Disable,
}

impl Phase {
    /// The phase that a metric names, by whichever version of the test.
    pub fn of(metric: &str) -> Option<Self> {
        let metric = metric.to_lowercase();
        let number = metric.find(|it: char| it.is_ascii_digit());
        let number = number.and_then(|at| metric[at..=at].parse::<usize>().ok());
        let iteration = number.map_or(0, |number| number.saturating_sub(1));
        let has = |word: &str| metric.contains(word);
        Some(match () {
            () if has("populate") => Self::Populate,
            () if has("disabling") => Self::Disable,
            () if has("enabl") || has("start of the log") => Self::Enable,
            () if has("dirty memory") => Self::Dirty(iteration),
            () if has("get") => Self::Get(iteration),
            () if has("clear") => Self::Clear(iteration),
            () => return None,
        })
    }

    fn time(self, ran: &Ran) -> Option<Time> {
        match self {
            Self::Populate => Some(ran.populate),
            Self::Enable => Some(ran.enable),
            Self::Dirty(at) => ran.dirty.get(at).copied(),
            Self::Get(at) => ran.get.get(at).copied(),
            Self::Clear(at) => ran.clear.get(at).copied(),
            Self::Disable => Some(ran.disable),
        }
    }
}

/// A published case: the host and the options before the change and after it.
struct Setting {
    backing: &'static str,
    bytes: u64,
    vcpus: u16,
    write_percent: u8,
    before: (How, Options),
    after: (How, Options),
}

/// The number behind `-v`.
fn vcpus(configuration: &str) -> Option<u16> {
    let rest = configuration.split_once("-v ")?.1;
    rest.split_whitespace().next()?.trim_end_matches(';').parse().ok()
}

/// The case of a row whose configuration, or that of the row which it calls the same, is this.
fn setting(system: &str, configuration: &str) -> Option<Setting> {
    const GIB: u64 = 1 << 30;
    let with = |by, split, all_set| Options { by, split, all_set, ..Options::default() };
    let faults = |split, all_set| with(By::Faults, split, all_set);
    let one_gib = Setting {
        backing: "anonymous_hugetlb_1gb",
        bytes: GIB,
        vcpus: 96,
        write_percent: 100,
        before: (How::After, with(By::Modification, Split::Fault, false)),
        after: (How::After, with(By::Modification, Split::Ahead, false)),
    };
    Some(match system {
        "arm64 KVM 6.1-rc3" => Setting {
            backing: "anonymous_thp",
            bytes: 4 * GIB,
            vcpus: vcpus(configuration)?,
            before: (How::Before, faults(Split::Fault, false)),
            after: (How::After, faults(Split::Fault, false)),
            ..one_gib
        },
        "x86 KVM 96 vCPU 1GiB/vCPU hugetlb 1G" => {
            let all_set = !configuration.contains("no INITIALLY_SET");
            let set = |(how, options)| (how, Options { all_set, ..options });
            Setting { before: set(one_gib.before), after: set(one_gib.after), ..one_gib }
        }
        "Intel Skylake, 96 vCPUs, 96 GiB" => {
            let options = with(By::Modification, Split::Fault, true);
            Setting {
                before: (How::LeafByLeaf, options),
                after: (How::InPlace, options),
                ..one_gib
            }
        }
        "Ampere AmpereOne" => Setting {
            backing: "anonymous_hugetlb_2mb",
            vcpus: vcpus(configuration)?,
            write_percent: 10,
            before: (How::After, faults(Split::Fault, false)),
            after: (How::After, faults(Split::Ahead, false)),
            ..one_gib
        },
        "HiSilicon Kunpeng 920 2.6 GHz" => Setting {
            backing: match configuration {
                _ if configuration.contains("pages 4K") => "anonymous",
                _ if configuration.contains("pages 2M") => "anonymous_hugetlb_2mb",
                _ => "anonymous_hugetlb_1gb",
            },
            bytes: 127 * GIB,
            vcpus: 1,
            before: (How::After, faults(Split::Fault, false)),
            after: (How::After, faults(Split::Fault, true)),
            ..one_gib
        },
        _ => return None,
    })
}

impl Setting {
    /// The runs before and after the change, and the engine's.
    fn jobs(&self, profile: &Profile) -> Result<[Job; 3], Error> {
        let mut case = Case {
            backing: self.backing.parse().map_err(Error::Usage)?,
            bytes: self.bytes,
            vcpus: self.vcpus,
            mode: "PXXV48_4K".parse().map_err(Error::Usage)?,
            offset: None,
            scale: None,
        };
        if self.vcpus > 1 {
            case.scale = Some(case.small_scale());
        }
        let ours = (How::Tablewright, Options { split: Split::Ahead, ..self.after.1 });
        let job = |(how, options)| -> Result<Job, Error> {
            let job = case.job(profile, how)?;
            Ok(Job { options, write_percent: self.write_percent, running: false, ..job })
        };
        Ok([job(self.before)?, job(self.after)?, job(ours)?])
    }
}

/// The machine of a row, the places of its three runs, and the phase that it is about.
type Found = (Profile, [usize; 3], Phase);

fn phase_rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
    // A configuration that is the same is that of the row before.
    let mut full = String::new();
    let mut rows = Vec::new();
    for row in published {
        match row.configuration.strip_prefix("same") {
            Some("") => {}
            Some(rest) => full = rest.to_owned(),
            None => full.clone_from(&row.configuration),
        }
        rows.push((row, full.clone()));
    }
    let mut jobs: Vec<Job> = Vec::new();
    let mut found = Vec::new();
    for (row, configuration) in &rows {
        let profile = profile::of_system(&row.system)?;
        let setting = setting(&row.system, configuration);
        let case = profile.zip(setting).zip(Phase::of(&row.metric));
        let Some(((profile, setting), phase)) = case else {
            found.push(None);
            continue;
        };
        let three = setting.jobs(&profile)?;
        // Rows of one case share their runs.
        let places = three.map(|job| match jobs.iter().position(|it| *it == job) {
            Some(at) => at,
            None => {
                jobs.push(job);
                jobs.len() - 1
            }
        });
        found.push(Some((profile, places, phase)));
    }
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        job.sound(ran)?;
    }
    let row = |(figure, found): (Row, Option<Found>)| {
        let Some((profile, places, phase)) = found else {
            return Reproduced::not_run(NAME, figure, NO_PROFILE);
        };
        let unit = if figure.unit == "ms" { 1e3 } else { 1.0 };
        let ours = places.map(|at| {
            let time = ran.get(at).and_then(|ran| phase.time(ran));
            time.map(|time| time.as_secs_f64() * unit)
        });
        // Only populating memory under one lock and in parallel was fitted to both figures.
        let fitted_before = figure.is_fitted(&profile) && figure.system != "arm64 KVM 6.1-rc3";
        let scale = jobs.get(places[1]).map_or(1, |job| job.scale.all());
        let mut note = format!(", with 1/{scale} of the pages");
        if fitted_before {
            note += FITTED_BEFORE;
        }
        Reproduced { fitted_before, ..Reproduced::new(NAME, figure, &profile, ours, &note) }
    };
    Ok(rows.into_iter().map(|(figure, _)| figure).zip(found).map(row).collect())
}

/// Disabling: the time, and how many tables took how long to take apart.
fn disabling_rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
    let not_run = |row| Reproduced::not_run(NAME, row, NO_PROFILE);
    let case = published.iter().find(|row| figures::metric(row).is_some());
    let profile = case.map_or(Ok(None), |row| profile::of_system(&row.system))?;
    let (Some(profile), Some(case)) = (profile, Case::published()) else {
        return Ok(published.into_iter().map(not_run).collect());
    };
    let jobs = HOWS.map(|how| case.job(&profile, how));
    let jobs = jobs.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        job.sound(ran)?;
    }
    let buckets = |number: usize| {
        let (job, ran) = (jobs.get(number)?, ran.get(number)?);
        Some(figures::histogram(&ran.zaps, job.scale.fewer))
    };
    let wrong = |number: usize, of: fn(&Row) -> Option<f64>| {
        let published = published.iter().filter_map(|row| match figures::metric(row)? {
            Metric::Calls { from_ms, .. } => Some((from_ms, of(row)? as u64)),
            Metric::Disabling => None,
        });
        figures::misplaced(&buckets(number)?, &published.collect::<Vec<_>>())
    };
    let wrong = [wrong(0, |row| row.before), wrong(1, |row| row.after)];
    let scale = jobs.first().map_or(1, |job| job.scale.all());
    let row = |figure: Row| {
        let Some(metric) = figures::metric(&figure) else {
            return not_run(figure);
        };
        let ours = |number: usize| match metric {
            Metric::Disabling => Some(ran.get(number)?.disable.as_secs_f64()),
            // The engine takes none apart.
            Metric::Calls { .. } if HOWS[number] == How::Tablewright => None,
            Metric::Calls { from_ms, to_ms } => {
                let buckets = buckets(number)?;
                let mut of = buckets.iter().filter(|it| (it.from_ms, it.to_ms) == (from_ms, to_ms));
                Some(of.next().map_or(0.0, |bucket| bucket.count as f64))
            }
        };
        let fitted_before = figure.is_fitted(&profile);
        let mut note = format!(", with 1/{scale} of the pages");
        if fitted_before {
            note += FITTED_BEFORE;
        }
        if let (Metric::Disabling, [Some(before), Some(after)]) = (metric, wrong) {
            note += &format!(
                "; of the zaps {before:.0} % before and {after:.0} % after are in another bin than \
                 published"
            );
        }
        let ours = [ours(0), ours(1), ours(2)];
        Reproduced { fitted_before, ..Reproduced::new(NAME, figure, &profile, ours, &note) }
    };
    Ok(published.into_iter().map(row).collect())
}

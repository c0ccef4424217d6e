//! `map-mem` on the software machine: virtual time, beside what was published for the same step.

use serde::Serialize;
use tablewright_experiments::linear_map::Ran;
use tablewright_experiments::linear_map::steps::Step;
use tablewright_linear::Techniques;
use tablewright_machine::{Profile, Time};

use super::steps::techniques_of;
use crate::published::{self, TableError};
use crate::report::{self, error_percent, percent};

/// A row of the result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The step.
    pub step: &'static str,
    /// What is on at that step, if it is one of those published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub techniques: Option<Vec<&'static str>>,
    /// Virtual time in milliseconds.
    pub virtual_ms: f64,
    /// Tables of the finished map.
    pub tables: u64,
    /// Entries written, besides links to tables.
    pub entries: u64,
    /// How often a window was moved to another table.
    pub windows_moved: u64,
    /// Invalidations issued.
    pub invalidations_issued: u64,
    /// Waits until invalidations were complete.
    pub waits_for_completion: u64,
    /// Barriers after stores to entries.
    pub barriers: u64,
    /// The published figure for it.
    pub published_ms: Option<f64>,
    /// How much more the machine takes, of what was published.
    pub error_percent: Option<f64>,
    /// Whether the profile was fitted on the published figure.
    pub fitted: bool,
    /// What the profile says that it does not explain here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unexplained: Option<String>,
}

/// Picoseconds in a millisecond.
pub const PS_PER_MS: f64 = 1e9;

/// A time in milliseconds.
pub fn ms(time: Time) -> f64 {
    time.as_ps() as f64 / PS_PER_MS
}

/// What a profile says that it does not explain in a published row.
pub fn unexplained(
    profile: &Profile,
    system: &str,
    configuration: &str,
    metric: &str,
) -> Option<String> {
    let gap = profile.unexplained.iter().find(|gap| {
        gap.rows
            .iter()
            .any(|row| row.selects_metric(system, configuration, metric))
    })?;
    Some(gap.what.trim().to_owned())
}

/// The published figures of the system that a profile describes, if there are any.
pub fn published(profile: &Profile) -> Vec<published::Row> {
    let mut rows = published::built_in("map-mem").unwrap_or_default();
    rows.retain(|row| profile.system.published_as.contains(&row.system));
    rows
}

/// A row of the result for what a step showed. `published` are figures of the same memory, if there
/// are any.
pub fn row(
    profile: &Profile,
    step: Step,
    ran: Ran,
    published: &[published::Row],
) -> Result<Row, TableError> {
    let techniques = step.techniques();
    let mut row = Row {
        step: step.name,
        techniques: techniques.map(Techniques::names),
        virtual_ms: ms(ran.time),
        tables: ran.tables,
        entries: ran.entries,
        windows_moved: ran.windows,
        invalidations_issued: ran.invalidations,
        waits_for_completion: ran.waits,
        barriers: ran.barriers,
        published_ms: None,
        error_percent: None,
        fitted: false,
        unexplained: None,
    };
    for figure in published {
        if Some(techniques_of(figure)?) == techniques {
            let after = figure.after_ms()?;
            let (system, configuration, metric) =
                (&figure.system, &figure.configuration, &figure.metric);
            row.published_ms = Some(after);
            row.error_percent = Some(error_percent(row.virtual_ms, after));
            row.fitted = profile.is_fitted_on(system, configuration);
            row.unexplained = unexplained(profile, system, configuration, metric);
        }
    }
    Ok(row)
}

/// The rows as tables for people: what they take, and why.
pub fn table(rows: &[Row]) -> String {
    let time = |ms: f64| report::time(ms * 1e6);
    let times = rows.iter().map(|row| {
        let fitted = match (row.published_ms, row.fitted) {
            (None, _) => "-",
            (Some(_), true) => "yes",
            (Some(_), false) => "no",
        };
        [
            row.step.to_owned(),
            time(row.virtual_ms),
            row.published_ms.map_or("-".to_owned(), time),
            row.error_percent.map_or("-".to_owned(), percent),
            fitted.to_owned(),
        ]
    });
    let counts = rows.iter().map(|row| {
        [
            row.step.to_owned(),
            report::count(row.windows_moved),
            report::count(row.invalidations_issued),
            report::count(row.waits_for_completion),
            report::count(row.barriers),
        ]
    });
    let times = report::table(
        ["", "virtual time", "published", "error", "fitted"],
        1,
        times.collect(),
    );
    let counts = report::table(
        ["", "windows moved", "invalidations", "waits", "barriers"],
        1,
        counts.collect(),
    );
    format!("{times}\n{counts}")
}

#[cfg(test)]
mod tests {
    use super::super::steps::Choice;
    use tablewright_experiments::linear_map::{Job, format_of, plan_of};

    use super::*;
    use crate::fakes::linear_run;
    use crate::runs::{Threads, software};

    fn rows(name: &str, bytes: u64) -> Vec<Row> {
        let profile = Profile::load(name).unwrap();
        let plan = plan_of(&profile, bytes).unwrap();
        let published = published(&profile);
        Choice::All
            .steps()
            .into_iter()
            .map(|step| {
                let job = Job {
                    profile: profile.clone(),
                    step,
                    plan: plan.clone(),
                };
                row(&profile, step, linear_run(&job), &published).unwrap()
            })
            .collect()
    }

    #[test]
    fn published_figures_stand_beside_their_step() {
        let rows = rows("ampere-altra-vm-64g", 64 << 30);
        let published: Vec<_> = rows.iter().map(|row| row.published_ms).collect();
        assert_eq!(
            published,
            [
                Some(2191.0),
                Some(429.0),
                Some(375.0),
                Some(330.0),
                Some(61.0),
                None,
                None,
                None
            ]
        );
        let fitted: Vec<_> = rows.iter().map(|row| row.fitted).collect();
        assert_eq!(fitted, [&[true; 2][..], &[false; 6]].concat());
        assert!(
            rows.iter()
                .all(|row| row.error_percent.is_none_or(|error| error.abs() < 15.0))
        );
    }

    #[test]
    fn what_a_profile_cannot_explain_is_said_at_the_row() {
        let rows = rows("apple-m2-vm-16g", 16 << 30);
        let lazy = &rows[3];
        assert!(!lazy.fitted && lazy.error_percent.unwrap() > 12.0);
        assert!(
            lazy.unexplained
                .as_ref()
                .unwrap()
                .starts_with("lazy-unmap: ")
        );
        assert!(rows[0].unexplained.is_none());
    }

    #[test]
    fn runs_do_not_depend_on_threads_and_the_first_failure_is_told() {
        let profile = Profile::load("neutral").unwrap();
        let plan = plan_of(&profile, 64 << 20).unwrap();
        let steps = Choice::All.steps().into_iter().cycle().take(20);
        let mut jobs: Vec<Job> = steps
            .map(|step| Job {
                profile: profile.clone(),
                step,
                plan: plan.clone(),
            })
            .collect();
        let with = |threads| {
            software(Threads {
                threads: Some(threads),
            })
        };
        let one = with(1)(&jobs).unwrap();
        assert_eq!(one.len(), jobs.len());
        for threads in [2, 3, 64] {
            assert_eq!(with(threads)(&jobs).unwrap(), one);
        }
        assert_eq!(with(2)(&[]).unwrap(), []);

        let small = plan_of(&profile, 64 << 10).unwrap();
        for number in [7, 3] {
            jobs[number].plan = small.clone();
            jobs[number].plan.spans[0].end -= number as u64 * 4096;
            let says = software(Threads { threads: None })(&jobs)
                .unwrap_err()
                .to_string();
            assert!(says.starts_with("no range of RAM"), "{says}");
        }
    }

    #[test]
    fn every_profile_has_a_format() {
        for name in Profile::built_in() {
            let profile = Profile::load(name).unwrap();
            let page = 1 << profile.architecture.regime.page_shift();
            assert_eq!(format_of(&profile).unwrap().page_bytes(), page);
            plan_of(&profile, profile.system.ram_bytes()).unwrap();
        }
    }

    #[test]
    fn errors_have_a_sign_and_no_negative_zero() {
        assert_eq!(percent(error_percent(110.0, 100.0)), "+10.0 %");
        assert_eq!(percent(error_percent(90.0, 100.0)), "-10.0 %");
        assert_eq!(percent(-0.04), "+0.0 %");
    }
}

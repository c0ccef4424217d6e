//! Disabling a dirty log: the published case on the machine of its system's profile.

use super::figures::{self, Metric};
use super::job::{Case, How, Run};
use crate::error::Error;
use crate::profile;
use crate::published::{FITTED_BEFORE, NO_PROFILE, Reproduced, Row};

const HOWS: [How; 3] = [How::Before, How::After, How::Tablewright];
const NAME: &str = "dirty-log";

/// The rows of the published table: the time, and how many tables took how long to take apart.
pub fn rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
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

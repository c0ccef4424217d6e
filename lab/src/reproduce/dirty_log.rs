//! Disabling a dirty log: the published case on the machine of its system's profile.

use tablewright_experiments::dirty_log::{How, Run};

use super::Row;
use super::map_mem::profile_of;
use crate::dirty_log::figures::{self, Metric};
use crate::dirty_log::sound;
use crate::error::Error;
use crate::map_mem::machine::unexplained;
use crate::published;
use crate::report::error_percent;
use tablewright_experiments::dirty_log::Case;

const HOWS: [How; 3] = [How::Before, How::After, How::Tablewright];

/// The rows of the published table: the time, and how many tables took how long to take apart.
pub fn rows(published: Vec<published::Row>, run: Run<'_>) -> Result<Vec<Row>, Error> {
    let case = published.iter().find(|row| figures::metric(row).is_some());
    let profile = case.map_or(Ok(None), |row| profile_of(&row.system))?;
    let (Some(profile), Some(case)) = (profile, Case::published()) else {
        let listed = |row| Row::of("dirty-log", row);
        return Ok(published.into_iter().map(listed).collect());
    };
    let jobs = HOWS.map(|how| case.job(&profile, how));
    let jobs = jobs.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        sound(job, ran)?;
    }
    let wrong = |number: usize, of: fn(&published::Row) -> Option<f64>| {
        let (job, ran) = (jobs.get(number)?, ran.get(number)?);
        let buckets = figures::histogram(&ran.zaps, job.scale.fewer);
        let published = published.iter().filter_map(|row| {
            let Metric::Calls { from_ms, .. } = figures::metric(row)? else {
                return None;
            };
            Some((from_ms, of(row)? as u64))
        });
        figures::misplaced(&buckets, &published.collect::<Vec<_>>())
    };
    let wrong = [wrong(0, |row| row.before), wrong(1, |row| row.after)];
    let row = |figure: published::Row| {
        let Some(metric) = figures::metric(&figure) else {
            return Row::of("dirty-log", figure);
        };
        let ours = |number: usize| {
            let (job, ran) = (jobs.get(number)?, ran.get(number)?);
            match metric {
                Metric::Disabling => Some(ran.disable.as_secs_f64()),
                // The engine takes none apart.
                Metric::Calls { .. } if job.how == How::Tablewright => None,
                Metric::Calls { from_ms, to_ms } => {
                    let buckets = figures::histogram(&ran.zaps, job.scale.fewer);
                    let bucket = buckets
                        .iter()
                        .find(|it| (it.from_ms, it.to_ms) == (from_ms, to_ms));
                    Some(bucket.map_or(0.0, |bucket| bucket.count as f64))
                }
            }
        };
        let scale = jobs.first().map(|job| job.scale.smaller * job.scale.fewer);
        let mut note = format!(
            "on {}, virtual time, with 1/{} of the pages",
            profile.name,
            scale.unwrap_or(1)
        );
        let selects = (&*figure.system, &*figure.configuration, &*figure.metric);
        let fitted = profile.is_fitted_on_metric(selects.0, selects.1, selects.2);
        if fitted {
            note += "; fitted on the figure before the change alone, the one after it is a test";
        }
        if let (Metric::Disabling, [Some(before), Some(after)]) = (metric, wrong) {
            note += &format!(
                "; of the zaps {before:.0} % before and {after:.0} % after are in another bin than published"
            );
        }
        if let Some(gap) = unexplained(&profile, selects.0, selects.1, selects.2) {
            note += &format!("; not explained: {gap}");
        }
        let after = ours(1);
        Row {
            before: ours(0),
            after,
            tablewright: ours(2),
            // Of nothing there is no relative error.
            error_percent: after
                .zip(figure.after)
                .map(|(a, b)| error_percent(a, b))
                .filter(|error| error.is_finite()),
            fitted,
            fitted_before: fitted,
            note,
            ..Row::of("dirty-log", figure)
        }
    };
    Ok(published.into_iter().map(row).collect())
}

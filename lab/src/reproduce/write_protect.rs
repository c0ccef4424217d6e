//! Starting a dirty log: the published case on the machine of its system's profile.

use tablewright::Level;

use super::Row;
use super::map_mem::profile_of;
use crate::error::Error;
use crate::map_mem::machine::{error_percent, unexplained};
use crate::published;
use crate::write_protect::simulate::{How, Job, Run, Stage2, Then};
use crate::write_protect::{metric, nanoseconds, sound};

const HOWS: [How; 3] = [How::Slow, How::Fast, How::Tablewright];

/// The writes are run with one such part of the memory, and their time is multiplied: a page takes as long as any other.
const PART: u64 = 16;

/// The rows of the published table.
pub fn rows(published: Vec<published::Row>, run: Run<'_>) -> Result<Vec<Row>, Error> {
    let case = published.iter().find(|row| metric(row).is_some());
    let profile = case.map_or(Ok(None), |row| profile_of(&row.system))?;
    let Some(profile) = profile else {
        let listed = |row| Row::of("write-protect", row);
        return Ok(published.into_iter().map(listed).collect());
    };
    let of = |how, part, then| Job {
        profile: profile.clone(),
        format: Stage2::Ept,
        how,
        bytes: (3 << 30) / part,
        leaf: Level::PAGE,
        vcpus: 12,
        then,
    };
    let starts = HOWS.map(|how| of(how, 1, Then::Nothing));
    let jobs = [starts, HOWS.map(|how| of(how, PART, Then::Write))].concat();
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        sound(job, ran)?;
    }
    let row = |figure: published::Row| {
        let Some(metric) = metric(&figure) else {
            return Ok(Row {
                note: "a migration: neither the link nor what ended it is published, and at these rates the guest writes all of its \
                       set again before that is sent".to_owned(),
                ..Row::of("write-protect", figure)
            });
        };
        let (starts, writes) = ran.split_at(HOWS.len());
        let times: Vec<f64> = match metric {
            0 => starts.iter().map(|ran| nanoseconds(ran.start)).collect(),
            _ => writes
                .iter()
                .map(|ran| nanoseconds(ran.then) * PART as f64)
                .collect(),
        };
        let fitted =
            profile.is_fitted_on_metric(&figure.system, &figure.configuration, &figure.metric);
        let mut note = format!("on {}, virtual time", profile.name);
        if metric == 1 {
            note += &format!(", with 1/{PART} of the memory");
        }
        if fitted {
            note += "; fitted on the figure before the change alone, the one after it is a test";
        }
        if let Some(gap) = unexplained(
            &profile,
            &figure.system,
            &figure.configuration,
            &figure.metric,
        ) {
            note += &format!("; not explained: {gap}");
        }
        Ok(Row {
            before: times.first().copied(),
            after: times.get(1).copied(),
            tablewright: times.get(2).copied(),
            error_percent: match (times.get(1), figure.after_ms()) {
                (Some(after), Ok(ms)) => Some(error_percent(after / 1e6, ms)),
                _ => None,
            },
            fitted,
            note,
            ..Row::of("write-protect", figure)
        })
    };
    published.into_iter().map(row).collect()
}

//! The boot-time linear map: each published system on the machine of its profile.

use tablewright_experiments::linear_map::steps::Step;
use tablewright_experiments::linear_map::{Job, Run, plan_of};
use tablewright_machine::Profile;

use super::Row;
use crate::error::Error;
use crate::map_mem::machine::{self, ms};
use crate::map_mem::steps::step_of;
use crate::published;
use crate::report::error_percent;

/// The rows of the published table. Each system is run once without any technique, once in the
/// engine's own way, and once for each row.
pub fn rows(published: Vec<published::Row>, run: Run<'_>) -> Result<Vec<Row>, Error> {
    let mut columns = Vec::new();
    let mut jobs = Vec::new();
    for column in published.chunk_by(|a, b| a.system == b.system) {
        let profile = profile_of(&column[0].system)?;
        if let Some(profile) = &profile {
            let plan = plan_of(profile, column[0].ram()?.bytes())?;
            let steps = column.iter().map(step_of);
            for step in [Ok(Step::base()), Ok(Step::TABLEWRIGHT)]
                .into_iter()
                .chain(steps)
            {
                jobs.push(Job {
                    profile: profile.clone(),
                    step: step?,
                    plan: plan.clone(),
                });
            }
        }
        columns.push((column, profile));
    }
    let mut times = run(&jobs)?.into_iter().map(|ran| ms(ran.time));

    let mut rows = Vec::with_capacity(published.len());
    for (column, profile) in columns {
        let Some(profile) = profile else {
            rows.extend(column.iter().map(|row| Row {
                note: "no profile describes this system".to_owned(),
                ..Row::of("map-mem", row.clone())
            }));
            continue;
        };
        let (before, tablewright) = (times.next(), times.next());
        for (figure, after) in column.iter().zip(&mut times) {
            rows.push(Row {
                before,
                after: Some(after),
                tablewright,
                error_percent: Some(error_percent(after, figure.after_ms()?)),
                fitted: profile.is_fitted_on(&figure.system, &figure.configuration),
                note: note(&profile, figure),
                ..Row::of("map-mem", figure.clone())
            });
        }
    }
    Ok(rows)
}

/// What it ran on, and what the profile does not explain.
fn note(profile: &Profile, figure: &published::Row) -> String {
    let on = format!("on {}, virtual time", profile.name);
    match machine::unexplained(
        profile,
        &figure.system,
        &figure.configuration,
        &figure.metric,
    ) {
        Some(gap) => format!("{on}; not explained: {gap}"),
        None => on,
    }
}

/// The built-in profile of a published system.
pub(super) fn profile_of(system: &str) -> Result<Option<Profile>, Error> {
    for name in Profile::built_in() {
        let profile = Profile::load(name)?;
        if profile
            .system
            .published_as
            .iter()
            .any(|name| name == system)
        {
            return Ok(Some(profile));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_both_figures_and_says_what_it_was_fitted_on() {
        let rows = rows(
            published::built_in("map-mem").unwrap(),
            &crate::fakes::linear_map,
        )
        .unwrap();
        assert_eq!(rows.len(), 30);
        for column in rows.chunk_by(|a, b| a.system == b.system) {
            assert_eq!(column.iter().filter(|row| row.fitted).count(), 2);
        }
        for row in &rows {
            let error = row.error_percent.unwrap();
            let published = row.published_after.unwrap();
            assert!((row.after.unwrap() - published * (1.0 + error / 100.0)).abs() < 1e-6);
            assert!(row.note.contains("virtual time"), "{row:?}");
            // Where the model is far off, the note says so.
            assert!(
                error.abs() < 12.0 || row.note.contains("not explained"),
                "{row:?}"
            );
        }
        let base = &rows[5];
        assert_eq!(
            (base.before, base.published_before),
            (base.after, Some(2191.0))
        );
        assert!(base.note.contains("ampere-altra-vm-64g"));
    }

    #[test]
    fn a_system_without_a_profile_is_listed_and_not_run() {
        let mut published = published::built_in("map-mem").unwrap();
        published.truncate(1);
        published[0].system = "Toaster, 4G".into();
        let rows = rows(published, &|jobs| {
            assert!(jobs.is_empty());
            Ok(Vec::new())
        })
        .unwrap();
        assert_eq!(rows[0].note, "no profile describes this system");
        assert_eq!(rows[0].after, None);
    }
}

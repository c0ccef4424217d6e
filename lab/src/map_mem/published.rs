//! The boot-time linear map: each published system on the machine of its profile.

use super::job::{Job, Run, plan_of};
use super::simulate::ms;
use super::step::{Step, step_of};
use crate::error::Error;
use crate::profile;
use crate::published::{NO_PROFILE, Reproduced, Row};

const NAME: &str = "map-mem";

/// The rows of the published table. Each system is run once without any technique, once in the
/// engine's own way, and once for each row.
pub fn rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
    let mut columns = Vec::new();
    let mut jobs = Vec::new();
    for column in published.chunk_by(|a, b| a.system == b.system) {
        let profile = profile::of_system(&column[0].system)?;
        if let Some(profile) = &profile {
            let plan = plan_of(profile, column[0].ram()?.bytes())?;
            let ends = [Ok(Step::base()), Ok(Step::TABLEWRIGHT)];
            for step in ends.into_iter().chain(column.iter().map(step_of)) {
                jobs.push(Job { profile: profile.clone(), step: step?, plan: plan.clone() });
            }
        }
        columns.push((column, profile));
    }
    let mut times = run(&jobs)?.into_iter().map(|ran| ms(ran.time));

    let mut rows = Vec::with_capacity(published.len());
    for (column, profile) in columns {
        let Some(profile) = profile else {
            let not_run = |row: &Row| Reproduced::not_run(NAME, row.clone(), NO_PROFILE);
            rows.extend(column.iter().map(not_run));
            continue;
        };
        let (before, tablewright) = (times.next(), times.next());
        for (figure, after) in column.iter().zip(&mut times) {
            let ours = [before, Some(after), tablewright];
            rows.push(Reproduced::new(NAME, figure.clone(), &profile, ours, ""));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;

    #[test]
    fn every_row_has_both_figures_and_says_what_it_was_fitted_on() {
        let rows = rows(published::built_in(NAME), &crate::fakes::linear_map).unwrap();
        assert_eq!(rows.len(), 30);
        for column in rows.chunk_by(|a, b| a.figure.system == b.figure.system) {
            assert_eq!(column.iter().filter(|row| row.fitted).count(), 2);
        }
        for row in &rows {
            let error = row.error_percent.unwrap();
            let published = row.figure.after.unwrap();
            assert!((row.after.unwrap() - published * (1.0 + error / 100.0)).abs() < 1e-6);
            assert!(row.note.contains("virtual time"), "{row:?}");
            // Where the model is far off, the note says so.
            assert!(error.abs() < 12.0 || row.note.contains("not explained"), "{row:?}");
        }
        let base = &rows[5];
        assert_eq!((base.before, base.figure.before), (base.after, Some(2191.0)));
        assert!(base.note.contains("ampere-altra-vm-64g"));
    }

    #[test]
    fn a_system_without_a_profile_is_listed_and_not_run() {
        let mut published = published::built_in(NAME);
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

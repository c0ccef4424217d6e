//! Starting a dirty log, and a migration with it: the published cases on the machine of their
//! system's profile.

use tablewright::Level;
use tablewright_experiments::migrate as migrations;
use tablewright_experiments::write_protect::{How, Job, Run, Stage2, Then};
use tablewright_machine::Time;

use super::map_mem::profile_of;
use super::{Row, migrate};
use crate::error::Error;
use crate::map_mem::machine::unexplained;
use crate::published;
use crate::report::error_percent;
use crate::write_protect::{metric, nanoseconds, sound};

const HOWS: [How; 3] = [How::Slow, How::Fast, How::Tablewright];

/// The writes, and the migration, are run with one such part of the memory, and their time is
/// multiplied: a page takes as long as any other.
const PART: u64 = 16;

/// QEMU starts a log slot by slot. A PC of 3 GiB has eight when it has booted, seven parts of its
/// RAM and its firmware: by QEMU 7.2's trace of `KVM_SET_USER_MEMORY_REGION`.
const SLOTS: u64 = 8;
/// What such a call takes where nothing has to be protected, whatever the size of its slot: by the
/// median of 41 calls of Linux 6.18 on a cloud computer of two CPUs.
const CALL: Time = Time::us(9);
/// And more for the bitmaps of 3 GiB.
const BITMAPS: Time = Time::us(22);
/// What the published figure of a start has besides protecting, alike in each way.
fn calls() -> Time {
    CALL * SLOTS + BITMAPS
}

/// The rows of the published table.
pub fn rows(
    published: Vec<published::Row>,
    run: Run<'_>,
    migrate: migrations::Run<'_>,
) -> Result<Vec<Row>, Error> {
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
        before: 0,
    };
    // What no row is about is not run.
    let mut jobs = HOWS.map(|how| of(how, 1, Then::Nothing)).to_vec();
    if published.iter().any(|row| metric(row) == Some(1)) {
        jobs.extend(HOWS.map(|how| of(how, PART, Then::Write)));
    }
    let ran = run(&jobs)?;
    for (job, ran) in jobs.iter().zip(&ran) {
        sound(job, ran)?;
    }
    let migrated = migrate::Case::ALL
        .into_iter()
        .filter(|case| {
            let mut of_rows = published.iter().filter_map(migrate::metric);
            of_rows.any(|(of, _)| of == *case)
        })
        .map(|case| Ok((case, migrate::figures(&profile, case, PART, migrate)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let row = |figure: published::Row| {
        let (starts, writes) = ran.split_at(HOWS.len());
        let (times, part, fitted) = match (metric(&figure), migrate::metric(&figure)) {
            (Some(metric), _) => {
                let times: Vec<f64> = match metric {
                    0 => starts
                        .iter()
                        .map(|ran| nanoseconds(ran.start + calls()))
                        .collect(),
                    _ => writes
                        .iter()
                        .map(|ran| nanoseconds(ran.then) * PART as f64)
                        .collect(),
                };
                let selects = (&*figure.system, &*figure.configuration, &*figure.metric);
                let fitted = profile.is_fitted_on_metric(selects.0, selects.1, selects.2);
                (times, metric == 1, fitted)
            }
            (None, Some((case, metric))) => {
                let of_case = migrated.iter().filter(|(of, _)| *of == case);
                let figures = of_case.flat_map(|(_, ran)| ran.iter().map(|ran| ran[metric]));
                // Link and writer are fitted on rate and time of the second case.
                let fitted = case == migrate::Case::Written && metric < 2;
                (figures.collect(), true, fitted)
            }
            (None, None) => return Row::of("write-protect", figure),
        };
        let mut note = format!("on {}, virtual time", profile.name);
        if metric(&figure) == Some(0) {
            note += &format!(
                ", and {:.0} us of calls for {SLOTS} slots, measured on another computer",
                nanoseconds(calls()) / 1e3
            );
        }
        if part {
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
        let after = times.get(1).copied();
        Row {
            before: times.first().copied(),
            after,
            tablewright: times.last().copied(),
            error_percent: after.zip(figure.after).map(|(a, b)| error_percent(a, b)),
            fitted,
            fitted_before: fitted,
            note,
            ..Row::of("write-protect", figure)
        }
    };
    Ok(published.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_has_the_calls_for_its_slots_in_every_way_and_writes_have_none() {
        let published = published::built_in("write-protect").unwrap();
        let case = published.into_iter().filter(|row| metric(row).is_some());
        let rows = rows(case.collect(), &crate::fakes::write_protect, &|_| {
            unreachable!("no migration was asked for")
        })
        .unwrap();
        assert_eq!(rows.len(), 2);
        let job = |how, part, then| Job {
            profile: profile_of(&rows[0].system).unwrap().unwrap(),
            format: Stage2::Ept,
            how,
            bytes: (3 << 30) / part,
            leaf: Level::PAGE,
            vcpus: 12,
            then,
            before: 0,
        };
        let ran = |how, part, then| crate::fakes::write_protect(&[job(how, part, then)]).unwrap();
        let starts =
            HOWS.map(|how| nanoseconds(ran(how, 1, Then::Nothing)[0].start + Time::us(94)));
        let of = |row: &Row| [row.before, row.after, row.tablewright].map(Option::unwrap);
        assert_eq!(of(&rows[0]), starts);
        assert!(
            rows[0].note.contains("94 us of calls for 8 slots"),
            "{}",
            rows[0].note
        );
        let writes = HOWS.map(|how| nanoseconds(ran(how, PART, Then::Write)[0].then) * PART as f64);
        assert_eq!(of(&rows[1]), writes);
        assert!(!rows[1].note.contains("calls"));
        assert!(rows.iter().all(|row| row.fitted && row.fitted_before));
    }
}

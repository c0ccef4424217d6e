//! Starting a dirty log, and a migration with it: the published cases on the machine of their
//! system's profile.

use tablewright::Level;
use tablewright_machine::Time;

use super::job::{How, Job, Run, Then};
use super::migration::{self, Case};
use crate::error::Error;
use crate::guest::{Stage2, nanoseconds};
use crate::migrate::job as migrate;
use crate::profile;
use crate::published::{FITTED_BEFORE, NO_PROFILE, Reproduced, Row};

const NAME: &str = "write-protect";
const HOWS: [How; 3] = [How::Slow, How::Fast, How::Tablewright];

/// The writes, and the migration, are run with one such part of the memory, and their time is
/// multiplied: a page takes as long as any other.
const PART: u64 = 16;

/// QEMU starts a log slot by slot. A PC of 3 GiB has eight when it has booted, seven parts of its
/// RAM and its firmware: by QEMU 7.2's trace of `KVM_SET_USER_MEMORY_REGION`.
const SLOTS: u64 = 8;
/// Such a call, where nothing has to be protected, whatever the size of its slot: by the median of
/// 41 calls of Linux 6.18 on a cloud computer of two CPUs.
const CALL: Time = Time::us(9);
/// And more for the bitmaps of 3 GiB.
const BITMAPS: Time = Time::us(22);
/// The published figure of a start has this besides protecting, alike in each way.
fn calls() -> Time {
    CALL * SLOTS + BITMAPS
}

/// Which of the two figures of this experiment a published row is, if it is one: the start, or the
/// writes.
pub fn metric(row: &Row) -> Option<usize> {
    let case = row.configuration.starts_with("Case 1:") && row.unit == "ns";
    match row.metric.get(..3) {
        Some("(a)") if case => Some(0),
        Some("(b)") if case => Some(1),
        _ => None,
    }
}

/// The rows of the published table.
pub fn rows(
    published: Vec<Row>,
    run: Run<'_>,
    migrate: migrate::Run<'_>,
) -> Result<Vec<Reproduced>, Error> {
    let not_run = |row| Reproduced::not_run(NAME, row, NO_PROFILE);
    let case = published.iter().find(|row| metric(row).is_some());
    let profile = case.map_or(Ok(None), |row| profile::of_system(&row.system))?;
    let Some(profile) = profile else {
        return Ok(published.into_iter().map(not_run).collect());
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
        job.sound(ran)?;
    }
    let mut migrated = Vec::new();
    for case in Case::ALL {
        let mut cases = published.iter().filter_map(migration::metric);
        if cases.any(|(of, _)| of == case) {
            migrated.push((case, migration::figures(&profile, case, PART, migrate)?));
        }
    }
    let (starts, writes) = ran.split_at(HOWS.len());
    let row = |figure: Row| {
        let mut note = String::new();
        let (times, fitted): (Vec<f64>, bool) = match (metric(&figure), migration::metric(&figure))
        {
            (Some(0), _) => {
                let calls = nanoseconds(calls()) / 1e3;
                note = format!(
                    ", and {calls:.0} us of calls for {SLOTS} slots, measured on another computer"
                );
                let start = |ran: &super::job::Ran| nanoseconds(ran.start + self::calls());
                (starts.iter().map(start).collect(), figure.is_fitted(&profile))
            }
            (Some(_), _) => {
                let write = |ran: &super::job::Ran| nanoseconds(ran.then) * PART as f64;
                (writes.iter().map(write).collect(), figure.is_fitted(&profile))
            }
            (None, Some((case, metric))) => {
                let of_case = migrated.iter().filter(|(of, _)| *of == case);
                let figures = of_case.flat_map(|(_, ran)| ran.iter().map(|ran| ran[metric]));
                // Link and writer are fitted on rate and time of the second case.
                (figures.collect(), case == Case::Written && metric < 2)
            }
            (None, None) => return not_run(figure),
        };
        if metric(&figure) != Some(0) {
            note += &format!(", with 1/{PART} of the memory");
        }
        if fitted {
            note += FITTED_BEFORE;
        }
        let ours = [times.first().copied(), times.get(1).copied(), times.last().copied()];
        Reproduced {
            fitted,
            fitted_before: fitted,
            ..Reproduced::new(NAME, figure, &profile, ours, &note)
        }
    };
    Ok(published.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fakes, published};

    #[test]
    fn a_start_has_the_calls_for_its_slots_in_every_way_and_writes_have_none() {
        let case = published::built_in(NAME).into_iter().filter(|row| metric(row).is_some());
        let rows = rows(case.collect(), &fakes::write_protect, &|_| {
            unreachable!("no migration was asked for")
        })
        .unwrap();
        assert_eq!(rows.len(), 2);
        let ps = |ps: u64| nanoseconds(Time::ps(ps));
        let start = nanoseconds(Time::ps((3 << 30) / 32) + Time::us(94));
        let of = |row: &Reproduced| [row.before, row.after, row.tablewright].map(Option::unwrap);
        assert_eq!(of(&rows[0]), [start; 3]);
        assert!(rows[0].note.contains("94 us of calls for 8 slots"), "{}", rows[0].note);
        let write = ps((3 << 30) / PART * 90) * PART as f64;
        assert_eq!(of(&rows[1]), [write; 3]);
        assert!(!rows[1].note.contains("calls"));
        assert!(rows.iter().all(|row| row.fitted && row.fitted_before));
    }
}

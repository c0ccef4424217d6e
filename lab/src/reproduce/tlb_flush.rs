//! Remote flushes: the published program on the machine of its guest's profile, with fewer rounds.

use tablewright_experiments::tlb_flush::{How, Job, Ran, Run};
use tablewright_machine::{Profile, Time};

use super::Row;
use super::map_mem::profile_of;
use crate::error::Error;
use crate::map_mem::machine::unexplained;
use crate::published;
use crate::report::error_percent;
use crate::tlb_flush::PUBLISHED_CYCLES;

/// Rounds of each thread; a round takes as long as any other.
const ROUNDS: u32 = 20;
const THREADS: u16 = 32;
const CHUNKS: u32 = 10;

/// Runs of the published program.
pub fn jobs(profile: &Profile, hows: &[How]) -> Vec<Job> {
    let job = |&how| Job {
        profile: profile.clone(),
        how,
        threads: THREADS,
        rounds: ROUNDS,
        chunks: CHUNKS,
        pages: 16_384,
        vcpus: 16,
        physical: 16,
        slice: Time::ms(4),
        work: Time::ZERO,
        spin: Time::ZERO,
        stays: false,
        ranges: 16,
    };
    hows.iter().map(job).collect()
}

/// What the published program takes if one of these runs takes so long.
pub fn published_seconds(time: Time) -> f64 {
    let cycles = u64::from(THREADS) * u64::from(ROUNDS) * u64::from(CHUNKS);
    time.as_secs_f64() * (PUBLISHED_CYCLES / cycles) as f64
}

/// The rows of the published table.
pub(super) fn rows(published: Vec<published::Row>, run: Run<'_>) -> Result<Vec<Row>, Error> {
    let profile = match published.first() {
        Some(row) => profile_of(&row.system)?,
        None => None,
    };
    let Some(profile) = profile else {
        let listed = |row| Row::of("tlb-flush", row);
        return Ok(published.into_iter().map(listed).collect());
    };
    // 16,384 pages are a full flush to the published code, before and after: more than 33.
    let jobs = jobs(&profile, &[How::Interrupt, How::Space, How::Tablewright]);
    let ran = run(&jobs)?;
    let row = |figure: published::Row| {
        let time: fn(&Ran) -> Time = match figure.metric.as_str() {
            "real" => |ran| ran.time,
            "sys" => |ran| ran.tally.cpu_time,
            _ => {
                return Row {
                    note: "time in user mode, of which the model has none".to_owned(),
                    ..Row::of("tlb-flush", figure)
                };
            }
        };
        let seconds = |ran: &Ran| published_seconds(time(ran));
        let after = ran.get(1).map(seconds);
        let gap = unexplained(
            &profile,
            &figure.system,
            &figure.configuration,
            &figure.metric,
        );
        Row {
            before: ran.first().map(seconds),
            after,
            tablewright: ran.get(2).map(seconds),
            error_percent: after
                .zip(figure.after)
                .map(|(after, published)| error_percent(after, published)),
            fitted: profile.is_fitted_on_metric(
                &figure.system,
                &figure.configuration,
                &figure.metric,
            ),
            note: format!(
                "on {}, virtual time, {ROUNDS} of 10000 rounds; fitted on real before and after the change, everything else is a test{}",
                profile.name,
                gap.map_or(String::new(), |gap| format!("; not explained: {gap}")),
            ),
            ..Row::of("tlb-flush", figure)
        }
    };
    Ok(published.into_iter().map(row).collect())
}

//! Remote flushes: the published program on the machine of its guest's profile, with fewer rounds.

use tablewright_machine::{Profile, Time};

use super::job::{How, Job, PUBLISHED_CYCLES, Ran, Run};
use crate::error::Error;
use crate::profile;
use crate::published::{NO_PROFILE, Reproduced, Row};

const NAME: &str = "tlb-flush";
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

/// Returns the published program's time, if one of these runs takes so long.
pub fn published_seconds(time: Time) -> f64 {
    let cycles = u64::from(THREADS) * u64::from(ROUNDS) * u64::from(CHUNKS);
    time.as_secs_f64() * (PUBLISHED_CYCLES / cycles) as f64
}

/// The rows of the published table.
pub fn rows(published: Vec<Row>, run: Run<'_>) -> Result<Vec<Reproduced>, Error> {
    let system = published.first().map(|row| profile::of_system(&row.system));
    let Some(profile) = system.transpose()?.flatten() else {
        let not_run = |row| Reproduced::not_run(NAME, row, NO_PROFILE);
        return Ok(published.into_iter().map(not_run).collect());
    };
    // 16,384 pages are a full flush to the published code, before and after: more than 33.
    let jobs = jobs(&profile, &[How::Interrupt, How::Space, How::Tablewright]);
    let ran = run(&jobs)?;
    let note = format!(
        ", {ROUNDS} of 10000 rounds; fitted on real before and after the change, everything else \
         is a test"
    );
    let row = |figure: Row| {
        let time: fn(&Ran) -> Time = match figure.metric.as_str() {
            "real" => |ran| ran.time,
            "sys" => |ran| ran.tally.cpu_time,
            _ => {
                let note = "time in user mode, of which the model has none";
                return Reproduced::not_run(NAME, figure, note);
            }
        };
        let ours = [0, 1, 2].map(|at| ran.get(at).map(|ran| published_seconds(time(ran))));
        Reproduced::new(NAME, figure, &profile, ours, &note)
    };
    Ok(published.into_iter().map(row).collect())
}

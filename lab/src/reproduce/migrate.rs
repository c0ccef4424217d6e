//! The published migration, whose guest rewrites a tenth of its memory over and over.
//!
//! What is not published is assumed, or fitted on the two figures *before* the change; those after it are a test:
//!
//! | | |
//! |---|---|
//! | [`LINK`] | fitted on the total time before |
//! | [`WORK`], what a vCPU does with a page besides writing it | fitted on the rate of dirty pages before |
//! | [`USED`] | assumed: a guest that has just booted, and what it writes; the rest are zeros, and take next to nothing |
//! | downtime | QEMU's default, 300 ms; the migration ends when that is enough |
//!
//! Before: everything is protected page by page, at the start and at each look at the log. After: in one step, as the engine does it.

use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::migrate::Logging;
use crate::migrate::simulate::{Job, PAGE, PERIOD, Ran, Run, SLICE};
use crate::migrate::writes::{Model, Writes};
use crate::published;

/// Bytes in a second.
const LINK: u64 = 1_640_000_000;
/// Nanoseconds for each page.
const WORK: u64 = 19_600;
/// Bytes of the guest's memory that hold something when it has booted.
const USED: u64 = 4 << 30;

const MEMORY: u64 = 30 << 30;
const SET: u64 = 3000 << 20;

/// Which of the two figures a published row is, if it is one.
pub fn metric(row: &published::Row) -> Option<usize> {
    let case = row.configuration.starts_with("Case 2.1");
    match row.metric.get(..3) {
        Some("(a)") if case => Some(0),
        Some("(b)") if case && row.unit == "ms" => Some(1),
        _ => None,
    }
}

/// The rate of dirty pages in pages each second, and the total time in milliseconds, before and after. All is done with one
/// such part of the memory, and in such a part of the time.
pub fn figures(profile: &Profile, part: u64, run: Run<'_>) -> Result<Vec<[f64; 2]>, Error> {
    let pages = |bytes: u64| bytes / PAGE / part;
    let fraction = |time: Time| Time::ps(time.as_ps() / part);
    let jobs = [Logging::Manual, Logging::ProtectAll].map(|logging| Job {
        profile: profile.clone(),
        logging,
        pages: pages(MEMORY),
        used: pages(USED),
        vcpus: 8,
        large: false,
        bandwidth: LINK,
        downtime_limit: fraction(Time::ms(300)),
        timeout: fraction(Time::s(60)),
        slice: fraction(SLICE),
        period: fraction(PERIOD),
        chunk: pages(MEMORY),
        ring: 0,
        writes: Writes::Model {
            model: Model::Greedy,
            set: pages(SET),
            rate: None,
            seed: 1,
        },
        work: Time::ns(WORK),
        auto_converge: false,
        #[cfg(test)]
        order: crate::migrate::simulate::Order::Right,
    });
    let figures = |ran: &Ran| [ran.dirty_rate, ran.total.as_secs_f64() * 1e3 * part as f64];
    Ok(run(&jobs)?.iter().map(figures).collect())
}

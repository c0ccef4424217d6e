//! The published migration, whose guest rewrites a tenth of its memory over and over.
//!
//! In case 2.1 the guest has just booted; in case 2.2 it has written all of its memory before. What
//! is not published is assumed, or fitted on the two figures of case 2.2 *before* the change; those
//! after it, and case 2.1, are a test:
//!
//! | | |
//! |---|---|
//! | [`LINK`] | fitted on the total time before |
//! | [`WORK`], with a page besides writing it | fitted on the rate of dirty pages before |
//! | [`USED`] | assumed: a guest that has just booted, and what it writes; the rest are zeros |
//! | [`ZEROS`] | assumed |
//! | [`START`], [`LOOK`] | measured on another computer |
//! | memory that was not written before | mapped by the first fault on each page, during the log |
//! | downtime | QEMU's default, 300 ms; the migration ends when that is enough |
//!
//! Before: everything is protected page by page, at the start and at each look at the log. After:
//! in one step, as the engine does it. Faults that map hold the one lock of that time, which before
//! the change is held for a look at the log as well (Linux 4.12, `kvm_get_dirty_log_protect` and
//! `tdp_page_fault`); what a fault of the log alone does, takes none (`fast_page_fault`).

use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::migrate::job::{HostTimes, Job, Logging, PAGE, PERIOD, Ran, Run, SLICE};
use crate::migrate::writes::{Model, Writes};
use crate::published;

/// Bytes in a second.
const LINK: u64 = 2_065_000_000;
/// Nanoseconds for each page.
const WORK: u64 = 13_380;
/// A page that was never touched: its first read is a fault of the host, half a microsecond, and
/// then 4 KiB are read.
const ZEROS: Time = Time::ns(750);
/// Time of QEMU 7.2 until it asks KVM for a log of 30 GiB, 0.75 ms, and of KVM of Linux 6.18 for
/// its slots and bitmaps if nothing has to be protected, 0.22 ms: on a cloud computer of two CPUs.
const START: Time = Time::us(970);
/// There a look at the log of 30 GiB, of which nothing was written, takes QEMU 2.65 ms: for each
/// word of its bitmap.
const LOOK: Time = Time::ps(21_600);
/// Bytes of the guest's memory that hold something when it has booted.
const USED: u64 = 4 << 30;

const MEMORY: u64 = 30 << 30;
const SET: u64 = 3000 << 20;

/// One of the two published migrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// 2.1: newly booted.
    Booted,
    /// 2.2: all memory was written before.
    Written,
}

impl Case {
    /// Both, in their order.
    pub const ALL: [Self; 2] = [Self::Booted, Self::Written];
}

/// Which of the figures of which case a published row is, if it is one: the rate of dirty pages in
/// pages each second, the total time and the time until the log is started in milliseconds.
pub fn metric(row: &published::Row) -> Option<(Case, usize)> {
    let case = match row.configuration.get(..8)? {
        "Case 2.1" => Case::Booted,
        "Case 2.2" => Case::Written,
        _ => return None,
    };
    let metric = match (&*row.metric, &*row.unit) {
        (metric, _) if metric.starts_with("(a) ") => 0,
        (metric, "ms") if metric.starts_with("(b) ") => 1,
        ("time of first dirty log", "ms") => 2,
        _ => return None,
    };
    Some((case, metric))
}

/// The figures of a case, before and after. All is done with one such part of the memory, and in
/// such a part of the time.
pub fn figures(
    profile: &Profile,
    case: Case,
    part: u64,
    run: Run<'_>,
) -> Result<Vec<[f64; 3]>, Error> {
    let pages = |bytes: u64| bytes / PAGE / part;
    let fraction = |time: Time| Time::ps(time.as_ps() / part);
    let jobs = [Logging::Manual, Logging::ProtectAll].map(|logging| Job {
        profile: profile.clone(),
        logging,
        pages: pages(MEMORY),
        used: pages(match case {
            Case::Booted => USED,
            Case::Written => MEMORY,
        }),
        mapped: match case {
            Case::Booted => 0,
            Case::Written => pages(MEMORY),
        },
        one_lock: true,
        host: HostTimes { start: fraction(START), word: Some(LOOK) },
        vcpus: 8,
        large: false,
        bandwidth: LINK,
        max_bandwidth: u64::MAX,
        downtime_limit: fraction(Time::ms(300)),
        timeout: fraction(Time::s(60)),
        slice: fraction(SLICE),
        period: fraction(PERIOD),
        chunk: pages(MEMORY),
        ring: 0,
        writes: Writes::Model { model: Model::Greedy, set: pages(SET), rate: None, seed: 1 },
        work: Time::ns(WORK),
        zeros: ZEROS,
        auto_converge: false,
        #[cfg(test)]
        order: crate::migrate::job::Order::Right,
    });
    let ms = |time: Time| time.as_secs_f64() * 1e3 * part as f64;
    let figures = |ran: &Ran| [ran.dirty_rate, ms(ran.total), ms(ran.setup)];
    Ok(run(&jobs)?.iter().map(figures).collect())
}

//! Machines for the tests of what is around them: what a run shows follows from what was asked for,
//! and nothing is run.

use tablewright_linear::Technique;
use tablewright_machine::Time;

use crate::dirty_log::job as dirty_log;
use crate::error::Error;
use crate::map_mem::job as map_mem;
use crate::map_mem::step::{Ran, Way};
use crate::page_table_test::job as page_table_test;
use crate::write_protect::job as write_protect;

/// Time is what the operations of costs.md cost, and nothing else.
pub fn linear_map(jobs: &[map_mem::Job]) -> Result<Vec<Ran>, Error> {
    Ok(jobs.iter().map(linear_run).collect())
}

/// Returns one run's figures.
pub fn linear_run(map_mem::Job { profile, step, plan }: &map_mem::Job) -> Ran {
    let per_table = plan.format.entries_per_table();
    let entries = plan.bytes() / plan.format.page_bytes();
    let tables = entries / per_table;
    let mut ran = Ran { tables, entries, ..Ran::default() };
    match step.way {
        Way::Published(on) => {
            let runs = per_table / 16;
            ran.windows = tables
                * if !on.has(Technique::NoContRemap) {
                    runs + u64::from(!on.has(Technique::NoAllocRemap))
                } else {
                    1 + u64::from(!on.has(Technique::NoAllocRemap))
                };
            ran.invalidations = ran.windows;
            ran.waits = ran.windows / if on.has(Technique::LazyUnmap) { 16 } else { 1 };
            ran.barriers = if on.has(Technique::BatchBarriers) { tables } else { entries };
        }
        Way::Tablewright
        | Way::OneToOne
        | Way::HugeSlots
        | Way::Blocks
        | Way::BlocksTablewright => (ran.invalidations, ran.waits, ran.barriers) = (1, 1, 600),
        Way::Late | Way::LateTablewright => ran.barriers = 1,
    }
    let costs = &profile.costs;
    ran.time = costs.entry * entries
        + costs.publish * ran.barriers
        + costs.issue * ran.invalidations
        + costs.complete * ran.waits;
    ran
}

/// Each phase takes a picosecond for each byte.
pub fn page_table_test(jobs: &[page_table_test::Job]) -> Result<Vec<page_table_test::Ran>, Error> {
    let ran = |job: &page_table_test::Job| page_table_test::Ran {
        times: [Time::ps(job.region.bytes); 3],
        ..page_table_test::Ran::default()
    };
    Ok(jobs.iter().map(ran).collect())
}

/// In the published case it takes about as long as was published.
pub fn write_protect(jobs: &[write_protect::Job]) -> Result<Vec<write_protect::Ran>, Error> {
    let ran = |job: &write_protect::Job| write_protect::Ran {
        start: Time::ps(job.bytes / 32),
        then: Time::ps(job.bytes * 90),
        ..write_protect::Ran::default()
    };
    Ok(jobs.iter().map(ran).collect())
}

/// A way takes a picosecond for each byte, and each table as long as the next.
pub fn dirty_log(jobs: &[dirty_log::Job]) -> Result<Vec<dirty_log::Ran>, Error> {
    let ran = |job: &dirty_log::Job| {
        let bytes = job.region.bytes * job.scale.all();
        dirty_log::Ran {
            populate: Time::ps(bytes),
            enable: Time::ps(bytes),
            dirty: vec![Time::ps(bytes); 2],
            get: vec![Time::ps(bytes); 2],
            clear: vec![Time::ps(bytes); 2],
            disable: Time::ps(bytes),
            zaps: vec![Time::ms(200); 7],
            ..dirty_log::Ran::default()
        }
    };
    Ok(jobs.iter().map(ran).collect())
}

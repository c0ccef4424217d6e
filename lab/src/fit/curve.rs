//! The remote flush: two figures and three costs, so that the solutions are a curve and not a
//! point.
//!
//! A cycle before the published change is its fixed work, what threads wait for each other, and an
//! interrupt that is answered by a vCPU which sleeps; after the change the interrupt is a call. So
//! the difference determines what `interrupt` and `wake` come to, and not which of them it is; and
//! `cycle` is what is left. For each value of `interrupt` the two others are found, with runs of
//! the machine, and the rows on which nothing was fitted say what is to be had from the choice.

use serde::Serialize;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::output::progress::Progress;
use crate::output::report;
use crate::output::report::{error_percent, percent};
use crate::published;
use crate::runs::Run;
use crate::tlb_flush::job::{How, Job, PUBLISHED_CYCLES, Ran};
use crate::tlb_flush::published::{jobs, published_seconds};

/// Nanoseconds of an interrupt for which the others are found.
const INTERRUPTS: [u64; 5] = [0, 1_170, 2_512, 5_000, 10_000];
/// Runs to find them in, from what the point before has. Interrupts for which none are found are
/// left out.
const STEPS: usize = 16;
/// A solution meets both figures within so much, in percent.
const MEETS: f64 = 0.5;

/// A point of the curve. Costs are in nanoseconds, figures in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    pub interrupt_ns: f64,
    pub wake_ns: f64,
    pub cycle_ns: f64,
    /// Elapsed, before the change and after it: fitted.
    pub real_s: [f64; 2],
    /// Of all CPUs: what the choice predicts.
    pub sys_s: [f64; 2],
    pub sys_error_percent: [Option<f64>; 2],
}

#[derive(Serialize)]
struct Report {
    experiment: &'static str,
    machine: String,
    published_real_s: [f64; 2],
    curve: Vec<Point>,
}

fn figures(rows: &[published::Row], metric: &str) -> Option<[f64; 2]> {
    let row = rows.iter().find(|row| row.metric == metric)?;
    Some([row.before?, row.after?])
}

/// The solutions for both published figures of the elapsed time.
pub fn curve(profile: &Profile, run: Run<'_, Job>) -> Result<Vec<Point>, Error> {
    let rows = published::of("tlb-flush", profile);
    let Some(wanted) = figures(&rows, "real") else {
        return Err(Error::Usage(format!(
            "{} was published as no system of tlb-flush",
            profile.name
        )));
    };
    let sys = figures(&rows, "sys");
    let seconds = |ran: &Ran, of: fn(&Ran) -> Time| published_seconds(of(ran));
    let mut points = Vec::new();
    let mut profile = profile.clone();
    let mut progress = Progress::ticking(INTERRUPTS.len() as u64);
    for (number, interrupt) in INTERRUPTS.into_iter().enumerate() {
        progress.at(number as u64, &format!("interrupt of {interrupt} ns"));
        profile.costs.interrupt = Time::ns(interrupt);
        for _ in 0..STEPS {
            let ran = run(&jobs(&profile, &[How::Interrupt, How::Space]))?;
            let both = |of: fn(&Ran) -> Time| [seconds(&ran[0], of), seconds(&ran[1], of)];
            let real = both(|ran| ran.time);
            let missing = [wanted[0] - real[0], wanted[1] - real[1]];
            let costs = &mut profile.costs;
            let met = (0..2).all(|at| (missing[at] / wanted[at]).abs() * 100.0 < MEETS);
            if met {
                let ns = |time: Time| time.as_ps() as f64 / 1e3;
                let cpu_time = both(|ran| ran.tally.cpu_time);
                points.push(Point {
                    interrupt_ns: ns(costs.interrupt),
                    wake_ns: ns(costs.wake),
                    cycle_ns: ns(costs.cycle),
                    real_s: real,
                    sys_s: cpu_time,
                    sys_error_percent: [0, 1]
                        .map(|at| sys.map(|sys| error_percent(cpu_time[at], sys[at]))),
                });
                break;
            }
            // What a cycle lacks after the change is fixed work; what the difference lacks besides
            // is of the wake-up.
            let each = |seconds: f64| seconds * 1e12 / PUBLISHED_CYCLES as f64;
            let moved = |time: Time, by: f64| Time::ps((time.as_ps() as f64 + by).max(0.0) as u64);
            let wake = each(missing[0] - missing[1]);
            costs.wake = moved(costs.wake, wake);
            // A thread that waits for the lock is woken, too.
            costs.cycle = moved(costs.cycle, each(missing[1]) - wake / 2.0);
        }
    }
    Ok(points)
}

/// Finds the curve, and prints it.
pub fn print(profile: &Profile, run: Run<'_, Job>, json: bool) -> Result<(), Error> {
    let points = curve(profile, run)?;
    let rows = published::built_in("tlb-flush");
    let report = Report {
        experiment: "fit",
        machine: profile.name.clone(),
        published_real_s: figures(&rows, "real").unwrap_or_default(),
        curve: points,
    };
    match json {
        true => report::print_json(&report),
        false => report::print(&text(&report)),
    }
}

fn text(report: &Report) -> String {
    let mut text = format!(
        "{} fitted to real before and after the change, {} s and {} s:\nwhat interrupt and wake \
         come to is determined, and not which of them it is\n\n",
        report.machine, report.published_real_s[0], report.published_real_s[1]
    );
    let rows = report.curve.iter().map(|point| {
        let us = |ns: f64| report::time(ns);
        let error = |at: usize| point.sys_error_percent[at].map_or("-".to_owned(), percent);
        [us(point.interrupt_ns), us(point.wake_ns), us(point.cycle_ns), error(0), error(1)]
    });
    text += &report::table(
        ["interrupt", "wake", "cycle", "sys before", "sys after"],
        0,
        rows.collect(),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a cycle is its work, two wake-ups, and an interrupt with a third before
    /// the change.
    fn linear(jobs: &[Job]) -> Result<Vec<Ran>, Error> {
        let ran = |job: &Job| {
            let costs = &job.profile.costs;
            let told = match job.how {
                How::Interrupt => costs.interrupt + costs.wake,
                _ => costs.exit * 2,
            };
            let cycle = costs.cycle + Time::ps(costs.wake.as_ps() / 2) + told;
            let mut ran = Ran { time: cycle * job.cycles(), ..Ran::default() };
            ran.tally.cpu_time = ran.time;
            ran
        };
        Ok(jobs.iter().map(ran).collect())
    }

    #[test]
    fn the_sum_is_determined_and_the_parts_are_not() {
        let profile = Profile::load("hyperv-16-vcpus").unwrap();
        let points = curve(&profile, &linear).unwrap();
        assert_eq!(points.len(), INTERRUPTS.len());
        // 22.9 us between the two figures, and the call.
        for point in points {
            let sum = point.interrupt_ns + point.wake_ns;
            assert!((sum - (22_874.0 + 1_200.0)).abs() < 300.0, "{point:?}");
        }
        let other = Profile::load("kunpeng-920").unwrap();
        assert!(curve(&other, &linear).is_err());
    }
}

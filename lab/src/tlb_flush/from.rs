//! A guest's measurements beside the machine's prediction: the same threads do as much on as many
//! vCPUs and physical CPUs, and their counts are compared.
//!
//! A file is what `cargo xtask tlb-flush --json` writes: one run a line.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tablewright_machine::{MAX_CPUS, Profile, Time};

use super::job::{self, How, Job, Ran, Run};
use crate::error::{Error, json_problem};
use crate::file;
use crate::output::columns::{self, Cell, columns};
use crate::output::report::{self, Report};

/// A line of a file.
#[derive(Deserialize)]
struct Line {
    vcpus: u16,
    processors: u16,
    flush: Way,
    measured: Measured,
    /// By what the hypervisor calls it.
    counted: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Interrupt,
    Hypercall,
    Extended,
}

#[derive(Deserialize)]
struct Measured {
    threads: u16,
    /// Maps, touches and unmaps of all threads.
    cycles: u64,
    pages: u64,
}

/// Counts of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    hypercalls: u64,
    ranges: u64,
    /// Processors that were interrupted for a flush: by the hypervisor, or by the guest.
    told: u64,
    /// vCPUs that forget when they are entered next.
    later: u64,
}

struct Row {
    flush: Way,
    vcpus: u16,
    cpus: u16,
    cycles: u64,
    measured: Counts,
    machine: Counts,
}

columns! { row: Row;
    ["flush"] [] Cell::json(row.flush);
    [] [1 ""] Cell::text(format!("{:?}", row.flush).to_lowercase());
    ["vcpus"] [] Cell::json(row.vcpus);
    [] [1 "vCPUs"] Cell::text(row.vcpus);
    ["cpus"] [] Cell::json(row.cpus);
    [] [1 "CPUs"] Cell::text(row.cpus);
    ["cycles"] [1 "cycles"] Cell::Count(row.cycles);
    ["measured"] [] Cell::json(row.measured);
    ["machine"] [] Cell::json(row.machine);
    [] [1 "calls"] Cell::Count(row.measured.hypercalls);
    [] [1 "machine"] Cell::Count(row.machine.hypercalls);
    [] [1 "ranges"] Cell::Count(row.measured.ranges);
    [] [1 "machine"] Cell::Count(row.machine.ranges);
    [] [1 "told"] Cell::Count(row.measured.told);
    [] [1 "machine"] Cell::Count(row.machine.told);
    [] [1 "later"] Cell::Count(row.measured.later);
    [] [1 "machine"] Cell::Count(row.machine.later);
}

impl Line {
    /// Counts of the hypervisor.
    fn counts(&self) -> Counts {
        let sum = |names: &[&str]| names.iter().filter_map(|name| self.counted.get(*name)).sum();
        match self.flush {
            // Interrupts of the guest's: the hypervisor does not know what for.
            Way::Interrupt => {
                Counts { told: sum(&["interrupts between vCPUs"]), ..Counts::default() }
            }
            Way::Hypercall | Way::Extended => Counts {
                hypercalls: sum(&[
                    "hypercalls: flush of a space",
                    "hypercalls: flush of a list",
                    "hypercalls: flush of a space, by a set",
                    "hypercalls: flush of a list, by a set",
                ]),
                ranges: sum(&["ranges in lists"]),
                told: sum(&["processors told of a flush"]),
                later: sum(&["vCPUs that forgot on entry"]),
            },
        }
    }

    /// Returns the same run on the machine.
    fn job(&self, profile: &Profile) -> Result<Job, String> {
        let Measured { threads, cycles, pages } = self.measured;
        let rounds = cycles.checked_div(threads.into());
        let rounds = rounds.and_then(|rounds| u32::try_from(rounds).ok());
        let rounds = rounds.filter(|rounds| (1..=1_000_000).contains(rounds));
        let rounds = rounds.ok_or("cycles are 1 to 1000000 for each of its threads")?;
        if self.processors == 0 || self.vcpus < self.processors {
            return Err("vCPUs run on no more processors than they are".into());
        }
        if pages == 0 || pages > 1 << 30 {
            return Err("pages are 1 to 2^30".into());
        }
        if usize::from(self.vcpus) > MAX_CPUS {
            return Err(format!("vCPUs are at most {MAX_CPUS}"));
        }
        if !job::fits(threads, pages) {
            return Err("threads and pages: together more than an address space has".into());
        }
        Ok(Job {
            profile: profile.clone(),
            how: match self.flush {
                Way::Interrupt => How::Interrupt,
                Way::Hypercall => How::List,
                Way::Extended => How::Ex,
            },
            threads,
            rounds,
            chunks: 1,
            pages,
            vcpus: self.vcpus,
            physical: self.processors,
            slice: Time::ms(4),
            work: Time::ZERO,
            spin: Time::ZERO,
            stays: false,
            ranges: tablewright::flush::MAX_RANGES,
        })
    }
}

/// Counts of the machine.
fn predicted(job: &Job, ran: &Ran) -> Counts {
    match job.how {
        How::Interrupt => Counts { told: ran.tally.interrupts, ..Counts::default() },
        _ => Counts {
            hypercalls: ran.tally.hypercalls,
            ranges: ran.tally.ranges,
            told: ran.tally.interrupts,
            later: ran.tally.later,
        },
    }
}

/// Reads a file, makes its runs on the machine, and prints both.
pub fn run(
    path: &Path,
    profile: &Profile,
    run: Run<'_>,
    warnings: Vec<String>,
    json: bool,
) -> Result<(), Error> {
    let wrong = |number: usize, why: String| {
        Error::Usage(format!("{}: line {}: {why}", path.display(), number + 1))
    };
    let bytes = file::read(path, "list of measurements")?;
    let text = String::from_utf8_lossy(&bytes);
    let (mut lines, mut jobs) = (Vec::new(), Vec::new());
    for (number, text) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let line: Result<Line, _> = serde_json::from_str(text);
        let line = line.map_err(|error| wrong(number, json_problem(&error)))?;
        jobs.push(line.job(profile).map_err(|why| wrong(number, why))?);
        lines.push(line);
    }
    let Some(first) = jobs.first() else {
        return Err(Error::Usage(format!("{}: no measurement", path.display())));
    };
    let cycles = lines.iter().map(|line| line.measured.cycles).sum();
    let row = |((line, job), ran): ((&Line, &Job), Ran)| Row {
        flush: line.flush,
        vcpus: line.vcpus,
        cpus: line.processors,
        cycles: job.cycles(),
        measured: line.counts(),
        machine: predicted(job, &ran),
    };
    let report = Report {
        experiment: "tlb-flush",
        parameters: first.parameters(cycles),
        rows: lines.iter().zip(&jobs).zip(run(&jobs)?).map(row).collect(),
        warnings,
    };
    report.print(json, |report| {
        let (machine, table) = (&profile.name, columns::table(1, 1, &report.rows));
        let mut text = format!("what a guest has counted, and what {machine} predicts\n\n{table}");
        for (count, why) in WHY {
            let differs = |row: &Row| count(&row.measured) != count(&row.machine);
            if report.rows.iter().any(differs) {
                text += &format!("\n{}", report::wrapped(why, 100, "  "));
            }
        }
        text + "\n"
    })
}

/// One of the counts.
type Pick = fn(&Counts) -> u64;

/// Why the two differ, where they do.
const WHY: [(Pick, &str); 4] = [
    (
        |counts| counts.hypercalls,
        "calls: the machine calls while another vCPU has the space; the kernel as soon as the \
         space has been on one, and for its own changes beside the cycles, too",
    ),
    (
        |counts| counts.ranges,
        "ranges: one for each call; more where the kernel flushes something else",
    ),
    (
        |counts| counts.told,
        "told: of the machine's threads one at a time has the lock, and the others sleep; the \
         kernel's spin first, and are told as long as they run. By interrupts the kernel's \
         scheduler is counted with it",
    ),
    (
        |counts| counts.later,
        "later: the machine counts each vCPU each time that it is told; the hypervisor each vCPU \
         that comes to forget, which makes up for all that it was told meanwhile",
    ),
];

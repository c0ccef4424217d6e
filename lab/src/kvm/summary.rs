//! Phases of several rounds in one: medians, the longest stalls, and what KVM counted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::output::columns::{self, Cell, columns};
use crate::output::report;
use crate::stats::Samples;

/// Kind of a host, for programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostKind {
    /// In one line.
    pub line: String,
    pub vendor: String,
    pub kernel: String,
    /// `EPT`, `NPT`, `stage 2`, `software` or `unknown`.
    pub paging: String,
    pub is_guest: bool,
    pub tdp_mmu: Option<bool>,
    pub eager_split: Option<bool>,
    pub modification_log: Option<bool>,
    pub cpus: u32,
    /// Major and minor number of the kernel.
    pub version: (u32, u32),
}

/// One phase of one round.
#[derive(Clone, Debug, Default)]
pub struct Phase {
    /// `populate`, `enable`, `dirty 1` and so on.
    pub name: String,
    /// How many pages it is about.
    pub pages: u64,
    /// Nanoseconds.
    pub wall: f64,
    /// CPU time of what does it: of all vCPUs together, or of the thread that asks KVM.
    pub cpu: f64,
    /// Time that its threads had begun and did not run: other programs had the CPU, or the host of
    /// a computer that is itself a guest.
    pub away: f64,
    /// Of the CPUs that did it, the slowest, before or after: CPU time of a fixed piece of
    /// arithmetic.
    pub pace: f64,
    /// CPU time of the first of several calls, where the others are what the phase takes: it finds
    /// the caches as a pass of the guest left them.
    pub first: Option<f64>,
    /// How many do it.
    pub threads: u32,
    /// Of the guest, where it runs: nanoseconds.
    pub longest: Option<f64>,
    pub p999: Option<f64>,
    pub total: Option<f64>,
    pub counts: BTreeMap<String, i64>,
    /// Pages that the log had, and pages that were surely written: the same where no leaf is split,
    /// or the guest only writes.
    pub harvested: Option<u64>,
    pub written: Option<u64>,
}

/// One phase of all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PhaseRow {
    pub phase: String,
    pub pages: u64,
    /// Nanoseconds, medians.
    #[serde(rename = "wall_ns")]
    pub wall: f64,
    #[serde(rename = "cpu_ns")]
    pub cpu: f64,
    /// Time that its threads had begun and did not run, median.
    #[serde(rename = "away_ns", default)]
    pub away: f64,
    /// CPU time of a fixed piece of arithmetic on the same CPUs: in all rounds.
    #[serde(rename = "pace_samples_ns", default)]
    pub pace_samples: Vec<f64>,
    /// Of a call that is repeated, the first, median.
    #[serde(rename = "cpu_first_ns")]
    pub cpu_first: Option<f64>,
    /// CPU time for a page.
    #[serde(rename = "cpu_ns_per_page")]
    pub cpu_a_page: f64,
    /// Of all rounds.
    #[serde(rename = "cpu_samples_ns")]
    pub cpu_samples: Vec<f64>,
    /// Distance of the tenth and the ninetieth percentile, as a part of the median.
    pub cpu_spread: f64,
    pub threads: u32,
    /// Waits of the guest, while it ran: the longest of all rounds, and medians; nanoseconds.
    #[serde(rename = "stall_longest_ns")]
    pub stall_longest: Option<f64>,
    #[serde(rename = "stall_p999_ns")]
    pub stall_p999: Option<f64>,
    #[serde(rename = "stall_total_ns")]
    pub stall_total: Option<f64>,
    /// KVM's counts: medians.
    pub counts: BTreeMap<String, i64>,
    /// Pages that the log had, and pages that were surely written.
    pub harvested: Option<u64>,
    pub written: Option<u64>,
}

impl PhaseRow {
    /// One of KVM's counts.
    pub fn count(&self, name: &str) -> i64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// How much longer it took than it ran.
    fn apart(&self) -> f64 {
        self.wall / (self.cpu / f64::from(self.threads.max(1))).max(1.0)
    }
}

/// Rounds of the same phases.
pub fn rows(rounds: &[Vec<Phase>]) -> Vec<PhaseRow> {
    let Some(first) = rounds.first() else {
        return Vec::new();
    };
    let row = |(at, phase): (usize, &Phase)| {
        let all = || rounds.iter().filter_map(|round| round.get(at));
        let median = |of: &dyn Fn(&Phase) -> Option<f64>| -> Option<f64> {
            let samples: Samples = all().filter_map(of).collect();
            (!samples.is_empty()).then(|| samples.median())
        };
        let cpu: Samples = all().map(|phase| phase.cpu).collect();
        let names = all().flat_map(|phase| phase.counts.keys().cloned());
        let counts = names.collect::<std::collections::BTreeSet<_>>().into_iter();
        let counts = counts.map(|name| {
            let count = |phase: &Phase| Some(phase.counts.get(&name).copied().unwrap_or(0) as f64);
            let middle = median(&count).unwrap_or(0.0).round() as i64;
            (name, middle)
        });
        PhaseRow {
            phase: phase.name.clone(),
            pages: phase.pages,
            wall: median(&|phase| Some(phase.wall)).unwrap_or(0.0),
            cpu: cpu.median(),
            away: median(&|phase| Some(phase.away)).unwrap_or(0.0),
            pace_samples: all().map(|phase| phase.pace).collect(),
            cpu_first: median(&|phase| phase.first),
            cpu_a_page: cpu.median() / phase.pages.max(1) as f64,
            cpu_samples: all().map(|phase| phase.cpu).collect(),
            cpu_spread: cpu.spread(),
            threads: phase.threads,
            stall_longest: all().filter_map(|phase| phase.longest).reduce(f64::max),
            stall_p999: median(&|phase| phase.p999),
            stall_total: median(&|phase| phase.total),
            counts: counts.filter(|(_, count)| *count != 0).collect(),
            harvested: phase.harvested,
            written: phase.written,
        }
    };
    first.iter().enumerate().map(row).collect()
}

/// Why a phase has no stalls.
const NOT_RUNNING: &str = "no vCPU runs in that phase";
/// Why it has no log.
const NO_LOG: &str = "the phase reads no log";

columns! { table of row: PhaseRow;
    [] [1 ""] Cell::text(&row.phase);
    [] [1 "time"] Cell::ns(row.wall);
    [] [1 "CPU time"] Cell::ns(row.cpu);
    [] [1 "for a\npage"] Cell::ns(row.cpu_a_page);
    [] [1 "stall\nlongest" NOT_RUNNING] Cell::or_nothing(row.stall_longest, Cell::ns);
    [] [1 "99.9 %" NOT_RUNNING] Cell::or_nothing(row.stall_p999, Cell::ns);
    [] [1 "pages\nin the log" NO_LOG] Cell::or_nothing(row.harvested, Cell::Count);
}

/// Shown counts, and KVM's names of them.
const SHOWN: [(&str, &str); 6] = [
    ("faults\nfixed", "pf_fixed"),
    ("fast", "pf_fast"),
    ("spurious", "pf_spurious"),
    ("remote\nflushes", "remote_tlb_flush"),
    ("pages\nof 4K", "pages_4k"),
    ("of 2M", "pages_2m"),
];

/// The phases as tables: what they took, and what KVM counted, if it counts anything here.
pub fn shown(rows: &[PhaseRow]) -> String {
    let mut text = columns::table(1, 1, rows);
    let first: Samples = rows.iter().filter_map(|row| row.cpu_first).collect();
    if !first.is_empty() {
        text += &format!(
            "get: made again and again; the first call after a pass took {}\n",
            report::time(first.median())
        );
    }
    if rows.iter().all(|row| row.counts.is_empty()) {
        return text;
    }
    let header = [""].into_iter().chain(SHOWN.map(|(title, _)| title));
    let cells = rows.iter().map(|row| {
        let counts = SHOWN.map(|(_, name)| signed(row.count(name)));
        [row.phase.clone()].into_iter().chain(counts).collect()
    });
    let header = header.map(str::to_owned).collect();
    text + "\n" + &report::table_of(header, 1, cells.collect())
}

fn signed(count: i64) -> String {
    let sign = if count < 0 { "-" } else { "" };
    format!("{sign}{}", report::count(count.unsigned_abs()))
}

/// The factor from which CPU time and time part.
const APART: f64 = 1.5;
/// Shorter phases say nothing of how busy a computer is: nanoseconds.
const SHORT: f64 = 2e5;

/// Arithmetic that takes so much longer than the fastest of a report says that the computer was
/// slower, not what is measured.
const SLOWER: f64 = 1.15;

/// Says so where a computer had something else to do, and where figures scatter.
pub fn warnings(rows: &[PhaseRow], kind: &HostKind) -> Vec<String> {
    let mut warnings = Vec::new();
    let apart: Vec<&str> = rows
        .iter()
        .filter(|row| row.wall > SHORT && row.apart() > APART)
        .map(|row| row.phase.as_str())
        .collect();
    if !apart.is_empty() {
        warnings.push(format!(
            "time and CPU time part in {}: other programs had the CPUs, or there are fewer than \
             threads; stalls have it too, quote CPU time alone",
            apart.join(", ")
        ));
    }
    let scattered: Vec<String> = rows
        .iter()
        .filter(|row| row.cpu > SHORT && row.cpu_spread > 0.25)
        .map(|row| format!("{} ({:.0} %)", row.phase, row.cpu_spread * 100.0))
        .collect();
    if !scattered.is_empty() {
        warnings.push(format!(
            "CPU time varied between rounds: {}: close other programs, or make more rounds",
            scattered.join(", ")
        ));
    }
    let paces = || rows.iter().flat_map(|row| &row.pace_samples).copied();
    let fastest = paces().filter(|pace| *pace > 0.0).fold(f64::MAX, f64::min);
    let slow = paces().filter(|pace| *pace > fastest * SLOWER).count();
    if slow > 0 {
        let most = paces().fold(0.0, f64::max) / fastest - 1.0;
        warnings.push(format!(
            "the CPUs themselves were slower, by up to {:.0} %, around {slow} of {} times: a lower \
             frequency, or another guest on the same core",
            most * 100.0,
            paces().count()
        ));
    }
    if let Some(row) = rows.iter().find(|row| row.harvested > row.written) {
        warnings.push(format!(
            "{}: the log has every page written, and pages that were read where KVM split or \
             mapped them anew",
            row.phase
        ));
    }
    if kind.paging == "software" {
        warnings.push(
            "software paging: KVM keeps tables of its own; nested paging has other algorithms and \
             other times"
                .to_owned(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(cpu: f64, wall: f64, longest: f64) -> Phase {
        Phase {
            name: "dirty 1".to_owned(),
            pages: 1000,
            wall,
            cpu,
            threads: 2,
            longest: Some(longest),
            counts: [("pf_fixed".to_owned(), cpu as i64)].into(),
            ..Phase::default()
        }
    }

    #[test]
    fn rounds_are_medians_and_the_longest_stall_is_the_longest() {
        let rounds =
            [(2e6, 7.0), (4e6, 9.0), (3e6, 8.0)].map(|(cpu, stall)| vec![phase(cpu, 5e6, stall)]);
        let rows = rows(&rounds);
        assert_eq!((rows[0].cpu, rows[0].cpu_a_page), (3e6, 3000.0));
        assert_eq!(rows[0].stall_longest, Some(9.0));
        assert_eq!(rows[0].count("pf_fixed"), 3_000_000);
    }

    fn kind() -> HostKind {
        HostKind {
            line: String::new(),
            vendor: String::new(),
            kernel: String::new(),
            paging: "NPT".to_owned(),
            is_guest: false,
            tdp_mmu: None,
            eager_split: None,
            modification_log: None,
            cpus: 2,
            version: (6, 18),
        }
    }

    #[test]
    fn time_and_cpu_time_that_part_are_said() {
        let kind = kind();
        // Two threads of 1.5 ms each.
        let calm = rows(&[vec![phase(3e6, 1.6e6, 1.0)]]);
        assert!(warnings(&calm, &kind).is_empty());
        let busy = rows(&[vec![phase(3e6, 2.4e6, 1.0)]]);
        assert!(warnings(&busy, &kind)[0].contains("dirty 1"));
    }
    #[test]
    fn a_computer_that_was_slower_for_a_while_is_said() {
        let at = |paces: [f64; 3]| {
            let rounds = paces.map(|pace| vec![Phase { pace, ..phase(3e6, 1.6e6, 1.0) }]);
            warnings(&rows(&rounds), &kind())
        };
        assert!(at([4e4, 4.3e4, 4.1e4]).is_empty());
        let said = at([4e4, 5.4e4, 4.1e4]).join("");
        assert!(said.contains("by up to 35 %, around 1 of 3 times"), "{said}");
        // An older report does not say it.
        assert!(at([0.0; 3]).is_empty());
    }
}

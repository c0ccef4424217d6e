//! The report: a row for each operation of each crate, with its ratios.

use serde::Serialize;

use crate::compare::candidates::Candidate;
use crate::compare::runner::Measurement;
use crate::compare::subject::{BARE, OURS, Operation};
use crate::format::Architecture;
use crate::memory::arena::Memory;
use crate::output::report;
use crate::stats::{self, Samples};

/// The comparison as it is printed.
pub type Report = report::Report<Parameters, Row>;

/// The parameters of one range, or of scattered calls.
#[derive(Serialize, Default)]
pub struct Parameters {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Pages of scattered calls; none of one range.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pages: Vec<u64>,
    pub page_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range_bytes: Option<u64>,
    pub tables: u64,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub memory: &'static [Memory],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<Architecture>,
    pub crates: Vec<&'static str>,
    pub rounds: u32,
}

impl Parameters {
    /// The number of rounds in words.
    pub fn rounds(&self) -> String {
        report::counted(u64::from(self.rounds), "round", "rounds")
    }
}

/// The kind of work that a row is about.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// One range, in tables in such memory.
    Range(Memory),
    /// Scattered calls in a format, of so many pages.
    Scattered(Architecture, u64),
}

/// An operation of a crate.
#[derive(Serialize)]
pub struct Row {
    #[serde(rename = "crate")]
    pub name: &'static str,
    pub version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Architecture>,
    pub operation: Operation,
    pub method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Of scattered calls: whether hardware may set flags in entries, which the crate keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hardware_flags: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages: Option<u64>,
    #[serde(flatten)]
    pub time: Time,
    pub ratio_to_bare: Option<f64>,
    /// To the least time that the work takes.
    #[serde(skip)]
    pub ratio_to_least: Option<f64>,
    pub ratio_to_best_other: Option<f64>,
    /// Of an edit of live tables: to the same edit of tables that are out of use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_to_dead: Option<f64>,
    /// With hardware flags: to the best other crate and an exchange for each page, since that crate
    /// overwrites the flags.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_to_best_other_and_exchanges: Option<f64>,
    pub spread: f64,
    #[serde(rename = "samples_ns")]
    pub samples: Samples,
}

/// The median.
#[derive(Clone, Copy, Serialize)]
pub enum Time {
    /// Of one range.
    #[serde(rename = "ns_per_entry")]
    Entry(f64),
    /// Of scattered calls.
    #[serde(rename = "ns_per_call")]
    Call(f64),
}

impl Row {
    /// A row without ratios.
    pub fn new(
        candidate: &Candidate,
        operation: Operation,
        method: &'static str,
        kind: Kind,
        samples: Samples,
    ) -> Self {
        let median = samples.median();
        let (memory, scattered, time) = match kind {
            Kind::Range(memory) => (Some(memory), None, Time::Entry(median)),
            Kind::Scattered(format, pages) => (None, Some((format, pages)), Time::Call(median)),
        };
        Self {
            name: candidate.name,
            version: candidate.version(),
            format: scattered.map(|(format, _)| format),
            operation,
            method,
            memory,
            threads: memory.map(|_| 1),
            hardware_flags: scattered.map(|_| candidate.hardware_flags),
            pages: scattered.map(|(_, pages)| pages),
            time,
            ratio_to_bare: None,
            ratio_to_least: None,
            ratio_to_best_other: None,
            ratio_to_dead: None,
            ratio_to_best_other_and_exchanges: None,
            spread: samples.spread(),
            samples,
        }
    }

    /// The median in nanoseconds.
    pub fn ns(&self) -> f64 {
        let (Time::Entry(ns) | Time::Call(ns)) = self.time;
        ns
    }

    /// Whether it is about the engine that this program belongs to.
    pub fn is_ours(&self) -> bool {
        self.name == OURS
    }

    /// Whether it is about the bare loop.
    pub fn is_bare(&self) -> bool {
        self.name == BARE
    }

    /// The crate and its version.
    pub fn by(&self) -> String {
        format!("{} {}", self.name, self.version).trim_end().to_owned()
    }

    /// The ratio that the crate is judged by.
    pub fn against_best(&self) -> Option<f64> {
        self.ratio_to_best_other_and_exchanges.or(self.ratio_to_best_other)
    }
}

/// A ratio, unless the clock was too coarse for one of the two.
pub fn ratio(this: f64, that: f64) -> Option<f64> {
    (this > 0.0 && that > 0.0).then(|| this / that)
}

/// The rows of one run.
pub fn rows(candidates: &[Candidate], measured: Vec<Measurement>, kind: Kind) -> Vec<Row> {
    let medians: Vec<(&Candidate, Operation, f64)> = measured
        .iter()
        .map(|one| (&candidates[one.candidate], one.operation, one.samples.median()))
        .collect();
    let best = |operation, among: &dyn Fn(&Candidate) -> bool| {
        medians
            .iter()
            .filter(|(candidate, other, _)| *other == operation && among(candidate))
            .map(|(_, _, median)| *median)
            .min_by(f64::total_cmp)
    };
    let exchange = best(Operation::Exchange, &Candidate::is_bare);
    let row = |measurement: Measurement| {
        let this = &candidates[measurement.candidate];
        let (operation, method) = (measurement.operation, measurement.method);
        let median = measurement.samples.median();
        // An operation of the bare loop that hardware flags do not change is measured once.
        let bare = operation.bare().and_then(|operation| {
            best(operation, &|other| other.is_bare() && other.hardware_flags == this.hardware_flags)
                .or_else(|| best(operation, &Candidate::is_bare))
        });
        // A crate that refuses to map over something looks first: a load and a store, as in the
        // bare loop of protect.
        let least = match operation {
            Operation::Map => {
                best(Operation::Protect, &|other| other.is_bare() && !other.hardware_flags)
            }
            _ => bare,
        };
        let other = best(operation, &|other| !other.is_bare() && other.name != this.name)
            .filter(|_| !this.is_bare());
        let with_exchanges = other
            .zip(exchange)
            .filter(|_| this.hardware_flags)
            .map(|(other, exchange)| other + exchange);
        let dead = (operation == Operation::ProtectLive)
            .then(|| best(Operation::Protect, &|other| other.name == this.name))
            .flatten();
        Row {
            ratio_to_bare: bare.and_then(|bare| ratio(median, bare)),
            ratio_to_least: least.and_then(|least| ratio(median, least)),
            ratio_to_best_other: other.and_then(|other| ratio(other, median)),
            ratio_to_dead: dead.and_then(|dead| ratio(median, dead)),
            ratio_to_best_other_and_exchanges: with_exchanges
                .and_then(|other| ratio(other, median)),
            ..Row::new(this, operation, method, kind, measurement.samples)
        }
    };
    measured.into_iter().map(row).collect()
}

/// Warns if the bare loop scatters. It only touches memory, so the computer is the cause.
pub fn noise(rows: &[Row]) -> Option<String> {
    let worst =
        rows.iter().filter(|row| row.is_bare()).max_by(|a, b| a.spread.total_cmp(&b.spread))?;
    let at = match (worst.memory, worst.format, worst.pages) {
        (_, Some(format), Some(pages)) => format!("{}, {pages} at a time", format.name()),
        (memory, ..) => kind_of_memory(memory.unwrap_or(Memory::Warm)).to_owned(),
    };
    let name = worst.operation.name();
    stats::noise_warning(&format!("the bare loop of {name} ({at})"), &worst.samples)
}

/// The word for a kind of memory.
pub fn kind_of_memory(memory: Memory) -> &'static str {
    match memory {
        Memory::Warm => "warm",
        Memory::Cold => "cold",
    }
}

#[cfg(test)]
pub use tests::row;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::candidates::of_range;

    const WARM: Kind = Kind::Range(Memory::Warm);

    /// A row about one range, with `ns` as its only sample.
    pub fn row(name: &'static str, operation: Operation, method: &'static str, ns: f64) -> Row {
        let samples = [ns].into_iter().collect();
        let mut of = of_range(|_| false)[0];
        of.name = name;
        Row::new(&of, operation, method, WARM, samples)
    }

    fn measurement(candidate: usize, operation: Operation, ns: f64) -> Measurement {
        Measurement { candidate, operation, method: "", samples: [ns].into_iter().collect() }
    }

    #[test]
    fn ratios_are_to_the_limit_and_to_the_best_of_the_others() {
        let measured = vec![
            measurement(0, Operation::Map, 0.5),
            measurement(1, Operation::Map, 2.0),
            measurement(1, Operation::Detach, 0.1),
            measurement(2, Operation::Map, 1.0),
        ];
        let rows = rows(&of_range(|_| true), measured, WARM);
        let ratios = rows.iter().map(|row| (row.ratio_to_bare, row.ratio_to_best_other));
        let expected =
            [(Some(1.0), None), (Some(4.0), Some(0.5)), (None, None), (Some(2.0), Some(2.0))];
        assert!(ratios.eq(expected));
    }

    #[test]
    fn a_live_edit_is_held_against_the_dead_one_and_the_right_limit() {
        let measured = vec![
            measurement(0, Operation::Protect, 1.0),
            measurement(0, Operation::Exchange, 8.0),
            measurement(1, Operation::Protect, 2.0),
            measurement(1, Operation::ProtectLive, 3.0),
            measurement(1, Operation::ProtectHardware, 16.0),
        ];
        let rows = rows(&of_range(|_| true), measured, WARM);
        let ratios = rows.iter().skip(2).map(|row| (row.ratio_to_bare, row.ratio_to_dead));
        let expected = [(Some(2.0), None), (Some(3.0), Some(1.5)), (Some(2.0), None)];
        assert!(ratios.eq(expected));
    }
}

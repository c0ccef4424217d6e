//! The published measurement in a guest: the same kernel flushes by interrupts, and by hypercalls.

use std::time::Duration;

use serde_json::json;

use crate::boot::{Flush, Program};
use crate::hyperv::{self, Boot, said, value};
use crate::qemu::Ran;
use crate::x86_counters::{Count, NAMES};
use crate::{Error, Result, fetch, name_of, out, say};

/// vCPUs, and processors that they share.
const CASES: &[(u8, u8)] = &[(4, 1), (2, 2), (4, 2), (8, 2), (4, 4)];
const WAYS: [Flush; 2] = [Flush::Interrupt, Flush::Hypercall];
const LIMIT: Duration = Duration::from_secs(180);

/// One run.
struct Row {
    cpus: u8,
    processors: u8,
    way: Flush,
    line: String,
    /// Counts between the marks of the guest's program.
    counted: Vec<u64>,
}

impl Row {
    fn new(boot: &Boot<'_>, ran: &Ran) -> Result<Self> {
        let line = said(ran, "measure: ").next().map(String::from);
        Ok(Self {
            cpus: boot.cpus,
            processors: boot.processors,
            way: boot.flush,
            line: line.ok_or_else(|| Error::Failed("the guest has measured nothing".into()))?,
            counted: ran.counters.get(NAMES.len()..).map_or_else(Vec::new, <[u64]>::to_vec),
        })
    }

    fn count(&self, what: Count) -> u64 {
        self.counted.get(what as usize).copied().unwrap_or(0)
    }

    fn value(&self, name: &str) -> u64 {
        value(&self.line, name).unwrap_or(0)
    }

    fn calls(&self) -> u64 {
        [Count::Space, Count::List, Count::SpaceEx, Count::ListEx]
            .map(|what| self.count(what))
            .iter()
            .sum()
    }

    fn table(&self) -> String {
        let us = |name| self.value(name) as f64;
        let cycles = us("cycles").max(1.0);
        format!(
            "{:>5} {:>4} {:<9} {:>7.0} {:>7.0} {:>7.1} {:>6} {:>6} {:>7} {:>6} {:>6}",
            self.cpus,
            self.processors,
            name_of(&self.way),
            us("time_us") / 1e3,
            us("unmap_us") / cycles,
            us("longest_us") / 1e3,
            self.calls(),
            self.count(Count::Ipis),
            self.count(Count::Exits),
            self.count(Count::Told),
            self.count(Count::Entered),
        )
    }

    fn json(&self) -> String {
        let counted = NAMES.iter().zip(&self.counted);
        let counted: serde_json::Map<_, _> =
            counted.map(|(name, number)| ((*name).into(), json!(number))).collect();
        let measured: serde_json::Map<_, _> = self
            .line
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter_map(|(name, value)| Some((name.into(), json!(value.parse::<u64>().ok()?))))
            .collect();
        json!({
            "vcpus": self.cpus,
            "processors": self.processors,
            "flush": name_of(&self.way),
            "measured": measured,
            "counted": counted,
        })
        .to_string()
    }
}

/// `cargo xtask tlb-flush`.
///
/// # Errors
/// A guest does not come to its end.
pub fn run(json: bool, rounds: u32) -> Result<()> {
    let files = fetch::everything_x86(None)?;
    if !json {
        say!("vCPUs CPUs way       time/ms unmap/us longest  calls   IPIs   exits   told forgot");
    }
    for &(cpus, processors) in CASES {
        // One processor counts its instructions: one is a nanosecond.
        let counted = ["-icount".into(), "shift=0,sleep=off".into()];
        for way in WAYS {
            let boot = Boot {
                cpus,
                processors,
                flush: way,
                guest: Program::Measure.words(rounds, 0),
                limit: Some(LIMIT),
                more: if processors == 1 { &counted } else { &[] },
                ..Boot::of(&files)
            };
            let ran = out::clocked("measuring", || hyperv::run(&boot, |_| (), |_| ()))?;
            hyperv::judge(&boot, Program::Measure, rounds, &ran).map_err(Error::Failed)?;
            let row = Row::new(&boot, &ran)?;
            match json {
                true => say!("{}", row.json()),
                false => say!("{}", row.table()),
            }
        }
    }
    Ok(())
}

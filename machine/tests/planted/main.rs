//! Planted bugs.
#[path = "../workloads/mod.rs"]
mod workloads;
use tablewright_machine::Rule;
use workloads::{Bug, Run, Workload, run};

fn env(name: &str) -> Option<u64> { std::env::var(name).ok().and_then(|n| n.parse().ok()) }
#[test]
fn quick() {
    let n: u64 = env("N").unwrap_or(300);
    let from: u64 = env("FROM").unwrap_or(1);
    let w = Workload::ALL[env("W").unwrap_or(0) as usize];
    for seed in from..from+n {
        let start = std::time::Instant::now();
        let sink: Option<tablewright_machine::trace::Sink> = std::env::var("TRACE").ok().map(|path| {
            use std::io::Write;
            let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
            Box::new(move |line: &str| writeln!(file, "{}", line.trim_end()).unwrap()) as _
        });
        let run = run(w, seed, None, sink);
        let t = start.elapsed().as_micros();
        if !run.is_good() || t > 9000 {
            println!("{seed}: {t} us acc {} entries {} {:?}", run.counts.accesses, run.counts.entries, run.outcome.as_ref().err());
            for v in run.violations.iter().take(2) { println!("  {v}"); }
        }
    }
}

use Bug::*;
use Rule::*;
const TABLE: &[(Bug, Workload, &[Rule])] = &[
    (NoBarrier, Workload::Edits, &[Invalidation]),
    (NoBarrierBeforeInvalidation, Workload::Edits, &[Invalidation]),
    (NoBarrierAfterMap, Workload::Edits, &[NoProgress]),
    (NoWait, Workload::Edits, &[FreedEarly]),
    (NoWaitInBreak, Workload::Edits, &[BreakBeforeMake]),
    (NoWaitInFlush, Workload::Edits, &[FreedEarly]),
    (NoInvalidation, Workload::Edits, &[FreedEarly]),
    (NoInvalidationInBreak, Workload::Edits, &[BreakBeforeMake]),
    (OnlyLocal, Workload::Edits, &[FreedEarly]),
    (HintOfAnotherLevel, Workload::Edits, &[Invalidation]),
    (HintWhereThereIsNone, Workload::Edits, &[Invalidation]),
    (TablesForgotten, Workload::Edits, &[Invalidation]),
    (RangeTooShort, Workload::Edits, &[FreedEarly]),
    (OnlyFirstPage, Workload::Edits, &[FreedEarly]),
    (AnotherIdentifier, Workload::Edits, &[Invalidation]),
    (FlushHoldsOne, Workload::Edits, &[FreedEarly]),
    (BreakLevelTooHigh, Workload::Edits, &[BreakBeforeMake]),
    (HardwareAccessUnknown, Workload::Edits, &[BreakBeforeMake]),
    (HardwareDirtyUnknown, Workload::Edits, &[FlagLost]),
    (LinkedByPlainStore, Workload::Edits, &[LinkedEarly]),
    (NotZeroed, Workload::Edits, &[LinkedEarly]),
    (ExchangeInTwoSteps, Workload::Edits, &[FlagLost]),
    (HiddenStore, Workload::Edits, &[StaleUse]),
    (FreedBeforeCompletion, Workload::Edits, &[FreedEarly]),
    (FreedWhileMapped, Workload::Edits, &[FreedEarly]),
    (ReusedBeforeCompletion, Workload::Edits, &[BreakBeforeMake]),
    (EditedTwice, Workload::Edits, &[BreakBeforeMake]),
    (FlushDropped, Workload::Edits, &[NeverInvalidated]),
    (NotCleaned, Workload::Edits, &[CacheMaintenance]),
    (CodeNotCleaned, Workload::Edits, &[CacheMaintenance]),
    (CodeNotRefetched, Workload::Edits, &[CacheMaintenance]),
];
#[test]
fn table() {
    for &(bug, workload, rules) in TABLE {
        let mut hits: std::collections::BTreeMap<String, (u64, u64)> = Default::default();
        let mut first = None;
        let mut example = String::new();
        for seed in 1..=500 {
            let run: Run = run(workload, seed, Some(bug), None);
            if let Some(v) = run.violations.first() {
                let e = hits.entry(format!("{:?}", v.rule)).or_insert((0, seed));
                e.0 += 1;
                if !rules.contains(&v.rule) && example.is_empty() { example = v.to_string(); }
                first.get_or_insert((seed, rules.contains(&v.rule)));
            } else if run.outcome.is_err() {
                let e = hits.entry(format!("{:?}", run.outcome.err())).or_insert((0, seed));
                e.0 += 1;
            }
        }
        println!("{bug:?}: {first:?} {hits:?} {}", &example[..example.len().min(230)]);
    }
}

//! The rounds: each operation is done by all subjects in turn before the next, so that what
//! disturbs the computer for a while disturbs all of them alike.

use std::hint::black_box;
use std::time::Instant;

use tablewright_walker::{Granule, Half, Regime};

use super::calls::{Calls, TABLES};
use super::candidates::Candidate;
use super::fault::{self, Told};
use super::subject::{Operation, Subject};
use crate::arena::{Arena, Memory};
use crate::error::Error;
use crate::format::Architecture;
use crate::judge::Tree;
use crate::progress::Progress;
use crate::random::Random;
use crate::stats::Samples;

/// The tables of pages, and those above them.
const ALL_TABLES: u64 = TABLES + 3;

/// Tables more than are needed: a table that is detached is held until the end of a round.
const SPARE: u64 = 16;

/// What was measured of one operation of one subject.
pub struct Measurement {
    /// Which of the candidates, by its place in the list.
    pub candidate: usize,
    /// What was timed.
    pub operation: Operation,
    /// How, where there is more than one way.
    pub method: &'static str,
    /// Nanoseconds for each call, one sample each round.
    pub samples: Samples,
}

/// Memory for the tables of every subject, one arena each, which is used for one comparison after
/// the other.
pub struct Arenas(Vec<Arena>);

impl Arenas {
    /// For as many subjects, and one more for faults.
    pub fn new(subjects: usize) -> Result<Self, Error> {
        (0..=subjects)
            .map(|_| Arena::new(ALL_TABLES + SPARE, 12, Memory::Warm))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// One of them, to ask the host about.
    pub fn first(&self) -> Option<Arena> {
        self.0.first().copied()
    }
}

fn regime(architecture: Architecture) -> Regime {
    match architecture {
        Architecture::Arm64 => Regime::Arm64Stage1 {
            granule: Granule::K4,
            wide: false,
        },
        Architecture::X86_64 => Regime::X86_64 { levels: 4 },
    }
}

/// One subject at work.
struct Worker<'a> {
    candidate: &'a Candidate,
    subject: Box<dyn Subject>,
    arena: Arena,
}

impl Worker<'_> {
    fn named<T>(&self, operation: &'static str, result: Result<T, String>) -> Result<T, Error> {
        result.map_err(|problem| Error::Subject {
            subject: self.candidate.name,
            operation,
            problem,
        })
    }

    /// Nanoseconds for each call, of the part in the middle.
    fn time(&mut self, operation: Operation, parts: &[Calls]) -> Result<f64, Error> {
        let mut samples = Samples::default();
        for calls in parts {
            let started = Instant::now();
            let result = self.subject.run(operation, black_box(calls));
            let elapsed = started.elapsed();
            let sum = black_box(self.named(operation.name(), result)?);
            if operation == Operation::Query && sum != calls.sum(true) {
                let problem = Err("found other pages than were mapped".to_owned());
                self.named(operation.name(), problem)?;
            }
            samples.push(elapsed.as_nanos() as f64 / calls.count() as f64);
        }
        Ok(samples.median())
    }

    /// Makes the tables.
    fn begin(&mut self, kept: Option<&Calls>) -> Result<(), Error> {
        // SAFETY: the subject that had this arena before has given every frame back, which `finish`
        // has checked.
        unsafe { self.arena.start_round() }?;
        let begun = self.subject.begin(self.arena);
        self.named("begin", begun)?;
        if let Some(kept) = kept {
            let mapped = self.subject.run(Operation::Map, kept);
            self.named("begin", mapped)?;
        }
        self.subject.go_live();
        Ok(())
    }

    fn finish(&mut self, kept: Option<&Calls>) -> Result<(), Error> {
        if let Some(kept) = kept {
            let unmapped = self.subject.run(Operation::Unmap, kept);
            self.named("finish", unmapped)?;
        }
        self.subject.finish();
        let result = if self.arena.misused() {
            Err("gave back a table twice, or one that is not ours".to_owned())
        } else if self.arena.held() != 0 {
            Err(format!("never gave back {} tables", self.arena.held()))
        } else {
            Ok(())
        };
        self.named("finish", result)
    }

    /// Reads every entry, as a processor would: what was asked for is mapped, and nothing else.
    fn check(
        &self,
        architecture: Architecture,
        operation: Operation,
        calls: &Calls,
        kept: Option<&Calls>,
    ) -> Result<(), Error> {
        let mapped = match operation {
            Operation::Map | Operation::Query => Some(true),
            Operation::Protect => Some(false),
            _ => None,
        };
        let tree = Tree {
            arena: self.arena,
            root: self.subject.root().unwrap_or(0),
            regime: regime(architecture),
            half: Half::Lower,
            hardware_dirty: self.candidate.hardware_flags,
        };
        let found = tree
            .check(calls.expected(kept, mapped), true, |_| ())
            .and_then(|found| match mapped {
                Some(_) if found.tables != ALL_TABLES => {
                    Err(format!("used {} tables, not {ALL_TABLES}", found.tables))
                }
                _ => Ok(()),
            });
        self.named(operation.name(), found)
    }
}

/// Runs `rounds` rounds after one that does not count, in which all tables are checked entry by
/// entry.
pub fn run(
    architecture: Architecture,
    candidates: &[Candidate],
    pages: u64,
    rounds: u32,
    arenas: &Arenas,
    progress: &mut Progress,
) -> Result<Vec<Measurement>, Error> {
    let calls = Calls::scattered(pages);
    let parts = calls.parts();
    let kept = Calls::kept(pages);
    let kept = kept.as_ref();
    let mut workers: Vec<Worker<'_>> = candidates
        .iter()
        .zip(&arenas.0)
        .map(|(candidate, &arena)| Worker {
            candidate,
            subject: (candidate.subject)(),
            arena,
        })
        .collect();
    let ours = candidates.iter().position(Candidate::is_ours);
    let mut figures = Figures(Vec::new());
    let mut order: Vec<usize> = (0..workers.len()).collect();
    let mut random = Random(pages);
    for round in 0..=rounds as usize {
        progress.step(&format!(
            "{}, {pages} at a time{}",
            architecture.name(),
            if round == 0 { ", checked" } else { "" }
        ));
        // Memory is not everywhere as fast, for what it shares caches with: each subject has each
        // arena in turn.
        for (number, worker) in workers.iter_mut().enumerate() {
            worker.arena = arenas.0[(number + round) % candidates.len()];
            worker.begin(kept)?;
        }
        for operation in Operation::ALL {
            // What is before a subject leaves the caches to it: no subject is always behind the
            // same other one.
            for last in (1..order.len()).rev() {
                order.swap(last, random.below(last as u64 + 1) as usize);
            }
            for &candidate in &order {
                let worker = &mut workers[candidate];
                let sample = worker.time(operation, &parts)?;
                if round == 0 {
                    worker.check(architecture, operation, &calls, kept)?;
                } else if !candidates[candidate].repeats(operation) {
                    figures.push(candidate, operation, "", sample);
                }
            }
        }
        // The bare loop is the first.
        let bare = &mut workers[0];
        let sample = bare.time(Operation::Exchange, &parts)?;
        if round > 0 {
            figures.push(0, Operation::Exchange, "", sample);
        }
        if let (1, Some(kept), Some(ours)) = (pages, kept, ours) {
            let sample = bare.time(Operation::Fault, &parts)?;
            bare.time(Operation::Unmap, &parts)?;
            if round > 0 {
                figures.push(0, Operation::Fault, "", sample);
            }
            let arena = arenas.0[candidates.len()];
            for told in Told::BOTH {
                // SAFETY: the round before has given every frame back, which it has checked.
                unsafe { arena.start_round() }?;
                let sample = fault::round(architecture, told, arena, &parts, kept);
                let sample = workers[ours].named(Operation::Fault.name(), sample)?;
                if round > 0 {
                    figures.push(ours, Operation::Fault, told.name(), sample);
                }
            }
        }
        for worker in &mut workers {
            worker.finish(kept)?;
        }
    }
    Ok(figures.0)
}

struct Figures(Vec<Measurement>);

impl Figures {
    fn push(&mut self, candidate: usize, operation: Operation, method: &'static str, sample: f64) {
        let this = |other: &&mut Measurement| {
            (other.candidate, other.operation, other.method) == (candidate, operation, method)
        };
        match self.0.iter_mut().find(this) {
            Some(measurement) => measurement.samples.push(sample),
            None => self.0.push(Measurement {
                candidate,
                operation,
                method,
                samples: [sample].into_iter().collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::candidates;
    use super::*;

    const BOTH: [Architecture; 2] = [Architecture::Arm64, Architecture::X86_64];

    #[test]
    fn every_subject_maps_protects_and_unmaps_what_the_walker_reads() {
        for architecture in BOTH {
            let candidates = candidates(architecture, |_| true);
            let arenas = Arenas::new(candidates.len()).unwrap();
            for pages in [1, 3, 16, 512] {
                let mut progress = Progress::new(1);
                let measured =
                    run(architecture, &candidates, pages, 0, &arenas, &mut progress).unwrap();
                assert!(measured.is_empty(), "the first round does not count");
            }
        }
    }

    /// What a faulty subject gets wrong.
    #[derive(Clone, Copy)]
    enum Fault {
        LeavesOneOut,
        ForgetsToProtect,
        ForgetsToUnmap,
        AnswersWrongly,
        TakesOneTableMore,
    }

    struct Faulty {
        inner: Box<dyn Subject>,
        fault: Fault,
        arena: Option<Arena>,
    }

    impl Subject for Faulty {
        fn begin(&mut self, arena: Arena) -> Result<(), String> {
            self.arena = Some(arena);
            self.inner.begin(arena)
        }

        fn go_live(&mut self) {
            self.inner.go_live();
        }

        fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
            match (operation, self.fault) {
                (Operation::Map, Fault::LeavesOneOut) => {
                    let mut fewer = Calls::scattered(calls.pages);
                    fewer.starts = calls.starts[1..].to_vec();
                    self.inner.run(operation, &fewer)
                }
                (Operation::Protect, Fault::ForgetsToProtect)
                | (Operation::Unmap, Fault::ForgetsToUnmap) => Ok(0),
                (Operation::Query, Fault::AnswersWrongly) => {
                    Ok(self.inner.run(operation, calls)? + 1)
                }
                (Operation::Map, Fault::TakesOneTableMore) => {
                    self.arena.and_then(Arena::take);
                    self.inner.run(operation, calls)
                }
                _ => self.inner.run(operation, calls),
            }
        }

        fn root(&self) -> Option<u64> {
            self.inner.root()
        }

        fn finish(&mut self) {
            self.inner.finish();
        }
    }

    fn faulty(fault: Fault) -> Box<dyn Subject> {
        let ours = candidates(Architecture::X86_64, |_| true)
            .into_iter()
            .find(Candidate::is_ours)
            .unwrap();
        Box::new(Faulty {
            inner: (ours.subject)(),
            fault,
            arena: None,
        })
    }

    #[test]
    fn every_planted_fault_is_caught() {
        type Make = fn() -> Box<dyn Subject>;
        let planted: [(Make, &str); 5] = [
            (|| faulty(Fault::LeavesOneOut), "faulty: map: 0x"),
            (|| faulty(Fault::ForgetsToProtect), "faulty: protect: 0x"),
            (|| faulty(Fault::ForgetsToUnmap), "faulty: unmap: 0x"),
            (
                || faulty(Fault::AnswersWrongly),
                "faulty: query: found other",
            ),
            (|| faulty(Fault::TakesOneTableMore), "faulty: map: took"),
        ];
        for (subject, message) in planted {
            let mut all = candidates(Architecture::X86_64, |_| false);
            all.push(Candidate {
                name: "faulty",
                version: "0",
                hardware_flags: false,
                subject,
            });
            let arenas = Arenas::new(all.len()).unwrap();
            let mut progress = Progress::new(1);
            let error = run(Architecture::X86_64, &all, 64, 0, &arenas, &mut progress)
                .map(drop)
                .unwrap_err()
                .to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}

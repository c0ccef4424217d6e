//! The rounds: every subject does the same work in every round, in an order that rotates, in the
//! same arena.

use std::time::Instant;

use super::candidates::Candidate;
use super::check;
use super::subject::{Course, Operation, Subject, Work};
use crate::arena::Arena;
use crate::error::Error;
use crate::format::Format;
use crate::progress::Progress;
use crate::stats::Samples;

/// What was measured of one operation of one subject.
pub struct Measurement {
    /// Which of the candidates, by its place in the list.
    pub candidate: usize,
    /// What was timed.
    pub operation: Operation,
    /// How, where there is more than one way.
    pub method: &'static str,
    /// Nanoseconds for each entry, one sample each round.
    pub samples: Samples,
}

/// Runs `rounds` rounds after one that does not count, in which all tables are checked entry by
/// entry.
pub fn run(
    candidates: &[&Candidate],
    work: Work,
    rounds: u32,
    arena: Arena,
    progress: &mut Progress,
) -> Result<Vec<Measurement>, Error> {
    let mut subjects: Vec<Box<dyn Subject>> = candidates
        .iter()
        .map(|candidate| (candidate.subject)())
        .collect();
    let mut measurements: Vec<Measurement> = Vec::new();
    for (candidate, subject) in subjects.iter().enumerate() {
        for (operation, method) in subject.courses().iter().copied().flat_map(parts) {
            let known = |other: &Measurement| other.is(candidate, operation, method);
            if !measurements.iter().any(known) {
                measurements.push(Measurement {
                    candidate,
                    operation,
                    method,
                    samples: Samples::default(),
                });
            }
        }
    }

    for round in 0..=rounds as usize {
        for turn in 0..subjects.len() {
            let candidate = (turn + round) % subjects.len();
            let name = candidates[candidate].name;
            if round == 0 {
                progress.step(&format!("{name}, checked"));
            } else {
                progress.step(name);
            }
            let subject = subjects[candidate].as_mut();
            for &course in subject.courses() {
                let mut cycle = Cycle {
                    name,
                    subject: &mut *subject,
                    arena,
                    work,
                    thorough: round == 0,
                };
                let nanoseconds = cycle.run(course)?;
                for ((operation, method), sample) in parts(course).into_iter().zip(nanoseconds) {
                    let this = |other: &&mut Measurement| other.is(candidate, operation, method);
                    if let Some(measurement) = measurements.iter_mut().find(this)
                        // One sample a round of what courses share.
                        && measurement.samples.len() < round
                    {
                        measurement.samples.push(sample);
                    }
                }
            }
        }
    }
    Ok(measurements)
}

impl Measurement {
    fn is(&self, candidate: usize, operation: Operation, method: &str) -> bool {
        (self.candidate, self.operation, self.method) == (candidate, operation, method)
    }
}

/// What is timed on a course, in order, each with how it is done.
fn parts(course: Course) -> [(Operation, &'static str); 3] {
    [
        (Operation::Map, ""),
        (course.users.protect(), ""),
        (course.operation, course.method),
    ]
}

/// One subject maps, protects and takes down once.
struct Cycle<'a> {
    name: &'static str,
    subject: &'a mut dyn Subject,
    arena: Arena,
    work: Work,
    thorough: bool,
}

impl Cycle<'_> {
    /// Nanoseconds for each entry, of each of the [`parts`].
    fn run(&mut self, course: Course) -> Result<[f64; 3], Error> {
        // SAFETY: the subject of the cycle before was finished, and gave every frame back (checked
        // below).
        unsafe { self.arena.start_round() }?;
        let begun = self.subject.begin(self.arena, self.work, course.users);
        self.named("begin", begun)?;

        let map = self.time(Operation::Map, |subject| subject.map())?;
        self.verify(Operation::Map, Some(true))?;
        let protect = self.time(course.users.protect(), |subject| subject.protect())?;
        self.verify(course.users.protect(), Some(false))?;
        let end = self.time(course.operation, |subject| subject.end(course))?;
        self.verify(course.operation, None)?;
        self.subject.finish();
        self.all_given_back(course.operation)?;
        Ok([map, protect, end])
    }

    fn time(
        &mut self,
        operation: Operation,
        call: impl FnOnce(&mut dyn Subject) -> Result<(), String>,
    ) -> Result<f64, Error> {
        let started = Instant::now();
        let result = call(self.subject);
        let elapsed = started.elapsed();
        self.named(operation.name(), result)?;
        Ok(elapsed.as_nanos() as f64 / self.work.entries() as f64)
    }

    /// `mapped` says whether the range is mapped, and writable.
    fn verify(&self, operation: Operation, mapped: Option<bool>) -> Result<(), Error> {
        let result = check::spots(self.subject, self.work, mapped).and_then(|()| match mapped {
            Some(_) if self.arena.taken() != self.work.tables() => Err(format!(
                "took {} tables, not {}",
                self.arena.taken(),
                self.work.tables()
            )),
            Some(writable) if self.thorough => {
                check::full(self.subject, self.arena, self.work, writable)
            }
            // Only the tables above those that cover nothing but the range may be left. The bare
            // loop, which has no root, clears without giving back.
            None if operation == Operation::Unmap
                && self.subject.root().is_some()
                && self.arena.held() >= u64::from(Format::COMMON.levels()) =>
            {
                Err(format!("kept {} tables", self.arena.held()))
            }
            _ => Ok(()),
        });
        self.named(operation.name(), result)
    }

    fn all_given_back(&self, operation: Operation) -> Result<(), Error> {
        let result = if self.arena.misused() {
            Err("gave back a table twice, or one that is not ours".to_owned())
        } else if self.arena.held() != 0 {
            Err(format!("never gave back {} tables", self.arena.held()))
        } else {
            Ok(())
        };
        self.named(operation.name(), result)
    }

    fn named(&self, operation: &'static str, result: Result<(), String>) -> Result<(), Error> {
        result.map_err(|problem| Error::Subject {
            subject: self.name,
            operation,
            problem,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::CANDIDATES;
    use super::super::subject::{Encoding, Leaf, Users};
    use super::*;
    use crate::arena::Memory;

    /// What a faulty subject gets wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        TakesOneTableMore,
        ForgetsToProtect,
        ForgetsToUnmap,
        KeepsATable,
        GivesBackTwice,
    }

    /// A right subject with one fault planted.
    struct Faulty {
        inner: Box<dyn Subject>,
        fault: Fault,
        arena: Option<Arena>,
    }

    impl Subject for Faulty {
        fn encoding(&self) -> Encoding {
            self.inner.encoding()
        }

        fn courses(&self) -> &'static [Course] {
            self.inner.courses()
        }

        fn begin(&mut self, arena: Arena, work: Work, users: Users) -> Result<(), String> {
            self.arena = Some(arena);
            self.inner.begin(arena, work, users)
        }

        fn map(&mut self) -> Result<(), String> {
            if self.fault == Fault::TakesOneTableMore
                && let Some(arena) = self.arena
            {
                arena.take();
            }
            self.inner.map()
        }

        fn protect(&mut self) -> Result<(), String> {
            match self.fault {
                Fault::ForgetsToProtect => Ok(()),
                _ => self.inner.protect(),
            }
        }

        fn end(&mut self, course: Course) -> Result<(), String> {
            match self.fault {
                Fault::ForgetsToUnmap => Ok(()),
                _ => self.inner.end(course),
            }
        }

        fn query(&self, virtual_address: u64) -> Option<Leaf> {
            self.inner.query(virtual_address)
        }

        fn root(&self) -> Option<u64> {
            self.inner.root()
        }

        fn finish(&mut self) {
            let root = self.inner.root();
            self.inner.finish();
            match (self.fault, self.arena, root) {
                (Fault::KeepsATable, Some(arena), _) => drop(arena.take()),
                (Fault::GivesBackTwice, Some(arena), Some(root)) => arena.give_back(root as usize),
                _ => {}
            }
        }
    }

    fn caught(subject: fn() -> Box<dyn Subject>) -> String {
        let candidate = Candidate {
            name: "faulty",
            version: "0",
            subject,
        };
        let work = Work { bytes: 4 << 20 };
        let arena = Arena::new(work.tables() + 1, 12, Memory::Warm).unwrap();
        run(&[&candidate], work, 1, arena, &mut Progress::new(2))
            .map(drop)
            .unwrap_err()
            .to_string()
    }

    fn plant(fault: Fault) -> Box<dyn Subject> {
        Box::new(Faulty {
            inner: (CANDIDATES[0].subject)(),
            fault,
            arena: None,
        })
    }

    #[test]
    fn every_planted_fault_is_caught() {
        for (message, part) in [
            (
                caught(|| plant(Fault::TakesOneTableMore)),
                "faulty: map: took 6 tables, not 5",
            ),
            (
                caught(|| plant(Fault::ForgetsToProtect)),
                "faulty: protect: 0x8000000000 is mapped to",
            ),
            (
                caught(|| plant(Fault::ForgetsToUnmap)),
                "faulty: unmap: 0x8000000000 is still mapped",
            ),
            (
                caught(|| plant(Fault::KeepsATable)),
                "faulty: unmap: never gave back 1 tables",
            ),
            (
                caught(|| plant(Fault::GivesBackTwice)),
                "faulty: unmap: gave back a table twice",
            ),
        ] {
            assert!(message.starts_with(part), "{message}");
        }
    }
}

//! The rounds. Every subject does the same work in every round; a part that is not timed checks
//! what it did.

use std::hint::black_box;
use std::time::Instant;

use tablewright_walker::{Granule, Half, Regime};

use crate::compare::calls::{self, Calls, MOST, PAGE, PHYSICAL, TABLES, VIRTUAL};
use crate::compare::candidates::Candidate;
use crate::compare::fault;
use crate::compare::subject::{Operation, Subject, Users};
use crate::error::Error;
use crate::format::{Architecture, Format};
use crate::memory::arena::{Arena, Memory};
use crate::memory::judge::Tree;
use crate::output::progress::Progress;
use crate::random::Random;
use crate::stats::Samples;

/// Spare tables of an arena: a detached table is held until the end of a round, and two threads
/// each have half of them, with the upper tables.
const SPARE: u64 = 16;

/// The samples of one operation of one candidate.
pub struct Measurement {
    /// The place of the candidate in the list.
    pub candidate: usize,
    /// The timed operation.
    pub operation: Operation,
    /// The calls that make it up, if a crate has more than one way.
    pub method: &'static str,
    /// Nanoseconds, one sample each round: for each entry of a range, or for each scattered call.
    pub samples: Samples,
}

/// The calls of a round.
struct Plan {
    calls: Calls,
    /// Those calls, in the parts that are timed.
    parts: Vec<Calls>,
    /// Pages that stay mapped between the calls.
    kept: Option<Calls>,
    /// Tables of the mapping.
    tables: u64,
    /// Whether there is one call for all pages, instead of scattered ones.
    is_range: bool,
}

impl Plan {
    fn range(bytes: u64) -> Self {
        let calls = Calls::range(bytes);
        Self {
            parts: calls.parts(),
            calls,
            kept: None,
            tables: calls::tables(bytes),
            is_range: true,
        }
    }

    fn scattered(pages: u64) -> Self {
        let calls = Calls::scattered(pages);
        Self {
            parts: calls.parts(),
            calls,
            kept: Calls::kept(pages),
            tables: calls::tables(TABLES * MOST * PAGE),
            is_range: false,
        }
    }
}

/// An arena for one range.
pub fn arena(bytes: u64, memory: Memory) -> Result<Arena, Error> {
    let shift = Format::COMMON.page_shift();
    Arena::new(calls::tables(bytes) + SPARE, shift, memory)
}

/// Arenas for scattered calls: one for each subject, and one for faults.
pub struct Arenas(Vec<Arena>);

impl Arenas {
    /// Arenas for as many subjects.
    pub fn new(subjects: usize) -> Result<Self, Error> {
        (0..=subjects)
            .map(|_| arena(TABLES * MOST * PAGE, Memory::Warm))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// One of them, to ask the host about.
    pub fn first(&self) -> Option<Arena> {
        self.0.first().copied()
    }
}

/// One subject at work.
struct Worker<'a> {
    number: usize,
    candidate: &'a Candidate,
    subject: Box<dyn Subject>,
    arena: Arena,
    plan: &'a Plan,
    users: Users,
    round: usize,
}

impl<'a> Worker<'a> {
    fn all(
        candidates: &'a [Candidate],
        plan: &'a Plan,
        arena: impl Fn(usize) -> Arena,
    ) -> Vec<Self> {
        let worker = |(number, candidate): (usize, &'a Candidate)| Self {
            number,
            candidate,
            subject: (candidate.subject)(),
            arena: arena(number),
            plan,
            users: candidate.users(),
            round: 0,
        };
        candidates.iter().enumerate().map(worker).collect()
    }

    fn named<T>(&self, operation: &'static str, result: Result<T, String>) -> Result<T, Error> {
        result.map_err(|problem| Error::Subject {
            subject: self.candidate.name,
            operation,
            problem,
        })
    }

    /// Makes the space, and maps what is kept.
    fn begin(&mut self) -> Result<(), Error> {
        // SAFETY: the subject that had this arena before has given every frame back, which `finish`
        // has checked.
        unsafe { self.arena.start_round() }?;
        let plan = self.plan;
        let begun = self.subject.begin(self.arena, self.users, &plan.calls);
        self.named("begin", begun)?;
        if let Some(kept) = &plan.kept {
            let mapped = self.subject.run(Operation::Map, kept);
            self.named("begin", mapped)?;
        }
        if !plan.is_range {
            self.subject.go_live();
        }
        Ok(())
    }

    /// Does an operation, checks it, and keeps its time unless this is round 0.
    fn step(
        &mut self,
        (operation, method): (Operation, &'static str),
        measured: &mut Vec<Measurement>,
    ) -> Result<(), Error> {
        let sample = self.time(operation, method)?;
        if self.plan.is_range && operation == Operation::Map && self.users != Users::None {
            self.subject.go_live();
        }
        let checked = self.check(operation);
        self.named(operation.name(), checked)?;
        if self.round > 0 && !self.candidate.repeats(operation) {
            keep(measured, self.number, operation, method, self.round, sample);
        }
        Ok(())
    }

    /// Nanoseconds for each call, or for each entry of a range: the median of the parts.
    fn time(&mut self, operation: Operation, method: &'static str) -> Result<f64, Error> {
        let plan = self.plan;
        let reclaims = plan.is_range && operation == Operation::Unmap;
        let mut samples = Samples::default();
        for calls in &plan.parts {
            let calls = black_box(calls);
            let started = Instant::now();
            let mut result = self.subject.run(operation.edit(), calls);
            if reclaims && result.is_ok() {
                result = self.subject.reclaim(method, calls).map(|()| 0);
            }
            let elapsed = started.elapsed();
            let sum = black_box(self.named(operation.name(), result)?);
            if operation == Operation::Query && sum != calls.sum(true) {
                let problem = Err("found other pages than were mapped".to_owned());
                self.named(operation.name(), problem)?;
            }
            let count = match plan.is_range {
                true => calls.entries() as f64,
                false => calls.count() as f64,
            };
            samples.push(elapsed.as_nanos() as f64 / count);
        }
        Ok(samples.median())
    }

    /// Checks the tables after an operation: of a range a few pages in every round; in round 0
    /// every entry, as a processor would read it.
    fn check(&mut self, operation: Operation) -> Result<(), String> {
        let plan = self.plan;
        let mapped = match operation.edit() {
            Operation::Map | Operation::Query | Operation::Fault => Some(true),
            Operation::Protect => Some(false),
            _ => None,
        };
        let taken = self.arena.taken();
        if plan.is_range && self.subject.root().is_some() {
            self.spots(mapped)?;
        }
        if plan.is_range && mapped.is_some() && taken != plan.tables {
            return Err(format!("took {taken} tables, not {}", plan.tables));
        }
        // The bare loop of a range has no root, and keeps its tables.
        let Some(root) = self.subject.root() else {
            return Ok(());
        };
        // Only the tables above those that cover nothing but the range may be left.
        let held = self.arena.held();
        let unmapped = plan.is_range && operation == Operation::Unmap;
        if unmapped && held >= u64::from(Format::COMMON.levels()) {
            return Err(format!("kept {held} tables"));
        }
        if self.round > 0 || (plan.is_range && mapped.is_none()) {
            return Ok(());
        }
        let tree = Tree {
            arena: self.arena,
            root,
            regime: regime(self.candidate.format),
            half: Half::Lower,
            hardware_dirty: self.candidate.hardware_flags,
        };
        let expected = plan.calls.expected(plan.kept.as_ref(), mapped);
        let used = tree.check(expected, true, |_| ())?.tables;
        if mapped.is_some() && used != plan.tables {
            return Err(format!("used {used} tables, not {}", plan.tables));
        }
        Ok(())
    }

    /// Asks the subject about a few pages: the first, the last, some between, and the neighbours of
    /// the range.
    fn spots(&mut self, mapped: Option<bool>) -> Result<(), String> {
        let bytes = self.plan.calls.bytes();
        let last = bytes - PAGE;
        // A crate refuses to answer for what is not mapped, or has no answer.
        let mut query = |at| {
            let answer = self.subject.run(Operation::Query, &Calls::page(at));
            answer.ok().filter(|answer| *answer != 0)
        };
        for outside in [VIRTUAL - PAGE, VIRTUAL + bytes] {
            if outside < 1 << 47 && query(outside).is_some() {
                return Err(format!("{outside:#x} is mapped, outside the range"));
            }
        }
        for offset in [0, last / 3, last / 2, last].map(|offset| offset / PAGE * PAGE) {
            let (at, found) = (VIRTUAL + offset, query(VIRTUAL + offset));
            let right = mapped.map(|writable| calls::answer(PHYSICAL + offset, writable));
            if found == right {
                continue;
            }
            return Err(match right {
                Some(right) => {
                    format!("{at:#x} is mapped to {found:x?}, not {right:x} (odd: writable)")
                }
                None => format!("{at:#x} is still mapped"),
            });
        }
        Ok(())
    }

    /// Gives all tables back.
    fn finish(&mut self) -> Result<(), Error> {
        if let Some(kept) = &self.plan.kept {
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
}

fn regime(architecture: Architecture) -> Regime {
    match architecture {
        Architecture::Arm64 => Regime::Arm64Stage1 { granule: Granule::K4, wide: false },
        Architecture::X86_64 => Regime::X86_64 { levels: 4 },
        Architecture::Riscv64 => Regime::Riscv { levels: 4, guest: false },
    }
}

/// Keeps a sample, one for each round.
fn keep(
    measured: &mut Vec<Measurement>,
    candidate: usize,
    operation: Operation,
    method: &'static str,
    round: usize,
    sample: f64,
) {
    let this = |other: &&mut Measurement| {
        (other.candidate, other.operation, other.method) == (candidate, operation, method)
    };
    match measured.iter_mut().find(this) {
        // Courses that share an operation measure it once.
        Some(known) if known.samples.len() < round => known.samples.push(sample),
        Some(_) => {}
        None => measured.push(Measurement {
            candidate,
            operation,
            method,
            samples: [sample].into_iter().collect(),
        }),
    }
}

/// Maps, protects and takes down one range: in each round each candidate on each of its courses, in
/// an order that rotates, in one arena. Round 0 does not count.
pub fn range(
    candidates: &[Candidate],
    bytes: u64,
    rounds: u32,
    arena: Arena,
    progress: &mut Progress,
) -> Result<Vec<Measurement>, Error> {
    let plan = Plan::range(bytes);
    let mut workers = Worker::all(candidates, &plan, |_| arena);
    let mut measured = Vec::new();
    for round in 0..=rounds as usize {
        for turn in 0..workers.len() {
            let worker = &mut workers[(turn + round) % candidates.len()];
            let name = worker.candidate.name;
            match round {
                0 => progress.step(&format!("{name}, checked")),
                _ => progress.step(name),
            }
            worker.round = round;
            for course in worker.candidate.courses {
                worker.users = course.users;
                worker.begin()?;
                for step in course.steps() {
                    worker.step(step, &mut measured)?;
                }
                worker.finish()?;
            }
        }
    }
    measured.sort_by_key(|one| one.candidate);
    Ok(measured)
}

/// Maps, queries, protects and unmaps scattered calls: each operation by all candidates in turn
/// before the next, so that a disturbance hits all of them alike. Round 0 does not count.
pub fn scattered(
    candidates: &[Candidate],
    pages: u64,
    rounds: u32,
    arenas: &Arenas,
    progress: &mut Progress,
) -> Result<Vec<Measurement>, Error> {
    let plan = Plan::scattered(pages);
    let mut workers = Worker::all(candidates, &plan, |number| arenas.0[number]);
    let ours = candidates.iter().position(Candidate::is_ours);
    let format = candidates.first().map_or(Architecture::HOST, |one| one.format);
    let mut measured = Vec::new();
    let mut order: Vec<usize> = (0..workers.len()).collect();
    let mut random = Random(pages);
    for round in 0..=rounds as usize {
        let checked = if round == 0 { ", checked" } else { "" };
        progress.step(&format!("{}, {pages} at a time{checked}", format.name()));
        // Memory differs in speed, by what it shares caches with: each subject has each arena in
        // turn.
        for (number, worker) in workers.iter_mut().enumerate() {
            worker.arena = arenas.0[(number + round) % candidates.len()];
            worker.round = round;
            worker.begin()?;
        }
        for operation in Operation::SCATTERED {
            // A subject finds in caches what the one before has left: no subject always follows
            // another.
            for last in (1..order.len()).rev() {
                order.swap(last, random.below(last as u64 + 1) as usize);
            }
            for &candidate in &order {
                workers[candidate].step((operation, ""), &mut measured)?;
            }
        }
        let bare = &mut workers[0];
        bare.step((Operation::Exchange, ""), &mut measured)?;
        if let (1, Some(kept), Some(ours)) = (pages, &plan.kept, ours) {
            bare.step((Operation::Fault, ""), &mut measured)?;
            bare.time(Operation::Unmap, "")?;
            let arena = arenas.0[candidates.len()];
            for (way, method) in fault::WAYS.into_iter().enumerate() {
                // SAFETY: the round before has given every frame back, which it has checked (1.).
                let sample = unsafe { fault::round(format, way, arena, &plan.parts, kept) };
                let sample = workers[ours].named(Operation::Fault.name(), sample)?;
                if round > 0 {
                    keep(&mut measured, ours, Operation::Fault, method, round, sample);
                }
            }
        }
        for worker in &mut workers {
            worker.finish()?;
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::compare::candidates::{of_format, of_range};
    use crate::compare::subject::Course;

    const BYTES: u64 = 4 << 20;

    #[test]
    fn every_subject_does_one_range_right() {
        let candidates = of_range(|_| true);
        for memory in [Memory::Warm, Memory::Cold] {
            let arena = arena(BYTES, memory).unwrap();
            let measured = range(&candidates, BYTES, 1, arena, &mut Progress::new(1)).unwrap();
            assert!(measured.len() >= candidates.len() * 3);
        }
    }

    #[test]
    fn every_subject_does_scattered_calls_right() {
        for format in [Architecture::Arm64, Architecture::X86_64, Architecture::Riscv64] {
            let candidates = of_format(format, |_| true);
            let arenas = Arenas::new(candidates.len()).unwrap();
            for pages in [1, 3, 16, 512] {
                let mut progress = Progress::new(1);
                let measured = scattered(&candidates, pages, 0, &arenas, &mut progress).unwrap();
                assert!(measured.is_empty(), "the first round does not count");
            }
        }
    }

    #[test]
    fn running_out_of_tables_is_an_error_of_the_subject() {
        let arena = Arena::new(3, 12, Memory::Warm).unwrap();
        let bare = of_range(|_| false);
        let error = range(&bare, BYTES, 1, arena, &mut Progress::new(1)).map(drop);
        assert_eq!(error.unwrap_err().to_string(), "bare: map: out of tables");
    }

    /// Maps with every subject, lets `spoil` change one entry of the last table taken, a table of
    /// pages, and checks.
    fn verdicts(spoil: fn(Architecture, u64) -> u64) -> Vec<Result<(), String>> {
        let (candidates, plan) = (of_range(|_| true), Plan::range(BYTES));
        let verdict = |mut worker: Worker<'_>| {
            worker.begin().unwrap();
            worker.time(Operation::Map, "").unwrap();
            let last = worker.subject.root().unwrap() + (plan.tables - 1) * 4096;
            let frame = std::ptr::with_exposed_provenance_mut(last as usize);
            // SAFETY: the arena hands out its frames in order, so this is the last one taken; it is
            // held by the subject, which keeps no reference into it between calls.
            let entries = unsafe { worker.arena.entries(std::ptr::NonNull::new(frame).unwrap()) };
            let spoiled = spoil(worker.candidate.format, entries[77].load(Relaxed));
            entries[77].store(spoiled, Relaxed);
            let verdict = worker.check(Operation::Map);
            worker.subject.finish();
            verdict
        };
        let arena = |_| arena(BYTES, Memory::Warm).unwrap();
        let workers = Worker::all(&candidates[1..], &plan, arena).into_iter();
        workers.map(verdict).collect()
    }

    #[test]
    fn one_wrong_entry_in_a_thousand_is_found() {
        assert!(verdicts(|_, entry| entry).iter().all(Result::is_ok));
        let missing = verdicts(|_, _| 0);
        let elsewhere = verdicts(|_, entry| entry + 0x1000);
        let read_only = verdicts(|format, entry| match format {
            Architecture::Arm64 => entry | 1 << 7,
            Architecture::X86_64 => entry & !2,
            Architecture::Riscv64 => entry & !4,
        });
        for verdict in missing.iter().chain(&elsewhere).chain(&read_only) {
            let problem = verdict.as_ref().unwrap_err();
            assert!(problem.contains("mapped"), "{problem}");
        }
    }

    /// The mistake of a faulty subject.
    #[derive(Clone, Copy, PartialEq)]
    enum Mistake {
        LeavesOneOut,
        SkipsProtect,
        SkipsUnmap,
        AnswersWrongly,
        TakesOneTableMore,
        KeepsATable,
        GivesBackTwice,
    }

    /// A right subject with one mistake planted.
    struct Faulty {
        inner: Box<dyn Subject>,
        mistake: Mistake,
        arena: Option<Arena>,
    }

    impl Subject for Faulty {
        fn begin(&mut self, arena: Arena, users: Users, calls: &Calls) -> Result<(), String> {
            self.arena = Some(arena);
            self.inner.begin(arena, users, calls)
        }

        fn go_live(&mut self) {
            self.inner.go_live();
        }

        fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
            match (operation, self.mistake) {
                (Operation::Map, Mistake::LeavesOneOut) => {
                    let mut fewer = calls.clone();
                    fewer.starts.remove(0);
                    self.inner.run(operation, &fewer)
                }
                (Operation::Protect, Mistake::SkipsProtect)
                | (Operation::Unmap, Mistake::SkipsUnmap) => Ok(0),
                (Operation::Query, Mistake::AnswersWrongly) => {
                    Ok(self.inner.run(operation, calls)? + 1)
                }
                (Operation::Map, Mistake::TakesOneTableMore) => {
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
            let root = self.inner.root();
            self.inner.finish();
            match (self.mistake, self.arena, root) {
                (Mistake::KeepsATable, Some(arena), _) => drop(arena.take()),
                (Mistake::GivesBackTwice, Some(arena), Some(root)) => {
                    arena.give_back(root as usize);
                }
                _ => {}
            }
        }
    }

    macro_rules! faulty {
        ($mistake:ident) => {
            || {
                let ours = of_range(|_| true).into_iter().find(Candidate::is_ours);
                Box::new(Faulty {
                    inner: (ours.unwrap().subject)(),
                    mistake: Mistake::$mistake,
                    arena: None,
                })
            }
        };
    }

    type Make = fn() -> Box<dyn Subject>;

    fn candidate(subject: Make) -> Candidate {
        const UNMAP: &[Course] = &[Course::unused(Operation::Unmap, "")];
        Candidate::new("faulty", Architecture::X86_64, subject).with_courses(UNMAP)
    }

    #[test]
    fn every_mistake_in_one_range_is_caught() {
        let planted: [(Make, &str); 6] = [
            (faulty!(LeavesOneOut), "map: 0x8000000000 is mapped to None"),
            (faulty!(SkipsProtect), "protect: 0x8000000000 is mapped to"),
            (faulty!(SkipsUnmap), "unmap: 0x8000000000 is still mapped"),
            (faulty!(TakesOneTableMore), "map: took 6 tables, not 5"),
            (faulty!(KeepsATable), "finish: never gave back 1 tables"),
            (faulty!(GivesBackTwice), "finish: gave back a table twice"),
        ];
        for (subject, message) in planted {
            let arena = arena(BYTES, Memory::Warm).unwrap();
            let faulty = [candidate(subject)];
            let error = range(&faulty, BYTES, 1, arena, &mut Progress::new(2)).map(drop);
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with(&format!("faulty: {message}")), "{error}");
        }
    }

    #[test]
    fn every_mistake_in_scattered_calls_is_caught() {
        let planted: [(Make, &str); 5] = [
            (faulty!(LeavesOneOut), "map: 0x"),
            (faulty!(SkipsProtect), "protect: 0x"),
            (faulty!(SkipsUnmap), "unmap: 0x"),
            (faulty!(AnswersWrongly), "query: found other"),
            (faulty!(TakesOneTableMore), "map: took"),
        ];
        for (subject, message) in planted {
            let mut all = of_format(Architecture::X86_64, |_| false);
            all.push(candidate(subject));
            let arenas = Arenas::new(all.len()).unwrap();
            let error = scattered(&all, 64, 0, &arenas, &mut Progress::new(1)).map(drop);
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with(&format!("faulty: {message}")), "{error}");
        }
    }
}

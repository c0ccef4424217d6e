//! A list of tests: which are run, how often, and how many at once; and what is said of them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::out::{self, Clock};
use crate::{Arch, Error, Result};

/// A test's body.
pub type Run<'a, C> = Box<dyn Fn(&C) -> Result<Outcome> + Sync + 'a>;

/// A test.
pub struct Case<'a, C> {
    /// Its name.
    pub name: String,
    /// Whether it is part of the short set.
    pub short: bool,
    /// The processors that are emulated.
    pub arch: Arch,
    /// Its body.
    pub run: Run<'a, C>,
}

/// A test's outcome.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The error, if it did not come out as it should.
    pub wrong: Option<String>,
    /// A remark on it, in a few words.
    pub brief: String,
    /// Lines below.
    pub more: Vec<String>,
}

impl Outcome {
    /// It has come out as it should, and there is nothing to be said of it.
    ///
    /// # Errors
    /// None: what was not to be run has an error already.
    pub fn right((): ()) -> Result<Self> {
        Ok(Self::default())
    }
}

/// How tests are run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Each so often.
    pub repeat: u16,
    /// The number of tests at once.
    pub jobs: usize,
}

/// The outcomes of one test, each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// It came out as it should.
    pub passed: u32,
    /// It did not.
    pub failed: u32,
    /// Runs whose requirements are not there.
    pub skipped: u32,
}

impl Tally {
    /// How often it was run.
    fn run(self) -> u32 {
        self.passed + self.failed
    }
}

/// Runs tests, and says of each what came out, as soon as it is known. An interruption ends it:
/// what ran then does not count. Returns what came of each, and whether it was interrupted.
pub fn run<C: Sync>(cases: &[Case<'_, C>], context: &C, how: How) -> (Vec<Tally>, bool) {
    let repeat = usize::from(how.repeat);
    let all = cases.len() * repeat;
    let next = AtomicUsize::new(0);
    let clock = Clock::start("");
    let state = Mutex::new((vec![Tally::default(); cases.len()], Vec::<&str>::new()));
    let lock = || state.lock().unwrap_or_else(|broken| broken.into_inner());
    let show = |running: &[&str], done: u32| {
        clock.message(format!("{done} of {all} done; {}", running.join(", ")));
    };
    let done = |tallies: &[Tally]| tallies.iter().map(|one| one.run() + one.skipped).sum();
    let work = || {
        while !out::is_interrupted() {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(index / repeat).filter(|_| index < all) else {
                return;
            };
            {
                let (tallies, running) = &mut *lock();
                running.push(&case.name);
                show(running, done(tallies));
            }
            let started = Instant::now();
            let ran = (case.run)(context);
            let took = started.elapsed();
            let (tallies, running) = &mut *lock();
            if let Some(place) = running.iter().position(|name| *name == case.name) {
                running.swap_remove(place);
            }
            if out::is_interrupted() {
                return;
            }
            let tally = &mut tallies[index / repeat];
            for line in say(&case.name, ran, took, tally) {
                clock.line(&line);
            }
            show(running, done(tallies));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..how.jobs {
            scope.spawn(work);
        }
        work();
    });
    drop(clock);
    let (tallies, _) = state.into_inner().unwrap_or_else(|broken| broken.into_inner());
    (tallies, out::is_interrupted())
}

/// Says a test's outcome, and counts it.
fn say(name: &str, ran: Result<Outcome>, took: Duration, tally: &mut Tally) -> Vec<String> {
    let seconds = took.as_secs_f64();
    let outcome = match ran {
        Ok(outcome) => outcome,
        Err(Error::Missing(why)) => {
            tally.skipped += 1;
            return vec![format!("skipped {name}: {why}")];
        }
        Err(why) => Outcome { wrong: Some(why.to_string()), ..Outcome::default() },
    };
    let first = match outcome.wrong {
        None => {
            tally.passed += 1;
            let brief = match outcome.brief.as_str() {
                "" => String::new(),
                brief => format!(", {brief}"),
            };
            format!("ok      {name} ({seconds:.1} s{brief})")
        }
        Some(why) => {
            tally.failed += 1;
            format!("FAILED  {name} ({seconds:.1} s): {why}")
        }
    };
    let more = outcome.more.iter().map(|line| format!("        {line}"));
    std::iter::once(first).chain(more).collect()
}

/// Says what came of all tests: of each if it was run more than once, or was to be.
///
/// # Errors
/// Some failed, or it was interrupted.
pub fn finish<C>(
    cases: &[Case<'_, C>],
    how: How,
    tallies: &[Tally],
    interrupted: bool,
) -> Result<()> {
    let mut sum = Tally::default();
    for (case, tally) in cases.iter().zip(tallies) {
        sum.passed += tally.passed;
        sum.failed += tally.failed;
        sum.skipped += tally.skipped;
        if how.repeat > 1 && tally.run() != 0 {
            crate::say!("{:>3} of {:<3} {}", tally.passed, tally.run(), case.name);
        }
    }
    let end = match interrupted {
        true => ", then it was interrupted",
        false => "",
    };
    crate::say!(
        "guest tests: {} passed, {} failed{}{end}",
        sum.passed,
        sum.failed,
        match sum.skipped {
            0 => String::new(),
            skipped => format!(", {skipped} skipped"),
        }
    );
    match (interrupted, sum.failed) {
        (true, _) => Err(Error::Interrupted),
        (false, 0) => Ok(()),
        (false, failed) => Err(Error::Failed(format!("{failed} guest tests failed"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::{Case, How, Outcome, Tally, finish, run};
    use crate::{Arch, Error};

    fn case<'a, F>(name: &str, run: F) -> Case<'a, AtomicU32>
    where
        F: Fn(&AtomicU32) -> crate::Result<Outcome> + Sync + 'a,
    {
        Case { name: name.into(), short: true, arch: Arch::Arm64, run: Box::new(run) }
    }

    #[test]
    fn each_is_run_so_often_and_counted_by_what_came_out() {
        let cases = [
            case("right", |runs| {
                runs.fetch_add(1, Ordering::Relaxed);
                Ok(Outcome::default())
            }),
            case("wrong", |_| Ok(Outcome { wrong: Some("it is".into()), ..Outcome::default() })),
            case("ends", |_| Err(Error::Failed("it ended".into()))),
            case("missing", |_| Err(Error::Missing("no such thing".into()))),
        ];
        for jobs in [1, 3] {
            let runs = AtomicU32::new(0);
            let how = How { repeat: 5, jobs };
            let (tallies, interrupted) = run(&cases, &runs, how);
            let tally = |passed, failed, skipped| Tally { passed, failed, skipped };
            assert_eq!(runs.into_inner(), 5);
            assert_eq!(tallies, [tally(5, 0, 0), tally(0, 5, 0), tally(0, 5, 0), tally(0, 0, 5)]);
            assert!(!interrupted);
            assert!(finish(&cases, how, &tallies, false).is_err());
            assert!(finish(&cases[..1], how, &tallies, false).is_ok());
            let ended = finish(&cases[..1], how, &tallies, true);
            assert!(matches!(ended, Err(Error::Interrupted)));
        }
    }
}

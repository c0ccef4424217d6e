//! Writes of the guest: by a model, or as a real program did.
//!
//! Each virtual CPU has a stream of pages, and for each page just before which it is not written. A
//! stream depends on nothing but its parameters, so that each kind of logging meets the same guest.

use std::sync::Arc;

use clap::ValueEnum;
use serde::Serialize;
use tablewright_machine::Time;

use crate::random::Random;
use tablewright_recorder::recording::{Interval, Run};

/// How a modelled guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Model {
    /// Each vCPU a part of the set of its own, over and over, as fast as it can
    Greedy,
    /// Pages in order at a fixed rate; what was not written in time is made up for
    Fixed,
    /// Any page of the set, one as likely as another
    Random,
    /// Few pages of the set often and many seldom, by Zipf's law with exponent 1
    Zipf,
    /// All vCPUs together through the set in order, over and over
    Sequential,
}

/// Writes of a guest.
#[derive(Clone, Debug)]
pub enum Writes {
    /// By a model.
    Model {
        /// Which.
        model: Model,
        /// Pages that are written.
        set: u64,
        /// Pages in a second, by all vCPUs; as fast as they can if there is none.
        rate: Option<u64>,
        /// Of the random ones.
        seed: u64,
    },
    /// A program's writes, over and over. At least one page, in more than no time.
    Recorded(Arc<[Interval]>),
}

impl Writes {
    /// Pages that a model writes.
    pub fn set(&self) -> Option<u64> {
        match self {
            Self::Model { set, .. } => Some(*set),
            Self::Recorded(_) => None,
        }
    }
}

/// Writes of one virtual CPU.
pub struct Stream {
    source: Source,
    /// The next.
    page: u64,
    due: Due,
}

/// When the next page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// At once.
    Now,
    /// Not before this, counted from the guest's start.
    At(Time),
    /// Not before this in the guest's own time, which stands still while it waits for its host.
    InGuest(Time),
    /// Never: it has nothing to write.
    Never,
}

enum Source {
    Model {
        model: Model,
        set: u64,
        random: Random,
        /// Its own part of the set: where it begins, and how much it is.
        part: (u64, u64),
        /// This vCPU, of so many.
        vcpu: u64,
        of: u64,
        count: u64,
        /// Picoseconds between two of its writes.
        every: Option<u64>,
    },
    Recorded(Replay),
}

impl Stream {
    /// That of vCPU number `vcpu` of `of`.
    pub fn new(writes: &Writes, vcpu: u64, of: u64) -> Self {
        let source = match writes {
            Writes::Model { model, set, rate, seed } => Source::Model {
                model: *model,
                set: *set,
                part: (vcpu * set / of, (vcpu + 1) * set / of - vcpu * set / of),
                random: Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ vcpu),
                vcpu,
                of,
                count: 0,
                every: rate.map(|rate| of * PS / rate),
            },
            Writes::Recorded(intervals) => Source::Recorded(Replay::new(intervals, vcpu, of)),
        };
        let mut stream = Self { source, page: 0, due: Due::Never };
        stream.advance();
        stream
    }

    /// The page that is written next, and when.
    #[inline]
    pub fn next(&self) -> (u64, Due) {
        (self.page, self.due)
    }

    /// It was written.
    #[inline]
    pub fn advance(&mut self) {
        match &mut self.source {
            Source::Model { model, set, part: (first, pages), random, vcpu, of, count, every } => {
                let (set, of, vcpu) = (*set, *of, *vcpu);
                let page = match model {
                    Model::Greedy | Model::Fixed => {
                        count.checked_rem(*pages).map(|number| *first + number)
                    }
                    Model::Random => Some(random.below(set)),
                    Model::Zipf => Some(spread(random.zipf(set), set)),
                    Model::Sequential => Some((vcpu + *count * of) % set),
                };
                let due = match every {
                    None => Due::Now,
                    // vCPUs take turns.
                    Some(every) => Due::At(Time::ps(*every * *count + *every * vcpu / of)),
                };
                *count += 1;
                (self.page, self.due) = page.map_or((0, Due::Never), |page| (page, due));
            }
            Source::Recorded(replay) => {
                (self.page, self.due) =
                    replay.take().map_or((0, Due::Never), |(page, at)| (page, Due::InGuest(at)));
            }
        }
    }
}

/// Picoseconds of a second.
const PS: u64 = 1_000_000_000_000;

/// The pages of a recording that fall to one vCPU: every `of`th of each interval.
struct Replay {
    intervals: Arc<[Interval]>,
    vcpu: u64,
    of: u64,
    interval: usize,
    /// The next in the interval, and where it is: a run, and how far into it.
    number: u64,
    run: usize,
    into: u64,
    /// Nanoseconds before the first interval, in this repetition.
    before: u64,
    /// There is a page for this vCPU somewhere.
    any: bool,
}

impl Replay {
    fn new(intervals: &Arc<[Interval]>, vcpu: u64, of: u64) -> Self {
        let any = intervals.iter().any(|it| count(&it.runs) > vcpu);
        Self {
            intervals: Arc::clone(intervals),
            vcpu,
            of,
            interval: 0,
            number: vcpu,
            run: 0,
            into: vcpu,
            before: 0,
            any,
        }
    }

    /// The next page and its time, in nanoseconds of the guest.
    fn take(&mut self) -> Option<(u64, Time)> {
        if !self.any {
            return None;
        }
        loop {
            let interval = &self.intervals[self.interval];
            while let Some(run) = interval.runs.get(self.run)
                && self.into >= run.pages
            {
                self.into -= run.pages;
                self.run += 1;
            }
            if let Some(run) = interval.runs.get(self.run) {
                let page = run.first + self.into;
                let pages = count(&interval.runs);
                let inside = u128::from(interval.length_ns) * u128::from(self.number) * 1000
                    / u128::from(pages);
                let at = Time::ns(self.before + interval.start_ns) + Time::ps(inside as u64);
                self.number += self.of;
                self.into += self.of;
                return Some((page, at));
            }
            (self.number, self.run, self.into) = (self.vcpu, 0, self.vcpu);
            self.interval += 1;
            if self.interval == self.intervals.len() {
                self.interval = 0;
                self.before += interval.start_ns + interval.length_ns;
            }
        }
    }
}

fn count(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.pages).sum()
}

/// Neighbours in rank are no neighbours in memory: a permutation of the set, as the factor is a
/// prime above it.
fn spread(rank: u64, set: u64) -> u64 {
    rank * 4_294_967_291 % set
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn stream(model: Model, set: u64, rate: Option<u64>, vcpu: u64, of: u64) -> Stream {
        let writes = Writes::Model { model, set, rate, seed: 1 };
        Stream::new(&writes, vcpu, of)
    }

    fn take(stream: &mut Stream, count: usize) -> Vec<u64> {
        let mut pages = Vec::new();
        while pages.len() < count && stream.next().1 != Due::Never {
            pages.push(stream.next().0);
            stream.advance();
        }
        pages
    }

    #[test]
    fn models_write_what_they_say() {
        assert_eq!(take(&mut stream(Model::Greedy, 10, None, 1, 3), 8), [3, 4, 5, 3, 4, 5, 3, 4]);
        assert!(take(&mut stream(Model::Greedy, 1, None, 0, 3), 8).is_empty());
        assert_eq!(take(&mut stream(Model::Sequential, 10, None, 1, 3), 5), [1, 4, 7, 0, 3]);
        for model in [Model::Random, Model::Zipf] {
            let pages = take(&mut stream(model, 50, None, 0, 1), 5000);
            let all: BTreeSet<u64> = pages.iter().copied().collect();
            assert_eq!(all, (0..50).collect());
            // The first in rank is page 0, and has one write in ln 51.
            let share = pages.iter().filter(|page| **page == 0).count();
            let expected = if model == Model::Zipf { 880 } else { 100 };
            assert!(share.abs_diff(expected) < expected / 3, "{share}");
        }
    }

    #[test]
    fn a_rate_is_that_of_all_together() {
        let mut dues = Vec::new();
        for vcpu in 0..4 {
            let mut stream = stream(Model::Fixed, 100, Some(1000), vcpu, 4);
            for _ in 0..25 {
                let Due::At(at) = stream.next().1 else { panic!("a rate") };
                dues.push(at);
                stream.advance();
            }
        }
        dues.sort();
        let even: Vec<Time> = (0..100).map(Time::ms).collect();
        assert_eq!(dues, even);
    }

    #[test]
    fn a_recording_is_divided_among_the_vcpus_and_repeated() {
        let run = |first, pages| Run { first, pages };
        let intervals: Arc<[Interval]> = Arc::new([
            Interval { start_ns: 0, length_ns: 1000, runs: vec![run(2, 3), run(9, 1)] },
            Interval { start_ns: 1000, length_ns: 500, runs: vec![] },
            Interval { start_ns: 1500, length_ns: 100, runs: vec![run(4, 1)] },
        ]);
        let of = |vcpu| {
            let mut stream = Stream::new(&Writes::Recorded(Arc::clone(&intervals)), vcpu, 2);
            let mut all = Vec::new();
            for _ in 0..4 {
                if let (page, Due::InGuest(at)) = stream.next() {
                    all.push((page, at.as_ps() / 1000));
                }
                stream.advance();
            }
            all
        };
        assert_eq!(of(0), [(2, 0), (4, 500), (4, 1500), (2, 1600)]);
        assert_eq!(of(1), [(3, 250), (9, 750), (3, 1850), (9, 2350)]);
        let mut none = Stream::new(&Writes::Recorded(Arc::clone(&intervals)), 4, 5);
        assert!(take(&mut none, 3).is_empty());
    }
}

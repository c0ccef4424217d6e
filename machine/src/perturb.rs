//! Perturbation: other timings of the same program, each named by a seed.
//!
//! A program that is right only because one CPU happens to be faster than another is wrong. A seed
//! stretches or shrinks whatever a program [spends](crate::Cpu::spend) by a random factor, and
//! stops CPUs for long pauses, as an interrupt or a hypervisor would. What lines, resources and
//! locks cost belongs to the machine and stays as it is. Each CPU draws from a stream of its own,
//! so that what it draws depends on the seed, its number and what it did, and not on how the CPUs
//! interleave.

use std::cell::Cell;
use std::ops::RangeInclusive;

use crate::splitmix::{below, next};
use crate::time::Time;

/// How a seed changes the timing of a run.
///
/// ```
/// use tablewright_machine::{Config, Perturbation, Scheduler, Time};
/// let end = |seed| {
///     let mut config = Config::new(2);
///     config.perturbation = Perturbation { seed, ..Perturbation::default() };
///     Scheduler::new(config).run(|cpu| cpu.spend(Time::us(1))).unwrap().end
/// };
/// assert_eq!(end(0), Time::us(1));
/// assert_eq!(end(7), end(7));
/// assert_ne!(end(7), end(8));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Perturbation {
    /// Names the timing. 0: none of it happens.
    pub seed: u64,
    /// The factor of each cost, in percent, uniform in this range and not only whole ones.
    pub percent: RangeInclusive<u32>,
    /// A pause comes on average once in so many costs. 0: never.
    pub pause_once_in: u32,
    /// The longest pause. They are uniform up to it.
    pub pause: Time,
}

impl Default for Perturbation {
    /// No seed. With one: costs between half and twice, and once in a thousand a pause of up to 20
    /// µs.
    fn default() -> Self {
        Self { seed: 0, percent: 50..=200, pause_once_in: 1_000, pause: Time::us(20) }
    }
}

impl Perturbation {
    /// Returns the start of a CPU's stream.
    pub(crate) fn stream(&self, cpu: usize) -> u64 {
        let start = Cell::new(self.seed);
        let start = next(&start) ^ cpu as u64;
        next(&Cell::new(start))
    }

    /// The cost as this seed has it.
    #[cold]
    pub(crate) fn apply(&self, cost: Time, stream: &Cell<u64>) -> Time {
        let (low, high) = (u64::from(*self.percent.start()), u64::from(*self.percent.end()));
        // The factor in units of a 2^-32 of a percent.
        let factor = (low << 32) + below(stream, (high.saturating_sub(low) << 32) + 1);
        let cost = cost.as_ps().min(Time::MAX_RUN.as_ps());
        // Nearly every product fits a word, and a division of words takes a tenth of the time.
        let stretched = match cost.checked_mul(factor) {
            Some(product) => product / (100 << 32),
            None => (u128::from(cost) * u128::from(factor) / (100 << 32)) as u64,
        };
        let mut total = Time::ps(stretched.min(Time::MAX_RUN.as_ps()));
        if self.pause_once_in != 0 && below(stream, u64::from(self.pause_once_in)) == 0 {
            total += Time::ps(below(stream, self.pause.as_ps().min(Time::MAX_RUN.as_ps()) + 1));
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_stay_in_their_range_and_fill_it() {
        let perturbation = Perturbation { seed: 1, pause_once_in: 0, ..Perturbation::default() };
        let stream = Cell::new(perturbation.stream(0));
        let costs: Vec<_> =
            (0..10_000).map(|_| perturbation.apply(Time::ns(100), &stream).as_ps()).collect();
        let (least, most) = (*costs.iter().min().unwrap(), *costs.iter().max().unwrap());
        assert!((50_000..51_000).contains(&least) && (199_000..=200_000).contains(&most));
        assert_eq!(perturbation.apply(Time::ZERO, &stream), Time::ZERO);
        // No overflow at the end of time.
        assert!(perturbation.apply(Time::ps(u64::MAX), &stream) <= Time::MAX_RUN);
    }

    #[test]
    fn pauses_come_as_often_as_asked() {
        let perturbation =
            Perturbation { seed: 1, percent: 100..=100, pause_once_in: 10, pause: Time::ms(1) };
        let stream = Cell::new(perturbation.stream(5));
        let pauses =
            (0..10_000).filter(|_| perturbation.apply(Time::ns(1), &stream) > Time::ns(1)).count();
        assert!((800..1_200).contains(&pauses), "{pauses}");
    }
}

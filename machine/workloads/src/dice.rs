//! Numbers that look random and are those of a seed.

use std::cell::Cell;

use tablewright_machine::{Time, splitmix};

/// A stream of numbers.
pub struct Dice {
    stream: Cell<u64>,
    /// A number below a bound is a remainder, and not a scaled number. Both are kept, so that the
    /// seeds of bug reports stay what they are.
    by_remainder: bool,
}

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self { stream: Cell::new(seed), by_remainder: false }
    }

    /// One of the streams of a seed.
    pub fn of(seed: u64, stream: u64) -> Self {
        let seed = seed.wrapping_mul(0xd134_2543_de82_ef95) ^ stream << 32;
        let dice = Self { stream: Cell::new(seed), by_remainder: true };
        dice.next();
        dice
    }

    pub fn next(&self) -> u64 {
        splitmix::next(&self.stream)
    }

    /// A number below `bound`.
    pub fn below(&self, bound: u64) -> u64 {
        match self.by_remainder {
            true => self.next() % bound,
            false => splitmix::below(&self.stream, bound),
        }
    }

    pub fn index(&self, of: usize) -> usize {
        self.below(of as u64) as usize
    }

    pub fn once_in(&self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Copy>(&self, of: &[T]) -> T {
        of[self.index(of.len())]
    }

    /// Some time for something else.
    pub fn time(&self) -> Time {
        Time::ns(20 + self.below(400))
    }

    /// One of some things that have weights.
    pub fn weighted<T: Copy>(&self, of: impl Iterator<Item = (T, u64)> + Clone) -> T {
        let total = of.clone().map(|(_, weight)| weight).sum();
        let mut left = self.below(total);
        for (thing, weight) in of {
            if left < weight {
                return thing;
            }
            left -= weight;
        }
        unreachable!("the weights add up to {total}")
    }
}

//! Random numbers that are the same on every run.

use std::cell::Cell;

use tablewright_machine::splitmix;

/// A stream of them, which begins with a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn word(&mut self) -> u64 {
        splitmix::next(Cell::from_mut(&mut self.0))
    }

    /// Below a bound, each as likely as another.
    pub fn below(&mut self, bound: u64) -> u64 {
        splitmix::below(Cell::from_mut(&mut self.0), bound)
    }

    /// A rank below `bound`: the continuous law, of which it is the whole part.
    pub fn zipf(&mut self, bound: u64) -> u64 {
        let part = self.word() as f64 / 2f64.powi(64);
        let rank = ((bound + 1) as f64).powf(part) as u64;
        (rank - 1).min(bound - 1)
    }
}

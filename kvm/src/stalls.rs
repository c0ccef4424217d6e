//! How long a guest waited: the gaps that it has counted, in nanoseconds.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::guest::{Block, smallest};

/// Gaps of one or more vCPUs.
#[derive(Clone, Debug)]
pub struct Stalls {
    /// In nanoseconds, two digits.
    histogram: Histogram<u64>,
    longest: Duration,
    total: Duration,
}

impl Default for Stalls {
    fn default() -> Self {
        Self { histogram: new(), longest: Duration::ZERO, total: Duration::ZERO }
    }
}

/// It grows by itself, so that no gap is too long.
fn new() -> Histogram<u64> {
    // Two digits are one of the numbers that there may be.
    Histogram::new(2).unwrap_or_else(|_| unreachable!("two digits are allowed"))
}

impl Stalls {
    /// Those of a vCPU whose counter runs at so many ticks a second.
    pub fn of(block: &Block, frequency: u64) -> Self {
        let nanoseconds = |ticks: u64| {
            let exact = u128::from(ticks) * 1_000_000_000 / u128::from(frequency.max(1));
            u64::try_from(exact).unwrap_or(u64::MAX)
        };
        let longest = block.longest.load(Relaxed);
        let mut histogram = new();
        for (class, count) in block.gaps.iter().enumerate() {
            let count = count.load(Relaxed);
            if count > 0 {
                // The middle of a class, and no more than there was.
                let ticks = smallest(class);
                let middle = (ticks + ticks / 128).min(longest);
                // What grows refuses nothing but more than memory has.
                let _kept = histogram.record_n(nanoseconds(middle), count);
            }
        }
        Self {
            histogram,
            longest: Duration::from_nanos(nanoseconds(longest)),
            total: Duration::from_nanos(nanoseconds(block.total.load(Relaxed))),
        }
    }

    /// Takes in those of another.
    pub fn add(&mut self, other: &Self) {
        let _kept = self.histogram.add(&other.histogram);
        self.longest = self.longest.max(other.longest);
        self.total += other.total;
    }

    /// The longest gap.
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// The gap that this part of them does not exceed, to two digits.
    pub fn quantile(&self, part: f64) -> Duration {
        Duration::from_nanos(self.histogram.value_at_quantile(part)).min(self.longest)
    }

    /// All of them together.
    pub fn total(&self) -> Duration {
        self.total
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }
}

//! Random numbers that are the same on every run.

/// SplitMix64, from a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below a bound, each as likely as another.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A rank below `bound`: the continuous law, of which it is the whole part.
    pub fn zipf(&mut self, bound: u64) -> u64 {
        let part = self.next() as f64 / 2f64.powi(64);
        let rank = ((bound + 1) as f64).powf(part) as u64;
        (rank - 1).min(bound - 1)
    }
}

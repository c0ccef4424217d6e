//! SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014):
//! numbers that look random and are those of a seed.
//!
//! It is written out here and not taken from a crate: a seed in a bug report has to mean the same
//! for ever.

use std::cell::Cell;

/// A number below `bound`. The bias is less than `bound / 2^64`.
pub fn below(stream: &Cell<u64>, bound: u64) -> u64 {
    ((u128::from(next(stream)) * u128::from(bound)) >> 64) as u64
}

/// The next number of a stream, which begins with its seed.
pub fn next(stream: &Cell<u64>) -> u64 {
    let state = stream.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    stream.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published first values for the seed 1234567.
    #[test]
    fn the_generator_is_splitmix64() {
        let stream = Cell::new(1_234_567);
        let values = [(); 3].map(|()| next(&stream));
        assert_eq!(
            values,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}

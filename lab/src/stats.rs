//! Statistics of samples: their median and their spread.

use crate::memory::arena::{Arena, Memory};

/// Measurements of the same thing, one for each round.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Keeps a sample.
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Samples in another unit.
    pub fn scaled(&self, factor: f64) -> Self {
        self.0.iter().map(|sample| sample * factor).collect()
    }

    /// The middle, which one disturbed round cannot move far.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The distance from the tenth to the ninetieth percentile, as a part of the median.
    pub fn spread(&self) -> f64 {
        let median = self.median();
        if median > 0.0 { (self.quantile(0.9) - self.quantile(0.1)) / median } else { 0.0 }
    }

    /// By linear interpolation between the two nearest samples; zero if there are none.
    fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else {
            return 0.0;
        };
        let position = part * last as f64;
        let (below, above) = (position.floor() as usize, position.ceil() as usize);
        sorted[below] + (sorted[above] - sorted[below]) * position.fract()
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

/// The spread above which a figure should not be quoted.
const NOISY: f64 = 0.15;

/// Says what to do if `samples`, measured on `what`, scatter too much.
pub fn noise_warning(what: &str, samples: &Samples) -> Option<String> {
    let spread = samples.spread();
    (spread > NOISY).then(|| {
        format!(
            "{what} varied by {:.0} % between rounds: close other programs, pin this one with \
             `taskset -c 0`, or raise --rounds",
            spread * 100.0
        )
    })
}

/// Says so if the host did not give the huge pages that warm memory should have.
pub fn huge_page_warning(arena: Arena, memory: Memory) -> Option<String> {
    let huge = arena.huge_bytes()?;
    (memory == Memory::Warm && huge < arena.bytes() as u64 / 2).then(|| {
        "the host gave few huge pages for the tables, so figures include TLB misses of the host: \
         see /sys/kernel/mm/transparent_hugepage/enabled"
            .to_owned()
    })
}

/// Figures of a program built without optimisation say nothing.
pub fn build_warning() -> Option<String> {
    let built = match env!("TABLEWRIGHT_PROFILE") {
        "figures" => return None,
        _ if cfg!(debug_assertions) => "without optimisation",
        _ => "quickly",
    };
    Some(format!(
        "built {built}: before quoting figures, `cargo run --profile figures --`, as the book has \
         them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(list: &[f64]) -> Samples {
        list.iter().copied().collect()
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(samples(&[]).median(), 0.0);
        assert_eq!(samples(&[3.0]).median(), 3.0);
        assert_eq!(samples(&[9.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(samples(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }

    #[test]
    fn scatter_is_reported_and_calm_is_not() {
        assert!(noise_warning("x", &samples(&[1.0; 9])).is_none());
        let noisy = samples(&[1.0, 1.0, 1.0, 2.0, 3.0]);
        assert!(noise_warning("x", &noisy).unwrap().contains("taskset"));
    }
}

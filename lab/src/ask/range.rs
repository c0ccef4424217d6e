//! How far a figure may be off: published figures that nothing was fitted on, over the simulated.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::dirty_log::published::Phase;
use crate::published;

/// A row of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    Start,
    FirstHarvest,
    FirstWrite,
    Harvest,
    Stop,
    Stall,
    Shootdown,
    Migration,
    Downtime,
}

impl Quantity {
    pub const ALL: [Self; 9] = [
        Self::Start,
        Self::FirstHarvest,
        Self::FirstWrite,
        Self::Harvest,
        Self::Stop,
        Self::Stall,
        Self::Shootdown,
        Self::Migration,
        Self::Downtime,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Start => "log starts",
            Self::FirstHarvest => "first harvest",
            Self::FirstWrite => "1st write, page",
            Self::Harvest => "later harvest",
            Self::Stop => "log stops",
            Self::Stall => "longest stall",
            Self::Shootdown => "a shootdown",
            Self::Migration => "a migration",
            Self::Downtime => "of it stopped",
        }
    }

    /// Whether a published figure is one of these.
    fn is_of(self, row: &published::Row, experiment: &str) -> bool {
        let metric = row.metric.as_str();
        match experiment {
            "dirty-log" => match Phase::of(metric) {
                Some(Phase::Enable) => self == Self::Start,
                Some(Phase::Dirty(_)) => self == Self::FirstWrite,
                Some(Phase::Get(_) | Phase::Clear(_)) => {
                    matches!(self, Self::FirstHarvest | Self::Harvest)
                }
                Some(Phase::Disable) => self == Self::Stop,
                Some(Phase::Populate) | None => false,
            },
            "write-protect" => match self {
                Self::Start => metric.contains("dirty log") && !metric.contains("write all"),
                Self::FirstWrite => metric.contains("write all"),
                Self::Migration => metric.contains("complete live migration"),
                _ => false,
            },
            "tlb-flush" => self == Self::Shootdown,
            _ => false,
        }
    }
}

/// Simulated figures of a published row, as `reproduce --json` has it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Simulated {
    pub experiment: String,
    pub metric: String,
    pub before: Option<f64>,
    pub after: Option<f64>,
    /// Whether a cost was fitted on the figure before the change, and on the one after it.
    pub fitted_before: bool,
    pub fitted_after: bool,
}

/// In the order of the published tables. A test makes it.
const SIMULATED: &str = include_str!("../../published/simulated.csv");

fn simulated() -> Vec<Simulated> {
    let mut reader = csv::Reader::from_reader(SIMULATED.as_bytes());
    reader.deserialize().filter_map(Result::ok).collect()
}

/// Least and greatest factor from a simulated figure to the published one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub quantity: Quantity,
    pub least: f64,
    pub greatest: f64,
    /// Number of figures.
    pub figures: usize,
}

impl Range {
    pub fn text(&self) -> String {
        let Self { least, greatest, .. } = self;
        format!("{least:.1}-{greatest:.1}")
    }

    pub fn json(&self) -> Value {
        json!({
            "quantity": self.quantity.name(),
            "ratio_to_simulated_least": self.least,
            "ratio_to_simulated_greatest": self.greatest,
            "figures": self.figures,
        })
    }

    fn of(quantity: Quantity, simulated: &[Simulated]) -> Option<Self> {
        let tables = published::EXPERIMENTS.iter().flat_map(|(name, _)| {
            published::built_in(name).into_iter().map(move |row| (*name, row))
        });
        let factors = tables.zip(simulated).flat_map(|((experiment, row), ours)| {
            let is_test = |fitted: bool| !fitted && quantity.is_of(&row, experiment);
            let factor = |published: Option<f64>, simulated: Option<f64>, fitted| {
                let factor = published? / simulated?;
                (is_test(fitted) && factor.is_finite() && factor > 0.0).then_some(factor)
            };
            [
                factor(row.before, ours.before, ours.fitted_before),
                factor(row.after, ours.after, ours.fitted_after),
            ]
        });
        let factors: Vec<f64> = factors.flatten().collect();
        (!factors.is_empty()).then(|| Self {
            quantity,
            least: factors.iter().copied().fold(f64::MAX, f64::min),
            greatest: factors.iter().copied().fold(0.0, f64::max),
            figures: factors.len(),
        })
    }
}

/// Of each quantity of which figures are published.
pub fn all() -> Vec<Range> {
    let simulated = simulated();
    Quantity::ALL.iter().filter_map(|&quantity| Range::of(quantity, &simulated)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_published_row_has_its_simulated_one() {
        let simulated = simulated();
        let published: Vec<_> = published::EXPERIMENTS
            .iter()
            .flat_map(|(name, _)| published::built_in(name).into_iter().map(move |row| (name, row)))
            .collect();
        assert_eq!(simulated.len(), published.len());
        for (ours, (experiment, row)) in simulated.iter().zip(&published) {
            assert_eq!((&*ours.experiment, &ours.metric), (**experiment, &row.metric));
        }
    }

    #[test]
    fn a_figure_that_was_fitted_on_says_nothing() {
        let mut rows = simulated();
        let before = Range::of(Quantity::Stop, &rows).unwrap();
        assert!(before.figures >= 3 && before.least < 1.0 && before.greatest > 1.0);
        rows.iter_mut().for_each(|row| row.fitted_before = true);
        let after = Range::of(Quantity::Stop, &rows).unwrap();
        assert!(after.figures < before.figures);
        rows.iter_mut().for_each(|row| row.fitted_after = true);
        assert_eq!(Range::of(Quantity::Stop, &rows), None);
        assert_eq!(Range::of(Quantity::Stall, &rows), None);
    }
}

//! Costs that the rows of a fit determine: which, within what, and which only in sums.
//!
//! How often each cost counts in each row, as a part of the row's time, is a matrix. A cost whose
//! column points, within [`APART`], where another's does cannot be told from it by figures that
//! repeat within a few percent: then the rows determine the sum of both, and how it is divided was
//! decided before the fit.

use serde::Serialize;
use tablewright_machine::{Cost, Profile, Source, Time};

use super::solve;

/// How much a published figure may be off: postings of one configuration differ by 4 to 11 %.
pub const OFF: f64 = 0.05;

/// The sine of the least angle between the columns of two costs that rows tell apart. Below it,
/// rows that are off by [`OFF`] move the costs by half of what they are, or more.
const APART: f64 = 0.1;

/// The part of a row's time that a cost has to have to count for anything.
const COUNTS: f64 = 1e-3;

/// How often each cost counts in each fitted row, divided by what was published of the row.
pub struct Counts {
    /// The costs.
    pub costs: Vec<Cost>,
    /// For each row, for each cost: how much of the published time a picosecond of the cost is.
    pub rows: Vec<Vec<f64>>,
}

impl Counts {
    /// The rows with these costs alone.
    pub fn of(&self, costs: &[Cost]) -> Vec<Vec<f64>> {
        let places: Vec<Option<usize>> =
            costs.iter().map(|cost| self.costs.iter().position(|known| known == cost)).collect();
        self.rows
            .iter()
            .map(|row| {
                let of = |place: &Option<usize>| place.map_or(0.0, |place| row[place]);
                places.iter().map(of).collect()
            })
            .collect()
    }

    fn column(&self, place: usize) -> Vec<f64> {
        self.rows.iter().map(|row| row[place]).collect()
    }

    /// The largest part of a row's time that such a cost is.
    fn share(&self, place: usize, cost: Time) -> f64 {
        let part = |row: &Vec<f64>| row[place] * cost.as_ps() as f64;
        self.rows.iter().map(part).fold(0.0, f64::max)
    }
}

/// A cost that the fit left as it was, and that the rows depend on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Carried {
    /// The cost.
    pub cost: &'static str,
    /// Nanoseconds of the sum, for each of the first cost.
    pub ns: f64,
    /// How the profile knows it.
    pub source: Option<Source>,
    /// The largest part of a fitted row's time that it is.
    pub share_percent: f64,
}

/// Costs of which the rows determine the sum alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sum {
    /// Which.
    pub costs: Vec<&'static str>,
    /// Their sum, in nanoseconds of the first of them, each weighted with how often it counts
    /// beside it.
    pub ns: f64,
}

/// Limits of what the fitted rows determine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Determined {
    /// Costs that were carried over.
    pub carried: Vec<Carried>,
    /// Costs that the rows do not tell apart.
    pub sums: Vec<Sum>,
    /// Costs that would count in the rows, and that the profile leaves out: they are taken as
    /// nothing.
    pub left_out: Vec<&'static str>,
}

impl Determined {
    /// Judges the rows of a machine with the fitted costs.
    pub fn of(counts: &Counts, fitted: &Profile, free: &[Cost]) -> Self {
        let costs = &fitted.costs;
        let counting: Vec<usize> = (0..counts.costs.len())
            .filter(|&place| counts.share(place, counts.costs[place].get(costs)) > COUNTS)
            .collect();
        let carried = counting
            .iter()
            .filter(|&&place| !free.contains(&counts.costs[place]))
            .map(|&place| {
                let cost = counts.costs[place];
                Carried {
                    cost: cost.name(),
                    ns: ns(cost.get(costs)),
                    source: fitted.provenance_of(cost.key()).map(|entry| entry.source),
                    share_percent: 100.0 * counts.share(place, cost.get(costs)),
                }
            })
            .collect();
        let left_out = counts
            .costs
            .iter()
            .enumerate()
            .filter(|(place, cost)| {
                !free.contains(cost)
                    && cost.get(costs) == Time::ZERO
                    && counts.column(*place).iter().any(|count| *count > 0.0)
            })
            .map(|(_, cost)| cost.name())
            .collect();
        Self { carried, sums: sums(counts, costs, &counting), left_out }
    }
}

/// The costs among these that rows do not tell apart, each group once.
fn sums(counts: &Counts, costs: &tablewright_machine::Costs, among: &[usize]) -> Vec<Sum> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for &place in among {
        let column = counts.column(place);
        let like = |group: &&mut Vec<usize>| sine(&counts.column(group[0]), &column) < APART;
        match groups.iter_mut().find(like) {
            Some(group) => group.push(place),
            None => groups.push(vec![place]),
        }
    }
    groups
        .into_iter()
        .filter(|group| group.len() > 1)
        .map(|group| {
            let length = |place: usize| norm(&counts.column(place));
            let first = length(group[0]);
            let part = |&place: &usize| ns(counts.costs[place].get(costs)) * length(place) / first;
            Sum {
                ns: group.iter().map(part).sum(),
                costs: group.iter().map(|&place| counts.costs[place].name()).collect(),
            }
        })
        .collect()
}

/// How far each of the free costs may be off, in nanoseconds, if each row is off by [`OFF`]
/// independently of the others. A cost that the fit has made nothing is not free any more, and has
/// no interval.
pub fn intervals(rows: &[Vec<f64>], found: &[Time]) -> Vec<Option<f64>> {
    let some: Vec<usize> = (0..found.len()).filter(|&place| found[place] > Time::ZERO).collect();
    let mut off = vec![None; found.len()];
    let mut squares = vec![0.0; some.len()];
    for this in 0..rows.len() {
        let mut unit = vec![0.0; rows.len()];
        unit[this] = OFF;
        let Ok(moved) = solve::free(rows, &unit, &some) else {
            return off;
        };
        for (square, moved) in squares.iter_mut().zip(moved) {
            *square += moved * moved;
        }
    }
    for (place, square) in some.into_iter().zip(squares) {
        off[place] = Some(square.sqrt() / 1e3);
    }
    off
}

/// By how much the fit to all other rows misses each row, in percent; `None` where the others do
/// not determine the costs.
pub fn each_left_out(rows: &[Vec<f64>], right: &[f64]) -> Vec<Option<f64>> {
    (0..rows.len())
        .map(|this| {
            let others = |at: &usize| *at != this;
            let left: Vec<Vec<f64>> =
                (0..rows.len()).filter(others).map(|at| rows[at].clone()).collect();
            let of_left: Vec<f64> = (0..rows.len()).filter(others).map(|at| right[at]).collect();
            if left.len() < rows[this].len() {
                return None;
            }
            let found = solve::non_negative(&left, &of_left).ok()?;
            let model: f64 = rows[this].iter().zip(found).map(|(a, b)| a * b).sum();
            Some(100.0 * (model - right[this]))
        })
        .collect()
}

fn ns(time: Time) -> f64 {
    time.as_ps() as f64 / 1e3
}

fn norm(column: &[f64]) -> f64 {
    column.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// The sine of the angle between two columns.
fn sine(a: &[f64], b: &[f64]) -> f64 {
    let along = a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / norm(a) / norm(b);
    (1.0 - along * along).max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three rows in which the first two costs count alike but for a hair, and the third otherwise.
    fn rows() -> Vec<Vec<f64>> {
        vec![vec![1.0, 1.01, 0.0], vec![1.0, 1.0, 2.0], vec![1.0, 1.0, 5.0]]
    }

    #[test]
    fn costs_that_count_alike_are_a_sum() {
        let named = |name: &str| Cost::all().find(|cost| cost.name() == name).unwrap();
        let three = [named("entry"), named("publish"), named("complete")];
        let mut profile = Profile::load("neutral").unwrap();
        for (cost, ns) in three.iter().zip([3, 16, 1000]) {
            cost.set(&mut profile.costs, Time::ns(ns));
        }
        let counts = Counts { costs: three.to_vec(), rows: rows() };
        let said = Determined::of(&counts, &profile, &[three[0], three[2]]);
        assert_eq!(said.sums.len(), 1);
        assert_eq!(said.sums[0].costs, ["entry", "publish"]);
        assert!((said.sums[0].ns - 19.0).abs() < 0.1, "{:?}", said.sums);
        assert_eq!(said.carried.len(), 1);
        assert_eq!(said.carried[0].cost, "publish");
        assert_eq!(said.left_out, [""; 0]);

        three[1].set(&mut profile.costs, Time::ZERO);
        let said = Determined::of(&counts, &profile, &[three[0], three[2]]);
        assert_eq!((said.sums.len(), said.left_out), (0, vec!["publish"]));
    }

    /// One row and one cost: what the row is off by, the cost is.
    #[test]
    fn an_interval_is_what_the_rows_are_off_by() {
        let one = intervals(&[vec![1e-6]], &[Time::ns(1000)]);
        assert!((one[0].unwrap() - 50.0).abs() < 1e-6, "{one:?}");
        // Two rows that hardly tell two costs apart: either may be off by more than it is.
        let two = intervals(&[vec![1e-6, 1.01e-6], vec![1e-6, 1e-6]], &[Time::ns(500); 2]);
        assert!(two.iter().all(|off| off.unwrap() > 500.0), "{two:?}");
        assert_eq!(intervals(&[vec![1e-6]], &[Time::ZERO]), [None]);
    }

    #[test]
    fn a_row_that_does_not_fit_the_others_is_missed() {
        let rows = [vec![1.0], vec![1.0], vec![1.0]];
        let missed = each_left_out(&rows, &[1.0, 1.0, 1.3]);
        assert!((missed[2].unwrap() + 30.0).abs() < 1e-9, "{missed:?}");
        assert!((missed[0].unwrap() - 15.0).abs() < 1e-9, "{missed:?}");
        assert_eq!(each_left_out(&rows[..1], &[1.0]), [None]);
    }
}

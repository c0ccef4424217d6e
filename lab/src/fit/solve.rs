//! Non-negative least squares, for a handful of unknowns.
//!
//! At the optimum some unknowns are zero, and the others are where they would be without the
//! constraint. With so few of them every choice of which are zero can be tried: no iteration, no
//! tolerance to tune, and the answer is the optimum.

/// The most unknowns: so many choices, to the power of two.
pub const MOST: usize = 12;

/// Below this part of its length, what is left of a column after the others have been taken out of
/// it is rounding.
const DEPENDENT: f64 = 1e-9;

/// Why there is no single answer: the number of the unknown that the rows do not determine beside
/// those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undetermined(pub usize);

/// The unknowns, none negative, for which the sum of squares of `rows * unknowns - right` is
/// smallest. At most [`MOST`] of them, as many as each row has.
pub fn non_negative(rows: &[Vec<f64>], right: &[f64]) -> Result<Vec<f64>, Undetermined> {
    let unknowns = rows.first().map_or(0, Vec::len).min(MOST);
    let all: Vec<usize> = (0..unknowns).collect();
    free(rows, right, &all)?;

    let mut best: Option<(f64, Vec<f64>)> = None;
    for choice in 0..1_u32 << unknowns {
        let some: Vec<usize> =
            all.iter().copied().filter(|unknown| choice >> unknown & 1 != 0).collect();
        let Ok(values) = free(rows, right, &some) else {
            continue;
        };
        if values.iter().any(|value| !value.is_finite() || *value < 0.0) {
            continue;
        }
        let mut unknowns = vec![0.0; unknowns];
        for (&unknown, value) in some.iter().zip(values) {
            unknowns[unknown] = value;
        }
        let miss = miss(rows, right, &unknowns);
        if best.as_ref().is_none_or(|(least, _)| miss < *least) {
            best = Some((miss, unknowns));
        }
    }
    Ok(best.map_or(vec![0.0; unknowns], |(_, unknowns)| unknowns))
}

fn miss(rows: &[Vec<f64>], right: &[f64], unknowns: &[f64]) -> f64 {
    let square = |(row, right): (&Vec<f64>, &f64)| {
        let sum: f64 = row.iter().zip(unknowns).map(|(a, b)| a * b).sum();
        (sum - right).powi(2)
    };
    rows.iter().zip(right).map(square).sum()
}

/// Least squares without a constraint over some of the unknowns: the columns are made orthogonal
/// one after the other (Gram and Schmidt, modified), which loses less than the normal equations do.
pub fn free(rows: &[Vec<f64>], right: &[f64], some: &[usize]) -> Result<Vec<f64>, Undetermined> {
    let mut columns: Vec<Vec<f64>> =
        some.iter().map(|&unknown| rows.iter().map(|row| row[unknown]).collect()).collect();
    let mut right = right.to_vec();
    // The upper triangle, and the right side in the new directions.
    let mut triangle = vec![vec![0.0; some.len()]; some.len()];
    let mut parts = vec![0.0; some.len()];
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let lengths: Vec<f64> = columns.iter().map(|column| dot(column, column).sqrt()).collect();
    for this in 0..some.len() {
        let length = dot(&columns[this], &columns[this]).sqrt();
        // A length that is not a number is none.
        let independent = length > lengths[this] * DEPENDENT;
        if !independent {
            return Err(Undetermined(some[this]));
        }
        triangle[this][this] = length;
        let direction: Vec<f64> = columns[this].iter().map(|value| value / length).collect();
        let take_out = |vector: &mut Vec<f64>| {
            let part = dot(&direction, vector);
            for (value, along) in vector.iter_mut().zip(&direction) {
                *value -= part * along;
            }
            part
        };
        for other in this + 1..some.len() {
            triangle[this][other] = take_out(&mut columns[other]);
        }
        parts[this] = take_out(&mut right);
    }
    let mut values = vec![0.0; some.len()];
    for this in (0..some.len()).rev() {
        let known = dot(&triangle[this][this + 1..], &values[this + 1..]);
        values[this] = (parts[this] - known) / triangle[this][this];
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(values: &[f64], expected: &[f64]) -> bool {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
        values.len() == expected.len() && values.iter().zip(expected).all(near)
    }

    #[test]
    fn a_line_through_three_points() {
        let rows = [vec![1.0, 0.0], vec![1.0, 1.0], vec![1.0, 2.0]];
        // Worked out by hand: 5/6 + x * 1/2.
        let values = non_negative(&rows, &[1.0, 1.0, 2.0]).unwrap();
        assert!(close(&values, &[5.0 / 6.0, 0.5]), "{values:?}");
    }

    #[test]
    fn what_would_be_negative_is_zero_and_the_rest_makes_the_best_of_it() {
        let rows = [vec![1.0, 0.0], vec![1.0, 1.0], vec![1.0, 2.0]];
        // A falling line: the slope is zero, and the height the mean.
        let values = non_negative(&rows, &[3.0, 2.0, 1.0]).unwrap();
        assert!(close(&values, &[2.0, 0.0]), "{values:?}");
        assert!(close(&non_negative(&rows, &[-1.0; 3]).unwrap(), &[0.0, 0.0]));
    }

    #[test]
    fn what_rows_do_not_determine_is_named() {
        let twice = [vec![1.0, 2.0], vec![2.0, 4.0], vec![3.0, 6.0]];
        assert_eq!(non_negative(&twice, &[1.0; 3]), Err(Undetermined(1)));
        let nothing = [vec![0.0, 1.0], vec![0.0, 2.0]];
        assert_eq!(non_negative(&nothing, &[1.0; 2]), Err(Undetermined(0)));
        let few = [vec![1.0, 2.0]];
        assert_eq!(non_negative(&few, &[1.0]), Err(Undetermined(1)));
        let none = [vec![f64::NAN]];
        assert_eq!(non_negative(&none, &[1.0]), Err(Undetermined(0)));
        assert_eq!(non_negative(&[], &[]), Ok(Vec::new()));
    }

    proptest! {
        /// No neighbour of the answer is better: with convexity, that is the optimum.
        #[test]
        fn the_answer_is_the_optimum(
            rows in prop::collection::vec(prop::collection::vec(0.0..10.0f64, 3), 5),
            right in prop::collection::vec(-10.0..10.0f64, 5),
        ) {
            let Ok(values) = non_negative(&rows, &right) else { return Ok(()) };
            let least = miss(&rows, &right, &values);
            for unknown in 0..values.len() {
                for change in [-1e-4, 1e-4] {
                    let mut other = values.clone();
                    other[unknown] += change;
                    if other[unknown] >= 0.0 {
                        prop_assert!(miss(&rows, &right, &other) >= least - 1e-9);
                    }
                }
            }
        }

        #[test]
        fn what_was_put_in_comes_out(
            rows in prop::collection::vec(prop::collection::vec(0.0..10.0f64, 4), 8),
            truth in prop::collection::vec(0.0..10.0f64, 4),
        ) {
            let right: Vec<f64> = rows
                .iter()
                .map(|row| row.iter().zip(&truth).map(|(a, b)| a * b).sum())
                .collect();
            let Ok(values) = non_negative(&rows, &right) else { return Ok(()) };
            prop_assert!(miss(&rows, &right, &values) < 1e-9, "{:?} {:?}", values, truth);
        }
    }
}

//! How many published rows come out that no cost was fitted on.
//!
//! A row is one of the published table, and its error that of the figure *after* the change. The
//! bins of a histogram are one row: they add up to all that was counted, so that what is in a wrong
//! one is wrong in two, a bin of a few counts for as much as one of hundreds, and an empty one has
//! no relative error. The error of a histogram is the part of what it counts that is in another bin
//! than published. What each bin by itself would give is counted beside it.

use serde::Serialize;

use crate::output::report::{error_percent, percent, wrapped};
use crate::published::Reproduced as Row;
use crate::stats::Samples;

/// How close a row has to come.
const WITHIN: f64 = 15.0;

/// Of all rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How close, up or down.
    within_percent: f64,
    /// Rows on which nothing was fitted; a histogram is one.
    not_fitted: Tally,
    /// Rows, with each bin of a histogram by itself.
    each_bin: Tally,
    /// And with the rows that a cost was fitted on before the change alone: after it they are a
    /// test.
    with_fitted_before: Tally,
    /// Ratios of the figures before and after a change, which is what a change claims. A row does
    /// not count if both were fitted.
    ratios: Tally,
}

/// Of some of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tally {
    rows: usize,
    within: usize,
    /// Of the errors, up or down. `None`: there are no rows.
    median_percent: Option<f64>,
    /// Those that are not within.
    beyond: Vec<String>,
}

/// A figure after a change, and its error.
struct Tested {
    name: String,
    error: f64,
    of: Of,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Row,
    /// A row on which a cost was fitted, by the figure before the change.
    FittedBefore,
    Bin,
    FittedBin,
    Histogram,
}

impl Summary {
    pub fn of(rows: &[Row]) -> Self {
        let tested = tested(rows);
        let tally = |of: &[Of]| Tally::of(tested.iter().filter(|it| of.contains(&it.of)));
        Self {
            within_percent: WITHIN,
            not_fitted: tally(&[Of::Row, Of::Histogram]),
            each_bin: tally(&[Of::Row, Of::Bin]),
            with_fitted_before: tally(&[Of::Row, Of::Histogram, Of::FittedBefore]),
            ratios: Tally::of(ratios(rows).iter()),
        }
    }

    /// Lines below the tables; nothing if no row is a test.
    pub fn text(&self) -> String {
        let Tally { rows, within, .. } = self.not_fitted;
        if rows == 0 {
            return String::new();
        }
        let mut text = format!("rows on which nothing was fitted: {}\n", self.not_fitted.text());
        let mut line = |words: &str| text += &format!("{}\n", wrapped(words, 80, "    "));
        for (name, tally) in [
            ("each bin of a histogram by itself", &self.each_bin),
            ("with rows fitted before the change alone", &self.with_fitted_before),
            ("the ratios before / after", &self.ratios),
        ] {
            if tally.rows > 0 && (tally.rows, tally.within) != (rows, within) {
                line(&format!("  {name}: {}", tally.text()));
            }
        }
        let mut named: Vec<&String> = Vec::new();
        for tally in [&self.not_fitted, &self.each_bin, &self.with_fitted_before] {
            for name in &tally.beyond {
                if !named.contains(&name) {
                    named.push(name);
                    line(&format!("  beyond: {name}"));
                }
            }
        }
        text
    }
}

impl Tally {
    fn of<'t>(tested: impl Iterator<Item = &'t Tested>) -> Self {
        let (mut errors, mut beyond) = (Samples::default(), Vec::new());
        for Tested { name, error, .. } in tested {
            errors.push(error.abs());
            if error.abs() > WITHIN {
                beyond.push(format!("{name}: {}", percent(*error)));
            }
        }
        Self {
            rows: errors.len(),
            within: errors.len() - beyond.len(),
            median_percent: (!errors.is_empty()).then(|| errors.median()),
            beyond,
        }
    }

    fn text(&self) -> String {
        let share = self.within as f64 / self.rows.max(1) as f64 * 100.0;
        let median = self.median_percent.unwrap_or(0.0);
        format!(
            "{} of {} within {WITHIN:.0} % ({share:.0} %), median {median:.1} %",
            self.within, self.rows
        )
    }
}

/// Whether a row is a bin of a histogram.
fn is_bin(row: &Row) -> bool {
    row.figure.unit == "count"
}

fn place_of(row: &Row) -> String {
    format!("{}, {}", row.figure.system, row.figure.configuration)
}

/// Errors of the ratios before / after.
fn ratios(rows: &[Row]) -> Vec<Tested> {
    let ratio = |before: Option<f64>, after: Option<f64>| {
        before.zip(after).map(|(before, after)| before / after).filter(|ratio| ratio.is_finite())
    };
    let tested = |row: &Row| {
        let ours = ratio(row.before, row.after)?;
        let published = ratio(row.figure.before, row.figure.after).filter(|ratio| *ratio > 0.0)?;
        let fitted = row.fitted && !row.fitted_before;
        (!fitted && !is_bin(row)).then(|| Tested {
            name: place_of(row),
            error: error_percent(ours, published),
            of: Of::Row,
        })
    };
    rows.iter().filter_map(tested).collect()
}

fn tested(rows: &[Row]) -> Vec<Tested> {
    let mut tested = Vec::new();
    let together = |a: &Row, b: &Row| is_bin(a) && is_bin(b) && place_of(a) == place_of(b);
    for rows in rows.chunk_by(together) {
        if let Some(error) = wrong_bins(rows) {
            tested.push(Tested { name: place_of(&rows[0]), error, of: Of::Histogram });
        }
        for row in rows {
            let Some(error) = row.error_percent.filter(|error| error.is_finite()) else {
                continue;
            };
            let of = match (is_bin(row), row.fitted, row.fitted_before) {
                (true, false, _) => Of::Bin,
                (true, true, _) => Of::FittedBin,
                (false, false, _) => Of::Row,
                (false, true, true) => Of::FittedBefore,
                (false, true, false) => continue,
            };
            tested.push(Tested {
                name: format!("{}, {}", place_of(row), row.figure.metric),
                error,
                of,
            });
        }
    }
    tested
}

/// Which part of what a histogram counts is in another bin than published. `None`: it is none, or
/// nothing was counted.
fn wrong_bins(rows: &[Row]) -> Option<f64> {
    let (mut right, mut all) = (0.0, 0.0);
    for row in rows.iter().filter(|row| is_bin(row)) {
        let ours = row.after?;
        // A bin that is not given had nothing in it: the others have all there is.
        right += ours.min(row.figure.after.unwrap_or(0.0));
        all += ours;
    }
    (all > 0.0).then(|| (all - right) / all * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;

    fn row(metric: &str, unit: &str, published: f64, after: f64) -> Row {
        let figure = published::Row {
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            after: Some(published),
            ..published::built_in("dirty-log").remove(0)
        };
        Row {
            after: Some(after),
            error_percent: (published > 0.0).then(|| (after / published - 1.0) * 100.0),
            ..Row::not_run("dirty-log", figure, "")
        }
    }

    #[test]
    fn a_histogram_is_one_row_and_each_bin_is_counted_beside_it() {
        let rows = [
            row("time", "s", 100.0, 102.0),
            row("calls 0-1", "count", 0.0, 0.0),
            row("calls 2-3", "count", 10.0, 0.0),
            row("calls 4-7", "count", 90.0, 100.0),
            row("time", "s", 100.0, 80.0),
        ];
        let summary = Summary::of(&rows);
        // 10 of 100 are in a wrong bin; the row of 20 % is beyond.
        let Tally { rows, within, .. } = summary.not_fitted;
        assert_eq!((rows, within), (3, 2));
        assert_eq!(summary.not_fitted.median_percent, Some(10.0));
        assert_eq!(summary.not_fitted.beyond.len(), 1);
        assert!(summary.not_fitted.beyond[0].ends_with("time: -20.0 %"));
        // And the bin that lacks ten is.
        let Tally { rows, within, .. } = summary.each_bin;
        assert_eq!((rows, within), (4, 2));
        let text = summary.text();
        assert!(
            text.starts_with(
                "rows on which nothing was fitted: 2 of 3 within 15 % (67 %), median 10.0 %\n"
            ),
            "{text}"
        );
        assert!(text.contains("each bin of a histogram by itself: 2 of 4"), "{text}");
        // The row, and once the bin.
        assert_eq!(text.matches("beyond: ").count(), 2, "{text}");
    }

    #[test]
    fn a_ratio_is_that_of_the_change() {
        let with = |before: f64, after: f64, ours: (f64, f64)| {
            let mut row = row("a", "s", after, ours.1);
            (row.figure.before, row.before) = (Some(before), Some(ours.0));
            row
        };
        // Both figures a half too small; one of them alone; fitted on both; on the first.
        let mut rows = [
            with(100.0, 10.0, (50.0, 5.0)),
            with(100.0, 10.0, (100.0, 5.0)),
            with(100.0, 10.0, (100.0, 5.0)),
            with(100.0, 10.0, (100.0, 9.5)),
        ];
        (rows[2].fitted, rows[3].fitted, rows[3].fitted_before) = (true, true, true);
        let ratios = Summary::of(&rows).ratios;
        assert_eq!((ratios.rows, ratios.within), (3, 2));
        assert!(ratios.beyond[0].ends_with("+100.0 %"), "{:?}", ratios.beyond);
    }

    #[test]
    fn what_was_fitted_is_not_counted() {
        let mut rows =
            [row("a", "s", 100.0, 101.0), row("b", "s", 100.0, 150.0), row("c", "s", 100.0, 200.0)];
        rows[1].fitted = true;
        rows[2].fitted = true;
        rows[2].fitted_before = true;
        let summary = Summary::of(&rows);
        assert_eq!((summary.not_fitted.rows, summary.not_fitted.within), (1, 1));
        // After the change it is a test.
        let tally = &summary.with_fitted_before;
        assert_eq!((tally.rows, tally.within), (2, 1));
        assert_eq!(Summary::of(&[]).text(), "");
    }
}

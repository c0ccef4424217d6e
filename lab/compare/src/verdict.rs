//! What Tablewright aims for, beside what was measured.

use super::Row;
use super::subject::{OURS, Operation};
use crate::arena::Memory;
use crate::report;

/// A figure with the bound that it has to keep.
struct Aim {
    /// What is compared with what.
    words: &'static str,
    /// The operation that is measured.
    operation: Operation,
    /// Which of its ratios.
    ratio: Ratio,
    bound: Bound,
}

type Ratio = fn(&Row) -> Option<f64>;

#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn is_met(self, figure: f64) -> bool {
        match self {
            Self::AtMost(bound) => figure <= bound,
            Self::AtLeast(bound) => figure >= bound,
        }
    }

    fn words(self) -> String {
        match self {
            Self::AtMost(bound) => format!("at most {bound:.2}"),
            Self::AtLeast(bound) => format!("at least {bound:.2}"),
        }
    }
}

/// Ratios in one run on warm memory; docs/compare.md says where they come from.
const AIMS: [Aim; 9] = {
    use Bound::{AtLeast, AtMost};
    use Operation::{Detach, Map, MapTogether, Protect, ProtectHardware, ProtectLive, Unmap};
    [
        aim(Map, "map: time, to the bare loop", BARE, AtMost(1.5)),
        // 0.9 of what two threads reach that fill two arrays.
        aim(
            MapTogether,
            "map by two threads: time, to two arrays",
            BARE,
            AtMost(1.11),
        ),
        aim(
            Map,
            "map: speed, to the best other crate",
            OTHER,
            AtLeast(3.0),
        ),
        aim(
            Protect,
            "protect: speed, to the best other crate",
            OTHER,
            AtLeast(3.0),
        ),
        aim(
            ProtectLive,
            "protect (live): time, to tables out of use",
            DEAD,
            AtMost(1.1),
        ),
        aim(
            ProtectHardware,
            "protect (hw writes): time, to bare exchanges",
            BARE,
            AtMost(1.1),
        ),
        aim(Unmap, "unmap: time, to the bare loop", BARE, AtMost(1.5)),
        aim(
            Unmap,
            "unmap: speed, to the best other crate",
            OTHER,
            AtLeast(1.5),
        ),
        aim(
            Detach,
            "detach: speed, to the best other crate",
            OTHER,
            AtLeast(1.0),
        ),
    ]
};

const BARE: Ratio = |row| row.ratio_to_bare;
const OTHER: Ratio = |row| row.ratio_to_best_other;
const DEAD: Ratio = |row| row.ratio_to_dead;

const fn aim(operation: Operation, words: &'static str, ratio: Ratio, bound: Bound) -> Aim {
    Aim {
        words,
        operation,
        ratio,
        bound,
    }
}

/// The aims that can be judged by `rows`, as a table; nothing if there are none.
pub fn text(rows: &[Row]) -> String {
    let judged: Vec<[String; 4]> = AIMS
        .iter()
        .filter_map(|aim| {
            let row = rows.iter().find(|row| {
                row.name == OURS && row.memory == Memory::Warm && row.operation == aim.operation
            })?;
            let figure = (aim.ratio)(row)?;
            let verdict = if aim.bound.is_met(figure) {
                "met"
            } else {
                "missed"
            };
            Some([
                aim.words.to_owned(),
                verdict.to_owned(),
                report::figure(figure),
                aim.bound.words(),
            ])
        })
        .collect();
    if judged.is_empty() {
        return String::new();
    }
    let header = ["aim of tablewright, warm memory", "", "ratio", "should be"];
    format!("\n{}", report::table(header, 2, judged))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operation: Operation, bare: f64, other: Option<f64>) -> Row {
        Row {
            name: OURS,
            version: "",
            operation,
            method: "",
            memory: Memory::Warm,
            threads: 1,
            ns_per_entry: 1.0,
            ratio_to_bare: Some(bare),
            ratio_to_best_other: other,
            ratio_to_dead: None,
            spread: 0.0,
            samples: [1.0].into_iter().collect(),
        }
    }

    #[test]
    fn aims_are_met_or_missed_and_left_out_without_figures() {
        let text = text(&[
            row(Operation::Map, 1.4, Some(2.9)),
            row(Operation::Unmap, 1.6, None),
        ]);
        let verdicts: Vec<_> = text
            .lines()
            .flat_map(str::split_whitespace)
            .filter(|word| ["met", "missed"].contains(word))
            .collect();
        assert_eq!(verdicts, ["met", "missed", "missed"]);
    }

    #[test]
    fn cold_memory_and_other_crates_are_not_judged() {
        let mut cold = row(Operation::Map, 1.0, None);
        cold.memory = Memory::Cold;
        let mut other = row(Operation::Map, 1.0, None);
        other.name = "bare";
        assert_eq!(text(&[cold, other]), "");
    }
}

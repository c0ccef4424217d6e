//! Published results: tables of figures that others measured, as rows with units.
//!
//! A table is a CSV file with the columns of [`COLUMNS`]. Those that come with the program are
//! transcribed, not computed, and hold what was published even where a percentage does not follow
//! from its own row.

use std::io;
use std::path::Path;

use serde::Deserialize;

use crate::error::Error;
use crate::file;
use crate::size::Size;

/// The columns of a table, in any order.
const COLUMNS: &str = "system,configuration,metric,before,after,unit,published improvement";

/// What a figure may be, in milliseconds: what virtual time tells from nothing, and what it has.
const NANOSECOND_MS: f64 = 1e-6;
const MOST_DAYS: u32 = 100;
const MOST_MS: f64 = MOST_DAYS as f64 * 86_400e3;

/// The experiments with published results, by name, and their tables.
pub const EXPERIMENTS: [(&str, &str); 5] = [
    ("map-mem", include_str!("../published/map-mem.csv")),
    (
        "page-table-test",
        include_str!("../published/page-table-test.csv"),
    ),
    ("dirty-log", include_str!("../published/dirty-log.csv")),
    ("tlb-flush", include_str!("../published/tlb-flush.csv")),
    (
        "write-protect",
        include_str!("../published/write-protect.csv"),
    ),
];

/// One row of a table, as published.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What it was measured on.
    pub system: String,
    /// What was measured there.
    pub configuration: String,
    /// Which figure it is.
    pub metric: String,
    /// Before the improvement.
    pub before: Option<f64>,
    /// After it.
    pub after: Option<f64>,
    /// What both count.
    pub unit: String,
    /// The improvement, in the words of the publication.
    #[serde(rename = "published improvement", default)]
    pub improvement: String,
}

impl From<TableError> for Error {
    fn from(error: TableError) -> Self {
        Self::Usage(error.to_string())
    }
}

/// What is wrong with a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A line is no row.
    #[error("line {line}: {problem}")]
    Line {
        /// Counted from one, the header included.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// There are no rows.
    #[error("no rows; expected the columns {COLUMNS}")]
    Empty,
    /// A row's system does not say how much RAM it has.
    #[error("system '{0}' does not end with its RAM, as in 'Ampere Altra VM, 64G'")]
    Ram(String),
    /// A row's configuration is none that this program knows.
    #[error("configuration '{0}': {1}")]
    Configuration(String, String),
    /// A row has no figure that can be compared.
    #[error("{system}, {configuration}: {problem}")]
    Figure {
        /// The row's system.
        system: String,
        /// The row's configuration.
        configuration: String,
        /// Why.
        problem: String,
    },
}

impl Row {
    /// The RAM of the system: the size behind the last comma of its name.
    pub fn ram(&self) -> Result<Size, TableError> {
        self.system
            .rsplit_once(',')
            .and_then(|(_, size)| size.trim().parse().ok())
            .ok_or_else(|| TableError::Ram(self.system.clone()))
    }

    /// The configuration without a remark in parentheses behind it, such as the name of the one
    /// that measured.
    pub fn without_remark(&self) -> &str {
        match self.configuration.rsplit_once(" (") {
            Some((before, remark)) if remark.ends_with(')') => before,
            _ => &self.configuration,
        }
    }

    /// The figure after the improvement, in milliseconds.
    pub fn after_ms(&self) -> Result<f64, TableError> {
        let wrong = |problem: String| TableError::Figure {
            system: self.system.clone(),
            configuration: self.configuration.clone(),
            problem,
        };
        let after = self
            .after
            .ok_or_else(|| wrong("there is no figure in the column 'after'".to_owned()))?;
        let scale = match self.unit.as_str() {
            "s" => 1e3,
            "ms" => 1.0,
            "us" => 1e-3,
            "ns" => 1e-6,
            unit => {
                return Err(wrong(format!(
                    "'{unit}' is no unit of time: use s, ms, us or ns"
                )));
            }
        };
        // Relative errors are computed from it, and virtual time is whole picoseconds and has an
        // end.
        let after_ms = after * scale;
        match (NANOSECOND_MS..=MOST_MS).contains(&after_ms) {
            true => Ok(after_ms),
            false => Err(wrong(format!(
                "{after:?} {} is not a time to compare with: 1 ns to {MOST_DAYS} days",
                self.unit
            ))),
        }
    }
}

/// The table of an experiment, or `None` if there is no such experiment.
pub fn built_in(experiment: &str) -> Option<Vec<Row>> {
    let (_, text) = EXPERIMENTS.iter().find(|(name, _)| *name == experiment)?;
    // A test reads all of them.
    Some(parse(text.as_bytes()).unwrap_or_default())
}

/// The table in a file.
pub fn read(path: &Path) -> Result<Vec<Row>, Error> {
    let bytes = file::read(path, "table")?;
    parse(&bytes[..]).map_err(|error| Error::input(path.display(), error))
}

/// The rows of a table.
pub fn parse(csv: impl io::Read) -> Result<Vec<Row>, TableError> {
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .from_reader(csv);
    check_header(reader.headers().map_err(|error| refusal(&error))?)?;
    let rows: Vec<Row> = reader
        .deserialize()
        .collect::<Result<_, _>>()
        .map_err(|error| refusal(&error))?;
    if rows.is_empty() {
        return Err(TableError::Empty);
    }
    Ok(rows)
}

/// Refuses a header that has a column which no table has, or lacks one that is needed. An empty
/// file has none.
fn check_header(header: &csv::StringRecord) -> Result<(), TableError> {
    let wrong = |problem: String| TableError::Line { line: 1, problem };
    let known: Vec<&str> = COLUMNS.split(',').collect();
    if header.is_empty() {
        return Ok(());
    }
    if let Some(column) = header.iter().find(|column| !known.contains(column)) {
        return Err(wrong(format!(
            "unknown column {column:?}: expected {COLUMNS}"
        )));
    }
    let needed = known
        .iter()
        .filter(|column| **column != "published improvement");
    match needed
        .into_iter()
        .find(|column| !header.iter().any(|has| has == **column))
    {
        Some(missing) => Err(wrong(format!("no column '{missing}': expected {COLUMNS}"))),
        None => Ok(()),
    }
}

/// The crate's message says where in many words and on one line or more; line and reason are
/// enough.
fn refusal(error: &csv::Error) -> TableError {
    let line = error.position().map_or(1, csv::Position::line);
    let problem = match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => match err.field() {
            Some(field) => format!("column {}: {}", field + 1, err.kind()),
            None => err.kind().to_string(),
        },
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => format!("{len} columns instead of {expected_len}"),
        csv::ErrorKind::Utf8 { .. } => "not UTF-8".to_owned(),
        _ => error.to_string(),
    };
    TableError::Line {
        line,
        problem: problem.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_published_table_can_be_read() {
        let rows: Vec<_> = EXPERIMENTS
            .iter()
            .map(|(name, text)| (*name, parse(text.as_bytes()).unwrap().len()))
            .collect();
        assert_eq!(
            rows,
            [
                ("map-mem", 30),
                ("page-table-test", 13),
                ("dirty-log", 13),
                ("tlb-flush", 3),
                ("write-protect", 7),
            ]
        );
        assert_eq!(built_in("map-mem").unwrap().len(), 30);
        assert!(built_in("fly").is_none());
    }

    #[test]
    fn each_system_of_the_linear_map_says_its_ram() {
        for row in built_in("map-mem").unwrap() {
            let ram = row.ram().unwrap();
            assert!([16 << 30, 36 << 30, 64 << 30, 256 << 30, 512 << 30].contains(&ram.bytes()));
            assert!(row.after_ms().unwrap() > 10.0);
        }
    }

    fn refused(text: &str) -> String {
        parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_table_says_why() {
        let with = |lines: &str| refused(&format!("{COLUMNS}\n{lines}"));
        assert!(refused("").starts_with("no rows"));
        assert!(with("").starts_with("no rows"));
        assert!(
            refused("a,b\n1,2\n").starts_with("line 1: unknown column \"a\": expected system,")
        );
        let short = COLUMNS.replace("unit,", "");
        assert!(refused(&format!("{short}\n")).starts_with("line 1: no column 'unit': "));
        assert_eq!(with("a,b\n"), "line 2: 2 columns instead of 7");
        assert_eq!(
            with("a,b,c,1,2,s,\na,b,c,x,2,s,\n"),
            "line 3: column 4: invalid float literal"
        );
    }

    #[test]
    fn figures_are_times_or_are_refused() {
        let row = |after: &str, unit: &str| {
            let text = format!("{COLUMNS}\n\"a, 4G\",b,c,,{after},{unit},\n");
            parse(text.as_bytes()).unwrap().remove(0)
        };
        assert_eq!(row("2", "s").after_ms(), Ok(2000.0));
        assert_eq!(row("2", "ms").after_ms(), Ok(2.0));
        assert_eq!(row("2", "us").after_ms(), Ok(0.002));
        assert_eq!(row("2e6", "ns").after_ms(), Ok(2.0));
        for (after, unit, says) in [
            ("", "s", "no figure"),
            ("1", "pages", "no unit of time"),
            ("0", "s", "not a time"),
            ("-1", "s", "not a time"),
            ("nan", "s", "not a time"),
            ("inf", "s", "not a time"),
        ] {
            let message = row(after, unit).after_ms().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
        let mut nowhere = row("1", "s");
        nowhere.system = "a 4G".into();
        assert!(nowhere.ram().is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_every_refusal_is_one_line(
            text in prop_oneof![".*", "(system|before|,|\"|\n|1|a){0,40}"],
            header in any::<bool>(),
        ) {
            let text = if header { format!("{COLUMNS}\n{text}") } else { text };
            if let Err(error) = parse(text.as_bytes()) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}

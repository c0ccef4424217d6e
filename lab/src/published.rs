//! Published results: tables of figures that others measured, as rows with units.
//!
//! A table is a CSV file with the columns of [`COLUMNS`]. Those that come with the program are
//! transcribed, not computed, and hold what was published even where a percentage does not follow
//! from its own row.

use std::io;
use std::path::Path;

use serde::Deserialize;

use tablewright_machine::{Profile, RowSelector};

use crate::error::Error;
use crate::file;
use crate::output::columns::{Cell, columns};
use crate::output::report::{self, error_percent};
use crate::size::Size;

/// The columns of a table, in any order.
const COLUMNS: &str = "system,configuration,metric,before,after,unit,published improvement";

/// Bounds of a figure, in milliseconds: the least that virtual time tells from nothing, and its
/// end.
const NANOSECOND_MS: f64 = 1e-6;
const MOST_DAYS: u32 = 100;
const MOST_MS: f64 = MOST_DAYS as f64 * 86_400e3;

macro_rules! tables {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../published/", $name, ".csv")))),*]
    };
}

/// The experiments with published results, by name, and their tables.
pub const EXPERIMENTS: [(&str, &str); 5] =
    tables!("map-mem" "page-table-test" "dirty-log" "tlb-flush" "write-protect");

/// One row of a table, as published.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub system: String,
    pub configuration: String,
    pub metric: String,
    pub before: Option<f64>,
    pub after: Option<f64>,
    pub unit: String,
    #[serde(rename = "published improvement", default)]
    pub improvement: String,
}

impl From<TableError> for Error {
    fn from(error: TableError) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Why a table, or a row of it, is none that can be compared with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("line {line}: {problem}")]
    Line { line: u64, problem: String },
    #[error("no rows; expected the columns {COLUMNS}")]
    Empty,
    #[error("system '{0}' does not end with its RAM, as in 'Ampere Altra VM, 64G'")]
    Ram(String),
    #[error("configuration '{0}': {1}")]
    Configuration(String, String),
    #[error("{0}, {1}: {2}")]
    Figure(String, String, String),
}

impl Row {
    /// Whether a profile describes its system.
    pub fn is_of(&self, profile: &Profile) -> bool {
        profile.system.published_as.contains(&self.system)
    }

    /// Whether the costs of a profile were fitted on it.
    pub fn is_fitted(&self, profile: &Profile) -> bool {
        profile.is_fitted_on_metric(&self.system, &self.configuration, &self.metric)
    }

    /// Returns the gap that a profile admits for it.
    pub fn unexplained(&self, profile: &Profile) -> Option<String> {
        let this =
            |row: &RowSelector| row.selects_metric(&self.system, &self.configuration, &self.metric);
        let gap = profile.unexplained.iter().find(|gap| gap.rows.iter().any(this))?;
        Some(gap.what.trim().to_owned())
    }

    /// The RAM of the system: the size behind the last comma of its name.
    pub fn ram(&self) -> Result<Size, TableError> {
        let size = self.system.rsplit_once(',');
        size.and_then(|(_, size)| size.trim().parse().ok())
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

    /// A figure with its unit; times in the unit that fits.
    pub fn shown(&self, value: Option<f64>) -> String {
        let Some(value) = value else {
            return "-".to_owned();
        };
        let nanoseconds = match self.unit.as_str() {
            "s" => 1e9,
            "ms" => 1e6,
            "us" => 1e3,
            "ns" => 1.0,
            "count" => return report::count(value as u64),
            _ => return report::figure(value),
        };
        report::time(value * nanoseconds)
    }

    /// The figure after the improvement, in milliseconds.
    pub fn after_ms(&self) -> Result<f64, TableError> {
        let wrong = |problem: String| {
            TableError::Figure(self.system.clone(), self.configuration.clone(), problem)
        };
        let none = || wrong("there is no figure in the column 'after'".to_owned());
        let after = self.after.ok_or_else(none)?;
        let scale = match self.unit.as_str() {
            "s" => 1e3,
            "ms" => 1.0,
            "us" => 1e-3,
            "ns" => 1e-6,
            unit => {
                let problem = format!("'{unit}' is no unit of time: use s, ms, us or ns");
                return Err(wrong(problem));
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

/// A published row, and what the lab has for it.
#[derive(Clone, Debug)]
pub struct Reproduced {
    pub experiment: &'static str,
    pub figure: Row,
    /// Figures here: before the improvement, after it, and in the engine's own way.
    pub before: Option<f64>,
    pub after: Option<f64>,
    pub tablewright: Option<f64>,
    /// How much more `after` is than what was published.
    pub error_percent: Option<f64>,
    pub fitted: bool,
    /// Fitted to the figure before the change alone, so that the one after it is a test.
    pub fitted_before: bool,
    pub note: String,
}

columns! { row: Reproduced;
    ["experiment"] [] Cell::text(row.experiment);
    ["system"] [] Cell::text(&row.figure.system);
    ["configuration"] [] Cell::text(&row.figure.configuration);
    ["metric"] [] Cell::text(&row.figure.metric);
    ["unit"] [] Cell::text(&row.figure.unit);
    ["published_before"] [] Cell::json(row.figure.before);
    ["published_after"] [] Cell::json(row.figure.after);
    ["before"] [] Cell::json(row.before);
    ["after"] [] Cell::json(row.after);
    ["tablewright"] [] Cell::json(row.tablewright);
    ["error_percent"] [] Cell::json(row.error_percent);
    ["fitted"] [] Cell::json(row.fitted);
    ["fitted_before"] [] Cell::json(row.fitted_before);
    ["note"] [] Cell::text(&row.note);
}

impl Reproduced {
    /// A row that nothing was run for.
    pub fn not_run(experiment: &'static str, figure: Row, note: &str) -> Self {
        Self {
            experiment,
            figure,
            before: None,
            after: None,
            tablewright: None,
            error_percent: None,
            fitted: false,
            fitted_before: false,
            note: note.to_owned(),
        }
    }

    /// Sets the figures of a profile's machine beside a row: before, after, and by the engine.
    /// `note` says how it ran.
    pub fn new(
        experiment: &'static str,
        figure: Row,
        profile: &Profile,
        ran: [Option<f64>; 3],
        note: &str,
    ) -> Self {
        let [before, after, tablewright] = ran;
        let error = after.zip(figure.after).map(|(a, b)| error_percent(a, b));
        let gap = figure.unexplained(profile);
        let gap = gap.map_or(String::new(), |gap| format!("; not explained: {gap}"));
        Self {
            before,
            after,
            tablewright,
            // Of nothing there is no relative error.
            error_percent: error.filter(|error| error.is_finite()),
            fitted: figure.is_fitted(profile),
            ..Self::not_run(
                experiment,
                figure,
                &format!("on {}, virtual time{note}{gap}", profile.name),
            )
        }
    }
}

impl Reproduced {
    /// Figures as text: published before and after, here before and after, Tablewright.
    pub fn figures(&self) -> [String; 5] {
        let Self { figure, before, after, tablewright, .. } = self;
        [figure.before, figure.after, *before, *after, *tablewright].map(|it| figure.shown(it))
    }
}

/// The note of a row that no profile describes.
pub const NO_PROFILE: &str = "no profile describes this system";
/// And what is said of one that was fitted on the figure before the change.
pub const FITTED_BEFORE: &str =
    "; fitted on the figure before the change alone, the one after it is a test";

/// The table of an experiment, without rows if there is no such experiment. A test reads all.
pub fn built_in(experiment: &str) -> Vec<Row> {
    let table = EXPERIMENTS.iter().find(|(name, _)| *name == experiment);
    table.map_or(Vec::new(), |(_, text)| parse(text.as_bytes()).unwrap_or_default())
}

/// The rows of it that are of the system that a profile describes.
pub fn of(experiment: &str, profile: &Profile) -> Vec<Row> {
    let mut rows = built_in(experiment);
    rows.retain(|row| row.is_of(profile));
    rows
}

/// The table in a file.
pub fn read(path: &Path) -> Result<Vec<Row>, Error> {
    let bytes = file::read(path, "table")?;
    parse(&bytes[..]).map_err(|error| Error::input(path.display(), error))
}

/// The rows of a table.
pub fn parse(csv: impl io::Read) -> Result<Vec<Row>, TableError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(csv);
    check_header(reader.headers().map_err(|error| refusal(&error))?)?;
    let rows: Vec<Row> =
        reader.deserialize().collect::<Result<_, _>>().map_err(|error| refusal(&error))?;
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
        return Err(wrong(format!("unknown column {column:?}: expected {COLUMNS}")));
    }
    let needed = known.iter().filter(|column| **column != "published improvement");
    match needed.into_iter().find(|column| !header.iter().any(|has| has == **column)) {
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
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("{len} columns instead of {expected_len}")
        }
        csv::ErrorKind::Utf8 { .. } => "not UTF-8".to_owned(),
        _ => error.to_string(),
    };
    TableError::Line { line, problem: problem.split_whitespace().collect::<Vec<_>>().join(" ") }
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
                ("dirty-log", 40),
                ("tlb-flush", 3),
                ("write-protect", 7),
            ]
        );
        assert!(built_in("fly").is_empty());
    }

    #[test]
    fn each_system_of_the_linear_map_says_its_ram() {
        for row in built_in("map-mem") {
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
        assert_eq!(with("a,b,c,1,2,s,\na,b,c,x,2,s,\n"), "line 3: column 4: invalid float literal");
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

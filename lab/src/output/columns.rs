//! Columns as data: one description of a column gives the field of the JSON and the cell of the
//! table.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;

use crate::output::report::{at_most, count, figure, marked, table_of, time, time_if_any, wrapped};
use crate::size::human;

/// A figure of a row: a number in the JSON, and in a table the number with its unit.
pub enum Cell {
    /// A time, as the JSON has it, and how many nanoseconds one of its units are.
    Time(f64, f64),
    /// A time; a dash in tables for no time at all.
    TimeIfAny(f64, f64),
    /// A count.
    Count(u64),
    /// Bytes.
    Bytes(u64),
    /// A number without a unit.
    Figure(f64),
    /// Words.
    Text(String),
    /// An error in percent, and whether the machine was fitted on the figure.
    Marked(Option<f64>, bool),
    /// No figure: null, and a dash.
    Nothing,
    /// No field at all.
    Absent,
    /// The JSON, where it is not in a table.
    Json(Value),
}

impl Cell {
    /// A value of the JSON that no table shows.
    pub fn json(value: impl Serialize) -> Self {
        Self::Json(serde_json::to_value(value).unwrap_or_default())
    }

    /// The figure, or a dash if there is none.
    pub fn or_nothing<T>(value: Option<T>, cell: impl FnOnce(T) -> Self) -> Self {
        value.map_or(Self::Nothing, cell)
    }

    /// Words.
    pub fn text(words: impl ToString) -> Self {
        Self::Text(words.to_string())
    }

    /// Nanoseconds.
    pub const fn ns(time: f64) -> Self {
        Self::Time(time, 1.0)
    }

    /// Microseconds.
    pub const fn us(time: f64) -> Self {
        Self::Time(time, 1e3)
    }

    /// Milliseconds.
    pub const fn ms(time: f64) -> Self {
        Self::Time(time, 1e6)
    }

    /// Seconds.
    pub const fn s(time: f64) -> Self {
        Self::Time(time, 1e9)
    }

    fn value(self) -> Option<Value> {
        Some(match self {
            Self::Time(number, _) | Self::TimeIfAny(number, _) | Self::Figure(number) => {
                number.into()
            }
            Self::Count(number) | Self::Bytes(number) => number.into(),
            Self::Text(words) => words.into(),
            Self::Marked(error, _) => error.into(),
            Self::Json(value) => value,
            Self::Nothing => Value::Null,
            Self::Absent => return None,
        })
    }

    fn shown(self) -> String {
        match self {
            Self::Time(number, unit) => time(number * unit),
            Self::TimeIfAny(number, unit) => time_if_any(number * unit),
            Self::Count(number) => count(number),
            Self::Bytes(bytes) => human(bytes),
            Self::Figure(number) => figure(number),
            Self::Text(words) => words,
            Self::Marked(Some(error), fitted) => marked(error, fitted),
            Self::Marked(None, _) => "-  ".to_owned(),
            Self::Nothing | Self::Absent | Self::Json(_) => "-".to_owned(),
        }
    }
}

/// A column of an experiment's rows.
pub struct Column<R> {
    /// The field of the JSON; empty for a column of a table alone.
    pub field: &'static str,
    /// The table that it is in: 1 and so on, 0 for all of them. `None`: in the JSON alone.
    pub table: Option<u8>,
    /// Heading in the table.
    pub head: &'static str,
    /// Why a row has no figure there, for the line below the table.
    pub none: &'static str,
    /// The figure of a row.
    pub get: fn(&R) -> Cell,
}

/// A row that is described by its columns; see [`columns`](crate::output::columns).
pub trait Columns: Sized + 'static {
    /// In the order of the JSON, which is also that of each table.
    const COLUMNS: &'static [Column<Self>];
}

/// A published figure for the run at hand.
pub const NOT_PUBLISHED: &str = "nothing is published of this run";

/// Prints one table: its first `words` columns are words, the others figures. Lines below the table
/// give the reason of each dash.
pub fn table<R: Columns>(number: u8, words: usize, rows: &[R]) -> String {
    let shown = |column: &&Column<R>| column.table.is_some_and(|of| of == 0 || of == number);
    let columns: Vec<&Column<R>> = R::COLUMNS.iter().filter(shown).collect();
    let header = columns.iter().map(|column| column.head.to_owned());
    let cells = |row: &R| columns.iter().map(|it| (it.get)(row).shown()).collect();
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let none = reasons(&columns, &cells);
    table_of(header.collect(), words, cells) + &none
}

/// The reasons of dashes, each with the columns that it is of.
fn reasons<R>(columns: &[&Column<R>], cells: &[Vec<String>]) -> String {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (at, column) in columns.iter().enumerate() {
        if column.none.is_empty() || !cells.iter().any(|row| row[at].trim() == "-") {
            continue;
        }
        let head = column.head.replace("-\n", "").replace('\n', " ").trim().to_owned();
        match reasons.iter_mut().find(|(why, _)| *why == column.none) {
            Some((_, heads)) if heads.contains(&head) => {}
            Some((_, heads)) => heads.push(head),
            None => reasons.push((column.none, vec![head])),
        }
    }
    let line = |(why, heads): &(&str, Vec<String>)| format!("{}: {why}", heads.join(", "));
    match reasons.iter().map(line).collect::<Vec<_>>().join("; ") {
        text if text.is_empty() => text,
        text => wrapped(&format!("- {text}"), at_most(80), "  ") + "\n",
    }
}

/// The fields of a row, for an implementation of [`Serialize`].
///
/// # Errors
/// As the serializer's.
pub fn serialize<R: Columns, S: Serializer>(row: &R, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    for column in R::COLUMNS.iter().filter(|column| !column.field.is_empty()) {
        if let Some(value) = (column.get)(row).value() {
            map.serialize_entry(column.field, &value)?;
        }
    }
    map.end()
}

/// Describes the rows of an experiment, a column a line: `["field"] [TABLE "head"] cell;`, with
/// empty brackets where it is not in the JSON, or in no table, and `[TABLE "head" REASON]` where a
/// cell may be a dash. `table of` rows that have a JSON of
/// their own describes their tables alone.
macro_rules! columns {
    (@) => { None };
    (@ $table:literal) => { Some($table) };
    (!) => { "" };
    (! $none:expr) => { $none };
    (table of $row:ident: $Row:ty;
     $([$($field:literal)?] [$($table:literal $head:literal $($none:expr)?)?] $cell:expr;)*) => {
        impl $crate::output::columns::Columns for $Row {
            const COLUMNS: &'static [$crate::output::columns::Column<Self>] = &[
                $($crate::output::columns::Column {
                    field: concat!($($field)?),
                    table: $crate::output::columns::columns!(@ $($table)?),
                    head: concat!($($head)?),
                    none: $crate::output::columns::columns!(! $($($none)?)?),
                    get: {
                        // A cell may be the same in all rows.
                        #[allow(unused_variables)]
                        |$row: &Self| $cell
                    },
                }),*
            ];
        }
    };
    ($row:ident: $Row:ty; $($columns:tt)*) => {
        $crate::output::columns::columns! { table of $row: $Row; $($columns)* }

        impl serde::Serialize for $Row {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::output::columns::serialize(self, serializer)
            }
        }
    };
}

pub(crate) use columns;

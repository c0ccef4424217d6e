//! How a result leaves the program: a table for people or JSON for programs on stdout, warnings
//! beside it.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::Serialize;
use serde_json::Value;

use crate::error::Error;

/// The result of an experiment, in the one shape that all experiments have.
#[derive(Serialize)]
pub struct Report<P, R> {
    /// The sub-command.
    pub experiment: &'static str,
    /// Arguments, with the defaults filled in.
    pub parameters: P,
    pub rows: Vec<R>,
    pub warnings: Vec<String>,
}

impl<P: Serialize, R: Serialize> Report<P, R> {
    /// Writes the report as JSON, or `text` and the warnings for people.
    pub fn print(&self, json: bool, text: impl FnOnce(&Self) -> String) -> Result<(), Error> {
        if json {
            return print_json(self);
        }
        print(&text(self))?;
        for warning in &self.warnings {
            complain("warning", warning);
        }
        Ok(())
    }
}

/// The user asks for CSV.
static CSV: AtomicBool = AtomicBool::new(false);

/// Has the rows of results written as CSV from here on, where JSON would be.
pub fn write_csv() {
    CSV.store(true, Ordering::Relaxed);
}

/// The rows of a result as CSV. A column is a key, in the order in which keys come; of what is
/// nested, keys are joined by a dot, and a list is JSON.
fn csv_of(result: &Value) -> Result<String, Error> {
    let rows = match result {
        Value::Array(rows) => rows,
        result => result.get("rows").and_then(Value::as_array).ok_or_else(|| {
            Error::Usage("--csv prints rows, and this has none: --json prints it".to_owned())
        })?,
    };
    let rows: Vec<Vec<(String, String)>> =
        rows.iter().map(|row| flat(String::new(), row)).collect();
    let mut columns: Vec<&str> = Vec::new();
    for (column, _) in rows.iter().flatten() {
        if !columns.contains(&column.as_str()) {
            columns.push(column);
        }
    }
    if columns.is_empty() {
        return Ok(String::new());
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    let written = |error: csv::Error| Error::Write(error.into());
    writer.write_record(&columns).map_err(written)?;
    for row in &rows {
        let cell = |column: &&str| row.iter().find(|(of, _)| of == column).map_or("", |(_, is)| is);
        writer.write_record(columns.iter().map(cell)).map_err(written)?;
    }
    let bytes = writer.into_inner().map_err(|error| Error::Write(io::Error::other(error)))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The cells of a row.
fn flat(name: String, value: &Value) -> Vec<(String, String)> {
    let joined = |key: &String| match name.as_str() {
        "" => key.clone(),
        name => format!("{name}.{key}"),
    };
    match value {
        Value::Object(parts) => {
            parts.iter().flat_map(|(key, value)| flat(joined(key), value)).collect()
        }
        Value::Null => vec![(name, String::new())],
        Value::Array(list) if list.iter().all(Value::is_null) => vec![(name, String::new())],
        Value::String(text) => vec![(name, text.clone())],
        other => vec![(name, other.to_string())],
    }
}

/// Writes a result as JSON, or its rows as CSV.
pub fn print_json(result: &impl Serialize) -> Result<(), Error> {
    match CSV.load(Ordering::Relaxed) {
        true => print(&csv_of(&value_of(result)?)?),
        false => print(&json_of(result)?),
    }
}

/// A result as JSON.
pub fn json_of(result: &impl Serialize) -> Result<String, Error> {
    // Two steps, of which the second is compiled once for all results.
    Ok(format!("{:#}\n", value_of(result)?))
}

fn value_of(result: &impl Serialize) -> Result<Value, Error> {
    serde_json::to_value(result).map_err(|error| Error::Write(error.into()))
}

/// Checks that there is a standard output. One that was closed is `/dev/null` by now, open for
/// reading too, which `> /dev/null` is not: the language's start makes it so.
#[cfg(target_os = "linux")]
pub fn check_stdout() -> Result<(), Error> {
    use std::os::unix::fs::MetadataExt as _;
    // SAFETY: `fcntl` with `F_GETFL` reads the flags of a descriptor.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let device = |path: &str| std::fs::metadata(path).map(|it| it.rdev()).unwrap_or(0);
    let closed = flags & libc::O_ACCMODE == libc::O_RDWR
        && device("/dev/null") != 0
        && device("/proc/self/fd/1") == device("/dev/null");
    match closed {
        true => Err(Error::Write(io::Error::other("standard output is closed"))),
        false => Ok(()),
    }
}

/// Elsewhere it is not known.
#[cfg(not(target_os = "linux"))]
pub fn check_stdout() -> Result<(), Error> {
    Ok(())
}

/// Writes to stdout. A closed pipe is not an error: `head` has what it wants.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::Write(error)),
        _ => Ok(()),
    }
}

/// Writes one line to stderr, whatever the message holds: names of files may hold line breaks and
/// worse.
pub fn complain(kind: &str, message: &impl Display) {
    let mut line = String::new();
    for character in message.to_string().chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    // There is nowhere left to report it if this fails.
    let _ = writeln!(io::stderr(), "{kind}: {line}");
}

/// A line below the header, and nothing else.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// A table with numbers to the right and `words` columns of words to the left of them.
pub fn table<const N: usize>(header: [&str; N], words: usize, rows: Vec<[String; N]>) -> String {
    let rows = rows.into_iter().map(Vec::from).collect();
    table_of(header.map(str::to_owned).into(), words, rows)
}

/// A table of as many columns as the header has. Where it is wider than the terminal it is several
/// tables, one below the other.
pub fn table_of(header: Vec<String>, words: usize, rows: Vec<Vec<String>>) -> String {
    let whole = Whole { header, words, rows };
    whole.within(width())
}

/// Columns of the terminal that is written to; of any output, if the user says how many. None: as
/// many as it takes.
fn width() -> Option<usize> {
    let said = std::env::var("COLUMNS").ok();
    let said = said.and_then(|columns| columns.parse().ok());
    said.filter(|&columns| columns > 0).or_else(|| {
        let terminal = console::Term::stdout();
        let (_, columns) = terminal.size_checked().filter(|_| terminal.is_term())?;
        Some(columns.into())
    })
}

/// At most so many characters in a line; fewer on a terminal that has fewer.
pub fn at_most(characters: usize) -> usize {
    width().map_or(characters, |width| characters.min(width))
}

/// A table before it is cut to a width.
struct Whole {
    header: Vec<String>,
    /// Number of columns of words, which name the row.
    words: usize,
    rows: Vec<Vec<String>>,
}

impl Whole {
    /// In as many parts as it takes, each with the words and some of the figures; a part with one
    /// figure may be wider.
    fn within(&self, limit: Option<usize>) -> String {
        let fits = |text: &str| {
            limit.is_none_or(|limit| text.lines().all(|line| line.chars().count() <= limit))
        };
        let all: Vec<usize> = (0..self.header.len()).collect();
        let whole = self.drawn(&all);
        if fits(&whole) {
            return whole;
        }
        let (words, _) = all.split_at(self.words.min(all.len()));
        // All words if there is room for figures beside them, or those in front that leave a third
        // of it.
        let half = limit.map(|limit| limit * 2 / 3);
        let narrow = |columns: &usize| {
            let text = self.drawn(&words[..*columns]);
            half.is_none_or(|half| text.lines().all(|line| line.chars().count() <= half))
        };
        let names = match fits(&self.drawn(words)) {
            true => words.len(),
            false => (1..=words.len()).rev().find(narrow).unwrap_or(1),
        };
        let (names, figures) = all.split_at(names.clamp(1, all.len()));
        let mut parts = Vec::new();
        let mut columns = names.to_vec();
        for &figure in figures {
            columns.push(figure);
            if columns.len() > names.len() + 1 && !fits(&self.drawn(&columns)) {
                columns.pop();
                parts.push(self.drawn(&columns));
                columns.truncate(names.len());
                columns.push(figure);
            }
        }
        parts.push(self.drawn(&columns));
        parts.join("\n")
    }

    fn drawn(&self, columns: &[usize]) -> String {
        let some = |cells: &[String]| -> Vec<String> {
            let cells = columns.iter().map(|&number| cells.get(number).cloned());
            cells.map(Option::unwrap_or_default).collect()
        };
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header(some(&self.header));
        for row in &self.rows {
            table.add_row(some(row));
        }
        for (column, number) in table.column_iter_mut().zip(columns) {
            column.set_padding((0, 1));
            if *number >= self.words {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt() + "\n"
    }
}

/// Words in lines of at most `wide` characters, where they are not longer themselves; each line
/// after the first begins with `indent`.
pub fn wrapped(words: &str, wide: usize, indent: &str) -> String {
    let mut text = String::new();
    let mut line = 0;
    for word in words.split_whitespace() {
        let length = word.chars().count();
        if line > 0 && line + 1 + length > wide {
            text.push('\n');
            text.push_str(indent);
            line = indent.chars().count();
        } else if line > 0 {
            text.push(' ');
            line += 1;
        }
        text.push_str(word);
        line += length;
    }
    text
}

/// Lines above a table, broken between words where the terminal is narrower.
pub fn title(lines: &str) -> String {
    let Some(wide) = width() else {
        return lines.to_owned();
    };
    let fitted = |line: &str| match line.chars().count() > wide {
        true => wrapped(line, wide, "  "),
        false => line.to_owned(),
    };
    lines.split('\n').map(fitted).collect::<Vec<_>>().join("\n")
}

/// A number with three digits that matter; with fewer, rather than many zeros, if it is tiny.
pub fn figure(number: f64) -> String {
    let decimals = match number.abs() {
        n if n >= 99.95 => 0,
        n if n >= 9.995 => 1,
        n if n >= 0.1 => 2,
        n if n >= 0.01 || n == 0.0 => 3,
        _ => 5,
    };
    format!("{number:.decimals$}")
}

/// Nanoseconds in the unit that fits.
pub fn time(nanoseconds: f64) -> String {
    let (unit, scale) = match nanoseconds {
        n if n >= 1e9 => ("s", 1e9),
        n if n >= 1e6 => ("ms", 1e6),
        n if n >= 1e3 => ("us", 1e3),
        _ => ("ns", 1.0),
    };
    format!("{} {unit}", figure(nanoseconds / scale))
}

/// A time, or a dash for none: what was not there to be done takes no time.
pub fn time_if_any(nanoseconds: f64) -> String {
    match nanoseconds {
        0.0 => "-".to_owned(),
        _ => time(nanoseconds),
    }
}

/// How much more `this` is, in percent of `that`.
pub fn error_percent(this: f64, that: f64) -> f64 {
    (this - that) / that * 100.0
}

/// An error for people.
pub fn percent(error: f64) -> String {
    // No "-0.0".
    let error = if error.abs() < 0.05 { 0.0 } else { error };
    format!("{error:+.1} %")
}

/// An error with a mark, where the machine was fitted on the published figure.
pub fn marked(error: f64, fitted: bool) -> String {
    percent(error) + if fitted { " *" } else { "  " }
}

/// Explains the mark, below a table.
const FITTED: &str = "\n* the machine was fitted on this figure; every other is a test\n";

/// The explanation of the mark, if a figure has it.
pub const fn fitted(any: bool) -> &'static str {
    if any { FITTED } else { "" }
}

/// A count, with its thousands set apart.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count and what is counted.
pub fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_csv() {
        let rows = serde_json::json!({ "rows": [
            { "a": 1, "b": { "c": "x, y", "d": null } },
            { "a": 2.5, "e": [1, 2], "b": { "c": "\"" }, "f": [null] },
        ]});
        let text = "a,b.c,b.d,e,f\n1,\"x, y\",,,\n2.5,\"\"\"\",,\"[1,2]\",\n";
        assert_eq!(csv_of(&rows).unwrap(), text);
        assert_eq!(csv_of(&rows["rows"]).unwrap(), text);
        let error = csv_of(&serde_json::json!({ "answer": 1 })).unwrap_err();
        assert_eq!(error.to_string(), "--csv prints rows, and this has none: --json prints it");
        assert_eq!(csv_of(&serde_json::json!({ "rows": [] })).unwrap(), "");
    }

    #[test]
    fn counts_are_set_in_threes() {
        for (number, text) in
            [(0, "0"), (999, "999"), (1_000, "1,000"), (134_217_728, "134,217,728")]
        {
            assert_eq!(count(number), text);
        }
        assert_eq!(counted(1, "entry", "entries"), "1 entry");
        assert_eq!(counted(1024, "entry", "entries"), "1,024 entries");
    }

    #[test]
    fn a_table_is_cut_between_columns_and_every_part_has_the_words() {
        let cells = |row: &str| -> Vec<String> {
            ["name", "second", "third", "fourth"].map(|cell| format!("{cell} {row}")).into()
        };
        let whole = Whole { header: cells("0"), words: 1, rows: vec![cells("1"), cells("2")] };
        assert_eq!(whole.within(None).lines().count(), 4);
        assert_eq!(whole.within(None), whole.within(Some(80)));
        let one = whole.within(Some(1));
        assert_eq!(one.matches("name 1").count(), 3, "{one}");
        let two = whole.within(Some(28));
        assert_eq!(two.matches("name 1").count(), 2, "{two}");
        assert!(two.lines().all(|line| line.chars().count() <= 28), "{two}");
        for cell in cells("1").into_iter().chain(cells("2")) {
            assert!(two.contains(&cell) && one.contains(&cell), "{cell}");
        }
    }

    #[test]
    fn lines_are_broken_between_words_and_no_word_is_lost() {
        assert_eq!(wrapped("", 4, ""), "");
        assert_eq!(wrapped("a b", 4, ""), "a b");
        assert_eq!(wrapped("aa bb cc", 5, ""), "aa bb\ncc");
        assert_eq!(wrapped("aa bb cc", 5, "  "), "aa bb\n  cc");
        assert_eq!(wrapped("aa bbbbbb c", 5, "  "), "aa\n  bbbbbb\n  c");
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        for (nanoseconds, text) in
            [(650.0, "650 ns"), (4_890.0, "4.89 us"), (6.059e7, "60.6 ms"), (2.5e9, "2.50 s")]
        {
            assert_eq!(time(nanoseconds), text);
        }
    }

    #[test]
    fn figures_keep_the_digits_that_matter() {
        for (number, text) in [
            (0.0, "0.000"),
            (0.000_412, "0.00041"),
            (0.0234, "0.023"),
            (0.412, "0.41"),
            (12.34, "12.3"),
            (1234.5, "1234"),
        ] {
            assert_eq!(figure(number), text);
        }
    }
}

//! Runs of the program, and what every test asks of them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A command line: in one text, or word by word where a word has blanks.
pub trait Line {
    fn words(&self) -> Vec<&str>;
}

impl Line for str {
    fn words(&self) -> Vec<&str> {
        self.split(' ').collect()
    }
}

impl Line for String {
    fn words(&self) -> Vec<&str> {
        self.as_str().words()
    }
}

impl Line for [&str] {
    fn words(&self) -> Vec<&str> {
        self.to_vec()
    }
}

impl<const N: usize> Line for [&str; N] {
    fn words(&self) -> Vec<&str> {
        self.to_vec()
    }
}

impl Line for Vec<&str> {
    fn words(&self) -> Vec<&str> {
        self.clone()
    }
}

/// Runs the program.
pub fn tablewright(arguments: &(impl Line + ?Sized)) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tablewright"))
        .args(arguments.words())
        .stdin(Stdio::null())
        .output()
        .expect("the program runs")
}

pub fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

pub fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// Status 2, nothing on stdout, one line on stderr that says what is wrong.
pub fn assert_refused(arguments: &(impl Line + ?Sized), says: &str) {
    let arguments = &arguments.words();
    let output = tablewright(arguments);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.matches('\n').count(), 1, "{arguments:?}: {message}");
    assert!(message.starts_with("error: "), "{arguments:?}: {message}");
    assert!(!message.starts_with("error: error"), "{arguments:?}: {message}");
    assert!(message.contains(says), "{arguments:?}: {message}");
}

/// The report of a command, which has to succeed.
pub fn json(command: &(impl Line + ?Sized), arguments: &(impl Line + ?Sized)) -> Value {
    let line = [&command.words()[..], &["--json"], &arguments.words()].concat();
    let output = tablewright(&line);
    assert!(output.status.success(), "{line:?}: {}", stderr(&output));
    serde_json::from_str(stdout(&output)).expect("JSON")
}

/// The rows of a report.
pub fn rows(report: &Value) -> &Vec<Value> {
    report["rows"].as_array().expect("rows")
}

/// The row of one of the ways.
pub fn row<'v>(report: &'v Value, how: &str) -> &'v Value {
    let row = rows(report).iter().find(|row| row["how"] == how);
    row.unwrap_or_else(|| panic!("no row for {how}"))
}

/// A figure of a row.
pub fn number(row: &Value, key: &str) -> f64 {
    let number = row[key].as_f64();
    number.unwrap_or_else(|| panic!("{key} is no number: {row}"))
}

/// Requires that a run prints the same bytes whatever the number of threads, and no wide line.
pub fn assert_repeatable(arguments: &str) {
    let json = format!("{arguments} --json");
    let once = tablewright(&json);
    assert!(once.status.success(), "{json}: {}", stderr(&once));
    let again = tablewright(&format!("{json} --threads 1"));
    assert_eq!(stdout(&once), stdout(&again));
    let text = tablewright(arguments);
    for line in stdout(&text).lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

/// A file that is gone when the test is.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str, contents: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("tablewright-{}-{name}", std::process::id()));
        fs::write(&path, contents).expect("a scratch file");
        Self(path)
    }

    pub fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

//! What tests of the program share.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Runs the program.
pub fn tablewright(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tablewright"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the program runs")
}

/// What it printed.
pub fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

/// What it complained about.
pub fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// Status 2, nothing on stdout, one line on stderr that says what is wrong.
pub fn assert_refused(arguments: &[&str], says: &str) {
    let output = tablewright(arguments);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.matches('\n').count(), 1, "{arguments:?}: {message}");
    assert!(message.starts_with("error: "), "{arguments:?}: {message}");
    assert!(
        !message.starts_with("error: error"),
        "{arguments:?}: {message}"
    );
    assert!(message.contains(says), "{arguments:?}: {message}");
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

//! QEMU with the plugin, from its start to its end.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{Counts, Finding};

/// The plugin's file, by its name.
pub const PLUGIN: &str = "libtablewright_watch.so";

/// The first QEMU whose plugins can read what is needed, in the way in which they are told to:
/// version 7 of their interface.
pub const QEMU: (u32, u32) = (11, 1);

/// A line of the plugin's.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Found { seconds: f64, finding: Finding },
    End { end: End },
}

/// All that was found and seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End {
    /// How long the plugin was there.
    pub seconds: f64,
    /// How much it has seen.
    pub counts: Counts,
    /// Each kind once, in the order in which they were found first.
    pub findings: Vec<Finding>,
}

/// Runs a QEMU that is complete but for the plugin, and returns when it has ended, with all that
/// was found; `None`: the plugin could not say it. Each finding is handed on when it is there, with
/// the seconds since the plugin was loaded; with `Break`, and after `limit`, QEMU is killed.
///
/// # Errors
/// QEMU cannot be started, or the file of what is found cannot be made or read.
pub fn run(
    command: &mut Command,
    plugin: &Path,
    limit: Option<Duration>,
    mut found: impl FnMut(f64, Finding) -> ControlFlow<()>,
) -> io::Result<Option<End>> {
    let loaded = Loaded::new(plugin)?;
    let mut child = command.arg("-plugin").arg(&loaded.option).spawn()?;
    let mut lines = BufReader::new(File::open(&loaded.out.0)?);
    let (mut line, mut end) = (String::new(), None);
    let started = Instant::now();
    loop {
        let is_over = child.try_wait()?.is_some();
        let mut is_enough = limit.is_some_and(|limit| started.elapsed() > limit);
        while lines.read_line(&mut line)? > 0 {
            // The rest of it is still to come.
            if !line.ends_with('\n') {
                break;
            }
            match serde_json::from_str(&line)? {
                Line::Found { seconds, finding } => is_enough |= found(seconds, finding).is_break(),
                Line::End { end: all } => end = Some(all),
            }
            line.clear();
        }
        if is_over {
            return Ok(end);
        }
        if is_enough {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The version in what QEMU says of itself, if it is one.
pub fn version(said: &str) -> Option<&str> {
    said.split_once("QEMU emulator version ")?.1.split_ascii_whitespace().next()
}

/// Whether a QEMU of this version loads the plugin.
pub fn is_new_enough(version: &str) -> bool {
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= QEMU
}

/// The plugin's option for a command line that the caller runs.
pub struct Loaded {
    out: Out,
    /// The value of QEMU's option `-plugin`.
    pub option: OsString,
}

impl Loaded {
    /// Prepares a run with this plugin.
    ///
    /// # Errors
    /// The file for what it says cannot be made.
    pub fn new(plugin: &Path) -> io::Result<Self> {
        let out = Out::new()?;
        let mut option = OsString::from("file=");
        option.push(comma_twice(plugin.as_os_str()));
        option.push(",out=");
        option.push(comma_twice(out.0.as_os_str()));
        Ok(Self { out, option })
    }

    /// Returns what it has found until now, each kind once.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn findings(&self) -> io::Result<Vec<Finding>> {
        let lines = BufReader::new(File::open(&self.out.0)?).lines();
        let mut findings = Vec::new();
        for line in lines {
            // The last may not be whole.
            if let Ok(Line::Found { finding, .. }) = serde_json::from_str(&line?) {
                findings.push(finding);
            }
        }
        Ok(findings)
    }
}

/// A file that is gone when it is not needed any more.
struct Out(PathBuf);

impl Out {
    fn new() -> io::Result<Self> {
        let name = format!("tablewright-watch-{}.json", std::process::id());
        let path = std::env::temp_dir().join(name);
        File::create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        // It is nobody's any more.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A comma ends a value in QEMU's options, if it is not said twice.
fn comma_twice(text: &OsStr) -> OsString {
    text.to_string_lossy().replace(',', ",,").into()
}

#[cfg(test)]
mod tests {
    use super::{is_new_enough, version};

    #[test]
    fn versions_are_read_and_compared() {
        let said = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\nCopyright";
        assert_eq!(version(said), Some("11.1.3"));
        assert_eq!(version("GNU ld.so"), None);
        for (version, is) in [
            ("11.1.3", true),
            ("11.1", true),
            ("12.0.0", true),
            ("11.0.9", false),
            ("7.2.22", false),
        ] {
            assert_eq!(is_new_enough(version), is, "{version}");
        }
    }
}

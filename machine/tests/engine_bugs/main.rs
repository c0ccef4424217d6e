//! Bugs, planted one at a time into the engine itself: each is caught by random programs, by the
//! right rule, within a number of seeds, and again when its seed is run again.
//!
//! The engine's own source knows nothing of them. A copy of it is made, each place is switched
//! there between what it says and what it must not say, and the random programs are built with it,
//! once for all bugs; an environment variable says which is on. It takes minutes, most of them to
//! build:
//!
//! ```text
//! cargo test --release -p tablewright-machine --test engine_bugs -- --ignored --nocapture
//! ```
//!
//! `ENGINE_BUGS` names one workload of those below whose bugs alone are tried, or `sequences`;
//! `ENGINE_BUG` a part of the name of those that are.

mod bugs;
mod identity;
mod log;
mod shootdown;
mod sound;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A way in which the engine might be wrong.
pub struct Bug {
    name: &'static str,
    /// Below `engine/src`.
    file: &'static str,
    /// The text that is there, once in the file; what is switched stands between « and ».
    find: &'static str,
    /// The text that stands there instead. If it says `PLANTED`, it stands there always, and that
    /// is whether the bug is on.
    with: &'static str,
    /// The rules that may be the first to be broken.
    rules: &'static [&'static str],
}

/// The programs that are to catch a bug.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hunter {
    /// A workload of the example `seeds`.
    Seeds(&'static str),
    /// Those of the example `sequences`.
    Sequences,
}

impl Hunter {
    /// Its name, with which its lines about what was wrong begin.
    fn name(self) -> &'static str {
        match self {
            Self::Seeds(workload) => workload,
            Self::Sequences => "sequences",
        }
    }

    /// A bug is caught within so many seeds.
    fn seeds(self) -> u64 {
        match self {
            Self::Seeds(_) => 10_000,
            Self::Sequences => 20_000,
        }
    }

    /// The number of seeds that are run at a time: all where the first that goes wrong is the last.
    fn chunk(self) -> u64 {
        match self {
            Self::Seeds(_) => 100,
            Self::Sequences => self.seeds(),
        }
    }

    /// Runs some seeds.
    fn run(self, programs: &Path, bug: usize, from: u64, count: u64) -> Output {
        let from = from.to_string();
        let count = count.to_string();
        match self {
            Self::Seeds(_) => self.start(programs, bug, &[&count, "--from", &from]),
            Self::Sequences => self.start(programs, bug, &[&count, "--seed", &from]),
        }
    }

    /// Runs one seed.
    fn again(self, programs: &Path, bug: usize, seed: u64) -> Output {
        self.start(programs, bug, &["--seed", &seed.to_string()])
    }

    fn start(self, programs: &Path, bug: usize, arguments: &[&str]) -> Output {
        let (program, workload) = match self {
            Self::Seeds(workload) => ("seeds", vec!["--workload", workload]),
            Self::Sequences => ("sequences", Vec::new()),
        };
        Command::new(programs.join(program))
            .args(workload)
            .args(arguments)
            .env(SWITCH, bug.to_string())
            .env("RUST_BACKTRACE", "0")
            .output()
            .expect("the program was built")
    }
}

/// The bugs, and the program that is to catch each.
const PLANTED: [(Hunter, &[Bug]); 5] = [
    (Hunter::Seeds("guest"), bugs::BUGS),
    (Hunter::Seeds("log"), log::BUGS),
    (Hunter::Seeds("shootdown"), shootdown::BUGS),
    (Hunter::Seeds("identities"), identity::BUGS),
    (Hunter::Sequences, sound::BUGS),
];
/// Which bug is on, from 1.
const SWITCH: &str = "TABLEWRIGHT_PLANTED";

/// Code that the copy of the engine gets besides.
const SWITCHES: &str = r#"
extern crate std;
/// Whether a bug is on.
pub fn planted(number: usize) -> bool {
    static ON: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let on = || std::env::var("TABLEWRIGHT_PLANTED").ok()?.parse().ok();
    *ON.get_or_init(|| on().unwrap_or(0)) == number
}
"#;

/// All bugs, numbered from 1.
fn all() -> impl Iterator<Item = (usize, Hunter, &'static Bug)> {
    let each = |(hunter, bugs): (_, &'static [Bug])| bugs.iter().map(move |bug| (hunter, bug));
    let numbered = (1..).zip(PLANTED.into_iter().flat_map(each));
    numbered.map(|(number, (hunter, bug))| (number, hunter, bug))
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_file() {
        return fs::copy(from, to).map(|_| ());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_name() != "target" {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// The text with a bug in it that can be switched on.
fn plant(text: &str, number: usize, bug: &Bug) -> Result<String, String> {
    let fail =
        |why: &str| Err(format!("{}: engine/src/{}: {why}: {}", bug.name, bug.file, bug.find));
    let (Some((before, rest)), true) = (bug.find.split_once('«'), bug.find.contains('»')) else {
        return fail("nothing is marked to be switched");
    };
    let Some((place, after)) = rest.split_once('»') else {
        return fail("nothing is marked to be switched");
    };
    let find = format!("{before}{place}{after}");
    match text.matches(&find).count() {
        1 => {}
        0 => return fail("the engine does not say this any more"),
        _ => return fail("the engine says this more than once"),
    }
    let on = format!("crate::planted({number})");
    let switched = if bug.with.contains("PLANTED") {
        bug.with.replace("PLANTED", &on)
    } else {
        format!("if {on} {{ {} }} else {{ {place} }}", bug.with)
    };
    Ok(text.replace(&find, &format!("{before}{switched}{after}")))
}

/// A copy of the workspace with all bugs in its engine.
fn copy_with_bugs() -> Result<PathBuf, String> {
    let io = |error: io::Error| error.to_string();
    let (from, to) = (workspace(), workspace().join("target/engine-bugs"));
    for part in ["engine", "hosted", "walker", "machine", "processes", "Cargo.lock"] {
        // What is not there any more is not in the copy either.
        let _none = fs::remove_dir_all(to.join(part));
        fs::create_dir_all(&to).map_err(io)?;
        copy(&from.join(part), &to.join(part)).map_err(io)?;
    }
    let manifest = fs::read_to_string(from.join("Cargo.toml")).map_err(io)?;
    // Only what was copied.
    let line = |line: &str| match line.split_once("members = ") {
        Some((which, _)) => {
            format!(
                "{which}members = [\"engine\", \"hosted\", \"walker\", \"machine\", \
                 \"machine/workloads\", \"processes\"]\n"
            )
        }
        None => format!("{line}\n"),
    };
    let manifest: String = manifest.lines().map(line).collect();
    fs::write(to.join("Cargo.toml"), manifest).map_err(io)?;
    let source = to.join("engine/src");
    for (number, _, bug) in all() {
        let file = source.join(bug.file);
        let text = fs::read_to_string(&file).map_err(io)?;
        fs::write(&file, plant(&text, number, bug)?).map_err(io)?;
    }
    let root = source.join("lib.rs");
    let text = fs::read_to_string(&root).map_err(io)?;
    fs::write(&root, text + SWITCHES).map_err(io)?;
    Ok(to)
}

/// Builds the random programs. Gives where they are.
fn build(workspace: &Path) -> Result<PathBuf, String> {
    let target = workspace.join("target");
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--release",
            "--features",
            "tablewright-workloads/every-format",
            "--example",
            "seeds",
            "--example",
            "sequences",
        ])
        .current_dir(workspace)
        .env("CARGO_TARGET_DIR", &target)
        // It is run for seconds, and built for minutes.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env_remove("RUSTFLAGS")
        .output()
        .map_err(|error| error.to_string())?;
    if !built.status.success() {
        return Err(String::from_utf8_lossy(&built.stderr).into_owned());
    }
    Ok(target.join("release/examples"))
}

/// Lines about what was wrong.
fn wrong(output: &Output, hunter: Hunter) -> Vec<String> {
    let said = String::from_utf8_lossy(&output.stdout);
    let start = format!("{}: ", hunter.name());
    let lines = said.lines().filter(|line| line.starts_with(&start));
    lines.map(str::to_owned).collect()
}

/// The number of the seed that a line names.
fn seed_of(line: &str) -> Option<u64> {
    let digits = line.rsplit_once("seed ")?.1;
    let end = digits.find(|c: char| !c.is_ascii_digit());
    digits[..end.unwrap_or(digits.len())].parse().ok()
}

fn hunt(programs: &Path, number: usize, hunter: Hunter, bug: &Bug) -> Result<String, String> {
    let (seeds, chunk) = (hunter.seeds(), hunter.chunk());
    // Then it may read what was there before, which differs, or call itself without end.
    let leaves_memory = bug.rules.contains(&"crash");
    for from in (1..=seeds).step_by(chunk as usize) {
        let output = hunter.run(programs, number, from, chunk);
        let lines = wrong(&output, hunter);
        let Some(first) = lines.first() else {
            if output.status.success() {
                continue;
            }
            if leaves_memory {
                let dies = |seed: &u64| {
                    let again = hunter.again(programs, number, *seed);
                    !again.status.success() && wrong(&again, hunter).is_empty()
                };
                let first = (from..from + chunk).find(dies).ok_or("a crash is not repeated")?;
                return Ok(format!("crash, seed {first}"));
            }
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("from seed {from}: {}", said.trim()));
        };
        let rule = first.split(": ").nth(1).unwrap_or_default();
        if !bug.rules.contains(&rule) {
            return Err(format!("another rule: {first}"));
        }
        let seed = seed_of(first).ok_or("no seed is named")?;
        let again = hunter.again(programs, number, seed);
        if !leaves_memory && wrong(&again, hunter).first() != Some(first) {
            return Err(format!("seed {seed} is not the same again: {first}"));
        }
        return Ok(format!("{rule}, seed {seed}"));
    }
    Err(format!("not caught within {seeds} seeds"))
}

#[test]
#[ignore = "builds the random programs once more, which takes minutes"]
fn each_bug_in_the_engine_is_caught_by_the_right_rule() {
    let programs =
        copy_with_bugs().and_then(|copy| build(&copy)).unwrap_or_else(|why| panic!("{why}"));
    let only = std::env::var("ENGINE_BUGS").ok();
    let part = std::env::var("ENGINE_BUG").unwrap_or_default();
    let is_meant = |hunter: Hunter| only.as_deref().is_none_or(|only| only == hunter.name());
    for (hunter, _) in PLANTED.into_iter().filter(|it| is_meant(it.0)) {
        let right = hunter.run(&programs, 0, 1, hunter.seeds());
        let lines = wrong(&right, hunter);
        assert!(right.status.success(), "without a bug: {lines:?}");
    }
    let mut failures = Vec::new();
    let meant = all().filter(|it| is_meant(it.1) && it.2.name.contains(&part));
    for (number, hunter, bug) in meant {
        match hunt(&programs, number, hunter, bug) {
            Ok(how) => println!("{}: {how}", bug.name),
            Err(why) => {
                println!("{}: {why}", bug.name);
                failures.push(format!("{}: {why}", bug.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn the_engine_still_says_what_is_switched() {
    // All of them stand in the copy, and none may change what another looks for.
    let mut texts = HashMap::new();
    for (number, _, bug) in all() {
        let text = texts.entry(bug.file).or_insert_with(|| {
            let file = workspace().join("engine/src").join(bug.file);
            fs::read_to_string(file).expect("a file of the engine")
        });
        match plant(text, number, bug) {
            Ok(planted) => *text = planted,
            Err(why) => panic!("{why}"),
        }
    }
}

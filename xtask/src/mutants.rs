//! Mutants of the engine, all of them in one build.
//!
//! Each is compiled in beside [what it changes](plant), and an environment variable chooses it when
//! a test runs. So the tests are built once, in a copy, and a mutant takes as long as the first of
//! its tests that fails. The programs of tests that come by it are tried, the quickest first.
//!
//! A mutant that no test sees is a missing test or a needless line. What changes nothing is in
//! [`KNOWN`], with the reason.

mod plant;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::Args;

use crate::tools;
use crate::{About as _, Error, Result, child, out, planted, say};
use plant::Mutant;

/// Mutants that change nothing: file, function, change and reason in each line.
const KNOWN: &str = include_str!("mutants/known.tsv");

/// Says which rooms of the engine have mutants, and which tests do not run.
const CONFIGURATION: &str = include_str!("../../.cargo/mutants.toml");

/// Tests that take longer, random models above all: for what the others have not seen.
const SLOW: [&str; 9] = [
    "a_host_believes_nothing",
    "arm64_64k_28::",
    "bbm::arm_",
    "bbm::arm64_4k::",
    "bbm::x86_64_4level::",
    "bbm::x86_",
    "model::arm64_4k::",
    "model::stage2_4k_40::",
    "model::x86_64_4level::",
];

/// The strings of the configuration.
fn configured() -> impl Iterator<Item = &'static str> + Clone {
    CONFIGURATION.split('"').skip(1).step_by(2)
}

/// Files and directories below `engine/src`.
fn rooms() -> impl Iterator<Item = &'static str> {
    let rooms = configured().filter_map(|text| text.strip_prefix("engine/src/"));
    rooms.map(|room| room.trim_end_matches("/**"))
}

/// The part of the copy that says which mutant is chosen, and which places a run comes by.
const CHOICE: &str = r#"
extern crate std;

static CHOSEN: core::sync::atomic::AtomicUsize = core::sync::atomic::AtomicUsize::new(usize::MAX);
static SEEN: [core::sync::atomic::AtomicBool; 1 << 14] =
    [const { core::sync::atomic::AtomicBool::new(false) }; 1 << 14];

#[cold]
fn choose() -> usize {
    use core::sync::atomic::Ordering::Relaxed;
    unsafe extern "C" {
        fn atexit(with: extern "C" fn()) -> i32;
    }
    extern "C" fn seen() {
        use std::io::Write as _;
        let Ok(to) = std::env::var("MUTANTS_SEEN") else { return };
        let Ok(mut to) = std::fs::OpenOptions::new().append(true).create(true).open(to) else {
            return;
        };
        for (number, seen) in SEEN.iter().enumerate() {
            if seen.load(Relaxed) {
                let _ = std::writeln!(to, "{number}");
            }
        }
    }
    let chosen = std::env::var("MUTANT").ok().and_then(|number| number.parse().ok());
    let chosen = chosen.unwrap_or(SEEN.len());
    if CHOSEN.swap(chosen, Relaxed) == usize::MAX {
        unsafe { atexit(seen) };
    }
    chosen
}

#[inline(always)]
pub(crate) fn mutant(number: usize) -> bool {
    use core::sync::atomic::Ordering::Relaxed;
    let mut chosen = CHOSEN.load(Relaxed);
    if chosen == usize::MAX {
        chosen = choose();
    }
    if chosen == SEEN.len() {
        SEEN[number].store(true, Relaxed);
    }
    chosen == number
}
"#;

#[derive(Args)]
pub struct MutantsArgs {
    /// Only these rooms of the engine, or parts of them: files and directories below `engine/src`
    #[arg(long, value_delimiter = ',', value_name = "ROOM")]
    rooms: Vec<String>,
    /// Every Nth mutant, from number K on
    #[arg(long, value_name = "K/N", value_parser = shard, default_value = "0/1")]
    shard: (usize, usize),
    /// Only say what mutants there are
    #[arg(long)]
    list: bool,
}

fn shard(text: &str) -> std::result::Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let is_one = |&(k, n): &(usize, usize)| k < n;
    parts.filter(is_one).ok_or_else(|| "two numbers, as 3/8: the fourth of every eight".into())
}

/// A program of tests.
struct Tests {
    program: PathBuf,
    /// Which of its tests run.
    arguments: Vec<&'static str>,
    /// The time that it takes without a mutant.
    takes: Duration,
    /// The mutants that it comes by.
    seen: Vec<usize>,
}

impl Tests {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).current_dir(copy().join("engine")).stdin(Stdio::null());
        // The cases are the same in each run, and so is what they see.
        command.env("PROPTEST_RNG_SEED", "1").env("PROPTEST_CASES", "10");
        child::ends_with_us(&mut command);
        command
    }

    /// Runs them without a mutant.
    fn learn(&mut self) -> Result<()> {
        let seen = copy().join("seen");
        let _ = fs::remove_file(&seen);
        let started = Instant::now();
        tools::output(self.command().env("MUTANTS_SEEN", &seen))?;
        self.takes = started.elapsed();
        let seen = fs::read_to_string(&seen).unwrap_or_default();
        self.seen = seen.lines().filter_map(|line| line.parse().ok()).collect();
        self.seen.sort_unstable();
        self.seen.dedup();
        Ok(())
    }

    /// Whether a test fails with this mutant, or the program does not end.
    fn see(&self, number: usize) -> Result<bool> {
        let mut command = self.command();
        command.env("MUTANT", number.to_string()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = command.spawn().about(self.program.display())?;
        let said = running.stdout.take();
        let limit = Duration::from_secs(10) + 4 * self.takes;
        let sees = thread::scope(|threads| {
            // The first test that fails is enough.
            let reader = threads.spawn(|| {
                let lines = said.map(BufReader::new).into_iter().flat_map(|said| said.lines());
                lines.map_while(|line| line.ok()).any(|line| line.ends_with(" ... FAILED"))
            });
            let started = Instant::now();
            while !reader.is_finished() && started.elapsed() < limit {
                thread::sleep(Duration::from_millis(5));
            }
            let is_late = !reader.is_finished();
            if is_late {
                let _ = running.kill();
            }
            is_late || reader.join().unwrap_or(true)
        });
        if sees {
            let _ = running.kill();
        }
        let ended = running.wait().about(self.program.display())?;
        Ok(sees || !ended.success())
    }
}

/// The directory of the copy.
fn copy() -> PathBuf {
    tools::target().join("mutants")
}

/// Plants all mutants but those in `off` in the copy.
fn plant_all(off: &[usize]) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    let source = tools::root().join("engine/src");
    planted::copy_workspace(
        &copy(),
        &["engine", "engine/sweeps", "hosted", "walker"],
        &mut |path, text| {
            let Ok(within) = path.strip_prefix(&source) else { return Ok(text) };
            let said = String::from_utf8_lossy(&text);
            if within == Path::new("lib.rs") {
                return Ok(format!("{said}{CHOICE}").into());
            }
            if !rooms().any(|room| within.starts_with(room)) {
                return Ok(text);
            }
            let planted = plant::plant(&within.to_string_lossy(), &said, &mut mutants, off);
            let bad = |error| Error::Failed(format!("{}: {error}", path.display()));
            planted.map(Vec::from).map_err(bad)
        },
    )?;
    Ok(mutants)
}

/// A command of cargo's in the copy.
fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).args(["--message-format", "short"]).current_dir(copy());
    command.env("CARGO_TARGET_DIR", copy().join("target")).env_remove("RUSTFLAGS");
    command
}

/// The numbers of the mutants that do not compile.
fn wrong(said: &str) -> Vec<usize> {
    let mut wrong = Vec::new();
    for line in said.lines().filter(|line| line.contains(": error")) {
        let mut parts = line.splitn(4, ':');
        let (Some(file), Some(row), Some(column)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let text = fs::read_to_string(copy().join(file)).unwrap_or_default();
        let row = row.parse().unwrap_or(1);
        let before: String = text.lines().take(row - 1).collect();
        let this = text.lines().nth(row - 1).unwrap_or_default();
        let column = column.parse().unwrap_or(0).min(this.len());
        let all = format!("{before}{}", this.get(..column).unwrap_or_default());
        let number = all.rsplit_once("crate::mutant(").and_then(|(_, rest)| rest.split(')').next());
        wrong.extend(number.and_then(|number| number.parse::<usize>().ok()));
    }
    wrong
}

/// Builds the tests with all mutants in them. Returns what mutants there are, and the tests.
fn build() -> Result<(Vec<Mutant>, Vec<usize>, Vec<Tests>)> {
    let mut off = Vec::new();
    loop {
        let mutants = plant_all(&off)?;
        let built = cargo(&["build", "-q", "-p", "tablewright"]).output().about("cargo")?;
        if built.status.success() {
            let mut listed = cargo(&["test", "--no-run", "--tests"]);
            listed.args(["-p", "tablewright", "-p", "tablewright-sweeps"]);
            let listed = listed.output().about("cargo")?;
            let said = String::from_utf8_lossy(&listed.stderr);
            let programs = said.lines().filter_map(|line| {
                let program = line.trim().strip_prefix("Executable ")?.split_once('(')?.1;
                Some(copy().join(program.trim_end_matches(')')))
            });
            let quick = configured().skip_while(|&text| text != "--skip");
            let of = |program: PathBuf, arguments| Tests {
                program,
                arguments,
                takes: Duration::ZERO,
                seen: Vec::new(),
            };
            let mut tests = Vec::new();
            // Of the house, not of the engine.
            let is_house = |program: &PathBuf| program.to_string_lossy().contains("/house-");
            for program in programs.filter(|program| !is_house(program)) {
                let is_slow = program.to_string_lossy().contains("/sweeps-");
                if !is_slow {
                    tests.push(of(program.clone(), quick.clone().collect()));
                }
                tests.push(of(program, SLOW.to_vec()));
            }
            return Ok((mutants, off, tests));
        }
        let wrong = wrong(&String::from_utf8_lossy(&built.stderr));
        if wrong.is_empty() || wrong.iter().all(|number| off.contains(number)) {
            let said = String::from_utf8_lossy(&built.stderr);
            let first = said.lines().find(|line| line.contains("error")).unwrap_or_default();
            return Err(Error::Failed(format!("the mutants do not compile: {first}")));
        }
        off.extend(wrong);
    }
}

/// The reason why a mutant changes nothing.
fn known(mutant: &Mutant) -> Option<&'static str> {
    KNOWN.lines().find_map(|line| {
        let mut parts = line.split('\t');
        let is_it = [&mutant.file, &mutant.function, &mutant.what]
            .into_iter()
            .all(|of| parts.next() == Some(of.as_str()));
        parts.next().filter(|_| is_it)
    })
}

/// How many mutants a test has seen, change nothing, and are left.
#[derive(Default)]
struct Found {
    killed: usize,
    equal: usize,
    left: usize,
}

/// Runs the tests of each mutant.
///
/// # Errors
/// How many no test has seen, of those that are not known to change nothing.
pub fn run(args: &MutantsArgs) -> Result<()> {
    let is_none = |part: &&String| !rooms().any(|room| Path::new(part).starts_with(room));
    if let Some(room) = args.rooms.iter().find(is_none) {
        let rooms = rooms().collect::<Vec<_>>().join(", ");
        return Err(Error::Other(format!("there is no room {room}: there are {rooms}")));
    }
    let is_meant = |mutant: &Mutant| {
        let within = |room: &String| Path::new(&mutant.file).starts_with(room);
        args.rooms.is_empty() || args.rooms.iter().any(within)
    };
    let said = |mutant: &Mutant| {
        let Mutant { file, line, function, what } = mutant;
        format!("engine/src/{file}:{line}\t{function}\t{what}")
    };
    let chosen = |mutants: &[Mutant], off: &[usize]| -> Vec<usize> {
        let all = (0..mutants.len()).filter(|number| !off.contains(number));
        let all = all.filter(|&number| is_meant(&mutants[number]));
        all.skip(args.shard.0).step_by(args.shard.1).collect()
    };
    if args.list {
        let mutants = plant_all(&[])?;
        for number in chosen(&mutants, &[]) {
            say!("{}", said(&mutants[number]));
        }
        return Ok(());
    }
    let (mutants, off, mut tests) = out::clocked("building with all mutants", build)?;
    out::clocked("running the tests", || tests.iter_mut().try_for_each(Tests::learn))?;
    tests.sort_by_key(|tests| tests.takes);
    let chosen = chosen(&mutants, &off);
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Found::default()));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let clock = out::Clock::start(&format!("{} mutants", chosen.len()));
    let work = || -> Result<()> {
        while let Some(&number) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            if out::is_interrupted() {
                return Err(Error::Interrupted);
            }
            let mutant = &mutants[number];
            let by: Vec<_> =
                tests.iter().filter(|tests| tests.seen.binary_search(&number).is_ok()).collect();
            let mut is_seen = false;
            for tests in &by {
                is_seen = tests.see(number)?;
                if is_seen {
                    break;
                }
            }
            let mut found = found.lock().unwrap_or_else(|it| it.into_inner());
            match is_seen {
                true => found.killed += 1,
                false if known(mutant).is_some() => found.equal += 1,
                false => {
                    found.left += 1;
                    let why = if by.is_empty() { "\tno test comes by it" } else { "" };
                    clock.line(&format!("{}{why}", said(mutant)));
                }
            }
            let Found { killed, equal, left } = *found;
            let (done, all) = (killed + equal + left, chosen.len());
            clock.message(format!("{done} of {all} mutants, {left} not seen by any test"));
        }
        Ok(())
    };
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|one| match one.join() {
            Ok(result) => result,
            Err(_) => Err(Error::Failed("a thread has panicked".into())),
        })
    })?;
    drop(clock);
    let Found { killed, equal, left } = found.into_inner().unwrap_or_else(|it| it.into_inner());
    let all = chosen.len();
    say!("{all} mutants: {killed} seen by a test, {equal} change nothing, {left} are not seen");
    match left {
        0 => Ok(()),
        left => Err(Error::Failed(format!("{left} mutants are not seen by any test"))),
    }
}

#[cfg(test)]
mod tests {
    use super::{KNOWN, plant_all, shard};

    /// A line of the list that is about nothing any more goes.
    #[test]
    fn what_is_known_is_there_and_has_a_reason() {
        let mutants = plant_all(&[]).unwrap();
        for line in KNOWN.lines() {
            let parts: Vec<_> = line.split('\t').collect();
            let [file, function, what, reason] = parts[..] else { panic!("{line}") };
            assert!(!reason.is_empty());
            let is_it = |one: &super::Mutant| {
                one.file == file && one.function == function && one.what == what
            };
            assert!(mutants.iter().any(is_it), "{line}");
        }
    }

    #[test]
    fn a_shard_is_a_part() {
        assert_eq!(shard("3/8"), Ok((3, 8)));
        for text in ["8/8", "0/0", "3", "a/b", ""] {
            assert!(shard(text).is_err());
        }
    }
}

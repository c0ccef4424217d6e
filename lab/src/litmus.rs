//! `litmus`: small programs around page tables, over all their executions, and the verdict of the
//! architecture on each.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use serde::Serialize;
use tablewright_machine::litmus::{
    self, MOST_STATES, ParseError, Profile, Test, Verdict, explore, herd_outcomes, is_herd, parse,
    simulate,
};

use crate::error::Error;
use crate::file;
use crate::output::progress::Progress;
use crate::output::report::{self, Report};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright litmus                          every test that comes with the program
  tablewright litmus --list                   what they are, and where they are from
  tablewright litmus --only ROT --witness     tests by name, and an execution for each outcome \
  that is reached
  tablewright litmus mine.litmus --profile ets2
  tablewright litmus --seeds 2000             the machine in virtual time as well
  tablewright litmus catalogue/ --herd herd7  tests of herd, each outcome compared with herd's

The format of a test is described in docs/MACHINE.md; herd's own is read too. The exit
status is 1 if a verdict does not hold, or a test has no answer.")]
pub struct Arguments {
    /// Files of tests, or directories with files *.litmus below them [default: those that come
    /// with the program]
    #[arg(value_name = "FILE|DIR")]
    paths: Vec<PathBuf>,
    /// The rules that hold [default: all that a test can be run under]
    #[arg(long, value_enum)]
    profile: Option<ProfileName>,
    /// Tests with this in their name
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Run each test on the machine in virtual time too, with so many seeds
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    seeds: u64,
    /// Run herd7 by this command on each test in its notation, and compare the outcomes
    #[arg(long, value_name = "COMMAND")]
    herd: Option<String>,
    /// Print an execution, step by step, for each outcome that is reached
    #[arg(long)]
    witness: bool,
    /// Print the tests and try none
    #[arg(long, conflicts_with_all = ["seeds", "witness", "herd"])]
    list: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The profiles, as one types them.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileName {
    /// Armv8-A
    Base,
    /// Armv8-A with FEAT_ETS2
    Ets2,
    /// x86-64
    X86,
}

impl From<ProfileName> for Profile {
    fn from(name: ProfileName) -> Self {
        match name {
            ProfileName::Base => Self::Base,
            ProfileName::Ets2 => Self::Ets2,
            ProfileName::X86 => Self::X86,
        }
    }
}

#[derive(Serialize)]
struct Parameters {
    files: Vec<String>,
    profile: Option<String>,
    only: Option<String>,
    seeds: u64,
}

/// One outcome of one test in one profile.
#[derive(Default, Serialize)]
struct Row {
    test: String,
    source: String,
    about: String,
    file: String,
    line: usize,
    profile: String,
    outcome: String,
    expected: Option<String>,
    /// Some execution ends so; all do.
    reached: bool,
    always: bool,
    states: usize,
    /// The first seed with which the machine in virtual time ends so.
    seed: Option<u64>,
    verdict: &'static str,
    /// Why an allowed outcome is not shown, or why there is no answer.
    note: Option<String>,
    witness: Option<Vec<String>>,
    /// Of a test in herd's notation: its ends here, and what herd printed.
    #[serde(skip_serializing_if = "Option::is_none")]
    ends: Option<BTreeSet<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    herd: Option<BTreeSet<String>>,
}

const HOLDS: &str = "ok";
const FAILS: &str = "FAILS";
const SILENT: &str = "not shown";
const UNKNOWN: &str = "no answer";
const REFUSED: &str = "refused";
const NONE: &str = "-";

/// Tries the tests, and prints what came of it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let (mut tests, mut refused) = load(&arguments.paths)?;
    if let Some(only) = &arguments.only {
        tests.retain(|test| test.name.contains(only.as_str()));
        refused.retain(|error| stem(&error.file).contains(only.as_str()));
    }
    let profile = arguments.profile.map(Profile::from);
    tests.retain(|test| profile.is_none_or(|profile| test.profiles().contains(&profile)));
    if tests.is_empty() && refused.is_empty() {
        return Err(Error::Usage("no test has this name and this profile".to_owned()));
    }
    if arguments.list {
        return list(&tests, arguments.json);
    }
    if let Some(command) = &arguments.herd {
        check_herd(command, &tests)?;
    }
    let mut rows = try_all(&tests, arguments, MOST_STATES);
    rows.extend(refused.into_iter().map(refusal));
    let failed = rows.iter().filter(|row| row.verdict == FAILS).count();
    let unknown = rows.iter().filter(|row| row.verdict == UNKNOWN).count();
    let total = rows.iter().filter(|row| row.verdict != REFUSED).count();
    let warnings = warnings(&rows);
    let report = Report {
        experiment: "litmus",
        parameters: Parameters {
            files: arguments.paths.iter().map(|path| path.display().to_string()).collect(),
            profile: profile.map(|profile| profile.to_string()),
            only: arguments.only.clone(),
            seeds: arguments.seeds,
        },
        rows,
        warnings,
    };
    report.print(arguments.json, text)?;
    if unknown > 0 {
        return Err(Error::Failed(format!(
            "{failed} of {total} verdicts do not hold, and {unknown} have no answer"
        )));
    }
    if failed > 0 {
        return Err(Error::Failed(format!("{failed} of {total} verdicts do not hold")));
    }
    Ok(())
}

/// All tests in all profiles that are asked for, each over `most` states. One that has no answer
/// does not keep the others from theirs.
fn try_all(tests: &[Test], arguments: &Arguments, most: usize) -> Vec<Row> {
    let wanted = arguments.profile.map(Profile::from);
    let mut rows = Vec::new();
    let mut progress = Progress::ticking(tests.len() as u64);
    for (number, test) in tests.iter().enumerate() {
        progress.at(number as u64, &short(&test.name, 24));
        let profiles = test.profiles().iter().copied();
        for profile in profiles.filter(|&p| wanted.is_none_or(|wanted| wanted == p)) {
            rows.extend(try_one(test, profile, arguments, most));
        }
    }
    rows
}

/// Warns of outcomes that surprise.
fn warnings(rows: &[Row]) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let why = row.note.as_deref().unwrap_or_default();
        let (test, profile) = (&row.test, &row.profile);
        let warning = match row.verdict {
            FAILS if row.herd.is_some() => format!("{test} ({profile}): {why}"),
            SILENT => format!("{test} ({profile}): allowed, and not shown: {why}"),
            REFUSED => format!("{}:{}: {why}", row.file, row.line),
            UNKNOWN => format!("{}:{}: {test} ({profile}): {why}", row.file, row.line),
            _ => continue,
        };
        // The outcomes of a test that has no answer share the reason.
        if warnings.last() != Some(&warning) {
            warnings.push(warning);
        }
    }
    warnings
}

/// The tests in files and directories, or those of the program.
///
/// A test of a directory that is in herd's notation, and cannot be read, does not keep the others
/// from being tried.
fn load(paths: &[PathBuf]) -> Result<(Vec<Test>, Vec<ParseError>), Error> {
    if paths.is_empty() {
        return Ok((litmus::built_in()?, Vec::new()));
    }
    let (mut tests, mut refused) = (Vec::new(), Vec::new());
    for path in paths {
        let named = |error| Error::Read { path: path.clone(), error };
        if !path.is_dir() {
            tests.extend(parse_file(path, &text_of(path)?)?);
            continue;
        }
        let mut files = Vec::new();
        below(path, &mut files).map_err(named)?;
        if files.is_empty() {
            return Err(named(io::Error::other("no file *.litmus in this directory")));
        }
        files.sort();
        for file in files {
            let text = text_of(&file)?;
            match parse_file(&file, &text) {
                Ok(read) => tests.extend(read),
                Err(error) if is_herd(&text) => refused.push(error),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok((tests, refused))
}

/// Finds files *.litmus in a directory and those below it.
fn below(directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            below(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "litmus") {
            files.push(path);
        }
    }
    Ok(())
}

fn text_of(path: &Path) -> Result<String, Error> {
    let bytes = file::read(path, "file of litmus tests")?;
    String::from_utf8(bytes).map_err(|_| Error::Read {
        path: path.to_owned(),
        error: io::Error::other("not a text in UTF-8"),
    })
}

fn parse_file(path: &Path, text: &str) -> Result<Vec<Test>, ParseError> {
    parse(&path.display().to_string(), text)
}

/// The name of a file without its directory and kind.
fn stem(file: &str) -> String {
    let stem = Path::new(file).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// A test that cannot be read.
fn refusal(error: ParseError) -> Row {
    Row {
        test: stem(&error.file),
        file: error.file,
        line: error.line,
        profile: NONE.to_owned(),
        outcome: NONE.to_owned(),
        verdict: REFUSED,
        note: Some(error.what),
        ..Row::default()
    }
}

/// Checks that herd can be asked, and of what.
fn check_herd(command: &str, tests: &[Test]) -> Result<(), Error> {
    let refused = |why: String| Err(Error::Usage(format!("--herd {command}: {why}")));
    let Some(program) = command.split_whitespace().next() else {
        return refused("the command that runs herd7 is needed".to_owned());
    };
    if !tests.iter().any(Test::is_herd) {
        return refused("no test here is in herd's notation".to_owned());
    }
    match Command::new(program).arg("-version").stdin(Stdio::null()).output() {
        Ok(_) => Ok(()),
        Err(error) => refused(error.to_string()),
    }
}

/// The ends that herd finds of a test.
fn ask_herd(command: &str, test: &Test, profile: Profile) -> Result<BTreeSet<String>, String> {
    let mut words = command.split_whitespace();
    let program = words.next().ok_or("the command for herd is empty")?;
    let ets2 = if profile == Profile::Ets2 { ",ets2" } else { "" };
    let output = Command::new(program)
        .args(words)
        .args(["-variant", &format!("vmsa,fatal{ets2}")])
        .arg(&test.file)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    herd_outcomes(&printed).ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("it says nothing");
        format!("{program} has no outcomes for it: {said}")
    })
}

/// The differences between two sets of ends, in a line.
fn difference(here: &BTreeSet<String>, there: &BTreeSet<String>) -> String {
    let of = |ends: Vec<&String>, whose: &str| match ends.as_slice() {
        [] => String::new(),
        ends => {
            let ends: Vec<String> = ends.iter().map(|end| format!("({end})")).collect();
            format!("{whose}: {} ", ends.join(" "))
        }
    };
    let here_alone = of(here.difference(there).collect(), "not with herd");
    let there_alone = of(there.difference(here).collect(), "only with herd");
    format!("{here_alone}{there_alone}").trim_end().to_owned()
}

/// All outcomes of a test in one profile.
fn try_one(test: &Test, profile: Profile, arguments: &Arguments, most: usize) -> Vec<Row> {
    let explored = explore(test, profile, most).map_err(|error| error.to_string());
    let tried = explored.and_then(|explored| {
        if arguments.seeds > 0 && test.is_herd() {
            return Err("the machine in virtual time runs no test of herd".to_owned());
        }
        let simulated = simulate(test, profile, arguments.seeds);
        let herd = arguments.herd.as_deref().filter(|_| test.is_herd());
        let herd = herd.map(|command| ask_herd(command, test, profile)).transpose()?;
        Ok((explored, simulated.map_err(|error| error.to_string())?, herd))
    });
    let (explored, simulated, herd) = match tried {
        Ok(tried) => tried,
        Err(problem) => {
            let row = |(ask, outcome): (usize, &str)| Row {
                verdict: UNKNOWN,
                note: Some(problem.clone()),
                ..row(test, profile, ask, outcome)
            };
            return test.outcomes().enumerate().map(row).collect();
        }
    };
    let ends = explored.finals;
    let differs = herd.as_ref().filter(|herd| **herd != ends).map(|herd| difference(&ends, herd));
    let rows = test.outcomes().zip(explored.outcomes).enumerate();
    rows.map(|(ask, (outcome, reached))| {
        let expected = test.expected(ask, profile);
        let (seed, always) = simulated.outcomes[ask];
        let on_machine = match expected {
            _ if arguments.seeds == 0 => true,
            Some(Verdict::Forbidden) => seed.is_none(),
            Some(Verdict::Required) => always,
            // What is allowed need not come.
            Some(Verdict::Allowed) | None => true,
        };
        let note = test.never_shown(ask).or_else(|| test.only_explored(ask));
        let note = note.map(str::to_owned);
        let verdict = match expected {
            None if differs.is_some() => FAILS,
            None if herd.is_some() => HOLDS,
            None => NONE,
            Some(expected) if reached.agrees(expected) && on_machine => HOLDS,
            Some(Verdict::Allowed) if test.never_shown(ask).is_some() => SILENT,
            Some(_) => FAILS,
        };
        Row {
            reached: reached.witness.is_some(),
            always: reached.always,
            states: explored.states,
            seed,
            verdict,
            note: differs.clone().or(note),
            ends: Some(ends.clone()).filter(|_| test.is_herd()),
            herd: herd.clone(),
            witness: reached.witness.filter(|_| arguments.witness),
            ..row(test, profile, ask, outcome)
        }
    })
    .collect()
}

/// One outcome, before it is tried.
fn row(test: &Test, profile: Profile, ask: usize, outcome: &str) -> Row {
    let expected = test.expected(ask, profile);
    Row {
        test: test.name.clone(),
        source: test.source.clone(),
        about: test.about.clone(),
        file: test.file.clone(),
        line: test.line,
        profile: profile.to_string(),
        outcome: outcome.to_owned(),
        expected: expected.map(|verdict| verdict.to_string()),
        verdict: NONE,
        ..Row::default()
    }
}

/// More than any line has.
const ANY: usize = 10_000;

/// Characters for the name of a test, and for a column beside it and the profile.
fn columns() -> (usize, usize) {
    const PROFILE: usize = 10;
    let whole = report::at_most(ANY).max(60);
    (whole / 2, whole / 2 - PROFILE)
}

/// A name in lines, broken behind what joins its parts.
fn broken(name: &str, most: usize) -> String {
    let parts: String = name.replace('+', "+ ");
    let lines = report::wrapped(&parts, most, "\u{1}");
    lines.replace("+ ", "+").replace('\u{1}', "  ")
}

fn text(report: &Report<Parameters, Row>) -> String {
    let (name, beside) = columns();
    let table = report::table(
        ["test", "profile", "source", "outcome", "expected", "reached", "verdict", "states"],
        7,
        report
            .rows
            .iter()
            .map(|row| {
                let reached = match (row.reached, row.always) {
                    _ if [UNKNOWN, REFUSED].contains(&row.verdict) => NONE,
                    (_, true) => "always",
                    (true, false) => "yes",
                    (false, false) => "no",
                };
                let seed = row.seed.map_or(String::new(), |seed| format!(", seed {seed}"));
                [
                    broken(&row.test, name),
                    row.profile.clone(),
                    short(&row.source, beside.min(40)),
                    match beside {
                        ..56 => report::wrapped(&row.outcome, beside, "  "),
                        _ => short(&row.outcome, 56),
                    },
                    row.expected.clone().unwrap_or_else(|| NONE.to_owned()),
                    format!("{reached}{seed}"),
                    row.verdict.to_owned(),
                    row.states.to_string(),
                ]
            })
            .collect(),
    );
    let mut text = table;
    for row in &report.rows {
        let Some(witness) = &row.witness else {
            continue;
        };
        text += &format!("\n{} ({}): {}\n", row.test, row.profile, row.outcome);
        for step in witness {
            text += &format!("    {step}\n");
        }
    }
    // The outcomes of a test share its states.
    let mut explorations: Vec<_> =
        report.rows.iter().map(|row| (&row.test, &row.profile, row.states)).collect();
    explorations.dedup();
    let states: usize = explorations.iter().map(|exploration| exploration.2).sum();
    let failed = report.rows.iter().filter(|row| row.verdict == FAILS).count();
    let refused = report.rows.iter().filter(|row| row.verdict == REFUSED).count();
    let outcomes = report.rows.len() - refused;
    text += &format!("\n{outcomes} outcomes, {states} states, {failed} verdicts that do not hold");
    if refused > 0 {
        text += &format!(", {}", report::counted(refused as u64, "test refused", "tests refused"));
    }
    text + "\n"
}

fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let head: String = text.chars().take(most - 1).collect();
    head + "…"
}

/// A test, and what it asks.
#[derive(Serialize)]
struct Listed {
    test: String,
    source: String,
    about: String,
    file: String,
    line: usize,
    threads: usize,
    outcomes: Vec<String>,
}

fn list(tests: &[Test], json: bool) -> Result<(), Error> {
    let listed: Vec<Listed> = tests
        .iter()
        .map(|test| Listed {
            test: test.name.clone(),
            source: test.source.clone(),
            about: test.about.clone(),
            file: test.file.clone(),
            line: test.line,
            threads: test.threads(),
            outcomes: test.outcomes().map(str::to_owned).collect(),
        })
        .collect();
    if json {
        return report::print_json(&listed);
    }
    let (name, beside) = columns();
    let rows = listed.into_iter().map(|test| {
        let place = format!("{}:{}", test.file, test.line);
        [
            broken(&test.test, name),
            short(&test.source, beside.min(48)),
            report::wrapped(&test.about, beside, "  "),
            place,
            test.threads.to_string(),
        ]
    });
    report::print(&report::table(["test", "source", "about", "file", "CPUs"], 4, rows.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test was an error of the whole run, which named neither its file nor its line.
    #[test]
    fn a_test_without_an_answer_loses_no_other() {
        let text = "
test large
data a = 1
map x leaf(a)
thread
    STR invalid, [pte(x)]
    LDR r0, [x]
    LDR r1, [x]
ask 0:r0 = 1
    expect allowed
ask 0:r1 = 1

test small
data a = 1
thread
    LDR r0, [a]
ask 0:r0 = 1
    expect required
";
        let arguments = Arguments {
            paths: Vec::new(),
            profile: Some(ProfileName::Base),
            only: None,
            seeds: 0,
            herd: None,
            witness: false,
            list: false,
            json: false,
        };
        let tests = parse("mine.litmus", text).unwrap();
        let rows = try_all(&tests, &arguments, 3);
        let verdicts: Vec<_> = rows.iter().map(|row| row.verdict).collect();
        assert_eq!(verdicts, [UNKNOWN, UNKNOWN, HOLDS]);
        let says = "mine.litmus:2: large (base): more than 3 states";
        assert_eq!(warnings(&rows), [says]);
    }
}

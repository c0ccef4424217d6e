//! What is claimed of CPU times of guests on this computer's KVM, seen again: that they repeat, and that a profile fitted on two runs says
//! those of the others before they are made.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::fetch::{self, cargo, target};
use crate::{About as _, Error, Result, say};

/// What two medians of the same phase may differ by.
const APART: f64 = 0.1;
/// Each time is a median of so many rounds.
const ROUNDS: &str = "5";
const FITTED: [&str; 2] = ["dirty-log -b 256M", "dirty-log -b 256M -s anonymous_thp"];

/// The program as a user builds it, for this computer.
fn program() -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.env("CARGO_TARGET_DIR", target());
    cargo.args(["build", "--quiet", "--release"]);
    cargo.args(["--package", "tablewright-lab", "--bin", "tablewright"]);
    match cargo.status().about("cargo")?.success() {
        true => Ok(target().join("release").join("tablewright")),
        false => Err(Error::Failed("no tablewright".into())),
    }
}

/// Runs it; a run that is refused or fails is an error.
fn run(program: &Path, words: &str, more: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program)
        .args(words.split(' '))
        .args(["--on", "kvm", "--json", "--rounds", ROUNDS])
        .args(more)
        .output()
        .about(program.display())?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(Error::Failed(format!(
            "{words}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

fn json(bytes: &[u8], words: &str) -> Result<Value> {
    let why = |error| Error::Failed(format!("{words}: its JSON cannot be read: {error}"));
    serde_json::from_slice(bytes).map_err(why)
}

/// The elements of a list in JSON.
fn list<'a>(of: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    of[key].as_array().into_iter().flatten()
}

/// The phases of a report: name, nanoseconds of CPU time; an error where the log was not what was written.
fn phases(report: &Value, words: &str) -> Result<Vec<(String, f64)>> {
    let mut phases = Vec::new();
    for phase in list(report, "rows").flat_map(|row| list(row, "phases")) {
        let name = phase["phase"].as_str().unwrap_or_default();
        let splits = words.contains("page-table-test") && words.contains("thp");
        if phase["harvested"] != phase["written"] && !splits {
            return Err(Error::Failed(format!(
                "{words}: {name}: the log is not what was written"
            )));
        }
        let time = phase["cpu_ns"].as_f64();
        let time = time
            .ok_or_else(|| Error::Failed(format!("{words}: {name}: its CPU time is not said")))?;
        phases.push((name.to_owned(), time));
    }
    Ok(phases)
}

/// All ways to take a log, in pages and huge pages, of one vCPU and of two, 256 MiB to 2 GiB; and the other experiments.
fn configurations() -> Vec<String> {
    let mut all = Vec::new();
    for backing in ["", " -s anonymous_thp"] {
        for (way, sizes) in [
            (
                "",
                &["256M -v 1", "256M -v 2", "1G -v 1", "1G -v 2", "2G -v 1"][..],
            ),
            (" -g", &["256M -v 1", "256M -v 2"]),
            (" --ring", &["256M -v 1", "256M -v 2"]),
            (" --all-set", &["256M -v 1"]),
        ] {
            all.extend(
                sizes
                    .iter()
                    .map(|size| format!("dirty-log -b {size}{backing}{way}")),
            );
        }
        for experiment in ["write-protect", "page-table-test"] {
            for vcpus in [1, 2] {
                all.push(format!("{experiment} -b 256M -v {vcpus}{backing}"));
            }
        }
    }
    all
}

/// Makes each run twice, one after the other, and compares the medians of CPU time.
///
/// # Errors
/// A run fails, or its log is not what was written.
pub fn repeat() -> Result<()> {
    let program = program()?;
    let (mut total, mut apart) = (0, 0);
    for words in configurations() {
        let once = || phases(&json(&run(&program, &words, &[])?, &words)?, &words);
        let (first, second) = (once()?, once()?);
        let beyond: Vec<String> = first
            .iter()
            .zip(&second)
            .map(|((name, one), (_, other))| (name, other / one.max(1.0) - 1.0))
            .filter(|(_, difference)| difference.abs() > APART)
            .map(|(name, difference)| format!("{name} {:+.0} %", difference * 100.0))
            .collect();
        total += first.len();
        apart += beyond.len();
        let within = first.len() - beyond.len();
        let beyond = beyond.join(", ");
        say!("{words:<46} {within:>2} of {:>2}  {beyond}", first.len());
    }
    say!(
        "{} of {total} phases within 10 %; every log has what was written",
        total - apart
    );
    Ok(())
}

/// Fits a profile to two runs, has it predict others, and lists the errors.
///
/// # Errors
/// A run or the fit fails.
pub fn blind() -> Result<()> {
    let program = program()?;
    let scratch = fetch::scratch()?;
    let file = |name: &str| scratch.join(name);
    let mut fitted = Vec::new();
    for (number, words) in FITTED.iter().enumerate() {
        let to = file(&format!("fitted-{number}.json"));
        fs::write(&to, run(&program, words, &[])?).about(to.display())?;
        fitted.push(to);
    }
    let profile = file("here.toml");
    let mut fit = Command::new(&program);
    fit.args(["fit", "--from"]).args(&fitted);
    let fit = fit.arg("-o").arg(&profile).output().about("fit")?;
    say!("{}", String::from_utf8_lossy(&fit.stdout).trim());
    if !fit.status.success() {
        let why = String::from_utf8_lossy(&fit.stderr);
        return Err(Error::Failed(format!("fit: {}", why.trim())));
    }
    let named = profile.to_string_lossy();
    let (mut all, mut kinds) = (Vec::new(), BTreeMap::<String, Vec<f64>>::new());
    let mut worst = (0.0, String::new());
    for words in others() {
        let report = json(&run(&program, &words, &["--predict", &named])?, &words)?;
        let predicted = list(&report, "rows").flat_map(|row| list(row, "predicted"));
        for phase in predicted.filter(|phase| phase["differs"].is_null()) {
            let (Some(name), Some(error)) =
                (phase["phase"].as_str(), phase["error_percent"].as_f64())
            else {
                continue;
            };
            let kind = name.split(' ').next().unwrap_or(name);
            kinds.entry(kind.to_owned()).or_default().push(error);
            all.push(error.abs());
            if error.abs() > worst.0 {
                worst = (error.abs(), format!("{words}: {name} {error:+.0} %"));
            }
        }
    }
    say!("\nphase       phases  median error    from      to");
    for (kind, errors) in &mut kinds {
        errors.sort_by(f64::total_cmp);
        let (from, to) = (errors.first(), errors.last());
        let median = median(errors.iter().map(|error| error.abs()).collect());
        say!(
            "{kind:<10} {:>7} {median:>11.1} % {:>+5.0} % {:>+5.0} %",
            errors.len(),
            from.unwrap_or(&0.0),
            to.unwrap_or(&0.0)
        );
    }
    let near = all.iter().filter(|error| **error <= 15.0).count();
    say!(
        "{} phases, {near} within 15 %, median error {:.1} %; worst: {}",
        all.len(),
        median(all.clone()),
        worst.1
    );
    Ok(())
}

/// What is predicted.
fn others() -> Vec<String> {
    let small = [
        "512M",
        "1G",
        "2G",
        "256M -v 2",
        "512M -v 2",
        "1G -v 2",
        "256M -g",
        "256M -w 50",
        "256M -a",
        "256M -i 4",
    ];
    let huge = ["512M", "2G", "512M -v 2", "1G -v 2", "256M -g"];
    let small = small.iter().map(|words| format!("dirty-log -b {words}"));
    let huge = huge
        .iter()
        .map(|words| format!("dirty-log -s anonymous_thp -b {words}"));
    small.chain(huge).collect()
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_predicted_was_not_fitted_on_and_each_way_is_repeated() {
        let others = others();
        assert_eq!(others.len(), 15);
        assert!(others.iter().all(|words| !FITTED.contains(&words.as_str())));
        let all = configurations();
        for part in [
            "-g",
            "--ring",
            "--all-set",
            "thp",
            "-v 2",
            "2G",
            "write-protect",
            "page-table",
        ] {
            assert!(all.iter().any(|words| words.contains(part)), "{part}");
        }
    }

    #[test]
    fn a_log_that_lacks_a_page_has_no_figures() {
        let report = |harvested| {
            let text = format!(
                r#"{{"rows": [{{"phases": [{{"phase": "get 1", "cpu_ns": 5.0, "harvested": {harvested}, "written": 9}}]}}]}}"#
            );
            json(text.as_bytes(), "a run").unwrap()
        };
        let expected = vec![("get 1".to_owned(), 5.0)];
        assert_eq!(phases(&report(9), "dirty-log").unwrap(), expected);
        assert!(phases(&report(8), "dirty-log").is_err());
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }
}

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
/// A run has so many rounds.
const REPETITIONS: usize = 5;
/// A time that is fitted or predicted is a median of so many.
const ROUNDS: &str = "5";
/// A call that takes less is moved by a cold cache or an interrupt of the host by more than that: nanoseconds.
const SHORT: f64 = 1e5;
/// Of two sizes, so that what a call takes in any case is told from what grows with the log.
const FITTED: [&str; 2] = ["dirty-log -b 256M", "dirty-log -b 1G -s anonymous_thp"];

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
fn run(program: &Path, words: &str, rounds: &str, more: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program)
        .args(words.split(' '))
        .args(["--on", "kvm", "--json", "--rounds", rounds])
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

/// The CPUs of the threads of a run: of each vCPU one, and of the thread that asks KVM the next, as far as there are any.
fn pins(words: &str, cpus: usize) -> String {
    let mut words = words.split(' ').skip_while(|word| *word != "-v").skip(1);
    let vcpus: usize = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let all: Vec<String> = (0..=vcpus).map(|at| (at % cpus).to_string()).collect();
    all.join(",")
}

/// A phase of both runs: the CPU times of their repetitions, and what they are called.
struct Both {
    name: String,
    samples: [Vec<f64>; 2],
}

impl Both {
    fn medians(&self) -> [f64; 2] {
        self.samples.each_ref().map(|all| median(all.clone()))
    }

    /// How much longer the second takes, as a part of the first.
    fn difference(&self) -> f64 {
        let [first, second] = self.medians();
        second / first.max(1.0) - 1.0
    }

    /// In nanoseconds.
    fn distance(&self) -> f64 {
        let [first, second] = self.medians();
        (second - first).abs()
    }
}

/// Makes one run's repetitions and another's by turns: whatever changes the pace of the computer meanwhile changes that of both, and each is first
/// as often as it is second. What is done before is not counted.
fn by_turns(program: &Path, words: &str, cpus: usize) -> Result<Vec<Both>> {
    let pins = pins(words, cpus);
    let once = || {
        phases(
            &json(&run(program, words, "1", &["-c", &pins])?, words)?,
            words,
        )
    };
    let mut all: Vec<Both> = once()?
        .into_iter()
        .map(|(name, _)| Both {
            name,
            samples: [Vec::new(), Vec::new()],
        })
        .collect();
    for turn in 0..REPETITIONS {
        for which in [turn % 2, 1 - turn % 2] {
            for (both, (_, time)) in all.iter_mut().zip(once()?) {
                both.samples[which].push(time);
            }
        }
    }
    Ok(all)
}

/// Makes each run twice, by turns, and compares the medians of CPU time.
///
/// # Errors
/// A run fails, or its log is not what was written.
pub fn repeat() -> Result<()> {
    let program = program()?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut total, mut within, mut short, mut farthest) = (0, 0, 0, 0_f64);
    for words in configurations() {
        let all = by_turns(&program, &words, cpus)?;
        let beyond: Vec<_> = all
            .iter()
            .filter(|both| both.difference().abs() > APART)
            .collect();
        total += all.len();
        within += all.len() - beyond.len();
        for both in beyond.iter().filter(|both| both.medians()[0] < SHORT) {
            short += 1;
            farthest = farthest.max(both.distance());
        }
        let said: Vec<String> = beyond
            .iter()
            .map(|both| {
                let [first, _] = both.medians();
                let (percent, us) = (both.difference() * 100.0, first / 1e3);
                format!("{} of {us:.0} us {percent:+.0} %", both.name)
            })
            .collect();
        let near = all.len() - beyond.len();
        say!(
            "{words:<46} {near:>2} of {:>2}  {}",
            all.len(),
            said.join(", ")
        );
    }
    say!("{within} of {total} phases within 10 %; every log has what was written");
    say!(
        "of the {} others {short} take less than {:.0} us, and differ by at most {:.1} us",
        total - within,
        SHORT / 1e3,
        farthest / 1e3
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
        fs::write(&to, run(&program, words, ROUNDS, &[])?).about(to.display())?;
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
        let report = json(
            &run(&program, &words, ROUNDS, &["--predict", &named])?,
            &words,
        )?;
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

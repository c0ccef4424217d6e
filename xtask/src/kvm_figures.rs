//! Claims about CPU times of guests on this computer's KVM, tested again: that they repeat, and
//! that a profile fitted on two runs says those of the others before they are made.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::tools::{self, cargo, target};
use crate::{About as _, Error, Result, say};

/// The most by which two medians of the same phase may differ.
const APART: f64 = 0.1;
/// A run has so many repetitions, of which each is of several rounds.
const REPETITIONS: usize = 5;
/// A repetition has as many rounds as there is time for, no more than are needed, and not so few
/// that one of them in four makes a difference, which is how often another host slows this one down
/// by a third where both share a core.
const LONG: Duration = Duration::from_millis(3000);
const FEWEST_ROUNDS: u32 = 3;
const MOST_ROUNDS: u32 = 9;
/// The time that passes beyond CPU time in what is not disturbed: nanoseconds.
const UNSEEN: f64 = 2e4;
/// The CPUs are slow where arithmetic takes so much longer on them than it did at best.
const SLOW: f64 = 1.1;
/// The number of times that a disturbed run is repeated.
const TRIES: usize = 4;
/// A time that is fitted or predicted is a median of so many.
const ROUNDS: &str = "5";
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

fn read(bytes: &[u8], words: &str) -> Result<Value> {
    let why = |error| Error::Failed(format!("{words}: its JSON cannot be read: {error}"));
    serde_json::from_slice(bytes).map_err(why)
}

/// The elements of a list in JSON.
fn list<'a>(of: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    of[key].as_array().into_iter().flatten()
}

/// The time of one phase, once; nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Once {
    /// CPU time.
    cpu: f64,
    /// Time that its threads had begun and did not run.
    away: f64,
    /// Of a fixed piece of arithmetic on its CPUs, before or after.
    pace: f64,
}

impl Once {
    /// Whether something else had the CPU for longer than what is to be told. Where that was
    /// another host, CPU time is not to be believed: what it took is subtracted, and not always
    /// from what it was taken of.
    fn is_disturbed(&self) -> bool {
        self.away > self.cpu * APART / 2.0 + UNSEEN
    }

    /// Whether its CPUs were slow, which is told by what has nothing to do with what was measured
    /// on them.
    fn is_slow(&self, best: f64) -> bool {
        self.pace > best * SLOW
    }
}

/// The phases of a report, by name; an error where the log was not what was written.
fn phases(report: &Value, words: &str) -> Result<Vec<(String, Once)>> {
    let mut phases = Vec::new();
    for phase in list(report, "rows").flat_map(|row| list(row, "phases")) {
        let name = phase["phase"].as_str().unwrap_or_default();
        let splits = words.contains("page-table-test") && words.contains("thp");
        if phase["harvested"] != phase["written"] && !splits {
            return Err(Error::Failed(format!("{words}: {name}: the log is not what was written")));
        }
        let time = |key| {
            let time = phase[key].as_f64();
            time.ok_or_else(|| Error::Failed(format!("{words}: {name}: there is no {key}")))
        };
        let (cpu, away) = (time("cpu_ns")?, time("away_ns")?);
        let paces = list(phase, "pace_samples_ns").filter_map(Value::as_f64);
        let pace = paces.fold(0.0, f64::max);
        phases.push((name.to_owned(), Once { cpu, away, pace }));
    }
    Ok(phases)
}

/// All ways to take a log, in pages and huge pages, of one vCPU and of two, 256 MiB to 2 GiB; and
/// the other experiments.
fn configurations() -> Vec<String> {
    let mut all = Vec::new();
    for backing in ["", " -s anonymous_thp"] {
        for (way, sizes) in [
            ("", &["256M -v 1", "256M -v 2", "1G -v 1", "1G -v 2", "2G -v 1"][..]),
            (" -g", &["256M -v 1", "256M -v 2"]),
            (" --ring", &["256M -v 1", "256M -v 2"]),
            (" --all-set", &["256M -v 1"]),
        ] {
            all.extend(sizes.iter().map(|size| format!("dirty-log -b {size}{backing}{way}")));
        }
        for experiment in ["write-protect", "page-table-test"] {
            for vcpus in [1, 2] {
                all.push(format!("{experiment} -b 256M -v {vcpus}{backing}"));
            }
        }
    }
    all
}

/// The CPUs of the threads of a run: of each vCPU one, and of the thread that asks KVM the next, as
/// far as there are any.
fn pins(words: &str, cpus: usize) -> String {
    let mut words = words.split(' ').skip_while(|word| *word != "-v").skip(1);
    let vcpus: usize = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let all: Vec<String> = (0..=vcpus).map(|at| (at % cpus).to_string()).collect();
    all.join(",")
}

/// A phase of both runs: its name, and of each repetition what its rounds took.
struct Both {
    name: String,
    samples: [[Vec<Once>; REPETITIONS]; 2],
}

impl Both {
    fn new(name: String) -> Self {
        Self { name, samples: Default::default() }
    }

    fn medians(&self, best: f64) -> [f64; 2] {
        // Of what was neither disturbed nor slow; unless all was, of what was not slow; unless all
        // was.
        let repetition = |rounds: &Vec<Once>| {
            let those = |is: &dyn Fn(&Once) -> bool| -> Vec<f64> {
                let rounds = rounds.iter().filter(|once| is(once));
                rounds.map(|once| once.cpu).collect()
            };
            let calm = those(&|once| !once.is_slow(best) && !once.is_disturbed());
            let steady = those(&|once| !once.is_slow(best));
            let mut sets = [calm, steady, those(&|_| true)].into_iter();
            undisturbed(sets.find(|set| !set.is_empty()).unwrap_or_default())
        };
        let run = |run: &[_; REPETITIONS]| median(run.iter().map(repetition).collect());
        self.samples.each_ref().map(run)
    }

    /// CPU time, time away and pace of each round of each repetition of both runs.
    fn value(&self) -> Value {
        let rounds = |rounds: &Vec<Once>| -> Value {
            rounds.iter().map(|once| json!([once.cpu, once.away, once.pace])).collect()
        };
        let run = |run: &[Vec<Once>; REPETITIONS]| -> Value { run.iter().map(rounds).collect() };
        self.samples.iter().map(run).collect()
    }

    /// How many there are, how many of them were disturbed, and how many slow.
    fn count(&self, best: f64) -> [usize; 3] {
        let all = || self.samples.iter().flatten().flatten();
        [
            all().count(),
            all().filter(|once| once.is_disturbed()).count(),
            all().filter(|once| once.is_slow(best)).count(),
        ]
    }

    /// How much longer the second takes, as a part of the first.
    fn difference(&self, best: f64) -> f64 {
        let [first, second] = self.medians(best);
        second / first.max(1.0) - 1.0
    }
}

/// Makes one run's rounds and another's by turns: whatever changes the pace of the computer
/// meanwhile changes that of both, and each is first as often as it is second. What is done before
/// is not counted, but says how many rounds there is time for: how many is never said by what they
/// take. A round on CPUs that were slow is made again at once. `best` is the best pace so far.
fn by_turns(
    program: &Path,
    words: &str,
    cpus: usize,
    best: &mut f64,
) -> Result<(usize, Vec<Both>)> {
    let pins = pins(words, cpus);
    let once = || phases(&read(&run(program, words, "1", &["-c", &pins])?, words)?, words);
    let timed = || {
        let begin = Instant::now();
        once().map(|first| (begin.elapsed(), first))
    };
    // Of two, so that one that was disturbed does not make the rounds few.
    let ((one, first), (other, _)) = (timed()?, timed()?);
    let rounds = LONG.as_nanos() / one.min(other).as_nanos().max(1);
    let rounds = rounds.clamp(FEWEST_ROUNDS.into(), MOST_ROUNDS.into()) as usize;
    let mut all: Vec<Both> = first.into_iter().map(|(name, _)| Both::new(name)).collect();
    for turn in 0..REPETITIONS * rounds {
        for which in [turn % 2, 1 - turn % 2] {
            for _ in 0..TRIES {
                let round = once()?;
                let paces = round.iter().map(|(_, once)| once.pace);
                *best = paces.filter(|pace| *pace > 0.0).fold(*best, f64::min);
                let is_slow = round.iter().any(|(_, once)| once.is_slow(*best));
                for (both, (_, once)) in all.iter_mut().zip(round) {
                    both.samples[which][turn / rounds].push(once);
                }
                if !is_slow {
                    break;
                }
            }
        }
    }
    Ok((rounds, all))
}

/// Makes each run twice, by turns, and compares the medians of CPU time.
///
/// # Errors
/// A run fails, its log is not what was written, or the medians of a phase are not within a tenth.
pub fn repeat() -> Result<()> {
    let program = program()?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let begin = Instant::now();
    let (mut within, mut farthest, mut beyond) = (0, 0_f64, Vec::new());
    let (mut counts, mut best) = ([0; 3], f64::MAX);
    let mut samples = serde_json::Map::new();
    for words in configurations() {
        let (rounds, all) = by_turns(&program, &words, cpus, &mut best)?;
        let mut said = Vec::new();
        for both in &all {
            let (difference, [first, _]) = (both.difference(best), both.medians(best));
            farthest = farthest.max(difference.abs());
            if difference.abs() > APART {
                let (percent, us) = (difference * 100.0, first / 1e3);
                said.push(format!("{} of {us:.0} us {percent:+.0} %", both.name));
            } else {
                within += 1;
            }
        }
        say!(
            "{words:<46} 2 x {REPETITIONS} x {rounds}: {:>2} of {:>2}  {}",
            all.len() - said.len(),
            all.len(),
            said.join(", ")
        );
        beyond.extend(said.iter().map(|said| format!("{words}: {said}")));
        for both in &all {
            let more = both.count(best);
            counts = std::array::from_fn(|at| counts[at] + more[at]);
        }
        let of = all.iter().map(|both| (both.name.clone(), both.value()));
        samples.insert(words, of.collect());
    }
    let total = within + beyond.len();
    say!(
        "{within} of {total} phases within 10 %, the farthest {:.1} %; every log has what was \
         written; {:.0} min",
        farthest * 100.0,
        begin.elapsed().as_secs_f64() / 60.0
    );
    let file = tools::scratch()?.join("repeat.json");
    fs::write(&file, Value::from(samples).to_string()).about(file.display())?;
    let [all, disturbed, slow] = counts;
    say!(
        "of {all} times {disturbed} were disturbed by other programs or another host, {slow} were \
         taken while the CPUs themselves were slow; both are left out, and all are in {}",
        file.display()
    );
    match beyond.as_slice() {
        [] => Ok(()),
        beyond => Err(Error::Failed(format!("not within 10 %: {}", beyond.join("; ")))),
    }
}

/// Fits a profile to two runs, has it predict others, and lists the errors.
///
/// # Errors
/// A run or the fit fails.
pub fn blind() -> Result<()> {
    let program = program()?;
    let scratch = tools::scratch()?;
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
        let report = read(&run(&program, &words, ROUNDS, &["--predict", &named])?, &words)?;
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

/// Returns the predicted runs.
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
    let huge = huge.iter().map(|words| format!("dirty-log -s anonymous_thp -b {words}"));
    small.chain(huge).collect()
}

/// The mean of the faster half: what disturbs a phase makes it longer, and one of few rounds in
/// which something did is not to move the figure. Of what has two paces, as two vCPUs in each
/// other's way, a mean moves by little where a median jumps.
fn undisturbed(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of.truncate(of.len().div_ceil(2));
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

/// The middle, or between the two that are; zero of nothing.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    let middle = |at: usize| of.get(at).copied().unwrap_or(0.0);
    (middle(of.len() / 2) + middle(of.len().saturating_sub(1) / 2)) / 2.0
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
        for part in
            ["-g", "--ring", "--all-set", "thp", "-v 2", "2G", "write-protect", "page-table"]
        {
            assert!(all.iter().any(|words| words.contains(part)), "{part}");
        }
    }

    #[test]
    fn a_log_that_lacks_a_page_has_no_figures() {
        let report = |harvested| {
            let text = format!(
                r#"{{"rows": [{{"phases": [{{
                    "phase": "get 1", "cpu_ns": 5.0, "away_ns": 1.0,
                    "pace_samples_ns": [4.0, 7.0], "harvested": {harvested}, "written": 9
                }}]}}]}}"#
            );
            read(text.as_bytes(), "a run").unwrap()
        };
        let once = Once { cpu: 5.0, away: 1.0, pace: 7.0 };
        let expected = vec![("get 1".to_owned(), once)];
        assert_eq!(phases(&report(9), "dirty-log").unwrap(), expected);
        assert!(phases(&report(8), "dirty-log").is_err());
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(undisturbed(vec![9.0, 1.0, 2.0]), 1.5);
        assert_eq!(undisturbed(vec![9.0, 3.0, 1.0, 0.0, 2.0]), 1.0);
        let ends = (undisturbed(vec![7.0]), undisturbed(Vec::new()));
        assert_eq!(ends, (7.0, 0.0));
    }

    #[test]
    fn a_repetition_is_of_what_was_not_disturbed_and_a_run_is_the_median_of_its_repetitions() {
        let mut both = Both::new("enable".to_owned());
        for (which, longer) in [(0, 1.0), (1, 1.2)] {
            for (repetition, rounds) in both.samples[which].iter_mut().enumerate() {
                // One repetition took longer and no CPU says why; in each something had the CPU in
                // two rounds, and in two the CPU was slow.
                let longer = if repetition == 3 { 7.0 } else { longer };
                let rounds_took = [
                    (1e6, 0.0, 40.0),
                    (2e5, 1e6, 41.0),
                    (1.4e6, 0.0, 56.0),
                    (1e6, 5e4, 40.0),
                    (1.3e6, 1e3, 45.0),
                    (3e5, 1e5, 40.0),
                    (1e6, 1e3, 43.0),
                ];
                rounds.extend(rounds_took.map(|(cpu, away, pace)| Once {
                    cpu: cpu * longer,
                    away: away * longer,
                    pace,
                }));
            }
        }
        let repetitions = 2 * REPETITIONS;
        assert_eq!(both.count(40.0), [7 * repetitions, 2 * repetitions, 2 * repetitions]);
        assert_eq!(both.medians(40.0), [1e6, 1.2e6]);
        assert!((both.difference(40.0) - 0.2).abs() < 1e-9);
        // Where something always had the CPU, the pace counts still; where it was always slow, all
        // counts.
        let once = |cpu, away, pace| Once { cpu, away, pace };
        both.samples[0].fill(vec![once(1e6, 1e6, 40.0), once(9e6, 0.0, 60.0)]);
        both.samples[1].fill(vec![once(2e6, 0.0, 60.0)]);
        assert_eq!(both.medians(40.0), [1e6, 2e6]);
    }
}

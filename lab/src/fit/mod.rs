//! `fit`: finds the costs with which a machine takes as long as was published, and says how it does
//! on the rest.
//!
//! The time of a run is the sum of what its operations cost: a linear function of the costs, as
//! long as no CPU queues. How often each cost counts in a row is not worked out but seen: the step
//! is run with the cost as it is, and with a little more. So a fit knows nothing of the steps, and
//! a machine that does something else is fitted to what it does. The fit minimises the sum of
//! squares of *relative* errors: otherwise the longest row is the only one that matters.
//!
//! What is printed as the time of a row is never the linear function but one more run, with the
//! fitted costs.

mod curve;
mod determined;
pub mod from_run;
mod solve;

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use tablewright_machine::{Cost, Profile, Provenance, RowSelector, Source, Time};

use crate::error::Error;
use crate::file::Target;
use crate::map_mem::job::{self as map_mem, Job, Run};
use crate::map_mem::plan::Plan;
use crate::map_mem::simulate as machine;
use crate::map_mem::step::{Step, step_of};
use crate::output::report;
use crate::output::report::{error_percent, percent};
use crate::profile::{self, Experiment, Named};
use crate::published;
use crate::runs::{self, Threads};
use determined::{Counts, Determined};
use solve::Undetermined;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright fit --machine ampere-altra-vm-64g
  tablewright fit --machine ampere-altra-vm-64g --rows 'Ampere Altra VM, 256G' --free \
  entry,publish,complete
  tablewright fit --machine mine.toml --table mine.csv -o fitted.toml
  tablewright fit --from a.json b.json -o here.toml      to what --on kvm or doctor has measured")]
pub struct Arguments {
    /// The machine: a profile, by name or as a file
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true,
          required_unless_present = "from")]
    machine: Option<String>,
    /// Fit to what `dirty-log --on kvm --json` and `doctor --json` have printed into these files,
    /// and to no table
    #[arg(long, value_name = "RUN.json", num_args = 1.., conflicts_with_all = ["table", "rows"])]
    from: Vec<PathBuf>,
    /// The published figures: map-mem or tlb-flush, which come with the program, or a file with the
    /// columns of map-mem
    #[arg(long, value_name = "TABLE", default_value = "map-mem")]
    table: String,
    /// Fit to these rows, each the name of a system, or SYSTEM/CONFIGURATION [default: those that
    /// the profile was fitted on]
    #[arg(long, value_name = "ROWS", num_args = 1..)]
    rows: Vec<String>,
    /// The costs that may change [default: those that the profile says are fitted]
    #[arg(long, value_name = "COSTS", value_delimiter = ',')]
    free: Vec<Cost>,
    /// Write the profile with the fitted costs to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A published row that can be run.
struct Case {
    figure: published::Row,
    step: Step,
    plan: Plan,
    published_ms: f64,
    fitted: bool,
}

impl Case {
    /// The run of this row on such a machine.
    fn on(&self, profile: &Profile) -> Job {
        Job { profile: profile.clone(), step: self.step, plan: self.plan.clone() }
    }
}

#[derive(Serialize)]
struct Parameters {
    machine: String,
    core: String,
    table: String,
    free: Vec<&'static str>,
    fitted_on: Vec<RowSelector>,
}

/// A cost, as it was and as it is.
#[derive(Serialize)]
struct Fitted {
    cost: &'static str,
    profile_ns: f64,
    fitted_ns: f64,
    /// How far it may be off, if each row may be by 5 %.
    off_ns: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    system: String,
    configuration: String,
    published_ms: f64,
    virtual_ms: f64,
    error_percent: f64,
    fitted: bool,
    /// The error of the fit to the other fitted rows, where they determine the costs.
    left_out_percent: Option<f64>,
}

#[derive(Serialize)]
struct Report {
    experiment: &'static str,
    parameters: Parameters,
    costs: Vec<Fitted>,
    determined: Determined,
    rows: Vec<Row>,
    warnings: Vec<String>,
}

/// Fits the costs, and prints them beside what was published.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    if !arguments.from.is_empty() {
        return from_run::run(&from_run::Asked {
            files: &arguments.from,
            machine: arguments.machine.as_deref(),
            free: &arguments.free,
            output: arguments.output.as_deref(),
            json: arguments.json,
        });
    }
    // Without one, the command line is refused.
    let profile = Profile::load(arguments.machine.as_deref().unwrap_or_default())?;
    if arguments.table == "tlb-flush" {
        let said = [
            (!arguments.rows.is_empty(), "--rows"),
            (!arguments.free.is_empty(), "--free"),
            (arguments.output.is_some(), "--output"),
        ];
        let why = ": of tlb-flush the two rows of real are fitted to, and three costs stay a curve";
        Error::refuse(&said, why)?;
        return curve::print(
            &profile,
            &runs::software::<crate::tlb_flush::job::Job>(arguments.threads),
            arguments.json,
        );
    }
    let target =
        arguments.output.as_deref().map(|path| Target::new("--output", path)).transpose()?;
    let (report, fitted) = fit(arguments, profile, &runs::software::<Job>(arguments.threads))?;
    if arguments.json {
        report::print_json(&report)?;
    } else {
        report::print(&text(&report))?;
        for warning in &report.warnings {
            report::complain("warning", warning);
        }
    }
    match target {
        Some(target) => target.fill(&fitted.to_toml()),
        None => Ok(()),
    }
}

fn fit(arguments: &Arguments, profile: Profile, run: Run<'_>) -> Result<(Report, Profile), Error> {
    let free = free_costs(arguments, &profile)?;
    let (cases, fitted_on, mut warnings) = cases(arguments, &profile)?;
    let on: Vec<&Case> = cases.iter().filter(|case| case.fitted).collect();
    if on.len() < free.len() {
        return Err(Error::Usage(format!(
            "{} for {}: choose more rows with --rows, or fewer costs with --free",
            report::counted(on.len() as u64, "row", "rows"),
            report::counted(free.len() as u64, "cost", "costs"),
        )));
    }

    let mut fitted = profile.clone();
    let (counts, right) = counts(&profile, &free, &on, run)?;
    let rows = counts.of(&free);
    let found = solve(&free, &rows, &right)?;
    for (cost, found) in free.iter().zip(&found) {
        cost.set(&mut fitted.costs, *found);
    }
    let determined = Determined::of(&counts, &fitted, &free);
    for (cost, found) in free.iter().zip(&found) {
        if *found == Time::ZERO {
            warnings.push(format!(
                "{} comes out as nothing: what was carried over leaves no room for it",
                cost.name()
            ));
        }
    }
    let off = determined::intervals(&rows, &found);
    let mut each_left_out = determined::each_left_out(&rows, &right).into_iter();
    let jobs: Vec<Job> = cases.iter().map(|case| case.on(&fitted)).collect();
    let rows = cases
        .iter()
        .zip(run(&jobs)?)
        .map(|(case, ran)| {
            let virtual_ms = machine::ms(ran.time);
            Row {
                system: case.figure.system.clone(),
                configuration: case.figure.configuration.clone(),
                published_ms: case.published_ms,
                virtual_ms,
                error_percent: error_percent(virtual_ms, case.published_ms),
                fitted: case.fitted,
                left_out_percent: case.fitted.then(|| each_left_out.next()).flatten().flatten(),
            }
        })
        .collect();

    let ns = |time: Time| time.as_ps() as f64 / 1e3;
    let report = Report {
        experiment: "fit",
        parameters: Parameters {
            machine: profile.name.clone(),
            core: profile.system.core.clone(),
            table: arguments.table.clone(),
            free: free.iter().map(|cost| cost.name()).collect(),
            fitted_on: fitted_on.clone(),
        },
        costs: free
            .iter()
            .zip(off)
            .map(|(cost, off_ns)| Fitted {
                cost: cost.name(),
                profile_ns: ns(cost.get(&profile.costs)),
                fitted_ns: ns(cost.get(&fitted.costs)),
                off_ns,
            })
            .collect(),
        determined,
        rows,
        warnings,
    };
    say_where_from(&mut fitted, &free, fitted_on, &arguments.table);
    Ok((report, fitted))
}

/// The costs that may change.
fn free_costs(arguments: &Arguments, profile: &Profile) -> Result<Vec<Cost>, Error> {
    let free: Vec<Cost> = if arguments.free.is_empty() {
        let fitted = |cost: &Cost| {
            let known = profile.provenance_of(cost.key());
            known.is_some_and(|entry| entry.source == Source::Fitted)
        };
        Cost::all().filter(fitted).collect()
    } else {
        arguments.free.clone()
    };
    if free.is_empty() {
        return Err(Error::Usage(format!(
            "{} has no fitted costs: say with --free which may change",
            profile.name
        )));
    }
    if free.len() > solve::MOST {
        return Err(Error::Usage(format!(
            "--free with {} costs: at most {}",
            free.len(),
            solve::MOST
        )));
    }
    for (place, cost) in free.iter().enumerate() {
        if free[..place].contains(cost) {
            return Err(Error::Usage(format!("--free names {} twice", cost.name())));
        }
    }
    Ok(free)
}

type Cases = (Vec<Case>, Vec<RowSelector>, Vec<String>);

/// The rows to run, what selects those that are fitted, and what to keep in mind.
fn cases(arguments: &Arguments, profile: &Profile) -> Result<Cases, Error> {
    let table = if published::EXPERIMENTS.iter().any(|(name, _)| *name == arguments.table) {
        if arguments.table != "map-mem" {
            return Err(Error::Usage(format!(
                "--table {}: the machine cannot fit to its rows; use map-mem, tlb-flush or a file",
                arguments.table
            )));
        }
        published::built_in(&arguments.table)
    } else {
        published::read(Path::new(&arguments.table))?
    };

    let fitted_on = selectors(arguments, profile, &table)?;
    let is_fitted = |row: &published::Row| {
        fitted_on.iter().any(|selector| selector.selects(&row.system, &row.configuration))
    };
    let mut cases = Vec::new();
    let mut others: Vec<String> = Vec::new();
    for figure in table {
        let fitted = is_fitted(&figure);
        // The costs of one core say nothing of another.
        if !fitted
            && let Some(other) = profile::of_system(&figure.system)?
            && other.system.core != profile.system.core
        {
            let other = format!("{} ({})", figure.system, other.system.core);
            if !others.contains(&other) {
                others.push(other);
            }
            continue;
        }
        cases.push(Case {
            step: step_of(&figure)?,
            plan: map_mem::plan_of(profile, figure.ram()?.bytes())?,
            published_ms: figure.after_ms()?,
            fitted,
            figure,
        });
    }
    let warnings = if others.is_empty() {
        Vec::new()
    } else {
        vec![format!("left out, as other cores: {}", others.join("; "))]
    };
    Ok((cases, fitted_on, warnings))
}

/// Returns the selectors of the fitted rows. Each selects at least one.
fn selectors(
    arguments: &Arguments,
    profile: &Profile,
    table: &[published::Row],
) -> Result<Vec<RowSelector>, Error> {
    if arguments.rows.is_empty() {
        let selectors = profile.fitted_on.clone();
        let found = |selector: &RowSelector| {
            table.iter().any(|row| selector.selects(&row.system, &row.configuration))
        };
        if !selectors.iter().any(found) {
            return Err(Error::Usage(format!(
                "{} was fitted on no row of {}: say with --rows on which it shall be",
                profile.name, arguments.table
            )));
        }
        return Ok(selectors);
    }
    arguments
        .rows
        .iter()
        .map(|text| {
            let selector = table.iter().find_map(|row| {
                let (system, configuration) = (&row.system, &row.configuration);
                let short = row.without_remark().rsplit(' ').next().unwrap_or_default();
                if text == system {
                    return Some((system, None));
                }
                let rest = text.strip_prefix(system.as_str())?.strip_prefix('/')?;
                (rest == configuration || rest == short).then_some((system, Some(configuration)))
            });
            let Some((system, configuration)) = selector else {
                return Err(Error::Usage(format!(
                    "--rows '{text}': no row of {} is of that system or SYSTEM/CONFIGURATION",
                    arguments.table
                )));
            };
            Ok(RowSelector {
                system: system.clone(),
                configuration: configuration.cloned(),
                metric: None,
            })
        })
        .collect()
}

/// How much higher a cost is made to see how often it counts. A run's time is whole picoseconds, so
/// this is exact.
const MORE: Time = Time::ns(1);

/// How often each cost counts in these rows, and what part of each the free costs have to be.
fn counts(
    profile: &Profile,
    free: &[Cost],
    on: &[&Case],
    run: Run<'_>,
) -> Result<(Counts, Vec<f64>), Error> {
    // For each row the costs as they are, and each of them a little higher.
    let depends_on: Vec<Cost> = Experiment::MapMem.depends_on().collect();
    let costs: Vec<Cost> =
        Cost::all().filter(|cost| depends_on.contains(cost) || free.contains(cost)).collect();
    let higher = costs.iter().map(|cost| {
        let mut higher = profile.clone();
        cost.set(&mut higher.costs, cost.get(&profile.costs) + MORE);
        higher
    });
    let profiles: Vec<Profile> = std::iter::once(profile.clone()).chain(higher).collect();
    let jobs: Vec<Job> =
        on.iter().flat_map(|case| profiles.iter().map(|profile| case.on(profile))).collect();
    let ran = run(&jobs)?;

    let mut rows = Vec::with_capacity(on.len());
    let mut right = Vec::with_capacity(on.len());
    for (case, ran) in on.iter().zip(ran.chunks(profiles.len())) {
        let published = case.published_ms * machine::PS_PER_MS;
        let now = ran[0].time;
        // What is left if the free costs are nothing.
        let mut rest = now.as_ps() as f64;
        let mut row = Vec::with_capacity(costs.len());
        for (cost, more) in costs.iter().zip(&ran[1..]) {
            let more = more.time.saturating_sub(now);
            let times = more.as_ps() as f64 / MORE.as_ps() as f64;
            if free.contains(cost) {
                rest -= times * cost.get(&profile.costs).as_ps() as f64;
            }
            row.push(times / published);
        }
        rows.push(row);
        right.push(1.0 - rest / published);
    }
    Ok((Counts { costs, rows }, right))
}

/// The free costs for which the relative errors of these rows are smallest.
fn solve(free: &[Cost], rows: &[Vec<f64>], right: &[f64]) -> Result<Vec<Time>, Error> {
    let found = solve::non_negative(rows, right).map_err(|Undetermined(which)| {
        let before: Vec<_> = free[..which].iter().map(|cost| cost.name()).collect();
        Error::Usage(if rows.iter().all(|row| row[which] == 0.0) {
            format!("no fitted row depends on {}", free[which].name())
        } else {
            format!(
                "the fitted rows do not tell {} from {}: take one of them out of --free",
                free[which].name(),
                before.join(" and ")
            )
        })
    })?;
    Ok(found.into_iter().map(|ps| Time::ps(ps.round() as u64)).collect())
}

/// Has the profile say where its new costs come from.
fn say_where_from(profile: &mut Profile, free: &[Cost], fitted_on: Vec<RowSelector>, table: &str) {
    let keys: Vec<String> = free.iter().map(|cost| cost.key().to_owned()).collect();
    for entry in &mut profile.provenance {
        entry.of.retain(|key| !keys.contains(key));
    }
    profile.provenance.retain(|entry| !entry.of.is_empty());
    profile.provenance.insert(
        0,
        Provenance {
            of: keys,
            source: Source::Fitted,
            note: format!("By `tablewright fit` to the rows named in fitted_on, of {table}."),
        },
    );
    profile.fitted_on = fitted_on;
}

fn text(report: &Report) -> String {
    let parameters = &report.parameters;
    let count = |fitted| report.rows.iter().filter(|row| row.fitted == fitted).count() as u64;
    let mut text = format!(
        "{} ({}) fitted to {} of {}; {} left out\n\n",
        parameters.machine,
        parameters.core,
        report::counted(count(true), "row", "rows"),
        parameters.table,
        report::counted(count(false), "row", "rows"),
    );
    text += &report::table(
        ["cost", "profile", "fitted", "give or take"],
        1,
        report
            .costs
            .iter()
            .map(|cost| {
                let ns = |ns: f64| format!("{ns:.3} ns");
                [
                    cost.cost.to_owned(),
                    ns(cost.profile_ns),
                    ns(cost.fitted_ns),
                    cost.off_ns.map_or_else(|| "-".to_owned(), ns),
                ]
            })
            .collect(),
    );
    text += &said(&report.determined);
    text += "\n";
    text += &report::table(
        ["", "published", "machine", "error", "fitted"],
        1,
        report
            .rows
            .chunk_by(|a, b| a.system == b.system)
            .flat_map(|column| {
                let system = [column[0].system.as_str(), "", "", "", ""].map(str::to_owned);
                std::iter::once(system).chain(column.iter().map(|row| {
                    [
                        format!("  {}", shortened(&row.configuration)),
                        report::time(row.published_ms * 1e6),
                        report::time(row.virtual_ms * 1e6),
                        percent(row.error_percent),
                        match (row.fitted, row.left_out_percent) {
                            (true, Some(error)) => format!("yes; else {}", percent(error)),
                            (true, None) => "yes".to_owned(),
                            (false, _) => "no".to_owned(),
                        },
                    ]
                }))
            })
            .collect(),
    );
    for (fitted, which) in [(true, "fitted"), (false, "left out")] {
        let worst = report
            .rows
            .iter()
            .filter(|row| row.fitted == fitted)
            .max_by(|a, b| a.error_percent.abs().total_cmp(&b.error_percent.abs()));
        if let Some(worst) = worst {
            let worst = format!(
                "worst of the rows {which}: {} ({}, {})",
                percent(worst.error_percent),
                worst.system,
                worst.configuration
            );
            text += &format!("\n{}", report::wrapped(&worst, 80, "  "));
        }
    }
    text + "\n"
}

/// A configuration, in a table of which every row is cumulative.
fn shortened(configuration: &str) -> &str {
    configuration.trim_start_matches("cumulative up to ")
}

/// Says in words which costs the rows determine.
fn said(determined: &Determined) -> String {
    let mut text = String::new();
    let mut line = |said: String| {
        text += "\n";
        text += &report::wrapped(&said, 80, "  ");
    };
    for sum in &determined.sums {
        line(format!(
            "the rows do not tell {} apart: they determine the sum, {:.3} ns for each {}",
            sum.costs.join(" and "),
            sum.ns,
            sum.costs[0]
        ));
    }
    for carried in &determined.carried {
        line(format!(
            "carried over: {} {:.3} ns{}, up to {:.0} % of a fitted row",
            carried.cost,
            carried.ns,
            carried.source.map_or_else(String::new, |source| format!(" ({})", source.name())),
            carried.share_percent
        ));
    }
    if !determined.left_out.is_empty() {
        line(format!(
            "taken as nothing, for the profile does not have them: {}",
            determined.left_out.join(", ")
        ));
    }
    if !text.is_empty() {
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::linear_map as linear;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn fitted(arguments: &[&str]) -> Result<(Report, Profile), Error> {
        let line = ["fit"].into_iter().chain(arguments.iter().copied());
        let arguments =
            Line::try_parse_from(line).map_err(|error| Error::Usage(error.to_string()))?.arguments;
        let profile = Profile::load(arguments.machine.as_deref().unwrap_or_default())?;
        fit(&arguments, profile, &linear)
    }

    const ALTRA: [&str; 2] = ["--machine", "ampere-altra-vm-64g"];

    /// The arithmetic of the published table, worked out elsewhere: all four costs, on one column.
    #[test]
    fn one_column_predicts_the_others() {
        let all = ["--rows", "Ampere Altra VM, 64G", "--free", "entry,publish,issue,complete"];
        let (report, _) = fitted(&[&ALTRA[..], &all].concat()).unwrap();
        let costs: Vec<_> =
            report.costs.iter().map(|cost| (cost.cost, cost.fitted_ns.round())).collect();
        assert_eq!(
            costs,
            [("entry", 3.0), ("publish", 16.0), ("issue", 305.0), ("complete", 1427.0)]
        );
        // What issuing costs is a guess: it may be off by all of itself.
        assert!(report.costs[2].off_ns > Some(report.costs[2].fitted_ns));
        assert!(report.costs[3].off_ns < Some(report.costs[3].fitted_ns / 2.0));
        let errors = |system: &str| -> Vec<f64> {
            let rows = report.rows.iter().filter(|row| row.system == system);
            rows.map(|row| row.error_percent).collect()
        };
        assert!(errors("Ampere Altra VM, 64G").iter().all(|error| error.abs() < 0.5));
        assert!(errors("Ampere Altra VM, 256G").iter().all(|error| error.abs() < 10.0));
        let metal = errors("Ampere Altra Metal, 512G");
        assert!(metal[..4].iter().all(|error| error.abs() < 12.0) && metal[4] < -40.0);
        assert!(errors("Apple M2 VM, 16G").is_empty());
        assert_eq!(report.warnings.len(), 1);
        let flags: Vec<_> = report.rows.iter().map(|row| row.fitted).collect();
        assert_eq!(flags, [vec![true; 5], vec![false; 10]].concat());
        // Five rows and four costs: four of them determine the costs, and predict the fifth.
        let left_out = report.rows.iter().filter(|row| row.left_out_percent.is_some());
        assert!(left_out.count() > 0);

        let text = text(&report);
        assert!(text.contains("5 rows of map-mem; 10 rows left out"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let worst =
            "rows left out: -41.7 % (Ampere Altra Metal, 512G, cumulative up to batch-barriers)";
        assert!(text.replace("\n  ", " ").contains(worst), "{text}");
    }

    /// Two rows determine two sums, and the fit says what it took the rest from.
    #[test]
    fn what_two_rows_do_not_tell_apart_is_said() {
        let (report, _) = fitted(&ALTRA).unwrap();
        let text = text(&report).replace("\n  ", " ");
        assert!(text.contains("do not tell entry and publish apart"), "{text}");
        assert!(text.contains("carried over: publish 15.692 ns (carried)"), "{text}");
        assert!(text.contains("carried over: issue 20.000 ns (assumed)"), "{text}");
        // What was carried over may take all that there is.
        let mut profile = Profile::load("sa8775p-vm-36g").unwrap();
        profile.costs.issue = Time::ns(273);
        let line = Line::try_parse_from(["fit", "--machine", "-", "--free", "complete"]).unwrap();
        let (report, _) = fit(&line.arguments, profile, &linear).unwrap();
        assert_eq!(report.costs[0].fitted_ns, 0.0);
        assert!(report.warnings.iter().any(|it| it.starts_with("complete comes out as nothing")));
    }

    #[test]
    fn the_fitted_profile_says_what_it_was_fitted_on() {
        let rows = ["--rows", "Ampere Altra VM, 256G", "Ampere Altra VM, 64G/base"];
        let free = ["--free", "publish,complete"];
        let arguments = [&ALTRA[..], &rows, &free].concat();
        let (report, profile) = fitted(&arguments).unwrap();
        assert_eq!(report.rows.iter().filter(|row| row.fitted).count(), 6);
        assert!(profile.is_fitted_on("Ampere Altra VM, 64G", "cumulative up to base"));
        assert!(!profile.is_fitted_on("Ampere Altra VM, 64G", "cumulative up to lazy-unmap"));
        assert!(profile.is_fitted_on("Ampere Altra VM, 256G", "cumulative up to lazy-unmap"));
        let source = |key| profile.provenance_of(key).map(|entry| entry.note.clone());
        assert!(source("costs.publish").unwrap().contains("of map-mem"));
        assert!(source("costs.entry").unwrap().contains("two rows"));
        let again = Profile::parse(&profile.to_toml(), "again").unwrap();
        assert_eq!(again, profile);
        assert_eq!(profile.costs.entry, Profile::load(ALTRA[1]).unwrap().costs.entry);
    }

    /// Costs that stay are taken off before the others are fitted.
    #[test]
    fn costs_that_are_not_free_stay() {
        let (report, profile) =
            fitted(&["--machine", "ampere-altra-vm-64g", "--free", "entry"]).unwrap();
        assert_eq!(report.costs.len(), 1);
        let was = Profile::load(ALTRA[1]).unwrap().costs;
        assert_eq!(profile.costs.complete, was.complete);
        // With the others in place, it has little choice.
        let entry = was.entry.as_ps();
        assert!(profile.costs.entry.as_ps().abs_diff(entry) < entry / 5);
    }

    fn refused(more: &[&str]) -> String {
        let arguments = [&ALTRA[..], more].concat();
        fitted(&arguments).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_fitted_says_why() {
        for (more, says) in [
            (&["--free", "bus"][..], "no fitted row depends on bus"),
            (&["--free", "entry,entry"], "names entry twice"),
            (&["--rows", "Altra"], "--rows 'Altra': no row of map-mem"),
            (&["--rows", "Ampere Altra VM, 64G/fly"], "--rows 'Ampere Altra VM, 64G/fly'"),
            (&["--rows", "Ampere Altra VM, 64G/base"], "1 row for 2 costs"),
            (
                &[
                    "--rows",
                    "Ampere Altra VM, 64G/base",
                    "Ampere Altra VM, 256G/base",
                    "--free",
                    "entry,publish",
                ],
                "do not tell publish from entry",
            ),
            (&["--table", "dirty-log"], "cannot fit to its rows"),
            (&["--table", "/no/such.csv"], "/no/such.csv: "),
        ] {
            let message = refused(more);
            assert!(message.contains(says), "{message}");
        }
        let neutral = |more: &[&str]| {
            let arguments = [&["--machine", "neutral"], more].concat();
            fitted(&arguments).map(drop).unwrap_err().to_string()
        };
        assert!(neutral(&[]).contains("no fitted costs"));
        assert!(neutral(&["--free", "entry"]).contains("fitted on no row of map-mem"));
    }
}

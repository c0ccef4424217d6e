//! `machine`: the profiles that the experiments can be run with, and how one writes one's own.

use clap::{Args, Subcommand};
use serde::Serialize;
use tablewright_machine::{Cost, Profile, Source};

use crate::error::Error;
use crate::output::report;
use crate::profile::{Experiment, Named, usual};

/// A profile with every key, its unit, and a usual value.
const MINE: &str = include_str!("mine.toml");

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright machine list
  tablewright machine new > mine.toml
  tablewright machine check mine.toml
  tablewright tlb-flush --machine mine.toml")]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the profiles that come with the program
    List,
    /// Print a profile to start from: every key, with its unit and a usual value
    New {
        /// Print this one instead, that comes with the program
        #[arg(value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
        from: Option<String>,
    },
    /// Say which experiments a profile is complete for, and what it leaves out for the others
    Check {
        /// A profile, by name or as a file
        #[arg(value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
        profile: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Costs of a profile that one experiment depends on.
#[derive(Serialize)]
struct Row {
    experiment: &'static str,
    /// Why it cannot run.
    unsuitable: Option<&'static str>,
    /// Costs that are taken as usual.
    missing: Vec<&'static str>,
}

#[derive(Serialize)]
struct Checked {
    profile: String,
    description: String,
    /// How many costs come from where.
    assumed: usize,
    carried: usize,
    fitted: usize,
    published: usize,
    documented: usize,
    /// Costs that the profile gives, and does not say from where.
    unsourced: Vec<&'static str>,
    rows: Vec<Row>,
}

/// Does what was asked.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let Some(command) = &arguments.command else {
        let all = Command::augment_subcommands(clap::Command::new("machine"));
        let names: Vec<_> = all.get_subcommands().map(clap::Command::get_name).collect();
        return Err(Error::Usage(format!("a subcommand is needed: {}", names.join(", "))));
    };
    match command {
        Command::List => report::print(&list()?),
        Command::New { from: None } => report::print(MINE),
        Command::New { from: Some(name) } => report::print(&Profile::load(name)?.to_toml()),
        Command::Check { profile, json } => {
            let checked = check(&Profile::load(profile)?);
            match json {
                true => report::print_json(&checked),
                false => report::print(&text(&checked)),
            }
        }
    }
}

fn list() -> Result<String, Error> {
    let rows = Profile::built_in()
        .map(|name| {
            Ok([name.to_owned(), report::wrapped(&Profile::load(name)?.description, 52, "")])
        })
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(report::table(["profile", "what it is"], 2, rows))
}

fn check(profile: &Profile) -> Checked {
    let from = |source: Source| {
        Cost::all()
            .filter(|cost| profile.states(*cost))
            .filter(|cost| profile.provenance_of(cost.key()).is_some_and(|it| it.source == source))
            .count()
    };
    Checked {
        profile: profile.name.clone(),
        description: profile.description.clone(),
        assumed: from(Source::Assumed),
        carried: from(Source::Carried),
        fitted: from(Source::Fitted),
        published: from(Source::Published),
        documented: from(Source::Documented),
        unsourced: Cost::all()
            .filter(|cost| profile.states(*cost) && profile.provenance_of(cost.key()).is_none())
            .map(Cost::name)
            .collect(),
        rows: Experiment::all()
            .map(|experiment| Row {
                experiment: experiment.name(),
                unsuitable: experiment.unsuitable(profile),
                missing: experiment.missing(profile).into_iter().map(Cost::name).collect(),
            })
            .collect(),
    }
}

fn text(checked: &Checked) -> String {
    let mut text =
        report::wrapped(&format!("{}: {}", checked.profile, checked.description), 80, "  ");
    text += "\n\n";
    let rows = checked
        .rows
        .iter()
        .map(|row| {
            let says = match row.unsuitable {
                Some(why) => format!("no: {why}"),
                None if row.missing.is_empty() => "complete".to_owned(),
                None => {
                    let usual = |name: &&str| match name.parse::<Cost>() {
                        Ok(cost) => format!("{name} ({} ns)", usual(cost).as_ps() / 1_000),
                        Err(_) => (*name).to_owned(),
                    };
                    let missing: Vec<_> = row.missing.iter().map(usual).collect();
                    format!("taken as usual: {}", missing.join(", "))
                }
            };
            [row.experiment.to_owned(), report::wrapped(&says, 58, "")]
        })
        .collect();
    text += &report::table(["experiment", "the profile is"], 2, rows);
    let sources = format!(
        "costs: {} fitted, {} carried over, {} published, {} documented, {} assumed",
        checked.fitted, checked.carried, checked.published, checked.documented, checked.assumed
    );
    text += &format!("\n{sources}\n");
    if !checked.unsourced.is_empty() {
        let unsourced =
            format!("no provenance says where these are from: {}", checked.unsourced.join(", "));
        text += &format!("{}\n", report::wrapped(&unsourced, 80, "  "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_profile_has_every_key_and_is_complete() {
        let mine = Profile::parse(MINE, "mine.toml").unwrap();
        for cost in Cost::all() {
            assert!(mine.states(cost), "{}", cost.name());
        }
        // Written out again it has no key that it did not name.
        let written = mine.to_toml();
        let keys = written.lines().filter_map(|line| line.split_once(" = "));
        for (key, _) in keys {
            let named = |line: &str| line.trim_start_matches('#').starts_with(&format!("{key} = "));
            assert!(MINE.lines().any(named), "{key}");
        }
        let checked = check(&mine);
        assert!(checked.unsourced.is_empty());
        for row in &checked.rows {
            assert!(row.missing.is_empty(), "{}", row.experiment);
            assert_eq!(row.unsuitable, None, "{}", row.experiment);
        }
        assert!(text(&checked).lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn what_is_missing_is_said_for_each_experiment() {
        let mut profile = Profile::load("neutral").unwrap();
        let neutral = check(&profile);
        profile.architecture.hardware_dirty = true;
        let marks = check(&profile);
        let of = |checked: &Checked, name| {
            let mut rows = checked.rows.iter();
            let row = rows.find(|row| row.experiment == name).unwrap();
            (row.missing.clone(), row.unsuitable)
        };
        assert!(of(&neutral, "tlb-flush").0.contains(&"cycle"));
        assert_eq!(of(&neutral, "dirty-log").1, None);
        assert!(of(&marks, "dirty-log").1.is_some());
        let text = text(&neutral);
        assert!(text.contains("cycle (20000 ns)"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(list().unwrap().lines().all(|line| line.chars().count() <= 80));
    }
}

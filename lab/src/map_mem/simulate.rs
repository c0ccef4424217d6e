//! `map-mem --on machine`: the steps one after the other, in virtual time.

use serde::Serialize;
use tablewright_experiments::linear_map::plan::{Leaves, Plan};
use tablewright_experiments::linear_map::{self, Job, Run};
use tablewright_machine::Profile;

use super::machine::{self, Row};
use super::steps::{Choice, Order};
use super::{Arguments, On, input, refuse};
use crate::error::Error;
use crate::format::{Architecture, Granule};
use crate::needs::{self, Experiment};
use crate::report::{self, Report};
use crate::size::human;

#[derive(Serialize)]
struct Parameters {
    source: String,
    on: On,
    machine: String,
    core: String,
    format: Architecture,
    granule: Granule,
    address_bits: u32,
    virtual_base: String,
    pages_only: bool,
    ram_bytes: u64,
    trimmed_bytes: u64,
    ranges: usize,
    entries: u64,
    step: Option<Choice>,
    steps: Option<String>,
}

/// Runs the steps and prints them.
pub fn run(arguments: &Arguments, run: Run<'_>) -> Result<(), Error> {
    refuse(
        &[
            (arguments.format.is_some(), "--format"),
            (arguments.granule.is_some(), "--granule"),
            (arguments.address_bits.is_some(), "--address-bits"),
            (arguments.rounds.is_some(), "--rounds"),
        ],
        "native: a profile says what its machine has, and its time does not vary",
    )?;
    let Some(name) = &arguments.machine else {
        let names: Vec<_> = Profile::built_in().collect();
        return Err(Error::Usage(format!(
            "--on machine needs --machine with the path of a profile, or one of {}",
            names.join(", ")
        )));
    };
    let (profile, left_out) = needs::load(name, Experiment::MapMem)?;
    let mut report = simulate(arguments, &profile, run)?;
    report.warnings.extend(left_out);
    report.print(arguments.json, text)
}

fn simulate(
    arguments: &Arguments,
    profile: &Profile,
    run: Run<'_>,
) -> Result<Report<Parameters, Row>, Error> {
    let format = linear_map::format_of(profile)?;
    let own = arguments.iomem.is_none() && arguments.ram.is_none();
    let (source, plan) = if own {
        let bytes = profile.system.ram_bytes();
        (
            format!("the RAM of {}", profile.name),
            linear_map::plan_of(profile, bytes)?,
        )
    } else {
        let (source, map) = input::read(arguments.iomem.as_deref(), arguments.ram, format)?;
        let plan =
            Plan::new(&map, format, Leaves::Pages).map_err(|error| Error::input(&source, error))?;
        (source, plan)
    };
    // A figure of other memory is none of this.
    let same = arguments.iomem.is_none() && plan.bytes() == profile.system.ram_bytes();
    let published = if same {
        machine::published(profile)
    } else {
        Vec::new()
    };

    let steps = match &arguments.steps {
        Some(order) => order.steps(),
        None => arguments.step.unwrap_or(Choice::All).steps(),
    };
    let jobs: Vec<Job> = steps
        .iter()
        .map(|&step| Job {
            profile: profile.clone(),
            step,
            plan: plan.clone(),
        })
        .collect();
    let rows = steps
        .iter()
        .zip(run(&jobs)?)
        .map(|(&step, ran)| machine::row(profile, step, ran, &published))
        .collect::<Result<_, _>>()?;
    Ok(Report {
        experiment: "map-mem",
        parameters: Parameters {
            source,
            on: On::Machine,
            machine: profile.name.clone(),
            core: profile.system.core.clone(),
            format: format.architecture(),
            granule: format.granule(),
            address_bits: format.address_bits(),
            virtual_base: format!("{:#x}", format.linear_base()),
            pages_only: true,
            ram_bytes: plan.bytes(),
            trimmed_bytes: plan.trimmed,
            ranges: plan.spans.len(),
            entries: plan.bytes() / format.page_bytes(),
            step: arguments.step,
            steps: arguments.steps.as_ref().map(Order::to_string),
        },
        rows,
        warnings: Vec::new(),
    })
}

fn text(report: &Report<Parameters, Row>) -> String {
    let parameters = &report.parameters;
    let mut text = format!(
        "{} of RAM in {} ({})\n",
        human(parameters.ram_bytes),
        report::counted(parameters.ranges as u64, "range", "ranges"),
        parameters.source,
    );
    if parameters.trimmed_bytes > 0 {
        text += &format!(
            "  {} more left out: it fills no page\n",
            human(parameters.trimmed_bytes)
        );
    }
    text += &format!(
        "mapped at {} on {} ({}):\n{}, {} pages only\n",
        parameters.virtual_base,
        parameters.machine,
        parameters.core,
        parameters.format.name(),
        parameters.granule.name(),
    );
    text += &format!(
        "{}\n\n",
        report::counted(parameters.entries, "entry", "entries")
    );
    text += &machine::table(&report.rows);
    let gaps: Vec<&String> = report
        .rows
        .iter()
        .filter_map(|row| row.unexplained.as_ref())
        .collect();
    if !gaps.is_empty() {
        text += "\nnot explained by the model, says the profile:\n";
        // A gap may show in several steps.
        let mut said: Vec<&String> = Vec::new();
        for gap in gaps {
            if !said.contains(&gap) {
                text += &format!("- {}\n", report::wrapped(gap, 78, "  "));
                said.push(gap);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn simulated(line: &str) -> Result<Report<Parameters, Row>, Error> {
        simulated_on("ampere-altra-vm-256g", line)
    }

    fn simulated_on(profile: &str, line: &str) -> Result<Report<Parameters, Row>, Error> {
        let line = format!("x --on machine --machine m {line}");
        let arguments = Line::try_parse_from(line.split_whitespace())
            .map_err(|error| Error::Usage(error.to_string()))?
            .arguments;
        let profile = Profile::load(profile).unwrap();
        simulate(&arguments, &profile, &crate::fakes::linear_map)
    }

    fn steps(line: &str) -> Vec<(&'static str, Option<f64>)> {
        let rows = simulated(line).unwrap().rows;
        rows.iter()
            .map(|row| (row.step, row.published_ms))
            .collect()
    }

    #[test]
    fn figures_are_for_the_memory_that_they_were_published_for() {
        assert_eq!(steps("--step lazy-unmap"), [("lazy-unmap", Some(1312.0))]);
        assert_eq!(
            steps("--step lazy-unmap --ram 256G"),
            [("lazy-unmap", Some(1312.0))]
        );
        assert_eq!(steps("--step lazy-unmap --ram 1G"), [("lazy-unmap", None)]);
    }

    #[test]
    fn any_order_comes_to_the_same_end() {
        let published =
            steps("--steps base,no-cont-remap,no-alloc-remap,lazy-unmap,batch-barriers");
        let other = steps("--steps batch-barriers,lazy-unmap,no-alloc-remap,no-cont-remap");
        assert_eq!(published.last(), Some(&("batch-barriers", Some(261.0))));
        assert_eq!(other.last(), Some(&("no-cont-remap", Some(261.0))));
        assert!(other[..3].iter().all(|(_, figure)| figure.is_none()));
    }

    #[test]
    fn the_text_names_every_step_and_what_is_not_explained() {
        let report = simulated_on("apple-m2-vm-16g", "").unwrap();
        let text = text(&report);
        for row in &report.rows {
            assert!(text.contains(row.step), "{text}");
        }
        assert_eq!(report.rows.len(), 8);
        assert_eq!(text.matches("\n- lazy-unmap: ").count(), 1, "{text}");
        assert!(text.contains("16 GiB of RAM in 1 range"), "{text}");
    }
}

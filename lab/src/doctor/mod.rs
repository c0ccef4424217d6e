//! `doctor`: the published problems, measured on this computer in a minute, and what the published
//! changes and the engine would take.

#[cfg(target_os = "linux")]
mod guests;
#[cfg(target_os = "linux")]
mod machine;
#[cfg(target_os = "linux")]
mod native;
#[cfg(target_os = "linux")]
mod page;
#[cfg(target_os = "linux")]
mod rows;
#[cfg(target_os = "linux")]
mod run;

use std::path::PathBuf;

use clap::Args;

use crate::error::Error;
use crate::size::Size;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright doctor
  tablewright doctor --guest 2T --vcpus 416 --json > doctor.json
  tablewright fit --from doctor.json -o here.toml       a machine as this computer, for every \
  experiment
  tablewright doctor --report results                   writes doctor.html and doctor.json there")]
pub struct Arguments {
    /// The guest that you have in mind: its memory
    #[arg(long, value_name = "SIZE", default_value = "512G")]
    guest: Size,
    /// And its vCPUs
    #[arg(long, value_name = "N", default_value = "96",
          value_parser = clap::value_parser!(u16).range(1..=500))]
    vcpus: u16,
    /// Write a page with pictures into this directory, and the JSON beside it
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print JSON, with the runs on KVM, to which `fit --from` fits
    #[arg(long)]
    json: bool,
}

/// Measures, and says what it means.
#[cfg(target_os = "linux")]
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    run::run(arguments)
}

/// It is Linux that is asked.
#[cfg(not(target_os = "linux"))]
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let Arguments { guest, vcpus, report, json } = arguments;
    Err(Error::Usage(format!(
        "doctor asks Linux, and this is another system ({guest}, {vcpus}, {report:?}, {json})"
    )))
}

//! Measures, and prints the rows.

use serde::Serialize;

use super::Arguments;
use super::guests;
use super::machine::{self, Size};
use super::native;
use super::page;
use super::rows::{Known, Origin, Parameters, Row, rows, text};
use crate::dirty_log::measured::{Compared, Measured};
use crate::error::Error;
use crate::file::Target;
use crate::fit::from_run;
use crate::kvm;
use crate::output::progress::Progress;
use crate::output::report::{self, Report};
use crate::stats;
use crate::tlb_flush::unmap;

#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    report: &'a Report<Parameters, Row>,
    /// To which `fit --from` fits.
    runs: &'a [Measured],
    /// The profile beside what it was fitted on.
    fitted: &'a [Compared],
    profile: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let bytes = arguments.guest.bytes();
    // Measuring takes a while: what the machine cannot run is refused before.
    machine::fits(bytes)?;
    let target = |name| {
        let directory = arguments.report.as_deref();
        directory.map(|directory| Target::report(directory, name)).transpose()
    };
    let (target, beside) = (target(page::PAGE)?, target(page::JSON)?);
    let mut progress = Progress::at_once(9);
    progress.step("the linear map");
    let linear = native::linear_map()?;
    let published = native::published_entry();
    progress.step("unmapping");
    let unmap = unmap::measured()?;
    let guests = guests::measure(|what| progress.step(what));
    let fitted = match &guests {
        Ok(guests) => {
            progress.step("a machine as this computer");
            Some(from_run::fit(&guests.runs, None, &[])?)
        }
        Err(_) => None,
    };
    let known = Known { host: kvm::computer(), linear, published, unmap, guests, fitted };
    let size = Size { bytes, vcpus: arguments.vcpus };
    progress.step("the guest in mind");
    let rows = rows(&known, size)?;
    drop(progress);
    let mut warnings: Vec<String> = stats::build_warning().into_iter().collect();
    if let Ok(guests) = &known.guests {
        warnings.extend(kvm::summary::warnings(&guests.pages, &guests.host));
        if guests.rounds() < guests::ROUNDS as usize {
            warnings.push(format!(
                "the computer is so busy that there were {} rounds of a guest, and not {}",
                guests.rounds(),
                guests::ROUNDS
            ));
        }
    }
    let report = Report {
        experiment: "doctor",
        parameters: Parameters {
            measured: Origin::here(),
            guest_bytes: size.bytes,
            vcpus: size.vcpus,
            host: known.host.clone(),
            no_guests: known.guests.as_ref().err().map(ToString::to_string),
        },
        rows,
        warnings,
    };
    let answer = Answer {
        report: &report,
        runs: known.guests.as_ref().map_or(&[], |guests| &guests.runs),
        fitted: known.fitted.as_ref().map_or(&[], |found| &found.rows),
        profile: known.fitted.as_ref().map(|found| found.profile.to_toml()),
    };
    if arguments.json {
        report::print_json(&answer)?;
    } else {
        report.print(false, |report| text(report, &known))?;
    }
    if let Some((page, json)) = target.zip(beside) {
        page.fill(&page::of(&report))?;
        json.fill(&report::json_of(&answer)?)?;
    }
    Ok(())
}

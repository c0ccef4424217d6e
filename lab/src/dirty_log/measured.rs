//! Runs on KVM, as a file has them; their runs on a machine; and the two beside each other.

use std::ops::Not;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};
use tablewright_machine::Profile;

use super::job::{Case, How, Job, MOST_BYTES, Ran};
use crate::error::{Error, json_problem};
use crate::file;
use crate::guest::input::{Backing, Mode, PAGE};
use crate::guest::nanoseconds;
use crate::kvm::{Asked, HostKind, PhaseRow};
use crate::output::report::{self, error_percent, percent};
use crate::size::human;

/// A run on KVM, as its JSON has it; what is not needed here is not read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub parameters: Parameters,
    pub rows: Vec<MeasuredRow>,
}

/// Its parameters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Parameters {
    pub host: HostLine,
    pub source: String,
    #[serde(deserialize_with = "bounded")]
    pub bytes: u64,
    #[serde(deserialize_with = "bounded")]
    pub vcpus: u32,
    #[serde(deserialize_with = "bounded")]
    pub iterations: u32,
    #[serde(deserialize_with = "bounded")]
    pub slots: u32,
    #[serde(deserialize_with = "bounded")]
    pub write_percent: u8,
    pub random_access: bool,
    pub manual_protect: bool,
    pub all_set: bool,
    pub overlap: bool,
    /// Older runs were none.
    #[serde(default)]
    pub nested: bool,
    #[serde(default)]
    pub as_selftests: bool,
    pub run_in_all_calls: bool,
    pub ring: Option<u32>,
}

/// The host, in a line and by its paging.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostLine {
    pub line: String,
    pub paging: String,
}

/// Phases of one run on KVM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredRow {
    pub phases: Vec<MeasuredPhase>,
}

/// One phase; nanoseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredPhase {
    pub phase: String,
    #[serde(rename = "cpu_ns")]
    pub cpu: f64,
    #[serde(deserialize_with = "bounded")]
    pub threads: u32,
    /// Zero where it was not written down.
    #[serde(default, deserialize_with = "bounded")]
    pub pages: u64,
}

/// A number; the largest in place of one that the type does not have, which is refused by its name,
/// by [`Measured::check`].
fn bounded<'d, D: Deserializer<'d>, N: TryFrom<u64> + From<u8> + Not<Output = N>>(
    from: D,
) -> Result<N, D::Error> {
    let number = serde_json::Number::deserialize(from)?;
    let number = number.as_u64().and_then(|number| N::try_from(number).ok());
    Ok(number.unwrap_or(!N::from(0)))
}

/// No phase takes longer: a quarter of a year.
const LONGEST_NS: f64 = 8e15;
/// No computer has more: of vCPUs, and of threads.
const MOST_THREADS: u32 = 4096;

impl Measured {
    /// That its numbers are such as a run has.
    ///
    /// # Errors
    /// The first that is not, by its name in the file.
    fn check(&self) -> Result<(), String> {
        let asked = &self.parameters;
        let within = |name: &str, number: u64, least: u64, most: u64| match number {
            number if (least..=most).contains(&number) => Ok(()),
            _ => Err(format!("{name}: {least} to {most}")),
        };
        within("parameters.bytes", asked.bytes, PAGE, MOST_BYTES)?;
        if !asked.bytes.is_multiple_of(PAGE) {
            return Err(format!("parameters.bytes: {} is no multiple of {PAGE}", asked.bytes));
        }
        let threads = MOST_THREADS.into();
        within("parameters.vcpus", asked.vcpus.into(), 1, threads)?;
        within("parameters.iterations", asked.iterations.into(), 1, 1000)?;
        within("parameters.slots", asked.slots.into(), 1, 1024)?;
        within("parameters.write_percent", asked.write_percent.into(), 0, 100)?;
        for phase in self.rows.iter().flat_map(|row| &row.phases) {
            let name = |field: &str| format!("phase '{}': {field}", phase.phase);
            // Also what is no number.
            if !(phase.cpu > 0.0 && phase.cpu <= LONGEST_NS) {
                return Err(format!("{}: more than 0, at most {LONGEST_NS:e}", name("cpu_ns")));
            }
            within(&name("threads"), phase.threads.into(), 1, threads)?;
            within(&name("pages"), phase.pages, 0, MOST_PAGES)?;
        }
        Ok(())
    }

    /// CPU time for a page of the phases of such names, nanoseconds.
    pub fn ns_a_page(&self, is_meant: impl Fn(&str) -> bool) -> impl Iterator<Item = f64> {
        let phases = self.rows.iter().flat_map(|row| &row.phases);
        phases
            .filter(move |phase| phase.pages > 0 && is_meant(&phase.phase))
            .map(|phase| phase.cpu / phase.pages as f64)
    }
}

/// The run of a guest, as `fit --from` reads it.
pub fn of(asked: &Asked, host: &HostKind, phases: &[PhaseRow]) -> Measured {
    let phase = |row: &PhaseRow| MeasuredPhase {
        phase: row.phase.clone(),
        cpu: row.cpu,
        threads: row.threads,
        pages: row.pages,
    };
    Measured {
        parameters: Parameters {
            host: HostLine { line: host.line.clone(), paging: host.paging.clone() },
            source: asked.backing.name.to_owned(),
            bytes: asked.bytes,
            vcpus: asked.vcpus,
            iterations: asked.iterations,
            slots: asked.slots,
            write_percent: asked.write_percent,
            random_access: asked.random,
            manual_protect: asked.manual,
            all_set: asked.options.all_set,
            overlap: asked.options.overlap,
            nested: asked.options.nested,
            as_selftests: asked.options.as_selftests,
            run_in_all_calls: asked.options.stalls,
            ring: asked.options.ring,
        },
        rows: vec![MeasuredRow { phases: phases.iter().map(phase).collect() }],
    }
}

/// A document that has several.
#[derive(Deserialize)]
struct Several {
    runs: Vec<Measured>,
}

/// The field that tells the two documents apart.
#[derive(Deserialize)]
struct Kind {
    runs: Option<IgnoredAny>,
}

/// Pages of a run that are simulated; times are multiplied.
const PAGES: u64 = 1 << 14;
/// A phase is of no more pages: all memory, by all vCPUs, in each iteration.
const MOST_PAGES: u64 = 1 << 50;

impl Parameters {
    /// In a few words.
    pub fn name(&self) -> String {
        let mut name = format!("{} {}, {} vCPU", human(self.bytes), self.source, self.vcpus);
        if !self.manual_protect {
            name += ", -g";
        }
        if self.write_percent < 100 {
            name += &format!(", -w {}", self.write_percent);
        }
        if self.random_access {
            name += ", -a";
        }
        name
    }

    /// The run of it on a machine.
    ///
    /// # Errors
    /// The machine has no such run.
    pub fn job(&self, profile: &Profile) -> Result<Job, Error> {
        let usage = |text: &str| Error::Usage(format!("{}: {text}", self.name()));
        let Self { all_set, overlap, nested, as_selftests, run_in_all_calls, .. } = *self;
        let others = [all_set, overlap, nested, as_selftests, run_in_all_calls];
        if self.ring.is_some() || others.contains(&true) {
            return Err(usage(
                "the machine's dirty-log has no --ring, --all-set, -o, -n, --as-selftests and \
                 --stalls",
            ));
        }
        let backing: Backing = self.source.parse().map_err(|why: String| usage(&why))?;
        let mode: Mode = "P48V48_4K".parse().map_err(|why: String| usage(&why))?;
        let vcpus = u16::try_from(self.vcpus).map_err(|_| usage("too many vCPUs"))?;
        if vcpus == 0 || !(1..=1000).contains(&self.iterations) {
            return Err(usage("no vCPUs, or no iterations"));
        }
        let each = self.bytes / u64::from(vcpus);
        // As many as can be divided so.
        let mut scale = 1;
        let block = backing.source.bytes();
        while self.bytes / PAGE / scale > PAGES && (each / (scale * 2)).is_multiple_of(block) {
            scale *= 2;
        }
        let case = Case { backing, bytes: each, vcpus, mode, offset: None, scale: Some(scale) };
        let job = case.job(profile, How::Before)?;
        Ok(Job {
            iterations: self.iterations,
            slots: 1,
            write_percent: self.write_percent,
            random: self.random_access,
            manual: self.manual_protect,
            running: false,
            ..job
        })
    }
}

/// The phases of a run on the machine, by the names that they have on KVM; nanoseconds.
pub fn phases(ran: &Ran) -> Vec<(String, f64)> {
    let ns = nanoseconds;
    let mut phases =
        vec![("populate".to_owned(), ns(ran.populate)), ("enable".to_owned(), ns(ran.enable))];
    for (number, dirty) in ran.dirty.iter().enumerate() {
        phases.push((format!("dirty {}", number + 1), ns(*dirty)));
        for (name, times) in [("get", &ran.get), ("clear", &ran.clear)] {
            if let Some(time) = times.get(number) {
                phases.push((format!("{name} {}", number + 1), ns(*time)));
            }
        }
    }
    phases.push(("disable".to_owned(), ns(ran.disable)));
    phases
}

/// Why a phase is another on this host than on the machine.
pub fn differs(parameters: &Parameters, phase: &str) -> Option<&'static str> {
    let software = parameters.host.paging != "software";
    let large = parameters.source != "anonymous" && parameters.source != "shmem";
    match phase {
        _ if software => None,
        "enable" if large => Some("software paging splits at the first write, the machine here"),
        "disable" if !large => Some("software paging takes all tables away, the machine none"),
        _ => None,
    }
}

/// Predicted and measured time of a phase.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    pub run: String,
    pub phase: String,
    /// Nanoseconds of CPU time of one thread.
    #[serde(rename = "predicted_ns")]
    pub predicted: f64,
    #[serde(rename = "measured_ns")]
    pub measured: f64,
    pub error_percent: f64,
    pub fitted: bool,
    /// Why the two are not to be compared.
    pub differs: Option<&'static str>,
}

/// A measured run beside a prediction of it.
pub fn compare(run: &Measured, predicted: &[(String, f64)], fitted: bool) -> Vec<Compared> {
    let all = run.rows.iter().flat_map(|row| &row.phases);
    let pair = |measured: &MeasuredPhase| {
        let (_, predicted) = predicted.iter().find(|(name, _)| *name == measured.phase)?;
        let one = measured.cpu / f64::from(measured.threads.max(1));
        Some(Compared {
            run: run.parameters.name(),
            phase: measured.phase.clone(),
            predicted: *predicted,
            measured: one,
            error_percent: error_percent(*predicted, one.max(1.0)),
            fitted,
            differs: differs(&run.parameters, &measured.phase),
        })
    };
    all.filter_map(pair).collect()
}

/// Runs of `dirty-log --on kvm`, or those that `doctor` made, in a file.
///
/// # Errors
/// It cannot be read, or has none.
pub fn read(path: &Path) -> Result<Vec<Measured>, Error> {
    let bytes = file::read(path, "run on KVM")?;
    let usage = |why: String| {
        Error::Usage(format!("{}: no run of dirty-log --on kvm or doctor: {why}", path.display()))
    };
    let wrong = |error: serde_json::Error| {
        let why = json_problem(&error);
        usage(match error.line() {
            0 => why,
            line => format!("line {line}: {why}"),
        })
    };
    let runs = match serde_json::from_slice::<Kind>(&bytes).map_err(wrong)? {
        Kind { runs: Some(_) } => serde_json::from_slice::<Several>(&bytes).map_err(wrong)?.runs,
        Kind { runs: None } => vec![serde_json::from_slice::<Measured>(&bytes).map_err(wrong)?],
    };
    for run in &runs {
        run.check().map_err(|why| Error::input(path.display(), why))?;
    }
    match runs.iter().all(|run| run.rows.iter().any(|row| !row.phases.is_empty()))
        && !runs.is_empty()
    {
        true => Ok(runs),
        false => Err(usage("it has no phases".to_owned())),
    }
}

/// Predictions beside what came.
pub fn compared(rows: &[Compared]) -> String {
    let cells = |row: &Compared| {
        [
            row.phase.clone(),
            report::time(row.predicted),
            report::time(row.measured),
            match (row.differs, row.fitted) {
                (Some(_), _) => "(other)".to_owned(),
                (None, true) => percent(row.error_percent) + " *",
                (None, false) => percent(row.error_percent) + "  ",
            },
        ]
    };
    let mut text = String::new();
    for run in rows.chunk_by(|a, b| a.run == b.run) {
        let header = [run[0].run.as_str(), "machine", "measured", "error  "];
        text += &report::table(header, 1, run.iter().map(cells).collect());
        text.push('\n');
    }
    if rows.iter().any(|row| row.fitted) {
        text += "* the machine was fitted on this figure\n";
    }
    let mut reasons: Vec<&str> = rows.iter().filter_map(|row| row.differs).collect();
    reasons.dedup();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        text += &format!("(other): {reason}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of another kind is no measurement of what the machine does.
    #[test]
    fn a_run_that_the_machine_has_not_is_refused() {
        let profile = Profile::load("neutral").expect("built in");
        let plain = Parameters {
            host: HostLine { line: String::new(), paging: "NPT".to_owned() },
            source: "anonymous".to_owned(),
            bytes: 16 << 20,
            vcpus: 1,
            iterations: 2,
            slots: 1,
            write_percent: 100,
            random_access: false,
            manual_protect: true,
            all_set: false,
            overlap: false,
            nested: false,
            as_selftests: false,
            run_in_all_calls: false,
            ring: None,
        };
        assert!(plain.job(&profile).is_ok());
        let others: [fn(&mut Parameters); 6] = [
            |it| it.all_set = true,
            |it| it.overlap = true,
            |it| it.nested = true,
            |it| it.as_selftests = true,
            |it| it.run_in_all_calls = true,
            |it| it.ring = Some(4096),
        ];
        for other in others {
            let mut other_run = plain.clone();
            other(&mut other_run);
            let why = other_run.job(&profile).unwrap_err().to_string();
            assert!(why.contains("the machine's dirty-log has no"), "{why}");
        }
    }
}

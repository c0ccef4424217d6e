//! The three experiments on KVM, and their answers.

use std::time::Instant;

use serde::Serialize;
use tablewright_experiments::dirty_log;
use tablewright_kvm::host::{Host, Paging};
use tablewright_machine::Profile;

use super::measured::{self as file, Compared, HostLine, Measured, MeasuredPhase, MeasuredRow};
use super::summary::{self, HostKind, PhaseRow};
use super::{Asked, sequence};
use crate::error::Error;
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::size::human;
use crate::stats;

/// What kind of host this is.
///
/// # Errors
/// There is no KVM.
pub fn host() -> Result<HostKind, Error> {
    sequence::able()?;
    Ok(kind(&Host::read()))
}

/// What is known of this computer, whether or not it runs guests.
pub fn computer() -> Option<HostKind> {
    Some(kind(&Host::read()))
}

/// Whether reading a log may leave it as it is.
///
/// # Errors
/// There is no KVM.
pub fn has_manual() -> Result<bool, Error> {
    Ok(sequence::able()?.manual)
}

/// How much memory a guest can have.
pub fn free() -> u64 {
    tablewright_kvm::available()
}

fn kind(host: &Host) -> HostKind {
    HostKind {
        line: host.to_string(),
        vendor: host.vendor.clone(),
        kernel: host.kernel.clone(),
        paging: match host.paging {
            Paging::Nested(name) => name,
            Paging::Software => "software",
            Paging::Unknown => "unknown",
        }
        .to_owned(),
        is_guest: host.is_guest,
        tdp_mmu: host.tdp_mmu,
        eager_split: host.eager_split,
        modification_log: host.modification_log,
        cpus: host.cpus,
        version: host.version(),
    }
}

#[derive(Serialize)]
struct Parameters {
    on: &'static str,
    host: HostKind,
    source: &'static str,
    bytes: u64,
    bytes_per_vcpu: u64,
    vcpus: u32,
    iterations: u32,
    slots: u32,
    write_percent: u8,
    random_access: bool,
    overlap: bool,
    nested: bool,
    manual_protect: bool,
    all_set: bool,
    ring: Option<u32>,
    run_while_disabling: bool,
    run_in_all_calls: bool,
    rounds: u32,
}

fn parameters(asked: &Asked, host: HostKind) -> Parameters {
    Parameters {
        on: "kvm",
        host,
        source: asked.backing.name,
        bytes: asked.bytes,
        bytes_per_vcpu: asked.bytes / u64::from(asked.vcpus.max(1)),
        vcpus: asked.vcpus,
        iterations: asked.iterations,
        slots: asked.slots,
        write_percent: asked.write_percent,
        random_access: asked.random,
        overlap: asked.options.overlap,
        nested: asked.options.nested,
        manual_protect: asked.manual,
        all_set: asked.options.all_set,
        ring: asked.options.ring,
        run_while_disabling: asked.running,
        run_in_all_calls: asked.options.stalls,
        rounds: asked.options.rounds(),
    }
}

/// Fewer rounds have no median, however long they take.
const FEWEST: usize = 2;

/// Rounds of something.
fn rounds(
    asked: &Asked,
    progress: &mut Progress,
    once: impl Fn(&Asked) -> Result<Vec<summary::Phase>, Error>,
) -> Result<Vec<PhaseRow>, Error> {
    let count = asked.options.rounds();
    let mut all = Vec::new();
    for round in 1..=count {
        let is_late = asked.until.is_some_and(|until| Instant::now() >= until);
        if is_late && all.len() >= FEWEST {
            break;
        }
        progress.step(&format!("round {round}"));
        all.push(once(asked)?);
    }
    Ok(summary::rows(&all))
}

/// The phases of `dirty-log`, without printing them.
///
/// # Errors
/// The guest cannot be had, or its log is not what it wrote.
pub fn measure(asked: &Asked) -> Result<Vec<PhaseRow>, Error> {
    let mut progress = Progress::new(asked.options.rounds().into());
    rounds(asked, &mut progress, sequence::dirty_log)
}

/// Of a phase, seconds.
fn seconds(rows: &[PhaseRow], name: &str) -> f64 {
    let row = rows.iter().find(|row| row.phase == name);
    row.map_or(0.0, |row| row.wall / 1e9)
}

/// Of each iteration, seconds.
fn each(rows: &[PhaseRow], name: &str) -> Vec<f64> {
    let of = rows.iter().filter(|row| {
        let number = row.phase.strip_prefix(name).map(str::trim);
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    of.map(|row| row.wall / 1e9).collect()
}

fn head(parameters: &Parameters) -> String {
    let log = match (
        parameters.ring,
        parameters.manual_protect,
        parameters.all_set,
    ) {
        (Some(entries), ..) => format!("rings of {}", report::count(entries.into())),
        (None, true, true) => "manual protection, all set".to_owned(),
        (None, true, false) => "manual protection".to_owned(),
        (None, false, _) => "reading clears".to_owned(),
    };
    let line = format!(
        "{}{}, {} of {} in all, {log}, {}",
        report::counted(u64::from(parameters.vcpus), "vCPU", "vCPUs"),
        if parameters.nested {
            " of a guest's guest"
        } else {
            ""
        },
        human(parameters.bytes),
        parameters.source,
        report::counted(u64::from(parameters.rounds), "round", "rounds"),
    );
    let wrapped = |line: &str| report::wrapped(line, 78, "  ");
    format!("{}\n{}\n\n", wrapped(&parameters.host.line), wrapped(&line))
}

/// As on the machine, and all phases. Times are in seconds as there, those of phases in
/// nanoseconds.
#[derive(Serialize)]
struct LogRow {
    how: &'static str,
    #[serde(rename = "populate_s")]
    populate: f64,
    #[serde(rename = "enable_s")]
    enable: f64,
    #[serde(rename = "dirty_s")]
    dirty: Vec<f64>,
    #[serde(rename = "get_s")]
    get: Vec<f64>,
    #[serde(rename = "clear_s")]
    clear: Vec<f64>,
    #[serde(rename = "disable_s")]
    disable: f64,
    stall_longest_us: Option<f64>,
    stall_p999_us: Option<f64>,
    stall_total_s: Option<f64>,
    faults: i64,
    flushes: i64,
    phases: Vec<PhaseRow>,
    /// What was predicted before it ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    predicted: Vec<Compared>,
}

/// Logs what a guest writes, and prints what that takes.
///
/// # Errors
/// As [`measure`].
pub fn dirty_log(asked: &Asked, json: bool) -> Result<(), Error> {
    let host = host()?;
    let predicted = predict(asked, &host, json)?;
    let phases = measure(asked)?;
    let mut warnings = summary::warnings(&phases, &host);
    warnings.extend(stats::build_warning());
    let disabled = phases.iter().find(|row| row.phase == "disable");
    let micro = |time: Option<f64>| time.map(|time| time / 1e3);
    let cleared = if asked.options.ring.is_some() {
        "reset"
    } else {
        "clear"
    };
    let row = LogRow {
        how: "kvm",
        populate: seconds(&phases, "populate"),
        enable: seconds(&phases, "enable"),
        dirty: each(&phases, "dirty"),
        get: each(&phases, "get"),
        clear: each(&phases, cleared),
        disable: seconds(&phases, "disable"),
        stall_longest_us: micro(disabled.and_then(|row| row.stall_longest)),
        stall_p999_us: micro(disabled.and_then(|row| row.stall_p999)),
        stall_total_s: disabled
            .and_then(|row| row.stall_total)
            .map(|time| time / 1e9),
        faults: disabled.map_or(0, |row| row.count("pf_taken")),
        flushes: disabled.map_or(0, |row| row.count("remote_tlb_flush")),
        phases,
        predicted: Vec::new(),
    };
    let parameters = parameters(asked, host);
    let mut row = row;
    if let Some(predicted) = predicted {
        row.predicted = file::compare(&as_measured(&parameters, &row.phases), &predicted, false);
    }
    let report = Report {
        experiment: "dirty-log",
        parameters,
        rows: vec![row],
        warnings,
    };
    report.print(json, |report| {
        let phases = report.rows.iter().flat_map(|row| row.phases.clone());
        let phases: Vec<_> = phases.collect();
        let mut text = head(&report.parameters);
        text += &summary::times(&phases);
        text += &summary::counts(&phases);
        for row in report.rows.iter().filter(|row| !row.predicted.is_empty()) {
            text += &format!("\n{}", file::compared(&row.predicted));
        }
        text
    })
}

/// What a profile says of a run, said before it is made.
fn predict(
    asked: &Asked,
    host: &HostKind,
    json: bool,
) -> Result<Option<Vec<(String, f64)>>, Error> {
    let Some(name) = &asked.options.predict else {
        return Ok(None);
    };
    let profile = Profile::load(name)?;
    let parameters = as_measured(&parameters(asked, host.clone()), &[]).parameters;
    let ran = dirty_log::run(&parameters.job(&profile)?)?;
    let predicted = file::phases(&ran);
    if !json {
        let cells = predicted
            .iter()
            .map(|(phase, time)| [phase.clone(), report::time(*time)]);
        let table = report::table(["predicted", "CPU time"], 1, cells.collect());
        report::print(&format!("{table}\n"))?;
    }
    Ok(Some(predicted))
}

/// A run as `fit --from` reads it.
fn as_measured(parameters: &Parameters, phases: &[PhaseRow]) -> Measured {
    Measured {
        parameters: file::Parameters {
            host: HostLine {
                line: parameters.host.line.clone(),
                paging: parameters.host.paging.clone(),
            },
            source: parameters.source.to_owned(),
            bytes: parameters.bytes,
            vcpus: parameters.vcpus,
            iterations: parameters.iterations,
            slots: parameters.slots,
            write_percent: parameters.write_percent,
            random_access: parameters.random_access,
            manual_protect: parameters.manual_protect,
            all_set: parameters.all_set,
            overlap: parameters.overlap,
            nested: parameters.nested,
            run_in_all_calls: parameters.run_in_all_calls,
            ring: parameters.ring,
        },
        rows: vec![MeasuredRow {
            phases: phases
                .iter()
                .map(|row| MeasuredPhase {
                    phase: row.phase.clone(),
                    cpu: row.cpu,
                    threads: row.threads,
                    pages: row.pages,
                })
                .collect(),
        }],
    }
}

/// The run of a guest, as `fit --from` reads it.
///
/// # Errors
/// There is no KVM.
pub fn measured(asked: &Asked, phases: &[PhaseRow]) -> Result<Measured, Error> {
    Ok(as_measured(&parameters(asked, host()?), phases))
}

/// As on the machine, and all phases; nanoseconds.
#[derive(Serialize)]
struct StartRow {
    how: &'static str,
    bytes: u64,
    leaf_bytes: u64,
    #[serde(rename = "start_ns")]
    start: f64,
    #[serde(rename = "start_cpu_ns")]
    start_cpu: f64,
    #[serde(rename = "write_ns")]
    write: Option<f64>,
    #[serde(rename = "read_ns")]
    read: Option<f64>,
    faults_of_writes: Option<i64>,
    faults_of_reads: Option<i64>,
    phases: Vec<PhaseRow>,
}

/// Starts a log, by protecting and, where KVM can, by having all pages in it; prints what that
/// takes, and what it leaves.
///
/// # Errors
/// As [`measure`].
pub fn write_protect(
    asked: &Asked,
    sizes: Option<&[u64]>,
    note: Option<String>,
    json: bool,
) -> Result<(), Error> {
    let host = host()?;
    let can = sequence::able()?;
    let mut ways = vec![("protect", false)];
    if can.all_set {
        ways.push(("all set", true));
    }
    let all = [asked.bytes];
    let all_sizes = sizes.unwrap_or(&all);
    let mut rows = Vec::new();
    // One bar for all of it; with the size that is asked for, reads are rounds of their own.
    let runs = all_sizes.len() * ways.len() * if sizes.is_none() { 2 } else { 1 };
    let mut progress = Progress::new(u64::from(asked.options.rounds()) * runs as u64);
    for &bytes in all_sizes {
        for &(how, all_set) in &ways {
            let mut asked = Asked {
                bytes,
                manual: can.manual,
                ..asked.clone()
            };
            asked.options.all_set = all_set;
            let mut then =
                |then| rounds(&asked, &mut progress, |asked| sequence::start(asked, then));
            let mut phases = then(sizes.is_none().then_some(true))?;
            if sizes.is_none() {
                let reads = then(Some(false))?;
                phases.extend(reads.into_iter().filter(|row| row.phase == "read"));
            }
            let of = |name: &str| phases.iter().find(|row| row.phase == name);
            rows.push(StartRow {
                how,
                bytes,
                leaf_bytes: asked.backing.source.bytes(),
                start: of("enable").map_or(0.0, |row| row.wall),
                start_cpu: of("enable").map_or(0.0, |row| row.cpu),
                write: of("write").map(|row| row.wall),
                read: of("read").map(|row| row.wall),
                faults_of_writes: of("write").map(|row| row.count("pf_taken")),
                faults_of_reads: of("read").map(|row| row.count("pf_taken")),
                phases: phases.clone(),
            });
        }
    }
    let mut warnings: Vec<_> = note.into_iter().collect();
    for warning in rows
        .iter()
        .flat_map(|row| summary::warnings(&row.phases, &host))
    {
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
    let report = Report {
        experiment: "write-protect",
        parameters: parameters(asked, host),
        rows,
        warnings,
    };
    report.print(json, |report| {
        let optional = |time: Option<f64>| time.map_or("-".to_owned(), report::time);
        let count = |count: Option<i64>| {
            count.map_or("-".to_owned(), |count| report::count(count.unsigned_abs()))
        };
        let cells = report.rows.iter().map(|row| {
            [
                row.how.to_owned(),
                human(row.bytes),
                report::time(row.start),
                report::time(row.start_cpu),
                optional(row.write),
                optional(row.read),
                count(row.faults_of_writes),
                count(row.faults_of_reads),
            ]
        });
        let table = report::table(
            [
                "",
                "memory",
                "start",
                "CPU time",
                "write",
                "read",
                "faults,\nwriting",
                "reading",
            ],
            1,
            cells.collect(),
        );
        head(&report.parameters) + &table
    })
}

/// As on the machine, and all phases. Seconds, those of phases nanoseconds.
#[derive(Serialize)]
struct FaultRow {
    how: &'static str,
    #[serde(rename = "create_s")]
    create: f64,
    #[serde(rename = "update_s")]
    update: f64,
    #[serde(rename = "rebuild_s")]
    rebuild: f64,
    faults: i64,
    phases: Vec<PhaseRow>,
}

/// Has all vCPUs fault on one table, and prints what that takes.
///
/// # Errors
/// As [`measure`].
pub fn page_table_test(asked: &Asked, json: bool) -> Result<(), Error> {
    let host = host()?;
    let mut progress = Progress::new(asked.options.rounds().into());
    let phases = rounds(asked, &mut progress, sequence::faults)?;
    drop(progress);
    let warnings = summary::warnings(&phases, &host);
    let row = FaultRow {
        how: "kvm",
        create: seconds(&phases, "create"),
        update: seconds(&phases, "update") + seconds(&phases, "update, read"),
        rebuild: seconds(&phases, "rebuild"),
        faults: phases.iter().map(|row| row.count("pf_taken")).sum(),
        phases,
    };
    let report = Report {
        experiment: "page-table-test",
        parameters: parameters(asked, host),
        rows: vec![row],
        warnings,
    };
    report.print(json, |report| {
        let phases = report.rows.iter().flat_map(|row| row.phases.clone());
        let phases: Vec<_> = phases.collect();
        head(&report.parameters) + &summary::times(&phases) + &summary::counts(&phases)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Options;

    #[test]
    fn what_ran_fits_a_terminal() {
        let backing = "anonymous_hugetlb_16gb".parse().expect("a backing");
        let options = Options {
            nested: true,
            all_set: true,
            rounds: Some(1000),
            ..Options::default()
        };
        let asked = Asked::new(backing, 1000 << 30, 1024, options);
        let head = head(&parameters(&asked, computer().expect("Linux")));
        assert!(
            head.contains("1,024 vCPUs of a guest's guest, 1000 GiB"),
            "{head}"
        );
        let longest = head.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{head}");
    }
}

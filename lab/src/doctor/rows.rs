//! The answer: a row for each of the published problems.

use serde::Serialize;
use tablewright_machine::Profile;

use super::guests::{self, Guests, a_page, phase};
use super::machine::{self, Size};
use super::native;
use crate::error::Error;
use crate::fit::from_run;
use crate::kvm::HostKind;
use crate::output::report::{self, Report};
use crate::size::human;
use crate::tlb_flush::unmap::Unmap;

const PAGE: f64 = 4096.0;
const SECOND: f64 = 1e9;

/// The source of figures.
#[derive(Serialize)]
pub struct Origin {
    /// Name of the computer.
    pub computer: String,
    pub processor: String,
    pub cpus: usize,
    /// In UTC, as RFC 3339 writes it.
    pub at: String,
    pub version: &'static str,
    pub command: String,
}

impl Origin {
    /// This computer, now.
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo");
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name"));
        let model = model.and_then(|rest| rest.split_once(':')).map(|(_, name)| name.trim());
        let arguments = std::env::args().skip(1);
        Self {
            computer: read("/proc/sys/kernel/hostname").trim().to_owned(),
            processor: model.unwrap_or(std::env::consts::ARCH).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            at: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            version: env!("CARGO_PKG_VERSION"),
            command: ["tablewright".to_owned()]
                .into_iter()
                .chain(arguments)
                .collect::<Vec<_>>()
                .join(" "),
        }
    }
}

#[derive(Serialize)]
pub struct Parameters {
    pub measured: Origin,
    pub guest_bytes: u64,
    pub vcpus: u16,
    pub host: Option<HostKind>,
    /// Why there are no guests.
    pub no_guests: Option<String>,
}

/// Times are in nanoseconds.
#[derive(Serialize)]
pub struct Row {
    pub problem: &'static str,
    /// Measured here, for each of `for_each`.
    #[serde(rename = "here_ns")]
    pub here: Option<f64>,
    pub for_each: &'static str,
    /// At the size that was named: extrapolated.
    #[serde(rename = "there_ns")]
    pub there: Option<f64>,
    #[serde(rename = "with_change_ns")]
    pub with_change: Option<f64>,
    #[serde(rename = "tablewright_ns")]
    pub tablewright: Option<f64>,
    /// How each figure comes about, which kernel has the change, and whether this one does.
    pub note: String,
}

/// Figures of this computer, and the machine that was made of them.
pub struct Known {
    /// Known of the computer, whether or not it runs guests.
    pub host: Option<HostKind>,
    /// Of the engine, for a page.
    pub linear: f64,
    /// Of an entry that is published before the next one.
    pub published: f64,
    pub unmap: Unmap,
    pub guests: Result<Guests, Error>,
    pub fitted: Option<from_run::Found>,
}

pub fn rows(known: &Known, size: Size) -> Result<Vec<Row>, Error> {
    let mut rows = vec![linear_row(known, size)?, flush_row(known, size)?];
    if let (Ok(guests), Some(fitted)) = (&known.guests, &known.fitted) {
        let [before, published, ours] = machine::stop(&fitted.profile, size)?;
        rows.push(fault_row(guests, size, ours.populate));
        rows.push(start_row(guests, size, machine::start(&fitted.profile, size)?));
        rows.push(first_write_row(guests, size));
        let [stop, stall] = stop_rows(guests, size, [before, published, ours]);
        rows.push(stop);
        rows.push(stall);
    }
    Ok(rows)
}

fn pages(size: Size) -> f64 {
    size.bytes as f64 / PAGE
}

/// Which of these changes the kernel here has, each with the version from which on there is one.
fn which(host: Option<&HostKind>, changes: &[(&str, (u32, u32))]) -> String {
    let Some(host) = host else {
        return "whether this kernel has it is not known".to_owned();
    };
    let (major, minor) = host.version;
    let lacks: Vec<&str> =
        changes.iter().filter(|(_, since)| host.version < *since).map(|(name, _)| *name).collect();
    match (changes, lacks.as_slice()) {
        (_, []) => format!(
            "Linux {major}.{minor} here has {}",
            if changes.len() > 1 { "all" } else { "it" }
        ),
        ([_], _) => format!("Linux {major}.{minor} here does not"),
        (_, lacks) => format!("Linux {major}.{minor} here lacks {}", lacks.join(", ")),
    }
}

fn linear_row(known: &Known, size: Size) -> Result<Row, Error> {
    let [before, after] = machine::linear(size, known.linear, known.published)?;
    Ok(Row {
        problem: "linear map at boot",
        here: Some(known.published),
        for_each: "entry",
        there: Some(before),
        with_change: Some(after),
        tablewright: Some(known.linear * pages(size)),
        note: format!(
            "Here: an entry written, and a barrier. A kernel's map is over at boot and cannot be \
             measured: it is the machine, in pages, with what an entry and a barrier take here, \
             and {} to wait for an invalidation, as in {}, because only a kernel can tell that; \
             before the published changes, and with all four (arm64: Linux 6.10 has three of them; \
             {}). Tablewright: its own map of {} in pages, built and checked here, {} a page, \
             multiplied. Published, 64 GiB: 2191 ms before and 61 ms after.",
            report::time(machine::completion()?),
            machine::KERNELS,
            match cfg!(target_arch = "aarch64") {
                true => which(known.host.as_ref(), &[("them", (6, 10))]),
                false => "x86-64 never had what they change".to_owned(),
            },
            human(native::MAPPED),
            report::time(known.linear),
        ),
    })
}

fn flush_row(known: &Known, size: Size) -> Result<Row, Error> {
    let times = machine::unmap(size, known.unmap)?;
    let note = match known.unmap.remote {
        Some(remote) => format!(
            "munmap of a page: {} alone, {} while one other thread runs. For {} vCPUs: the machine \
             with these two costs, all vCPUs unmapping at once, one interrupt for each other vCPU; \
             the change is one hypercall for all (Hyper-V: Linux 4.14; KVM's own way: 4.16; \
             INVLPGB: 6.15; {}).",
            report::time(known.unmap.alone),
            report::time(remote),
            size.vcpus,
            which(
                known.host.as_ref(),
                &[("Hyper-V's", (4, 14)), ("KVM's", (4, 16)), ("INVLPGB", (6, 15)),],
            ),
        ),
        None => {
            "No other thread ran beside this one: there is one CPU, or others had it.".to_owned()
        }
    };
    Ok(Row {
        problem: "unmap, others forget",
        here: known.unmap.remote,
        for_each: "page",
        there: times.map(|times| times[0]),
        with_change: times.map(|times| times[1]),
        tablewright: times.map(|times| times[2]),
        note,
    })
}

fn fault_row(guests: &Guests, size: Size, ours: f64) -> Row {
    let populate = a_page(&guests.pages, "populate");
    let scaling = guests.fault[1] / guests.fault[0].max(1.0);
    Row {
        problem: "first touch by all",
        here: Some(populate),
        for_each: "page",
        there: Some(populate * pages(size) / f64::from(size.vcpus) * scaling),
        with_change: Some(a_page(&guests.huge, "populate") * pages(size) / f64::from(size.vcpus)),
        tablewright: Some(ours),
        note: format!(
            "Populating: CPU time of a fault with all that the host does. A logged write takes {} \
             with one vCPU and {} with {} at once (x {:.2}); all {} are taken to wait no more than \
             these do, which flatters. The change is huge pages, measured here. Tablewright: the \
             machine as this computer, huge pages. The published change of 2021 is arm64's (Linux \
             5.14; {}).",
            report::time(guests.fault[0]),
            report::time(guests.fault[1]),
            guests.vcpus,
            scaling,
            size.vcpus,
            which(Some(&guests.host), &[("it", (5, 14))]),
        ),
    }
}

fn start_row(guests: &Guests, size: Size, ours: f64) -> Row {
    let enable = a_page(&guests.pages, "enable");
    let all_set = guests.all_set.as_ref().map(|rows| a_page(rows, "enable"));
    Row {
        problem: "dirty log starts",
        here: Some(enable),
        for_each: "page",
        there: Some(enable * pages(size)),
        with_change: all_set.map(|time| time * pages(size)),
        tablewright: Some(ours),
        note: format!(
            "Enabling protects every page: CPU time of the call, multiplied. The change: all pages \
             are in the log from the start (Linux 5.7 has it, {} here), so that nothing is \
             protected; the first harvest then has everything, and pays. Tablewright: one \
             generation number, on the machine as this computer.",
            if all_set.is_some() { "and so it is measured" } else { "not" }
        ),
    }
}

fn first_write_row(guests: &Guests, size: Size) -> Row {
    let write = a_page(&guests.pages, "dirty 2");
    let free = a_page(&guests.huge, "pass after");
    Row {
        problem: "each page's first write",
        here: Some(write),
        for_each: "page",
        there: Some((write - free).max(0.0) * pages(size) / f64::from(size.vcpus)),
        with_change: None,
        tablewright: None,
        note: format!(
            "What the guest pays for a log, again after each harvest: a fault where a write takes \
             {} otherwise; for each vCPU, if it writes its part. Only a processor's own log saves \
             it (PML: {}). The rate at which a vCPU can dirty pages here is {} a second: \
             `tablewright migrate --from doctor.json` takes it.",
            report::time(free),
            match guests.host.modification_log {
                Some(true) => "on here",
                Some(false) => "off here",
                None => "none here",
            },
            report::count((SECOND / write.max(1.0)) as u64),
        ),
    }
}

/// Whether the published order of taking tables apart is at work here.
fn has_zap_change(host: &HostKind) -> String {
    let software = host.paging == "software" || host.tdp_mmu == Some(false);
    match (software, host.version >= (6, 13)) {
        (true, _) => format!(
            "This KVM does not use those tables (tdp_mmu is off), whatever Linux {}.{} has",
            host.version.0, host.version.1
        ),
        (false, true) => "This kernel has its successor".to_owned(),
        (false, false) => "This kernel is older".to_owned(),
    }
}

fn stop_rows(
    guests: &Guests,
    size: Size,
    [before, published, ours]: [machine::Stop; 3],
) -> [Row; 2] {
    let disable = a_page(&guests.huge, "disable");
    let there = disable * pages(size);
    let stalled = phase(&guests.stalls, "disable");
    let longest = stalled.and_then(|row| row.stall_longest);
    let call = stalled.map_or(0.0, |row| row.wall);
    // A call that was kept from its CPU does not take longer in a larger guest for that.
    let ran = stalled.map_or(0.0, |row| row.cpu);
    let p999 = stalled.and_then(|row| row.stall_p999).unwrap_or(0.0);
    let stop = Row {
        problem: "dirty log stops",
        here: Some(disable),
        for_each: "page",
        there: Some(there),
        with_change: Some(there * published.time / before.time.max(1.0)),
        tablewright: Some(there * ours.time / before.time.max(1.0)),
        note: format!(
            "Huge pages come back: CPU time of the call, multiplied. The change takes tables apart \
             after the flush, or in place (Linux 6.13). {}. The columns to the right have the \
             ratios of the machine as this computer with {} vCPUs that go on: {} before, {} after, \
             {} by the engine.",
            has_zap_change(&guests.host),
            size.vcpus.min(machine::MOST),
            report::time(before.time),
            report::time(published.time),
            report::time(ours.time),
        ),
    };
    let stall = Row {
        problem: "longest stall meanwhile",
        here: longest,
        for_each: guests::SMALL_SIZE,
        there: longest.map(|longest| match longest > call / 2.0 {
            // What is longer than the call ran is not of it.
            true => longest.min(ran) * size.bytes as f64 / guests::SMALL as f64,
            false => longest,
        }),
        with_change: Some(published.stall),
        tablewright: Some(ours.stall),
        note: format!(
            "What a vCPU waits by its own counter while the log of {} is disabled, the longest of \
             all rounds; the call takes {} ({} of CPU time), and 99.9 % of accesses take at most \
             {}. {} A busy computer adds its own stalls to it.",
            guests::SMALL_SIZE,
            report::time(call),
            report::time(ran),
            report::time(p999),
            match longest.is_some_and(|longest| longest > call / 2.0) {
                true =>
                    "A stall as long as the call grows with the memory: as much of it as the call \
                     ran is multiplied.",
                false => "It is short beside the call: not multiplied.",
            }
        ),
    };
    [stop, stall]
}

pub fn text(report: &Report<Parameters, Row>, known: &Known) -> String {
    let parameters = &report.parameters;
    let line = parameters.host.as_ref().map(|host| host.line.as_str());
    let mut text = report::wrapped(line.unwrap_or_default(), 78, "  ");
    if let Some(why) = &parameters.no_guests {
        let why = format!("No guest could be run, so that two problems are left: {why}");
        text += &format!("\n{}", report::wrapped(&why, 78, "  "));
    }
    let there = format!(
        "{},\n{}",
        human(parameters.guest_bytes),
        report::counted(parameters.vcpus.into(), "vCPU", "vCPUs")
    );
    text += &format!(
        "\n\nMeasured here; extrapolated to {}; notes below.\n\n",
        there.replace('\n', " ")
    );
    let optional = |time: Option<f64>| time.map_or("-".to_owned(), report::time);
    let cells = report.rows.iter().enumerate().map(|(number, row)| {
        vec![
            format!("{} {}", number + 1, row.problem),
            row.here.map_or("-".to_owned(), |time| {
                format!("{} / {}", report::time(time), row.for_each)
            }),
            optional(row.there),
            optional(row.with_change),
            optional(row.tablewright),
        ]
    });
    let header = ["", "here", there.as_str(), "with the\nchange", "Table-\nwright"];
    text += &report::table_of(header.map(str::to_owned).into(), 1, cells.collect());
    text.push('\n');
    for (number, row) in report.rows.iter().enumerate() {
        text += &format!("{} {}\n", number + 1, report::wrapped(&row.note, 76, "  "));
    }
    if let Some(found) = &known.fitted {
        text += &format!(
            "\nThe machine as this computer, fitted on runs 1 and 2:\n\n{}",
            costs(&found.profile)
        );
        text += "\nTo have it: tablewright doctor --json > doctor.json\n            tablewright \
                 fit --from doctor.json -o here.toml\n";
    }
    text
}

fn costs(profile: &Profile) -> String {
    let costs = &profile.costs;
    let cell = |name: &str, time: tablewright_machine::Time| {
        [name.to_owned(), report::time(time.as_ps() as f64 / 1e3)]
    };
    let rows = vec![
        cell("a fault of a guest, served", costs.exception),
        cell("to find the memory of a page", costs.find_page),
        cell("to zero it", costs.zero),
        cell("an entry of a table, written", costs.entry),
        cell("an entry, read", costs.load),
        cell("a call of KVM, by itself", costs.call),
        cell("a page come by when a log starts", costs.visit),
    ];
    report::table(["", "cost"], 1, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm;

    #[test]
    fn a_kernel_is_said_to_have_what_came_before_it() {
        let mut host = kvm::computer().expect("Linux");
        let two = [("one", (4, 14)), ("two", (6, 15))];
        let mut said = |version, changes: &[_]| {
            host.version = version;
            which(Some(&host), changes)
        };
        assert_eq!(said((6, 15), &two), "Linux 6.15 here has all");
        assert_eq!(said((6, 1), &two), "Linux 6.1 here lacks two");
        assert_eq!(said((3, 2), &two), "Linux 3.2 here lacks one, two");
        assert_eq!(said((5, 14), &[("it", (5, 14))]), "Linux 5.14 here has it");
        assert_eq!(said((5, 13), &[("it", (5, 14))]), "Linux 5.13 here does not");
        assert!(which(None, &two).contains("not known"));
    }

    #[test]
    fn the_answer_fits_a_terminal() {
        let row = |problem| Row {
            problem,
            here: Some(999e6),
            for_each: "64 MiB",
            there: Some(9.99e12),
            with_change: Some(999e6),
            tablewright: Some(999e3),
            note: "what is measured, and what that is multiplied by ".repeat(9),
        };
        let known = Known {
            host: None,
            linear: 1.0,
            published: 1.0,
            unmap: Unmap { alone: 1.0, remote: None },
            guests: Err(Error::Usage("none".to_owned())),
            fitted: None,
        };
        let report = Report {
            experiment: "doctor",
            parameters: Parameters {
                measured: Origin::here(),
                guest_bytes: 1000 << 40,
                vcpus: 500,
                host: kvm::computer(),
                no_guests: Some("no reason, ".repeat(20)),
            },
            rows: vec![row("each page's first write"), row("longest stall meanwhile")],
            warnings: Vec::new(),
        };
        let text = text(&report, &known);
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{text}");
        assert!(text.contains("2 longest stall meanwhile"), "{text}");
    }
}

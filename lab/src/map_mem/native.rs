//! `map-mem` on this computer: the engine's tables in its memory, beside plain stores.

use serde_json::json;

use super::builder;
use super::iomem::MemoryMap;
use super::measure::{self, Outcome};
use super::plan::{Contents, Leaves, Plan, PlanError};
use crate::error::Error;
use crate::format::Format;
use crate::output::columns::{Cell, columns};
use crate::output::report::{self, Report};
use crate::size::human;
use crate::stats::{self, Samples};

/// The builder's figures, and those of the bare loop.
struct Row {
    format: Format,
    outcome: Outcome,
}

columns! { row: Row;
    ["crate"] [] Cell::text(row.outcome.name);
    ["version"] [] Cell::text(row.outcome.version);
    ["operation"] [] Cell::text("map");
    ["threads"] [] Cell::Count(1);
    ["entries"] [] Cell::Count(row.outcome.built.entries);
    ["tables"] [] Cell::Count(row.outcome.built.tables);
    ["table_bytes"] [] Cell::Bytes(row.table_bytes());
    ["ns_per_entry"] [] Cell::Figure(row.ns(&row.outcome.build));
    ["bare_ns_per_entry"] [] Cell::Figure(row.ns(&row.outcome.bare));
    ["ratio_to_bare"] [] Cell::Figure(row.ratio());
    ["gb_per_second"] [] Cell::Figure(row.rate(&row.outcome.build));
    ["bare_gb_per_second"] [] Cell::Figure(row.rate(&row.outcome.bare));
    ["samples_ns"] [] Cell::json(row.each(&row.outcome.build));
    ["bare_samples_ns"] [] Cell::json(row.each(&row.outcome.bare));
}

impl Row {
    fn table_bytes(&self) -> u64 {
        self.outcome.built.tables * self.format.page_bytes()
    }

    /// For an entry.
    fn ns(&self, samples: &Samples) -> f64 {
        samples.median() / self.outcome.built.entries as f64
    }

    fn each(&self, samples: &Samples) -> Samples {
        samples.scaled(1.0 / self.outcome.built.entries as f64)
    }

    /// Bytes in a nanosecond are gigabytes in a second.
    fn rate(&self, samples: &Samples) -> f64 {
        self.table_bytes() as f64 / samples.median().max(1.0)
    }

    fn ratio(&self) -> f64 {
        self.outcome.build.median() / self.outcome.bare.median().max(1.0)
    }

    fn text(&self, rounds: u32) -> String {
        let (outcome, entries) = (&self.outcome, self.outcome.built.entries);
        let head = format!(
            "{} in {} ({}), all checked; median of {}\n\n",
            report::counted(entries, "entry", "entries"),
            report::counted(outcome.built.tables, "table", "tables"),
            human(self.table_bytes()),
            report::counted(u64::from(rounds), "round", "rounds"),
        );
        let line = |name: String, samples: &Samples, ratio: f64| {
            [
                name,
                report::time(self.ns(samples) * entries as f64),
                report::figure(self.ns(samples)),
                report::figure(self.rate(samples)),
                report::figure(ratio),
            ]
        };
        let ours = format!("{} {}", outcome.name, outcome.version);
        let header = ["", "time", "ns/entry", "GB/s of tables", "x bare"];
        let rows = vec![
            line("bare: zero and fill".to_owned(), &outcome.bare, 1.0),
            line(ours, &outcome.build, self.ratio()),
        ];
        report::title(&head) + &report::table(header, 1, rows)
    }
}

/// A map that was built, and every page of it checked.
pub struct Built {
    pub bytes: u64,
    pub entries: u64,
    pub tables: u64,
    pub nanoseconds: f64,
}

/// Builds the linear map of this memory in pages.
pub fn build(source: &str, map: &MemoryMap, format: Format) -> Result<Built, Error> {
    let (plan, outcome) = measure(source, map, format, Leaves::Pages, 3)?;
    Ok(Built {
        bytes: plan.bytes(),
        entries: outcome.built.entries,
        tables: outcome.built.tables,
        nanoseconds: outcome.build.median(),
    })
}

/// Builds the linear map of this memory so many times, has every page checked, and times it.
fn measure(
    source: &str,
    map: &MemoryMap,
    format: Format,
    leaves: Leaves,
    rounds: u32,
) -> Result<(Plan, Outcome), Error> {
    let plan = Plan::new(map, format, leaves).map_err(|error| {
        // A machine has the addresses that its profile says.
        let hint = match error {
            PlanError::Beyond { .. } => ": see --address-bits",
            _ => "",
        };
        Error::input(source, format!("{error}{hint}"))
    })?;
    let mut builder = builder::native(&plan).map_err(|problem| Error::Subject {
        subject: builder::OURS,
        operation: "map",
        problem,
    })?;
    let outcome = measure::run(&plan, builder.as_mut(), rounds)?;
    drop(builder);
    Ok((plan, outcome))
}

/// Measures, and prints what it took.
pub fn run(
    (source, map): (String, MemoryMap),
    format: Format,
    leaves: Leaves,
    rounds: u32,
    json: bool,
) -> Result<(), Error> {
    let (plan, outcome) = measure(&source, &map, format, leaves, rounds)?;
    let noisy = || stats::noise_warning("the bare loop", &outcome.bare);
    let short = short_warning(&outcome, leaves).or_else(noisy);
    let warnings = stats::build_warning().into_iter().chain(short);
    let warnings = warnings.chain(outcome.huge_page_warning.clone()).collect();
    let bytes_of = |contents| -> u64 {
        let spans = plan.spans.iter().filter(|span| span.contents == contents);
        spans.map(|span| span.bytes()).sum()
    };
    let (text, rodata) = (bytes_of(Contents::Text), bytes_of(Contents::Rodata));
    let report = Report {
        experiment: "map-mem",
        parameters: json!({
            "source": source,
            "format": format.architecture(),
            "granule": format.granule(),
            "address_bits": format.address_bits(),
            "virtual_base": format!("{:#x}", format.linear_base()),
            "pages_only": leaves == Leaves::Pages,
            "on": "native",
            "rounds": rounds,
            "ram_bytes": plan.bytes(),
            "text_bytes": text,
            "rodata_bytes": rodata,
            "trimmed_bytes": plan.trimmed,
            "ranges": plan.spans.len(),
        }),
        rows: vec![Row { format, outcome }],
        warnings,
    };
    report.print(json, |report| {
        let parts = [(text, "of it kernel text"), (rodata, "of it kernel constants")];
        let leaves = match leaves {
            Leaves::Pages => "pages only",
            Leaves::Largest => "the largest leaves that fit",
        };
        let shown = report.rows.iter().map(|row| row.text(rounds));
        let head = format!(
            "{}mapped at {:#x} for {}: {} pages, {} address bits,\n{leaves}\n",
            plan.head(&source, &parts),
            format.linear_base(),
            format.architecture().name(),
            format.granule().name(),
            format.address_bits(),
        );
        report::title(&head) + &shown.collect::<String>()
    })
}

/// Warns that with next to nothing to write, only figures that do not depend on entries hold.
fn short_warning(outcome: &Outcome, leaves: Leaves) -> Option<String> {
    const SHORT: f64 = 1e5;
    let instead = match leaves {
        Leaves::Pages => "a larger --ram",
        Leaves::Largest => "--pages-only",
    };
    (outcome.bare.median() < SHORT).then(|| {
        format!(
            "so few entries are written in no time: look at the time of the whole, or use \
             {instead} for figures that hold for each entry"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::judge::Found;

    #[test]
    fn a_row_is_per_entry_and_the_text_names_the_bare_loop() {
        let outcome = Outcome {
            name: "tablewright",
            version: "0",
            built: Found { entries: 512, tables: 4 },
            build: [1024.0].into_iter().collect(),
            bare: [512.0].into_iter().collect(),
            huge_page_warning: None,
        };
        let row = Row { format: Format::COMMON, outcome };
        let json = serde_json::to_value(&row).unwrap();
        let figure = |name: &str| json[name].as_f64().unwrap();
        let each = ["ns_per_entry", "bare_ns_per_entry", "ratio_to_bare"].map(figure);
        assert_eq!(each, [2.0, 1.0, 2.0]);
        assert_eq!(["table_bytes", "gb_per_second"].map(figure), [16384.0, 16.0]);
        assert_eq!(json["samples_ns"], json!([2.0]));
        let text = row.text(1);
        assert!(text.contains("512 entries in 4 tables"), "{text}");
        assert!(text.contains("bare: zero and fill"), "{text}");
    }
}

//! Keys of JSON: one style in all experiments, and the unit of each figure in its key.

use crate::common::{Scratch, json, stderr, stdout, tablewright};
use serde_json::Value;

/// Keys that have no unit, or have it beside them.
const BARE: [&str; 2] = ["spread", "scale"];
/// The units, as a key ends with them.
const UNITS: [&str; 7] = ["_ns", "_us", "_ms", "_s", "_percent", "_per_second", "_bytes"];

fn has_unit(key: &str) -> bool {
    UNITS.iter().any(|unit| key.ends_with(unit) || key == &unit[1..])
        || key.starts_with("ns_per_")
        || key.contains("_ns_per_")
        || key.starts_with("ratio_to_")
        || BARE.contains(&key)
}

/// Finds the wrong keys in a value that stands behind `key`.
fn wrong(key: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let is_word = |part: &str| {
                    !part.is_empty()
                        && part
                            .chars()
                            .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit())
                };
                if !key.split('_').all(is_word) {
                    found.push(format!("{key}: not words with underscores between them"));
                }
                // Figures of a published table are in the unit that stands beside them.
                if !object.contains_key("unit") || value.is_object() {
                    wrong(key, value, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| wrong(key, value, found)),
        Value::Number(number) if number.is_f64() && !has_unit(key) => {
            found.push(format!("{key}: {number} of what?"));
        }
        _ => {}
    }
}

/// A run of each experiment.
const LINES: [&str; 14] = [
    "map-mem --ram 64M --rounds 2",
    "map-mem --on machine --machine neutral --ram 64M",
    "page-table-test -v 2 -b 2M",
    "page-table-test --on native -v 1 -b 2M",
    "write-protect -b 1M -v 2",
    "write-protect --sizes 1G",
    "tlb-flush -r 1 -c 1",
    "tlb-flush --on native -r 1 -t 2 -p 16",
    "dirty-log -v 2 -b 4M",
    "compare --size 2M --rounds 2",
    "compare --pages 1 --rounds 2",
    "migrate --memory 2M --set 1M",
    "litmus --only CoWTf.inv+po",
    "reproduce --only tlb-flush",
];

/// Figures as they are published, of a small guest, to fit to.
const TABLE: &str = "system,configuration,metric,before,after,unit,published improvement
\"VM,64M\",cumulative up to base,map_mem() time,0.590,0.590,ms,0%
\"VM,64M\",cumulative up to no-cont-remap,map_mem() time,0.590,0.301,ms,-49%
\"VM,64M\",cumulative up to no-alloc-remap,map_mem() time,0.590,0.301,ms,-49%
\"VM,64M\",cumulative up to lazy-unmap,map_mem() time,0.590,0.246,ms,-58%
\"VM,64M\",cumulative up to batch-barriers,map_mem() time,0.590,0.043,ms,-93%
";

/// A fit to that table.
fn fit(table: &Scratch) -> String {
    format!("fit --machine apple-m2-vm-16g --rows VM,64M --table {}", table.path())
}

#[test]
fn keys_are_words_and_name_the_unit() {
    let mut found = Vec::new();
    wrong(
        "",
        &serde_json::json!({"a-b": 1, "time": 1.5, "time_ns": [1.5], "count": 1}),
        &mut found,
    );
    assert_eq!(found.len(), 2, "{found:?}");

    let recording = Scratch::new("keys.twr", "");
    let record = format!("record -o {} sleep 0.1", recording.path());
    let table = Scratch::new("keys.csv", TABLE);
    let fit = fit(&table);
    let lines = LINES.into_iter().chain([&fit[..]]);
    #[cfg(target_os = "linux")]
    let lines = lines.chain([&record[..]]);
    for line in lines {
        let (command, arguments) = line.split_once(' ').expect("arguments");
        let report = json(command, arguments);
        assert_eq!(report["experiment"], command);
        let mut found = Vec::new();
        wrong("", &report, &mut found);
        assert!(found.is_empty(), "{line:?}: {found:#?}");
    }
}

/// Whether a line has a cell without a figure.
fn has_dash(line: &str) -> bool {
    line.split("  ").any(|cell| cell.trim() == "-")
}

/// A table with a cell that is a dash has the reason below it, in a line that begins with one.
#[test]
fn a_dash_has_its_reason() {
    let table = Scratch::new("dashes.csv", TABLE);
    let more = [&fit(&table)[..], "ask -v 2 -b 8M", "dirty-log -v 2 -b 1M"];
    for line in LINES.into_iter().chain(more) {
        let output = tablewright(line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        let text = stdout(&output);
        let dash = text.lines().find(|line| has_dash(line));
        let reason = text.lines().any(|line| line.starts_with("- "));
        assert!(dash.is_none() || reason, "{line}: {dash:?}\n{text}");
    }
}

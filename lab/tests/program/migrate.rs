//! Tests of a migration.

use crate::common::{self, Line, Scratch, assert_refused, stderr, stdout, tablewright};
use serde_json::Value;

const SMALL: [&str; 9] =
    ["migrate", "--memory", "8M", "--bandwidth", "256M", "--downtime-limit", "2", "--timeout", "1"];

fn json(arguments: &(impl Line + ?Sized)) -> Value {
    common::json(&SMALL, arguments)
}

/// A faster line, which is done before long whatever the guest writes.
const FAST: [&str; 9] = {
    let mut line = SMALL;
    line[4] = "4G";
    line
};

/// A recording of two intervals of 10 ms, in which pages 0 to 9 and 20 to 24 of 512 were written.
fn recording() -> Vec<u8> {
    let mut bytes = b"TWRECORD\x01".to_vec();
    // Method, blind spots, kernel, command, process, page size, start, interval.
    bytes.extend(*b"\x04scan\x00\x01k\x01c\x07\x80\x20\x00\x80\xad\xe2\x04");
    bytes.extend(*b"R\x00\x80\x04\x04heap");
    for runs in [[0, 10], [20, 5]] {
        bytes.extend(*b"I\x80\xad\xe2\x04\x01");
        bytes.extend(runs);
    }
    // Intervals, pages written, why it ended, cost, warnings.
    bytes.extend(*b"E\x02\x0f\x03end\x00\x00\x00\x00\x00\x00\x00");
    let crc = crc32fast::hash(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes
}

#[test]
fn a_recording_that_is_none_is_refused_and_nothing_is_written() {
    let whole = recording();
    let plot = std::env::temp_dir().join(format!("tablewright-{}-none.svg", std::process::id()));
    let plot = plot.to_str().expect("UTF-8");
    for (name, bytes, says) in [
        ("cut.twr", &whole[..whole.len() - 6], "it is truncated"),
        ("foreign.twr", &b"# not one"[..], "not a recording"),
    ] {
        let file = Scratch::new(name, bytes);
        assert_refused(&format!("migrate --recording {} --plot {plot}", file.path()), says);
        assert!(!std::path::Path::new(plot).exists());
    }
    let file = Scratch::new("small.twr", &whole);
    let line = ["migrate", "--memory", "1M", "--recording", file.path()];
    assert_refused(&line, "--memory 1 MiB: the recording is of 2 MiB");
}

#[test]
fn a_recording_is_a_guest() {
    let file = Scratch::new("guest.twr", recording());
    let line = "migrate --downtime-limit 2 --memory 8M --bandwidth 32M";
    let report = common::json(line, &format!("--recording {}", file.path()));
    for row in report["rows"].as_array().expect("rows") {
        let (writes, rate) = (&row["guest"]["writes"], &row["guest"]["writes_per_second"]);
        // 15 pages in 20 ms, for the 250 ms that 8 MiB take.
        let rate = rate.as_u64().expect("a rate");
        assert!((700..800).contains(&rate), "{writes} {rate}");
        let sent = row["ram"]["normal_pages"].as_u64().expect("pages");
        assert!((2048..2048 + 100).contains(&sent), "{sent}");
    }
}

#[test]
fn the_figures_are_those_of_qemu() {
    let report = json("--writes fixed --rate 20000 --set 2M");
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().map(|row| row["logging"].as_str()).collect();
    let kinds = ["manual", "all-set", "protect-all", "ring"];
    assert_eq!(names, kinds.map(Some));
    for row in rows {
        for name in ["total_time_ms", "downtime_ms", "expected_downtime_ms", "setup_time_ms"] {
            assert!(row[name].as_f64().expect(name) >= 0.0);
        }
        let ram = &row["ram"];
        let number = |name: &str| ram[name].as_f64().expect("a number");
        assert_eq!(number("total_bytes"), f64::from(8 << 20));
        assert_eq!(number("remaining_bytes"), 0.0);
        assert_eq!(number("normal_bytes"), number("normal_pages") * number("page_bytes"));
        assert!(number("megabits_per_second") < 256.0 * 1.048_576 * 8.0);
        assert!((10_000.0..=20_100.0).contains(&number("dirty_pages_per_second")));
        assert!(number("dirty_sync_count") >= 2.0);
        assert_eq!(row["cpu_throttle_percentage"], 0);
    }
}

#[test]
fn the_same_arguments_give_the_same_bytes_and_a_picture() {
    let picture = Scratch::new("rounds.svg", "");
    let line = [
        &SMALL[..],
        &["--writes", "zipf", "--rate", "50000", "--seed", "7", "--plot"],
        &[picture.path()],
    ]
    .concat();
    let once = tablewright(&line);
    assert!(once.status.success(), "{}", stderr(&once));
    let again = tablewright(&[&line[..], &["--threads", "1"]].concat());
    assert_eq!(stdout(&once), stdout(&again));
    assert!(stdout(&once).lines().all(|line| line.chars().count() <= 100));
    let svg = std::fs::read_to_string(picture.path()).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.contains("protect-all"));
}

/// A run of 16,384 pages as `dirty-log --on kvm --json` prints it, as far as it is read:
/// nanoseconds for a page in each phase.
fn run_on_kvm(source: &str, phases: &[(&str, f64)]) -> String {
    let pages = 16_384;
    let phase = |(phase, ns): &(&str, f64)| {
        let cpu_ns = ns * f64::from(pages);
        serde_json::json!({"phase": phase, "pages": pages, "cpu_ns": cpu_ns, "threads": 1})
    };
    let phases: Vec<_> = phases.iter().map(phase).collect();
    serde_json::json!({
        "parameters": {
            "host": {"line": "AMD, SOFTWARE PAGING, Linux 6.18", "paging": "software"},
            "source": source, "bytes": pages * 4096, "vcpus": 1, "iterations": 1, "slots": 1,
            "write_percent": 100, "random_access": false, "manual_protect": true,
            "all_set": false, "overlap": false,
            "run_in_all_calls": false, "ring": null,
        },
        "rows": [{"phases": phases}],
    })
    .to_string()
}

#[test]
fn a_migration_on_the_computer_at_hand_has_its_rates() {
    let small = [
        ("populate", 4700.0),
        ("enable", 40.0),
        ("dirty 1", 2400.0),
        ("clear 1", 25.0),
        ("pass after", 2450.0),
    ];
    let large = [
        ("populate", 650.0),
        ("dirty 1", 2400.0),
        ("clear 1", 25.0),
        ("disable", 60.0),
        ("pass after", 32.2),
    ];
    let (small, large) = (
        Scratch::new("small.json", run_on_kvm("anonymous", &small)),
        Scratch::new("large.json", run_on_kvm("anonymous_thp", &large)),
    );
    let both = ["--from", small.path(), large.path()];
    let from = |arguments: &[&[&str]]| common::json(&FAST, &arguments.concat());
    let report = from(&[&both, &["--logging", "manual", "--set", "8M"]]);
    let parameters = &report["parameters"];
    assert_eq!(parameters["machine"], "here");
    // The pass after a log of small pages is one of faults there: it is not taken for a plain
    // write.
    assert_eq!(parameters["work_ns"], 32);
    let rate = parameters["measured"]["dirty_pages_per_second"].as_f64();
    assert!((rate.expect("a rate") - 1e9 / 2400.0).abs() < 1.0);
    // What a fault keeps the guest is what was measured.
    let guest = &report["rows"][0]["guest"];
    let number = |name: &str| guest[name].as_f64().expect("a number");
    let fault = number("stall_total_ms") * 1e6 / number("faults");
    assert!((fault / (2400.0 - 32.2) - 1.0).abs() < 0.1, "{fault} ns");
    // What is said counts.
    let own = from(&[&both, &["--logging", "manual", "--work", "500"]]);
    assert_eq!(own["parameters"]["work_ns"], 500);
    let alone = from(&[&["--from", small.path(), "--logging", "manual"]]);
    assert_eq!(alone["parameters"]["work_ns"], 200);
    assert!(alone["parameters"]["measured"]["write_ns"].is_null());
    let output = tablewright(&[&FAST[..], &both, &["--logging", "manual"]].concat());
    let text = stdout(&output);
    assert!(text.starts_with("here: AMD, SOFTWARE PAGING"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 91), "{text}");

    let none = Scratch::new("none.json", "{}");
    assert_refused(&["migrate", "--from", none.path()], "no run of dirty-log");
    let both = ["migrate", "--from", small.path(), "--profile", "neutral"];
    assert_refused(&both, "cannot be used with");
    let old = run_on_kvm("anonymous", &[("dirty 1", 2400.0)]).replace("\"pages\"", "\"p\"");
    let old = Scratch::new("old.json", old);
    assert_refused(&["migrate", "--from", old.path()], "older version");
}

/// A length of zero ended in a panic, and what a run cannot have was fitted to.
#[test]
fn numbers_that_no_run_has_are_refused_by_file_and_field() {
    let good = run_on_kvm("anonymous", &[("dirty 1", 2400.0)]);
    let refused = |was: &str, is: &str, says: &str| {
        assert!(good.contains(was), "{was} in {good}");
        let file = Scratch::new("numbers.json", good.replace(was, is));
        for command in ["migrate", "fit"] {
            assert_refused(
                &format!("{command} --from {}", file.path()),
                &format!("{}: {says}", file.path()),
            );
        }
    };
    let cpu = "\"cpu_ns\":39321600.0";
    for (was, is, says) in [
        ("\"bytes\":67108864", "\"bytes\":0", "parameters.bytes: 4096 to"),
        ("\"bytes\":67108864", "\"bytes\":5000", "parameters.bytes: 5000 is no multiple"),
        ("\"vcpus\":1", "\"vcpus\":4611686018427387904", "parameters.vcpus: 1 to"),
        ("\"vcpus\":1", "\"vcpus\":-1", "parameters.vcpus: 1 to"),
        ("\"iterations\":1", "\"iterations\":4611686018427387904", "parameters.iterations: 1 to"),
        ("\"write_percent\":100", "\"write_percent\":101", "parameters.write_percent: 0 to 100"),
        (cpu, "\"cpu_ns\":-5", "phase 'dirty 1': cpu_ns: more than 0"),
        (cpu, "\"cpu_ns\":0", "phase 'dirty 1': cpu_ns: more than 0"),
        (cpu, "\"cpu_ns\":1e300", "phase 'dirty 1': cpu_ns: more than 0"),
        ("\"threads\":1", "\"threads\":0", "phase 'dirty 1': threads: 1 to"),
        ("\"pages\":16384", "\"pages\":4611686018427387904", "phase 'dirty 1': pages: 0 to"),
        (
            "\"all_set\":false",
            "\"all_set\":true",
            "64 MiB anonymous, 1 vCPU: the machine's dirty-log has no",
        ),
    ] {
        refused(was, is, says);
    }
    // Of several runs in a document it is said of the run what is wrong with it, and not that the
    // document is none.
    let several = format!("{{\"runs\":[{}]}}", good.replace("\"source\"", "\"sauce\""));
    let file = Scratch::new("several.json", several);
    assert_refused(&["fit", "--from", file.path()], "missing field `source`");
}

#[test]
fn a_fit_from_runs_says_what_it_was_asked() {
    let run = run_on_kvm("anonymous", &[("populate", 4700.0), ("dirty 1", 2400.0)]);
    let file = Scratch::new("shape.json", run);
    let output = tablewright(&["fit", "--from", file.path(), "--json"]);
    let fit: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    assert_eq!(fit["experiment"], "fit");
    assert_eq!(fit["parameters"]["from"][0], file.path());
    assert!(fit["warnings"].is_array() && fit["costs"].is_array() && fit["rows"].is_array());
}

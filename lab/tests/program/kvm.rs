//! The experiments on the KVM of this computer, as a user runs them; without one they have to be refused.

use crate::common::{Scratch, assert_refused, stderr, stdout, tablewright};
use serde_json::Value;

/// Whether there is a KVM that this user may use. If not, all that can be asked for is refused.
fn has_kvm() -> bool {
    let there = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !there {
        eprintln!("skipped: no /dev/kvm for this user");
        assert_refused(&["dirty-log", "--on", "kvm"], "kvm");
    }
    there
}

fn json(arguments: &[&str]) -> Value {
    let output = tablewright(&[arguments, &["--on", "kvm", "--rounds", "1", "--json"]].concat());
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        stderr(&output)
    );
    serde_json::from_str(stdout(&output)).expect("JSON")
}

fn phase<'a>(report: &'a Value, name: &str) -> &'a Value {
    let phases = report["rows"][0]["phases"].as_array().expect("phases");
    let found = phases.iter().find(|phase| phase["phase"] == name);
    found.unwrap_or_else(|| panic!("{name} in {report}"))
}

#[test]
fn the_log_has_what_the_guest_wrote_by_each_way() {
    if !has_kvm() {
        return;
    }
    for way in [
        &["-g"][..],
        &[],
        &["--all-set"],
        &["--ring", "4096"],
        &["--stalls"],
    ] {
        for backing in ["anonymous", "anonymous_thp", "shmem"] {
            let line = [&["dirty-log", "-b", "16M", "-v", "2", "-s", backing], way].concat();
            let report = json(&line);
            for number in 1..=2 {
                let get = phase(&report, &format!("get {number}"));
                assert_eq!(get["harvested"], 8192, "{line:?}");
            }
            let dirty = phase(&report, "dirty 2");
            assert_eq!(dirty["pages"], 8192);
            assert!(dirty["stall_longest"].as_f64() > Some(0.0));
            // Each page that was logged faults, whatever else does; but what is written during a call, for its stalls to be seen,
            // does not fault again in the pass after it.
            let at_rest = way != ["--stalls"];
            if at_rest && let Some(faults) = dirty["counts"]["pf_taken"].as_i64() {
                let logged_by_hardware = report["parameters"]["host"]["modification_log"] == true;
                assert!(logged_by_hardware || faults >= 8192, "{line:?}: {faults}");
            }
        }
    }
}

#[test]
fn a_guest_that_also_reads_is_logged_for_its_writes() {
    if !has_kvm() {
        return;
    }
    let report = json(&[
        "dirty-log",
        "-b",
        "16M",
        "-v",
        "2",
        "-w",
        "40",
        "-a",
        "-x",
        "2",
    ]);
    let get = phase(&report, "get 1");
    let pages = get["harvested"].as_u64().expect("pages");
    assert_eq!(get["harvested"], get["written"]);
    assert!((2000..3500).contains(&pages), "{pages}");
}

#[test]
fn the_start_of_a_log_and_faults_on_one_table_run_too() {
    if !has_kvm() {
        return;
    }
    let start = json(&["write-protect", "-b", "32M", "-v", "2"]);
    assert_eq!(phase(&start, "get 1")["harvested"], 8192);
    let start = json(&[
        "write-protect",
        "-s",
        "anonymous_thp",
        "-b",
        "32M",
        "-v",
        "2",
    ]);
    assert_eq!(start["rows"][0]["leaf_bytes"], 2 << 20);
    assert_eq!(phase(&start, "get 1")["harvested"], 8192);
    let faults = json(&["page-table-test", "-b", "32M", "-v", "2"]);
    assert_eq!(phase(&faults, "get 1")["harvested"], 8192);
    let large = json(&[
        "page-table-test",
        "-b",
        "32M",
        "-v",
        "2",
        "-s",
        "anonymous_thp",
    ]);
    assert!(phase(&large, "get 1")["written"] == 16);
}

#[test]
fn the_first_line_says_what_kind_of_host_it_is() {
    if !has_kvm() {
        return;
    }
    let output = tablewright(&["dirty-log", "--on", "kvm", "-b", "4M", "--rounds", "1"]);
    let text = stdout(&output);
    let first = text.lines().next().expect("a line");
    assert!(
        first.contains("paging") || first.contains("PAGING"),
        "{first}"
    );
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
}

#[test]
fn a_profile_is_fitted_to_runs_and_predicts_another() {
    if !has_kvm() {
        return;
    }
    let scratch = |name: &str, source: &str| {
        let line = [
            "dirty-log",
            "-b",
            "16M",
            "-s",
            source,
            "--on",
            "kvm",
            "--rounds",
            "2",
            "--json",
        ];
        let output = tablewright(&line);
        assert!(output.status.success(), "{}", stderr(&output));
        Scratch::new(name, &output.stdout)
    };
    let (small, large) = (
        scratch("a.json", "anonymous"),
        scratch("b.json", "anonymous_thp"),
    );
    let profile = Scratch::new("here.toml", "");
    let line = [
        "fit",
        "--from",
        small.path(),
        large.path(),
        "-o",
        profile.path(),
        "--json",
    ];
    let output = tablewright(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    let fit: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let costs = fit["costs"].as_array().expect("costs");
    let exception = costs
        .iter()
        .find(|cost| cost["cost"] == "exception")
        .expect("it is free");
    // A fault takes more than a memory access and less than a disk access.
    let nanoseconds = exception["fitted_ns"].as_f64().expect("determined");
    assert!((100.0..1e7).contains(&nanoseconds), "{nanoseconds}");
    let dirty = |row: &&Value| {
        row["phase"]
            .as_str()
            .is_some_and(|it| it.starts_with("dirty"))
    };
    let rows = fit["rows"].as_array().expect("rows").iter().filter(dirty);
    let mut errors: Vec<f64> = rows
        .map(|row| row["error_percent"].as_f64().expect("an error").abs())
        .collect();
    errors.sort_by(f64::total_cmp);
    // Other programs may disturb one of them.
    assert!(errors[errors.len() / 2] < 60.0, "{errors:?}");
    let report = json(&[
        "dirty-log",
        "-b",
        "8M",
        "-v",
        "2",
        "--predict",
        profile.path(),
    ]);
    let predicted = report["rows"][0]["predicted"]
        .as_array()
        .expect("predictions");
    assert!(
        predicted.iter().any(|row| row["phase"] == "populate"),
        "{report}"
    );

    // What no run is.
    let none = Scratch::new("none.json", "{}");
    assert_refused(&["fit", "--from", none.path()], "no run of dirty-log");
    assert_refused(&["fit", "--from", "/no/such.json"], "/no/such.json");
    assert_refused(&["fit"], "--machine");
    let lacks = [
        "dirty-log",
        "--on",
        "kvm",
        "--ring",
        "--predict",
        profile.path(),
    ];
    assert_refused(&lacks, "no --ring");
}

#[test]
fn doctor_has_a_row_for_each_problem_and_runs_to_fit_to() {
    let output = tablewright(&["doctor", "--guest", "1G", "--vcpus", "2", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    if !has_kvm() {
        assert_eq!(rows.len(), 2);
        assert!(report["parameters"]["no_guests"].is_string());
        return;
    }
    assert_eq!(rows.len(), 7);
    assert!(
        rows.iter()
            .all(|row| row["tablewright"].is_f64() || row["there"].is_f64())
    );
    // What was measured in a few hundred pages is what it is multiplied from.
    let start = &rows[3];
    let pages = (1 << 30) as f64 / 4096.0;
    let there = start["here"].as_f64().expect("measured") * pages;
    assert!((there / start["there"].as_f64().expect("extrapolated") - 1.0).abs() < 1e-9);
    let file = Scratch::new("doctor.json", &output.stdout);
    let fit = tablewright(&["fit", "--from", file.path(), "--json"]);
    assert!(fit.status.success(), "{}", stderr(&fit));
}

/// Linux has `/proc` and signals; elsewhere there is no doctor.
#[cfg(target_os = "linux")]
#[test]
fn doctor_leaves_nothing_behind_when_it_is_killed() {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    let directory = std::env::temp_dir().join(format!("tablewright-killed-{}", std::process::id()));
    fs::create_dir(&directory).expect("a directory");
    let shared = || -> Vec<_> {
        let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name());
        let ours = |name: &std::ffi::OsString| name.to_string_lossy().contains("tablewright");
        names.filter(ours).collect()
    };
    // In its start, in what it does natively, and among its guests.
    for milliseconds in [5, 100, 700, 2500] {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_tablewright"))
            .args(["doctor", "--json", "--report", "."])
            .current_dir(&directory)
            .env("TMPDIR", &directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program runs");
        std::thread::sleep(Duration::from_millis(milliseconds));
        // Without guests it is soon through.
        if doctor.try_wait().expect("its state").is_some() {
            fs::remove_file(directory.join("doctor.html")).expect("a page");
            assert!(milliseconds > 5);
            break;
        }
        let id = doctor.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        doctor.kill().expect("a signal");
        doctor.wait().expect("its end");
        assert_eq!(children.unwrap_or_default(), "", "{milliseconds} ms");
        let left: Vec<_> = fs::read_dir(&directory)
            .expect("the directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert!(left.is_empty(), "{milliseconds} ms: {left:?}");
        assert!(shared().is_empty(), "{milliseconds} ms: {:?}", shared());
    }
    fs::remove_dir(&directory).expect("it is empty");
}

#[test]
fn what_cannot_be_run_is_refused() {
    assert_refused(&["dirty-log", "--ring"], "--ring: only with --on kvm");
    assert_refused(
        &["write-protect", "--stalls"],
        "--stalls: only with --on kvm",
    );
    assert_refused(&["page-table-test", "-c", "0"], "-c: only with --on kvm");
    assert_refused(&["write-protect", "-s", "shmem"], "-s: only with --on kvm");
    assert_refused(
        &["dirty-log", "--on", "kvm", "--scale", "2"],
        "--scale: not with --on kvm",
    );
    assert_refused(
        &["dirty-log", "--on", "kvm", "-s", "foo"],
        "no such backing",
    );
    if !has_kvm() {
        return;
    }
    let refused: &[(&[&str], &str)] = &[
        (&["-v", "60000", "-b", "1M"], "vCPUs in a VM"),
        (&["-b", "16T"], "to spare"),
        (&["--ring", "1000"], "ring"),
        (&["-b", "2M", "-v", "3", "-x", "5"], "-x 5"),
        (&["-p", "0x100"], "-p 0x100"),
        (&["-v", "2", "-c", "0"], "-c"),
        (&["-c", "4000"], "may not run"),
        (&["-s", "anonymous_hugetlb_16gb", "-b", "16G"], "huge pages"),
        (&["-s", "anonymous_hugetlb", "-b", "512G"], "huge pages"),
    ];
    for (arguments, says) in refused {
        assert_refused(&[&["dirty-log", "--on", "kvm"], *arguments].concat(), says);
    }
}

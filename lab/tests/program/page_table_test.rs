//! Tests of faults on one stage-2 table.

use crate::common::{
    self, Line, Scratch, assert_repeatable, number, row, stderr, stdout, tablewright,
};
use serde_json::Value;

fn json(arguments: &(impl Line + ?Sized)) -> Value {
    common::json("page-table-test", arguments)
}

/// A machine of x86-64 with 24 CPUs.
fn x86(more: &str) -> String {
    format!(
        "name = \"x\"\ndescription = \"\"\n[system]\ncore = \"\"\nkind = \"metal\"\ncpus = \
         24\nram_gib = 1\n[architecture]\nformat = \"x86-64\"\n{more}"
    )
}

/// The machine judges every way on EPT, too; nothing has to be cleaned there, and a flush is an
/// interrupt to each.
#[test]
fn a_machine_of_x86_runs_it() {
    let marks = "hardware_access = false\nhardware_dirty = false\n";
    let run = |costs: &str| {
        let profile = Scratch::new("x86-faults.toml", x86(&format!("{marks}{costs}")));
        let line =
            ["--machine", profile.path(), "-s", "anonymous_hugetlb_2mb", "-b", "4M", "-v", "4"];
        json(&line)
    };
    let usual = run("[costs]\ninterrupt = 1500\n");
    let rows = usual["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert_eq!(row["violation"], Value::Null, "{row}");
        assert_eq!(number(row, "cleaned_bytes"), 0.0, "{row}");
    }
    // Three others are told of each flush: that is in each wait for completion.
    let none = run("[costs]\ninterrupt = 0\n");
    let update = |report| number(row(report, "before"), "update_s");
    let flushes = number(row(&usual, "before"), "invalidations_issued");
    let told = update(&usual) - update(&none);
    assert!(told > 0.2 * flushes * 3.0 * 1.5e-6, "{told} s for {flushes}");
}

/// Faults that hold the lock together do not wait for it, and clean and invalidate once for a page.
#[test]
fn faults_in_parallel_do_once_what_was_done_by_each() {
    let report = json("-b 1M -v 8");
    let of = |how| row(&report, how);
    let [before, parallel] = ["before", "parallel"].map(of);
    assert!(number(parallel, "update_s") * 4.0 < number(before, "update_s"));
    assert!(
        number(parallel, "invalidations_issued") * 2.0 < number(before, "invalidations_issued")
    );
    assert!(number(parallel, "create_s") < number(before, "create_s"));
    // Zeros, and the page in their place, each when it is mapped and when it is taken back: slower
    // writers take back the new one.
    assert!(number(parallel, "cleaned_bytes") <= 4.0 * f64::from(1 << 20));
}

/// A page that replaces zeros is mapped at once, read-only: each vCPU that writes takes a fault of
/// permissions, and its TLB is flushed; a vCPU that reads takes no second fault for that.
#[test]
fn a_page_that_replaces_zeros_is_asked_for_by_each_writer() {
    let (vcpus, pages) = (8.0, 256.0);
    let report = json("-b 1M -v 8 --how cmo-in-handler");
    let row = row(&report, "cmo-in-handler");
    let flushes = number(row, "invalidations_issued");
    // Those of writers when pages are created, and of all when they are updated; and a page of
    // zeros is taken back.
    let asked = pages * (vcpus / 2.0 + vcpus);
    assert!(flushes >= asked && flushes <= asked + 2.0 * pages + 1.0, "{flushes}");
    // Zeros are cleaned when they are mapped and when they are taken back, and the page in their
    // place once.
    assert_eq!(number(row, "cleaned_bytes"), 3.0 * f64::from(1 << 20));
}

/// Without a word about the guest the ways differ.
#[test]
fn plain_shows_what_it_is_about() {
    let create = |how| number(row(&json(&["--how", how]), how), "create_s");
    let [before, engine] = ["before", "tablewright"].map(create);
    assert!(before > 9.0 * engine);
}

/// The published change that leaves the cleaning out shows a guest what was not cleaned, if not
/// every page was mapped before: the machine sees it. The same order with the cleaning, and the
/// engine, show nothing.
#[test]
fn a_block_that_was_not_cleaned_is_caught() {
    for backing in [
        &["-s", "anonymous_hugetlb_2mb", "-b", "4M"][..],
        &["-s", "anonymous_hugetlb_1gb", "-b", "1G", "-v", "2"],
    ] {
        let report = json(&[backing, &["--logging-first"]].concat());
        for row in report["rows"].as_array().expect("rows") {
            let caught = row["violation"]
                .as_str()
                .is_some_and(|what| what.starts_with("cache maintenance: "));
            assert_eq!(caught, row["how"] == "install-first", "{row}");
            assert!(row["create_s"].is_null(), "{row}");
        }
    }
    let output = tablewright("page-table-test -s anonymous_hugetlb_2mb -b 4M --logging-first");
    assert!(output.status.success());
    // The phase that is left out took 0.00100 ns.
    let text = stdout(&output);
    let row = text.lines().find(|line| line.starts_with("tablewright "));
    let first = row.and_then(|row| row.split_whitespace().nth(1));
    assert_eq!(first, Some("-"), "{text}");
    assert!(
        stderr(&output)
            .contains("warning: install-first breaks a rule of the machine: cache maintenance")
    );
}

#[test]
fn what_is_cleaned_is_what_the_change_says() {
    let report = json("-s anonymous_hugetlb_2mb -b 8M -v 8");
    let cleaned = |how| number(row(&report, how), "cleaned_bytes") / f64::from(8 << 20);
    // One pass by each vCPU to create; half a pass, page by page, to update; and one by each to
    // rebuild.
    assert!(cleaned("before") > 8.0 + 4.0 + 8.0 - 0.5, "{}", cleaned("before"));
    assert!((cleaned("cmo-in-handler") - 2.5).abs() < 0.01);
    assert!((cleaned("install-first") - 1.5).abs() < 0.01);
    assert_eq!(cleaned("all"), cleaned("install-first-clean"));
    // Each page once.
    assert_eq!(cleaned("tablewright"), 1.0);
    let tables = |how| number(row(&report, how), "tables_allocated");
    assert!(tables("memcache") <= tables("cmo-in-handler"));
    assert!(tables("tablewright") <= 8.0 * 2.0 + 7.0);
    // Installing first leaves the entry invalid for no visit of what was below.
    let invalid = |how| number(row(&report, how), "invalid_longest_us");
    assert!(invalid("install-first") < invalid("install-first-clean"));
    assert!(invalid("install-first-clean") < invalid("cmo-in-handler"));
}

#[test]
fn time_for_each_page_does_not_depend_on_how_much_memory_there_is() {
    let rebuild = |bytes: &str| {
        let report = json(&["-b", bytes, "-v", "80", "--how", "cmo-in-handler"]);
        let row = row(&report, "cmo-in-handler");
        (number(row, "create_s"), number(row, "update_s"))
    };
    let (small, large) = (rebuild("4M"), rebuild("16M"));
    for (small, large) in [(small.0, large.0), (small.1, large.1)] {
        assert!((large / small / 4.0 - 1.0).abs() < 0.03, "{small} {large}");
    }
    let scaled = json("-b 16M -v 80 --how cmo-in-handler --scale 4");
    let scaled = number(row(&scaled, "cmo-in-handler"), "update_s");
    assert!((scaled - small.1 * 4.0).abs() < 1e-9);
}

#[test]
fn the_engine_is_not_slower_than_any_change_that_keeps_the_cleaning() {
    for (backing, bytes, vcpus) in [
        ("anonymous", "2M", "1"),
        ("anonymous", "2M", "16"),
        ("anonymous_thp", "16M", "1"),
        ("anonymous_thp", "16M", "16"),
        ("anonymous_hugetlb_2mb", "16M", "1"),
        ("anonymous_hugetlb_2mb", "16M", "16"),
        ("shmem", "2M", "16"),
    ] {
        let report = json(&["-s", backing, "-b", bytes, "-v", vcpus]);
        for phase in ["create_s", "update_s", "rebuild_s"] {
            let ours = number(row(&report, "tablewright"), phase);
            for how in ["before", "cmo-in-handler", "install-first-clean", "memcache", "all"] {
                let theirs = number(row(&report, how), phase);
                assert!(
                    ours <= theirs * 1.02,
                    "{backing}, {vcpus} vCPUs, {phase}: {ours} and {how} {theirs}"
                );
            }
        }
    }
}

#[test]
fn the_same_arguments_give_the_same_bytes() {
    assert_repeatable("page-table-test -b 4M -s anonymous_thp -v 5");
}

#[test]
fn threads_of_this_computer_run_it() {
    let report = json("--on native -v 2 -b 16M -s anonymous_thp");
    let row = row(&report, "tablewright");
    assert!(["create_s", "update_s", "rebuild_s"].iter().all(|phase| number(row, phase) > 0.0));
    assert!(number(row, "faults") >= 16.0);
}

/// 25 million faults in each phase would take most of an hour, of each way.
#[test]
fn a_run_without_a_scale_ends_soon() {
    let report = json("-v 96 --how tablewright");
    assert_eq!(report["parameters"]["scale"], 128);
    assert_eq!(report["parameters"]["bytes"], 1u64 << 30);
    // Pages that cannot be divided are run as they are.
    assert_eq!(json("-s anonymous_hugetlb_1gb -v 8 --how tablewright")["parameters"]["scale"], 1);
}

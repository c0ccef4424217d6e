//! `tablewright tlb-flush`, as a user runs it.

use crate::common::{self, Line, Scratch, assert_refused, number, stdout, tablewright};
use serde_json::Value;

fn json(arguments: &(impl Line + ?Sized)) -> Value {
    common::json("tlb-flush", arguments)
}

fn rows(arguments: &(impl Line + ?Sized)) -> Vec<Value> {
    let report = json(arguments);
    report["rows"].as_array().expect("rows").clone()
}

#[test]
fn the_published_case_is_fitted_before_and_after() {
    let rows = rows(&["--how", "interrupt", "--how", "space"]);
    for row in &rows {
        assert_eq!(row["fitted"], true);
        assert!(number(row, "error_percent").abs() < 2.0, "{row}");
    }
    assert!(number(&rows[1], "cycle_ns") < number(&rows[0], "cycle_ns"));
    // As published: no more than about one CPU is busy.
    let busy = number(&rows[0], "cpu_time_ns") / number(&rows[0], "time_ns");
    assert!((0.9..1.1).contains(&busy), "{busy}");
}

#[test]
fn with_too_few_physical_cpus_interrupts_wait_for_time_slices() {
    let busy = ["-v", "64", "-t", "64", "--work", "20000", "-r", "1", "-c", "4"];
    let few = rows(&[&busy[..], &["--cpus", "6"]].concat());
    let all = rows(&busy);
    let of = |rows: &[Value], how: &str, key| {
        let row = rows.iter().find(|row| row["how"] == how);
        number(row.expect("each way"), key)
    };
    let slice = 4e6;
    assert!(of(&few, "interrupt", "longest_wait_ns") > slice);
    assert!(of(&all, "interrupt", "longest_wait_ns") < slice / 100.0);
    for how in ["space", "list", "ex", "tablewright"] {
        assert!(of(&few, how, "longest_wait_ns") < slice / 100.0, "{how}");
    }
    assert!(of(&few, "kvm", "waiting_ns") < of(&few, "interrupt", "waiting_ns") / 4.0);
    // A vCPU that waits burns the time of a physical CPU.
    let burnt = of(&few, "interrupt", "cpu_time_ns") - of(&few, "list", "cpu_time_ns");
    assert!(burnt > of(&few, "interrupt", "waiting_ns") / 2.0, "{burnt}");
}

#[test]
fn threads_that_try_before_they_sleep_burn_and_are_waited_for() {
    let run = |cpus: &str, spin: &str| {
        rows(&format!(
            "--how interrupt --how list -v 32 -t 32 -c 2 -r 4 --cpus {cpus} --spin {spin}"
        ))
    };
    let busy = |row: &Value| number(row, "cpu_time_ns") / number(row, "time_ns");
    // Asleep, one is busy, and is never preempted.
    for row in run("4", "0") {
        assert!((0.9..1.2).contains(&busy(&row)), "{row}");
        assert!(number(&row, "longest_wait_ns") < 100e3, "{row}");
    }
    // No more than so long for each of three times that the lock is taken in a cycle.
    let briefly = &run("4", "1")[0];
    assert!(busy(briefly) < 1.3, "{briefly}");
    // Trying, they take all CPUs that there are; where these are too few, what waits for an answer
    // waits for slices.
    let (few, all) = (run("4", "100000"), run("32", "100000"));
    assert!(busy(&few[0]) > 3.5 && busy(&all[0]) > 16.0);
    assert!(number(&few[0], "longest_wait_ns") > 4e6, "{}", few[0]);
    assert!(number(&all[0], "longest_wait_ns") < 200e3, "{}", all[0]);
    assert!(number(&few[1], "longest_wait_ns") < 10e3, "{}", few[1]);
}

#[test]
fn idle_loops_that_stay_are_told_of_each_flush() {
    let run = |stays: &[&str]| {
        let small = ["--how", "interrupt", "-t", "16", "-c", "2", "-r", "4"];
        rows(&[&small[..], stays].concat()).remove(0)
    };
    let (leave, stay) = (run(&[]), run(&["--stays"]));
    // 128 flushes: one vCPU has run meanwhile, or all 15 others have once.
    assert!(number(&leave, "interrupts") < 2.0 * 128.0, "{leave}");
    assert!(number(&stay, "interrupts") > 12.0 * 128.0, "{stay}");
    assert!(number(&stay, "time_ns") > number(&leave, "time_ns"));
}

#[test]
fn no_vcpu_is_told_twice_and_none_is_left_out() {
    for row in rows(&["-r", "2"]) {
        let how = row["how"].as_str().expect("a name");
        let told = number(&row, "interrupts") + number(&row, "told_later");
        match how {
            "invlpgb" | "broadcast" | "ranges" => {
                assert!(told == 0.0 && number(&row, "broadcasts") > 0.0)
            }
            // Those that wait for the lock have no space loaded.
            "tablewright" => assert_eq!((told, number(&row, "hypercalls")), (0.0, 0.0)),
            // At most all 15 others at each of the 640 flushes, and more than none.
            _ => assert!((100.0..=640.0 * 15.0).contains(&told), "{how}: {told}"),
        }
        assert_eq!(number(&row, "hypercalls") > 0.0, ["space", "list", "ex"].contains(&how));
    }
}

#[test]
fn lists_are_as_long_as_the_specification_has_them() {
    let bytes = |pages, ranges| {
        let rows = rows(&format!("--how list -r 1 -c 2 -p {pages} --ranges {ranges}"));
        number(&rows[0], "list_bytes") / number(&rows[0], "hypercalls")
    };
    // 3 words and one for each 4096 pages; or the whole space.
    assert_eq!(bytes("16384", "16"), 8.0 * 7.0);
    assert_eq!(bytes("16385", "16"), 8.0 * 8.0);
    assert_eq!(bytes("65537", "16"), 8.0 * 3.0);
    assert_eq!(bytes("65537", "17"), 8.0 * 20.0);
}

#[test]
fn the_same_arguments_give_the_same_bytes() {
    let run = |threads| {
        let line = format!("tlb-flush --json -r 1 --cpus 3 --work 50 --threads {threads}");
        let output = tablewright(&line);
        assert!(output.status.success());
        output.stdout
    };
    assert_eq!(run("1"), run("2"));
}

#[test]
fn this_computer_runs_it_too() {
    let report = json("--on native -r 1 -t 2 -p 16");
    assert_eq!(report["parameters"]["cycles"], 20);
    let row = &report["rows"][0];
    assert!(number(row, "real_s") > 0.0);
    // A shootdown has a cost where another thread ran beside it.
    let alone = number(row, "unmap_alone_ns");
    assert!(alone > 0.0);
    assert!(row["unmap_told_ns"].as_f64().is_none_or(|told| told > alone / 2.0), "{row}");
}

/// Eight of nine ways cost as much, if the other vCPUs sleep.
#[test]
fn ways_differ_where_all_vcpus_are_busy() {
    let rows = rows("-r 1 -c 1");
    let busy = |how: &str| {
        let row = rows.iter().find(|row| row["how"] == how).expect("a way");
        number(row, "busy_flush_ns")
    };
    assert!(busy("interrupt") > busy("kvm") && busy("kvm") > 5.0 * busy("list"));
    assert!(busy("list") > 5.0 * busy("broadcast"));
    assert!(busy("tablewright") <= busy("list"));
}

/// Its file was left behind by Ctrl-C.
#[test]
fn the_file_of_a_native_run_has_no_name() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_tablewright"))
        .args(["tlb-flush", "--on", "native", "-t", "1", "-r", "100000"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the program runs");
    let path = std::env::temp_dir().join(format!("tablewright-tlb-flush-{}", child.id()));
    let maps = format!("/proc/{}/maps", child.id());
    let runs = (0..500).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        // Not on every system.
        std::fs::read_to_string(&maps).map_or(true, |maps| maps.contains("tablewright-tlb-flush"))
    });
    child.kill().expect("it ends");
    child.wait().expect("it ends");
    assert!(runs);
    assert!(!path.exists(), "{}", path.display());
}

/// A line as `cargo xtask tlb-flush --json` writes it.
fn measured(way: &str, vcpus: u32, processors: u32, counted: &str) -> String {
    let cycles = vcpus * 200;
    let measured = format!(r#"{{"threads":{vcpus},"cycles":{cycles},"pages":16,"time_us":1}}"#);
    format!(r#"{{"vcpus":{vcpus},"processors":{processors},"flush":"{way}","measured":{measured},"#)
        + &format!(r#""counted":{{{counted}}}}}"#)
}

#[test]
fn what_a_guest_has_measured_stands_beside_what_the_machine_counts() {
    let counted = [
        r#""hypercalls: flush of a list":800,"hypercalls: flush of a space":5"#,
        r#""ranges in lists":801,"processors told of a flush":48"#,
        r#""vCPUs that forgot on entry":489"#,
    ];
    let counted = &counted.join(",");
    let lines = [
        measured("hypercall", 4, 2, counted),
        measured("interrupt", 4, 2, r#""interrupts between vCPUs":586"#),
    ];
    let file = Scratch::new("measured", lines.join("\n"));
    let rows = rows(&["--from", file.path()]);
    assert_eq!(rows.len(), 2);
    let of = |row: usize, who: &str, key: &str| number(&rows[row][who], key);
    assert_eq!(of(0, "measured", "hypercalls"), 805.0);
    assert_eq!(of(0, "measured", "ranges"), 801.0);
    assert_eq!(of(0, "measured", "later"), 489.0);
    assert_eq!(of(1, "measured", "told"), 586.0);
    // Each cycle flushes once, one range, as long as another has the space.
    let calls = of(0, "machine", "hypercalls");
    assert!((600.0..=800.0).contains(&calls), "{calls}");
    assert_eq!(of(0, "machine", "ranges"), calls);
    assert_eq!(of(1, "machine", "hypercalls"), 0.0);
    let text = tablewright(&["tlb-flush", "--from", file.path()]);
    assert!(stdout(&text).contains("  later: ") || stdout(&text).contains("later: the machine"));
}

#[test]
fn a_file_that_holds_no_measurements_is_refused() {
    let bad = |text: &str, why: &str| {
        let file = Scratch::new("bad-measured", text);
        assert_refused(&["tlb-flush", "--from", file.path()], why);
    };
    bad("", "no measurement");
    bad("{}", "line 1");
    bad("nothing", "line 1");
    let good = measured("hypercall", 2, 2, "");
    bad(&format!("{good}\n{}", measured("letter", 2, 2, "")), "line 2");
    bad(&measured("hypercall", 2, 4, ""), "no more processors");
    bad(&measured("hypercall", 0, 0, ""), "line 1");
    bad(&measured("hypercall", 60_000, 2, ""), "at most");
    assert_refused("tlb-flush --from /nowhere/at/all", "/nowhere/at/all");
    let file = Scratch::new("good-measured", &good);
    assert_refused(&format!("tlb-flush --from {} --rounds 2", file.path()), "--from");
}

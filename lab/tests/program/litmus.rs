//! `litmus` as a shell sees it.

use std::fs;

use crate::common::{Scratch, assert_refused, stderr, stdout, tablewright};

const UNMAP: &str = "\
test mine
data a = 1
map x leaf(a)
thread
    STR invalid, [pte(x)]
    LDR r0, [x]
ask 0:r0 = 1
";

#[test]
fn the_tests_of_the_program_hold() {
    // `machine/tests/litmus.rs` runs all of them.
    let output = tablewright("litmus --only ROT.inv");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("0 verdicts that do not hold"), "{text}");
    assert!(text.contains("ROT.inv+dmbst") && text.contains("forbidden"), "{text}");
    let list = tablewright("litmus --list");
    assert!(stdout(&list).contains("map.litmus:"));
}

#[test]
fn a_verdict_that_does_not_hold_is_exit_status_1() {
    let wrong = Scratch::new("wrong.litmus", format!("{UNMAP}    expect forbidden\n"));
    let output = tablewright(&["litmus", wrong.path(), "--witness"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("FAILS"));
    assert_eq!(stderr(&output), "error: 2 of 2 verdicts do not hold\n");
    // The execution that shows it.
    assert!(stdout(&output).contains("0: LDR r0, [x]: is performed"));
}

#[test]
fn files_and_directories_of_ones_own() {
    let directory = std::env::temp_dir().join(format!("tablewright-{}-litmus", std::process::id()));
    fs::create_dir(&directory).unwrap();
    let path = directory.to_str().unwrap();
    assert_refused(&["litmus", path], "no file *.litmus");
    let allowed = format!("{UNMAP}    expect allowed\n");
    fs::write(directory.join("a.litmus"), allowed).unwrap();
    fs::write(directory.join("b.txt"), "no test").unwrap();
    let arguments = ["litmus", path, "--json", "--profile", "base", "--seeds", "50"];
    let output = tablewright(&arguments);
    assert_eq!(output.status.code(), Some(0));
    let report: serde_json::Value = serde_json::from_str(stdout(&output)).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["test"], "mine");
    assert_eq!(rows[0]["reached"], true);
    assert!(rows[0]["seed"].is_number());
    assert_eq!(stdout(&tablewright(&arguments)), stdout(&output));
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn what_is_no_test_is_refused() {
    let bad = Scratch::new("bad.litmus", "test t\nthread\n    FLY r0\n");
    let says = "bad.litmus:3: 'FLY' is no instruction of arm64 here";
    assert_refused(&["litmus", bad.path()], says);
    let bytes = Scratch::new("bytes.litmus", [0xff, 0xfe]);
    assert_refused(&["litmus", bytes.path()], "UTF-8");
    assert_refused("litmus /nonexistent.litmus", "nonexistent");
    assert_refused("litmus /dev/zero", "larger than");
    assert_refused("litmus --only nothing-like-it", "no test");
    assert_refused("litmus --profile vax", "vax");
    assert_refused("litmus --list --witness", "cannot be used with");
}

/// Herd is asked of each test by its whole path, and a difference is one line. A path of more than
/// 60 characters was cut.
#[test]
fn outcomes_are_compared_with_those_of_herd() {
    let name = format!("tablewright-{}-{}", std::process::id(), "long-".repeat(12));
    let directory = std::env::temp_dir().join(name);
    fs::create_dir_all(directory.join("below")).unwrap();
    let test = |code: &str| format!("AArch64 t\n{{\n0:X1=x;\n}}\n P0;\n {code};\nexists 0:X0=0\n");
    fs::write(directory.join("below/a.litmus"), test("LDR W0,[X1]")).unwrap();
    fs::write(directory.join("b.litmus"), test("UDF #0")).unwrap();
    // Prints what it is told to, of a file that there is.
    let herd = |ends: &str| {
        let script = format!(
            "for last; do :; done\ntest \"$1\" = -version || cat \"$last\" \\\n\
            >/dev/null && printf 'States 1\\n{ends}\\nOk\\n'\n"
        );
        Scratch::new("herd.sh", script)
    };
    let run = |ends: &str| {
        let herd = herd(ends);
        let command = format!("sh {}", herd.path());
        let output = tablewright(&["litmus", directory.to_str().unwrap(), "--herd", &command]);
        (output.status.code(), stdout(&output).to_owned(), stderr(&output).to_owned())
    };
    let (status, text, said) = run("0:X0=0;");
    assert_eq!(status, Some(0), "{said}");
    let end = "2 outcomes, 4 states, 0 verdicts that do not hold, 1 test refused\n";
    assert!(text.ends_with(end), "{text}");
    assert!(said.ends_with("b.litmus:6: 'UDF #0' is not read\n"), "{said}");
    let (status, _, said) = run("0:X0=1;");
    assert_eq!(status, Some(1));
    let line = "warning: t (base): not with herd: (0:X0=0) only with herd: (0:X0=1)\n";
    assert!(said.contains(line), "{said}");
    assert!(said.ends_with("error: 2 of 2 verdicts do not hold\n"), "{said}");
    fs::remove_dir_all(&directory).unwrap();
}

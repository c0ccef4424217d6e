//! The program as a shell sees it: what it prints where, and how it exits.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn tablewright(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tablewright"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the program runs")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// Status 2, nothing on stdout, one line on stderr that says what is wrong.
fn assert_refused(arguments: &[&str], says: &str) {
    let output = tablewright(arguments);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.matches('\n').count(), 1, "{arguments:?}: {message}");
    assert!(message.starts_with("error: "), "{arguments:?}: {message}");
    assert!(
        !message.starts_with("error: error"),
        "{arguments:?}: {message}"
    );
    assert!(message.contains(says), "{arguments:?}: {message}");
}

/// A file that is gone when the test is.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, contents: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("tablewright-{}-{name}", std::process::id()));
        fs::write(&path, contents).expect("a scratch file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn sizes_that_are_none() {
    for (size, says) in [
        ("0", "more than zero"),
        ("0G", "more than zero"),
        ("", "--ram"),
        ("G", "whole number"),
        ("64Q", "unknown unit 'Q'"),
        ("1.5G", "unknown unit"),
        ("-1G", "unexpected argument"),
        ("5K", "not a multiple of the page size, 4 KiB"),
        ("1234", "not a multiple of the page size"),
        ("99999999999999999999999", "larger than any address"),
        ("16777216T", "larger than any address"),
        ("9999999T", "reaches beyond"),
        ("129T", "reaches beyond 0x800000000000"),
        ("64 G\n\nx", "unknown unit"),
    ] {
        assert_refused(&["map-mem", "--format", "x86-64", "--ram", size], says);
    }
    for (size, says) in [
        ("0", "more than zero"),
        ("4K", "not a multiple of 2 MiB"),
        ("3M", "not a multiple of 2 MiB"),
        ("4Z", "unknown unit 'Z'"),
        ("128T", "address space"),
        ("100T", "to spare"),
    ] {
        assert_refused(&["compare", "--size", size], says);
    }
}

#[test]
fn options_that_do_not_exist_or_do_not_go_together() {
    for (arguments, says) in [
        (&[][..], "tablewright --help"),
        (&["fly"], "fly"),
        (&["map-mem", "--fly"], "--fly"),
        (&["map-mem", "--ram"], "--ram"),
        (&["map-mem", "--rounds", "0", "--ram", "1G"], "1..=10000"),
        (
            &["map-mem", "--rounds", "4294967296", "--ram", "1G"],
            "1..=10000",
        ),
        (&["map-mem", "--rounds", "few", "--ram", "1G"], "few"),
        (
            &["map-mem", "--format", "vax"],
            "possible values: arm64, x86-64",
        ),
        (
            &["map-mem", "--granule", "8K"],
            "possible values: 4K, 16K, 64K",
        ),
        (&["map-mem", "--on", "paper"], "native"),
        (
            &["map-mem", "--iomem", "a", "--ram", "1G"],
            "cannot be used with",
        ),
        (
            &[
                "map-mem",
                "--format",
                "x86-64",
                "--granule",
                "64K",
                "--ram",
                "1G",
            ],
            "x86-64 has pages of 4K only",
        ),
        (
            &[
                "map-mem",
                "--format",
                "x86-64",
                "--address-bits",
                "52",
                "--ram",
                "1G",
            ],
            "48 (four levels) or 57 (five levels)",
        ),
        (
            &[
                "map-mem",
                "--format",
                "arm64",
                "--address-bits",
                "57",
                "--ram",
                "1G",
            ],
            "48 or 52",
        ),
        (
            &[
                "map-mem",
                "--format",
                "arm64",
                "--granule",
                "64K",
                "--ram",
                "68K",
            ],
            "page size, 64 KiB",
        ),
        (&["compare", "--rounds", "0"], "1..=10000"),
        (
            &["compare", "--memory", "hot"],
            "possible values: warm, cold, both",
        ),
        (&["compare", "--only", "linux"], "page-table-generic"),
        (&["compare", "--only"], "--only"),
        (&["completions"], "<SHELL>"),
        (&["completions", "cmd"], "bash"),
    ] {
        assert_refused(arguments, says);
    }
}

#[test]
fn memory_maps_that_are_none() {
    for (name, contents, says) in [
        ("empty", "", "empty"),
        (
            "words",
            "0-fff : System RAM\nhello\n",
            "line 2: expected 'START-END : NAME'",
        ),
        ("no-ram", "0-fff : Reserved\n", "no 'System RAM' in 1 lines"),
        (
            "backwards",
            "1000-fff : System RAM\n",
            "line 1: ends before it starts",
        ),
        (
            "overlap",
            "0-1fff : System RAM\n1000-2fff : System RAM\n",
            "line 2: RAM 0x1000-0x2fff overlaps",
        ),
        (
            "outside",
            "0-fff : System RAM\n  0-1fff : Kernel code\n",
            "line 2: 0x0-0x1fff reaches outside",
        ),
        (
            "indented",
            "    0-fff : System RAM\n",
            "line 1: indented by 4 spaces",
        ),
        (
            "far",
            "10000000000000-10000000000fff : System RAM\n",
            "reaches beyond",
        ),
        (
            "last",
            "0-ffffffffffffffff : System RAM\n",
            "reaches beyond",
        ),
        ("tiny", "10-20 : System RAM\n", "no RAM fills a whole page"),
        (
            "hidden",
            "00000000-00000000 : System RAM\n",
            "use sudo, or --ram SIZE",
        ),
        ("long", &"f".repeat(100_000), "line 1: expected"),
        ("escape", "\u{1b}[2J : x\n", "line 1: expected"),
    ] {
        let file = Scratch::new(name, contents);
        assert_refused(&["map-mem", "--iomem", file.path()], says);
        assert_refused(&["map-mem", "--iomem", file.path()], file.path());
    }
    let binary = Scratch::new("binary", [0xff; 64]);
    assert_refused(&["map-mem", "--iomem", binary.path()], "line 1: expected");
    assert_refused(
        &["map-mem", "--iomem", "/no/such/file"],
        "/no/such/file: No such file",
    );
    assert_refused(&["map-mem", "--iomem", "/"], "/: Is a directory");
    assert_refused(&["map-mem", "--iomem", "/dev/zero"], "larger than 16 MiB");
    assert_refused(&["map-mem", "--iomem", "a\nb"], "a\\nb: No such file");
}

#[test]
fn a_good_memory_map_is_accepted() {
    let file = Scratch::new(
        "good",
        "40000000-7fffffff : System RAM\n  40210000-417fffff : Kernel code\n  41800000-41b9ffff : reserved\n",
    );
    for format in ["arm64", "x86-64"] {
        let output = tablewright(&["map-mem", "--iomem", file.path(), "--format", format]);
        assert_ne!(output.status.code(), Some(2), "{}", stderr(&output));
    }
}

#[test]
fn help_and_version_are_answers() {
    for arguments in [
        &["--help"][..],
        &["-h"],
        &["map-mem", "--help"],
        &["compare", "--help"],
        &["completions", "--help"],
        &["--version"],
    ] {
        let output = tablewright(arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert!(stdout(&output).contains("tablewright"), "{arguments:?}");
        assert_eq!(stderr(&output), "", "{arguments:?}");
    }
    let help = tablewright(&["--help"]);
    for command in ["map-mem", "compare", "completions"] {
        assert!(stdout(&help).contains(command), "{command}");
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = tablewright(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        for word in ["map-mem", "compare", "iomem"] {
            assert!(stdout(&output).contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn a_comparison_as_json_has_every_sample_and_the_right_ratios() {
    let output = tablewright(&["compare", "--size", "8M", "--rounds", "3", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_str(stdout(&output)).expect("JSON");

    assert_eq!(json["experiment"], "compare");
    assert_eq!(json["parameters"]["size_bytes"], 8 << 20);
    assert_eq!(json["parameters"]["entries"], 2048);
    assert_eq!(json["parameters"]["tables"], 4 + 3);
    assert!(json["warnings"].is_array());

    let rows = json["rows"].as_array().expect("rows");
    let of = |memory: &'static str, operation: &'static str| {
        rows.iter()
            .filter(move |row| row["memory"] == memory && row["operation"] == operation)
    };
    for memory in ["warm", "cold"] {
        for operation in ["map", "protect", "unmap"] {
            let limit = of(memory, operation)
                .find(|row| row["crate"] == "limit")
                .expect("a limit");
            assert!(limit["ratio_to_best_other"].is_null());
            for row in of(memory, operation) {
                assert_eq!(row["threads"], 1);
                assert_eq!(row["samples"].as_array().map(Vec::len), Some(3));
                let ns = row["ns_per_entry"].as_f64().expect("a figure");
                let ratio = row["ratio_to_limit"].as_f64().expect("a ratio");
                let expected = ns / limit["ns_per_entry"].as_f64().expect("a figure");
                assert!((ratio - expected).abs() < 1e-9 * expected, "{row}");
            }
            for name in ["aarch64-paging", "page-table-generic"] {
                assert!(
                    of(memory, operation).any(|row| row["crate"] == name),
                    "{name}"
                );
            }
        }
        assert!(of(memory, "exchange").count() > 0);
        assert!(of(memory, "detach").all(|row| row["ratio_to_limit"].is_null()));
    }
}

#[test]
fn a_comparison_for_people_names_what_was_measured() {
    let output = tablewright(&[
        "compare",
        "--size",
        "2M",
        "--rounds",
        "1",
        "--memory",
        "warm",
        "--only",
        "aarch64-paging",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "2 MiB mapped with 512 entries",
        "warm",
        "limit",
        "aarch64-paging 0.12.3",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("page-table-generic"), "{text}");
}

#[test]
fn nobody_listening_is_not_an_error() {
    // `head` may be gone before the first byte or after; neither may show.
    for arguments in [
        "completions bash",
        "--help",
        "compare --size 2M --rounds 1 --memory warm --json",
    ] {
        let output = Command::new("sh")
            .args([
                "-c",
                &format!("{{ \"$0\" {arguments}; echo \"status $?\" >&2; }} | true"),
            ])
            .arg(env!("CARGO_BIN_EXE_tablewright"))
            .output()
            .expect("a shell");
        assert_eq!(stderr(&output), "status 0\n", "{arguments}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let Ok(full) = fs::OpenOptions::new().write(true).open("/dev/full") else {
        return;
    };
    let output = Command::new(env!("CARGO_BIN_EXE_tablewright"))
        .args(["completions", "bash"])
        .stdout(full)
        .output()
        .expect("the program runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: cannot write the result"));
}

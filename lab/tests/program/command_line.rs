//! The program as a shell sees it: what it prints where, and how it exits.

use std::fs;
use std::process::Command;

use crate::common::{Scratch, assert_refused, stderr, stdout, tablewright};

#[test]
fn a_size_of_several_lines_is_refused_in_one() {
    assert_refused(&["map-mem", "--ram", "64 G\n\nx"], "unknown unit");
}

/// Without a command three questions are answered, on a screen of 80 columns.
#[test]
fn the_first_run_answers_three_questions() {
    let output = tablewright(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for answer in [
        "Does it work here?",
        "is where it should be",
        "Is it fast?",
        "64 MiB unmap",
        "1 page protect",
        "What is it for?",
        "a dirty log of 3 GiB starts",
        "What next",
    ] {
        assert!(text.contains(answer), "{answer}: {text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn memory_maps_that_are_none() {
    for (name, contents, says) in [
        ("empty", "", "empty"),
        ("words", "0-fff : System RAM\nhello\n", "line 2: expected 'START-END : NAME'"),
        ("no-ram", "0-fff : Reserved\n", "no 'System RAM' in 1 line"),
        ("backwards", "1000-fff : System RAM\n", "line 1: ends before it starts"),
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
        ("indented", "    0-fff : System RAM\n", "line 1: indented by 4 spaces"),
        ("far", "10000000000000-10000000000fff : System RAM\n", "reaches beyond"),
        ("last", "0-ffffffffffffffff : System RAM\n", "reaches beyond"),
        ("tiny", "10-20 : System RAM\n", "no RAM fills a whole page"),
        ("hidden", "00000000-00000000 : System RAM\n", "use sudo, or --ram SIZE"),
        ("long", &"f".repeat(100_000), "line 1: expected"),
        ("escape", "\u{1b}[2J : x\n", "line 1: expected"),
    ] {
        let file = Scratch::new(name, contents);
        assert_refused(&["map-mem", "--iomem", file.path()], says);
        assert_refused(&["map-mem", "--iomem", file.path()], file.path());
    }
    let binary = Scratch::new("binary", [0xff; 64]);
    assert_refused(&["map-mem", "--iomem", binary.path()], "line 1: expected");
    assert_refused("map-mem --iomem /no/such/file", "/no/such/file: No such file");
    assert_refused("map-mem --iomem /", "/: Is a directory");
    assert_refused("map-mem --iomem /dev/zero", "larger than 16 MiB");
    assert_refused("map-mem --iomem a\nb", "a\\nb: No such file");
}

/// Runs `map-mem --json`, which must succeed, and checks the shape that every report of it has.
/// Returns the row.
fn mapped(arguments: &[&str]) -> serde_json::Value {
    let mut all = vec!["map-mem", "--rounds", "3", "--json"];
    all.extend(arguments);
    let output = tablewright(&all);
    assert!(output.status.success(), "{all:?}: {}", stderr(&output));
    assert_eq!(stderr(&output), "", "{all:?}");
    let json: serde_json::Value = serde_json::from_str(stdout(&output)).expect("JSON");
    assert_eq!(json["experiment"], "map-mem");
    assert!(json["parameters"].is_object());
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 1);
    let row = rows[0].clone();
    assert_eq!(row["crate"], "tablewright");
    assert_eq!(row["threads"], 1);
    for samples in ["samples_ns", "bare_samples_ns"] {
        assert_eq!(row[samples].as_array().map(Vec::len), Some(3));
    }
    let figure = |name: &str| row[name].as_f64().expect("a figure");
    let ratio = figure("ns_per_entry") / figure("bare_ns_per_entry");
    assert!((figure("ratio_to_bare") - ratio).abs() < 1e-6 * ratio, "{row}");
    row
}

#[test]
fn every_format_maps_its_memory_and_is_checked() {
    // 512 MiB: with the largest leaves, then with pages; the tables are one path down, and those of
    // the pages.
    for (format, granule, bits, largest, pages) in [
        ("x86-64", "4K", "48", (256, 3), (131_072, 3 + 256)),
        ("x86-64", "4K", "57", (256, 4), (131_072, 4 + 256)),
        ("arm64", "4K", "48", (256, 3), (131_072, 3 + 256)),
        ("arm64", "4K", "52", (256, 4), (131_072, 4 + 256)),
        ("arm64", "16K", "48", (16, 3), (32_768, 3 + 16)),
        ("arm64", "16K", "52", (16, 3), (32_768, 3 + 16)),
        ("arm64", "64K", "48", (1, 2), (8_192, 2 + 1)),
        ("arm64", "64K", "52", (1, 2), (8_192, 2 + 1)),
    ] {
        let shape =
            ["--ram", "512M", "--format", format, "--granule", granule, "--address-bits", bits];
        let found = |row: serde_json::Value| {
            (row["entries"].as_u64().unwrap(), row["tables"].as_u64().unwrap())
        };
        assert_eq!(found(mapped(&shape)), largest, "{shape:?}");
        let row = mapped(&[&shape[..], &["--pages-only"]].concat());
        assert_eq!(found(row), pages, "{shape:?}");
    }
}

#[test]
fn a_memory_map_with_a_kernel_in_it_is_mapped() {
    let file = Scratch::new(
        "good",
        "40000000-7fffffff : System RAM\n  40210000-417fffff : Kernel code\n  41800000-41b9ffff : \
         reserved\n",
    );
    for format in ["arm64", "x86-64"] {
        let row = mapped(&["--iomem", file.path(), "--format", format, "--pages-only"]);
        assert_eq!(row["entries"], 262_144);
        let output = tablewright(&["map-mem", "--iomem", file.path(), "--format", format]);
        assert!(output.status.success(), "{}", stderr(&output));
        for words in [
            "1 GiB of RAM in 3 ranges",
            "of it kernel text",
            "all checked",
            "bare: zero and fill",
            "tablewright 0.",
        ] {
            assert!(stdout(&output).contains(words), "{words}: {}", stdout(&output));
        }
    }
}

#[test]
fn this_computers_own_memory_is_mapped_or_there_is_a_way_out() {
    let output = tablewright("map-mem --rounds 1");
    if output.status.success() {
        assert!(stdout(&output).contains("(/proc/iomem)"), "{}", stdout(&output));
    } else {
        assert_refused("map-mem --rounds 1", "--ram SIZE");
    }
}

#[test]
fn help_and_version_are_answers() {
    for arguments in [
        &["--help"][..],
        &["-h"],
        &["map-mem", "--help"],
        &["compare", "--help"],
        &["fit", "--help"],
        &["reproduce", "--help"],
        &["completions", "--help"],
        &["--version"],
    ] {
        let output = tablewright(arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert!(stdout(&output).contains("tablewright"), "{arguments:?}");
        assert_eq!(stderr(&output), "", "{arguments:?}");
    }
    let help = tablewright("--help");
    for command in ["map-mem", "fit", "reproduce", "compare", "completions"] {
        assert!(stdout(&help).contains(command), "{command}");
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = tablewright(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        for word in ["map-mem", "compare", "reproduce", "iomem", "kunpeng-920"] {
            assert!(stdout(&output).contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn a_comparison_as_json_has_every_sample_and_the_right_ratios() {
    let output = tablewright("compare --size 8M --rounds 3 --json");
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_str(stdout(&output)).expect("JSON");

    assert_eq!(json["experiment"], "compare");
    assert_eq!(json["parameters"]["size_bytes"], 8 << 20);
    assert_eq!(json["parameters"]["entries"], 2048);
    assert_eq!(json["parameters"]["tables"], 4 + 3);
    assert!(json["warnings"].is_array());

    let rows = json["rows"].as_array().expect("rows");
    let of = |memory: &'static str, operation: &'static str| {
        rows.iter().filter(move |row| row["memory"] == memory && row["operation"] == operation)
    };
    for memory in ["warm", "cold"] {
        for operation in ["map", "protect", "unmap"] {
            let bare =
                of(memory, operation).find(|row| row["crate"] == "bare").expect("a bare loop");
            assert!(bare["ratio_to_best_other"].is_null());
            for row in of(memory, operation) {
                assert_eq!(row["threads"], 1);
                assert_eq!(row["samples_ns"].as_array().map(Vec::len), Some(3));
                let ns = row["ns_per_entry"].as_f64().expect("a figure");
                let ratio = row["ratio_to_bare"].as_f64().expect("a ratio");
                let expected = ns / bare["ns_per_entry"].as_f64().expect("a figure");
                assert!((ratio - expected).abs() < 1e-9 * expected, "{row}");
            }
            for name in ["tablewright", "aarch64-paging", "page-table-generic"] {
                assert!(of(memory, operation).any(|row| row["crate"] == name), "{name}");
            }
        }
        assert!(of(memory, "exchange").count() > 0);
        assert!(of(memory, "detach").all(|row| row["ratio_to_bare"].is_null()));
        for operation in ["protect-live", "protect-hardware", "detach"] {
            let ours = of(memory, operation).find(|row| row["crate"] == "tablewright");
            assert!(ours.is_some(), "{operation}");
        }
        let live = of(memory, "protect-live").next().expect("a live row");
        assert!(live["ratio_to_dead"].is_number() && live["ratio_to_bare"].is_number());
        let hardware = of(memory, "protect-hardware").next().expect("a row");
        let bare = of(memory, "exchange").next().expect("a bare loop");
        let figure = |row: &serde_json::Value| row["ns_per_entry"].as_f64().expect("a figure");
        let ratio = hardware["ratio_to_bare"].as_f64().expect("a ratio");
        let expected = figure(hardware) / figure(bare);
        assert!((ratio - expected).abs() < 1e-9 * expected, "{hardware}");
    }
}

#[test]
fn a_comparison_by_pages_as_json_has_a_row_for_each_subject_and_the_right_ratios() {
    let output = tablewright("compare --pages 512,1 --rounds 2 --json");
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_str(stdout(&output)).expect("JSON");
    assert_eq!(json["experiment"], "compare");
    assert_eq!(json["parameters"]["pages"], serde_json::json!([1, 512]), "upwards");
    let tables = if cfg!(debug_assertions) { 16 } else { 512 };
    assert_eq!(json["parameters"]["range_bytes"], tables << 21);
    assert!(json["warnings"].is_array());

    let rows = json["rows"].as_array().expect("rows");
    let figure = |row: &serde_json::Value| row["ns_per_call"].as_f64().expect("a figure");
    for (format, others) in [
        ("arm64", ["aarch64-paging", "page-table-generic"]),
        ("x86-64", ["page-table-generic", "tablewright"]),
    ] {
        for pages in [1, 512] {
            let of = |operation: &'static str| {
                rows.iter().filter(move |row| {
                    row["format"] == format
                        && row["pages"] == pages
                        && row["operation"] == operation
                })
            };
            let exchange = figure(of("exchange").next().expect("an exchange"));
            for operation in ["map", "protect", "unmap", "query"] {
                let row = |name: &str, flags: bool| {
                    let is = |row: &&serde_json::Value| {
                        row["crate"] == name && row["hardware_flags"] == flags
                    };
                    of(operation).find(is).expect("a row")
                };
                assert!(row("bare", false)["ratio_to_best_other"].is_null());
                for name in others {
                    row(name, false);
                }
                let best = of(operation)
                    .filter(|row| row["crate"] != "bare" && row["crate"] != "tablewright")
                    .map(figure)
                    .min_by(f64::total_cmp)
                    .expect("another crate");
                for flags in [false, true] {
                    let ours = row("tablewright", flags);
                    assert_eq!(ours["samples_ns"].as_array().map(Vec::len), Some(2));
                    let near = |ratio: &serde_json::Value, expected: f64| {
                        let ratio = ratio.as_f64().expect("a ratio");
                        assert!((ratio - expected).abs() < 1e-9 * expected, "{ours}");
                    };
                    near(&ours["ratio_to_best_other"], best / figure(ours));
                    let both = &ours["ratio_to_best_other_and_exchanges"];
                    if flags {
                        near(both, (best + exchange) / figure(ours));
                    } else {
                        assert!(both.is_null());
                    }
                    let same = matches!(operation, "map" | "query");
                    let bare = row("bare", flags && !same);
                    near(&ours["ratio_to_bare"], figure(ours) / figure(bare));
                }
            }
            // One fault is about one page.
            assert_eq!(of("fault").count(), if pages == 1 { 3 } else { 0 });
        }
    }
}

#[test]
fn a_comparison_by_pages_for_people_and_as_a_picture() {
    let picture = Scratch::new("pages.svg", "");
    let output = tablewright(&format!(
        "compare --pages 64 --rounds 1 --only tablewright aarch64-paging --plot {}",
        picture.path()
    ));
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "arm64: nanoseconds for each call",
        "aarch64-paging 0.12.3",
        "bare, A/D",
        "protect, A/D: vs best",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("page-table-generic"), "{text}");
    let svg = fs::read_to_string(picture.path()).expect("a picture");
    for words in ["Nanoseconds for each page", "map, arm64", "aarch64-paging"] {
        assert!(svg.contains(words), "{words}");
    }
}

#[test]
fn a_comparison_for_people_names_what_was_measured() {
    let output = tablewright("compare --size 2M --rounds 1 --memory warm --only aarch64-paging");
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for words in ["2 MiB mapped with 512 entries", "warm", "bare", "aarch64-paging 0.12.3"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("page-table-generic"), "{text}");
    assert!(!text.contains("aim of"), "{text}");
    let ours = tablewright("compare --size 2M --rounds 1 --memory warm");
    assert!(stdout(&ours).contains("aim of tablewright"), "{}", stdout(&ours));
}

/// The terminals that are narrowest have 80 columns.
#[test]
fn tables_for_people_fit_a_terminal() {
    for arguments in ["compare --size 2M --rounds 1", "map-mem --ram 1T --rounds 1"] {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let output = tablewright(&arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        let (_, tables) = stdout(&output).split_once("\n\n").expect("a table");
        for line in tables.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

/// A narrow terminal: what does not fit beside the names comes below.
#[test]
fn no_table_is_wider_than_the_columns_that_there_are() {
    for arguments in [
        "dirty-log -v 2 -b 2M -i 1",
        "litmus --only CoWTf",
        "litmus --list",
        "migrate --memory 1M --set 1M --logging manual",
        "page-table-test -v 1 -b 2M",
        "compare --pages 1 --rounds 1",
        "tlb-flush -r 1 -c 1",
        "write-protect -b 1M -v 2",
    ] {
        // Outcomes and names of litmus tests are long.
        let columns = match arguments.starts_with("litmus") {
            true => 80,
            false => 60,
        };
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tablewright"))
            .args(arguments.split(' '))
            .env("COLUMNS", columns.to_string())
            .output()
            .expect("the program runs");
        assert!(output.status.success(), "{}", stderr(&output));
        let (mut is_title, mut is_table) = (true, false);
        for (line, next) in stdout(&output).lines().zip(stdout(&output).lines().skip(1)) {
            is_title &= !line.is_empty();
            // From the line below a header on, up to the next paragraph.
            is_table = line.starts_with('─') || is_table && !line.is_empty();
            let is_header = next.starts_with('─');
            let is_wide = line.chars().count() > columns;
            // A star of the table is explained below it, in words that a terminal may break.
            let is_words = line.starts_with("* ") || !is_title && !is_table && !is_header;
            assert!(!is_wide || is_words, "{arguments}: {line}");
        }
    }
}

#[test]
fn help_is_no_wider_than_the_columns_that_there_are() {
    for command in ["map-mem", "dirty-log", "tlb-flush", "migrate", "fit"] {
        for help in ["-h", "--help"] {
            let output = std::process::Command::new(env!("CARGO_BIN_EXE_tablewright"))
                .args([command, help])
                .env("COLUMNS", "80")
                .output()
                .expect("the program runs");
            for line in stdout(&output).lines() {
                assert!(line.chars().count() <= 80, "{command}: {line}");
            }
        }
    }
}

#[test]
fn a_comparison_is_drawn() {
    let file = Scratch::new("drawn.svg", "what was there before");
    let arguments = ["compare", "--size", "2M", "--rounds", "1"];
    for more in [&[][..], &["--memory", "cold", "--json"]] {
        let output = tablewright(&[&arguments[..], &["--plot", file.path()], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!output.stdout.is_empty());
        let svg = fs::read_to_string(file.path()).expect("a picture");
        let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
        let texts: Vec<&str> = document
            .descendants()
            .filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "text")))
            .filter_map(|node| node.text())
            .map(str::trim)
            .collect();
        let has = |start: &str| texts.iter().any(|text| text.starts_with(start));
        for start in [
            "tablewright 0.",
            "aarch64-paging 0.12.3",
            "page-table-generic 0.9.1",
            "bare",
            "map",
            "protect",
            "unmap",
            if more.is_empty() { "Table memory warm" } else { "Table memory cold" },
        ] {
            assert!(has(start), "{start}: {texts:?}");
        }
        #[cfg(target_arch = "x86_64")]
        for start in ["page_table_multiarch 0.6.2", "x86_64 0.15.5"] {
            assert!(has(start), "{start}: {texts:?}");
        }
    }
}

#[test]
fn a_picture_that_has_nowhere_to_go_is_refused_before_anything_is_measured() {
    // The size would take minutes.
    for (file, says) in [
        ("/no/such/directory/a.svg", "No such file or directory"),
        ("", "--plot"),
        ("/", "is a directory"),
        ("/dev/null", "not a regular file"),
        ("/dev/null/a.svg", "Not a directory"),
        ("..", "is a directory"),
        ("/no/such\ndirectory/a.svg", "/no/such\\ndirectory/a.svg"),
    ] {
        assert_refused(&["compare", "--rounds", "10000", "--plot", file], says);
    }
    assert_refused("compare --plot", "--plot");
}

#[test]
fn a_failed_comparison_leaves_the_old_picture() {
    let file = Scratch::new("kept.svg", "old");
    assert_refused(&format!("compare --size 100T --plot {}", file.path()), "to spare");
    assert_eq!(fs::read(file.path()).expect("the file"), b"old");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    // `head` may be gone before the first byte or after; neither may show.
    for arguments in
        ["completions bash", "--help", "compare --size 2M --rounds 1 --memory warm --json"]
    {
        let output = Command::new("sh")
            .args(["-c", &format!("{{ \"$0\" {arguments}; echo \"status $?\" >&2; }} | true")])
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

//! Tests of logging a guest's writes, and of disabling the log.

use crate::common::{
    self, Line, Scratch, assert_repeatable, number, row, stderr, stdout, tablewright,
};
use serde_json::Value;

fn json(arguments: &(impl Line + ?Sized)) -> Value {
    common::json("dirty-log", arguments)
}

const PUBLISHED: [&str; 7] = ["-s", "anonymous_hugetlb_1gb", "-v", "416", "-b", "1G", "-e"];

/// How many zaps there were, and the milliseconds that the longest took at least.
fn zaps(row: &Value) -> (u64, u64) {
    let buckets = row["zaps"].as_array().expect("buckets");
    let count = |bucket: &Value| bucket["count"].as_u64().expect("a count");
    let longest = buckets.iter().rfind(|bucket| count(bucket) > 0);
    let from = longest.map_or(0, |bucket| bucket["from_ms"].as_u64().expect("ms"));
    (buckets.iter().map(count).sum(), from)
}

/// Without a word about the guest the ways differ.
#[test]
fn plain_shows_what_it_is_about() {
    let report = json("-i 1");
    let disable = |how: &str| {
        let rows = report["rows"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["how"] == how);
        row.and_then(|row| row["disable_s"].as_f64()).expect("a time")
    };
    assert!(disable("before") > 10.0 * disable("tablewright"));
}

/// Pages are not collapsed: there is nothing that would take 0.000 ns.
#[test]
fn what_is_not_there_to_be_done_takes_no_time() {
    let output = tablewright("dirty-log -b 1M -i 1");
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(!text.contains(" 0.000 ns"), "{text}");
    assert!(text.contains("no leaf becomes large again"), "{text}");
}

/// Every run checks what it finds in the log; these are all the ways to make one.
#[test]
fn every_page_that_is_written_is_in_the_log() {
    for arguments in [
        "-b 1M -v 4 -i 3 -e",
        "-b 4M -v 4 -s anonymous_thp -x 8",
        "-b 4M -v 4 -s anonymous_thp -g -e",
        "-b 4M -v 2 -s shmem -a -w 50 -r 7",
        "-b 2M -v 3 -s anonymous_hugetlb_2mb -w 0 -e",
    ] {
        let report = json(arguments);
        let iterations = report["parameters"]["iterations"].as_u64();
        for row in report["rows"].as_array().expect("rows") {
            let times = |key: &str| row[key].as_array().expect("times").len() as u64;
            assert_eq!(Some(times("dirty_s")), iterations, "{row}");
            assert_eq!(times("get_s"), times("dirty_s"));
            let clears = if arguments.contains("-g") { 0 } else { times("dirty_s") };
            assert_eq!(times("clear_s"), clears);
        }
    }
}

#[test]
fn no_vcpu_waits_for_what_is_recovered_in_place() {
    let report = json("-s anonymous_hugetlb_2mb -v 96 -b 2M -e");
    let of = |how| row(&report, how);
    let stall = |how| number(of(how), "stall_longest_us");
    // A vCPU in the way before the change waits for all of it, and after it for the flush alone.
    for frozen in ["before", "flush-first"] {
        assert!(stall(frozen) > 3.0 * stall("after"), "{frozen}");
        assert!(number(of(frozen), "retries") > 5.0 * number(of("after"), "retries"));
        assert!(number(of(frozen), "disable_s") > 1.05 * number(of("after"), "disable_s"));
    }
    // Its vCPUs remember the table until the flush, and fault there; nothing is frozen for them.
    let unfrozen = number(of("unfreeze-first"), "disable_s");
    assert!(unfrozen * 1.05 < number(of("before"), "disable_s"));
    let ours = of("tablewright");
    assert!(number(ours, "disable_s") * 10.0 < number(of("after"), "disable_s"));
    assert!(stall("tablewright") < 10.0, "{ours}");
    // Nothing is frozen there, either, and it is flushed when the thread gives way, and at the end.
    let in_place = of("in-place");
    assert!(stall("in-place") < 10.0, "{in_place}");
    assert!((1.0..=3.0).contains(&number(in_place, "flushes")), "{in_place}");
    assert!(number(in_place, "disable_s") < number(of("after"), "disable_s") * 1.02);
    assert_eq!(zaps(in_place).0, 0);
    // One for each table, and one for 64 of them.
    assert_eq!(zaps(of("after")).0, 96);
    assert_eq!(number(of("after"), "flushes"), 96.0);
    assert_eq!((number(ours, "flushes"), number(ours, "retries")), (2.0, 0.0));
    assert_eq!(zaps(ours).0, 0);
}

/// A table of a part stands for a tree, or for several tables.
#[test]
fn a_part_takes_as_long_as_all_of_it() {
    let of = |scale| json(&format!("-s anonymous_hugetlb_2mb -v 2 -b 32M -e --scale {scale}"));
    let (all, part) = (of("1"), of("4"));
    for how in ["before", "after", "tablewright"] {
        let time = |report| number(row(report, how), "disable_s");
        // What the engine flushes at once is less with a part.
        let (most, least) = if how == "tablewright" { (1.6, 0.9) } else { (1.1, 0.9) };
        let ratio = time(&part) / time(&all);
        assert!((least..most).contains(&ratio), "{how}: {ratio}");
        assert_eq!(zaps(row(&all, how)).0, zaps(row(&part, how)).0);
    }
    let deep = json("-s anonymous_hugetlb_1gb -v 2 -b 1G -e");
    assert_eq!(deep["parameters"]["scale"], 512);
    let (zapped, shallow) = (row(&deep, "after"), row(&all, "after"));
    assert_eq!(zaps(zapped).0, 2);
    // 2 GiB have 32 times as many pages as 64 MiB.
    let ratio = number(zapped, "disable_s") / number(shallow, "disable_s");
    assert!((20.0..40.0).contains(&ratio), "{ratio}");
}

#[test]
fn the_same_arguments_give_the_same_bytes() {
    let line = "dirty-log -s anonymous_thp -v 3 -b 4M -e -a -w 60";
    assert_repeatable(line);
    let picture = Scratch::new("dirty-log.svg", "");
    let once = tablewright(line);
    let other = tablewright(&format!("{line} -r 2 --plot {}", picture.path()));
    assert_ne!(stdout(&once), stdout(&other));
    let picture = std::fs::read_to_string(picture.path()).expect("a picture");
    assert!(picture.contains("longest stall"));
}

#[test]
#[ignore = "forty million accesses for each way: minutes without optimisation: `.ci/run all` runs \
         it with"]
fn the_published_case() {
    let report = json(&PUBLISHED);
    let of = |how| row(&report, how);
    let error = |how| number(of(how), "error_percent");
    // Fitted, and predicted.
    assert!(error("before").abs() < 2.0, "{}", error("before"));
    assert_eq!((&of("before")["fitted"], &of("after")["fitted"]), (&true.into(), &false.into()));
    assert!(error("after").abs() < 20.0, "{}", error("after"));
    // The shape: half a second to four seconds for most of them.
    let slow: u64 = of("before")["zaps"].as_array().expect("buckets")[9..]
        .iter()
        .map(|bucket| bucket["count"].as_u64().expect("a count"))
        .sum();
    assert!((300..=360).contains(&slow), "{slow}, published 340");
    assert_eq!(zaps(of("before")), (416, 2048));
    // Two peaks after it: of 416 at most a tenth in another bin than published.
    let published = [(128, 12), (256, 166), (512, 101), (1024, 137)];
    let buckets = of("after")["zaps"].as_array().expect("buckets");
    let count = |from: u64| {
        let bucket = buckets.iter().find(|bucket| bucket["from_ms"] == from);
        bucket.map_or(0, |bucket| bucket["count"].as_u64().expect("a count"))
    };
    let right: u64 = published.iter().map(|(from, zaps)| count(*from).min(*zaps)).sum();
    assert!(right >= 375, "{right} of 416");
    assert!(count(512) < count(256) && count(512) < count(1024));
    let ours = of("tablewright");
    assert!(number(ours, "disable_s") < 33.65, "a tenth of what was published");
    assert!(number(ours, "stall_longest_us") <= 1000.0, "{ours}");
    assert_eq!(number(ours, "flushes"), 7.0);
}

#[test]
#[ignore = "a quarter of a million pages: a minute without optimisation: `.ci/run all` runs it \
         with"]
fn blocks_of_2_mib() {
    let report = json("-s anonymous_hugetlb_2mb -v 64 -b 4G -e");
    let (after, ours) = (row(&report, "after"), row(&report, "tablewright"));
    assert_eq!(zaps(after).0, 64 * 2048);
    assert!(number(ours, "disable_s") * 10.0 < number(after, "disable_s"));
    assert!(number(ours, "stall_longest_us") <= 1000.0, "{ours}");
    assert_eq!(number(ours, "flushes") * 64.0, number(after, "flushes"));
}

/// 4,096 pages of each of 4 vCPUs: hardware's log is full with 512, and seven times before the last
/// of a pass is.
#[test]
fn hardware_logs_what_is_written() {
    let guest = ["-v", "4", "-b", "16M", "--how", "tablewright"];
    let of = |more: &[&str]| json(&[&guest, more].concat());
    let (faults, logged) = (of(&[]), of(&["--log", "modification"]));
    let (faults, logged) = (row(&faults, "tablewright"), row(&logged, "tablewright"));
    assert_eq!(number(faults, "log_full_exits"), 0.0);
    assert_eq!(number(logged, "log_full_exits"), 2.0 * 4.0 * 7.0);
    let dirty = |row: &Value| row["dirty_s"][1].as_f64().expect("seconds");
    // Each page was a fault, and now each 512 are an exit. The line that a write fetches is fetched
    // all the same.
    assert!(dirty(faults) > 4.0 * dirty(logged), "{faults} {logged}");
    // With huge pages under it, and read, cleared and disabled in one.
    let report = json("-s anonymous_hugetlb_2mb -v 4 -b 16M -e -g --log modification");
    let ours = row(&report, "tablewright");
    assert_eq!(number(ours, "log_full_exits"), 2.0 * 4.0 * 7.0);
}

#[test]
fn a_log_that_begins_with_everything_costs_its_first_pass_nothing() {
    let guest = ["-s", "anonymous_hugetlb_2mb", "-v", "2", "-b", "8M", "-e"];
    let of = |more: &[&str]| json(&[&guest, more].concat());
    let (usual, all) = (of(&["--how", "tablewright"]), of(&["--how", "tablewright", "--all-set"]));
    let (usual, all) = (row(&usual, "tablewright"), row(&all, "tablewright"));
    let dirty = |row: &Value, pass: usize| row["dirty_s"][pass].as_f64().expect("seconds");
    assert!(number(all, "enable_s") < number(usual, "enable_s") / 100.0);
    assert!(dirty(all, 0) < dirty(usual, 0) / 100.0);
    // What was cleared faults from then on.
    assert!(dirty(all, 1) >= dirty(usual, 1));
}

#[test]
fn vcpus_overlap_and_are_guests_of_a_guest() {
    let guest = ["-v", "4", "-b", "4M", "--how", "tablewright"];
    let of = |more: &[&str]| {
        let report = json(&[&guest, more].concat());
        row(&report, "tablewright")["dirty_s"][1].as_f64().expect("seconds")
    };
    let (own, all, nested) = (of(&[]), of(&["-o"]), of(&["-n"]));
    // Each accesses all of it, and faults where another was not first.
    assert!(all > 1.5 * own, "{own} {all}");
    assert!(nested > own);
    // Each has a CPU of its own, whichever it is.
    assert_eq!(own, of(&["-c", "7,1,2,3"]));
}

#[test]
fn arm64_logs_by_faults_and_puts_blocks_back() {
    let guest = ["-s", "anonymous_hugetlb_2mb", "-v", "4", "-b", "8M", "-e"];
    let report = json(&[&guest[..], &["--machine", "kunpeng-920"]].concat());
    assert_eq!(report["rows"].as_array().expect("rows").len(), 3);
    let ours = row(&report, "tablewright");
    assert!(number(ours, "disable_s") > 0.0 && number(ours, "kicks") == 0.0);
    // The kernels leave it to faults.
    assert_eq!(number(row(&report, "after"), "flushes"), 0.0);
}

/// One lock for all faults is one queue, a line that they share is a shorter one, and the engine
/// has none.
#[test]
fn the_first_writes_of_many_vcpus_queue_for_a_kernels_lock() {
    let dirty = |vcpus: &str| {
        let line = "-s anonymous_thp -b 4M -i 1 --split fault --machine arm64-48-vcpus -v";
        let report = json(&[&line.split(' ').collect::<Vec<_>>()[..], &[vcpus]].concat());
        ["before", "after", "tablewright"]
            .map(|how| row(&report, how)["dirty_s"][0].as_f64().expect("seconds"))
    };
    let [few, many] = ["1", "32"].map(dirty);
    assert!(many[0] > 10.0 * few[0], "{many:?} {few:?}");
    assert!(many[1] > 2.0 * few[1] && many[1] < many[0] / 2.0, "{many:?} {few:?}");
    assert!(many[2] < 1.2 * few[2], "{many:?} {few:?}");
}

/// Memory of the whole machine bounds how fast it is zeroed, and a line takes no longer where no
/// other CPU is at work.
#[test]
fn what_is_shared_costs_as_many_share_it() {
    let of = |machine: &str, vcpus: &str| {
        let line = ["-s", "anonymous_hugetlb_2mb", "-b", "16M", "-i", "1", "--how", "tablewright"];
        let report = json(&[&line[..], &["--machine", machine, "-v", vcpus]].concat());
        number(row(&report, "tablewright"), "populate_s")
    };
    assert!(of("x86-96-vcpus", "64") > 10.0 * of("x86-96-vcpus", "1"));
    // Postings for a guest that stands still: 71 to 126 ns for a leaf that is taken away.
    let still = json("-s anonymous_hugetlb_2mb -b 16M -v 8 -i 1 --how in-place");
    let leaf = number(row(&still, "in-place"), "disable_s") / f64::from(8 << 12);
    assert!((65e-9..130e-9).contains(&leaf), "{leaf}");
}

/// Sizes that do not divide are rounded, and that is said.
#[test]
fn sizes_that_do_not_divide_are_rounded() {
    for (line, says) in [
        ("dirty-log -b 5000 -i 1", "-b 5000 B: taken as 8 KiB, whole pages of 4 KiB"),
        (
            "dirty-log -s anonymous_hugetlb_2mb -v 96 -b 5462M -i 1 --machine x86-96-vcpus \
             --how tablewright",
            "-b 5462 MiB: taken as 5460 MiB, whole pages of 2 MiB of which one in 1365 is run",
        ),
    ] {
        let output = tablewright(line);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
}

//! The experiments on the KVM of this computer, as a user runs them; without one they have to be
//! refused.

use crate::common::{self, Line, Scratch, assert_refused, stderr, stdout, tablewright};
use serde_json::Value;

/// Whether there is a KVM that this user may use. If not, all that can be asked for is refused.
fn has_kvm() -> bool {
    let there = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if !there {
        eprintln!("skipped: no /dev/kvm for this user");
        assert_refused("dirty-log --on kvm", "kvm");
    }
    there
}

fn json(arguments: &(impl Line + ?Sized)) -> Value {
    common::json(arguments, "--on kvm --rounds 1")
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
    for way in [&["-g"][..], &[], &["--all-set"], &["--ring", "4096"], &["--stalls"]] {
        for backing in ["anonymous", "anonymous_thp", "shmem"] {
            let line = [&["dirty-log", "-b", "16M", "-v", "2", "-s", backing], way].concat();
            let report = json(&line);
            for number in 1..=2 {
                let get = phase(&report, &format!("get {number}"));
                assert_eq!(get["harvested"], 8192, "{line:?}");
                // A log that reading clears is read once, and so is one that is still written.
                let is_repeated = way.is_empty() || way == ["--all-set"];
                assert_eq!(get["cpu_first_ns"].is_f64(), is_repeated, "{line:?}");
                assert!(get["away_ns"].is_f64(), "{line:?}");
            }
            let dirty = phase(&report, "dirty 2");
            assert_eq!(dirty["pages"], 8192);
            assert!(dirty["stall_longest_ns"].as_f64() > Some(0.0));
            // Each page that was logged faults, whatever else does; but what is written during a
            // call, for its stalls to be seen, does not fault again in the pass after it.
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
    let report = json("dirty-log -b 16M -v 2 -w 40 -a -x 2");
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
    let start = json("write-protect -b 32M -v 2");
    assert_eq!(phase(&start, "get 1")["harvested"], 8192);
    let start = json("write-protect -s anonymous_thp -b 32M -v 2");
    assert_eq!(start["rows"][0]["leaf_bytes"], 2 << 20);
    assert_eq!(phase(&start, "get 1")["harvested"], 8192);
    let faults = json("page-table-test -b 32M -v 2");
    assert_eq!(phase(&faults, "get 1")["harvested"], 8192);
    let large = json("page-table-test -b 32M -v 2 -s anonymous_thp");
    assert!(phase(&large, "get 1")["written"] == 16);
}

#[test]
fn the_first_line_says_what_kind_of_host_it_is() {
    if !has_kvm() {
        return;
    }
    let output = tablewright("dirty-log --on kvm -b 4M --rounds 1");
    let text = stdout(&output);
    let first = text.lines().next().expect("a line");
    assert!(first.contains("paging") || first.contains("PAGING"), "{first}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_profile_is_fitted_to_runs_and_predicts_another() {
    if !has_kvm() {
        return;
    }
    let scratch = |name: &str, source: &str| {
        let line = format!("dirty-log -b 16M -s {source} --on kvm --rounds 2 --json");
        let output = tablewright(&line);
        assert!(output.status.success(), "{}", stderr(&output));
        Scratch::new(name, &output.stdout)
    };
    let (small, large) = (scratch("a.json", "anonymous"), scratch("b.json", "anonymous_thp"));
    let profile = Scratch::new("here.toml", "");
    let line = ["fit", "--from", small.path(), large.path(), "-o", profile.path(), "--json"];
    let output = tablewright(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    let fit: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let costs = fit["costs"].as_array().expect("costs");
    let exception = costs.iter().find(|cost| cost["cost"] == "exception").expect("it is free");
    // A fault takes more than a memory access and less than a disk access.
    let nanoseconds = exception["fitted_ns"].as_f64().expect("determined");
    assert!((100.0..1e7).contains(&nanoseconds), "{nanoseconds}");
    let dirty = |row: &&Value| row["phase"].as_str().is_some_and(|it| it.starts_with("dirty"));
    let rows = fit["rows"].as_array().expect("rows").iter().filter(dirty);
    let mut errors: Vec<f64> =
        rows.map(|row| row["error_percent"].as_f64().expect("an error").abs()).collect();
    errors.sort_by(f64::total_cmp);
    // Other programs may disturb one of them.
    assert!(errors[errors.len() / 2] < 60.0, "{errors:?}");
    let report = json(&format!("dirty-log -b 8M -v 2 --predict {}", profile.path()));
    let predicted = report["rows"][0]["predicted"].as_array().expect("predictions");
    assert!(predicted.iter().any(|row| row["phase"] == "populate"), "{report}");

    // What no run is.
    let none = Scratch::new("none.json", "{}");
    assert_refused(&["fit", "--from", none.path()], "no run of dirty-log");
    assert_refused("fit --from /no/such.json", "/no/such.json");
    assert_refused("fit", "--machine");
    let lacks = ["dirty-log", "--on", "kvm", "--ring", "--predict", profile.path()];
    assert_refused(&lacks, "no --ring");
}

#[test]
fn doctor_has_a_row_for_each_problem_and_runs_to_fit_to() {
    let output = tablewright("doctor --guest 1G --vcpus 2 --json");
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    if !has_kvm() {
        assert_eq!(rows.len(), 2);
        assert!(report["parameters"]["no_guests"].is_string());
        return;
    }
    assert_eq!(rows.len(), 7);
    for row in rows {
        let note = row["note"].as_str().expect("a note");
        let is_there = row["tablewright_ns"].is_f64() || row["there_ns"].is_f64();
        assert!(is_there || note.starts_with("No other thread"), "{row}");
    }
    // The map as it was is slower than the changed one, and that than the engine's.
    let linear = ["there_ns", "with_change_ns", "tablewright_ns"].map(|it| rows[0][it].as_f64());
    assert!(linear[0] > linear[1] && linear[1] > linear[2], "{linear:?}");
    assert!(report["parameters"]["host"]["kernel"].is_string());
    // What was measured in a few hundred pages is what it is multiplied from.
    let start = &rows[3];
    let pages = (1 << 30) as f64 / 4096.0;
    let there = start["here_ns"].as_f64().expect("measured") * pages;
    assert!((there / start["there_ns"].as_f64().expect("extrapolated") - 1.0).abs() < 1e-9);
    let file = Scratch::new("doctor.json", &output.stdout);
    let fit = tablewright(&["fit", "--from", file.path(), "--json"]);
    assert!(fit.status.success(), "{}", stderr(&fit));
}

/// The page says what the terminal does, and the JSON is beside it.
#[cfg(target_os = "linux")]
#[test]
fn doctor_has_a_page_with_all_that_it_says() {
    let directory = std::env::temp_dir().join(format!("tablewright-page-{}", std::process::id()));
    let line = format!("doctor --guest 1G --vcpus 2 --report {}", directory.display());
    let output = tablewright(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    let read = |name| std::fs::read_to_string(directory.join(name)).expect("a file");
    let (page, json) = (read("doctor.html"), read("doctor.json"));
    std::fs::remove_dir_all(&directory).expect("a directory");
    roxmltree::Document::parse(page.trim_start_matches("<!DOCTYPE html>\n")).expect("a page");
    let report: Value = serde_json::from_str(&json).expect("JSON");
    let warnings = report["warnings"].as_array().expect("warnings");
    assert_eq!(page.matches("<li>").count(), warnings.len());
    assert_eq!(stderr(&output).lines().count(), warnings.len(), "{}", stderr(&output));
    let measured = &report["parameters"]["measured"];
    for of in ["computer", "processor", "at", "version"] {
        let said = measured[of].as_str().expect("a string");
        assert!(page.contains(said), "{of}: {said}");
    }
    assert_eq!(measured["command"], format!("tablewright {line}"));
    // Each scale has its ends.
    assert_eq!(page.matches("<figure").count(), page.matches("bar scale").count());
    assert!(!page.contains('`'));
}

/// Linux has `/proc` and signals; elsewhere there is no doctor.
#[cfg(target_os = "linux")]
#[test]
fn doctor_leaves_nothing_behind_whenever_and_however_it_is_killed() {
    use std::fs;
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::{Command, Stdio};
    use std::time::{Duration, SystemTime};

    let directory = std::env::temp_dir().join(format!("tablewright-killed-{}", std::process::id()));
    fs::create_dir(&directory).expect("a directory");
    let shared = || -> Vec<_> {
        let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name());
        let ours = |name: &std::ffi::OsString| name.to_string_lossy().contains("tablewright");
        names.filter(ours).collect()
    };
    // In its start, in what it does natively, and among its guests: somewhere else each time. A
    // failure names the delay.
    let mut random =
        SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| u64::from(time.subsec_nanos()));
    for (signal, most) in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL]
        .into_iter()
        .flat_map(|signal| [10, 3_000].map(|most| (signal, most)))
    {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let delay = (random >> 33) % (most * 1000);
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_tablewright"));
        // SAFETY: `signal`, a system call alone. A signal that is ignored, as by `nohup`, stays so
        // in a child.
        unsafe {
            doctor.pre_exec(|| match libc::signal(libc::SIGINT, libc::SIG_DFL) {
                libc::SIG_ERR => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let mut doctor = doctor
            .args(["doctor", "--json", "--report", "results"])
            .current_dir(&directory)
            .env("TMPDIR", &directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program runs");
        std::thread::sleep(Duration::from_micros(delay));
        let id = doctor.id();
        // Without guests it may be through: then its page is there, as a whole, and its end is no
        // signal's.
        if doctor.try_wait().expect("its state").is_some() {
            fs::remove_dir_all(directory.join("results")).expect("a page");
            continue;
        }
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        // SAFETY: `kill`: the process is a child that was not waited for, so that the number is
        // still its own.
        unsafe { libc::kill(id as libc::pid_t, signal) };
        let status = doctor.wait().expect("its end");
        let what = format!("signal {signal} after {delay} us");
        assert_eq!(status.signal(), Some(signal), "{what}");
        assert_eq!(children.unwrap_or_default(), "", "{what}");
        let left: Vec<_> = fs::read_dir(&directory)
            .expect("the directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert!(left.is_empty(), "{what}: {left:?}");
        assert!(shared().is_empty(), "{what}: {:?}", shared());
    }
    fs::remove_dir(&directory).expect("it is empty");
}

/// Runs the program after `first`, which is done in the child: as another user, or where devices
/// are others. Nothing where that cannot be had.
#[cfg(target_os = "linux")]
fn refused_after(
    first: impl Fn() -> std::io::Result<()> + Send + Sync + 'static,
    arguments: &[&str],
) -> Option<String> {
    use std::os::unix::process::CommandExt as _;
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tablewright"));
    command.args(arguments).current_dir("/").stdin(std::process::Stdio::null());
    // SAFETY: what is done between the two calls is system calls alone.
    let command = unsafe { command.pre_exec(first) };
    let output = match command.output() {
        Ok(output) => output,
        Err(why) => {
            eprintln!("skipped: {why}");
            return None;
        }
    };
    let message = stderr(&output).to_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.matches('\n').count(), 1, "{arguments:?}: {message}");
    Some(message)
}

/// The experiments on KVM.
#[cfg(target_os = "linux")]
const ON_KVM: [&[&str]; 3] = [
    &["dirty-log", "--on", "kvm", "-b", "4M"],
    &["write-protect", "--on", "kvm", "-b", "4M"],
    &["page-table-test", "--on", "kvm", "-b", "4M"],
];

#[cfg(target_os = "linux")]
#[test]
fn a_user_without_the_right_to_it_is_told_so() {
    // A user that owns nothing, which only root can become.
    let without_rights = || {
        // SAFETY: `setgroups`, `setgid`, `setuid`: of this process alone; no group is named.
        let done = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setgid(65534) == 0
                && libc::setuid(65534) == 0
        };
        match done {
            true => Ok(()),
            false => Err(std::io::Error::last_os_error()),
        }
    };
    for arguments in ON_KVM {
        // SAFETY: `access`: the path ends with a zero.
        let is_there = unsafe { libc::access(c"/dev/kvm".as_ptr(), libc::F_OK) == 0 };
        let others = std::fs::metadata("/dev/kvm").map(|it| {
            use std::os::unix::fs::PermissionsExt as _;
            it.permissions().mode() & 0o006
        });
        if !is_there || others.is_ok_and(|mode| mode != 0) {
            eprintln!("skipped: /dev/kvm is not there, or any user may open it");
            return;
        }
        let Some(message) = refused_after(without_rights, arguments) else {
            return;
        };
        assert!(message.starts_with("error: /dev/kvm: no permission: join the group"), "{message}");
    }
}

/// Has other devices in a mount namespace of the process's own.
#[cfg(target_os = "linux")]
fn over(
    source: &std::ffi::CStr,
    target: &std::ffi::CStr,
    kind: &std::ffi::CStr,
) -> std::io::Result<()> {
    let flags = if kind.is_empty() { libc::MS_BIND } else { 0 };
    let none: *const libc::c_char = std::ptr::null();
    // SAFETY: `unshare`, `mount`: of this process alone, which runs another program next; the
    // strings end with zeros.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                none.cast(),
                libc::MS_REC | libc::MS_PRIVATE,
                none.cast(),
            ) == 0
            && libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, none.cast()) == 0
    };
    match done {
        true => Ok(()),
        false => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_computer_without_kvm_is_told_so() {
    for arguments in ON_KVM {
        let none = || over(c"none", c"/dev", c"tmpfs");
        let Some(message) = refused_after(none, arguments) else {
            return;
        };
        let says = "error: /dev/kvm: there is no KVM on this computer";
        assert!(message.starts_with(says), "{message}");
        let Some(message) = refused_after(|| over(c"/dev/null", c"/dev/kvm", c""), arguments)
        else {
            // There is none to put it over.
            return;
        };
        assert!(message.starts_with("error: /dev/kvm: not KVM"), "{message}");
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    assert_refused("dirty-log --ring", "--ring: only with --on kvm");
    assert_refused("write-protect --stalls", "--stalls: only with --on kvm");
    assert_refused("page-table-test -c 0", "-c: only with --on kvm");
    assert_refused("page-table-test -n", "-n: only with --on kvm");
    assert_refused("write-protect -s shmem", "-s: only with --on kvm");
    assert_refused("dirty-log --on kvm --scale 2", "--scale: not with --on kvm");
    assert_refused("dirty-log --on kvm -s foo", "no such backing");
    if !has_kvm() {
        return;
    }
    let refused: &[(&[&str], &str)] = &[
        (&["-v", "60000", "-b", "1M"], "vCPUs in a VM"),
        (&["-b", "16T"], "to spare"),
        (&["-b", "3"], "-b: the memory has to be whole pages"),
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

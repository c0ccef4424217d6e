//! `record` as a shell sees it.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Scratch, assert_refused, stderr, stdout, tablewright};

/// A directory that is gone when the test is.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tablewright-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process that is ended with the test.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    fn id(&self) -> String {
        self.0.id().to_string()
    }

    fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line[name.len() + 1..].trim().to_owned()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: takes numbers; the process is our child, and was not waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }

    fn wait(&mut self, most: Duration) -> Option<i32> {
        let start = Instant::now();
        while start.elapsed() < most {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still running after {most:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper() -> Process {
    Process::start(Command::new("sleep").arg("60"))
}

/// Records and says whether that works on this computer.
fn recorded(arguments: &[&str]) -> Option<serde_json::Value> {
    let output = tablewright(&[&["record", "--json"], arguments].concat());
    let message = stderr(&output);
    if message.contains("this computer has no way") {
        eprintln!("skipped: {message}");
        return None;
    }
    assert!(output.status.success(), "{message}");
    Some(serde_json::from_str(stdout(&output)).unwrap())
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (arguments, says) in [
        (&["record"][..], "nothing to record"),
        (&["record", "--pid", "0"], "0 is not from 1 to"),
        (&["record", "--pid", "x"], "not a whole number"),
        (&["record", "--pid", "1", "sleep"], "cannot be used with"),
        (&["record", "--interval", "0", "sleep", "1"], "1 to 3600000"),
        (&["record", "--duration", "0", "sleep", "1"], "more than zero"),
        (&["record", "--duration", "-1", "sleep", "1"], "more than zero"),
        (&["record", "--duration", "nan", "sleep", "1"], "more than zero"),
        (&["record", "--intervals", "0", "sleep", "1"], "0 is not 1 or more"),
        (&["record", "--method", "guess", "sleep", "1"], "soft-dirty"),
        (&["record", "--output", "/no/such/place", "sleep", "1"], "--output /no/such/place"),
        (&["record", "--show", "/no/such/file"], "/no/such/file"),
        (&["record", "--show", "x", "--pid", "1"], "cannot be used with"),
    ] {
        assert_refused(arguments, says);
    }
}

#[test]
fn files_that_are_no_recordings_are_refused_with_the_place() {
    let foreign = Scratch::new("foreign.twr", "#!/bin/sh\n");
    assert_refused(&format!("record --show {}", foreign.path()), "byte 0: not a recording");
    let cut = Scratch::new("cut.twr", b"TWRECORD\x01\x04sc");
    assert_refused(
        &format!("record --show {}", cut.path()),
        "byte 12: the file ends in the middle of",
    );
    let newer = Scratch::new("newer.twr", b"TWRECORD\x09");
    assert_refused(&["record", "--show", newer.path()], "byte 8: version 9");
    assert_refused("record --show /dev/zero", "/dev/zero");
}

#[test]
fn processes_that_cannot_be_recorded_leave_no_file() {
    let directory = Directory::new("refused");
    let file = directory.file("a.twr");
    if recorded(&["-o", &file, "sleep", "0.3"]).is_none() {
        return;
    }
    fs::remove_file(&file).unwrap();
    let refused = |arguments: &[&str], says: &str| {
        assert_refused(&[&["record", "-o", &file], arguments].concat(), says);
        assert_eq!(directory.names(), [""; 0]);
    };
    refused(&["--pid", "2147483647"], "process 2147483647: there is no such process");
    refused(&["/no/such/program"], "/no/such/program: cannot be started");
    refused(&["/"], "cannot be started");
    let status = fs::read_to_string("/proc/2/status").unwrap_or_default();
    if status.contains("kthreadd") {
        refused(&["--pid", "2"], "part of the kernel");
    }
}

#[test]
fn a_process_of_another_user_is_refused() {
    use std::os::unix::process::CommandExt;
    let sleeper = sleeper();
    let directory = Directory::new("else");
    let program = directory.file("tablewright");
    // Where the program is may be closed to others.
    if fs::copy(env!("CARGO_BIN_EXE_tablewright"), &program).is_err() {
        return eprintln!("skipped: no copy of the program");
    }
    let output = Command::new(&program)
        .args(["record", "-o", "/dev/shm/tablewright-missing.twr", "--pid", &sleeper.id()])
        .stdin(Stdio::null())
        .uid(65534)
        .gid(65534)
        .output();
    let Ok(output) = output else {
        return eprintln!("skipped: only root can be another user");
    };
    let message = stderr(&output);
    if message.contains("this computer has no way") || message.contains("--output") {
        return eprintln!("skipped: {message}");
    }
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("not permitted"), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert_eq!(sleeper.status("TracerPid:"), "0");
}

#[test]
fn a_command_is_recorded_until_it_ends() {
    let directory = Directory::new("command");
    let file = directory.file("a.twr");
    let Some(report) =
        recorded(&["-o", &file, "--interval", "20", "--", "sh", "-c", "exec sleep 0.5"])
    else {
        return;
    };
    assert_eq!(report["experiment"], "record");
    assert_eq!(report["parameters"]["summary"]["ended"], "the process ended");
    assert_eq!(report["parameters"]["interval_ns"], 20_000_000);
    assert!(report["rows"].as_array().unwrap().len() > 5, "{report}");
    assert_eq!(directory.names(), ["a.twr"]);
    // And what is in the file is what was said.
    let again = tablewright(&["record", "--json", "--show", &file]);
    let again: serde_json::Value = serde_json::from_str(stdout(&again)).unwrap();
    assert_eq!(again, report);
    let table = tablewright(&["record", "--show", &file]);
    assert!(stdout(&table).contains("pages written"));

    let bytes = fs::read(&file).unwrap();
    let cut = Scratch::new("cut-short.twr", &bytes[..bytes.len() - 9]);
    assert_refused(&["record", "--show", cut.path()], "it is truncated");
}

#[test]
fn a_command_that_becomes_another_is_followed() {
    let directory = Directory::new("exec");
    let file = directory.file("a.twr");
    let script = "sleep 0.2; exec sleep 0.4";
    let Some(report) = recorded(&["-o", &file, "--interval", "20", "--", "sh", "-c", script])
    else {
        return;
    };
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("another program 1 time"), "{warnings}");
    let total: u64 = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["length_ns"].as_u64().unwrap())
        .sum();
    assert!(total > 450_000_000, "{report}");
}

#[test]
fn a_command_cannot_speak_to_the_terminal() {
    let directory = Directory::new("escape");
    let file = directory.file("a.twr");
    let script = format!("sleep 2 # \x1b[31m\n{}", "x".repeat(5000));
    if recorded(&["-o", &file, "--", "sh", "-c", &script]).is_none() {
        return;
    }
    let shown = tablewright(&["record", "--show", &file]);
    assert!(stdout(&shown).contains("sleep 2 # [31m"), "{}", stdout(&shown));
    assert!(!stdout(&shown).contains('\x1b'));
    assert!(stdout(&shown).len() < 4000);
}

#[test]
fn so_many_intervals_or_so_much_time_and_the_process_goes_on() {
    let sleeper = sleeper();
    let directory = Directory::new("enough");
    let file = directory.file("a.twr");
    let pid = sleeper.id();
    let Some(report) =
        recorded(&["-o", &file, "--interval", "10", "--intervals", "7", "--pid", &pid])
    else {
        return;
    };
    assert_eq!(report["rows"].as_array().unwrap().len(), 7);
    let report = recorded(&["-o", &file, "--duration", "0.25", "--pid", &pid]).unwrap();
    assert!((1..=3).contains(&report["rows"].as_array().unwrap().len()));
    assert_eq!(sleeper.status("TracerPid:"), "0");
    assert!(sleeper.status("State:").starts_with('S'));
}

#[test]
fn signals_end_a_recording_and_keep_it() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let sleeper = sleeper();
        let directory = Directory::new(&format!("signal-{signal}"));
        let file = directory.file("a.twr");
        if recorded(&["-o", &file, "--intervals", "1", "--pid", &sleeper.id()]).is_none() {
            return;
        }
        let mut recorder = Process::start(
            Command::new(env!("CARGO_BIN_EXE_tablewright"))
                .args(["record", "-o", &file, "--interval", "50", "--pid", &sleeper.id()])
                .stdout(Stdio::null()),
        );
        // From the time at which it catches them.
        let caught = || u64::from_str_radix(&recorder.status("SigCgt:"), 16).unwrap();
        while caught() & (1 << (signal - 1)) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(200));
        recorder.signal(signal);
        assert_eq!(recorder.wait(Duration::from_secs(10)), Some(0));
        let shown = tablewright(&["record", "--json", "--show", &file]);
        let shown: serde_json::Value = serde_json::from_str(stdout(&shown)).unwrap();
        assert_eq!(shown["parameters"]["summary"]["ended"], "by a signal to the recorder");
        assert!(!shown["rows"].as_array().unwrap().is_empty());
        assert_eq!(sleeper.status("TracerPid:"), "0");
        assert!(sleeper.status("State:").starts_with('S'));
    }
}

#[test]
fn the_death_of_a_recorder_leaves_its_process_running() {
    // Writes all the time, so that it would notice.
    let script = "while :; do x=$x$RANDOM; x=${x%????????}; done";
    let busy = Process::start(Command::new("bash").args(["-c", script]));
    let directory = Directory::new("death");
    let file = directory.file("a.twr");
    if recorded(&["-o", &file, "--intervals", "1", "--pid", &busy.id()]).is_none() {
        return;
    }
    for round in 0..5 {
        let mut recorder = Process::start(
            Command::new(env!("CARGO_BIN_EXE_tablewright"))
                .args(["record", "-o", &file, "--interval", "1", "--pid", &busy.id()])
                .stdout(Stdio::null()),
        );
        std::thread::sleep(Duration::from_millis(300 + 37 * round));
        recorder.signal(libc::SIGKILL);
        recorder.wait(Duration::from_secs(10));
        let clock = Instant::now();
        while busy.status("TracerPid:") != "0" || !busy.status("State:").starts_with('R') {
            assert!(clock.elapsed() < Duration::from_secs(5), "{}", busy.status("State:"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    // The draft is written when all is known, so there is none.
    assert_eq!(directory.names(), ["a.twr"]);
}

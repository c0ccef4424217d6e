//! The program as its users meet it, as far as that needs no guest.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

fn xtask(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    xtask(arguments).output().unwrap()
}

#[test]
fn tests_are_listed_and_which_are_in_the_short_set() {
    let list = |more: &[&str]| {
        let said = output(&[&["test-guest", "--list"], more].concat());
        assert!(said.status.success());
        String::from_utf8(said.stdout).unwrap()
    };
    let all = list(&[]);
    let is = |name: &str| all.lines().any(|line| line == name);
    assert!(is("short   max-2cpu-2m-snapshot-all"), "{all}");
    assert!(is("        max-2cpu-4k-snapshot-bitmap"), "{all}");
    assert!(is("short   guests") && is("short   hyperv-hostile"), "{all}");
    let some = list(&["snapshot"]);
    assert!(some.lines().count() > 10 && some.lines().all(|line| line.contains("snapshot")));
    // A name that is whole is one test.
    assert_eq!(list(&["guests"]), "short   guests\n");
}

#[test]
fn what_cannot_be_is_refused_in_one_line() {
    for (arguments, what) in [
        (&[][..], "a subcommand is needed: fetch, boot,"),
        (&["boot", "--rounds", "0"], "--rounds"),
        (&["boot", "--snapshot", "--shell"], "--shell"),
        (&["tlb-flush", "--rounds", "0"], "--rounds"),
        (&["boot", "--memory", "100M"], "--memory"),
        (&["boot", "--evict-rate", "5"], "--evict"),
        (&["boot", "--initrd", "/no/such/file"], "/no/such/file"),
        (&["boot", "--initrd", "/"], "no file"),
        (&["boot", "--kernel", "/no/such/file"], "/no/such/file"),
        (&["boot", "--kernel", "Cargo.toml"], "Image"),
        (&["boot", "--arch", "x86-64", "--kernel", "Cargo.toml"], "bzImage"),
        (&["boot", "--initrd", "x", "--shell"], "--initrd"),
        (&["boot", "--vmid-bits", "3"], "--vmid-bits"),
        (&["boot", "--guests", "9"], "--guests"),
        (&["boot", "--arch", "x86-64", "--memory", "3G"], "2G"),
        (&["boot", "--arch", "x86-64", "--snapshot", "--run", "hunt"], "--snapshot"),
        (&["boot", "--arch", "x86-64", "--evict-rate", "5"], "arm64"),
        (&["boot", "--arch", "x86-64", "--guests", "2"], "--guests"),
        (&["boot", "--arch", "x86-64", "--small", "2"], "--small"),
        (&["boot", "--arch", "x86-64", "--vmid-bits", "3"], "arm64"),
        (&["boot", "--arch", "x86-64", "--seconds", "9"], "hunt"),
        (&["test-guest", "no-such-test"], "no test"),
        (&["test-guest", "--repeat", "0"], "--repeat"),
        (&["test-guest", "--jobs", "0"], "--jobs"),
    ] {
        let said = output(arguments);
        let error = String::from_utf8(said.stderr).unwrap();
        assert_eq!(said.status.code(), Some(2), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("error: ") && error.contains(what), "{error}");
        assert!(said.stdout.is_empty());
    }
}

#[test]
fn without_an_emulator_nothing_passes() {
    for arguments in
        [&["boot"][..], &["boot", "--arch", "x86-64"], &["test-guest", "hyperv-hostile"]]
    {
        let said = xtask(arguments).env("PATH", "/no/such").output().unwrap();
        let error = String::from_utf8(said.stderr).unwrap();
        assert_eq!(said.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains("is missing. Install QEMU"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn a_reader_that_goes_is_no_error() {
    let mut command = xtask(&["test-guest", "--list"]);
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let mut first = String::new();
    let mut reader = BufReader::with_capacity(16, child.stdout.take().unwrap());
    reader.read_line(&mut first).unwrap();
    drop(reader);
    let said = child.wait_with_output().unwrap();
    assert!(said.status.success() && said.stderr.is_empty());
    assert!(first.starts_with("short"), "{first}");
}

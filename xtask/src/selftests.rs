//! The phases of `dirty-log --on kvm --as-selftests` beside those of Linux's own
//! `dirty_log_perf_test`, which is built from Debian's source, in an emulated computer whose time
//! is that of its instructions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::debian::{self, Debian, Release};
use crate::fetch::{self, output};
use crate::kvm::{Computer, Pace};
use crate::{About as _, Error, Result, out, say};

/// The kernel whose selftests these are: its package has this name.
const SOURCE: &str = "linux-source-6.12";
/// Parts of it that they are built from.
const PARTS: [&str; 9] = [
    "tools",
    "include",
    "arch/x86/include",
    "arch/x86/entry/syscalls",
    "arch/x86/tools",
    "arch/x86/Makefile",
    "scripts",
    "usr",
    "Makefile",
];
/// The most that a phase may be off, in percent.
const MOST: f64 = 5.0;
/// A phase that takes less is a call that changes next to nothing, with the clocks around it: it is
/// shown, and not judged.
const SHORT: f64 = 100e-6;

/// The lab's guest takes at most so much longer for an access, in seconds: it reads its counter
/// after each.
const OWN: f64 = 25e-9;

/// Guests, by the letters that both programs have. One processor has one vCPU, and it stands still
/// in all calls: what else runs there is the scheduler's choice.
const GUESTS: [&str; 5] = [
    "-b 32M",
    "-b 32M -g",
    "-b 16M -i 4 -x 2",
    "-b 32M -s anonymous_thp",
    "-b 32M -s anonymous_thp -g",
];

/// Builds the test, static.
fn built() -> Result<PathBuf> {
    let scratch = fetch::scratch()?;
    let program = scratch.join("dirty_log_perf_test");
    if program.exists() {
        return Ok(program);
    }
    let debian = Debian { release: Release::Trixie, architecture: "amd64", apt: "apt-selftests" };
    let archive = format!("{SOURCE}.tar.xz");
    let packed =
        debian::from_package(&scratch, &debian, SOURCE, &format!("*/{archive}"), &archive)?;
    let directory = scratch.join("selftests");
    let make = || -> Result<()> {
        fs::create_dir_all(&directory).about(directory.display())?;
        let parts = PARTS.map(|part| format!("{SOURCE}/{part}"));
        output(Command::new("tar").arg("-C").arg(&directory).arg("-xJf").arg(&packed).args(parts))?;
        let root = directory.join(SOURCE);
        output(Command::new("make").current_dir(&root).args(["headers", "ARCH=x86_64"]))?;
        compile(&root, &program)?;
        fs::remove_dir_all(&directory).about(directory.display())?;
        fs::remove_file(&packed).about(packed.display())
    };
    out::slowly("building dirty_log_perf_test", make)?;
    Ok(program)
}

/// Functions for it: one processor is emulated, and a thread that spins while it waits for another
/// would have its instructions measured. It is given the least priority for as long as it waits.
const WAITING: &str = "#include <sched.h>
#include <sys/resource.h>
static int waits(void) { setpriority(PRIO_PROCESS, 0, 19); sched_yield(); return 1; }
static void goes_on(void) { setpriority(PRIO_PROCESS, 0, 0); }
";

/// Parts of its text, and what stands there instead.
const CHANGES: [(&str, &str); 4] = [
    ("while (READ_ONCE(vcpu_last", "while (waits() && READ_ONCE(vcpu_last"),
    ("while (current_iteration ==", "while (waits() && current_iteration =="),
    ("ret = _vcpu_run(vcpu);", "goes_on(); ret = _vcpu_run(vcpu);"),
    ("ts_diff = timespec_elapsed(start);", "goes_on(); ts_diff = timespec_elapsed(start);"),
];

/// Compiles it, with the flags of the kernel's own Makefile for it.
fn compile(root: &Path, program: &Path) -> Result<()> {
    let at = root.join("tools/testing/selftests/kvm");
    let source = at.join("dirty_log_perf_test.c");
    let mut text = fs::read_to_string(&source).about(source.display())?;
    for (there, instead) in CHANGES {
        if !text.contains(there) {
            return Err(Error::Other(format!("{}: no {there}", source.display())));
        }
        text = text.replace(there, instead);
    }
    fs::write(&source, format!("{WAITING}{text}")).about(source.display())?;
    let gcc = || {
        let mut gcc = Command::new("gcc");
        gcc.current_dir(&at).args(["-D_GNU_SOURCE=", "-O2", "-std=gnu99", "-w", "-DCONFIG_64BIT"]);
        gcc.args(["-U_FORTIFY_SOURCE", "-fno-builtin-memcmp", "-fno-builtin-memcpy"]);
        gcc.args(["-fno-builtin-memset", "-fno-builtin-strnlen", "-fno-stack-protector"]);
        gcc.args(["-fno-PIE", "-fno-strict-aliasing", "-march=x86-64-v2", "-pthread"]);
        gcc.arg("-isystem").arg(root.join("usr/include"));
        for include in ["tools/include", "tools/arch/x86/include"] {
            gcc.arg("-I").arg(root.join(include));
        }
        for include in ["include", ".", "include/x86_64", "include/x86", "../rseq", ".."] {
            gcc.arg("-I").arg(include);
        }
        gcc
    };
    // The guest's own functions for strings: compiled to loops, and not to calls of themselves.
    const STRINGS: &str = "lib/string_override.c";
    output(gcc().args(["-ffreestanding", "-c", STRINGS, "-o", "strings.o"]))?;
    let mut sources = Vec::new();
    for directory in ["lib", "lib/x86_64", "lib/x86"] {
        for entry in fs::read_dir(at.join(directory)).into_iter().flatten().flatten() {
            let name = format!("{directory}/{}", entry.file_name().to_string_lossy());
            if name != STRINGS && (name.ends_with(".c") || name.ends_with(".S")) {
                sources.push(name);
            }
        }
    }
    let mut link = gcc();
    link.args(["-static", "-no-pie", "dirty_log_perf_test.c"]).args(sources).arg("strings.o");
    output(link.arg("-o").arg(program))?;
    Ok(())
}

/// A phase, its seconds, and those by which it may be longer.
type Phase = (String, f64, f64);

/// Phases of the kernel's test, by the lab's names for them.
fn theirs(said: &str) -> Vec<Phase> {
    let phase = |line: &str| {
        let (name, time) = line.split_once(" time: ")?;
        let seconds = time.strip_suffix('s')?.parse().ok()?;
        let words: Vec<&str> = name.split(' ').collect();
        let name = match words.as_slice() {
            ["Populate", ..] => "populate".to_owned(),
            ["Enabling", ..] => "enable".to_owned(),
            ["Disabling", ..] => "disable".to_owned(),
            ["Iteration", number, what, ..] => format!("{what} {number}"),
            _ => return None,
        };
        Some((name, seconds, 0.0))
    };
    said.lines().filter_map(phase).collect()
}

/// And the lab's own.
fn ours(said: &str) -> Result<Vec<Phase>> {
    let report: Value = serde_json::from_str(said)
        .map_err(|error| Error::Failed(format!("its JSON cannot be read: {error}: {said}")))?;
    let phases = report["rows"][0]["phases"].as_array().into_iter().flatten();
    let phase = |phase: &Value| {
        // The first call after a pass: the others find nothing new.
        let wall = phase["cpu_first_ns"].as_f64().or(phase["wall_ns"].as_f64())?;
        let name = phase["phase"].as_str()?.to_owned();
        let accesses = if phase["cpu_first_ns"].is_null() { phase["pages"].as_f64()? } else { 0.0 };
        Some((name, wall / 1e9, accesses * OWN))
    };
    Ok(phases.filter_map(phase).collect())
}

/// Runs both, and says how far each phase is off.
///
/// # Errors
/// Something cannot be had, built or run; a phase is off by more than it may.
pub fn run() -> Result<()> {
    let computer = Computer::Amd13;
    if let Some(why) = computer.missing() {
        return Err(why);
    }
    let test = built()?;
    let lab = fetch::static_lab("x86_64")?;
    let programs = [("selftest", test.as_path()), ("tablewright", lab.as_path())];
    let commands = GUESTS.iter().flat_map(|guest| {
        let both =
            ["/bin/selftest", "tablewright dirty-log --on kvm --as-selftests --rounds 1 --json"];
        both.map(|program| format!("{program} {guest}"))
    });
    let commands: Vec<String> = commands.collect();
    let said = computer.boot(&programs, &commands, Pace::OfInstructions)?;
    let mut worst: f64 = 0.0;
    for (guest, said) in GUESTS.iter().zip(said.chunks(2)) {
        let [(_, test), (_, lab)] = said else { continue };
        let (theirs, ours) = (theirs(test), ours(lab)?);
        if theirs.is_empty() {
            return Err(Error::Failed(format!("dirty_log_perf_test {guest}: {test}")));
        }
        say!("dirty_log_perf_test {guest}:");
        for (name, seconds, _) in &theirs {
            let same = ours.iter().find(|(other, ..)| other == name);
            let Some((_, here, own)) = same else { continue };
            let off = (here / seconds - 1.0) * 100.0;
            // The rest of what the lab's guest does itself is no error of a phase.
            let judged = ((here - seconds - own).max(0.0) - (seconds - here).max(0.0)) / seconds;
            let counts = *seconds > SHORT;
            say!(
                "  {name:<10} {:>10.3} ms, here {:>10.3} ms  {off:+.1} %{}",
                seconds * 1e3,
                here * 1e3,
                if counts { "" } else { "  (short)" }
            );
            worst = if counts { worst.max(judged.abs() * 100.0) } else { worst };
        }
    }
    match worst <= MOST {
        true => Ok(()),
        false => Err(Error::Failed(format!("a phase is off by {worst:.1} %, at most {MOST} %"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_read_by_the_names_of_the_lab() {
        let said = "Populate memory time: 0.41s\nEnabling dirty logging time: 0.000172496s\n\n\
                    Iteration 1 dirty memory time: 0.3s\nIteration 1 get dirty log time: 0.1s\n\
                    Get dirty log over 2 iterations took 0.2s. (Avg 0.1s/iteration)";
        let names: Vec<_> = theirs(said).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["populate", "enable", "dirty 1", "get 1"]);
        assert_eq!(theirs(said)[1].1, 0.000_172_496);
    }

    #[test]
    fn a_first_call_is_taken_before_the_mean() {
        let said = r#"{"rows": [{"phases": [{"phase": "get 1", "wall_ns": 1, "cpu_first_ns": 5},
            {"phase": "dirty 2", "wall_ns": 2e9, "cpu_first_ns": null, "pages": 40}]}]}"#;
        let expected = [("get 1".to_owned(), 5e-9, 0.0), ("dirty 2".to_owned(), 2.0, 40.0 * OWN)];
        assert_eq!(ours(said).unwrap(), expected);
        assert!(ours("no").is_err());
    }
}

//! The phases of `dirty-log --on kvm --as-selftests` beside those of Linux's own
//! `dirty_log_perf_test`, which is built from Debian's source, in an emulated computer whose time
//! is that of its instructions; and on this computer's KVM, with the lab's guest in both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::debian::{self, Debian, Release};
use crate::fetch;
use crate::kvm::{Computer, Pace};
use crate::tools::{self, output};
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

/// Functions for it: one processor is emulated, and a thread that spins while it waits for another
/// would have its instructions measured. It is given the least priority for as long as it waits.
const WAITING: &str = "#include <sched.h>
#include <sys/resource.h>
static int waits(void) { setpriority(PRIO_PROCESS, 0, 19); sched_yield(); return 1; }
static void goes_on(void) { setpriority(PRIO_PROCESS, 0, 0); }
";

/// A file, a part of its text, and what stands there instead.
type Change = (&'static str, &'static str, &'static str);

/// Those of waiting.
const WAITS: [Change; 4] = [
    (TEST, "while (READ_ONCE(vcpu_last", "while (waits() && READ_ONCE(vcpu_last"),
    (TEST, "while (current_iteration ==", "while (waits() && current_iteration =="),
    (TEST, "ret = _vcpu_run(vcpu);", "goes_on(); ret = _vcpu_run(vcpu);"),
    (TEST, "ts_diff = timespec_elapsed(start);", "goes_on(); ts_diff = timespec_elapsed(start);"),
];

/// Those that make its guest the lab's own: at ring 3, in large pages, and leaving by a store to
/// what has no memory.
const OWN_GUEST: [Change; 6] = [
    (PROCESSOR, "PTE_PRESENT_MASK | PTE_WRITABLE_MASK", "PTE_PRESENT_MASK | PTE_WRITABLE_MASK | 4"),
    (
        PROCESSOR,
        "kvm_seg_set_tss_64bit(vm->arch.tss, &sregs.tr);",
        "sregs.ss = sregs.ds; struct kvm_segment *of[] = { &sregs.cs, &sregs.ds, &sregs.es, \
         &sregs.ss, &sregs.gs }; for (int at = 0; at < 5; at++) { of[at]->dpl = 3; \
         of[at]->selector |= 3; } kvm_seg_set_tss_64bit(vm->arch.tss, &sregs.tr);",
    ),
    (UCALL, "in %[port], %%al", "movb %%al, 0x7ff00000"),
    (
        UCALL,
        "run->exit_reason == KVM_EXIT_IO && run->io.port == UCALL_PIO_PORT",
        "run->exit_reason == KVM_EXIT_MMIO",
    ),
    (
        MEMORY,
        "virt_map(vm, guest_test_virt_mem, args->gpa, guest_num_pages);",
        "virt_pg_map(vm, 0x7ff00000, 0x7ff00000); virt_map_level(vm, guest_test_virt_mem, \
         args->gpa, guest_num_pages * 4096ull, PG_LEVEL_2M);",
    ),
    (MEMORY, "align_down(args->gpa, backing_src_pagesz)", "align_down(args->gpa, 2 << 20)"),
];
const TEST: &str = "dirty_log_perf_test.c";
const PROCESSOR: &str = "lib/x86_64/processor.c";
const UCALL: &str = "lib/x86_64/ucall.c";
const MEMORY: &str = "lib/memstress.c";

/// Builds the test, static: with its own guest, and with the lab's.
fn built() -> Result<[PathBuf; 2]> {
    let scratch = tools::scratch()?;
    let programs = ["dirty_log_perf_test", "dirty_log_perf_test-3"].map(|it| scratch.join(it));
    if programs.iter().all(|program| program.exists()) {
        return Ok(programs);
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
        let at = root.join("tools/testing/selftests/kvm");
        change(&at, &WAITS)?;
        let source = at.join(TEST);
        let text = fs::read_to_string(&source).about(source.display())?;
        fs::write(&source, format!("{WAITING}{text}")).about(source.display())?;
        compile(&root, &at, &programs[0])?;
        change(&at, &OWN_GUEST)?;
        compile(&root, &at, &programs[1])?;
        fs::remove_dir_all(&directory).about(directory.display())?;
        fs::remove_file(&packed).about(packed.display())
    };
    out::slowly("building dirty_log_perf_test", make)?;
    Ok(programs)
}

/// Changes its text.
fn change(at: &Path, changes: &[Change]) -> Result<()> {
    for (file, there, instead) in changes {
        let file = at.join(file);
        let text = fs::read_to_string(&file).about(file.display())?;
        if !text.contains(there) {
            return Err(Error::Other(format!("{}: no {there}", file.display())));
        }
        fs::write(&file, text.replace(there, instead)).about(file.display())?;
    }
    Ok(())
}

/// Compiles it, with the flags of the kernel's own Makefile for it.
fn compile(root: &Path, at: &Path, program: &Path) -> Result<()> {
    let gcc = || {
        let mut gcc = Command::new("gcc");
        gcc.current_dir(at).args(["-D_GNU_SOURCE=", "-O2", "-std=gnu99", "-w", "-DCONFIG_64BIT"]);
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
    link.args(["-static", "-no-pie", TEST]).args(sources).arg("strings.o");
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

/// Runs of each program on this computer's KVM, by turns.
const TURNS: usize = 20;

/// The test with the lab's guest, and the lab's, on this computer's own KVM: the fastest of each
/// phase, which other programs disturb least. It is shown, and not judged.
fn here(test: &Path, lab: &Path) -> Result<()> {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        say!("skipped: this computer, because it has no /dev/kvm for this user");
        return Ok(());
    }
    const GUEST: [&str; 2] = ["-b", "64M"];
    let mut fastest: Vec<(String, [f64; 2])> = Vec::new();
    for _ in 0..TURNS {
        let said = output(Command::new(test).args(GUEST))?;
        let mut command = Command::new(lab);
        command.args(["dirty-log", "--on", "kvm", "--all-set", "--rounds", "1", "--json"]);
        let both = [theirs(&said), ours(&output(command.args(GUEST))?)?];
        for (name, ..) in &both[0] {
            let of = |phases: &[Phase]| phases.iter().find(|it| it.0 == *name).map(|it| it.1);
            let (Some(theirs), Some(ours)) = (of(&both[0]), of(&both[1])) else { continue };
            match fastest.iter_mut().find(|it| it.0 == *name) {
                Some((_, times)) => *times = [times[0].min(theirs), times[1].min(ours)],
                None => fastest.push((name.clone(), [theirs, ours])),
            }
        }
    }
    say!("on this computer, with the lab's guest in both, fastest of {TURNS}:");
    for (name, [theirs, ours]) in fastest {
        let off = (ours / theirs - 1.0) * 100.0;
        say!("  {name:<10} {:>10.3} ms, here {:>10.3} ms  {off:+.1} %", theirs * 1e3, ours * 1e3);
    }
    Ok(())
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
    let [test, own] = built()?;
    let lab = fetch::static_lab("x86_64")?;
    let programs = [("selftest", test.as_path()), ("tablewright", lab.as_path())];
    let commands = GUESTS.iter().flat_map(|guest| {
        let both =
            ["/bin/selftest", "tablewright dirty-log --on kvm --as-selftests --rounds 1 --json"];
        both.map(|program| format!("{program} {guest}"))
    });
    // The first guest of a computer finds its memory cold: it is not compared.
    let warm = format!("/bin/selftest {}", GUESTS[0]);
    let commands: Vec<String> = std::iter::once(warm).chain(commands).collect();
    let said = computer.boot(&programs, &commands, Pace::OfInstructions)?;
    let mut worst: f64 = 0.0;
    for (guest, said) in GUESTS.iter().zip(said[1..].chunks(2)) {
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
    here(&own, &lab)?;
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

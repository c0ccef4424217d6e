//! Random tables of x86-64 and of nested paging, asked of the processor: a program of its own, without a guest.
//!
//! Which tables, and when the processor is right, is said in `hypervisor/x86/src/check.rs`. The program ends QEMU with a status.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::console::{Patience, listen};
use crate::fetch::{self, QEMU_X86};
use crate::{LIMIT, Result, out, say};

/// One run of the program.
struct Test {
    cpu: &'static str,
    /// These invalidations are left out: the processor has to disagree.
    omit: Option<&'static str>,
    /// Part of the short matrix.
    short: bool,
}

/// 5 levels, and leaves of 1 GiB.
const CPU_MAX: &str = "max";

/// 4 levels, and no such leaves.
const CPU_PLAIN: &str = "qemu64,+svm,+npt";

/// So many addresses are asked for through one tree, and so many through two.
const QUESTIONS: u32 = 100_000;

const TESTS: &[Test] = &[
    Test::new(CPU_MAX, None, true),
    Test::new(CPU_PLAIN, None, false),
    Test::new(CPU_PLAIN, Some("leaves"), true),
    Test::new(CPU_PLAIN, Some("everything"), true),
];

// What `isa-debug-exit` makes of the program's status.
const RIGHT: i32 = 33;
const WRONG: i32 = 35;

impl Test {
    const fn new(cpu: &'static str, omit: Option<&'static str>, short: bool) -> Self {
        Self { cpu, omit, short }
    }

    fn name(&self) -> String {
        let cpu = self.cpu.split(',').next().unwrap_or_default();
        match self.omit {
            Some(class) => format!("x86-{cpu}-without-{class}"),
            None => format!("x86-{cpu}-check{QUESTIONS}"),
        }
    }

    /// Whether it came out as it should, which is said.
    fn run(&self, program: &Path) -> Result<bool> {
        let started = Instant::now();
        let mut options = format!("check={QUESTIONS}");
        if let Some(class) = self.omit {
            options += &format!(" omit={class}");
        }
        let mut command = Command::new(QEMU_X86);
        command
            .args([
                "-cpu",
                self.cpu,
                "-m",
                "2G",
                "-nodefaults",
                "-display",
                "none",
                "-no-reboot",
            ])
            // In pages of the host's own size: so few of the 2 GiB are used that larger ones would take longer to clear.
            .args(["-object", "memory-backend-memfd,id=memory,size=2G"])
            .args(["-machine", "pc,memory-backend=memory"])
            .args([
                "-debugcon",
                "stdio",
                "-device",
                "isa-debug-exit,iobase=0xf4,iosize=4",
            ])
            .arg("-kernel")
            .arg(program)
            .args(["-append", &options]);
        let said = out::clocked(&self.name(), || {
            listen(&mut command, Patience::InAll(LIMIT), |_| ())
        })?;
        let status = said.status;
        let (name, seconds) = (self.name(), started.elapsed().as_secs_f64());
        let right = match self.omit {
            Some(_) => WRONG,
            None => RIGHT,
        };
        if status == Some(right) {
            say!("ok      {name} ({seconds:.1} s)");
        } else {
            say!("FAILED  {name} ({seconds:.1} s): it ended with status {status:?}");
        }
        // Where it has to go wrong, the first line says how.
        let shown = if status == Some(WRONG) && right == WRONG {
            1
        } else {
            usize::MAX
        };
        for line in said.lines.iter().take(shown) {
            say!("        | {line}");
        }
        Ok(status == Some(right))
    }
}

/// What they are called, and whether they are part of the short matrix.
pub fn names() -> impl Iterator<Item = (String, bool)> {
    TESTS.iter().map(|test| (test.name(), test.short))
}

/// Runs those that are chosen, by name and by whether they are part of the short matrix. Returns how many came out as they should,
/// and how many did not; none where there is no QEMU for it, which is said.
///
/// # Errors
/// The program cannot be built, or QEMU cannot be started.
pub fn run(chosen: impl Fn(&str, bool) -> bool) -> Result<(u32, u32)> {
    let (mut passed, mut failed) = (0, 0);
    let mut tests = TESTS
        .iter()
        .filter(|test| chosen(&test.name(), test.short))
        .peekable();
    if tests.peek().is_none() {
        return Ok((0, 0));
    }
    if let Err(why) = fetch::qemu_x86() {
        say!("skipped: x86-64, because {why}");
        return Ok((0, 0));
    }
    let program = fetch::check_x86()?;
    for test in tests {
        match test.run(&program)? {
            true => passed += 1,
            false => failed += 1,
        }
    }
    Ok((passed, failed))
}

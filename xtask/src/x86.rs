//! Random tables of x86-64 and of nested paging, asked of the processor: a program of its own,
//! without a guest.
//!
//! Which tables, and when the processor is right, is said in `hypervisor/x86/src/check.rs`. The
//! program ends QEMU with a status.

use std::path::Path;
use std::process::Command;

use crate::cases::Outcome;
use crate::console::{Patience, listen};
use crate::fetch;
use crate::guest_case::Case;
use crate::tools::QEMU_X86;
use crate::{Arch, LIMIT, Result};

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

/// The number of addresses that are asked for through one tree, and again through two.
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

    /// Asks, and judges what comes out.
    fn run(&self, program: &Path) -> Result<Outcome> {
        let mut options = format!("check={QUESTIONS}");
        if let Some(class) = self.omit {
            options += &format!(" omit={class}");
        }
        let mut command = Command::new(QEMU_X86);
        command
            .args(["-cpu", self.cpu, "-m", "2G", "-nodefaults", "-display", "none", "-no-reboot"])
            // In pages of the host's own size: so few of the 2 GiB are used that larger ones would
            // take longer to clear.
            .args(["-object", "memory-backend-memfd,id=memory,size=2G"])
            .args(["-machine", "pc,memory-backend=memory"])
            .args(["-debugcon", "stdio", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
            .arg("-kernel")
            .arg(program)
            .args(["-append", &options]);
        let said = listen(&mut command, Patience::InAll(LIMIT), |_| ())?;
        let status = said.status;
        let right = match self.omit {
            Some(_) => WRONG,
            None => RIGHT,
        };
        // Where it has to go wrong, the first line says how.
        let shown = if status == Some(WRONG) && right == WRONG { 1 } else { usize::MAX };
        let lines = said.lines.iter().take(shown);
        Ok(Outcome {
            wrong: (status != Some(right)).then(|| format!("it ended with status {status:?}")),
            brief: String::new(),
            more: lines.map(|line| format!("| {line}")).collect(),
        })
    }
}

/// All of them.
pub fn cases() -> impl Iterator<Item = Case> {
    TESTS.iter().map(|test| Case {
        name: test.name(),
        short: test.short,
        arch: Arch::X86_64,
        run: Box::new(|_| test.run(&fetch::check_x86()?)),
    })
}

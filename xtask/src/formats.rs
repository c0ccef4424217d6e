//! Every format of the engine for arm64 and RISC-V, about which an emulated processor is asked
//! (`hypervisor/src/bin/formats/`, `examples/riscv64/src/bin/formats.rs`).

use std::process::Command;

use crate::console::{Patience, listen};
use crate::emulator::Emulator;
use crate::fetch;
use crate::qemu::CPU_MAX;
use crate::tools::{self, QEMU_RISCV};
use crate::{Error, LIMIT, Result};

/// The name of the test.
pub const NAME: &str = "formats";

/// The hart, which has all formats of RISC-V.
const HART: &str = "rv64";

/// Processors of arm64, and whether all formats are for them.
const PROCESSORS: [(&str, &str, bool); 2] =
    [("max", CPU_MAX, true), ("cortex-a57", "cortex-a57", false)];

/// The output of one run.
#[derive(Debug, PartialEq, Eq)]
struct Judged {
    right: usize,
    skipped: usize,
}

/// Whether it came out as it should.
fn judge(lines: &[String], all: bool) -> std::result::Result<Judged, String> {
    let begin = |with: &'static str| lines.iter().filter(move |line| line.starts_with(with));
    if let Some(wrong) = begin("formats: WRONG").next() {
        return Err(wrong.clone());
    }
    if !lines.iter().any(|line| line == "formats: done, 0 wrong") {
        let last = lines.last().map_or("nothing", String::as_str);
        return Err(format!("it did not come to its end after: {last}"));
    }
    let skipped = begin("formats: skipped: ").count();
    match begin("formats: ok: ").count() {
        0 => Err("nothing was checked".into()),
        _ if all && skipped != 0 => Err(format!("{skipped} formats were skipped")),
        right => Ok(Judged { right, skipped }),
    }
}

/// Runs it on each processor, and hands on what it says of each format, and a line for each run.
///
/// # Errors
/// What is missing; or what is wrong, or was not looked at.
pub fn run(only: Option<&str>, mut line: impl FnMut(&str)) -> Result<()> {
    let asked = |name: &str| only.is_none_or(|only| only == name);
    let mut runs = Vec::new();
    if asked(HART) {
        tools::qemu_riscv()?;
        let mut qemu = Command::new(QEMU_RISCV);
        qemu.args(["-machine", "virt", "-cpu", "rv64,h=true"]);
        qemu.arg("-kernel").arg(fetch::example(fetch::TARGET_RISCV, "formats-riscv64")?);
        runs.push((HART, qemu, true));
    }
    for (name, cpu, all) in PROCESSORS.into_iter().filter(|it| asked(it.0)) {
        let mut qemu = Emulator::named(None)?.command();
        let program = fetch::hypervisor(NAME)?;
        qemu.args(["-machine", "virt,virtualization=on", "-cpu", cpu]).arg("-kernel").arg(program);
        runs.push((name, qemu, all));
    }
    if runs.is_empty() {
        let names = PROCESSORS.map(|(name, ..)| name).join(", ");
        return Err(Error::Other(format!("there is no such processor: {HART}, {names}")));
    }
    for (name, mut qemu, all) in runs {
        qemu.args(["-m", "512M", "-no-reboot"]).args([
            "-nodefaults",
            "-display",
            "none",
            "-serial",
            "stdio",
        ]);
        let said = listen(&mut qemu, Patience::InAll(LIMIT), &mut line)?;
        let judged = judge(&said.lines, all);
        let Judged { right, skipped } =
            judged.map_err(|why| Error::Failed(format!("{name}: {why}")))?;
        line(&format!("{name}: {right} formats are right, {skipped} are not for this processor"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Judged, judge};

    #[test]
    fn what_is_wrong_or_was_skipped_is_said() {
        let lines = |said: &[&str]| said.iter().map(|line| line.to_string()).collect::<Vec<_>>();
        let right = lines(&["formats: ok: a", "formats: done, 0 wrong"]);
        let judged = |right, skipped| Ok(Judged { right, skipped });
        assert_eq!(judge(&right, true), judged(1, 0));
        let part = lines(&["formats: ok: a", "formats: skipped: b", "formats: done, 0 wrong"]);
        assert_eq!(judge(&part, false), judged(1, 1));
        assert!(judge(&part, true).is_err(), "not all");
        assert!(judge(&part[1..], false).is_err(), "nothing was checked");
        assert!(judge(&right[..1], true).is_err(), "no end");
        let wrong = lines(&["formats: ok: a", "formats: WRONG: b", "formats: done, 1 wrong"]);
        assert_eq!(judge(&wrong, true), Err("formats: WRONG: b".into()));
    }
}

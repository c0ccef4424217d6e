//! A guest's tables that a device goes by, too (`hypervisor/src/bin/smmu/`): right as it is; and
//! wrong where the device, or the processor, is not told what to forget.

use std::path::Path;

use crate::console::{Patience, listen};
use crate::emulator::Emulator;
use crate::fetch;
use crate::qemu::CPU_MAX;
use crate::tools;
use crate::{Error, LIMIT, Result};

/// The name of the test.
pub const NAME: &str = "smmu";

/// The first version of QEMU whose system MMU has a stage 2 that it can be asked for alone.
const FIRST: u32 = 9;

/// The address at which the program looks for what is left out: `PLANT` of `main.rs`.
const PLANT: u64 = 0x47ff_f000;

/// Parts that are left out, and what has to be seen then; nothing, if all checks have to be right.
const RUNS: [(&str, u64, Option<&str>); 3] = [
    ("all are told", 0, None),
    ("the device is not told", 1, Some("the device writes to a frame that was taken away")),
    ("the processor is not told", 2, Some("the guest reads a frame that was taken away")),
];

/// Whether it came out as it should.
fn judge(lines: &[String], seen: Option<&str>) -> std::result::Result<String, String> {
    let begin = |with: &'static str| lines.iter().filter(move |line| line.starts_with(with));
    let (right, wrong) = (begin("smmu: ok: ").count(), begin("smmu: WRONG: ").count());
    if !lines.iter().any(|line| line.starts_with("smmu: done, ")) {
        let last = lines.last().map_or("nothing", String::as_str);
        return Err(format!("it did not come to its end after: {last}"));
    }
    match seen {
        None if wrong == 0 && right != 0 => Ok(format!("{right} checks are right")),
        None => Err(begin("smmu: WRONG: ")
            .next()
            .map_or_else(|| "nothing was checked".into(), String::clone)),
        // What is not about forgetting is right all the same.
        Some(what) if right != 0 && begin("smmu: WRONG: ").any(|line| line.ends_with(what)) => {
            Ok(format!("as it should, {wrong} checks go wrong: {what}"))
        }
        Some(what) => Err(format!("it was not seen that {what}")),
    }
}

/// Runs it, and hands on a line for each run.
///
/// # Errors
/// What is missing; or what was wrong, or not seen.
pub fn run(mut line: impl FnMut(&str)) -> Result<()> {
    let installed = Emulator::named(None)?;
    let version = installed.version()?;
    let emulator = match tools::major(&version) {
        Some(FIRST..) => installed,
        _ => Emulator::named(Some(Path::new("debian-13"))).map_err(|why| {
            Error::Missing(format!("a system MMU with stage 2 takes QEMU 9: {why}"))
        })?,
    };
    let program = fetch::hypervisor(NAME)?;
    for (name, plant, seen) in RUNS {
        let mut qemu = emulator.command();
        // Time goes by instructions: the device takes a tenth of a second for each word.
        qemu.args(["-icount", "shift=10", "-cpu", CPU_MAX, "-m", "128M"])
            .args(["-machine", "virt,virtualization=on,gic-version=3,highmem=off,iommu=smmuv3"])
            .args(["-global", "arm-smmuv3.stage=2", "-device", "edu,addr=2"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .args(["-device", &format!("loader,addr={PLANT:#x},data={plant},data-len=8")])
            .args(["-no-reboot", "-kernel"])
            .arg(&program);
        let said = listen(&mut qemu, Patience::InAll(LIMIT), |_| ())?;
        match judge(&said.lines, seen) {
            Ok(what) => line(&format!("{name:26}{what}")),
            Err(why) => return Err(Error::Failed(format!("{name}: {why}"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::judge;

    #[test]
    fn what_is_left_out_has_to_be_seen() {
        let lines = |said: &[&str]| said.iter().map(|line| line.to_string()).collect::<Vec<_>>();
        let right = lines(&["smmu: ok: a", "smmu: done, 0 wrong"]);
        let wrong = lines(&["smmu: ok: a", "smmu: WRONG: b: c", "smmu: done, 1 wrong"]);
        assert!(judge(&right, None).is_ok());
        assert!(judge(&right, Some("c")).is_err());
        assert!(judge(&wrong, None).is_err());
        assert!(judge(&wrong, Some("c")).is_ok());
        assert!(judge(&wrong, Some("d")).is_err());
        assert!(judge(&right[..1], None).is_err(), "no end");
        assert!(judge(&right[1..], None).is_err(), "nothing was checked");
    }
}

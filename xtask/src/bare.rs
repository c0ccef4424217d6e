//! A kernel of checks (`hypervisor/src/bin/bare/`), run on the emulator alone and under the
//! hypervisor: what is right without it has to be right with it.

use std::collections::BTreeMap;

use crate::console::{Patience, listen};
use crate::fetch::{self, Files};
use crate::qemu::{self, Boot, CPU_MAX};
use crate::tools::file;
use crate::{Error, LIMIT, Result, out};

/// The name of the test.
pub const NAME: &str = "bare";

/// A machine that it is run on.
struct Model {
    name: &'static str,
    cpu: &'static str,
    /// Whether memory has tags, which the guest does not see: it has the instructions alone.
    tags: bool,
    /// Contents of EL2's registers before the hypervisor sets them: nothing, or all traps that
    /// there are.
    plant: Option<&'static str>,
}

/// Those.
const MODELS: [Model; 3] = [
    Model { name: "max", cpu: CPU_MAX, tags: false, plant: None },
    Model { name: "cortex-a57", cpu: "cortex-a57", tags: false, plant: None },
    Model { name: "tags", cpu: CPU_MAX, tags: true, plant: Some("unknown-registers") },
];
/// How many of them.
const CPUS: u8 = 3;
/// Its memory, in MiB.
const MEMORY: u64 = 256;

/// The emulator's own error: a processor can be started twice at the same time.
const KNOWN: &str = "won twice";

impl Model {
    /// Further arguments for QEMU.
    fn more(&self) -> [&'static str; 2] {
        ["-machine", if self.tags { "mte=on" } else { "mte=off" }]
    }
}

/// The checks of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Group {
    right: u32,
    wrong: Vec<String>,
}

/// Returns the lines of one run, by group.
fn groups(console: &[String]) -> std::result::Result<BTreeMap<String, Group>, String> {
    let mut groups = BTreeMap::<String, Group>::new();
    let mut is_done = false;
    for line in console {
        let Some(said) = line.strip_prefix("bare: ") else {
            return Err(format!("the console says: {line}"));
        };
        match said.splitn(3, ": ").collect::<Vec<_>>()[..] {
            [group, "ok", _] => groups.entry(group.into()).or_default().right += 1,
            [group, "WRONG", what] => {
                groups.entry(group.into()).or_default().wrong.push(what.into())
            }
            _ if said.starts_with("done, ") => is_done = true,
            _ => return Err(format!("the console says: {line}")),
        }
    }
    match is_done {
        true => Ok(groups),
        false => Err(format!("it did not come to its end after {} lines", console.len())),
    }
}

/// Runs it on the emulator alone.
fn alone(files: &Files, model: &Model) -> Result<Vec<String>> {
    // Where the hypervisor would have loaded it, because it was linked for that.
    let at = (1 << 30) + (64 << 20);
    let loader = format!("loader,file={},addr={at:#x},cpu-num=0,force-raw=on", file(&files.kernel));
    let mut command = files.emulator.command();
    command
        .args(["-machine", "virt,gic-version=3", "-cpu", model.cpu])
        .args(model.more())
        .args(["-smp", &CPUS.to_string()])
        .args(["-m", &format!("{}M", MEMORY + 64), "-no-reboot"])
        .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
        .args(["-device", &loader]);
    Ok(listen(&mut command, Patience::InAll(LIMIT), |_| ())?.lines)
}

/// Runs it under the hypervisor.
fn under(files: &Files, model: &Model) -> Result<Vec<String>> {
    let more = model.more().map(String::from);
    let boot = Boot {
        cpu: model.cpu,
        plant: model.plant,
        more: &more,
        cpus: CPUS,
        memory: MEMORY,
        ..Boot::of(files)
    };
    Ok(qemu::run(&boot, |_| (), |_| ())?.console)
}

/// Runs both ways, on each model, and hands a table on.
///
/// # Errors
/// What is missing; or what is wrong under the hypervisor, or alone without being known to be.
pub fn run(files: &Files, mut line: impl FnMut(&str)) -> Result<()> {
    let files = Files { kernel: fetch::hypervisor("bare")?, ..files.clone() };
    let mut wrong = Vec::new();
    line(&format!("{:24}{:>20}{:>24}", "", "emulator alone", "under the hypervisor"));
    for kind in &MODELS {
        let model = kind.name;
        let read = |console: Vec<String>, how| {
            groups(&console).map_err(|why| Error::Failed(format!("{model}, {how}: {why}")))
        };
        let alone =
            read(out::clocked(&format!("{model}, alone"), || alone(&files, kind))?, "alone")?;
        let under = read(
            out::clocked(&format!("{model}, under the hypervisor"), || under(&files, kind))?,
            "under the hypervisor",
        )?;
        for (name, group) in &alone {
            let nothing = Group::default();
            let other = under.get(name).unwrap_or(&nothing);
            let of = |group: &Group| {
                let all = group.right + group.wrong.len() as u32;
                format!("{} of {all} right", group.right)
            };
            line(&format!("{:24}{:>20}{:>24}", format!("{model} {name}"), of(group), of(other)));
            let known = |what: &&String| !what.contains(KNOWN);
            let found = group.wrong.iter().filter(known).map(|what| format!("alone: {what}"));
            wrong.extend(
                found
                    .chain(other.wrong.iter().cloned())
                    .map(|what| format!("{model} {name}: {what}")),
            );
            if other.right == 0 {
                wrong.push(format!("{model} {name}: nothing is right under the hypervisor"));
            }
        }
        let twice = alone.values().flat_map(|group| &group.wrong).find(|what| what.contains(KNOWN));
        if let Some(what) = twice {
            line(&format!("  the emulator alone: {what}"));
        }
    }
    match wrong.first() {
        None => Ok(()),
        Some(first) => {
            Err(Error::Failed(format!("{} checks are wrong; the first: {first}", wrong.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn lines_are_counted_by_group() {
        let said =
            |lines: &[&str]| groups(&lines.iter().map(|line| line.to_string()).collect::<Vec<_>>());
        let read = said(&[
            "bare: a: ok: 1: 2",
            "bare: a: WRONG: no: way",
            "bare: b: ok: 3",
            "bare: done, 1 wrong",
        ]);
        let read = read.unwrap_or_default();
        assert_eq!((read["a"].right, &*read["a"].wrong[0]), (1, "no: way"));
        assert_eq!((read["b"].right, read["b"].wrong.len()), (1, 0));
        assert!(said(&["bare: a: ok: 1"]).is_err(), "no end");
        assert!(said(&["bare: WRONG: panicked", "bare: done, 0 wrong"]).is_err());
        assert!(said(&["PANIC in the hypervisor", "bare: done, 0 wrong"]).is_err());
    }
}

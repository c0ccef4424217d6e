//! The linear map, step by step: what each step takes, counted by an emulator and by the software machine.
//!
//! A kernel of our own makes the map at EL1 (`hypervisor/src/bin/linear.rs`), and a plugin of QEMU's (`xtask/plugin`) counts
//! the instructions that are executed. The program `tablewright` makes the same map of the same memory, by the same code, on
//! the software machine, and counts what it asks of the machine. One is the other in instructions:
//!
//! | software machine | arm64 |
//! |---|---|
//! | a barrier after stores | `dsb ishst`, `isb` |
//! | a wait for completion | `dsb ish`, `isb` |
//! | an invalidation of a page, of a range, of everything | `tlbi` |
//! | a root is loaded | `isb`, after the register is written |

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::fetch::{self, QEMU};
use crate::qemu::CPU_MAX;
use crate::{About as _, Error, LIMIT, Result};

/// The name of the test.
pub const NAME: &str = "linear-map";

/// The memory that the kernel maps, of 4 GiB. Once there is a map, the step `late` adds the rest.
const MEMORY: &str = "40000000-ffffffff : System RAM\n";
const MEMORY_SIZE: &str = "4G";

/// How often roots are loaded: the engine's way loads that of its coarse map, and another again.
fn loads(step: &str) -> u64 {
    if step == "tablewright" { 2 } else { 0 }
}

/// How often each instruction was executed, by its name.
pub type Counts = BTreeMap<String, u64>;

/// Runs both, and compares them. Each line of a table is handed on.
///
/// # Errors
/// Something is missing, or does not come to its end; or where the two do not agree.
pub fn run(line: impl FnMut(&str)) -> Result<()> {
    fetch::qemu_arm64()?;
    compare(&simulated()?, &emulated()?, line)
}

fn compare(
    simulated: &[(String, Counts)],
    emulated: &[Counts],
    mut line: impl FnMut(&str),
) -> Result<()> {
    const KINDS: [&str; 4] = ["dsb ishst", "dsb ish", "isb", "tlbi"];
    if simulated.len() != emulated.len() {
        return Err(Error::Failed(format!(
            "the kernel has made {} steps, and the software machine {}",
            emulated.len(),
            simulated.len()
        )));
    }
    line(&format!(
        "{:36}{}",
        "",
        KINDS.map(|kind| format!("{kind:>10}")).concat()
    ));
    let mut wrong = Vec::new();
    for ((step, expected), counts) in simulated.iter().zip(emulated) {
        let mut alike = Counts::new();
        for (name, count) in counts {
            let name = if name.starts_with("tlbi ") {
                "tlbi"
            } else {
                name
            };
            *alike.entry(name.into()).or_default() += count;
        }
        let kinds = counts.iter().filter(|(name, _)| name.starts_with("tlbi "));
        let kinds: String = kinds
            .map(|(name, count)| format!("  {count} {name}"))
            .collect();
        let loads = match loads(step) {
            0 => String::new(),
            loads => format!("  {loads} isb of them after roots are loaded"),
        };
        for (side, counts, more) in [
            ("software machine", expected, loads),
            ("emulator", &alike, kinds),
        ] {
            let of = |kind: &str| counts.get(kind).copied().unwrap_or(0);
            let columns = KINDS.map(|kind| format!("{:>10}", of(kind))).concat();
            line(&format!("{step:18}{side:18}{columns}{more}"));
        }
        if alike != *expected {
            wrong.push(format!(
                "{step}: the emulator counts {counts:?}, the software machine {expected:?}"
            ));
        }
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(Error::Failed(wrong.join("; "))),
    }
}

/// What the software machine counts, in instructions, step by step.
fn simulated() -> Result<Vec<(String, Counts)>> {
    let memory = fetch::scratch()?.join("iomem");
    std::fs::write(&memory, MEMORY).about(memory.display())?;
    // As it is built for tests, so that it need not be built again.
    let mut program = fetch::cargo();
    program
        .args([
            "run",
            "--quiet",
            "--profile",
            "test",
            "--package",
            "tablewright-lab",
            "--",
        ])
        .args([
            "map-mem",
            "--on",
            "machine",
            "--machine",
            "neutral",
            "--json",
            "--iomem",
        ])
        .arg(&memory);
    let said: Value = serde_json::from_str(&fetch::output(&mut program)?)
        .map_err(|error| Error::Failed(format!("tablewright says: {error}")))?;
    let row = |row: &Value| {
        let step = row["step"].as_str()?;
        let number = |name: &str| row[name].as_u64();
        let (stores, waits) = (number("barriers")?, number("waits_for_completion")?);
        let counts = [
            ("dsb ishst", stores),
            ("dsb ish", waits),
            ("isb", stores + waits + loads(step)),
            ("tlbi", number("invalidations_issued")?),
        ];
        let counts = counts.into_iter().filter(|&(_, count)| count != 0);
        let counts = counts.map(|(name, count)| (name.to_string(), count));
        Some((step.to_string(), counts.collect()))
    };
    let rows = said["rows"].as_array().map(|rows| rows.iter().map(row));
    rows.and_then(Iterator::collect)
        .ok_or_else(|| Error::Failed("tablewright does not say what it has counted".into()))
}

/// What the emulator counts, step by step.
fn emulated() -> Result<Vec<Counts>> {
    let (kernel, plugin) = (fetch::hypervisor("linear")?, fetch::plugin()?);
    counted(
        &["-machine", "virt", "-m", MEMORY_SIZE],
        &kernel,
        &plugin,
        "linear",
    )
}

/// What the plugin counts between each mark 1 and the next mark, while QEMU runs a program that says in the end that it is
/// done.
///
/// # Errors
/// The program says something else, or nothing.
pub fn counted(machine: &[&str], program: &Path, plugin: &Path, name: &str) -> Result<Vec<Counts>> {
    let said = boot(machine, program, plugin, name)?;
    said.lines()
        .filter_map(|line| line.strip_prefix("counted 1"))
        .map(counts)
        .collect::<Option<_>>()
        .ok_or_else(|| Error::Failed(format!("{QEMU} does not say what it has counted")))
}

/// `, COUNT NAME`, as often as there are names.
fn counts(line: &str) -> Option<Counts> {
    let parts = line.split(", ").skip(1);
    let part = |part: &str| {
        let (count, name) = part.split_once(' ')?;
        Some((name.to_string(), count.parse().ok()?))
    };
    parts.map(part).collect()
}

/// Boots the kernel, and gives what the plugin has said.
fn boot(machine: &[&str], kernel: &Path, plugin: &Path, name: &str) -> Result<String> {
    let mut child = Command::new(QEMU)
        .args(machine)
        .args(["-cpu", CPU_MAX])
        .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-plugin")
        .arg(plugin)
        .args(["-d", "plugin"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .about(QEMU)?;
    // What it says is less than a pipe holds.
    let started = Instant::now();
    while child.try_wait().about(QEMU)?.is_none() && started.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(20));
    }
    // It may be gone already.
    let _ = child.kill();
    let output = child.wait_with_output().about(QEMU)?;
    let console = String::from_utf8_lossy(&output.stdout);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    match console.trim() {
        said if said.strip_prefix(name) == Some(": done") => Ok(log),
        // QEMU may not have started it: plugins are of one version of its interface.
        "" => Err(Error::Failed(
            log.lines()
                .last()
                .unwrap_or("the kernel says nothing")
                .into(),
        )),
        other => Err(Error::Failed(other.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, compare, counts};

    fn of(text: &str) -> Counts {
        counts(text).unwrap_or_default()
    }

    #[test]
    fn a_line_of_the_plugin_is_read() {
        let read = of(", 11 dsb ishst, 1 tlbi vmalle1is");
        assert_eq!(
            read.into_iter().collect::<Vec<_>>(),
            [("dsb ishst".into(), 11), ("tlbi vmalle1is".into(), 1)]
        );
        assert_eq!(counts(""), Some(Counts::new()));
        assert_eq!(counts(", dsb"), None);
        assert_eq!(counts(", x dsb"), None);
    }

    #[test]
    fn every_difference_is_found() {
        let compare = |expected: &str, got: &str| {
            let simulated = [("step".to_string(), of(expected))];
            compare(&simulated, &[of(got)], |_| ()).is_ok()
        };
        // Invalidations of any kind are invalidations.
        assert!(compare(
            ", 2 isb, 5 tlbi",
            ", 2 isb, 3 tlbi vae1, 2 tlbi vmalle1"
        ));
        assert!(!compare(", 2 isb, 5 tlbi", ", 2 isb, 3 tlbi vae1"));
        assert!(!compare(", 2 isb", ", 3 isb"));
        assert!(!compare(", 2 isb", ""));
        assert!(!compare(", 2 isb", ", 2 isb, 1 dmb ish"));
        assert!(super::compare(&[], &[of("")], |_| ()).is_err());
    }
}

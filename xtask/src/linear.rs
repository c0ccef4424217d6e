//! The linear map, step by step: what each step takes, counted by an emulator and by the software
//! machine.
//!
//! A kernel of our own makes the map at EL1 (`hypervisor/src/bin/linear.rs`), and a plugin of
//! QEMU's (`xtask/plugin`) counts the instructions that are executed. The program `tablewright`
//! makes the same map of the same memory, by the same code, on the software machine, and counts
//! what it asks of the machine. One is the other in instructions:
//!
//! | software machine | arm64 |
//! |---|---|
//! | a barrier after stores | `dsb ishst`, `isb` |
//! | a wait for completion | `dsb ish`, `isb` |
//! | an invalidation of a page, of a range, of everything | `tlbi` |
//! | a root is loaded | `isb`, after the register is written |

use serde_json::Value;

use crate::counted::{self, Counts, counts};
use crate::emulator::Emulator;
use crate::fetch;
use crate::tools::{self, QEMU};
use crate::{About as _, Error, Result, out};

/// The name of the test.
pub const NAME: &str = "linear-map";

/// The memory that the kernel maps, of 4 GiB. Once there is a map, the step `late` adds the rest.
const MEMORY: &str = "40000000-ffffffff : System RAM\n";
const MEMORY_SIZE: &str = "4G";

/// How often roots are loaded: the engine's way loads that of its coarse map, and another again.
fn loads(step: &str) -> u64 {
    if step == "tablewright" { 2 } else { 0 }
}

/// Runs both, and compares them. Each line of a table is handed on.
///
/// # Errors
/// Something is missing, or does not come to its end; or where the two do not agree.
pub fn run(line: impl FnMut(&str)) -> Result<()> {
    tools::qemu_arm64()?;
    fetch::can_count(&Emulator::Installed)?;
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
    line(&format!("{:36}{}", "", KINDS.map(|kind| format!("{kind:>10}")).concat()));
    let mut wrong = Vec::new();
    for ((step, expected), counts) in simulated.iter().zip(emulated) {
        let mut alike = Counts::new();
        for (name, count) in counts {
            let name = if name.starts_with("tlbi ") { "tlbi" } else { name };
            *alike.entry(name.into()).or_default() += count;
        }
        let kinds = counts.iter().filter(|(name, _)| name.starts_with("tlbi "));
        let kinds: String = kinds.map(|(name, count)| format!("  {count} {name}")).collect();
        let loads = match loads(step) {
            0 => String::new(),
            loads => format!("  {loads} isb of them after roots are loaded"),
        };
        for (side, counts, more) in
            [("software machine", expected, loads), ("emulator", &alike, kinds)]
        {
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

/// Counts instructions on the software machine, step by step.
fn simulated() -> Result<Vec<(String, Counts)>> {
    let memory = tools::scratch()?.join("iomem");
    std::fs::write(&memory, MEMORY).about(memory.display())?;
    // As it is built for tests, so that it need not be built again.
    let mut program = tools::cargo();
    program
        .args(["run", "--quiet", "--profile", "test", "--package", "tablewright-lab", "--"])
        .args(["map-mem", "--on", "machine", "--machine", "neutral", "--json", "--iomem"])
        .arg(&memory);
    let said = out::clocked("simulating", || tools::output(&mut program));
    let said: Value = serde_json::from_str(&said?)
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

/// Counts instructions in the emulator, step by step.
fn emulated() -> Result<Vec<Counts>> {
    let (kernel, plugin) = (fetch::hypervisor("linear")?, fetch::plugin(&Emulator::Installed)?);
    let ran = counted::boot(&kernel, &plugin.display().to_string(), &["-m", MEMORY_SIZE])?;
    ran.check("linear")?;
    ran.log
        .lines()
        .filter_map(|line| line.strip_prefix("counted 1"))
        .map(counts)
        .collect::<Option<_>>()
        .ok_or_else(|| Error::Failed(format!("{QEMU} does not say what it has counted")))
}

#[cfg(test)]
mod tests {
    use super::{Counts, compare, counts};

    fn of(text: &str) -> Counts {
        counts(text).unwrap_or_default()
    }

    #[test]
    fn every_difference_is_found() {
        let compare = |expected: &str, got: &str| {
            let simulated = [("step".to_string(), of(expected))];
            compare(&simulated, &[of(got)], |_| ()).is_ok()
        };
        // Invalidations of any kind are invalidations.
        assert!(compare(", 2 isb, 5 tlbi", ", 2 isb, 3 tlbi vae1, 2 tlbi vmalle1"));
        assert!(!compare(", 2 isb, 5 tlbi", ", 2 isb, 3 tlbi vae1"));
        assert!(!compare(", 2 isb", ", 3 isb"));
        assert!(!compare(", 2 isb", ""));
        assert!(!compare(", 2 isb", ", 2 isb, 1 dmb ish"));
        assert!(super::compare(&[], &[of("")], |_| ()).is_err());
    }
}

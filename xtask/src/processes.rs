//! A kernel whose processes fork (`examples/arm64`): what each step takes, counted by an emulator,
//! and compared with what is expected.
//!
//! The expectation is a formula for each step, in the crate `tablewright-processes`; the software
//! machine is held to the same one (`machine/checks/tests/machine/processes.rs`). The
//! instructions of the kernel are counted, too, and not compared: they are the compiler's.

use serde_json::{Value, json};
use tablewright_processes::Step;

use crate::counted::{self, Counts, counts};
use crate::emulator::Emulator;
use crate::example::{self, Kernel};
use crate::fetch;
use crate::tools::QEMU;
use crate::{Error, Result};

/// Memory as the kernel takes it, and two processors.
const MACHINE: [&str; 4] = ["-m", "256M", "-smp", "2"];

/// The instructions of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Executed {
    tlbi: u64,
    dsb: u64,
    isb: u64,
    dmb: u64,
    /// The kernel's, without those that zero and copy pages.
    instructions: u64,
    /// Which invalidations, by their names in assembly.
    which: Vec<String>,
}

impl Executed {
    /// `None` if there is something that has no place in it.
    fn of(counts: &Counts) -> Option<Self> {
        let mut executed = Self::default();
        for (name, count) in counts {
            let (kind, operand) = name.split_once(' ').unwrap_or((name, ""));
            if kind == "tlbi" {
                executed.which.push(operand.to_uppercase());
            }
            *match kind {
                "tlbi" => &mut executed.tlbi,
                "dsb" => &mut executed.dsb,
                "isb" => &mut executed.isb,
                "dmb" => &mut executed.dmb,
                "instructions" => &mut executed.instructions,
                _ => return None,
            } += count;
        }
        Some(executed)
    }

    /// Returns the instructions that a step should take.
    fn expected(step: Step) -> [u64; 3] {
        let expected = step.expected();
        [expected.invalidations, expected.dsb(), expected.isb()]
    }

    fn is_as_expected(&self, step: Step) -> bool {
        [self.tlbi, self.dsb, self.isb] == Self::expected(step)
    }
}

/// Reads the log of each step, in their order.
fn read(log: &str) -> Result<Vec<(Step, Executed)>> {
    let mut lines = log.lines();
    Step::ALL
        .into_iter()
        .map(|step| {
            let start = format!("counted {},", step.number());
            let line = lines.find(|line| line.starts_with(&start));
            let executed = line.and_then(counts).and_then(|it| Executed::of(&it));
            let missing = || format!("{QEMU} does not say what it has counted in {}", step.name());
            Ok((step, executed.ok_or_else(|| Error::Failed(missing()))?))
        })
        .collect()
}

/// One line if there is a difference.
fn judge(steps: &[(Step, Executed)]) -> Result<()> {
    let wrong = steps.iter().filter(|(step, executed)| !executed.is_as_expected(*step));
    let wrong: Vec<String> = wrong
        .map(|(step, Executed { tlbi, dsb, isb, .. })| {
            let [invalidations, barriers, synchronised] = Executed::expected(*step);
            format!(
                "{}: {tlbi} TLBI, {dsb} DSB, {isb} ISB, and expected are {invalidations}, \
                 {barriers}, {synchronised}",
                step.name()
            )
        })
        .collect();
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(Error::Failed(wrong.join("; "))),
    }
}

fn row(step: Step, executed: &Executed) -> Value {
    let Executed { tlbi, dsb, isb, dmb, instructions, ref which } = *executed;
    let [invalidations, barriers, synchronised] = Executed::expected(step);
    json!({
        "step": step.name(), "faults": step.faults(), "tlbi": tlbi, "dsb": dsb, "isb": isb,
        "dmb": dmb,
        "instructions": instructions, "which": which,
        "expected": { "tlbi": invalidations, "dsb": barriers, "isb": synchronised },
    })
}

/// Runs the kernel, and compares. Each line is handed on: a table, or one line of JSON.
///
/// # Errors
/// Something is missing, the kernel does not come to its end, or the counts are not those that are
/// expected.
pub fn run(as_json: bool, mut line: impl FnMut(&str)) -> Result<()> {
    let (kernel, plugin) = (Kernel::Arm64.build()?, fetch::plugin(&Emulator::Installed)?);
    let plugin = format!("{},instructions=on", plugin.display());
    let ran = counted::boot(&kernel, &plugin, &MACHINE)?;
    ran.check(example::NAME)?;
    let steps = read(&ran.log)?;
    if as_json {
        let rows: Vec<Value> = steps.iter().map(|(step, it)| row(*step, it)).collect();
        line(&json!({ "rows": rows }).to_string());
    } else {
        line(&format!(
            "{:14}{:>8}{:>8}{:>8}{:>8}{:>14}{:>12}  which",
            "step", "faults", "TLBI", "DSB", "ISB", "instructions", "per fault"
        ));
        for (step, executed) in &steps {
            let faults = step.faults();
            let each = match executed.instructions.checked_div(faults) {
                Some(each) => each.to_string(),
                None => String::new(),
            };
            let row = format!(
                "{:14}{faults:8}{:8}{:8}{:8}{:14}{each:>12}  {}",
                step.name(),
                executed.tlbi,
                executed.dsb,
                executed.isb,
                executed.instructions,
                executed.which.join(", ")
            );
            line(row.trim_end());
        }
    }
    judge(&steps)
}

#[cfg(test)]
mod tests {
    use super::{judge, read};

    const LOG: &str = "\
counted 0, 9 isb
counted 1, 4000 instructions, 4096 dsb ishst, 4096 isb
counted 0
counted 2, 10 instructions, 1 dmb ish, 1 dsb ish, 2 dsb ishst, 3 isb, 1 tlbi rvale1is
counted 3, 10 instructions, 1000 dsb ish, 2000 dsb ishst, 3000 isb, 1000 tlbi vale1is
counted 4, 10 instructions, 1000 dsb ish, 1000 dsb ishst, 2000 isb, 1000 tlbi vale1is
counted 5, 10 instructions, 1 dsb ish, 1 dsb ishst, 2 isb, 1 tlbi vale1is
counted 6, 10 instructions
counted 7, 10 instructions, 1 dsb ish, 1 dsb ishst, 2 isb, 1 tlbi rvale1is
counted 8, 10 instructions, 1 dsb ish, 2 isb, 1 tlbi aside1is
";

    #[test]
    fn a_log_is_read_and_judged() {
        let judged = |log: &str| {
            let judged = read(log).and_then(|steps| judge(&steps));
            judged.map_err(|error| error.to_string())
        };
        assert_eq!(judged(LOG), Ok(()));
        let more = LOG.replace("1 tlbi rvale1is\ncounted 3", "2 tlbi rvale1is\ncounted 3");
        let wrong = "fork: 2 TLBI, 3 DSB, 3 ISB, and expected are 1, 3, 3";
        assert_eq!(judged(&more), Err(wrong.into()));
        for (from, to) in [("counted 8", "counted 9"), ("4096 isb", "x isb"), ("3 isb", "3 wfi")] {
            assert!(judged(&LOG.replace(from, to)).is_err(), "{from}");
        }
    }
}

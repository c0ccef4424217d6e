//! An end, as herd prints it.

use std::collections::BTreeSet;

use super::super::layout::Layout;
use super::super::program::*;
use super::first::entry_address;
use crate::hardware::Fault;

/// A word of memory where an entry may stand is above this.
const MEMORY: u64 = 1 << 30;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// A part of what is reported, at an end.
pub(crate) fn show(
    seen: &Seen,
    test: &Test,
    layout: &Layout,
    value: &dyn Fn(&Term) -> u64,
    fault: &dyn Fn(usize, usize) -> Option<Fault>,
) -> String {
    let Seen { name, thread, what } = seen;
    match what {
        Observed::Value(term, labels) => {
            format!("{name}={};", number(test, layout, labels, value(term)))
        }
        Observed::Fault(instructions, asked) => {
            let taken = |&at: &usize| {
                let (kind, _) = FaultKind::of(fault(*thread, at)?)?;
                (*asked == FaultKind::Any || *asked == kind).then_some((at, word(kind)?))
            };
            match (instructions.iter().find_map(taken), word(*asked)) {
                (Some((at, kind)), _) => {
                    let variable = match test.code[*thread].code[at].op.place() {
                        Some(Place::Virtual(of)) => &test.addresses[*of].name,
                        _ => "",
                    };
                    let known = name.ends_with(&format!(",{variable}"));
                    let of = if known { String::new() } else { format!(",{variable}") };
                    format!("Fault({name}{of},MMU:{kind});")
                }
                (None, Some(kind)) => format!("~Fault({name},MMU:{kind});"),
                (None, None) => format!("~Fault({name});"),
            }
        }
    }
}

/// The name of a kind, if it is one.
fn word(kind: FaultKind) -> Option<&'static str> {
    match kind {
        FaultKind::Any => None,
        FaultKind::Translation => Some("Translation"),
        FaultKind::AccessFlag => Some("AccessFlag"),
        FaultKind::Permission => Some("Permission"),
    }
}

/// The label that a number stands for.
fn label(value: u64, labels: &[String]) -> Option<String> {
    let number = value.checked_sub(LABELS)? / 4;
    labels.get(usize::try_from(number).ok()?).map(|label| format!("label:\"{label}\""))
}

/// A number, or the entry that it is.
fn number(test: &Test, layout: &Layout, labels: &[String], value: u64) -> String {
    if value < MEMORY {
        let addresses = || test.addresses.iter().enumerate();
        if let Some((_, address)) = addresses().find(|(_, address)| address.va == value) {
            return address.name.clone();
        }
        let entry = addresses().find(|(number, _)| entry_address(*number) == value);
        return match entry {
            Some((_, address)) => format!("PTE({})", address.name),
            None => label(value, labels).unwrap_or_else(|| value.to_string()),
        };
    }
    let page = (0..test.data.len()).find(|&page| layout.page(page) == value & ADDRESS);
    let Some(page) = page else { return value.to_string() };
    let mut text = format!("(oa:PA({})", test.data[page].name);
    for (name, bit, usual) in [
        ("af", ARM_ACCESSED, true),
        ("db", ARM_READ_ONLY, false),
        ("dbm", ARM_DBM, false),
        ("valid", VALID, true),
        ("el0", ARM_USER, true),
    ] {
        let set = value & bit != 0;
        if set != usual {
            let shown = if name == "db" { !set } else { set };
            text += &format!(", {name}:{}", u8::from(shown));
        }
    }
    text + ")"
}

/// One end in one way of writing it: parts in order, no spaces.
pub(crate) fn canonical(line: &str) -> String {
    let parts = line.split(';').map(|part| part.split_whitespace().collect::<String>());
    let mut parts: Vec<String> =
        parts.filter(|part| !part.is_empty()).map(|part| part.replace("D-MMU", "MMU")).collect();
    parts.sort_unstable();
    parts.join("; ")
}

/// The ends that herd7 has printed, as [`Explored`](super::super::Explored) has them; `None` if it
/// has printed none.
///
/// ```
/// use tablewright_machine::litmus::herd_outcomes;
/// let printed = "Test T Allowed\nStates 2\n1:X0=0;  ~Fault(P1:L0,x);\n1:X0=1;\nOk\n";
/// let ends = herd_outcomes(printed).unwrap();
/// assert!(ends.contains("1:X0=0; ~Fault(P1:L0,x)") && ends.contains("1:X0=1"));
/// ```
pub fn outcomes(printed: &str) -> Option<BTreeSet<String>> {
    let mut lines = printed.lines().skip_while(|line| !line.starts_with("States "));
    let count: usize = lines.next()?.strip_prefix("States ")?.trim().parse().ok()?;
    let ends: BTreeSet<String> = lines.take(count).map(canonical).collect();
    (ends.len() == count).then_some(ends)
}

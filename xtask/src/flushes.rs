//! Instructions of a flush of 16 ranges of stage 2, counted by an emulator.
//!
//! `hypervisor/src/bin/flushes.rs` unmaps 16 pages that do not adjoin, in one gather, and finishes
//! it between two marks. The second half of the invalidation, of what was combined with the guest's
//! stage 1, is of everything, so that one is enough for all ranges; so are the wait before it, and
//! that for the end.

use crate::counted::{self, Counts, counts};
use crate::emulator::Emulator;
use crate::fetch::Files;
use crate::qemu::{self, Boot, End};
use crate::tools::{self, file};
use crate::{About as _, Error, Result, fetch};

/// The name of the test.
pub const NAME: &str = "flush-of-16";

/// The name of the test of the hypervisor's own flushes.
pub const OWN: &str = "flushes-in-order";

/// By what the hypervisor has all processors forget a page; three in a row; and 2 MiB with their
/// table, which takes an invalidation of all levels.
const IN_ORDER: [(u32, &[&str]); 3] = [
    (1, &["tlbi ipas2le1is"]),
    // Two pages by one instruction, and the third.
    (2, &["tlbi ripas2le1is", "tlbi ipas2le1is"]),
    (3, &["tlbi ripas2e1is"]),
];

/// Runs the hypervisor without a guest, and compares what its flushes execute, instruction by
/// instruction.
///
/// # Errors
/// Something is missing, or does not come to its end; or the order is another.
pub fn run_own(files: &Files) -> Result<()> {
    let plugin = fetch::plugin(&files.emulator)?;
    let log = tools::scratch()?.join("flushes.log");
    let more = [
        "-plugin".to_string(),
        format!("{},order=on", file(&plugin)),
        "-d".into(),
        "plugin".into(),
        "-D".into(),
        log.display().to_string(),
    ];
    let boot = Boot { measure: Some("flush"), more: &more, ..Boot::of(files) };
    let ran = qemu::run(&boot, |_| (), |_| ())?;
    if ran.end != End::PoweredOff {
        return Err(Error::Failed(format!("it ended so: {:?}", ran.end)));
    }
    let said = std::fs::read_to_string(&log).about(log.display())?;
    for (mark, expected) in IN_ORDER {
        // What is changed is published; then it is forgotten by intermediate physical address; when
        // it is, what was combined with stage 1; and that is waited for, too.
        let mut right = vec!["dsb ishst", "isb"];
        right.extend(expected);
        right.extend(["dsb ish", "tlbi vmalle1is", "dsb ish", "isb"]);
        if ordered(&said, mark) != right {
            return Err(Error::Failed(format!(
                "flush {mark} executes {}, and should execute {}",
                ordered(&said, mark).join(", "),
                right.join(", ")
            )));
        }
    }
    Ok(())
}

/// Returns the instructions after a mark, by the plugin, in order, without barriers that only order
/// accesses: they are the compiler's.
fn ordered(said: &str, mark: u32) -> Vec<&str> {
    let prefix = format!("ordered {mark}, ");
    let line = said.lines().find_map(|line| line.strip_prefix(&prefix));
    let all = line.unwrap_or_default().split(", ");
    all.filter(|name| !name.starts_with("dmb")).collect()
}

/// Instructions for 16 ranges, in the names of the plugin.
const EXPECTED: [(&str, u64); 5] =
    [("dsb ishst", 1), ("tlbi ipas2le1is", 16), ("dsb ish", 2), ("tlbi vmalle1is", 1), ("isb", 1)];

/// Runs the program, and compares what is counted.
///
/// # Errors
/// Something is missing, or does not come to its end; or more or less is executed than a flush
/// needs.
pub fn run() -> Result<()> {
    tools::qemu_arm64()?;
    let (program, plugin) = (fetch::hypervisor("flushes")?, fetch::plugin(&Emulator::Installed)?);
    let machine = ["-machine", "virtualization=on", "-m", "128M"];
    let ran = counted::boot(&program, &plugin.display().to_string(), &machine)?;
    ran.check("flushes")?;
    let all = ran.log.lines();
    let all: Option<Vec<_>> =
        all.filter_map(|line| line.strip_prefix("counted 1")).map(counts).collect();
    let expected: Counts =
        EXPECTED.into_iter().map(|(name, count)| (name.to_string(), count)).collect();
    match all.as_deref() {
        Some([counts]) if *counts == expected => Ok(()),
        other => {
            Err(Error::Failed(format!("a flush of 16 ranges is {other:?}, and not {expected:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ordered;

    #[test]
    fn an_order_is_read_without_what_only_orders() {
        let said = "counted 1, 2 isb\nordered 1, isb, dmb ish, isb\nordered 10, dsb ish\n";
        assert_eq!(ordered(said, 1), ["isb", "isb"]);
        assert_eq!(ordered(said, 10), ["dsb ish"]);
    }
}

//! A kernel of our own in QEMU, with the plugin that counts what is executed between two marks
//! (`xtask/plugin`).

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::console::{Patience, listen};
use crate::qemu::CPU_MAX;
use crate::tools::QEMU;
use crate::{Error, LIMIT, Result, out};

/// How often each instruction was executed, by its name.
pub type Counts = BTreeMap<String, u64>;

/// The output of a kernel and the plugin.
pub struct Ran {
    /// The console.
    pub console: String,
    /// QEMU's log, in which the plugin writes.
    pub log: String,
}

/// Boots a kernel, with the plugin and its arguments.
///
/// # Errors
/// QEMU cannot be run.
pub fn boot(kernel: &Path, plugin: &str, machine: &[&str]) -> Result<Ran> {
    let mut command = Command::new(QEMU);
    command
        .args(["-machine", "virt", "-cpu", CPU_MAX])
        .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
        .args(machine)
        .arg("-kernel")
        .arg(kernel)
        .args(["-plugin", plugin, "-d", "plugin"])
        .stderr(Stdio::piped());
    let said = out::clocked("counting", || listen(&mut command, Patience::InAll(LIMIT), |_| ()))?;
    Ok(Ran { console: said.lines.join("\n"), log: said.log })
}

impl Ran {
    /// Whether the kernel has come to its end, and that right.
    ///
    /// # Errors
    /// What it has said instead, in its last line.
    pub fn check(&self, name: &str) -> Result<()> {
        let last = |text: &str| text.trim().lines().last().map(String::from);
        match last(&self.console) {
            Some(line) if line == format!("{name}: done") => Ok(()),
            Some(line) if line.contains("WRONG") => Err(Error::Failed(line)),
            Some(line) => {
                Err(Error::Failed(format!("the kernel did not come to its end after: {line}")))
            }
            // QEMU may not have started it: plugins are of one version of its interface.
            None => Err(Error::Failed(
                last(&self.log).unwrap_or_else(|| "the kernel says nothing".into()),
            )),
        }
    }
}

/// `, COUNT NAME`, as often as there are names.
pub fn counts(line: &str) -> Option<Counts> {
    let parts = line.split(", ").skip(1);
    let part = |part: &str| {
        let (count, name) = part.split_once(' ')?;
        Some((name.to_string(), count.parse().ok()?))
    };
    parts.map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::{Counts, Ran, counts};

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
    fn a_kernel_says_how_it_ends() {
        let said = |console: &str, log: &str| {
            let (console, log) = (console.into(), log.into());
            let checked = Ran { console, log }.check("it");
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(said("it: a step\nit: done\n", ""), None);
        assert_eq!(said("it: WRONG: why\n", "").as_deref(), Some("it: WRONG: why"));
        let cut = said("it: a step\n", "").unwrap_or_default();
        assert!(cut.ends_with("it: a step"), "{cut}");
        assert_eq!(said("", "no plugin\n").as_deref(), Some("no plugin"));
    }
}

//! A copy of the engine with a bug in it, and the hypervisor on that: what the engine itself would
//! do wrong, which its source knows nothing of. As in `machine/tests/engine_bugs`, a place of the
//! engine is found by its text.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tools;
use crate::{About as _, Error, Result, fetch};

/// A bug of the engine's.
pub struct Bug {
    /// Its name.
    pub name: &'static str,
    /// Below `engine/src`.
    file: &'static str,
    /// The text that is there, once.
    find: &'static str,
    /// The text that stands there instead.
    with: &'static str,
}

/// A table is freed at once: before anything is visible, or invalidated.
pub const FREED_AT_ONCE: Bug = Bug {
    name: "freed-at-once",
    file: "shared/gather.rs",
    find: "let wait = self.flush.issue::<F, P>(space.platform(), target);",
    with: "let freed = self.flush.detached.take(); \
           Completed::<F, P>::new(space.platform().clone(), 0, freed).finish(|_| ()); \
           let wait = self.flush.issue::<F, P>(space.platform(), target);",
};

/// The packages that the hypervisor is built of.
const PARTS: [&str; 4] = ["engine", "hypervisor", "linear", "walker"];

impl Bug {
    /// The text with the bug in it.
    fn plant(&self, text: &str) -> Result<String> {
        match text.matches(self.find).count() {
            1 => Ok(text.replace(self.find, self.with)),
            count => Err(Error::Failed(format!(
                "{}: engine/src/{} says {count} times, and should once: {}",
                self.name, self.file, self.find
            ))),
        }
    }
}

/// Writes a file, if it is not that already: what is not changed is not built again.
fn write(to: &Path, text: &[u8]) -> Result<()> {
    if fs::read(to).is_ok_and(|there| there == text) {
        return Ok(());
    }
    fs::write(to, text).about(to.display())
}

fn copy(
    from: &Path,
    to: &Path,
    each: &mut impl FnMut(&Path, Vec<u8>) -> Result<Vec<u8>>,
) -> Result<()> {
    if from.is_file() {
        let text = fs::read(from).about(from.display())?;
        return write(to, &each(from, text)?);
    }
    fs::create_dir_all(to).about(to.display())?;
    let entries = fs::read_dir(from).about(from.display())?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let mut names: Vec<_> = names.collect::<std::io::Result<_>>().about(from.display())?;
    names.sort();
    for name in names {
        if name != "target" {
            copy(&from.join(&name), &to.join(&name), each)?;
        }
    }
    Ok(())
}

/// Copies directories of the workspace, with each file as `each` returns it, and makes a workspace
/// of them. Files are the same in each run in number and order.
///
/// # Errors
/// A file cannot be read or written, or `each` fails.
pub fn copy_workspace(
    to: &Path,
    parts: &[&str],
    each: &mut impl FnMut(&Path, Vec<u8>) -> Result<Vec<u8>>,
) -> Result<()> {
    let from = tools::root();
    for part in parts {
        copy(&from.join(part), &to.join(part), each)?;
    }
    let manifest = from.join("Cargo.toml");
    let manifest = fs::read_to_string(&manifest).about(manifest.display())?;
    // The hypervisor is not in the workspace, but for what both have.
    let members = parts.iter().map(|&part| match part {
        "hypervisor" => "hypervisor/common",
        part => part,
    });
    let members = format!("members = {:?}\n", members.collect::<Vec<_>>());
    let line = |line: &str| match line.split_once(" = ") {
        Some(("members", _)) => members.clone(),
        Some(("default-members", _)) => String::new(),
        _ => format!("{line}\n"),
    };
    let manifest: String = manifest.lines().map(line).collect();
    write(&to.join("Cargo.toml"), manifest.as_bytes())
}

/// The hypervisor on an engine with this bug.
///
/// # Errors
/// It cannot be built, or the engine does not say any more what is replaced.
pub fn hypervisor(bug: &Bug) -> Result<PathBuf> {
    let (from, to) = (tools::root(), tools::target().join("planted"));
    let place = from.join("engine/src").join(bug.file);
    copy_workspace(&to, &PARTS, &mut |file, text| match file == place {
        true => bug.plant(&String::from_utf8_lossy(&text)).map(Vec::from),
        false => Ok(text),
    })?;
    fetch::hypervisor_in(&to, &to.join("target"))
}

#[cfg(test)]
mod tests {
    use super::FREED_AT_ONCE;
    use crate::tools;

    #[test]
    fn the_engine_still_says_what_is_replaced() {
        let file = tools::root().join("engine/src").join(FREED_AT_ONCE.file);
        let text = std::fs::read_to_string(file).unwrap_or_default();
        assert!(FREED_AT_ONCE.plant(&text).is_ok());
        assert!(FREED_AT_ONCE.plant("").is_err());
    }
}

//! Programs that have to be there, places for files, and commands.
//!
//! QEMU has to be installed, if [no other](crate::emulator) is named; that is said before it is
//! done, and done only by root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{About as _, Error, Result};

/// The program that emulates the machine.
pub const QEMU: &str = "qemu-system-aarch64";

/// The program that emulates a machine of x86-64.
pub const QEMU_X86: &str = "qemu-system-x86_64";

/// The program that emulates a machine of RISC-V.
pub const QEMU_RISCV: &str = "qemu-system-riscv64";

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// Returns the directory of builds: absolute, because the hypervisor is built from another
/// directory.
pub fn target() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    std::path::absolute(&target).unwrap_or(target)
}

/// Returns the directory of files for guests.
///
/// # Errors
/// There is no such place, and it cannot be made.
pub fn scratch() -> Result<PathBuf> {
    let scratch = target().join("guest");
    fs::create_dir_all(&scratch).about(scratch.display())?;
    Ok(scratch)
}

/// Runs a command and returns what it says.
///
/// # Errors
/// It cannot be run, or fails; then the last line of what it says.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().about(&name)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().rev().find(|line| !line.is_empty()).unwrap_or_default();
        return Err(Error::Failed(format!("{name} failed: {last}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether there is such a program.
pub fn is_installed(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok()
}

/// Sees to it that there is a QEMU for arm64.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn qemu_arm64() -> Result<()> {
    qemu(QEMU, "qemu-system-arm")
}

/// Sees to it that QEMU is there: a program, out of a package of Debian's.
fn qemu(program: &str, package: &str) -> Result<()> {
    if is_installed(program) {
        return Ok(());
    }
    let install = format!("apt-get install --yes --no-install-recommends {package}");
    let by_hand = format!(
        "{program} is missing. Install QEMU 7.2 or later, with `sudo {install}` on Debian and \
         Ubuntu, or put a {program} of your own into PATH"
    );
    let is_root = output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    if !is_root || !is_installed("apt-get") {
        return Err(Error::Other(by_hand));
    }
    eprintln!("installing QEMU: {install}");
    let mut words = install.split(' ');
    let status =
        Command::new(words.next().unwrap_or_default()).args(words).stdout(Stdio::null()).status();
    match status.about("apt-get")?.success() {
        true => Ok(()),
        false => Err(Error::Other(by_hand)),
    }
}

/// Sees to it that there is a QEMU for RISC-V.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn qemu_riscv() -> Result<()> {
    qemu(QEMU_RISCV, "qemu-system-misc opensbi")
}

/// Sees to it that there is a QEMU for x86-64.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn qemu_x86() -> Result<()> {
    qemu(QEMU_X86, "qemu-system-x86")
}

/// The build tool, in the repository.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The number before the first point of a version.
pub fn major(version: &str) -> Option<u32> {
    version.split_once('.')?.0.parse().ok()
}

/// A file in an option of QEMU's: a comma in a value is doubled.
pub fn file(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// A device of QEMU's that loads a file to an address before the machine starts.
pub fn loader(path: &Path, at: u64) -> String {
    format!("loader,file={},addr={at:#x},force-raw=on", file(path))
}

#[cfg(test)]
mod tests {
    use super::major;

    #[test]
    fn a_version_is_read() {
        assert_eq!(major("7.2.22"), Some(7));
        assert_eq!(major("10.0.13"), Some(10));
        assert_eq!(major("something else"), None);
    }
}

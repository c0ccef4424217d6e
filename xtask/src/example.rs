//! The example kernels (`examples/`) in QEMU: built, booted, and held to what they say in the end.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;
use tablewright_watch::session::Loaded;

use crate::console::{Patience, listen};
use crate::emulator::Emulator;
use crate::fetch;
use crate::qemu::CPU_MAX;
use crate::tools::{self, QEMU, QEMU_RISCV, QEMU_X86};
use crate::{About as _, Arch, Error, LIMIT, Result};

/// The kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    /// A linear map, memory by demand, a user, and a page that another processor has to forget
    #[value(name = "x86-64")]
    X86_64,
    /// Processes that fork, and write what they share, on two processors
    Arm64,
    /// Memory by demand, processes that fork, and a page that another hart has to forget
    Riscv64,
}

/// The first word of their lines.
pub const NAME: &str = "example";

/// The last line of each.
const DONE: &str = "example: done";

impl Kernel {
    /// Builds it.
    ///
    /// # Errors
    /// It cannot be built, or QEMU cannot be had.
    pub fn build(self) -> Result<PathBuf> {
        match self {
            Self::X86_64 => {
                tools::qemu_x86()?;
                fetch::example(fetch::TARGET_X86, "example-x86-64")
            }
            Self::Arm64 => {
                tools::qemu_arm64()?;
                fetch::example(fetch::TARGET, "example-arm64")
            }
            Self::Riscv64 => {
                tools::qemu_riscv()?;
                fetch::example(fetch::TARGET_RISCV, "example-riscv64")
            }
        }
    }

    /// The numbers of processors that it is booted with.
    fn processors(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 | Self::Arm64 => &["2"],
            Self::Riscv64 => &["1", "2"],
        }
    }

    /// The emulator that lets it be watched.
    fn newest(self) -> Result<Emulator> {
        match self {
            Self::X86_64 => Emulator::newest(Arch::X86_64),
            Self::Arm64 => Emulator::newest(Arch::Arm64),
            Self::Riscv64 => Emulator::newest_riscv(),
        }
    }

    /// The emulator, and a machine.
    fn machine(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::X86_64 => {
                (QEMU_X86, &["-cpu", "max", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
            }
            Self::Arm64 => (QEMU, &["-machine", "virt", "-cpu", CPU_MAX]),
            Self::Riscv64 => (QEMU_RISCV, &["-machine", "virt"]),
        }
    }
}

/// Boots a kernel, and hands on each line that it says. `watch`: and what is wrong with its TLB
/// maintenance.
///
/// # Errors
/// It cannot be built or booted, says that something is wrong, or says nothing for a minute;
/// something was found.
pub fn run(kernel: Kernel, watch: bool, mut line: impl FnMut(&str)) -> Result<()> {
    let image = kernel.build()?;
    let watching = match watch {
        true => Some((fetch::watching_plugin()?, kernel.newest()?)),
        false => None,
    };
    let watching = watching.as_ref();
    kernel.processors().iter().try_for_each(|count| {
        match watching {
            None => boot(kernel, Command::new(kernel.machine().0), &image, count, &mut line)?,
            Some((plugin, emulator)) => {
                let loaded = Loaded::new(plugin).about("what is found")?;
                let mut command = emulator.command();
                command.args(["-accel", "tcg,thread=single", "-plugin"]).arg(&loaded.option);
                let booted = boot(kernel, command, &image, count, &mut line);
                let found = loaded.findings().about("what is found")?;
                for it in &found {
                    line(&format!("{}: {}; {}", it.rule, it.missing, it.then));
                }
                if !found.is_empty() {
                    return Err(Error::Failed("the kernel's TLB maintenance is wrong".into()));
                }
                booted?;
                line(&format!("watched, -smp {count}: nothing was found"));
            }
        }
        Ok(())
    })
}

fn boot(
    kernel: Kernel,
    mut command: Command,
    image: &Path,
    count: &str,
    line: &mut impl FnMut(&str),
) -> Result<()> {
    let (qemu, machine) = kernel.machine();
    // The fences are counted by the plugin of the QEMU that is installed.
    let counts = kernel == Kernel::Riscv64 && command.get_program() == qemu;
    command
        .args(machine)
        .args(["-smp", count, "-m", "256M", "-no-reboot"])
        .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(image);
    if counts {
        let plugin = format!("{},riscv=on", fetch::plugin(&Emulator::Installed)?.display());
        command.args(["-plugin", &plugin, "-d", "plugin"]).stderr(Stdio::piped());
    }
    let said = listen(&mut command, Patience::InAll(LIMIT), line)?;
    let last = said.lines.last();
    let last = last.map_or("the kernel says nothing", String::as_str);
    match last {
        DONE if counts => compare(&said.lines, &said.log),
        DONE => Ok(()),
        wrong if wrong.contains("WRONG") => Err(Error::Failed(wrong.into())),
        last if said.ended => Err(Error::Failed(format!("the kernel ended after: {last}"))),
        last => Err(Error::Failed(format!(
            "{} s after its start the kernel was still at: {last}",
            LIMIT.as_secs()
        ))),
    }
}

/// Whether the kernel of RISC-V says how many fences there were from its first mark to the next,
/// as the plugin has counted them.
fn compare(lines: &[String], log: &str) -> Result<()> {
    let said = lines.iter().find_map(|line| {
        let (_, count) = line.strip_suffix(" fences")?.rsplit_once("by ")?;
        count.parse::<u64>().ok()
    });
    let counted = log.lines().find_map(|line| {
        let mut parts = line.strip_prefix("counted 1, ")?.split(", ");
        parts.find_map(|part| part.strip_suffix(" sfence.vma")?.parse().ok())
    });
    match said.is_some() && said == counted {
        true => Ok(()),
        false => Err(Error::Failed(format!(
            "the kernel says that there were {said:?} fences, and {counted:?} were counted"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::compare;

    #[test]
    fn another_number_of_fences_is_an_error() {
        let lines = |count: u64| vec![format!("example: fork: 2 faults, by {count} fences")];
        let log = "counted 0\ncounted 1, 4 sfence.vma\n";
        assert!(compare(&lines(4), log).is_ok());
        assert!(compare(&lines(5), log).is_err() && compare(&lines(4), "").is_err());
        assert!(compare(&[], "").is_err(), "neither says anything");
    }
}

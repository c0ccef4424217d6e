//! Which QEMU emulates a machine of arm64: the one that is installed, another one that is there, or
//! Debian 13's, which is fetched and run where it is unpacked, with its own libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use object::{Object as _, ObjectSection as _};
use tablewright_watch::session;

use crate::debian::{self, Debian, Release};
use crate::tools::{self, QEMU, output};
use crate::{About as _, Arch, Error, Result};

/// The names of Debian 13's QEMU, and of that of its backports.
const FETCHED: &str = "debian-13";
const NEWEST: &str = "debian-13-backports";

/// A QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Emulator {
    /// The one that is installed.
    #[default]
    Installed,
    /// This program.
    Program(PathBuf),
    /// One that was unpacked there with all that it needs.
    Unpacked(Unpacked),
}

/// A program that is run where it was unpacked: by its own loader, with its own libraries and data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    loader: PathBuf,
    libraries: PathBuf,
    program: PathBuf,
    data: PathBuf,
}

impl Unpacked {
    /// The one of this name below this directory.
    fn at(root: &Path, program: &str) -> Result<Self> {
        let usr = root.join("usr");
        let program = usr.join("bin").join(program);
        let data = std::fs::read(&program).about(program.display())?;
        let loader = interpreter(&data)
            .ok_or_else(|| Error::Other(format!("{} names no loader", program.display())))?;
        let lib = usr.join("lib");
        let libraries = std::fs::read_dir(&lib).about(lib.display())?;
        let libraries = libraries
            .filter_map(std::result::Result::ok)
            .map(|entry| entry.path())
            // Firmware of other architectures may lie beside them.
            .find(|path| path.join("libc.so.6").exists());
        Ok(Self {
            loader: usr.join(loader),
            libraries: libraries
                .ok_or_else(|| Error::Other(format!("{} has no libraries", lib.display())))?,
            program,
            data: usr.join("share/qemu"),
        })
    }
}

/// The loader that a program names, below the root.
fn interpreter(program: &[u8]) -> Option<PathBuf> {
    let file = object::File::parse(program).ok()?;
    let named = file.section_by_name(".interp")?.data().ok()?;
    let text = std::str::from_utf8(named).ok()?.trim_end_matches('\0');
    Some(PathBuf::from(text.strip_prefix('/')?))
}

impl Emulator {
    /// Returns the emulator that the option names; the one that is installed, if it is not given.
    ///
    /// # Errors
    /// It is not there, or cannot be had.
    pub fn named(name: Option<&Path>) -> Result<Self> {
        match name {
            None => tools::qemu_arm64().map(|()| Self::Installed),
            Some(name) if name == Path::new(FETCHED) => {
                let names = ["apt-qemu", "qemu-13"];
                Self::fetched(Release::Trixie, names, "qemu-system-arm", QEMU)
            }
            Some(name) if name == Path::new(NEWEST) => Self::newest(Arch::Arm64),
            Some(program) => {
                let emulator = Self::Program(program.into());
                emulator.version().map(|_| emulator)
            }
        }
    }

    /// Returns the newest one that Debian 13 has, in its backports.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn newest(architecture: Arch) -> Result<Self> {
        let (name, package, program) = match architecture {
            Arch::Arm64 => ("qemu-13-backports", "qemu-system-arm", QEMU),
            Arch::X86_64 => ("qemu-13-backports-x86", "qemu-system-x86", tools::QEMU_X86),
        };
        Self::fetched(Release::Backports, ["apt-qemu-backports", name], package, program)
    }

    /// Returns the newest one for RISC-V.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn newest_riscv() -> Result<Self> {
        let names = ["apt-qemu-backports", "qemu-13-backports-riscv"];
        Self::fetched(Release::Backports, names, "qemu-system-riscv", tools::QEMU_RISCV)
    }

    /// One that is unpacked: `names` are those of the directories of its package manager and its
    /// own.
    fn fetched(
        release: Release,
        [apt, name]: [&'static str; 2],
        package: &str,
        program: &str,
    ) -> Result<Self> {
        let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
        let debian = Debian { release, architecture: architecture.trim(), apt };
        let root = debian::with_dependencies(&tools::scratch()?, &debian, package, name)?;
        Unpacked::at(&root, program).map(Self::Unpacked)
    }

    /// A command that runs it.
    pub fn command(&self) -> Command {
        match self {
            Self::Installed => Command::new(QEMU),
            Self::Program(program) => Command::new(program),
            Self::Unpacked(Unpacked { loader, libraries, program, data }) => {
                let mut command = Command::new(loader);
                command.arg("--library-path").arg(libraries).arg(program);
                command.arg("-L").arg(data);
                // The firmware of a PC.
                command.arg("-L").arg(data.with_file_name("seabios"));
                command
            }
        }
    }

    /// Its version: `7.2.22`.
    ///
    /// # Errors
    /// It cannot be run, or is none.
    pub fn version(&self) -> Result<String> {
        let mut command = self.command();
        let said = output(command.arg("--version"))?;
        let version = session::version(&said).map(String::from);
        version.ok_or_else(|| {
            let name = command.get_program().to_string_lossy();
            Error::Other(format!("{name} is no QEMU"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tablewright_watch::session::version;

    use super::{Emulator, interpreter};

    #[test]
    fn a_version_is_read() {
        let said = "QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)\nCopyright";
        assert_eq!(version(said), Some("10.0.13"));
        assert_eq!(version("something else"), None);
    }

    #[test]
    fn what_is_no_qemu_is_refused() {
        assert!(Emulator::named(Some(Path::new("/no/such/qemu"))).is_err());
        let other = Emulator::named(Some(Path::new("true"))).map_err(|error| error.to_string());
        assert_eq!(other, Err("true is no QEMU".into()));
    }

    #[test]
    fn a_program_names_its_loader() {
        let this = std::env::current_exe().and_then(std::fs::read);
        let loader = interpreter(&this.unwrap_or_default()).unwrap_or_default();
        assert!(Path::new("/").join(&loader).exists(), "{loader:?}");
        assert_eq!(interpreter(b"no program"), None);
    }
}

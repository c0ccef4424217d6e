//! Files out of Debian's packages, fetched by a package manager with all its state in a directory
//! of its own: nothing of this computer's packages is changed, and no rights are needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;

use crate::tools::output;
use crate::{About as _, Error, Result, out};

/// A release of Debian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Release {
    /// Bookworm: Linux 6.1, QEMU 7.2
    #[default]
    #[value(name = "12")]
    Bookworm,
    /// Trixie: Linux 6.12, QEMU 10.0
    #[value(name = "13")]
    Trixie,
    /// Trixie with its backports: a newer Linux, QEMU 11.1
    #[value(name = "13-backports")]
    Backports,
}

impl Release {
    /// Its name, by which packages are looked for.
    fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Backports => "trixie-backports",
        }
    }

    /// The name of the release that it adds to, if it does.
    fn base(self) -> Option<&'static str> {
        (self == Self::Backports).then_some("trixie")
    }
}

/// Debian for one kind of processor, and the directory of its package manager.
pub struct Debian<'a> {
    pub release: Release,
    pub architecture: &'a str,
    pub apt: &'static str,
}

/// Debian 12 for guests of arm64.
pub const ARM64: Debian<'_> =
    Debian { release: Release::Bookworm, architecture: "arm64", apt: "apt" };
/// Debian 13 for guests of arm64.
pub const ARM64_13: Debian<'_> =
    Debian { release: Release::Trixie, architecture: "arm64", apt: "apt-13" };
/// Debian 13's backports for guests of arm64.
pub const ARM64_BACKPORTS: Debian<'_> =
    Debian { release: Release::Backports, architecture: "arm64", apt: "apt-13-backports" };
/// Debian 12 for guests of x86-64.
pub const AMD64: Debian<'_> =
    Debian { release: Release::Bookworm, architecture: "amd64", apt: "apt-amd64" };

/// The keys that the packages are signed with.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One file out of a package of Debian's, kept from then on.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn from_package(
    scratch: &Path,
    debian: &Debian<'_>,
    package: &str,
    member: &str,
    name: &str,
) -> Result<PathBuf> {
    all_from_package(scratch, debian, package, &[(member, name)])?;
    Ok(scratch.join(name))
}

/// Files out of one package of Debian's, each by a pattern and under a name of its own, kept from
/// then on: if one is missing all are fetched again, so that they are of the same version.
///
/// # Errors
/// They cannot be had, and how to get them by hand.
pub fn all_from_package(
    scratch: &Path,
    debian: &Debian<'_>,
    package: &str,
    members: &[(&str, &str)],
) -> Result<()> {
    let architecture = debian.architecture;
    if members.iter().all(|(_, name)| scratch.join(name).exists()) {
        return Ok(());
    }
    let by_hand = |why: &Error| {
        let what = members.iter().map(|(member, name)| {
            let file = scratch.join(name);
            format!("{member} to {}", file.display())
        });
        Error::Other(format!(
            "{why}; to do it by hand, put out of Debian's {package} for {architecture} {}",
            what.collect::<Vec<_>>().join(", ")
        ))
    };
    eprintln!(
        "fetching {package} for {architecture} from deb.debian.org, to {}",
        scratch.display()
    );
    // Names differ in their extensions as well.
    let part = |file: &Path| PathBuf::from(format!("{}.part", file.display()));
    let fetch = || -> Result<()> {
        let archive = download(scratch, debian, package)?;
        let all =
            members.iter().map(|(member, _)| unpack(&archive, member)).collect::<Result<Vec<_>>>();
        fs::remove_file(&archive).about(archive.display())?;
        // Under their names only when all are whole.
        for (data, (_, name)) in all?.iter().zip(members) {
            let part = part(&scratch.join(name));
            fs::write(&part, data).about(part.display())?;
        }
        for (_, name) in members {
            let file = scratch.join(name);
            fs::rename(part(&file), &file).about(file.display())?;
        }
        Ok(())
    };
    out::slowly("fetching", fetch).map_err(|why| by_hand(&why))
}

/// The newest package of a name, as a file.
fn download(scratch: &Path, debian: &Debian<'_>, package: &str) -> Result<PathBuf> {
    let apt = Apt::new(scratch, debian)?;
    // A package that only says which is the newest of its kind.
    let depends = output(apt.command("apt-cache").args(["depends", "--important", package]))?;
    let newest = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    // The kernel itself has a package of its own there.
    let kind = if debian.release == Release::Backports { "binary" } else { "image" };
    let package = newest.map_or_else(|| package.to_string(), |rest| format!("linux-{kind}-{rest}"));
    output(apt.command("apt-get").args(["download", &package]))?;
    let archive =
        fs::read_dir(scratch).about(scratch.display())?.filter_map(std::result::Result::ok);
    let archive = archive.map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with(&format!("{package}_"))
                && [debian.architecture, "all"]
                    .iter()
                    .any(|of| name.ends_with(&format!("_{of}.deb")))
        })
    });
    archive.ok_or_else(|| Error::Other(format!("{package} was not downloaded")))
}

/// Unpacks the files of a package whose names have a pattern.
fn unpack(archive: &Path, member: &str) -> Result<Vec<u8>> {
    let mut unpack = Command::new("dpkg-deb");
    let mut unpack = unpack
        .arg("--fsys-tarfile")
        .arg(archive)
        .stdout(Stdio::piped())
        .spawn()
        .about("dpkg-deb")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--to-stdout", "--wildcards", member]);
    tar.stdin(unpack.stdout.take().map_or_else(Stdio::null, Stdio::from));
    let unpacked = tar.output().about("tar")?;
    unpack.wait().about("dpkg-deb")?;
    match unpacked.status.success() && !unpacked.stdout.is_empty() {
        true => Ok(unpacked.stdout),
        false => Err(Error::Other(format!("{} holds no {member}", archive.display()))),
    }
}

/// A package manager for one kind of processor, with everything in a directory of its own.
struct Apt {
    directory: PathBuf,
}

impl Apt {
    fn new(scratch: &Path, debian: &Debian<'_>) -> Result<Self> {
        let directory = scratch.join(debian.apt);
        let architecture = debian.architecture;
        let at = directory.display();
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(directory.join(part)).about(directory.display())?;
        }
        let configuration = format!(
            "APT::Architecture \"{architecture}\";\nAPT::Architectures {{ \"{architecture}\"; \
             }};\nDir::State \"{at}\";\nDir::State::status \"{at}/status\";\nDir::Cache \
             \"{at}/cache\";\nDir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \
             \"-\";\nAPT::Sandbox::User \"\";\nAPT::Default-Release \"{}\";\n",
            debian.release.name()
        );
        let suites = debian.release.base().into_iter().chain([debian.release.name()]);
        let source: String = suites
            .map(|suite| {
                format!("deb [signed-by={KEYS}] http://deb.debian.org/debian {suite} main\n")
            })
            .collect();
        for (name, text) in
            [("apt.conf", &*configuration), ("sources.list", &*source), ("status", "")]
        {
            let file = directory.join(name);
            fs::write(&file, text).about(file.display())?;
        }
        let apt = Self { directory };
        output(apt.command("apt-get").arg("update"))?;
        Ok(apt)
    }

    /// A command that looks nowhere else, and leaves what it downloads beside the directory.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.directory.join("apt.conf"));
        command.current_dir(self.directory.parent().unwrap_or(&self.directory));
        command
    }
}

/// A package with all that it depends on, unpacked into a directory, kept from then on.
///
/// # Errors
/// It cannot be had.
pub fn with_dependencies(
    scratch: &Path,
    debian: &Debian<'_>,
    package: &str,
    name: &str,
) -> Result<PathBuf> {
    let directory = scratch.join(name);
    if directory.exists() {
        return Ok(directory);
    }
    eprintln!(
        "fetching {package} of Debian's {} with all that it needs (35 MB) from deb.debian.org, to \
         {}",
        debian.release.name(),
        directory.display()
    );
    out::slowly("fetching", || {
        let part = scratch.join(format!("{name}.part"));
        if part.exists() {
            fs::remove_dir_all(&part).about(part.display())?;
        }
        // As nothing is installed there, everything is downloaded.
        let apt = Apt::new(scratch, debian)?;
        output(apt.command("apt-get").args([
            "install",
            "--yes",
            "--download-only",
            "--no-install-recommends",
            package,
        ]))?;
        let cache = apt.directory.join("cache/archives");
        for archive in fs::read_dir(&cache).about(cache.display())? {
            let archive = archive.about(cache.display())?.path();
            if archive.extension().is_some_and(|kind| kind == "deb") {
                output(Command::new("dpkg-deb").arg("--extract").args([&archive, &part]))?;
                fs::remove_file(&archive).about(archive.display())?;
            }
        }
        // Under its name only when it is whole.
        fs::rename(&part, &directory).about(directory.display())?;
        Ok(directory)
    })
}

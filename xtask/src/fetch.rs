//! What a boot needs, fetched and built where it is missing.
//!
//! The kernel and the guest's shell come from Debian, by a package manager that works in a directory of its own under
//! `target/guest`: nothing of this computer's packages is changed, and no rights are needed. QEMU has to be installed; that
//! is said before it is done, and done only by root.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::example::Kernel;
use crate::load::Bell;
use crate::{About as _, Error, Result, initramfs, load, out};

/// The program that emulates the machine.
pub const QEMU: &str = "qemu-system-aarch64";

/// The program that emulates a machine of x86-64.
pub const QEMU_X86: &str = "qemu-system-x86_64";

/// The target that the hypervisor is built for: no floating point, whose registers are the guest's.
const TARGET: &str = "aarch64-unknown-none-softfloat";

/// The target that the check of x86-64 is built for.
const TARGET_X86: &str = "x86_64-unknown-none";

/// The target that programs of an x86-64 guest are built for: static.
const TARGET_GUEST: &str = "x86_64-unknown-linux-musl";

/// Debian for one kind of processor, and the directory of its package manager.
struct Debian {
    architecture: &'static str,
    apt: &'static str,
}

const ARM64: Debian = Debian {
    architecture: "arm64",
    apt: "apt",
};
const AMD64: Debian = Debian {
    architecture: "amd64",
    apt: "apt-amd64",
};

/// Where the guest's packages come from.
const SOURCE: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main\n";

/// The files of a boot.
#[derive(Clone)]
pub struct Files {
    /// The hypervisor.
    pub hypervisor: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's first file system.
    pub initrd: PathBuf,
}

/// The root of the repository.
/// The repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// Where things are built: absolute, because the hypervisor is built from another directory.
pub fn target() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    std::path::absolute(&target).unwrap_or(target)
}

/// Where files for guests are kept.
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
        let last = said
            .lines()
            .rev()
            .find(|line| !line.is_empty())
            .unwrap_or_default();
        return Err(Error::Failed(format!("{name} failed: {last}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn is_installed(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok()
}

/// What a boot needs, and is not built here: an emulator, a kernel, a shell. Returns the kernel and the shell.
///
/// # Errors
/// What cannot be had, and how to get it by hand.
pub fn guest(kernel: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    qemu_arm64()?;
    let scratch = scratch()?;
    let kernel = match kernel {
        Some(kernel) => kernel.to_path_buf(),
        None => from_package(
            &scratch,
            &ARM64,
            "linux-image-arm64",
            "./boot/vmlinuz-*",
            "Image",
        )?,
    };
    let busybox = from_package(
        &scratch,
        &ARM64,
        "busybox-static",
        "./bin/busybox",
        "busybox",
    )?;
    Ok((kernel, busybox))
}

/// Everything that a boot needs.
///
/// # Errors
/// What cannot be had, and how to get it by hand; what cannot be built.
pub fn everything(kernel: Option<&Path>) -> Result<Files> {
    let (kernel, busybox) = guest(kernel)?;
    let initrd = scratch()?.join("initrd");
    initramfs::make(
        &initrd,
        &busybox,
        &load::script("ttyAMA0", 0, Bell::Memory),
        &[],
    )?;
    let hypervisor = hypervisor("tablewright-hypervisor")?;
    Ok(Files {
        hypervisor,
        kernel,
        initrd,
    })
}

/// The same for a guest of x86-64.
///
/// # Errors
/// What cannot be had, and how to get it by hand.
pub fn guest_x86(kernel: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    qemu_x86()?;
    let scratch = scratch()?;
    let kernel = match kernel {
        Some(kernel) => kernel.to_path_buf(),
        None => from_package(
            &scratch,
            &AMD64,
            "linux-image-cloud-amd64",
            "./boot/vmlinuz-*",
            "bzImage",
        )?,
    };
    let busybox = from_package(
        &scratch,
        &AMD64,
        "busybox-static",
        "./bin/busybox",
        "busybox-amd64",
    )?;
    Ok((kernel, busybox))
}

/// What a host of guests on AMD64 needs: kernel, shell, and the modules of its KVM in the order in which they are loaded.
///
/// # Errors
/// What cannot be had, and how to get it by hand.
pub fn host_amd64() -> Result<(PathBuf, PathBuf, Vec<&'static str>)> {
    const MODULES: [(&str, &str); 3] = [
        ("irqbypass.ko", "virt/lib"),
        ("kvm.ko", "arch/x86/kvm"),
        ("kvm-amd.ko", "arch/x86/kvm"),
    ];
    let scratch = scratch()?;
    let patterns = MODULES.map(|(name, at)| format!("./lib/modules/*/kernel/{at}/{name}"));
    let modules = patterns.iter().zip(MODULES);
    let members: Vec<_> = modules
        .map(|(pattern, (name, _))| (pattern.as_str(), name))
        .chain([("./boot/vmlinuz-*", "bzImage")])
        .collect();
    all_from_package(&scratch, &AMD64, "linux-image-cloud-amd64", &members)?;
    let (kernel, busybox) = guest_x86(None)?;
    Ok((kernel, busybox, MODULES.map(|(name, _)| name).to_vec()))
}

/// Everything that a boot of x86-64 needs.
///
/// # Errors
/// What cannot be had, and how to get it by hand; what cannot be built.
pub fn everything_x86(kernel: Option<&Path>) -> Result<Files> {
    let (kernel, busybox) = guest_x86(kernel)?;
    let program = build("hypervisor/guest", TARGET_GUEST, "tlb")?;
    let initrd = scratch()?.join("initrd-amd64");
    // Its console is looked after by a timer, 16 bytes at a time.
    let script = load::script("ttyS0", 1, Bell::Port);
    initramfs::make(&initrd, &busybox, &script, &[("tlb", &program)])?;
    let hypervisor = build("hypervisor/x86", TARGET_X86, "tablewright-hypervisor-x86")?;
    Ok(Files {
        hypervisor,
        kernel,
        initrd,
    })
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
        "{program} is missing. Install QEMU 7.2 or later, with `sudo {install}` on Debian and Ubuntu, or put a \
         {program} of your own into PATH"
    );
    let is_root = output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    if !is_root || !is_installed("apt-get") {
        return Err(Error::Other(by_hand));
    }
    eprintln!("installing QEMU: {install}");
    let mut words = install.split(' ');
    let status = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdout(Stdio::null())
        .status();
    match status.about("apt-get")?.success() {
        true => Ok(()),
        false => Err(Error::Other(by_hand)),
    }
}

/// One file out of a package of Debian's, kept from then on.
fn from_package(
    scratch: &Path,
    debian: &Debian,
    package: &str,
    member: &str,
    name: &str,
) -> Result<PathBuf> {
    all_from_package(scratch, debian, package, &[(member, name)])?;
    Ok(scratch.join(name))
}

/// Files out of one package of Debian's, each by a pattern and under a name of its own, kept from then on: if one is missing all are
/// fetched again, so that they are of the same version.
fn all_from_package(
    scratch: &Path,
    debian: &Debian,
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
        let all = members
            .iter()
            .map(|(member, _)| unpack(&archive, member))
            .collect::<Result<Vec<_>>>();
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
fn download(scratch: &Path, debian: &Debian, package: &str) -> Result<PathBuf> {
    let apt = Apt::new(scratch, debian)?;
    // A package that only says which is the newest of its kind.
    let depends = output(
        apt.command("apt-cache")
            .args(["depends", "--important", package]),
    )?;
    let newest = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    let package = newest.map_or_else(|| package.to_string(), |rest| format!("linux-image-{rest}"));
    output(apt.command("apt-get").args(["download", &package]))?;
    let archive = fs::read_dir(scratch)
        .about(scratch.display())?
        .filter_map(std::result::Result::ok);
    let archive = archive.map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with(&format!("{package}_"))
                && name.ends_with(&format!("_{}.deb", debian.architecture))
        })
    });
    archive.ok_or_else(|| Error::Other(format!("{package} was not downloaded")))
}

/// What a package has under names of a pattern.
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
        false => Err(Error::Other(format!(
            "{} holds no {member}",
            archive.display()
        ))),
    }
}

/// A package manager for one kind of processor, with everything in a directory of its own.
struct Apt {
    directory: PathBuf,
}

impl Apt {
    fn new(scratch: &Path, debian: &Debian) -> Result<Self> {
        let directory = scratch.join(debian.apt);
        let architecture = debian.architecture;
        let at = directory.display();
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(directory.join(part)).about(directory.display())?;
        }
        let configuration = format!(
            "APT::Architecture \"{architecture}\";\nAPT::Architectures {{ \"{architecture}\"; }};\nDir::State \"{at}\";\n\
             Dir::State::status \"{at}/status\";\nDir::Cache \"{at}/cache\";\nDir::Etc::sourcelist \"{at}/sources.list\";\n\
             Dir::Etc::sourceparts \"-\";\nAPT::Sandbox::User \"\";\n"
        );
        for (name, text) in [
            ("apt.conf", &*configuration),
            ("sources.list", SOURCE),
            ("status", ""),
        ] {
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

/// The build tool, in the repository.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The first version of QEMU that does not load plugins of the interface that ours is for.
const TOO_NEW: u32 = 9;

/// The number before the first point of what QEMU says of its version.
fn major(said: &str) -> Option<u32> {
    let version = said.split_once("version ")?.1;
    version.split_once('.')?.0.parse().ok()
}

/// Whether the QEMU that is installed loads the plugin that counts instructions.
///
/// # Errors
/// It does not, which is [missing](Error::Missing); or there is none.
pub fn can_count() -> Result<()> {
    let said = output(Command::new(QEMU).arg("--version"))?;
    if let Some(major) = major(&said).filter(|major| *major >= TOO_NEW) {
        return Err(Error::Missing(format!(
            "counting instructions takes QEMU 7.2 to 8.2, whose plugins are of version 1; this one is {major}"
        )));
    }
    Ok(())
}

/// Builds the plugin by which QEMU counts instructions.
///
/// # Errors
/// It cannot be built; or the QEMU that is installed would not [load](can_count) it.
pub fn plugin() -> Result<PathBuf> {
    can_count()?;
    let mut build = cargo();
    build.args(["build", "--quiet", "--package", "xtask-plugin"]);
    out::slowly("building the plugin of QEMU's", || output(&mut build))?;
    let name = format!("{DLL_PREFIX}xtask_plugin{DLL_SUFFIX}");
    Ok(target().join("debug").join(name))
}

/// Builds a program that runs on the bare machine.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn hypervisor(program: &str) -> Result<PathBuf> {
    build("hypervisor", TARGET, program)
}

/// Builds one of the example kernels.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn example(kernel: Kernel) -> Result<PathBuf> {
    match kernel {
        Kernel::Arm64 => build("examples", TARGET, "example-arm64"),
        Kernel::X86_64 => build("examples", TARGET_X86, "example-x86-64"),
    }
}

/// Sees to it that there is a QEMU for x86-64.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn qemu_x86() -> Result<()> {
    qemu(QEMU_X86, "qemu-system-x86")
}

/// Builds the guest of x86-64 that means no good.
///
/// # Errors
/// It cannot be built.
pub fn hostile_x86() -> Result<PathBuf> {
    build("hypervisor/x86", TARGET_X86, "hostile-x86")
}

/// Builds the check of x86-64.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn check_x86() -> Result<PathBuf> {
    build("hypervisor/x86", TARGET_X86, "tablewright-check-x86")
}

/// Sees to it that there is a standard library for a target.
fn standard_library(triple: &str) -> Result<()> {
    let installed =
        output(Command::new("rustup").args(["target", "list", "--installed"])).unwrap_or_default();
    if !installed.lines().any(|line| line == triple) && is_installed("rustup") {
        eprintln!("installing Rust's standard library for {triple}: rustup target add {triple}");
        output(Command::new("rustup").args(["target", "add", triple]))?;
    }
    Ok(())
}

/// Builds the lab's program without optimisation, so that it needs nothing but a kernel of this kind of processor.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn static_lab(architecture: &str) -> Result<PathBuf> {
    let triple = format!("{architecture}-unknown-linux-musl");
    standard_library(&triple)?;
    let linker = format!(
        "CARGO_TARGET_{}_LINKER",
        triple.to_uppercase().replace('-', "_")
    );
    let mut cargo = cargo();
    // Rust's own linker: that of the system knows one kind of processor.
    cargo
        .env("CARGO_TARGET_DIR", target())
        .env(linker, "rust-lld")
        .env_remove("RUSTFLAGS");
    cargo.args(["build", "--quiet", "--package", "tablewright-lab"]);
    cargo.args(["--bin", "tablewright", "--target", &triple]);
    for setting in ["profile.dev.debug=false", "profile.dev.strip=true"] {
        cargo.args(["--config", setting]);
    }
    match cargo.status().about("cargo")?.success() {
        true => Ok(target().join(triple).join("debug").join("tablewright")),
        false => Err(Error::Failed(format!("no tablewright for {triple}"))),
    }
}

/// Builds the hypervisor of another copy of the repository: quickly, because it is run for a second.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn hypervisor_in(root: &Path, target: &Path) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    let directory = root.join("hypervisor");
    build_by(cargo, &directory, target, TARGET, "tablewright-hypervisor")
}

fn build(directory: &str, triple: &str, program: &str) -> Result<PathBuf> {
    let target = target().join("hypervisor");
    build_by(cargo(), &root().join(directory), &target, triple, program)
}

fn build_by(
    mut cargo: Command,
    directory: &Path,
    target: &Path,
    triple: &str,
    program: &str,
) -> Result<PathBuf> {
    standard_library(triple)?;
    cargo
        .current_dir(directory)
        .env("CARGO_TARGET_DIR", target)
        .env_remove("RUSTFLAGS");
    cargo.args([
        "build",
        "--quiet",
        "--release",
        "--target",
        triple,
        "--bin",
        program,
    ]);
    let status = out::slowly(&format!("building {program}"), || cargo.status());
    match status.about("cargo")?.success() {
        true => Ok(target.join(triple).join("release").join(program)),
        false => Err(Error::Failed(format!("{program} cannot be built"))),
    }
}

#[cfg(test)]
mod tests {
    use super::major;

    #[test]
    fn a_version_is_read() {
        assert_eq!(
            major("QEMU emulator version 7.2.22 (Debian 1:7.2)\nCopyright"),
            Some(7)
        );
        assert_eq!(major("QEMU emulator version 10.0.2 (Debian)"), Some(10));
        assert_eq!(major("something else"), None);
    }
}

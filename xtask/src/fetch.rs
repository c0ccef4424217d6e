//! Files that a boot needs, fetched and built where they are missing.
//!
//! The kernel and the guest's shell come from [Debian](crate::debian), to `target/guest`.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use clap::ValueEnum;

use crate::debian::{
    AMD64, ARM64, ARM64_13, ARM64_BACKPORTS, Debian, Release, all_from_package, from_package,
};
use crate::emulator::Emulator;
use crate::load::Bell;
use crate::tools::{
    cargo, is_installed, major, output, qemu_arm64, qemu_x86, root, scratch, target,
};
use crate::{About as _, Arch, Error, Result, initramfs, load, out};

/// The target that programs for RISC-V are built for: no floating point.
pub const TARGET_RISCV: &str = "riscv64imac-unknown-none-elf";

/// The target that the hypervisor is built for: no floating point, whose registers are the guest's.
pub const TARGET: &str = "aarch64-unknown-none-softfloat";

/// The target that the check of x86-64 is built for.
pub const TARGET_X86: &str = "x86_64-unknown-none";

/// The target that programs of an x86-64 guest are built for: static.
const TARGET_GUEST: &str = "x86_64-unknown-linux-musl";

/// The files of a boot.
#[derive(Clone)]
pub struct Files {
    /// The hypervisor.
    pub hypervisor: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's first file system.
    pub initrd: PathBuf,
    /// The emulator of the machine.
    pub emulator: Emulator,
    /// The hypervisor's variant.
    pub variant: Variant,
}

/// The granule of stage 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Granule {
    /// Pages of 4 KiB, blocks of 2 MiB and 1 GiB
    #[default]
    #[value(name = "4k")]
    K4,
    /// Pages of 16 KiB, blocks of 32 MiB
    #[value(name = "16k")]
    K16,
    /// Pages of 64 KiB, blocks of 512 MiB
    #[value(name = "64k")]
    K64,
}

/// A variant of a hypervisor for arm64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Variant {
    /// The granule of stage 2.
    pub granule: Granule,
    /// The guest's memory is write-back whatever the guest says.
    pub forced: bool,
    /// Hardware marks what is written.
    pub marks: bool,
}

impl Variant {
    /// How large blocks are, in MiB.
    pub fn block(self) -> u64 {
        match self.granule {
            Granule::K4 => 2,
            Granule::K16 => 32,
            Granule::K64 => 512,
        }
    }

    /// Returns the features for the build.
    fn features(self) -> Vec<&'static str> {
        let granule = match self.granule {
            Granule::K4 => None,
            Granule::K16 => Some("granule-16k"),
            Granule::K64 => Some("granule-64k"),
        };
        let forced = self.forced.then_some("forced-write-back");
        let marks = self.marks.then_some("hardware-dirty");
        granule.into_iter().chain(forced).chain(marks).collect()
    }
}

/// Fetches the files of a boot that are not built here: an emulator, a kernel, a shell. Returns the
/// kernel and the shell.
///
/// # Errors
/// A file cannot be had. The error says how to get it by hand.
pub fn guest(kernel: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    qemu_arm64()?;
    kernel_and_shell(kernel, Release::Bookworm)
}

/// Fetches a kernel and a shell: the kernel is one of this release's, if no other is given.
fn kernel_and_shell(kernel: Option<&Path>, release: Release) -> Result<(PathBuf, PathBuf)> {
    let scratch = scratch()?;
    let kernel = match kernel {
        Some(kernel) => kernel.to_path_buf(),
        None => kernel_arm64(release)?,
    };
    let busybox = from_package(&scratch, &ARM64, "busybox-static", "./bin/busybox", "busybox")?;
    Ok((kernel, busybox))
}

/// Fetches a kernel of arm64.
///
/// # Errors
/// It cannot be had, and how to get it by hand.
pub fn kernel_arm64(release: Release) -> Result<PathBuf> {
    let (debian, member, name) = match release {
        Release::Bookworm => (&ARM64, "./boot/vmlinuz-*", "Image"),
        Release::Trixie => (&ARM64_13, "./boot/vmlinuz-*", "Image-13"),
        Release::Backports => {
            (&ARM64_BACKPORTS, "./usr/lib/modules/*/vmlinuz", "Image-13-backports")
        }
    };
    from_package(&scratch()?, debian, "linux-image-arm64", member, name)
}

/// Builds the plugin by which QEMU watches a kernel.
///
/// # Errors
/// It cannot be built.
pub fn watching_plugin() -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--quiet", "--release", "--package", "tablewright-watch-plugin"]);
    out::slowly("building the plugin of QEMU's", || output(&mut build))?;
    Ok(target().join("release").join(tablewright_watch::session::PLUGIN))
}

/// Builds the first program of a guest that is watched.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn watched_guest(architecture: Arch) -> Result<PathBuf> {
    let target_of_guest = match architecture {
        Arch::Arm64 => "aarch64-unknown-linux-musl",
        Arch::X86_64 => TARGET_GUEST,
    };
    let mut cargo = cargo();
    // Rust's own linker: that of the system knows one kind of processor.
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER", "rust-lld");
    build_with(
        cargo,
        &root().join("watch/guest"),
        &target().join("hypervisor"),
        target_of_guest,
        "init",
        &[],
    )
}

/// Which kernel is booted, and on what.
#[derive(Clone, Copy, Default)]
pub struct Choice<'a> {
    /// A kernel, instead of one of Debian's.
    pub kernel: Option<&'a Path>,
    /// The release of Debian whose kernel it is.
    pub release: Release,
    /// The emulator, instead of the one that is installed.
    pub emulator: Option<&'a Path>,
    /// The hypervisor's variant.
    pub variant: Variant,
}

/// Everything that a boot needs.
///
/// # Errors
/// A file cannot be had, and the error says how to get it by hand; or it cannot be built.
pub fn everything(choice: Choice<'_>) -> Result<Files> {
    let emulator = Emulator::named(choice.emulator)?;
    let (kernel, busybox) = kernel_and_shell(choice.kernel, choice.release)?;
    let initrd = scratch()?.join("initrd");
    initramfs::make(&initrd, &busybox, &load::script("ttyAMA0", 0, Bell::Memory), &[])?;
    Ok(Files {
        hypervisor: variant(choice.variant)?,
        kernel,
        initrd,
        emulator,
        variant: choice.variant,
    })
}

/// Fetches the files for a guest of x86-64.
///
/// # Errors
/// A file cannot be had. The error says how to get it by hand.
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
    let busybox =
        from_package(&scratch, &AMD64, "busybox-static", "./bin/busybox", "busybox-amd64")?;
    Ok((kernel, busybox))
}

/// Modules of a kernel's KVM for AMD64, in the order in which they are loaded.
const MODULES: [(&str, &str); 3] =
    [("irqbypass.ko", "virt/lib"), ("kvm.ko", "arch/x86/kvm"), ("kvm-amd.ko", "arch/x86/kvm")];

/// A kernel, a shell, and the modules of the kernel's KVM in the order in which they are loaded.
pub type Host = (PathBuf, PathBuf, Vec<PathBuf>);

/// Fetches the files for a host of guests on AMD64.
///
/// # Errors
/// A file cannot be had. The error says how to get it by hand.
pub fn host_amd64() -> Result<Host> {
    let (kernel, busybox) = guest_x86(None)?;
    host_of(&AMD64, "", "bzImage").map(|modules| (kernel, busybox, modules))
}

/// Fetches those of Linux 6.12.
///
/// # Errors
/// A file cannot be had. The error says how to get it by hand.
pub fn host_amd64_13() -> Result<Host> {
    let debian = Debian { release: Release::Trixie, architecture: "amd64", apt: "apt-amd64-13" };
    let (_, busybox) = guest_x86(None)?;
    let modules = host_of(&debian, "13-", "13-bzImage")?;
    Ok((scratch()?.join("13-bzImage"), busybox, modules))
}

/// Fetches the modules, and the kernel under this name: all are of the same version.
fn host_of(debian: &Debian<'_>, prefix: &str, kernel: &str) -> Result<Vec<PathBuf>> {
    let scratch = scratch()?;
    // Newer ones are compressed.
    let patterns = MODULES.map(|(name, at)| format!("*/lib/modules/*/kernel/{at}/{name}*"));
    let names = MODULES.map(|(name, _)| format!("{prefix}{name}"));
    let modules = patterns.iter().zip(&names);
    let members: Vec<_> = modules
        .map(|(pattern, name)| (pattern.as_str(), name.as_str()))
        .chain([("./boot/vmlinuz-*", kernel)])
        .collect();
    all_from_package(&scratch, debian, "linux-image-cloud-amd64", &members)?;
    let files = names.map(|name| scratch.join(name));
    files.iter().try_for_each(|file| unpacked(file))?;
    Ok(files.to_vec())
}

/// Unpacks a file in its place, if it is one of xz.
fn unpacked(file: &Path) -> Result<()> {
    const XZ: &[u8] = b"\xfd7zXZ\0";
    let at = || file.display().to_string();
    if !fs::read(file).about(at())?.starts_with(XZ) {
        return Ok(());
    }
    let plain = Command::new("xz").args(["-dc"]).arg(file).output().about("xz")?;
    match plain.status.success() {
        true => fs::write(file, plain.stdout).about(at()),
        false => Err(Error::Failed(format!("xz cannot unpack {}", file.display()))),
    }
}

/// Everything that a boot of x86-64 needs.
///
/// # Errors
/// A file cannot be had, and the error says how to get it by hand; or it cannot be built.
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
        emulator: Emulator::Installed,
        variant: Variant::default(),
    })
}

/// The first version of QEMU that does not load plugins of the interface that ours is for.
const TOO_NEW: u32 = 9;

/// Whether a QEMU loads the plugin that counts instructions.
///
/// # Errors
/// It does not, which is [missing](Error::Missing); or there is none.
pub fn can_count(emulator: &Emulator) -> Result<()> {
    emulator.version().and_then(|version| counts(&version))
}

/// Whether a QEMU of this version does.
fn counts(version: &str) -> Result<()> {
    match major(version) {
        Some(major @ TOO_NEW..) => Err(Error::Missing(format!(
            "counting instructions takes QEMU 7.2 to 8.2, whose plugins are of version 1; this one \
             is {major}"
        ))),
        _ => Ok(()),
    }
}

/// Builds the plugin by which QEMU counts instructions.
///
/// # Errors
/// It cannot be built; or this QEMU would not [load](can_count) it.
pub fn plugin(emulator: &Emulator) -> Result<PathBuf> {
    can_count(emulator)?;
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

/// Builds the hypervisor for something. Each has a file of its own, so that one is not in the place
/// of another that is running.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn variant(variant: Variant) -> Result<PathBuf> {
    const PROGRAM: &str = "tablewright-hypervisor";
    // Once for each: to ask whether it is up to date takes half a second, and it is asked for with
    // each boot of a test.
    static BUILT: Mutex<Vec<(Variant, PathBuf)>> = Mutex::new(Vec::new());
    let mut all = BUILT.lock().unwrap_or_else(|broken| broken.into_inner());
    if let Some((_, built)) = all.iter().find(|(it, _)| *it == variant) {
        return Ok(built.clone());
    }
    let features = variant.features();
    let target = target().join("hypervisor");
    let directory = root().join("hypervisor");
    let built = build_with(cargo(), &directory, &target, TARGET, PROGRAM, &features)?;
    let name = match features.as_slice() {
        [] => format!("{PROGRAM}-plain"),
        features => format!("{PROGRAM}-{}", features.join("-")),
    };
    let named = built.with_file_name(name);
    fs::copy(&built, &named).about(named.display())?;
    all.push((variant, named.clone()));
    Ok(named)
}

/// Builds all programs for the bare machine, of both architectures, so that no processor is idle
/// while one is linked.
///
/// # Errors
/// One cannot be built, or a target cannot be had.
pub fn all_programs() -> Result<()> {
    for (directory, triple) in [("hypervisor", TARGET), ("hypervisor/x86", TARGET_X86)] {
        standard_library(triple)?;
        let mut cargo = cargo();
        cargo
            .current_dir(root().join(directory))
            .env("CARGO_TARGET_DIR", target().join("hypervisor"))
            .env_remove("RUSTFLAGS");
        cargo.args(["build", "--quiet", "--release", "--target", triple, "--bins"]);
        let what = format!("building all programs for {triple}");
        let status = out::slowly(&what, || cargo.status());
        if !status.about("cargo")?.success() {
            return Err(Error::Failed(format!("a program for {triple} cannot be built")));
        }
    }
    Ok(())
}

/// Builds one of the example kernels, or another program beside them.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn example(target: &str, program: &str) -> Result<PathBuf> {
    build("examples", target, program)
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

/// Cargo for programs without libraries, that run on any Linux: with the target's name.
fn static_cargo(architecture: &str, words: &[&str]) -> Result<(Command, String)> {
    let triple = format!("{architecture}-unknown-linux-musl");
    standard_library(&triple)?;
    let linker = format!("CARGO_TARGET_{}_LINKER", triple.to_uppercase().replace('-', "_"));
    let mut cargo = cargo();
    // Rust's own linker: that of the system knows one kind of processor.
    cargo.env("CARGO_TARGET_DIR", target()).env(linker, "rust-lld").env_remove("RUSTFLAGS");
    cargo.args(words).args(["--quiet", "--target", &triple]);
    for profile in ["dev", "test"] {
        for setting in ["debug=false", "strip=true"] {
            cargo.args(["--config", &format!("profile.{profile}.{setting}")]);
        }
    }
    Ok((cargo, triple))
}

/// Builds the lab's program without optimisation, so that it needs nothing but a kernel of this
/// kind of processor.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn static_lab(architecture: &str) -> Result<PathBuf> {
    let words = ["build", "--package", "tablewright-lab", "--bin", "tablewright"];
    let (mut cargo, triple) = static_cargo(architecture, &words)?;
    match cargo.status().about("cargo")?.success() {
        true => Ok(target().join(triple).join("debug").join("tablewright")),
        false => Err(Error::Failed(format!("no tablewright for {triple}"))),
    }
}

/// Builds the tests of guests on KVM so that they run on any Linux: names and files.
///
/// # Errors
/// They cannot be built.
pub fn static_tests(architecture: &str) -> Result<Vec<(String, PathBuf)>> {
    let words = [
        "test",
        "--package",
        "tablewright-kvm",
        "--test",
        "*",
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ];
    let (mut cargo, triple) = static_cargo(architecture, &words)?;
    let built = cargo.stderr(Stdio::inherit()).output().about("cargo")?;
    let messages = String::from_utf8_lossy(&built.stdout);
    let programs = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let file = message["executable"].as_str()?;
        Some((message["target"]["name"].as_str()?.to_owned(), file.into()))
    });
    let programs: Vec<_> = programs.collect();
    match built.status.success() && !programs.is_empty() {
        true => Ok(programs),
        false => Err(Error::Failed(format!("no tests of guests for {triple}"))),
    }
}

/// Builds the hypervisor of another copy of the repository: quickly, because it is run for a
/// second.
///
/// # Errors
/// It cannot be built, or the target cannot be had.
pub fn hypervisor_in(root: &Path, target: &Path) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    let directory = root.join("hypervisor");
    build_by(cargo, &directory, target, TARGET, "tablewright-hypervisor")
}

fn build(directory: &str, triple: &str, program: &str) -> Result<PathBuf> {
    let target = target().join("hypervisor");
    build_by(cargo(), &root().join(directory), &target, triple, program)
}

fn build_by(
    cargo: Command,
    directory: &Path,
    target: &Path,
    triple: &str,
    program: &str,
) -> Result<PathBuf> {
    build_with(cargo, directory, target, triple, program, &[])
}

fn build_with(
    mut cargo: Command,
    directory: &Path,
    target: &Path,
    triple: &str,
    program: &str,
    features: &[&str],
) -> Result<PathBuf> {
    standard_library(triple)?;
    cargo.current_dir(directory).env("CARGO_TARGET_DIR", target).env_remove("RUSTFLAGS");
    cargo.args(["build", "--quiet", "--release", "--target", triple, "--bin", program]);
    let mut what = format!("building {program}");
    if !features.is_empty() {
        cargo.args(["--features", &features.join(",")]);
        what += &format!(" for {}", features.join(", "));
    }
    let status = out::slowly(&what, || cargo.status());
    match status.about("cargo")?.success() {
        true => Ok(target.join(triple).join("release").join(program)),
        false => Err(Error::Failed(format!("{program} cannot be built"))),
    }
}

#[cfg(test)]
mod tests {
    use super::counts;
    use crate::Error;

    #[test]
    fn what_loads_no_such_plugin_is_missing_and_not_wrong() {
        assert!(counts("7.2.22").is_ok() && counts("8.2.4").is_ok());
        assert!(matches!(counts("10.0.13"), Err(Error::Missing(_))));
    }
}

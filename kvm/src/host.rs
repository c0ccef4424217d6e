//! The kind of a computer's KVM. A figure means nothing without it: software paging is another
//! algorithm than nested paging.

use std::fmt;
use std::fs;
use std::path::Path;

use kvm_ioctls::Kvm;

use crate::arch;
use crate::error::Error;

/// How a guest's memory is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// By the processor, with tables of two stages, of this name.
    Nested(&'static str),
    /// By KVM, which keeps tables of its own for each of the guest's.
    Software,
    /// The host does not tell. It is not taken for nested.
    Unknown,
}

/// Knowledge of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The processor's vendor.
    pub vendor: String,
    /// The kernel's release.
    pub kernel: String,
    /// The module that runs guests, where it is one.
    pub module: Option<String>,
    /// How memory is translated.
    pub paging: Paging,
    /// This computer is itself a guest.
    pub is_guest: bool,
    /// x86: the tables of nested paging are edited by many at once.
    pub tdp_mmu: Option<bool>,
    /// Huge pages are split when a log is started.
    pub eager_split: Option<bool>,
    /// The processor keeps a log of what is written.
    pub modification_log: Option<bool>,
    /// CPUs that are there.
    pub cpus: u32,
}

/// The modules that may run guests, and how each has memory translated if the named parameter is
/// on.
const MODULES: [(&str, &str, &str); 2] = [("kvm_intel", "ept", "EPT"), ("kvm_amd", "npt", "NPT")];

impl Host {
    /// Of this computer.
    pub fn read() -> Self {
        Self::below(Path::new("/"), cfg!(target_arch = "x86_64"))
    }

    /// Of the computer whose `/sys` and `/proc` are below `root`.
    fn below(root: &Path, is_x86: bool) -> Self {
        let text = |path: &str| {
            let text = fs::read_to_string(root.join(path)).ok()?;
            Some(text.trim().to_owned())
        };
        let parameter = |module: &str, name: &str| {
            let value = text(&format!("sys/module/{module}/parameters/{name}"))?;
            Some(matches!(value.as_str(), "Y" | "1"))
        };
        let is_there = |module: &str| root.join("sys/module").join(module).is_dir();
        let others = fs::read_dir(root.join("sys/module")).ok();
        let other = others.into_iter().flatten().flatten().find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let known = MODULES.iter().any(|(module, ..)| *module == name);
            (name.starts_with("kvm_") && !known).then_some(name)
        });
        let hardware = MODULES.iter().find(|(module, ..)| is_there(module));
        let (module, paging) = match (is_x86, other, hardware) {
            (false, ..) => (None, Paging::Nested("stage 2")),
            // One that is none of the processor's own is without the processor's help.
            (true, Some(other), _) => (Some(other), Paging::Software),
            (true, None, Some((module, option, name))) => {
                let paging = match parameter(module, option) {
                    Some(true) => Paging::Nested(name),
                    Some(false) => Paging::Software,
                    None => Paging::Unknown,
                };
                (Some((*module).to_owned()), paging)
            }
            (true, None, None) => (None, Paging::Unknown),
        };
        let cpuinfo = text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            })
        };
        let flags = field("flags").unwrap_or_default();
        let cpus = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        Self {
            vendor: match field("vendor_id").or_else(|| field("CPU implementer")).as_deref() {
                Some("AuthenticAMD") => "AMD".to_owned(),
                Some("GenuineIntel") => "Intel".to_owned(),
                Some("0x41") => "Arm".to_owned(),
                Some(other) => other.to_owned(),
                None => "unknown vendor".to_owned(),
            },
            kernel: text("proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            tdp_mmu: parameter("kvm", "tdp_mmu"),
            eager_split: parameter("kvm", "eager_page_split"),
            modification_log: module.as_deref().and_then(|module| parameter(module, "pml")),
            module,
            paging,
            is_guest: flags.split(' ').any(|flag| flag == "hypervisor"),
            cpus: u32::try_from(cpus).unwrap_or(1).max(1),
        }
    }

    /// The kernel's version, as its first two numbers.
    pub fn version(&self) -> (u32, u32) {
        let mut numbers = self.kernel.split(|it: char| !it.is_ascii_digit());
        let mut next = || numbers.next().and_then(|it| it.parse().ok()).unwrap_or(0);
        (next(), next())
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paging = match self.paging {
            Paging::Nested(name) => format!("nested paging ({name})"),
            Paging::Software => "SOFTWARE PAGING".to_owned(),
            Paging::Unknown => "paging UNKNOWN".to_owned(),
        };
        write!(f, "{}, {paging}", self.vendor)?;
        if let Some(module) = &self.module {
            write!(f, ", {module}")?;
        }
        if self.is_guest {
            f.write_str(", itself a guest")?;
        }
        for (name, value) in [
            ("tdp_mmu", self.tdp_mmu),
            ("eager split", self.eager_split),
            ("PML", self.modification_log),
        ] {
            match value {
                Some(value) => write!(f, ", {name} {}", if value { "Y" } else { "N" })?,
                None => write!(f, ", {name} -")?,
            }
        }
        write!(f, ", Linux {}", self.kernel)
    }
}

/// Abilities of a KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// vCPUs of a VM.
    pub vcpus: u32,
    /// Bits of a guest's physical address that its code can reach here.
    pub address_bits: u32,
    /// Reading a log does not clear it; with all pages set from the start.
    pub manual: bool,
    /// Manual protection with all pages set from the start.
    pub all_set: bool,
    /// The most entries of a ring of dirty pages; none if there are no rings.
    pub ring: u32,
    /// A guest may have a guest, of the kind that can be made here.
    pub nested: bool,
}

/// Opens KVM.
///
/// # Errors
/// It is not there, not for this user, or something else.
pub fn open(path: &Path) -> Result<Kvm, Error> {
    use std::os::fd::FromRawFd;
    use std::os::fd::IntoRawFd;
    let named = path.display().to_string();
    let file = fs::File::options().read(true).write(true).open(path);
    let file = file.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::NoDevice { path: named.clone() },
        std::io::ErrorKind::PermissionDenied => Error::Permission { path: named.clone() },
        // A device file without a driver.
        _ if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => {
            Error::NoDevice { path: named.clone() }
        }
        _ => Error::NotKvm { path: named.clone(), why: error },
    })?;
    // SAFETY: the descriptor is open, and given away.
    let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
    match kvm.get_api_version() {
        12 => Ok(kvm),
        ..0 => Err(Error::NotKvm { path: named, why: std::io::Error::last_os_error() }),
        other => Err(Error::NotKvm {
            path: named,
            why: std::io::Error::other(format!("its version is {other} and not 12")),
        }),
    }
}

/// Asks for its abilities.
pub fn abilities(kvm: &Kvm) -> Abilities {
    let manual = kvm.check_extension_raw(kvm_bindings::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
    let ring = [kvm_bindings::KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_bindings::KVM_CAP_DIRTY_LOG_RING]
        .into_iter()
        .map(|cap| kvm.check_extension_raw(cap.into()))
        .max()
        .unwrap_or(0);
    Abilities {
        vcpus: u32::try_from(kvm.get_max_vcpus()).unwrap_or(1),
        address_bits: arch::address_bits(kvm),
        manual: manual & 1 != 0,
        all_set: manual & 2 != 0,
        ring: u32::try_from(ring).unwrap_or(0) / crate::ring::ENTRY,
        nested: arch::has_nested(kvm),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> Host {
        let root = std::env::temp_dir().join(format!(
            "tablewright-host-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::below(&root, true);
        fs::remove_dir_all(&root).unwrap();
        host
    }

    #[test]
    fn software_paging_is_never_taken_for_nested() {
        let cpu = ("proc/cpuinfo", "processor : 0\nvendor_id : AuthenticAMD\nflags : svm npt\n");
        let nested = host(&[cpu, ("sys/module/kvm_amd/parameters/npt", "1\n")]);
        assert_eq!(nested.paging, Paging::Nested("NPT"));
        assert!(nested.to_string().starts_with("AMD, nested paging (NPT), kvm_amd"));
        for files in [
            vec![cpu, ("sys/module/kvm_amd/parameters/npt", "0\n")],
            vec![cpu, ("sys/module/kvm_pvm/parameters/verbose", "N\n")],
            vec![
                cpu,
                ("sys/module/kvm_pvm/parameters/verbose", "N\n"),
                ("sys/module/kvm_amd/parameters/npt", "Y\n"),
            ],
        ] {
            let software = host(&files);
            assert_eq!(software.paging, Paging::Software, "{files:?}");
            assert!(!software.to_string().contains("nested"), "{software}");
        }
        let unknown = host(&[cpu]);
        assert_eq!(unknown.paging, Paging::Unknown);
        assert!(!unknown.to_string().contains("nested"), "{unknown}");
    }

    #[test]
    fn a_release_has_a_version() {
        let mut host = host(&[("proc/sys/kernel/osrelease", "6.18.44-fc-v669\n")]);
        assert_eq!(host.version(), (6, 18));
        host.kernel = "unknown".to_owned();
        assert_eq!(host.version(), (0, 0));
    }
}

//! A profile as its file has it.

use serde::{Deserialize, Serialize};

use super::cost::CostsToml;
use super::*;

/// A profile as the file has it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProfileToml {
    name: String,
    description: String,
    system: System,
    architecture: ArchitectureToml,
    #[serde(default)]
    costs: CostsToml,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    provenance: Vec<Provenance>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    fitted_on: Vec<RowSelector>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unexplained: Vec<Unexplained>,
}

/// The format of the tables.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum FormatToml {
    #[serde(rename = "arm64")]
    Arm64,
    #[serde(rename = "x86-64")]
    X86_64,
    #[serde(rename = "riscv64")]
    Riscv64,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum GranuleToml {
    #[serde(rename = "4K")]
    K4,
    #[serde(rename = "16K")]
    K16,
    #[serde(rename = "64K")]
    K64,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OrderingToml {
    Base,
    Ets2,
    X86,
}

macro_rules! capabilities {
    ($($name:ident: $type:ty,)*) => {
        /// The architecture of the file. What is left out is as in [`Architecture::arm64`] or
        /// [`Architecture::x86_64`].
        #[derive(Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct ArchitectureToml {
            format: FormatToml,
            granule: Option<GranuleToml>,
            address_bits: Option<u32>,
            ordering: Option<OrderingToml>,
            $($name: Option<$type>,)*
        }

        /// Keys of which provenance can be given.
        const ARCHITECTURE_KEYS: &[&str] = &[
            "architecture.format", "architecture.granule", "architecture.address_bits",
            "architecture.ordering",
            $(concat!("architecture.", stringify!($name)),)*
        ];

        impl ArchitectureToml {
            fn of(architecture: &Architecture) -> Self {
                // Without `..`: a capability that is missing in the list does not compile.
                let &Architecture { regime, guest: _, guest_caches_off: _, marked: _, ordering,
                    $($name),* } = architecture;
                let (format, granule, address_bits) = match regime {
                    Regime::Arm64Stage1 { granule, wide }
                    | Regime::Arm64Stage1Sized { granule, wide, .. }
                    | Regime::Arm64El2 { granule, wide, .. }
                    | Regime::Arm64Stage2 { granule, wide, .. } => (
                        FormatToml::Arm64,
                        Some(match granule {
                            Granule::K4 => GranuleToml::K4,
                            Granule::K16 => GranuleToml::K16,
                            Granule::K64 => GranuleToml::K64,
                        }),
                        if wide { 52 } else { 48 },
                    ),
                    Regime::Riscv { levels, .. } => {
                        (FormatToml::Riscv64, None, 12 + 9 * u32::from(levels))
                    }
                    Regime::X86_64 { levels }
                    | Regime::Ept { levels, .. }
                    | Regime::Npt { levels } => {
                        (FormatToml::X86_64, None, if levels == 5 { 57 } else { 48 })
                    }
                };
                Self {
                    format,
                    granule,
                    address_bits: Some(address_bits),
                    ordering: Some(match ordering {
                        Ordering::Base => OrderingToml::Base,
                        Ordering::Ets2 => OrderingToml::Ets2,
                        Ordering::X86 => OrderingToml::X86,
                    }),
                    $($name: Some($name),)*
                }
            }

            /// Puts what the file says over what is usual.
            fn over(&self, mut usual: Architecture) -> Architecture {
                $(if let Some(value) = self.$name { usual.$name = value; })*
                usual
            }
        }
    };
}

capabilities! {
    bbm: u8,
    hardware_access: bool,
    hardware_dirty: bool,
    invalid_entries_cached: bool,
    invalidate_all_above: u64,
    range_invalidation: bool,
    invalidate_twice: bool,
    permission_fault_drops_entry: bool,
    executable_large_leaves: bool,
    forced_write_back: bool,
    idc: bool,
    dic: bool,
    icache_aliasing: bool,
    tlb_sets: usize,
    tlb_ways: usize,
    walk_cache: usize,
}

/// A key of the file, and what is wrong with it.
type Problem = (&'static str, String);

impl ArchitectureToml {
    pub(super) fn check(&self) -> Result<Architecture, Problem> {
        let bits = |allowed: &[u32]| match self.address_bits {
            None => Ok(allowed[0]),
            Some(bits) if allowed.contains(&bits) => Ok(bits),
            Some(bits) => {
                Err(("architecture.address_bits", format!("{bits}: this format has {allowed:?}")))
            }
        };
        let usual = match self.format {
            FormatToml::Arm64 => Architecture::arm64(Regime::Arm64Stage1 {
                granule: match self.granule.unwrap_or(GranuleToml::K4) {
                    GranuleToml::K4 => Granule::K4,
                    GranuleToml::K16 => Granule::K16,
                    GranuleToml::K64 => Granule::K64,
                },
                wide: bits(&[48, 52])? == 52,
            }),
            FormatToml::X86_64 => {
                if self.granule.is_some_and(|granule| granule != GranuleToml::K4) {
                    let problem = "x86-64 has pages of 4K only".to_owned();
                    return Err(("architecture.granule", problem));
                }
                Architecture::x86_64(if bits(&[48, 57])? == 57 { 5 } else { 4 })
            }
            FormatToml::Riscv64 => {
                if self.granule.is_some_and(|granule| granule != GranuleToml::K4) {
                    let problem = "riscv64 has pages of 4K only".to_owned();
                    return Err(("architecture.granule", problem));
                }
                Architecture::riscv64(((bits(&[48, 39, 57])? - 12) / 9) as u8, false)
            }
        };
        let usual_order = usual.ordering;
        let mut architecture = self.over(usual);
        if let Some(ordering) = self.ordering {
            if (ordering == OrderingToml::X86) != (usual_order == Ordering::X86) {
                let problem = "arm64 has base or ets2, x86-64 has x86, riscv64 has base".to_owned();
                return Err(("architecture.ordering", problem));
            }
            architecture.ordering = match ordering {
                OrderingToml::Base => Ordering::Base,
                OrderingToml::Ets2 => Ordering::Ets2,
                OrderingToml::X86 => Ordering::X86,
            };
        }
        if architecture.bbm > 3 {
            let problem = format!("{}: there are levels 0 to 3", architecture.bbm);
            return Err(("architecture.bbm", problem));
        }
        if architecture.hardware_dirty && !architecture.hardware_access {
            let problem = "no hardware sets dirty state and not the accessed flag".to_owned();
            return Err(("architecture.hardware_dirty", problem));
        }
        for (key, value, power) in [
            ("architecture.tlb_sets", architecture.tlb_sets, true),
            ("architecture.tlb_ways", architecture.tlb_ways, false),
            ("architecture.walk_cache", architecture.walk_cache, true),
        ] {
            if !(1..=MAX_TLB).contains(&value) || (power && !value.is_power_of_two()) {
                let kind = if power { "a power of two, " } else { "" };
                return Err((key, format!("{value}: {kind}1 to {MAX_TLB}")));
            }
        }
        Ok(architecture)
    }
}

impl ProfileToml {
    pub(super) fn of(profile: &Profile) -> Self {
        Self {
            name: profile.name.clone(),
            description: profile.description.clone(),
            system: profile.system.clone(),
            architecture: ArchitectureToml::of(&profile.architecture),
            costs: CostsToml::of(profile),
            provenance: profile.provenance.clone(),
            fitted_on: profile.fitted_on.clone(),
            unexplained: profile.unexplained.clone(),
        }
    }

    /// Checks what types cannot say.
    pub(super) fn check(self) -> Result<Profile, Problem> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.name.is_empty() || !self.name.chars().all(plain) {
            let problem = format!("'{}': lower-case letters, digits and '-'", self.name);
            return Err(("name", problem));
        }
        if !(1..=MAX_RAM_GIB).contains(&self.system.ram_gib) {
            let problem = format!("{}: 1 to {MAX_RAM_GIB}", self.system.ram_gib);
            return Err(("system.ram_gib", problem));
        }
        let most = crate::time::MAX_CPUS as u32;
        if let Some(cpus) = self.system.cpus
            && !(1..=most).contains(&cpus)
        {
            return Err(("system.cpus", format!("{cpus}: 1 to {most}")));
        }
        let mut named: Vec<&str> = Vec::new();
        for key in self.provenance.iter().flat_map(|entry| &entry.of) {
            if named.contains(&key.as_str()) {
                return Err(("provenance.of", format!("{key} is named twice")));
            }
            if !Cost::all().any(|cost| cost.key() == key)
                && !ARCHITECTURE_KEYS.contains(&key.as_str())
            {
                return Err(("provenance.of", format!("there is no key {key}")));
            }
            named.push(key);
        }
        let (costs, stated) = self.costs.costs();
        Ok(Profile {
            architecture: self.architecture.check()?,
            name: self.name,
            description: self.description,
            system: self.system,
            costs,
            stated,
            provenance: self.provenance,
            fitted_on: self.fitted_on,
            unexplained: self.unexplained,
        })
    }
}

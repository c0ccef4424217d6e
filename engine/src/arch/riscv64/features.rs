//! Extensions of translation, of the ISA string or of the device tree.

use crate::addr::Level;
use crate::platform::Caps;

/// Extensions that concern translation.
///
/// ```
/// use tablewright::arch::riscv64::Features;
/// let features = Features::from_isa("rv64imafdch_zicsr_svinval_svpbmt");
/// assert!(features.hypervisor && features.svinval && features.svpbmt && !features.svvptc);
/// // The device tree has a list instead: `riscv,isa-extensions`.
/// let listed = ["i", "m", "svade"].into_iter().fold(Features::LEAST, Features::with);
/// assert!(!listed.caps().hardware_access);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// H: guests, with a G-stage.
    pub hypervisor: bool,
    /// An access faults where a flag is clear.
    pub svade: bool,
    /// Hardware can set the flags of leaves, where the firmware has switched it on
    /// (`menvcfg.ADUE`).
    pub svadu: bool,
    /// Invalidations whose order is made once for all of them.
    pub svinval: bool,
    /// Runs of 16 pages.
    pub svnapot: bool,
    /// Memory types in leaves.
    pub svpbmt: bool,
    /// Walkers find a new mapping after some time without a fence.
    pub svvptc: bool,
}

impl Features {
    /// A hart with tables, and no extension of them.
    pub const LEAST: Self = Self {
        hypervisor: false,
        svade: false,
        svadu: false,
        svinval: false,
        svnapot: false,
        svpbmt: false,
        svvptc: false,
    };

    /// These, and an extension, by its name. One that does not concern translation changes nothing.
    #[must_use]
    pub fn with(mut self, extension: &str) -> Self {
        let all = [
            ("h", &mut self.hypervisor),
            ("svade", &mut self.svade),
            ("svadu", &mut self.svadu),
            ("svinval", &mut self.svinval),
            ("svnapot", &mut self.svnapot),
            ("svpbmt", &mut self.svpbmt),
            ("svvptc", &mut self.svvptc),
        ];
        for (name, has) in all {
            *has |= extension.eq_ignore_ascii_case(name);
        }
        self
    }

    /// Reads an ISA string, as in the device tree's `riscv,isa`: `rv64`, letters, and names with
    /// more than one letter behind underscores.
    pub fn from_isa(isa: &str) -> Self {
        let mut parts = isa.split('_');
        // The letters end where a longer name begins (unprivileged specification, ISA naming).
        let (name, single) = parts.next().and_then(|it| it.split_at_checked(4)).unwrap_or_default();
        if !name.eq_ignore_ascii_case("rv64") {
            return Self::LEAST;
        }
        let single = single.split(['z', 's', 'x', 'Z', 'S', 'X']).next().unwrap_or("");
        let letters = single.char_indices().filter_map(|(at, _)| single.get(at..=at));
        letters.chain(parts).fold(Self::LEAST, Self::with)
    }

    /// The features that both harts have, and [`svadu`](Self::svadu) if either has it: tables that
    /// both walk may have their flags set by one of them.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            hypervisor: self.hypervisor && other.hypervisor,
            svade: self.svade && other.svade,
            svadu: self.svadu || other.svadu,
            svinval: self.svinval && other.svinval,
            svnapot: self.svnapot && other.svnapot,
            svpbmt: self.svpbmt && other.svpbmt,
            svvptc: self.svvptc && other.svvptc,
        }
    }

    /// Returns the capabilities that the engine has to know. Where it is not said that flags are
    /// set by software alone (Svade without Svadu), hardware may set them.
    ///
    /// *Everything instead of pages*: from 65 pages on, which is what Linux does on RISC-V
    /// (`tlb_flush_all_threshold`).
    pub const fn caps(self) -> Caps {
        let by_hardware = self.svadu || !self.svade;
        Caps {
            hardware_access: by_hardware,
            hardware_dirty: by_hardware,
            invalid_entries_cached: !self.svvptc,
            invalidate_all_above: 64,
            largest_leaf: Level::ANY,
            ..Caps::CONSERVATIVE
        }
    }
}

//! The kind of a machine: the rules that its table walkers, barriers and caches follow.
//!
//! Properties of a whole family of processors are data too, a `Family` and the `Bits` of its
//! descriptors: the machine asks for a property, and names no architecture outside of this file.

pub use tablewright_walker::{Granule, Regime};

/// When a table walker may see less than its own CPU has done.
///
/// ```
/// use tablewright_machine::Ordering;
/// assert_ne!(Ordering::Base, Ordering::Ets2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Armv8.0: a walk may be made before anything that is not separated from it by DSB and ISB.
    Base,
    /// FEAT_ETS2: a translation fault is taken only if the walk still faults after everything that
    /// comes before the access in program order.
    Ets2,
    /// x86: stores become visible in program order, walks are made in program order, except that a
    /// not-present entry may have been read early.
    X86,
}

/// The hardware's abilities. The first group is what the engine has to know too, and is given to it
/// as [`Caps`](tablewright::Caps).
///
/// ```
/// use tablewright_machine::{Architecture, Granule, Regime};
/// let arm = Architecture::arm64(Regime::Arm64Stage1 { granule: Granule::K4, wide: false });
/// assert_eq!(arm.bbm, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// The format of the tables.
    pub regime: Regime,
    /// The format of the tables of guests, where `regime` is one of stage 2 and guests have a stage
    /// 1 above it. `None`: what programs access, they access by the addresses that `regime`
    /// translates.
    pub guest: Option<Regime>,
    /// arm64: a guest that is known by stage 2 alone has its caches off, and sees what is in
    /// memory.
    pub guest_caches_off: bool,
    /// The order in which walkers see stores.
    pub ordering: Ordering,
    /// Break-before-make level, 0 to 3.
    pub bbm: u8,
    /// Walkers set accessed flags.
    pub hardware_access: bool,
    /// Walkers set dirty state.
    pub hardware_dirty: bool,
    /// A new mapping needs an invalidation, because walkers cache that there was none.
    pub invalid_entries_cached: bool,
    /// More page-sized invalidations than this are better replaced by one of everything.
    pub invalidate_all_above: u64,

    /// An invalidation names a range (arm64 FEAT_TLBIRANGE); otherwise one page or block at a time.
    pub range_invalidation: bool,
    /// Each invalidation has to be issued twice.
    pub invalidate_twice: bool,
    /// A permission fault drops the TLB entry that caused it.
    pub permission_fault_drops_entry: bool,
    /// Large leaves may be executable.
    pub executable_large_leaves: bool,
    /// Stage 2 can force write-back, so that no data cache maintenance is needed (FEAT_S2FWB).
    pub forced_write_back: bool,
    /// The data cache needs no cleaning for instruction fetches to see new code (`CTR_EL0.IDC`).
    pub idc: bool,
    /// The instruction cache needs no invalidation to see new code (`CTR_EL0.DIC`).
    pub dic: bool,
    /// The instruction cache aliases: it must be invalidated as a whole.
    pub icache_aliasing: bool,
    /// The address bit of a leaf that says whose its memory is, whose two aliases caches do not
    /// keep coherent: what was written by the one is cleaned before it is used by the other (APM
    /// vol. 2, 7.10.6; `CPUID Fn8000_001F[EAX]` bit 10 clear). 0 where there is none.
    pub marked: u64,

    /// Sets of the TLB of each CPU, a power of two.
    pub tlb_sets: usize,
    /// Ways of each set.
    pub tlb_ways: usize,
    /// Tables whose address the walk cache of each CPU remembers, a power of two.
    pub walk_cache: usize,
}

impl Architecture {
    /// arm64 with nothing optional: the conservative choice, correct for any engine.
    pub const fn arm64(regime: Regime) -> Self {
        Self {
            regime,
            guest: None,
            guest_caches_off: false,
            ordering: Ordering::Base,
            bbm: 0,
            hardware_access: false,
            hardware_dirty: false,
            invalid_entries_cached: false,
            invalidate_all_above: 512,
            range_invalidation: false,
            invalidate_twice: false,
            permission_fault_drops_entry: false,
            executable_large_leaves: true,
            forced_write_back: false,
            idc: false,
            dic: false,
            icache_aliasing: false,
            marked: 0,
            tlb_sets: 64,
            tlb_ways: 4,
            walk_cache: 16,
        }
    }

    /// x86-64 with 4 or 5 levels.
    pub const fn x86_64(levels: u8) -> Self {
        Self {
            ordering: Ordering::X86,
            hardware_access: true,
            hardware_dirty: true,
            invalidate_all_above: 33,
            permission_fault_drops_entry: true,
            forced_write_back: true,
            idc: true,
            dic: true,
            ..Self::arm64(Regime::X86_64 { levels })
        }
    }

    /// Intel with EPT of 4 levels, accessed and dirty flags included, and guests that have x86-64
    /// tables.
    pub const fn ept() -> Self {
        Self {
            regime: Regime::Ept { levels: 4, mode_based: false },
            guest: Some(Regime::X86_64 { levels: 4 }),
            ..Self::x86_64(4)
        }
    }

    /// AMD with nested tables of 4 levels, and guests that have x86-64 tables.
    pub const fn npt() -> Self {
        Self { regime: Regime::Npt { levels: 4 }, ..Self::ept() }
    }

    /// RISC-V with 3, 4 or 5 levels, of a program's addresses or a guest's. What is optional is
    /// absent: walkers set no flags (Svade), and remember that there was nothing (no Svvptc).
    pub const fn riscv64(levels: u8, guest: bool) -> Self {
        Self {
            invalid_entries_cached: true,
            forced_write_back: true,
            idc: true,
            ..Self::arm64(Regime::Riscv { levels, guest })
        }
    }

    /// Whether an entry in use may have to be broken before another takes its place: on arm64.
    pub const fn breaks(&self) -> bool {
        self.family().breaks
    }

    /// Whether stores become visible, and walks are made, in program order.
    pub(crate) const fn is_ordered(&self) -> bool {
        matches!(self.ordering, Ordering::X86)
    }

    /// Whether it is one of x86.
    pub const fn is_x86(&self) -> bool {
        matches!(self.regime, Regime::X86_64 { .. } | Regime::Ept { .. } | Regime::Npt { .. })
    }

    /// The bits of a leaf that are left to software, of the three that the engine gives out.
    pub const fn software(&self) -> u8 {
        self.family().software
    }

    pub(crate) const fn family(&self) -> &'static Family {
        Family::of(self.regime)
    }

    /// The engine's view of it.
    pub const fn caps(&self) -> tablewright::Caps {
        tablewright::Caps {
            bbm: self.bbm,
            hardware_access: self.hardware_access,
            hardware_dirty: self.hardware_dirty,
            invalid_entries_cached: self.invalid_entries_cached,
            invalidate_all_above: self.invalidate_all_above,
            largest_leaf: tablewright::Level::ANY,
        }
    }
}

/// The behaviour and the demands of a family of processors.
#[derive(Debug)]
pub(crate) struct Family {
    /// An entry in use may have to be broken before another takes its place (DDI 0487 D8.16.1).
    pub(crate) breaks: bool,
    /// While a leaf and the table in its place may both be used, they have to translate alike.
    pub(crate) sizes_agree: bool,
    /// One register has the root of all addresses.
    pub(crate) one_root: bool,
    /// The caches need no maintenance, but for FENCE.I of RISC-V, which is not judged.
    pub(crate) coherent: bool,
    /// A leaf with a clear access flag may be remembered.
    pub(crate) remembers_unused: bool,
    /// An entry that is not present must name no memory.
    pub(crate) absent_is_blank: bool,
    /// An invalidation by address spares what is remembered of tables.
    pub(crate) address_spares_tables: bool,
    /// The setter of flags in leaves.
    pub(crate) flags: Flags,
    /// The software bits of a leaf, of the engine's three.
    pub(crate) software: u8,
    /// A descriptor with these bits is reserved in a table of pages, if they have this value.
    pub(crate) no_page: (u64, u64),
}

/// The setter of flags in leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flags {
    /// Walkers do, always.
    Walkers,
    /// Walkers do, or there are no flags.
    WalkersOrNone,
    /// Walkers do, or an access that finds one clear faults.
    WalkersOrFaults,
}

impl Family {
    const ARM64: Self = Self {
        breaks: true,
        sizes_agree: true,
        one_root: false,
        coherent: false,
        // D8.5.
        remembers_unused: false,
        absent_is_blank: false,
        address_spares_tables: false,
        flags: Flags::WalkersOrFaults,
        software: 7,
        // A block (D8.3.1).
        no_page: (3, 1),
    };

    const X86: Self = Self {
        // SDM 5.10.4.2 asks for an invalidation and allows it to come later; while both sizes may
        // be in use, they have to agree (5.10.2.4).
        breaks: false,
        one_root: true,
        coherent: true,
        remembers_unused: true,
        // A processor with the L1 terminal fault reads the cache through its address.
        absent_is_blank: true,
        flags: Flags::Walkers,
        no_page: (0, 1),
        ..Self::ARM64
    };

    /// SDM vol. 3C 29.3.5: there are flags if bit 6 of the EPTP is set.
    const EPT: Self = Self { flags: Flags::WalkersOrNone, ..Self::X86 };

    const RISCV: Self = Self {
        // PRIV 10.2.1: until the fence, what was there is used, or what is.
        sizes_agree: false,
        absent_is_blank: false,
        // SFENCE.VMA with an address orders accesses to leaves alone (PRIV 10.2.1).
        address_spares_tables: true,
        // Svadu, Svade.
        flags: Flags::WalkersOrFaults,
        software: 3,
        // A table (PRIV 10.3.2).
        no_page: (0xf, 1),
        ..Self::X86
    };

    pub(crate) const fn of(regime: Regime) -> &'static Self {
        match regime {
            Regime::Arm64Stage1 { .. }
            | Regime::Arm64Stage1Sized { .. }
            | Regime::Arm64El2 { .. }
            | Regime::Arm64Stage2 { .. } => &Self::ARM64,
            Regime::X86_64 { .. } | Regime::Npt { .. } => &Self::X86,
            Regime::Ept { .. } => &Self::EPT,
            Regime::Riscv { .. } => &Self::RISCV,
        }
    }
}

/// Bits that each tell something of a descriptor.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    /// It is valid if one of these is set.
    pub(crate) valid: u64,
    /// Flags of a leaf that hardware manages; none if it does not.
    pub(crate) accessed: u64,
    pub(crate) dirty: u64,
    /// A leaf is dirty when that bit is clear.
    pub(crate) clean_if_set: bool,
    /// A leaf is global if this bit is set, or if it is clear.
    pub(crate) global: u64,
    pub(crate) not_global: u64,
}

impl Bits {
    pub(crate) fn of(architecture: &Architecture) -> Self {
        let x86 = Self {
            valid: 1,
            accessed: 1 << 5,
            dirty: 1 << 6,
            clean_if_set: false,
            global: 0,
            not_global: 0,
        };
        match architecture.regime {
            // DDI 0487 D8.3.1: AF, AP[2], and nG, which is clear at EL2.
            Regime::Arm64Stage1 { .. }
            | Regime::Arm64Stage1Sized { .. }
            | Regime::Arm64El2 { .. } => Self {
                valid: 1,
                accessed: 1 << 10,
                dirty: 1 << 7,
                clean_if_set: true,
                global: 0,
                not_global: 1 << 11,
            },
            // D8.3.1: AF, and S2AP[1].
            Regime::Arm64Stage2 { .. } => {
                Self { valid: 1, accessed: 1 << 10, dirty: 1 << 7, clean_if_set: false, ..x86 }
            }
            // SDM vol. 3A 5.8, 5.10.2.4.
            Regime::X86_64 { .. } => Self { global: 1 << 8, ..x86 },
            Regime::Npt { .. } => x86,
            // PRIV 10.3.1; 18.5.1: G is nothing in the G-stage.
            Regime::Riscv { guest, .. } => Self {
                accessed: 1 << 6,
                dirty: 1 << 7,
                global: if guest { 0 } else { 1 << 5 },
                ..x86
            },
            // SDM vol. 3C 29.3.2: any right makes it valid. 29.3.5: flags, if bit 6 of the EPTP is
            // set.
            Regime::Ept { mode_based, .. } => Self {
                valid: 7 | u64::from(mode_based) << 10,
                accessed: u64::from(architecture.hardware_access) << 8,
                dirty: u64::from(architecture.hardware_dirty) << 9,
                clean_if_set: false,
                ..x86
            },
        }
    }
}

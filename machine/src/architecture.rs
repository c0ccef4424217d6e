//! The kind of a machine: the rules that its table walkers, barriers and caches follow.

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
        !self.is_x86() && !self.is_riscv()
    }

    /// Whether both halves of the addresses hang on one root.
    pub const fn has_one_root(&self) -> bool {
        !self.breaks()
    }

    /// Whether the rules of RISC-V hold.
    pub const fn is_riscv(&self) -> bool {
        matches!(self.regime, Regime::Riscv { .. })
    }

    /// Whether the rules of x86 hold.
    pub const fn is_x86(&self) -> bool {
        matches!(self.regime, Regime::X86_64 { .. } | Regime::Ept { .. } | Regime::Npt { .. })
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

//! The shape of a tree of tables: how an address splits into indices and an offset.
//!
//! All regimes split an address in one way. A table of a full level fills one page of 8-byte
//! descriptors, hence resolves `page_shift - 3` bits; the levels stack up from the page offset; the
//! first table resolves what is left of the input address and may be shorter, or in arm64 stage 2
//! longer. (DDI 0487 D8.2 for arm64, SDM vol. 3A 5.5.4 for x86-64 and vol. 3C 29.3.2 for EPT, APM
//! vol. 2 15.25 for nested paging.)
//!
//! The architectures count levels in opposite directions: arm64 up to 3, x86-64 down to 1, at the
//! table of the smallest pages. Inside this crate a level is therefore known by its `depth`, the
//! number of levels below it.

use core::ops::Range;

/// The arm64 translation granule: the size of a page and of a full table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granule {
    /// 4 KiB.
    K4,
    /// 16 KiB.
    K16,
    /// 64 KiB.
    K64,
}

impl Granule {
    /// The number of bits of an offset within a page: 12, 14 or 16.
    pub const fn page_shift(self) -> u32 {
        match self {
            Self::K4 => 12,
            Self::K16 => 14,
            Self::K64 => 16,
        }
    }

    /// The members of a contiguous run at `depth`: 1 where the Contiguous bit is RES0, or where the
    /// run would be larger than the input space.
    pub(crate) const fn run(self, depth: u32, shape: Shape) -> usize {
        let run = match (self, depth) {
            (Self::K4, 0..=2) => 16,
            (Self::K16, 0) => 128,
            (Self::K16, 1) => 32,
            (Self::K64, 0 | 1) => 32,
            _ => 1,
        };
        if run > shape.entries(depth) { 1 } else { run }
    }
}

/// One half of a virtual address space: the addresses that start with zeros or those that start
/// with ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// From address 0 upwards: arm64 TTBR0, x86-64 the first half of the root.
    Lower,
    /// Up to the last address: arm64 TTBR1, x86-64 the second half of the root.
    Upper,
}

/// A translation regime: everything outside the tables that decides what their bits mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Stage 1 of the arm64 EL1&0 regime, in the 64-bit format of descriptors (VMSAv8-64).
    Arm64Stage1 {
        /// The translation granule.
        granule: Granule,
        /// Addresses of 52 bits, virtual and physical, instead of 48: with FEAT_LPA2 (TCR_EL1.DS
        /// set) for 4 KiB and 16 KiB, with FEAT_LVA and FEAT_LPA for 64 KiB.
        wide: bool,
    },
    /// Stage 1 with virtual addresses of another size. It starts at the lowest level at which one
    /// table resolves what is left.
    Arm64Stage1Sized {
        /// The translation granule.
        granule: Granule,
        /// The size of a virtual address: 25 to 48 bits, to 52 if `wide` (64 less TCR_EL1.T0SZ or
        /// T1SZ).
        input_bits: u8,
        /// Physical addresses of 52 bits instead of 48, as above.
        wide: bool,
    },
    /// Stage 1 of EL2 with HCR_EL2.E2H clear: one exception level, one range of addresses, no
    /// ASIDs. With E2H set the regime is EL2&0, and its descriptors are those of EL1&0.
    Arm64El2 {
        /// The translation granule.
        granule: Granule,
        /// The size of a virtual address: 25 to 48 bits, to 52 if `wide` (64 less TCR_EL2.T0SZ).
        input_bits: u8,
        /// Physical addresses of 52 bits instead of 48: with FEAT_LPA2 (TCR_EL2.DS set) for 4 KiB
        /// and 16 KiB, with FEAT_LPA for 64 KiB.
        wide: bool,
    },
    /// x86-64 paging in long mode.
    X86_64 {
        /// 4, or 5 (CR4.LA57 set).
        levels: u8,
    },
    /// Stage 2 of the arm64 EL1&0 regime (VMSAv8-64): from intermediate physical addresses to
    /// physical ones. It starts at the lowest level at which 16 tables beside each other resolve
    /// what is left, and at level 2 at the latest.
    Arm64Stage2 {
        /// The translation granule.
        granule: Granule,
        /// The size of an intermediate physical address: 32 to 48 bits, to 52 if `wide`.
        input_bits: u8,
        /// Physical addresses of 52 bits instead of 48: with FEAT_LPA2 (VTCR_EL2.DS set) for 4 KiB
        /// and 16 KiB, with FEAT_LPA for 64 KiB.
        wide: bool,
        /// FEAT_S2FWB, HCR_EL2.FWB set: another meaning of memory types.
        forced_write_back: bool,
    },
    /// Intel EPT: from guest-physical to host-physical addresses.
    Ept {
        /// 4 or 5 (EPTP bits 5:3 and 1).
        levels: u8,
        /// Mode-based execute control: bit 10 is a right of its own.
        mode_based: bool,
    },
    /// AMD nested paging: from guest-physical to system-physical addresses.
    Npt {
        /// 4 or 5, as the host has.
        levels: u8,
    },
    /// RISC-V: Sv39, Sv48, Sv57, or the G-stage of a guest, Sv39x4, Sv48x4, Sv57x4.
    Riscv {
        /// 3, 4 or 5.
        levels: u8,
        /// The G-stage: from what a guest takes for physical to physical addresses.
        guest: bool,
    },
}

impl Regime {
    /// The number of bits of an offset within the smallest page.
    pub const fn page_shift(self) -> u32 {
        self.shape().page_shift
    }

    /// The number of low bits of an address that select a translation; the bits above them select
    /// the half.
    ///
    /// On arm64 each half has all these addresses (25 to 52 bits); on x86-64 the halves share them
    /// (48 or 57 bits, the highest of which is repeated above). In stage 2 and at EL2 there are no
    /// halves, and the bits above are zero.
    pub const fn input_bits(self) -> u32 {
        self.shape().input_bits
    }

    /// Sign-extends `va` from the highest bit that selects a translation, where both halves of the
    /// addresses hang on one root. Returns it unchanged elsewhere.
    ///
    /// ```
    /// use tablewright_walker::Regime;
    ///
    /// let (paging, nested) = (Regime::X86_64 { levels: 4 }, Regime::Npt { levels: 4 });
    /// assert_eq!(paging.canonical(0x8000_0000_0000), 0xffff_8000_0000_0000);
    /// assert_eq!(nested.canonical(0x8000_0000_0000), 0x8000_0000_0000);
    /// ```
    pub const fn canonical(self, va: u64) -> u64 {
        self.shape().canonical(va)
    }

    /// Whether both halves of the addresses hang on one root: x86-64, RISC-V.
    pub const fn shares_root(self) -> bool {
        matches!(self.shape().roots, Roots::Shared)
    }

    /// The level of the root: arm64 -1 to 3; x86-64, EPT and nested paging 4 or 5; RISC-V 2 to 4.
    pub const fn start_level(self) -> i8 {
        let shape = self.shape();
        shape.level(shape.top)
    }

    /// The level of the tables that hold the smallest pages: arm64 3, otherwise 1.
    pub const fn last_level(self) -> i8 {
        self.shape().level(0)
    }

    /// The number of descriptors in a table of `level`; of concatenated ones together.
    ///
    /// ```
    /// use tablewright_walker::{Granule, Regime};
    ///
    /// let regime = Regime::Arm64Stage1 { granule: Granule::K16, wide: false };
    /// assert_eq!(regime.table_entries(0), 2);
    /// assert_eq!(regime.table_entries(1), 2048);
    /// ```
    ///
    /// # Panics
    ///
    /// When the regime has no such level.
    pub const fn table_entries(self, level: i8) -> usize {
        let shape = self.shape();
        shape.entries(shape.depth(level))
    }

    /// The bytes of address space that one descriptor of `level` translates.
    ///
    /// # Panics
    ///
    /// When the regime has no such level.
    pub const fn entry_size(self, level: i8) -> u64 {
        let shape = self.shape();
        1 << shape.shift(shape.depth(level))
    }

    /// The number of adjacent descriptors of `level` that the Contiguous bit, or N, ties together;
    /// 1 where there is no such bit.
    ///
    /// # Panics
    ///
    /// When the regime has no such level.
    pub const fn run_entries(self, level: i8) -> usize {
        let depth = self.shape().depth(level);
        match self {
            Self::Arm64Stage1 { granule, .. }
            | Self::Arm64Stage1Sized { granule, .. }
            | Self::Arm64El2 { granule, .. }
            | Self::Arm64Stage2 { granule, .. } => granule.run(depth, self.shape()),
            // Svnapot.
            Self::Riscv { .. } if depth == 0 => RISCV_RUN,
            Self::Riscv { .. } | Self::X86_64 { .. } | Self::Ept { .. } | Self::Npt { .. } => 1,
        }
    }

    pub(crate) const fn shape(self) -> Shape {
        match self {
            Self::Arm64Stage1 { granule, wide } => Shape::arm64(granule, wide),
            Self::Arm64Stage1Sized { granule, input_bits, wide } => {
                Shape::arm64_sized(granule, input_bits as u32, wide, false)
            }
            Self::Arm64El2 { granule, input_bits, wide } => {
                Shape::arm64_sized(granule, input_bits as u32, wide, true)
            }
            Self::Arm64Stage2 { granule, input_bits, wide, .. } => {
                Shape::arm64_stage2(granule, input_bits as u32, wide)
            }
            Self::X86_64 { levels } => Shape::x86_64(levels),
            Self::Ept { levels, .. } | Self::Npt { levels } => Shape::nested(levels),
            Self::Riscv { levels, guest } => Shape::riscv(levels, guest),
        }
    }
}

/// Pages of a Svnapot run (PRIV 11).
pub(crate) const RISCV_RUN: usize = 16;

/// The place of the tables of each half of the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Roots {
    /// Each has a root. The bits above the input address select it (DDI 0487 D8.2.4).
    Two,
    /// Both hang on one root. The highest bit of the input address selects, and is repeated above
    /// (SDM vol. 3A 5.5.4, PRIV 10.4.1).
    Shared,
    /// There are no halves. The bits above the input address are clear.
    One,
}

/// The numbers that a walk needs to split an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) page_shift: u32,
    pub(crate) input_bits: u32,
    roots: Roots,
    /// The depth of the root.
    pub(crate) top: u32,
    last_level: i8,
    /// The step of the level's number on the way to the root.
    step: i8,
}

impl Shape {
    /// DDI 0487 D8.2: the start level follows from the granule and the size of the input address.
    pub(crate) const fn arm64(granule: Granule, wide: bool) -> Self {
        Self {
            page_shift: granule.page_shift(),
            input_bits: if wide { 52 } else { 48 },
            roots: Roots::Two,
            top: match (granule, wide) {
                (Granule::K4, true) => 4,
                (Granule::K4, false) | (Granule::K16, _) => 3,
                (Granule::K64, _) => 2,
            },
            last_level: 3,
            step: -1,
        }
    }

    /// DDI 0487 D8.2.8 to D8.2.10, the tables of T0SZ and the initial lookup level: the most bits
    /// that one first table at each level takes. Below 25 bits is FEAT_TTST.
    pub(crate) const fn arm64_sized(
        granule: Granule,
        input_bits: u32,
        wide: bool,
        el2: bool,
    ) -> Self {
        assert!(
            input_bits >= 25 && input_bits <= if wide { 52 } else { 48 },
            "a virtual address has 25 to 48 bits, to 52 with wide descriptors"
        );
        Self {
            input_bits,
            roots: if el2 { Roots::One } else { Roots::Two },
            top: match (granule, input_bits) {
                (Granule::K16, ..=25) | (Granule::K64, ..=29) => 0,
                (Granule::K4, ..=30) | (Granule::K16, ..=36) | (Granule::K64, ..=42) => 1,
                (Granule::K4, ..=39) | (Granule::K16, ..=47) | (Granule::K64, _) => 2,
                (Granule::K4, ..=48) | (Granule::K16, _) => 3,
                (Granule::K4, _) => 4,
            },
            ..Self::arm64(granule, wide)
        }
    }

    /// DDI 0487 D8.2, concatenated translation tables: the most bits that 16 first tables at each
    /// level take.
    pub(crate) const fn arm64_stage2(granule: Granule, input_bits: u32, wide: bool) -> Self {
        assert!(
            input_bits >= 32 && input_bits <= if wide { 52 } else { 48 },
            "an intermediate physical address has 32 to 48 bits, to 52 with wide descriptors"
        );
        Self {
            input_bits,
            roots: Roots::One,
            top: match (granule, input_bits) {
                (Granule::K4, ..=34) | (Granule::K16, ..=40) | (Granule::K64, ..=46) => 1,
                (Granule::K4, ..=43) | (Granule::K16, ..=51) | (Granule::K64, _) => 2,
                (Granule::K4 | Granule::K16, _) => 3,
            },
            ..Self::arm64(granule, wide)
        }
    }

    /// SDM vol. 3A 5.5.1: 48 bits with 4 levels, 57 bits with 5.
    pub(crate) const fn x86_64(levels: u8) -> Self {
        assert!(
            levels == 4 || levels == 5,
            "tables of x86-64, EPT and nested paging have 4 or 5 levels"
        );
        Self {
            page_shift: 12,
            input_bits: if levels == 4 { 48 } else { 57 },
            roots: Roots::Shared,
            top: levels as u32 - 1,
            last_level: 1,
            step: 1,
        }
    }

    /// EPT and nested paging split an address as x86-64 does, and it is not signed (SDM vol. 3C
    /// 29.3.2, APM vol. 2 15.25.3).
    pub(crate) const fn nested(levels: u8) -> Self {
        Self { roots: Roots::One, ..Self::x86_64(levels) }
    }

    /// PRIV 10.4 to 10.6: 39, 48, 57 bits. 18.5.1: of a guest two more, in a first table of four
    /// pages.
    pub(crate) const fn riscv(levels: u8, guest: bool) -> Self {
        assert!(levels >= 3 && levels <= 5, "tables of RISC-V have 3 to 5 levels");
        Self {
            page_shift: 12,
            input_bits: 12 + 9 * levels as u32 + if guest { 2 } else { 0 },
            roots: if guest { Roots::One } else { Roots::Shared },
            top: levels as u32 - 1,
            last_level: 0,
            step: 1,
        }
    }

    pub(crate) const fn level(&self, depth: u32) -> i8 {
        self.last_level + self.step * depth as i8
    }

    pub(crate) const fn depth(&self, level: i8) -> u32 {
        let depth = (level - self.last_level) * self.step;
        assert!(depth >= 0 && depth as u32 <= self.top, "the regime has no such level");
        depth as u32
    }

    /// Whether an address lies in one of the halves, or in the only range that there is.
    pub(crate) const fn is_canonical(&self, va: u64) -> bool {
        let above = va as i64 >> self.input_bits;
        match self.roots {
            Roots::Two => above == 0 || above == -1,
            Roots::Shared => va == self.canonical(va),
            Roots::One => above == 0,
        }
    }

    const fn canonical(&self, va: u64) -> u64 {
        match self.roots {
            Roots::Shared => {
                let above = 64 - self.input_bits;
                ((va << above) as i64 >> above) as u64
            }
            Roots::Two | Roots::One => va,
        }
    }

    /// The entries of the root that translate addresses of `half`.
    pub(crate) const fn root_entries(&self, half: Half) -> Range<usize> {
        let entries = self.entries(self.top);
        match (self.roots, half) {
            (Roots::Two, _) | (Roots::One, Half::Lower) => 0..entries,
            (Roots::One, Half::Upper) => 0..0,
            (Roots::Shared, Half::Lower) => 0..entries / 2,
            (Roots::Shared, Half::Upper) => entries / 2..entries,
        }
    }

    /// The lowest address bit that an entry at `depth` resolves.
    pub(crate) const fn shift(&self, depth: u32) -> u32 {
        self.page_shift + depth * (self.page_shift - 3)
    }

    /// The first address that the entry for `va` in a table at `depth` translates.
    pub(crate) const fn entry_start(&self, depth: u32, va: u64) -> u64 {
        va >> self.shift(depth) << self.shift(depth)
    }

    pub(crate) const fn entries(&self, depth: u32) -> usize {
        1 << (self.table_shift(depth) - self.shift(depth))
    }

    /// The address bits that a table at `depth` and those below it resolve, the offset included.
    pub(crate) const fn table_shift(&self, depth: u32) -> u32 {
        if depth == self.top { self.input_bits } else { self.shift(depth + 1) }
    }
}

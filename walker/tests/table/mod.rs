//! The table: descriptors worked out from the manuals by hand, and what each must mean.
//!
//! Two crates read it. `descriptors.rs` holds the walker to it, and the engine's `formats.rs` the
//! engine: so two decoders that share no code are measured against a third opinion, and neither
//! against the other.
//!
//! A [row](rows) stands alone in its table; the tables above it restrict nothing. Its meaning is
//! one line:
//!
//! ```text
//! PA SIZE[xRUN] priv/user G|n mMEMORY sSH A|- DIRTY swSOFTWARE kKEY [gp] [ns] [xs] [ipat] [sve]
//! table PA [what it takes away, privileged/user]
//! invalid
//! reserved: the start of the rule broken
//! ```
//!
//! The fields are those of the walker's `Leaf`. DIRTY is, on arm64, `dbm` and `ro` (in stage 2 a
//! clear S2AP\[1\]) as they stand; elsewhere `D`; `-` for nothing. The rest are bits of a leaf that
//! concern neither address nor permissions: `gp` and `ns` bits 50 and 5 of arm64, `xs` bit 11 of
//! its stage 2, `ipat` and `sve` bits 6 and 63 of EPT.
//!
//! Sources: DDI 0487 D8.3.1 for the fields, D8.7.1 for runs, D8.4.1 for permissions, D8.5 for the
//! flags that hardware writes; SDM vol. 3A 5.5.4 for the fields, 5.6.1 for permissions, 5.8 for the
//! flags, 5.9.2 for PAT; PRIV 10.3 to 10.6, 11, 12 and 18.5 for RISC-V. Stage 2: DDI 0487 D8.6.5
//! and D8.6.6 for memory types, D8.4.3 for XN; SDM vol. 3C 29.3.2 for EPT, 29.3.3.1 for its
//! misconfigurations, 29.3.5 for its flags; APM vol. 2 15.25 for nested paging.

#![allow(dead_code)] // Each test reads a part.

mod arm64;
mod riscv;
mod stage2;
mod x86_64;

use tablewright_walker::{Access, DirtyState, Granule, Leaf, Permissions, Regime};

const fn stage1(granule: Granule, wide: bool) -> Regime {
    Regime::Arm64Stage1 { granule, wide }
}

pub const A4: Regime = stage1(Granule::K4, false);
pub const A4W: Regime = stage1(Granule::K4, true);
pub const A16: Regime = stage1(Granule::K16, false);
pub const A16W: Regime = stage1(Granule::K16, true);
pub const A64: Regime = stage1(Granule::K64, false);
pub const A64W: Regime = stage1(Granule::K64, true);
pub const X4: Regime = Regime::X86_64 { levels: 4 };
pub const X5: Regime = Regime::X86_64 { levels: 5 };

const fn guest(granule: Granule, input_bits: u8, wide: bool, forced_write_back: bool) -> Regime {
    Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back }
}

const fn sized(granule: Granule, input_bits: u8, wide: bool) -> Regime {
    Regime::Arm64Stage1Sized { granule, input_bits, wide }
}

/// From level 1, with 8 entries: fewer than a run has.
pub const P4: Regime = sized(Granule::K4, 33, false);
/// From level 1.
pub const P4V: Regime = sized(Granule::K4, 39, false);
/// From level 2.
pub const P16: Regime = sized(Granule::K16, 36, false);
/// From level 1.
pub const P16W: Regime = sized(Granule::K16, 44, true);
/// From level 2.
pub const P64: Regime = sized(Granule::K64, 42, false);
/// From level 3, with 4096 entries.
pub const P64L: Regime = sized(Granule::K64, 28, false);

const fn el2(granule: Granule, input_bits: u8, wide: bool) -> Regime {
    Regime::Arm64El2 { granule, input_bits, wide }
}

pub const H4: Regime = el2(Granule::K4, 48, false);
pub const H16W: Regime = el2(Granule::K16, 52, true);
/// From level 2.
pub const H64: Regime = el2(Granule::K64, 42, false);

/// From level 1.
pub const S4: Regime = guest(Granule::K4, 40, false, false);
/// From level 0.
pub const S4F: Regime = guest(Granule::K4, 48, false, true);
/// From level 0, 16 tables.
pub const S4W: Regime = guest(Granule::K4, 52, true, false);
/// From level 2, 16 tables.
pub const S16: Regime = guest(Granule::K16, 40, false, false);
/// From level 0.
pub const S16W: Regime = guest(Granule::K16, 52, true, true);
/// From level 2, with 16 entries.
pub const S64: Regime = guest(Granule::K64, 33, false, true);
/// From level 1.
pub const S64W: Regime = guest(Granule::K64, 52, true, false);
pub const E4: Regime = Regime::Ept { levels: 4, mode_based: false };
pub const E5: Regime = Regime::Ept { levels: 5, mode_based: true };
pub const N4: Regime = Regime::Npt { levels: 4 };
pub const N5: Regime = Regime::Npt { levels: 5 };

const fn riscv(levels: u8, guest: bool) -> Regime {
    Regime::Riscv { levels, guest }
}

pub const V39: Regime = riscv(3, false);
pub const V48: Regime = riscv(4, false);
pub const V57: Regime = riscv(5, false);
/// Four tables at the root.
pub const G39: Regime = riscv(3, true);
pub const G48: Regime = riscv(4, true);
pub const G57: Regime = riscv(5, true);

pub const REGIMES: [Regime; 34] = [
    A4, A4W, A16, A16W, A64, A64W, P4, P4V, P16, P16W, P64, P64L, H4, H16W, H64, X4, X5, S4, S4F,
    S4W, S16, S16W, S64, S64W, E4, E5, N4, N5, V39, V48, V57, G39, G48, G57,
];

/// The regime whose rows hold for this one as well, at the levels that it has: descriptors of stage
/// 1 do not know how large the input space is, but for a run that is larger.
pub const fn rows_of(regime: Regime) -> Regime {
    match regime {
        Regime::Arm64Stage1Sized { granule, wide, .. } => stage1(granule, wide),
        Regime::Arm64El2 { granule: Granule::K4, wide: false, .. } => H4,
        regime => regime,
    }
}

/// Whether a row holds for a regime.
pub fn holds(&(of, level, raw, _): &Row, regime: Regime) -> bool {
    if of == regime {
        return true;
    }
    of == rows_of(regime)
        && level >= regime.start_level()
        && (raw & 1 << 52 == 0 || of.run_entries(level) == regime.run_entries(level))
}

const NO_BLOCK: &str = "reserved: a block descriptor";
const RES0_LEAF: &str = "reserved: a RES0 bit below or above";
const RES0_TABLE: &str = "reserved: a RES0 bit of a table";
const RES0_CONT: &str = "reserved: the Contiguous bit";
const SH_01: &str = "reserved: SH is 01";
const LARGE: &str = "reserved: a reserved bit below the address of a large page";
const PS: &str = "reserved: PS";
const ONE_EL: &str = "reserved: AP[1] is RES1";
const NO_EL0: &str = "reserved: nG or PXN";
const TYPE: &str = "reserved: a reserved memory type";
const W_NOT_R: &str = "reserved: an entry that can be written and not read";
const EPT_TABLE: &str = "reserved: a reserved bit of a table entry";
const RV_TABLE: &str = EPT_TABLE;
const RV_PAGE: &str = "reserved: a table in a table of pages";
const RV_ZERO: &str = "reserved: one of bits 60:54";
const RV_N: &str = "reserved: N is set";
const RV_LOW: &str = "reserved: a bit of the page number below";
const RV_U: &str = "reserved: a leaf of the G-stage without U";
const RV_G: &str = "reserved: G is reserved";

/// The regime, the level, the descriptor, its meaning.
pub type Row = (Regime, i8, u64, &'static str);

/// All rows.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    [arm64::ROWS, stage2::ROWS, x86_64::ROWS, riscv::ROWS].into_iter().flatten()
}

/// The regime, table descriptors from the top down to right above a leaf, the leaf's level, the
/// leaf, what it permits.
pub type Under = (Regime, &'static [u64], i8, u64, &'static str);

#[rustfmt::skip]
pub const UNDER: &[Under] = &[
    // A page that both may do everything with, as far as the architecture has it.
    (A4, &[0x0000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "rw-/rwx"),
    // PXNTable, UXNTable; a table adds nothing that the leaf withholds.
    (A4, &[0x0800_0000_0000_1003], 3, 0x0000_0000_4000_04c3, "r--/r-x"),
    (A4, &[0x1000_0000_0000_1003], 3, 0x0000_0000_4000_04c3, "r-x/r--"),
    (A4, &[0x0000_0000_0000_1003], 3, 0x0060_0000_4000_0483, "r--/---"),
    // APTable[0]: EL0 does not write the page any more, so that EL1 may execute it. APTable[1]:
    // likewise.
    (A4, &[0x2000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "rwx/--x"),
    (A4, &[0x4000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r-x/r-x"),
    (A4, &[0x4000_0000_0000_1003], 3, 0x0008_0000_4000_0443, "r-x/r-x"),
    (A4, &[0x6000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r-x/--x"),
    (A4, &[0x7800_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r--/---"),
    // What several levels take away unites, on the way to blocks too.
    (A4, &[0x4000_0000_0000_1003, 0x0000_0000_0000_2003, 0x1000_0000_0000_3003], 3, 0x443,
        "r-x/r--"),
    (A4, &[0x2000_0000_0000_1003, 0x0800_0000_0000_2003], 2, 0x0000_0000_4000_0441, "rw-/--x"),
    (A4W, &[0x1000_0000_0000_1003, 0x4000_0000_0000_2003], 1, 0x0000_0000_4000_0441, "r-x/r--"),
    (A16, &[0x2000_0000_0000_4003], 3, 0x0000_0000_4000_4443, "rwx/--x"),
    (A16W, &[0x4000_0000_0000_4003], 1, 0x0000_0010_0000_0441, "r-x/r-x"),
    (A64, &[0x1000_0000_0001_0003, 0x4000_0000_0001_0003], 3, 0x0000_0000_4001_0443, "r-x/r--"),
    (A64W, &[0x0800_0000_0001_0003], 2, 0x0000_0000_2000_0401, "rw-/--x"),
    // XNTable and APTable[1] at EL2 by itself.
    (H4, &[0x0000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "rwx/---"),
    (H4, &[0x1000_0000_0000_1003, 0x0000_0000_0000_2003], 3, 0x0000_0000_4000_0443, "rw-/---"),
    (H4, &[0x1000_0000_0000_1003, 0x4000_0000_0000_2003], 2, 0x0000_0000_4000_0441, "r--/---"),
    (H16W, &[0x4000_0000_0000_4003], 1, 0x0000_0010_0000_0441, "r-x/---"),
    (H64, &[0x4000_0000_0001_0003], 3, 0x0040_0000_4001_0443, "r--/---"),
    // A right of x86-64 is one that every level grants.
    (X4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_4000_0007, "rwx/rwx"),
    (X4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_4000_0001, "r-x/---"),
    (X4, &[0x1005, 0x2007, 0x3007], 1, 0x0000_0000_4000_0007, "r-x/r-x"),
    (X4, &[0x1007, 0x2003, 0x3007], 1, 0x0000_0000_4000_0007, "rwx/---"),
    (X4, &[0x1007, 0x2007, 0x8000_0000_0000_3007], 1, 0x0000_0000_4000_0007, "rw-/rw-"),
    (X4, &[0x1005, 0x2003, 0x8000_0000_0000_3007], 1, 0x0000_0000_4000_0007, "r--/---"),
    (X4, &[0x1007, 0x2005], 2, 0x0000_0000_4020_0087, "r-x/r-x"),
    (X5, &[0x8000_0000_0000_1007, 0x2007, 0x3007, 0x4003], 1, 0x0000_0000_4000_0007, "rw-/---"),
    (X5, &[0x1007, 0x2005], 3, 0x0000_0000_4000_0087, "r-x/r-x"),
    // Tables of stage 2 take nothing away on arm64.
    (S4, &[0x0000_0000_0000_1003, 0x07f8_0000_0000_2fff], 3, 0x0000_0000_4000_07ff, "rwx/rwx"),
    (S4F, &[0x1003, 0x2003, 0x3003], 3, 0x0060_0000_4000_075b, "r-x/r--"),
    // A right of EPT is one that every level grants.
    (E4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_0040_0037, "rwx/rwx"),
    (E4, &[0x1005, 0x2007, 0x3007], 1, 0x0000_0000_0040_0037, "r-x/r-x"),
    (E4, &[0x1007, 0x2003, 0x3005], 1, 0x0000_0000_0040_0037, "r--/r--"),
    (E4, &[0x1007, 0x2004, 0x3007], 1, 0x0000_0000_0040_0037, "--x/--x"),
    (E4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_0040_0031, "r--/r--"),
    (E4, &[0x1007, 0x2005], 2, 0x0000_0000_4020_00b7, "r-x/r-x"),
    (E4, &[0x1003], 3, 0x0000_0000_4000_00b7, "rw-/rw-"),
    (E5, &[0x1407, 0x2407, 0x3407, 0x4407], 1, 0x0000_0000_0040_0437, "rwx/rwx"),
    (E5, &[0x1007, 0x2407, 0x3407, 0x4407], 1, 0x0000_0000_0040_0437, "rwx/rw-"),
    (E5, &[0x1407, 0x2403, 0x3405, 0x4407], 1, 0x0000_0000_0040_0437, "r--/r-x"),
    (E5, &[0x1407, 0x2007], 3, 0x0000_0000_4000_04b5, "r-x/r--"),
    // And of nested paging, where what a table keeps from the user it keeps from the guest.
    (N4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_4000_0007, "rwx/rwx"),
    (N4, &[0x1005, 0x2007, 0x3007], 1, 0x0000_0000_4000_0007, "r-x/r-x"),
    (N4, &[0x1007, 0x2003, 0x3007], 1, 0x0000_0000_4000_0007, "---/---"),
    (N4, &[0x1007, 0x2007, 0x8000_0000_0000_3007], 1, 0x0000_0000_4000_0007, "rw-/rw-"),
    (N4, &[0x1007, 0x2007, 0x3007], 1, 0x0000_0000_4000_0003, "---/---"),
    (N5, &[0x8000_0000_0000_1007, 0x2007, 0x3005, 0x4007], 1, 0x0000_0000_4000_0007, "r--/r--"),
    // Tables of RISC-V take nothing away.
    (V39, &[0x0421, 0x0801], 0, 0x0000_0000_1000_000f, "rwx/---"),
    (V48, &[0x0401, 0x0801], 1, 0x0000_0000_1000_001f, "rw-/rwx"),
    (V57, &[0x0401, 0x0801, 0x0c01, 0x1001], 0, 0x0000_0000_1000_0013, "r--/r--"),
    (G39, &[0x1001, 0x2001], 0, 0x0000_0000_1000_001f, "rwx/rwx"),
];

/// The regime, the level, a descriptor; what hardware writes back for an access, where it manages
/// the access flag, and for a write, where it manages the dirty state.
pub type Written = (Regime, i8, u64, Option<u64>, Option<u64>);

#[rustfmt::skip]
pub const WRITTEN: &[Written] = &[
    // AF (10) where it is clear; AP[2] (7) where DBM (51) is set.
    (A4, 3, 0x0068_0000_4000_0383, Some(0x0068_0000_4000_0783), Some(0x0068_0000_4000_0303)),
    (A4, 3, 0x0068_0000_4000_0783, None, Some(0x0068_0000_4000_0703)),
    (A4, 3, 0x0068_0000_4000_0703, None, None),
    (A4, 3, 0x0060_0000_4000_0783, None, None),
    (A4, 3, 0x0060_0000_4000_0303, Some(0x0060_0000_4000_0703), None),
    (A4, 2, 0x0068_0000_8020_0381, Some(0x0068_0000_8020_0781), Some(0x0068_0000_8020_0301)),
    (A4W, 3, 0x0068_0000_4000_0383, Some(0x0068_0000_4000_0783), Some(0x0068_0000_4000_0303)),
    (A16, 2, 0x0008_0000_4200_0381, Some(0x0008_0000_4200_0781), Some(0x0008_0000_4200_0301)),
    (A64W, 1, 0x0008_0400_0000_f381, Some(0x0008_0400_0000_f781), Some(0x0008_0400_0000_f301)),
    (H4, 3, 0x0048_0000_4000_03c3, Some(0x0048_0000_4000_07c3), Some(0x0048_0000_4000_0343)),
    (H4, 3, 0x0040_0000_4000_07c3, None, None),
    (H16W, 2, 0x0008_0000_4200_00c1, Some(0x0008_0000_4200_04c1), Some(0x0008_0000_4200_0041)),
    (H64, 3, 0x0048_0000_4001_07c3, None, Some(0x0048_0000_4001_0743)),
    // Not what translates nothing, nor a table: there the bits are ignored.
    (A4, 3, 0x0068_0000_4000_0382, None, None),
    (A4, 3, 0x0068_0000_4000_0381, None, None),
    (A4, 3, 0x006a_0000_4000_0383, None, None),
    (A4, 2, 0x0008_0000_8765_4083, None, None),
    // A (5) and D (6); D only of a leaf, and where R/W (1) lets a write pass.
    (X4, 1, 0x8000_0000_0040_0003, Some(0x8000_0000_0040_0023), Some(0x8000_0000_0040_0043)),
    (X4, 1, 0x0000_0000_0040_0023, None, Some(0x0000_0000_0040_0063)),
    (X4, 1, 0x0000_0000_0040_0063, None, None),
    (X4, 1, 0x0000_0000_0040_0001, Some(0x0000_0000_0040_0021), None),
    (X4, 2, 0x0000_0000_4020_0083, Some(0x0000_0000_4020_00a3), Some(0x0000_0000_4020_00c3)),
    (X4, 3, 0x0000_0000_4000_00a3, None, Some(0x0000_0000_4000_00e3)),
    (X4, 2, 0x0000_0000_0001_0007, Some(0x0000_0000_0001_0027), None),
    (X4, 4, 0x0000_0000_0001_0027, None, None),
    (X5, 5, 0x0000_0000_0001_0003, Some(0x0000_0000_0001_0023), None),
    (X5, 1, 0x0000_0000_0040_0007, Some(0x0000_0000_0040_0027), Some(0x0000_0000_0040_0047)),
    (X4, 1, 0x0000_0000_0040_0002, None, None),
    (X4, 4, 0x0000_0000_0001_0083, None, None),
    // Stage 2: AF, and S2AP[1] (7), which is set, where DBM is.
    (S4, 3, 0x0008_0000_4000_037f, Some(0x0008_0000_4000_077f), Some(0x0008_0000_4000_03ff)),
    (S4, 3, 0x0008_0000_4000_077f, None, Some(0x0008_0000_4000_07ff)),
    (S4, 3, 0x0008_0000_4000_07ff, None, None),
    (S4, 3, 0x0000_0000_4000_077f, None, None),
    (S4, 3, 0x0000_0000_4000_03ff, Some(0x0000_0000_4000_07ff), None),
    (S4, 1, 0x0008_0001_4000_037d, Some(0x0008_0001_4000_077d), Some(0x0008_0001_4000_03fd)),
    (S4F, 2, 0x0008_0000_8020_035d, Some(0x0008_0000_8020_075d), Some(0x0008_0000_8020_03dd)),
    (S16W, 2, 0x0008_0000_4200_0059, Some(0x0008_0000_4200_0459), Some(0x0008_0000_4200_00d9)),
    (S64W, 1, 0x0008_0400_0000_837d, Some(0x0008_0400_0000_877d), Some(0x0008_0400_0000_83fd)),
    (S4, 3, 0x0008_0000_4000_037e, None, None),
    (S4, 2, 0x0008_0000_8765_4003, None, None),
    // EPT: A (8) of all, D (9) of a leaf where W (1) lets a write pass.
    (E4, 1, 0x0000_0000_0040_0033, Some(0x0000_0000_0040_0133), Some(0x0000_0000_0040_0233)),
    (E4, 1, 0x0000_0000_0040_0133, None, Some(0x0000_0000_0040_0333)),
    (E4, 1, 0x0000_0000_0040_0031, Some(0x0000_0000_0040_0131), None),
    (E4, 2, 0x0000_0000_4020_00b7, Some(0x0000_0000_4020_01b7), Some(0x0000_0000_4020_02b7)),
    (E4, 2, 0x0000_0000_0001_0007, Some(0x0000_0000_0001_0107), None),
    (E4, 4, 0x0000_0000_0001_0107, None, None),
    (E4, 1, 0x0000_0000_0040_0032, None, None),
    (E5, 3, 0x0000_0001_4000_04b7, Some(0x0000_0001_4000_05b7), Some(0x0000_0001_4000_06b7)),
    (E5, 5, 0x0000_0000_0001_0407, Some(0x0000_0000_0001_0507), None),
    (N4, 1, 0x0000_0000_0040_0007, Some(0x0000_0000_0040_0027), Some(0x0000_0000_0040_0047)),
    (N4, 1, 0x0000_0000_0040_0025, None, None),
    (N4, 2, 0x0000_0000_4020_00a7, None, Some(0x0000_0000_4020_00e7)),
    (N4, 4, 0x0000_0000_0001_0007, Some(0x0000_0000_0001_0027), None),
    (N5, 5, 0x0000_0000_0001_0003, Some(0x0000_0000_0001_0023), None),
    (N5, 3, 0x0000_0000_4000_0087, Some(0x0000_0000_4000_00a7), Some(0x0000_0000_4000_00c7)),
    // RISC-V: A (6) and D (7) of a leaf, D where W (2) is set; nothing of a table.
    (V39, 0, 0x0000_0000_0010_0007, Some(0x0000_0000_0010_0047), Some(0x0000_0000_0010_0087)),
    (V39, 0, 0x0000_0000_0010_0047, None, Some(0x0000_0000_0010_00c7)),
    (V39, 0, 0x0000_0000_0010_00c7, None, None),
    (V39, 0, 0x0000_0000_0010_0013, Some(0x0000_0000_0010_0053), None),
    (V39, 1, 0x0000_0000_1008_0007, Some(0x0000_0000_1008_0047), Some(0x0000_0000_1008_0087)),
    (V39, 1, 0x0000_0000_0000_4001, None, None),
    (V48, 3, 0x0000_0020_0000_0047, None, Some(0x0000_0020_0000_00c7)),
    (V57, 0, 0x0000_0000_0010_0006, None, None),
    (G39, 0, 0x0000_0000_0010_0017, Some(0x0000_0000_0010_0057), Some(0x0000_0000_0010_0097)),
    (G48, 2, 0x0000_0000_5000_001b, Some(0x0000_0000_5000_005b), None),
    (G57, 4, 0x0000_4000_0000_0057, None, Some(0x0000_4000_0000_00d7)),
];

/// The meaning of a row.
#[derive(Debug, PartialEq, Eq)]
pub enum Means {
    Invalid,
    Table {
        pa: u64,
        takes: Access,
    },
    Leaf {
        leaf: Leaf,
        /// The bits that are named at the end of the line, where they stand.
        others: u64,
    },
    Reserved(&'static str),
}

/// Reads the line of a row. What it does not understand is a mistake in the table: it panics.
pub fn means(&(regime, level, raw, line): &Row) -> Means {
    if let Some(rule) = line.strip_prefix("reserved: ") {
        return Means::Reserved(rule);
    }
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["invalid"] => Means::Invalid,
        ["table", pa] => Means::Table { pa: hex("0x", pa), takes: access("---/---") },
        ["table", pa, takes] => Means::Table { pa: hex("0x", pa), takes: access(takes) },
        [
            pa,
            extent,
            may,
            global,
            memory,
            shareability,
            accessed,
            dirty,
            software,
            key,
            ref others @ ..,
        ] => {
            let (size, run) = extent.split_once('x').unwrap_or((extent, "1"));
            let size = bytes(size);
            Means::Leaf {
                leaf: Leaf {
                    va: 0,
                    pa: hex("0x", pa),
                    size,
                    level,
                    contiguous: run != "1",
                    run_size: run.parse::<u64>().unwrap() * size,
                    access: access(may),
                    global: either(global, "G", "n"),
                    memory: hex("m", memory) as u8,
                    shareability: (shareability != "s-").then(|| hex("s", shareability) as u8),
                    accessed: either(accessed, "A", "-"),
                    dirty: match regime {
                        Regime::Arm64Stage1 { .. }
                        | Regime::Arm64Stage1Sized { .. }
                        | Regime::Arm64El2 { .. }
                        | Regime::Arm64Stage2 { .. } => DirtyState::Arm64 {
                            dbm: matches!(dirty, "dbm" | "dbm+ro"),
                            read_only: matches!(dirty, "ro" | "dbm+ro"),
                        },
                        _ => DirtyState::Bit { dirty: either(dirty, "D", "-") },
                    },
                    software: hex("sw", software) as u16,
                    key: hex("k", key) as u8,
                    raw,
                },
                others: others.iter().fold(0, |bits, &name| {
                    bits | match name {
                        "gp" => 1 << 50,
                        "ns" => 1 << 5,
                        "xs" => 1 << 11,
                        "ipat" => 1 << 6,
                        "sve" => 1 << 63,
                        _ => panic!("{line}"),
                    }
                }),
            }
        }
        _ => panic!("{line}"),
    }
}

/// Reads "privileged/user".
pub fn access(line: &str) -> Access {
    let class = |class: &str| {
        let [r, w, x] = class.as_bytes() else { panic!("{line}") };
        let flag = |&sign: &u8, set| {
            assert!(sign == set || sign == b'-', "{line}");
            sign == set
        };
        Permissions { read: flag(r, b'r'), write: flag(w, b'w'), execute: flag(x, b'x') }
    };
    let (privileged, user) = line.split_once('/').unwrap();
    Access { privileged: class(privileged), user: class(user) }
}

fn either(word: &str, yes: &str, no: &str) -> bool {
    assert!(word == yes || word == no, "{word}");
    word == yes
}

fn hex(prefix: &str, word: &str) -> u64 {
    u64::from_str_radix(word.strip_prefix(prefix).expect(word), 16).expect(word)
}

fn bytes(word: &str) -> u64 {
    let (number, unit) = word.split_at(word.len() - 1);
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => panic!("{word}"),
    };
    number.parse::<u64>().unwrap() << shift
}

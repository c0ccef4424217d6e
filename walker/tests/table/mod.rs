//! The table: descriptors worked out from the manuals by hand, and what each must mean.
//!
//! Two crates read it. `descriptors.rs` holds the walker to it, and the engine's `formats.rs` the engine: so two decoders
//! that share no code are measured against a third opinion, and neither against the other.
//!
//! A row of [`ROWS`] stands alone in its table; the tables above it restrict nothing. Its meaning is one line:
//!
//! ```text
//! PA  SIZE[xRUN]  privileged/user  G|n  mMEMORY  sSH  A|-  DIRTY  swSOFTWARE  kKEY  [gp] [ns] [xs] [ipat] [sve]
//! table PA [what it takes away, privileged/user]
//! invalid
//! reserved: the start of the rule broken
//! ```
//!
//! The fields are those of the walker's `Leaf`. DIRTY is, on arm64, `dbm` and `ro` (in stage 2 a clear S2AP\[1\]) as they
//! stand; elsewhere `D`; `-` for nothing. The rest are bits of a leaf that concern neither address nor permissions: `gp`
//! and `ns` bits 50 and 5 of arm64, `xs` bit 11 of its stage 2, `ipat` and `sve` bits 6 and 63 of EPT.
//!
//! Sources: DDI 0487 D8.3.1 for the fields, D8.7.1 for runs, D8.4.1 for permissions, D8.5 for the flags that hardware
//! writes; SDM vol. 3A 5.5.4 for the fields, 5.6.1 for permissions, 5.8 for the flags, 5.9.2 for PAT. Stage 2: DDI 0487
//! D8.6.5 and D8.6.6 for memory types, D8.4.3 for XN; SDM vol. 3C 29.3.2 for EPT, 29.3.3.1 for its misconfigurations,
//! 29.3.5 for its flags; APM vol. 2 15.25 for nested paging.

#![allow(dead_code)] // Each test reads a part.

use tablewright_walker::{Access, DirtyState, Granule, Leaf, Permissions, Regime};

const fn arm64(granule: Granule, wide: bool) -> Regime {
    Regime::Arm64Stage1 { granule, wide }
}

pub const A4: Regime = arm64(Granule::K4, false);
pub const A4W: Regime = arm64(Granule::K4, true);
pub const A16: Regime = arm64(Granule::K16, false);
pub const A16W: Regime = arm64(Granule::K16, true);
pub const A64: Regime = arm64(Granule::K64, false);
pub const A64W: Regime = arm64(Granule::K64, true);
pub const X4: Regime = Regime::X86_64 { levels: 4 };
pub const X5: Regime = Regime::X86_64 { levels: 5 };

const fn stage2(granule: Granule, input_bits: u8, wide: bool, forced_write_back: bool) -> Regime {
    Regime::Arm64Stage2 {
        granule,
        input_bits,
        wide,
        forced_write_back,
    }
}

const fn sized(granule: Granule, input_bits: u8, wide: bool) -> Regime {
    Regime::Arm64Stage1Sized {
        granule,
        input_bits,
        wide,
    }
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
    Regime::Arm64El2 {
        granule,
        input_bits,
        wide,
    }
}

pub const H4: Regime = el2(Granule::K4, 48, false);
pub const H16W: Regime = el2(Granule::K16, 52, true);
/// From level 2.
pub const H64: Regime = el2(Granule::K64, 42, false);

/// From level 1.
pub const S4: Regime = stage2(Granule::K4, 40, false, false);
/// From level 0.
pub const S4F: Regime = stage2(Granule::K4, 48, false, true);
/// From level 0, 16 tables.
pub const S4W: Regime = stage2(Granule::K4, 52, true, false);
/// From level 2, 16 tables.
pub const S16: Regime = stage2(Granule::K16, 40, false, false);
/// From level 0.
pub const S16W: Regime = stage2(Granule::K16, 52, true, true);
/// From level 2, with 16 entries.
pub const S64: Regime = stage2(Granule::K64, 33, false, true);
/// From level 1.
pub const S64W: Regime = stage2(Granule::K64, 52, true, false);
pub const E4: Regime = Regime::Ept {
    levels: 4,
    mode_based: false,
};
pub const E5: Regime = Regime::Ept {
    levels: 5,
    mode_based: true,
};
pub const N4: Regime = Regime::Npt { levels: 4 };
pub const N5: Regime = Regime::Npt { levels: 5 };

pub const REGIMES: [Regime; 28] = [
    A4, A4W, A16, A16W, A64, A64W, P4, P4V, P16, P16W, P64, P64L, H4, H16W, H64, X4, X5, S4, S4F,
    S4W, S16, S16W, S64, S64W, E4, E5, N4, N5,
];

/// The regime whose rows hold for this one as well, at the levels that it has: descriptors of stage 1 do not know how large
/// the input space is, but for a run that is larger.
pub const fn rows_of(regime: Regime) -> Regime {
    match regime {
        Regime::Arm64Stage1Sized { granule, wide, .. } => arm64(granule, wide),
        Regime::Arm64El2 {
            granule: Granule::K4,
            wide: false,
            ..
        } => H4,
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

/// The regime, the level, the descriptor, its meaning.
pub type Row = (Regime, i8, u64, &'static str);

#[rustfmt::skip]
pub const ROWS: &[Row] = &[
    // 4 KiB, 48 bits. Permissions of a page: every value of UXN (54), PXN (53), AP[2:1] (7:6).
    (A4, 3, 0x0000_0000_4000_0703, "0x40000000 4K rwx/--x G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0000_0000_4000_0743, "0x40000000 4K rw-/rwx G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0000_0000_4000_0783, "0x40000000 4K r-x/--x G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0000_0000_4000_07c3, "0x40000000 4K r-x/r-x G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0020_0000_4000_0703, "0x40000000 4K rw-/--x G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0020_0000_4000_0743, "0x40000000 4K rw-/rwx G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0020_0000_4000_0783, "0x40000000 4K r--/--x G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0020_0000_4000_07c3, "0x40000000 4K r--/r-x G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0040_0000_4000_0703, "0x40000000 4K rwx/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0040_0000_4000_0743, "0x40000000 4K rw-/rw- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0040_0000_4000_0783, "0x40000000 4K r-x/--- G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0040_0000_4000_07c3, "0x40000000 4K r-x/r-- G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0743, "0x40000000 4K rw-/rw- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0783, "0x40000000 4K r--/--- G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0060_0000_4000_07c3, "0x40000000 4K r--/r-- G m0 s3 A ro sw0 k0"),
    // nG (11), AF (10), SH (9:8), AttrIndx (4:2).
    (A4, 3, 0x0040_0001_2345_6f43, "0x123456000 4K rw-/rw- n m0 s3 A - sw0 k0"),
    (A4, 3, 0x0020_0000_8000_0fc7, "0x80000000 4K r--/r-x n m1 s3 A ro sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0303, "0x40000000 4K rw-/--- G m0 s3 - - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0603, "0x40000000 4K rw-/--- G m0 s2 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0403, "0x40000000 4K rw-/--- G m0 s0 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0503, SH_01),
    (A4, 3, 0x0060_0000_4000_070b, "0x40000000 4K rw-/--- G m2 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0713, "0x40000000 4K rw-/--- G m4 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_041f, "0x40000000 4K rw-/--- G m7 s0 A - sw0 k0"),
    // DBM (51), software (58:55), PBHA (62:59), bit 63, GP (50), NS (5).
    (A4, 3, 0x0068_0000_4000_0783, "0x40000000 4K r--/--- G m0 s3 A dbm+ro sw0 k0"),
    (A4, 3, 0x0068_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A dbm sw0 k0"),
    (A4, 3, 0x0008_0000_4000_07c3, "0x40000000 4K r-x/r-x G m0 s3 A dbm+ro sw0 k0"),
    (A4, 3, 0x00e0_0000_4000_0783, "0x40000000 4K r--/--- G m0 s3 A ro sw1 k0"),
    (A4, 3, 0x0560_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - swa k0"),
    (A4, 3, 0x07e0_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - swf k0"),
    (A4, 3, 0x7860_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 kf"),
    (A4, 3, 0x0860_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k1"),
    (A4, 3, 0x8060_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0064_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0 gp"),
    (A4, 3, 0x0060_0000_4000_0723, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0 ns"),
    // The address, the Contiguous bit (52), what is no page.
    (A4, 3, 0x0060_ffff_ffff_f703, "0xfffffffff000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_0000_1703, "0x1000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0070_0000_4000_0703, "0x40000000 4Kx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x8010_0000_8000_0703, "0x80000000 4Kx16 rwx/--x G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0061_0000_4000_0703, RES0_LEAF),
    (A4, 3, 0x0062_0000_4000_0703, RES0_LEAF),
    (A4, 3, 0x0060_0000_4000_0701, NO_BLOCK),
    (A4, 3, 0x0060_0000_4000_0702, "invalid"),
    (A4, 3, 0xffff_ffff_ffff_fffe, "invalid"),
    (A4, 3, 0, "invalid"),
    // Blocks of 2 MiB and 1 GiB: of the bits below the address, nT (16) alone may be set.
    (A4, 2, 0x0060_0000_8020_0701, "0x80200000 2M rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0000_0000_4020_0fc5, "0x40200000 2M r-x/r-x n m1 s3 A ro sw0 k0"),
    (A4, 2, 0x0060_0000_8021_0701, "0x80200000 2M rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0070_0000_8200_0701, "0x82000000 2Mx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0060_ffff_ffe0_0701, "0xffffffe00000 2M rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0060_0000_8020_1701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8020_8701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8022_0701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8030_0701, RES0_LEAF),
    (A4, 2, 0x0061_0000_8020_0701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8020_0700, "invalid"),
    (A4, 2, 0x0000_0000_4000_0702, "invalid"),
    (A4, 1, 0x0060_0001_4000_0701, "0x140000000 1G rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 1, 0x0070_0004_0000_0701, "0x400000000 1Gx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 1, 0x0060_0001_6000_0701, RES0_LEAF),
    (A4, 0, 0x0060_0080_0000_0701, NO_BLOCK),
    (A4, 0, 0, "invalid"),
    // Tables: the address, the ignored bits (58:51 and 11:2), the reserved ones.
    (A4, 2, 0x0000_0000_8765_4003, "table 0x87654000"),
    (A4, 2, 0x0000_0000_4000_0703, "table 0x40000000"),
    (A4, 2, 0x07f8_0000_8765_4fff, "table 0x87654000"),
    (A4, 1, 0x0000_0000_0000_1003, "table 0x1000"),
    (A4, 0, 0x0000_ffff_ffff_f003, "table 0xfffffffff000"),
    (A4, 2, 0x0004_0000_8765_4003, RES0_TABLE),
    (A4, 2, 0x0001_0000_8765_4003, RES0_TABLE),
    (A4, 1, 0x0002_0000_8765_4003, RES0_TABLE),
    // PXNTable (59), UXNTable (60), APTable[0] (61), APTable[1] (62).
    (A4, 2, 0x0800_0000_4000_0003, "table 0x40000000 --x/---"),
    (A4, 1, 0x1000_0000_4000_0003, "table 0x40000000 ---/--x"),
    (A4, 0, 0x2000_0000_4000_0003, "table 0x40000000 ---/rw-"),
    (A4, 0, 0x4000_0000_4000_0003, "table 0x40000000 -w-/-w-"),
    (A4, 1, 0x6000_0000_4000_0003, "table 0x40000000 -w-/rw-"),
    (A4, 2, 0x7800_0000_4000_0003, "table 0x40000000 -wx/rwx"),

    // 4 KiB, LPA2: address bits 49:48 in place, 51:50 in bits 9:8, no SH.
    (A4W, 3, 0x0063_1234_5678_9703, "0xf123456789000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0060_0000_4000_0503, "0x4000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0060_0000_4000_0603, "0x8000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0061_0000_4000_0403, "0x1000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0002_0000_4000_0403, "0x2000040000000 4K rwx/--x G m0 s- A - sw0 k0"),
    (A4W, 3, 0x05ec_0000_4000_08d7, "0x40000000 4K r--/r-- n m5 s- - dbm+ro swb k0 gp"),
    (A4W, 3, 0x0070_0000_4000_0403, "0x40000000 4Kx16 rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0060_0000_4000_0401, NO_BLOCK),
    (A4W, 3, 0x0060_0000_4000_0402, "invalid"),
    (A4W, 2, 0x0060_0000_8020_0701, "0xc000080200000 2M rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 2, 0x0060_0000_8020_8401, RES0_LEAF),
    (A4W, 1, 0x0062_0000_4000_0601, "0xa000040000000 1G rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 1, 0x0070_0004_0000_0401, "0x400000000 1Gx16 rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0061_0080_0000_0501, "0x5008000000000 512G rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0060_0080_0001_0401, "0x8000000000 512G rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0000_0080_0000_0701, "0xc008000000000 512G rwx/--x G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0060_00c0_0000_0401, RES0_LEAF),
    (A4W, 0, 0x0070_0080_0000_0401, RES0_CONT),
    (A4W, -1, 0x0060_0000_0000_0401, NO_BLOCK),
    (A4W, -1, 0x0002_0000_0000_1203, "table 0xa000000001000"),
    (A4W, 0, 0x2000_0000_8765_4003, "table 0x87654000 ---/rw-"),
    (A4W, 1, 0x1000_0000_8765_4203, "table 0x8000087654000 ---/--x"),
    (A4W, 2, 0x0003_0000_8765_4103, "table 0x7000087654000"),
    (A4W, 2, 0x0800_0000_8765_4cff, "table 0x87654000 --x/---"),
    (A4W, -1, 0x4000_0000_8765_4303, "table 0xc000087654000 -w-/-w-"),
    (A4W, 2, 0x0004_0000_8765_4003, RES0_TABLE),

    // 16 KiB, 48 bits: bits 13:12 are no address.
    (A16, 3, 0x0060_0000_4000_4703, "0x40004000 16K rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 3, 0x0020_ffff_ffff_cfcf, "0xffffffffc000 16K r--/r-x n m3 s3 A ro sw0 k0"),
    (A16, 3, 0x0070_0000_4020_0703, "0x40200000 16Kx128 rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 3, 0x0060_0000_4000_2703, RES0_LEAF),
    (A16, 3, 0x0060_0000_4000_1703, RES0_LEAF),
    (A16, 3, 0x0060_0000_4000_4701, NO_BLOCK),
    (A16, 3, 0x0060_0000_4000_4702, "invalid"),
    (A16, 2, 0x0060_0000_4200_0701, "0x42000000 32M rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0000_0000_0600_0701, "0x6000000 32M rwx/--x G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0060_0000_4201_0701, "0x42000000 32M rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0070_0000_4000_0701, "0x40000000 32Mx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0060_0000_4300_0701, RES0_LEAF),
    (A16, 1, 0x0060_0010_0000_0701, NO_BLOCK),
    (A16, 0, 0x0060_8000_0000_0701, NO_BLOCK),
    (A16, 0, 0x0000_0000_0001_c003, "table 0x1c000"),
    (A16, 0, 0x4000_ffff_ffff_c003, "table 0xffffffffc000 -w-/-w-"),
    (A16, 1, 0x2000_0000_0001_4003, "table 0x14000 ---/rw-"),
    (A16, 2, 0x1000_0000_0001_8003, "table 0x18000 ---/--x"),
    (A16, 1, 0x0800_0000_0001_c003, "table 0x1c000 --x/---"),
    (A16, 0, 0x0000_0000_0001_d003, RES0_TABLE),
    (A16, 2, 0x0000_0000_0001_e003, RES0_TABLE),
    // 16 KiB, LPA2.
    (A16W, 3, 0x0063_0000_4000_4703, "0xf000040004000 16K rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 3, 0x0000_0000_8000_0603, "0x8000080000000 16K rwx/--x G m0 s- A - sw0 k0"),
    (A16W, 3, 0x0060_0000_4000_5403, RES0_LEAF),
    (A16W, 3, 0x0060_0000_4000_4402, "invalid"),
    (A16W, 2, 0x0062_0000_4200_0501, "0x6000042000000 32M rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 2, 0x0070_0000_4000_0701, "0xc000040000000 32Mx32 rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 1, 0x0061_0010_0000_0501, "0x5001000000000 64G rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 1, 0x0000_0010_0000_0401, "0x1000000000 64G rwx/--x G m0 s- A - sw0 k0"),
    (A16W, 1, 0x0060_0018_0000_0401, RES0_LEAF),
    (A16W, 1, 0x0070_0010_0000_0401, RES0_CONT),
    (A16W, 0, 0x0060_8000_0000_0401, NO_BLOCK),
    (A16W, 0, 0x0001_0000_0001_c303, "table 0xd00000001c000"),
    (A16W, 0, 0x1000_0000_0001_4003, "table 0x14000 ---/--x"),
    (A16W, 1, 0x4002_0000_0001_4003, "table 0x2000000014000 -w-/-w-"),
    (A16W, 1, 0x2000_0000_0001_4103, "table 0x4000000014000 ---/rw-"),
    (A16W, 2, 0x0800_0000_0001_4203, "table 0x8000000014000 --x/---"),
    (A16W, 0, 0x0001_0000_0001_d303, RES0_TABLE),

    // 64 KiB, 48 bits: bits 15:12 are no address.
    (A64, 3, 0x0060_0000_4001_0703, "0x40010000 64K rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 3, 0x0000_ffff_ffff_0703, "0xffffffff0000 64K rwx/--x G m0 s3 A - sw0 k0"),
    (A64, 3, 0x0000_0000_8000_0707, "0x80000000 64K rwx/--x G m1 s3 A - sw0 k0"),
    (A64, 3, 0x0000_0000_8000_070b, "0x80000000 64K rwx/--x G m2 s3 A - sw0 k0"),
    (A64, 3, 0x0000_0000_8000_070f, "0x80000000 64K rwx/--x G m3 s3 A - sw0 k0"),
    (A64, 3, 0x0000_0000_8000_0713, "0x80000000 64K rwx/--x G m4 s3 A - sw0 k0"),
    (A64, 3, 0x0000_0000_8000_0717, "0x80000000 64K rwx/--x G m5 s3 A - sw0 k0"),
    (A64, 3, 0x0070_0000_4020_0703, "0x40200000 64Kx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 3, 0x0060_0000_4001_8703, RES0_LEAF),
    (A64, 3, 0x0060_0000_4001_1703, RES0_LEAF),
    (A64, 3, 0x0060_0000_4001_0702, "invalid"),
    (A64, 2, 0x0060_0000_6000_0701, "0x60000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0060_0000_6001_0701, "0x60000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0070_0004_0000_0701, "0x400000000 512Mx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0060_0000_7000_0701, RES0_LEAF),
    (A64, 1, 0x0060_0400_0000_0701, NO_BLOCK),
    (A64, 1, 0x0000_0000_0003_0003, "table 0x30000"),
    (A64, 1, 0x1000_ffff_ffff_0003, "table 0xffffffff0000 ---/--x"),
    (A64, 2, 0x0800_0000_0003_0003, "table 0x30000 --x/---"),
    (A64, 2, 0x4000_0000_0003_0003, "table 0x30000 -w-/-w-"),
    (A64, 2, 0x2000_0000_0003_0003, "table 0x30000 ---/rw-"),
    (A64, 1, 0x0000_0000_0003_4003, RES0_TABLE),
    // 64 KiB, LPA: address bits 51:48 in bits 15:12, SH in its place.
    (A64W, 3, 0x0060_1234_5678_a703, "0xa123456780000 64K rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 3, 0x0060_1234_5678_5603, "0x5123456780000 64K rw-/--- G m0 s2 A - sw0 k0"),
    (A64W, 3, 0x0062_0000_4001_0703, RES0_LEAF),
    (A64W, 3, 0x0060_0000_4001_0503, SH_01),
    (A64W, 3, 0x0060_0000_4001_0702, "invalid"),
    (A64W, 2, 0x0060_0000_6000_1701, "0x1000060000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 2, 0x0060_0000_6001_8701, "0x8000060000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 2, 0x0060_0000_6002_0701, RES0_LEAF),
    (A64W, 1, 0x0060_0400_0000_f701, "0xf040000000000 4T rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 1, 0x0000_0400_0000_1701, "0x1040000000000 4T rwx/--x G m0 s3 A - sw0 k0"),
    (A64W, 1, 0x0060_0600_0000_0701, RES0_LEAF),
    (A64W, 1, 0x0070_0400_0000_0701, RES0_CONT),
    (A64W, 1, 0x0000_0000_0003_c003, "table 0xc000000030000"),
    (A64W, 1, 0x2000_0000_0003_4003, "table 0x4000000030000 ---/rw-"),
    (A64W, 2, 0x1000_0000_8000_2003, "table 0x2000080000000 ---/--x"),
    (A64W, 2, 0x0800_0000_0003_8003, "table 0x8000000030000 --x/---"),
    (A64W, 1, 0x4000_0000_0003_1003, "table 0x1000000030000 -w-/-w-"),
    (A64W, 1, 0x0001_0000_0003_0003, RES0_TABLE),

    // x86-64, 4 KiB pages. Permissions: XD (63), U/S (2), R/W (1).
    (X4, 1, 0x0000_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0003, "0x400000 4K rwx/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0005, "0x400000 4K r-x/r-x n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0007, "0x400000 4K rwx/rwx n m0 s- - - sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0001, "0x400000 4K r--/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0003, "0x400000 4K rw-/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0005, "0x400000 4K r--/r-- n m0 s- - - sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0007, "0x400000 4K rw-/rw- n m0 s- - - sw0 k0"),
    // A (5), D (6), G (8); PWT (3), PCD (4), PAT (7).
    (X4, 1, 0x0000_0000_0040_0063, "0x400000 4K rwx/--- n m0 s- A D sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0023, "0x400000 4K rwx/--- n m0 s- A - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0043, "0x400000 4K rwx/--- n m0 s- - D sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0061, "0x400000 4K r-x/--- n m0 s- A D sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0107, "0x400000 4K rw-/rw- G m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_000b, "0x400000 4K rwx/--- n m1 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0013, "0x400000 4K rwx/--- n m2 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_001b, "0x400000 4K rwx/--- n m3 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0083, "0x400000 4K rwx/--- n m4 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0093, "0x400000 4K rwx/--- n m6 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_009b, "0x400000 4K rwx/--- n m7 s- - - sw0 k0"),
    // The address (51:12), software (11:9 and 58:52), the protection key (62:59).
    (X4, 1, 0x0000_0000_0000_1001, "0x1000 4K r-x/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x000f_ffff_ffff_f003, "0xffffffffff000 4K rwx/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0e01, "0x400000 4K r-x/--- n m0 s- - - sw7 k0"),
    (X4, 1, 0x0000_0000_0040_0201, "0x400000 4K r-x/--- n m0 s- - - sw1 k0"),
    (X4, 1, 0x0000_0000_0040_0a01, "0x400000 4K r-x/--- n m0 s- - - sw5 k0"),
    (X4, 1, 0x07f0_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw3f8 k0"),
    (X4, 1, 0x0010_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw8 k0"),
    (X4, 1, 0x7800_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 kf"),
    (X4, 1, 0x0800_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 k1"),
    (X4, 1, 0x2800_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 k5"),
    (X4, 1, 0x8000_0000_0040_0062, "invalid"),
    (X4, 1, 0, "invalid"),
    (X4, 3, 0x0000_0000_4000_00e2, "invalid"),
    (X4, 4, 0xffff_ffff_ffff_fffe, "invalid"),
    // Large pages: PAT in bit 12, nothing in the bits from 13 up to the address.
    (X4, 2, 0x0000_0000_4020_00e3, "0x40200000 2M rwx/--- n m0 s- A D sw0 k0"),
    (X4, 2, 0x0000_0000_4020_1083, "0x40200000 2M rwx/--- n m4 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_009b, "0x40200000 2M rwx/--- n m3 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_109b, "0x40200000 2M rwx/--- n m7 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_0183, "0x40200000 2M rwx/--- G m0 s- - - sw0 k0"),
    (X4, 2, 0x000f_ffff_ffe0_0083, "0xfffffffe00000 2M rwx/--- n m0 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_2083, LARGE),
    (X4, 2, 0x0000_0000_4030_0083, LARGE),
    (X4, 3, 0x0000_0001_4000_0083, "0x140000000 1G rwx/--- n m0 s- - - sw0 k0"),
    (X4, 3, 0x8000_0001_4000_01e3, "0x140000000 1G rw-/--- G m0 s- A D sw0 k0"),
    (X4, 3, 0x8000_0000_4000_108f, "0x40000000 1G rw-/rw- n m5 s- - - sw0 k0"),
    (X4, 3, 0x0000_0000_4000_109b, "0x40000000 1G rwx/--- n m7 s- - - sw0 k0"),
    (X4, 3, 0x0000_0001_6000_0083, LARGE),
    (X4, 3, 0x0000_0000_4020_0083, LARGE),
    (X4, 3, 0x000f_ffff_c000_0083, "0xfffffc0000000 1G rwx/--- n m0 s- - - sw0 k0"),
    (X4, 4, 0x0000_0000_0001_0083, PS),
    // Tables: D, G, and bits 62:52 of a table entry are ignored, PWT and PCD concern the table, 51:12 is address.
    (X4, 4, 0x0000_0000_0001_0167, "table 0x10000"),
    (X4, 4, 0x7ff0_0000_0001_001f, "table 0x10000"),
    (X4, 3, 0x0000_0000_0001_1027, "table 0x11000"),
    (X4, 2, 0x000f_ffff_ffff_f027, "table 0xffffffffff000"),
    (X4, 2, 0x0000_0000_0001_0e07, "table 0x10000"),
    // R/W and U/S that a table lacks, XD that it has.
    (X4, 4, 0x0000_0000_4000_0005, "table 0x40000000 -w-/-w-"),
    (X4, 3, 0x0000_0000_4000_0003, "table 0x40000000 ---/rwx"),
    (X4, 2, 0x8000_0000_4000_0007, "table 0x40000000 --x/--x"),
    (X4, 3, 0x8000_0000_4000_0001, "table 0x40000000 -wx/rwx"),
    // 5 levels.
    (X5, 5, 0x0000_0012_3456_7027, "table 0x1234567000"),
    (X5, 5, 0x8000_0000_4000_0007, "table 0x40000000 --x/--x"),
    (X5, 4, 0x0000_0000_4000_0005, "table 0x40000000 -w-/-w-"),
    (X5, 3, 0x0000_0000_4000_0003, "table 0x40000000 ---/rwx"),
    (X5, 2, 0x000f_ffff_ffff_f007, "table 0xffffffffff000"),
    (X5, 5, 0x0000_0000_0001_0083, PS),
    (X5, 4, 0x0000_0000_0001_0083, PS),
    (X5, 3, 0x8000_0000_4000_01e5, "0x40000000 1G r--/r-- G m0 s- A D sw0 k0"),
    (X5, 2, 0x0000_0000_4020_1083, "0x40200000 2M rwx/--- n m4 s- - - sw0 k0"),
    (X5, 2, 0x0000_0000_4021_0083, LARGE),
    (X5, 1, 0x0000_0000_0040_0063, "0x400000 4K rwx/--- n m0 s- A D sw0 k0"),
    (X5, 1, 0x2a00_0000_0040_0a8d, "0x400000 4K r-x/r-x n m5 s- - - sw105 k5"),
    (X5, 1, 0x0000_0000_0040_0062, "invalid"),

    // EL2 by itself, 4 KiB, 48 bits: XN (54), AP[2] (7); AP[1] (6) is one, PXN (53) and nG (11) are zero.
    (H4, 3, 0x0000_0000_4000_0743, "0x40000000 4K rwx/--- G m0 s3 A - sw0 k0"),
    (H4, 3, 0x0000_0000_4000_07c3, "0x40000000 4K r-x/--- G m0 s3 A ro sw0 k0"),
    (H4, 3, 0x0040_0000_4000_0743, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (H4, 3, 0x0040_0000_4000_07c3, "0x40000000 4K r--/--- G m0 s3 A ro sw0 k0"),
    (H4, 3, 0x0040_0000_4000_0703, ONE_EL),
    (H4, 3, 0x0060_0000_4000_0743, NO_EL0),
    (H4, 3, 0x0040_0000_4000_0f43, NO_EL0),
    (H4, 3, 0x0048_0000_4000_07c3, "0x40000000 4K r--/--- G m0 s3 A dbm+ro sw0 k0"),
    (H4, 3, 0x07c0_0000_4000_0347, "0x40000000 4K rw-/--- G m1 s3 - - swf k0"),
    (H4, 3, 0x7840_0000_4000_0743, "0x40000000 4K rw-/--- G m0 s3 A - sw0 kf"),
    (H4, 3, 0x0044_0000_4000_0763, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0 gp ns"),
    (H4, 3, 0x0050_0000_4000_0743, "0x40000000 4Kx16 rw-/--- G m0 s3 A - sw0 k0"),
    (H4, 3, 0x0040_0000_4000_0543, SH_01),
    (H4, 3, 0x0040_0000_4000_0741, NO_BLOCK),
    (H4, 3, 0x0040_0000_4000_0742, "invalid"),
    (H4, 2, 0x0000_0000_8020_0741, "0x80200000 2M rwx/--- G m0 s3 A - sw0 k0"),
    (H4, 1, 0x0050_0004_0000_0741, "0x400000000 1Gx16 rw-/--- G m0 s3 A - sw0 k0"),
    (H4, 1, 0x0040_0001_6000_0741, RES0_LEAF),
    (H4, 0, 0x0040_0080_0000_0741, NO_BLOCK),
    // XNTable (60), APTable[1] (62); PXNTable (59) and APTable[0] (61) are zero; 58:51 and 11:2 are ignored.
    (H4, 2, 0x0000_0000_8765_4003, "table 0x87654000"),
    (H4, 2, 0x07f8_0000_8765_4fff, "table 0x87654000"),
    (H4, 2, 0x1000_0000_8765_4003, "table 0x87654000 --x/---"),
    (H4, 1, 0x4000_0000_8765_4003, "table 0x87654000 -w-/---"),
    (H4, 0, 0x5000_ffff_ffff_f003, "table 0xfffffffff000 -wx/---"),
    (H4, 2, 0x0800_0000_8765_4003, RES0_TABLE),
    (H4, 2, 0x2000_0000_8765_4003, RES0_TABLE),
    (H4, 1, 0x0004_0000_8765_4003, RES0_TABLE),

    // The same, 16 KiB, LPA2: address bits 51:50 in bits 9:8, no SH.
    (H16W, 3, 0x0040_0000_4000_4443, "0x40004000 16K rw-/--- G m0 s- A - sw0 k0"),
    (H16W, 3, 0x0000_0000_4000_4543, "0x4000040004000 16K rwx/--- G m0 s- A - sw0 k0"),
    (H16W, 3, 0x0050_0000_4020_0443, "0x40200000 16Kx128 rw-/--- G m0 s- A - sw0 k0"),
    (H16W, 3, 0x0040_0000_4000_4403, ONE_EL),
    (H16W, 3, 0x0040_0000_4000_5443, RES0_LEAF),
    (H16W, 3, 0x0040_0000_4000_4442, "invalid"),
    (H16W, 2, 0x0040_0000_4200_0441, "0x42000000 32M rw-/--- G m0 s- A - sw0 k0"),
    (H16W, 1, 0x0000_0010_0000_04c1, "0x1000000000 64G r-x/--- G m0 s- A ro sw0 k0"),
    (H16W, 1, 0x0010_0010_0000_0441, RES0_CONT),
    (H16W, 0, 0x0000_0000_0000_4003, "table 0x4000"),
    (H16W, 1, 0x1000_0000_0000_4103, "table 0x4000000004000 --x/---"),
    (H16W, 2, 0x4000_0000_0000_4003, "table 0x4000 -w-/---"),
    (H16W, 2, 0x0800_0000_0000_4003, RES0_TABLE),

    // The same, 64 KiB, 42 bits: from level 2.
    (H64, 3, 0x0040_0000_4001_0743, "0x40010000 64K rw-/--- G m0 s3 A - sw0 k0"),
    (H64, 3, 0x0050_0000_4020_0743, "0x40200000 64Kx32 rw-/--- G m0 s3 A - sw0 k0"),
    (H64, 3, 0x0040_0000_4001_1743, RES0_LEAF),
    (H64, 3, 0x0060_0000_4001_0743, NO_EL0),
    (H64, 3, 0, "invalid"),
    (H64, 2, 0x0040_0000_2000_0741, "0x20000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (H64, 2, 0x0010_0004_0000_0741, "0x400000000 512Mx32 rwx/--- G m0 s3 A - sw0 k0"),
    (H64, 2, 0x0000_0000_0001_0003, "table 0x10000"),
    (H64, 2, 0x1000_0000_0001_0003, "table 0x10000 --x/---"),
    (H64, 2, 0x4000_0000_0001_0003, "table 0x10000 -w-/---"),
    (H64, 2, 0x0000_0000_0001_1003, RES0_TABLE),

    // Where the first table has fewer entries than a run, there are no runs in it.
    (P4, 1, 0x0060_0001_4000_0701, "0x140000000 1G rw-/--- G m0 s3 A - sw0 k0"),
    (P4, 1, 0x0070_0004_0000_0701, RES0_CONT),
    (P4, 2, 0x0070_0000_8200_0701, "0x82000000 2Mx16 rw-/--- G m0 s3 A - sw0 k0"),

    // arm64 stage 2, 4 KiB, 48 bits. Permissions of a page: XN (54:53), S2AP (7:6).
    (S4, 3, 0x0000_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0020_0000_4000_07ff, "0x40000000 4K rw-/rwx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0040_0000_4000_07ff, "0x40000000 4K rw-/rw- n mf s3 A - sw0 k0"),
    (S4, 3, 0x0060_0000_4000_07ff, "0x40000000 4K rwx/rw- n mf s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_077f, "0x40000000 4K r-x/r-x n mf s3 A ro sw0 k0"),
    (S4, 3, 0x0020_0000_4000_077f, "0x40000000 4K r--/r-x n mf s3 A ro sw0 k0"),
    (S4, 3, 0x0040_0000_4000_077f, "0x40000000 4K r--/r-- n mf s3 A ro sw0 k0"),
    (S4, 3, 0x0060_0000_4000_077f, "0x40000000 4K r-x/r-- n mf s3 A ro sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07bf, "0x40000000 4K -wx/-wx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0040_0000_4000_07bf, "0x40000000 4K -w-/-w- n mf s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_073f, "0x40000000 4K --x/--x n mf s3 A ro sw0 k0"),
    (S4, 3, 0x0040_0000_4000_073f, "0x40000000 4K ---/--- n mf s3 A ro sw0 k0"),
    // AF (10), SH (9:8), MemAttr (5:2): outer and inner, or a device.
    (S4, 3, 0x0000_0000_4000_03ff, "0x40000000 4K rwx/rwx n mf s3 - - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_06ff, "0x40000000 4K rwx/rwx n mf s2 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_04ff, "0x40000000 4K rwx/rwx n mf s0 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_05ff, SH_01),
    (S4, 3, 0x0000_0000_4000_07c3, "0x40000000 4K rwx/rwx n m0 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07c7, "0x40000000 4K rwx/rwx n m1 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07cb, "0x40000000 4K rwx/rwx n m2 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07cf, "0x40000000 4K rwx/rwx n m3 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07d3, TYPE),
    (S4, 3, 0x0000_0000_4000_07d7, "0x40000000 4K rwx/rwx n m5 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07db, "0x40000000 4K rwx/rwx n m6 s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07e3, TYPE),
    (S4, 3, 0x0000_0000_4000_07eb, "0x40000000 4K rwx/rwx n ma s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_07f3, TYPE),
    (S4, 3, 0x0000_0000_4000_07f7, "0x40000000 4K rwx/rwx n md s3 A - sw0 k0"),
    // DBM (51), software (58:55), PBHA (62:59), bit 63, FnXS (11).
    (S4, 3, 0x0008_0000_4000_077f, "0x40000000 4K r-x/r-x n mf s3 A dbm+ro sw0 k0"),
    (S4, 3, 0x0008_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A dbm sw0 k0"),
    (S4, 3, 0x0080_0000_4000_077f, "0x40000000 4K r-x/r-x n mf s3 A ro sw1 k0"),
    (S4, 3, 0x0500_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - swa k0"),
    (S4, 3, 0x0780_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - swf k0"),
    (S4, 3, 0x7800_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - sw0 kf"),
    (S4, 3, 0x1000_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - sw0 k2"),
    (S4, 3, 0x8000_0000_4000_07ff, "0x40000000 4K rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0000_0000_4000_0fff, "0x40000000 4K rwx/rwx n mf s3 A - sw0 k0 xs"),
    // The address, the Contiguous bit (52), what is no page.
    (S4, 3, 0x0000_ffff_ffff_f7ff, "0xfffffffff000 4K rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0010_0000_4000_07ff, "0x40000000 4Kx16 rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 3, 0x0001_0000_4000_07ff, RES0_LEAF),
    (S4, 3, 0x0002_0000_4000_07ff, RES0_LEAF),
    (S4, 3, 0x0004_0000_4000_07ff, RES0_LEAF),
    (S4, 3, 0x0000_0000_4000_07fd, NO_BLOCK),
    (S4, 3, 0x0000_0000_4000_07fe, "invalid"),
    (S4, 3, 0xffff_ffff_ffff_fffe, "invalid"),
    (S4, 3, 0, "invalid"),
    (S4, 2, 0x0000_0000_8020_07fd, "0x80200000 2M rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 2, 0x0000_0000_8021_07fd, "0x80200000 2M rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 2, 0x0010_0000_8200_07fd, "0x82000000 2Mx16 rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 2, 0x0000_0000_8020_17fd, RES0_LEAF),
    (S4, 2, 0x0000_0000_8022_07fd, RES0_LEAF),
    (S4, 2, 0x0004_0000_8020_07fd, RES0_LEAF),
    (S4, 1, 0x0000_0001_4000_07fd, "0x140000000 1G rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 1, 0x0010_0004_0000_07fd, "0x400000000 1Gx16 rwx/rwx n mf s3 A - sw0 k0"),
    (S4, 1, 0x0000_0001_6000_07fd, RES0_LEAF),
    (S4, 1, 0x0000_0000_4000_0702, "invalid"),
    // Tables: nothing is restricted; 63:59 and 50:48 are reserved, 58:51 and 11:2 ignored.
    (S4, 1, 0x0000_0000_8765_4003, "table 0x87654000"),
    (S4, 2, 0x07f8_0000_8765_4fff, "table 0x87654000"),
    (S4, 2, 0x0000_ffff_ffff_f003, "table 0xfffffffff000"),
    (S4, 2, 0x0001_0000_8765_4003, RES0_TABLE),
    (S4, 2, 0x0004_0000_8765_4003, RES0_TABLE),
    (S4, 2, 0x0800_0000_8765_4003, RES0_TABLE),
    (S4, 2, 0x1000_0000_8765_4003, RES0_TABLE),
    (S4, 1, 0x2000_0000_8765_4003, RES0_TABLE),
    (S4, 1, 0x4000_0000_8765_4003, RES0_TABLE),
    (S4, 1, 0x8000_0000_8765_4003, RES0_TABLE),

    // 4 KiB, 48 bits of input, forced write-back: another meaning of MemAttr.
    (S4F, 3, 0x0000_0000_4000_07db, "0x40000000 4K rwx/rwx n m6 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07df, "0x40000000 4K rwx/rwx n m7 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07d7, "0x40000000 4K rwx/rwx n m5 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07c3, "0x40000000 4K rwx/rwx n m0 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07c7, "0x40000000 4K rwx/rwx n m1 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07cf, "0x40000000 4K rwx/rwx n m3 s3 A - sw0 k0"),
    (S4F, 3, 0x0000_0000_4000_07d3, TYPE),
    (S4F, 3, 0x0000_0000_4000_07e3, TYPE),
    (S4F, 3, 0x0000_0000_4000_07eb, TYPE),
    (S4F, 3, 0x0000_0000_4000_07fb, TYPE),
    (S4F, 3, 0x0000_0000_4000_07ff, TYPE),
    (S4F, 3, 0x0048_0000_4000_035b, "0x40000000 4K r--/r-- n m6 s3 - dbm+ro sw0 k0"),
    (S4F, 3, 0, "invalid"),
    (S4F, 2, 0x0000_0000_8020_07d9, "0x80200000 2M rwx/rwx n m6 s3 A - sw0 k0"),
    (S4F, 1, 0x0000_0001_4000_07d9, "0x140000000 1G rwx/rwx n m6 s3 A - sw0 k0"),
    (S4F, 0, 0x0000_0080_0000_07d9, NO_BLOCK),
    (S4F, 0, 0x0000_ffff_ffff_f003, "table 0xfffffffff000"),
    (S4F, 1, 0x0000_0000_0000_1003, "table 0x1000"),
    (S4F, 2, 0x0000_0000_0000_2003, "table 0x2000"),

    // 4 KiB, LPA2: address bits 49:48 in place, 51:50 in bits 9:8, no SH.
    (S4W, 3, 0x0003_1234_5678_97ff, "0xf123456789000 4K rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 3, 0x0000_0000_4000_04ff, "0x40000000 4K rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 3, 0x0000_0000_4000_05ff, "0x4000040000000 4K rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 3, 0x0004_0000_4000_04ff, RES0_LEAF),
    (S4W, 3, 0x0000_0000_4000_04fe, "invalid"),
    (S4W, 2, 0x0000_0000_8020_07fd, "0xc000080200000 2M rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 1, 0x0002_0000_4000_06fd, "0xa000040000000 1G rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 0, 0x0001_0080_0000_05fd, "0x5008000000000 512G rwx/rwx n mf s- A - sw0 k0"),
    (S4W, 0, 0x0010_0080_0000_04fd, RES0_CONT),
    (S4W, 0, 0x0002_0000_0000_1203, "table 0xa000000001000"),
    (S4W, 1, 0x0000_0000_8765_4303, "table 0xc000087654000"),
    (S4W, 2, 0x0000_0000_8765_4003, "table 0x87654000"),
    (S4W, 2, 0x0004_0000_8765_4003, RES0_TABLE),
    (S4W, 0, 0x0800_0000_8765_4003, RES0_TABLE),

    // 16 KiB, 40 bits of input.
    (S16, 3, 0x0000_0000_4000_47ff, "0x40004000 16K rwx/rwx n mf s3 A - sw0 k0"),
    (S16, 3, 0x0010_0000_0020_07ff, "0x200000 16Kx128 rwx/rwx n mf s3 A - sw0 k0"),
    (S16, 3, 0x0000_0000_4000_57ff, RES0_LEAF),
    (S16, 3, 0, "invalid"),
    (S16, 2, 0x0000_0000_4200_07fd, "0x42000000 32M rwx/rwx n mf s3 A - sw0 k0"),
    (S16, 2, 0x0010_0000_4000_07fd, "0x40000000 32Mx32 rwx/rwx n mf s3 A - sw0 k0"),
    (S16, 2, 0x0000_0000_4201_07fd, "0x42000000 32M rwx/rwx n mf s3 A - sw0 k0"),
    (S16, 2, 0x0000_0000_4300_07fd, RES0_LEAF),
    (S16, 2, 0x0000_0000_8000_4003, "table 0x80004000"),
    (S16, 2, 0x0000_0000_8000_5003, RES0_TABLE),

    // 16 KiB, LPA2, forced write-back.
    (S16W, 3, 0x0003_0000_4000_47db, "0xf000040004000 16K rwx/rwx n m6 s- A - sw0 k0"),
    (S16W, 3, 0x0000_0000_4000_44ff, TYPE),
    (S16W, 3, 0, "invalid"),
    (S16W, 2, 0x0000_0000_4200_04d9, "0x42000000 32M rwx/rwx n m6 s- A - sw0 k0"),
    (S16W, 1, 0x0000_0010_0000_04d9, "0x1000000000 64G rwx/rwx n m6 s- A - sw0 k0"),
    (S16W, 1, 0x0010_0010_0000_04d9, RES0_CONT),
    (S16W, 0, 0x0000_8000_0000_04d9, NO_BLOCK),
    (S16W, 0, 0x0001_0000_0000_4103, "table 0x5000000004000"),
    (S16W, 1, 0x0000_0000_8000_4003, "table 0x80004000"),
    (S16W, 2, 0x0000_0000_8000_4003, "table 0x80004000"),

    // 64 KiB, 33 bits of input, forced write-back: a run of blocks would be larger than that.
    (S64, 3, 0x0000_0000_4001_07db, "0x40010000 64K rwx/rwx n m6 s3 A - sw0 k0"),
    (S64, 3, 0x0010_0000_0020_07db, "0x200000 64Kx32 rwx/rwx n m6 s3 A - sw0 k0"),
    (S64, 3, 0x0000_0000_4001_17db, RES0_LEAF),
    (S64, 3, 0, "invalid"),
    (S64, 2, 0x0000_0000_6000_07d9, "0x60000000 512M rwx/rwx n m6 s3 A - sw0 k0"),
    (S64, 2, 0x0010_0004_0000_07d9, RES0_CONT),
    (S64, 2, 0x0000_0000_8003_0003, "table 0x80030000"),
    (S64, 2, 0x0000_0000_8003_1003, RES0_TABLE),

    // 64 KiB, LPA: address bits 51:48 in bits 15:12.
    (S64W, 3, 0x0000_0000_4001_f7ff, "0xf000040010000 64K rwx/rwx n mf s3 A - sw0 k0"),
    (S64W, 3, 0x0001_0000_4001_07ff, RES0_LEAF),
    (S64W, 3, 0, "invalid"),
    (S64W, 2, 0x0000_0000_2000_37fd, "0x3000020000000 512M rwx/rwx n mf s3 A - sw0 k0"),
    (S64W, 2, 0x0010_0004_0000_17fd, "0x1000400000000 512Mx32 rwx/rwx n mf s3 A - sw0 k0"),
    (S64W, 1, 0x0000_0400_0000_87fd, "0x8040000000000 4T rwx/rwx n mf s3 A - sw0 k0"),
    (S64W, 1, 0x0010_0400_0000_07fd, RES0_CONT),
    (S64W, 1, 0x0000_0000_0003_c003, "table 0xc000000030000"),
    (S64W, 2, 0x0000_0000_8000_2003, "table 0x2000080000000"),

    // EPT, 4 levels. R (0), W (1), X (2); without mode-based control bit 10 is ignored.
    (E4, 1, 0x0000_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0035, "0x400000 4K r-x/r-x n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0033, "0x400000 4K rw-/rw- n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0031, "0x400000 4K r--/r-- n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0034, "0x400000 4K --x/--x n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0032, W_NOT_R),
    (E4, 1, 0x0000_0000_0040_0036, W_NOT_R),
    (E4, 1, 0x0000_0000_0040_0431, "0x400000 4K r--/r-- n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0430, "invalid"),
    // A (8), D (9); the memory type (5:3), ignore PAT (6); bit 7, ignored in a page.
    (E4, 1, 0x0000_0000_0040_0137, "0x400000 4K rwx/rwx n m6 s- A - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0237, "0x400000 4K rwx/rwx n m6 s- - D sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0337, "0x400000 4K rwx/rwx n m6 s- A D sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0007, "0x400000 4K rwx/rwx n m0 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_000f, "0x400000 4K rwx/rwx n m1 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_0017, TYPE),
    (E4, 1, 0x0000_0000_0040_001f, TYPE),
    (E4, 1, 0x0000_0000_0040_0027, "0x400000 4K rwx/rwx n m4 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_002f, "0x400000 4K rwx/rwx n m5 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0040_003f, TYPE),
    (E4, 1, 0x0000_0000_0040_0077, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0 ipat"),
    (E4, 1, 0x0000_0000_0040_00b7, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0"),
    // Ignored (11, 56:52, 59, 62), features of a leaf (57, 58, 60, 61), suppress #VE (63).
    (E4, 1, 0x0000_0000_0040_0837, "0x400000 4K rwx/rwx n m6 s- - - sw1 k0"),
    (E4, 1, 0x0010_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw2 k0"),
    (E4, 1, 0x0040_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw8 k0"),
    (E4, 1, 0x01f0_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw3e k0"),
    (E4, 1, 0x0600_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0"),
    (E4, 1, 0x0800_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 k1"),
    (E4, 1, 0x1000_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 k2"),
    (E4, 1, 0x6000_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 kc"),
    (E4, 1, 0x8000_0000_0040_0037, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0 sve"),
    (E4, 1, 0x000f_ffff_ffff_f037, "0xffffffffff000 4K rwx/rwx n m6 s- - - sw0 k0"),
    (E4, 1, 0x0000_0000_0000_1031, "0x1000 4K r--/r-- n m6 s- - - sw0 k0"),
    (E4, 1, 0, "invalid"),
    (E4, 1, 0x8000_0000_0000_0000, "invalid"),
    (E4, 4, 0xffff_ffff_ffff_fff8, "invalid"),
    (E4, 2, 0x0000_0000_4020_00b7, "0x40200000 2M rwx/rwx n m6 s- - - sw0 k0"),
    (E4, 2, 0x0000_0000_4020_03b1, "0x40200000 2M r--/r-- n m6 s- A D sw0 k0"),
    (E4, 2, 0x0000_0000_4020_10b7, LARGE),
    (E4, 2, 0x0000_0000_4030_00b7, LARGE),
    (E4, 2, 0x0000_0000_4020_0097, TYPE),
    (E4, 2, 0x0000_0000_4020_00b6, W_NOT_R),
    (E4, 3, 0x0000_0001_4000_00b7, "0x140000000 1G rwx/rwx n m6 s- - - sw0 k0"),
    (E4, 3, 0x0000_0001_6000_00b7, LARGE),
    (E4, 4, 0x0000_0000_0001_0087, EPT_TABLE),
    // Tables: 6:3 are reserved, 7 at level 4 too; 62:52, 63 and 11:9 ignored.
    (E4, 4, 0x0000_0000_0001_0007, "table 0x10000"),
    (E4, 3, 0x0000_0000_0001_0107, "table 0x10000"),
    (E4, 2, 0xfff0_0000_0001_0f07, "table 0x10000"),
    (E4, 2, 0x000f_ffff_ffff_f007, "table 0xffffffffff000"),
    (E4, 2, 0x0000_0000_0001_000f, EPT_TABLE),
    (E4, 2, 0x0000_0000_0001_0017, EPT_TABLE),
    (E4, 3, 0x0000_0000_0001_0027, EPT_TABLE),
    (E4, 4, 0x0000_0000_0001_0047, EPT_TABLE),
    (E4, 3, 0x0000_0000_0001_0002, W_NOT_R),
    (E4, 4, 0x0000_0000_0001_0005, "table 0x10000 -w-/-w-"),
    (E4, 3, 0x0000_0000_0001_0003, "table 0x10000 --x/--x"),
    (E4, 2, 0x0000_0000_0001_0001, "table 0x10000 -wx/-wx"),
    (E4, 2, 0x0000_0000_0001_0004, "table 0x10000 rw-/rw-"),

    // EPT, 5 levels, mode-based: bit 10 lets user-mode addresses execute, and makes an entry present.
    (E5, 1, 0x0000_0000_0040_0437, "0x400000 4K rwx/rwx n m6 s- - - sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0037, "0x400000 4K rwx/rw- n m6 s- - - sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0433, "0x400000 4K rw-/rwx n m6 s- - - sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0033, "0x400000 4K rw-/rw- n m6 s- - - sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0731, "0x400000 4K r--/r-x n m6 s- A D sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0430, "0x400000 4K ---/--x n m6 s- - - sw0 k0"),
    (E5, 1, 0x0000_0000_0040_0432, W_NOT_R),
    (E5, 1, 0x8000_0000_0040_03f8, "invalid"),
    (E5, 2, 0x0000_0000_4020_04b7, "0x40200000 2M rwx/rwx n m6 s- - - sw0 k0"),
    (E5, 2, 0x0000_0000_4020_24b7, LARGE),
    (E5, 3, 0x0000_0001_4000_00b5, "0x140000000 1G r-x/r-- n m6 s- - - sw0 k0"),
    (E5, 5, 0x0000_0012_3456_7407, "table 0x1234567000"),
    (E5, 4, 0x0000_0000_0001_0403, "table 0x10000 --x/---"),
    (E5, 3, 0x0000_0000_0001_0007, "table 0x10000 ---/--x"),
    (E5, 2, 0x0000_0000_0001_0405, "table 0x10000 -w-/-w-"),
    (E5, 2, 0x0000_0000_0001_0400, "table 0x10000 rwx/rw-"),
    (E5, 5, 0x0000_0000_0001_0487, EPT_TABLE),
    (E5, 4, 0x0000_0000_0001_0487, EPT_TABLE),
    (E5, 5, 0, "invalid"),

    // AMD nested paging: a page that is not the user's is not the guest's.
    (N4, 1, 0x0000_0000_0040_0007, "0x400000 4K rwx/rwx n m0 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0005, "0x400000 4K r-x/r-x n m0 s- - - sw0 k0"),
    (N4, 1, 0x8000_0000_0040_0007, "0x400000 4K rw-/rw- n m0 s- - - sw0 k0"),
    (N4, 1, 0x8000_0000_0040_0005, "0x400000 4K r--/r-- n m0 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0003, "0x400000 4K ---/--- n m0 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0067, "0x400000 4K rwx/rwx n m0 s- A D sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0027, "0x400000 4K rwx/rwx n m0 s- A - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0107, "0x400000 4K rwx/rwx n m0 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_000f, "0x400000 4K rwx/rwx n m1 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_001f, "0x400000 4K rwx/rwx n m3 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_009f, "0x400000 4K rwx/rwx n m7 s- - - sw0 k0"),
    (N4, 1, 0x0000_0000_0040_0a07, "0x400000 4K rwx/rwx n m0 s- - - sw5 k0"),
    (N4, 1, 0x7800_0000_0040_0007, "0x400000 4K rwx/rwx n m0 s- - - sw0 kf"),
    (N4, 1, 0x000f_ffff_ffff_f007, "0xffffffffff000 4K rwx/rwx n m0 s- - - sw0 k0"),
    (N4, 1, 0x8000_0000_0040_0066, "invalid"),
    (N4, 2, 0x0000_0000_4020_00e7, "0x40200000 2M rwx/rwx n m0 s- A D sw0 k0"),
    (N4, 2, 0x0000_0000_4020_109f, "0x40200000 2M rwx/rwx n m7 s- - - sw0 k0"),
    (N4, 2, 0x0000_0000_4020_2087, LARGE),
    (N4, 3, 0x0000_0001_4000_01e7, "0x140000000 1G rwx/rwx n m0 s- A D sw0 k0"),
    (N4, 4, 0x0000_0000_0001_0087, PS),
    (N4, 4, 0x0000_0000_0001_0067, "table 0x10000"),
    (N4, 3, 0x0000_0000_4000_0003, "table 0x40000000 rwx/rwx"),
    (N4, 2, 0x0000_0000_4000_0005, "table 0x40000000 -w-/-w-"),
    (N4, 3, 0x8000_0000_4000_0007, "table 0x40000000 --x/--x"),
    (N5, 5, 0x0000_0012_3456_7027, "table 0x1234567000"),
    (N5, 5, 0x0000_0000_4000_0003, "table 0x40000000 rwx/rwx"),
    (N5, 4, 0x0000_0000_4000_0005, "table 0x40000000 -w-/-w-"),
    (N5, 3, 0x8000_0000_4000_0007, "table 0x40000000 --x/--x"),
    (N5, 2, 0x000f_ffff_ffff_f007, "table 0xffffffffff000"),
    (N5, 5, 0x0000_0000_0001_0087, PS),
    (N5, 4, 0x0000_0000_0001_0087, PS),
    (N5, 3, 0x8000_0000_4000_00e7, "0x40000000 1G rw-/rw- n m0 s- A D sw0 k0"),
    (N5, 2, 0x0000_0000_4020_0085, "0x40200000 2M r-x/r-x n m0 s- - - sw0 k0"),
    (N5, 1, 0x0000_0000_0040_0067, "0x400000 4K rwx/rwx n m0 s- A D sw0 k0"),
    (N5, 1, 0x0000_0000_0040_0062, "invalid"),
];

/// The regime, table descriptors from the top down to right above a leaf, the leaf's level, the leaf, what it permits.
pub type Under = (Regime, &'static [u64], i8, u64, &'static str);

#[rustfmt::skip]
pub const UNDER: &[Under] = &[
    // A page that both may do everything with, as far as the architecture has it.
    (A4, &[0x0000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "rw-/rwx"),
    // PXNTable, UXNTable; a table adds nothing that the leaf withholds.
    (A4, &[0x0800_0000_0000_1003], 3, 0x0000_0000_4000_04c3, "r--/r-x"),
    (A4, &[0x1000_0000_0000_1003], 3, 0x0000_0000_4000_04c3, "r-x/r--"),
    (A4, &[0x0000_0000_0000_1003], 3, 0x0060_0000_4000_0483, "r--/---"),
    // APTable[0]: EL0 does not write the page any more, so that EL1 may execute it. APTable[1]: likewise.
    (A4, &[0x2000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "rwx/--x"),
    (A4, &[0x4000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r-x/r-x"),
    (A4, &[0x4000_0000_0000_1003], 3, 0x0008_0000_4000_0443, "r-x/r-x"),
    (A4, &[0x6000_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r-x/--x"),
    (A4, &[0x7800_0000_0000_1003], 3, 0x0000_0000_4000_0443, "r--/---"),
    // What several levels take away unites, on the way to blocks too.
    (A4, &[0x4000_0000_0000_1003, 0x0000_0000_0000_2003, 0x1000_0000_0000_3003], 3, 0x443, "r-x/r--"),
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
];

/// The regime, the level, a descriptor; what hardware writes back for an access, where it manages the access flag, and
/// for a write, where it manages the dirty state.
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
        ["table", pa] => Means::Table {
            pa: hex("0x", pa),
            takes: access("---/---"),
        },
        ["table", pa, takes] => Means::Table {
            pa: hex("0x", pa),
            takes: access(takes),
        },
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
                        _ => DirtyState::X86_64 {
                            dirty: either(dirty, "D", "-"),
                        },
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
        let [r, w, x] = class.as_bytes() else {
            panic!("{line}")
        };
        let flag = |&sign: &u8, set| {
            assert!(sign == set || sign == b'-', "{line}");
            sign == set
        };
        Permissions {
            read: flag(r, b'r'),
            write: flag(w, b'w'),
            execute: flag(x, b'x'),
        }
    };
    let (privileged, user) = line.split_once('/').unwrap();
    Access {
        privileged: class(privileged),
        user: class(user),
    }
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

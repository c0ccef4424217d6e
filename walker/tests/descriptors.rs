//! Descriptors worked out from the manuals by hand, one row each: the raw bits, and what they must mean.
//!
//! A row stands alone in its table; the tables above it restrict nothing. The meaning is written on one line:
//!
//! ```text
//! pa  size[xRUN]  privileged/user  G|n  mAttrIndx  sSH  A|-  dirty  swSOFTWARE  kKEY
//! ```
//!
//! `table PA` is a pointer to a table, `invalid` maps nothing, `reserved: ...` names the start of the rule broken.

use std::fmt::Write;
use tablewright_walker::{DirtyState, Fault, Granule, Leaf, Regime, translate};

const fn arm64(granule: Granule, wide: bool) -> Regime {
    Regime::Arm64Stage1 { granule, wide }
}

const A4: Regime = arm64(Granule::K4, false);
const A4W: Regime = arm64(Granule::K4, true);
const A16: Regime = arm64(Granule::K16, false);
const A16W: Regime = arm64(Granule::K16, true);
const A64: Regime = arm64(Granule::K64, false);
const A64W: Regime = arm64(Granule::K64, true);
const X4: Regime = Regime::X86_64 { levels: 4 };
const X5: Regime = Regime::X86_64 { levels: 5 };

const NO_BLOCK: &str = "reserved: a block descriptor";
const RES0_LEAF: &str = "reserved: a RES0 bit below or above";
const RES0_TABLE: &str = "reserved: a RES0 bit of a table";
const RES0_CONT: &str = "reserved: the Contiguous bit";
const SH_01: &str = "reserved: SH is 01";
const LARGE: &str = "reserved: a reserved bit below the address of a large page";
const PS: &str = "reserved: PS";

type Row = (Regime, i8, u64, &'static str);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // 4 KiB, 48 bits. Pages: each permission, each field.
    (A4, 3, 0x0060_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0040_0001_2345_6f43, "0x123456000 4K rw-/rw- n m0 s3 A - sw0 k0"),
    (A4, 3, 0x0000_0001_2345_6f43, "0x123456000 4K rw-/rwx n m0 s3 A - sw0 k0"),
    (A4, 3, 0x0000_0000_4000_0703, "0x40000000 4K rwx/--x G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0020_0000_8000_0fc7, "0x80000000 4K r--/r-x n m1 s3 A ro sw0 k0"),
    (A4, 3, 0x0000_0000_8000_0fc3, "0x80000000 4K r-x/r-x n m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0040_0000_4008_0783, "0x40080000 4K r-x/--- G m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0020_0000_4000_0f83, "0x40000000 4K r--/--x n m0 s3 A ro sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0303, "0x40000000 4K rw-/--- G m0 s3 - - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0603, "0x40000000 4K rw-/--- G m0 s2 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_041f, "0x40000000 4K rw-/--- G m7 s0 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0713, "0x40000000 4K rw-/--- G m4 s3 A - sw0 k0"),
    (A4, 3, 0x0060_0000_4000_0503, SH_01),
    (A4, 3, 0x0068_0000_4000_0783, "0x40000000 4K r--/--- G m0 s3 A dbm+ro sw0 k0"),
    (A4, 3, 0x0068_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A dbm sw0 k0"),
    (A4, 3, 0x07e0_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - swf k0"),
    (A4, 3, 0x00e0_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw1 k0"),
    (A4, 3, 0x7860_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 kf"),
    (A4, 3, 0x0860_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k1"),
    (A4, 3, 0x8060_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0064_0000_4000_0703, "0x40000000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0060_ffff_ffff_f703, "0xfffffffff000 4K rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0070_0000_4000_0703, "0x40000000 4Kx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 3, 0x0061_0000_4000_0703, RES0_LEAF),
    (A4, 3, 0x0062_0000_4000_0703, RES0_LEAF),
    (A4, 3, 0x0060_0000_4000_0701, NO_BLOCK),
    (A4, 3, 0x0060_0000_4000_0702, "invalid"),
    (A4, 3, 0xffff_ffff_ffff_fffe, "invalid"),
    (A4, 3, 0, "invalid"),
    // Blocks of 2 MiB and 1 GiB: the bits below the address, of which nT (16) alone may be set.
    (A4, 2, 0x0060_0000_8020_0701, "0x80200000 2M rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0060_0000_8021_0701, "0x80200000 2M rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0070_0000_8200_0701, "0x82000000 2Mx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 2, 0x0060_0000_8020_1701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8020_8701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8022_0701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8030_0701, RES0_LEAF),
    (A4, 2, 0x0061_0000_8020_0701, RES0_LEAF),
    (A4, 2, 0x0060_0000_8020_0700, "invalid"),
    (A4, 1, 0x0060_0001_4000_0701, "0x140000000 1G rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 1, 0x0070_0004_0000_0701, "0x400000000 1Gx16 rw-/--- G m0 s3 A - sw0 k0"),
    (A4, 1, 0x0060_0001_6000_0701, RES0_LEAF),
    (A4, 0, 0x0060_0080_0000_0701, NO_BLOCK),
    // Tables: the address, the ignored bits, the reserved ones.
    (A4, 2, 0x0000_0000_8765_4003, "table 0x87654000"),
    (A4, 2, 0x07f8_0000_8765_4fff, "table 0x87654000"),
    (A4, 0, 0x0000_ffff_ffff_f003, "table 0xfffffffff000"),
    (A4, 2, 0x0004_0000_8765_4003, RES0_TABLE),
    (A4, 2, 0x0001_0000_8765_4003, RES0_TABLE),
    (A4, 1, 0x0002_0000_8765_4003, RES0_TABLE),

    // 4 KiB, LPA2: address bits 49:48 in place, 51:50 in bits 9:8, no SH.
    (A4W, 3, 0x0063_1234_5678_9703, "0xf123456789000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0060_0000_4000_0503, "0x4000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0060_0000_4000_0603, "0x8000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 3, 0x0061_0000_4000_0403, "0x1000040000000 4K rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 2, 0x0060_0000_8020_0701, "0xc000080200000 2M rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 2, 0x0060_0000_8020_8401, RES0_LEAF),
    (A4W, 1, 0x0070_0004_0000_0401, "0x400000000 1Gx16 rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0061_0080_0000_0501, "0x5008000000000 512G rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0060_0080_0001_0401, "0x8000000000 512G rw-/--- G m0 s- A - sw0 k0"),
    (A4W, 0, 0x0060_00c0_0000_0401, RES0_LEAF),
    (A4W, 0, 0x0070_0080_0000_0401, RES0_CONT),
    (A4W, -1, 0x0060_0000_0000_0401, NO_BLOCK),
    (A4W, -1, 0x0002_0000_0000_1203, "table 0xa000000001000"),
    (A4W, 2, 0x0003_0000_8765_4103, "table 0x7000087654000"),
    (A4W, 2, 0x0004_0000_8765_4003, RES0_TABLE),

    // 16 KiB, 48 bits: bits 13:12 are no address.
    (A16, 3, 0x0060_0000_4000_4703, "0x40004000 16K rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 3, 0x0070_0000_4020_0703, "0x40200000 16Kx128 rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 3, 0x0060_0000_4000_2703, RES0_LEAF),
    (A16, 3, 0x0060_0000_4000_1703, RES0_LEAF),
    (A16, 3, 0x0060_0000_4000_4701, NO_BLOCK),
    (A16, 2, 0x0060_0000_4200_0701, "0x42000000 32M rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0060_0000_4201_0701, "0x42000000 32M rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0070_0000_4000_0701, "0x40000000 32Mx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A16, 2, 0x0060_0000_4300_0701, RES0_LEAF),
    (A16, 1, 0x0060_0010_0000_0701, NO_BLOCK),
    (A16, 0, 0x0060_8000_0000_0701, NO_BLOCK),
    (A16, 0, 0x0000_0000_0001_c003, "table 0x1c000"),
    (A16, 0, 0x0000_0000_0001_d003, RES0_TABLE),
    (A16, 2, 0x0000_0000_0001_e003, RES0_TABLE),
    // 16 KiB, LPA2.
    (A16W, 3, 0x0063_0000_4000_4703, "0xf000040004000 16K rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 3, 0x0060_0000_4000_5403, RES0_LEAF),
    (A16W, 2, 0x0070_0000_4000_0701, "0xc000040000000 32Mx32 rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 1, 0x0061_0010_0000_0501, "0x5001000000000 64G rw-/--- G m0 s- A - sw0 k0"),
    (A16W, 1, 0x0060_0018_0000_0401, RES0_LEAF),
    (A16W, 1, 0x0070_0010_0000_0401, RES0_CONT),
    (A16W, 0, 0x0060_8000_0000_0401, NO_BLOCK),
    (A16W, 0, 0x0001_0000_0001_c303, "table 0xd00000001c000"),
    (A16W, 0, 0x0001_0000_0001_d303, RES0_TABLE),

    // 64 KiB, 48 bits: bits 15:12 are no address.
    (A64, 3, 0x0060_0000_4001_0703, "0x40010000 64K rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 3, 0x0070_0000_4020_0703, "0x40200000 64Kx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 3, 0x0060_0000_4001_8703, RES0_LEAF),
    (A64, 3, 0x0060_0000_4001_1703, RES0_LEAF),
    (A64, 2, 0x0060_0000_6000_0701, "0x60000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0060_0000_6001_0701, "0x60000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0070_0004_0000_0701, "0x400000000 512Mx32 rw-/--- G m0 s3 A - sw0 k0"),
    (A64, 2, 0x0060_0000_7000_0701, RES0_LEAF),
    (A64, 1, 0x0060_0400_0000_0701, NO_BLOCK),
    (A64, 1, 0x0000_0000_0003_0003, "table 0x30000"),
    (A64, 1, 0x0000_0000_0003_4003, RES0_TABLE),
    // 64 KiB, LPA: address bits 51:48 in bits 15:12, SH in its place.
    (A64W, 3, 0x0060_1234_5678_a703, "0xa123456780000 64K rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 3, 0x0062_0000_4001_0703, RES0_LEAF),
    (A64W, 3, 0x0060_0000_4001_0503, SH_01),
    (A64W, 2, 0x0060_0000_6000_1701, "0x1000060000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 2, 0x0060_0000_6001_8701, "0x8000060000000 512M rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 2, 0x0060_0000_6002_0701, RES0_LEAF),
    (A64W, 1, 0x0060_0400_0000_f701, "0xf040000000000 4T rw-/--- G m0 s3 A - sw0 k0"),
    (A64W, 1, 0x0060_0600_0000_0701, RES0_LEAF),
    (A64W, 1, 0x0070_0400_0000_0701, RES0_CONT),
    (A64W, 1, 0x0000_0000_0003_c003, "table 0xc000000030000"),
    (A64W, 1, 0x0001_0000_0003_0003, RES0_TABLE),

    // x86-64, 4 KiB pages: each permission, each field.
    (X4, 1, 0x0000_0000_0040_0063, "0x400000 4K rwx/--- n m0 s- A D sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0107, "0x400000 4K rw-/rw- G m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0005, "0x400000 4K r-x/r-x n m0 s- - - sw0 k0"),
    (X4, 1, 0x8000_0000_0040_0001, "0x400000 4K r--/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0023, "0x400000 4K rwx/--- n m0 s- A - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0043, "0x400000 4K rwx/--- n m0 s- - D sw0 k0"),
    (X4, 1, 0x0000_0000_0040_000b, "0x400000 4K rwx/--- n m1 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0013, "0x400000 4K rwx/--- n m2 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0083, "0x400000 4K rwx/--- n m4 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_009b, "0x400000 4K rwx/--- n m7 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0000_1001, "0x1000 4K r-x/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x000f_ffff_ffff_f003, "0xffffffffff000 4K rwx/--- n m0 s- - - sw0 k0"),
    (X4, 1, 0x0000_0000_0040_0e01, "0x400000 4K r-x/--- n m0 s- - - sw7 k0"),
    (X4, 1, 0x0000_0000_0040_0201, "0x400000 4K r-x/--- n m0 s- - - sw1 k0"),
    (X4, 1, 0x07f0_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw3f8 k0"),
    (X4, 1, 0x0010_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw8 k0"),
    (X4, 1, 0x7800_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 kf"),
    (X4, 1, 0x0800_0000_0040_0001, "0x400000 4K r-x/--- n m0 s- - - sw0 k1"),
    (X4, 1, 0x8000_0000_0040_0062, "invalid"),
    (X4, 4, 0xffff_ffff_ffff_fffe, "invalid"),
    // Large pages: PAT in bit 12, nothing in the bits from 13 up to the address.
    (X4, 2, 0x0000_0000_4020_00e3, "0x40200000 2M rwx/--- n m0 s- A D sw0 k0"),
    (X4, 2, 0x0000_0000_4020_1083, "0x40200000 2M rwx/--- n m4 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_0183, "0x40200000 2M rwx/--- G m0 s- - - sw0 k0"),
    (X4, 2, 0x0000_0000_4020_2083, LARGE),
    (X4, 2, 0x0000_0000_4030_0083, LARGE),
    (X4, 3, 0x0000_0001_4000_0083, "0x140000000 1G rwx/--- n m0 s- - - sw0 k0"),
    (X4, 3, 0x8000_0000_4000_108f, "0x40000000 1G rw-/rw- n m5 s- - - sw0 k0"),
    (X4, 3, 0x0000_0001_6000_0083, LARGE),
    (X4, 3, 0x0000_0000_4020_0083, LARGE),
    (X4, 3, 0x000f_ffff_c000_0083, "0xfffffc0000000 1G rwx/--- n m0 s- - - sw0 k0"),
    (X4, 4, 0x0000_0000_0001_0083, PS),
    (X5, 4, 0x0000_0000_0001_0083, PS),
    (X5, 5, 0x0000_0000_0001_0083, PS),
    // Tables: D and G of a table entry are ignored, all of 51:12 is address.
    (X4, 4, 0x0000_0000_0001_0167, "table 0x10000"),
    (X4, 3, 0x0000_0000_0001_1027, "table 0x11000"),
    (X4, 2, 0x000f_ffff_ffff_f027, "table 0xffffffffff000"),
    (X5, 5, 0x0000_0012_3456_7027, "table 0x1234567000"),
    (X5, 1, 0x0000_0000_0040_0063, "0x400000 4K rwx/--- n m0 s- A D sw0 k0"),
];

/// What `raw` means at `level` of `regime`, on one line.
fn meaning(regime: Regime, level: i8, raw: u64) -> String {
    let arm = matches!(regime, Regime::Arm64Stage1 { .. });
    let above = (regime.start_level() - level).unsigned_abs();
    let (mut reads, mut pointed_to) = (0, None);
    let mut memory = |table: u64, index: usize| {
        assert_eq!(index, 0, "address 0 has index 0 everywhere");
        reads += 1;
        if reads <= above {
            0x5000_0000 | if arm { 0x3 } else { 0x7 }
        } else if reads == above + 1 {
            raw
        } else {
            pointed_to = Some(table);
            0
        }
    };
    let outcome = translate(regime, 0x7000_0000, 0, &mut memory);
    match (outcome, pointed_to) {
        (Ok(leaf), None) => {
            assert_eq!((leaf.level, leaf.va, leaf.raw), (level, 0, raw));
            line(&leaf)
        }
        (Err(Fault::NotMapped { .. }), Some(table)) => format!("table {table:#x}"),
        (Err(Fault::NotMapped { level: at }), None) => {
            assert_eq!(at, level);
            "invalid".into()
        }
        (Err(Fault::Reserved(malformed)), None) => {
            assert_eq!((malformed.level, malformed.descriptor), (level, raw));
            format!("reserved: {}", malformed.why)
        }
        other => panic!("{other:x?}"),
    }
}

fn line(leaf: &Leaf) -> String {
    let unit = |bytes: u64| match bytes.trailing_zeros() {
        shift @ 0..20 => format!("{}K", 1 << (shift - 10)),
        shift @ 20..30 => format!("{}M", 1 << (shift - 20)),
        shift @ 30..40 => format!("{}G", 1 << (shift - 30)),
        shift => format!("{}T", 1 << (shift - 40)),
    };
    assert!(leaf.size.is_power_of_two());
    let mut line = format!("{:#x} {}", leaf.pa, unit(leaf.size));
    assert_eq!(leaf.contiguous, leaf.run_size > leaf.size);
    if leaf.contiguous {
        write!(line, "x{}", leaf.run_size / leaf.size).unwrap();
    }
    let dirty = match leaf.dirty {
        DirtyState::Arm64 { dbm, read_only } => match (dbm, read_only) {
            (false, false) => "-",
            (false, true) => "ro",
            (true, false) => "dbm",
            (true, true) => "dbm+ro",
        },
        DirtyState::X86_64 { dirty } => ["-", "D"][usize::from(dirty)],
    };
    let shareability = leaf
        .shareability
        .map_or("-".into(), |field| field.to_string());
    write!(
        line,
        " {}/{} {} m{} s{shareability} {} {dirty} sw{:x} k{:x}",
        leaf.access.privileged,
        leaf.access.user,
        ["n", "G"][usize::from(leaf.global)],
        leaf.memory,
        ["-", "A"][usize::from(leaf.accessed)],
        leaf.software,
        leaf.key,
    )
    .unwrap();
    line
}

#[test]
fn every_row_means_what_the_manual_says() {
    let mut wrong = String::new();
    for &(regime, level, raw, expected) in ROWS {
        let found = meaning(regime, level, raw);
        let same = if expected.starts_with("reserved") {
            found.starts_with(expected)
        } else {
            found == expected
        };
        if !same {
            writeln!(
                wrong,
                "{regime:?} level {level} {raw:#018x}\n  expected {expected}\n  found    {found}"
            )
            .unwrap();
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn no_descriptor_makes_the_decoder_panic() {
    // Every pair of bits over each of the low forms, at every level of every regime.
    for regime in [A4, A4W, A16, A16W, A64, A64W, X4, X5] {
        let (start, last) = (regime.start_level(), regime.last_level());
        for level in start.min(last)..=start.max(last) {
            for (a, b) in (0..64).flat_map(|a| (a..64).map(move |b| (a, b))) {
                for low in [0, 1, 3] {
                    meaning(regime, level, 1 << a | 1 << b | low);
                }
            }
        }
    }
}

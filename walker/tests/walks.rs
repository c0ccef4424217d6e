//! Whole walks over small tables written by hand: the shape of each tree, the indices of an
//! address, permissions combined over the levels, visits in order, contiguous runs, tables counted.

mod table;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use table::{
    A4, A4W, A16, A16W, A64, A64W, E4, E5, G39, G48, G57, N4, N5, S4, S4F, S4W, S16, S16W, S64,
    S64W, V39, V48, V57, X4, X5,
};
use tablewright_walker::{Fault, Granule, Half, Leaf, Regime, Table, leaves, tables, translate};

const ROOT: u64 = 0x10_0000;

/// Sparse memory: what is not written reads as 0.
#[derive(Clone, Default)]
struct Memory(BTreeMap<(u64, usize), u64>);

impl Memory {
    fn new(entries: &[(u64, usize, u64)]) -> Self {
        Self(entries.iter().map(|&(t, i, d)| ((t, i), d)).collect())
    }

    fn with(mut self, table: u64, index: usize, descriptor: u64) -> Self {
        self.0.insert((table, index), descriptor);
        self
    }

    fn read(&self) -> impl FnMut(u64, usize) -> u64 {
        |table, index| self.0.get(&(table, index)).copied().unwrap_or(0)
    }

    fn leaves(&self, regime: Regime, half: Half) -> Result<Vec<Leaf>, Fault> {
        let mut found = Vec::new();
        leaves(regime, ROOT, half, &mut self.read(), |leaf| {
            found.push(*leaf);
            ControlFlow::Continue(())
        })?;
        Ok(found)
    }

    fn translate(&self, regime: Regime, va: u64) -> Result<Leaf, Fault> {
        translate(regime, ROOT, va, &mut self.read())
    }
}

#[test]
fn each_tree_has_the_shape_of_the_manual() {
    // From the root down.
    type Shape = &'static [Level];
    #[rustfmt::skip]
    let shapes: [(Regime, u32, u32, Shape); 11] = [
        (A4, 12, 48, &[(0, 512, 39, 1), (1, 512, 30, 16), (2, 512, 21, 16), (3, 512, 12, 16)]),
        (A4W, 12, 52, &[(-1, 16, 48, 1), (0, 512, 39, 1), (1, 512, 30, 16), (2, 512, 21, 16),
            (3, 512, 12, 16)]),
        (A16, 14, 48, &[(0, 2, 47, 1), (1, 2048, 36, 1), (2, 2048, 25, 32), (3, 2048, 14, 128)]),
        (A16W, 14, 52, &[(0, 32, 47, 1), (1, 2048, 36, 1), (2, 2048, 25, 32), (3, 2048, 14, 128)]),
        (A64, 16, 48, &[(1, 64, 42, 1), (2, 8192, 29, 32), (3, 8192, 16, 32)]),
        (A64W, 16, 52, &[(1, 1024, 42, 1), (2, 8192, 29, 32), (3, 8192, 16, 32)]),
        (X4, 12, 48, &[(4, 512, 39, 1), (3, 512, 30, 1), (2, 512, 21, 1), (1, 512, 12, 1)]),
        (X5, 12, 57, &[(5, 512, 48, 1), (4, 512, 39, 1), (3, 512, 30, 1), (2, 512, 21, 1),
            (1, 512, 12, 1)]),
        (V39, 12, 39, &[(2, 512, 30, 1), (1, 512, 21, 1), (0, 512, 12, 16)]),
        (V57, 12, 57, &[(4, 512, 48, 1), (3, 512, 39, 1), (2, 512, 30, 1), (1, 512, 21, 1),
            (0, 512, 12, 16)]),
        (G48, 12, 50, &[(3, 2048, 39, 1), (2, 512, 30, 1), (1, 512, 21, 1), (0, 512, 12, 16)]),
    ];
    for (regime, page_shift, input_bits, levels) in shapes {
        assert_eq!(regime.page_shift(), page_shift, "{regime:?}");
        assert_eq!(regime.input_bits(), input_bits, "{regime:?}");
        check_shape(regime, levels);
    }
}

/// A level: its number, entries, address bits below an entry, members of a run.
type Level = (i8, usize, u32, usize);

/// Compares the levels, from the root down.
fn check_shape(regime: Regime, levels: &[Level]) {
    assert_eq!(regime.start_level(), levels[0].0, "{regime:?}");
    assert_eq!(regime.last_level(), levels[levels.len() - 1].0, "{regime:?}");
    for &(level, entries, shift, run) in levels {
        assert_eq!(regime.table_entries(level), entries, "{regime:?} {level}");
        assert_eq!(regime.entry_size(level), 1 << shift, "{regime:?} {level}");
        assert_eq!(regime.run_entries(level), run, "{regime:?} {level}");
    }
}

#[test]
fn the_first_table_of_stage_1_follows_from_the_input_size() {
    // The granule, the size, what is at the root; the levels below are full. D8.2.8 to D8.2.10,
    // initial lookup levels.
    #[rustfmt::skip]
    let roots: [(Granule, u8, Level); 28] = [
        (Granule::K4, 25, (2, 16, 21, 16)),
        (Granule::K4, 30, (2, 512, 21, 16)),
        (Granule::K4, 31, (1, 2, 30, 1)),
        (Granule::K4, 33, (1, 8, 30, 1)),
        (Granule::K4, 34, (1, 16, 30, 16)),
        (Granule::K4, 36, (1, 64, 30, 16)),
        (Granule::K4, 39, (1, 512, 30, 16)),
        (Granule::K4, 40, (0, 2, 39, 1)),
        (Granule::K4, 42, (0, 8, 39, 1)),
        (Granule::K4, 47, (0, 256, 39, 1)),
        (Granule::K4, 48, (0, 512, 39, 1)),
        (Granule::K4, 49, (-1, 2, 48, 1)),
        (Granule::K4, 52, (-1, 16, 48, 1)),
        (Granule::K16, 25, (3, 2048, 14, 128)),
        (Granule::K16, 26, (2, 2, 25, 1)),
        (Granule::K16, 29, (2, 16, 25, 1)),
        (Granule::K16, 36, (2, 2048, 25, 32)),
        (Granule::K16, 37, (1, 2, 36, 1)),
        (Granule::K16, 47, (1, 2048, 36, 1)),
        (Granule::K16, 48, (0, 2, 47, 1)),
        (Granule::K16, 52, (0, 32, 47, 1)),
        (Granule::K64, 25, (3, 512, 16, 32)),
        (Granule::K64, 29, (3, 8192, 16, 32)),
        (Granule::K64, 30, (2, 2, 29, 1)),
        (Granule::K64, 42, (2, 8192, 29, 32)),
        (Granule::K64, 43, (1, 2, 42, 1)),
        (Granule::K64, 48, (1, 64, 42, 1)),
        (Granule::K64, 52, (1, 1024, 42, 1)),
    ];
    for (granule, input_bits, root) in roots {
        let below: &[_] = match granule {
            Granule::K4 => &[(0, 512, 39, 1), (1, 512, 30, 16), (2, 512, 21, 16), (3, 512, 12, 16)],
            Granule::K16 => &[(1, 2048, 36, 1), (2, 2048, 25, 32), (3, 2048, 14, 128)],
            Granule::K64 => &[(2, 8192, 29, 32), (3, 8192, 16, 32)],
        };
        let mut levels = vec![root];
        levels.extend(below.iter().filter(|level| level.0 > root.0));
        for wide in [false, true] {
            if input_bits > 48 && !wide {
                continue;
            }
            let sized = Regime::Arm64Stage1Sized { granule, input_bits, wide };
            let el2 = Regime::Arm64El2 { granule, input_bits, wide };
            for regime in [sized, el2] {
                assert_eq!(regime.page_shift(), granule.page_shift());
                assert_eq!(regime.input_bits(), u32::from(input_bits));
                check_shape(regime, &levels);
            }
            // One half, or two.
            let top = 1 << input_bits;
            let leads = |regime, va| translate(regime, ROOT, va, &mut |_: u64, _: usize| 0);
            for (va, of_el1, of_el2) in [
                (top - 1, true, true),
                (top, false, false),
                (!(top - 1), true, false),
                (!top, false, false),
            ] {
                assert_eq!(leads(sized, va) != Err(Fault::NonCanonical), of_el1);
                assert_eq!(leads(el2, va) != Err(Fault::NonCanonical), of_el2);
            }
        }
    }
}

#[test]
fn the_first_table_of_stage_2_follows_from_the_input_size() {
    // The granule, the size, what is at the root; the levels below are full.
    #[rustfmt::skip]
    let roots: [(Granule, u8, Level); 21] = [
        (Granule::K4, 32, (2, 2048, 21, 16)),
        (Granule::K4, 34, (2, 8192, 21, 16)),
        (Granule::K4, 35, (1, 32, 30, 16)),
        (Granule::K4, 40, (1, 1024, 30, 16)),
        (Granule::K4, 43, (1, 8192, 30, 16)),
        (Granule::K4, 44, (0, 32, 39, 1)),
        (Granule::K4, 48, (0, 512, 39, 1)),
        (Granule::K4, 52, (0, 8192, 39, 1)),
        (Granule::K16, 32, (2, 128, 25, 32)),
        (Granule::K16, 40, (2, 32768, 25, 32)),
        (Granule::K16, 41, (1, 32, 36, 1)),
        (Granule::K16, 48, (1, 4096, 36, 1)),
        (Granule::K16, 51, (1, 32768, 36, 1)),
        (Granule::K16, 52, (0, 32, 47, 1)),
        (Granule::K64, 32, (2, 8, 29, 1)),
        (Granule::K64, 33, (2, 16, 29, 1)),
        (Granule::K64, 34, (2, 32, 29, 32)),
        (Granule::K64, 46, (2, 131_072, 29, 32)),
        (Granule::K64, 47, (1, 32, 42, 1)),
        (Granule::K64, 48, (1, 64, 42, 1)),
        (Granule::K64, 52, (1, 1024, 42, 1)),
    ];
    for (granule, input_bits, root) in roots {
        let below: &[_] = match granule {
            Granule::K4 => &[(1, 512, 30, 16), (2, 512, 21, 16), (3, 512, 12, 16)],
            Granule::K16 => &[(1, 2048, 36, 1), (2, 2048, 25, 32), (3, 2048, 14, 128)],
            Granule::K64 => &[(2, 8192, 29, 32), (3, 8192, 16, 32)],
        };
        let mut levels = vec![root];
        levels.extend(below.iter().filter(|level| level.0 > root.0));
        for wide in [false, true] {
            if input_bits > 48 && !wide {
                continue;
            }
            let regime =
                Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back: false };
            assert_eq!(regime.input_bits(), u32::from(input_bits));
            check_shape(regime, &levels);
        }
    }
    for regime in [E4, N4] {
        let below = [(3, 512, 30, 1), (2, 512, 21, 1), (1, 512, 12, 1)];
        check_shape(regime, &[&[(4, 512, 39, 1)][..], &below].concat());
    }
    for regime in [E5, N5] {
        check_shape(
            regime,
            &[(5, 512, 48, 1), (4, 512, 39, 1), (3, 512, 30, 1), (2, 512, 21, 1), (1, 512, 12, 1)],
        );
    }
}

#[test]
#[should_panic = "32 to 48 bits"]
fn stage_2_has_no_49_bits_without_wide_descriptors() {
    let regime = Regime::Arm64Stage2 {
        granule: Granule::K4,
        input_bits: 49,
        wide: false,
        forced_write_back: false,
    };
    regime.start_level();
}

#[test]
#[should_panic = "32 to 48 bits"]
fn stage_2_has_no_31_bits() {
    let regime = Regime::Arm64Stage2 {
        granule: Granule::K64,
        input_bits: 31,
        wide: true,
        forced_write_back: false,
    };
    regime.start_level();
}

#[test]
#[should_panic = "no such level"]
fn a_level_outside_the_regime_panics() {
    A64.table_entries(0);
}

#[test]
#[should_panic = "4 or 5 levels"]
fn x86_64_has_no_three_levels() {
    Regime::X86_64 { levels: 3 }.start_level();
}

#[test]
fn the_members_of_a_run_of_16_pages_are_translated_by_their_addresses() {
    const MEMBER: u64 = 0x8000_0000_1400_2003;
    let table = || {
        let memory = Memory::default().with(ROOT, 0, 0x20_0000 >> 2 | 1);
        let memory = memory.with(0x20_0000, 0, 0x30_0000 >> 2 | 1);
        (16..32).fold(memory, |memory, index| memory.with(0x30_0000, index, MEMBER))
    };
    let memory = table();
    for index in 16..32 {
        let leaf = memory.translate(V39, index << 12).unwrap();
        assert_eq!((leaf.pa, leaf.size), (0x5000_0000 + ((index - 16) << 12), 4096));
        assert_eq!((leaf.run_size, leaf.contiguous), (16 << 12, true));
    }
    assert_eq!(memory.leaves(V39, Half::Lower).unwrap().len(), 16);
    // A flag may differ, and nothing else may.
    let flagged = table().with(0x30_0000, 20, MEMBER | 0x40);
    assert_eq!(flagged.leaves(V39, Half::Lower).unwrap().len(), 16);
    for other in [0, MEMBER | 4, 0x1400_0003] {
        let broken = table().with(0x30_0000, 20, other).leaves(V39, Half::Lower);
        assert!(matches!(broken, Err(Fault::BrokenRun(_))), "{other:#x}: {broken:?}");
    }
}

#[test]
fn a_table_makes_what_is_below_it_global() {
    let memory = Memory::default().with(ROOT, 0, 0x20_0000 >> 2 | 0x21);
    let memory = memory.with(0x20_0000, 0, 0x2000_0003);
    assert!(memory.translate(V39, 0).unwrap().global);
}

#[test]
fn an_address_selects_its_indices() {
    // The address, the indices on its path worked out by hand, the leaf at the end, the physical
    // address.
    #[rustfmt::skip]
    let paths: [(Regime, u64, &[usize], u64, u64); 30] = [
        (A4, 0x0000_8040_2010_1234, &[256, 256, 256, 257], 0x5000_0403, 0x5000_0234),
        (A4, 0xffff_8040_2010_1234, &[256, 256, 256, 257], 0x5000_0403, 0x5000_0234),
        (A4, 0xffff_ffff_ffff_ffff, &[511, 511, 511, 511], 0x5000_0403, 0x5000_0fff),
        (A4, 0x0000_0000_0030_0042, &[0, 0, 1], 0x8000_0401, 0x8010_0042),
        (A4W, 0x000f_0080_4020_1008, &[15, 1, 1, 1, 1], 0x5000_0403, 0x5000_0008),
        (A4W, 0xfff0_0000_0000_0000, &[0, 0, 0, 0, 0], 0x5000_0403, 0x5000_0000),
        (A16, 0x0000_8010_0200_4010, &[1, 1, 1, 1], 0x5000_0403, 0x5000_0010),
        (A16W, 0x000f_8010_0200_7fff, &[31, 1, 1, 1], 0x5000_0403, 0x5000_3fff),
        (A64, 0x0000_fc00_2001_0123, &[63, 1, 1], 0x5000_0403, 0x5000_0123),
        (A64W, 0x000f_fc00_2001_0123, &[1023, 1, 1], 0x5000_0403, 0x5000_0123),
        (X4, 0xffff_8080_4020_1234, &[257, 1, 1, 1], 0x5000_0001, 0x5000_0234),
        (X5, 0xff01_0080_4020_1234, &[257, 1, 1, 1, 1], 0x5000_0001, 0x5000_0234),
        // Stage 2: entries behind the first 512, 2048 or 8192 stand in the tables beside the first.
        (S4, 0x0000_00ff_c020_1234, &[1023, 1, 1], 0x5000_07ff, 0x5000_0234),
        (S4, 0x0000_0080_0030_0042, &[512, 1], 0x8000_07fd, 0x8010_0042),
        (S4F, 0x0000_8040_2010_1234, &[256, 256, 256, 257], 0x5000_07db, 0x5000_0234),
        (S4W, 0x000f_ff80_4020_1008, &[8191, 1, 1, 1], 0x5000_04ff, 0x5000_0008),
        (S16, 0x0000_00ff_fe00_7fff, &[32767, 1], 0x5000_07ff, 0x5000_3fff),
        (S16W, 0x000f_8010_0200_7fff, &[31, 1, 1, 1], 0x5000_04db, 0x5000_3fff),
        (S64, 0x0000_0001_e001_0123, &[15, 1], 0x5000_07db, 0x5000_0123),
        (S64W, 0x000f_fc00_2001_0123, &[1023, 1, 1], 0x5000_07ff, 0x5000_0123),
        // All bits of a guest-physical address select: the last is no sign.
        (E4, 0x0000_8080_4020_1234, &[257, 1, 1, 1], 0x5000_0007, 0x5000_0234),
        (E5, 0x0101_0080_4020_1234, &[257, 1, 1, 1, 1], 0x5000_0007, 0x5000_0234),
        (N4, 0x0000_ffff_ffff_ffff, &[511, 511, 511, 511], 0x5000_0007, 0x5000_0fff),
        (V39, 0x0000_0000_4020_1234, &[1, 1, 1], 0x1400_00cf, 0x5000_0234),
        (V39, 0xffff_ffff_c040_0042, &[511, 2], 0x2000_0003, 0x8000_0042),
        (V48, 0xffff_8080_4020_1234, &[257, 1, 1, 1], 0x1400_00cf, 0x5000_0234),
        (V57, 0xff01_0080_4020_1234, &[257, 1, 1, 1, 1], 0x1400_00cf, 0x5000_0234),
        // The G-stage: entries behind the first 512 stand in the tables beside the first.
        (G39, 0x0000_01ff_c020_1234, &[2047, 1, 1], 0x1400_00df, 0x5000_0234),
        (G48, 0x0002_0080_4020_1234, &[1025, 1, 1, 1], 0x1400_00df, 0x5000_0234),
        (G57, 0x0401_0000_0030_0042, &[1025, 0, 0, 1], 0x2000_00df, 0x8010_0042),
    ];
    for (regime, va, path, leaf, pa) in paths {
        let table = |step: usize| ROOT + step as u64 * 0x10_0000;
        let mut memory = Memory::default();
        for (step, &index) in path.iter().enumerate() {
            let last = step + 1 == path.len();
            let descriptor = match regime {
                _ if last => leaf,
                Regime::Riscv { .. } => table(step + 1) >> 2 | 1,
                _ => table(step + 1) | 3,
            };
            memory = memory.with(table(step), index, descriptor);
        }
        let leaf = memory.translate(regime, va).unwrap();
        assert_eq!(leaf.physical(va), pa, "{regime:?} {va:#x}");
        assert_eq!(leaf.va, va & !(leaf.size - 1), "{regime:?} {va:#x}");

        // The visit of the half finds the same leaf, and that of the other half the arm64 root
        // again or nothing.
        let upper = va >> 63 == 1;
        let (half, other) =
            if upper { (Half::Upper, Half::Lower) } else { (Half::Lower, Half::Upper) };
        assert_eq!(memory.leaves(regime, half), Ok(vec![leaf]), "{va:#x}");
        let elsewhere = memory.leaves(regime, other).unwrap();
        match regime {
            Regime::Arm64Stage1 { .. } => {
                let ones = u64::MAX << regime.input_bits();
                assert_eq!(elsewhere, [Leaf { va: leaf.va ^ ones, ..leaf }]);
            }
            _ => assert_eq!(elsewhere, []),
        }
        let pages = path.len() as u64;
        let mut visited = 0;
        tables(regime, ROOT, &mut memory.read(), |_| {
            visited += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(visited, pages);
    }
}

#[test]
fn addresses_between_the_halves_are_not_canonical() {
    #[rustfmt::skip]
    let bounds = [
        // The last address of the lower half, the first of the upper half.
        (A4, 0x0000_ffff_ffff_ffff, 0xffff_0000_0000_0000),
        (A16, 0x0000_ffff_ffff_ffff, 0xffff_0000_0000_0000),
        (A64, 0x0000_ffff_ffff_ffff, 0xffff_0000_0000_0000),
        (A4W, 0x000f_ffff_ffff_ffff, 0xfff0_0000_0000_0000),
        (A16W, 0x000f_ffff_ffff_ffff, 0xfff0_0000_0000_0000),
        (A64W, 0x000f_ffff_ffff_ffff, 0xfff0_0000_0000_0000),
        (X4, 0x0000_7fff_ffff_ffff, 0xffff_8000_0000_0000),
        (X5, 0x00ff_ffff_ffff_ffff, 0xff00_0000_0000_0000_u64),
        (V39, 0x0000_003f_ffff_ffff, 0xffff_ffc0_0000_0000_u64),
        (V48, 0x0000_7fff_ffff_ffff, 0xffff_8000_0000_0000),
        (V57, 0x00ff_ffff_ffff_ffff, 0xff00_0000_0000_0000_u64),
    ];
    let empty = Memory::default();
    for (regime, lower, upper) in bounds {
        let unmapped = Err(Fault::NotMapped { level: regime.start_level() });
        assert_eq!(empty.translate(regime, lower), unmapped);
        assert_eq!(empty.translate(regime, upper), unmapped);
        for between in [lower + 1, upper - 1, 1 << 62, !(1 << 62)] {
            assert_eq!(empty.translate(regime, between), Err(Fault::NonCanonical), "{between:#x}");
        }
    }
}

/// "privileged/user" of the leaf at address 0.
fn access(memory: &Memory, regime: Regime) -> String {
    let leaf = memory.translate(regime, 0).unwrap();
    assert_eq!(memory.leaves(regime, Half::Lower), Ok(vec![leaf]));
    format!("{}/{}", leaf.access.privileged, leaf.access.user)
}

#[test]
fn arm64_tables_restrict_what_is_under_them() {
    // The attributes of a table (bits 62:59), a leaf, the outcome.
    #[rustfmt::skip]
    let cases = [
        // EL0 may write: never executable at EL1, whatever PXN says.
        (0x0000_0000_0000_0000, 0x0000_0000_4000_0443, "rw-/rwx"),
        // APTable[0], no EL0 access: the page is not writable at EL0 any more, so EL1 may execute
        // it.
        (0x2000_0000_0000_0000, 0x0000_0000_4000_0443, "rwx/--x"),
        // APTable[1], no writes: likewise.
        (0x4000_0000_0000_0000, 0x0000_0000_4000_0443, "r-x/r-x"),
        (0x6000_0000_0000_0000, 0x0000_0000_4000_0443, "r-x/--x"),
        (0x1000_0000_0000_0000, 0x0000_0000_4000_0443, "rw-/rw-"),
        (0x0800_0000_0000_0000, 0x0000_0000_4000_04c3, "r--/r-x"),
        (0x1000_0000_0000_0000, 0x0000_0000_4000_04c3, "r-x/r--"),
        (0x7800_0000_0000_0000, 0x0000_0000_4000_0443, "r--/---"),
        // A table adds nothing that the leaf withholds.
        (0x0000_0000_0000_0000, 0x0060_0000_4000_0483, "r--/---"),
    ];
    for (attributes, leaf, expected) in cases {
        // At each of the three table levels alone.
        for restricting in 0..3 {
            let attributes = |level| if level == restricting { attributes } else { 0 };
            let memory = Memory::new(&[
                (ROOT, 0, 0x2003 | attributes(0)),
                (0x2000, 0, 0x3003 | attributes(1)),
                (0x3000, 0, 0x4003 | attributes(2)),
                (0x4000, 0, leaf),
            ]);
            assert_eq!(access(&memory, A4), expected, "{leaf:#x} under level {restricting}");
        }
    }
    // Restrictions of two levels unite; an entry beside does not inherit them.
    let memory = Memory::new(&[
        (ROOT, 0, 0x4000_0000_0000_2003),
        (0x2000, 0, 0x1000_0000_0000_3003),
        (0x2000, 1, 0x0000_0000_4000_0441),
        (0x3000, 0, 0x0000_0000_4020_0441),
    ]);
    let found = memory.leaves(A4, Half::Lower).unwrap();
    let shown: Vec<_> =
        found.iter().map(|l| format!("{}/{}", l.access.privileged, l.access.user)).collect();
    assert_eq!(shown, ["r-x/r--", "r-x/r-x"]);
}

#[test]
fn x86_64_rights_hold_only_where_every_level_grants_them() {
    // A 4 KiB page with every right, one table on its path without one.
    for (attributes, expected) in
        [(0x7, "rwx/rwx"), (0x5, "r-x/r-x"), (0x3, "rwx/---"), (1 << 63 | 0x7, "rw-/rw-")]
    {
        for restricting in 0..4 {
            let attributes = |step| if step == restricting { attributes } else { 0x7 };
            let memory = Memory::new(&[
                (ROOT, 0, 0x2000 | attributes(0)),
                (0x2000, 0, 0x3000 | attributes(1)),
                (0x3000, 0, 0x4000 | attributes(2)),
                (0x4000, 0, 0x5000_0000 | attributes(3)),
            ]);
            assert_eq!(access(&memory, X4), expected, "step {restricting}");
        }
    }
}

#[test]
fn leaves_come_in_address_order_and_stop_when_told() {
    let memory = Memory::new(&[
        (ROOT, 0, 0x2003),
        (ROOT, 255, 0x2003),
        (ROOT, 256, 0x2003),
        (0x2000, 0, 0x3003),
        (0x2000, 1, 0x0000_0000_4000_0083),
        (0x3000, 3, 0x4003),
        (0x3000, 511, 0x0000_0000_0020_0083),
        (0x4000, 7, 0x0000_0000_0001_1003),
    ]);
    let addresses =
        |half| -> Vec<u64> { memory.leaves(X4, half).unwrap().iter().map(|l| l.va).collect() };
    let subtree = [0x60_7000, 0x3fe0_0000, 0x4000_0000_u64];
    let lower: Vec<_> =
        [0, 0x7f80_0000_0000].iter().flat_map(|base| subtree.map(|va| base + va)).collect();
    assert_eq!(addresses(Half::Lower), lower);
    assert_eq!(addresses(Half::Upper), subtree.map(|va| 0xffff_8000_0000_0000 + va));

    let mut seen = 0;
    let outcome = leaves(X4, ROOT, Half::Lower, &mut memory.read(), |_| {
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((outcome, seen), (Ok(()), 2));
}

#[test]
fn a_malformed_entry_ends_the_visit_where_it_stands() {
    let memory = Memory::new(&[
        (ROOT, 1, 0x2003),
        (0x2000, 5, 0x0060_0000_4000_0701),
        (0x2000, 9, 0x0060_0000_4000_1701),
    ]);
    let mut seen = 0;
    let outcome = leaves(A4, ROOT, Half::Lower, &mut memory.read(), |_| {
        seen += 1;
        ControlFlow::Continue(())
    });
    let Err(fault @ Fault::Reserved(malformed)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((malformed.level, malformed.table, malformed.index), (1, 0x2000, 9));
    assert_eq!(malformed.descriptor, 0x0060_0000_4000_1701);
    assert_eq!(seen, 1);
    assert_eq!(
        fault.to_string(),
        "reserved: a RES0 bit below or above the address of a leaf is set \
         (descriptor 0x0060000040001701, entry 9 of the level 1 table at 0x2000)"
    );
    assert_eq!(tables(A4, ROOT, &mut memory.read(), |_| ControlFlow::Continue(())), Err(fault));
}

/// A tree of `regime` whose table of `level`, at the address returned, starts with one run. Tables
/// lie 1 MiB apart.
fn run_at(regime: Regime, level: i8, first: u64, address: impl Fn(u64) -> u64) -> (Memory, u64) {
    let mut memory = Memory::default();
    let mut table = ROOT;
    for _ in regime.start_level()..level {
        memory = memory.with(table, 0, (table + 0x10_0000) | 0x3);
        table += 0x10_0000;
    }
    for member in 0..regime.run_entries(level) {
        let pa = address(member as u64 * regime.entry_size(level));
        memory = memory.with(table, member, first | pa);
    }
    (memory, table)
}

/// A Contiguous leaf, UXN and PXN set, AF set, of the kind of `level`; in stage 2 of a device,
/// without any right but execution at EL1.
fn member(level: i8) -> u64 {
    0x0070_0000_0000_0401 | if level == 3 { 0x2 } else { 0 }
}

/// Returns the place at which the visit finds the run broken, and why.
fn broken(memory: &Memory, regime: Regime) -> Option<(usize, &'static str)> {
    match memory.leaves(regime, Half::Lower) {
        Ok(_) => None,
        Err(Fault::BrokenRun(malformed)) => Some((malformed.index, malformed.why)),
        Err(other) => panic!("{other}"),
    }
}

const RUNS: [(Regime, i8); 25] = [
    (A4, 1),
    (A4, 2),
    (A4, 3),
    (A4W, 1),
    (A4W, 2),
    (A4W, 3),
    (A16, 2),
    (A16, 3),
    (A16W, 2),
    (A16W, 3),
    (A64, 2),
    (A64, 3),
    (A64W, 2),
    (A64W, 3),
    (S4, 1),
    (S4, 2),
    (S4, 3),
    (S4F, 1),
    (S4W, 2),
    (S16, 2),
    (S16, 3),
    (S16W, 3),
    (S64, 3),
    (S64W, 2),
    (S64W, 3),
];

#[test]
fn a_whole_run_is_accepted() {
    for (regime, level) in RUNS {
        let (memory, _) = run_at(regime, level, member(level), |offset| 0x20_0000_0000 + offset);
        let found = memory.leaves(regime, Half::Lower).unwrap();
        assert_eq!(found.len(), regime.run_entries(level));
        let size = regime.entry_size(level) * regime.run_entries(level) as u64;
        assert!(found.iter().all(|leaf| leaf.contiguous && leaf.run_size == size));
    }
}

#[test]
fn a_broken_run_is_found() {
    for (regime, level) in RUNS {
        let size = regime.entry_size(level);
        let run = regime.run_entries(level);
        let base = 0x20_0000_0000;
        let (memory, table) = run_at(regime, level, member(level), |offset| base + offset);
        let changed = |index: usize, change: fn(u64) -> u64| {
            let old = memory.0[&(table, index)];
            broken(&memory.clone().with(table, index, change(old)), regime)
        };
        let place = |breaks: Option<(usize, &str)>| breaks.map(|(index, _)| index);
        let context = format!("{regime:?} level {level}");

        // A member without the bit, or not valid: first, middle, last.
        assert_eq!(place(changed(0, |d| d & !(1 << 52))), Some(1), "{context}");
        assert_eq!(place(changed(7, |d| d & !(1 << 52))), Some(7), "{context}");
        assert_eq!(place(changed(run - 1, |_| 0)), Some(run - 1), "{context}");
        let last: fn(u64) -> u64 = match regime {
            Regime::Arm64Stage2 { .. } => |d| d ^ 1 << 60,
            _ => |d| d ^ 1 << 50,
        };
        // An attribute that differs: AttrIndx, AP, nG, PXN, DBM, GP; in stage 2 MemAttr, S2AP,
        // FnXS, XN, DBM, PBHA.
        for change in [
            |d| d ^ 0x4,
            |d| d ^ 0x40,
            |d| d ^ 0x80,
            |d| d ^ 0x800,
            |d| d ^ 1 << 53,
            |d| d ^ 1 << 51,
            last,
        ] {
            assert_eq!(place(changed(run - 1, change)), Some(run - 1), "{context}");
            assert_eq!(place(changed(0, change)), Some(1), "{context}");
        }
        // What hardware and software may change in one member: AF, the software bits, bit 63.
        for change in [|d| d ^ 0x400, |d: u64| d ^ 0xf << 55, |d| d ^ 1 << 63] {
            assert_eq!(changed(5, change), None, "{context}");
        }
        // Memory that jumps, and memory that is not aligned to the run.
        let (jump, _) = run_at(regime, level, member(level), |offset| {
            base + offset + if offset / size >= 3 { size * run as u64 } else { 0 }
        });
        assert_eq!(place(broken(&jump, regime)), Some(3), "{context}");
        for skew in [size, size * run as u64 / 2] {
            let (skewed, _) = run_at(regime, level, member(level), |offset| base + skew + offset);
            assert_eq!(place(broken(&skewed, regime)), Some(0), "{context}");
        }
    }
}

#[test]
fn members_may_differ_in_their_dirty_state() {
    // DBM set in all: AP[2], in stage 2 S2AP[1], records which member was written.
    let dbm = member(3) | 1 << 51;
    for regime in [A4, S4] {
        let (memory, table) = run_at(regime, 3, dbm, |offset| 0x4000_0000 + offset);
        let memory = memory.with(table, 4, dbm | 0x80 | 0x4000_4000);
        assert_eq!(broken(&memory, regime), None);
    }
}

#[test]
fn runs_that_touch_are_two_runs() {
    // Entries 0 to 15 and 16 to 31 with different attributes and memory; entry 32 belongs to none.
    let (mut memory, table) = run_at(A4, 3, member(3), |offset| 0x4000_0000 + offset);
    for index in 16..32_usize {
        memory = memory.with(
            table,
            index,
            member(3) | 0x40 | (0x8000_0000 + (index as u64 - 16) * 0x1000),
        );
    }
    memory = memory.with(table, 32, 0x0060_0000_9000_0403);
    assert_eq!(broken(&memory, A4), None);
    assert_eq!(memory.leaves(A4, Half::Lower).unwrap().len(), 33);
}

#[test]
fn bit_52_of_a_table_descriptor_starts_no_run() {
    let memory = Memory::new(&[
        (ROOT, 0, 0x0010_0000_0000_2003),
        (0x2000, 0, 0x0010_0000_0000_3003),
        (0x2000, 2, 0x0060_0000_4000_0401),
        (0x3000, 0, 0x0060_0000_4000_0401),
    ]);
    assert_eq!(memory.leaves(A4, Half::Lower).unwrap().len(), 2);
}

#[test]
fn a_run_may_lie_above_bit_47() {
    // At 2^50: bits 51:50 stand apart from the rest, at 9:8 with LPA2 and within 15:12 with LPA.
    let wide = |regime, split: fn(u64) -> u64| {
        run_at(regime, 3, member(3), |offset| split(0x4_0000_0000_0000 + offset)).0
    };
    let lpa2 = wide(A4W, |pa| pa & 0x3_ffff_ffff_f000 | pa >> 50 << 8);
    let lpa = wide(A64W, |pa| pa & 0xffff_ffff_0000 | pa >> 48 << 12);
    for (memory, regime) in [(lpa2, A4W), (lpa, A64W)] {
        let found = memory.leaves(regime, Half::Lower).unwrap();
        assert_eq!(found[0].pa, 0x4_0000_0000_0000);
        assert_eq!(found[1].pa, 0x4_0000_0000_0000 + found[0].size);
    }
}

#[test]
fn tables_are_visited_once_per_path() {
    // Two entries of level 1 point to the same level 2 table.
    let memory = Memory::new(&[
        (ROOT, 0, 0x2003),
        (0x2000, 0, 0x3003),
        (0x2000, 1, 0x3003),
        (0x2000, 2, 0x0060_0000_4000_0401),
        (0x3000, 0, 0x4003),
        (0x4000, 0, 0x0060_0000_4000_0403),
    ]);
    let mut found = Vec::new();
    let collect = |table: Table| {
        found.push((table.level, table.pa));
        ControlFlow::Continue(())
    };
    assert_eq!(tables(A4, ROOT, &mut memory.read(), collect), Ok(()));
    let shared = [(2, 0x3000), (3, 0x4000)];
    assert_eq!(found, [&[(0, ROOT), (1, 0x2000)], &shared[..], &shared[..]].concat());

    let mut seen = 0;
    let stop = |_: Table| {
        seen += 1;
        if seen == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert_eq!(tables(A4, ROOT, &mut memory.read(), stop), Ok(()));
    assert_eq!(seen, 3);
}

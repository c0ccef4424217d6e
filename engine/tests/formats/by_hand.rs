//! Rows written by hand from the manuals, held against the engine alone.

use super::*;

/// The rights of one class and the other, as they stand.
pub fn perms(access: walker::Access) -> Perms {
    let (kernel, user) = (access.privileged, access.user);
    let mut perms = Perms::empty();
    perms.set(Perms::READ, kernel.read);
    perms.set(Perms::WRITE, kernel.write);
    perms.set(Perms::EXEC, kernel.execute);
    perms.set(Perms::USER_READ, user.read);
    perms.set(Perms::USER_WRITE, user.write);
    perms.set(Perms::USER_EXEC, user.execute);
    perms
}

/// Returns the meaning of an index of a memory type in the registers as this crate has them loaded;
/// `None` where it has no word.
pub fn memory<F: Decoded>(index: u8) -> Option<Memory> {
    use Memory::{Device, DeviceStrict, NonCacheable, Normal, Tagged, WriteThrough};
    match F::REGIME {
        // MemAttr. What the engine never writes has no word: mixtures, other devices, what stage 1
        // says.
        walker::Regime::Arm64Stage2 { forced_write_back, .. } => {
            return match (index, forced_write_back) {
                (0b0000, _) => Some(DeviceStrict),
                (0b0001, _) => Some(Device),
                (0b0101, _) => Some(NonCacheable),
                (0b0110, true) | (0b1111, false) => Some(Normal),
                (0b1010, false) => Some(WriteThrough),
                _ => None,
            };
        }
        walker::Regime::Riscv { .. } => {
            return [Some(Normal), Some(NonCacheable), Some(Device)]
                .get(usize::from(index))
                .copied()?;
        }
        walker::Regime::Ept { .. } => {
            return match index {
                0 => Some(Device),
                1 => Some(NonCacheable),
                4 => Some(WriteThrough),
                6 => Some(Normal),
                _ => None,
            };
        }
        _ => {}
    }
    let types = match is_arm::<F>() {
        true => [
            Some(Normal),
            Some(Device),
            Some(NonCacheable),
            Some(DeviceStrict),
            Some(Tagged),
            Some(WriteThrough),
            None,
            None,
        ],
        // UC- (2 and 6) is uncacheable where no MTRR says otherwise; write-protected (5) is what we
        // do not use.
        false => [
            Some(Normal),
            Some(NonCacheable),
            Some(Device),
            Some(Device),
            Some(Normal),
            None,
            Some(Device),
            Some(WriteThrough),
        ],
    };
    types[usize::from(index)]
}

/// A leaf of the table in the words of the engine. They are those of a kernel that has hardware
/// record writes (arm64) or runs with SMEP (x86-64), neither of which the table assumes.
pub fn in_words<F: Decoded>(leaf: &walker::Leaf, others: u64) -> Attrs {
    // The type is compared by `memory`.
    let memory = match F::REGIME {
        walker::Regime::Arm64Stage2 { .. } => 1,
        _ => 0,
    };
    let plain = walker::Leaf { memory, ..*leaf };
    let mut attrs = words::<F>(&plain);
    if F::HALVES && attrs.perms.contains(Perms::USER_WRITE) {
        // DDI 0487 D8.5.2.2: what the user may write is not executed by the privileged, be it clean
        // or dirty.
        attrs.perms -= Perms::EXEC;
    }
    attrs.native = (u64::from(leaf.key) << 59 | others) & F::NATIVE;
    attrs
}

pub fn every_row_by_hand_means_what_the_manual_says<F: Decoded>() {
    let mut rows = 0;
    for row in table::rows().filter(|row| table::holds(row, F::REGIME)) {
        let &(_, level, raw, _) = row;
        let level = level_of::<F>(level);
        match table::means(row) {
            table::Means::Invalid => match F::kind(raw, level) {
                Kind::Invalid => {}
                // It may look like one that is parked.
                Kind::Leaf => assert!(F::is_parked(raw), "{row:x?}"),
                Kind::Table => panic!("{row:x?}"),
            },
            table::Means::Table { pa, takes } => {
                assert_eq!(F::kind(raw, level), Kind::Table, "{row:x?}");
                assert_eq!(F::address(raw, level), Pa::new(pa), "{row:x?}");
                // To the engine what EL2 loses the user loses, which there is none of.
                let takes = match is_el2::<F>() {
                    true => perms(takes).and_user(),
                    false => perms(takes),
                };
                assert_eq!(F::denied(raw), takes, "{row:x?}");
            }
            table::Means::Leaf { leaf, .. } if leaf.contiguous && is_riscv::<F>() => {
                assert_eq!(F::kind(raw, level), Kind::Invalid, "{row:x?}");
                assert_eq!(F::absence(raw), Absence::Frozen, "not to be touched: {row:x?}");
            }
            table::Means::Leaf { leaf, others } => {
                assert_eq!(F::kind(raw, level), Kind::Leaf, "{row:x?}");
                assert_eq!(F::address(raw, level), Pa::new(leaf.pa), "{row:x?}");
                assert_eq!(1 << F::shift(level), leaf.size, "{row:x?}");
                let found = F::decode(raw, level);
                let expected = Attrs {
                    memory: memory::<F>(leaf.memory).unwrap_or(found.memory),
                    ..in_words::<F>(&leaf, others)
                };
                assert_eq!(found, expected, "{row:x?}");
                assert_eq!(F::restricted(raw, level, Perms::empty()), raw, "{row:x?}");
                let meaning = F::meaning(raw);
                assert_eq!(F::decode_meaning(meaning, level), expected, "{row:x?}");
                if let Ok(page) = F::encode(&expected, Level::PAGE)
                    && F::is_single_page(page)
                {
                    assert_eq!(F::meaning(page), page, "{row:x?}");
                }
                assert_eq!(raw & F::CONTIGUOUS != 0, leaf.contiguous, "{row:x?}");
                let run = leaf.size << F::contiguous(level);
                assert!(!leaf.contiguous || leaf.run_size == run, "{row:x?}");
            }
            // What the architecture reserves the engine neither writes nor judges, but for a block
            // among pages.
            table::Means::Reserved(rule)
                if is_arm::<F>() && level == Level::PAGE && rule.starts_with("a block") =>
            {
                assert_eq!(F::kind(raw, level), Kind::Invalid, "{row:x?}");
            }
            table::Means::Reserved(_) => {}
        }
        rows += 1;
    }
    assert!(rows >= 8, "{}: {rows}", F::NAME);
}

pub fn a_leaf_by_hand_permits_what_the_tables_above_it_leave<F: Decoded>() {
    let of = table::rows_of(F::REGIME);
    for row in table::UNDER.iter().filter(|row| row.0 == of) {
        let &(_, tables, level, raw, permitted) = row;
        let denied = tables.iter().fold(Perms::empty(), |denied, &table| denied | F::denied(table));
        let mut expected = perms(table::access(permitted));
        if !F::HALVES && !is_guest::<F>() && !is_riscv::<F>() && expected.contains(Perms::USER_READ)
        {
            // SMEP, which the table does not assume.
            expected -= Perms::EXEC;
        }
        let level = level_of::<F>(level);
        let below = F::decode_meaning(F::restricted(F::meaning(raw), level, denied), level);
        let all_else = F::decode(raw, level).with_perms(expected);
        assert_eq!(below, all_else, "{row:x?}");
    }
}

pub fn hardware_writes_what_the_rows_by_hand_say<F: Decoded>() {
    let of = table::rows_of(F::REGIME);
    for row in table::WRITTEN.iter().filter(|row| row.0 == of) {
        let &(_, number, raw, used, written) = row;
        if is_arm::<F>() && number < F::REGIME.start_level() {
            continue;
        }
        let level = level_of::<F>(number);
        // The engine is asked about leaves.
        let found = walker::decode(F::REGIME, number, 0, walker::Denied::NONE, raw);
        if !matches!(found, walker::Descriptor::Leaf(_)) {
            continue;
        }
        for (hardware_access, hardware_dirty, expected) in
            [(true, false, used.is_some()), (false, true, written.is_some())]
        {
            let caps = Caps { hardware_access, hardware_dirty, ..Caps::CONSERVATIVE };
            assert_eq!(F::hardware_writes(raw, level, &caps), expected, "{row:x?}");
        }
    }
}

#[test]
fn rows_by_hand_are_what_is_parked() {
    let none = |attrs: Attrs| attrs.with_perms(Perms::empty());
    let marked = none(Attrs { software: 5, ..Attrs::USER_DATA });
    let clean = Attrs { dirty: false, ..marked };
    let kernel = none(Attrs::KERNEL_DATA);
    // Stage 1: UXN, PXN, nG, AF, inner shareable, AP[2] read only, bit 1, bit 55 for dirty. EL2:
    // XN, AP[1] in the place of nG.
    check_encoded::<Arm64K4>(&[
        (marked, 0, 0x05e0_0000_0000_0f82),
        (marked, 1, 0x05e0_0000_0000_0f82),
        (clean, 0, 0x0560_0000_0000_0f82),
        (kernel, 0, 0x00e0_0000_0000_0782),
    ]);
    check_encoded::<Arm64El2<12, 48>>(&[(kernel, 0, 0x00c0_0000_0000_07c2)]);
    // Stage 2: XN[1], AF, inner shareable, write-back, bit 1.
    check_encoded::<Stage2<12, 40>>(&[(marked, 0, 0x05c0_0000_0000_073e)]);
    // XD, bit 53 for dirty, software, accessed, the mark at R/W; PS of a block. The address is all
    // ones without one.
    check_encoded::<X86_64<4>>(&[
        (marked, 0, 0x802f_ffff_ffff_fa22),
        (clean, 0, 0x800f_ffff_ffff_fa22),
        (marked, 1, 0x802f_ffff_ffe0_0aa2),
        (kernel, 2, 0x802f_ffff_c000_01a2),
    ]);
    check_encoded::<Npt<4>>(&[(marked, 0, 0x802f_ffff_ffff_fa22)]);
    // Software, bit 11, dirty, accessed, write-back.
    check_encoded::<Ept<4>>(&[
        (marked, 0, 0x005f_ffff_ffff_fb30),
        (marked, 1, 0x005f_ffff_ffe0_0bb0),
    ]);
}

/// Encodes, and compares with what was worked out by hand from the manuals.
fn check_encoded<F: Format>(rows: &[(Attrs, u8, u64)]) {
    for &(attrs, height, descriptor) in rows {
        let encoded = F::encode(&attrs, Level::new(height));
        assert_eq!(encoded, Ok(descriptor), "{}: {attrs:?}", F::NAME);
    }
}

#[test]
fn rows_by_hand_are_what_stage_2_encodes() {
    const ALL: Attrs = Attrs::GUEST_MEMORY;
    const READ: Perms = Perms::READ.and_user();
    let clean = Attrs { dirty: false, ..ALL };
    let unused = Attrs { accessed: false, ..ALL };
    let marked = Attrs { software: 5, ..ALL };
    let shared = |shareability| Attrs { shareability, ..ALL };
    let kernel_text = ALL.with_perms(READ | Perms::EXEC);
    check_encoded::<Stage2<12, 40>>(&[
        (ALL, 0, 0x0008_0000_0000_07ff),
        (ALL, 1, 0x0008_0000_0000_07fd),
        // XN 10, 01, 11; bit 55 for what was written and cannot be any more.
        (Attrs::USER_DATA, 0, 0x0048_0000_0000_07ff),
        (Attrs::USER_TEXT, 0, 0x0020_0000_0000_077f),
        (kernel_text, 0, 0x00e0_0000_0000_077f),
        (Attrs::USER_RODATA, 0, 0x0040_0000_0000_077f),
        (clean, 0, 0x0008_0000_0000_077f),
        (unused, 0, 0x0008_0000_0000_03ff),
        (marked, 0, 0x0508_0000_0000_07ff),
        (shared(Shareability::Outer), 0, 0x0008_0000_0000_06ff),
        (shared(Shareability::Non), 0, 0x0008_0000_0000_04ff),
        (Attrs::GUEST_DEVICE, 0, 0x0048_0000_0000_07c7),
        (ALL.with_memory(Memory::DeviceStrict), 0, 0x0008_0000_0000_07c3),
        (ALL.with_memory(Memory::NonCacheable), 0, 0x0008_0000_0000_07d7),
        (ALL.with_memory(Memory::WriteThrough), 0, 0x0008_0000_0000_07eb),
    ]);
    check_encoded::<Stage2<12, 48, false, true>>(&[
        (ALL, 0, 0x0008_0000_0000_07db),
        (ALL.with_memory(Memory::NonCacheable), 0, 0x0008_0000_0000_07d7),
        (Attrs::GUEST_DEVICE, 0, 0x0048_0000_0000_07c7),
    ]);
    check_encoded::<Stage2<12, 52, true>>(&[(ALL, 0, 0x0008_0000_0000_04ff)]);
    check_encoded::<Ept<4>>(&[
        (ALL, 0, 0x337),
        (ALL, 1, 0x3b7),
        (Attrs::USER_DATA, 0, 0x333),
        (Attrs::USER_RODATA, 0, 0x131),
        (clean, 0, 0x137),
        (unused, 0, 0x237),
        (marked, 0, 0x0050_0000_0000_0337),
        (Attrs::GUEST_DEVICE, 0, 0x303),
        (ALL.with_memory(Memory::NonCacheable), 0, 0x30f),
        (ALL.with_memory(Memory::WriteThrough), 0, 0x327),
    ]);
    check_encoded::<Ept<5, true>>(&[
        (ALL, 0, 0x737),
        (kernel_text, 0, 0x335),
        (Attrs::USER_TEXT, 0, 0x531),
    ]);
    check_encoded::<Npt<4>>(&[
        (ALL, 0, 0x67),
        (ALL, 1, 0xe7),
        (Attrs::USER_DATA, 0, 0x8000_0000_0000_0067),
        (Attrs::USER_RODATA, 0, 0x8000_0000_0000_0025),
        (clean, 0, 0x27),
        (Attrs::GUEST_DEVICE, 0, 0x8000_0000_0000_007f),
    ]);
}

/// PRIV 10.3.1, 10.3.2: bits 5:0 of an entry, of a table of pages and of one above it.
#[test]
fn the_low_bits_of_riscv_say_what_an_entry_is() {
    use tablewright::format::Sv39;
    let table = Sv39::<true>::table(Pa::new(0x1000), Perms::empty());
    let protected = Sv39::<true>::protect_table(table);
    for low in 0..64u64 {
        let entry = 0x1000 >> 2 | low;
        let [is_valid, read, write, execute, user] = [0, 1, 2, 3, 4].map(|bit| low >> bit & 1 != 0);
        let leaf = match (is_valid, read || execute, write && !read) {
            (true, true, false) => Kind::Leaf,
            _ => Kind::Invalid,
        };
        assert_eq!(Sv39::<true>::kind(entry, Level::PAGE), leaf, "{low:#b}");
        let is_table =
            is_valid && !(read || write || execute || user) || entry & 0x1f == protected & 0x1f;
        let above = if is_table { Kind::Table } else { leaf };
        assert_eq!(Sv39::<true>::kind(entry, Level::new(1)), above, "{low:#b}");
        let below = Sv39::<true>::table_below(entry, Level::new(1));
        assert_eq!(below, is_table.then_some(Pa::new(0x1000)), "{low:#b}");
    }
    // To hardware it is nothing.
    assert_eq!(protected & 1, 0);
}

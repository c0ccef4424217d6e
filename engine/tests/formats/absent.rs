//! Entries that are not valid: parked leaves, and suspended and frozen entries.

use super::*;

/// Checks an entry that is not valid: what it tells, to the engine and to the walker, and what it
/// names.
pub fn check_mark<F: Decoded>(entry: u64, absence: Absence, frame: Option<Pa>, level: Level) {
    assert_eq!(F::kind(entry, level), Kind::Invalid, "{}: {entry:#x}", F::NAME);
    assert_eq!(F::absence(entry), absence, "{}: {entry:#x}", F::NAME);
    let found = walk::<F>(entry, level);
    assert!(matches!(found, Err(Fault::NotMapped { .. })), "{found:?}");
    if !is_arm::<F>() && !is_riscv::<F>() {
        // The L1 terminal fault: the address is that of no memory, the inverse of one or all ones.
        let field = 0x000f_ffff_ffff_f000;
        let named = !entry & field;
        // Below the address of a large page there are attributes.
        let large = field & ((1 << F::OUTPUT_BITS) - 1) & (u64::MAX << F::shift(level));
        assert!(
            frame.is_none_or(|frame| named & large == frame.get() & large),
            "{}: {entry:#x}",
            F::NAME
        );
        assert!(frame.is_some() || named == 0, "{}: {entry:#x}", F::NAME);
    }
    if matches!(F::REGIME, walker::Regime::Ept { .. }) {
        assert!(entry >> 63 == 1, "a guest hears of it: {entry:#x}");
    }
}

/// Checks a leaf that permits nothing: to the walker nothing is mapped, and an editor finds all of
/// it.
pub fn check_parked<F: Decoded>(leaf: u64, frame: Pa, level: Level) {
    let name = F::NAME;
    assert_eq!(F::kind(leaf, level), Kind::Leaf, "{name}: {leaf:#x}");
    assert!(F::is_parked(leaf), "{name}: {leaf:#x}");
    assert!(!F::is_single_page(leaf), "{name}: {leaf:#x}");
    assert_eq!(F::address(leaf, level), frame, "{name}: {leaf:#x}");
    assert_eq!(State::of::<F>(leaf, level), State::Absent);
    let found = walk::<F>(leaf, level);
    assert!(matches!(found, Err(Fault::NotMapped { .. })), "{name}: {leaf:#x}: {found:?}");
    if !is_arm::<F>() && !is_riscv::<F>() {
        // As of other entries that are not present, for the L1 terminal fault.
        let all = ((1 << F::OUTPUT_BITS) - 1) & 0x000f_ffff_ffff_f000;
        let field = all & (u64::MAX << F::shift(level));
        assert_eq!(!leaf & field, frame.get() & field, "{name}: {leaf:#x}");
    }
    let caps = Caps { hardware_access: true, hardware_dirty: true, ..Caps::CONSERVATIVE };
    assert!(!F::hardware_writes(leaf, level, &caps), "{name}: {leaf:#x}");
}

pub fn a_parked_leaf_keeps_everything_and_comes_back<F: Decoded>() {
    for level in leaf_levels::<F>() {
        let frames = frames(F::shift(level), F::OUTPUT_BITS);
        let mut number = 0;
        each_attrs(&[0, most_software::<F>()], |attrs| {
            let parked = attrs.with_perms(Perms::empty());
            let (Ok(valid), Ok(bits)) = (F::encode(&attrs, level), F::encode(&parked, level))
            else {
                return;
            };
            number += 1;
            let frame = frames[number % frames.len()];
            for mark in [0, F::CONTIGUOUS] {
                for native in [0, F::NATIVE] {
                    let leaf = F::with_address(bits, frame) | mark | native;
                    check_parked::<F>(leaf, frame, level);
                    let attrs = Attrs { native, ..attrs };
                    let kept = F::decode(leaf, level);
                    assert_eq!(kept, attrs.with_perms(Perms::empty()), "{leaf:#x}");
                    assert_eq!(leaf & F::CONTIGUOUS, mark, "{leaf:#x}");
                    // What flips between the two is the same for every frame.
                    let back = F::with_address(valid, frame) | mark | native;
                    let flip =
                        F::with_address(bits, Pa::new(0)) ^ F::with_address(valid, Pa::new(0));
                    assert_eq!(leaf ^ flip, back, "{leaf:#x}");
                    assert_eq!(F::decode(back, level), attrs, "{back:#x}");
                    let is_absent = State::of::<F>(back, level) == State::Absent;
                    assert_eq!(is_absent, attrs.perms.is_empty(), "{back:#x}");
                }
            }
        });
        assert!(number > 100, "{}: {number}", F::NAME);
    }
}

/// Checks that a valid entry can be suspended.
pub fn check_marks<F: Decoded>(entry: u64, frame: Pa, level: Level) {
    let suspended = F::suspend(entry);
    check_mark::<F>(suspended, Absence::Suspended, Some(frame), level);
    assert_eq!(F::resume(suspended), entry, "{}: {entry:#x}", F::NAME);
}

pub fn a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything<F: Decoded>() {
    for level in leaf_levels::<F>() {
        let frames = frames(F::shift(level), F::OUTPUT_BITS);
        let mut number = 0;
        each_attrs(&[0, most_software::<F>()], |attrs| {
            let Ok(bits) = F::encode(&attrs, level) else {
                return;
            };
            if attrs.perms.is_empty() {
                return; // not valid as it is
            }
            // One frame after the other.
            number += 1;
            let frame = frames[number % frames.len()];
            for mark in [0, F::CONTIGUOUS] {
                for native in [0, F::NATIVE] {
                    let leaf = bits | F::put_address(frame) | mark | native;
                    check_marks::<F>(leaf, frame, level);
                }
            }
        });
    }
}

pub fn a_frozen_entry_is_invalid_and_nothing_else<F: Decoded>() {
    for level in levels::<F>() {
        let tags = (0..64).flat_map(|bit| [1u64 << bit, !(1 << bit), u64::MAX << bit]);
        let frozen = tags.chain([0]).map(F::frozen);
        for frozen in frozen.chain([F::FROZEN]) {
            check_mark::<F>(frozen, Absence::Frozen, None, level);
        }
    }
    // Where it tells whose it is, no two of 44 bits are alike.
    let tags = (0..44).map(|bit| F::frozen(1 << bit));
    let different: std::collections::HashSet<u64> = tags.chain([F::frozen(0)]).collect();
    assert_eq!(different.len(), if F::RULE.tags_invalid_entries { 45 } else { 1 });
    assert_eq!(F::absence(0), Absence::Hole);
}

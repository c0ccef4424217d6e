//! Features of x86-64 processors, as CPUID and the VMX capabilities name them.

use tablewright::Level;
use tablewright::arch::x86_64::{EptFeatures, Features};

type Leaves<'a> = &'a [(u32, [u32; 4])];

fn features(leaves: Leaves<'_>) -> Features {
    Features::from_cpuid(|leaf, sub| {
        let found = leaves.iter().find(|one| one.0 == leaf && sub == 0);
        found.map_or([0; 4], |one| one.1)
    })
}

const BASIC: (u32, [u32; 4]) = (0, [7, 0, 0, 0]);
const EXTENDED: (u32, [u32; 4]) = (0x8000_0000, [0x8000_0008, 0, 0, 0]);

#[test]
fn bits_stand_where_the_manual_says() {
    let none = Features { global: false, ..Features::LEAST };
    let with = |leaf: u32, registers: [u32; 4]| features(&[BASIC, EXTENDED, (leaf, registers)]);
    assert_eq!(features(&[BASIC, EXTENDED]), none);
    for (leaf, registers, expected) in [
        (1, [0, 0, 1 << 17, 0], Features { pcid: true, ..none }),
        (1, [0, 0, 0, 1 << 13], Features { global: true, ..none }),
        (7, [0, 1 << 10, 0, 0], Features { invpcid: true, ..none }),
        (7, [0, 1 << 7, 0, 0], Features { smep: true, ..none }),
        (7, [0, 0, 1 << 16, 0], Features { five_levels: true, ..none }),
        (0x8000_0001, [0, 0, 0, 1 << 26], Features { gigabyte_pages: true, ..none }),
        (0x8000_0001, [0, 0, 0, 1 << 20], Features { no_execute: true, ..none }),
        (0x8000_0008, [0x392e, 0, 0, 0], Features { physical_bits: 46, ..none }),
        (0x8000_0008, [0, 1 << 3, 0, 0x0001_0007], Features { invlpgb: Some(7), ..none }),
        (0x8000_0008, [0, 0, 0, 7], none),
    ] {
        assert_eq!(with(leaf, registers), expected);
    }
}

#[test]
fn a_leaf_beyond_the_last_says_nothing() {
    let all = [u32::MAX; 4];
    let most = (0, [6, 0, 0, 0]);
    let most_extended = (0x8000_0000, [0x8000_0001, 0, 0, 0]);
    let found = features(&[most, (7, all), most_extended, (0x8000_0008, all)]);
    let none = Features { global: false, ..Features::LEAST };
    assert_eq!(found, none);
}

// An interpreter has no CPUID.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[test]
fn this_computer_runs_in_64_bit_mode() {
    let here = Features::read();
    assert!(here.global && here.no_execute && here.physical_bits >= 36);
}

#[test]
fn the_engine_is_told_of_large_pages_and_of_flags() {
    for (gigabyte_pages, height) in [(false, 1), (true, 2)] {
        let features = Features { gigabyte_pages, ..Features::LEAST };
        assert_eq!(features.caps().largest_leaf, Level::new(height));
    }
    for (bits, height) in [(0, 0), (1 << 16, 1), (3 << 16, 2)] {
        assert_eq!(EptFeatures(bits).caps().largest_leaf, Level::new(height));
    }
    for (bits, flags) in [(0, false), (1 << 21, true)] {
        let caps = EptFeatures(bits).caps();
        assert_eq!((caps.hardware_access, caps.hardware_dirty), (flags, flags));
    }
    assert!(EptFeatures(1 << 7).has_levels(5) && !EptFeatures(1 << 7).has_levels(4));
}

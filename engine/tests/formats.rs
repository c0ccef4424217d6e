//! Descriptors: every combination of attributes, every bit of an address, and rows written by hand from the manuals.
//!
//! What a format accepts it has to give back; what it refuses is listed here in the words of its documentation, and is
//! exactly that. The separate walker decodes every descriptor as well, at its place in a tree, and has to agree.

mod common;

use common::{Judged, words};
use tablewright::format::{
    Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64, Arm64K64Wide, X86_64,
};
use tablewright::{Attrs, Caps, Format, Kind, Level, Memory, Pa, Perms, Shareability};
use tablewright_walker as walker;
use walker::Fault;

const MEMORY: [Memory; 6] = [
    Memory::Normal,
    Memory::WriteThrough,
    Memory::NonCacheable,
    Memory::Device,
    Memory::DeviceStrict,
    Memory::Tagged,
];
const SHAREABILITY: [Shareability; 3] =
    [Shareability::Non, Shareability::Outer, Shareability::Inner];

/// Every combination of what formats have in common, with these software bits.
fn each_attrs(software: &[u8], mut visit: impl FnMut(Attrs)) {
    for perms in 0..64 {
        for memory in MEMORY {
            for shareability in SHAREABILITY {
                for flags in 0..8 {
                    for &software in software {
                        visit(Attrs {
                            perms: Perms::from_bits_retain(perms),
                            memory,
                            shareability,
                            global: flags & 1 != 0,
                            accessed: flags & 2 != 0,
                            dirty: flags & 4 != 0,
                            software,
                            native: 0,
                        });
                    }
                }
            }
        }
    }
}

fn levels<F: Judged>() -> impl Iterator<Item = Level> {
    (0..F::LEVELS).map(Level::new)
}

fn leaf_levels<F: Judged>() -> impl Iterator<Item = Level> {
    levels::<F>().filter(|&level| F::is_leaf_level(level))
}

/// The walker's number of a level: arm64 counts up to 3, x86-64 down to 1.
fn number<F: Judged>(level: Level) -> i8 {
    let height = level.height() as i8;
    match F::HALVES {
        true => F::REGIME.last_level() - height,
        false => F::REGIME.last_level() + height,
    }
}

/// Walks to a descriptor that stands at `level` and translates address 0, through tables that deny nothing.
fn walk<F: Judged>(descriptor: u64, level: Level) -> Result<walker::Leaf, Fault> {
    // The table at height h lies at (h + 1) << 20.
    let mut read = |table: u64, _: usize| {
        let height = (table >> 20) - 1;
        if height == u64::from(level.height()) {
            descriptor
        } else if F::HALVES {
            height << 20 | 3
        } else {
            height << 20 | 7
        }
    };
    walker::translate(F::REGIME, u64::from(F::LEVELS) << 20, 0, &mut read)
}

/// What the two architectures cannot hold, from the documentation of the formats.
fn refused<F: Judged>(attrs: &Attrs) -> bool {
    let has = |perms: Perms| attrs.perms.contains(perms);
    // One U/S bit or AP[1], one bit for writing: the privileged read always; the user reads what he writes; both
    // write, or neither.
    let unreadable = !has(Perms::READ);
    let user_writes_only = has(Perms::USER_WRITE) && !has(Perms::USER_READ);
    let software = attrs.software > 7;
    let native = attrs.native & !F::NATIVE != 0;
    if F::HALVES {
        // Execution is a right of its own, but what the user can write the privileged never executes.
        let open = has(Perms::USER_READ) || has(Perms::USER_WRITE);
        let one_writes = open && has(Perms::WRITE) != has(Perms::USER_WRITE);
        let executes_foreign = has(Perms::USER_WRITE | Perms::EXEC);
        // With LPA2 the bits of shareability are address.
        let lpa2 = F::OUTPUT_BITS == 52 && F::PAGE_SHIFT < 16;
        let shared = lpa2 && attrs.shareability != Shareability::Inner;
        unreadable
            || user_writes_only
            || one_writes
            || executes_foreign
            || shared
            || software
            || native
    } else {
        let user = attrs.perms.intersects(Perms::ANY_USER);
        let blind = user && !has(Perms::USER_READ);
        let one_writes = user && has(Perms::WRITE) != has(Perms::USER_WRITE);
        // SMEP: what belongs to the user the privileged never execute.
        let executes_foreign = user && has(Perms::EXEC);
        let memory = matches!(attrs.memory, Memory::DeviceStrict | Memory::Tagged);
        let shared = attrs.shareability != Shareability::Inner;
        unreadable
            || blind
            || one_writes
            || executes_foreign
            || memory
            || shared
            || software
            || native
    }
}

fn what_is_encoded_is_decoded_again_and_the_walker_agrees<F: Judged>() {
    for level in leaf_levels::<F>() {
        let (mut held, mut seen) = (0, std::collections::HashSet::new());
        let frame = Pa::new(1 << F::shift(level));
        each_attrs(&[0, 1, 2, 4, 7, 8], |attrs| {
            let encoded = F::encode(&attrs, level);
            assert_eq!(
                encoded.is_err(),
                refused::<F>(&attrs),
                "{}: {attrs:?}",
                F::NAME
            );
            let Ok(bits) = encoded else { return };
            held += 1;
            assert!(seen.insert(bits), "two combinations have one descriptor");
            let leaf = bits | F::put_address(frame);
            assert_eq!(F::kind(leaf, level), Kind::Leaf);
            assert_eq!(F::decode(leaf, level), attrs, "{}: {leaf:#x}", F::NAME);
            assert_eq!(F::address(leaf, level), frame);
            assert_eq!(
                bits & F::address_mask(level),
                0,
                "attributes in the address"
            );
            assert_eq!(bits & F::CONTIGUOUS, 0);
            let found = walk::<F>(leaf, level).unwrap_or_else(|fault| panic!("{fault}"));
            assert_eq!(words(F::REGIME, &found), attrs, "{}: {leaf:#x}", F::NAME);
            assert_eq!((found.pa, found.size), (frame.get(), 1 << F::shift(level)));
        });
        assert!(held > 500, "{}: {held}", F::NAME);
    }
}

fn native_bits_stand_where_they_are_given<F: Judged>() {
    for level in leaf_levels::<F>() {
        let base = F::encode(&Attrs::USER_DATA, level).unwrap();
        // Each subset of the format's own bits; each single bit that is none of them.
        let bits: Vec<u64> = (0..64).map(|bit| 1 << bit).collect();
        let own: Vec<u64> = bits
            .iter()
            .copied()
            .filter(|bit| F::NATIVE & bit != 0)
            .collect();
        for subset in 0..1u64 << own.len() {
            let native = own
                .iter()
                .enumerate()
                .filter(|(number, _)| subset >> number & 1 != 0)
                .fold(0, |sum, (_, bit)| sum | bit);
            let attrs = Attrs {
                native,
                ..Attrs::USER_DATA
            };
            assert_eq!(F::encode(&attrs, level), Ok(base | native));
            assert_eq!(F::decode(base | native, level), attrs);
        }
        for bit in bits.iter().filter(|&bit| F::NATIVE & bit == 0) {
            let attrs = Attrs {
                native: *bit,
                ..Attrs::USER_DATA
            };
            assert!(F::encode(&attrs, level).is_err(), "{}: {bit:#x}", F::NAME);
        }
        // No attribute uses a bit that is the embedder's.
        each_attrs(&[7], |attrs| {
            if let Ok(bits) = F::encode(&attrs, level) {
                assert_eq!(bits & F::NATIVE, 0);
            }
        });
    }
}

fn no_leaf_is_encoded_where_the_walker_knows_none<F: Judged>() {
    for level in levels::<F>() {
        let encoded = F::encode(&Attrs::KERNEL_DATA, level);
        assert_eq!(encoded.is_ok(), F::is_leaf_level(level));
        // What a leaf would look like there: arm64 a block, or a page; x86-64 PS, or a page.
        let leaf = match (F::HALVES, level == Level::PAGE) {
            (true, true) => 0x703,
            (true, false) => 0x701,
            (false, true) => 0x63,
            (false, false) => 0xe3,
        };
        // With LPA2 bits 9:8 are address, of a block as of a page.
        let leaf = if F::HALVES && F::OUTPUT_BITS == 52 && F::PAGE_SHIFT < 16 {
            leaf & !0x300
        } else {
            leaf
        };
        let known = match walk::<F>(leaf, level) {
            Ok(_) => true,
            Err(Fault::Reserved(_)) => false,
            Err(fault) => panic!("{fault}"),
        };
        assert_eq!(known, F::is_leaf_level(level), "{} at {level:?}", F::NAME);
    }
    // The other end of the contract: nothing above the root.
    assert!(!F::is_leaf_level(F::root_level()) || F::PAGE_SHIFT == 16 && F::OUTPUT_BITS == 52);
}

fn the_shape_is_that_of_the_walker<F: Judged>() {
    assert_eq!(F::PAGE_SHIFT, F::REGIME.page_shift());
    assert_eq!(F::INPUT_BITS, F::REGIME.input_bits());
    assert_eq!(number::<F>(F::root_level()), F::REGIME.start_level());
    for level in levels::<F>() {
        let number = number::<F>(level);
        assert_eq!(
            F::entries(level),
            F::REGIME.table_entries(number),
            "{}",
            F::NAME
        );
        assert_eq!(1u64 << F::shift(level), F::REGIME.entry_size(number));
        let run = F::REGIME.run_entries(number);
        assert_eq!(
            1usize << F::contiguous(level),
            run,
            "{} at {level:?}",
            F::NAME
        );
        if run > 1 {
            assert!(F::is_leaf_level(level));
        }
    }
}

fn an_address_goes_to_the_entry_that_the_walker_reads<F: Judged>() {
    let mut inputs = vec![0u64, u64::MAX];
    for bit in 0..64 {
        inputs.extend([
            1u64 << bit,
            !(1u64 << bit),
            (1u64 << bit).wrapping_sub(1),
            u64::MAX << bit,
        ]);
    }
    let mut canonical = 0;
    for input in inputs {
        let mut path = Vec::new();
        let mut read = |table: u64, index: usize| {
            let height = (table >> 20) - 1;
            path.push((height, index));
            // Tables all the way, and nothing in the last.
            match height {
                0 => 0,
                _ if F::HALVES => height << 20 | 3,
                _ => height << 20 | 7,
            }
        };
        let fault = walker::translate(F::REGIME, u64::from(F::LEVELS) << 20, input, &mut read);
        let known = fault != Err(Fault::NonCanonical);
        assert_eq!(F::is_canonical(input), known, "{}: {input:#x}", F::NAME);
        if known {
            canonical += 1;
            assert_eq!(path.len(), usize::from(F::LEVELS));
            for (height, index) in path {
                let level = Level::new(height as u8);
                assert_eq!(F::index(input, level), index, "{}: {input:#x}", F::NAME);
            }
        }
    }
    assert!(canonical > 100);
}

/// Frames that a leaf or a table could have: each bit by itself, each bit missing, all and none.
fn frames(low: u32, high: u32) -> Vec<Pa> {
    let all = ((1u64 << (high - low)) - 1) << low;
    let mut frames = vec![0, all];
    for bit in low..high {
        frames.extend([1 << bit, all & !(1 << bit)]);
    }
    frames.into_iter().map(Pa::new).collect()
}

fn every_bit_of_an_address_has_its_place<F: Judged>() {
    for level in levels::<F>() {
        // Leaves with everything set and with nothing set beside the address.
        let full = Attrs {
            native: F::NATIVE,
            software: 7,
            ..Attrs::USER_DATA
        };
        let plain = Attrs {
            accessed: false,
            dirty: false,
            ..Attrs::KERNEL_TEXT
        };
        if F::is_leaf_level(level) {
            let mut union = 0;
            for attrs in [full, plain] {
                let bits = F::encode(&attrs, level).unwrap();
                for frame in frames(F::shift(level), F::OUTPUT_BITS) {
                    let leaf = bits | F::put_address(frame);
                    union |= F::put_address(frame);
                    assert_eq!(F::address(leaf, level), frame, "{}: {leaf:#x}", F::NAME);
                    assert_eq!(F::decode(leaf, level), attrs, "{}: {leaf:#x}", F::NAME);
                    let found = walk::<F>(leaf & !F::NATIVE, level).unwrap();
                    assert_eq!(found.pa, frame.get(), "{}: {leaf:#x}", F::NAME);
                }
            }
            assert_eq!(union, F::address_mask(level), "{} at {level:?}", F::NAME);
        }
        let Some(below) = level.down() else { continue };
        for frame in frames(F::PAGE_SHIFT, F::OUTPUT_BITS) {
            for deny in [
                Perms::empty(),
                Perms::EXEC,
                Perms::USER_EXEC,
                Perms::ANY_EXEC,
            ] {
                let table = F::table(frame, deny);
                assert_eq!(F::kind(table, level), Kind::Table);
                assert_eq!(F::address(table, level), frame, "{}: {table:#x}", F::NAME);
                // arm64 denies each by itself, x86-64 both or neither.
                let expected = match (F::HALVES, deny == Perms::ANY_EXEC) {
                    (true, _) | (false, true) => deny,
                    (false, false) => Perms::empty(),
                };
                assert_eq!(F::denied(table), expected);
                let suspended = F::suspend(table);
                assert_eq!(F::kind(suspended, level), Kind::Invalid);
                assert!(suspended != 0);
                assert_eq!(F::resume(suspended), table, "{}", F::NAME);

                // The walker goes there, and takes away what is denied: from a page of user code in it, or below
                // further tables, which stand at `BELOW`.
                const BELOW: u64 = 1 << 40;
                if frame.get() == BELOW {
                    continue;
                }
                let page = F::encode(&Attrs::USER_TEXT, Level::PAGE).unwrap();
                let to = |height: u64| F::table(Pa::new(BELOW | height << 20), Perms::empty());
                let top = u64::from(F::LEVELS) << 20;
                let mut passed = false;
                let mut read = |at: u64, _: usize| {
                    if passed {
                        let height = match at == frame.get() {
                            true => u64::from(below.height()),
                            false => at >> 20 & 0xf,
                        };
                        return if height == 0 { page } else { to(height - 1) };
                    }
                    let height = (at >> 20) - 1;
                    passed = height == u64::from(level.height());
                    match (passed, F::HALVES) {
                        (true, _) => table,
                        (false, true) => height << 20 | 3,
                        (false, false) => height << 20 | 7,
                    }
                };
                let leaf = walker::translate(F::REGIME, top, 0, &mut read).unwrap();
                assert_eq!(
                    leaf.access.user.execute,
                    !expected.contains(Perms::USER_EXEC),
                    "{}: {table:#x}",
                    F::NAME
                );
            }
        }
    }
}

fn descriptors_of_consecutive_frames_differ_by_the_size_of_one<F: Judged>() {
    for level in leaf_levels::<F>() {
        let size = 1u64 << F::shift(level);
        for bit in F::shift(level)..F::OUTPUT_BITS {
            let next = 1u64 << bit;
            let here = next - size;
            let step = F::put_address(Pa::new(next)).wrapping_sub(F::put_address(Pa::new(here)));
            // The carry goes into bit `bit`; from `LINEAR_BITS` on the address stands elsewhere.
            assert_eq!(
                step == size,
                bit < F::LINEAR_BITS.min(64),
                "{}: bit {bit}",
                F::NAME
            );
        }
    }
}

fn a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything<F: Judged>() {
    for level in leaf_levels::<F>() {
        let frames = frames(F::shift(level), F::OUTPUT_BITS);
        let mut number = 0;
        each_attrs(&[0, 7], |attrs| {
            let Ok(bits) = F::encode(&attrs, level) else {
                return;
            };
            // One frame after the other.
            number += 1;
            let frame = frames[number % frames.len()];
            for mark in [0, F::CONTIGUOUS] {
                for native in [0, F::NATIVE] {
                    let leaf = bits | F::put_address(frame) | mark | native;
                    let suspended = F::suspend(leaf);
                    assert_ne!(suspended, 0, "{}: {leaf:#x}", F::NAME);
                    assert_eq!(F::kind(suspended, level), Kind::Invalid);
                    assert_eq!(F::resume(suspended), leaf, "{}: {leaf:#x}", F::NAME);
                }
            }
            let suspended = F::suspend(bits | F::put_address(frame));
            let found = walk::<F>(suspended, level);
            assert!(matches!(found, Err(Fault::NotMapped { .. })), "{found:?}");
        });
    }
}

fn hardware_writes_what_the_manual_says_it_writes<F: Judged>() {
    for level in leaf_levels::<F>() {
        each_attrs(&[0], |attrs| {
            let Ok(leaf) = F::encode(&attrs, level) else {
                return;
            };
            for (hardware_access, hardware_dirty) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let caps = Caps {
                    hardware_access,
                    hardware_dirty,
                    ..Caps::CONSERVATIVE
                };
                // The accessed flag where it is clear; the dirty state of what may be written and was not.
                let writable = attrs.perms.contains(Perms::WRITE);
                let expected = hardware_access && !attrs.accessed
                    || hardware_dirty && writable && !attrs.dirty;
                assert_eq!(
                    F::hardware_writes(leaf, level, &caps),
                    expected,
                    "{leaf:#x}"
                );
            }
        });
    }
}

for_each_format!(
    what_is_encoded_is_decoded_again_and_the_walker_agrees,
    native_bits_stand_where_they_are_given,
    no_leaf_is_encoded_where_the_walker_knows_none,
    the_shape_is_that_of_the_walker,
    an_address_goes_to_the_entry_that_the_walker_reads,
    every_bit_of_an_address_has_its_place,
    descriptors_of_consecutive_frames_differ_by_the_size_of_one,
    a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything,
    hardware_writes_what_the_manual_says_it_writes,
);

/// What a descriptor means, by hand.
enum Means {
    Nothing,
    Table(u64, Perms),
    Leaf(u64, Attrs),
}

fn row<F: Judged>(height: u8, descriptor: u64, means: Means) {
    let level = Level::new(height);
    let what = format!("{} at height {height}: {descriptor:#018x}", F::NAME);
    match means {
        Means::Nothing => assert_eq!(F::kind(descriptor, level), Kind::Invalid, "{what}"),
        Means::Table(frame, denied) => {
            assert_eq!(F::kind(descriptor, level), Kind::Table, "{what}");
            assert_eq!(F::address(descriptor, level), Pa::new(frame), "{what}");
            assert_eq!(F::denied(descriptor), denied, "{what}");
        }
        Means::Leaf(frame, attrs) => {
            assert_eq!(F::kind(descriptor, level), Kind::Leaf, "{what}");
            assert_eq!(F::address(descriptor, level), Pa::new(frame), "{what}");
            assert_eq!(F::decode(descriptor, level), attrs, "{what}");
        }
    }
}

/// A kernel page that is only there: readable, write-back, inner shareable, global, accessed.
const BARE: Attrs = Attrs::KERNEL_RODATA;

/// DDI 0487 D8.3.1 for the fields, D8.4.1 for permissions, D8.5 for AF and DBM; MAIR as this format has it.
#[test]
fn descriptors_of_arm64_by_hand() {
    use Means::{Leaf, Nothing, Table};
    const X: Perms = Perms::ANY_EXEC;
    let rw = Perms::READ | Perms::WRITE;
    let user = Perms::READ | Perms::USER_READ;
    let with = |perms: Perms, dirty: bool| Attrs {
        perms,
        dirty,
        ..BARE
    };
    let kernel = with(rw | X, true);

    // Bits 1:0: not valid; block where a page belongs; page; table; block.
    row::<Arm64K4>(0, 0, Nothing);
    row::<Arm64K4>(0, 0xffff_ffff_ffff_fffe, Nothing);
    row::<Arm64K4>(1, 0x4000_0702, Nothing);
    row::<Arm64K4>(0, 0x4000_0701, Nothing);
    row::<Arm64K4>(0, 0x4000_0703, Leaf(0x4000_0000, kernel));
    row::<Arm64K4>(1, 0x4000_0703, Table(0x4000_0000, Perms::empty()));
    row::<Arm64K4>(1, 0x4020_0701, Leaf(0x4020_0000, kernel));
    row::<Arm64K4>(2, 0x8000_0701, Leaf(0x8000_0000, kernel));
    row::<Arm64K16>(1, 0x0600_0701, Leaf(0x0600_0000, kernel));
    row::<Arm64K64>(1, 0x6000_0701, Leaf(0x6000_0000, kernel));
    // Table attributes: PXNTable 59, UXNTable 60, APTable 62:61.
    row::<Arm64K4>(1, 0x0800_0000_4000_0003, Table(0x4000_0000, Perms::EXEC));
    row::<Arm64K4>(
        2,
        0x1000_0000_4000_0003,
        Table(0x4000_0000, Perms::USER_EXEC),
    );
    row::<Arm64K4>(
        3,
        0x4000_0000_4000_0003,
        Table(0x4000_0000, Perms::ANY_WRITE),
    );
    // UXN 54 and PXN 53.
    row::<Arm64K4>(1, 0x0060_0000_8000_0701, Leaf(0x8000_0000, with(rw, true)));
    row::<Arm64K4>(
        0,
        0x0040_0000_8000_0703,
        Leaf(0x8000_0000, with(rw | Perms::EXEC, true)),
    );
    row::<Arm64K4>(
        0,
        0x0020_0000_8000_0703,
        Leaf(0x8000_0000, with(rw | Perms::USER_EXEC, true)),
    );
    // AP[2:1]: 10 read-only; 01 for the user too, then PXN is implied; 11 read-only for both.
    row::<Arm64K4>(
        0,
        0x0060_0000_8000_0783,
        Leaf(0x8000_0000, with(Perms::READ, false)),
    );
    row::<Arm64K4>(
        0,
        0x0040_0000_8000_0743,
        Leaf(0x8000_0000, with(user | Perms::ANY_WRITE, true)),
    );
    row::<Arm64K4>(
        0,
        0x0020_0000_8000_07c3,
        Leaf(0x8000_0000, with(user | Perms::USER_EXEC, false)),
    );
    row::<Arm64K4>(
        0,
        0x0000_0000_8000_07c3,
        Leaf(0x8000_0000, with(user | X, false)),
    );
    // DBM 51: writable and clean while AP[2] is set, dirty when it is clear. Bit 55 remembers dirty without it.
    row::<Arm64K4>(0, 0x0068_0000_8000_0783, Leaf(0x8000_0000, with(rw, false)));
    row::<Arm64K4>(0, 0x0068_0000_8000_0703, Leaf(0x8000_0000, with(rw, true)));
    row::<Arm64K4>(
        0,
        0x00e0_0000_8000_0783,
        Leaf(0x8000_0000, with(Perms::READ, true)),
    );
    // nG 11, AF 10, SH 9:8, AttrIndx 4:2.
    row::<Arm64K4>(
        0,
        0x8000_0f03,
        Leaf(
            0x8000_0000,
            Attrs {
                global: false,
                ..kernel
            },
        ),
    );
    row::<Arm64K4>(
        0,
        0x8000_0303,
        Leaf(
            0x8000_0000,
            Attrs {
                accessed: false,
                ..kernel
            },
        ),
    );
    for (bits, shareability) in [
        (0x403, Shareability::Non),
        (0x603, Shareability::Outer),
        (0x703, Shareability::Inner),
    ] {
        row::<Arm64K4>(
            0,
            0x8000_0000 | bits,
            Leaf(
                0x8000_0000,
                Attrs {
                    shareability,
                    ..kernel
                },
            ),
        );
    }
    for (bits, memory) in [
        (0x707, Memory::Device),
        (0x70b, Memory::NonCacheable),
        (0x70f, Memory::DeviceStrict),
        (0x713, Memory::Tagged),
        (0x717, Memory::WriteThrough),
    ] {
        row::<Arm64K64>(
            0,
            0x8000_0000 | bits,
            Leaf(0x8000_0000, Attrs { memory, ..kernel }),
        );
    }
    // Software 58:56; NS 5, GP 50, PBHA 62:59. The contiguous bit and the ignored bit 63 are no attributes.
    row::<Arm64K4>(
        0,
        0x0500_0000_8000_0703,
        Leaf(
            0x8000_0000,
            Attrs {
                software: 5,
                ..kernel
            },
        ),
    );
    for native in [1 << 5, 1 << 50, 1 << 59, 0xf << 59] {
        row::<Arm64K4>(
            0,
            0x8000_0703 | native,
            Leaf(0x8000_0000, Attrs { native, ..kernel }),
        );
    }
    row::<Arm64K4>(0, 0x8010_0000_8000_0703, Leaf(0x8000_0000, kernel));
    // The last frame of 48 bits.
    row::<Arm64K4>(0, 0x0000_ffff_ffff_f703, Leaf(0xffff_ffff_f000, kernel));
    // LPA2: 49:48 in place, 51:50 in bits 9:8, of tables too. LPA: 51:48 in bits 15:12.
    row::<Arm64K4Wide>(0, 0x0003_0000_8000_0403, Leaf(0x3_0000_8000_0000, kernel));
    row::<Arm64K4Wide>(0, 0x0000_0000_8000_0503, Leaf(0x4_0000_8000_0000, kernel));
    row::<Arm64K16Wide>(0, 0x0000_0000_8000_0603, Leaf(0x8_0000_8000_0000, kernel));
    row::<Arm64K4Wide>(
        1,
        0x0000_0000_8000_0303,
        Table(0xc_0000_8000_0000, Perms::empty()),
    );
    row::<Arm64K4Wide>(3, 0x0000_0080_0000_0701, Leaf(0xc_0080_0000_0000, kernel));
    row::<Arm64K16Wide>(2, 0x0000_0010_0000_0401, Leaf(0x10_0000_0000, kernel));
    row::<Arm64K64Wide>(0, 0x0000_0000_8000_f703, Leaf(0xf_0000_8000_0000, kernel));
    row::<Arm64K64Wide>(2, 0x0000_0400_0000_1701, Leaf(0x1_0400_0000_0000, kernel));
    row::<Arm64K64Wide>(
        1,
        0x0000_0000_8000_2003,
        Table(0x2_0000_8000_0000, Perms::empty()),
    );
}

/// SDM vol. 3A 5.5.4, tables of the formats of the entries; the PAT as this format has it.
#[test]
fn descriptors_of_x86_64_by_hand() {
    use Means::{Leaf, Nothing, Table};
    type F = X86_64<4>;
    let rw = Perms::READ | Perms::WRITE;
    let user = Perms::READ | Perms::USER_READ;
    let kernel = Attrs {
        perms: rw | Perms::EXEC,
        global: false,
        dirty: true,
        ..BARE
    };
    row::<F>(0, 0, Nothing);
    row::<F>(0, 0xffff_ffff_ffff_fffe, Nothing);
    row::<F>(2, 0x4000_00e2, Nothing);
    // P 0, R/W 1, A 5, D 6; PS 7 above the last level.
    row::<F>(0, 0x4000_0063, Leaf(0x4000_0000, kernel));
    row::<F>(1, 0x4020_00e3, Leaf(0x4020_0000, kernel));
    row::<F>(2, 0x4000_00e3, Leaf(0x4000_0000, kernel));
    row::<F>(
        0,
        0x4000_0043,
        Leaf(
            0x4000_0000,
            Attrs {
                accessed: false,
                ..kernel
            },
        ),
    );
    row::<F>(
        0,
        0x4000_0023,
        Leaf(
            0x4000_0000,
            Attrs {
                dirty: false,
                ..kernel
            },
        ),
    );
    row::<F>(
        0,
        0x4000_0061,
        Leaf(
            0x4000_0000,
            Attrs {
                perms: Perms::READ | Perms::EXEC,
                ..kernel
            },
        ),
    );
    // XD 63, G 8.
    row::<F>(
        0,
        0x8000_0000_4000_0163,
        Leaf(
            0x4000_0000,
            Attrs {
                perms: rw,
                global: true,
                ..kernel
            },
        ),
    );
    row::<F>(
        2,
        0x8000_0001_4000_01e3,
        Leaf(
            0x1_4000_0000,
            Attrs {
                perms: rw,
                global: true,
                ..kernel
            },
        ),
    );
    // U/S 2: with SMEP the kernel does not execute it.
    let all = user | Perms::ANY_WRITE | Perms::USER_EXEC;
    row::<F>(
        0,
        0x4000_0067,
        Leaf(
            0x4000_0000,
            Attrs {
                perms: all,
                ..kernel
            },
        ),
    );
    row::<F>(
        0,
        0x8000_0000_4000_0065,
        Leaf(
            0x4000_0000,
            Attrs {
                perms: user,
                ..kernel
            },
        ),
    );
    // PWT 3, PCD 4, PAT 7 of a page and 12 of a larger one: types 1, 3, 4, 7.
    for (height, bits, memory) in [
        (0, 0x06b, Memory::NonCacheable),
        (0, 0x07b, Memory::Device),
        (0, 0x0e3, Memory::Normal),
        (0, 0x0fb, Memory::WriteThrough),
        (1, 0x0fb, Memory::Device),
        (1, 0x10fb, Memory::WriteThrough),
        (2, 0x10fb, Memory::WriteThrough),
        (2, 0x10e3, Memory::Normal),
    ] {
        row::<F>(
            height,
            0x4000_0000 | bits,
            Leaf(0x4000_0000, Attrs { memory, ..kernel }),
        );
    }
    // Software 11:9, protection key 62:59.
    row::<F>(
        0,
        0x4000_0a63,
        Leaf(
            0x4000_0000,
            Attrs {
                software: 5,
                ..kernel
            },
        ),
    );
    let native = 5 << 59;
    row::<F>(
        0,
        0x2800_0000_4000_0063,
        Leaf(0x4000_0000, Attrs { native, ..kernel }),
    );
    // The address to bit 51; that of a large page without what stands below it.
    row::<F>(0, 0x000f_ffff_ffff_f063, Leaf(0xf_ffff_ffff_f000, kernel));
    row::<F>(1, 0x000f_ffff_ffe0_00e3, Leaf(0xf_ffff_ffe0_0000, kernel));
    // Tables: what one does not grant nobody has below it.
    row::<F>(1, 0x4000_0067, Table(0x4000_0000, Perms::empty()));
    row::<F>(3, 0x4000_0005, Table(0x4000_0000, Perms::ANY_WRITE));
    row::<F>(3, 0x4000_0003, Table(0x4000_0000, Perms::ANY_USER));
    row::<F>(
        2,
        0x8000_0000_4000_0007,
        Table(0x4000_0000, Perms::ANY_EXEC),
    );
    row::<X86_64<5>>(4, 0x4000_0007, Table(0x4000_0000, Perms::empty()));
}

#[test]
fn memory_types_are_those_of_the_registers() {
    // DDI 0487 D19.2 MAIR_EL1 and SDM vol. 3A 13.12.2: the byte of each type, by its index in a descriptor.
    let mair = tablewright::format::MAIR.to_le_bytes();
    let pat = tablewright::format::PAT.to_le_bytes();
    for (memory, attribute, kind) in [
        (Memory::Normal, 0xff, Some(6)),
        (Memory::WriteThrough, 0xbb, Some(4)),
        (Memory::NonCacheable, 0x44, Some(1)),
        (Memory::Device, 0x04, Some(0)),
        (Memory::DeviceStrict, 0x00, None),
        (Memory::Tagged, 0xf0, None),
    ] {
        let attrs = Attrs::KERNEL_DATA.with_memory(memory);
        let bits = Arm64K4::encode(&attrs, Level::PAGE).unwrap();
        assert_eq!(mair[(bits >> 2 & 7) as usize], attribute, "{memory:?}");
        let bits = X86_64::<4>::encode(&attrs, Level::PAGE).ok();
        let index = bits.map(|bits| (bits >> 3 & 3 | bits >> 5 & 4) as usize);
        assert_eq!(index.map(|index| pat[index]), kind, "{memory:?}");
    }
}

//! Descriptors: every combination of attributes, every bit of an address, and rows written by hand
//! from the manuals.
//!
//! What a format accepts it has to give back; what it refuses is listed here in the words of its
//! documentation, and is exactly that. The separate walker decodes every descriptor as well, at its
//! place in a tree, and has to agree. The rows written by hand are those that the walker is tested
//! with; here they are compared with the engine alone.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
#[path = "../../../walker/tests/table/mod.rs"]
mod table;

mod absent;
mod by_hand;
mod memory_types;
mod shadow_stacks;

use absent::*;
use by_hand::*;
use common::{Decoded, OTHER_MAIR, RESET_PAT, is_arm, is_el2, is_guest, words};
use shadow_stacks::SHADOW_STACK;
use tablewright::bbm::State;
use tablewright::format::{Absence, Arm64, Arm64El2, Arm64K4, Ept, Npt, Stage2, X86_64};
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

/// Memory that every format can map: of the user, or of all that there is.
fn data<F: Decoded>() -> Attrs {
    match is_el2::<F>() {
        true => Attrs::KERNEL_DATA,
        false => Attrs::USER_DATA,
    }
}

fn levels<F: Decoded>() -> impl Iterator<Item = Level> {
    (0..F::LEVELS).map(Level::new)
}

fn leaf_levels<F: Decoded>() -> impl Iterator<Item = Level> {
    levels::<F>().filter(|&level| F::is_leaf_level(level))
}

/// Whether the format is one of RISC-V.
fn is_riscv<F: Decoded>() -> bool {
    matches!(F::REGIME, walker::Regime::Riscv { .. })
}

/// The most that the software bits hold.
fn most_software<F: Decoded>() -> u8 {
    if is_riscv::<F>() { 3 } else { 7 }
}

/// The walker's number of a level: arm64 counts up to 3, x86-64 down to 1, RISC-V to 0.
fn number<F: Decoded>(level: Level) -> i8 {
    let height = level.height() as i8;
    match is_arm::<F>() {
        true => F::REGIME.last_level() - height,
        false => F::REGIME.last_level() + height,
    }
}

/// The format's level of the walker's number; the inverse of [`number`].
fn level_of<F: Decoded>(number: i8) -> Level {
    Level::new((number - F::REGIME.last_level()).unsigned_abs())
}

/// A descriptor of the table at `pa` that takes nothing away: bit 10 is execution by the user with
/// EPT, and ignored elsewhere.
fn pointer<F: Decoded>(pa: u64) -> u64 {
    match (is_arm::<F>(), is_riscv::<F>()) {
        (true, _) => pa | 0x3,
        (_, true) => pa >> 2 | 0x1,
        _ => pa | 0x407,
    }
}

/// Walks to a descriptor that stands at `level` and translates address 0, through tables that deny
/// nothing.
fn walk<F: Decoded>(descriptor: u64, level: Level) -> Result<walker::Leaf, Fault> {
    // The table at height h lies at (h + 1) << 20.
    let mut read = |table: u64, _: usize| {
        let height = (table >> 20) - 1;
        if height == u64::from(level.height()) { descriptor } else { pointer::<F>(height << 20) }
    };
    walker::translate(F::REGIME, u64::from(F::LEVELS) << 20, 0, &mut read)
}

/// Whether the register that memory types refer to has none of this type: the byte of each, by the
/// manuals (DDI 0487 D24.2 MAIR_EL1, SDM vol. 3A 13.12.2). RISC-V has the types of Svpbmt.
fn is_missing<F: Decoded>(memory: Memory) -> bool {
    if is_riscv::<F>() {
        let typed = matches!(memory, Memory::NonCacheable | Memory::Device);
        return memory != Memory::Normal && !(typed && F::TYPES != 0);
    }
    let byte = match (is_arm::<F>(), memory) {
        (true, Memory::Normal) => 0xff,
        (true, Memory::WriteThrough) => 0xbb,
        (true, Memory::NonCacheable) => 0x44,
        (true, Memory::Device) => 0x04,
        (true, Memory::DeviceStrict) => 0x00,
        (true, Memory::Tagged) => 0xf0,
        (false, Memory::Normal) => 6,
        (false, Memory::WriteThrough) => 4,
        (false, Memory::NonCacheable) => 1,
        (false, Memory::Device) => 0,
        (false, Memory::DeviceStrict | Memory::Tagged) => return true,
    };
    let in_descriptor =
        matches!(F::REGIME, walker::Regime::Arm64Stage2 { .. } | walker::Regime::Ept { .. });
    !in_descriptor && !F::TYPES.to_le_bytes().contains(&byte)
}

/// Attributes that the architectures cannot hold, from the documentation of the formats.
fn refused<F: Decoded>(attrs: &Attrs) -> bool {
    let has = |perms: Perms| attrs.perms.contains(perms);
    // One U/S bit or AP[1], one bit for writing: the privileged read always; the user reads what it
    // writes; both write, or neither. With no permission at all the leaf is parked.
    let unreadable = !has(Perms::READ) && !attrs.perms.is_empty();
    let user_writes_only = has(Perms::USER_WRITE) && !has(Perms::USER_READ);
    let software = attrs.software > most_software::<F>();
    let native = attrs.native & !F::NATIVE != 0 || is_missing::<F>(attrs.memory);
    if is_el2::<F>() {
        let lpa2 = F::OUTPUT_BITS > 48 && F::PAGE_SHIFT < 16;
        return unreadable
            || attrs.perms.intersects(Perms::ANY_USER)
            || !attrs.global
            || lpa2 && attrs.shareability != Shareability::Inner
            || software
            || native;
    }
    if is_guest::<F>() {
        // Both read and write alike, and nothing is global.
        let alike = |one, other| has(one) == has(other);
        let executes_alike = alike(Perms::EXEC, Perms::USER_EXEC);
        let apart =
            !alike(Perms::READ, Perms::USER_READ) || !alike(Perms::WRITE, Perms::USER_WRITE);
        let x86_memory = matches!(attrs.memory, Memory::DeviceStrict | Memory::Tagged);
        let shared = attrs.shareability != Shareability::Inner;
        let by_format = match F::REGIME {
            walker::Regime::Arm64Stage2 { granule, wide, forced_write_back, .. } => {
                attrs.memory == Memory::Tagged
                    || forced_write_back && attrs.memory == Memory::WriteThrough
                    || wide && granule != walker::Granule::K64 && shared
            }
            walker::Regime::Riscv { .. } => {
                has(Perms::WRITE) && !has(Perms::READ) || !executes_alike || shared
            }
            walker::Regime::Ept { mode_based, .. } => {
                unreadable || !mode_based && !executes_alike || x86_memory || shared
            }
            _ => unreadable || !executes_alike || x86_memory || shared,
        };
        return apart || attrs.global || software || native || by_format;
    }
    if F::HALVES {
        // Execution is a right of its own, but what the user can write the privileged never
        // executes.
        let open = has(Perms::USER_READ) || has(Perms::USER_WRITE);
        let one_writes = open && has(Perms::WRITE) != has(Perms::USER_WRITE);
        let executes_foreign = has(Perms::USER_WRITE | Perms::EXEC);
        // With LPA2 the bits of shareability are address.
        let lpa2 = F::OUTPUT_BITS > 48 && F::PAGE_SHIFT < 16;
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
        if is_riscv::<F>() {
            // Execute-only pages exist; write-only pages do not.
            let reads_apart = user && has(Perms::READ) != has(Perms::USER_READ);
            let writes_blind = has(Perms::WRITE) && !has(Perms::READ) || user_writes_only;
            return reads_apart
                || writes_blind
                || one_writes
                || executes_foreign
                || shared
                || software
                || native;
        }
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

fn what_is_encoded_is_decoded_again_and_the_walker_agrees<F: Decoded>() {
    assert!(F::encode(&F::PLAIN, Level::PAGE).is_ok());
    for level in leaf_levels::<F>() {
        let (mut held, mut seen) = (0, std::collections::HashSet::new());
        let frame = Pa::new(1 << F::shift(level));
        each_attrs(&[0, 1, 2, 3, 4, 7, 8], |attrs| {
            let encoded = F::encode(&attrs, level);
            let name = F::NAME;
            match (&encoded, refused::<F>(&attrs)) {
                (Ok(bits), true) => {
                    panic!("{name} at {level:?} has to refuse {attrs:?}, and encodes it: {bits:#x}")
                }
                (Err(why), false) => {
                    panic!("{name} at {level:?} has to encode {attrs:?}, and refuses it: {why}")
                }
                _ => {}
            }
            let Ok(bits) = encoded else { return };
            held += 1;
            let leaf = F::with_address(bits, frame);
            let what = || format!("{name} at {level:?}: {leaf:#x} of {attrs:?}");
            assert!(seen.insert(bits), "{}: another combination has it, too", what());
            assert_eq!(F::kind(leaf, level), Kind::Leaf, "{}", what());
            assert_eq!(F::is_parked(leaf), attrs.perms.is_empty(), "is parked: {}", what());
            assert_eq!(F::decode(leaf, level), attrs, "decoded again: {}", what());
            assert_eq!(F::address(leaf, level), frame, "{}", what());
            assert_eq!(bits & F::CONTIGUOUS, 0, "the contiguous bit: {}", what());
            if matches!(F::REGIME, walker::Regime::X86_64 { .. }) {
                // SDM 5.6: P and D without R/W.
                assert_ne!(leaf & 0b100_0011, 0b100_0001, "a shadow stack: {}", what());
            }
            if level == Level::PAGE {
                // A page of RISC-V that is executed alone is looked at by itself.
                let executed_alone =
                    is_riscv::<F>() && !attrs.perms.intersects(Perms::READ | Perms::USER_READ);
                let is_single = !F::is_parked(leaf) && !executed_alone;
                assert_eq!(F::is_single_page(leaf), is_single, "{}", what());
                let in_run = F::CONTIGUOUS != 0 && F::is_single_page(leaf | F::CONTIGUOUS);
                assert!(!in_run, "in a run: {}", what());
                // With what is no such page it has not in common what makes one.
                for other in [0, F::FROZEN, F::suspend(leaf)] {
                    assert!(!F::is_single_page(leaf & other), "{other:#x}: {}", what());
                }
            }
            if attrs.perms.is_empty() {
                check_parked::<F>(leaf, frame, level);
                return;
            }
            assert_eq!(bits & F::address_mask(level), 0, "attributes in the address: {}", what());
            let found =
                walk::<F>(leaf, level).unwrap_or_else(|fault| panic!("{}: {fault}", what()));
            assert_eq!(words::<F>(&found), attrs, "by the walker: {}", what());
            let at = (frame.get(), 1 << F::shift(level));
            assert_eq!((found.pa, found.size), at, "by the walker: {}", what());
        });
        assert!(held > 200, "{}: {held}", F::NAME);
    }
}

fn native_bits_stand_where_they_are_given<F: Decoded>() {
    // By hand: GP, NS and PBHA; FnXS and PBHA; the protection key; ignore PAT, supervisor shadow
    // stack, suppress #VE.
    let by_hand = match F::REGIME {
        walker::Regime::Arm64Stage1 { .. }
        | walker::Regime::Arm64Stage1Sized { .. }
        | walker::Regime::Arm64El2 { .. } => {
            // And the highest address bit, where a realm has it: 51 stands in 9 with LPA2, in 15
            // with LPA.
            let shared = match (F::OUTPUT_BITS, F::PAGE_SHIFT) {
                (47, _) => 1 << 47,
                (51, 16) => 1 << 15,
                (51, _) => 1 << 9,
                _ => 0,
            };
            1 << 50 | 1 << 5 | 0xf << 59 | shared
        }
        walker::Regime::Arm64Stage2 { .. } => 1 << 11 | 0xf << 59,
        // And the bit that says whose memory it is, above all memory; or that of shadow stacks, of
        // which `shadow_stacks` says where the others stand then.
        walker::Regime::X86_64 { .. } => match F::OUTPUT_BITS {
            52 => 0xf << 59 | F::NATIVE & SHADOW_STACK,
            bit => 0xf << 59 | 1 << bit,
        },
        walker::Regime::Ept { .. } => 1 << 6 | 1 << 60 | 1 << 63,
        walker::Regime::Npt { .. } | walker::Regime::Riscv { .. } => 0,
    };
    assert_eq!(F::NATIVE, by_hand, "{}", F::NAME);
    for level in leaf_levels::<F>() {
        let base = F::encode(&data::<F>(), level).unwrap();
        // Each subset of the format's own bits; each single bit that is none of them.
        let bits: Vec<u64> = (0..64).map(|bit| 1 << bit).collect();
        let placed = F::NATIVE & !SHADOW_STACK;
        let own: Vec<u64> = bits.iter().copied().filter(|bit| placed & bit != 0).collect();
        for subset in 0..1u64 << own.len() {
            let native = own
                .iter()
                .enumerate()
                .filter(|(number, _)| subset >> number & 1 != 0)
                .fold(0, |sum, (_, bit)| sum | bit);
            let attrs = Attrs { native, ..data::<F>() };
            let what = || format!("{} at {level:?}: native {native:#x}", F::NAME);
            assert_eq!(F::encode(&attrs, level), Ok(base | native), "{}", what());
            assert_eq!(F::decode(base | native, level), attrs, "{}", what());
        }
        for bit in bits.iter().filter(|&bit| F::NATIVE & bit == 0) {
            let attrs = Attrs { native: *bit, ..data::<F>() };
            assert!(F::encode(&attrs, level).is_err(), "{}: {bit:#x}", F::NAME);
        }
        // No attribute uses a bit that is the embedder's.
        each_attrs(&[most_software::<F>()], |attrs| {
            if let Ok(bits) = F::encode(&attrs, level) {
                assert_eq!(bits & F::NATIVE, 0);
            }
        });
    }
}

fn no_leaf_is_encoded_where_the_walker_knows_none<F: Decoded>() {
    for level in levels::<F>() {
        let encoded = F::encode(&data::<F>(), level);
        assert_eq!(
            encoded.is_ok(),
            F::is_leaf_level(level),
            "{} at {level:?} has leaves, and encodes one: {encoded:x?}",
            F::NAME
        );
        // What a leaf would look like there: arm64 a block, or a page; x86 PS, or a page.
        let leaf = match (is_arm::<F>(), level == Level::PAGE) {
            _ if is_riscv::<F>() => 0xd7,
            (true, true) => 0x703,
            (true, false) => 0x701,
            (false, true) => 0x63,
            (false, false) => 0xe3,
        };
        // At EL2 alone AP[1] is one.
        let leaf = leaf | u64::from(is_el2::<F>()) << 6;
        // With LPA2 bits 9:8 are address, of a block as of a page.
        let leaf = if is_arm::<F>() && F::OUTPUT_BITS == 52 && F::PAGE_SHIFT < 16 {
            leaf & !0x300
        } else {
            leaf
        };
        let known = match walk::<F>(leaf, level) {
            Ok(_) => true,
            Err(Fault::Reserved(_)) => false,
            Err(fault) => panic!("{fault}"),
        };
        assert_eq!(
            known,
            F::is_leaf_level(level),
            "the walker knows a leaf, and {} has one at {level:?}: {leaf:#x}",
            F::NAME
        );
    }
    // The other end of the contract: nothing above the root.
    assert!(!F::is_leaf_level(F::root_level().up()));
}

fn the_shape_is_that_of_the_walker<F: Decoded>() {
    let name = F::NAME;
    assert_eq!(F::PAGE_SHIFT, F::REGIME.page_shift(), "{name}: PAGE_SHIFT");
    assert_eq!(F::INPUT_BITS, F::REGIME.input_bits(), "{name}: INPUT_BITS");
    let root = number::<F>(F::root_level());
    assert_eq!(root, F::REGIME.start_level(), "{name}: the level of the root");
    for level in levels::<F>() {
        let number = number::<F>(level);
        assert_eq!(F::entries(level), F::REGIME.table_entries(number), "{}", F::NAME);
        let size = 1u64 << F::shift(level);
        assert_eq!(size, F::REGIME.entry_size(number), "{name} at {level:?}");
        // Runs of Svnapot are left alone.
        let run = if is_riscv::<F>() { 1 } else { F::REGIME.run_entries(number) };
        assert_eq!(1usize << F::contiguous(level), run, "{} at {level:?}", F::NAME);
        if run > 1 {
            assert!(F::is_leaf_level(level));
        }
    }
    let root = F::REGIME.table_entries(F::REGIME.start_level()) as u64 * 8;
    let tables = root.div_ceil(1 << F::PAGE_SHIFT);
    assert_eq!(F::root_tables() as u64, tables, "{}", F::NAME);
    assert!(tables == 1 || is_guest::<F>() && (is_arm::<F>() || is_riscv::<F>()));
}

fn an_address_goes_to_the_entry_that_the_walker_reads<F: Decoded>() {
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
                _ => pointer::<F>(height << 20),
            }
        };
        let fault = walker::translate(F::REGIME, u64::from(F::LEVELS) << 20, input, &mut read);
        let known = fault != Err(Fault::NonCanonical);
        assert_eq!(
            F::is_canonical(input),
            known,
            "{} takes {input:#x} for an input address, and the walker does",
            F::NAME
        );
        if known {
            canonical += 1;
            assert_eq!(path.len(), usize::from(F::LEVELS));
            for (height, index) in path {
                let level = Level::new(height as u8);
                assert_eq!(F::index(input, level), index, "{}: {input:#x}", F::NAME);
            }
        }
    }
    assert!(canonical > 60);
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

fn every_bit_of_an_address_has_its_place<F: Decoded>() {
    for level in levels::<F>() {
        // Leaves with everything set and with nothing set beside the address.
        let full = Attrs { native: F::NATIVE, software: most_software::<F>(), ..data::<F>() };
        let plain = Attrs {
            accessed: false,
            dirty: false,
            ..match is_guest::<F>() {
                true => Attrs::USER_RODATA,
                false => Attrs::KERNEL_TEXT,
            }
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
                Perms::ANY_WRITE,
                Perms::ANY_WRITE | Perms::ANY_EXEC,
            ] {
                let table = F::table(frame, deny);
                assert_eq!(F::kind(table, level), Kind::Table);
                assert_eq!(F::address(table, level), frame, "{}: {table:#x}", F::NAME);
                // Stage 2 of arm64 denies nothing. Execution: the rest of arm64 denies each by
                // itself, and so does EPT with mode-based control; otherwise both or neither.
                let each =
                    F::HALVES || matches!(F::REGIME, walker::Regime::Ept { mode_based: true, .. });
                let expected = match F::TABLES_RESTRICT {
                    false => Perms::empty(),
                    true if each || deny.contains(Perms::ANY_EXEC) => deny,
                    true => deny - Perms::ANY_EXEC,
                };
                assert_eq!(F::denied(table), expected, "{}: {deny:?}", F::NAME);
                check_marks::<F>(table, frame, level);
                // To an editor a write-protected table is a table.
                let protected = F::protect_table(table);
                assert_eq!(F::kind(protected, level), Kind::Table, "{}", F::NAME);
                assert_eq!(F::address(protected, level), frame, "{}", F::NAME);
                assert!(F::is_protected(protected) && F::is_protected(protected | F::OPENING));
                if !deny.intersects(Perms::ANY_WRITE) {
                    assert!(!F::is_protected(table), "{}", F::NAME);
                    assert_eq!(F::open_table(protected | F::OPENING), table, "{}", F::NAME);
                }

                // The walker goes there, and takes away what is denied: from a page of user code in
                // it, or below further tables, which stand at `BELOW`.
                const BELOW: u64 = 1 << 40;
                if frame.get() == BELOW {
                    continue;
                }
                let all = match (is_guest::<F>(), is_el2::<F>()) {
                    (true, _) => Perms::all(),
                    (_, true) => Perms::all() - Perms::ANY_USER,
                    _ => Perms::all() - Perms::EXEC,
                };
                let attrs = data::<F>().with_perms(all);
                let page = F::encode(&attrs, Level::PAGE).unwrap();
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
                    match passed {
                        true => table,
                        false => pointer::<F>(height << 20),
                    }
                };
                let leaf = walker::translate(F::REGIME, top, 0, &mut read).unwrap();
                let left = perms(leaf.access) & all;
                // Without the user's writes arm64 lets the privileged execute, which was not asked
                // for.
                assert_eq!(left, all - expected, "{}: {table:#x}", F::NAME);
            }
        }
    }
}

fn descriptors_of_consecutive_frames_differ_by_the_size_of_one<F: Decoded>() {
    for level in leaf_levels::<F>() {
        let size = 1u64 << F::shift(level);
        // RISC-V has the number of a page two bits lower than its address.
        let stands = if is_riscv::<F>() { size >> 2 } else { size };
        for bit in F::shift(level)..F::OUTPUT_BITS {
            let next = 1u64 << bit;
            let here = next - size;
            let step = F::put_address(Pa::new(next)).wrapping_sub(F::put_address(Pa::new(here)));
            // The carry goes into bit `bit`; from `LINEAR_BITS` on the address stands elsewhere.
            assert_eq!(
                step == stands,
                bit < F::LINEAR_BITS.min(64),
                "{} at {level:?}: the step from the frame {here:#x} to {next:#x} is {step:#x}, and \
                 LINEAR_BITS is {}",
                F::NAME,
                F::LINEAR_BITS
            );
        }
    }
}

fn hardware_writes_what_the_manual_says_it_writes<F: Decoded>() {
    for level in leaf_levels::<F>() {
        each_attrs(&[0], |attrs| {
            let Ok(leaf) = F::encode(&attrs, level) else {
                return;
            };
            for (hardware_access, hardware_dirty) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let caps = Caps { hardware_access, hardware_dirty, ..Caps::CONSERVATIVE };
                // The accessed flag where it is clear; the dirty state of what may be written and
                // was not.
                let writable = attrs.perms.contains(Perms::WRITE);
                let used = !attrs.perms.is_empty();
                let expected = hardware_access && used && !attrs.accessed
                    || hardware_dirty && writable && !attrs.dirty;
                assert_eq!(F::hardware_writes(leaf, level, &caps), expected, "{leaf:#x}");
            }
        });
    }
}

/// A format may find the table below an entry by fewer instructions than by its kind and its
/// address: the answer is the same, of all patterns of the bits that tell a table, and of random
/// ones.
fn the_table_below_an_entry_is_what_kind_and_address_say<F: Decoded>() {
    let dice = common::Dice::new(7);
    for level in levels::<F>().filter(|level| *level > Level::PAGE) {
        let random = (0..2000).map(|_| dice.roll(u64::MAX) & dice.roll(u64::MAX));
        let few = (0..256).flat_map(|low| [low, low | 0x5000, low | F::address_mask(level)]);
        for entry in random.chain(few) {
            let expected = match F::kind(entry, level) {
                Kind::Table => Some(F::address(entry, level)),
                Kind::Leaf | Kind::Invalid => None,
            };
            let found = F::table_below(entry, level);
            assert_eq!(found, expected, "{entry:#x} at {level:?}");
        }
    }
}

/// The index in a table far above the root was shifted by more than a word has. Its answer means
/// nothing, as that of the others.
fn a_level_that_no_table_has_overflows_nothing<F: Decoded>() {
    for level in (0..=255).map(Level::new) {
        for bits in [0, 0x5083, u64::MAX] {
            assert!(F::index(bits, level) < F::entries(level));
            let _ = (F::kind(bits, level), F::is_leaf_level(level));
            let _ = (F::table_below(bits, level), F::decode(bits, level));
            let _ = F::with_address(bits, F::address(bits, level));
            let _ = F::hardware_writes(bits, level, &Caps::CONSERVATIVE);
        }
        let _ = (F::shift(level), F::address_mask(level));
        let _ = F::encode(&data::<F>(), level);
    }
}

macro_rules! for_all {
    ($($test:ident),* $(,)?) => {
        for_each_format!($($test),*);
        for_each_guest_format!($($test),*);
        for_each_other_format!($($test),*);
    };
}

for_all!(
    what_is_encoded_is_decoded_again_and_the_walker_agrees,
    native_bits_stand_where_they_are_given,
    no_leaf_is_encoded_where_the_walker_knows_none,
    the_shape_is_that_of_the_walker,
    an_address_goes_to_the_entry_that_the_walker_reads,
    every_bit_of_an_address_has_its_place,
    descriptors_of_consecutive_frames_differ_by_the_size_of_one,
    a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything,
    a_parked_leaf_keeps_everything_and_comes_back,
    a_frozen_entry_is_invalid_and_nothing_else,
    hardware_writes_what_the_manual_says_it_writes,
    every_row_by_hand_means_what_the_manual_says,
    a_leaf_by_hand_permits_what_the_tables_above_it_leave,
    hardware_writes_what_the_rows_by_hand_say,
    the_table_below_an_entry_is_what_kind_and_address_say,
    a_level_that_no_table_has_overflows_nothing,
);

for_each_format_of_other_types!(
    what_is_encoded_is_decoded_again_and_the_walker_agrees,
    native_bits_stand_where_they_are_given,
    every_bit_of_an_address_has_its_place,
    a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything,
    a_parked_leaf_keeps_everything_and_comes_back,
    hardware_writes_what_the_manual_says_it_writes,
);

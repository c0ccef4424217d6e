//! Descriptors: every combination of attributes, every bit of an address, and rows written by hand from the manuals.
//!
//! What a format accepts it has to give back; what it refuses is listed here in the words of its documentation, and is
//! exactly that. The separate walker decodes every descriptor as well, at its place in a tree, and has to agree. The rows
//! written by hand are those that the walker is tested with; here they are compared with the engine alone.

mod common;
#[path = "../../walker/tests/table/mod.rs"]
mod table;

use common::{Decoded, OTHER_MAIR, RESET_PAT, is_arm, is_el2, is_guest, words};
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

/// The walker's number of a level: arm64 counts up to 3, x86-64 down to 1.
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

/// A descriptor of the table at `pa` that takes nothing away: bit 10 is execution by the user with EPT, and ignored
/// elsewhere.
fn pointer<F: Decoded>(pa: u64) -> u64 {
    pa | if is_arm::<F>() { 0x3 } else { 0x407 }
}

/// Walks to a descriptor that stands at `level` and translates address 0, through tables that deny nothing.
fn walk<F: Decoded>(descriptor: u64, level: Level) -> Result<walker::Leaf, Fault> {
    // The table at height h lies at (h + 1) << 20.
    let mut read = |table: u64, _: usize| {
        let height = (table >> 20) - 1;
        if height == u64::from(level.height()) {
            descriptor
        } else {
            pointer::<F>(height << 20)
        }
    };
    walker::translate(F::REGIME, u64::from(F::LEVELS) << 20, 0, &mut read)
}

/// Whether the register that memory types refer to has none of this type: the byte of each, by the manuals (DDI 0487 D19.2
/// MAIR_EL1, SDM vol. 3A 13.12.2).
fn is_missing<F: Decoded>(memory: Memory) -> bool {
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
    let in_descriptor = matches!(
        F::REGIME,
        walker::Regime::Arm64Stage2 { .. } | walker::Regime::Ept { .. }
    );
    !in_descriptor && !F::TYPES.to_le_bytes().contains(&byte)
}

/// What the two architectures cannot hold, from the documentation of the formats.
fn refused<F: Decoded>(attrs: &Attrs) -> bool {
    let has = |perms: Perms| attrs.perms.contains(perms);
    // One U/S bit or AP[1], one bit for writing: the privileged read always; the user reads what it writes; both
    // write, or neither.
    // With no permission at all the leaf is parked.
    let unreadable = !has(Perms::READ) && !attrs.perms.is_empty();
    let user_writes_only = has(Perms::USER_WRITE) && !has(Perms::USER_READ);
    let software = attrs.software > 7;
    let native = attrs.native & !F::NATIVE != 0 || is_missing::<F>(attrs.memory);
    if is_el2::<F>() {
        let lpa2 = F::OUTPUT_BITS == 52 && F::PAGE_SHIFT < 16;
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
            walker::Regime::Arm64Stage2 {
                granule,
                wide,
                forced_write_back,
                ..
            } => {
                attrs.memory == Memory::Tagged
                    || forced_write_back && attrs.memory == Memory::WriteThrough
                    || wide && granule != walker::Granule::K64 && shared
            }
            walker::Regime::Ept { mode_based, .. } => {
                unreadable || !mode_based && !executes_alike || x86_memory || shared
            }
            _ => unreadable || !executes_alike || x86_memory || shared,
        };
        return apart || attrs.global || software || native || by_format;
    }
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

fn what_is_encoded_is_decoded_again_and_the_walker_agrees<F: Decoded>() {
    assert!(F::encode(&F::PLAIN, Level::PAGE).is_ok());
    for level in leaf_levels::<F>() {
        let (mut held, mut seen) = (0, std::collections::HashSet::new());
        let frame = Pa::new(1 << F::shift(level));
        each_attrs(&[0, 1, 2, 4, 7, 8], |attrs| {
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
            assert!(
                seen.insert(bits),
                "{}: another combination has it, too",
                what()
            );
            assert_eq!(F::kind(leaf, level), Kind::Leaf, "{}", what());
            assert_eq!(
                F::is_parked(leaf),
                attrs.perms.is_empty(),
                "is parked: {}",
                what()
            );
            assert_eq!(F::decode(leaf, level), attrs, "decoded again: {}", what());
            assert_eq!(F::address(leaf, level), frame, "{}", what());
            assert_eq!(bits & F::CONTIGUOUS, 0, "the contiguous bit: {}", what());
            if attrs.perms.is_empty() {
                check_parked::<F>(leaf, frame, level);
                return;
            }
            assert_eq!(
                bits & F::address_mask(level),
                0,
                "attributes in the address: {}",
                what()
            );
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
    // By hand: GP, NS and PBHA; FnXS and PBHA; the protection key; ignore PAT, supervisor shadow stack, suppress #VE.
    let by_hand = match F::REGIME {
        walker::Regime::Arm64Stage1 { .. }
        | walker::Regime::Arm64Stage1Sized { .. }
        | walker::Regime::Arm64El2 { .. } => 1 << 50 | 1 << 5 | 0xf << 59,
        walker::Regime::Arm64Stage2 { .. } => 1 << 11 | 0xf << 59,
        walker::Regime::X86_64 { .. } => 0xf << 59,
        walker::Regime::Ept { .. } => 1 << 6 | 1 << 60 | 1 << 63,
        walker::Regime::Npt { .. } => 0,
    };
    assert_eq!(F::NATIVE, by_hand, "{}", F::NAME);
    for level in leaf_levels::<F>() {
        let base = F::encode(&data::<F>(), level).unwrap();
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
                ..data::<F>()
            };
            let what = || format!("{} at {level:?}: native {native:#x}", F::NAME);
            assert_eq!(F::encode(&attrs, level), Ok(base | native), "{}", what());
            assert_eq!(F::decode(base | native, level), attrs, "{}", what());
        }
        for bit in bits.iter().filter(|&bit| F::NATIVE & bit == 0) {
            let attrs = Attrs {
                native: *bit,
                ..data::<F>()
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
    assert_eq!(
        root,
        F::REGIME.start_level(),
        "{name}: the level of the root"
    );
    for level in levels::<F>() {
        let number = number::<F>(level);
        assert_eq!(
            F::entries(level),
            F::REGIME.table_entries(number),
            "{}",
            F::NAME
        );
        let size = 1u64 << F::shift(level);
        assert_eq!(size, F::REGIME.entry_size(number), "{name} at {level:?}");
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
    let root = F::REGIME.table_entries(F::REGIME.start_level()) as u64 * 8;
    let tables = root.div_ceil(1 << F::PAGE_SHIFT);
    assert_eq!(F::root_tables() as u64, tables, "{}", F::NAME);
    assert!(tables == 1 || is_guest::<F>() && is_arm::<F>());
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
        let full = Attrs {
            native: F::NATIVE,
            software: 7,
            ..data::<F>()
        };
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
                // Stage 2 of arm64 denies nothing. Execution: the rest of arm64 denies each by itself, and so does EPT
                // with mode-based control; otherwise both or neither.
                let each = F::HALVES
                    || matches!(
                        F::REGIME,
                        walker::Regime::Ept {
                            mode_based: true,
                            ..
                        }
                    );
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

                // The walker goes there, and takes away what is denied: from a page of user code in it, or below
                // further tables, which stand at `BELOW`.
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
                // Without the user's writes arm64 lets the privileged execute, which was not asked for.
                assert_eq!(left, all - expected, "{}: {table:#x}", F::NAME);
            }
        }
    }
}

fn descriptors_of_consecutive_frames_differ_by_the_size_of_one<F: Decoded>() {
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
                "{} at {level:?}: the step from the frame {here:#x} to {next:#x} is {step:#x}, and LINEAR_BITS is {}",
                F::NAME,
                F::LINEAR_BITS
            );
        }
    }
}

/// Checks an entry that is not valid: what it tells, to the engine and to the walker, and what it names.
fn check_mark<F: Decoded>(entry: u64, absence: Absence, frame: Option<Pa>, level: Level) {
    assert_eq!(
        F::kind(entry, level),
        Kind::Invalid,
        "{}: {entry:#x}",
        F::NAME
    );
    assert_eq!(F::absence(entry), absence, "{}: {entry:#x}", F::NAME);
    let found = walk::<F>(entry, level);
    assert!(matches!(found, Err(Fault::NotMapped { .. })), "{found:?}");
    if !is_arm::<F>() {
        // The L1 terminal fault: the address is that of no memory, the inverse of one or all ones.
        let field = 0x000f_ffff_ffff_f000;
        let named = !entry & field;
        // Below the address of a large page there are attributes.
        let large = field & (u64::MAX << F::shift(level));
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

/// Checks a leaf that permits nothing: to the walker nothing is mapped, and an editor finds all of it.
fn check_parked<F: Decoded>(leaf: u64, frame: Pa, level: Level) {
    let name = F::NAME;
    assert_eq!(F::kind(leaf, level), Kind::Leaf, "{name}: {leaf:#x}");
    assert!(F::is_parked(leaf), "{name}: {leaf:#x}");
    assert_eq!(F::address(leaf, level), frame, "{name}: {leaf:#x}");
    assert_eq!(State::of::<F>(leaf, level), State::Absent);
    let found = walk::<F>(leaf, level);
    assert!(
        matches!(found, Err(Fault::NotMapped { .. })),
        "{name}: {leaf:#x}: {found:?}"
    );
    if !is_arm::<F>() {
        // As of other entries that are not present, for the L1 terminal fault.
        let field = 0x000f_ffff_ffff_f000 & (u64::MAX << F::shift(level));
        assert_eq!(!leaf & field, frame.get() & field, "{name}: {leaf:#x}");
    }
    let caps = Caps {
        hardware_access: true,
        hardware_dirty: true,
        ..Caps::CONSERVATIVE
    };
    assert!(!F::hardware_writes(leaf, level, &caps), "{name}: {leaf:#x}");
}

fn a_parked_leaf_keeps_everything_and_comes_back<F: Decoded>() {
    for level in leaf_levels::<F>() {
        let frames = frames(F::shift(level), F::OUTPUT_BITS);
        let mut number = 0;
        each_attrs(&[0, 7], |attrs| {
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
                }
            }
        });
        assert!(number > 100, "{}: {number}", F::NAME);
    }
}

/// Checks that a valid entry can be suspended.
fn check_marks<F: Decoded>(entry: u64, frame: Pa, level: Level) {
    let suspended = F::suspend(entry);
    check_mark::<F>(suspended, Absence::Suspended, Some(frame), level);
    assert_eq!(F::resume(suspended), entry, "{}: {entry:#x}", F::NAME);
}

fn a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything<F: Decoded>() {
    for level in leaf_levels::<F>() {
        let frames = frames(F::shift(level), F::OUTPUT_BITS);
        let mut number = 0;
        each_attrs(&[0, 7], |attrs| {
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

fn a_frozen_entry_is_invalid_and_nothing_else<F: Decoded>() {
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
    assert_eq!(different.len(), if is_arm::<F>() { 45 } else { 1 });
    assert_eq!(F::absence(0), Absence::Hole);
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
                let caps = Caps {
                    hardware_access,
                    hardware_dirty,
                    ..Caps::CONSERVATIVE
                };
                // The accessed flag where it is clear; the dirty state of what may be written and was not.
                let writable = attrs.perms.contains(Perms::WRITE);
                let used = !attrs.perms.is_empty();
                let expected = hardware_access && used && !attrs.accessed
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

/// The rights of one class and the other, as they stand.
fn perms(access: walker::Access) -> Perms {
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

/// What an index of a memory type means in the registers as this crate has them loaded; `None` where it has no word.
fn memory<F: Decoded>(index: u8) -> Option<Memory> {
    use Memory::{Device, DeviceStrict, NonCacheable, Normal, Tagged, WriteThrough};
    match F::REGIME {
        // MemAttr. What the engine never writes has no word: mixtures, other devices, what stage 1 says.
        walker::Regime::Arm64Stage2 {
            forced_write_back, ..
        } => {
            return match (index, forced_write_back) {
                (0b0000, _) => Some(DeviceStrict),
                (0b0001, _) => Some(Device),
                (0b0101, _) => Some(NonCacheable),
                (0b0110, true) | (0b1111, false) => Some(Normal),
                (0b1010, false) => Some(WriteThrough),
                _ => None,
            };
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
        // UC- (2 and 6) is uncacheable where no MTRR says otherwise; write-protected (5) is what we do not use.
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

/// A leaf of the table in the words of the engine. They are those of a kernel that has hardware record writes (arm64) or
/// runs with SMEP (x86-64), neither of which the table assumes.
fn in_words<F: Decoded>(leaf: &walker::Leaf, others: u64) -> Attrs {
    // The type is compared by `memory`.
    let memory = match F::REGIME {
        walker::Regime::Arm64Stage2 { .. } => 1,
        _ => 0,
    };
    let plain = walker::Leaf { memory, ..*leaf };
    let mut attrs = words::<F>(&plain);
    if F::HALVES && attrs.perms.contains(Perms::USER_WRITE) {
        // DDI 0487 D8.5.2.2: what the user may write is not executed by the privileged, be it clean or dirty.
        attrs.perms -= Perms::EXEC;
    }
    attrs.native = (u64::from(leaf.key) << 59 | others) & F::NATIVE;
    attrs
}

fn every_row_by_hand_means_what_the_manual_says<F: Decoded>() {
    let mut rows = 0;
    for row in table::ROWS
        .iter()
        .filter(|row| table::holds(row, F::REGIME))
    {
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
                assert_eq!(
                    F::effective(raw, level, Perms::empty()),
                    expected.perms,
                    "{row:x?}"
                );
                assert_eq!(raw & F::CONTIGUOUS != 0, leaf.contiguous, "{row:x?}");
                let run = leaf.size << F::contiguous(level);
                assert!(!leaf.contiguous || leaf.run_size == run, "{row:x?}");
            }
            // What the architecture reserves the engine neither writes nor judges, but for a block among pages.
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

fn a_leaf_by_hand_permits_what_the_tables_above_it_leave<F: Decoded>() {
    let of = table::rows_of(F::REGIME);
    for row in table::UNDER.iter().filter(|row| row.0 == of) {
        let &(_, tables, level, raw, permitted) = row;
        let denied = tables
            .iter()
            .fold(Perms::empty(), |denied, &table| denied | F::denied(table));
        let mut expected = perms(table::access(permitted));
        if !F::HALVES && !is_guest::<F>() && expected.contains(Perms::USER_READ) {
            // SMEP, which the table does not assume.
            expected -= Perms::EXEC;
        }
        let found = F::effective(raw, level_of::<F>(level), denied);
        assert_eq!(found, expected, "{row:x?}");
    }
}

fn hardware_writes_what_the_rows_by_hand_say<F: Decoded>() {
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
        for (hardware_access, hardware_dirty, expected) in [
            (true, false, used.is_some()),
            (false, true, written.is_some()),
        ] {
            let caps = Caps {
                hardware_access,
                hardware_dirty,
                ..Caps::CONSERVATIVE
            };
            assert_eq!(F::hardware_writes(raw, level, &caps), expected, "{row:x?}");
        }
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
);

for_each_format_of_other_types!(
    what_is_encoded_is_decoded_again_and_the_walker_agrees,
    native_bits_stand_where_they_are_given,
    every_bit_of_an_address_has_its_place,
    a_suspended_entry_is_invalid_and_not_a_hole_and_keeps_everything,
    a_parked_leaf_keeps_everything_and_comes_back,
    hardware_writes_what_the_manual_says_it_writes,
);

#[test]
fn rows_by_hand_are_what_is_parked() {
    let none = |attrs: Attrs| attrs.with_perms(Perms::empty());
    let marked = none(Attrs {
        software: 5,
        ..Attrs::USER_DATA
    });
    let clean = Attrs {
        dirty: false,
        ..marked
    };
    let kernel = none(Attrs::KERNEL_DATA);
    // Stage 1: UXN, PXN, nG, AF, inner shareable, AP[2] read only, bit 1, bit 55 for dirty. EL2: XN, AP[1] in the place of nG.
    check_encoded::<Arm64K4>(&[
        (marked, 0, 0x05e0_0000_0000_0f82),
        (marked, 1, 0x05e0_0000_0000_0f82),
        (clean, 0, 0x0560_0000_0000_0f82),
        (kernel, 0, 0x00e0_0000_0000_0782),
    ]);
    check_encoded::<Arm64El2<12, 48>>(&[(kernel, 0, 0x00c0_0000_0000_07c2)]);
    // Stage 2: XN[1], AF, inner shareable, write-back, bit 1.
    check_encoded::<Stage2<12, 40>>(&[(marked, 0, 0x05c0_0000_0000_073e)]);
    // XD, software, dirty, accessed, the mark at R/W; PS of a block. The address is all ones without one.
    check_encoded::<X86_64<4>>(&[
        (marked, 0, 0x800f_ffff_ffff_fa62),
        (clean, 0, 0x800f_ffff_ffff_fa22),
        (marked, 1, 0x800f_ffff_ffe0_0ae2),
        (kernel, 2, 0x800f_ffff_c000_01e2),
    ]);
    check_encoded::<Npt<4>>(&[(marked, 0, 0x800f_ffff_ffff_fa62)]);
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
    let clean = Attrs {
        dirty: false,
        ..ALL
    };
    let unused = Attrs {
        accessed: false,
        ..ALL
    };
    let marked = Attrs { software: 5, ..ALL };
    let shared = |shareability| Attrs {
        shareability,
        ..ALL
    };
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
        (
            ALL.with_memory(Memory::DeviceStrict),
            0,
            0x0008_0000_0000_07c3,
        ),
        (
            ALL.with_memory(Memory::NonCacheable),
            0,
            0x0008_0000_0000_07d7,
        ),
        (
            ALL.with_memory(Memory::WriteThrough),
            0,
            0x0008_0000_0000_07eb,
        ),
    ]);
    check_encoded::<Stage2<12, 48, false, true>>(&[
        (ALL, 0, 0x0008_0000_0000_07db),
        (
            ALL.with_memory(Memory::NonCacheable),
            0,
            0x0008_0000_0000_07d7,
        ),
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

#[test]
fn memory_types_are_those_of_another_register() {
    let of_arm = |encode: fn(&Attrs, Level) -> Result<u64, tablewright::Inexpressible>| {
        MEMORY.map(|memory| {
            let bits = encode(&Attrs::KERNEL_RODATA.with_memory(memory), Level::PAGE);
            bits.ok().map(|bits| bits >> 2 & 7)
        })
    };
    // In the order of `MEMORY`: normal, write-through, non-cacheable, device, strict device, tagged.
    let expected = [Some(3), None, Some(2), Some(1), Some(0), None];
    type Other = Arm64<12, 48, false, OTHER_MAIR>;
    assert_eq!(of_arm(Other::encode), expected);
    assert_eq!(
        of_arm(Arm64El2::<14, 47, false, OTHER_MAIR>::encode),
        expected
    );
    // Linux: two indices of normal memory, the second of which is that of tags where there are tags.
    type Linux = Arm64<12, 48, false, 0x0004_0044_ffff>;
    let expected = [Some(0), None, Some(2), Some(4), Some(3), None];
    assert_eq!(of_arm(Linux::encode), expected);
    type Tagged = Arm64<12, 48, false, 0x0004_0044_f0ff>;
    let expected = [Some(0), None, Some(2), Some(4), Some(3), Some(1)];
    assert_eq!(of_arm(Tagged::encode), expected);
    // Hints to allocate do not make another type, and the type that allocates is better: write-back 1110, 1111.
    type Hints = Arm64<12, 48, false, 0xaa_ffee>;
    let expected = [Some(1), Some(2), None, None, Some(3), None];
    assert_eq!(of_arm(Hints::encode), expected);

    // What only others write is decoded as well, D19.2 MAIR_EL1: nGRE, GRE; transient write-back and write-through;
    // write-back outside and non-cacheable inside; the types without XS.
    fn decoded<const MAIR: u64>(first: u64) -> [Memory; 2] {
        [first, first + 1].map(|index| {
            let page = Arm64::<12, 48, false, MAIR>::decode(0x703 | index << 2, Level::PAGE);
            let again = Arm64::<12, 48, false, MAIR>::encode(&page, Level::PAGE);
            assert!(again.is_ok(), "what was decoded can be encoded");
            page.memory
        })
    }
    use Memory::{Device, DeviceStrict, NonCacheable, Normal, WriteThrough};
    const ALL: u64 = 0x0000_bbf0_0044_04ff;
    assert_eq!(decoded::<{ ALL | 0x0c08 << 48 }>(6), [Device, Device]);
    assert_eq!(decoded::<{ ALL | 0x3377 << 48 }>(6), [Normal, WriteThrough]);
    assert_eq!(
        decoded::<{ ALL | 0x40f4 << 48 }>(6),
        [NonCacheable, NonCacheable]
    );
    assert_eq!(
        decoded::<{ ALL | 0x01a0 << 48 }>(6),
        [WriteThrough, DeviceStrict]
    );
    // Where there is no such type, as one that is stricter.
    assert_eq!(decoded::<0x0440_3308>(0), [Device, Device]);
    assert_eq!(decoded::<0x0044_3308>(0), [DeviceStrict, NonCacheable]);

    let of_x86 = |encode: fn(&Attrs, Level) -> Result<u64, tablewright::Inexpressible>,
                  attrs: Attrs| {
        [
            Memory::Normal,
            Memory::WriteThrough,
            Memory::NonCacheable,
            Memory::Device,
        ]
        .map(|memory| {
            let bits = encode(&attrs.with_memory(memory), Level::new(1));
            bits.ok().map(|bits| bits >> 3 & 3 | bits >> 10 & 4)
        })
    };
    let expected = [Some(0), Some(1), None, Some(3)];
    assert_eq!(
        of_x86(X86_64::<4, RESET_PAT>::encode, Attrs::KERNEL_RODATA),
        expected
    );
    assert_eq!(
        of_x86(Npt::<4, RESET_PAT>::encode, Attrs::USER_RODATA),
        expected
    );
    // UC- where there is no UC.
    let expected = [Some(0), None, None, Some(1)];
    assert_eq!(
        of_x86(
            X86_64::<4, 0x0606_0606_0606_0706>::encode,
            Attrs::KERNEL_RODATA
        ),
        expected
    );
    // Types with the highest bit of the index.
    type High = X86_64<5, 0x0001_0406_0505_0505>;
    let expected = [Some(4), Some(5), Some(6), Some(7)];
    assert_eq!(of_x86(High::encode, Attrs::KERNEL_RODATA), expected);
    for (index, memory) in [
        (0, Memory::Normal),
        (4, Memory::Normal),
        (5, Memory::WriteThrough),
        (6, Memory::NonCacheable),
        (7, Memory::Device),
    ] {
        let large = (index & 3) << 3 | (index & 4) << 10 | 0x81;
        assert_eq!(High::decode(large, Level::new(1)).memory, memory, "{index}");
        let small = (index & 3) << 3 | (index & 4) << 5 | 1;
        assert_eq!(High::decode(small, Level::PAGE).memory, memory, "{index}");
    }
}

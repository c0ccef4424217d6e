//! Parts that the tests share: a plain model of a space, and the separate walker as its judge.
#![allow(dead_code)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::ops::ControlFlow;

use tablewright::{
    Address, AddressSpace, Attrs, Format, Liveness, Memory, Pa, Perms, Platform, Shareability, Va,
    bbm::Rule, format::*,
};
use tablewright_hosted::Hosted;
use tablewright_walker as walker;
use tablewright_walker::{DirtyState, Granule, Regime};

/// Numbers that look random and are those of a seed (SplitMix64; Steele, Lea and Flood, OOPSLA
/// 2014).
pub struct Dice(Cell<u64>);

impl Dice {
    pub const fn new(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    pub fn next(&self) -> u64 {
        let seed = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(seed);
        let mixed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn roll(&self, sides: u64) -> u64 {
        self.next() % sides
    }
}

/// A format under test, and what the walker calls it.
pub trait Decoded: Format {
    const REGIME: Regime;
    /// The value of `MAIR_EL1` or `IA32_PAT`.
    const TYPES: u64 = match Self::RULE {
        Rule::ARM => MAIR,
        _ => PAT,
    };
}

/// One of stage 1: its addresses are virtual.
pub trait Judged: Decoded<Input = Va> {}

impl<F: Decoded<Input = Va>> Judged for F {}

macro_rules! judged {
    ($($format:ty => $regime:expr $(, $types:expr)?;)*) => {
        $(impl Decoded for $format {
            const REGIME: Regime = $regime;
            $(const TYPES: u64 = $types;)?
        })*
    };
}

judged! {
    Arm64K4 => Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    Arm64K4Wide => Regime::Arm64Stage1 { granule: Granule::K4, wide: true };
    Arm64K16 => Regime::Arm64Stage1 { granule: Granule::K16, wide: false };
    Arm64K16Wide => Regime::Arm64Stage1 { granule: Granule::K16, wide: true };
    Arm64K64 => Regime::Arm64Stage1 { granule: Granule::K64, wide: false };
    Arm64K64Wide => Regime::Arm64Stage1 { granule: Granule::K64, wide: true };
    Arm64<12, 33> => sized(Granule::K4, 33, false);
    Arm64K4Va39 => sized(Granule::K4, 39, false);
    Arm64<12, 48, true> => sized(Granule::K4, 48, true);
    Arm64K16Va36 => sized(Granule::K16, 36, false);
    Arm64<14, 44, true> => sized(Granule::K16, 44, true);
    Arm64K16Va47 => sized(Granule::K16, 47, false);
    Arm64<16, 28> => sized(Granule::K64, 28, false);
    Arm64K64Va42 => sized(Granule::K64, 42, false);
    Arm64El2<12, 39> => el2(Granule::K4, 39, false);
    Arm64El2K4 => el2(Granule::K4, 48, false);
    Arm64El2K16Wide => el2(Granule::K16, 52, true);
    Arm64El2<16, 42> => el2(Granule::K64, 42, false);
    Arm64<12, 48, false, OTHER_MAIR> => sized(Granule::K4, 48, false), OTHER_MAIR;
    Arm64<12, 48, false, MAIR, { shared(47) }> => sized(Granule::K4, 48, false);
    Arm64<12, 52, true, MAIR, { shared(51) }> => sized(Granule::K4, 52, true);
    Arm64<16, 52, true, MAIR, { shared(51) }> => sized(Granule::K64, 52, true);
    Arm64El2<14, 47, false, OTHER_MAIR> => el2(Granule::K16, 47, false), OTHER_MAIR;
    X86_64<4, RESET_PAT> => Regime::X86_64 { levels: 4 }, RESET_PAT;
    Npt<4, RESET_PAT> => Regime::Npt { levels: 4 }, RESET_PAT;
    X86_64<4> => Regime::X86_64 { levels: 4 };
    X86_64<5> => Regime::X86_64 { levels: 5 };
    X86_64<4, PAT, { tablewright::format::shared(47) }> => Regime::X86_64 { levels: 4 };
    X86_64<4, PAT, SHADOW_STACKS> => Regime::X86_64 { levels: 4 };
    Stage2<12, 40> => stage2(Granule::K4, 40, false, false);
    Stage2<12, 48, false, true> => stage2(Granule::K4, 48, false, true);
    Stage2<12, 52, true> => stage2(Granule::K4, 52, true, false);
    Stage2<14, 40> => stage2(Granule::K16, 40, false, false);
    Stage2<14, 52, true, true> => stage2(Granule::K16, 52, true, true);
    Stage2<16, 33, false, true> => stage2(Granule::K64, 33, false, true);
    Stage2<16, 52, true> => stage2(Granule::K64, 52, true, false);
    Ept<4> => Regime::Ept { levels: 4, mode_based: false };
    Ept<5, true> => Regime::Ept { levels: 5, mode_based: true };
    Npt<4> => Regime::Npt { levels: 4 };
    Npt<5> => Regime::Npt { levels: 5 };
    Sv39 => Regime::Riscv { levels: 3, guest: false };
    Sv39<false> => Regime::Riscv { levels: 3, guest: false }, 0;
    Sv48 => Regime::Riscv { levels: 4, guest: false };
    Sv57 => Regime::Riscv { levels: 5, guest: false };
    Sv39x4 => Regime::Riscv { levels: 3, guest: true };
    Sv48x4 => Regime::Riscv { levels: 4, guest: true };
    Sv57x4 => Regime::Riscv { levels: 5, guest: true };
}

/// From index 0: a device without early acknowledgement, a device, non-cacheable, normal, and
/// normal again without a hint to allocate; no write-through and no tags.
pub const OTHER_MAIR: u64 = 0x0000_00cc_ff44_0400;
/// `IA32_PAT` after a reset (SDM vol. 3A 13.12.2): nothing that combines writes.
pub const RESET_PAT: u64 = 0x0007_0406_0007_0406;

const fn sized(granule: Granule, input_bits: u8, wide: bool) -> Regime {
    Regime::Arm64Stage1Sized { granule, input_bits, wide }
}

const fn el2(granule: Granule, input_bits: u8, wide: bool) -> Regime {
    Regime::Arm64El2 { granule, input_bits, wide }
}

const fn stage2(granule: Granule, input_bits: u8, wide: bool, forced_write_back: bool) -> Regime {
    Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back }
}

/// Whether the format is one of Arm, whose levels count downwards.
pub fn is_arm<F: Format>() -> bool {
    F::RULE == Rule::ARM
}

/// Whether a page is written only while it is marked as written, by software where hardware does
/// not do it.
pub fn is_written_when_marked<F: Decoded>() -> bool {
    is_arm::<F>() || matches!(F::REGIME, Regime::Riscv { .. })
}

/// Whether the format is one of stage 2.
pub fn is_guest<F: Format>() -> bool {
    !F::Input::SIGNED
}

/// Whether the format is that of EL2 alone, which has no user.
pub fn is_el2<F: Decoded>() -> bool {
    matches!(F::REGIME, Regime::Arm64El2 { .. })
}

/// Makes a module of tests for each format of arm64 stage 1 that has another input size, and for
/// those of EL2 alone.
#[macro_export]
macro_rules! for_each_other_format {
    ($($test:ident),* $(,)?) => {
        $crate::for_each_guest_format!(@ [$($test),*]
            arm64_4k_33 => tablewright::format::Arm64<12, 33>;
            arm64_4k_39 => tablewright::format::Arm64K4Va39;
            arm64_4k_48_wide => tablewright::format::Arm64<12, 48, true>;
            arm64_16k_36 => tablewright::format::Arm64K16Va36;
            arm64_16k_44_wide => tablewright::format::Arm64<14, 44, true>;
            arm64_16k_47 => tablewright::format::Arm64K16Va47;
            arm64_64k_28 => tablewright::format::Arm64<16, 28>;
            arm64_64k_42 => tablewright::format::Arm64K64Va42;
            el2_4k_39 => tablewright::format::Arm64El2<12, 39>;
            el2_4k => tablewright::format::Arm64El2K4;
            el2_16k_wide => tablewright::format::Arm64El2K16Wide;
            el2_64k_42 => tablewright::format::Arm64El2<16, 42>;
        );
    };
}

/// Runs a test for the formats whose trees have another shape: tables of a root that is smaller,
/// other levels, no upper half. What edits do to a tree does not depend on the rest.
#[macro_export]
macro_rules! for_each_other_shape {
    ($($test:ident),* $(,)?) => {
        $crate::for_each_guest_format!(@ [$($test),*]
            arm64_4k_33 => tablewright::format::Arm64<12, 33>;
            arm64_16k_36 => tablewright::format::Arm64K16Va36;
            arm64_64k_28 => tablewright::format::Arm64<16, 28>;
            el2_4k => tablewright::format::Arm64El2K4;
            el2_64k_42 => tablewright::format::Arm64El2<16, 42>;
        );
    };
}

/// Makes a module of tests for formats that have their memory types by other indices.
#[macro_export]
macro_rules! for_each_format_of_other_types {
    ($($test:ident),* $(,)?) => {
        $crate::for_each_guest_format!(@ [$($test),*]
            arm64_other_mair => tablewright::format::Arm64<12, 48, false,
                { $crate::common::OTHER_MAIR }>;
            el2_other_mair => tablewright::format::Arm64El2<14, 47, false,
                { $crate::common::OTHER_MAIR }>;
            arm64_realm => tablewright::format::Arm64<12, 48, false, { tablewright::format::MAIR },
                { tablewright::format::shared(47) }>;
            arm64_wide_realm => tablewright::format::Arm64<12, 52, true,
                { tablewright::format::MAIR }, { tablewright::format::shared(51) }>;
            arm64_64k_realm => tablewright::format::Arm64<16, 52, true,
                { tablewright::format::MAIR }, { tablewright::format::shared(51) }>;
            x86_64_other_pat => tablewright::format::X86_64<4, { $crate::common::RESET_PAT }>;
            x86_64_shared => tablewright::format::X86_64<4, { tablewright::format::PAT },
                { tablewright::format::shared(47) }>;
            x86_64_shadow_stacks => tablewright::format::X86_64<4, { tablewright::format::PAT },
                { tablewright::format::SHADOW_STACKS }>;
            sv39_untyped => tablewright::format::Sv39<false>;
            npt_other_pat => tablewright::format::Npt<4, { $crate::common::RESET_PAT }>;
        );
    };
}

/// Makes a module of tests for each format of stage 1.
#[macro_export]
macro_rules! for_each_format {
    ($($test:ident),* $(,)?) => {
        $crate::for_each_format!(@ [$($test),*]
            arm64_4k Arm64K4, arm64_4k_wide Arm64K4Wide, arm64_16k Arm64K16,
                arm64_16k_wide Arm64K16Wide,
            arm64_64k Arm64K64, arm64_64k_wide Arm64K64Wide);
        $crate::for_each_format!(@@ [$($test),*] x86_64_4level 4, x86_64_5level 5);
        $crate::for_each_format!(@ [$($test),*] sv39 Sv39, sv48 Sv48, sv57 Sv57);
    };
    (@ $tests:tt $($module:ident $format:ident),*) => {
        $($crate::for_each_format!(@@@ $tests $module tablewright::format::$format);)*
    };
    (@@ $tests:tt $($module:ident $levels:literal),*) => {
        $($crate::for_each_format!(@@@ $tests $module tablewright::format::X86_64<$levels>);)*
    };
    (@@@ [$($test:ident),*] $module:ident $format:ty) => {
        mod $module {
            $(#[test]
            fn $test() {
                super::$test::<$format>();
            })*
        }
    };
}

/// Makes a module of tests for each format of stage 2.
#[macro_export]
macro_rules! for_each_guest_format {
    ($($test:ident),* $(,)?) => {
        $crate::for_each_guest_format!(@ [$($test),*]
            stage2_4k_40 => tablewright::format::Stage2<12, 40>;
            stage2_4k_48_forced => tablewright::format::Stage2<12, 48, false, true>;
            stage2_4k_52_wide => tablewright::format::Stage2<12, 52, true>;
            stage2_16k_40 => tablewright::format::Stage2<14, 40>;
            stage2_16k_52_wide_forced => tablewright::format::Stage2<14, 52, true, true>;
            stage2_64k_33_forced => tablewright::format::Stage2<16, 33, false, true>;
            stage2_64k_52_wide => tablewright::format::Stage2<16, 52, true>;
            ept_4level => tablewright::format::Ept<4>;
            ept_5level_mode_based => tablewright::format::Ept<5, true>;
            npt_4level => tablewright::format::Npt<4>;
            npt_5level => tablewright::format::Npt<5>;
            sv39x4 => tablewright::format::Sv39x4;
            sv48x4 => tablewright::format::Sv48x4;
            sv57x4 => tablewright::format::Sv57x4;
        );
    };
    (@ $tests:tt $($module:ident => $format:ty;)*) => {
        $($crate::for_each_format!(@@@ $tests $module $format);)*
    };
}

/// Says what uses a space. Only the tests walk their tables.
pub fn used<F: Decoded, P: Platform + Clone>(space: &mut AddressSpace<F, P>, liveness: Liveness) {
    match liveness {
        // SAFETY: no processor walks the tables.
        Liveness::Dead => unsafe { space.make_dead() },
        Liveness::Live => space.make_live(),
        Liveness::Own => space.make_own(),
    }
}

/// The mapping of a page: the frame is that of the first page of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    pub size: u64,
    pub pa: u64,
    pub attrs: Attrs,
}

/// A plain model of a space: stretches of pages by their first address, sorted. It knows nothing of
/// tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model(BTreeMap<u64, Mapped>);

impl Model {
    /// Makes sure that no stretch reaches over `at`.
    fn cut(&mut self, at: u64) {
        let over = self.0.range_mut(..at).next_back();
        if let Some((&first, stretch)) = over
            && stretch.size > at - first
        {
            let head = at - first;
            let tail =
                Mapped { size: stretch.size - head, pa: stretch.pa + head, attrs: stretch.attrs };
            stretch.size = head;
            self.0.insert(at, tail);
        }
    }

    fn cut_range(&mut self, first: u64, last: u64) {
        self.cut(first);
        if last != u64::MAX {
            self.cut(last + 1);
        }
    }

    pub fn lookup(&self, va: u64) -> Option<(u64, Attrs)> {
        let (&first, stretch) = self.0.range(..=va).next_back()?;
        (va - first < stretch.size).then(|| (stretch.pa + (va - first), stretch.attrs))
    }

    /// The first mapped address in the range.
    pub fn first_mapped(&self, first: u64, last: u64) -> Option<u64> {
        if self.lookup(first).is_some() {
            return Some(first);
        }
        self.0.range(first..=last).next().map(|(&at, _)| at)
    }

    pub fn map(&mut self, first: u64, size: u64, pa: u64, attrs: Attrs) {
        assert_eq!(self.first_mapped(first, first + (size - 1)), None);
        self.0.insert(first, Mapped { size, pa, attrs });
    }

    /// Unmaps the range and returns what was mapped there.
    pub fn unmap(&mut self, first: u64, last: u64) -> Stretches {
        self.cut_range(first, last);
        let gone: Vec<u64> = self.0.range(first..=last).map(|(&at, _)| at).collect();
        let mut stretches = Stretches::default();
        for at in gone {
            let stretch = self.0.remove(&at).unwrap();
            stretches.add(at, stretch);
        }
        stretches
    }

    pub fn change(&mut self, first: u64, last: u64, change: impl Fn(Attrs) -> Attrs) {
        self.cut_range(first, last);
        for (_, stretch) in self.0.range_mut(first..=last) {
            stretch.attrs = change(stretch.attrs);
        }
    }

    /// Returns the pages in a form in which what continues is one stretch.
    pub fn stretches(&self) -> Stretches {
        let mut all = Stretches::default();
        for (&first, &stretch) in &self.0 {
            all.add(first, stretch);
        }
        all
    }
}

/// Stretches of addresses in order, merged where one continues the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stretches(pub Vec<(u64, Mapped)>);

impl Stretches {
    pub fn add(&mut self, first: u64, mapped: Mapped) {
        if let Some((start, last)) = self.0.last_mut()
            && start.wrapping_add(last.size) == first
            && last.pa.wrapping_add(last.size) == mapped.pa
            && last.attrs == mapped.attrs
        {
            last.size += mapped.size;
            return;
        }
        self.0.push((first, mapped));
    }

    pub fn sorted(mut self) -> Self {
        self.0.sort_by_key(|&(first, _)| first);
        let mut merged = Self::default();
        for (first, mapped) in self.0 {
            merged.add(first, mapped);
        }
        merged
    }
}

/// Returns the mappings that the walker finds under a root, in the words of the engine's
/// attributes. The translation of bits to words is made here from the manuals and not from the
/// engine.
pub fn judge<F: Decoded>(platform: &Hosted, root: Pa) -> Stretches {
    let mut found = Stretches::default();
    for half in [walker::Half::Lower, walker::Half::Upper] {
        if F::HALVES && half == walker::Half::Upper {
            continue;
        }
        let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
        walker::leaves(F::REGIME, root.get(), half, &mut read, |leaf| {
            let mapped = Mapped { size: leaf.size, pa: leaf.pa, attrs: words::<F>(leaf) };
            found.add(leaf.va, mapped);
            ControlFlow::Continue(())
        })
        .unwrap_or_else(|fault| panic!("{}: {fault:?}", F::NAME));
    }
    found
}

/// Judges like [`judge`], and finds what permits nothing, of which the walker says that it is not
/// mapped, as the engine finds it.
pub fn judge_with_parked<F: Decoded>(
    platform: &Hosted,
    space: &AddressSpace<F, &Hosted>,
) -> Stretches {
    let mut found = judge::<F>(platform, space.root());
    let seen = found.clone();
    space.walk_all(|leaf| {
        if leaf.attrs().perms.is_empty() {
            let (first, mapped) = (
                leaf.input().bits(),
                Mapped { size: leaf.size(), pa: leaf.frame().get(), attrs: leaf.attrs() },
            );
            let last = first + (mapped.size - 1);
            let meets = |(at, it): &(u64, Mapped)| *at <= last && first <= at + (it.size - 1);
            let valid = seen.0.iter().find(|stretch| meets(stretch));
            assert!(valid.is_none(), "{}: {leaf:?} is {valid:?}", F::NAME);
            found.0.push((first, mapped));
        }
    });
    found.sorted()
}

/// The attributes of a leaf that the walker decoded.
pub fn words<F: Decoded>(leaf: &walker::Leaf) -> Attrs {
    let regime = F::REGIME;
    let mut perms = Perms::empty();
    let (kernel, user) = (leaf.access.privileged, leaf.access.user);
    perms.set(Perms::READ, kernel.read);
    perms.set(Perms::EXEC, kernel.execute);
    perms.set(Perms::USER_READ, user.read);
    perms.set(Perms::USER_EXEC, user.execute);
    let (write, dirty) = match leaf.dirty {
        // With hardware management a page is writable if DBM is set; it is dirty if AP[2] is clear
        // (S2AP[1] is set), or if it was when the permission to write went, which software bit 55
        // keeps.
        DirtyState::Arm64 { dbm, read_only } => {
            (dbm || !read_only, !read_only || leaf.software & 1 != 0)
        }
        // Bit 53 of x86 keeps it of a page that cannot be written: with D it would be a shadow
        // stack.
        DirtyState::Bit { dirty } => {
            let has = matches!(regime, Regime::X86_64 { .. } | Regime::Npt { .. });
            (kernel.write, dirty || has && leaf.software & 1 << 4 != 0)
        }
    };
    perms.set(Perms::WRITE, write);
    // In stage 2 both write alike, and what they may read does not come into it.
    let stage_1 = !is_guest::<F>();
    perms.set(Perms::USER_WRITE, write && (user.read || !stage_1));
    let memory = match regime {
        Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. } | Regime::Arm64El2 { .. } => {
            match (F::TYPES >> (8 * leaf.memory)) & 0xff {
                0xff => Memory::Normal,
                0x04 => Memory::Device,
                0x44 => Memory::NonCacheable,
                0x00 => Memory::DeviceStrict,
                0xf0 => Memory::Tagged,
                0xbb => Memory::WriteThrough,
                other => panic!("memory type {other:#x}"),
            }
        }
        Regime::X86_64 { .. } | Regime::Npt { .. } => {
            of_x86((F::TYPES >> (8 * leaf.memory)) & 0xff)
        }
        Regime::Ept { .. } => of_x86(u64::from(leaf.memory)),
        // PBMT.
        Regime::Riscv { .. } => match leaf.memory {
            0 => Memory::Normal,
            1 => Memory::NonCacheable,
            2 => Memory::Device,
            other => panic!("memory type {other:#x}"),
        },
        // MemAttr: outer and inner alike, or a device; with forced write-back a type by itself.
        Regime::Arm64Stage2 { forced_write_back, .. } => match (leaf.memory, forced_write_back) {
            (0b1111, false) | (0b0110, true) => Memory::Normal,
            (0b1010, false) => Memory::WriteThrough,
            (0b0101, _) => Memory::NonCacheable,
            (0b0001, _) => Memory::Device,
            (0b0000, _) => Memory::DeviceStrict,
            (other, _) => panic!("memory type {other:#x}"),
        },
    };
    if matches!(regime, Regime::X86_64 { .. }) && user.execute {
        // With SMEP, which the walker assumes off, the privileged do not execute what the user can
        // reach.
        perms -= Perms::EXEC;
    }
    let software = match regime {
        Regime::Arm64Stage1 { .. }
        | Regime::Arm64Stage1Sized { .. }
        | Regime::Arm64El2 { .. }
        | Regime::Arm64Stage2 { .. } => leaf.software >> 1,
        Regime::X86_64 { .. } | Regime::Npt { .. } => leaf.software & 7,
        Regime::Riscv { .. } => leaf.software,
        // Bits 54:52, of which the walker knows five, above bit 11.
        Regime::Ept { .. } => leaf.software >> 1 & 7,
    };
    Attrs {
        perms,
        memory,
        shareability: match leaf.shareability {
            Some(0) => Shareability::Non,
            Some(2) => Shareability::Outer,
            _ => Shareability::Inner,
        },
        global: leaf.global,
        accessed: leaf.accessed,
        dirty,
        software: software as u8,
        native: 0,
    }
}

/// A memory type of x86, as PAT and EPT number them.
fn of_x86(number: u64) -> Memory {
    match number {
        6 => Memory::Normal,
        1 => Memory::NonCacheable,
        0 => Memory::Device,
        4 => Memory::WriteThrough,
        other => panic!("memory type {other:#x}"),
    }
}

/// Fails where the two differ, and says the first place where they do: the lists may be as long as
/// a table.
#[track_caller]
pub fn assert_same<T: PartialEq + Debug>(found: &[T], expected: &[T], what: impl Display) {
    if found == expected {
        return;
    }
    let pairs = found.iter().zip(expected);
    let alike = pairs.take_while(|(a, b)| a == b).count();
    let from_there =
        |all: &[T]| format!("{:x?}", all.iter().skip(alike).take(2).collect::<Vec<_>>());
    panic!(
        "{what}: {} and not {} in number; after {alike} that are as expected\n   found: \
         {}\nexpected: {}",
        found.len(),
        expected.len(),
        from_there(found),
        from_there(expected),
    );
}

/// Every table reachable from a root, with its entries.
#[derive(PartialEq, Eq)]
pub struct Snapshot(Vec<(u64, Vec<u64>)>);

impl Snapshot {
    /// Fails where an edit that failed has left a trace.
    #[track_caller]
    pub fn assert_untouched(&self, after: &Self) {
        if self != after {
            let entries = |of: &Self| -> Vec<_> {
                let entries = of.0.iter().flat_map(|(table, bits)| {
                    let numbered = bits.iter().enumerate();
                    numbered.map(|(index, &entry)| (*table, index, entry))
                });
                entries.collect()
            };
            let what = "tables that were to stay as they were: (table, index, entry)";
            assert_same(&entries(after), &entries(self), what);
        }
    }
}

/// Takes a picture of every table that is reachable from a root.
pub fn snapshot<F: Decoded>(platform: &Hosted, root: Pa) -> Snapshot {
    let mut tables = Vec::new();
    let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
    walker::tables(F::REGIME, root.get(), &mut read, |table| {
        tables.push((table.level, table.pa));
        ControlFlow::Continue(())
    })
    .unwrap();
    let count = tables.len();
    let snapshot: BTreeMap<u64, Vec<u64>> = tables
        .into_iter()
        .map(|(level, pa)| {
            let entries = F::REGIME.table_entries(level);
            let bits =
                (0..entries).map(|index| platform.read(Pa::new(pa), index).unwrap()).collect();
            (pa, bits)
        })
        .collect();
    assert_eq!(snapshot.len(), count, "a table is reachable twice");
    Snapshot(snapshot.into_iter().collect())
}

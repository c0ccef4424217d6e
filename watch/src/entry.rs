//! The meaning of one entry of a table, and of its change.

use crate::invalidation::Span;
use tablewright_walker::{Denied, Descriptor, DirtyState, Leaf, Permissions, Regime, decode};

/// The place of an entry, which decides how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) regime: Regime,
    pub(crate) level: i8,
    /// The first address that it translates.
    pub(crate) va: u64,
}

/// The meaning of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing. One that the architecture reserves counts as this.
    Invalid,
    Table(u64),
    Leaf(Leaf),
}

impl Place {
    pub(crate) fn read(self, descriptor: u64) -> Entry {
        match decode(self.regime, self.level, self.va, Denied::NONE, descriptor) {
            Descriptor::Invalid | Descriptor::Reserved(_) => Entry::Invalid,
            Descriptor::Table { pa, .. } => Entry::Table(pa),
            Descriptor::Leaf(leaf) => Entry::Leaf(leaf),
        }
    }

    /// How much it counts in its table: nothing in the upper half of a root that has both, which is
    /// a space of its own.
    pub(crate) fn count(self, entry: Entry) -> u32 {
        let is_of_kernel = self.regime.shares_root() && self.va >> 63 != 0;
        u32::from(entry != Entry::Invalid && !is_of_kernel)
    }

    /// The addresses that it translates.
    pub(crate) fn span(self) -> Span {
        Span { first: self.va, last: self.va + (self.size() - 1) }
    }

    pub(crate) fn size(self) -> u64 {
        self.regime.entry_size(self.level)
    }
}

/// The meaning of the numbers of memory types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Types {
    /// MAIR_EL1, once it was written.
    pub(crate) mair: Option<u64>,
    /// MAIR_EL2.
    pub(crate) mair_el2: Option<u64>,
}

impl Types {
    /// The register that a regime has.
    pub(crate) fn of(self, regime: Regime) -> Option<u64> {
        match regime {
            Regime::Arm64El2 { .. } => self.mair_el2,
            _ => self.mair,
        }
    }

    /// The attributes of a type. Tags are no part of them: Tagged Normal memory is write-back
    /// (DDI 0487 D23.2, MAIR_EL1), and of one memory type and cacheability with what is not tagged.
    fn attributes(self, regime: Regime, index: u8) -> u8 {
        if matches!(regime, Regime::Arm64Stage2 { .. }) {
            return index;
        }
        match (self.of(regime).unwrap_or(0) >> (8 * (index & 7))) as u8 {
            0xf0 => 0xff,
            attributes => attributes,
        }
    }
}

/// Why an entry may not become another without a break (DDI 0487 D8.17.1), if it may not.
pub(crate) fn needs_break(
    regime: Regime,
    old: Entry,
    new: Entry,
    types: Types,
) -> Option<&'static str> {
    let attributes = |leaf: Leaf| types.attributes(regime, leaf.memory);
    match (old, new) {
        (Entry::Invalid, _) | (_, Entry::Invalid) => None,
        (Entry::Table(old), Entry::Table(new)) => (old != new).then_some("another table"),
        (Entry::Table(_), Entry::Leaf(_)) | (Entry::Leaf(_), Entry::Table(_)) => {
            Some("another size")
        }
        (Entry::Leaf(old), Entry::Leaf(new)) => {
            let differences = [
                (old.pa != new.pa, "another output address"),
                (attributes(old) != attributes(new), "another memory type"),
                (old.shareability != new.shareability, "another shareability"),
                (old.contiguous != new.contiguous, "another size, by the Contiguous bit"),
                (new.global && !old.global, "global, and was not"),
            ];
            differences.into_iter().find(|(differs, _)| *differs).map(|(_, why)| why)
        }
    }
}

/// The page that an entry gives to user memory. `None` for stage 2: who writes to a page, the guest
/// or the hypervisor, is not known.
pub(crate) fn user_page(place: Place, entry: u64) -> Option<u64> {
    match place.read(entry) {
        Entry::Leaf(_) if matches!(place.regime, Regime::Arm64Stage2 { .. }) => None,
        Entry::Leaf(leaf) if leaf.size == 1 << place.regime.page_shift() => {
            let user = leaf.access.user;
            (user.read || user.write || user.execute).then_some(leaf.pa)
        }
        _ => None,
    }
}

/// Whether a leaf allows less than another did.
pub(crate) fn allows_less(old: &Leaf, new: &Leaf) -> bool {
    let lost = |old: Permissions, new: Permissions| {
        old.read && !new.read || old.execute && !new.execute || old.write && !new.write
    };
    // A leaf that hardware may make writable is writable.
    let records = |leaf: &Leaf| matches!(leaf.dirty, DirtyState::Arm64 { dbm: true, .. });
    let is_writable = |leaf: &Leaf| leaf.access.privileged.write || records(leaf);
    let mut alike = *new;
    if is_writable(new) {
        alike.access.privileged.write = old.access.privileged.write;
        alike.access.user.write = old.access.user.write;
    }
    lost(old.access.privileged, alike.access.privileged)
        || lost(old.access.user, alike.access.user)
        || is_writable(old) && !is_writable(new)
}

/// Describes an entry of a table of `level` in words. `va` is the first address that it translates;
/// `types` is as in [`memory_type`].
pub fn describe(regime: Regime, types: Option<u64>, level: i8, va: u64, descriptor: u64) -> String {
    let place = Place { regime, level, va };
    match place.read(descriptor) {
        Entry::Invalid if descriptor == 0 => "nothing".into(),
        Entry::Invalid => format!("nothing ({descriptor:#x})"),
        Entry::Table(pa) => format!("a table at {pa:#x}"),
        Entry::Leaf(leaf) => {
            let size = match leaf.size >> 10 {
                kib @ ..1024 => format!("{kib} KiB"),
                kib @ ..0x10_0000 => format!("{} MiB", kib >> 10),
                kib => format!("{} GiB", kib >> 20),
            };
            let (kernel, user) = (leaf.access.privileged, leaf.access.user);
            let run = if leaf.contiguous { " of a run" } else { "" };
            let memory = memory_type(regime, types, leaf.memory);
            format!("{size}{run} at {:#x}, kernel {kernel}, user {user}, {memory}", leaf.pa)
        }
    }
}

/// The memory of a leaf in words: what `memory` says under these `types`, which are MAIR or
/// IA32_PAT where the regime has one.
pub fn memory_type(regime: Regime, types: Option<u64>, memory: u8) -> String {
    let field = types.map(|types| (types >> (8 * (memory & 7))) as u8);
    let known = match (regime, field) {
        (Regime::Ept { .. }, _) => type_x86(memory & 7),
        (Regime::Riscv { .. }, _) => match memory {
            0 => "as the platform",
            1 => "uncached",
            2 => "device",
            _ => "reserved",
        },
        // D8.6.6: MemAttr<3:2> is zero for devices. With FWB it only restricts stage 1.
        (Regime::Arm64Stage2 { forced_write_back: false, .. }, _) => match memory {
            0b1111 => "write-back",
            0b0101 => "uncached",
            0..=3 => "device",
            _ => "mixed",
        },
        (Regime::Arm64Stage2 { .. }, _) => match memory {
            0b0110 => "write-back",
            0b0111 => "as stage 1",
            0b0101 => "uncached",
            0..=3 => "device",
            _ => "reserved",
        },
        (Regime::X86_64 { .. } | Regime::Npt { .. }, Some(field)) => match field & 7 {
            7 => "uncached-minus",
            number => type_x86(number),
        },
        (_, Some(0xff)) => "write-back",
        (_, Some(0xf0)) => "tagged",
        (_, Some(0xbb)) => "write-through",
        (_, Some(0x44)) => "uncached",
        (_, Some(0x00..=0x0f)) => "device",
        (_, Some(_)) => "mixed",
        (_, None) => return format!("type {memory}"),
    };
    known.to_owned()
}

/// A memory type of x86 (SDM vol. 3A 13.3), as EPT and IA32_PAT have it.
fn type_x86(number: u8) -> &'static str {
    match number & 7 {
        0 => "uncached",
        1 => "write-combining",
        4 => "write-through",
        5 => "write-protected",
        6 => "write-back",
        _ => "reserved",
    }
}

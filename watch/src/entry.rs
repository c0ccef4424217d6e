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
    /// MAIR_EL1.
    pub(crate) mair: u64,
}

impl Types {
    /// The attributes of a type. Tags are no part of them: Tagged Normal memory is write-back
    /// (DDI 0487 D23.2, MAIR_EL1), and of one memory type and cacheability with what is not tagged.
    fn attributes(self, index: u8) -> u8 {
        match (self.mair >> (8 * (index & 7))) as u8 {
            0xf0 => 0xff,
            attributes => attributes,
        }
    }
}

/// Why an entry may not become another without a break (DDI 0487 D8.17.1), if it may not.
pub(crate) fn needs_break(old: Entry, new: Entry, types: Types) -> Option<&'static str> {
    match (old, new) {
        (Entry::Invalid, _) | (_, Entry::Invalid) => None,
        (Entry::Table(old), Entry::Table(new)) => (old != new).then_some("another table"),
        (Entry::Table(_), Entry::Leaf(_)) | (Entry::Leaf(_), Entry::Table(_)) => {
            Some("another size")
        }
        (Entry::Leaf(old), Entry::Leaf(new)) => {
            let differences = [
                (old.pa != new.pa, "another output address"),
                (
                    types.attributes(old.memory) != types.attributes(new.memory),
                    "another memory type",
                ),
                (old.shareability != new.shareability, "another shareability"),
                (old.contiguous != new.contiguous, "another size, by the Contiguous bit"),
                (new.global && !old.global, "global, and was not"),
            ];
            differences.into_iter().find(|(differs, _)| *differs).map(|(_, why)| why)
        }
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

/// Describes an entry of a table of `level` in words. `va` is the first address that it translates.
pub fn describe(regime: Regime, level: i8, va: u64, descriptor: u64) -> String {
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
            format!(
                "{size}{run} at {:#x}, kernel {kernel}, user {user}, memory type {}",
                leaf.pa, leaf.memory
            )
        }
    }
}

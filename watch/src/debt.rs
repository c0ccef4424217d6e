//! Debts: what was changed, and may be remembered as it was.

use std::collections::{BTreeMap, BTreeSet};

use tablewright_walker::Regime;

use crate::At;
use crate::entry::{Place, Types, describe};
use crate::finding::Change;
use crate::invalidation::{Cpus, Invalidation, Span, Stages};
use crate::tables::Number;

/// Under which identifiers something is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// Of every address space: what is global.
    Global,
    /// Of one.
    Asid(u16),
    /// Of any: all have to be named.
    Any,
    /// Of EL2, which has no identifiers.
    El2,
    /// Of a guest: stage 2 alone.
    Guest(u16),
    /// Of a guest: what is combined of stage 1 and stage 2.
    Combined(u16),
}

impl Tag {
    /// Whether an invalidation names it (DDI 0487 C5.5): one by address takes what is global with
    /// it, one of an address space does not. Combined entries are found by virtual addresses of the
    /// guest's, which are not known.
    pub(crate) fn is_named(self, by: &Invalidation) -> bool {
        let is_of = |vmid| by.vmid.is_none_or(|named| named == vmid);
        let is_first = matches!(by.stages, Stages::First | Stages::Both) && is_of(0);
        match self {
            Self::Global => is_first && by.globals,
            Self::Asid(asid) => is_first && by.asid.is_none_or(|named| named == asid),
            Self::Any => is_first && by.asid.is_none(),
            Self::El2 => by.stages == Stages::El2,
            Self::Guest(vmid) => matches!(by.stages, Stages::Second | Stages::Both) && is_of(vmid),
            Self::Combined(vmid) => {
                let is_of_stages = matches!(by.stages, Stages::First | Stages::Both);
                is_of_stages && by.asid.is_none() && is_of(vmid)
            }
        }
    }
}

/// Walks that have seen a change of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Published {
    No,
    /// The walks of the processor that made it.
    Here,
    Everywhere,
}

pub(crate) struct Debt {
    pub(crate) space: usize,
    /// The place of the entry, and its physical address.
    pub(crate) place: Place,
    pub(crate) entry: u64,
    /// Its values before, the last at the end, and its value now.
    pub(crate) olds: Vec<u64>,
    pub(crate) new: u64,
    pub(crate) at: At,
    /// It led to a table.
    pub(crate) is_table: bool,
    /// There is no translation any more. Otherwise it allows less than it did.
    pub(crate) lost: bool,
    pub(crate) published: Published,
    /// Processors that may still remember it.
    pub(crate) owed: Vec<(Tag, Cpus)>,
    /// The tables that a walk may reach as long as this is remembered.
    pub(crate) tables: Vec<Number>,
    /// The last invalidation that came near it, and why that was not enough.
    pub(crate) near: Option<Near>,
    /// The instruction that used anew the page to which it leads, and what that was.
    pub(crate) reused: Option<(At, String)>,
}

/// An invalidation that was not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Near {
    pub(crate) at: At,
    pub(crate) invalidation: Invalidation,
    pub(crate) why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It would be, if it were complete.
    NotComplete,
    Unpublished,
    OtherAsid,
    /// It is of stage 2 alone.
    Combined,
    LeavesOnly,
    OtherLevel,
    OtherGranule,
    Local,
}

impl Debt {
    /// The processors that may still remember it.
    pub(crate) fn cpus(&self) -> Cpus {
        self.owed.iter().fold(0, |all, (_, cpus)| all | cpus)
    }

    /// Those that may remember it under this identifier.
    fn cpus_of(&self, tag: Tag) -> Cpus {
        let owed = self.owed.iter().find(|(owed, _)| *owed == tag);
        owed.map_or(0, |(_, cpus)| *cpus)
    }

    /// The change, in words.
    pub(crate) fn change(&self, types: Types) -> Change {
        let Place { regime, level, va } = self.place;
        let words = |descriptor| describe(regime, types.of(regime), level, va, descriptor);
        Change {
            at: self.at,
            span: self.place.span(),
            entry: self.entry,
            level: self.place.level,
            old: words(self.olds.last().copied().unwrap_or_default()),
            new: words(self.new),
        }
    }

    /// Whether it is of a stage 2.
    pub(crate) fn is_of_guest(&self) -> bool {
        matches!(self.place.regime, Regime::Arm64Stage2 { .. })
    }

    /// Takes what an invalidation covers: who is covered, or why not all of it is.
    pub(crate) fn cover(&self, by: &Invalidation, cpu: u8) -> (Vec<(Tag, Cpus)>, Option<Why>) {
        let needed = if by.broadcast { Published::Everywhere } else { Published::Here };
        // The level of a hint is that of the leaf: tables above it are on the way.
        let is_at = |level: i8| match self.is_table {
            true => self.place.level < level,
            false => self.place.level == level,
        };
        let page_shift = self.place.regime.page_shift();
        if !self.owed.iter().any(|(tag, _)| tag.is_named(by)) {
            return (Vec::new(), Some(Why::OtherAsid));
        } else if self.published < needed {
            return (Vec::new(), Some(Why::Unpublished));
        } else if by.leaves_only && self.is_table {
            return (Vec::new(), Some(Why::LeavesOnly));
        } else if by.hint.is_some_and(|hint| hint.granule.page_shift() != page_shift) {
            return (Vec::new(), Some(Why::OtherGranule));
        } else if by.hint.and_then(|hint| hint.level).is_some_and(|level| !is_at(level)) {
            return (Vec::new(), Some(Why::OtherLevel));
        }
        let cpus = if by.broadcast { Cpus::MAX } else { 1 << cpu };
        let named = self.owed.iter().filter(|(tag, _)| tag.is_named(by));
        // Combined entries are made from entries of stage 2: as long as those are remembered they
        // come back.
        let source = |tag| match tag {
            Tag::Combined(vmid) if by.stages == Stages::First => self.cpus_of(Tag::Guest(vmid)),
            _ => 0,
        };
        let covered: Vec<_> = named.map(|&(tag, of)| (tag, of & cpus & !source(tag))).collect();
        let why = match () {
            () if covered.len() < self.owed.len() && by.stages == Stages::Second => {
                Some(Why::Combined)
            }
            () if covered.len() < self.owed.len() => Some(Why::OtherAsid),
            () if !by.broadcast && self.owed.iter().any(|(_, of)| of & !cpus != 0) => {
                Some(Why::Local)
            }
            () => None,
        };
        (covered, why)
    }

    /// Nobody remembers this any more. Whether all is paid.
    pub(crate) fn pay(&mut self, paid: &[(Tag, Cpus)]) -> bool {
        for (tag, cpus) in paid {
            for (_, of) in self.owed.iter_mut().filter(|(owed, _)| owed == tag) {
                *of &= !cpus;
            }
        }
        self.owed.retain(|(_, cpus)| *cpus != 0);
        self.owed.is_empty()
    }

    /// Says what is missing.
    pub(crate) fn missing(&self) -> String {
        let Some(Near { at, invalidation, why }) = self.near else {
            return match self.published {
                Published::No => "neither a DSB nor an invalidation of it since".into(),
                Published::Here | Published::Everywhere => "no invalidation of it since".into(),
            };
        };
        let why = match why {
            Why::NotComplete => "no DSB has completed it",
            Why::Unpublished => "no DSB stands between the change and it",
            Why::OtherAsid if self.is_of_guest() => "it is not of the guest's stage 2",
            Why::OtherAsid => "it is not of the address space",
            Why::Combined => "it leaves what is combined with stage 1",
            Why::LeavesOnly => "it is of leaves alone, and this was a table",
            Why::OtherLevel => "its hint names another level",
            Why::OtherGranule => "its hint names another granule",
            Why::Local => "other CPUs may remember it",
        };
        format!(
            "the invalidation at {:#x} on CPU {} ({}) is not enough: {why}",
            at.pc,
            at.cpu,
            invalidation.describe()
        )
    }
}

/// The debts of one space, by level and first address.
#[derive(Default)]
pub(crate) struct Index {
    all: BTreeMap<(i8, u64), u64>,
    /// Those about tables, which are few.
    tables: BTreeSet<(i8, u64)>,
}

impl Index {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn get(&self, level: i8, va: u64) -> Option<u64> {
        self.all.get(&(level, va)).copied()
    }

    pub(crate) fn insert(&mut self, level: i8, va: u64, debt: u64, is_table: bool) {
        self.all.insert((level, va), debt);
        if is_table {
            self.tables.insert((level, va));
        }
    }

    pub(crate) fn remove(&mut self, level: i8, va: u64) {
        self.all.remove(&(level, va));
        self.tables.remove(&(level, va));
    }

    /// Those about tables that do not meet these addresses.
    pub(crate) fn tables_beside(&self, span: Span, size: impl Fn(i8) -> u64) -> Vec<u64> {
        let meets =
            |(level, va): (i8, u64)| span.meets(Span { first: va, last: va + (size(level) - 1) });
        let beside = self.tables.iter().filter(|&&place| !meets(place));
        beside.filter_map(|place| self.all.get(place).copied()).collect()
    }

    /// Those that meet these addresses; the size of an entry of each level is known.
    pub(crate) fn meeting(&self, span: Option<Span>, size: impl Fn(i8) -> u64) -> Vec<u64> {
        let Some(span) = span else { return self.all.values().copied().collect() };
        let mut found = Vec::new();
        let mut next = self.all.first_key_value().map(|((level, _), _)| *level);
        while let Some(level) = next {
            let first = span.first & !(size(level) - 1);
            found
                .extend(self.all.range((level, first)..=(level, span.last)).map(|(_, &debt)| debt));
            next = self.all.range((level + 1, 0)..).next().map(|((level, _), _)| *level);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::{Index, Span};

    /// An invalidation of another address, which takes tables with it, leaves a leaf that stands
    /// where a table stood.
    #[test]
    fn a_leaf_in_the_place_of_a_table_is_no_table() {
        let mut index = Index::default();
        let size = |_| 2 << 20;
        let page = Span { first: 0, last: 0xfff };
        index.insert(2, 2 << 20, 1, true);
        index.insert(2, 0, 2, true);
        assert_eq!(index.tables_beside(page, size), [1]);
        index.remove(2, 2 << 20);
        index.insert(2, 2 << 20, 3, false);
        assert!(index.tables_beside(page, size).is_empty());
        assert_eq!(index.meeting(Some(page), size), [2]);
    }
}

//! Roots of tables: the processors that have one loaded, those that may remember something of it,
//! and the invalidations that may be of it.

use tablewright_walker::Regime;

use crate::arm64::Part;
use crate::debt::{Index, Tag};
use crate::invalidation::{Cpus, Invalidation, Stages};
use crate::tables::Number;

/// A root of tables.
pub(crate) struct Space {
    pub(crate) root: u64,
    pub(crate) part: Part,
    pub(crate) regime: Regime,
    pub(crate) table: Number,
    pub(crate) contexts: Vec<Context>,
    pub(crate) debts: Index,
}

/// An identifier under which a root was loaded.
pub(crate) struct Context {
    pub(crate) tag: Tag,
    /// Processors that have it loaded.
    pub(crate) loaded: Cpus,
    /// Processors that may remember something of it.
    pub(crate) held: Cpus,
}

/// The root of the upper half where both halves have one, and many share tables there.
pub(crate) const NO_TABLE: Number = Number::MAX;

impl Space {
    /// Levels have one number in roots of any height.
    pub(crate) fn of_upper_half(regime: Regime) -> Self {
        Self {
            root: 0,
            part: Part::Upper,
            regime: match regime {
                Regime::Riscv { guest, .. } => Regime::Riscv { levels: 5, guest },
                _ => Regime::X86_64 { levels: 5 },
            },
            table: NO_TABLE,
            contexts: Vec::new(),
            debts: Index::default(),
        }
    }

    /// Whether a processor has it loaded.
    pub(crate) fn is_walked(&self) -> bool {
        self.contexts.iter().any(|context| context.loaded != 0)
    }

    /// Whether an invalidation may be of this space.
    pub(crate) fn is_meant(&self, by: &Invalidation) -> bool {
        let is_of_half = |upper| by.span.is_none_or(|span| (span.first >> 63 != 0) == upper);
        match (self.part, by.stages) {
            (Part::Lower | Part::Upper, Stages::First | Stages::Both) => {
                by.every_table || is_of_half(self.part == Part::Upper)
            }
            (Part::El2, Stages::El2) | (Part::Guest, Stages::Second | Stages::Both) => true,
            // Of stage 1 the addresses are the guest's.
            (Part::Guest, Stages::First) => by.span.is_none(),
            _ => false,
        }
    }

    /// Returns who may remember a translation of this space.
    pub(crate) fn owed(&self, global: bool) -> Vec<(Tag, Cpus)> {
        let held = self.contexts.iter().filter(|context| context.held != 0);
        if global && matches!(self.part, Part::Lower | Part::Upper) {
            let cpus = held.fold(0, |cpus, context| cpus | context.held);
            return if cpus == 0 { Vec::new() } else { vec![(Tag::Global, cpus)] };
        }
        let mut owed: Vec<_> = held.map(|context| (context.tag, context.held)).collect();
        for place in 0..owed.len() {
            if let (Tag::Guest(vmid), cpus) = owed[place] {
                owed.push((Tag::Combined(vmid), cpus));
            }
        }
        owed
    }
}

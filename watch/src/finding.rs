//! Findings, in the words in which they are said.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::At;
use crate::invalidation::Span;

/// A rule of the architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// An entry became another that may not stand beside it in a TLB, with no break between them,
    /// or before the break was complete (DDI 0487 D8.17.1).
    BreakBeforeMake,
    /// An invalidation was issued by the processor that had changed the entry, and no DSB stands
    /// between the two: a walk may read the old entry after it (D8.17.5).
    Unpublished,
    /// A table that a walk may still reach was written to, or linked elsewhere.
    TableReused,
    /// A page that a translation of user memory may still reach was used anew.
    PageReused,
    /// An identifier of address spaces was loaded for a root while translations of another root may
    /// be held under it.
    IdentifierReused,
    /// An invalidation goes by the VMID in `VTTBR_EL2`, and the context was not synchronized since
    /// that was written: it may take the VMID before (DDI 0487 D1.6.4).
    Unsynchronized,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Self; 6] = [
        Self::BreakBeforeMake,
        Self::Unpublished,
        Self::TableReused,
        Self::PageReused,
        Self::IdentifierReused,
        Self::Unsynchronized,
    ];

    /// Its name, as an option has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BreakBeforeMake => "break-before-make",
            Self::Unpublished => "unpublished",
            Self::TableReused => "table-reused",
            Self::PageReused => "page-reused",
            Self::IdentifierReused => "identifier-reused",
            Self::Unsynchronized => "unsynchronized",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A change of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The instruction that made it.
    #[serde(flatten)]
    pub at: At,
    /// The addresses that the entry translates.
    pub span: Span,
    /// The physical address of the entry.
    #[serde(with = "crate::hex")]
    pub entry: u64,
    /// The level of its table.
    pub level: i8,
    /// The entry before and after, in words.
    pub old: String,
    /// See `old`.
    pub new: String,
}

/// A breach of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// The change whose maintenance is wrong, if there is one.
    pub change: Option<Change>,
    /// The maintenance that is missing.
    pub missing: String,
    /// The event that then broke the rule.
    pub then: String,
    /// The instruction of that event.
    #[serde(flatten)]
    pub at: At,
    /// How many of this kind were found: the same rule, broken by the same two instructions. What
    /// stands here is of the first of them.
    pub count: u64,
}

/// All that was found, each kind once.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    all: Vec<Finding>,
    known: HashMap<(Rule, u64, u64), usize>,
}

impl Findings {
    /// In the order in which they were found first.
    pub fn all(&self) -> &[Finding] {
        &self.all
    }

    /// Adds one. Two are of one kind if they break one rule by the same two instructions: the one
    /// that changed the entry and the one that broke the rule. `say` is called for the first.
    /// Returns what was added.
    pub(crate) fn add(
        &mut self,
        rule: Rule,
        change: Option<At>,
        at: At,
        say: impl FnOnce() -> (Option<Change>, String, String),
    ) -> Option<&Finding> {
        let kind = (rule, change.map_or(0, |at| at.pc), at.pc);
        if let Some(&known) = self.known.get(&kind) {
            self.all[known].count += 1;
            return None;
        }
        let (change, missing, then) = say();
        self.known.insert(kind, self.all.len());
        self.all.push(Finding { rule, change, missing, then, at, count: 1 });
        self.all.last()
    }
}

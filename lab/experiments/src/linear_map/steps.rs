//! The steps of the boot-time linear map: the techniques that others published, one after the
//! other, and our own way.

use tablewright_linear::{Technique, Techniques};

/// How the linear map is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As published, with these techniques.
    Published(Techniques),
    /// The engine's own way: all table memory through one coarse map, which is used while the map
    /// is built.
    Tablewright,
    /// As published with all techniques, through a map of all RAM to its own address.
    OneToOne,
    /// The same through slots of a block each.
    HugeSlots,
    /// The same, with leaves as large as fit, through the fixmap.
    Blocks,
    /// By the engine, with leaves as large as fit, through the fixmap.
    BlocksTablewright,
    /// Memory is added when the map is there: in the published way, with all techniques.
    Late,
    /// The same by the engine.
    LateTablewright,
}

impl Way {
    /// Whether the map is there before the clock starts.
    pub const fn is_late(self) -> bool {
        matches!(self, Self::Late | Self::LateTablewright)
    }

    /// Whether leaves are larger than a page.
    pub const fn has_blocks(self) -> bool {
        matches!(self, Self::Blocks | Self::BlocksTablewright)
    }
}

/// A row of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it is called.
    pub name: &'static str,
    /// What is done.
    pub way: Way,
}

impl Step {
    /// The engine's own way.
    pub const TABLEWRIGHT: Self = Self {
        name: "tablewright",
        way: Way::Tablewright,
    };
    /// Memory that is added when the map is there.
    pub const LATE: [Self; 2] = [
        Self {
            name: "late",
            way: Way::Late,
        },
        Self {
            name: "late-tablewright",
            way: Way::LateTablewright,
        },
    ];

    /// What was discussed, and not merged.
    pub const ALTERNATIVES: [Self; 4] = [
        Self {
            name: "one-to-one",
            way: Way::OneToOne,
        },
        Self {
            name: "huge-slots",
            way: Way::HugeSlots,
        },
        Self {
            name: "blocks",
            way: Way::Blocks,
        },
        Self {
            name: "blocks-tablewright",
            way: Way::BlocksTablewright,
        },
    ];

    /// Without any technique.
    pub fn base() -> Self {
        Self {
            name: "base",
            way: Way::Published(Techniques::default()),
        }
    }

    /// The steps in the order in which they were published, from nothing to everything.
    pub fn published() -> Vec<Self> {
        let mut on = Techniques::default();
        let rest = Technique::ALL.into_iter().map(|technique| {
            on = on.with(technique);
            Self {
                name: technique.name(),
                way: Way::Published(on),
            }
        });
        std::iter::once(Self::base()).chain(rest).collect()
    }

    /// All that was published, the engine's own, and memory that is added later.
    pub fn all() -> Vec<Self> {
        let mut all = Self::published();
        all.push(Self::TABLEWRIGHT);
        all.extend(Self::LATE);
        all
    }

    /// The techniques that are on, if it is one of the published ways.
    pub fn techniques(self) -> Option<Techniques> {
        match self.way {
            Way::Published(on) => Some(on),
            _ => None,
        }
    }
}

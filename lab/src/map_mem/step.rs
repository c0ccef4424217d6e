//! The steps of the boot-time linear map: the techniques that others published, one after the
//! other, and our own way.
//!
//! A technique is on or off, whatever the order in which they were added: what a step costs depends
//! on the set. A published row is found by its set, and a model that is true predicts any order.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;
use tablewright_linear::{Technique, Techniques};
use tablewright_machine::Time;

use crate::published::{Row, TableError};

/// How the linear map is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The published way, with these techniques.
    Published(Techniques),
    /// The engine's own way: all table memory through one coarse map, which is used while the map
    /// is built.
    Tablewright,
    /// All techniques, through a map of all RAM to its own address.
    OneToOne,
    /// All techniques, through slots of a block each.
    HugeSlots,
    /// All techniques, with leaves as large as fit, through the fixmap.
    Blocks,
    /// By the engine, with leaves as large as fit, through the fixmap.
    BlocksTablewright,
    /// Memory is added when the map is there: in the published way, with all techniques.
    Late,
    /// The engine, with memory that is known late.
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
    pub name: &'static str,
    pub way: Way,
}

impl Step {
    /// The engine's own way.
    pub const TABLEWRIGHT: Self = Self { name: "tablewright", way: Way::Tablewright };
    /// Memory that is added when the map is there.
    pub const LATE: [Self; 2] = [
        Self { name: "late", way: Way::Late },
        Self { name: "late-tablewright", way: Way::LateTablewright },
    ];

    /// Ways that were discussed, and not merged.
    pub const ALTERNATIVES: [Self; 4] = [
        Self { name: "one-to-one", way: Way::OneToOne },
        Self { name: "huge-slots", way: Way::HugeSlots },
        Self { name: "blocks", way: Way::Blocks },
        Self { name: "blocks-tablewright", way: Way::BlocksTablewright },
    ];

    /// Without any technique.
    pub fn base() -> Self {
        Self { name: "base", way: Way::Published(Techniques::default()) }
    }

    /// The steps in the order in which they were published, from nothing to everything.
    pub fn published() -> Vec<Self> {
        let mut on = Techniques::default();
        let rest = Technique::ALL.into_iter().map(|technique| {
            on = on.with(technique);
            Self { name: technique.name(), way: Way::Published(on) }
        });
        std::iter::once(Self::base()).chain(rest).collect()
    }

    /// All that was published, the engine's own, and memory that is added later.
    #[cfg(test)]
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

/// Figures of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// How long it took.
    pub time: Time,
    /// Tables of the finished map.
    pub tables: u64,
    /// Entries written, besides links to tables.
    pub entries: u64,
    /// How often a window was moved to another table.
    pub windows: u64,
    /// Invalidations issued.
    pub invalidations: u64,
    /// Waits until invalidations were complete.
    pub waits: u64,
    /// Barriers after stores to entries.
    pub barriers: u64,
}

/// The step that a published row is of.
pub fn step_of(row: &Row) -> Result<Step, TableError> {
    let on = techniques_of(row)?;
    Ok(Step { name: on.names().last().unwrap_or(&Step::base().name), way: Way::Published(on) })
}

/// Returns the techniques of a published row: `cumulative up to NAME` in the order of publication,
/// or `with NAME, NAME`.
pub fn techniques_of(row: &Row) -> Result<Techniques, TableError> {
    let unknown = |what: &str| {
        TableError::Configuration(
            row.configuration.clone(),
            format!("{what}: expected 'cumulative up to STEP' or 'with STEP, STEP'"),
        )
    };
    let technique = |name: &str| {
        Technique::ALL
            .into_iter()
            .find(|technique| technique.name() == name)
            .ok_or_else(|| unknown(&format!("no step is called '{name}'")))
    };
    let configuration = row.without_remark();
    if let Some(name) = configuration.strip_prefix("cumulative up to ") {
        if name == Step::base().name {
            return Ok(Techniques::default());
        }
        let last = technique(name)?;
        let up_to = Technique::ALL.into_iter().take_while(|step| *step <= last);
        return Ok(up_to.fold(Techniques::default(), Techniques::with));
    }
    let names = configuration
        .strip_prefix("with ")
        .ok_or_else(|| unknown("no configuration of map-mem"))?;
    names
        .split(',')
        .try_fold(Techniques::default(), |set, name| Ok(set.with(technique(name.trim())?)))
}

/// One step, or all, as the command line has it: with everything that was published before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The window is moved for each run of 16 entries
    Base,
    /// ... and no longer for each run of entries
    NoContRemap,
    /// ... and no longer to zero a table
    NoAllocRemap,
    /// ... and slots of the window are cleared together
    LazyUnmap,
    /// ... and one barrier for a table
    BatchBarriers,
    /// The engine's own way
    Tablewright,
    /// Memory that is added after the boot, as published and by the engine
    Late,
    /// Ideas that were discussed beside: a map of all RAM for the time being, slots of a block
    /// each, and blocks instead of pages
    Alternatives,
    /// All of them but the alternatives
    All,
}

impl Choice {
    /// The rows to show.
    pub fn steps(self) -> Vec<Step> {
        let mut all = Step::published();
        all.push(Step::TABLEWRIGHT);
        match self {
            Self::All => [all, Step::LATE.to_vec()].concat(),
            Self::Late => Step::LATE.to_vec(),
            Self::Alternatives => Step::ALTERNATIVES.to_vec(),
            one => vec![all[one as usize]],
        }
    }
}

/// Steps in an order of the user's own, each with those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order(Vec<Step>);

impl Order {
    /// The rows to show.
    pub fn steps(&self) -> Vec<Step> {
        self.0.clone()
    }
}

/// Why a list of steps makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// Not a technique.
    #[error("no step is called '{0}': use {names}", names = Order::names())]
    Unknown(String),
    /// It adds nothing to those before.
    #[error("step '{0}' is named twice")]
    Twice(&'static str),
    /// Nothing can come before it.
    #[error("'base' has none of the other steps, so it comes first or not at all")]
    Base,
}

impl Order {
    fn names() -> String {
        let names: Vec<_> = Step::published().iter().map(|step| step.name).collect();
        names.join(", ")
    }
}

impl std::str::FromStr for Order {
    type Err = OrderError;

    fn from_str(text: &str) -> Result<Self, OrderError> {
        let mut on = Techniques::default();
        let mut steps: Vec<Step> = Vec::new();
        for name in text.split(',').map(str::trim) {
            let known = Step::published();
            let Some(step) = known.iter().find(|step| step.name == name) else {
                return Err(OrderError::Unknown(name.to_owned()));
            };
            if steps.iter().any(|before| before.name == step.name) {
                return Err(OrderError::Twice(step.name));
            }
            match Technique::ALL.into_iter().find(|one| one.name() == name) {
                Some(technique) => on = on.with(technique),
                None if !steps.is_empty() => return Err(OrderError::Base),
                None => {}
            }
            steps.push(Step { name: step.name, way: Way::Published(on) });
        }
        Ok(Self(steps))
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|step| step.name).collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;
    use proptest::prelude::*;

    #[test]
    fn each_published_row_is_one_step() {
        let rows = published::built_in("map-mem");
        for column in rows.chunks(5) {
            let sets: Vec<_> = column.iter().map(|row| techniques_of(row).unwrap()).collect();
            let steps: Vec<_> =
                Step::published().iter().map(|step| step.techniques().unwrap()).collect();
            assert_eq!(sets, steps);
        }
    }

    fn row(configuration: &str) -> Result<Techniques, TableError> {
        let mut row = published::built_in("map-mem").remove(0);
        row.configuration = configuration.to_owned();
        techniques_of(&row)
    }

    #[test]
    fn a_row_may_have_techniques_in_another_order() {
        let set = row("with batch-barriers, no-cont-remap").unwrap();
        assert_eq!(set.names(), ["no-cont-remap", "batch-barriers"]);
        for (configuration, says) in [
            ("-m 4", "no configuration of map-mem"),
            ("cumulative up to fly", "no step is called 'fly'"),
            ("with base", "no step is called 'base'"),
            ("with ", "no step is called ''"),
        ] {
            let message = row(configuration).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn every_choice_is_a_row_or_all() {
        for choice in Choice::value_variants() {
            let name = choice.to_possible_value().unwrap().get_name().to_owned();
            let steps = choice.steps();
            match choice {
                Choice::All => assert_eq!(steps.len(), 8),
                Choice::Alternatives => assert_eq!(steps.len(), 4),
                Choice::Late => {
                    assert!(steps.len() == 2 && steps.iter().all(|step| step.way.is_late()))
                }
                _ => assert_eq!((steps.len(), steps[0].name), (1, name.as_str())),
            }
        }
    }

    #[test]
    fn an_order_adds_each_step_to_those_before() {
        let order: Order = "base, lazy-unmap,no-cont-remap".parse().unwrap();
        let sets: Vec<_> =
            order.steps().iter().map(|step| step.techniques().unwrap().names()).collect();
        assert_eq!(sets, [vec![], vec!["lazy-unmap"], vec!["no-cont-remap", "lazy-unmap"]]);
        assert_eq!(order.to_string(), "base,lazy-unmap,no-cont-remap");
        for (text, error) in [
            ("fly", OrderError::Unknown("fly".into())),
            ("", OrderError::Unknown(String::new())),
            ("base,", OrderError::Unknown(String::new())),
            ("tablewright", OrderError::Unknown("tablewright".into())),
            ("lazy-unmap,lazy-unmap", OrderError::Twice("lazy-unmap")),
            ("base,base", OrderError::Twice("base")),
            ("lazy-unmap,base", OrderError::Base),
        ] {
            assert_eq!(text.parse::<Order>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_order_is_its_own_text(text in "((base|lazy-unmap|no-cont-remap|fly|), ?){0,4}base") {
            if let Ok(order) = text.parse::<Order>() {
                prop_assert_eq!(order.to_string().parse::<Order>(), Ok(order));
            }
        }
    }
}

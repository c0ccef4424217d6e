//! Machine profiles: what a machine is, what its operations cost, how it is known, and what stays unexplained.
//!
//! A profile is a TOML file. Costs are in nanoseconds, as decimal numbers, and are held in whole picoseconds without
//! rounding. A profile does not only say what things cost but also *where each figure comes from*: fitted to rows of a
//! published table, read in a manual, or assumed; and what the model with these costs does not explain, with what was
//! ruled out as its reason. A row that a profile was fitted on shows nothing about the model; every other row is a test.
//!
//! ```
//! use tablewright_machine::{Profile, Source, Time};
//! let text = r#"
//!     name = "mine"
//!     description = "A machine to try things on"
//!     system = { core = "none", kind = "imagined", ram_gib = 4 }
//!     architecture = { format = "arm64", granule = "16K", bbm = 2 }
//!     costs = { entry = 1.5, publish = 16, complete = 1_000.125 }
//!     [[provenance]]
//!     of = ["costs.entry", "costs.publish", "costs.complete"]
//!     source = "assumed"
//!     note = "round numbers"
//! "#;
//! let profile = Profile::parse(text, "mine.toml")?;
//! assert_eq!(profile.costs.complete, Time::ps(1_000_125));
//! assert_eq!(profile.provenance_of("costs.entry").map(|entry| entry.source), Some(Source::Assumed));
//!
//! let wrong = text.replace("publish = 16", "publish = -16");
//! assert_eq!(
//!     Profile::parse(&wrong, "mine.toml").unwrap_err().to_string(),
//!     "mine.toml: line 6: costs.publish: -16 is not a cost: 0 to 1000000000 nanoseconds, at most three decimals",
//! );
//! # Ok::<(), tablewright_machine::ProfileError>(())
//! ```

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::architecture::{Architecture, Granule, Ordering, Regime};
use crate::costs::Costs;
use crate::time::Time;

/// A machine that experiments can run on.
///
/// ```
/// use tablewright_machine::Profile;
/// let profile = Profile::load("ampere-altra-vm-64g")?;
/// assert_eq!(profile.system.ram_bytes(), 64 << 30);
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// What it is called: lower-case letters, digits and `-`.
    pub name: String,
    /// What it is, in a line or two.
    pub description: String,
    /// The system that it describes.
    pub system: System,
    /// The rules that the machine follows.
    pub architecture: Architecture,
    /// What its operations cost. What the file leaves out is zero here: see [`states`](Self::states).
    pub costs: Costs,
    /// Which costs the file gives, a bit for each.
    stated: u32,
    /// Where costs and rules come from. A key is named at most once.
    pub provenance: Vec<Provenance>,
    /// The published rows that costs were fitted on.
    pub fitted_on: Vec<RowSelector>,
    /// What the model with these costs does not explain.
    pub unexplained: Vec<Unexplained>,
}

/// The system that a profile describes.
///
/// ```
/// use tablewright_machine::{Kind, Profile};
/// let system = Profile::load("ampere-altra-metal-512g")?.system;
/// assert_eq!((system.kind, system.ram_gib), (Kind::Metal, 512));
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// The core.
    pub core: String,
    /// Whether it was a virtual machine.
    pub kind: Kind,
    /// CPUs, where it is known how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// RAM in GiB.
    pub ram_gib: u32,
    /// What published tables call it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published_as: Vec<String>,
}

impl System {
    /// RAM in bytes.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// assert_eq!(Profile::load("apple-m2-vm-16g")?.system.ram_bytes(), 16 << 30);
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub const fn ram_bytes(&self) -> u64 {
        (self.ram_gib as u64) << 30
    }
}

/// Whether a system is virtual, bare, or nowhere.
///
/// ```
/// use tablewright_machine::{Kind, Profile};
/// assert_eq!(Profile::load("neutral")?.system.kind, Kind::Imagined);
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A virtual machine.
    Vm,
    /// Bare metal.
    Metal,
    /// No system at all: assumed figures.
    Imagined,
}

/// Where some of a profile's figures come from.
///
/// ```
/// use tablewright_machine::{Profile, Source};
/// let profile = Profile::load("ampere-altra-vm-256g")?;
/// let of = |key| profile.provenance_of(key).map(|entry| entry.source);
/// assert_eq!(of("costs.publish"), Some(Source::Fitted));
/// assert_eq!(of("costs.complete"), Some(Source::Carried));
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Which: keys of the file, such as `costs.entry` and `architecture.idc`.
    pub of: Vec<String>,
    /// How they are known.
    pub source: Source,
    /// From where exactly, and how sure it is.
    pub note: String,
}

/// How a figure is known.
///
/// ```
/// use tablewright_machine::{Profile, Source};
/// let neutral = Profile::load("neutral")?;
/// assert!(neutral.provenance.iter().all(|entry| entry.source == Source::Assumed));
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Fitted to published results: the rows of [`Profile::fitted_on`].
    Fitted,
    /// Fitted to published results of another system, and carried over: what it says of this one is a prediction.
    Carried,
    /// Published as a figure.
    Published,
    /// Said by the maker's manual, or demanded by the architecture.
    Documented,
    /// No source says so; chosen.
    Assumed,
}

impl Source {
    /// The word for it, as in the file.
    ///
    /// ```
    /// assert_eq!(tablewright_machine::Source::Carried.name(), "carried");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fitted => "fitted",
            Self::Carried => "carried",
            Self::Published => "published",
            Self::Documented => "documented",
            Self::Assumed => "assumed",
        }
    }
}

/// Names rows of a published table.
///
/// ```
/// use tablewright_machine::RowSelector;
/// let column = RowSelector { system: "Ampere Altra VM, 64G".into(), ..RowSelector::default() };
/// assert!(column.selects("Ampere Altra VM, 64G", "cumulative up to base"));
/// assert!(!column.selects("Ampere Altra VM, 256G", "cumulative up to base"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowSelector {
    /// The system, as the table has it.
    pub system: String,
    /// The configuration, as the table has it; all of them if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<String>,
    /// The metric, as the table has it; all of them if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
}

impl RowSelector {
    /// Whether it names rows of this configuration.
    ///
    /// ```
    /// use tablewright_machine::RowSelector;
    /// let row = RowSelector { system: "a".into(), configuration: Some("b".into()), metric: None };
    /// assert!(row.selects("a", "b") && !row.selects("a", "c"));
    /// ```
    pub fn selects(&self, system: &str, configuration: &str) -> bool {
        self.system == system
            && self
                .configuration
                .as_ref()
                .is_none_or(|this| this == configuration)
    }

    /// Whether it names the row of this configuration with this metric.
    ///
    /// ```
    /// use tablewright_machine::RowSelector;
    /// let row = RowSelector { system: "a".into(), configuration: None, metric: Some("c".into()) };
    /// assert!(row.selects_metric("a", "b", "c") && !row.selects_metric("a", "b", "d"));
    /// ```
    pub fn selects_metric(&self, system: &str, configuration: &str, metric: &str) -> bool {
        self.selects(system, configuration)
            && self.metric.as_ref().is_none_or(|this| this == metric)
    }
}

/// Something that the model does not explain.
///
/// ```
/// use tablewright_machine::Profile;
/// let profile = Profile::load("ampere-altra-metal-512g")?;
/// let last = |gap: &&tablewright_machine::Unexplained| {
///     gap.rows.iter().any(|row| row.selects("Ampere Altra Metal, 512G", "cumulative up to batch-barriers"))
/// };
/// assert!(!profile.unexplained.iter().find(last).unwrap().ruled_out.is_empty());
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unexplained {
    /// What is published and what the model says.
    pub what: String,
    /// The published rows in which it shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<RowSelector>,
    /// What cannot be the reason, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ruled_out: Vec<String>,
}

/// Why there is no profile.
///
/// ```
/// use tablewright_machine::Profile;
/// let message = Profile::load("ampere").unwrap_err().to_string();
/// assert!(message.starts_with("no profile 'ampere': "), "{message}");
/// ```
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Neither a built-in profile nor a file.
    #[error("no profile '{0}': give the path of a file, or one of {list}", list = names())]
    Unknown(String),
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Read {
        /// Which.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// The file is no profile.
    #[error("{file}: {place}: {problem}")]
    Invalid {
        /// Which.
        file: String,
        /// The line, where there is one, and the key.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
}

macro_rules! built_in {
    ($($name:literal)*) => {
        /// The profiles that come with the crate: their names and their text.
        const BUILT_IN: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../profiles/", $name, ".toml")))),*];
    };
}

built_in! {
    "ampere-altra-vm-64g"
    "ampere-altra-vm-256g"
    "ampere-altra-metal-512g"
    "apple-m2-vm-16g"
    "sa8775p-vm-36g"
    "hr350a-metal-256g"
    "kunpeng-920"
    "neutral"
    "x86-12-vcpus"
    "x86-416-vcpus"
    "hyperv-16-vcpus"
}

fn names() -> String {
    let names: Vec<&str> = Profile::built_in().collect();
    names.join(", ")
}

/// No profile is larger, and `/dev/zero` is never read to its end.
const MAX_FILE: u64 = 1 << 20;
/// A cost of a second is more than any operation here has.
const MAX_COST: Time = Time::s(1);
/// RAM that fits into 52 bits of address.
const MAX_RAM_GIB: u32 = 1 << 22;
/// More sets, ways or tables than any TLB or walk cache has.
const MAX_TLB: usize = 1 << 16;

impl Profile {
    /// The names of the profiles that come with the crate.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// for name in Profile::built_in() {
    ///     assert_eq!(Profile::load(name)?.name, name);
    /// }
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// The profile of that name, or the one in the file at that path.
    ///
    /// # Errors
    /// The file cannot be read, or is no profile.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// assert!(Profile::load("neutral").is_ok());
    /// assert!(Profile::load("/no/such/file.toml").is_err());
    /// ```
    pub fn load(name_or_path: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
            return Self::parse(text, name);
        }
        let path = Path::new(name_or_path);
        let read = || -> io::Result<String> {
            let mut text = String::new();
            File::open(path)?
                .take(MAX_FILE + 1)
                .read_to_string(&mut text)?;
            if text.len() as u64 > MAX_FILE {
                return Err(io::Error::other("larger than any profile"));
            }
            Ok(text)
        };
        match read() {
            Ok(text) => Self::parse(&text, name_or_path),
            // Without a directory and a file type it was meant as a name.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    && !name_or_path.contains(['/', '.', '\\']) =>
            {
                Err(ProfileError::Unknown(name_or_path.to_owned()))
            }
            Err(error) => Err(ProfileError::Read {
                path: name_or_path.to_owned(),
                error,
            }),
        }
    }

    /// The profile in a text; `file` is what errors call it.
    ///
    /// # Errors
    /// The text is no profile. The message is one line with the place and the key.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let message = Profile::parse("nmae = 1", "a.toml").unwrap_err().to_string();
    /// assert!(message.starts_with("a.toml: line 1: nmae: unknown field"), "{message}");
    /// ```
    pub fn parse(text: &str, file: &str) -> Result<Self, ProfileError> {
        let invalid = |place: String, problem: &str| ProfileError::Invalid {
            file: file.to_owned(),
            place,
            problem: problem.split_whitespace().collect::<Vec<_>>().join(" "),
        };
        let of_toml = |key: &str, error: &toml::de::Error| {
            let mut place = String::new();
            if let Some(span) = error.span() {
                let before = text.as_bytes().get(..span.start).unwrap_or_default();
                let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
                place = format!("line {line}");
            }
            // The path is `.` where the error is in the text as a whole.
            if key != "." {
                let comma = if place.is_empty() { "" } else { ": " };
                place = format!("{place}{comma}{key}");
            }
            if place.is_empty() {
                place = "the file".to_owned();
            }
            invalid(place, error.message())
        };
        let deserializer = toml::Deserializer::parse(text).map_err(|error| of_toml(".", &error))?;
        let raw: ProfileToml = serde_path_to_error::deserialize(deserializer)
            .map_err(|error| of_toml(&error.path().to_string(), error.inner()))?;
        raw.check()
            .map_err(|(key, problem)| invalid(key.to_owned(), &problem))
    }

    /// The profile as a file, which [`parse`](Self::parse) reads back as the same.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let neutral = Profile::load("neutral")?;
    /// assert_eq!(Profile::parse(&neutral.to_toml(), "again")?, neutral);
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn to_toml(&self) -> String {
        // Tables, strings and numbers that TOML can hold, by the types; there is nothing to refuse.
        toml::to_string_pretty(&ProfileToml::of(self)).unwrap_or_default()
    }

    /// Whether the file gives a cost, be it zero; what it leaves out is not known to be nothing.
    ///
    /// ```
    /// use tablewright_machine::{Cost, Profile};
    /// let neutral = Profile::load("neutral")?;
    /// let states = |name: &str| name.parse::<Cost>().is_ok_and(|cost| neutral.states(cost));
    /// assert!(states("complete") && !states("cycle"));
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub const fn states(&self, cost: Cost) -> bool {
        self.stated >> cost.0 & 1 != 0
    }

    /// Gives a cost.
    ///
    /// ```
    /// use tablewright_machine::{Cost, Profile, Time};
    /// let mut profile = Profile::load("neutral")?;
    /// let Ok(cycle) = "cycle".parse::<Cost>() else { unreachable!() };
    /// profile.state(cycle, Time::us(20));
    /// assert!(profile.states(cycle) && profile.costs.cycle == Time::us(20));
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn state(&mut self, cost: Cost, time: Time) {
        cost.set(&mut self.costs, time);
        self.stated |= 1 << cost.0;
    }

    /// Where the figure of a key comes from, if the profile says so.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let neutral = Profile::load("neutral")?;
    /// assert!(neutral.provenance_of("costs.complete").is_some());
    /// assert!(neutral.provenance_of("costs.nothing").is_none());
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn provenance_of(&self, key: &str) -> Option<&Provenance> {
        self.provenance
            .iter()
            .find(|entry| entry.of.iter().any(|of| of == key))
    }

    /// Whether one metric of a published configuration is one that the costs were fitted on.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let profile = Profile::load("kunpeng-920")?;
    /// let row = &profile.fitted_on[0];
    /// let (configuration, metric) = (row.configuration.as_deref().unwrap(), row.metric.as_deref().unwrap());
    /// assert!(profile.is_fitted_on_metric(&row.system, configuration, metric));
    /// assert!(!profile.is_fitted_on_metric(&row.system, configuration, "another"));
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn is_fitted_on_metric(&self, system: &str, configuration: &str, metric: &str) -> bool {
        self.fitted_on
            .iter()
            .any(|row| row.selects_metric(system, configuration, metric))
    }

    /// Whether a published row is one that the costs were fitted on.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let profile = Profile::load("ampere-altra-vm-256g")?;
    /// assert!(profile.is_fitted_on("Ampere Altra VM, 256G", "cumulative up to lazy-unmap"));
    /// assert!(!profile.is_fitted_on("Ampere Altra VM, 256G", "cumulative up to base"));
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn is_fitted_on(&self, system: &str, configuration: &str) -> bool {
        self.fitted_on
            .iter()
            .any(|row| row.selects(system, configuration))
    }
}

/// One of the costs, by name: for what changes costs one at a time, such as a fit.
///
/// ```
/// use tablewright_machine::{Cost, Costs, Time};
/// let mut costs = Costs::default();
/// let publish: Cost = "publish".parse()?;
/// publish.set(&mut costs, Time::ns(16));
/// assert_eq!((costs.publish, publish.get(&costs)), (Time::ns(16), Time::ns(16)));
/// assert_eq!(publish.key(), "costs.publish");
/// # Ok::<(), tablewright_machine::UnknownCost>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(usize);

/// There is no cost of that name.
///
/// ```
/// use tablewright_machine::Cost;
/// let message = "free".parse::<Cost>().unwrap_err().to_string();
/// assert!(message.starts_with("no cost is called 'free': use one of entry, "), "{message}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no cost is called '{0}': use one of {list}", list = Cost::all().map(Cost::name).collect::<Vec<_>>().join(", "))]
pub struct UnknownCost(String);

/// What there is of a cost: its name, and how to get at it.
struct CostField {
    name: &'static str,
    key: &'static str,
    get: fn(&Costs) -> Time,
    set: fn(&mut Costs, Time),
}

macro_rules! costs {
    ($($name:ident)*) => {
        const COSTS: &[CostField] = &[$(CostField {
            name: stringify!($name),
            key: concat!("costs.", stringify!($name)),
            get: |costs| costs.$name,
            set: |costs, time| costs.$name = time,
        }),*];

        /// The costs of the file.
        #[derive(Serialize, Deserialize)]
        #[derive(Default)]
        #[serde(deny_unknown_fields, default)]
        struct CostsToml {
            $(#[serde(skip_serializing_if = "Option::is_none")] $name: Option<Nanoseconds>,)*
        }

        impl CostsToml {
            /// Those that a profile gives.
            fn of(profile: &Profile) -> Self {
                // Without `..`: a cost that is missing in the list does not compile.
                let &Costs { $($name),* } = &profile.costs;
                let given = |cost: &str, time: Time| {
                    let cost = cost.parse().is_ok_and(|cost| profile.states(cost));
                    (cost || time != Time::ZERO).then_some(Nanoseconds(time))
                };
                Self { $($name: given(stringify!($name), $name)),* }
            }

            /// The costs, and which of them are given.
            fn costs(&self) -> (Costs, u32) {
                let given = [$(self.$name.is_some()),*];
                let stated = (0..).zip(given).fold(0, |all, (bit, given)| all | u32::from(given) << bit);
                let costs = Costs { $($name: self.$name.map_or(Time::ZERO, |it| it.0)),* };
                (costs, stated)
            }
        }
    };
}

costs! {
    entry load exchange table publish issue complete bus walk access exception transfer lock_take lock_hand_over clean
    clean_again zero find_page fetch latency interrupt host_interrupt wake exit reverse_map cycle
}

const _: () = assert!(COSTS.len() <= u32::BITS as usize, "a bit for each cost");

impl Cost {
    /// All of them, in the order of [`Costs`].
    ///
    /// ```
    /// use tablewright_machine::Cost;
    /// assert_eq!(Cost::all().next().map(Cost::name), Some("entry"));
    /// ```
    pub fn all() -> impl Iterator<Item = Self> {
        (0..COSTS.len()).map(Self)
    }

    /// The name of the field of [`Costs`].
    ///
    /// ```
    /// use tablewright_machine::Cost;
    /// assert!(Cost::all().any(|cost| cost.name() == "lock_hand_over"));
    /// ```
    pub fn name(self) -> &'static str {
        COSTS[self.0].name
    }

    /// Its key in the file of a profile.
    ///
    /// ```
    /// use tablewright_machine::Cost;
    /// assert!(Cost::all().any(|cost| cost.key() == "costs.clean"));
    /// ```
    pub fn key(self) -> &'static str {
        COSTS[self.0].key
    }

    /// What it is.
    ///
    /// ```
    /// use tablewright_machine::{Cost, Costs, Time};
    /// assert!(Cost::all().all(|cost| cost.get(&Costs::default()) == Time::ZERO));
    /// ```
    pub fn get(self, costs: &Costs) -> Time {
        (COSTS[self.0].get)(costs)
    }

    /// Makes it something else.
    ///
    /// ```
    /// use tablewright_machine::{Cost, Costs, Time};
    /// let mut costs = Costs::default();
    /// "walk".parse::<Cost>()?.set(&mut costs, Time::ns(5));
    /// assert_eq!(costs.walk, Time::ns(5));
    /// # Ok::<(), tablewright_machine::UnknownCost>(())
    /// ```
    pub fn set(self, costs: &mut Costs, time: Time) {
        (COSTS[self.0].set)(costs, time);
    }
}

impl std::str::FromStr for Cost {
    type Err = UnknownCost;

    fn from_str(name: &str) -> Result<Self, UnknownCost> {
        Self::all()
            .find(|cost| cost.name() == name)
            .ok_or_else(|| UnknownCost(name.to_owned()))
    }
}

/// A cost as a file has it: nanoseconds, in decimal.
#[derive(Clone, Copy)]
struct Nanoseconds(Time);

impl Nanoseconds {
    fn whole<E: de::Error>(value: u64) -> Result<Self, E> {
        match value.checked_mul(1_000) {
            Some(ps) if ps <= MAX_COST.as_ps() => Ok(Self(Time::ps(ps))),
            _ => Err(Self::refuse(value)),
        }
    }

    fn refuse<E: de::Error>(value: impl fmt::Display) -> E {
        let most = MAX_COST.as_ps() / 1_000;
        E::custom(format_args!(
            "{value} is not a cost: 0 to {most} nanoseconds, at most three decimals"
        ))
    }
}

impl Serialize for Nanoseconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Fewer than 15 digits, so that the nearest binary number is written as these digits again.
        serializer.serialize_f64(self.0.as_ps() as f64 / 1e3)
    }
}

impl<'de> Deserialize<'de> for Nanoseconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NanosecondsVisitor)
    }
}

struct NanosecondsVisitor;

impl Visitor<'_> for NanosecondsVisitor {
    type Value = Nanoseconds;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of nanoseconds")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Nanoseconds, E> {
        match u64::try_from(value) {
            Ok(value) => Nanoseconds::whole(value),
            Err(_) => Err(Nanoseconds::refuse(value)),
        }
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Nanoseconds, E> {
        Nanoseconds::whole(value)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Nanoseconds, E> {
        let most = MAX_COST.as_ps() as f64 / 1e3;
        if !(0.0..=most).contains(&value) {
            return Err(Nanoseconds::refuse(value));
        }
        // The number in the file has fewer digits than tell neighbouring binary numbers apart, so its picoseconds are
        // the nearest whole number; one that differs after three decimals differs here.
        let ps = (value * 1e3).round();
        if ps / 1e3 != value {
            return Err(Nanoseconds::refuse(value));
        }
        Ok(Nanoseconds(Time::ps(ps as u64)))
    }
}

/// A profile as the file has it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileToml {
    name: String,
    description: String,
    system: System,
    architecture: ArchitectureToml,
    #[serde(default)]
    costs: CostsToml,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    provenance: Vec<Provenance>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    fitted_on: Vec<RowSelector>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unexplained: Vec<Unexplained>,
}

/// Whose tables.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum FormatToml {
    #[serde(rename = "arm64")]
    Arm64,
    #[serde(rename = "x86-64")]
    X86_64,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum GranuleToml {
    #[serde(rename = "4K")]
    K4,
    #[serde(rename = "16K")]
    K16,
    #[serde(rename = "64K")]
    K64,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OrderingToml {
    Base,
    Ets2,
    X86,
}

macro_rules! capabilities {
    ($($name:ident: $type:ty,)*) => {
        /// The architecture of the file. What is left out is as in [`Architecture::arm64`] or [`Architecture::x86_64`].
        #[derive(Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct ArchitectureToml {
            format: FormatToml,
            granule: Option<GranuleToml>,
            address_bits: Option<u32>,
            ordering: Option<OrderingToml>,
            $($name: Option<$type>,)*
        }

        /// What provenance can be given of.
        const ARCHITECTURE_KEYS: &[&str] = &[
            "architecture.format", "architecture.granule", "architecture.address_bits", "architecture.ordering",
            $(concat!("architecture.", stringify!($name)),)*
        ];

        impl ArchitectureToml {
            fn of(architecture: &Architecture) -> Self {
                // Without `..`: a capability that is missing in the list does not compile.
                let &Architecture { regime, guest: _, guest_caches_off: _, ordering, $($name),* } = architecture;
                let (format, granule, address_bits) = match regime {
                    Regime::Arm64Stage1 { granule, wide }
                    | Regime::Arm64Stage1Sized { granule, wide, .. }
                    | Regime::Arm64El2 { granule, wide, .. }
                    | Regime::Arm64Stage2 { granule, wide, .. } => (
                        FormatToml::Arm64,
                        Some(match granule {
                            Granule::K4 => GranuleToml::K4,
                            Granule::K16 => GranuleToml::K16,
                            Granule::K64 => GranuleToml::K64,
                        }),
                        if wide { 52 } else { 48 },
                    ),
                    Regime::X86_64 { levels }
                    | Regime::Ept { levels, .. }
                    | Regime::Npt { levels } => {
                        (FormatToml::X86_64, None, if levels == 5 { 57 } else { 48 })
                    }
                };
                Self {
                    format,
                    granule,
                    address_bits: Some(address_bits),
                    ordering: Some(match ordering {
                        Ordering::Base => OrderingToml::Base,
                        Ordering::Ets2 => OrderingToml::Ets2,
                        Ordering::X86 => OrderingToml::X86,
                    }),
                    $($name: Some($name),)*
                }
            }

            /// Puts what the file says over what is usual.
            fn over(&self, mut usual: Architecture) -> Architecture {
                $(if let Some(value) = self.$name { usual.$name = value; })*
                usual
            }
        }
    };
}

capabilities! {
    bbm: u8,
    hardware_access: bool,
    hardware_dirty: bool,
    invalid_entries_cached: bool,
    invalidate_all_above: u64,
    range_invalidation: bool,
    invalidate_twice: bool,
    permission_fault_drops_entry: bool,
    executable_large_leaves: bool,
    forced_write_back: bool,
    idc: bool,
    dic: bool,
    icache_aliasing: bool,
    tlb_sets: usize,
    tlb_ways: usize,
    walk_cache: usize,
}

/// A key of the file, and what is wrong with it.
type Problem = (&'static str, String);

impl ArchitectureToml {
    fn check(&self) -> Result<Architecture, Problem> {
        let bits = |allowed: &[u32]| match self.address_bits {
            None => Ok(allowed[0]),
            Some(bits) if allowed.contains(&bits) => Ok(bits),
            Some(bits) => Err((
                "architecture.address_bits",
                format!("{bits}: this format has {allowed:?}"),
            )),
        };
        let usual = match self.format {
            FormatToml::Arm64 => Architecture::arm64(Regime::Arm64Stage1 {
                granule: match self.granule.unwrap_or(GranuleToml::K4) {
                    GranuleToml::K4 => Granule::K4,
                    GranuleToml::K16 => Granule::K16,
                    GranuleToml::K64 => Granule::K64,
                },
                wide: bits(&[48, 52])? == 52,
            }),
            FormatToml::X86_64 => {
                if self
                    .granule
                    .is_some_and(|granule| granule != GranuleToml::K4)
                {
                    let problem = "x86-64 has pages of 4K only".to_owned();
                    return Err(("architecture.granule", problem));
                }
                Architecture::x86_64(if bits(&[48, 57])? == 57 { 5 } else { 4 })
            }
        };
        let mut architecture = self.over(usual);
        if let Some(ordering) = self.ordering {
            if (ordering == OrderingToml::X86) != architecture.is_x86() {
                let problem = "arm64 has base or ets2, x86-64 has x86".to_owned();
                return Err(("architecture.ordering", problem));
            }
            architecture.ordering = match ordering {
                OrderingToml::Base => Ordering::Base,
                OrderingToml::Ets2 => Ordering::Ets2,
                OrderingToml::X86 => Ordering::X86,
            };
        }
        if architecture.bbm > 3 {
            let problem = format!("{}: there are levels 0 to 3", architecture.bbm);
            return Err(("architecture.bbm", problem));
        }
        if architecture.hardware_dirty && !architecture.hardware_access {
            let problem = "no hardware sets dirty state and not the accessed flag".to_owned();
            return Err(("architecture.hardware_dirty", problem));
        }
        for (key, value, power) in [
            ("architecture.tlb_sets", architecture.tlb_sets, true),
            ("architecture.tlb_ways", architecture.tlb_ways, false),
            ("architecture.walk_cache", architecture.walk_cache, true),
        ] {
            if !(1..=MAX_TLB).contains(&value) || (power && !value.is_power_of_two()) {
                let kind = if power { "a power of two, " } else { "" };
                return Err((key, format!("{value}: {kind}1 to {MAX_TLB}")));
            }
        }
        Ok(architecture)
    }
}

impl ProfileToml {
    fn of(profile: &Profile) -> Self {
        Self {
            name: profile.name.clone(),
            description: profile.description.clone(),
            system: profile.system.clone(),
            architecture: ArchitectureToml::of(&profile.architecture),
            costs: CostsToml::of(profile),
            provenance: profile.provenance.clone(),
            fitted_on: profile.fitted_on.clone(),
            unexplained: profile.unexplained.clone(),
        }
    }

    /// What types cannot say.
    fn check(self) -> Result<Profile, Problem> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.name.is_empty() || !self.name.chars().all(plain) {
            let problem = format!("'{}': lower-case letters, digits and '-'", self.name);
            return Err(("name", problem));
        }
        if !(1..=MAX_RAM_GIB).contains(&self.system.ram_gib) {
            let problem = format!("{}: 1 to {MAX_RAM_GIB}", self.system.ram_gib);
            return Err(("system.ram_gib", problem));
        }
        let most = crate::time::MAX_CPUS as u32;
        if let Some(cpus) = self.system.cpus
            && !(1..=most).contains(&cpus)
        {
            return Err(("system.cpus", format!("{cpus}: 1 to {most}")));
        }
        let mut named: Vec<&str> = Vec::new();
        for key in self.provenance.iter().flat_map(|entry| &entry.of) {
            if named.contains(&key.as_str()) {
                return Err(("provenance.of", format!("{key} is named twice")));
            }
            if !Cost::all().any(|cost| cost.key() == key)
                && !ARCHITECTURE_KEYS.contains(&key.as_str())
            {
                return Err(("provenance.of", format!("there is no key {key}")));
            }
            named.push(key);
        }
        let (costs, stated) = self.costs.costs();
        Ok(Profile {
            architecture: self.architecture.check()?,
            name: self.name,
            description: self.description,
            system: self.system,
            costs,
            stated,
            provenance: self.provenance,
            fitted_on: self.fitted_on,
            unexplained: self.unexplained,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEAST: &str = r#"
name = "least"
description = ""
[system]
core = ""
kind = "vm"
ram_gib = 1
[architecture]
format = "arm64"
"#;

    fn with(lines: &str) -> Result<Profile, ProfileError> {
        Profile::parse(&format!("{LEAST}{lines}"), "f")
    }

    fn refused(lines: &str) -> String {
        with(lines).unwrap_err().to_string()
    }

    #[test]
    fn what_is_left_out_is_the_conservative_choice() {
        let profile = with("").unwrap();
        let regime = Regime::Arm64Stage1 {
            granule: Granule::K4,
            wide: false,
        };
        assert_eq!(profile.architecture, Architecture::arm64(regime));
        assert_eq!(profile.costs, Costs::default());
        let x86 = LEAST.replace("arm64", "x86-64");
        assert_eq!(
            Profile::parse(&x86, "f").unwrap().architecture,
            Architecture::x86_64(4)
        );
    }

    #[test]
    fn costs_are_exact_to_the_picosecond_or_refused() {
        for (text, ps) in [
            ("0", 0),
            ("0.001", 1),
            ("2.7", 2_700),
            ("15.613", 15_613),
            ("1_734.6", 1_734_600),
            ("1e3", 1_000_000),
            ("999_999_999.999", 999_999_999_999),
            ("1_000_000_000", 1_000_000_000_000),
            ("-0.0", 0),
        ] {
            let costs = with(&format!("[costs]\nlock_take = {text}")).unwrap().costs;
            assert_eq!(costs.lock_take, Time::ps(ps), "{text}");
        }
        for text in [
            "-1",
            "-0.001",
            "nan",
            "-nan",
            "inf",
            "0.0001",
            "2.7000001",
            "1_000_000_000.001",
            "1_000_000_001",
            "9_223_372_036_854_775_807",
        ] {
            let message = refused(&format!("[costs]\nentry = {text}"));
            assert!(
                message.starts_with("f: line 11: costs.entry: ") && message.contains("not a cost"),
                "{message}"
            );
        }
        let message = refused("[costs]\nentry = \"1\"");
        assert!(message.starts_with("f: line 11: costs.entry: invalid type"));
    }

    #[test]
    fn what_is_wrong_is_named_in_one_line() {
        for (lines, says) in [
            ("bbm = 4", "architecture.bbm: 4"),
            ("bbm = 256", "line 10: architecture.bbm: "),
            ("bmb = 1", "line 10: architecture.bmb: unknown field `bmb`"),
            (
                "granule = \"8K\"",
                "line 10: architecture.granule: unknown variant",
            ),
            (
                "address_bits = 57",
                "architecture.address_bits: 57: this format has [48, 52]",
            ),
            ("ordering = \"x86\"", "architecture.ordering: arm64 has"),
            ("hardware_dirty = true", "architecture.hardware_dirty: "),
            ("tlb_sets = 3", "architecture.tlb_sets: 3: a power of two"),
            ("tlb_ways = 0", "architecture.tlb_ways: 0"),
            ("walk_cache = 131072", "architecture.walk_cache: 131072"),
            (
                "[costs]\nentri = 1",
                "line 11: costs.entri: unknown field `entri`",
            ),
            ("[cots]", "line 10: cots: unknown field `cots`"),
            (
                "[[fitted_on]]\nsystm = \"a\"",
                "line 11: fitted_on[0].systm: unknown field",
            ),
            (
                "[[unexplained]]",
                "line 10: unexplained[0]: missing field `what`",
            ),
            (
                "[[provenance]]\nof = [\"costs.entri\"]\nsource = \"fitted\"\nnote = \"\"",
                "provenance.of: there is no key costs.entri",
            ),
            (
                "[[provenance]]\nof = [\"costs.bus\", \"costs.bus\"]\nsource = \"fitted\"\nnote = \"\"",
                "provenance.of: costs.bus is named twice",
            ),
            (
                "[[provenance]]\nof = []\nsource = \"guessed\"\nnote = \"\"",
                "line 12: provenance[0].source: unknown variant `guessed`",
            ),
            ("= 1", "line 10: "),
            ("idc = true\nidc = true", "line 11: "),
        ] {
            let message = refused(lines);
            assert!(message.starts_with(&format!("f: {says}")), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
        for (from, to, says) in [
            ("least", "Least", "f: name: 'Least'"),
            ("\"least\"", "\"\"", "f: name: ''"),
            ("ram_gib = 1", "ram_gib = 0", "f: system.ram_gib: 0"),
            (
                "ram_gib = 1",
                "",
                "f: line 4: system: missing field `ram_gib`",
            ),
            (
                "ram_gib = 1",
                "ram_gib = 1\ncpus = 1025",
                "f: system.cpus: 1025",
            ),
            (
                "format = \"arm64\"",
                "format = \"x86-64\"\ngranule = \"64K\"",
                "f: architecture.granule: ",
            ),
        ] {
            let message = Profile::parse(&LEAST.replace(from, to), "f")
                .unwrap_err()
                .to_string();
            assert!(message.starts_with(says), "{message}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let message = |name: &str| Profile::load(name).unwrap_err().to_string();
        assert!(message("./neutral").starts_with("./neutral: "));
        assert!(message("altra").contains("ampere-altra-vm-64g, "));
        assert!(message("/").starts_with("/: "));
        assert!(message("").starts_with("no profile ''"));
    }

    /// What a built-in profile says of itself holds: each cost that it has comes from somewhere, and what is said to be
    /// fitted has rows that it was fitted on.
    #[test]
    fn built_in_profiles_say_where_everything_comes_from() {
        for name in Profile::built_in() {
            let profile = Profile::load(name).unwrap();
            assert_eq!(profile.name, name);
            for cost in Cost::all() {
                let known = profile.provenance_of(cost.key());
                assert!(
                    known.is_some() || cost.get(&profile.costs) == Time::ZERO,
                    "{name}: {}",
                    cost.key()
                );
            }
            let fitted = |entry: &Provenance| entry.source == Source::Fitted;
            assert_eq!(
                profile.provenance.iter().any(fitted),
                !profile.fitted_on.is_empty(),
                "{name}"
            );
            assert_eq!(
                Profile::parse(&profile.to_toml(), "again").unwrap(),
                profile
            );
        }
    }

    /// On at most two rows of its own column: the others are tests of the model.
    #[test]
    fn no_column_of_the_linear_map_is_fitted_on_more_than_two_rows() {
        for name in Profile::built_in() {
            let profile = Profile::load(name).unwrap();
            let map_mem = |row: &&RowSelector| row.metric.is_none();
            let of_map_mem: Vec<_> = profile.fitted_on.iter().filter(map_mem).collect();
            assert!(of_map_mem.len() <= 2, "{name}");
            assert!(
                of_map_mem.iter().all(|row| row.configuration.is_some()
                    && profile.system.published_as.contains(&row.system)),
                "{name}"
            );
        }
    }

    /// Pieces of profiles, right and wrong, in any order.
    fn pieces() -> impl Strategy<Value = String> {
        let key = prop_oneof![
            "name|description|format|bbm|entry|of|source|note|system|what|ruled_out|tlb_sets",
            "[a-z_.\"]{0,8}"
        ];
        let value = prop_oneof![
            "-?[0-9]{1,20}(\\.[0-9]{0,5})?(e[0-9]{1,4})?|nan|inf|true",
            "\"(arm64|x86-64|4K|vm|fitted|costs\\.entry|.{0,4})\"",
            "\\[(\"[a-z.]{0,12}\",?){0,3}\\]",
            ".{0,6}",
        ];
        let header = prop_oneof![
            "\\[\\[?(costs|system|architecture|provenance|fitted_on|unexplained)\\]?\\]",
            Just(LEAST.to_owned()),
        ];
        let line = prop_oneof![
            (key, value).prop_map(|(key, value)| format!("{key} = {value}")),
            header
        ];
        prop::collection::vec(line, 0..8).prop_map(|lines| lines.join("\n"))
    }

    proptest! {
        #[test]
        fn no_text_panics_and_every_refusal_is_one_line(text in prop_oneof![pieces(), ".*"]) {
            match Profile::parse(&text, "f") {
                Ok(profile) => prop_assert_eq!(Profile::parse(&profile.to_toml(), "g").unwrap(), profile),
                Err(error) => prop_assert!(!error.to_string().contains('\n')),
            }
        }

        #[test]
        fn every_cost_comes_back_exactly(ps in 0..=MAX_COST.as_ps(), which in 0..COSTS.len()) {
            let mut profile = with("").unwrap();
            Cost(which).set(&mut profile.costs, Time::ps(ps));
            let again = Profile::parse(&profile.to_toml(), "f").unwrap();
            prop_assert_eq!(again.costs, profile.costs);
        }
    }
}

//! Machine profiles: what a machine is, what its operations cost, how it is known, and what stays
//! unexplained.
//!
//! A profile is a TOML file. Costs are in nanoseconds, as decimal numbers, and are held in whole
//! picoseconds without rounding. A profile does not only say what things cost but also *where each
//! figure comes from*: fitted to rows of a published table, read in a manual, or assumed; and what
//! the model with these costs does not explain, with what was ruled out as its reason. A row that a
//! profile was fitted on shows nothing about the model; every other row is a test.
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
//! assert_eq!(profile.provenance_of("costs.entry").map(|entry| entry.source),
//!     Some(Source::Assumed));
//!
//! let wrong = text.replace("publish = 16", "publish = -16");
//! assert_eq!(
//!     Profile::parse(&wrong, "mine.toml").unwrap_err().to_string(),
//!     "mine.toml: line 6: costs.publish: -16 is not a cost: 0 to 1000000000 nanoseconds, at most \
//!      three decimals",
//! );
//! # Ok::<(), tablewright_machine::ProfileError>(())
//! ```

mod cost;
mod file;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::architecture::{Architecture, Granule, Ordering, Regime};
use crate::costs::Costs;
use crate::time::Time;

pub use cost::{Cost, UnknownCost};
use file::ProfileToml;

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
    /// Its name: lower-case letters, digits and `-`.
    pub name: String,
    /// Its description, in a line or two.
    pub description: String,
    /// The system that it describes.
    pub system: System,
    /// The rules that the machine follows.
    pub architecture: Architecture,
    /// The costs of its operations. What the file leaves out is zero here: see
    /// [`states`](Self::states).
    pub costs: Costs,
    /// Which costs the file gives, a bit for each.
    stated: u64,
    /// Sources of costs and rules. A key is named at most once.
    pub provenance: Vec<Provenance>,
    /// The published rows that costs were fitted on.
    pub fitted_on: Vec<RowSelector>,
    /// Differences that the model with these costs does not explain.
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
    /// Its names in published tables.
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

/// The source of some of a profile's figures.
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
    /// Fitted to published results of another system, and carried over: what it says of this one is
    /// a prediction.
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
/// let column =
///     RowSelector { system: "Ampere Altra VM, 64G".into(), ..RowSelector::default() };
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
            && self.configuration.as_ref().is_none_or(|this| this == configuration)
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
///     gap.rows.iter().any(|row| {
///         row.selects("Ampere Altra Metal, 512G", "cumulative up to batch-barriers")
///     })
/// };
/// assert!(!profile.unexplained.iter().find(last).unwrap().ruled_out.is_empty());
/// # Ok::<(), tablewright_machine::ProfileError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unexplained {
    /// The published figure and that of the model.
    pub what: String,
    /// The published rows in which it shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<RowSelector>,
    /// Reasons that are ruled out, and why.
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
        /// The problem with it.
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
    "x86-64-vcpus"
    "x86-96-vcpus"
    "arm64-48-vcpus"
    "ampere-one"
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
            File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
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
            Err(error) => Err(ProfileError::Read { path: name_or_path.to_owned(), error }),
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
        raw.check().map_err(|(key, problem)| invalid(key.to_owned(), &problem))
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

    /// Returns the source of the figure of a key, if the profile says it.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let neutral = Profile::load("neutral")?;
    /// assert!(neutral.provenance_of("costs.complete").is_some());
    /// assert!(neutral.provenance_of("costs.nothing").is_none());
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn provenance_of(&self, key: &str) -> Option<&Provenance> {
        self.provenance.iter().find(|entry| entry.of.iter().any(|of| of == key))
    }

    /// Whether one metric of a published configuration is one that the costs were fitted on.
    ///
    /// ```
    /// use tablewright_machine::Profile;
    /// let profile = Profile::load("kunpeng-920")?;
    /// let row = &profile.fitted_on[0];
    /// let (configuration, metric) =
    ///     (row.configuration.as_deref().unwrap(), row.metric.as_deref().unwrap());
    /// assert!(profile.is_fitted_on_metric(&row.system, configuration, metric));
    /// assert!(!profile.is_fitted_on_metric(&row.system, configuration, "another"));
    /// # Ok::<(), tablewright_machine::ProfileError>(())
    /// ```
    pub fn is_fitted_on_metric(&self, system: &str, configuration: &str, metric: &str) -> bool {
        self.fitted_on.iter().any(|row| row.selects_metric(system, configuration, metric))
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
        self.fitted_on.iter().any(|row| row.selects(system, configuration))
    }
}

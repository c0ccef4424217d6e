//! The costs by name, and as a file has them.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use super::{MAX_COST, Profile};
use crate::costs::Costs;
use crate::time::Time;

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
pub struct Cost(pub(super) usize);

/// There is no cost of that name.
///
/// ```
/// use tablewright_machine::Cost;
/// let message = "free".parse::<Cost>().unwrap_err().to_string();
/// assert!(message.starts_with("no cost is called 'free': use one of entry, "), "{message}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no cost is called '{0}': use one of {list}",
    list = Cost::all().map(Cost::name).collect::<Vec<_>>().join(", "))]
pub struct UnknownCost(String);

/// A cost's name, and how to get at it.
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
        pub(super) struct CostsToml {
            $(#[serde(skip_serializing_if = "Option::is_none")] $name: Option<Nanoseconds>,)*
        }

        impl CostsToml {
            /// Those that a profile gives.
            pub(super) fn of(profile: &Profile) -> Self {
                // Without `..`: a cost that is missing in the list does not compile.
                let &Costs { $($name),* } = &profile.costs;
                let given = |cost: &str, time: Time| {
                    let cost = cost.parse().is_ok_and(|cost| profile.states(cost));
                    (cost || time != Time::ZERO).then_some(Nanoseconds(time))
                };
                Self { $($name: given(stringify!($name), $name)),* }
            }

            /// The costs, and which of them are given.
            pub(super) fn costs(&self) -> (Costs, u64) {
                let given = [$(self.$name.is_some()),*];
                let bits = (0..).zip(given).map(|(bit, given)| u64::from(given) << bit);
                let stated = bits.fold(0, |all, bit| all | bit);
                let costs = Costs { $($name: self.$name.map_or(Time::ZERO, |it| it.0)),* };
                (costs, stated)
            }
        }
    };
}

costs! {
    entry load exchange table publish issue complete bus walk access exception transfer lock_take
    lock_hand_over clean
    clean_again zero zero_shared find_page fetch latency latency_shared interrupt host_interrupt
    wake exit reverse_map cycle call copy word slot visit
}

const _: () = assert!(COSTS.len() <= u64::BITS as usize, "a bit for each cost");

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

    /// Returns the cost.
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
        Self::all().find(|cost| cost.name() == name).ok_or_else(|| UnknownCost(name.to_owned()))
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
        // The number in the file has fewer digits than tell neighbouring binary numbers apart, so
        // its picoseconds are the nearest whole number; one that differs after three decimals
        // differs here.
        let ps = (value * 1e3).round();
        if ps / 1e3 != value {
            return Err(Nanoseconds::refuse(value));
        }
        Ok(Nanoseconds(Time::ps(ps as u64)))
    }
}

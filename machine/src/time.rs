//! Virtual time: whole picoseconds, and the keys that order events.
//!
//! Costs of processors are published and fitted to tenths of a nanosecond, so the unit has to be
//! smaller; a binary fraction of a nanosecond would hold 0.27 ns only nearly, and sums of it would
//! drift. A picosecond holds every cost that has three decimals, exactly.
//!
//! An event is ordered by its time and, at the same time, by the number of its CPU. Both fit in one
//! word, the *key*: the time above, [`CPU_BITS`] bits of CPU below. Keys of two CPUs are never
//! equal, so one compare of integers is the whole order. 54 bits are left for the time: five hours
//! of picoseconds. Half of it, [`Time::MAX_RUN`], is the longest run; a clock below that and any
//! single cost, cut off at the same value, add up to a key without overflow.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

/// Bits of a key that name the CPU.
pub(crate) const CPU_BITS: u32 = 10;
/// The largest number of CPUs.
pub const MAX_CPUS: usize = 1 << CPU_BITS;

/// A point or a length of virtual time, in picoseconds.
///
/// ```
/// use tablewright_machine::Time;
/// let barrier = Time::ps(15_600);
/// assert_eq!(barrier * 512 + Time::us(1), Time::ns(8_987) + Time::ps(200));
/// assert_eq!(barrier.to_string(), "15.6 ns");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// No time, and the time at which a run starts.
    pub const ZERO: Self = Self(0);
    /// The longest run: two and a half hours.
    pub const MAX_RUN: Self = Self((1 << (63 - CPU_BITS)) - 1);

    /// Picoseconds.
    pub const fn ps(ps: u64) -> Self {
        Self(ps)
    }
    /// Nanoseconds.
    pub const fn ns(ns: u64) -> Self {
        Self(ns * 1_000)
    }
    /// Microseconds.
    pub const fn us(us: u64) -> Self {
        Self(us * 1_000_000)
    }
    /// Milliseconds.
    pub const fn ms(ms: u64) -> Self {
        Self(ms * 1_000_000_000)
    }
    /// Seconds.
    pub const fn s(s: u64) -> Self {
        Self(s * 1_000_000_000_000)
    }
    /// The number of picoseconds.
    pub const fn as_ps(self) -> u64 {
        self.0
    }
    /// The time in seconds, for reports.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e12
    }
    /// This time less another, or zero.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The time as the upper part of a key. Longer times than any run are detached: they end the
    /// run in any case.
    #[inline(always)]
    pub(crate) const fn high(self) -> u64 {
        let ps = if self.0 < Self::MAX_RUN.0 { self.0 } else { Self::MAX_RUN.0 };
        ps << CPU_BITS
    }

    /// Returns the advance of a clock.
    pub(crate) const fn price(self) -> Price {
        Price(self.high())
    }

    /// The key of an event of this CPU at this time.
    #[inline(always)]
    pub(crate) const fn key(self, cpu: usize) -> u64 {
        self.high() | cpu as u64
    }
}

/// A length of time as it is added to a key: cut off and shifted once, where it is spent with each
/// access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Price(u64);

impl Price {
    pub const FREE: Self = Self(0);

    /// Returns it as the upper part of a key.
    #[inline(always)]
    pub const fn high(self) -> u64 {
        self.0
    }

    pub const fn time(self) -> Time {
        time_of(self.0)
    }
}

/// The time in a key.
#[inline(always)]
pub(crate) const fn time_of(key: u64) -> Time {
    Time(key >> CPU_BITS)
}

/// The CPU in a key.
#[inline(always)]
pub(crate) const fn cpu_of(key: u64) -> usize {
    (key & (MAX_CPUS as u64 - 1)) as usize
}

impl Add for Time {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}
impl AddAssign for Time {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}
impl Sub for Time {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}
impl Mul<u64> for Time {
    type Output = Self;
    #[inline(always)]
    fn mul(self, times: u64) -> Self {
        Self(self.0 * times)
    }
}
impl Sum for Time {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Time {
    /// In the largest unit of which it is at least one, with as many decimals as it has or as are
    /// asked for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..1_000 => (1, "ps"),
            1_000..1_000_000 => (1_000, "ns"),
            1_000_000..1_000_000_000 => (1_000_000, "µs"),
            1_000_000_000..1_000_000_000_000 => (1_000_000_000, "ms"),
            _ => (1_000_000_000_000_u64, "s"),
        };
        let value = self.0 as f64 / unit as f64;
        match f.precision() {
            Some(decimals) => write!(f, "{value:.decimals$} {name}"),
            None => write!(f, "{value} {name}"),
        }
    }
}

//! Sets of CPUs, and spaces that know which have them loaded.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};

use core::fmt;

use crate::addr::Pa;
use crate::hyperv::VpSet;

use super::Identity;

/// A set of CPUs, by the numbers of the operating system, of which there are up to 4096.
///
/// It is a bit set like [`VpSet`], and another type: a hypervisor knows CPUs by other numbers.
///
/// ```
/// use tablewright::shootdown::Cpus;
/// let mut cpus = Cpus::EMPTY;
/// assert!(cpus.insert(5) && cpus.insert(130) && !cpus.insert(4096));
/// cpus.retain(|cpu| cpu > 5);
/// assert_eq!((cpus.len(), cpus.iter().next()), (1, Some(130)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus(VpSet);

impl Cpus {
    /// The empty set.
    pub const EMPTY: Self = Self(VpSet::EMPTY);
    /// The number of CPUs that a set can hold: all numbers are below it.
    pub const MOST: usize = crate::hyperv::PROCESSORS as usize;

    /// Adds a CPU. Returns false if its number is not below [`MOST`](Self::MOST).
    pub fn insert(&mut self, cpu: usize) -> bool {
        cpu < Self::MOST && self.0.insert(cpu as u32)
    }

    /// Removes a CPU.
    pub fn remove(&mut self, cpu: usize) {
        if cpu < Self::MOST {
            self.0.remove(cpu as u32);
        }
    }

    /// Removes all CPUs.
    pub fn clear(&mut self) {
        *self = Self::EMPTY;
    }

    /// Removes the CPUs for which the predicate is false.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let before = *self;
        before
            .iter()
            .filter(|&cpu| !keep(cpu))
            .for_each(|cpu| self.remove(cpu));
    }

    /// Whether a CPU is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        cpu < Self::MOST && self.0.contains(cpu as u32)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of CPUs in the set.
    pub fn len(&self) -> u32 {
        self.0.len()
    }

    /// The CPUs in the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().map(|cpu| cpu as usize)
    }
}

/// The error of a CPU that a space has no bit for: the space was made with fewer
/// [words](Space::words) than there are CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetTooSmall;

impl fmt::Display for SetTooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the set of the space has no bit for this CPU")
    }
}

impl core::error::Error for SetTooSmall {}

/// An address space, as far as flushes know it: its identifier, its generation, and the CPUs that
/// have it loaded.
///
/// What is global is in all spaces, and of none: see [above](super#global-translations).
#[derive(Debug)]
pub struct Space<'m> {
    root: Pa,
    /// No other space has, had or will have it.
    pub(super) number: u64,
    pub(super) identity: Identity,
    /// Flushes so far, those by messengers that reach all CPUs left out.
    pub(super) generation: AtomicU64,
    /// A bit for each CPU.
    cpus: &'m [AtomicU64],
}

impl<'m> Space<'m> {
    /// Words for the set of so many CPUs.
    pub const fn words(cpus: usize) -> usize {
        cpus.div_ceil(64)
    }

    /// A space with these tables, which no CPU has loaded. Its number is not 0, and no other space
    /// gets it, not after this one has gone either. A CPU for which there is no word [cannot load
    /// it](SetTooSmall).
    pub fn new(number: u64, root: Pa, cpus: &'m [AtomicU64]) -> Self {
        for word in cpus {
            word.store(0, Ordering::Relaxed);
        }
        Self {
            root,
            number,
            identity: Identity::new(),
            generation: AtomicU64::new(0),
            cpus,
        }
    }

    /// The root of its tables.
    pub fn root(&self) -> Pa {
        self.root
    }

    /// Its identifier.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether no CPU has it loaded: its tables may be taken down.
    pub fn is_idle(&self) -> bool {
        // Acquire: what was done with the space comes before.
        self.cpus
            .iter()
            .all(|word| word.load(Ordering::Acquire) == 0)
    }

    /// Whether its set can have a CPU. One that it cannot would have it loaded unseen.
    pub(super) fn has_bit_for(&self, cpu: usize) -> bool {
        cpu / 64 < self.cpus.len()
    }

    /// A CPU is about to load it. A full fence follows.
    pub(super) fn enter(&self, cpu: usize) {
        if let Some(word) = self.cpus.get(cpu / 64) {
            word.fetch_or(1 << (cpu % 64), Ordering::Relaxed);
        }
    }

    /// A CPU has loaded another.
    pub(super) fn leave(&self, cpu: usize) {
        if let Some(word) = self.cpus.get(cpu / 64) {
            // Release: after its last use of the space.
            word.fetch_and(!(1 << (cpu % 64)), Ordering::Release);
        }
    }

    /// The CPUs that have it loaded. A full fence comes before.
    pub(super) fn cpus(&self) -> Cpus {
        // Acquire: a CPU that is not there any more has made its last use of it.
        let banks = |bank: usize| match self.cpus.get(bank) {
            Some(word) => word.load(Ordering::Acquire),
            None => 0,
        };
        Cpus(VpSet::from_banks(core::array::from_fn(banks)))
    }
}

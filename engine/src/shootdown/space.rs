//! Spaces that know which CPUs have them loaded.

use core::fmt;

use crate::addr::Pa;
use crate::cpus::Cpus;
use crate::flush::next_serial;
use crate::identity::Identity;
use crate::sync::{AtomicU64, Ordering};

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
/// Global translations are of all spaces: see [above](super#global-translations).
///
/// The words of the set are of one space:
///
/// ```compile_fail,E0499
/// # use core::sync::atomic::AtomicU64;
/// # use tablewright::{Pa, shootdown::Space};
/// let mut set = [const { AtomicU64::new(0) }; 1];
/// let first = Space::new(Pa::new(0x1000), &mut set);
/// let second = Space::new(Pa::new(0x2000), &mut set); // empties the set of the first
/// # let _ = (first, second);
/// ```
#[derive(Debug)]
pub struct Space<'m> {
    root: Pa,
    /// No other space has it, and it is not 0.
    pub(super) number: u64,
    pub(super) identity: Identity,
    /// Flushes so far, except those by messengers that reach all CPUs.
    pub(super) generation: AtomicU64,
    /// A bit for each CPU.
    cpus: &'m [AtomicU64],
}

impl<'m> Space<'m> {
    /// Words for the set of so many CPUs.
    pub const fn words(cpus: usize) -> usize {
        cpus.div_ceil(64)
    }

    /// A space with these tables, which no CPU has loaded. A CPU for which there is no word [cannot
    /// load it](SetTooSmall).
    pub fn new(root: Pa, cpus: &'m mut [AtomicU64]) -> Self {
        cpus.fill_with(|| AtomicU64::new(0));
        Self {
            root,
            number: next_serial(0),
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
        let is_empty = |word: &AtomicU64| word.load(Ordering::Acquire) == 0;
        self.cpus.iter().all(is_empty)
    }

    /// Whether its set has a bit for a CPU, which would have it loaded unseen otherwise.
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
        let mut cpus = Cpus::EMPTY;
        for (bank, word) in cpus.banks.iter_mut().zip(self.cpus) {
            // Acquire: a CPU that is not there any more has made its last use of it.
            *bank = word.load(Ordering::Acquire);
        }
        cpus
    }
}

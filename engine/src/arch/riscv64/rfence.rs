//! Fences on other harts, by the firmware (SBI 8).

use crate::cpus::Cpus;
use crate::invalidation::{Invalidation, What};
use crate::shootdown::Messenger;

/// A fence that other harts execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The first address and how many bytes; `None` for everything.
    pub range: Option<(u64, u64)>,
    /// The identifier: an ASID, or a VMID for a guest's; `None` for all, what is global included.
    pub id: Option<u16>,
    /// The addresses are those that a guest takes for physical.
    pub guest: bool,
}

impl Fence {
    /// The number of the firmware's extension: "RFNC".
    pub const EXTENSION: u64 = 0x5246_4e43;

    /// The number of the firmware's function, and its arguments behind the harts (SBI 8.2 to 8.5):
    /// start, size, identifier.
    ///
    /// ```
    /// use tablewright::arch::riscv64::Fence;
    /// let page = Fence { range: Some((0x7000, 4096)), id: Some(5), guest: false };
    /// assert_eq!(page.call(), (2, [0x7000, 4096, 5])); // remote SFENCE.VMA with an ASID
    /// let all = Fence { range: None, id: None, ..page };
    /// assert_eq!(all.call(), (1, [0, u64::MAX, 0]));
    /// ```
    pub const fn call(&self) -> (u64, [u64; 3]) {
        let (start, size) = match self.range {
            Some(range) => range,
            None => (0, u64::MAX),
        };
        let (function, id) = match (self.guest, self.id) {
            (false, None) => (1, 0),
            (false, Some(id)) => (2, id),
            (true, Some(id)) => (3, id),
            (true, None) => (4, 0),
        };
        (function, [start, size, id as u64])
    }
}

/// The firmware, as far as it has other harts execute fences: `Sbi`, or a crate for
/// it.
///
/// # Safety
/// 1. Where it returns `true`, each of the harts has executed the fence, and finds what this hart
///    has stored before: so do OpenSBI and RustSBI, which wait. A firmware that has only sent an
///    interrupt by then, which SBI 8 would allow, cannot be used.
pub unsafe trait Fences {
    /// Has harts execute a fence. Bit `n` of the mask stands for the hart with number `base + n`.
    fn fence(&self, mask: u64, base: u64, what: &Fence) -> bool;
}

/// The firmware as a messenger of [`shootdown`](crate::shootdown).
///
/// ```
/// use std::cell::RefCell;
/// use tablewright::arch::riscv64::{Fence, Fences, Rfence};
/// use tablewright::shootdown::{Cpus, Messenger};
/// use tablewright::{Invalidation, Pa, What};
///
/// struct Log(RefCell<Vec<(u64, u64)>>);
/// // SAFETY: there are no harts.
/// unsafe impl Fences for Log {
///     fn fence(&self, mask: u64, base: u64, _: &Fence) -> bool {
///         self.0.borrow_mut().push((mask, base));
///         true
///     }
/// }
///
/// // Processor 0 is hart 1, processor 1 is hart 2, processor 2 is hart 130.
/// let firmware = Rfence::new(Log(RefCell::default()), &[1, 2, 130], false);
/// let mut cpus = Cpus::EMPTY;
/// cpus.insert(1);
/// cpus.insert(2);
/// let all = Invalidation { root: Pa::new(0), id: 5, global: false, what: What::Everything };
/// firmware.tell(&all, &mut cpus);
/// assert!(cpus.is_empty());
/// assert_eq!(*firmware.fences().0.borrow(), [(1, 2), (1, 130)]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rfence<'a, C> {
    fences: C,
    harts: &'a [u64],
    guest: bool,
}

impl<'a, C: Fences> Rfence<'a, C> {
    /// The firmware, and the number of the hart of each processor; of the G-stage, or of the harts'
    /// own addresses. A processor without a number there is left to the next messenger.
    pub const fn new(fences: C, harts: &'a [u64], guest: bool) -> Self {
        Self { fences, harts, guest }
    }

    /// Returns the firmware.
    pub const fn fences(&self) -> &C {
        &self.fences
    }

    /// Has the harts of a mask execute all of a flush.
    fn send(&self, mask: u64, base: u64, flush: &Invalidation<'_>) -> bool {
        let id = (!flush.global).then_some(flush.id);
        let send = |range| self.fences.fence(mask, base, &Fence { range, id, guest: self.guest });
        match flush.what {
            // A fence by address is about leaves.
            What::Ranges(ranges) if !ranges.iter().any(|range| range.tables) => {
                ranges.iter().all(|range| {
                    send(Some((range.first, (range.last - range.first).saturating_add(1))))
                })
            }
            _ => send(None),
        }
    }
}

// SAFETY: what is taken out has executed the fences (1.); it reaches those of the set (2.).
unsafe impl<C: Fences> Messenger for Rfence<'_, C> {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        let mut left = *cpus;
        let first = |left: &Cpus| left.iter().find_map(|cpu| self.harts.get(cpu).copied());
        while let Some(base) = first(&left) {
            let offset = |cpu: usize| self.harts.get(cpu)?.checked_sub(base).filter(|it| *it < 64);
            let mask = left.iter().filter_map(offset).fold(0, |mask, bit| mask | 1 << bit);
            if self.send(mask, base, flush) {
                cpus.retain(|cpu| !left.contains(cpu) || offset(cpu).is_none());
            }
            left.retain(|cpu| offset(cpu).is_none());
        }
    }
}

//! RISC-V: fences, the values of `satp` and `hgatp`, and what the ISA string says.
//!
//! Sources: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, version 20240411
//! (PRIV): 10.2.1 for SFENCE.VMA, 13 for Svinval, 18.3 for HFENCE; RISC-V Supervisor Binary
//! Interface Specification, version 2.0 (SBI): chapter 8 for RFENCE.
//!
//! A hart forgets for itself. The others are told by the firmware, [`Rfence`], or by interrupts, as
//! [`shootdown`](crate::shootdown) says, and each does what it is told by `Cpu::forget`.
//!
//! # What a fence is about
//!
//! A fence by address is about leaves, at whatever level (PRIV 10.2.1): where tables were detached,
//! all of an identifier is forgotten. One by identifier spares global translations.
//!
//! # New mappings
//!
//! A walker may have remembered that there was nothing, and go on believing it until a fence, where
//! there is no Svvptc: [`Features::caps`] says so, and an edit has a new mapping forgotten like a
//! change. That is right everywhere, and dear where several harts have to be told. A kernel whose
//! fault handler forgives does without: it sets
//! [`Caps::invalid_entries_cached`](crate::Caps::invalid_entries_cached) to false, and where a
//! fault finds the page mapped, or has mapped it, it has this hart forget the page before it
//! returns. Shared spaces are always so.

#[cfg(target_arch = "riscv64")]
mod execute;
mod features;
mod rfence;

#[cfg(target_arch = "riscv64")]
pub use execute::{Sbi, asid_bits, execute, load_satp};
pub use features::Features;
pub use rfence::{Fence, Fences, Rfence};

use crate::addr::{Address, Ipa, Level, Pa};
use crate::format::Format;
use crate::guest::{Access, Cause, Fault};
use crate::invalidation::{Invalidation, Stale, What};
#[cfg(target_arch = "riscv64")]
use crate::platform::Barrier;
use crate::shootdown::LocalFlush;

/// An instruction of a flush. An address or an identifier that is not there stands for all: the
/// register is x0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// SFENCE.VMA (PRIV 10.2.1).
    Sfence {
        /// The leaf around this address, instead of everything.
        at: Option<u64>,
        /// One identifier: its translations that are not global. All translations otherwise.
        asid: Option<u16>,
    },
    /// HFENCE.GVMA (PRIV 18.3.2). What was made of the guest's own tables goes with it.
    Hfence {
        /// The leaf around this address of the guest's, instead of everything.
        at: Option<u64>,
        /// The guest, instead of all.
        vmid: Option<u16>,
    },
    /// SFENCE.W.INVAL: stores before it come before the SINVALs after it (PRIV 13).
    Begin,
    /// SINVAL.VMA: an SFENCE.VMA without the order.
    Sinval {
        /// The leaf around this address.
        at: u64,
        /// The identifier, instead of all.
        asid: Option<u16>,
    },
    /// SFENCE.INVAL.IR: the SINVALs before it come before the walks after it.
    End,
}

/// The `barrier` and the `invalidate` of a [`Platform`](crate::Platform) with tables of
/// [`Riscv64`](crate::format::Riscv64): on a machine with one hart.
///
/// The program stays on its hart from the start of an `invalidate` to its end.
///
/// ```
/// use tablewright::arch::riscv64::{Cpu, Features, Instruction};
/// use tablewright::{Invalidation, Pa, Stale, What};
///
/// let cpu = Cpu::new(Features::LEAST);
/// let pages = Stale { first: 0x7000, last: 0x8fff, level: None, tables: false };
/// let flush = Invalidation { root: Pa::new(0x1000), id: 5, global: false,
///     what: What::Ranges(&[pages]) };
/// let mut all = Vec::new();
/// cpu.instructions(&flush, |one| all.push(one)); // what `cpu.invalidate(&flush)` executes
/// let sfence = |at| Instruction::Sfence { at: Some(at), asid: Some(5) };
/// assert_eq!(all, [sfence(0x7000), sfence(0x8000)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    features: Features,
    guests: bool,
}

impl Cpu {
    /// A hart whose own addresses the tables translate.
    pub const fn new(features: Features) -> Self {
        Self { features, guests: false }
    }

    /// A hart whose guests' memory the tables translate: the G-stage.
    pub const fn of_guests(features: Features) -> Self {
        Self { features, guests: true }
    }

    /// Returns the features that the harts have.
    pub const fn features(&self) -> Features {
        self.features
    }

    /// The instructions of a flush, in order.
    pub fn instructions(&self, flush: &Invalidation<'_>, mut each: impl FnMut(Instruction)) {
        let id = (!flush.global).then_some(flush.id);
        match flush.what {
            What::Ranges(ranges) if !ranges.iter().any(|range| range.tables) => {
                let in_parts = self.features.svinval && !self.guests;
                if in_parts {
                    each(Instruction::Begin);
                }
                for range in ranges {
                    leaves(range, |at| {
                        each(match in_parts {
                            true => Instruction::Sinval { at, asid: id },
                            false => self.fence(Some(at), id),
                        });
                    });
                }
                if in_parts {
                    each(Instruction::End);
                }
            }
            _ => each(self.fence(None, id)),
        }
    }

    /// The instructions that do what a hart is [told](LocalFlush) by another.
    pub fn forgetting(&self, what: &LocalFlush, mut each: impl FnMut(Instruction)) {
        match *what {
            LocalFlush::Everything | LocalFlush::All => each(self.fence(None, None)),
            LocalFlush::Space(id) => each(self.fence(None, Some(id))),
            LocalFlush::Range { id, range, global } => {
                let ranges = [range];
                let what = What::Ranges(&ranges);
                self.instructions(&Invalidation { root: Pa::new(0), id, global, what }, each);
            }
        }
    }

    const fn fence(&self, at: Option<u64>, id: Option<u16>) -> Instruction {
        match self.guests {
            true => Instruction::Hfence { at, vmid: id },
            false => Instruction::Sfence { at, asid: id },
        }
    }
}

/// An address in each leaf of a range, or in each page if the level is not known.
fn leaves(range: &Stale, mut each: impl FnMut(u64)) {
    let step = 1u64 << (12 + 9 * range.level.map_or(0, Level::height).min(4));
    let mut at = range.first & !(step - 1);
    loop {
        each(at);
        if range.last - at < step {
            return;
        }
        at += step;
    }
}

#[cfg(target_arch = "riscv64")]
impl Cpu {
    /// Executes the instructions of [`Platform::barrier`](crate::Platform::barrier).
    ///
    /// FENCE orders the stores before what others do after they have been told. This hart's walks
    /// are ordered by its own fences.
    #[inline]
    pub fn barrier(&self, _: Barrier) {
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }

    /// Executes the instructions of [`Platform::invalidate`](crate::Platform::invalidate).
    #[inline]
    pub fn invalidate(&self, flush: &Invalidation<'_>) {
        self.instructions(flush, execute);
    }

    /// Executes the instructions of
    /// [`Actions::flush_local`](crate::shootdown::Actions::flush_local): this hart alone forgets.
    #[inline]
    pub fn forget(&self, what: &LocalFlush) {
        self.forgetting(what, execute);
    }
}

/// The fault of a guest, from `scause`, `stval`, `htval` and `htinst` (PRIV 18.2.8, 18.6.1,
/// 18.6.3). `None` for an exception that is no guest-page fault.
///
/// A walk through the guest's own tables faults with the cause of the access that it is made for:
/// `htinst` tells it, and whether it read an entry or set a flag.
///
/// ```
/// use tablewright::Ipa;
/// use tablewright::arch::riscv64::guest_fault;
/// use tablewright::guest::{Access, Cause};
/// // A store to a page, and a load for which an entry of the guest's tables was to be read.
/// let store = guest_fault(23, 0x4_5003, 0x2000_1400, 0).unwrap();
/// assert_eq!((store.at, store.access), (Ipa::new(0x8000_5003), Access::Write));
/// let walk = guest_fault(21, 0x4_5003, 0x2000_1402, 0x3000).unwrap();
/// assert_eq!((walk.at, walk.access), (Ipa::new(0x8000_5008), Access::Read));
/// assert_eq!(walk.cause, Cause::Unknown);
/// ```
pub const fn guest_fault(scause: u64, stval: u64, htval: u64, htinst: u64) -> Option<Fault> {
    let access = match scause {
        20 => Access::Execute,
        21 => Access::Read,
        23 => Access::Write,
        _ => return None,
    };
    // An entry of 4 or of 8 bytes is read, or written.
    let (access, low) = match htinst {
        0x2000 | 0x3000 => (Access::Read, 0),
        0x2020 | 0x3020 => (Access::Write, 0),
        _ => (access, stval & 3),
    };
    Some(Fault { cause: Cause::Unknown, ..Fault::new(Ipa::new(htval << 2 | low), access) })
}

/// The value of `satp` that loads a root under an ASID, or of `hgatp` under a VMID (PRIV 10.1.11,
/// 18.2.10). `None` if a VMID has more than 14 bits.
///
/// The root of a G-stage is four pages, aligned to 16 KiB.
///
/// ```
/// use tablewright::Pa;
/// use tablewright::arch::riscv64::satp;
/// use tablewright::format::{Sv39, Sv48x4};
/// assert_eq!(satp::<Sv39>(Pa::new(0x8020_0000), 7), Some(8 << 60 | 7 << 44 | 0x8_0200));
/// assert_eq!(satp::<Sv48x4>(Pa::new(0x8020_0000), 1 << 14), None);
/// ```
pub const fn satp<F: Format>(root: Pa, id: u16) -> Option<u64> {
    if !F::Input::SIGNED && id >> 14 != 0 {
        return None;
    }
    Some((F::LEVELS as u64 + 5) << 60 | (id as u64) << 44 | root.get() >> 12)
}

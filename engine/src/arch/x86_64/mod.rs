//! x86-64: TLB invalidations, the values of CR3, EPTP and nCR3, and what CPUID says.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual (SDM); AMD64 Architecture
//! Programmer's Manual (APM).
//!
//! A processor forgets for itself, unless it has INVLPGB. Where there are several without it, the
//! others are told as [`shootdown`](crate::shootdown) says, and each does what it is told by
//! [`Cpu::forget`].

#[cfg(target_arch = "x86_64")]
mod execute;
mod features;
mod registers;

#[cfg(target_arch = "x86_64")]
pub use execute::{execute, invept, load_cr3, set_up, set_up_with, tlbsync};
pub use features::{EptFeatures, Features};
pub use registers::{Extended, cr3, eptp, ncr3};

use crate::addr::{Level, Pa};
use crate::invalidation::{Invalidation, Stale, What};
use crate::shootdown::LocalFlush;
use crate::shootdown::amd::{self, Invlpgb};
#[cfg(target_arch = "x86_64")]
use crate::{platform::Barrier, shootdown::amd::Amd};

/// The type of an INVPCID (SDM vol. 2A, INVPCID). It has what is cached of tables go, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invpcid {
    /// Type 0: one address under one identifier. Global translations stay.
    Address {
        /// The identifier.
        pcid: u16,
        /// The address.
        at: u64,
    },
    /// Type 1: all under one identifier. Global translations stay.
    Space(u16),
    /// Type 2: everything.
    Everything,
    /// Type 3: all under all identifiers. Global translations stay.
    All,
}

/// The type of an INVEPT (SDM vol. 3C 31.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invept {
    /// Type 1: what was made of the tables that this [EPTP](eptp) points to.
    Tables(u64),
    /// Type 2: everything.
    Everything,
}

/// An instruction of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// INVLPG: an address under the identifier that is loaded, global or not, and all that is
    /// cached of tables under that identifier (SDM vol. 3A 5.10.4.1).
    Invlpg(u64),
    /// INVPCID.
    Invpcid(Invpcid),
    /// INVLPGB.
    Invlpgb(Invlpgb),
    /// CR3 is loaded with what it holds, bit 63 clear: all under the identifier that is loaded.
    /// Global translations stay.
    LoadCr3,
    /// `CR4.PGE` is changed and changed back: everything.
    ToggleCr4,
}

/// The control registers that decide by which instructions a processor forgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
}

impl Loaded {
    /// The identifier that is loaded; `None` if there are none (`CR4.PCIDE`, bit 17).
    const fn pcid(self) -> Option<u16> {
        if self.cr4 >> 17 & 1 != 0 { Some((self.cr3 & 0xfff) as u16) } else { None }
    }
}

/// The `barrier` and the `invalidate` of a [`Platform`](crate::Platform) with tables of
/// [`X86_64`](crate::format::X86_64): on a machine with one processor, or with INVLPGB.
///
/// The program stays on its processor, and loads no other space, from the start of an `invalidate`
/// to its end.
///
/// Where global translations are meant, and no tables were detached, INVLPG is relied on. Some
/// Intel processors of 2021 and later, without a fix of their microcode, keep them if `CR4.PCIDE`
/// is set; leave it clear there.
///
/// ```
/// use tablewright::arch::x86_64::{Cpu, Features, Instruction, Loaded};
/// use tablewright::{Invalidation, Pa, Stale, What};
///
/// // On the processor itself: `Features::read()`.
/// let cpu = Cpu::alone(Features::LEAST);
/// let pages = Stale { first: 0x7000, last: 0x8fff, level: None, tables: false };
/// let flush = Invalidation { root: Pa::new(0x1000), id: 0, global: false,
///     what: What::Ranges(&[pages]) };
/// let mut all = Vec::new();
/// let loaded = Loaded { cr3: 0x1000, cr4: 1 << 7 | 1 << 5 }; // PGE and PAE
/// cpu.instructions(&flush, loaded, |one| all.push(one)); // what `cpu.invalidate(&flush)` executes
/// assert_eq!(all, [Instruction::Invlpg(0x7000), Instruction::Invlpg(0x8000)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    features: Features,
    broadcast: bool,
}

impl Cpu {
    /// One processor, which forgets for itself.
    pub const fn alone(features: Features) -> Self {
        Self { features, broadcast: false }
    }

    /// Processors that hear INVLPGB. The identifier of a space is the same on all of them. `None`
    /// if they do not have it.
    pub const fn broadcast(features: Features) -> Option<Self> {
        match features.invlpgb {
            Some(_) => Some(Self { features, broadcast: true }),
            None => None,
        }
    }

    /// Returns the features that the processors have.
    pub const fn features(&self) -> Features {
        self.features
    }

    /// The instructions of a flush, in order, on a processor with these registers.
    pub fn instructions(
        &self,
        flush: &Invalidation<'_>,
        loaded: Loaded,
        mut each: impl FnMut(Instruction),
    ) {
        if let (true, Some(most)) = (self.broadcast, self.features.invlpgb) {
            // Without identifiers all spaces have the one that is loaded, 0.
            let id = loaded.pcid().map_or(0, |_| flush.id);
            let flush = Invalidation { id, ..*flush };
            return amd::encode(most, &flush, |one| each(Instruction::Invlpgb(one)));
        }
        let &Invalidation { id, global, .. } = flush;
        match flush.what {
            // What is cached of tables that global translations were found in is kept under any
            // identifier.
            What::Ranges(ranges) if !ranges.iter().any(|range| range.tables) => {
                for range in ranges {
                    self.range(id, range, global, loaded, &mut each);
                }
            }
            _ if global => each(self.everything()),
            _ => each(self.space(id, loaded)),
        }
    }

    /// The instructions that do what a processor is [told](LocalFlush) by another.
    pub fn forgetting(&self, what: &LocalFlush, loaded: Loaded, mut each: impl FnMut(Instruction)) {
        match *what {
            LocalFlush::Everything => each(self.everything()),
            LocalFlush::All if self.features.invpcid => each(Instruction::Invpcid(Invpcid::All)),
            LocalFlush::All if loaded.pcid().is_none() => each(Instruction::LoadCr3),
            LocalFlush::All => each(Instruction::ToggleCr4),
            LocalFlush::Space(id) => each(self.space(id, loaded)),
            LocalFlush::Range { id, range, global } => {
                let ranges = [range];
                let flush =
                    Invalidation { root: Pa::new(0), id, global, what: What::Ranges(&ranges) };
                Self::alone(self.features).instructions(&flush, loaded, each);
            }
        }
    }

    const fn everything(&self) -> Instruction {
        match self.features.invpcid {
            true => Instruction::Invpcid(Invpcid::Everything),
            false => Instruction::ToggleCr4,
        }
    }

    /// All under one identifier.
    fn space(&self, id: u16, loaded: Loaded) -> Instruction {
        match loaded.pcid() {
            None => Instruction::LoadCr3,
            Some(pcid) if pcid == id => Instruction::LoadCr3,
            Some(_) if self.features.invpcid => Instruction::Invpcid(Invpcid::Space(id)),
            Some(_) => Instruction::ToggleCr4,
        }
    }

    /// Leaves of a range, one after the other.
    fn range(
        &self,
        id: u16,
        range: &Stale,
        global: bool,
        loaded: Loaded,
        each: &mut impl FnMut(Instruction),
    ) {
        let elsewhere = loaded.pcid().is_some_and(|pcid| pcid != id);
        if elsewhere && !self.features.invpcid {
            // No instruction names another identifier.
            return each(Instruction::ToggleCr4);
        }
        // An address invalidates the one leaf around it (SDM vol. 3A 5.10.4.1).
        let step = 1u64 << (12 + 9 * range.level.map_or(0, Level::height).min(2));
        let mut at = range.first & !(step - 1);
        loop {
            if global || !elsewhere {
                each(Instruction::Invlpg(at));
            }
            if elsewhere {
                each(Instruction::Invpcid(Invpcid::Address { pcid: id, at }));
            }
            if range.last - at < step {
                return;
            }
            at += step;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Cpu {
    /// Executes the instructions of [`Platform::barrier`](crate::Platform::barrier).
    ///
    /// Walkers see stores in program order (SDM vol. 3A 9.2.2), so that only the compiler has to be
    /// kept from moving them. What this processor has forgotten it has forgotten; TLBSYNC waits for
    /// others.
    #[inline]
    pub fn barrier(&self, barrier: Barrier) {
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
        if barrier == Barrier::Complete && self.broadcast {
            tlbsync();
        }
    }

    /// Executes the instructions of [`Platform::invalidate`](crate::Platform::invalidate).
    #[inline]
    pub fn invalidate(&self, flush: &Invalidation<'_>) {
        self.instructions(flush, Loaded::read(), execute);
    }

    /// Executes the instructions of
    /// [`Actions::flush_local`](crate::shootdown::Actions::flush_local): this processor alone
    /// forgets.
    #[inline]
    pub fn forget(&self, what: &LocalFlush) {
        self.forgetting(what, Loaded::read(), execute);
    }
}

// SAFETY: the instructions are executed (1., 2.).
#[cfg(target_arch = "x86_64")]
unsafe impl Amd for Cpu {
    #[inline]
    fn invlpgb(&self, operands: Invlpgb) {
        execute(Instruction::Invlpgb(operands));
    }

    #[inline]
    fn tlbsync(&self) {
        tlbsync();
    }
}

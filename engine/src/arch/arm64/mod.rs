//! arm64: barriers, TLB invalidations, the values of the translation registers, and what the ID
//! registers say.
//!
//! Source: Arm Architecture Reference Manual, DDI 0487; sections are named at the bits.
//!
//! | what is translated | format | [`Regime`](crate::shootdown::arm64::Regime) | registers |
//! |---|---|---|---|
//! | EL1 and EL0 | [`Arm64`] | `El1` | [`ttbr`] for each half, [`tcr_el1`], [`Translation::MAIR`] |
//! | EL2 and EL0 (VHE) | [`Arm64`] | `El1` | the same, under the same names (D8.1) |
//! | EL2 | [`Arm64El2`] | `El2` | [`ttbr`] for `TTBR0_EL2`, [`tcr_el2`], [`Translation::MAIR`] |
//! | a guest | [`Stage2`] | `Stage2` | [`ttbr`] for `VTTBR_EL2`, [`vtcr_el2`] |
//!
//! An embedder keeps a [`Cpu`] for each of the trees that it has, and hands the two functions of
//! its [`Platform`](crate::Platform) on to it.
//!
//! [`Arm64`]: crate::format::Arm64
//! [`Arm64El2`]: crate::format::Arm64El2
//! [`Stage2`]: crate::format::Stage2

#[cfg(target_arch = "aarch64")]
mod execute;
mod ids;
mod registers;

#[cfg(target_arch = "aarch64")]
pub use execute::{
    execute, load_ttbr0_el1, load_ttbr0_el2, load_ttbr1_el1, load_vttbr_el2, set_up_el1,
    set_up_el2, set_up_stage2,
};
pub use ids::Ids;
pub use registers::{Translation, Unsupported, tcr_el1, tcr_el2, ttbr, vtcr_el2};

use crate::invalidation::Invalidation;
#[cfg(target_arch = "aarch64")]
use crate::platform::Barrier;
#[cfg(target_arch = "aarch64")]
use crate::shootdown::arm64::{Arm64, Op, Regime, Tlbi};
use crate::shootdown::arm64::{Encoder, Instruction};

/// Which processors an instruction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// The one that executes it.
    Local,
    /// All of the Inner Shareable domain: those that run one operating system.
    Inner,
}

/// The `barrier` and the `invalidate` of a [`Platform`](crate::Platform) whose tables are of one
/// format.
///
/// Invalidations are broadcast: every processor hears them, and no list of processors is kept.
///
/// ```
/// use tablewright::arch::arm64::{Cpu, Ids};
/// use tablewright::format::Arm64K4;
/// use tablewright::shootdown::arm64::{Instruction, Op, Tlbi};
/// use tablewright::{Invalidation, Level, Pa, Stale, What};
///
/// // On the processor itself: `Ids::read()`.
/// let ids = Ids { isar0: 0, mmfr0: 0x0010_0025, mmfr1: 0, mmfr2: 0 };
/// let cpu = Cpu::of::<Arm64K4>(&ids);
/// let page = Stale { first: 0x7000, last: 0x7fff, level: Some(Level::PAGE), tables: false };
/// let flush = Invalidation {
///     root: Pa::new(0x1000),
///     id: 9,
///     global: false,
///     what: What::Ranges(&[page]),
/// };
/// let mut all = Vec::new();
/// cpu.instructions(&flush, |one| all.push(one)); // what `cpu.invalidate(&flush)` executes
/// let tlbi = Tlbi { op: Op::Vale1, operand: 9 << 48 | 1 << 46 | 3 << 44 | 7 };
/// assert_eq!(all, [Instruction::Tlbi(tlbi)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    encoder: Encoder,
    domain: Domain,
    twice: bool,
}

impl Cpu {
    /// For tables of this format, on processors that all have what `ids` says.
    pub fn of<F: Translation>(ids: &Ids) -> Self {
        Self {
            encoder: Encoder {
                regime: F::REGIME,
                page_shift: F::PAGE_SHIFT,
                ranges: ids.has_ranges(),
                wide: F::OUTPUT_BITS > 48 && F::PAGE_SHIFT < 16,
            },
            domain: Domain::Inner,
            twice: false,
        }
    }

    /// Tells this processor alone, for one that has the tables to itself: nothing is broadcast.
    pub const fn alone(self) -> Self {
        Self { domain: Domain::Local, ..self }
    }

    /// Tells everything twice, with a `DSB` between, for processors that forget for certain only
    /// then. Their errata say so (of Arm's, those that ask to repeat a TLBI and DSB).
    pub const fn twice(self) -> Self {
        Self { twice: true, ..self }
    }

    /// The encoder of its instructions.
    pub const fn encoder(&self) -> Encoder {
        self.encoder
    }

    /// The processors that its instructions reach.
    pub const fn domain(&self) -> Domain {
        self.domain
    }

    /// The instructions of a flush, in order. Another `DSB` completes them.
    pub fn instructions(&self, flush: &Invalidation<'_>, mut each: impl FnMut(Instruction)) {
        let mut any = false;
        self.encoder.encode(flush, |one| {
            any = true;
            each(one);
        });
        if self.twice && any {
            each(Instruction::Dsb);
            self.encoder.encode(flush, each);
        }
    }
}

#[cfg(target_arch = "aarch64")]
impl Cpu {
    /// Executes the instructions of [`Platform::barrier`](crate::Platform::barrier).
    ///
    /// A store to a descriptor is visible to the walkers when a `DSB` after it is complete
    /// (D8.2.6), and an invalidation is complete when a `DSB` after it is, on the processor that
    /// issued it (D8.17.5). With the `ISB` this processor discards what it has fetched ahead; where
    /// what is published is of a guest, the exception return does.
    #[inline]
    pub fn barrier(&self, barrier: Barrier) {
        let guest = matches!(self.encoder.regime, Regime::Stage2);
        match (barrier, self.domain) {
            (Barrier::Publish, Domain::Inner) => execute::dsb_ishst(),
            (Barrier::Publish, Domain::Local) => execute::dsb_nshst(),
            (Barrier::Complete, domain) => execute(Instruction::Dsb, domain),
        }
        if barrier == Barrier::Complete || !guest {
            execute::isb();
        }
    }

    /// Executes the instructions of [`Platform::invalidate`](crate::Platform::invalidate). What is
    /// executed for a guest is about the VMID that is loaded, which has to be the guest's. Of a
    /// guest that is not loaded, load the identifier that the flush [names](Invalidation::id) with
    /// a root in which nothing is mapped, and afterwards what was loaded before: with the guest's
    /// own root walks would be remembered under an identifier that this processor was not
    /// [told](crate::shootdown::Identifiers::switch) to load.
    #[inline]
    pub fn invalidate(&self, flush: &Invalidation<'_>) {
        self.instructions(flush, |one| execute(one, self.domain));
    }

    /// Executes the instructions of
    /// [`SharedPlatform::invalidate_here`](crate::shared::SharedPlatform::invalidate_here): this
    /// processor alone forgets, and has forgotten on return.
    #[inline]
    pub fn invalidate_here(&self, flush: &Invalidation<'_>) {
        let here = self.alone();
        here.invalidate(flush);
        here.barrier(Barrier::Complete);
    }

    /// Forgets everything of the regime under all identifiers, on this processor alone, as
    /// [`Identifiers::switch`](crate::shootdown::Identifiers::switch) asks for it. It has forgotten
    /// on return.
    pub fn forget_all(&self) {
        let op = match self.encoder.regime {
            Regime::El1 => Op::Vmalle1,
            Regime::El2 => Op::Alle2,
            Regime::Stage2 => Op::Alle1,
        };
        let here = self.alone();
        for _ in 0..1 + u8::from(self.twice) {
            here.tlbi(Tlbi { op, operand: 0 });
            here.dsb();
        }
        execute::isb();
    }
}

// SAFETY: the instructions are executed, in the Inner Shareable domain whatever that of the `Cpu`
// (1., 2.).
#[cfg(target_arch = "aarch64")]
unsafe impl Arm64 for Cpu {
    #[inline]
    fn tlbi(&self, tlbi: Tlbi) {
        execute(Instruction::Tlbi(tlbi), Domain::Inner);
    }

    #[inline]
    fn dsb(&self) {
        execute(Instruction::Dsb, Domain::Inner);
    }
}

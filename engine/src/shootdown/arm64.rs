//! arm64's broadcast: which TLBI instructions a flush takes, with and without ranges.
//!
//! Every instruction here is of the Inner Shareable domain: all CPUs hear it, whatever they have
//! loaded. No list is kept, and there is no generation of a space. `DSB ISHST` comes before the
//! first, and `DSB ISH` behind the last, from [`Barrier`](crate::Barrier).
//!
//! # Global translations
//!
//! A leaf that is global matches any ASID. A table descriptor does not: what is cached of it has
//! the ASID under which the walker read it (DDI 0487 C5.5, TLBI VAE1IS: "from a level of lookup
//! above the final level and matches the specified ASID"). So what is global is invalidated for all
//! ASIDs (`VAA`), and everything without one.
//!
//! # Stage 2
//!
//! A range is invalidated by intermediate physical address; what was combined of it with the
//! guest's stage 1 is kept under the guest's virtual address, which is not known, so that all that
//! was combined goes. In this order: a walker that combines anew between the two must not find the
//! range any more. One flush is
//!
//! 1. every range of it, by intermediate physical address;
//! 2. `DSB ISH`, once;
//! 3. `VMALLE1IS`, once;
//!
//! and the `DSB ISH` of [`Barrier::Complete`](crate::Barrier::Complete).
//!
//! # A range (FEAT_TLBIRANGE; DDI 0487 C5.5, TLBI RVAE1IS)
//!
//! One instruction takes `(NUM + 1) << (5 * SCALE + 1)` pages of the granule, NUM below 32 and
//! SCALE below 4: an even number, up to 2097152. A number of pages is taken apart from the largest
//! scale down, like digits; an odd page goes by itself. The address counts in pages, or with 52
//! bits of addresses in 64 KiB, which not every range starts at.

use super::Messenger;
use crate::addr::Level;
use crate::cpus::Cpus;
use crate::invalidation::{Invalidation, Stale, What};

/// Which TLBI. `L`: leaves only, what is cached of tables stays. `VAA`: all ASIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Their names are the architecture's.
pub enum Op {
    Vmalle1,
    Aside1,
    Vae1,
    Vale1,
    Vaae1,
    Vaale1,
    Rvae1,
    Rvale1,
    Rvaae1,
    Rvaale1,
    Vmalls12e1,
    Ipas2e1,
    Ipas2le1,
    Ripas2e1,
    Ripas2le1,
    Alle1,
    Alle2,
    Vae2,
    Vale2,
    Rvae2,
    Rvale2,
}

impl Op {
    /// `op1`, `CRm` and `op2` of the system instruction for the Inner Shareable domain; `op0` is 1,
    /// and `CRn` 8.
    const fn fields(self) -> (u32, u32, u32) {
        match self {
            Self::Vmalle1 => (0, 3, 0),
            Self::Vae1 => (0, 3, 1),
            Self::Aside1 => (0, 3, 2),
            Self::Vaae1 => (0, 3, 3),
            Self::Vale1 => (0, 3, 5),
            Self::Vaale1 => (0, 3, 7),
            Self::Rvae1 => (0, 2, 1),
            Self::Rvaae1 => (0, 2, 3),
            Self::Rvale1 => (0, 2, 5),
            Self::Rvaale1 => (0, 2, 7),
            Self::Vmalls12e1 => (4, 3, 6),
            Self::Ipas2e1 => (4, 0, 1),
            Self::Ripas2e1 => (4, 0, 2),
            Self::Ipas2le1 => (4, 0, 5),
            Self::Ripas2le1 => (4, 0, 6),
            Self::Alle1 => (4, 3, 4),
            Self::Alle2 => (4, 3, 0),
            Self::Vae2 => (4, 3, 1),
            Self::Vale2 => (4, 3, 5),
            Self::Rvae2 => (4, 2, 1),
            Self::Rvale2 => (4, 2, 5),
        }
    }

    /// The instruction for all processors of the Inner Shareable domain, with its operand in this
    /// register (DDI 0487 C5.1.3, SYS).
    ///
    /// ```
    /// use tablewright::shootdown::arm64::Op;
    /// assert_eq!(Op::Rvae1.word(0), 0xd508_8220); // tlbi rvae1is, x0
    /// ```
    pub const fn word(self, register: u8) -> u32 {
        let (op1, crm, op2) = self.fields();
        0xd508_0000 | op1 << 16 | 8 << 12 | crm << 8 | op2 << 5 | (register as u32 & 31)
    }

    /// Returns the instruction that tells the executing processor alone: `CRm` is greater by 4.
    ///
    /// ```
    /// use tablewright::shootdown::arm64::Op;
    /// assert_eq!(Op::Rvae1.local_word(0), 0xd508_8620); // tlbi rvae1, x0
    /// ```
    pub const fn local_word(self, register: u8) -> u32 {
        self.word(register) + (4 << 8)
    }

    /// Whether it means everything, so that its register is the zero register.
    pub const fn is_everything(self) -> bool {
        matches!(self, Self::Vmalle1 | Self::Vmalls12e1 | Self::Alle1 | Self::Alle2)
    }

    /// Whether it takes a range.
    pub const fn is_range(self) -> bool {
        matches!(
            self,
            Self::Rvae1
                | Self::Rvale1
                | Self::Rvaae1
                | Self::Rvaale1
                | Self::Ripas2e1
                | Self::Ripas2le1
                | Self::Rvae2
                | Self::Rvale2
        )
    }
}

/// A TLBI and its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tlbi {
    /// The instruction.
    pub op: Op,
    /// The value of its register: zero where it invalidates everything.
    pub operand: u64,
}

/// An instruction of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// A TLBI.
    Tlbi(Tlbi),
    /// `DSB ISH`: what comes before is complete before what comes after begins.
    Dsb,
}

/// The pages of one range instruction: `NUM`, `SCALE`.
const fn range_pages(num: u64, scale: u64) -> u64 {
    (num + 1) << (5 * scale + 1)
}

/// The translations that a flush is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Stage 1 of EL1 and EL0; with `HCR_EL2.E2H` and `TGE` set, of EL2 and EL0, by the same
    /// instructions.
    El1,
    /// Stage 1 of EL2 with `HCR_EL2.E2H` clear: one root, and no identifiers.
    El2,
    /// Stage 2: the addresses are those that a guest takes for physical, and its VMID is loaded.
    Stage2,
}

/// How instructions are written on this machine.
///
/// ```
/// use tablewright::shootdown::arm64::{Encoder, Instruction, Op, Regime, Tlbi};
/// use tablewright::{Invalidation, Level, Pa, Stale, What};
/// let stage1 = Encoder { regime: Regime::El1, page_shift: 12, ranges: true, wide: false };
/// let range = Stale { first: 0x1000, last: 0x7fff, level: Some(Level::PAGE), tables: false };
/// let flush = Invalidation {
///     root: Pa::new(0x1000),
///     id: 9,
///     global: false,
///     what: What::Ranges(&[range]),
/// };
/// let encode = |encoder: Encoder| {
///     let mut all = Vec::new();
///     encoder.encode(&flush, |one| all.push(one));
///     all
/// };
/// // Six pages, which is NUM 2 at SCALE 0, and one more; both with the level.
/// let six = Tlbi { op: Op::Rvale1, operand: 9 << 48 | 1 << 46 | 2 << 39 | 3 << 37 | 1 };
/// let one = Tlbi { op: Op::Vale1, operand: 9 << 48 | 1 << 46 | 3 << 44 | 7 };
/// assert_eq!(encode(stage1), [Instruction::Tlbi(six), Instruction::Tlbi(one)]);
///
/// // The same addresses as a guest takes them for physical.
/// let all = encode(Encoder { regime: Regime::Stage2, ..stage1 });
/// let combined = Tlbi { op: Op::Vmalle1, operand: 0 };
/// assert_eq!(all[2..], [Instruction::Dsb, Instruction::Tlbi(combined)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    /// The translations that its instructions invalidate.
    pub regime: Regime,
    /// The granule: 12, 14 or 16.
    pub page_shift: u32,
    /// FEAT_TLBIRANGE.
    pub ranges: bool,
    /// `TCR_EL1.DS`, `TCR_EL2.DS`, or `VTCR_EL2.DS`: addresses of 52 bits with 4 or 16 KiB pages.
    pub wide: bool,
}

impl Encoder {
    /// The instructions of a flush, in order. Another `DSB ISH` completes them.
    pub fn encode(&self, flush: &Invalidation<'_>, mut each: impl FnMut(Instruction)) {
        let all = |op| Instruction::Tlbi(Tlbi { op, operand: 0 });
        match flush.what {
            What::Ranges([]) => {}
            What::Ranges(ranges) => {
                for range in ranges {
                    self.range(flush, range, &mut |tlbi| each(Instruction::Tlbi(tlbi)));
                }
                if self.regime == Regime::Stage2 {
                    each(Instruction::Dsb);
                    each(all(Op::Vmalle1));
                }
            }
            What::Everything => each(match self.regime {
                Regime::Stage2 => all(Op::Vmalls12e1),
                Regime::El2 => all(Op::Alle2),
                Regime::El1 if flush.global => all(Op::Vmalle1),
                Regime::El1 => Instruction::Tlbi(Self::space(flush.id)),
            }),
        }
    }

    fn range(&self, flush: &Invalidation<'_>, range: &Stale, each: &mut impl FnMut(Tlbi)) {
        let (one, many) = match (self.regime, flush.global, range.tables) {
            (Regime::El1, false, true) => (Op::Vae1, Op::Rvae1),
            (Regime::El1, false, false) => (Op::Vale1, Op::Rvale1),
            (Regime::El1, true, true) => (Op::Vaae1, Op::Rvaae1),
            (Regime::El1, true, false) => (Op::Vaale1, Op::Rvaale1),
            (Regime::El2, _, true) => (Op::Vae2, Op::Rvae2),
            (Regime::El2, _, false) => (Op::Vale2, Op::Rvale2),
            (Regime::Stage2, _, true) => (Op::Ipas2e1, Op::Ripas2e1),
            (Regime::Stage2, _, false) => (Op::Ipas2le1, Op::Ripas2le1),
        };
        // The VMID is that which is loaded, what is global has no ASID, and EL2 has none.
        let id = match (self.regime, flush.global) {
            (Regime::El1, false) => u64::from(flush.id) << 48,
            _ => 0,
        };
        let granule = u64::from(self.page_shift - 10) / 2;
        let ttl = self.ttl(range.level);
        let bits = self.page_shift - 3;
        let stride = bits * range.level.map_or(0, |level| u32::from(level.height()));
        // Only where ranges can start.
        let base = if self.wide { 16 } else { self.page_shift };
        let number = |address: u64| (address & ((1 << 56) - 1)) >> 12;
        let mut page = range.first >> self.page_shift;
        let end = (range.last >> self.page_shift) + 1;
        while page < end {
            let address = page << self.page_shift;
            let pages = end - page;
            // The largest scale of which there is one: the position of the highest bit, in digits
            // of five.
            let scale = (u64::from(pages.ilog2()).saturating_sub(1) / 5).min(3);
            let starts = address & ((1 << base) - 1) == 0;
            // A large leaf takes one instruction, as a range does.
            if self.ranges && starts && pages > 1 << stride {
                let num = (pages >> (5 * scale + 1)).min(32) - 1;
                let operand = id
                    | granule << 46
                    | scale << 44
                    | num << 39
                    | ttl << 37
                    | address >> base & ((1 << 37) - 1);
                each(Tlbi { op: many, operand });
                page += range_pages(num, scale);
            } else {
                let hint = if ttl == 0 { 0 } else { granule << 46 | ttl << 44 };
                let operand = id | hint | number(address);
                each(Tlbi { op: one, operand });
                // To the next leaf, wherever in its own this address lies.
                page = ((page >> stride) + 1) << stride;
            }
        }
    }

    /// The hint of a level; none at the level above which there is none to be named.
    fn ttl(&self, level: Option<Level>) -> u64 {
        match level.map(Level::height) {
            Some(height @ 0..=2) => 3 - u64::from(height),
            _ => 0,
        }
    }

    /// All of one space (stage 1) but what is global.
    pub fn space(id: u16) -> Tlbi {
        Tlbi { op: Op::Aside1, operand: u64::from(id) << 48 }
    }
}

/// The instructions that an embedder executes: TLBI and DSB.
///
/// # Safety
/// 1. [`tlbi`](Arm64::tlbi) executes the instruction with its operand, in the Inner Shareable
///    domain, and all processors are in that domain.
/// 2. [`dsb`](Arm64::dsb) returns when every TLBI that the caller has executed before, on the same
///    processor, is complete.
pub unsafe trait Arm64 {
    /// One TLBI.
    fn tlbi(&self, tlbi: Tlbi);
    /// `DSB ISH`: waits for all that this CPU has issued.
    fn dsb(&self);
}

/// Flushes by broadcast TLBI, for an embedder that has other messengers beside it. Without others,
/// a platform issues what [`encode`](Encoder::encode) gives it.
#[derive(Clone, Copy, Debug)]
pub struct TlbiMessenger<A> {
    encoder: Encoder,
    cost: u64,
    hardware: A,
}

impl<A: Arm64> TlbiMessenger<A> {
    /// Makes the messenger. `cost` is that of one instruction, with its share of the wait, in the
    /// unit of the cost of an [interrupt](super::Shootdown::new).
    ///
    /// # Safety
    /// 1. `encoder` describes stage 1 of EL1 and EL0 as it is set up on all processors.
    pub const unsafe fn new(encoder: Encoder, cost: u64, hardware: A) -> Self {
        Self { encoder, cost, hardware }
    }
}

// SAFETY: the instructions are those of the flush (`new`), all CPUs are in the domain, and the last
// DSB waits for every instruction (1., 2.).
unsafe impl<A: Arm64> Messenger for TlbiMessenger<A> {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        self.encoder.encode(flush, |one| match one {
            Instruction::Tlbi(tlbi) => self.hardware.tlbi(tlbi),
            Instruction::Dsb => self.hardware.dsb(),
        });
        self.hardware.dsb();
        cpus.clear();
    }

    fn reaches_all(&self) -> bool {
        true
    }

    fn cost(&self, flush: &Invalidation<'_>, _: u32) -> u64 {
        let mut count = 0u64;
        self.encoder.encode(flush, |_| count += 1);
        count.saturating_mul(self.cost)
    }
}

//! arm64's broadcast: which TLBI instructions an invalidation takes, with and without ranges.
//!
//! Every instruction here is of the Inner Shareable domain: all processors hear it, whatever they have loaded. Nobody keeps a
//! list, and there is no generation of a space. `DSB ISHST` comes before the first, and `DSB ISH` behind the last, from
//! [`Barrier`](crate::Barrier).
//!
//! # A range (FEAT_TLBIRANGE; DDI 0487 C5.5, TLBI RVAE1IS)
//!
//! One instruction takes `(NUM + 1) << (5 * SCALE + 1)` pages of the granule, NUM below 32 and SCALE below 4: an even number, up
//! to 2097152. A number of pages is taken apart from the largest scale down, like digits; an odd page goes by itself. The
//! address counts in pages, or with 52 bits of addresses in 64 KiB, which not every range starts at.

use crate::addr::Level;
use crate::flush::{Invalidation, What};

use super::{Cpus, Message, Messenger};

/// Which TLBI, all of them for the Inner Shareable domain. `L`: leaves only, what is cached of tables stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Their names are the architecture's.
pub enum Op {
    Vmalle1,
    Aside1,
    Vae1,
    Vale1,
    Rvae1,
    Rvale1,
    Vmalls12e1,
    Ipas2e1,
    Ipas2le1,
    Ripas2e1,
    Ripas2le1,
}

impl Op {
    /// `op1`, `CRm` and `op2` of the system instruction; `op0` is 1, and `CRn` 8.
    const fn fields(self) -> (u32, u32, u32) {
        match self {
            Self::Vmalle1 => (0, 3, 0),
            Self::Vae1 => (0, 3, 1),
            Self::Aside1 => (0, 3, 2),
            Self::Vale1 => (0, 3, 5),
            Self::Rvae1 => (0, 2, 1),
            Self::Rvale1 => (0, 2, 5),
            Self::Vmalls12e1 => (4, 3, 6),
            Self::Ipas2e1 => (4, 0, 1),
            Self::Ripas2e1 => (4, 0, 2),
            Self::Ipas2le1 => (4, 0, 5),
            Self::Ripas2le1 => (4, 0, 6),
        }
    }

    /// The instruction, with its operand in this register (DDI 0487 C5.1.3, SYS).
    ///
    /// ```
    /// use tablewright::shootdown::arm64::Op;
    /// assert_eq!(Op::Rvae1.word(0), 0xd508_8220); // tlbi rvae1is, x0
    /// ```
    pub const fn word(self, register: u8) -> u32 {
        let (op1, crm, op2) = self.fields();
        0xd508_0000 | op1 << 16 | 8 << 12 | crm << 8 | op2 << 5 | (register as u32 & 31)
    }

    /// Whether it takes a range.
    pub const fn is_range(self) -> bool {
        matches!(
            self,
            Self::Rvae1 | Self::Rvale1 | Self::Ripas2e1 | Self::Ripas2le1
        )
    }
}

/// An instruction and its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tlbi {
    /// Which.
    pub op: Op,
    /// Its register. Nothing is in it where everything is meant.
    pub operand: u64,
}

/// The pages of one range instruction: `NUM`, `SCALE`.
const fn range_pages(num: u64, scale: u64) -> u64 {
    (num + 1) << (5 * scale + 1)
}

/// How instructions are written on this machine.
///
/// ```
/// use tablewright::shootdown::arm64::{Encoder, Op, Tlbi};
/// use tablewright::{Invalidation, Level, What};
/// let encoder = Encoder { page_shift: 12, ranges: true, wide: false, stage2: false };
/// let what = What::Range { first: 0x1000, last: 0x7fff, level: Some(Level::PAGE), tables: false };
/// let mut all = Vec::new();
/// encoder.encode(&Invalidation { id: 9, what }, |tlbi| all.push(tlbi));
/// // Six pages, which is NUM 2 at SCALE 0, and one more; both with the level.
/// assert_eq!(all, [
///     Tlbi { op: Op::Rvale1, operand: 9 << 48 | 1 << 46 | 2 << 39 | 3 << 37 | 1 },
///     Tlbi { op: Op::Vale1, operand: 9 << 48 | 1 << 46 | 3 << 44 | 7 },
/// ]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    /// The granule: 12, 14 or 16.
    pub page_shift: u32,
    /// FEAT_TLBIRANGE.
    pub ranges: bool,
    /// `TCR_EL1.DS`, or `VTCR_EL2.DS`: addresses of 52 bits with 4 or 16 KiB pages.
    pub wide: bool,
    /// The addresses are those that a guest takes for physical, and its VMID is loaded. What was combined with the guest's stage 1
    /// is invalidated after that, and by itself: see [`Invalidation`].
    pub stage2: bool,
}

impl Encoder {
    /// The instructions of an invalidation, in order.
    pub fn encode(&self, what: &Invalidation, mut each: impl FnMut(Tlbi)) {
        let What::Range {
            first,
            last,
            level,
            tables,
        } = what.what
        else {
            let op = match self.stage2 {
                true => Op::Vmalls12e1,
                false => Op::Vmalle1,
            };
            return each(Tlbi { op, operand: 0 });
        };
        let (one, many) = match (self.stage2, tables) {
            (false, true) => (Op::Vae1, Op::Rvae1),
            (false, false) => (Op::Vale1, Op::Rvale1),
            (true, true) => (Op::Ipas2e1, Op::Ripas2e1),
            (true, false) => (Op::Ipas2le1, Op::Ripas2le1),
        };
        // The VMID is that which is loaded.
        let id = if self.stage2 {
            0
        } else {
            u64::from(what.id) << 48
        };
        let granule = u64::from(self.page_shift - 10) / 2;
        let ttl = self.ttl(level);
        let bits = self.page_shift - 3;
        let stride = bits * level.map_or(0, |level| u32::from(level.height()));
        // Only where ranges can start.
        let base = if self.wide { 16 } else { self.page_shift };
        let number = |address: u64| (address & ((1 << 56) - 1)) >> 12;
        let (mut page, end) = (first >> self.page_shift, (last >> self.page_shift) + 1);
        while page < end {
            let address = page << self.page_shift;
            let pages = end - page;
            // The largest scale of which there is one: the position of the highest bit, in digits of five.
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
                let hint = if ttl == 0 {
                    0
                } else {
                    granule << 46 | ttl << 44
                };
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

    /// All of one space (stage 1).
    pub fn space(id: u16) -> Tlbi {
        Tlbi {
            op: Op::Aside1,
            operand: u64::from(id) << 48,
        }
    }
}

/// What an embedder executes.
pub trait Arm64 {
    /// One TLBI.
    fn tlbi(&self, tlbi: Tlbi);
    /// `DSB ISH`: waits for all that this processor has issued.
    fn dsb(&self);
}

/// The messenger, for an embedder that has others beside it. Without, a platform issues what
/// [`encode`](Encoder::encode) gives it.
#[derive(Clone, Copy, Debug)]
pub struct Broadcast<A> {
    /// Writes the instructions; of stage 1.
    pub encoder: Encoder,
    /// What one instruction costs, with its share of the wait, in the unit of [`Costs`](super::Costs).
    pub cost: u64,
    /// The processor.
    pub hardware: A,
}

impl<A> Broadcast<A> {
    fn encode(&self, message: &Message<'_>, mut each: impl FnMut(Tlbi)) {
        if message.is_whole() {
            return each(Encoder::space(message.id));
        }
        for one in message.what {
            let under = Invalidation {
                id: message.id,
                ..*one
            };
            self.encoder.encode(&under, &mut each);
        }
    }
}

impl<A: Arm64> Messenger for Broadcast<A> {
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus) {
        self.encode(message, |tlbi| self.hardware.tlbi(tlbi));
        self.hardware.dsb();
        cpus.clear();
    }

    fn reaches_all(&self) -> bool {
        true
    }

    fn cost(&self, message: &Message<'_>, _: u32) -> u64 {
        let mut count = 0u64;
        self.encode(message, |_| count += 1);
        count.saturating_mul(self.cost)
    }
}

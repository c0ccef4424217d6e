//! AMD's broadcast: INVLPGB, and TLBSYNC to wait (APM volume 3, INVLPGB; `CPUID` 8000_0008 EBX bit
//! 3).
//!
//! It names a PCID, which has to be the space's on every CPU: that of
//! [`Identifiers`](super::Identifiers) is. Where global translations are meant it names none, and
//! is of all.

use super::Messenger;
use crate::addr::Level;
use crate::cpus::Cpus;
use crate::invalidation::{Invalidation, What};

/// The operands of one INVLPGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invlpgb {
    /// RAX: the first address, and which of the fields are valid.
    pub rax: u64,
    /// ECX: how many addresses follow the first, and their distance.
    pub ecx: u32,
    /// EDX: the PCID, in bits 27:16.
    pub edx: u32,
}

const VALID_ADDRESS: u64 = 1 << 0;
const VALID_PCID: u64 = 1 << 1;
/// Global translations too.
const INCLUDE_GLOBAL: u64 = 1 << 3;
/// Leaves only; what is cached of tables stays.
const FINAL_ONLY: u64 = 1 << 4;
const STRIDE_2M: u32 = 1 << 31;

/// The instructions that an embedder executes: INVLPGB and TLBSYNC.
///
/// # Safety
/// 1. [`invlpgb`](Amd::invlpgb) executes INVLPGB with these operands.
/// 2. [`tlbsync`](Amd::tlbsync) returns when every INVLPGB that the caller has executed before,
///    on the same processor, is complete on all processors.
pub unsafe trait Amd {
    /// INVLPGB.
    fn invlpgb(&self, operands: Invlpgb);
    /// TLBSYNC: waits for all that this CPU has issued.
    fn tlbsync(&self);
}

/// Flushes by INVLPGB, which hardware broadcasts to all processors.
#[derive(Clone, Copy, Debug)]
pub struct InvlpgbMessenger<A> {
    /// The most addresses *besides the first* of one instruction: `CPUID` 8000_0008 EDX 15:0.
    pub most: u16,
    /// The cost of one instruction, with its share of the wait, in the unit of the cost of an
    /// [interrupt](super::Shootdown::new).
    pub cost: u64,
    /// Executes the instructions.
    pub hardware: A,
}

/// The instructions of a flush, with at most so many addresses besides the first in each.
///
/// ```
/// use tablewright::shootdown::amd::{self, Invlpgb};
/// use tablewright::{Invalidation, Pa, Stale, What};
/// let encode = |global| {
///     let range = Stale { first: 0x7000, last: 0x9fff, level: None, tables: true };
///     let (root, what) = (Pa::new(0x1000), What::Ranges(&[range]));
///     let mut all = Vec::new();
///     amd::encode(7, &Invalidation { root, id: 5, global, what }, |one| all.push(one));
///     all
/// };
/// assert_eq!(encode(false), [Invlpgb { rax: 0x7003, ecx: 2, edx: 5 << 16 }]); // two more pages
/// assert_eq!(encode(true), [Invlpgb { rax: 0x7009, ecx: 2, edx: 0 }]);
/// ```
pub fn encode(most: u16, flush: &Invalidation<'_>, mut each: impl FnMut(Invlpgb)) {
    let Invalidation { id, global, what, .. } = *flush;
    // Tables that global translations were found in are cached under any PCID. No ASID is said
    // to be valid, so that it does not matter.
    let (all, edx) = match global {
        true => (INCLUDE_GLOBAL, 0),
        false => (VALID_PCID, u32::from(id & 0xfff) << 16),
    };
    let What::Ranges(ranges) = what else {
        return each(Invlpgb { rax: all, ecx: 0, edx });
    };
    for range in ranges {
        // An address invalidates the one leaf around it. Of leaves that are known to be large,
        // fewer addresses will do; where the level is not known there may be small ones between
        // two such addresses.
        let large = range.level.is_some_and(|level| level > Level::PAGE);
        let shift = if large { 21 } else { 12 };
        let mut flags = all | VALID_ADDRESS;
        if !range.tables {
            flags |= FINAL_ONLY;
        }
        let stride = if large { STRIDE_2M } else { 0 };
        let (mut number, last) = (range.first >> shift, range.last >> shift);
        loop {
            let more = (last - number).min(u64::from(most));
            each(Invlpgb { rax: number << shift | flags, ecx: more as u32 | stride, edx });
            number += more + 1;
            if number > last {
                break;
            }
        }
    }
}

// SAFETY: every CPU executes each instruction before TLBSYNC returns (1., 2.).
unsafe impl<A: Amd> Messenger for InvlpgbMessenger<A> {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        encode(self.most, flush, |one| self.hardware.invlpgb(one));
        self.hardware.tlbsync();
        cpus.clear();
    }

    fn reaches_all(&self) -> bool {
        true
    }

    fn cost(&self, flush: &Invalidation<'_>, _: u32) -> u64 {
        let mut count = 0u64;
        encode(self.most, flush, |_| count += 1);
        count.saturating_mul(self.cost)
    }
}

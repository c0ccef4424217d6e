//! AMD's broadcast: INVLPGB, and TLBSYNC to wait (APM volume 3, INVLPGB; `CPUID` 8000_0008 EBX bit
//! 3).
//!
//! It names a PCID, which has to be the space's on every CPU: that of
//! [`Identifiers`](super::Identifiers) is. Where global translations are meant it names none, and
//! is of all.

use crate::addr::Level;
use crate::invalidation::{Invalidation, What};

use super::{Cpus, Message, Messenger};

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
pub trait Amd {
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
    /// What one instruction costs, with its share of the wait, in the unit of what an
    /// [interrupt](super::Shootdown::new) costs.
    pub cost: u64,
    /// Executes the instructions.
    pub hardware: A,
}

impl<A> InvlpgbMessenger<A> {
    /// The instructions for a message.
    ///
    /// ```
    /// use tablewright::shootdown::{Message, amd::{InvlpgbMessenger, Invlpgb}};
    /// use tablewright::{Invalidation, Pa, Stale, What};
    /// let broadcast = InvlpgbMessenger { most: 7, cost: 0, hardware: () };
    /// let encode = |global| {
    ///     let range = Stale { first: 0x7000, last: 0x9fff, level: None, tables: true };
    ///     let flush = Invalidation { root: Pa::new(0x1000), id: 5, global, what: What::Ranges(&[range]) };
    ///     let mut all = Vec::new();
    ///     broadcast.encode(&Message { from: 0, flush }, |one| all.push(one));
    ///     all
    /// };
    /// assert_eq!(encode(false), [Invlpgb { rax: 0x7003, ecx: 2, edx: 5 << 16 }]); // two more pages
    /// assert_eq!(encode(true), [Invlpgb { rax: 0x7009, ecx: 2, edx: 0 }]);
    /// ```
    pub fn encode(&self, message: &Message<'_>, mut each: impl FnMut(Invlpgb)) {
        let Invalidation {
            id, global, what, ..
        } = message.flush;
        // Tables that global translations were found in are cached under any PCID. No ASID is said
        // to be valid, so that it does not matter.
        let (all, edx) = match global {
            true => (INCLUDE_GLOBAL, 0),
            false => (VALID_PCID, u32::from(id & 0xfff) << 16),
        };
        let What::Ranges(ranges) = what else {
            return each(Invlpgb {
                rax: all,
                ecx: 0,
                edx,
            });
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
                let more = (last - number).min(u64::from(self.most));
                each(Invlpgb {
                    rax: number << shift | flags,
                    ecx: more as u32 | stride,
                    edx,
                });
                number += more + 1;
                if number > last {
                    break;
                }
            }
        }
    }
}

impl<A: Amd> Messenger for InvlpgbMessenger<A> {
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus) {
        self.encode(message, |one| self.hardware.invlpgb(one));
        self.hardware.tlbsync();
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

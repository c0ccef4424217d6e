//! AMD's broadcast: INVLPGB, and TLBSYNC to wait (APM volume 3, INVLPGB; `CPUID` 8000_0008 EBX bit 3).
//!
//! It names a PCID, which has to be the space's on every processor: that of [`Identifiers`](super::Identifiers) is.

use crate::addr::Level;
use crate::flush::What;

use super::{Cpus, Message, Messenger};

/// The operands of one INVLPGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invlpgb {
    /// An address, and what is valid.
    pub rax: u64,
    /// How many more, and how far from each other.
    pub ecx: u32,
    /// PCID 27:16.
    pub edx: u32,
}

const VALID_ADDRESS: u64 = 1 << 0;
const VALID_PCID: u64 = 1 << 1;
/// Leaves only; what is cached of tables stays.
const FINAL_ONLY: u64 = 1 << 4;
const STRIDE_2M: u32 = 1 << 31;

/// What an embedder executes.
pub trait Amd {
    /// INVLPGB.
    fn invlpgb(&self, operands: Invlpgb);
    /// TLBSYNC: waits for all that this processor has issued.
    fn tlbsync(&self);
}

/// The messenger.
#[derive(Clone, Copy, Debug)]
pub struct Broadcast<A> {
    /// The most addresses *besides the first* of one instruction: `CPUID` 8000_0008 EDX 15:0.
    pub most: u16,
    /// What one instruction costs, with its share of the wait, in the unit of [`Costs`](super::Costs).
    pub cost: u64,
    /// The processor.
    pub hardware: A,
}

impl<A> Broadcast<A> {
    /// The instructions for a message.
    ///
    /// ```
    /// use tablewright::shootdown::{Message, amd::{Broadcast, Invlpgb}};
    /// use tablewright::{Invalidation, Pa, What};
    /// let what = What::Range { first: 0x7000, last: 0x9fff, level: None, tables: true };
    /// let message = Message { from: 0, id: 5, root: Pa::new(0), what: &[Invalidation { id: 0, what }] };
    /// let broadcast = Broadcast { most: 7, cost: 0, hardware: () };
    /// let mut all = Vec::new();
    /// broadcast.encode(&message, |one| all.push(one));
    /// assert_eq!(all, [Invlpgb { rax: 0x7003, ecx: 2, edx: 5 << 16 }]); // two more pages
    /// ```
    pub fn encode(&self, message: &Message<'_>, mut each: impl FnMut(Invlpgb)) {
        let edx = u32::from(message.id & 0xfff) << 16;
        // No ASID is said to be valid, so that it does not matter.
        let all = VALID_PCID;
        if message.is_whole() {
            return each(Invlpgb {
                rax: all,
                ecx: 0,
                edx,
            });
        }
        for one in message.what {
            let What::Range {
                first,
                last,
                level,
                tables,
            } = one.what
            else {
                continue;
            };
            // An address invalidates the leaf around it, whatever its size; so of larger ones fewer will do.
            let large = level.is_some_and(|level| level > Level::PAGE);
            let shift = if large { 21 } else { 12 };
            let flags = all | VALID_ADDRESS | if tables { 0 } else { FINAL_ONLY };
            let stride = if large { STRIDE_2M } else { 0 };
            let (mut number, last) = (first >> shift, last >> shift);
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

impl<A: Amd> Messenger for Broadcast<A> {
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

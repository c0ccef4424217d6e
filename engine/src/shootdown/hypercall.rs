//! The messenger of guests of Hyper-V, and of hosts that offer its calls.

use crate::hyperv::{self, FlushEncoder, PAGE_WORDS, Targets, VpSet};

use super::{Cpus, Message, Messenger};

/// What the hypercall messenger asks of its embedder, besides the call.
pub trait Hypercalls: hyperv::Caller {
    /// The number by which the hypervisor knows a CPU, if that is known yet.
    fn vp_index(&self, cpu: usize) -> Option<u32>;

    /// Runs a function with the input page of this CPU, interrupts held off; not at all if there is
    /// none yet.
    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS]));
}

/// Flushes by [hypercall](crate::hyperv). CPUs whose number is not known, and all if the call
/// fails, are left to another messenger.
#[derive(Clone, Copy, Debug)]
pub struct Hypercall<H> {
    /// Encodes the input of the call.
    pub encoder: FlushEncoder,
    /// What one call costs, in the unit of what an [interrupt](super::Shootdown::new) costs.
    pub cost: u64,
    /// The embedder's part.
    pub calls: H,
}

impl<H: Hypercalls> Messenger for Hypercall<H> {
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus) {
        let mut vps = VpSet::EMPTY;
        let mut left = *cpus;
        left.retain(|cpu| {
            let vp = self.calls.vp_index(cpu);
            !vp.is_some_and(|vp| vps.insert(vp))
        });
        let mut told = false;
        self.calls.with_page(&mut |page| {
            let targets = Targets::Set(&vps);
            let sent = self
                .encoder
                .send(&self.calls, Some(page), targets, &message.flush);
            told = sent.is_ok();
        });
        if told {
            *cpus = left;
        }
    }

    fn cost(&self, _: &Message<'_>, _: u32) -> u64 {
        self.cost
    }
}

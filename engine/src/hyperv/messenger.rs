//! The messenger of guests of Hyper-V, and of hosts that offer its calls.

use super::{FlushEncoder, Input, Output, PAGE_WORDS};
use crate::cpus::Cpus;
use crate::invalidation::Invalidation;
use crate::shootdown::Messenger;

/// The hypercalls of an embedder.
///
/// # Safety
/// 1. [`call`](Hypercalls::call) makes the hypercall with the physical address of the page that it
///    is given, on the processor to which the page belongs. The hypervisor keeps the contract of
///    [the specification](super).
/// 2. [`with_page`](Hypercalls::with_page) holds interrupts off while its function runs, and gives
///    it the page of the processor that it runs on.
/// 3. [`vp_index`](Hypercalls::vp_index) is the number by which the hypervisor knows that CPU.
pub unsafe trait Hypercalls {
    /// Makes a call with this page of input.
    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output;

    /// The number by which the hypervisor knows a CPU, if that is known yet.
    fn vp_index(&self, cpu: usize) -> Option<u32>;

    /// Runs a function with the input page of this CPU; not at all if there is none yet.
    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS]));
}

/// Flushes by [hypercall](super). CPUs whose number is not known, and all if the call fails, are
/// left to another messenger.
#[derive(Clone, Copy, Debug)]
pub struct Hypercall<H> {
    /// Encodes the input of the call.
    pub encoder: FlushEncoder,
    /// The cost of one call, in the unit of the cost of an
    /// [interrupt](crate::shootdown::Shootdown::new).
    pub cost: u64,
    /// The embedder's part.
    pub calls: H,
}

// SAFETY: a processor is taken out if it has a number, and the hypervisor has flushed it or will
// before it runs (1. to 3.).
unsafe impl<H: Hypercalls> Messenger for Hypercall<H> {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        let mut vps = Cpus::EMPTY;
        let mut left = *cpus;
        left.retain(|cpu| {
            let vp = self.calls.vp_index(cpu);
            !vp.is_some_and(|vp| vps.insert(vp as usize))
        });
        let mut told = false;
        self.calls.with_page(&mut |page| {
            let call = |input, page: &_| self.calls.call(input, page);
            let sent = self.encoder.send(page, Some(&vps), flush, call);
            told = sent.is_ok();
        });
        if told {
            *cpus = left;
        }
    }

    fn cost(&self, _: &Invalidation<'_>, _: u32) -> u64 {
        self.cost
    }
}

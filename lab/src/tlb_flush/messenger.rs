//! The ways to have others forget, each as its users have it.

use std::cell::RefCell;

use tablewright::hyperv::{
    FlushEncoder, HostCaps, Hypercall, Hypercalls, Input, Output, PAGE_WORDS, Status, decode,
};
use tablewright::shootdown::amd::{Amd, Invlpgb};
use tablewright::shootdown::arm64::{Arm64, Regime};
use tablewright::shootdown::{Cpus, Deferred, Messenger, PerCpu, amd, arm64};
use tablewright::{Invalidation, Stale, What};
use tablewright_machine::{Time, Tlbi};

use super::host::{Doing, Host};
use super::job::{How, Job};

/// Pages besides the first that INVLPGB's count goes up to.
const INVLPGB_MORE: u16 = 7;

/// A flush of a part that is mapped at `at`, by the running vCPU: every vCPU has forgotten it when
/// this returns, or will before it can use it. `unmapped` is what the engine has to have forgotten.
///
/// It is the engine's [`flush`](tablewright::shootdown::PerCpu::flush) in all of them, with the
/// messenger that the way has. Each messenger is tried whatever it costs, but that of the engine's
/// own way. What is flushed is what the published code flushes, the part or all, and for the engine
/// what it has unmapped.
pub fn flush(
    job: &Job,
    doing: &Doing<'_, '_>,
    here: PerCpu<'_, '_>,
    at: u64,
    unmapped: &Invalidation<'_>,
) {
    let host = doing.host;
    let Some(space) = host.space() else { return };
    let part = [Stale { first: at, last: at + (job.pages << 12) - 1, level: None, tables: true }];
    let flush = match job.how.most_pages() {
        None => *unmapped,
        Some(most) => Invalidation {
            what: match job.pages > most {
                true => What::Everything,
                false => What::Ranges(&part),
            },
            ..*unmapped
        },
    };
    let told = |messengers: &[&dyn Messenger]| here.flush(space, &flush, messengers, doing);
    let costs = host.costs();
    let hypercall = |cost: Time, first| Hypercall {
        encoder: FlushEncoder { most_ranges: job.ranges, takes_sets: true },
        cost: cost.as_ps(),
        calls: Calls {
            doing,
            vcpus: job.vcpus.into(),
            first,
            page: RefCell::new(Box::new([0; PAGE_WORDS])),
        },
    };
    let arm64 = |ranges| {
        let encoder = arm64::Encoder { regime: Regime::El1, page_shift: 12, ranges, wide: false };
        // SAFETY: the machine's architecture is this (1.).
        unsafe { arm64::TlbiMessenger::new(encoder, 0, Hardware(host)) }
    };
    match job.how {
        How::Interrupt => told(&[]),
        How::Space | How::List => told(&[&hypercall(Time::ZERO, 0)]),
        // With numbers beyond the first 64 a call has to have a set.
        How::Ex => told(&[&hypercall(Time::ZERO, 64)]),
        How::Kvm => told(&[&Later(doing)]),
        How::Invlpgb => told(&[&amd::InvlpgbMessenger {
            most: INVLPGB_MORE,
            cost: 0,
            hardware: Hardware(host),
        }]),
        How::Broadcast => told(&[&arm64(false)]),
        How::Ranges => told(&[&arm64(true)]),
        How::Tablewright if job.is_arm64() => told(&[&arm64(true)]),
        // What a call costs beside interrupts.
        How::Tablewright => told(&[&hypercall(costs.exit * 2 + costs.host_interrupt, 0)]),
    }
}

/// The guest's side of calls, and the hypervisor behind them.
struct Calls<'d, 'h, 'c> {
    doing: &'d Doing<'h, 'c>,
    vcpus: u32,
    first: u32,
    page: RefCell<Box<[u64; PAGE_WORDS]>>,
}

// SAFETY: the page is that which the call is given (1.); there is one for each flush, of which the
// space has one at a time (2.). The host counts from `first`, too (3.).
unsafe impl Hypercalls for Calls<'_, '_, '_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        Some(self.first + u32::try_from(cpu).ok()?)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        with(&mut self.page.borrow_mut());
    }

    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        let host = self.doing.host;
        let hypervisor = HostCaps {
            processors: self.first + self.vcpus,
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let done = decode(input, 0, &page[..], &hypervisor).and_then(|call| {
            let words = call.call.header() + input.banks() + input.reps();
            host.count(|tally| {
                tally.list_bytes += 8 * words as u64;
                tally.ranges += input.reps() as u64;
            });
            host.hypercall(self.doing.cpu, &call, self.first)
        });
        match done {
            Ok(()) => Output::new(Status::SUCCESS, input.reps()),
            Err(status) => {
                host.fail(status.to_string());
                Output::new(status, 0)
            }
        }
    }
}

/// KVM's protocol: vCPUs that do not run are marked, at the price of an exchange for each.
struct Later<'d, 'h, 'c>(&'d Doing<'h, 'c>);

// SAFETY: what is taken out was taken out by `Deferred` (1.), and not all is (2.).
unsafe impl Messenger for Later<'_, '_, '_> {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        let (host, cpu) = (self.0.host, self.0.cpu);
        for vcpu in cpus.iter().collect::<Vec<_>>() {
            let mut one = Cpus::EMPTY;
            one.insert(vcpu);
            cpu.order();
            // SAFETY: the host takes vCPUs off and enters them by their flags (1.).
            unsafe { Deferred::new(|vcpu| host.flag(vcpu)) }.tell(flush, &mut one);
            if one.is_empty() {
                cpus.remove(vcpu);
                host.tell_later(vcpu);
                host.work(cpu, host.costs().exchange + host.costs().transfer);
            }
        }
    }
}

/// A vCPU that broadcasts.
struct Hardware<'h, 'c>(&'h Host<'c>);

impl Hardware<'_, '_> {
    fn issue(&self, tlbi: Tlbi) {
        self.0.count(|tally| tally.broadcasts += 1);
        self.0.machine.tlbi(tlbi);
    }
}

// SAFETY: the machine's TLBs are invalidated (1.), and waited for (2.).
unsafe impl Amd for Hardware<'_, '_> {
    fn invlpgb(&self, operands: Invlpgb) {
        self.issue(Tlbi::of_invlpgb(operands));
    }

    fn tlbsync(&self) {
        self.0.machine.dsb();
    }
}

// SAFETY: as for `Amd` (1., 2.).
unsafe impl Arm64 for Hardware<'_, '_> {
    fn tlbi(&self, instruction: arm64::Tlbi) {
        self.issue(Tlbi::of_instruction(instruction, 12, false));
    }

    fn dsb(&self) {
        self.0.machine.dsb();
    }
}

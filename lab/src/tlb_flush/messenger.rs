//! The ways to have others forget, each as its users have it.

use std::cell::RefCell;

use clap::ValueEnum;
use tablewright::hyperv::{self, Encoder, HostCaps, Input, Output, PAGE_WORDS, Status, decode};
use tablewright::shootdown::amd::{Amd, Invlpgb};
use tablewright::shootdown::arm64::{Arm64, Regime, Tlbi};
use tablewright::shootdown::{
    Cpus, Deferred, Hypercall, Hypercalls, Message, Messenger, amd, arm64,
};
use tablewright::{Invalidation, Stale, What};
use tablewright_machine::{Cpu, Time};

use super::host::{Doing, Host, X86_PAGES};
use super::simulate::Job;

/// The same of arm64 without range operations.
const ARM_PAGES: u64 = 512;
/// What INVLPGB's count goes to besides the first page.
const INVLPGB_MORE: u16 = 7;
/// Where the file is mapped.
const AT: u64 = 0x7f00_0000_0000;

/// How others are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// An interrupt for each, answered by each
    Interrupt,
    /// Hyper-V: one call for the whole space
    Space,
    /// Hyper-V: one call with a list of ranges
    List,
    /// Hyper-V: a list, and a sparse set of processors
    Ex,
    /// KVM: vCPUs that do not run forget when they are entered; an interrupt for the others
    Kvm,
    /// AMD: INVLPGB and TLBSYNC
    Invlpgb,
    /// Arm64: broadcast by hardware, page by page
    Broadcast,
    /// Arm64: broadcast by hardware, with range operations
    Ranges,
    /// By the engine: idle vCPUs have no space loaded, and of what the machine has, what costs least tells the others
    Tablewright,
}

impl How {
    pub const ALL: [Self; 9] = [
        Self::Interrupt,
        Self::Space,
        Self::List,
        Self::Ex,
        Self::Kvm,
        Self::Invlpgb,
        Self::Broadcast,
        Self::Ranges,
        Self::Tablewright,
    ];

    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Space => "space",
            Self::List => "list",
            Self::Ex => "ex",
            Self::Kvm => "kvm",
            Self::Invlpgb => "invlpgb",
            Self::Broadcast => "broadcast",
            Self::Ranges => "ranges",
            Self::Tablewright => "tablewright",
        }
    }
}

/// A flush of so many pages by one of them: every vCPU has forgotten them when this returns, or will before it can use them.
///
/// It is the engine's [`flush`](tablewright::shootdown::Here::flush) in all of them, with the messenger that the way has.
/// Each messenger is tried whatever it costs, but that of the engine's own way.
pub fn flush<'h>(job: &Job, cpu: Cpu<'h>, host: &'h Host<'_>, pages: u64) {
    let arm = !job.profile.architecture.is_x86();
    let way = match job.how {
        How::Tablewright if arm => How::Ranges,
        How::Tablewright => How::Space,
        how => how,
    };
    let most = match way {
        How::List | How::Ex | How::Ranges => u64::MAX,
        How::Space => 0,
        How::Broadcast => ARM_PAGES,
        How::Interrupt | How::Kvm | How::Invlpgb | How::Tablewright => X86_PAGES,
    };
    let ranges = [Stale {
        first: AT,
        last: AT + (pages << 12) - 1,
        level: None,
        tables: true,
    }];
    let what = match pages > most {
        true => What::Everything,
        false => What::Ranges(&ranges),
    };
    let flush = Invalidation {
        root: host.space.root(),
        id: 0,
        global: false,
        what,
    };
    // What a call costs beside interrupts.
    let cost = match job.how {
        How::Tablewright => host.costs.exit * 2 + host.costs.host_interrupt,
        _ => Time::ZERO,
    };
    host.flush(cpu, |doing, here| {
        let told = |messengers: &[&dyn Messenger]| {
            here.flush(&host.space, &flush, messengers, doing);
        };
        match way {
            How::Interrupt | How::Tablewright => told(&[]),
            How::Space | How::List | How::Ex => told(&[&Hypercall {
                encoder: Encoder {
                    most_ranges: job.ranges,
                    takes_sets: true,
                },
                cost: cost.as_ps(),
                calls: Calls {
                    doing,
                    vcpus: job.vcpus.into(),
                    // With numbers beyond the first 64 a call has to have a set.
                    first: if way == How::Ex { 64 } else { 0 },
                    page: RefCell::new(Box::new([0; PAGE_WORDS])),
                },
            }]),
            How::Kvm => told(&[&Later(doing)]),
            How::Invlpgb => told(&[&amd::Broadcast {
                most: INVLPGB_MORE,
                cost: 0,
                hardware: Hardware(doing),
            }]),
            How::Broadcast | How::Ranges => told(&[&arm64::Broadcast {
                encoder: arm64::Encoder {
                    regime: Regime::El1,
                    page_shift: 12,
                    ranges: way == How::Ranges,
                    wide: false,
                },
                cost: 0,
                hardware: Hardware(doing),
            }]),
        }
    });
}

/// The guest's side of calls, and the hypervisor behind them.
struct Calls<'d, 'h, 'c> {
    doing: &'d Doing<'h, 'c>,
    vcpus: u32,
    first: u32,
    page: RefCell<Box<[u64; PAGE_WORDS]>>,
}

// SAFETY: 1. the page is that which the call is given; there is one for each flush, of which the space has one at a time.
unsafe impl hyperv::Messenger for Calls<'_, '_, '_> {
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

impl Hypercalls for Calls<'_, '_, '_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        Some(self.first + u32::try_from(cpu).ok()?)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        with(&mut self.page.borrow_mut());
    }
}

/// KVM's protocol: vCPUs that do not run are marked, at the price of an exchange for each.
struct Later<'d, 'h, 'c>(&'d Doing<'h, 'c>);

impl Messenger for Later<'_, '_, '_> {
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus) {
        let (host, cpu) = (self.0.host, self.0.cpu);
        for vcpu in cpus.iter().collect::<Vec<_>>() {
            let mut one = Cpus::EMPTY;
            one.insert(vcpu);
            cpu.order();
            Deferred::new(|vcpu| host.flag(vcpu)).tell(message, &mut one);
            if one.is_empty() {
                cpus.remove(vcpu);
                host.tell_later(vcpu);
                host.work(cpu, host.costs.exchange + host.costs.transfer);
            }
        }
    }
}

/// A CPU that broadcasts.
struct Hardware<'d, 'h, 'c>(&'d Doing<'h, 'c>);

impl Hardware<'_, '_, '_> {
    fn issue(&self) {
        let host = self.0.host;
        host.count(|tally| tally.broadcasts += 1);
        host.work(self.0.cpu, host.costs.issue);
    }

    fn complete(&self) {
        let host = self.0.host;
        host.work(self.0.cpu, host.costs.complete);
        host.all_forget();
    }
}

impl Amd for Hardware<'_, '_, '_> {
    fn invlpgb(&self, _: Invlpgb) {
        self.issue();
    }

    fn tlbsync(&self) {
        self.complete();
    }
}

impl Arm64 for Hardware<'_, '_, '_> {
    fn tlbi(&self, _: Tlbi) {
        self.issue();
    }

    fn dsb(&self) {
        self.complete();
    }
}

#[cfg(test)]
mod tests {
    use tablewright_machine::{Config, Costs, Scheduler};

    use super::super::host::Memory;
    use super::*;

    /// A flush of two threads' space by the first: what was wrong with it.
    fn problem_with(tell: impl Fn(&Host<'_>)) -> Option<String> {
        let (costs, memory) = (Costs::default(), Memory::new(2));
        let host = Host::new(&costs, &memory, Time::ms(4), 2, 2, false)?;
        let left = std::cell::Cell::new(2);
        let outcome = Scheduler::new(Config::new(4)).run(|cpu| {
            if cpu.id() >= 2 {
                return host.idle(cpu, || left.get() == 0);
            }
            host.begin(cpu);
            host.hold(cpu);
            host.work(cpu, Time::us(10));
            if cpu.id() == 0 {
                host.flush(cpu, |doing, here| {
                    let everything = Invalidation {
                        root: host.space.root(),
                        id: 0,
                        global: false,
                        what: What::Everything,
                    };
                    here.flush(
                        &host.space,
                        &everything,
                        &[&Planted(&|| tell(&host))],
                        doing,
                    );
                });
            }
            host.work(cpu, Time::us(100));
            cpu.order();
            left.set(left.get() - 1);
            host.leave(cpu, left.get() == 0);
        });
        assert!(outcome.is_ok());
        host.problem.take()
    }

    /// Says that it has told all.
    struct Planted<'t>(&'t dyn Fn());

    impl Messenger for Planted<'_> {
        fn tell(&self, _: &Message<'_>, cpus: &mut Cpus) {
            (self.0)();
            cpus.clear();
        }
    }

    #[test]
    fn a_vcpu_that_is_left_out_is_found() {
        let nothing = problem_with(|_| ());
        assert_eq!(nothing.as_deref(), Some("vCPU 1 was not told"));
        assert_eq!(problem_with(|host| host.all_forget()), None);
        assert_eq!(problem_with(|host| host.tell_later(1)), None);
    }
}

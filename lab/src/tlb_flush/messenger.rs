//! The ways to have others forget, each as its users have it.

use std::cell::RefCell;

use clap::ValueEnum;
use tablewright::hyperv::{Encoder, HostCaps, PAGE_WORDS, Targets, VpSet, decode};
use tablewright::{Invalidation, Pa, Stale, What};
use tablewright_machine::Cpu;

use super::host::{Host, State};
use super::simulate::Job;

/// More pages than this are flushed as the whole space, where each page is an invalidation of its own: x86 by Linux, and arm64
/// without range operations.
const X86_PAGES: u64 = 33;
const ARM_PAGES: u64 = 512;
/// What one INVLPGB names at most, as far as its count goes, and what one range operation does (DDI 0487 C5.5).
const INVLPGB_PAGES: u64 = 8;
const RANGE_PAGES: u64 = 1 << 21;
/// Where the file is mapped, and the root of the tables.
const AT: u64 = 0x7f00_0000_0000;
const ROOT: Pa = Pa::new(0x1234_5000);

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
}

impl How {
    pub const ALL: [Self; 8] = [
        Self::Interrupt,
        Self::Space,
        Self::List,
        Self::Ex,
        Self::Kvm,
        Self::Invlpgb,
        Self::Broadcast,
        Self::Ranges,
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
        }
    }
}

/// One of them, with what it needs.
pub struct Messenger<'j> {
    job: &'j Job,
    page: RefCell<Box<[u64; PAGE_WORDS]>>,
    problem: RefCell<Option<String>>,
}

impl<'j> Messenger<'j> {
    pub fn new(job: &'j Job) -> Self {
        Self {
            job,
            page: RefCell::new(Box::new([0; PAGE_WORDS])),
            problem: RefCell::default(),
        }
    }

    /// What went wrong, if anything did.
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Every vCPU has forgotten so many pages when this returns, or will before it can use them.
    pub fn flush(&self, cpu: Cpu<'_>, host: &Host<'_>, pages: u64) {
        let costs = host.costs;
        let one_by_one = |most: u64| if pages > most { 1 } else { pages };
        let broadcast = |number: u64| {
            host.count(|tally| tally.broadcasts += number);
            host.work(cpu, costs.issue * number + costs.complete);
        };
        match self.job.how {
            How::Invlpgb => return broadcast(pages.div_ceil(INVLPGB_PAGES).min(X86_PAGES)),
            How::Broadcast => return broadcast(one_by_one(ARM_PAGES)),
            How::Ranges => return broadcast(pages.div_ceil(RANGE_PAGES)),
            _ => host.work(cpu, costs.issue * one_by_one(X86_PAGES)),
        }
        let holders = host.holders(cpu);
        if holders.is_empty() {
            return;
        }
        match self.job.how {
            How::Space | How::List | How::Ex => match self.encode(&holders, pages) {
                Ok(bytes) => host.flush_by_hypercall(cpu, &holders, bytes),
                Err(problem) => *self.problem.borrow_mut() = Some(problem),
            },
            how => {
                for vcpu in holders {
                    if how == How::Kvm && host.state_of(cpu, vcpu) != State::Running {
                        host.tell_later(vcpu);
                        host.work(cpu, costs.exchange + costs.transfer);
                    } else {
                        host.ask(cpu, vcpu);
                    }
                }
                host.wait(cpu);
            }
        }
        if let Some(vcpu) = host.left_out(cpu) {
            *self.problem.borrow_mut() = Some(format!("vCPU {vcpu} was not told"));
        }
    }

    /// The call as the engine makes it, and takes it apart on the other side: how many bytes the hypervisor reads.
    fn encode(&self, holders: &[usize], pages: u64) -> Result<u64, String> {
        let ranges = [Stale {
            first: AT,
            last: AT + (pages << 12) - 1,
            level: None,
            tables: true,
        }];
        let flush = Invalidation {
            root: ROOT,
            id: 0,
            global: false,
            what: match self.job.how {
                How::Space => What::Everything,
                _ => What::Ranges(&ranges),
            },
        };
        // With numbers beyond the first 64 a call has to have a set.
        let first = if self.job.how == How::Ex { 64 } else { 0 };
        let mut set = VpSet::EMPTY;
        for &vcpu in holders {
            set.insert(first + vcpu as u32);
        }
        let encoder = Encoder {
            most_ranges: self.job.ranges,
            takes_sets: true,
        };
        let mut page = self.page.borrow_mut();
        let input = encoder
            .encode(&mut page, Targets::Set(&set), &flush)
            .map_err(|refusal| refusal.to_string())?
            .ok_or("no vCPU is told")?;
        let hypervisor = HostCaps {
            processors: first + u32::from(self.job.vcpus),
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let decoded =
            decode(input, 0, &page[..], &hypervisor).map_err(|status| status.to_string())?;
        let covered = decoded.is_everything()
            || decoded
                .ranges()
                .map(|run| run.count * run.size)
                .sum::<u64>()
                == pages << 12;
        if decoded.targets != Some(set) || !covered {
            return Err(format!("{decoded:?} is not what was asked for"));
        }
        let words = decoded.call.header() + input.banks() + input.reps();
        Ok(8 * words as u64)
    }
}

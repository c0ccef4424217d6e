//! One run of the experiment, and the ways to tell others.

use clap::ValueEnum;
use serde_json::{Value, json};
use tablewright_machine::{Architecture, Granule, Profile, Regime, Time};

use super::host::{Tally, X86_PAGES};
use crate::output::report;
use crate::runs;

/// Pages beyond which arm64 without range operations flushes the whole space.
const ARM_PAGES: u64 = 512;
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
    /// By the engine: idle vCPUs have no space loaded, and of what the machine has, what costs
    /// least tells the others
    Tablewright,
}

impl How {
    /// All of them, as they are shown.
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

impl How {
    /// Whether the tables are those of arm64: of hardware that broadcasts as arm64 does, and by the
    /// engine on a machine of it.
    pub fn is_arm64(self, architecture: &Architecture) -> bool {
        match self {
            Self::Broadcast | Self::Ranges => true,
            Self::Tablewright => !architecture.is_x86(),
            _ => false,
        }
    }

    /// Whether spaces have identifiers: INVLPGB needs them, arm64 always has them, and so has the
    /// engine. The published guest's kernel has none.
    pub const fn has_identifiers(self) -> bool {
        matches!(self, Self::Invlpgb | Self::Broadcast | Self::Ranges | Self::Tablewright)
    }

    /// More pages than this are flushed as the whole space; `None` where the engine says what is
    /// flushed.
    pub const fn most_pages(self) -> Option<u64> {
        match self {
            Self::List | Self::Ex | Self::Ranges => Some(u64::MAX),
            Self::Space => Some(0),
            Self::Broadcast => Some(ARM_PAGES),
            Self::Interrupt | Self::Kvm | Self::Invlpgb => Some(X86_PAGES),
            Self::Tablewright => None,
        }
    }
}

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// How others are told.
    pub how: How,
    /// Threads of the program.
    pub threads: u16,
    /// Rounds of each.
    pub rounds: u32,
    /// Parts of the file that are mapped in a round.
    pub chunks: u32,
    /// Pages of a part.
    pub pages: u64,
    /// How many vCPUs.
    pub vcpus: u16,
    /// On how many physical CPUs.
    pub physical: u16,
    /// Until a vCPU has to give its physical CPU to one that waits.
    pub slice: Time,
    /// Computing time between two cycles, on average: from nothing to twice as much.
    pub work: Time,
    /// How long, on a physical CPU, a thread that waits for the lock tries to take it before it
    /// sleeps.
    pub spin: Time,
    /// An idle loop that is told keeps the space all the same, and is told again.
    pub stays: bool,
    /// Ranges in one hypercall, at most.
    pub ranges: usize,
}

/// Cycles of the published run.
pub const PUBLISHED_CYCLES: u64 = 32 * 10_000 * 10;

/// A busy thread computes so long between two shootdowns of its own.
const BUSY: Time = Time::ms(20);
/// Linux's time slice.
pub const SLICE: Time = Time::ms(4);
/// Ranges in one hypercall.
pub const RANGES: u16 = 16;

impl Job {
    /// A thread on each vCPU takes a page from all others, which are busy.
    pub fn busy(profile: &Profile, how: How, vcpus: u16, physical: u16) -> Self {
        Self {
            profile: profile.clone(),
            how,
            threads: vcpus,
            rounds: 2,
            chunks: 1,
            pages: 1,
            vcpus,
            physical,
            slice: SLICE,
            work: BUSY,
            spin: Time::ZERO,
            stays: false,
            ranges: RANGES.into(),
        }
    }

    /// This way on this machine, while all vCPUs are busy.
    pub fn all_busy(&self) -> Self {
        Self {
            slice: self.slice,
            stays: self.stays,
            ranges: self.ranges,
            ..Self::busy(&self.profile, self.how, self.vcpus, self.physical)
        }
    }

    /// How long one flush of a run keeps the CPU that asks for it.
    pub fn each(&self, ran: &Ran) -> Time {
        Time::ps(ran.tally.flushing.as_ps() / self.cycles())
    }

    pub fn parameters(&self, cycles: u64) -> Value {
        let us = |time: Time| time.as_ps() / 1_000_000;
        json!({
            "machine": self.profile.name,
            "tasks": self.threads,
            "cycles": cycles,
            "pages": self.pages,
            "vcpus": self.vcpus,
            "cpus": self.physical,
            "work_us": us(self.work),
            "spin_us": us(self.spin),
            "stays": self.stays,
            "slice_us": us(self.slice),
        })
    }

    pub fn described(&self) -> String {
        described(self.cycles(), self.pages, self.threads)
    }

    /// How often a part is mapped, touched and unmapped, by all threads together.
    pub fn cycles(&self) -> u64 {
        u64::from(self.threads) * u64::from(self.rounds) * u64::from(self.chunks)
    }
}

/// Figures of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ran {
    /// Until the last thread was through.
    pub time: Time,
    pub tally: Tally,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

impl Job {
    /// Whether the tables are those of arm64.
    pub fn is_arm64(&self) -> bool {
        self.how.is_arm64(&self.profile.architecture)
    }

    pub fn architecture(&self) -> Architecture {
        let from = self.profile.architecture.clone();
        let k4 = Granule::K4;
        match (self.is_arm64(), from.is_x86()) {
            (true, false) => Architecture {
                regime: Regime::Arm64Stage1 { granule: k4, wide: false },
                range_invalidation: self.how != How::Broadcast,
                ..from
            },
            (true, true) => Architecture {
                range_invalidation: self.how != How::Broadcast,
                ..Architecture::arm64(Regime::Arm64Stage1 { granule: k4, wide: false })
            },
            (false, _) => Architecture {
                invalidate_all_above: from.invalidate_all_above,
                ..Architecture::x86_64(4)
            },
        }
    }
}

/// Describes a run of the program, on the machine or not.
pub fn described(cycles: u64, pages: u64, threads: u16) -> String {
    format!(
        "{} of map, touch and unmap of {} by {}",
        report::counted(cycles, "cycle", "cycles"),
        report::counted(pages, "page", "pages"),
        report::counted(threads.into(), "thread", "threads"),
    )
}

/// Address of the first thread's map; the others lie beside it.
pub const AT: u64 = 0x10_0000_0000;
/// All of it is below this.
const END: u64 = 1 << 47;

/// Whether as many threads can map as many pages each.
pub fn fits(threads: u16, pages: u64) -> bool {
    u64::from(threads) * (pages << 12) <= END - AT
}

//! One run of the experiment, and the case of the published test that it stands for.

use clap::ValueEnum;
use tablewright::guest::Log;
use tablewright_machine::{Profile, Time};

use crate::error::Error;
use crate::guest::input::{Backing, Mode, PAGE, Region, Source};
use crate::guest::{Handled, no_violation};
use crate::output::report;
use crate::runs;
use crate::size::human;

/// Whose host it is, by how logging is disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum How {
    /// A flush for each leaf, one after the other (before Linux 6.0)
    LeafByLeaf,
    /// Freeze, process, flush, unfreeze; on arm64 a kernel whose faults take one lock (before Linux
    /// 6.2)
    Before,
    /// Freeze, flush, process, unfreeze
    FlushFirst,
    /// Freeze, unfreeze, process, flush
    UnfreezeFirst,
    /// Freeze, flush, unfreeze, process, as published; on arm64 a kernel whose faults hold the lock
    /// together
    After,
    /// In place, a large leaf for each table, and a flush when the thread gives way: as published
    /// later
    InPlace,
    /// By the engine, in place
    Tablewright,
}

impl How {
    /// Those of arm64, where leaves grow again by faults, if at all.
    pub const ARM64: [Self; 3] = [Self::Before, Self::After, Self::Tablewright];

    /// All of them, as they are shown.
    pub const ALL: [Self; 7] = [
        Self::LeafByLeaf,
        Self::Before,
        Self::FlushFirst,
        Self::UnfreezeFirst,
        Self::After,
        Self::InPlace,
        Self::Tablewright,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::LeafByLeaf => "leaf-by-leaf",
            Self::Before => "before",
            Self::FlushFirst => "flush-first",
            Self::UnfreezeFirst => "unfreeze-first",
            Self::After => "after",
            Self::InPlace => "in-place",
            Self::Tablewright => "tablewright",
        }
    }
}

/// How written pages are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The first write to each page faults
    #[default]
    Faults,
    /// Hardware, in a log of 512 pages for each vCPU, which leaves the guest when that is full
    /// (Intel's PML)
    Modification,
}

impl By {
    pub const fn log(self) -> Log {
        match self {
            Self::Faults => Log::ByFault,
            Self::Modification => Log::ByModification,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Modification => "modification",
        }
    }
}

/// When large leaves are split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// When the log starts, or when it is cleared if it starts with all pages in it
    #[default]
    Ahead,
    /// By the first write to each, or on arm64 the first fault
    Fault,
}

impl Split {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ahead => "ahead",
            Self::Fault => "fault",
        }
    }
}

/// Options of the test that a run depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub by: By,
    pub split: Split,
    /// The log begins with all pages in it, and nothing is protected.
    pub all_set: bool,
    /// Each vCPU accesses all of the memory.
    pub overlap: bool,
    /// The guest is one of a hypervisor that is a guest itself.
    pub nested: bool,
}

/// How many pages one stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// A page of the host is so many times smaller.
    pub smaller: u64,
    /// And there are so many times fewer.
    pub fewer: u64,
}

impl Scale {
    /// How many pages one of a run stands for.
    pub const fn all(self) -> u64 {
        self.smaller * self.fewer
    }
}

/// One run to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    /// How logging is disabled.
    pub how: How,
    /// Backing, as it is run.
    pub source: Source,
    /// Memory, as it is run.
    pub region: Region,
    /// Pages that one page of the run stands for.
    pub scale: Scale,
    /// How many vCPUs.
    pub vcpus: u16,
    /// How often the memory is written, and the log read and cleared.
    pub iterations: u32,
    /// How many slots the memory is in.
    pub slots: u16,
    /// Of so many accesses of a hundred the guest writes.
    pub write_percent: u8,
    /// In random order.
    pub random: bool,
    /// Of what is random.
    pub seed: u64,
    /// Marks are read, and taken away by another call.
    pub manual: bool,
    /// The vCPUs go on while logging is disabled.
    pub running: bool,
    pub options: Options,
}

impl Job {
    /// Refuses a run of which the machine has a complaint.
    pub fn sound(&self, ran: &Ran) -> Result<(), Error> {
        no_violation(&self.profile, self.how.name(), ran.violation.as_deref())
    }
}

/// Figures of a run, multiplied by its scale.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// How long it took to write all memory for the first time.
    pub populate: Time,
    /// And to enable logging.
    pub enable: Time,
    /// To write it, in each iteration.
    pub dirty: Vec<Time>,
    /// To read the log, in each iteration.
    pub get: Vec<Time>,
    /// To clear it, where that is a call of its own.
    pub clear: Vec<Time>,
    /// And to disable logging.
    pub disable: Time,
    /// How long each table took that was taken apart. Each is one of `scale.fewer`.
    pub zaps: Vec<Time>,
    /// Of disabling, as the three that follow: how often all vCPUs were told to forget.
    pub flushes: u64,
    /// Interrupts sent.
    pub kicks: u64,
    /// Faults.
    pub faults: u64,
    /// Faults after which nothing had changed.
    pub retries: u64,
    /// From the issue of an access of the guest to its completion, where that took longer than it
    /// takes to leave the guest: how long, and how many such there are.
    pub stalls: Vec<(Time, u64)>,
    /// Times that a vCPU left its guest because hardware's log was full.
    pub log_full: u64,
    /// The first rule of the machine that was broken.
    pub violation: Option<String>,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

/// A way to disable logging.
pub trait Way {
    /// Has all memory in large leaves, or has the next fault map it so. By the thread of the host.
    fn disable(&self);
    /// Frees detached tables, once every vCPU has been in the guest since.
    fn reclaim(&self) {}
    /// A vCPU has faulted.
    fn fault(&self, at: u64, write: bool) -> Handled;
}

/// Pages of a run without `--scale`.
const USUAL_PAGES: u64 = 1 << 18;
/// And of one that takes a moment.
const MOMENT_PAGES: u64 = 1 << 16;
/// The tables of more would not fit into many computers.
const MOST_PAGES: u64 = 1 << 22;
/// No memory is larger: the host's lies beside it.
pub const MOST_BYTES: u64 = 1 << 45;
/// A level of tables less.
const LEVEL: u64 = 512;

/// The memory of all vCPUs, of which each has so much.
pub fn all_bytes(each: u64, vcpus: u16) -> Result<u64, Error> {
    let all = each.checked_mul(u64::from(vcpus)).filter(|all| *all <= MOST_BYTES);
    let (each, most) = (human(each), human(MOST_BYTES));
    all.ok_or_else(|| Error::Usage(format!("-b {each}: at most {most} for all vCPUs")))
}

/// Bytes in the largest unit of which they are a whole number.
pub fn exact(bytes: u64) -> String {
    let shift = (0..=4).rev().map(|unit| 10 * unit).find(|&shift| bytes.is_multiple_of(1 << shift));
    let shift = shift.unwrap_or(0);
    format!("{} {}", bytes >> shift, ["B", "KiB", "MiB", "GiB", "TiB"][shift as usize / 10])
}

/// A case, as it is asked for.
#[derive(Clone, Debug)]
pub struct Case {
    pub backing: Backing,
    /// How much each vCPU has.
    pub bytes: u64,
    /// How many vCPUs.
    pub vcpus: u16,
    /// The guest's mode.
    pub mode: Mode,
    /// Address of the memory [none: as far up as the mode goes].
    pub offset: Option<u64>,
    /// Pages that one page stands for [none: as few are run as is usual].
    pub scale: Option<u64>,
}

impl Case {
    /// The published one.
    pub fn published() -> Option<Self> {
        Some(Self {
            backing: "anonymous_hugetlb_1gb".parse().ok()?,
            bytes: 1 << 30,
            vcpus: 416,
            mode: "PXXV48_4K".parse().ok()?,
            offset: None,
            scale: None,
        })
    }

    /// Whether it is that.
    pub fn is_published(&self) -> bool {
        Self::published().is_some_and(|case| {
            (case.backing, case.bytes, case.vcpus) == (self.backing, self.bytes, self.vcpus)
        })
    }

    /// Its scale, what backs the memory then, and how much of it each vCPU has: whole pages of the
    /// host, and as many that the scale divides them.
    fn scaled(&self) -> Result<(Scale, Source, u64), Error> {
        let source = self.backing.source;
        let (size, blocks, deep) = (source.bytes(), self.blocks(), self.is_deep());
        let (smaller, fewer) = match self.scale {
            Some(scale) if deep && scale.is_multiple_of(LEVEL) => (LEVEL, scale / LEVEL),
            Some(scale) => (1, scale),
            None => {
                let Scale { smaller, fewer } = self.even(USUAL_PAGES);
                (smaller, fewer)
            }
        };
        if fewer > blocks {
            let most = blocks * if deep { LEVEL } else { 1 };
            return Err(Error::Usage(format!(
                "--scale {}: each vCPU has {} of {}: at most {most}",
                smaller * fewer,
                report::counted(blocks, "page", "pages"),
                human(size),
            )));
        }
        let source = match (source, smaller) {
            (Source::Fixed { shift }, LEVEL) => Source::Fixed { shift: shift - 9 },
            (source, _) => source,
        };
        Ok((Scale { smaller, fewer }, source, blocks / fewer * fewer * size))
    }

    /// Pages of the host that each vCPU has.
    fn blocks(&self) -> u64 {
        self.bytes.div_ceil(self.backing.source.bytes())
    }

    /// Two levels of tables below a page of the host are one.
    fn is_deep(&self) -> bool {
        self.backing.source.level().height() == 2
    }

    /// The least scale, by powers of two, of which a run has at most so many pages.
    fn at_most(&self, most: u64) -> Scale {
        let smaller = if self.is_deep() { LEVEL } else { 1 };
        let pages = self.blocks() * (self.backing.source.bytes() / PAGE) / smaller;
        let pages = pages * u64::from(self.vcpus);
        let mut fewer = 1;
        while pages / fewer > most && fewer * 2 <= self.blocks() {
            fewer *= 2;
        }
        Scale { smaller, fewer }
    }

    /// Of the scale with at most so many pages, and those up to its double, the one that leaves
    /// the least of the memory over.
    fn even(&self, most: u64) -> Scale {
        let Scale { smaller, fewer } = self.at_most(most);
        let blocks = self.blocks();
        let least = (fewer..(2 * fewer).min(blocks + 1)).min_by_key(|it| blocks % it);
        Scale { smaller, fewer: least.unwrap_or(fewer) }
    }

    /// A scale at which a run takes a moment, of all memory.
    pub fn quick_scale(&self) -> u64 {
        self.even(MOMENT_PAGES).all()
    }

    /// A scale at which a run takes a moment.
    pub fn small_scale(&self) -> u64 {
        self.at_most(MOMENT_PAGES).all()
    }

    /// Says how a size was rounded, if it was.
    pub fn rounded(&self) -> Result<Option<String>, Error> {
        let (scale, _, bytes) = self.scaled()?;
        Ok((bytes != self.bytes).then(|| {
            format!(
                "-b {}: taken as {}, whole pages of {}{}",
                exact(self.bytes),
                exact(bytes),
                human(self.backing.source.bytes()),
                match scale.fewer {
                    1 => String::new(),
                    fewer => format!(" of which one in {fewer} is run"),
                }
            )
        }))
    }

    /// The run of it with what the test does where nothing else is said, and with vCPUs that go on.
    pub fn job(&self, profile: &Profile, how: How) -> Result<Job, Error> {
        // Where it is as it is asked for, whatever part of it is run.
        all_bytes(self.bytes, self.vcpus)?;
        let (scale, source, bytes) = self.scaled()?;
        let all = all_bytes(bytes, self.vcpus)?;
        let region = Region::new(self.mode, self.backing, all, self.offset)?;
        let pages = bytes / PAGE * u64::from(self.vcpus) / (scale.smaller * scale.fewer);
        if pages > MOST_PAGES {
            return Err(Error::Usage(format!(
                "-b {}: {} pages are too many to simulate, at most {}: give --scale",
                human(self.bytes),
                report::count(pages),
                report::count(MOST_PAGES)
            )));
        }
        let region = Region { bytes: pages * PAGE, ..region };
        Ok(Job {
            profile: profile.clone(),
            how,
            source,
            region,
            scale,
            vcpus: self.vcpus,
            iterations: 2,
            slots: 1,
            write_percent: 100,
            random: false,
            seed: 1,
            manual: true,
            running: true,
            options: Options::default(),
        })
    }
}

//! What the command line asks for.

use tablewright::{Pa, Span};
use tablewright_hypervisor_common::memory::Leaves;
use tablewright_hypervisor_common::snapshot::{Begin, Kind};

use crate::{processor, vcpu};

/// What the guest is recommended for flushes of other processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Interrupts.
    Interrupt,
    /// Hypercalls.
    Hypercall,
    /// Those with sets of processors, too.
    Extended,
}

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// Flushes are not carried out.
    Ignore,
    /// Only vCPUs that do not run are flushed, when they do.
    OnEntry,
    /// What was made of nested tables is not forgotten.
    Nested,
    /// Of each range of a list the second half is dropped.
    Half,
}

/// What was asked for.
pub struct Options {
    /// The guest's memory, in the host's.
    pub memory: Span<Pa>,
    /// How it is mapped.
    pub leaves: Leaves,
    /// How many processors there are.
    pub processors: usize,
    /// How many vCPUs the guest has.
    pub vcpus: usize,
    /// A time slice.
    pub slice_ns: u64,
    /// From the index of one vCPU to that of the next: guests may not take them for the numbers of
    /// processors.
    pub step: u32,
    /// What the guest is recommended.
    pub flush: Flush,
    /// So many frames are taken away from the guest.
    pub evict: u64,
    /// What is written is logged.
    pub log: Option<Kind>,
    /// The guest is copied, and goes on on the copy.
    pub snapshot: Option<Begin>,
    /// Where the copy goes, in the host's memory.
    pub copy: Option<Span<Pa>>,
    /// No guest is run: the start of a log is measured.
    pub measures: bool,
    /// A planted bug.
    pub plant: Option<Plant>,
    /// Sectors of the header before the guest's kernel.
    pub kernel: u64,
    /// Where the first file system is in the guest's memory, and how large.
    pub initrd: (u64, u64),
}

impl Options {
    /// How many processors there are, with the one that is the host's alone, where there is
    /// something to do beside the guest.
    pub fn all_processors(&self) -> usize {
        self.processors + usize::from(self.log.is_some())
    }

    /// Reads words of the form `NAME=VALUE`; what comes behind ` -- ` is for the guest.
    ///
    /// # Errors
    /// What is wrong.
    pub fn read(text: &str) -> Result<(Self, &str), &'static str> {
        let (words, line) = text.split_once(" -- ").unwrap_or((text, ""));
        let mut memory = None;
        let (mut leaves, mut flush, mut plant) = (Leaves::Blocks, Flush::Hypercall, None);
        let (mut processors, mut vcpus, mut slice_ns) = (1, 1, 4_000_000);
        let (mut kernel, mut initrd, mut step, mut evict) = (0, (0, 0), 1, 0);
        let (mut log, mut snapshot, mut copy, mut measures) = (None, None, None, false);
        for word in words.split_ascii_whitespace() {
            let (name, value) = word.split_once('=').ok_or("an option is NAME=VALUE")?;
            match name {
                "memory" => {
                    let (start, size) = pair(value)?;
                    memory = Span::new(Pa::new(start), size).ok();
                }
                "mapping" => leaves = Leaves::named(value).ok_or("mapping is 4k, 2m or mixed")?,
                "processors" => processors = number(value)? as usize,
                "vcpus" => vcpus = number(value)? as usize,
                "evict" => evict = number(value)?,
                "step" => step = number(value)?,
                "slice" => slice_ns = number(value)?.saturating_mul(1000),
                "flush" => {
                    flush = match value {
                        "interrupt" => Flush::Interrupt,
                        "hypercall" => Flush::Hypercall,
                        "extended" => Flush::Extended,
                        _ => return Err("flush is interrupt, hypercall or extended"),
                    }
                }
                "plant" => {
                    plant = match value {
                        "ignore" => Some(Plant::Ignore),
                        "on-entry" => Some(Plant::OnEntry),
                        "half" => Some(Plant::Half),
                        "nested" => Some(Plant::Nested),
                        _ => return Err("plant is ignore, on-entry, half or nested"),
                    }
                }
                "log" => log = Some(Kind::named(value).ok_or("log is bitmap, ring or all")?),
                "snapshot" => {
                    let begin = Begin::named(value);
                    snapshot = Some(begin.ok_or("snapshot is bell, or milliseconds")?);
                }
                "copy" => copy = Some(number(value)?),
                "measure" if value == "start" => measures = true,
                "kernel" => kernel = number(value)?,
                "initrd" => initrd = pair(value)?,
                _ => return Err("an option is not known"),
            }
        }
        // One is the host's.
        if !(1..processor::MOST).contains(&processors) {
            return Err("there are 1 to 8 processors");
        }
        if !(1..=vcpu::MOST).contains(&vcpus) {
            return Err("there are 1 to 16 vCPUs");
        }
        if !(1..=256).contains(&step) {
            return Err("indices are 1 to 256 apart");
        }
        let memory = memory.ok_or("there is no memory for the guest")?;
        if (snapshot.is_some() || measures) && log.is_none() {
            return Err("there is no log to go by");
        }
        // What is only measured is not touched, and need not be there.
        if !measures && memory.last().get() >> 32 != 0 {
            return Err("the guest's memory ends below 4 GiB");
        }
        let copy = copy.and_then(|first| Span::new(Pa::new(first), memory.size()).ok());
        // Behind the guest's memory, and mapped.
        let is_free =
            |copy: &Span<Pa>| memory.last() < copy.start() && copy.last().get() >> 33 == 0;
        if snapshot.is_some() && !copy.as_ref().is_some_and(is_free) {
            return Err("no memory for a copy of the guest");
        }
        let options = Self {
            memory,
            leaves,
            processors,
            vcpus,
            slice_ns,
            step: step as u32,
            flush,
            evict,
            log,
            snapshot,
            copy,
            measures,
            plant,
            kernel,
            initrd,
        };
        Ok((options, line))
    }
}

fn number(text: &str) -> Result<u64, &'static str> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    number.ok_or("a number is one of 64 bits")
}

/// `FIRST,SIZE`.
fn pair(text: &str) -> Result<(u64, u64), &'static str> {
    let (first, second) = text.split_once(',').ok_or("a range is FIRST,SIZE")?;
    Ok((number(first)?, number(second)?))
}

//! The command line.

use tablewright::{Pa, Span};
use tablewright_hypervisor_common::host::Reason;
use tablewright_hypervisor_common::log::Kind;
use tablewright_hypervisor_common::memory::Leaves;
use tablewright_hypervisor_common::options::Options as Common;

use crate::machine::PAGE;
use crate::processor;

/// The most vCPUs.
pub const VCPUS: usize = 16;

/// The recommendation to the guest for flushes of other processors.
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
    /// Nested translations are not invalidated.
    Nested,
    /// Of each range of a list the second half is dropped.
    Half,
}

/// The options.
pub struct Options {
    /// Those that all hypervisors have.
    pub common: Common,
    /// The guest's memory, in the host's.
    pub memory: Span<Pa>,
    /// The number of processors.
    pub processors: usize,
    /// The number of vCPUs.
    pub vcpus: usize,
    /// A time slice.
    pub slice_ns: u64,
    /// The distance from the index of one vCPU to that of the next: guests may not take them for
    /// the numbers of processors.
    pub step: u32,
    /// The recommendation to the guest.
    pub flush: Flush,
    /// The place of a copy, in the host's memory.
    pub copy: Option<Span<Pa>>,
    /// No guest is run: the start of a log is measured.
    pub measures: bool,
    /// A planted bug.
    pub plant: Option<Plant>,
    /// Sectors of the header before the guest's kernel.
    pub kernel: u64,
    /// The address of the first file system in the guest's memory, and its size.
    pub initrd: (u64, u64),
}

impl Options {
    /// The number of processors, with the one that is the host's alone where there is a log.
    pub fn all_processors(&self) -> usize {
        self.processors + usize::from(self.common.log.is_some())
    }

    /// Reads words of the form `NAME=VALUE`; the text behind ` -- ` is for the guest.
    ///
    /// # Errors
    /// The first that is not right.
    pub fn read(text: &str) -> Result<(Self, &str), Reason> {
        let (words, line) = text.split_once(" -- ").unwrap_or((text, ""));
        let (mut memory, mut copy) = (None, None);
        let mut options = Self {
            common: Common::new(Leaves::Blocks),
            memory: Span::new(Pa::new(0), PAGE).map_err(|_| "no memory")?,
            processors: 1,
            vcpus: 1,
            slice_ns: 4_000_000,
            step: 1,
            flush: Flush::Hypercall,
            copy: None,
            measures: false,
            plant: None,
            kernel: 0,
            initrd: (0, 0),
        };
        for word in words.split_ascii_whitespace() {
            let (name, value) = word.split_once('=').ok_or("an option is NAME=VALUE")?;
            if options.common.read(name, value)? {
                continue;
            }
            match name {
                "memory" => memory = Some(pair(value)?),
                "processors" => options.processors = number(value)? as usize,
                "vcpus" => options.vcpus = number(value)? as usize,
                "step" => options.step = number(value)?.min(u32::MAX.into()) as u32,
                "slice" => options.slice_ns = number(value)?.saturating_mul(1000),
                "flush" => {
                    options.flush = match value {
                        "interrupt" => Flush::Interrupt,
                        "hypercall" => Flush::Hypercall,
                        "extended" => Flush::Extended,
                        _ => return Err("flush is interrupt, hypercall or extended"),
                    }
                }
                "plant" => {
                    options.plant = match value {
                        "ignore" => Some(Plant::Ignore),
                        "on-entry" => Some(Plant::OnEntry),
                        "half" => Some(Plant::Half),
                        "nested" => Some(Plant::Nested),
                        _ => return Err("plant is ignore, on-entry, half or nested"),
                    }
                }
                "copy" => copy = Some(number(value)?),
                "measure" if value == "start" => options.measures = true,
                "kernel" => options.kernel = number(value)?,
                "initrd" => options.initrd = pair(value)?,
                _ => return Err("an option is not known"),
            }
        }
        let span = |(start, size)| Span::new(Pa::new(start), size).ok();
        let memory = memory.and_then(span).ok_or("there is no memory for the guest")?;
        options.memory = memory;
        options.copy = copy.and_then(|first| span((first, memory.size())));
        // One is the host's.
        if !(1..processor::MOST).contains(&options.processors) {
            return Err("there are 1 to 8 processors");
        }
        if !(1..=VCPUS).contains(&options.vcpus) {
            return Err("there are 1 to 16 vCPUs");
        }
        if !(1..=256).contains(&options.step) {
            return Err("indices are 1 to 256 apart");
        }
        let Common { log, snapshot, .. } = options.common;
        if log == Some(Kind::Hardware) {
            return Err("log is bitmap, ring or all");
        }
        if (snapshot.is_some() || options.measures) && log.is_none() {
            return Err("there is no log to go by");
        }
        // A guest that is only measured does not touch its memory, which need not be there.
        if !options.measures && memory.last().get() >> 32 != 0 {
            return Err("the guest's memory ends below 4 GiB");
        }
        // Behind the guest's memory, and mapped.
        let is_free =
            |copy: &Span<Pa>| memory.last() < copy.start() && copy.last().get() >> 33 == 0;
        if snapshot.is_some() && !options.copy.as_ref().is_some_and(is_free) {
            return Err("no memory for a copy of the guest");
        }
        Ok((options, line))
    }
}

fn number(text: &str) -> Result<u64, Reason> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    number.ok_or("a number is one of 64 bits")
}

/// `FIRST,SIZE`.
fn pair(text: &str) -> Result<(u64, u64), Reason> {
    let (first, second) = text.split_once(',').ok_or("a range is FIRST,SIZE")?;
    Ok((number(first)?, number(second)?))
}

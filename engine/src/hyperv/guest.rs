//! The guest's side: a flush becomes the input of one call.

use core::fmt;

use crate::invalidation::{Invalidation, What};

use super::{
    Call, Flags, Input, LIST, LIST_EX, Output, PAGE_WORDS, RANGE_PAGES, Range, Status, VpSet,
};

/// The processors to flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets<'a> {
    /// On every processor.
    All,
    /// On these. They are named by the number that the hypervisor gave them, not by that of the
    /// operating system.
    Set(&'a VpSet),
}

/// The error of a flush that cannot be sent: it has to be done in another way, on all the
/// processors that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// A processor beyond the first 64, and the hypervisor does not take sets.
    NeedsSet,
    /// The hypervisor has said no.
    Status(Status),
    /// There is no input page for this processor yet.
    NoPage,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeedsSet => write!(
                f,
                "more than 64 processors, and the hypervisor takes no sets"
            ),
            Self::Status(status) => write!(f, "the hypervisor says: {status}"),
            Self::NoPage => write!(f, "this processor has no page for the input"),
        }
    }
}

impl core::error::Error for Refusal {}

/// The hypercalls that an embedder makes.
///
/// # Safety
/// 1. [`call`](Caller::call) makes the hypercall with the physical address of the page that it is
///    given, on the processor to which the page belongs, and interrupts are held off from before
///    the page is written to after the call.
pub unsafe trait Caller {
    /// Makes a call with this page of input.
    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output;
}

/// Writes flushes into the input page of a processor.
///
/// ```
/// use tablewright::hyperv::{Call, FlushEncoder, Flags, PAGE_WORDS, Targets, VpSet};
/// use tablewright::{Invalidation, Pa, Stale, What};
/// let mut page = [0; PAGE_WORDS];
/// let mut to = VpSet::EMPTY;
/// to.insert(5);
/// let range = Stale { first: 0x7000, last: 0x8fff, level: None, tables: false };
/// let flush = Invalidation { root: Pa::new(0x1234_5000), id: 1, global: false, what: What::Ranges(&[range]) };
/// let input = FlushEncoder::default().encode(&mut page, Targets::Set(&to), &flush)?.ok_or("no processor to tell")?;
/// assert_eq!((input.code(), input.reps()), (Call::List.code(), 1));
/// assert_eq!(page[..4], [0x1234_5000, 0, 1 << 5, 0x7001]);
///
/// // What is global is in all address spaces.
/// let global = Invalidation { global: true, ..flush };
/// FlushEncoder::default().encode(&mut page, Targets::Set(&to), &global)?.ok_or("no processor to tell")?;
/// assert_eq!(page[..4], [0, Flags::ALL_SPACES.bits(), 1 << 5, 0x7001]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FlushEncoder {
    /// Flushes with more ranges than this are of the whole space: a cost of the machine, and no
    /// more than a page holds.
    pub most_ranges: usize,
    /// The hypervisor recommends the calls with sets of processors.
    pub takes_sets: bool,
}

impl Default for FlushEncoder {
    /// Up to 16 ranges; sets are taken.
    fn default() -> Self {
        Self {
            most_ranges: 16,
            takes_sets: true,
        }
    }
}

impl FlushEncoder {
    /// Writes what is to be flushed into a page, and gives the input value of the call; `None` if
    /// there is nothing to flush, or no processor to tell: an empty mask means all of them to some
    /// hypervisors, and is never sent.
    ///
    /// The address space is named by the root of its tables, without an identifier. A flush that is
    /// global is of all address spaces.
    ///
    /// # Errors
    /// [`Refusal::NeedsSet`]: flush in another way.
    pub fn encode(
        &self,
        page: &mut [u64; PAGE_WORDS],
        targets: Targets<'_>,
        flush: &Invalidation<'_>,
    ) -> Result<Option<Input>, Refusal> {
        let mut flags = Flags::empty();
        let (mask, set) = match targets {
            Targets::All => {
                flags |= Flags::ALL_PROCESSORS;
                (Some(0), None)
            }
            Targets::Set(set) if set.is_empty() => return Ok(None),
            Targets::Set(set) => (set.mask(), Some(set)),
        };
        if flush.what == What::Ranges(&[]) {
            return Ok(None);
        }
        let mut space = flush.root.get();
        if flush.global {
            flags |= Flags::ALL_SPACES;
            space = 0;
        }
        let banks = match (mask, set) {
            (None, Some(_)) if !self.takes_sets => return Err(Refusal::NeedsSet),
            (None, Some(set)) => set.valid().count_ones() as usize,
            _ => 0,
        };
        let call = |list| match (mask.is_some(), list) {
            (true, false) => Call::Space,
            (true, true) => Call::List,
            (false, false) => Call::SpaceEx,
            (false, true) => Call::ListEx,
        };
        // The header is written before the list; the flags, which depend on how that ends,
        // afterwards.
        page[0] = space;
        let mut at = call(false).header();
        match (mask, set) {
            (Some(mask), _) => page[2] = mask,
            (None, Some(set)) => {
                page[2] = 0; // sparse
                page[3] = set.valid();
                for &bank in set.banks.iter().filter(|&&bank| bank != 0) {
                    page[at] = bank;
                    at += 1;
                }
            }
            (None, None) => return Ok(None),
        }
        let room = match mask {
            Some(_) => LIST,
            None => LIST_EX - banks,
        };
        let input = match write_list(&mut page[at..], flush.what, room.min(self.most_ranges)) {
            Some(reps) => Input::new(call(true)).with_reps(reps),
            None => {
                if !flush.global {
                    flags |= Flags::NON_GLOBAL_ONLY;
                }
                Input::new(call(false))
            }
        };
        page[1] = flags.bits();
        Ok(Some(input.with_banks(banks)))
    }

    /// Writes a flush into the page of this processor and makes the call, again and again until all
    /// of a list is done.
    ///
    /// # Errors
    /// What was not flushed has to be flushed in another way, on all processors that were named.
    pub fn send(
        &self,
        messenger: &impl Caller,
        page: Option<&mut [u64; PAGE_WORDS]>,
        targets: Targets<'_>,
        flush: &Invalidation<'_>,
    ) -> Result<(), Refusal> {
        let page = page.ok_or(Refusal::NoPage)?;
        let Some(mut input) = self.encode(page, targets, flush)? else {
            return Ok(());
        };
        loop {
            let output = messenger.call(input, page);
            if output.status() != Status::SUCCESS {
                return Err(Refusal::Status(output.status()));
            }
            let done = output.done();
            if done >= input.reps() {
                return Ok(());
            }
            // A hypervisor goes on with at least one element each time, or it never will.
            if done <= input.start() {
                return Err(Refusal::Status(Status::INPUT));
            }
            input = input.with_start(done);
        }
    }
}

/// Writes ranges as elements of a list: how many, or `None` if there are more than `most`, or all
/// is to be flushed.
fn write_list(list: &mut [u64], what: What<'_>, most: usize) -> Option<usize> {
    let What::Ranges(ranges) = what else {
        return None;
    };
    let mut count = 0;
    for range in ranges {
        let (mut page, last) = (range.first >> 12, range.last >> 12);
        loop {
            let pages = (last - page).min(RANGE_PAGES - 1) + 1;
            if count == most {
                return None;
            }
            *list.get_mut(count)? = Range::pages(page, pages)?.bits();
            count += 1;
            page += pages;
            if page > last {
                break;
            }
        }
    }
    Some(count)
}

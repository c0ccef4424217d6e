//! The guest's side: a flush becomes the input of one call.

use super::{Call, Flags, Input, LIST, LIST_EX, Output, PAGE_WORDS, Pages, RANGE_PAGES, Status};
use crate::cpus::Cpus;
use crate::invalidation::{Invalidation, What};

/// Writes flushes into the input page of a processor.
///
/// ```
/// use tablewright::hyperv::{Call, Flags, FlushEncoder, PAGE_WORDS};
/// use tablewright::{Invalidation, Pa, Stale, What, shootdown::Cpus};
/// let mut page = [0; PAGE_WORDS];
/// let mut to = Cpus::EMPTY;
/// to.insert(5);
/// let range = Stale { first: 0x7000, last: 0x8fff, level: None, tables: false };
/// let flush = Invalidation {
///     root: Pa::new(0x1234_5000),
///     id: 1,
///     global: false,
///     what: What::Ranges(&[range]),
/// };
/// let input = FlushEncoder::default()
///     .encode(&mut page, Some(&to), &flush)?
///     .ok_or("no processor to tell")?;
/// assert_eq!((input.code(), input.reps()), (Call::List.code(), 1));
/// assert_eq!(page[..4], [0x1234_5000, 0, 1 << 5, 0x7001]);
///
/// // What is global is in all address spaces.
/// let global = Invalidation { global: true, ..flush };
/// FlushEncoder::default()
///     .encode(&mut page, Some(&to), &global)?
///     .ok_or("no processor to tell")?;
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
        Self { most_ranges: 16, takes_sets: true }
    }
}

impl FlushEncoder {
    /// Writes a flush into a page, and gives the input value of the call; `None` if there is
    /// nothing to flush, or no processor to tell: an empty mask means all of them to some
    /// hypervisors, and is never sent.
    ///
    /// `targets` are the numbers that the hypervisor gave its processors, not those of the
    /// operating system; `None` is every processor. The address space is named by the root of its
    /// tables, without an identifier. A flush that is global is of all address spaces.
    ///
    /// # Errors
    /// [`Status::CODE`] for a processor beyond the first 64, if the hypervisor has no call that
    /// takes sets: flush in another way.
    pub fn encode(
        &self,
        page: &mut [u64; PAGE_WORDS],
        targets: Option<&Cpus>,
        flush: &Invalidation<'_>,
    ) -> Result<Option<Input>, Status> {
        let mut flags = Flags::empty();
        let (mask, set) = match targets {
            None => {
                flags |= Flags::ALL_PROCESSORS;
                (Some(0), None)
            }
            Some(set) if set.is_empty() => return Ok(None),
            // The first 64 as a mask, if all are among them.
            Some(set) => ((set.valid_banks() & !1 == 0).then_some(set.banks[0]), Some(set)),
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
            (None, Some(_)) if !self.takes_sets => return Err(Status::CODE),
            (None, Some(set)) => set.valid_banks().count_ones() as usize,
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
                page[3] = set.valid_banks();
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
    /// The status of the call, or of [`encode`](FlushEncoder::encode): the flush has to be done in
    /// another way, on all processors that were named.
    pub fn send(
        &self,
        page: &mut [u64; PAGE_WORDS],
        targets: Option<&Cpus>,
        flush: &Invalidation<'_>,
        mut call: impl FnMut(Input, &[u64; PAGE_WORDS]) -> Output,
    ) -> Result<(), Status> {
        let Some(mut input) = self.encode(page, targets, flush)? else {
            return Ok(());
        };
        loop {
            let output = call(input, page);
            if output.status() != Status::SUCCESS {
                return Err(output.status());
            }
            let done = output.done();
            if done >= input.reps() {
                return Ok(());
            }
            // A hypervisor goes on with at least one element each time, or it never will.
            if done <= input.start() {
                return Err(Status::INPUT);
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
            *list.get_mut(count)? = Pages::small(page << 12, pages).encode()?;
            count += 1;
            page += pages;
            if page > last {
                break;
            }
        }
    }
    Some(count)
}

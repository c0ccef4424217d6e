//! The host's side: the input is a guest's, and nothing in it is believed.
//!
//! Every field is checked before anything is done, in the order in which the specification lists
//! the errors: the input value, the place of the input, the parameters. What is decoded is a copy;
//! the guest may change its memory meanwhile.
//!
//! What is flushed may be more than was asked for, where that is said here, and is never less:
//!
//! * An empty mask of processors means all of them: guests exist that mean it so.
//! * A list goes into the queue of each processor by address alone: the address space of a
//!   processor that runs is not known, so that entries of other spaces of *the same guest* go as
//!   well.
//! * A [queue](FlushQueue) that is full flushes everything.

use super::{Call, Flags, Input, PAGE_WORDS, RANGE_PAGES, Status};
use crate::cpus::Cpus;
use crate::offer::offer;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// The features that a host offers its guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCaps {
    /// The number of processors of the guest.
    pub processors: u32,
    /// Input in XMM registers.
    pub xmm_input: bool,
    /// Ranges in the extended form.
    pub extended_ranges: bool,
    /// Guest-physical flushes, for a guest that is a hypervisor.
    pub guest_physical: bool,
}

/// Pages of one size that follow each other: a range of a list.
///
/// ```
/// use tablewright::hyperv::Pages;
/// assert_eq!(Pages::small(0x5000, 3).encode(), Some(0x5002));
/// // Two pages of 2 MiB, in the extended form.
/// let large = Pages { first: 3 << 21, count: 2, size: 2 << 20 };
/// assert_eq!(large.encode(), Some(3 << 21 | 1 << 11 | 1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// The first address. It may be one that no processor could use.
    pub first: u64,
    /// The number of pages.
    pub count: u64,
    /// The size of a page: 4 KiB, 2 MiB or 1 GiB.
    pub size: u64,
}

impl Pages {
    const LARGE: u64 = 1 << 11;
    const GIGABYTE: u64 = 1 << 12;

    /// Returns a number of pages of 4 KiB, from an address on.
    pub const fn small(first: u64, count: u64) -> Self {
        let size = 1 << 12;
        Self { first, count, size }
    }

    /// The quadword of a list that names them; in the extended form, if they are large. `None` if
    /// none does: there are at most [`RANGE_PAGES`] small pages and 2048 large ones in a range, and
    /// they are aligned to their size.
    pub const fn encode(self) -> Option<u64> {
        let (most, kind) = match self.size {
            0x1000 => (RANGE_PAGES, 0),
            0x20_0000 => (2048, Self::LARGE),
            0x4000_0000 => (2048, Self::LARGE | Self::GIGABYTE),
            _ => return None,
        };
        if self.count == 0 || self.count > most || self.first & (self.size - 1) != 0 {
            return None;
        }
        Some(self.first | kind | (self.count - 1))
    }

    /// The pages that a quadword of a list names, or `None` if a reserved bit is set.
    const fn decode(bits: u64, extended: bool) -> Option<Self> {
        if !extended {
            return Some(Self::small(bits & !0xfff, (bits & 0xfff) + 1));
        }
        let count = (bits & 0x7ff) + 1;
        if bits & Self::LARGE == 0 {
            return Some(Self::small(bits & !0xfff, count));
        }
        // 20:13 are reserved; below a page of 1 GiB the rest of the number is zero as well.
        let (size, low) = match bits & Self::GIGABYTE {
            0 => (1u64 << 21, 0xffu64 << 13),
            _ => (1 << 30, 0x1_ffff << 13),
        };
        let first = bits & !(size - 1);
        match bits & low {
            0 => Some(Self { first, count, size }),
            _ => None,
        }
    }
}

/// A valid call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The call.
    pub call: Call,
    /// The processors to flush: `None` for all.
    pub targets: Option<Cpus>,
    /// The page-table root of the address space: `None` in all of them.
    pub space: Option<u64>,
    /// Global translations may stay.
    pub non_global_only: bool,
    start: usize,
    reps: usize,
    extended: bool,
    list: [u64; PAGE_WORDS],
}

impl Decoded {
    /// Whether everything goes, and not only what a list names.
    pub fn is_everything(&self) -> bool {
        !self.call.is_rep()
    }

    /// Returns the ranges that the list names, from where the call goes on.
    pub fn ranges(&self) -> impl Iterator<Item = Pages> + '_ {
        let list = &self.list[self.start.min(self.reps)..self.reps];
        // Each was checked when the call was decoded.
        list.iter().filter_map(|&bits| Pages::decode(bits, self.extended))
    }

    /// How many elements there are from the first of the list on: what a call that was done has
    /// done.
    pub fn reps(&self) -> usize {
        self.reps
    }
}

/// Decodes a call. `words` is a copy of the input block, from its first byte to the end of its page
/// or as far as registers reach; `address` is where it was, for a call that is not fast.
///
/// # Errors
/// The status that the guest gets; nothing is to be flushed.
///
/// ```
/// use tablewright::hyperv::{Call, HostCaps, Input, Status, decode};
/// let host = HostCaps {
///     processors: 4,
///     xmm_input: true,
///     extended_ranges: true,
///     guest_physical: false,
/// };
/// let input = Input::new(Call::List).with_reps(1);
/// let flush = decode(input, 0x8000, &[0x1000, 0, 0b0100, 0x7001], &host)?;
/// assert!(flush.targets.is_some_and(|set| set.iter().eq([2])));
/// assert!(flush.ranges().map(|pages| (pages.first, pages.count)).eq([(0x7000, 2)]));
/// assert_eq!(decode(input.with_start(1), 0x8000, &[0; 4], &host), Err(Status::INPUT));
/// # Ok::<(), Status>(())
/// ```
pub fn decode(
    input: Input,
    address: u64,
    words: &[u64],
    host: &HostCaps,
) -> Result<Decoded, Status> {
    let call = Call::of_code(input.code()).ok_or(Status::CODE)?;
    let physical = matches!(call, Call::GuestSpace | Call::GuestList);
    if physical && !host.guest_physical {
        return Err(Status::CODE);
    }
    // The input value.
    let reps_right = match call.is_rep() {
        true => input.start() < input.reps(),
        false => input.reps() == 0 && input.start() == 0,
    };
    if input.has_reserved() || !reps_right || input.banks() != 0 && !call.has_set() {
        return Err(Status::INPUT);
    }
    // The place.
    let size = call.header() + input.banks() + input.reps();
    if input.is_fast() {
        if !host.xmm_input || size > words.len().min(PAGE_WORDS) {
            return Err(Status::INPUT);
        }
    } else if !address.is_multiple_of(8)
        || (address % 4096) as usize / 8 + size > PAGE_WORDS
        || size > words.len()
    {
        return Err(Status::ALIGNMENT);
    }
    // The parameters.
    let flags = Flags::from_bits(words[1]).ok_or(Status::PARAMETER)?;
    let extended = flags.contains(Flags::EXTENDED_RANGES);
    let mut allowed = match call.is_rep() {
        true => Flags::EXTENDED_RANGES,
        false => Flags::NON_GLOBAL_ONLY,
    };
    allowed |= Flags::ALL_PROCESSORS | Flags::ALL_SPACES;
    if physical {
        allowed = Flags::empty();
    }
    if !allowed.contains(flags) || extended && !host.extended_ranges {
        return Err(Status::PARAMETER);
    }
    let everywhere = physical || flags.contains(Flags::ALL_PROCESSORS);
    let targets = match call.has_set() {
        false if everywhere => None,
        false => mask_of(words[2], host),
        true => set_of(words, input.banks(), everywhere, host)?,
    };
    let first = call.header() + input.banks();
    let mut list = [0; PAGE_WORDS];
    list[..input.reps()].copy_from_slice(&words[first..first + input.reps()]);
    let large = extended || physical;
    if list[..input.reps()].iter().any(|&bits| Pages::decode(bits, large).is_none()) {
        return Err(Status::PARAMETER);
    }
    Ok(Decoded {
        call,
        targets,
        space: (!flags.contains(Flags::ALL_SPACES)).then_some(words[0]),
        non_global_only: flags.contains(Flags::NON_GLOBAL_ONLY),
        start: input.start(),
        reps: input.reps(),
        extended: large,
        list,
    })
}

/// The processors of a mask. An empty one means all.
fn mask_of(mask: u64, host: &HostCaps) -> Option<Cpus> {
    let mut set = Cpus::EMPTY;
    set.banks[0] = mask;
    (mask != 0).then(|| known(set, host))
}

/// The processors of a set: format, mask of banks, banks.
fn set_of(
    words: &[u64],
    banks: usize,
    everywhere: bool,
    host: &HostCaps,
) -> Result<Option<Cpus>, Status> {
    let (format, valid) = (words[2], words[3]);
    match format {
        // Sparse: a quadword for each bank, no more and no less.
        0 if valid.count_ones() as usize != banks => Err(Status::INPUT),
        0 if everywhere => Ok(None),
        0 => {
            let mut set = Cpus::EMPTY;
            let mut next = words[4..4 + banks].iter();
            for (number, bank) in set.banks.iter_mut().enumerate() {
                if valid >> number & 1 != 0 {
                    *bank = next.next().copied().unwrap_or(0);
                }
            }
            Ok(Some(known(set, host)))
        }
        // All of them, without a header.
        1 if banks != 0 => Err(Status::INPUT),
        1 => Ok(None),
        _ => Err(Status::PARAMETER),
    }
}

/// Those of a set that the guest has.
fn known(mut set: Cpus, host: &HostCaps) -> Cpus {
    for (number, bank) in set.banks.iter_mut().enumerate() {
        let left = host.processors.saturating_sub(number as u32 * 64);
        if left < 64 {
            *bank &= (1 << left) - 1;
        }
    }
    set
}

/// The flushes that a virtual processor executes before it runs on. Any thread of the host fills
/// the queue; the processor empties it on its way into the guest.
///
/// A thread that fills it and finds the processor running kicks it and waits until it has emptied
/// its queue; one that does not run empties it before it does.
///
/// ```
/// use tablewright::hyperv::{FlushQueue, Pages};
/// let queue = FlushQueue::<2>::new();
/// queue.push(Pages::small(0x5000, 3));
/// let mut seen = Vec::new();
/// assert!(!queue.take(|pages| seen.push(pages.first)));
/// assert_eq!(seen, [0x5000]);
/// (0..3).for_each(|page| queue.push(Pages::small(page << 12, 1)));
/// assert!(queue.take(|_| ())); // there was no room for the third: everything
/// ```
#[derive(Debug)]
pub struct FlushQueue<const N: usize> {
    /// A range each, inverted, so that zero is an empty place.
    ranges: [AtomicU64; N],
    /// Everything.
    all: AtomicBool,
}

impl<const N: usize> FlushQueue<N> {
    /// An empty queue.
    pub fn new() -> Self {
        Self { ranges: core::array::from_fn(|_| AtomicU64::new(0)), all: AtomicBool::new(false) }
    }

    /// Queues a flush of everything.
    pub fn push_all(&self) {
        self.all.store(true, Ordering::Release);
    }

    /// Queues a flush of these pages; of everything, if there is no room for them, or they are no
    /// range of small pages.
    pub fn push(&self, pages: Pages) {
        let range = pages.encode().filter(|_| pages.size == 1 << 12);
        let fits = range.map(|bits| !bits).is_some_and(|bits| {
            bits != 0
                && self.ranges.iter().any(|place| {
                    place.compare_exchange(0, bits, Ordering::Release, Ordering::Relaxed).is_ok()
                })
        });
        if !fits {
            self.push_all();
        }
    }

    /// Takes out each range that is to be flushed; returns `true` if everything is. The processor
    /// itself asks, on its way into the guest, after it has said that it runs. If `each` unwinds,
    /// its range is put back.
    #[must_use = "everything may have to be flushed"]
    pub fn take(&self, mut each: impl FnMut(Pages)) -> bool {
        for place in &self.ranges {
            let bits = place.swap(0, Ordering::Acquire);
            if bits != 0
                && let Some(pages) = Pages::decode(!bits, false)
            {
                offer(|| self.push(pages), || each(pages));
            }
        }
        // After the ranges: a thread that found no room says so when all places were taken.
        self.all.swap(false, Ordering::Acquire)
    }
}

impl<const N: usize> Default for FlushQueue<N> {
    fn default() -> Self {
        Self::new()
    }
}

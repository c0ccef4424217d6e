//! A leaf that was taken away, held until it may be used again, and how far an edit has come.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Address, Level, Pa, Span};
use crate::format::{Attrs, Format, Perms, address_of};

/// A leaf that an edit found or detached: which addresses it translated, to which frame, how. A
/// contiguous run is one leaf.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(8, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// space.map(Span::new(Va::new(0x20_0000), 2 << 20)?, Pa::new(0), Attrs::USER_DATA)?;
/// let leaf = space.query(Va::new(0x30_0000)).unwrap();
/// assert_eq!(
///     (leaf.input(), leaf.frame(), leaf.level()),
///     (Va::new(0x20_0000), Pa::new(0), Level::new(1))
/// );
/// assert!(
///     format!("{leaf:?}")
///         .starts_with("Leaf { input: Va(0x200000), frame: Pa(0x0), size: 0x200000, attrs: ")
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Leaf<F: Format> {
    input: u64,
    entry: u64,
    /// That of the entry: told apart where the level is known, it is a mask, and no choice of one.
    frame: Pa,
    /// The [meaning](Format::meaning) of the entry, without what tables above take away. Mostly it
    /// is the entry, so that what is read from it costs what reading it costs.
    means: u64,
    level: Level,
    format: PhantomData<F>,
}

/// Shows its meaning, and its entry as it is in memory.
impl<F: Format> fmt::Debug for Leaf<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaf")
            .field("input", &self.input())
            .field("frame", &self.frame())
            .field("size", &format_args!("{:#x}", self.size()))
            .field("attrs", &self.attrs())
            .field("entry", &format_args!("{:#x}", self.entry))
            .finish()
    }
}

impl<F: Format> Leaf<F> {
    #[inline]
    pub(crate) fn new(input: u64, entry: u64, level: Level, denied: Perms) -> Self {
        Self {
            input,
            entry,
            frame: address_of::<F>(entry, level),
            means: match denied.is_empty() {
                true => F::meaning(entry),
                false => restricted::<F>(F::meaning(entry), level, denied),
            },
            level,
            format: PhantomData,
        }
    }

    /// A [single page](Format::is_single_page) that this engine has encoded, and from which no
    /// table takes anything away.
    #[inline]
    pub(crate) fn of_page(input: u64, entry: u64) -> Self {
        Self {
            input,
            entry,
            frame: F::frame_of_page(entry),
            means: entry,
            level: Level::PAGE,
            format: PhantomData,
        }
    }

    /// Moves a leaf word by word: one that is moved as a whole takes the place of another in
    /// memory, and with it that one.
    #[inline]
    pub(crate) fn by_words(self) -> Self {
        let Self { input, entry, frame, means, level, format } = self;
        Self { input, entry, frame, means, level, format }
    }

    /// The first address that it translates.
    #[inline]
    pub fn input(&self) -> F::Input {
        F::Input::from_bits(self.input)
    }

    /// The frame that it translates to.
    #[inline]
    pub fn frame(&self) -> Pa {
        self.frame
    }

    /// The size in bytes; that of the whole run for a contiguous run, which counts as one leaf.
    #[inline]
    pub fn size(&self) -> u64 {
        let mut shift = F::shift(self.level);
        if self.is_contiguous() {
            shift += F::contiguous(self.level);
        }
        1 << shift
    }

    /// The memory that it translates to.
    #[inline]
    pub fn memory(&self) -> Span<Pa> {
        Span::of_leaf(self.frame(), self.size())
    }

    /// The level of its entry.
    #[inline]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Its attributes; permissions that a table above takes away are taken away. A run is accessed
    /// or dirty if any member says so.
    #[inline]
    pub fn attrs(&self) -> Attrs {
        F::decode_meaning(self.means, self.level)
    }

    /// Whether it is a contiguous run.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        self.entry & F::CONTIGUOUS != 0
    }

    /// The descriptor; of a run, that of its first member with the flags of all.
    #[inline]
    pub fn descriptor(&self) -> u64 {
        self.entry
    }
}

/// [`Format::restricted`], as a call: few leaves are below tables that take something away.
#[cold]
#[inline(never)]
fn restricted<F: Format>(entry: u64, level: Level, denied: Perms) -> u64 {
    F::restricted(entry, level, denied)
}

/// Something that was detached and that walkers may still reach: it can be looked at only with the
/// [`Flushed`], or the [`Completed`](super::Completed), of the flush that it belongs to, and once.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let span = Span::new(Va::new(0x4000), 0x2000)?;
/// space.map(span, Pa::new(0x10_0000), Attrs::KERNEL_DATA)?;
///
/// let mut held = Vec::new();
/// let mut gather = space.gather();
/// let progress = gather.unmap(span, |leaf| {
///     held.push(leaf);
///     ControlFlow::Continue(())
/// })?;
/// assert!(progress.is_done());
/// let flushed = gather.flush(|_| ());
/// let frames: Vec<_> = held
///     .into_iter()
///     .filter_map(|leaf| flushed.release(leaf).ok())
///     .map(|l| l.frame())
///     .collect();
/// assert_eq!(frames, [Pa::new(0x10_0000), Pa::new(0x10_1000)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "what is held has to be released on completion, or it leaks"]
pub struct Held<T> {
    pub(super) value: T,
    serial: u64,
}

impl<T> Held<T> {
    #[inline]
    pub(crate) fn new(value: T, serial: u64) -> Self {
        Self { value, serial }
    }

    /// Whether the flush of this number holds it.
    #[inline]
    pub(crate) fn is_of(&self, serial: u64) -> bool {
        self.serial == serial
    }

    /// Takes the value out without proof that the flush is complete.
    ///
    /// # Safety
    /// 1. The flush it belongs to is complete, or what it names is not reused before it is.
    pub unsafe fn assume_complete(self) -> T {
        self.value
    }
}

impl<F: Format> Held<Leaf<F>> {
    /// The memory that the leaf translated to: what an allocator wants back, and what can be
    /// [joined](Held::join).
    #[inline]
    pub fn memory(self) -> Held<Span<Pa>> {
        Held::new(self.value.memory(), self.serial)
    }
}

impl Held<Span<Pa>> {
    /// Adds what follows in memory, and is held by the same flush: of a range whose frames are
    /// consecutive one word is kept, or two, and not a leaf for each page.
    ///
    /// # Errors
    /// Gives it back if it does not follow, or another flush holds it.
    ///
    /// ```
    /// use core::ops::ControlFlow;
    /// use tablewright::{
    ///     AddressSpace, Attrs, Mapping, Pa, Span, Va, flush::Held, format::X86_64,
    /// };
    /// use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let span = Span::new(Va::new(0x4000), 0x40_0000)?;
    /// space.map(span, Pa::new(0x10_0000), Mapping::new(Attrs::USER_DATA).pages_only())?;
    /// space.make_live();
    ///
    /// let mut held: Vec<Held<Span<Pa>>> = Vec::new();
    /// let mut gather = space.gather();
    /// let progress = gather.unmap(span, |leaf| {
    ///     let memory = leaf.memory();
    ///     let rest = match held.last_mut() {
    ///         Some(last) => last.join(memory).err(),
    ///         None => Some(memory),
    ///     };
    ///     held.extend(rest);
    ///     ControlFlow::Continue(())
    /// })?;
    /// # assert!(progress.is_done());
    /// let completed = gather.issue().complete();
    /// // Pages of tables that were not detached, at both ends: 508 and 4.
    /// let mut free: Vec<Span<Pa>> =
    ///     held.into_iter().filter_map(|it| completed.release(it).ok()).collect();
    /// assert_eq!(free.len(), 2);
    /// // The table between them, whose pages need not be held.
    /// completed.finish(|leaf| match free.last().and_then(|last| last.join(leaf.memory())) {
    ///     Some(longer) => *free.last_mut().expect("it has one") = longer,
    ///     None => free.push(leaf.memory()),
    /// });
    /// assert_eq!(free.len(), 3);
    /// assert_eq!(free.iter().map(|run| run.size()).sum::<u64>(), span.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn join(&mut self, next: Self) -> Result<(), Self> {
        match self.value.join(next.value) {
            Some(joined) if self.serial == next.serial => {
                self.value = joined;
                Ok(())
            }
            _ => Err(next),
        }
    }
}

/// The proof that a flush is complete, for what edits have held back until then. Made by
/// [`Gather::flush`](crate::Gather::flush).
///
/// ```
/// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # space.map(Span::new(Va::new(0x7000), 0x2000)?, Pa::new(0x2000), Attrs::USER_DATA)?;
/// # space.make_live();
/// let mut gather = space.gather();
/// let before = gather.flush(|_| ());
/// let gone = gather.unmap_page(Va::new(0x7000))?.expect("mapped");
/// // It belongs to what is gathered since.
/// let gone = before.release(gone).expect_err("of another flush");
/// let leaf = gather.flush(|_| ()).release(gone).expect("of this one");
/// assert_eq!(leaf.frame(), Pa::new(0x2000));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// The number of the flush, which no other has; 0 if nothing was held back.
    pub(crate) serial: u64,
}

impl Flushed {
    /// Gives out what was held back until now.
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush.
    #[inline]
    pub fn release<T>(self, held: Held<T>) -> Result<T, Held<T>> {
        match held.is_of(self.serial) {
            true => Ok(held.value),
            false => Err(held),
        }
    }
}

/// Numbers of flushes come from here in blocks, so that no two flushes of any two spaces have the
/// same.
static BLOCKS: AtomicU64 = AtomicU64::new(1);
const BLOCK: u64 = 1 << 20;

/// The number that follows `last`, which is 0 or was returned by this function.
#[inline]
pub(crate) fn next_serial(last: u64) -> u64 {
    // The last of a block is a multiple, and so is 0. Relaxed: the numbers order nothing.
    match last & (BLOCK - 1) {
        0 => BLOCKS.fetch_add(1, Ordering::Relaxed) * BLOCK + 1,
        _ => last + 1,
    }
}

/// How far an edit or a reclaim has come, and where to go on if it stopped before the end.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
/// # space.make_live();
///
/// use tablewright::Progress;
/// // A buffer with room for one leaf.
/// let mut room = 1;
/// let mut gather = space.gather();
/// let progress = gather.unmap(span, |_| {
///     room -= 1;
///     if room == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
/// })?;
/// assert_eq!(progress, Progress::Stopped(Va::new(0x20_0000)));
/// gather.finish(|_| ());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an edit that stopped has to be continued"]
pub enum Progress<A> {
    /// All of it is done.
    Done,
    /// Everything below this address is done: complete the gather, make room, and go on from here.
    Stopped(A),
}

impl<A> Progress<A> {
    /// Whether the edit is done: nothing is left to go on with.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Progress, next_serial};

    #[test]
    fn numbers_of_a_block_follow_each_other_and_then_comes_another() {
        // Blocks of odd and even numbers.
        for _ in 0..2 {
            let first = next_serial(0);
            assert_eq!(first % BLOCK, 1);
            assert_eq!(next_serial(first), first + 1);
            let last = first + (BLOCK - 2);
            assert_eq!(next_serial(last), last + 1);
            // Another takes the block that follows.
            next_serial(0);
            let other = next_serial(last + 1);
            assert!(other % BLOCK == 1 && other > last + 2);
        }
    }

    #[test]
    fn an_edit_that_stopped_is_not_done() {
        assert!(Progress::<u64>::Done.is_done());
        assert!(!Progress::Stopped(0u64).is_done());
    }
}

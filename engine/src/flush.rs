//! What an edit leaves to invalidate, and what may be freed once that is complete.
//!
//! Edits gather into a [`Flush`]: which addresses walkers have to forget, and which tables were cut off. It goes
//! through three states, each a type, and none can be skipped:
//!
//! 1. [`Flush`]: edits add to it. [`issue`](Flush::issue) tells the processors. That is nearly free.
//! 2. [`Issued`]: they are forgetting. [`complete`](Issued::complete) waits until all have. That is what costs; do
//!    something else first, if there is something else.
//! 3. [`Completed`]: nobody can reach what was cut off. [`settle`](Completed::settle) visits the leaves below it,
//!    whose accessed and dirty bits are final only now, and frees the tables.
//!
//! **Nothing is freed before completion**, because only a [`Completed`] can free. A state that is dropped half-way
//! leaks what it carries; it never frees it.
//!
//! Memory is bounded. Ranges merge; when there are more than fit, or when they are more than the hardware does
//! better one by one, the flush degrades to everything, which is always correct. Cut-off tables are chained through
//! the side memory of their frames ([`Platform::link_of`]); the page of a table itself is not written, because
//! walkers may still be reading it.

use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Pa};
use crate::edit::run;
use crate::entry::{LINE, Table};
use crate::format::{Attrs, Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::walk::{Denied, Slice, Step, Visit, walk};

/// One invalidation, as the platform is asked to issue it.
///
/// # Stage 2
/// The addresses are those that the guest takes for physical, and no processor remembers them alone: what a guest's
/// access has found is kept under the guest's virtual address, both stages in one. To forget a range is therefore to
/// forget everything that was combined with it.
///
/// * arm64, with the VMID loaded: first by intermediate physical address (`tlbi ipas2e1is` or its range form;
///   `ipas2le1is` where no `tables` were cut off) and `dsb ish`; *then* what was combined (`tlbi vmalle1is`), which
///   [`Barrier::Complete`] waits for. The other way round a walker makes a combined entry anew between the two, out of
///   what it still remembers of stage 2. [`What::Everything`] is `tlbi vmalls12e1is`, which does both.
/// * Intel: INVEPT, single-context, whatever the range, on every processor that may run the guest; one that is in the
///   guest has to be made to leave it. INVEPT drops what was combined too.
/// * AMD: everything of the guest's ASID, when a processor next enters the guest (`TLB_CONTROL`), after it has been made
///   to leave; or INVLPGB by ASID.
///
/// # Example
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # let mut flush = space.flush();
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
/// # flush.finish(|_| ());
/// # space.make_live();
///
/// use tablewright::{Invalidation, What};
/// platform.record();
/// let mut flush = space.flush();
/// space.protect(span, Change::new().perms(Perms::READ), &mut flush)?;
/// flush.finish(|_| ());
/// let what = What::Range { first: 0, last: 0x3f_ffff, level: Some(Level::new(1)), tables: false };
/// assert_eq!(platform.take_log(), [Invalidation { id: 0, what }]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// The identity of the space (ASID, PCID, VMID), as the embedder gave it to the space.
    pub id: u16,
    /// What to forget.
    pub what: What,
}

/// What walkers have to forget.
///
/// ```
/// use tablewright::What;
/// /// How many instructions of one page each the invalidation would take, for pages of 4 KiB.
/// fn operations(what: &What) -> Option<u64> {
///     match *what {
///         What::Everything => None,
///         What::Range { first, last, level, .. } => {
///             let shift = 12 + 9 * level.map_or(0, |level| u32::from(level.height()));
///             Some(((last - first) >> shift) + 1)
///         }
///     }
/// }
/// assert_eq!(operations(&What::Range { first: 0, last: 0x2fff, level: None, tables: false }), Some(3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Every translation of the space, global ones included, and everything cached of its tables.
    Everything,
    /// The translations of a range of input addresses.
    Range {
        /// The first address.
        first: u64,
        /// The last address.
        last: u64,
        /// The level of all leaves in the range, if they are at one level and it is known: a hint that may be passed
        /// to instructions that take one. Where it is not known, the instruction has to be told so; a wrong hint
        /// invalidates nothing.
        level: Option<Level>,
        /// Tables were cut off: what is cached of table descriptors has to go too, not only leaves.
        tables: bool,
    },
}

/// How many separate ranges a flush holds before it degrades to everything.
pub const MAX_RANGES: usize = 16;

/// How many cut-off tables a flush holds where the embedder keeps no side memory for tables.
pub const MAX_UNLINKED: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Item {
    first: u64,
    last: u64,
    level: Option<Level>,
    tables: bool,
}

/// Ranges to invalidate: merged, bounded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranges {
    items: [Item; MAX_RANGES],
    len: usize,
    everything: bool,
}

impl Ranges {
    pub const fn new() -> Self {
        const NONE: Item = Item {
            first: 0,
            last: 0,
            level: None,
            tables: false,
        };
        Self {
            items: [NONE; MAX_RANGES],
            len: 0,
            everything: false,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0 && !self.everything
    }

    /// Adds a range. `level` is that of all its leaves, if known.
    pub fn add(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        if self.everything {
            return;
        }
        // Edits go upwards through the space, so a range that can be merged is nearly always the last one.
        for item in self.items[..self.len].iter_mut().rev() {
            let touches = slice.first <= item.last.saturating_add(1)
                && item.first <= slice.last.saturating_add(1);
            let overlaps = slice.first <= item.last && item.first <= slice.last;
            // Ranges that merely touch stay apart if one hint is not right for both; those that overlap lose it.
            if overlaps || touches && item.level == level && item.tables == tables {
                item.first = item.first.min(slice.first);
                item.last = item.last.max(slice.last);
                if item.level != level {
                    item.level = None;
                }
                item.tables |= tables;
                return;
            }
        }
        if self.len == MAX_RANGES {
            self.everything = true;
            return;
        }
        self.items[self.len] = Item {
            first: slice.first,
            last: slice.last,
            level,
            tables,
        };
        self.len += 1;
    }

    /// Issues the invalidations; the stores they are about become visible first. Returns whether there were any.
    pub fn issue<F: Format, P: Platform>(&self, platform: &P, id: u16) -> bool {
        if self.is_empty() {
            return false;
        }
        platform.barrier(Barrier::Publish);
        let items = &self.items[..self.len];
        let operations = items.iter().fold(0u64, |sum, item| {
            let shift = item.level.map_or(F::PAGE_SHIFT, F::shift);
            sum.saturating_add(((item.last - item.first) >> shift) + 1)
        });
        if self.everything || operations > platform.caps().invalidate_all_above {
            platform.invalidate(&Invalidation {
                id,
                what: What::Everything,
            });
        } else {
            for item in items {
                platform.invalidate(&Invalidation {
                    id,
                    what: What::Range {
                        first: item.first,
                        last: item.last,
                        level: item.level,
                        tables: item.tables,
                    },
                });
            }
        }
        true
    }

    /// Issues the invalidations and waits until they are complete.
    pub fn run<F: Format, P: Platform>(&self, platform: &P, id: u16) {
        if self.issue::<F, P>(platform, id) {
            platform.barrier(Barrier::Complete);
        }
    }
}

/// A leaf that an edit found or cut off: which addresses it translated, to which frame, how. A contiguous run is one
/// leaf.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// let platform = Hosted::new(8, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let mut flush = space.flush();
/// space.map(Span::new(Va::new(0x20_0000), 2 << 20)?, Pa::new(0), Attrs::USER_DATA, &mut flush)?;
/// flush.finish(|_| ());
/// let leaf = space.query(Va::new(0x30_0000)).unwrap();
/// assert_eq!((leaf.input(), leaf.frame(), leaf.level()), (Va::new(0x20_0000), Pa::new(0), Level::new(1)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf<F: Format> {
    input: u64,
    entry: u64,
    level: Level,
    denied: Perms,
    format: PhantomData<F>,
}

impl<F: Format> Leaf<F> {
    #[inline(always)]
    pub(crate) fn new(input: u64, entry: u64, level: Level, denied: Perms) -> Self {
        Self {
            input,
            entry,
            level,
            denied,
            format: PhantomData,
        }
    }

    /// The first address that it translates.
    #[inline(always)]
    pub fn input(&self) -> F::Input {
        F::Input::from_bits(self.input)
    }

    /// The frame that it translates to.
    #[inline(always)]
    pub fn frame(&self) -> Pa {
        F::address(self.entry, self.level)
    }

    /// The size in bytes; that of the whole run for a contiguous run, which counts as one leaf.
    #[inline(always)]
    pub fn size(&self) -> u64 {
        let mut shift = F::shift(self.level);
        if self.is_contiguous() {
            shift += F::contiguous(self.level);
        }
        1 << shift
    }

    /// The level it stands at.
    #[inline(always)]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Its attributes; permissions that a table above takes away are taken away. A run is accessed or dirty if any
    /// member says so.
    #[inline]
    pub fn attrs(&self) -> Attrs {
        Attrs {
            perms: F::effective(self.entry, self.level, self.denied),
            ..F::decode(self.entry, self.level)
        }
    }

    /// Whether it is a contiguous run.
    #[inline(always)]
    pub fn is_contiguous(&self) -> bool {
        self.entry & F::CONTIGUOUS != 0
    }

    /// The descriptor; of a run, that of its first member with the flags of all.
    #[inline]
    pub fn descriptor(&self) -> u64 {
        self.entry
    }
}

/// Something that was cut off and that walkers may still reach: it can be looked at only with the [`Completed`] of the
/// flush it belongs to.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let span = Span::new(Va::new(0x4000), 0x2000)?;
/// let mut flush = space.flush();
/// space.map(span, Pa::new(0x10_0000), Attrs::KERNEL_DATA, &mut flush)?;
///
/// let mut held = Vec::new();
/// let progress = space.unmap(span, &mut flush, |leaf| {
///     held.push(leaf);
///     ControlFlow::Continue(())
/// })?;
/// assert!(progress.is_done());
/// let completed = flush.issue().complete();
/// let frames: Vec<_> =
///     held.into_iter().filter_map(|leaf| completed.release(leaf).ok()).map(|l| l.frame()).collect();
/// assert_eq!(frames, [Pa::new(0x10_0000), Pa::new(0x10_1000)]);
/// # completed.finish(|_| ());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "what is held has to be released on completion, or it leaks"]
pub struct Held<T> {
    value: T,
    serial: Serial,
}

impl<T> Held<T> {
    pub(crate) fn new(value: T, serial: Serial) -> Self {
        Self { value, serial }
    }

    /// Takes the value out without proof that the flush is complete.
    ///
    /// # Safety
    /// 1. The flush it belongs to is complete, or what it names is not reused before it is.
    pub unsafe fn assume_complete(self) -> T {
        self.value
    }
}

/// Names one flush of one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Serial {
    pub root: Pa,
    pub number: u32,
}

/// Where to go on after an edit or a settling that stopped before the end.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # let mut flush = space.flush();
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
/// # flush.finish(|_| ());
/// # space.make_live();
///
/// use tablewright::Progress;
/// // A buffer with room for one leaf.
/// let mut room = 1;
/// let mut flush = space.flush();
/// let progress = space.unmap(span, &mut flush, |_| {
///     room -= 1;
///     if room == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
/// })?;
/// assert_eq!(progress, Progress::Stopped(Va::new(0x20_0000)));
/// flush.finish(|_| ());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an edit that stopped has to be continued"]
pub enum Progress<A> {
    /// All of it is done.
    Done,
    /// Everything below this address is done: complete the flush, make room, and go on from here.
    Stopped(A),
}

impl<A> Progress<A> {
    /// Whether nothing is left.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

/// What becomes of a table that was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Everything below it was unmapped: the leaves are visited, the tables freed.
    Unmapped,
    /// A leaf has taken its place: the tables are freed, the leaves live on.
    Replaced,
}

/// The root of a sub-tree that was cut off.
#[derive(Clone, Copy)]
struct Root {
    frame: Pa,
    level: Level,
    fate: Fate,
    /// What the tables above it took away.
    denied: Perms,
    /// The first input address that it translated.
    first: u64,
}

impl Root {
    /// All but the address in one word: what is not the frame in the bits below its alignment, with a mark that tells
    /// the word from the end of the chain.
    fn word(self) -> u64 {
        let level = u64::from(self.level.height());
        let fate = u64::from(self.fate == Fate::Replaced);
        let denied = u64::from(self.denied.bits());
        self.frame.get() | 1 | level << 1 | fate << 4 | denied << 5
    }

    fn from_word(word: u64, first: u64) -> Option<Self> {
        (word & 1 != 0).then_some(Self {
            frame: Pa::new(word & !0xfff),
            level: Level::new((word >> 1 & 7) as u8),
            fate: if word & 1 << 4 == 0 {
                Fate::Unmapped
            } else {
                Fate::Replaced
            },
            denied: Perms::from_bits_truncate((word >> 5) as u8 & 0x3f),
            first,
        })
    }

    /// All addresses that it translated.
    fn slice<F: Format>(self) -> Slice {
        let size = 1u64 << (F::shift(self.level) + F::INDEX_BITS);
        Slice {
            first: self.first,
            last: self.first + (size - 1),
        }
    }
}

/// Tables that were cut off: a chain through their side memory, and a few places for those that have none.
struct Detached {
    /// The newest root that is chained; its link holds the word of the next.
    head: Option<Root>,
    unlinked: [Option<Root>; MAX_UNLINKED],
    len: usize,
}

impl Detached {
    const fn new() -> Self {
        Self {
            head: None,
            unlinked: [None; MAX_UNLINKED],
            len: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.len == 0 && self.head.is_none()
    }

    fn push<P: Platform>(&mut self, platform: &P, root: Root) {
        if let Some(link) = platform.link_of(root.frame) {
            let (word, first) = self.head.map_or((0, 0), |head| (head.word(), head.first));
            link.set(word, first);
            self.head = Some(root);
        } else if let Some(place) = self.unlinked.get_mut(self.len) {
            *place = Some(root);
            self.len += 1;
        } else {
            // The edit asked for room before it cut the table off. Leaking is what is left, and is safe.
            debug_assert!(false, "a table was cut off without room for it");
        }
    }

    /// Takes a root out, with nothing of it settled yet.
    fn pop<P: Platform>(&mut self, platform: &P) -> Option<(Root, Option<Slice>)> {
        if self.len > 0 {
            self.len -= 1;
            return self.unlinked[self.len].take().map(|root| (root, None));
        }
        let root = self.head?;
        let (word, first) = platform.link_of(root.frame)?.get();
        self.head = Root::from_word(word, first);
        Some((root, None))
    }
}

/// What one or several edits of one space leave to invalidate and to free.
///
/// Made by [`AddressSpace::flush`](crate::AddressSpace::flush); the [module](self) tells its life.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Pa, Perms, Span, Va, Change};
/// use tablewright::{format::X86_64, hosted::Hosted};
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let span = Span::new(Va::new(0), 64 << 20)?;
/// let mut flush = space.flush();
/// space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
/// space.make_live();
///
/// // Two edits, one invalidation.
/// let (low, high) = (Span::new(Va::new(0), 32 << 20)?, Span::new(Va::new(32 << 20), 32 << 20)?);
/// space.protect(low, Change::new().perms(Perms::READ), &mut flush)?;
/// space.protect(high, Change::new().perms(Perms::READ), &mut flush)?;
/// flush.finish(|_| ());
/// assert_eq!(platform.counts().invalidations, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a flush that is dropped invalidates nothing, and leaks the tables it carries"]
pub struct Flush<F: Format, P: Platform> {
    platform: P,
    id: u16,
    serial: Serial,
    ranges: Ranges,
    /// There is something that walkers have to see, besides what they have to forget.
    news: bool,
    detached: Detached,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Flush<F, P> {
    pub(crate) fn new(platform: P, id: u16, serial: Serial) -> Self {
        Self {
            platform,
            id,
            serial,
            ranges: Ranges::new(),
            news: false,
            detached: Detached::new(),
            format: PhantomData,
        }
    }

    pub(crate) fn serial(&self) -> Serial {
        self.serial
    }

    pub(crate) fn add(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        self.ranges.add(slice, level, tables);
    }

    /// All that the space translates.
    pub(crate) fn add_everything(&mut self) {
        self.ranges.everything = true;
    }

    /// An entry was changed that no walker remembers.
    pub(crate) fn add_news(&mut self) {
        self.news = true;
    }

    /// Whether a table in `frame` can be carried.
    #[inline]
    pub(crate) fn has_room(&self, frame: Pa) -> bool {
        self.detached.len < MAX_UNLINKED || self.platform.link_of(frame).is_some()
    }

    pub(crate) fn carry(&mut self, frame: Pa, level: Level, first: u64, denied: Perms, fate: Fate) {
        let root = Root {
            frame,
            level,
            fate,
            denied,
            first,
        };
        self.detached.push(&self.platform, root);
    }

    /// Whether there is nothing to invalidate. It may still carry tables to free, and stores that are not visible yet.
    pub fn is_clean(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Makes the edits visible and tells every processor what to forget. Does not wait.
    pub fn issue(self) -> Issued<F, P> {
        let issued = self.ranges.issue::<F, P>(&self.platform, self.id);
        if self.news && !issued {
            self.platform.barrier(Barrier::Publish);
        }
        Issued {
            flush: self,
            issued,
        }
    }

    /// Issues, completes and settles, visiting each leaf of the sub-trees that were cut off.
    pub fn finish(self, leaves: impl FnMut(Leaf<F>)) {
        self.issue().complete().finish(leaves);
    }
}

/// A flush that has been issued: the processors are forgetting.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # let mut flush = space.flush();
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
/// # flush.finish(|_| ());
/// # space.make_live();
///
/// let mut flush = space.flush();
/// space.protect(span, Change::new().perms(Perms::READ), &mut flush)?;
/// let issued = flush.issue();
/// // ... something else, while the processors forget ...
/// issued.complete().finish(|_| ());
/// assert_eq!(platform.counts().completions, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "what was issued has to be completed; a dropped flush leaks the tables it carries"]
pub struct Issued<F: Format, P: Platform> {
    flush: Flush<F, P>,
    issued: bool,
}

impl<F: Format, P: Platform> Issued<F, P> {
    /// Waits until every processor has forgotten. Costs nothing if nothing had to be invalidated.
    pub fn complete(self) -> Completed<F, P> {
        if self.issued {
            self.flush.platform.barrier(Barrier::Complete);
        }
        Completed {
            platform: self.flush.platform,
            serial: self.flush.serial,
            detached: self.flush.detached,
            current: None,
            format: PhantomData,
        }
    }
}

/// A flush that is complete: what was cut off is out of reach, and may be settled and freed.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # let mut flush = space.flush();
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA, &mut flush)?;
/// # flush.finish(|_| ());
/// # space.make_live();
///
/// let mut flush = space.flush();
/// // A whole gigabyte: the table below it is cut off at once, with its two leaves.
/// let all = Span::new(Va::new(0), 1 << 30)?;
/// assert!(space.unmap(all, &mut flush, |_| ControlFlow::Continue(()))?.is_done());
/// let mut completed = flush.issue().complete();
/// let mut leaves = 0;
/// while !completed.settle(|_| { leaves += 1; ControlFlow::Break(()) }) {}
/// assert_eq!(leaves, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the tables that were cut off are freed by settling"]
pub struct Completed<F: Format, P: Platform> {
    platform: P,
    serial: Serial,
    detached: Detached,
    /// The sub-tree being settled, and what is left of it.
    current: Option<(Root, Option<Slice>)>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Completed<F, P> {
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// Whether it carries no table.
    pub(crate) fn is_empty(&self) -> bool {
        self.detached.is_empty() && self.current.is_none()
    }

    /// Gives out what was held back until now.
    ///
    /// # Errors
    /// Gives it back if it belongs to another flush.
    pub fn release<T>(&self, held: Held<T>) -> Result<T, Held<T>> {
        if held.serial == self.serial {
            Ok(held.value)
        } else {
            Err(held)
        }
    }

    /// Visits the leaves of the sub-trees that were cut off, and frees their tables.
    ///
    /// The visitor may break off after any leaf; that leaf counts as visited, and the next call goes on behind it.
    /// Returns whether everything is settled.
    #[must_use = "what is not settled is not freed"]
    pub fn settle(&mut self, visit: impl FnMut(Leaf<F>) -> ControlFlow<()>) -> bool {
        let Self {
            platform,
            detached,
            current,
            ..
        } = self;
        let mut settle = Settle {
            platform: &*platform,
            visit,
            stop: false,
            denied: Denied::new(Perms::empty()),
            format: PhantomData,
        };
        loop {
            let next = current.take().or_else(|| detached.pop(platform));
            let Some((root, slice)) = next else {
                return true;
            };
            if root.fate == Fate::Replaced {
                free_tree::<F, P>(platform, root.frame, root.level);
                continue;
            }
            settle.denied = Denied::new(root.denied);
            // A sub-tree that is taken up for the first time is walked whole.
            let slice = slice.unwrap_or_else(|| root.slice::<F>());
            let walked =
                // SAFETY: the frame was cut off from a tree of this format; it is freed below, once.
                unsafe { walk::<F, P, _>(platform, root.frame, root.level, slice, &mut settle) };
            if let ControlFlow::Break(first) = walked {
                let last = slice.last;
                *current = Some((root, Some(Slice { first, last })));
                return false;
            }
            // SAFETY: the invalidation that covers the table is complete (2.), and the chain that it was taken from
            // held it once (1.).
            unsafe { platform.free_table(root.frame, root.level) };
            if settle.stop {
                return detached.is_empty();
            }
        }
    }

    /// Settles all that is left, without stopping.
    pub fn finish(mut self, mut leaves: impl FnMut(Leaf<F>)) {
        // The visitor never breaks, so one call settles everything.
        let _settled = self.settle(move |leaf| {
            leaves(leaf);
            ControlFlow::Continue(())
        });
    }
}

/// Visits leaves and frees tables on the way back. Stops *before* a leaf, never after one, so that every table whose
/// last leaf has been visited is freed before the walk ends.
struct Settle<'a, F: Format, P: Platform, V> {
    platform: &'a P,
    visit: V,
    stop: bool,
    denied: Denied,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>) -> ControlFlow<()>> Settle<'_, F, P, V> {
    /// Visits the leaf at one entry; a run once, at its first member.
    #[inline]
    fn leaf(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        first: u64,
        mut entry: u64,
    ) -> ControlFlow<u64> {
        if entry & F::CONTIGUOUS != 0 {
            let members = run::members::<F>(index, level);
            if index != members.start {
                return ControlFlow::Continue(());
            }
            // SAFETY: the table was cut off or never linked, and only this thread of execution knows it.
            entry = run::gather::<F>(members, level, |member| unsafe { table.read(member) });
        }
        if self.stop {
            return ControlFlow::Break(first);
        }
        let leaf = Leaf::new(first, entry, level, self.denied.at(level));
        self.stop = (self.visit)(leaf).is_break();
        ControlFlow::Continue(())
    }
}

impl<F: Format, P: Platform, V: FnMut(Leaf<F>) -> ControlFlow<()>> Visit<F, P>
    for Settle<'_, F, P, V>
{
    type Stop = u64;

    fn entry(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        slice: Slice,
    ) -> ControlFlow<u64, Step> {
        let entry = table.load(index);
        match F::kind(entry, level) {
            Kind::Table => {
                if let Some(below) = level.down() {
                    self.denied.enter::<F>(entry, below);
                }
                return ControlFlow::Continue(Step::Into(F::address(entry, level)));
            }
            Kind::Leaf => self.leaf(table, index, level, slice.first, entry)?,
            Kind::Invalid => {}
        }
        ControlFlow::Continue(Step::Next)
    }

    #[inline(always)]
    fn pages(&mut self, table: &Table<'_, P>, range: Range<usize>, first: u64) -> ControlFlow<u64> {
        let at = |index: usize| first.wrapping_add(((index - range.start) as u64) << F::PAGE_SHIFT);
        // SAFETY: the table was cut off or never linked, and only this thread of execution knows it.
        let read = |index: usize| unsafe { table.read(index) };
        let denied = self.denied.at(Level::PAGE);
        let mut index = range.start;
        while index < range.end {
            // A line of leaves at a time: read first, then visited, so that what the visitor writes does not stand
            // between the reads, and a visitor that never breaks off is not asked whether it has.
            let mut line = [0; LINE];
            let mut leaves = !self.stop && range.end - index >= LINE;
            if leaves {
                table.prefetch_ahead(index);
                for (offset, entry) in line.iter_mut().enumerate() {
                    *entry = read(index + offset);
                    leaves &=
                        F::kind(*entry, Level::PAGE) == Kind::Leaf && *entry & F::CONTIGUOUS == 0;
                }
            }
            if leaves {
                for entry in line {
                    if self.stop {
                        return ControlFlow::Break(at(index));
                    }
                    let leaf = Leaf::new(at(index), entry, Level::PAGE, denied);
                    index += 1;
                    if (self.visit)(leaf).is_break() {
                        self.stop = true;
                    }
                }
            } else {
                for index in index..range.end.min(index + LINE) {
                    let entry = read(index);
                    if F::kind(entry, Level::PAGE) == Kind::Leaf {
                        self.leaf(table, index, Level::PAGE, at(index), entry)?;
                    }
                }
                index += LINE;
            }
        }
        ControlFlow::Continue(())
    }

    const LEAVES: bool = true;

    fn leave(&mut self, level: Level, child: Pa) {
        if let Some(below) = level.down() {
            // SAFETY: the sub-tree is out of reach of walkers (2.), and the walk passes each of its tables once; one
            // that goes on after a stop starts behind the tables that were freed before it (1.).
            unsafe { self.platform.free_table(child, below) };
        }
    }
}

/// Frees the table in `frame` and every table below it. The leaves are nobody's business.
///
/// The caller vouches that nothing can reach the table: it was never linked, or its invalidation is complete.
pub(crate) fn free_tree<F: Format, P: Platform>(platform: &P, frame: Pa, level: Level) {
    let mut settle = Settle::<F, P, _> {
        platform,
        visit: |_| ControlFlow::Continue(()),
        stop: false,
        denied: Denied::new(Perms::empty()),
        format: PhantomData,
    };
    if level != Level::PAGE {
        let slice = Slice {
            first: 0,
            last: (1 << (F::shift(level) + F::INDEX_BITS)) - 1,
        };
        // SAFETY: a whole table of this format, below the root.
        let _: ControlFlow<u64> =
            unsafe { walk::<F, P, _>(platform, frame, level, slice, &mut settle) };
    }
    // SAFETY: as the caller vouches.
    unsafe { platform.free_table(frame, level) };
}

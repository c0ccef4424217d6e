//! What an edit leaves to invalidate, and what may be freed once that is complete.
//!
//! Edits add to a gather ([`Gather`](crate::Gather), or [`shared::Gather`](crate::shared::Gather)): which addresses walkers
//! have to forget, and which tables were cut off. What was gathered goes through three states, and none can be skipped:
//!
//! 1. In the gather. [`issue`](crate::Gather::issue) tells the processors, which is nearly free.
//! 2. [`Issued`]: they are forgetting. [`complete`](Issued::complete) waits until all have. That is what costs; do
//!    something else first, if there is something else.
//! 3. [`Completed`]: no processor reaches what was cut off. [`settle`](Completed::settle) visits the leaves below it,
//!    whose accessed and dirty bits are final only now, and frees the tables. What was cut off by a shared edit may still be
//!    in the hands of software that walks the tables: it is a [`Cut`](crate::shared::Cut) first.
//!
//! **Nothing is freed before completion**, because only a [`Completed`] can free. A gather that is dropped completes what it
//! has gathered; an [`Issued`] that is dropped leaks its tables, and the space remembers to wait. A gather that is
//! forgotten ([`core::mem::forget`]) leaves what it changed owed by the space, and the next gather pays.
//!
//! Memory is bounded, and none of it is touched before there is something to put into it. Ranges merge; when there are more
//! than fit, or when they are more than the hardware does better one by one, all of the space is invalidated, which is always
//! correct. Cut-off tables are chained through the side memory of their frames ([`Platform::link_of`]); the page of a
//! table itself is not written, because walkers may still be reading it.

use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::{ControlFlow, Range};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Address, Level, Pa, Span};
use crate::edit::run;
use crate::entry::{LINE, Table};
use crate::format::{Attrs, Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::shootdown::Identity;
use crate::walk::{Denied, Slice, Step, Visit, walk};

/// All that one flush of one space invalidates, as the platform is asked to issue it.
///
/// # Stage 2
/// The addresses are those that the guest takes for physical, and no processor remembers them alone: what a guest's
/// access has found is kept under the guest's virtual address, both stages in one. To forget a range is therefore to
/// forget everything that was combined with it.
///
/// * arm64, with the VMID loaded: first all ranges by intermediate physical address (`tlbi ipas2e1is` or its range form;
///   `ipas2le1is` where no `tables` were cut off) and `dsb ish`; *then*, once for all of them, what was combined (`tlbi
///   vmalle1is`), which [`Barrier::Complete`] waits for. The other way round a walker makes a combined entry anew between
///   the two, out of what it still remembers of stage 2. [`What::Everything`] is `tlbi vmalls12e1is`, which does both.
/// * Intel: INVEPT, single-context, whatever the ranges, on every processor that may run the guest; one that is in the
///   guest has to be made to leave it. INVEPT drops what was combined too.
/// * AMD: everything of the guest's ASID, when a processor next enters the guest (`TLB_CONTROL`), after it has been made
///   to leave; or INVLPGB by ASID.
///
/// # Example
/// ```
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::USER_DATA)?;
/// # space.make_live();
///
/// use tablewright::Stale;
/// platform.record();
/// let mut gather = space.gather();
/// gather.protect(span, Change::new().perms(Perms::READ | Perms::USER_READ))?;
/// gather.finish(|_| ());
/// let stale = Stale { first: 0, last: 0x3f_ffff, level: Some(Level::new(1)), tables: false };
/// let told = &platform.take_log()[0];
/// assert_eq!((told.global, &told.ranges[..]), (false, &[stale][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation<'a> {
    /// The root of the space's tables.
    pub root: Pa,
    /// The identity of the space (ASID, PCID, VMID), as the embedder gave it to the space; where its root has an
    /// [`Identity`], the identifier that it has at this moment.
    pub id: u16,
    /// Translations that may be global are meant, so that processors remember them whatever space they have loaded: all
    /// processors have to be told, by what includes global translations, and what is cached of tables under any identity
    /// (x86: `INVLPG` where no `tables` were cut off, `INVPCID` type 2, `INVLPGB` with its bit 3; arm64: `VAAE1IS`, `VMALLE1IS`).
    pub global: bool,
    /// What to forget.
    pub what: What<'a>,
}

/// What walkers have to forget.
///
/// ```
/// use tablewright::{Stale, What};
/// /// How many instructions of one page each the invalidation would take, for pages of 4 KiB.
/// fn operations(what: &What<'_>) -> Option<u64> {
///     let What::Ranges(ranges) = what else { return None };
///     let count = |stale: &Stale| {
///         let shift = 12 + 9 * stale.level.map_or(0, |level| u32::from(level.height()));
///         ((stale.last - stale.first) >> shift) + 1
///     };
///     Some(ranges.iter().map(count).sum())
/// }
/// let stale = Stale { first: 0, last: 0x2fff, level: None, tables: false };
/// assert_eq!(operations(&What::Ranges(&[stale])), Some(3));
/// assert_eq!(operations(&What::Everything), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What<'a> {
    /// Every translation of the space, and everything cached of its tables.
    Everything,
    /// The translations of these ranges of input addresses, one at least and at most [`MAX_RANGES`].
    Ranges(&'a [Stale]),
}

/// A range of input addresses whose translations are stale.
///
/// ```
/// use tablewright::Stale;
/// let page = Stale { first: 0x7000, last: 0x7fff, level: None, tables: true };
/// assert_eq!(page.last - page.first + 1, 4096);
/// assert_eq!(format!("{page:?}"), "Stale { first: 0x7000, last: 0x7fff, level: None, tables: true }");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stale {
    /// The first address.
    pub first: u64,
    /// The last address.
    pub last: u64,
    /// The level of all leaves in the range, if they are at one level and it is known: a hint that may be passed
    /// to instructions that take one. Where it is not known, the instruction has to be told so; a wrong hint
    /// invalidates nothing.
    pub level: Option<Level>,
    /// Tables were cut off: what is cached of table descriptors has to go too, not only leaves.
    pub tables: bool,
}

impl fmt::Debug for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stale")
            .field("first", &format_args!("{:#x}", self.first))
            .field("last", &format_args!("{:#x}", self.last))
            .field("level", &self.level)
            .field("tables", &self.tables)
            .finish()
    }
}

/// How many separate ranges a flush has before it becomes one of everything.
pub const MAX_RANGES: usize = 16;

/// How many cut-off tables a gather holds where the embedder keeps no side memory for tables.
pub const MAX_UNLINKED: usize = 8;

/// The space that a flush is about.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub root: Pa,
    /// Under which it is loaded, if its root has no identity.
    pub id: u16,
    /// The space may hold global translations.
    pub global: bool,
}

impl Target {
    /// What is to be forgotten, of changes that are published: under the identifier that the space has by now.
    #[inline(always)]
    pub fn forgetting<'w, P: Platform>(self, platform: &P, what: What<'w>) -> Invalidation<'w> {
        let Self { root, id, global } = self;
        let id = platform
            .identity_of(root)
            .map_or(id, Identity::id_after_changes);
        Invalidation {
            root,
            id,
            global,
            what,
        }
    }
}

/// Ranges to invalidate: merged, bounded.
pub(crate) struct Ranges {
    items: [MaybeUninit<Stale>; MAX_RANGES],
    /// So many items are initialised.
    len: usize,
    /// All of the space is to be forgotten, whatever the ranges say.
    pub everything: bool,
    overflowed: bool,
}

impl Ranges {
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            items: [const { MaybeUninit::uninit() }; MAX_RANGES],
            len: 0,
            everything: false,
            overflowed: false,
        }
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0 && !self.everything
    }

    #[inline(always)]
    pub fn clear(&mut self) {
        self.len = 0;
        self.everything = false;
        self.overflowed = false;
    }

    /// The ranges; together they hold every address that was added, everything or not.
    #[inline]
    pub fn as_slice(&self) -> &[Stale] {
        // SAFETY: the first `len` items were written by `add`.
        unsafe { core::slice::from_raw_parts(self.items.as_ptr().cast(), self.len) }
    }

    /// The same ranges. Copies no more than there are.
    pub fn copy(&self) -> Self {
        let mut copy = Self::new();
        copy.len = self.len;
        for (to, from) in copy.items.iter_mut().zip(self.as_slice()) {
            to.write(*from);
        }
        copy
    }

    #[inline]
    fn as_mut_slice(&mut self) -> &mut [Stale] {
        // SAFETY: the first `len` items were written by `add`.
        unsafe { core::slice::from_raw_parts_mut(self.items.as_mut_ptr().cast(), self.len) }
    }

    /// Whether any address of `slice` was added.
    pub fn overlap(&self, slice: Slice) -> bool {
        let overlaps = |item: &Stale| slice.first <= item.last && item.first <= slice.last;
        self.as_slice().iter().any(overlaps)
    }

    /// Adds a range. `level` is that of all its leaves, if known.
    #[inline(always)]
    pub fn add(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        let Slice { first, last } = slice;
        match self.as_mut_slice().last_mut() {
            // Most edits go upwards, and begin where the last one ended.
            Some(item)
                if first.wrapping_sub(item.last) == 1
                    && first != 0
                    && (item.level, item.tables) == (level, tables) =>
            {
                item.last = last;
            }
            Some(_) => self.insert(slice, level, tables),
            None => self.push(Stale {
                first,
                last,
                level,
                tables,
            }),
        }
    }

    /// Adds one more, if there is room.
    #[inline(always)]
    fn push(&mut self, item: Stale) {
        match self.items.get_mut(self.len) {
            Some(place) => {
                place.write(item);
                self.len += 1;
            }
            None => self.overflowed = true,
        }
    }

    #[inline(never)]
    fn insert(&mut self, slice: Slice, level: Option<Level>, tables: bool) {
        let Slice { first, last } = slice;
        if self.overflowed {
            return self.stretch(slice);
        }
        // Edits go upwards through the space, so a range that can be merged is nearly always the last one.
        for item in self.as_mut_slice().iter_mut().rev() {
            let touches =
                first <= item.last.saturating_add(1) && item.first <= last.saturating_add(1);
            let overlaps = first <= item.last && item.first <= last;
            // Ranges that merely touch stay apart if one hint is not right for both; those that overlap lose it.
            if overlaps || touches && item.level == level && item.tables == tables {
                item.first = item.first.min(first);
                item.last = item.last.max(last);
                if item.level != level {
                    item.level = None;
                }
                item.tables |= tables;
                return;
            }
        }
        self.push(Stale {
            first,
            last,
            level,
            tables,
        });
        if self.overflowed {
            self.stretch(slice);
        }
    }

    /// There is no room for one more: the last is stretched over it and what lies between, so that the ranges still hold all
    /// that was changed.
    fn stretch(&mut self, slice: Slice) {
        if let Some(item) = self.as_mut_slice().last_mut() {
            item.first = item.first.min(slice.first);
            item.last = item.last.max(slice.last);
            item.level = None;
            item.tables = true;
        }
    }

    /// Issues the invalidations; the stores they are about become visible first. Returns whether there were any.
    pub fn issue<F: Format, P: Platform>(&self, platform: &P, target: Target) -> bool {
        if self.is_empty() {
            return false;
        }
        platform.barrier(Barrier::Publish);
        let operations = self.as_slice().iter().fold(0u64, |sum, item| {
            let shift = item.level.map_or(F::PAGE_SHIFT, F::shift);
            // They are fewer than there are pages in as many input spaces as there can be ranges: no overflow.
            sum.wrapping_add(((item.last - item.first) >> shift) + 1)
        });
        let what = if self.everything
            || self.overflowed
            || operations > platform.caps().invalidate_all_above
        {
            What::Everything
        } else {
            What::Ranges(self.as_slice())
        };
        platform.invalidate(&target.forgetting(platform, what));
        true
    }

    /// Issues the invalidations and waits until they are complete.
    pub fn run<F: Format, P: Platform>(&self, platform: &P, target: Target) {
        if self.issue::<F, P>(platform, target) {
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
/// space.map(Span::new(Va::new(0x20_0000), 2 << 20)?, Pa::new(0), Attrs::USER_DATA)?;
/// let leaf = space.query(Va::new(0x30_0000)).unwrap();
/// assert_eq!((leaf.input(), leaf.frame(), leaf.level()), (Va::new(0x20_0000), Pa::new(0), Level::new(1)));
/// assert!(format!("{leaf:?}").starts_with("Leaf { input: Va(0x200000), frame: Pa(0x0), size: 0x200000, attrs: "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Leaf<F: Format> {
    input: u64,
    entry: u64,
    level: Level,
    denied: Perms,
    format: PhantomData<F>,
}

/// What it means, and its entry as it is in memory.
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

    /// The memory that it translates to.
    #[inline(always)]
    pub fn memory(&self) -> Span<Pa> {
        Span::of_leaf(self.frame(), self.size())
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
/// flush that it belongs to, and once.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
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
/// let completed = gather.issue().complete();
/// let frames: Vec<_> =
///     held.into_iter().filter_map(|leaf| completed.release(leaf).ok()).map(|l| l.frame()).collect();
/// assert_eq!(frames, [Pa::new(0x10_0000), Pa::new(0x10_1000)]);
/// # completed.finish(|_| ());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "what is held has to be released on completion, or it leaks"]
pub struct Held<T> {
    value: T,
    serial: u64,
}

impl<T> Held<T> {
    #[inline(always)]
    pub(crate) fn new(value: T, serial: u64) -> Self {
        Self { value, serial }
    }

    /// Whether the flush of this number holds it.
    #[inline(always)]
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
    /// The memory that the leaf translated to: what an allocator wants back, and what can be [joined](Held::join).
    #[inline]
    pub fn memory(self) -> Held<Span<Pa>> {
        Held::new(self.value.memory(), self.serial)
    }
}

impl Held<Span<Pa>> {
    /// Adds what follows in memory, and is held by the same flush: of a range whose frames are consecutive one word is kept, or
    /// two, and not a leaf for each page.
    ///
    /// # Errors
    /// Gives it back if it does not follow, or another flush holds it.
    ///
    /// ```
    /// use core::ops::ControlFlow;
    /// use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, flush::Held, format::X86_64, hosted::Hosted};
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
    /// // Pages of tables that were not cut off, at both ends: 508 and 4.
    /// let mut free: Vec<Span<Pa>> = held.into_iter().filter_map(|it| completed.release(it).ok()).collect();
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
            Some(both) if self.serial == next.serial => {
                self.value = both;
                Ok(())
            }
            _ => Err(next),
        }
    }
}

/// Numbers of flushes come from here in blocks, so that no two flushes of any two spaces have the same.
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

/// Where to go on after an edit or a settling that stopped before the end.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Change, Level, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
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
pub(crate) struct Detached {
    /// The newest root that is chained, as its [word](Root::word) and its first address; its link holds those of the next.
    head: (u64, u64),
    /// So many are initialised.
    len: usize,
    unlinked: [MaybeUninit<(u64, u64)>; MAX_UNLINKED],
}

impl Detached {
    #[inline(always)]
    const fn new() -> Self {
        Self {
            head: (0, 0),
            len: 0,
            unlinked: [const { MaybeUninit::uninit() }; MAX_UNLINKED],
        }
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.head.0 == 0
    }

    /// Takes all of it. Copies no more than there is.
    #[inline(always)]
    pub fn take(&mut self) -> Self {
        let mut taken = Self::new();
        taken.head = core::mem::take(&mut self.head);
        taken.len = core::mem::take(&mut self.len);
        for (to, from) in taken.unlinked[..taken.len].iter_mut().zip(&self.unlinked) {
            *to = *from;
        }
        taken
    }

    fn push<P: Platform>(&mut self, platform: &P, root: Root) {
        let packed = (root.word(), root.first);
        if let Some(link) = platform.link_of(root.frame) {
            link.set(self.head.0, self.head.1);
            self.head = packed;
        } else if let Some(place) = self.unlinked.get_mut(self.len) {
            place.write(packed);
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
            // SAFETY: places below `len` were written by `push`.
            let (word, first) = unsafe { self.unlinked.get(self.len)?.assume_init() };
            return Root::from_word(word, first).map(|root| (root, None));
        }
        let root = Root::from_word(self.head.0, self.head.1)?;
        self.head = platform.link_of(root.frame)?.get();
        Some((root, None))
    }

    /// Visits the leaves of the sub-trees, and frees their tables, as [`Completed::settle`] says.
    ///
    /// # Safety
    /// 1. The invalidation that covers the tables is complete, and every software walk that may hold them is over.
    unsafe fn settle<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        current: &mut Option<(Root, Option<Slice>)>,
        visit: impl FnMut(Leaf<F>) -> ControlFlow<()>,
    ) -> bool {
        let mut settle = Settle {
            platform,
            visit,
            stop: false,
            denied: Denied::new(Perms::empty()),
            format: PhantomData,
        };
        loop {
            let next = current.take().or_else(|| self.pop(platform));
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
                return self.is_empty();
            }
        }
    }
}

/// What edits have left in a gather.
pub(crate) struct Flush {
    pub ranges: Ranges,
    /// There is something that walkers have to see, besides what they have to forget.
    pub news: bool,
    pub detached: Detached,
}

impl Flush {
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            ranges: Ranges::new(),
            news: false,
            detached: Detached::new(),
        }
    }

    /// Whether a table in `frame` can be carried.
    #[inline]
    pub fn has_room<P: Platform>(&self, platform: &P, frame: Pa) -> bool {
        self.detached.len < MAX_UNLINKED || platform.link_of(frame).is_some()
    }

    /// Carries a table that was cut off, with all below it.
    pub fn carry<P: Platform>(
        &mut self,
        platform: &P,
        frame: Pa,
        level: Level,
        first: u64,
        denied: Perms,
        fate: Fate,
    ) {
        let root = Root {
            frame,
            level,
            fate,
            denied,
            first,
        };
        self.detached.push(platform, root);
    }

    /// Makes the edits visible and issues the invalidations, of which none is left then. Whether there were any.
    #[inline]
    pub fn issue<F: Format, P: Platform>(&mut self, platform: &P, target: Target) -> bool {
        let issued = self.ranges.issue::<F, P>(platform, target);
        if self.news && !issued {
            platform.barrier(Barrier::Publish);
        }
        self.news = false;
        self.ranges.clear();
        issued
    }

    /// Settles what was cut off, without stopping.
    ///
    /// # Safety
    /// As for [`Detached::settle`].
    #[inline]
    pub unsafe fn settle<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        mut leaves: impl FnMut(Leaf<F>),
    ) {
        if !self.detached.is_empty() {
            // SAFETY: passed on. The visitor never breaks off, so one call settles everything.
            let _settled = unsafe {
                self.detached
                    .settle::<F, P>(platform, &mut None, move |leaf| {
                        leaves(leaf);
                        ControlFlow::Continue(())
                    })
            };
        }
    }
}

mod sealed {
    pub trait Sealed {}
}
pub(crate) use sealed::Sealed;

/// How the edits of a gather end: alone, or beside others that may be walking what was cut off.
pub trait End<F: Format, P: Platform>: Sealed {
    /// What there is when every processor has forgotten.
    type Completed;

    #[doc(hidden)]
    fn complete(self, completed: Completed<F, P>) -> Self::Completed;
}

/// The end of exclusive edits: what was cut off can be settled.
///
/// ```
/// use tablewright::flush::{Alone, End};
/// use tablewright::{format::X86_64, hosted::Hosted};
/// fn is_an_end<E: End<X86_64<4>, Hosted>>() {}
/// is_an_end::<Alone>();
/// ```
#[derive(Debug)]
pub struct Alone {
    pub(crate) wait: bool,
}

impl Sealed for Alone {}

impl<F: Format, P: Platform> End<F, P> for Alone {
    type Completed = Completed<F, P>;

    #[inline]
    fn complete(self, completed: Completed<F, P>) -> Completed<F, P> {
        if self.wait {
            completed.platform.barrier(Barrier::Complete);
        }
        completed
    }
}

/// What has been issued: the processors are forgetting. The space may be edited meanwhile.
///
/// ```
/// # use tablewright::{AddressSpace, Attrs, Change, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
/// # space.make_live();
///
/// let mut gather = space.gather();
/// gather.protect(span, Change::new().perms(Perms::READ))?;
/// let issued = gather.issue();
/// // ... something else, while the processors forget ...
/// issued.complete().finish(|_| ());
/// assert_eq!(platform.counts().completions, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "what was issued has to be completed; the tables that it carries leak"]
pub struct Issued<F: Format, P: Platform, E: End<F, P> = Alone> {
    pub(crate) completed: Completed<F, P>,
    pub(crate) end: E,
}

impl<F: Format, P: Platform, E: End<F, P>> Issued<F, P, E> {
    /// Waits until every processor has forgotten. Costs nothing if nothing had to be invalidated.
    #[inline]
    pub fn complete(self) -> E::Completed {
        self.end.complete(self.completed)
    }
}

/// A flush that is complete: what was cut off is out of reach, and may be settled and freed.
///
/// ```
/// # use core::ops::ControlFlow;
/// # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// # let span = Span::new(Va::new(0), 4 << 20)?;
/// # space.map(span, Pa::new(0), Attrs::KERNEL_DATA)?;
/// # space.make_live();
///
/// let mut gather = space.gather();
/// // A whole gigabyte: the table below it is cut off at once, with its two leaves.
/// let all = Span::new(Va::new(0), 1 << 30)?;
/// assert!(gather.unmap(all, |_| ControlFlow::Continue(()))?.is_done());
/// let mut completed = gather.issue().complete();
/// let mut leaves = 0;
/// while !completed.settle(|_| { leaves += 1; ControlFlow::Break(()) }) {}
/// assert_eq!(leaves, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the tables that were cut off are freed by settling"]
pub struct Completed<F: Format, P: Platform> {
    platform: P,
    serial: u64,
    detached: Detached,
    /// The sub-tree being settled, and what is left of it.
    current: Option<(Root, Option<Slice>)>,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Completed<F, P> {
    /// What becomes of it is not to be had before it is true: it stays inside of an [`Issued`] until then.
    #[inline]
    pub(crate) fn new(platform: P, serial: u64, detached: Detached) -> Self {
        Self {
            platform,
            serial,
            detached,
            current: None,
            format: PhantomData,
        }
    }

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
    #[inline]
    pub fn release<T>(&self, held: Held<T>) -> Result<T, Held<T>> {
        if held.is_of(self.serial) {
            Ok(held.value)
        } else {
            Err(held)
        }
    }

    /// Visits the leaves of the sub-trees that were cut off, and frees their tables.
    ///
    /// The visitor may break off after any leaf; that leaf counts as visited, and the next call goes on behind it.
    /// Returns whether everything is settled. If the visitor unwinds, what is left of its sub-tree leaks.
    #[must_use = "what is not settled is not freed"]
    pub fn settle(&mut self, visit: impl FnMut(Leaf<F>) -> ControlFlow<()>) -> bool {
        // SAFETY: it is complete, and out of the hands of software: exclusive edits have no software walks beside them, and
        // what shared edits have cut off comes out of a `Cut` when they are over (1.).
        unsafe {
            self.detached
                .settle::<F, P>(&self.platform, &mut self.current, visit)
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
                    leaves &= F::kind(*entry, Level::PAGE) == Kind::Leaf
                        && !F::is_parked(*entry)
                        && *entry & F::CONTIGUOUS == 0;
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

    #[inline(always)]
    fn leaves(&self) -> bool {
        true
    }

    fn leave(&mut self, level: Level, child: Pa) {
        if let Some(below) = level.down() {
            // SAFETY: the sub-tree is out of reach of walkers (2.), and the walk passes each of its tables once; one
            // that goes on after a stop starts behind the tables that were freed before it (1.).
            unsafe { self.platform.free_table(child, below) };
        }
    }
}

/// Visits the leaves in some slices of a tree, and frees all tables but the root, in one pass.
///
/// # Safety
/// 1. `root` holds the root of a tree of this format on `platform`, which nothing else walks or edits any more.
/// 2. Slices end where entries of the root do.
pub(crate) unsafe fn settle_all<F: Format, P: Platform>(
    platform: &P,
    root: Pa,
    slices: impl Iterator<Item = Slice>,
    leaves: &mut impl FnMut(Leaf<F>),
) {
    let mut settle = Settle::<F, P, _> {
        platform,
        visit: |leaf| {
            leaves(leaf);
            ControlFlow::Continue(())
        },
        stop: false,
        denied: Denied::new(Perms::empty()),
        format: PhantomData,
    };
    for slice in slices {
        // SAFETY: the root (1.). Each table is below one entry of it, and the walk passes it once (2.).
        let _: ControlFlow<u64> =
            unsafe { walk::<F, P, _>(platform, root, F::root_level(), slice, &mut settle) };
    }
}

/// Frees the table in `frame` and every table below it. The leaves are not looked at.
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

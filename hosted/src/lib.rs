//! A platform on ordinary memory: table frames are pages of a hosted program.
//!
//! For tests and benchmarks of the engine and of its embedders. No processor walks these tables, so
//! barriers and invalidations do nothing but be counted, and written down where a test wants to see
//! them. The frames are handed out one after the other from one region; the first has the physical
//! address [`Hosted::BASE`].
//!
//! Provenance is kept: a pointer to a frame is made from the pointer to the region, never from an
//! integer.

mod threads;

pub use threads::{Event, Threads, Walk};

use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use tablewright::{
    Barrier, Caps, Entry, Invalidation, Level, Pa, Platform, Stale, TableLink, What, prefetch,
};

/// Default capabilities of the hosted platforms: [`Caps::CONSERVATIVE`], and every leaf that a
/// format has, because no processor reads these tables.
///
/// ```
/// use tablewright::{Caps, Level};
/// use tablewright_hosted as hosted;
/// use tablewright_hosted::Hosted;
/// // As on a processor of x86-64 without pages of 1 GiB.
/// let platform =
///     Hosted::new(8, 12).with_caps(Caps { largest_leaf: Level::new(1), ..hosted::CAPS });
/// ```
pub const CAPS: Caps = Caps { largest_leaf: Level::ANY, ..Caps::CONSERVATIVE };

/// Counts of the operations that a platform was asked for.
///
/// ```
/// use tablewright::{AddressSpace, format::X86_64};
/// use tablewright_hosted::{Counts, Hosted};
/// let platform = Hosted::new(8, 12);
/// let _space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// assert_eq!(platform.counts(), Counts { tables: 1, allocations: 1, ..Counts::default() });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tables that are allocated and not freed.
    pub tables: u64,
    /// Tables that were allocated.
    pub allocations: u64,
    /// Invalidations issued: one for each flush, however many ranges it has.
    pub invalidations: u64,
    /// Waits for invalidations to complete.
    pub completions: u64,
    /// Barriers that publish stores.
    pub publications: u64,
    /// Frames freed that were not allocated: a fault of the caller.
    pub bad_frees: u64,
}

/// An [invalidation](Invalidation) that a platform was asked for, to be looked at later.
///
/// ```
/// # use tablewright::{AddressSpace, Attrs, Change, Pa, Span, Va, format::X86_64};
/// # use tablewright_hosted::Hosted;
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap().with_id(3);
/// let span = Span::new(Va::new(0x7000), 0x2000)?;
/// space.map(span, Pa::new(0x7000), Attrs::USER_DATA)?;
/// space.make_live();
///
/// platform.record();
/// let mut gather = space.gather();
/// gather.protect(span, Change::new().write_protect())?;
/// gather.finish(|_| ());
/// let log = platform.take_log();
/// assert_eq!((log.len(), log[0].id, log[0].spans()), (1, 3, vec![(0x7000, 0x8fff)]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The root of the space's tables.
    pub root: Pa,
    /// The identity of the space.
    pub id: u16,
    /// Whether global translations were meant.
    pub global: bool,
    /// Whether everything was meant, and no ranges.
    pub everything: bool,
    /// The ranges.
    pub ranges: Vec<Stale>,
}

impl Told {
    /// The first and the last address of each range.
    pub fn spans(&self) -> Vec<(u64, u64)> {
        let ends = |range: &Stale| (range.first, range.last);
        self.ranges.iter().map(ends).collect()
    }

    /// Whether translations of this input address are to be forgotten.
    pub fn covers(&self, input: u64) -> bool {
        let is_in = |range: &Stale| (range.first..=range.last).contains(&input);
        self.everything || self.ranges.iter().any(is_in)
    }

    /// The invalidation, as the platform was given it.
    pub fn invalidation(&self) -> Invalidation<'_> {
        Invalidation {
            root: self.root,
            id: self.id,
            global: self.global,
            what: if self.everything { What::Everything } else { What::Ranges(&self.ranges) },
        }
    }
}

impl From<&Invalidation<'_>> for Told {
    fn from(told: &Invalidation<'_>) -> Self {
        let (everything, ranges) = match told.what {
            What::Everything => (true, Vec::new()),
            What::Ranges(ranges) => (false, ranges.to_vec()),
        };
        Self { root: told.root, id: told.id, global: told.global, everything, ranges }
    }
}

/// A region of memory that table frames come from. With debug assertions each is full of ones when
/// it is handed out.
///
/// ```
/// use tablewright::{Level, Platform};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(2, 12);
/// let frame = platform.alloc_table(Level::PAGE).unwrap();
/// assert_eq!(platform.counts().tables, 1);
/// // SAFETY: the frame was just allocated (1.), and never linked (2.).
/// unsafe { platform.free_table(frame, Level::PAGE) };
/// assert_eq!(platform.counts().tables, 0);
/// ```
pub struct Hosted {
    region: NonNull<Entry>,
    layout: Option<Layout>,
    page_shift: u32,
    frames: usize,
    /// Frames never handed out start here.
    fresh: Cell<usize>,
    free: RefCell<Vec<u32>>,
    used: RefCell<Vec<u64>>,
    links: Option<Vec<TableLink>>,
    caps: Caps,
    /// Allocations left before they fail, if they are to fail.
    budget: Cell<Option<u64>>,
    counts: Cell<Counts>,
    log: RefCell<Option<Vec<Told>>>,
}

impl Hosted {
    /// The physical address of the first frame: some address that is not small.
    pub const BASE: Pa = Pa::new(0x40_0000_0000);

    /// Room for `frames` tables of `1 << page_shift` bytes.
    ///
    /// # Panics
    /// If `page_shift` is not that of a granule (12, 14 or 16), or the memory cannot be had.
    pub fn new(frames: usize, page_shift: u32) -> Self {
        assert!(matches!(page_shift, 12 | 14 | 16), "a granule has 4, 16 or 64 KiB");
        let entry = size_of::<Entry>();
        let entries = frames.max(1) << (page_shift - 3);
        let layout = Layout::from_size_align(entries * entry, 1 << page_shift);
        let Ok(layout) = layout else {
            panic!("{frames} frames do not fit into the address space");
        };
        // SAFETY: the layout has a size, and zeroed memory is a valid Entry.
        let Some(region) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        let region = region.cast::<Entry>();
        Self::make(region, Some(layout), frames, page_shift)
    }

    /// Frames in memory that belongs to the caller.
    ///
    /// # Safety
    /// 1. `region` is valid for reads and writes of `frames << page_shift` bytes and aligned to a
    ///    frame, for as long as the platform exists, and nothing else uses it meanwhile.
    ///
    /// # Panics
    /// If `page_shift` is not that of a granule.
    pub unsafe fn over(region: NonNull<u8>, frames: usize, page_shift: u32) -> Self {
        assert!(matches!(page_shift, 12 | 14 | 16), "a granule has 4, 16 or 64 KiB");
        Self::make(region.cast(), None, frames, page_shift)
    }

    fn make(
        region: NonNull<Entry>,
        layout: Option<Layout>,
        frames: usize,
        page_shift: u32,
    ) -> Self {
        Self {
            region,
            layout,
            page_shift,
            frames,
            fresh: Cell::new(0),
            free: RefCell::new(Vec::new()),
            used: RefCell::new(vec![0; frames.div_ceil(64)]),
            links: Some((0..frames).map(|_| TableLink::new()).collect()),
            caps: CAPS,
            budget: Cell::new(None),
            counts: Cell::new(Counts::default()),
            log: RefCell::new(None),
        }
    }

    /// This platform with other capabilities.
    pub fn with_caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// This platform without side memory for tables.
    pub fn without_links(mut self) -> Self {
        self.links = None;
        self
    }

    /// Lets `allocations` more tables be allocated, and no more after that; `None` for as many as
    /// there are.
    pub fn limit_allocations(&self, allocations: Option<u64>) {
        self.budget.set(allocations);
    }

    /// The operations that it was asked for so far.
    pub fn counts(&self) -> Counts {
        self.counts.get()
    }

    /// Keeps a list of invalidations from now on, one for each flush.
    pub fn record(&self) {
        *self.log.borrow_mut() = Some(Vec::new());
    }

    /// The invalidations since [`record`](Hosted::record) or the last call.
    pub fn take_log(&self) -> Vec<Told> {
        self.log.borrow_mut().as_mut().map(core::mem::take).unwrap_or_default()
    }

    /// Reads the entry `index` of the table in `frame`, which for concatenated tables may lie in a
    /// frame behind it; `None` if there is no such frame or entry. This is how a walker that knows
    /// nothing of the engine reads the tables.
    pub fn read(&self, frame: Pa, index: usize) -> Option<u64> {
        let number = self.number(frame)?;
        if number + (index >> (self.page_shift - 3)) >= self.frames {
            return None;
        }
        // SAFETY: the frame and the entry lie inside the region.
        Some(unsafe { self.pointer(number).add(index).as_ref() }.load())
    }

    #[inline]
    fn update(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    #[inline]
    fn number(&self, frame: Pa) -> Option<usize> {
        let offset = frame.get().checked_sub(Self::BASE.get())?;
        let number = (offset >> self.page_shift) as usize;
        (number < self.frames).then_some(number)
    }

    #[inline]
    fn pointer(&self, number: usize) -> NonNull<Entry> {
        // SAFETY: the callers pass numbers of frames of the region.
        unsafe { self.region.add(number << (self.page_shift - 3)) }
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: the region was allocated with this layout.
            unsafe { dealloc(self.region.cast().as_ptr(), layout) };
        }
    }
}

/// Fills frames from `first` on, if this is a build with debug assertions: an engine that leaves
/// the content of a frame in a table is found by what that says.
#[inline]
fn soil(first: NonNull<Entry>, page_shift: u32, frames: usize) {
    if cfg!(debug_assertions) {
        // SAFETY: the callers pass frames of their region that they are about to hand out: nothing
        // else uses them, and any bits are an Entry.
        unsafe { first.write_bytes(0xff, frames << (page_shift - 3)) };
    }
}

// SAFETY: frames lie inside the region at multiples of their size (1., 2.): `number` refuses
// others; a frame is marked as used when it is handed out and handed out only when it is not; those
// of a root are neighbours, and aligned, as `BASE` is, to more than any root has. There is one link
// for each frame (3.). No processor walks these tables, or remembers what they said (4. to 6.).
// There is no clone, and a reference is the same platform (7.).
unsafe impl Platform for Hosted {
    #[inline]
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        if let Some(left) = self.budget.get() {
            self.budget.set(Some(left.checked_sub(1)?));
        }
        let number = match self.free.borrow_mut().pop() {
            Some(number) => number as usize,
            None => {
                let number = self.fresh.get();
                if number == self.frames {
                    return None;
                }
                self.fresh.set(number + 1);
                number
            }
        };
        self.used.borrow_mut()[number / 64] |= 1 << (number % 64);
        soil(self.pointer(number), self.page_shift, 1);
        self.update(|counts| {
            counts.tables += 1;
            counts.allocations += 1;
        });
        Pa::checked_add(Self::BASE, (number as u64) << self.page_shift)
    }

    #[inline]
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        let Some(number) = self.number(frame) else {
            return self.update(|counts| counts.bad_frees += 1);
        };
        let word = &mut self.used.borrow_mut()[number / 64];
        if *word & 1 << (number % 64) == 0 {
            return self.update(|counts| counts.bad_frees += 1);
        }
        *word &= !(1 << (number % 64));
        self.free.borrow_mut().push(number as u32);
        self.update(|counts| counts.tables -= 1);
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        if tables == 1 {
            return self.alloc_table(level);
        }
        let left = self.budget.get();
        let left = match left {
            Some(left) => Some(left.checked_sub(tables as u64)?),
            None => None,
        };
        let mut used = self.used.borrow_mut();
        let is_free = |number: usize| used[number / 64] & 1 << (number % 64) == 0;
        let first = (0..self.frames / tables)
            .map(|place| place * tables)
            .find(|&first| (first..first + tables).all(is_free))?;
        let end = first + tables;
        for number in first..end {
            used[number / 64] |= 1 << (number % 64);
        }
        // Frames that were never handed out, and are passed over, can be had one by one.
        let fresh = self.fresh.get();
        let mut free = self.free.borrow_mut();
        free.retain(|&number| !(first..end).contains(&(number as usize)));
        free.extend((fresh..first).map(|number| number as u32));
        self.fresh.set(fresh.max(end));
        self.budget.set(left);
        soil(self.pointer(first), self.page_shift, tables);
        self.update(|counts| {
            counts.tables += tables as u64;
            counts.allocations += tables as u64;
        });
        Pa::checked_add(Self::BASE, (first as u64) << self.page_shift)
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        for table in 0..tables as u64 {
            let frame = Pa::new(root.get().wrapping_add(table << self.page_shift));
            // SAFETY: passed on: a root is that many frames, each of which may have been a table by
            // itself.
            unsafe { self.free_table(frame, level) };
        }
    }

    #[inline]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        debug_assert!(self.number(frame).is_some(), "no frame of this platform");
        let offset = frame.get().wrapping_sub(Self::BASE.get());
        // SAFETY: the frame, which `alloc_table` handed out, lies inside the region
        // (Platform::table 1.).
        unsafe { self.region.byte_add(offset as usize) }
    }

    #[inline]
    fn prefetch(&self, frame: Pa) {
        if let Some(number) = self.number(frame) {
            prefetch(self.pointer(number));
        }
    }

    #[inline]
    fn barrier(&self, barrier: Barrier) {
        self.update(|counts| match barrier {
            Barrier::Publish => counts.publications += 1,
            Barrier::Complete => counts.completions += 1,
        });
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.update(|counts| counts.invalidations += 1);
        if let Some(log) = self.log.borrow_mut().as_mut() {
            log.push(what.into());
        }
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    #[inline]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.links.as_ref()?.get(self.number(frame)?)
    }
}

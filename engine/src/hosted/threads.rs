//! A platform on ordinary memory for edits by several threads at once.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Mutex;
use std::vec::Vec;

use crate::addr::{Level, Pa};
use crate::entry::{Entry, TableLink};
use crate::flush::Invalidation;
use crate::platform::{Barrier, Caps, Platform};
use crate::shared::{Epochs, Moment, Quiescence, SharedPlatform, Slot, Upkeep, Walking};

std::thread_local! {
    static CPU: Cell<u16> = const { Cell::new(0) };
}

/// Frames for threads that edit one tree at once. Each says once which processor it plays.
///
/// ```
/// use std::thread;
/// use tablewright::hosted::Threads;
/// use tablewright::shared::{NewLeaf, SharedSpace, TableCache};
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Va, format::X86_64};
///
/// let platform = Threads::new(64, 12, 2);
/// let space = SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).unwrap());
/// thread::scope(|scope| {
///     for cpu in 0..2 {
///         let (space, platform) = (&space, &platform);
///         scope.spawn(move || {
///             platform.play(cpu);
///             let (mut tables, mut flush) = (TableCache::new(), space.flush());
///             for page in 0..100 {
///                 let at = (page * 2 + cpu as u64) << 12;
///                 let leaf = NewLeaf::new(Va::new(at), Pa::new(at), Level::PAGE, Attrs::USER_DATA).unwrap();
///                 while tables.top_up::<X86_64<4>, _>(platform, 3) && space.map(&leaf, &mut tables, &mut flush).is_err() {}
///             }
///             tables.release(platform);
///             assert!(flush.finish(|_| ()).is_ok());
///         });
///     }
/// });
/// assert_eq!(space.query(Va::new(199 << 12)).unwrap().frame(), Pa::new(199 << 12));
/// ```
pub struct Threads {
    region: NonNull<Entry>,
    layout: Layout,
    page_shift: u32,
    links: Vec<TableLink>,
    fresh: AtomicU64,
    free: Mutex<Vec<u64>>,
    quiet: Quiet,
    caps: Caps,
    upkeep: Upkeep,
    cleaned: AtomicU64,
}

/// How walks are known to be over.
enum Quiet {
    Epochs(Epochs<'static>),
    States(Quiescence<'static>),
}

// SAFETY: the region is reached through atomics, and everything else is `Sync` by itself.
unsafe impl Sync for Threads {}
// SAFETY: the region belongs to this platform and is not bound to a thread.
unsafe impl Send for Threads {}

impl Threads {
    /// The physical address of the first frame.
    pub const BASE: Pa = Pa::new(0x40_0000_0000);

    /// Room for `frames` tables of `1 << page_shift` bytes, for as many threads at a time as `processors`.
    ///
    /// # Panics
    /// If `page_shift` is not that of a granule (12, 14 or 16), or the memory cannot be had.
    pub fn new(frames: usize, page_shift: u32, processors: usize) -> Self {
        assert!(
            matches!(page_shift, 12 | 14 | 16),
            "a granule has 4, 16 or 64 KiB"
        );
        let layout = Layout::from_size_align(frames.max(1) << page_shift, 1 << page_shift);
        let Ok(layout) = layout else {
            panic!("{frames} frames do not fit into the address space");
        };
        // SAFETY: the layout has a size, and zeroed memory is a valid Entry.
        let Some(region) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        // A handful of cache lines, for as long as the program runs.
        let slots: Vec<Slot> = (0..processors.max(1)).map(|_| Slot::new()).collect();
        Self {
            region: region.cast(),
            layout,
            page_shift,
            links: (0..frames).map(|_| TableLink::new()).collect(),
            fresh: AtomicU64::new(0),
            free: Mutex::new(Vec::new()),
            quiet: Quiet::Epochs(Epochs::new(slots.leak())),
            caps: Caps::CONSERVATIVE,
            upkeep: Upkeep::NONE,
            cleaned: AtomicU64::new(0),
        }
    }

    /// On hardware that can do this.
    #[must_use]
    pub fn with_caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// On hardware whose caches need this.
    #[must_use]
    pub fn with_upkeep(mut self, upkeep: Upkeep) -> Self {
        self.upkeep = upkeep;
        self
    }

    /// With quiescent states instead of epochs: threads say when they hold no table, by [`pass`](Threads::pass) and
    /// [`rest`](Threads::rest).
    #[must_use]
    pub fn with_quiescent_states(mut self) -> Self {
        if let Quiet::Epochs(epochs) = &self.quiet {
            self.quiet = Quiet::States(Quiescence::new(epochs.slots()));
        }
        self
    }

    /// This thread holds no table, and may walk from now on. Without quiescent states it does nothing.
    #[inline(always)]
    pub fn pass(&self) {
        if let Quiet::States(states) = &self.quiet {
            states.pass(usize::from(CPU.get()));
        }
    }

    /// This thread holds no table, and will not walk before it passes again.
    pub fn rest(&self) {
        if let Quiet::States(states) = &self.quiet {
            states.rest(usize::from(CPU.get()));
        }
    }

    /// This thread is processor number `cpu` from now on: no two threads that edit at once are the same.
    pub fn play(&self, cpu: u16) {
        CPU.set(cpu);
    }

    /// Bytes that were cleaned.
    pub fn cleaned(&self) -> u64 {
        self.cleaned.load(Ordering::Relaxed)
    }

    /// Tables that are allocated and not freed.
    pub fn tables(&self) -> u64 {
        let fresh = self.fresh.load(Ordering::Relaxed);
        fresh - self.lock().len() as u64
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        // Nothing panics while it is held.
        self.free
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The entry number `index` of the table in `frame`, as a walker reads it; `None` for what is no frame.
    pub fn read(&self, frame: Pa, index: usize) -> Option<u64> {
        let number = frame.get().checked_sub(Self::BASE.get())? >> self.page_shift;
        let inside =
            number < self.fresh.load(Ordering::Relaxed) && index < 1 << (self.page_shift - 3);
        let offset = ((number as usize) << (self.page_shift - 3)) + index;
        // SAFETY: inside of the region.
        inside.then(|| unsafe { self.region.add(offset).as_ref() }.follow())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; nobody uses it any more.
        unsafe { dealloc(self.region.as_ptr().cast(), self.layout) };
    }
}

// SAFETY: a frame is handed out once until it is freed (1.), lies at its distance from the first (2.) and has its own
// link (3.). Barriers and invalidations have nothing to do, since nobody walks (5.). A reference is the platform (6.).
unsafe impl Platform for Threads {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let number = self.lock().pop().or_else(|| {
            let more = |fresh| (fresh < self.links.len() as u64).then_some(fresh + 1);
            self.fresh
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
                .ok()
        })?;
        Some(Pa::new(Self::BASE.get() + (number << self.page_shift)))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        let number = (frame.get() - Self::BASE.get()) >> self.page_shift;
        self.lock().push(number);
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        if tables == 1 {
            return self.alloc_table(level);
        }
        let tables = tables as u64;
        // Out of what was never handed out; frames that are passed over can be had one by one.
        let more = |fresh: u64| {
            let end = fresh.next_multiple_of(tables) + tables;
            (end <= self.links.len() as u64).then_some(end)
        };
        let before = self
            .fresh
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        let first = before.next_multiple_of(tables);
        self.lock().extend(before..first);
        Some(Pa::new(Self::BASE.get() + (first << self.page_shift)))
    }

    unsafe fn free_root(&self, root: Pa, _: Level, tables: usize) {
        let first = (root.get() - Self::BASE.get()) >> self.page_shift;
        self.lock().extend(first..first + tables as u64);
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let offset = (frame.get() - Self::BASE.get()) as usize / size_of::<Entry>();
        // SAFETY: the caller vouches for a frame of this platform.
        unsafe { self.region.add(offset) }
    }

    #[inline(always)]
    fn barrier(&self, _: Barrier) {}

    #[inline(always)]
    fn invalidate(&self, _: &Invalidation) {}

    #[inline(always)]
    fn caps(&self) -> Caps {
        self.caps
    }

    #[inline(always)]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let number = (frame.get().wrapping_sub(Self::BASE.get())) >> self.page_shift;
        self.links.get(number as usize)
    }
}

// SAFETY: the epochs keep both promises; a thread that plays no processor of this platform is refused. So do quiescent
// states, of threads that pass and rest as they should, which is theirs to see to.
unsafe impl SharedPlatform for Threads {
    type Walk<'a> = Walking<'a>;

    #[inline(always)]
    fn enter(&self) -> Walking<'_> {
        let Quiet::Epochs(epochs) = &self.quiet else {
            return Walking::UNANNOUNCED;
        };
        match epochs.enter(usize::from(CPU.get())) {
            Some(walking) => walking,
            None => panic!("this thread plays a processor that there is not"),
        }
    }

    fn cut(&self) -> Moment {
        match &self.quiet {
            Quiet::Epochs(epochs) => epochs.advance(),
            Quiet::States(states) => states.advance(),
        }
    }

    fn is_past(&self, moment: Moment) -> bool {
        match &self.quiet {
            Quiet::Epochs(epochs) => epochs.is_past(moment),
            Quiet::States(states) => states.is_past(moment),
        }
    }

    #[inline(always)]
    fn upkeep(&self) -> Upkeep {
        self.upkeep
    }

    fn clean(&self, _: Pa, size: u64) {
        self.cleaned.fetch_add(size, Ordering::Relaxed);
    }
}

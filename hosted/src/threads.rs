//! A platform on ordinary memory for edits by several threads at once.
//!
//! Each walk announces itself in a slot of its own, which it claims by an exchange. A walk that
//! finds none free is put on a list under a lock, which is slower.

use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tablewright::shared::{
    CacheMaintenance, Epochs, GracePeriod, SharedPlatform, WalkSlot, Walking,
};
use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform, TableLink};

use crate::Told;

std::thread_local! {
    /// The slot that this thread tries first.
    static FIRST: Cell<usize> = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed))
    };
}

/// Something that [`Threads`] was asked to do, in the order in which it was.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::{Event, Threads};
///
/// let platform = Threads::new(64, 12, 1).recording();
/// let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let span = Span::new(Va::new(0), 2 << 20)?;
/// space.map(span, Pa::new(0), Mapping::new(Attrs::USER_DATA).pages_only())?;
/// space.make_live();
/// platform.take_events();
///
/// let mut gather = space.gather();
/// assert!(gather.unmap(span, |_| ControlFlow::Continue(()))?.is_done());
/// gather.finish(|_| ());
/// // No table is freed before the invalidation of what it translated is complete.
/// let events = platform.take_events();
/// let complete = events.iter().position(|event| *event == Event::Complete).unwrap();
/// let freed = events.iter().position(|event| matches!(event, Event::Free(_))).unwrap();
/// assert!(complete < freed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// [`Barrier::Publish`].
    Publish,
    /// [`Barrier::Complete`].
    Complete,
    /// [`Platform::invalidate`].
    Invalidate(Told),
    /// [`SharedPlatform::invalidate_here`].
    InvalidateHere(Told),
    /// [`Platform::free_table`], or one of the frames of [`Platform::free_root`].
    Free(Pa),
}

/// Frames for threads that edit one tree at once.
///
/// ```
/// use std::thread;
/// use tablewright::shared::{NewLeaf, SharedSpace};
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Va, format::X86_64};
/// use tablewright_hosted::Threads;
///
/// let platform = Threads::new(64, 12, 2);
/// let space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let space = SharedSpace::new(space).ok().unwrap();
/// thread::scope(|scope| {
///     for cpu in 0..2 {
///         let space = &space;
///         scope.spawn(move || {
///             let mut gather = space.gather();
///             for page in 0..100 {
///                 let at = (page * 2 + cpu) << 12;
///                 let leaf =
///                     NewLeaf::new(Va::new(at), Pa::new(at), Level::PAGE, Attrs::USER_DATA)
///                         .unwrap();
///                 while gather.top_up(3) && gather.map(&leaf).is_err() {}
///             }
///             assert!(gather.finish(|_| ()).is_ok());
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
    has_links: bool,
    frames: Mutex<Frames>,
    /// Frames never handed out start here. Written under the lock of `frames`.
    fresh: AtomicU64,
    /// The epochs of `slots`.
    epochs: Epochs<'static>,
    /// From `Box::leak`, and given back by the drop.
    slots: NonNull<[WalkSlot]>,
    /// Which slots belong to a walk.
    claimed: Box<[AtomicBool]>,
    /// The epochs of walks that found no slot.
    listed: Mutex<Vec<u64>>,
    caps: Caps,
    maintenance: CacheMaintenance,
    cleaned: AtomicU64,
    recording: AtomicBool,
    events: Mutex<Vec<Event>>,
}

/// Which frames are handed out.
struct Frames {
    free: Vec<u64>,
    used: Vec<bool>,
    bad_frees: u64,
}

/// A walk of one thread, until this is dropped.
///
/// ```
/// use tablewright::shared::SharedPlatform;
/// use tablewright_hosted::Threads;
/// let platform = Threads::new(8, 12, 1);
/// let walk = platform.enter();
/// let period = platform.grace_period();
/// assert!(!platform.is_over(period));
/// drop(walk);
/// assert!(platform.is_over(period));
/// ```
#[must_use = "the walk ends when this is dropped"]
pub struct Walk<'t> {
    platform: &'t Threads,
    announced: Announced<'t>,
    /// A walk ends on the thread that began it.
    not_send: PhantomData<*const ()>,
}

/// The announcement of a walk.
enum Announced<'t> {
    /// In the slot of this number. `Walk::drop` ends it before it gives the slot up.
    Slot(ManuallyDrop<Walking<'t>>, usize),
    /// On the list, by this epoch.
    List(u64),
}

impl Drop for Walk<'_> {
    #[inline]
    fn drop(&mut self) {
        match &mut self.announced {
            Announced::Slot(walking, number) => {
                // SAFETY: dropped here alone, and not used after that.
                unsafe { ManuallyDrop::drop(walking) };
                // Release: the next walk in this slot comes after the end of this one.
                self.platform.claimed[*number].store(false, Ordering::Release);
            }
            Announced::List(epoch) => {
                let mut listed = lock(&self.platform.listed);
                if let Some(at) = listed.iter().position(|other| other == epoch) {
                    listed.swap_remove(at);
                }
            }
        }
    }
}

/// Nothing panics while one of the locks is held, so what is behind it is in order.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: the region is reached through atomics, and everything else is `Sync` by itself.
unsafe impl Sync for Threads {}
// SAFETY: the region belongs to this platform and is not bound to a thread.
unsafe impl Send for Threads {}

impl Threads {
    /// The physical address of the first frame.
    pub const BASE: Pa = Pa::new(0x40_0000_0000);

    /// Room for `frames` tables of `1 << page_shift` bytes, for `threads` that walk at once. More
    /// may, and wait for a lock.
    ///
    /// # Panics
    /// If `page_shift` is not that of a granule (12, 14 or 16), or the memory cannot be had.
    pub fn new(frames: usize, page_shift: u32, threads: usize) -> Self {
        assert!(matches!(page_shift, 12 | 14 | 16), "a granule has 4, 16 or 64 KiB");
        let layout = Layout::from_size_align(frames.max(1) << page_shift, 1 << page_shift);
        let Ok(layout) = layout else {
            panic!("{frames} frames do not fit into the address space");
        };
        // SAFETY: the layout has a size, and zeroed memory is a valid Entry.
        let Some(region) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        // A thread may have two walks under way.
        let walks = threads.max(1) * 2;
        let slots = Box::leak((0..walks).map(|_| WalkSlot::new()).collect());
        let pointer = NonNull::from(&*slots);
        Self {
            region: region.cast(),
            layout,
            page_shift,
            links: (0..frames).map(|_| TableLink::new()).collect(),
            has_links: true,
            frames: Mutex::new(Frames {
                free: Vec::new(),
                used: vec![false; frames],
                bad_frees: 0,
            }),
            fresh: AtomicU64::new(0),
            epochs: Epochs::new(slots),
            slots: pointer,
            claimed: (0..walks).map(|_| AtomicBool::new(false)).collect(),
            listed: Mutex::new(Vec::new()),
            caps: crate::CAPS,
            maintenance: CacheMaintenance::NONE,
            cleaned: AtomicU64::new(0),
            recording: AtomicBool::new(false),
            events: Mutex::new(Vec::new()),
        }
    }

    /// This platform with other capabilities.
    #[must_use]
    pub fn with_caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// This platform without side memory for tables.
    #[must_use]
    pub fn without_links(mut self) -> Self {
        self.has_links = false;
        self
    }

    /// On hardware whose caches need this.
    #[must_use]
    pub fn with_cache_maintenance(mut self, maintenance: CacheMaintenance) -> Self {
        self.maintenance = maintenance;
        self
    }

    /// Writes down what it is asked, from now on; see [`record`](Threads::record).
    #[must_use]
    pub fn recording(self) -> Self {
        self.record();
        self
    }

    /// Writes down what it is asked, from now on, and forgets what it has written. Threads that use
    /// it at once wait for each other to write.
    pub fn record(&self) {
        lock(&self.events).clear();
        self.recording.store(true, Ordering::Relaxed);
    }

    /// Takes the operations that were recorded since [`record`](Threads::record) or the last call.
    pub fn take_events(&self) -> Vec<Event> {
        core::mem::take(&mut *lock(&self.events))
    }

    /// The invalidations among what [`take_events`](Threads::take_events) returns, one for each
    /// flush.
    pub fn take_log(&self) -> Vec<Told> {
        let told = |event| match event {
            Event::Invalidate(told) => Some(told),
            _ => None,
        };
        self.take_events().into_iter().filter_map(told).collect()
    }

    #[inline]
    fn note(&self, event: impl FnOnce() -> Event) {
        if self.recording.load(Ordering::Relaxed) {
            lock(&self.events).push(event());
        }
    }

    /// Announces a walk in a free slot.
    #[inline]
    fn announce(&self) -> Option<Announced<'_>> {
        let first = FIRST.with(Cell::get);
        let slots = self.claimed.len();
        let number = (0..slots).map(|next| (first + next) % slots).find(|&number| {
            // Acquire: comes after the end of the walk that had the slot before.
            self.claimed[number]
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        })?;
        // SAFETY: the slot is this walk's alone until it is given up (1.), in a thread of a
        // program, which no interrupt walks in (2.). A `Walk` is not `Send` (3.). Nothing else is
        // made of the slots (4.).
        let walking = unsafe { self.epochs.enter(number) }?;
        Some(Announced::Slot(ManuallyDrop::new(walking), number))
    }

    /// Announces a walk on the list.
    ///
    /// The lock orders this with each look at the list. A look that comes later sees the walk. A
    /// look that came before comes after its cut, so that this walk does not find what was cut.
    #[cold]
    fn list(&self) -> Announced<'_> {
        let mut listed = lock(&self.listed);
        let epoch = self.epochs.advance().get();
        listed.push(epoch);
        Announced::List(epoch)
    }

    /// The number of bytes that were cleaned.
    pub fn cleaned(&self) -> u64 {
        self.cleaned.load(Ordering::Relaxed)
    }

    /// Tables that are allocated and not freed.
    pub fn tables(&self) -> u64 {
        let frames = lock(&self.frames);
        self.fresh.load(Ordering::Relaxed) - frames.free.len() as u64
    }

    /// Frames freed that were not allocated: a fault of the caller.
    pub fn bad_frees(&self) -> u64 {
        lock(&self.frames).bad_frees
    }

    /// The number of a frame.
    fn number(&self, frame: Pa) -> Option<u64> {
        let offset = frame.get().checked_sub(Self::BASE.get())?;
        let number = offset >> self.page_shift;
        (number < self.links.len() as u64).then_some(number)
    }

    fn pointer(&self, number: u64) -> NonNull<Entry> {
        // SAFETY: the callers pass numbers of frames of the region.
        unsafe { self.region.add((number as usize) << (self.page_shift - 3)) }
    }

    /// Takes back so many frames from `first` on.
    fn take_back(&self, first: Pa, count: usize) {
        for number in 0..count as u64 {
            let frame = Pa::new(first.get().wrapping_add(number << self.page_shift));
            self.note(|| Event::Free(frame));
            let mut frames = lock(&self.frames);
            let used = self.number(frame).filter(|&number| {
                let aligned = frame.get() & ((1 << self.page_shift) - 1) == 0;
                aligned && core::mem::take(&mut frames.used[number as usize])
            });
            match used {
                Some(number) => frames.free.push(number),
                None => frames.bad_frees += 1,
            }
        }
    }

    /// The entry number `index` of the table in `frame`, as a walker reads it; `None` for what is
    /// no frame.
    pub fn read(&self, frame: Pa, index: usize) -> Option<u64> {
        let number = self.number(frame)?;
        let inside =
            number < self.fresh.load(Ordering::Relaxed) && index < 1 << (self.page_shift - 3);
        let offset = ((number as usize) << (self.page_shift - 3)) + index;
        // SAFETY: inside of the region.
        inside.then(|| unsafe { self.region.add(offset).as_ref() }.follow())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and borrowed by nothing any more. The slots are from
        // `Box::leak`; no walk borrows this platform, and the epochs are not used any more.
        unsafe {
            dealloc(self.region.as_ptr().cast(), self.layout);
            drop(Box::from_raw(self.slots.as_ptr()));
        }
    }
}

// SAFETY: a frame is handed out once until it is freed (1.), lies at its distance from the first
// (2.) and has its own link (3.). No processor walks these tables, or remembers what they said (4.
// to 6.). There is no clone, and a reference is the same platform (7.).
unsafe impl Platform for Threads {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let mut frames = lock(&self.frames);
        let number = match frames.free.pop() {
            Some(number) => number,
            None => {
                let number = self.fresh.load(Ordering::Relaxed);
                if number == self.links.len() as u64 {
                    return None;
                }
                self.fresh.store(number + 1, Ordering::Relaxed);
                number
            }
        };
        frames.used[number as usize] = true;
        crate::soil(self.pointer(number), self.page_shift, 1);
        Some(Pa::new(Self::BASE.get() + (number << self.page_shift)))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.take_back(frame, 1);
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        if tables == 1 {
            return self.alloc_table(level);
        }
        // Out of what was never handed out; frames that are passed over can be had one by one.
        let mut frames = lock(&self.frames);
        let fresh = self.fresh.load(Ordering::Relaxed);
        let first = fresh.next_multiple_of(tables as u64);
        let end = first + tables as u64;
        if end > self.links.len() as u64 {
            return None;
        }
        frames.free.extend(fresh..first);
        frames.used[first as usize..end as usize].fill(true);
        self.fresh.store(end, Ordering::Relaxed);
        crate::soil(self.pointer(first), self.page_shift, tables);
        Some(Pa::new(Self::BASE.get() + (first << self.page_shift)))
    }

    unsafe fn free_root(&self, root: Pa, _: Level, tables: usize) {
        self.take_back(root, tables);
    }

    #[inline]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let offset = (frame.get() - Self::BASE.get()) as usize / size_of::<Entry>();
        // SAFETY: the caller vouches for a frame of this platform.
        unsafe { self.region.add(offset) }
    }

    #[inline]
    fn barrier(&self, barrier: Barrier) {
        self.note(|| match barrier {
            Barrier::Publish => Event::Publish,
            Barrier::Complete => Event::Complete,
        });
    }

    #[inline]
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.note(|| Event::Invalidate(what.into()));
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    #[inline]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let number = (frame.get().wrapping_sub(Self::BASE.get())) >> self.page_shift;
        self.links.get(number as usize).filter(|_| self.has_links)
    }
}

// SAFETY: a walk is announced in a slot of its own or on the list; each is known to `is_over` until
// it is dropped (1.), and announced before it reads (2.), as epochs and the lock have it.
unsafe impl SharedPlatform for Threads {
    type Walk<'a> = Walk<'a>;

    #[inline]
    fn enter(&self) -> Walk<'_> {
        Walk {
            platform: self,
            announced: self.announce().unwrap_or_else(|| self.list()),
            not_send: PhantomData,
        }
    }

    fn grace_period(&self) -> GracePeriod {
        self.epochs.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        let on_the_list = |&epoch: &u64| epoch < period.get();
        self.epochs.is_over(period) && !lock(&self.listed).iter().any(on_the_list)
    }

    #[inline]
    fn maintenance(&self) -> CacheMaintenance {
        self.maintenance
    }

    fn clean(&self, _: Pa, size: u64) {
        self.cleaned.fetch_add(size, Ordering::Relaxed);
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.note(|| Event::InvalidateHere(what.into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier as Meeting;
    use std::thread;

    #[test]
    fn walks_of_a_thread_end_in_any_order() {
        let platform = Threads::new(8, 12, 1);
        let (one, two) = (platform.enter(), platform.enter());
        drop(one);
        let period = platform.grace_period();
        assert!(!platform.is_over(period));
        drop(two);
        assert!(platform.is_over(period));
    }

    #[test]
    fn walks_beyond_the_slots_hold_grace_periods_up() {
        // More threads than slots, each with a walk; the walk of `last` ends after the others.
        const THREADS: usize = 6;
        let platform = Threads::new(8, 12, 1);
        for last in 0..THREADS {
            let step = Meeting::new(THREADS + 1);
            // Asserted on when no thread waits for this one any more.
            let past = thread::scope(|scope| {
                for number in 0..THREADS {
                    let (platform, step) = (&platform, &step);
                    scope.spawn(move || {
                        let walk = platform.enter();
                        step.wait(); // all have entered
                        step.wait(); // the cut is made
                        if number != last {
                            drop(walk);
                            step.wait(); // all but one are over
                            step.wait();
                        } else {
                            step.wait();
                            step.wait();
                            drop(walk);
                        }
                    });
                }
                step.wait();
                let period = platform.grace_period();
                step.wait();
                step.wait();
                let past = platform.is_over(period);
                step.wait();
                past
            });
            assert!(!past, "the walk of thread {last}");
            assert!(platform.is_over(platform.grace_period()));
        }
    }

    #[test]
    fn the_slot_of_a_walk_that_is_forgotten_is_not_given_up() {
        let platform = Threads::new(8, 12, 1);
        thread::scope(|scope| {
            let walker = scope.spawn(|| core::mem::forget(platform.enter()));
            walker.join().unwrap();
        });
        let period = platform.grace_period();
        // Takes each slot that is free.
        drop([(); 3].map(|()| platform.enter()));
        assert!(!platform.is_over(period));
    }

    #[test]
    fn frames_that_are_not_allocated_are_not_taken_back() {
        let platform = Threads::new(16, 12, 1).recording();
        let table = platform.alloc_table(Level::PAGE).unwrap();
        let root = platform.alloc_root(Level::PAGE, 4).unwrap();
        assert_eq!(platform.tables(), 5);
        // SAFETY: nothing is linked here (2.); what did not come from here, or has been freed, is
        // what is tested (1.).
        unsafe {
            platform.free_table(table, Level::PAGE);
            platform.free_table(table, Level::PAGE);
            platform.free_table(Pa::new(0x1000), Level::PAGE);
            platform.free_table(Pa::new(root.get() + 8), Level::PAGE);
            platform.free_root(root, Level::PAGE, 4);
        }
        assert_eq!((platform.tables(), platform.bad_frees()), (0, 3));
        assert_eq!(platform.take_events().len(), 8);
        let rest = core::iter::from_fn(|| platform.alloc_table(Level::PAGE));
        assert_eq!(rest.count(), 16);
    }
}

//! A platform on ordinary memory for edits by several threads at once.
//!
//! A thread needs a slot of its own to announce its walks in, because a slot is written with plain
//! stores. It is given one when it first walks, or the one it asks for by [`Threads::play`], and
//! keeps it until it ends. No two threads have the same: a slot is claimed by an exchange, and
//! given up only when no walk of the thread is under way. A thread that finds none left has its
//! walks put on a list, under a lock: slower, and no less correct.
//!
//! What quiescent states say is checked too. A thread's walks are counted, and it passes no state
//! while there are any; and the walks of a thread that rests, which the states know nothing of, are
//! put on the list.

use core::cell::{Cell, RefCell};
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::boxed::Box;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;

use super::Told;
use crate::addr::{Level, Pa};
use crate::entry::{Entry, TableLink};
use crate::invalidation::Invalidation;
use crate::platform::{Barrier, Caps, Platform};
use crate::shared::{
    CacheMaintenance, Epochs, GracePeriod, Quiescence, SharedPlatform, WalkSlot, Walking,
};

std::thread_local! {
    /// The slot that this thread used last, and of which platform: what it nearly always uses next.
    static LAST: Cell<(*const Slots, usize)> = const { Cell::new((ptr::null(), 0)) };
    /// All that it has.
    static CLAIMS: Claims = const { Claims(RefCell::new(Vec::new())) };
}

/// The slots of one platform. They stay for as long as the program runs, as a thread may end later
/// than the platform.
struct Slots {
    slots: Box<[WalkSlot]>,
    /// Which of them belong to a thread.
    claimed: Box<[AtomicBool]>,
    /// The first so many are for threads that ask for one by its number, and as many for those that
    /// do not.
    numbered: usize,
    /// The platform is gone.
    gone: AtomicBool,
}

impl Slots {
    fn new(processors: usize) -> Self {
        let all = processors.max(1) * 2;
        Self {
            slots: (0..all).map(|_| WalkSlot::new()).collect(),
            claimed: (0..all).map(|_| AtomicBool::new(false)).collect(),
            numbered: all / 2,
            gone: AtomicBool::new(false),
        }
    }

    /// Takes slot `number`, which must not belong to a thread, for this one.
    fn claim(&self, number: usize) -> bool {
        // Acquire: the thread that had it before has done with it.
        self.claimed[number]
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }
}

/// A slot that belongs to a thread.
struct Claim {
    slots: &'static Slots,
    number: usize,
    /// The thread has another by now.
    retired: bool,
}

impl Claim {
    /// Gives the slot up, unless walks are under way in it.
    fn give_up(&self) -> bool {
        let slot = &self.slots.slots[self.number];
        let idle = slot.walks() == 0;
        if idle {
            slot.leave();
            self.slots.claimed[self.number].store(false, Ordering::Release);
        }
        idle
    }
}

/// The slots of a thread, one of each platform that it has used. They are given up when it ends;
/// all but those of walks that end later still, or never.
struct Claims(RefCell<Vec<Claim>>);

impl Drop for Claims {
    fn drop(&mut self) {
        LAST.set((ptr::null(), 0));
        for claim in self.0.get_mut() {
            let _idle = claim.give_up();
        }
    }
}

impl Claims {
    /// What is there of a platform, when what is of no use any more is gone.
    fn position(claims: &mut Vec<Claim>, slots: &'static Slots) -> Option<usize> {
        claims.retain(|claim| {
            let gone = claim.slots.gone.load(Ordering::Relaxed);
            !(gone || claim.retired && claim.give_up())
        });
        let is_it = |claim: &Claim| ptr::eq(claim.slots, slots) && !claim.retired;
        claims.iter().position(is_it)
    }

    /// The thread's slot of a platform, an old one or a new one.
    fn find(&self, slots: &'static Slots) -> Option<usize> {
        let mut claims = self.0.borrow_mut();
        let number = match Self::position(&mut claims, slots) {
            Some(at) => claims[at].number,
            None => {
                let number =
                    (slots.numbered..slots.slots.len()).find(|&number| slots.claim(number))?;
                claims.push(Claim {
                    slots,
                    number,
                    retired: false,
                });
                number
            }
        };
        LAST.set((slots, number));
        Some(number)
    }

    /// Takes the slot of this number, if no thread has it, instead of the one that there was.
    fn take(&self, slots: &'static Slots, number: usize) {
        let mut claims = self.0.borrow_mut();
        let old = Self::position(&mut claims, slots);
        if number >= slots.numbered
            || old.is_some_and(|at| claims[at].number == number)
            || !slots.claim(number)
        {
            return;
        }
        if let Some(at) = old {
            claims[at].retired = true;
        }
        claims.push(Claim {
            slots,
            number,
            retired: false,
        });
        LAST.set((slots, number));
        // Gives the old one up, if it can be.
        let _there = Self::position(&mut claims, slots);
    }
}

/// Something that [`Threads`] was asked to do, in the order in which it was.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::hosted::{Event, Threads};
/// use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::X86_64};
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
/// use tablewright::hosted::Threads;
/// use tablewright::shared::{NewLeaf, SharedSpace};
/// use tablewright::{AddressSpace, Attrs, Level, Pa, Va, format::X86_64};
///
/// let platform = Threads::new(64, 12, 2);
/// let space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let space = SharedSpace::new(space).ok().unwrap();
/// thread::scope(|scope| {
///     for cpu in 0..2 {
///         let (space, platform) = (&space, &platform);
///         scope.spawn(move || {
///             platform.play(cpu);
///             let mut gather = space.gather();
///             for page in 0..100 {
///                 let at = (page * 2 + cpu as u64) << 12;
///                 let leaf = NewLeaf::new(Va::new(at), Pa::new(at), Level::PAGE, Attrs::USER_DATA).unwrap();
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
    frames: Mutex<Frames>,
    /// Frames never handed out start here. Written under the lock of `frames`.
    fresh: AtomicU64,
    walks: Periods,
    slots: &'static Slots,
    /// The epochs of walks that no slot announces.
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

/// How walks are known to be over.
enum Periods {
    Epochs(Epochs<'static>),
    States(Quiescence<'static>),
}

/// A walk of one thread, until this is dropped.
///
/// ```
/// use tablewright::{hosted::Threads, shared::SharedPlatform};
/// let platform = Threads::new(8, 12, 1);
/// let walk = platform.enter();
/// let period = platform.grace_period();
/// assert!(!platform.is_over(period));
/// drop(walk);
/// assert!(platform.is_over(period));
/// ```
#[must_use = "the walk ends when this is dropped"]
pub struct Walk<'t> {
    known: Known<'t>,
    /// It counts on the slot of its thread.
    not_send: PhantomData<*const ()>,
}

/// What knows of a walk.
enum Known<'t> {
    /// The thread's slot, by an epoch. It is there to be dropped.
    Announced { _walking: Walking<'t> },
    /// The thread's slot, which counts it: no quiescent state is passed meanwhile.
    Counted(&'static WalkSlot),
    /// The list, by this epoch.
    Listed(&'t Mutex<Vec<u64>>, u64),
}

impl Drop for Walk<'_> {
    #[inline]
    fn drop(&mut self) {
        match &self.known {
            Known::Announced { .. } => {}
            Known::Counted(slot) => slot.uncount(),
            Known::Listed(list, epoch) => {
                let mut list = lock(list);
                if let Some(at) = list.iter().position(|other| other == epoch) {
                    list.swap_remove(at);
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

/// The slots of all platforms there were: what is kept on purpose is still reached, and no leak to
/// a checker.
static KEPT: Mutex<Vec<&'static Slots>> = Mutex::new(Vec::new());

impl Threads {
    /// The physical address of the first frame.
    pub const BASE: Pa = Pa::new(0x40_0000_0000);

    /// Room for `frames` tables of `1 << page_shift` bytes, for threads that play as many
    /// `processors`. More threads than that, or threads that play none, may use it too; those
    /// beyond twice as many do so slowly.
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
        // A handful of cache lines, for as long as the program runs: a thread gives its slot up
        // when it ends.
        let slots: &'static Slots = Box::leak(Box::new(Slots::new(processors)));
        lock(&KEPT).push(slots);
        Self {
            region: region.cast(),
            layout,
            page_shift,
            links: (0..frames).map(|_| TableLink::new()).collect(),
            frames: Mutex::new(Frames {
                free: Vec::new(),
                used: vec![false; frames],
                bad_frees: 0,
            }),
            fresh: AtomicU64::new(0),
            walks: Periods::Epochs(Epochs::new(&slots.slots)),
            slots,
            listed: Mutex::new(Vec::new()),
            caps: super::CAPS,
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

    /// On hardware whose caches need this.
    #[must_use]
    pub fn with_cache_maintenance(mut self, maintenance: CacheMaintenance) -> Self {
        self.maintenance = maintenance;
        self
    }

    /// With quiescent states instead of epochs: threads say when they hold no table, by
    /// [`pass`](Threads::pass) and [`rest`](Threads::rest).
    #[must_use]
    pub fn with_quiescent_states(mut self) -> Self {
        self.walks = Periods::States(Quiescence::new(&self.slots.slots));
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

    /// This thread holds no table, and may walk from now on. Nothing happens while a walk of the
    /// thread is under way, or without quiescent states.
    #[inline]
    pub fn pass(&self) {
        if let Periods::States(states) = &self.walks
            && let Some(number) = self.slot()
            && self.slots.slots[number].walks() == 0
        {
            // SAFETY: the slot belongs to this thread, which no interrupt edits in (1.); no walk is
            // counted that relies on the states (2.); nothing has been made of the slots since
            // (3.).
            unsafe { states.pass(number) };
        }
    }

    /// This thread holds no table, and will hardly walk before it passes again: if it does, it
    /// waits for a lock. Nothing happens while a walk of the thread is under way, or without
    /// quiescent states.
    pub fn rest(&self) {
        if let Periods::States(states) = &self.walks
            && let Some(number) = self.slot()
            && self.slots.slots[number].walks() == 0
        {
            // SAFETY: as for `pass` (1. to 3.). A walk that starts before the next pass does not
            // rely on the states: it is put on the list (4.).
            unsafe { states.rest(number) };
        }
    }

    /// This thread is processor number `cpu` of this platform from now on. Nothing changes if
    /// another thread is, or if there is no such processor.
    ///
    /// A thread that plays none is given a slot as well, if there is one. What a thread gains by
    /// this is that there is.
    pub fn play(&self, cpu: u16) {
        // A thread that is about to end plays nothing.
        let _ended = CLAIMS.try_with(|claims| claims.take(self.slots, usize::from(cpu)));
    }

    /// The slot that belongs to this thread.
    #[inline]
    fn slot(&self) -> Option<usize> {
        let (slots, number) = LAST.get();
        if ptr::eq(slots, self.slots) {
            Some(number)
        } else {
            self.find_slot()
        }
    }

    #[cold]
    fn find_slot(&self) -> Option<usize> {
        CLAIMS
            .try_with(|claims| claims.find(self.slots))
            .ok()
            .flatten()
    }

    /// A walk that no slot announces.
    ///
    /// If it is on the list when that is looked at, it is seen. If not, the look at the list comes
    /// before it, and so does the cut: the lock has gone from the one to the other.
    #[cold]
    fn list(&self) -> Known<'_> {
        let mut listed = lock(&self.listed);
        let now = match &self.walks {
            Periods::Epochs(epochs) => epochs.now(),
            Periods::States(states) => states.now(),
        };
        listed.push(now);
        Known::Listed(&self.listed, now)
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
        self.slots.gone.store(true, Ordering::Relaxed);
        // SAFETY: allocated with this layout, and borrowed by nothing any more.
        unsafe { dealloc(self.region.as_ptr().cast(), self.layout) };
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
        self.links.get(number as usize)
    }
}

// SAFETY: a walk is announced in a slot that belongs to its thread alone, or counted in one, so
// that the thread passes no state and does not rest, or else it is on the list; each is known to
// `is_over` until it is dropped (1.), and says so before it reads (2.): as epochs, states and the
// lock do.
unsafe impl SharedPlatform for Threads {
    type Walk<'a> = Walk<'a>;

    #[inline]
    fn enter(&self) -> Walk<'_> {
        let slot = self.slot();
        let known = match &self.walks {
            Periods::Epochs(epochs) => slot.and_then(|number| {
                // SAFETY: the slot belongs to this thread, and is given up only without a walk
                // (1.); no interrupt walks in a thread of a program (2.); what is returned is not
                // `Send` (3.); nothing has been made of the slots since (4.).
                let _walking = unsafe { epochs.enter(number) }?;
                Some(Known::Announced { _walking })
            }),
            Periods::States(_) => slot.and_then(|number| {
                let slot = &self.slots.slots[number];
                if slot.is_outside() {
                    return None;
                }
                slot.count();
                Some(Known::Counted(slot))
            }),
        };
        Walk {
            known: known.unwrap_or_else(|| self.list()),
            not_send: PhantomData,
        }
    }

    fn grace_period(&self) -> GracePeriod {
        match &self.walks {
            Periods::Epochs(epochs) => epochs.advance(),
            Periods::States(states) => states.advance(),
        }
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        let past = match &self.walks {
            Periods::Epochs(epochs) => epochs.is_over(period),
            Periods::States(states) => states.is_over(period),
        };
        past && lock(&self.listed)
            .iter()
            .all(|&epoch| epoch >= period.get())
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

    fn both(processors: usize) -> [Threads; 2] {
        let platform = || Threads::new(8, 12, processors);
        [platform(), platform().with_quiescent_states()]
    }

    #[test]
    fn walks_of_a_thread_end_in_any_order() {
        for platform in both(1) {
            platform.pass();
            let (one, two) = (platform.enter(), platform.enter());
            drop(one);
            let period = platform.grace_period();
            platform.pass();
            assert!(!platform.is_over(period));
            platform.rest();
            assert!(!platform.is_over(period));
            drop(two);
            platform.pass();
            assert!(platform.is_over(period));
        }
    }

    #[test]
    fn a_thread_that_rests_may_walk() {
        let platform = Threads::new(8, 12, 1).with_quiescent_states();
        // It has not passed yet.
        let one = platform.enter();
        let first = platform.grace_period();
        assert!(!platform.is_over(first));
        platform.pass();
        assert!(!platform.is_over(first));
        let two = platform.enter();
        drop(one);
        assert!(platform.is_over(first));
        let second = platform.grace_period();
        assert!(!platform.is_over(second));
        drop(two);
        platform.rest();
        assert!(platform.is_over(second));
    }

    #[test]
    fn threads_share_no_slot_whatever_they_play() {
        // More of them than slots; half of them play, all the same processor.
        const THREADS: usize = 6;
        for platform in both(1) {
            for last in 0..THREADS {
                let step = Meeting::new(THREADS + 1);
                let slots = Mutex::new(Vec::new());
                // Looked at when no thread waits for this one any more.
                let past = thread::scope(|scope| {
                    for number in 0..THREADS {
                        let (platform, step, slots) = (&platform, &step, &slots);
                        scope.spawn(move || {
                            if number % 2 == 0 {
                                platform.play(0);
                            }
                            platform.pass();
                            let walk = platform.enter();
                            lock(slots).extend(platform.slot());
                            step.wait(); // all have entered
                            step.wait(); // the cut is made
                            if number != last {
                                drop(walk);
                                platform.rest();
                                step.wait(); // all but one are over
                                step.wait();
                            } else {
                                step.wait();
                                step.wait();
                                drop(walk);
                                platform.rest();
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
                assert!(!past);
                let later = platform.grace_period();
                assert!(platform.is_over(later));
                let mut slots = slots.into_inner().unwrap();
                slots.sort_unstable();
                assert!(slots.is_sorted_by(|one, other| one < other), "{slots:?}");
            }
        }
    }

    #[test]
    fn the_slot_of_a_walk_is_not_given_up() {
        for platform in both(1) {
            thread::scope(|scope| {
                let walker = scope.spawn(|| {
                    platform.play(0);
                    platform.pass();
                    core::mem::forget(platform.enter());
                });
                // Until all that the thread had is gone, its claim too.
                walker.join().unwrap();
            });
            let period = platform.grace_period();
            // It is not given to this thread, whose walks would end it.
            platform.play(0);
            platform.pass();
            drop(platform.enter());
            platform.rest();
            assert!(!platform.is_over(period));
        }
    }

    #[test]
    fn a_thread_may_change_its_processor_in_a_walk() {
        for platform in both(2) {
            platform.play(0);
            platform.pass();
            let one = platform.enter();
            platform.play(1);
            let two = platform.enter();
            let period = platform.grace_period();
            drop(two);
            platform.rest();
            assert!(!platform.is_over(period));
            drop(one);
            // It has left the first for good.
            platform.play(0);
            assert!(platform.is_over(period));
        }
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

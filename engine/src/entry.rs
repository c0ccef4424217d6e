//! Entries and tables: the only file that touches an atomic.
//!
//! A page table is memory that three parties read and write: the processor that edits it, other processors that edit
//! or read it in software, and the table walkers of all of them, which read it at any moment and, where the hardware
//! sets accessed and dirty bits, write it. Every access is therefore an atomic access of 8 bytes: a walker must never
//! see half an entry. What differs is the ordering, and each is argued here, once:
//!
//! * [`Entry::load`] and [`Entry::store`] are relaxed. An exclusive edit is ordered by the exclusive borrow; what a
//!   walker sees, and when, is ordered by the barriers of the platform, not by the store.
//! * [`Entry::link`] is a release store. It makes a table reachable whose entries were written with relaxed stores
//!   just before. A reader that follows the link, in software or by a table walk, depends on its address, so a release
//!   on this side is enough for it never to see the table as it was before (`ROT.inv+dmbst` is forbidden, `ROT.inv+po`
//!   is allowed in the published Arm tests of the relaxed virtual memory model; a store-release orders the earlier
//!   stores no less than DMB ST does).
//! * [`Entry::follow`] is an acquire load, the other side of it for software that walks tables while they are edited.
//! * [`Entry::exchange`] and [`Entry::compare_exchange`] are acquire-release: they take an entry away from a walker
//!   that may be setting bits in it. After the exchange the walker cannot set a bit in the old entry any more, because
//!   it sets them by an atomic update of its own that checks the entry (DDI 0487 D8.5; SDM vol. 3A 5.8); what the
//!   exchange returned is final.
//!
//! The atomics are `loom`'s in the package `tablewright-loom`, which has a feature of that name and otherwise the same
//! sources.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};

use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{Level, Pa};
use crate::platform::{Hooks, Platform};

/// One descriptor in a table: 8 bytes that processors and walkers share.
///
/// What the bits mean is the business of a [`Format`](crate::Format); here they are bits.
///
/// ```
/// use tablewright::Entry;
/// let entry = Entry::new(0x1003);
/// assert_eq!(entry.exchange(0), 0x1003);
/// assert_eq!(entry.load(), 0);
/// ```
#[repr(transparent)]
pub struct Entry(AtomicU64);

impl Entry {
    /// An entry with the given bits.
    pub fn new(bits: u64) -> Self {
        Self(AtomicU64::new(bits))
    }

    /// Reads the entry. Relaxed.
    #[inline(always)]
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reads an entry in order to go on to the table that it points to: what was written to the table before it was
    /// linked is seen. Acquire; a table walker has this by the dependency of the address.
    #[inline(always)]
    pub fn follow(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Reads an entry that is not written meanwhile. Not atomic, so that the compiler may read several at once and keep
    /// other things in registers, which it does not do around an atomic access.
    ///
    /// # Safety
    /// 1. No other processor and no walker writes the entry at the same time.
    #[inline(always)]
    pub unsafe fn read(&self) -> u64 {
        #[cfg(not(feature = "loom"))]
        // SAFETY: the pointer is that of the atomic, valid and aligned; it is not written, by (1.).
        return unsafe { self.0.as_ptr().read() };
        #[cfg(feature = "loom")]
        // SAFETY: as above; loom checks it.
        return unsafe { self.0.unsync_load() };
    }

    /// Writes an entry that no other processor edits and no walker writes. Relaxed.
    #[inline(always)]
    pub fn store(&self, bits: u64) {
        self.0.store(bits, Ordering::Relaxed);
    }

    /// Writes an entry through which a table becomes reachable, after everything written to that table. Release.
    #[inline(always)]
    pub fn link(&self, bits: u64) {
        self.0.store(bits, Ordering::Release);
    }

    /// Replaces an entry that a walker may be writing, and returns what it was. Acquire and release.
    #[inline(always)]
    pub fn exchange(&self, bits: u64) -> u64 {
        self.0.swap(bits, Ordering::AcqRel)
    }

    /// Replaces the entry if it still is `current`; otherwise returns what it is. Acquire and release.
    ///
    /// # Errors
    /// What the entry was, if that is not `current`.
    #[inline(always)]
    pub fn compare_exchange(&self, current: u64, new: u64) -> Result<(), u64> {
        self.0
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entry({:#018x})", self.load())
    }
}

/// Brings the start of a table towards the processor: a hint, and nothing where the processor has none.
///
/// A [`Platform`] that can reach a table without mapping it first calls this in
/// [`prefetch`](Platform::prefetch). Hardware prefetchers stop at the end of a page, which is the end of a table; a walk
/// knows which table comes next.
#[inline(always)]
pub fn prefetch(table: NonNull<Entry>) {
    for line in 0..AHEAD {
        prefetch_line(table.as_ptr().wrapping_add(LINE * line));
    }
}

/// Entries in a cache line of 64 bytes.
pub(crate) const LINE: usize = 8;
/// How many lines ahead of an edit to prefetch: enough to cover the latency of memory at the speed of the loops here.
const AHEAD: usize = 24;

#[inline(always)]
fn prefetch_line(entry: *const Entry) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loom")))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect that a program can see, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(entry.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri), not(feature = "loom")))]
    // SAFETY: a prefetch has no effect that a program can see, whatever the address.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) entry, options(nostack, readonly, preserves_flags));
    }
    let _ = entry;
}

/// Side memory of one table frame: 16 bytes that the embedder keeps for it, outside the table.
///
/// The engine chains the tables that a [`Gather`](crate::Gather) carries through it, because the page of a table that
/// was cut off may still be read by walkers until the invalidation is complete. A link belongs to at most one chain.
///
/// ```
/// use tablewright::TableLink;
/// static LINKS: [TableLink; 2] = [const { TableLink::new() }; 2];
/// # let _ = &LINKS;
/// ```
#[derive(Debug)]
pub struct TableLink {
    // Written by the owner of the table and read by the owner of the chain, which are the same thread of execution or
    // hand the chain over with synchronisation of their own: relaxed is enough, and only `Sync` asks for atomics.
    next: core::sync::atomic::AtomicU64,
    /// The first address that the next sub-tree translated.
    first: core::sync::atomic::AtomicU64,
}

impl TableLink {
    /// A link that is in no chain.
    pub const fn new() -> Self {
        Self {
            next: core::sync::atomic::AtomicU64::new(0),
            first: core::sync::atomic::AtomicU64::new(0),
        }
    }

    pub(crate) fn set(&self, next: u64, first: u64) {
        self.next.store(next, core::sync::atomic::Ordering::Relaxed);
        self.first
            .store(first, core::sync::atomic::Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> (u64, u64) {
        (
            self.next.load(core::sync::atomic::Ordering::Relaxed),
            self.first.load(core::sync::atomic::Ordering::Relaxed),
        )
    }
}

impl Default for TableLink {
    fn default() -> Self {
        Self::new()
    }
}

/// Writes `count` entries from `first` on: `value`, `value + step`, and so on. Relaxed.
///
/// This is the inner loop of every bulk edit: one 8-byte store for each entry and nothing else.
///
/// # Safety
/// 1. `first` and the `count - 1` entries behind it are valid for writes.
#[inline(always)]
pub unsafe fn fill(first: NonNull<Entry>, count: usize, value: u64, step: u64) {
    let mut value = value;
    for index in 0..count {
        // SAFETY: `index < count`, so the entry is valid by (1.).
        unsafe { first.add(index).as_ref() }.store(value);
        value = value.wrapping_add(step);
    }
}

/// Writes an entry that is not part of a table that is open.
///
/// # Safety
/// 1. `entry` is valid for writes.
#[inline(always)]
pub(crate) unsafe fn store<P: Platform>(platform: &P, entry: NonNull<Entry>, bits: u64) {
    // SAFETY: valid by (1.).
    unsafe {
        match platform.hooks() {
            Some(hooks) => hooks.store(entry, bits),
            None => entry.as_ref().store(bits),
        }
    }
}

/// A table that is open for access: mapped by the platform from [`Table::open`] until it is dropped.
///
/// Invariant: `base` points to as many valid entries as a table at this level of the space's format has. It holds
/// because a table is opened only at a frame that is the root of a space or was read from a table descriptor of one,
/// and [`Platform::table`] vouches for such frames.
pub(crate) struct Table<'p, P: Platform> {
    platform: &'p P,
    base: NonNull<Entry>,
    frame: Pa,
}

impl<'p, P: Platform> Table<'p, P> {
    /// Opens the table in `frame`.
    ///
    /// # Safety
    /// 1. `frame` holds a table of a space on `platform`, or was allocated from `platform` for one.
    #[inline(always)]
    pub unsafe fn open(platform: &'p P, frame: Pa, level: Level) -> Self {
        // SAFETY: Platform::table (1.) is (1.) here.
        let base = unsafe { platform.table(frame, level) };
        Self {
            platform,
            base,
            frame,
        }
    }

    /// Where it is.
    #[inline(always)]
    pub fn frame(&self) -> Pa {
        self.frame
    }

    #[inline(always)]
    fn at(&self, index: usize) -> NonNull<Entry> {
        // SAFETY: indices come from `Format::index` or from ranges of such, which stay inside a table; by the
        // invariant of the type these entries are valid.
        unsafe { self.base.add(index) }
    }

    #[inline(always)]
    pub fn load(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.load(self.at(index)),
                None => self.at(index).as_ref().load(),
            }
        }
    }

    /// Reads an entry in order to go on to the table that it points to, while others may be linking it.
    #[inline(always)]
    pub fn follow(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.follow(self.at(index)),
                None => self.at(index).as_ref().follow(),
            }
        }
    }

    /// Reads an entry of a table that is not written meanwhile.
    ///
    /// # Safety
    /// 1. No other processor and no walker writes the table at the same time.
    #[inline(always)]
    pub unsafe fn read(&self, index: usize) -> u64 {
        // SAFETY: `at` returns a valid entry; (1.) is passed on.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.read(self.at(index)),
                None => self.at(index).as_ref().read(),
            }
        }
    }

    #[inline(always)]
    pub fn store(&self, index: usize, bits: u64) {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.store(self.at(index), bits),
                None => self.at(index).as_ref().store(bits),
            }
        }
    }

    #[inline(always)]
    pub fn link(&self, index: usize, bits: u64) {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.link(self.at(index), bits),
                None => self.at(index).as_ref().link(bits),
            }
        }
    }

    #[inline(always)]
    pub fn exchange(&self, index: usize, bits: u64) -> u64 {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.exchange(self.at(index), bits),
                None => self.at(index).as_ref().exchange(bits),
            }
        }
    }

    #[inline(always)]
    pub fn compare_exchange(&self, index: usize, current: u64, new: u64) -> Result<(), u64> {
        // SAFETY: `at` returns a valid entry.
        unsafe {
            match self.platform.hooks() {
                Some(hooks) => hooks.compare_exchange(self.at(index), current, new),
                None => self.at(index).as_ref().compare_exchange(current, new),
            }
        }
    }

    /// Prefetches what a loop over the table comes to next, called once for each line. Near the end of the table that
    /// is the frame behind it, often the next table; where it is not, the prefetch is wasted and harmless.
    #[inline(always)]
    pub fn prefetch_ahead(&self, index: usize) {
        prefetch_line(self.base.as_ptr().wrapping_add(index + LINE * AHEAD));
    }

    /// Writes the entries of `range`: `value`, `value + step`, and so on.
    #[inline(always)]
    pub fn fill(&self, range: Range<usize>, value: u64, step: u64) {
        if !range.is_empty() {
            // SAFETY: the range stays inside the table, so all its entries are valid.
            unsafe {
                let first = self.at(range.start);
                match self.platform.hooks() {
                    Some(hooks) => hooks.fill(first, range.len(), value, step),
                    None => fill(first, range.len(), value, step),
                }
            }
        }
    }
}

impl<P: Platform> Table<'_, P> {
    /// Flips the bits `flip` of the entries of `range`, up to the first whose bits under `mask` are not `key`. Returns
    /// where that is.
    ///
    /// A line of eight entries is checked as one, before any of them is written: they have no other writer. A function
    /// of its own, so that the loop has the registers to itself.
    #[inline(never)]
    pub fn flip(&self, range: Range<usize>, key: u64, mask: u64, flip: u64) -> usize {
        let mut index = range.start;
        while range.end - index >= LINE {
            self.prefetch_ahead(index);
            let mut line = [0; LINE];
            let mut differs = 0;
            for (offset, entry) in line.iter_mut().enumerate() {
                *entry = self.load(index + offset);
                differs |= *entry ^ key;
            }
            if differs & mask != 0 {
                break;
            }
            for (offset, entry) in line.iter().enumerate() {
                self.store(index + offset, entry ^ flip);
            }
            index += LINE;
        }
        while index < range.end {
            let entry = self.load(index);
            if (entry ^ key) & mask != 0 {
                break;
            }
            self.store(index, entry ^ flip);
            index += 1;
        }
        index
    }

    /// The same where walkers may write the entries. One that a walker has changed under our hands is looked at again.
    #[inline(never)]
    pub fn flip_contended(&self, range: Range<usize>, key: u64, mask: u64, flip: u64) -> usize {
        let mut index = range.start;
        while index < range.end {
            let entry = self.load(index);
            if (entry ^ key) & mask != 0 {
                break;
            }
            if self.compare_exchange(index, entry, entry ^ flip).is_ok() {
                index += 1;
            }
        }
        index
    }
}

impl<P: Platform> Drop for Table<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        self.platform.table_done(self.frame, self.base);
    }
}

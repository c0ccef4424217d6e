//! Entries, and every kind of access to one.
//!
//! A page table is memory that three parties read and write: the processor that edits it, other
//! processors that edit or read it in software, and the table walkers of all of them, which read it
//! at any time and, where the hardware sets accessed and dirty bits, write it. Every access is
//! therefore an atomic access of 8 bytes: a walker must never see half an entry. What differs is
//! the ordering, and each is argued here, once:
//!
//! * [`Entry::load`] and [`Entry::store`] are relaxed. An exclusive edit is ordered by the
//!   exclusive borrow; what a walker sees, and when, is ordered by the barriers of the platform,
//!   not by the store.
//! * [`Entry::link`] is a release store. It makes a table reachable whose entries were written with
//!   relaxed stores just before. A reader that follows the link, in software or by a table walk,
//!   depends on its address, so a release on this side is enough for it never to see the table as
//!   it was before (`ROT.inv+dmbst` is forbidden, `ROT.inv+po` is allowed in the published Arm
//!   tests of the relaxed virtual memory model; a store-release orders the earlier stores no less
//!   than DMB ST does).
//! * [`Entry::follow`] is an acquire load, the other side of it for software that walks tables
//!   while they are edited.
//! * [`Entry::exchange`] and [`Entry::compare_exchange`] are acquire-release: they take an entry
//!   away from a walker that may be setting bits in it. After the exchange the walker cannot set a
//!   bit in the old entry any more, because it sets them by an atomic update of its own that checks
//!   the entry (DDI 0487 D8.5; SDM vol. 3A 5.8); what the exchange returned is final.
//!
//! The atomics are `loom`'s in the package `tablewright-loom`, which has a feature of that name and
//! otherwise the same sources.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};

use core::fmt;
use core::ptr::NonNull;

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
    #[inline]
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reads an entry in order to go on to the table that it points to: what was written to the
    /// table before it was linked is seen. Acquire; a table walker has this by the dependency of
    /// the address.
    #[inline]
    pub fn follow(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Reads an entry that is not written meanwhile. Not atomic, so that the compiler may read
    /// several at once and keep other things in registers, which it does not do around an atomic
    /// access.
    ///
    /// # Safety
    /// 1. No other processor and no walker writes the entry at the same time.
    #[inline]
    pub unsafe fn read(&self) -> u64 {
        #[cfg(not(feature = "loom"))]
        // SAFETY: the pointer is that of the atomic, valid and aligned; it is not written, by (1.).
        return unsafe { self.0.as_ptr().read() };
        #[cfg(feature = "loom")]
        // SAFETY: as above; loom checks it.
        return unsafe { self.0.unsync_load() };
    }

    /// Writes an entry that no other processor edits and no walker writes. Relaxed.
    #[inline]
    pub fn store(&self, bits: u64) {
        self.0.store(bits, Ordering::Relaxed);
    }

    /// Writes an entry through which a table becomes reachable, after everything written to that
    /// table. Release.
    #[inline]
    pub fn link(&self, bits: u64) {
        self.0.store(bits, Ordering::Release);
    }

    /// Replaces an entry that a walker may be writing, and returns what it was. Acquire and
    /// release.
    #[inline]
    pub fn exchange(&self, bits: u64) -> u64 {
        self.0.swap(bits, Ordering::AcqRel)
    }

    /// Replaces the entry if it still is `current`; otherwise returns what it is. Acquire and
    /// release.
    ///
    /// # Errors
    /// What the entry was, if that is not `current`.
    #[inline]
    pub fn compare_exchange(&self, current: u64, new: u64) -> Result<(), u64> {
        self.0.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entry({:#018x})", self.load())
    }
}

/// Brings the start of a table towards the processor: a hint, and nothing where the processor has
/// none.
///
/// A [`Platform`](crate::Platform) that can reach a table without mapping it first calls this in
/// [`prefetch`](crate::Platform::prefetch). Hardware prefetchers stop at the end of a page, which
/// is the end of a table; a walk knows which table comes next.
#[inline]
pub fn prefetch(table: NonNull<Entry>) {
    for line in 0..AHEAD {
        prefetch_line(table.as_ptr().wrapping_add(LINE * line));
    }
}

/// Entries in a cache line of 64 bytes.
pub(crate) const LINE: usize = 8;
/// How many lines ahead of an edit to prefetch: enough to cover the latency of memory at the speed
/// of the loops here.
pub(crate) const AHEAD: usize = 24;

#[inline]
pub(crate) fn prefetch_line(entry: *const Entry) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loom")))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect that a program can see, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(entry.cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri), not(feature = "loom")))]
    // SAFETY: a prefetch has no effect that a program can see, whatever the address.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) entry,
            options(nostack, readonly, preserves_flags));
    }
    let _ = entry;
}

/// Side memory of one table frame: 16 bytes that the embedder keeps for it, outside the table.
///
/// The engine chains the tables that a [`Gather`](crate::Gather) carries through it, because the
/// page of a table that was detached may still be read by walkers until the invalidation is
/// complete. A link belongs to at most one chain.
///
/// ```
/// use tablewright::TableLink;
/// static LINKS: [TableLink; 2] = [const { TableLink::new() }; 2];
/// # let _ = &LINKS;
/// ```
#[derive(Debug)]
pub struct TableLink {
    // Written by the owner of the table and read by the owner of the chain, which are the same
    // thread of execution or hand the chain over with synchronisation of their own: relaxed is
    // enough, and only `Sync` asks for atomics.
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
        self.first.store(first, core::sync::atomic::Ordering::Relaxed);
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
#[inline]
pub unsafe fn fill(first: NonNull<Entry>, count: usize, value: u64, step: u64) {
    let mut value = value;
    for index in 0..count {
        // SAFETY: `index < count`, so the entry is valid by (1.).
        unsafe { first.add(index).as_ref() }.store(value);
        value = value.wrapping_add(step);
    }
}

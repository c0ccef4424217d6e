//! The services that an embedder provides.
//!
//! A boot-time user writes five functions: two that hand table frames out and take them back, one
//! that makes a table reachable, and two that talk to the processor: [`barrier`](Platform::barrier)
//! and [`invalidate`](Platform::invalidate). Everything else has a default that costs nothing.
//!
//! The engine is monomorphised over this trait. On a platform whose `table` is pointer arithmetic
//! and whose `barrier` is one instruction, the compiled edits are the loops one would write by
//! hand.

use core::ptr::NonNull;

use crate::addr::{Level, Pa};
use crate::entry::{Entry, TableLink, fill};
use crate::identity::Identity;
use crate::invalidation::Invalidation;

/// A barrier that an edit needs.
///
/// ```
/// use tablewright::{Barrier, Platform};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(1, 12);
/// platform.barrier(Barrier::Publish);
/// assert_eq!(platform.counts().publications, 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// Every store to a table before it is visible to every table walker before anything after it;
    /// and this processor's own later accesses use the new entries.
    ///
    /// arm64: `dsb ishst`, and `isb` where this processor uses the space (DDI 0487 D8.2.6). x86:
    /// nothing, walkers see stores in program order (SDM vol. 3A 9.2.2), but the compiler must not
    /// move the stores. RISC-V: `fence`; this processor's own walks are ordered by the invalidation
    /// of what is new, or by that of a fault handler
    /// ([`invalid_entries_cached`](Caps::invalid_entries_cached)).
    Publish,
    /// Every invalidation issued before it is complete on every processor: none of them uses, or
    /// will finish using, what was invalidated.
    ///
    /// arm64: `dsb ish`, and `isb` where this processor uses the space. x86: every processor that
    /// was told has acknowledged.
    Complete,
}

/// The capabilities of the hardware, as far as the engine has to know them.
///
/// Start from [`Caps::CONSERVATIVE`], which is correct on any hardware, and say what is known to be
/// better:
///
/// ```
/// use tablewright::Caps;
/// let caps = Caps { bbm: 2, hardware_dirty: false, ..Caps::CONSERVATIVE };
/// # assert_eq!(caps.bbm, 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Break-before-make level, 0 to 3: arm64 `ID_AA64MMFR2_EL1.BBM`. Formats of architectures that
    /// have no such rule ignore it.
    pub bbm: u8,
    /// Walkers may set accessed flags (arm64: `TCR_EL1.HA`, of stage 2 `VTCR_EL2.HA`; EPT: bit 6 of
    /// the EPTP; x86-64 and nested paging: always).
    pub hardware_access: bool,
    /// Walkers may set dirty state (arm64: `TCR_EL1.HD`, of stage 2 `VTCR_EL2.HD`; EPT: bit 6 of
    /// the EPTP; x86-64 and nested paging: always).
    pub hardware_dirty: bool,
    /// A walker may have cached that an address was *not* mapped, so that a new mapping needs an
    /// invalidation (no arm64 or x86 processor; RISC-V without Svvptc).
    pub invalid_entries_cached: bool,
    /// The most operations of one flush, a leaf each; above that it is one of everything.
    ///
    /// It is a cost of the machine, not of the format: what it takes to forget a space *and to find
    /// again what was needed*, divided by what it takes to forget one leaf more in a flush that is
    /// waited for in any case. Measured on the machine it is right; without that:
    ///
    /// | | default | so that 512 pages, a table, take |
    /// |---|---|---|
    /// | x86 | 33 pages | one INVPCID or load of CR3; one INVLPGB |
    /// | arm64 with FEAT_TLBIRANGE | 2<sup>21</sup> pages, by one instruction | one RVALE1IS |
    /// | arm64 without it | [64](Caps::WITHOUT_RANGES) pages | one ASIDE1IS |
    /// | [`CONSERVATIVE`](Caps::CONSERVATIVE) | the same | one of everything |
    ///
    /// Where an instruction names a range, the number of *pages* says little: a range of any size
    /// takes one instruction for each scale that it is made of, four at most, and one for an odd
    /// page. There are at most [`MAX_RANGES`](crate::flush::MAX_RANGES) of them.
    pub invalidate_all_above: u64,
    /// The largest leaf that the processors have, where not all have those of the format: pages of
    /// 1 GiB on x86 (`CPUID` 8000_0001 EDX bit 26), large pages of EPT (`IA32_VMX_EPT_VPID_CAP`
    /// bits 16 and 17). No edit makes a leaf above it; those that are
    /// [everywhere](crate::Format::SURE_LEAF) are made in any case.
    pub largest_leaf: Level,
}

impl Caps {
    /// [So many](Caps::invalidate_all_above) invalidations of one page each, where all processors
    /// hear each of them.
    ///
    /// On an Ampere Altra, a table that is shown, cleared and forgotten takes 1.7 µs, of which 79 %
    /// and more is the wait, which a flush has once (`docs/map-mem.md`): one invalidation more is
    /// 0.36 µs at most. To find again all that its second-level TLB holds, 1280 entries (Neoverse
    /// N1 TRM), takes 25 µs at 20 ns for a walk whose descriptors are cached. The ratio is 70.
    ///
    /// Linux goes on to 512 (`MAX_DVM_OPS`), which is to avoid soft lock-ups, as it says, and not
    /// where it costs least.
    pub const WITHOUT_RANGES: u64 = 64;

    /// Correct on any arm64 or x86 processor.
    ///
    /// What [`arch`](crate::arch) says of a processor is closer to it. Leaves are those that every
    /// processor has, which is all of them on arm64.
    pub const CONSERVATIVE: Self = Self {
        bbm: 0,
        hardware_access: true,
        hardware_dirty: true,
        invalid_entries_cached: false,
        invalidate_all_above: Self::WITHOUT_RANGES,
        largest_leaf: Level::PAGE,
    };
}

impl Default for Caps {
    fn default() -> Self {
        Self::CONSERVATIVE
    }
}

/// The embedder's side of the engine: table frames, barriers, invalidations.
///
/// Five functions are required. The rest is provided; [`link_of`](Platform::link_of) is for
/// embedders that take large ranges down, [`identity_of`](Platform::identity_of) for those whose
/// identifiers roll over, [`table_done`](Platform::table_done) for those that reach tables through
/// a window, [`alloc_root`](Platform::alloc_root) for hypervisors, and [`hooks`](Platform::hooks)
/// for simulators.
///
/// # Safety
/// The engine reads and writes memory where the implementation tells it to, and gives memory back
/// when the implementation says that it is forgotten. An implementation promises:
/// 1. [`alloc_table`](Platform::alloc_table) returns a frame of one granule of the format, aligned
///    to its size, that nothing else uses until it goes to [`free_table`](Platform::free_table);
///    [`alloc_root`](Platform::alloc_root) the first of so many adjoining frames, aligned to the
///    size of all.
/// 2. [`table`](Platform::table) returns a pointer to that frame, valid for reads and writes of a
///    whole granule (of all granules of a root) by atomic accesses of 8 bytes, until
///    [`table_done`](Platform::table_done) is called with it. On each processor so many tables are
///    open at a time as the format has levels, plus two; and as many again for each interrupt
///    handler that edits or walks a space on top of what it has interrupted.
/// 3. [`link_of`](Platform::link_of) returns the same link for a frame each time, and different
///    links for different frames.
/// 4. When [`barrier(Publish)`](Barrier::Publish) returns, every store to a table that was made
///    before it is visible to the walkers of every processor.
/// 5. [`invalidate`](Platform::invalidate) is about all that any processor remembers of the space:
///    under the [identifier](Invalidation::id) that is named, with which alone the root is ever
///    loaded (9. excepted), and, where [global](Invalidation::global) translations are meant,
///    whatever is loaded. All that is named is covered: every range, at every level where none is
///    named, with what is cached of tables where tables were detached.
/// 6. [`barrier(Complete)`](Barrier::Complete) does not return before every invalidation issued
///    before it, by this processor or by one whose issuing happens before this call, is complete on
///    every processor. A program that goes on on another processor between the two takes that
///    promise with it: a kernel that may move it makes the barrier when it does (on arm64 a `DSB`
///    waits for what its own processor has issued, and for nothing else).
/// 7. A clone of the platform, where it has any, is the same platform: what one allocates the other
///    may free, and what one issues the other may complete.
/// 8. None of its functions unwinds: an edit is between two stores when it calls them.
/// 9. [`identity_of`](Platform::identity_of) returns the same for a root each time, from its
///    allocation until it is freed, and no two roots have one identity at a time. A processor loads
///    a root that has an identity as [`Identifiers::switch`](crate::shootdown::Identifiers::switch)
///    has told this processor last, of the one [`Identifiers`](crate::shootdown::Identifiers) of
///    these processors, with its one allocator; and has forgotten what that has asked it to forget.
///
/// The functions may be called from interrupt handlers, if spaces are edited there; what they share
/// with the code that was interrupted is theirs to protect.
///
/// ```
/// use core::{cell::Cell, ptr::NonNull};
/// use tablewright::{Barrier, Entry, Invalidation, Level, Pa, Platform};
///
/// /// Frames one after the other, reachable at `base`.
/// struct Bump { base: NonNull<u8>, next: Cell<u64>, end: u64 }
///
/// // SAFETY: each frame is handed out once (1.) and lies at its distance from `base` (2.); no
/// // walker uses it (4., 5., 6.), and there is no clone (7.).
/// unsafe impl Platform for Bump {
///     fn alloc_table(&self, _: Level) -> Option<Pa> {
///         let frame = self.next.get();
///         self.next.set(frame + 4096);
///         (frame < self.end).then_some(Pa::new(frame))
///     }
///     unsafe fn free_table(&self, _: Pa, _: Level) {}
///     unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
///         // SAFETY: the frame was handed out above.
///         unsafe { self.base.add(frame.get() as usize).cast() }
///     }
///     fn barrier(&self, _: Barrier) {}
///     fn invalidate(&self, _: &Invalidation<'_>) {}
/// }
/// ```
pub unsafe trait Platform {
    /// A frame for a table at `level`, or `None`. Its content does not matter: the engine writes
    /// every entry before it links the table.
    fn alloc_table(&self, level: Level) -> Option<Pa>;

    /// Takes back a frame that [`alloc_table`](Platform::alloc_table) gave out for `level`.
    ///
    /// # Safety
    /// 1. The frame came from this platform and has not been freed since.
    /// 2. No walker and no software can reach it: it was never linked, or the invalidation that
    ///    covers it is complete.
    unsafe fn free_table(&self, frame: Pa, level: Level);

    /// A pointer to the first entry of the table in `frame`.
    ///
    /// # Safety
    /// 1. The frame came from [`alloc_table`](Platform::alloc_table) and has not been freed, or the
    ///    embedder has [adopted](crate::AddressSpace::adopt) the tables it belongs to.
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry>;

    /// Executes a barrier.
    fn barrier(&self, barrier: Barrier);

    /// Issues all invalidations of one flush, on every processor that may remember something of the
    /// space. They need not be complete on return; a [`Barrier::Complete`] follows when they have
    /// to be. Stores before it are already published.
    fn invalidate(&self, what: &Invalidation<'_>);

    /// Frames for the first table of a tree, at `level`: as many as `tables` says, a power of two,
    /// beside each other and aligned to the size of all of them. Returns the first, or `None`.
    ///
    /// More than one is asked for by arm64 stage 2 alone, whose first table may be up to 16
    /// concatenated ones. Without this function one table is a table like any other, and more
    /// cannot be had.
    #[inline]
    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        if tables == 1 { self.alloc_table(level) } else { None }
    }

    /// Takes back what [`alloc_root`](Platform::alloc_root) gave out for as many tables at `level`.
    /// An embedder overrides both or neither.
    ///
    /// # Safety
    /// As for [`free_table`](Platform::free_table).
    #[inline]
    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        debug_assert_eq!(tables, 1, "concatenated tables came from elsewhere");
        if tables == 1 {
            // SAFETY: one table is a table like any other: `alloc_root` got it from `alloc_table`;
            // the rest is passed on.
            unsafe { self.free_table(root, level) };
        }
    }

    /// The capabilities of the hardware. Constant where it can be.
    #[inline]
    fn caps(&self) -> Caps {
        Caps::CONSERVATIVE
    }

    /// The engine no longer uses this pointer. A platform that maps tables on demand may unmap it,
    /// now or later.
    #[inline]
    fn table_done(&self, frame: Pa, table: NonNull<Entry>) {
        let _ = (frame, table);
    }

    /// The side memory of a table frame, if the embedder keeps any. Without it, a
    /// [`Gather`](crate::Gather) carries only [so many](crate::flush::MAX_UNLINKED) detached tables
    /// at a time, and an unmap of more stops to have it completed.
    #[inline]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let _ = frame;
        None
    }

    /// The identity of the space with this root, if its identifier is one of those that are [given
    /// out](crate::shootdown::Identifiers) and taken back while it lives. Without it, a space has
    /// the number that it was [given](crate::AddressSpace::with_id).
    ///
    /// A platform of one space returns its own; one of all spaces finds it by the frame, as it does
    /// a [link](Platform::link_of). It is asked when something is invalidated, and when the space
    /// is made live or dead.
    #[inline]
    fn identity_of(&self, root: Pa) -> Option<&Identity> {
        let _ = root;
        None
    }

    /// A walk is about to open the table in `frame`. A platform that can reach it without mapping
    /// it first may [bring it closer](crate::prefetch).
    #[inline]
    fn prefetch(&self, frame: Pa) {
        let _ = frame;
    }

    /// A simulator's eyes on each access to an entry; `None`, which costs nothing, everywhere else.
    #[inline]
    fn hooks(&self) -> Option<impl Hooks + '_> {
        None::<NoHooks>
    }
}

/// Every access that the engine makes to an entry, for simulators and counters. The defaults are
/// the accesses themselves.
///
/// # Safety
/// 1. What is overridden does what the default does.
///
/// ```
/// use core::{cell::Cell, ptr::NonNull};
/// use tablewright::{Entry, Hooks};
/// /// Counts the stores.
/// struct Stores(Cell<u64>);
/// // SAFETY: the store is made.
/// unsafe impl Hooks for Stores {
///     unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
///         self.0.set(self.0.get() + 1);
///         // SAFETY: valid, as the caller vouches.
///         unsafe { entry.as_ref() }.store(bits);
///     }
/// }
/// ```
pub unsafe trait Hooks {
    /// Reads an entry that is not written meanwhile; see [`Entry::read`].
    ///
    /// # Safety
    /// 1. As for [`load`](Hooks::load).
    /// 2. No other processor and no walker writes the entry at the same time.
    #[inline]
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid by (1.); (2.) is passed on.
        unsafe { entry.as_ref().read() }
    }

    /// Reads an entry.
    ///
    /// # Safety
    /// 1. `entry` lies in a table that [`Platform::table`] returned and that is not done.
    #[inline]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.load()
    }

    /// Reads an entry in order to go on to the table that it points to; see [`Entry::follow`].
    ///
    /// # Safety
    /// As for [`load`](Hooks::load).
    #[inline]
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.follow()
    }

    /// Writes an entry; see [`Entry::store`].
    ///
    /// # Safety
    /// As for [`load`](Hooks::load).
    #[inline]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.store(bits);
    }

    /// Writes an entry that makes a table reachable; see [`Entry::link`].
    ///
    /// # Safety
    /// As for [`load`](Hooks::load).
    #[inline]
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.link(bits);
    }

    /// Replaces an entry; see [`Entry::exchange`].
    ///
    /// # Safety
    /// As for [`load`](Hooks::load).
    #[inline]
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.exchange(bits)
    }

    /// Replaces an entry if it is what was expected; see [`Entry::compare_exchange`].
    ///
    /// # Safety
    /// As for [`load`](Hooks::load).
    #[inline]
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        // SAFETY: valid by (1.).
        unsafe { entry.as_ref() }.compare_exchange(current, new)
    }

    /// Writes a run of entries; see [`fill`].
    ///
    /// # Safety
    /// 1. As for [`load`](Hooks::load), for each of the `count` entries from `first` on.
    #[inline]
    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        // SAFETY: valid by (1.).
        unsafe { fill(first, count, value, step) }
    }
}

/// Hooks that do nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoHooks;

// SAFETY: nothing is overridden (1.).
unsafe impl Hooks for NoHooks {}

// SAFETY: everything is passed on to the platform behind the reference, which made the promises; a
// copy of a reference is the same platform (7.).
unsafe impl<P: Platform> Platform for &P {
    #[inline]
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        (**self).alloc_table(level)
    }
    #[inline]
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { (**self).free_table(frame, level) }
    }
    #[inline]
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { (**self).table(frame, level) }
    }
    #[inline]
    fn barrier(&self, barrier: Barrier) {
        (**self).barrier(barrier);
    }
    #[inline]
    fn invalidate(&self, what: &Invalidation<'_>) {
        (**self).invalidate(what);
    }
    #[inline]
    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        (**self).alloc_root(level, tables)
    }
    #[inline]
    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        // SAFETY: passed on.
        unsafe { (**self).free_root(root, level, tables) }
    }
    #[inline]
    fn caps(&self) -> Caps {
        (**self).caps()
    }
    #[inline]
    fn table_done(&self, frame: Pa, table: NonNull<Entry>) {
        (**self).table_done(frame, table);
    }
    #[inline]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        (**self).link_of(frame)
    }
    #[inline]
    fn identity_of(&self, root: Pa) -> Option<&Identity> {
        (**self).identity_of(root)
    }
    #[inline]
    fn prefetch(&self, frame: Pa) {
        (**self).prefetch(frame);
    }
    #[inline]
    fn hooks(&self) -> Option<impl Hooks + '_> {
        (**self).hooks()
    }
}

// SAFETY: (1.) is passed on.
unsafe impl<H: Hooks> Hooks for &H {
    #[inline]
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { (**self).read(entry) }
    }
    #[inline]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { (**self).load(entry) }
    }
    #[inline]
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { (**self).follow(entry) }
    }
    #[inline]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { (**self).store(entry, bits) }
    }
    #[inline]
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { (**self).link(entry, bits) }
    }
    #[inline]
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: passed on.
        unsafe { (**self).exchange(entry, bits) }
    }
    #[inline]
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        // SAFETY: passed on.
        unsafe { (**self).compare_exchange(entry, current, new) }
    }
    #[inline]
    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        // SAFETY: passed on.
        unsafe { (**self).fill(first, count, value, step) }
    }
}

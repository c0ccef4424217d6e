//! Guest memory: what a hypervisor does with a fault, and with memory that it takes back.
//!
//! You need this if you are a hypervisor. Its edits are those of [`shared`], put together for a
//! fault handler.
//!
//! A guest's memory is described by [slots](Slot): ranges of guest addresses, each with what backs
//! it. What is mapped is a cache of that description, filled by faults on all virtual CPUs at once
//! and thrown away at will. A fault is handled in parts, so that the embedder can do its own
//! between them, outside of every walk and every lock of the engine:
//!
//! | part | | what may come of it |
//! |---|---|---|
//! | classify | [`Fault::arm64`], [`Fault::ept`], [`Fault::nested`] | not a fault of translation |
//! | look up | [`Guest::request`] | no slot: a device; not allowed: the guest's own fault |
//! | prepare | [`top_up`], [`Request::tables`] | no memory: the embedder decides |
//! | find the page | the embedder, which may sleep | |
//! | map | [`Gather::map`] | done; *busy*: let the guest go on; *retry*: look up again |
//!
//! # The world changes while a page is looked up
//!
//! Slots change, and the host takes pages back, while faults are between their look-up and their
//! map. One number, the **version**, tells: whatever makes the answer of a look-up wrong counts it
//! up, and a fault maps only if the version is the one that it looked up under. The check and the
//! map are in one walk. So once every walk is over that was entered before the version moved on,
//! nothing will be mapped any more of what was looked up before; *then* one pass over the tables
//! takes it all. [`Zap`] is that order made into a type: move the version on, wait until walks from
//! before are over, edit. It needs a second pass only for a leaf that is being split by a break
//! just then, which comes back in smaller leaves.
//!
//! No fault waits for a zap, and no zap for a page look-up: only for walks, which are short.
//!
//! Slots are read without a lock, between two looks at the version: odd while they are being
//! changed, and then a fault is told that they are [busy](Declined::Busy).
//!
//! # How large a leaf
//!
//! As large as the page behind it, if the page and the guest's address agree in their low bits, the
//! slot holds all of it, and writes to the slot are not logged. Where memory has to be cleaned
//! before a guest may see it, one fault cleans at most [`CLAIM`] bytes, so that no fault waits for
//! more: the choice is *the largest leaf for which no more than that has yet to be cleaned*. A
//! gigabyte is so mapped by 512 faults, on as many CPUs as there are, and the last of them, which
//! finds the table full but for its own entry, puts the one large leaf in its place.
//!
//! # Everything at once
//!
//! A [`Zap`] of all of the guest's memory exchanges the entries of the root, at most 16 tables,
//! invalidates once, and leaves everything below to be reclaimed when there is time. A new root
//! would cost the same and every virtual CPU an exit, to load it.
//!
//! [`top_up`]: crate::shared::Gather::top_up

mod fault;
mod log;
mod slots;
mod zap;

pub use fault::{Abort, Access, Cause, Fault};
pub use log::Harvest;
pub use slots::{Log, Slot, SlotCell, SlotError};
pub use zap::{Pass, Zap};

use core::fmt;
use core::ops::{ControlFlow, Deref};

use crate::addr::{Ipa, Level, Pa, Span};
use crate::edit::EditError;
use crate::flush::{Held, Issued, Leaf, Progress};
use crate::format::{Attrs, Format, Perms};
use crate::shared::{
    self, Beside, DeferredReclaim, Mapped, NewLeaf, Protected, Refused, Relaxed, SharedPlatform,
    SharedSpace, Taken,
};
use crate::walk::MAX_LEVELS;

use slots::{Packed, SlotTable, Version};

/// The most bytes that are cleaned by one fault: 2 MiB, which takes a quarter of a millisecond
/// where cleaning is slow.
pub const CLAIM: u64 = 2 << 20;

/// Set in [`Attrs::software`] of a leaf whose page the host lets the guest write, though the leaf
/// may not: it is protected for the log, and is made writable again without asking the host.
pub const HOST_WRITES: u8 = 1;

/// The memory of a guest: its slots, and the stage-2 tables that map them.
///
/// ```
/// use tablewright::format::Stage2K4;
/// use tablewright::guest::{Access, Backing, Fault, Guest, Slot, SlotCell};
/// use tablewright::shared::{Mapped, SharedSpace};
/// use tablewright::{AddressSpace, Ipa, Pa, Span};
/// use tablewright_hosted::Threads;
///
/// type K4 = Stage2K4<40>; // 1 TiB of guest addresses
/// let platform = Threads::new(64, 12, 1);
/// let mut cells = [const { SlotCell::new() }; 8];
/// let space = SharedSpace::new(AddressSpace::<K4, _>::new(&platform).unwrap()).unwrap();
/// let guest = Guest::new(space, &mut cells);
/// let ram = Span::new(Ipa::new(0x4000_0000), 1 << 30)?;
/// guest.insert(Slot::memory(ram, 0x7f00_0000_0000)).unwrap();
///
/// let mut gather = guest.gather(); // of this virtual CPU
/// let fault = Fault::new(Ipa::new(0x4020_1234), Access::Write);
/// let request = guest.request(&fault).unwrap();
/// assert_eq!(request.host(), 0x7f00_0020_1234);
/// assert!(gather.top_up(request.tables()));
/// let page = Backing::new(Pa::new(0x8020_1234), 2 << 20); // it lies in a large page
/// assert_eq!(gather.map(&request, &page), Ok(Mapped::Installed));
/// assert_eq!(guest.space().query(Ipa::new(0x4020_0000)).unwrap().size(), 2 << 20);
/// # Ok::<(), tablewright::AddressError>(())
/// ```
pub struct Guest<'s, F: Format<Input = Ipa>, P: SharedPlatform> {
    space: SharedSpace<F, P>,
    slots: SlotTable<'s>,
}

/// The error where a fault cannot be answered by a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Declined {
    /// No slot holds the address: a device of the embedder's, or nothing.
    NoSlot,
    /// The slot does not allow this access. The guest gets a fault of its own, or the embedder
    /// emulates it.
    Denied(Slot),
    /// The slots are being changed. Let the guest go on: it will fault again.
    Busy,
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot => write!(f, "no slot holds the address"),
            Self::Denied(slot) => write!(f, "slot {} does not allow this", slot.id),
            Self::Busy => write!(f, "the slots are being changed"),
        }
    }
}

impl core::error::Error for Declined {}

/// A fault that wants memory, and what is known of it.
#[derive(Clone, Copy, Debug)]
#[must_use = "the guest waits for its memory"]
pub struct Request {
    at: u64,
    access: Access,
    cause: Cause,
    slot: Packed,
    version: Version,
    tables: u8,
}

impl Request {
    /// The slot.
    pub fn slot(&self) -> Slot {
        self.slot.slot()
    }

    /// The address.
    pub fn at(&self) -> Ipa {
        Ipa::new(self.at)
    }

    /// The access.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the number of what backs the address, in the embedder's own numbers: [`Slot::host`]
    /// and the distance from the slot's start.
    pub fn host(&self) -> u64 {
        let distance = self.at - self.slot.guest.start().get();
        self.slot.host.wrapping_add(distance)
    }

    /// How many tables this is likely to take. It is a guess: the tree may change, and the page may
    /// be of another size than the slot says. If it was too low, the map says how many it takes.
    pub fn tables(&self) -> u8 {
        self.tables
    }

    /// Whether the page has to be marked in the dirty log, once it is mapped.
    pub fn is_logged_write(&self) -> bool {
        // What is mapped for a write is dirty from the beginning: hardware does not log it.
        let is_marked = matches!(self.slot.log(), Log::ByFault | Log::ByModification);
        is_marked && self.access == Access::Write
    }
}

/// The page behind an address, as the embedder has found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The physical address of what the guest wants: any byte of its page.
    pub frame: Pa,
    /// The size of the host's page around it, a power of two, to which it is aligned.
    pub size: u64,
    /// The permissions that the host allows. The guest gets no more than these and its slot's
    /// together.
    pub perms: Perms,
}

impl Backing {
    /// A page of which the host allows everything.
    pub const fn new(frame: Pa, size: u64) -> Self {
        Self { frame, size, perms: Perms::all() }
    }

    /// A page of which the host allows this.
    #[must_use]
    pub const fn with_perms(mut self, perms: Perms) -> Self {
        self.perms = perms;
        self
    }
}

impl<'s, F: Format<Input = Ipa>, P: SharedPlatform + Clone> Guest<'s, F, P> {
    /// A guest without slots, which can have as many as there are cells.
    pub fn new(space: SharedSpace<F, P>, cells: &'s mut [SlotCell]) -> Self {
        Self { space, slots: SlotTable::new(cells) }
    }

    /// Edits of this guest's memory by this processor.
    pub fn gather(&self) -> Gather<'_, 's, F, P> {
        Gather { guest: self, gather: self.space.gather(), recent: None }
    }

    /// The tables, for edits that need no slot.
    pub fn space(&self) -> &SharedSpace<F, P> {
        &self.space
    }

    /// Takes apart a guest that is not used any more.
    pub fn into_space(self) -> SharedSpace<F, P> {
        self.space
    }

    // ---- Slots ----

    /// Adds a slot. A fault whose look-up came before it still finds none, and maps nothing.
    ///
    /// # Errors
    /// [`SlotError::Full`], [`SlotError::Overlap`], [`SlotError::Misaligned`],
    /// [`SlotError::OutOfRange`], [`SlotError::NoHardware`], [`SlotError::Busy`]; nothing has
    /// changed.
    pub fn insert(&self, slot: Slot) -> Result<(), SlotError> {
        self.fits(&slot)?;
        self.slots.change(|slots| slots.insert(slot))
    }

    /// Removes a slot. Its pages stay mapped until the zap that is returned has unmapped them.
    ///
    /// # Errors
    /// [`SlotError::Unknown`], [`SlotError::Busy`].
    pub fn remove(&self, id: u16) -> Result<Zap<'_, 's, F, P>, SlotError> {
        let slot = self.slots.change(|slots| slots.remove(id))?;
        Ok(Zap::new(self, slot.guest))
    }

    /// Puts a slot in the place of the one of the same number: with another backing, other
    /// permissions, at another address, logged or not. Faults see the one or the other. What is
    /// mapped of the old one is still there: zap it, to unmap it or to change what it allows.
    ///
    /// # Errors
    /// As [`insert`](Guest::insert), and [`SlotError::Unknown`]; nothing has changed.
    pub fn replace(&self, slot: Slot) -> Result<Zap<'_, 's, F, P>, SlotError> {
        self.fits(&slot)?;
        let old = self.slots.change(|slots| {
            let old = slots.remove(slot.id)?;
            // There is room: one was taken out.
            slots.insert(slot).or_else(|why| slots.insert(old).and(Err(why)))?;
            Ok(old)
        })?;
        Ok(Zap::new(self, old.guest))
    }

    /// The slot that holds an address.
    ///
    /// # Errors
    /// [`SlotError::Unknown`], [`SlotError::Busy`].
    pub fn slot(&self, at: Ipa) -> Result<Slot, SlotError> {
        let (slot, _) = self.slots.find(at.get())?;
        Ok(slot.ok_or(SlotError::Unknown)?.slot())
    }

    fn fits(&self, slot: &Slot) -> Result<(), SlotError> {
        if !slot.guest.is_aligned(F::PAGE_SHIFT) {
            return Err(SlotError::Misaligned);
        }
        if !F::is_canonical(slot.guest.last().get()) {
            return Err(SlotError::OutOfRange);
        }
        let by_hardware = matches!(slot.log, Log::ByHardware | Log::ByModification);
        if by_hardware && !self.space.caps().hardware_dirty {
            return Err(SlotError::NoHardware);
        }
        Ok(())
    }

    // ---- Faults ----

    /// Looks the fault up in the slots.
    ///
    /// # Errors
    /// Why there is nothing to map.
    pub fn request(&self, fault: &Fault) -> Result<Request, Declined> {
        let at = fault.at.get();
        let (slot, version) = self.slots.find(at).map_err(|_| Declined::Busy)?;
        let slot = slot.ok_or(Declined::NoSlot)?;
        if !slot.perms().contains(fault.access.perms()) {
            return Err(Declined::Denied(slot.slot()));
        }
        Ok(Request {
            at,
            access: fault.access,
            cause: fault.cause,
            slot,
            version,
            tables: self.guess(fault, &slot),
        })
    }

    /// How many tables are missing between where the walk ended and where the leaf will be.
    fn guess(&self, fault: &Fault, slot: &Packed) -> u8 {
        match fault.cause {
            // It has a leaf. A large one is taken apart where writes are logged.
            Cause::AccessFlag => 0,
            Cause::Permission if !slot.log().is_on() => 0,
            Cause::Permission | Cause::Translation | Cause::Unknown => {
                // Where tables are write-protected the walk of the hardware may have ended above
                // what is there.
                match fault.level.filter(|_| !self.space.may_be_protected()) {
                    Some(level) => {
                        let (at, page) = (fault.at.get(), slot.slot().page);
                        let leaf = self.fitting(at, at, slot, page);
                        level.height().saturating_sub(leaf.height())
                    }
                    // To look would be a walk for each fault. What is not needed stays in the
                    // gather for the next.
                    None => F::root_level().height(),
                }
            }
        }
    }

    /// The largest leaf around `at` that a page of `size` bytes at `frame`, the slot, and the
    /// processor allow.
    #[inline]
    fn fitting(&self, at: u64, frame: u64, slot: &Packed, size: u64) -> Level {
        if size < 1 << F::shift(Level::PAGE.up()) || slot.log().is_on() {
            return Level::PAGE;
        }
        let largest = F::largest_leaf(&self.space.caps());
        let mut best = Level::PAGE;
        let mut level = Level::PAGE.up();
        while level <= F::root_level().min(largest) && 1u64 << F::shift(level) <= size {
            let low = (1u64 << F::shift(level)) - 1;
            let (first, last) = (at & !low, at | low);
            let inside = slot.guest.start().get() <= first && last <= slot.guest.last().get();
            if !inside || (at ^ frame) & low & !((1 << F::PAGE_SHIFT) - 1) != 0 {
                break;
            }
            if F::is_leaf_level(level) {
                best = level;
            }
            level = level.up();
        }
        best
    }

    /// The leaf at `level` for the page that was found for a request.
    fn leaf(
        &self,
        request: &Request,
        page: &Backing,
        level: Level,
    ) -> Result<NewLeaf<F>, Refused<Ipa>> {
        let attrs = self.attrs(request, page)?;
        let frame = page.frame.get() & !((1u64 << F::shift(level)) - 1);
        Ok(NewLeaf::new(Ipa::new(request.at), Pa::new(frame), level, attrs)?)
    }

    fn attrs(&self, request: &Request, page: &Backing) -> Result<Attrs, Refused<Ipa>> {
        let (slot, access) = (request.slot(), request.access);
        let mut perms = slot.perms & page.perms;
        if !perms.contains(access.perms()) {
            return Err(Refused::Denied);
        }
        let writable = perms.intersects(Perms::ANY_WRITE);
        if slot.log == Log::ByFault && access != Access::Write {
            perms -= Perms::ANY_WRITE;
        }
        let base = match slot.memory.is_device() {
            true => Attrs::GUEST_DEVICE,
            false => Attrs::GUEST_MEMORY,
        };
        let writes = perms.intersects(Perms::ANY_WRITE);
        Ok(Attrs {
            perms: perms.and_user(),
            memory: slot.memory,
            accessed: true,
            // Where hardware marks what is written, it says so itself.
            software: if writable { HOST_WRITES } else { 0 },
            dirty: writes && (access == Access::Write || !self.space.caps().hardware_dirty),
            ..base
        })
    }

    /// Sets the accessed flag of the leaf that a fault was about, when that was all it was about.
    ///
    /// # Errors
    /// [`Refused::Busy`], [`Refused::Retry`].
    pub fn set_accessed(&self, fault: &Fault) -> Result<Relaxed, Refused<Ipa>> {
        self.space.relax(fault.at, Perms::empty(), false)
    }

    // ---- What is taken back ----

    /// Takes back, or changes, what is mapped in `span`. The embedder's own look-up gives the new
    /// answer already.
    pub fn zap(&self, span: Span<Ipa>) -> Zap<'_, 's, F, P> {
        self.slots.outdate();
        Zap::new(self, span)
    }

    /// Unmaps all of the guest's memory.
    pub fn zap_all(&self) -> Zap<'_, 's, F, P> {
        self.zap(Span::of_bits(F::INPUT_BITS))
    }
}

/// One processor's edits of a [`Guest`], which it borrows: a [`shared::Gather`] with what takes the
/// slots into account.
///
/// Made by [`Guest::gather`]; a virtual CPU keeps one from fault to fault. It stays with its guest:
///
/// ```compile_fail,E0596
/// # use tablewright::guest::Gather;
/// # use tablewright::format::Ept;
/// # use tablewright_hosted::Threads;
/// fn swap<'g>(a: &mut Gather<'g, 'g, Ept<4>, &Threads>, b: &mut Gather<'g, 'g, Ept<4>,
///     &Threads>) {
///     core::mem::swap(&mut **a, &mut **b);
/// }
/// ```
pub struct Gather<'g, 's, F: Format<Input = Ipa>, P: SharedPlatform + Clone> {
    guest: &'g Guest<'s, F, P>,
    gather: shared::Gather<'g, F, P>,
    /// The descriptor of the page that was mapped last without its address, if nothing has to be
    /// done to caches: most faults differ from the one before in nothing but the address.
    recent: Option<(Like, u64)>,
}

/// Sources of the attributes of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Like {
    /// All of the slot that is not an address.
    slot: u64,
    access: Access,
    /// Permissions of the host.
    perms: Perms,
}

impl<'g, F: Format<Input = Ipa>, P: SharedPlatform + Clone> Deref for Gather<'g, '_, F, P> {
    type Target = shared::Gather<'g, F, P>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.gather
    }
}

impl<'g, 's, F: Format<Input = Ipa>, P: SharedPlatform + Clone> Gather<'g, 's, F, P> {
    /// The guest.
    pub fn guest(&self) -> &'g Guest<'s, F, P> {
        self.guest
    }

    // The inner gather is not lent mutably: it could be put in the place of that of another guest.

    /// See [`shared::Gather::top_up`].
    #[inline]
    pub fn top_up(&mut self, count: u8) -> bool {
        self.gather.top_up(count)
    }

    /// See [`shared::Gather::release_tables`].
    pub fn release_tables(&mut self) {
        self.gather.release_tables();
    }

    /// See [`shared::Gather::issue`].
    pub fn issue(&mut self) -> Issued<F, P, Beside<'g, F, P>> {
        self.gather.issue()
    }

    /// See [`shared::Gather::finish`].
    ///
    /// # Errors
    /// What may still be walked.
    #[allow(clippy::result_large_err)]
    pub fn finish(&mut self, leaves: impl FnMut(Leaf<F>)) -> Result<(), DeferredReclaim<F, P>> {
        self.gather.finish(leaves)
    }

    /// See [`shared::Gather::age`].
    ///
    /// # Errors
    /// As there.
    pub fn age(
        &mut self,
        span: Span<Ipa>,
        young: impl FnMut(Leaf<F>),
    ) -> Result<Protected, EditError<Ipa>> {
        self.gather.age(span, young)
    }

    /// See [`shared::Gather::unmap`]: for good only by a [`Zap`].
    ///
    /// # Errors
    /// As there.
    pub fn unmap(
        &mut self,
        span: Span<Ipa>,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Taken<Ipa>, EditError<Ipa>> {
        self.gather.unmap(span, held)
    }

    /// See [`shared::Gather::prune`]: after a balloon, or a report of free pages.
    ///
    /// # Errors
    /// As there.
    pub fn prune(&mut self, span: Span<Ipa>) -> Result<Progress<Ipa>, EditError<Ipa>> {
        self.gather.prune(span)
    }

    /// See [`shared::Gather::split`].
    ///
    /// # Errors
    /// As there.
    pub fn split(&mut self, at: Ipa, level: Level) -> Result<bool, Refused<Ipa>> {
        self.gather.split(at, level)
    }

    /// Maps the page that was found for a request, in the largest leaf that fits, splitting a
    /// larger one that is in the way. A leaf that is there and allows less is made to allow more,
    /// or replaced if the page is another one now. Cleans what has to be cleaned, at most [`CLAIM`]
    /// bytes.
    ///
    /// # Errors
    /// [`Refused::Busy`]: let the guest go on. [`Refused::Retry`]: something has changed, or the
    /// request was made of another guest: finish the gather, which may be full, and start again
    /// with [`request`](Guest::request). [`Refused::NeedsTables`]: top up the gather and map again.
    /// [`Refused::Denied`]: the host does not allow this access. [`Refused::Edit`]: the page lies
    /// where the format does not reach.
    pub fn map(&mut self, request: &Request, page: &Backing) -> Result<Mapped<F>, Refused<Ipa>> {
        let guest = self.guest;
        let top = guest.fitting(request.at, page.frame.get(), &request.slot, page.size);
        let like = Like { slot: request.slot.rest, access: request.access, perms: page.perms };
        if let Some((of, bits)) = self.recent
            && of == like
            && top == Level::PAGE
        {
            let _walk = guest.space.platform().enter();
            let ready = guest.slots.is_current(request.version) && !guest.space.may_be_protected();
            // SAFETY: a walk is entered (1.).
            if ready && unsafe { guest.space.fill_hole(request.at(), page.frame, bits)? } {
                return Ok(Mapped::Installed);
            }
        }
        self.map_anything(request, page, top, like)
    }

    /// Maps a page whatever is there, in a leaf of any size.
    #[inline(never)]
    fn map_anything(
        &mut self,
        request: &Request,
        page: &Backing,
        top: Level,
        like: Like,
    ) -> Result<Mapped<F>, Refused<Ipa>> {
        let guest = self.guest;
        let leaf_at = |level| guest.leaf(request, page, level);
        let mut leaf = leaf_at(top)?;
        // From here to the end nothing is zapped that was looked up before.
        let _walk = guest.space.platform().enter();
        if !guest.slots.is_current(request.version) {
            return Err(Refused::Retry);
        }
        let writes = request.access == Access::Write;
        // SAFETY: a walk is entered (1.).
        unsafe { guest.space.open_walking(Ipa::new(request.at), writes)? };
        match top == Level::PAGE {
            true => self.recent = guest.space.template(&leaf).map(|bits| (like, bits)),
            false => leaf = guest.space.affordable(request.at, leaf, CLAIM, leaf_at)?,
        }
        // A leaf that is in the way is split one level at a time.
        for _ in 0..MAX_LEVELS {
            // SAFETY: a walk is entered (1.).
            let mapped = unsafe { self.gather.map_walking(&leaf) };
            match mapped {
                Err(Refused::Larger(larger)) if larger <= top => leaf = leaf_at(larger)?,
                Err(Refused::Larger(larger)) => {
                    let below = larger.down().unwrap_or(Level::PAGE);
                    let at = Ipa::new(request.at);
                    // SAFETY: a walk is entered (1.).
                    unsafe { self.gather.split_walking(at, below)? };
                }
                Ok(Mapped::Already) if request.cause != Cause::Translation => {
                    // Another processor was first, and this one remembers the leaf as it was; or
                    // the access flag alone is clear. It would fault for ever.
                    let at = Ipa::new(request.at);
                    // SAFETY: a walk is entered (1.).
                    unsafe { guest.space.relax_if(at, Perms::empty(), false, |_, _| true)? };
                    return mapped;
                }
                other => return other,
            }
        }
        Err(Refused::Retry)
    }
}

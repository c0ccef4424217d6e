//! The linear map: all memory at one offset, made when a kernel boots.
//!
//! You need this once, when your kernel boots, and again when memory is added.
//!
//! A [`MemoryMap`] says which memory there is, what of it must not be mapped, and what of it is
//! special: the kernel's code and constants. A [`LinearMap`] says where it goes and how. Building
//! it is one [`map`](AddressSpace::map) for each stretch of equal attributes; the sub-trees are
//! filled before they are linked, so that the number of barriers depends on the number of stretches
//! and not on the size of memory.
//!
//! What makes a boot slow is elsewhere: before the map exists, the tables it is made of cannot be
//! reached. How they are reached is a [`Window`]; this crate has three, and [`Windowed`] puts one
//! of them under any platform:
//!
//! | window | each table costs | needs |
//! |---|---|---|
//! | [`Direct`] | nothing | all table memory mapped already |
//! | [`Slots`] | one entry and barrier; a completion for a dozen tables | some pages of addresses |
//! | [`Coarse`] | nothing; an entry and barrier for each block of tables | a root for a while |

mod coarse;
mod firmware;
mod slots;

pub use coarse::{Coarse, OneToOne};
pub use firmware::{FirmwareRange, usable_ram};
pub use slots::{SlotMemory, Slots};

use core::fmt;
use core::ops::ControlFlow;
use core::ptr::NonNull;

use crate::addr::{Address, AddressError, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError};
use crate::edit::{Change, Mapping};
use crate::entry::{Entry, TableLink};
use crate::flush::{Held, Leaf, Progress};
use crate::format::{Attrs, Format};
use crate::invalidation::Invalidation;
use crate::platform::{Barrier, Caps, Hooks, Platform};

/// Memory, as the firmware describes it. Each list is in ascending order, without overlaps;
/// [`usable_ram`] makes such a one of what a firmware has.
///
/// ```
/// use tablewright::{Attrs, Pa, Span, linear::MemoryMap};
/// let span = |start, size| Span::new(Pa::new(start), size).unwrap();
/// let map = MemoryMap {
///     ram: &[span(0x8000_0000, 0x1000_0000)],
///     reserved: &[span(0x8400_0000, 0x10_0000)],
///     special: &[(span(0x8020_0000, 0x20_0000), Attrs::KERNEL_TEXT)],
/// };
/// let regions: Vec<_> = map.regions(Attrs::KERNEL_DATA)?.collect();
/// assert_eq!(regions.len(), 4); // before the text, the text, up to the reserved range, behind it
/// # Ok::<(), tablewright::linear::LinearError<tablewright::Va>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MemoryMap<'a> {
    /// The RAM of the machine.
    pub ram: &'a [Span<Pa>],
    /// Memory that must never be mapped: firmware, secure memory, what another owner holds.
    pub reserved: &'a [Span<Pa>],
    /// Memory that is mapped with other attributes than the rest.
    pub special: &'a [(Span<Pa>, Attrs)],
}

/// The error of a linear map that could not be made.
///
/// ```
/// use tablewright::{
///     Attrs, Mapping, Pa, Span, Va,
///     linear::{LinearError, LinearMap},
/// };
/// let linear =
///     LinearMap::new(Va::new(0xffff_8000_0000_0000), Mapping::new(Attrs::KERNEL_DATA));
/// let far = Span::new(Pa::new(1 << 48), 4096)?;
/// assert_eq!(linear.span(far), Err(LinearError::TooHigh(far.last())));
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearError<A> {
    /// A list of the memory map is out of order, or overlaps, at this range.
    Order(Span<Pa>),
    /// The range does not lie inside the memory that the map describes.
    NotRam(Span<Pa>),
    /// This memory would be mapped beyond the top of the address space.
    TooHigh(Pa),
    /// An edit was refused.
    Edit(EditError<A>),
}

impl<A> From<EditError<A>> for LinearError<A> {
    fn from(error: EditError<A>) -> Self {
        Self::Edit(error)
    }
}

impl<A: Address> fmt::Display for LinearError<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Order(span) => write!(f, "the memory map is out of order or overlaps at {span}"),
            Self::NotRam(span) => write!(f, "{span} is not all memory"),
            Self::TooHigh(frame) => write!(f, "memory at {frame} does not fit into the map"),
            Self::Edit(error) => write!(f, "{error}"),
        }
    }
}

impl<A: Address> core::error::Error for LinearError<A> {}

impl<'a> MemoryMap<'a> {
    /// The stretches of memory that are to be mapped, in ascending order, each with its attributes;
    /// `rest` is for all that is not special. Stretches that continue each other with equal
    /// attributes are one, so that a large leaf is not missed because the firmware describes memory
    /// in pieces.
    ///
    /// # Errors
    /// [`LinearError::Order`] if a list is not as it should be.
    pub fn regions<A>(&self, rest: Attrs) -> Result<Regions<'a>, LinearError<A>> {
        let ordered = |spans: &mut dyn Iterator<Item = Span<Pa>>| {
            let mut before: Option<Span<Pa>> = None;
            for span in spans {
                if before.is_some_and(|before| before.last() >= span.start()) {
                    return Err(LinearError::Order(span));
                }
                before = Some(span);
            }
            Ok(())
        };
        ordered(&mut self.ram.iter().copied())?;
        ordered(&mut self.reserved.iter().copied())?;
        ordered(&mut self.special.iter().map(|&(span, _)| span))?;
        Ok(Regions { map: *self, rest, at: 0, done: false, pending: None })
    }
}

/// The stretches of a [`MemoryMap`].
///
/// ```
/// use tablewright::{Attrs, Pa, Span, Va, linear::MemoryMap};
/// // Two ranges of one piece of memory are one region.
/// let ram = [Span::new(Pa::new(0), 0x9000)?, Span::new(Pa::new(0x9000), 0x7000)?];
/// let memory = MemoryMap { ram: &ram, reserved: &[], special: &[] };
/// let mut regions = memory.regions::<Va>(Attrs::KERNEL_DATA).unwrap();
/// assert_eq!(regions.next(), Some((Span::new(Pa::new(0), 0x1_0000)?, Attrs::KERNEL_DATA)));
/// assert_eq!(regions.next(), None);
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Regions<'a> {
    map: MemoryMap<'a>,
    rest: Attrs,
    /// Everything below has been dealt with.
    at: u64,
    done: bool,
    pending: Option<(Span<Pa>, Attrs)>,
}

impl Regions<'_> {
    /// The next piece, not merged with what follows it.
    fn piece(&mut self) -> Option<(Span<Pa>, Attrs)> {
        while !self.done {
            // What ends below is done with, in each list.
            let at = self.at;
            let past = |span: &Span<Pa>| span.last().get() < at;
            let MemoryMap { ram, reserved, special } = &mut self.map;
            *ram = &ram[ram.iter().take_while(|span| past(span)).count()..];
            *reserved = &reserved[reserved.iter().take_while(|span| past(span)).count()..];
            *special = &special[special.iter().take_while(|(span, _)| past(span)).count()..];
            let Some(ram) = ram.first() else {
                self.done = true;
                break;
            };
            let start = ram.start().get().max(at);
            let mut last = ram.last().get();
            if start > at {
                // Behind a gap: the other lists may lag.
                self.at = start;
                continue;
            }
            if let Some(reserved) = reserved.first() {
                if reserved.contains(Pa::new(start)) {
                    let last = reserved.last().get();
                    self.go_behind(last);
                    continue;
                }
                last = last.min(reserved.start().get() - 1);
            }
            let mut attrs = self.rest;
            if let Some(&(span, its)) = special.first() {
                if span.contains(Pa::new(start)) {
                    attrs = its;
                    last = last.min(span.last().get());
                } else {
                    last = last.min(span.start().get() - 1);
                }
            }
            self.go_behind(last);
            // Spans of 4 KiB units cut each other at multiples of 4 KiB.
            let span = Span::inclusive(Pa::new(start), Pa::new(last)).ok()?;
            return Some((span, attrs));
        }
        None
    }

    fn go_behind(&mut self, last: u64) {
        match last.checked_add(1) {
            Some(at) => self.at = at,
            None => self.done = true,
        }
    }
}

impl Iterator for Regions<'_> {
    type Item = (Span<Pa>, Attrs);

    fn next(&mut self) -> Option<Self::Item> {
        let (mut span, attrs) = self.pending.take().or_else(|| self.piece())?;
        while let Some(next) = self.piece() {
            let joined = Span::inclusive(span.start(), next.0.last());
            match joined {
                Ok(joined) if next.1 == attrs && joined.size() == span.size() + next.0.size() => {
                    span = joined;
                }
                _ => {
                    self.pending = Some(next);
                    break;
                }
            }
        }
        Some((span, attrs))
    }
}

/// A linear map: the address of its first page, and the way to map.
///
/// ```
/// use tablewright::linear::{LinearMap, MemoryMap};
/// use tablewright::{AddressSpace, Attrs, Half, Mapping, Pa, Span, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
///
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<Arm64K4, _>::new_in(&platform, Half::Upper).unwrap();
/// let ram = [Span::new(Pa::new(0x8000_0000), 1 << 30)?];
/// let memory = MemoryMap { ram: &ram, reserved: &[], special: &[] };
///
/// let linear =
///     LinearMap::new(Va::new(0xffff_0000_0000_0000), Mapping::new(Attrs::KERNEL_DATA));
/// linear.build(&mut space, &memory)?;
/// let leaf = space.query(Va::new(0xffff_0000_8123_4567)).unwrap();
/// assert_eq!((leaf.frame(), leaf.size()), (Pa::new(0x8000_0000), 1 << 30));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LinearMap<A> {
    offset: A,
    mapping: Mapping,
}

impl<A: Address> LinearMap<A> {
    /// The map in which physical address 0 would be at `offset`. `mapping` is for all that is not
    /// special, and says which leaves may be used for everything.
    pub const fn new(offset: A, mapping: Mapping) -> Self {
        Self { offset, mapping }
    }

    /// Returns the address of `frame` in the map; `None` beyond the top of the address space.
    pub fn input(&self, frame: Pa) -> Option<A> {
        let bits = self.offset.bits().checked_add(frame.get())?;
        Some(A::from_bits(bits))
    }

    /// Returns the addresses of a range of memory in the map.
    ///
    /// # Errors
    /// [`LinearError::TooHigh`] if it would not end below the top of the address space.
    pub fn span(&self, memory: Span<Pa>) -> Result<Span<A>, LinearError<A>> {
        self.input(memory.start())
            .and_then(|start| Span::new(start, memory.size()).ok())
            .ok_or(LinearError::TooHigh(memory.last()))
    }

    /// Maps all memory. If that fails, what was mapped is unmapped again.
    ///
    /// # Errors
    /// [`LinearError`] says which part of the memory map, or which edit.
    pub fn build<F, P>(
        &self,
        space: &mut AddressSpace<F, P>,
        memory: &MemoryMap<'_>,
    ) -> Result<(), LinearError<A>>
    where
        F: Format<Input = A>,
        P: Platform + Clone,
    {
        self.build_where(space, memory, Some)
    }

    /// Maps memory that was added: the part of `memory` that lies in `added`.
    ///
    /// # Errors
    /// As [`build`](Self::build), and [`LinearError::NotRam`] if nothing of the range is memory.
    pub fn add<F, P>(
        &self,
        space: &mut AddressSpace<F, P>,
        memory: &MemoryMap<'_>,
        added: Span<Pa>,
    ) -> Result<(), LinearError<A>>
    where
        F: Format<Input = A>,
        P: Platform + Clone,
    {
        if !memory.ram.iter().any(|ram| ram.intersect(added).is_some()) {
            return Err(LinearError::NotRam(added));
        }
        self.build_where(space, memory, |span| span.intersect(added))
    }

    fn build_where<F, P>(
        &self,
        space: &mut AddressSpace<F, P>,
        memory: &MemoryMap<'_>,
        part: impl Fn(Span<Pa>) -> Option<Span<Pa>>,
    ) -> Result<(), LinearError<A>>
    where
        F: Format<Input = A>,
        P: Platform + Clone,
    {
        let mut gather = space.gather();
        let parts = |(span, attrs)| part(span).map(|span| (span, attrs));
        let regions = memory.regions(self.mapping.attrs())?.filter_map(parts);
        for (number, (span, attrs)) in regions.clone().enumerate() {
            let mapped = self
                .span(span)
                .and_then(|input| {
                    let mapping = self.mapping.with_attrs(attrs);
                    Ok(gather.map(input, span.start(), mapping)?)
                })
                .map_err(|error| (number, error));
            if let Err((failed, error)) = mapped {
                for (span, _) in regions.take(failed) {
                    let mut rest = Some(self.span(span)?);
                    while let Some(input) = rest {
                        rest = match gather.unmap(input, |_| ControlFlow::Continue(()))? {
                            Progress::Done => None,
                            // It can carry no more tables.
                            Progress::Stopped(at) => {
                                gather.flush(|_| ());
                                Span::inclusive(at, input.last()).ok()
                            }
                        };
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Unmaps memory that is to be removed. The leaves are memory of the machine, which is not
    /// freed; `held` and what comes out of the gather serve to account for them.
    ///
    /// # Errors
    /// As [`Gather::unmap`].
    pub fn remove<F, P>(
        &self,
        gather: &mut Gather<'_, F, P>,
        removed: Span<Pa>,
        held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<A>, LinearError<A>>
    where
        F: Format<Input = A>,
        P: Platform + Clone,
    {
        Ok(gather.unmap(self.span(removed)?, held)?)
    }

    /// Changes the attributes of memory: sealing the kernel's constants after boot, for instance.
    /// Leaves one range to invalidate.
    ///
    /// # Errors
    /// As [`Gather::protect`].
    pub fn protect<F, P>(
        &self,
        gather: &mut Gather<'_, F, P>,
        memory: Span<Pa>,
        change: Change,
    ) -> Result<(), LinearError<A>>
    where
        F: Format<Input = A>,
        P: Platform + Clone,
    {
        Ok(gather.protect(self.span(memory)?, change)?)
    }
}

/// A way to reach tables before the map that will reach them exists.
///
/// # Safety
/// An implementation promises:
/// 1. [`open`](Window::open) returns a pointer through which the frame can be read and written as
///    [`Platform::table`] demands, until [`close`](Window::close) is called with it.
///
/// ```
/// use core::{cell::Cell, ptr::NonNull};
/// use tablewright::{
///     AddressSpace, Entry, Level, Pa, Platform,
///     format::X86_64,
///     linear::{Window, Windowed},
/// };
/// use tablewright_hosted::Hosted;
///
/// /// A window that counts, over memory that is reachable anyway.
/// struct Counting<'h>(&'h Hosted, Cell<u32>);
///
/// // SAFETY: the pointer is that of the platform (1.).
/// unsafe impl Window for Counting<'_> {
///     unsafe fn open(&self, frame: Pa, level: Level) -> NonNull<Entry> {
///         self.1.set(self.1.get() + 1);
///         // SAFETY: passed on.
///         unsafe { self.0.table(frame, level) }
///     }
///     fn close(&self, _: Pa, _: NonNull<Entry>) {}
/// }
///
/// let hosted = Hosted::new(8, 12);
/// let window = Counting(&hosted, Cell::new(0));
/// // SAFETY: the window shows whatever the platform does (1.).
/// let platform = unsafe { Windowed::new(&hosted, &window) };
/// let _space = AddressSpace::<X86_64<4>, _>::new(platform).unwrap();
/// assert_eq!(window.1.get(), 1); // the root, to zero it
/// ```
pub unsafe trait Window {
    /// Makes a frame reachable.
    ///
    /// # Safety
    /// 1. The frame was allocated for a table, or is part of a tree of tables.
    unsafe fn open(&self, frame: Pa, level: Level) -> NonNull<Entry>;

    /// The pointer is not used any more. The frame may stay reachable until the window is needed
    /// for another.
    fn close(&self, frame: Pa, table: NonNull<Entry>);

    /// No table is open, and none will be for a while: closes whatever is still reachable, with one
    /// completion.
    fn end_batch(&self) {}
}

// SAFETY: (1.) is passed on.
unsafe impl<W: Window> Window for &W {
    #[inline]
    unsafe fn open(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { (**self).open(frame, level) }
    }
    #[inline]
    fn close(&self, frame: Pa, table: NonNull<Entry>) {
        (**self).close(frame, table);
    }
    fn end_batch(&self) {
        (**self).end_batch();
    }
}

/// A window over table memory that is mapped already, all of it at one offset.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::{Entry, Pa, linear::Direct};
/// let frame = [const { 0u64 }; 512];
/// // SAFETY: no table is opened in this example.
/// let window = unsafe { Direct::new(NonNull::from(&frame).cast(), Pa::new(0x8000_0000)) };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Direct {
    base: NonNull<u8>,
    first: Pa,
}

impl Direct {
    /// A window in which the memory from `first` on is at `base`.
    ///
    /// # Safety
    /// 1. Every frame that will be opened is mapped at its distance from `first`, readable and
    ///    writable, inside the allocation that `base` points into.
    pub const unsafe fn new(base: NonNull<u8>, first: Pa) -> Self {
        Self { base, first }
    }
}

// SAFETY: (1.) is the promise made to `new`.
unsafe impl Window for Direct {
    #[inline]
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let offset = frame.get().wrapping_sub(self.first.get()) as usize;
        // SAFETY: the frame lies inside the allocation, as the caller of `new` promised.
        unsafe { self.base.add(offset).cast() }
    }

    #[inline]
    fn close(&self, _: Pa, _: NonNull<Entry>) {}
}

/// A platform whose tables are reached through a window. Everything else it passes on.
///
/// ```
/// use tablewright::{
///     AddressSpace, Pa, Platform,
///     format::X86_64,
///     linear::{Direct, Windowed},
/// };
/// use tablewright_hosted::Hosted;
/// let hosted = Hosted::new(8, 12);
/// // SAFETY: the frame is the first of the region.
/// let base = unsafe { hosted.table(Hosted::BASE, tablewright::Level::PAGE) };
/// // SAFETY: all frames of the platform lie in the region that starts there.
/// let window = unsafe { Direct::new(base.cast(), Hosted::BASE) };
/// // SAFETY: all frames of the platform lie in that region (1.).
/// let space =
///     AddressSpace::<X86_64<4>, _>::new(unsafe { Windowed::new(&hosted, &window) }).unwrap();
/// assert_eq!(space.root(), Hosted::BASE);
/// ```
#[derive(Debug)]
pub struct Windowed<'a, P, W: ?Sized> {
    platform: &'a P,
    window: &'a W,
}

impl<'a, P, W: ?Sized> Windowed<'a, P, W> {
    /// `platform`, with its tables reached through `window`. With a `dyn Window` the engine is
    /// compiled once for all windows.
    ///
    /// # Safety
    /// 1. The window can show every frame that the platform hands out, or will hand out, for
    ///    tables; and so many at a time as [`Platform`] 2 says.
    pub const unsafe fn new(platform: &'a P, window: &'a W) -> Self {
        Self { platform, window }
    }
}

impl<P, W: ?Sized> Clone for Windowed<'_, P, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P, W: ?Sized> Copy for Windowed<'_, P, W> {}

// SAFETY: frames and links come from the platform (1., 3.), pointers from the window, for which the
// caller of `new` has vouched (2.); barriers and invalidations are the platform's (4., 5., 6.); a
// copy refers to the same two (7.).
unsafe impl<P: Platform, W: Window + ?Sized> Platform for Windowed<'_, P, W> {
    #[inline]
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.platform.alloc_table(level)
    }
    #[inline]
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.platform.free_table(frame, level) }
    }
    #[inline]
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: (1.) of `table` is (1.) of `open`.
        unsafe { self.window.open(frame, level) }
    }
    #[inline]
    fn table_done(&self, frame: Pa, table: NonNull<Entry>) {
        self.window.close(frame, table);
    }
    #[inline]
    fn barrier(&self, barrier: Barrier) {
        self.platform.barrier(barrier);
    }
    #[inline]
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.platform.invalidate(what);
    }
    #[inline]
    fn caps(&self) -> Caps {
        self.platform.caps()
    }
    #[inline]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.platform.link_of(frame)
    }
    #[inline]
    fn identity_of(&self, root: Pa) -> Option<&crate::identity::Identity> {
        self.platform.identity_of(root)
    }
    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        self.platform.alloc_root(level, tables)
    }
    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        // SAFETY: passed on.
        unsafe { self.platform.free_root(root, level, tables) }
    }
    #[inline]
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.platform.hooks()
    }
}

impl<A> From<AddressError> for LinearError<A> {
    fn from(_: AddressError) -> Self {
        Self::Edit(EditError::Misaligned)
    }
}

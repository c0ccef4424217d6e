//! A coarse map of table memory, for the time of the boot.
//!
//! A root of its own, beside the one being built (on arm64 the other half), maps table memory to
//! its physical address with blocks. It grows by need: the first time that a table lies in a block
//! that is not mapped, the block is. It grows over table memory only, and inside a block only over
//! what may be mapped, so that nothing is ever mapped, even unused, that must not be.
//!
//! Its own tables are table memory too. Until it covers itself they are reached through another
//! window, a few fixed slots; from then on through the map itself. No entry of it is ever changed
//! or taken away while it is in use, so there is nothing to invalidate until the end: then the root
//! is taken out of use, everything cached of it is invalidated once, and its tables are freed from
//! the leaves up.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr::NonNull;

use super::{MemoryMap, Window, Windowed};
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Mapping;
use crate::edit::space::{AddressSpace, Half, Liveness};
use crate::entry::Entry;
use crate::format::{Attrs, Format};
use crate::invalidation::{Invalidation, What};
use crate::platform::{Barrier, Platform};

/// The pointers by which code reaches memory through the coarse map.
///
/// # Safety
/// 1. [`pointer`](OneToOne::pointer) points to the address that equals that of `frame`; while the
///    coarse map is in use and maps the frame, it can be read and written through it.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::{Entry, Pa, linear::OneToOne};
///
/// /// Physical addresses as they are, below a base that stands for all memory.
/// struct Low(NonNull<u8>);
///
/// // SAFETY: the coarse map translates each address to itself (1.).
/// unsafe impl OneToOne for Low {
///     fn pointer(&self, frame: Pa) -> NonNull<Entry> {
///         // SAFETY: the frame lies in the memory that the base stands for.
///         unsafe { self.0.add(frame.get() as usize).cast() }
///     }
/// }
/// ```
pub unsafe trait OneToOne {
    /// The first entry of the table in `frame`.
    fn pointer(&self, frame: Pa) -> NonNull<Entry>;
}

// SAFETY: (1.) is passed on.
unsafe impl<I: OneToOne> OneToOne for &I {
    fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        (**self).pointer(frame)
    }
}

/// How many separate blocks are remembered as mapped. Table memory mostly comes from one place; a
/// frame elsewhere is reached through the other window, which is slower and as correct.
const MAX_COVERED: usize = 16;

/// Memory that the map covers, for the map and for its own platform.
struct Covered<I, W> {
    identity: I,
    window: W,
    spans: Cell<[Option<Span<Pa>>; MAX_COVERED]>,
}

impl<I: OneToOne, W: Window> Covered<I, W> {
    #[inline]
    fn has(&self, frame: Pa) -> bool {
        let has = |span: &Option<Span<Pa>>| span.is_some_and(|span| span.contains(frame));
        self.spans.get().iter().any(has)
    }

    /// Remembers one more range, merged with those that it touches. Whether there was room.
    fn add(&self, span: Span<Pa>) -> bool {
        let mut spans = self.spans.get();
        for place in &mut spans {
            let joined = match place {
                None => Some(span),
                Some(there) => {
                    let start = there.start().min(span.start());
                    let last = there.last().max(span.last());
                    Span::inclusive(start, last)
                        .ok()
                        .filter(|joined| joined.size() == there.size() + span.size())
                }
            };
            if joined.is_some() {
                *place = joined;
                self.spans.set(spans);
                return true;
            }
        }
        false
    }
}

// SAFETY: a frame that is covered is reached through the map, another through the window; both
// promise (1.). What is covered only grows while anything is open, and a frame that the window
// showed is closed there.
unsafe impl<I: OneToOne, W: Window> Window for Covered<I, W> {
    #[inline]
    unsafe fn open(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        if self.has(frame) {
            self.identity.pointer(frame)
        } else {
            // SAFETY: passed on.
            unsafe { self.window.open(frame, level) }
        }
    }

    #[inline]
    fn close(&self, frame: Pa, table: NonNull<Entry>) {
        // A frame that was opened through the window may have been covered since.
        if !self.has(frame) || table != self.identity.pointer(frame) {
            self.window.close(frame, table);
        }
    }
}

/// A window that maps blocks of table memory as they are needed, in a root of its own.
///
/// Make it, load [`root`](Coarse::root), use it under a [`Windowed`] platform, unload the root, and
/// [`finish`](Coarse::finish) it.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::{AddressSpace, Attrs, Entry, Level, Pa, Platform, Span, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// use tablewright::linear::{Coarse, Direct, OneToOne, MemoryMap, Windowed};
///
/// struct Memory<'h>(&'h Hosted);
/// // SAFETY: here, where nothing translates, the pointer is that of the frame (1.).
/// unsafe impl OneToOne for Memory<'_> {
///     fn pointer(&self, frame: Pa) -> NonNull<Entry> {
///         // SAFETY: the map covers frames of the platform only.
///         unsafe { self.0.table(frame, Level::PAGE) }
///     }
/// }
///
/// let hosted = Hosted::new(64, 12);
/// let ram = [Span::new(Hosted::BASE, 64 << 12)?];
/// let memory = MemoryMap { ram: &ram, reserved: &[], special: &[] };
/// // SAFETY: the first frame of the region, and all of them from there on.
/// let slots = unsafe { Direct::new(hosted.table(Hosted::BASE, Level::PAGE).cast(),
///     Hosted::BASE) };
/// // SAFETY: all frames of the platform lie in the region (1.); nothing loads the root here (2.).
/// let coarse = unsafe {
///     Coarse::<Arm64K4, _, _, _>::new(&hosted, Memory(&hosted), slots, memory,
///         Attrs::KERNEL_DATA, 0)
/// }
/// .ok_or("no memory")?;
/// // ... on a machine: load coarse.root() into TTBR0_EL1 ...
/// // SAFETY: the map shows all frames of the platform (1.).
/// let platform = unsafe { Windowed::new(&hosted, &coarse) };
/// let space = AddressSpace::<Arm64K4, _>::new(platform).ok_or("no memory")?;
/// // ... build the map, load its root, unload that of the coarse map ...
/// let root = space.root();
/// // SAFETY: the root is not loaded; the frames came from this platform.
/// unsafe { coarse.finish(&hosted) };
/// assert_eq!(hosted.counts().tables, 1); // the root of the new space
/// # let _ = root;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Coarse<'p, 'm, F: Format, P: Platform, I: OneToOne, W: Window> {
    platform: &'p P,
    covered: Covered<I, W>,
    memory: MemoryMap<'m>,
    attrs: Attrs,
    root: Pa,
    id: u16,
    growing: Cell<bool>,
    format: PhantomData<F>,
}

impl<'p, 'm, F: Format, P: Platform, I: OneToOne, W: Window> Coarse<'p, 'm, F, P, I, W> {
    /// An empty coarse map, for memory that `memory` describes as neither reserved nor special, or
    /// special with the same attributes. Its own tables are reached through `window` until they are
    /// covered. `None` without a frame for the root.
    ///
    /// # Safety
    /// 1. As for [`Windowed::new`], of this window and this platform.
    /// 2. A processor that loads the [root](Self::root) loads it with `id`.
    pub unsafe fn new(
        platform: &'p P,
        identity: I,
        window: W,
        memory: MemoryMap<'m>,
        attrs: Attrs,
        id: u16,
    ) -> Option<Self> {
        let covered = Covered { identity, window, spans: Cell::new([None; MAX_COVERED]) };
        // SAFETY: the map covers, or the window shows, all frames of the platform (1.).
        let windowed = unsafe { Windowed::new(platform, &covered as &dyn Window) };
        let root = AddressSpace::<F, _>::new_in(windowed, Half::Lower)?.root();
        platform.barrier(Barrier::Publish);
        Some(Self {
            platform,
            covered,
            memory,
            attrs,
            root,
            id,
            growing: Cell::new(false),
            format: PhantomData,
        })
    }

    /// The root to load: on arm64 into `TTBR0_EL1`.
    pub fn root(&self) -> Pa {
        self.root
    }

    /// The part of the block around `frame` that may be mapped.
    fn block(&self, frame: Pa) -> Option<Span<Pa>> {
        let shift = F::shift(Level::new(1));
        let start = frame.get() >> shift << shift;
        let block = Span::new(Pa::new(start), 1 << shift).ok()?;
        let regions = self.memory.regions::<F::Input>(self.attrs).ok()?;
        // Special memory has attributes that a second mapping would contradict.
        regions
            .filter(|&(_, attrs)| attrs == self.attrs)
            .filter_map(|(span, _)| span.intersect(block))
            .find(|span| span.contains(frame))
            .filter(|span| span.is_aligned(F::PAGE_SHIFT))
    }

    /// Maps the block around `frame`, if that is possible.
    fn grow(&self, frame: Pa) {
        let Some(block) = self.block(frame) else {
            return;
        };
        let Ok(span) = Span::new(F::Input::from_bits(block.start().get()), block.size()) else {
            return;
        };
        // The map is edited through itself where it covers its own tables, and through the window
        // where it does not. SAFETY: as in `new` (1.).
        let windowed = unsafe { Windowed::new(self.platform, &self.covered as &dyn Window) };
        // SAFETY: the root was made by `new` and is edited only here, and `growing` keeps this from
        // being entered twice (1., 2.); the embedder loads it, so that it is live from the start
        // (3.).
        let mut space = unsafe {
            AddressSpace::<F, _>::take_over(windowed, self.root, Half::Lower, Liveness::Live)
        };
        space.id = self.id;
        let mapped = space.map(span, block.start(), Mapping::new(self.attrs));
        if mapped.is_ok() {
            // Where there are more places than can be remembered, what is mapped there is not used.
            let _remembered = self.covered.add(block);
        }
    }

    /// Frees the tables, when the root has been unloaded: invalidates everything cached of it,
    /// once, waits, and frees from the leaves up. `reach` is a platform on the same frames that can
    /// reach the tables now, through the finished linear map or through slots.
    ///
    /// # Safety
    /// 1. No processor has the root loaded any more.
    /// 2. `reach` frees to where the frames came from.
    pub unsafe fn finish<R: Platform + Clone>(self, reach: R) {
        let everything = Invalidation {
            root: self.root,
            id: self.id,
            global: self.attrs.global,
            what: What::Everything,
        };
        self.platform.barrier(Barrier::Publish);
        self.platform.invalidate(&everything);
        self.platform.barrier(Barrier::Complete);
        // SAFETY: the root was made by `new` and has no other user (1., 2.); it is dead since the
        // completion (3.).
        let space = unsafe {
            AddressSpace::<F, R>::take_over(reach, self.root, Half::Lower, Liveness::Dead)
        };
        // A dead space can always be destroyed.
        let _destroyed = space.destroy(|_| ());
    }
}

// SAFETY: as for the two ways of reaching a frame (1.); a block is used only once its entry is
// published.
unsafe impl<F: Format, P: Platform, I: OneToOne, W: Window> Window for Coarse<'_, '_, F, P, I, W> {
    #[inline]
    unsafe fn open(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        let covered = &self.covered;
        if !covered.has(frame) && !self.growing.replace(true) {
            self.grow(frame);
            self.growing.set(false);
        }
        // SAFETY: passed on.
        unsafe { covered.open(frame, level) }
    }

    #[inline]
    fn close(&self, frame: Pa, table: NonNull<Entry>) {
        self.covered.close(frame, table);
    }

    fn end_batch(&self) {
        self.covered.window.end_batch();
    }
}

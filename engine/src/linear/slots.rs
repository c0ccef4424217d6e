//! Fixed slots: a few pages of address space through which any frame can be reached, one frame in
//! each.
//!
//! The entries of the slots lie in a table that is reachable before anything else (the fixmap of a
//! kernel). Opening a frame writes one entry and publishes it. Closing writes nothing: the slot is
//! *stale*, still mapped and free for the same frame. Only when a slot is needed and none is clean
//! are all stale slots cleared, together, under one invalidation and one completion. A slot is
//! never given to another frame before that completion: a processor may remember where it pointed
//! to.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr::NonNull;

use super::Window;
use crate::addr::{Address, Level, Pa, Span};
use crate::entry::Entry;
use crate::format::{Attrs, Format, Inexpressible};
use crate::invalidation::{Invalidation, Stale, What};
use crate::platform::{Barrier, Platform};
use crate::table::store;

/// The pointers by which code reaches memory through a slot.
///
/// # Safety
/// 1. [`pointer`](SlotMemory::pointer) points to the page at the slot's address; while the slot's
///    entry maps `frame`, it can be read and written through it.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::{Entry, Pa, linear::SlotMemory};
///
/// /// Slots of 4 KiB, one behind the other from a fixed address on.
/// struct Fixmap(NonNull<u8>);
///
/// // SAFETY: the slots are mapped at these addresses (1.).
/// unsafe impl SlotMemory for Fixmap {
///     fn pointer(&self, slot: usize, _frame: Pa) -> NonNull<Entry> {
///         // SAFETY: the region has as many pages as there are slots.
///         unsafe { self.0.add(slot << 12).cast() }
///     }
/// }
/// ```
pub unsafe trait SlotMemory {
    /// The first entry of the frame that slot number `slot` shows.
    fn pointer(&self, slot: usize, frame: Pa) -> NonNull<Entry>;
}

// SAFETY: (1.) is passed on.
unsafe impl<M: SlotMemory> SlotMemory for &M {
    fn pointer(&self, slot: usize, frame: Pa) -> NonNull<Entry> {
        (**self).pointer(slot, frame)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not mapped, and no processor remembers that it was.
    Clean,
    /// Shows a frame to this many users; none: it is stale.
    Shows(Pa, u32),
}

/// A window of `N` slots.
///
/// `N` is at least the number of levels and two more, so that a walk that has a table open at each
/// level never waits for itself; with fewer it does not compile.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::{AddressSpace, Attrs, Entry, Format, Level, Pa, Platform, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// use tablewright::linear::{SlotMemory, Slots, Window, Windowed};
///
/// /// On a machine, the address of the slot; here, where nothing translates, that of the frame.
/// struct Fixmap<'h>(&'h Hosted);
///
/// // SAFETY: the pointer is that of the frame which the slot shows (1.).
/// unsafe impl SlotMemory for Fixmap<'_> {
///     fn pointer(&self, _slot: usize, frame: Pa) -> NonNull<Entry> {
///         // SAFETY: the window shows frames of the platform only.
///         unsafe { self.0.table(frame, Level::PAGE) }
///     }
/// }
///
/// let hosted = Hosted::new(64, 12);
/// // on a machine, sixteen entries of the fixmap's table
/// let entries = [const { 0 }; 16].map(Entry::new);
/// let first = NonNull::from(&entries[0]);
/// let at = Va::new(0xffff_fdff_fe00_0000);
/// // SAFETY: the entries are zero, ours, and outlive the window.
/// let window = unsafe {
///     Slots::<Arm64K4, _, _, 16>::new(&hosted, Fixmap(&hosted), at, first, &Attrs::KERNEL_DATA,
///         (Pa::new(0), 0))
/// }?;
/// // SAFETY: the slots show whatever the platform hands out (1.).
/// let space = AddressSpace::<Arm64K4, _>::new(unsafe { Windowed::new(&hosted,
///     &window) }).unwrap();
/// assert_eq!(Arm64K4::address(entries[0].load(), Level::PAGE), space.root());
/// window.end_batch();
/// assert_eq!(entries[0].load(), 0);
/// # Ok::<(), tablewright::Inexpressible>(())
/// ```
pub struct Slots<'p, F: Format, P, M, const N: usize> {
    platform: &'p P,
    memory: M,
    entries: NonNull<Entry>,
    first: u64,
    root: Pa,
    id: u16,
    global: bool,
    leaf: u64,
    states: [Cell<State>; N],
    format: PhantomData<F>,
}

impl<'p, F: Format, P: Platform, M: SlotMemory, const N: usize> Slots<'p, F, P, M, N> {
    const ENOUGH: () = assert!(
        N >= F::LEVELS as usize + 2 && N <= 1 << (F::PAGE_SHIFT - 3),
        "a slot for each level and two more, all in one table"
    );

    /// Slots at `N` consecutive pages from `first` on, whose entries are the `N` entries from
    /// `entries` on. They show memory with `attrs`, and are invalidated in the space of this root
    /// and identity.
    ///
    /// # Errors
    /// [`Inexpressible`] if the format cannot hold the attributes.
    ///
    /// # Safety
    /// 1. `entries` points to `N` consecutive entries of a table at the level of pages that
    ///    translate the `N` pages from `first` on; they are 0, have no other user, and stay
    ///    reachable through this pointer for as long as the window exists.
    pub unsafe fn new(
        platform: &'p P,
        memory: M,
        first: F::Input,
        entries: NonNull<Entry>,
        attrs: &Attrs,
        (root, id): (Pa, u16),
    ) -> Result<Self, Inexpressible> {
        let () = Self::ENOUGH;
        Ok(Self {
            platform,
            memory,
            entries,
            first: first.bits(),
            root,
            id,
            global: attrs.global,
            leaf: F::encode(attrs, Level::PAGE)?,
            states: [const { Cell::new(State::Clean) }; N],
            format: PhantomData,
        })
    }

    /// The address space that the slots take.
    pub fn span(&self) -> Option<Span<F::Input>> {
        Span::new(F::Input::from_bits(self.first), (N as u64) << F::PAGE_SHIFT).ok()
    }

    fn entry(&self, slot: usize) -> NonNull<Entry> {
        // SAFETY: `slot < N`, and the caller of `new` vouched for N entries.
        unsafe { self.entries.add(slot) }
    }

    /// Clears all stale slots, with one invalidation and one completion.
    fn clean(&self) {
        let (mut lowest, mut highest) = (usize::MAX, 0);
        for (slot, state) in self.states.iter().enumerate() {
            if matches!(state.get(), State::Shows(_, 0)) {
                // SAFETY: a valid entry, without another editor; flags that a walker may set in it
                // are not wanted.
                unsafe { store(self.platform, self.entry(slot), 0) };
                (lowest, highest) = (lowest.min(slot), slot);
            }
        }
        if lowest == usize::MAX {
            return;
        }
        self.platform.barrier(Barrier::Publish);
        let at = |slot: usize| self.first + ((slot as u64) << F::PAGE_SHIFT);
        let stale = Stale {
            first: at(lowest),
            // The next slot may begin beyond the addresses that there are.
            last: at(highest) | ((1 << F::PAGE_SHIFT) - 1),
            level: Some(Level::PAGE),
            tables: false,
        };
        self.platform.invalidate(&Invalidation {
            root: self.root,
            id: self.id,
            global: self.global,
            what: What::Ranges(&[stale]),
        });
        self.platform.barrier(Barrier::Complete);
        for state in &self.states {
            if matches!(state.get(), State::Shows(_, 0)) {
                state.set(State::Clean);
            }
        }
    }

    fn find(&self, wanted: impl Fn(State) -> bool) -> Option<usize> {
        self.states.iter().position(|state| wanted(state.get()))
    }
}

// SAFETY: the slot of an open frame is not cleared or given away before it is closed as often as it
// was opened, and while it shows the frame, `SlotMemory::pointer` can be used (1.).
unsafe impl<F: Format, P: Platform, M: SlotMemory, const N: usize> Window
    for Slots<'_, F, P, M, N>
{
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let shown = |state: State| matches!(state, State::Shows(it, _) if it == frame);
        let slot = match self.find(shown) {
            Some(slot) => slot,
            None => {
                let clean = |state| state == State::Clean;
                let slot = self.find(clean).or_else(|| {
                    self.clean();
                    self.find(clean)
                });
                // A walk has one table open at each level, and an edit one or two besides; there is
                // a slot for each.
                let Some(slot) = slot else {
                    unreachable!("more tables are open than a walk can have")
                };
                let entry = F::with_address(self.leaf, frame);
                // SAFETY: a valid entry, without another editor.
                unsafe { store(self.platform, self.entry(slot), entry) };
                self.platform.barrier(Barrier::Publish);
                self.states[slot].set(State::Shows(frame, 0));
                slot
            }
        };
        if let State::Shows(frame, users) = self.states[slot].get() {
            self.states[slot].set(State::Shows(frame, users + 1));
        }
        self.memory.pointer(slot, frame)
    }

    fn close(&self, frame: Pa, _: NonNull<Entry>) {
        for state in &self.states {
            if let State::Shows(it, users @ 1..) = state.get()
                && it == frame
            {
                state.set(State::Shows(it, users - 1));
                return;
            }
        }
    }

    fn end_batch(&self) {
        self.clean();
    }
}

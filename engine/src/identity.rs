//! Identifiers of address spaces (ASID, PCID, VMID): few, given again and again, and never while
//! entries are left under them.
//!
//! Hardware has 256 to 65536 of them. They are given out in order until none is left. Then a new
//! **generation** begins: those that CPUs may have loaded stay with their spaces, all others are
//! free again, and **every CPU has a flush of everything pending**, which it makes before it loads
//! an identifier of the new generation. A space whose identifier is of an older generation gets
//! another when it is loaded next. So nothing is ever freed by itself, and no CPU is interrupted.
//!
//! # The fast path
//!
//! A CPU that loads a space whose identifier is of this generation says so in its *active* word, by
//! one compare-exchange, and takes no lock. A CPU that begins a generation moves its number on and
//! then takes each active word away, by an exchange with 0. Of the two, on one word, one comes
//! first. If it is that of the CPU that loads, the identifier is seen, and stays reserved. If it is
//! the exchange, that CPU finds 0, and takes the slow path, where the flush that is pending is
//! found. An active word is 0 until its own CPU has been on the slow path; so a compare-exchange
//! that finds what was read has not been overtaken.
//!
//! A CPU has the space that it leaves loaded until it has loaded the next: its walker reads the
//! tables of the one while its active word names the other. So the word *before* stays reserved as
//! well, until the CPU asks for the next space.
//!
//! The slow path needs the [`Allocator`], exclusively; the embedder has it behind a lock.
//!
//! # Spaces that are invalidated by identity
//!
//! A platform that says which [`Identity`] a root has
//! ([`Platform::identity_of`](crate::Platform::identity_of)) has every invalidation of the space
//! name the current identifier, and CPUs load what [`Identifiers::switch`] says: root and
//! identifier. Why that is enough:
//!
//! | a CPU that edits | a CPU that loads the space |
//! |---|---|
//! | changes entries, publishes them | gives the space an identifier, if its own is of before |
//! | full fence | full fence |
//! | reads the identifier, and invalidates under it | its walker reads entries |
//!
//! * *The identifier that is read is the one under which the space is loaded, wherever it is.* A
//!   space that is loaded when a generation begins keeps its identifier, because those of each
//!   active word and of the one before stay reserved. So it is never loaded under two at a time.
//! * *The space is given another after the identifier was read.* Then a CPU that loads it under
//!   that one walks the entries as they have become.
//! * *The space had another before.* What CPUs remember under that one is of no use to any of them:
//!   it is given out again only in a generation that a CPU enters behind a flush of everything. A
//!   frame that comes out may still stand in a TLB under it, and is not reached through it.
//! * *The space was never loaded.* The identifier is 0, which no space has. By the second point
//!   there is nothing to be forgotten; it is issued all the same, under 0. An edit between
//!   `make_live` and the first load is too rare for a case of its own.
//!
//! On the fast path there is no fence. The CPU reads a word that another has written, and a walk
//! comes after that read; on arm64 and x86 what one CPU has seen of another all have (DDI 0487
//! B2.3, other-multi-copy atomicity; SDM vol. 3A 9.2.3.5), so that an edit that reads an older word
//! has changed its entries before.

use crate::addr::Pa;
use crate::sync::{AtomicBool, AtomicU64, Ordering, const_new, fence};

/// Identifiers are the low bits of a word, the generation the rest. 0 is none.
const BITS: u32 = 16;

/// The identifiers that one CPU has loaded and whose translations its TLB may hold.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Holder {
    /// The identifier that it has loaded, with its generation; 0 from the beginning of a generation
    /// until it loads one of it.
    active: AtomicU64,
    /// The one that it had loaded before, and has until it has loaded the active one.
    before: AtomicU64,
    /// The one that it had when the last generation began. Only the CPU that has the allocator
    /// reads or writes it.
    reserved: AtomicU64,
    /// Whether it has to flush everything before it loads an identifier.
    pending: AtomicBool,
}

impl Holder {
    const_new! {
        /// The state of a CPU that has loaded nothing.
        {
            Self {
                active: AtomicU64::new(0),
                before: AtomicU64::new(0),
                reserved: AtomicU64::new(0),
                pending: AtomicBool::new(false),
            }
        }
    }
}

impl Holder {
    /// The word of what the CPU was told to load last. With no active word it has loaded nothing
    /// since the last generation began, and has what it had then.
    fn loaded(&self, active: u64) -> u64 {
        match active {
            0 => self.reserved.load(Ordering::Relaxed),
            active => active,
        }
    }
}

/// The identifier of a space, which has none at first, and the root that is loaded under it.
///
/// It is the space's for as long as walkers use it, and of no other space meanwhile. The space
/// comes to it by [`Platform::identity_of`](crate::Platform::identity_of), when it is made live; it
/// leaves it when it is made dead, and the next space may have it then.
#[derive(Debug, Default)]
pub struct Identity {
    /// The identifier, with its generation.
    word: AtomicU64,
    /// The root of the live space that has it, with [`Identity::JOINED`]; or 0.
    root: AtomicU64,
}

impl Identity {
    /// A root is aligned, and may be at address 0.
    const JOINED: u64 = 1;

    const_new! {
        /// An identity without an identifier; it gets one when a CPU first loads it.
        {
            Self {
                word: AtomicU64::new(0),
                root: AtomicU64::new(0),
            }
        }
    }

    /// The identifier under which CPUs have the space loaded, for an invalidation after a change: a
    /// full fence lies between the change and this. 0, which no space has, if it was never loaded.
    pub fn id(&self) -> u16 {
        self.word.load(Ordering::Relaxed) as u16
    }

    /// Makes that fence, and reads the identifier.
    #[inline]
    pub(crate) fn id_after_changes(&self) -> u16 {
        // Its other half is in `load`, between the identifier and the first walk under it.
        fence(Ordering::SeqCst);
        self.id()
    }

    /// The root that CPUs may load: of the space that has it, while that is live.
    pub fn root(&self) -> Option<Pa> {
        // Acquire: the tables below it, which were published before.
        let root = self.root.load(Ordering::Acquire);
        (root & Self::JOINED != 0).then_some(Pa::new(root & !Self::JOINED))
    }

    /// The space with this root is live. Where another has the identity, it stays with that one,
    /// and this one is not loaded.
    pub(crate) fn join(&self, root: Pa) {
        let joined = root.get() | Self::JOINED;
        // Release: the tables before the root.
        let _of_another =
            (self.root).compare_exchange(0, joined, Ordering::Release, Ordering::Relaxed);
    }

    /// The space with this root is dead.
    pub(crate) fn part(&self, root: Pa) {
        let joined = root.get() | Self::JOINED;
        let _of_another =
            (self.root).compare_exchange(joined, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Which identifiers are taken in this generation.
#[derive(Debug)]
pub struct Allocator<'m> {
    taken: &'m mut [u64],
    bits: u32,
    /// Those below are taken.
    next: u32,
}

impl<'m> Allocator<'m> {
    /// Words of memory that it needs, for identifiers of so many bits.
    pub const fn words(bits: u32) -> usize {
        (1usize << bits).div_ceil(64)
    }

    /// For identifiers of so many bits, 1 to 16. `None` if there is too little memory.
    pub fn new(bits: u32, memory: &'m mut [u64]) -> Option<Self> {
        if !(1..=BITS).contains(&bits) {
            return None;
        }
        let taken = memory.get_mut(..Self::words(bits))?;
        taken.fill(0);
        Some(Self { taken, bits, next: 1 })
    }

    /// Whether it was free.
    fn take(&mut self, id: u16) -> bool {
        let word = &mut self.taken[usize::from(id) / 64];
        let bit = 1 << (id % 64);
        let free = *word & bit == 0;
        *word |= bit;
        free
    }

    /// The next that is free. 0 is not given out: it is left for a kernel without a space.
    fn take_next(&mut self) -> Option<u16> {
        while self.next < 1 << self.bits {
            let id = self.next as u16;
            self.next += 1;
            if self.take(id) {
                return Some(id);
            }
        }
        None
    }
}

/// Identifiers for spaces on any number of CPUs. Each identifier that hardware has is given out by
/// one of these, with one allocator.
///
/// ```
/// use core::ptr::NonNull;
/// use tablewright::arch::{arm64::ttbr, x86_64::cr3};
/// use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
/// use tablewright::{AddressSpace, Attrs, Change, Pa, Span, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// # use tablewright::{Barrier, Entry, Invalidation, Level, Platform};
///
/// /// The platform of one process.
/// struct Tables<'k> { kernel: &'k Hosted, identity: Identity }
/// // SAFETY: passed on; each process has a platform, and with it an identity, of its own (9.).
/// unsafe impl Platform for Tables<'_> {
/// #   fn alloc_table(&self, level: Level) -> Option<Pa> { self.kernel.alloc_table(level) }
/// #   unsafe fn free_table(&self, frame: Pa, level: Level) {
/// #       unsafe { self.kernel.free_table(frame, level) }
/// #   }
/// #   unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
/// #       unsafe { self.kernel.table(frame, level) }
/// #   }
/// #   fn barrier(&self, barrier: Barrier) { self.kernel.barrier(barrier) }
/// #   fn invalidate(&self, what: &Invalidation<'_>) { self.kernel.invalidate(what) }
///     // the five functions, and:
///     fn identity_of(&self, _root: Pa) -> Option<&Identity> { Some(&self.identity) }
/// }
///
/// // Of the machine.
/// let mut holders = [const { Holder::new() }; 2];
/// let mut memory = [0; Allocator::words(8)];
/// let mut allocator = Allocator::new(8, &mut memory).ok_or("memory")?;
/// let identifiers = Identifiers::new(&allocator, &mut holders).ok_or("too few identifiers")?;
///
/// let kernel = Hosted::new(16, 12);
/// let process = Tables { kernel: &kernel, identity: Identity::new() };
/// let mut space = AddressSpace::<Arm64K4, _>::new(&process).ok_or("memory")?;
/// let page = Span::new(Va::new(0x4000), 4096)?;
/// space.map(page, Pa::new(0x8000), Attrs::USER_DATA)?;
/// space.make_live();
///
/// // A context switch on CPU 0, which needs no lock of the process. It has nothing to forget.
/// let mut flushes = 0; // tlbi vmalle1; dsb nsh; isb
/// // SAFETY: one CPU (1.), one allocator (2.); it has no TLB (3.), and loads nothing (4.).
/// let loads = unsafe {
///     identifiers.switch(0, &process.identity, |with| with(&mut allocator), || flushes += 1)
/// };
/// let (root, id) = loads.ok_or("no such CPU")?;
/// assert_eq!((root, id, flushes), (space.root(), 1, 0));
/// // arm64: TTBR0_EL1, and VTTBR_EL2 in the same way; x86: CR3, which keeps what the TLB holds.
/// assert_eq!(ttbr::<Arm64K4>(root, id, false), 1 << 48 | root.get());
/// assert_eq!(cr3(root, id, true), 1 << 63 | root.get() | 1);
///
/// // Invalidations name it.
/// kernel.record();
/// let mut gather = space.gather();
/// gather.protect(page, Change::new().write_protect())?;
/// gather.finish(|_| ());
/// assert_eq!(kernel.take_log()[0].id, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The holders are of one of these:
///
/// ```compile_fail,E0499
/// # use tablewright::shootdown::{Allocator, Holder, Identifiers};
/// # let (mut memory, mut holders) = ([0; Allocator::words(8)], [const { Holder::new() }; 2]);
/// # let allocator = Allocator::new(8, &mut memory).unwrap();
/// let first = Identifiers::new(&allocator, &mut holders);
/// let second = Identifiers::new(&allocator, &mut holders); // what CPUs have loaded by the first
/// # let _ = (first, second);
/// ```
#[derive(Debug)]
pub struct Identifiers<'m> {
    generation: AtomicU64,
    holders: &'m [Holder],
}

impl<'m> Identifiers<'m> {
    /// Those that the allocator has, for as many CPUs as there are holders. `None` if there are too
    /// few: one is not given out, each CPU may have two reserved, and one is asked for besides.
    pub fn new(allocator: &Allocator<'_>, holders: &'m mut [Holder]) -> Option<Self> {
        if 2 * holders.len() + 2 > 1 << allocator.bits {
            return None;
        }
        holders.fill_with(Holder::new);
        Some(Self { generation: AtomicU64::new(1), holders })
    }

    /// How many CPUs it is for.
    pub(crate) fn holders(&self) -> usize {
        self.holders.len()
    }

    /// The number of this generation, from 1: one less is how often identifiers have rolled over.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Gives the root and the identifier of a space to CPU `cpu`, which leaves what it has loaded
    /// and loads these. `None` for a CPU without a holder, and where no space that is live has the
    /// identity; nothing is changed then.
    ///
    /// `allocator` runs a function with the allocator, under a lock. `flush` flushes everything
    /// under all identifiers on this CPU, except global translations (arm64: `tlbi vmalle1`; x86:
    /// `INVPCID` type 3). Both are rarely called. The TLB keeps what it holds under the identifier.
    ///
    /// # Safety
    /// 1. `cpu` is the number of the processor that calls. It holds interrupts off until it has
    ///    loaded what is returned.
    /// 2. `allocator` runs its function once, with the allocator with which this was made, while no
    ///    other CPU and no handler has it. No other `Identifiers` are made with that allocator.
    /// 3. When `flush` returns, the flush is complete. Neither it nor `allocator` unwinds.
    /// 4. The processor loads what is returned, and nothing else before it calls this again, but
    ///    tables without a space of their own under identifier 0, and tables in which nothing is
    ///    mapped under any, to [flush](crate::arch::arm64::Cpu) what is not loaded.
    #[inline]
    pub unsafe fn switch(
        &self,
        cpu: usize,
        to: &Identity,
        allocator: impl FnOnce(&mut dyn FnMut(&mut Allocator<'_>)),
        flush: impl FnOnce(),
    ) -> Option<(Pa, u16)> {
        let root = to.root()?;
        // SAFETY: passed on.
        let id = unsafe { self.load(cpu, to, allocator, flush)? };
        Some((root, id))
    }

    /// Gives the identifier of a space whose tables the caller knows: see
    /// [`switch`](Identifiers::switch). `None` for a CPU without a holder.
    ///
    /// # Safety
    /// As for [`switch`](Identifiers::switch), with the root of the space that has the identity.
    pub unsafe fn load(
        &self,
        cpu: usize,
        space: &Identity,
        allocator: impl FnOnce(&mut dyn FnMut(&mut Allocator<'_>)),
        flush: impl FnOnce(),
    ) -> Option<u16> {
        let holder = self.holders.get(cpu)?;
        // Acquire: a CPU that reads an identifier of a new generation finds its active word taken
        // away.
        let word = space.word.load(Ordering::Acquire);
        let active = holder.active.load(Ordering::Relaxed);
        let current = word >> BITS == self.generation.load(Ordering::Relaxed);
        if active != 0 && current {
            holder.before.store(active, Ordering::Relaxed);
            // Release: who takes the word away finds the one before. What else has to be agreed on
            // is the order of two accesses to this word. See above.
            let fast = (holder.active).compare_exchange(
                active,
                word,
                Ordering::Release,
                Ordering::Relaxed,
            );
            if fast.is_ok() {
                return Some(word as u16);
            }
        }
        let mut id = 0;
        let mut pending = false;
        allocator(&mut |allocator| {
            let word = self.renew(allocator, space);
            pending = holder.pending.swap(false, Ordering::Relaxed);
            // From here on the next generation reserves it, and what the CPU leaves.
            let active = holder.active.load(Ordering::Relaxed);
            holder.before.store(holder.loaded(active), Ordering::Relaxed);
            holder.active.store(word, Ordering::Relaxed);
            id = word as u16;
        });
        if pending {
            flush();
        }
        // A new identifier before any walk under it: a CPU that has changed an entry and reads an
        // old one after a full fence knows that we walk the new entry.
        fence(Ordering::SeqCst);
        Some(id)
    }

    /// The word of a space in this generation.
    fn renew(&self, allocator: &mut Allocator<'_>, space: &Identity) -> u64 {
        let generation = self.generation.load(Ordering::Relaxed);
        let old = space.word.load(Ordering::Relaxed);
        if old >> BITS == generation {
            return old;
        }
        let mut word = generation << BITS | old & ((1 << BITS) - 1);
        // Reserved for it: CPUs have it loaded. Free: what is left of it goes with the flushes that
        // are pending.
        let keeps = old != 0 && (self.is_reserved(old, word) || allocator.take(old as u16));
        if !keeps {
            let id = allocator.take_next().unwrap_or_else(|| {
                self.begin_generation(allocator);
                // There are more identifiers than CPUs reserve.
                allocator.take_next().unwrap_or(0)
            });
            word = self.generation.load(Ordering::Relaxed) << BITS | u64::from(id);
        }
        // Release: after the active words were taken away, if that has just been done.
        space.word.store(word, Ordering::Release);
        word
    }

    /// Whether the space may have been loaded somewhere when the generation began. It stays
    /// reserved for the next one.
    fn is_reserved(&self, old: u64, new: u64) -> bool {
        let mut found = false;
        for word in self.holders.iter().flat_map(|holder| [&holder.reserved, &holder.before]) {
            // All of them: each has it to be kept once more. The one before may be written
            // meanwhile, with a word of this generation.
            let kept = word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed);
            found |= kept.is_ok();
        }
        found
    }

    fn begin_generation(&self, allocator: &mut Allocator<'_>) {
        // The number before the active words are taken away: a CPU that reads the old number after
        // that finds its word gone.
        self.generation.fetch_add(1, Ordering::Relaxed);
        allocator.taken.fill(0);
        allocator.next = 1;
        for holder in self.holders {
            // Acquire and release, so that the number is not moved on after it, and for the flush
            // that is pending.
            let kept = holder.loaded(holder.active.swap(0, Ordering::AcqRel));
            holder.reserved.store(kept, Ordering::Relaxed);
            allocator.take(kept as u16);
            allocator.take(holder.before.load(Ordering::Relaxed) as u16);
            holder.pending.store(true, Ordering::Relaxed);
        }
    }
}

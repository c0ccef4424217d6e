//! Identifiers of address spaces (ASID, PCID, VMID): few, given again and again, and never while entries are left under
//! them.
//!
//! Hardware has 256 to 65536 of them. They are given out in order until none is left. Then a new **generation** begins:
//! those that CPUs have loaded stay with their spaces, all others are free again, and **every CPU has a flush of
//! everything pending**, which it makes before it loads an identifier of the new generation. A space whose identifier
//! is of an older generation gets another when it is loaded next. So nothing is ever freed by itself, and no CPU is
//! interrupted.
//!
//! # The fast path
//!
//! A CPU that loads a space whose identifier is of this generation says so in its *active* word, by one
//! compare-exchange, and takes no lock. A CPU that begins a generation moves its number on and then takes each active
//! word away, by an exchange with 0. Of the two, on one word, one comes first. If it is that of the CPU that loads, the
//! identifier is seen, and stays reserved. If it is the exchange, that CPU finds 0, and takes the slow path, where the
//! flush that is pending is found. An active word is 0 until its own CPU has been on the slow path; so a
//! compare-exchange that finds what was read has not been overtaken.
//!
//! The slow path needs the [`Allocator`], exclusively; the embedder has it behind a lock.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Identifiers are the low bits of a word, the generation the rest. 0 is none.
const BITS: u32 = 16;

/// What one CPU has to do with identifiers.
#[derive(Debug)]
#[repr(align(64))]
pub struct Holder {
    /// The identifier that it has loaded, with its generation; 0 from the beginning of a generation until it loads one
    /// of it.
    active: AtomicU64,
    /// The one that it had when the last generation began. Only the CPU that has the allocator reads or writes it.
    reserved: AtomicU64,
    /// It has to forget everything before it loads an identifier.
    pending: AtomicBool,
}

impl Holder {
    /// A CPU that has loaded nothing.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Self {
            active: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            pending: AtomicBool::new(false),
        }
    }

    /// A CPU that has loaded nothing.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        Self {
            active: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            pending: AtomicBool::new(false),
        }
    }
}

impl Default for Holder {
    fn default() -> Self {
        Self::new()
    }
}

/// The identifier of a space. It has none at first.
#[derive(Debug)]
pub struct Identity(AtomicU64);

impl Identity {
    /// None yet.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// None yet.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The identifier under which CPUs have the space loaded, for an invalidation after a change: a full fence lies
    /// between the change and this. 0, which no space has, if it was never loaded.
    pub fn id(&self) -> u16 {
        self.0.load(Ordering::Relaxed) as u16
    }
}

impl Default for Identity {
    fn default() -> Self {
        Self::new()
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
        Some(Self {
            taken,
            bits,
            next: 1,
        })
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

/// Identifiers for spaces on any number of CPUs.
///
/// ```
/// use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
/// let holders = [const { Holder::new() }; 2];
/// let mut memory = [0; Allocator::words(8)];
/// let mut allocator = Allocator::new(8, &mut memory).ok_or("memory")?;
/// let identifiers = Identifiers::new(&allocator, &holders).ok_or("more CPUs than identifiers")?;
/// let space = Identity::new();
/// let mut flushes = 0;
/// let id = identifiers.load(0, &space, |with| with(&mut allocator), || flushes += 1);
/// assert_eq!((id, flushes), (Some(1), 0)); // load it with the root, after whatever had to be forgotten
/// # Ok::<(), &str>(())
/// ```
#[derive(Debug)]
pub struct Identifiers<'m> {
    generation: AtomicU64,
    holders: &'m [Holder],
}

impl<'m> Identifiers<'m> {
    /// Those that the allocator has, for as many CPUs as there are holders. `None` if there are too few: one is not
    /// given out, each CPU may have one reserved, and one is asked for besides.
    pub fn new(allocator: &Allocator<'_>, holders: &'m [Holder]) -> Option<Self> {
        if holders.len() + 2 > 1 << allocator.bits {
            return None;
        }
        Some(Self {
            generation: AtomicU64::new(1),
            holders,
        })
    }

    /// CPU `cpu` is about to load a space: the identifier to load it with. Interrupts are held off until it is loaded.
    /// `None` for a CPU without a holder.
    ///
    /// `allocator` runs a function with the allocator, under a lock; `forget` forgets everything under all identifiers,
    /// on this CPU. Both are rarely called.
    pub fn load(
        &self,
        cpu: usize,
        space: &Identity,
        allocator: impl FnOnce(&mut dyn FnMut(&mut Allocator<'_>)),
        forget: impl FnOnce(),
    ) -> Option<u16> {
        let holder = self.holders.get(cpu)?;
        // Acquire: a CPU that reads an identifier of a new generation finds its active word taken away.
        let word = space.0.load(Ordering::Acquire);
        let active = holder.active.load(Ordering::Relaxed);
        let current = word >> BITS == self.generation.load(Ordering::Relaxed);
        // Relaxed: what has to be agreed on is the order of two accesses to this word. See above.
        let fast = active != 0
            && current
            && holder
                .active
                .compare_exchange(active, word, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if fast {
            return Some(word as u16);
        }
        let mut id = 0;
        let mut pending = false;
        allocator(&mut |allocator| {
            let word = self.renew(allocator, space);
            pending = holder.pending.swap(false, Ordering::Relaxed);
            // From here on the next generation reserves it.
            holder.active.store(word, Ordering::Relaxed);
            id = word as u16;
        });
        if pending {
            forget();
        }
        // A new identifier before any walk under it: a CPU that has changed an entry and reads an old one after a full
        // fence knows that we walk the new entry.
        fence(Ordering::SeqCst);
        Some(id)
    }

    /// The word of a space in this generation.
    fn renew(&self, allocator: &mut Allocator<'_>, space: &Identity) -> u64 {
        let generation = self.generation.load(Ordering::Relaxed);
        let old = space.0.load(Ordering::Relaxed);
        if old >> BITS == generation {
            return old;
        }
        let mut word = generation << BITS | old & ((1 << BITS) - 1);
        // Reserved for it: CPUs have it loaded. Free: what is left of it goes with the flushes that are pending.
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
        space.0.store(word, Ordering::Release);
        word
    }

    /// Whether the space had it loaded somewhere when the generation began. It stays reserved for the next one.
    fn is_reserved(&self, old: u64, new: u64) -> bool {
        let mut found = false;
        for holder in self.holders {
            // All of them: each has it to be kept once more.
            if holder.reserved.load(Ordering::Relaxed) == old {
                holder.reserved.store(new, Ordering::Relaxed);
                found = true;
            }
        }
        found
    }

    fn begin_generation(&self, allocator: &mut Allocator<'_>) {
        // The number before the active words are taken away: a CPU that reads the old number after that finds its word
        // gone.
        self.generation.fetch_add(1, Ordering::Relaxed);
        allocator.taken.fill(0);
        allocator.next = 1;
        for holder in self.holders {
            // Acquire and release, so that the number is not moved on after it, and for the flush that is pending.
            let active = holder.active.swap(0, Ordering::AcqRel);
            let kept = match active {
                // It has loaded nothing since the last generation began, and has what it had then.
                0 => holder.reserved.load(Ordering::Relaxed),
                active => active,
            };
            holder.reserved.store(kept, Ordering::Relaxed);
            allocator.take(kept as u16);
            holder.pending.store(true, Ordering::Relaxed);
        }
    }
}

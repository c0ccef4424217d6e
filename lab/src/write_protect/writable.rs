//! Which entries of a table may be writable: 512 bits and a count beside the table, as in the
//! published change; and protecting a table by them, or by looking at all its entries.
//!
//! # The invariant
//!
//! *The bit of an entry is set if the entry is writable, or can become so without the lock; the
//! count is that of the bits.*
//!
//! An entry for a table is made writable, and protected, under the lock, and its bit says exactly
//! that. A leaf that is protected for the log is opened by the first write without the lock, so its
//! bit is set as long as it is mapped: a bit that came with the opening could be taken away, by a
//! start in between, from a leaf that is writable shortly after.

use std::ptr::NonNull;

use tablewright::{Change, Entry, Format, Hooks, Kind, Level};
use tablewright_machine::Mapper;

/// How entries, and words beside a table, are read and written.
pub trait Accesses {
    /// # Safety
    /// 1. The entry is valid.
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64;
    /// # Safety
    /// 1. The entry is valid.
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64);
}

/// Memory of this computer, at no price.
pub struct Host;

impl Accesses for Host {
    #[inline(always)]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: (1.).
        unsafe { entry.as_ref() }.load()
    }

    #[inline(always)]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: (1.).
        unsafe { entry.as_ref() }.store(bits);
    }
}

impl Accesses for Mapper<'_> {
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: (1.).
        unsafe { Hooks::load(self, entry) }
    }

    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: (1.).
        unsafe { self.link(entry, bits) };
    }
}

/// Words of bits.
const WORDS: usize = 8;

/// Side memory of one table: a line of bits, and one with their count.
#[derive(Clone, Copy, Debug)]
pub struct Side(NonNull<Entry>);

impl Side {
    /// In words.
    pub const SIZE: usize = 16;

    /// # Safety
    /// 1. So many words from here on are valid, and used for nothing else.
    pub unsafe fn new(words: NonNull<Entry>) -> Self {
        Self(words)
    }

    fn word(self, word: usize) -> NonNull<Entry> {
        // SAFETY: one of those that `new` promises.
        unsafe { self.0.add(word) }
    }

    /// Says of exactly these entries that they may be writable.
    pub fn set(self, on: &impl Accesses, entries: impl Iterator<Item = usize>) {
        let mut words = [0u64; WORDS];
        entries.for_each(|index| words[index / 64] |= 1 << (index % 64));
        let count: u32 = words.iter().map(|word| word.count_ones()).sum();
        for (word, bits) in words.into_iter().enumerate() {
            // SAFETY: a word of ours.
            unsafe { on.store(self.word(word), bits) };
        }
        // SAFETY: a word of ours.
        unsafe { on.store(self.word(WORDS), count.into()) };
    }

    /// An entry is about to be writable.
    #[inline(always)]
    pub fn mark(self, on: &impl Accesses, index: usize) {
        let (word, bit) = (self.word(index / 64), 1u64 << (index % 64));
        // SAFETY: words of ours.
        unsafe {
            let bits = on.load(word);
            if bits & bit == 0 {
                on.store(word, bits | bit);
                on.store(self.word(WORDS), on.load(self.word(WORDS)) + 1);
            }
        }
    }
}

/// Protected form of an entry. Most are alike, so the last is kept.
struct Protected<F> {
    pattern: u64,
    flip: u64,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Protected<F> {
    fn new() -> Self {
        Self { pattern: 0, flip: 0, format: std::marker::PhantomData }
    }

    #[inline(always)]
    fn of(&mut self, bits: u64, level: Level) -> u64 {
        match F::kind(bits, level) {
            Kind::Table if !F::is_protected(bits) => F::protect_table(bits),
            Kind::Leaf => {
                if (bits ^ self.pattern) & !F::address_mask(level) != 0 {
                    self.pattern = bits;
                    self.flip = bits ^ protect_leaf::<F>(bits, level);
                }
                bits ^ self.flip
            }
            _ => bits,
        }
    }
}

/// A leaf without the permission to write.
pub fn protect_leaf<F: Format>(bits: u64, level: Level) -> u64 {
    let attrs = Change::new().write_protect().apply(F::decode(bits, level));
    // What can be written can be read, in every format.
    F::encode(&attrs, level).map_or(bits, |attrs| attrs | F::put_address(F::address(bits, level)))
}

/// All entries of a table lose the permission to write: each is looked at.
///
/// # Safety
/// 1. `table` is a table of that level.
#[inline(never)]
pub unsafe fn protect_by_scan<F: Format>(on: &impl Accesses, table: NonNull<Entry>, level: Level) {
    let mut protected = Protected::<F>::new();
    for index in 0..F::entries(level) {
        // SAFETY: an entry of the table (1.).
        unsafe {
            let entry = table.add(index);
            let bits = on.load(entry);
            let next = protected.of(bits, level);
            if next != bits {
                on.store(entry, next);
            }
        }
    }
}

/// Protects the entries that may be writable. Those of tables are so no more; leaves can be again
/// without the lock.
///
/// # Safety
/// 1. `table` is a table of that level, of which `side` says which entries may be writable.
#[inline(never)]
pub unsafe fn protect_by_bitmap<F: Format>(
    on: &impl Accesses,
    table: NonNull<Entry>,
    level: Level,
    side: Side,
) {
    let mut protected = Protected::<F>::new();
    // SAFETY: a word of the side.
    let count = unsafe { on.load(side.word(WORDS)) };
    let (mut left, mut closed) = (count, 0);
    for word in (0..WORDS).map(|word| side.word(word)) {
        if left == 0 {
            break;
        }
        // SAFETY: a word of the side.
        let bits = unsafe { on.load(word) };
        left -= u64::from(bits.count_ones());
        let (mut rest, mut shut) = (bits, 0);
        // SAFETY: words of the side, and bits below 64.
        let first = unsafe { word.offset_from(side.0) } as usize * 64;
        while rest != 0 {
            let index = first + rest.trailing_zeros() as usize;
            // SAFETY: an entry of the table (1.).
            unsafe {
                let entry = table.add(index);
                let bits = on.load(entry);
                let next = protected.of(bits, level);
                if next != bits {
                    on.store(entry, next);
                }
                if F::kind(bits, level) == Kind::Table {
                    shut |= rest & rest.wrapping_neg();
                }
            }
            rest &= rest - 1;
        }
        if shut != 0 {
            closed += u64::from(shut.count_ones());
            // SAFETY: a word of the side.
            unsafe { on.store(word, bits & !shut) };
        }
    }
    if closed != 0 {
        // SAFETY: a word of the side.
        unsafe { on.store(side.word(WORDS), count - closed) };
    }
}

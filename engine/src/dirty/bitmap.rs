//! A bit for each page.
//!
//! # Orderings
//!
//! A mark and the harvest of its word are atomic updates of one word, and come one after the other.
//! If the mark is first, it is harvested, and releases what the harvest acquires: the page is seen
//! as writable as it was made, and is protected. If it is second, it waits for the next harvest.
//! Therefore a mark that is there already is set again, and not just looked at.
//!
//! Two bitmaps in turn need no atomic update where they are harvested: each mark finds which is
//! current and goes into it [in one walk](crate::guest::Guest::mark). None goes into the other when
//! the walks from before the turn are over.

use core::ops::Range;

use super::LogError;
use crate::offer::{Turn, offer};
use crate::shared::{GracePeriod, SharedPlatform};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

const BITS: u64 = u64::BITS as u64;

/// Marks for the pages of a slot, in memory that the embedder gives.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::Bitmap;
/// let mut words = [const { AtomicU64::new(0) }; 2];
/// let bitmap = Bitmap::new(&mut words, 100)?;
/// bitmap.mark(3);
/// bitmap.mark(99);
/// let mut found = Vec::new();
/// bitmap.harvest(0..100, |first, bits| found.push((first, bits)));
/// assert_eq!(found, [(0, 1 << 3), (64, 1 << 35)]);
/// assert!(!bitmap.is_marked(3));
/// # Ok::<(), tablewright::dirty::LogError>(())
/// ```
#[derive(Debug)]
pub struct Bitmap<'m> {
    words: &'m [AtomicU64],
    pages: u64,
}

impl<'m> Bitmap<'m> {
    /// A bitmap of `pages` pages in `words`. Bits that are set in `words` are marks.
    ///
    /// # Errors
    /// [`LogError::TooFewBits`].
    pub fn new(words: &'m mut [AtomicU64], pages: u64) -> Result<Self, LogError> {
        let bits = words.len() as u64 * BITS;
        match bits >= pages {
            true => Ok(Self { words, pages }),
            false => Err(LogError::TooFewBits(bits)),
        }
    }

    /// The number of pages that it has a bit for.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Marks a page. One that is beyond the last is ignored.
    #[inline]
    pub fn mark(&self, page: u64) {
        if page >= self.pages {
            return;
        }
        self.words[(page / BITS) as usize].fetch_or(1 << (page % BITS), Ordering::Release);
    }

    /// Marks the pages of a range.
    pub fn mark_range(&self, pages: Range<u64>) {
        each_word(
            self.words,
            pages,
            self.pages,
            |_| true,
            |word, _, bits| {
                word.fetch_or(bits, Ordering::Release);
            },
        );
    }

    /// Marks all, for a log that starts so: what is not protected yet is taken for written.
    ///
    /// Faults that were looked up before the slot was logged mark nothing. Before the first harvest
    /// the walks in which they are have to be over:
    /// [`SharedSpace::grace_period`](crate::shared::SharedSpace::grace_period) and
    /// [`is_over`](crate::shared::SharedSpace::is_over), after the slot was replaced.
    pub fn mark_all(&self) {
        self.mark_range(0..self.pages);
    }

    /// Whether a page is marked now.
    pub fn is_marked(&self, page: u64) -> bool {
        page < self.pages
            && self.words[(page / BITS) as usize].load(Ordering::Relaxed) >> (page % BITS) & 1 != 0
    }

    /// The marks, which stay, in the form in which they are [harvested](Bitmap::harvest).
    pub fn marks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let words = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        (0..).step_by(BITS as usize).zip(words)
    }

    /// How many pages are marked, while none is being marked.
    pub fn count(&self) -> u64 {
        self.marks().map(|(_, bits)| u64::from(bits.count_ones())).sum()
    }

    /// Takes the marks of these pages away and gives them out, a word at a time: the number of the
    /// first page of a word, and a bit for each page from there. The pages are protected before
    /// they are copied. If `each` unwinds, its marks are put back.
    #[inline]
    pub fn harvest(&self, pages: Range<u64>, mut each: impl FnMut(u64, u64)) {
        each_word(self.words, pages, self.pages, any, |word, first, mask| {
            if word.load(Ordering::Relaxed) & mask == 0 {
                return;
            }
            let bits = match mask {
                u64::MAX => word.swap(0, Ordering::AcqRel),
                _ => word.fetch_and(!mask, Ordering::AcqRel) & mask,
            };
            give(word, first, bits, &mut each);
        });
    }

    /// [Harvests](Bitmap::harvest) all pages with plain loads and stores: nothing marks them.
    #[inline]
    fn take_all(&self, mut each: impl FnMut(u64, u64)) {
        let mut first = 0;
        for line in self.words.chunks(LINE) {
            // Words without marks too: a branch for each costs more.
            let marked = if any(line) { line } else { &[] };
            for (word, at) in marked.iter().zip((first..).step_by(BITS as usize)) {
                let bits = word.load(Ordering::Relaxed);
                word.store(0, Ordering::Relaxed);
                give(word, at, bits, &mut each);
            }
            first += LINE as u64 * BITS;
        }
    }
}

/// Gives out the marks that were taken from a word.
#[inline]
fn give(word: &AtomicU64, first: u64, bits: u64, each: &mut impl FnMut(u64, u64)) {
    let put_back = || {
        word.fetch_or(bits, Ordering::Release);
    };
    offer(put_back, || each(first, bits));
}

/// The words of a cache line, which are looked at together.
const LINE: usize = 8;

/// Whether any of these words has a bit.
#[inline]
fn any(words: &[AtomicU64]) -> bool {
    let bits = |all, word: &AtomicU64| all | word.load(Ordering::Relaxed);
    words.iter().fold(0, bits) != 0
}

/// Two bitmaps in turn: one is marked while the other is drained.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::{Bitmap, Flip};
/// use tablewright_hosted::Threads;
/// let platform = Threads::new(8, 12, 1);
/// let mut words = [const { AtomicU64::new(0) }; 4];
/// let (first, second) = words.split_at_mut(2);
/// let flip = Flip::new(Bitmap::new(first, 100)?, Bitmap::new(second, 100)?)?;
/// flip.current().mark(70);
/// let mut found = Vec::new();
/// while !flip.drain(&&platform, |first, bits| found.push((first, bits))) {} // walks are under way
/// flip.current().mark(3); // goes into the other
/// found.retain(|&(_, bits)| bits != 0);
/// assert_eq!(found, [(64, 1 << 6)]);
/// # Ok::<(), tablewright::dirty::LogError>(())
/// ```
///
/// The words of one are not those of the other:
///
/// ```compile_fail,E0499
/// # use core::sync::atomic::AtomicU64;
/// # use tablewright::dirty::{Bitmap, Flip};
/// # let mut words = [const { AtomicU64::new(0) }; 2];
/// let first = Bitmap::new(&mut words, 100).unwrap();
/// let flip = Flip::new(first, Bitmap::new(&mut words, 100).unwrap());
/// ```
#[derive(Debug)]
pub struct Flip<'m> {
    maps: [Bitmap<'m>; 2],
    /// The index of the bitmap that is marked.
    current: AtomicUsize,
    /// Whether the other is still to be drained, and the grace period after which nothing marks it.
    full: AtomicBool,
    since: AtomicU64,
    /// Of the CPU that drains.
    host: Turn,
}

impl<'m> Flip<'m> {
    /// Two bitmaps for the same pages, the first of which is marked first.
    ///
    /// # Errors
    /// [`LogError::Unequal`].
    pub fn new(first: Bitmap<'m>, second: Bitmap<'m>) -> Result<Self, LogError> {
        if first.pages != second.pages {
            return Err(LogError::Unequal);
        }
        Ok(Self {
            maps: [first, second],
            current: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            since: AtomicU64::new(0),
            host: Turn::default(),
        })
    }

    /// The bitmap that is marked now. It is looked up and marked in one walk.
    #[inline]
    pub fn current(&self) -> &Bitmap<'m> {
        &self.maps[self.current.load(Ordering::Acquire)]
    }

    /// Has the other bitmap marked from now on, and gives out the marks of this one as
    /// [`Bitmap::harvest`] does, when the walks that began before are over; in a cache line that
    /// has marks, words without any as well.
    ///
    /// Returns `false` as long as such walks, or another drain, are under way: call it again. If
    /// `each` unwinds, the next call gives out what is left, and nothing is turned.
    pub fn drain<P: SharedPlatform>(&self, platform: &P, each: impl FnMut(u64, u64)) -> bool {
        let Some(_turn) = self.host.begin() else {
            return false;
        };
        if !self.full.load(Ordering::Relaxed) {
            self.full.store(true, Ordering::Relaxed);
            // Release: what was drained is empty before it is marked.
            self.current.fetch_xor(1, Ordering::AcqRel);
            self.since.store(platform.grace_period().get(), Ordering::Relaxed);
        }
        if !platform.is_over(GracePeriod::new(self.since.load(Ordering::Relaxed))) {
            return false;
        }
        self.maps[self.current.load(Ordering::Relaxed) ^ 1].take_all(each);
        self.full.store(false, Ordering::Relaxed);
        true
    }
}

/// Calls `each` with every word that has bits of `pages`, the page of its first bit, and the mask
/// of those bits; but not in lines that are not worth it.
#[inline]
fn each_word(
    words: &[AtomicU64],
    pages: Range<u64>,
    limit: u64,
    worth: impl Fn(&[AtomicU64]) -> bool,
    mut each: impl FnMut(&AtomicU64, u64, u64),
) {
    let end = pages.end.min(limit);
    if pages.start >= end {
        return;
    }
    let first = (pages.start / BITS) as usize;
    let words = &words[first..=((end - 1) / BITS) as usize];
    let mut page = first as u64 * BITS;
    for line in words.chunks(LINE) {
        if !worth(line) {
            page += LINE as u64 * BITS;
            continue;
        }
        for word in line {
            let mut mask = u64::MAX;
            if page < pages.start {
                mask &= u64::MAX << (pages.start - page);
            }
            if end - page < BITS {
                mask &= (1 << (end - page)) - 1;
            }
            each(word, page, mask);
            page += BITS;
        }
    }
}

/// The pages that a word of a harvest names, as ranges; `first` is the number of the first that it
/// might.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::{Bitmap, marked};
/// let mut words = [const { AtomicU64::new(0) }; 4];
/// let bitmap = Bitmap::new(&mut words, 256)?;
/// bitmap.mark(3);
/// bitmap.mark_range(50..200);
///
/// let mut found = Vec::new();
/// bitmap.harvest(0..256, |first, bits| found.extend(marked(first, bits)));
/// assert_eq!(found, [3..4, 50..64, 64..128, 128..192, 192..200]);
/// # Ok::<(), tablewright::dirty::LogError>(())
/// ```
pub fn marked(first: u64, mut bits: u64) -> impl Iterator<Item = Range<u64>> {
    core::iter::from_fn(move || {
        if bits == 0 {
            return None;
        }
        let from = bits.trailing_zeros();
        let run = (bits >> from).trailing_ones();
        bits &= u64::MAX.checked_shl(from + run).unwrap_or(0);
        Some(first + u64::from(from)..first + u64::from(from + run))
    })
}

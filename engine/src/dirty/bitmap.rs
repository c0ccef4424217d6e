//! A bit for each page.
//!
//! # Orderings
//!
//! A mark and the harvest of its word are atomic updates of one word, and come one after the other.
//! If the mark is first, it is harvested, and releases what the harvest acquires: the page is seen
//! as writable as it was made, and is protected. If it is second, it waits for the next harvest. A
//! mark that is there already is therefore set again, and not just looked at.
//!
//! Two bitmaps in turn need no atomic update where they are harvested: each mark finds which is
//! current and goes into it [in one walk](crate::guest::Guest::mark), so that none goes into the
//! other when the walks from before the turn are over.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use core::ops::Range;

use crate::shared::{GracePeriod, SharedPlatform};

use super::LogError;

const BITS: u64 = u64::BITS as u64;

/// Marks for the pages of a slot, in memory that the embedder gives.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::Bitmap;
/// let words = [const { AtomicU64::new(0) }; 2];
/// let bitmap = Bitmap::new(&words, 100)?;
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
    pub fn new(words: &'m [AtomicU64], pages: u64) -> Result<Self, LogError> {
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

    /// How many pages are marked, while none is being marked.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    /// Takes the marks of these pages away and gives them out, a word at a time: the number of the
    /// first page of a word, and a bit for each page from there. They are to be protected before
    /// they are copied.
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
            each(first, bits);
        });
    }
}

/// So many words are looked at together: a cache line.
const LINE: usize = 8;

/// Whether any of these words has a bit.
#[inline(always)]
fn any(words: &[AtomicU64]) -> bool {
    let bits = |all, word: &AtomicU64| all | word.load(Ordering::Relaxed);
    words.iter().fold(0, bits) != 0
}

/// Two bitmaps in turn.
///
/// ```
/// use core::sync::atomic::AtomicU64;
/// use tablewright::dirty::{Bitmap, Flip};
/// use tablewright::hosted::Threads;
/// let platform = Threads::new(8, 12, 1);
/// let words = [const { AtomicU64::new(0) }; 4];
/// let (first, second) = words.split_at(2);
/// let flip = Flip::new(Bitmap::new(first, 100)?, Bitmap::new(second, 100)?)?;
/// flip.current().mark(70);
/// let idle = flip.turn(&&platform).expect("the other is drained");
/// flip.current().mark(3); // goes into the other
/// let Ok(marks) = idle.try_complete(&&platform) else { panic!("a walk is under way") };
/// let mut found = Vec::new();
/// marks.drain(|first, bits| found.extend((bits != 0).then_some((first, bits))));
/// assert_eq!(found, [(64, 1 << 6)]);
/// # Ok::<(), tablewright::dirty::LogError>(())
/// ```
#[derive(Debug)]
pub struct Flip<'m> {
    maps: [Bitmap<'m>; 2],
    /// Which is marked, and what the other is.
    state: AtomicUsize,
}

/// The second is marked, and the first is idle.
const SECOND: usize = 1;
/// The idle one has been given out.
const OUT: usize = 2;
/// It is not drained.
const FULL: usize = 4;

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
            state: AtomicUsize::new(0),
        })
    }

    /// The one that is marked now. What is done with it is to be done in one walk.
    #[inline]
    pub fn current(&self) -> &Bitmap<'m> {
        &self.maps[self.state.load(Ordering::Acquire) & SECOND]
    }

    /// From now on the other is marked, and this one is given out, to be drained. Where the last
    /// turn's was dropped and not drained, it is that one again, and nothing is turned. `None` as
    /// long as it is not dropped.
    pub fn turn<P: SharedPlatform>(&self, platform: &P) -> Option<Idle<'_, 'm>> {
        let before = self.state.load(Ordering::Relaxed);
        let after = match before & (OUT | FULL) {
            0 => before ^ SECOND | OUT | FULL,
            FULL => before | OUT,
            _ => return None,
        };
        // Acquire: what was drained is empty before it is marked.
        self.state
            .compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        Some(Idle {
            map: Unmarked {
                flip: self,
                map: &self.maps[!after & SECOND],
            },
            since: platform.grace_period(),
        })
    }
}

/// The one that is not marked now: no turn is made while this is there.
#[derive(Debug)]
struct Unmarked<'f, 'm> {
    flip: &'f Flip<'m>,
    map: &'f Bitmap<'m>,
}

impl Drop for Unmarked<'_, '_> {
    fn drop(&mut self) {
        // Release: what was done with it comes before the next turn.
        self.flip.state.fetch_and(!OUT, Ordering::Release);
    }
}

/// A bitmap that gets no more marks when the walks that began before its turn was over have come to
/// an end.
#[derive(Debug)]
#[must_use = "it has marks that were not harvested"]
pub struct Idle<'f, 'm> {
    map: Unmarked<'f, 'm>,
    since: GracePeriod,
}

impl<'f, 'm> Idle<'f, 'm> {
    /// Gives out the bitmap when no more marks can come.
    ///
    /// # Errors
    /// Gives it back if walks are not over.
    pub fn try_complete<P: SharedPlatform>(self, platform: &P) -> Result<Retired<'f, 'm>, Self> {
        match platform.is_over(self.since) {
            true => Ok(Retired(self.map)),
            false => Err(self),
        }
    }
}

/// A bitmap without another user.
#[derive(Debug)]
#[must_use = "it has marks that were not harvested"]
pub struct Retired<'f, 'm>(Unmarked<'f, 'm>);

impl Retired<'_, '_> {
    /// Takes all marks away and gives them out, as [`Bitmap::harvest`] does; in a cache line that
    /// has marks, words without any as well.
    #[inline]
    pub fn drain(self, mut each: impl FnMut(u64, u64)) {
        let (lines, rest) = self.0.map.words.as_chunks::<LINE>();
        let mut page = 0;
        for line in lines {
            if any(line) {
                for word in line {
                    let bits = word.load(Ordering::Relaxed);
                    word.store(0, Ordering::Relaxed);
                    each(page, bits);
                    page += BITS;
                }
            } else {
                page += LINE as u64 * BITS;
            }
        }
        for word in rest {
            each(page, word.swap(0, Ordering::Relaxed));
            page += BITS;
        }
        // It is released with what holds it.
        self.0.flip.state.fetch_and(!FULL, Ordering::Relaxed);
    }
}

/// Calls `each` with every word that has bits of `pages`, the page of its first bit, and the mask
/// of those bits; but not in lines that are not worth it.
#[inline(always)]
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
/// use tablewright::flush::Joined;
/// let words = [const { AtomicU64::new(0) }; 4];
/// let bitmap = Bitmap::new(&words, 256)?;
/// bitmap.mark(3);
/// bitmap.mark_range(50..200);
///
/// // Ranges, over the borders of words.
/// let mut found = Vec::new();
/// let mut joined = Joined::new(|pages| found.push(pages));
/// bitmap.harvest(0..256, |first, bits| marked(first, bits).for_each(|pages| joined.add(pages)));
/// drop(joined);
/// assert_eq!(found, [3..4, 50..200]);
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

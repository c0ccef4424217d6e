//! The guest's program and its knowledge: a block of memory that the host fills and the guest keeps
//! its figures in.
//!
//! The guest is a loop. It takes its orders from its [`Block`], makes as many accesses as these
//! say, and after each reads the processor's counter: the difference to the one before is a *gap*,
//! the time that an access and thirty instructions took with all that came between. Gaps are
//! counted in the block in classes that are 1/64 wide ([`class`]), so that a guest that runs for
//! hours keeps all of them; the longest is kept exactly. At its end it stores to an address that
//! has no memory, which is how it leaves for the host, and begins again when it is entered again:
//! its registers are set once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Classes of gaps.
pub const CLASSES: usize = 59 * 64;

/// Memory that a vCPU and the host share. Everything is read and written by both, never at the same
/// time but [`stop`](Block::stop).
#[repr(C, align(4096))]
pub struct Block {
    /// The guest leaves before its next access if it is not zero.
    pub stop: AtomicU64,
    /// The longest gap, in ticks.
    pub longest: AtomicU64,
    /// Accesses made.
    pub made: AtomicU64,
    /// All gaps, in ticks.
    pub total: AtomicU64,
    /// The guest's address of the first page.
    pub first: AtomicU64,
    /// Pages.
    pub pages: AtomicU64,
    /// Accesses to be made.
    pub count: AtomicU64,
    /// The state of random numbers, at the start and further on.
    pub seed: AtomicU64,
    /// It writes if a random number of 32 bits is below.
    pub threshold: AtomicU64,
    /// Pages in random order if it is not zero.
    pub random: AtomicU64,
    /// The page that is next.
    pub position: AtomicU64,
    /// The value that it writes.
    pub value: AtomicU64,
    /// From one page to the next, in bytes.
    pub stride: AtomicU64,
    /// The address to which it stores to leave.
    pub exit: AtomicU64,
    /// The second halves alone of blocks of twice as many pages, if it is not zero.
    pub half: AtomicU64,
    spare: u64,
    /// How many gaps there were of each class.
    pub gaps: [AtomicU64; CLASSES],
}

/// The memory of a block, in whole pages.
pub const BLOCK_BYTES: u64 = size_of::<Block>() as u64;

/// The class of a gap: exact below 64 ticks, then 64 classes for each power of two.
pub fn class(ticks: u64) -> usize {
    match ticks.checked_ilog2() {
        None | Some(..6) => ticks as usize,
        Some(log) => (log as usize - 6) * 64 + (ticks >> (log - 6)) as usize,
    }
}

/// The smallest gap of a class.
pub fn smallest(class: usize) -> u64 {
    match class {
        ..128 => class as u64,
        _ => (64 + class as u64 % 64) << (class / 64 - 1),
    }
}

/// A vCPU's orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orders {
    /// The guest's address of the first page.
    pub first: u64,
    /// Pages, from it on.
    pub pages: u64,
    /// From one to the next, in bytes.
    pub stride: u64,
    /// Accesses; [`u64::MAX`] until it is stopped.
    pub count: u64,
    /// Of so many accesses of a hundred it writes.
    pub write_percent: u8,
    /// In random order, from the seed that the block has.
    pub random: bool,
    /// The second halves alone of blocks of twice as many pages, a power of two; of whole memory,
    /// if it is zero. `pages` are those of the halves.
    pub half: u64,
}

impl Orders {
    /// Writes each page once, in order.
    pub const fn write(first: u64, pages: u64) -> Self {
        Self {
            first,
            pages,
            stride: 4096,
            count: pages,
            write_percent: 100,
            random: false,
            half: 0,
        }
    }

    /// Returns orders that last until it is stopped.
    pub const fn endless(self) -> Self {
        Self { count: u64::MAX, ..self }
    }
}

/// Knuth's generator, in the guest as on the host: `random * MULTIPLIER + INCREMENT`.
pub(crate) const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
/// The increment of the generator.
pub(crate) const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// Returns the threshold that makes an access a write.
pub const fn threshold(percent: u8) -> u64 {
    ((percent as u64) << 32) / 100
}

impl Block {
    /// Tells the guest what to do when it is entered next, and clears its figures.
    pub fn order(&self, orders: &Orders) {
        self.first.store(orders.first, Relaxed);
        self.pages.store(orders.pages, Relaxed);
        self.stride.store(orders.stride, Relaxed);
        self.count.store(orders.count, Relaxed);
        self.threshold.store(threshold(orders.write_percent), Relaxed);
        self.random.store(u64::from(orders.random), Relaxed);
        self.half.store(orders.half, Relaxed);
        self.position.store(0, Relaxed);
        for figure in [&self.stop, &self.longest, &self.made, &self.total] {
            figure.store(0, Relaxed);
        }
        for gap in &self.gaps {
            gap.store(0, Relaxed);
        }
    }
}

/// The pages that a guest writes that has these orders and starts from `seed`: `visit` is given the
/// number of each, perhaps more than once, and the seed of what it does next comes back.
///
/// ```
/// use tablewright_kvm::guest::{Orders, written};
/// let mut pages = Vec::new();
/// written(&Orders::write(0, 3), 7, 3, |page| pages.push(page));
/// assert_eq!(pages, [0, 1, 2]);
/// ```
pub fn written(orders: &Orders, seed: u64, made: u64, mut visit: impl FnMut(u64)) -> u64 {
    let mut random = seed;
    let limit = threshold(orders.write_percent);
    let mut position = 0;
    for _ in 0..made {
        random = random.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
        let page = match orders.random {
            true => ((random >> 32) * orders.pages) >> 32,
            false => position,
        };
        if (random >> 16) & 0xffff_ffff < limit {
            visit(page + (page & orders.half.wrapping_neg()) + orders.half);
        }
        position = (position + 1) % orders.pages.max(1);
    }
    random
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_in_order_and_a_sixty_fourth_wide() {
        let mut before = 0;
        for shift in 0..64 {
            for part in 0..64_u64 {
                let ticks = (1_u64 << shift) + ((u128::from(part) << shift) >> 6) as u64;
                let class = class(ticks);
                assert!(class >= before && class < CLASSES, "{ticks}");
                before = class;
                let from = smallest(class);
                assert!(from <= ticks && ticks - from <= ticks / 64, "{ticks} {from}");
            }
        }
        assert_eq!(class(u64::MAX), CLASSES - 1);
        assert_eq!(class(0), 0);
    }

    #[test]
    fn a_guest_that_writes_a_half_writes_about_a_half() {
        let orders = Orders { write_percent: 50, ..Orders::write(0, 10_000) };
        let mut count = 0;
        written(&orders, 1, 10_000, |_| count += 1);
        assert!((4_700..5_300).contains(&count), "{count}");
    }
}

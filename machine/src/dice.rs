//! Choices of the hardware where it is free: numbers that look random and are those of a seed.

use std::cell::{Cell, RefCell};

use crate::splitmix::{below, next};

/// A stream of choices. With seed 0 there are none to make.
pub(crate) struct Dice {
    on: Cell<bool>,
    stream: Cell<u64>,
    /// Addresses that were worked on lately.
    recent: RefCell<Vec<u64>>,
}

/// The number of addresses that are kept.
const RECENT: usize = 16;

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self {
            on: Cell::new(seed != 0),
            // Not the stream of any CPU's timing, which starts from the same seed.
            stream: Cell::new(seed ^ 0x7462_6c77_7269_6768),
            recent: RefCell::default(),
        }
    }

    #[inline(always)]
    pub fn is_on(&self) -> bool {
        self.on.get()
    }

    /// No choices from here on.
    pub fn stop(&self) {
        self.on.set(false);
    }

    pub fn below(&self, bound: u64) -> u64 {
        below(&self.stream, bound.max(1))
    }

    pub fn once_in(&self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Remembers an address to come back to.
    pub fn note(&self, va: u64) {
        let mut recent = self.recent.borrow_mut();
        if recent.len() < RECENT {
            recent.push(va);
        } else {
            let at = (next(&self.stream) % RECENT as u64) as usize;
            recent[at] = va;
        }
    }

    /// One of those addresses.
    pub fn recall(&self) -> Option<u64> {
        let recent = self.recent.borrow();
        let at = self.below(recent.len() as u64) as usize;
        recent.get(at).copied()
    }
}

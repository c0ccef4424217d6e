//! A machine for kernels of a few lines: memory, and processors that store to it.

use std::collections::HashMap;

use tablewright_watch::{At, Rule, Watcher};

/// Words by their addresses; all others are zero.
pub fn reader(memory: &HashMap<u64, u64>) -> impl FnMut(u64, &mut [u64]) -> bool {
    |pa, words| {
        for (word, value) in (0..).zip(words) {
            *value = memory.get(&(pa + 8 * word)).copied().unwrap_or(0);
        }
        true
    }
}

pub struct Machine {
    pub watcher: Watcher,
    pub memory: HashMap<u64, u64>,
    /// The processor that executes.
    pub cpu: u8,
    pub pc: u64,
}

impl Machine {
    /// Two processors that have executed nothing. The first one executes from `pc` on.
    pub fn with<const N: usize>(pc: u64, memory: [(u64, u64); N]) -> Self {
        Self { watcher: Watcher::new(2), memory: HashMap::from(memory), cpu: 0, pc }
    }

    /// The next instruction.
    pub fn at(&mut self) -> At {
        self.pc += 4;
        At { cpu: self.cpu, pc: self.pc }
    }

    pub fn store(&mut self, pa: u64, value: u64) {
        self.memory.insert(pa, value);
        let at = self.at();
        self.watcher.store_word(at, pa, value, &mut reader(&self.memory));
    }

    /// Zeroes a page, word by word, as the kernel does with one that it gives out.
    pub fn clear(&mut self, page: u64) {
        for word in 0..512 {
            self.store(page + 8 * word, 0);
        }
    }

    pub fn found(&self) -> Vec<Rule> {
        self.watcher.findings().iter().map(|finding| finding.rule).collect()
    }
}

//! A machine of arm64 of a few lines: memory, and what its processors execute.

use std::collections::HashMap;

use tablewright_watch::arm64::decode;
use tablewright_watch::{At, Rule, Watcher};

use super::common::reader;

pub const DSB_ISHST: u32 = 0xd503_3a9f;
pub const DSB_ISH: u32 = 0xd503_3b9f;
/// Without the register, which is x0.
pub const VAE1IS: u32 = 0xd508_8320;
pub const ASIDE1IS: u32 = 0xd508_8340;
pub const VMALLE1IS: u32 = 0xd508_8300;
pub const TTBR0: u32 = 0xd518_2000;
pub const TCR: u32 = 0xd518_2040;
pub const SCTLR: u32 = 0xd518_1000;
pub const MAIR: u32 = 0xd518_a200;

pub struct Machine {
    pub watcher: Watcher,
    pub memory: HashMap<u64, u64>,
    pub cpu: u8,
    pub pc: u64,
}

impl Machine {
    /// Two processors that have executed nothing, the first of which does, from this address on;
    /// and memory.
    pub fn new<const N: usize>(pc: u64, memory: [(u64, u64); N]) -> Self {
        Self { watcher: Watcher::new(2), memory: HashMap::from(memory), cpu: 0, pc }
    }

    pub fn run(&mut self, instruction: u32, operand: u64) {
        self.pc += 4;
        let mut read = reader(&self.memory);
        let at = At { cpu: self.cpu, pc: self.pc };
        let what = decode(instruction).expect("an instruction that matters");
        self.watcher.execute(at, what, operand, &mut read);
    }

    pub fn store(&mut self, pa: u64, value: u64) {
        self.pc += 4;
        self.memory.insert(pa, value);
        let mut read = reader(&self.memory);
        let at = At { cpu: self.cpu, pc: self.pc };
        self.watcher.store_word(at, pa, value, &mut read);
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

    /// The one thing that is missing.
    pub fn missing(&self) -> &str {
        match self.watcher.findings() {
            [finding] => &finding.missing,
            other => panic!("{other:?}"),
        }
    }
}

//! Instructions of arm64, as its processors execute them.

use tablewright_watch::arm64::decode;

use super::common::{Machine, reader};

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

impl Machine {
    pub fn run(&mut self, instruction: u32, operand: u64) {
        let at = self.at();
        let mut read = reader(&self.memory);
        let what = decode(instruction).expect("an instruction that matters");
        self.watcher.execute(at, what, operand, &mut read);
    }

    /// The one thing that is missing.
    pub fn missing(&self) -> &str {
        match self.watcher.findings() {
            [finding] => &finding.missing,
            other => panic!("{other:?}"),
        }
    }
}

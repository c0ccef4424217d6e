//! The last exits of a vCPU. A guest that meets a triple fault says nothing any more; what led to
//! it is said for it.

use core::fmt;

use crate::vmcb::Block;

/// The number of entries that are kept.
const MOST: usize = 24;

/// How a vCPU was entered, and how it left.
#[derive(Clone, Copy, Default)]
struct Passage {
    /// The event that was delivered when it was entered.
    inject: u64,
    from: u64,
    code: u64,
    info: [u64; 2],
    /// The event that was being delivered when it left.
    interrupted: u64,
    to: u64,
    stack: u64,
    flags: u64,
    cr0: u64,
}

/// The last passages of a vCPU, the oldest of which makes room.
pub struct Trail {
    passages: [Passage; MOST],
    next: usize,
}

impl Trail {
    /// None yet.
    pub fn new() -> Self {
        Self { passages: [Passage::default(); MOST], next: 0 }
    }

    /// It is about to be entered.
    pub fn enter(&mut self, block: &Block) {
        self.passages[self.next] =
            Passage { inject: block.inject, from: block.instruction, ..Passage::default() };
    }

    /// It has left.
    pub fn leave(&mut self, block: &Block) {
        let passage = &mut self.passages[self.next];
        *passage = Passage {
            code: block.exit_code,
            info: block.exit_info,
            interrupted: block.interrupted,
            to: block.instruction,
            stack: block.stack,
            flags: block.flags,
            cr0: block.cr0,
            ..*passage
        };
        self.next = (self.next + 1) % MOST;
    }
}

impl fmt::Display for Trail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (newer, older) = self.passages.split_at(self.next);
        for it in older.iter().chain(newer).filter(|it| it.cr0 != 0) {
            write!(
                f,
                "from {:#x} with {:#x} to {:#x}: exit {:#x} {:#x} {:#x}, delivering {:#x}, stack \
                 {:#x}, flags {:#x}, CR0 {:#x}\r\n",
                it.from,
                it.inject,
                it.to,
                it.code,
                it.info[0],
                it.info[1],
                it.interrupted,
                it.stack,
                it.flags,
                it.cr0
            )?;
        }
        Ok(())
    }
}

//! Page-modification logging: hardware writes down which pages of a guest it makes dirty (SDM vol.
//! 3C 29.3.6).
//!
//! A CPU that sets the dirty flag of a leaf of EPT writes the guest's address, without its low
//! twelve bits, to the entry of its log that an index says, and counts the index down. If the index
//! is not one of the 512 entries, the CPU leaves its guest instead: the access is not made, and no
//! flag is set. Accesses through a translation whose leaf is dirty already, and is remembered so,
//! write nothing down.

use std::cell::Cell;

use tablewright_walker::Regime;

use super::Hardware;

/// Entries of a log.
const ENTRIES: u16 = 512;

/// The log of a CPU: its page, and the index of the next entry. It counts down, and over zero, in
/// 16 bits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modifications {
    page: Option<u64>,
    index: u16,
}

impl Hardware {
    fn modifications(&self, cpu: usize) -> &Cell<Modifications> {
        &self.cores[cpu].modifications
    }

    /// A dirty flag is about to be set. Whether it may be: the log is off, or has room.
    #[inline]
    pub(super) fn log_modification(&self, cpu: usize, at: u64) -> bool {
        let log = self.modifications(cpu);
        let Modifications { page, index } = log.get();
        let Some(page) = page.filter(|_| matches!(self.architecture.regime, Regime::Ept { .. }))
        else {
            return true;
        };
        if index >= ENTRIES {
            return false;
        }
        self.memory.write(page + u64::from(index) * 8, at & !0xfff);
        log.set(Modifications { page: Some(page), index: index.wrapping_sub(1) });
        true
    }

    /// Sets the log of a CPU: its page, if there is one, and the index of the next entry.
    pub(crate) fn set_modification_log(&self, cpu: usize, page: Option<u64>, index: u16) {
        self.modifications(cpu).set(Modifications { page, index });
    }

    /// Returns the index of the next entry of a CPU's log.
    pub(crate) fn modification_index(&self, cpu: usize) -> u16 {
        self.modifications(cpu).get().index
    }
}

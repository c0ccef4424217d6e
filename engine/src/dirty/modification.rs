//! The hardware's log of a virtual CPU's writes: Intel's page-modification logging (SDM vol. 3C
//! 29.3.6).
//!
//! When a processor sets the dirty flag of a leaf of EPT, and the virtual CPU has this log, it
//! writes the guest's address of the page into a list of 512 entries, at an index that counts down
//! from 511; if the index is out of range by then, it leaves the guest instead, with nothing
//! written and no flag set, and the access is made again. So the log is full after 512 pages, and
//! no page is lost. It is of one processor: what it has is read when the virtual CPU has left its
//! guest, by the CPU that it runs on.
//!
//! *A page that may be written without a fault is clean, or its address is in a modification log,
//! marked, or harvested and not copied yet.*
//! [`begin_modification_log`](crate::guest::Gather::begin_modification_log) makes it so,
//! [`drain`](crate::guest::Guest::drain) turns addresses into marks, a harvest makes clean what it
//! gives out, and a write that faults is marked by the handler, since what it maps is dirty from
//! the beginning.

use crate::addr::Ipa;
use crate::sync::{AtomicU64, Ordering};

/// The page of a virtual CPU in which hardware logs what it writes: the PML address of its control
/// structure leads to it.
///
/// ```
/// use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// use tablewright::{Ipa, dirty::ModificationLog};
/// let page = [const { AtomicU64::new(0) }; 512];
/// let log = ModificationLog::new(&page);
/// // What a processor does that writes two pages.
/// page[511].store(0x7000, Relaxed);
/// page[510].store(0x3000, Relaxed);
/// let written: Vec<Ipa> = log.written(509).collect();
/// assert_eq!(written, [Ipa::new(0x7000), Ipa::new(0x3000)]);
/// assert_eq!(log.written(ModificationLog::FIRST).count(), 0);
/// assert_eq!(log.written(u16::MAX).count(), 512); // it is full
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ModificationLog<'m> {
    page: &'m [AtomicU64; 512],
}

impl<'m> ModificationLog<'m> {
    /// The index with which a log is empty.
    pub const FIRST: u16 = 511;

    /// The log in this page.
    pub const fn new(page: &'m [AtomicU64; 512]) -> Self {
        Self { page }
    }

    /// The addresses that were logged, the oldest first, for an index as the processor has left it:
    /// the next entry that it would write, or any number from 512 on if there is none.
    pub fn written(&self, index: u16) -> impl Iterator<Item = Ipa> + use<'m> {
        let next = match index {
            0..=Self::FIRST => usize::from(index) + 1,
            _ => 0,
        };
        // The virtual CPU has left the guest, and what its processor has written comes before that.
        let entries = self.page[next..].iter().rev();
        entries.map(|entry| Ipa::new(entry.load(Ordering::Relaxed) & !0xfff))
    }
}

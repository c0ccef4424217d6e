//! The guest's memory: it lies in a row in the host's, and is mapped where it is touched.
//!
//! The guest takes its memory for what begins at address 0. An access outside of it ends in a fault of the guest's own.

use core::ptr;

use tablewright::format::Npt;
use tablewright::guest::{self, Backing, Cause, Declined, Fault};
use tablewright::shared::Refused;
use tablewright::{Ipa, Pa, Span};

use crate::counters::Count;
use crate::machine::{Machine, PAGE, count};

/// Nested tables of 4 levels, as the host's own are.
pub type Nested = Npt<4>;

/// The guest, as the engine knows it.
pub type Guest = guest::Guest<'static, Nested, &'static Machine>;

/// The edits of one processor.
pub type Gather = guest::Gather<'static, 'static, Nested, &'static Machine>;

const LARGE: u64 = 2 << 20;

/// How large leaves are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Pages of 4 KiB.
    Pages,
    /// Pages of 2 MiB.
    Large,
    /// In turn: 2 MiB by one leaf, 2 MiB by pages.
    Mixed,
}

impl Leaves {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "4k" => Some(Self::Pages),
            "2m" => Some(Self::Large),
            "mixed" => Some(Self::Mixed),
            _ => None,
        }
    }

    /// The largest.
    pub fn largest(self) -> u64 {
        match self {
            Self::Pages => PAGE,
            Self::Large | Self::Mixed => LARGE,
        }
    }
}

/// What becomes of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The guest goes on.
    Resume,
    /// Nothing is there: it gets a fault of its own.
    Inject,
}

/// The guest's memory.
pub struct Vm {
    /// What the engine knows of it.
    pub guest: Guest,
    /// Where in the host's memory it lies.
    memory: Span<Pa>,
    leaves: Leaves,
}

impl Vm {
    /// A guest with this memory; its slot is in `guest`.
    ///
    /// # Safety
    /// 1. The memory is mapped one to one, and has no other user but the guest.
    pub unsafe fn new(guest: Guest, memory: Span<Pa>, leaves: Leaves) -> Self {
        Self {
            guest,
            memory,
            leaves,
        }
    }

    /// Its size.
    pub fn size(&self) -> u64 {
        self.memory.size()
    }

    fn look_up(&self, at: Ipa) -> Option<Backing> {
        let frame = self.place(at.get(), 1)?;
        let large = match self.leaves {
            Leaves::Pages => false,
            Leaves::Large => true,
            Leaves::Mixed => (at.get() / LARGE).is_multiple_of(2),
        };
        let size = if large { LARGE } else { PAGE };
        Some(Backing::new(Pa::new(frame), size))
    }

    /// Where so many bytes of the guest's memory are in the host's.
    fn place(&self, at: u64, size: u64) -> Option<u64> {
        let end = at.checked_add(size)?;
        (end <= self.memory.size()).then(|| self.memory.start().get() + at)
    }

    /// Reads quadwords of the guest's memory, which it may write meanwhile. `None` if they are not all there.
    pub fn read(&self, at: u64, words: &mut [u64]) -> Option<()> {
        let from = self.place(at, 8 * words.len() as u64)?;
        for (index, word) in words.iter_mut().enumerate() {
            let from = ptr::with_exposed_provenance::<u64>(from as usize).wrapping_add(index);
            // SAFETY: memory of the guest, which is mapped one to one. It may lie anywhere.
            *word = unsafe { from.read_unaligned() };
        }
        Some(())
    }

    /// Writes to the guest's memory. `None` if it is not all there.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let to = self.place(at, bytes.len() as u64)?;
        let to = ptr::with_exposed_provenance_mut::<u8>(to as usize);
        // SAFETY: memory of the guest, which is mapped one to one, and holds nothing of the host's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }

    /// Handles a nested page fault: what the exit says of it (APM vol. 2 15.25.6).
    pub fn fault(&self, info: u64, at: u64, gather: &mut Gather) -> Next {
        count(Count::Faults, 1);
        let Some(fault) = Fault::nested(info, at) else {
            return Next::Inject;
        };
        if fault.cause == Cause::AccessFlag {
            return Next::Resume;
        }
        loop {
            let request = match self.guest.request(&fault) {
                Ok(request) => request,
                Err(Declined::Busy) => return Next::Resume,
                Err(_) => return Next::Inject,
            };
            let Some(page) = self.look_up(request.at()) else {
                return Next::Inject;
            };
            gather.top_up(request.tables());
            match gather.map(&request, &page) {
                Ok(_) => {
                    count(Count::Installed, 1);
                    settle(gather);
                    return Next::Resume;
                }
                // Another processor is at it: the guest tries again.
                Err(Refused::Busy(_)) => return Next::Resume,
                Err(Refused::Retry) => settle(gather),
                Err(Refused::NeedsTables(missing)) => {
                    assert!(gather.top_up(missing), "no memory for tables");
                }
                Err(_) => return Next::Inject,
            }
        }
    }
}

/// Completes what was gathered and frees what was cut off. Until no walk holds that it waits: walks take microseconds, and none
/// waits for anything.
fn settle(gather: &mut Gather) {
    let mut done = gather.finish(|_| ());
    while let Err(cut) = done {
        core::hint::spin_loop();
        done = cut.quiet().map(|completed| completed.finish(|_| ()));
    }
}

//! The guest's memory: it lies in a row in the host's at first, and is mapped where it is touched.
//! Which frame is behind a page [`memory`](common::memory) says.
//!
//! The guest takes its memory for what begins at address 0. An access outside of it ends in a fault
//! of the guest's own.

use core::ptr;

use tablewright::Ipa;
use tablewright::format::Npt;
use tablewright::guest::{Cause, Fault};
use tablewright::shared::SharedPlatform as _;
use tablewright_hypervisor_common::memory::reclaim;
use tablewright_hypervisor_common::snapshot::{Gate, Log};
use tablewright_hypervisor_common::{self as common, fault};

use crate::machine::{Machine, PAGE};
use crate::processor;

/// Nested tables of 4 levels, as the host's own are.
pub type Nested = Npt<4>;

/// The guest, as the engine knows it.
pub type Guest = common::Guest<Machine>;

/// The edits of one processor.
pub type Gather = common::Gather<Machine>;

/// Which frame is behind each page of it.
pub type Memory = common::memory::Memory<Machine>;

/// What a free frame holds: as instructions such as are not there, as an address nowhere.
pub const POISON: u64 = 0x0b0f_0b0f_0b0f_0b0f;

/// What becomes of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The guest goes on.
    Resume,
    /// Nothing is there: it gets a fault of its own.
    Inject,
}

/// A page is on the move: it is asked for again, when what has to be done for that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moving;

/// The guest's memory.
pub struct Vm {
    /// What the engine knows of it.
    pub guest: Guest,
    /// Which frames it is on.
    pub memory: Memory,
    /// What it has written, if that is asked for.
    pub log: Option<Log>,
    /// Where it can be stopped: its processors pass before they enter it.
    pub gate: Gate,
    size: u64,
}

impl Vm {
    /// A guest with this memory, from address 0 on; its slot is in `guest`.
    ///
    /// # Safety
    /// 1. The frames are mapped one to one, and have no other user but the guest.
    pub unsafe fn new(guest: Guest, memory: Memory, log: Option<Log>, size: u64) -> Self {
        Self {
            guest,
            memory,
            log,
            gate: Gate::new(),
            size,
        }
    }

    /// Its size.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Uses bytes of one page of the guest's memory, which stays where it is meanwhile. `None` if
    /// there is no memory.
    fn with<T>(&self, at: u64, use_them: impl FnOnce(*mut u8) -> T) -> Option<Result<T, Moving>> {
        if at >= self.size {
            return None;
        }
        // A page whose look-up says that it is there is not taken away before the walk is over.
        let _walk = self.guest.space().platform().enter();
        Some(match self.memory.look_up(Ipa::new(at)) {
            Some(page) => {
                // Of a large leaf, too, the look-up says the frame of the page.
                let place = (page.frame.get() & !(PAGE - 1)) + at % PAGE;
                Ok(use_them(ptr::with_exposed_provenance_mut(place as usize)))
            }
            None => Err(Moving),
        })
    }

    /// Reads quadwords of the guest's memory, which it may write meanwhile, from a multiple of 8
    /// on. `None` if they are not there.
    pub fn read(&self, mut at: u64, mut words: &mut [u64]) -> Option<Result<(), Moving>> {
        while !words.is_empty() {
            let room = ((PAGE - at % PAGE) as usize / 8).min(words.len());
            let (now, later) = words.split_at_mut_checked(room)?;
            let read = self.with(at, |from| {
                for (index, word) in now.iter_mut().enumerate() {
                    // SAFETY: inside of a page of the guest's, which is mapped one to one.
                    *word = unsafe { from.cast::<u64>().add(index).read_unaligned() };
                }
            })?;
            if read.is_err() {
                return Some(read);
            }
            (at, words) = (at + 8 * room as u64, later);
        }
        Some(Ok(()))
    }

    /// Writes to the guest's memory. `None` if it is not all there. It waits for pages that are on
    /// the move: the processor has no vCPU's space loaded.
    pub fn write(&self, mut at: u64, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let room = ((PAGE - at % PAGE) as usize).min(bytes.len());
            let (now, later) = bytes.split_at(room);
            while self.with(at, |to| {
                // SAFETY: inside of a page of the guest's, which is mapped one to one, and holds
                // nothing of the host's.
                unsafe { ptr::copy_nonoverlapping(now.as_ptr(), to, now.len()) };
            })? == Err(Moving)
            {
                core::hint::spin_loop();
            }
            // Behind the page's content, as of a guest's own write.
            if let Some(log) = &self.log {
                log.mark(at / PAGE);
            }
            (at, bytes) = (at.checked_add(room as u64)?, later);
        }
        Some(())
    }

    /// Takes a frame away from the guest, if some are still to be taken.
    pub fn evict(&'static self, gather: &mut Gather) {
        self.memory.evict_one(&self.guest, gather, |page| {
            // A copy that was made just now may be of the poison.
            if let Some(log) = &self.log {
                log.mark(page);
            }
        });
    }

    /// Handles a nested page fault: what the exit says of it (APM vol. 2 15.25.6).
    pub fn fault(&'static self, info: u64, at: u64, gather: &mut Gather) -> Next {
        match Fault::nested(info, at) {
            Some(fault) => self.map(&fault, gather),
            None => Next::Inject,
        }
    }

    /// The same of a fault that may be made up.
    pub fn map(&'static self, fault: &Fault, gather: &mut Gather) -> Next {
        <Machine as common::Host>::count(common::Event::Faults, 1);
        if fault.cause == Cause::AccessFlag {
            return Next::Resume;
        }
        let (guest, memory, log) = (&self.guest, &self.memory, self.log.as_ref());
        let cpu = processor::number();
        let next = fault::map(guest, memory, log, gather, fault, cpu, |request| {
            memory.look_up(request.at())
        });
        reclaim(gather);
        match next {
            fault::Next::Resume => Next::Resume,
            _ => Next::Inject,
        }
    }
}

//! A guest with its memory, and its faults: mapped, with a log or without one.

use core::ptr;

use tablewright::guest::{Backing, Cause, Declined, Fault, Slot};
use tablewright::shared::{Mapped, Refused, SharedPlatform as _};
use tablewright::{Ipa, Pa, guest};

use crate::counters::Event;
use crate::host::{Gather, Guest, Host, Mutex, PROCESSORS, relax};
use crate::log::{Gate, Log};
use crate::memory::{Memory, reclaim};
use crate::pieces::MOST;

/// The slots of a guest's memory, in order, without a log.
pub type Slots = [Option<Slot>; MOST];

/// A guest.
pub struct Vm<H: Host> {
    /// The engine's part of it.
    pub guest: Guest<H>,
    /// The frames behind its memory.
    pub memory: Memory<H>,
    /// The slots of its memory.
    pub slots: Slots,
    /// The log of its writes, if there is one.
    pub log: Option<Log>,
    /// The gate at which it is stopped.
    pub gate: Gate,
    /// One for each processor, which keeps tables from fault to fault.
    gathers: [Mutex<Option<Gather<H>>, H>; PROCESSORS],
}

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The guest goes on, or faults again.
    Resume,
    /// No slot allows it.
    Declined(Declined),
    /// It cannot be mapped.
    Nothing,
}

/// A page is on the move: it is asked for again when that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moving;

impl<H: Host> Vm<H> {
    /// A guest, in which the slots of its memory are.
    pub fn new(guest: Guest<H>, memory: Memory<H>, slots: Slots, log: Option<Log>) -> Self {
        Self {
            guest,
            memory,
            slots,
            log,
            gate: Gate::new(),
            gathers: [const { spin::mutex::SpinMutex::new(None) }; PROCESSORS],
        }
    }

    /// Uses the gather of this processor, number `cpu`. No other takes it.
    fn with_gather<T>(&'static self, cpu: usize, use_it: impl FnOnce(&mut Gather<H>) -> T) -> T {
        let mut gather = self.gathers[cpu].lock();
        use_it(gather.get_or_insert_with(|| self.guest.gather()))
    }

    /// Takes a frame away from the guest, if it is time. The guest need not be loaded.
    pub fn evict(&'static self, cpu: usize) {
        self.with_gather(cpu, |gather| {
            self.memory.evict_one(&self.guest, gather, |page| {
                // A copy that was made just now may be of the poison.
                if let Some(log) = &self.log {
                    log.mark(page);
                }
            });
        });
    }

    /// Handles a fault of this processor's, number `cpu`.
    pub fn fault(&'static self, fault: &Fault, cpu: usize) -> Next {
        H::count(Event::Faults, 1);
        if fault.cause == Cause::AccessFlag {
            // If it was busy, the guest comes again.
            let _busy = self.guest.set_accessed(fault);
            return Next::Resume;
        }
        self.with_gather(cpu, |gather| {
            let next = self.map(fault, cpu, gather);
            reclaim(gather);
            next
        })
    }

    /// Returns the page of a request: `None` while it is on the move. Devices do not move.
    fn look_up(&self, request: &guest::Request) -> Option<Backing> {
        match self.memory.holds(request.at()) {
            true => self.memory.look_up(request.at()),
            false => Some(Backing::new(Pa::new(request.host()), H::PAGE)),
        }
    }

    fn map(&'static self, fault: &Fault, cpu: usize, gather: &mut Gather<H>) -> Next {
        let guest = &self.guest;
        loop {
            let request = match guest.request(fault) {
                Ok(request) => request,
                Err(Declined::Busy) => return busy::<H>(),
                Err(declined) => return Next::Declined(declined),
            };
            // A written page is marked after it was made writable and before the guest goes on;
            // room for the mark is made sure of before.
            let marker = match &self.log {
                Some(log) if request.is_logged_write() => Some(log.marker(cpu, &request.slot())),
                _ => None,
            };
            if marker.is_some_and(|marker| marker.room().is_err()) {
                H::count(Event::Full, 1);
                relax::<H>();
                return Next::Resume;
            }
            let mark = || {
                if let Some(marker) = &marker {
                    guest.mark(marker, &request.slot(), request.at());
                }
            };
            if self.log.is_some() && guest.reopen(&request) == Ok(true) {
                H::count(Event::Reopened, 1);
                mark();
                return Next::Resume;
            }
            gather.top_up(request.tables());
            let Some(page) = self.look_up(&request) else {
                return busy::<H>();
            };
            match gather.map(&request, &page) {
                Ok(mapped) => {
                    let kind = match mapped {
                        Mapped::Installed => Event::Installed,
                        _ => Event::Grown,
                    };
                    H::count(kind, 1);
                    mark();
                    self.memory.returned(request.at());
                    return Next::Resume;
                }
                Err(Refused::Busy(_)) => return busy::<H>(),
                // The gather may be full.
                Err(Refused::Retry) => reclaim(gather),
                Err(Refused::NeedsTables(missing)) => {
                    assert!(gather.top_up(missing), "no memory for tables");
                }
                Err(_) => return Next::Nothing,
            }
        }
    }

    /// Uses bytes of one page of the guest's memory, which stays where it is meanwhile. `None` if
    /// there is no memory.
    fn with<T>(&self, at: u64, use_them: impl FnOnce(*mut u8) -> T) -> Option<Result<T, Moving>> {
        if !self.memory.holds(Ipa::new(at)) {
            return None;
        }
        // A page that the look-up has is not taken away before the walk is over.
        let _walk = self.guest.space().platform().enter();
        Some(match self.memory.look_up(Ipa::new(at)) {
            Some(page) => {
                // Of a large leaf, too, the look-up says the frame of the page.
                let place = (page.frame.get() & !(H::PAGE - 1)) + at % H::PAGE;
                Ok(use_them(ptr::with_exposed_provenance_mut(place as usize)))
            }
            None => Err(Moving),
        })
    }

    /// Reads quadwords of the guest's memory, which it may write meanwhile, from a multiple of 8
    /// on. `None` if they are not there.
    pub fn read(&self, mut at: u64, mut words: &mut [u64]) -> Option<Result<(), Moving>> {
        while !words.is_empty() {
            let room = ((H::PAGE - at % H::PAGE) as usize / 8).min(words.len());
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
    /// the move: the processor has no guest loaded.
    pub fn write(&self, mut at: u64, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let room = ((H::PAGE - at % H::PAGE) as usize).min(bytes.len());
            let (now, later) = bytes.split_at(room);
            while self.with(at, |to| {
                // SAFETY: inside of a page of the guest's, which is mapped one to one, and holds
                // nothing of the host's.
                unsafe { ptr::copy_nonoverlapping(now.as_ptr(), to, now.len()) };
            })? == Err(Moving)
            {
                relax::<H>();
            }
            // After the page was written, as for a guest's own write.
            if let (Some(log), Some(page)) = (&self.log, self.memory.page(Ipa::new(at))) {
                log.mark(page);
            }
            (at, bytes) = (at.checked_add(room as u64)?, later);
        }
        Some(())
    }
}

/// Another processor is at it: the guest tries again, when that one has had a turn.
fn busy<H: Host>() -> Next {
    H::count(Event::Busy, 1);
    relax::<H>();
    Next::Resume
}

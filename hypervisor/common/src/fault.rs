//! A fault of the guest's memory, mapped: what every hypervisor does with it, with a log or without
//! one.

use tablewright::guest::{Backing, Declined, Fault, Request};
use tablewright::shared::{Mapped, Refused};

use crate::memory::{Memory, reclaim};
use crate::snapshot::Log;
use crate::{Event, Gather, Guest, Host, relax};

/// What becomes of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The guest goes on, or comes again.
    Resume,
    /// No slot allows it.
    Declined(Declined),
    /// It cannot be mapped.
    Nothing,
}

/// Another processor is at it: the guest tries again, when that one has had a turn.
fn busy<H: Host>() -> Next {
    H::count(Event::Busy, 1);
    relax::<H>();
    Next::Resume
}

/// Maps what this processor, number `cpu`, has missed. `look_up` finds the page of a request,
/// `None` while it is on the move.
pub fn map<H: Host>(
    guest: &'static Guest<H>,
    memory: &Memory<H>,
    log: Option<&Log>,
    gather: &mut Gather<H>,
    fault: &Fault,
    cpu: usize,
    look_up: impl Fn(&Request) -> Option<Backing>,
) -> Next {
    loop {
        let request = match guest.request(fault) {
            Ok(request) => request,
            Err(Declined::Busy) => return busy::<H>(),
            Err(declined) => return Next::Declined(declined),
        };
        // What it writes is marked after it was made writable, and before it goes on; room is made
        // sure of before.
        let marker = match log {
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
        if log.is_some() && guest.reopen(&request) == Ok(true) {
            H::count(Event::Reopened, 1);
            mark();
            return Next::Resume;
        }
        gather.top_up(request.tables());
        let Some(page) = look_up(&request) else {
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
                memory.returned(request.at());
                return Next::Resume;
            }
            Err(Refused::Busy(_)) => return busy::<H>(),
            // It may be full.
            Err(Refused::Retry) => reclaim(gather),
            Err(Refused::NeedsTables(missing)) => {
                assert!(gather.top_up(missing), "no memory for tables");
            }
            Err(_) => return Next::Nothing,
        }
    }
}

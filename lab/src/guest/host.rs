//! A host's side of a guest, through the engine's [`Guest`]: faults, the start and the end of a
//! log, and leaves that grow again.

use std::cell::RefCell;

use tablewright::guest::{
    Access, Backing, Cause, Fault, Gather, Guest, Log, Request, Slot, SlotError,
};
use tablewright::shared::{Refused, SharedPlatform};
use tablewright::{Format, Ipa, Level};
use tablewright_machine::Fault as Trap;

/// How often a fault is looked up again before the guest makes its access again.
const TRIES: usize = 8;

/// Outcome of a fault.
#[derive(Clone, Copy, Debug)]
pub enum Served {
    /// The access goes through.
    Done,
    /// Nothing has changed: the guest faults again.
    Again,
    /// There is no memory for a table.
    OutOfTables,
}

/// The fault that the machine reports for an access to `at`. `None` if it is not one that mapping
/// answers.
pub fn fault_of(trap: Trap, at: Ipa, write: bool) -> Option<Fault> {
    let (cause, depth) = match trap {
        Trap::Translation { depth } => (Cause::Translation, depth),
        Trap::Permission { depth } => (Cause::Permission, depth),
        Trap::AccessFlag { depth } => (Cause::AccessFlag, depth),
        _ => return None,
    };
    Some(Fault { cause, level: Some(Level::new(depth)), ..Fault::new(at, access(write)) })
}

/// An access that reads or writes.
pub fn access(write: bool) -> Access {
    match write {
        true => Access::Write,
        false => Access::Read,
    }
}

/// Serves a fault: gives back what a log has taken, or looks the page up and maps it. A look-up may
/// edit the guest's memory itself, so the gather is not borrowed for it. `None` of it: not now.
pub fn serve<F: Format<Input = Ipa>, P: SharedPlatform + Clone>(
    guest: &Guest<'_, F, P>,
    gather: &RefCell<Gather<'_, '_, F, P>>,
    fault: &Fault,
    mut look_up: impl FnMut(&Request) -> Option<Backing>,
) -> Served {
    for _ in 0..TRIES {
        let Ok(request) = guest.request(fault) else {
            return Served::Again;
        };
        // A page that no log has touched, and that is not mapped, has nothing to be given back.
        let reopened = match fault.cause == Cause::Permission || request.slot().log.is_on() {
            true => guest.reopen(&request),
            false => Ok(false),
        };
        let mapped = match reopened {
            Ok(true) => return Served::Done,
            Ok(false) => match look_up(&request) {
                Some(page) => map(&mut gather.borrow_mut(), &request, &page),
                None => return Served::Again,
            },
            Err(refused) => Err(refused),
        };
        match mapped {
            Ok(()) => return Served::Done,
            Err(Refused::NeedsTables(_)) => return Served::OutOfTables,
            Err(Refused::Retry) => {}
            Err(_) => return Served::Again,
        }
    }
    Served::Again
}

/// Maps the page of a request, with as many tables as it takes.
fn map<F: Format<Input = Ipa>, P: SharedPlatform + Clone>(
    gather: &mut Gather<'_, '_, F, P>,
    request: &Request,
    page: &Backing,
) -> Result<(), Refused<Ipa>> {
    gather.top_up(request.tables());
    loop {
        match gather.map(request, page) {
            Err(Refused::NeedsTables(count)) if gather.top_up(count) => {}
            mapped => return mapped.map(|_| ()),
        }
    }
}

/// Has writes to a slot logged, or no more, and `wait`s for the faults that saw it as it was. The
/// slot as it is.
pub fn set_log<F: Format<Input = Ipa>, P: SharedPlatform + Clone>(
    guest: &Guest<'_, F, P>,
    slot: Slot,
    log: Log,
    wait: impl Fn(),
) -> Result<Slot, SlotError> {
    let slot = slot.with_log(log);
    // What is mapped may stay: a log protects it next, and without one more is allowed.
    drop(guest.replace(slot)?);
    let before = guest.space().grace_period();
    while !guest.space().is_over(before) {
        wait();
    }
    Ok(slot)
}

/// Takes the permission to write from all of a slot that is logged.
pub fn protect<F: Format<Input = Ipa>, P: SharedPlatform + Clone>(
    gather: &mut Gather<'_, '_, F, P>,
    slot: &Slot,
    wait: impl Fn(),
) -> Result<(), SlotError> {
    let pages = slot.guest.size() >> F::PAGE_SHIFT;
    // An entry that is being split is passed over, and has been split the next time.
    while gather.protect(slot, 0..pages)?.passed_over {
        wait();
    }
    Ok(())
}

/// Puts back the largest leaves of a slot, of which `page` says what backs a distance from its
/// start, if it is to be mapped; `finish` completes what was gathered for one, and is given whether
/// to wait.
pub fn grow<'g, 's, F: Format<Input = Ipa>, P: SharedPlatform + Clone>(
    gather: &mut Gather<'g, 's, F, P>,
    slot: &Slot,
    page: impl Fn(u64) -> Option<Backing>,
    mut finish: impl FnMut(&mut Gather<'g, 's, F, P>, bool),
) -> Result<(), Refused<Ipa>> {
    let guest = gather.guest();
    let mut distance = 0;
    while distance < slot.guest.size() {
        let at = Ipa::new(slot.guest.start().get() + distance);
        let found = page(distance);
        let collapsed = match (guest.request(&Fault::new(at, Access::Read)), &found) {
            (Ok(request), Some(found)) => gather.collapse(&request, found),
            (Ok(_), None) => Ok(false),
            (Err(_), _) => Err(Refused::Retry),
        };
        let again = matches!(collapsed, Err(Refused::Busy(_) | Refused::Retry));
        finish(gather, again);
        if again {
            continue;
        }
        let leaf = collapsed?.then(|| guest.space().query(at)).flatten();
        let size = leaf.map_or(1 << F::shift(Level::PAGE.up()), |leaf| leaf.size());
        distance = (distance | (size - 1)) + 1;
    }
    Ok(())
}

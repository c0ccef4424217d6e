//! The engine's own way: [`Guest`], as a hypervisor embeds it.
//!
//! The host's part is here: it says which page backs an address, and takes pages back. A range that
//! is being taken back is noted *before* it is zapped, and struck off when the host's answer is the
//! new one; a fault looks for it *after* its request. So a fault that could be given the old page
//! is either refused by the version that the zap has moved on, or finds the note.
//!
//! Writes are logged by protecting what is mapped; when logging is over, leaves are grown again.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;

use tablewright::guest::{Backing as Found, Gather, Guest, Log, Pass, Slot};
use tablewright::shared::DeferredReclaim;
use tablewright::{Format, Ipa, Level, Perms, Span};
use tablewright_machine::{Fault as Trap, Rule, Time};

use super::backing::{Backing, Handler, Owner, Page};
use super::watch::Watch;
use crate::guest::host::{Served, fault_of, grow, protect, serve, set_log};
use crate::guest::input::Region;
use crate::guest::leaf_bytes;

/// How long a CPU that waits for walks of others looks away.
const LOOK_AWAY: Time = Time::ns(100);

/// The handler.
pub struct Engine<'g, 's, 'm, F: Format<Input = Ipa>> {
    guest: &'g Guest<'s, F, Watch<'m>>,
    platform: Watch<'m>,
    slot: Slot,
    /// Of each vCPU, and of the thread that starts the phases.
    gathers: Box<[RefCell<Gather<'g, 's, F, Watch<'m>>>]>,
    /// Ranges that the host is taking back.
    taking: RefCell<Vec<(u64, u64)>>,
    /// Detached tables that may still be walked.
    later: RefCell<Vec<DeferredReclaim<F, Watch<'m>>>>,
    retries: Cell<u64>,
}

/// The slot of a guest's memory, whose host addresses are distances from its start.
pub fn slot(region: Region, page: u64) -> Option<Slot> {
    let span = Span::new(Ipa::new(region.first), region.bytes).ok()?;
    let mut slot = Slot::memory(span, 0).with_perms(Perms::READ | Perms::WRITE);
    slot.page = page;
    Some(slot)
}

/// A page of the host as the engine is told of it.
fn found(page: Page) -> Found {
    let perms = match page.writable {
        true => Perms::READ | Perms::WRITE,
        false => Perms::READ,
    };
    Found::new(page.frame, leaf_bytes(page.level)).with_perms(perms)
}

impl<'g, 's, 'm, F: Format<Input = Ipa>> Engine<'g, 's, 'm, F> {
    /// Of a guest that has this slot.
    pub fn new(guest: &'g Guest<'s, F, Watch<'m>>, slot: Slot, vcpus: usize) -> Self {
        Self {
            guest,
            platform: *guest.space().platform(),
            slot,
            gathers: (0..=vcpus).map(|_| guest.gather().into()).collect(),
            taking: RefCell::default(),
            later: RefCell::default(),
            retries: Cell::new(0),
        }
    }

    fn look_away(&self) {
        self.platform.machine().cpu().spend(LOOK_AWAY);
    }

    fn report(&self, what: impl ToString) {
        let machine = self.platform.machine();
        machine.report(Rule::Program, what.to_string());
    }

    /// Completes what was gathered; what may still be walked is kept for later.
    fn finish(&self, gather: &mut Gather<'g, 's, F, Watch<'m>>) {
        if let Err(deferred) = gather.finish(|_| ()) {
            self.later.borrow_mut().push(deferred);
        }
        let first = self.later.borrow_mut().pop();
        if let Some(deferred) = first {
            match deferred.try_complete() {
                Ok(completed) => completed.finish(|_| ()),
                Err(deferred) => self.later.borrow_mut().push(deferred),
            }
        }
    }

    fn is_being_taken(&self, offset: u64) -> bool {
        self.platform.machine().cpu().order();
        let taking = self.taking.borrow();
        let holds = |(first, last): &(u64, u64)| (*first..=*last).contains(&offset);
        taking.iter().any(holds)
    }
}

impl<F: Format<Input = Ipa>> Owner for Engine<'_, '_, '_, F> {
    fn take(&self, first: u64, bytes: u64) {
        self.platform.machine().cpu().order();
        self.taking.borrow_mut().push((first, first + (bytes - 1)));
        let start = Ipa::new(self.slot.guest.start().get() + first);
        let Ok(span) = Span::new(start, bytes) else {
            return self.report(format!("{bytes} bytes at {start} are no range"));
        };
        let (mut zap, mut gather) = (self.guest.zap(span), self.guest.gather());
        loop {
            match zap.unmap(&mut gather, |_| ControlFlow::Continue(())) {
                Ok(Pass::Waiting) => self.look_away(),
                Ok(Pass::Went) => self.finish(&mut gather),
                Ok(Pass::Over) => break,
                Err(error) => return self.report(error),
            }
        }
    }

    fn give(&self, first: u64, bytes: u64) {
        self.platform.machine().cpu().order();
        let range = (first, first + (bytes - 1));
        let mut taking = self.taking.borrow_mut();
        if let Some(at) = taking.iter().position(|of| *of == range) {
            taking.swap_remove(at);
        }
    }
}

impl<'m, F: Format<Input = Ipa>> Handler<'m> for Engine<'_, '_, 'm, F> {
    fn fault(&self, ipa: u64, write: bool, trap: Trap, backing: &Backing<'m>) {
        let Some(fault) = fault_of(trap, Ipa::new(ipa), write) else {
            return self.report(format!("{trap:?} at {ipa:#x}"));
        };
        let gather = &self.gathers[self.platform.machine().cpu().id()];
        let served = serve(self.guest, gather, &fault, |request| {
            let offset = request.host();
            let taken = self.is_being_taken(offset);
            (!taken).then(|| found(backing.get(offset, write, self)))
        });
        match served {
            Served::Done => {}
            Served::Again => self.retries.set(self.retries.get() + 1),
            Served::OutOfTables => self.report("no memory for a table"),
        }
        self.finish(&mut gather.borrow_mut());
    }

    fn start_logging(&self) {
        let mut gather = self.guest.gather();
        let protected = set_log(self.guest, self.slot, Log::ByFault, || self.look_away())
            .map(|slot| protect(&mut gather, &slot, || self.look_away()));
        match protected {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.report(error),
            Err(error) => self.report(error),
        }
        self.finish(&mut gather);
    }

    fn stop_logging(&self) {
        if let Err(error) = set_log(self.guest, self.slot, Log::Off, || self.look_away()) {
            self.report(error);
        }
    }

    fn grow(&self, backing: &Backing<'m>) {
        let page = |offset| {
            let page = backing.peek(offset)?;
            (page.level > Level::PAGE).then(|| found(page))
        };
        let grown = grow(&mut self.guest.gather(), &self.slot, page, |gather, again| {
            self.finish(gather);
            if again {
                self.look_away();
            }
        });
        if let Err(refused) = grown {
            self.report(refused);
        }
    }

    fn retries(&self) -> u64 {
        self.retries.get()
    }
}

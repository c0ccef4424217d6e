//! The engine's own way: shared edits, no lock, and caches cleaned by the one vCPU that installs.
//!
//! A hypervisor has to add four things, and they are here: it looks the memory up before the walk and finds out in the walk
//! whether the host has taken it back meanwhile; it tops tables up when it is told that some are needed; it chooses the
//! size of a leaf; and when logging is over, it grows leaves again.
//!
//! Where memory has to be cleaned, a fault maps 2 MiB at most, so that no fault waits for more to be cleaned than that.
//! While writes are logged, memory that is read is mapped as large as ever, read-only: the first write splits it, by a
//! table that is full before it is linked, so that no vCPU faults on the rest.

use std::cell::{Cell, RefCell, RefMut};

use tablewright::shared::{
    Cut, Gather, Mapped, NewLeaf, Refused, Relaxed, SharedPlatform, SharedSpace,
};
use tablewright::{Change, Format, Ipa, Level, Pa, Perms, Span};
use tablewright_machine::{Fault, Machine, Time};

use std::ops::ControlFlow;

use super::backing::{Backing, Owner, Page};
use super::handler::{Handler, attrs};
use super::input::{BLOCK, Region};
use super::watch::Watch;

/// What a vCPU asks how often before it lets the guest try again.
const TRIES: usize = 8;

/// The handler.
pub struct Shared<'s, 'm, F: Format<Input = Ipa>> {
    space: &'s SharedSpace<F, Watch<'m>>,
    platform: Watch<'m>,
    region: Region,
    /// Of each vCPU, and of the thread that starts the phases.
    gathers: Box<[RefCell<Gather<'s, F, Watch<'m>>>]>,
    logging: Cell<bool>,
    /// Ranges that the host is taking back, and how many it has taken.
    taking: RefCell<Vec<(u64, u64)>>,
    taken: Cell<u64>,
    /// What is complete and not quiet.
    later: RefCell<Vec<Cut<F, Watch<'m>>>>,
    retries: Cell<u64>,
}

impl<'s, 'm, F: Format<Input = Ipa>> Shared<'s, 'm, F> {
    pub fn new(
        space: &'s SharedSpace<F, Watch<'m>>,
        platform: Watch<'m>,
        region: Region,
        vcpus: usize,
    ) -> Self {
        Self {
            space,
            platform,
            region,
            gathers: (0..=vcpus).map(|_| space.gather().into()).collect(),
            logging: Cell::new(false),
            taking: RefCell::default(),
            taken: Cell::new(0),
            later: RefCell::default(),
            retries: Cell::new(0),
        }
    }

    fn machine(&self) -> &'m Machine {
        self.platform.machine()
    }

    fn all(&self) -> Span<Ipa> {
        // A region is not empty and within the addresses.
        Span::new(Ipa::new(self.region.first), self.region.bytes)
            .unwrap_or_else(|_| unreachable!("a region"))
    }

    /// The gather of the running CPU.
    fn gather(&self) -> RefMut<'_, Gather<'s, F, Watch<'m>>> {
        self.gathers[self.machine().cpu().id()].borrow_mut()
    }

    /// Runs an edit, which gets tables as it needs them. `None` if it is to be tried again.
    fn edit<T>(
        &self,
        mut edit: impl FnMut(&mut Gather<'s, F, Watch<'m>>) -> Result<T, Refused<Ipa>>,
    ) -> Option<T> {
        let mut gather = self.gather();
        let mut done = None;
        for _ in 0..TRIES {
            match edit(&mut gather) {
                Err(Refused::NeedsTables(count)) if gather.top_up(count) => {}
                Err(Refused::Retry) => {}
                edited => {
                    done = edited.ok();
                    break;
                }
            }
        }
        self.put_off(&mut gather);
        done
    }

    /// Completes what was gathered; what is not quiet is kept for later.
    fn put_off(&self, gather: &mut Gather<'s, F, Watch<'m>>) {
        if let Err(cut) = gather.finish(|_| ()) {
            self.later.borrow_mut().push(cut);
        }
        let first = self.later.borrow_mut().pop();
        if let Some(cut) = first {
            match cut.quiet() {
                Ok(completed) => completed.finish(|_| ()),
                Err(cut) => self.later.borrow_mut().push(cut),
            }
        }
    }

    /// Whether memory that was looked up when so much had been taken back is still the guest's. In a walk.
    fn is_current(&self, offset: u64, taken: u64) -> bool {
        self.machine().cpu().order();
        self.taken.get() == taken
            && !self
                .taking
                .borrow()
                .iter()
                .any(|(first, last)| (*first..=*last).contains(&offset))
    }

    /// Looks memory up, and how much had been taken back by then: again, if this itself has taken something back.
    fn look_up(&self, offset: u64, write: bool, backing: &Backing<'m>) -> (Page, u64) {
        loop {
            self.machine().cpu().order();
            let taken = self.taken.get();
            let page = backing.get(offset, write, self);
            self.machine().cpu().order();
            if self.taken.get() == taken {
                return (page, taken);
            }
        }
    }

    fn handle(&self, ipa: u64, write: bool, fault: Fault, backing: &Backing<'m>) -> Option<()> {
        let offset = ipa - self.region.first;
        let at = Ipa::new(ipa);
        let (page, taken) = self.look_up(offset, write, backing);
        let logging = self.logging.get();
        let writable = page.writable && (write || !logging);
        if let (Fault::Permission { .. }, true) = (fault, writable) {
            let level = if logging { Level::PAGE } else { page.level };
            let relaxed = self.edit(|gather| {
                let _walk = self.platform.enter();
                if !self.is_current(offset, taken) {
                    return Err(Refused::Busy(at));
                }
                // One level at a time.
                while gather.split(at, level)? {}
                let perms = (Perms::READ | Perms::WRITE).and_user();
                self.space.relax(at, perms, true)
            })?;
            if relaxed != Relaxed::Absent {
                return Some(());
            }
        }
        let level = if logging && write {
            Level::PAGE
        } else if self.platform.upkeep().clean {
            page.level.min(Level::new(1))
        } else {
            page.level
        };
        let size = 1u64 << F::shift(level);
        let frame = Pa::new(page.frame.get() & !(size - 1));
        let leaf = NewLeaf::<F>::new(at, frame, level, attrs(writable)).ok()?;
        self.edit(|gather| {
            let _walk = self.platform.enter();
            if !self.is_current(offset, taken) {
                return Err(Refused::Busy(at));
            }
            gather.map(&leaf)
        })
        .map(|_: Mapped<F>| ())
    }
}

impl<F: Format<Input = Ipa>> Owner for Shared<'_, '_, F> {
    fn take(&self, first: u64, bytes: u64) {
        let range = (first, first + (bytes - 1));
        self.machine().cpu().order();
        self.taking.borrow_mut().push(range);
        // Faults that looked the memory up before come to their end; those that come now do not begin.
        let before = self.space.moment();
        while !self.space.is_quiet(before) {
            self.machine().cpu().spend(Time::ns(100));
        }
        let start = Ipa::new(self.region.first + first);
        let Ok(span) = Span::new(start, bytes) else {
            return;
        };
        let mut gather = self.gather();
        if gather.unmap(span, |_| ControlFlow::Continue(())).is_ok() {
            self.put_off(&mut gather);
        }
    }

    fn give(&self, first: u64, bytes: u64) {
        self.machine().cpu().order();
        self.taken.set(self.taken.get() + 1);
        let range = (first, first + (bytes - 1));
        let mut taking = self.taking.borrow_mut();
        if let Some(at) = taking.iter().position(|of| *of == range) {
            taking.swap_remove(at);
        }
    }
}

impl<'m, F: Format<Input = Ipa>> Handler<'m> for Shared<'_, 'm, F> {
    fn fault(&self, ipa: u64, write: bool, fault: Fault, backing: &Backing<'m>) {
        if self.handle(ipa, write, fault, backing).is_none() {
            self.retries.set(self.retries.get() + 1);
        }
    }

    fn start_logging(&self) {
        self.logging.set(true);
        let mut gather = self.gather();
        let change = Change::new().perms(Perms::READ.and_user());
        // Twice: a fault that was under way may have installed something behind the first. Permissions are such that
        // every format has them.
        for _ in 0..2 {
            let _any = gather.protect(self.all(), change);
            let before = self.space.moment();
            while !self.space.is_quiet(before) {
                self.machine().cpu().spend(Time::ns(100));
            }
        }
        self.put_off(&mut gather);
    }

    fn stop_logging(&self) {
        self.logging.set(false);
    }

    fn grow(&self, backing: &Backing<'m>) {
        for offset in (0..self.region.bytes).step_by(BLOCK as usize) {
            let Some(page) = backing.peek(offset) else {
                continue;
            };
            let size = 1u64 << F::shift(page.level);
            if page.level == Level::PAGE || !offset.is_multiple_of(size) {
                continue;
            }
            let at = Ipa::new(self.region.first + offset);
            if let Ok(leaf) = NewLeaf::<F>::new(at, page.frame, page.level, attrs(page.writable)) {
                let _grown = self.edit(|gather| gather.map(&leaf));
            }
        }
    }

    fn retries(&self) -> u64 {
        self.retries.get()
    }
}

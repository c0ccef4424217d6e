//! The engine's own way: large leaves are put in the place of tables, which stay in use until then,
//! and many are flushed together.
//!
//! What was detached is reclaimed at the end, when all have forgotten it. No entry is ever frozen,
//! so no vCPU waits. The same host serves the faults of all phases before, whichever way comes
//! last.

use std::cell::RefCell;

use tablewright::dirty::{Bitmap, Marker};
use tablewright::guest::{Access, Backing, Fault, Gather, Guest, Request};
use tablewright::shared::{DeferredReclaim, Refused};
use tablewright::{Format, Ipa, Level};
use tablewright_machine::{Mapper, Rule, Time};

use super::job::Way;
use super::world::World;
use crate::guest::host::access;
use crate::guest::{Handled, leaf_bytes};

/// Leaves that are collapsed before all vCPUs are flushed.
const BATCH: usize = 64;
/// How long a CPU that waits for walks of others looks away.
const LOOK_AWAY: Time = Time::ns(50);

pub struct Engine<'w, 'm, 'g, 's, F: Format<Input = Ipa>> {
    pub world: &'w World<'m>,
    pub guest: &'g Guest<'s, F, Mapper<'m>>,
    pub bitmaps: &'g [Bitmap<'g>],
    /// Cost of finding a page of the host.
    pub page: u64,
    /// Of each vCPU.
    pub gathers: Box<[RefCell<Gather<'g, 's, F, Mapper<'m>>>]>,
    /// Collapsed tables, to be reclaimed.
    pub deferred: RefCell<Vec<DeferredReclaim<F, Mapper<'m>>>>,
}

impl<'m, 'g, 's, F: Format<Input = Ipa>> Engine<'_, 'm, 'g, 's, F> {
    pub fn look_away(&self) {
        self.world.cpu().spend(LOOK_AWAY);
    }

    /// Completes what was gathered, and reclaims what was detached when walks that may hold it are
    /// over.
    pub fn finish(&self, gather: &mut Gather<'g, 's, F, Mapper<'m>>) {
        self.finish_deferred(gather.issue().complete());
    }

    fn finish_deferred(&self, deferred: DeferredReclaim<F, Mapper<'m>>) {
        while !self.guest.space().is_over(deferred.grace_period()) {
            self.look_away();
        }
        match deferred.try_complete() {
            Ok(completed) => completed.finish(|_| ()),
            Err(_) => self.report("walks that were over are not".to_owned()),
        }
    }

    /// All vCPUs forget what was below the leaves that were collapsed.
    fn forget(&self, gather: &mut Gather<'g, 's, F, Mapper<'m>>, batch: &mut Vec<u64>) {
        let deferred = gather.issue().complete();
        if batch.is_empty() {
            return;
        }
        self.world.flushes.update(|flushes| flushes + 1);
        self.deferred.borrow_mut().push(deferred);
        batch.drain(..).for_each(|at| self.world.set_large(at, true));
    }

    fn report(&self, what: String) {
        self.world.mapper.machine().report(Rule::Program, what);
    }

    /// The host has given the page, which takes it as long as there is to be zeroed.
    fn map(&self, at: Ipa, access: Access) -> Handled {
        let cpu = self.world.cpu();
        cpu.spend(self.world.give(at.get()));
        let first = self.world.host(at.get() & !(self.page - 1));
        let mut gather = self.gathers[cpu.id()].borrow_mut();
        let handled = loop {
            let Ok(request) = self.guest.request(&Fault::new(at, access)) else {
                break Handled::Again;
            };
            let page = Backing::new(first, self.page);
            match gather.map(&request, &page) {
                Err(Refused::NeedsTables(count)) => {
                    if !gather.top_up(count) {
                        break Handled::Lost;
                    }
                }
                Ok(_) => {
                    if request.is_logged_write() {
                        self.mark(&request, at);
                    }
                    // Where writes are logged, leaves are pages.
                    let large = self.page > leaf_bytes(Level::PAGE);
                    let logged = request.slot().log.is_on();
                    self.world.set_large(at.get(), large && !logged);
                    break Handled::Done;
                }
                Err(_) => break Handled::Again,
            }
        };
        if !gather.is_clean() {
            self.finish(&mut gather);
        }
        handled
    }

    /// Marks a write to `at`, if writes to its slot are logged.
    pub fn mark_write(&self, at: Ipa) {
        match self.guest.request(&Fault::new(at, Access::Write)) {
            Ok(request) if request.is_logged_write() => self.mark(&request, at),
            Ok(_) => {}
            Err(_) => self.report(format!("no slot for {:#x}", at.get())),
        }
    }

    fn mark(&self, request: &Request, at: Ipa) {
        let slot = request.slot();
        let bitmap = &self.bitmaps[usize::from(slot.id)];
        self.guest.mark(&Marker::Bitmap(bitmap), &slot, at);
    }
}

impl<F: Format<Input = Ipa>> Way for Engine<'_, '_, '_, '_, F> {
    fn disable(&self) {
        let mut gather = self.guest.gather();
        let mut batch = Vec::with_capacity(BATCH);
        // Those below a leaf of this level: one, or one and 512.
        let height = u32::from(self.world.leaf.height());
        let tables = (512u64.pow(height) - 1) / 511;
        for at in self.world.parts() {
            let fault = Fault::new(Ipa::new(at), Access::Read);
            let page = Backing::new(self.world.host(at), self.page);
            loop {
                let Ok(request) = self.guest.request(&fault) else {
                    return self.report(format!("no slot for {at:#x}"));
                };
                let collapsed = self.world.work(|| {
                    (0..tables).for_each(|_| self.world.fetch_table());
                    gather.collapse(&request, &page)
                });
                match collapsed {
                    Ok(true) => batch.push(at),
                    Ok(false) => {}
                    Err(Refused::Busy(_) | Refused::Retry) => {
                        self.look_away();
                        continue;
                    }
                    Err(refused) => self.report(refused.to_string()),
                }
                break;
            }
            if batch.len() == BATCH {
                self.forget(&mut gather, &mut batch);
            }
        }
        self.forget(&mut gather, &mut batch);
    }

    fn reclaim(&self) {
        let deferred = self.deferred.take();
        self.world
            .work(|| deferred.into_iter().for_each(|deferred| self.finish_deferred(deferred)));
    }

    fn fault(&self, at: u64, write: bool) -> Handled {
        let (at, access) = (Ipa::new(at), access(write));
        let Ok(request) = self.guest.request(&Fault::new(at, access)) else {
            return Handled::Again;
        };
        match self.guest.reopen(&request) {
            Ok(true) => {
                if request.is_logged_write() {
                    self.mark(&request, at);
                }
                Handled::Done
            }
            Ok(false) => self.map(at, access),
            Err(_) => Handled::Again,
        }
    }
}

//! The tables of the program, built and taken down by the engine on the machine.
//!
//! A page of the file is mapped by the first touch, in a table of its part. Unmapping the part
//! takes both away in one [gather](tablewright::AddressSpace::gather), whose flush is that of the
//! run; page and table are given back when it is complete, and the machine looks whether a vCPU may
//! still come to them.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;

use tablewright::shootdown::{Batch, PerCpu};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Entry, Format, Hooks, Invalidation, Level, Mapping, Pa,
    Platform, Span, TableLink, Va,
};
use tablewright_machine::Time;

use super::host::{Doing, Host};
use super::job::Job;

/// Has the other vCPUs forget what was unmapped of a part, which is mapped at this address.
pub type Tell<'t> = dyn Fn(&Job, &Doing<'_, '_>, PerCpu<'_, '_>, u64, &Invalidation<'_>) + 't;

/// A program's space, as its platform knows it.
struct Link<'j> {
    job: &'j Job,
    host: &'j Host<'j>,
    tell: &'j Tell<'j>,
    batch: RefCell<Batch>,
    /// The part that is being unmapped.
    part: Cell<u64>,
}

/// The platform of the program's space: that of the machine, but for its flushes.
#[derive(Clone)]
struct Guest<'j>(Rc<Link<'j>>);

/// The program's space, which several vCPUs edit one after the other.
pub struct Tables<'j, F: Format<Input = Va>> {
    link: Rc<Link<'j>>,
    space: RefCell<AddressSpace<F, Guest<'j>>>,
    /// A vCPU edits it.
    locked: Cell<bool>,
}

impl<'j, F: Format<Input = Va>> Tables<'j, F> {
    /// Without a page. `None` if there is no memory for a root.
    pub fn new(job: &'j Job, host: &'j Host<'j>, tell: &'j Tell<'j>) -> Option<Self> {
        let link = Rc::new(Link { job, host, tell, batch: RefCell::default(), part: Cell::new(0) });
        let mut space = AddressSpace::new(Guest(Rc::clone(&link)))?;
        host.set_root(space.root());
        space.make_live();
        Some(Self { link, space: RefCell::new(space), locked: Cell::new(false) })
    }

    /// The first access to a part, which faults and has its page mapped.
    pub fn touch(&self, at: u64) {
        let host = self.link.host;
        let machine = host.machine;
        if machine.read(at).is_ok() {
            return host.fail(format!("{at:#x} is remembered, and was unmapped"));
        }
        let Some((page, span)) = machine.take_page().zip(span(at, 1)) else {
            return host.fail("no memory for a page".to_owned());
        };
        self.edit(|space| {
            let mapped = space.map(span, page, Mapping::new(Attrs::USER_DATA).pages_only());
            if let Err(error) = mapped {
                host.fail(error.to_string());
            }
        });
        if let Err(fault) = machine.read(at) {
            host.fail(format!("{at:#x} was mapped: {fault:?}"));
        }
    }

    /// A part goes, its page and its tables when every vCPU has forgotten them.
    pub fn unmap(&self, at: u64) {
        let Link { job, host, .. } = *self.link;
        let Some(span) = span(at, job.pages) else {
            return host.fail(format!("{at:#x} is no address of the program"));
        };
        self.link.part.set(at);
        self.edit(|space| {
            let (mut held, mut leaves) = (Vec::new(), Vec::new());
            let mut gather = space.gather();
            let unmapped = gather.unmap(span, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            if let Err(error) = unmapped {
                host.fail(error.to_string());
            }
            let completed = gather.issue().complete();
            let released = held.into_iter().map(|leaf| completed.release(leaf));
            leaves.extend(released.flatten());
            completed.finish(|leaf| leaves.push(leaf));
            leaves.iter().for_each(|leaf| host.machine.give_page(leaf.frame()));
        });
    }

    /// Edits under the lock of the tables, which is held for as long as that takes.
    fn edit(&self, edit: impl FnOnce(&mut AddressSpace<F, Guest<'j>>)) {
        let host = self.link.host;
        let cpu = host.machine.cpu();
        cpu.order();
        while self.locked.replace(true) {
            host.work(cpu, Time::ns(100));
            cpu.order();
        }
        edit(&mut self.space.borrow_mut());
        cpu.order();
        self.locked.set(false);
    }
}

fn span(at: u64, pages: u64) -> Option<Span<Va>> {
    Span::new(Va::new(at), pages << 12).ok()
}

// SAFETY: all but two functions pass on to the machine; a completion returns when all vCPUs that
// have the space loaded have forgotten, and the others will before they use it (5., 6.); a clone is
// of the same space (7.).
unsafe impl Platform for Guest<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.0.host.mapper.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.host.mapper.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.host.mapper.table(frame, level) }
    }
    fn caps(&self) -> Caps {
        self.0.host.mapper.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.0.host.mapper.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.0.host.mapper.hooks()
    }

    fn barrier(&self, barrier: Barrier) {
        let Link { job, host, .. } = *self.0;
        if barrier == Barrier::Publish {
            return host.mapper.barrier(barrier);
        }
        let batch = self.0.batch.borrow_mut().take();
        let Some(space) = host.space() else { return };
        let unmapped = batch.flush(space.root(), 0);
        host.flush(|doing, here| (self.0.tell)(job, doing, here, self.0.part.get(), &unmapped));
        let id = space.identity().id();
        host.mapper.claim_complete(&batch.flush(space.root(), id));
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.batch.borrow_mut().add(what);
    }
}

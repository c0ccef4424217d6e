//! The engine of this project: attributes encoded once, a call for each range, and one gather for
//! all calls; for one page its calls for one page.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::flush::Completed;
use tablewright::{
    AddressSpace, Attrs, Change, Encoded, Format, Gather, Leaf, Mapping, Pa, Perms, Span,
    TableLink, Va,
};

use crate::compare::calls::{Calls, PAGE, answer, physical};
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;
use crate::memory::platform::Lean;

/// A space, and the side memory of its tables, which is kept from cycle to cycle.
pub struct Tablewright<F: Format<Input = Va>> {
    links: Rc<[TableLink]>,
    edited: Option<Edited<F>>,
}

impl<F: Format<Input = Va>> Default for Tablewright<F> {
    fn default() -> Self {
        Self { links: Rc::new([]), edited: None }
    }
}

struct Edited<F: Format<Input = Va>> {
    space: AddressSpace<F, Lean>,
    page: Encoded<F>,
    /// Detached, not yet reclaimed.
    pending: Option<Completed<F, Lean>>,
}

/// The range of the call that starts at an address.
#[inline(always)]
fn span(start: u64, bytes: u64) -> Result<Span<Va>, String> {
    Span::new(Va::new(start), bytes).map_err(|error| error.to_string())
}

/// The line that an error is.
fn line(error: impl ToString) -> String {
    error.to_string()
}

impl<F: Format<Input = Va>> Edited<F> {
    // Each of the operations is a function of its own, as it is in a kernel.

    /// Calls `edit` for each range with a gather that all of them share, and finishes it.
    #[inline(always)]
    fn each(
        &mut self,
        calls: &Calls,
        mut edit: impl FnMut(&mut Gather<'_, F, Lean>, u64, Encoded<F>) -> Result<(), String>,
    ) -> Result<(), String> {
        let page = self.page;
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            edit(&mut gather, start, page)?;
        }
        gather.finish(|_| ());
        Ok(())
    }

    #[inline(never)]
    fn map_pages(&mut self, calls: &Calls) -> Result<(), String> {
        self.each(calls, |gather, at, page| {
            let frame = Pa::new(physical(at));
            gather.map_page(Va::new(at), frame, page).map_err(line)
        })
    }

    #[inline(never)]
    fn protect_pages(&mut self, calls: &Calls) -> Result<(), String> {
        let change = Change::new().perms(Perms::READ);
        self.each(calls, |gather, at, _| gather.protect_page(Va::new(at), change).map_err(line))
    }

    #[inline(never)]
    fn unmap_pages(&mut self, calls: &Calls) -> Result<(), String> {
        let mut leaves = 0;
        self.each(calls, |gather, at, _| {
            leaves += usize::from(gather.unmap_page(Va::new(at)).map_err(line)?.is_some());
            Ok(())
        })?;
        match leaves == calls.count() {
            true => Ok(()),
            false => Err("fewer leaves than were mapped".to_owned()),
        }
    }

    #[inline(never)]
    fn query_pages(&self, calls: &Calls) -> Result<u64, String> {
        let mut sum = 0_u64;
        for &start in &calls.starts {
            if let Some(leaf) = self.space.query(Va::new(start)) {
                sum = sum.wrapping_add(seen(&leaf));
            }
        }
        Ok(sum)
    }

    #[inline(never)]
    fn map(&mut self, calls: &Calls) -> Result<(), String> {
        let bytes = calls.bytes();
        self.each(calls, |gather, start, page| {
            let frame = Pa::new(physical(start));
            gather.map(span(start, bytes)?, frame, page).map_err(line)
        })
    }

    #[inline(never)]
    fn protect(&mut self, calls: &Calls) -> Result<(), String> {
        let change = Change::new().perms(Perms::READ);
        let bytes = calls.bytes();
        self.each(calls, |gather, start, _| {
            gather.protect(span(start, bytes)?, change).map_err(line)
        })
    }

    #[inline(never)]
    fn unmap(&mut self, calls: &Calls) -> Result<(), String> {
        match self.unmap_and_sum(calls, |_| 1)? == calls.entries() {
            true => Ok(()),
            false => Err("visited fewer leaves than were mapped, or more".to_owned()),
        }
    }

    /// Visits every leaf, as for its frame to be freed. A single sum goes through a line of entries
    /// in registers; a counter beside it would go through memory for each leaf.
    #[inline(never)]
    fn unmap_range(&mut self, calls: &Calls) -> Result<(), String> {
        let pages = u128::from(calls.pages);
        let steps = pages * (pages - 1) / 2 * u128::from(PAGE);
        let frames = |start: &u64| (pages * u128::from(physical(*start)) + steps) as u64;
        let all = calls.starts.iter().map(frames).fold(0, u64::wrapping_add);
        match black_box(self.unmap_and_sum(calls, |leaf| leaf.frame().get())?) == all {
            true => Ok(()),
            false => Err(format!("visited fewer leaves than {pages}, or others")),
        }
    }

    /// Unmaps all ranges. Returns the sum of `weigh` over leaves of detached tables, and one for
    /// each leaf of a table that stays.
    #[inline(always)]
    fn unmap_and_sum(
        &mut self,
        calls: &Calls,
        weigh: impl Fn(Leaf<F>) -> u64,
    ) -> Result<u64, String> {
        let bytes = calls.bytes();
        let mut leaves = 0_u64;
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            let progress = gather
                .unmap(span(start, bytes)?, |_| {
                    leaves += 1;
                    ControlFlow::Continue(())
                })
                .map_err(line)?;
            if !progress.is_done() {
                return Err("stopped half-way".to_owned());
            }
        }
        let mut below = 0_u64;
        gather.finish(|leaf| below = below.wrapping_add(weigh(leaf)));
        Ok(leaves.wrapping_add(below))
    }

    fn detach(&mut self, calls: &Calls) -> Result<(), String> {
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            let progress = gather
                .unmap(span(start, calls.bytes())?, |_| ControlFlow::Break(()))
                .map_err(line)?;
            if !progress.is_done() {
                return Err("stopped half-way".to_owned());
            }
        }
        self.pending = Some(gather.issue().complete());
        Ok(())
    }

    #[inline(never)]
    fn query(&self, calls: &Calls) -> Result<u64, String> {
        let mut sum = 0_u64;
        let bytes = calls.bytes();
        for &start in &calls.starts {
            self.space
                .walk(span(start, bytes)?, |leaf| {
                    sum = sum.wrapping_add(seen(&leaf));
                    ControlFlow::Continue(())
                })
                .map_err(line)?;
        }
        Ok(sum)
    }
}

impl<F: Format<Input = Va>> Subject for Tablewright<F> {
    fn begin(&mut self, arena: Arena, users: Users, _: &Calls) -> Result<(), String> {
        if self.links.len() != arena.frames() {
            self.links = (0..arena.frames()).map(|_| TableLink::new()).collect();
        }
        // A page that is neither accessed nor dirty may be written by a walker at any time.
        let (caps, marked) = match users {
            Users::None | Users::Walkers => (Lean::READING, true),
            Users::WritingWalkers => (Lean::WRITING, false),
        };
        let attrs = Attrs { accessed: marked, dirty: marked, ..Attrs::KERNEL_DATA };
        let platform = Lean::new(arena, caps).with_links(self.links.clone());
        self.edited = Some(Edited {
            space: AddressSpace::new(platform).ok_or("out of tables")?,
            page: Encoded::new(Mapping::new(attrs).pages_only())
                .map_err(|error| error.0.to_owned())?,
            pending: None,
        });
        Ok(())
    }

    fn go_live(&mut self) {
        if let Some(edited) = &mut self.edited {
            edited.space.make_live();
        }
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let edited = self.edited.as_mut().ok_or("not begun")?;
        match (operation, calls.pages) {
            (Operation::Map, 1) => edited.map_pages(calls)?,
            (Operation::Map, _) => edited.map(calls)?,
            (Operation::Protect, 1) => edited.protect_pages(calls)?,
            (Operation::Protect, _) => edited.protect(calls)?,
            (Operation::Unmap, 1) => edited.unmap_pages(calls)?,
            (Operation::Unmap, _) if calls.count() == 1 => edited.unmap_range(calls)?,
            (Operation::Unmap, _) => edited.unmap(calls)?,
            (Operation::Detach, _) => edited.detach(calls)?,
            (Operation::Query, 1) => return edited.query_pages(calls),
            (Operation::Query, _) => return edited.query(calls),
            _ => return Err(none()),
        }
        Ok(0)
    }

    fn root(&self) -> Option<u64> {
        Some(self.edited.as_ref()?.space.root().get())
    }

    fn finish(&mut self) {
        let Some(mut edited) = self.edited.take() else {
            return;
        };
        if let Some(completed) = edited.pending.take() {
            completed.finish(|_| ());
        }
        // SAFETY: no processor ever has the root of these tables loaded.
        unsafe { edited.space.make_dead() };
        // A dead space is always destroyed; the arena would miss its tables otherwise.
        let _destroyed = edited.space.destroy(|_| ());
    }
}

/// The answer to a query.
#[inline(always)]
fn seen<F: Format>(leaf: &Leaf<F>) -> u64 {
    let writable = leaf.attrs().perms.contains(Perms::WRITE);
    answer(leaf.frame().get(), writable)
}

const _: () = assert!(PAGE == 4096, "the formats here have 4 KiB pages");

//! Our own engine: attributes encoded once, a call for each range, and one gather for all calls;
//! for one page its calls for one page.

use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::{
    AddressSpace, Attrs, Change, EditError, Encoded, Format, Gather, Leaf, Mapping, Pa, Perms,
    Span, TableLink, Va,
};

use super::super::subject::Work;
use super::calls::{Calls, answer, physical};
use super::subject::{Operation, Subject};
use crate::arena::Arena;
use crate::platform::Lean;

/// A live space, and the side memory of its tables.
pub struct Tablewright<F: Format<Input = Va>> {
    hardware_flags: bool,
    links: Rc<[TableLink]>,
    edited: Option<Edited<F>>,
}

struct Edited<F: Format<Input = Va>> {
    space: AddressSpace<F, Lean>,
    page: Encoded<F>,
}

impl<F: Format<Input = Va>> Tablewright<F> {
    /// Where hardware sets flags, what is mapped is neither accessed nor dirty, so that it may set
    /// them at any time.
    pub fn new(hardware_flags: bool) -> Self {
        Self {
            hardware_flags,
            links: Rc::new([]),
            edited: None,
        }
    }
}

impl<F: Format<Input = Va>> Edited<F> {
    // Each of the operations is a function of its own, as it is in a kernel.

    /// Calls `edit` for each range with a gather that all of them share, which it then finishes.
    #[inline(always)]
    fn each(
        &mut self,
        calls: &Calls,
        mut edit: impl FnMut(
            &mut Gather<'_, F, Lean>,
            Span<Va>,
            Encoded<F>,
        ) -> Result<(), EditError<Va>>,
    ) -> Result<(), String> {
        let bytes = calls.bytes();
        let page = self.page;
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            let span = Span::new(Va::new(start), bytes).map_err(|error| error.to_string())?;
            edit(&mut gather, span, page).map_err(|error| error.to_string())?;
        }
        gather.finish(|_| ());
        Ok(())
    }

    /// As [`each`](Self::each), of single pages.
    #[inline(always)]
    fn each_page(
        &mut self,
        calls: &Calls,
        mut edit: impl FnMut(&mut Gather<'_, F, Lean>, Va, Encoded<F>) -> Result<(), EditError<Va>>,
    ) -> Result<(), String> {
        let page = self.page;
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            edit(&mut gather, Va::new(start), page).map_err(|error| error.to_string())?;
        }
        gather.finish(|_| ());
        Ok(())
    }

    #[inline(never)]
    fn map_pages(&mut self, calls: &Calls) -> Result<(), String> {
        self.each_page(calls, |gather, at, page| {
            gather.map_page(at, Pa::new(physical(at.get())), page)
        })
    }

    #[inline(never)]
    fn protect_pages(&mut self, calls: &Calls) -> Result<(), String> {
        let change = Change::new().perms(Perms::READ);
        self.each_page(calls, |gather, at, _| gather.protect_page(at, change))
    }

    #[inline(never)]
    fn unmap_pages(&mut self, calls: &Calls) -> Result<(), String> {
        let mut leaves = 0;
        self.each_page(calls, |gather, at, _| {
            leaves += usize::from(gather.unmap_page(at)?.is_some());
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
        self.each(calls, |gather, span, page| {
            gather.map(span, Pa::new(physical(span.start().get())), page)
        })
    }

    #[inline(never)]
    fn protect(&mut self, calls: &Calls) -> Result<(), String> {
        let change = Change::new().perms(Perms::READ);
        self.each(calls, |gather, span, _| gather.protect(span, change))
    }

    #[inline(never)]
    fn unmap(&mut self, calls: &Calls) -> Result<(), String> {
        let bytes = calls.bytes();
        let mut leaves = 0_u64;
        let mut gather = self.space.gather();
        for &start in &calls.starts {
            let span = Span::new(Va::new(start), bytes).map_err(|error| error.to_string())?;
            let progress = gather
                .unmap(span, |_| {
                    leaves += 1;
                    ControlFlow::Continue(())
                })
                .map_err(|error| error.to_string())?;
            if !progress.is_done() {
                return Err("stopped half-way".to_owned());
            }
        }
        let mut below = 0_u64;
        gather.finish(|_| below += 1);
        if leaves + below == calls.count() as u64 * calls.pages {
            Ok(())
        } else {
            Err("visited fewer leaves than were mapped, or more".to_owned())
        }
    }

    #[inline(never)]
    fn query(&self, calls: &Calls) -> Result<u64, String> {
        let mut sum = 0_u64;
        let bytes = calls.bytes();
        for &start in &calls.starts {
            let span = Span::new(Va::new(start), bytes).map_err(|error| error.to_string())?;
            self.space
                .walk(span, |leaf| {
                    sum = sum.wrapping_add(seen(&leaf));
                    ControlFlow::Continue(())
                })
                .map_err(|error| error.to_string())?;
        }
        Ok(sum)
    }
}

impl<F: Format<Input = Va>> Subject for Tablewright<F> {
    fn begin(&mut self, arena: Arena) -> Result<(), String> {
        if self.links.len() != arena.frames() {
            self.links = (0..arena.frames()).map(|_| TableLink::new()).collect();
        }
        let caps = if self.hardware_flags {
            Lean::WRITING
        } else {
            Lean::READING
        };
        let attrs = Attrs {
            accessed: !self.hardware_flags,
            dirty: !self.hardware_flags,
            ..Attrs::KERNEL_DATA
        };
        let platform = Lean::new(arena, caps).with_links(self.links.clone());
        self.edited = Some(Edited {
            space: AddressSpace::new(platform).ok_or("out of tables")?,
            page: Encoded::new(Mapping::new(attrs).pages_only())
                .map_err(|error| error.0.to_owned())?,
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
            (Operation::Unmap, _) => edited.unmap(calls)?,
            (Operation::Query, 1) => return edited.query_pages(calls),
            (Operation::Query, _) => return edited.query(calls),
            (Operation::Fault | Operation::Exchange, _) => return Err("is not for this".to_owned()),
        }
        Ok(0)
    }

    fn root(&self) -> Option<u64> {
        Some(self.edited.as_ref()?.space.root().get())
    }

    fn finish(&mut self) {
        if let Some(mut edited) = self.edited.take() {
            // SAFETY: no processor ever has the root of these tables loaded.
            unsafe { edited.space.make_dead() };
            // A dead space is always destroyed; the arena would miss its tables otherwise.
            let _destroyed = edited.space.destroy(|_| ());
        }
    }
}

/// What a query has found.
#[inline(always)]
fn seen<F: Format>(leaf: &Leaf<F>) -> u64 {
    let writable = leaf.attrs().perms.contains(Perms::WRITE);
    answer(leaf.frame().get(), writable)
}

const _: () = assert!(
    Work::PAGE == 4096,
    "formats of the engine are those of 4 KiB pages"
);

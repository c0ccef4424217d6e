//! Our own engine: one call for the whole range, whoever uses the tables.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::format::X86_64;
use tablewright::{AddressSpace, Attrs, Change, Flush, Mapping, Pa, Perms, Span, TableLink, Va};

use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;
use crate::platform::Lean;

/// Four levels, as the other crates have.
type Format = X86_64<4>;

/// A space, and the side memory of its tables, which is kept from cycle to cycle.
#[derive(Default)]
pub struct Tablewright {
    links: Rc<[TableLink]>,
    edited: Option<Edited>,
}

struct Edited {
    space: AddressSpace<Format, Lean>,
    span: Span<Va>,
    work: Work,
    attrs: Attrs,
    users: Users,
    /// What was detached and is not settled yet.
    pending: Option<Flush<Format, Lean>>,
}

impl Tablewright {
    fn edited(&mut self) -> Result<&mut Edited, String> {
        self.edited.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Edited {
    /// Cuts the range off, and gathers it in a flush.
    fn detach(&mut self) -> Result<Flush<Format, Lean>, String> {
        let mut flush = self.space.flush();
        let progress = self
            .space
            .unmap(self.span, &mut flush, |_| ControlFlow::Break(()))
            .map_err(|error| error.to_string())?;
        if progress.is_done() {
            Ok(flush)
        } else {
            Err("stopped half-way".to_owned())
        }
    }

    /// Visits every leaf of what was cut off, as somebody would who frees the frames, and frees the tables.
    ///
    /// The visitor keeps a single sum: it goes through a line of entries in registers, where two counters beside each
    /// other would go through memory for each leaf. The sum also tells whether any leaf was left out.
    fn settle(&self, flush: Flush<Format, Lean>) -> Result<(), String> {
        let mut frames = 0_u64;
        flush.finish(|leaf| frames = frames.wrapping_add(leaf.frame().get()));
        let entries = self.work.entries();
        // The sum of an arithmetic progression, modulo 2 to the 64 like the sum over the leaves.
        let count = u128::from(entries);
        let steps = count * (count - 1) / 2;
        let all = (count * u128::from(Work::PHYSICAL) + steps * u128::from(Work::PAGE)) as u64;
        if black_box(frames) == all {
            Ok(())
        } else {
            Err(format!("visited fewer leaves than {entries}, or others"))
        }
    }
}

impl Subject for Tablewright {
    fn encoding(&self) -> Encoding {
        Encoding::X86_64
    }

    fn courses(&self) -> &'static [Course] {
        const UNMAP: Course = Course {
            users: Users::Nobody,
            operation: Operation::Unmap,
            method: "unmap, finish",
        };
        &[
            UNMAP,
            Course {
                operation: Operation::Detach,
                method: "unmap",
                ..UNMAP
            },
            Course {
                users: Users::Walkers,
                ..UNMAP
            },
            Course {
                users: Users::WritingWalkers,
                ..UNMAP
            },
        ]
    }

    fn begin(&mut self, arena: Arena, work: Work, users: Users) -> Result<(), String> {
        if self.links.len() != arena.frames() {
            self.links = (0..arena.frames()).map(|_| TableLink::new()).collect();
        }
        let caps = match users {
            Users::Nobody | Users::Walkers => Lean::QUIET,
            Users::WritingWalkers => Lean::WRITING,
        };
        // What is neither accessed nor dirty may be written by a walker at any moment, before and after the change.
        let settled = users != Users::WritingWalkers;
        let platform = Lean::new(arena, caps).with_links(self.links.clone());
        self.edited = Some(Edited {
            space: AddressSpace::new(platform).ok_or("out of tables")?,
            span: Span::new(Va::new(Work::VIRTUAL), work.bytes)
                .map_err(|error| error.to_string())?,
            work,
            attrs: Attrs {
                accessed: settled,
                dirty: settled,
                ..Attrs::KERNEL_DATA
            },
            users,
            pending: None,
        });
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let edited = self.edited()?;
        let mut flush = edited.space.flush();
        edited
            .space
            .map(
                edited.span,
                Pa::new(Work::PHYSICAL),
                Mapping::new(edited.attrs).pages_only(),
                &mut flush,
            )
            .map_err(|error| error.to_string())?;
        flush.finish(|_| ());
        if edited.users != Users::Nobody {
            edited.space.make_live();
        }
        Ok(())
    }

    fn protect(&mut self) -> Result<(), String> {
        let edited = self.edited()?;
        let mut flush = edited.space.flush();
        edited
            .space
            .protect(edited.span, Change::new().perms(Perms::READ), &mut flush)
            .map_err(|error| error.to_string())?;
        flush.finish(|_| ());
        Ok(())
    }

    fn end(&mut self, course: Course) -> Result<(), String> {
        let edited = self.edited()?;
        let flush = edited.detach()?;
        if course.operation == Operation::Detach {
            edited.pending = Some(flush);
            return Ok(());
        }
        edited.settle(flush)
    }

    fn query(&self, virtual_address: u64) -> Option<Leaf> {
        let leaf = self
            .edited
            .as_ref()?
            .space
            .query(Va::new(virtual_address))?;
        Some(Leaf {
            physical: leaf.frame().get(),
            writable: leaf.attrs().perms.contains(Perms::WRITE),
        })
    }

    fn root(&self) -> Option<u64> {
        Some(self.edited.as_ref()?.space.root().get())
    }

    fn finish(&mut self) {
        let Some(mut edited) = self.edited.take() else {
            return;
        };
        if let Some(flush) = edited.pending.take() {
            flush.finish(|_| ());
        }
        // SAFETY: no processor ever has the root of these tables loaded.
        unsafe { edited.space.make_dead() };
        // A dead space is always destroyed; the arena would miss its tables otherwise.
        let _destroyed = edited.space.destroy(|_| ());
    }
}

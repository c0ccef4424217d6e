//! Our own engine: one call for the whole range, whatever uses the tables.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::flush::Completed;
use tablewright::format::X86_64;
use tablewright::{AddressSpace, Attrs, Change, Mapping, Pa, Perms, Span, TableLink, Va};

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
    /// What was detached and is not reclaimed yet.
    pending: Option<Completed<Format, Lean>>,
}

impl Tablewright {
    fn edited(&mut self) -> Result<&mut Edited, String> {
        self.edited.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

/// The sum of the addresses of all frames, modulo 2 to the 64, as of an arithmetic progression.
fn all(work: Work) -> u64 {
    let count = u128::from(work.entries());
    let steps = count * (count - 1) / 2;
    (count * u128::from(Work::PHYSICAL) + steps * u128::from(Work::PAGE)) as u64
}

impl Subject for Tablewright {
    fn encoding(&self) -> Encoding {
        Encoding::X86_64
    }

    fn courses(&self) -> &'static [Course] {
        const UNMAP: Course = Course {
            users: Users::None,
            operation: Operation::Unmap,
            method: "unmap, finish",
        };
        &[
            UNMAP,
            Course {
                operation: Operation::Detach,
                method: "unmap, issue",
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
            Users::None | Users::Walkers => Lean::READING,
            Users::WritingWalkers => Lean::WRITING,
        };
        // What is neither accessed nor dirty may be written by a walker at any time, before and
        // after the change.
        let marked = users != Users::WritingWalkers;
        let platform = Lean::new(arena, caps).with_links(self.links.clone());
        self.edited = Some(Edited {
            space: AddressSpace::new(platform).ok_or("out of tables")?,
            span: Span::new(Va::new(Work::VIRTUAL), work.bytes)
                .map_err(|error| error.to_string())?,
            work,
            attrs: Attrs {
                accessed: marked,
                dirty: marked,
                ..Attrs::KERNEL_DATA
            },
            users,
            pending: None,
        });
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let edited = self.edited()?;
        let mapping = Mapping::new(edited.attrs).pages_only();
        edited
            .space
            .map(edited.span, Pa::new(Work::PHYSICAL), mapping)
            .map_err(|error| error.to_string())?;
        if edited.users != Users::None {
            edited.space.make_live();
        }
        Ok(())
    }

    fn protect(&mut self) -> Result<(), String> {
        let edited = self.edited()?;
        let mut gather = edited.space.gather();
        gather
            .protect(edited.span, Change::new().perms(Perms::READ))
            .map_err(|error| error.to_string())?;
        gather.finish(|_| ());
        Ok(())
    }

    fn end(&mut self, course: Course) -> Result<(), String> {
        let edited = self.edited()?;
        let mut gather = edited.space.gather();
        let progress = gather
            .unmap(edited.span, |_| ControlFlow::Break(()))
            .map_err(|error| error.to_string())?;
        if !progress.is_done() {
            return Err("stopped half-way".to_owned());
        }
        if course.operation == Operation::Detach {
            edited.pending = Some(gather.issue().complete());
            return Ok(());
        }
        // Every leaf of what was detached is visited, as where the frames are to be freed. The
        // visitor keeps a single sum: it goes through a line of entries in registers, where two
        // counters beside each other would go through memory for each leaf. The sum also tells
        // whether any leaf was left out.
        let mut frames = 0_u64;
        gather.finish(|leaf| frames = frames.wrapping_add(leaf.frame().get()));
        if black_box(frames) == all(edited.work) {
            Ok(())
        } else {
            let entries = edited.work.entries();
            Err(format!("visited fewer leaves than {entries}, or others"))
        }
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
        if let Some(completed) = edited.pending.take() {
            completed.finish(|_| ());
        }
        // SAFETY: no processor ever has the root of these tables loaded.
        unsafe { edited.space.make_dead() };
        // A dead space is always destroyed; the arena would miss its tables otherwise.
        let _destroyed = edited.space.destroy(|_| ());
    }
}

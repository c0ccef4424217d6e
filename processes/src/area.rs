//! The areas of a process: what it has asked for, whether or not it is mapped.

use alloc::vec::Vec;

use tablewright::{Span, Va};

/// The contents of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The program: mapped when the process is made, and the same frames in a child.
    Text,
    /// Memory of the process, made when it is first used.
    Anonymous {
        /// It may be written.
        writable: bool,
    },
}

/// A range of addresses, and what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub span: Span<Va>,
    pub kind: Kind,
}

/// Those of a process. They do not overlap.
#[derive(Debug, Default)]
pub struct Areas(Vec<Area>);

/// The addresses from `first` to before `end`, if there are any.
fn between(first: u64, end: u64) -> Option<Span<Va>> {
    Span::new(Va::new(first), end.checked_sub(first)?).ok()
}

fn end(span: Span<Va>) -> u64 {
    // A span of the lower half does not reach the top of all addresses.
    span.last().get() + 1
}

impl Areas {
    pub fn iter(&self) -> impl Iterator<Item = &Area> {
        self.0.iter()
    }

    /// The one that an address lies in.
    pub fn at(&self, at: Va) -> Option<&Area> {
        self.0.iter().find(|area| area.span.contains(at))
    }

    /// Adds one. Whether there was room.
    #[must_use]
    pub fn add(&mut self, area: Area) -> bool {
        let free = self.iter().all(|other| other.span.intersect(area.span).is_none());
        if free {
            self.0.push(area);
        }
        free
    }

    /// The first address of a range that is in no anonymous area.
    pub fn missing(&self, span: Span<Va>) -> Option<Va> {
        let mut at = span.start();
        while at <= span.last() {
            match self.at(at) {
                Some(area) if matches!(area.kind, Kind::Anonymous { .. }) => {
                    at = Va::new(end(area.span));
                }
                _ => return Some(at),
            }
        }
        None
    }

    /// Says of a range, all of it anonymous, whether it may be written. Areas that reach over an
    /// end of it become two.
    pub fn set_writable(&mut self, span: Span<Va>, writable: bool) {
        let mut new = Vec::with_capacity(self.0.len() + 2);
        for area in self.0.drain(..) {
            let Some(part) = area.span.intersect(span) else {
                new.push(area);
                continue;
            };
            let kind = Kind::Anonymous { writable };
            let before = between(area.span.start().get(), part.start().get());
            let after = between(end(part), end(area.span));
            new.extend(before.map(|span| Area { span, ..area }));
            new.push(Area { span: part, kind });
            new.extend(after.map(|span| Area { span, ..area }));
        }
        self.0 = new;
    }
}

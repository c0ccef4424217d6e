//! The walk, common to all formats: read an entry, decode it, go down or report.
//!
//! A format supplies its shape, its decoder and, where it has runs of contiguous entries, their
//! rule. Everything is generic over the format and recursion happens once per table, so that the
//! loop over a last-level table compiles to the loads, the decoding that the visitor looks at, and
//! nothing else.

use crate::regime::Shape;
use crate::{Denied, Descriptor, Fault, Half, Leaf, Malformed, ReadTable, Table};
use core::ops::{ControlFlow, Range};

/// A descriptor format.
pub(crate) trait Format: Copy {
    fn shape(&self) -> Shape;

    /// Decodes `descriptor` of a table at `depth`. It translates addresses from `va` on; `denied`
    /// unites what the tables above it deny.
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor;

    /// A leaf as an access leaves it, where hardware manages the access flag.
    fn used(&self, leaf: u64) -> u64;

    /// A table descriptor as a walk leaves it, where hardware manages the access flag.
    fn table_used(&self, table: u64) -> u64;

    /// A leaf as a write leaves it, where hardware manages the dirty state; but for the access
    /// flag.
    fn written(&self, leaf: u64) -> u64;

    /// Checks the entry `index` against the entry before it by the rule of contiguous runs. Both
    /// have been decoded without complaint; before the first entry of a table stands an invalid
    /// one, 0.
    fn check_run(
        &self,
        _depth: u32,
        _index: usize,
        _previous: u64,
        _descriptor: u64,
    ) -> Result<(), &'static str> {
        Ok(())
    }
}

fn malformed(level: i8, table: u64, index: usize, descriptor: u64, why: &'static str) -> Malformed {
    Malformed { level, table, index, descriptor, why }
}

/// The position of a walk: in front of the descriptor of `table` that `va` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) va: u64,
    pub(crate) table: u64,
    pub(crate) denied: Denied,
    pub(crate) depth: u32,
}

impl Position {
    #[inline(always)]
    pub(crate) fn root<F: Format>(format: F, root: u64, va: u64) -> Result<Self, Fault> {
        if !format.shape().is_canonical(va) {
            return Err(Fault::NonCanonical);
        }
        Ok(Self { va, table: root, denied: Denied::NONE, depth: format.shape().top })
    }

    #[inline(always)]
    pub(crate) const fn index(&self, shape: Shape) -> usize {
        (self.va >> shape.shift(self.depth)) as usize & (shape.entries(self.depth) - 1)
    }

    /// Takes the descriptor, and goes down when it points to a table.
    #[inline(always)]
    pub(crate) fn step<F: Format>(
        &mut self,
        format: F,
        descriptor: u64,
    ) -> Result<Option<Leaf>, Fault> {
        let shape = format.shape();
        let level = shape.level(self.depth);
        let first = shape.entry_start(self.depth, self.va);
        match format.decode(self.depth, first, self.denied, descriptor) {
            Descriptor::Leaf(leaf) => Ok(Some(leaf)),
            Descriptor::Table { pa, denied } => {
                self.table = pa;
                self.denied = self.denied.union(denied);
                self.depth -= 1;
                Ok(None)
            }
            Descriptor::Invalid => Err(Fault::NotMapped { level }),
            Descriptor::Reserved(why) => {
                let index = self.index(shape);
                Err(Fault::Reserved(malformed(level, self.table, index, descriptor, why)))
            }
        }
    }
}

pub(crate) fn translate<F: Format>(
    format: F,
    root: u64,
    va: u64,
    read: &mut impl ReadTable,
) -> Result<Leaf, Fault> {
    let mut position = Position::root(format, root, va)?;
    loop {
        let descriptor = read.read(position.table, position.index(format.shape()));
        if let Some(leaf) = position.step(format, descriptor)? {
            return Ok(leaf);
        }
    }
}

pub(crate) fn leaves<F: Format>(
    format: F,
    root: u64,
    half: Half,
    read: &mut impl ReadTable,
    visit: &mut impl FnMut(&Leaf) -> ControlFlow<()>,
) -> Result<(), Fault> {
    let shape = format.shape();
    let base = match half {
        Half::Lower => 0,
        Half::Upper => u64::MAX << shape.input_bits,
    };
    let place = Place { depth: shape.top, table: root, va: base, denied: Denied::NONE };
    leaves_of(format, place, format.shape().root_entries(half), read, visit).map(|_| ())
}

/// A table and how the walk came to it.
struct Place {
    depth: u32,
    table: u64,
    /// The address that entry 0 translates.
    va: u64,
    denied: Denied,
}

fn leaves_of<F: Format>(
    format: F,
    place: Place,
    entries: Range<usize>,
    read: &mut impl ReadTable,
    visit: &mut dyn FnMut(&Leaf) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, Fault> {
    let shape = format.shape();
    let Place { depth, table, va, denied } = place;
    let level = shape.level(depth);
    let shift = shape.shift(depth);
    let mut previous = 0;
    for index in entries {
        let descriptor = read.read(table, index);
        let va = va + ((index as u64) << shift);
        let entry = format.decode(depth, va, denied, descriptor);
        if let Descriptor::Reserved(why) = entry {
            return Err(Fault::Reserved(malformed(level, table, index, descriptor, why)));
        }
        if let Err(why) = format.check_run(depth, index, previous, descriptor) {
            return Err(Fault::BrokenRun(malformed(level, table, index, descriptor, why)));
        }
        previous = descriptor;
        let flow = match entry {
            Descriptor::Leaf(leaf) => visit(&leaf),
            Descriptor::Table { pa, denied: more } => {
                let below = Place { depth: depth - 1, table: pa, va, denied: denied.union(more) };
                leaves_of(format, below, 0..shape.entries(depth - 1), read, visit)?
            }
            Descriptor::Invalid | Descriptor::Reserved(_) => continue,
        };
        if flow.is_break() {
            return Ok(flow);
        }
    }
    Ok(ControlFlow::Continue(()))
}

pub(crate) fn tables<F: Format>(
    format: F,
    root: u64,
    read: &mut impl ReadTable,
    visit: &mut impl FnMut(Table) -> ControlFlow<()>,
) -> Result<(), Fault> {
    tables_of(format, format.shape().top, root, read, visit).map(|_| ())
}

fn tables_of<F: Format>(
    format: F,
    depth: u32,
    table: u64,
    read: &mut impl ReadTable,
    visit: &mut impl FnMut(Table) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, Fault> {
    let shape = format.shape();
    let level = shape.level(depth);
    let flow = visit(Table { level, pa: table });
    if flow.is_break() || depth == 0 {
        return Ok(flow);
    }
    for index in 0..shape.entries(depth) {
        let descriptor = read.read(table, index);
        match format.decode(depth, 0, Denied::NONE, descriptor) {
            Descriptor::Invalid | Descriptor::Leaf(_) => {}
            Descriptor::Reserved(why) => {
                return Err(Fault::Reserved(malformed(level, table, index, descriptor, why)));
            }
            Descriptor::Table { pa, .. } => {
                let flow = tables_of(format, depth - 1, pa, read, visit)?;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

//! The walk, common to all formats: read an entry, decode it, go down or report.
//!
//! A format supplies its shape, its decoder and, where it has runs of contiguous entries, their rule. Everything is
//! generic over the format and recursion happens once per table, so that the loop over a last-level table compiles to
//! the loads, the decoding that the visitor looks at, and nothing else.
//!
//! A further format (stage 2, EPT, NPT) is a further implementation of [`Format`].

use crate::regime::Shape;
use crate::{Fault, Half, Leaf, Malformed, ReadTable, Table};
use core::ops::{ControlFlow, Range};

/// What one descriptor means.
pub(crate) enum Entry {
    /// Not valid: maps nothing, all other bits belong to software.
    Invalid,
    /// Points to the table of the next level.
    Table {
        pa: u64,
        /// What this descriptor takes away from everything under it, one bit per right.
        denied: u64,
    },
    /// Maps memory.
    Leaf(Leaf),
    /// Valid, and against the rule named.
    Reserved(&'static str),
}

/// A descriptor format.
pub(crate) trait Format: Copy {
    fn shape(&self) -> Shape;

    /// Decodes `descriptor` of a table at `depth`. It translates addresses from `va` on; `denied` unites what the
    /// tables above it deny.
    fn decode(&self, depth: u32, va: u64, denied: u64, descriptor: u64) -> Entry;

    /// Whether a virtual address lies in one of the two halves.
    fn canonical(&self, va: u64) -> bool;

    /// The entries of the root that translate addresses of `half`.
    fn root_entries(&self, half: Half) -> Range<usize>;

    /// Checks the entry `index` against the entry before it by the rule of contiguous runs. Both have been decoded
    /// without complaint; before the first entry of a table stands an invalid one, 0.
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
    Malformed {
        level,
        table,
        index,
        descriptor,
        why,
    }
}

pub(crate) fn translate<F: Format>(
    format: F,
    root: u64,
    va: u64,
    read: &mut impl ReadTable,
) -> Result<Leaf, Fault> {
    if !format.canonical(va) {
        return Err(Fault::NonCanonical);
    }
    let shape = format.shape();
    let (mut table, mut denied) = (root, 0);
    let mut depth = shape.top;
    loop {
        let shift = shape.shift(depth);
        let index = (va >> shift) as usize & (shape.entries(depth) - 1);
        let descriptor = read.read(table, index);
        let first = va >> shift << shift;
        let level = shape.level(depth);
        match format.decode(depth, first, denied, descriptor) {
            Entry::Invalid => return Err(Fault::NotMapped { level }),
            Entry::Leaf(leaf) => return Ok(leaf),
            Entry::Reserved(why) => {
                return Err(Fault::Reserved(malformed(
                    level, table, index, descriptor, why,
                )));
            }
            Entry::Table { pa, denied: more } => {
                table = pa;
                denied |= more;
                depth -= 1;
            }
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
    let place = Place {
        depth: shape.top,
        table: root,
        va: base,
        denied: 0,
    };
    leaves_of(format, place, format.root_entries(half), read, visit).map(|_| ())
}

/// A table and how the walk came to it.
struct Place {
    depth: u32,
    table: u64,
    /// The address that entry 0 translates.
    va: u64,
    denied: u64,
}

fn leaves_of<F: Format>(
    format: F,
    place: Place,
    entries: Range<usize>,
    read: &mut impl ReadTable,
    visit: &mut impl FnMut(&Leaf) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, Fault> {
    let shape = format.shape();
    let Place {
        depth,
        table,
        va,
        denied,
    } = place;
    let level = shape.level(depth);
    let shift = shape.shift(depth);
    let mut previous = 0;
    for index in entries {
        let descriptor = read.read(table, index);
        let va = va + ((index as u64) << shift);
        let entry = format.decode(depth, va, denied, descriptor);
        if let Entry::Reserved(why) = entry {
            return Err(Fault::Reserved(malformed(
                level, table, index, descriptor, why,
            )));
        }
        if let Err(why) = format.check_run(depth, index, previous, descriptor) {
            return Err(Fault::BrokenRun(malformed(
                level, table, index, descriptor, why,
            )));
        }
        previous = descriptor;
        let flow = match entry {
            Entry::Leaf(leaf) => visit(&leaf),
            Entry::Table { pa, denied: more } => {
                let below = Place {
                    depth: depth - 1,
                    table: pa,
                    va,
                    denied: denied | more,
                };
                leaves_of(format, below, 0..shape.entries(depth - 1), read, visit)?
            }
            Entry::Invalid | Entry::Reserved(_) => continue,
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
        match format.decode(depth, 0, 0, descriptor) {
            Entry::Invalid | Entry::Leaf(_) => {}
            Entry::Reserved(why) => {
                return Err(Fault::Reserved(malformed(
                    level, table, index, descriptor, why,
                )));
            }
            Entry::Table { pa, .. } => {
                let flow = tables_of(format, depth - 1, pa, read, visit)?;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

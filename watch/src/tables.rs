//! The tables that walks can reach, with what is in them.
//!
//! A table is known from when a root that leads to it is loaded, or an entry that leads to it is
//! stored in a table that is known; its entries are read then, and from then on follow what is
//! stored. It is forgotten when no walk can reach it any more.
//!
//! *Invariant*: a table that is [linked](Table::links) stands in a valid entry of a table that is
//! linked, or is the root of a space.

use std::collections::HashMap;

use tablewright_walker::Regime;

use crate::Memory;
use crate::entry::{Entry, Place};
use crate::invalidation::Cpus;

/// The number of a table.
pub(crate) type Number = u32;

pub(crate) struct Table {
    pub(crate) space: usize,
    pub(crate) pa: u64,
    pub(crate) level: i8,
    /// The first address that it translates.
    pub(crate) va: u64,
    pub(crate) entries: Vec<u64>,
    /// How many of them are valid, and of its own space.
    pub(crate) valid: u32,
    /// How many entries lead to it. A root counts itself.
    pub(crate) links: u32,
    /// The debt that has to be paid before it is forgotten.
    pub(crate) debt: Option<u64>,
    /// Processors that have stored to it since nothing leads to it.
    pub(crate) late: Cpus,
}

impl Table {
    pub(crate) fn place(&self, regime: Regime, index: usize) -> Place {
        let va = regime.canonical(self.va + index as u64 * regime.entry_size(self.level));
        Place { regime, level: self.level, va }
    }
}

/// The first bits of what a frame is known for: beside them it is the number of a table, and one.
const WATCHED: u32 = 1 << 31;
/// There are roots in it that are shorter than a frame.
const SMALL: u32 = 1 << 30;
/// The bytes of the smallest root (DDI 0487 D8.2.5).
const SMALLEST: u64 = 64;
/// Frames of 4 KiB up to this one are looked after: 256 GiB.
const FRAMES: u64 = 1 << 26;

/// All of them.
#[derive(Default)]
pub(crate) struct Tables {
    all: Vec<Option<Table>>,
    free: Vec<Number>,
    /// By number of the frame of 4 KiB.
    frames: Vec<u32>,
    /// Roots that are shorter than a frame, by their addresses over [`SMALLEST`].
    small: HashMap<u64, Number>,
    /// The space of all tables of the upper half, where roots share these (x86-64, RISC-V).
    pub(crate) upper: Option<usize>,
}

impl Tables {
    pub(crate) fn get(&self, number: Number) -> Option<&Table> {
        self.all.get(number as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Table> {
        self.all.get_mut(number as usize)?.as_mut()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Table> {
        self.all.iter().flatten().filter(|table| table.links > 0)
    }

    pub(crate) fn count(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// The table in which a physical address is, and whether its frame is watched.
    #[inline]
    pub(crate) fn at(&self, pa: u64) -> (Option<Number>, bool) {
        match self.frames.get((pa >> 12) as usize) {
            None | Some(0) => (None, false),
            Some(&known) => {
                let number = match known & SMALL {
                    0 => (known & !WATCHED).checked_sub(1),
                    _ => self.small.get(&(pa / SMALLEST)).copied(),
                };
                (number, known & WATCHED != 0)
            }
        }
    }

    /// Makes the frames of a table known for it, or for nothing.
    fn place_in_frames(&mut self, number: Option<Number>, pa: u64, bytes: u64) {
        if bytes < 4096 {
            for part in pa / SMALLEST..(pa + bytes).div_ceil(SMALLEST) {
                match number {
                    Some(number) => self.small.insert(part, number),
                    None => self.small.remove(&part),
                };
            }
            if let Some(frame) = self.frame(pa) {
                *frame = *frame & WATCHED | SMALL;
            }
            return;
        }
        for frame in 0..bytes.div_ceil(4096) {
            if let Some(frame) = self.frame(pa + (frame << 12)) {
                *frame = *frame & WATCHED | number.map_or(0, |number| number + 1);
            }
        }
    }

    fn frame(&mut self, pa: u64) -> Option<&mut u32> {
        let frame = pa >> 12;
        if frame >= FRAMES {
            return None;
        }
        if self.frames.len() <= frame as usize {
            self.frames.resize((frame as usize + 1).next_power_of_two(), 0);
        }
        self.frames.get_mut(frame as usize)
    }

    /// Has every store to a frame said, or not any more.
    pub(crate) fn watch(&mut self, pa: u64, is_watched: bool) {
        if let Some(frame) = self.frame(pa) {
            *frame = *frame & !WATCHED | if is_watched { WATCHED } else { 0 };
        }
    }

    /// Adds a table with what is in it, and those below it. `None`: there is no memory.
    pub(crate) fn adopt(
        &mut self,
        space: usize,
        regime: Regime,
        (level, pa, va): (i8, u64, u64),
        memory: &mut dyn Memory,
    ) -> Option<Number> {
        let mut entries = vec![0; regime.table_entries(level)];
        if pa >> 12 >= FRAMES || !memory.read(pa, &mut entries) {
            return None;
        }
        let number = self.free.pop().unwrap_or(self.all.len() as Number);
        let (valid, links, debt, late) = (0, 1, None, 0);
        let table = Table { space, pa, level, va, entries, valid, links, debt, late };
        let bytes = table.entries.len() as u64 * 8;
        match self.all.get_mut(number as usize) {
            Some(slot) => *slot = Some(table),
            None => self.all.push(Some(table)),
        }
        self.place_in_frames(Some(number), pa, bytes);
        self.link_below(number, regime, memory);
        Some(number)
    }

    /// An entry leads to a table from here on.
    pub(crate) fn link(&mut self, space: usize, place: Place, pa: u64, memory: &mut dyn Memory) {
        let step = if place.regime.last_level() < place.regime.start_level() { -1 } else { 1 };
        let level = place.level + step;
        let space = self.upper.filter(|_| place.va >> 63 != 0).unwrap_or(space);
        let Some(number) = self.at(pa).0 else {
            self.adopt(space, place.regime, (level, pa, place.va), memory);
            return;
        };
        let Some(table) = self.get_mut(number) else { return };
        table.links += 1;
        if table.links == 1 {
            // It was detached, and is back, perhaps at another address.
            (table.space, table.va, table.debt, table.valid) = (space, place.va, None, 0);
            table.late = 0;
            self.link_below(number, place.regime, memory);
        }
    }

    /// The entries of a table lead to tables from here on.
    fn link_below(&mut self, number: Number, regime: Regime, memory: &mut dyn Memory) {
        let Some(table) = self.get(number) else { return };
        let (space, level) = (table.space, table.level);
        for index in 0..regime.table_entries(level) {
            let Some(table) = self.get_mut(number) else { return };
            // Most are zero, and that is invalid everywhere.
            let Some(&entry @ 1..) = table.entries.get(index) else { continue };
            let place = table.place(regime, index);
            let entry = place.read(entry);
            table.valid += place.count(entry);
            if let Entry::Table(pa) = entry {
                self.link(space, place, pa, memory);
            }
        }
    }

    /// The tables right below one.
    fn below(&self, number: Number, regime: Regime) -> Vec<Number> {
        let Some(table) = self.get(number) else { return Vec::new() };
        let last = table.level == regime.last_level();
        let entries = table.entries.iter().enumerate().filter(|(_, entry)| !last && **entry != 0);
        let tables =
            entries.filter_map(|(index, &entry)| match table.place(regime, index).read(entry) {
                Entry::Table(pa) => self.at(pa).0,
                _ => None,
            });
        tables.collect()
    }

    /// The leaves of a table and below it: the place of each, and its descriptor.
    pub(crate) fn leaves(&self, number: Number, regime: Regime, out: &mut Vec<(Place, u64)>) {
        let Some(table) = self.get(number) else { return };
        for (index, &entry) in table.entries.iter().enumerate() {
            let place = table.place(regime, index);
            if entry != 0 && matches!(place.read(entry), Entry::Leaf(_)) {
                out.push((place, entry));
            }
        }
        for below in self.below(number, regime) {
            self.leaves(below, regime, out);
        }
    }

    /// A table and those below it, if nothing else leads to them.
    pub(crate) fn detach(&mut self, number: Number, regime: Regime, out: &mut Vec<Number>) {
        let Some(table) = self.get_mut(number) else { return };
        table.links = table.links.saturating_sub(1);
        if table.links > 0 {
            return;
        }
        out.push(number);
        for below in self.below(number, regime) {
            self.detach(below, regime, out);
        }
    }

    /// Forgets one.
    pub(crate) fn forget(&mut self, number: Number) {
        let Some(table) = self.all.get_mut(number as usize).and_then(Option::take) else { return };
        self.free.push(number);
        self.place_in_frames(None, table.pa, table.entries.len() as u64 * 8);
    }
}

//! All that a tree of tables maps, in the order of addresses.

use tablewright_walker::{Access, Denied, Descriptor, Half, Leaf, Regime, decode, translate};
use tablewright_watch::Memory;

use super::registers::Tree;

/// The tables of a tree that are read at most: those of 64 TiB in small pages. What leads into
/// itself ends here.
const MOST: usize = 1 << 25;

/// Leaves of one size beside each other, in virtual and in physical memory, which allow the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub va: u64,
    pub pa: u64,
    pub bytes: u64,
    /// The size of one.
    pub leaf: u64,
    /// The size of the run of contiguous entries that each belongs to; its own, if to none.
    pub contiguous: u64,
    pub kind: Kind,
}

/// How a leaf maps, but for flags that hardware sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub access: Access,
    /// The number of the memory type.
    pub memory: u8,
    pub shareability: Option<u8>,
    pub global: bool,
}

impl Run {
    pub fn last(&self) -> u64 {
        self.va + (self.bytes - 1)
    }

    fn of(leaf: &Leaf) -> Self {
        let Leaf { access, memory, shareability, global, .. } = *leaf;
        Self {
            va: leaf.va,
            pa: leaf.pa,
            bytes: leaf.size,
            leaf: leaf.size,
            contiguous: leaf.run_size,
            kind: Kind { access, memory, shareability, global },
        }
    }

    /// Whether another one goes on where this one ends.
    pub fn goes_on(&self, next: &Self) -> bool {
        self.va.wrapping_add(self.bytes) == next.va
            && self.pa.wrapping_add(self.bytes) == next.pa
            && self.kind == next.kind
    }
}

/// Something wrong with an entry, or a table, whatever it maps.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The first address that it translates.
    pub va: u64,
    pub what: String,
}

/// All that was found under a root.
#[derive(Debug, Default)]
pub struct Found {
    pub runs: Vec<Run>,
    /// The physical addresses of tables, each as often as it is linked, and the bytes of each.
    pub tables: Vec<(u64, u64)>,
    pub problems: Vec<Problem>,
}

/// Memory as the tables of a guest see it.
pub struct Through<'m> {
    pub memory: &'m mut dyn Memory,
    pub stage2: Option<(Regime, u64)>,
}

impl Through<'_> {
    /// The physical address of one that a guest takes for physical.
    pub fn physical(&mut self, pa: u64) -> Option<u64> {
        let Some((regime, root)) = self.stage2 else { return Some(pa) };
        let mut is_there = true;
        let mut read = |table: u64, index: usize| {
            let mut word = [0];
            is_there &= self.memory.read(table + 8 * index as u64, &mut word);
            word[0]
        };
        let leaf = translate(regime, root, pa, &mut read).ok()?;
        is_there.then(|| leaf.physical(pa))
    }
}

impl Memory for Through<'_> {
    fn read(&mut self, pa: u64, words: &mut [u64]) -> bool {
        let mut at = pa;
        // A table may lie in several frames.
        for part in words.chunks_mut(512) {
            let Some(physical) = self.physical(at) else { return false };
            if !self.memory.read(physical, part) {
                return false;
            }
            at += 4096;
        }
        true
    }
}

/// Finds all that a tree maps.
pub fn read(tree: &Tree, memory: &mut dyn Memory) -> Found {
    let mut memory = Through { memory, stage2: tree.stage2 };
    let mut found = Found::default();
    let Tree { regime, root, half, .. } = *tree;
    table(regime, half, (regime.start_level(), root, 0, Denied::NONE), &mut memory, &mut found);
    found
}

/// Returns the first address that an entry translates.
fn address(regime: Regime, half: Half, level: i8, table: u64, index: usize) -> u64 {
    let va = table + index as u64 * regime.entry_size(level);
    match half {
        Half::Upper => va | !0 << regime.input_bits(),
        Half::Lower => regime.canonical(va),
    }
}

/// Reads a table, and those below it: its level, where it is, the first address that it translates,
/// without the bits above those that select, and what the tables above it deny.
fn table(
    regime: Regime,
    half: Half,
    (level, pa, va, denied): (i8, u64, u64, Denied),
    memory: &mut Through<'_>,
    found: &mut Found,
) {
    if found.tables.len() == MOST {
        return;
    }
    let mut entries = vec![0; regime.table_entries(level)];
    found.tables.push((pa, entries.len() as u64 * 8));
    let problem = |index, what| Problem { va: address(regime, half, level, va, index), what };
    if found.tables.len() == MOST {
        found.problems.push(problem(0, "there are more tables than memory has room for".into()));
        return;
    }
    if !memory.read(pa, &mut entries) {
        found.problems.push(problem(0, format!("its table at {pa:#x} is not in this memory")));
        return;
    }
    let below = if regime.last_level() < regime.start_level() { level - 1 } else { level + 1 };
    for (index, &entry) in entries.iter().enumerate().filter(|(_, entry)| **entry != 0) {
        let at = address(regime, half, level, va, index);
        match decode(regime, level, at, denied, entry) {
            Descriptor::Invalid => {}
            Descriptor::Reserved(why) => found.problems.push(problem(
                index,
                format!(
                    "{why}: entry {index} of the table at {pa:#x}, level {level}, is {entry:#x}"
                ),
            )),
            Descriptor::Leaf(leaf) => {
                let run = Run { va: at, ..Run::of(&leaf) };
                let alike = |last: &Run| last.leaf == run.leaf && last.contiguous == run.contiguous;
                match found.runs.last_mut() {
                    Some(last) if last.goes_on(&run) && alike(last) => last.bytes += run.bytes,
                    _ => found.runs.push(run),
                }
            }
            Descriptor::Table { pa, denied: more } => {
                let va = va + index as u64 * regime.entry_size(level);
                table(regime, half, (below, pa, va, denied.union(more)), memory, found);
            }
        }
    }
}

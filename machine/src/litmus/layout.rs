//! A test in the memory of a machine: where its words are, and what is in them at first.

use std::collections::BTreeMap;

use super::program::*;
use crate::architecture::Architecture;
use crate::hardware::Hardware;
use crate::memory::{Memory, State};
use crate::tlb::{Stages, Tlbi};

/// Tables have 512 entries, and each level translates 9 bits.
const ENTRIES: u64 = 512;
const FRAMES: usize = 256;
const TOP: u8 = 3;

/// The places of everything.
pub(crate) struct Layout {
    /// The physical address of each page.
    data: Vec<u64>,
    /// The physical address of each loose table.
    tables: Vec<u64>,
    /// By space, level and the number of the table among those of that level.
    linked: BTreeMap<(usize, u8, u64), u64>,
    /// The number of each space on the machine.
    pub spaces: Vec<u16>,
    /// Every word that the test can see.
    pub words: Vec<u64>,
    /// Descriptors among them.
    pub entries: Vec<u64>,
    /// Words that an instruction may write.
    pub written: Vec<u64>,
    /// These, and leaves in which walkers set flags.
    pub changing: Vec<u64>,
    /// The way to a leaf may change: descriptors above the last level are written, or a root is.
    pub deep: bool,
    /// Two spaces have one identifier.
    pub shared_ids: bool,
    /// The tables of the guests' stage 1, by level and number.
    first: BTreeMap<(u8, u64), u64>,
    /// There are contiguous entries.
    pub runs: bool,
    /// One address in each contiguous run that the test does not name, if there is one: but for
    /// flags its entry stays as it is.
    pub unnamed: Vec<u64>,
    /// Addresses of their entries.
    unnamed_entries: Vec<u64>,
}

/// Memory that is large enough for a test.
pub(crate) fn memory(test: &Test) -> Memory {
    let blocks = (0..test.data.len()).filter(|&page| in_block(test, page)).count();
    let aligned = (blocks + usize::from(blocks > 0)) * ENTRIES as usize;
    let runs = (0..test.data.len()).filter(|&page| in_run(test, page)).count();
    // Memory begins aligned.
    Memory::new(FRAMES + aligned + runs * 2 * RUN as usize, 12, 1 << 30)
}

/// The architecture of a test, with caches that are large enough for it.
pub(crate) fn architecture(test: &Test, profile: Profile) -> Architecture {
    Architecture { tlb_sets: 1, tlb_ways: 32, walk_cache: 64, ..test.architecture(profile) }
}

/// All values that stand in a test.
fn values(test: &Test) -> impl Iterator<Item = &Value> {
    let code = test.code.iter().flat_map(|thread| &thread.code);
    let stored = code.flat_map(|instruction| match &instruction.op {
        Op::Store { value, .. } => vec![value],
        Op::Atomic { value, change: Change::CompareSwap(expected), .. } => vec![value, expected],
        Op::Atomic { value, .. } => vec![value],
        _ => Vec::new(),
    });
    let first = test.maps.iter().map(|map| &map.value);
    first.chain(test.inits.iter().map(|(_, value)| value)).chain(stored)
}

fn in_block(test: &Test, page: usize) -> bool {
    values(test)
        .any(|value| matches!(value, Value::Leaf { page: p, block: true, .. } if *p == page))
}

/// Other pages lie behind it.
fn in_run(test: &Test, page: usize) -> bool {
    let behind = |data: &Data| data.behind.is_some_and(|(first, _)| first == page);
    let leads = |value: &Value| {
        value.is_contiguous() && matches!(value, Value::Leaf { page: p, .. } if *p == page)
    };
    test.data[page].behind.is_none() && (test.data.iter().any(behind) || values(test).any(leads))
}

/// Bits of an address below those that the tables with `depth` levels below them, entry and all,
/// translate.
fn shift(depth: u8) -> u32 {
    12 + 9 * u32::from(depth)
}

fn index(va: u64, depth: u8) -> u64 {
    va >> shift(depth) & (ENTRIES - 1)
}

impl Layout {
    /// Builds the tables of a test in the memory of `hardware`.
    ///
    /// `None` if there is not enough memory, which [`memory`] rules out.
    pub fn build(test: &Test, hardware: &Hardware) -> Option<Self> {
        let memory = &hardware.memory;
        let mut layout = Self {
            data: Vec::new(),
            tables: Vec::new(),
            linked: BTreeMap::new(),
            spaces: Vec::new(),
            words: Vec::new(),
            entries: Vec::new(),
            written: Vec::new(),
            changing: Vec::new(),
            deep: false,
            shared_ids: false,
            first: BTreeMap::new(),
            runs: values(test).any(Value::is_contiguous),
            unnamed: Vec::new(),
            unnamed_entries: Vec::new(),
        };
        for depth in test.tables.iter().map(|table| table.depth) {
            layout.tables.push(layout.new_table(memory, depth)?);
        }
        for map in &test.maps {
            let va = test.addresses[map.address].va;
            let lowest = u8::from(matches!(map.value, Value::Leaf { block: true, .. }));
            for depth in (lowest..=TOP).rev() {
                let key = (map.space, depth, va >> shift(depth + 1));
                if !layout.linked.contains_key(&key) {
                    let table = layout.new_table(memory, depth)?;
                    layout.linked.insert(key, table);
                    if let Some(parent) = layout.table_at(map.space, va, depth + 1) {
                        memory.write(parent + index(va, depth + 1) * 8, table_bits(test) | table);
                    }
                }
            }
        }
        // A space that maps nothing has a root all the same.
        for space in 0..test.spaces.len() {
            if layout.table_at(space, 0, TOP).is_none() {
                let table = layout.new_table(memory, TOP)?;
                layout.linked.insert((space, TOP, 0), table);
            }
        }
        if test.is_nested() {
            layout.build_first(test, memory)?;
        }
        for (page, data) in test.data.iter().enumerate() {
            let address = match data.behind {
                Some((first, pages)) => layout.data[first] + (pages << shift(0)),
                None => layout.new_page(test, memory, page)?,
            };
            layout.data.push(address);
            memory.write(address, data.value);
        }
        for map in &test.maps {
            let depth = u8::from(matches!(map.value, Value::Leaf { block: true, .. }));
            let entry = Location::Entry { space: map.space, address: map.address, depth };
            let (at, value) = (layout.locate(test, &entry), layout.evaluate(test, &map.value));
            memory.write(at, value);
            if map.value.is_contiguous() {
                let first = test.addresses[map.address].va;
                for member in 1..RUN {
                    memory.write(at + member * 8, value + (member << shift(0)));
                }
                let named = |va: u64| test.addresses.iter().any(|address| address.va == va);
                let unnamed = |member: &u64| !named(first + (member << shift(0)));
                if let Some(member) = (0..RUN).rfind(unnamed) {
                    layout.unnamed.push(first + (member << shift(0)));
                    layout.unnamed_entries.push(at + member * 8);
                }
            }
        }
        for (address, value) in &test.stage1 {
            let at = layout.locate(test, &Location::First(*address));
            memory.write(at, layout.evaluate(test, value));
        }
        for (location, value) in &test.inits {
            memory.write(layout.locate(test, location), layout.evaluate(test, value));
        }
        layout.shared_ids =
            (1..test.spaces.len()).any(|b| (0..b).any(|a| test.spaces[a].id == test.spaces[b].id));
        layout.attach(test, hardware);
        layout.look_at(test);
        Some(layout)
    }

    /// Builds the tables of the guests' stage 1, which are where the guests think they are: of the
    /// memory of the machine, stage 2 is the identity, in one block.
    fn build_first(&mut self, test: &Test, memory: &Memory) -> Option<()> {
        for (address, _) in &test.stage1 {
            let va = test.addresses[*address].va;
            for depth in (0..=TOP).rev() {
                let key = (depth, va >> shift(depth + 1));
                if self.first.contains_key(&key) {
                    continue;
                }
                let table = memory.address(memory.take(State::Data, 0)?);
                self.first.insert(key, table);
                if let Some(parent) = self.first.get(&(depth + 1, va >> shift(depth + 2))) {
                    memory.write(parent + index(va, depth + 1) * 8, table_bits(test) | table);
                }
            }
        }
        let block = shift(2);
        let first = memory.first() >> block << block;
        for space in 0..test.spaces.len() {
            let key = (space, TOP - 1, first >> shift(TOP));
            let table = match self.linked.get(&key) {
                Some(&table) => table,
                None => {
                    let table = self.new_table(memory, TOP - 1)?;
                    self.linked.insert(key, table);
                    let root = self.table_at(space, first, TOP)?;
                    memory.write(root + index(first, TOP) * 8, table_bits(test) | table);
                    table
                }
            };
            let leaf = VALID | STAGE2_LEAF | STAGE2_WRITE | ARM_ACCESSED;
            memory.write(table + index(first, 2) * 8, first | leaf);
        }
        Some(())
    }

    /// The root of the guests' stage 1, if they have one.
    pub fn first_root(&self) -> Option<u64> {
        self.first.get(&(TOP, 0)).copied()
    }

    fn new_page(&self, test: &Test, memory: &Memory, page: usize) -> Option<u64> {
        let run = match (in_block(test, page), in_run(test, page)) {
            (true, _) => ENTRIES,
            (_, true) => RUN,
            _ => 1,
        };
        let frame = memory.take_run(run as usize, State::Data, 0)?;
        Some(memory.address(frame))
    }

    fn new_table(&self, memory: &Memory, depth: u8) -> Option<u64> {
        let frame = memory.take(State::Private, depth)?;
        let address = memory.address(frame);
        for entry in 0..ENTRIES {
            memory.write(address + entry * 8, 0);
        }
        Some(address)
    }

    fn attach(&mut self, test: &Test, hardware: &Hardware) {
        for (number, space) in test.spaces.iter().enumerate() {
            let on_machine = hardware.new_space();
            self.spaces.push(on_machine);
            if let Some(root) = self.table_at(number, 0, TOP) {
                hardware.attach(0, on_machine, root, false, space.id);
            }
        }
        // Loose tables, and those that are detached at first, are in the sight of every CPU: one
        // that links them early does so in front of all walkers.
        let loose = test.tables.iter().zip(&self.tables).enumerate();
        for (number, (table, &pa)) in loose {
            let above = |address: &usize| {
                let bits = shift(table.depth + 1);
                test.addresses[*address].va >> bits << bits
            };
            let first = self.slots(test).find(|(t, _)| *t == number).map(|(_, a)| above(&a));
            hardware.expose(pa, table.depth, first.unwrap_or(0), self.spaces[0]);
        }
        for (&(space, depth, number), &pa) in &self.linked {
            hardware.expose(pa, depth, number << shift(depth + 1), self.spaces[space]);
        }
    }

    /// The slots of loose tables that a test names.
    fn slots<'t>(&self, test: &'t Test) -> impl Iterator<Item = (usize, usize)> + 't {
        let first = test.inits.iter().map(|(location, _)| location);
        let code = test.code.iter().flat_map(|thread| &thread.code);
        let accessed = code.filter_map(|i| match i.op.place() {
            Some(Place::Physical(location)) => Some(location),
            _ => None,
        });
        first.chain(accessed).filter_map(|location| match location {
            Location::Slot { table, address } => Some((*table, *address)),
            _ => None,
        })
    }

    /// Collects the words that matter.
    fn look_at(&mut self, test: &Test) {
        let mut words = self.data.clone();
        for (&(space, depth, number), &table) in &self.linked {
            for map in test.maps.iter().filter(|map| map.space == space) {
                let va = test.addresses[map.address].va;
                if va >> shift(depth + 1) == number {
                    words.push(table + index(va, depth) * 8);
                }
            }
        }
        for (table, &pa) in test.tables.iter().zip(&self.tables) {
            for address in &test.addresses {
                words.push(pa + index(address.va, table.depth) * 8);
            }
        }
        for (address, _) in &test.stage1 {
            words.push(self.locate(test, &Location::First(*address)));
        }
        if test.hardware_access {
            words.extend(&self.unnamed_entries);
        }
        words.sort_unstable();
        words.dedup();
        self.words = words;
        let tables: Vec<u64> = self.first.values().copied().collect();
        let of_data =
            |word: &&u64| !self.data.contains(word) && !tables.contains(&(**word & !0xfff));
        self.entries = self.words.iter().filter(of_data).copied().collect();

        let code = || test.code.iter().flat_map(|thread| &thread.code);
        for instruction in code().filter(|i| i.op.writes()) {
            if let Some(Place::Physical(location)) = instruction.op.place() {
                self.written.push(self.locate(test, location));
                self.deep |= match location {
                    Location::Data(_) | Location::First(_) => false,
                    Location::Entry { depth, .. } => *depth > 0,
                    Location::Slot { table, .. } => test.tables[*table].depth > 0,
                };
            }
        }
        self.deep |= self.shared_ids;
        self.written.sort_unstable();
        self.written.dedup();
        self.changing = self.written.clone();
        if test.hardware_access || test.x86 {
            let tables =
                self.linked.iter().filter(|((_, depth, _), _)| *depth < 2).map(|(_, &table)| table);
            let tables: Vec<u64> = tables.chain(self.tables.iter().copied()).collect();
            let in_table = |word: &&u64| tables.contains(&(**word & !0xfff));
            self.changing.extend(self.words.iter().filter(in_table));
            self.changing.sort_unstable();
            self.changing.dedup();
        }
    }

    fn table_at(&self, space: usize, va: u64, depth: u8) -> Option<u64> {
        let key = (space, depth, va >> shift(depth + 1));
        self.linked.get(&key).copied()
    }

    /// The physical address of a location.
    pub fn locate(&self, test: &Test, location: &Location) -> u64 {
        match *location {
            Location::Data(page) => self.data[page],
            Location::Entry { space, address, depth } => {
                let va = test.addresses[address].va;
                // The parser has seen that the address is mapped in this space.
                let table = self.table_at(space, va, depth).unwrap_or_default();
                table + index(va, depth) * 8
            }
            Location::First(address) => {
                let va = test.addresses[address].va;
                // The parser has seen that it has an entry.
                let table = self.first.get(&(0, va >> shift(1)));
                table.copied().unwrap_or_default() + index(va, 0) * 8
            }
            Location::Slot { table, address } => {
                let va = test.addresses[address].va;
                self.tables[table] + index(va, test.tables[table].depth) * 8
            }
        }
    }

    /// The bits of a value. A register has none of its own.
    pub fn evaluate(&self, test: &Test, value: &Value) -> u64 {
        match value {
            Value::Number(number) => *number,
            Value::Leaf { page, bits, .. } => self.data[*page] | bits,
            Value::Intermediate { address, bits } => test.addresses[*address].va | bits,
            Value::Member { page, behind, bits } => {
                (self.data[*page] + (behind << shift(0))) | bits
            }
            Value::Table(table) => self.tables[*table] | table_bits(test),
            Value::TableOf(location) => (self.locate(test, location) & !0xfff) | table_bits(test),
            Value::Of(..) | Value::Choose(_) => {
                value.compute(&|part| Some(self.evaluate(test, part))).unwrap_or(0)
            }
            Value::Register(_) | Value::Faulted(_) => 0,
        }
    }

    /// The physical address of a page.
    pub fn page(&self, page: usize) -> u64 {
        self.data[page]
    }

    /// Returns the invalidation as the hardware takes it.
    pub fn tlbi(&self, test: &Test, scope: Scope, broadcast: bool) -> Tlbi {
        let all = Tlbi { broadcast, ..Tlbi::default() };
        match scope {
            Scope::All => all,
            Scope::Space(space) => Tlbi { id: Some(test.spaces[space].id), ..all },
            Scope::Second { at, space } => {
                let space = Some(space);
                Tlbi {
                    stages: Stages::Second,
                    ..self.tlbi(test, Scope::Address { at, space }, broadcast)
                }
            }
            Scope::Combined { at, space } => {
                let scope = match at {
                    None => Scope::Space(space),
                    Some(at) => Scope::Address { at, space: Some(space) },
                };
                Tlbi { stages: Stages::First, ..self.tlbi(test, scope, broadcast) }
            }
            Scope::Address { at, space } => {
                let first = test.addresses[at.address].va;
                Tlbi {
                    id: space.map(|space| test.spaces[space].id),
                    range: Some((first, first + ((at.pages << shift(0)) - 1))),
                    leaves_only: at.leaves_only,
                    depth: at.depth,
                    ..all
                }
            }
        }
    }
}

fn table_bits(test: &Test) -> u64 {
    if test.x86 { VALID | X86_WRITE | X86_USER | X86_ACCESSED } else { 3 }
}

//! The rules.
//!
//! A change of an entry is a *debt* as long as somebody may remember what it was. Who that is, is
//! known from the *contexts* of its space: an identifier under which a root was loaded, and the
//! processors that may hold translations of it since. A debt is paid when invalidations of all of
//! them are complete: each issued after the change was visible to the walks that it is about, and a
//! DSB of the processor that issued it after that.

mod local;

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use tablewright_walker::Regime;

use crate::arm64::{Instruction, Part, Register, Tlbi};
use crate::debt::{Debt, Index, Near, Published, Tag, Why};
use crate::entry::{Entry, Place, Types, allows_less, needs_break, user_page};
use crate::finding::{Finding, Findings, Rule};
use crate::invalidation::{Cpus, Invalidation, Stages};
use crate::processor::{Cpu, Issued, Of};
use crate::space::{Context, NO_TABLE, Space};
use crate::tables::Tables;
use crate::{At, Memory};

/// How much was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Stores to entries that changed what they mean.
    pub changes: u64,
    /// Changes after which something may have been remembered as it was.
    pub debts: u64,
    /// Invalidations.
    pub invalidations: u64,
    /// Barriers.
    pub barriers: u64,
    /// Loads of a root.
    pub roots: u64,
    /// The most tables that were known at once.
    pub tables: usize,
    /// The most debts at once.
    pub most: usize,
}

/// A page that user memory has lost, and that may be reached still.
struct Lost {
    debts: Vec<u64>,
    /// The next byte of it, if it is being written from the beginning to the end.
    next: u64,
}

/// Watches a machine.
pub struct Watcher {
    cpus: Vec<Cpu>,
    spaces: Vec<Option<Space>>,
    by_root: HashMap<(u64, Part), usize>,
    /// The spaces with debts.
    owing: BTreeSet<usize>,
    tables: Tables,
    types: Types,
    /// x86-64 and RISC-V: there are no breaks, stores are seen at once, and each processor forgets
    /// by itself.
    is_local: bool,
    /// Those that execute user code, where processors forget by themselves.
    in_user: Cpus,
    /// Debts whose page was used anew, there.
    reused: Vec<u64>,
    debts: HashMap<u64, Debt>,
    next: u64,
    lost: HashMap<u64, Lost>,
    findings: Findings,
    counts: Counts,
}

impl Watcher {
    /// Watches a machine of `cpus` processors, at most 64, from reset on.
    /// Ignores a processor with a higher number.
    pub fn new(cpus: usize) -> Self {
        Self {
            cpus: (0..cpus.min(64)).map(|_| Cpu::default()).collect(),
            spaces: Vec::new(),
            by_root: HashMap::new(),
            owing: BTreeSet::new(),
            tables: Tables::default(),
            types: Types::default(),
            is_local: false,
            in_user: 0,
            reused: Vec::new(),
            debts: HashMap::new(),
            next: 0,
            lost: HashMap::new(),
            findings: Findings::default(),
            counts: Counts::default(),
        }
    }

    /// Returns what was found.
    pub fn findings(&self) -> &[Finding] {
        self.findings.all()
    }

    /// Returns what was seen.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The tables that walks can reach: the physical address of each, and its entries as they are
    /// known, for those who want to hold them against memory.
    pub fn tables(&self) -> impl Iterator<Item = (u64, &[u64])> {
        self.tables.all().map(|table| (table.pa, table.entries.as_slice()))
    }

    fn knows(&self, cpu: u8) -> bool {
        usize::from(cpu) < self.cpus.len()
    }

    /// Whether a store to this address has to be [said](Self::store).
    #[inline]
    pub fn cares(&self, pa: u64) -> bool {
        self.tables.at(pa) != (None, false)
    }

    /// A processor executes an instruction that [matters](crate::arm64::decode), with this operand.
    pub fn execute(
        &mut self,
        at: At,
        instruction: Instruction,
        operand: u64,
        memory: &mut dyn Memory,
    ) {
        match instruction {
            Instruction::Write(register) => self.write(at, register, operand, memory),
            Instruction::Tlbi(tlbi) => self.tlbi(at, tlbi, operand),
            Instruction::Barrier { everywhere, whole } => self.barrier(at, everywhere, whole),
            Instruction::Synchronize => {
                if let Some(cpu) = self.cpus.get_mut(usize::from(at.cpu)) {
                    cpu.unsynchronized = None;
                }
            }
            // Stores, of which the watcher is told as such.
            Instruction::Zero | Instruction::Set { .. } | Instruction::Copy { .. } => {}
        }
    }

    /// A processor has stored to physical memory: so many bytes from this address on. What is there
    /// now is read.
    pub fn store(&mut self, at: At, pa: u64, bytes: u64, memory: &mut dyn Memory) {
        let Some(end) = pa.checked_add(bytes).filter(|_| self.cares(pa)) else { return };
        let mut word = [0];
        let mut next = pa & !7;
        while next < end {
            if memory.read(next, &mut word) {
                self.stored(at, next, word[0], memory);
            }
            next += 8;
        }
        self.written(at, pa, bytes);
    }

    /// A processor has stored this value to an aligned word of physical memory.
    pub fn store_word(&mut self, at: At, pa: u64, value: u64, memory: &mut dyn Memory) {
        self.stored(at, pa, value, memory);
        self.written(at, pa, 8);
    }

    /// Physical memory is about to be zeroed: so many bytes from this address on, whole words.
    pub fn zeroed(&mut self, at: At, pa: u64, bytes: u64, memory: &mut dyn Memory) {
        let Some(end) = pa.checked_add(bytes) else { return };
        for word in (pa..end).step_by(8) {
            self.stored(at, word, 0, memory);
        }
        self.written(at, pa, bytes);
    }

    fn stored(&mut self, at: At, pa: u64, value: u64, memory: &mut dyn Memory) {
        let Some(number) = self.tables.at(pa).0.filter(|_| self.knows(at.cpu)) else { return };
        let Some(table) = self.tables.get_mut(number) else { return };
        let index = (pa.wrapping_sub(table.pa) / 8) as usize;
        let Some(entry) = table.entries.get_mut(index) else { return };
        let old = std::mem::replace(entry, value);
        if old == value {
            return;
        }
        let (space, links, debt) = (table.space, table.links, table.debt);
        let Some(Some(of)) = self.spaces.get(space) else { return };
        let place = table.place(of.regime, index);
        let (was, is) = (place.read(old), place.read(value));
        if links == 0 {
            // Zero ends a walk, and does no harm.
            if is != Entry::Invalid
                && let Some(number) = debt
                && let Some(debt) = self.debts.get(&number)
            {
                // A walk without a lock on another processor may find the table before it is cut
                // off, and store one entry after that.
                let by = 1 << at.cpu;
                let is_late = debt.at.cpu != at.cpu && table.late & by == 0;
                table.late |= by;
                if !is_late {
                    let pa = table.pa;
                    let then = format!("the table at {pa:#x}, which it led to, was written to");
                    self.say(Rule::TableReused, number, at, then);
                }
            }
            return;
        }
        table.valid += place.count(is);
        table.valid -= place.count(was);
        self.change(&Stored { at, space, place, pa, old, new: value, was, is }, memory);
        // The first entry of a root that was empty: there is something to hold.
        if self.spaces[space].as_ref().is_some_and(|of| of.table == number) {
            self.hold(space);
        }
    }

    /// An entry that walks can reach has become another.
    fn change(&mut self, stored: &Stored, memory: &mut dyn Memory) {
        let &Stored { at, space, place, was, is, .. } = stored;
        self.counts.changes += 1;
        let Some(Some(of)) = self.spaces.get(space) else { return };
        let broken = needs_break(of.regime, was, is, self.types);
        // While no processor has the root loaded, the break may come after the change.
        let is_walked = of.is_walked();
        let is_less = match (was, is) {
            (Entry::Leaf(old), Entry::Leaf(new)) => allows_less(&old, &new),
            _ => false,
        };
        // One that is wrong by itself is said once.
        if is != Entry::Invalid && broken.is_none() {
            self.made(stored);
        }
        let is_lost = broken.is_some() || was != Entry::Invalid && is == Entry::Invalid;
        if is_lost || is_less {
            let debt = self.owe(stored, is_lost);
            let is_wrong = is_walked && !self.is_local;
            if let (Some(why), Some(debt), true) = (broken, debt, is_wrong) {
                let then = format!("it was made {why} at once");
                self.say(Rule::BreakBeforeMake, debt, at, then);
            }
        }
        let is_linked = !matches!((was, is), (Entry::Table(old), Entry::Table(new)) if old == new);
        if let (Entry::Table(pa), true) = (is, is_linked) {
            self.link(at, space, place, pa, memory);
        }
    }

    /// An entry leads to a table.
    fn link(&mut self, at: At, space: usize, place: Place, pa: u64, memory: &mut dyn Memory) {
        // One that was detached from the same root has moved: it leads to the same memory.
        if let Some(table) = self.tables.at(pa).0.and_then(|number| self.tables.get(number))
            && table.links == 0
            && table.space != space
            && let Some(debt) = table.debt
        {
            let then =
                format!("the table at {pa:#x}, which it led to, was linked under another root");
            self.say(Rule::TableReused, debt, at, then);
        }
        self.tables.link(space, place, pa, memory);
        self.counts.tables = self.counts.tables.max(self.tables.count());
    }

    /// An entry is valid from here on: what is remembered of it must not differ from it.
    fn made(&mut self, stored: &Stored) {
        let &Stored { at, space, place, is, .. } = stored;
        let Some(Some(of)) = self.spaces.get(space) else { return };
        if of.debts.is_empty() {
            return;
        }
        let (regime, types, is_walked) = (of.regime, self.types, of.is_walked());
        for debt in of.debts.meeting(Some(place.span()), |level| regime.entry_size(level)) {
            let Some(owed) = self.debts.get_mut(&debt) else { continue };
            let is_same = owed.place.level == place.level;
            let is_below = owed.place.size() < place.size();
            let olds = || owed.olds.iter().map(|&old| owed.place.read(old));
            let why = match is_same {
                true => olds().find_map(|old| needs_break(regime, old, is, types)),
                false if is_below && owed.lost && matches!(is, Entry::Leaf(_)) => {
                    Some("another size")
                }
                false => None,
            };
            if self.is_local {
                if is_same && why.is_none() {
                    self.settle(debt);
                }
            } else if why.is_some() && !is_walked {
                owed.new = stored.new;
            } else if let Some(why) = why {
                let then = format!("it was made {why}, before the break was complete");
                self.say(Rule::BreakBeforeMake, debt, at, then);
                self.settle(debt);
            } else if is_same {
                let is_less = olds().any(|old| match (old, is) {
                    (Entry::Leaf(old), Entry::Leaf(new)) => allows_less(&old, &new),
                    _ => false,
                });
                match is_less {
                    true => self.regained(debt),
                    false => self.settle(debt),
                }
            }
        }
    }

    /// Notes that an entry may be remembered as it was: `lost`, or with more than it allows now.
    /// `None`: by nobody.
    fn owe(&mut self, stored: &Stored, lost: bool) -> Option<u64> {
        let &Stored { at, space, place, pa, old, new, was, is } = stored;
        let of = self.spaces.get(space)?.as_ref()?;
        let (regime, is_walked) = (of.regime, of.is_walked());
        let before = of.debts.get(place.level, place.va);
        let mut owed = of.owed(matches!(was, Entry::Leaf(leaf) if leaf.global));
        let (mut tables, mut leaves) = (Vec::new(), Vec::new());
        if let Entry::Table(pa) = was
            && was != is
            && let Some(table) = self.tables.at(pa).0
        {
            self.tables.leaves(table, regime, &mut leaves);
            self.tables.detach(table, regime, &mut tables);
        }
        if owed.is_empty() {
            tables.into_iter().for_each(|table| self.tables.forget(table));
            return None;
        }
        let mut olds = Vec::new();
        // It was another before, and that is not paid.
        if let Some(before) = before.and_then(|before| self.take(before)) {
            tables.extend(before.tables);
            olds.extend(before.olds.into_iter().filter(|&before| before != old));
            for (tag, cpus) in before.owed {
                match owed.iter_mut().find(|(known, _)| *known == tag) {
                    Some((_, known)) => *known |= cpus,
                    None => owed.push((tag, cpus)),
                }
            }
        }
        olds.push(old);
        let debt = self.next;
        self.next += 1;
        let is_table = matches!(was, Entry::Table(_));
        if let Some(Some(of)) = self.spaces.get_mut(space) {
            of.debts.insert(place.level, place.va, debt, is_table);
            self.owing.insert(space);
        }
        for &number in &tables {
            if let Some(table) = self.tables.get_mut(number) {
                table.debt = Some(debt);
                let pa = table.pa;
                self.lose(pa, debt);
            }
        }
        if lost {
            for page in olds.iter().filter_map(|&old| user_page(place, old)) {
                self.lose(page, debt);
            }
        }
        // No walk can see the old entry while no processor has the root loaded.
        let published = match self.is_local || !is_walked {
            true => Published::Everywhere,
            false => Published::No,
        };
        let (near, reused) = (None, None);
        let made = Debt {
            space,
            place,
            entry: pa,
            olds,
            new,
            at,
            is_table,
            lost,
            published,
            owed,
            tables,
            near,
            reused,
        };
        self.debts.insert(debt, made);
        self.counts.debts += 1;
        self.counts.most = self.counts.most.max(self.debts.len());
        if published == Published::No {
            self.cpus[usize::from(at.cpu)].unpublished.push(debt);
        }
        // What the table led to is remembered by itself.
        for (place, old) in leaves {
            let was = place.read(old);
            self.owe(&Stored { place, old, new: old, was, is: Entry::Invalid, ..*stored }, true);
        }
        Some(debt)
    }

    /// A page may be reached until a debt is paid.
    fn lose(&mut self, page: u64, debt: u64) {
        self.tables.watch(page, true);
        let none = || Lost { debts: Vec::new(), next: u64::MAX };
        self.lost.entry(page).or_insert_with(none).debts.push(debt);
    }

    /// Whether a page is reached by a debt no more.
    fn unlose(&mut self, page: u64, debt: u64) {
        let Some(lost) = self.lost.get_mut(&page) else { return };
        lost.debts.retain(|of| *of != debt);
        if lost.debts.is_empty() {
            self.lost.remove(&page);
            self.tables.watch(page, false);
        }
    }

    /// Takes a debt out of everything but its tables.
    fn take(&mut self, debt: u64) -> Option<Debt> {
        let owed = self.debts.remove(&debt)?;
        for page in owed.olds.iter().filter_map(|&old| user_page(owed.place, old)) {
            self.unlose(page, debt);
        }
        for &number in &owed.tables {
            if let Some(pa) = self.tables.get(number).map(|table| table.pa) {
                self.unlose(pa, debt);
            }
        }
        if let Some(Some(space)) = self.spaces.get_mut(owed.space) {
            space.debts.remove(owed.place.level, owed.place.va);
            if space.debts.is_empty() {
                self.owing.remove(&owed.space);
            }
        }
        Some(owed)
    }

    /// A debt is paid, or does not matter any more.
    fn settle(&mut self, debt: u64) {
        let Some(owed) = self.take(debt) else { return };
        for number in owed.tables {
            if self.tables.get(number).is_some_and(|t| t.links == 0 && t.debt == Some(debt)) {
                self.tables.forget(number);
            }
        }
    }

    /// The translation of a debt is back, with less than it allowed.
    fn regained(&mut self, debt: u64) {
        let Some(owed) = self.debts.get_mut(&debt) else { return };
        owed.lost = false;
        let pages: Vec<_> =
            owed.olds.iter().filter_map(|&old| user_page(owed.place, old)).collect();
        pages.into_iter().for_each(|page| self.unlose(page, debt));
    }

    /// Memory was written: whether a page that may still be reached was, as a whole, by the kernel.
    fn written(&mut self, at: At, pa: u64, bytes: u64) {
        let page = pa & !0xfff;
        if !self.knows(at.cpu) {
            return;
        }
        let Some(lost) = self.lost.get_mut(&page) else { return };
        let is_next = pa == page || pa == lost.next;
        lost.next = if is_next { pa + bytes } else { u64::MAX };
        if lost.next < page + 0x1000 || !is_next {
            return;
        }
        let debts = lost.debts.clone();
        for debt in debts {
            let Some(owed) = self.debts.get(&debt) else { continue };
            let part = self.spaces[owed.space].as_ref().map(|of| of.part);
            // A kernel is in the upper half, a hypervisor anywhere.
            if at.pc >> 63 == 0 && matches!(part, Some(Part::Lower | Part::Upper)) {
                continue;
            }
            let is_table = owed.is_table;
            if self.is_local && !is_table {
                self.reuse(debt, at, page);
                continue;
            }
            let rule = if is_table { Rule::TableReused } else { Rule::PageReused };
            let what = if is_table { "table" } else { "page" };
            let then = format!("the {what} at {page:#x}, which it led to, was written anew");
            self.say(rule, debt, at, then);
            self.settle(debt);
        }
    }

    /// Notes a breach that is about a debt.
    fn say(&mut self, rule: Rule, debt: u64, at: At, then: String) {
        let Some(owed) = self.debts.get(&debt) else { return };
        let types = self.types;
        let said = || (Some(owed.change(types)), owed.missing(), then);
        self.findings.add(rule, Some(owed.at), at, said);
    }

    fn tlbi(&mut self, at: At, tlbi: Tlbi, operand: u64) {
        self.counts.invalidations += 1;
        let Some(cpu) = self.cpus.get(usize::from(at.cpu)) else { return };
        let Some(by) = tlbi.of(operand, &cpu.registers) else { return };
        if let (Some(written), Some(vmid)) = (cpu.unsynchronized, by.vmid)
            && by.stages != Stages::El2
        {
            self.findings.add(Rule::Unsynchronized, Some(written), at, || {
                let missing = format!(
                    "an ISB since {:#x}, where VTTBR_EL2 was written with VMID {vmid}",
                    written.pc
                );
                (None, missing, "an invalidation was issued that goes by its VMID".into())
            });
        }
        self.invalidate(at, by);
    }

    /// A processor issues an invalidation.
    fn invalidate(&mut self, at: At, by: Invalidation) {
        let mut early = Vec::new();
        for &space in &self.owing {
            let Some(of) = &self.spaces[space] else { continue };
            if !of.is_meant(&by) {
                continue;
            }
            let size = |level| of.regime.entry_size(level);
            let mut meant = of.debts.meeting(by.span, size);
            if let (true, Some(span)) = (by.every_table, by.span) {
                meant.extend(of.debts.tables_beside(span, size));
            }
            for debt in meant {
                let Some(owed) = self.debts.get_mut(&debt) else { continue };
                let (paid, why) = owed.cover(&by, at.cpu);
                let near = |why| Some(Near { at, invalidation: by, why });
                match why {
                    // One of another address space is near only if nothing was nearer.
                    Some(Why::OtherAsid) if owed.near.is_some() || by.span.is_none() => {}
                    Some(why) => owed.near = near(why),
                    None => owed.near = near(Why::NotComplete),
                }
                // An invalidation of stage 1 need not follow the change of a stage 2: it completes
                // another.
                let is_first = by.stages == Stages::First && owed.is_of_guest();
                if why == Some(Why::Unpublished) && owed.at.cpu == at.cpu && !is_first {
                    early.push(debt);
                }
                if paid.iter().any(|(_, cpus)| *cpus != 0) {
                    let of = Of::Debt { debt, paid };
                    self.cpus[usize::from(at.cpu)].issued.push(Issued { by, of });
                }
            }
        }
        for debt in early {
            let then = "an invalidation was issued that a walk of the old entry may follow".into();
            self.say(Rule::Unpublished, debt, at, then);
        }
        if by.span.is_some() {
            return;
        }
        let cpus = if by.broadcast { Cpus::MAX } else { 1 << at.cpu };
        for (space, of) in self.spaces.iter().enumerate() {
            let Some(of) = of else { continue };
            let is_empty = self.is_empty(space);
            for context in of.contexts.iter().filter(|context| context.tag.is_named(&by)) {
                let away = if is_empty { Cpus::MAX } else { !context.loaded };
                let cpus = cpus & away & context.held;
                if cpus != 0 {
                    let of = Of::Context { space, tag: context.tag, cpus };
                    self.cpus[usize::from(at.cpu)].issued.push(Issued { by, of });
                }
            }
        }
    }

    fn barrier(&mut self, at: At, everywhere: bool, whole: bool) {
        self.counts.barriers += 1;
        let Some(cpu) = self.cpus.get_mut(usize::from(at.cpu)) else { return };
        let published = if everywhere { Published::Everywhere } else { Published::Here };
        for debt in &cpu.unpublished {
            if let Some(owed) = self.debts.get_mut(debt) {
                owed.published = published;
            }
        }
        if everywhere {
            cpu.unpublished.clear();
        }
        if whole {
            self.complete(at, everywhere);
        }
    }

    /// Completes what a processor has invalidated, everywhere or by itself.
    fn complete(&mut self, at: At, everywhere: bool) {
        let Some(cpu) = self.cpus.get_mut(usize::from(at.cpu)) else { return };
        if cpu.issued.is_empty() {
            return;
        }
        let (done, waiting) = std::mem::take(&mut cpu.issued)
            .into_iter()
            .partition(|issued| everywhere || !issued.by.broadcast);
        cpu.issued = waiting;
        let mut left = Vec::new();
        for Issued { of, .. } in done {
            match of {
                Of::Debt { debt, paid } => {
                    if self.debts.get_mut(&debt).is_some_and(|owed| owed.pay(&paid)) {
                        left.extend(self.debts.get(&debt).map(|owed| owed.space));
                        self.settle(debt);
                    }
                }
                Of::Context { space, tag, cpus } => {
                    let Some(Some(of)) = self.spaces.get_mut(space) else { continue };
                    if let Some(context) = of.contexts.iter_mut().find(|c| c.tag == tag) {
                        context.held &= !cpus;
                        left.push(space);
                    }
                }
            }
        }
        left.into_iter().for_each(|space| self.retire(space));
    }

    /// Forgets a space that nobody has loaded or remembers.
    fn retire(&mut self, space: usize) {
        let Some(Some(of)) = self.spaces.get_mut(space) else { return };
        of.contexts.retain(|context| context.loaded | context.held != 0);
        if !of.contexts.is_empty() || !of.debts.is_empty() || of.table == NO_TABLE {
            return;
        }
        let (regime, table, key) = (of.regime, of.table, (of.root, of.part));
        self.spaces[space] = None;
        self.by_root.remove(&key);
        let mut tables = Vec::new();
        self.tables.detach(table, regime, &mut tables);
        tables.into_iter().for_each(|table| self.tables.forget(table));
    }

    fn write(&mut self, at: At, register: Register, value: u64, memory: &mut dyn Memory) {
        let Some(cpu) = self.cpus.get_mut(usize::from(at.cpu)) else { return };
        let before = cpu.registers.vmid();
        cpu.registers.write(register, value);
        if register == Register::Vttbr && cpu.registers.vmid() != before {
            cpu.unsynchronized = Some(at);
        }
        // Of the same value on every processor of a system.
        match register {
            Register::Mair if !cpu.registers.has_guest() => self.types.mair = Some(value),
            Register::MairEl2 => self.types.mair_el2 = Some(value),
            _ => {}
        }
        for part in Part::ALL {
            let root = self.cpus[usize::from(at.cpu)].registers.root(part);
            let now = root.and_then(|(root, regime, id)| {
                let tag = match part {
                    Part::Lower => Tag::Asid(id),
                    // An entry of the kernel's half that is not global may have any ASID.
                    Part::Upper => Tag::Any,
                    Part::El2 => Tag::El2,
                    Part::Guest => Tag::Guest(id),
                };
                Some((self.space_of(root, part, regime, memory)?, tag))
            });
            self.switch(at, part, now, true);
        }
    }

    /// The space of a root.
    fn space_of(
        &mut self,
        root: u64,
        part: Part,
        regime: Regime,
        memory: &mut dyn Memory,
    ) -> Option<usize> {
        let known = self.by_root.get(&(root, part)).copied();
        known.or_else(|| self.attach(root, part, regime, memory))
    }

    /// A processor has another root loaded for a part, or none. `check`: what it holds under the
    /// same identifier stays.
    fn switch(&mut self, at: At, part: Part, now: Option<(usize, Tag)>, check: bool) {
        let loaded = &mut self.cpus[usize::from(at.cpu)].loaded[part as usize];
        let before = std::mem::replace(loaded, now);
        if now == before {
            return;
        }
        // What is loaded is loaded before the other is unloaded, which may be the last that keeps
        // the space.
        if let Some((space, tag)) = now {
            self.load(at, space, tag, check);
        }
        if let Some((space, tag)) = before {
            self.unload(at.cpu, space, tag);
        }
    }

    /// A root that is not known.
    fn attach(
        &mut self,
        root: u64,
        part: Part,
        regime: Regime,
        memory: &mut dyn Memory,
    ) -> Option<usize> {
        let space = self.spaces.iter().position(Option::is_none).unwrap_or(self.spaces.len());
        let va = if part == Part::Upper { u64::MAX << regime.input_bits() } else { 0 };
        let place = (regime.start_level(), root, va);
        // Its page may be a table's that is known, of the other half or of another root.
        let table = self.tables.adopt(space, regime, place, memory)?;
        let of = Space { root, part, regime, table, contexts: Vec::new(), debts: Index::default() };
        match self.spaces.get_mut(space) {
            Some(slot) => *slot = Some(of),
            None => self.spaces.push(Some(of)),
        }
        self.by_root.insert((root, part), space);
        self.counts.tables = self.counts.tables.max(self.tables.count());
        Some(space)
    }

    fn load(&mut self, at: At, space: usize, tag: Tag, check: bool) {
        self.counts.roots += 1;
        let bit = 1 << at.cpu;
        let Some(Some(of)) = self.spaces.get_mut(space) else { return };
        let is_walked = of.is_walked();
        let context = match of.contexts.iter().position(|context| context.tag == tag) {
            Some(known) => &mut of.contexts[known],
            None => {
                of.contexts.push(Context { tag, loaded: 0, held: 0 });
                let last = of.contexts.len() - 1;
                &mut of.contexts[last]
            }
        };
        context.loaded |= bit;
        if !is_walked {
            self.walks_begin(at, space);
        }
        self.hold(space);
        if check {
            self.check_identifier(at, space, tag);
        }
    }

    /// Whether a processor holds something of another root under the identifier that it has loaded.
    fn check_identifier(&mut self, at: At, space: usize, tag: Tag) {
        let Some(Some(of)) = self.spaces.get(space) else { return };
        if self.is_empty(space) {
            return;
        }
        let (root, bit) = (of.root, 1 << at.cpu);
        let name = match tag {
            Tag::Asid(asid) => format!("ASID {asid}"),
            Tag::Guest(vmid) => format!("VMID {vmid}"),
            Tag::El2 => "EL2".into(),
            _ => return,
        };
        let holds = |of: &Space| of.contexts.iter().any(|c| c.tag == tag && c.held & bit != 0);
        let other = self.spaces.iter().enumerate().find_map(|(number, of)| {
            let of = of.as_ref()?;
            (number != space && holds(of)).then_some(of.root)
        });
        if let Some(other) = other {
            self.findings.add(Rule::IdentifierReused, None, at, || {
                let missing = format!(
                    "an invalidation of {name} since the root at {other:#x} was loaded under it on \
                     CPU {}",
                    at.cpu
                );
                (None, missing, format!("the root at {root:#x} was loaded under it"))
            });
        }
    }

    /// A processor loads a root that none has loaded: a change that needs a break has to be
    /// invalidated by now.
    fn walks_begin(&mut self, at: At, space: usize) {
        let Some(Some(of)) = self.spaces.get(space) else { return };
        let (regime, types) = (of.regime, self.types);
        if self.is_local {
            return;
        }
        for debt in of.debts.meeting(None, |level| regime.entry_size(level)) {
            let Some(owed) = self.debts.get(&debt) else { continue };
            let is = owed.place.read(owed.new);
            let mut olds = owed.olds.iter().map(|&old| owed.place.read(old));
            if let Some(why) = olds.find_map(|old| needs_break(regime, old, is, types)) {
                let then = format!("it was made {why}, and walks began before that was complete");
                self.say(Rule::BreakBeforeMake, debt, at, then);
            }
        }
    }

    fn unload(&mut self, cpu: u8, space: usize, tag: Tag) {
        if let Some(Some(of)) = self.spaces.get_mut(space) {
            for context in of.contexts.iter_mut().filter(|context| context.tag == tag) {
                context.loaded &= !(1 << cpu);
            }
        }
        self.retire(space);
    }

    fn is_empty(&self, space: usize) -> bool {
        let Some(of) = &self.spaces[space] else { return true };
        of.table != NO_TABLE && self.tables.get(of.table).is_none_or(|table| table.valid == 0)
    }

    /// Notes that those who have a space loaded may remember something of it, if there is
    /// anything. An invalidation that was issued before says nothing of that.
    fn hold(&mut self, space: usize) {
        if self.is_empty(space) {
            return;
        }
        let Some(Some(held)) = self.spaces.get_mut(space) else { return };
        held.contexts.iter_mut().for_each(|context| context.held |= context.loaded);
        for issued in self.cpus.iter_mut().flat_map(|cpu| &mut cpu.issued) {
            if let Of::Context { space: of, tag, cpus } = &mut issued.of
                && *of == space
            {
                let contexts = held.contexts.iter().filter(|context| context.tag == *tag);
                contexts.for_each(|context| *cpus &= !context.loaded);
            }
        }
    }
}

/// A store to an entry.
struct Stored {
    at: At,
    space: usize,
    place: Place,
    /// The address of the entry.
    pa: u64,
    old: u64,
    new: u64,
    was: Entry,
    is: Entry,
}

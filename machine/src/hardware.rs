//! The memory management units of all CPUs: store buffers, table walks, TLBs, invalidation, and the
//! rules.
//!
//! Everything here is an operation at one instant: what a CPU or its table walker does between two
//! looks of any other. *When* these instants come is the business of two drivers: the machine puts
//! them in the order of virtual time, perturbed by a seed, and the litmus explorer tries all
//! orders. Both drive the same model.
//!
//! # What is visible when
//!
//! Memory is coherent: what is in it, every CPU and every walker sees. A store waits in the buffer
//! of its CPU first, where only that CPU's own loads find it; its walker does not look there.
//! Stores leave the buffer in any order but that of one address and of barriers between them (on
//! x86, in order), at any time, and at the latest when a DSB, or an atomic access, demands it. (DDI
//! 0487 B2.3, D8.2.6; SDM vol. 3A 9.2.2. The published tests `CoWTf.inv`, `MP.RTf`, `ROT`.)
//!
//! A translation may be made *early*: before accesses that come first in program order, and used
//! later. A context synchronisation event of the CPU discards it, and so does the completion of an
//! invalidation by another CPU, which waits for accesses that are under way. (`I2V-UP-DSB`,
//! `CoWinvT.EL1+dsb-tlbi-dsb`, `MP+shoot`.)
//!
//! A walk reads one descriptor at a time and may be overtaken by anything. If an invalidation that
//! covers its address takes effect meanwhile, it starts again.
//!
//! With a stage 1 of guests above stage 2, these are the units of stage 2; what a guest's access
//! goes through is in `guest`.

mod adversary;
mod cache;
mod changes;
mod guest;
mod image;
mod invalidation;
mod links;
mod modification;
mod request;
mod stores;
mod translation;

use cache::Caches;
use guest::Guest;
pub(crate) use guest::KnownFirst;
pub(crate) use image::Image;
use links::{Aliases, Below};
use modification::Modifications;
use request::{CLEAN, EXECUTE, READ, USER, WRITE};
pub use request::{Cause, Fault, Look, Request, Translated, Walking, Want};

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use tablewright_walker::{Denied, Descriptor, Regime, decode};

use crate::architecture::{Architecture, Bits};
use crate::dice::Dice;
use crate::memory::{Memory, Meta, ROOT, State};
use crate::rules::{Cpus, Obligation, Obligations, Rule, Violation};
use crate::sched::{Scheduler, is_cut_short};
use crate::time::{MAX_CPUS, Time};
use crate::tlb::{Cached, Invalidations, Remembered, Tlb, Tlbi, WalkCache};
use crate::trace::{Event, Tracer};

/// A translation that was made early, or the lack of one.
#[derive(Clone, Copy)]
struct Early {
    request: Request,
    result: Result<Translated, Fault>,
}

/// A store on its way to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Buffered {
    pub pa: u64,
    pub value: u64,
    /// The word before, for the program that stored, if rules are checked.
    before: u64,
    /// Stores of an earlier group leave first.
    group: u32,
}

/// A root in a translation table register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Root {
    table: u64,
    id: u16,
    space: u16,
}

/// A contiguous run: space, first and last address, levels below.
type Run = (u16, (u64, u64), u8);

/// A CPU's use of what it remembers.
///
/// ```
/// use tablewright_machine::{Architecture, CpuState, Machine, Memory, Setup};
/// let machine = Machine::new(Setup::new(Architecture::x86_64(4), Memory::new(4, 12, 0)));
/// machine.set_state(CpuState::Lazy);
/// machine.set_state(CpuState::Active);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuState {
    /// It uses the space that it has loaded.
    #[default]
    Active,
    /// The program does not, until it says that it does. Walkers go on by themselves: tables have
    /// to be forgotten.
    Lazy,
    /// It does not run, and nor do its walkers: a virtual processor that was taken off.
    Stopped,
}

/// The state of one CPU.
struct Core {
    /// Lower and upper half; on x86 both are the same.
    roots: [Cell<Option<Root>>; 2],
    /// The first of them that walks may use until the context is synchronised; of the explorer.
    before: Cell<Option<Root>>,
    state: Cell<CpuState>,
    tlb: Tlb,
    cache: WalkCache,
    buffer: RefCell<Vec<Buffered>>,
    group: Cell<u32>,
    /// Invalidations issued and not complete, and whether each has taken effect already.
    pending: RefCell<Vec<(Tlbi, bool)>>,
    early: RefCell<Vec<Early>>,
    /// A speculative walk that has been left half-way.
    speculative: Cell<Option<Walking>>,
    /// Contiguous runs that were changed since the last barrier: space, addresses, levels below.
    runs: Cell<Vec<Run>>,
    /// An access under way, translated and not done, and when it will be.
    under_way: Cell<Option<(Translated, Time)>>,
    /// Which pages of the guest it makes dirty, it logs.
    modifications: Cell<Modifications>,
    /// Stage 1 of the guest that it runs, if guests have one.
    guest: Guest,
}

impl Core {
    /// A member of a contiguous run was changed, which has to be whole again at the next barrier.
    fn touch_run(&self, space: u16, run: (u64, u64), depth: u8) {
        let mut runs = self.runs.take();
        if runs.last() != Some(&(space, run, depth)) {
            runs.push((space, run, depth));
        }
        self.runs.set(runs);
    }
}

/// A space that the machine knows.
#[derive(Clone, Debug)]
struct Space {
    root: Option<(u64, bool)>,
    id: u16,
    /// CPUs that have loaded it. Of a space that is tracked, those that have not left it since.
    cpus: Vec<u64>,
    /// The program knows which CPUs have it loaded, and tells no others: one that has left it does
    /// not use what it remembers before it has loaded it again.
    tracked: bool,
}

impl Space {
    fn has(&self, cpu: u16) -> bool {
        self.cpus[usize::from(cpu) / 64] >> (cpu % 64) & 1 != 0
    }
}

/// An entry in memory.
pub(crate) struct Spot<'h> {
    pub pa: u64,
    meta: &'h Meta,
    pub state: State,
}

/// How a store is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Plain,
    Release,
    Atomic,
}

/// See the head of this file.
pub struct Hardware {
    pub(crate) architecture: Architecture,
    pub(crate) memory: Memory,
    /// Levels below the root.
    top: u8,
    /// The number of the level of pages, and what is added to it for each level above: arm64 counts
    /// from the root, x86 from the pages.
    last_level: i8,
    level_step: i8,
    index_bits: u32,
    bits: Bits,
    /// Virtual addresses of guests that were worked on lately.
    guests: Dice,
    /// Bits of the address in a leaf of pages, if it stands where it stands in the address.
    address_mask: Option<u64>,
    /// The distance of a page's last byte from its first.
    last_byte: u64,
    cores: Box<[Core]>,
    /// How often each has published. As many as there may be: an index that is the CPU of a key
    /// needs no check.
    epochs: Box<[Cell<u32>; MAX_CPUS]>,
    spaces: RefCell<Vec<Space>>,
    invalidations: Invalidations,
    obligations: RefCell<Obligations>,
    /// Flags that hardware has set and no software has seen, by the address of the entry.
    unseen: RefCell<HashMap<u64, u64>>,
    /// Tables that are linked more than once.
    aliases: Aliases,
    /// CPUs that have loaded a root: they may remember what is global.
    loaded: RefCell<Vec<bool>>,
    /// Memory that must not be mapped, in order.
    forbidden: RefCell<Vec<(u64, u64)>>,
    /// A range between two of them, the last that was looked up.
    allowed: Cell<(u64, u64)>,
    /// Pairs of pages that hold the same.
    alike: RefCell<Vec<(u64, u64)>>,
    pub(crate) caches: Caches,
    /// Stores wait in buffers.
    pub(crate) buffering: Cell<bool>,
    /// The walker that works now leaves the access flag, or the dirty state, to software, whatever
    /// those of the machine do.
    pub(crate) leaves: Cell<(bool, bool)>,
    /// Something has to be looked at at each store besides the entry itself.
    wary: Cell<bool>,
    pub(crate) dice: Dice,
    /// Members of contiguous runs are remembered one by one.
    alone: Cell<bool>,
    /// Rules are checked. Litmus tests break them on purpose.
    judging: Cell<bool>,
    violations: RefCell<Vec<Violation>>,
    pub(crate) tracer: Tracer,
    clock: Option<Rc<Scheduler>>,
    seed: u64,
}

/// A store buffer holds so many stores. The oldest makes room.
const MOST_BUFFERED: usize = 64;

/// More than these are not kept: the first one matters.
const MOST_VIOLATIONS: usize = 64;

impl Hardware {
    /// Builds a number of CPUs around one memory. With a scheduler, violations say when.
    pub(crate) fn new(
        architecture: Architecture,
        cpus: usize,
        memory: Memory,
        seed: u64,
        clock: Option<Rc<Scheduler>>,
    ) -> Self {
        let regime = architecture.regime;
        let core = |_| Core {
            roots: [Cell::new(None), Cell::new(None)],
            before: Cell::new(None),
            state: Cell::default(),
            tlb: Tlb::new(architecture.tlb_sets, architecture.tlb_ways),
            cache: WalkCache::new(architecture.walk_cache),
            buffer: RefCell::default(),
            group: Cell::new(0),
            pending: RefCell::default(),
            early: RefCell::default(),
            speculative: Cell::new(None),
            runs: Cell::default(),
            under_way: Cell::new(None),
            modifications: Cell::default(),
            guest: Guest::default(),
        };
        Self {
            memory,
            bits: Bits::of(&architecture),
            guests: Dice::new(seed),
            top: (regime.start_level() - regime.last_level()).unsigned_abs(),
            last_level: regime.last_level(),
            level_step: if regime.start_level() > regime.last_level() { 1 } else { -1 },
            index_bits: regime.page_shift() - 3,
            address_mask: match regime {
                Regime::Arm64Stage1 { granule, wide: false } => {
                    Some((1 << 48) - (1 << granule.page_shift()))
                }
                Regime::X86_64 { .. } => Some((1 << 52) - (1 << 12)),
                _ => None,
            },
            last_byte: (1 << regime.page_shift()) - 1,
            cores: (0..cpus).map(core).collect(),
            epochs: Box::new(std::array::from_fn(|_| Cell::new(1))),
            spaces: RefCell::default(),
            invalidations: Invalidations::new(),
            obligations: RefCell::default(),
            unseen: RefCell::default(),
            aliases: Aliases::default(),
            loaded: RefCell::new(vec![false; cpus]),
            forbidden: RefCell::default(),
            allowed: Cell::new((0, u64::MAX)),
            alike: RefCell::default(),
            caches: Caches::new(&architecture),
            buffering: Cell::new(seed != 0),
            leaves: Cell::new((false, false)),
            wary: Cell::new(seed != 0),
            dice: Dice::new(seed),
            alone: Cell::new(false),
            judging: Cell::new(true),
            violations: RefCell::default(),
            tracer: Tracer::default(),
            clock,
            seed,
            architecture,
        }
    }

    /// How many CPUs there are.
    pub fn cpus(&self) -> usize {
        self.cores.len()
    }

    fn level(&self, depth: u8) -> i8 {
        self.last_level + self.level_step * depth as i8
    }

    fn depth(&self, level: i8) -> u8 {
        (level - self.last_level).unsigned_abs()
    }

    /// Bits of the addresses that an entry of a table with `depth` levels below translates.
    #[inline(always)]
    fn shift(&self, depth: u8) -> u32 {
        self.memory.page_shift() + self.index_bits * u32::from(depth)
    }

    fn decode(&self, depth: u8, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        let regime = self.architecture.regime;
        decode(regime, self.level(depth), va, denied, descriptor)
    }

    fn is_valid(&self, descriptor: u64) -> bool {
        descriptor & self.bits.valid != 0
    }

    fn half(&self, va: u64) -> usize {
        usize::from(va >> 63 != 0)
    }

    // ---- Violations ----

    #[cold]
    #[inline(never)]
    pub(crate) fn violate(&self, rule: Rule, cpu: usize, what: String) {
        if is_cut_short() {
            return;
        }
        let time = self.clock.as_ref().map_or(Time::ZERO, |s| s.cpu().now());
        let violation = Violation {
            rule,
            what,
            cpu,
            time,
            seed: self.seed,
            version: env!("CARGO_PKG_VERSION"),
        };
        self.tracer.emit(cpu, time, || Event::Violation { rule, what: violation.what.clone() });
        let mut violations = self.violations.borrow_mut();
        if violations.len() < MOST_VIOLATIONS {
            violations.push(violation);
        }
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.violations.borrow().clone()
    }

    #[inline(always)]
    pub(crate) fn trace(&self, cpu: usize, event: impl FnOnce() -> Event) {
        if self.tracer.is_on() {
            self.write_trace(cpu, event);
        }
    }

    #[cold]
    #[inline(never)]
    fn write_trace(&self, cpu: usize, event: impl FnOnce() -> Event) {
        let time = self.clock.as_ref().map_or(Time::ZERO, |s| s.cpu().now());
        self.tracer.emit(cpu, time, event);
    }

    /// Recomputes whether stores may take the short way.
    pub(crate) fn look_around(&self) {
        let wary = self.seed != 0
            || self.buffering.get()
            || self.tracer.is_on()
            || !self.obligations.borrow().is_empty()
            || !self.unseen.borrow().is_empty();
        self.wary.set(wary);
    }

    // ---- Spaces ----

    /// A number for a space to come.
    pub(crate) fn new_space(&self) -> u16 {
        let mut spaces = self.spaces.borrow_mut();
        spaces.push(Space {
            root: None,
            id: 0,
            cpus: vec![0; self.cores.len().div_ceil(64)],
            tracked: false,
        });
        (spaces.len() - 1) as u16
    }

    /// The tables under `root` become the tables of a space.
    pub(crate) fn attach(&self, cpu: usize, space: u16, root: u64, upper: bool, id: u16) {
        let taken = self.spaces.borrow().iter().enumerate().any(|(other, s)| {
            other != usize::from(space)
                && s.id == id
                && s.root.is_some_and(|(_, half)| half == upper)
        });
        let remembered = self
            .obligations
            .borrow()
            .iter()
            .any(|o| o.id == id && o.space != space && o.span == (0, u64::MAX));
        // Under which identifier a tracked space is loaded is said, and looked at, then.
        let tracked = self.spaces.borrow()[usize::from(space)].tracked;
        if (taken || remembered) && !tracked {
            let why = if taken {
                "another space has it"
            } else {
                "entries of another space may be remembered under it"
            };
            self.violate(
                Rule::IdentifierReused,
                cpu,
                format!("identifier {id} for the space with root {root:#x}: {why}"),
            );
        }
        {
            let mut spaces = self.spaces.borrow_mut();
            let space = &mut spaces[usize::from(space)];
            space.root = Some((root, upper));
            space.id = id;
        }
        let first = self.first_address(upper);
        for (table, first) in self.first_tables(root, first) {
            self.make_live(cpu, table, ROOT, (space, first), self.top, How::Release);
        }
    }

    /// The first address of a half.
    fn first_address(&self, upper: bool) -> u64 {
        if upper && !self.architecture.family().one_root {
            u64::MAX << self.architecture.regime.input_bits()
        } else {
            0
        }
    }

    /// The first tables, more than one where they are concatenated, and the first address of each.
    fn first_tables(&self, root: u64, first: u64) -> impl Iterator<Item = (u64, u64)> {
        let regime = self.architecture.regime;
        let entries = self.memory.entries();
        let tables = regime.table_entries(self.level(self.top)).div_ceil(entries) as u64;
        let (page, bits) = (self.memory.page_shift(), self.shift(self.top) + self.index_bits);
        (0..tables).map(move |n| (root + (n << page), first.wrapping_add(n.wrapping_shl(bits))))
    }

    /// The space is not used any more. What is remembered of it remains.
    pub(crate) fn detach(&self, cpu: usize, space: u16) {
        let (root, id) = {
            let mut spaces = self.spaces.borrow_mut();
            let space = &mut spaces[usize::from(space)];
            (space.root.take(), space.id)
        };
        let Some((root, upper)) = root else { return };
        let tracked = self.spaces.borrow()[usize::from(space)].tracked;
        if tracked {
            self.abandon(cpu, space);
        }
        for core in &self.cores {
            for half in &core.roots {
                if half.get().is_some_and(|root| root.space == space) {
                    half.set(None);
                }
            }
        }
        let number = self.obligations.borrow_mut().number();
        let mut below = Below::of_a_root(self.shift(self.top + 1));
        for (table, first) in self.first_tables(root, self.first_address(upper)) {
            if !self.is_root(table) {
                self.make_detached(table, ROOT, (space, first), self.top, number, &mut below);
            }
        }
        let owed = Obligation {
            number,
            space,
            id,
            global: false,
            span: (0, u64::MAX),
            depth: self.top + 1,
            table: true,
            detached: true,
            leaves: below.leaves,
            unit: below.unit,
            scattered: false,
            contiguous: false,
            pa: root,
            raw: 0,
            writer: cpu as u16,
            cutter: None,
            published: true,
            harmless: true,
            issued: Cpus::default(),
            local: Vec::new(),
            claimed: None,
            combined: self.architecture.guest.is_some(),
            second: None,
            looks: 0,
        };
        if let Some(global) = below.owed(&owed) {
            self.obligations.borrow_mut().add(global);
        }
        if !tracked {
            self.obligations.borrow_mut().add(owed);
        }
        self.look_around();
    }

    /// Loads the root of a space into the register of its half. A context synchronisation event.
    pub(crate) fn load_root(&self, cpu: usize, space: u16) {
        let mut spaces = self.spaces.borrow_mut();
        let state = &mut spaces[usize::from(space)];
        let Some((table, upper)) = state.root else {
            return;
        };
        let first = state.cpus.iter().all(|&word| word == 0);
        state.cpus[cpu / 64] |= 1 << (cpu % 64);
        self.loaded.borrow_mut()[cpu] = true;
        let root = Some(Root { table, id: state.id, space });
        drop(spaces);
        if first && self.is_unordered(cpu, table) {
            self.violate(
                Rule::LinkedEarly,
                cpu,
                format!(
                    "the root at {table:#x} is loaded, and no barrier makes the stores to its \
                     entries visible before that"
                ),
            );
        }
        let core = &self.cores[cpu];
        let half = if self.architecture.family().one_root {
            core.roots[0].set(root);
            core.roots[1].set(root);
            "both"
        } else {
            core.roots[usize::from(upper)].set(root);
            if upper { "upper" } else { "lower" }
        };
        self.trace(cpu, || Event::Root {
            root: root.map(|root| (root.table, root.id)),
            half,
            guest: false,
        });
        self.synchronise(cpu);
    }

    /// No CPU may have a tracked space loaded that is detached; then none uses what was owed.
    fn abandon(&self, cpu: usize, space: u16) {
        let left = (0..self.cores.len()).find(|&other| self.uses(other, space, true));
        if let Some(other) = left {
            let what = format!("a space is taken down that CPU {other} has loaded");
            self.violate(Rule::FreedEarly, cpu, what);
        }
        self.obligations.borrow_mut().drop_of(space);
    }

    pub(crate) fn track(&self, space: u16) {
        self.spaces.borrow_mut()[usize::from(space)].tracked = true;
    }

    /// Loads the root of a tracked space, under this identifier.
    pub(crate) fn load_tracked(&self, cpu: usize, space: u16, id: u16) {
        let before = std::mem::replace(&mut self.spaces.borrow_mut()[usize::from(space)].id, id);
        if before != id {
            self.rename(cpu, space, id);
        }
        let core = &self.cores[cpu];
        let of_another =
            |e: &Cached| e.id == id && e.space != space && !e.global && !self.is_hole(e);
        let held = core.tlb.iter(cpu, &self.invalidations).find(of_another);
        if let Some(entry) = held {
            self.violate(
                Rule::IdentifierReused,
                cpu,
                format!(
                    "identifier {id} is loaded for space {space}, and the TLB has {:#x} of space \
                     {} under it",
                    entry.first, entry.space
                ),
            );
        }
        self.end_walks(cpu);
        self.load_root(cpu, space);
    }

    /// Loading CR3 is serialising (SDM vol. 3A 9.3): walks under the root before are over.
    /// Elsewhere they may be on their way until an invalidation (PRIV 10.1.11 for satp).
    fn end_walks(&self, cpu: usize) {
        if self.architecture.is_ordered() {
            self.cores[cpu].speculative.set(None);
        }
    }

    /// A tracked space has another identifier.
    fn rename(&self, cpu: usize, space: u16, id: u16) {
        let other = (0..self.cores.len()).find(|&other| {
            let mut roots = self.cores[other].roots.iter().filter_map(Cell::get);
            roots.any(|root| root.space == space && root.id != id)
        });
        if let Some(other) = other {
            self.violate(
                Rule::IdentifierReused,
                cpu,
                format!(
                    "space {space} gets identifier {id}, and CPU {other} has it loaded under \
                     another"
                ),
            );
        }
        let drained = |o: &Obligation| {
            let buffer = &self.cores[usize::from(o.writer)].buffer;
            buffer.borrow().is_empty()
        };
        self.obligations.borrow_mut().rename(space, id, drained);
    }

    /// A CPU has loaded another root: what it remembers of the space it does not use before it
    /// loads it again.
    pub(crate) fn leave(&self, cpu: usize, space: u16) {
        self.spaces.borrow_mut()[usize::from(space)].cpus[cpu / 64] &= !(1 << (cpu % 64));
    }

    /// No root is loaded. A context synchronisation event.
    pub(crate) fn unload(&self, cpu: usize) {
        let core = &self.cores[cpu];
        core.roots.iter().for_each(|root| root.set(None));
        self.trace(cpu, || Event::Root { root: None, half: "both", guest: false });
        self.end_walks(cpu);
        self.synchronise(cpu);
    }

    pub(crate) fn set_state(&self, cpu: usize, state: CpuState) {
        self.cores[cpu].state.set(state);
    }

    /// Whether a CPU, or its walker, may use what it remembers of a space: of its tables, or of
    /// leaves.
    fn uses(&self, cpu: usize, space: u16, table: bool) -> bool {
        let spaces = self.spaces.borrow();
        let space = &spaces[usize::from(space)];
        match self.cores[cpu].state.get() {
            CpuState::Active => !space.tracked || space.has(cpu as u16),
            CpuState::Lazy => table && space.has(cpu as u16),
            CpuState::Stopped => false,
        }
    }

    /// Whether a CPU may use a leaf that it remembers.
    fn uses_leaf(&self, cpu: usize, space: u16, global: bool) -> bool {
        // With whatever space it has loaded, and in the kernel thread that makes it lazy.
        global && self.cores[cpu].state.get() != CpuState::Stopped || self.uses(cpu, space, false)
    }

    // ---- Frames ----

    pub(crate) fn take_frame(&self, cpu: usize, depth: u8) -> Option<u64> {
        let frame = self.memory.take(State::Private, depth)?;
        let pa = self.memory.address(frame);
        self.trace(cpu, || Event::Take { pa });
        Some(pa)
    }

    /// Takes a number of frames beside each other.
    pub(crate) fn take_run(
        &self,
        cpu: usize,
        count: usize,
        state: State,
        depth: u8,
    ) -> Option<u64> {
        let frame = self.memory.take_run(count, state, depth)?;
        for frame in frame..frame + count {
            let pa = self.memory.address(frame);
            self.trace(cpu, || Event::Take { pa });
        }
        Some(self.memory.address(frame))
    }

    pub(crate) fn take_page(&self, cpu: usize) -> Option<u64> {
        let frame = self.memory.take(State::Data, 0)?;
        let pa = self.memory.address(frame);
        self.trace(cpu, || Event::Take { pa });
        Some(pa)
    }

    /// A table or a page is given back.
    pub(crate) fn give_frame(&self, cpu: usize, pa: u64) {
        self.trace(cpu, || Event::Give { pa });
        let Some(frame) = self.memory.frame_at(pa) else {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!("{pa:#x} is given back, which is no memory"),
            );
            return;
        };
        let meta = self.memory.meta(frame);
        let reachable = match meta.state.get() {
            State::Free => Some("it was given back already".to_owned()),
            State::Live => Some(format!("an entry for {:#x} leads to it", meta.first.get())),
            State::Private => None,
            State::Detached => {
                let obligations = self.obligations.borrow();
                let last = obligations.under(meta.cut.get());
                let last = last.filter(|_| !self.is_parted(pa));
                let before = || self.cuts_before(pa).find_map(|cut| obligations.under(cut));
                last.or_else(before).map(|o| {
                    format!("walkers may remember the table for {:#x}: {}", o.span.0, progress(o))
                })
            }
            State::Data => {
                let memory = (pa, pa + ((1 << self.memory.page_shift()) - 1));
                let obligations = self.obligations.borrow();
                obligations.leading_to(memory).map(|o| {
                    format!(
                        "TLBs may hold the translation of {:#x} to it: {}",
                        o.span.0,
                        progress(o)
                    )
                })
            }
        };
        let twice = meta.state.get() == State::Free;
        match reachable {
            Some(why) => {
                self.violate(
                    Rule::FreedEarly,
                    cpu,
                    format!("the frame at {pa:#x} is given back too early: {why}"),
                );
            }
            None if self.dice.is_on() => self.check_forgotten(cpu, pa),
            None => {}
        }
        if !twice {
            self.forget_links(pa);
            self.memory.give(frame);
        }
    }

    /// No CPU remembers a frame that may be given back. By then the list of obligations says so;
    /// this looks.
    fn check_forgotten(&self, cpu: usize, pa: u64) {
        let page = 1u64 << self.memory.page_shift();
        for (other, core) in self.cores.iter().enumerate() {
            let mut tlb = core.tlb.iter(other, &self.invalidations);
            // The map of all memory leads to free memory as well, and still says so.
            let held = tlb.find(|e| {
                let leads = e.pa < pa + page && pa < e.pa + (1 << e.bits);
                leads
                    && !self.is_hole(e)
                    && !self.still_says(e)
                    && self.uses_leaf(other, e.space, e.global)
            });
            let known = core.cache.iter().find(|known| {
                let remembered = known.table == pa && self.is_remembered(other, known);
                remembered && self.uses(other, known.space, true)
            });
            let combined = self.combined_with(other, pa, pa + page);
            if let Some(entry) = held.or(combined) {
                self.violate(
                    Rule::StaleUse,
                    cpu,
                    format!(
                        "the TLB of CPU {other} still leads from {:#x} to {pa:#x}",
                        entry.first
                    ),
                );
            }
            if let Some(known) = known {
                self.violate(
                    Rule::StaleUse,
                    cpu,
                    format!(
                        "the walk cache of CPU {other} still leads from {:#x} to {pa:#x}",
                        known.first
                    ),
                );
            }
        }
    }

    /// Whether the descriptor that an entry was made of is still there, and leads to the same
    /// memory.
    fn still_says(&self, entry: &Cached) -> bool {
        let live = self
            .memory
            .frame_at(entry.at)
            .is_some_and(|frame| self.memory.meta(frame).state.get() == State::Live);
        let now = self.memory.read(entry.at);
        let leaf = |raw| match self.decode(entry.depth, entry.first, Denied::default(), raw) {
            Descriptor::Leaf(leaf) => Some(leaf.pa),
            _ => None,
        };
        live && leaf(now).is_some() && leaf(now) == leaf(entry.raw)
    }

    fn is_remembered(&self, cpu: usize, known: &Remembered) -> bool {
        let bits = self.shift(known.depth) + self.index_bits;
        let span = (known.first, known.first + ((1u64 << bits) - 1));
        let inv = &self.invalidations;
        inv.spare(cpu, known.stamp, known.id, false, span, known.depth + 1, true)
    }

    // ---- The end ----

    /// Hardware does nothing unasked from here on, and stores do not wait.
    pub(crate) fn calm(&self) {
        self.dice.stop();
        (0..self.cores.len()).for_each(|cpu| self.drain(cpu));
        self.buffering.set(false);
    }

    /// Drains the store buffers, and reports each change that is left to invalidate.
    pub(crate) fn finish(&self, cpu: usize) {
        for other in 0..self.cores.len() {
            self.drain(other);
        }
        let left: Vec<_> = {
            let obligations = self.obligations.borrow();
            obligations.iter().filter(|o| !o.harmless).cloned().collect()
        };
        for o in left {
            self.violate(
                Rule::NeverInvalidated,
                cpu,
                format!(
                    "the {} of {:#x}..={:#x} at level {} was changed: {}",
                    if o.table { "table" } else { "translation" },
                    o.span.0,
                    o.span.1,
                    self.level(o.depth),
                    progress(&o)
                ),
            );
        }
        self.obligations.borrow_mut().clear();
        self.look_around();
    }

    /// Two pages hold the same bytes, and neither is written: as when equal pages are merged.
    pub(crate) fn declare_alike(&self, a: u64, b: u64) {
        self.alike.borrow_mut().push((a, b));
    }
}

/// Flags in the form of `flags`.
const ACCESSED: u64 = 1;
const DIRTY: u64 = 2;

/// How far an obligation has come, in words.
fn progress(o: &Obligation) -> &'static str {
    if !o.issued.is_empty() {
        "the invalidation is issued and not complete"
    } else if !o.published {
        "the change is not even visible to walkers"
    } else if !o.local.is_empty() {
        "not every CPU has been told"
    } else if o.is_second_done() {
        "what was combined with the guest's stage 1 is not invalidated"
    } else {
        "no invalidation that covers it was issued"
    }
}

//! The memory management units of all CPUs: store buffers, table walks, TLBs, invalidation, and the rules.
//!
//! Everything here is an operation at one moment: what a CPU or its table walker does between two looks of anybody else.
//! *When* these moments come is the business of two drivers: the machine puts them in the order of virtual time,
//! perturbed by a seed, and the litmus explorer tries all orders. Both drive the same
//! model.
//!
//! # What is visible when
//!
//! Memory is coherent: what is in it, every CPU and every walker sees. A store waits in the buffer of its CPU first,
//! where only that CPU's own loads find it; its walker does not look there. Stores leave the buffer in any order but
//! that of one address and of barriers between them (on x86, in order), at any time, and at the latest when a DSB, or an
//! atomic access, demands it. (DDI 0487 B2.3, D8.2.6; SDM vol. 3A 9.2.2. The published tests `CoWTf.inv`,
//! `MP.RTf`, `ROT`.)
//!
//! A translation may be made *early*: before accesses that come first in program order, and used later. A context
//! synchronisation event of the CPU discards it, and so does the completion of an invalidation by another CPU, which
//! waits for accesses that are under way. (`I2V-UP-DSB`, `CoWinvT.EL1+dsb-tlbi-dsb`, `MP+shoot`.)
//!
//! A walk reads one descriptor at a time and may be overtaken by anything. If an invalidation that covers its address
//! takes effect meanwhile, it starts again.

mod image;

pub(crate) use image::Image;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use tablewright_walker::{
    Denied, Descriptor, Fault as WalkFault, Leaf, Regime, Walk, decode, with_access_flag,
    with_dirty,
};

use crate::architecture::{Architecture, Ordering};
use crate::cache::Caches;
use crate::dice::Dice;
use crate::memory::{Memory, Meta, POISON, State};
use crate::rules::{
    HARDWARE_FLAGS, Obligation, Obligations, Rule, Violation, is_harmless, may_be_remembered,
    needs_break,
};
use crate::sched::Scheduler;
use crate::time::Time;
use crate::tlb::{Cached, Invalidations, Remembered, Tlb, Tlbi, WalkCache};
use crate::trace::{Event, Tracer};

// Rights in a TLB entry.
const READ: u8 = 1;
const WRITE: u8 = 2;
const EXECUTE: u8 = 4;
/// The same for user mode, shifted.
const USER: u8 = 3;
/// The first write has to set the dirty state in memory.
const CLEAN: u8 = 64;

// Flags of an arm64 leaf that hardware manages (DDI 0487 D8.3.1): accessed, and AP\[2\], clear when dirty.
const ARM_AF: u64 = 1 << 10;
const ARM_READ_ONLY: u64 = 1 << 7;
/// The same of an x86-64 leaf: accessed and dirty (SDM vol. 3A 5.8).
const X86_FLAGS: u64 = 0x60;

/// An access that a program makes.
///
/// ```
/// use tablewright_machine::{Request, Want};
/// let store = Request { va: 0x1000, want: Want::Write, user: false };
/// assert_eq!(Request::write(0x1000), store);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Where.
    pub va: u64,
    /// What for.
    pub want: Want,
    /// With the rights of an application.
    pub user: bool,
}

impl Request {
    /// A load by the kernel.
    pub const fn read(va: u64) -> Self {
        Self {
            va,
            want: Want::Read,
            user: false,
        }
    }
    /// A store by the kernel.
    pub const fn write(va: u64) -> Self {
        Self {
            va,
            want: Want::Write,
            user: false,
        }
    }
    /// An instruction fetch by the kernel.
    pub const fn execute(va: u64) -> Self {
        Self {
            va,
            want: Want::Execute,
            user: false,
        }
    }
    /// The same by an application.
    #[must_use]
    pub const fn by_user(self) -> Self {
        Self { user: true, ..self }
    }

    fn right(self) -> u8 {
        let right = match self.want {
            Want::Read => READ,
            Want::Write => WRITE,
            Want::Execute => EXECUTE,
        };
        if self.user { right << USER } else { right }
    }
}

/// What an access is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

/// Why an access has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Not mapped, found at a descriptor with so many levels below it.
    Translation {
        /// Levels below.
        depth: u8,
    },
    /// The access flag is clear, and software sets it.
    AccessFlag {
        /// Levels below.
        depth: u8,
    },
    /// Mapped without this right.
    Permission {
        /// Levels below.
        depth: u8,
    },
    /// No address of a space that is loaded.
    Address,
}

/// An access that has been translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Translated {
    request: Request,
    entry: Cached,
    generation: u32,
}

impl Translated {
    /// The physical address.
    pub fn pa(&self) -> u64 {
        self.entry.pa(self.request.va)
    }

    /// The access.
    pub(crate) fn request(&self) -> Request {
        self.request
    }

    /// Whether an invalidation is about it.
    pub(crate) fn is_covered(&self, tlbi: &Tlbi) -> bool {
        let e = &self.entry;
        tlbi.covers(e.id, e.global, e.span(), e.depth, false)
    }
}

/// A walk under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walking {
    request: Request,
    walk: Walk,
    stamp: u64,
    id: u16,
    space: u16,
}

/// What comes of the look for a translation.
#[derive(Clone, Copy, Debug)]
pub enum Look {
    /// There is one.
    Found(Translated),
    /// There is none.
    Fault(Fault),
    /// A walk has to go on.
    Walking(Walking),
}

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
    /// What was there for the program that stored, if rules are checked.
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

/// What one CPU has.
struct Core {
    /// Lower and upper half; on x86 both are the same.
    roots: [Cell<Option<Root>>; 2],
    tlb: Tlb,
    cache: WalkCache,
    buffer: RefCell<Vec<Buffered>>,
    group: Cell<u32>,
    /// Publications so far.
    epoch: Cell<u32>,
    /// Invalidations issued and not complete, and whether each has taken effect already.
    pending: RefCell<Vec<(Tlbi, bool)>>,
    early: RefCell<Vec<Early>>,
    /// A speculative walk that has been left half-way.
    speculative: Cell<Option<Walking>>,
    /// Contiguous runs that were changed since the last barrier: space, addresses, levels below.
    runs: Cell<Vec<Run>>,
    /// An access under way, translated and not done, and when it will be.
    under_way: Cell<Option<(Translated, Time)>>,
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
    /// CPUs that have loaded it.
    cpus: Vec<u64>,
}

impl Space {
    fn has(&self, cpu: u16) -> bool {
        self.cpus[usize::from(cpu) / 64] >> (cpu % 64) & 1 != 0
    }
}

/// An entry in memory.
pub(crate) struct Spot<'h> {
    pub pa: u64,
    frame: usize,
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
    index_bits: u32,
    /// Where the address stands in a leaf of pages, if it stands where it stands in the address.
    address_mask: Option<u64>,
    cores: Box<[Core]>,
    spaces: RefCell<Vec<Space>>,
    invalidations: Invalidations,
    obligations: RefCell<Obligations>,
    /// Flags that hardware has set and no software has seen, by the address of the entry.
    unseen: RefCell<HashMap<u64, u64>>,
    /// Memory that must not be mapped, in order.
    forbidden: RefCell<Vec<(u64, u64)>>,
    /// A range between two of them, the last that was looked up.
    allowed: Cell<(u64, u64)>,
    /// Pairs of pages that hold the same.
    alike: RefCell<Vec<(u64, u64)>>,
    pub(crate) caches: Caches,
    /// Stores wait in buffers.
    pub(crate) buffering: Cell<bool>,
    /// Something has to be looked at at each store besides the entry itself.
    wary: Cell<bool>,
    pub(crate) dice: Dice,
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
    /// So many CPUs around one memory. With a scheduler, violations say when.
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
            tlb: Tlb::new(architecture.tlb_sets, architecture.tlb_ways),
            cache: WalkCache::new(architecture.walk_cache),
            buffer: RefCell::default(),
            group: Cell::new(0),
            epoch: Cell::new(1),
            pending: RefCell::default(),
            early: RefCell::default(),
            speculative: Cell::new(None),
            runs: Cell::default(),
            under_way: Cell::new(None),
        };
        Self {
            memory,
            top: (regime.start_level() - regime.last_level()).unsigned_abs(),
            index_bits: regime.page_shift() - 3,
            address_mask: match regime {
                Regime::Arm64Stage1 {
                    granule,
                    wide: false,
                } => Some((1 << 48) - (1 << granule.page_shift())),
                Regime::X86_64 { .. } => Some((1 << 52) - (1 << 12)),
                _ => None,
            },
            cores: (0..cpus).map(core).collect(),
            spaces: RefCell::default(),
            invalidations: Invalidations::new(),
            obligations: RefCell::default(),
            unseen: RefCell::default(),
            forbidden: RefCell::default(),
            allowed: Cell::new((0, u64::MAX)),
            alike: RefCell::default(),
            caches: Caches::new(&architecture),
            buffering: Cell::new(seed != 0),
            wary: Cell::new(seed != 0),
            dice: Dice::new(seed),
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
        let last = self.architecture.regime.last_level();
        // arm64 counts from the root, x86 from the pages.
        if self.architecture.is_x86() {
            last + depth as i8
        } else {
            last - depth as i8
        }
    }

    fn depth(&self, level: i8) -> u8 {
        (level - self.architecture.regime.last_level()).unsigned_abs()
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

    fn half(&self, va: u64) -> usize {
        usize::from(va >> 63 != 0)
    }

    // ---- Violations ----

    #[cold]
    #[inline(never)]
    pub(crate) fn violate(&self, rule: Rule, cpu: usize, what: String) {
        let time = self.clock.as_ref().map_or(Time::ZERO, |s| s.cpu().now());
        let violation = Violation {
            rule,
            what,
            cpu,
            time,
            seed: self.seed,
            version: env!("CARGO_PKG_VERSION"),
        };
        self.tracer.emit(cpu, time, || Event::Violation {
            rule,
            what: violation.what.clone(),
        });
        let mut violations = self.violations.borrow_mut();
        if violations.len() < MOST_VIOLATIONS {
            violations.push(violation);
        }
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.violations.borrow().clone()
    }

    pub(crate) fn trace(&self, cpu: usize, event: impl FnOnce() -> Event) {
        if self.tracer.is_on() {
            let time = self.clock.as_ref().map_or(Time::ZERO, |s| s.cpu().now());
            self.tracer.emit(cpu, time, event);
        }
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
        if taken || remembered {
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
        let x86 = self.architecture.is_x86();
        let first = if upper && !x86 {
            u64::MAX << self.architecture.regime.input_bits()
        } else {
            0
        };
        self.make_live(cpu, root, first, self.top, space, How::Release);
    }

    /// The space is not used any more. What is remembered of it remains.
    pub(crate) fn detach(&self, cpu: usize, space: u16) {
        let (root, id) = {
            let mut spaces = self.spaces.borrow_mut();
            let space = &mut spaces[usize::from(space)];
            (space.root.take(), space.id)
        };
        let Some((root, _)) = root else { return };
        for core in &self.cores {
            for half in &core.roots {
                if half.get().is_some_and(|root| root.space == space) {
                    half.set(None);
                }
            }
        }
        let number = self.obligations.borrow_mut().number();
        self.make_detached(root, self.top, number);
        self.obligations.borrow_mut().add(Obligation {
            number,
            space,
            id,
            global: false,
            span: (0, u64::MAX),
            depth: self.top + 1,
            table: true,
            contiguous: false,
            pa: root,
            raw: 0,
            writer: cpu as u16,
            published: true,
            harmless: true,
            issued: Vec::new(),
            local: Vec::new(),
            claimed: None,
        });
        self.look_around();
    }

    /// Loads the root of a space into the register of its half. A context synchronisation event.
    pub(crate) fn load_root(&self, cpu: usize, space: u16) {
        let mut spaces = self.spaces.borrow_mut();
        let state = &mut spaces[usize::from(space)];
        let Some((table, upper)) = state.root else {
            return;
        };
        state.cpus[cpu / 64] |= 1 << (cpu % 64);
        let root = Some(Root {
            table,
            id: state.id,
            space,
        });
        drop(spaces);
        let core = &self.cores[cpu];
        if self.architecture.is_x86() {
            core.roots[0].set(root);
            core.roots[1].set(root);
        } else {
            core.roots[usize::from(upper)].set(root);
        }
        self.synchronise(cpu);
    }

    // ---- Links ----

    /// A table becomes reachable, and all below it.
    fn make_live(&self, cpu: usize, table: u64, first: u64, depth: u8, space: u16, how: How) {
        let Some(frame) = self.memory.frame_at(table) else {
            self.violate(
                Rule::WalkAstray,
                cpu,
                format!("a table descriptor leads to {table:#x}, which is no memory"),
            );
            return;
        };
        let meta = self.memory.meta(frame);
        match meta.state.get() {
            State::Private | State::Detached => {}
            // Reachable twice: from two roots, or two entries.
            State::Live => return,
            state @ (State::Free | State::Data) => {
                self.violate(
                    Rule::WalkAstray,
                    cpu,
                    format!("a table descriptor leads to {table:#x}, which is {state:?}"),
                );
                return;
            }
        }
        if meta.state.get() == State::Private {
            let unordered = how == How::Plain
                && !self.architecture.is_x86()
                && usize::from(meta.writer.get()) == cpu
                && meta.epoch.get() == self.cores[cpu].epoch.get();
            if unordered {
                self.violate(
                    Rule::LinkedEarly,
                    cpu,
                    format!(
                        "the table at {table:#x} (for {first:#x}) is linked by a plain store, and no barrier orders the \
                         stores to its entries before that"
                    ),
                );
            }
        }
        meta.state.set(State::Live);
        meta.depth.set(depth);
        meta.space.set(space);
        meta.first.set(first);
        let entries = if depth == self.top {
            self.architecture.regime.table_entries(self.level(depth))
        } else {
            self.memory.entries()
        };
        // SAFETY: the entries of a frame; there is one thread, and nobody writes them while this slice lives.
        let all = unsafe { std::slice::from_raw_parts(self.memory.entry(frame, 0), entries) };
        let unwritten = all
            .iter()
            .fold(0, |n, &entry| n + usize::from(entry == POISON));
        if unwritten > 0 {
            self.violate(
                Rule::LinkedEarly,
                cpu,
                format!(
                    "the table at {table:#x} (for {first:#x}) is linked before {unwritten} of its {entries} entries \
                     are written"
                ),
            );
        }
        if depth == 0 {
            self.check_pages(cpu, all);
            return;
        }
        let shift = self.shift(depth);
        for index in 0..entries {
            // SAFETY: an entry of the frame. Read one by one: deeper levels may report, nothing writes.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if entry == POISON || entry & 1 == 0 {
                continue;
            }
            let first = self.canonical(first.wrapping_add((index as u64) << shift));
            match self.decode(depth, first, Denied::default(), entry) {
                Descriptor::Table { pa, .. } => {
                    self.make_live(cpu, pa, first, depth - 1, space, how);
                }
                Descriptor::Leaf(leaf) => self.check_allowed(cpu, leaf.pa, leaf.size),
                Descriptor::Reserved(why) => {
                    self.violate(
                        Rule::Reserved,
                        cpu,
                        format!("{entry:#x} at {first:#x}: {why}"),
                    );
                }
                Descriptor::Invalid => {}
            }
        }
    }

    /// x86: the upper half of the root translates addresses with ones above.
    fn canonical(&self, va: u64) -> u64 {
        let bits = self.architecture.regime.input_bits();
        if self.architecture.is_x86() && va >> (bits - 1) & 1 != 0 {
            va | u64::MAX << bits
        } else {
            va
        }
    }

    /// A table, and all below it, is not reachable any more but may be remembered.
    fn make_detached(&self, table: u64, depth: u8, number: u64) {
        let Some(frame) = self.memory.frame_at(table) else {
            return;
        };
        let meta = self.memory.meta(frame);
        if meta.state.get() != State::Live {
            return;
        }
        meta.state.set(State::Detached);
        meta.cut.set(number);
        if depth == 0 {
            return;
        }
        for index in 0..self.memory.entries() {
            // SAFETY: an entry of the frame.
            let entry = unsafe { self.memory.entry(frame, index).read() };
            if entry & 1 != 0
                && entry != POISON
                && let Descriptor::Table { pa, .. } =
                    self.decode(depth, 0, Denied::default(), entry)
            {
                self.make_detached(pa, depth - 1, number);
            }
        }
    }

    // ---- Memory that must not be mapped ----

    /// From now on, mapping any of this is a violation.
    pub(crate) fn forbid(&self, first: u64, last: u64) {
        let mut forbidden = self.forbidden.borrow_mut();
        forbidden.push((first, last));
        forbidden.sort_unstable();
        self.allowed.set((1, 0));
    }

    /// It may be mapped again.
    pub(crate) fn allow(&self, first: u64, last: u64) {
        let mut forbidden = self.forbidden.borrow_mut();
        let mut rest = Vec::with_capacity(forbidden.len());
        for &(from, to) in forbidden.iter() {
            if to < first || last < from {
                rest.push((from, to));
                continue;
            }
            if from < first {
                rest.push((from, first - 1));
            }
            if last < to {
                rest.push((last + 1, to));
            }
        }
        *forbidden = rest;
        self.allowed.set((1, 0));
    }

    #[inline(always)]
    fn check_allowed(&self, cpu: usize, pa: u64, size: u64) {
        let (first, last) = self.allowed.get();
        if pa < first || pa + (size - 1) > last {
            self.check_forbidden(cpu, pa, size);
        }
    }

    #[inline(never)]
    fn check_forbidden(&self, cpu: usize, pa: u64, size: u64) {
        let end = pa + (size - 1);
        let hit = {
            let forbidden = self.forbidden.borrow();
            let next = forbidden.partition_point(|&(_, last)| last < pa);
            let low = next.checked_sub(1).map_or(0, |at| forbidden[at].1 + 1);
            let high = forbidden
                .get(next)
                .map_or(u64::MAX, |&(first, _)| first.wrapping_sub(1));
            let hit = forbidden.get(next).filter(|&&(first, _)| first <= end);
            if hit.is_none() {
                self.allowed.set((low, high));
            }
            hit.copied()
        };
        if let Some((first, last)) = hit {
            self.violate(
                Rule::ForbiddenMemory,
                cpu,
                format!("{pa:#x}..={end:#x} is mapped, and {first:#x}..={last:#x} must not be"),
            );
        }
    }

    /// The leaves of a table of pages that becomes reachable.
    fn check_pages(&self, cpu: usize, entries: &[u64]) {
        let x86 = self.architecture.is_x86();
        let reserved = !x86
            && entries
                .iter()
                .fold(false, |any, entry| any | (entry & 3 == 1));
        if reserved {
            self.violate(
                Rule::Reserved,
                cpu,
                "a block descriptor in a table of pages".to_owned(),
            );
        }
        if self.forbidden.borrow().is_empty() {
            return;
        }
        let size = 1 << self.memory.page_shift();
        for &entry in entries {
            if entry & 1 == 0 || entry == POISON {
                continue;
            }
            match self.address_mask {
                Some(mask) => self.check_allowed(cpu, entry & mask, size),
                None => {
                    if let Descriptor::Leaf(leaf) = self.decode(0, 0, Denied::default(), entry) {
                        self.check_allowed(cpu, leaf.pa, leaf.size);
                    }
                }
            }
        }
    }

    // ---- Stores and loads of software ----

    /// Where in memory an entry is. `None`: not in this memory, but the program's own.
    #[inline(always)]
    pub(crate) fn spot(&self, entry: *const u64) -> Option<Spot<'_>> {
        let pa = self.memory.address_of(entry)?;
        let frame = self.memory.frame_at(pa)?;
        let meta = self.memory.meta(frame);
        Some(Spot {
            pa,
            frame,
            meta,
            state: meta.state.get(),
        })
    }

    /// A store by software to an entry of a private table.
    ///
    /// # Safety
    /// 1. `entry` is valid for writes, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn store_private(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        entry: *mut u64,
        value: u64,
    ) {
        spot.meta.writer.set(cpu as u16);
        spot.meta.epoch.set(self.cores[cpu].epoch.get());
        // SAFETY: valid by (1.).
        unsafe { entry.write(value) };
    }

    /// A store by software to an entry of a table that is not private.
    ///
    /// # Safety
    /// 1. `entry` is valid for writes, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn store(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        entry: *mut u64,
        value: u64,
        how: How,
    ) {
        if spot.meta.state.get() == State::Live
            && !self.wary.get()
            && spot.meta.depth.get() == 0
            && let Some(mask) = self.address_mask
        {
            // SAFETY: valid by (1.).
            let old = unsafe { entry.read() };
            if old & 1 == 0 {
                if value & 1 != 0 {
                    self.check_allowed(cpu, value & mask, 1 << self.memory.page_shift());
                }
                // SAFETY: valid by (1.).
                unsafe { entry.write(value) };
                return;
            }
        }
        self.store_slowly(cpu, spot.pa, spot.frame, value, how);
    }

    #[inline(never)]
    fn store_slowly(&self, cpu: usize, pa: u64, frame: usize, value: u64, how: How) {
        // Nothing comes between the two halves of an atomic access.
        if how != How::Atomic {
            self.disturb(cpu, Some(pa));
        }
        let meta = self.memory.meta(frame);
        if meta.state.get() == State::Private {
            // Another CPU's step has freed and taken it again: only a program that is wrong gets here.
            self.memory.write(pa, value);
            return;
        }
        let before = self.visible_to(cpu, pa);
        self.trace(cpu, || Event::Store {
            pa,
            value,
            before,
            how: match how {
                How::Plain => "store",
                How::Release => "release",
                How::Atomic => "exchange",
            },
        });
        if how != How::Atomic {
            self.check_flags(cpu, pa, value);
        }
        match meta.state.get() {
            State::Live => self.changed(cpu, pa, frame, before, value, how),
            State::Free => self.violate(
                Rule::FreedEarly,
                cpu,
                format!("a store to {pa:#x}, in a frame that was given back"),
            ),
            _ => {}
        }
        let core = &self.cores[cpu];
        match how {
            How::Atomic => {
                self.drain(cpu);
                self.memory.write(pa, value);
            }
            _ if !self.buffering.get() => self.memory.write(pa, value),
            _ => {
                if how == How::Release {
                    core.group.update(|group| group + 1);
                }
                core.buffer.borrow_mut().push(Buffered {
                    pa,
                    value,
                    before: if self.judging.get() { before } else { 0 },
                    group: core.group.get(),
                });
                if core.buffer.borrow().len() > MOST_BUFFERED {
                    self.drain_one(cpu, 0);
                }
            }
        }
        self.look_around();
    }

    /// Software overwrites an entry: flags that hardware has set there are lost if nobody has seen them.
    fn check_flags(&self, cpu: usize, pa: u64, value: u64) {
        let Some(flags) = self.unseen.borrow_mut().remove(&pa) else {
            return;
        };
        let kept = self.flags(value);
        if flags & !kept != 0 {
            self.violate(
                Rule::FlagLost,
                cpu,
                format!(
                    "the entry at {pa:#x} is overwritten with {value:#x}, and its {} was set since it was last read",
                    if flags & !kept & DIRTY != 0 { "dirty state" } else { "accessed flag" }
                ),
            );
        }
    }

    /// Accessed and dirty in a leaf, in one form for all formats.
    fn flags(&self, entry: u64) -> u64 {
        if entry & 1 == 0 {
            return 0;
        }
        let (accessed, dirty) = if self.architecture.is_x86() {
            (entry >> 5 & 1, entry >> 6 & 1)
        } else {
            (entry >> 10 & 1, !entry >> 7 & 1)
        };
        (accessed * ACCESSED) | (dirty * DIRTY)
    }

    /// A load by software.
    ///
    /// # Safety
    /// 1. `entry` is valid for reads, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn load(&self, cpu: usize, spot: &Spot<'_>, entry: *const u64) -> u64 {
        if self.wary.get() {
            return self.load_slowly(cpu, spot.pa);
        }
        // SAFETY: valid by (1.).
        unsafe { entry.read() }
    }

    #[inline(never)]
    fn load_slowly(&self, cpu: usize, pa: u64) -> u64 {
        self.disturb(cpu, Some(pa));
        self.check_taken(cpu, pa);
        let value = self.visible_to(cpu, pa);
        self.see(cpu, pa);
        self.trace(cpu, || Event::Load { pa, value });
        value
    }

    /// Software looks into a table: it has to be somebody's.
    fn check_taken(&self, cpu: usize, pa: u64) {
        let given_back = self
            .memory
            .frame_at(pa)
            .is_some_and(|frame| self.memory.meta(frame).state.get() == State::Free);
        if given_back {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!("a load from {pa:#x}, in a frame that was given back"),
            );
        }
    }

    /// Software has seen what is at `pa`.
    fn see(&self, cpu: usize, pa: u64) {
        if !self.unseen.borrow().is_empty() {
            self.unseen.borrow_mut().remove(&pa);
        }
        if !self.obligations.borrow().is_empty()
            && let Some(frame) = self.memory.frame_at(pa)
        {
            let meta = self.memory.meta(frame);
            if meta.state.get() == State::Live {
                let (at, depth) = (self.place(frame, pa), meta.depth.get());
                let mut obligations = self.obligations.borrow_mut();
                obligations.observe(cpu, meta.space.get(), at, depth);
            }
        }
    }

    /// The first address that the entry at `pa` translates.
    fn place(&self, frame: usize, pa: u64) -> u64 {
        let meta = self.memory.meta(frame);
        let index = (pa - self.memory.address(frame)) >> 3;
        let first = meta.first.get();
        self.canonical(first.wrapping_add(index << self.shift(meta.depth.get())))
    }

    /// What a load by this CPU returns: its own stores first.
    pub(crate) fn visible_to(&self, cpu: usize, pa: u64) -> u64 {
        if self.buffering.get()
            && let Some(own) = self.cores[cpu]
                .buffer
                .borrow()
                .iter()
                .rev()
                .find(|b| b.pa == pa)
        {
            return own.value;
        }
        self.memory.read(pa)
    }

    /// An atomic exchange by software: gives what was there.
    pub(crate) fn exchange(&self, cpu: usize, spot: &Spot<'_>, value: u64) -> u64 {
        self.disturb(cpu, Some(spot.pa));
        self.drain(cpu);
        let old = self.memory.read(spot.pa);
        self.see(cpu, spot.pa);
        self.store_slowly(cpu, spot.pa, spot.frame, value, How::Atomic);
        old
    }

    /// A compare-exchange by software.
    pub(crate) fn compare_exchange(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        current: u64,
        value: u64,
    ) -> Result<(), u64> {
        self.disturb(cpu, Some(spot.pa));
        self.drain(cpu);
        self.see(cpu, spot.pa);
        let old = self.memory.read(spot.pa);
        if old != current {
            self.check_taken(cpu, spot.pa);
            return Err(old);
        }
        self.store_slowly(cpu, spot.pa, spot.frame, value, How::Atomic);
        Ok(())
    }

    /// Stores to `count` entries of a private table from `first` on: `value`, `value + step`, and so on.
    ///
    /// # Safety
    /// 1. The entries are valid for writes, and the first lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn fill_private(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        first: *mut u64,
        count: usize,
        value: u64,
        step: u64,
    ) {
        spot.meta.writer.set(cpu as u16);
        spot.meta.epoch.set(self.cores[cpu].epoch.get());
        let mut value = value;
        for index in 0..count {
            // SAFETY: valid by (1.).
            unsafe { first.add(index).write(value) };
            value = value.wrapping_add(step);
        }
    }

    // ---- The rules of a change ----

    /// A reachable entry changes from what this CPU saw to `new`.
    fn changed(&self, cpu: usize, pa: u64, frame: usize, before: u64, new: u64, how: How) {
        if before & 1 == 0 && new & 1 == 0 || before == new {
            return;
        }
        let meta = self.memory.meta(frame);
        let (depth, space) = (meta.depth.get(), meta.space.get());
        let first = self.place(frame, pa);
        let span = (first, first + ((1u64 << self.shift(depth)) - 1));
        let was = self.decode(depth, first, Denied::default(), before);
        let is = self.decode(depth, first, Denied::default(), new);
        if let Descriptor::Reserved(why) = is {
            self.violate(
                Rule::Reserved,
                cpu,
                format!("{new:#x} is stored for {first:#x}: {why}"),
            );
        }
        self.check_break(cpu, space, span, depth, &was, &is);
        let leaf_of = |d: &Descriptor| match d {
            Descriptor::Leaf(leaf) => Some(*leaf),
            _ => None,
        };
        if let Some(leaf) = leaf_of(&is) {
            self.check_allowed(cpu, leaf.pa, leaf.size);
        }
        // Links change before obligations, so that a table which moves is never nowhere.
        let table_of = |d: &Descriptor| match d {
            Descriptor::Table { pa, .. } => Some(*pa),
            _ => None,
        };
        let (from, to) = (table_of(&was), table_of(&is));
        let number = self.obligations.borrow_mut().number();
        if from != to {
            if let Some(table) = from {
                self.make_detached(table, depth - 1, number);
                let mut obligations = self.obligations.borrow_mut();
                obligations.cut_off(cpu, space, span, depth);
            }
            if let Some(table) = to {
                self.make_live(cpu, table, first, depth - 1, space, how);
            }
        }
        let run = leaf_of(&was).is_some_and(|leaf| leaf.contiguous);
        if self.dice.is_on() && (run || leaf_of(&is).is_some_and(|leaf| leaf.contiguous)) {
            self.cores[cpu].touch_run(space, self.run_around(span.0, depth), depth);
        }
        if !may_be_remembered(&self.architecture, &was, run) {
            return;
        }
        let harmless = match (leaf_of(&was), leaf_of(&is)) {
            (Some(was), Some(is)) => is_harmless(&was, &is),
            _ => from.is_some() && from == to,
        };
        // Bits that mean nothing to the hardware.
        if harmless && self.says_the_same(&was, &is) {
            return;
        }
        let id = self.spaces.borrow()[usize::from(space)].id;
        let (global, contiguous, old) = match leaf_of(&was) {
            Some(leaf) => (leaf.global, leaf.contiguous, leaf.pa),
            None => (false, false, from.unwrap_or(0)),
        };
        self.obligations.borrow_mut().add(Obligation {
            number,
            space,
            id,
            global,
            span,
            depth,
            table: from.is_some(),
            contiguous,
            pa: old,
            raw: before,
            writer: cpu as u16,
            published: self.architecture.ordering == Ordering::X86,
            harmless,
            issued: Vec::new(),
            local: Vec::new(),
            claimed: None,
        });
    }

    fn says_the_same(&self, was: &Descriptor, is: &Descriptor) -> bool {
        match (was, is) {
            (Descriptor::Leaf(was), Descriptor::Leaf(is)) => {
                was.access == is.access && was.accessed == is.accessed && was.dirty == is.dirty
            }
            (
                Descriptor::Table { pa, denied },
                Descriptor::Table {
                    pa: other,
                    denied: more,
                },
            ) => pa == other && denied == more,
            _ => false,
        }
    }

    fn check_break(
        &self,
        cpu: usize,
        space: u16,
        span: (u64, u64),
        depth: u8,
        was: &Descriptor,
        is: &Descriptor,
    ) {
        let architecture = &self.architecture;
        let run = |d: &Descriptor| matches!(d, Descriptor::Leaf(leaf) if leaf.contiguous);
        if !may_be_remembered(architecture, is, run(is)) {
            return;
        }
        let alike = |a: u64, b: u64| {
            let alike = self.alike.borrow();
            alike.contains(&(a, b)) || alike.contains(&(b, a))
        };
        if may_be_remembered(architecture, was, run(was)) {
            let same = || self.translate_alike(depth, span.0, was, is);
            if let Some(why) = needs_break(architecture, was, is, depth, alike, same) {
                self.violate(
                    Rule::BreakBeforeMake,
                    cpu,
                    format!(
                        "the entry for {:#x} at level {} was changed without a break: {why}",
                        span.0,
                        self.level(depth)
                    ),
                );
            }
            return;
        }
        // Made after a break: which has to be complete.
        let obligations = self.obligations.borrow();
        let mut wrong = None;
        for obligation in obligations.about(space, span) {
            // What a table that was cut off led to may be anything.
            let raw = obligation.raw;
            let old = self.decode(obligation.depth, obligation.span.0, Denied::default(), raw);
            // A leaf as it would be if it began where this entry does.
            let old = match old {
                Descriptor::Leaf(leaf) => Descriptor::Leaf(Leaf {
                    pa: leaf.pa.wrapping_add(span.0.wrapping_sub(obligation.span.0)),
                    ..leaf
                }),
                other => other,
            };
            let same = || self.translate_alike(depth, span.0, &old, is);
            let contradicts = || needs_break(architecture, &old, is, depth, alike, same);
            let why = if obligation.table && obligation.depth > depth {
                Some("what was cut off above it may still be remembered")
            } else if obligation.depth == depth {
                contradicts()
            } else {
                match is {
                    Descriptor::Leaf(_) if obligation.table => Some("another size"),
                    _ if architecture.is_x86() => None,
                    _ if architecture.bbm < 2 => Some("another size"),
                    Descriptor::Leaf(_) => contradicts(),
                    _ => None,
                }
            };
            if let Some(why) = why.filter(|_| !obligation.harmless) {
                wrong = Some(why);
                break;
            }
        }
        drop(obligations);
        if let Some(why) = wrong.filter(|_| !architecture.is_x86()) {
            self.violate(
                Rule::BreakBeforeMake,
                cpu,
                format!(
                    "the entry for {:#x} at level {} is made before the break of what was there is complete: {why}",
                    span.0,
                    self.level(depth)
                ),
            );
        }
    }

    /// Whether a table and a leaf translate alike.
    fn translate_alike(&self, depth: u8, first: u64, a: &Descriptor, b: &Descriptor) -> bool {
        let (table, leaf) = match (a, b) {
            (Descriptor::Table { pa, .. }, Descriptor::Leaf(leaf))
            | (Descriptor::Leaf(leaf), Descriptor::Table { pa, .. }) => (*pa, leaf),
            _ => return true,
        };
        let Some(below) = depth.checked_sub(1) else {
            return false;
        };
        let size = 1u64 << self.shift(below);
        (0..self.memory.entries() as u64).all(|index| {
            let entry = self.memory.read(table + index * 8);
            let va = first + index * size;
            let part = Leaf {
                pa: leaf.pa + index * size,
                ..*leaf
            };
            match self.decode(below, va, Denied::default(), entry) {
                Descriptor::Leaf(small) => {
                    small.pa == part.pa
                        && small.memory == part.memory
                        && small.shareability == part.shareability
                }
                other @ Descriptor::Table { .. } => {
                    let part = Descriptor::Leaf(part);
                    self.translate_alike(below, va, &other, &part)
                }
                _ => false,
            }
        })
    }

    // ---- Store buffers and barriers ----

    /// The stores of a CPU that may leave its buffer next.
    pub(crate) fn drainable(&self, cpu: usize) -> Vec<usize> {
        let buffer = self.cores[cpu].buffer.borrow();
        let in_order = self.architecture.ordering == Ordering::X86;
        (0..buffer.len())
            .filter(|&at| {
                let this = &buffer[at];
                buffer[..at]
                    .iter()
                    .all(|before| !in_order && before.pa != this.pa && before.group == this.group)
            })
            .collect()
    }

    /// One store leaves the buffer.
    pub(crate) fn drain_one(&self, cpu: usize, at: usize) {
        let stored = self.cores[cpu].buffer.borrow_mut().remove(at);
        let Buffered { pa, value, .. } = stored;
        self.trace(cpu, || Event::Visible { pa, value });
        // What hardware has set between the store and now is overwritten.
        self.check_flags(cpu, pa, value);
        self.check_race(cpu, &stored);
        self.memory.write(pa, value);
    }

    /// What another CPU has stored between the store and now is overwritten: that is the change that walkers see.
    fn check_race(&self, cpu: usize, stored: &Buffered) {
        let now = self.memory.read(stored.pa);
        let flags = if self.architecture.is_x86() {
            X86_FLAGS
        } else {
            ARM_AF | ARM_READ_ONLY
        };
        if self.judging.get()
            && (now ^ stored.before) & !flags != 0
            && let Some(frame) = self.memory.frame_at(stored.pa)
            && self.memory.meta(frame).state.get() == State::Live
        {
            self.changed(cpu, stored.pa, frame, now, stored.value, How::Plain);
        }
    }

    /// All of them do.
    pub(crate) fn drain(&self, cpu: usize) {
        while !self.cores[cpu].buffer.borrow().is_empty() {
            self.drain_one(cpu, 0);
        }
    }

    pub(crate) fn has_buffered(&self, cpu: usize) -> bool {
        !self.cores[cpu].buffer.borrow().is_empty()
    }

    /// Whether a fault now would be that of a walk which did not see what this CPU stored before, where the
    /// architecture rules that out.
    pub(crate) fn fault_is_early(&self, cpu: usize) -> bool {
        self.architecture.ordering != Ordering::Base && self.has_buffered(cpu)
    }

    /// Stores before it leave before stores after it.
    pub(crate) fn order_stores(&self, cpu: usize) {
        self.cores[cpu].group.update(|group| group + 1);
    }

    /// DSB: what this CPU stored is visible to all walkers.
    #[inline(always)]
    pub(crate) fn publish(&self, cpu: usize) {
        self.cores[cpu].epoch.update(|epoch| epoch.wrapping_add(1));
        if self.wary.get() {
            self.publish_slowly(cpu);
        }
    }

    #[inline(never)]
    fn publish_slowly(&self, cpu: usize) {
        self.trace(cpu, || Event::Publish);
        // On x86 nothing is executed: stores leave their buffer in order, when they do.
        if self.architecture.ordering != Ordering::X86 {
            self.drain(cpu);
        }
        self.hold_walks(cpu);
        self.obligations.borrow_mut().publish(cpu);
        for (space, run, depth) in self.cores[cpu].runs.take() {
            self.check_run(cpu, space, run, depth);
        }
        self.disturb(cpu, None);
    }

    /// With FEAT_ETS2 a DSB orders the walks after it (the model of Arm, `DSB-ob`).
    fn hold_walks(&self, cpu: usize) {
        if self.architecture.ordering == Ordering::Ets2 {
            self.cores[cpu].early.borrow_mut().clear();
        }
    }

    /// What this CPU stored is seen by whoever takes over from it: the release of a lock.
    pub(crate) fn hand_over(&self, cpu: usize) {
        if self.wary.get() {
            self.drain(cpu);
            self.obligations.borrow_mut().publish(cpu);
        }
    }

    /// ISB: nothing translated before is used after.
    #[inline(always)]
    pub(crate) fn synchronise(&self, cpu: usize) {
        if self.wary.get() {
            self.trace(cpu, || Event::Synchronise);
            self.cores[cpu].early.borrow_mut().clear();
        }
    }

    // ---- Invalidation ----

    /// An invalidation is issued. It takes effect between now and its completion.
    pub(crate) fn invalidate(&self, cpu: usize, tlbi: Tlbi) {
        self.trace(cpu, || Event::Invalidate { tlbi });
        if self.architecture.ordering == Ordering::X86 {
            // INVLPG, and an interrupt, are serialising (SDM vol. 3A 9.3).
            self.drain(cpu);
        }
        let early = self.dice.is_on() && self.dice.once_in(2);
        if early {
            self.invalidations.take_effect(tlbi, cpu);
        }
        self.cores[cpu].pending.borrow_mut().push((tlbi, early));
        if !self.obligations.borrow().is_empty() {
            self.obligations.borrow_mut().issue(cpu, &tlbi);
        }
        if self.wary.get() {
            self.disturb(cpu, None);
        }
    }

    /// The program relies on an invalidation to be about all of `range` in a space.
    pub(crate) fn claim(&self, cpu: usize, space: u16, range: (u64, u64), tlbi: &Tlbi) {
        if !self.obligations.borrow().is_empty() {
            let mut obligations = self.obligations.borrow_mut();
            obligations.claim(cpu, space, range, tlbi);
        }
    }

    /// Whether accesses by other CPUs are under way that a completion has to wait for, and until when.
    pub(crate) fn under_way(&self, cpu: usize) -> Option<Time> {
        let pending = self.cores[cpu].pending.borrow();
        let others = self.cores.iter().enumerate().filter(|&(c, _)| c != cpu);
        others
            .filter_map(|(_, core)| core.under_way.get())
            .filter(|(access, _)| {
                let covers = |tlbi: &Tlbi| tlbi.broadcast && access.is_covered(tlbi);
                pending.iter().any(|(tlbi, _)| covers(tlbi))
            })
            .map(|(_, until)| until)
            .max()
    }

    /// What was issued takes effect now, if it has not yet.
    pub(crate) fn take_effect(&self, cpu: usize) {
        self.drain(cpu);
        for (tlbi, done) in self.cores[cpu].pending.borrow_mut().iter_mut() {
            if !*done {
                self.invalidations.take_effect(*tlbi, cpu);
                *done = true;
            }
        }
    }

    /// DSB after invalidations: every CPU has forgotten what they cover.
    pub(crate) fn complete(&self, cpu: usize) {
        self.trace(cpu, || Event::Complete);
        self.take_effect(cpu);
        self.hold_walks(cpu);
        let core = &self.cores[cpu];
        core.epoch.update(|epoch| epoch.wrapping_add(1));
        for (tlbi, _) in core.pending.borrow_mut().drain(..) {
            if !tlbi.broadcast {
                continue;
            }
            // Accesses of others through the old translation are over, or will be made anew. Our own may have been
            // translated early: that is what the context synchronisation is for.
            for (other, its) in self.cores.iter().enumerate() {
                if other != cpu && !its.early.borrow().is_empty() {
                    let spared = |e: &Early| e.result.is_ok_and(|t| !t.is_covered(&tlbi));
                    its.early.borrow_mut().retain(spared);
                }
            }
        }
        if self.obligations.borrow().is_empty() {
            return;
        }
        self.obligations.borrow_mut().publish(cpu);
        let (discharged, wrong) = {
            let spaces = self.spaces.borrow();
            let all_told = |space: u16, told: &[(u16, bool)]| {
                let holders = &spaces[usize::from(space)];
                (0..self.cores.len() as u16)
                    .filter(|&c| holders.has(c))
                    .all(|c| told.contains(&(c, true)))
            };
            self.obligations.borrow_mut().complete(cpu, all_told)
        };
        for obligation in wrong {
            let why = obligation.claimed.map_or("", |(_, why)| why);
            self.violate(
                Rule::Invalidation,
                cpu,
                format!(
                    "the {} of {:#x}..={:#x} at level {} is said to be invalidated, and is not: {why}",
                    if obligation.table { "table" } else { "translation" },
                    obligation.span.0,
                    obligation.span.1,
                    self.level(obligation.depth),
                ),
            );
        }
        for obligation in discharged {
            if obligation.contiguous {
                let Obligation {
                    space, span, depth, ..
                } = obligation;
                let mut at = self.run_around(span.0, depth).0;
                while at <= span.1 {
                    let run = self.run_around(at, depth);
                    self.check_run(cpu, space, run, depth);
                    match run.1.checked_add(1) {
                        Some(next) => at = next,
                        None => break,
                    }
                }
            }
        }
        self.look_around();
    }

    /// The addresses of the contiguous run around `va`, or of what would be one.
    fn run_around(&self, va: u64, depth: u8) -> (u64, u64) {
        let regime = self.architecture.regime;
        let members = regime.run_entries(self.level(depth)) as u64;
        let low = (members << self.shift(depth)) - 1;
        (va & !low, va | low)
    }

    /// Members of a run were changed, and that is visible or complete: what is left of the run has to be whole.
    fn check_run(&self, cpu: usize, space: u16, (first, last): (u64, u64), depth: u8) {
        let size = 1usize << self.shift(depth);
        let found: Vec<_> = (first..=last)
            .step_by(size)
            .map(|at| self.leaf_at(space, at))
            .collect();
        let contiguous = |leaf: &&Leaf| leaf.contiguous;
        let hinted = found.iter().flatten().filter(contiguous).count();
        // Hardware may make one member dirty.
        let access = |leaf: &Leaf| self.rights(leaf, depth, Denied::default()) & !CLEAN;
        let alike = |a: &Leaf, b: &Leaf| {
            access(a) == access(b)
                && a.memory == b.memory
                && a.pa.wrapping_sub(a.va) == b.pa.wrapping_sub(b.va)
        };
        let whole = hinted == found.len()
            && found.windows(2).all(|pair| match (pair[0], pair[1]) {
                (Some(a), Some(b)) => alike(&a, &b),
                _ => false,
            });
        if hinted > 0 && !whole {
            self.violate(
                Rule::BrokenRun,
                cpu,
                format!(
                    "of the {} members of the run at {first:#x}, {hinted} have the contiguous bit or they differ",
                    found.len()
                ),
            );
        }
    }

    /// The leaf that translates an address, as memory says now, without walking like a CPU does.
    pub(crate) fn leaf_at(&self, space: u16, va: u64) -> Option<Leaf> {
        let (root, _) = self.spaces.borrow()[usize::from(space)].root?;
        let mut read = |table: u64, index: usize| self.memory.read(table + index as u64 * 8);
        tablewright_walker::translate(self.architecture.regime, root, va, &mut read).ok()
    }

    // ---- Frames ----

    pub(crate) fn take_frame(&self, cpu: usize, depth: u8) -> Option<u64> {
        let frame = self.memory.take(State::Private, depth)?;
        let pa = self.memory.address(frame);
        self.trace(cpu, || Event::Take { pa });
        Some(pa)
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
                obligations.under(meta.cut.get()).map(|o| {
                    format!(
                        "walkers may remember the table for {:#x}: {}",
                        o.span.0,
                        progress(o)
                    )
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
            self.memory.give(frame);
        }
    }

    /// Nobody remembers a frame that may be given back. By then the list of obligations says so; this looks.
    fn check_forgotten(&self, cpu: usize, pa: u64) {
        let page = 1u64 << self.memory.page_shift();
        for (other, core) in self.cores.iter().enumerate() {
            let mut tlb = core.tlb.iter(other, &self.invalidations);
            // The map of all memory leads to free memory as well, and still says so.
            let held =
                tlb.find(|e| e.pa < pa + page && pa < e.pa + (1 << e.bits) && !self.still_says(e));
            let known = core
                .cache
                .iter()
                .find(|known| known.table == pa && self.is_remembered(other, known));
            if let Some(entry) = held {
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

    /// Whether the descriptor that an entry was made of is still there, and leads to the same memory.
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
        inv.spare(
            cpu,
            known.stamp,
            known.id,
            false,
            span,
            known.depth + 1,
            true,
        )
    }

    // ---- Translation ----

    /// Looks for a translation where it may be remembered.
    #[inline(always)]
    pub fn look(&self, cpu: usize, request: Request) -> Look {
        if self.wary.get()
            && let Some(early) = self.take_early(cpu, request)
        {
            return early;
        }
        let Some(root) = self.cores[cpu].roots[self.half(request.va)].get() else {
            return Look::Fault(Fault::Address);
        };
        let skip = self.dice.is_on() && self.dice.once_in(8);
        let found = self.cores[cpu]
            .tlb
            .find(cpu, request.va, root.id, &self.invalidations);
        match found.filter(|_| !skip) {
            Some(entry) => self.use_entry(cpu, request, entry),
            None => self.start(cpu, request, root),
        }
    }

    fn take_early(&self, cpu: usize, request: Request) -> Option<Look> {
        let mut early = self.cores[cpu].early.borrow_mut();
        let at = early.iter().position(|e| e.request == request)?;
        let Early { result, .. } = early.remove(at);
        match result {
            Ok(translated) => Some(Look::Found(translated)),
            // A fault that is taken is that of a walk in program order.
            Err(_) if self.architecture.ordering != Ordering::Base => None,
            Err(fault) => Some(Look::Fault(fault)),
        }
    }

    /// A TLB entry was found: whether it allows the access.
    #[inline(always)]
    fn use_entry(&self, cpu: usize, request: Request, entry: Cached) -> Look {
        let fault = Fault::Permission { depth: entry.depth };
        if entry.rights & request.right() == 0 {
            if self.architecture.permission_fault_drops_entry {
                self.cores[cpu].tlb.drop_entry(&entry);
            }
            return Look::Fault(fault);
        }
        if request.want == Want::Write && entry.rights & CLEAN != 0 {
            // The dirty state has to be set in memory, where the descriptor may have changed: a walk does it.
            self.cores[cpu].tlb.drop_entry(&entry);
            return match self.cores[cpu].roots[self.half(request.va)].get() {
                Some(root) => self.start(cpu, request, root),
                None => Look::Fault(Fault::Address),
            };
        }
        self.check_use(cpu, request, &entry);
        Look::Found(self.translated(request, entry))
    }

    fn translated(&self, request: Request, entry: Cached) -> Translated {
        let generation = self
            .memory
            .frame_at(entry.pa(request.va))
            .map_or(0, |frame| self.memory.meta(frame).generation.get());
        Translated {
            request,
            entry,
            generation,
        }
    }

    /// What a TLB says is what memory says, or the change is one that is still to be invalidated.
    #[inline(always)]
    fn check_use(&self, cpu: usize, request: Request, entry: &Cached) {
        let now = self.memory.read(entry.at);
        if now != entry.raw {
            self.check_stale(cpu, request, entry, now);
        }
    }

    #[inline(never)]
    fn check_stale(&self, cpu: usize, request: Request, entry: &Cached, now: u64) {
        if !self.judging.get() {
            return;
        }
        let was = self.decode(entry.depth, entry.first, Denied::default(), entry.raw);
        let is = self.decode(entry.depth, entry.first, Denied::default(), now);
        let harmless = match (&was, &is) {
            (Descriptor::Leaf(was), Descriptor::Leaf(is)) => {
                is_harmless(was, is) || self.is_in_the_run(entry, is)
            }
            _ => false,
        };
        let owed = self
            .obligations
            .borrow()
            .about(entry.space, entry.span())
            .next()
            .is_some();
        // The table that the entry stood in may be long gone, with the obligation for it.
        if !harmless && !owed && !self.is_pending(request.va) {
            self.violate(
                Rule::StaleUse,
                cpu,
                format!(
                    "the TLB translates {:#x} by {:#x}, memory says {now:#x}, and nothing is left to invalidate",
                    request.va, entry.raw
                ),
            );
        }
    }

    /// What differs are flags of a contiguous run, which hardware may have set in another member (DDI 0487 D8.5.4).
    fn is_in_the_run(&self, entry: &Cached, is: &Leaf) -> bool {
        if !is.contiguous || (entry.raw ^ is.raw) & !HARDWARE_FLAGS != 0 {
            return false;
        }
        let regime = self.architecture.regime;
        let members = regime.run_entries(self.level(entry.depth)) as u64;
        let run = entry.at & !(members * 8 - 1);
        let read = |member| self.memory.read(run + member * 8);
        let (accessed, dirty) = (entry.raw & ARM_AF != 0, entry.raw & ARM_READ_ONLY == 0);
        (!accessed || (0..members).any(|member| read(member) & ARM_AF != 0))
            && (!dirty || (0..members).any(|member| read(member) & ARM_READ_ONLY == 0))
    }

    /// An invalidation that covers the address is issued and not complete.
    fn is_pending(&self, va: u64) -> bool {
        self.cores.iter().any(|core| {
            core.pending
                .borrow()
                .iter()
                .any(|(tlbi, _)| tlbi.range.is_none_or(|(a, b)| a <= va && va <= b))
        })
    }

    /// Starts a walk, where the walk cache knows the way.
    #[inline(always)]
    fn start(&self, cpu: usize, request: Request, root: Root) -> Look {
        let regime = self.architecture.regime;
        let stamp = self.invalidations.now();
        let skip = self.dice.is_on() && self.dice.once_in(8);
        let mut depth = 0;
        while depth < self.top && !skip {
            let bits = self.shift(depth) + self.index_bits;
            let known = self.cores[cpu].cache.find(
                cpu,
                request.va,
                root.id,
                depth,
                bits,
                &self.invalidations,
            );
            if let Some(known) = known {
                let level = self.level(depth);
                return Look::Walking(Walking {
                    request,
                    walk: Walk::resume(regime, known.table, level, known.denied, request.va),
                    stamp,
                    id: root.id,
                    space: root.space,
                });
            }
            depth += 1;
        }
        match Walk::new(regime, root.table, request.va) {
            Ok(walk) => Look::Walking(Walking {
                request,
                walk,
                stamp,
                id: root.id,
                space: root.space,
            }),
            Err(_) => Look::Fault(Fault::Address),
        }
    }

    /// The walker reads one descriptor.
    #[inline(always)]
    pub fn step(&self, cpu: usize, walking: Walking) -> Look {
        let va = walking.request.va;
        if walking.stamp != self.invalidations.now() && self.is_overtaken(cpu, &walking) {
            return match self.cores[cpu].roots[self.half(va)].get() {
                Some(root) => self.start(cpu, walking.request, root),
                None => Look::Fault(Fault::Address),
            };
        }
        let Walking { mut walk, .. } = walking;
        let (table, index) = (walk.table(), walk.index());
        let depth = self.depth(walk.level());
        let at = table + index as u64 * 8;
        let descriptor = self.memory.read(at);
        self.trace(cpu, || Event::Walk {
            va,
            pa: at,
            value: descriptor,
        });
        let good = self.memory.frame_at(table).is_some_and(|frame| {
            matches!(
                self.memory.meta(frame).state.get(),
                State::Live | State::Detached
            )
        });
        if !good || descriptor == POISON {
            self.astray(cpu, va, table, depth, descriptor);
            return Look::Fault(Fault::Translation { depth });
        }
        match walk.step(descriptor) {
            Ok(None) => {
                let below = depth - 1;
                let bits = self.shift(below) + self.index_bits;
                self.cores[cpu].cache.insert(
                    Remembered {
                        first: va >> bits << bits,
                        depth: below,
                        id: walking.id,
                        table: walk.table(),
                        denied: walk.denied(),
                        stamp: walking.stamp,
                    },
                    bits,
                );
                Look::Walking(Walking { walk, ..walking })
            }
            Ok(Some(leaf)) => self.arrive(cpu, walking, at, depth, leaf),
            Err(WalkFault::Reserved(why)) => {
                self.violate(Rule::Reserved, cpu, format!("a walk for {va:#x}: {why}"));
                Look::Fault(Fault::Translation { depth })
            }
            Err(_) => Look::Fault(Fault::Translation { depth }),
        }
    }

    fn is_overtaken(&self, cpu: usize, walking: &Walking) -> bool {
        let va = walking.request.va;
        let depth = self.depth(walking.walk.level());
        let spare = |depth, table| {
            self.invalidations.spare(
                cpu,
                walking.stamp,
                walking.id,
                false,
                (va, va),
                depth,
                table,
            )
        };
        // It holds tables, and will hold a leaf of a level that it does not know yet.
        !(spare(depth + 1, true) && (0..=depth).all(|leaf| spare(leaf, false)))
    }

    #[cold]
    fn astray(&self, cpu: usize, va: u64, table: u64, depth: u8, descriptor: u64) {
        if !self.judging.get() {
            return;
        }
        let state = match self.memory.frame_at(table) {
            None => "which is no memory".to_owned(),
            Some(frame) => match self.memory.meta(frame).state.get() {
                State::Free => "which was given back".to_owned(),
                State::Private => "which was given back and taken again".to_owned(),
                State::Data => "which holds data".to_owned(),
                _ => format!("in which nobody wrote the entry ({descriptor:#x})"),
            },
        };
        self.violate(
            Rule::WalkAstray,
            cpu,
            format!(
                "the walk for {va:#x} comes to the level {} table at {table:#x}, {state}",
                self.level(depth)
            ),
        );
    }

    /// The walk has come to a leaf.
    #[inline(always)]
    fn arrive(&self, cpu: usize, walking: Walking, at: u64, depth: u8, leaf: Leaf) -> Look {
        let request = walking.request;
        let (mut leaf, mut at) = (leaf, at);
        let mut raw = leaf.raw;
        if !leaf.accessed {
            if !self.architecture.hardware_access {
                return Look::Fault(Fault::AccessFlag { depth });
            }
            raw = self.set_flag(at, &leaf, depth, |descriptor| {
                let regime = self.architecture.regime;
                with_access_flag(regime, self.level(depth), descriptor)
            });
            leaf.raw = raw;
        }
        let mut rights = self.rights(&leaf, depth, walking.walk.denied());
        if rights & request.right() == 0 {
            // Permission faults are remembered.
            self.remember(cpu, &walking, at, depth, &leaf, raw, rights);
            return Look::Fault(Fault::Permission { depth });
        }
        if request.want == Want::Write && rights & CLEAN != 0 {
            raw = self.set_flag(at, &leaf, depth, |descriptor| {
                let regime = self.architecture.regime;
                with_dirty(regime, self.level(depth), descriptor)
            });
            rights &= !CLEAN;
        }
        if leaf.contiguous && self.dice.is_on() && self.dice.once_in(2) {
            // Members may be remembered one by one.
            leaf.run_size = leaf.size;
        }
        // The entry that was used.
        at &= !7;
        let entry = self.remember(cpu, &walking, at, depth, &leaf, raw, rights);
        Look::Found(self.translated(request, entry))
    }

    /// What the leaf allows, with the dirty state that hardware manages.
    #[inline(always)]
    fn rights(&self, leaf: &Leaf, depth: u8, denied: Denied) -> u8 {
        let mut leaf = *leaf;
        let mut clean = false;
        match leaf.dirty {
            tablewright_walker::DirtyState::Arm64 {
                dbm: true,
                read_only: true,
            } if self.architecture.hardware_dirty => {
                // Writable, and its first write is to be recorded.
                let writable = leaf.raw & !(1 << 7);
                if let Descriptor::Leaf(as_written) = self.decode(depth, leaf.va, denied, writable)
                {
                    leaf.access = as_written.access;
                    clean = leaf.access.privileged.write || leaf.access.user.write;
                }
            }
            tablewright_walker::DirtyState::X86_64 { dirty: false } => {
                clean = leaf.access.privileged.write || leaf.access.user.write;
            }
            _ => {}
        }
        let of = |p: tablewright_walker::Permissions| {
            (u8::from(p.read) * READ)
                | (u8::from(p.write) * WRITE)
                | (u8::from(p.execute) * EXECUTE)
        };
        of(leaf.access.privileged) | of(leaf.access.user) << USER | (u8::from(clean) * CLEAN)
    }

    /// Hardware sets a flag in a leaf, atomically with the look at it. Gives the descriptor as it is then.
    #[inline(never)]
    fn set_flag(&self, at: u64, leaf: &Leaf, depth: u8, flag: impl Fn(u64) -> Option<u64>) -> u64 {
        // In a run, hardware may record it in any member (DDI 0487 D8.5.4).
        let mut target = at;
        if leaf.contiguous && self.dice.is_on() && self.dice.once_in(2) {
            let regime = self.architecture.regime;
            let members = regime.run_entries(self.level(depth)) as u64;
            let run = at & !(members * 8 - 1);
            target = run + self.dice.below(members) * 8;
        }
        for place in [target, at] {
            let before = self.memory.read(place);
            let Some(after) = (before & 1 != 0).then(|| flag(before)).flatten() else {
                continue;
            };
            if after != before {
                self.memory.write(place, after);
                if !self.judging.get() {
                    break;
                }
                let gained = self.flags(after) & !self.flags(before);
                *self.unseen.borrow_mut().entry(place).or_default() |= gained;
                self.wary.set(true);
            }
            break;
        }
        // What is remembered has the flag, whichever member was written.
        flag(leaf.raw).unwrap_or(leaf.raw)
    }

    /// The translation goes into the TLB.
    #[allow(clippy::too_many_arguments)] // All that a TLB entry is made of.
    #[inline(always)]
    fn remember(
        &self,
        cpu: usize,
        walking: &Walking,
        at: u64,
        depth: u8,
        leaf: &Leaf,
        raw: u64,
        rights: u8,
    ) -> Cached {
        let first = leaf.va & !(leaf.run_size - 1);
        let entry = Cached {
            first,
            bits: leaf.run_size.trailing_zeros() as u8,
            depth,
            id: walking.id,
            space: walking.space,
            global: leaf.global,
            contiguous: leaf.contiguous,
            rights,
            pa: leaf.pa.wrapping_sub(leaf.va - first),
            raw,
            at,
            stamp: walking.stamp,
        };
        let core = &self.cores[cpu];
        if let Some(other) = core
            .tlb
            .find(cpu, walking.request.va, walking.id, &self.invalidations)
        {
            self.check_conflict(cpu, walking.request.va, &other, &entry);
        }
        // A TLB has several levels, and what one of them has of an address need not be what another has.
        if !(self.dice.is_on() && self.dice.once_in(4)) {
            core.tlb.insert(entry);
        }
        entry
    }

    /// Two entries for one address.
    #[inline(never)]
    fn check_conflict(&self, cpu: usize, va: u64, other: &Cached, entry: &Cached) {
        if !self.judging.get() {
            return;
        }
        let run = other.contiguous && entry.contiguous && other.depth == entry.depth;
        let sizes = other.bits == entry.bits
            || run
            // The contiguous bit may change in place.
            || self.architecture.bbm >= 1 && other.depth == entry.depth
            || self.architecture.bbm >= 2
            || self.architecture.is_x86();
        let places = other.pa(va) == entry.pa(va) || self.architecture.is_x86();
        if !sizes || !places {
            self.violate(
                Rule::Conflict,
                cpu,
                format!(
                    "{va:#x} is translated by {:#x} (of {} bytes) and by {:#x} (of {} bytes) at once",
                    other.raw,
                    1u64 << other.bits,
                    entry.raw,
                    1u64 << entry.bits
                ),
            );
        }
    }

    /// The access is under way until then.
    pub(crate) fn set_out(&self, cpu: usize, access: Translated, until: Time) {
        self.cores[cpu].under_way.set(Some((access, until)));
    }

    /// The access is done: gives what is read, if there is memory.
    pub(crate) fn perform(&self, cpu: usize, access: Translated, stored: Option<u64>) -> u64 {
        self.cores[cpu].under_way.set(None);
        let pa = access.pa();
        let Some(frame) = self.memory.frame_at(pa) else {
            return 0;
        };
        let meta = self.memory.meta(frame);
        let gone = meta.state.get() == State::Free || meta.generation.get() != access.generation;
        if gone {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!(
                    "an access to {:#x} reaches {pa:#x}, which was given back meanwhile",
                    access.request.va
                ),
            );
            return 0;
        }
        self.caches
            .access(self, cpu, &access.entry, access.request, pa);
        if let Some(value) = stored {
            self.memory.write(pa & !7, value);
        }
        self.memory.read(pa & !7)
    }

    // ---- The adversary ----

    /// Something that the hardware is free to do at any moment happens, if the dice say so: a walk of some CPU for an
    /// address close to what is being edited, all of it or a part, an eviction, a store that leaves its buffer, a
    /// translation ahead of time.
    #[inline(always)]
    pub(crate) fn disturb(&self, cpu: usize, near: Option<u64>) {
        if self.dice.is_on() {
            self.disturb_slowly(cpu, near);
        }
    }

    #[inline(never)]
    fn disturb_slowly(&self, cpu: usize, near: Option<u64>) {
        if !self.dice.once_in(3) {
            return;
        }
        let other = self.dice.below(self.cores.len() as u64) as usize;
        let core = &self.cores[other];
        let near = near.and_then(|pa| {
            let frame = self.memory.frame_at(pa)?;
            let meta = self.memory.meta(frame);
            (meta.state.get() == State::Live).then(|| {
                let bits = self.shift(meta.depth.get());
                let page = 1u64 << self.memory.page_shift();
                let inside = self.dice.below(1 << bits) & !(page - 1);
                self.place(frame, pa).wrapping_add(inside)
            })
        });
        if let Some(va) = near {
            self.dice.note(va);
        }
        let Some(va) = near.or_else(|| self.dice.recall()) else {
            return;
        };
        let request = Request {
            va,
            want: Want::Read,
            user: self.dice.once_in(2),
        };
        match self.dice.below(8) {
            0..=2 => {
                let _ = self.walk_at_once(other, request);
            }
            3 | 4 => {
                // One that was left half-way goes on, or a new one is.
                let mut walking = match core.speculative.take() {
                    Some(walking) => Look::Walking(walking),
                    None => self.look(other, request),
                };
                for _ in 0..=self.dice.below(3) {
                    if let Look::Walking(next) = walking {
                        walking = self.step(other, next);
                    }
                }
                if let Look::Walking(walking) = walking {
                    core.speculative.set(Some(walking));
                }
            }
            5 => {
                core.tlb.evict(self.dice.below(1 << 16) as usize);
                core.cache.evict(self.dice.below(1 << 16) as usize);
            }
            6 => {
                // Also of a CPU that does nothing any more.
                let of = if self.dice.once_in(2) { cpu } else { other };
                let drainable = self.drainable(of);
                if !drainable.is_empty() {
                    let at = self.dice.below(drainable.len() as u64) as usize;
                    self.drain_one(of, drainable[at]);
                }
            }
            _ => self.translate_early(other, request),
        }
    }

    /// A translation is made before its access, which may come later or never.
    pub(crate) fn translate_early(&self, cpu: usize, request: Request) {
        let result = match self.walk_at_once(cpu, request) {
            Some(result) => result,
            None => return,
        };
        let mut early = self.cores[cpu].early.borrow_mut();
        if early.len() < 8 {
            early.push(Early { request, result });
        }
    }

    /// A whole walk in one moment. `None` if no root is loaded.
    pub(crate) fn walk_at_once(
        &self,
        cpu: usize,
        request: Request,
    ) -> Option<Result<Translated, Fault>> {
        let root = self.cores[cpu].roots[self.half(request.va)].get()?;
        let mut look = match self.cores[cpu]
            .tlb
            .find(cpu, request.va, root.id, &self.invalidations)
        {
            Some(entry) => self.use_entry(cpu, request, entry),
            None => self.start(cpu, request, root),
        };
        loop {
            match look {
                Look::Found(translated) => return Some(Ok(translated)),
                Look::Fault(fault) => return Some(Err(fault)),
                Look::Walking(walking) => look = self.step(cpu, walking),
            }
        }
    }

    // ---- The end ----

    /// Hardware does nothing unasked from here on, and stores do not wait.
    pub(crate) fn calm(&self) {
        self.dice.stop();
        (0..self.cores.len()).for_each(|cpu| self.drain(cpu));
        self.buffering.set(false);
    }

    /// Everything must have settled: no change is left to invalidate, no store in a buffer.
    pub(crate) fn settle(&self, cpu: usize) {
        for other in 0..self.cores.len() {
            self.drain(other);
        }
        let left: Vec<_> = {
            let obligations = self.obligations.borrow();
            obligations
                .iter()
                .filter(|o| !o.harmless)
                .cloned()
                .collect()
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

    /// Two pages hold the same bytes, and nobody writes either: as when equal pages are merged.
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
    } else {
        "no invalidation that covers it was issued"
    }
}

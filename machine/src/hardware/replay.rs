//! A checker of real runs: what a hypervisor on arm64 did to the tables of its guests, instruction
//! by instruction, held against the rules.
//!
//! The machine and the litmus explorer run a program on this hardware. Here the program has run
//! elsewhere, on a processor or an emulator, and was watched: every store to a table, barrier,
//! invalidation and load of a root, of all CPUs, in the order in which they happened. They are done
//! again here, and nothing else: no walk is made, because a rule does not ask what a CPU remembers,
//! but what it may remember. Whatever is reachable from a root that is loaded anywhere may be in
//! every TLB and every walk cache, with stage 1 combined and without, under the identifier of that
//! root; so it is told by the order of the instructions alone whether it may be there still, and
//! neither the emulator's luck nor ours has a part in it.
//!
//! What is checked beside the rules of the machine is what only a program itself knows, and a run
//! shows:
//!
//! * *Frames are taken and given back* ([`taken`](Replay::taken), [`given`](Replay::given)). A
//!   table that was detached is given back when all CPUs have forgotten the way to it, and when
//!   walks of software are over: since the cut, the CPU that gives it back has looked at the
//!   announcement of each CPU, and found no walk or one made later.
//! * *Pages are used* ([`touched`](Replay::touched)). A CPU that takes a page away from the guest,
//!   or the permission to write it, and then reads or writes it relies on that to be forgotten
//!   everywhere.
//! * *The guest goes on* ([`returned`](Replay::returned)). A CPU that goes back to the guest owes
//!   nothing.
//! * *A root is loaded* ([`load_root`](Replay::load_root)). Until the CPU synchronises its context,
//!   the one before may be in use, and a TLBI may take its identifier (DDI 0487 D1.6.4).

use tablewright_walker::Descriptor;

use crate::architecture::Architecture;
use crate::memory::{Memory, State};
use crate::rules::{Obligation, Rule};
use crate::tlb::{Stages, Tlbi};

use super::{Hardware, How, progress};

/// How a store was made.
///
/// ```
/// use tablewright_machine::replay::Made;
/// assert_eq!(Made::by(0xf900_0001), Made::Plain); // str x1, [x0]
/// assert_eq!(Made::by(0xc89f_fc01), Made::Release); // stlr x1, [x0]
/// assert_eq!(Made::by(0xc802_fc01), Made::Atomic); // stlxr w2, x1, [x0]
/// assert_eq!(Made::by(0xc8e0_fc01), Made::Atomic); // casal x0, x1, [x0]
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// By an instruction that orders nothing.
    Plain,
    /// After all that comes before it.
    Release,
    /// Together with a load, after all that comes before it.
    Atomic,
}

impl Made {
    /// By this instruction (DDI 0487 C4.1, loads and stores).
    pub const fn by(instruction: u32) -> Self {
        let is_release = instruction & 1 << 15 != 0;
        // Exclusive and ordered stores, and compare-and-swap.
        if instruction & 0x3f00_0000 == 0x0800_0000 {
            let (is_ordered, is_swap) = (
                instruction & 1 << 23 != 0,
                instruction & 1 << 21 != 0 && instruction & 1 << 23 != 0,
            );
            return match (is_swap, is_ordered, is_release) {
                (true, _, true) => Self::Atomic,
                (false, true, true) => Self::Release,
                (false, false, true) => Self::Atomic,
                _ => Self::Plain,
            };
        }
        // Atomic operations on memory: release is bit 22.
        if instruction & 0x3f20_0c00 == 0x3820_0000 && instruction & 1 << 22 != 0 {
            return Self::Atomic;
        }
        Self::Plain
    }
}

/// An error: which rule, by which CPU, and at which step of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule that was broken.
    pub rule: Rule,
    /// How.
    pub what: String,
    /// By which CPU.
    pub cpu: usize,
    /// How many things had happened before.
    pub step: u64,
}

/// How much was replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Stores to tables.
    pub stores: u64,
    /// Barriers.
    pub barriers: u64,
    /// Invalidations of the guest's translations.
    pub invalidations: u64,
    /// Roots that were loaded.
    pub roots: u64,
    /// Frames that were taken and given back.
    pub frames: u64,
    /// Pages of the guest that the hypervisor used.
    pub pages: u64,
    /// Announcements of walks that were looked at.
    pub looks: u64,
    /// Times that a CPU went back to the guest.
    pub returns: u64,
    /// Changes that had to be invalidated.
    pub owed: u64,
}

/// See the head of this file.
///
/// ```
/// use tablewright_machine::replay::{Made, Replay};
/// use tablewright_machine::{Architecture, Granule, Memory, Regime, Rule};
///
/// let regime = Regime::Arm64Stage2 {
///     granule: Granule::K4,
///     input_bits: 39,
///     wide: false,
///     forced_write_back: false,
/// };
/// let first = 0x4000_0000;
/// let mut run = Replay::new(Architecture::arm64(regime), 1, Memory::new(4, 12, first));
/// // A root and a table below it, written, published and loaded under VMID 1.
/// for frame in [first, first + 0x1000] {
///     run.taken(0, frame);
///     (frame..frame + 0x1000).step_by(8).for_each(|word| run.store(0, word, 0, Made::Plain));
/// }
/// run.store(0, first, (first + 0x1000) | 3, Made::Plain);
/// run.executed(0, 0xd503_3a9f, None); // dsb ishst
/// run.load_root(0, 1 << 48 | first);
/// // The table is detached, and given back at once.
/// run.store(0, first, 0, Made::Plain);
/// run.given(0, first + 0x1000);
/// assert_eq!(run.findings()[0].rule, Rule::FreedEarly);
/// ```
pub struct Replay {
    hardware: Hardware,
    replayed: Replayed,
    findings: Vec<Finding>,
    step: u64,
    /// Of each announcement, the number of the last change before it was made.
    announced: Vec<u64>,
    /// Of each CPU, and each announcement that it has looked at, up to which change no walk is
    /// left.
    passed: Vec<Vec<u64>>,
    /// VTTBR_EL2 of each CPU, and what was in it since the context was synchronised.
    vttbr: Vec<Option<u64>>,
    before: Vec<Vec<u64>>,
    /// The last invalidation of each CPU, if nothing has come behind it that it is not about.
    last: Vec<Option<Tlbi>>,
    /// The root of each space that was loaded, and its identifier; [`NONE`] since another has that.
    spaces: Vec<(u64, u16)>,
    /// Translations that each CPU may remember: of which root, under which identifier.
    held: Vec<Held>,
    /// Roots in which nothing is, ever: loaded under an identifier, they have nothing remembered
    /// under it.
    empty: Vec<u64>,
}

/// The identifier of a space that has none. No VMID of 16 bits is given out that far.
const NONE: u16 = u16::MAX;

/// Something of a root may be remembered under an identifier by a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    cpu: usize,
    id: u16,
    root: u64,
    /// The root has had another identifier since, or none: what was changed since may be
    /// remembered.
    old: bool,
}

/// Root and identifier.
const fn parts(vttbr: u64) -> (u64, u16) {
    (vttbr & 0xffff_ffff_fffe, (vttbr >> 48) as u16)
}

/// More are not kept.
const MOST: usize = 64;

impl Replay {
    /// Nothing has happened yet. All tables lie in `memory`; all frames of it are free.
    pub fn new(architecture: Architecture, cpus: usize, memory: Memory) -> Self {
        Self {
            hardware: Hardware::new(architecture, cpus, memory, 0, None),
            replayed: Replayed::default(),
            findings: Vec::new(),
            step: 0,
            announced: vec![0; cpus],
            passed: vec![vec![0; cpus]; cpus],
            vttbr: vec![None; cpus],
            before: vec![Vec::new(); cpus],
            last: vec![None; cpus],
            spaces: Vec::new(),
            held: Vec::new(),
            empty: Vec::new(),
        }
    }

    /// Returns the errors, in order.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// How much there was of each.
    pub fn replayed(&self) -> Replayed {
        Replayed { owed: self.hardware.obligations.borrow().latest(), ..self.replayed }
    }

    /// The number of the change up to which this CPU has seen that no walk is left of which `of`
    /// announces; nothing for CPUs that there are not.
    pub fn passed(&self, cpu: usize, of: usize) -> Option<u64> {
        self.passed.get(cpu)?.get(of).copied()
    }

    fn find(&mut self, rule: Rule, cpu: usize, what: String) {
        if self.findings.len() < MOST {
            self.findings.push(Finding { rule, what, cpu, step: self.step });
        }
    }

    /// One thing happens.
    fn happen(&mut self, cpu: usize, what: impl FnOnce(&mut Self)) {
        self.step += 1;
        if cpu >= self.vttbr.len() {
            self.find(Rule::Program, cpu, "there is no such CPU".into());
            return;
        }
        what(self);
        let found = self.hardware.violations.take();
        for violation in found {
            self.find(violation.rule, violation.cpu, violation.what);
        }
    }

    /// A frame is taken for a table.
    pub fn taken(&mut self, cpu: usize, frame: u64) {
        self.happen(cpu, |this| {
            this.replayed.frames += 1;
            if !this.hardware.memory.take_at(frame) {
                let what = format!("{frame:#x} is taken, and is not free");
                this.find(Rule::Program, cpu, what);
            }
        });
    }

    /// A frame that was a table is given back.
    pub fn given(&mut self, cpu: usize, frame: u64) {
        self.happen(cpu, |this| {
            this.replayed.frames += 1;
            let memory = &this.hardware.memory;
            let meta = memory.frame_at(frame).map(|frame| memory.meta(frame));
            let cut = meta
                .filter(|meta| meta.state.get() == State::Detached)
                .map(|meta| (meta.cut.get(), meta.first.get()));
            let held = if let Some((cut, first)) = cut
                && let Some(other) = this.passed[cpu].iter().position(|&passed| passed < cut)
            {
                Some(format!(
                    "the frame at {frame:#x} is given back too early: a walk of CPU {other} may \
                     hold the table for {first:#x}, and since it was detached CPU {cpu} has not \
                     seen that none does"
                ))
            } else {
                None
            };
            this.hardware.give_frame(cpu, frame);
            // The hardware's reason first, if it has one.
            if let Some(what) = held.filter(|_| this.hardware.violations.borrow().is_empty()) {
                this.find(Rule::FreedEarly, cpu, what);
            }
        });
    }

    /// A word of a table is stored to, or of what is to be one.
    pub fn store(&mut self, cpu: usize, pa: u64, value: u64, made: Made) {
        self.happen(cpu, |this| {
            this.replayed.stores += 1;
            this.last[cpu] = None;
            if value != 0 && this.is_in_empty(pa) {
                let what = format!(
                    "{value:#x} is stored to {pa:#x}, in a root that is loaded under any identifier"
                );
                this.find(Rule::IdentifierReused, cpu, what);
            }
            let hardware = &this.hardware;
            let Some(frame) = hardware.memory.frame_at(pa) else {
                return;
            };
            let meta = hardware.memory.meta(frame);
            match meta.state.get() {
                State::Private => {
                    meta.writer.set(cpu as u16);
                    meta.epoch.set(hardware.epochs[cpu].get());
                    hardware.memory.write(pa, value);
                }
                // A compare-exchange that was refused stores what was there.
                _ if hardware.memory.read(pa) == value => {}
                _ => {
                    let how = match made {
                        Made::Plain => How::Plain,
                        Made::Release => How::Release,
                        Made::Atomic => How::Atomic,
                    };
                    hardware.store_slowly(cpu, pa, value, how);
                    if this.spaces.len() > 1 {
                        this.release();
                    }
                }
            }
        });
    }

    /// In the end a word of a table is this: no store to it was missed.
    pub fn left(&mut self, pa: u64, value: u64) {
        self.happen(0, |this| {
            let memory = &this.hardware.memory;
            let is_table = memory
                .frame_at(pa)
                .is_some_and(|frame| memory.meta(frame).state.get() == State::Live);
            let seen = memory.read(pa);
            if is_table && seen != value {
                let what = format!(
                    "{value:#x} is at {pa:#x}, and the last store that was seen there is of \
                     {seen:#x}"
                );
                this.find(Rule::Program, 0, what);
            }
        });
    }

    /// A CPU executes a barrier or a TLBI. An instruction that is neither does nothing; of a TLBI
    /// whose operand is needed it has to be known.
    pub fn executed(&mut self, cpu: usize, instruction: u32, operand: Option<u64>) {
        self.happen(cpu, |this| {
            match decode(instruction) {
                Decoded::Dsb { reaches_all, loads } => {
                    this.replayed.barriers += 1;
                    this.barrier(cpu, reaches_all, loads);
                }
                Decoded::Tlbi(op) => {
                    let vmid = this.vttbr[cpu].map_or(0, |vttbr| (vttbr >> 48) as u16);
                    match op.tlbi(operand, vmid) {
                        Some(tlbi) => {
                            this.replayed.invalidations += 1;
                            this.is_synchronised(cpu, &tlbi);
                            let tlbi = match this.last[cpu] {
                                Some(last) => together(&last, &tlbi),
                                None => tlbi,
                            };
                            this.last[cpu] = Some(tlbi);
                            this.hardware.invalidate(cpu, tlbi);
                        }
                        None => this.unsaid(cpu, instruction),
                    }
                }
                Decoded::Isb => this.before[cpu].clear(),
                Decoded::Other => {}
            };
        });
    }

    /// Whether an invalidation is of the identifier that was loaded last.
    fn is_synchronised(&mut self, cpu: usize, tlbi: &Tlbi) {
        let other = self.before[cpu].iter().map(|&vttbr| parts(vttbr).1);
        let Some(id) = tlbi.id else { return };
        if let Some(other) = other.into_iter().find(|&other| other != id) {
            let what = format!(
                "an invalidation of identifier {id} may be of {other}, which was in VTTBR_EL2 \
                 before: there has been no ISB since"
            );
            self.find(Rule::Invalidation, cpu, what);
        }
    }

    /// A CPU executes an instruction whose operand matters, and is not known.
    pub fn unknown(&mut self, cpu: usize, instruction: u32) {
        self.happen(cpu, |this| this.unsaid(cpu, instruction));
    }

    fn unsaid(&mut self, cpu: usize, instruction: u32) {
        let what = format!("what the instruction {instruction:#x} is about was not said");
        self.find(Rule::Program, cpu, what);
    }

    fn barrier(&mut self, cpu: usize, reaches_all: bool, loads: bool) {
        self.last[cpu] = None;
        let pending = &self.hardware.cores[cpu].pending;
        let is_broadcast = pending.borrow().iter().any(|(tlbi, _)| tlbi.broadcast);
        if loads && (reaches_all || !is_broadcast) {
            self.forget(cpu);
        }
        match (reaches_all, loads) {
            (true, true) => self.hardware.complete(cpu),
            (true, false) => {
                self.hardware.publish(cpu);
                if self.spaces.len() > 1 {
                    self.release();
                }
            }
            // What others do is not waited for, nor do they see what was stored.
            (false, true) if !is_broadcast => self.hardware.complete_of(cpu, false),
            _ => {}
        }
    }

    /// Nothing is in this root, and nothing will be. A CPU loads it to have none, or under the
    /// identifier that its next invalidations are about: of what is not mapped nothing is
    /// remembered.
    pub fn empty(&mut self, cpu: usize, root: u64) {
        self.happen(cpu, |this| {
            this.empty.push(root);
            let word = (root..root + this.size_of_root())
                .step_by(8)
                .find(|&word| this.hardware.memory.read(word) != 0);
            if let Some(word) = word {
                let what = format!("the root at {root:#x} is not empty at {word:#x}");
                this.find(Rule::IdentifierReused, cpu, what);
            }
        });
    }

    /// Returns the bytes that the tables of a root take.
    fn size_of_root(&self) -> u64 {
        let tables = self.hardware.first_tables(0, 0).count() as u64;
        tables << self.hardware.memory.page_shift()
    }

    fn is_in_empty(&self, pa: u64) -> bool {
        let is_in = |root: &u64| (*root..root + self.size_of_root()).contains(&pa);
        self.empty.iter().any(is_in)
    }

    /// A CPU loads a root, with its identifier, into `VTTBR_EL2`.
    pub fn load_root(&mut self, cpu: usize, vttbr: u64) {
        self.happen(cpu, |this| {
            this.replayed.roots += 1;
            let (root, id) = parts(vttbr);
            if let Some(before) = this.vttbr[cpu].replace(vttbr) {
                this.before[cpu].push(before);
            }
            if this.empty.contains(&root) {
                return this.hardware.unload(cpu);
            }
            let old = false;
            this.hold(Held { cpu, id, root, old });
            let known = this.spaces.iter().position(|&(of, _)| of == root);
            let space = match known {
                Some(space) => space as u16,
                None => {
                    let space = this.hardware.new_space();
                    this.hardware.attach(cpu, space, root, false, id);
                    this.spaces.push((root, id));
                    space
                }
            };
            let (_, before) = &mut this.spaces[usize::from(space)];
            let before = std::mem::replace(before, id);
            if before != id {
                this.age(root, before);
                this.hardware.spaces.borrow_mut()[usize::from(space)].id = id;
                this.hardware.rename(cpu, space, id);
            }
            this.hardware.load_root(cpu, space);
        });
    }

    /// A CPU may remember something of a root from here on. Whether it may still of another, under
    /// the same identifier; and no other CPU has that under it now.
    fn hold(&mut self, held: Held) {
        let Held { cpu, id, root, .. } = held;
        let is_other = |other: &&Held| other.id == id && other.root != root;
        let stale = self
            .held
            .iter()
            .filter(is_other)
            .find(|other| other.cpu == cpu || self.is_loaded(other));
        if let Some(other) = stale {
            let what = format!(
                "identifier {id} is loaded for the root at {root:#x}, and CPU {} {} that at {:#x} \
                 under it",
                other.cpu,
                if self.is_loaded(other) { "has loaded" } else { "may remember" },
                other.root
            );
            self.find(Rule::IdentifierReused, cpu, what);
        }
        for space in 0..self.spaces.len() {
            let (of, its) = self.spaces[space];
            if its == id && of != root {
                self.spaces[space].1 = NONE;
                self.hardware.spaces.borrow_mut()[space].id = NONE;
                self.age(of, id);
            }
        }
        let is_it = |other: &&mut Held| (other.cpu, other.id, other.root) == (cpu, id, root);
        match self.held.iter_mut().find(is_it) {
            None => self.held.push(held),
            Some(known) if known.old => {
                known.old = false;
                let what = format!(
                    "the root at {root:#x} is loaded under identifier {id}, which it had before, \
                     and CPU {cpu} may remember what was changed since"
                );
                self.find(Rule::IdentifierReused, cpu, what);
            }
            Some(_) => {}
        }
    }

    /// A root does not have this identifier any more.
    fn age(&mut self, root: u64, id: u16) {
        for held in &mut self.held {
            held.old |= held.root == root && held.id == id;
        }
    }

    fn is_loaded(&self, held: &Held) -> bool {
        let mut in_use = self.vttbr[held.cpu].iter().chain(&self.before[held.cpu]);
        in_use.any(|&vttbr| parts(vttbr) == (held.root, held.id))
    }

    /// Forgets the whole identifiers that a CPU has told others to forget, but for what is loaded.
    fn forget(&mut self, cpu: usize) {
        let pending = self.hardware.cores[cpu].pending.borrow();
        let whole: Vec<_> = (pending.iter().map(|(tlbi, _)| *tlbi))
            .filter(|tlbi| tlbi.range.is_none() && tlbi.stages == Stages::Both)
            .collect();
        drop(pending);
        if whole.is_empty() {
            return;
        }
        let held = std::mem::take(&mut self.held);
        let stays = |held: &Held| {
            let covers = |tlbi: &Tlbi| {
                tlbi.id.is_none_or(|id| id == held.id) && (tlbi.broadcast || held.cpu == cpu)
            };
            self.is_loaded(held) || !whole.iter().any(covers)
        };
        self.held = held.into_iter().filter(stays).collect();
        self.release();
    }

    /// Releases what no CPU remembers, or has under no identifier that is the root's: it need not
    /// be forgotten.
    fn release(&self) {
        for (space, &(root, id)) in self.spaces.iter().enumerate() {
            if !self.held.iter().any(|held| held.root == root) {
                self.hardware.obligations.borrow_mut().drop_of(space as u16);
            } else if id == NONE {
                // What was changed visibly is remembered under none that is used: it gets another
                // when it is loaded.
                self.hardware.rename(0, space as u16, NONE);
            }
        }
    }

    /// A CPU reads or writes a page that may be the guest's.
    pub fn touched(&mut self, cpu: usize, page: u64) {
        self.happen(cpu, |this| {
            this.replayed.pages += 1;
            let owed = this.hardware.held_of(cpu, page);
            if let Some(owed) = owed {
                let what = format!(
                    "the translation of {:#x} to the page at {page:#x} is relied on to be \
                     forgotten, and is not: {}",
                    owed.span.0,
                    progress(&owed)
                );
                this.find(Rule::Invalidation, cpu, what);
            }
        });
    }

    /// A CPU goes back to the guest.
    pub fn returned(&mut self, cpu: usize) {
        self.happen(cpu, |this| {
            this.replayed.returns += 1;
            this.before[cpu].clear();
            let obligations = this.hardware.obligations.borrow();
            let own = |o: &&Obligation| usize::from(o.writer) == cpu && !o.harmless;
            let owed = obligations.iter().find(own).cloned();
            drop(obligations);
            if let Some(owed) = owed {
                let what = format!(
                    "the {} of {:#x}..={:#x} was changed, and the CPU goes back to the guest: {}",
                    if owed.table { "table" } else { "translation" },
                    owed.span.0,
                    owed.span.1,
                    progress(&owed)
                );
                this.find(Rule::NeverInvalidated, cpu, what);
                // It is said once.
                this.hardware.obligations.borrow_mut().excuse(owed.number);
            }
        });
    }

    /// The announcement of the walks of CPU number `of` is made or withdrawn. 0 is none.
    pub fn announced(&mut self, of: usize, value: u64) {
        self.step += 1;
        let latest = self.hardware.obligations.borrow().latest();
        // There may be room for more CPUs than there are.
        if value != 0
            && let Some(announced) = self.announced.get_mut(of)
        {
            *announced = latest;
        }
    }

    /// A CPU looks at the announcement of another, and finds this.
    pub fn looked(&mut self, cpu: usize, of: usize, value: u64) {
        self.happen(cpu, |this| {
            this.replayed.looks += 1;
            let latest = this.hardware.obligations.borrow().latest();
            let (Some(passed), Some(&since)) =
                (this.passed[cpu].get_mut(of), this.announced.get(of))
            else {
                return;
            };
            *passed = if value == 0 { latest } else { since };
        });
    }
}

impl Hardware {
    /// Returns the memory that this CPU has taken away, and any may still use to reach a page.
    fn held_of(&self, cpu: usize, page: u64) -> Option<Obligation> {
        let last = page + ((1 << self.memory.page_shift()) - 1);
        let obligations = self.obligations.borrow();
        let leads = |o: &&Obligation| {
            let reaches = |(first, end): (u64, u64)| first <= last && page <= end;
            // What a table that was detached led to is still in it.
            usize::from(o.writer) == cpu
                && !o.harmless
                && match o.table {
                    true => self.leads_to(o.pa, o.depth - 1, page),
                    false => o.memory().is_some_and(reaches),
                }
        };
        obligations.iter().find(leads).cloned()
    }

    /// Whether a leaf of a table, or below it, leads to a page.
    fn leads_to(&self, table: u64, depth: u8, page: u64) -> bool {
        (0..self.memory.entries() as u64).any(|index| {
            let entry = self.memory.read(table + index * 8);
            match self.decode(depth, 0, tablewright_walker::Denied::default(), entry) {
                Descriptor::Leaf(leaf) => (leaf.pa..leaf.pa + leaf.size).contains(&page),
                Descriptor::Table { pa, .. } if depth > 0 && self.memory.frame_at(pa).is_some() => {
                    self.leads_to(pa, depth - 1, page)
                }
                _ => false,
            }
        })
    }
}

/// Two invalidations with nothing between them, if they differ in their addresses alone, and these
/// adjoin: all of it is invalidated, as by one. What is remembered of a table goes when all that is
/// below it does.
fn together(last: &Tlbi, tlbi: &Tlbi) -> Tlbi {
    let (Some((first, end)), Some((next, to))) = (last.range, tlbi.range) else {
        return *tlbi;
    };
    let range = Some((first, to));
    let both = Tlbi { range, ..*tlbi };
    let is_alike = Tlbi { range, ..*last } == both;
    match is_alike && end.checked_add(1) == Some(next) {
        true => both,
        false => *tlbi,
    }
}

/// A decoded instruction, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decoded {
    /// `DSB`: whether it is about all CPUs, and whether about loads as well as stores. One that is
    /// about loads alone is no barrier here.
    Dsb {
        reaches_all: bool,
        loads: bool,
    },
    Tlbi(Op),
    Isb,
    Other,
}

/// The fields of a TLBI (DDI 0487 C5.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Op {
    op1: u32,
    crm: u32,
    op2: u32,
}

fn decode(instruction: u32) -> Decoded {
    let field = |first: u32, bits: u32| instruction >> first & ((1 << bits) - 1);
    // DSB: CRm is the domain and what it is about (C6.2).
    if instruction & 0xffff_f0ff == 0xd503_309f {
        let (domain, about) = (field(10, 2), field(8, 2));
        return match about {
            1 => Decoded::Other,
            _ => Decoded::Dsb { reaches_all: domain != 1, loads: about != 2 },
        };
    }
    if instruction == 0xd503_3fdf {
        return Decoded::Isb;
    }
    // SYS with op0 1 and CRn 8, or 9 for those that do not wait for some devices.
    match instruction & 0xfff8_e000 {
        0xd508_8000 => Decoded::Tlbi(Op { op1: field(16, 3), crm: field(8, 4), op2: field(5, 3) }),
        _ => Decoded::Other,
    }
}

impl Op {
    /// Returns the invalidation of the guest's translations, whose identifier is loaded. One of
    /// EL2's own is none of these, and covers nothing. `None`: its operand is needed, and not
    /// known; or there is no such TLBI.
    fn tlbi(self, operand: Option<u64>, vmid: u16) -> Option<Tlbi> {
        let broadcast = Tlbi { id: Some(vmid), broadcast: true, ..Tlbi::ALL };
        // By intermediate physical address, which have an order of their own.
        if self.op1 == 4 && (self.crm == 0 || self.crm == 4) {
            let (is_range, leaves_only, is_local) = match (self.crm, self.op2) {
                (0, 1) | (4, 0) => (false, false, false),
                (0, 5) | (4, 4) => (false, true, false),
                (0, 2) | (4, 3) => (true, false, false),
                (0, 6) | (4, 7) => (true, true, false),
                (4, 1) => (false, false, true),
                (4, 5) => (false, true, true),
                (4, 2) => (true, false, true),
                (4, 6) => (true, true, true),
                _ => return None,
            };
            let (range, depth) = if is_range { range(operand?)? } else { page(operand?) };
            return Some(Tlbi {
                stages: Stages::Second,
                range: Some(range),
                // Each address takes the leaf around it.
                stride: Some(12),
                depth,
                leaves_only,
                broadcast: !is_local,
                ..broadcast
            });
        }
        let (is_range, is_local) = match self.crm {
            1 | 3 => (false, false),
            2 | 5 => (true, false),
            6 => (true, true),
            7 => (false, true),
            _ => return None,
        };
        let all = Tlbi { broadcast: !is_local, ..broadcast };
        let first = Tlbi { stages: Stages::First, ..all };
        match (self.op1, self.op2, is_range) {
            (0, 0, false) => Some(first),
            (0, 2, false) => Some(Tlbi { asid: Some((operand? >> 48) as u16), ..first }),
            // By an address of the guest's own: less than all of what is combined with a page,
            // whatever it is.
            (0, 1 | 3 | 5 | 7, _) => Some(Tlbi { range: Some((0, 0)), ..first }),
            (4, 6, false) => Some(all),
            (4, 4, false) => Some(Tlbi { id: None, ..all }),
            // Of EL2's own map: of the guest's not an address.
            (4, 0, false) | (4, 1 | 5, _) => Some(Tlbi { range: Some((0, 0)), ..first }),
            _ => None,
        }
    }
}

/// Addresses, first and last, and the levels below the leaf, if that is said.
type Named = ((u64, u64), Option<u8>);

/// The operand of a TLBI by address (C5.5, TLBI IPAS2E1): bits 51 to 12 of it; the hint is a
/// granule and a level.
fn page(operand: u64) -> Named {
    let first = (operand & ((1 << 40) - 1)) << 12;
    let hint = operand >> 44 & 0xf;
    // Without a granule there is no hint. A level of 4 KiB granules.
    let depth = match (hint >> 2, hint & 3) {
        (1, level @ 1..=3) => Some(3 - level as u8),
        _ => None,
    };
    ((first, first + 0xfff), depth)
}

/// The operand of a TLBI by range (C5.5, TLBI RIPAS2E1), with 4 KiB granules; none other is loaded.
fn range(operand: u64) -> Option<Named> {
    if operand >> 46 & 3 != 1 {
        return None;
    }
    let first = (operand & ((1 << 37) - 1)) << 12;
    let (num, scale) = (operand >> 39 & 0x1f, operand >> 44 & 3);
    let depth = match operand >> 37 & 3 {
        0 => None,
        level => Some(3 - level as u8),
    };
    let pages = (num + 1) << (5 * scale + 1);
    Some(((first, first + (pages << 12) - 1), depth))
}

//! Remote flushes against plain models: which CPUs are told, what is forgotten, under which
//! identifier, and by which instruction.
//!
//! One thread plays all CPUs; an interrupt is taken as soon as it is sent. What CPUs do at once is
//! for loom, and for the machine.

mod handlers;
mod identifiers;
mod instructions;
mod many;
mod told;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use tablewright::format::X86_64;
use tablewright::hyperv::{
    self, Flags, FlushEncoder, HostCaps, Hypercall, Hypercalls, Input, Output, PAGE_WORDS, Status,
};
use tablewright::shared::{DeferredReclaim, SharedPlatform};
use tablewright::shootdown::amd::{self, Invlpgb};
use tablewright::shootdown::arm64::{self, Instruction, Op, Regime, Tlbi};
use tablewright::shootdown::*;
use tablewright::{AddressSpace, Attrs, Invalidation, Level, Pa, Span, Stale, Va, What};
use tablewright_hosted::Threads;

const CPUS: usize = 5;
const SPACES: usize = 18;
const PAGES: u64 = 6;
const PAGE: u64 = 4096;
/// Sixteen identifiers for five CPUs.
const BITS: u32 = 4;

fn range(first: u64, pages: u64, tables: bool) -> Stale {
    Stale { first: first * PAGE, last: (first + pages) * PAGE - 1, level: None, tables }
}

/// Of whichever space it is.
fn of(what: What<'_>, global: bool) -> Invalidation<'_> {
    Invalidation { root: Pa::new(0x1000), id: 0, global, what }
}

// ---- Which CPUs are told ----

/// The state of a model's CPU.
#[derive(Clone, Default)]
struct Core {
    /// The space that is loaded, and its identifier.
    loaded: Option<(usize, u16)>,
    lazy: bool,
    /// It does not run.
    preempted: bool,
    offline: bool,
    /// Version of each page, by identifier and page, and of tables.
    tlb: BTreeMap<(u16, u64), u32>,
    tables: BTreeMap<u16, u32>,
    /// Version of each global page, and, by identifier, of the tables above them.
    globals: BTreeMap<u64, u32>,
    global_tables: BTreeMap<u16, u32>,
}

impl Core {
    fn id(&self) -> u16 {
        self.loaded.map_or(0, |(_, id)| id)
    }

    fn forget(&mut self, what: &LocalFlush) {
        match *what {
            LocalFlush::Everything => {
                self.forget(&LocalFlush::All);
                self.globals.clear();
            }
            LocalFlush::All => {
                self.tlb.clear();
                self.tables.clear();
                self.global_tables.clear();
            }
            LocalFlush::Space(id) => {
                self.tlb.retain(|&(its, _), _| its != id);
                self.tables.remove(&id);
                self.global_tables.remove(&id);
            }
            LocalFlush::Range { id, range, global } => {
                // INVLPG, of what is loaded.
                assert!(global || self.loaded.is_some() && id == self.id());
                self.forget_range(Some(self.id()), &range, global);
            }
        }
    }

    /// Under one identifier, or all.
    fn forget_range(&mut self, id: Option<u16>, range: &Stale, global: bool) {
        let within = |page: u64| range.first / PAGE <= page && page <= range.last / PAGE;
        let under = |its: u16| id.is_none_or(|id| id == its);
        self.tlb.retain(|&(its, page), _| !under(its) || !within(page));
        if range.tables {
            self.tables.retain(|&its, _| !under(its));
            self.global_tables.retain(|&its, _| !under(its));
        }
        if global {
            self.globals.retain(|&page, _| !within(page));
        }
    }
}

/// A flush to be made.
#[derive(Clone, Debug)]
struct Asked {
    space: usize,
    ranges: Vec<(u64, u64)>,
    tables: bool,
    global: bool,
}

struct World<'m> {
    shootdown: &'m Shootdown<'m>,
    spaces: &'m [Space<'m>],
    allocator: RefCell<Allocator<'m>>,
    cores: RefCell<Vec<Core>>,
    flags: [PreemptedFlag; CPUS],
    /// Version of the pages of each space, and of its tables; of global pages, and theirs.
    pages: RefCell<[[u32; PAGES as usize]; SPACES]>,
    tables: Cell<[u32; SPACES]>,
    globals: Cell<[u32; PAGES as usize]>,
    global_tables: Cell<u32>,
    /// Flushes of handlers, each to be made in the midst of the interrupts of the one before, when
    /// so many CPUs have taken theirs.
    handlers: RefCell<Vec<(usize, Asked)>>,
    interrupts: Cell<u64>,
    forgets: RefCell<Vec<(usize, LocalFlush)>>,
    hypercalls: Cell<u64>,
    hypervisor_refuses: Cell<bool>,
}

/// A CPU of the world.
struct On<'w, 'm>(usize, &'w World<'m>);

// SAFETY: no memory depends on it.
unsafe impl Actions for On<'_, '_> {
    fn flush_local(&self, what: LocalFlush) {
        self.1.cores.borrow_mut()[self.0].forget(&what);
        self.1.forgets.borrow_mut().push((self.0, what));
    }

    fn interrupt(&self, cpus: &Cpus) {
        assert!(!cpus.contains(self.0) && !cpus.is_empty());
        self.1.interrupts.set(self.1.interrupts.get() + 1);
        let mut handler = self.1.handlers.borrow_mut().pop();
        for (count, cpu) in cpus.iter().enumerate() {
            if let Some((_, asked)) = handler.take_if(|(after, _)| *after <= count) {
                self.1.edit(self.0, &asked, &[]);
            }
            assert!(!self.1.cores.borrow()[cpu].offline);
            // One that does not run takes it when it does; here it is had to run at once.
            self.1.schedule(cpu);
            self.1.here(cpu).receive(&On(cpu, self.1));
        }
        if let Some((_, asked)) = handler {
            self.1.edit(self.0, &asked, &[]);
        }
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.1.allocator.borrow_mut());
    }

    fn relax(&self) {
        panic!("all CPUs have answered");
    }
}

/// A number that is not that of the operating system; one CPU has none yet.
fn vp_index(cpu: usize) -> Option<u32> {
    (cpu != 3).then_some(70 * (cpu as u32 + 1) % 256)
}

// SAFETY: there are no hypercalls here.
unsafe impl Hypercalls for &World<'_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        vp_index(cpu)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        with(&mut [0x5555_5555_5555_5555; PAGE_WORDS]);
    }

    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        self.hypercalls.set(self.hypercalls.get() + 1);
        if self.hypervisor_refuses.get() {
            return Output::new(Status::PARAMETER, 0);
        }
        let host = HostCaps {
            processors: 512,
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let flush = hyperv::decode(input, 0, page, &host).unwrap();
        let vps = flush.targets.expect("some CPUs");
        let mut named = 0;
        for cpu in 0..CPUS {
            if !vp_index(cpu).is_some_and(|vp| vps.contains(vp as usize)) {
                continue;
            }
            named += 1;
            // By the root of the tables, whatever the identifier.
            let id = flush.space.map(|root| {
                let mut spaces = self.spaces.iter();
                let space = spaces.find(|space| space.root().get() == root);
                let space = space.unwrap_or_else(|| panic!("{root:#x} is no space"));
                space.identity().id()
            });
            let core = &mut self.cores.borrow_mut()[cpu];
            if flush.is_everything() {
                assert_eq!(flush.non_global_only, id.is_some());
                core.forget(&id.map_or(LocalFlush::Everything, LocalFlush::Space));
            }
            for pages in flush.ranges() {
                core.forget_range(id, &range(pages.first / PAGE, pages.count, true), true);
            }
        }
        assert_eq!(named, vps.len(), "there is no such CPU");
        Output::new(Status::SUCCESS, input.reps())
    }
}

// SAFETY: there are no TLBs but the model's.
unsafe impl amd::Amd for &World<'_> {
    fn invlpgb(&self, operands: Invlpgb) {
        let Invlpgb { rax, ecx, edx } = operands;
        let id = (rax & 2 != 0).then_some((edx >> 16) as u16);
        let global = rax & 8 != 0;
        assert_eq!(ecx >> 31, 0);
        let range = range(rax >> 12, u64::from(ecx) + 1, rax & 16 == 0);
        for core in self.cores.borrow_mut().iter_mut() {
            match (rax & 1 != 0, id) {
                (true, _) => core.forget_range(id, &range, global),
                (false, Some(id)) => core.forget(&LocalFlush::Space(id)),
                (false, None) if global => core.forget(&LocalFlush::Everything),
                (false, None) => core.forget(&LocalFlush::All),
            }
        }
    }

    fn tlbsync(&self) {}
}

impl<'m> World<'m> {
    fn here(&self, cpu: usize) -> PerCpu<'_, 'm> {
        // SAFETY: one thread plays all CPUs (1.), without interrupts (2.), by the model (3., 4.).
        unsafe { self.shootdown.on(cpu) }.unwrap()
    }

    /// The host has it run. What KVM flushes is all that there is.
    fn schedule(&self, cpu: usize) {
        if self.flags[cpu].enter() {
            self.cores.borrow_mut()[cpu].forget(&LocalFlush::Everything);
        }
        self.cores.borrow_mut()[cpu].preempted = false;
    }

    /// It runs, and is online.
    fn ready(&self, cpu: usize) {
        self.schedule(cpu);
        if std::mem::take(&mut self.cores.borrow_mut()[cpu].offline) {
            self.here(cpu).go_online(&On(cpu, self));
        }
    }

    fn switch(&self, cpu: usize, to: Option<usize>) {
        let from = self.cores.borrow()[cpu].loaded.map(|(space, _)| space);
        let space = |number: usize| &self.spaces[number];
        self.here(cpu)
            .switch(from.map(space), to.map(space), &On(cpu, self), |id| {
                let core = &mut self.cores.borrow_mut()[cpu];
                core.loaded = to.map(|space| (space, id));
                core.lazy = false;
            })
            .unwrap();
    }

    /// Uses a page: what is remembered has to be what memory says.
    fn touch(&self, cpu: usize, page: u64) {
        let core = &mut self.cores.borrow_mut()[cpu];
        if let Some((space, id)) = core.loaded {
            let now = self.pages.borrow()[space][page as usize];
            let seen = *core.tlb.entry((id, page)).or_insert(now);
            assert_eq!(seen, now, "page {page} of {space} on {cpu}");
            self.walk(core);
        }
    }

    /// Uses a global page, whatever is loaded.
    fn touch_global(&self, cpu: usize, page: u64) {
        let core = &mut self.cores.borrow_mut()[cpu];
        let now = self.globals.get()[page as usize];
        let seen = *core.globals.entry(page).or_insert(now);
        assert_eq!(seen, now, "global page {page} on {cpu}");
        let (id, now) = (core.id(), self.global_tables.get());
        let seen = *core.global_tables.entry(id).or_insert(now);
        assert_eq!(seen, now, "tables of global pages on {cpu}");
    }

    /// The walker goes through the tables of what is loaded, used or not.
    fn walk(&self, core: &mut Core) {
        if let Some((space, id)) = core.loaded {
            let now = self.tables.get()[space];
            let seen = *core.tables.entry(id).or_insert(now);
            assert_eq!(seen, now, "tables of {space}");
        }
    }

    /// Changes pages and flushes them. CPUs that have the space loaded have forgotten, or do not
    /// use it.
    fn edit(&self, cpu: usize, asked: &Asked, messengers: &[&dyn Messenger]) {
        let &Asked { space, ref ranges, tables, global } = asked;
        let bump = |versions: &Cell<[u32; PAGES as usize]>, page: u64| {
            let mut all = versions.get();
            all[page as usize] += 1;
            versions.set(all);
        };
        let mut batch = Batch::new();
        let mut changed = BTreeSet::new();
        for &(first, pages) in ranges {
            let pages = pages.min(PAGES - first);
            let range = range(first, pages, tables);
            batch.add(&of(What::Ranges(&[range]), global));
            for page in first..first + pages {
                changed.insert(page);
                self.pages.borrow_mut()[space][page as usize] += 1;
                if global {
                    bump(&self.globals, page);
                }
            }
        }
        if tables {
            let mut versions = self.tables.get();
            versions[space] += 1;
            self.tables.set(versions);
            self.global_tables.update(|version| version + u32::from(global));
        }
        let root = self.spaces[space].root();
        self.here(cpu).flush(
            &self.spaces[space],
            &batch.flush(root, 0),
            messengers,
            &On(cpu, self),
        );
        for (cpu, core) in self.cores.borrow_mut().iter_mut().enumerate() {
            if core.preempted || core.offline {
                continue;
            }
            let now = self.globals.get();
            for &page in changed.iter().filter(|_| global) {
                let seen = core.globals.get(&page);
                let right = seen.is_none_or(|&seen| seen == now[page as usize]);
                assert!(right, "global page {page} on {cpu} after a flush");
            }
            let now = self.global_tables.get();
            let mut seen = core.global_tables.values().filter(|_| global && tables);
            assert!(seen.all(|&seen| seen == now), "tables of global pages on {cpu} after a flush");
            let Some((_, id)) = core.loaded.filter(|&(its, _)| its == space) else {
                continue;
            };
            if tables {
                self.walk(core);
            }
            for &page in changed.iter().filter(|_| !core.lazy) {
                let now = self.pages.borrow()[space][page as usize];
                let right = core.tlb.get(&(id, page)).is_none_or(|&seen| seen == now);
                assert!(right, "page {page} of space {space} on {cpu} after a flush");
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Switch(usize, Option<usize>),
    Touch(usize, u64),
    TouchGlobal(usize, u64),
    Lazy(usize),
    Resume(usize),
    Preempt(usize),
    Offline(usize),
    Flush { cpu: usize, asked: Asked, way: u8, refuses: bool, handlers: Vec<(usize, Asked)> },
}

fn asked() -> impl Strategy<Value = Asked> {
    let ranges = prop::collection::vec((0..PAGES, 1..3u64), 1..4);
    (0..SPACES, ranges, any::<bool>(), prop::bool::weighted(0.3))
        .prop_map(|(space, ranges, tables, global)| Asked { space, ranges, tables, global })
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = || 0..CPUS;
    let handlers = prop::collection::vec((0..CPUS, asked()), 0..3);
    prop_oneof![
        6 => (cpu(), prop::option::weighted(0.9, 0..SPACES)).prop_map(|(cpu, to)| Step::Switch(cpu,
            to)),
        12 => (cpu(), 0..PAGES).prop_map(|(cpu, page)| Step::Touch(cpu, page)),
        6 => (cpu(), 0..PAGES).prop_map(|(cpu, page)| Step::TouchGlobal(cpu, page)),
        2 => cpu().prop_map(Step::Lazy),
        2 => cpu().prop_map(Step::Resume),
        2 => cpu().prop_map(Step::Preempt),
        1 => cpu().prop_map(Step::Offline),
        8 => (cpu(), asked(), 0..6u8, prop::bool::weighted(0.3), handlers).prop_map(
            |(cpu, asked, way, refuses, handlers)| Step::Flush { cpu, asked, way, refuses,
                handlers }
        ),
    ]
}

/// Runs a program on a world at rest: with identifiers of so many bits, if any.
fn with_world<T>(bits: Option<u32>, program: impl FnOnce(&World<'_>) -> T) -> T {
    let mut cpus = [const { CpuCell::new() }; CPUS];
    let mut inboxes = [const { AtomicU64::new(0) }; inbox_words(CPUS)];
    let mut holders = [const { Holder::new() }; CPUS];
    let mut memory = [0; Allocator::words(5)];
    let allocator = Allocator::new(bits.unwrap_or(BITS), &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &mut holders).filter(|_| bits.is_some());
    let shootdown = Shootdown::new(&mut cpus, &mut inboxes, identifiers, 10).unwrap();
    let mut masks = [const { [const { AtomicU64::new(0) }; Space::words(CPUS)] }; SPACES];
    let spaces: Vec<Space<'_>> = (masks.iter_mut().zip(1..))
        .map(|(mask, number)| Space::new(Pa::new(number << 12), mask))
        .collect();
    program(&World {
        shootdown: &shootdown,
        spaces: &spaces,
        allocator: RefCell::new(allocator),
        cores: RefCell::new(vec![Core::default(); CPUS]),
        flags: Default::default(),
        pages: RefCell::default(),
        tables: Cell::default(),
        globals: Cell::default(),
        global_tables: Cell::default(),
        handlers: RefCell::default(),
        interrupts: Cell::default(),
        forgets: RefCell::default(),
        hypercalls: Cell::default(),
        hypervisor_refuses: Cell::default(),
    })
}

fn play(world: &World<'_>, steps: &[Step], identified: bool) {
    let spaces = world.spaces;
    let hypercall = Hypercall { encoder: FlushEncoder::default(), cost: 15, calls: world };
    // SAFETY: `World::schedule` is the host (1.).
    let deferred = unsafe { Deferred::new(|cpu| world.flags.get(cpu)) };
    let broadcast = amd::InvlpgbMessenger { most: 1, cost: 2, hardware: world };
    let ways: [&[&dyn Messenger]; 6] = [
        &[],
        &[&hypercall],
        &[&deferred],
        &[&deferred, &hypercall],
        &[&broadcast],
        &[&broadcast, &hypercall, &deferred],
    ];
    let core = |cpu: usize| world.cores.borrow()[cpu].clone();
    for one in steps {
        match *one {
            Step::Switch(cpu, to) => {
                world.ready(cpu);
                world.switch(cpu, to);
                if !identified {
                    // As a load of CR3 does.
                    world.cores.borrow_mut()[cpu].forget(&LocalFlush::All);
                }
            }
            Step::Touch(cpu, page) => {
                world.ready(cpu);
                let core = core(cpu);
                if let Some((space, _)) = core.loaded.filter(|_| core.lazy) {
                    world.here(cpu).resume(&spaces[space], &On(cpu, world));
                    world.cores.borrow_mut()[cpu].lazy = false;
                }
                world.touch(cpu, page);
            }
            Step::TouchGlobal(cpu, page) => {
                world.ready(cpu);
                world.touch_global(cpu, page);
            }
            Step::Lazy(cpu) => {
                world.ready(cpu);
                if core(cpu).loaded.is_some() {
                    world.here(cpu).be_lazy();
                    world.cores.borrow_mut()[cpu].lazy = true;
                }
            }
            Step::Resume(cpu) => {
                world.ready(cpu);
                if let Some((space, _)) = core(cpu).loaded {
                    world.here(cpu).resume(&spaces[space], &On(cpu, world));
                    world.cores.borrow_mut()[cpu].lazy = false;
                }
            }
            Step::Preempt(cpu) => {
                world.flags[cpu].preempt();
                world.cores.borrow_mut()[cpu].preempted = true;
            }
            Step::Offline(cpu) => {
                world.ready(cpu);
                world.switch(cpu, None);
                world.here(cpu).go_offline(&On(cpu, world));
                world.cores.borrow_mut()[cpu].offline = true;
            }
            Step::Flush { cpu, ref asked, way, refuses, ref handlers } => {
                world.ready(cpu);
                world.hypervisor_refuses.set(refuses);
                world.handlers.borrow_mut().clone_from(handlers);
                world.edit(cpu, asked, ways[usize::from(way)]);
                world.handlers.borrow_mut().clear();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn whatever_has_changed_is_forgotten_before_it_is_used(
        steps in prop::collection::vec(step(), 1..120),
        // None; fewer than there are spaces; more than a CPU knows.
        bits in prop::sample::select(vec![None, Some(BITS), Some(BITS), Some(5)]),
    ) {
        with_world(bits, |world| play(world, &steps, bits.is_some()));
    }
}

impl World<'_> {
    /// Of space 0.
    fn flush(&self, cpu: usize, what: What<'_>, global: bool, messengers: &[&dyn Messenger]) {
        let (space, actions) = (&self.spaces[0], On(cpu, self));
        self.here(cpu).flush(space, &of(what, global), messengers, &actions);
    }

    fn flush_ranges(&self, cpu: usize, ranges: &[Stale]) {
        self.flush(cpu, What::Ranges(ranges), false, &[]);
    }

    /// Takes the record of what was forgotten since, on which CPU, and how often some were
    /// interrupted.
    fn take(&self) -> (Vec<(usize, LocalFlush)>, u64) {
        (self.forgets.take(), self.interrupts.take())
    }
}

fn space(id: u16) -> LocalFlush {
    LocalFlush::Space(id)
}

fn part(id: u16, range: Stale) -> LocalFlush {
    let global = false;
    LocalFlush::Range { id, range, global }
}

fn with_global(id: u16, range: Stale) -> LocalFlush {
    let global = true;
    LocalFlush::Range { id, range, global }
}

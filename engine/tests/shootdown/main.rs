//! Remote flushes against plain models: which CPUs are told, what is forgotten, under which identifier, and by which
//! instruction.
//!
//! One thread plays all CPUs; an interrupt is taken as soon as it is sent. What CPUs do at once is for loom, and for
//! the machine.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use tablewright::format::X86_64;
use tablewright::hosted::Threads;
use tablewright::hyperv::{
    self, Flags, FlushEncoder, HostCaps, Input, Output, PAGE_WORDS, Status, Targets, VpSet,
};
use tablewright::shared::{DeferredReclaim, SharedPlatform};
use tablewright::shootdown::amd::{self, Invlpgb};
use tablewright::shootdown::arm64::{self, Instruction, Op, Regime, Tlbi};
use tablewright::shootdown::*;
use tablewright::{AddressSpace, Attrs, Invalidation, Level, Pa, Span, Stale, Va, What};

const CPUS: usize = 5;
const SPACES: usize = 9;
const PAGES: u64 = 6;
const PAGE: u64 = 4096;
/// Eight identifiers for five CPUs.
const BITS: u32 = 3;

fn range(first: u64, pages: u64, tables: bool) -> Stale {
    Stale {
        first: first * PAGE,
        last: (first + pages) * PAGE - 1,
        level: None,
        tables,
    }
}

/// Of whichever space it is.
fn of(what: What<'_>, global: bool) -> Invalidation<'_> {
    Invalidation {
        root: Pa::new(0x1000),
        id: 0,
        global,
        what,
    }
}

// ---- Identifiers ----

proptest! {
    #[test]
    fn no_identifier_is_loaded_over_entries_of_another_space(
        loads in prop::collection::vec((0..CPUS, 0..SPACES), 1..400),
    ) {
        let holders = [const { Holder::new() }; CPUS];
        let mut memory = [0; Allocator::words(BITS)];
        let mut allocator = Allocator::new(BITS, &mut memory).unwrap();
        let identifiers = Identifiers::new(&allocator, &holders).unwrap();
        let spaces = [const { Identity::new() }; SPACES];
        // Of which spaces a CPU may remember something under each identifier, and what it has loaded.
        let mut remembered = vec![BTreeMap::<u16, BTreeSet<usize>>::new(); CPUS];
        let mut loaded = [None; CPUS];
        for (cpu, space) in loads {
            let mut forgets = false;
            let id = identifiers.load(cpu, &spaces[space], |with| with(&mut allocator), || forgets = true);
            let id = id.unwrap();
            prop_assert!(0 < id && id < 1 << BITS);
            prop_assert_eq!(spaces[space].id(), id);
            if forgets {
                remembered[cpu].clear();
            }
            remembered[cpu].entry(id).or_default().insert(space);
            prop_assert_eq!(remembered[cpu][&id].len(), 1, "identifier {} on CPU {}", id, cpu);
            loaded[cpu] = Some((space, id));
            // Hardware that tells all CPUs does so by identifier: those that are in use belong to one space each.
            for (space, id) in loaded.iter().flatten() {
                for (other, its) in loaded.iter().flatten() {
                    prop_assert_eq!(space == other, id == its);
                }
            }
        }
    }
}

#[test]
fn identifiers_are_not_too_few() {
    let mut memory = [0; 1];
    let holders = [const { Holder::new() }; 7];
    let allocator = Allocator::new(BITS, &mut memory).unwrap();
    assert!(Identifiers::new(&allocator, &holders[..6]).is_some());
    assert!(Identifiers::new(&allocator, &holders).is_none());
    assert!(Allocator::new(BITS, &mut []).is_none());
    assert!(Allocator::new(0, &mut memory).is_none() && Allocator::new(17, &mut memory).is_none());
}

#[test]
fn a_space_that_is_loaded_everywhere_keeps_its_identifier() {
    let holders = [const { Holder::new() }; 2];
    let mut memory = [0; 1];
    let mut allocator = Allocator::new(2, &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &holders).unwrap();
    assert_eq!(identifiers.generation(), 1);
    let (stays, others) = (Identity::new(), [const { Identity::new() }; 20]);
    let flushes = Cell::new(0_u64);
    let mut load = |cpu, space: &Identity| {
        let forget = || flushes.set(flushes.get() + 1);
        identifiers.load(cpu, space, |with| with(&mut allocator), forget)
    };
    let id = load(0, &stays);
    for space in &others {
        // Generations pass, and CPU 0 does not look up.
        assert_ne!(load(1, space), id);
    }
    // Once in each generation but the first.
    assert_eq!(flushes.get(), identifiers.generation() - 1);
    assert!(flushes.replace(0) > 3);
    assert_eq!(load(0, &stays), id);
    assert_eq!(flushes.get(), 1);
}

// ---- Which CPUs are told ----

/// What a model of a CPU has.
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

    fn forget(&mut self, what: &Forget) {
        match *what {
            Forget::Everything => {
                self.forget(&Forget::All);
                self.globals.clear();
            }
            Forget::All => {
                self.tlb.clear();
                self.tables.clear();
                self.global_tables.clear();
            }
            Forget::Space(id) => {
                self.tlb.retain(|&(its, _), _| its != id);
                self.tables.remove(&id);
                self.global_tables.remove(&id);
            }
            Forget::Range { id, range, global } => {
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
        self.tlb
            .retain(|&(its, page), _| !under(its) || !within(page));
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
    /// Flushes of handlers, each to be made in the midst of the interrupts of the one before, when so many CPUs have
    /// taken theirs.
    handlers: RefCell<Vec<(usize, Asked)>>,
    interrupts: Cell<u64>,
    forgets: RefCell<Vec<(usize, Forget)>>,
    hypercalls: Cell<u64>,
    hypervisor_refuses: Cell<bool>,
}

/// A CPU of the world.
struct On<'w, 'm>(usize, &'w World<'m>);

// SAFETY: no memory depends on it.
unsafe impl Actions for On<'_, '_> {
    fn forget(&self, what: Forget) {
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
unsafe impl hyperv::Caller for &World<'_> {
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
            if !vp_index(cpu).is_some_and(|vp| vps.contains(vp)) {
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
                core.forget(&id.map_or(Forget::Everything, Forget::Space));
            }
            for pages in flush.ranges() {
                core.forget_range(id, &range(pages.first / PAGE, pages.count, true), true);
            }
        }
        assert_eq!(named, vps.len(), "there is no such CPU");
        Output::new(Status::SUCCESS, input.reps())
    }
}

impl Hypercalls for &World<'_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        vp_index(cpu)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        with(&mut [0x5555_5555_5555_5555; PAGE_WORDS]);
    }
}

impl amd::Amd for &World<'_> {
    fn invlpgb(&self, operands: Invlpgb) {
        let Invlpgb { rax, ecx, edx } = operands;
        let id = (rax & 2 != 0).then_some((edx >> 16) as u16);
        let global = rax & 8 != 0;
        assert_eq!(ecx >> 31, 0);
        let range = range(rax >> 12, u64::from(ecx) + 1, rax & 16 == 0);
        for core in self.cores.borrow_mut().iter_mut() {
            match (rax & 1 != 0, id) {
                (true, _) => core.forget_range(id, &range, global),
                (false, Some(id)) => core.forget(&Forget::Space(id)),
                (false, None) if global => core.forget(&Forget::Everything),
                (false, None) => core.forget(&Forget::All),
            }
        }
    }

    fn tlbsync(&self) {}
}

impl<'m> World<'m> {
    fn here(&self, cpu: usize) -> Here<'_, 'm> {
        self.shootdown.on(cpu).unwrap()
    }

    /// The host has it run. What KVM flushes is all that there is.
    fn schedule(&self, cpu: usize) {
        if self.flags[cpu].enter() {
            self.cores.borrow_mut()[cpu].forget(&Forget::Everything);
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
            });
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

    /// Changes pages and flushes them. CPUs that have the space loaded have forgotten, or do not use it.
    fn edit(&self, cpu: usize, asked: &Asked, messengers: &[&dyn Messenger]) {
        let &Asked {
            space,
            ref ranges,
            tables,
            global,
        } = asked;
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
            self.global_tables
                .update(|version| version + u32::from(global));
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
            assert!(
                seen.all(|&seen| seen == now),
                "tables of global pages on {cpu} after a flush"
            );
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
    Flush {
        cpu: usize,
        asked: Asked,
        way: u8,
        refuses: bool,
        handlers: Vec<(usize, Asked)>,
    },
}

fn asked() -> impl Strategy<Value = Asked> {
    let ranges = prop::collection::vec((0..PAGES, 1..3u64), 1..4);
    (0..SPACES, ranges, any::<bool>(), prop::bool::weighted(0.3)).prop_map(
        |(space, ranges, tables, global)| Asked {
            space,
            ranges,
            tables,
            global,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = || 0..CPUS;
    let handlers = prop::collection::vec((0..CPUS, asked()), 0..3);
    prop_oneof![
        6 => (cpu(), prop::option::weighted(0.9, 0..SPACES)).prop_map(|(cpu, to)| Step::Switch(cpu, to)),
        12 => (cpu(), 0..PAGES).prop_map(|(cpu, page)| Step::Touch(cpu, page)),
        6 => (cpu(), 0..PAGES).prop_map(|(cpu, page)| Step::TouchGlobal(cpu, page)),
        2 => cpu().prop_map(Step::Lazy),
        2 => cpu().prop_map(Step::Resume),
        2 => cpu().prop_map(Step::Preempt),
        1 => cpu().prop_map(Step::Offline),
        8 => (cpu(), asked(), 0..6u8, prop::bool::weighted(0.3), handlers).prop_map(
            |(cpu, asked, way, refuses, handlers)| Step::Flush { cpu, asked, way, refuses, handlers }
        ),
    ]
}

/// Runs a program on a world at rest: with identifiers of so many bits, if any.
fn with_world<T>(bits: Option<u32>, program: impl FnOnce(&World<'_>) -> T) -> T {
    let cpus = [const { Cpu::new() }; CPUS];
    let inboxes = [const { AtomicU64::new(0) }; inbox_words(CPUS)];
    let holders = [const { Holder::new() }; CPUS];
    let mut memory = [0; Allocator::words(5)];
    let allocator = Allocator::new(bits.unwrap_or(BITS), &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &holders).filter(|_| bits.is_some());
    let shootdown = Shootdown::new(&cpus, &inboxes, identifiers, 10).unwrap();
    let masks = [const { [const { AtomicU64::new(0) }; Space::words(CPUS)] }; SPACES];
    let spaces: Vec<Space<'_>> = (masks.iter().zip(1..))
        .map(|(mask, number)| Space::new(number, Pa::new(number << 12), mask))
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
    let hypercall = Hypercall {
        encoder: FlushEncoder::default(),
        cost: 15,
        calls: world,
    };
    let deferred = Deferred::new(|cpu| world.flags.get(cpu));
    let broadcast = amd::InvlpgbMessenger {
        most: 1,
        cost: 2,
        hardware: world,
    };
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
                    world.cores.borrow_mut()[cpu].forget(&Forget::All);
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
            Step::Flush {
                cpu,
                ref asked,
                way,
                refuses,
                ref handlers,
            } => {
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
        self.here(cpu)
            .flush(space, &of(what, global), messengers, &actions);
    }

    fn flush_ranges(&self, cpu: usize, ranges: &[Stale]) {
        self.flush(cpu, What::Ranges(ranges), false, &[]);
    }

    /// What was forgotten since, on which CPU, and how often some were interrupted.
    fn take(&self) -> (Vec<(usize, Forget)>, u64) {
        (self.forgets.take(), self.interrupts.take())
    }
}

fn space(id: u16) -> Forget {
    Forget::Space(id)
}

fn part(id: u16, range: Stale) -> Forget {
    let global = false;
    Forget::Range { id, range, global }
}

fn with_global(id: u16, range: Stale) -> Forget {
    let global = true;
    Forget::Range { id, range, global }
}

#[test]
fn a_cpu_that_is_told_forgets_what_is_named_and_one_that_comes_back_all() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = range(3, 1, false);
        world.flush_ranges(0, &[page]);
        let all = |what: Forget| vec![(1, what), (2, what), (0, what)];
        assert_eq!(world.take(), (all(part(1, page)), 1));
        // One is elsewhere for one flush, one is lazy for another.
        world.switch(1, Some(1));
        world.flush_ranges(0, &[page]);
        world.here(2).be_lazy();
        world.switch(1, Some(0));
        let first = vec![(2, part(1, page)), (0, part(1, page)), (1, space(1))];
        assert_eq!(world.take(), (first, 1));
        world.flush_ranges(0, &[page]);
        let second = vec![(1, part(1, page)), (0, part(1, page))];
        assert_eq!(world.take(), (second, 1));
        // Tables have gone: the lazy one is told, and has missed something.
        let tables = range(3, 1, true);
        world.flush_ranges(0, &[tables]);
        let third = vec![(1, part(1, tables)), (2, space(1)), (0, part(1, tables))];
        assert_eq!(world.take(), (third, 1));
        world.here(2).resume(&world.spaces[0], &On(2, world));
        assert_eq!(world.take(), (vec![], 0));
    });
}

#[test]
fn what_was_forgotten_of_a_space_is_itself_forgotten() {
    with_world(Some(5), |world| {
        world.switch(0, Some(0));
        world.flush_ranges(0, &[range(3, 1, false)]);
        assert_eq!(world.take().0.len(), 1);
        (1..5).for_each(|other| world.switch(0, Some(other)));
        world.switch(0, Some(0));
        assert_eq!(world.take().0, []);
        // More spaces than a CPU has views.
        (1..8).for_each(|other| world.switch(0, Some(other)));
        world.flush_ranges(0, &[range(3, 1, false)]);
        world.switch(0, Some(0));
        assert_eq!(world.take().0, [(0, space(1))]);
    });
}

#[test]
fn more_ranges_than_a_message_holds_are_the_whole_space() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let most: Vec<_> = (0..16).map(|page| range(page, 1, false)).collect();
        world.flush_ranges(0, &most);
        assert_eq!(world.take().0.len(), 32);
        world.flush_ranges(0, &[&most[..], &most[..1]].concat());
        assert_eq!(world.take().0, [(1, space(1)), (0, space(1))]);
        world.flush_ranges(0, &[]);
        assert_eq!(world.take(), (vec![], 0));
    });
}

#[test]
fn a_batch_is_all_that_was_added_to_it() {
    let root = Pa::new(0x1000);
    let most: Vec<_> = (0..16).map(|page| range(page, 1, false)).collect();
    let mut batch = Batch::new();
    batch.add(&of(What::Ranges(&[]), true));
    assert!(batch.is_empty() && !batch.flush(root, 7).global);
    batch.add(&of(What::Ranges(&most[..9]), false));
    batch.add(&of(What::Ranges(&most[9..]), false));
    let all = Invalidation {
        id: 7,
        ..of(What::Ranges(&most), false)
    };
    assert_eq!(batch.flush(root, 7), all);
    // One that is global, and one too many.
    batch.add(&of(What::Ranges(&most[..1]), true));
    assert_eq!(batch.take().flush(root, 0), of(What::Everything, true));
    assert!(batch.is_empty());
    batch.add(&of(What::Ranges(&most[..1]), true));
    batch.add(&of(What::Everything, false));
    assert_eq!(batch.take().flush(root, 0), of(What::Everything, true));
    batch.add(&of(What::Everything, false));
    assert_eq!(batch.flush(root, 0), of(What::Everything, false));
}

#[test]
fn a_messenger_is_used_where_it_costs_less_than_interrupts() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let hypercall = Hypercall {
            encoder: FlushEncoder::default(),
            cost: 15,
            calls: world,
        };
        let page = [range(3, 1, false)];
        let flush = || {
            world.flush(0, What::Ranges(&page), false, &[&hypercall]);
            (world.hypercalls.take(), world.take().1)
        };
        assert_eq!(flush(), (0, 1));
        world.switch(2, Some(0));
        assert_eq!(flush(), (1, 0));
        // One that the hypervisor has given no number is interrupted; the hypercall names the others.
        world.switch(3, Some(0));
        assert_eq!(flush(), (1, 1));
        // None has it loaded: none is told.
        (1..4).for_each(|cpu| world.switch(cpu, None));
        assert_eq!(flush(), (0, 0));
    });
}

// ---- What is global ----

#[test]
fn what_is_global_is_forgotten_on_every_cpu() {
    with_world(Some(BITS), |world| {
        // One has the space loaded, one another, one is lazy, one has none, and one has missed a flush.
        world.switch(0, Some(0));
        world.switch(1, Some(1));
        world.switch(2, Some(0));
        world.switch(4, Some(0));
        let page = range(3, 1, false);
        world.here(2).be_lazy();
        world.flush_ranges(0, &[page]);
        world.take();
        world.flush(0, What::Ranges(&[page]), true, &[]);
        let here = with_global(1, page);
        let told = vec![
            (1, here),
            (2, space(1)),
            (2, here),
            (3, here),
            (4, here),
            (0, here),
        ];
        assert_eq!(world.take(), (told, 1));
        // What the second has of the space under its identifier goes when it loads it.
        world.switch(1, Some(0));
        world.switch(4, Some(0));
        assert_eq!(world.take().0, [(1, space(1))]);
        world.flush(0, What::Everything, true, &[]);
        let all = [1, 2, 3, 4, 0].map(|cpu| (cpu, Forget::Everything));
        assert_eq!(world.take(), (all.into(), 1));
        // Table descriptors above global leaves are cached under any identifier.
        world.flush(0, What::Ranges(&[range(3, 1, true)]), true, &[]);
        assert_eq!(world.take(), (all.into(), 1));
    });
}

#[test]
fn a_cpu_that_is_offline_is_told_of_nothing_and_forgets_everything_when_it_comes() {
    with_world(Some(BITS), |world| {
        world.switch(0, Some(0));
        (1..4).for_each(|cpu| world.here(cpu).go_offline(&On(cpu, world)));
        world.flush(0, What::Everything, true, &[]);
        let told = vec![(4, Forget::Everything), (0, Forget::Everything)];
        assert_eq!(world.take(), (told, 1));
        world.here(2).go_online(&On(2, world));
        assert_eq!(world.take().0, [(2, Forget::Everything)]);
        world.flush(0, What::Everything, true, &[]);
        assert_eq!(world.take().0.len(), 3);
    });
}

// ---- Flushes in handlers ----

/// k01: the handler's message was written over that of the flush that it had interrupted, and a CPU kept the page.
#[test]
fn a_flush_in_a_handler_leaves_the_one_that_it_interrupts_alone() {
    with_world(None, |world| {
        world.switch(1, Some(0));
        world.switch(2, Some(1));
        world.take();
        let page = |space, page| Asked {
            space,
            ranges: vec![(page, 1)],
            tables: false,
            global: false,
        };
        world.handlers.borrow_mut().push((0, page(1, 4)));
        world.edit(0, &page(0, 3), &[]);
        let told = vec![(2, Forget::Everything), (1, part(0, range(3, 1, false)))];
        assert_eq!(world.take(), (told, 2));
        // Nothing is under way any more.
        world.edit(0, &page(1, 4), &[]);
        assert_eq!(world.take().0.len(), 1);
    });
}

#[test]
fn handlers_may_flush_in_handlers() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = |page| Asked {
            space: 0,
            ranges: vec![(page, 1)],
            tables: false,
            global: false,
        };
        // The last is made first.
        let handlers = [(1, page(5)), (0, page(4)), (2, page(3))];
        world.handlers.borrow_mut().extend(handlers);
        world.edit(0, &page(2), &[]);
        let (told, interrupts) = world.take();
        assert_eq!(interrupts, 4);
        let doorbells = told.iter().filter(|(_, what)| *what == Forget::Everything);
        assert!(doorbells.count() >= 2);
        // The innermost makes up for those around it.
        let here: Vec<_> = told.iter().filter(|(cpu, _)| *cpu == 0).collect();
        assert_eq!(here, [&(0, space(1))]);
        // What it has missed for the doorbell's sake a CPU makes up for with the next flush, and no more after that.
        world.edit(0, &page(1), &[]);
        world.take();
        world.edit(0, &page(1), &[]);
        let one = part(1, range(1, 1, false));
        assert_eq!(world.take().0, [(1, one), (2, one), (0, one)]);
    });
}

#[test]
fn tables_that_were_cut_off_wait_for_software_that_walks_them() {
    let platform = Threads::new(16, 12, 1);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    let (page, table) = (Span::new(Va::new(0), PAGE), Span::new(Va::new(0), 1 << 21));
    let attrs = Attrs::USER_DATA;
    space.map(page.unwrap(), Pa::new(0), attrs).unwrap();
    let walk = SharedPlatform::enter(&platform);
    let tables = platform.tables();
    let mut gather = space.gather();
    let unmapped = gather.unmap(table.unwrap(), |_| ControlFlow::Continue(()));
    assert!(unmapped.unwrap().is_done());
    let deferred = DeferredReclaim::from(gather.issue().complete())
        .try_complete()
        .err()
        .unwrap();
    assert_eq!(platform.tables(), tables);
    drop(walk);
    deferred.try_complete().ok().unwrap().finish(|_| ());
    assert!(platform.tables() < tables);
}

// ---- Instructions ----

/// With `x0`, or none.
#[test]
fn instructions_are_those_of_an_assembler() {
    let words = [
        (Op::Vmalle1, 31, 0xd508_831f),
        (Op::Vae1, 0, 0xd508_8320),
        (Op::Aside1, 0, 0xd508_8340),
        (Op::Vaae1, 0, 0xd508_8360),
        (Op::Vale1, 0, 0xd508_83a0),
        (Op::Vaale1, 0, 0xd508_83e0),
        (Op::Rvae1, 0, 0xd508_8220),
        (Op::Rvaae1, 0, 0xd508_8260),
        (Op::Rvale1, 0, 0xd508_82a0),
        (Op::Rvaale1, 0, 0xd508_82e0),
        (Op::Vmalls12e1, 31, 0xd50c_83df),
        (Op::Ipas2e1, 0, 0xd50c_8020),
        (Op::Ipas2le1, 0, 0xd50c_80a0),
        (Op::Ripas2e1, 0, 0xd50c_8040),
        (Op::Ripas2le1, 0, 0xd50c_80c0),
        (Op::Alle1, 31, 0xd50c_839f),
        (Op::Alle2, 31, 0xd50c_831f),
        (Op::Vae2, 0, 0xd50c_8320),
        (Op::Vale2, 0, 0xd50c_83a0),
        (Op::Rvae2, 0, 0xd50c_8220),
        (Op::Rvale2, 0, 0xd50c_82a0),
    ];
    for (op, register, word) in words {
        assert_eq!(op.word(register), word, "{op:?}");
        assert_eq!(op.is_everything(), register == 31, "{op:?}");
    }
    // The same of this processor alone.
    let words = [
        (Op::Vmalle1, 31, 0xd508_871f),
        (Op::Vae1, 0, 0xd508_8720),
        (Op::Aside1, 0, 0xd508_8740),
        (Op::Vale1, 0, 0xd508_87a0),
        (Op::Rvae1, 0, 0xd508_8620),
        (Op::Vmalls12e1, 31, 0xd50c_87df),
        (Op::Ipas2e1, 0, 0xd50c_8420),
        (Op::Ripas2e1, 0, 0xd50c_8440),
        (Op::Alle2, 31, 0xd50c_871f),
        (Op::Vae2, 0, 0xd50c_8720),
        (Op::Rvae2, 0, 0xd50c_8620),
    ];
    for (op, register, word) in words {
        assert_eq!(op.local_word(register), word, "{op:?}");
    }
}

const ARM: arm64::Encoder = arm64::Encoder {
    regime: Regime::El1,
    page_shift: 12,
    ranges: true,
    wide: false,
};

fn instructions(encoder: arm64::Encoder, flush: &Invalidation<'_>) -> Vec<Instruction> {
    let mut all = Vec::new();
    encoder.encode(flush, |one| all.push(one));
    all
}

#[test]
fn a_flush_of_stage_2_waits_once_and_forgets_once_what_was_combined() {
    let stage2 = arm64::Encoder {
        regime: Regime::Stage2,
        ..ARM
    };
    let combined = Instruction::Tlbi(Tlbi {
        op: Op::Vmalle1,
        operand: 0,
    });
    for count in [1, 16] {
        let ranges: Vec<_> = (0..count).map(|page| range(3 * page, 1, true)).collect();
        let all = instructions(stage2, &of(What::Ranges(&ranges), false));
        let (first, last) = all.split_at(count as usize);
        let by_address =
            |one: &Instruction| matches!(one, Instruction::Tlbi(one) if one.op == Op::Ipas2e1);
        assert!(first.iter().all(by_address), "{first:?}");
        assert_eq!(last, [Instruction::Dsb, combined]);
    }
    for global in [false, true] {
        let all = instructions(stage2, &of(What::Everything, global));
        let both = Tlbi {
            op: Op::Vmalls12e1,
            operand: 0,
        };
        assert_eq!(all, [Instruction::Tlbi(both)]);
        assert_eq!(instructions(stage2, &of(What::Ranges(&[]), global)), []);
    }
}

/// The pages that an instruction names, and its hint, from the manual's fields.
fn named(encoder: &arm64::Encoder, tlbi: &Tlbi) -> (std::ops::Range<u64>, u64) {
    let bits = |low: u32, count: u32| tlbi.operand >> low & ((1 << count) - 1);
    let granule = u64::from((encoder.page_shift - 10) / 2);
    if tlbi.op.is_range() {
        assert_eq!(bits(46, 2), granule);
        let base = if encoder.wide { 16 } else { encoder.page_shift };
        let first = bits(0, 37) << base >> encoder.page_shift;
        let pages = (bits(39, 5) + 1) << (5 * bits(44, 2) + 1);
        (first..first + pages, bits(37, 2))
    } else {
        let first = bits(0, 44) << 12 >> encoder.page_shift;
        let hint = bits(44, 4);
        assert!(hint == 0 || hint >> 2 == granule);
        (first..first + 1, hint & 3)
    }
}

proptest! {
    #[test]
    fn instructions_name_each_page_once_and_no_other(
        page_shift in prop::sample::select(vec![12u32, 14, 16]),
        (ranges, wide, tables, global) in any::<(bool, bool, bool, bool)>(),
        regime in prop::sample::select(vec![Regime::El1, Regime::El2, Regime::Stage2]),
        height in prop::option::of(0..2u8),
        (first, count) in (0..1u64 << 20, prop_oneof![1..200u64, 1..1u64 << 24]),
        id in any::<u16>(),
    ) {
        let encoder = arm64::Encoder { regime, page_shift, ranges, wide };
        let stage2 = regime == Regime::Stage2;
        let stride = u64::from(page_shift - 3) * u64::from(height.unwrap_or(0));
        let count = if ranges { count } else { count % 2000 + 1 };
        let (first, pages) = (first << stride, (count >> stride).max(1) << stride);
        let range = Stale {
            first: first << page_shift,
            last: ((first + pages) << page_shift) - 1,
            level: height.map(Level::new),
            tables,
        };
        let mut all = instructions(encoder, &Invalidation { id, ..of(What::Ranges(&[range]), global) });
        if stage2 {
            all.truncate(all.len() - 2);
        }
        let mut next = first;
        for one in &all {
            let Instruction::Tlbi(tlbi) = one else {
                panic!("a wait in the midst of it");
            };
            let name = format!("{:?}", tlbi.op);
            // Leaves of all ASIDs, of one, or of a guest's physical addresses.
            prop_assert_eq!(name.contains("le"), !tables);
            prop_assert_eq!(name.ends_with('2'), regime == Regime::El2);
            prop_assert_eq!(name.to_lowercase().contains("ipas2"), stage2);
            prop_assert_eq!(name.to_lowercase().contains("vaa"), global && regime == Regime::El1);
            prop_assert_eq!(tlbi.operand >> 48, if regime != Regime::El1 || global { 0 } else { u64::from(id) });
            let (named, hint) = named(&encoder, tlbi);
            prop_assert_eq!(hint, height.map_or(0, |height| 3 - u64::from(height)));
            prop_assert_eq!(named.start, next);
            // An instruction for one leaf names all of it.
            next = if tlbi.op.is_range() { named.end } else { next + (1 << stride) };
        }
        prop_assert_eq!(next, first + pages);
        // A range is four digits and an odd page; those that cannot start here, and many times the largest, come on
        // top.
        let most = if ranges { 5 + pages / (1 << 21) + if wide { 15 } else { 0 } } else { pages >> stride };
        prop_assert!(all.len() as u64 <= most, "{} instructions for {} pages", all.len(), pages);
    }

    #[test]
    fn a_broadcast_of_amd_names_each_page_once(
        ranges in prop::collection::vec((0..1u64 << 36, 1..700u64, any::<bool>(), any::<bool>()), 1..8),
        most in prop_oneof![Just(0u16), 1..600u16],
        id in 0..4096u16,
        global in any::<bool>(),
    ) {
        let what: Vec<Stale> = (ranges.iter())
            .map(|&(first, pages, large, tables)| {
                let shift = if large { 21 } else { 12 };
                Stale {
                    first: first << shift,
                    last: ((first + pages) << shift) - 1,
                    level: large.then(|| Level::new(1)),
                    tables,
                }
            })
            .collect();
        let mut seen = Vec::new();
        for Invlpgb { rax, ecx, edx } in broadcast(most, &Invalidation { id, ..of(What::Ranges(&what), global) }) {
            prop_assert_eq!(edx, if global { 0 } else { u32::from(id) << 16 });
            prop_assert_eq!(rax & 0xfff & !16, if global { 9 } else { 3 });
            let (more, large) = (ecx & 0xffff, ecx >> 31 != 0);
            prop_assert!(more <= u32::from(most) && ecx & 0x7fff_0000 == 0);
            let shift = if large { 21 } else { 12 };
            prop_assert_eq!(rax & ((1 << shift) - 1) & !0xfff, 0);
            let first = rax >> shift;
            let one = (first, u64::from(more) + 1, large, rax & 16 == 0);
            match seen.last_mut() {
                Some((its, pages, size, tables))
                    if *its + *pages == first && (*size, *tables) == (large, one.3) && *pages % (u64::from(most) + 1) == 0 =>
                {
                    *pages += one.1;
                }
                _ => seen.push(one),
            }
        }
        let pages = |list: &[(u64, u64, bool, bool)]| -> u64 { list.iter().map(|one| one.1).sum() };
        prop_assert_eq!(pages(&seen), pages(&ranges));
        prop_assert_eq!(seen.len() <= ranges.len(), true);
    }
}

fn broadcast(most: u16, flush: &Invalidation<'_>) -> Vec<Invlpgb> {
    let message = Message {
        from: 0,
        flush: *flush,
    };
    let hardware = ();
    let mut all = Vec::new();
    let cost = 0;
    amd::InvlpgbMessenger {
        most,
        cost,
        hardware,
    }
    .encode(&message, |one| all.push(one));
    all
}

/// Blocks of which nothing is known may be 512 pages each: an address invalidates one leaf.
#[test]
fn addresses_are_2_mib_apart_only_if_the_leaves_are_as_large() {
    let two = Stale {
        level: None,
        ..range(512, 1024, true)
    };
    let strides = |level| -> Vec<(bool, u32)> {
        let range = Stale { level, ..two };
        let all = broadcast(1023, &of(What::Ranges(&[range]), false));
        all.iter()
            .map(|one| (one.ecx >> 31 != 0, one.ecx & 0xffff))
            .collect()
    };
    assert_eq!(strides(None), [(false, 1023)]);
    assert_eq!(strides(Some(Level::PAGE)), [(false, 1023)]);
    assert_eq!(strides(Some(Level::new(1))), [(true, 1)]);
}

/// i01: no messenger included what is global.
#[test]
fn everything_includes_what_is_global() {
    let flush = Invalidation {
        id: 5,
        ..of(What::Everything, true)
    };
    let global = Invlpgb {
        rax: 1 << 3,
        ecx: 0,
        edx: 0,
    };
    assert_eq!(broadcast(7, &flush), [global]);
    let mut page = [0; PAGE_WORDS];
    let mut set = VpSet::EMPTY;
    set.insert(1);
    let encoder = FlushEncoder::default();
    encoder
        .encode(&mut page, Targets::Set(&set), &flush)
        .unwrap();
    assert_eq!(Flags::from_bits_truncate(page[1]), Flags::ALL_SPACES);
    let all = Tlbi {
        op: Op::Vmalle1,
        operand: 0,
    };
    assert_eq!(instructions(ARM, &flush), [Instruction::Tlbi(all)]);

    let flush = Invalidation {
        global: false,
        ..flush
    };
    let one_space = Invlpgb {
        rax: 1 << 1,
        ecx: 0,
        edx: 5 << 16,
    };
    assert_eq!(broadcast(7, &flush), [one_space]);
    encoder
        .encode(&mut page, Targets::Set(&set), &flush)
        .unwrap();
    assert_eq!(Flags::from_bits_truncate(page[1]), Flags::NON_GLOBAL_ONLY);
    let of_space = Instruction::Tlbi(arm64::Encoder::space(5));
    assert_eq!(instructions(ARM, &flush), [of_space]);
}

/// i02: a page that is global (as `Attrs::KERNEL_DATA` is) was spared by an INVLPGB with a PCID and without bit 3.
#[test]
fn a_global_page_is_forgotten() {
    let page = [Stale {
        level: Some(Level::PAGE),
        ..range(5, 1, false)
    }];
    let flush = Invalidation {
        id: 5,
        ..of(What::Ranges(&page), true)
    };
    let told = Invlpgb {
        rax: 0x5000 | 1 << 4 | 1 << 3 | 1,
        ecx: 0,
        edx: 0,
    };
    assert_eq!(broadcast(7, &flush), [told]);
    let mut input = [0; PAGE_WORDS];
    let mut set = VpSet::EMPTY;
    set.insert(1);
    FlushEncoder::default()
        .encode(&mut input, Targets::Set(&set), &flush)
        .unwrap();
    assert_eq!(Flags::from_bits_truncate(input[1]), Flags::ALL_SPACES);
    let all_asids = Tlbi {
        op: Op::Vaale1,
        operand: 1 << 46 | 3 << 44 | 5,
    };
    assert_eq!(instructions(ARM, &flush), [Instruction::Tlbi(all_asids)]);
}
